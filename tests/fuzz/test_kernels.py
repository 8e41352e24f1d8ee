"""Wrappers of the C kernels compute what torch computes, or raise: whatever dtypes, shapes, strides and indices they get.

The cases run in one process of their own, so that a crash is a failed test. What an accepted call returns equals the result of
torch, or of the same call with valid arguments where only memory that the call does not read has changed; guards around the
buffers that kernels write to show writes beyond them.
"""

from __future__ import annotations

import copy
import faulthandler
import multiprocessing
import os
import sys
import types
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.errors import UserError, first_line
from drafttrain.inference.verify import argmax_at
from drafttrain.ops import tree_attention, tree_cache
from drafttrain.ops.cpu_draft import DraftHead, DraftStep, DraftWeights, Placed, TreeShape
from drafttrain.ops.cpu_layers import DecoderLayer
from drafttrain.ops.packing import PackedLinear, PackedRMSNorm, pack_panels, skinny_linear
from drafttrain.ops.sampling import argmax, top_log_probs
from drafttrain.ops.tree_attention import CpuPlan, TreeLayout
from drafttrain.ops.tree_cache import SlotMover, TreeCache
from drafttrain.target.native_body import LayerStack
from tests.fuzz import outcome
from tests.marks import needs_compiler

CASES = 40  # of each wrapper
PLAIN = {"scaling": 0.25, "window": None, "softcap": None, "sinks": None}
GUARD = 1e30
Args = dict[str, Any]


# -- faults of arguments ----------------------------------------------------------------------------------------------


def _dtype(x: Tensor, random: Random) -> Tensor:
    return x.to(
        random.choice(
            [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64]
        )
    )


def _shape(x: Tensor, random: Random) -> Tensor:
    """A dimension cut, grown, dropped or added; what stays keeps its place."""
    axis = random.randrange(x.dim())
    way = random.choice(["cut", "grow", "grow", "drop", "add", "empty", "flat", "one"])
    if way == "grow":
        return torch.cat((x, torch.ones_like(x.narrow(axis, 0, min(1, x.shape[axis])))), dim=axis)
    sizes = {"cut": max(0, x.shape[axis] - 1), "empty": 0}
    if way in sizes:
        return x.narrow(axis, 0, sizes[way]).contiguous()
    return {
        "drop": lambda: x.sum(axis),
        "add": lambda: x[None],
        "flat": x.flatten,
        "one": lambda: x.new_zeros(()),
    }[way]()


def _strides(x: Tensor, random: Random) -> Tensor:
    """The same values at other places in memory."""
    axis = random.randrange(x.dim())
    other = random.randrange(x.dim())
    swapped = x.transpose(axis, other).contiguous().transpose(axis, other)
    spread = torch.stack((x, x), dim=axis + 1).select(axis + 1, 0)
    return random.choice([swapped, spread])


def _index(value: int, random: Random) -> int:
    return random.choice([-1, -5, value + 1, value + 7, 0, 2**31, -(2**40), 10**9, 2**62])


FAULTS: dict[str, Callable[[Any, Random], Any]] = {
    "another dtype": _dtype,
    "another shape": _shape,
    "other strides": _strides,
    "another device": lambda x, random: x.to("meta"),
    "index out of range": _index,
}


def spoil(args: Args, fault: str, random: Random) -> Args:
    """One argument changed: a tensor, or a number (at any depth of lists) for an index."""

    def places(value: Any, place: tuple = ()) -> list[tuple]:
        if isinstance(value, list):
            return [found for i, item in enumerate(value) for found in places(item, (*place, i))]
        wanted = int if fault == "index out of range" else Tensor
        fits = isinstance(value, wanted) and not (wanted is Tensor and value.dim() == 0)
        return [place] if fits else []

    def replaced(value: Any, place: tuple) -> Any:
        if place:
            return [
                replaced(item, place[1:]) if i == place[0] else item for i, item in enumerate(value)
            ]
        return FAULTS[fault](value, random)

    found = [(name, place) for name, value in args.items() for place in places(value)]
    if not found:
        return args
    name, place = random.choice(found)
    return {**args, name: replaced(args[name], place)}


def guarded(random: Random, *sizes: int) -> Tensor:
    """Random values in the middle of a larger tensor of GUARD."""
    count = torch.Size(sizes).numel()
    whole = torch.full((count + 2 * 4096,), GUARD)
    middle = whole[4096 : 4096 + count]
    middle.copy_(
        torch.randn(count, generator=torch.Generator().manual_seed(random.randrange(2**31)))
    )
    GUARDS.append((whole, count))
    return middle.view(sizes)


