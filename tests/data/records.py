"""Records of conversations with answers, for tests that want no backend."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import NO_INPUTS, ChatInputs, Message
from drafttrain.data.masks import (
    RecordedTranscript,
    assistant_turns,
    recorded_conversations,
)
from drafttrain.errors import UserError
from drafttrain.files import Json


def conversation_record(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    id: str,
    inputs: ChatInputs = NO_INPUTS,
    stop_ids: Collection[int] = (),
) -> Json:
    """The record of a conversation in one row. Raises TemplateRewrites: it takes several."""
    row = RecordedTranscript(tokenizer, messages, inputs, stop_ids)
    for i in assistant_turns(messages, id):
        row.add(i, id)
    return row.record(id)


def records_of(
    tokenizer: PreTrainedTokenizerBase, path: Path, stop_ids: Collection[int] = ()
) -> Iterator[Json]:
    """The records of a file's conversations. Raises UserError: a row that cannot be used."""
    for _, records in recorded_conversations(tokenizer, path, None, stop_ids):
        if isinstance(records, UserError):
            raise records
        yield from records
