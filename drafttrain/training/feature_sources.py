"""The frozen target's part of a training step: run online, read from stored features, or kept from an earlier epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.batch import Batch
from drafttrain.errors import UserError
from drafttrain.losses import StoredTopK, TargetRows, Targets, tempered
from drafttrain.ops.tree_attention import TreeLayout, tree_attention
from drafttrain.target import Target

if TYPE_CHECKING:
    from drafttrain.data.store import FeatureStore

# What a source returns: features [b, s, f*h], the target distributions of r rows, and row_of [b, s] int64: the row whose
# distribution follows each position, -1 where no loss reads one.
TargetPart = tuple[Tensor, Targets, Tensor]


class DocumentAttention:
    """An attention context for one row of several documents: each attends causally, and only to itself."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths
        self.layouts: dict[int, TreeLayout] = {}  # by length; they keep the masks of windowed layers

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one layer, as `AttentionContext.attend` declares it; no keys are cached."""
        outs = []
        for q, k, v in zip(*(x.split(self.lengths, dim=2) for x in (query, key, value)), strict=True):
            length = q.shape[2]
            if softcap is None and sinks is None and (window is None or window >= length):
                outs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True))
                continue
            layout = self.layouts.setdefault(length, TreeLayout(0, count=length))
            out = tree_attention(q, k, v, layout, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
            outs.append(out)
        return torch.cat(outs, dim=2).transpose(1, 2)  # [1, n, heads, e]


@dataclass
class CachedConversation:
    """One conversation's share of the target's part, as it is kept between epochs.

    Attributes:
        features: [s, f*h]. argmax: [r] int64 drafter id of the target's likeliest token at the rows that losses read.
    """

    features: Tensor
    argmax: Tensor

    @property
    def bytes(self) -> int:
        tensors: list[Tensor] = [getattr(self, each.name) for each in fields(self)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass
class CachedStates(CachedConversation):
    """With the target's states: hidden [r, h], and log_z [r, 1 + temperatures], logs of the full softmax denominators."""

    hidden: Tensor
    log_z: Tensor


@dataclass
class CachedTopK(CachedConversation):
    """With stored likeliest tokens: ids [r, k] drafter ids (-1: not in its vocabulary), log_p [r, k], rest [r] other mass."""

    ids: Tensor
    log_p: Tensor
    rest: Tensor


def needed_rows(response_mask: Tensor) -> Tensor:
    """[b, s] bool: positions whose target distribution some depth is trained on (both x_j and x_{j+1} in a response)."""
    needed = torch.zeros_like(response_mask)
    needed[:, :-1] = response_mask[:, :-1] & response_mask[:, 1:]
    return needed


class BatchSource(Protocol):
    """Where a batch's features and target distributions come from; the latter are None if the loss reads none.

    Attributes:
        hits: conversations by where they came from, for training.json.
        has_states: target distributions come as states times head (`TargetRows`), which closed-form starts read.
    """

    hits: dict[str, int]
    has_states: bool

    def __call__(self, batch: Batch) -> tuple[Tensor, Targets | None, Tensor | None]: ...


class NoTarget:
    """The source of a run that does not read the target: pretraining of a language model on text."""

    hits: dict[str, int] = {}
    has_states = False

    def __call__(self, batch: Batch) -> tuple[Tensor, None, None]:
        return torch.empty(*batch.input_ids.shape, 0, device=batch.input_ids.device), None, None


