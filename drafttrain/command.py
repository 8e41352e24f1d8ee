"""One signature per command: a function that Python calls, and the command line made from it.

A function in drafttrain/commands/ is decorated with `@command`. Its parameters are the command's
flags, their annotations the kinds and ranges of values (drafttrain/values.py), its docstring the
help. `checked` checks the arguments of either call; `read_words` reads a command line by cyclopts.
Parameters before `/` and `*args` are words of the command line, all others are flags, but for those
that are marked `InPython`. Where a parameter is a `Model` or `Drafting`, a call from Python may give
a loaded object.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import os
import re
import types
import typing
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ParamSpec,
    TypeVar,
    get_args,
    get_origin,
)

from drafttrain.errors import UserError, did_you_mean, shown, text_of
from drafttrain.values import (
    AnyText,
    Commas,
    Place,
    check,
    is_marked,
    refuse_options,
    table,
    words_of,
)

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError, Token
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from drafttrain.drafters.base import Drafter
    from drafttrain.files import Json
    from drafttrain.outcome import Outcome
    from drafttrain.target import Target

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any]
Kind = Any  # an annotation: a type, or a form of typing
Values = dict[str, Any]
Default = Any
KeyLine = tuple[str, str, object, str]  # of `values.table`
# Flags of every command, with their help.
SWITCHES = {
    "--quiet": "print errors only",
    "--json": "print the result as one JSON object on stdout, everything else on stderr",
}
_on_command_line: ContextVar[bool] = ContextVar("on_command_line", default=False)
_status: ContextVar[int] = ContextVar("status", default=0)  # of the command that ran last


class Several:
    """Marks a list flag that takes several words: `--results a.json b.json`."""


class AnyNumber:
    """Marks `*words` of which there may be none."""


class Alias:
    """Marks a parameter with another spelling of its flag, or with the flag that negates it."""

    def __init__(self, flag: str):
        self.flag = flag


class Word:
    """Marks a parameter that may be a word of the command line or a flag: `train RECIPE`, `train
    --recipe NAME`.
    """


class Keys:
    """Marks `**keys`, which the command line takes as words: `key=value`, or `--key value`.

    The function's parameters behind `*` are such keys too. The function checks them.

    Args:
        schemas: dataclasses that declare the keys that help lists.
    """

    def __init__(self, *schemas: type):
        self.schemas = schemas


class Int(str):
    """A whole number's word; unlike int, cyclopts does not read it."""


class Float(str):
    """A number's word; unlike float, cyclopts does not read it."""


class InPython:
    """Marks a parameter that the command line lacks."""


class Loaded:
    """Marks a name in whose place a call from Python may give a loaded object.

    Args:
        absent: the name that None stands for; None stands for the default without it.
    """

    def __init__(self, absent: str | None = None):
        self.absent = absent


if TYPE_CHECKING:
    Model = str | Path | PreTrainedModel | Target
    Drafting = str | Path | Drafter
    Tokenizer = PreTrainedTokenizerBase | None
else:  # their classes are torch's
    Model = Annotated[Place | Path, Loaded()]
    Drafting = Annotated[Place | Path, Loaded()]
    Tokenizer = Annotated[Any, InPython()]
Shown = Annotated[bool, InPython()]  # whether a call from Python prints what the command prints


