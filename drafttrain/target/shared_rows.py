"""The target's forward in processes that share rows: each runs it over its part of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.batch import Batch
from drafttrain.errors import UserError
from drafttrain.ops.tree_attention import AttentionForm
from drafttrain.sequence_parallel import SharedPart
from drafttrain.target.attention import DocumentAttention

if TYPE_CHECKING:
    from drafttrain.target.target import Target


def check_shared(target: Target) -> None:
    """Raises UserError for a target whose rows processes cannot share."""
    if target.decoding_path == "snapshot":
        raise UserError(
            f"sequence_parallel: target {target.name!r} runs its own forward, which processes cannot share ({target.reason}); "
            "set sequence_parallel=1, or store its states first: drafttrain features"
        )


class SharedRows:
    """The context of a process that shares the rows: exchanges tokens for heads around another
    context's attention.

    Args:
        inner: of all tokens. part: this process's; counts: tokens of each process.
    """

    def __init__(self, inner: DocumentAttention, part: SharedPart, counts: list[int]):
        self.inner = inner
        self.part = part
        self.counts = counts

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **form: Unpack[AttentionForm]
    ) -> Tensor:
        """As `AttentionContext.attend` declares it; a process without tokens runs a spare one,
        which is left out here.
        """
        part, counts, group = self.part, self.counts, self.part.group
        own = counts[group.rank]
        heads = query.shape[1] // group.size
        whole = (
            part.to_heads(x[0, :, :own].transpose(0, 1), counts, keys=x is not query).transpose(
                0, 1
            )[None]
            for x in (query, key, value)
        )  # [1, heads / size, n, e] each
        if form["sinks"] is not None:
            form["sinks"] = form["sinks"][heads * group.rank : heads * (group.rank + 1)]
        out = part.to_tokens(self.inner.attend(layer, *whole, **form)[0], counts)  # [own, heads, e]
        return F.pad(out, (0, 0, 0, 0, 0, query.shape[2] - own))[None]


def run_shared(
    target: Target,
    layers: Sequence[int],
    batch: Batch,
    conversations: Sequence[tuple[int, slice, slice, Tensor]],
) -> list[tuple[Tensor, Tensor]]:
    """Features [held, f*h] of this process's part of each conversation, and last states [r, h] at
    positions that it reads.

    Args:
        batch: its `shared` says which tokens are whose.
        conversations: row, columns, positions in this process's part, and positions [r] whose last
            states it reads.
    """
    check_shared(target)
    part = batch.shared
    s = batch.input_ids.shape[1]
    device = batch.input_ids.device
    assert isinstance(part, SharedPart)
    lengths = [span.stop - span.start for _, span, _, _ in conversations]
    target.check_length(max(lengths))
    begins = [row * s + span.start for row, span, _, _ in conversations]
    places = torch.cat(
        [torch.arange(length, device=device) for length in lengths]
    )  # [n] of all processes
    flat = places + torch.repeat_interleave(torch.tensor(begins), torch.tensor(lengths)).to(device)
    counts = part.counts(flat)
    own = part.of(flat)
    n = own.stop - own.start
    spare = int(n == 0)  # a target runs no less than one token
    ids = batch.input_ids.flatten()[F.pad(flat[own], (0, spare))]
    context = SharedRows(DocumentAttention(lengths), part, counts)
    out = target.forward(ids[None], layers, F.pad(places[own], (0, spare))[None], context)
    last = out.last_hidden[0, :n]
    last = torch.cat((last, part.group.behind(last[: part.reach])))  # [n + reach or more, h]
    pieces = out.features[0, :n].split([held.stop - held.start for _, _, held, _ in conversations])
    hidden = [
        last[torch.searchsorted(flat, at + read) - own.start]
        for at, (_, _, _, read) in zip(begins, conversations, strict=True)
    ]
    return list(zip(pieces, hidden, strict=True))
