from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.ops import tree_attention as module
from drafttrain.ops.native import multiplies_bfloat16
from drafttrain.ops.tree_attention import CpuPlan, TreeLayout, tree_attention
from tests.marks import needs_compiler

TREES = {"root": [], "chain": [-1, 0, 1], "tree": [-1, -1, 0, 0, 2, 1, 4]}


def plain_reference(query, key, value, prefix, parents, depths, scaling, window, softcap, sinks):
    """One query row and head at a time, straight from the definition."""
    heads, n = query.shape[1:3]
    groups = heads // key.shape[1]
    out = query.new_zeros(1, heads, n, value.shape[3])
    positions = [*range(prefix), *(prefix + d for d in depths)]
    for i in range(n):
        seen = set(range(prefix))
        at = i
        while at >= 0:
            seen.add(prefix + at)
            at = (parents[at - 1] + 1 if at else -1) if parents is not None else at - 1
        visible = sorted(
            s for s in seen if window is None or positions[prefix + i] - positions[s] < window
        )
        for head in range(heads):
            scores = key[0, head // groups, visible] @ query[0, head, i] * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1]))
            weights = scores.softmax(-1)[: len(visible)]
            out[0, head, i] = weights @ value[0, head // groups, visible]
    return out


def inputs(heads, kv_heads, n, total, width=8, value_width=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((1, heads, n, width), (1, kv_heads, total, width), (1, kv_heads, total, value_width))
    return [torch.randn(shape, generator=g) for shape in shapes]


@pytest.mark.thorough
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("extras", [(None, False), (2.0, False), (None, True), (2.0, True)])
@pytest.mark.parametrize("shape", list(TREES))
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
def test_tree_equals_definition(shape, window, extras, heads, kv_heads):
    softcap, with_sinks = extras
    sinks = torch.linspace(-1, 2, heads) if with_sinks else None
    for prefix in (0, 5):
        layout = TreeLayout(prefix, TREES[shape])
        q, k, v = inputs(heads, kv_heads, layout.count, prefix + layout.count, value_width=6)
        got = tree_attention(
            q, k, v, layout, scaling=0.4, window=window, softcap=softcap, sinks=sinks
        )
        want = plain_reference(
            q, k, v, prefix, TREES[shape], layout.depths, 0.4, window, softcap, sinks
        )
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 4, 200])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("prefix", [0, 6])
def test_long_chains_in_blocks(monkeypatch, window, softcap, prefix):
    monkeypatch.setattr(module, "_BLOCK", 5)
    n = 23
    q, k, v = inputs(4, 2, n, prefix + n)
    got = tree_attention(
        q, k, v, TreeLayout(prefix, count=n), scaling=0.4, window=window, softcap=softcap
    )
    want = plain_reference(q, k, v, prefix, None, range(n), 0.4, window, softcap, None)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_chains_behind_a_prefix_build_small_masks(monkeypatch):
    """All formulations, and no mask that grows with the prefix."""
    monkeypatch.setattr(module, "_BLOCK", 5)
    sizes = []
    chain_mask = TreeLayout.chain_mask
    monkeypatch.setattr(
        TreeLayout, "chain_mask", lambda *a: sizes.append(chain_mask(*a).shape) or chain_mask(*a)
    )
    n = 12
    prefix = 40
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        q, k, v = (x.to(dtype) for x in inputs(4, 2, n, prefix + n))
        got = tree_attention(q, k, v, TreeLayout(prefix, count=n), scaling=0.4)
        floats = [x.float() for x in (q, k, v)]
        want = plain_reference(*floats, prefix, None, range(n), 0.4, None, None, None)
        torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)
    assert max(sizes) == (2 * 5, 5)  # two query heads a key head


def test_prefill_builds_no_mask(monkeypatch):
    monkeypatch.setattr(TreeLayout, "mask", lambda *_: pytest.fail("a mask was built"))
    n = 600
    q, k, v = inputs(4, 2, n, n)
    for window in (None, n):
        tree_attention(q, k, v, TreeLayout(0, count=n), scaling=0.4, window=window)


