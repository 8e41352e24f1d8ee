"""Tools and calls of published data in one form: OpenAI's, with the arguments of calls as objects.

xLAM      {"query", "tools": "[{name, description, parameters: {city: {type: str}}}]", "answers": "[{name, arguments}]"}
ToolACE   the system turn lists the functions as JSON; an answer reads [Get Weather(city="Rome")]
Hermes    the system turn lists them in <tools>; an answer holds <tool_call>{"name": ..., "arguments": ...}</tool_call>
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence

from drafttrain.files import Json, parse_json

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_RESULT = re.compile(r"\s*<tool_response>\s*(.*?)\s*</tool_response>\s*", re.DOTALL)
_TYPES = {  # Python's names of types, as xLAM writes them -> JSON schema's
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "dict": "object",
}


def _loaded(value: object) -> object:
    """What JSON text, or Python's form of it, stands for; another value as it is.

    Raises ValueError.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        try:
            return ast.literal_eval(value.strip())
        except (SyntaxError, TypeError, MemoryError) as error:
            raise ValueError(f"neither JSON nor Python: {value[:40]!r}") from error


def read_tools(value: object) -> list[Json]:
    """Functions as JSON schemas {"type": "function", "function": {...}}.

    Args:
        value: a list of them or its text; None for none.

    Raises ValueError, TypeError or KeyError for another form.
    """
    tools = []
    for tool in _items(value):
        if not isinstance(tool, dict):
            raise TypeError(f"no tool: {str(tool)[:40]!r}")
        function = dict(tool)
        if isinstance(tool.get("function"), dict):
            function = dict(tool["function"])
        if not isinstance(function["name"], str) or not function["name"]:
            raise TypeError("a tool without a name")
        parameters = function.get("parameters")
        # xLAM's form has neither of a JSON schema's keys.
        if (
            isinstance(parameters, dict)
            and parameters
            and not {"properties", "type"} & set(parameters)
        ):
            function["parameters"] = _schema(parameters)
        tools.append({"type": "function", "function": function})
    return tools


def _items(value: object) -> list[object]:
    """A list as it is, one object as a list of it, or what the text of either stands for.

    Raises ValueError.
    """
    if not value:
        return []
    found = _loaded(value)
    if isinstance(found, list):
        return found
    return [found]


def _schema(parameters: Json) -> Json:
    """The JSON schema of xLAM's parameters.

    They are {name: {"type": "List[int], optional", "description", "default"}}.
    """
    properties = {}
    required = []
    for name, given in parameters.items():
        # "List[int], optional" is an array that a call may leave out.
        kind, _, optional = str(given.get("type", "")).partition(", ")
        plain = kind.partition("[")[0].lower()
        if not plain:
            plain = "string"
        properties[name] = {**given, "type": _TYPES.get(plain, plain)}
        if not optional and "default" not in given:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


def read_calls(value: object) -> list[Json]:
    """Calls as {"type": "function", "id"?, "function": {"name", "arguments": {...}}}.

    Args:
        value: a list of such calls or of {"name", "arguments"}, one of them, or its text; arguments
            may be JSON text.

    Raises ValueError or TypeError for another form.
    """
    calls = []
    for call in _items(value):
        if not isinstance(call, dict):
            raise TypeError(f"no call: {str(call)[:40]!r}")
        function = call
        if isinstance(call.get("function"), dict):
            function = call["function"]
        # Some data name the arguments as a tool names its parameters.
        given = function.get("arguments", function.get("parameters"))
        arguments: object = {}
        if given:
            arguments = _loaded(given)
        name = function.get("name")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError(f"no name or no arguments: {str(call)[:40]!r}")

        made: Json = {"type": "function"}
        if isinstance(call.get("id"), str) and call["id"]:
            made["id"] = call["id"]
        made["function"] = {"name": name, "arguments": arguments}
        calls.append(made)
    if not calls:
        raise ValueError("no calls")
    return calls


def plain_result(value: object) -> str:
    """A tool's result as text, without Hermes' tags."""
    if isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False)
    inner = _RESULT.fullmatch(text)
    if inner:
        return inner[1]
    return text


def tools_in_system(text: str) -> list[Json]:
    """The functions that a system turn of ToolACE or Hermes lists; [] for any other text."""
    at = text.find("<tools>")
    # The list of functions in JSON, behind <tools> where Hermes writes it.
    start = re.compile(r"\[\s*\{").search(text, max(at, 0))
    # Any prompt may hold a JSON list; only one about functions is read.
    if start is None or (at < 0 and "function" not in text):
        return []
    try:
        found, _ = json.JSONDecoder().raw_decode(text, start.start())
        for tool in found:
            if "parameters" not in tool.get("function", tool):
                return []
        return read_tools(found)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


def calls_in(text: str, names: Sequence[str]) -> tuple[str, list[Json]]:
    """The text of an answer without its calls, and these calls.

    All of the text and [] if it holds none that can be read.

    Args:
        names: of the functions, which ToolACE writes in front of brackets, also with spaces in
            them.
    """
    try:
        calls: list[Json] = []
        for block in _CALL.findall(text):
            calls += read_calls(block)
        if calls:
            return _CALL.sub("", text).strip(), calls
        if names and text.lstrip().startswith("["):
            return "", _bracketed(text.strip(), names)
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError):
        pass
    return text, []


def _bracketed(text: str, names: Sequence[str]) -> list[Json]:
    """The calls of `[Get Weather(city="Rome"), ...]`.

    Raises ValueError, TypeError or SyntaxError for another form.
    """
    # Give functions names that Python can parse, the longest first: one may end with another.
    plain = {}
    for i, name in enumerate(sorted(names, key=len, reverse=True)):
        word = f"f{i}_"
        plain[word] = name
        text = re.sub(rf"(?<![\w\"']){re.escape(name)}\(", f"{word}(", text)
    tree = ast.parse(text, mode="eval").body
    nodes: list[ast.expr] = []
    if isinstance(tree, ast.List):
        nodes = tree.elts
    calls = []
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            raise TypeError("no list of calls")
        if node.func.id not in plain:
            raise TypeError("no list of calls")
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
        calls.append({"name": plain[node.func.id], "arguments": arguments})
    return read_calls(calls)
