"""Chats and texts as a target's token ids: all use of chat templates.

A tokenizer without a template belongs to a pretrained-only model, which continues the turns as a document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drafttrain.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]  # {"role", "content"}, and more where a template reads more
_MARKER = "drafttrain marks this place"  # plain words that no template strips or rewrites


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def render_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], generation: bool = False) -> str:
    """The conversation as text, markers included; without a chat template, blank lines join the turns.

    Args:
        messages: role and content of each turn. generation: end where the assistant's next turn begins.

    Raises:
        UserError: the template rejects these messages (roles that do not alternate, no system role, ...).
    """
    if not has_template(tokenizer):
        text = "\n\n".join(message["content"] for message in messages)
        return text + "\n\n" if generation else text
    try:
        turns = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation))
    except Exception as error:  # jinja's TemplateError, but also TypeError and KeyError from inside the template
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise UserError(f"the chat template refuses a conversation with the roles [{roles}]: {error}") from error


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation up to where the assistant begins to answer; BOS exactly once. Raises as `render_text`."""
    return encode(tokenizer, render_text(tokenizer, messages, generation=True))


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[Message]) -> list[int]:
    """Token ids of a prompt that the target continues. Raises as `render_text`.

    Text gets the special tokens that the tokenizer adds. Messages are rendered up to where the assistant answers (without
    a template: joined by blank lines, as text).
    """
    if not isinstance(prompt, str) and has_template(tokenizer):
        return render_prompt(tokenizer, prompt)
    return list(tokenizer(prompt if isinstance(prompt, str) else render_text(tokenizer, prompt))["input_ids"])


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of text that contains its special tokens already; adds none."""
    return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []


def text_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of plain text to continue, with BOS in front (exactly once) if the tokenizer is one that adds it."""
    ids = text_ids(tokenizer, text)
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and bos in tokenizer("")["input_ids"]
    return [bos, *ids] if adds_bos and ids[:1] != [bos] else ids


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of rendered text. A chat template writes BOS itself where the model expects it."""
    return text_ids(tokenizer, text) if has_template(tokenizer) else text_prompt(tokenizer, text)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The exact text of token ids, special tokens included."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


# -- what a template puts around a turn -------------------------------------------------------------------------------


@dataclass(frozen=True)
class TurnFrame:
    """The tokens around a user's first turn."""

    prefix_ids: list[int]  # before the content
    stop_ids: frozenset[int]  # special tokens that end the turn
    ending: str  # text after the content, for templates that end a turn with plain text; '' for others


def user_frame(tokenizer: PreTrainedTokenizerBase) -> TurnFrame | None:
    """Derives the frame of a user's turn by rendering a marker as its content; None if the template hides either."""
    messages = [{"role": "user", "content": _MARKER}]
    before, found, after = render_text(tokenizer, messages, generation=True).partition(_MARKER)
    prefix, stops = text_ids(tokenizer, before), _leading_special(tokenizer, after)
    return TurnFrame(prefix, frozenset(stops), "" if stops else after.strip()) if found and prefix else None


def closing_token(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The special token that the template writes after an assistant's turn; empty if it writes none."""
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _MARKER}]
    return _leading_special(tokenizer, render_text(tokenizer, messages).partition(_MARKER)[2].lstrip())


def answer_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], content: str, reasoning: str
) -> str | None:
    """An answer as the target wrote it, from what a server's reasoning parser made of it.

    The template renders the answer, with the reasoning under the names that templates read. Without content the answer ended
    inside the reasoning.

    Returns:
        The text after the prompt, without the end of the turn; None if the template does not write all of it.
    """
    names = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)
    before = render_text(tokenizer, messages, generation=True)
    after = render_text(tokenizer, [*messages, {"role": "assistant", "content": content, **names}])
    text, end = after[len(before) :] if after.startswith(before) else "", 0
    for part in filter(None, (reasoning.strip(), content.strip())):
        at = text.find(part, end)
        if at < 0:
            return None
        end = at + len(part)
    return text[:end]


def turn_glue(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Sequence[Message]], stop_id: int, answer: str = ""
) -> list[int] | None:
    """Token ids between a response and the next one: the end of its turn, the next user turn, the assistant's header.

    Args:
        turns: the messages before each response; the last entry is the one after the glue's response. At least two.
        stop_id: the last token of the response before the glue, which the glue does not repeat.
        answer: text of that response, without its stop token.

    Returns:
        The ids, or None if the template rewrites earlier turns, for example without the reasoning in `answer`, or closes turns
        with another token: the tokens so far then differ from what the target would read, and the conversation has to end.
    """
    messages: list[Message] = []
    before = ""
    for i, turn in enumerate(turns[:-1]):
        messages += turn
        if i == len(turns) - 2:
            before = render_text(tokenizer, messages, generation=True)
        messages.append({"role": "assistant", "content": f"{_MARKER} {i}."})
    rendered = render_text(tokenizer, [*messages, *turns[-1]], generation=True)
    history, found, after = rendered.partition(messages[-1]["content"])
    if answer.strip():
        said = render_text(
            tokenizer, [*messages[:-1], {"role": "assistant", "content": answer}, *turns[-1]], generation=True
        )
        found = found if answer.strip() in said else ""
    ids = text_ids(tokenizer, after.lstrip())  # begins with the token that closes the response
    return ids[1:] if found and history == before and ids[:1] == [stop_id] and len(ids) > 1 else None


def _leading_special(tokenizer: PreTrainedTokenizerBase, text: str) -> set[int]:
    """The first token of a text, if it is a special or an added one."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return set(text_ids(tokenizer, text)[:1]) & special
