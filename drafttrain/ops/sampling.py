"""From logits to probabilities and tokens: temperature, top-k, top-p and min-p, in float32.

Two costs are avoided on a CPU. `torch.multinomial` takes longer than a small model's forward pass,
so `pick` inverts the cumulative distribution in two levels: sums over blocks of the vocabulary
choose the block, the cumulative sum inside that block chooses the token. A nucleus needs no sort
of the full row either: `_kept` searches the top tokens first and sorts only rows whose kept tokens
are not all among them.

Source: the order and the rules are those of transformers' `generate` (TemperatureLogitsWarper,
TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper). Its processors, which read the text so far,
come before: see `inference/verify.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.ops.native import built_kernels, cpu_kernels
from drafttrain.values import (
    Fraction,
    Penalty,
    PositiveFraction,
    Size,
    Temperature,
    check_fields,
    key,
)

# Up to this many rows, one thread finds the top tokens faster than torch's threads.
_FEW = 32
_BLOCK = 256  # tokens of the vocabulary
# Number of top tokens that are searched for kept ones first. Top-k searches k and some more for
# ties.
_NUCLEUS = 1024
_TIES = 16


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from the target's distribution.

    Attributes:
        temperature: divides the logits; 0 means greedy.
        top_k: keep the k most likely tokens (ties with the k-th stay); 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this probability; 1 keeps
            all.
        min_p: keep tokens with at least this share of the highest probability; 0 keeps all.
        repetition_penalty: divides positive logits of tokens in the prompt or the output, and
            multiplies negative ones, once however often the token occurs (CTRL, arXiv 1909.05858);
            1 changes nothing, None is the target's own (its generation_config).
    """

    temperature: Temperature = key(0.0, "0 decodes greedily")
    top_k: Size = key(0, "0 keeps all tokens")
    top_p: PositiveFraction = key(1.0, "1 keeps all tokens")
    min_p: Fraction = key(0.0, "0 keeps all tokens")
    repetition_penalty: Penalty | None = key(None, "1 changes nothing")

    def __post_init__(self) -> None:
        check_fields(self)
        if 0 < self.temperature < 1e-4:
            raise UserError(
                f"temperature={self.temperature} must be 0 (greedy) or from 0.0001 to 1000"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class Sampler:
    """The sampling parameters of one sequence and its own random numbers.

    Attributes:
        params: how tokens are chosen.
        generator: on the CPU, so that a seed gives the same numbers on every device.
    """

    params: SamplingParams
    generator: torch.Generator


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that tokens are sampled from.

    Args:
        logits: [n, v], after the logits processors.
        params: not greedy.

    Returns:
        [n, v] float32, zero for tokens that top-k, top-p or min-p drop; the kept set is the one
        transformers keeps.
    """
    scores = _tempered(logits, params)  # [n, v]
    if not _needs_order(params, logits.shape[-1]):
        probs = scores.softmax(dim=-1)
        if params.min_p:
            least = params.min_p * probs.amax(-1, keepdim=True)  # [n, 1]
            probs = probs.masked_fill(probs < least, 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs
    probs = torch.zeros_like(scores)
    for rows, weights, ids in _kept(scores, params):
        weights = weights / weights.sum(-1, keepdim=True)
        probs[rows] = torch.zeros_like(scores[rows]).scatter_(
            -1,
            ids,
            weights.float(),
        )
    return probs


def sample(
    logits: Tensor,
    params: SamplingParams,
    uniforms: Tensor | None = None,
) -> Tensor:
    """Samples one token per row, as `pick(probabilities(...))` does, without forming full rows.

    Args:
        logits: [n, v], after the logits processors.
        uniforms: [n] float64 in [0, 1), one per row; unused when greedy.

    Returns:
        [n] int64.
    """
    if params.greedy:
        return argmax(logits)
    assert uniforms is not None
    if not _needs_order(params, logits.shape[-1]):
        return pick(probabilities(logits, params), uniforms)
    tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    for rows, weights, ids in _kept(_tempered(logits, params), params):
        rank = _invert(weights, uniforms[rows])  # [r, 1] among the kept tokens
        tokens[rows] = ids.gather(-1, rank)[:, 0]
    return tokens


def argmax(logits: Tensor) -> Tensor:
    """First index of each row's maximum, [n, v] -> [n].

    It looks for the block first: torch's argmax is slow over long rows on a CPU.
    """
    if _few_rows(logits):
        _, ids = _highest(logits, 1, None)
        return ids[:, 0]
    blocks = _blocks(logits, float("-inf"))  # [n, blocks, block]
    block = blocks.amax(-1).argmax(-1)  # [n]
    rows = torch.arange(len(block), device=logits.device)
    inside = blocks[rows, block].argmax(-1)  # [n]
    return block * blocks.shape[-1] + inside


def top_log_probs(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The most likely tokens of each row.

    Args:
        logits: [n, v]; width: number of tokens, at most v.

    Returns:
        Log-probabilities [n, width] float32 in descending order, and ids [n, width] int64.
    """
    if _few_rows(logits):
        log_sum = logits.new_empty(logits.shape[0])
        values, ids = _highest(logits, width, log_sum)
        return values - log_sum[:, None], ids
    top = logits.float().log_softmax(dim=-1).topk(width, dim=-1)
    return top.values, top.indices


def highest(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Values [n, width], descending, and ids [n, width] int64 of each row's highest logits."""
    if _few_rows(logits):
        return _highest(logits, width, None)
    top = logits.float().topk(width, dim=-1)
    return top.values, top.indices


def _few_rows(logits: Tensor) -> bool:
    """Whether the C kernel applies.

    torch splits even few rows among threads, whose start takes longer than the work.
    """
    return (
        0 < logits.shape[0] <= _FEW
        and logits.is_cpu
        and logits.dtype == torch.float32
        and logits.is_contiguous()
        and cpu_kernels() is not None
    )


def _highest(
    logits: Tensor,
    width: int,
    log_sum: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Values and ids [n, width] of the highest logits; fills log_sum [n] with log-sum-exps."""
    n, v = logits.shape
    if not 0 < width <= v:
        raise ValueError(f"width={width} must be from 1 to the {v} tokens of a row")
    ids = logits.new_empty(n, width, dtype=torch.long)
    values = logits.new_empty(n, width)
    built_kernels().likeliest(
        logits.data_ptr(),
        n,
        v,
        width,
        ids.data_ptr(),
        values.data_ptr(),
        None if log_sum is None else log_sum.data_ptr(),
    )
    return values, ids


def pick(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverts each row's cumulative distribution.

    Args:
        probs: [n, v] float32 or float64, non-negative, not all zero; need not be normalized.
        uniforms: [n] float64 in [0, 1).

    Returns:
        [n] int64, never a token of probability 0.
    """
    # On a GPU, launches take longer than a pass over the row.
    if probs.shape[-1] <= _BLOCK or probs.is_cuda:
        return _invert(probs.double(), uniforms)[:, 0]
    blocks = _blocks(probs, 0.0)  # [n, blocks, block]
    mass = blocks.sum(-1).double()  # [n, blocks]
    block = _invert(mass, uniforms)  # [n, 1]
    # Position of the point inside its block as a share, because block sums and sums of entries
    # differ by rounding.
    total = mass.cumsum(-1)  # [n, blocks]
    here = mass.gather(-1, block)  # [n, 1]
    point = uniforms[:, None] * total[:, -1:]
    share = 1 - (total.gather(-1, block) - point) / here  # [n, 1]
    inside = blocks[torch.arange(len(block), device=probs.device), block[:, 0]].double()
    offset = _invert(inside, share[:, 0].clamp(0, 1))  # [n, 1]
    return block[:, 0] * blocks.shape[-1] + offset[:, 0]


def draw_distinct(
    probs: Tensor,
    count: int,
    generator: torch.Generator,
) -> Tensor:
    """Samples tokens without replacement, each from the renormalized rest of the row.

    Args:
        probs: [n, v], non-negative.
        count: tokens per row, at most v.
        generator: on the CPU.

    Returns:
        [n, count] int64 in the order drawn, -1 after a row's last token with positive probability.
    """
    uniforms = torch.rand(
        len(probs),
        count,
        dtype=torch.float64,
        generator=generator,
    )
    uniforms = uniforms.to(probs.device)
    rest = probs.clone()
    drawn = []
    for i in range(count):
        spent = (rest <= 0).all(-1, keepdim=True)
        rest[:, :1].masked_fill_(spent, 1.0)  # any token; replaced by -1 below
        tokens = pick(rest, uniforms[:, i])[:, None]
        rest.scatter_(-1, tokens, 0.0)
        drawn.append(tokens.masked_fill(spent, -1))
    return torch.cat(drawn, dim=-1)


def _tempered(logits: Tensor, params: SamplingParams) -> Tensor:
    if params.temperature == 1:
        return logits.float()
    return logits.float() / params.temperature


def _needs_order(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size or params.top_p < 1


def _kept(
    scores: Tensor, params: SamplingParams
) -> Iterator[tuple[Tensor | slice, Tensor, Tensor]]:
    """Yields groups of rows with the tokens that top-k, top-p and min-p keep.

    Each group is row numbers [r], weights and ids; see `_likeliest` for the last two.
    """
    v = scores.shape[-1]
    if scores.is_cuda and torch.cuda.is_current_stream_capturing():
        # A captured pass cannot ask whether the top tokens are enough.
        weights, ids, _ = _likeliest(scores, params, v)
        yield slice(None), weights, ids
        return
    searched = params.top_k or _NUCLEUS
    weights, ids, fits = _likeliest(scores, params, min(searched + _TIES, v))
    if bool(fits.all()):
        yield slice(None), weights, ids
        return
    rows = torch.arange(len(scores), device=scores.device)
    yield rows[fits], weights[fits], ids[fits]
    # The others are sorted in full.
    rows = rows[~fits]
    weights, ids, _ = _likeliest(scores[rows], params, v)
    yield rows, weights, ids


def _likeliest(
    scores: Tensor,
    params: SamplingParams,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Filters each row's `width` top tokens; all three rules keep the first ones of them.

    Where a nucleus ends among tied tokens, their number is defined but not which of them stay, as
    in transformers.

    Returns:
        weights [n, width] float64, descending, not normalized, zero where dropped; ids [n, width];
        fits [n] bool, whether all kept tokens are among these.
    """
    values, ids = scores.topk(width, dim=-1)
    full = width == scores.shape[-1]
    fits = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    best = values[:, :1]  # [n, 1]
    if 0 < params.top_k < width:
        worst = values[:, params.top_k - 1 : params.top_k]  # [n, 1]
        fits = (worst > values[:, -1:])[:, 0]  # else ties with the k-th may continue
        values = values.masked_fill(values < worst, float("-inf"))
        scores = values  # top-p counts the tokens that top-k keeps
    weights = (values - best).exp().double()
    if params.top_p < 1:
        total = (scores - best).exp().sum(-1, keepdim=True).double()  # [n, 1]
        before = weights.cumsum(-1) - weights  # mass of likelier tokens
        weights = weights.masked_fill(before >= params.top_p * total, 0.0)
    weights = weights.masked_fill(weights < params.min_p, 0.0)  # the likeliest token has weight 1
    # Weights descend: where the last one is dropped, so are all tokens beyond it.
    fits = fits & (weights[:, -1] == 0)
    return weights, ids, fits | full


def _blocks(x: Tensor, fill: float) -> Tensor:
    """[n, v] -> [n, ceil(v / block), block], padded with `fill`."""
    block = min(_BLOCK, x.shape[-1])
    missing = -x.shape[-1] % block
    if missing:
        x = F.pad(x, (0, missing), value=fill)
    return x.reshape(x.shape[0], -1, block)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Index where the cumulative sum of each row passes a share of its total.

    Args:
        weights: [n, m] float64, non-negative, with a positive sum per row.
        uniforms: [n] float64 in [0, 1].

    Returns:
        [n, 1] int64, entries with positive weight.
    """
    total = weights.cumsum(-1)
    index = torch.searchsorted(
        total,
        uniforms[:, None] * total[:, -1:],
        right=True,
    )
    # Rounding may put the point on the row's end, behind the last entry with weight.
    last = torch.searchsorted(total, total[:, -1:].contiguous())
    return torch.minimum(index, last)
