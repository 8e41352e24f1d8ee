"""The chunked losses against plain autograd in float64, acceptance under a pruned vocabulary, and the forms of a target."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drafttrain.errors import UserError
from drafttrain.losses import (
    DIVERGENCES,
    StoredLogits,
    StoredTopK,
    TargetRows,
    linear_divergence,
    parse_loss,
)
from drafttrain.losses import divergence as divergence_module
from eval.plain_divergence import plain_divergence

LOSSES = [
    *DIVERGENCES,
    "js:0.1",
    "lk_lambda:1",
    "kl@2",
    "ce@0.5",
    "0.9*kl+0.1*ce",
    "js:0.3+2*js:0.7@3+tvd+++lk_alpha",
]


def make(
    tokens: int = 13, rows: int = 9, hidden: int = 6, kept: int = 17, full: int = 29, seed: int = 1
):
    """Drafter states and head, the target's rows, row weights, and the target's full logits and kept ids."""
    generator = torch.Generator().manual_seed(seed)
    double = {"generator": generator, "dtype": torch.float64}
    head = torch.randn(full, hidden, **double)
    states = torch.randn(rows, hidden, **double)
    kept_ids = torch.randperm(full, generator=generator)[:kept].sort().values
    logits = states @ head.T
    to_drafter = torch.full((full,), -1)
    to_drafter[kept_ids] = torch.arange(kept)
    sampled = to_drafter[torch.randint(0, full, (rows,), generator=generator)]
    log_z_at = {t: (logits / t).logsumexp(-1) for t in (0.7, 2.0)}
    target = TargetRows(
        states,
        head[kept_ids],
        logits.logsumexp(-1),
        to_drafter[logits.argmax(-1)],
        None,
        sampled,
        log_z_at,
    )
    x = torch.randn(tokens, hidden, **double).requires_grad_()
    w = torch.randn(kept, hidden, **double).requires_grad_()
    index = torch.randint(0, rows, (tokens,), generator=generator)
    weight = torch.rand(tokens, **double)
    return x, w, target, index, weight, logits, kept_ids


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return list(
        torch.autograd.grad(3.0 * loss, leaves)
    )  # a factor other than one, as gradient scaling brings


@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradients_match_autograd(loss):
    x, w, target, index, weight, _, _ = make()
    plain = plain_divergence(
        x, w, target.logits(index), target.log_z[index], weight, loss, target.sampled[index]
    )
    want = gradients(plain.loss, x, w)
    for chunk in (1, 5, 64):
        ours = linear_divergence(x, w, target, index, weight, loss, chunk)
        assert ours.values.dtype == torch.float64
        torch.testing.assert_close(ours.values, plain.values)
        torch.testing.assert_close(ours.loss, plain.loss)
        torch.testing.assert_close(gradients(ours.loss, x, w), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", ["kl", "js:0.5", "0.5*lk_lambda+0.5*ce"])
def test_models_dtypes_come_close_to_float64(dtype, loss):
    x, w, target, index, weight, _, _ = make()
    exact = linear_divergence(x, w, target, index, weight, loss)
    low = [t.detach().to(dtype).requires_grad_() for t in (x, w)]
    lows = {name: getattr(target, name).to(dtype) for name in ("hidden", "weight")}
    rough = linear_divergence(
        *low,
        dataclasses.replace(target, **lows, log_z=target.log_z.float()),
        index,
        weight.float(),
        loss,
    )
    assert rough.values.dtype == torch.float32 and rough.alpha.dtype == torch.float32
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.05}
    torch.testing.assert_close(rough.values.double(), exact.values, **close)
    for got, want in zip(gradients(rough.loss, *low), gradients(exact.loss, x, w), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, **close)


def test_a_mix_is_the_weighted_sum_of_its_terms():
    x, w, target, index, weight, _, _ = make()
    parts = [
        linear_divergence(x, w, target, index, weight, name) for name in ("kl", "tv@0.7", "ce")
    ]
    mix = linear_divergence(x, w, target, index, weight, "0.5*kl + 2*tv@0.7 + ce")
    torch.testing.assert_close(
        mix.values, 0.5 * parts[0].values + 2 * parts[1].values + parts[2].values
    )
    for name in ("alpha", "agree"):  # always at temperature 1
        assert all(torch.allclose(getattr(part, name), getattr(mix, name)) for part in parts)


def test_acceptance_uses_the_full_target_distribution():
    x, w, target, index, weight, logits, kept_ids = make()
    out = linear_divergence(x, w, target, index, weight, "tv")
    p = logits[index].softmax(-1)
    q = torch.zeros_like(p)
    q[:, kept_ids] = (x @ w.T).softmax(-1).detach()
    torch.testing.assert_close(out.alpha, torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(out.values, 0.5 * (p - q).abs().sum(-1))
    assert torch.equal(out.agree, logits[index].argmax(-1) == kept_ids[(x @ w.T).argmax(-1)])
    # Some target choice lies outside the kept vocabulary here, and must count as a miss.
    assert (target.argmax[index] == -1).any() and not out.agree[target.argmax[index] == -1].any()
    tempered = linear_divergence(x, w, target, index, weight, "tv@2").values
    p = (logits[index] / 2).softmax(-1)
    q[:, kept_ids] = (x @ w.T / 2).softmax(-1).detach()
    torch.testing.assert_close(tempered, 0.5 * (p - q).abs().sum(-1))


def test_tokens_the_drafter_cannot_say_neither_cost_nor_move():
    x, w, target, index, weight, _, _ = make()
    out = linear_divergence(x, w, target, index, weight, "ce")
    missing = target.sampled[index] < 0
    assert missing.any() and not missing.all()
    (grad,) = torch.autograd.grad(out.loss, x)
    assert (out.values[missing] == 0).all() and (grad[missing] == 0).all()
    assert (out.values[~missing] > 0).all() and (grad[~missing] != 0).any(-1).all()


def test_cross_entropy_alone_does_not_read_the_target():
    x, w, target, index, weight, _, _ = make()
    target.hidden = None
    assert linear_divergence(x, w, target, index, weight, "ce", measure=False).loss > 0


def test_identical_distributions_have_no_loss_and_full_acceptance():
    _, _, target, index, weight, _, _ = make(kept=29, full=29)
    for loss in DIVERGENCES:
        if loss != "ce":
            same = linear_divergence(
                target.hidden[index].clone(), target.weight, target, index, weight, loss
            )
            assert same.loss.abs() < 1e-9 and torch.allclose(
                same.alpha, torch.ones_like(same.alpha)
            )
            assert same.agree.all()


def test_extremes_stay_finite():
    """Far apart, nearly one-hot, and -inf in stored logits."""
    z = torch.tensor([[200.0, -200.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    stored = torch.tensor([[-200.0, 200.0, 0.0], [float("-inf"), 3.0, 1.0]])
    target = StoredLogits(stored, stored.logsumexp(-1), stored.argmax(-1), torch.tensor([0, 1]))
    index = torch.arange(2)
    weight = torch.ones(2)
    for loss in DIVERGENCES:
        out = linear_divergence(z, torch.eye(3), target, index, weight, loss)
        (grad,) = torch.autograd.grad(out.loss, z)
        assert out.values.isfinite().all() and grad.isfinite().all(), loss


@pytest.mark.parametrize("loss", ["kl", "reverse_kl", "lk_lambda", "0.5*js@2+ce"])
def test_all_forms_of_a_target_agree(loss, monkeypatch):
    x, w, target, index, weight, logits, kept_ids = make()
    stored = StoredLogits(logits[:, kept_ids], target.log_z, target.argmax, target.sampled)
    want = linear_divergence(x, w, target, index, weight, loss)
    slopes = gradients(want.loss, x, w)
    forms = [stored]
    if "@" not in loss:  # all tokens among the k: nothing is left to guess
        log_p, ids = (logits - target.log_z[:, None]).sort(descending=True)
        to_drafter = torch.full((29,), -1)
        to_drafter[kept_ids] = torch.arange(17)
        forms.append(
            StoredTopK(to_drafter[ids], log_p, torch.zeros(9), target.argmax, target.sampled)
        )
    monkeypatch.setattr(divergence_module, "_SHARED_BYTES", 0)  # one form not shared between calls
    for form in forms:
        got = linear_divergence(x, w, form, index, weight, loss)
        torch.testing.assert_close((got.values, got.alpha), (want.values, want.alpha))
        torch.testing.assert_close(gradients(got.loss, x, w), slopes)


@pytest.mark.parametrize("loss", [*DIVERGENCES])
def test_the_rest_of_stored_top_k_is_one_outcome(loss):
    """Equal to autograd on distributions over the k tokens and "another one"."""
    x, w, _, index, weight, logits, _ = make(kept=29, full=29)
    log_p, ids = logits.log_softmax(-1).topk(4)
    rest = 1 - log_p.exp().sum(-1)
    sampled = ids[:, 1]  # ce knows no rest, so compare where it needs none
    ours = linear_divergence(
        x, w, StoredTopK(ids, log_p, rest, ids[:, 0], sampled), index, weight, loss
    )

    log_q = (x @ w.T).log_softmax(-1)
    among = torch.zeros_like(log_q, dtype=torch.bool).scatter(1, ids[index], True)
    tail = log_q.masked_fill(among, float("-inf")).logsumexp(-1, keepdim=True)
    coarse_q = torch.cat([log_q.gather(1, ids[index]), tail], 1)
    coarse_p = torch.cat([log_p, rest.log()[:, None]], 1)[index]
    eye = torch.eye(5, dtype=torch.float64)
    zero = torch.zeros(13, dtype=torch.float64)
    plain = plain_divergence(
        coarse_q, eye, coarse_p, zero, weight, loss, torch.ones(13, dtype=torch.long)
    )
    torch.testing.assert_close(ours.values, plain.values)
    torch.testing.assert_close(gradients(ours.loss, x, w), gradients(plain.loss, x, w))


def test_what_a_target_does_not_say_is_asked_for_in_one_line():
    x, w, target, index, weight, _, _ = make()
    topk = StoredTopK(
        torch.zeros(9, 1, dtype=torch.long), torch.zeros(9, 1), torch.zeros(9), target.argmax
    )
    for rows, loss, message in (
        (target, "lk_alpha@3", r"@3.*log_z_at has \[0.7, 2.0\]"),
        (topk, "kl@2", r"@2 cannot be applied to stored top-k"),
        (topk, "ce", r"'ce' needs the ids"),
    ):
        with pytest.raises(UserError, match=message):
            linear_divergence(x, w, rows, index, weight, loss, measure=False)


def test_the_sum_over_parts_with_a_global_count_is_the_whole():
    """Whatever the split into ranks, accumulation steps or chunks: each part divides by the count of all."""
    x, w, target, index, _, _, _ = make()
    mask = torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.float64)
    whole = linear_divergence(x, w, target, index, mask / mask.sum(), "lk_lambda")
    want = gradients(whole.loss, x, w)
    parts = [slice(0, 1), slice(1, 8), slice(8, 13)]
    losses = [
        linear_divergence(
            x[part], w, target, index[part], mask[part] / mask.sum(), "lk_lambda"
        ).loss
        for part in parts
    ]
    torch.testing.assert_close(sum(losses), whole.loss)
    torch.testing.assert_close(gradients(sum(losses), x, w), want)
    torch.testing.assert_close(whole.loss, whole.values[mask > 0].mean())


def test_terms_at_other_temperatures_say_which_denominators_they_need():
    assert parse_loss("tv@0.6+kl@2+lk_alpha+tvd++@3").temperatures == (0.6, 3.0)


def test_tokens_as_targets_give_the_plain_cross_entropy():
    """Pretraining: all mass is on the text's token; one that the head lacks has no loss."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)
    w = torch.randn(10, 8, requires_grad=True)
    tokens = torch.tensor([3, 9, 11, 0])
    out = linear_divergence(
        x, w, StoredTopK.of_tokens(tokens, 10), torch.arange(4), torch.ones(4), "ce"
    )
    logits = x @ w.T
    want = torch.nn.functional.cross_entropy(
        logits, tokens.where(tokens < 10, -100), reduction="none", ignore_index=-100
    )
    torch.testing.assert_close(out.values, want.detach())
    torch.testing.assert_close(
        torch.autograd.grad(out.loss, (x, w)), torch.autograd.grad(want.sum(), (x, w))
    )
    assert torch.equal(out.agree, logits.argmax(-1) == tokens)
    q = logits.softmax(-1)
    torch.testing.assert_close(out.alpha[[0, 1, 3]], q[[0, 1, 3], tokens[[0, 1, 3]]].detach())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loss_scale_beyond_float16_leaves_finite_gradients(frozen):
    """GradScaler begins at 65,536, and a row's weight is 1 over thousands of anchors."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(40, 16, generator=generator)
    head = torch.randn(200, 16, generator=generator)
    logits = states @ head.T
    rows = TargetRows(states, head, logits.logsumexp(-1), logits.argmax(-1))
    drafted = torch.randn(40, 16, generator=generator)
    weight = torch.full((40,), 1 / 20_000)
    found = []
    for dtype in (torch.float32, torch.float16):
        read = drafted.to(dtype, copy=True).requires_grad_()
        own = head.clone().requires_grad_(not frozen)
        out = linear_divergence(read, own, rows, torch.arange(40), weight)
        (65_536 * out.loss).backward()
        grads = [read.grad.float()]
        if not frozen:
            grads.append(own.grad)
        found.append(grads)
    for exact, narrow in zip(*found, strict=True):
        assert torch.isfinite(narrow).all()
        torch.testing.assert_close(narrow, exact, rtol=0.02, atol=0.01 * float(exact.abs().max()))
