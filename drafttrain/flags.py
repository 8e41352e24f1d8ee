"""The parser of all commands, flags' types, and the flags that several commands share: target,
drafter, device, sampling.

torch loads with the first function that needs it, so a command's --help stays quick.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from pydantic import AfterValidator, BeforeValidator
from pydantic import Field as Limits

from drafttrain.errors import UserError, did_you_mean, first_line, shown
from drafttrain.values import (
    AnyText,
    Dtype,
    Fraction,
    Name,
    Penalty,
    Place,
    PositiveFraction,
    Seed,
    Size,
    Temperature,
    adder,
    check,
    reader,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from drafttrain.files import Json
    from drafttrain.ops.sampling import SamplingParams
    from drafttrain.target import Target

TARGET_HELP = "short name, folder or Hub id"
DTYPE_HELP = "float32, bfloat16, float16 or auto (bfloat16 where the device has it)"
SCHEDULE_HELP = "a sweep's summary.json or an estimate's output: recipes of vLLM and SGLang then draft by batch size"
WEIGHTS_HELP = "of the weights: bfloat16 (default), float16, float32"
_KWARGS_RULE = "a JSON object, such as '{\"enable_thinking\": false}'"


def _device(word: str) -> str:
    if word not in ("auto", "cpu"):  # these two need no torch
        from drafttrain.target import resolve_device

        resolve_device(word)
    return word


DEVICE = reader(_device, "auto, cpu, or an accelerator that torch finds, such as cuda or cuda:1")


def _template_kwargs(word: str) -> Json:
    from drafttrain.files import parse_json

    try:
        found = parse_json(word)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"={shown(word)} must be {_KWARGS_RULE}")
    return found


TEMPLATE_KWARGS = reader(_template_kwargs, _KWARGS_RULE)


def _kwargs_of(given: object) -> object:
    if isinstance(given, str):
        return _template_kwargs(given)
    return given


Device = Annotated[str, AfterValidator(_device), Limits(description=DEVICE.rule)]  # type: ignore[attr-defined]
TemplateKwargs = Annotated[
    dict[str, Any], BeforeValidator(_kwargs_of), Limits(description=_KWARGS_RULE)
]
NO_KWARGS: Json = {}


class HelpFormatter(argparse.HelpFormatter):
    """Help as wide as the terminal, or as COLUMNS says: prose is filled, examples keep their lines.
    Flags show their default.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(self._filled(text.splitlines(), width))

    def _filled(self, lines: list[str], width: int) -> Iterator[str]:
        prose: list[str] = []
        for line in [*lines, ""]:
            entry = re.match(
                r" *\S+ {2,}(?=\S)", line
            )  # of a list: its text has a column of its own
            if entry or not line or line[0] == " ":
                yield from textwrap.wrap(" ".join(prose), width, break_on_hyphens=False)
                prose = []
                below = " " * (len(entry[0]) if entry else 0)
                yield (
                    textwrap.fill(line, max(width, 2 * len(below)), subsequent_indent=below)
                    if entry
                    else line
                )
            else:
                prose.append(line)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        value = action.default
        plain = (
            not action.option_strings or action.nargs == 0 or value in (None, "", argparse.SUPPRESS)
        )
        if (
            plain
            or not isinstance(value, int | float | str)
            or "default" in text
            or value == sys.executable
        ):
            return text
        return f"{text} (default: %(default)s)".lstrip()


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line of UserError: `--limit='-1' must be a whole number from 1
    to ...`.

    Attributes:
        rewrite: applied to a command's words before they are parsed.
    """

    rewrite: Callable[[list[str]], list[str]] = staticmethod(lambda words: words)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        args = self.rewrite(list(args or ()))
        for word in args:
            check("argument", word, AnyText)
            if word.startswith("--") and word.endswith(
                "=--"
            ):  # argparse would take the value for the end of the flags
                raise UserError(
                    f"{word[:-3]}='--' is no value; drop it, or write the one that is meant"
                )
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:  # reported here, where the command's flags are known
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.split())
        if found := re.fullmatch("argument ([^:]+?)(?:/--[^:]+)?: (.*)", message):
            flag, problem = found.groups()
            unknown = re.match(r"invalid choice: '?(.*?)'? \(choose from (.*)\)$", problem)
            problem = problem.removeprefix(flag.lstrip("-"))
            if problem.startswith("="):
                message = flag + problem
            elif unknown:
                word = unknown[1]
                known = re.findall(r"[\w.-]+", unknown[2])
                close = self._close(word, known)
                message = f"{flag}={shown(word)} is not one of {', '.join(known)}{close}"
                if flag == "COMMAND":
                    message = (
                        f"unknown command {shown(word)}{close or '; known: ' + ', '.join(known)}"
                    )
            elif problem.startswith("expected"):
                message = f"{flag} {problem}; a value that begins with - is written {flag}=VALUE"
            else:
                message = f"{flag}: {problem}"
        elif message.startswith("unrecognized arguments: "):
            word = message.partition(": ")[2].split()[0].partition("=")[0]
            close = self._close(
                word, [flag for flag in self._option_string_actions if flag.startswith("--")]
            )
            message = (
                f"{shown(word)} is no flag of this command{close or f'; see {self.prog} --help'}"
            )
        elif message.startswith("the following arguments are required: "):
            message = f"{message.partition(': ')[2]} must be given; see {self.prog} --help"
        raise UserError(message)

    @staticmethod
    def _close(word: str, known: Sequence[str]) -> str:
        hint = did_you_mean(word[:80], known, most=2)
        if hint:
            return f"; {hint}"
        return ""


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Adds a recipe's key=value words, which may also be written as flags: `--max-steps 4`, as
    other trainers take it.
    """
    replaces = "replace a value of the recipe; a.b=c sets b in a"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=replaces)
    if isinstance(parser, CommandParser):
        parser.rewrite = lambda words: _as_overrides(words, parser._option_string_actions)


