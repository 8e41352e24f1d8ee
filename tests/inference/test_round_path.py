"""A decoding round stays readable: the files that it crosses are few, and docs/architecture.md lists them in order."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.inference import Decoder, generate
from tests.conftest import make_target
from tests.drafters.helpers import make_drafter
from tests.marks import needs_compiler
from tests.path_files import files_run, listed_files

MOST_FILES = 12
MOST_FILES_OF_A_CALL = 20
TREE = "dynamic:4,4,12"
PROMPT = [5, 9, 11, 9, 11, 30]


def packed_pair():
    """A packed target and an EAGLE-3 head, on a CPU."""
    target = make_target(hidden=64)
    drafter = make_drafter(target, kept=torch.arange(40, 240)).eval()
    drafter.pack()
    return target.pack(), drafter


def files_of_a_round() -> list[str]:
    """Files under drafttrain/ whose code runs between two results of a warmed-up stream, in the order of their first call.

    Greedy, an EAGLE-3 head, a dynamic tree, a packed target on a CPU.
    """
    target, drafter = packed_pair()
    decoder = Decoder(target, drafter, spec=TreeSpec.parse(TREE), eos_ids=())
    rounds = decoder.stream([PROMPT], max_new_tokens=100)
    for _ in range(4):
        next(rounds)

    def run() -> None:
        for _ in range(25):  # accepted paths differ, and with them what is moved
            next(rounds)

    return files_run(run)


@pytest.mark.thorough
@needs_compiler
def test_a_round_crosses_few_files():
    files = files_of_a_round()
    assert len(files) <= MOST_FILES, files
    assert files == listed_files("Files of a decoding round")


@pytest.mark.thorough
@needs_compiler
def test_a_call_crosses_few_files():
    target, drafter = packed_pair()

    def call() -> None:
        spec = TreeSpec.parse(TREE)
        generate(target, drafter, PROMPT, max_new_tokens=40, spec=spec, eos_ids=())

    call()  # fills caches
    files = files_run(call)
    assert len(files) <= MOST_FILES_OF_A_CALL, files
