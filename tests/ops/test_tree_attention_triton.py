"""The kernels against their reference: on a GPU as compiled, elsewhere in Triton's interpreter."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafttrain.ops import tree_attention_triton as module
from drafttrain.ops.tree_attention import TreeLayout, tree_attention
from drafttrain.ops.tree_attention_triton import (
    Geometry,
    PackedPlan,
    PlanShape,
    choose_geometry,
    pack_plan,
    packed_tree_attention,
    static_reference,
)

pytest.importorskip("triton", reason="triton has no build for this platform")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
PLAIN = {"scaling": 0.3, "window": None, "softcap": None, "sinks": None}


def tree(n, seed=0):
    """A root and n - 1 nodes at random places below it."""
    g = torch.Generator().manual_seed(seed)
    return [int(torch.randint(-1, i, (1,), generator=g)) for i in range(n - 1)]


def pairs(layouts, rows=None):
    """The parts of a forward: each layout with its row of the cache, 0 to R - 1 by default."""
    return list(zip(rows or range(len(layouts)), layouts, strict=True))


class Forward(NamedTuple):
    """A plan with the layouts and cache rows that it was packed from."""

    plan: PackedPlan
    layouts: list[TreeLayout]
    rows: list[int]


def reference(query, keys, values, layouts, rows, **options):
    """Each row by plain tree attention, from its layout."""
    parts = []
    start = 0
    for layout, row in zip(layouts, rows, strict=True):
        end = start + layout.count
        total = layout.prefix_len + layout.count
        key = keys[row, None, :, :total]
        value = values[row, None, :, :total]
        parts.append(tree_attention(query[:, :, start:end], key, value, layout, **options))
        start = end
    return torch.cat(parts, dim=2)


def batch(layouts, heads=2, kv_heads=1, width=16, value_width=16, dtype=torch.float32, rows=None):
    """Queries, keys, values and the forward; what lies beyond each row's end is nan, and so are spare cache rows."""
    g = torch.Generator().manual_seed(0)
    rows = list(range(len(layouts)) if rows is None else rows)
    capacity = max(layout.prefix_len + layout.count for layout in layouts) + 3
    count = sum(layout.count for layout in layouts)
    query = torch.randn(1, count, heads, width, generator=g).to(DEVICE, dtype).transpose(1, 2)
    shape = (max(rows) + 1, kv_heads, capacity)
    keys, values = (
        torch.full((*shape, w), float("nan"), dtype=dtype, device=DEVICE)
        for w in (width, value_width)
    )
    for layout, row in zip(layouts, rows, strict=True):
        end = layout.prefix_len + layout.count
        keys[row, :, :end] = torch.randn(kv_heads, end, width, generator=g).to(DEVICE, dtype)
        values[row, :, :end] = torch.randn(kv_heads, end, value_width, generator=g).to(
            DEVICE, dtype
        )
    return (
        query,
        keys,
        values,
        Forward(PackedPlan.build(pairs(layouts, rows), DEVICE), layouts, rows),
    )


def difference(query, keys, values, forward, geometry, **options):
    """The largest distance between the kernels and the float32 reference on the same numbers."""
    options = PLAIN | options
    got = module._launch(query, keys, values, forward.plan, **options, geometry=geometry)
    assert got.shape == (*query.shape[:3], values.shape[3])
    assert got.dtype == query.dtype
    want = reference(query.float(), keys.float(), values.float(), *forward[1:], **options)
    assert not want.isnan().any()
    return (got.float() - want).nan_to_num(nan=1e9).abs().max().item()


RAGGED = [
    TreeLayout(5, tree(3)),
    TreeLayout(0, []),
    TreeLayout(37, tree(10)),
    TreeLayout(20, count=6),
]


