"""A model's own cache: what its tensors are, how it is copied, and how the model continues with it.

Any object that a model returns for its next call will do: transformers' caches, lists of states.
Two caches of different rows and lengths show which axes of a tensor are rows and tokens
(`CacheForm`); `Continuation.prove` finds what is exact.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, cache_utils

from drafttrain.batch import TargetOutput
from drafttrain.ops.packing import pack
from drafttrain.target.proof import ProvenModel, proof_tokens, relative_error

# tokens of the proof: read at first, and continued
_READ = 9
_MORE = 3
# Relative errors that count as rounding, and the largest ones of a cache that serves token by
# token.
_EXACT = 1e-5
_EXACT_HALF = 2e-2
_STEPS = 1e-2
_STEPS_HALF = 0.2
_APART = (
    nn.Module,
    PreTrainedConfig,
    type,
    torch.device,
    torch.Stream,
)  # of a cache's parts, what copies share
Leaf = Tensor | int


def _mapped(part: Any, change: Callable[[Leaf], Leaf], made: dict[int, Any]) -> Any:
    """A copy of a cache, or of a part of it, with `change` applied to each int and once to each
    tensor that its parts share.
    """
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


def leaves_of(cache: Any) -> list[Leaf]:
    """A cache's tensors and ints, in the order in which `_mapped` meets them."""
    found: list[Leaf] = []

    def keep(leaf: Leaf) -> Leaf:
        found.append(leaf)
        return leaf

    _mapped(cache, keep, {})
    return found


def _rebuilt(cache: Any, leaves: Iterable[Leaf]) -> Any:
    """A cache like this one with other tensors and ints, in the order of `leaves_of`."""
    given = iter(leaves)
    return _mapped(cache, lambda _: next(given), {})


class CacheForm(NamedTuple):
    """What the tensors and ints of a model's cache are, in the order of `leaves_of`.

    Attributes:
        batch, time: each tensor's axis of rows, and of tokens where it has one; None for ints.
        counts: whether an int counts tokens. owned: whether a forward writes to the tensor in
            place.
        dims: each tensor's number of axes; -1 for ints.
    """

    batch: list[int | None]
    time: list[int | None]
    counts: list[bool]
    owned: list[bool]
    dims: list[int]

    @classmethod
    def of(cls, one: Any, two_rows: Any, longer: Any, owned: list[bool]) -> CacheForm | None:
        """From caches of one row, of two rows, and of one row with one more token; None if they are
        not made alike.
        """
        parts = [leaves_of(cache) for cache in (one, two_rows, longer)]
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
                    changed = [
                        i
                        for i, (a, b) in enumerate(zip(first.shape, other.shape, strict=True))
                        if a != b
                    ]
                if len(changed) > 1:
                    return None
                found.append(changed[0] if changed else None)
        return cls(axes[0], axes[1], counts, owned, _dims(parts[0]))

    def fits(self, cache: Any) -> bool:
        """Whether a cache has these parts. DeepSeek-V4's gets more of them as its compressed blocks
        fill.
        """
        return _dims(leaves_of(cache)) == self.dims

    def copy(self, cache: Any, rows: int = 1) -> Any:
        """A cache whose forward leaves `cache` alone, with its one row repeated. For several rows
        the cache must fit.
        """
        if not self.fits(cache):
            assert rows == 1
            return _rebuilt(
                cache, [x.clone() if isinstance(x, Tensor) else x for x in leaves_of(cache)]
            )
        new: list[Leaf] = []
        for leaf, axis, owned in zip(leaves_of(cache), self.batch, self.owned, strict=True):
            if isinstance(leaf, Tensor) and (owned or (rows > 1 and axis is not None)):
                if axis is None:
                    leaf = leaf.clone()
                else:
                    leaf = leaf.repeat_interleave(rows, axis)
            new.append(leaf)
        return _rebuilt(cache, new)

    def row(self, cache: Any, index: int, length: int, padding: int) -> Any:
        """One row of a cache: its last `length` tokens, behind `padding` tokens."""
        new: list[Leaf] = []
        parts = zip(leaves_of(cache), self.batch, self.time, self.counts, self.owned, strict=True)
        for leaf, rows, time, counts, owned in parts:
            if isinstance(leaf, Tensor) and rows is not None:
                leaf = leaf.narrow(rows, index, 1)
                if time is not None and padding:
                    kept = min(leaf.shape[time], length)
                    leaf = leaf.narrow(time, leaf.shape[time] - kept, kept)
                if owned:
                    leaf = leaf.clone()
            new.append(leaf - padding if counts and isinstance(leaf, int) else leaf)
        return _rebuilt(cache, new)

    def stack(self, caches: Sequence[Any], lengths: Sequence[int]) -> Any:
        """Caches of one row each as one, shorter rows padded with zeros on the left."""
        longest = lengths.index(max(lengths))
        new: list[Leaf] = []
        for leaves, rows, time in zip(
            zip(*map(leaves_of, caches), strict=True),
            self.batch,
            self.time,
            strict=True,
        ):
            parts = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if rows is None or not parts:
                new.append(leaves[longest])
                continue
            if time is not None:
                most = max(part.shape[time] for part in parts)
                parts = [_pad_left(part, time, most) for part in parts]
            new.append(torch.cat(parts, dim=rows))
        return _rebuilt(caches[longest], new)


