"""What the frozen target says about a batch: run online, taken from stored features, or kept from an earlier epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drafttrain.batch import Batch, TargetOutput
from drafttrain.errors import UserError
from drafttrain.losses import StoredTopK, TargetRows
from drafttrain.ops.tree_attention import TreeLayout, tree_attention
from drafttrain.target import Target

if TYPE_CHECKING:
    from drafttrain.data.store import FeatureStore


class Documents:
    """An attention context for one row of several documents: each attends causally, and only to itself."""

    def __init__(self, lengths: list[int]):
        self.parts = []
        start = 0
        for length in lengths:
            self.parts.append((slice(start, start + length), TreeLayout(0, count=length)))
            start += length

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **form: Any) -> Tensor:
        """As `AttentionContext.attend`."""
        outs = [
            tree_attention(query[:, :, part], key[:, :, part], value[:, :, part], layout, **form)
            for part, layout in self.parts
        ]
        return torch.cat(outs, dim=2).transpose(1, 2)


@dataclass
class _Entry:
    """One conversation: features [s, f*h] and, at the rows that losses need, states [r, h], log_z [r, 1 + temperatures] and
    argmax [r].

    With stored top-k tokens there are no states: hidden [r, k] holds their log-probabilities, ids [r, k] their drafter ids
    (-1: not in its vocabulary), and log_z [r, 1] the log of the mass of all other tokens.
    """

    features: Tensor
    hidden: Tensor
    log_z: Tensor
    argmax: Tensor
    ids: Tensor | None = None

    @property
    def bytes(self) -> int:
        parts = (self.features, self.hidden, self.log_z, self.argmax, self.ids)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)


def needed_rows(response_mask: Tensor) -> Tensor:
    """[b, s] bool: positions whose target distribution some depth is trained on (both x_j and x_{j+1} in a response)."""
    needed = torch.zeros_like(response_mask)
    needed[:, :-1] = response_mask[:, :-1] & response_mask[:, 1:]
    return needed


class NoTarget:
    """Stands for a target that is not asked, while a language model is pretrained on text."""

    hits: dict[str, int] = {}

    def __call__(self, batch: Batch) -> tuple[TargetOutput, None, None]:
        nothing = torch.empty(*batch.input_ids.shape, 0, device=batch.input_ids.device)
        return TargetOutput(nothing, nothing), None, None


class TargetSource:
    """Gives a batch its target features and distributions, at the least cost.

    A conversation is looked up in memory (kept from an earlier epoch), then in stored features (written while its
    responses were generated), else the target runs. What was computed is kept while `limit_bytes` lasts. Conversations
    of no data set (index below 0) are neither looked up nor kept.

    Args:
        target: frozen; feature_layers: what the drafter reads; kept_ids: [d] the drafter's vocabulary.
        stored: features on disk, or None. ids: conversation id by data set index, to find them there.
        limit_bytes: memory for kept conversations.
        temperatures: other than 1, at which the loss reads the target's full distribution.
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
    ):
        self.target, self.layers, self.stored, self.ids = target, feature_layers, stored, ids
        self.temperatures = temperatures
        device = target.device
        self.kept_ids = kept_ids.to(device)
        whole = len(kept_ids) == target.vocab_size  # then ids are kept in order, and a copy would be large
        head = target.head_weight
        self.weight = (head if whole else head[self.kept_ids.to(head.device)].contiguous()).to(device)
        bias = target.head_bias
        self.bias = None if bias is None else bias.to(device)[self.kept_ids].float()
        self.to_drafter = torch.full((target.vocab_size,), -1, device=device)
        self.to_drafter[self.kept_ids] = torch.arange(len(kept_ids), device=device)
        self.limit_bytes, self.used_bytes = limit_bytes, 0
        self.kept: dict[int, _Entry] = {}
        self.hits = {"memory": 0, "stored": 0, "online": 0}

    @torch.no_grad()
    def __call__(self, batch: Batch) -> tuple[TargetOutput, TargetRows | StoredTopK, Tensor]:
        """Features and last states [b, s, .], the needed rows [r, .], and row_of [b, s] (-1 where no row is needed)."""
        needed = needed_rows(batch.response_mask)
        index = batch.index.tolist()
        where = [(row, slice(start, start + length)) for row, start, length in batch.conversations().tolist()]
        entries: list[_Entry | None] = [self.kept.get(i) for i in index]
        self.hits["memory"] += sum(entry is not None for entry in entries)
        for place, entry in enumerate(entries):
            if entry is None and self.stored is not None and self.ids is not None and index[place] >= 0:
                entries[place] = self._from_store(index[place], needed[where[place]])
        missing = [place for place, entry in enumerate(entries) if entry is None]
        if missing and self.stored is not None and self.stored.top_k:
            raise UserError(
                f"the data's features hold likeliest tokens, but none for {len(missing)} conversations of a batch (or they end "
                "too early); run drafttrain features on this data set again, with this run's max_length"
            )
        if missing:
            self._run_target(batch, missing, where, index, needed, entries)
        return self._assemble(batch, entries, where, needed)

    def _keep(self, index: int, entry: _Entry) -> _Entry:
        if index >= 0 and self.used_bytes + entry.bytes <= self.limit_bytes:
            self.kept[index] = entry
            self.used_bytes += entry.bytes
        return entry

    def _statistics(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[r, h] -> logs of the full softmax denominators [r, 1 + temperatures], drafter id of the likeliest token [r]."""
        log_z, argmax = [], []
        for part in hidden.split(256):
            logits = self.target.head(part)
            found = [torch.logsumexp(logits, dim=-1)]
            found += [torch.logsumexp(logits / temperature, dim=-1) for temperature in self.temperatures]
            log_z.append(torch.stack(found, dim=1))
            argmax.append(self.to_drafter[logits.argmax(-1)])
        if not log_z:
            none = hidden.new_empty(0, 1 + len(self.temperatures), dtype=torch.float32)
            return none, torch.empty(0, dtype=torch.long, device=hidden.device)
        return torch.cat(log_z), torch.cat(argmax)

    def _shape(self, products: Tensor) -> Tensor:
        """Logits [r, d] from states times head."""
        return self.target.shape_logits(products if self.bias is None else products + self.bias)

    def _from_store(self, index: int, needed: Tensor) -> _Entry | None:
        assert self.stored is not None and self.ids is not None
        found = self.stored.get(self.ids[index])
        if found is None:
            return None
        length = len(needed)
        features = found["features"].to(self.target.device)
        if len(features) < length - 1:
            return None
        # A response's last token was sampled but never fed, so its state may be missing; nothing reads it.
        pad = length - min(len(features), length)
        rows = needed[: len(features)].nonzero().squeeze(1)
        features = torch.nn.functional.pad(features[:length], (0, 0, 0, pad))
        self.hits["stored"] += 1
        if "last_hidden" in found:
            hidden = found["last_hidden"].to(self.target.device)[rows]
            entry = _Entry(features, hidden, *self._statistics(hidden.to(self.target.compute_dtype)))
        else:
            ids, logits, log_z = (found[name].to(rows.device)[rows] for name in ("topk_ids", "topk_logits", "log_z"))
            ids, log_p = self.to_drafter[ids.long()], logits.float() - log_z.unsqueeze(1)
            entry = _Entry(
                features, log_p, torch.log1p(-log_p.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6)), ids[:, 0], ids
            )
        return self._keep(index, entry)

    def _run_target(
        self,
        batch: Batch,
        missing: list[int],
        where: list[tuple[int, slice]],
        index: list[int],
        needed: Tensor,
        entries: list[_Entry | None],
    ) -> None:
        """The missing conversations in one row, without padding.

        On a CPU one by one, for values that do not depend on which ones came together. What is kept is then the same whenever
        it was computed, so a resumed run, which has nothing kept yet, computes the same.
        """
        size = 1 if self.target.device.type == "cpu" else len(missing)
        for begin in range(0, len(missing), size):
            together = missing[begin : begin + size]
            ids = torch.cat([batch.input_ids[where[place]] for place in together])
            lengths = [where[place][1].stop - where[place][1].start for place in together]
            self.target.check_length(max(lengths))
            positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
            out = self.target.forward(ids[None], self.layers, positions[None], Documents(lengths))
            parts = zip(together, out.features[0].split(lengths), out.last_hidden[0].split(lengths), strict=True)
            for place, features, last in parts:
                hidden = last[needed[where[place]].nonzero().squeeze(1)]
                entry = _Entry(features, hidden, *self._statistics(hidden))
                entries[place] = self._keep(index[place], self._compact(entry))
        self.hits["online"] += len(missing)

    def _compact(self, entry: _Entry) -> _Entry:
        """bfloat16 copies when they are to be kept: half the memory, and what stored features hold too."""
        if self.limit_bytes <= 0:
            return entry
        return _Entry(entry.features.bfloat16(), entry.hidden.bfloat16(), entry.log_z, entry.argmax)

    def _assemble(
        self, batch: Batch, entries: list[Any], where: list[tuple[int, slice]], needed: Tensor
    ) -> tuple[TargetOutput, Any, Tensor]:
        b, s = batch.input_ids.shape
        features = entries[0].features.new_zeros(b, s, entries[0].features.shape[1])
        for place, entry in zip(where, entries, strict=True):
            features[place] = entry.features
        row_of = torch.full((b, s), -1, device=needed.device)
        row_of[needed] = torch.arange(int(needed.sum()), device=needed.device)
        # The row at position j predicts the token at j + 1, and all rows have one.
        sampled = self.to_drafter[batch.input_ids[:, 1:][needed[:, :-1]]]
        hidden, log_z, argmax = (
            torch.cat([getattr(entry, name) for entry in entries]) for name in ("hidden", "log_z", "argmax")
        )
        first, *others = log_z.unbind(1)
        rows: TargetRows | StoredTopK
        if entries[0].ids is not None:
            ids = torch.cat([entry.ids for entry in entries])
            rows = StoredTopK(ids, hidden, first.exp(), argmax, sampled)
        else:
            shape = self._shape if self.bias is not None or self.target.shapes_logits else None
            rows = TargetRows(
                hidden, self.weight, first, argmax, shape, sampled, dict(zip(self.temperatures, others, strict=True))
            )
        return TargetOutput(features, features[..., :0]), rows, row_of