OPTIONS = [
    (None, None, False, 2),
    (7, None, True, 2),
    (2, 5.0, False, 3),
    (None, 2.0, True, 1),
    (33, None, False, 1),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "window", "softcap", "sinks", "parts"),
    [  # a type changes how numbers are read and written, whatever the options are
        pytest.param(
            dtype, *options, marks=[] if dtype == torch.float32 or number == 1 else pytest.mark.slow
        )
        for dtype in TOLERANCE
        for number, options in enumerate(OPTIONS)
    ],
    ids=str,
)
def test_a_ragged_batch_equals_the_reference(dtype, window, softcap, sinks, parts):
    data = batch(RAGGED, heads=3, width=20, value_width=12, dtype=dtype, rows=[4, 0, 2, 5])
    sinks = torch.linspace(-1, 2, 3, device=DEVICE) if sinks else None
    geometry = Geometry(32, 16, parts, 4, 2)
    assert (
        difference(*data, geometry, window=window, softcap=softcap, sinks=sinks) < TOLERANCE[dtype]
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("n", "block_n"),
    [
        (1, 16),
        (31, 64),
        (32, 16),
        (33, 64),
        (33, 16),
        (64, 64),
        (64, 16),
        (65, 64),
        (97, 16),
        (130, 64),
    ],
)
def test_every_count_of_nodes_around_the_words_of_the_bitmask(n, block_n):
    layouts = [TreeLayout(21, tree(n, seed=n))]
    assert difference(*batch(layouts, heads=1), Geometry(64, block_n, 1, 4, 1)) < 2e-5


@pytest.mark.thorough
@pytest.mark.parametrize("ratio", [1, 3, 7, 8])
def test_groups_of_heads_across_tiles(ratio):
    """With 16 pairs a tile, groups of 3 and 7 heads are cut in the middle of a token."""
    data = batch([TreeLayout(9, tree(6)), TreeLayout(2, tree(3))], heads=2 * ratio, kv_heads=2)
    assert difference(*data, Geometry(16, 32, 1, 4, 1)) < 2e-5


@pytest.mark.parametrize(
    ("width", "value_width"), [(64, 64), (80, 80), (96, 96), (128, 64), (256, 256), (5, 3)]
)
def test_head_sizes(width, value_width):
    data = batch([TreeLayout(19, tree(4))], width=width, value_width=value_width)
    assert difference(*data, Geometry(16, 32, 2, 4, 1), scaling=width**-0.5) < 2e-5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("prefix", "window"),
    [(0, None), (0, 1), (15, 16), (15, 18), (16, None), (16, 16), (17, 1), (17, 16), (17, 18)],
)
def test_block_edges_of_prefix_and_window(prefix, window):
    data = batch([TreeLayout(prefix, tree(5)), TreeLayout(prefix, count=5)], heads=1)
    assert difference(*data, Geometry(16, 16, 2, 4, 1), window=window) < 2e-5


@pytest.mark.thorough
def test_more_parts_than_blocks_leave_no_trace():
    assert difference(*batch([TreeLayout(3, tree(4))]), Geometry(16, 16, 20, 4, 1)) < 2e-5


def test_queries_of_any_stride():
    query, keys, values, forward = batch(RAGGED, heads=3)
    assert difference(query.contiguous(), keys, values, forward, Geometry(32, 32, 1, 4, 1)) < 2e-5


@pytest.mark.thorough
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_batches(data):
    layouts = []
    for _ in range(data.draw(st.integers(1, 2))):
        n = data.draw(st.integers(1, 40))
        prefix = data.draw(st.integers(0, 50))
        if data.draw(st.booleans()):
            layouts.append(
                TreeLayout(prefix, [data.draw(st.integers(-1, i - 1)) for i in range(n - 1)])
            )
        else:
            layouts.append(TreeLayout(prefix, count=n))
    window = data.draw(st.none() | st.integers(1, 60))
    block_n = data.draw(st.sampled_from([16, 32, 64]))
    parts = data.draw(st.sampled_from([1, 1, 2]))
    assert (
        difference(*batch(layouts, heads=1), Geometry(64, block_n, parts, 4, 1), window=window)
        < 2e-5
    )