# -- the call from Python --------------------------------------------------------------------------


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function a command: calls from Python are checked as a command line is.

    None stands for a parameter's default.
    """

    @functools.wraps(function)
    def call(*positional: P.args, **named: P.kwargs) -> R:
        from drafttrain.outcome import commanded

        name = function.__name__
        command_name = spelled(function.__module__.rpartition(".")[2])
        signature = inspect.signature(function)
        unknown = {key: named[key] for key in named if key not in signature.parameters}
        if schemas_of(function):
            unknown = {}  # they are keys
        refuse_options(name, unknown, signature.parameters)
        for key in unknown:  # None or False, as transformers' callers pass for options that are off
            del named[key]
        given = signature.bind(*positional, **named).arguments
        # None for a loaded model may stand for a name, which the mark gives.
        for key, kind in kinds_of(function).items():
            for mark in marks_of(kind):
                if isinstance(mark, Loaded) and given.get(key, "") is None:
                    given[key] = mark.absent
        try:
            # `{}` writes names as Python does, without dashes.
            values = checked(function, given, flag="{}")
            words = _words(function, given)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        with commanded([command_name, *words]):
            return run(function, values)

    return call


def run(function: Callable[..., R], values: Values) -> R:
    """Calls a command's function with values that `checked` returned."""
    positional: list[object] = []
    named: Values = {}
    # Past `@command`, which would check the values again.
    body = inspect.unwrap(function)
    for name, one in parameters(function).items():
        if one.kind is one.VAR_POSITIONAL:
            positional += values[name]
        elif one.kind is one.VAR_KEYWORD:
            named.update(values[name])
        elif one.kind is one.KEYWORD_ONLY:
            named[name] = values[name]
        else:
            positional.append(values[name])
    return body(*positional, **named)


def checked(
    function: Function,
    given: Values,
    flag: str = "--{}",
) -> Values:
    """The value of every parameter of a command's function, by name.

    Args:
        given: values, or the words of a command line; parameters that it lacks get their defaults.
        flag: how errors write a parameter's name.

    Raises:
        UserError: a missing value, or one that is not of its parameter's kind.
    """
    kinds = kinds_of(function)
    keys = schemas_of(function)
    found: Values = {}
    for name, one in parameters(function).items():
        value = given.get(name)
        if one.kind is one.VAR_KEYWORD:
            found[name] = value or {}
        # Keys of a recipe are checked by the function, with the recipe's other values.
        elif keys and one.kind is one.KEYWORD_ONLY:
            found[name] = given.get(name, one.default)
        elif one.kind is one.VAR_POSITIONAL:
            kind = kinds[name]
            found[name] = [check(name, _plain(word, kind), kind) for word in value or ()]
            if not value and not is_marked(kind, AnyNumber):
                raise UserError(f"{name} must be given")
        elif value is None and one.default is one.empty:
            raise UserError(f"{label_of(one, flag)} must be given")
        elif value is None or value == ():
            found[name] = default_of(one)
        elif is_loaded(value, kinds[name]):
            found[name] = value  # which `take_target` and `take_drafter` check
        else:
            kind = required(kinds[name])
            read = check(label_of(one, flag), _plain(value, kind), kind, words=True)
            found[name] = list(read) if isinstance(read, tuple) else read
    return found


def result_of(module: str, given: Values) -> Json:
    """Runs a command with its arguments by name, and returns the result that it concluded with.

    Args:
        module: below drafttrain, with a function `run`.
    """
    return {**outcome_of(module, Namespace(**given))["result"]}


def outcome_of(
    module: str,
    args: Namespace,
    *loaded: object,
    keeps: bool = True,
) -> Outcome:
    """Runs what a command does with its arguments, and returns what it concluded.

    Args:
        module: below drafttrain; its function `run` takes `args` and `loaded`.
        args: the parameters. `progress`: whether a call from Python prints what the command prints;
            without that parameter it does.
        keeps: whether a call from Python that names no output writes the command's default one.
    """
    from drafttrain.files import scratch_folder
    from drafttrain.outcome import concluded, ended

    mode = os.environ.pop("WANDB_MODE", None)  # transformers prints it when it is imported
    try:
        run = importlib.import_module(f"drafttrain.{module}").run
    finally:
        if mode is not None:
            os.environ["WANDB_MODE"] = mode
    progress = vars(args).pop("progress", True)
    # A command line prints and ends as commands do; a call from Python gets the result instead.
    if not called_from_python():
        _status.set(run(args, *loaded) or 0)
        return ended()
    with scratch_folder() as scratch:
        # The default output goes where it is deleted.
        if not keeps and args.output is None:
            args.output = str(scratch / "result.json")
        found = concluded(lambda: run(args, *loaded), progress)
    # As files hold it: lists, no tuples.
    return {**found, "result": json.loads(json.dumps(found["result"], default=str))}


def called_from_python() -> bool:
    """Whether the running command's function was called from Python, not by a command line."""
    return not _on_command_line.get()


