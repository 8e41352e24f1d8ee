"""The key/value cache of decoding: preallocated, written in place, rolled back by not committing.

`TreeCache` holds the rows of a batch and attends for packed forwards. `SlotMover` moves an accepted
path together in the buffers of all layers: one launch on a GPU, one call of ops/cpu.c on a CPU,
torch elsewhere.

    slots       ...  10  11  12  13  14          sources 12, 14   goals 11, 12
    before           r   a   b   a1  b1
    after            r   b   b1  -   -
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from drafttrain.batch import cat
from drafttrain.errors import UserError
from drafttrain.ops.launch import has_triton, run_kernel
from drafttrain.ops.native import built_kernels, cpu_kernels
from drafttrain.ops.packing import address_of, check
from drafttrain.ops.tree_attention import AttentionForm, CpuPlan, TreeLayout, tree_attention
from drafttrain.ops.tree_attention_triton import (
    PackedPlan,
    packed_tree_attention,
)

# Longer pieces are prompts. Fused causal attention reads them faster than a kernel for few tokens.
_KERNEL_TOKENS = 256
ROOM = 64  # slots behind a sequence for a round's tokens; caches that grow take more where needed
# Per part of a forward its row, and its new tokens: how many, the parents of a tree, or their layout.
Announced = Sequence[tuple[int, Sequence[int] | int | TreeLayout]]
Buffers = dict[int, tuple[Tensor, Tensor]]  # keys and values by layer
Moves = Sequence[tuple[int, Sequence[int]]]  # first goal and sources of each path


class Addresses(NamedTuple):
    """Where the buffers of a cache are, for kernels that run several layers.

    Attributes:
        table: [layers, 5] int64: addresses of keys and values, their strides from head to head in
            numbers, and whether they are bfloat16.
        address: of the table, which is struct buffers of cpu_layers.c.
        slots: of each buffer.
        shapes: (kv_heads, head_dim) per layer.
        buffers: what the addresses point to, which must live as long.
    """

    table: np.ndarray
    address: int
    slots: int
    shapes: list[tuple[int, int]]
    buffers: list[tuple[Tensor, Tensor]]


def _on_gpu(query: Tensor) -> bool:
    return query.is_cuda and has_triton()


class CacheRows:
    """The rows of a cache, each with a sequence, and where the tokens of a forward stand in them.

    Args:
        capacity: positions per row: the longest sequence plus one round's new tokens.
        rows: sequences held at a time.

    Attributes:
        lengths: L, committed tokens of each row.
        shifts: position of each row's next token less its index: images may take fewer positions
            than tokens.
        base: positions that are dropped; slot 0 holds the next one.
        opened: row and layout of each part of the announced forward.
    """

    base = 0

    def __init__(self, capacity: int, rows: int):
        self.capacity = capacity
        self.rows = rows
        self.lengths = [0] * rows
        self.shifts = [0] * rows
        self.opened: list[tuple[int, TreeLayout]] = []

    @property
    def counted(self) -> str:
        """The number of rows, in words."""
        return "1 row" if self.rows == 1 else f"{self.rows} rows"

    def clear(self, row: int) -> None:
        """Empties a row for its next sequence."""
        self.lengths[row] = 0
        self.shifts[row] = 0

    def lay_out(self, new: Announced) -> None:
        """Sets `opened`, see `open`.

        Raises:
            ValueError: a part is of a row that does not exist, or two are of one row.
        """
        named = [row for row, _ in new]
        if len(set(named)) < len(named) or not all(0 <= row < self.rows for row in named):
            raise ValueError(f"rows={named} must be distinct numbers from 0 to {self.rows - 1}")
        self.opened = []
        for row, shape in new:
            if isinstance(shape, TreeLayout):
                layout = shape
            elif isinstance(shape, int):
                layout = TreeLayout(self.lengths[row], count=shape)
            else:
                layout = TreeLayout(self.lengths[row], shape)
            layout.base = self.base + self.shifts[row]
            self.opened.append((row, layout))

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """[1, N] int64 position ids of the announced forward."""
        return cat([layout.positions() for _, layout in self.opened], dim=1).to(device)


class TreeCache(CacheRows):
    """Keys and values of several sequences, and the attention of packed forwards over them.

    It is an `AttentionContext`.

    A forward holds the new tokens of any of the rows one after the other, without padding. A row's
    n new tokens are written to its slots [L, L+n). Nothing is removed: `commit` moves the accepted
    tokens together behind L and advances L, and the next forward overwrites the rest. Each row has
    its own L and its own tree.

        slots       0 .. L-1    L     L+1   L+2   L+3   L+4
        forward     committed   root  a     b     a1    b1         (a, b: children of the root)
        commit      committed   root  b     b1                     kept = [0, 2, 4], L += 3

    A window bounds the cache of one sequence: `trim` drops positions that no later token sees.

    On a CPU attention computes in float32. Its buffers are float32 too, but those of a bfloat16
    target bfloat16, as they are on a GPU: behind a long prefix a step takes as long as reading them.

    Args:
        capacity: slots per row and layer: the longest sequence plus one round's new tokens.
        rows: sequences held at a time.
        dtype: of the weights.
        window: positions that a token sees, its own included; 0 for all. Only for one row.

    Attributes:
        nbytes: bytes of all buffers, which the first forward allocates.
    """

    def __init__(
        self,
        capacity: int,
        rows: int = 1,
        dtype: torch.dtype = torch.float32,
        window: int = 0,
    ):
        if window:
            capacity = min(capacity, 2 * window + ROOM)
        super().__init__(capacity, rows)
        self.dtype = dtype
        self.window = window
        # Per layer keys and values [kv_heads, rows * capacity, e]: one slot axis, so that all rows
        # move in one gather.
        self._layers: Buffers = {}
        self._mover: SlotMover | None = None  # of the present buffers
        self._addresses: Addresses | None = None  # of the present buffers
        # What attention derives from the announced forward on first use.
        self._slots: Tensor | None = None
        self._plan: PackedPlan | None = None
        self._plan_device: torch.device | None = None
        self._cpu_plan: CpuPlan | None = None
        self._planned = False  # whether `_cpu_plan` was made

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers.values())

    def __str__(self) -> str:
        size = f"{self.counted} x {self.capacity:,} positions"
        return f"key/value cache {self.nbytes / 2**20:,.1f} MiB ({size})"

    def allocate(self, layers: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Makes the buffers before the first forward, all zero.

        Args:
            layers: empty keys and values [1, kv_heads, 0, e] of each layer.
        """
        for layer, (key, value) in layers.items():
            self._layers[layer] = (self._allocate(key).zero_(), self._allocate(value).zero_())

    @property
    def layers(self) -> Buffers:
        """Empty keys and values of each layer, as `allocate` takes them."""
        empty: Buffers = {}
        for layer, (keys, values) in self._layers.items():
            empty[layer] = (keys[None, :, :0], values[None, :, :0])
        return empty

    def view(self, row: int) -> TreeCache:
        """A cache of one row that shares the buffers of a row of this one."""
        made = TreeCache(self.capacity, dtype=self.dtype)
        begin = row * self.capacity
        end = begin + self.capacity
        for layer, (keys, values) in self._layers.items():
            made._layers[layer] = (keys[:, begin:end], values[:, begin:end])
        return made

    def clear(self, row: int) -> None:
        super().clear(row)
        self.base = 0

    def reserve(self, capacity: int) -> None:
        """Grows every row to `capacity` positions and keeps the contents."""
        if capacity > self.capacity:
            self._resize(capacity, slice(self.capacity))

    def trim(self) -> None:
        """Keeps the last window of committed positions once there are two windows of them."""
        window = self.window
        length = self.lengths[0]
        if not window or length <= 2 * window:
            return
        self._resize(2 * window + ROOM, slice(length - window, length))
        self.base += length - window
        self.lengths[0] = window

    # Slots behind the kept ones stay uninitialized: no token sees them before it is written.
    def _resize(self, capacity: int, kept: slice) -> None:
        """Moves each row's slots `kept` to the front of buffers of another capacity."""
        sizes = (self.rows, self.capacity)
        self.capacity = capacity
        self._addresses = None
        for layer, pair in self._layers.items():
            moved = []
            for old in pair:
                new = self._allocate(old[None])
                held = old.unflatten(1, sizes)[:, :, kept]  # [kv_heads, rows, kept, e]
                new.unflatten(1, (self.rows, capacity))[:, :, : held.shape[2]] = held
                moved.append(new)
            self._layers[layer] = (moved[0], moved[1])

    def copy(
        self,
        source: int,
        row: int,
        count: int,
    ) -> None:
        """Copies the first `count` committed positions of a row to another: a prefix of both."""
        exist = 0 <= source < self.rows and 0 <= row < self.rows
        if not exist or not 0 <= count <= self.lengths[source]:
            raise ValueError(
                f"source={source}, row={row}, count={count}: not among {self.rows} rows, or not committed"
            )
        begin = source * self.capacity
        goal = row * self.capacity
        for pair in self._layers.values():
            for buffer in pair:
                buffer[:, goal : goal + count] = buffer[:, begin : begin + count]
        self.lengths[row] = count
        self.shifts[row] = self.shifts[source]

    def open(self, new: Announced) -> None:
        """Announces the next forward.

        Args:
            new: per part of the packed forward, the cache row and its new tokens: a count of
                chained tokens, the parents of tree nodes below a root, or the layout of a tree that
                continues to grow. Each row at most once.

        Raises:
            UserError: a row's tokens do not fit.
            ValueError: a row that does not exist or occurs twice.
        """
        self.lay_out(new)
        self._slots = None
        self._plan = None
        self._cpu_plan = None
        self._planned = False
        for _, layout in self.opened:
            if layout.end > self.capacity:
                raise UserError(
                    f"the key/value cache holds {self.capacity} positions, but {layout.prefix_len} + "
                    f"{layout.held + layout.count} are needed; use a smaller tree or fewer new tokens"
                )

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **form: Unpack[AttentionForm],
    ) -> Tensor:
        """Stores the new keys and values of a layer and attends; see `AttentionContext.attend`.

        All tensors are packed: [1, heads, N, e]. Of a single part there may be fewer queries: its
        last tokens'.
        """
        fresh = (query, key, value)  # in their own dtype
        if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
            raise TypeError(
                f"query {query.dtype}, key {key.dtype} and value {value.dtype} must share a float dtype"
            )
        # The CPU kernels compute in float32.
        if query.device.type == "cpu" and query.dtype.itemsize < 4:
            query = query.float()
            key = key.float()
            value = value.float()
        keys, values = self._buffers(layer, key, value)

        if query.shape[2] != key.shape[2]:
            counts = [layout.count for _, layout in self.opened]
            if counts != [key.shape[2]] or query.shape[2] > key.shape[2]:
                raise ValueError(
                    f"{query.shape[2]} queries of {key.shape[2]} keys: parts have {counts} new tokens"
                )
        # The CPU kernel stores and attends in one call.
        elif query.device.type == "cpu":
            plan = self.cpu_plan()
            if plan is not None and plan.serves(query, keys, values):
                out = plan.attend(
                    query,
                    keys,
                    values,
                    new=(key, value),
                    **form,
                )
                return out.to(fresh[0].dtype)

        self.write(layer, key, value)
        return self._attend_rows(layer, fresh, form).transpose(1, 2)

    def write(
        self,
        layer: int,
        key: Tensor,
        value: Tensor,
    ) -> None:
        """Stores keys and values [1, kv_heads, N, e] of the announced tokens."""
        keys, values = self._buffers(layer, key, value)
        if len(self.opened) == 1:
            row, layout = self.opened[0]
            end = row * self.capacity + layout.end
            begin = end - layout.count
            keys[:, begin:end] = key[0]
            values[:, begin:end] = value[0]
        else:
            self.store(layer, self._new_slots(key.device), key, value)

    def _buffers(
        self,
        layer: int,
        key: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, allocated for the first ones [1, kv_heads, n, e]."""
        if layer not in self._layers:
            self._layers[layer] = (self._allocate(key), self._allocate(value))
        return self._layers[layer]

    def cpu_plan(self) -> CpuPlan | None:
        """The CPU kernel's plan of the announced forward; None if the kernel does not serve it."""
        if not self._planned:
            parts = [(row * self.capacity, layout) for row, layout in self.opened]
            self._cpu_plan = CpuPlan.build(parts)
            self._planned = True
        return self._cpu_plan

    def addresses(self, shapes: list[tuple[int, int]]) -> Addresses:
        """Where the buffers are.

        Args:
            shapes: (kv_heads, head_dim) per layer, on the CPU. Missing buffers are allocated.

        Raises:
            ValueError, TypeError: a buffer has another form.
        """
        if self._addresses is None or self._addresses.shapes != shapes:
            slots = self.rows * self.capacity
            table = np.empty((len(shapes), 5), dtype=np.int64)
            pairs: list[tuple[Tensor, Tensor]] = []
            for layer, (heads, width) in enumerate(shapes):
                like = torch.empty((1, heads, 0, width))
                keys, values = self._buffers(layer, like, like)
                for buffer in (keys, values):
                    if len(buffer) != heads:
                        raise ValueError(f"keys and values have {len(buffer)} heads, not {heads}")
                    # Of a view the heads may stand apart.
                    check("keys and values", buffer[0], (slots, width), self._stored(like))
                table[layer] = (
                    keys.data_ptr(),
                    values.data_ptr(),
                    keys.stride(0),
                    values.stride(0),
                    keys.dtype == torch.bfloat16,
                )
                pairs.append((keys, values))
            self._addresses = Addresses(
                table,
                table.ctypes.data,
                slots,
                list(shapes),
                pairs,
            )
        return self._addresses

    def store(
        self,
        layer: int,
        slots: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> None:
        """Writes keys and values of a layer.

        Args:
            slots: [N] int64 on the common axis, row * capacity + slot.
            key, value: [1, kv_heads, N, e].
        """
        keys, values = self._layers[layer]
        keys.index_copy_(1, slots, key[0].to(keys.dtype))
        values.index_copy_(1, slots, value[0].to(values.dtype))

    def by_row(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views [rows, kv_heads, capacity, e] of a layer's keys and values."""
        keys, values = self._layers[layer]
        sizes = (self.rows, self.capacity)
        keys = keys.unflatten(1, sizes).transpose(0, 1)
        values = values.unflatten(1, sizes).transpose(0, 1)
        return keys, values

    def _attend_rows(
        self,
        layer: int,
        new: tuple[Tensor, Tensor, Tensor],
        form: AttentionForm,
    ) -> Tensor:
        """Attention of packed queries, on a GPU by one kernel for all rows, elsewhere row by row.

        Args:
            new: queries [1, heads, N, e], keys and values [1, kv_heads, N, e] of the new tokens,
                which are stored already.
        """
        query, new_keys, new_values = new
        dtype = query.dtype
        keys, values = self._layers[layer]
        opened = self.opened
        few = all(layout.count <= _KERNEL_TOKENS and not layout.held for _, layout in opened)
        if query.shape[2] < new_keys.shape[2]:
            ((row, layout),) = opened
            opened = [(row, layout.last(query.shape[2]))]
        elif _on_gpu(query) and few:
            # A spread target has layers on several devices.
            if self._plan is None or self._plan_device != query.device:
                self._plan_device = query.device
                self._plan = PackedPlan.build(opened, query.device)
            keys, values = self.by_row(layer)
            return packed_tree_attention(
                query,
                keys,
                values,
                self._plan,
                **form,
            )

        outs = []
        begin = 0  # of the row's tokens among the packed ones
        for row, layout in opened:
            own = slice(begin, begin + layout.count)
            begin += layout.count
            queries = query[:, :, own]
            key = new_keys[:, :, own]
            value = new_values[:, :, own]
            # Without a prefix the new tokens see only each other: no copy, no other dtype.
            if layout.prefix_len + layout.held > 0:
                first = row * self.capacity
                seen = slice(first, first + layout.end)
                wide = torch.float32 if keys.is_cpu else keys.dtype
                queries = queries.to(wide)
                key = keys[None, :, seen].to(wide)
                value = values[None, :, seen].to(wide)
            outs.append(tree_attention(queries, key, value, layout, **form).to(dtype))
        return cat(outs, dim=2)

    def _new_slots(self, device: torch.device) -> Tensor:
        """[N] int64 slots of the announced tokens on the common axis; the same for all layers."""
        if self._slots is None:
            parts = []
            for row, layout in self.opened:
                start = row * self.capacity + layout.prefix_len + layout.held
                parts.append(torch.arange(start, start + layout.count))
            self._slots = torch.cat(parts).to(device)
        # The layers of a spread target are on several devices.
        return self._slots.to(device)

    def _allocate(self, like: Tensor) -> Tensor:
        """An uninitialized buffer [kv_heads, rows * capacity, e] for keys like [1, kv_heads, n, e]."""
        _, heads, _, width = like.shape
        self._mover = None  # it knows the addresses of the old buffers
        return torch.empty(
            (heads, self.rows * self.capacity, width),
            dtype=self._stored(like),
            device=like.device,
        )

    def _stored(self, key: Tensor) -> torch.dtype:
        """The dtype of buffers for keys like this one."""
        if not key.is_cpu:
            return key.dtype
        if self.dtype == torch.bfloat16:
            return self.dtype
        return key.dtype if key.dtype.itemsize > 2 else torch.float32

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keeps the given tokens of each part of the last forward behind L, in path order.

        Args:
            kept: per part the tokens' indices, ascending.
        """
        moves: list[tuple[int, list[int]]] = []
        for (row, layout), indices in zip(self.opened, kept, strict=True):
            # The indices ascend, so their ends tell whether all are within the part.
            if indices and not 0 <= indices[0] <= indices[-1] < layout.held + layout.count:
                raise ValueError(
                    f"kept={list(indices)} must be among the {layout.held + layout.count} tokens of row {row}"
                )
            begin = row * self.capacity + layout.prefix_len
            # The first tokens may be in place already.
            moved = 0
            while moved < len(indices) and indices[moved] == moved:
                moved += 1
            if moved < len(indices):
                moves.append((begin + moved, [begin + index for index in indices[moved:]]))
            self.lengths[row] += len(indices)
        if moves:
            if self._mover is None:
                self._mover = SlotMover(chain.from_iterable(self._layers.values()))
            self._mover.move(moves)


class SlotMover:
    """Copies slots to other slots in each of several buffers, in place.

    Args:
        buffers: [kv_heads, slots, e] each, the last dimension contiguous.

    Raises:
        ValueError: a buffer of another form, or (`move`) moves beyond the slots, not ascending, or
            of common slots.
    """

    def __init__(self, buffers: Iterable[Tensor]):
        alike: dict[object, list[Tensor]] = defaultdict(list)  # those that one launch can move
        for buffer in buffers:
            if buffer.dim() != 3 or (buffer.stride(2) != 1 and buffer.shape[2] > 1):
                raise ValueError(
                    f"a buffer has shape {list(buffer.shape)} and strides {buffer.stride()}, must be "
                    "[kv_heads, slots, e] with e contiguous"
                )
            alike[buffer.device, buffer.shape, buffer.stride(), buffer.dtype].append(buffer)
        self.slots = min((group[0].shape[1] for group in alike.values()), default=0)
        self._groups: list[tuple[list[Tensor], np.ndarray]] = []  # buffers, their addresses
        for group in alike.values():
            addresses = np.array([buffer.data_ptr() for buffer in group], dtype=np.int64)
            self._groups.append((group, addresses))

    def move(self, moves: Moves) -> None:
        """Copies paths.

        Args:
            moves: (first goal, sources) per path; the sources go to the slots from the first goal
                on. Sources ascend and no source is below its goal; paths have no slots in common.
        """
        moves = [(first, sources) for first, sources in moves if len(sources)]
        if not moves or not self._groups:
            return
        touched = set[int]()  # slots of earlier paths
        for first, sources in moves:
            own = set(range(first, first + len(sources)))
            own.update(sources)
            rising = sources[0] >= first and all(a < b for a, b in pairwise(sources))
            if first < 0 or sources[-1] >= self.slots or not rising or own & touched:
                raise ValueError(
                    f"move of {list(sources)} to {first}: sources must ascend, lie at or above their goals and below the "
                    f"{self.slots} slots, and not be of another path"
                )
            touched |= own
        for buffers, addresses in self._groups:
            if buffers[0].is_cuda and has_triton():
                _launch(buffers[0], addresses, moves)
            elif buffers[0].device.type == "cpu" and cpu_kernels() is not None:
                _copy(buffers[0], addresses, moves)
            else:
                _gather(buffers, moves)


def _pairs(moves: Moves) -> list[tuple[int, int]]:
    """Goal and source of every slot that moves, path after path."""
    return [pair for first, sources in moves for pair in enumerate(sources, first)]


def _gather(buffers: Sequence[Tensor], moves: Moves) -> None:
    goals, sources = torch.tensor(_pairs(moves), device=buffers[0].device).unbind(1)
    for buffer in buffers:
        buffer.index_copy_(1, goals, buffer.index_select(1, sources))


def _copy(
    like: Tensor,
    addresses: np.ndarray,
    moves: Moves,
) -> None:
    # In the order of the pairs no slot is overwritten before it is read: sources ascend, goals lie
    # below.
    pairs = _pairs(moves)
    numbers = array("q", chain.from_iterable(pairs))
    size = like.element_size()
    heads, _, width = like.shape
    built_kernels().move_slots(
        addresses.ctypes.data,
        len(addresses),
        heads,
        like.stride(0) * size,  # bytes, as the next two
        like.stride(1) * size,
        width * size,
        address_of(numbers),
        len(pairs),
    )


def _launch(
    like: Tensor,
    addresses: np.ndarray,
    moves: Moves,
) -> None:
    from drafttrain.ops.tree_attention_kernels import move_paths

    count = len(addresses)
    longest = max(len(sources) for _, sources in moves)
    heads, _, width = like.shape
    path = 1 << (longest - 1).bit_length()  # padded to a power of two
    # One upload: the addresses, then a row per path of its first goal and its sources.
    numbers = np.full(count + len(moves) * (path + 1), -1, dtype=np.int64)
    numbers[:count] = addresses
    table = numbers[count:].reshape(len(moves), path + 1)
    for row, (first, sources) in zip(table, moves, strict=True):
        row[0] = first
        row[1 : len(sources) + 1] = sources
    # Pageable memory is staged before the call returns.
    uploaded = torch.from_numpy(numbers).to(like.device, non_blocking=True)
    run_kernel(
        move_paths,
        (count * heads, len(moves)),
        uploaded,
        uploaded[count:],
        like,
        like.stride(0),
        like.stride(1),
        HEADS=heads,
        WIDTH=width,
        PADDED=1 << (width - 1).bit_length(),  # powers of two, as Triton needs
        PATH=path,
    )
