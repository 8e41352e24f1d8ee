from __future__ import annotations

import pytest
import torch

from drafttrain.decode.cache import TreeCache
from drafttrain.errors import UserError


def feed(cache, values, parents=None):
    """One forward with 1-wide keys whose value is the number given."""
    cache.open(parents, None if parents is not None else len(values))
    x = torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1)
    for layer in range(2):
        cache.attend(layer, x, x + layer, x.repeat(1, 1, 1, 2), scaling=1.0, window=None, softcap=None, sinks=None)


def held(cache, layer=0):
    return cache._layers[layer][0][0, 0, : cache.length, 0].tolist()


@pytest.mark.parametrize(
    ("kept", "want"),
    [([0], [10]), ([0, 1], [10, 11]), ([0, 2], [10, 12]), ([0, 2, 4], [10, 12, 14]), ([0, 1, 3], [10, 11, 13])],
)
def test_commit_keeps_the_path_in_order(kept, want):
    cache = TreeCache(12)
    feed(cache, [1, 2, 3])
    cache.commit(range(3))
    feed(cache, [10, 11, 12, 13, 14], [-1, -1, 0, 1])
    cache.commit(kept)
    assert held(cache) == [1, 2, 3, *want]
    assert held(cache, layer=1) == [x + 1 for x in [1, 2, 3, *want]]
    feed(cache, [20], [])
    cache.commit([0])
    assert held(cache) == [1, 2, 3, *want, 20]


def test_contiguous_paths_are_not_copied(monkeypatch):
    cache = TreeCache(8)
    feed(cache, [1, 2, 3], [-1, 0])
    monkeypatch.setattr(torch.Tensor, "index_select", lambda *_: pytest.fail("copied"))
    cache.commit([0, 1])
    assert held(cache) == [1, 2]


def test_keys_and_values_may_differ_in_width():
    cache = TreeCache(4)
    feed(cache, [1, 2])
    keys, values = cache._layers[0]
    assert keys.shape == (1, 1, 4, 1)
    assert values.shape == (1, 1, 4, 2)


def test_overflow_is_said_before_anything_is_written():
    cache = TreeCache(4)
    feed(cache, [1, 2, 3])
    cache.commit(range(3))
    with pytest.raises(UserError, match=r"holds 4 positions, but 3 \+ 2 are needed; use a smaller tree"):
        cache.open([-1])
