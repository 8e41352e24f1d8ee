"""A target known by its config and tokenizer alone: enough to check, import and export drafters without its weights."""

from __future__ import annotations

import contextlib

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from drafttrain.errors import UserError, first_line
from drafttrain.target.target import Target, resolve_target


def load_shell(name: str, trust_remote_code: bool = False) -> Target:
    """A target on the meta device: shapes, tokenizer and identity, no weights.

    Raises:
        UserError: no config or tokenizer can be loaded by that name.
    """
    path = resolve_target(name)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(
            f"target={name!r}: config and tokenizer cannot be loaded ({first_line(error)}); give a folder or Hub id"
        ) from error
    with contextlib.suppress(OSError):  # many targets have none; config and tokenizer name the end of sequence too
        model.generation_config = GenerationConfig.from_pretrained(path)
    return Target.wrap(model, tokenizer, name, path)


def architectures_of(target: str) -> list[str]:
    """The class names in a target's config; empty if there is no target or its config cannot be loaded."""
    try:
        return list(AutoConfig.from_pretrained(resolve_target(target)).architectures or []) if target else []
    except (UserError, OSError, ValueError):
        return []
