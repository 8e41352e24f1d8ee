"""A trained drafter's folder as export, verify and push see it: which kind, made for which target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from drafttrain.drafters.base import drafter_folder, kind_class
from drafttrain.drafters.eagle3 import Eagle3
from drafttrain.errors import UserError
from drafttrain.hub.weights import read_config
from drafttrain.target import DTYPES, Target, resolve_target

EAGLE3, DRAFT_MODEL = "eagle3", "draft_model"
# Beside a draft model, whose config.json is its own architecture's: kind, target and what it began as.
META_FILE = "drafttrain.json"


@dataclass(frozen=True)
class Trained:
    """A drafter on disk.

    Attributes:
        folder: where it is. kind: EAGLE3 or DRAFT_MODEL. config: its config.json.
        target: the identity of its target as recorded; empty if nothing is.
    """

    folder: Path
    kind: str
    config: dict[str, Any]
    target: dict[str, Any]

    @property
    def target_name(self) -> str:
        return self.target.get("name", "")

    def eagle3(self) -> Eagle3:
        """The head, on the CPU.

        Raises:
            UserError: its weights do not fit its config.
        """
        try:
            return kind_class(EAGLE3).load(self.folder)
        except (OSError, ValueError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(
                f"drafter={str(self.folder)!r} cannot be loaded ({first}); train or import it anew"
            ) from error


def find_drafter(name: str) -> Trained:
    """Looks at a drafter by folder or Hub id.

    Raises:
        UserError: nothing there, or a kind that no engine loads.
    """
    folder = drafter_folder(name)
    config = read_config(folder)
    meta = read_config(folder, META_FILE) if (folder / META_FILE).is_file() else config
    kind = meta.get("drafter_kind")
    if kind is None and any(str(each).endswith("ForCausalLM") for each in config.get("architectures") or []):
        kind = DRAFT_MODEL
    if kind not in (EAGLE3, DRAFT_MODEL):
        raise UserError(
            f"drafter={name!r} is of kind {kind!r}; exported are eagle3 heads and draft models (a published EAGLE-3 head of "
            "others comes in by: drafttrain import)"
        )
    return Trained(folder, kind, config, meta.get("target") or {})


def load_shell(name: str, trust_remote_code: bool = False) -> Target:
    """A target without weights: shape, tokenizer and identity.

    Raises:
        UserError: no config or tokenizer there.
    """
    where = resolve_target(name)
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"target={name!r}: config and tokenizer cannot be loaded ({first}); give a folder or Hub id"
        ) from error
    return Target.wrap(model, tokenizer, name, where)


def parse_dtype(name: str) -> torch.dtype:
    """Raises UserError for an unknown dtype."""
    if name not in DTYPES:
        raise UserError(f"dtype={name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]
