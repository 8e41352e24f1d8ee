"""Accepted length of real decoding on a few held-out prompts, by which training selects its best checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.evaluation.metrics import acceptance_by_depth
from drafttrain.inference import Decoder
from drafttrain.target import Target


def first_prompts(rows: Iterable[Mapping[str, Any]], count: int, context: int | None) -> list[list[int]]:
    """The tokens before the first response of the first `count` rows. context: the target's longest sequence, half kept free."""
    prompts: list[list[int]] = []
    for row in rows:
        prompt = list(row["tokens"][: row["spans"][0][0]])
        if prompt and (context is None or len(prompt) <= context // 2):
            prompts.append(prompt)
        if len(prompts) == count:
            break
    return prompts


def acceptance(
    target: Target, drafter: Drafter, prompts: list[list[int]], spec: TreeSpec, max_new_tokens: int
) -> dict[str, float]:
    """Decodes the prompts greedily in one batch.

    Returns:
        accepted_length: tokens committed per target pass, bonus token included. acceptance@k: the share that accepted
        another token of the rounds that accepted k-1.
    """
    decoder = Decoder(target, drafter, spec=spec, max_rows=len(prompts))
    every = [made.stats for made in decoder.generate(prompts, max_new_tokens=max_new_tokens)]
    passes = sum(stats.target_passes for stats in every)
    rounds: Counter[tuple[int, int]] = Counter()
    for stats in every:
        rounds += stats.rounds
    depths = acceptance_by_depth(rounds)["conditional"]
    return {
        "accepted_length": sum(stats.new_tokens - 1 for stats in every) / max(passes, 1),
        **{f"acceptance@{k}": share for k, share in enumerate(depths, 1)},
    }
