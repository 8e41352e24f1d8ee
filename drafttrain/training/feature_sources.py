"""The frozen target's part of a training step: run online, read from a disk or a server, or kept
from an earlier epoch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttrain.batch import Batch
from drafttrain.errors import UserError
from drafttrain.losses import LazyRows, StoredTopK, Targets, tempered
from drafttrain.target import Target
from drafttrain.target.attention import DocumentAttention
from drafttrain.target.shared_rows import run_shared
from drafttrain.training.states_ahead import Inputs, States, StatesAhead

if TYPE_CHECKING:
    from drafttrain.data.state_client import StateClient
    from drafttrain.data.store import FeatureStore

# What a source returns: features [b, s, f*h], the target distributions of r rows, and row_of [b, s]
# int64: the row whose distribution follows each position, -1 where no loss reads one. In a process
# that shares the rows, features [1, part, f*h].
TargetPart = tuple[Tensor, Targets, Tensor]
_READERS = 4  # threads that read stored states
_ASKERS = 16  # requests to servers at once, which a server runs together


class CachedStates(NamedTuple):
    """One conversation's part between epochs. The r rows are those that losses read; s is the
    conversation's length.
    """

    features: Tensor  # [s, f*h]
    hidden: Tensor  # [r, h] what the target's head reads
    # Empty until they are read: drafter id of the target's likeliest token [r] int64, and logs of
    # the full softmax denominators [r, 1 + temperatures].
    statistics: list[tuple[Tensor, Tensor]]


class CachedTopK(NamedTuple):
    """The same, where the stored features hold likeliest tokens instead of states."""

    features: Tensor  # [s, f*h]
    argmax: Tensor  # [r] int64 drafter id of the target's likeliest token
    ids: Tensor  # [r, k] drafter ids, -1 where its vocabulary lacks the token
    log_p: Tensor  # [r, k]
    rest: Tensor  # [r] mass of all other tokens


Cached = CachedStates | CachedTopK


class BatchSource(Protocol):
    """Where a batch's features and target distributions come from; the latter are None if the loss
    reads none.

    Attributes:
        hits: conversations by where they came from, for training.json.
        has_states: target distributions come as states times head (`TargetRows`), which closed-form
            starts read.
        ahead: what reads states ahead of the step; None if nothing is read.
    """

    hits: dict[str, int]
    has_states: bool
    ahead: StatesAhead | None

    def expect(self, inputs: Inputs) -> None:
        """Announces a coming micro-batch, so that its states are there when it is its turn."""

    def read_once(self, indices: Iterable[int]) -> None:
        """Keeps the states of these conversations in memory if they come from a server."""

    def close(self) -> None:
        """Ends reading ahead, and connections to servers."""

    def measuring(self) -> contextlib.AbstractContextManager[StatesAhead | None]:
        """Reads ahead for a measurement, apart from training, whose coming conversations stay as
        they are.
        """

    def __call__(self, batch: Batch) -> tuple[Tensor, Targets | None, Tensor | None]: ...


class NoTarget:
    """The source of a run that does not read the target: pretraining of a language model on text."""

    hits: dict[str, int] = {}
    has_states = False
    ahead: StatesAhead | None = None

    def expect(self, inputs: Inputs) -> None:
        """Nothing is read."""

    def read_once(self, indices: Iterable[int]) -> None:
        """No states are read."""

    def close(self) -> None:
        """Nothing is open."""

    def measuring(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __call__(self, batch: Batch) -> tuple[Tensor, None, None]:
        return torch.empty(*batch.input_ids.shape, 0, device=batch.input_ids.device), None, None


class TargetSource:
    """Gives a batch its target features and distributions at the least cost.

    A conversation is looked up in memory (kept from an earlier epoch), then in stored features or
    at servers; else the target runs. Results are kept up to `limit_bytes`. Conversations of no data
    set (index below 0) are neither looked up nor kept.

    Args:
        target: frozen; feature_layers: what the drafter reads; kept_ids: [d] the drafter's
            vocabulary.
        stored: features on disk, or None. ids: conversation id by data set index, to find them
            there.
        limit_bytes: memory for kept conversations.
        temperatures: other than 1, at which the loss reads the target's full distribution.
        prefetch_bytes: of states that are read or asked for before their step.
        servers: give the states in place of `stored`; the target may then be a shell.
    """

    def __init__(
        self,
        target: Target,
        feature_layers: tuple[int, ...],
        kept_ids: Tensor,
        stored: FeatureStore | None = None,
        ids: list[str] | None = None,
        limit_bytes: float = 0,
        temperatures: tuple[float, ...] = (),
        prefetch_bytes: float = 1e9,
        servers: StateClient | None = None,
    ):
        self.target = target
        self.layers = feature_layers
        self.stored = stored
        self.ids = ids or []
        self.temperatures = temperatures
        device = target.device
        self.kept_ids = kept_ids.to(device)
        head = target.head_weight
        # Gathered for each batch, so that backward need not hold the copy; kept where the rows come
        # from elsewhere.
        held = head is target.lm_head.weight and head.device == device
        if held:
            self._weight = None
        else:
            self._weight = self._head_rows(head)
        bias = target.head_bias
        # [d]
        if bias is None:
            self.bias = None
        else:
            self.bias = bias.to(device)[self.kept_ids].float()
        self.to_drafter = torch.full(
            (target.vocab_size,),
            -1,
            device=device,
        )  # [v] drafter id of each target id
        self.to_drafter[self.kept_ids] = torch.arange(len(kept_ids), device=device)
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.kept: dict[int, Cached] = {}
        self.has_states = stored is None or not stored.top_k
        # Conversations per forward of the target, None for all. One on a CPU: its values then do
        # not depend on which others are in the batch, so a resumed run, which has nothing kept yet,
        # computes the same.
        self.together: int | None = 1 if device.type == "cpu" else None
        self.servers = servers
        self.prefetch_bytes = prefetch_bytes
        self.once: dict[int, States] = {}  # conversations that are read once
        if stored is None and servers is None:
            self.ahead = None
        else:
            self.ahead = self._new_ahead()
        self.read_from = "stored" if servers is None else "streamed"
        self.hits = {"memory": 0, self.read_from: 0, "online": 0}

    @property
    def weight(self) -> Tensor:
        """[d, h] rows of the target's head for the drafter's vocabulary."""
        if self._weight is None:
            return self._head_rows(self.target.head_weight)
        return self._weight

    def _head_rows(self, head: Tensor) -> Tensor:
        all_kept = (
            len(self.kept_ids) == self.target.vocab_size
        )  # ids are then in order, and a copy would be large
        return (head if all_kept else head[self.kept_ids.to(head.device)]).to(self.target.device)

    def _new_ahead(self) -> StatesAhead:
        token_bytes = (
            4 * (len(self.layers) + 1) * self.target.hidden_size
        )  # of float32, until states are measured
        threads = _READERS if self.servers is None else _ASKERS
        return StatesAhead(self._read, self.prefetch_bytes, token_bytes, threads)

    def _read(self, index: int, tokens: Tensor) -> States:
        """The states of a conversation of token ids [s], as `FeatureStore.get` returns them;
        several threads call it.
        """
        if self.servers is None:
            assert self.stored is not None
            return self.stored.get(self.ids[index])
        if (kept := self.once.get(index)) is not None:
            return kept
        # The last token's state is not needed. bfloat16, as stored: a streamed run equals one on
        # stored states.
        states = self.servers.request(tokens[:-1].tolist())
        found = {
            "features": states.features.bfloat16(),
            "last_hidden": states.last_hidden.bfloat16(),
        }
        if index in self.once:
            self.once[index] = found
        return found

    def expect(self, inputs: Inputs) -> None:
        if self.ahead is None:
            return
        batch = Batch.of(inputs)
        ids = batch.input_ids.cpu()
        index = batch.index.tolist()
        for (row, start, length), number in zip(batch.conversations().tolist(), index, strict=True):
            if number >= 0 and number not in self.kept:
                self.ahead.expect(number, ids[row, start : start + length])

    def read_once(self, indices: Iterable[int]) -> None:
        self.once |= dict.fromkeys(indices)

    def close(self) -> None:
        if self.servers is not None:
            self.servers.close()  # first, so that waiting requests end
        if self.ahead is not None:
            self.ahead.close()

    @contextlib.contextmanager
    def measuring(self) -> Iterator[StatesAhead | None]:
        before = self.ahead
        self.ahead = before and self._new_ahead()
        try:
            yield self.ahead
        finally:
            if self.ahead is not None:
                self.ahead.close()
            self.ahead = before

    @torch.no_grad()
    def __call__(self, batch: Batch) -> TargetPart:
        mask = batch.response_mask  # [b, s] bool
        # [b, s] bool, positions whose target distribution some depth is trained on: both x_j and
        # x_{j+1} are in a response
        needed = F.pad(mask[:, :-1] & mask[:, 1:], (0, 1))
        s = mask.shape[1]
        part = batch.part
        if batch.shared is not None:  # what this process's anchors read
            needed.view(-1)[: part.seen.start] = False
            needed.view(-1)[part.seen.stop :] = False
        places = [
            (row, slice(start, start + length))
            for row, start, length in batch.conversations().tolist()
        ]
        # Positions of each conversation that are in this process's part.
        held = [part.within(row * s + span.start, span.stop - span.start) for row, span in places]
        rows = [
            needed[place].nonzero().squeeze(1) for place in places
        ]  # [r] each, positions in the conversation
        # by number in the batch
        indices = batch.index.tolist()
        found = dict[int, Cached]()
        for number, index in enumerate(indices):
            if index in self.kept and batch.shared is None:  # parts are not kept
                found[number] = self.kept[index]
                self.hits["memory"] += 1
                if self.ahead is not None:
                    self.ahead.release(index)
        if self.ahead is not None:
            ids = batch.input_ids.cpu()
            read = [
                number for number, index in enumerate(indices) if index >= 0 and number not in found
            ]
            for number in read:  # all at once, those that were not announced too
                self.ahead.ask(indices[number], ids[places[number]])
            for number in read:
                states = self.ahead.take(indices[number], ids[places[number]])
                # A response's last token was sampled but never fed, so its state may be missing; no
                # loss reads it.
                if states is not None and len(states["features"]) >= len(ids[places[number]]) - 1:
                    found[number] = self._from_states(states, rows[number], held[number])
                    self.hits[self.read_from] += 1
        missing = [number for number in range(len(places)) if number not in found]
        if missing and self.stored is not None and self.stored.top_k:
            raise UserError(
                f"the data's features hold likeliest tokens, but none for {len(missing)} conversations of a batch (or they end "
                "too early); run drafttrain features on this data set again, with this run's max_length"
            )
        size = self.together or max(len(missing), 1)
        if missing and batch.shared is not None:
            parts = run_shared(
                self.target,
                self.layers,
                batch,
                [(*places[n], held[n], rows[n]) for n in missing],
            )
            for number, (features, hidden) in zip(missing, parts, strict=True):
                found[number] = CachedStates(features, hidden, [])
        for begin in range(0, len(missing) if batch.shared is None else 0, size):
            together = missing[begin : begin + size]
            made = self._run_target(
                [batch.input_ids[places[n]] for n in together], [rows[n] for n in together]
            )
            found.update(zip(together, made, strict=True))
        self.hits["online"] += len(missing)
        for number, index in enumerate(indices):
            size = _size(found[number])
            wanted = batch.shared is None and index >= 0 and index not in self.kept
            if wanted and self.used_bytes + size <= self.limit_bytes:
                self.kept[index] = found[number]
                self.used_bytes += size
        return self._assemble(
            batch,
            [found[number] for number in range(len(places))],
            places,
            held,
            needed,
        )

    def drop(self, index: int) -> None:
        """Frees what is kept of a conversation."""
        self.used_bytes -= _size(self.kept.pop(index))

    @torch.no_grad()
    def _statistics(
        self,
        hidden: Tensor,
        known: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """`CachedStates.statistics` of states [r, h]; kept in `known`."""
        if known:
            return known[0]
        hidden = hidden.to(self.target.compute_dtype)
        temperatures = (1.0, *self.temperatures)
        log_z = hidden.new_empty(len(hidden), len(temperatures), dtype=torch.float32)
        argmax = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        for start in range(0, len(hidden), 256):
            part = slice(start, start + 256)
            logits = self.target.head(hidden[part])  # [256, v] float32
            log_z[part] = torch.stack([tempered(logits, at)[1] for at in temperatures], dim=1)
            argmax[part] = self.to_drafter[logits.argmax(-1)]
        known.append((argmax, log_z))
        return known[0]

    def _shape(self, products: Tensor) -> Tensor:
        """Logits [r, d] from states times head: the target's bias, scale and soft cap."""
        return self.target.shape_logits(products if self.bias is None else products + self.bias)

    def _from_states(self, found: dict[str, Tensor], rows: Tensor, held: slice) -> Cached:
        features = found["features"][held].to(
            self.target.device
        )  # [held, f*h], or one less at the end
        features = F.pad(features, (0, 0, 0, held.stop - held.start - len(features)))
        if "last_hidden" in found:
            hidden = found["last_hidden"].to(rows.device)[rows]  # [r, h]
            return CachedStates(features, hidden, [])
        ids, logits, log_z = (
            found[name].to(rows.device)[rows] for name in ("topk_ids", "topk_logits", "log_z")
        )
        # [r, k]
        ids = self.to_drafter[ids.long()]
        log_p = logits.float() - log_z.unsqueeze(1)
        rest = torch.log1p(-log_p.exp().sum(-1).clamp(max=1 - 1e-6)).exp()  # [r]
        return CachedTopK(features, ids[:, 0], ids, log_p, rest)

    def _run_target(
        self,
        conversations: list[Tensor],
        rows: list[Tensor],
    ) -> Iterator[CachedStates]:
        """Conversations of token ids [s] in one forward of the target; rows: [r] positions that
        losses read.
        """
        for needed, (features, last) in zip(
            rows,
            run_rows(self.target, self.layers, conversations),
            strict=True,
        ):
            hidden = last[needed]  # [r, h]
            if (
                self.limit_bytes > 0
            ):  # to be kept: half the memory in bfloat16, the precision of stored features
                features = features.bfloat16()
                hidden = hidden.bfloat16()
            yield CachedStates(features, hidden, [])

    def _assemble(
        self,
        batch: Batch,
        found: list[Cached],
        places: list[tuple[int, slice]],
        held: list[slice],
        needed: Tensor,
    ) -> TargetPart:
        (b, s), part = batch.input_ids.shape, batch.part
        features = found[0].features.new_zeros(part.end - part.begin, found[0].features.shape[1])
        for (row, span), own, conversation in zip(places, held, found, strict=True):
            begin = row * s + span.start - part.begin
            features[begin + own.start : begin + own.stop] = conversation.features
        features = features.unflatten(0, (1, -1) if batch.shared else (b, s))
        row_of = torch.full((b, s), -1, device=needed.device)
        row_of[needed] = torch.arange(int(needed.sum()), device=needed.device)
        # The row at position j predicts the token at j + 1, and every row has one.
        sampled = self.to_drafter[batch.input_ids[:, 1:][needed[:, :-1]]]  # [r]
        _, *parts = zip(*found, strict=True)
        if isinstance(found[0], CachedTopK):  # of one data set, so all are
            argmax, ids, log_p, rest = map(torch.cat, parts)
            return features, StoredTopK(ids, log_p, rest, argmax, sampled), row_of
        hidden = torch.cat(parts[0])
        known = parts[1]
        counts = [len(each) for each in parts[0]]

        def statistics() -> tuple[Tensor, Tensor, dict[float, Tensor]]:
            columns = zip(*map(self._statistics, hidden.split(counts), known), strict=True)
            argmax, log_z = map(torch.cat, columns)
            first, *others = log_z.unbind(1)  # [r] each
            return argmax, first, dict(zip(self.temperatures, others, strict=True))

        if self.bias is not None or self.target.shapes_logits:
            shape = self._shape
        else:
            shape = None
        return features, LazyRows(hidden, self.weight, statistics, shape, sampled), row_of


def _size(found: Cached) -> int:
    """Bytes that keeping a conversation takes; the statistics of its states are small beside them."""
    return sum(part.nbytes for part in found if isinstance(part, Tensor))


def run_rows(
    target: Target,
    layers: Sequence[int],
    conversations: Sequence[Tensor],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features [s, f*h] and last states [s, h] of each conversation of token ids [s], in one
    forward.

    Where the target's attention is ours they lie behind each other in one row, without padding. A
    state or an attention of the model's own would leak from one to the next: there each is a row,
    padded on its right, which no position before it sees.
    """
    lengths = [len(ids) for ids in conversations]
    target.check_length(max(lengths))
    if target.decoding_path == "snapshot":
        ids = pad_sequence(list(conversations), batch_first=True)  # [b, s]
        out = target.forward(ids, layers)
        parts = zip(out.features, out.last_hidden, lengths, strict=True)
        yield from ((features[:length], last[:length]) for features, last, length in parts)
        return
    device = conversations[0].device
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    ids = torch.cat(list(conversations))  # [n] tokens of all of them
    out = target.forward(ids[None], layers, positions[None], DocumentAttention(lengths))
    yield from zip(out.features[0].split(lengths), out.last_hidden[0].split(lengths), strict=True)
