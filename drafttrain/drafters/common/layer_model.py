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
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drafttrain.batch import (
    Attend,
    Batch,
    Part,
    StepOutput,
    TokenTree,
    anchors_by_depth,
    sums_by_depth,
)
from drafttrain.drafters.base import Samplers, Specs, StepInputs, Tensors
from drafttrain.drafters.common.layer_session import (
    LayerSession,
    cat,
    grow_by_kernel,
    read_by_kernel,
    tables_of,
)
from drafttrain.drafters.common.layers import DraftLayer, moved
from drafttrain.drafters.common.static_draft import DraftPlaces, SlotAttention
from drafttrain.drafters.common.tensor_growth import Ask
from drafttrain.drafters.common.trainable import DecoderDrafter
from drafttrain.drafters.common.tree_growth import (
    GrowingTree,
    Likeliest,
    Logits,
    grow_trees,
    rows_of,
    widest,
)
from drafttrain.losses import SharedHead, TargetRows, linear_divergence
from drafttrain.ops.cpu_draft import DraftHead, DraftStep, DraftWeights, kernel_of, plan_of
from drafttrain.ops.packing import SKINNY_ROWS, PackedLinear, without_grad
from drafttrain.ops.path_attention import PathAttention
from drafttrain.ops.tree_attention import TreeLayout

Layouts = Sequence[TreeLayout]


class Split(NamedTuple):
    """A depth's tokens and anchors among the processes that share the rows: flat positions [t] and
    [tq], of all of them.
    """

    part: Part
    tokens: Tensor
    anchors: Tensor


Sessions = Sequence[LayerSession]


