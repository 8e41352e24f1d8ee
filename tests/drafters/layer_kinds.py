"""What every kind with decoder layers must hold; `make(**options)` gives a fresh drafter of the kind, bound to the target."""

from __future__ import annotations

import torch

from drafttrain.batch import Batch
from drafttrain.drafters.registry import kind_class
from tests.drafters.contract import compare_depths
from tests.drafters.helpers import (
    make_batch,
    packed_batch,
    run_step,
    source_of,
)


def make_kind(kind, target, kept=None, shake=False, **options):
    """A drafter as train.py begins one; shake: with norms and biases that matter."""
    torch.manual_seed(3)
    kept = torch.arange(target.vocab_size) if kept is None else kept
    cls = kind_class(kind)
    drafter = cls(cls.config_class.for_target(target, draft_vocab_size=len(kept), **options))
    drafter.initialize(target, kept)
    if shake:
        generator = torch.Generator().manual_seed(9)
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    drafter.bind(target)
    return drafter.train(not shake)


def check_packed_rows(drafter, target):
    whole = make_batch((17, 11, 30, 9), start=2)
    results = []
    for batch in (whole, packed_batch(whole, [[2, 0], [3, 1]])):
        drafter.zero_grad()
        step = run_step(drafter, target, batch)
        step.loss.backward()
        results.append((step, [parameter.grad.clone() for parameter in drafter.parameters()]))
    (one, grads), (other, packed_grads) = results
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-5, atol=1e-6)
    for name in one.metrics:
        torch.testing.assert_close(one.metrics[name], other.metrics[name], rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(grads, packed_grads, strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-3, atol=1e-5 * max(1.0, float(mine.abs().max()))
        )


def check_parity(make, target, depth=4, ending=""):
    """Training computes q of a drafted chain at every depth, plain and packed for decoding.

    ending: "@sample" for kinds whose chosen trees have other scores than log q.
    """
    prefix = make_batch((12,)).input_ids[0]
    anchor = len(prefix) - 2
    trainer = make()
    trainer.config.loss = "ce"
    features = target.forward(prefix[None], trainer.feature_layers).features[0]

    def metrics_of(answer):
        """The conversation stands behind another one in its row."""
        ids = torch.cat((torch.arange(7), prefix[:-1], torch.tensor(answer)))[None]
        end = ids.shape[1]
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, anchor + 8 :] = True
        documents = torch.tensor([[0, 0, 7], [0, 7, end - 7]])
        batch = Batch(ids, torch.tensor([end]), mask, torch.tensor([0, 1]), documents)
        return run_step(trainer, target, batch).metrics

    for packed in (False, True):
        decoder = make()
        if packed:
            decoder.pack()
            decoder.bind(target)
        decoder.uses_text = False  # training knows nothing of it
        # A short session, so that the buffers have to grow.
        session = decoder.start(prefix[: anchor + 1], max_length=13)
        session.extend(prefix[1 : anchor - 2], features[: anchor - 3])  # in pieces, as rounds do
        session.extend(prefix[anchor - 2 :], features[anchor - 3 : anchor + 1])
        compare_depths(decoder, session, int(prefix[-1]), metrics_of, f"chain:{depth}{ending}")


def check_closed_form_start(drafter, target, depths=None):
    """The closed-form start lowers the loss of copied weights at these first depths, or at all; returns the step behind it."""
    batches = [make_batch((60, 50), seed=seed) for seed in range(20)]
    before = run_step(drafter, target, batches[0])
    explained = drafter.solve_start(batches, source_of(target, drafter))
    after = run_step(drafter, target, batches[0])
    assert 0.1 < explained <= 1.0
    assert (after.metrics["loss"] < before.metrics["loss"])[:depths].all()
    assert after.loss < before.loss
    return after
