"""Flags that several commands share: their kinds, and the target and sampling that they describe.

torch loads with the first function that needs it, so a command's --help stays quick.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator
from pydantic import Field as Limits

from drafttrain.errors import UserError, first_line, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from drafttrain.files import Json
    from drafttrain.ops.sampling import SamplingParams
    from drafttrain.target import Target

_DEVICE_RULE = "auto, cpu, or an accelerator that torch finds, such as cuda or cuda:1"
_KWARGS_RULE = "a JSON object, such as '{\"enable_thinking\": false}'"


def _device(word: str) -> str:
    if word not in ("auto", "cpu"):  # these two need no torch
        from drafttrain.target import resolve_device

        resolve_device(word)
    return word


def _template_kwargs(given: object) -> object:
    """The JSON object that text holds; other values stay."""
    from drafttrain.files import parse_json

    if not isinstance(given, str):
        return given
    try:
        found = parse_json(given)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"={shown(given)} must be {_KWARGS_RULE}")
    return found


Device = Annotated[str, AfterValidator(_device), Limits(description=_DEVICE_RULE)]
TemplateKwargs = Annotated[
    dict[str, Any], BeforeValidator(_template_kwargs), Limits(description=_KWARGS_RULE)
]
NO_KWARGS: Json = {}


def load_target(args: argparse.Namespace, name: str = "", device_map: str = "") -> Target:
    """The target that --target, --dtype, --device and --trust-remote-code describe.

    Args:
        name: used in place of --target.
    """
    from drafttrain.target import Target

    return Target.load(
        name or args.target,
        args.dtype,
        args.device,
        args.trust_remote_code,
        device_map,
    )


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """A target's tokenizer, for commands that need no weights. Raises UserError: none loads by that
    name.
    """
    from transformers import AutoTokenizer

    from drafttrain.target import resolve_target

    try:
        return AutoTokenizer.from_pretrained(
            resolve_target(name),
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise UserError(
            f"target={name!r} has no tokenizer that loads ({reason}); give a folder or Hub id"
        ) from error


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that --temperature, --top-k and --top-p describe, and --min-p and
    --repetition-penalty where a command has them. Raises UserError: a value out of range.
    """
    from drafttrain.ops.sampling import SamplingParams

    more = {
        name: vars(args)[name] for name in ("min_p", "repetition_penalty") if name in vars(args)
    }
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        **more,
    )
