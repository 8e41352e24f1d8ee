"""What a plan reads: the target's and drafter's shapes, without weights, and the DeepSpeed stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafttrain.config import TrainConfig, parse_overrides, read_yaml
from drafttrain.drafters.base import NEW
from drafttrain.drafters.common.configs import last_layer_config
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.registry import kind_class
from drafttrain.environment import shipped_folder
from drafttrain.errors import UserError
from drafttrain.files import Json, read_json, read_text
from drafttrain.target import Target
from drafttrain.target.loading import loading
from drafttrain.tuning.estimate import Sizes, target_config

# Bits per weight with its scales, by quantization_config's quant_method; others name their bits.
_QUANTIZED = {"mxfp4": 4.25, "fp8": 8.0, "fbgemm_fp8": 8.0}
_EMPTY_KEYS = ("auto_map",)  # they name code, which a plan does not run

Build = Callable[[Target], TrainableDrafter]


def read_config(
    name: str,
    given: str | None,
    shipped: Path,
    key: str = "target",
) -> PretrainedConfig:
    """A model's config by name, from `given`, from a file shipped next to the recipe, from its
    folder, the cache or the Hub.

    Raises UserError: none of them, or a model that this transformers has no class for.
    """
    flag = f"--{key}-config FILE"
    place = given or (str(shipped) if shipped.is_file() else name)
    raw = target_config(place, key, f"give its config.json: {flag}")
    raw = {name: value for name, value in raw.items() if name not in _EMPTY_KEYS}
    kind = str(raw.get("model_type", ""))
    if (
        kind not in CONFIG_MAPPING
    ):  # a name of the repository's own, for a class that transformers has
        own = next(iter(raw.get("architectures") or ()), "")
        kinds = [each for each, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == own]
        family = own.removesuffix("ForCausalLM").lower()  # some classes serve several families
        kind = next(
            (each for each in kinds if each.replace("_", "") == family), next(iter(kinds), "")
        )
        if not kind:
            raise UserError(
                f"{key}={name!r}: this transformers has no class for model_type={raw.get('model_type')!r}; write the values of "
                f"a family that it has, of the same shapes, into a file, and give that: {flag}"
            )
    with loading(f"{key}={name!r}: config.json", f"give its config.json: {flag}"):
        return CONFIG_MAPPING[kind].from_dict({**raw, "model_type": kind})


def shipped_config(recipe: str, overrides: Sequence[str], key: str, file: str) -> Path:
    """The config that belongs to the recipe's own value of a key; no such path if an override sets
    another one.
    """
    if key in parse_overrides(list(overrides)):
        return Path("")
    return Path(recipe).parent / file


def model_sizes(model: nn.Module, config: PretrainedConfig) -> Sizes:
    """Sizes by a model's weights on the meta device: experts are known by their names."""
    text: Any = last_layer_config(config.get_text_config())
    counts = {name: weight.numel() for name, weight in model.named_parameters()}
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next((n for name in names if (n := getattr(text, name, None))), 0)
    routed = 0
    if experts:
        routed = sum(n for name, n in counts.items() if ".experts." in name)
    # The head is read in full; the embedding, if it is another tensor, is a lookup.
    ends: Any = model
    embedding = ends.get_input_embeddings().weight
    head = ends.get_output_embeddings().weight
    always = sum(counts.values()) - routed - (0 if embedding is head else embedding.numel())
    layers = text.num_hidden_layers
    heads = text.num_attention_heads
    full = getattr(text, "layer_types", None) or ["full_attention"] * layers
    attending = sum("attention" in kind and "linear" not in kind for kind in full)
    e = getattr(text, "head_dim", None) or text.hidden_size // heads
    if rank := getattr(text, "kv_lora_rank", None):
        kv = rank + text.qk_rope_head_dim
    else:
        kv = 2 * (getattr(text, "num_key_value_heads", None) or heads) * e
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 1
    sizes = Sizes(always, kv=kv * attending, columns=attending * heads * e)
    if routed:
        return replace(sizes, experts=experts, chosen=chosen, expert=routed / experts)
    return sizes


def stored_bits(config: PretrainedConfig) -> float:
    """Bits per weight in the target's files."""
    held: Any = getattr(config, "quantization_config", None) or {}
    if not isinstance(held, dict):
        held = held.to_dict()
    return float(_QUANTIZED.get(held.get("quant_method", ""), held.get("bits", 16)))


def drafter_of(
    config: TrainConfig,
    recipe: str,
    overrides: Sequence[str],
    given: str | None,
) -> tuple[Build, str]:
    """What builds a recipe's drafter, and a note if its shapes are assumed."""
    options = dict(config.drafter)
    init = config.init
    note = ""
    kind: Any = kind_class(config.kind)
    if kind.loads_language_models and init not in NEW:
        lm = read_config(
            init,
            given,
            shipped_config(recipe, overrides, "init", "init.json"),
            "init",
        )

        def build(target: Target) -> TrainableDrafter:
            model = AutoModelForCausalLM.from_config(lm, dtype=torch.float32)
            return kind(
                model,
                None,
                kind.config_class(**kind.check_options(options), target=target.identity()),
                init,
            )

        return build, note
    if kind.loads_language_models:
        return lambda target: kind.begin(target, init, options, config.loss), note
    if init not in NEW:
        note = f"init={init!r} is counted as a new drafter of kind={config.kind} with the recipe's options"
    size = int(options.pop("draft_vocab_size", 0))

    def new(target: Target) -> TrainableDrafter:
        shapes = kind.check_options(
            {**options, "draft_vocab_size": size or target.vocab_size, "loss": config.loss}
        )
        if init == "native":
            own = kind.native_options(target)
        else:
            own = {}
        return kind(kind.config_class.for_target(target, **{**shapes, **own}))

    return new, note


def deepspeed_of(given: str, trainer: Json, gpus: int) -> tuple[Json, int]:
    """A DeepSpeed configuration, empty for none, and the number of processes, 0 if nothing says it.

    Args:
        given: a ZeRO stage, which stands for its file in configs/deepspeed, a DeepSpeed JSON or an
            accelerate YAML; empty: the recipe's `deepspeed`, else ZeRO-2 on several GPUs, as
            configs/accelerate/gpu-8.yaml has it.

    Raises UserError: a file that cannot be read.
    """
    fix = "give a stage from 0 to 3, a DeepSpeed JSON or an accelerate YAML"
    found: object = given or trainer.get("deepspeed") or ("2" if gpus > 1 else "0")
    processes = 0
    if isinstance(found, str) and found.endswith((".yaml", ".yml")):
        launch: Json = (
            read_yaml(read_text(Path(found), "deepspeed", fix), f"deepspeed={found!r}") or {}
        )
        processes = int(launch.get("num_processes") or 0)
        inner = launch.get("deepspeed_config") or {}
        file = inner.get("deepspeed_config_file")
        found = "0"
        if inner:
            found = {"zero_optimization": {"stage": inner.get("zero_stage", 2)}}
        if (
            file
        ):  # relative to where the launch starts, which is seldom elsewhere than above configs/
            near = [Path(file), *(folder / file for folder in Path(str(given)).resolve().parents)]
            found = str(next((path for path in near if path.is_file()), file))
    if isinstance(found, dict):
        return found, processes
    with contextlib.suppress(ValueError):
        stage = int(str(found))
        if not 0 <= stage <= 3:
            raise UserError(f"deepspeed={found!r}: {fix}")
        if not stage:
            return {}, processes
        found = shipped_folder("configs") / f"deepspeed/zero{stage}.json"
    return read_json(Path(str(found)), "deepspeed", fix), processes
