"""Plain YAML, which recipes and launch files are written in: bounded, without tags or repeated keys."""

from __future__ import annotations

import re
from typing import Any

import yaml

from drafttrain.errors import UserError, shown

MOST_LEVELS = 32
_MOST_VALUES = 10_000  # aliases counted each time
_LONGEST = 200_000  # characters
_DEEP = re.compile(r"(?:[\[{]\s*){33}")  # PyYAML takes seconds for these


class _Loader(yaml.SafeLoader):
    """Plain YAML that refuses keys which occur twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"key {key_node.value!r} occurs twice",
                    key_node.start_mark,
                )
            if isinstance(key_node.value, str):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_yaml(text: str, where: str) -> Any:
    """Reads text, finite numbers, true, false, null, lists, and mappings with text as keys.

    Args:
        where: begins the messages of errors.

    Raises:
        UserError: broken YAML, a key that occurs twice, another kind of value, or too many or too
            deep ones.
    """
    large = f"{where} holds more than {_MOST_VALUES} values or {MOST_LEVELS} levels; write a plain recipe"
    if len(text) > _LONGEST or _DEEP.search(text):
        raise UserError(large)
    try:
        found = yaml.load(text, _Loader)
    except Exception as error:
        # Besides YAMLError: numbers of 5000 digits, impossible dates, empty tags, deep nesting.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{where} is not valid YAML: {reason[:300]}") from error

    count = 0
    waiting: list[tuple[str, object, int]] = [("", found, 0)]
    while waiting:
        place, value, level = waiting.pop()
        count += 1
        if count > _MOST_VALUES or level > MOST_LEVELS:
            raise UserError(large)
        if isinstance(value, dict):
            for name, inner in value.items():
                if not isinstance(name, str):
                    raise UserError(f"{where}: key {shown(name)} is not text; put it in quotes")
                waiting.append((f"{place}.{name}"[-80:], inner, level + 1))
        elif isinstance(value, list):
            for inner in value:
                waiting.append((place, inner, level + 1))
        elif not _is_plain(value):
            rule = "must be text, true, false, null or a finite number; put other values in quotes"
            raise UserError(f"{where}: {place.lstrip('.') or 'value'}={shown(value)} {rule}")
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, int | float):
        return abs(value) < 1e300
    return value is None or isinstance(value, str)
