"""Targets with states (Mamba, gated delta rules, short convolutions): their states in batches, training on them, no leakage."""

from __future__ import annotations

import pytest
import torch

from drafttrain.batch import Batch
from drafttrain.errors import UserError
from drafttrain.states.features import computed
from drafttrain.states.origins import Row
from drafttrain.states.source import Online, TargetSource, run_rows
from drafttrain.target import Target
from drafttrain.target.shared_rows import check_shared
from tests.drafters.helpers import make_batch, packed_batch, run_step
from tests.drafters.layer_kinds import make_kind
from tests.inference.any_family import FAMILIES, build

HYBRIDS = {
    "qwen3_next": {},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "nemotron_h": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
}
LENGTHS = (17, 5, 11)


def hybrid(name, vocab_size=60):
    return Target.wrap(
        build(FAMILIES[name], {**HYBRIDS[name], "vocab_size": vocab_size}), None, name
    )


def close(ours, theirs):
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def check_states(name):
    """States of ragged rows, by every way to compute them, are those of transformers for each row alone."""
    target = hybrid(name)
    assert target.decoding_path == "snapshot"
    layers = (1, 2, 3)
    rows = [(torch.arange(length) * 7 + length) % 60 for length in LENGTHS]
    found = list(run_rows(target, layers, rows))
    for ids, (features, last) in zip(rows, found, strict=True):
        own = target.model(
            input_ids=ids[None], output_hidden_states=True, use_cache=False
        ).hidden_states
        shift = not torch.allclose(
            own[0][0], target.embed(ids)
        )  # Mamba's list begins behind the first layer
        close(features, torch.cat([own[i - shift][0] for i in layers], dim=-1))
        close(last, own[-1][0])
    wanted = [Row(index, ids) for index, ids in enumerate(rows)]
    for row, states in computed(Online(target, layers), wanted):
        close(states.features, found[row.index][0][:-1])
    return target


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_states_of_ragged_rows_are_the_models_own(name):
    check_states(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_of_every_hybrid(name):
    check_states(name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_packed_rows_train_as_rows_of_their_own(name):
    """No state leaks from a conversation to its neighbour in a packed row: same features, same loss."""
    target = hybrid(name, 300)
    drafter = make_kind("eagle3", target, torch.arange(300)).eval()
    whole = make_batch((17, 11, 30, 9), start=2)
    packed = packed_batch(whole, [[2, 0], [3, 1]])
    losses = [run_step(drafter, target, batch).loss for batch in (whole, packed)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    features, _, _ = TargetSource(target, drafter.feature_layers, drafter.kept_ids)(packed)
    row, start, length = packed.conversations().tolist()[1]
    alone = packed.input_ids[row, start : start + length]
    close(
        features[row, start : start + length],
        target.forward(alone[None], drafter.feature_layers).features[0],
    )
    assert isinstance(packed, Batch) and start > 0


def test_processes_cannot_share_rows_of_a_state(target):
    check_shared(target)
    with pytest.raises(
        UserError,
        match=r"sequence_parallel: target 'lfm2' runs its own forward.*drafttrain features",
    ):
        check_shared(hybrid("lfm2"))
