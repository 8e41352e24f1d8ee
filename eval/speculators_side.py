"""The speculators side of bench_train.py; runs in its own environment with speculators and torch.

Calls the library's model, loss and mask code as its trainer does on stored hidden states. On CUDA it uses the trainer's
defaults. On a CPU it uses `sdpa` attention and `eager` losses: FlexAttention has no backward there, and the fused losses need
Triton.
"""

import sys

import torch
from side import serve
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
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
                "verifier_last_hidden_states": document["before_norm"],
                "loss_mask": document["response"],
                "lengths": torch.tensor([len(document["tokens"])]),
                "position_ids": torch.arange(len(document["tokens"])),
            }
        )
        shifted["document_ids"] = torch.full_like(shifted["input_ids"], number)
        parts.append(shifted)
    names = [name for name in parts[0] if name != "lengths"]
    return {name: torch.cat([part[name] for part in parts])[None].to(device) for name in names}


def main() -> None:
    job = torch.load(sys.argv[1], weights_only=False)
    device = torch.device(job["device"])
    if device.type == "cpu":
        torch.set_num_threads(job["threads"])
    model, options = build(job, device)
    batches = [lay_out(rows, device) for rows in job["batches"]]
    serve(lambda number: model(**batches[number], **options)[1], model.parameters(), device)


if __name__ == "__main__":
    main()
