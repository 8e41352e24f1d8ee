"""What the target says about a batch: which token follows each row, and denominators at other temperatures."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.base import StepInputs
from drafttrain.losses import DIVERGENCES
from drafttrain.states.source import NoTarget, TargetSource
from drafttrain.training.first_batches import first_batches
from tests.drafters.helpers import make_batch, make_drafter
from tests.inference.fakes import VOCAB, family

KEPT = torch.arange(0, 300, 2)


def test_rows_know_the_token_that_follows_in_the_data(target):
    batch = make_batch((17, 11))
    _, rows, row_of = TargetSource(target, (1,), KEPT)(batch)
    to_drafter = torch.full((300,), -1)
    to_drafter[KEPT] = torch.arange(len(KEPT))
    for row, position in (row_of >= 0).nonzero().tolist():
        said = to_drafter[batch.input_ids[row, position + 1]]
        assert rows.sampled[row_of[row, position]] == said
    assert (rows.sampled < 0).any() and (rows.sampled >= 0).any()


def test_another_vocabulary_is_read_from_kept_states(target):
    batch = make_batch((17, 11))
    batch.index[:] = torch.arange(2)
    source = TargetSource(target, (1,), KEPT, limit_bytes=1e6)
    _, before, _ = source(batch)
    assert before.argmax.max() < len(KEPT)
    other = torch.arange(1, 300, 3)
    source.read_words(other)
    _, rows, row_of = source(batch)
    assert source.hits["memory"] == 2
    _, want, _ = TargetSource(target, (1,), other, limit_bytes=1e6)(batch)
    for name in ("argmax", "sampled"):
        assert getattr(rows, name).equal(getattr(want, name))
    assert rows.logits(slice(None)).shape == (int((row_of >= 0).sum()), len(other))


def test_rows_know_the_full_denominator_at_each_temperature(target):
    batch = make_batch((17, 11))
    _, rows, row_of = TargetSource(target, (1,), KEPT, temperatures=(0.6, 2.0))(batch)
    logits = target.head(target.forward(batch.input_ids, (1,)).last_hidden[row_of >= 0])
    torch.testing.assert_close(rows.log_z, logits.logsumexp(-1), rtol=1e-4, atol=1e-4)
    for temperature, log_z in rows.log_z_at.items():
        torch.testing.assert_close(
            log_z, (logits / temperature).logsumexp(-1), rtol=1e-4, atol=1e-4
        )
    assert set(rows.log_z_at) == {0.6, 2.0}


@pytest.mark.parametrize("name", ["phi", "granite", "gemma2"])
def test_rows_carry_all_that_the_head_does_to_logits(name):
    """A bias, a scale, a soft cap: with the whole vocabulary and with a part of it."""
    target, reference = family(name)
    batch = make_batch((17, 11))
    batch.input_ids %= VOCAB
    logits = reference(input_ids=batch.input_ids).logits
    for kept in (torch.arange(VOCAB), torch.arange(0, VOCAB, 3)):
        _, rows, row_of = TargetSource(target, (1,), kept)(batch)
        wanted = logits[row_of >= 0]
        torch.testing.assert_close(rows.logits(slice(None)), wanted[:, kept], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rows.log_z, wanted.logsumexp(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("loss", [*DIVERGENCES, "0.5*lk_lambda@0.6+0.5*ce"])
def test_a_training_step_takes_every_loss_and_decays_it_by_depth(target, loss):
    drafter = make_drafter(target, KEPT, loss=loss, depth_decay=0.5, ttt_steps=3).eval()
    source = TargetSource(target, drafter.feature_layers, drafter.kept_ids, temperatures=(0.6,))
    batch = make_batch((17, 11))
    step = drafter(StepInputs(batch, target.embed(batch.input_ids), *source(batch), total=7.0))
    weights = torch.tensor([4.0, 2.0, 1.0]) / 7
    torch.testing.assert_close(step.loss, (step.metrics["loss"] * weights).sum() / 7)
    step.loss.backward()
    assert all(p.grad.isfinite().all() for p in drafter.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(40_000, [8, 5, 1, 1]), (20_000, [8, 4, 1, 1, 1]), (1, [8, 1, 1, 1, 1, 1, 1, 1])],
)
def test_first_batches_have_no_more_tokens_than_one_of_training(most, sizes):
    """Eight rows at most, fewer where they are long; padding counts; a row that is longer than that goes alone."""
    lengths = [400] * 8 + [4000, 100, 4000, 100, 5000, 30_000, 20_000]
    rows = [
        {"index": i, "length": n, "spans": [[0, n]], "tokens": [1] * n}
        for i, n in enumerate(lengths)
    ]
    batches, tokens = first_batches(rows, torch.device("cpu"), NoTarget(), most)
    assert [len(batch.input_ids) for batch in batches] == sizes and tokens == sum(lengths)


def test_what_only_measured_steps_read_is_computed_once_and_when_it_is_read(target, monkeypatch):
    drafter = make_drafter(target, KEPT, ttt_steps=2).eval()
    source = TargetSource(target, drafter.feature_layers, drafter.kept_ids, limit_bytes=1e9)
    batch = make_batch((17, 11))
    rows = []
    head = target.head
    monkeypatch.setattr(target, "head", lambda hidden: rows.append(len(hidden)) or head(hidden))
    embeds = target.embed(batch.input_ids)
    for measure, products in ((False, 0), (True, 2), (False, 2), (True, 2)):  # of two conversations
        drafter(StepInputs(batch, embeds, *source(batch), total=7.0, measure=measure))
        assert len(rows) == products
