"""Selects prompts: length, readability, no duplicates, no overlap with evaluation prompts."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from drafttrain.data.chat import longest_token
from drafttrain.data.image_parts import content_text, sources_in
from drafttrain.data.row_formats import Prompt, prompt_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST = 128  # texts of a bucket that a text is compared with
_ALIKE = 0.7  # share of equal permutations from which texts are duplicates
_UNREADABLE = {"Cc", "Cn", "Co", "Cs"}  # Unicode categories
_PERMUTATIONS = 64
_BANDS = 16  # of 4 bytes
_WORD = re.compile(r"\w+", re.UNICODE)


def words(text: str) -> list[str]:
    """Lower-case words, without punctuation, in NFKC form (no full-width letters or ligatures)."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def ngrams(text: str, size: int) -> set[tuple[str, ...]]:
    """All runs of `size` words; a shorter text is a single run."""
    found = words(text)
    if not found:
        return set()
    count = max(1, len(found) - size + 1)
    return {tuple(found[i : i + size]) for i in range(count)}


def stable_id(prompt: Prompt) -> str:
    """A hash of the content: equal prompts have equal ids in every run."""
    content = json.dumps(prompt, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def is_readable(text: str) -> bool:
    """False if text holds control characters, unassigned code points, or the replacement character."""
    for letter in set(text):
        if letter == "\ufffd":
            return False
        if unicodedata.category(letter) in _UNREADABLE and letter not in "\n\t\r":
            return False
    return True


def is_repetitive(text: str) -> bool:
    """True if fewer than half of a text's three-word runs are distinct.

    Texts of fewer than 20 runs never are repetitive.
    """
    found = words(text)
    runs = [tuple(found[i : i + 3]) for i in range(len(found) - 2)]
    return len(runs) >= 20 and len(set(runs)) < len(runs) / 2


class NearDuplicates:
    """MinHash with banding: finds texts that share most of their three-word runs with an earlier one.

    64 permutations, of which one byte each is kept, in 16 bands of 4. Texts whose sets of runs
    overlap by more than about a half share a band; their full signatures are then compared. A hash
    table per band chains the texts of a bucket, newest first. At most `_LONGEST` of a bucket are
    compared, so that many alike texts do not make the work quadratic. A text takes 200 bytes.

    Source: Broder, On the resemblance and containment of documents (1997).
    """

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        shape = (_PERMUTATIONS, 1)
        factors = random.integers(1, 2**61, size=shape, dtype=np.uint64)
        self.factors = factors | np.uint64(1)  # odd ones lose no bits
        self.offsets = random.integers(0, 2**61, size=shape, dtype=np.uint64)
        self.count = 0
        # [texts, permutations]; a power of two of rows
        self.signatures = np.zeros((1024, _PERMUTATIONS), np.uint8)
        self._chain()

    def _buckets(self, signatures: np.ndarray) -> np.ndarray:
        """Bucket of each band: [..., 64] uint8 -> [..., 16]. As many buckets as rows."""
        bands = np.ascontiguousarray(signatures).view(np.uint32)  # [..., 16]
        keys = bands.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        # Fibonacci hashing: the highest bits of the product choose one of 2^bits buckets.
        bits = len(self.signatures).bit_length() - 1
        return (keys >> np.uint64(64 - bits)).astype(np.int64)

    def _chain(self) -> None:
        """Builds the tables of all texts, with -1 for no text.

        They hold the newest text of each bucket, and the next older text of each text.
        """
        self._heads = np.full((_BANDS, len(self.signatures)), -1, np.int32)
        self._older = np.full((len(self.signatures), _BANDS), -1, np.int32)
        numbers = np.arange(self.count, dtype=np.int32)
        buckets = self._buckets(self.signatures[: self.count])  # [texts, 16]
        for band, column in enumerate(buckets.T):
            # Sorted by bucket, each text follows the next older one of its bucket.
            order = np.argsort(column, kind="stable").astype(np.int32)
            alike = column[order[1:]] == column[order[:-1]]
            self._older[order[1:], band] = np.where(alike, order[:-1], -1)
            self._heads[band, column] = numbers  # the last of equal ones stays

    def seen(self, text: str, images: str = "") -> bool:
        """True if a similar text was seen before; otherwise stores this one.

        Args:
            images: what names the images of the prompt; other images make another prompt.
        """
        runs = [zlib.crc32(" ".join((*run, images)).encode()) for run in ngrams(text, 3)]
        if not runs:
            return False
        # Multiplication wraps at 2^64; the high half of an odd-multiplier hash is well mixed.
        mixed = self.factors * np.array(runs, dtype=np.uint64) + self.offsets  # [64, runs]
        hashes = mixed >> np.uint64(32)
        signature = hashes.min(axis=1).astype(np.uint8)  # [64]
        places = self._buckets(signature).tolist()  # [16]

        # Compare it with the texts that share a band.
        candidates = set()
        for band, place in enumerate(places):
            index = int(self._heads[band, place])
            for _ in range(_LONGEST):
                if index < 0:
                    break
                candidates.add(index)
                index = int(self._older[index, band])
        if candidates:
            shares = (self.signatures[list(candidates)] == signature).mean(axis=1)
            if shares.max() >= _ALIKE:
                return True

        # Store it as the newest text of its buckets.
        self.signatures[self.count] = signature
        for band, place in enumerate(places):
            self._older[self.count, band] = self._heads[band, place]
            self._heads[band, place] = self.count
        self.count += 1
        if self.count == len(self.signatures):
            self.signatures = np.concatenate((self.signatures, np.zeros_like(self.signatures)))
            self._chain()
        return False


@dataclass(frozen=True)
class PromptLimits:
    """Length limits of a prompt: characters, and tokens where a tokenizer is given (0: no limit)."""

    min_chars: int = 10
    max_chars: int = 8000
    min_tokens: int = 0
    max_tokens: int = 0


class EvaluationImage(str):
    """The name of an image of an evaluation prompt, `<digest>.png`."""


class Filter:
    """Decides whether a prompt is kept, and counts the reasons against.

    Args:
        limits: length limits, on the text of all user turns together.
        evaluation: texts that no kept prompt may share a run of `ngram` words with, and names of
            images (`EvaluationImage`) that no kept prompt may show.
        ngram: words per run. An evaluation text shorter than that only excludes prompts with
            exactly its words.
        tokenizer: counts tokens, and names the special tokens that no prompt may contain.

    Attributes:
        dropped: reason -> count. unread: the number and the keys of the first row of unknown format.
    """

    def __init__(
        self,
        limits: PromptLimits,
        evaluation: Iterable[str] = (),
        ngram: int = 8,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.limits = limits
        self.ngram = ngram
        self.tokenizer = tokenizer
        self.forbidden: set[tuple[str, ...]] = set()
        self.unseen: set[str] = set()  # names of the images
        for text in evaluation:
            if isinstance(text, EvaluationImage):
                self.unseen.add(text)
            else:
                self.forbidden |= ngrams(text, ngram)
        self.special: list[str] = []
        if tokenizer is not None:
            self.special = [token for token in tokenizer.all_special_tokens if token.strip()]
        self.exact: set[bytes] = set()
        self.near = NearDuplicates()
        self.dropped: Counter[str] = Counter()
        self.unread = ""

    def keeps(self, prompt: Prompt) -> bool:
        reason = self._reason(prompt)
        if reason is not None:
            self.dropped[reason] += 1
        return reason is None

    def _reason(self, prompt: Prompt) -> str | None:
        """Why the prompt is dropped; None if it is kept."""
        asked = "\n".join(prompt_texts(prompt))
        # Earlier answers and system turns may leak evaluation prompts too.
        everything = [asked]
        messages = prompt.get("messages", ())
        for message in messages:
            text = content_text(message["content"])
            if text not in everything:
                everything.append(text)
        images = [str(name) for name in sources_in(messages)]

        limits = self.limits
        reason = _wrong_length(len(asked), limits.min_chars, limits.max_chars, "characters")
        if reason is not None:
            return reason
        if self.tokenizer is not None and (limits.min_tokens or limits.max_tokens):
            if 0 < limits.max_tokens * longest_token(self.tokenizer) < len(asked):
                return f"longer than {limits.max_tokens} tokens"
            count = len(self.tokenizer(asked, add_special_tokens=False)["input_ids"])
            reason = _wrong_length(count, limits.min_tokens, limits.max_tokens, "tokens")
            if reason is not None:
                return reason

        if not all(map(is_readable, everything)):
            return "unreadable characters"
        for text in everything:
            if any(token in text for token in self.special):
                return "contains a special token"
        if self.forbidden:
            for text in everything:
                if self.forbidden & ngrams(text, self.ngram):
                    return "overlaps with an evaluation prompt"

        # The same question about another image is another prompt.
        if self.unseen.intersection(images):
            return "overlaps with an evaluation prompt"
        seen = " ".join(images)
        # Equal but for case and spaces.
        plain = " ".join([*asked.casefold().split(), seen])
        key = hashlib.blake2b(plain.encode(), digest_size=16).digest()
        if key in self.exact:
            return "duplicate"
        self.exact.add(key)
        if self.near.seen(asked, seen):
            return "near duplicate"
        return None


def _wrong_length(count: int, least: int, most: int, unit: str) -> str | None:
    """The reason to drop a prompt of this length; None for none."""
    if count < least:
        return f"shorter than {least} {unit}"
    if 0 < most < count:
        return f"longer than {most} {unit}"
    return None
