"""Rows of the Berkeley Function-Calling Leaderboard as questions with tools.

Its files hold JSON lines, one file per category; rows of several turns name the classes whose
functions may be called, which are described in other files. The functions are never run: a later
turn follows the answer to the turn before it.

Source: https://github.com/ShishirPatil/gorilla (berkeley-function-call-leaderboard), versions 1 to
4.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError
from drafttrain.files import Json, read_jsonl

DOCS = "multi_turn_func_doc"
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
    "object": "object",
    "dict": "object",
    "hashmap": "object",
    "hashtable": "object",
    "array": "array",
    "list": "array",
    "tuple": "array",
    "arraylist": "array",
    "set": "array",
    "queue": "array",
    "stack": "array",
    "string": "string",
    "number": "number",
    "float": "number",
    "double": "number",
    "bigint": "number",
    "integer": "integer",
    "int": "integer",
    "long": "integer",
    "short": "integer",
    "byte": "integer",
    "boolean": "boolean",
    "bool": "boolean",
    "null": "null",
}


def bfcl_turns(row: Json) -> list[str]:
    """The user's turns, up to an empty one, where the leaderboard adds functions.

    Raises:
        KeyError, TypeError: a row in another format.
    """
    turns: list[str] = []
    for messages in row["question"]:
        if not messages:
            break
        texts = [message["content"] for message in messages]
        if turns:
            turns.append("\n\n".join(texts))
        else:  # what stands before the first turn is its opening
            turns.append(texts[-1])
    return turns


def bfcl_category(row: Json) -> str:
    """The category, from an id such as live_simple_3-2-0. Raises KeyError, TypeError."""
    return re.sub(r"_\d+(-\d+)*$", "", row["id"])


def bfcl_more(row: Json, file: Path) -> Json:
    """What stands before the first turn, and the tools.

    Raises:
        KeyError, TypeError: a row in another format.
        UserError: no description of a class.
    """
    functions = []
    if "function" in row:
        functions += row["function"]
    else:
        for name in row["involved_classes"]:
            functions += _functions(file.parent / DOCS / f"{_CLASSES[name]}.json")
    left_out = set(row.get("excluded_function", ()))
    for names in (row.get("missed_function") or {}).values():
        left_out.update(names)
    tools = [_tool(function) for function in functions if function["name"] not in left_out]
    return {"opening": row["question"][0][:-1], "tools": tools}


@cache
def _functions(path: Path) -> list[Json]:
    if not path.is_file():
        raise UserError(
            f"suite=bfcl: no {path}, which describes functions; "
            f"give the folder that holds {DOCS}, or no FILE"
        )
    return [row for _, row in read_jsonl(path)]


def _tool(function: Json) -> Json:
    """A function as chat templates and servers read it.

    Its name has no dots, its types are those of JSON schema.
    """
    described = {
        "name": function["name"].replace(".", "_"),
        "description": function.get("description", ""),
        "parameters": _schema(function["parameters"]),
    }
    return {"type": "function", "function": described}


def _schema(value: Any) -> Any:
    """A schema with all names of types replaced.

    A property may itself be called `type`; its value is then a schema.
    """
    if isinstance(value, list):
        return [_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {}
    for key, item in value.items():
        if key == "type" and isinstance(item, str):
            made[key] = _TYPES.get(item.lower(), "string")
        else:
            made[key] = _schema(item)
    return made
