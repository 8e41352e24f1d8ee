"""Growth on a device chooses the nodes of the host's growth, in the same order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.drafters.common.tensor_growth import TensorGrowth
from drafttrain.drafters.common.tree_growth import Children, GrowingTree, grow_trees
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.ops.sampling import Sampler, SamplingParams

VOCAB = 12
CPU = torch.device("cpu")
SHAPES = st.one_of(
    st.sampled_from(
        [
            "chain:1",
            "chain:5",
            "fanout:3x2x1",
            "fanout:20x1",
            "paths:0,1,0-0,0-2,1-1,0-0-0",
            "paths:2,0",
        ]
    ),
    st.tuples(st.integers(1, 6), st.integers(1, 14), st.integers(1, 60)).map(
        lambda n: "dynamic:{},{},{}".format(*n)
    ),
)


class Table:
    """Logits below a node, and its confidence, by the node's path."""

    def __init__(self, seed, confident, alike):
        self.seed = seed
        self.confident = confident
        self.alike = alike

    def __call__(self, paths):
        rows = []
        chances = []
        for path in paths:
            state = torch.Generator().manual_seed(hash((self.seed, *path)) % 2**31)
            values = torch.randn(VOCAB, generator=state, dtype=torch.float32) * 3
            rows.append(values.round() if self.alike else values)  # equal scores
            chances.append(torch.rand((), generator=state) * 0.9 + 0.1)
        return Children(
            torch.stack(rows), confidence=torch.stack(chances) if self.confident else None
        )


def on_host(spec, table, max_depth, sampler=None):
    paths: list[tuple[int, ...]] = []

    def step(growing, _depth):
        count = len(growing[0].above)
        parents = growing[0].opened[-count:]
        for token, parent in zip(growing[0].tokens.tolist(), parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return [table(paths[-count:])]

    return grow_trees([GrowingTree(spec, table([()]), None, sampler, max_depth)], step)[0]


def on_device(spec, tables, max_depth, params=None, uniforms=None):
    growth = TensorGrowth(spec, VOCAB, max_depth, CPU)
    opened = [[()] for _ in tables]

    def children():
        made = [table(paths) for table, paths in zip(tables, opened, strict=True)]
        confidence = torch.cat([each.confidence for each in made]) if tables[0].confident else None
        return Children(torch.cat([each.logits for each in made]), confidence=confidence)

    def ask(_depth, tokens, parents):
        for row, paths in enumerate(opened):
            pairs = zip(parents[row].tolist(), tokens[row].tolist(), strict=True)
            opened[row] = [(*paths[parent], token) for parent, token in pairs]
        return children()

    return growth, growth.grow(children(), ask, params, uniforms)


@settings(deadline=None, max_examples=60)
@given(
    shape=SHAPES,
    stop=st.sampled_from(["", "@stop=0.05", "@stop=0.3", "@cut=0.1"]),
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=2),
    confident=st.booleans(),
    alike=st.booleans(),
    max_depth=st.sampled_from([None, 2]),
)
def test_nodes_are_those_of_the_host(shape, stop, seeds, confident, alike, max_depth):
    spec = TreeSpec.parse(shape + stop)
    tables = [Table(seed, confident, alike) for seed in seeds]
    growth, grown = on_device(spec, tables, max_depth)
    for row, table in enumerate(tables):
        want = on_host(spec, table, max_depth)
        n = int(grown.counts[row])
        assert grown.tokens[row, :n].tolist() == want.tokens.tolist()
        assert grown.parents[row, :n].tolist() == want.parents
        torch.testing.assert_close(grown.scores[row, :n].float(), want.log_probs)
        assert not growth.fixed or growth.parents == want.parents


@pytest.mark.parametrize("confident", [False, True])
def test_drawn_chains_are_those_of_the_host(confident):
    spec = TreeSpec.parse("chain:6@sample")
    params = SamplingParams(0.8, top_p=0.9)
    table = Table(3, confident, False)

    def state():
        return torch.Generator().manual_seed(5)

    want = on_host(spec, table, None, Sampler(params, state()))
    uniforms = torch.rand(
        1, 6, dtype=torch.float64, generator=state()
    )  # as the host's numbers, drawn one by one
    _, grown = on_device(spec, [table], None, params, uniforms)
    assert (
        grown.tokens[0].tolist() == want.tokens.tolist()
        and grown.parents[0].tolist() == want.parents
    )
    torch.testing.assert_close(grown.scores[0].float(), want.log_probs)
    torch.testing.assert_close(grown.proposals[0], want.proposal.probs)


def test_what_needs_the_host_is_not_served():
    served = {
        text: TensorGrowth.serves(TreeSpec.parse(text))
        for text in ("chain:3@sample", "dynamic:3,3,8@stop=0.1")
    }
    assert all(served.values())
    for text in ("none", "fanout:2x2@sample", "chain:3@sample@stop=0.2"):
        assert not TensorGrowth.serves(TreeSpec.parse(text))
