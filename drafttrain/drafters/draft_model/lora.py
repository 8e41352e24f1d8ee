"""Low-rank adapters in a draft model (LoRA, arXiv 2106.09685, by peft), merged into the saved weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafttrain.errors import UserError
from drafttrain.files import Json

_OPTIONS = {"r": 8, "alpha": 16, "targets": "all-linear", "dropout": 0.0}
_NAME = "default"
_WEIGHTS = "adapter_model.safetensors"
# Prefix of module names in peft's files, which describe a wrapped model.
_PREFIX = "base_model.model."


def add_lora(lm: nn.Module, options: Json) -> None:
    """Adds adapters to a language model, in place, and freezes all other weights.

    Args:
        options: {r: rank, alpha: the adapters' weight times r, targets: names of linear layers or all-linear, dropout}.

    Raises:
        UserError: an unknown option, or targets that the model does not have.
    """
    for key in options:
        if key not in _OPTIONS:
            raise UserError(f"unknown key drafter.lora.{key}; there are {', '.join(_OPTIONS)}")
    chosen = {**_OPTIONS, **options}
    try:
        config = LoraConfig(
            r=chosen["r"],
            lora_alpha=chosen["alpha"],
            target_modules=chosen["targets"],
            lora_dropout=chosen["dropout"],
            task_type="CAUSAL_LM",
        )
        inject_adapter_in_model(config, lm, _NAME)
    except ValueError as error:
        raise UserError(f"drafter.lora={options}: {' '.join(str(error).split())}") from error


def merged(lm: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the plain model, with W + alpha / r * B A in place of W, A and B.

    Computed from the state alone: the model's own weights may be sharded, and merging in place and back would not restore
    them bit for bit.
    """
    plain = {name.replace(".base_layer.", "."): value for name, value in state.items() if ".lora_" not in name}
    for name, module in lm.named_modules():
        if isinstance(module, LoraLayer):
            up, down = (state[f"{name}.lora_{part}.{_NAME}.weight"] for part in "BA")
            delta = (up @ down) * module.scaling[_NAME]
            delta = delta.T if getattr(module, "fan_in_fan_out", False) else delta
            plain[f"{name}.weight"] = plain[f"{name}.weight"] + delta.to(plain[f"{name}.weight"].dtype)
    return plain


def save_adapter(lm: Any, state: dict[str, Tensor], folder: Path) -> None:
    """Writes the adapter as peft does, so that `PeftModel.from_pretrained(base, folder)` reads it."""
    lm.peft_config[_NAME].save_pretrained(str(folder))
    own = get_peft_model_state_dict(lm, state_dict=state, adapter_name=_NAME, save_embedding_layers=False)
    save_file({_PREFIX + name: value.contiguous() for name, value in own.items()}, folder / _WEIGHTS)


def load_adapter(lm: nn.Module, folder: Path) -> None:
    """Loads the weights that `save_adapter` wrote."""
    state = load_file(folder / _WEIGHTS)
    own = {name.removeprefix(_PREFIX): value for name, value in state.items()}
    result: Any = set_peft_model_state_dict(lm, own, adapter_name=_NAME)
    missing = [name for name in result.missing_keys if ".lora_" in name]
    if result.unexpected_keys or missing:
        raise UserError(
            f"{folder}: the adapter does not fit this model ({[*result.unexpected_keys, *missing][0]}); resume with the "
            "same drafter.lora and drafter.layers"
        )
