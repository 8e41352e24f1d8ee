"""Chats and texts as a target's token ids: all use of chat templates.

A tokenizer without a template belongs to a pretrained-only model, which continues the turns as a
document.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from drafttrain.data.image_parts import (
    Message,
    content_text,
    image_part,
    sources_in,
    text_part,
    with_images,
)
from drafttrain.data.template_bounds import bounded, environment
from drafttrain.errors import UserError, first_line
from drafttrain.files import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = "drafttrain marks this place"  # plain words that no template strips or rewrites
MARKED_NAME = "drafttrain_marks_a_name"  # the same where a template needs the name of a function
# Forms that templates ask of a call's id, with {} for its number.
CALL_IDS = ("marks000{}", f"functions.{MARKED_NAME}:{{}}")
_RESERVED = {"messages", "tools", "add_generation_prompt"}  # what every template is given


@dataclass(frozen=True)
class ChatInputs:
    """What a chat template reads besides the messages.

    Attributes:
        tools: JSON schemas of the functions that the target may call, as {"type": "function",
            "function": {...}}.
        kwargs: the template's own variables, such as enable_thinking, reasoning_effort or
            documents.
        template: the chat template itself, where it is not the tokenizer's: that of a processor
            of images; '' for the tokenizer's.
    """

    tools: Sequence[Json] = ()
    kwargs: Json = field(default_factory=dict)
    template: str = ""

    @staticmethod
    def of(row: Json, defaults: Json | None = None) -> ChatInputs:
        """The inputs of a row of prompts.

        Args:
            defaults: chat_template_kwargs for names that the row does not set.
        """
        tools = row.get("tools") or ()
        kwargs: Json = {}
        for given in (defaults, row.get("chat_template_kwargs")):
            if given:
                kwargs.update(given)
        return ChatInputs(tuple(tools), kwargs)

    @property
    def tool_list(self) -> list[Json] | None:
        """The tools as transformers takes them: None for none."""
        return list(self.tools) or None


NO_INPUTS = ChatInputs()


class TemplateRefuses(UserError):
    """The chat template cannot render a conversation, or would leave out part of it."""


def has_template(tokenizer: PreTrainedTokenizerBase, inputs: ChatInputs = NO_INPUTS) -> bool:
    """Whether the tokenizer has a chat template, or the inputs bring one."""
    return bool(inputs.template or getattr(tokenizer, "chat_template", None))


def template_of(tokenizer: PreTrainedTokenizerBase, inputs: ChatInputs) -> str:
    """The chat template under these inputs."""
    if inputs.template:
        return inputs.template
    found: str = tokenizer.get_chat_template(tools=inputs.tool_list)
    return found


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    generation: bool = False,
    inputs: ChatInputs = NO_INPUTS,
) -> str:
    """The conversation as text, markers included.

    Without a chat template, blank lines join the turns.

    Args:
        messages: turns in order. generation: end where the assistant's next turn begins.

    Raises:
        TemplateRefuses: the template rejects these messages (roles that do not alternate, no system
            role, ...), or ignores the tools, a variable or the calls.
    """
    calls = any(message.get("tool_calls") for message in messages)
    if not has_template(tokenizer, inputs):
        if inputs.tools or inputs.kwargs or calls:
            raise TemplateRefuses(
                "tools and chat_template_kwargs need a target with a chat template"
            )
        if sources_in(messages):
            raise TemplateRefuses("images need a target with a chat template")
        text = "\n\n".join(content_text(message.get("content")) for message in messages)
        if generation:
            return text + "\n\n"
        return text

    template = template_of(tokenizer, inputs)
    check_inputs(template, inputs)
    as_text = False
    if calls:
        as_text = _wants_text(tokenizer, template)
    readable: Sequence[Message] = [_for_template(message, as_text) for message in messages]
    if _wants_parts(tokenizer, template):
        readable = [_in_parts(message) for message in readable]
    if sources_in(messages):
        _check_texts(tokenizer, template, messages)
        readable = with_images(readable, lambda _: image_part("image"))
    return _render(tokenizer, readable, generation, inputs)


@lru_cache(maxsize=64)
def _wants_parts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether a template reads text in parts only, and would leave out a plain string."""
    message: Json = {"role": "user", "content": _MARKER}
    bare = ChatInputs(template=template)
    try:
        if _MARKER in _render(tokenizer, [message], True, bare):
            return False
        return _MARKER in _render(tokenizer, [_in_parts(message)], True, bare)
    except TemplateRefuses:
        return False


def _in_parts(message: Message) -> Message:
    """The message with its text as a part."""
    if isinstance(message["content"], str):
        return {**message, "content": [text_part(message["content"])]}
    return message


