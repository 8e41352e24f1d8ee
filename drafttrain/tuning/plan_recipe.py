"""What a plan reads: the target's and drafter's shapes, without weights, and the DeepSpeed stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from typing_extensions import TypedDict

from drafttrain.config import TrainConfig, parse_overrides, read_yaml
from drafttrain.drafters.base import NEW
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.registry import kind_class
from drafttrain.environment import shipped_folder
from drafttrain.errors import UserError
from drafttrain.files import Json, check_json, read_json, read_text, value_of
from drafttrain.target import Target
from drafttrain.target.loading import check_sizes, known_config, loading, text_part
from drafttrain.target.parts import Parts, build_language_model, image_class
from drafttrain.training import muon
from drafttrain.tuning.costs import target_config

# Bits per weight with its scales, by quantization_config's quant_method; others name their bits.
_QUANTIZED = {"mxfp4": 4.25, "fp8": 8.0, "fbgemm_fp8": 8.0}
_DEEPSPEED_FIX = "give a stage from 0 to 3, a DeepSpeed JSON or an accelerate YAML"

Build = Callable[[Target], TrainableDrafter]


def given_config(
    name: str,
    given: str | None,
    shipped: Path | None,
    key: str = "target",
) -> PretrainedConfig:
    """Reads the config of a recipe's model; see `read_config`.

    Args:
        name: a folder, or a model in the cache or on the Hub, for want of the other two.
        given: the user's file, which comes first. shipped: the file next to the recipe.
        key: of the recipe that names the model.
    """
    place = name
    if given:
        place = given
    elif shipped is not None and shipped.is_file():
        place = str(shipped)
    return read_config(name, place, key, f"give its config.json: --{key}-config FILE")


def read_config(name: str, place: str, key: str, fix: str) -> PretrainedConfig:
    """Reads the config of a model without its weights.

    Args:
        name: of the model. place: its config.json, its folder, or a model in the cache or on the Hub.
        key: the setting that names it. fix: what the user can do, ends the errors.

    Raises:
        UserError: there is no config, this transformers has no class for its model, or a size that
            no model has.
    """
    raw = target_config(place, key, fix)
    with loading(f"{key}={name!r}: config.json", fix):
        config = known_config(raw)
        if config is None:
            raise UserError(
                f"{key}={name!r}: this transformers has no class for model_type={raw.get('model_type')!r}; "
                f"write the values of a family that it has, of the same shapes, into a file, or {fix}"
            )
        check_sizes(config, place, f"{key}={name!r}", fix)
    return text_part(config)


def without_weights(config: PretrainedConfig, name: str, fix: str) -> PreTrainedModel:
    """A target on the meta device."""
    with loading(f"target={name!r}", fix), torch.device("meta"):
        return build_language_model(config)


def vision_weights(config: PretrainedConfig, name: str, fix: str) -> int:
    """How many weights a target's vision part has; 0 for one that reads no images."""
    whole = image_class(config)
    if whole is None:
        return 0
    with loading(f"target={name!r}: its vision part", fix), torch.device("meta"):
        model = whole._from_config(config)
    # The projectors too: all modules beside the way to the text part.
    towers = [model.get_submodule(name) for name in Parts(model).towers]
    return sum(weight.numel() for tower in towers for weight in tower.parameters())


