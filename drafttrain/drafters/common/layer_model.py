"""Training half and forward pass of drafters made of decoder layers that read their own output at the next depth.

    anchor t, depth 0:   state = fuse(features_t)          token x_{t+1}        predicts x_{t+2}
    anchor t, depth k:   state = own output at depth k-1   token x_{t+1+k}      predicts x_{t+2+k}

A query at (t, k) sees the depth-0 keys of anchors 0..t and its own keys at depths 1..k. Its rotary position is t + k. Training
(training-time test, arXiv 2503.01840) and decoding (layer_session.py) both call `LayerDrafter.step`, so the decoder computes
what was trained: depth-0 keys come from true target features of committed tokens, deeper keys belong to the drafted path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from drafttrain.batch import Batch, StepOutput, anchors_by_depth, sums_by_depth
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.common.layer_session import LayerDrafting
from drafttrain.drafters.common.layers import Attend, DraftLayer
from drafttrain.losses import TargetRows, linear_divergence
from drafttrain.ops.cpu_layers import DraftStep, DraftWeights
from drafttrain.ops.path_attention import PathAttention


class LayerDrafter(LayerDrafting):
    """A drafter of decoder layers. The embedding is the target's, frozen and never saved.

    A kind creates its layers and projections, calls `finish` at the end of `__init__`, and implements:

        decoder_layers, head_weight      all layers (default: `layers`); layers_at: those of a depth, if depths differ
        fuse(features)                   the state that depth 0 reads
        enter(state, embeds, depth)      input of the first layer: a state, and token embeddings if it reads them
        leave(state), read_out(state)    input of the next depth, and of the head, from the last layer's output
    """

    lm_head: nn.Linear

    @property
    def head_weight(self) -> Tensor:
        """[d, h]."""
        return self.lm_head.weight

    def layers_at(self, depth: int) -> list[DraftLayer]:
        return self.decoder_layers

    def pack_depths(self) -> None:
        """Makes one kernel of the layers and what surrounds them, where the kind and all layers support it."""
        natives = [layer.native for layer in self.decoder_layers if layer.native is not None]
        weights, complete = self.draft_weights(), len(natives) == len(self.decoder_layers)
        if weights is not None and complete and self.config.head_dim % 16 == 0:
            self.draft_step = DraftStep(natives, weights)

    def draft_weights(self) -> DraftWeights | None:
        """Weights around the layers, for kinds whose depths are all one `DraftStep`; None for other kinds."""
        return None

    # -- forward pass, shared by training and decoding ----------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """[t, f * target h] target features -> [t, h], the state that depth 0 reads."""
        raise NotImplementedError

    def enter(self, state: Tensor, embeds: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """state [t, h], embeds [t, target h] -> input of the first layer: a state [t, h], and embeddings if it reads them."""
        raise NotImplementedError

    def leave(self, state: Tensor) -> Tensor:
        """[t, h] output of the last layer -> [t, h], the state that the next depth reads."""
        return state

    def read_out(self, state: Tensor) -> Tensor:
        """[t, h] output of `step` -> [t, h], input of the head."""
        return state

    def logits(self, state: Tensor) -> Tensor:
        """[t, h] output of `step` -> [t, d] over the drafter's vocabulary."""
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
            embeds: [t, target h] of the tokens read; positions: [t] int64.
            attends: per layer, attention over the keys that each query sees. queries: rows that need an output; None: all.
            depth: for kinds whose depths have layers of their own.

        Returns:
            [t or queries, h], the state that the next depth reads.
        """
        cos, sin = self.rotary.tables(positions, state.dtype)  # [t, 1, r] each
        layers = self.layers_at(depth)
        state, read = self.enter(state, embeds.to(state.dtype), depth)
        for layer, attend in zip(layers, attends, strict=True):
            state = layer(state, read, cos, sin, attend, queries if layer is layers[-1] else None)
            read = None
        return self.leave(state)

    # -- training half ------------------------------------------------------------------------------------------

    @property
    def token_weight(self) -> float:
        """Weight of the divergence in the loss."""
        return 1.0

    def first_state(self, features: Tensor, batch: Batch) -> Tensor:
        """As `fuse`, for the features [t, f * target h] of a training batch's anchors."""
        return self.fuse(features)

    def next_inputs(self, state: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of depths after the first: the previous output [t, h] and the tokens' embeddings [t, target h]."""
        return state, embeds

    def other_loss(self, state: Tensor, rows: TargetRows, at: Tensor, weight: Tensor) -> Tensor | float:
        """A kind's second loss term, from outputs [t, h], rows `at` [t] of the target and weights [t]."""
        return 0.0

    def forward(self, inputs: StepInputs) -> StepOutput:
        """`ttt_steps` depths in one graph; see `Drafter.forward`. The loss weighs depth k by depth_decay ** k."""
        batch, embeds, output, rows, row_of, count, measure = inputs
        config = self.config
        share = config.depth_share if self.training else 1.0
        anchors = anchors_by_depth(batch.response_mask, config.ttt_steps, share)  # per depth: flat [t_k], nested
        valid, place = batch.anchors()  # [t] flat positions, and positions in their conversations
        own = [torch.searchsorted(valid, each) for each in anchors]  # per depth: indices into `valid` [t_k]
        embeds = embeds.flatten(0, 1)  # [b*s, target h]
        state = self.first_state(output.features.flatten(0, 1)[valid], batch)  # [t, h]
        decay = config.depth_decay ** torch.arange(config.ttt_steps, dtype=torch.float32, device=embeds.device)
        decay = decay / decay.sum()

        begin = torch.arange(len(valid), device=valid.device) - place  # [t] index of each conversation's first token
        attentions = [PathAttention(begin, config.sliding_window) for _ in range(self.cache_shape.layers)]
        losses: list[Tensor] = []
        outs = []
        for k, flat in enumerate(anchors):
            if k == 0:
                state = self._depth(state, embeds[valid + 1], place, attentions, own[0], 0)  # [t_0, h]
            else:
                if len(own[k]) < len(own[k - 1]):  # anchors are nested: drop those that depth k does not train
                    state = state[torch.searchsorted(own[k - 1], own[k])]
                state, read = self.next_inputs(state, embeds[flat + 1 + k])
                state = self._depth(state, read, place[own[k]] + k, attentions, own[k], k)  # [t_k, h]
            weight = (decay[k] / (count * (share if k else 1.0))).expand(len(flat))  # [t_k] float32
            at = row_of.flatten()[flat + 1 + k]  # [t_k] rows of the target's distributions
            read, scaled = self.read_out(state), weight * self.token_weight
            out = linear_divergence(read, self.head_weight, rows, at, scaled, config.loss, measure=measure)
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
        """One depth of training-time test; stores its keys in `attentions`. Recomputed in backward with checkpointing.

        Args:
            state, embeds, positions: of the tokens at this depth. attentions: one per layer.
            own: [tq] int64 indices of the anchors among the first-depth tokens. At depth 0 every first-depth token has a
                key, and the layers below the last compute all of them.
        """
        queries, everything = (None, own) if depth else (own, torch.arange(len(state), device=own.device))
        query_index = [*[everything] * (len(attentions) - 1), own]  # per layer: first-depth indices of the queries
        fresh: list[list[Tensor]] = [[] for _ in attentions]  # per layer: this depth's keys and values
        attends = [
            attention.attend(index, new) for attention, index, new in zip(attentions, query_index, fresh, strict=True)
        ]

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