def test_bfloat16_stays_close_to_float32():
    layout = TreeLayout(40, TREES["tree"])
    q, k, v = inputs(6, 2, layout.count, 40 + layout.count)
    want = tree_attention(q, k, v, layout, scaling=0.4)
    got = tree_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), layout, scaling=0.4)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, atol=3e-2, rtol=3e-2)


def test_batch_rows_share_the_layout():
    layout = TreeLayout(4, TREES["tree"])
    one = inputs(4, 2, layout.count, 4 + layout.count, seed=1)
    two = inputs(4, 2, layout.count, 4 + layout.count, seed=2)
    sinks = torch.linspace(-1, 1, 4)
    both = [torch.cat(pair) for pair in zip(one, two, strict=True)]
    for options in ({}, {"softcap": 2.0}, {"sinks": sinks}):
        got = tree_attention(*both, layout, scaling=0.4, **options)
        want = [tree_attention(*rows, layout, scaling=0.4, **options) for rows in (one, two)]
        torch.testing.assert_close(got, torch.cat(want))


def test_layers_share_one_mask_and_wide_windows_need_none_of_their_own():
    layout = TreeLayout(10, TREES["tree"])
    like = torch.zeros(1)
    first, mask = layout.mask(None, 2, like)
    assert first == 0
    assert layout.mask(None, 2, like)[1] is mask
    assert layout.mask(500, 2, like)[1] is mask
    narrow_first, narrow = layout.mask(4, 2, like)
    assert narrow_first == 7
    assert narrow.shape == (2 * layout.count, 3 + layout.count)


def test_siblings_share_a_position():
    assert TreeLayout(10, TREES["tree"]).positions().tolist() == [[10, 11, 11, 12, 12, 13, 12, 14]]
    assert TreeLayout(3, count=4).positions().tolist() == [[3, 4, 5, 6]]


@pytest.mark.thorough
@needs_compiler
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cpu_kernel_equals_torch(data):
    heads, kv_heads = data.draw(st.sampled_from([(9, 3), (4, 1), (4, 4), (14, 2)]))
    width, value_width = data.draw(st.sampled_from([(16, 16), (64, 64), (80, 80), (64, 112)]))
    prefix = data.draw(st.integers(0, 40) | st.integers(200, 560))
    n = data.draw(st.integers(1, 64))
    parents = (
        [data.draw(st.integers(-1, node - 1)) for node in range(n - 1)]
        if data.draw(st.booleans())
        else None
    )
    layout = TreeLayout(prefix, parents, count=n)
    q, k, v = inputs(heads, kv_heads, n, prefix + n, width, value_width, seed=n)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # as projections give it
    k = k[:, :, : prefix + n]
    v = v[:, :, : prefix + n]
    options = {
        "scaling": width**-0.5,
        "window": data.draw(st.sampled_from([None, 1, 4, 30, 300])),
        "softcap": data.draw(st.sampled_from([None, 3.0])),
        "sinks": torch.linspace(-2, 2, heads) if data.draw(st.booleans()) else None,
    }
    plan = CpuPlan.build([(0, layout)])
    assert not plan.serves(q, k[0], v[0])  # gradients could be asked for
    want = tree_attention(q, k, v, layout, **options)
    with torch.no_grad():
        assert plan.serves(q, k[0], v[0])
        got = tree_attention(q, k, v, layout, **options)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [None, 199])
