"""`drafttrain ngram-store`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.command import command, result_of
from drafttrain.values import Count, Depth, File, Name, Place

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def count_ngrams(
    *,
    output: Place | Path,
    data: Place | Path | None = None,
    text: File | Path | None = None,
    target: Name | Path | None = None,
    max_n: Depth = 4,
    max_entries: Count = 4000000,
) -> Json:
    """Count the tokens that follow each n-gram of a corpus: a drafter without training.

    The target's answers work best as corpus.

    ```
    drafttrain ngram-store --data runs/data --output runs/store.safetensors
    drafttrain ngram-store --text corpus.txt --target smollm2-135m --output runs/store.safetensors
    drafttrain eval --target smollm2-135m --drafter runs/drafter+suffix:runs/store.safetensors
    ```

    Args:
        output: the store
        data: a data set made by drafttrain generate: its responses are counted
        text: JSON lines with text or messages, or plain text with a document per line
        target: model whose tokenizer reads --text: short name, folder or Hub id
        max_n: longest context, in tokens
        max_entries: continuations kept, 16 bytes each; the most frequent stay
    """
    return result_of("data.ngram_corpus", locals())
