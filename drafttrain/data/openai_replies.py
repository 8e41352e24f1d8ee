"""Replies of servers with OpenAI's API: their form, and chat answers put together again from what
parsers took apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from drafttrain.data.answers import answer_format, rendered_answer
from drafttrain.data.chat import Message, TemplateRefuses, decode
from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.data.failures import BadReply
from drafttrain.data.row_formats import REASONING, ToolCall, plain_message
from drafttrain.files import Json

Finish = Literal[
    "stop", "length"
]  # after another one (content_filter, abort) the text is not the target's


class _Message(TypedDict):
    content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCall] | None]  # what a tool parser took out of the content
    reasoning_content: NotRequired[
        str | None
    ]  # which a parser took out of the content; vLLM: reasoning
    reasoning: NotRequired[str | None]


class _ChatChoice(TypedDict):
    message: _Message
    finish_reason: (
        Finish | Literal["tool_calls"]
    )  # no tool_choice is sent, so calls are the target's text too
    stop_reason: NotRequired[int | str | None]


class _TextChoice(TypedDict):
    text: str
    finish_reason: Finish


class _IdsChoice(TypedDict):
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: Finish
    stop_reason: NotRequired[int | str | None]


class ChatReply(TypedDict):
    choices: Annotated[list[_ChatChoice], Field(min_length=1)]


class TextReply(TypedDict):
    choices: Annotated[list[_TextChoice], Field(min_length=1)]


class IdsReply(TypedDict):
    choices: Annotated[list[_IdsChoice], Field(min_length=1)]
    kv_transfer_params: NotRequired[Json | None]  # of servers that hand out states


class ListedModel(TypedDict):
    id: str


class ModelList(TypedDict):
    """What a server answers to /v1/models."""

    data: Annotated[list[ListedModel], Field(min_length=1)]


def reassembled(
    renderer: ChatRenderer,
    it: Conversation,
    choice: Json,
    messages: Sequence[Message],
) -> tuple[str, str]:
    """The text that the target generated, and the token at its end; '' where the server has
    stripped it, or a limit came first.

    Sets `it.reply`. The template writes reasoning and calls as the target does; content alone is
    the target's text.

    Args:
        choice: the server's. messages: of the request.

    Raises:
        BadReply: no content, or parts that the template does not write.
    """
    tokenizer = renderer.tokenizer
    message = choice["message"]
    if choice["finish_reason"] == "length":
        finish = "length"
    else:
        finish = "stop"
    if message.get("content") is None and not any(
        message.get(key) for key in ("tool_calls", *REASONING)
    ):
        raise BadReply(
            "malformed", "choices.0.message.content=None: input should be a valid string"
        )
    try:
        it.reply = plain_message({"role": "assistant", **message})
        # More than role and content: parsers differ in what white space between the parts they
        # keep.
        if len(it.reply) > 2:
            it.reply["content"] = it.reply["content"].strip()
    except (ValueError, TypeError) as error:
        raise BadReply(
            "malformed", f"the arguments of a tool call are no JSON object ({error})"
        ) from error
    check_unicode(json.dumps(it.reply, ensure_ascii=False))
    reason = "tool calls" if "tool_calls" in it.reply else "reasoning"
    content = it.reply["content"]
    try:
        form = answer_format(tokenizer, it.inputs)
        whole = (
            form.closing is None
        )  # whether the content holds the reasoning too, or there is none
        if form.closing is not None and (opening := (form.opening or "").strip()):
            whole = content.lstrip().startswith(opening)
        elif form.closing is not None:
            whole = decode(tokenizer, [form.closing]) in content or finish == "length"
        if whole and len(it.reply) == 2:  # role and content
            return content, ""
        text, end = rendered_answer(
            tokenizer,
            messages,
            it.reply,
            it.inputs,
            renderer.stop_ids,
            finish == "stop",
        )
    except TemplateRefuses as error:
        raise BadReply(reason, f"the chat template does not write the {reason} that the server took out of the answer; "
                       f"serve the target without a {reason} parser ({error})") from error  # fmt: skip
    return text, end if finish == "stop" else ""


def sent_message(message: Json) -> Json:
    """A message as OpenAI's API takes it: the arguments of calls as JSON text."""
    calls = [
        {**call, "id": call.get("id") or f"call_{i}",
         "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        for i, call in enumerate(message.get("tool_calls", ()))
    ]  # fmt: skip
    if calls:
        return {**message, "tool_calls": calls}
    return message


def check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadReply(
            "not Unicode", f"the answer holds half a surrogate pair at {error.start}"
        ) from error
