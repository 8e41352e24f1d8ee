"""Command-line flags that several commands share: target, drafter, numeric format, device, sampling.

torch loads with the first function that needs it, so a command's --help stays quick.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from drafttrain.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from drafttrain.ops.sampling import SamplingParams
    from drafttrain.target import Target

TARGET_HELP = "short name, folder or Hub id"
DTYPE_HELP = "float32, bfloat16, float16 or auto (bfloat16 where the device has it)"
WEIGHTS_HELP = "of the weights: bfloat16 (default), float16, float32"


def add_target_flags(
    parser: argparse.ArgumentParser,
    help: str = TARGET_HELP,
    required: bool = True,
    default: str | None = "",
    prefix: str = "",
) -> None:
    """Adds --target, --dtype, --device and --trust-remote-code, which `load_target` reads.

    Args:
        help, required, default: of --target. prefix: begins the help of --dtype and --device.
    """
    add = parser.add_argument
    add("--target", required=required, default=None if required else default, help=help)
    add("--dtype", default="auto", help=prefix + DTYPE_HELP)
    add("--device", default="auto", help=prefix + "cpu, cuda, cuda:N or auto")
    add("--trust-remote-code", action="store_true", help="run model code that comes with the target")


def load_target(args: argparse.Namespace, name: str = "", device_map: str = "") -> Target:
    """The target that the flags of `add_target_flags` describe. name: used in place of --target."""
    from drafttrain.target import Target

    return Target.load(name or args.target, args.dtype, args.device, args.trust_remote_code, device_map)


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """A target's tokenizer, for commands that need no weights. Raises UserError: none loads by that name."""
    from transformers import AutoTokenizer

    from drafttrain.target import resolve_target

    try:
        return AutoTokenizer.from_pretrained(resolve_target(name), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise UserError(f"target={name!r} has no tokenizer that loads ({reason}); give a folder or Hub id") from error


def add_drafter_flag(parser: argparse.ArgumentParser, trained: bool = False, more: str = "") -> None:
    """Adds --drafter. trained: name folders and Hub ids only. more: ends the help text."""
    from drafttrain.drafters.registry import names_help

    described = "a trained drafter's folder or Hub id" if trained else names_help()
    parser.add_argument("--drafter", required=True, help=described + more)


def add_sampling_flags(
    parser: argparse.ArgumentParser, temperature: float = 0.0, seed: bool = True, penalties: bool = False
) -> None:
    """Adds --temperature, --top-p and --top-k, which `sampling_of` reads.

    Args:
        temperature: its default. seed: add --seed too. penalties: add --min-p and --repetition-penalty too.
    """
    add = parser.add_argument
    add("--temperature", type=float, default=temperature, help="0 decodes greedily (default: %(default)s)")
    add("--top-p", type=float, default=1.0, help="1 keeps all tokens (default: %(default)s)")
    add("--top-k", type=int, default=0, help="0 keeps all tokens (default: %(default)s)")
    if penalties:
        add("--min-p", type=float, default=0.0, help="0 keeps all tokens (default: %(default)s)")
        more = "also of greedy decoding; 1 turns it off (default: as the target's generation_config says)"
        add("--repetition-penalty", type=float, help=more)
    if seed:
        add("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that the flags of `add_sampling_flags` describe. Raises UserError: a value out of range."""
    from drafttrain.ops.sampling import SamplingParams

    more = {name: vars(args)[name] for name in ("min_p", "repetition_penalty") if name in vars(args)}
    return SamplingParams(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, **more)


def number_list(name: str, text: str, kind: type[int] | type[float], least: float) -> list[float]:
    """Reads a flag's numbers, separated by commas. Raises UserError for anything else, or a number below `least`."""
    try:
        numbers = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UserError(f"{name}={text!r} is no list of numbers; write for example 1,2,4") from error
    if any(number < least for number in numbers):
        raise UserError(f"{name}={text!r}: every value must be at least {least}")
    return numbers
