"""Counts of the tokens that followed each n-gram in a corpus of earlier answers.

A table is built once and saved as safetensors. Source: retrieval-based speculative decoding (REST,
arXiv 2311.08252); here with counts instead of a suffix array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from drafttrain.errors import UserError
from drafttrain.files import reading

_FORMAT = "drafttrain ngram_store 1"
_FACTOR = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads close values
_MASK = 2**64 - 1
# Tokens counted at a time while building, which bounds memory.
_BLOCK = 4_000_000
# Continuations kept per context: no tree has more children; short contexts have thousands.
_FOLLOWERS = 64
_LIKELIEST = 8  # those that a drafter looks at


def context_hash(context: Sequence[int]) -> int:
    """A 64-bit hash of a context and its length. A collision costs a wrong draft only."""
    value = len(context)
    for token in context:
        value = (value * _FACTOR + token + 1) & _MASK
    return value


class NgramTable(NamedTuple):
    """Continuations of contexts, by the context's hash."""

    hashes: np.ndarray  # [c] uint64, ascending
    starts: np.ndarray  # [c+1] int64; context i has entries starts[i] to starts[i+1]
    tokens: np.ndarray  # [e] int32, each context's most frequent continuation first
    counts: np.ndarray  # [e] int32
    max_n: int  # the longest context, in tokens

    @staticmethod
    def build(
        documents: Iterable[Sequence[int]],
        max_n: int = 4,
        max_entries: int = 4_000_000,
    ) -> NgramTable:
        """Counts the tokens after every context of 1 to max_n tokens.

        Args:
            documents: token ids; contexts do not cross documents.
            max_entries: number of (context, token) pairs to keep, the most frequent ones.

        Raises:
            UserError: max_n or max_entries below 1.
        """
        if max_n < 1 or max_entries < 1:
            raise UserError(f"max_n={max_n}, max_entries={max_entries}: both must be at least 1")
        # Columns of all pairs of context and next token: hash, token, count.
        held: tuple[np.ndarray, ...] = (
            np.empty(0, np.uint64),
            np.empty(0, np.int32),
            np.empty(0, np.int64),
        )
        for tokens, owner in _blocks(documents):
            parts = [held]
            for n in range(1, max_n + 1):
                parts.append(_pairs(tokens, owner, n))
            held = _reduce(parts, max_entries)
        hashes, tokens, counts = held

        # Contexts by hash, and the continuations of each by falling count.
        order = np.lexsort((-counts, hashes))
        hashes = hashes[order]
        tokens = tokens[order]
        counts = counts[order]

        # The first continuations of each context.
        _, starts, lengths = np.unique(hashes, return_index=True, return_counts=True)
        rank = np.arange(len(hashes)) - np.repeat(starts, lengths)  # of a token within its context
        kept = rank < _FOLLOWERS
        unique, starts = np.unique(hashes[kept], return_index=True)
        starts = np.append(starts, kept.sum()).astype(np.int64)
        counts = np.minimum(counts[kept], np.iinfo(np.int32).max).astype(np.int32)
        return NgramTable(unique, starts, tokens[kept], counts, max_n)

    def likeliest(self, context: tuple[int, ...]) -> list[tuple[int, float]]:
        """The tokens that followed a context most often, with their shares."""
        key = context_hash(context)
        place = int(np.searchsorted(self.hashes, np.uint64(key)))
        if place == len(self.hashes) or int(self.hashes[place]) != key:
            return []
        begin = int(self.starts[place])
        end = int(self.starts[place + 1])
        last = min(end, begin + _LIKELIEST)
        tokens = self.tokens[begin:last].tolist()
        counts = self.counts[begin:last].tolist()
        total = sum(counts)
        if end > last:
            total = int(self.counts[begin:end].sum())
        return [(token, count / total) for token, count in zip(tokens, counts, strict=True)]

    def save(self, file: str | Path, tokenizer: str) -> None:
        """Writes the table. tokenizer: fingerprint of the tokenizer of the documents."""
        arrays = self._asdict()
        max_n = str(arrays.pop("max_n"))
        save_file(
            arrays,
            file,
            {
                "format": _FORMAT,
                "tokenizer": tokenizer,
                "max_n": max_n,
            },
        )

    @staticmethod
    def load(file: str | Path) -> tuple[NgramTable, str]:
        """Returns the table and its tokenizer's fingerprint.

        Raises:
            UserError: a missing file, another format, or a table that breaks a rule of the class.
        """
        fix = "build one: drafttrain ngram-store"
        with (
            reading(file, "ngram_store", fix),
            safe_open(Path(file).expanduser(), framework="numpy") as store,
        ):
            about = store.metadata() or {}
            if about.get("format") != _FORMAT:
                raise UserError(f"ngram_store={str(file)!r} is not an n-gram store; {fix}")
            table = NgramTable(
                hashes=store.get_tensor("hashes"),
                starts=store.get_tensor("starts"),
                tokens=store.get_tensor("tokens"),
                counts=store.get_tensor("counts"),
                max_n=int(about["max_n"]),
            )
            tokenizer = about["tokenizer"]
            rule = table.broken_rule()
            if rule:
                raise UserError(f"ngram_store={str(file)!r} is damaged ({rule}); {fix}")
        return table, tokenizer

    def broken_rule(self) -> str:
        """The rule of the class that a table from a file breaks; '' for a sound one."""
        contexts = len(self.hashes)  # c
        entries = len(self.tokens)  # e
        types = {
            "hashes": np.uint64,
            "starts": np.int64,
            "tokens": np.int32,
            "counts": np.int32,
        }
        for name, wanted in types.items():
            column = getattr(self, name)
            if column.ndim != 1 or column.dtype != wanted:
                return "its columns have other types or shapes"
        if len(self.starts) != contexts + 1 or len(self.counts) != entries or self.max_n < 1:
            return "its columns have lengths that do not fit together, or max_n is below 1"
        if self.starts[0] != 0 or self.starts[-1] != entries or (np.diff(self.starts) < 1).any():
            return "its contexts do not divide its entries"
        if (self.hashes[1:] <= self.hashes[:-1]).any():
            return "its hashes do not ascend"
        # Tokens count from 0, counts from 1.
        if not entries or min(self.tokens.min(), self.counts.min() - 1) >= 0:
            return ""
        return "it counts negative values"