GUARDS: list[tuple[Tensor, int]] = []


def draw(random: Random, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(random.randrange(2**31)))


# -- wrappers: valid arguments, the call, and what torch computes (None: the same call with the valid arguments) --------


def linear(random: Random):
    weight = draw(random, random.choice([1, 31, 32, 70]), random.choice([1, 16, 33]))
    args = {
        "x": draw(random, random.choice([0, 1, 3, 13, 40]), weight.shape[1]),
        "out": len(weight),
    }
    panels = pack_panels(weight)
    return (
        args,
        lambda x, out: skinny_linear(x, panels, out),
        lambda x, out: F.linear(x, F.pad(weight, (0, 0, 0, 31)))[:, :out],
    )


def panels(random: Random):
    weight = draw(random, 40, 16).bfloat16().float()
    args = {"panels": pack_panels(weight), "out": 40}
    x = draw(random, 3, 16)
    return args, lambda panels, out: skinny_linear(x, panels, out), None


def packed_linear(random: Random):
    linear = nn.Linear(33, 20, bias=random.random() < 0.5)
    packed = PackedLinear(linear)
    return {"x": draw(random, 2, random.choice([1, 5, 30]), 33)}, packed, lambda x: linear(x)


def rms_norm(random: Random):
    weight = draw(random, random.choice([1, 16, 37]))
    packed = PackedRMSNorm(weight, 1e-5)
    x = draw(random, *random.choice([(3,), (0,), (2, 5), ()]), len(weight))
    return {"x": x}, packed, lambda x: F.rms_norm(x, weight.shape, weight, 1e-5)


def highest(random: Random):
    return (
        {"logits": draw(random, 4, random.choice([1, 5, 300]))},
        argmax,
        lambda logits: logits.argmax(-1),
    )


