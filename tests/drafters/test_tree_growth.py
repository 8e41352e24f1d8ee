"""Growing trees: shapes, early stop, what drawn tokens were drawn from, and the text form of a spec."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.batch import TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.ops.sampling import Sampler, SamplingParams, probabilities
from tests.drafters.growing import expand
from tests.files import dump_json

VOCAB = 6
FIXED = ("chain:3", "fanout:3x2x1", "paths:0,1,0-0,0-1,1-0,0-0-0")


class TableDrafter:
    """Its next token depends on the last two: logits [v, v, v]. Remembers what it was asked to open."""

    def __init__(self, seed=0, scale=1.5):
        self.table = scale * torch.randn(
            VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)
        )
        self.root = (0, 0)

    def tree(self, text, sampler=None, kept_ids=None):
        self.ends = []

        def advance(tokens, parents):
            assert all(parent < len(self.ends) for parent in parents)
            above = [self.ends[parent] if parent >= 0 else self.root for parent in parents]
            self.ends += [
                (pair[1], token) for pair, token in zip(above, tokens.tolist(), strict=True)
            ]
            return torch.stack(
                [self.table[end] for end in self.ends[len(self.ends) - len(parents) :]]
            )

        return expand(TreeSpec.parse(text), self.table[self.root], advance, kept_ids, sampler)

    def logits_after(self, tree, node):
        """What stands below a node, by the tree's own tokens."""
        path = []
        while node >= 0:
            path.insert(0, int(tree.tokens[node]))
            node = tree.parents[node]
        return self.table[(*self.root, *path)[-2:]]


def sampler(seed=0, **params):
    return Sampler(
        SamplingParams(**{"temperature": 1.0, **params}), torch.Generator().manual_seed(seed)
    )


def ranks(tree):
    """Each node's ranks: its place among its siblings, from the root down."""
    found = []
    for node, parent in enumerate(tree.parents):
        place = sum(above == parent for above in tree.parents[:node])
        found.append((*(found[parent] if parent >= 0 else ()), place))
    return found


@pytest.mark.parametrize("text", FIXED)
def test_rule_trees_hold_the_likeliest_tokens(text):
    drafter = TableDrafter()
    tree = drafter.tree(text)
    assert tree.proposal is None
    for node, (parent, path) in enumerate(zip(tree.parents, ranks(tree), strict=True)):
        log_probs = drafter.logits_after(tree, parent).log_softmax(-1)
        assert tree.tokens[node] == log_probs.argsort(descending=True)[path[-1]]
        above = tree.log_probs[parent] if parent >= 0 else 0.0
        torch.testing.assert_close(tree.log_probs[node], above + log_probs[tree.tokens[node]])


@pytest.mark.parametrize("option", ["", "@sample"])
def test_fixed_shapes(option):
    drafter = TableDrafter()
    draws = sampler()
    assert ranks(drafter.tree("chain:3" + option, draws)) == [(0,), (0, 0), (0, 0, 0)]
    want = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert ranks(drafter.tree("fanout:2x2x1" + option, draws)) == want
    tree = drafter.tree("paths:1-0,0,1,0-0,0-1,0-0-0" + option, draws)
    assert ranks(tree) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    assert len(drafter.ends) == 3, "only nodes with children are opened"


def test_fixed_trees_may_leave_out_ranks():
    drafter = TableDrafter()
    tree = drafter.tree("paths:1,1-2")
    order = drafter.table[drafter.root].argsort(descending=True)
    assert tree.tokens[0] == order[1]
    assert tree.tokens[1] == drafter.logits_after(tree, 0).argsort(descending=True)[2]


