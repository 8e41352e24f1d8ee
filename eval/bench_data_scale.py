"""Peak memory and seconds of `prompts`, `generate` and `load_records` at a million rows, with a fake server.

Rows and answers are synthetic. The fake server exchanges token ids, so the command does all that it does with vLLM; all prompts
but --asked are stored as answered before the run, which is what an interrupted run finds. Every step is a process of its own, and
its peak is compared with that of the same step at --small rows, which holds the libraries and the target's config and tokenizer.
`--before PATH` measures the steps in another checkout too, with --before-rows rows.

    python eval/bench_data_scale.py --output eval/results/data_scale_cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from benchmark import result_path, write_result

from drafttrain.files import Json

GOAL_MB = 1000.0
ROOT = Path(__file__).resolve().parents[1]
LOAD = "import sys; from drafttrain.data.store import load_records; print(len(load_records(sys.argv[1])))"


def make_rows(path: Path, count: int, words: int = 16) -> None:
    """Writes prompts of random words from a vocabulary of 50,000."""
    chance = random.Random(0)
    vocabulary = [f"w{i}" for i in range(50_000)]
    with path.open("w") as file:
        for i in range(count):
            text = " ".join(chance.choices(vocabulary, k=words))
            file.write(
                f'{{"id": "p{i:08d}", "messages": [{{"role": "user", "content": "{text}"}}]}}\n'
            )


def answer_all(prompts: Path, data: Path, count: int, tokens: int) -> None:
    """Appends answers to the first `count` prompts to a data set's part, as `generate` writes them."""
    line = {
        "tokens": [1000 + i for i in range(tokens)],
        "spans": [[tokens // 4, tokens]],
        "finish": ["stop"],
        "source": "",
    }
    rest = json.dumps(line, separators=(",", ":"))[1:]
    with prompts.open() as rows, (data / "part-0000.jsonl").open("a") as part:
        done = {json.loads(row)["id"] for row in (data / "part-0000.jsonl").open()}
        for _, row in zip(range(count), rows, strict=False):
            if (key := json.loads(row)["id"]) not in done:
                part.write(f'{{"id":"{key}",{rest}\n')


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection of the fake server: models, and completions with token ids."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        length = next(
            (
                int(line[15:])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            ),
            0,
        )
        body = json.loads(await reader.readexactly(length)) if length else {}
        reply: Json = {"data": [{"id": "fake"}]}
        if "messages" in body:
            message = {"role": "assistant", "content": "word " * 96}
            reply = {"choices": [{"message": message, "finish_reason": "stop"}]}
        elif body:
            reads = (
                TOKENIZER(body["prompt"])["input_ids"]
                if isinstance(body["prompt"], str)
                else body["prompt"]
            )
            ids = [*range(1000, 1000 + min(96, body["max_tokens"] - 1)), 2]
            reply = {
                "choices": [
                    {
                        "text": "",
                        "token_ids": ids,
                        "prompt_token_ids": reads,
                        "finish_reason": "stop",
                    }
                ]
            }
        content = json.dumps(reply).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
        await writer.drain()


def serve(target: str, port: multiprocessing.Queue[int]) -> None:
    """The fake server's process."""
    from drafttrain.flags import load_tokenizer

    global TOKENIZER
    TOKENIZER = load_tokenizer(target)

    async def run() -> None:
        async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await answer(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()

        server = await asyncio.start_server(quiet, "127.0.0.1", 0)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def measured(root: Path, *words: str) -> Json:
    """Runs a command of a checkout; its seconds and peak resident memory."""
    environment = {**os.environ, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words], cwd=root, env=environment, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{words} ended with {process.returncode}")
    found = {
        "seconds": round(time.perf_counter() - start, 1),
        "peak_mb": round(usage.ru_maxrss / 1024, 1),
    }
    print(f"{root.name} {' '.join(words)[:80]}: {found}", flush=True)
    return found


def steps(
    root: Path, folder: Path, rows: int, asked: int, args: argparse.Namespace, port: int
) -> Json:
    """Every step of one checkout with a number of rows; only those after `prompts` with --given-prompts."""
    folder.mkdir()
    raw = folder / "raw.jsonl"
    prompts = folder / "prompts.jsonl"
    data = folder / "data"
    make_rows(raw, rows)
    command = ["-m", "drafttrain.cli"]
    found: Json = {}
    if args.given_prompts:
        raw.rename(prompts)
    else:
        words = ("prompts", "--source", "file", "--input", str(raw), "--output", str(prompts))
        found["prompts"] = measured(root, *command, *words)
    generate = [
        *command,
        "generate",
        "--target",
        args.target,
        "--prompts",
        str(prompts),
        "--output",
        str(data),
    ]
    generate += ["--backend", "openai", "--url", f"http://127.0.0.1:{port}"]
    measured(root, *generate, "--max-tokens", "1")  # begins the data set
    answer_all(prompts, data, rows - asked, args.tokens)
    found["generate"] = measured(root, *generate)
    found["generate, nothing left"] = measured(root, *generate)
    found["load_records, first"] = measured(root, "-c", LOAD, str(data))
    found["load_records, again"] = measured(root, "-c", LOAD, str(data))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument(
        "--asked", type=int, default=5000, help="prompts of them that the server answers in the run"
    )
    parser.add_argument(
        "--small", type=int, default=2000, help="rows of the run that the peak is compared with"
    )
    parser.add_argument(
        "--target", default="smollm2-135m", help="its config and tokenizer; no weights are read"
    )
    parser.add_argument("--tokens", type=int, default=512, help="of a stored conversation")
    parser.add_argument("--given-prompts", action="store_true", help="leave out the step `prompts`")
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--before-rows", type=int, default=30_000)
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    ports: multiprocessing.Queue[int] = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(args.target, ports), daemon=True)
    server.start()
    port = ports.get()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sides = dict[str, Json]()
        sides["small"] = steps(ROOT, folder / "small", args.small, args.small // 2, args, port)
        sides["large"] = steps(ROOT, folder / "large", args.rows, args.asked, args, port)
        for side, root in (
            {"before": args.before.resolve(), "here": ROOT}.items() if args.before else ()
        ):
            rows = args.before_rows
            sides[f"{side}, {rows} rows"] = steps(root, folder / side, rows, args.small, args, port)
    server.terminate()
    beyond = {
        step: round(run["peak_mb"] - sides["small"][step]["peak_mb"], 1)
        for step, run in sides["large"].items()
    }
    print(f"MB beyond {args.small} rows: {beyond}")
    write_result(
        args.output,
        GOAL_MB / max(1.0, *beyond.values()),
        1.0,
        sides,
        torch.device("cpu"),
        beyond_mb=beyond,
        rows=args.rows,
    )


if __name__ == "__main__":
    main()