def run_as_command(function: Function, values: Values) -> int:
    """Calls a command's function for a command line; returns the exit status."""
    on_command_line = _on_command_line.set(True)
    _status.set(0)
    try:
        run(function, values)
        return _status.get()
    finally:
        _on_command_line.reset(on_command_line)


def _plain(value: object, kind: Kind) -> object:
    """A value from Python as its kind reads it: names as text, one item as a list, a list as text."""
    if isinstance(value, Path):
        value = str(value)
    if is_list(kind):
        if isinstance(value, str) and not is_marked(kind, Commas):
            return [value]
        if isinstance(value, list | tuple):
            return [str(item) if isinstance(item, Path) else item for item in value]
    elif isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return value


def _words(function: Function, given: Values) -> list[str]:
    """The words of a command line with these arguments, for results."""
    words: list[str] = []
    kinds = kinds_of(function)
    for one in cli_parameters(function):
        value = given.get(one.name)
        kind = required(kinds[one.name])
        flag = f"--{spelled(one.name)}"
        if value is None:
            continue
        # Keys of a recipe, given in place of its name.
        if is_loaded(value, kind) and isinstance(value, Mapping):
            words.append(json.dumps(value, default=str))
        elif is_loaded(value, kind):
            words.append(f"{flag}={name_of(value)}")
        elif one.kind is one.VAR_POSITIONAL:
            words += map(str, value)
        elif is_word(one):
            words.append(str(value))
        elif is_marked(kind, Several) and isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        elif isinstance(value, bool):
            if value:
                words.append(flag)
        elif isinstance(value, Mapping):
            words.append(f"{flag}={json.dumps(value)}")
        elif isinstance(value, list | tuple):
            words.append(f"{flag}={','.join(map(str, value))}")
        else:
            words.append(f"{flag}={value}")
    return words


# -- loaded models ---------------------------------------------------------------------------------


def is_loaded(value: object, kind: Kind) -> bool:
    """Whether a value of a kind is an object in place of a name."""
    named = value is None or isinstance(value, str | Path)
    return not named and is_marked(required(kind), Loaded)


def name_of(model: object) -> str:
    """The name of a loaded target or drafter in results. Raises UserError: another object."""
    from transformers import PreTrainedModel

    from drafttrain.drafters.base import Drafter
    from drafttrain.target import Target

    if isinstance(model, Target):
        return model.name
    if isinstance(model, Drafter):
        return model.name or f"{model.kind} (not saved)"
    if isinstance(model, PreTrainedModel):
        return model.name_or_path or type(model).__name__
    raise UserError(f"{shown(model)} is neither a name nor a loaded model; give one of them")


def take_target(call: str, args: Namespace) -> Target | None:
    """Takes a loaded target out of a call's arguments, and puts its name in its place.

    Args:
        call: the function's name, for errors. args: also loses `tokenizer`, a loaded model's.

    Returns:
        None for a target that is named.

    Raises:
        UserError: another object, a model without tokenizer, or options of a name with a loaded
            model.
    """
    from drafttrain.target import Target

    given = vars(args)
    tokenizer = given.pop("tokenizer")
    if isinstance(args.target, str):
        if tokenizer is not None:
            raise UserError(
                f"{call}: tokenizer= goes with a loaded model; "
                f"target={args.target!r} is a name, which has its own"
            )
        return None
    loaded = Target.from_pretrained(args.target, tokenizer=tokenizer)
    if loaded.tokenizer is None:
        raise UserError(
            f"{call} renders prompts, but model {loaded.name!r} has no tokenizer; pass tokenizer="
        )
    for name in ("dtype", "device", "trust_remote_code"):
        if given[name] not in ("auto", False):
            raise UserError(
                f"{call}: {name}={given[name]!r} is for a name, but this target is loaded; drop it"
            )
    args.target = loaded.name
    return loaded


def take_drafter(call: str, args: Namespace) -> Drafter | None:
    """Takes a loaded drafter out of a call's arguments, and puts its name in its place.

    Returns:
        None for a drafter that is named.

    Raises:
        UserError: another object.
    """
    if isinstance(args.drafter, str):
        return None
    # Loads torch, which calls with a name do not need here.
    from drafttrain.drafters.base import Drafter

    drafter = args.drafter
    if not isinstance(drafter, Drafter):
        raise UserError(
            f"{call}: drafter={shown(drafter)} must be a name, or a drafter from load_drafter or "
            "Drafter.from_pretrained"
        )
    args.drafter = name_of(drafter)
    return drafter


