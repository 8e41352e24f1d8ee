"""The file of an n-gram store."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from safetensors.numpy import load_file, save_file

from drafttrain.drafters.common.ngram_table import NgramTable
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.suffix.model import SuffixDrafter
from drafttrain.errors import UserError
from drafttrain.target import Target
from tests.conftest import make_target
from tests.files import FIXTURES
from tests.fuzz import file_faults, fuzz, outcome, seeds

STORE = FIXTURES / "store.safetensors"
ABOUT = {"format": "drafttrain ngram_store 1", "tokenizer": "abc", "max_n": "4"}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(str(STORE.parent / "target"), "float32")


def use(path: Path, target: Target) -> None:
    import torch

    drafter = SuffixDrafter(str(path))
    drafter.bind(target)
    session = drafter.start(torch.tensor([260, 84, 82]), 50)
    session.extend(torch.tensor([84, 82]), torch.zeros(2, 0))
    tree = session.propose(TreeSpec.parse("dynamic:3,4,8"))
    assert all(0 <= token < target.vocab_size for token in tree.tokens.tolist())


@fuzz(examples=24)
@given(fault=file_faults(), seed=seeds())
def test_bytes(tmp_path_factory, target, fault, seed):
    path = tmp_path_factory.getbasetemp() / "store.safetensors"
    path.write_bytes(fault.apply(STORE.read_bytes(), Random(seed)))
    outcome("ngram store", fault.name, lambda: use(path, target))


FAULTS = {
    "another type": lambda column: column.astype(np.float64),
    "more dimensions": lambda column: column[None],
    "another shape": lambda column: column[:-1],
    "descending": lambda column: column[::-1].copy(),
    "negative": lambda column: -column - 1 if column.dtype.kind == "i" else column * np.uint64(0),
    "out of range": lambda column: np.full_like(column, 2**31 - 1),
    "empty": lambda column: column[:0],
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["hashes", "starts", "tokens", "counts"])
def test_columns(tmp_path, target, name, fault):
    arrays = load_file(STORE)
    arrays[name] = FAULTS[fault](arrays[name])
    about = {**ABOUT, "tokenizer": NgramTable.load(STORE)[1]}
    save_file(arrays, tmp_path / "s.safetensors", about)
    said = outcome("ngram store", fault, lambda: use(tmp_path / "s.safetensors", target))
    # The order of a context's entries and the size of a count change the drafts only, never what is accepted.
    harmless = (name, fault) in {
        ("tokens", "descending"),
        ("counts", "descending"),
        ("counts", "out of range"),
    }
    assert harmless or "s.safetensors" in said


@pytest.mark.parametrize("key", ["max_n", "tokenizer", "format"])
@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "abc", None])
def test_metadata(tmp_path, target, key, value):
    about = {**ABOUT, "tokenizer": NgramTable.load(STORE)[1], key: value}
    save_file(
        load_file(STORE),
        tmp_path / "s.safetensors",
        {k: v for k, v in about.items() if v is not None},
    )
    assert outcome("ngram store", "metadata", lambda: use(tmp_path / "s.safetensors", target))


def test_a_store_of_a_larger_vocabulary_is_refused(tmp_path):
    from drafttrain.target import tokenizer_fingerprint

    small = make_target(vocab_size=300)
    NgramTable.build([[1, 2, 299, 1, 2, 350]]).save(
        tmp_path / "s.safetensors", tokenizer_fingerprint(small.tokenizer)
    )
    with pytest.raises(
        UserError, match="holds token 350, which is outside target 'tiny''s vocabulary of 300"
    ):
        SuffixDrafter(str(tmp_path / "s.safetensors")).bind(small)