@pytest.mark.parametrize("text", [f"{text}@sample" for text in FIXED])
def test_drawn_trees_say_what_they_were_drawn_from(text):
    drafter = TableDrafter()
    draws = sampler(top_k=4, top_p=0.95, min_p=0.02, temperature=1.3)
    tree = drafter.tree(text, draws)
    pairs = list(zip(tree.parents, tree.tokens.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    for node, parent in enumerate(tree.parents):
        q = probabilities(drafter.logits_after(tree, parent)[None], draws.params)[0]
        assert torch.equal(tree.proposal.probs[tree.proposal.rows[node]], q)
        assert q[tree.tokens[node]] > 0
        above = tree.log_probs[parent] if parent >= 0 else 0.0
        torch.testing.assert_close(tree.log_probs[node], above + q[tree.tokens[node]].log())


def test_narrow_distributions_give_fewer_siblings():
    drafter = TableDrafter()
    tree = drafter.tree("fanout:4x2@sample", sampler(top_k=2))
    assert ranks(tree) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert len(drafter.tree(f"fanout:{VOCAB + 3}")) == VOCAB


def test_kept_ids_name_target_tokens_and_go_with_the_proposal():
    kept = torch.arange(VOCAB) * 10 + 5
    drafter = TableDrafter()
    plain, mapped = (drafter.tree("fanout:2x2@sample", sampler(), ids) for ids in (None, kept))
    assert torch.equal(mapped.tokens, kept[plain.tokens])
    assert mapped.proposal.kept_ids is kept and torch.equal(
        mapped.proposal.probs, plain.proposal.probs
    )


@pytest.mark.parametrize("budget", [1, 2, 4, 7])
def test_paths_that_fell_out_of_the_budget_are_not_opened_and_the_tree_stays_the_same(budget):
    opened = []
    for seed in range(12):
        drafter = TableDrafter(seed, scale=3.0)
        whole = drafter.tree("dynamic:5,3,999")
        lists = whole.tokens.tolist(), whole.parents, whole.log_probs.tolist()
        want = TokenTree.likeliest(budget, *lists, whole.tokens.device)
        opened.append(len(drafter.ends))
        tree = drafter.tree(f"dynamic:5,3,{budget}")
        assert tree.tokens.tolist() == want.tokens.tolist() and tree.parents == want.parents
        assert torch.equal(tree.log_probs, want.log_probs)
        opened[-1] -= len(drafter.ends)
    assert sum(opened) > 0


@pytest.mark.parametrize(
    "text", ["chain:5", "fanout:3x2x2x1", "dynamic:5,3,14", "chain:5@sample", "fanout:3x2x2@sample"]
)
@pytest.mark.parametrize("stop", [0.02, 0.1, 0.4])
def test_unlikely_paths_are_not_continued(text, stop):
    drafter = TableDrafter()
    whole = drafter.tree(text, sampler(4))
    cut = drafter.tree(f"{text}@stop={stop}", sampler(4))
    opened = {parent for parent in cut.parents if parent >= 0}
    assert all(cut.log_probs[node].exp() >= stop for node in opened)
    assert len(cut) < len(whole) or stop < 0.4
    if "fanout" in text:
        likely = {node for node in range(len(cut)) if cut.log_probs[node].exp() >= stop}
        assert opened == {node for node in likely if cut.depths[node] < TreeSpec.parse(text).depth}


@pytest.mark.parametrize(
    "text", ["chain:5", "fanout:3x2x2x1", "dynamic:5,3,14", "paths:0,1,0-0,0-1,1-0"]
)
@pytest.mark.parametrize("least", [0.02, 0.1, 0.4, 0.99])
def test_a_cut_leaves_the_likely_nodes_of_the_tree(text, least):
    drafter = TableDrafter()
    whole = drafter.tree(text)
    grown = drafter.tree(f"{text}@cut={least}")
    assert len(grown) < len(whole) or least < 0.4  # what can only grow unlikely nodes is not opened
    left = grown.prune(9, least)
    wanted = [node for node in range(len(whole)) if whole.log_probs[node].exp() >= least]
    assert left.tokens.tolist() == whole.tokens[wanted].tolist() and torch.equal(
        left.log_probs, whole.log_probs[wanted]
    )
    assert left.parents == whole.part(wanted).parents and (least < 0.99 or not len(left))
    assert len(left.prune(1, least)) == left.depths.count(1)


SHAPES = ["none", "chain:3", "fanout:4x2x1", "dynamic:5,8,24", "paths:0,1,0-0,0-1"]


OPTIONS = [
    "chain:2@sample@stop=0.001",
    "dynamic:4,4,6@stop=0.3@alone=0.5@match=11@adapt",
    "chain:3@nomatch",
    "dynamic:4,4,16@stop=0.1@cut=0.05@nomatch",
]


@pytest.mark.parametrize("text", [*SHAPES, *(f"{text}@stop=0.25" for text in SHAPES[1:]), *OPTIONS])
def test_the_text_form_goes_both_ways(text):
    assert str(TreeSpec.parse(text)) == text
    assert TreeSpec.parse(str(TreeSpec.parse(text))) == TreeSpec.parse(text)


@pytest.mark.thorough
@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=8))
def test_any_closed_set_of_paths_is_a_tree(leaves):
    paths = {tuple(leaf[: i + 1]) for leaf in leaves for i in range(len(leaf))}
    spec = TreeSpec.parse("paths:" + ",".join("-".join(map(str, path)) for path in paths))
    assert set(spec.paths) == paths and spec.budget == len(paths)
    assert spec.depth == len(spec.fanout) == max(map(len, paths))
    assert TreeSpec.parse(str(spec)) == spec
    tree = TableDrafter().tree(str(spec))
    assert len(tree) == len(paths) and max(tree.depths) == spec.depth


