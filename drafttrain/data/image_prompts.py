"""Conversations with images as prompts of a target: pictures are read, and placeholders expanded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.data.chat import ChatInputs, Message, prompt_ids, render_text
from drafttrain.data.failures import BadReply
from drafttrain.data.image_parts import image_sources
from drafttrain.errors import UserError
from drafttrain.images import BadPicture, Picture, PictureStore
from drafttrain.progress import counted
from drafttrain.target import Target

if TYPE_CHECKING:
    from drafttrain.target.sight import ImagePrompt

TOO_LONG = "prompt with images too long"  # the reason of such rows


@dataclass(frozen=True)
class PromptPictures:
    """Reads the pictures of messages, and makes prompts of both.

    Attributes:
        store: beside the file of the messages, whose relative paths begin there.
        allow_urls: download pictures.
        seen: pictures that recorded rows use, by name, until their reader takes them.
    """

    target: Target
    store: PictureStore = field(default_factory=lambda: PictureStore(Path()))
    allow_urls: bool = False
    seen: dict[str, Picture] = field(default_factory=dict)

    def inputs(self, inputs: ChatInputs) -> ChatInputs:
        """The inputs with the processor's chat template, where it differs from the tokenizer's.

        Raises UserError: the target reads no images, or a package is missing.
        """
        template = getattr(self.target.processor, "chat_template", None)
        if not isinstance(template, str) or template == self.target.tokenizer.chat_template:
            return inputs
        return replace(inputs, template=template)

    def read(self, source: object) -> Picture:
        """The picture of a part of a message. Raises BadPicture."""
        return self.store.read(source, self.allow_urls)

    def expanded(self, text: str, pictures: Sequence[Picture]) -> ImagePrompt:
        """A rendered text with its pictures.

        Raises:
            BadPicture: the target's processor refuses one of them.
            UserError: the target reads no images, or a package is missing.
        """
        assert self.target.processor is not None  # its absence is not this picture's fault
        try:
            return self.target.image_prompt(text, pictures)
        except (UserError, ValueError) as error:
            raise BadPicture("image: refused by the target", str(error)) from error

    def prompt(self, messages: Sequence[Message], inputs: ChatInputs) -> list[int] | ImagePrompt:
        """The prompt of messages up to where the target answers.

        Raises:
            BadPicture: a picture that cannot be used.
            UserError: the chat template refuses the messages, or the target reads no images.
        """
        pictures = [self.read(source) for source in image_sources(messages)]
        if not pictures:
            return prompt_ids(self.target.tokenizer, messages, inputs)
        text = render_text(self.target.tokenizer, messages, True, self.inputs(inputs))
        return self.expanded(text, pictures)


def too_long(tokens: int, images: int, max_length: int) -> BadReply:
    """Why a row is not stored: its prompt does not fit, and images are never cut."""
    held = f"{counted(tokens, 'tokens')} with {counted(images, 'images')}"
    return BadReply(TOO_LONG, f"{held}, --max-length {max_length}")
