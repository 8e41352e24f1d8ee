"""Drafters made of decoder layers that read their own output at the next depth.

    anchor t, depth 0:   state = fuse(features_t)          token x_{t+1}        predicts x_{t+2}
    anchor t, depth k:   state = own output at depth k-1   token x_{t+1+k}      predicts x_{t+2+k}

A query at (t, k) sees the depth-0 keys of anchors 0..t and its own keys at depths 1..k. Its rotary
position is t + k. Training (training-time test, arXiv 2503.01840) and decoding both call
`LayerDrafter.step`, so the decoder computes what was trained: depth-0 keys come from true target
features of committed tokens, deeper keys belong to the drafted path. In each round `extend` writes
the keys of committed tokens over those that were drafted, and `propose` stores those of the new
tree behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafttrain.batch import (
    Attend,
    Batch,
    Part,
    StepOutput,
    TokenTree,
    anchors_by_depth,
)
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.common.layers import DraftLayer, moved
from drafttrain.drafters.common.rows import (
    Ask,
    Children,
    DraftPass,
    HostPlaces,
    Nodes,
    Places,
    Sessions,
    top_or_all,
    tree_shape,
)
from drafttrain.drafters.common.trainable import DecoderDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.losses import SharedHead, TargetRows, linear_divergence, sums_by_depth
from drafttrain.ops.cpu_draft import OPENED, DraftHead, DraftStep, DraftWeights, kernel_of
from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.path_attention import PathAttention
from drafttrain.target import Target


class Split(NamedTuple):
    """A depth's tokens and anchors, of all processes that share the rows."""

    part: Part  # this process's part of the rows
    tokens: Tensor  # [t] int64 flat positions
    anchors: Tensor  # [tq] int64 flat positions


