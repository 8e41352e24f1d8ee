"""The drafter's kept vocabulary: which target tokens it can propose, and the share of the text that they cover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from drafttrain.files import Json


def count_tokens(records: Iterable[Json], vocab_size: int) -> Tensor:
    """Occurrences of each id in responses.

    Args:
        records: with `tokens` and response `spans`, as the store yields them.

    Returns:
        [v] int64.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for record in records:
        tokens = torch.as_tensor(record["tokens"])
        for start, end in record["spans"]:
            counts += torch.bincount(tokens[start:end], minlength=vocab_size)
    return counts


def keep_frequent(counts: Tensor, size: int, always: Sequence[int] = ()) -> tuple[Tensor, Json]:
    """The `size` most frequent ids, in ascending order, and a report.

    Args:
        counts: [v] int64. size: d; 0 or >= v keeps everything. always: ids kept regardless of their count (end of sequence).

    Returns:
        kept ids [d] int64, and {size, vocab_size, coverage (share of response tokens that are kept), seen (distinct ids)}.
    """
    vocab_size = counts.shape[0]
    if size <= 0 or size >= vocab_size:
        kept = torch.arange(vocab_size)
    else:
        ranked = counts.clone()
        ranked[list(always)] = counts.max() + 1
        kept = ranked.topk(size).indices.sort().values
    total = max(int(counts.sum()), 1)
    report = {
        "size": len(kept),
        "vocab_size": vocab_size,
        "coverage": round(int(counts[kept].sum()) / total, 6),
        "seen": int((counts > 0).sum()),
    }
    return kept, report