@pytest.mark.parametrize("prefix", [0, 37, 254, 255, 511, 2046])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_cpu_kernel_gives_a_node_what_plain_decoding_gives(stored, prefix, window, threads):
    """To the bit: other nodes, the kernel's stretches of 256 positions, their pairs and threads add no rounding."""
    parents = [-1, -1, 1, 0, 2]
    q, k, v = inputs(6, 2, 6, prefix + 6, 64, 64)
    k = k.to(stored)
    v = v.to(stored)
    form = {"scaling": 0.125, "window": window}
    path = [0, 2, 3, 5]  # the root, and the nodes 1, 2 and 4
    slots = [*range(prefix), *(prefix + token for token in path)]
    plain = []
    for depth, token in enumerate(path):
        seen = slots[: prefix + depth + 1]
        layout = TreeLayout(prefix + depth, count=1)
        plain.append(tree_attention(q[:, :, [token]], k[:, :, seen], v[:, :, seen], layout, **form))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tree = tree_attention(q, k, v, TreeLayout(prefix, parents), **form)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(tree[:, :, path], torch.cat(plain, 2))
    # Where the processor multiplies bfloat16, queries and weights are rounded to it: 8 bits.
    rounds = stored == torch.bfloat16 and multiplies_bfloat16()
    wide = tree_attention(q, k.float(), v.float(), TreeLayout(prefix, parents), **form)
    tolerance = 2e-2 if rounds else 0
    torch.testing.assert_close(tree, wide, atol=tolerance, rtol=0)


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_cpu_kernel_serves_packed_rows(data):
    """Several sequences in one call, each on its own part of the slot axis, keys and values stored on the way; trees may grow."""
    rows = data.draw(st.integers(1, 4))
    capacity = 60
    order = data.draw(st.permutations(range(rows)))
    layouts = []
    for _ in order:
        n = data.draw(st.integers(1, 20))
        tree = (
            [data.draw(st.integers(-1, node - 1)) for node in range(n - 1)]
            if data.draw(st.booleans())
            else None
        )
        held = data.draw(st.integers(0, n - 1)) if tree is not None else 0
        layouts.append(TreeLayout(data.draw(st.integers(0, 40)), tree, count=n, held=held))
    olds = [layout.prefix_len + layout.held for layout in layouts]
    total = sum(layout.count for layout in layouts)
    q, key, value = inputs(6, 2, total, total, 32, 48, seed=total)
    _, keys, values = inputs(6, 2, 1, rows * capacity, 32, 48, seed=1)
    keys = keys[0].clone()
    values = values[0].clone()
    options = {
        "scaling": 0.2,
        "window": data.draw(st.sampled_from([None, 5])),
        "softcap": None,
        "sinks": None,
    }
    want = []
    begin = 0
    for row, layout, old in zip(order, layouts, olds, strict=True):
        own = slice(begin, begin + layout.count)
        first = row * capacity
        k = torch.cat((keys[None, :, first : first + old], key[:, :, own]), dim=2)
        v = torch.cat((values[None, :, first : first + old], value[:, :, own]), dim=2)
        want.append(tree_attention(q[:, :, own], k, v, layout, **options))
        begin += layout.count
    with torch.no_grad():
        plan = CpuPlan.build(
            [(row * capacity, layout) for row, layout in zip(order, layouts, strict=True)]
        )
        got = plan.attend(q, keys, values, new=(key, value), **options)
    torch.testing.assert_close(got, torch.cat(want, dim=2).transpose(1, 2), atol=2e-5, rtol=2e-5)
    first = order[0] * capacity + olds[0]
    assert torch.equal(keys[:, first : first + layouts[0].count], key[0, :, : layouts[0].count])


@pytest.mark.parametrize("width", [8, 16])  # the kernel serves multiples of 16
@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_a_tree_may_grow_over_several_forwards(width, window):
    for prefix, (_, parents) in zip((0, 5, 9), TREES.items(), strict=True):
        n = len(parents) + 1
        q, k, v = inputs(6, 2, n, prefix + n, width=width, value_width=width)
        whole = tree_attention(q, k, v, TreeLayout(prefix, parents), scaling=0.4, window=window)
        for held in range(1, n):
            layout = TreeLayout(prefix, parents, held=held)
            assert layout.count == n - held
            assert layout.positions().tolist() == [
                (TreeLayout(prefix, parents).depths[held:] + prefix).tolist()
            ]
            got = tree_attention(q[:, :, held:], k, v, layout, scaling=0.4, window=window)
            torch.testing.assert_close(got, whole[:, :, held:], atol=1e-5, rtol=1e-5)
