"""Accepted length of real decoding on a few held-out prompts, by which training selects its best
checkpoint.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafttrain.batch import Batch, TokenTree
from drafttrain.data.loader import collate
from drafttrain.drafters.base import Source
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.evaluation.metrics import acceptance_by_depth
from drafttrain.inference import Decoder
from drafttrain.target import Target

_TOGETHER = 16  # rows whose replays share the drafter's passes


def first_prompts(
    rows: Iterable[Mapping[str, Any]],
    count: int,
    context: int | None,
) -> list[list[int]]:
    """The tokens before the first response of the first `count` rows. context: the target's longest
    sequence, half kept free.
    """
    prompts: list[list[int]] = []
    for row in rows:
        prompt = list(row["tokens"][: row["spans"][0][0]])
        if prompt and (context is None or len(prompt) <= context // 2):
            prompts.append(prompt)
        if len(prompts) == count:
            break
    return prompts


class ReplayedRow(NamedTuple):
    """A response's replay: tokens that its passes committed, passes, and their number by (accepted,
    offered).
    """

    committed: int
    passes: int
    rounds: Counter[tuple[int, int]]

    @staticmethod
    def figures(each: Sequence[ReplayedRow]) -> dict[str, float]:
        """What `acceptance` returns."""
        rounds = sum((row.rounds for row in each), Counter[tuple[int, int]]())
        depths = acceptance_by_depth(rounds)["conditional"]
        return {
            "accepted_length": sum(row.committed for row in each)
            / max(sum(row.passes for row in each), 1),
            **{f"acceptance@{k}": share for k, share in enumerate(depths, 1)},
        }


def replayed(
    drafter: TrainableDrafter,
    rows: Iterable[Mapping[str, Any]],
    source: Source,
    spec: TreeSpec,
    count: int,
    max_new_tokens: int,
) -> dict[str, float]:
    """`acceptance` without running the target, on the first `count` rows with a prompt; see
    `replayed_rows`.
    """
    chosen = list(itertools.islice((row for row in rows if row["spans"][0][0] > 0), count))
    return ReplayedRow.figures(replayed_rows(drafter, chosen, source, spec, max_new_tokens))


@torch.no_grad()
def replayed_rows(
    drafter: TrainableDrafter,
    rows: Sequence[Mapping[str, Any]],
    source: Source,
    spec: TreeSpec,
    max_new_tokens: int,
) -> list[ReplayedRow]:
    """Decoding of each row's first response, replayed: the drafter drafts, and the stored response
    verifies.

    The drafter's sessions read what decoding would give them, since a drafter sees committed tokens
    and the target's states at them. Of greedy responses the figures are therefore those of
    decoding. Of sampled ones they say how many tokens of the stored text were drafted, which is
    less than what greedy decoding accepts.

        response     r0 r1 r2 r3 r4      root r0, tree r1 r2 x: accepted 2, committed r1 r2 r3, next root r3

    Args:
        rows: {tokens, spans, length, index}, not packed, each with a prompt. source: gives their
            features.
    """
    made: list[ReplayedRow] = []
    for first in range(0, len(rows), _TOGETHER):
        part = [
            _Replay(drafter, row, source, max_new_tokens) for row in rows[first : first + _TOGETHER]
        ]
        while running := [it for it in part if it.root + 1 < it.end]:
            read = [it.unread() for it in running]
            sessions = [it.session for it in running]
            drafter.extend_all(
                sessions,
                [tokens for tokens, _ in read],
                [features for _, features in read],
            )
            for it, tree in zip(
                running,
                drafter.propose_all(sessions, [spec] * len(running), [None] * len(running)),
                strict=True,
            ):
                it.commit(tree, spec.cut)
        made += [ReplayedRow(it.root - it.begin, it.rounds.total(), it.rounds) for it in part]
    return made


class _Replay:
    """A running replay. root: position of the last committed token; read: features that the session
    has read.
    """

    def __init__(
        self,
        drafter: TrainableDrafter,
        row: Mapping[str, Any],
        source: Source,
        most: int,
    ):
        self.begin, end = row["spans"][0]
        self.limit, self.end = self.begin + most, min(end, self.begin + most)
        self.features = source(Batch.of(collate([dict(row)])).to(drafter.device))[0][0]  # [s, f*h]
        self.tokens = torch.as_tensor(row["tokens"], device=self.features.device)  # [s]
        self.list = list(row["tokens"])
        self.session = drafter.start(self.tokens[: self.begin], self.end)
        self.root = self.begin
        self.read = 0
        self.rounds: Counter[tuple[int, int]] = Counter()

    def unread(self) -> tuple[Tensor, Tensor]:
        """Committed tokens [m] and features [m, f*h] that the session has not read."""
        new = self.tokens[self.read + 1 : self.root + 1], self.features[self.read : self.root]
        self.read = self.root
        return new

    def commit(self, tree: TokenTree, cut: float) -> None:
        """Verifies a tree against the response; cut: `TreeSpec.cut`."""
        # of the tree; of the response
        deepest = self.limit - self.root - 2
        left = self.end - self.root - 1
        if deepest:
            tree = tree.prune(deepest, cut)
        else:
            tree = TokenTree.empty(self.tokens.device)
        accepted = tree.match(self.list[self.root + 1 : self.end])
        offered = (
            accepted if accepted == left else tree.drafted_depth
        )  # cut at the end, as in decoding
        self.rounds[accepted, offered] += 1
        self.root += min(accepted + 1, left)


def acceptance(
    target: Target,
    drafter: TrainableDrafter,
    prompts: list[list[int]],
    spec: TreeSpec,
    max_new_tokens: int,
) -> dict[str, float]:
    """Decodes the prompts greedily in one batch.

    Returns:
        accepted_length: tokens committed per target pass, bonus token included. acceptance@k: the
            share that accepted
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
