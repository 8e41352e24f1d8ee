"""Records of conversations with answers, for tests that want no backend."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from drafttrain.data.masks import recorded_conversations
from drafttrain.errors import UserError
from drafttrain.files import Json


def records_of(
    tokenizer: PreTrainedTokenizerBase, path: Path, stop_ids: Collection[int] = ()
) -> Iterator[Json]:
    """The records of a file's conversations. Raises UserError: a row that cannot be used."""
    for _, records in recorded_conversations(tokenizer, path, None, stop_ids):
        if isinstance(records, UserError):
            raise records
        yield from records
