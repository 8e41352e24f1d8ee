"""The proposal half of kinds that draft with decoder layers of their own: caches, growing trees, several sequences at once.

A kind inherits `LayerDrafting` and gives it `fuse`, `step` and `logits`, which its training half uses too. Keys and values
live per session and layer. In each round committed tokens rewrite theirs from true target features (`extend`), and the
nodes of the drafted tree come behind them (`propose`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, JointSession
from drafttrain.drafters.common.expand import StateGrowing, grow
from drafttrain.drafters.common.layers import Attend, Rotary
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.ops.cpu_layers import DraftStep
from drafttrain.ops.packing import SKINNY_ROWS
from drafttrain.ops.sampling import Sampler
from drafttrain.ops.tree_attention import TreeLayout, tree_attention


@dataclass(frozen=True)
class CacheShape:
    """What a session keeps: keys and values [layers, kv_heads, capacity, head_dim]. window: visible positions, 0 for all."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int = 0


class LayerDrafting(Drafter):
    """`start`, `extend_all` and `propose_all` of the contract.

    The kind provides:
        cache_shape: of its layers. kept_ids: [d] target ids of its vocabulary. embed: the target's embedding.
        fuse(features [t, f*h]) -> [t, h]: the state that depth 0 reads.
        step(state, embeds, positions, attends, queries, depth) -> the state that the next depth reads; attends: one per
            layer. Only the last layer's outputs are restricted to `queries`.
        logits(state) -> [t, d].
        draft_step: the kernel that is `step` and `logits` in one, with `rotary`; None without one.
    """

    cache_shape: CacheShape
    kept_ids: Tensor
    embed: Callable[[Tensor], Tensor]
    fuse: Callable[[Tensor], Tensor]
    step: Callable[..., Tensor]
    logits: Callable[[Tensor], Tensor]
    rotary: Rotary
    draft_step: DraftStep | None = None

    def start(self, prompt_ids: Tensor, max_length: int) -> LayerSession:
        return LayerSession(self, max_length)

    @torch.no_grad()
    def extend_all(
        self, sessions: Sequence[LayerSession], tokens: Sequence[Tensor], features: Sequence[Tensor]
    ) -> None:
        """One step over the new tokens of all sessions. Only each last anchor drafts; the others leave their keys."""
        sizes = [new.shape[0] for new in tokens]
        new = [TreeLayout(session.length, count=size) for session, size in zip(sessions, sizes, strict=True)]
        states, embeds = self.fuse(_cat(features)), self.embed(_cat(tokens))
        alone = self.step_alone(sessions[0], new[0], states, embeds, 1) if len(sessions) == 1 else None
        if alone is not None:
            out, said = alone
            sessions[0].last, sessions[0].said = out[-1:], said
        else:
            top = self.cache_shape.layers - 1  # upper layers read every token, so all of them ask below
            attends = [attend_apart(sessions, layer, new, sizes) for layer in range(top)]
            last = [TreeLayout(layout.prefix_len + layout.count - 1, count=1) for layout in new]
            attends.append(attend_apart(sessions, top, last, sizes))
            positions = _cat([layout.positions()[0] for layout in new]).to(states.device)
            asking = torch.tensor([end - 1 for end in accumulate(sizes)]).to(states.device)
            out = self.step(states, embeds, positions, attends, asking)
            for session, state in zip(sessions, split(out, [1] * len(sizes)), strict=True):
                session.last, session.said = state, None
        for session, size in zip(sessions, sizes, strict=True):
            session.length += size

    @torch.no_grad()
    def propose_all(
        self, sessions: Sequence[LayerSession], specs: Sequence[TreeSpec], samplers: Sequence[Sampler | None]
    ) -> list[TokenTree]:
        """The trees of all sessions grow together: one step per depth over the nodes that any of them opens."""
        said = [session.said for session in sessions if session.said is not None]
        first = _cat(said) if len(said) == len(sessions) else self.logits(_cat([session.root for session in sessions]))
        drafts = [_Draft(*each, self.kept_ids) for each in zip(sessions, specs, samplers, first, strict=True)]
        growing = [draft for draft in drafts if draft.tree is None]
        depth = 0
        while growing:
            depth += 1
            sizes = [len(draft.parents) for draft in growing]
            tokens = self.kept_ids[_cat([draft.tokens for draft in growing])]
            states = _cat([draft.above() for draft in growing])
            layouts, own = [draft.open() for draft in growing], [draft.session for draft in growing]
            embeds = self.embed(tokens)
            alone = self.step_alone(own[0], layouts[0], states, embeds, sizes[0]) if len(own) == 1 else None
            if alone is not None:
                out, logits = alone
            else:
                positions = _cat([layout.positions()[0] for layout in layouts]).to(tokens.device)
                attends = [attend_apart(own, layer, layouts, sizes) for layer in range(self.cache_shape.layers)]
                out = self.step(states, embeds, positions, attends, None, depth)
                logits = self.logits(out)
            for draft, state, told in zip(growing, split(out, sizes), split(logits, sizes), strict=True):
                draft.states = state
                draft.grow(told)
            growing = [draft for draft in growing if draft.tree is None]
        return [draft.tree for draft in drafts if draft.tree is not None]

    def step_alone(
        self, session: LayerSession, layout: TreeLayout, states: Tensor, embeds: Tensor, asking: int
    ) -> tuple[Tensor, Tensor] | None:
        """`step` and `logits` for one session, by the kernel; see `DraftStep.run`. None where it does not serve."""
        if self.draft_step is None or layout.count > SKINNY_ROWS or layout.plan is None:
            return None
        end = layout.prefix_len + layout.held + layout.count
        session.room(0, end, states)
        read = embeds.to(states.dtype).contiguous(), states.contiguous()
        tables, window = self.rotary.up_to(end), self.cache_shape.window
        return self.draft_step.run(*read, tables, session.layers, layout.plan, window, asking)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def split(packed: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """The sessions' parts of a packed tensor; a session alone is spared the call."""
    return [packed] if len(sizes) == 1 else packed.split(sizes)


def attend_apart(
    sessions: Sequence[LayerSession], layer: int, layouts: Sequence[TreeLayout], sizes: Sequence[int]
) -> Attend:
    """Attention of packed tokens, each session's over its own keys.

    Args:
        layouts: of each session's queries: the last ones of its new tokens.
        sizes: new keys per session.
    """
    asking = [layout.count for layout in layouts]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        each = zip(sessions, layouts, split(query, asking), split(key, sizes), split(value, sizes), strict=True)
        return _cat([session.attend(layer, layout, q, k, v) for session, layout, q, k, v in each])

    return attend


class LayerSession(JointSession):
    """One sequence being drafted.

    Keys and values live in buffers [kv_heads, capacity, e] per layer: committed positions first, then the nodes opened in
    this round in the order they were opened.
    """

    def __init__(self, drafter: Any, max_length: int):
        self.drafter, self.capacity = drafter, max_length
        self.shape: CacheShape = drafter.cache_shape
        self.layers: list[tuple[Tensor, Tensor]] = []  # made when the first key shows dtype and device
        self.length = 0
        self.last: Tensor | None = None  # [1, h] output at the last committed anchor
        self.said: Tensor | None = None  # [1, d] its logits, where they came with it

    @property
    def root(self) -> Tensor:
        assert self.last is not None, "extend() comes before propose()"
        return self.last

    def attend(self, layer: int, layout: TreeLayout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Stores a layer's new keys and values [m, kv_heads, e], and attends with the queries [n, heads, e] of the last n
        of those tokens, as `layout` says. Returns [n, heads * e].
        """
        end = layout.prefix_len + layout.held + layout.count
        keys, values = self.room(layer, end, key)
        options: Any = {"scaling": query.shape[-1] ** -0.5, "window": self.shape.window or None}
        if key.shape[0] == layout.count and layout.plan is not None and layout.plan.serves(query, keys, values):
            out = layout.plan.attend(query, keys, values, new=(key, value), softcap=None, sinks=None, **options)
            return out.view(layout.count, -1)
        self.store(layer, end - key.shape[0], key, value)
        asked = query.transpose(0, 1)[None]
        out = tree_attention(asked, keys[None, :, :end], values[None, :, :end], layout, **options)
        return out[0].transpose(0, 1).reshape(layout.count, -1)

    def room(self, layer: int, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's buffers, with `end` slots at least; trees need a little room beyond the longest sequence."""
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
        for buffer, new in zip(self.room(layer, end, key), (key, value), strict=True):
            buffer[:, start:end] = new.transpose(0, 1)


class _Draft(StateGrowing):
    """A session's tree while it grows.

    Attributes:
        opened: the parents of all nodes opened so far, among themselves.
    """

    def __init__(self, session: LayerSession, spec: TreeSpec, sampler: Sampler | None, first: Tensor, kept_ids: Tensor):
        self.session = session
        self.opened: list[int] = []
        super().__init__(grow(spec, first, kept_ids, sampler), session.root)

    def open(self) -> TreeLayout:
        """Where the next nodes stand: behind the last committed token, which is their tree's root, and the nodes before."""
        held = 1 + len(self.opened)
        self.opened += self.parents
        return TreeLayout(self.session.length - 1, self.opened, held=held)
