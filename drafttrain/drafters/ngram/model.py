"""Prompt lookup: proposes what followed an earlier occurrence of the last tokens. No weights.

Source: prompt lookup decoding (Saxena 2023). Here an index replaces the scan, several continuations
form a tree, a match that reaches the end of the sequence continues periodically, and every node has
a probability, which grows with the length of the match. Each sequence estimates it from its own
committed tokens, drafted or not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import islice

from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, Session
from drafttrain.drafters.common.best_first import Guess, HitRates, grow_guesses
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.ops.sampling import Sampler

# Occurrences tried per suffix length; older ones rarely add another continuation.
_OCCURRENCES = 16
# Weight, in observed matches, of the prior that a match of n tokens continues with probability n /
# (n + 2).
_BELIEF = 4


class NgramDrafter(Drafter):
    """Proposes what followed the longest repeated suffix, most recent occurrence first.

    Args:
        max_n, min_n: longest and shortest suffix to look up, in tokens.

    Raises:
        UserError: not 1 <= min_n <= max_n.
    """

    kind = "ngram"
    # Next to another drafter, matches of one token are not worth their nodes.
    defaults_beside = {"min_n": 2}

    def __init__(self, max_n: int = 8, min_n: int = 1):
        if not 1 <= min_n <= max_n:
            raise UserError(
                f"min_n={min_n}, max_n={max_n}: suffix lengths must satisfy 1 <= min_n <= max_n"
            )
        self.max_n = max_n
        self.min_n = min_n

    def start(self, prompt_ids: Tensor, max_length: int) -> NgramSession:
        return NgramSession(prompt_ids, self.max_n, self.min_n)


class NgramSession(Session):
    """One sequence's tokens, and the positions after every n-gram in it.

    That is one dictionary entry per token and length.

    Attributes:
        rates: by length of the longest match.
    """

    def __init__(self, prompt_ids: Tensor, max_n: int, min_n: int):
        self.device = prompt_ids.device
        self.prompt_length = len(prompt_ids)
        self.sizes = range(max_n, min_n - 1, -1)
        self.tokens: list[int] = prompt_ids[:1].tolist()
        self.followers: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        self.rates = HitRates(_BELIEF)

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        for token in tokens.tolist():
            place = len(self.tokens)
            keys = [tuple(self.tokens[place - n :]) for n in self.sizes if n <= place]
            # Repetition inside the prompt predicts the target's own poorly.
            if place >= self.prompt_length:
                self._learn(keys, token)
            for key in keys:
                self.followers[key].append(place)
            self.tokens.append(token)

    def _learn(self, keys: list[tuple[int, ...]], token: int) -> None:
        """Counts whether the longest match, of the last tokens' n-grams `keys`, was right."""
        for key in keys:
            if key in self.followers:
                latest = self.followers[key][-1]
                self.rates.add(len(key), 0 if self.tokens[latest] == token else None)
                return

    def chance(self, n: int, step: int = 0) -> float:
        """Probability that the next token of a match of n tokens, and `step` more, is right."""
        n = min(n + step, self.sizes.start)
        return self.rates.chance(n, n / (n + 2))

    def propose(self, spec: TreeSpec, sampler: Sampler | None = None) -> TokenTree:
        """Drafts continuations of earlier occurrences.

        A chain follows only the most recent one of the longest match.
        """
        guesses = []
        for n, place in self._matches():
            guesses.append(Guess(partial(self._continued, place), partial(self.chance, n)))
            if spec.shape == "chain":
                break
        return grow_guesses(spec, guesses, self.device)

    def _matches(self) -> Iterator[tuple[int, int]]:
        """(length, next position) of earlier occurrences of the current suffix, the best first."""
        seen = set()
        for n in self.sizes:
            if n > len(self.tokens):
                continue
            places = self.followers.get(tuple(self.tokens[-n:]), ())
            for place in islice(reversed(places), _OCCURRENCES):
                if place not in seen:
                    seen.add(place)
                    yield n, place

    def _continued(self, place: int, step: int) -> int:
        """The token at `place` plus `step`; the end of the sequence goes on at `place`."""
        period = len(self.tokens) - place
        return self.tokens[place + step % period]


KIND = NgramDrafter
