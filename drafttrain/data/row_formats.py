"""Reads the formats in which prompts and conversations are published.

FastChat question   {"turns": ["...", "..."]}                              user turns without answers
ShareGPT            {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}
OpenAI              {"messages": [{"role": "user", "content": "..."}, ...]}
instruction         {"instruction": "...", "input": "...", "output": "..."}, {"prompt": "...", "response": "..."}
plain text          {"text": "..."}                                        a beginning to continue

Images are parts of a message's content, or stand in the row's column `image` or `images`;
data/image_parts.py reads them.

Tools come as {"tools": [...]} with OpenAI's tool_calls or ShareGPT's function_call and observation
turns; data/tool_formats.py reads them and xLAM's, ToolACE's and Hermes' forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from drafttrain.data.image_parts import (
    content_text,
    place_images,
    read_parts,
    row_images,
    sources_in,
)
from drafttrain.data.tool_formats import (
    calls_in,
    plain_result,
    read_calls,
    read_tools,
    tools_in_system,
)
from drafttrain.errors import UserError
from drafttrain.files import Json, check_json, parse_json
from drafttrain.images import BadPicture

# {"messages": [...]} with "tools" and "chat_template_kwargs" where the row has them, or {"text":
# str}
Prompt = Json
# Names under which data and servers keep reasoning.
REASONING = ("reasoning_content", "reasoning", "thinking")

_ROLES = {
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "function_call": "call",  # an assistant's turn that is nothing but calls
    "tool_call": "call",
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
    content: NotRequired[str | list[Json] | None]
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

    Raises:
        BadPicture: images without a place or places without an image, or audio and video.
    """
    try:
        inputs = _inputs(row)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    prompt = _parse_messages(row, inputs)
    images = row_images(row)
    if prompt is None:
        return None
    if "text" in prompt:
        if images:
            raise BadPicture("image: without a message", "plain text has no place for an image")
        return prompt
    return {"messages": place_images(prompt["messages"], images), **inputs}


def _inputs(row: Json) -> Json:
    """The tools and chat_template_kwargs of a row, if it has them.

    Raises ValueError, TypeError, KeyError.
    """
    kwargs = row.get("chat_template_kwargs")
    if isinstance(kwargs, str) and kwargs.strip():
        kwargs = parse_json(kwargs)
    if kwargs and not isinstance(kwargs, dict):
        raise TypeError
    listed = row.get("tools")
    if not listed:
        listed = row.get("functions")
    tools = read_tools(listed)

    inputs: Json = {}
    if tools:
        inputs["tools"] = tools
    if kwargs:
        inputs["chat_template_kwargs"] = kwargs
    return inputs


def _parse_messages(row: Json, inputs: Json) -> Prompt | None:
    """The messages of a row, or its text. Tools that the system turn lists are added to `inputs`."""
    if isinstance(row.get("turns"), list):
        return _prompt([_message("user", turn) for turn in row["turns"]])
    for key in _CONVERSATIONS:
        if isinstance(row.get(key), list):
            return _conversation(row[key], row.get("system"), inputs)
    for key in _QUESTIONS:
        if _is_filled(row.get(key)):
            return _question(row, row[key], inputs)
    if _is_filled(row.get("text")):
        return {"text": row["text"]}
    return None


def _conversation(given: Sequence[object], system: object, inputs: Json) -> Prompt | None:
    """A prompt of ShareGPT's or OpenAI's turns. system: the system turn that stands beside them."""
    turns = [_turn(turn) for turn in given]
    if _is_filled(system):
        turns.insert(0, _message("system", system))

    # Where the system turn lists the tools, the template lists them instead.
    if turns and turns[0] and turns[0]["role"] == "system":
        listed = tools_in_system(content_text(turns[0]["content"]))
        if listed:
            inputs.setdefault("tools", listed)
            turns = turns[1:]

    names = [tool["function"]["name"] for tool in inputs.get("tools", ())]
    # Answers may hold calls as text.
    for number, turn in enumerate(turns):
        if turn is not None:
            turns[number] = _with_calls(turn, names)
    return _prompt(turns)


def _question(row: Json, question: str, inputs: Json) -> Prompt | None:
    """A prompt of one question, with its answer if the row has one."""
    if _is_filled(row.get("input")):
        question += f"\n\n{row['input']}"
    messages = [_message("user", question)]
    for key in _ANSWERS:
        if _is_filled(row.get(key)):
            messages.append(_message("assistant", row[key]))
            return _prompt(messages)
    if "tools" in inputs and row.get("answers"):
        messages.append(_calls_message(row["answers"]))
    return _prompt(messages)


def row_id(value: object, where: str) -> str:
    """A row's id as text.

    Raises UserError, which begins with `where`: neither text nor a whole number.
    """
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise UserError(
            f"{where}: id={value!r} must be text or a whole number; drafttrain prompts --source file writes ids"
        )
    return str(value)


def are_messages(value: object) -> bool:
    """Whether a value is a list of {"role": text, "content": text or parts, ...}."""
    if not isinstance(value, list):
        return False
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return False
        content = message.get("content")
        # Content may be missing beside calls and reasoning.
        if content is None and not any(message.get(key) for key in ("tool_calls", *REASONING)):
            return False
        if content is not None and not isinstance(content, str | list):
            return False
    return True


