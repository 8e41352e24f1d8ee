"""Blocks that drafter kinds share. Tokens are flat, [t, ...]: rows, padding and trees are the attention's business."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# (query [tq, heads, e], key [t, kv_heads, e], value [t, kv_heads, e]) -> [tq, heads * e], e = head size
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Rotary:
    """Rotary position embedding in the half-split layout of Llama (RoFormer, arXiv 2104.09864)."""

    def __init__(self, head_dim: int, theta: float):
        self.head_dim, self.theta = head_dim, theta

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [t] int64 -> cos, sin [t, 1, head_dim]."""
        inv = self.theta ** (
            -torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float) / self.head_dim
        )
        angles = positions[:, None].float() * inv
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [t, heads, e]; cos, sin [t, 1, e]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query attention whose input may be wider than its output (EAGLE-3 reads embedding ++ feature)."""

    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, queries: Tensor | None = None) -> Tensor:
        """Every token gives a key and a value; only those in `queries` ask.

        Args:
            x: [t, width]; cos, sin: [t, 1, e].
            attend: knows which keys a query sees, cached ones included.
            queries: [tq] int64 rows of x that need an output; None means all.

        Returns:
            [tq, hidden].
        """
        key = rotate(self.k_proj(x).view(-1, self.kv_heads, self.head_dim), cos, sin)
        value = self.v_proj(x).view(-1, self.kv_heads, self.head_dim)
        if queries is not None:
            x, cos, sin = x[queries], cos[queries], sin[queries]
        query = rotate(self.q_proj(x).view(-1, self.heads, self.head_dim), cos, sin)
        return self.o_proj(attend(query, key, value))
