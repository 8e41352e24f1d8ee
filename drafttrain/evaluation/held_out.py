"""Accepted length of real decoding on a few held-out prompts, by which training selects its best checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from drafttrain.batch import Batch, TokenTree
from drafttrain.data.loader import collate
from drafttrain.drafters.base import Source
from drafttrain.drafters.common.trainable import TrainableDrafter
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


@torch.no_grad()
def replayed(
    drafter: TrainableDrafter,
    rows: Iterable[Mapping[str, Any]],
    source: Source,
    spec: TreeSpec,
    count: int,
    max_new_tokens: int,
) -> dict[str, float]:
    """`acceptance` without running the target: the drafter drafts, and the stored first response of each row verifies.

    The drafter's sessions read what decoding would give them, since a drafter sees committed tokens and the target's states at
    them. Of greedy responses the figures are therefore those of decoding. Of sampled ones they say how many tokens of the
    stored text were drafted, which is less than what greedy decoding accepts.

        response     r0 r1 r2 r3 r4      root r0, tree r1 r2 x: accepted 2, committed r1 r2 r3, next root r3

    Args:
        rows: {tokens, spans, length, index}, not packed; the first `count` with a prompt. source: gives their features.
    """
    rounds: Counter[tuple[int, int]] = Counter()
    passes = committed = used = 0
    for row in rows:
        begin, end = row["spans"][0]
        end = min(end, begin + max_new_tokens)
        if begin == 0:
            continue
        features = source(Batch.of(collate([dict(row)])).to(drafter.device))[0][0]  # [s, f*h]
        tokens = torch.as_tensor(row["tokens"], device=features.device)  # [s]
        session = drafter.start(tokens[:begin], end)
        root, read = begin, 0  # position of the last committed token, and features read
        while root + 1 < end:
            session.extend(tokens[read + 1 : root + 1], features[read:root])
            read = root
            deepest, left = begin + max_new_tokens - root - 2, end - root - 1  # tree, response
            tree = session.propose(spec).prune(deepest, spec.cut) if deepest else TokenTree.empty(tokens.device)
            accepted = tree.match(row["tokens"][root + 1 : end])
            offered = accepted if accepted == left else tree.drafted_depth  # cut at the end, as in decoding
            rounds[accepted, offered] += 1
            new = min(accepted + 1, left)
            root, passes, committed = root + new, passes + 1, committed + new
        used += 1
        if used == count:
            break
    depths = acceptance_by_depth(rounds)["conditional"]
    return {
        "accepted_length": committed / max(passes, 1),
        **{f"acceptance@{k}": share for k, share in enumerate(depths, 1)},
    }


def acceptance(
    target: Target, drafter: TrainableDrafter, prompts: list[list[int]], spec: TreeSpec, max_new_tokens: int
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
