"""Does `drafttrain plan` predict what training allocates? On a CPU, whole runs of tiny targets against their plans.

    python eval/bench_plan.py --output eval/results/plan_against_measured_cpu.json
    python eval/bench_plan.py --only zero2 shell          # cases whose names hold one of these words; --output keeps the others

Each case makes a random target, a data set whose conversations fill max_length, and a recipe; plans it; and trains two optimizer
steps of it in a process of its own, with torch's record of every allocation. Measured are the bytes of the tensors that live
when the training loop begins, and the most that the loop holds beyond them. Not the resident memory, which includes libraries.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from benchmark import result_path, write_result
from tokenizers import Tokenizer, models
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafttrain import train
from drafttrain.data.store import Store
from drafttrain.files import Json, read_json, write_json
from drafttrain.target import load_shell
from drafttrain.tuning.plan import Job, plan

GOAL = 0.1  # relative error of the total
STEPS = 2
PROMPT = 128
BASE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}
SMALL = {**BASE, "num_key_value_heads": 4, "vocab_size": 16000}
WIDE = {**SMALL, "hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32000}
WORDY = {**SMALL, "hidden_size": 256, "vocab_size": 50000, "tie_word_embeddings": True}
ZERO2 = Path(__file__).resolve().parents[1] / "configs" / "deepspeed" / "zero2.json"
EAGLE = {"kind": "eagle3", "drafter": {"draft_vocab_size": 8000}}
CASES: dict[
    str, Json
] = {  # name -> target's shapes, and keys of the recipe; `zero`: DeepSpeed's, of two processes
    "eagle3 online": {"target": SMALL, **EAGLE, "rows": 4, "max_length": 512},
    "eagle3 online, checkpointing": {
        **{"target": SMALL, **EAGLE, "rows": 4, "max_length": 512},
        "gradient_checkpointing": True,
    },
    "eagle3 online, accumulated": {
        **{"target": WIDE, **EAGLE, "rows": 1, "max_length": 1024},
        "gradient_accumulation_steps": 2,
    },
    "eagle3 shell, stored states": {
        "target": WIDE,
        **EAGLE,
        "rows": 4,
        "max_length": 512,
        "states": True,
    },
    "eagle3 many words": {"target": WORDY, **EAGLE, "rows": 8, "max_length": 256},
    "eagle3 kept states": {"target": SMALL, **EAGLE, "rows": 4, "max_length": 512, "cache_gb": 4.0},
    "draft_model online": {
        **{"target": SMALL, "kind": "draft_model", "drafter": {"layers": [0, 3, 5]}},
        **{"rows": 4, "max_length": 512},
    },
    "dflash online": {
        **{
            "target": SMALL,
            "kind": "dflash",
            "drafter": {"draft_vocab_size": 8000, "block_size": 4},
        },
        **{"rows": 2, "max_length": 512},
    },
    "mtp shell, stored states": {
        **{
            "target": WIDE,
            "kind": "mtp",
            "drafter": {"draft_vocab_size": 8000},
            "rows": 2,
            "max_length": 1024,
        },
        "states": True,
    },
    "medusa online": {
        **{
            "target": WORDY,
            "kind": "medusa",
            "drafter": {"draft_vocab_size": 8000},
            "rows": 4,
            "max_length": 1024,
        },
        "loss": "lk_lambda",
    },
    "eagle3 online, zero2": {
        **{"target": SMALL, **EAGLE, "rows": 2, "max_length": 512},
        "zero": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 2_000_000,
        },
    },
    "eagle3 online, zero2, shipped buckets": {
        **{"target": SMALL, **EAGLE, "rows": 2, "max_length": 512},
        "zero": read_json(ZERO2, "zero2", "restore it")["zero_optimization"],
    },
}


def make_run(folder: Path, case: Json) -> Path:
    """Writes a target, a data set and a recipe; returns the recipe."""
    case, shapes = dict(case), case["target"]
    torch.manual_seed(0)
    words = {f"w{i}": i for i in range(shapes["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), eos_token="w1"
    )
    LlamaForCausalLM(LlamaConfig(**shapes)).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    target = load_shell(str(folder / "target"))
    length = case["max_length"]
    rows = case.pop("rows")
    processes = 2 if case.pop("zero", None) else 1
    count = STEPS * rows * case.get("gradient_accumulation_steps", 1) * processes
    with Store(
        folder / "data", {"target": target.identity(), "sampling": {"temperature": 1.0}}
    ) as store:
        for i in range(count):
            row = {
                "tokens": torch.randint(2, shapes["vocab_size"], (length,)).tolist(),
                "spans": [[PROMPT, length]],
            }
            store.append({"id": f"row{i}", "finish": ["stop"], "source": "random", **row})
    if case.pop("states", False):
        words = [
            "features",
            "--data",
            str(folder / "data"),
            "--target",
            str(folder / "target"),
            "--layers",
            "default",
        ]
        subprocess.run(
            [sys.executable, "-m", "drafttrain", *words, "--dtype", "float32"], check=True
        )
    case |= {
        "target": str(folder / "target"),
        "data": str(folder / "data"),
        "output_dir": str(folder / "drafter"),
    }
    case |= {
        "per_device_train_batch_size": rows,
        "max_steps": STEPS,
        "validation": 0.0,
        "dtype": "float32",
    }
    case |= {
        "use_cpu": True,
        "init": case.get("init", "target"),
        "cache_gb": case.get("cache_gb", 0.0),
    }
    recipe = folder / "recipe.yaml"
    recipe.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in case.items()))
    return recipe


def living() -> int:
    """Bytes of all tensors' storages."""
    found = (x for x in gc.get_objects() if isinstance(x, torch.Tensor))
    return sum(
        {
            x.untyped_storage()._cdata: x.untyped_storage().nbytes()
            for x in found
            if x.device.type == "cpu"
        }.values()
    )


