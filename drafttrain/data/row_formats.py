"""Reads the formats in which prompts and conversations are published.

FastChat question   {"turns": ["...", "..."]}                              user turns without answers
ShareGPT            {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}
OpenAI              {"messages": [{"role": "user", "content": "..."}, ...]}
instruction         {"instruction": "...", "input": "...", "output": "..."}, {"prompt": "...", "response": "..."}
plain text          {"text": "..."}                                        a beginning to continue

Tools come as {"tools": [...]} with OpenAI's tool_calls or ShareGPT's function_call and observation
turns; data/tool_formats.py reads them and xLAM's, ToolACE's and Hermes' forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from drafttrain.data.tool_formats import (
    calls_in,
    plain_result,
    read_calls,
    read_tools,
    tools_in_system,
)
from drafttrain.errors import UserError
from drafttrain.files import Json, check_json, parse_json

# {"messages": [...]} with "tools" and "chat_template_kwargs" where the row has them, or {"text":
# str}
Prompt = Json
REASONING = (
    "reasoning_content",
    "reasoning",
    "thinking",
)  # names under which data and servers keep reasoning

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bot"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "tool_response"), "tool"),
    **dict.fromkeys(
        ("function_call", "tool_call"), "call"
    ),  # an assistant's turn that is nothing but calls
}
_CONVERSATIONS = ("messages", "conversations", "conversation", "prompt")
_QUESTIONS = ("instruction", "prompt", "question", "query")
_ANSWERS = ("output", "response", "completion", "answer")
_FIX = "see docs/data.md for rows with tools; drafttrain prompts --source file writes them"


class CalledFunction(TypedDict):
    """The function of a call; arguments as an object, or as OpenAI's JSON text."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Json | str


class ToolCall(TypedDict):
    """A call of an assistant's message."""

    function: CalledFunction
    id: NotRequired[str | None]


class PlainMessage(TypedDict):
    """A message as chat templates read it; the content may be missing beside calls and reasoning."""

    role: str
    content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCall] | None]
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    thinking: NotRequired[str | None]


class NamedFunction(TypedDict):
    """The part of a function's JSON schema that every template reads."""

    name: Annotated[str, Field(min_length=1)]


class ToolSchema(TypedDict):
    """A function that the target may call."""

    function: NamedFunction


class PromptInputs(TypedDict):
    """What a row gives the template besides the messages."""

    tools: NotRequired[list[ToolSchema] | None]
    chat_template_kwargs: NotRequired[Json | None]


def parse_row(row: Json) -> Prompt | None:
    """Reads a row of any format above; None if it has none of them, or no user turn.

    Assistant turns before the first user turn are left out: no template renders them.
    """
    try:
        inputs = _inputs(row)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    prompt = _parse_messages(row, inputs)
    if prompt is None or "text" in prompt:
        return prompt
    return {**prompt, **inputs}


def _inputs(row: Json) -> Json:
    """tools and chat_template_kwargs of a row, those that it has. Raises ValueError, TypeError,
    KeyError.
    """
    kwargs = row.get("chat_template_kwargs")
    if isinstance(kwargs, str) and kwargs.strip():
        kwargs = parse_json(kwargs)
    if kwargs and not isinstance(kwargs, dict):
        raise TypeError
    found = {
        "tools": read_tools(row.get("tools") or row.get("functions")),
        "chat_template_kwargs": kwargs,
    }
    return {name: value for name, value in found.items() if value}


def _parse_messages(row: Json, inputs: Json) -> Prompt | None:
    """The messages of a row, or its text. Tools that the system turn lists are added to `inputs`."""
    if isinstance(row.get("turns"), list):
        return _prompt([_message("user", turn) for turn in row["turns"]])
    for key in _CONVERSATIONS:
        if isinstance(row.get(key), list):
            if _filled(row.get("system")):
                system = [_message("system", row["system"])]
            else:
                system = []
            turns = [*system, *(_turn(turn) for turn in row[key])]
            if turns:
                first = turns[0]
            else:
                first = None
            if (
                first
                and first["role"] == "system"
                and (listed := tools_in_system(first["content"]))
            ):
                inputs.setdefault("tools", listed)  # the template lists them instead
                turns = turns[1:]
            names = [tool["function"]["name"] for tool in inputs.get("tools", ())]
            return _prompt([_with_calls(turn, names) if turn else None for turn in turns])
    for key in _QUESTIONS:
        if _filled(row.get(key)):
            question = row[key] + (f"\n\n{row['input']}" if _filled(row.get("input")) else "")
            answers = [
                _message("assistant", row[name]) for name in _ANSWERS if _filled(row.get(name))
            ][:1]
            if not answers and "tools" in inputs and row.get("answers"):
                answers = [_calls_message(row["answers"])]
            return _prompt([_message("user", question), *answers])
    if _filled(row.get("text")):
        return {"text": row["text"]}
    return None


