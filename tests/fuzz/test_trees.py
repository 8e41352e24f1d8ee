"""Tree specs and loss strings: whatever the text, it is parsed to something bounded or refused in one line."""

from __future__ import annotations

import resource
import time
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.drafters.common.tree_spec import MOST_DEPTH, MOST_NODES, TreeSpec
from drafttrain.errors import UserError
from tests.files import dump_json
from tests.fuzz import Fault, fuzz, json_faults, outcome, seeds, wrong_words

ALPHABET = [*"0123456789x,:-@=.", "chain:", "fanout:", "dynamic:", "paths:", "none", "99999999", "1000", "@sample",
    "@stop=", "@alone=", "@match=", "@nomatch", "@adapt", ".json", " ", "\u0663", "nan", "1e-400"]  # fmt: skip
VALID = ("none", "chain:3", "fanout:4x2x1", "dynamic:5,8,24", "paths:0,1,0-0,0-1", "chain:8@stop=0.2@nomatch",
    "dynamic:4,4,6@match=11@adapt", "chain:3@sample", "chain:8@alone=0.6")  # fmt: skip
TOO_LARGE = ("fanout:1000x1000", "chain:99999999999", "chain:257", "dynamic:1000000,8,24", "dynamic:5,100000,24",
    "dynamic:5,8,100000000", "fanout:" + "1x" * 100_000 + "1", "chain:" + "9" * 5000, "paths:" + "0," * 200_000 + "0",
    "paths:" + ",".join("-".join("0" * n) for n in range(1, 300)), "paths:0,99999999", "chain:3@match=99999999")  # fmt: skip


def mutated(text: str, random: Random) -> str:
    """A text with one to four pieces replaced, inserted or repeated."""
    for _ in range(random.randint(1, 4)):
        at, end = sorted(random.randrange(len(text) + 1) for _ in range(2))
        piece = random.choice(
            (
                random.choice(ALPHABET),
                random.choice(ALPHABET) * random.choice((1, 50, 2000)),
                text[at:end] * 3,
            )
        )
        text = text[:at] + piece + random.choice((text[at:], text[end:]))
    return text


def parse(text: str) -> None:
    spec = TreeSpec.parse(text)
    assert (
        0 <= max(spec.budget, spec.most, len(spec.paths)) <= MOST_NODES and spec.depth <= MOST_DEPTH
    )
    assert len(spec.fanout) <= MOST_DEPTH and TreeSpec.parse(str(spec)) == spec
    if spec.shape != "none":
        assert all(smaller.budget <= spec.budget for smaller in spec.smaller())


@fuzz(examples=60)
@given(text=st.lists(st.sampled_from(ALPHABET), max_size=14).map("".join))
def test_random_texts(text):
    outcome("tree", "random text", lambda: parse(text))


@fuzz(examples=60)
@given(text=st.sampled_from(VALID), seed=seeds())
def test_mutated_specs(text, seed):
    outcome("tree", "mutated", lambda: parse(mutated(text, Random(seed))))


@fuzz(examples=24)
@given(
    text=st.sampled_from(("", "chain:", "fanout:2x", "paths:", "chain:3@stop=", "chain:3@match=")),
    word=wrong_words(),
)
def test_wrong_words(text, word):
    outcome("tree", word[0], lambda: parse(text + word[1]))


@pytest.mark.parametrize("text", TOO_LARGE, ids=lambda text: text[:24])
def test_large_trees_are_refused_at_once(text):
    began = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"is too large: a tree has at most|is not a valid option"):
        TreeSpec.parse(text)
    assert time.process_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_the_largest_trees_are_taken():
    for text in (
        "chain:256",
        "fanout:1024",
        "dynamic:256,256,1024",
        "paths:" + ",".join(map(str, range(1024))),
    ):
        parse(text)


@fuzz(examples=24)
@given(fault=json_faults(), seed=seeds())
def test_tree_files(fault: Fault, seed, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "tree.json"
    dump_json(path, fault.apply([[0], [1], [0, 0], [0, 1]], Random(seed)))
    outcome("tree file", fault.name, lambda: parse(f"paths:{path}"))


@pytest.mark.parametrize(
    "text",
    [
        "paths:~nobody/tree.json",
        "paths:a\0b.json",
        "paths:" + "é" * 500 + ".json",
        "paths:/tmp.json",
    ],
)
def test_names_of_tree_files(text):
    assert outcome("tree file", "name", lambda: parse(text))


@pytest.mark.parametrize("value", [3, None, 2.5, [], b"chain:3"])
def test_other_types(value):
    assert outcome("tree", "another type", lambda: parse(value))
