"""The target's attention in processes that share rows, each of which runs a part of the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import torch.nn.functional as F
from torch import Tensor

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
            f"sequence_parallel: target {target.name!r} runs its own forward, which processes "
            f"cannot share ({target.reason}); set sequence_parallel=1, or store its states first: "
            "drafttrain features"
        )


class SharedRows:
    """Another context's attention, with an exchange of tokens for heads around it.

    Args:
        inner: context of all tokens. part: this process's tokens. counts: tokens of each process.
    """

    def __init__(
        self,
        inner: DocumentAttention,
        part: SharedPart,
        counts: list[int],
    ):
        self.inner = inner
        self.part = part
        self.counts = counts

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **form: Unpack[AttentionForm],
    ) -> Tensor:
        """The attention of this process's tokens, see `AttentionContext.attend`.

        A process without tokens runs a spare one, which is left out here.
        """
        if form["sinks"] is not None:
            form["sinks"] = self.part.own_heads(form["sinks"])

        def attend(*tensors: Tensor) -> Tensor:
            """Of all tokens [n, heads / size, e] -> [n, heads / size * e]."""
            by_head = [x.transpose(0, 1)[None] for x in tensors]
            return self.inner.attend(layer, *by_head, **form)[0].flatten(1)

        own = self.counts[self.part.group.rank]
        shared = self.part.attend(attend, self.counts, self.counts)
        out = shared(*[x[0, :, :own].transpose(0, 1) for x in (query, key, value)])
        out = out.unflatten(1, (query.shape[1], -1))  # [own, heads, e]
        # The layer's code expects as many tokens as it passed, the spare one included.
        return F.pad(out, (0, 0, 0, 0, 0, query.shape[2] - own))[None]
