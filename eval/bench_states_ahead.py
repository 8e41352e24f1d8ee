"""Share of a step's time that training waits for states: streamed and stored, read ahead of the step and not.

A server hands out a small target's states as vLLM does, and delays each answer by the time of one step. Each side is a training
in a process of its own: `prefetch_gb` as it is by default, or 0, so that a step asks for its rows when it begins. The sides
alternate, and take the same steps.

    python eval/bench_states_ahead.py --output eval/results/bench_states_ahead_cpu.json
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from benchmark import alternate, median, result_path, write_result
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from drafttrain.data.store import Store
from drafttrain.target import Target, resolve_target

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.data.fake_state_server import FakeStateServer  # noqa: E402 - the tests are no installed package

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


def write_data(folder: Path, target: Target, args: argparse.Namespace) -> None:
    """Random tokens of the drafter's vocabulary, and the target's states of them."""
    with Store(folder, {"target": target.identity(), "sampling": {"temperature": 0.0}}) as store:
        for row in range(args.rows):
            tokens = torch.randint(0, args.draft_vocab, (args.length,)).tolist()
            line = {"id": f"r{row}", "tokens": tokens, "spans": [[8, args.length]], "finish": ["length"], "source": ""}
            store.append(line)
    words = ["features", "--data", str(folder), "--target", str(folder.parent / "target"), "--dtype", "float32"]
    subprocess.run([sys.executable, "-m", "drafttrain.cli", *words], check=True, stdout=subprocess.DEVNULL)


def train(folder: Path, args: argparse.Namespace, url: str, prefetch: bool) -> dict[str, float]:
    """One training. Returns the mean seconds of a step, and the share of them in which it waited for states."""
    recipe = {
        "kind": "eagle3", "target": str(folder / "target"), "data": str(folder / "data"), "output_dir": str(folder / "run"),
        "drafter": {"draft_vocab_size": args.draft_vocab, "ttt_steps": args.depths}, "dtype": "float32", "init": "random",
        "max_steps": args.steps, "per_device_train_batch_size": args.batch, "validation": 0, "cache_gb": 0, "resume": False,
        "save_strategy": "no", "use_cpu": True, "report_to": "none", **({"target_url": url} if url else {}),
        **({} if prefetch else {"prefetch_gb": 0}),
    }  # fmt: skip
    (folder / "recipe.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in recipe.items()))
    command = [sys.executable, "-m", "drafttrain.cli", "train", str(folder / "recipe.yaml")]
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = json.loads((folder / "run" / "training.json").read_text())
    assert found["target_features"]["streamed" if url else "stored"] == args.steps * args.batch
    return {"step_seconds": round(found["seconds"] / args.steps, 4), "states_wait": found["states_wait"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "hidden": 256, "draft-vocab": 8192, "length": 256, "rows": 120, "depths": 3, "batch": 4, "steps": 60, "threads": 2,
        "repeats": 3,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokenizer", default="smollm2-135m", help="any tokenizer; its text is not read")
    parser.add_argument("--output", type=result_path)
    args = parser.parse_args()
    torch.set_num_threads(1)  # of the server, which shares the machine with the training
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = write_target(folder / "target", args)
        write_data(folder / "data", target, args)
        served = (*target.default_feature_layers, target.num_layers)
        with FakeStateServer(target, folder / "states", tuple(dict.fromkeys(served))) as server:
            delay = train(folder, args, "", True)["step_seconds"]
            server.delay = delay
            print(f"a step takes {delay:.3f} s, and so does each answer", flush=True)
            sides = {
                "streamed, ahead": functools.partial(train, folder, args, server.url, True),
                "streamed, when a step begins": functools.partial(train, folder, args, server.url, False),
                "stored, ahead": functools.partial(train, folder, args, "", True),
                "stored, when a step begins": functools.partial(train, folder, args, "", False),
            }
            runs = alternate(sides, args.repeats, warm_up=False)
    figures = {
        side: {"states_wait": median(found, "states_wait"), "step_seconds": median(found, "step_seconds"), "runs": found}
        for side, found in runs.items()
    }
    wait = figures["streamed, ahead"]["states_wait"]
    facts = {"delay_seconds": delay, "most_wait": GOAL}
    write_result(args.output, GOAL / max(wait, 1e-4), 1.0, figures, torch.device("cpu"), **facts)


if __name__ == "__main__":
    main()
