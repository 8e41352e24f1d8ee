"""Drafters made of decoder layers that read their own output at the next depth.

    anchor t, depth 0:   state = fuse(features_t)          token x_{t+1}        predicts x_{t+2}
    anchor t, depth k:   state = own output at depth k-1   token x_{t+1+k}      predicts x_{t+2+k}

A query at (t, k) sees the depth-0 keys of anchors 0..t and its own keys at depths 1..k. Its rotary position is t + k. Training
(training-time test, arXiv 2503.01840) and decoding both call `LayerDrafter.step`, so the decoder computes what was trained:
depth-0 keys come from true target features of committed tokens, deeper keys belong to the drafted path. In each round `extend`
writes the keys of committed tokens over those that were drafted, and `propose` stores those of the new tree behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.batch import Attend, Batch, Part, StepOutput, TokenTree, anchors_by_depth, sums_by_depth
from drafttrain.drafters.base import Drafter, JointSession, Samplers, Specs, StepInputs, Tensors
from drafttrain.drafters.common.layers import CacheShape, DraftLayer, moved
from drafttrain.drafters.common.static_draft import DraftPlaces, DraftSteps, SlotAttention
from drafttrain.drafters.common.tensor_growth import Ask
from drafttrain.drafters.common.trainable import DecoderDrafter
from drafttrain.drafters.common.tree_growth import GrowingTree, Logits, grow_trees
from drafttrain.losses import SharedHead, TargetRows, linear_divergence
from drafttrain.ops.cpu_layers import DraftStep, DraftWeights
from drafttrain.ops.packing import SKINNY_ROWS
from drafttrain.ops.path_attention import PathAttention
from drafttrain.ops.tree_attention import TreeLayout, tree_attention

Layouts = Sequence[TreeLayout]
_ROOM = (
    64  # slots behind the committed positions of a window, for a round's tokens; more are added where they are needed
)


class Split(NamedTuple):
    """A depth's tokens and anchors among the processes that share the rows: flat positions [t] and [tq], of all of them."""

    part: Part
    tokens: Tensor
    anchors: Tensor


Sessions = Sequence["LayerSession"]