def shipped_config(recipe: str, overrides: Sequence[str], key: str, file: str) -> Path | None:
    """The config next to the recipe, which describes its own value of a key; None if overridden."""
    if key in parse_overrides(list(overrides)):
        return None
    return Path(recipe).parent / file


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
    """What builds a recipe's drafter, and a note if its shapes are assumed.

    Args:
        given: the user's config.json of the model that `init` names.
    """
    kind: Any = kind_class(config.kind)
    options = dict(config.drafter)
    init = config.init

    if kind.loads_language_models and init in NEW:
        return lambda target: kind.begin(target, init, options, config.loss), ""

    if kind.loads_language_models:
        shipped = shipped_config(recipe, overrides, "init", "init.json")
        lm = given_config(init, given, shipped, "init")

        def draft_model(target: Target) -> TrainableDrafter:
            model = AutoModelForCausalLM.from_config(lm, dtype=torch.float32)
            shapes = kind.config_class(**kind.check_options(options), target=target.identity())
            made: TrainableDrafter = kind(model, None, shapes, init)
            return made

        return draft_model, ""

    note = ""
    if init not in NEW:
        note = f"init={init!r} is counted as a new drafter of kind={config.kind} with the recipe's options"
    vocabulary = int(options.pop("draft_vocab_size", 0))

    def new(target: Target) -> TrainableDrafter:
        size = min(vocabulary or target.vocab_size, target.vocab_size)
        shapes = kind.check_options({**options, "draft_vocab_size": size, "loss": config.loss})
        if init == "native":
            shapes = {**shapes, **kind.native_options(target)}
        made: TrainableDrafter = kind(kind.config_class.for_target(target, **shapes))
        return made

    return new, note


class LaunchSettings(NamedTuple):
    """How a training is launched."""

    deepspeed: Json  # DeepSpeed's configuration, empty without DeepSpeed
    processes: int  # 0 if nothing says it

    @property
    def zero(self) -> Json:
        """The configuration's `zero_optimization`."""
        return self.deepspeed.get("zero_optimization") or {}


class _DeepSpeedPart(TypedDict, total=False):
    deepspeed_config_file: str | None
    zero_stage: Annotated[int, Field(ge=0, le=3)]


class _Launch(TypedDict, total=False):
    """What is read of an accelerate file."""

    num_processes: Annotated[int, Field(ge=0)] | None
    deepspeed_config: _DeepSpeedPart | None


def deepspeed_of(given: str, trainer: Json, gpus: int) -> LaunchSettings:
    """The DeepSpeed configuration and the number of processes.

    Args:
        given: a ZeRO stage, which stands for its file in configs/deepspeed, a DeepSpeed JSON or an
            accelerate YAML; empty: the recipe's `deepspeed`, else ZeRO-2 on several GPUs, as
            configs/accelerate/gpu-8.yaml has it, but not for Muon.

    Raises:
        UserError: a file that cannot be read.
    """
    found: object = given or trainer.get("deepspeed")
    if not found:
        cuts = gpus > 1 and trainer.get("optim") != muon.NAME
        found = "2" if cuts else "0"
    processes = 0
    if isinstance(found, str) and found.endswith((".yaml", ".yml")):
        where = f"deepspeed={found!r}"
        launch: Json = read_yaml(read_text(Path(found), "deepspeed", _DEEPSPEED_FIX), where) or {}
        check_json(launch, where, _DEEPSPEED_FIX, _Launch)
        processes = value_of(launch, "num_processes", 0)
        found = _accelerates(launch.get("deepspeed_config") or {}, Path(found))
    if isinstance(found, dict):
        return LaunchSettings(found, processes)

    try:
        stage = int(str(found))
    except ValueError:
        path = Path(str(found))
    else:
        if not 0 <= stage <= 3:
            raise UserError(f"deepspeed={found!r}: {_DEEPSPEED_FIX}")
        if stage == 0:
            return LaunchSettings({}, processes)
        path = shipped_folder("configs") / f"deepspeed/zero{stage}.json"
    return LaunchSettings(read_json(path, "deepspeed", _DEEPSPEED_FIX), processes)


def _accelerates(inner: Json, launcher: Path) -> object:
    """DeepSpeed's part of an accelerate file: a configuration, its path, or "0" for none."""
    if not inner:
        return "0"
    file = inner.get("deepspeed_config_file")
    if not file:
        return {"zero_optimization": {"stage": inner.get("zero_stage", 2)}}
    # The path is relative to where the launch starts, usually the folder that contains configs/.
    for folder in (Path(), *launcher.resolve().parents):
        if (folder / file).is_file():
            return str(folder / file)
    return str(file)