def _dims(leaves: Sequence[Leaf]) -> list[int]:
    return [leaf.dim() if isinstance(leaf, Tensor) else -1 for leaf in leaves]


def _pad_left(x: Tensor, axis: int, length: int) -> Tensor:
    shape = list(x.shape)
    shape[axis] = length - shape[axis]
    if shape[axis]:
        return torch.cat((x.new_zeros(shape), x), dim=axis)
    return x


@dataclass
class Continuation:
    """How a model continues with its cache, as far as it is proven to give the states of its whole
    forward.

    Attributes:
        name: of the cache, among the body's arguments and in its output; empty for a model without
            one, which reads everything again.
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
        if self.several:
            parts += []
        else:
            parts += ["one token at a time"]
        return ", ".join([*parts, "batches" if self.batched else "rows one by one"])

    def begin(
        self,
        target: ProvenModel,
        ids: Tensor,
        layers: Sequence[int],
    ) -> tuple[TargetOutput, Any]:
        """Reads the first tokens [b, n] of sequences; returns states and cache."""
        out, own = target.run_body(ids, layers, None, use_cache=bool(self.name))
        if self.name:
            cache = own[self.name]
        else:
            cache = None
        if self.crops and cache is not None:
            cache.activate_past_recording()
        return out, cache

    def go_on(
        self,
        target: ProvenModel,
        cache: Any,
        ids: Tensor,
        layers: Sequence[int],
        lengths: Sequence[int],
    ) -> tuple[TargetOutput, Any]:
        """Reads more tokens [b, n]; returns states and the cache behind them, the old one no longer
        valid.

        Args:
            cache: None where nothing is in it. lengths: tokens of each row in it, behind padding to
                the longest, or of all.
        """
        if cache is None:
            return self.begin(target, ids, layers)
        made = []
        for i, part in enumerate((ids,) if self.several else ids.split(1, dim=1)):
            places = self._places(part, [length + i for length in lengths])
            out, own = target.run_body(
                part,
                layers,
                None,
                use_cache=True,
                **{self.name: cache},
                **places,
            )
            cache = own[self.name]
            made.append(out)
        if len(made) == 1:
            return made[0], cache
        states = ([getattr(out, key) for out in made] for key in ("features", "last_hidden"))
        return TargetOutput(*(torch.cat(parts, dim=1) for parts in states)), cache

    def _places(self, ids: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
        """The positions of new tokens [b, n], and the mask that hides padding, where the body takes
        them.
        """
        places: dict[str, Tensor] = {}
        # [b or 1, 1]
        before = torch.tensor(lengths, device=ids.device)[:, None]
        longest = max(lengths)
        if "position_ids" in self.takes:
            places["position_ids"] = (
                before + torch.arange(ids.shape[1], device=ids.device)
            ).expand(len(ids), -1)
        # Without keys and values there is no padding. Mamba would read the mask as one of the new
        # tokens.
        if (
            min(lengths) < longest
            and "attention_mask" in self.takes
            and self.form is not None
            and any(self.form.time)
        ):
            columns = torch.arange(longest + ids.shape[1], device=ids.device)
            places["attention_mask"] = (columns >= longest - before).long()  # [b, longest + n]
        return places

    @classmethod
    @torch.no_grad()
    def prove(cls, target: ProvenModel) -> Continuation:
        """Finds how a model continues; the errors allowed are those of token by token decoding. A
        cache that fails in this, or gives other states than the whole forward, is not used.
        """
        half = target.compute_dtype.itemsize < 4
        ids = proof_tokens(target, _READ + _MORE)[None]
        whole = target.forward(ids, ()).last_hidden  # [1, n, h]
        try:
            _, own = target.run_body(ids[:, :_READ], (), None, use_cache=True)
        except Exception:  # code of other libraries
            return cls()
        parameters = frozenset(inspect.signature(target.body.forward).parameters)
        name = next(
            (
                key
                for key, value in own.items()
                if key in parameters and not isinstance(value, Tensor)
            ),
            "",
        )
        if not name:
            return cls()
        found = cls(name, takes=parameters & {"attention_mask", "position_ids"}, several=False)

        def rest() -> float:
            """Error of all tokens' states, the last ones continued from the cache of the first."""
            first, cache = found.begin(target, ids[:, :_READ], ())
            states = (first, found.go_on(target, cache, ids[:, _READ:], (), [_READ])[0])
            return relative_error(torch.cat([out.last_hidden for out in states], dim=1), whole)

        # One at a time is what every model of transformers generates with; several at once may be
        # computed otherwise.
        steps = _tried(rest)
        if not steps <= (_STEPS_HALF if half else _STEPS):
            return cls()
        bound = max(4 * steps, _EXACT_HALF if half else _EXACT)
        # What layers of a model's own do beyond the proof's few tokens is unknown: they get as
        # little trust as possible.
        layers = getattr(own[name], "layers", ())
        known = all(type(layer).__module__ == cache_utils.__name__ for layer in layers)
        found.several = known
        found.several = known and _tried(rest) <= bound
        caches = [
            found.begin(target, part, ())[1]
            for part in (ids[:, :2], ids.view(2, -1)[:, :2], ids[:, :3])
        ]
        if known:
            owned = _owned(found, target, ids)
        else:
            owned = [True] * len(leaves_of(caches[0]))
        found.form = CacheForm.of(caches[0], caches[1], caches[2], owned)
        if found.form is None:
            return cls()
        found.crops = known and _tried(lambda: _cropped(found, target, ids, whole)) <= bound
        found.batched = known and _tried(lambda: _together(found, target, ids)) <= bound
        return found