def test_the_plan_says_what_the_layouts_say():
    layouts = [TreeLayout(5, [-1, -1, 0]), TreeLayout(7, count=2), TreeLayout(1, tree(40))]
    plan = PackedPlan.build(pairs(layouts, [2, 0, 1]))
    assert plan.rows.tolist() == [2, 0, 1]
    assert plan.offsets.tolist() == [0, 4, 6, 46]
    assert plan.prefix_lens.tolist() == [5, 7, 1]
    assert plan.chains.tolist() == [0, 1, 0]
    assert plan.positions[:6].tolist() == [5, 6, 6, 7, 7, 8]
    assert plan.ancestors.shape == (46, 2)
    assert plan.ancestors[:6, 0].tolist() == [0b1, 0b11, 0b101, 0b1011, 0, 0]
    assert plan.max_new == 40
    assert all(
        t.dtype == torch.int32 and t.data_ptr() % 16 == 0
        for t in (plan.rows, plan.offsets, plan.ancestors)
    )


def test_long_chains_take_no_room_of_their_own():
    plan = PackedPlan.build(pairs([TreeLayout(0, count=5000), TreeLayout(9, tree(8))]))
    assert plan.ancestors.shape == (5008, 1)


def test_off_the_gpu_a_packed_batch_equals_each_row_alone():
    query, keys, values = (x.cpu() for x in batch(RAGGED, rows=[3, 1, 0, 2])[:3])
    options = PLAIN | {"window": 4}
    got = packed_tree_attention(
        query, keys, values, PackedPlan.build(pairs(RAGGED, [3, 1, 0, 2])), **options
    )
    torch.testing.assert_close(got, reference(query, keys, values, RAGGED, [3, 1, 0, 2], **options))
    assert got.transpose(1, 2).is_contiguous()


SHAPE = PlanShape(rows=4, tokens=32, max_new=24, words=1)
# Batches that a static plan of this shape holds in turn, with the cache rows of each.
CONTENTS = [
    (
        [
            TreeLayout(5, tree(3)),
            TreeLayout(0, []),
            TreeLayout(37, tree(10)),
            TreeLayout(20, tree(6)),
        ],
        [4, 0, 2, 5],
    ),
    ([TreeLayout(44, tree(20)), TreeLayout(3, count=12)], [1, 3]),
    ([TreeLayout(1, tree(9)), TreeLayout(0, tree(7)), TreeLayout(29, tree(16))], [3, 4, 0]),
]


def static_batch(numbers, layouts, rows):
    """Queries, keys, values as in `batch`, the plan's numbers set, and how many tokens are none that pad it."""
    count = sum(layout.count for layout in layouts)
    pads = SHAPE.tokens - count
    last = layouts[-1]
    # Slots of padding tokens are written like others.
    padded = [*layouts[:-1], TreeLayout(last.prefix_len, count=last.count + pads)]
    query, keys, values, _ = batch(padded, heads=2, rows=rows)
    keys, values = (
        torch.nn.functional.pad(x, (0, 0, 0, 80 - x.shape[2]), value=float("nan"))
        for x in (keys, values)
    )
    numbers.copy_(torch.from_numpy(pack_plan(pairs(layouts, rows), SHAPE)))
    return query, keys, values, count


@pytest.mark.thorough
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(None, None, False), (3, 5.0, True)])
def test_one_static_plan_serves_batch_after_batch(window, softcap, sinks, monkeypatch):
    """Kernels and reference read its tensors alone, so what a graph has captured (the geometry too) stays right."""
    sinks = torch.linspace(-1, 2, 2, device=DEVICE) if sinks else None
    options = {"scaling": 0.3, "window": window, "softcap": softcap, "sinks": sinks}
    numbers = torch.zeros(SHAPE.numbers, dtype=torch.int32, device=DEVICE)
    plan = PackedPlan.static(numbers, SHAPE)
    geometries = set()
    choose = module.choose_geometry

    def recorded(**sizes):
        geometries.add(choose(**sizes))
        return choose(**sizes)

    monkeypatch.setattr(module, "choose_geometry", recorded)
    if DEVICE == "cpu":
        monkeypatch.setattr(module, "_device_limits", lambda index: (12, 65536))
    for layouts, rows in CONTENTS:
        query, keys, values, count = static_batch(numbers, layouts, rows)
        want = reference(query[:, :, :count], keys, values, layouts, rows, **options)
        for attend in (static_reference, module._launch):
            got = attend(query, keys, values, plan, **options)
            assert got.shape == query.shape and got.isfinite().all()
            torch.testing.assert_close(got[:, :, :count], want, atol=2e-5, rtol=2e-5)
            assert got.transpose(1, 2).is_contiguous()
    (geometry,) = geometries
    assert window or DEVICE == "cuda" or geometry.parts == 2


