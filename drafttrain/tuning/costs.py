"""Costs of verifying and drafting on this machine, measured in the decoder's own rounds.

The decoder runs with a pace that picks another tree every round, in shuffled order, so that a slow moment of the machine
affects all trees alike. Verification is measured with made-up trees of known size, drafting with the drafter's own trees by
depth. Every figure is a median.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, Session
from drafttrain.drafters.combined import parts_of
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.files import Json
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.inference.adaptive import RoundReport
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target
from drafttrain.tuning.replay import DEPTH, WIDTHS

NODES = (1, 2, 4, 8, 16, 32, 48)
DEPTHS = (1, 3, DEPTH)
CYCLES = 9
WARM_UP = 1
_PREFILL = 16  # a drafter that reads more tokens at once reads a prompt


@dataclass
class CostModel:
    """Seconds of the parts of a round.

    Attributes:
        verify: by number of nodes; 0 is a round of plain decoding, with the target's pass and all overhead.
        draft: by (children per node, depth).
        match: added by a second drafter's match. read: the drafter reads what a round committed.
        read_prompt: the same per token of a prompt. around: added by accepted nodes, such as moving their keys.
    """

    verify: dict[int, float]
    draft: dict[tuple[int, int], float]
    match: float = 0.0
    read: float = 0.0
    read_prompt: float = 0.0
    around: float = 0.0

    def round(self, spec: TreeSpec, nodes: int, depth: int) -> float:
        """Seconds of a round that drafts to `depth` and verifies `nodes` nodes."""
        if spec.shape == "none":
            return self.verify[0]
        seconds = _interpolate(self.verify, nodes) + self.read + self.match * spec.matches
        if depth:
            seconds += _interpolate({d: cost for (k, d), cost in self.draft.items() if k == spec.top_k}, depth)
        return seconds + self.around * (nodes > 0)

    def table(self) -> Json:
        """The costs in milliseconds, for JSON."""
        draft: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (k, depth), seconds in self.draft.items():
            draft[str(k)][str(depth)] = round(1000 * seconds, 3)
        parts = {"match": self.match, "read": self.read, "read_prompt": self.read_prompt, "around": self.around}
        return {
            "verification_ms": {str(nodes): round(1000 * seconds, 3) for nodes, seconds in self.verify.items()},
            "drafting_ms": dict(draft),
            **{f"{name}_ms": round(1000 * seconds, 4) for name, seconds in parts.items()},
        }


def _interpolate(known: dict[int, float], at: float) -> float:
    """Piecewise linear, extrapolated."""
    keys = sorted(known)
    if len(keys) == 1:
        return known[keys[0]]
    above = min(max(bisect_left(keys, at), 1), len(keys) - 1)
    left, right = keys[above - 1], keys[above]
    return known[left] + (known[right] - known[left]) * (at - left) / (right - left)


class _ProbeTrees(Drafter):
    """The drafter, except for trees that measure verification: those hold made-up tokens, almost never accepted."""

    def __init__(self, drafter: Drafter, target: Target):
        self.drafter, self.target = drafter, target
        self.kind, self.feature_layers = drafter.kind, drafter.feature_layers

    def start(self, prompt_ids: Tensor, max_length: int) -> Session:
        return self.drafter.start(prompt_ids, max_length)

    def extend_all(self, sessions: Sequence[Session], tokens: Sequence[Tensor], features: Sequence[Tensor]) -> None:
        self.drafter.extend_all(sessions, tokens, features)

    def propose_all(
        self, sessions: Sequence[Session], specs: Sequence[TreeSpec], samplers: Sequence[Sampler | None]
    ) -> list[TokenTree]:
        if specs[0].shape != "paths":
            return self.drafter.propose_all(sessions, specs, samplers)
        nodes = specs[0].budget
        tokens = torch.tensor([7919 * node % self.target.vocab_size for node in range(1, nodes + 1)])  # [n]
        return [TokenTree(tokens.to(self.target.device), [(node - 1) // 2 if node else -1 for node in range(nodes)])]


class _Schedule:
    """A pace that goes through all trees in shuffled order, repeatedly, and keeps every round."""

    def __init__(self, specs: Sequence[TreeSpec], advance: Callable[[], None]):
        self.rounds: list[RoundReport] = []
        self._specs, self._advance = self._order(list(specs)), advance

    @staticmethod
    def _order(specs: list[TreeSpec]) -> Iterator[TreeSpec]:
        shuffle = random.Random(0)
        while True:
            shuffle.shuffle(specs)
            yield from specs

    def choose(self, rows: int, behind: int) -> TreeSpec:
        return next(self._specs)

    def observe(self, done: RoundReport) -> None:
        self.rounds.append(done)
        self._advance()


def measure_costs(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    max_new_tokens: int,
    cycles: int = CYCLES,
    advance: Callable[[], None] = lambda: None,
) -> CostModel:
    """Decodes the prompts one by one until every tree was measured `cycles` times.

    Args:
        target: packed before the call, if it will be packed later.
        prompts: token ids, at least one prompt.
        advance: called after every round.
    """
    sizes = [TreeSpec.parse("paths:" + ",".join(map(str, range(nodes)))) for nodes in NODES]
    drafts = [_draft_spec(k, depth) for k in WIDTHS for depth in DEPTHS]
    matched = [TreeSpec.parse("dynamic:3,4,8@alone=0.999")] if parts_of(drafter)[1] is not None else []
    specs = [TreeSpec.parse("none"), *sizes, *drafts, *matched]
    schedule = _Schedule(specs, advance)
    largest = max(specs, key=lambda spec: spec.budget)
    decoder = Decoder(target, _ProbeTrees(drafter, target), spec=largest, sampling=sampling, eos_ids=(), pace=schedule)
    for prompt in itertools.cycle(prompts):
        for _ in decoder.stream([prompt], max_new_tokens=max_new_tokens):
            if len(schedule.rounds) >= (cycles + WARM_UP) * len(specs):
                return _fit(schedule.rounds[WARM_UP * len(specs) :], drafts, matched)
    raise AssertionError("prompts are never empty")


def _draft_spec(k: int, depth: int) -> TreeSpec:
    return TreeSpec.parse((f"chain:{depth}" if k == 1 else f"dynamic:{depth},{k},8") + "@nomatch")


def _fit(rounds: Sequence[RoundReport], drafts: Sequence[TreeSpec], matched: Sequence[TreeSpec]) -> CostModel:
    verify: defaultdict[int, list[float]] = defaultdict(list)
    draft: defaultdict[TreeSpec, list[float]] = defaultdict(list)
    for done in rounds:
        if done.spec.shape in ("none", "paths"):
            verify[done.new_tokens - 1].append(_pass_seconds(done))
        elif done.drafted:
            draft[done.spec].append(done.draft_seconds)
    model = CostModel({nodes: median(values) for nodes, values in sorted(verify.items()) if nodes in (0, *NODES)}, {})
    # A drafter that finds nothing to draft takes no time worth counting.
    model.draft = {(spec.top_k, spec.depth): median(draft.get(spec, [0.0])) for spec in drafts}
    if matched and draft[matched[0]]:
        model.match = max(0.0, median(draft[matched[0]]) - median(draft[_draft_spec(4, 3)]))
    reads = [done.read_seconds for done in rounds if 0 < done.read <= _PREFILL]
    model.read = median(reads) if reads else 0.0
    bulk = [done for done in rounds if done.read > _PREFILL]
    model.read_prompt = sum(done.read_seconds for done in bulk) / sum(done.read for done in bulk) if bulk else 0.0
    own = [done for done in rounds if done.drafted and done.spec.shape != "paths"]
    extra = [_pass_seconds(done) - _interpolate(model.verify, done.new_tokens - 1) for done in own]
    model.around = max(0.0, median(extra)) if extra else 0.0
    return model


def _pass_seconds(done: RoundReport) -> float:
    """Seconds of a round without drafting and reading."""
    return done.seconds - done.draft_seconds - done.read_seconds
