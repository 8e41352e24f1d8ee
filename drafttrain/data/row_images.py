"""The pictures of a data set's rows, for what reads the rows with a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from datasets import Dataset
from torch import Tensor

from drafttrain.data.chat import decode, text_ids
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.images import Picture, PictureStore
from drafttrain.progress import counted
from drafttrain.target import Target
from drafttrain.target.sight import ImagePrompt


class RowImages(NamedTuple):
    """The pictures of a data set's rows, which a target reads with them.

    Attributes:
        target: reads the images; a shell does for states of servers. store: beside the data set.
        names: of each row's pictures, in the order of the rows; None or empty for a row of text.
    """

    target: Target
    store: PictureStore
    names: Sequence[Sequence[str] | None]

    @classmethod
    def of(cls, records: Dataset, data: str, target: Target) -> RowImages | None:
        """Those of a data set's conversations; None if all rows are text."""
        if not has_images(records):
            return None
        return cls(target, PictureStore(Path(data).expanduser()), list(records["images"]))

    def prompt(self, index: int, ids: Tensor) -> ImagePrompt | None:
        """The tokens [n] of a row with its pictures; None for a row of text, or of no data set (index -1).

        Raises:
            BadPicture: a picture is missing or was changed.
            UserError: see `Target.image_row`.
        """
        pictures = self.pictures(index)
        if not pictures:
            return None
        return self.target.image_row(ids.cpu(), pictures)

    def pictures(self, index: int) -> list[Picture]:
        """The pictures of a row; none of a row of no data set (index -1). Raises BadPicture."""
        if index < 0:
            return []
        return [self.store.get(name) for name in self.names[index] or ()]

    def check(self) -> None:
        """Raises BadPicture: a picture is missing."""
        for name in {name for names in self.names for name in names or ()}:
            if not (self.store.images / name).is_file():
                self.store.get(name)  # raises


def has_images(records: Dataset) -> bool:
    """Whether rows name pictures."""
    if "images" not in records.column_names:
        return False
    return records.data.column("images").null_count < len(records)


def readable_rows(records: Dataset, target: Target) -> Dataset:
    """The rows that the target reads with their images.

    An answer may hold a placeholder by chance. A target would take it for a part of an image, so such rows with
    images are left out, and counted in a note.
    """
    if not has_images(records):
        return records
    placeholder = target.require_sight().placeholder

    def readable(row: Json) -> bool:
        return not row["images"] or placeholder not in row["tokens"][row["spans"][0][0] :]

    reason = f"their answers hold the target's image placeholder (token {placeholder})"
    return _kept(records, readable, reason)


def cut_length(row: Json, max_length: int) -> int:
    """How many tokens of a row are read; 0 cuts none. An image is never cut."""
    length = len(row["tokens"])
    if not max_length:
        return length
    if row["images"]:
        max_length = max(max_length, row["spans"][0][0])
    return min(length, max_length)


def sendable_rows(records: Dataset, target: Target, max_length: int = 0) -> Dataset:
    """The rows that a server of the target reads with their images.

    Such rows are sent as text, and a sampled answer may be other tokens than the tokenizer makes of its text; so may
    the last tokens of a row that is cut. These rows are left out, and counted in a note.
    """
    if not has_images(records):
        return records
    tokenizer = target.tokenizer

    def sendable(row: Json) -> bool:
        if not row["images"]:
            return True
        tokens = row["tokens"][: cut_length(row, max_length)]
        return text_ids(tokenizer, decode(tokenizer, tokens)) == tokens

    reason = "servers read images in chats, whose text the tokenizer splits into other tokens than the rows hold"
    return _kept(records, sendable, reason)


def _kept(records: Dataset, keep: Callable[[Json], bool], reason: str) -> Dataset:
    """The rows to keep; a note counts the others and gives the reason.

    Raises UserError: none is left.
    """
    kept = records.filter(keep, desc="checking rows with images")
    left_out = len(records) - len(kept)
    if len(records) and not len(kept):
        raise UserError(f"data: none of {counted(left_out, 'rows')} can be read: {reason}")
    if left_out:
        print(f"note: {counted(left_out, 'rows')} left out: {reason}", flush=True)
    return kept
