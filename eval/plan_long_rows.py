"""Memory of a process that trains an EAGLE-3 head on one long row, by shapes alone: tensors without data (torch's meta device).

    python eval/plan_long_rows.py --tokens 65536 --sequence-parallel 1 2 4 8 --output eval/results/long_rows_8b.json

The defaults are an 8B target's shapes (Llama 3.1). The drafter's own forward runs, with the GPU form of its attention, and what
autograd keeps for backward is counted tensor by tensor; weights, optimizer (ZeRO-2, bfloat16 with float32 master weights) and the
target's part are sums of their sizes. Not counted: the allocator's fragments and the libraries' own buffers, about 3 GB.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from benchmark import result_path, write_result
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from drafttrain.batch import Batch
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.eagle3.model import Eagle3, Eagle3Config
from drafttrain.files import Json
from drafttrain.losses import TargetRows
from drafttrain.ops import path_attention
from drafttrain.sequence_parallel import SequenceGroup

GB = 1e9


class ShapeGroup(SequenceGroup):
    """A group of which only this process exists: an exchange gives a tensor of the right shape."""

    def exchange(self, x: Tensor) -> Tensor:
        return x.clone()

    def same(self, x: Tensor) -> Tensor:
        return x


class Flash(torch.autograd.Function):
    """FlexAttention as far as memory goes: it keeps queries, keys, values, outputs and log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("shapes have no gradients")


@dataclass
class Shapes:
    """Of target and drafter; names as in their configs."""

    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 14336
    vocab: int = 128256
    draft_vocab: int = 32000
    depths: int = 7

    @property
    def target_body(self) -> int:
        """Parameters of the target without embedding and head."""
        e = self.hidden // self.heads
        return (
            self.layers
            * self.hidden
            * (2 * self.hidden + 2 * self.kv_heads * e + 3 * self.intermediate)
        )


