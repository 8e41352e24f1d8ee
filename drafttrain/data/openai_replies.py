"""Replies of servers with OpenAI's API: their form, and chat answers as the target's text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict, TypeVar

from drafttrain.data.answers import AnswerFormat, answer_format, rendered_answer
from drafttrain.data.chat import Message, TemplateRefuses, decode
from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.data.failures import BadReply
from drafttrain.data.row_formats import REASONING, ToolCall, plain_message
from drafttrain.files import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# pydantic keeps an error of 2 KB for each bad item of a list, of which a server may send millions.
T = TypeVar("T")
_Items = Annotated[list[T], Field(fail_fast=True)]
# After another reason (content_filter, abort) the text is not the target's.
Finish = Literal["stop", "length"]


class _Message(TypedDict):
    content: NotRequired[str | None]
    # What parsers took out of the content; vLLM calls the second one `reasoning`.
    tool_calls: NotRequired[_Items[ToolCall] | None]
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]


class _ChatChoice(TypedDict):
    message: _Message
    # No tool_choice is sent, so calls are the target's text too.
    finish_reason: Finish | Literal["tool_calls"]
    stop_reason: NotRequired[int | str | None]


class _TextChoice(TypedDict):
    text: str
    finish_reason: Finish


class _IdsChoice(TypedDict):
    token_ids: _Items[int]
    prompt_token_ids: _Items[int]
    finish_reason: Finish
    stop_reason: NotRequired[int | str | None]


class ChatReply(TypedDict):
    choices: Annotated[_Items[_ChatChoice], Field(min_length=1)]


class _ChatIdsChoice(_ChatChoice):
    token_ids: NotRequired[_Items[int] | None]


class ChatIdsReply(TypedDict):
    """A chat's reply to a request for token ids, which a server may ignore."""

    choices: Annotated[_Items[_ChatIdsChoice], Field(min_length=1)]
    prompt_token_ids: NotRequired[_Items[int] | None]


class TextReply(TypedDict):
    choices: Annotated[_Items[_TextChoice], Field(min_length=1)]


class IdsReply(TypedDict):
    choices: Annotated[_Items[_IdsChoice], Field(min_length=1)]
    kv_transfer_params: NotRequired[Json | None]  # of servers that hand out states


class ListedModel(TypedDict):
    id: str
    max_model_len: NotRequired[int | None]  # vLLM's name


class ModelList(TypedDict):
    """What a server answers to /v1/models."""

    data: Annotated[_Items[ListedModel], Field(min_length=1)]


def reassembled(
    renderer: ChatRenderer,
    it: Conversation,
    choice: Json,
    messages: Sequence[Message],
) -> tuple[str, str]:
    """The text that the target generated, and the token at its end.

    The token is '' where the server has stripped it, or a limit came first.

    Sets `it.reply`. The template writes reasoning and calls as the target does; content alone is
    the target's text.

    Args:
        choice: the server's. messages: of the request.

    Raises:
        BadReply: no content, or parts that the template does not write.
    """
    tokenizer = renderer.tokenizer
    message = choice["message"]
    complete = choice["finish_reason"] != "length"
    parsed = any(message.get(key) for key in ("tool_calls", *REASONING))
    if message.get("content") is None and not parsed:
        raise BadReply(
            "malformed", "choices.0.message.content=None: input should be a valid string"
        )
    try:
        reply = plain_message({"role": "assistant", **message})
    except (ValueError, TypeError) as error:
        raise BadReply(
            "malformed", f"the arguments of a tool call are no JSON object ({error})"
        ) from error
    has_parts = len(reply) > 2  # more than role and content
    if has_parts:  # parsers differ in what white space between the parts they keep
        reply["content"] = reply["content"].strip()
    it.reply = reply
    check_unicode(json.dumps(reply, ensure_ascii=False))

    reason = "tool calls" if "tool_calls" in reply else "reasoning"
    content: str = reply["content"]
    try:
        form = answer_format(tokenizer, it.inputs)
        # Nothing was taken out, so the content is what the target wrote.
        if not has_parts and _holds_reasoning(tokenizer, form, content, complete):
            return content, ""
        text, end = rendered_answer(
            tokenizer,
            messages,
            reply,
            it.inputs,
            renderer.stop_ids,
            complete,
        )
    except TemplateRefuses as error:
        raise BadReply(
            reason,
            f"the chat template does not write the {reason} that the server took out of the answer; "
            f"serve the target without a {reason} parser ({error})",
        ) from error
    if not complete:
        end = ""
    return text, end


def _holds_reasoning(
    tokenizer: PreTrainedTokenizerBase,
    form: AnswerFormat,
    content: str,
    complete: bool,
) -> bool:
    """Whether the content holds the reasoning too, or there is none."""
    if form.closing is None:
        return True
    opening = ""
    if form.opening is not None:
        opening = form.opening.strip()
    if opening:
        return content.lstrip().startswith(opening)
    return not complete or decode(tokenizer, [form.closing]) in content


def sent_message(message: Json) -> Json:
    """A message as OpenAI's API takes it: the arguments of calls as JSON text."""
    calls = []
    for i, call in enumerate(message.get("tool_calls", ())):
        key = call.get("id")
        if not key:
            key = f"call_{i}"
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        function = {**call["function"], "arguments": arguments}
        calls.append({**call, "id": key, "function": function})
    if calls:
        return {**message, "tool_calls": calls}
    return message


def check_unicode(text: str) -> None:
    """Raises BadReply: half of a surrogate pair, which is not text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadReply(
            "not Unicode", f"the answer holds half a surrogate pair at {error.start}"
        ) from error
