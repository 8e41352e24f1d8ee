"""The session of drafters with decoder layers, a cache of keys and values, and what one kernel call
computes of sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, JointSession, Specs, Tensors
from drafttrain.drafters.common.context_tokens import ContextTokens
from drafttrain.drafters.common.layers import CacheShape, Rotary
from drafttrain.drafters.common.static_draft import DraftSteps
from drafttrain.drafters.common.tree_growth import tree_shape
from drafttrain.ops.cpu_draft import OPENED, DraftHead, DraftStep, KeyStore
from drafttrain.ops.packing import SKINNY_ROWS, PackedLinear
from drafttrain.ops.tree_attention import LONGEST_PREFIX, TreeLayout, tree_attention

_ROOM = 64  # slots behind a window for a round's tokens; more are added where they are needed


class LayerSession(JointSession):
    """One sequence's cache: per layer, keys and values [kv_heads, capacity, e] of committed
    positions, then of this round's nodes in the order they were opened. A window bounds it:
    positions that no later token sees are dropped.

    Attributes:
        length: committed positions in the cache. dropped: those before them.
        root: [1, h] output at the last committed token, from the first `extend` on.
        read: [1, h] input of the head there; None if not computed.
        text: tokens that joined the vocabulary; None where none may, as with static steps.
    """

    def __init__(
        self,
        drafter: Drafter,
        shape: CacheShape,
        max_length: int,
        text: ContextTokens | None = None,
    ):
        bound = 2 * shape.window + _ROOM
        self.drafter = drafter
        self.shape = shape
        self.text = text
        if shape.window:
            self.capacity = min(max_length, bound)
        else:
            self.capacity = max_length
        self.layers: list[
            tuple[Tensor, Tensor]
        ] = []  # allocated when the first key shows dtype and device
        self.length = self.dropped = 0
        self.read: Tensor | None = None
        self._store: KeyStore | None = None  # of the present buffers

    @property
    def ids(self) -> Tensor:
        """[d and further tokens] int64, target id of each drafter id."""
        if self.text is None:
            return self.drafter.kept_ids
        return self.text.ids

    @property
    def held(self) -> int:
        return self.length

    def advance(self, count: int) -> None:
        self.length += count
        self.read = None

    def place(self, steps: DraftSteps, row: int) -> None:
        super().place(steps, row)
        self.text = None
        self.capacity = steps.cache.capacity
        both = [steps.cache.by_row(layer) for layer in range(self.shape.layers)]
        self.layers = [(keys[row], values[row]) for keys, values in both]
        self._store = None

    def trim(self) -> None:
        """Keeps the last window of committed positions once there are two of them; static steps
        keep all in their own cache.
        """
        window = self.shape.window
        if not window or self.steps is not None or self.length <= 2 * window:
            return
        gone = self.length - window
        more = (0, 0, 0, window + _ROOM)
        kept = slice(gone, self.length)
        self.layers = [
            (F.pad(keys[:, kept], more), F.pad(values[:, kept], more))
            for keys, values in self.layers
        ]
        self.dropped = self.dropped + gone
        self.length = window
        self.capacity = 2 * window + _ROOM
        self._store = None

    def attend(
        self,
        layer: int,
        layout: TreeLayout,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Stores a layer's new keys and values [m, kv_heads, e] and attends with queries [n, heads,
        e] of the last n of those tokens over the keys that `layout` selects. Returns [n, heads *
        e].
        """
        end = layout.prefix_len + layout.held + layout.count
        window = self.shape.window or None
        keys, values = self.buffers(layer, end, key)
        scaling = query.shape[-1] ** -0.5
        plan = layout.plan
        if key.shape[0] == layout.count and plan is not None and plan.serves(query, keys, values):
            new = (key, value)
            out = plan.attend(
                query,
                keys,
                values,
                new=new,
                softcap=None,
                sinks=None,
                scaling=scaling,
                window=window,
            )
            return out.view(layout.count, -1)
        self.store(layer, end - key.shape[0], key, value)
        each = (
            query.transpose(0, 1)[None],
            keys[None, :, :end],
            values[None, :, :end],
        )  # [1, heads, n, e], ...
        out = tree_attention(*each, layout, scaling=scaling, window=window)
        return out[0].transpose(0, 1).reshape(layout.count, -1)

    def buffers(self, layer: int, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values [kv_heads, capacity, e], with at least `end` slots: trees may
        exceed the longest sequence.
        """
        if not self.layers:
            shape = (self.shape.kv_heads, self.capacity, self.shape.head_dim)
            self.layers = [
                (like.new_empty(shape), like.new_empty(shape)) for _ in range(self.shape.layers)
            ]
        if end > self.capacity:
            more = (0, 0, 0, end - self.capacity)
            self.layers = [(F.pad(keys, more), F.pad(values, more)) for keys, values in self.layers]
            self.capacity = end
            self._store = None
        return self.layers[layer]

    def store_of(self, end: int, like: Tensor) -> KeyStore:
        """The buffers of all layers for a CPU kernel, with at least `end` slots."""
        if self._store is None or end > self.capacity:
            self.buffers(0, end, like)
            self._store = KeyStore(self.layers)
        return self._store

    def store(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Writes a layer's keys and values [m, kv_heads, e] to slots from `start` on."""
        end = start + key.shape[0]
        for buffer, new in zip(self.buffers(layer, end, key), (key, value), strict=True):
            buffer[:, start:end] = new.transpose(0, 1)


class KernelDrafter(Protocol):
    """What the functions below read of a `LayerDrafter`."""

    draft_steps: tuple[DraftStep, ...]
    embed_table: Tensor | None
    rotary: Rotary
    cache_shape: CacheShape
    kept_ids: Tensor

    @property
    def head(self) -> nn.Linear | PackedLinear: ...


def read_by_kernel(
    drafter: KernelDrafter,
    sessions: Sequence[LayerSession],
    tokens: Tensors,
    features: Tensors,
) -> tuple[Tensor, Tensor] | None:
    """Depth 0 of committed tokens by one call: outputs of `step` and of `read_out` at each
    session's last token, [sessions, h]. None where it does not apply.
    """
    table = drafter.embed_table
    lengths = [session.length for session in sessions]
    if not drafter.draft_steps or table is None or max(lengths) > LONGEST_PREFIX:
        return None
    step = drafter.draft_steps[0]
    counts = [own.shape[0] for own in tokens]
    if not step.reads_features or sum(counts) > SKINNY_ROWS:
        return None
    ends = [length + count for length, count in zip(lengths, counts, strict=True)]
    tables = tables_of(drafter.rotary, sessions, max(ends))
    window = drafter.cache_shape.window
    if tables is None:
        return None
    read = cat(features).to(table.dtype).contiguous()
    stores = [session.store_of(end, read) for session, end in zip(sessions, ends, strict=True)]
    return step.read(cat(tokens), read, counts, lengths, table, tables, stores, window)


def grow_by_kernel(
    drafter: KernelDrafter,
    sessions: Sequence[LayerSession],
    specs: Specs,
    reads: Tensor,
) -> list[TokenTree] | None:
    """Greedy trees of one shape by one call; reads [sessions, h]: the head's input at the roots.
    None where it does not apply.
    """
    shape = tree_shape(specs)
    table = drafter.embed_table
    lengths = [session.length for session in sessions]
    if shape is None or table is None or len(drafter.draft_steps) != 1 or shape.opens > OPENED:
        return None
    head = DraftHead.of(drafter.head)
    if head is None or max(lengths) > LONGEST_PREFIX or any(session.text for session in sessions):
        return None
    tables = tables_of(drafter.rotary, sessions, max(lengths) - 1 + shape.depth)
    if tables is None:
        return None
    stores = [session.store_of(session.length - 1 + shape.opens, reads) for session in sessions]
    window = drafter.cache_shape.window
    roots = cat([session.root for session in sessions]).contiguous()
    made = drafter.draft_steps[0].trees(
        *(
            head,
            shape,
            table,
            drafter.kept_ids,
            tables,
            stores,
            lengths,
            window,
            roots,
            reads.contiguous(),
        )
    )
    return [
        TokenTree(torch.from_numpy(tokens), parents, torch.from_numpy(scores))
        for tokens, parents, scores in made
    ]


def tables_of(
    rotary: Rotary,
    sessions: Sequence[LayerSession],
    end: int,
) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine of the positions of slots 0 to `end`; None where the sequences' windows have
    dropped different numbers.
    """
    dropped = sessions[0].dropped
    if any(session.dropped != dropped for session in sessions):
        return None
    cos, sin = rotary.up_to(dropped + end)
    if dropped:
        return (cos[dropped:], sin[dropped:])
    return (cos, sin)


def cat(parts: Sequence[Tensor]) -> Tensor:
    """Packs the sessions' tensors; no copy for a single session."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts))
