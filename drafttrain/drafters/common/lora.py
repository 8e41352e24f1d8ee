"""Adapters (LoRA, arXiv 2106.09685, by peft) of draft models and of heads.

Only the adapters are trained. Saved weights are the plain model's, with the adapters merged; the
adapters are in a folder of their own beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafttrain.errors import UserError, text_of
from drafttrain.extras import LazyPackage
from drafttrain.files import Json, read_json
from drafttrain.formats.weights import Shapes, check_names
from drafttrain.target.loading import check_finite, loading
from drafttrain.values import AnyText, Count, Depth, Fraction, PositiveAmount, check

if TYPE_CHECKING:
    import peft
else:
    peft = LazyPackage("peft")

_LORA = {
    "r": 8,
    "alpha": 16,
    "targets": "all-linear",
    "dropout": 0.0,
}
_LORA_KINDS = {
    "r": Depth,
    "alpha": Count | PositiveAmount,
    "targets": AnyText | list[AnyText],
    "dropout": Fraction,
}
# peft's names of these options.
_PEFT_NAMES = {
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "dropout": "lora_dropout",
}
# Keys of peft that change what an adapter adds.
_OTHER_FORMS = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
FOLDER = "adapter"  # beside the weights
_NAME = "default"  # of the adapter in peft
CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
# Prefix of module names in peft's files, which describe a wrapped model.
_PREFIX = "base_model.model."


def check_state(state: dict[str, Tensor], expected: Shapes, folder: Path) -> None:
    """Checks a checkpoint of the same training.

    Raises:
        UserError: it is another model's, or not finite.
    """
    fix = "choose another output_dir, or resume=false"
    try:
        check_names(state, expected, str(folder))
    except UserError as error:
        raise UserError(f"{error}: weights of another model; {fix}") from error
    check_finite(state.items(), str(folder), fix)


def add_lora(lm: nn.Module, options: Json, linear: Sequence[str] = (), base: str = "") -> None:
    """Adds adapters to a language model or a head, in place, and freezes all other weights.

    Args:
        options: {r: rank, alpha: the adapters' weight times r, targets: names of linear layers or
            all-linear, dropout}.
        linear: the modules that may have adapters; none given: all linear ones but the head.
        base: where the model's weights come from, which the adapters' file names.

    Raises:
        UserError: an unknown option, or targets that the model does not have.
    """
    for key in options:
        if key not in _LORA:
            raise UserError(f"unknown key drafter.lora.{key}; there are {', '.join(_LORA)}")
    chosen: Json = {}
    for key, default in _LORA.items():
        value = options.get(key, default)
        name = _PEFT_NAMES.get(key, key)
        chosen[name] = check(f"drafter.lora.{key}", value, _LORA_KINDS[key])
    wanted = chosen["target_modules"]
    if linear:
        names = [wanted] if isinstance(wanted, str) else wanted
        if names == ["all-linear"]:
            names = list(linear)
        # A name means every module whose path ends with it, as peft reads it.
        found = [path for path in linear if any(f".{path}".endswith(f".{name}") for name in names)]
        if not found:
            ends = sorted({path.rpartition(".")[2] for path in linear})
            raise UserError(
                f"drafter.lora.targets={wanted!r} names no linear layer of the drafter; there are {', '.join(ends)}"
            )
        chosen["target_modules"] = found
        chosen["base_model_name_or_path"] = base
    else:
        chosen["task_type"] = "CAUSAL_LM"
    try:
        peft.inject_adapter_in_model(peft.LoraConfig(**chosen), lm, _NAME)
    except ValueError as error:
        raise UserError(f"drafter.lora={options}: {text_of(error)}") from error


def merged(lm: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the plain model, with W + alpha / r * B A in place of W, A and B.

    Computed from the state alone: the model's own weights may be sharded, and merging in place and
    back would not restore them bit for bit.
    """
    plain = {}
    for name, value in state.items():
        if ".lora_" not in name:
            plain[name.replace(".base_layer.", ".")] = value
    for name, module in lm.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            up = state[f"{name}.lora_B.{_NAME}.weight"]  # [out, r]
            down = state[f"{name}.lora_A.{_NAME}.weight"]  # [r, in]
            delta = (up @ down) * module.scaling[_NAME]
            if getattr(module, "fan_in_fan_out", False):
                delta = delta.T
            weight = plain[f"{name}.weight"]
            plain[f"{name}.weight"] = weight + delta.to(weight.dtype)
    return plain


def unload(model: nn.Module) -> None:
    """Merges adapters into the layers in place, and removes them."""
    state = merged(model, model.state_dict())
    for name, module in list(model.named_modules()):
        if isinstance(module, peft.tuners.lora.LoraLayer):
            plain = module.get_base_layer()
            plain.weight.data = state[f"{name}.weight"]
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, plain)


def save_adapter(lm: Any, state: dict[str, Tensor], folder: Path) -> None:
    """Writes the adapter as peft does, for `PeftModel.from_pretrained(base, folder)`."""
    lm.peft_config[_NAME].save_pretrained(str(folder))
    own = peft.get_peft_model_state_dict(
        lm,
        state_dict=state,
        adapter_name=_NAME,
        save_embedding_layers=False,
    )
    tensors = {_PREFIX + name: value.contiguous() for name, value in own.items()}
    save_file(tensors, folder / _WEIGHTS)


def read_options(folder: Path) -> tuple[str, Json]:
    """Name of the drafter that an adapter's folder belongs to, and the options of `add_lora`.

    Raises:
        UserError: the file is missing, damaged, of another form of adapters, or names no drafter.
    """
    found = read_json(folder / CONFIG, "adapter", "use the folder as training wrote it")
    base = found.get("base_model_name_or_path")
    if not base:
        raise UserError(
            f"{folder / CONFIG} names no base_model_name_or_path: the drafter whose layers it adapts; add its folder or Hub id"
        )
    others = [key for key in _OTHER_FORMS if found.get(key)]
    kind = found.get("peft_type")
    if kind != "LORA":
        others.append(f"peft_type={kind!r}")
    if others:
        raise UserError(
            f"{folder / CONFIG} has {', '.join(others)}, which is not computed here; merge the adapter by peft, and give the "
            "merged drafter"
        )
    options = {ours: found.get(_PEFT_NAMES.get(ours, ours)) for ours in _LORA}
    return base, options


def load_adapter(lm: nn.Module, folder: Path) -> None:
    """Loads the weights that `save_adapter` wrote; raises UserError if they do not fit."""
    with loading(f"{folder}/{_WEIGHTS}", "choose another output_dir, or resume=false"):
        state = load_file(folder / _WEIGHTS)
    own = {name.removeprefix(_PREFIX): value for name, value in state.items()}
    expected = peft.get_peft_model_state_dict(
        lm,
        adapter_name=_NAME,
        save_embedding_layers=False,
    )
    shapes = {name: tuple(value.shape) for name, value in expected.items()}
    check_state(own, shapes, folder)
    peft.set_peft_model_state_dict(lm, own, adapter_name=_NAME)
