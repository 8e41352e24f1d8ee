"""The speculators side of bench_train.py and compare_trainers.py; runs in its own environment with speculators and torch.

Calls the library's model, loss and mask code as its trainer does on stored hidden states. On CUDA it uses the trainer's
defaults. On a CPU it uses `sdpa` attention and `eager` losses: FlexAttention has no backward there, and the fused losses need
Triton.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from side import serve
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig
from transformers import AutoConfig


def build(job: dict, device: torch.device) -> tuple[Eagle3DraftModel, dict]:
    config = AutoConfig.from_pretrained(job["target"])
    kept = job["kept_ids"]
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[kept] = True
    config.num_hidden_layers, config.tie_word_embeddings = 1, False
    torch.manual_seed(0)
    model = Eagle3DraftModel.from_training_args(
        config,
        t2d=t2d,
        d2t=kept - torch.arange(len(kept)),
        draft_vocab_size=len(kept),
        norm_before_residual=False,
        ttt_steps=job["ttt_steps"],
        verifier_name_or_path=job["target"],
        target_layer_ids=list(job["feature_layers"]),
        draft_attn_impl="simple_flex_attention" if device.type == "cuda" else "sdpa",
    )
    options = {
        "ttt_steps": job["ttt_steps"],
        "ttt_step_loss_decay": job["depth_decay"],
        "loss_fn": "kl_div",
        "loss_implementation": "fused" if device.type == "cuda" else "eager",
    }
    return model.to(device).train(), Eagle3DraftModel.get_trainer_kwargs(**options)[0]


def lay_out(rows: list, device: torch.device) -> dict:
    """One row with all documents, shifted as in the library's data loader."""
    parts = []
    for number, document in enumerate(document for row in rows for document in row):
        shifted = shift_batch(
            {
                "input_ids": document["tokens"],
                "hidden_states": document["features"],
                "verifier_last_hidden_states": document.get(
                    "before_norm", document.get("last_hidden")
                ),
                "loss_mask": document["response"],
                "lengths": torch.tensor([len(document["tokens"])]),
                "position_ids": torch.arange(len(document["tokens"])),
            }
        )
        shifted["document_ids"] = torch.full_like(shifted["input_ids"], number)
        parts.append(shifted)
    names = [name for name in parts[0] if name != "lengths"]
    return {name: torch.cat([part[name] for part in parts])[None].to(device) for name in names}


def train(
    model: Eagle3DraftModel, batches: list, options: dict, minutes: float, output: Path
) -> None:
    """Trains for a time as `speculators train` does by default: Muon, a linear rate to zero, bfloat16, clipping at 1."""
    rate = 1e-3
    optimizers = build_optimizers(model, TrainerConfig(rate, 0, "", optimizer="muon", muon_lr=rate))
    order = []
    steps = 0
    total = 0.0
    began = time.perf_counter()
    while (done := (time.perf_counter() - began) / (60 * minutes)) < 1:
        if not order:
            order = random.Random(steps).sample(range(len(batches)), len(batches))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * min(100 * done, 1 - done)  # warm-up over one per cent
        batch = batches[order.pop()]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch, **options)[1]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        steps = steps + 1
        total = total + batch["input_ids"].numel()
        if steps % 20 == 0:
            print(f"step {steps}, loss {loss.item():.4f}, {100 * done:.0f} %", flush=True)
    seconds = time.perf_counter() - began
    model.save_pretrained(output)
    (output / "training.json").write_text(
        json.dumps({"steps": steps, "seconds": seconds, "tokens": total})
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help="written by make_job of bench_train.py")
    parser.add_argument(
        "--minutes", type=float, help="train for this time instead of serving steps"
    )
    parser.add_argument("--output", type=Path, help="where the trained head goes")
    args = parser.parse_args()
    job = torch.load(args.job, weights_only=False)
    device = torch.device(job["device"])
    if device.type == "cpu":
        torch.set_num_threads(job["threads"])
    model, options = build(job, device)
    batches = [lay_out(rows, device) for rows in job["batches"]]
    if args.minutes:
        model.verifier_norm = torch.nn.Identity()  # stored last states are normed
        train(model, batches, options, args.minutes, args.output)
    else:
        serve(lambda number: model(**batches[number], **options)[1], model.parameters(), device)


if __name__ == "__main__":
    main()
