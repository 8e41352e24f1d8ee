"""Share of a step's time that training waits for states: streamed and stored, read ahead of the step and not.

A server in a process of its own hands out a small target's states as vLLM does, and delays each answer by the time of one step.
Each side is a training: `prefetch_gb` as it is by default, or 0, so that a step asks for its rows when it begins (all but one,
which is asked for as soon as nothing else is held). The sides alternate, and take the same steps.

    python eval/bench_states_ahead.py --output eval/results/bench_states_ahead_cpu.json
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from benchmark import alternate, median, result_path, write_result
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from drafttrain.cli import main as drafttrain
from drafttrain.data.store import ShardWriter, Store
from drafttrain.files import write_json
from drafttrain.target import Target, resolve_target

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.05  # share of a step's time


def write_target(folder: Path, args: argparse.Namespace) -> Target:
    """A random Llama with a real tokenizer, whose text is not read."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_target(args.tokenizer))
    config = LlamaConfig(
        hidden_size=args.hidden, vocab_size=len(tokenizer), intermediate_size=2 * args.hidden, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Target.load(str(folder), "float32", "cpu")


@torch.no_grad()
def write_data(folder: Path, target: Target, args: argparse.Namespace) -> None:
    """Random tokens of the drafter's vocabulary, and the target's states of them."""
    layers = list(target.default_feature_layers)
    n = args.length
    with Store(folder, {"target": target.identity(), "sampling": {"temperature": 0.0}}) as store:
        writer = ShardWriter(folder / "features", 0)
        for row in range(args.rows):
            tokens = torch.randint(0, args.draft_vocab, (n,))
            line = {
                "tokens": tokens.tolist(),
                "spans": [[8, n]],
                "finish": ["length"],
                "source": "random",
            }
            store.append({"id": f"r{row}", **line})
            out = target.forward(tokens[None, :-1], layers)
            writer.add(
                f"r{row}",
                features=out.features[0].bfloat16(),
                last_hidden=out.last_hidden[0].bfloat16(),
            )
        writer.flush()
    write_json(folder / "features" / "features.json", {"layers": layers, "dtype": "bfloat16"})


@contextlib.contextmanager
def serving(folder: Path, target: Target, delay: float) -> Iterator[str]:
    """The address of a server in a process of its own."""
    layers = ",".join(map(str, dict.fromkeys((*target.default_feature_layers, target.num_layers))))
    command = [
        sys.executable,
        "-m",
        "tests.states.fake_state_server",
        str(folder / "target"),
        str(folder / "states"),
        layers,
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, "0", str(delay)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def train(folder: Path, args: argparse.Namespace, url: str, ahead: bool) -> dict[str, float]:
    """One training. Returns the mean seconds of a step, and the share of the steps' time in which they waited for states."""
    recipe = {
        "kind": "eagle3", "target": str(folder / "target"), "data": str(folder / "data"), "output_dir": str(folder / "run"),
        "drafter": {"draft_vocab_size": args.draft_vocab, "ttt_steps": args.depths}, "dtype": "float32", "init": "random",
        "max_steps": args.steps, "per_device_train_batch_size": args.batch, "validation": 0, "cache_gb": 0, "resume": False,
        "save_strategy": "no", "use_cpu": True, "report_to": "none", **({"target_url": url} if url else {}),
        **({} if ahead else {"prefetch_gb": 0}),
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in recipe.items())
    )
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        assert drafttrain(["train", str(folder / "recipe.yaml")]) == 0
    found = json.loads((folder / "run" / "training.json").read_text())
    assert found["target_features"]["streamed" if url else "stored"] == args.steps * args.batch
    return {
        "step_seconds": round(found["seconds"] / args.steps, 4),
        "states_wait": found["states_wait"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "hidden": 256, "draft-vocab": 8192, "length": 128, "rows": 120, "depths": 3, "batch": 2, "steps": 60, "threads": 1,
        "repeats": 3,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--tokenizer", default="smollm2-135m", help="any tokenizer; its text is not read"
    )
    parser.add_argument(
        "--delay",
        type=float,
        default=0.0,
        help="seconds of each answer; 0 measures those of a step first",
    )
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = write_target(folder / "target", args)
        write_data(folder / "data", target, args)
        delay = args.delay or train(folder, args, "", True)["step_seconds"]
        print(f"a step takes {delay:.3f} s, and so does each answer", flush=True)
        with serving(folder, target, delay) as url:
            sides = {
                "streamed, ahead": functools.partial(train, folder, args, url, True),
                "streamed, when a step begins": functools.partial(train, folder, args, url, False),
                "stored, ahead": functools.partial(train, folder, args, "", True),
                "stored, when a step begins": functools.partial(train, folder, args, "", False),
            }
            runs = alternate(sides, args.repeats, warm_up=False)
    figures = {
        side: {
            **{key: median(found, key) for key in ("states_wait", "step_seconds")},
            "runs": found,
        }
        for side, found in runs.items()
    }
    wait = figures["streamed, ahead"]["states_wait"]
    facts = {"delay_seconds": delay, "most_wait": GOAL}
    write_result(args.output, GOAL / max(wait, 1e-4), 1.0, figures, torch.device("cpu"), **facts)


if __name__ == "__main__":
    main()
