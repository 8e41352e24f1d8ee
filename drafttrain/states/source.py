"""The target's part of a training step: which states a batch needs, where they come from, their
layout as features and target distributions.

    Batch -> rows_of -> KeptStates, else Stored or Served, else Online -> targets
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttrain.batch import Batch
from drafttrain.data.row_images import RowImages
from drafttrain.errors import UserError
from drafttrain.losses import LazyRows, StoredTopK, Targets, tempered
from drafttrain.sequence_parallel import SharedPart
from drafttrain.states.ahead import Ahead, Inputs
from drafttrain.states.origins import Origin, Row, RowStates, TopTokens
from drafttrain.target import Target
from drafttrain.target.attention import DocumentAttention
from drafttrain.target.shared_rows import SharedRows, check_shared

_CHUNK = 256  # rows whose logits over the target's vocabulary exist at once

# What a step reads of the target: features [b, s, f*h], the target distributions of r rows, and
# row_of [b, s] int64, the row whose distribution follows each position, -1 where no loss reads one.
# In a process that shares the rows, features [1, part, f*h].
TargetPart = tuple[Tensor, Targets, Tensor]
RowStatistics = tuple[Tensor, Tensor]  # see `DraftedHead.statistics`


class BatchSource:
    """Where a batch's features and target distributions come from.

    Attributes:
        hits: conversations by where they came from, for training.json.
        has_states: target distributions come as states times head (`TargetRows`), which closed-form
            starts read.
        ahead: reads states ahead of the step; None if nothing is read.
    """

    hits: dict[str, int]
    has_states: bool
    ahead: Ahead | None = None

    def expect(self, inputs: Inputs) -> None:
        """Announces a coming micro-batch, so that its states are there when it is its turn."""

    def close(self) -> None:
        """Ends reading ahead, and connections to servers."""

    @contextlib.contextmanager
    def measuring(self) -> Iterator[Ahead | None]:
        """Reads ahead for a measurement; the coming conversations of training stay as they are."""
        yield None

    def __call__(self, batch: Batch) -> tuple[Tensor, Targets | None, Tensor | None]:
        """Features, target distributions and the row of each position, see `TargetPart`.

        The latter two are None if the loss reads none.
        """
        raise NotImplementedError


class NoTarget(BatchSource):
    """The source of a run that does not read the target: pretraining of a language model on text."""

    has_states = False

    def __init__(self) -> None:
        self.hits = {}

    def __call__(self, batch: Batch) -> tuple[Tensor, None, None]:
        features = torch.empty(*batch.input_ids.shape, 0, device=batch.input_ids.device)
        return features, None, None


class TargetSource(BatchSource):
    """Gives a batch its target features and distributions at the least cost.

    A conversation's states come from the first that has them: memory, `origin`, the target. Parts
    of rows that processes share, and conversations of no data set, are not kept in memory.

    Args:
        target: frozen; without layers if the origin has the states of all conversations.
        feature_layers: what the drafter reads. kept_ids: [d] the drafter's vocabulary.
        origin: stored or served states, if there are any.
        limit_bytes: memory for states that are kept for later epochs.
        temperatures: other than 1, at which the loss reads the target's full distribution.
        prefetch_bytes: of states that are read or asked for before their step.
    """

    def __init__(
        self,
        target: Target,
        feature_layers: tuple[int, ...],
        kept_ids: Tensor,
        origin: Origin | None = None,
        limit_bytes: float = 0,
        temperatures: tuple[float, ...] = (),
        prefetch_bytes: float = 1e9,
    ):
        self.target = target
        self.layers = feature_layers
        self.head = DraftedHead(target, kept_ids, temperatures)
        self.origin = origin
        self.kept = KeptStates(limit_bytes)
        # States to be kept are rounded like stored ones, which halves their memory.
        dtype = None
        if limit_bytes > 0:
            dtype = torch.bfloat16
        self.online = Online(target, feature_layers, dtype)
        self.prefetch_bytes = prefetch_bytes
        self.has_states = origin is None or origin.has_states
        name = "stored"
        if origin is not None:
            name = origin.name
        self.hits = {"memory": 0, name: 0, "online": 0}
        self.ahead = self._new_ahead()

    def read_words(self, kept_ids: Tensor) -> None:
        """Gives the distributions of another drafter's vocabulary [d] from now on."""
        if kept_ids.to(self.head.kept_ids.device).equal(self.head.kept_ids):
            return
        self.head = DraftedHead(self.target, kept_ids, self.head.temperatures)
        for states in self.kept.held.values():
            states.statistics.clear()  # they name tokens by their place in the vocabulary

    def _new_ahead(self) -> Ahead | None:
        if self.origin is None or not self.origin.reads:
            return None
        # Bytes of float32, until states are measured.
        token_bytes = 4 * (len(self.layers) + 1) * self.target.hidden_size
        return Ahead(self.origin, self.prefetch_bytes, token_bytes)

    def expect(self, inputs: Inputs) -> None:
        if self.ahead is None:
            return
        batch = Batch.of(inputs)
        ids = batch.input_ids.cpu()  # [b, s]
        places = batch.conversations().tolist()
        for (row, start, length), index in zip(places, batch.index.tolist(), strict=True):
            if index < 0 or index in self.kept.held:  # of no data set, or known
                continue
            tokens = ids[row, start : start + length]
            self.ahead.expect(Row(index, tokens))

    def close(self) -> None:
        if self.origin is not None:
            self.origin.close()  # first, so that waiting requests end
        if self.ahead is not None:
            self.ahead.close()

    @contextlib.contextmanager
    def measuring(self) -> Iterator[Ahead | None]:
        before = self.ahead
        self.ahead = self._new_ahead()
        try:
            yield self.ahead
        finally:
            if self.ahead is not None:
                self.ahead.close()
            self.ahead = before

    @torch.no_grad()
    def __call__(self, batch: Batch) -> TargetPart:
        rows = rows_of(batch)
        states = self._states(batch, rows)
        if batch.shared is None:
            for row, found in zip(rows, states, strict=True):
                self.kept.add(row, found)
        return targets(batch, rows, states, self.head)

    def _states(self, batch: Batch, rows: list[Row]) -> list[RowStates]:
        """The states of each row, from the first origin that has them."""
        found: dict[int, RowStates] = {}  # by number in the batch
        for origin in self._origins(batch):
            missing = [number for number in range(len(rows)) if number not in found]
            if not missing:
                break
            made = origin.states([rows[number] for number in missing])
            for number, states in zip(missing, made, strict=True):
                if states is None:
                    continue
                found[number] = states
                self.hits[origin.name] += 1
                if origin is self.kept and self.ahead is not None:
                    self.ahead.release(rows[number].index)
        if len(found) < len(rows):
            raise UserError(
                "the data's features hold likeliest tokens, but none for "
                f"{len(rows) - len(found)} conversations of a batch (or they end too early); run "
                "drafttrain features on this data set again, with this run's max_length"
            )
        return [found[number] for number in range(len(rows))]

    def _origins(self, batch: Batch) -> Iterator[Origin]:
        if batch.shared is None:
            yield self.kept
        if self.ahead is not None:
            yield self.ahead
        elif self.origin is not None:
            yield self.origin
        if not self.has_states:
            return  # states that are computed do not mix with stored likeliest tokens
        if isinstance(batch.shared, SharedPart):
            yield SharedOnline(self.target, self.layers, batch.shared)
        else:
            yield self.online


