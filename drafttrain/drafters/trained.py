"""A trained drafter's folder as export, verify and push see it: which kind, made for which target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from drafttrain.drafters.registry import META_FILE, drafter_folder, kind_class, kind_of, kinds, load_trained
from drafttrain.errors import UserError
from drafttrain.formats.weights import read_config
from drafttrain.target import DTYPES, Target, resolve_target


@dataclass(frozen=True)
class Trained:
    """A drafter on disk.

    Attributes:
        folder: where it is. kind: its kind's name. config: its config.json.
        target: the identity of its target as recorded; empty if nothing is.
    """

    folder: Path
    kind: str
    config: dict[str, Any]
    target: dict[str, Any]

    @property
    def target_name(self) -> str:
        return self.target.get("name", "")

    def load(self) -> Any:
        """The drafter, on the CPU and not bound to a target.

        Raises:
            UserError: its weights do not fit its config.
        """
        try:
            return load_trained(str(self.folder))
        except (OSError, ValueError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(
                f"drafter={str(self.folder)!r} cannot be loaded ({first}); train or import it anew"
            ) from error


def find_drafter(name: str) -> Trained:
    """Looks at a drafter by folder or Hub id.

    Raises:
        UserError: nothing there, not a drafter of ours, or a kind without weights.
    """
    kind = kind_of(name)
    if kind not in kinds() or not kind_class(kind).trainable:
        raise UserError(f"drafter={name!r} has no weights to ship; give a trained drafter's folder or Hub id")
    folder = drafter_folder(name)
    config = read_config(folder)
    meta = read_config(folder, META_FILE) if (folder / META_FILE).is_file() else config
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


def architectures_of(target: str) -> list[str]:
    """A target's class names, as far as its config is at hand."""
    try:
        return list(AutoConfig.from_pretrained(resolve_target(target)).architectures or []) if target else []
    except (UserError, OSError, ValueError):
        return []


def parse_dtype(name: str) -> torch.dtype:
    """Raises UserError for an unknown dtype."""
    if name not in DTYPES:
        raise UserError(f"dtype={name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]
