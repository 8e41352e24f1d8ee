"""One sequence: figures, rounds of a stream, and bad input; tests/inference/test_batch.py decodes any tree on any prompt."""

from __future__ import annotations

import pytest

from drafttrain.errors import UserError
from drafttrain.inference import Stats, generate, stream
from tests.conftest import make_target
from tests.inference.fakes import ANY, FakeDrafter, family

PROMPT = [5, 9, 11, 9, 11, 30, 2, 9, 11, 4, 44, 9]


@pytest.fixture(scope="module")
def llama():
    return family("llama")


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


def test_bad_input_is_named():
    target = make_target(layers=1, max_position_embeddings=16)
    with pytest.raises(UserError, match="prompt is empty"):
        generate(target, None, [], max_new_tokens=4)
    with pytest.raises(UserError, match="max_new_tokens=0 must be a whole number from 1"):
        generate(target, None, [1], max_new_tokens=0)
    with pytest.raises(UserError, match="prompt has 16 tokens, but target 'tiny' reads at most 16"):
        generate(target, None, [1] * 16, max_new_tokens=4)
    assert len(generate(target, None, [1] * 10, max_new_tokens=50, eos_ids=()).tokens) == 6