def test_padding_a_plan():
    shape = PlanShape(rows=4, tokens=8, max_new=6, words=2)
    layouts = [TreeLayout(5, [-1, 0]), TreeLayout(7, [-1])]
    plan = PackedPlan.static(torch.from_numpy(pack_plan(pairs(layouts, [2, 0]), shape)), shape)
    assert plan.rows.tolist() == [2, 0, 0, 0]
    assert plan.offsets.tolist() == [0, 3, 8, 8, 8]
    assert plan.prefix_lens.tolist() == [5, 7, 0, 0]
    assert plan.positions.tolist() == [5, 6, 7, 7, 8, 7, 7, 7]
    assert plan.ancestors[:, 0].tolist() == [0b1, 0b11, 0b111, 0b1, 0b11, 0b100, 0b1000, 0b10000]
    assert not plan.ancestors[:, 1].any()
    whole = PackedPlan.static(
        torch.from_numpy(pack_plan([(0, TreeLayout(0, []))], (s := PlanShape(1, 40, 40, 2)))), s
    )
    assert whole.ancestors[31].tolist() == [-(2**31), 0] and whole.ancestors[39].tolist() == [
        0,
        1 << 7,
    ]
    with pytest.raises(ValueError, match="do not fit the plan's shape"):
        pack_plan(pairs(layouts, [2, 0]), shape._replace(max_new=4))


@pytest.mark.parametrize("shared", [65536, 101376, 166912, 232448])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [64, 80, 128, 192, 256])
def test_geometry_fits_the_device(shared, itemsize, width):
    for pairs in (1, 12, 64, 256, 4000):
        chosen = choose_geometry(pairs, 8, 8192, width, width, itemsize, 132, shared)
        padded = module._power_of_two(width)
        blocks = chosen.stages * chosen.block_n * 2 * padded + chosen.block_m * (
            padded + chosen.block_n
        )
        assert blocks * itemsize <= shared
        assert chosen.block_m >= 16 and 16 <= chosen.block_n <= 64


