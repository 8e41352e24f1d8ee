"""Drafters made of decoder layers: the layer, and both halves of the contract for kinds that are fed with their own output.

    anchor t, depth 0:   state = what the kind makes of features_t     token x_{t+1}        predicts x_{t+2}
    anchor t, depth k:   state = own output at depth k-1               token x_{t+1+k}      predicts x_{t+2+k}

A query at (t, k) sees the depth-0 keys of anchors 0..t and its own keys at depths 1..k. Its rotary position is t + k. The
decoder computes just that: depth-0 keys come from true target features of committed tokens, deeper ones belong to the
drafted path. Training (training-time test, arXiv 2503.01840) and decoding both call `LayerDrafter.step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.batch import Batch, StepOutput, TargetOutput
from drafttrain.drafters.common.layer_config import LayerConfig
from drafttrain.drafters.common.layer_session import CacheShape, LayerDrafting
from drafttrain.drafters.common.layers import MLP, Attend, Attention, RMSNorm, Rotary
from drafttrain.drafters.common.shared import anchors_by_depth, sums_by_depth
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.losses import TargetRows, linear_divergence
from drafttrain.ops.cpu_layers import DecoderLayer, DraftStep, DraftWeights, LayerWeights
from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.packing import SKINNY_ROWS
from drafttrain.ops.path_attention import PathAttention

# Activations that the CPU kernels know, and whether each is the tanh form of GELU.
_NATIVE_ACTS = {"silu": False, "gelu_pytorch_tanh": True}


class DraftLayer(nn.Module):
    """A decoder layer; names follow published checkpoints.

    Args:
        beside: width of the token embedding that it reads beside the state, as EAGLE-3's first layer does; 0 for none.
        normed: False for a layer that reads the state as it is, as EAGLE-1's first one does.
    """

    def __init__(self, config: LayerConfig, beside: int = 0, normed: bool = True):
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.norm_before_residual = bool(beside) and getattr(config, "norm_before_residual", False)
        self.input_layernorm: Any = RMSNorm(beside or h, eps) if normed else nn.Identity()
        if beside:
            self.hidden_norm = RMSNorm(h, eps)
        self.self_attn = Attention(
            beside + h,
            h,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.attention_bias,
            eps if config.qk_norm else None,
        )
        self.post_attention_layernorm = RMSNorm(h, eps)
        self.mlp = MLP(h, config.intermediate_size, config.mlp_bias, config.hidden_act)
        self.native: DecoderLayer | None = None

    def pack(self, rotary_dim: int) -> None:
        """Readies the layer for inference on a CPU: from now on few rows take two kernel calls around the attention.

        Layers with biases or an activation that the kernels lack keep the plain form.
        """
        config, attention, mlp = self.config, self.self_attn, self.mlp
        alone = not hasattr(self, "hidden_norm") and isinstance(self.input_layernorm, RMSNorm)
        if config.attention_bias or config.mlp_bias or config.hidden_act not in _NATIVE_ACTS:
            return
        norms = {"input_norm": self.input_layernorm.weight} if alone else {}
        if config.qk_norm:
            norms |= {"query_norm": attention.q_norm.weight, "key_norm": attention.k_norm.weight}
        norm, gelu = self.post_attention_layernorm, _NATIVE_ACTS[config.hidden_act]
        weights = LayerWeights.of(
            attention, mlp, mlp_norm=norm.weight, rotary_dim=rotary_dim, eps=norm.eps, gelu=gelu, **norms
        )
        self.native = DecoderLayer(weights)

    def forward(
        self, state: Tensor, embeds: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend, queries: Tensor | None
    ) -> Tensor:
        """state [t, h], embeds [t, beside] for a layer that reads them -> [t or queries, h]."""
        native = self.native if state.shape[0] <= SKINNY_ROWS else None
        if embeds is None:
            x = state if native is not None else self.input_layernorm(state)
        else:
            normed = self.hidden_norm(state)
            x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
            state = normed if self.norm_before_residual else state
        if native is not None:
            return native.forward(state, x, cos, sin, attend, queries)
        if queries is not None:
            state = state[queries]
        state = state + self.self_attn(x, cos, sin, attend, queries)
        return state + self.mlp(self.post_attention_layernorm(state))


class LayerDrafter(LayerDrafting, TrainableDrafter):
    """What kinds of decoder layers share. The embedding is the target's, frozen and never saved; `bind` attaches it.

    A kind makes its layers and projections, then calls `finish`, and says

        decoder_layers, head_weight      what there is; layers_at: those that a depth runs, if depths differ
        fuse(features)                   the state that depth 0 reads
        enter(state, embeds, depth)      what the first layer reads, and the token embeddings beside it
        leave(state), read_out(state)    what the next depth reads of the last layer's output, and what the head does of that
    """

    def finish(self, layers: int) -> None:
        """The rest of a kind's `__init__`. layers: those with a cache of their own."""
        config = self.config
        self.feature_layers = tuple(config.feature_layers)
        self.register_buffer("kept_ids", torch.arange(config.draft_vocab_size))
        self.rotary = Rotary(config.head_dim, config.rope_parameters)
        self.cache_shape = CacheShape(layers, config.num_key_value_heads, config.head_dim, config.sliding_window)
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def decoder_layers(self) -> list[Any]:
        raise NotImplementedError

    @property
    def head_weight(self) -> Tensor:
        """[d, h]."""
        return self.lm_head.weight

    def layers_at(self, depth: int) -> list[Any]:
        return self.decoder_layers

    def pack(self) -> None:
        """Readies the drafter for inference on a CPU in float32; elsewhere linear layers and norms as far as served."""
        weight = next(self.parameters())
        if cpu_kernels() is not None and weight.dtype == torch.float32 and weight.device.type == "cpu":
            for layer in self.decoder_layers:
                layer.pack(self.rotary.width)
            natives, weights = [layer.native for layer in self.decoder_layers], self.draft_weights()
            if weights is not None and None not in natives and self.config.head_dim % 16 == 0:
                self.draft_step = DraftStep(natives, weights)
        super().pack()

    def draft_weights(self) -> DraftWeights | None:
        """What surrounds the layers, of a kind whose depths are all one `DraftStep`."""
        return None

    # -- the one forward ----------------------------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """[t, f * target h] target features -> [t, h], the state that depth 0 reads."""
        raise NotImplementedError

    def enter(self, state: Tensor, embeds: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """state [t, h], embeds [t, target h] -> what the first layer reads: a state [t, h], and embeddings if it takes them."""
        raise NotImplementedError

    def leave(self, state: Tensor) -> Tensor:
        return state

    def read_out(self, state: Tensor) -> Tensor:
        """What the head reads of a step's output."""
        return state

    def logits(self, state: Tensor) -> Tensor:
        """[t, h] outputs of steps -> [t, d] over the drafter's vocabulary."""
        return self.lm_head(self.read_out(state))

    def step(
        self,
        state: Tensor,
        embeds: Tensor,
        positions: Tensor,
        attends: Sequence[Attend],
        queries: Tensor | None = None,
        depth: int = 0,
    ) -> Tensor:
        """One depth for t tokens.

        Args:
            state: [t, h]: fused features at depth 0, the previous depth's output below.
            embeds: [t, target h], of the tokens read; positions: [t] int64.
            attends: per layer, which keys each query sees. queries: rows that need an output (all if None).
            depth: which one, for kinds that have layers of their own for each.

        Returns:
            [t or queries, h], what the next depth reads.
        """
        cos, sin = self.rotary.tables(positions, state.dtype)
        layers = self.layers_at(depth)
        state, read = self.enter(state, embeds.to(state.dtype), depth)
        for layer, attend in zip(layers, attends, strict=True):
            state = layer(state, read, cos, sin, attend, queries if layer is layers[-1] else None)
            read = None
        return self.leave(state)

    # -- training half ------------------------------------------------------------------------------------------

    @property
    def token_weight(self) -> float:
        """Of the divergence beside what `other_loss` adds."""
        return 1.0

    def first_state(self, features: Tensor, batch: Batch) -> Tensor:
        """As `fuse`, for the features [t, f * target h] of a training batch's anchors."""
        return self.fuse(features)

    def next_inputs(self, state: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """What depths after the first read: the previous output [t, h] and the tokens' embeddings [t, target h]."""
        return state, embeds

    def other_loss(self, state: Tensor, rows: TargetRows, at: Tensor, weight: Tensor) -> Tensor | float:
        """What a kind learns beside the divergence: from outputs [t, h], rows `at` [t] of the target, weights [t]."""
        return 0.0

    def forward(
        self,
        batch: Batch,
        embeds: Tensor,
        output: TargetOutput,
        rows: TargetRows,
        row_of: Tensor,
        count: Tensor | float,
        measure: bool = True,
    ) -> StepOutput:
        """`ttt_steps` depths, all in one graph.

        Args:
            batch: [b, s] tokens and masks; embeds: [b, s, h] of its tokens; output: the target's features.
            rows: the target's distributions; row_of: [b, s] int64, the row of each position (-1 where none is needed).
            count: anchors in the whole optimizer step, over all ranks and accumulation steps.
            measure: also return metrics.

        Returns:
            Loss (depth-weighted, divided by count) and per-depth sums: count, loss, alpha, agree; each [ttt_steps].
        """
        config = self.config
        b, s = batch.input_ids.shape
        share = config.depth_share if self.training else 1.0
        asking = anchors_by_depth(batch.response_mask, config.ttt_steps, share)  # k -> flat positions, nested
        valid, place = batch.anchors()
        own = [torch.searchsorted(valid, anchors) for anchors in asking]  # the same among the first-depth tokens
        embeds = embeds.reshape(b * s, -1)
        state = self.first_state(output.features.reshape(b * s, -1)[valid], batch)
        decay = config.depth_decay ** torch.arange(config.ttt_steps, dtype=torch.float32, device=embeds.device)
        decay = decay / decay.sum()

        begin = torch.arange(len(valid), device=valid.device) - place
        attentions = [PathAttention(begin, config.sliding_window) for _ in range(self.cache_shape.layers)]
        losses: list[Tensor] = []
        outs = []
        for k, anchors in enumerate(asking):
            if k == 0:
                state = self._depth(state, embeds[valid + 1], place, attentions, own[0], 0)
            else:
                if len(own[k]) < len(own[k - 1]):  # anchors are nested: keep those of the previous depth that go on
                    state = state[torch.searchsorted(own[k - 1], own[k])]
                state, read = self.next_inputs(state, embeds[anchors + 1 + k])
                state = self._depth(state, read, place[own[k]] + k, attentions, own[k], k)
            weight = (decay[k] / (count * (share if k else 1.0))).expand(len(anchors))
            at = row_of.flatten()[anchors + 1 + k]
            read = self.read_out(state)
            out = linear_divergence(
                read, self.head_weight, rows, at, weight * self.token_weight, config.loss, measure=measure
            )
            losses.append(out.loss + self.other_loss(state, rows, at, weight))
            outs.append(out)
        return StepOutput(torch.stack(losses).sum(), sums_by_depth(outs))

    def _depth(
        self,
        state: Tensor,
        embeds: Tensor,
        positions: Tensor,
        attentions: Sequence[PathAttention],
        own: Tensor,
        depth: int,
    ) -> Tensor:
        """One depth of training-time test, whose layers then remember its keys; recomputed in backward if so asked.

        Args:
            state, embeds, positions: of the tokens at this depth; attentions: of each layer.
            own: [tq] int64 first-depth tokens that anchors are. At depth 0 all first-depth tokens give keys, not just those.
        """
        queries, everything = (None, own) if depth else (own, torch.arange(len(state), device=own.device))
        asking = [*[everything] * (len(attentions) - 1), own]
        fresh: list[list[Tensor]] = [[] for _ in attentions]
        attends = [attention.attend(who, new) for attention, who, new in zip(attentions, asking, fresh, strict=True)]

        def run(state: Tensor, embeds: Tensor) -> tuple[Tensor, ...]:
            out = self.step(state, embeds, positions, attends, queries, depth)
            return out, *(tensor for pair in fresh for tensor in pair)

        if self.gradient_checkpointing and self.training:
            out, *cached = self._gradient_checkpointing_func(run, state, embeds)
        else:
            out, *cached = run(state, embeds)
        for attention, key, value in zip(attentions, cached[::2], cached[1::2], strict=True):
            attention.remember(own, key, value)
        return out
