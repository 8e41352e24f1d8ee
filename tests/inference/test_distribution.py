"""Sampled decoding against exact target probabilities: joint distributions of two tokens, for every kind of proposal.

The expected joint comes from transformers' own processors. 200,000 pairs of drawn trees each, in bulk through the rejection
rule itself; fewer (200,000 too, when slow tests run) through `verify_batch`, many short sequences at a time.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from drafttrain.batch import Proposal, TokenTree
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.inference import SamplingParams, generate
from drafttrain.inference.rejection import try_drawn
from drafttrain.inference.verify import ProcessedText, Verifier, verify_batch
from drafttrain.ops.sampling import draw_distinct, pick, probabilities
from tests.drafters.growing import expand
from tests.inference.fakes import MarkovTarget
from tests.ops.transformers_sampling import p_value, transformers_says

VOCAB = 5
COUNT = 200_000
CHUNK = 10_000
TARGET = 1.2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
DRAFTER = TARGET + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
PLAIN = SamplingParams(0.9)
IMPOSSIBLE = TARGET.clone()
IMPOSSIBLE[:, 1] = float("-inf")  # q has mass there


def with_rule(drawn: TokenTree, rule: TokenTree) -> TokenTree:
    """A drawn tree and, beside its nodes, those of one that a rule chose."""
    tokens = drawn.tokens.tolist()
    parents = list(drawn.parents)
    where = {-1: -1}
    for node, (parent, token) in enumerate(zip(rule.parents, rule.tokens.tolist(), strict=True)):
        known = [
            i
            for i, pair in enumerate(zip(parents, tokens, strict=True))
            if pair == (where[parent], token)
        ]
        if not known:
            tokens.append(token)
            parents.append(where[parent])
        where[node] = known[0] if known else len(tokens) - 1
    proposal = replace(drawn.proposal, rows=drawn.proposal.rows + [-1] * (len(tokens) - len(drawn)))
    return TokenTree(torch.tensor(tokens), parents, proposal=proposal)


@dataclass
class Case:
    """The next token depends on the last one, by logits `target` [v, v] and `drafter` [v, d]. Sequences start with 0."""

    widths: tuple[int, int]
    drawn: bool = True
    sampling: SamplingParams = PLAIN
    target: Tensor = TARGET
    drafter: Tensor = DRAFTER
    kept_ids: Tensor | None = None
    rule: tuple[int, int] | None = (
        None  # widths of a tree of likeliest tokens that is merged into the drawn one
    )

    def text(self, prompt: Tensor) -> ProcessedText | None:
        return ProcessedText(processors, prompt, 3) if (processors := self.processors()) else None

    def processors(self) -> list[LogitsProcessor]:
        penalty = self.sampling.repetition_penalty
        return [RepetitionPenaltyLogitsProcessor(penalty)] if penalty else []

    def q(self) -> Tensor:
        return probabilities(self.drafter, self.sampling)

    def tree(self, first: list[int], second: list[list[int]], drawn: bool) -> TokenTree:
        """Nodes of both depths from drafter ids; -1 is none."""
        q = self.q()
        kept = list(range(VOCAB)) if self.kept_ids is None else self.kept_ids.tolist()
        children = [token for token in first if token >= 0]
        tokens = [kept[token] for token in children]
        parents = [-1] * len(children)
        rows = [0] * len(children)
        for parent, below in enumerate(second[: len(children)]):
            below = [token for token in below if token >= 0]
            tokens += [kept[token] for token in below]
            parents += [parent] * len(below)
            rows += [1 + parent] * len(below)
        proposal = Proposal(q[[0] + [kept[token] for token in children]], rows, self.kept_ids)
        return TokenTree(
            torch.tensor(tokens, dtype=torch.long), parents, None, proposal if drawn else None
        )

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Drafter ids of the root's children [count, w1], and of their children [count, w1, w2]; -1 is none."""
        q = self.q()
        kept = torch.arange(VOCAB) if self.kept_ids is None else self.kept_ids

        first = draw_distinct(q[:1].expand(count, -1), self.widths[0], generator)
        second = draw_distinct(q[kept[first.flatten()]], self.widths[1], generator)
        return first, second.view(count, *self.widths)

    def trees(self, count: int, generator: torch.Generator) -> list[TokenTree]:
        q = self.q()
        kept = torch.arange(VOCAB) if self.kept_ids is None else self.kept_ids
        likeliest = None
        if self.rule or not self.drawn:
            widths = self.rule or self.widths
            first = q[0].topk(widths[0]).indices
            likeliest = self.tree(
                first.tolist(), q[kept[first]].topk(widths[1]).indices.tolist(), False
            )
        if not self.drawn:
            return [likeliest] * count

        first, second = self.draw(count, generator)
        drawn = []
        different = {}
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            key = str((a, b))
            if key not in different:
                tree = self.tree(a, b, True)
                different[key] = tree if likeliest is None else with_rule(tree, likeliest)
            drawn.append(different[key])
        return drawn


