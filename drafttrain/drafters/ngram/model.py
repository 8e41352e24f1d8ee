"""Prompt lookup: what followed the last few tokens when they stood earlier in the sequence. No weights, no training.

Source: prompt lookup decoding (Saxena 2023); here with an index instead of a scan, several continuations as a tree, matches
that run into the end of the sequence continued periodically, and a probability for every node: the longer a match, the
likelier it goes on. How likely, each sequence learns from its own committed tokens, whether they had been drafted or not.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import islice

from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, Session
from drafttrain.drafters.common.matches import match_tree
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.ops.sampling import Sampler

# Occurrences looked at per suffix length; older ones seldom add a continuation that newer ones lack.
_OCCURRENCES = 16
# A match of n tokens is expected to go on with n / (n + 2), a belief that weighs as much as so many observed matches.
_BELIEF = 4


class NgramDrafter(Drafter):
    """Proposes what followed the longest repeated suffix, most recent occurrence first.

    Args:
        max_n, min_n: longest and shortest suffix that is looked up, in tokens.

    Raises:
        UserError: not 1 <= min_n <= max_n.
    """

    kind = "ngram"
    # Beside another drafter only matches of two tokens and more are worth their nodes.
    defaults_beside = {"min_n": 2}

    def __init__(self, max_n: int = 8, min_n: int = 1):
        if not 1 <= min_n <= max_n:
            raise UserError(f"min_n={min_n}, max_n={max_n}: suffix lengths must satisfy 1 <= min_n <= max_n")
        self.max_n, self.min_n = max_n, min_n

    def start(self, prompt_ids: Tensor, max_length: int) -> NgramSession:
        """Begins a sequence. prompt_ids: [L] int64; max_length is of no concern here."""
        return NgramSession(prompt_ids, self.max_n, self.min_n)


class NgramSession(Session):
    """One sequence's tokens, and for every n-gram in it the positions that followed.

    Committing a token costs one dictionary entry per suffix length; proposing costs a look-up per length.
    """

    def __init__(self, prompt_ids: Tensor, max_n: int, min_n: int):
        self.device = prompt_ids.device
        self.prompt_length = len(prompt_ids)
        self.sizes = range(max_n, min_n - 1, -1)
        self.tokens: list[int] = prompt_ids[:1].tolist()
        self.followers: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        # By length of the longest match: how often there was one, and how often its next token came.
        self.matches, self.hits = [0] * (max_n + 1), [0] * (max_n + 1)

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        """Takes committed tokens [m]; features are not used."""
        for token in tokens.tolist():
            place = len(self.tokens)
            keys = [tuple(self.tokens[place - n :]) for n in self.sizes if n <= place]
            if place >= self.prompt_length:  # what the prompt repeats says little about what the target will
                self._learn(keys, token)
            for key in keys:
                self.followers[key].append(place)
            self.tokens.append(token)

    def _learn(self, keys: list[tuple[int, ...]], token: int) -> None:
        longest = next((key for key in keys if key in self.followers), None)
        if longest is not None:
            self.matches[len(longest)] += 1
            self.hits[len(longest)] += self.tokens[self.followers[longest][-1]] == token

    def chance(self, n: int) -> float:
        """The probability that a match of n tokens goes on for one more."""
        n = min(n, self.sizes.start)
        return (self.hits[n] + _BELIEF * n / (n + 2)) / (self.matches[n] + _BELIEF)

    def propose(self, spec: TreeSpec, sampler: Sampler | None = None) -> TokenTree:
        """Drafts continuations of earlier occurrences; a chain follows the longest match's most recent one only. A match is a
        rule, not a draw: `sampler` is not used.
        """
        matches = ((self._continuation(place), partial(self._chance_at, n)) for n, place in self._matches())
        return match_tree(spec, matches, self.device)

    def _chance_at(self, n: int, step: int) -> float:
        return self.chance(n + step)

    def _matches(self):
        """(length, position that followed) of earlier occurrences of the current suffix, the best first."""
        seen: set[int] = set()
        for n in self.sizes:
            if n > len(self.tokens):
                continue
            places = self.followers.get(tuple(self.tokens[-n:]), ())
            for place in islice(reversed(places), _OCCURRENCES):
                if place not in seen:
                    seen.add(place)
                    yield n, place

    def _continuation(self, place: int):
        """The tokens from `place` on; past the end of the sequence the stretch since `place` repeats itself."""
        period = len(self.tokens) - place
        step = 0
        while True:
            yield self.tokens[place + step % period]
            step += 1


KIND = NgramDrafter
