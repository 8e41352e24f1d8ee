"""Proposal half of drafters made of decoder layers: key-value caches, tree growth, several sequences at once.

In each round `extend` computes the keys of committed tokens from true target features, over those that were drafted, and
`propose` stores the keys of the drafted tree's nodes behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, JointSession, Samplers, Specs, Tensors
from drafttrain.drafters.common.layers import Attend, CacheShape
from drafttrain.drafters.common.trainable import DecoderDrafter
from drafttrain.drafters.common.tree_growth import GrowingTree, grow_trees
from drafttrain.ops.cpu_layers import DraftStep
from drafttrain.ops.packing import SKINNY_ROWS
from drafttrain.ops.tree_attention import TreeLayout, tree_attention


class LayerDrafting(DecoderDrafter):
    """`start`, `extend_all` and `propose_all` from a `LayerDrafter`'s forward pass.

    Attributes:
        draft_step: the CPU kernel that is `step` and `logits` in one; None without one.
    """

    fuse: Callable[[Tensor], Tensor]
    step: Callable[..., Tensor]
    logits: Callable[[Tensor], Tensor]
    draft_step: DraftStep | None = None

    def start(self, prompt_ids: Tensor, max_length: int) -> LayerSession:
        return LayerSession(self, self.cache_shape, max_length)

    @torch.no_grad()
    def extend_all(self, sessions: Sequence[LayerSession], tokens: Tensors, features: Tensors) -> None:
        """One step over the new tokens of all sessions; only each last token needs an output, the root of the next tree."""
        new = [TreeLayout(session.length, count=len(own)) for session, own in zip(sessions, tokens, strict=True)]
        inputs = self.fuse(cat(features)), self.embed(cat(tokens))  # [t, h], [t, target h]
        single = self._kernel_step(sessions, new, *inputs, outputs=1)
        out, logits = single or (self.packed_step(sessions, new, *inputs, ends=True), None)
        for session, layout, state in zip(sessions, new, split(out, [1] * len(new)), strict=True):
            session.last, session.logits = state[-1:], logits
            session.length += layout.count

    @torch.no_grad()
    def propose_all(self, sessions: Sequence[LayerSession], specs: Specs, samplers: Samplers) -> list[TokenTree]:
        """One step per depth over the nodes that any of the trees opens."""
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
        self,
        sessions: Sequence[LayerSession],
        layouts: Sequence[TreeLayout],
        states: Tensor,
        embeds: Tensor,
        depth: int = 0,
        ends: bool = False,
    ) -> Tensor:
        """`step` over the new tokens of all sessions, [n, h]; ends: only each last token needs an output, [sessions, h]."""
        sizes = [layout.count for layout in layouts]
        positions = cat([layout.positions()[0] for layout in layouts]).to(states.device)
        top, queries = layouts, None  # lower layers compute every token
        if ends:
            top = [TreeLayout(layout.prefix_len + layout.count - 1, count=1) for layout in layouts]
            queries = torch.tensor([end - 1 for end in accumulate(sizes)]).to(states.device)  # [sessions]
        attends = [attend_sessions(sessions, i, layouts, sizes) for i in range(self.cache_shape.layers - 1)]
        attends.append(attend_sessions(sessions, self.cache_shape.layers - 1, top, sizes))
        return self.step(states, embeds, positions, attends, queries, depth)

    def _kernel_step(
        self,
        sessions: Sequence[LayerSession],
        layouts: Sequence[TreeLayout],
        states: Tensor,
        embeds: Tensor,
        outputs: int,
    ) -> tuple[Tensor, Tensor] | None:
        """`step` and `logits` of one session's last `outputs` tokens by the CPU kernel; None where it does not apply."""
        session, layout = sessions[0], layouts[0]
        if self.draft_step is None or len(sessions) > 1 or layout.count > SKINNY_ROWS or layout.plan is None:
            return None
        end = layout.prefix_len + layout.held + layout.count
        session.buffers(0, end, states)
        inputs = embeds.to(states.dtype).contiguous(), states.contiguous()
        tables, window = self.rotary.up_to(end), self.cache_shape.window
        return self.draft_step.run(*inputs, tables, session.layers, layout.plan, window, outputs)


def cat(parts: Sequence[Tensor]) -> Tensor:
    """Packs the sessions' tensors; no copy for a single session."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def split(packed: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Unpacks what `cat` packed; no call for a single session."""
    return [packed] if len(sizes) == 1 else packed.split(sizes)


def attend_sessions(
    sessions: Sequence[LayerSession], layer: int, layouts: Sequence[TreeLayout], sizes: Sequence[int]
) -> Attend:
    """Attention of packed tokens, each session's over its own cache.

    Args:
        layouts: of each session's queries, the last ones of its new tokens. sizes: new keys per session.
    """
    counts = [layout.count for layout in layouts]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        each = zip(sessions, layouts, split(query, counts), split(key, sizes), split(value, sizes), strict=True)
        return cat([session.attend(layer, layout, q, k, v) for session, layout, q, k, v in each])

    return attend


class LayerSession(JointSession):
    """One sequence's cache: per layer, keys and values [kv_heads, capacity, e] of committed positions, then of this round's
    nodes in the order they were opened.

    Attributes:
        length: committed positions. last: [1, h] output at the last committed token; logits: [1, d] its logits, if computed.
    """

    def __init__(self, drafter: Drafter, shape: CacheShape, max_length: int):
        self.drafter, self.shape, self.capacity = drafter, shape, max_length
        self.layers: list[tuple[Tensor, Tensor]] = []  # allocated when the first key shows dtype and device
        self.length = 0
        self.last: Tensor | None = None
        self.logits: Tensor | None = None

    @property
    def root(self) -> Tensor:
        assert self.last is not None, "extend() comes before propose()"
        return self.last

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
        queries = query.transpose(0, 1)[None]  # [1, heads, n, e]
        out = tree_attention(
            queries, keys[None, :, :end], values[None, :, :end], layout, scaling=scaling, window=window
        )
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
