"""Memory of a training process on stored states, beside the sum of what it has to hold.

A made-up target is written to a temporary folder: config, tokenizer, embedding, final norm and head of random bfloat16 values,
and no layers. `train` runs some steps of an EAGLE-3 drafter on made-up stored states. The peak of the process is compared with

    process before loading + embedding + head + final norm + head rows + drafter + gradients and optimizer + rows

where `rows` is what the steps add: the growth of the peak after the preparation, less gradients and optimizer.

    python eval/bench_shell_memory.py --output eval/results/shell_memory_cpu.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import torch
from benchmark import result_path, write_result
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

from drafttrain.data.store import ShardWriter, Store
from drafttrain.environment import peak_memory
from drafttrain.files import write_json
from drafttrain.target import load_shell, resolve_target
from drafttrain.train import learn, prepare, setup

GOAL = 1.10  # peak over sum


def write_target(folder: Path, args: argparse.Namespace) -> None:
    """Config, tokenizer and the tensors around the layers; the layers are not written."""
    h = args.hidden
    v = args.vocab
    config = LlamaConfig(
        hidden_size=h, vocab_size=v, intermediate_size=7 * h // 2, num_hidden_layers=32, num_attention_heads=h // 128,
        num_key_value_heads=max(h // 512, 1), max_position_embeddings=8192, tie_word_embeddings=args.tied, dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_target(args.tokenizer)).save_pretrained(folder)
    names = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}
    names |= {} if args.tied else {"lm_head.weight": (v, h)}
    for number, (name, shape) in enumerate(names.items()):
        save_file(
            {name: torch.randn(shape, dtype=torch.bfloat16).mul_(0.02)},
            folder / f"part-{number}.safetensors",
        )
    files = {name: f"part-{number}.safetensors" for number, name in enumerate(names)}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})


def write_data(folder: Path, target: Path, args: argparse.Namespace) -> None:
    """Random tokens of the drafter's vocabulary with random states of three layers."""
    shell = load_shell(str(target))
    n = args.length
    h = args.hidden
    layers = list(shell.default_feature_layers)
    with Store(folder, {"target": shell.identity(), "sampling": {"temperature": 0.0}}) as store:
        writer = ShardWriter(folder / "features", 0)
        for row in range(args.rows):
            tokens = torch.randint(0, args.draft_vocab, (n,)).tolist()
            store.append(
                {
                    "id": f"r{row}",
                    "tokens": tokens,
                    "spans": [[8, n]],
                    "finish": ["length"],
                    "source": "made up",
                }
            )
            states = torch.randn(n - 1, 4 * h).bfloat16()
            writer.add(f"r{row}", features=states[:, : 3 * h], last_hidden=states[:, 3 * h :])
        writer.flush()
    facts = {
        "target": shell.identity(),
        "layers": layers,
        "dtype": "bfloat16",
        "top_k": 0,
        "max_length": 0,
    }
    write_json(folder / "features" / "features.json", facts)


def measure(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Trains in this process; returns gigabytes of the parts, their sum and the peak."""
    recipe = {
        "kind": "eagle3", "target": str(folder / "target"), "data": str(folder / "data"), "output_dir": str(folder / "run"),
        "drafter": {"draft_vocab_size": args.draft_vocab,
                    "ttt_steps": args.depths, "intermediate_size": args.mlp}, "dtype": "bfloat16", "init": "random",
        "max_steps": 2, "per_device_train_batch_size": 1, "validation": 0, "cache_gb": 0, "save_strategy": "no", "use_cpu": True,
        "gradient_checkpointing": False, "max_length": args.length, "report_to": "none",
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in recipe.items())
    )
    before = psutil.Process().memory_info().rss
    config, training = setup(str(folder / "recipe.yaml"), [])
    run = prepare(config, training, None)
    prepared = peak_memory(torch.device("cpu"))
    shell = run.target
    source = run.source
    tied = shell.head_weight.data_ptr() == shell.embed_weight.data_ptr()
    own = sum(weight.nbytes for weight in run.drafter.parameters())
    learned = sum(weight.nbytes for weight in run.drafter.parameters() if weight.requires_grad)
    learn(config, training, run)
    peak = peak_memory(torch.device("cpu"))
    parts = {
        "process": before,
        "embedding": shell.embed_weight.nbytes,
        "head": 0 if tied else shell.head_weight.nbytes,
        "final_norm": sum(weight.nbytes for weight in shell.norm.parameters()),
        "head_rows": source.head.weight.nbytes,
        "drafter": own,
        "gradients": learned,
        "optimizer": 2 * learned,
        "rows": max(peak - prepared - 3 * learned, 0),
    }
    found = {**parts, "sum": sum(parts.values()), "prepared": prepared, "peak": peak}
    return {name: round(value / 1e9, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "hidden": 4096, "vocab": 128_256, "draft-vocab": 32_000, "length": 256, "rows": 4, "depths": 2,
        "mlp": 14336, "threads": 2,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tied", action="store_true", help="a target whose head is its embedding")
    parser.add_argument(
        "--tokenizer", default="smollm2-135m", help="any tokenizer; its text is not read"
    )
    parser.add_argument("--output", type=result_path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.measure:
        write_json(args.measure / "result.json", measure(args.measure, args))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "target").mkdir()
        write_target(folder / "target", args)
        write_data(folder / "data", folder / "target", args)
        subprocess.run(
            [sys.executable, *sys.argv, "--measure", name], check=True
        )  # whose peak is that of training
        gigabytes = json.loads((folder / "result.json").read_text())
    print(json.dumps(gigabytes, indent=2))
    ratio = gigabytes["sum"] / gigabytes["peak"]
    write_result(args.output, ratio, round(1 / GOAL, 3), {"train": gigabytes}, torch.device("cpu"))


if __name__ == "__main__":
    main()
