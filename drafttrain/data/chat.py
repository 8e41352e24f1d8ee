"""Chats and texts as a target's token ids: all use of chat templates.

A tokenizer without a template belongs to a pretrained-only model, which continues the turns as a
document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from drafttrain.errors import UserError, first_line
from drafttrain.files import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# {"role", "content"}; of an assistant also {"tool_calls", "reasoning_content"}, of a tool
# {"tool_call_id", "name"}.
Message = Mapping[str, Any]
_MARKER = "drafttrain marks this place"  # plain words that no template strips or rewrites
MARKED_NAME = "drafttrain_marks_a_name"  # the same where a template needs the name of a function
_RESERVED = {"messages", "tools", "add_generation_prompt"}  # what every template is given


@dataclass(frozen=True)
class ChatInputs:
    """What a chat template reads besides the messages.

    Attributes:
        tools: JSON schemas of the functions that the target may call, as {"type": "function",
            "function": {...}}.
        kwargs: the template's own variables, such as enable_thinking, reasoning_effort or
            documents.
    """

    tools: Sequence[Json] = ()
    kwargs: Json = field(default_factory=dict)

    @staticmethod
    def of(row: Json, defaults: Json | None = None) -> ChatInputs:
        """Those of a row of prompts. defaults: chat_template_kwargs where the row has none of that
        name.
        """
        return ChatInputs(
            tuple(row.get("tools") or ()),
            {**(defaults or {}), **(row.get("chat_template_kwargs") or {})},
        )


NO_INPUTS = ChatInputs()


class TemplateRefuses(UserError):
    """The chat template cannot render a conversation, or would leave out part of it."""


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    generation: bool = False,
    inputs: ChatInputs = NO_INPUTS,
) -> str:
    """The conversation as text, markers included; without a chat template, blank lines join the
    turns.

    Args:
        messages: turns in order. generation: end where the assistant's next turn begins.

    Raises:
        TemplateRefuses: the template rejects these messages (roles that do not alternate, no system
            role, ...), or ignores the tools, a variable or the calls.
    """
    if not has_template(tokenizer):
        if inputs.tools or inputs.kwargs or any(message.get("tool_calls") for message in messages):
            raise TemplateRefuses(
                "tools and chat_template_kwargs need a target with a chat template"
            )
        text = "\n\n".join(message.get("content") or "" for message in messages)
        if generation:
            return text + "\n\n"
        return text
    template = tokenizer.get_chat_template(tools=list(inputs.tools) or None)
    check_inputs(template, inputs)
    calls = any(message.get("tool_calls") for message in messages)
    as_text = calls and _wants_text(tokenizer, template)
    return _render(
        tokenizer,
        [_for_template(message, as_text) for message in messages],
        generation,
        inputs,
    )


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    generation: bool,
    inputs: ChatInputs,
) -> str:
    options: Json = {
        "tools": list(inputs.tools) or None,
        "tokenize": False,
        "add_generation_prompt": generation,
    }
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                **inputs.kwargs,
                **options,
            )
        )
    except (
        Exception
    ) as error:  # jinja's TemplateError, but also TypeError and KeyError from inside the template
        roles = ", ".join(str(message.get("role")) for message in messages)
        problem = f"the chat template refuses a conversation with the roles [{roles}]: {first_line(error)}"
        raise TemplateRefuses(problem) from error


def _for_template(message: Message, as_text: bool) -> Message:
    """A message with the arguments of its calls as JSON text, where the template wants that, and no
    empty fields.
    """
    made = {key: value for key, value in message.items() if value or key in ("role", "content")}
    made["content"] = message.get("content") or ""
    if as_text and "tool_calls" in made:
        calls = [call["function"] for call in made["tool_calls"]]
        texts = [
            {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
            for call in calls
        ]
        made["tool_calls"] = [
            {**call, "function": text} for call, text in zip(made["tool_calls"], texts, strict=True)
        ]
    return made


@lru_cache(maxsize=64)
def template_variables(template: str) -> frozenset[str]:
    """The variables that a chat template reads, without those that every template is given."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment
    found = meta.find_undeclared_variables(environment.parse(template)) - set(environment.globals)
    return frozenset(name for name in found if not name.endswith("_token"))


def check_inputs(template: str, inputs: ChatInputs) -> None:
    """Raises TemplateRefuses: tools or a variable that the chat template does not read, and would
    ignore in silence.
    """
    if inputs.tools or inputs.kwargs:
        known = template_variables(template)
    else:
        known = frozenset[str]()
    named = ", ".join(sorted(known - _RESERVED))
    if inputs.tools and "tools" not in known:
        more = ""
        if named:
            more = f", or give them as one of its variables ({named}) in chat_template_kwargs"
        raise TemplateRefuses(f"the chat template does not read `tools`; drop them{more}")
    if unread := [name for name in inputs.kwargs if name not in known - _RESERVED]:
        raise TemplateRefuses(
            f"chat_template_kwargs: {unread[0]!r} is no variable of the chat template; it has {named or 'none'}"
        )


