"""A row of a data set while it grows: token ids, and the spans among them that the target generates.

    piece   prompt                                      response 1 + stop  prompt's continuation          response 2
    span                                                [start, end)                                      [start, end)

Two classes grow one, because they know different things. `Conversation` (conversation.py) has the
target's tokens, and must find a message that the template reads. `RecordedTranscript` (masks.py) has
the message, and must find its tokens. Both begin another row where the template writes earlier
turns differently once a later one follows, and where a later turn brings new images: a target reads
images at the beginning of a row only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drafttrain.data.answers import AnswerFormat
from drafttrain.data.chat import NO_INPUTS, ChatInputs, decode
from drafttrain.files import Json
from drafttrain.images import Picture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True)
class Transcript:
    """A row of a conversation.

    Attributes:
        tokens, spans, finish: as in a stored record; see `store.py`.
        inputs: what the chat template reads besides the messages.
        images: in the prompt before the first response, in order.
        shown: that prompt's text, in which the template marks each image once, and the number of
            its tokens; ("", 0) without images.
    """

    tokens: list[int] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    inputs: ChatInputs = NO_INPUTS
    images: Sequence[Picture] = ()
    shown: tuple[str, int] = ("", 0)

    def written(self, tokenizer: PreTrainedTokenizerBase, end: int | None = None) -> str:
        """The text of the row, or of its first `end` tokens, as the template writes it.

        The tokens hold an image's placeholder many times.
        """
        text, count = self.shown
        read = decode(tokenizer, self.tokens[:end])
        # Some tokenizers drop a space where a text begins, so that all is decoded at once.
        return text + read[len(decode(tokenizer, self.tokens[:count])) :]

    def accept(self, tokens: Sequence[int], finish: str) -> None:
        """Appends a response, stop token included."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self.spans.append([start, len(self.tokens)])
        self.finish.append(finish)

    def stored(
        self,
        tokenizer: PreTrainedTokenizerBase,
        form: AnswerFormat,
        id: str,
        source: str | None = None,
    ) -> Json:
        """The record up to the last response; without "reasoning" if that is unknown for one."""
        end = self.spans[-1][1]
        record: Json = {
            "id": id,
            "tokens": self.tokens[:end],
            "spans": self.spans,
            "finish": self.finish,
        }
        if self.images:
            record["images"] = [picture.name for picture in self.images]
        if source is not None:
            record["source"] = source

        reasoning = []  # tokens per response
        for start, end in self.spans:
            count = form.reasoning_tokens(tokenizer, self.tokens[start:end])
            if count is None:
                return record
            reasoning.append(count)
        record["reasoning"] = reasoning
        return record
