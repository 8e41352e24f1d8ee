"""Decoding with a model's own forward and its own cache, for models that our attention cannot serve.

A recurrent state cannot forget a token. So a row holds a snapshot, the model's cache at a committed position, and the tokens
committed `since`. A pass reads them again before root and tree, from copies of the snapshot, a batch row per path:

    snapshot      x0 .. x5                                 committed: x0 .. x7, root r, tree  a - b
    since         x6 x7                                                                         \\ c
    batch row 0   x0 .. x5 | x6 x7 r a b                   from a copy of the snapshot
    batch row 1   x0 .. x5 | x6 x7 r a c
    accepted a c           batch row 1 becomes the snapshot: everything that it read is committed
    accepted a             since = x6 x7 r a; or, if the cache can drop its last tokens, row 0 without b becomes the snapshot

Rejected tokens and the padding on the right of shorter paths touch copies only. Rows without a tree share one batched forward:
states are stacked, keys and values padded on the left under a mask. `Continuation.prove` finds what a model's cache can do.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, cache_utils

from drafttrain.batch import TargetOutput
from drafttrain.ops.tree_attention import TreeLayout
from drafttrain.target.proof import ProvenModel, proof_tokens, relative_error

# Most tokens that a pass reads again before the snapshot moves on, which costs a pass over them.
_MOST_SINCE = 16
_READ, _MORE = 9, 3  # tokens of the proof: read at first, and continued
# Relative errors that count as rounding, and the largest ones of a cache that serves token by token.
_EXACT, _EXACT_HALF = 1e-5, 2e-2
_STEPS, _STEPS_HALF = 1e-2, 0.2
_APART = (nn.Module, PreTrainedConfig, type, torch.device, torch.Stream)  # of a cache's parts, what copies share
Leaf = Tensor | int


def _mapped(part: Any, change: Callable[[Leaf], Leaf], made: dict[int, Any]) -> Any:
    """A copy of a cache, or of a part of it, with `change` applied to each int and once to each tensor that its parts share."""
    if id(part) in made:
        return made[id(part)]
    if type(part) is int:
        return change(part)
    new = part
    if isinstance(part, Tensor):
        new = change(part)
    elif isinstance(part, dict):
        new = {key: _mapped(value, change, made) for key, value in part.items()}
    elif isinstance(part, (list, tuple)):
        new = type(part)(_mapped(value, change, made) for value in part)
    elif hasattr(part, "__dict__") and not isinstance(part, _APART) and not callable(part):
        new = made[id(part)] = copy.copy(part)
        vars(new).update({key: _mapped(value, change, made) for key, value in vars(part).items()})
    made[id(part)] = new
    return new


def _leaves(cache: Any) -> list[Leaf]:
    """A cache's tensors and ints, in the order in which `_mapped` meets them."""
    found: list[Leaf] = []

    def keep(leaf: Leaf) -> Leaf:
        found.append(leaf)
        return leaf

    _mapped(cache, keep, {})
    return found


def _rebuilt(cache: Any, leaves: Iterable[Leaf]) -> Any:
    """A cache like this one with other tensors and ints, in the order of `_leaves`."""
    given = iter(leaves)
    return _mapped(cache, lambda _: next(given), {})