def row_id(value: object, where: str) -> str:
    """A row's id as text. Raises UserError, which begins with `where`: neither text nor a whole
    number.
    """
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise UserError(
            f"{where}: id={value!r} must be text or a whole number; drafttrain prompts --source file writes ids"
        )
    return str(value)


def are_messages(value: object) -> bool:
    """Whether a value is a list of {"role": text, "content": text, ...}, as chat templates read."""
    return isinstance(value, list) and all(
        isinstance(m, dict)
        and isinstance(m.get("role"), str)
        and (isinstance(m.get("content"), str) or (m.get("content") is None and _says_more(m)))
        for m in value
    )


def checked_messages(row: Json, where: str) -> list[Json]:
    """The messages of a row of prompts, with calls and reasoning in one form; see `plain_message`.

    Raises:
        UserError: messages, tools or chat_template_kwargs of another form.
    """
    if not are_messages(row.get("messages")):
        raise UserError(
            f'{where}: needs "text", or "messages" as a list of {{"role": ..., "content": ...}}'
        )
    check_json(row["messages"], f"{where}: messages", _FIX, list[PlainMessage])
    check_json(
        {key: row.get(key) for key in PromptInputs.__annotations__},
        where,
        _FIX,
        PromptInputs,
    )
    try:
        return [plain_message(message) for message in row["messages"]]
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{where}: the arguments of a tool call are no JSON object ({error}); {_FIX}"
        ) from error


def plain_message(message: Mapping[str, object]) -> Json:
    """A message with the arguments of its calls as objects and its reasoning under
    `reasoning_content`, without other keys.

    Raises ValueError or TypeError: arguments that are no JSON object.
    """
    made: Json = {"role": message["role"], "content": message.get("content") or ""}
    if reasoning := next((message[key] for key in REASONING if message.get(key)), None):
        made["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        made["tool_calls"] = read_calls(calls)
    return made | {
        key: message[key] for key in ("tool_call_id", "name") if isinstance(message.get(key), str)
    }


def prompt_texts(prompt: Prompt) -> list[str]:
    """The user turns, or the plain text."""
    if "text" in prompt:
        return [prompt["text"]]
    return [message["content"] for message in prompt["messages"] if message["role"] == "user"]


def _filled(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _says_more(message: Mapping[str, object]) -> bool:
    return any(message.get(key) for key in ("tool_calls", *REASONING))


def _message(role: str, content: object) -> Json | None:
    """A message, or None if the content is not text. Text parts of a multi-part content are joined."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        text = [part for part in parts if isinstance(part, str)]
        if len(text) == len(parts):
            content = "\n".join(text)
        else:
            content = None
    if isinstance(content, str) and content.strip():
        return {"role": role, "content": content}
    return None


def _calls_message(calls: object) -> Json | None:
    """An assistant's message of nothing but calls, or None if they cannot be read."""
    try:
        return {"role": "assistant", "content": "", "tool_calls": read_calls(calls)}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _turn(turn: object) -> Json | None:
    """A message of a conversation, or None if it cannot be read."""
    if not isinstance(turn, dict):
        return None
    role = _ROLES.get(str(turn.get("role", turn.get("from"))).lower())
    content = turn.get("content", turn.get("value"))
    if role == "call":
        return _calls_message(content)
    if role == "tool":
        named = {
            key: turn[key] for key in ("tool_call_id", "name") if isinstance(turn.get(key), str)
        }
        if content is not None:
            return {"role": role, "content": plain_result(content), **named}
        return None
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else [])
    reasoning = next((turn[key] for key in REASONING if _filled(turn.get(key))), "")
    if role != "assistant" or not (calls or reasoning):
        if role:
            return _message(role, content)
        return None
    made = _message(role, content) or {"role": role, "content": ""}
    if calls:
        called = _calls_message(calls)
        return called and {
            **made,
            **({"reasoning_content": reasoning} if reasoning else {}),
            **called,
            "content": made["content"],
        }
    return {**made, "reasoning_content": reasoning}


def _with_calls(message: Json, names: Sequence[str]) -> Json:
    """An assistant's message whose text holds calls, in Hermes' or ToolACE's form, with them as
    tool_calls.
    """
    if (
        message["role"] != "assistant" or "tool_calls" in message or not names
    ):  # without tools the text is all there is
        return message
    content, calls = calls_in(message["content"], names)
    if calls:
        return {**message, "content": content, "tool_calls": calls}
    return message


def _prompt(messages: Sequence[Json | None]) -> Prompt | None:
    """A prompt of these messages; None if one could not be read or none is a user's."""
    readable = [message for message in messages if message is not None]
    first = next((i for i, message in enumerate(readable) if message["role"] == "user"), None)
    if len(readable) < len(messages) or first is None:
        return None
    return {
        "messages": [m for m in readable[:first] if m["role"] == "system"][:1] + readable[first:]
    }