class TargetSource:
    """Gives a batch its target features and distributions at the least cost.

    A conversation is looked up in memory (kept from an earlier epoch), then in stored features; else the target runs.
    Results are kept up to `limit_bytes`. Conversations of no data set (index below 0) are neither looked up nor kept.

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
        self.target, self.layers, self.stored, self.ids = target, feature_layers, stored, ids or []
        self.temperatures = temperatures
        device = target.device
        self.kept_ids = kept_ids.to(device)
        all_kept = len(kept_ids) == target.vocab_size  # ids are then in order, and a copy of the head would be large
        head = target.head_weight
        self.weight = (head if all_kept else head[self.kept_ids.to(head.device)].contiguous()).to(device)  # [d, h]
        bias = target.head_bias
        self.bias = None if bias is None else bias.to(device)[self.kept_ids].float()  # [d]
        self.to_drafter = torch.full((target.vocab_size,), -1, device=device)  # [v] drafter id of each target id
        self.to_drafter[self.kept_ids] = torch.arange(len(kept_ids), device=device)
        self.limit_bytes, self.used_bytes = limit_bytes, 0
        self.kept: dict[int, CachedConversation] = {}
        self.has_states = stored is None or not stored.top_k
        self.hits = {"memory": 0, "stored": 0, "online": 0}

    @torch.no_grad()
    def __call__(self, batch: Batch) -> TargetPart:
        needed = needed_rows(batch.response_mask)  # [b, s] bool
        places = [(row, slice(start, start + length)) for row, start, length in batch.conversations().tolist()]
        found: list[CachedConversation | None] = []
        for index, place in zip(batch.index.tolist(), places, strict=True):
            conversation = self.kept.get(index)
            self.hits["memory"] += conversation is not None
            if conversation is None and self.stored is not None and index >= 0:
                conversation = self._from_store(self.stored, index, needed[place])
            found.append(conversation)
        missing = [number for number, conversation in enumerate(found) if conversation is None]
        if missing and self.stored is not None and self.stored.top_k:
            raise UserError(
                f"the data's features hold likeliest tokens, but none for {len(missing)} conversations of a batch (or they end "
                "too early); run drafttrain features on this data set again, with this run's max_length"
            )
        # One conversation at a time on a CPU: its values then do not depend on which others are in the batch, so a
        # resumed run, which has nothing kept yet, computes the same.
        size = 1 if self.target.device.type == "cpu" else max(len(missing), 1)
        for begin in range(0, len(missing), size):
            together = missing[begin : begin + size]
            for number, made in zip(together, self._run_target(batch, together, places, needed), strict=True):
                found[number] = made
        self.hits["online"] += len(missing)
        return self._assemble(batch, [each for each in found if each is not None], places, needed)

    def _keep(self, index: int, conversation: CachedConversation) -> None:
        if index >= 0 and self.used_bytes + conversation.bytes <= self.limit_bytes:
            self.kept[index] = conversation
            self.used_bytes += conversation.bytes

    def _statistics(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[r, h] -> drafter id of the likeliest token [r], logs of the full softmax denominators [r, 1 + temperatures]."""
        log_z, argmax = [], []
        for part in hidden.split(256) if len(hidden) else ():
            logits = self.target.head(part)  # [256, v] float32
            log_z.append(torch.stack([tempered(logits, at)[1] for at in (1.0, *self.temperatures)], dim=1))
            argmax.append(self.to_drafter[logits.argmax(-1)])
        if not log_z:
            none = hidden.new_empty(0, 1 + len(self.temperatures), dtype=torch.float32)
            return torch.empty(0, dtype=torch.long, device=hidden.device), none
        return torch.cat(argmax), torch.cat(log_z)

    def _shape(self, products: Tensor) -> Tensor:
        """Logits [r, d] from states times head: the target's bias, scale and soft cap."""
        return self.target.shape_logits(products if self.bias is None else products + self.bias)

    def _from_store(self, stored: FeatureStore, index: int, needed: Tensor) -> CachedConversation | None:
        found = stored.get(self.ids[index])
        if found is None:
            return None
        length = len(needed)
        features = found["features"].to(self.target.device)  # [s or s - 1, f*h]
        if len(features) < length - 1:
            return None
        # A response's last token was sampled but never fed, so its state may be missing; no loss reads it.
        pad = length - min(len(features), length)
        rows = needed[: len(features)].nonzero().squeeze(1)  # [r]
        features = F.pad(features[:length], (0, 0, 0, pad))
        self.hits["stored"] += 1
        conversation: CachedConversation
        if "last_hidden" in found:
            hidden = found["last_hidden"].to(self.target.device)[rows]  # [r, h]
            argmax, log_z = self._statistics(hidden.to(self.target.compute_dtype))
            conversation = CachedStates(features, argmax, hidden, log_z)
        else:
            ids, logits, log_z = (found[name].to(rows.device)[rows] for name in ("topk_ids", "topk_logits", "log_z"))
            ids, log_p = self.to_drafter[ids.long()], logits.float() - log_z.unsqueeze(1)  # [r, k]
            rest = torch.log1p(-log_p.exp().sum(-1).clamp(max=1 - 1e-6)).exp()  # [r]
            conversation = CachedTopK(features, ids[:, 0], ids, log_p, rest)
        self._keep(index, conversation)
        return conversation

    def _run_target(
        self, batch: Batch, together: list[int], places: list[tuple[int, slice]], needed: Tensor
    ) -> list[CachedConversation]:
        """The conversations `together` in one row of the target, without padding."""
        ids = torch.cat([batch.input_ids[places[number]] for number in together])  # [n] tokens of all of them
        lengths = [places[number][1].stop - places[number][1].start for number in together]
        self.target.check_length(max(lengths))
        positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
        out = self.target.forward(ids[None], self.layers, positions[None], DocumentAttention(lengths))
        made: list[CachedConversation] = []
        parts = zip(together, out.features[0].split(lengths), out.last_hidden[0].split(lengths), strict=True)
        for number, features, last in parts:  # [s, f*h], [s, h]
            hidden = last[needed[places[number]].nonzero().squeeze(1)]  # [r, h]
            argmax, log_z = self._statistics(hidden)
            if self.limit_bytes > 0:  # to be kept: half the memory in bfloat16, the precision of stored features
                features, hidden = features.bfloat16(), hidden.bfloat16()
            made.append(CachedStates(features, argmax, hidden, log_z))
            self._keep(int(batch.index[number]), made[-1])
        return made

    def _assemble(
        self, batch: Batch, found: list[CachedConversation], places: list[tuple[int, slice]], needed: Tensor
    ) -> TargetPart:
        b, s = batch.input_ids.shape
        features = found[0].features.new_zeros(b, s, found[0].features.shape[1])
        for place, conversation in zip(places, found, strict=True):
            features[place] = conversation.features
        row_of = torch.full((b, s), -1, device=needed.device)
        row_of[needed] = torch.arange(int(needed.sum()), device=needed.device)
        # The row at position j predicts the token at j + 1, and every row has one.
        sampled = self.to_drafter[batch.input_ids[:, 1:][needed[:, :-1]]]  # [r]
        argmax = torch.cat([each.argmax for each in found])
        top_k = [each for each in found if isinstance(each, CachedTopK)]
        if top_k:
            ids, log_p, rest = (torch.cat(x) for x in zip(*((e.ids, e.log_p, e.rest) for e in top_k), strict=True))
            return features, StoredTopK(ids, log_p, rest, argmax, sampled), row_of
        states = [each for each in found if isinstance(each, CachedStates)]
        first, *others = torch.cat([each.log_z for each in states]).unbind(1)  # [r] each
        shape: Callable[[Tensor], Tensor] | None = self._shape
        if self.bias is None and not self.target.shapes_logits:
            shape = None
        at = dict(zip(self.temperatures, others, strict=True))
        hidden = torch.cat([each.hidden for each in states])
        return features, TargetRows(hidden, self.weight, first, argmax, shape, sampled, at), row_of