def _as_overrides(words: list[str], flags: dict[str, argparse.Action]) -> list[str]:
    """Words with the command's own flags first and `--max-steps 4`, as other trainers take it, as
    `max_steps=4`.

    Args:
        flags: by their spelling. A key without a value is true: `--packing`.
    """
    own = []
    rest = list[str]()
    left = words[::-1]
    while left:
        word = left.pop()
        name, equals, text = word.partition("=")
        if name in flags:
            own.append(word)
            if flags[name].nargs != 0 and not equals and left:
                own.append(left.pop())
        elif word.startswith("--") and len(word) > 2:
            if not equals:
                is_value = left and not re.match(r"-+[A-Za-z]|[\w.]+=", left[-1])
                text = "true"
                if is_value:
                    text = left.pop()
            rest.append(f"{name[2:].replace('-', '_')}={text}")
        else:
            rest.append(word)
    return own + rest


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
    add = adder(parser)
    add(
        "--target",
        Place if required else Name,
        required=required,
        default=None if required else default,
        help=help,
    )
    add("--dtype", Dtype, default="auto", help=prefix + DTYPE_HELP)
    add("--device", DEVICE, default="auto", help=prefix + "cpu, cuda, cuda:N or auto")
    add(
        "--trust-remote-code",
        action="store_true",
        help="run model code that comes with the target",
    )


def add_template_flag(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Adds --chat-template-kwargs. more: ends its help."""
    described = (
        "variables of the target's chat template, as JSON: '{\"enable_thinking\": false}'" + more
    )
    adder(parser)(
        "--chat-template-kwargs",
        TEMPLATE_KWARGS,
        default={},
        metavar="JSON",
        help=described,
    )


def load_target(args: argparse.Namespace, name: str = "", device_map: str = "") -> Target:
    """The target that the flags of `add_target_flags` describe. name: used in place of --target."""
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


def add_drafter_flag(
    parser: Any,
    trained: bool = False,
    more: str = "",
    required: bool = True,
) -> None:
    """Adds --drafter to a parser or group. trained: name folders and Hub ids only. more: ends the
    help text.
    """
    from drafttrain.drafters.kinds import names_help

    described = "a trained drafter's folder or Hub id"
    if not trained:
        described = names_help()
    adder(parser)(
        "--drafter",
        Place,
        help=described + more,
        **({"required": True} if required else {}),
    )


def add_sampling_flags(
    parser: argparse.ArgumentParser,
    temperature: float = 0.0,
    seed: bool = True,
    penalties: bool = False,
) -> None:
    """Adds --temperature, --top-p and --top-k, which `sampling_of` reads.

    Args:
        temperature: its default. seed: add --seed too. penalties: add --min-p and
            --repetition-penalty too.
    """
    add = adder(parser)
    add(
        "--temperature",
        Temperature,
        default=temperature,
        help="0 decodes greedily (default: %(default)s)",
    )
    add("--top-p", PositiveFraction, default=1.0, help="1 keeps all tokens (default: %(default)s)")
    add("--top-k", Size, default=0, help="0 keeps all tokens (default: %(default)s)")
    if penalties:
        add("--min-p", Fraction, default=0.0, help="0 keeps all tokens (default: %(default)s)")
        more = "also of greedy decoding; 1 turns it off (default: as the target's generation_config says)"
        add("--repetition-penalty", Penalty, help=more)
    if seed:
        add("--seed", Seed, default=0, help="of the sampling (default: %(default)s)")


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that the flags of `add_sampling_flags` describe. Raises UserError: a
    value out of range.
    """
    from drafttrain.ops.sampling import SamplingParams

    more = {
        name: vars(args)[name] for name in ("min_p", "repetition_penalty") if name in vars(args)
    }
    return SamplingParams(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, **more)