def measure(recipe: str, output: Path) -> None:
    """Trains a recipe and writes the bytes that its loop holds at most, of this process."""
    config, args = train.setup(recipe, [])
    run = train.prepare(config, args, None)
    gc.collect()
    before = living()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        training, _ = train.learn(config, args, run)
    assert training.state.global_step == STEPS
    kineto = record.profiler
    assert kineto is not None and kineto.kineto_results is not None
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    if args.process_index == 0:
        write_json(output, {"before": before, "peak": before + peak})


def compare(name: str, case: Json) -> Json:
    """Plans a case, trains it, and returns both figures in GB."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_run(Path(folder), case)
        result = Path(folder) / "result.json"
        size = (
            STEPS
            * case["rows"]
            * case.get("gradient_accumulation_steps", 1)
            * (2 if "zero" in case else 1)
        )
        launch = []
        job = Job(device="cpu-desktop", conversations=size, tokens=case["max_length"])
        if zero := case.get("zero"):
            file = Path(folder) / "deepspeed.json"
            sizes = (
                "train_micro_batch_size_per_gpu",
                "train_batch_size",
                "gradient_accumulation_steps",
            )
            write_json(file, {"zero_optimization": zero, **dict.fromkeys(sizes, "auto")})
            launch = [
                "--num_processes",
                "2",
                "--use_deepspeed",
                "--deepspeed_config_file",
                str(file),
            ]
            job = replace(job, gpus=2, deepspeed=str(file))
        planned = plan(str(recipe), (), job).memory_gb
        launcher = [
            "-m",
            "accelerate.commands.launch",
            "--num_machines",
            "1",
            "--dynamo_backend",
            "no",
            *launch,
        ]
        command = [
            sys.executable,
            *(launcher if launch else []),
            __file__,
            "--measure",
            str(recipe),
        ]
        env = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        }
        subprocess.run(
            [*command, "--output", str(result)], check=True, env=env, stdout=subprocess.DEVNULL
        )
        measured = read_json(result, "result", "run it again")["peak"] / 1e9
    off = planned["total"] / measured - 1
    print(
        f"{name}: planned {planned['total']:.4f} GB, measured {measured:.4f} GB, off by {off:+.1%}",
        flush=True,
    )
    return {"planned_gb": planned, "measured_gb": measured, "off": off, "case": case}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="words in the names of the cases to run"
    )
    parser.add_argument("--measure", metavar="RECIPE", help="train one recipe and write its peak")
    parser.add_argument("--output", type=Path if "--measure" in sys.argv else result_path)
    args = parser.parse_args(argv)
    if args.measure:
        measure(args.measure, args.output)
        return 0
    sides: Json = {}
    if args.output is not None and args.output.is_file():
        sides = read_json(args.output, "output", "choose another file")["sides"]
    worst = 0.0
    for name in (name for name in CASES if any(word in name for word in args.only)):
        sides[name] = compare(name, CASES[name])
        worst = max(abs(side["off"]) for side in sides.values())
        write_result(args.output, GOAL / worst, 1.0, sides, torch.device("cpu"), worst=worst)
    return int(worst > GOAL)


if __name__ == "__main__":
    sys.exit(main())
