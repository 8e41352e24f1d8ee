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
from transformers.utils import ModelOutput

from drafttrain.batch import TargetOutput
from drafttrain.ops.packing import pack
from drafttrain.target.proof import ProvenModel, by_precision, proof_tokens, relative_error

# Tokens of the proof: read at first, and continued.
_READ = 9
_MORE = 3
# Relative errors that count as rounding, in float32 and in half precision.
_EXACT = 1e-5
_EXACT_HALF = 2e-2
# Largest relative errors of a cache that serves token by token.
_STEPS = 1e-2
_STEPS_HALF = 0.2
# Parts of a cache that copies share.
_APART = (nn.Module, PreTrainedConfig, type, torch.device, torch.Stream)
Leaf = Tensor | int


def _mapped(
    part: Any,
    change: Callable[[Leaf], Leaf],
    made: dict[int, Any],
) -> Any:
    """A copy of a cache, or of a part of it, with `change` applied to its ints and tensors.

    A tensor that several parts share is changed once.

    Args:
        made: copies so far by the id of the part; this call adds to it.
    """
    if id(part) in made:
        return made[id(part)]
    if type(part) is int:  # no bool, which is a switch
        return change(part)
    new = part
    if isinstance(part, Tensor):
        new = change(part)
    elif isinstance(part, dict):
        new = {key: _mapped(value, change, made) for key, value in part.items()}
    elif isinstance(part, (list, tuple)):
        new = type(part)(_mapped(value, change, made) for value in part)
    elif hasattr(part, "__dict__") and not isinstance(part, _APART) and not callable(part):
        new = copy.copy(part)
        made[id(part)] = new  # before its parts, which may refer to it
        for key, value in vars(part).items():
            vars(new)[key] = _mapped(value, change, made)
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


class LeafForm(NamedTuple):
    """What a tensor or int of a model's cache is."""

    rows: int | None  # axis of rows, if any
    time: int | None  # axis of tokens, if any
    counts: bool  # an int that counts tokens
    owned: bool  # a forward writes to the tensor in place
    dims: int  # number of axes, -1 for an int


class CacheForm(NamedTuple):
    """What the tensors and ints of a model's cache are, in the order of `leaves_of`."""

    leaves: list[LeafForm]

    @classmethod
    def of(
        cls,
        one: Any,
        two_rows: Any,
        longer: Any,
        owned: list[bool],
    ) -> CacheForm | None:
        """The form of caches of one row, of two rows, and of one row with one more token.

        None if the caches differ in more than these sizes.
        """
        parts = [leaves_of(cache) for cache in (one, two_rows, longer)]
        kinds = [[type(leaf) for leaf in leaves] for leaves in parts]
        if kinds[0] != kinds[1] or kinds[0] != kinds[2]:
            return None
        forms = []
        for first, of_two, of_longer, own in zip(*parts, owned, strict=True):
            rows = _changed_axes(first, of_two)
            time = _changed_axes(first, of_longer)
            if len(rows) > 1 or len(time) > 1:
                return None
            forms.append(
                LeafForm(
                    rows=rows[0] if rows else None,
                    time=time[0] if time else None,
                    counts=isinstance(first, int) and of_longer != first,
                    owned=own,
                    dims=_dims(first),
                )
            )
        return cls(forms)

    def fits(self, cache: Any) -> bool:
        """Whether a cache has these parts; DeepSeek-V4's gets more as its compressed blocks fill."""
        return [_dims(leaf) for leaf in leaves_of(cache)] == [form.dims for form in self.leaves]

    def copy(self, cache: Any, rows: int = 1) -> Any:
        """A cache whose forward does not change `cache`, with its one row repeated.

        For several rows the cache must fit.
        """
        new: list[Leaf] = []
        leaves = leaves_of(cache)
        if not self.fits(cache):
            assert rows == 1
            for leaf in leaves:
                new.append(leaf.clone() if isinstance(leaf, Tensor) else leaf)
            return _rebuilt(cache, new)
        for leaf, form in zip(leaves, self.leaves, strict=True):
            if isinstance(leaf, Tensor) and (form.owned or (rows > 1 and form.rows is not None)):
                if form.rows is None:
                    leaf = leaf.clone()
                else:
                    leaf = leaf.repeat_interleave(rows, form.rows)
            new.append(leaf)
        return _rebuilt(cache, new)

    def row(
        self,
        cache: Any,
        index: int,
        length: int,
        padding: int,
    ) -> Any:
        """One row of a cache: its last `length` tokens, behind `padding` tokens."""
        new: list[Leaf] = []
        for leaf, form in zip(leaves_of(cache), self.leaves, strict=True):
            if isinstance(leaf, Tensor) and form.rows is not None:
                leaf = leaf.narrow(form.rows, index, 1)
                if form.time is not None and padding:
                    size = leaf.shape[form.time]
                    kept = min(size, length)
                    leaf = leaf.narrow(form.time, size - kept, kept)
                if form.owned:
                    leaf = leaf.clone()
            if form.counts and isinstance(leaf, int):
                leaf -= padding
            new.append(leaf)
        return _rebuilt(cache, new)

    def stack(self, caches: Sequence[Any], lengths: Sequence[int]) -> Any:
        """Caches of one row each as one, shorter rows padded with zeros on the left."""
        longest = lengths.index(max(lengths))
        new: list[Leaf] = []
        by_leaf = zip(*map(leaves_of, caches), strict=True)  # each one's in all caches
        for leaves, form in zip(by_leaf, self.leaves, strict=True):
            parts = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if form.rows is None or not parts:
                new.append(leaves[longest])
                continue
            if form.time is not None:
                most = max(part.shape[form.time] for part in parts)
                parts = [_pad_left(part, form.time, most) for part in parts]
            new.append(torch.cat(parts, dim=form.rows))
        return _rebuilt(caches[longest], new)