class CacheForm(NamedTuple):
    """What the tensors and ints of a model's cache are, in the order of `_leaves`.

    Attributes:
        batch, time: each tensor's axis of rows, and of tokens where it has one; None for ints.
        counts: whether an int counts tokens. owned: whether a forward writes to the tensor in place.
    """

    batch: list[int | None]
    time: list[int | None]
    counts: list[bool]
    owned: list[bool]

    @classmethod
    def of(cls, one: Any, two_rows: Any, longer: Any, owned: list[bool]) -> CacheForm | None:
        """From caches of one row, of two rows, and of one row with one more token; None if they are not made alike."""
        parts = [_leaves(cache) for cache in (one, two_rows, longer)]
        if len({tuple(type(leaf) for leaf in leaves) for leaves in parts}) > 1:
            return None
        axes: list[list[int | None]] = [[], []]
        counts = []
        for first, *others in zip(*parts, strict=True):
            counts.append(isinstance(first, int) and others[1] != first)
            for found, other in zip(axes, others, strict=True):
                changed: list[int] = []
                if isinstance(first, Tensor) and isinstance(other, Tensor):
                    if first.dim() != other.dim():
                        return None
                    changed = [i for i, (a, b) in enumerate(zip(first.shape, other.shape, strict=True)) if a != b]
                if len(changed) > 1:
                    return None
                found.append(changed[0] if changed else None)
        return cls(axes[0], axes[1], counts, owned)

    def copy(self, cache: Any, rows: int = 1) -> Any:
        """A cache whose forward leaves `cache` alone, with its one row repeated."""
        new: list[Leaf] = []
        for leaf, axis, owned in zip(_leaves(cache), self.batch, self.owned, strict=True):
            if isinstance(leaf, Tensor) and (owned or (rows > 1 and axis is not None)):
                leaf = leaf.clone() if axis is None else leaf.repeat_interleave(rows, axis)
            new.append(leaf)
        return _rebuilt(cache, new)

    def row(self, cache: Any, index: int, length: int, padding: int) -> Any:
        """One row of a cache: its last `length` tokens, behind `padding` tokens."""
        new: list[Leaf] = []
        parts = zip(_leaves(cache), self.batch, self.time, self.counts, self.owned, strict=True)
        for leaf, rows, time, counts, owned in parts:
            if isinstance(leaf, Tensor) and rows is not None:
                leaf = leaf.narrow(rows, index, 1)
                if time is not None and padding:
                    kept = min(leaf.shape[time], length)
                    leaf = leaf.narrow(time, leaf.shape[time] - kept, kept)
                leaf = leaf.clone() if owned else leaf
            new.append(leaf - padding if counts and isinstance(leaf, int) else leaf)
        return _rebuilt(cache, new)

    def stack(self, caches: Sequence[Any], lengths: Sequence[int]) -> Any:
        """Caches of one row each as one, shorter rows padded with zeros on the left."""
        longest = lengths.index(max(lengths))
        new: list[Leaf] = []
        for leaves, rows, time in zip(zip(*map(_leaves, caches), strict=True), self.batch, self.time, strict=True):
            parts = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if rows is None or not parts:
                new.append(leaves[longest])
                continue
            if time is not None:
                most = max(part.shape[time] for part in parts)
                parts = [_pad_left(part, time, most) for part in parts]
            new.append(torch.cat(parts, dim=rows))
        return _rebuilt(caches[longest], new)


def _pad_left(x: Tensor, axis: int, length: int) -> Tensor:
    shape = list(x.shape)
    shape[axis] = length - shape[axis]
    return torch.cat((x.new_zeros(shape), x), dim=axis) if shape[axis] else x


