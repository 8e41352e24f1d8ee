"""Decoding with a model's own forward and its own cache, where our attention does not apply.

A recurrent state cannot forget a token. So a row holds a snapshot, the model's cache at a committed
position, and the tokens committed `since`. A pass reads them again before root and tree, from
copies of the snapshot, a batch row per path:

    snapshot      x0 .. x5                                 committed: x0 .. x7, root r, tree  a - b
    since         x6 x7                                                                         \\ c
    batch row 0   x0 .. x5 | x6 x7 r a b                   from a copy of the snapshot
    batch row 1   x0 .. x5 | x6 x7 r a c
    accepted a c           batch row 1 becomes the snapshot: everything that it read is committed
    accepted a             since = x6 x7 r a; or, if the cache can drop its last tokens, row 0 without b becomes the snapshot

Rejected tokens and the padding on the right of shorter paths touch copies only. Rows without a tree
share one batched forward: states are stacked, keys and values padded on the left under a mask.
`Continuation.prove` finds what a model's cache can do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from drafttrain.batch import TargetOutput
from drafttrain.ops.tree_attention import TreeLayout
from drafttrain.ops.tree_cache import CacheRows
from drafttrain.target.own_cache import Continuation, leaves_of
from drafttrain.target.proof import ProvenModel

# Most tokens that a pass reads again before the snapshot moves on, which costs a pass over them.
_MOST_SINCE = 16


@dataclass(eq=False)
class _Held:
    """The cache behind rows that were read together."""

    cache: Any  # the model's
    rows: list[int]  # in the cache's order
    lengths: list[int]  # tokens of each row, behind padding to the longest


class _Part(NamedTuple):
    """A part of the announced forward."""

    row: int
    layout: TreeLayout  # of the new tokens
    paths: list[list[int]]  # as indices of new tokens; 0 is the root
    drafted: bool  # whether tokens may be rejected


class SnapshotCache(CacheRows):
    """The caches of several sequences on the snapshot path, with the interface of `TreeCache`.

    Args:
        target: its `continuation` is proven.
        capacity: positions per row; nothing is allocated for them.
        rows: sequences held at a time.

    Attributes:
        passes: number of forwards by purpose: "read" (new tokens), "snapshot" (a snapshot that
            moves on).
    """

    def __init__(
        self,
        target: ProvenModel,
        capacity: int,
        rows: int = 1,
    ):
        super().__init__(capacity, rows)
        self.target = target
        self.how: Continuation = target.continuation
        self.passes: Counter[str] = Counter()
        self._held: dict[int, _Held] = {}  # by row
        self._since: list[list[int]] = [[] for _ in range(rows)]
        self._open: list[_Part] = []
        # By row, until `commit`: the cache behind its paths, or one behind each, and its tokens.
        self._read: dict[int, tuple[list[Any], list[int]]] = {}

    @property
    def nbytes(self) -> int:
        total = 0
        shared = set()  # rows may share a cache
        for held in self._held.values():
            if id(held) in shared:
                continue
            shared.add(id(held))
            for leaf in leaves_of(held.cache):
                if isinstance(leaf, Tensor):
                    total += leaf.nbytes
        return total

    def __str__(self) -> str:
        return f"the model's own cache {self.nbytes / 2**20:,.1f} MiB ({self.counted}, {self.how})"

    def clear(self, row: int) -> None:
        super().clear(row)
        self._since[row] = []
        self._held.pop(row, None)

    def reserve(self, capacity: int) -> None:
        """Lets every row grow to `capacity` positions."""
        self.capacity = max(self.capacity, capacity)

    def copy(
        self,
        source: int,
        row: int,
        count: int,
    ) -> None:
        """Fills a row with the `count` committed tokens of another row.

        Raises:
            ValueError: a row that does not exist, or not all tokens: a state cannot go back.
        """
        exist = 0 <= source < self.rows and 0 <= row < self.rows
        if not exist or count != self.lengths[source]:
            raise ValueError(
                f"source={source}, row={row}, count={count}: not among {self.rows} rows, or not all tokens"
            )
        self.clear(row)
        self.lengths[row] = count
        self.shifts[row] = self.shifts[source]
        self._since[row] = list(self._since[source])
        if self.how.form is not None and source in self._held:
            held = self._alone(source)
            self._held[row] = _Held(
                self.how.form.copy(held.cache),
                [row],
                list(held.lengths),
            )

    def open(self, new: Sequence[tuple[int, Sequence[int] | int]]) -> None:
        """Announces the next forward.

        Args:
            new: per part, the row and its new tokens: a count of tokens that are all kept, or the
                parents of the tree nodes below a root. Each row at most once.

        Raises:
            ValueError: a row that does not exist or occurs twice.
        """
        self.lay_out(new)
        self._open = []
        self._read = {}
        for row, layout in self.opened:
            paths = [list(range(layout.count))]
            if layout.parents is not None:
                paths = _paths(layout.parents)
            self._open.append(_Part(row, layout, paths, drafted=bool(layout.parents)))

    def forward(self, input_ids: Tensor, layers: Sequence[int]) -> TargetOutput:
        """Reads the announced tokens [1, N], row after row; returns states in this order."""
        parts = input_ids[0].split([part.layout.count for part in self._open])

        # Rows that read one token behind a snapshot share a forward, where the model allows it.
        rows: list[int] = []
        singles: list[Tensor] = []  # [1] each
        if self.how.batched:
            for part, ids in zip(self._open, parts, strict=True):
                if part.layout.count == 1 and part.row in self._held:
                    rows.append(part.row)
                    singles.append(ids)
        if len(rows) == 1:  # nothing to share
            rows = []
        if self.how.name:
            # Behind its snapshot, a row catches up to share a forward, or once that is too much to
            # repeat.
            for part in self._open:
                since = len(self._since[part.row])
                if part.row in rows:
                    behind = since > 0
                else:
                    behind = part.drafted and since > _MOST_SINCE
                if behind:
                    self._move_on(part.row, input_ids)
        outs: dict[int, TargetOutput] = {}
        if rows:
            outs = self._step(rows, torch.stack(singles), layers)

        features = []
        last_hidden = []
        for part, ids in zip(self._open, parts, strict=True):
            out = outs.get(part.row)
            if out is None:
                out = self._go_on(part, ids, layers)
            features.append(out.features)
            last_hidden.append(out.last_hidden)
        return TargetOutput(torch.cat(features, 1), torch.cat(last_hidden, 1))

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keeps the given new tokens of each part of the last forward, in path order.

        Args:
            kept: per part the tokens' indices; all of them for a part that was not drafted.
        """
        for part, given in zip(self._open, kept, strict=True):
            row = part.row
            indices = list(given)
            if not part.drafted and len(indices) != part.layout.count:
                raise ValueError(
                    f"kept={indices} must be all {part.layout.count} tokens of row {row}"
                )
            self.lengths[row] += len(indices)
            if row not in self._read:  # its cache moved on already
                continue
            caches, tokens = self._read.pop(row)
            # Rejected tokens and padding behind the kept ones.
            spare = max(map(len, part.paths)) - len(indices)
            form = self.how.form
            apart = len(caches) == len(part.paths)  # a cache per path
            droppable = not spare or self.how.crops
            if form is not None and droppable and (apart or form.fits(caches[0])):
                # The path that begins with the kept tokens becomes the snapshot.
                index = 0
                while part.paths[index][: len(indices)] != indices:
                    index += 1
                if apart:
                    cache = caches[index]
                else:
                    cache = form.row(
                        caches[0],
                        index,
                        self.lengths[row] + spare,
                        0,
                    )
                self._hold(row, self._trimmed(cache, spare))
            else:
                self._since[row] += [tokens[i] for i in indices]

    def adopt(self, row: int, own: ModelOutput) -> None:
        """Takes what the body returned for a row's announced tokens, which another forward read."""
        length = self.lengths[row] + self._open[0].layout.count
        cache = self.how.cache_of(own)
        self._held[row] = _Held(self._trimmed(cache), [row], [length])

    def _hold(self, row: int, cache: Any) -> None:
        """Makes a cache behind all committed tokens the row's snapshot."""
        self._held[row] = _Held(cache, [row], [self.lengths[row]])
        self._since[row] = []

    # -- reading -----------------------------------------------------------------------------------

    def _go_on(
        self,
        part: _Part,
        ids: Tensor,
        layers: Sequence[int],
    ) -> TargetOutput:
        """States [1, n, ...] of a row's new tokens [n]."""
        row = part.row
        since = self._since[row]
        form = self.how.form
        # [paths, since + longest path]: the tokens since the snapshot, and each path's.
        most = max(map(len, part.paths))
        # By the root: nobody reads that.
        padded = [path + [0] * (most - len(path)) for path in part.paths]
        table = torch.tensor(padded, device=ids.device)
        before = torch.tensor(since, dtype=ids.dtype, device=ids.device)
        paths = torch.cat((before.expand(len(table), len(since)), ids[table]), dim=1)

        starts: list[Any] = [None]
        read = [0]
        if form is not None and row in self._held:
            held = self._alone(row)
            # Nothing is copied where all tokens are kept, or those that are not can be dropped.
            copies = part.drafted and not (self.how.crops and len(table) == 1)
            count = 1  # paths that read together
            if form.fits(held.cache):
                count = len(table)
            if copies:
                starts = [form.copy(held.cache, count) for _ in range(len(table) // count)]
            else:
                starts = [held.cache]
            read = held.lengths
        features = []
        last_hidden = []
        caches = []
        for start, some in zip(starts, paths.chunk(len(starts)), strict=True):
            out, cache = self.how.go_on(self.target, start, some, layers, read, [self.shifts[row]])
            self.passes["read"] += 1
            features.append(out.features)
            last_hidden.append(out.last_hidden)
            caches.append(cache)
        if part.drafted or form is None:
            self._read[row] = (caches, ids.tolist())
        else:
            length = self.lengths[row] + part.layout.count
            self._held[row] = _Held(self._trimmed(caches[0]), [row], [length])
            self._since[row] = []

        # A node's states are the same on every path that contains it: take those of the last path.
        at = [(0, 0)] * len(ids)
        for i, path in enumerate(part.paths):
            for j, node in enumerate(path):
                at[node] = (i, len(since) + j)
        rows, columns = torch.tensor(at, device=ids.device).unbind(1)  # [n] each
        return TargetOutput(
            torch.cat(features)[rows, columns][None],
            torch.cat(last_hidden)[rows, columns][None],
        )

    def _step(
        self,
        rows: list[int],
        ids: Tensor,
        layers: Sequence[int],
    ) -> dict[int, TargetOutput]:
        """States [1, 1, ...] by row; each row reads one token, ids [rows, 1], in one forward."""
        held = self._held[rows[0]]
        # Rows that are still in this cache, and their places; others ended or continue apart.
        present = []
        places = []
        for i, row in enumerate(held.rows):
            if self._held.get(row) is held:
                present.append(row)
                places.append(i)
        left = len(held.rows) - len(present)
        # A new common cache is a copy of everything: make one only once an eighth of the rows left.
        if present != rows or 8 * left > len(held.rows):
            held = self._together(rows)
            places = list(range(len(rows)))
        fed = ids.new_zeros(len(held.rows), 1)  # rows that left read token 0
        fed[places] = ids
        out, cache = self.how.go_on(
            self.target,
            held.cache,
            fed,
            layers,
            held.lengths,
            [self.shifts[row] for row in held.rows],
        )
        self.passes["read"] += 1
        held.cache = self._trimmed(cache)
        held.lengths = [length + 1 for length in held.lengths]
        outs: dict[int, TargetOutput] = {}
        for row, i in zip(rows, places, strict=True):
            outs[row] = TargetOutput(out.features[i : i + 1], out.last_hidden[i : i + 1])
        return outs

    def _move_on(self, row: int, like: Tensor) -> None:
        """Moves a row's snapshot to its last committed token."""
        since = torch.tensor(
            [self._since[row]],
            dtype=like.dtype,
            device=like.device,
        )
        cache = None
        read = [0]
        if row in self._held:
            held = self._alone(row)
            cache = held.cache
            read = held.lengths
        _, cache = self.how.go_on(self.target, cache, since, (), read, [self.shifts[row]])
        self.passes["snapshot"] += 1
        self._hold(row, self._trimmed(cache))

    def _trimmed(self, cache: Any, spare: int = 0) -> Any:
        """The cache without its last `spare` tokens, and without what a window no longer shows."""
        if self.how.crops:
            cache.crop(-spare)
        return cache

    def _alone(self, row: int) -> _Held:
        """The row's cache as one that no other row shares."""
        held = self._held[row]
        if held.rows != [row] and self.how.form is not None:
            i = held.rows.index(row)
            length = held.lengths[i]
            padding = max(held.lengths) - length
            cache = self.how.form.row(held.cache, i, length, padding)
            held = _Held(cache, [row], [length])
            self._held[row] = held
        return held

    def _together(self, rows: list[int]) -> _Held:
        """One cache of several rows, each behind padding to the longest."""
        form = self.how.form
        assert form is not None
        caches = []
        lengths = []
        for row in rows:
            held = self._alone(row)
            caches.append(held.cache)
            lengths.append(held.lengths[0])
        together = _Held(form.stack(caches, lengths), list(rows), lengths)
        for row in rows:
            self._held[row] = together
        return together


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """The paths from root to leaves of a tree, as indices of its new tokens.

    The root is 0, node i is i + 1.
    """
    paths = [[0]]
    for node, parent in enumerate(parents):
        paths.append([*paths[parent + 1], node + 1])
    inner = {parent + 1 for parent in parents}
    return [path for i, path in enumerate(paths) if i not in inner]
