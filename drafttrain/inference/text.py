"""Text of a sequence while its tokens arrive, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafttrain.errors import UserError
from drafttrain.target import Target


def check_stop(stop: str | Sequence[str], target: Target) -> tuple[str, ...]:
    """Stop strings as a tuple.

    Raises:
        UserError: an empty one, or a target without a tokenizer to find them with.
    """
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in strings:
        raise UserError(f"stop={strings!r}: an empty string stops nothing; leave it out")
    if strings and target.tokenizer is None:
        raise UserError(f"stop={strings!r} needs text, but target {target.name!r} has no tokenizer; wrap it with one")
    return strings


class TextStream:
    """Decodes tokens as they come. A character that spans tokens appears with its last one.

    Attributes:
        text: so far, without special tokens; cut before the stop string once one was found.
        stopped: a stop string was found.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        self.text, self.stopped = "", False
        self._ids: list[int] = []
        self._context = self._done = 0  # ids from _context on are decoded together; those before _done are in the text
        self._given = 0

    def push(self, tokens: Sequence[int]) -> int:
        """Adds tokens up to the one that completes a stop string; returns how many that are."""
        for count, token in enumerate(tokens, 1):
            self._ids.append(token)
            before = len(self.text)
            self._decode()
            if len(self.text) > before and self._cut(before):
                return count
        return len(tokens)

    def take(self, last: bool = False) -> str:
        """The text that is certain and was not taken before: what may be the beginning of a stop string waits.

        Args:
            last: no more tokens will come.
        """
        if last and not self.stopped:
            before = len(self.text)
            self._decode(complete=True)
            self._cut(before)
        end = len(self.text)
        if not last and not self.stopped:
            end -= max((n for s in self.stop for n in range(1, len(s)) if self.text.endswith(s[:n])), default=0)
        part = self.text[self._given : end]
        self._given = max(self._given, end)
        return part

    def _decode(self, complete: bool = False) -> None:
        # Decoders treat the first token of a text in their own way, so some tokens before the new ones are decoded too.
        old = self._read(self._ids[self._context : self._done])
        new = self._read(self._ids[self._context :])
        if complete or (len(new) > len(old) and not new.endswith("\N{REPLACEMENT CHARACTER}")):
            self.text += new[len(old) :]
            self._context, self._done = self._done, len(self._ids)

    def _read(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _cut(self, before: int) -> bool:
        """Cuts the text before the first stop string that ends after position `before`."""
        found = [self.text.find(s, max(0, before - len(s) + 1)) for s in self.stop]
        places = [place for place in found if place >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True
        return self.stopped