@lru_cache(maxsize=16)
def _image_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> list[str]:
    """The added tokens that a template writes for an image.

    Raises TemplateRefuses: it writes nothing, or reads no parts.
    """
    texts = []
    for parts in ([text_part(_MARKER)], [image_part("image"), text_part(_MARKER)]):
        asked = [{"role": "user", "content": parts}]
        texts.append(_render(tokenizer, asked, True, ChatInputs(template=template)))
    plain, seen = texts
    if seen == plain:
        raise TemplateRefuses("the chat template writes no images; choose a target that reads them")
    found = []
    for token in tokenizer.get_added_vocab():
        # Line breaks may be added tokens too.
        if token.strip() and seen.count(token) > plain.count(token):
            found.append(token)
    return found


def _check_texts(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: Sequence[Message]
) -> None:
    """Checks that no text of messages with images reads as an image. Raises TemplateRefuses."""
    for token in _image_tokens(tokenizer, template):
        for message in messages:
            if token in content_text(message.get("content")):
                raise TemplateRefuses(
                    f"the text of a message holds {token!r}, which stands for an image; drop it"
                )


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    generation: bool,
    inputs: ChatInputs,
) -> str:
    options: Json = {
        "tools": inputs.tool_list,
        "tokenize": False,
        "add_generation_prompt": generation,
    }
    if inputs.template:
        options["chat_template"] = inputs.template
    plain = [dict(message) for message in messages]
    try:
        with bounded(plain, options, inputs.kwargs):
            text = tokenizer.apply_chat_template(plain, **inputs.kwargs, **options)
    # jinja's TemplateError, but also TypeError and KeyError from inside the template.
    except Exception as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        problem = f"the chat template refuses a conversation with the roles [{roles}]: {first_line(error)}"
        raise TemplateRefuses(problem) from error
    return str(text)


