"""`drafttrain bench-server`: a load test of one or two OpenAI-compatible servers."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import httpx
import torch
from rich.markup import escape

from drafttrain.credentials import redact
from drafttrain.data.backends import key_headers
from drafttrain.environment import describe_environment
from drafttrain.errors import UserError
from drafttrain.evaluation.metrics import percentiles
from drafttrain.evaluation.suites import Question, load_suite
from drafttrain.files import Json, write_json
from drafttrain.folders import inputs_of, output_file
from drafttrain.outcome import command_line, conclude
from drafttrain.progress import Progress
from drafttrain.reports.output import table_of, wide_console
from drafttrain.serving.client import Answer, Server, ask, connect, read_metrics, speculation

LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "latency_ms": "whole"}
Send = Callable[[int], Awaitable[Answer]]  # sends the request of this number
WORKLOAD = (
    "suite",
    "requests",
    "seconds",
    "timeout",
    "max_tokens",
    "temperature",
    "ignore_eos",
    "warm_up",
    "seed",
)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 1 if every request of a server failed. Raises UserError for a
    server that does not answer.
    """
    steps = steps_of(args)
    output = output_file(args.output, "bench-server", inputs_of(args))
    suite = load_suite(args.suite, args.chat_template_kwargs)
    partial = output_file(output.with_name(f"{output.name}.partial"), "bench-server")

    def results(servers: dict[str, Json]) -> Json:
        complete = (
            len(servers) == 2 and len({len(server["cells"]) for server in servers.values()}) == 1
        )
        return {
            **describe_environment(torch.device("cpu")),
            "command": command_line(),
            **({"note": args.note} if args.note else {}),
            "workload": {
                **{key: vars(args)[key] for key in WORKLOAD},
                "suite_digest": suite.digest,
            },
            "servers": servers,
            "comparison": compare(*servers.values()) if complete else [],
        }

    def keep(servers: dict[str, Json]) -> None:
        write_json(partial, results(servers))

    servers = asyncio.run(measure(args, steps, suite.questions, keep))
    write_json(output, results(servers))
    partial.unlink(missing_ok=True)
    print_results(results(servers))
    conclude(results(servers), [output])
    return int(
        any(all(cell["completed"] == 0 for cell in server["cells"]) for server in servers.values())
    )


def steps_of(args: argparse.Namespace) -> list[dict[str, float]]:
    """The steps of the load test as in the results, {concurrency} or {request_rate}."""
    key = "request_rate" if args.request_rate else "concurrency"
    return [{key: number} for number in args.request_rate or args.concurrency or (1, 2, 4, 8)]


async def measure(
    args: argparse.Namespace,
    steps: Sequence[dict[str, float]],
    questions: Sequence[Question],
    keep: Callable[[dict[str, Json]], None],
) -> dict[str, Json]:
    """Runs every step on every server, alternating. Returns the `servers` of the results, by name
    (url, url2).

    keep: called with those so far after each step, so that an interruption loses only the running
    one.
    """
    body = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    if args.ignore_eos:
        body |= {"ignore_eos": True}
    else:
        body |= {}
    bodies = [{**question.request(), **body} for question in questions]
    timeout = httpx.Timeout(args.timeout, connect=min(10.0, args.timeout))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=timeout, limits=limits) as client:
        servers = {"url": await connect(client, args.url, args.model, _headers(args))}
        if args.url2:
            servers["url2"] = await connect(client, args.url2, args.model2, _headers(args))
        found: dict[str, Json] = {
            name: {"url": redact(server.url), "model": server.model, "cells": []}
            for name, server in servers.items()
        }
        for server in servers.values():
            for number in range(args.warm_up):
                answer = await ask(client, server, bodies[number % len(bodies)], args.timeout)
                if answer.error == "connect":
                    raise UserError(
                        f"url={server.url!r} does not answer ({answer.detail}); start the server first"
                    )
        with Progress("asking", len(steps) * len(servers), "steps") as meter:
            for number, step in enumerate(steps):
                # Steps use different prompts because servers cache prefixes.
                shifted = [
                    bodies[(number * args.requests + i) % len(bodies)] for i in range(args.requests)
                ]
                order = list(servers.items())
                for name, server in order[::-1] if number % 2 else order:
                    cell = await run_step(args, client, server, step, shifted)
                    found[name]["cells"].append(cell)
                    keep(found)
                    failed = "".join(f", {count} {kind}" for kind, count in cell["errors"].items())
                    meter.advance(note=f"{cell['tokens_per_second']:.1f} tokens/s{failed}")
    return found


def _headers(args: argparse.Namespace) -> dict[str, str]:
    if not args.api_key_env:
        return {}
    if args.api_key_env not in os.environ:
        raise UserError(
            f"api-key-env={args.api_key_env!r}: no such environment variable; set it to the key"
        )
    return key_headers(args.api_key_env)


async def run_step(
    args: argparse.Namespace,
    client: httpx.AsyncClient,
    server: Server,
    step: dict[str, float],
    bodies: Sequence[Json],
) -> Json:
    """Runs one step on one server; returns its setting, `figures`, and `speculation` if the
    Prometheus page has it.
    """

    async def send(number: int) -> Answer:
        return await ask(client, server, bodies[number], args.timeout)

    before = await read_metrics(client, server)
    start = time.perf_counter()
    (value,) = step.values()
    answers = await (_open_loop if "request_rate" in step else _closed_loop)(args, value, send)
    seconds = time.perf_counter() - start
    found = speculation(before, await read_metrics(client, server))
    return {**step, **figures(answers, seconds), **({"speculation": found} if found else {})}


