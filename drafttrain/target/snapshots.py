"""Decoding with a model's own forward and its own cache, for models that our attention cannot
serve.

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

from drafttrain.batch import TargetOutput
from drafttrain.ops.tree_attention import TreeLayout
from drafttrain.target.own_cache import Continuation, leaves_of
from drafttrain.target.proof import ProvenModel

# Most tokens that a pass reads again before the snapshot moves on, which costs a pass over them.
_MOST_SINCE = 16


@dataclass(eq=False)
class _Held:
    """The cache behind rows that were read together.

    Attributes:
        cache: the model's. rows: whose rows it has; lengths: tokens of each, behind padding to the
            longest.
    """

    cache: Any
    rows: list[int]
    lengths: list[int]


class _Part(NamedTuple):
    """A part of the announced forward: a row, its new tokens' layout, and its paths as indices of
    new tokens (0 is the root). drafted: whether tokens may be rejected.
    """

    row: int
    layout: TreeLayout
    paths: list[list[int]]
    drafted: bool


class SnapshotCache:
    """The caches of several sequences on the snapshot path; offers the engine what `TreeCache`
    does.

    Args:
        target: whose `continuation` is proven.
        capacity: positions per row; nothing is allocated for them. rows: sequences held at a time.

    Attributes:
        lengths: committed tokens of each row.
        passes: forwards by what they were for: "read" (new tokens), "snapshot" (a snapshot that
            moves on).
    """

    def __init__(self, target: ProvenModel, capacity: int, rows: int = 1):
        self.target = target
        self.capacity = capacity
        self.rows = rows
        self.how: Continuation = target.continuation
        self.lengths = [0] * rows
        self.passes: Counter[str] = Counter()
        self._held: dict[int, _Held] = {}  # by row
        self._since: list[list[int]] = [[] for _ in range(rows)]
        self._open: list[_Part] = []
        # By row, until `commit`: the cache behind its paths, or one behind each, and its tokens.
        self._read: dict[int, tuple[list[Any], list[int]]] = {}

    @property
    def nbytes(self) -> int:
        held = {id(held): held for held in self._held.values()}.values()
        return sum(
            leaf.nbytes for one in held for leaf in leaves_of(one.cache) if isinstance(leaf, Tensor)
        )

    def __str__(self) -> str:
        rows = "1 row"
        if self.rows != 1:
            rows = f"{self.rows} rows"
        return f"the model's own cache {self.nbytes / 2**20:,.1f} MiB ({rows}, {self.how})"

    def clear(self, row: int) -> None:
        """Empties a row for its next sequence."""
        self.lengths[row], self._since[row] = 0, []
        self._held.pop(row, None)

    def reserve(self, capacity: int) -> None:
        """Lets every row grow to `capacity` positions."""
        self.capacity = max(self.capacity, capacity)

    def copy(self, source: int, row: int, count: int) -> None:
        """Fills a row with the `count` committed tokens of another row.

        Raises:
            ValueError: a row that does not exist, or not all tokens: a state cannot go back.
        """
        if not (0 <= source < self.rows and 0 <= row < self.rows and count == self.lengths[source]):
            raise ValueError(
                f"source={source}, row={row}, count={count}: not among {self.rows} rows, or not all tokens"
            )
        self.clear(row)
        self.lengths[row], self._since[row] = count, list(self._since[source])
        if self.how.form is not None and source in self._held:
            held = self._alone(source)
            self._held[row] = _Held(self.how.form.copy(held.cache), [row], list(held.lengths))

    def open(self, new: Sequence[tuple[int, Sequence[int] | int]]) -> list[TreeLayout]:
        """Announces the next forward.

        Args:
            new: per part, the row and its new tokens: a count of tokens that are all kept, or the
                parents of the tree nodes below a root. Each row at most once.

        Raises:
            ValueError: a row that does not exist or occurs twice.
        """
        named = [row for row, _ in new]
        if len(set(named)) < len(named) or not all(0 <= row < self.rows for row in named):
            raise ValueError(f"rows={named} must be distinct numbers from 0 to {self.rows - 1}")
        self._open = []
        self._read = {}
        for row, shape in new:
            length = self.lengths[row]
            if isinstance(shape, int):
                self._open.append(
                    _Part(row, TreeLayout(length, count=shape), [list(range(shape))], False)
                )
            else:
                self._open.append(
                    _Part(row, TreeLayout(length, shape), _paths(shape), len(shape) > 0)
                )
        return [part.layout for part in self._open]

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """[1, N] int64 position ids of the announced forward."""
        return torch.cat([part.layout.positions() for part in self._open], dim=1).to(device)

    def forward(self, input_ids: Tensor, layers: Sequence[int]) -> TargetOutput:
        """Reads the announced tokens [1, N], row after row; returns states in this order."""
        parts = list(
            zip(
                self._open,
                input_ids[0].split([part.layout.count for part in self._open]),
                strict=True,
            )
        )
        single = [
            (part.row, ids)
            for part, ids in parts
            if part.layout.count == 1 and part.row in self._held
        ]
        if self.how.batched and len(single) > 1:
            rows = [row for row, _ in single]
        else:
            rows = []
        for part in self._open:
            most = 0 if part.row in rows else _MOST_SINCE
            if (
                self.how.name
                and (part.drafted or part.row in rows)
                and len(self._since[part.row]) > most
            ):
                self._move_on(part.row, input_ids)
        outs: dict[int, TargetOutput] = {}
        if rows:
            outs = self._step(rows, torch.stack([ids for _, ids in single]), layers)
        made = [
            outs[part.row] if part.row in outs else self._go_on(part, ids, layers)
            for part, ids in parts
        ]
        return TargetOutput(
            *(
                torch.cat([getattr(out, key) for out in made], 1)
                for key in ("features", "last_hidden")
            )
        )

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keeps, per part of the last forward, the given new tokens, in path order; all of a part
        that was not drafted.
        """
        for part, indices in zip(self._open, map(list, kept), strict=True):
            row = part.row
            if not part.drafted and len(indices) != part.layout.count:
                raise ValueError(
                    f"kept={indices} must be all {part.layout.count} tokens of row {row}"
                )
            self.lengths[row] += len(indices)
            if row not in self._read:  # its cache moved on already
                continue
            caches, tokens = self._read.pop(row)
            spare = max(map(len, part.paths)) - len(
                indices
            )  # rejected tokens and padding behind the kept ones
            form = self.how.form
            apart = len(caches) == len(part.paths)
            if (
                form is not None
                and (not spare or self.how.crops)
                and (apart or form.fits(caches[0]))
            ):
                index = next(
                    i for i, path in enumerate(part.paths) if path[: len(indices)] == indices
                )
                if apart:
                    cache = caches[index]
                else:
                    cache = form.row(caches[0], index, self.lengths[row] + spare, 0)
                self._held[row], self._since[row] = (
                    _Held(self._trimmed(cache, spare), [row], [self.lengths[row]]),
                    [],
                )
            else:
                self._since[row] += [tokens[i] for i in indices]

    # -- reading -----------------------------------------------------------------------------------

    def _go_on(self, part: _Part, ids: Tensor, layers: Sequence[int]) -> TargetOutput:
        """States [1, n, ...] of a row's new tokens [n]."""
        row, since, form = part.row, self._since[part.row], self.how.form
        most = max(map(len, part.paths))
        table = torch.tensor(
            [path + [0] * (most - len(path)) for path in part.paths],
            device=ids.device,
        )
        before = torch.tensor(since, dtype=ids.dtype, device=ids.device).expand(
            len(table), len(since)
        )
        paths = torch.cat((before, ids[table]), dim=1)
        starts: list[Any] = [None]
        read = [0]
        if form is not None and row in self._held:
            held = self._alone(row)
            # Nothing is copied where all tokens are kept, or those that are not can be dropped.
            copies = part.drafted and not (self.how.crops and len(table) == 1)
            # paths that read together
            count = 1
            if form.fits(held.cache):
                count = len(table)
            if copies:
                starts = [form.copy(held.cache, count) for _ in range(len(table) // count)]
            else:
                starts = [held.cache]
            read = held.lengths
        outs = []
        caches = []
        for start, some in zip(starts, paths.chunk(len(starts)), strict=True):
            out, cache = self.how.go_on(self.target, start, some, layers, read)
            self.passes["read"] += 1
            outs.append(out)
            caches.append(cache)
        if part.drafted or form is None:
            self._read[row] = caches, ids.tolist()
        else:
            length = self.lengths[row] + part.layout.count
            self._held[row], self._since[row] = _Held(self._trimmed(caches[0]), [row], [length]), []
        at = {
            node: (i, len(since) + j)
            for i, path in enumerate(part.paths)
            for j, node in enumerate(path)
        }
        rows, columns = torch.tensor(
            [at[node] for node in range(len(ids))],
            device=ids.device,
        ).unbind(1)
        states = (
            torch.cat([getattr(out, key) for out in outs]) for key in ("features", "last_hidden")
        )
        return TargetOutput(*(state[rows, columns][None] for state in states))

    def _step(self, rows: list[int], ids: Tensor, layers: Sequence[int]) -> dict[int, TargetOutput]:
        """States [1, 1, ...] by row, each of which reads one token, ids [rows, 1], in one forward."""
        held = self._held[rows[0]]
        left = [
            i for i, row in enumerate(held.rows) if self._held.get(row) is not held
        ]  # these go on apart, or ended
        if [row for i, row in enumerate(held.rows) if i not in left] != rows or 8 * len(left) > len(
            held.rows
        ):
            held = self._together(rows)
            left = []
        places = [i for i in range(len(held.rows)) if i not in left]
        fed = ids.new_zeros(len(held.rows), 1)
        fed[places] = ids
        out, cache = self.how.go_on(self.target, held.cache, fed, layers, held.lengths)
        self.passes["read"] += 1
        held.cache, held.lengths = self._trimmed(cache), [length + 1 for length in held.lengths]
        return {
            row: TargetOutput(out.features[i : i + 1], out.last_hidden[i : i + 1])
            for row, i in zip(rows, places, strict=True)
        }

    def _move_on(self, row: int, like: Tensor) -> None:
        """Moves a row's snapshot to its last committed token."""
        since = torch.tensor([self._since[row]], dtype=like.dtype, device=like.device)
        held = self._held.get(row)
        if held is None:
            cache = None
            read = [0]
        else:
            cache = self._alone(row).cache
            read = self._alone(row).lengths
        _, cache = self.how.go_on(self.target, cache, since, (), read)
        self.passes["snapshot"] += 1
        self._held[row], self._since[row] = (
            _Held(self._trimmed(cache), [row], [self.lengths[row]]),
            [],
        )

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
            cache = self.how.form.row(
                held.cache,
                i,
                held.lengths[i],
                max(held.lengths) - held.lengths[i],
            )
            held = self._held[row] = _Held(cache, [row], [held.lengths[i]])
        return held

    def _together(self, rows: list[int]) -> _Held:
        """One cache of several rows, each behind padding to the longest."""
        alone = [self._alone(row) for row in rows]
        form = self.how.form
        assert form is not None
        lengths = [held.lengths[0] for held in alone]
        together = _Held(form.stack([held.cache for held in alone], lengths), list(rows), lengths)
        self._held |= dict.fromkeys(rows, together)
        return together


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """The paths from root to leaves of a tree, as indices of its new tokens: the root is 0, node i
    is i + 1.
    """
    paths = [[0]]
    for node, parent in enumerate(parents):
        paths.append([*paths[parent + 1], node + 1])
    inner = {parent + 1 for parent in parents}
    return [path for i, path in enumerate(paths) if i not in inner]
