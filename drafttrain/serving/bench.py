"""`drafttrain bench-server`: a load test of one or two OpenAI-compatible servers, or of an engine that it
starts with each number of drafted tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx
import torch
from rich.markup import escape

from drafttrain.credentials import redact
from drafttrain.environment import describe_environment
from drafttrain.errors import UserError
from drafttrain.evaluation.metrics import percentiles
from drafttrain.evaluation.resampling import FEWEST, paired_ratio
from drafttrain.evaluation.suites import Question, load_suite
from drafttrain.files import Json, scratch_folder, write_json
from drafttrain.folders import inputs_of, output_file
from drafttrain.outcome import command_line, conclude
from drafttrain.progress import Progress
from drafttrain.reports.output import table_of, wide_console
from drafttrain.serving import draft_lengths
from drafttrain.serving.client import (
    Answer,
    Samples,
    Server,
    ask,
    connect,
    read_metrics,
    speculation,
)

LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "latency_ms": "whole"}
Send = Callable[[int], Awaitable[Answer]]  # sends the request of this number
# Flags that the results name.
WORKLOAD = (
    "suite",
    "requests",
    "repeats",
    "seconds",
    "timeout",
    "max_tokens",
    "temperature",
    "ignore_eos",
    "warm_up",
    "seed",
)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 1 if every request of a server failed.

    Raises:
        UserError: a server that does not answer.
    """
    # As in the results: {concurrency} or {request_rate}.
    steps = [{"request_rate": number} for number in args.request_rate or ()]
    if not steps:
        steps = [{"concurrency": number} for number in args.concurrency or (1, 2, 4, 8)]
    output = output_file(args.output, "bench-server", inputs_of(args))
    suite = load_suite(args.suite, args.chat_template_kwargs)
    so_far = output_file(output.with_name(f"{output.name}.partial"), "bench-server")

    head: Json = {**describe_environment(torch.device("cpu")), "command": command_line()}
    if args.note:
        head["note"] = args.note
    workload = {key: vars(args)[key] for key in WORKLOAD}
    workload["repeats"] = repeats_of(args)
    head["workload"] = {**workload, "suite_digest": suite.digest}

    def results(servers: dict[str, Json]) -> Json:
        comparison = []
        for name, other in _pairs(servers):
            for row in compare(servers[name], servers[other]):
                comparison.append({"server": name, "over": other, **row})
        return {**head, "servers": servers, "comparison": comparison}

    def keep(servers: dict[str, Json]) -> None:
        write_json(so_far, results(servers))

    variable = args.api_key_env or ""
    if variable and variable not in os.environ:
        raise UserError(
            f"api-key-env={variable!r}: no such environment variable; set it to the key"
        )
    if args.drafter:
        servers = measure_lengths(args, steps, suite.questions, keep)
    else:
        named = {"url": connect(args.url, args.model, variable)}
        if args.url2:
            named["url2"] = connect(args.url2, args.model2, variable)
        servers = {}
        asyncio.run(measure(args, named, steps, suite.questions, servers, keep))
    content = results(servers)
    write_json(output, content)
    so_far.unlink(missing_ok=True)
    print_results(content)
    conclude(content, [output])
    for server in servers.values():
        if all(cell["completed"] == 0 for cell in server["cells"]):
            return 1
    return 0


def _pairs(servers: dict[str, Json]) -> list[tuple[str, str]]:
    """What is compared: url with url2, or each draft length with the first; both with all steps."""
    names = list(servers)
    pairs = [(name, names[0]) for name in names[1:]]
    if names == ["url", "url2"]:
        pairs = [("url", "url2")]
    whole = len(servers[names[0]]["cells"])
    return [pair for pair in pairs if all(len(servers[n]["cells"]) == whole for n in pair)]


def measure_lengths(
    args: argparse.Namespace,
    steps: Sequence[dict[str, float]],
    questions: Sequence[Question],
    keep: Callable[[dict[str, Json]], None],
) -> dict[str, Json]:
    """Serves the target with each draft length in turn and runs every step; as `measure`.

    Raises:
        UserError: the engine ends by itself, or does not take the drafter.
    """
    found: dict[str, Json] = {}
    with scratch_folder() as scratch:
        for name, server in draft_lengths.servers(args, scratch):
            print(f"starting {server}", flush=True)
            try:
                server.start()
                server.wait_until_ready()
                named = {name: connect(server.url, "", args.api_key_env or "")}
                asyncio.run(measure(args, named, steps, questions, found, keep))
            finally:
                server.stop(1.0)  # an interrupted command has little more
    return found