def _changed_axes(first: Leaf, other: Leaf) -> list[int]:
    """The axes whose sizes differ; several for tensors with different numbers of axes."""
    if not isinstance(first, Tensor) or not isinstance(other, Tensor):
        return []
    if first.dim() != other.dim():
        return [-1, -1]
    sizes = zip(first.shape, other.shape, strict=True)
    return [axis for axis, (ours, theirs) in enumerate(sizes) if ours != theirs]


def _dims(leaf: Leaf) -> int:
    """The number of axes of a tensor, -1 for an int."""
    return leaf.dim() if isinstance(leaf, Tensor) else -1


def _pad_left(x: Tensor, axis: int, length: int) -> Tensor:
    """The tensor with zeros in front, `length` long."""
    shape = list(x.shape)
    shape[axis] = length - shape[axis]
    if shape[axis] == 0:
        return x
    return torch.cat((x.new_zeros(shape), x), dim=axis)


@dataclass
class Continuation:
    """How a model continues with its cache, as far as that is proven exact.

    Exact means the states of the model's forward over all tokens.

    Attributes:
        name: of the cache, among the body's arguments and in its output; empty for a model without
            one, which reads everything again.
        form: of the cache; None without one.
        several: whether the model reads several tokens at once; else one at a time.
        batched: whether rows of different length share a forward of one token each.
        crops: whether the cache can drop its last tokens.
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
        parts = ["snapshots"]
        if self.crops:
            parts = ["rejected tokens dropped"]
        if not self.several:
            parts.append("one token at a time")
        if self.batched:
            parts.append("batches")
        else:
            parts.append("rows one by one")
        return ", ".join(parts)

    def begin(
        self,
        target: ProvenModel,
        ids: Tensor,
        layers: Sequence[int],
    ) -> tuple[TargetOutput, Any]:
        """Reads the first tokens [b, n] of sequences; returns states and cache."""
        out, own = target.run_body(
            ids,
            layers,
            None,
            use_cache=bool(self.name),
        )
        if not self.name:
            return out, None
        return out, self.cache_of(own)

    def cache_of(self, own: ModelOutput) -> Any:
        """The cache in what the body returned for the first tokens of sequences."""
        cache = own[self.name]
        if self.crops:
            cache.activate_past_recording()
        return cache

    def go_on(
        self,
        target: ProvenModel,
        cache: Any,
        ids: Tensor,
        layers: Sequence[int],
        lengths: Sequence[int],
        shifts: Sequence[int] = (0,),
    ) -> tuple[TargetOutput, Any]:
        """Reads more tokens [b, n]. The old cache is no longer valid then.

        Args:
            cache: None if nothing was read yet.
            lengths: tokens of each row in it, behind padding to the longest, or of all rows.
            shifts: what each row's positions, or those of all rows, exceed the indices of tokens by.

        Returns:
            States, and the cache behind the tokens.
        """
        if cache is None:
            return self.begin(target, ids, layers)
        features = []
        last_hidden = []
        parts = (ids,) if self.several else ids.split(1, dim=1)
        for i, part in enumerate(parts):
            places = self._places(part, [length + i for length in lengths], shifts)
            out, own = target.run_body(
                part,
                layers,
                None,
                use_cache=True,
                **{self.name: cache},
                **places,
            )
            cache = own[self.name]
            features.append(out.features)
            last_hidden.append(out.last_hidden)
        if len(parts) == 1:
            return out, cache
        return TargetOutput(torch.cat(features, dim=1), torch.cat(last_hidden, dim=1)), cache

    def _places(
        self,
        ids: Tensor,
        lengths: Sequence[int],
        shifts: Sequence[int],
    ) -> dict[str, Tensor]:
        """Positions of new tokens [b, n], and the mask that hides padding, if the body takes them."""
        places: dict[str, Tensor] = {}
        before = torch.tensor(lengths, device=ids.device)[:, None]  # [b or 1, 1]
        longest = max(lengths)
        if "position_ids" in self.takes:
            first = before + torch.tensor(shifts, device=ids.device)[:, None]
            positions = first + torch.arange(ids.shape[1], device=ids.device)
            places["position_ids"] = positions.expand(len(ids), -1)  # [b, n]
        # Without keys and values there is no padding: Mamba would read the mask as one of the new
        # tokens.
        has_keys = self.form is not None and any(form.time for form in self.form.leaves)
        if min(lengths) < longest and has_keys and "attention_mask" in self.takes:
            columns = torch.arange(longest + ids.shape[1], device=ids.device)
            places["attention_mask"] = (columns >= longest - before).long()  # [b, longest + n]
        return places

    @classmethod
    @torch.no_grad()
    def prove(cls, target: ProvenModel) -> Continuation:
        """Finds how a model continues.

        The errors allowed are those of token by token decoding. A cache that fails in this, or
        gives other states than the forward over all tokens, is not used.
        """
        exact = by_precision(target, _EXACT, _EXACT_HALF)
        most = by_precision(target, _STEPS, _STEPS_HALF)
        ids = proof_tokens(target, _READ + _MORE)[None]
        expected = target.forward(ids, ()).last_hidden  # [1, n, h]
        try:
            _, own = target.run_body(ids[:, :_READ], (), None, use_cache=True)
        except Exception:  # code of other libraries
            return cls()
        # The cache is what the body returns and takes again.
        parameters = frozenset(inspect.signature(target.body.forward).parameters)
        name = ""
        for key, value in own.items():
            if not name and key in parameters and not isinstance(value, Tensor):
                name = key
        if not name:
            return cls()
        found = cls(
            name,
            takes=parameters & {"attention_mask", "position_ids"},
            several=False,
        )

        def rest() -> float:
            """Error of all tokens' states, the last ones continued from the cache of the first."""
            first, cache = found.begin(target, ids[:, :_READ], ())
            last, _ = found.go_on(target, cache, ids[:, _READ:], (), [_READ])
            states = torch.cat((first.last_hidden, last.last_hidden), dim=1)
            return relative_error(states, expected)

        # One at a time is what every model of transformers generates with; several at once may be
        # computed otherwise.
        steps = _tried(rest)
        if not steps <= most:
            return cls()
        bound = max(4 * steps, exact)
        # What layers of a model's own do beyond the proof's few tokens is unknown: they get as
        # little trust as possible.
        layers = getattr(own[name], "layers", ())
        known = all(type(layer).__module__ == cache_utils.__name__ for layer in layers)
        if known:
            found.several = True  # for the trial
            found.several = _tried(rest) <= bound
        # Three small caches show which axes are rows and tokens.
        _, one = found.begin(target, ids[:, :2], ())
        _, two_rows = found.begin(target, ids.view(2, -1)[:, :2], ())
        _, longer = found.begin(target, ids[:, :3], ())
        if known:
            owned = _owned(found, target, ids)
        else:
            owned = [True] * len(leaves_of(one))
        found.form = CacheForm.of(one, two_rows, longer, owned)
        if found.form is None:
            return cls()
        if known:
            found.crops = _tried(lambda: _cropped(found, target, ids, expected)) <= bound
            found.batched = _tried(lambda: _together(found, target, ids)) <= bound
        return found


