"""Folders of adapters that `train` writes beside a continued drafter, see `drafter.lora`."""

from __future__ import annotations

from pathlib import Path

from drafttrain.drafters.common import lora
from drafttrain.drafters.common.trainable import DecoderDrafter
from drafttrain.drafters.registry import load_trained
from drafttrain.errors import UserError
from drafttrain.target import Target


def is_adapter(folder: Path) -> bool:
    return (folder / lora.CONFIG).is_file()


def adapted(folder: Path, target: Target) -> DecoderDrafter:
    """The drafter of an adapter's folder, with the adapter merged.

    Raises:
        UserError: its drafter is not there, has no decoder layers, is for another target, or has
            other layers.
    """
    base, options = lora.read_options(folder)
    drafter = load_trained(base, "adapter")
    if not isinstance(drafter, DecoderDrafter):
        raise UserError(
            f"checkpoint={str(folder)!r} adapts {base!r}, a {drafter.kind}; load that with peft, as its file says"
        )
    drafter.bind(target)
    drafter.add_adapters(options, base)
    lora.load_adapter(drafter, folder)
    drafter.merge_adapters()
    return drafter