async def measure(
    args: argparse.Namespace,
    servers: dict[str, Server],
    steps: Sequence[dict[str, float]],
    questions: Sequence[Question],
    found: dict[str, Json],
    keep: Callable[[dict[str, Json]], None],
) -> None:
    """Runs every repeat of every step on every server, alternating.

    Args:
        servers: by their names in the results.
        found: the `servers` of the results, by name, which get these.
        keep: called with the servers so far after each repeat, so that an interruption loses only the
            running one.
    """
    body = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    if args.ignore_eos:
        body["ignore_eos"] = True
    bodies = [{**question.request(), **body} for question in questions]
    timeout = httpx.Timeout(args.timeout, connect=min(10.0, args.timeout))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=timeout, limits=limits) as client:
        for name, server in servers.items():
            found[name] = {"url": redact(server.url), "model": server.model, "cells": []}
            await _warm_up(args, client, server, bodies)

        count = repeats_of(args)
        with Progress("asking", len(steps) * count * len(servers), "parts") as meter:
            for number, step in enumerate(steps):
                loads = {name: Load(step) for name in servers}
                for name, load in loads.items():
                    load.before = await read_metrics(client, servers[name])
                for repeat in range(number * count, (number + 1) * count):
                    # Each repeat takes the next questions, and all servers get the same.
                    # Repeats use different prompts because servers cache prefixes.
                    first = repeat * args.requests
                    shifted = [bodies[(first + i) % len(bodies)] for i in range(args.requests)]
                    # Every other repeat starts with the other server, so that a drift of the
                    # machine favors none.
                    order = list(servers)
                    if repeat % 2:
                        order.reverse()
                    for name in order:
                        load = loads[name]
                        rate = await run_step(args, client, servers[name], load, shifted)
                        # Replaces the step's cell by one of all repeats so far.
                        found[name]["cells"][number:] = [load.cell()]
                        keep(found)
                        meter.advance(note=f"{rate:.1f} tokens/s{load.failures()}")


def repeats_of(args: argparse.Namespace) -> int:
    """How often each step runs on each server; several times for an interval of a comparison."""
    if args.repeats is not None:
        return args.repeats
    return FEWEST if args.url2 else 1


async def _warm_up(
    args: argparse.Namespace,
    client: httpx.AsyncClient,
    server: Server,
    bodies: Sequence[Json],
) -> None:
    for number in range(args.warm_up):
        answer = await ask(client, server, bodies[number % len(bodies)], args.timeout)
        if answer.error == "connect":
            raise UserError(
                f"url={server.url!r} does not answer ({answer.detail}); start the server first"
            )


@dataclass
class Load:
    """The repeats of a step on one server.

    Attributes:
        step: its setting in the results. before, after: the server's Prometheus page around them.
    """

    step: dict[str, float]
    before: Samples = field(default_factory=dict)
    after: Samples = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of completed answers, by repeat
    seconds: list[float] = field(default_factory=list)  # wall-clock of each repeat

    def cell(self) -> Json:
        """The step in the results.

        Returns:
            Its setting, the `figures` of all repeats, tokens and seconds of each repeat, and
            `speculation` if the Prometheus page has it.
        """
        cell = {**self.step, **figures(self.answers, sum(self.seconds))}
        # To the microsecond: the interval is computed from these, and a repeat may take milliseconds.
        rounded = [round(seconds, 6) for seconds in self.seconds]
        cell["repeats"] = {"tokens": self.tokens, "seconds": rounded}
        found = speculation(self.before, self.after)
        if found:
            cell["speculation"] = found
        return cell

    def failures(self) -> str:
        counts = Counter(answer.error for answer in self.answers if answer.error)
        return "".join(f", {count} {kind}" for kind, count in counts.items())


async def run_step(
    args: argparse.Namespace,
    client: httpx.AsyncClient,
    server: Server,
    load: Load,
    bodies: Sequence[Json],
) -> float:
    """Runs one repeat of a step on one server, and adds it to `load`; returns tokens per second."""

    async def send(number: int) -> Answer:
        return await ask(client, server, bodies[number], args.timeout)

    start = time.perf_counter()
    if "request_rate" in load.step:
        answers = await _open_loop(args, load.step["request_rate"], send)
    else:
        answers = await _closed_loop(args, load.step["concurrency"], send)
    load.seconds.append(time.perf_counter() - start)
    load.tokens.append(sum(answer.tokens for answer in answers if not answer.error))
    load.answers += answers
    load.after = await read_metrics(client, server)
    return load.tokens[-1] / load.seconds[-1]


async def _closed_loop(args: argparse.Namespace, concurrency: float, send: Send) -> list[Answer]:
    """Keeps a constant number of requests in flight."""
    numbers = iter(range(args.requests))
    deadline = time.perf_counter() + args.seconds
    answers: list[Answer] = []

    async def worker() -> None:
        # All workers draw from one iterator, so that each number is sent once.
        for number in numbers:
            if time.perf_counter() >= deadline and answers:
                return
            answers.append(await send(number))

    workers = [worker() for _ in range(min(int(concurrency), args.requests))]
    await asyncio.gather(*workers)
    return answers


