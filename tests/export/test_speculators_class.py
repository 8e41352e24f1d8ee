"""speculators' own classes on exported folders: they load every tensor and compute what the drafter computes.

SPECULATORS_PYTHON names the interpreter of an environment with speculators 0.9.0 (beside a torch for CPUs, without torchvision).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.drafters.registry import kind_class
from drafttrain.drafters.shipping import ExportRequest, check_expressible, find_drafter
from drafttrain.errors import UserError
from drafttrain.export.engine_runs import run_side
from tests import engine_arithmetic
from tests.conftest import loaded_target
from tests.drafters.block_kinds import MIXED, block_states, shaken

PYTHON = os.environ.get("SPECULATORS_PYTHON", "")
SIDE = Path(engine_arithmetic.__file__).with_name("speculators_side.py")
MASK = 290
KEPT = {"kept": torch.arange(0, 300, 2), "mask_token_id": MASK}
WHOLE = {"kept": torch.arange(300), "mask_token_id": MASK}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dflash", WHOLE),
    ("dflash", KEPT),
    ("dflash", {**KEPT, "train_head": True}),
    ("dflash", {**KEPT, "sliding_window": 12}),
    ("dflash", {**KEPT, "sliding_window": 12, "causal": True}),
    ("dflash", {**KEPT, **MIXED, "causal": "sliding"}),
    ("dspark", {**KEPT, "markov_rank": 8}),
    (
        "dspark",
        {**WHOLE, "markov_rank": 8, "markov_head_type": "gated", "sample_from_anchor": True},
    ),
    ("dspark", {**WHOLE, "markov_rank": 8, "markov_head_type": "rnn", "sample_from_anchor": True}),
    ("dspark", {**WHOLE, "markov_rank": 8, "sample_from_anchor": True}),
    ("dflash2", {**WHOLE, "markov_rank": 8, "selector_top_k": 16}),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return loaded_target(folder, layers=8)


def written(target, folder, kind, options):
    drafter = shaken(kind_class(kind), target, feature_layers=(1, 2, 3), **options)
    drafter.save_pretrained(folder / "ours")
    trained = find_drafter(str(folder / "ours"))
    shipping = check_expressible(trained, "speculators")
    shipping.write(
        trained, "speculators", ExportRequest(folder / "out", torch.float32, target.name)
    )
    return drafter


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="SPECULATORS_PYTHON is not set")
def test_speculators_loads_and_computes_our_exports(target, tmp_path):
    features = torch.randn(20, 96, generator=torch.Generator().manual_seed(0))
    root = 5
    drafters = []
    folders = []
    for number, (kind, options) in enumerate(CASES):
        drafters.append(written(target, tmp_path / str(number), kind, options))
        folders.append(str(tmp_path / str(number) / "out"))
    job = {
        "heads": folders,
        "folder": str(Path(target.path).parent),
        "features": features.tolist(),
        "block": [root, MASK, MASK, MASK, MASK],
    }
    answer = run_side(PYTHON, SIDE, job, {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""})
    for (kind, options), drafter, found in zip(CASES, drafters, answer["heads"], strict=True):
        assert not found["error"] and not found["wrong"], (kind, options, found)
        theirs = torch.tensor(found["states"])[-drafter.config.depth :]
        difference = (theirs - block_states(drafter, features, root)).abs().max()
        print(kind, sorted(options), f"{float(difference):.1e}")
        assert difference < 1e-5, (kind, options)
        if "markov_head_type" in options:  # the correction of the block's tokens as a path
            live = torch.ones(1, 5, dtype=torch.bool)
            ids = torch.tensor(job["block"])
            hidden, _ = drafter.readout_of_blocks(theirs, ids, torch.tensor([0]), live)
            bias = drafter.markov_out(hidden[:, drafter.config.hidden_size :])
            torch.testing.assert_close(bias, torch.tensor(found["bias"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("dflash", {"kept": KEPT["kept"]}, "mask_token_id=null, a learned mask"),
        ("dflash", {**WHOLE, "train_head": True}, "takes the target's head for all tokens"),
        ("dflash", {**KEPT, "causal": True}, "causal=true in layers without a window"),
        ("dflash2", {**KEPT, "markov_rank": 8}, "selects among all of the target's tokens"),
    ],
)
def test_what_speculators_does_not_compute_is_said(target, tmp_path, kind, options, message):
    with pytest.raises(UserError, match=message):
        written(target, tmp_path, kind, options)
