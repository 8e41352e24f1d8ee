from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.errors import UserError
from drafttrain.inference import SamplingParams, Stats, generate, stream
from tests.conftest import make_target
from tests.inference.fakes import ANY, FakeDrafter, family

PROMPT = [5, 9, 11, 9, 11, 30, 2, 9, 11, 4, 44, 9]


@pytest.fixture(scope="module")
def llama():
    return family("llama")


@pytest.mark.thorough
@settings(max_examples=10, deadline=None)
@given(
    name=st.sampled_from(["llama", "gemma3"]),
    seed=st.integers(0, 10_000),
    agree=st.sampled_from([0.0, 0.5, 0.9]),
    nodes=st.integers(0, 30),
    prompt=st.lists(st.integers(0, 59), min_size=1, max_size=20),
    count=st.integers(1, 25),
)
def test_any_tree_on_any_prompt_changes_nothing(name, seed, agree, nodes, prompt, count):
    target, _ = family(name)
    plain = generate(target, None, prompt, max_new_tokens=count, eos_ids=()).tokens
    drafter = FakeDrafter(plain, agree, nodes, seed)
    got = generate(target, drafter, prompt, max_new_tokens=count, spec=ANY, eos_ids=())
    assert got.tokens == plain
    hot = SamplingParams(1.3, 30, 0.95)
    plain = generate(
        target, None, prompt, max_new_tokens=count, sampling=hot, seed=seed, eos_ids=()
    ).tokens
    drafter = FakeDrafter(plain, agree, nodes, seed)
    got = generate(
        target, drafter, prompt, max_new_tokens=count, spec=ANY, sampling=hot, seed=seed, eos_ids=()
    )
    assert got.tokens == plain


def test_drafters_get_the_features_of_committed_tokens(llama):
    target, _ = llama
    plain = generate(target, None, PROMPT, max_new_tokens=30, eos_ids=()).tokens
    drafter = FakeDrafter(plain, 0.7, nodes=15, seed=5, feature_layers=(1, 3))
    got = generate(target, drafter, PROMPT, max_new_tokens=30, spec=ANY, eos_ids=())
    features = torch.cat(drafter.features)
    count = features.shape[0]
    sequence = PROMPT + got.tokens
    assert drafter.tokens == sequence[: count + 1]
    want = target.forward(torch.tensor([sequence[:count]]), (1, 3)).features[0]
    torch.testing.assert_close(features, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_never_more_than_asked_for(llama, count):
    target, _ = llama
    plain = generate(target, None, PROMPT, max_new_tokens=20, eos_ids=()).tokens
    got = generate(
        target,
        FakeDrafter(plain, 1.0, nodes=20),
        PROMPT,
        max_new_tokens=count,
        spec=ANY,
        eos_ids=(),
    )
    assert got.tokens == plain[:count]
    assert not got.stats.ended


@pytest.mark.thorough
def test_eos_ends_wherever_it_comes(llama):
    target, _ = llama
    plain = generate(target, None, PROMPT, max_new_tokens=20, eos_ids=()).tokens
    for place in range(12):
        end = plain.index(plain[place])
        for seed in range(2):
            drafter = FakeDrafter(plain, 0.9, nodes=20, seed=seed)
            got = generate(
                target, drafter, PROMPT, max_new_tokens=20, spec=ANY, eos_ids=[plain[place]]
            )
            assert got.tokens == plain[: end + 1]
            assert got.stats.ended


def test_stats_add_up(llama):
    target, _ = llama
    plain = generate(target, None, PROMPT, max_new_tokens=30, eos_ids=())
    assert plain.stats.accepted_length == 1.0
    assert plain.stats.target_passes == 29
    assert plain.stats.draft_seconds == 0.0
    stats = generate(
        target, FakeDrafter(plain.tokens, 0.8, 12), PROMPT, max_new_tokens=30, spec=ANY, eos_ids=()
    ).stats
    assert stats.prompt_tokens == len(PROMPT)
    assert stats.new_tokens == len(stats.token_seconds) == 30
    assert stats.new_tokens == 1 + sum(accepted + 1 for accepted in stats.accepted)
    assert (
        len(stats.accepted)
        == len(stats.offered)
        == stats.target_passes
        == sum(stats.rounds.values())
    )
    assert all(accepted <= offered for accepted, offered in stats.rounds)
    assert stats.token_seconds == sorted(stats.token_seconds)
    assert stats.prefill_seconds == stats.token_seconds[0]
    assert stats.prefill_seconds + stats.draft_seconds + stats.target_seconds <= stats.total_seconds
    assert stats.total_seconds == stats.token_seconds[-1]


def test_stream_yields_rounds(llama):
    target, _ = llama
    want = generate(target, None, PROMPT, max_new_tokens=12, eos_ids=()).tokens
    stats = Stats()
    drafter = FakeDrafter(want, 0.9, 12)
    parts = list(
        stream(target, drafter, PROMPT, max_new_tokens=12, spec=ANY, eos_ids=(), stats=stats)
    )
    assert [token for part in parts for token in part] == want
    assert [len(part) - 1 for part in parts[1:]] == stats.accepted
    assert len(parts[0]) == 1


def test_packed_target_gives_the_same_tokens():
    target = make_target(layers=2)
    want = generate(target, None, PROMPT, max_new_tokens=24).tokens
    target.pack()
    assert generate(target, NgramDrafter(), PROMPT, max_new_tokens=24).tokens == want


def test_bad_input_is_named():
    target = make_target(layers=1, max_position_embeddings=16)
    with pytest.raises(UserError, match="prompt is empty"):
        generate(target, None, [], max_new_tokens=4)
    with pytest.raises(UserError, match="max_new_tokens=0 must be a whole number from 1"):
        generate(target, None, [1], max_new_tokens=0)
    with pytest.raises(UserError, match="prompt has 16 tokens, but target 'tiny' reads at most 16"):
        generate(target, None, [1] * 16, max_new_tokens=4)
    assert len(generate(target, None, [1] * 10, max_new_tokens=50, eos_ids=()).tokens) == 6