async def _open_loop(args: argparse.Namespace, rate: float, send: Send) -> list[Answer]:
    """Sends requests at the times of a Poisson process, whether or not earlier ones have ended."""
    gaps = random.Random(args.seed)
    start = time.perf_counter()
    due = 0.0
    tasks = []
    for number in range(args.requests):
        # No earlier than due; if the loop is late, at once.
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
    per_chunk = 0.0
    if chunks:
        per_chunk = round(tokens / chunks, 3)
    gaps = []
    for answer in good:
        # Gaps of one answer: the time between two answers is no latency.
        gaps += [later - earlier for earlier, later in itertools.pairwise(answer.chunks)]
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
        "tokens_per_chunk": per_chunk,
        "tokens_counted": bool(good) and all(answer.counted for answer in good),
    }


def compare(first: Json, second: Json) -> list[Json]:
    """Compares two servers per step, so that above 1 the first is better.

    Returns:
        The ratio of token rates, first over second, with its 95 % interval over repeats; and of
        median latencies, second over first. None stands for a ratio of a server that completed
        nothing, and for the interval of a single repeat.
    """
    rows = []
    for one, two in zip(first["cells"], second["cells"], strict=True):
        row: Json = {}
        for key in ("concurrency", "request_rate"):
            if key in one:
                row[key] = one[key]
        row["tokens_per_second"] = _ratio(one["tokens_per_second"], two["tokens_per_second"])
        row["interval"] = None
        ours = one["repeats"]
        theirs = two["repeats"]
        # An interrupted run may have a repeat more of one server than of the other.
        count = min(len(ours["tokens"]), len(theirs["tokens"]))
        if count > 1 and sum(ours["tokens"]) and sum(theirs["tokens"]):
            # tokens / seconds over tokens / seconds, written as one quotient of products.
            rates = paired_ratio(
                (ours["tokens"][:count], theirs["seconds"][:count]),
                (ours["seconds"][:count], theirs["tokens"][:count]),
            )
            row["tokens_per_second"] = round(rates.value, 4)
            row["interval"] = [round(rates.low, 4), round(rates.high, 4)]
        for key in ("ttft_ms", "tpot_ms", "latency_ms"):
            row[key] = _ratio(two[key]["p50"], one[key]["p50"])
        rows.append(row)
    return rows


def _ratio(part: float, whole: float) -> float | None:
    if part and whole:
        return round(part / whole, 4)
    return None


def print_results(results: Json) -> None:
    """Prints a table per server, and the comparison."""
    console = wide_console()
    headings = ["load", "done", "errors", "tokens/s"]
    headings += [f"{label} ms\np50 / p95 / p99" for label in LATENCIES.values()]
    headings.append("accepted\nlength")
    for name, server in results["servers"].items():
        rows = [_row(cell) for cell in server["cells"]]
        title = escape(f"{name}: {server['url']}, {server['model']}")
        console.print(table_of(headings, rows, title, right=True))
        if not all(cell["tokens_counted"] for cell in server["cells"] if cell["completed"]):
            console.print("this server does not count tokens: each piece of text counts as one")

    tables: dict[str, list[list[str]]] = {}  # rows by pair of servers
    for row in results["comparison"]:
        cells = [_step(row)]
        for key in ("tokens_per_second", "ttft_ms", "tpot_ms", "latency_ms"):
            cells.append("\u2013" if row[key] is None else f"{row[key]:.2f}x")
        if row["interval"]:
            low, high = row["interval"]
            cells[1] += f" ({low:.2f} to {high:.2f})"
        tables.setdefault(f"{row['server']} over {row['over']}", []).append(cells)
    headings = ["load", "tokens/s", "TTFT", "TPOT", "whole"]
    for pair, rows in tables.items():
        title = f"{pair} (above 1, the first is better; in brackets the 95 % interval over repeats)"
        console.print(table_of(headings, rows, title, right=True))


def _row(cell: Json) -> list[str]:
    """A step of a server's table."""
    errors = ", ".join(f"{count} {kind}" for kind, count in cell["errors"].items())
    row = [
        _step(cell),
        str(cell["completed"]),
        errors or "0",
        f"{cell['tokens_per_second']:.1f}",
    ]
    for key in LATENCIES:
        row.append(" / ".join(f"{time:.0f}" for time in cell[key].values()))
    length = cell.get("speculation", {}).get("accepted_length")
    row.append(f"{length:.2f}" if length else "\u2013")
    return row


def _step(cell: Json) -> str:
    if "request_rate" in cell:
        return f"{cell['request_rate']:g}/s"
    return f"{cell['concurrency']} at once"
