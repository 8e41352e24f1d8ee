"""Plain YAML, which recipes and launch files are written in: bounded, without tags or repeated keys."""

from __future__ import annotations

import re
from typing import Any

import yaml

from drafttrain.errors import UserError, shown, text_of

MOST_LEVELS = 32
_MOST_VALUES = 10_000  # aliases counted each time
_LONGEST = 200_000  # characters
_DEEP = re.compile(r"(?:[\[{]\s*){33}")  # PyYAML takes seconds for these


def _is_small(root: yaml.Node) -> bool:
    """Whether nodes stay within the bounds, those behind aliases counted each time.

    It comes before the values are made: a merge key (`<<`) that names two aliases of another one
    doubles them with each level.

    Raises:
        ConstructorError: a key that occurs twice.
    """
    count = 0
    waiting = [(root, 0)]
    while waiting:
        node, level = waiting.pop()
        count += 1
        # An alias inside the node that it names has no last level.
        if count > _MOST_VALUES or level > MOST_LEVELS:
            return False
        inside = []
        if isinstance(node, yaml.SequenceNode):
            inside = node.value
        elif isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} occurs twice", key.start_mark
                    )
                seen.add(key.value)
                inside.append(value)
        waiting += [(each, level + 1) for each in inside]
    return True


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
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:  # an empty file
            return None
        small = _is_small(root)
        if small:
            found = loader.construct_document(root)
    except RecursionError as error:
        raise UserError(large) from error
    except Exception as error:
        # Besides YAMLError: numbers of 5000 digits, impossible dates, empty tags.
        raise UserError(f"{where} is not valid YAML: {text_of(error)[:300]}") from error
    if not small:
        raise UserError(large)

    waiting: list[tuple[str, object]] = [("", found)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            for name, inner in value.items():
                if not isinstance(name, str):
                    raise UserError(f"{where}: key {shown(name)} is not text; put it in quotes")
                waiting.append((f"{place}.{name}"[-80:], inner))
        elif isinstance(value, list):
            for inner in value:
                waiting.append((place, inner))
        elif not _is_plain(value):
            rule = "must be text, true, false, null or a finite number; put other values in quotes"
            raise UserError(f"{where}: {place.lstrip('.') or 'value'}={shown(value)} {rule}")
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, int | float):
        return abs(value) < 1e300
    return value is None or isinstance(value, str)
