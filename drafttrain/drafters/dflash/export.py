"""DFlash drafters: see hub/dflash_format.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafttrain.drafters.dflash.format import compare_blocks, obstacles, write_dflash
from drafttrain.drafters.shipping import Format, Request, Shipping
from drafttrain.drafters.trained import Trained
from drafttrain.formats.weights import read_config
from drafttrain.target import Target


class DFlashShipping(Shipping):
    """vLLM alone; our own format lies beside it on the Hub."""

    formats = {"vllm": Format("DFlash as DFlashDraftModel", ("vLLM",))}

    def line(self, trained: Trained, parameters: str) -> str:
        config = trained.config
        return (
            f"a DFlash drafter (arXiv 2602.06036), blocks of {config.get('block_size', 0)}, "
            f"{config.get('num_hidden_layers', 0)} decoder layers, {parameters} parameters"
        )

    def refusals(self, trained: Trained, form: str) -> list[str]:
        return super().refusals(trained, form) or obstacles(trained.config, trained.target)

    def write(self, trained: Trained, form: str, request: Request) -> list[Path]:
        target = Target.load(request.target or trained.target_name, "float32", "cpu")
        drafter: Any = trained.load()
        drafter.bind(target)
        return write_dflash(drafter, target, request.output, request.dtype)

    def check(self, trained: Trained, exported: Path) -> dict[str, Any]:
        target = Target.load(trained.target_name, "float32", "cpu")
        return compare_blocks(trained.load(), target, exported, read_config(exported))

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, Any]]:
        # vLLM lays as many masks as tokens are asked for, and the drafter knows one number of them.
        depth = trained.config.get("block_size", 8) - 1
        return {"vLLM": {"method": "dflash", "num_speculative_tokens": depth}}


SHIPPING = DFlashShipping()