# -- the signature ---------------------------------------------------------------------------------


def parameters(function: Function) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(inspect.unwrap(function)).parameters


def cli_parameters(function: Function) -> list[inspect.Parameter]:
    """The parameters that the command line has; those that are keys are words to it."""
    kinds = kinds_of(function)
    keys = schemas_of(function)
    found = []
    for one in parameters(function).values():
        # Keys are bare words to cyclopts, see `as_keys`.
        is_key = keys and one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD)
        if not is_key and not is_marked(kinds[one.name], InPython):
            found.append(one)
    return found


def schemas_of(function: Function) -> tuple[type, ...]:
    """The dataclasses of a function's `**keys`; empty for one that has none."""
    for kind in kinds_of(function).values():
        for mark in marks_of(kind):
            if isinstance(mark, Keys):
                return mark.schemas
    return ()


@functools.cache
def kinds_of(function: Function) -> Values:
    """The kind of each parameter: its annotation, evaluated."""
    body = inspect.unwrap(function)
    # Parameters alone: what a function returns may name types that exist for type checkers only.
    written = {name: kind for name, kind in body.__annotations__.items() if name != "return"}
    holder = types.SimpleNamespace(__annotations__=written)
    return typing.get_type_hints(holder, body.__globals__, include_extras=True)


def is_word(one: inspect.Parameter) -> bool:
    """Whether a parameter is a word of the command line, without a flag's name."""
    return one.kind in (one.POSITIONAL_ONLY, one.VAR_POSITIONAL)


def spelled(name: str) -> str:
    """A parameter's name as its flag spells it."""
    return name.rstrip("_").replace("_", "-")


def label_of(one: inspect.Parameter, flag: str) -> str:
    """A parameter's name in errors."""
    if "-" in flag and not is_word(one):
        return flag.format(spelled(one.name))
    return one.name


def required(kind: Kind) -> Kind:
    """A kind without None."""
    # `X | None` without None is X; a union of several stays a union.
    parts = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) in (typing.Union, types.UnionType) and len(parts) < len(get_args(kind)):
        return functools.reduce(lambda left, right: left | right, parts)
    return kind


def marks_of(kind: Kind) -> tuple[object, ...]:
    return get_args(kind)[1:] if get_origin(kind) is Annotated else ()