def _tried(trial: Callable[[], float]) -> float:
    """The relative error of a trial; infinite if the model's code fails or the error is NaN."""
    try:
        found = trial()
    except Exception:  # code of other libraries
        return math.inf
    if math.isnan(found):
        return math.inf
    return found


def _owned(
    found: Continuation,
    target: ProvenModel,
    ids: Tensor,
) -> list[bool]:
    """Which tensors of a cache a further forward writes to in place."""
    _, cache = found.begin(target, ids[:, :_READ], ())
    leaves = leaves_of(cache)
    # torch counts the writes to a tensor in its version.
    versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
    found.go_on(target, cache, ids[:, _READ:], (), [_READ])
    owned = []
    for leaf, before in zip(leaves, versions, strict=True):
        owned.append(isinstance(leaf, Tensor) and leaf._version > before)
    return owned


def _cropped(
    found: Continuation,
    target: ProvenModel,
    ids: Tensor,
    expected: Tensor,
) -> float:
    """Error behind a cache that dropped its last tokens, if it says that it can."""
    _, cache = found.begin(target, ids[:, :_READ], ())
    if not getattr(cache, "is_croppable", False):
        return math.inf
    cache.activate_past_recording()
    _, cache = found.go_on(target, cache, ids[:, :_MORE], (), [_READ])  # rejected ones
    cache.crop(-_MORE)
    out, _ = found.go_on(target, cache, ids[:, _READ:], (), [_READ])
    return relative_error(out.last_hidden, expected[:, _READ:])


