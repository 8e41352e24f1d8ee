"""Trees of every shape at every length: rotary tables, caches and kernels have sizes that a text outgrows."""

from __future__ import annotations

import functools

import pytest

from drafttrain.config import TrainConfig
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter
from drafttrain.inference import generate
from drafttrain.train import build_drafter
from tests.conftest import make_target
from tests.drafters import contract

# Tables and caches grow at powers of two: the texts pass 16, 32 and 64 tokens.
PROMPT = list(range(40, 52))
NEW = 60
GREEDY = ("fanout:4x2x1", "paths:0,1,2,0-0,0-1,1-0,0-0-0", "dynamic:4,4,12")
OPTIONS = {kind: (kind, contract.NEEDED.get(kind, {})) for kind in contract.TRAINED}
OPTIONS["mtp of three modules"] = ("mtp", {"modules": 3})


@functools.cache
def target_of(packed):
    """Heads are 16 wide, so that the kernels for packed drafters serve them."""
    target = make_target(layers=4, hidden=64, vocab_size=300)
    return target.pack() if packed else target


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of an untrained drafter by kind: its trees branch, and little is accepted."""
    rows = [{"tokens": [*PROMPT, *PROMPT], "spans": [[len(PROMPT), 2 * len(PROMPT)]]}]

    @functools.cache
    def make(name):
        kind, options = OPTIONS[name]
        config = TrainConfig(kind=kind, drafter=dict(options))
        folder = tmp_path_factory.mktemp("drafters") / kind
        build_drafter(config, target_of(packed=False), rows)[0].save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture(scope="module")
def plain():
    return generate(target_of(packed=True), None, PROMPT, max_new_tokens=NEW, eos_ids=()).tokens


def decode(folder, packed, tree):
    """Tokens with a drafter loaded anew, whose tables and caches are as short as they begin."""
    target = target_of(packed)
    made = generate(
        target,
        load_drafter(folder, target),
        PROMPT,
        max_new_tokens=NEW,
        spec=TreeSpec.parse(tree),
        eos_ids=(),
    )
    return made.tokens


@pytest.mark.thorough
@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", OPTIONS)
def test_greedy_trees_of_any_length_are_the_targets(folder_of, plain, kind, packed):
    tree = GREEDY[list(OPTIONS).index(kind) % 3]  # test_packed_trees drafts each with each kind
    assert decode(folder_of(kind), packed, tree) == plain
