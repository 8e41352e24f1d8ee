"""Kinds of values: types with their ranges, which flags, recipe keys and Python arguments share.

A kind is an annotation such as `Count`. `check` compares a value with one, `rule` describes it for
errors, --help and docs/reference/, and `check_fields` checks every field of a dataclass. `key`
declares such a field with its meaning.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic import Field as Limits
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

from drafttrain.errors import UserError, did_you_mean, shown

T = TypeVar("T")
MOST = 2**31 - 1
MOST_ITEMS = 64  # of a list in one word
_NUMBER = re.compile(r"[+-]?(?=\.?[0-9])[0-9]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?")
_TYPES = {  # of a JSON schema
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "object": "key: value pairs",
}


def _text(text: str) -> str:
    if "\0" in text:
        raise ValueError
    text.encode()  # raises a ValueError for half of a surrogate pair
    return text


def _place(text: str) -> str:
    """Raises ValueError for text that no file system takes, or that would spread an error over
    several lines.
    """
    # One line of printable characters: a name may end up in an error.
    if _text(text) and (len(text.splitlines()) > 1 or not text.isprintable() or len(text) > 4000):
        raise ValueError
    # The longest name of a file in common file systems.
    if any(len(part.encode()) > 255 for part in text.split("/")):
        raise ValueError
    try:
        # Raises for the home of a user that does not exist.
        Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError from error
    return text


def _file(text: str) -> str:
    if not Path(text).expanduser().is_file():
        raise ValueError
    return text


class OneOf:
    """Restricts text to some words: `Annotated[str, OneOf(FORMATS)]`, where Literal would need the
    words themselves.
    """

    def __init__(self, words: Iterable[str]):
        self.words = list(words)

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.literal_schema(self.words)


class Commas:
    """Marks a list whose items may be written in one word, separated by commas: `1,2,4`."""

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        item = _in_words(handler(core)["items"])
        return {"description": f"1 to {MOST_ITEMS} values separated by commas, each {item}"}


Count = Annotated[int, Limits(ge=1, le=MOST)]
Size = Annotated[int, Limits(ge=0, le=MOST)]  # 0 for none, or for no limit
Depth = Annotated[int, Limits(ge=1, le=256)]  # of a chain or tree
Seed = Annotated[int, Limits(ge=0, le=2**32 - 1)]
Fraction = Annotated[float, Limits(ge=0, le=1)]
PositiveFraction = Annotated[float, Limits(gt=0, le=1)]
Amount = Annotated[float, Limits(ge=0, le=1e18)]
PositiveAmount = Annotated[float, Limits(ge=1e-6, le=1e18)]
Weight = Annotated[float, Limits(ge=0, le=1e6)]  # of a term of a loss
Temperature = Annotated[float, Limits(ge=0, le=1000)]
Penalty = Annotated[float, Limits(ge=0.01, le=100)]
_UNITS = {"": 1.0, "G": 1.0, "T": 1e3, "M": 1e-3}


def _gigabytes(given: object) -> object:
    """The number of gigabytes that text says; other values stay."""
    if not isinstance(given, str):
        return given
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([GTM]?)B?", given.strip().upper())
    if not found or not float(found[1]):
        raise UserError(f"={shown(given)} must be an amount such as 500G or 4T")
    return float(found[1]) * _UNITS[found[2]]


StorageSize = Annotated[
    PositiveAmount,
    BeforeValidator(_gigabytes),
    Limits(description="gigabytes, or an amount such as 500G or 4T"),
]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
StoreDtype = Literal["bfloat16", "float32", "int8", "float8"]  # of stored states
FileDtype = Literal["float32", "bfloat16", "float16"]
ExportDtype = Literal["float32", "bfloat16", "float16", "float8", "nvfp4"]
DeviceMap = Literal["", "auto", "balanced", "balanced_low_0", "sequential"]
AnyText = Annotated[str, AfterValidator(_text), Limits(description="text without NUL")]
# A path, a Hub id or another name that may become part of a path.
Name = Annotated[
    str, AfterValidator(_place), Limits(description="a name or path of printable characters")
]
Place = Annotated[
    Name, Limits(min_length=1, description="a name or path of printable characters, not empty")
]
File = Annotated[Name, AfterValidator(_file), Limits(description="an existing file")]


def rule(kind: object) -> str:
    """What values of a kind are, in words: `a whole number from 1 to 100`."""
    return _in_words(_schema(kind))


def _in_words(schema: JsonSchemaValue) -> str:
    if "description" in schema:
        return schema["description"]
    if "enum" in schema:
        return "one of " + ", ".join(str(word) or "empty" for word in schema["enum"])
    if "const" in schema:
        return str(schema["const"]) or "empty"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(filter(None, map(_in_words, schema["anyOf"]))))
    if "items" in schema:
        return f"a list, each item {_in_words(schema['items'])}"
    if "format" in schema:
        return ""  # a Path: `Place` in the same union states the rule
    text = _TYPES.get(schema.get("type", ""), "")
    if "minimum" in schema:
        text += f" from {schema['minimum']:.10g} to {schema['maximum']:.10g}"
    if "exclusiveMinimum" in schema:
        text += f" above {schema['exclusiveMinimum']:.10g} and at most {schema['maximum']:.10g}"
    return text


def is_marked(kind: object, mark: type) -> bool:
    """Whether a kind is annotated with an instance of `mark`."""
    return get_origin(kind) is Annotated and any(isinstance(one, mark) for one in get_args(kind))


def words_of(kind: object) -> list[str]:
    """The words of a kind that takes nothing else; empty for other kinds."""
    return _schema(kind).get("enum", [])


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(
        kind,
        config=ConfigDict(
            strict=True,
            allow_inf_nan=False,
            arbitrary_types_allowed=True,
        ),
    )


class _Shapes(GenerateJsonSchema):
    """Leaves empty what JSON has no type for."""

    def handle_invalid_for_json_schema(self, schema: object, error_info: str) -> JsonSchemaValue:
        return {}

    def emit_warning(self, kind: object, detail: str) -> None:
        """Of defaults that are no JSON, which no rule names."""


@functools.cache
def _schema(kind: object) -> JsonSchemaValue:
    return _adapter(kind).json_schema(schema_generator=_Shapes)


def number(word: str) -> int | float | None:
    """The number that a word is, written with ASCII digits as 12, 0.5 or 1e-3; None for any other
    word.
    """
    # A long word of digits would take int() a while.
    if len(word) > 64 or not _NUMBER.fullmatch(word):
        return None
    if word.lstrip("+-").isdigit():
        return int(word)
    return float(word)


def check(
    name: str,
    value: object,
    kind: Any,
    fix: str = "",
    words: bool = False,
) -> Any:
    """A value as its kind has it: 2 for 2.0 where a whole number is wanted, a Python number for
    numpy's.

    Args:
        name: of the flag, key or argument. fix: ends the error.
        words: text may stand for a number, as in flags and overrides.

    Raises:
        UserError: another type, out of range, not finite; names key, value and rule.
    """
    if isinstance(value, str) and is_marked(kind, Commas):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not 0 < len(parts) <= MOST_ITEMS:
            raise UserError(
                f"{name}={shown(value)} must have 1 to {MOST_ITEMS} values separated by commas, such as 1,2,4"
            )
        item = get_args(get_args(kind)[0])[0]
        return [check(name, part, item, words=True) for part in parts]
    plain = value
    if getattr(value, "shape", None) == ():  # a number of numpy or torch
        plain = value.item()  # type: ignore[attr-defined]

    # What the value may stand for, the likeliest first: pydantic converts nothing here.
    forms = [plain]
    if words and isinstance(plain, str):
        read = number(plain)
        if read is not None:
            forms.append(read)
    forms += [int(form) for form in forms if isinstance(form, float) and form.is_integer()]
    forms += [tuple(form) for form in forms if isinstance(form, list)]
    for form in forms:
        try:
            return _adapter(kind).validate_python(form)
        except (ValidationError, UnicodeError):
            continue
        except UserError as error:  # of a kind that words its rule itself: `='x' is not one of`
            problem = str(error).removeprefix(name.lstrip("-"))
            raise UserError(f"{name}{problem}") from error
    known = words_of(kind)
    if known and isinstance(value, str):
        hint = did_you_mean(value[:80], known, most=2)
        if hint:
            fix = f"; {hint}"
    raise UserError(f"{name}={shown(value)} must be {rule(kind)}{fix}")


def refuse_options(call: str, others: Mapping[str, object], known: Iterable[str]) -> None:
    """Raises UserError for the first keyword argument that a call does not have; names the closest
    of those that it has.

    None and False ask for nothing: transformers' callers pass them for options that are off.
    """
    known = list(known)
    for name, value in others.items():
        if name not in known and value is not None and value is not False:
            hint = did_you_mean(name, known, most=2, cutoff=0.6) or f"there are {', '.join(known)}"
            raise UserError(f"{call}: {name}= is no option of it; {hint}")


def key(default: T, meaning: str) -> T:
    """A dataclass field of `check_fields` with its default, and its meaning for --help and
    docs/reference/config.md.
    """
    if isinstance(default, dict):
        # A copy for each instance, which may change it.
        return field(default_factory=lambda: type(default)(default), metadata={"meaning": meaning})  # type: ignore
    return field(default=default, metadata={"meaning": meaning})


def default_of(one: Field[Any]) -> object:
    if one.default_factory is MISSING:
        return one.default
    return one.default_factory()


@functools.cache
def kinds_of(settings: type) -> dict[str, Any]:
    """The kind of each annotated field of a class and of its bases in this package."""
    # Bases first, so that a class's own annotations replace theirs.
    own = [base for base in reversed(settings.__mro__) if base.__module__.startswith("drafttrain.")]
    found: dict[str, Any] = {}
    for base in own:
        found |= inspect.get_annotations(base, eval_str=True)
    return {name: kind for name, kind in found.items() if get_origin(kind) is not ClassVar}


def check_fields(settings: Any, prefix: str = "", words: bool = False) -> None:
    """Checks every field of a dataclass instance against its annotation, in place. Raises UserError
    as `check` does.
    """
    kinds = kinds_of(settings.__class__)
    for one in fields(settings):
        default = default_of(one)
        fix = ""
        if "meaning" in one.metadata:
            fix = f" ({one.metadata['meaning']})"
        if default not in (MISSING, None, "", {}, ()):
            fix += f"; the default is {shown(default)}"
        value = check(
            prefix + one.name,
            getattr(settings, one.name),
            kinds[one.name],
            fix,
            words,
        )
        # Also of a frozen dataclass.
        object.__setattr__(settings, one.name, value)


def table(settings: type) -> list[tuple[str, str, object, str]]:
    """(key, rule, default, meaning) of every field that `key` declared."""
    kinds = kinds_of(settings)
    found = [one for one in fields(settings) if "meaning" in one.metadata]
    return [
        (one.name, rule(kinds[one.name]), default_of(one), one.metadata["meaning"]) for one in found
    ]


class ShardIndex(TypedDict):
    """The index of a model of several files: the file of each tensor."""

    weight_map: dict[str, str]
