"""Recipes for large targets, built on torch's meta device from the config.json values beside them: shapes without weights."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from drafttrain.config import TrainConfig, load_config
from drafttrain.drafters.common.markov import MarkovBlock
from drafttrain.drafters.common.trainable import DecoderDrafter, TrainableDrafter
from drafttrain.drafters.registry import kind_class
from drafttrain.drafters.shipping import Trained, shipping
from drafttrain.recipes import recipe_path
from drafttrain.target import Target
from drafttrain.target.loading import model_config, text_part
from drafttrain.target.own_layer import OwnLayer, spec_of
from drafttrain.target.parts import build_language_model
from drafttrain.training.arguments import KEYS
from drafttrain.training.dry_step import StepSetting, dry_step
from tests.drafters.helpers import new_drafter
from tests.files import large_recipes

# Weights of the text model, without images and prediction modules: model cards and technical reports; Gemma 3 as Keras counts it.
PUBLISHED = {
    "deepseek-v3": 671e9,
    "deepseek-v4-flash": 284e9,
    "gemma-3-12b": 11_765_788_416,
    "gemma-3-27b": 27_009_002_240,
    "gemma-4-26b-a4b": 25.2e9,
    "gemma-4-31b": 30.7e9,
    "glm-4.5-air": 106e9,
    "glm-5.2": 744e9,
    "gpt-oss-120b": 116.8e9,
    "gpt-oss-20b": 20.9e9,
    "kimi-k2": 1_026_470_731_056,
    "kimi-k2.6": 1_026_470_731_056,  # of Kimi K2's shapes
    "llama-3.1-8b": 8.03e9,
    "llama-3.3-70b": 70.6e9,
    "minimax-m3": 428e9,
    "mistral-small-24b": 23.6e9,
    "nemotron-3-nano": 31.6e9,
    "nemotron-3-super": 120e9,
    "qwen3-235b-a22b": 235e9,
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-32b": 32.8e9,
    "qwen3-8b": 8.2e9,
    "qwen3-vl-8b": 8.2e9,  # as Qwen3-8B
    "qwen3.5-27b": 27e9,
    "qwen3.5-35b-a3b": 35e9,
    "qwen3.6-27b": 27e9,
    "qwen3.6-35b-a3b": 35e9,
}
LARGE = large_recipes()
SERVED = [
    (name, form)
    for name in LARGE
    for form in ("vllm", "sglang")
    if name.endswith(("/eagle3", "/dflash", "/dflash2", "/dspark"))
    or (name.endswith("/peagle") and form == "vllm")
]


def config_of(path: Path) -> PreTrainedConfig:
    return text_part(model_config(str(path), trust_remote_code=False))


def on_meta(path: Path) -> PreTrainedModel:
    with torch.device("meta"):
        return build_language_model(config_of(path), dtype=torch.bfloat16)


@functools.cache
def target_of(folder: str) -> Target:
    path = recipe_path(next(name for name in LARGE if name.startswith(f"{folder}/"))).with_name(
        "target.json"
    )
    assert path is not None
    return Target.wrap(on_meta(path), None, name=folder, dtype=torch.bfloat16)


@functools.cache
def recipe_of(name: str) -> TrainConfig:
    return load_config(name, [], KEYS)


@functools.cache
def drafter_of(name: str) -> TrainableDrafter:
    """The drafter of a recipe, as training begins it with init=target."""
    config = recipe_of(name)
    target = target_of(name.partition("/")[0])
    kind = kind_class(config.kind)
    with torch.device("meta"):
        drafter = kind(kind.config_class.for_target(target, **kind.check_options(config.drafter)))
    if not isinstance(drafter, MarkovBlock):  # whose rows are computed, which meta cannot
        drafter.bind(target)
    return drafter


def test_every_target_has_recipes_and_a_size():
    assert {name.partition("/")[0] for name in LARGE} == set(PUBLISHED)
    assert {f"{target}/eagle3" for target in PUBLISHED} <= set(LARGE)


@pytest.mark.thorough
@pytest.mark.parametrize("folder", PUBLISHED)
def test_the_target_has_its_published_size(folder):
    target = target_of(folder)
    weights = {
        id(weight): weight.numel()
        for weight in [*target.body.parameters(), *target.lm_head.parameters()]
    }
    assert sum(weights.values()) == pytest.approx(PUBLISHED[folder], rel=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in LARGE if not name.endswith("/draft_model")])
def test_the_drafter_fits_its_target(name):
    config = recipe_of(name)
    target = target_of(name.partition("/")[0])
    drafter = drafter_of(name)
    kept = config.drafter.get("draft_vocab_size", 0) or target.vocab_size
    assert len(drafter.kept_ids) == kept <= target.vocab_size
    assert list(drafter.feature_layers) == sorted(set(drafter.feature_layers))
    assert all(-1 <= layer < target.num_layers for layer in drafter.feature_layers)
    for option, value in config.drafter.items():
        found = getattr(drafter.config, option)
        wanted = kept if option == "draft_vocab_size" else value
        assert (list(found) if isinstance(found, tuple) else found) == wanted
    size = sum(weight.numel() for weight in drafter.parameters())
    assert (
        size < 0.2 * PUBLISHED[name.partition("/")[0]]
    )  # a draft step is cheap beside a pass of the target
    assert issubclass(kind_class(config.kind), DecoderDrafter) and config.packing


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "form"), SERVED)
def test_engines_serve_the_drafter(name, form, monkeypatch, tmp_path):
    drafter = drafter_of(name)
    monkeypatch.setattr(Trained, "load", lambda self: drafter)
    kind = recipe_of(name).kind
    target = target_of(name.partition("/")[0])
    trained = Trained(tmp_path, kind, drafter.config.to_dict(), target.identity())
    assert shipping(kind).unsupported(trained, form) == []


@pytest.mark.parametrize("name", [name for name in LARGE if name.endswith("/draft_model")])
def test_a_draft_model_has_the_vocabulary_of_its_target(name):
    target = target_of(name.partition("/")[0])
    folder = recipe_path(name).parent
    small = on_meta(folder / "init.json").get_output_embeddings().weight.shape[0]
    assert recipe_of(name).init.count("/") == 1 and recipe_of(name).drafter == {}
    assert abs(small - target.vocab_size) <= 64  # rows that only pad one of them are allowed
    assert not (recipe_of(name).on_policy and recipe_of(name).target_url)


@pytest.mark.parametrize("name", [name for name in LARGE if name.endswith("/mtp")])
def test_a_native_module_is_in_the_checkpoint(name):
    config = target_of(name.partition("/")[0]).config
    modules = [
        getattr(config, key, None) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    ]
    assert recipe_of(name).init == "native" and 1 in modules
    with torch.device("meta"):
        layer = OwnLayer(
            spec_of(config, config.num_hidden_layers - 1)
        )  # the module's is one like the last
    size = sum(weight.numel() for weight in layer.parameters()) + 2 * config.hidden_size**2
    said = re.search(
        r"^# The module has ([\d.]+) billion weights", recipe_path(name).read_text(), re.MULTILINE
    )
    assert said is not None and float(said[1]) == pytest.approx(size / 1e9, rel=0.02)


ONLINE = [
    name
    for name in LARGE
    if name.endswith(("/eagle3", "/dflash")) and "# One GPU" in recipe_path(name).read_text()
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ONLINE)
def test_a_step_with_the_target_online_fits_one_gpu(name):
    config = recipe_of(name)
    shapes = config_of(recipe_path(name).parent / "target.json")
    rows = config.trainer["per_device_train_batch_size"]
    setting = StepSetting(rows=rows, length=config.max_length, checkpointing=True)
    step = dry_step(shapes, setting, "kl", new_drafter(config.kind, **config.drafter))
    # The optimizer's step may hold more than backward: then activations add nothing.
    held = step.target + step.drafter + step.gradients + 8 * step.trained
    assert 0 < step.target < held + step.working < 78e9
