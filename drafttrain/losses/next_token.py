"""Plain next-token cross-entropy over a linear head, without ever holding [tokens, vocabulary]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_IGNORED = -100


def next_token_loss(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 256) -> tuple[Tensor, Tensor]:
    """What pretraining minimises: -log q(label) of each token.

    Args:
        hidden: [t, h] states; weight: [d, h] head; gradients flow into both.
        labels: [t] int64; one that the head lacks (>= d) costs nothing and teaches nothing.
        chunk: rows at a time; backward computes their logits again.

    Returns:
        [t] float32 losses, and [t] bool (detached): the likeliest token is the label.
    """
    known = torch.where(labels < len(weight), labels, _IGNORED)

    def part(states: Tensor, head: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(states, head.to(states.dtype)).float()
        return F.cross_entropy(logits, wanted, reduction="none", ignore_index=_IGNORED), logits.argmax(-1) == wanted

    parts = zip(hidden.split(chunk), known.split(chunk), strict=True)
    done = [checkpoint(part, states, weight, wanted, use_reentrant=False) for states, wanted in parts]
    if not done:
        return hidden.sum(-1), known.bool()
    losses, agree = zip(*done, strict=True)
    return torch.cat(losses), torch.cat(agree)
