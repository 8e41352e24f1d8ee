"""The interface of an origin of states, and the origin on a disk.

An origin gives the target's states of conversations. `Stored` (here) reads them from a data set,
`Served` (served.py) asks vLLM servers, `Online` and `SharedOnline` (source.py) run the target, and
`KeptStates` (source.py) holds those of an earlier epoch. `Ahead` (ahead.py) reads from another
origin in threads.

A conversation has s tokens. Losses read the last states of r of them, and all features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from drafttrain.data.store import FeatureStore

_READERS = 4  # threads that read stored states


class TopTokens(NamedTuple):
    """The target's likeliest tokens at n positions, stored in place of its last states."""

    ids: Tensor  # [n, k] int32, the likeliest first
    logits: Tensor  # [n, k]
    log_z: Tensor  # [n] log of the full softmax denominator


@dataclass
class RowStates:
    """The states of a row of tokens. n is s, or s - 1 where the last token's state is left out."""

    features: Tensor  # [n, f*h]
    last: Tensor | TopTokens  # [n, h] behind the final norm; of a cut row [r, h]
    # Empty until a loss reads them: drafter ids of the likeliest tokens [r], and logs of the full
    # softmax denominators [r, 1 + temperatures].
    statistics: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the states; the statistics are small."""
        if isinstance(self.last, TopTokens):
            last = sum(part.nbytes for part in self.last)
        else:
            last = self.last.nbytes
        return self.features.nbytes + last


@dataclass(frozen=True)
class Row:
    """A conversation whose states are needed. Without `needed` they are those of all tokens."""

    index: int  # row of the data set, below 0 for a conversation of no data set
    tokens: Tensor  # [s] int64
    needed: Tensor | None = None  # [r] positions whose last states losses read
    # positions whose features this process needs
    held: slice = field(default_factory=lambda: slice(None))
    begin: int = 0  # flat position of the first token in the batch [b, s]

    def cut(self, states: RowStates) -> RowStates:
        """What this row needs of the states of all its tokens, on the device of `needed`."""
        if self.needed is None:
            return states
        device = self.needed.device
        features = states.features[self.held].to(device)
        # The last token's state may be missing.
        missing = self.held.stop - self.held.start - len(features)
        features = F.pad(features, (0, 0, 0, missing))  # [held, f*h]
        if isinstance(states.last, TopTokens):
            ids = states.last.ids.to(device)[self.needed]
            logits = states.last.logits.to(device)[self.needed]
            log_z = states.last.log_z.to(device)[self.needed]
            return RowStates(features, TopTokens(ids, logits, log_z))
        return RowStates(features, states.last.to(device)[self.needed])


class Origin:
    """Where states come from.

    Attributes:
        name: in training.json's counts of conversations by origin.
        reads: states are read from elsewhere, so they are worth reading ahead of their step, and
            `states` may be called from any thread.
        threads: calls of `states` at once that pay.
        has_states: `RowStates.last` holds states, not likeliest tokens.
    """

    name: str
    reads = False
    threads = 1
    has_states = True

    def states(self, rows: Sequence[Row]) -> list[RowStates | None]:
        """The states of each row, cut to what it needs; None for rows that this origin lacks."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends connections."""


class Stored(Origin):
    """States on a disk.

    Args:
        store: of the data set. ids: its conversations' ids in the order of the rows.
    """

    name = "stored"
    reads = True
    threads = _READERS

    def __init__(self, store: FeatureStore, ids: Sequence[str]):
        self.store = store
        self.ids = ids
        self.has_states = not store.top_k

    def states(self, rows: Sequence[Row]) -> list[RowStates | None]:
        return [self._read(row) for row in rows]

    def _read(self, row: Row) -> RowStates | None:
        if row.index < 0:
            return None
        found = self.store.get(self.ids[row.index])
        # A response's last token was sampled but never fed, so its state may be missing. No loss
        # reads it.
        if found is None or len(found["features"]) < len(row.tokens) - 1:
            return None
        if "last_hidden" in found:
            return row.cut(RowStates(found["features"], found["last_hidden"]))
        top = TopTokens(found["topk_ids"], found["topk_logits"], found["log_z"])
        return row.cut(RowStates(found["features"], top))