async def _closed_loop(args: argparse.Namespace, concurrency: float, send: Send) -> list[Answer]:
    """Keeps a constant number of requests in flight."""
    numbers = iter(range(args.requests))
    deadline = time.perf_counter() + args.seconds
    answers: list[Answer] = []

    async def worker() -> None:
        for number in numbers:
            if time.perf_counter() >= deadline and answers:
                return
            answers.append(await send(number))

    await asyncio.gather(*(worker() for _ in range(min(int(concurrency), args.requests))))
    return answers


async def _open_loop(args: argparse.Namespace, rate: float, send: Send) -> list[Answer]:
    """Sends requests at the times of a Poisson process, whether or not earlier ones have ended."""
    gaps = random.Random(args.seed)
    start = time.perf_counter()
    due = 0.0
    tasks = []
    for number in range(args.requests):
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(send(number)))
        due += gaps.expovariate(rate)
        if due >= args.seconds:
            break
    return list(await asyncio.gather(*tasks))


def figures(answers: Sequence[Answer], seconds: float) -> Json:
    """Computes the figures of a step.

    Returns:
        requests, completed; errors: counts by kind, with an example of each in error_examples.
        seconds: wall-clock of the step. tokens: of completed answers; tokens_per_second,
            requests_per_second: over the wall-clock.
        ttft_ms: sent to first text. tpot_ms: mean time of each later token, per request. itl_ms:
            gaps between pieces of text, over all requests. latency_ms: sent to end. Each with p50,
            p95, p99.
        tokens_per_chunk: tokens per piece of text; above 1 if a server sends all accepted tokens of
            a round at once.
        tokens_counted: the server counts tokens itself; else each piece counts as one, which is
            wrong with speculation.
    """
    good = [answer for answer in answers if not answer.error]
    bad = [answer for answer in answers if answer.error]
    tokens = sum(answer.tokens for answer in good)
    chunks = sum(len(answer.chunks) for answer in good)
    gaps = [
        b - a for answer in good for a, b in zip(answer.chunks, answer.chunks[1:], strict=False)
    ]
    return {
        "requests": len(answers),
        "completed": len(good),
        "errors": dict(Counter(answer.error for answer in bad)),
        "error_examples": {answer.error: answer.detail for answer in bad},
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 3),
        "requests_per_second": round(len(good) / seconds, 4),
        "ttft_ms": percentiles([answer.ttft for answer in good]),
        "tpot_ms": percentiles([answer.tpot for answer in good if answer.tpot is not None]),
        "itl_ms": percentiles(gaps),
        "latency_ms": percentiles([answer.end for answer in good]),
        "tokens_per_chunk": round(tokens / chunks, 3) if chunks else 0.0,
        "tokens_counted": bool(good) and all(answer.counted for answer in good),
    }


def compare(first: Json, second: Json) -> list[Json]:
    """Compares two servers per step, so that above 1 the first is better; None if one completed
    nothing.

    Returns:
        The ratio of token rates, first over second; and of median latencies, second over first.
    """

    def ratio(part: float, whole: float) -> float | None:
        if part and whole:
            return round(part / whole, 4)
        return None

    rows = []
    for one, two in zip(first["cells"], second["cells"], strict=True):
        row: Json = {key: one[key] for key in ("concurrency", "request_rate") if key in one}
        row["tokens_per_second"] = ratio(one["tokens_per_second"], two["tokens_per_second"])
        row |= {
            key: ratio(two[key]["p50"], one[key]["p50"]) for key in LATENCIES if key != "itl_ms"
        }
        rows.append(row)
    return rows


def print_results(results: Json) -> None:
    """Prints a table per server, and the comparison."""
    console = wide_console()
    latencies = [f"{label} ms\np50 / p95 / p99" for label in LATENCIES.values()]
    headings = ["load", "done", "errors", "tokens/s", *latencies, "accepted\nlength"]
    for name, server in results["servers"].items():
        rows = []
        for cell in server["cells"]:
            errors = ", ".join(f"{count} {kind}" for kind, count in cell["errors"].items()) or "0"
            length = cell.get("speculation", {}).get("accepted_length")
            times = [" / ".join(f"{v:.0f}" for v in cell[key].values()) for key in LATENCIES]
            cells = [
                _step(cell),
                str(cell["completed"]),
                errors,
                f"{cell['tokens_per_second']:.1f}",
                *times,
            ]
            rows.append([*cells, f"{length:.2f}" if length else "\u2013"])
        console.print(
            table_of(
                headings,
                rows,
                escape(f"{name}: {server['url']}, {server['model']}"),
                right=True,
            )
        )
        if not all(cell["tokens_counted"] for cell in server["cells"] if cell["completed"]):
            console.print("this server does not count tokens: each piece of text counts as one")
    if results["comparison"]:
        rows = []
        for row in results["comparison"]:
            ratios = (
                ratio for key, ratio in row.items() if key not in ("concurrency", "request_rate")
            )
            rows.append(
                [_step(row), *("\u2013" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)]
            )
        title = "url over url2 (above 1, url is better)"
        console.print(
            table_of(("load", "tokens/s", "TTFT", "TPOT", "whole"), rows, title, right=True)
        )


def _step(cell: Json) -> str:
    if "request_rate" in cell:
        return f"{cell['request_rate']:g}/s"
    return f"{cell['concurrency']} at once"
