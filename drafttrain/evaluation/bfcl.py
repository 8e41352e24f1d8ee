"""Rows of the Berkeley Function-Calling Leaderboard as questions with tools.

Its files hold JSON lines, one file per category; rows of several turns name the classes whose
functions may be called, which are described in other files. The functions are never run: a later
turn follows the answer to the turn before it.

Source: https://github.com/ShishirPatil/gorilla (berkeley-function-call-leaderboard), versions 1 to
4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError
from drafttrain.files import Json, read_jsonl

DOCS = "multi_turn_func_doc"
# Categories whose rows need nothing but their functions' descriptions: no memory, web page or
# program to execute.
_CATEGORIES = (
    "simple* multiple parallel parallel_multiple java javascript irrelevance live_* multi_turn_*"
)
FILES = tuple(f"BFCL_v*_{name}.json*" for name in _CATEGORIES.split())
# File in DOCS of each class.
_CLASSES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
# Python's and Java's names of types -> JSON schema's; others are written as strings.
_TYPES = {
    **{
        name: name for name in ("object", "array", "string", "number", "integer", "boolean", "null")
    },
    **dict.fromkeys(("dict", "hashmap", "hashtable"), "object"),
    **dict.fromkeys(("list", "tuple", "arraylist", "set", "queue", "stack"), "array"),
    **dict.fromkeys(("float", "double", "bigint"), "number"),
    **dict.fromkeys(("int", "long", "short", "byte"), "integer"),
    "bool": "boolean",
}


def bfcl_turns(row: Json) -> list[str]:
    """The user's turns. They end before an empty one, where the leaderboard adds functions. Raises
    KeyError, TypeError.
    """
    turns: list[str] = []
    for number, messages in enumerate(row["question"]):
        if not messages:
            break
        later = [message["content"] for message in messages]
        turns.append("\n\n".join(later) if number else later[-1])
    return turns


def bfcl_category(row: Json) -> str:
    """The category, from an id such as live_simple_3-2-0. Raises KeyError, TypeError."""
    return re.sub(r"_\d+(-\d+)*$", "", row["id"])


def bfcl_more(row: Json, folder: Path) -> Json:
    """What stands before the first turn, and the tools. Raises KeyError, TypeError; UserError: no
    description of a class.
    """
    functions: Sequence[Json]
    if "function" in row:
        functions = row["function"]
    else:
        functions = _described(row["involved_classes"], folder)
    missed = row.get("missed_function") or {}
    left_out = {
        *row.get("excluded_function", ()),
        *(name for names in missed.values() for name in names),
    }
    tools = [_tool(function) for function in functions if function["name"] not in left_out]
    return {"opening": row["question"][0][:-1], "tools": tools}


def _described(classes: Sequence[str], folder: Path) -> list[Json]:
    return [row for name in classes for row in _functions(folder / DOCS / f"{_CLASSES[name]}.json")]


@cache
def _functions(path: Path) -> list[Json]:
    if not path.is_file():
        raise UserError(
            f"suite=bfcl: no {path}, which describes functions; give the folder that holds {DOCS}, or no FILE"
        )
    return [row for _, row in read_jsonl(path)]


def _tool(function: Json) -> Json:
    """A function as chat templates and servers read it: no dots in its name, types of JSON schema."""
    schema = {
        "name": function["name"].replace(".", "_"),
        "description": function.get("description", ""),
    }
    return {
        "type": "function",
        "function": {**schema, "parameters": _schema(function["parameters"])},
    }


def _schema(value: Any) -> Any:
    """A schema with all names of types replaced. A property may itself be called `type`; its value
    is then a schema.
    """
    if isinstance(value, list):
        return [_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    known = {
        key: _TYPES.get(name.lower(), "string")
        for key, name in value.items()
        if key == "type" and isinstance(name, str)
    }
    return {key: _schema(item) for key, item in value.items()} | known
