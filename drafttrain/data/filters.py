"""Selects prompts: length, readability, no duplicates, no overlap with evaluation prompts."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from drafttrain.data.row_formats import Prompt, prompt_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORD = re.compile(r"\w+", re.UNICODE)


def words(text: str) -> list[str]:
    """Lower-case words, without punctuation, in NFKC form (no full-width letters or ligatures)."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def ngrams(text: str, size: int) -> set[tuple[str, ...]]:
    """All runs of `size` words; a shorter text is a single run."""
    found = words(text)
    return {tuple(found[i : i + size]) for i in range(max(1, len(found) - size + 1))} if found else set()


def stable_id(prompt: Prompt) -> str:
    """A hash of the content: equal prompts have equal ids in every run."""
    return hashlib.sha256(json.dumps(prompt, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:16]


def is_readable(text: str) -> bool:
    """False if text holds control characters, unassigned code points, or the replacement character."""
    bad = {"Cc", "Cn", "Co", "Cs"}  # Unicode categories
    return not any(c == "\ufffd" or (unicodedata.category(c) in bad and c not in "\n\t\r") for c in text)


def is_repetitive(text: str) -> bool:
    """True if fewer than half of a text's three-word runs are distinct; texts of fewer than 20 runs never are."""
    found = words(text)
    runs = [tuple(found[i : i + 3]) for i in range(len(found) - 2)]
    return len(runs) >= 20 and len(set(runs)) < len(runs) / 2


class NearDuplicates:
    """MinHash with banding: finds texts that share most of their three-word runs with an earlier one.

    64 permutations in 16 bands of 4. Texts whose sets of runs overlap by more than about a half share a band; their full
    signatures are then compared.

    Source: Broder, On the resemblance and containment of documents (1997).
    """

    def __init__(self, threshold: float = 0.7):
        random = np.random.default_rng(0)
        self.factors = random.integers(1, 2**61, size=(64, 1), dtype=np.uint64) | np.uint64(1)
        self.offsets = random.integers(0, 2**61, size=(64, 1), dtype=np.uint64)
        self.threshold = threshold
        self.bands: dict[tuple[int, bytes], list[int]] = {}
        self.signatures: list[np.ndarray] = []

    def seen(self, text: str) -> bool:
        """True if a similar text was seen before; otherwise stores this one."""
        runs = [hashlib.blake2b(" ".join(run).encode(), digest_size=8).digest() for run in ngrams(text, 3)]
        if not runs:
            return False
        keys = np.frombuffer(b"".join(runs), dtype=np.uint64)
        # Multiplication wraps at 2^64; the high half of an odd-multiplier hash is well mixed.
        hashes = (self.factors * keys + self.offsets) >> np.uint64(32)  # [64, runs]
        signature = hashes.min(axis=1).astype(np.uint32)  # [64]
        places = [(i, signature[4 * i : 4 * i + 4].tobytes()) for i in range(16)]
        candidates = {index for place in places for index in self.bands.get(place, ())}
        if any((self.signatures[index] == signature).mean() >= self.threshold for index in candidates):
            return True
        for place in places:
            self.bands.setdefault(place, []).append(len(self.signatures))
        self.signatures.append(signature)
        return False


@dataclass(frozen=True)
class PromptLimits:
    """Length limits of a prompt: characters, and tokens where a tokenizer is given (0: no limit)."""

    min_chars: int = 10
    max_chars: int = 8000
    min_tokens: int = 0
    max_tokens: int = 0


class Filter:
    """Decides whether a prompt is kept, and counts the reasons against.

    Args:
        limits: length limits, on the text of all user turns together.
        evaluation: texts that no kept prompt may share a run of `ngram` words with.
        ngram: words per run. An evaluation text shorter than that only excludes prompts with exactly its words.
        tokenizer: counts tokens, and names the special tokens that no prompt may contain.

    Attributes:
        dropped: reason -> count.
    """

    def __init__(
        self,
        limits: PromptLimits,
        evaluation: Iterable[str] = (),
        ngram: int = 8,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.limits, self.ngram, self.tokenizer = limits, ngram, tokenizer
        self.forbidden = {run for text in evaluation for run in ngrams(text, ngram)}
        special = tokenizer.all_special_tokens if tokenizer is not None else []
        self.special = [token for token in special if token.strip()]
        self.exact: set[bytes] = set()
        self.near = NearDuplicates()
        self.dropped: Counter[str] = Counter()

    def keeps(self, prompt: Prompt) -> bool:
        reason = self._reason(prompt)
        if reason is not None:
            self.dropped[reason] += 1
        return reason is None

    def _reason(self, prompt: Prompt) -> str | None:
        asked = "\n".join(prompt_texts(prompt))
        everything = [asked, *(message["content"] for message in prompt.get("messages", ()))]
        limits = self.limits
        if reason := _wrong_length(len(asked), limits.min_chars, limits.max_chars, "characters"):
            return reason
        if self.tokenizer is not None and (limits.min_tokens or limits.max_tokens):
            count = len(self.tokenizer(asked, add_special_tokens=False)["input_ids"])
            if reason := _wrong_length(count, limits.min_tokens, limits.max_tokens, "tokens"):
                return reason
        if not all(map(is_readable, everything)):
            return "unreadable characters"
        if any(token in text for token in self.special for text in everything):
            return "contains a special token"
        if self.forbidden and any(self.forbidden & ngrams(text, self.ngram) for text in everything):
            return "overlaps with an evaluation prompt"
        key = hashlib.sha256(" ".join(asked.casefold().split()).encode()).digest()
        if key in self.exact:
            return "duplicate"
        self.exact.add(key)
        return "near duplicate" if self.near.seen(asked) else None


def _wrong_length(count: int, least: int, most: int, unit: str) -> str | None:
    if count < least:
        return f"shorter than {least} {unit}"
    return f"longer than {most} {unit}" if 0 < most < count else None