def test_parts_fill_the_device_and_no_more():
    def parts(pairs=32, groups=8, span=8192):
        return choose_geometry(pairs, groups, span, 128, 128, 2, 132, 232448).parts

    assert parts() == 33
    assert parts(pairs=256) == 8
    assert parts(groups=512) == 1
    assert parts(span=100) == 1
    assert parts(groups=1, span=10**6) == 128


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_full_size_on_a_gpu_and_replayed_from_a_graph(dtype):
    layouts = [TreeLayout(8192, tree(64)), TreeLayout(700, tree(33)), TreeLayout(0, count=64)]
    query, keys, values, forward = batch(
        layouts, heads=32, kv_heads=8, width=128, value_width=128, dtype=dtype
    )
    # the second plan's rows are longer
    keys = keys.nan_to_num()
    values = values.nan_to_num()
    options = PLAIN | {"scaling": 128**-0.5}
    assert difference(query, keys, values, forward, None, **options) < TOLERANCE[dtype]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = module._launch(query, keys, values, forward.plan, **options)
    longer = [
        TreeLayout(8000, tree(64, seed=5)),
        TreeLayout(1000, tree(33, seed=6)),
        TreeLayout(50, count=64),
    ]
    other = PackedPlan.build(pairs(longer), DEVICE)
    for name in ("prefix_lens", "positions", "ancestors"):
        getattr(forward.plan, name).copy_(getattr(other, name))
    graph.replay()
    want = reference(query.float(), keys.float(), values.float(), longer, forward.rows, **options)
    torch.testing.assert_close(got.float(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q.bfloat16(), k, v),
        lambda q, k, v: (q[:, :, :-1], k, v),
        lambda q, k, v: (q[..., :8], k, v),
        lambda q, k, v: (q[:, :3], k, v),
        lambda q, k, v: (q, k, v[:, :, :-1]),
        lambda q, k, v: (q, k.transpose(2, 3).contiguous().transpose(2, 3), v),
        lambda q, k, v: (q, k.to("meta"), v),
    ],
)
def test_what_does_not_fit_the_plan_is_refused_before_a_launch(change):
    plan = PackedPlan.build(pairs([TreeLayout(5, [-1, -1, 0]), TreeLayout(7, count=2)]))
    query = torch.randn(1, 4, 6, 16)
    keys = torch.randn(2, 2, 20, 16)
    values = torch.randn(2, 2, 20, 16)
    form = {"scaling": 1.0, "window": None, "softcap": None, "sinks": None}
    with pytest.raises((ValueError, TypeError)):
        module._launch(*change(query, keys, values), plan, **form)
    with pytest.raises(ValueError, match="do not fit the plan's shape"):
        pack_plan([(-1, TreeLayout(5, [-1]))], PlanShape(1, 2, 2, 1))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "attend", [static_reference, partial(module._launch, geometry=Geometry(16, 16, 2, 4, 2))]
)
@pytest.mark.parametrize("window", [None, 4])
def test_a_tree_that_grows_over_passes_attends_as_one(attend, window):
    """Two rows of a tree of 6 tokens, whose first 3 are stored; then a block whose tokens see each other, the last two asking."""
    layouts = [TreeLayout(5, [-1, -1, 0, 1, 2]), TreeLayout(2, [-1, 0, 1, 1, 0])]
    capacity = 16
    torch.manual_seed(0)
    query = torch.randn(1, 4, 12, 16)
    keys = torch.randn(2, 2, capacity, 16)
    values = torch.randn(2, 2, capacity, 16)
    form = {"scaling": 0.25, "window": window, "softcap": None, "sinks": None}
    whole = PackedPlan.build(pairs(layouts))
    want = attend(query, keys, values, whole, **form)
    later = whole._replace(
        offsets=torch.tensor([0, 3, 6], dtype=torch.int32),
        helds=torch.full((2,), 3, dtype=torch.int32),
        max_new=3,
        queries=6,
    )
    asking = [3, 4, 5, 9, 10, 11]
    got = attend(query[:, :, asking], keys, values, later, **form)
    torch.testing.assert_close(got, want[:, :, asking], atol=1e-5, rtol=1e-5)
    mutual = later._replace(
        offsets=torch.tensor([0, 2, 4], dtype=torch.int32),
        helds=torch.full((2,), 4, dtype=torch.int32),
        ancestors=torch.full_like(whole.ancestors, -1),
        max_new=2,
        queries=4,
    )
    got = attend(query[:, :, [4, 5, 10, 11]], keys, values, mutual, **form)
    for row, (layout, queries) in enumerate(
        zip(layouts, query[0, :, [4, 5, 10, 11]].split(2, dim=1), strict=True)
    ):
        end = layout.prefix_len + 6
        seen, value = (x[row, :, :end].repeat_interleave(2, dim=0) for x in (keys, values))
        places = torch.cat(
            (
                torch.arange(layout.prefix_len),
                torch.tensor(layout.tree_depths) + layout.prefix_len,
            )
        )
        scores = queries @ seen.transpose(1, 2) * 0.25
        if window is not None:
            scores = scores.masked_fill(places[-2:, None] - places >= window, -torch.inf)
        torch.testing.assert_close(
            got[0, :, 2 * row : 2 * row + 2], scores.softmax(-1) @ value, atol=1e-5, rtol=1e-5
        )