def checked_messages(row: Json, where: str) -> list[Json]:
    """The messages of a row of prompts, with calls, reasoning and parts in one form; see
    `plain_message`.

    Raises:
        UserError: messages, parts, tools or chat_template_kwargs of another form.
    """
    if not are_messages(row.get("messages")):
        raise UserError(
            f'{where}: needs "text", or "messages" as a list of {{"role": ..., "content": ...}}'
        )
    check_json(row["messages"], f"{where}: messages", _FIX, list[PlainMessage])
    inputs = {key: row.get(key) for key in PromptInputs.__annotations__}
    check_json(inputs, where, _FIX, PromptInputs)
    try:
        messages = [_with_parts(plain_message(message), where) for message in row["messages"]]
        return place_images(messages, row_images(row))
    except BadPicture as bad:
        raise UserError(f"{where}: {bad}") from bad
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{where}: the arguments of a tool call are no JSON object ({error}); {_FIX}"
        ) from error


def _with_parts(message: Json, where: str) -> Json:
    """The message with the parts of its content in the stored form; texts alone become one text.

    Raises UserError: a part of an unknown form, or an image that is not the user's. BadPicture.
    """
    content = message["content"]
    if isinstance(content, str):
        return message
    made = _message(message["role"], content)
    if made is None:
        raise UserError(f"{where}: content has a part that is neither text nor an image; {_FIX}")
    return {**message, "content": made["content"]}


def plain_message(message: Mapping[str, object]) -> Json:
    """A message with the arguments of its calls as objects, without keys that templates do not read.

    Its reasoning stands under `reasoning_content`.

    Raises ValueError or TypeError: arguments that are no JSON object.
    """
    made: Json = {"role": message["role"], "content": ""}
    if message.get("content"):
        made["content"] = message["content"]
    for key in reversed(REASONING):  # the first of several counts
        if message.get(key):
            made["reasoning_content"] = message[key]
    if message.get("tool_calls"):
        made["tool_calls"] = read_calls(message["tool_calls"])
    return {**made, **_named(message)}


def _named(message: Mapping[str, object]) -> Json:
    """The keys that tie a tool's result to its call."""
    named = {}
    for key in ("tool_call_id", "name"):
        if isinstance(message.get(key), str):
            named[key] = message[key]
    return named


def prompt_texts(prompt: Prompt) -> list[str]:
    """The user turns, or the plain text."""
    if "text" in prompt:
        return [prompt["text"]]
    asked = [message for message in prompt["messages"] if message["role"] == "user"]
    return [content_text(message["content"]) for message in asked]


def _is_filled(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _message(role: str, content: object) -> Json | None:
    """A message, or None if the content is neither text nor images. Parts of text alone are joined.

    Raises BadPicture: audio, video, or an image that is not in a turn of the user or the system.
    """
    if isinstance(content, list):
        parts = read_parts(content)
        if parts is None:
            return None
        if sources_in([{"content": parts}]):
            if role not in ("user", "system"):
                raise BadPicture("image: not in a prompt", f"a message of the role {role} has one")
            return {"role": role, "content": parts}
        content = content_text(parts)
    if _is_filled(content):
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
    # ShareGPT says "from" and "value".
    role = _ROLES.get(str(turn.get("role", turn.get("from"))).lower())
    content = turn.get("content", turn.get("value"))
    if role == "call":
        return _calls_message(content)
    if role == "tool":
        if content is None:
            return None
        if isinstance(content, list):
            _message(role, content)  # refuses images
        return {"role": role, "content": plain_result(content), **_named(turn)}
    if role is None:
        return None
    if role != "assistant":
        return _message(role, content)

    message = _message(role, content)
    calls = turn.get("tool_calls")
    if not calls and turn.get("function_call"):
        calls = [turn["function_call"]]
    reasoning = ""
    for key in REASONING:
        if not reasoning and _is_filled(turn.get(key)):
            reasoning = turn[key]
    if not calls and not reasoning:
        return message
    if message is None:
        message = {"role": role, "content": ""}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        called = _calls_message(calls)
        if called is None:
            return None
        message["tool_calls"] = called["tool_calls"]
    return message


def _with_calls(message: Json, names: Sequence[str]) -> Json:
    """An assistant's message with the calls in its text, in Hermes' or ToolACE's form, as tool_calls."""
    if message["role"] != "assistant" or "tool_calls" in message:
        return message
    if not names:  # without tools the text is all there is
        return message
    content, calls = calls_in(message["content"], names)
    if calls:
        return {**message, "content": content, "tool_calls": calls}
    return message


def _prompt(messages: Sequence[Json | None]) -> Prompt | None:
    """A prompt of these messages; None if one could not be read or none is a user's."""
    kept = []
    system = None
    asked = False
    for message in messages:
        if message is None:
            return None
        if message["role"] == "user":
            asked = True
        if asked:
            kept.append(message)
        elif message["role"] == "system" and system is None:
            system = message
    if not asked:
        return None
    if system is not None:
        kept.insert(0, system)
    return {"messages": kept}