class LayerDrafter(DecoderDrafter):
    """A drafter of decoder layers. The embedding is the target's, frozen and never saved.

    A kind creates its layers and projections, calls `finish` at the end of `__init__`, and
    implements:

        decoder_layers, head             all layers (default: `layers`); layers_at: those of a depth, if depths differ
        fuse(features)                   the state that depth 0 reads
        enter(state, embeds, depth)      input of the first layer: a state, and token embeddings if it reads them
        leave(state), read_out(state)    input of the next depth, and of the head, from the last layer's output
    """

    static = True
    lm_head: nn.Linear
    draft_steps: tuple[
        DraftStep, ...
    ] = ()  # CPU kernels that compute `step` and `read_out`, of each depth that differs

    @property
    def head(self) -> nn.Linear | PackedLinear:
        """The linear layer over the drafter's vocabulary."""
        return self.lm_head

    @property
    def head_weight(self) -> Tensor:
        """[d, h]."""
        return self.head.weight

    @property
    def sequence_reach(self) -> int:
        return self.config.ttt_steps

    def layers_at(self, depth: int) -> list[DraftLayer]:
        return self.decoder_layers

    def pack_depths(self) -> None:
        weights = [self.draft_weights(depth) for depth in range(self.own_depths)]
        made = [
            kernel_of([layer.native for layer in self.layers_at(depth)], own)
            for depth, own in enumerate(weights)
        ]
        steps = tuple(step for step in made if step is not None)
        if len(steps) == len(made):
            self.draft_steps = steps
        else:
            self.draft_steps = ()

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

    def enter(self, state: Tensor, embeds: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """state [t, h], embeds [t, target h] -> input of the first layer: a state [t, h], and
        embeddings if it reads them.
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

    def predict(
        self,
        sessions: Sessions,
        sizes: Sequence[int],
        reads: Tensor,
        width: int | None,
    ) -> list[Logits]:
        """Logits of the children of each session's nodes.

        Args:
            sizes: nodes of each session. reads: [n, h] outputs of `read_out` at all nodes.
            width: top tokens that are enough, if a kernel finds them and no tokens joined; None:
                all are needed.
        """
        texts = [session.text for session in sessions]
        ends = [0, *accumulate(sizes)]
        if width is not None and self.packed and not any(texts):
            head = DraftHead.of(self.head)
        else:
            head = None
        if head is None or width is None:
            top = None
        else:
            top = head.top(reads, min(width, head.vocabulary))
        logits = self.score(reads) if top is None else Likeliest(*top[:2])
        parts = [rows_of(logits, slice(begin, end)) for begin, end in pairwise(ends)]
        each = zip(texts, parts, split(reads, sizes), strict=True)
        return [
            text.shape(own, read) if text and isinstance(own, Tensor) else own
            for text, own, read in each
        ]

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
        cos, sin = self.rotary.tables(positions, state.dtype)  # [t, 1, r] each
        layers = self.layers_at(depth)
        state, read = self.enter(state, embeds.to(state.dtype), depth)
        for layer, attend in zip(layers, attends, strict=True):
            state = layer(state, read, cos, sin, attend, queries if layer is layers[-1] else None)
            read = None
        return self.leave(state)

    # -- training half -----------------------------------------------------------------------------

    @property
    def token_weight(self) -> float:
        """Weight of the divergence in the loss."""
        return 1.0

    def first_state(self, features: Tensor, batch: Batch) -> Tensor:
        """As `fuse`, for the features [t, f * target h] of a training batch's tokens in this
        process's part.
        """
        return self.fuse(features)

    def next_inputs(self, state: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of depths after the first: the previous output [t, h] and the tokens' embeddings
        [t, target h].
        """
        return state, embeds

    def other_loss(
        self,
        state: Tensor,
        rows: TargetRows,
        at: Tensor,
        weight: Tensor,
    ) -> Tensor | float:
        """A kind's second loss term, from outputs [t, h], rows `at` [t] of the target and weights
        [t].
        """
        return 0.0

    def forward(self, inputs: StepInputs) -> StepOutput:
        """`ttt_steps` depths in one graph; see `Drafter.forward`. The loss weighs depth k by
        depth_decay ** k.
        """
        batch, embeds, features, rows, row_of, count, measure = inputs
        config = self.config
        share = config.depth_share if self.training else 1.0
        early = (
            self.training and self.progress < config.later_depths_from
        )  # only the first depth has anchors
        part = batch.part  # of the tokens, in a process that shares its rows; else all
        # per depth: flat [t_k], nested
        anchors = anchors_by_depth(
            batch.response_mask,
            config.ttt_steps,
            0.0 if early else share,
            part,
        )
        valid, place = batch.anchors()  # [t] flat positions, and positions in their conversations
        own = [
            torch.searchsorted(valid, each) for each in anchors
        ]  # per depth: indices into `valid` [t_k]
        held = part.of(valid)  # this process's entries of `valid`
        offset = 0
        if self.training:
            offset = self.config.position_offset
        # [t]
        if offset:
            positions = moved(place, offset, part)
        else:
            positions = place
        embeds = embeds.flatten(0, 1)  # [part, target h]
        state = self._first(features.flatten(0, 1), valid[held] - part.begin, batch)  # [part, h]
        decay = config.depth_decay ** torch.arange(
            config.ttt_steps,
            dtype=torch.float32,
            device=embeds.device,
        )
        decay = decay / (1.0 if early else decay.sum())

        begin = (
            torch.arange(len(valid), device=valid.device) - place
        )  # [t] index of each conversation's first token
        attentions = [
            PathAttention(begin, config.sliding_window) for _ in range(self.cache_shape.layers)
        ]
        head = SharedHead(self.head_weight)
        losses: list[Tensor] = []
        outs = []
        before = valid[:0]  # this process's anchors of the depth before
        for k, every in enumerate(anchors):
            flat = every[part.of(every)]  # [t_k] of this process; below, all its
            if k == 0:
                read = embeds[valid[held] + 1 - part.begin]
                state = self._depth(
                    state,
                    read,
                    positions[held],
                    attentions,
                    own[0],
                    Split(part, valid, every),
                    0,
                )
            else:
                if len(flat) < len(
                    before
                ):  # anchors are nested: drop those that depth k does not train
                    state = state[torch.searchsorted(before, flat)]
                state, read = self.next_inputs(state, embeds[flat + 1 + k - part.begin])
                places = positions[torch.searchsorted(valid, flat)] + k
                state = self._depth(
                    state,
                    read,
                    places,
                    attentions,
                    own[k],
                    Split(part, every, every),
                    k,
                )  # [t_k, h]
            before = flat
            weight = (decay[k] / (count * (share if k else 1.0))).expand(len(flat))  # [t_k] float32
            at = row_of.flatten()[flat + 1 + k]  # [t_k] rows of the target's distributions
            read = self.read_out(state)
            scaled = weight * self.token_weight
            out = linear_divergence(read, head, rows, at, scaled, config.loss, measure=measure)
            losses.append(out.loss + self.other_loss(state, rows, at, weight))
            outs.append(out)
        return StepOutput(torch.stack(losses).sum() + head.term(), sums_by_depth(outs))

    def _first(self, features: Tensor, at: Tensor, batch: Batch) -> Tensor:
        """`first_state` of the features at indices `at`, whose copy and whose weights' copies are
        not kept with checkpointing.
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
        """One depth of training-time test; stores its keys in `attentions`. Backward computes
        layers again with checkpointing.

        Args:
            state, embeds, positions: of this process's tokens at this depth. attentions: one per
                layer.
            own: [tq] int64 indices of the anchors among the first-depth tokens, of all processes
                that share the rows. At depth 0 every first-depth token has a key, and the layers
                below the last compute all of them.
            split: which of the tokens and anchors are this process's.
        """
        part, tokens, anchors = split
        queries = everything = None
        if depth == 0:
            queries = torch.searchsorted(tokens[part.of(tokens)], anchors[part.of(anchors)])
            everything = torch.arange(len(tokens), device=own.device)
        # of each process
        keys = part.counts(tokens)
        counts = part.counts(anchors)
        fresh: list[list[Tensor]] = [
            [] for _ in attentions
        ]  # per layer: this depth's keys and values
        attends = []
        for attention, new in zip(attentions, fresh, strict=True):
            last = attention is attentions[-1] or everything is None
            attend = attention.attend(own if last else everything, new)  # type: ignore[arg-type]
            attends.append(part.attend(attend, counts if last else keys, keys))

        def run(state: Tensor, embeds: Tensor) -> tuple[Tensor, ...]:
            out = self.step(state, embeds, positions, attends, queries, depth)
            return out, *(tensor for pair in fresh for tensor in pair)

        ours = all(
            isinstance(layer, DraftLayer) for layer in self.layers_at(depth)
        )  # each is computed again by itself
        if self.gradient_checkpointing and self.training and not ours:
            out, *cached = self._gradient_checkpointing_func(run, state, embeds)
        else:
            out, *cached = run(state, embeds)
        for attention, key, value in zip(attentions, cached[::2], cached[1::2], strict=True):
            attention.remember(own, key, value)
        return out

    # -- proposal half -----------------------------------------------------------------------------

    def start(self, prompt_ids: Tensor, max_length: int) -> LayerSession:
        return LayerSession(self, self.cache_shape, max_length, self.open_text())

    def read_static(
        self,
        ids: Tensor,
        features: Tensor,
        positions: Tensor,
        context: SlotAttention,
        ends: Tensor,
    ) -> Tensor:
        attends = context.layers(self.cache_shape.layers, self.cache_shape.window)
        return self.step(self.fuse(features), self.embed(ids), positions, attends)[ends]

    def draft_static(self, roots: Tensor, places: DraftPlaces) -> tuple[Logits, Ask]:
        states = roots[:, None]  # [R, 1, h] of the nodes that were opened last

        def ask(depth: int, tokens: Tensor, parents: Tensor) -> Logits:
            nonlocal states
            positions, context = places.open(depth, parents)
            above = states.gather(1, parents[:, :, None].expand(-1, -1, states.shape[2])).flatten(
                0, 1
            )
            attends = context.layers(self.cache_shape.layers, self.cache_shape.window)
            embeds = self.embed(self.kept_ids[tokens.flatten()])
            states = self.step(above, embeds, positions, attends, None, depth).unflatten(
                0, tokens.shape
            )
            return self.logits(states.flatten(0, 1)).unflatten(0, tokens.shape)

        return self.logits(roots)[:, None], ask

    @without_grad
    def extend_all(self, sessions: Sessions, tokens: Tensors, features: Tensors) -> None:
        """One step over the new tokens of all sessions; only each last token needs an output, the
        root of the next tree.
        """
        if (steps := sessions[0].steps) is not None and steps.read(sessions, tokens, features):
            return
        roots, reads = read_by_kernel(self, sessions, tokens, features) or self._read(
            sessions,
            tokens,
            features,
        )
        for row, (session, own) in enumerate(zip(sessions, tokens, strict=True)):
            session.root, session.read = roots[row : row + 1], reads[row : row + 1]
            session.length += own.shape[0]
            session.trim()
            if session.text is not None:
                session.text.read(own.tolist())

    def _read(
        self,
        sessions: Sessions,
        tokens: Tensors,
        features: Tensors,
    ) -> tuple[Tensor, Tensor]:
        """Outputs of `step` and of `read_out` at each session's last token, [sessions, h]."""
        new = [
            TreeLayout(session.length, count=len(own))
            for session, own in zip(sessions, tokens, strict=True)
        ]
        inputs = self.fuse(cat(features)), self.embed(cat(tokens))  # [t, h], [t, target h]
        made = self.kernel_step(sessions, new, *inputs)
        if made is not None:
            ends = torch.tensor([end - 1 for end in accumulate(layout.count for layout in new)])
            return made[0][ends], made[1][ends]
        roots = self.packed_step(sessions, new, *inputs, ends=True)
        return roots, self.read_out(roots)

    @without_grad
    def propose_all(self, sessions: Sessions, specs: Specs, samplers: Samplers) -> list[TokenTree]:
        """One step per depth over the nodes that any of the trees opens."""
        steps = sessions[0].steps
        if steps is not None and (static := steps.propose(sessions, specs, samplers)) is not None:
            return static
        reads = cat(
            [
                self.read_out(session.root) if session.read is None else session.read
                for session in sessions
            ]
        )
        grown = grow_by_kernel(self, sessions, specs, reads)
        if grown is not None:
            return grown
        width = widest(specs)
        first = self.predict(sessions, [1] * len(sessions), reads, width)
        trees = [
            GrowingTree(
                spec,
                rows_of(first[row], 0),
                session.ids,
                sampler,
                row=row,
                states=session.root,
            )
            for row, (session, spec, sampler) in enumerate(
                zip(sessions, specs, samplers, strict=True)
            )
        ]

        def step(growing: list[GrowingTree], depth: int) -> Sequence[Logits]:
            own = [sessions[tree.row] for tree in growing]
            sizes = [len(tree.parents) for tree in growing]
            # The root is the last committed token; nodes stand behind it in the order they were
            # opened.
            layouts = [
                TreeLayout(session.length - 1, tree.opened, held=1 + len(tree.opened) - size)
                for session, tree, size in zip(own, growing, sizes, strict=True)
            ]
            states = cat([tree.parent_states() for tree in growing])  # [n, h]
            embeds = self.embed(cat([tree.target_ids for tree in growing]))  # [n, target h]
            made = self.kernel_step(own, layouts, states, embeds, depth)
            if made:
                out = made[0]
            else:
                out = self.packed_step(own, layouts, states, embeds, depth)
            for tree, state in zip(growing, split(out, sizes), strict=True):
                tree.states = state
            return self.predict(own, sizes, made[1] if made else self.read_out(out), width)

        return grow_trees(trees, step)

    def packed_step(
        self,
        sessions: Sessions,
        layouts: Layouts,
        states: Tensor,
        embeds: Tensor,
        depth: int = 0,
        ends: bool = False,
    ) -> Tensor:
        """`step` over the new tokens of all sessions, [n, h]; ends: only each last token needs an
        output, [sessions, h].
        """
        sizes = [layout.count for layout in layouts]
        places = [
            layout.positions()[0] + session.dropped
            for session, layout in zip(sessions, layouts, strict=True)
        ]
        positions = cat(places).to(states.device)
        # lower layers compute every token
        top = layouts
        queries = None
        if ends:
            top = [TreeLayout(layout.prefix_len + layout.count - 1, count=1) for layout in layouts]
            queries = torch.tensor([end - 1 for end in accumulate(sizes)]).to(
                states.device
            )  # [sessions]
        attends = []
        for layer in range(self.cache_shape.layers):
            if layer == self.cache_shape.layers - 1:
                seen = top
            else:
                seen = layouts
            own = [
                partial(session.attend, layer, layout)
                for session, layout in zip(sessions, seen, strict=True)
            ]
            attends.append(attend_packed(own, [layout.count for layout in seen], sizes))
        return self.step(states, embeds, positions, attends, queries, depth)

    def kernel_step(
        self,
        sessions: Sessions,
        layouts: Layouts,
        states: Tensor,
        embeds: Tensor,
        depth: int = 0,
    ) -> tuple[Tensor, Tensor] | None:
        """`step` and `read_out` of all new tokens by the CPU kernel, [n, h] each; None where it
        does not apply.
        """
        if not self.draft_steps or len(states) > SKINNY_ROWS:
            return None
        plan = plan_of(layouts)
        if plan is None:
            tables = None
        else:
            tables = tables_of(self.rotary, sessions, plan.positions)
        if plan is None or tables is None:
            return None
        stores = [
            session.store_of(end, states) for session, end in zip(sessions, plan.ends, strict=True)
        ]
        inputs = embeds.to(states.dtype).contiguous(), states.contiguous()
        return self._step_at(depth).run(*inputs, tables, stores, plan, self.cache_shape.window)

    def _step_at(self, depth: int) -> DraftStep:
        return self.draft_steps[min(depth, len(self.draft_steps) - 1)]


def split(packed: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Unpacks what `cat` packed; no call for a single session."""
    if len(sizes) == 1:
        return [packed]
    return packed.split(sizes)


def attend_packed(attends: Sequence[Attend], queries: Sequence[int], keys: Sequence[int]) -> Attend:
    """Attention of packed tokens, each session's by its own function; queries, keys: numbers of
    them per session.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(
            attends,
            split(query, queries),
            split(key, keys),
            split(value, keys),
            strict=True,
        )
        return cat([own(*part) for own, *part in parts])

    return attend
