"""Feedback of a target's pass to the drafters' sessions, besides the tokens that it commits."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.inference.sequence import Sequence
from drafttrain.ops.sampling import highest


def answer_probes(
    sequences: Items[Sequence],
    chosen: Tensor,
    sizes: Items[int],
) -> None:
    """Passes the target's choices after root and probes to the sessions.

    Args:
        chosen: [N], at each sequence's root and nodes. sizes: how many each sequence has.
    """
    tokens = chosen.tolist()
    begin = 0  # of the sequence's root
    for sequence, size in zip(sequences, sizes, strict=True):
        if sequence.probed and sequence.session is not None:
            seen = [tokens[begin]]
            for node in sequence.probed:
                # A probe that was left out.
                seen.append(tokens[begin + 1 + node] if node >= 0 else -1)
            sequence.session.observe(seen)
            sequence.probed = []
        begin += size


def share_predictions(
    sequences: Items[Sequence],
    trees: Items[TokenTree],
    logits: Tensor,
    width: int,
) -> None:
    """Passes the target's likeliest tokens at every root and node to the sessions.

    Sessions that have not read the text up to the root get none.

    Args:
        logits: [N, v], at each sequence's root and its nodes. width: tokens of each.
    """
    if all(sequence.session is None or sequence.behind for sequence in sequences):
        return
    if not logits.is_cpu:
        trees = TokenTree.moved(trees, torch.device("cpu"))  # one transfer for all
    values, ids = highest(logits, min(width, logits.shape[-1]))
    predictions = list(
        zip(
            ids.tolist(),
            values.softmax(-1).tolist(),
            strict=True,
        )
    )
    begin = 0
    for sequence, tree in zip(sequences, trees, strict=True):
        end = begin + 1 + len(tree)
        if sequence.session is not None and not sequence.behind:
            sequence.session.read_predictions(tree, predictions[begin:end])
        begin = end