def test_paths_may_come_from_a_file(tmp_path):
    file = tmp_path / "choices.json"
    dump_json(file, [[0], [0, 0], [1], [0, 1]])
    assert str(TreeSpec.parse(f"paths:{file}@sample")) == "paths:0,1,0-0,0-1@sample"
    file.write_text('{"a": 1}')
    with pytest.raises(UserError, match="must hold a list of lists of ranks"):
        TreeSpec.parse(f"paths:{file}")
    file.write_text("[[0]")
    with pytest.raises(UserError, match=r"is not JSON.*must hold a list of lists"):
        TreeSpec.parse(f"paths:{file}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bush:3", "tree='bush:3' is not a tree; write none, chain:3"),
        ("chain:0", "is not a tree"),
        ("none:1", "is not a tree"),
        ("paths:", "is not a tree"),
        ("paths:0,-1", "is not a tree"),
        ("paths:0,1-0", "node 1-0 has no parent; add 1"),
        ("paths:/no/file.json", "/no/file.json' cannot be read"),
        ("chain:3@draw", "'draw' is not a valid option; write @sample, @stop=P"),
        ("chain:3@stop=2", "'stop=2' is not a valid option"),
        ("chain:3@stop=x", "'stop=x' is not a valid option"),
        ("none@sample", "'sample' is not a valid option"),
        ("chain:3@match=0", "'match=0' is not a valid option"),
        ("chain:3@match=x", "'match=x' is not a valid option"),
        ("chain:3@cut=1", "'cut=1' is not a valid option"),
        (
            "chain:3@cut=0.1@sample",
            "@cut drops tokens after drawing them, which biases; use @stop=0.1",
        ),
        ("dynamic:5,8,24@sample", "drops tokens after drawing them"),
        ("paths:0,2@sample", "without a gap"),
    ],
)
def test_bad_specs_are_named(text, message):
    with pytest.raises(UserError, match=message):
        TreeSpec.parse(text)


def test_greedy_decoding_cannot_draw():
    with pytest.raises(
        UserError, match="tree='chain:3@sample' draws its tokens, but temperature=0 is greedy"
    ):
        TreeSpec.parse("chain:3@sample").check(SamplingParams())
    TreeSpec.parse("chain:3@sample").check(SamplingParams(0.5))