def _tried(trial: Callable[[], float]) -> float:
    """The relative error that a trial finds; infinite where the model's code fails, or the error is
    not a number.
    """
    try:
        found = trial()
    except Exception:  # code of other libraries
        return math.inf
    if math.isnan(found):
        return math.inf
    return found


def _owned(found: Continuation, target: ProvenModel, ids: Tensor) -> list[bool]:
    """Which tensors of a cache a further forward writes to in place."""
    _, cache = found.begin(target, ids[:, :_READ], ())
    leaves = leaves_of(cache)
    versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
    found.go_on(target, cache, ids[:, _READ:], (), [_READ])
    return [
        isinstance(leaf, Tensor) and leaf._version > before
        for leaf, before in zip(leaves, versions, strict=True)
    ]


def _cropped(found: Continuation, target: ProvenModel, ids: Tensor, whole: Tensor) -> float:
    """Error behind a cache that dropped its last tokens, if it says that it can."""
    _, cache = found.begin(target, ids[:, :_READ], ())
    if not getattr(cache, "is_croppable", False):
        return math.inf
    cache.activate_past_recording()
    _, cache = found.go_on(target, cache, ids[:, :_MORE], (), [_READ])  # rejected ones
    cache.crop(-_MORE)
    out, _ = found.go_on(target, cache, ids[:, _READ:], (), [_READ])
    return relative_error(out.last_hidden, whole[:, _READ:])


def _together(found: Continuation, target: ProvenModel, ids: Tensor) -> float:
    """Error of two rows of different length read together, against apart, also after they part
    again.
    """
    assert found.form is not None
    new = ids[:, :1]
    apart = []
    caches = []
    lengths = [_READ, _MORE]
    for length in lengths:
        _, cache = found.begin(target, ids[:, -length:], ())
        out, after = found.go_on(target, found.form.copy(cache), new, (), [length])
        apart += [out.last_hidden, found.go_on(target, after, new, (), [length + 1])[0].last_hidden]
        caches.append(cache)
    stacked = found.form.stack(caches, lengths)
    out, stacked = found.go_on(target, stacked, new.expand(2, 1), (), lengths)
    together = [out.last_hidden[:1], out.last_hidden[1:]]
    for index, length in enumerate(lengths):
        row = found.form.row(stacked, index, length + 1, _READ - length)
        together.insert(
            2 * index + 1, found.go_on(target, row, new, (), [length + 1])[0].last_hidden
        )
    return relative_error(torch.cat(together), torch.cat(apart))


def pack_proven(target: ProvenModel) -> None:
    """Packs the linear layers that another model's code calls; puts them back if its states change
    or it goes on otherwise.
    """
    ids = proof_tokens(target, _READ)[None]
    with torch.no_grad():
        before = target.forward(ids, ()).last_hidden
        replaced = pack(target.model, norms=False)
        change = _tried(lambda: relative_error(target.forward(ids, ()).last_hidden, before))
        if change > 1e-3 or str(Continuation.prove(target)) != str(target.continuation):
            for parent, name, child in replaced:
                setattr(parent, name, child)
