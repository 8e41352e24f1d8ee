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
from drafttrain.drafters.expand import Growing, grow
from drafttrain.drafters.layers import Attend
from drafttrain.drafters.tree_spec import TreeSpec
from drafttrain.ops.sampling import Sampler


@dataclass(frozen=True)
class CacheShape:
    """What a session keeps: keys and values [layers, kv_heads, capacity, head_dim]. window: visible positions, 0 for all."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int = 0


class LayerDrafting:
    """`start`, `extend_all` and `propose_all` of the contract.

    The kind provides:
        cache_shape: of its layers. kept_ids: [d] target ids of its vocabulary. embed: the target's embedding.
        fuse(features [t, f*h]) -> [t, h]: the state that depth 0 reads.
        step(state, embeds, positions, attends, queries, depth) -> the state that the next depth reads; attends: one per
            layer. Only the last layer's outputs are restricted to `queries`.
        logits(state) -> [t, d].
    """

    cache_shape: CacheShape
    kept_ids: Tensor
    embed: Callable[[Tensor], Tensor]
    fuse: Callable[[Tensor], Tensor]
    step: Callable[..., Tensor]
    logits: Callable[[Tensor], Tensor]

    def start(self, prompt_ids: Tensor, max_length: int) -> LayerSession:
        return LayerSession(self, max_length)

    @torch.no_grad()
    def extend_all(
        self, sessions: Sequence[LayerSession], tokens: Sequence[Tensor], features: Sequence[Tensor]
    ) -> None:
        """One step over the new tokens of all sessions. Only each last anchor drafts; the others leave their keys."""
        sizes = [len(new) for new in tokens]
        device = tokens[0].device
        starts = [session.length for session in sessions]
        positions = _cat([torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
        last = torch.tensor([end - 1 for end in accumulate(sizes)])

        shape = self.cache_shape
        committed = list(zip(starts, sizes, strict=True))
        final = [newest(start, size, 1, shape.window, device) for start, size in committed]
        attends = [attend_apart(sessions, shape.layers - 1, starts, final, [1] * len(sizes), sizes)]
        if shape.layers > 1:  # upper layers read every token, so all of them ask below
            masks = [newest(start, size, size, shape.window, device) for start, size in committed]
            below = [attend_apart(sessions, layer, starts, masks, sizes, sizes) for layer in range(shape.layers - 1)]
            attends = [*below, *attends]
        states = self.fuse(_cat(features))
        out = self.step(states, self.embed(_cat(tokens)), positions.to(device), attends, last.to(device))
        for session, size, state in zip(sessions, sizes, out.split(1), strict=True):
            session.last = state
            session.length += size

    @torch.no_grad()
    def propose_all(
        self, sessions: Sequence[LayerSession], specs: Sequence[TreeSpec], samplers: Sequence[Sampler | None]
    ) -> list[TokenTree]:
        """The trees of all sessions grow together: one step per depth over the nodes that any of them opens."""
        first = self.logits(_cat([session.root for session in sessions]))
        drafts = [_Draft(*each, self.kept_ids) for each in zip(sessions, specs, samplers, first, strict=True)]
        growing = [draft for draft in drafts if draft.tree is None]
        depth = 0
        while growing:
            depth += 1
            sizes = [len(draft.parents) for draft in growing]
            tokens = _cat([draft.tokens for draft in growing])
            states = torch.stack([draft.state_of(parent) for draft in growing for parent in draft.parents])
            masks: list[Tensor | None] = [draft.open().to(tokens.device) for draft in growing]
            positions = torch.tensor([at for draft in growing for at in draft.positions], device=tokens.device)
            own, begins = [draft.session for draft in growing], [draft.begin for draft in growing]
            layers = range(self.cache_shape.layers)
            attends = [attend_apart(own, layer, begins, masks, sizes, sizes) for layer in layers]
            out = self.step(states, self.embed(self.kept_ids[tokens]), positions, attends, None, depth)
            for draft, state, logits in zip(growing, out.split(sizes), self.logits(out).split(sizes), strict=True):
                draft.states.extend(state)
                draft.grow(logits)
            growing = [draft for draft in growing if draft.tree is None]
        return [draft.tree for draft in drafts if draft.tree is not None]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def newest(start: int, size: int, asking: int, window: int, device: torch.device) -> Tensor | None:
    """Which slots the last `asking` of `size` new committed tokens see: [asking, start + size] bool, None for all."""
    end = start + size
    if asking == 1 and (not window or end <= window):
        return None
    own = torch.arange(end - asking, end, device=device)[:, None]
    slots = torch.arange(end, device=device)
    return (slots <= own) & (own - slots < window) if window else slots <= own


def attend_apart(
    sessions: Sequence[LayerSession],
    layer: int,
    begins: Sequence[int],
    masks: Sequence[Tensor | None],
    asking: Sequence[int],
    sizes: Sequence[int],
) -> Attend:
    """Attention of packed tokens, each session's over its own keys.

    Args:
        begins: slot of each session's first new token; masks: which slots its queries see.
        asking: queries per session; sizes: new keys per session.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outs = []
        parts = zip(query.split(asking), key.split(sizes), value.split(sizes), strict=True)
        for session, begin, mask, (q, k, v) in zip(sessions, begins, masks, parts, strict=True):
            outs.append(session.attention(layer, q, session.store(layer, begin, k, v), mask))
        return _cat(outs)

    return attend