def _blocks(documents: Iterable[Sequence[int]]) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Concatenated documents: tokens [t] int32, and the index of each token's document [t]."""
    rest = iter(documents)
    while True:
        tokens: list[int] = []
        ends: list[int] = []  # of the documents
        for document in rest:
            tokens += document
            ends.append(len(tokens))
            if len(tokens) >= _BLOCK:
                break
        if not tokens:
            return
        owner = np.searchsorted(ends, np.arange(len(tokens)), side="right")
        yield np.array(tokens, np.int32), owner


def _pairs(tokens: np.ndarray, owner: np.ndarray, n: int) -> tuple[np.ndarray, ...]:
    """Every context of n tokens: hashes [c] uint64, next tokens [c] int32, counts [c] of 1."""
    count = max(len(tokens) - n, 0)
    keys = np.full(count, n, np.uint64)  # as `context_hash` computes them
    for j in range(n):
        column = tokens[j : j + count].astype(np.uint64)
        keys = keys * np.uint64(_FACTOR) + column + np.uint64(1)  # modulo 2**64
    inside = owner[:count] == owner[n : n + count]  # context and next token in one document
    keys = keys[inside]
    following = tokens[n : n + count][inside]
    return keys, following, np.ones(len(keys), np.int64)


def _reduce(parts: Sequence[tuple[np.ndarray, ...]], most: int) -> tuple[np.ndarray, ...]:
    """Sums the counts of equal pairs of hash and token, and keeps the `most` frequent pairs."""
    hashes, tokens, counts = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.lexsort((tokens, hashes))
    hashes = hashes[order]
    tokens = tokens[order]
    counts = counts[order]
    # Equal pairs stand side by side: sum the counts of each run.
    first = np.ones(len(hashes), bool)
    first[1:] = (hashes[1:] != hashes[:-1]) | (tokens[1:] != tokens[:-1])
    where = np.flatnonzero(first)
    if len(where):
        counts = np.add.reduceat(counts, where)
    hashes = hashes[where]
    tokens = tokens[where]
    if len(hashes) > most:  # the most frequent pairs, in the same order
        kept = np.sort(np.argpartition(-counts, most - 1)[:most])
        hashes = hashes[kept]
        tokens = tokens[kept]
        counts = counts[kept]
    return hashes, tokens, counts
