"""Loads that computed something else without a word are errors of one line: targets, drafters, imports, resumed runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.cli import main
from drafttrain.drafters.common import lora
from drafttrain.drafters.draft_model.model import DraftModel
from drafttrain.drafters.eagle3.export import SHIPPING
from drafttrain.drafters.registry import load_drafter
from drafttrain.drafters.shipping import ExportRequest, find_drafter, shipping
from drafttrain.errors import UserError
from drafttrain.export.serving_recipes import recipes
from drafttrain.target import Target
from tests.files import FIXTURES, dump_json, load_json


@pytest.fixture(scope="module")
def target():
    return Target.load(str(FIXTURES / "target"), "float32", "cpu")


def copied(tmp_path, name):
    return Path(shutil.copytree(FIXTURES / name, tmp_path / "copy"))


def edit(folder, change=None, name="model.safetensors", **keys):
    """Changes tensors by `change`, and keys of config.json."""
    if change is not None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(
            {key: value.contiguous() for key, value in tensors.items()},
            folder / name,
            {"format": "pt"},
        )
    file = folder / "config.json"
    file.write_text(json.dumps({**load_json(file), **keys}))


def spoil(name, value):
    def change(tensors):
        tensors[name].view(-1)[3] = value

    return change


FIRST = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        (
            None,
            {"num_hidden_layers": 99},
            "does not describe its files, which lack weights model.layers.10",
        ),
        (
            None,
            {"num_hidden_layers": 3},
            "does not describe its files, which have unknown weights model.layers.3",
        ),
        (None, {"attention_bias": True}, "which lack weights model.layers.0.self_attn.k_proj.bias"),
        (None, {"intermediate_size": 7}, "which have another shape of weights model.layers.0.mlp"),
        (None, {"hidden_size": 2**20}, "promises .* weights, but its files have"),
        (
            None,
            {"num_hidden_layers": 10**12},
            "num_hidden_layers=1000000000000 in config.json must be 1 to 1000",
        ),
        (lambda tensors: tensors.pop(FIRST), {}, f"which lack weights {FIRST}"),
        (
            lambda tensors: tensors.update(extra=torch.ones(2)),
            {},
            "which have unknown weights extra",
        ),
        (spoil(FIRST, float("nan")), {}, f"{FIRST} holds values that are not finite"),
        (
            spoil("model.embed_tokens.weight", float("inf")),
            {},
            "embed_tokens.weight holds values that are not finite",
        ),
    ],
)
def test_a_target_whose_files_are_not_what_its_config_says(tmp_path, change, keys, message):
    folder = copied(tmp_path, "target")
    edit(folder, change, **keys)
    with pytest.raises(UserError, match=message) as found:
        Target.load(str(folder), "float32", "cpu")
    assert len(str(found.value).splitlines()) == 1


def test_parts_that_no_language_model_reads_are_left_out(tmp_path):
    """Towers of other modalities, prediction modules and buffers of earlier versions."""
    folder = copied(tmp_path, "target")
    one = torch.ones(2)
    names = (
        "vision_tower.x.weight",
        "mtp.fc.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    )
    module = {
        f"model.layers.8.{name}": one.clone() for name in ("eh_proj.weight", "mlp.up_proj.weight")
    }
    edit(
        folder, lambda tensors: tensors.update({**{name: one.clone() for name in names}, **module})
    )
    assert Target.load(str(folder), "float32", "cpu").num_layers == 8


DRAFTER_CASES = [
    (
        "eagle3",
        lambda tensors: tensors.pop("midlayer.self_attn.q_proj.weight"),
        {},
        "lacks weights: midlayer.self_attn.q",
    ),
    (
        "eagle3",
        lambda tensors: tensors.update(extra=torch.ones(1)),
        {},
        "has unknown weights: extra",
    ),
    ("eagle3", None, {"drafter_kind": "medusa"}, "lacks weights: blocks|kind"),
    (
        "eagle3",
        None,
        {"drafter_kind": "eagle9"},
        "copy': config.json: drafter_kind='eagle9' is not",
    ),
    ("eagle3", None, {"num_attention_heads": 0}, "copy': config.json: num_attention_heads=0 must"),
    ("eagle3", None, {"num_hidden_layers": 2}, "lacks weights: layers.1"),
    (
        "eagle3",
        None,
        {"num_hidden_layers": 10**9},
        "num_hidden_layers=1000000000 must be a whole number",
    ),
    ("eagle3", None, {"hidden_size": 32}, "has shape|must be"),
    ("eagle3", None, {"target": None}, "config.json records no target.hidden_size"),
    ("eagle3", spoil("fc.weight", float("nan")), {}, "fc.weight holds values that are not finite"),
    (
        "medusa",
        spoil("lm_heads.0.weight", float("inf")),
        {},
        "lm_heads.0.weight holds values that are not finite",
    ),
    ("eagle1", spoil("kept_ids", -1), {}, "the kept ids"),
    ("eagle3", spoil("kept_ids", 10**6), {}, "must be ascending ids of the target's 262 tokens"),
    (
        "eagle3",
        lambda tensors: tensors["kept_ids"].copy_(tensors["kept_ids"].flip(0)),
        {},
        "must be ascending ids",
    ),
    ("eagle3", lambda tensors: tensors["kept_ids"].fill_(5), {}, "each once"),
    (
        "draft_model",
        lambda tensors: tensors.pop("model.norm.weight"),
        {},
        "which lack weights model.norm.weight",
    ),
    ("draft_model", None, {"num_hidden_layers": 1}, "which have unknown weights model.layers.1"),
]


@pytest.mark.parametrize(("kind", "change", "keys", "message"), DRAFTER_CASES)
def test_a_drafter_whose_files_are_not_what_its_config_says(
    target, tmp_path, kind, change, keys, message
):
    folder = copied(tmp_path, f"drafters/{kind}")
    edit(folder, change, **keys)
    with pytest.raises(UserError, match=message) as found:
        load_drafter(str(folder), target)
    assert len(str(found.value).splitlines()) == 1


def test_an_imported_embedding_is_the_targets_or_refused(tmp_path):
    folder = copied(tmp_path, "exports/eagle3_sglang")
    identity = {
        **Target.load(str(FIXTURES / "target"), "float32", "cpu").identity(),
        "name": str(FIXTURES / "target"),
    }
    own = load_file(FIXTURES / "target" / "model.safetensors")["model.embed_tokens.weight"]
    edit(folder, lambda tensors: tensors.update({"embed_tokens.weight": own.bfloat16()}))
    assert SHIPPING.read(folder, identity).config.vocab_size == len(own)
    edit(folder, lambda tensors: tensors.update({"embed_tokens.weight": own + 0.1}))
    with pytest.raises(UserError, match="brings an embed_tokens that differs from the target's"):
        SHIPPING.read(folder, identity)


def test_a_learned_mask_is_not_published_as_a_pickle(target, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(FIXTURES)
    trained = find_drafter("drafters/dflash")
    kind = shipping("dflash")
    assert trained.config.get("mask_token_id") is None
    files = kind.publish(trained, ExportRequest(tmp_path, torch.float32, "some/target"))
    assert [name for name, _ in files] == ["model.safetensors"] and not list(tmp_path.rglob("*.pt"))
    assert "pickles are not published" in capsys.readouterr().out
    vllm = next(
        recipe
        for recipe in recipes(trained, "me/it", "some/target", published=True)
        if recipe.engine == "vLLM"
    )
    assert "drafttrain export --drafter me/it --format vllm --output it-vllm" in vllm.commands


def test_an_adapter_of_another_shape_is_refused(target, tmp_path):
    folder = copied(tmp_path, "drafters/draft_model_lora")
    options = {"layers": [0, 2, 7], "lora": {"r": 2}}
    drafter = DraftModel.begin(target, "target", options, "kl")
    drafter.save_pretrained(tmp_path / "mine")
    file = tmp_path / "mine" / "adapter" / "adapter_model.safetensors"
    assert drafter.load_checkpoint(tmp_path / "mine")
    for change, message in (
        (lambda tensors: tensors.pop(sorted(tensors)[0]), "lacks weights"),
        (lambda tensors: tensors.update(x=torch.ones(1)), "has unknown weights"),
        (lambda tensors: tensors[sorted(tensors)[0]].fill_(float("nan")), "not finite"),
    ):
        tensors = load_file(file)
        before = {key: value.clone() for key, value in tensors.items()}
        change(tensors)
        save_file(tensors, file)
        with pytest.raises(UserError, match=message):
            drafter.load_checkpoint(tmp_path / "mine")
        save_file(before, file)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match="cannot be loaded"):
        drafter.load_checkpoint(tmp_path / "mine")
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"use_rslora": True}, "has use_rslora, which is not computed here"),
        ({"use_dora": True, "alpha_pattern": {"fc": 4}}, "has use_dora, alpha_pattern, which"),
        ({"peft_type": "IA3"}, "has peft_type='IA3', which is not computed here"),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused(tmp_path, other, message):
    own = {"peft_type": "LORA", "base_model_name_or_path": "base", "r": 4, "lora_alpha": 8}
    own |= {"target_modules": ["fc"], "lora_dropout": 0.0, "use_rslora": False}
    dump_json(tmp_path / lora.CONFIG, own)
    options = {"r": 4, "alpha": 8, "targets": ["fc"], "dropout": 0.0}
    assert lora.read_options(tmp_path) == ("base", options)
    dump_json(tmp_path / lora.CONFIG, own | other)
    with pytest.raises(UserError, match=message):
        lora.read_options(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("fc.weight"), "lacks weights: fc.weight"),
        (spoil("fc.weight", float("nan")), "fc.weight holds values that are not finite"),
    ],
)
def test_a_damaged_checkpoint_is_not_resumed(tmp_path, monkeypatch, capsys, change, message):
    shutil.copytree(FIXTURES, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    shutil.rmtree("run/checkpoint-4")
    for name in ("training.json", "model.safetensors"):
        Path("run", name).unlink()
    tensors = load_file("run/checkpoint-2/model.safetensors")
    change(tensors)
    save_file(tensors, "run/checkpoint-2/model.safetensors", {"format": "pt"})
    assert main(["train", "run.yaml"]) == 2
    assert message in capsys.readouterr().err
