"""For mkdocstrings: splits docstring entries that describe several names, `a, b: text. c: text`, into one per name."""

from __future__ import annotations

import inspect
import re

import griffe

_SECTION = re.compile(r"^(Args|Attributes):\n((?:[ ]{4}.*\n?|\n)+)", re.M)


def _lines(section: re.Match[str], names: set[str]) -> str:
    entries: list[str] = []
    for line in inspect.cleandoc(section[2]).split("\n"):
        if entries and not re.match(r"(?:[*\w]+, )*[*\w]+: ", line):  # a later line of an entry
            entries[-1] += f" {line.strip()}"
        elif line:
            entries.append(line)
    found = []
    for entry in entries:
        parts = re.split(r"(?:^|(?<=[.;)])) ?((?:\w+, )*\w+): ", entry)
        pairs = list(zip(parts[1::2], parts[2::2], strict=True))
        known = all(set(several.split(", ")) <= names for several, _ in pairs)
        for several, text in pairs if pairs and known and not parts[0] else [("", entry)]:
            found += (
                [f"    {name}: {text}" for name in several.split(", ")]
                if several
                else [f"    {text}"]
            )
    return f"{section[1]}:\n" + "\n".join(found) + "\n\n"


class OneEntryPerName(griffe.Extension):
    """Rewrites the docstrings of the package as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is None:
            return
        names = {parameter.name for parameter in getattr(obj, "parameters", ())} | set(obj.members)
        obj.docstring.value = _SECTION.sub(lambda found: _lines(found, names), obj.docstring.value)
