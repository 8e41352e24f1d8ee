"""A training step and a decoding round read in few files: those of drafters/ whose functions run are counted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drafttrain import drafters
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter
from drafttrain.inference import Decoder
from drafttrain.ops.native import cpu_kernels
from tests.conftest import make_target
from tests.drafters.helpers import make_batch, run_step
from tests.drafters.layer_kinds import make_kind

FOLDER = Path(drafters.__path__[0])


@contextmanager
def files_run() -> Iterator[set[str]]:
    """The files of drafters/ in which a function runs."""
    found: set[str] = set()

    def see(frame, event, argument):
        if frame.f_code.co_filename.startswith(str(FOLDER)):
            found.add(str(Path(frame.f_code.co_filename).relative_to(FOLDER)))

    sys.setprofile(see)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_a_training_step_runs_three_files():
    target = make_target(hidden=64)
    drafter = make_kind("eagle3", target)
    batch = make_batch()
    with files_run() as found:
        run_step(drafter, target, batch)
    assert found == {"eagle3/model.py", "common/layer_model.py", "common/layers.py"}


@pytest.mark.skipif(
    cpu_kernels() is None, reason="without a C compiler a depth runs the layers in torch"
)
@pytest.mark.parametrize("tree", ["chain:3", "dynamic:4,3,8"])
def test_a_decoding_round_runs_three_files(tmp_path, tree):
    target = make_target(hidden=64)
    make_kind("eagle3", target).save_pretrained(tmp_path)
    decoder = Decoder(
        target.pack(), load_drafter(str(tmp_path), target), spec=TreeSpec.parse(tree), eos_ids=()
    )
    rounds = decoder.stream([[1, 2, 3, 4, 5]], max_new_tokens=30)
    next(rounds), next(rounds)  # the prompt, and the first round, which allocates
    with files_run() as found:
        next(rounds)
    assert found == {f"common/{name}.py" for name in ("layer_model", "layers", "rows")}
