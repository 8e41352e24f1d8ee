"""The loss between target and drafter: target distributions, divergences, their fused linear form.

    target:   states [r, h] @ head [h, d]  -> p                    TargetRows here; StoredLogits, StoredTopK in stored.py
    drafter:  hidden [t, h] @ weight [h, d] -> z, q = softmax(z)   aligned with target row index[t]
    loss:     sum_t row_weight[t] * D(p, q)                        linear_divergence

Logits of all t tokens never exist. `linear_divergence` takes the rows in chunks; one pass per chunk
forms both sides' logits, the divergence and its gradient, and drops them, so backward only scales
what forward has summed. On a GPU with Triton a kernel does everything between the matrix products
(`fused.py`); elsewhere the code here does, and it is the definition.

Every divergence maps a chunk of row pairs to (value [c], gradient [c, d] in z / T). With q a
softmax, the gradient of any value D is q * (D' - sum(q * D')) where D' is dD/dq; each function
states its short form.

A drafter may know only some of the target's tokens. The divergences proper (kl, reverse_kl, js)
compare q with p renormalized on the kept tokens, the nearest distribution that the drafter can
express. The acceptance losses (tv, tvd++, lk_alpha, lk_lambda) read the full p: verification
accepts with min(1, p / q) of the full p, so sum min(p, q) is the acceptance rate of decoding. Both
families have their optimum at the renormalized p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import wrap_torch_function

from drafttrain.errors import UserError
from drafttrain.losses.fused import fused_step
from drafttrain.losses.spec import Loss, parse_loss
from drafttrain.ops.launch import has_triton

# Target distributions up to this size are computed once per batch and shared by all depths; larger
# ones once per use.
_SHARED_BYTES = 256e6
# Lower bound of divisors: a smaller acceptance does not scale the gradient up further.
_TINY = 1e-12
_CHUNK = 256  # rows per chunk on the torch path; more gain nothing on a CPU
# Bytes of logits per chunk on the kernel path. Large products are faster; two chunks are in memory
# at a time.
_KERNEL_BYTES = 2**27
# Numbers of a head of another dtype that are converted at a time on a GPU: 128 MB in float32.
_CONVERTED = 2**25

# p [c, d], its entropy [c], log of its softmax denominator [c]
Kept = tuple[Tensor, Tensor, Tensor]
# argmax, log_z and log_z_at of `TargetRows`
Statistics = tuple[Tensor, Tensor, dict[float, Tensor]]
# values [c], grad [c, d], alpha [c], agree [c]
StepResult = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def wide(x: Tensor) -> Tensor:
    """The tensor in at least float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Row-wise dot products [c] of two [c, d] matrices, without a [c, d] temporary."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).flatten()