class LayerDrafter(DecoderDrafter):
    """A drafter of decoder layers. The embedding is the target's, frozen and never saved.

    A kind creates its layers and projections, calls `finish` at the end of `__init__`, and implements:

        decoder_layers, head_weight      all layers (default: `layers`); layers_at: those of a depth, if depths differ
        fuse(features)                   the state that depth 0 reads
        enter(state, embeds, depth)      input of the first layer: a state, and token embeddings if it reads them
        leave(state), read_out(state)    input of the next depth, and of the head, from the last layer's output
    """

    static = True
    lm_head: nn.Linear
    draft_step: DraftStep | None = None  # the CPU kernel that is `step` and `logits` in one

    @property
    def head_weight(self) -> Tensor:
        """[d, h]."""
        return self.lm_head.weight

    @property
    def sequence_reach(self) -> int:
        return self.config.ttt_steps

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
        """As `fuse`, for the features [t, f * target h] of a training batch's tokens in this process's part."""
        return self.fuse(features)

    def next_inputs(self, state: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of depths after the first: the previous output [t, h] and the tokens' embeddings [t, target h]."""
        return state, embeds

    def other_loss(self, state: Tensor, rows: TargetRows, at: Tensor, weight: Tensor) -> Tensor | float:
        """A kind's second loss term, from outputs [t, h], rows `at` [t] of the target and weights [t]."""
        return 0.0

    def forward(self, inputs: StepInputs) -> StepOutput:
        """`ttt_steps` depths in one graph; see `Drafter.forward`. The loss weighs depth k by depth_decay ** k."""
        batch, embeds, features, rows, row_of, count, measure = inputs
        config = self.config
        share = config.depth_share if self.training else 1.0
        part = batch.part  # of the tokens, in a process that shares its rows; else all
        anchors = anchors_by_depth(batch.response_mask, config.ttt_steps, share, part)  # per depth: flat [t_k], nested
        valid, place = batch.anchors()  # [t] flat positions, and positions in their conversations
        own = [torch.searchsorted(valid, each) for each in anchors]  # per depth: indices into `valid` [t_k]
        held = part.of(valid)  # this process's entries of `valid`
        offset = self.config.position_offset if self.training else 0
        positions = moved(place, offset, part) if offset else place  # [t]
        embeds = embeds.flatten(0, 1)  # [part, target h]
        state = self._first(features.flatten(0, 1), valid[held] - part.begin, batch)  # [part, h]
        decay = config.depth_decay ** torch.arange(config.ttt_steps, dtype=torch.float32, device=embeds.device)
        decay = decay / decay.sum()

        begin = torch.arange(len(valid), device=valid.device) - place  # [t] index of each conversation's first token
        attentions = [PathAttention(begin, config.sliding_window) for _ in range(self.cache_shape.layers)]
        head = SharedHead(self.head_weight)
        losses: list[Tensor] = []
        outs = []
        before = valid[:0]  # this process's anchors of the depth before
        for k, every in enumerate(anchors):
            flat = every[part.of(every)]  # [t_k] of this process; below, all its
            if k == 0:
                read = embeds[valid[held] + 1 - part.begin]
                state = self._depth(state, read, positions[held], attentions, own[0], Split(part, valid, every), 0)
            else:
                if len(flat) < len(before):  # anchors are nested: drop those that depth k does not train
                    state = state[torch.searchsorted(before, flat)]
                state, read = self.next_inputs(state, embeds[flat + 1 + k - part.begin])
                places = positions[torch.searchsorted(valid, flat)] + k
                state = self._depth(state, read, places, attentions, own[k], Split(part, every, every), k)  # [t_k, h]
            before = flat
            weight = (decay[k] / (count * (share if k else 1.0))).expand(len(flat))  # [t_k] float32
            at = row_of.flatten()[flat + 1 + k]  # [t_k] rows of the target's distributions
            read, scaled = self.read_out(state), weight * self.token_weight
            out = linear_divergence(read, head, rows, at, scaled, config.loss, measure=measure)
            losses.append(out.loss + self.other_loss(state, rows, at, weight))
            outs.append(out)
        return StepOutput(torch.stack(losses).sum() + head.term(), sums_by_depth(outs))

    def _first(self, features: Tensor, at: Tensor, batch: Batch) -> Tensor:
        """`first_state` of the features at indices `at`, whose copy and whose weights' copies are not kept with checkpointing."""
        if not (self.gradient_checkpointing and self.training):
            return self.first_state(features[at], batch)
        kind = features.device.type
        on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        with torch.autocast(kind, dtype, on, cache_enabled=False):
            out: Tensor = self._gradient_checkpointing_func(lambda x: self.first_state(x[at], batch), features)
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
        """One depth of training-time test; stores its keys in `attentions`. Backward computes layers again with checkpointing.

        Args:
            state, embeds, positions: of this process's tokens at this depth. attentions: one per layer.
            own: [tq] int64 indices of the anchors among the first-depth tokens, of all processes that share the rows. At
                depth 0 every first-depth token has a key, and the layers below the last compute all of them.
            split: which of the tokens and anchors are this process's.
        """
        part, tokens, anchors = split
        queries = everything = None
        if depth == 0:
            queries = torch.searchsorted(tokens[part.of(tokens)], anchors[part.of(anchors)])
            everything = torch.arange(len(tokens), device=own.device)
        keys, counts = part.counts(tokens), part.counts(anchors)  # of each process
        fresh: list[list[Tensor]] = [[] for _ in attentions]  # per layer: this depth's keys and values
        attends = []
        for attention, new in zip(attentions, fresh, strict=True):
            last = attention is attentions[-1] or everything is None
            attend = attention.attend(own if last else everything, new)  # type: ignore[arg-type]
            attends.append(part.attend(attend, counts if last else keys, keys))

        def run(state: Tensor, embeds: Tensor) -> tuple[Tensor, ...]:
            out = self.step(state, embeds, positions, attends, queries, depth)
            return out, *(tensor for pair in fresh for tensor in pair)

        ours = all(isinstance(layer, DraftLayer) for layer in self.layers_at(depth))  # each is computed again by itself
        if self.gradient_checkpointing and self.training and not ours:
            out, *cached = self._gradient_checkpointing_func(run, state, embeds)
        else:
            out, *cached = run(state, embeds)
        for attention, key, value in zip(attentions, cached[::2], cached[1::2], strict=True):
            attention.remember(own, key, value)
        return out

    # -- proposal half ------------------------------------------------------------------------------------------

    def start(self, prompt_ids: Tensor, max_length: int) -> LayerSession:
        return LayerSession(self, self.cache_shape, max_length)

    def read_static(
        self, ids: Tensor, features: Tensor, positions: Tensor, context: SlotAttention, ends: Tensor
    ) -> Tensor:
        attends = context.layers(self.cache_shape.layers, self.cache_shape.window)
        return self.step(self.fuse(features), self.embed(ids), positions, attends)[ends]

    def draft_static(self, roots: Tensor, places: DraftPlaces) -> tuple[Logits, Ask]:
        states = roots[:, None]  # [R, 1, h] of the nodes that were opened last

        def ask(depth: int, tokens: Tensor, parents: Tensor) -> Logits:
            nonlocal states
            positions, context = places.open(depth, parents)
            above = states.gather(1, parents[:, :, None].expand(-1, -1, states.shape[2])).flatten(0, 1)
            attends = context.layers(self.cache_shape.layers, self.cache_shape.window)
            embeds = self.embed(self.kept_ids[tokens.flatten()])
            states = self.step(above, embeds, positions, attends, None, depth).unflatten(0, tokens.shape)
            return self.logits(states.flatten(0, 1)).unflatten(0, tokens.shape)

        return self.logits(roots)[:, None], ask

    @torch.no_grad()
    def extend_all(self, sessions: Sessions, tokens: Tensors, features: Tensors) -> None:
        """One step over the new tokens of all sessions; only each last token needs an output, the root of the next tree."""
        if (steps := sessions[0].steps) is not None and steps.read(sessions, tokens, features):
            return
        new = [TreeLayout(session.length, count=len(own)) for session, own in zip(sessions, tokens, strict=True)]
        inputs = self.fuse(cat(features)), self.embed(cat(tokens))  # [t, h], [t, target h]
        single = self._kernel_step(sessions, new, *inputs, outputs=1)
        out, logits = single or (self.packed_step(sessions, new, *inputs, ends=True), None)
        for session, layout, state in zip(sessions, new, split(out, [1] * len(new)), strict=True):
            session.root, session.logits = state[-1:], logits
            session.length += layout.count
            session.trim()

    @torch.no_grad()
    def propose_all(self, sessions: Sessions, specs: Specs, samplers: Samplers) -> list[TokenTree]:
        """One step per depth over the nodes that any of the trees opens."""
        steps = sessions[0].steps
        if steps is not None and (static := steps.propose(sessions, specs, samplers)) is not None:
            return static
        known = [session.logits for session in sessions if session.logits is not None]
        complete = len(known) == len(sessions)
        first = cat(known) if complete else self.logits(cat([session.root for session in sessions]))  # [sessions, d]
        trees = [
            GrowingTree(spec, first[row], self.kept_ids, sampler, row=row, states=session.root)
            for row, (session, spec, sampler) in enumerate(zip(sessions, specs, samplers, strict=True))
        ]

        def step(growing: list[GrowingTree], depth: int) -> Sequence[Tensor]:
            own, sizes = [sessions[tree.row] for tree in growing], [len(tree.parents) for tree in growing]
            # The root is the last committed token; nodes stand behind it in the order they were opened.
            layouts = [
                TreeLayout(session.length - 1, tree.opened, held=1 + len(tree.opened) - size)
                for session, tree, size in zip(own, growing, sizes, strict=True)
            ]
            states = cat([tree.parent_states() for tree in growing])  # [n, h]
            embeds = self.embed(self.kept_ids[cat([tree.tokens for tree in growing])])  # [n, target h]
            single = self._kernel_step(own, layouts, states, embeds, sizes[0])
            out = single[0] if single else self.packed_step(own, layouts, states, embeds, depth)
            logits = single[1] if single else self.logits(out)  # [n, d]
            for tree, state in zip(growing, split(out, sizes), strict=True):
                tree.states = state
            return split(logits, sizes)

        return grow_trees(trees, step)

    def packed_step(
        self, sessions: Sessions, layouts: Layouts, states: Tensor, embeds: Tensor, depth: int = 0, ends: bool = False
    ) -> Tensor:
        """`step` over the new tokens of all sessions, [n, h]; ends: only each last token needs an output, [sessions, h]."""
        sizes = [layout.count for layout in layouts]
        places = [layout.positions()[0] + session.dropped for session, layout in zip(sessions, layouts, strict=True)]
        positions = cat(places).to(states.device)
        top, queries = layouts, None  # lower layers compute every token
        if ends:
            top = [TreeLayout(layout.prefix_len + layout.count - 1, count=1) for layout in layouts]
            queries = torch.tensor([end - 1 for end in accumulate(sizes)]).to(states.device)  # [sessions]
        attends = []
        for layer in range(self.cache_shape.layers):
            seen = top if layer == self.cache_shape.layers - 1 else layouts
            own = [partial(session.attend, layer, layout) for session, layout in zip(sessions, seen, strict=True)]
            attends.append(attend_packed(own, [layout.count for layout in seen], sizes))
        return self.step(states, embeds, positions, attends, queries, depth)

    def _kernel_step(
        self, sessions: Sessions, layouts: Layouts, states: Tensor, embeds: Tensor, outputs: int
    ) -> tuple[Tensor, Tensor] | None:
        """`step` and `logits` of one session's last `outputs` tokens by the CPU kernel; None where it does not apply."""
        session, layout = sessions[0], layouts[0]
        if self.draft_step is None or len(sessions) > 1 or layout.count > SKINNY_ROWS or layout.plan is None:
            return None
        end = layout.prefix_len + layout.held + layout.count
        session.buffers(0, end, states)
        inputs = embeds.to(states.dtype).contiguous(), states.contiguous()
        if session.tables is None or end > len(session.tables[0]):
            tables = self.rotary.up_to(session.dropped + max(end, session.capacity))
            session.tables = tables[0][session.dropped :], tables[1][session.dropped :]
        window = self.cache_shape.window
        return self.draft_step.run(*inputs, session.tables, session.layers, layout.plan, window, outputs)


def cat(parts: Sequence[Tensor]) -> Tensor:
    """Packs the sessions' tensors; no copy for a single session."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def split(packed: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Unpacks what `cat` packed; no call for a single session."""
    return [packed] if len(sizes) == 1 else packed.split(sizes)


def attend_packed(attends: Sequence[Attend], queries: Sequence[int], keys: Sequence[int]) -> Attend:
    """Attention of packed tokens, each session's by its own function; queries, keys: numbers of them per session."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(attends, split(query, queries), split(key, keys), split(value, keys), strict=True)
        return cat([own(*part) for own, *part in parts])

    return attend


class LayerSession(JointSession):
    """One sequence's cache: per layer, keys and values [kv_heads, capacity, e] of committed positions, then of this round's
    nodes in the order they were opened. A window bounds it: positions that no later token sees are dropped.

    Attributes:
        length: committed positions in the cache. dropped: those before them.
        root: [1, h] output at the last committed token, from the first `extend` on. logits: [1, d] the root's, if computed.
        tables: cos, sin [slots, 1, r] for the kernel of a draft step.
    """

    def __init__(self, drafter: Drafter, shape: CacheShape, max_length: int):
        bound = 2 * shape.window + _ROOM
        self.drafter, self.shape, self.capacity = drafter, shape, min(max_length, bound) if shape.window else max_length
        self.layers: list[tuple[Tensor, Tensor]] = []  # allocated when the first key shows dtype and device
        self.length = self.dropped = 0
        self.logits: Tensor | None = None
        self.tables: tuple[Tensor, Tensor] | None = None

    @property
    def held(self) -> int:
        return self.length

    def advance(self, count: int) -> None:
        self.length += count
        self.logits = None

    def place(self, steps: DraftSteps, row: int) -> None:
        super().place(steps, row)
        self.capacity = steps.cache.capacity
        both = [steps.cache.by_row(layer) for layer in range(self.shape.layers)]
        self.layers = [(keys[row], values[row]) for keys, values in both]

    def trim(self) -> None:
        """Keeps the last window of committed positions once there are two of them; static steps keep all in their own cache."""
        window = self.shape.window
        if not window or self.steps is not None or self.length <= 2 * window:
            return
        gone, more = self.length - window, (0, 0, 0, window + _ROOM)
        kept = slice(gone, self.length)
        self.layers = [(F.pad(keys[:, kept], more), F.pad(values[:, kept], more)) for keys, values in self.layers]
        self.dropped, self.length, self.capacity, self.tables = self.dropped + gone, window, 2 * window + _ROOM, None

    def attend(self, layer: int, layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores a layer's new keys and values [m, kv_heads, e] and attends with queries [n, heads, e] of the last n of those
        tokens over the keys that `layout` selects. Returns [n, heads * e].
        """
        end, window = layout.prefix_len + layout.held + layout.count, self.shape.window or None
        keys, values = self.buffers(layer, end, key)
        scaling, plan = query.shape[-1] ** -0.5, layout.plan
        if key.shape[0] == layout.count and plan is not None and plan.serves(query, keys, values):
            new = (key, value)
            out = plan.attend(query, keys, values, new=new, softcap=None, sinks=None, scaling=scaling, window=window)
            return out.view(layout.count, -1)
        self.store(layer, end - key.shape[0], key, value)
        each = query.transpose(0, 1)[None], keys[None, :, :end], values[None, :, :end]  # [1, heads, n, e], ...
        out = tree_attention(*each, layout, scaling=scaling, window=window)
        return out[0].transpose(0, 1).reshape(layout.count, -1)

    def buffers(self, layer: int, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [kv_heads, capacity, e], with at least `end` slots: trees may exceed the longest sequence."""
        if not self.layers:
            shape = (self.shape.kv_heads, self.capacity, self.shape.head_dim)
            self.layers = [(like.new_empty(shape), like.new_empty(shape)) for _ in range(self.shape.layers)]
        if end > self.capacity:
            more = (0, 0, 0, end - self.capacity)
            self.layers = [(F.pad(keys, more), F.pad(values, more)) for keys, values in self.layers]
            self.capacity = end
        return self.layers[layer]

    def store(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Writes a layer's keys and values [m, kv_heads, e] to slots from `start` on."""
        end = start + key.shape[0]
        for buffer, new in zip(self.buffers(layer, end, key), (key, value), strict=True):
            buffer[:, start:end] = new.transpose(0, 1)
