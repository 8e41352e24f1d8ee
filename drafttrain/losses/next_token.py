"""Plain next-token cross-entropy over a linear head, without [tokens, vocabulary] logits in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_IGNORED = -100


def next_token_loss(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 256) -> tuple[Tensor, Tensor]:
    """The pretraining loss: -log q(label) of each token.

    Args:
        hidden: [t, h] states; weight: [d, h] head; gradients flow into both.
        labels: [t] int64; a label that the head lacks (>= d) has zero loss and zero gradient.
        chunk: rows per chunk; backward recomputes their logits.

    Returns:
        [t] float32 losses, and [t] bool (detached): the likeliest token is the label.
    """
    known = torch.where(labels < len(weight), labels, _IGNORED)

    def chunk_loss(states: Tensor, head: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(states, head.to(states.dtype)).float()  # [chunk, d]
        return F.cross_entropy(logits, wanted, reduction="none", ignore_index=_IGNORED), logits.argmax(-1) == wanted

    parts = zip(hidden.split(chunk), known.split(chunk), strict=True)
    done = [checkpoint(chunk_loss, states, weight, wanted, use_reentrant=False) for states, wanted in parts]
    if not done:
        return hidden.sum(-1), known.bool()
    losses, agree = zip(*done, strict=True)
    return torch.cat(losses), torch.cat(agree)
