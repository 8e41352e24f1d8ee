"""Chats and texts as a target's token ids: everything that touches a chat template.

A tokenizer without a template belongs to a pretrained-only model; such a model continues the turns as a document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drafttrain.errors import UserError

Message = Mapping[str, Any]


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def render_text(tokenizer: Any, messages: Sequence[Message], generation: bool = False) -> str:
    """The conversation as text, markers included.

    Args:
        tokenizer: with a chat template; without one (pretrained-only models) the turns are joined by blank lines, which
            such a model continues as a document.
        messages: role and content of each turn.
        generation: end where the assistant's next turn begins.

    Raises:
        UserError: the template refuses these messages (roles that do not alternate, no system role, ...).
    """
    if not has_template(tokenizer):
        text = "\n\n".join(message["content"] for message in messages)
        return text + "\n\n" if generation else text
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation)
    except Exception as error:  # a template raises what it likes: jinja's TemplateError, but also TypeError, KeyError
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise UserError(f"the chat template refuses a conversation with the roles [{roles}]: {error}") from error


def render_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation up to where the assistant begins to answer; BOS exactly once, as in serving.

    Raises:
        UserError: as in `render_text`.
    """
    return encode(tokenizer, render_text(tokenizer, messages, generation=True))


def text_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of plain text to continue, with BOS in front (exactly once) if the tokenizer is one that adds it."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and bos in tokenizer("")["input_ids"]
    return [bos, *ids] if adds_bos and ids[:1] != [bos] else ids


def encode(tokenizer: Any, text: str) -> list[int]:
    """Rendered text as ids. A chat template writes BOS itself where the model wants it."""
    if not has_template(tokenizer):
        return text_prompt(tokenizer, text)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
