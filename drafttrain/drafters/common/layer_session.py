"""The session of drafters with decoder layers: a key-value cache, and its kernel calls."""

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
    """One sequence's key-value cache.

    Per layer it holds keys and values [kv_heads, capacity, e] of committed positions, then of this
    round's nodes in the order they were opened. A window bounds it: positions that no later token
    sees are dropped.

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
        self.drafter = drafter
        self.shape = shape
        self.text = text
        self.capacity = max_length  # slots per layer
        if shape.window:
            self.capacity = min(max_length, 2 * shape.window + _ROOM)
        # Keys and values per layer, allocated when the first key shows dtype and device.
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.length = 0
        self.dropped = 0
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
        self.layers = []
        for layer in range(self.shape.layers):
            keys, values = steps.cache.by_row(layer)  # [rows, kv_heads, capacity, e] each
            self.layers.append((keys[row], values[row]))
        self._store = None

    def trim(self) -> None:
        """Keeps the last window of committed positions once there are two windows of them.

        Static steps keep all positions in their own cache.
        """
        window = self.shape.window
        if not window or self.steps is not None or self.length <= 2 * window:
            return
        gone = self.length - window
        self.layers = self._resized(slice(gone, self.length), window + _ROOM)
        self.dropped += gone
        self.length = window
        self.capacity = 2 * window + _ROOM
        self._store = None

    def _resized(self, kept: slice, more: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of the buffers' slots `kept`, with `more` empty slots behind them."""
        padding = (0, 0, 0, more)
        resized = []
        for keys, values in self.layers:
            resized.append((F.pad(keys[:, kept], padding), F.pad(values[:, kept], padding)))
        return resized

    def attend(
        self,
        layer: int,
        layout: TreeLayout,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Stores a layer's new keys and values, and attends over the keys that `layout` selects.

        Args:
            query: [n, heads, e] of the last n new tokens. key, value: [m, kv_heads, e] of all.

        Returns:
            [n, heads * e].
        """
        end = layout.prefix_len + layout.held + layout.count
        window = self.shape.window or None
        keys, values = self.buffers(layer, end, key)
        scaling = query.shape[-1] ** -0.5
        plan = layout.plan
        if key.shape[0] == layout.count and plan is not None and plan.serves(query, keys, values):
            out = plan.attend(
                query,
                keys,
                values,
                new=(key, value),
                softcap=None,
                sinks=None,
                scaling=scaling,
                window=window,
            )
            return out.view(layout.count, -1)

        self.store(layer, end - key.shape[0], key, value)
        queries = query.transpose(0, 1)[None]  # [1, heads, n, e]
        keys = keys[None, :, :end]  # [1, kv_heads, end, e]
        values = values[None, :, :end]
        out = tree_attention(
            queries,
            keys,
            values,
            layout,
            scaling=scaling,
            window=window,
        )
        return out[0].transpose(0, 1).reshape(layout.count, -1)

    def buffers(self, layer: int, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a layer's keys and values [kv_heads, capacity, e], with at least `end` slots."""
        if not self.layers:
            shape = (self.shape.kv_heads, self.capacity, self.shape.head_dim)
            for _ in range(self.shape.layers):
                self.layers.append((like.new_empty(shape), like.new_empty(shape)))
        if end > self.capacity:  # a tree may reach beyond the longest sequence
            self.layers = self._resized(slice(None), end - self.capacity)
            self.capacity = end
            self._store = None
        return self.layers[layer]

    def store_of(self, end: int, like: Tensor) -> KeyStore:
        """The buffers of all layers for a CPU kernel, with at least `end` slots."""
        if self._store is None or end > self.capacity:
            self.buffers(0, end, like)
            self._store = KeyStore(self.layers)
        return self._store

    def store(
        self,
        layer: int,
        start: int,
        key: Tensor,
        value: Tensor,
    ) -> None:
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
    """Computes depth 0 of committed tokens by one kernel call.

    Returns:
        Outputs of `step` and of `read_out` at each session's last token, [sessions, h] each; None
        where the kernel does not apply.
    """
    table = drafter.embed_table  # [v, h]
    lengths = [session.length for session in sessions]
    if not drafter.draft_steps or table is None or max(lengths) > LONGEST_PREFIX:
        return None
    step = drafter.draft_steps[0]
    counts = [own.shape[0] for own in tokens]
    if not step.reads_features or sum(counts) > SKINNY_ROWS:
        return None
    ends = [length + count for length, count in zip(lengths, counts, strict=True)]
    tables = tables_of(drafter.rotary, sessions, max(ends))
    if tables is None:
        return None
    read = cat(features).to(table.dtype).contiguous()  # [t, f*h]
    stores = stores_of(sessions, ends, read)
    window = drafter.cache_shape.window
    return step.read(
        cat(tokens),
        read,
        counts,
        lengths,
        table,
        tables,
        stores,
        window,
    )


def grow_by_kernel(
    drafter: KernelDrafter,
    sessions: Sequence[LayerSession],
    specs: Specs,
    reads: Tensor,
) -> list[TokenTree] | None:
    """Grows greedy trees of one shape by one kernel call; None where it does not apply.

    reads: [sessions, h], the head's input at the roots.
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
    ends = [length - 1 + shape.opens for length in lengths]  # slots of the root and opened nodes
    made = drafter.draft_steps[0].trees(
        head,
        shape,
        table,
        drafter.kept_ids,
        tables,
        stores_of(sessions, ends, reads),
        lengths,
        drafter.cache_shape.window,
        cat([session.root for session in sessions]).contiguous(),  # [sessions, h]
        reads.contiguous(),
    )
    trees = []
    for tokens, parents, scores in made:
        trees.append(TokenTree(torch.from_numpy(tokens), parents, torch.from_numpy(scores)))
    return trees


def stores_of(
    sessions: Sequence[LayerSession],
    ends: Sequence[int],
    like: Tensor,
) -> list[KeyStore]:
    """The sessions' buffers for a CPU kernel, each with slots up to its end."""
    return [session.store_of(end, like) for session, end in zip(sessions, ends, strict=True)]


def tables_of(
    rotary: Rotary,
    sessions: Sequence[LayerSession],
    end: int,
) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine [end, 1, r] of the positions of slots 0 to `end`.

    None where the sequences' windows have dropped different numbers of positions.
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
