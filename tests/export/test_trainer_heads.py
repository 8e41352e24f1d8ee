"""Heads that trainers' own classes write, imported: equal in the logits of two depths; speculators' and verl-SpeCo's.

SPECULATORS_PYTHON names the interpreter of an environment with speculators 0.9.0 (beside a torch for CPUs, without torchvision).
VERL_SPECO_WHEEL names a folder with the unpacked wheel: pip download --no-deps verl-speco==0.1.0
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from drafttrain.cli import main
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter
from drafttrain.export.engine_runs import run_side
from drafttrain.target import Target
from tests import engine_arithmetic
from tests.conftest import make_target

PYTHON = os.environ.get("SPECULATORS_PYTHON", "")
WHEEL = os.environ.get("VERL_SPECO_WHEEL", "")
SIDE = Path(engine_arithmetic.__file__).with_name("trainers_side.py")
EAGLE3 = {
    "draft_vocab_size": 300, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "embed_requires_grad": False,
}  # fmt: skip
PEAGLE = {**EAGLE3, "norm_before_fc": False, "norm_output": False, "mask_token_id": 290}
CASES = [
    {"trainer": "speculators", "kind": "eagle3", "keys": EAGLE3},
    {"trainer": "speculators", "kind": "eagle3", "keys": {**EAGLE3, "norm_before_fc": False, "fc_norm": True}},
    {"trainer": "speculators", "kind": "eagle3", "keys": {**EAGLE3, "draft_vocab_size": 150}},
    {"trainer": "speculators", "kind": "peagle", "keys": PEAGLE},
    {"trainer": "speculators", "kind": "mtp", "keys": {}},
    {"trainer": "verl-SpeCo", "kind": "eagle1", "keys": {"num_hidden_layers": 1, "draft_num_hidden_layers": 1}},
    {"trainer": "verl-SpeCo", "kind": "eagle1", "keys": {"num_hidden_layers": 2, "draft_num_hidden_layers": 2}},
    {"trainer": "verl-SpeCo", "kind": "peagle", "keys": {"num_draft_layers": 2, "mask_token_id": 290, "fc_norm": True}},
]  # fmt: skip
READ = 17  # tokens before the draft


@pytest.mark.slow
@pytest.mark.skipif(
    not PYTHON or not WHEEL, reason="SPECULATORS_PYTHON or VERL_SPECO_WHEEL is not set"
)
@torch.no_grad()
def test_what_a_trainer_writes_is_imported_and_computes_the_same(tmp_path, capsys):
    built = make_target(layers=8)
    built.model.save_pretrained(tmp_path / "target")
    built.tokenizer.save_pretrained(tmp_path / "target")
    target = Target.load(str(tmp_path / "target"), "float32", "cpu")
    heads = []
    for number, case in enumerate(CASES):
        heads.append({**case, "folder": str(tmp_path / f"{number}-{case['trainer']}")})
    job = {"wheels": [WHEEL], "target": str(tmp_path / "target"), "heads": heads}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    made = run_side(PYTHON, SIDE, job, environment)
    assert not [found["error"] for found in made["heads"] if found["error"]]

    # Ours reads the same tokens; the token behind them is the one that it drafts first.
    generator = torch.Generator().manual_seed(0)
    inputs = {"features": [], "tokens": []}
    ours = []
    for head in heads:
        output = f"{head['folder']}-ours"
        words = ["import", "--checkpoint", head["folder"], "--target", str(target.path)]
        assert main([*words, "--output", output]) == 0, capsys.readouterr().err
        drafter = load_drafter(output, target)
        tokens = torch.randint(280, (READ + 1,), generator=generator)
        features = torch.randn(READ, len(drafter.feature_layers) * 32, generator=generator)
        session = drafter.start(tokens[:1], 64)
        session.extend(tokens[1:], features)
        tree = session.propose(TreeSpec.parse("chain:2"))
        ours.append((drafter, tree))
        inputs["features"].append(features.tolist())
        inputs["tokens"].append([*tokens.tolist(), int(tree.tokens[0]), 0])
    answer = run_side(PYTHON, SIDE, {**job, "inputs": inputs}, environment)
    for head, (drafter, tree), found in zip(heads, ours, answer["heads"], strict=True):
        assert not found["error"], (head, found["error"])
        theirs = torch.tensor(found["logits"]).log_softmax(-1)
        best = theirs.max(-1)
        tokens = drafter.kept_ids[best.indices]
        # MTP's training attends to fewer states at its second depth than engines do.
        compared = slice(1 if head["kind"] == "mtp" else 2)
        apart = float((best.values.cumsum(0) - tree.log_probs)[compared].abs().max())
        print(head["trainer"], head["kind"], sorted(head["keys"]), f"{apart:.1e}")
        assert tokens.tolist() == tree.tokens.tolist() and apart < 1e-5, head
