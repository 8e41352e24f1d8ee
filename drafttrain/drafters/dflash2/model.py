"""DFlash 2: DFlash's block with convolutions and a selector that scores pairs of tokens.

    convolution   out_i = sum_j (base_j + delta_ij) * x_{i-j}             over a block's positions i and taps j
    layer         x + conv(attention(conv(norm x)))                       and the same around the MLP
    selector      logits at depth k below y = head(s_k) + B (A[y] * H s_k)     s_k: block state; A: [d+1, r], B: [d, r], H: [r, h]

Convolutions are causal, around every sublayer. Before the block x is zero. delta, shared by groups
of neighboring channels, is a linear function of the sublayer's normed input, for both convolutions
around it. Both parts start as nearly the identity: a fresh drafter drafts what DFlash does, whose
tokens are predicted from the context alone and get worse towards the block's end.

Published drafters rescore each position's `selector_top_k` likeliest tokens only, and so do
engines; ours rescores all of them unless the key is set (common/markov.py). Which are likeliest the
head says alone, so with the key its own logits are trained too: the loss is the sum of both.

Sources: inco.ai/blog/dflash2 (August 2026: 6.2 accepted where DFlash has 5.0 and DSpark 5.7,
Qwen3.5-4B, GSM8K); z-lab/dflash; vLLM models/qwen3_dflash2.py; llama.cpp src/models/dflash.cpp;
NeMo Automodel components/speculative/dflash/dflash2_core.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.batch import Attend
from drafttrain.drafters.common.block import OtherLoss, Paths
from drafttrain.drafters.common.layers import DraftLayer
from drafttrain.drafters.common.markov import MarkovBlock, MarkovConfig
from drafttrain.drafters.common.tree_growth import Children
from drafttrain.errors import UserError
from drafttrain.losses import Aligned
from drafttrain.ops.layer_ops import Tables
from drafttrain.values import Count, Size, Weight


class DFlash2Config(MarkovConfig):
    """Config of a DFlash 2 drafter; `markov_rank` is the selector's.

    Attributes:
        conv_kernel_size: taps of a convolution. conv_group_size: channels that share a dynamic
            coefficient.
        selector_top_k: likeliest tokens of a position that are rescored, the others are not
            drafted; 0 for all.
        unary_weight: weight in the loss of the head's own divergence, with `selector_top_k`.
    """

    model_type = "drafttrain_dflash2"
    recipe_keys = (*MarkovConfig.recipe_keys, "selector_top_k", "unary_weight")
    conv_kernel_size: Count = 2
    conv_group_size: Count = 16
    selector_top_k: Size = 0
    unary_weight: Weight = 1.0

    def check(self) -> None:
        super().check()
        if self.hidden_size % self.conv_group_size:
            raise UserError(
                f"conv_group_size={self.conv_group_size} must divide hidden_size={self.hidden_size}; 16 is the usual one"
            )


class BlockConv(nn.Module):
    """The two convolutions around a sublayer; [2, ...] are the one before and the one behind it."""

    def __init__(self, config: DFlash2Config):
        super().__init__()
        h = config.hidden_size
        taps = config.conv_kernel_size
        self.width = config.conv_group_size
        self.block_size = config.block_size
        self.taps = taps
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, h))
        self.base_kernel.data[:, 0] = 1.0
        self.kernel_projection = nn.Linear(h, 2 * taps * (h // self.width), bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolves a sublayer's input x [blocks * size, h].

        Returns:
            The convolution, and coefficients [blocks * size, taps, groups] for `behind`.
        """
        groups = x.shape[1] // self.width
        delta = self.kernel_projection(x).view(len(x), 2, self.taps, groups)  # also of no blocks
        return self._convolve(x, delta[:, 0], 0), delta[:, 1]

    def behind(self, x: Tensor, delta: Tensor) -> Tensor:
        """x [blocks * size, h], the sublayer's output -> its convolution."""
        return self._convolve(x, delta, 1)

    def _convolve(self, x: Tensor, delta: Tensor, side: int) -> Tensor:
        """x [blocks * size, h], delta [blocks * size, taps, groups] -> [blocks * size, h]."""
        base = self.base_kernel[side].to(x.dtype)  # [taps, h]
        base = base.unflatten(1, (-1, self.width))  # [taps, groups, width]
        kernel = (base + delta[..., None]).flatten(2)  # [blocks * size, taps, h]
        out = kernel[:, 0] * x
        blocks = x.view(-1, self.block_size, x.shape[1])
        for tap in range(1, min(self.taps, self.block_size)):
            earlier = F.pad(blocks[:, :-tap], (0, 0, tap, 0))  # [blocks, size, h], moved by `tap`
            out = out + kernel[:, tap] * earlier.flatten(0, 1)
        return out


class ConvLayer(DraftLayer):
    """A decoder layer over whole blocks with convolutions around attention and MLP."""

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.attention_conv = BlockConv(config)
        self.mlp_conv = BlockConv(config)

    def pack(self, rotary_dim: int) -> None:
        """Does nothing: the fused CPU kernels lack the convolutions.

        The linear layers are packed one by one.
        """

    def _attended(
        self,
        state: Tensor,
        embeds: Tensor | None,
        tables: Tables,
        attend: Attend,
        queries: Tensor | None,
    ) -> Tensor:
        x, delta = self.attention_conv(self.input_layernorm(state))
        return state + self.attention_conv.behind(self.self_attn(x, tables, attend), delta)

    def _transformed(self, state: Tensor) -> Tensor:
        x, delta = self.mlp_conv(self.post_attention_layernorm(state))
        return state + self.mlp_conv.behind(self.mlp(x), delta)


class DFlash2(MarkovBlock):
    """A DFlash 2 drafter: the block-parallel backbone with convolutions and a selector."""

    config_class = DFlash2Config
    kind = "dflash2"
    layer_class = ConvLayer
    mixes_tokens = True
    config: DFlash2Config

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.gate = nn.Linear(config.hidden_size, config.markov_rank, bias=False)
        self.post_init()
        nn.init.normal_(
            self.markov_out.weight,
            std=1e-3,
        )  # not zero, which would keep the gradient from the other factors
        for module in self.modules():
            if isinstance(module, BlockConv):
                nn.init.zeros_(module.kernel_projection.weight)

    def bend(self, at: Paths) -> tuple[Tensor, Tensor | None]:
        return self.embedded(at.parents) * self.gate(at.reads), at.states

    def other_loss(
        self,
        hidden: Tensor,
        aligned: Aligned,
        alpha: Tensor | None,
        parents: Tensor,
    ) -> OtherLoss:
        """The head's own divergence, without the selector: it chooses which tokens are rescored."""
        config = self.config
        if not 0 < config.selector_top_k < config.draft_vocab_size or not config.unary_weight:
            return 0.0, []
        return config.unary_weight * self.own_loss(hidden, aligned), []

    def conditional(self, logits: Tensor, at: Paths) -> tuple[Children, Tensor | None]:
        count = self.config.selector_top_k
        if not 0 < count < logits.shape[-1]:
            return super().conditional(logits, at)
        pair, states = self.bend(at)
        unary, ids = logits.topk(count)  # [n, k] each
        scores = torch.einsum("nr,nkr->nk", pair, self.markov_out.weight[ids])
        scores = unary + scores.to(logits.dtype)
        return Children(torch.full_like(logits, -torch.inf).scatter(1, ids, scores)), states


KIND = DFlash2
