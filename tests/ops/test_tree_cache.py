from __future__ import annotations

import pytest
import torch

from drafttrain.errors import UserError
from drafttrain.ops.native import multiplies_bfloat16
from drafttrain.ops.tree_cache import SlotMover, TreeCache
from tests.marks import needs_compiler

FORM = {"scaling": 0.2, "window": None, "softcap": None, "sinks": None}


def random_tokens(count, seed=0):
    """Queries [1, 6, count, 32], keys and values [1, 2, count, 32]."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, count, 32, generator=draw) for heads in (6, 2, 2)]


def read(
    cache,
    new,
    tokens,
    **form,
):
    """Attention of one forward; `tokens` are all of its rows' tokens."""
    cache.open(new)
    return cache.attend(0, *tokens, **{**FORM, **form})


def feed(
    cache,
    values,
    parents=None,
):
    """One forward with 1-wide keys whose value is the number given."""
    cache.open([(0, len(values) if parents is None else parents)])
    x = torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1)
    for layer in range(2):
        cache.attend(
            layer,
            x,
            x + layer,
            x.repeat(1, 1, 1, 2),
            scaling=1.0,
            window=None,
            softcap=None,
            sinks=None,
        )


def held(cache, layer=0):
    return cache._layers[layer][0][0, : cache.lengths[0], 0].tolist()


@pytest.mark.parametrize(
    ("kept", "want"),
    [
        ([0], [10]),
        ([0, 1], [10, 11]),
        ([0, 2], [10, 12]),
        ([0, 2, 4], [10, 12, 14]),
        ([0, 1, 3], [10, 11, 13]),
    ],
)
def test_commit_keeps_the_path_in_order(kept, want):
    cache = TreeCache(12)
    feed(cache, [1, 2, 3])
    cache.commit([range(3)])
    feed(cache, [10, 11, 12, 13, 14], [-1, -1, 0, 1])
    cache.commit([kept])
    assert held(cache) == [1, 2, 3, *want]
    assert held(cache, layer=1) == [x + 1 for x in [1, 2, 3, *want]]
    feed(cache, [20], [])
    cache.commit([[0]])
    assert held(cache) == [1, 2, 3, *want, 20]


def test_contiguous_paths_are_not_copied(monkeypatch):
    cache = TreeCache(8)
    feed(cache, [1, 2, 3], [-1, 0])
    monkeypatch.setattr(SlotMover, "move", lambda *_: pytest.fail("copied"))
    cache.commit([[0, 1]])
    assert held(cache) == [1, 2]


def test_keys_and_values_may_differ_in_width():
    cache = TreeCache(4)
    feed(cache, [1, 2])
    keys, values = cache._layers[0]
    assert keys.shape == (1, 4, 1)
    assert values.shape == (1, 4, 2)


def test_overflow_is_said_before_anything_is_written():
    cache = TreeCache(4)
    feed(cache, [1, 2, 3])
    cache.commit([range(3)])
    with pytest.raises(
        UserError, match=r"holds 4 positions, but 3 \+ 2 are needed; use a smaller tree"
    ):
        cache.open([(0, [-1])])


def test_rows_commit_their_own_paths_in_one_forward():
    cache = TreeCache(8, rows=3)
    cache.open([(2, 2), (0, 1)])
    x = torch.tensor([1.0, 2.0, 50.0]).view(1, 1, -1, 1)
    options = {"scaling": 1.0, "window": None, "softcap": None, "sinks": None}
    cache.attend(0, x, x, x, **options)
    cache.commit([range(2), range(1)])
    assert cache.positions().tolist() == [[0, 1, 0]]
    cache.open([(0, [-1, -1]), (2, [-1, -1, 1])])
    assert cache.positions().tolist() == [[1, 2, 2, 2, 3, 3, 4]]
    x = torch.tensor([51.0, 52.0, 53.0, 3.0, 4.0, 5.0, 6.0]).view(1, 1, -1, 1)
    cache.attend(0, x, x, x, **options)
    cache.commit([[0, 2], [0, 2, 3]])
    assert cache.lengths == [3, 0, 5]
    keys = cache._layers[0][0].view(3, 8)
    assert keys[0, :3].tolist() == [50, 51, 53]
    assert keys[2, :5].tolist() == [1, 2, 3, 5, 6]
    cache.clear(0)
    cache.open([(0, 1)])
    assert cache.opened[0][1].prefix_len == 0


def test_memory_is_told():
    cache = TreeCache(1024, rows=2)
    assert cache.nbytes == 0
    feed(cache, [1, 2, 3])
    assert cache.nbytes == 2 * 2 * 1024 * (1 + 2) * 4
    assert str(cache) == "key/value cache 0.0 MiB (2 rows x 1,024 positions)"