# -- origins that are part of this process ---------------------------------------------------------


class KeptStates(Origin):
    """States of an earlier epoch. Rows of no data set are not kept.

    Args:
        limit: bytes of states to keep.
    """

    name = "memory"

    def __init__(self, limit: float):
        self.limit = limit
        self.used = 0
        self.held: dict[int, RowStates] = {}  # by row of the data set

    def states(self, rows: Sequence[Row]) -> list[RowStates | None]:
        return [self.held.get(row.index) for row in rows]

    def add(self, row: Row, states: RowStates) -> None:
        """Keeps a row's states if they fit."""
        if self.used >= self.limit or row.index < 0 or row.index in self.held:
            return
        if self.used + states.nbytes <= self.limit:
            self.held[row.index] = states
            self.used += states.nbytes

    def keep_only(self, indices: Collection[int]) -> None:
        """Frees the states of all other rows."""
        for index in list(self.held):
            if index not in indices:
                self.used -= self.held.pop(index).nbytes


@dataclass(eq=False)
class Online(Origin):
    """The target in this process.

    Args:
        target: frozen. layers: of the features.
        dtype: to which states are rounded; None for as computed.
        images: of the rows, by index; a `TargetSource` is given them afterwards.

    Attributes:
        together: rows of text per forward of the target, None for all. One on a CPU: values then do not
            depend on which other rows are in the batch, so a resumed run, which has nothing in
            memory yet, computes the same.
    """

    target: Target
    layers: Sequence[int]
    dtype: torch.dtype | None = None
    images: RowImages | None = None
    name = "online"

    def __post_init__(self) -> None:
        self.together: int | None = None
        if self.target.device.type == "cpu":
            self.together = 1

    @torch.no_grad()
    def states(self, rows: Sequence[Row]) -> list[RowStates | None]:
        found: dict[int, RowStates] = {}  # by number in `rows`
        texts: list[int] = []
        for number, row in enumerate(rows):
            prompt = None
            if self.images is not None:
                prompt = self.images.prompt(row.index, row.tokens)
            if prompt is None:
                texts.append(number)
                continue
            # A row with images is a forward of its own.
            out = self.target.read_images(prompt, self.layers)
            found[number] = self._kept(row, out.features[0], out.last_hidden[0])

        size = self.together or max(len(texts), 1)
        for begin in range(0, len(texts), size):
            part = texts[begin : begin + size]
            made = run_rows(self.target, self.layers, [rows[number].tokens for number in part])
            for number, (features, last) in zip(part, made, strict=True):
                found[number] = self._kept(rows[number], features, last)
        return [found[number] for number in range(len(rows))]

    def _kept(self, row: Row, features: Tensor, last: Tensor) -> RowStates:
        """What a row needs of its states [s, f*h] and [s, h]."""
        if row.needed is not None:
            last = last[row.needed]  # [r, h]
        if self.dtype is not None:
            features = features.to(self.dtype)
            last = last.to(self.dtype)
        return RowStates(features, last)


