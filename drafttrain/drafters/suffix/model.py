"""Drafting by suffixes: what followed earlier occurrences of the last tokens. No weights.

Occurrences are looked for in the sequence, in answers to earlier requests and in a corpus. One is
as long as the text before it agrees with the sequence. An occurrence near the place that the last
long one has reached goes first: a text that is copied with changes (an edited file, the next line
of a table) continues behind each change. Where no occurrence is left, counts of a corpus continue,
the longest context first.

Every child gets its probability from how often children of its kind were right so far: by rank,
length, origin and agreement of the occurrences. So a tree is deep where matches are long and agree,
and small elsewhere: it holds the likeliest nodes, and none below `min_p` or the tree's @stop.

Sources: SuffixDecoding (arXiv 2411.04975) and SAM decoding (2411.10666), which match suffixes by
automata and bound drafts by the length of the match; prompt lookup decoding (Saxena 2023); REST
(2311.08252) for the corpus.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, Session
from drafttrain.drafters.common.best_first import HitRates, grow_best_first
from drafttrain.drafters.common.ngram_table import NgramTable
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target, tokenizer_fingerprint

# Tokens that the indexes look up; longer matches are found by comparing the text before.
_SIZES = (5, 2, 1)
_PLACES = 6  # occurrences per lookup, the most recent
_LONGEST = 16  # tokens compared
_WIDTH = 4  # children that are learned from
# A place counts as reached by a match of so many tokens; so far behind it texts are looked at, and
# so many tokens without a hit.
_FOLLOWED = 3
_REACH = 24
_PATIENCE = 8
_NEARER = 3  # tokens of length that an occurrence near that place is worth
_BELIEF = 4  # weight, in observations, of what a kind of child is believed to hit before any
# Believed chance of the first child: length / (length + doubt), by how many occurrences agree: less
# than half, the only one, all of several, at least half. As counted over answers of SmolLM2-135M to
# the prompts of a quickstart, which no suite holds.
_DOUBT = (8.0, 3.0, 0.6, 3.0)
_CACHED = 50_000  # contexts of the corpus whose counts are kept at hand
_RECENT = 200  # observations after which old ones fade

# What is counted together: rank, length, origin and agreement of occurrences; or rank, context and
# share in the corpus.
_Kind = tuple[int, ...]


class _Match(NamedTuple):
    """An occurrence of the last tokens in a text."""

    length: int  # tokens before text[place] that agree
    text: list[int]
    place: int  # of the token that followed
    near: bool  # it lies where the last long match has led


# Of a node: the tokens of its path, and the occurrences that its token continues.
_State = tuple[list[int], list[_Match]]


class _Index:
    """Places in texts by the tokens before them."""

    def __init__(self, sizes: tuple[int, ...]):
        self.sizes = sizes  # lengths of these contexts
        self._places: dict[tuple[int, ...], list[tuple[list[int], int]]] = {}

    def add(self, text: list[int]) -> None:
        """Adds the place behind a text, which its next token will take."""
        entry = (text, len(text))
        for n in self.sizes:
            if n <= len(text):
                places = self._places.setdefault(tuple(text[-n:]), [])
                places.append(entry)
                if len(places) > 4 * _PLACES:  # `find` needs the latest ones only
                    del places[: 2 * _PLACES]

    def find(self, context: list[int]) -> list[tuple[int, list[int], int]]:
        """(length so far, text, place) of the latest occurrences, the longest contexts first."""
        found: dict[tuple[int, int], tuple[int, list[int], int]] = {}
        for n in self.sizes:
            for text, place in reversed(self._places.get(tuple(context[-n:]), ())):
                if len(found) == _PLACES:
                    return list(found.values())
                # A place that was found by a longer context stays as it is.
                if place < len(text):
                    found.setdefault((id(text), place), (n, text, place))
        return list(found.values())


class _Memory:
    """Answers of all sequences. Many threads may use it.

    It has two generations: the older one is dropped when the newer one is full.
    """

    def __init__(self, most: int):
        self._half = max(1, most // 2)  # tokens of a generation
        self._count = 0  # tokens of the newer one
        self._lock = threading.Lock()
        self.indexes = (_Index(_SIZES[:-1]), _Index(_SIZES[:-1]))

    def add(self, text: list[int], token: int) -> None:
        with self._lock:
            if self._count == self._half:
                self.indexes = (_Index(_SIZES[:-1]), self.indexes[0])
                self._count = 0
            self._count += 1
            self.indexes[0].add(text)
            text.append(token)

    def find(self, context: list[int], own: list[int]) -> Iterator[tuple[int, list[int], int]]:
        """Occurrences in other texts than `own`, as `_Index.find`."""
        with self._lock:
            newer, older = self.indexes
            found = newer.find(context) + older.find(context)
        return (match for match in found if match[1] is not own)


class SuffixDrafter(Drafter):
    """Drafts the likeliest continuations of suffixes.

    Args:
        file: a corpus of answers, counted by `drafttrain ngram-store`; without one only what was
            decoded is known.
        memory: most tokens of answers to earlier prompts that are kept, about half a kilobyte each.
            With 0, the default, sequences know nothing of each other, as measurements of single
            answers require.
        min_n: shortest match in the sequence. min_p: paths less likely than this are not drafted.

    Raises:
        UserError: a number out of its range, or a file that is not a store.
    """

    kind = "suffix"
    # Next to another drafter, unlikely matches are not worth their nodes.
    defaults_beside = {"min_n": 2, "min_p": 0.1}

    def __init__(
        self,
        file: str = "",
        memory: int = 0,
        min_n: int = 1,
        min_p: float = 0.02,
    ):
        if min_n < 1 or memory < 0 or not 0 <= min_p < 1:
            rule = "min_n must be at least 1, memory at least 0, min_p at least 0 and below 1"
            raise UserError(f"min_n={min_n}, memory={memory}, min_p={min_p}: {rule}")
        self.file = file
        self.min_n = min_n
        self.min_p = min_p
        if file:
            self.table, self.tokenizer = NgramTable.load(file)
        else:
            self.table = NgramTable.build([])
            self.tokenizer = ""
        self.followers = lru_cache(_CACHED)(self.table.likeliest)
        self.memory = _Memory(memory) if memory else None
        self.rates = HitRates(_BELIEF, _RECENT)

    def bind(self, target: Target) -> None:
        if not self.file:
            return
        actual = tokenizer_fingerprint(target.tokenizer)
        fix = "build one for this target: drafttrain ngram-store"
        if self.tokenizer != actual:
            raise UserError(
                f"{self.kind}={self.file!r} was built with tokenizer {self.tokenizer!r}, but target {target.name!r} has "
                f"{actual!r}; {fix}"
            )
        if len(self.table.tokens) and self.table.tokens.max() >= target.vocab_size:
            raise UserError(
                f"{self.kind}={self.file!r} holds token {self.table.tokens.max()}, which is outside target {target.name!r}'s "
                f"vocabulary of {target.vocab_size}; {fix}"
            )

    def start(self, prompt_ids: Tensor, max_length: int) -> SuffixSession:
        return SuffixSession(self, prompt_ids)


class SuffixSession(Session):
    """One sequence.

    Attributes:
        tokens: all that are committed. answer: those that the target wrote, behind the end of the
            prompt, for the memory.
        followed: text and place that the last long match has reached. lost: tokens since it was
            right.
        rates: by kind of child; with a memory, of all sequences.
    """

    def __init__(self, drafter: SuffixDrafter, prompt_ids: Tensor):
        self.drafter = drafter
        self.device = prompt_ids.device
        self.prompt_length = len(prompt_ids)
        self.tokens: list[int] = prompt_ids[:1].tolist()
        self.answer: list[int] = prompt_ids[-_SIZES[0] :].tolist()
        sizes = tuple(n for n in _SIZES if n >= drafter.min_n)
        if not sizes:
            sizes = (drafter.min_n,)
        self.index = _Index(sizes)
        self.followed: tuple[list[int], int] | None = None
        self.lost = 0
        # Sequences that know nothing of each other learn alone.
        if drafter.memory is not None:
            self.rates = drafter.rates
        else:
            self.rates = HitRates(_BELIEF, _RECENT)

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        memory = self.drafter.memory
        for token in tokens.tolist():
            # Repetition inside the prompt predicts the target's own poorly.
            if len(self.tokens) >= self.prompt_length:
                self._learn(token)
                if memory is not None:
                    memory.add(self.answer, token)
            self.index.add(self.tokens)
            self.tokens.append(token)

    def propose(self, spec: TreeSpec, sampler: Sampler | None = None) -> TokenTree:
        """Drafts the likeliest paths, within the spec's children per node, depth and nodes."""
        floor = max(self.drafter.min_p, spec.stop)
        before = self.tokens[-_LONGEST:]

        def children(state: _State, left: float) -> Iterator[tuple[int, float, _State]]:
            path, group = state
            if path:
                # The occurrences that the path's last token continues, else others.
                longer = []
                for match in group:
                    at = match.place + 1
                    if at < len(match.text):
                        longer.append(_Match(match.length + 1, match.text, at, match.near))
                group = longer
                if not group:
                    group = self._matches(before + path, here=False)
            for token, kind, below in self._children(group, before + path):
                p = left * self._chance(kind)
                left -= p
                yield token, p, ([*path, token], below)
                if left <= floor:
                    break

        root: _State = ([], self._matches(before))
        return grow_best_first(spec, floor, root, children, self.device)

    def _matches(self, context: list[int], here: bool = True) -> list[_Match]:
        """Occurrences of the context's end, the best first.

        here: the context ends where the sequence does.
        """
        found = self.index.find(context)
        if self.drafter.memory is not None:
            found += self.drafter.memory.find(context, self.answer)
        followed: list[int] | None = None
        reached = 0
        if here and self.followed is not None:
            followed, reached = self.followed

        matches = []
        for n, text, place in found:
            most = min(len(context), place, _LONGEST)
            while n < most and text[place - n - 1] == context[-n - 1]:
                n += 1
            near = text is followed and -2 <= place - reached <= _REACH
            matches.append(_Match(n, text, place, near))

        # The followed text goes on, with another token in place of one.
        if followed is not None and self.lost < _PATIENCE and reached < len(followed):
            found_there = any(match.near and match.place == reached for match in matches)
            if not found_there:
                matches.append(_Match(0, followed, reached, True))
        matches.sort(key=lambda each: _order(each, reached))
        return matches

    def _children(
        self,
        matches: list[_Match],
        context: list[int],
    ) -> Iterator[tuple[int, _Kind, list[_Match]]]:
        """Tokens that may follow a context, the likeliest first; their kinds and occurrences."""
        groups: dict[int, list[_Match]] = {}  # occurrences by the token that followed
        for match in matches:
            groups.setdefault(match.text[match.place], []).append(match)
        for rank, (token, group) in enumerate(groups.items()):
            agreed = _agreement(len(group), len(matches))
            best = group[0]
            own = best.text is self.tokens
            kind = (min(rank, 3), _rounded(best.length), own, agreed, best.near)
            yield token, kind, group

        # Then the corpus, if there is one.
        if not self.drafter.file:
            return
        rank = len(groups)
        for n in range(min(self.drafter.table.max_n, len(context)), 0, -1):
            for token, share in self.drafter.followers(tuple(context[-n:])):
                if token not in groups:
                    groups[token] = []  # shorter contexts do not give it again
                    yield token, (min(rank, 3), n, min(4, int(5 * share))), []
                    rank += 1

    def _chance(self, kind: _Kind) -> float:
        """Probability that a child of a kind is right if the children before it are not."""
        if len(kind) == 3:  # of the corpus
            believed = 0.06 + 0.01 * kind[1] * kind[2]
        else:
            rank, length, own, agreed, near = kind
            believed = 0.08
            if length == 0:
                believed = 0.03
            elif rank == 0:
                believed = length / (length + _DOUBT[agreed])
            if length and not own and not near:  # in another text
                believed = believed / 2
        return self.rates.chance(kind, believed)

    def _learn(self, token: int) -> None:
        """Counts which child the target's next token was, and moves the place that is followed."""
        before = self.tokens[-_LONGEST:]
        matches = self._matches(before)
        for child, kind, _ in islice(self._children(matches, before), _WIDTH):
            if child == token:
                self.rates.add(kind, 0)
                break
            self.rates.add(kind, None)

        # Follow the best long or near occurrence that was right; else the same text goes on.
        for match in matches:
            right = match.text[match.place] == token
            if right and (match.length >= _FOLLOWED or match.near):
                self.followed = (match.text, match.place + 1)
                self.lost = 0
                return
        if self.followed is not None:
            text, place = self.followed
            self.followed = (text, place + 1)
            self.lost += 1


def _order(match: _Match, reached: int) -> tuple[int, int]:
    """Sorts occurrences: long ones and those near the place that was reached first."""
    if match.near and match.length:
        return -match.length - _NEARER, abs(match.place - reached)
    return -match.length, 0


def _agreement(count: int, total: int) -> int:
    """How many of the occurrences agree on a token, an index of `_DOUBT`."""
    if total == 1:
        return 1
    if count == total:
        return 2
    if count / total < 0.5:
        return 0
    return 3


def _rounded(length: int) -> int:
    """Lengths that are counted together: each up to 8, then coarser."""
    if length <= 8:
        return length
    if length <= 16:
        return length & -4  # down to a multiple of 4
    return length & -16


KIND = SuffixDrafter
