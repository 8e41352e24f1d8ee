"""Training-time-test attention against the textbook form: one softmax under a dense [s, k*s] mask."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from drafttrain.ops import path_attention as ops
from drafttrain.ops.path_attention import PathAttention, Spans, attend_spans

LENGTHS = (5, 150, 1, 9)  # documents, one longer than a block


def begins(lengths=LENGTHS):
    ends = torch.tensor(lengths).cumsum(0)
    return torch.repeat_interleave(ends - torch.tensor(lengths), torch.tensor(lengths))


def textbook(query, base, paths, own, begin, depth, window=0):
    """query [t, heads, e]; every key of every depth in one row, hidden ones masked."""
    heads, e = query.shape[1:]
    total, kv = base[0].shape[:2]
    at = torch.arange(total)
    mask = (at >= begin[own, None]) & (at <= own[:, None])
    if window:
        mask &= own[:, None] + depth - at < window
    keys = [base[0]]
    values = [base[1]]
    masks = [mask]
    for anchors, key, value in paths:
        keys.append(key)
        values.append(value)
        masks.append(anchors == own[:, None])
    key, value = (torch.cat(x).repeat_interleave(heads // kv, dim=1) for x in (keys, values))
    scores = torch.einsum("the,she->hts", query, key) * e**-0.5
    weights = scores.masked_fill(~torch.cat(masks, dim=1), float("-inf")).softmax(-1)
    return torch.einsum("hts,she->the", weights, value).flatten(1)


def run(function, depths, seed=0, heads=4, kv=2, e=8, window=0, dtype=torch.float64):
    """Outputs of all depths and the gradients of everything that went in."""
    generator = torch.Generator().manual_seed(seed)
    begin = begins()
    make = lambda n, h: torch.randn(n, h, e, generator=generator, dtype=dtype).requires_grad_()  # noqa: E731
    everything = torch.arange(len(begin))
    anchors = [everything[everything % (k + 2) != 0] for k in range(depths)]
    anchors = [a[torch.isin(a, anchors[k - 1])] if k else a for k, a in enumerate(anchors)]
    for k in range(1, depths):
        anchors[k] = anchors[k][torch.isin(anchors[k], anchors[k - 1])]
    leaves = []
    outs = []
    attention = PathAttention(begin, window)
    base = None
    paths = []
    for k, own in enumerate(anchors):
        query, key, value = (
            make(len(own), heads),
            *(make(len(everything if k == 0 else own), kv) for _ in "kv"),
        )
        leaves += [query, key, value]
        if function == "ours":
            fresh = []
            outs.append(attention.attend(own, fresh)(query, key, value))
            attention.remember(own, *fresh)
        else:
            if k == 0:
                base = key, value
            else:
                paths.append((own, key, value))
            outs.append(textbook(query, base, paths, own, begin, k, window))
    loss = sum(
        (out * torch.randn(out.shape, generator=generator, dtype=dtype)).sum() for out in outs
    )
    return outs, torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize(("heads", "kv"), [(4, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("window", [0, 7])
def test_all_depths_and_gradients_are_those_of_one_masked_softmax(heads, kv, window):
    ours, wanted = (
        run(name, 4, heads=heads, kv=kv, window=window) for name in ("ours", "textbook")
    )
    for mine, theirs in zip((*ours[0], *ours[1]), (*wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def spans_of(window):
    own = torch.arange(len(begins()))[1::2]
    begin = begins()[own]
    return Spans(torch.maximum(begin, own - window + 1) if window else begin, own, begin)


@pytest.mark.parametrize("window", [0, 3, 140])
@pytest.mark.parametrize("keys", [165, 384])
def test_the_block_mask_is_the_one_that_torch_finds_by_looking_at_every_pair(window, keys):
    spans = spans_of(window)
    if keys > 165:  # a long document, so that some blocks are visible as a whole
        own = torch.arange(keys)
        spans = Spans((own - window + 1).clamp(min=0) if window else own * 0, own, own * 0)
    ours = spans.block_mask(keys)
    wanted = create_block_mask(
        ours.mask_mod, None, None, len(spans.first), keys, device="cpu", BLOCK_SIZE=ops.BLOCK
    )
    for mine, theirs in zip(_lists(ours), _lists(wanted), strict=True):
        assert mine == theirs


def _lists(mask):
    for numbers, indices in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for count, row in zip(numbers[0, 0].tolist(), indices[0, 0].tolist(), strict=True):
            yield sorted(row[:count])


@pytest.mark.thorough
def test_the_form_for_gpus_gives_the_same():
    """FlexAttention as torch defines it, uncompiled; its gradients exist on GPUs only."""
    generator = torch.Generator().manual_seed(2)
    spans = spans_of(7)
    t = len(spans.first)
    total = len(begins())
    query = torch.randn(t, 4, 16, generator=generator)
    base = [torch.randn(total, 2, 16, generator=generator) for _ in "kv"]
    paths = [torch.randn(t, 2, 16, generator=generator) for _ in range(4)]
    parts = (ops._Paths([None, None]), spans, query, tuple(base), paths)
    with torch.no_grad():
        wanted = attend_spans(*parts)
        got = attend_spans(*parts, flex_attention)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