@dataclass(eq=False)
class SharedOnline(Origin):
    """The target in processes that share rows: each runs it over its part of the tokens.

    Args:
        part: this process's part of the batch.
    """

    target: Target
    layers: Sequence[int]
    part: SharedPart
    name = "online"

    @torch.no_grad()
    def states(self, rows: Sequence[Row]) -> list[RowStates | None]:
        """Raises UserError: a target whose rows processes cannot share."""
        check_shared(self.target)
        part = self.part
        lengths = [len(row.tokens) for row in rows]
        self.target.check_length(max(lengths))

        # The n tokens of all rows and processes: positions in their rows, and in the batch.
        device = rows[0].tokens.device
        places = torch.cat([torch.arange(length, device=device) for length in lengths])  # [n]
        begins = torch.tensor([row.begin for row in rows])
        begins = torch.repeat_interleave(begins, torch.tensor(lengths)).to(device)  # [n]
        flat = places + begins

        counts = part.counts(flat)
        own = part.of(flat)
        count = own.stop - own.start
        spare = int(count == 0)  # a target runs no less than one token
        tokens = torch.cat([row.tokens for row in rows])  # [n]
        ids = F.pad(tokens[own], (0, spare))
        positions = F.pad(places[own], (0, spare))
        context = SharedRows(DocumentAttention(lengths), part, counts)
        out = self.target.forward(ids[None], self.layers, positions[None], context)

        # Losses read some states behind this process's part, too.
        last = out.last_hidden[0, :count]
        behind = part.group.behind(last[: part.reach])
        last = torch.cat((last, behind))  # [count + reach or more, h]
        sizes = [row.held.stop - row.held.start for row in rows]
        found: list[RowStates | None] = []
        for row, features in zip(rows, out.features[0, :count].split(sizes), strict=True):
            assert row.needed is not None
            # Numbers of the needed positions among this process's states.
            at = torch.searchsorted(flat, row.begin + row.needed) - own.start  # [r]
            found.append(RowStates(features, last[at]))
        return found