def _together(
    found: Continuation,
    target: ProvenModel,
    ids: Tensor,
) -> float:
    """Error of two rows of different length that are read together and then apart again."""
    assert found.form is not None
    new = ids[:, :1]
    lengths = [_READ, _MORE]
    caches = []
    apart = []  # states of two tokens per row, each row alone
    for length in lengths:
        _, cache = found.begin(target, ids[:, -length:], ())
        first, after = found.go_on(
            target,
            found.form.copy(cache),
            new,
            (),
            [length],
        )
        second, _ = found.go_on(target, after, new, (), [length + 1])
        apart += [first.last_hidden, second.last_hidden]
        caches.append(cache)

    stacked = found.form.stack(caches, lengths)
    first, stacked = found.go_on(
        target,
        stacked,
        new.expand(2, 1),
        (),
        lengths,
    )
    together = []
    for index, length in enumerate(lengths):
        row = found.form.row(stacked, index, length + 1, _READ - length)
        second, _ = found.go_on(target, row, new, (), [length + 1])
        together += [first.last_hidden[index : index + 1], second.last_hidden]
    return relative_error(torch.cat(together), torch.cat(apart))


def pack_proven(target: ProvenModel) -> None:
    """Packs the linear layers that another model's code calls.

    They are put back if the model's states change, or if it continues in another way.
    """
    ids = proof_tokens(target, _READ)[None]
    with torch.no_grad():
        before = target.forward(ids, ()).last_hidden
        replaced = pack(target.model, norms=False)
        change = _tried(lambda: relative_error(target.forward(ids, ()).last_hidden, before))
        if change > 1e-3 or str(Continuation.prove(target)) != str(target.continuation):
            for parent, name, child in replaced:
                setattr(parent, name, child)
