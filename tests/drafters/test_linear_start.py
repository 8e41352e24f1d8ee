"""The closed-form start: the regression itself, and that the layer computes the map it found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from drafttrain.drafters.common.starts import (
    LeastSquares,
    linear_start,
    set_temperature,
    store_map,
)
from tests.conftest import make_target
from tests.drafters.helpers import make_batch, make_drafter, source_of


def test_least_squares_finds_the_map_from_batches():
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(3, 5, generator=generator)
    fit = LeastSquares()
    for _ in range(4):
        x = torch.randn(200, 5, generator=generator)
        fit.add(x, x @ maps.T)
    torch.testing.assert_close(fit.solve(), maps, rtol=0.05, atol=0.05)


@torch.no_grad()
def test_few_heads_hold_the_best_map_of_their_rank(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(12, 20, generator=generator)
    samples = torch.randn(200, 20, generator=generator) * torch.linspace(0.1, 3, 20)
    covariance = samples.T @ samples / 200
    attention = SimpleNamespace(
        head_dim=4,
        heads=2,
        kv_heads=2,
        v_proj=torch.nn.Linear(20, 8, bias=False),
        o_proj=torch.nn.Linear(8, 12, bias=False),
    )
    factor = wanted @ torch.linalg.cholesky(covariance)
    values = torch.linalg.svdvals(factor)
    monkeypatch.setattr(torch.linalg, "svd", None)  # takes minutes on a GPU at full size
    store_map(attention, wanted, covariance, range(2))
    stored = attention.o_proj.weight @ attention.v_proj.weight  # [12, 20], of rank 8
    lost = ((wanted - stored) @ torch.linalg.cholesky(covariance)).norm()
    best = values[8:].norm()
    assert best <= lost <= 1.01 * best


@torch.no_grad()
def test_rows_without_anchors_say_nothing_of_the_temperature():
    """The two rows that decide have responses of one token each."""
    target = make_target()
    drafter = make_drafter(target)
    batch = make_batch((9, 8, 12))
    batch.response_mask[:2] = False
    batch.response_mask[:2, 6] = True
    weight = drafter.norm.weight.clone()
    set_temperature(drafter, batch, source_of(target, drafter), drafter.norm.weight)
    assert torch.equal(drafter.norm.weight, weight)


@pytest.mark.thorough
def test_attention_looks_at_its_own_token():
    """With as many value directions as hidden ones, out - state is the fitted map of the own input, nearly."""
    target = make_target(hidden=64)
    drafter = make_drafter(target, num_attention_heads=4, num_key_value_heads=4, head_dim=16)
    batches = [make_batch((60, 50), seed=seed) for seed in range(20)]
    linear_start(drafter, batches, source_of(target, drafter))
    seen = {}

    def watch(module, args, kwargs=None):
        query = args[0]
        key = args[1]
        seen["self"] = (query * key).sum(-1).mean()
        seen["other"] = (query * key.roll(7, 0)).sum(-1).mean()
        return query.flatten(1)

    x = torch.randn(40, 128)
    tables = drafter.rotary.tables(torch.arange(40), torch.float32)
    drafter.midlayer.self_attn(x, tables, lambda q, k, v: watch(None, (q, k)))
    assert seen["self"] > 4 * seen["other"].abs()