def run_rows(
    target: Target,
    layers: Sequence[int],
    conversations: Sequence[Tensor],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features [s, f*h] and last states [s, h] of token rows [s], computed in one forward.

    Where the target's attention is ours they lie behind each other in one row, without padding. A
    state or an attention of the model's own would leak from one to the next: there each is a row,
    padded on its right, which no position before it sees.
    """
    lengths = [len(ids) for ids in conversations]
    target.check_length(max(lengths))
    if target.decoding_path == "snapshot":
        ids = pad_sequence(list(conversations), batch_first=True)  # [b, s]
        out = target.forward(ids, layers)
        for features, last, length in zip(out.features, out.last_hidden, lengths, strict=True):
            yield features[:length], last[:length]
        return
    device = conversations[0].device
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])  # [n]
    ids = torch.cat(list(conversations))  # [n] tokens of all of them
    out = target.forward(ids[None], layers, positions[None], DocumentAttention(lengths))
    features = out.features[0].split(lengths)
    last = out.last_hidden[0].split(lengths)
    yield from zip(features, last, strict=True)


# -- from states to the tensors of a step ----------------------------------------------------------


class DraftedHead:
    """The target's head over the drafter's vocabulary.

    Args:
        kept_ids: [d] the drafter's vocabulary.
        temperatures: other than 1, at which the loss reads the target's full distribution.

    Attributes:
        to_drafter: [v] drafter id of each target id, -1 for tokens that the drafter lacks.
        bias: [d], or None.
    """

    def __init__(
        self,
        target: Target,
        kept_ids: Tensor,
        temperatures: tuple[float, ...] = (),
    ):
        device = target.device
        self.target = target
        self.temperatures = temperatures
        self.kept_ids = kept_ids.to(device)
        self.to_drafter = torch.full((target.vocab_size,), -1, device=device)
        self.to_drafter[self.kept_ids] = torch.arange(len(kept_ids), device=device)
        head = target.head_weight
        # Gathered for each batch, so that backward need not hold the copy; kept where the rows come
        # from elsewhere.
        self._weight: Tensor | None = None
        if head is not target.lm_head.weight or head.device != device:
            self._weight = self._rows_of(head)
        self.bias: Tensor | None = None
        if target.head_bias is not None:
            self.bias = target.head_bias.to(device)[self.kept_ids].float()

    @property
    def weight(self) -> Tensor:
        """[d, h] rows of the target's head for the drafter's vocabulary."""
        if self._weight is None:
            return self._rows_of(self.target.head_weight)
        return self._weight

    def _rows_of(self, head: Tensor) -> Tensor:
        # The whole vocabulary is in order, and a copy of it would be large.
        if len(self.kept_ids) < self.target.vocab_size:
            head = head[self.kept_ids.to(head.device)]
        return head.to(self.target.device)

    def shape(self, products: Tensor) -> Tensor:
        """Logits [r, d] from states times head: the target's bias, scale and soft cap."""
        if self.bias is not None:
            products = products + self.bias
        return self.target.shape_logits(products)

    @torch.no_grad()
    def statistics(self, hidden: Tensor, known: list[tuple[Tensor, Tensor]]) -> RowStatistics:
        """Drafter ids of the likeliest tokens [r] and log denominators [r, 1 + temperatures].

        They take a product of the states [r, h] with the target's whole head, so `known` keeps them.
        """
        if known:
            return known[0]
        hidden = hidden.to(self.target.compute_dtype)
        temperatures = (1.0, *self.temperatures)
        log_z = hidden.new_empty(len(hidden), len(temperatures), dtype=torch.float32)
        argmax = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        for start in range(0, len(hidden), _CHUNK):
            part = slice(start, start + _CHUNK)
            logits = self.target.head(hidden[part])  # [chunk, v] float32
            for column, temperature in enumerate(temperatures):
                _, log_z[part, column] = tempered(logits, temperature)
            argmax[part] = self.to_drafter[logits.argmax(-1)]
        known.append((argmax, log_z))
        return known[0]


def rows_of(batch: Batch) -> list[Row]:
    """What a step needs of each conversation of a batch."""
    mask = batch.response_mask
    # Positions whose target distribution some depth is trained on: both x_j and x_{j+1} are in a
    # response.
    needed = F.pad(mask[:, :-1] & mask[:, 1:], (0, 1))  # [b, s] bool
    part = batch.part
    if batch.shared is not None:
        # This process's anchors read no others.
        needed.view(-1)[: part.seen.start] = False
        needed.view(-1)[part.seen.stop :] = False

    rows = []
    places = batch.conversations().tolist()
    for (row, start, length), index in zip(places, batch.index.tolist(), strict=True):
        span = slice(start, start + length)
        begin = row * mask.shape[1] + start
        positions = needed[row, span].nonzero().squeeze(1)  # [r]
        held = part.within(begin, length)
        rows.append(Row(index, batch.input_ids[row, span], positions, held, begin))
    return rows


def targets(
    batch: Batch,
    rows: list[Row],
    states: list[RowStates],
    head: DraftedHead,
) -> TargetPart:
    """Lays the states of a batch's conversations out as the step reads them."""
    b, s = batch.input_ids.shape
    part = batch.part
    width = states[0].features.shape[1]
    features = states[0].features.new_zeros(part.end - part.begin, width)
    for row, found in zip(rows, states, strict=True):
        begin = row.begin - part.begin + row.held.start
        features[begin : begin + len(found.features)] = found.features
    if batch.shared is None:
        features = features.unflatten(0, (b, s))
    else:
        features = features.unsqueeze(0)

    needed = [row.begin + row.needed for row in rows if row.needed is not None]
    at = torch.cat(needed)  # [r] flat positions
    row_of = torch.full((b * s,), -1, device=at.device)
    row_of[at] = torch.arange(len(at), device=at.device)
    row_of = row_of.view(b, s)
    # The distribution at position j is that of the token at j + 1, and every row has one.
    sampled = head.to_drafter[batch.input_ids.flatten()[at + 1]]  # [r]

    # Of one data set, so all rows have likeliest tokens, or none has.
    tops = [found.last for found in states if isinstance(found.last, TopTokens)]
    if tops:
        ids = torch.cat([top.ids for top in tops]).long()  # [r, k] target ids
        ids = head.to_drafter[ids]
        logits = torch.cat([top.logits for top in tops]).float()  # [r, k]
        log_z = torch.cat([top.log_z for top in tops])  # [r]
        log_p = logits - log_z.unsqueeze(1)
        mass = log_p.exp().sum(-1).clamp(max=1 - 1e-6)  # [r] of the k tokens
        rest = torch.log1p(-mass).exp()  # [r]
        return features, StoredTopK(ids, log_p, rest, ids[:, 0], sampled), row_of
    return features, _lazy_rows(states, head, sampled), row_of


def _lazy_rows(states: list[RowStates], head: DraftedHead, sampled: Tensor) -> LazyRows:
    parts = [found.last for found in states if isinstance(found.last, Tensor)]  # [r, h] each
    counts = [len(part) for part in parts]
    hidden = torch.cat(parts)  # [r, h]
    known = [found.statistics for found in states]  # not `states`, which hold the features

    def statistics() -> tuple[Tensor, Tensor, dict[float, Tensor]]:
        argmaxes = []
        denominators = []
        for part, kept in zip(hidden.split(counts), known, strict=True):
            argmax, log_z = head.statistics(part, kept)
            argmaxes.append(argmax)
            denominators.append(log_z)
        log_z = torch.cat(denominators)  # [r, 1 + temperatures]
        by_temperature = {}
        for column, temperature in enumerate(head.temperatures, 1):
            by_temperature[temperature] = log_z[:, column]
        return torch.cat(argmaxes), log_z[:, 0], by_temperature

    shape = None
    if head.bias is not None or head.target.shapes_logits:
        shape = head.shape
    return LazyRows(hidden, head.weight, statistics, shape, sampled)
