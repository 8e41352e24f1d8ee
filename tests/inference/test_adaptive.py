"""The pace against a clock that we set: every cost is a number here, so nothing depends on the machine."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from drafttrain.batch import TokenTree
from drafttrain.drafters.combined import alone
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.inference.adaptive import Adaptive, Costs, RoundReport, smaller_parts
from tests.inference.fakes import FakeBatch, family
from tests.inference.simulated_load import Load, play


class Machine:
    """Plays rounds of a chain drafter: each drafted token is accepted with a probability if those above it were.

    Args:
        free: new tokens of a pass that cost no more than one. each: what a further one costs, in plain steps.
        draft: what a draft step costs, in plain steps. noise: of every cost, relative.
    """

    def __init__(self, free=4, each=0.05, draft=0.05, noise=0.02, seed=0):
        self.free = free
        self.each = each
        self.draft = draft
        self.noise = noise
        self.random = random.Random(seed)
        self.depths: list[int] = []

    def cost(self, rows, depth):
        base = 1 + self.each * max(0, rows * (1 + depth) - self.free)
        return base, self.draft * depth

    def play(self, pace, rounds, accept, rows=1):
        """Returns seconds and tokens, and what the tokens cost in plain decoding."""
        seconds = tokens = 0.0
        self.depths = []
        behind = 0
        for _ in range(rounds):
            spec = pace.choose(rows, behind) if isinstance(pace, Adaptive) else pace
            depth = 0 if spec.shape == "none" else spec.depth
            self.depths.append(depth)
            drafted = []
            for _ in range(rows if depth else 0):
                count = next((i for i in range(depth) if self.random.random() >= accept), depth)
                chain = TokenTree(torch.zeros(depth, dtype=torch.long), list(range(-1, depth - 1)))
                drafted.append((chain, list(range(count))))
            shake = 1 + self.noise * self.random.uniform(-1, 1)
            target, draft = (shake * part for part in self.cost(rows, depth))
            read = behind if depth else 0
            behind = behind - read + rows
            done = RoundReport(
                spec,
                rows,
                rows * (1 + depth),
                target + draft + 0.01 * read,
                draft,
                read,
                0.01 * read,
                drafted,
            )
            if isinstance(pace, Adaptive):
                pace.observe(done)
            seconds += done.seconds
            tokens += rows + sum(len(path) for _, path in drafted)
        return seconds, tokens, tokens / rows * self.cost(rows, 0)[0]


def test_drafting_stops_when_text_gets_hard_and_comes_back():
    machine = Machine(free=1, each=0.1, draft=0.1)
    pace = Adaptive(TreeSpec.parse("chain:4"))
    machine.play(pace, 200, accept=0.8)
    assert sum(machine.depths[-100:]) > 250
    machine.play(pace, 400, accept=0.0)
    assert sum(depth > 0 for depth in machine.depths[-100:]) < 15
    machine.play(pace, 400, accept=0.8)
    assert sum(machine.depths[-100:]) > 250


@pytest.mark.thorough
@pytest.mark.parametrize("hard", [40, 60, 100])
def test_one_hard_passage_does_not_end_drafting_for_the_next_text(hard):
    drafting = []
    for seed in range(6):
        machine = Machine(free=1, each=0.1, draft=0.1, seed=seed)
        pace = Adaptive(TreeSpec.parse("chain:4"))
        machine.play(pace, 300, accept=0.8)
        machine.play(pace, hard, accept=0.0)
        assert sum(depth > 0 for depth in machine.depths[-20:]) < 10
        machine.play(pace, 80, accept=0.8)
        drafting.append(sum(depth > 0 for depth in machine.depths) / 80)
    assert min(drafting) > 0.4 and sum(drafting) / 6 > 0.65


def cpu(tokens):
    """Plain passes by new tokens: nearly free up to 9, dear above."""
    return 1 + 0.042 * (tokens - 1) if tokens < 10 else 1.34 + 0.108 * (tokens - 9)


def gpu(tokens):
    return 1 + 0.004 * (tokens - 1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("accept", "rows", "curve", "tree"),
    [  # every two of an acceptance, a machine and a tree meet once
        (0.0, 1, cpu, "chain:6"),
        (0.0, 8, cpu, "dynamic:4,4,16"),
        (0.0, 8, gpu, "chain:6"),
        (0.4, 1, cpu, "dynamic:4,4,16"),
        (0.4, 8, cpu, "chain:6"),
        (0.4, 8, gpu, "dynamic:4,4,16"),
        (0.8, 1, cpu, "dynamic:4,4,16"),
        (0.8, 8, cpu, "dynamic:4,4,16"),
        (0.8, 8, gpu, "chain:6"),
    ],
)
def test_a_steady_load_comes_near_its_best_fixed_tree(tree, rows, curve, accept):
    (share,) = play(Adaptive(TreeSpec.parse(tree)), [Load(rows, accept, curve)], 1500, seed=0)
    assert share > 0.97


@pytest.mark.thorough
def test_a_load_that_changes_is_followed():
    loads = [
        Load(1, 0.8, cpu),
        Load(8, 0.4, cpu),
        Load(1, 0.0, cpu),
        Load(1, 0.8, cpu),
        Load(8, 0.8, gpu),
    ]
    for seed in (0, 2):
        assert min(play(Adaptive(TreeSpec.parse("dynamic:4,4,16")), loads, 1000, seed)) > 0.92


def test_costs_between_and_beyond_what_was_measured():
    costs = Costs()
    assert (costs.at(3), costs.lowest()) == (0.0, None)
    for at, seconds in (
        (2, 1.0),
        (6, 3.0),
        (6, 3.0),
        (6, 90.0),
    ):  # one slow round changes no median
        costs.add(at, seconds)
    assert [costs.at(place) for place in (1, 2, 4, 6, 8)] == [1.0, 1.0, 2.0, 3.0, 4.0]
    costs.add(
        4, 50.0
    )  # the first of its size: at most twice what was expected, and no more than a larger one
    assert costs.at(4) == 3.0
    falling = Costs()
    falling.add(1, 2.0)
    falling.add(3, 1.0)
    assert falling.at(1) == falling.at(9) == 1.0


def test_what_a_smaller_tree_would_have_accepted():
    # -1 -> 0, 1; 0 -> 2; 1 -> 3; 3 -> 4
    tree = TokenTree(
        torch.arange(5), [-1, -1, 0, 1, 3], torch.tensor([-0.5, -1.0, -0.7, -1.1, -1.2])
    )
    specs = [
        TreeSpec.parse(t)
        for t in ("none", "dynamic:2,2,3", "dynamic:2,2,4", "dynamic:1,2,1", "dynamic:3,2,5")
    ]
    sizes = [
        np.array([getattr(spec, name) for spec in specs]) for name in ("depth", "budget", "most")
    ]
    accepted, nodes = smaller_parts(tree, [1, 3, 4], *sizes)
    assert accepted.tolist() == [0, 1, 2, 0, 3]
    assert nodes.tolist() == [0, 3, 4, 1, 5]
    assert smaller_parts(tree, [], *sizes)[0].tolist() == [0, 0, 0, 0, 0]
    chains = [np.array(values) for values in ((0, 2, 4), (0, 2, 4), (0, 2, 4))]
    unscored = TokenTree(torch.arange(4), [-1, 0, 1, 2])
    accepted, nodes = smaller_parts(unscored, [0, 1, 2], *chains)
    assert (accepted.tolist(), nodes.tolist()) == ([0, 2, 3], [0, 2, 4])


def test_a_smaller_tree_drafts_the_likely_nodes_of_a_match_alone():
    """As `alone` does: of each tree its own number of nodes, and likely ones up to the most of a match."""
    chain = TokenTree(
        torch.arange(5), list(range(-1, 4)), torch.tensor([0.9, 0.8, 0.5, 0.2, 0.05]).log()
    )
    match = replace(chain, matched=frozenset(range(5)))
    for text in (
        "dynamic:2,4,1",
        "dynamic:1,4,2@match=3",
        "dynamic:2,4,5",
        "dynamic:2,4,2@match=11",
    ):
        spec = TreeSpec.parse(text)
        kept = len(alone(match.part(list(range(min(spec.most, 5)))), spec))
        sizes = [np.array([0, value]) for value in (spec.depth, spec.budget, spec.most)]
        accepted, nodes = smaller_parts(match, [0, 1, 2, 3], *sizes)
        assert (accepted.tolist(), nodes.tolist()) == ([0, min(kept, 4)], [0, kept]), text


@pytest.mark.parametrize(
    "tree", ["chain:6", "dynamic:5,8,24", "fanout:3x2x2", "paths:0,1,0-0,0-0-0", "chain:4@stop=0.2"]
)
def test_the_ladder_ends_with_the_tree_itself(tree):
    spec = TreeSpec.parse(f"{tree}@adapt")
    assert spec.adaptive
    assert str(spec) == f"{tree}@adapt"
    ladder = spec.smaller()
    assert str(ladder[-1]) == tree
    sizes = [(level.budget, level.depth) for level in ladder]
    assert sizes == sorted(set(sizes))
    assert len(ladder) >= 3
    # Any two have a largest tree that both contain, and it is one of them: what a round tells about other trees.
    assert {(min(a, c), min(b, d)) for a, b in sizes for c, d in sizes} == set(sizes)


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.2, 20, 0.9)])
def test_outputs_do_not_depend_on_the_pace(sampling):
    target, _ = family("llama")
    prompts = [[5, 9, 11], [7, 7, 2, 9], [30, 2]]
    plain = Decoder(target, None, sampling=sampling, eos_ids=(), max_rows=2)
    want = [made.tokens for made in plain.generate(prompts, max_new_tokens=40, seed=3)]
    truths = {tuple(prompt): tokens for prompt, tokens in zip(prompts, want, strict=True)}
    drafter = FakeBatch(truths, agree=0.6, feature_layers=(0, 2))
    decoder = Decoder(
        target,
        drafter,
        spec=TreeSpec.parse("fanout:4x4x4@adapt"),
        sampling=sampling,
        eos_ids=(),
        max_rows=2,
    )
    for _ in range(2):
        made = decoder.generate(prompts, max_new_tokens=40, seed=3)
        assert [generation.tokens for generation in made] == want


def test_a_paused_drafter_gets_everything_when_it_is_asked_again():
    class Stutter:
        """Drafts in every fourth round."""

        calls = 0

        def choose(self, rows, behind):
            self.calls += 1
            return TreeSpec.parse("none" if self.calls % 4 else "fanout:4x4x4")

        def observe(self, done):
            assert (done.spec.shape == "none") <= (not done.drafted and done.read == 0)
            assert done.seconds >= done.draft_seconds + done.read_seconds

    target, _ = family("llama")
    prompt = [5, 9, 11, 9]
    want = Decoder(target, None, eos_ids=()).generate([prompt], max_new_tokens=30)[0].tokens
    drafter = FakeBatch({tuple(prompt): want}, agree=0.8, feature_layers=(1, 3))
    decoder = Decoder(
        target, drafter, spec=TreeSpec.parse("fanout:4x4x4"), eos_ids=(), pace=Stutter()
    )
    made = decoder.generate([prompt], max_new_tokens=30)[0]
    assert made.tokens == want
    assert made.stats.accepted_length > 1.0
    (session,) = drafter.sessions
    features = torch.cat(session.features)
    assert session.tokens == (prompt + want)[: len(features) + 1]
    exact = target.forward(torch.tensor([(prompt + want)[: len(features)]]), (1, 3)).features[0]
    torch.testing.assert_close(features, exact, atol=1e-4, rtol=1e-4)


def test_some_requests_may_be_decoded_plainly():
    target, _ = family("llama")
    prompts = [[5, 9, 11], [7, 7, 2, 9]]
    plain = Decoder(target, None, eos_ids=(), max_rows=2).generate(prompts, max_new_tokens=20)
    truths = {tuple(prompt): made.tokens for prompt, made in zip(prompts, plain, strict=True)}
    decoder = Decoder(
        target,
        FakeBatch(truths, agree=1.0),
        spec=TreeSpec.parse("fanout:4x4x4"),
        eos_ids=(),
        max_rows=2,
    )
    on, off = decoder.generate(prompts, max_new_tokens=20, speculate=[True, False])
    assert [on.tokens, off.tokens] == [made.tokens for made in plain]
    assert on.stats.accepted_length > 1.0
    assert (off.stats.accepted_length, off.stats.draft_seconds) == (1.0, 0.0)