def pairs(case: Case, count: int, seed: int = 0) -> tuple[Tensor, float]:
    """How often each pair of tokens came after 0, [v, v]; and the share of rounds whose first token was a drafted one."""
    generator = torch.Generator().manual_seed(seed)
    seen = torch.zeros(VOCAB * VOCAB, dtype=torch.long)
    accepted = 0
    start = torch.tensor([0])
    nothing = TokenTree.empty()
    for _ in range(count // CHUNK):
        trees = case.trees(CHUNK, generator)
        verifiers = [Verifier(case.sampling, (), generator, case.text(start)) for _ in trees]
        logits = case.target[torch.cat([part for tree in trees for part in (start, tree.tokens)])]
        verdicts = verify_batch(verifiers, trees, logits)
        accepted += sum(len(verdict.path) > 0 for verdict in verdicts)
        short = [i for i, verdict in enumerate(verdicts) if len(verdict.tokens) == 1]
        roots = torch.tensor([verdicts[i].tokens[0] for i in short])
        more = verify_batch(
            [verifiers[i] for i in short], [nothing] * len(short), case.target[roots]
        )
        for i, verdict in zip(short, more, strict=True):
            verdicts[i].tokens += verdict.tokens
        both = torch.tensor([verdict.tokens[:2] for verdict in verdicts])
        seen += torch.bincount(both[:, 0] * VOCAB + both[:, 1], minlength=VOCAB * VOCAB)
    return seen.view(VOCAB, VOCAB), accepted / count


def joint(case: Case) -> Tensor:
    """[v, v] exact probabilities of the two tokens after 0."""
    first = transformers_says(case.target[:1], case.sampling, torch.tensor([[0]]))[0].double()
    history = torch.tensor([[0, token] for token in range(VOCAB)])
    second = transformers_says(case.target, case.sampling, history).double()
    return first[:, None] / first.sum() * second / second.sum(-1, keepdim=True)


CASES = {
    "rule_chain": Case((1, 1), drawn=False),
    "rule_tree": Case((3, 2), drawn=False),
    "drawn_chain": Case((1, 1)),
    "drawn_fanout": Case((3, 2)),
    "impossible_for_the_target": Case((2, 1), target=IMPOSSIBLE),
    "impossible_for_the_drafter": Case(
        (2, 1), drafter=DRAFTER[:, [4, 0, 2]], kept_ids=torch.tensor([4, 0, 2])
    ),
    "warped": Case((2, 1), sampling=SamplingParams(1.2, 4, 0.9, 0.05, 1.4)),
    "penalty": Case((2, 1), sampling=SamplingParams(1.0, repetition_penalty=1.6)),
    "penalty_temperature": Case((2, 1), sampling=SamplingParams(1.5, repetition_penalty=1.6)),
    "penalty_top_k": Case((2, 1), sampling=SamplingParams(1.0, top_k=3, repetition_penalty=1.6)),
    "penalty_top_p": Case((2, 1), sampling=SamplingParams(1.0, top_p=0.8, repetition_penalty=1.6)),
    "drawn_and_rule": Case((1, 1), rule=(2, 1)),
}


@pytest.fixture(autouse=True)
def no_garbage_collection():
    """Many small objects live at a time; looking through them again and again takes longer than the test."""
    gc.disable()
    yield
    gc.enable()


def check(seen: Tensor, case: Case, count: int) -> None:
    assert seen.sum() == count
    assert p_value(seen.sum(1), joint(case).sum(1)) > 1e-3, "first token"
    assert p_value(seen, joint(case)) > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "count"),
    [
        (name, CHUNK if case.drawn else 3 * CHUNK)
        for name, case in CASES.items()
        # A tree has chains in it, "warped" has a penalty; the others are checked in bulk below.
        if not name.startswith("penalty") and not name.endswith(("_chain", "for_the_target"))
    ]
    + [pytest.param(name, COUNT, marks=pytest.mark.slow) for name in CASES],
)
def test_pairs_follow_the_target_exactly(name, count):
    check(pairs(CASES[name], count)[0], CASES[name], count)