def _for_template(message: Message, as_text: bool) -> Message:
    """A message without empty fields, and with the arguments of its calls as the template reads them.

    Args:
        as_text: write them as JSON text.
    """
    made: Json = {}
    for key, value in message.items():
        if value or key in ("role", "content"):
            made[key] = value
    # Templates join the content with other text, which None would break.
    made["content"] = message.get("content") or ""
    if not as_text or "tool_calls" not in made:
        return made

    calls = []
    for call in made["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    made["tool_calls"] = calls
    return made


@lru_cache(maxsize=64)
def template_variables(template: str) -> frozenset[str]:
    """The variables that a chat template reads, without those that every template is given."""
    from jinja2 import meta

    made = environment()
    # A template names special tokens as bos_token, eos_token, ...
    found = meta.find_undeclared_variables(made.parse(template)) - set(made.globals)
    return frozenset(name for name in found if not name.endswith("_token"))


def check_inputs(template: str, inputs: ChatInputs) -> None:
    """Checks that the chat template reads the tools and variables.

    Raises TemplateRefuses: it would ignore one in silence.
    """
    if not inputs.tools and not inputs.kwargs:
        return
    known = template_variables(template)
    own = known - _RESERVED
    named = ", ".join(sorted(own))
    if inputs.tools and "tools" not in known:
        more = ""
        if named:
            more = f", or give them as one of its variables ({named}) in chat_template_kwargs"
        raise TemplateRefuses(f"the chat template does not read `tools`; drop them{more}")
    for name in inputs.kwargs:
        if name not in own:
            raise TemplateRefuses(
                f"chat_template_kwargs: {name!r} is not a variable of the chat template; it has {named if named else 'none'}"
            )


@lru_cache(maxsize=16)
def _wants_text(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether a template reads the arguments of calls as JSON text instead of as an object.

    Raises:
        TemplateRefuses: it writes no calls.
    """
    refused = None
    for as_text in (False, True):
        for key in CALL_IDS:
            call = _for_template(marked_calls(key, 1), as_text)
            try:
                text = _render(
                    tokenizer, [{"role": "user", "content": "hello"}, call], False, NO_INPUTS
                )
            except TemplateRefuses as error:
                refused = error
                continue
            # Python's form of a dict is not JSON.
            if MARKED_NAME in text and "{'marked'" not in text:
                return as_text
    raise TemplateRefuses(
        "the chat template writes no tool calls; choose a target that calls tools"
    ) from refused


def marked_calls(key: str, count: int) -> Json:
    """An assistant's message that calls a function of a marked name.

    Args:
        key: the calls' ids, with {} for their number.
    """
    function = {"name": MARKED_NAME, "arguments": {"marked": "value"}}
    calls = []
    for number in range(count):
        calls.append({"type": "function", "id": key.format(number), "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message],
    inputs: ChatInputs = NO_INPUTS,
) -> list[int]:
    """Token ids of a prompt that the target continues. Raises as `render_text`.

    Text gets the special tokens that the tokenizer adds. Messages are rendered up to where the
    assistant answers (without a template: joined by blank lines, as text).
    """
    if not isinstance(prompt, str) and has_template(tokenizer, inputs):
        return encode(tokenizer, render_text(tokenizer, prompt, generation=True, inputs=inputs))
    if isinstance(prompt, str):
        text = prompt
    else:
        text = render_text(tokenizer, prompt, inputs=inputs)
    return list(tokenizer(text)["input_ids"])


@lru_cache(maxsize=16)
def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Characters of the longest token: n tokens stand for at most n times as many.

    So a text that is far too long is known without splitting it, which takes minutes for 30 MB.
    """
    return max(map(len, tokenizer.get_vocab()))


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of text that contains its special tokens already; adds none."""
    if text:
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return []


def text_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of plain text to continue, with BOS in front once if the tokenizer adds it."""
    ids = text_ids(tokenizer, text)
    bos = tokenizer.bos_token_id
    # A tokenizer that adds BOS does so to the empty text too.
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
    text = tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return str(text)


# -- what a template puts around a turn ------------------------------------------------------------


@dataclass(frozen=True)
class TurnFrame:
    """What surrounds the content of a user's first turn.

    Attributes:
        prefix_ids: tokens before it.
        stop_ids: special tokens that end the turn.
        ending: text after it, where a template ends turns with plain text; '' elsewhere.
    """

    prefix_ids: list[int]
    stop_ids: frozenset[int]
    ending: str


def user_frame(tokenizer: PreTrainedTokenizerBase) -> TurnFrame | None:
    """Derives the frame of a user's turn by rendering a marker as its content.

    None if the template hides the marker or has no opening.
    """
    messages = [{"role": "user", "content": _MARKER}]
    before, found, after = render_text(tokenizer, messages, generation=True).partition(_MARKER)
    prefix = text_ids(tokenizer, before)
    stops = leading_special(tokenizer, after)
    if not found or not prefix:
        return None
    ending = ""
    if not stops:
        ending = after.strip()
    return TurnFrame(prefix, frozenset(stops), ending)


def closing_token(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The special token that the template writes after an assistant's turn; empty for none.

    Where a turn has no end of its own, the token that begins the next one.
    """
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _MARKER}]
    # Nothing behind the turn first, then a next turn.
    for following in ([], messages[:1]):
        text = render_text(tokenizer, messages + following).partition(_MARKER)[2]
        found = leading_special(tokenizer, text.lstrip())
        if found:
            return found
    return set()


def turn_glue(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Sequence[Message]],
    stop_id: int,
    answers: Sequence[str] = (),
    inputs: ChatInputs = NO_INPUTS,
) -> list[int] | None:
    """Token ids between a response and the next one.

    They are the end of its turn, the next user turn, and the assistant's header.

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
        """The turns with these answers, up to where the assistant answers the turn behind them."""
        spoken: list[Message] = []
        for turn, text in zip(turns, texts, strict=False):
            spoken += turn
            spoken.append({"role": "assistant", "content": text})
        spoken += turns[len(texts)]
        return render_text(tokenizer, spoken, True, inputs)

    # With marks in place of the answers, what follows the last mark is the glue.
    marks = [f"{_MARKER} {i}." for i in range(len(turns) - 1)]
    history, found, after = rendered(marks).partition(marks[-1])
    # The turns before the last answer must read as they did when it was made.
    if not found or history != rendered(marks[:-1]):
        return None

    # The template must write the answers themselves, in order.
    if answers:
        said = rendered(answers)
        at = 0
        for answer in answers:
            # Templates may trim an answer.
            at = said.find(answer.strip(), at)
            if at < 0:
                return None
    ids = text_ids(tokenizer, after.lstrip())  # begins with the token that closes the response
    # Behind the stop token there must be a next turn.
    if ids[:1] == [stop_id] and len(ids) > 1:
        return ids[1:]
    return None


def shared_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the beginning that two texts, or two rows of tokens, share."""
    for length, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return length
    return min(len(one), len(other))


def leading_special(tokenizer: PreTrainedTokenizerBase, text: str) -> set[int]:
    """The first token of a text, if it is a special or an added one."""
    # Some tokenizers list their markers as added tokens only.
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return set(text_ids(tokenizer, text)[:1]) & special