class LayerDrafter(DecoderDrafter):
    """A drafter of decoder layers. The embedding is the target's, frozen and never saved.

    A kind creates its layers and projections, calls `finish` at the end of `__init__`, and
    implements:

        decoder_layers                   all layers (default: `layers`); layers_at: those of a depth, if depths differ
        fuse(features)                   the state that depth 0 reads
        enter(state, embeds, depth)      input of the first layer: a state, and token embeddings if it reads them
        leave(state), read_out(state)    input of the next depth, and of the head, from the last layer's output
    """

    static = True
    # CPU kernels of `step` and `read_out`, one per depth with layers of its own; empty: none apply
    draft_steps: tuple[DraftStep, ...] = ()
    # Entries of the features that hold the target's layer 0, which stands for the token's embedding
    # at an image's placeholders; None: the placeholder's own embedding does
    image_part: slice | None = None
    placeholder = -1  # set by `bind`

    @property
    def sequence_reach(self) -> int:
        return self.config.ttt_steps

    def layers_at(self, depth: int) -> list[DraftLayer]:
        return self.decoder_layers

    def pack_depths(self) -> None:
        self.draft_steps = ()
        steps = []
        for depth in range(self.own_depths):
            layers = [layer.native for layer in self.layers_at(depth)]
            weights = self.draft_weights(depth)
            step = kernel_of(layers, weights, self.rotary.tables, min(self.windows))
            if step is None:  # the kernels serve all depths or none
                return
            steps.append(step)
        self.draft_steps = tuple(steps)

    def bind(self, target: Target) -> None:
        super().bind(target)
        if self.image_part is not None:
            self.placeholder = target.require_sight().placeholder

    @property
    def own_depths(self) -> int:
        """Number of depths that have weights of their own; deeper ones use the last."""
        return 1

    def draft_weights(self, depth: int) -> DraftWeights | None:
        """Weights around a depth's layers; None for forms that the kernels lack."""
        return None

    # -- forward pass, shared by training and decoding ---------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """[t, f * target h] target features -> [t, h], the state that depth 0 reads."""
        raise NotImplementedError

    def with_images(self, ids: Tensor, embeds: Tensor, features: Tensor) -> Tensor:
        """The embeddings [t, target h] of tokens, with those of images at their placeholders.

        ids: [t]. features: [t, f * target h] of the tokens themselves.
        """
        if self.image_part is None:
            return embeds
        shown = (ids == self.placeholder)[:, None]
        return torch.where(shown, features[:, self.image_part].to(embeds.dtype), embeds)

    def enter(
        self,
        state: Tensor,
        embeds: Tensor,
        depth: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the first layer's input: a state [t, h], and embeddings if it reads them.

        state: [t, h]. embeds: [t, target h].
        """
        raise NotImplementedError

    def leave(self, state: Tensor) -> Tensor:
        """[t, h] output of the last layer -> [t, h], the state that the next depth reads."""
        return state

    def read_out(self, state: Tensor) -> Tensor:
        """[t, h] output of `step` -> [t, h], input of the head."""
        return state

    def logits(self, state: Tensor) -> Tensor:
        """[t, h] output of `step` -> [t, d] over the drafter's vocabulary."""
        return self.score(self.read_out(state))

    def score(self, read: Tensor) -> Tensor:
        """[t, h] output of `read_out` -> [t, d]."""
        return self.head(read.to(self.head.weight.dtype))

    def predict(self, reads: Tensor, width: int | None) -> Children:
        """What the children of nodes are drafted from.

        Args:
            reads: [n, h] outputs of `read_out`. width: top tokens that are enough, if a kernel
                finds them; None: all are needed.
        """
        return top_or_all(self.head, reads, width, self.score)

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
            attends: per layer, attention over the keys that each query sees. queries: rows that
                need an output; None: all.
            depth: for kinds whose depths have layers of their own.

        Returns:
            [t or queries, h], the state that the next depth reads.
        """
        tables = self.rotary.tables(positions, state.dtype)
        layers = self.layers_at(depth)
        state, read = self.enter(state, embeds.to(state.dtype), depth)
        for layer, attend in zip(layers, attends, strict=True):
            # Lower layers compute every token, since the last one attends to all of them.
            wanted = queries if layer is layers[-1] else None
            state = layer(
                state,
                read,
                tables,
                attend,
                wanted,
            )  # [t or queries, h]
            read = None  # only the first layer reads embeddings
        return self.leave(state)

    # -- training half -----------------------------------------------------------------------------

    @property
    def token_weight(self) -> float:
        """Weight of the divergence in the loss."""
        return 1.0

    def first_state(self, features: Tensor, batch: Batch) -> Tensor:
        """As `fuse`, in training.

        features: [t, f * target h] of the batch's tokens in this process's part.
        """
        return self.fuse(features)

    def next_inputs(self, state: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of depths after the first.

        state: [t, h] output of the depth before. embeds: [t, target h] of the tokens read.
        """
        return state, embeds

    def other_loss(
        self,
        state: Tensor,
        rows: TargetRows,
        at: Tensor,
        weight: Tensor,
    ) -> Tensor | float:
        """A kind's second loss term.

        Args:
            state: [t, h] outputs of `step`. rows, at: the target's distributions, and the row [t]
                of each output. weight: [t] float32, of each output in the loss.
        """
        return 0.0

    @property
    def later_depths_from(self) -> float:
        return self.config.later_depths_from

    def forward(self, inputs: StepInputs) -> StepOutput:
        """Computes `ttt_steps` depths in one graph; see `Drafter.forward`.

        The loss weighs depth k by depth_decay ** k.
        """
        config = self.config
        batch = inputs.batch
        part = batch.part  # of the tokens, in a process that shares its rows; else all

        # The anchors of each depth. Early in training, only the first depth has any.
        early = self.training and self.progress < config.later_depths_from
        share = 1.0
        if self.training:
            share = config.depth_share
        drawn = 0.0 if early else share
        # per depth: [t_k] int64 flat positions, nested
        anchors = anchors_by_depth(batch.response_mask, config.ttt_steps, drawn, part)
        valid, place = batch.anchors()  # [t] flat positions, and positions in their conversations
        own = [torch.searchsorted(valid, each) for each in anchors]  # indices into `valid`
        held = part.of(valid)  # this process's entries of `valid`

        # Inputs of the first depth.
        positions = place  # [t] int64 rotary positions
        if self.training and config.position_offset:
            positions = moved(place, config.position_offset, part)
        embeds = inputs.embeds.flatten(0, 1)  # [part, target h]
        features = inputs.features.flatten(0, 1)  # [part, f * target h]
        embeds = self.with_images(batch.input_ids.flatten(), embeds, features)
        state = self._first(features, valid[held] - part.begin, batch)  # [part, h]

        # Weights of the depths, which sum to 1. An early first depth has its weight alone.
        depths = torch.arange(config.ttt_steps, dtype=torch.float32, device=embeds.device)
        decay = config.depth_decay**depths  # [ttt_steps] float32
        if not early:
            decay = decay / decay.sum()

        # [t] index of each conversation's first token
        begin = torch.arange(len(valid), device=valid.device) - place
        attentions = []
        for _ in self.windows:
            attentions.append(PathAttention(begin, config.sliding_window))
        head = SharedHead(self.head.weight)
        losses = []
        outs = []
        before = valid[:0]  # this process's anchors of the depth before
        for k, every in enumerate(anchors):
            flat = every[part.of(every)]  # [t_k] anchors of this process
            if k == 0:
                # Every token has a first-depth key, also those that are no anchors.
                read = embeds[valid[held] + 1 - part.begin]  # [part, target h]
                places = positions[held]
                split = Split(part, valid, every)
            else:
                # Anchors are nested: drop those that depth k does not train.
                if len(flat) < len(before):
                    state = state[torch.searchsorted(before, flat)]
                state, read = self.next_inputs(state, embeds[flat + 1 + k - part.begin])
                places = positions[torch.searchsorted(valid, flat)] + k
                split = Split(part, every, every)
            state = self._depth(
                state,
                read,
                places,
                attentions,
                own[k],
                split,
                k,
            )  # [t_k, h]
            before = flat

            # The loss of this depth. Fewer anchors at later depths keep their weight in
            # expectation.
            trained = share if k else 1.0
            weight = (decay[k] / (inputs.total * trained)).expand(len(flat))  # [t_k] float32
            at = inputs.row_of.flatten()[flat + 1 + k]  # [t_k] rows of the target's distributions
            out = linear_divergence(
                self.read_out(state),
                head,
                inputs.rows,
                at,
                weight * self.token_weight,
                config.loss,
                measure=inputs.measure,
            )
            losses.append(out.loss + self.other_loss(state, inputs.rows, at, weight))
            outs.append(out)
        return StepOutput(torch.stack(losses).sum() + head.term(), sums_by_depth(outs))

    def _first(self, features: Tensor, at: Tensor, batch: Batch) -> Tensor:
        """`first_state` of the features at indices `at`.

        With checkpointing, neither the copy of the features nor autocast's copies of the weights
        are kept for backward.
        """
        if not (self.gradient_checkpointing and self.training):
            return self.first_state(features[at], batch)
        kind = features.device.type
        on = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, dtype, on, cache_enabled=False):
            out: Tensor = self._gradient_checkpointing_func(
                lambda x: self.first_state(x[at], batch), features
            )
        return out

    def _depth(
        self,
        state: Tensor,
        embeds: Tensor,
        positions: Tensor,
        attentions: list[PathAttention],
        own: Tensor,
        split: Split,
        depth: int,
    ) -> Tensor:
        """Computes one depth of training-time test, and stores its keys in `attentions`.

        Args:
            state, embeds, positions: of this process's tokens at this depth. attentions: one per
                layer.
            own: [tq] int64 indices of the anchors among the first-depth tokens, of all processes
                that share the rows. At depth 0 every first-depth token has a key, and the layers
                below the last compute all of them.
            split: which of the tokens and anchors are this process's.
        """
        part = split.part
        tokens = split.tokens
        anchors = split.anchors
        queries = None
        everything = own  # [t] indices of the tokens that layers below the last compute
        if depth == 0:
            queries = torch.searchsorted(tokens[part.of(tokens)], anchors[part.of(anchors)])
            everything = torch.arange(len(tokens), device=own.device)

        # How many tokens and anchors each process has.
        keys = part.counts(tokens)
        counts = part.counts(anchors)
        fresh: list[list[Tensor]] = []  # per layer: this depth's keys and values
        attends = []
        for attention in attentions:
            new: list[Tensor] = []
            if attention is attentions[-1]:
                attend = part.attend(attention.attend(own, new), counts, keys)
            else:
                attend = part.attend(attention.attend(everything, new), keys, keys)
            fresh.append(new)
            attends.append(attend)

        def run(state: Tensor, embeds: Tensor) -> tuple[Tensor, ...]:
            made = [self.step(state, embeds, positions, attends, queries, depth)]
            # `step` has filled `fresh`. A checkpointed function must return what others read.
            for pair in fresh:
                made += pair
            return tuple(made)

        # Our own layers checkpoint themselves.
        ours = all(isinstance(layer, DraftLayer) for layer in self.layers_at(depth))
        if self.gradient_checkpointing and self.training and not ours:
            made = self._gradient_checkpointing_func(run, state, embeds)
        else:
            made = run(state, embeds)
        # made: the output, then key and value of each layer
        for attention, key, value in zip(attentions, made[1::2], made[2::2], strict=True):
            attention.remember(own, key, value)
        return made[0]

    # -- proposal half -----------------------------------------------------------------------------

    def advance(
        self,
        states: Tensor,
        embeds: Tensor,
        at: DraftPass,
        depth: int,
    ) -> Tensor:
        """[n, 2, h] outputs of `step` and of `read_out`, by the CPU kernel where it applies.

        Those of `at.queries` only, if there are any.
        """
        if self.draft_steps:
            step = self.draft_steps[min(depth, len(self.draft_steps) - 1)]
            placed = at.placed(step)
            if placed is not None:
                made = step.run(embeds.to(states.dtype), states, placed)
                return made if at.queries is None else made[at.queries]
        out = self.step(
            states,
            embeds,
            at.positions,
            at.attends,
            at.queries,
            depth,
        )
        return torch.stack((out, self.read_out(out)), dim=1)

    def read_committed(self, ids: Tensor, features: Tensor, at: DraftPass) -> Tensor:
        """Roots [R, 2, h]: what the next depth reads, and the head's input."""
        step = self.draft_steps[0] if self.draft_steps else None
        if step is not None and step.reads_features and self.embed_table is not None:
            placed = at.placed(step)
            if placed is not None:
                read = features.to(self.embed_table.dtype)  # [n, f*h]
                return step.read(ids, read, self.embed_table, placed)
        embeds = self.embed(ids)
        if self.image_part is not None:
            # A token's own features come with the next token, so a sequence's last token has none.
            known = ids.index_fill(0, at.ends, -1)
            embeds = self.with_images(known, embeds, features.roll(-1, dims=0))
        made = self.advance(self.fuse(features), embeds, at, 0)
        if at.queries is None:  # static passes compute every token
            return made[at.ends]
        return made

    def draft(
        self,
        roots: Tensor,
        places: Places,
        width: int | None,
    ) -> tuple[Children, Ask]:
        states, reads = roots.unbind(1)

        def ask(nodes: Nodes) -> Children:
            nonlocal states
            above = states[nodes.above()]  # [n, h]
            made = self.advance(above, self.embed(nodes.tokens()), nodes.place(), nodes.depth)
            states, reads = made.unbind(1)
            return self.predict(reads, width)

        return self.predict(reads, width), ask

    @property
    def steps_in_c(self) -> bool:
        return bool(self.draft_steps)

    def kernel_lacks(self, spec: TreeSpec) -> str:
        if not self.draft_steps or self.embed_table is None:
            if cpu_kernels() is None:
                return "no C kernels could be built"
            return "the C kernels lack its layers"
        if len(self.draft_steps) > 1:
            return "its depths have layers of their own"
        if DraftHead.of(self.head) is None:
            return "the C kernels lack its head"
        if spec.sampled:
            return "drawn tokens need all logits"
        shape = tree_shape(spec)
        if shape is None:
            return f"no C call grows {spec.shape}"
        if shape.opens > OPENED:
            return f"a C call opens {OPENED} nodes at most"
        return ""

    def grow_by_kernel(
        self,
        sessions: Sessions,
        spec: TreeSpec,
        roots: Tensor,
    ) -> list[TokenTree] | None:
        # Tokens that joined the vocabulary need all logits too.
        if self.kernel_lacks(spec) or any(session.text for session in sessions):
            return None
        head = DraftHead.of(self.head)
        shape = tree_shape(spec)
        table = self.embed_table
        assert head is not None and shape is not None and table is not None
        step = self.draft_steps[0]
        placed = HostPlaces(sessions, shape.depth).roots().placed(step, room=shape.opens - 1)
        if placed is None:
            return None
        trees = []
        for tokens, parents, scores in step.trees(head, shape, table, self.kept_ids, placed, roots):
            trees.append(TokenTree(torch.from_numpy(tokens), parents, torch.from_numpy(scores)))
        return trees
