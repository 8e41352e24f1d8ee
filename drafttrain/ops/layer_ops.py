"""What a decoder layer does between its matrix products, in one launch each on a GPU.

    add_norm       state += delta, then its RMS norm          9 launches of torch's
    rotate_heads   norm of each head, rotary embedding        12
    gate           activation(gate) * up                      2

Elsewhere, and as the kernels' references in tests, torch computes the same. Results may differ from
torch's own sequence of operations in half precision, because they are rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.ops.launch import has_triton, run_kernel

_BLOCK = 1024  # entries of a program of `gate`
Tables = tuple[Tensor, Tensor]  # cosine and sine [n, r] or [n, 1, r] of n tokens


@dataclass(frozen=True)
class NormForm:
    """An RMS norm by what it computes: x / sqrt(mean(x^2) + eps) * (weight + plus).

    Attributes:
        weight: [width], the module's own, so that new values take effect.
        plus: 1 for families that store the factor minus one (Gemma).
    """

    weight: Tensor
    eps: float
    plus: float

    @staticmethod
    @torch.no_grad()
    def of(norm: nn.Module) -> NormForm | None:
        """The form of a module, tested on random input; None for another function or name."""
        weight = getattr(norm, "weight", None)
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if "RMSNorm" not in type(norm).__name__ or weight is None or not isinstance(eps, float):
            return None
        if weight.dim() != 1 or weight.is_meta:
            return None
        x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0))
        x = x.to(weight.device, weight.dtype)
        expected = norm(x).float()
        rtol = 1e-5
        if weight.dtype.itemsize < 4:
            rtol = 2e-2
        for plus in (0.0, 1.0):
            form = NormForm(weight, eps, plus)
            # Another function of the same name fails here, one with other constants too.
            if torch.allclose(form.apply(x).float(), expected, rtol, atol=rtol / 10):
                return form
        return None

    def apply(self, x: Tensor) -> Tensor:
        """The norm of x [..., width], by torch."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * (self.weight.float() + self.plus)).to(x.dtype)


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels serve this tensor: on a GPU, not float64, not empty, Triton works there."""
    return x.is_cuda and x.dtype != torch.float64 and x.numel() > 0 and has_triton()


def add_norm(state: Tensor, delta: Tensor | None, norm: NormForm) -> Tensor:
    """Adds delta to a state in place, and returns the norm of the sum.

    Args:
        state: [n, width], contiguous. delta: [n, width], or None for the state's own norm.
    """
    if not has_kernels(state):
        if delta is not None:
            state.add_(delta)
        return norm.apply(state)
    from triton import next_power_of_2

    from drafttrain.ops.layer_kernels import add_norm as kernel

    rows, width = state.shape
    padded = next_power_of_2(width)
    out = torch.empty_like(state)
    run_kernel(
        kernel,
        (rows,),
        state,
        state if delta is None else delta.contiguous(),  # not read
        norm.weight,
        out,
        norm.plus,
        norm.eps,
        WIDTH=width,
        PADDED=padded,
        ADDS=delta is not None,
        num_warps=min(16, max(1, padded // 512)),
    )
    return out


def rotate_heads(x: Tensor, tables: Tables, norm: NormForm | None = None) -> Tensor:
    """Norms each head and rotates its first r entries in halves.

    Args:
        x: [n, heads, e]. tables: cosine and sine [n, r] or [n, 1, r], r <= e.

    Returns:
        [n, heads, e], contiguous, in x's dtype.
    """
    count, heads, width = x.shape
    rotary = tables[0].shape[-1]
    cosine, sine = (table.reshape(count, rotary) for table in tables)
    if not has_kernels(x):
        wide = (x if norm is None else norm.apply(x)).float()
        turned = wide[..., :rotary]
        left, right = turned.chunk(2, dim=-1)
        turned = turned * cosine[:, None].float() + torch.cat((-right, left), -1) * sine[:, None]
        return torch.cat((turned, wide[..., rotary:]), dim=-1).to(x.dtype)
    from triton import next_power_of_2

    from drafttrain.ops.layer_kernels import rotate_head

    x = x.contiguous()
    out = torch.empty_like(x)
    run_kernel(
        rotate_head,
        (count, heads),
        x,
        cosine.contiguous(),
        sine.contiguous(),
        x if norm is None else norm.weight,  # not read
        out,
        0.0 if norm is None else norm.plus,
        0.0 if norm is None else norm.eps,
        COUNT=heads,
        WIDTH=width,
        PADDED=next_power_of_2(width),
        ROTARY=rotary,
        NORM=norm is not None,
        num_warps=1,
    )
    return out


def gate(gated: Tensor, up: Tensor, gelu: bool) -> Tensor:
    """activation(gated) * up, both [n, inner]; GELU in its tanh form, or SiLU."""
    if not has_kernels(gated):
        wide = gated.float()
        activated = F.gelu(wide, approximate="tanh") if gelu else F.silu(wide)
        return (activated * up.float()).to(gated.dtype)
    from drafttrain.ops.layer_kernels import gate_up

    gated = gated.contiguous()
    out = torch.empty_like(gated)
    count = out.numel()
    run_kernel(
        gate_up,
        (-(-count // _BLOCK),),
        gated,
        up.contiguous(),
        out,
        count,
        GELU=gelu,
        BLOCK=_BLOCK,
    )
    return out
