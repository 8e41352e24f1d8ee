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
        group = self.part.group
        own = self.counts[group.rank]
        heads = query.shape[1] // group.size
        if form["sinks"] is not None:
            # One value per head, of which this process attends with its own share.
            form["sinks"] = form["sinks"][heads * group.rank : heads * (group.rank + 1)]
        # [1, heads / size, n, e] each
        query_part = self._all_tokens(query[0, :, :own], keys=False)
        key_part = self._all_tokens(key[0, :, :own], keys=True)
        value_part = self._all_tokens(value[0, :, :own], keys=True)
        whole = self.inner.attend(
            layer,
            query_part,
            key_part,
            value_part,
            **form,
        )
        out = self.part.to_tokens(whole[0], self.counts)  # [own, heads, e]
        # The layer's code expects as many tokens as it passed, the spare one included.
        return F.pad(out, (0, 0, 0, 0, 0, query.shape[2] - own))[None]

    def _all_tokens(self, x: Tensor, keys: bool) -> Tensor:
        """[heads, own, e] -> [1, heads / size, n, e] of this process's heads."""
        return self.part.to_heads(x.transpose(0, 1), self.counts, keys).transpose(0, 1)[None]
