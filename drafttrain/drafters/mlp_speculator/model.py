"""MLP speculator: a small recurrent network over the target's last state and drafted tokens.

Source: arXiv 2404.19124.

    state_0 = gelu(ln_0(proj_0(h_t)         + r emb_0(x_{t+1})))        head 0 predicts x_{t+2}
    state_k = gelu(ln_k(proj_k(state_{k-1}) + r emb_k(x_{t+1+k})))      head k predicts x_{t+2+k}

h_t is the last state from which the target's head chooses x_{t+1}; see common/path_heads.py. r =
w_e / w_s with w_s = 0.5 ** (0.5 / n) and w_e = sqrt((1 - w_s ** 2) inner / 2) for n steps: the
ratio of the published networks, in which ln takes the common factor away. Embeddings are the
drafter's own. ln is an RMS norm with a shift.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.drafters.common.configs import HeadsConfig, Layers, OwnWidth, Width
from drafttrain.drafters.common.path_heads import PathHeads
from drafttrain.target import Target

_EPS = 1e-6


class MlpSpeculatorConfig(HeadsConfig):
    """Config of an MLP speculator; names are those of published checkpoints where they have one.

    Attributes:
        emb_dim: width of the target's states. inner_dim: the network's width, 0 for emb_dim.
            n_predict: steps.
        tie_weights: all steps share embedding, norm and head, and all after the first the
            projection.
        scale_input: the target's state is first scaled to RMS 1 / sqrt(2), so that its size does
            not matter.
        draft_vocab_size: tokens that heads can predict (d); 0 keeps the target's whole vocabulary.
            All tokens are read.
    """

    model_type = "drafttrain_mlp_speculator"
    attribute_map = {"hidden_size": "emb_dim"}
    width_field = "emb_dim"
    emb_dim: Width = 64
    inner_dim: OwnWidth = 0
    n_predict: Layers = 3
    tie_weights: bool = False
    scale_input: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if not self.inner_dim:
            self.inner_dim = self.emb_dim
        super().__post_init__(**kwargs)


class ShiftedNorm(nn.Module):
    """Scales to RMS 1, then by a factor and a shift per column."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, _EPS) + self.bias


class MlpSpeculator(PathHeads):
    """An MLP speculator. Modules that steps share stand once, at the end of their list."""

    config_class = MlpSpeculatorConfig
    kind = "mlp_speculator"

    def __init__(self, config: MlpSpeculatorConfig):
        super().__init__(config)
        n = config.n_predict
        inner = config.inner_dim
        own = n  # modules of the steps
        later = n - 1  # projections after the first
        if config.tie_weights:
            own = 1
            later = min(later, 1)
        self.depths = n
        self.emb = nn.ModuleList(nn.Embedding(config.vocab_size, inner) for _ in range(own))
        widths = [config.emb_dim] + [inner] * later
        self.proj = nn.ModuleList(nn.Linear(width, inner, bias=False) for width in widths)
        self.ln = nn.ModuleList(ShiftedNorm(inner) for _ in range(own))
        state_weight = 0.5 ** (0.5 / n)
        self.ratio = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight
        self.finish(inner, own)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.inner_dim**-0.5)

    def copy_from(self, target: Target) -> list[str]:
        """Copies the target's embedding: its directions of most power, in a random basis.

        The rows get the size of a random start.
        `solve_start` fits the heads; the target's rows do not fit states of another network.
        """
        inner = self.config.inner_dim
        rows = target.embed(torch.arange(self.config.vocab_size, device=target.device)).float()
        # Eigenvalues ascend, so the last directions have most power.
        directions = torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)[:, :inner]
        rotation = torch.linalg.qr(torch.randn(inner, inner)).Q
        basis = rotation[: directions.shape[1]].to(rows.device)
        rows = rows @ directions @ basis
        rows *= inner**-0.5 / rows.square().mean().sqrt()
        for emb in self.emb:
            emb.weight.copy_(rows)  # type: ignore[operator]
        return ["emb"]

    def enter(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        hidden = hidden.to(self.head(0).weight.dtype)
        if self.config.scale_input:
            hidden = F.rms_norm(hidden, (hidden.shape[-1],), eps=_EPS) / math.sqrt(2)
        return self.advance(hidden, tokens, 0)

    def advance(self, state: Tensor, tokens: Tensor, depth: int) -> Tensor:
        emb = _at(self.emb, depth)
        proj = _at(self.proj, depth)
        ln = _at(self.ln, depth)
        mixed = proj(state) + self.ratio * emb(tokens)
        return F.gelu(ln(mixed))

    def read(self, state: Tensor, depth: int) -> Tensor:
        return state


def _at(modules: nn.ModuleList, depth: int) -> nn.Module:
    """The module of a depth; the last one serves all further depths."""
    return modules[min(depth, len(modules) - 1)]


KIND = MlpSpeculator
