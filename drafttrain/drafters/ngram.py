"""Prompt lookup: what followed the last few tokens when they stood earlier in the sequence. No weights, no training.

Source: prompt lookup decoding (Saxena 2023); here with an index instead of a scan, several continuations as a tree, and
matches that run into the end of the sequence continued periodically.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, TreeSpec
from drafttrain.errors import UserError
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target

# Occurrences looked at per suffix length; older ones seldom add a continuation that newer ones lack.
_OCCURRENCES = 16


class NgramDrafter(Drafter):
    """Proposes what followed the longest repeated suffix, most recent occurrence first.

    Args:
        max_n, min_n: longest and shortest suffix that is looked up, in tokens.

    Raises:
        UserError: not 1 <= min_n <= max_n.
    """

    kind = "ngram"
    trainable = False
    feature_layers: tuple[int, ...] = ()
    # Beside another drafter only matches of two tokens and more are worth their nodes.
    defaults_beside = {"min_n": 2}

    def __init__(self, max_n: int = 4, min_n: int = 1):
        if not 1 <= min_n <= max_n:
            raise UserError(f"min_n={min_n}, max_n={max_n}: suffix lengths must satisfy 1 <= min_n <= max_n")
        self.max_n, self.min_n = max_n, min_n

    def bind(self, target: Target) -> None:
        """Nothing is shared with the target: any will do."""

    def start(self, prompt_ids: Tensor, max_length: int) -> NgramSession:
        """Begins a sequence. prompt_ids: [L] int64; max_length is of no concern here."""
        return NgramSession(prompt_ids, self.max_n, self.min_n)


class NgramSession:
    """One sequence's tokens, and for every n-gram in it the positions that followed.

    Committing a token costs one dictionary entry per suffix length; proposing costs a look-up per length.
    """

    def __init__(self, prompt_ids: Tensor, max_n: int, min_n: int):
        self.device = prompt_ids.device
        self.sizes = range(max_n, min_n - 1, -1)
        self.tokens: list[int] = prompt_ids[:1].tolist()
        self.followers: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        """Takes committed tokens [m]; features are not used."""
        for token in tokens.tolist():
            place = len(self.tokens)
            for n in self.sizes:
                if n <= place:
                    self.followers[tuple(self.tokens[place - n :])].append(place)
            self.tokens.append(token)

    def propose(self, spec: TreeSpec, sampler: Sampler | None = None) -> TokenTree:
        """Drafts continuations of earlier occurrences, longest suffix and most recent first, as far as `spec` has room.

        A chain follows the first match only. Trees branch where further matches go on differently: at most the spec's
        children per node and nodes in all. A match is a rule, not a draw: `sampler` is not used.
        """
        if spec.shape == "none":
            return TokenTree.empty(self.device)
        widths = (spec.top_k,) * spec.depth if spec.shape == "dynamic" else spec.fanout
        tokens: list[int] = []
        parents: list[int] = []
        children: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for place in self._matches():
            if len(tokens) == spec.budget:
                break
            node = -1
            for width, token in zip(widths, self._continuation(place), strict=False):
                below = children[node]
                if token not in below:
                    if len(below) == width or len(tokens) == spec.budget:
                        break
                    below[token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = below[token]
            if spec.shape == "chain":
                break
        return TokenTree(torch.tensor(tokens, dtype=torch.long, device=self.device), parents)

    def _matches(self):
        """Positions that followed an earlier occurrence of the current suffix."""
        seen: set[int] = set()
        for n in self.sizes:
            if n > len(self.tokens):
                continue
            places = self.followers.get(tuple(self.tokens[-n:]), ())
            for place in islice(reversed(places), _OCCURRENCES):
                if place not in seen:
                    seen.add(place)
                    yield place

    def _continuation(self, place: int):
        """The tokens from `place` on; past the end of the sequence the stretch since `place` repeats itself."""
        period = len(self.tokens) - place
        step = 0
        while True:
            yield self.tokens[place + step % period]
            step += 1


KIND = NgramDrafter
