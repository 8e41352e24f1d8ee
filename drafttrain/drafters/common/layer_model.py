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
from itertools import accumulate
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
    stores_of,
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
    """A depth's tokens and anchors, of all processes that share the rows."""

    part: Part  # this process's part of the rows
    tokens: Tensor  # [t] int64 flat positions
    anchors: Tensor  # [tq] int64 flat positions


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
    # CPU kernels of `step` and `read_out`, one per depth with layers of its own; empty: none apply
    draft_steps: tuple[DraftStep, ...] = ()

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
        self.draft_steps = ()
        steps = []
        for depth in range(self.own_depths):
            layers = [layer.native for layer in self.layers_at(depth)]
            step = kernel_of(layers, self.draft_weights(depth))
            if step is None:  # the kernels serve all depths or none
                return
            steps.append(step)
        self.draft_steps = tuple(steps)

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
        joined = any(session.text for session in sessions)  # needs all logits
        head = None
        if width is not None and self.packed and not joined:
            head = DraftHead.of(self.head)

        logits: Logits
        if head is None or width is None:
            logits = self.score(reads)  # [n, d]
        else:
            ids, log_probs, _ = head.top(reads, min(width, head.vocabulary))  # [n, width] each
            logits = Likeliest(ids, log_probs)

        each: list[Logits] = []
        begin = 0
        for session, size in zip(sessions, sizes, strict=True):
            own = rows_of(logits, slice(begin, begin + size))
            if session.text and isinstance(own, Tensor):
                own = session.text.shape(own, reads[begin : begin + size])
            each.append(own)
            begin += size
        return each

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
            # Lower layers compute every token, since the last one attends to all of them.
            wanted = queries if layer is layers[-1] else None
            state = layer(
                state,
                read,
                cos,
                sin,
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
        share = config.depth_share if self.training else 1.0
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
        state = self._first(features, valid[held] - part.begin, batch)  # [part, h]

        # Weights of the depths, which sum to 1. An early first depth has its weight alone.
        depths = torch.arange(config.ttt_steps, dtype=torch.float32, device=embeds.device)
        decay = config.depth_decay**depths  # [ttt_steps] float32
        decay = decay / (1.0 if early else decay.sum())

        # [t] index of each conversation's first token
        begin = torch.arange(len(valid), device=valid.device) - place
        attentions = []
        for _ in range(self.cache_shape.layers):
            attentions.append(PathAttention(begin, config.sliding_window))
        head = SharedHead(self.head_weight)
        losses: list[Tensor] = []
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
            made = [
                self.step(
                    state,
                    embeds,
                    positions,
                    attends,
                    queries,
                    depth,
                )
            ]
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
            index = parents[:, :, None].expand(-1, -1, states.shape[2])
            above = states.gather(1, index).flatten(0, 1)  # [R * m, h] states of the parents
            attends = context.layers(self.cache_shape.layers, self.cache_shape.window)
            embeds = self.embed(self.kept_ids[tokens.flatten()])  # [R * m, target h]
            out = self.step(
                above,
                embeds,
                positions,
                attends,
                None,
                depth,
            )  # [R * m, h]
            states = out.unflatten(0, tokens.shape)
            return self.logits(out).unflatten(0, tokens.shape)  # [R, m, d]

        return self.logits(roots)[:, None], ask

    @without_grad
    def extend_all(self, sessions: Sessions, tokens: Tensors, features: Tensors) -> None:
        """Reads the new tokens of all sessions in one step.

        Only each last token needs an output, the root of the next tree.
        """
        steps = sessions[0].steps
        if steps is not None and steps.read(sessions, tokens, features):
            return
        made = read_by_kernel(self, sessions, tokens, features)
        if made is None:
            made = self._read(sessions, tokens, features)
        roots, reads = made  # [sessions, h] each
        for row, (session, own) in enumerate(zip(sessions, tokens, strict=True)):
            session.root = roots[row : row + 1]
            session.read = reads[row : row + 1]
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
        layouts = layouts_of(sessions, tokens)
        states = self.fuse(cat(features))  # [t, h]
        embeds = self.embed(cat(tokens))  # [t, target h]
        made = self.kernel_step(sessions, layouts, states, embeds)
        if made is not None:
            ends = last_of(layouts)
            return made[0][ends], made[1][ends]
        roots = self.packed_step(sessions, layouts, states, embeds, ends=True)
        return roots, self.read_out(roots)

    @without_grad
    def propose_all(self, sessions: Sessions, specs: Specs, samplers: Samplers) -> list[TokenTree]:
        """Drafts by one step per depth, over the nodes that any of the trees opens."""
        steps = sessions[0].steps
        if steps is not None:
            static = steps.propose(sessions, specs, samplers)
            if static is not None:
                return static

        # The head's input at each root; a static read leaves the root only.
        each = []
        for session in sessions:
            read = session.read
            if read is None:
                read = self.read_out(session.root)
            each.append(read)
        reads = cat(each)  # [sessions, h]
        grown = grow_by_kernel(self, sessions, specs, reads)
        if grown is not None:
            return grown

        width = widest(specs)
        first = self.predict(sessions, [1] * len(sessions), reads, width)
        trees = []
        for row, session in enumerate(sessions):
            root = rows_of(first[row], 0)
            tree = GrowingTree(
                specs[row],
                root,
                session.ids,
                samplers[row],
                row=row,
                states=session.root,
            )
            trees.append(tree)

        def step(growing: list[GrowingTree], depth: int) -> Sequence[Logits]:
            own = []
            sizes = []
            layouts = []
            for tree in growing:
                session = sessions[tree.row]
                size = len(tree.parents)
                # The root is the last committed token; nodes stand behind it in the order they
                # were opened.
                held = 1 + len(tree.opened) - size
                own.append(session)
                sizes.append(size)
                layouts.append(TreeLayout(session.length - 1, tree.opened, held=held))
            states = cat([tree.parent_states() for tree in growing])  # [n, h]
            embeds = self.embed(cat([tree.target_ids for tree in growing]))  # [n, target h]

            made = self.kernel_step(own, layouts, states, embeds, depth)
            if made is None:
                out = self.packed_step(own, layouts, states, embeds, depth)  # [n, h]
                reads = self.read_out(out)
            else:
                out, reads = made
            for tree, state in zip(growing, split(out, sizes), strict=True):
                tree.states = state
            return self.predict(own, sizes, reads, width)

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
        """`step` over the new tokens of all sessions.

        Returns:
            [n, h]; with `ends` [sessions, h], the outputs at each session's last token only.
        """
        sizes = [layout.count for layout in layouts]
        places = []
        for session, layout in zip(sessions, layouts, strict=True):
            places.append(layout.positions()[0] + session.dropped)
        positions = cat(places).to(states.device)  # [n] int64

        top = layouts  # of the last layer; lower layers compute every token
        queries = None
        if ends:
            top = [TreeLayout(layout.prefix_len + layout.count - 1, count=1) for layout in layouts]
            queries = last_of(layouts).to(states.device)  # [sessions]

        attends = []
        for layer in range(self.cache_shape.layers):
            seen = layouts
            if layer == self.cache_shape.layers - 1:
                seen = top
            own = []
            for session, layout in zip(sessions, seen, strict=True):
                own.append(partial(session.attend, layer, layout))
            attends.append(attend_packed(own, [layout.count for layout in seen], sizes))
        return self.step(
            states,
            embeds,
            positions,
            attends,
            queries,
            depth,
        )

    def kernel_step(
        self,
        sessions: Sessions,
        layouts: Layouts,
        states: Tensor,
        embeds: Tensor,
        depth: int = 0,
    ) -> tuple[Tensor, Tensor] | None:
        """`step` and `read_out` of all new tokens by the CPU kernel.

        Returns:
            [n, h] each; None where the kernel does not apply.
        """
        if not self.draft_steps or len(states) > SKINNY_ROWS:
            return None
        # The kernel reads one plan and one pair of rotary tables, perhaps not for these sessions.
        plan = plan_of(layouts)
        if plan is None:
            return None
        tables = tables_of(self.rotary, sessions, plan.positions)  # cos, sin [., 1, r]
        if tables is None:
            return None
        stores = stores_of(sessions, plan.ends, states)
        embeds = embeds.to(states.dtype).contiguous()
        states = states.contiguous()
        window = self.cache_shape.window
        return self._step_at(depth).run(
            embeds,
            states,
            tables,
            stores,
            plan,
            window,
        )

    def _step_at(self, depth: int) -> DraftStep:
        return self.draft_steps[min(depth, len(self.draft_steps) - 1)]


def layouts_of(sessions: Sessions, tokens: Tensors) -> list[TreeLayout]:
    """Layouts of committed tokens behind each session's cache."""
    layouts = []
    for session, new in zip(sessions, tokens, strict=True):
        layouts.append(TreeLayout(session.length, count=len(new)))
    return layouts


def last_of(layouts: Layouts) -> Tensor:
    """[sessions] int64, index of each session's last token among the packed ones."""
    ends = accumulate(layout.count for layout in layouts)
    return torch.tensor([end - 1 for end in ends])


def split(packed: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Unpacks what `cat` packed; no call for a single session."""
    if len(sizes) == 1:
        return [packed]
    return packed.split(sizes)


def attend_packed(attends: Sequence[Attend], queries: Sequence[int], keys: Sequence[int]) -> Attend:
    """Attention of packed tokens, each session's by its own function.

    queries, keys: numbers of them per session.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        each = split(query, queries)
        new_keys = split(key, keys)
        values = split(value, keys)
        return cat([own(each[i], new_keys[i], values[i]) for i, own in enumerate(attends)])

    return attend
