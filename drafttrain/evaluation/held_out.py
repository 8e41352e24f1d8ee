"""Accepted length on a few held-out prompts, by which training selects its best checkpoint."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafttrain.batch import Batch, TokenTree
from drafttrain.data.loader import collate
from drafttrain.data.row_images import RowImages
from drafttrain.drafters.base import Source
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.evaluation.metrics import Rounds, acceptance_by_depth
from drafttrain.inference import Decoder
from drafttrain.target import Target
from drafttrain.target.sight import ImagePrompt

_TOGETHER = 16  # rows whose replays share the drafter's passes
# Tree, and tokens of an answer, by which versions of a drafter are compared.
_JUDGED_BY = TreeSpec.parse("chain:4")
_JUDGED_TOKENS = 128


def first_prompts(
    rows: Iterable[Mapping[str, Any]],
    count: int,
    context: int | None,
    images: RowImages | None = None,
) -> list[list[int] | ImagePrompt]:
    """The tokens before the first response of the first `count` rows.

    Args:
        context: the target's longest sequence, half of which is kept free.
        images: of the rows, by index; None if all are text.
    """
    prompts: list[list[int] | ImagePrompt] = []
    for row in rows:
        prompt = list(row["tokens"][: row["spans"][0][0]])
        if prompt and (context is None or len(prompt) <= context // 2):
            shown = None
            if images is not None:
                shown = images.prompt(row["index"], torch.tensor(prompt))
            prompts.append(prompt if shown is None else shown)
        if len(prompts) == count:
            break
    return prompts


class ReplayedRow(NamedTuple):
    """A decoded or replayed response.

    Attributes:
        committed: tokens that its passes committed. passes: their number. rounds: their number by
            (accepted, offered).
    """

    committed: int
    passes: int
    rounds: Rounds

    @staticmethod
    def figures(each: Sequence[ReplayedRow]) -> dict[str, float]:
        """accepted_length and acceptance@k of several rows, see `acceptance`."""
        rounds: Rounds = Counter()
        for row in each:
            rounds += row.rounds
        committed = sum(row.committed for row in each)
        passes = sum(row.passes for row in each)
        figures = {"accepted_length": committed / max(passes, 1)}
        for k, share in enumerate(acceptance_by_depth(rounds)["conditional"], 1):
            figures[f"acceptance@{k}"] = share
        return figures


def acceptance(
    target: Target,
    drafter: TrainableDrafter,
    prompts: Sequence[list[int] | ImagePrompt],
    spec: TreeSpec,
    max_new_tokens: int,
) -> dict[str, float]:
    """Decodes the prompts greedily in one batch.

    Returns:
        accepted_length: tokens committed per target pass, bonus token included.
        acceptance@k: of the rounds that accepted k-1 tokens, the share that accepted another.
    """
    decoder = Decoder(target, drafter, spec=spec, max_rows=len(prompts))
    rows = []
    for made in decoder.generate(prompts, max_new_tokens=max_new_tokens):
        stats = made.stats
        rows.append(ReplayedRow(stats.new_tokens - 1, stats.target_passes, stats.rounds))
    return ReplayedRow.figures(rows)


def replayed(
    drafter: TrainableDrafter,
    rows: Iterable[Mapping[str, Any]],
    source: Source,
    spec: TreeSpec,
    count: int,
    max_new_tokens: int,
) -> dict[str, float]:
    """`acceptance` without running the target, on the first `count` rows with a prompt.

    See `replayed_rows`.
    """
    with_prompt = (row for row in rows if row["spans"][0][0] > 0)
    chosen = list(itertools.islice(with_prompt, count))
    return ReplayedRow.figures(
        replayed_rows(
            drafter,
            chosen,
            source,
            spec,
            max_new_tokens,
        )
    )


@torch.no_grad()
def replayed_rows(
    drafter: TrainableDrafter,
    rows: Sequence[Mapping[str, Any]],
    source: Source,
    spec: TreeSpec,
    max_new_tokens: int,
) -> list[ReplayedRow]:
    """Replays the decoding of each row's first response: the stored response verifies the drafts.

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
        part = []
        for row in rows[first : first + _TOGETHER]:
            part.append(_Replay(drafter, row, source, max_new_tokens))
        running = [replay for replay in part if not replay.ended]
        while running:
            sessions = [replay.session for replay in running]
            tokens = []
            features = []
            for replay in running:
                tokens.append(replay.tokens[replay.read + 1 : replay.root + 1])
                features.append(replay.features[replay.read : replay.root])
                replay.read = replay.root
            drafter.extend_all(sessions, tokens, features)

            trees = drafter.propose_all(sessions, spec, [None] * len(running))
            for replay, tree in zip(running, trees, strict=True):
                replay.commit(tree, spec.cut)
            running = [replay for replay in running if not replay.ended]
        for replay in part:
            committed = replay.root - replay.begin
            made.append(ReplayedRow(committed, replay.rounds.total(), replay.rounds))
    return made


def judged_rows(
    drafter: TrainableDrafter,
    rows: Sequence[Mapping[str, Any]],
    source: Source,
) -> list[list[int]]:
    """[committed, passes] of each row, as `lengths_ratio` compares two drafters by."""
    made = replayed_rows(drafter.eval(), rows, source, _JUDGED_BY, _JUDGED_TOKENS)
    return [[row.committed, row.passes] for row in made]


class _Replay:
    """A running replay.

    Attributes:
        tokens: [s] int64 of the row. features: [s, f*h] of the target at them.
        begin, end: of the response. limit: where decoding would stop.
        root: position of the last committed token. read: features that the session has read.
    """

    def __init__(
        self,
        drafter: TrainableDrafter,
        row: Mapping[str, Any],
        source: Source,
        most: int,
    ):
        begin, end = row["spans"][0]
        self.begin = max(begin, 1)  # a drafter begins behind a token
        self.limit = self.begin + most
        self.end = min(end, self.limit)
        batch = Batch.of(collate([dict(row)])).to(drafter.device)
        self.features: Tensor = source(batch)[0][0]
        self.tokens = torch.as_tensor(row["tokens"], device=self.features.device)
        self.list = list(row["tokens"])
        self.session = drafter.start(self.tokens[: self.begin], self.end)
        self.root = self.begin
        self.read = 0
        self.rounds: Rounds = Counter()

    @property
    def ended(self) -> bool:
        return self.root + 1 >= self.end

    def commit(self, tree: TokenTree, cut: float) -> None:
        """Verifies a tree against the response. cut: `TreeSpec.cut`."""
        deepest = self.limit - self.root - 2  # decoding cuts trees at the token limit
        if deepest:
            tree = tree.prune(deepest, cut)
        else:
            tree = TokenTree.empty(self.tokens.device)
        left = self.end - self.root - 1  # tokens of the response
        accepted = tree.match(self.list[self.root + 1 : self.end])
        offered = tree.drafted_depth
        if accepted == left:  # a path that is cut at the end was offered no deeper, as in decoding
            offered = accepted
        self.rounds[accepted, offered] += 1
        self.root += min(accepted + 1, left)
