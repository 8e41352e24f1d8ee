"""Continuing a drafter on other data: what is kept, what the recipe may change, and what it may not."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.cli import main
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.eagle3.model import Eagle3, Eagle3Config
from drafttrain.drafters.registry import load_drafter
from drafttrain.target import Target
from tests.conftest import make_target, save_target
from tests.training.runs import write_recipe


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """A target, data, and a drafter for it with options that no default has."""
    folder = tmp_path_factory.mktemp("adapt")
    target = Target.load(str(tiny[0]), "float32")
    torch.manual_seed(1)
    options = {
        "feature_layers": (0, 3),
        "fc_norm": True,
        "norm_output": True,
        "num_hidden_layers": 2,
        "ttt_steps": 3,
    }
    drafter = Eagle3(Eagle3Config.for_target(target, draft_vocab_size=200, **options))
    drafter.initialize(target, torch.arange(60, 260))
    drafter.save_pretrained(folder / "drafter")
    return *tiny, folder / "drafter"


def recipe(tmp_path, made, **extra):
    return write_recipe(tmp_path, *made[:2], drafter={}, max_steps=3, init=str(made[2]), **extra)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.mark.thorough
def test_an_own_drafter_goes_on_with_packing_and_checkpointing(tmp_path, made, capsys):
    words = recipe(tmp_path, made, packing=True, max_length=64, gradient_checkpointing=True)
    assert main(["train", *words, "drafter.ttt_steps=2", "drafter.num_hidden_layers=2"]) == 0
    assert "note: the vocabulary of init=" in capsys.readouterr().out
    target = Target.load(str(made[0]), "float32")
    before, after = (load_drafter(str(path), target) for path in (made[2], tmp_path / "drafter"))
    assert torch.equal(before.kept_ids, after.kept_ids) and after.feature_layers == (0, 3)
    assert after.config.fc_norm and after.config.norm_output and len(after.decoder_layers) == 2
    assert (before.config.ttt_steps, after.config.ttt_steps) == (3, 2)
    assert not torch.equal(before.fc.weight, after.fc.weight)
    summary = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert summary["vocabulary"]["size"] == 200 and summary["steps"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["drafter.draft_vocab_size=100"],
            "drafter.draft_vocab_size=100, but the drafter of init=.* has 200",
        ),
        (
            ["drafter.feature_layers=[1,2,3]"],
            r"drafter.feature_layers=.1, 2, 3., but .* has .0, 3.",
        ),
        (["drafter.qk_norm=true"], "drafter.qk_norm=True, but .* has False"),
        (["drafter.fc_nrm=true"], "unknown key drafter.fc_nrm; did you mean fc_norm"),
        (["init=/nowhere"], "init='/nowhere': no such folder"),
        (
            ["drafter.lora={r: 4, targets: [lm_head]}"],
            "targets=.* names no linear layer .* fc, gate_proj",
        ),
        (["drafter.lora={rank: 4}"], "unknown key drafter.lora.rank; there are r, alpha"),
        (
            ["init=target", "drafter.lora={r: 4}"],
            "adapters of a trained drafter, but init='target'",
        ),
    ],
)
def test_a_recipe_that_contradicts_the_drafter_is_refused(tmp_path, made, words, message, capsys):
    assert main(["train", *recipe(tmp_path, made), *words]) == 2
    import re

    assert re.search(message, capsys.readouterr().err)


@pytest.mark.thorough
def test_adapters_of_a_head_are_trained_resumed_merged_and_read_alone(tmp_path, made):
    words = [*recipe(tmp_path, made), "drafter.lora={r: 4}", "learning_rate=0.01", "save_steps=2"]
    words.append("lr_scheduler_type=constant")
    whole = tmp_path / "whole"
    assert main(["train", *words, f"output_dir={whole}"]) == 0
    assert main(["train", *words, "max_steps=2"]) == 0
    assert main(["train", *words]) == 0
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        once, resumed = (load_file(folder / name) for folder in (whole, tmp_path / "drafter"))
        assert all(torch.equal(once[key], resumed[key]) for key in once), name

    # Only layers with adapters have changed, and the adapters are a fraction of them.
    before, after = (load_file(folder / "model.safetensors") for folder in (made[2], whole))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")
    assert before.keys() == after.keys() and changed
    assert all(name.split(".")[-2] in layers for name in changed)
    small = (whole / "adapter" / "adapter_model.safetensors").stat().st_size
    assert small < 0.5 * (whole / "model.safetensors").stat().st_size

    # The adapter alone, on its head, is the same drafter.
    again = tmp_path / "again"
    adapter = whole / "adapter"
    assert (
        main(
            [
                "import",
                "--checkpoint",
                str(adapter),
                "--target",
                str(made[0]),
                "--output",
                str(again),
            ]
        )
        == 0
    )
    read = load_file(again / "model.safetensors")
    assert all(torch.equal(read[name], after[name]) for name in after)


@torch.no_grad()
def test_a_head_with_adapters_is_packed_with_them(made):
    target = Target.load(str(made[0]), "float32")
    options = {"lora": {"r": 4}}
    drafter = Eagle3.begin(target, str(made[2]), options, "kl").eval()
    for name, weight in drafter.named_parameters():
        assert weight.requires_grad == ("lora_" in name), name
        if "lora_B" in name:
            weight.normal_(std=0.1)
    session = drafter.start(torch.arange(9), 64)
    features = torch.randn(8, drafter.fc.in_features, generator=torch.Generator().manual_seed(0))
    session.extend(torch.arange(1, 9), features)
    want = session.propose(TreeSpec.parse("chain:2"))
    drafter.pack()
    session = drafter.start(torch.arange(9), 64)
    session.extend(torch.arange(1, 9), features)
    found = session.propose(TreeSpec.parse("chain:2"))
    assert found.tokens.tolist() == want.tokens.tolist()
    torch.testing.assert_close(found.log_probs, want.log_probs, rtol=1e-4, atol=1e-4)


def test_a_target_that_it_was_not_made_for_is_refused(tmp_path, made, capsys):
    other = make_target(layers=6)
    save_target(other, tmp_path / "other")
    assert main(["train", *recipe(tmp_path, made), f"target={tmp_path / 'other'}"]) == 2
    assert "num_layers=4, but target" in capsys.readouterr().err