def kept_for_backward(
    shapes: Shapes, tokens: int, share: float, group: ShapeGroup, checkpointing: bool
) -> int:
    """Bytes that the drafter's forward keeps. share: of the row's tokens, at its end, that are a response."""
    config = Eagle3Config(
        hidden_size=shapes.hidden, target_hidden_size=shapes.hidden, intermediate_size=shapes.intermediate,
        num_attention_heads=shapes.heads, num_key_value_heads=shapes.kv_heads, vocab_size=shapes.vocab,
        draft_vocab_size=shapes.draft_vocab, feature_layers=(2, 16, 29), ttt_steps=shapes.depths,
    )  # fmt: skip
    with torch.device("meta"):
        drafter = Eagle3(config).to(torch.bfloat16).train()
    if checkpointing:
        drafter.gradient_checkpointing_enable()
    mask = torch.zeros(1, tokens, dtype=torch.bool)
    mask[:, round(tokens * (1 - share)) :] = True
    batch = Batch(
        torch.zeros(1, tokens, dtype=torch.long), torch.tensor([tokens]), mask, torch.tensor([0])
    )
    batch = group.share(batch, shapes.depths)
    part = batch.part
    h = shapes.hidden

    def state(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, device="meta", dtype=dtype)

    held = part.end - part.begin
    read = part.seen.stop - part.begin
    weight = state(shapes.draft_vocab, h)
    rows = TargetRows(
        state(read, h), weight, state(read, dtype=torch.float32), state(read, dtype=torch.long)
    )
    row_of = (torch.arange(tokens) - part.begin).clamp(0, read - 1)[None]
    inputs = StepInputs(
        batch, state(1, read, h), state(1, held, 3 * h), rows, row_of, 1.0, measure=False
    )
    given = [inputs.embeds, inputs.features, rows.hidden, rows.log_z, rows.argmax]
    kept = {x.untyped_storage()._cdata: x.untyped_storage() for x in given}
    own = {p.untyped_storage()._cdata for p in (*drafter.parameters(), weight)}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage()._cdata not in own and x.device.type == "meta":
            kept[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    def tables(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        one = state(len(positions), 1, h // shapes.heads, dtype=dtype)
        return one, one

    def flash(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return Flash.apply(query, key, value)

    patches = (
        mock.patch.object(drafter.rotary, "tables", tables),
        mock.patch.object(path_attention, "span_attention_gpu", flash),
        # Autocast knows no device "meta".
        mock.patch.object(torch, "is_autocast_enabled", return_value=False),
        mock.patch.object(torch, "get_autocast_dtype", return_value=torch.bfloat16),
        mock.patch.object(torch, "autocast", return_value=nullcontext()),
    )
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(saved_tensors_hooks(keep, lambda x: x))
        drafter(inputs)
    return sum(storage.nbytes() for storage in kept.values())


def plan(
    shapes: Shapes,
    tokens: int,
    share: float,
    size: int,
    processes: int,
    checkpointing: bool,
    stored: bool,
) -> Json:
    """Gigabytes of the fullest of `processes` processes, groups of `size` of which share a row."""
    drafter = _drafter_parameters(shapes)
    forward = max(
        kept_for_backward(shapes, tokens, share, ShapeGroup(None, rank, size), checkpointing)
        for rank in {0, size - 1}
    )
    part = -(-tokens // size)
    parts = {
        "embedding_and_head": 2 * 2 * shapes.vocab * shapes.hidden,
        "target_layers": 0 if stored else 2 * shapes.target_body,
        # Of one layer of the target at a time: the MLP's two products and its input, queries, keys, values.
        "target_forward": 0 if stored else 2 * part * (3 * shapes.intermediate + 4 * shapes.hidden),
        "drafter": 2 * drafter,
        "gradients": 2 * drafter,
        "optimizer": 12 * drafter // processes,
        "kept_for_backward": forward,
        "loss_chunk": 3 * 4 * 128 * shapes.draft_vocab + 4 * shapes.draft_vocab * shapes.hidden,
    }
    memory = {name: round(value / GB, 2) for name, value in parts.items()}
    return {**memory, "total": round(sum(parts.values()) / GB, 2)}


def _drafter_parameters(shapes: Shapes) -> int:
    h = shapes.hidden
    e = shapes.hidden // shapes.heads
    attention = 2 * h * (shapes.heads + 2 * shapes.kv_heads) * e + shapes.heads * e * h
    return 3 * h * h + attention + 3 * h * shapes.intermediate + shapes.draft_vocab * h


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=65536, help="of the row")
    parser.add_argument("--share", type=float, default=0.5, help="of the row that is a response")
    parser.add_argument("--processes", type=int, default=8, help="GPUs")
    parser.add_argument("--sequence-parallel", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--gpu-memory", type=float, default=80.0, help="GB")
    parser.add_argument("--output", type=result_path, required=True)
    args = parser.parse_args(argv)
    shapes = Shapes()
    rows = []
    print(
        "| target | checkpointing | sequence_parallel | kept for backward, GB | total, GB | fits |\n"
        + "| --- " * 6
        + "|"
    )
    for stored in (True, False):
        for checkpointing in (False, True):
            for size in args.sequence_parallel:
                memory = plan(
                    shapes, args.tokens, args.share, size, args.processes, checkpointing, stored
                )
                fits = memory["total"] + 3 < args.gpu_memory
                setting = {
                    "states": "stored" if stored else "online",
                    "gradient_checkpointing": checkpointing,
                }
                rows.append(
                    {**setting, "sequence_parallel": size, "memory_gb": memory, "fits": fits}
                )
                cells = [
                    *setting.values(),
                    size,
                    memory["kept_for_backward"],
                    memory["total"],
                    "yes" if fits else "no",
                ]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    described = {
        "tokens": args.tokens,
        "response_share": args.share,
        "gpus": args.processes,
        "gpu_memory_gb": args.gpu_memory,
    }
    totals = [row["memory_gb"]["total"] for row in rows]
    write_result(
        args.output,
        # What sharing a row saves with stored states.
        totals[0] / totals[len(args.sequence_parallel) - 1],
        1.0,
        {"rows": rows},
        torch.device("cpu"),
        **described,
        shapes=vars(shapes),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