@dataclass
class Continuation:
    """How a model goes on from its cache, as far as it is proven to give the states of its whole forward.

    Attributes:
        name: of the cache, among the body's arguments and in its output; empty for a model without one, which reads
            everything again.
        form: of the cache; None without one.
        several: whether it reads several tokens at once; else one at a time.
        batched: whether rows of different length share a forward of one token each.
        crops: whether its last tokens can be dropped.
        takes: which of attention_mask and position_ids the body takes.
    """

    name: str = ""
    form: CacheForm | None = None
    several: bool = True
    batched: bool = False
    crops: bool = False
    takes: frozenset[str] = frozenset()

    def __str__(self) -> str:
        if not self.name:
            return "no cache, sequences are read again"
        parts = ["rejected tokens dropped" if self.crops else "snapshots"]
        parts += [] if self.several else ["one token at a time"]
        return ", ".join([*parts, "batches" if self.batched else "rows one by one"])

    def begin(self, target: ProvenModel, ids: Tensor, layers: Sequence[int]) -> tuple[TargetOutput, Any]:
        """Reads the first tokens [b, n] of sequences; returns states and cache."""
        out, own = target.run_body(ids, layers, None, use_cache=bool(self.name))
        cache = own[self.name] if self.name else None
        if self.crops and cache is not None:
            cache.activate_past_recording()
        return out, cache

    def go_on(
        self, target: ProvenModel, cache: Any, ids: Tensor, layers: Sequence[int], lengths: Sequence[int]
    ) -> tuple[TargetOutput, Any]:
        """Reads more tokens [b, n]; returns states and the cache behind them, the old one no longer valid.

        Args:
            cache: None where nothing is in it. lengths: tokens of each row in it, behind padding to the longest, or of all.
        """
        if cache is None:
            return self.begin(target, ids, layers)
        made = []
        for i, part in enumerate((ids,) if self.several else ids.split(1, dim=1)):
            places = self._places(part, [length + i for length in lengths])
            out, own = target.run_body(part, layers, None, use_cache=True, **{self.name: cache}, **places)
            cache = own[self.name]
            made.append(out)
        if len(made) == 1:
            return made[0], cache
        states = ([getattr(out, key) for out in made] for key in ("features", "last_hidden"))
        return TargetOutput(*(torch.cat(parts, dim=1) for parts in states)), cache

    def _places(self, ids: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
        """The positions of new tokens [b, n], and the mask that hides padding, where the body takes them."""
        places: dict[str, Tensor] = {}
        before, longest = torch.tensor(lengths, device=ids.device)[:, None], max(lengths)  # [b or 1, 1]
        if "position_ids" in self.takes:
            places["position_ids"] = (before + torch.arange(ids.shape[1], device=ids.device)).expand(len(ids), -1)
        # Without keys and values there is no padding. Mamba would read the mask as one of the new tokens.
        if min(lengths) < longest and "attention_mask" in self.takes and self.form is not None and any(self.form.time):
            columns = torch.arange(longest + ids.shape[1], device=ids.device)
            places["attention_mask"] = (columns >= longest - before).long()  # [b, longest + n]
        return places

    @classmethod
    @torch.no_grad()
    def prove(cls, target: ProvenModel) -> Continuation:
        """Finds how a model continues; the errors allowed are those of token by token decoding. A cache that fails in this, or
        gives other states than the whole forward, is not used."""
        half = target.compute_dtype.itemsize < 4
        ids = proof_tokens(target, _READ + _MORE)[None]
        whole = target.forward(ids, ()).last_hidden  # [1, n, h]
        try:
            _, own = target.run_body(ids[:, :_READ], (), None, use_cache=True)
        except Exception:  # code of other libraries
            return cls()
        parameters = frozenset(inspect.signature(target.body.forward).parameters)
        name = next((key for key, value in own.items() if key in parameters and not isinstance(value, Tensor)), "")
        if not name:
            return cls()
        found = cls(name, takes=parameters & {"attention_mask", "position_ids"}, several=False)

        def error() -> float:
            """Of the states of all tokens, the last ones continued from the cache of the first; inf if the model fails."""
            try:
                first, cache = found.begin(target, ids[:, :_READ], ())
                states = (first, found.go_on(target, cache, ids[:, _READ:], (), [_READ])[0])
            except Exception:  # code of other libraries
                return math.inf
            return relative_error(torch.cat([out.last_hidden for out in states], dim=1), whole)

        # One at a time is what every model of transformers generates with; several at once may round otherwise.
        steps = error()
        if not steps <= (_STEPS_HALF if half else _STEPS):
            return cls()
        bound = max(4 * steps, _EXACT_HALF if half else _EXACT)
        found.several = True
        found.several = error() <= bound
        caches = [found.begin(target, part, ())[1] for part in (ids[:, :2], ids.view(2, -1)[:, :2], ids[:, :3])]
        found.form = CacheForm.of(caches[0], caches[1], caches[2], _owned(found, target, ids))
        if found.form is None:
            return cls()
        found.crops = _crops(found, target, ids, whole, bound)
        known = all(type(layer).__module__ == cache_utils.__name__ for layer in getattr(caches[0], "layers", ()))
        found.batched = known and _batches(found, target, ids, bound)
        return found


def _owned(found: Continuation, target: ProvenModel, ids: Tensor) -> list[bool]:
    """Which tensors of a cache a further forward writes to in place."""
    _, cache = found.begin(target, ids[:, :_READ], ())
    leaves = _leaves(cache)
    versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
    found.go_on(target, cache, ids[:, _READ:], (), [_READ])
    return [isinstance(leaf, Tensor) and leaf._version > before for leaf, before in zip(leaves, versions, strict=True)]


def _crops(found: Continuation, target: ProvenModel, ids: Tensor, whole: Tensor, bound: float) -> bool:
    """Whether the cache says that it can drop its last tokens, and does."""
    _, cache = found.begin(target, ids[:, :_READ], ())
    if found.form is None or not getattr(cache, "is_croppable", False):
        return False
    cache.activate_past_recording()
    _, cache = found.go_on(target, cache, ids[:, :_MORE], (), [_READ])  # rejected ones
    cache.crop(-_MORE)
    out, _ = found.go_on(target, cache, ids[:, _READ:], (), [_READ])
    return relative_error(out.last_hidden, whole[:, _READ:]) <= bound


def _batches(found: Continuation, target: ProvenModel, ids: Tensor, bound: float) -> bool:
    """Whether two rows of different length give the same states together and apart, also after they part again."""
    if found.form is None:
        return False
    new, apart, caches, lengths = ids[:, :1], [], [], [_READ, _MORE]
    for length in lengths:
        _, cache = found.begin(target, ids[:, -length:], ())
        out, after = found.go_on(target, found.form.copy(cache), new, (), [length])
        apart += [out.last_hidden, found.go_on(target, after, new, (), [length + 1])[0].last_hidden]
        caches.append(cache)
    try:
        stacked = found.form.stack(caches, lengths)
        out, stacked = found.go_on(target, stacked, new.expand(2, 1), (), lengths)
        together = [out.last_hidden[:1], out.last_hidden[1:]]
        for index, length in enumerate(lengths):
            row = found.form.row(stacked, index, length + 1, _READ - length)
            together.insert(2 * index + 1, found.go_on(target, row, new, (), [length + 1])[0].last_hidden)
        return relative_error(torch.cat(together), torch.cat(apart)) <= bound
    except Exception:  # code of other libraries: rows are then read one by one
        return False


@dataclass(eq=False)
class _Held:
    """The cache behind rows that were read together.

    Attributes:
        cache: the model's. rows: whose rows it has; lengths: tokens of each, behind padding to the longest.
    """

    cache: Any
    rows: list[int]
    lengths: list[int]


class _Part(NamedTuple):
    """A part of the announced forward: a row, its new tokens' layout, and its paths as indices of new tokens (0 is the root).
    drafted: whether tokens may be rejected."""

    row: int
    layout: TreeLayout
    paths: list[list[int]]
    drafted: bool


class SnapshotCache:
    """The caches of several sequences on the snapshot path; offers the engine what `TreeCache` does.

    Args:
        target: whose `continuation` is proven.
        capacity: positions per row; nothing is allocated for them. rows: sequences held at a time.

    Attributes:
        lengths: committed tokens of each row.
        passes: forwards by what they were for: "read" (new tokens), "snapshot" (a snapshot that moves on).
    """

    def __init__(self, target: ProvenModel, capacity: int, rows: int = 1):
        self.target, self.capacity, self.rows = target, capacity, rows
        self.how: Continuation = target.continuation
        self.lengths = [0] * rows
        self.passes: Counter[str] = Counter()
        self._held: dict[int, _Held] = {}  # by row
        self._since: list[list[int]] = [[] for _ in range(rows)]
        self._open: list[_Part] = []
        self._read: dict[
            int, tuple[Any, list[int]]
        ] = {}  # by row, until `commit`: the cache behind its paths, its tokens

    @property
    def nbytes(self) -> int:
        held = {id(held): held for held in self._held.values()}.values()
        return sum(leaf.nbytes for one in held for leaf in _leaves(one.cache) if isinstance(leaf, Tensor))

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
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
            new: per part, the row and its new tokens: a count of tokens that are all kept, or the parents of the tree nodes
                below a root. Each row at most once.

        Raises:
            ValueError: a row that does not exist or occurs twice.
        """
        named = [row for row, _ in new]
        if len(set(named)) < len(named) or not all(0 <= row < self.rows for row in named):
            raise ValueError(f"rows={named} must be distinct numbers from 0 to {self.rows - 1}")
        self._open, self._read = [], {}
        for row, shape in new:
            length = self.lengths[row]
            if isinstance(shape, int):
                self._open.append(_Part(row, TreeLayout(length, count=shape), [list(range(shape))], False))
            else:
                self._open.append(_Part(row, TreeLayout(length, shape), _paths(shape), len(shape) > 0))
        return [part.layout for part in self._open]

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """[1, N] int64 position ids of the announced forward."""
        return torch.cat([part.layout.positions() for part in self._open], dim=1).to(device)

    def forward(self, input_ids: Tensor, layers: Sequence[int]) -> TargetOutput:
        """Reads the announced tokens [1, N], row after row; returns states in this order."""
        parts = list(zip(self._open, input_ids[0].split([part.layout.count for part in self._open]), strict=True))
        single = [(part.row, ids) for part, ids in parts if part.layout.count == 1 and part.row in self._held]
        rows = [row for row, _ in single] if self.how.batched and len(single) > 1 else []
        for part in self._open:
            most = 0 if part.row in rows else _MOST_SINCE
            if self.how.name and (part.drafted or part.row in rows) and len(self._since[part.row]) > most:
                self._move_on(part.row, input_ids)
        outs: dict[int, TargetOutput] = {}
        if rows:
            outs = self._step(rows, torch.stack([ids for _, ids in single]), layers)
        made = [outs[part.row] if part.row in outs else self._go_on(part, ids, layers) for part, ids in parts]
        return TargetOutput(*(torch.cat([getattr(out, key) for out in made], 1) for key in ("features", "last_hidden")))

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keeps, per part of the last forward, the given new tokens, in path order; all of a part that was not drafted."""
        for part, indices in zip(self._open, map(list, kept), strict=True):
            row = part.row
            if not part.drafted and len(indices) != part.layout.count:
                raise ValueError(f"kept={indices} must be all {part.layout.count} tokens of row {row}")
            self.lengths[row] += len(indices)
            if row not in self._read:  # its cache moved on already
                continue
            cache, tokens = self._read.pop(row)
            spare = max(map(len, part.paths)) - len(indices)  # rejected tokens and padding behind the kept ones
            if self.how.form is not None and (not spare or self.how.crops):
                index = next(i for i, path in enumerate(part.paths) if path[: len(indices)] == indices)
                if len(part.paths) > 1:
                    cache = self.how.form.row(cache, index, self.lengths[row] + spare, 0)
                self._held[row], self._since[row] = _Held(self._trimmed(cache, spare), [row], [self.lengths[row]]), []
            else:
                self._since[row] += [tokens[i] for i in indices]

    # -- reading ------------------------------------------------------------------------------------------------

    def _go_on(self, part: _Part, ids: Tensor, layers: Sequence[int]) -> TargetOutput:
        """States [1, n, ...] of a row's new tokens [n]."""
        row, since, form = part.row, self._since[part.row], self.how.form
        most = max(map(len, part.paths))
        table = torch.tensor([path + [0] * (most - len(path)) for path in part.paths], device=ids.device)
        before = torch.tensor(since, dtype=ids.dtype, device=ids.device).expand(len(table), len(since))
        cache, read = None, [0]
        if form is not None and row in self._held:
            held = self._alone(row)
            # Nothing is copied where all tokens are kept, or those that are not can be dropped.
            copies = part.drafted and not (self.how.crops and len(table) == 1)
            cache, read = form.copy(held.cache, len(table)) if copies else held.cache, held.lengths
        out, cache = self.how.go_on(self.target, cache, torch.cat((before, ids[table]), dim=1), layers, read)
        self.passes["read"] += 1
        if part.drafted or form is None:
            self._read[row] = cache, ids.tolist()
        else:
            length = self.lengths[row] + part.layout.count
            self._held[row], self._since[row] = _Held(self._trimmed(cache), [row], [length]), []
        at = {node: (i, len(since) + j) for i, path in enumerate(part.paths) for j, node in enumerate(path)}
        rows, columns = torch.tensor([at[node] for node in range(len(ids))], device=ids.device).unbind(1)
        return TargetOutput(out.features[rows, columns][None], out.last_hidden[rows, columns][None])

    def _step(self, rows: list[int], ids: Tensor, layers: Sequence[int]) -> dict[int, TargetOutput]:
        """States [1, 1, ...] by row, each of which reads one token, ids [rows, 1], in one forward."""
        held = self._held[rows[0]]
        left = [i for i, row in enumerate(held.rows) if self._held.get(row) is not held]  # these go on apart, or ended
        if [row for i, row in enumerate(held.rows) if i not in left] != rows or 8 * len(left) > len(held.rows):
            held, left = self._together(rows), []
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
        since, held = torch.tensor([self._since[row]], dtype=like.dtype, device=like.device), self._held.get(row)
        cache, read = (None, [0]) if held is None else (self._alone(row).cache, self._alone(row).lengths)
        _, cache = self.how.go_on(self.target, cache, since, (), read)
        self.passes["snapshot"] += 1
        self._held[row], self._since[row] = _Held(self._trimmed(cache), [row], [self.lengths[row]]), []

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
            cache = self.how.form.row(held.cache, i, held.lengths[i], max(held.lengths) - held.lengths[i])
            held = self._held[row] = _Held(cache, [row], [held.lengths[i]])
        return held

    def _together(self, rows: list[int]) -> _Held:
        """One cache of several rows, each behind padding to the longest."""
        alone, form = [self._alone(row) for row in rows], self.how.form
        assert form is not None
        lengths = [held.lengths[0] for held in alone]
        together = _Held(form.stack([held.cache for held in alone], lengths), list(rows), lengths)
        self._held |= dict.fromkeys(rows, together)
        return together


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """The paths from root to leaves of a tree, as indices of its new tokens: the root is 0, node i is i + 1."""
    paths = [[0]]
    for node, parent in enumerate(parents):
        paths.append([*paths[parent + 1], node + 1])
    inner = {parent + 1 for parent in parents}
    return [path for i, path in enumerate(paths) if i not in inner]
