"""Responses of the drafter among the data's: which rows they replace, what the loss is on, and resuming."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from drafttrain.batch import Batch
from drafttrain.data.loader import collate, join_rows
from drafttrain.drafters.draft_model.model import DraftModel
from drafttrain.errors import UserError
from drafttrain.states.source import TargetSource
from drafttrain.training.on_policy import OnPolicy, OnPolicyOptions
from tests.drafters.helpers import make_drafter, run_step

ROWS = [
    {
        "tokens": list(range(start, start + 12)),
        "spans": [[3, 6], [8, 12]],
        "length": 12,
        "index": index,
    }
    for index, start in enumerate(range(10, 90, 10))
]


def make(target, rank=0, world=1, packing=False, **options):
    torch.manual_seed(0)
    drafter = DraftModel.begin(target, "target", {"layers": [0, 2]}, "kl")
    drafter.bind(target)
    chosen = OnPolicyOptions(
        **{"share": 0.5, "refresh_steps": 2, "responses": 6, "max_new_tokens": 5, **options}
    )
    args = SimpleNamespace(seed=3, process_index=rank, world_size=world)
    return OnPolicy(chosen, drafter, ROWS, target, 64, args, packing), drafter


def test_responses_are_the_drafters_own_after_prompts_of_the_data(target):
    policy, drafter = make(target, temperature=0.0)
    policy.refresh(0)
    prompts = [row["tokens"][:begin] for row in ROWS for begin, _ in row["spans"]]
    assert len(policy.pool) >= 4
    for row in policy.pool:
        begin, end = row["spans"][0]
        tokens = torch.tensor(row["tokens"])
        assert (
            row["tokens"][:begin] in prompts
            and end == row["length"] == len(tokens)
            and 2 <= end - begin <= 5
        )
        assert row["index"] == -1
        greedy = drafter.lm(input_ids=tokens[None]).logits[0].argmax(-1)
        assert torch.equal(greedy[begin - 1 : end - 1], tokens[begin:])


def test_a_share_of_the_rows_is_replaced_and_the_others_stay_as_they_were(target):
    policy, _ = make(target)
    inputs = collate(ROWS)
    assert policy.mix(inputs, 0) is inputs, "no responses yet"
    policy.refresh(0)
    replaced = 0
    for step in range(40):
        mixed = policy.mix(inputs, step)
        for place, index in enumerate(mixed["index"].tolist()):
            length = int(mixed["lengths"][place])
            tokens = mixed["input_ids"][place, :length].tolist()
            mask = mixed["response_mask"][place].nonzero().flatten().tolist()
            if index == -1:
                row = next(row for row in policy.pool if row["tokens"] == tokens)
                assert mask == list(range(*row["spans"][0]))
                replaced += 1
            else:
                assert tokens == ROWS[index]["tokens"] and mask == [3, 4, 5, 8, 9, 10, 11]
                assert index == place
        again = policy.mix(inputs, step)
        assert all(torch.equal(mixed[name], again[name]) for name in mixed)
    assert 0.4 < replaced / (40 * len(ROWS)) < 0.6
    assert policy.used == 2 * replaced


def test_packed_batches_get_packed_responses(target):
    policy, _ = make(target, packing=True, share=0.5, max_new_tokens=8, responses=9)
    inputs = collate([join_rows(ROWS[:4]), join_rows(ROWS[4:7]), join_rows(ROWS[7:])])
    policy.refresh(0)
    assert (
        sum(len(row["documents"]) for row in policy.ready)
        == len(policy.pool)
        > len(policy.ready)
        > 0
    )
    answers = [row["tokens"] for row in policy.pool]
    seen = set()
    for step in range(12):
        mixed = policy.mix(inputs, step)
        batch = Batch.of(mixed)
        assert batch.lengths.max() <= 64
        for index, (row, start, length) in zip(
            batch.index.tolist(), batch.conversations().tolist(), strict=True
        ):
            tokens = batch.input_ids[row, start : start + length].tolist()
            assert tokens in answers if index == -1 else tokens == ROWS[index]["tokens"]
            mask = batch.response_mask[row, start : start + length].nonzero().flatten().tolist()
            wanted = (
                policy.pool[answers.index(tokens)]["spans"] if index == -1 else ROWS[index]["spans"]
            )
            assert mask == [at for begin, end in wanted for at in range(begin, end)]
            seen.add(index)
    assert seen == {-1, *range(len(ROWS))}
    saved = json.loads(json.dumps({"OnPolicy": policy.state()}))
    other, _ = make(target, packing=True)
    other.restore(saved)
    assert other.ready == policy.ready


def test_the_loss_is_on_sampled_tokens_and_their_states_are_not_kept(target):
    policy, drafter = make(target, share=1.0)
    policy.refresh(0)
    mixed = policy.mix(collate(ROWS[:3]), 0)
    assert (mixed["index"] == -1).all()
    batch = Batch.of(mixed)
    source = TargetSource(target, (), drafter.kept_ids, limit_bytes=1e9)
    features, rows, row_of = source(batch)
    assert source.kept.held == {} and source.hits["online"] == 3, (
        "such rows are neither looked up nor kept"
    )
    step = run_step(drafter, target, batch, source=lambda _: (features, rows, row_of))
    assert step.metrics["count"] == int((mixed["shift_labels"] != -100).sum())


def test_it_answers_anew_when_a_round_begins_with_the_weights_of_then(target):
    policy, drafter = make(target)
    policy.refresh(0)
    first = [row["tokens"] for row in policy.pool]
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    policy.refresh(1)
    assert [row["tokens"] for row in policy.pool] == first
    policy.refresh(2)
    assert [row["tokens"] for row in policy.pool] != first and policy.round == 1
    assert not any(
        isinstance(module, type(target.pack().lm_head)) for module in drafter.modules()
    ), "a copy was packed"


def test_a_resumed_run_has_the_same_responses(target):
    policy, _ = make(target)
    policy.refresh(5)
    saved = json.loads(json.dumps({"OnPolicy": policy.state()}))
    other, _ = make(target)
    other.restore(saved)
    assert other.pool == policy.pool and other.round == policy.round == 2


@pytest.mark.thorough
def test_processes_share_the_work(target, monkeypatch):
    alone, _ = make(target)
    alone.refresh(0)
    parts = []
    for rank in range(2):
        policy, _ = make(target, rank=rank, world=2)
        monkeypatch.setattr(
            "drafttrain.training.on_policy.gather_object", lambda made: parts.append(made) or made
        )
        policy.refresh(0)
    monkeypatch.setattr(
        "drafttrain.training.on_policy.gather_object", lambda made: parts[0] + parts[1]
    )
    policy, _ = make(target, rank=0, world=2)
    policy.refresh(0)
    assert parts[0] and parts[1] and policy.pool == alone.pool


def test_an_unknown_key_is_said():
    with pytest.raises(UserError, match=r"unknown key on_policy.chance; there are share, refresh"):
        OnPolicyOptions.parse({"chance": 0.5})


def test_a_kind_that_cannot_write_is_named(target):
    args = SimpleNamespace(seed=0, process_index=0, world_size=1)
    with pytest.raises(UserError, match=r"kind='eagle3' cannot write responses"):
        OnPolicy(OnPolicyOptions(), make_drafter(target), ROWS, target, 64, args)


def test_a_refresh_leaves_the_random_numbers_of_training_alone(target):
    """A resumed run restores them after its first refresh, an uninterrupted one never does."""
    policy, _ = make(target)
    before = torch.get_rng_state()
    policy.refresh(0)
    assert policy.pool and torch.equal(torch.get_rng_state(), before)