def unmarked(kind: Kind) -> Kind:
    """A kind without its marks."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return kind


def is_list(kind: Kind) -> bool:
    """Whether values of a kind are lists."""
    return get_origin(unmarked(kind)) in (list, Sequence)


def default_of(one: inspect.Parameter) -> Default:
    if isinstance(one.default, tuple):
        return list(one.default)
    return copy.copy(one.default)


# -- the command line ------------------------------------------------------------------------------


def add_to(app: App, name: str, function: Function, switches: Mapping[str, str]) -> None:
    """Adds a command to a cyclopts app, which completes, helps and documents it.

    Args:
        switches: flags that every command has, with their help.
    """
    from cyclopts import App as Command

    one = Command(
        name=name,
        help=_help_of(function),
        version_flags=(),
    )
    one.default(shell_of(function, switches))
    app.command(one)


def read_words(
    app: App,
    name: str,
    function: Function,
    words: Sequence[str],
    switches: Iterable[str],
) -> Values:
    """The words of each argument of a command line, by the parameter's name; switches are bools.

    Args:
        switches: names of the flags that every command has.

    Raises:
        UserError: a flag that the command lacks, or one without a value.
        SystemExit: --help was given, and has been shown.
    """
    from cyclopts import CycloptsError

    end = len(words)
    if "--" in words:  # behind it, words are another program's
        end = words.index("--")
    if "--help" in words[:end] or "-h" in words[:end]:
        app.help_print([name])
        raise SystemExit(0)
    # Refuses NUL and halves of surrogate pairs, before an error repeats them.
    for word in words:
        check("argument", word, AnyText)
    flags = []
    known = {"--", *(f"--{switch}" for switch in switches)}
    for one in cli_parameters(function):
        if not is_word(one):
            flags.append(f"--{spelled(one.name)}")
        for mark in marks_of(required(kinds_of(function)[one.name])):
            # An alias is a flag too, but no beginning of a flag's name is completed to it.
            if isinstance(mark, Alias):
                known.add(mark.flag)
    if schemas_of(function):
        own = as_keys(words[:end], flags)
    else:
        own = [completed(word, flags) for word in words[:end]]
    words = [*own, *words[end:]]
    for word in own:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in known and flag not in flags:
            hint = did_you_mean(flag[:80], flags, most=2)
            raise UserError(
                f"unknown flag {shown(flag)}; {hint or f'see drafttrain {name} --help'}"
            )
    try:
        _, bound, _ = app.parse_args([name, *words], print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise UserError(explained(error, name, function)) from error
    return dict(bound.arguments)


def as_keys(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Words with the command's own flags first and `--max-steps 4`, as other trainers take it, as
    `max_steps=4`. A key without a value is true: `--packing`.

    Args:
        flags: the command's own that take a value.
    """
    own = []
    rest = []
    # Reversed, so that words come off the end.
    left = [*reversed(words)]
    while left:
        word = left.pop()
        name, equals, text = word.partition("=")
        if name in flags:
            own.append(word)
            if not equals and left:
                own.append(left.pop())
        elif name in SWITCHES:
            own.append(word)
        elif word.startswith("--") and len(word) > 2:
            if not equals:
                # The next word belongs to the key unless it is a flag or a key=value of its own.
                is_value = left and not re.match(r"-+[A-Za-z]|[\w.]+=", left[-1])
                text = "true"
                if is_value:
                    text = left.pop()
            rest.append(f"{name[2:].replace('-', '_')}={text}")
        else:
            # A recipe, or key=value as it is.
            rest.append(word)
    return own + rest


def completed(word: str, flags: Sequence[str]) -> str:
    """A word in which the beginning of one flag's name stands for it: --max-new for
    --max-new-tokens.
    """
    name, equals, text = word.partition("=")
    # Of several flags that begin so, none is meant for certain.
    close = [flag for flag in flags if flag.startswith(name)]
    if len(name) > 2 and len(close) == 1 and name.startswith("--"):
        return close[0] + equals + text
    return word


def explained(error: CycloptsError, name: str, function: Function) -> str:
    """One line about a command line that does not fit its command's signature."""
    from cyclopts import (
        CoercionError,
        MissingArgumentError,
        UnusedCliTokensError,
    )

    see = f"see drafttrain {name} --help"
    argument = error.argument
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected word {shown((error.unused_tokens or [''])[0])}; {see}"
    if isinstance(error, MissingArgumentError) and argument is not None:
        if error.keyword is None:
            return f"{argument.name} must be given; {see}"
        count = "at least one argument" if argument.parameter.consume_multiple else "one argument"
        flag = error.keyword
        return f"{flag} expected {count}; a value that begins with - is written {flag}=VALUE"
    if isinstance(error, CoercionError) and error.token is not None and argument is not None:
        one = parameters(function).get(argument.field_info.name)
        flag = error.token.keyword or argument.name
        if one is None:
            return f"{flag}={shown(error.token.value)} must be true or false"
        try:
            # Our own check words the rule; cyclopts' error has only shown where the value is.
            check(flag, error.token.value, item_of(kinds_of(function)[one.name]), words=True)
        except UserError as problem:
            return str(problem)
    error.verbose = False
    return f"{text_of(error)}; {see}"


def shell_of(function: Function, switches: Mapping[str, str]) -> Function:
    """A function whose parameters cyclopts reads as words; `checked` reads the values."""

    def shell(*words: object, **flags: object) -> None: ...

    shell.__annotations__ = {}  # a command may have a parameter named flags
    shown = [_shown(one, function) for one in cli_parameters(function)]
    for switch, text in switches.items():
        shown.append(_flag(switch, bool, False, {"help": text, "show_default": False}))
    for schema in schemas_of(function):
        shown += [_key(line) for line in table(schema)]
    # Python wants positional parameters first.
    shell.__signature__ = inspect.Signature(sorted(shown, key=lambda one: one.kind))  # type: ignore[attr-defined]
    return shell