class LayerSession:
    """One sequence being drafted.

    Keys and values live in one buffer [layers, kv_heads, capacity, e]: committed positions first, then the nodes opened in
    this round in the order they were opened.
    """

    def __init__(self, drafter: Any, max_length: int):
        self.drafter = drafter
        shape: CacheShape = drafter.cache_shape
        self.buffer = (shape.layers, shape.kv_heads, max_length, shape.head_dim)
        self.keys, self.values = torch.empty(0), torch.empty(0)  # made when the first key shows dtype and device
        self.window = shape.window
        self.length = 0
        self.last: Tensor | None = None  # [1, h] output at the last committed anchor

    @property
    def root(self) -> Tensor:
        assert self.last is not None, "extend() comes before propose()"
        return self.last

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        self.drafter.extend_all([self], [tokens], [features])

    def propose(self, spec: TreeSpec, sampler: Sampler | None = None) -> TokenTree:
        return self.drafter.propose_all([self], [spec], [sampler])[0]

    def store(self, layer: int, start: int, key: Tensor, value: Tensor) -> int:
        """Writes a layer's keys and values [m, kv_heads, e] to slots from `start` on; returns the end."""
        end = start + key.shape[0]
        if not self.keys.numel():
            self.keys, self.values = key.new_empty(self.buffer), key.new_empty(self.buffer)
        if end > self.keys.shape[2]:
            # Trees need a little room beyond the longest sequence.
            more = end - self.keys.shape[2]
            self.keys, self.values = (F.pad(kept, (0, 0, 0, more)) for kept in (self.keys, self.values))
        self.keys[layer, :, start:end] = key.transpose(0, 1)
        self.values[layer, :, start:end] = value.transpose(0, 1)
        return end

    def attention(self, layer: int, query: Tensor, end: int, mask: Tensor | None) -> Tensor:
        """query [m, heads, e] over slots [0, end); mask [m, end] bool or None for all. Returns [m, heads * e]."""
        m, heads, e = query.shape
        kv = self.keys.shape[1]
        groups = heads // kv
        # Query heads of a group become rows, so that keys and values are read once and never repeated.
        folded = query.view(m, kv, groups, e).permute(1, 2, 0, 3).reshape(1, kv, groups * m, e)
        if mask is not None:
            mask = mask.repeat(groups, 1)
        keys, values = (kept[layer, None, :, :end] for kept in (self.keys, self.values))
        out = F.scaled_dot_product_attention(folded, keys, values, mask)
        return out.view(kv, groups, m, e).permute(2, 0, 1, 3).reshape(m, heads * e)


class _Draft(Growing):
    """A session's tree while it grows.

    Attributes:
        begin: the slot of the first of them; positions: their rotary positions.
        states: [h] outputs of the opened nodes.
    """

    def __init__(self, session: LayerSession, spec: TreeSpec, sampler: Sampler | None, first: Tensor, kept_ids: Tensor):
        self.session = session
        self.states: list[Tensor] = []
        self._slots: list[list[int]] = []  # opened node -> slots of its path, its own included
        super().__init__(grow(spec, first, kept_ids, sampler))

    def state_of(self, node: int) -> Tensor:
        return self.states[node] if node >= 0 else self.session.root[0]

    def open(self) -> Tensor:
        """Gives the nodes their slots and positions; returns [m, end] bool, the slots that each may see."""
        length, window = self.session.length, self.session.window
        self.begin = length + len(self._slots)
        mask = torch.zeros(len(self.parents), self.begin + len(self.parents), dtype=torch.bool)
        self.positions = []
        for row, parent in enumerate(self.parents):
            path = [*(self._slots[parent] if parent >= 0 else []), self.begin + row]
            position = length - 1 + len(path)
            mask[row, max(0, position - window + 1) if window else 0 : length] = True
            mask[row, path[-window:]] = True
            self._slots.append(path)
            self.positions.append(position)
        return mask
