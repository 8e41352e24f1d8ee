"""Conversations with images as prompts of a target. Messages hold the pictures that were read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from drafttrain.data.chat import ChatInputs, Message, prompt_ids, render_text
from drafttrain.data.failures import BadReply
from drafttrain.data.image_parts import images_in
from drafttrain.errors import UserError
from drafttrain.images import BadPicture
from drafttrain.progress import counted
from drafttrain.target import Target

if TYPE_CHECKING:
    from drafttrain.target.sight import ImagePrompt

TOO_LONG = "prompt with images too long"  # the reason of such rows


def seeing_inputs(target: Target, inputs: ChatInputs) -> ChatInputs:
    """The inputs with the processor's chat template, where it differs from the tokenizer's.

    Raises UserError: the target reads no images, or a package is missing.
    """
    template = target.require_sight().template
    # Processors of most families hold the template of their tokenizer.
    if template is None or template == target.tokenizer.chat_template:
        return inputs
    return replace(inputs, template=template)


def shown_prompt(target: Target, text: str, messages: Sequence[Message]) -> ImagePrompt:
    """The prompt of messages with images, whose rendering is `text`.

    Raises BadPicture: the target's processor refuses one of them.
    """
    try:
        return target.image_prompt(text, images_in(messages))
    except UserError as error:
        raise BadPicture("image: refused by the target", str(error)) from error


def chat_prompt(
    target: Target, messages: Sequence[Message], inputs: ChatInputs
) -> list[int] | ImagePrompt:
    """The prompt of messages up to where the target answers.

    Raises UserError: the chat template refuses the messages, the target reads no images, or its
        processor refuses one of them.
    """
    if not images_in(messages):
        return prompt_ids(target.tokenizer, messages, inputs)
    text = render_text(target.tokenizer, messages, True, seeing_inputs(target, inputs))
    return shown_prompt(target, text, messages)


def too_long(tokens: int, images: int, max_length: int) -> BadReply:
    """Why a row is not stored: its prompt does not fit, and images are never cut."""
    held = f"{counted(tokens, 'tokens')} with {counted(images, 'images')}"
    return BadReply(TOO_LONG, f"{held}, --max-length {max_length}")