@lru_cache(maxsize=16)
def _wants_text(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether a template reads the arguments of calls as JSON text, which it writes as it is,
    instead of as an object.

    Raises:
        TemplateRefuses: it writes no calls.
    """
    refused = None
    for as_text in (False, True):
        for key in (
            "marks000{}",
            f"functions.{MARKED_NAME}:{{}}",
        ):  # forms that templates ask of a call's id
            turns = [
                {"role": "user", "content": "hello"},
                _for_template(marked_calls(key, 1), as_text),
            ]
            try:
                text = _render(tokenizer, turns, False, NO_INPUTS)
            except TemplateRefuses as error:
                refused = error
                continue
            if (
                MARKED_NAME in text and "{'marked'" not in text
            ):  # Python's form of a dict is no JSON
                return as_text
    raise TemplateRefuses(
        "the chat template writes no tool calls; choose a target that calls tools"
    ) from refused


def marked_calls(key: str, count: int) -> Json:
    """An assistant's message that calls a function of a marked name. key: the calls' ids, with {}
    for their number.
    """
    function = {"name": MARKED_NAME, "arguments": {"marked": "value"}}
    calls = [
        {"type": "function", "id": key.format(number), "function": function}
        for number in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    inputs: ChatInputs = NO_INPUTS,
) -> list[int]:
    """Token ids of a conversation up to where the assistant begins to answer; BOS exactly once.
    Raises as `render_text`.
    """
    return encode(tokenizer, render_text(tokenizer, messages, generation=True, inputs=inputs))


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message],
    inputs: ChatInputs = NO_INPUTS,
) -> list[int]:
    """Token ids of a prompt that the target continues. Raises as `render_text`.

    Text gets the special tokens that the tokenizer adds. Messages are rendered up to where the
    assistant answers (without a template: joined by blank lines, as text).
    """
    if not isinstance(prompt, str) and has_template(tokenizer):
        return render_prompt(tokenizer, prompt, inputs)
    if isinstance(prompt, str):
        text = prompt
    else:
        text = render_text(tokenizer, prompt, inputs=inputs)
    return list(tokenizer(text)["input_ids"])


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of text that contains its special tokens already; adds none."""
    if text:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return []


def text_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of plain text to continue, with BOS in front (exactly once) if the tokenizer is one
    that adds it.
    """
    ids = text_ids(tokenizer, text)
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and bos in tokenizer("")["input_ids"]
    if adds_bos and ids[:1] != [bos]:
        return [bos, *ids]
    return ids


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of rendered text. A chat template writes BOS itself where the model expects it."""
    if has_template(tokenizer):
        return text_ids(tokenizer, text)
    return text_prompt(tokenizer, text)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The exact text of token ids, special tokens included."""
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


# -- what a template puts around a turn ------------------------------------------------------------


@dataclass(frozen=True)
class TurnFrame:
    """The tokens around a user's first turn."""

    prefix_ids: list[int]  # before the content
    stop_ids: frozenset[int]  # special tokens that end the turn
    ending: (
        str  # text after the content, for templates that end a turn with plain text; '' for others
    )


def user_frame(tokenizer: PreTrainedTokenizerBase) -> TurnFrame | None:
    """Derives the frame of a user's turn by rendering a marker as its content; None if the template
    hides either.
    """
    messages = [{"role": "user", "content": _MARKER}]
    before, found, after = render_text(tokenizer, messages, generation=True).partition(_MARKER)
    prefix = text_ids(tokenizer, before)
    stops = leading_special(tokenizer, after)
    if found and prefix:
        return TurnFrame(prefix, frozenset(stops), "" if stops else after.strip())
    return None


def closing_token(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The special token that the template writes after an assistant's turn; empty if it writes
    none.

    Where a turn has no end of its own, the token that begins the next one.
    """
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _MARKER}]
    for following in ([], messages[:1]):
        text = render_text(tokenizer, [*messages, *following]).partition(_MARKER)[2]
        if found := leading_special(tokenizer, text.lstrip()):
            return found
    return set()


def turn_glue(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Sequence[Message]],
    stop_id: int,
    answers: Sequence[str] = (),
    inputs: ChatInputs = NO_INPUTS,
) -> list[int] | None:
    """Token ids between a response and the next one: the end of its turn, the next user turn, the
    assistant's header.

    Args:
        turns: the messages before each response; the last entry is the one after the glue's
            response. At least two.
        stop_id: the last token of the response before the glue, which the glue does not repeat.
        answers: texts of the responses, without their stop tokens.

    Returns:
        The ids, or None if the template rewrites earlier turns, for example without the reasoning
        in an answer, or closes turns
        with another token: the tokens so far then differ from what the target would read.
    """

    def rendered(texts: Sequence[str]) -> str:
        spoken = [
            [*turn, {"role": "assistant", "content": text}]
            for turn, text in zip(turns, texts, strict=False)
        ]
        return render_text(
            tokenizer,
            [*(m for turn in spoken for m in turn), *turns[len(spoken)]],
            True,
            inputs,
        )

    marks = [f"{_MARKER} {i}." for i in range(len(turns) - 1)]
    history, found, after = rendered(marks).partition(marks[-1])
    said = ""
    if answers:
        said = rendered(answers)
    at = 0
    for answer in answers:
        if at >= 0:
            at = said.find(answer.strip(), at)
    ids = text_ids(tokenizer, after.lstrip())  # begins with the token that closes the response
    kept = found and at >= 0 and history == rendered(marks[:-1])
    if kept and ids[:1] == [stop_id] and len(ids) > 1:
        return ids[1:]
    return None


def leading_special(tokenizer: PreTrainedTokenizerBase, text: str) -> set[int]:
    """The first token of a text, if it is a special or an added one."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return set(text_ids(tokenizer, text)[:1]) & special
