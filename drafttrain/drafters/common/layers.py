"""Blocks that drafter kinds share. Tokens are flat, [t, ...]: rows, padding and trees are the attention's business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# (query [tq, heads, e], key [t, kv_heads, e], value [t, kv_heads, e]) -> [tq, heads * e], e = head size
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


# How positions beyond those of pretraining are reached. Left out is what depends on the length of the sequence at hand:
# keys that are cached or stored would have to change while it grows.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Rotary:
    """Rotary position embedding in the half-split layout of Llama (RoFormer, arXiv 2104.09864).

    Args:
        head_dim: e. parameters: in the form of transformers 5: rope_theta, and for long contexts rope_type, factor, ...;
            `partial_rotary_factor` rotates a head's first entries only.

    Attributes:
        width: r, entries of a head that are rotated.
    """

    def __init__(self, head_dim: int, parameters: dict[str, Any]):
        self.head_dim, self.parameters = head_dim, dict(parameters)
        self.width = int(head_dim * (self.parameters.get("partial_rotary_factor") or 1.0))
        self._known: dict[torch.device, tuple[Tensor, float]] = {}
        self._rows = torch.empty(0), torch.empty(0)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [t] int64 -> cos, sin [t, 1, r]."""
        if positions.device.type != "cpu" or dtype != torch.float32 or not positions.shape[0]:
            return self.compute(positions, dtype)
        cos, sin = (rows[positions] for rows in self.up_to(int(positions.max()) + 1))
        return cos, sin

    def up_to(self, end: int) -> tuple[Tensor, Tensor]:
        """cos, sin [at least `end`, 1, r] of positions 0, 1, 2, ... on the CPU in float32; they are kept."""
        rows = self._rows  # another thread may replace the tables by shorter ones
        if end > len(rows[0]):
            rows = self._rows = self.compute(torch.arange(1 << end.bit_length()), torch.float32)
        return rows

    def compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As `tables`, for negative positions too, and without keeping anything."""
        device = positions.device
        if device not in self._known:
            self._known[device] = self._frequencies(device)
        frequencies, scale = self._known[device]
        angles = positions[:, None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def _frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        kind = self.parameters.get("rope_type", "default")
        if kind == "default":
            steps = torch.arange(0, self.width, 2, device=device, dtype=torch.float)
            return self.parameters["rope_theta"] ** (-steps / self.width), 1.0
        original = self.parameters.get("original_max_position_embeddings") or 2048
        longest = int(original * (self.parameters.get("factor") or 1.0))
        config = LlamaConfig(
            hidden_size=self.head_dim,
            num_attention_heads=1,
            head_dim=self.head_dim,
            max_position_embeddings=longest,
            rope_parameters=dict(self.parameters),  # type: ignore[arg-type]
        )
        return ROPE_INIT_FUNCTIONS[kind](config, device)


def rope_parameters_of(config: Any) -> dict[str, Any]:
    """The target's, of its layers without a window; of kinds that are not served only the base."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = dict(rope.get("full_attention", rope))
    theta = rope.get("rope_theta") or 10000.0
    return {**rope, "rope_theta": theta} if rope.get("rope_type", "default") in ROPE_TYPES else {"rope_theta": theta}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [t, heads, e]; cos, sin [t, 1, r] with r <= e."""
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class MLP(nn.Module):
    """A gated MLP; SwiGLU with the activation "silu"."""

    def __init__(self, hidden: int, intermediate: int, bias: bool = False, act: str = "silu"):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)
        self.act = ACT2FN[act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query attention whose input may be wider than its output (EAGLE-3 reads embedding ++ feature).

    Args:
        bias: of all four projections. norm_eps: normalise each query and key head (Qwen3) with this eps; None for not.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool = False,
        norm_eps: float | None = None,
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=bias)
        self.q_norm: Any = nn.Identity() if norm_eps is None else RMSNorm(head_dim, norm_eps)
        self.k_norm: Any = nn.Identity() if norm_eps is None else RMSNorm(head_dim, norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [t, width]; cos, sin [t, 1, r] -> rotated keys and values [t, kv_heads, e]."""
        key = rotate(self.k_norm(self.k_proj(x).view(-1, self.kv_heads, self.head_dim)), cos, sin)
        return key, self.v_proj(x).view(-1, self.kv_heads, self.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, queries: Tensor | None = None) -> Tensor:
        """Every token gives a key and a value; only those in `queries` ask.

        Args:
            x: [t, width]; cos, sin: [t, 1, r].
            attend: knows which keys a query sees, cached ones included.
            queries: [tq] int64 rows of x that need an output; None means all.

        Returns:
            [tq, hidden].
        """
        key, value = self.keys_values(x, cos, sin)
        if queries is not None:
            x, cos, sin = x[queries], cos[queries], sin[queries]
        query = rotate(self.q_norm(self.q_proj(x).view(-1, self.heads, self.head_dim)), cos, sin)
        return self.o_proj(attend(query, key, value))