def bulk_pairs(case: Case) -> Tensor:
    """Like `pairs` for drawn trees, with all sequences as rows of the same tensors."""
    generator = torch.Generator().manual_seed(0)
    kept = torch.arange(VOCAB) if case.kept_ids is None else case.kept_ids
    q = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    q[:, kept] = case.q().double()
    first, second = case.draw(COUNT, generator)
    first, second = (torch.where(ids >= 0, kept[ids], -1) for ids in (first, second))
    last = torch.zeros(COUNT, dtype=torch.long)
    children = first
    chosen = []
    texts = last[:, None]  # [n, L]
    for _ in range(2):
        logits = LogitsProcessorList(case.processors())(texts, case.target[last])
        uniforms = torch.rand(
            COUNT, 1 + children.shape[1], dtype=torch.float64, generator=generator
        )
        p = try_drawn(
            probabilities(logits, case.sampling).double(), q[last], children, uniforms[:, 1:]
        )
        last = pick(p, uniforms[:, 0])
        chosen.append(last)
        texts = torch.cat((texts, last[:, None]), dim=1)
        at = (
            first == last[:, None]
        )  # the child that was accepted, if any, goes on with its own children
        children = torch.where(
            at.any(1, keepdim=True), second[torch.arange(COUNT), at.int().argmax(1)], -1
        )
    return torch.bincount(chosen[0] * VOCAB + chosen[1], minlength=VOCAB**2).view(VOCAB, VOCAB)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.drawn])
def test_pairs_in_bulk_follow_the_target_exactly(name):
    check(bulk_pairs(CASES[name]), CASES[name], COUNT)


@pytest.mark.thorough
def test_a_drawn_child_is_accepted_as_often_as_can_be():
    """A chain's first token with probability sum min(p, q): more is impossible, by the coupling inequality."""
    case = CASES["drawn_chain"]
    _, rate = pairs(case, 2 * CHUNK, seed=5)
    p = probabilities(case.target[:1], case.sampling)
    q = case.q()[:1]
    assert rate == pytest.approx(
        float(torch.minimum(p, q).sum()), abs=4 * (0.25 / (2 * CHUNK)) ** 0.5
    )
    assert rate > 1.2 * float((p * q).sum())


class MarkovDrafter(Drafter):
    """Drafts by a table of logits [v, v], through `expand` as trained kinds do."""

    kind = "markov"
    feature_layers = ()

    def start(self, prompt_ids, max_length):
        return self

    def extend(self, tokens, features):
        self.last = int(tokens[-1])

    def propose(self, spec, sampler=None):
        return expand(
            spec, DRAFTER[self.last], lambda tokens, parents: DRAFTER[tokens], None, sampler
        )


@pytest.mark.thorough
@pytest.mark.parametrize("text", ["fanout:2x2@sample@stop=0.2", "paths:0,1,0-0@sample"])
def test_the_whole_loop_with_drawn_trees(text):
    """One long text: pairs that follow each token. The same seed gives it again, another seed does not."""
    target = MarkovTarget(VOCAB)
    sampling = SamplingParams(0.9, min_p=0.05)
    count = 1500
    target.table = TARGET

    def run(seed, tokens):
        spec = TreeSpec.parse(text)
        return generate(
            target,
            MarkovDrafter(),
            [0],
            max_new_tokens=tokens,
            spec=spec,
            sampling=sampling,
            seed=seed,
            eos_ids=(),
        )

    got = run(3, count + 1)
    assert got.tokens[:57] == run(3, 60).tokens[:57]  # the last trees are cut to what is left
    assert got.tokens[:57] != run(4, 60).tokens[:57]
    assert got.stats.accepted_length > 1.5
    seen = torch.zeros(VOCAB, VOCAB, dtype=torch.long)
    for pair in zip(got.tokens, got.tokens[1:], strict=False):
        seen[pair] += 1
    p = transformers_says(TARGET, sampling).double()
    assert min(p_value(seen[token], p[token] / p[token].sum()) for token in range(VOCAB)) > 1e-4
