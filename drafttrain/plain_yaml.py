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


class _TooLarge(Exception):
    """More values or levels than a recipe needs."""


class _Loader(yaml.SafeLoader):
    """Plain YAML that refuses keys which occur twice, and more values than its bounds allow.

    Values are counted while they are read, and those behind aliases before they are copied: a merge
    key (`<<`) that names two aliases of another one doubles the values with each level.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self._values = 0  # so far, those behind aliases counted each time
        self._level = 0  # of the node that is read
        self._deepest = 0  # of the nodes inside
        self._sizes: dict[int, tuple[int, int]] = {}  # values and levels inside a node, by its id

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        before = self._values
        outer = self._deepest
        self._level += 1
        self._deepest = self._level
        if not isinstance(parent, yaml.MappingNode) or index is not None:  # not a key
            self._values += 1
        self._check_bounds()
        node = super().compose_node(parent, index)
        if is_alias:
            if id(node) not in self._sizes:  # inside the node that it names
                raise _TooLarge
            values, levels = self._sizes[id(node)]
            self._values += values
            self._deepest += levels
            self._check_bounds()
        else:
            self._sizes[id(node)] = (self._values - before, self._deepest - self._level)
        self._deepest = max(outer, self._deepest)
        self._level -= 1
        return node

    def _check_bounds(self) -> None:
        if self._values > _MOST_VALUES or self._deepest > MOST_LEVELS + 1:
            raise _TooLarge

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
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
    except _TooLarge as error:
        raise UserError(large) from error
    except Exception as error:
        # Besides YAMLError: numbers of 5000 digits, impossible dates, empty tags, deep nesting.
        raise UserError(f"{where} is not valid YAML: {text_of(error)[:300]}") from error

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