def top(random: Random):
    args = {"logits": draw(random, 4, 300), "width": random.choice([1, 7, 300])}

    def reference(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        found = logits.float().log_softmax(-1).topk(width, dim=-1)
        return found.values, found.indices

    def call(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        values, ids = top_log_probs(logits, width)
        near = logits.is_meta or same(logits.float().log_softmax(-1).gather(-1, ids), values)
        return values, reference(logits, width)[
            1
        ] if near else ids  # equal values may come in any order

    return args, call, reference


def rows_of_logits(random: Random):
    args = {"logits": draw(random, 6, 40), "rows": [random.randrange(6) for _ in range(3)]}
    return args, argmax_at, lambda logits, rows: [int(logits[row].argmax()) for row in rows]


def moves(random: Random):
    buffers = [guarded(random, 2, 20, 12) for _ in range(3)]
    first = random.randrange(5)
    sources = sorted(random.sample(range(first + 1, 12), random.randint(0, 4)))
    args = {"buffers": buffers, "moves": [[first, sources], [13, [15, 19]]]}

    def call(buffers, moves):
        SlotMover(buffers).move([tuple(move) for move in moves])
        return buffers

    def reference(buffers, moves):
        moved = [buffer.clone() for buffer in buffers]
        for old, new in zip(buffers, moved, strict=True):
            for first, sources in moves:
                assert first >= 0
                new[:, first : first + len(sources)] = old[:, sources]
        return moved

    return args, call, reference


def attention(random: Random):
    kv_heads = random.choice([1, 2])
    group = random.choice([1, 3])
    e = 16
    ve = random.choice([16, 32])
    parents = [random.randrange(-1, i) for i in range(random.randint(0, 6))]
    n = len(parents) + 1
    heads = kv_heads * group
    prefix = random.choice([0, 5, 20])
    new = [draw(random, 1, kv_heads, n, e), draw(random, 1, kv_heads, n, ve)]
    args = {
        "query": draw(random, 1, heads, n, e),
        "new": new,
        "slot": 2,
        "prefix": prefix,
        "parents": parents,
    }
    args |= {
        "keys": guarded(random, kv_heads, prefix + n + 4, e),
        "values": guarded(random, kv_heads, prefix + n + 4, ve),
    }
    args |= {"sinks": draw(random, heads), "window": random.choice([1, 3, 100])}

    def call(query, keys, values, new, slot, prefix, parents, sinks, window):
        plan = CpuPlan([(slot, TreeLayout(prefix, parents))])
        return plan.attend(
            query, keys, values, tuple(new), scaling=0.25, window=window, softcap=None, sinks=sinks
        )

    def reference(query, keys, values, new, slot, prefix, parents, sinks, window):
        layout = TreeLayout(prefix, parents)
        end = slot + prefix + len(parents) + 1
        assert slot >= 0 and window >= 0
        rows = [buffer[:, slot:end].clone() for buffer in (keys, values)]
        for row, fresh in zip(rows, new, strict=True):
            row[:, prefix:] = fresh[0]
        first, mask = layout.mask(window or None, query.shape[1] // len(keys), query)
        form = {"scaling": 0.25, "window": None, "softcap": None, "sinks": sinks}
        out = tree_attention.masked_attention(
            query, *(row[None, :, first:] for row in rows), mask, form
        )
        return out.transpose(1, 2)

    return args, call, reference


def make_layer(random: Random, width: int = 32, hidden: int = 32, e: int = 16) -> DecoderLayer:
    linear = lambda out, wide: types.SimpleNamespace(  # noqa: E731
        weight=draw(random, out, wide) / 6, bias=None, in_features=wide, out_features=out
    )
    attention = types.SimpleNamespace(
        head_dim=e, q_proj=linear(2 * e, width), k_proj=linear(e, width)
    )
    attention.v_proj, attention.o_proj = linear(e, width), linear(hidden, 2 * e)
    mlp = types.SimpleNamespace(
        gate_proj=linear(48, hidden), up_proj=linear(48, hidden), down_proj=linear(hidden, 48)
    )
    return DecoderLayer(
        attention, mlp, e, 1e-5, mlp_norm=torch.ones(hidden), input_norm=torch.ones(width)
    )


def project(random: Random):
    layer = make_layer(random)
    args = {"x": draw(random, 3, 32), "cosine": draw(random, 3, 16), "sine": draw(random, 3, 1, 16)}
    return args, lambda x, cosine, sine: list(layer.project(x, (cosine, sine))), None


def finish(random: Random):
    layer = make_layer(random)
    args = {"x": guarded(random, 3, 32), "attended": draw(random, 3, 32)}

    def call(x: Tensor, attended: Tensor) -> Tensor:
        x = x if x.is_meta or not x.is_contiguous() else x.clone()
        layer.finish(x, attended)
        return x

    return args, call, None


def new_layer(random: Random):
    """A layer's own weights, each of which may be wrong."""
    x = draw(random, 3, 32)
    table = draw(random, 3, 16)
    linear = lambda weight: types.SimpleNamespace(  # noqa: E731
        weight=weight,
        bias=None,
        in_features=weight.shape[-1] if weight.dim() else 0,
        out_features=len(weight),
    )
    args = {
        name: draw(random, out, 32) for name, out in (("q", 32), ("k", 16), ("v", 16), ("o", 32))
    }
    args |= {"gate": draw(random, 48, 32), "up": draw(random, 48, 32), "down": draw(random, 32, 48)}
    args |= {
        "mlp_norm": torch.ones(32),
        "input_norm": torch.ones(32),
        "query_norm": torch.ones(16),
        "rotary_dim": 16,
    }

    def call(q, k, v, o, gate, up, down, rotary_dim, **norms):
        attention = types.SimpleNamespace(
            head_dim=16, q_proj=linear(q), k_proj=linear(k), v_proj=linear(v), o_proj=linear(o)
        )
        mlp = types.SimpleNamespace(
            gate_proj=linear(gate), up_proj=linear(up), down_proj=linear(down)
        )
        layer = DecoderLayer(attention, mlp, rotary_dim, 1e-5, **norms)
        y = x.clone()
        rotated = table[:, :rotary_dim].contiguous()
        query, _, _ = layer.project(x, (rotated, rotated))
        layer.finish(y, query.contiguous())
        return y

    return args, call, call


def layers(random: Random):
    stack = LayerStack(
        [made := make_layer(random), make_layer(random)], [PLAIN, {**PLAIN, "window": 3}], [0, 0]
    )
    parents = [-1, 0, 0]
    prefix = 5
    args = {
        "x": draw(random, 4, 32),
        "tables": [draw(random, 4, 16), draw(random, 4, 16)],
        "wanted": [0, 2],
    }
    args |= {
        "parents": parents,
        "prefix": prefix,
        "capacity": 12,
        "kv_heads": made.kv_heads,
        "e": 16,
    }

    def call(x, tables, wanted, parents, prefix, capacity, kv_heads, e):
        if not 0 <= capacity < 1000 or kv_heads > 100 or e > 100:
            raise ValueError("too large for a test")
        cache = TreeCache(capacity)
        shapes = [(kv_heads, e)] * 2
        for keys, values in cache.addresses(shapes).buffers:
            keys.fill_(0.5), values.fill_(0.5)
        plan = CpuPlan([(0, TreeLayout(prefix, parents))])
        x = x.clone() if x.is_contiguous() and not x.is_meta else x
        return stack.forward(x, [tuple(tables)], plan, cache.addresses(shapes), wanted)[0]

    def reference(**changed):
        fixed = {key: args[key] for key in ("kv_heads", "e")}
        assert changed["capacity"] >= changed["prefix"] + len(changed["parents"]) + 1
        return call(
            **{
                **changed,
                **fixed,
                "capacity": 12 if changed["prefix"] == 5 else changed["capacity"],
            }
        )

    return args, call, reference


def placed(buffers: list[Tensor], layout: TreeLayout) -> Placed:
    """The new tokens of a sequence whose cache has these buffers, of one layer with one key head of 16."""
    held = TreeCache(buffers[0].shape[1])
    held._layers[0] = tuple(buffers)
    return Placed(CpuPlan([(0, layout)]), [held.addresses([(1, 16)])])


def draft(random: Random):
    weights = DraftWeights(32, 32, 1e-5, norm=torch.ones(32), project=draw(random, 32, 64))
    layer = make_layer(random)
    args = {"embeds": draw(random, 3, 32), "states": draw(random, 3, 32), "prefix": 5, "window": 4}
    args |= {"tables": [draw(random, 256, 1, 16), draw(random, 256, 1, 16)], "parents": [-1, 0]}
    args |= {"buffers": [guarded(random, 1, 9, 16), guarded(random, 1, 9, 16)]}

    def call(embeds, states, prefix, window, tables, parents, buffers):
        step = DraftStep([layer], weights, lambda *_: tuple(tables), window)
        at = placed(buffers, TreeLayout(prefix, parents))
        return list(step.run(embeds, states, at).unbind(1))

    def reference(embeds, states, prefix, window, tables, parents, buffers):
        layout = TreeLayout(prefix, parents)
        end = prefix + len(parents) + 1
        x = F.linear(torch.cat((embeds, states), -1), weights.project)
        query, *new = layer.project(x, [table[layout.positions()[0]] for table in tables])
        rows = [
            torch.cat((buffer[:, :prefix], part.transpose(0, 1)), 1)
            for buffer, part in zip(buffers, new, strict=True)
        ]
        assert all(buffer.shape[1] >= end for buffer in buffers)
        first, mask = layout.mask(window or None, 2, query)
        attended = tree_attention.masked_attention(
            query.transpose(0, 1)[None], *(row[None, :, first:] for row in rows), mask, PLAIN
        )
        layer.finish(x, attended[0].transpose(0, 1).flatten(1))
        return [x, F.rms_norm(x, (32,), weights.norm, 1e-5)]

    return args, call, reference


def draft_head(random: Random):
    """A vocabulary no larger than the shortlist, whose top tokens are exact."""

    def reference(weight, reads, width):
        logits = reads @ weight.T
        top, ids = logits.log_softmax(-1).topk(width)
        return [ids, top, logits.logsumexp(-1)]

    args = {"weight": draw(random, 50, 33), "reads": draw(random, 3, 33), "width": 7}
    return args, lambda weight, reads, width: list(DraftHead(weight).top(reads, width)), reference


def draft_trees(random: Random):
    """Committed tokens are read in one call, and a tree grows in another."""
    weights = DraftWeights(
        32, 32, 1e-5, norm=torch.ones(32), project=draw(random, 32, 64), fuse=draw(random, 32, 40)
    )
    layer = make_layer(random)
    head = DraftHead(draw(random, 90, 32))
    shape = TreeShape(3, 2, 4, (), -torch.inf)
    args = {
        "table": draw(random, 200, 32),
        "kept_ids": torch.arange(10, 100),
        "features": draw(random, 4, 40),
    }
    args |= {
        "tokens": torch.arange(4),
        "tables": [draw(random, 256, 1, 16), draw(random, 256, 1, 16)],
    }
    args |= {"buffers": [guarded(random, 1, 11, 16), guarded(random, 1, 11, 16)]}

    def call(table, kept_ids, features, tokens, tables, buffers):
        step = DraftStep([layer], weights, lambda *_: tuple(tables))
        at = placed(buffers, TreeLayout(2, count=4))
        roots = step.read(tokens, features, table, at)
        at = placed(buffers, TreeLayout(5, ()))
        made = step.trees(head, shape, table, kept_ids, at, roots)
        return [
            roots,
            *((torch.from_numpy(ids), above, torch.from_numpy(p)) for ids, above, p in made),
        ]

    return args, call, None


def cache(random: Random):
    """Rounds of a cache by the kernels and by torch alone."""
    args = {"rows": [0, 2], "parents": [-1, 0, 0], "kept": [[0, 1, 3], [0, 2]], "copy": [2, 1, 3]}
    args["fresh"] = [draw(random, 1, heads, 8, 16) for heads in (4, 2, 2)]

    def run(rows, parents, kept, copy, fresh):
        held = TreeCache(12, rows=3)
        outs = []
        for _ in range(2):
            held.open([(row, parents) for row in rows])
            with torch.no_grad():
                outs.append(held.attend(0, *fresh, **PLAIN))
            held.commit(kept)
        held.copy(*copy)
        keys = held.by_row(0)[0]
        return [*outs, *(keys[row, :, : held.lengths[row]] for row in range(3))]

    def reference(fresh, **args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tree_attention, "cpu_kernels", lambda: None)
            patch.setattr(tree_cache, "cpu_kernels", lambda: None)
            *outs, first, second, third = run(fresh=[x.float() for x in fresh], **args)
            return [*(out.to(fresh[0].dtype) for out in outs), first, second, third]

    return args, run, reference


WRAPPERS = [
    *(
        linear,
        panels,
        packed_linear,
        rms_norm,
        highest,
        top,
        rows_of_logits,
        moves,
        attention,
        project,
        finish,
    ),
    *(new_layer, layers, draft, draft_head, draft_trees, cache),
]


# -- the cases --------------------------------------------------------------------------------------------------------


def same(got: Any, want: Any) -> bool:
    if isinstance(got, Tensor):
        if got.shape != want.shape:
            return False
        if want.is_meta:
            return got.is_meta
        return torch.allclose(got.double(), want.double(), rtol=1e-3, atol=1e-3, equal_nan=True)
    if isinstance(got, (list, tuple)):
        return len(got) == len(want) and all(map(same, got, want))
    return got == want


def one_case(wrapper: Callable, fault: str, random: Random) -> None:
    """Asserts that the wrapper refuses with ValueError or TypeError, or computes the right result."""
    GUARDS.clear()
    valid, call, reference = wrapper(random)
    args = valid if fault == "none" else spoil(valid, fault, random)
    before = copy.deepcopy(args if reference else valid)
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(call(**args))
        except (
            ValueError,
            TypeError,
            RuntimeError,
            IndexError,
            NotImplementedError,
        ) as error:  # the last three: torch's
            raise UserError(first_line(error)) from error

    text = outcome(f"kernels: {wrapper.__name__}", fault, run)
    assert fault != "none" or not text, text
    for whole, count in GUARDS:
        around = torch.cat((whole[:4096], whole[4096 + count :]))
        assert (around == GUARD).all(), "a write beyond a buffer"
    if not text and (wrapper is not panels or fault == "none"):
        want = (reference or call)(**before)
        assert same(result[0], want), f"accepted, but another result: {result[0]} instead of {want}"


def main(count: int) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    failed = 0
    for wrapper in WRAPPERS:
        for number in range(count):
            fault = ["none", *FAULTS][number % (len(FAULTS) + 1)]
            try:
                one_case(wrapper, fault, Random(number))
            except Exception as error:
                failed += 1
                print(
                    f"{wrapper.__name__}, {fault}, case {number}: {type(error).__name__}: {error}"[
                        :500
                    ],
                    file=sys.stderr,
                )
    sys.exit(f"{failed} cases failed" if failed else 0)


@pytest.mark.thorough
@needs_compiler
def test_kernels_compute_what_torch_computes_or_refuse(capfd):
    """In a child process, which a kernel may crash; forked, which saves imports, where CUDA does not forbid it."""
    count = CASES * int(os.environ.get("FUZZ_SCALE", "1"))
    way = "spawn" if torch.cuda.is_initialized() else "fork"
    child = multiprocessing.get_context(way).Process(target=main, args=(count,))
    child.start()
    child.join()
    said = capfd.readouterr().err
    assert child.exitcode == 0, f"exit status {child.exitcode}\n{said[-3000:]}"


if __name__ == "__main__":
    main(int(sys.argv[1]))