def _shown(one: inspect.Parameter, function: Function) -> inspect.Parameter:
    """A parameter as cyclopts shows it: the type of its word, help, choices and default."""
    kind = required(kinds_of(function)[one.name])
    item = item_of(kind)
    base: Kind = _base(item)
    options: Values = {"help": helps_of(function)[one.name]}
    options["show_default"] = _shows(one.default, options["help"])
    if base is not bool:
        options["converter"] = _as_words
    if words_of(item) and "" not in words_of(item):
        options["choices"] = words_of(item)
    if is_marked(kind, Several):
        options["consume_multiple"] = (1, None)
    for mark in marks_of(kind):
        if isinstance(mark, Alias):
            options["negative" if base is bool else "alias"] = mark.flag
    # The kind is a list of items.
    if item is not kind:
        base = list[base]
    how = one.kind
    if how is one.POSITIONAL_OR_KEYWORD and not is_marked(kind, Word):
        how = one.KEYWORD_ONLY
    default = one.default
    if isinstance(default, dict) or default == ():
        default = None  # nothing to show
    elif isinstance(default, tuple):
        default = ",".join(map(str, default))
    if default is None:
        base = base | None
    return _flag(one.name, base, default, options).replace(kind=how)


def _flag(
    key: str,
    kind: Kind,
    default: object,
    options: Values,
) -> inspect.Parameter:
    """A flag, with cyclopts' options."""
    from cyclopts import Parameter

    annotation = Annotated[kind, Parameter(**options)]
    return inspect.Parameter(
        key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _key(line: KeyLine) -> inspect.Parameter:
    """A key of a recipe as help shows it, with its default as text, and as shells complete it."""
    name, _, default, meaning = line
    options: Values = {
        "name": f"--{name}",
        "group": "Keys of a recipe",
        "help": meaning,
        "show_default": default not in (None, "", {}),
    }
    return _flag(name, str, str(default).lower(), options)


def _as_words(kind: Kind, tokens: Sequence[Token]) -> str | list[str]:
    """The words of a flag as they are: `checked` reads them. Of a flag given twice, the last."""
    words = [token.value for token in tokens]
    if get_origin(kind) is list:
        return words
    return words[-1]


def item_of(kind: Kind) -> Kind:
    """The kind of one word: of a list that takes a word per item, its items' kind."""
    kind = required(kind)
    if not is_list(kind) or is_marked(kind, Commas):
        return kind
    return get_args(unmarked(kind))[0]


def _base(kind: Kind) -> Kind:
    """The type that help shows, and of which a shell completes paths.

    cyclopts checks values of types that pydantic knows, in words of its own.
    """
    if is_marked(kind, Loaded):
        # Any part of a union decides: paths complete, and numbers show as such.
        return Path
    parts = get_args(kind) if get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if any(part is Path for part in parts):
        return Path
    for part in parts:
        part = unmarked(part)
        if part is int:
            return Int
        if part is float:
            return Float
        if part is bool:
            return bool
    return str


def _shows(default: Default, text: str) -> bool:
    """Whether help shows a default: not where there is none, or where the text names it."""
    if default is None or default is False or default is inspect.Parameter.empty:
        return False
    return default not in ("", (), {}) and "default" not in text


def _help_of(function: Function) -> str:
    """A command's help: its docstring up to `Args:`, a line a paragraph, and examples as they are."""
    text = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[0].strip()
    parts = []
    for number, part in enumerate(text.split("```")):
        if number % 2:  # between fences
            parts.append(part.strip("\n"))
        else:
            parts += [" ".join(lines.split()) for lines in part.strip().split("\n\n")]
    return "\n\n".join(part for part in parts if part)


@functools.cache
def helps_of(function: Function) -> dict[str, str]:
    """The help of each parameter, from the docstring's `Args:`."""
    from docstring_parser import parse_from_object

    found = parse_from_object(function).params
    return {one.arg_name: " ".join((one.description or "").split()) for one in found}