def test_more_room_keeps_what_rows_hold():
    cache = TreeCache(4, rows=2)
    for row, value in enumerate((1.0, 5.0)):
        cache.open([(row, 2)])
        x = torch.tensor([value, value + 1]).view(1, 1, 2, 1)
        cache.attend(
            0, x, x, x.repeat(1, 1, 1, 2), scaling=1.0, window=None, softcap=None, sinks=None
        )
        cache.commit([range(2)])
    cache.reserve(9)
    cache.reserve(3)
    keys, values = cache._layers[0]
    assert cache.capacity == 9 and keys.shape == (1, 18, 1)
    assert (
        keys[0, [0, 1, 9, 10], 0].tolist() == values[0, [0, 1, 9, 10], 1].tolist() == [1, 2, 5, 6]
    )
    cache.open([(1, [-1, -1])])
    x = torch.tensor([7.0, 8.0, 9.0]).view(1, 1, 3, 1)
    cache.attend(0, x, x, x.repeat(1, 1, 1, 2), scaling=1.0, window=None, softcap=None, sinks=None)
    cache.commit([[0, 2]])
    cache.reserve(12)  # what moves slots moves the new buffers'
    cache.open([(1, [-1, -1])])
    cache.attend(0, x, x, x.repeat(1, 1, 1, 2), scaling=1.0, window=None, softcap=None, sinks=None)
    cache.commit([[0, 2]])
    assert cache._layers[0][0][0, 12:18, 0].tolist() == [5, 6, 7, 9, 7, 9]


@pytest.mark.parametrize("width", [8, 16])
@torch.no_grad()
def test_half_precision_rows_are_kept_in_float32_on_a_cpu(width):
    """What goes in and comes out has the target's dtype; a prompt and a tree agree with float32 up to rounding."""
    generator = torch.Generator().manual_seed(0)
    caches = (TreeCache(20), TreeCache(20))
    options = {"scaling": 0.5, "window": None, "softcap": None, "sinks": None}
    for shape, n in ((5, 5), ([-1, -1, 0], 4)):
        parts = [
            torch.randn(1, heads, n, width, generator=generator).bfloat16() for heads in (4, 2, 2)
        ]
        outs = []
        for cache, dtype in zip(caches, (torch.bfloat16, torch.float32), strict=True):
            cache.open([(0, shape)])
            outs.append(cache.attend(0, *(part.to(dtype) for part in parts), **options))
            cache.commit([range(n)])
            assert outs[-1].dtype == dtype
        torch.testing.assert_close(outs[0].float(), outs[1], atol=2e-2, rtol=2e-2)
    assert all(buffer.dtype == torch.float32 for buffer in caches[0]._layers[0])
    assert torch.equal(caches[0]._layers[0][0][:, :9], caches[1]._layers[0][0][:, :9])


@needs_compiler
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_text_read_at_once_gets_the_bits_of_one_read_token_by_token(dtype, window):
    """Longer than the 64 tokens of a piece and the 256 positions of a stretch, beside a row with a tree."""
    tokens = random_tokens(300)
    slowly = TreeCache(310, dtype=dtype)
    want = []
    for i in range(300):
        one = [tensor[:, :, i : i + 1] for tensor in tokens]
        want.append(read(slowly, [(0, 1)], one, window=window))
        slowly.commit([[0]])
    at_once = TreeCache(310, rows=2, dtype=dtype)
    read(at_once, [(0, 40)], [tensor[:, :, :40] for tensor in tokens], window=window)
    at_once.commit([range(40)])
    tree = random_tokens(4, seed=1)
    rest = [torch.cat((a[:, :, 40:], b), dim=2) for a, b in zip(tokens, tree, strict=True)]
    got = read(at_once, [(0, 260), (1, [-1, -1, 0])], rest, window=window)
    assert torch.equal(got[:, :260], torch.cat(want, dim=1)[:, 40:])


@needs_compiler
@torch.no_grad()
def test_keys_of_a_bfloat16_target_are_stored_in_half_the_bytes():
    tokens = random_tokens(70)
    query, key, value = tokens
    rounded = [query, key.bfloat16().float(), value.bfloat16().float()]
    half = TreeCache(100, dtype=torch.bfloat16)
    full = TreeCache(100)
    got = read(half, [(0, 70)], tokens)
    # Where the processor multiplies bfloat16, queries and weights are rounded too.
    tolerance = 2e-2 if multiplies_bfloat16() else 0
    torch.testing.assert_close(got, read(full, [(0, 70)], rounded), atol=tolerance, rtol=0)
    assert half.nbytes * 2 == full.nbytes
    # A tree that the kernel does not serve reads the same keys.
    for cache in (half, full):
        cache.commit([range(10)])
    wide = [-1] * 66
    tree = random_tokens(67, seed=2)
    rounded = [tree[0], tree[1].bfloat16().float(), tree[2].bfloat16().float()]
    got = read(half, [(0, wide)], tree)
    torch.testing.assert_close(got, read(full, [(0, wide)], rounded), atol=2e-6, rtol=2e-6)