def tempered(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """logits / temperature [c, d] (the tensor itself at 1), and their log-sum-exp [c]."""
    if temperature == 1:
        scaled = logits
    else:
        scaled = logits / temperature
    return scaled, scaled.logsumexp(-1)


# -- target distributions --------------------------------------------------------------------------


class Targets:
    """The target's next-token distributions at r positions. Subclasses differ in what they store."""

    # [r] int64 drafter id of the target's likeliest token; -1 if the drafter lacks that token
    argmax: Tensor
    # [r] int64 drafter id of the token that follows in the data, -1 likewise; for `ce`
    sampled: Tensor | None

    @property
    def count(self) -> int:
        """r."""
        return len(self.argmax)

    def check(self, loss: Loss) -> None:
        """Raises UserError for a loss that these targets do not give."""

    def prepare(self) -> None:
        """Computes what a measured step reads, before the drafter's activations take memory."""

    @cached_property
    def _shared(self) -> dict[float, Kept]:
        """Distributions of all r rows by temperature."""
        return {}

    def logits(
        self,
        index: Tensor | slice,
        aligned: AlignedRows | None = None,
    ) -> Tensor:
        """[c, d] logits over the kept vocabulary, before any temperature; float32 or wider.

        Args:
            aligned: the drafter's rows; only `StoredTopK` needs them.
        """
        raise NotImplementedError

    def kernel_logits(self, index: Tensor, z: Tensor) -> Tensor:
        """`logits` in the float dtype that costs least; z: [c, d] raw products of the drafter rows."""
        return self.logits(index, AlignedRows(wide(z), self, index, 1.0))

    def full_log_z(self, index: Tensor, temperature: float) -> Tensor:
        """[c] log of the softmax denominator of `logits` / temperature over the full vocabulary."""
        raise NotImplementedError

    def sampled_at(self, index: Tensor) -> Tensor:
        """[c] int64, `sampled` of these rows; UserError if the data's next tokens were not given."""
        if self.sampled is None:
            raise UserError(
                "loss 'ce' needs the ids of the data's next tokens (TargetRows.sampled); give them"
            )
        return self.sampled[index]

    def kept(
        self,
        index: Tensor,
        temperature: float = 1.0,
        aligned: AlignedRows | None = None,
    ) -> Kept:
        """The distribution renormalized on the kept tokens, of rows index [c]."""
        rows = self.count
        width = self.logits(slice(0), aligned).shape[1]  # no row is computed for it
        if not 0 < 4 * rows * width <= _SHARED_BYTES:  # in float32
            return self._distribution(index, temperature, aligned)
        if temperature not in self._shared:
            probs = []
            entropies = []
            sums = []
            for start in range(0, rows, _CHUNK):
                chunk = self._distribution(
                    slice(start, start + _CHUNK),
                    temperature,
                    None,
                )
                probs.append(chunk[0])  # [chunk, d]
                entropies.append(chunk[1])  # [chunk]
                sums.append(chunk[2])  # [chunk]
            self._shared[temperature] = torch.cat(probs), torch.cat(entropies), torch.cat(sums)
        p, entropy, log_z = self._shared[temperature]
        return p[index], entropy[index], log_z[index]

    def _distribution(
        self,
        index: Tensor | slice,
        temperature: float,
        aligned: AlignedRows | None,
    ) -> Kept:
        logits, log_z = tempered(self.logits(index, aligned), temperature)  # [c, d], [c]
        p = (logits - log_z.unsqueeze(1)).exp_()
        entropy = log_z - dot(p, logits)  # -sum p log p
        return p, entropy, log_z


class FullTargets(Targets):
    """Targets with full softmax denominators: at temperature 1, and at others that the loss reads."""

    log_z: Tensor
    log_z_at: dict[float, Tensor]

    def full_log_z(self, index: Tensor, temperature: float) -> Tensor:
        if temperature == 1:
            return self.log_z[index]
        if temperature not in self.log_z_at:
            raise UserError(
                f"temperature @{temperature:g}: the loss reads the target's full distribution there, but log_z_at has "
                f"{sorted(self.log_z_at) or 'none'}; compute it for {temperature:g}"
            )
        return self.log_z_at[temperature][index]


@dataclass
class TargetRows(FullTargets):
    """Target distributions as hidden states times the target's head."""

    hidden: Tensor  # [r, h] states that the target's head reads
    weight: Tensor  # [d, h] the head's rows for the kept (drafter) vocabulary
    # [r] float32 log of the softmax denominator over the *full* vocabulary, which acceptance reads
    log_z: Tensor
    argmax: Tensor  # [r], see `Targets`
    # what the target applies to the products: bias, scale, soft cap
    shape: Callable[[Tensor], Tensor] | None = None
    sampled: Tensor | None = None  # [r], see `Targets`
    # temperature -> [r], log_z of logits / temperature
    log_z_at: dict[float, Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.hidden)

    def products(self, index: Tensor | slice) -> Tensor:
        """[c, d] hidden times head in the head's dtype, before `shape`."""
        return F.linear(self.hidden[index].to(self.weight.dtype), self.weight)

    def logits(
        self,
        index: Tensor | slice,
        aligned: AlignedRows | None = None,
    ) -> Tensor:
        logits = wide(self.products(index))
        if self.shape is None:
            return logits
        return self.shape(logits)

    def kernel_logits(self, index: Tensor, z: Tensor) -> Tensor:
        if self.shape is None:
            return self.products(index)
        return self.logits(index)


class LazyRows(TargetRows):
    """`TargetRows` whose argmax and log_z are computed when they are first read.

    They take a product with the target's whole head, which costs as much as the rest of a small
    drafter's step, and only acceptance losses and measured steps read them.

    Args:
        statistics: gives argmax, log_z and log_z_at. The others: as for `TargetRows`.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        statistics: Callable[[], Statistics],
        shape: Callable[[Tensor], Tensor] | None,
        sampled: Tensor | None,
    ):
        self.hidden = hidden
        self.weight = weight
        self.shape = shape
        self.sampled = sampled
        self._compute = statistics

    @cached_property
    def _statistics(self) -> Statistics:
        return self._compute()

    def prepare(self) -> None:
        self._statistics  # noqa: B018  # cached

    @property
    def argmax(self) -> Tensor:  # type: ignore[override]
        return self._statistics[0]

    @property
    def log_z(self) -> Tensor:  # type: ignore[override]
        return self._statistics[1]

    @property
    def log_z_at(self) -> dict[float, Tensor]:  # type: ignore[override]
        return self._statistics[2]


class AlignedRows:
    """A chunk of drafter rows and the target rows aligned with them, at one temperature.

    All tensors are float32 or wider. The target's part is computed on first use, so a loss that
    does not read it costs nothing.

    Attributes:
        z: [c, d] drafter logits / temperature.
        q: [c, d] their softmax. log_z: [c] their log-sum-exp.
        p: [c, d] target, renormalized on the kept tokens; entropy: [c] of p.
        full: [c, d] the target's full probabilities of the kept tokens, so that rows sum to at most
            1.
        alpha: [c] sum min(full, q), the probability that a sampled draft token is accepted.
        sampled: [c] int64, drafter id of the data's next token, -1 where the drafter lacks it.
    """

    def __init__(
        self,
        z: Tensor,
        targets: Targets,
        index: Tensor,
        temperature: float,
    ):
        self.z, self.log_z = tempered(z, temperature)
        self.q = self.log_q().exp_()
        self._targets = targets
        self._index = index
        self._temperature = temperature

    @cached_property
    def _kept(self) -> Kept:
        return self._targets.kept(self._index, self._temperature, self)

    @property
    def p(self) -> Tensor:
        return self._kept[0]

    @property
    def entropy(self) -> Tensor:
        return self._kept[1]

    def log_p(self) -> Tensor:
        """[c, d] log p. Not kept: only reverse_kl and js read it."""
        logits = self._targets.logits(self._index, self)
        if self._temperature != 1:
            logits = logits / self._temperature
        _, _, log_z = self._kept
        return logits - log_z.unsqueeze(1)

    def log_q(self) -> Tensor:
        """[c, d] log q. Not kept: it is one subtraction."""
        return self.z - self.log_z.unsqueeze(1)

    @cached_property
    def _share(self) -> Tensor:
        """[c, 1] mass of the full distribution on the kept tokens."""
        _, _, log_z = self._kept
        full_log_z = self._targets.full_log_z(self._index, self._temperature)  # [c]
        return (log_z - full_log_z).exp().unsqueeze(1)

    @cached_property
    def full(self) -> Tensor:
        return self.p * self._share

    @cached_property
    def alpha(self) -> Tensor:
        return torch.minimum(self.full, self.q).sum(-1)

    def final_alpha(self) -> Tensor:
        """`alpha` as the last read of p: it overwrites p and forms no other [c, d] matrix."""
        if "full" not in self.__dict__:  # the cache of the property
            self.full = self.p.mul_(self._share)
        return self.alpha

    @property
    def sampled(self) -> Tensor:
        return self._targets.sampled_at(self._index)


# -- divergences -----------------------------------------------------------------------------------

Divergence = Callable[[AlignedRows, float], tuple[Tensor, Tensor]]


def forward_kl(rows: AlignedRows, _: float = 0) -> tuple[Tensor, Tensor]:
    """sum p (log p - log q): covers every token that the target may choose. Gradient q - p."""
    value = rows.log_z - dot(rows.p, rows.z) - rows.entropy  # log q = z - log_z
    return value, rows.q - rows.p


def reverse_kl(rows: AlignedRows, _: float = 0) -> tuple[Tensor, Tensor]:
    """sum q (log q - log p): puts mass only where the target has it.

    Gradient q * (log q/p - value).
    """
    ratio = rows.log_q().sub_(rows.log_p())
    value = dot(rows.q, ratio)
    return value, ratio.sub_(value.unsqueeze(1)).mul_(rows.q)


def jensen_shannon(rows: AlignedRows, beta: float) -> tuple[Tensor, Tensor]:
    """beta KL(p | m) + (1 - beta) KL(q | m) with m = beta p + (1 - beta) q.

    Between the two KLs, and bounded. Gradient (1 - beta) q * (log q/m - KL(q | m)).

    Source: generalized JSD of Agarwal et al. 2024, arXiv 2306.13649.
    """
    log_p = rows.log_p()
    log_q = rows.log_q()
    # In log space: where p and q both round to zero, m would too.
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    from_p = dot(rows.p, log_p.sub_(log_m))  # [c] KL(p | m)
    ratio = log_q.sub_(log_m)  # [c, d] log q/m
    from_q = dot(rows.q, ratio)  # [c] KL(q | m)
    value = beta * from_p + (1 - beta) * from_q
    grad = ratio.sub_(from_q.unsqueeze(1)).mul_(rows.q).mul_(1 - beta)
    return value, grad


def total_variation(rows: AlignedRows, _: float = 0) -> tuple[Tensor, Tensor]:
    """1 - sum min(p, q), the rejection rate of sampled draft tokens.

    Gradient q * (mu - r), where r = 1[q < p] and mu = sum q r.
    """
    return 1 - rows.alpha, _rewarded(rows)[0]


def _rewarded(rows: AlignedRows) -> tuple[Tensor, Tensor]:
    """The gradient of total variation [c, d], and mu [c], the mean of the reward r under q."""
    reward = (rows.q < rows.full).to(rows.q.dtype)  # [c, d]
    mean = dot(rows.q, reward)  # [c]
    return reward.neg_().add_(mean.unsqueeze(1)).mul_(rows.q), mean


def total_variation_normalized(
    rows: AlignedRows,
    _: float = 0,
) -> tuple[Tensor, Tensor]:
    """Total variation with a policy gradient of normalized rewards: q * (mu - r) / sigma.

    With q as a policy, r is the reward of a token; mu and sigma are its mean and standard deviation
    under q. They are exact over the row's whole vocabulary, so a token's gradient does not depend
    on its batch. The value is total variation's.

    Source: TVD++ of Goel et al. 2024, arXiv 2403.00858.
    """
    grad, mean = _rewarded(rows)
    variance = mean * (1 - mean)  # [c], of a reward that is 0 or 1
    inverse_sigma = variance.clamp(min=_TINY).rsqrt()
    return 1 - rows.alpha, grad.mul_(inverse_sigma.unsqueeze(1))


def negative_log_acceptance(rows: AlignedRows, _: float = 0) -> tuple[Tensor, Tensor]:
    """-log alpha.

    The gradient is total variation's divided by alpha, so it does not vanish at a low acceptance.

    Source: LK-alpha of Samarin et al. 2026, arXiv 2602.23881.
    """
    alpha = rows.alpha.clamp(min=_TINY)
    return -alpha.log(), _rewarded(rows)[0].div_(alpha.unsqueeze(1))


def kl_then_acceptance(rows: AlignedRows, eta: float) -> tuple[Tensor, Tensor]:
    """lam KL + (1 - lam) TV with lam = exp(-eta alpha) per token: KL first, acceptance later.

    lam is constant in the gradient.

    Source: LK-lambda of Samarin et al. 2026, arXiv 2602.23881, where eta is 3.
    """
    lam = (-eta * rows.alpha).exp()  # [c]
    kl, kl_grad = forward_kl(rows)
    tv, tv_grad = total_variation(rows)
    grad = kl_grad.mul_(lam.unsqueeze(1)).addcmul_(tv_grad, (1 - lam).unsqueeze(1))
    return lam * kl + (1 - lam) * tv, grad


def cross_entropy(rows: AlignedRows, _: float = 0) -> tuple[Tensor, Tensor]:
    """-log q of the data's next token; zero where the drafter lacks it. Gradient q - onehot."""
    known = rows.sampled >= 0  # [c]
    chosen = rows.sampled.clamp(min=0).unsqueeze(1)  # [c, 1]
    grad = rows.q.scatter_add(1, chosen, rows.q.new_full(chosen.shape, -1.0))
    value = rows.log_z - rows.z.gather(1, chosen).squeeze(1)
    return value * known, grad.mul_(known.unsqueeze(1))


DIVERGENCES: dict[str, Divergence] = {
    "kl": forward_kl,
    "reverse_kl": reverse_kl,
    "js": jensen_shannon,
    "tv": total_variation,
    "tvd++": total_variation_normalized,
    "lk_alpha": negative_log_acceptance,
    "lk_lambda": kl_then_acceptance,
    "ce": cross_entropy,
}


# -- the head that several depths of a step read ---------------------------------------------------
#
#     linear_divergence(read_0, head, ...).loss  \
#     linear_divergence(read_1, head, ...).loss   +  head.term()   -> one [d, h] gradient, whatever the number of depths


class SharedHead:
    """A head's weight, and the gradient that each call of `linear_divergence` adds to in place.

    Args:
        weight: [d, h], trainable or frozen.
    """

    def __init__(self, weight: Tensor):
        self.weight = weight
        self._converted = weight.detach()
        self._gradient: Tensor | None = None  # [d, h], sum of all calls so far
        if weight.requires_grad and torch.is_grad_enabled():
            dtype = weight.dtype
            if dtype == torch.float16:
                dtype = torch.float32  # so that a loss scale fits
            self._gradient = torch.zeros_like(weight, dtype=dtype)

    def weight_for(self, rows: Tensor) -> Tensor:
        """[d, h] for products with these rows, in their dtype.

        On a GPU a weight narrower than the rows stays narrow: `products` converts it in parts.
        """
        wider = rows.dtype.itemsize > self.weight.dtype.itemsize
        by_parts = wider and rows.device.type != "cpu"
        if self._converted.dtype != rows.dtype and not by_parts:
            self._converted = self.weight.detach().to(rows.dtype)  # once for all depths
        return self._converted

    def add(self, grad: Tensor, rows: Tensor, size: Tensor) -> None:
        """Adds the gradient of a chunk: grad [c, d] of its logits, rows [c, h].

        size: factor of a float16 gradient; 1 for others.
        """
        total = self._gradient
        if total is not None and total.dtype == grad.dtype:
            total.addmm_(grad.t(), rows)
        elif total is not None:
            for part in _parts(total):  # in the rows' dtype, as autocast multiplies
                into = total[part]  # a view: `total[part] += x` would also copy the sum onto itself
                made = grad[:, part].t() @ rows
                if grad.dtype == torch.float16:
                    made = made.float() * size
                into += made

    def term(self) -> Tensor:
        """A zero that carries the weight's gradient, with the same factor as the calls' losses."""
        if self._gradient is None:
            return self.weight.new_zeros(())
        return _Gradient.apply(self.weight, self._gradient)


class _Gradient(torch.autograd.Function):
    """Zero, whose gradient in the weight is a given matrix."""

    @staticmethod
    def forward(
        ctx,
        weight: Tensor,
        gradient: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(gradient)
        return gradient.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return ctx.saved_tensors[0] * grad, None  # autograd converts it to the weight's dtype


def _parts(weight: Tensor) -> Iterator[slice]:
    """Rows of a weight [d, h] that are converted at a time."""
    rows = max(1, _CONVERTED // weight.shape[1])
    for begin in range(0, len(weight), rows):
        yield slice(begin, begin + rows)


def products(rows: Tensor, weight: Tensor) -> Tensor:
    """[c, h] rows and [d, h] weight -> [c, d] logits in the rows' dtype.

    A weight of another dtype is converted part by part.
    """
    if weight.dtype == rows.dtype:
        return F.linear(rows, weight)
    out = rows.new_empty(len(rows), len(weight))
    for part in _parts(weight):
        out[:, part] = F.linear(rows, weight[part].to(rows.dtype))
    return out


def products_backward(grad: Tensor, weight: Tensor) -> Tensor:
    """[c, d] gradient of the logits and [d, h] weight -> [c, h], the rows' gradient."""
    if weight.dtype == grad.dtype:
        return grad @ weight
    out = grad.new_zeros(len(grad), weight.shape[1])
    for part in _parts(weight):
        out.addmm_(grad[:, part], weight[part].to(grad.dtype))
    return out


# -- the fused linear form -------------------------------------------------------------------------


@dataclass
class DivergenceOutput:
    """Per-token results, detached except the loss; alpha and agree are None unless measured."""

    loss: Tensor  # scalar, sum of row_weight * divergence
    values: Tensor  # [t] divergence of each token
    # [t] sum_v min(p, q) with the target's full p, the probability that a sampled draft token is
    # accepted
    alpha: Tensor | None = None
    # [t] bool, the drafter's likeliest token is the target's likeliest of the full vocabulary
    agree: Tensor | None = None


def sums_by_depth(outs: Sequence[DivergenceOutput]) -> dict[str, Tensor]:
    """Metrics of a training step, summed over each depth's anchors: count, loss, alpha and agree.

    Args:
        outs: one per depth.

    Returns:
        [depths] of each metric; nothing if the metrics were not measured.
    """
    sums = []
    for out in outs:
        if out.alpha is None or out.agree is None:
            continue
        count = torch.ones_like(out.values).sum()
        values = (count, out.values.sum(), out.alpha.sum(), out.agree.float().sum())
        sums.append(torch.stack(values))  # [4]
    if not sums:  # steps between two logs measure nothing
        return {}
    names = ("count", "loss", "alpha", "agree")
    return dict(zip(names, torch.stack(sums, dim=1), strict=True))


@wrap_torch_function(lambda hidden: (hidden,))
def has_kernel(hidden: Tensor) -> bool:
    """Whether the Triton kernel serves this tensor: on a GPU, not float64, Triton installed.

    `drafttrain plan` overrides it.
    """
    return hidden.is_cuda and hidden.dtype != torch.float64 and has_triton()


class Aligned(NamedTuple):
    """What t predictions are compared with: rows at[t] of the target's, by weight[t] float32."""

    rows: Targets
    at: Tensor
    weight: Tensor


def _torch_step(
    z: Tensor,
    targets: Targets,
    index: Tensor,
    row_weight: Tensor,
    loss: Loss,
    measure: bool,
) -> StepResult:
    """One chunk, as `fused_step`; float32, or float64 if the logits are."""
    dtype = z.dtype
    z = wide(z)  # [c, d]
    rows: dict[float, AlignedRows] = {}
    for term in loss.terms:
        if term.temperature not in rows:
            rows[term.temperature] = AlignedRows(
                z,
                targets,
                index,
                term.temperature,
            )
        value, slope = DIVERGENCES[term.name](rows[term.temperature], term.parameter)  # [c], [c, d]
        scale = term.weight / term.temperature
        if term is loss.terms[0]:
            values = value * term.weight
            if scale == 1:
                grad = slope
            else:
                grad = slope.mul_(scale)
        else:
            values = values.add_(value, alpha=term.weight)
            grad = grad.add_(slope, alpha=scale)
    alpha = agree = None
    if measure:
        # Acceptance is measured at temperature 1, whatever temperatures the loss reads.
        plain = rows.get(1.0)
        if plain is None:
            plain = AlignedRows(z, targets, index, 1.0)
        alpha = plain.final_alpha()
        agree = z.argmax(-1) == targets.argmax[index]
    return values, grad.mul_(row_weight.unsqueeze(1)).to(dtype), alpha, agree


class _LinearDivergence(torch.autograd.Function):
    """Sums value and gradients chunk by chunk in forward; backward scales the gradient of the rows."""

    @staticmethod
    def forward(
        ctx,
        hidden,
        head: SharedHead,
        aligned: Aligned,
        loss: Loss,
        chunk: int,
        measure: bool,
    ):
        total = hidden.shape[0]
        row_weight = aligned.weight
        weight = head.weight_for(hidden)
        step = fused_step if has_kernel(hidden) else _torch_step
        values = wide(hidden.new_empty(0)).new_empty(total)  # [t] float32 or wider
        measured = total if measure else 0
        alpha = values.new_empty(measured)
        agree = values.new_empty(measured, dtype=torch.bool)
        grad_hidden = None
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.empty_like(hidden)  # [t, h]

        # float16 has no numbers below 6e-8, but the weight of a row, 1 over the anchors of a step,
        # times a probability is smaller. So rows get weights up to 1, and sums their size again.
        size = row_weight.new_ones(())
        scaled = row_weight
        if hidden.dtype == torch.float16:
            size = row_weight.abs().amax().clamp(min=_TINY)
            scaled = row_weight / size

        for start in range(0, total, chunk):
            part = slice(start, min(start + chunk, total))
            values[part], grad, chunk_alpha, chunk_agree = step(
                products(hidden[part], weight),
                aligned.rows,
                aligned.at[part],
                scaled[part],
                loss,
                measure,
            )
            if chunk_alpha is not None and chunk_agree is not None:
                alpha[part] = chunk_alpha
                agree[part] = chunk_agree
            if grad_hidden is not None:
                grad_hidden[part] = products_backward(grad, weight)
            head.add(grad, hidden[part], size)
            del grad  # free it before the next chunk's logits
        ctx.save_for_backward(grad_hidden, size)
        ctx.mark_non_differentiable(values, alpha, agree)
        return (values * row_weight).sum(), values, alpha, agree

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad, size = ctx.saved_tensors  # [t, h], or None
        if grad is not None and grad.dtype == torch.float16:
            # A loss scale of 65,536 is not a number of float16: the product is formed in float32.
            grad = (grad.float() * (grad_loss * size)).to(grad.dtype)
        elif grad is not None:
            grad = grad * grad_loss.to(grad.dtype)
        return grad, None, None, None, None, None


def linear_divergence(
    hidden: Tensor,
    head: Tensor | SharedHead,
    targets: Targets,
    index: Tensor,
    row_weight: Tensor,
    loss: str = "kl",
    chunk: int | None = None,
    measure: bool = True,
) -> DivergenceOutput:
    """Divergence between drafter rows softmax(hidden head^T) and the target rows aligned with them.

    Under autocast the products with the head run in autocast's dtype. Sums, values and the head's
    gradients are the same as without autocast.

    Args:
        hidden: [t, h] drafter states; gradients flow into them.
        head: [d, h] drafter head; gradients flow into it. The gradient of a `SharedHead` flows
            through `SharedHead.term`, which the caller adds to the sum of the losses.
        targets: the target's distributions.
        index: [t] int64, the target row of each drafter row.
        row_weight: [t] float32 factor of each token in the loss (mask, depth decay, 1 / global
            count).
        loss: as `parse_loss` reads it: kl, js:0.5, 0.9*kl+0.1*ce.
        chunk: rows per chunk; chosen by the device unless given. Memory is a few [chunk, d]
            matrices.
        measure: also compute alpha and agree, at about a tenth of the cost.

    Returns:
        The weighted sum and per-token values.

    Raises:
        UserError: a loss that cannot be parsed, or that reads what the targets do not hold.
    """
    kind = hidden.device.type
    parsed = parse_loss(loss)
    targets.check(parsed)
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    shared = head if isinstance(head, SharedHead) else SharedHead(head)
    if chunk is None:
        chunk = _CHUNK
        if has_kernel(hidden):
            row_bytes = shared.weight.shape[0] * hidden.element_size()
            fitting = _KERNEL_BYTES // row_bytes // 128 * 128  # rows, a multiple of 128
            chunk = max(_CHUNK, fitting)
    with torch.autocast(kind, enabled=False):  # it would round the sums too
        total, values, alpha, agree = _LinearDivergence.apply(
            hidden,
            shared,
            Aligned(targets, index, row_weight),
            parsed,
            chunk,
            measure,
        )
    if shared is not head:
        total = total + shared.term()
    if measure:
        return DivergenceOutput(total, values, alpha, agree)
    return DivergenceOutput(total, values)
