"""The sessions of draft models: keys of committed tokens and of drafted nodes, for one sequence
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import JointSession
from drafttrain.drafters.common.static_draft import DraftSteps
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.draft_model.vocabularies import CommittedText, VocabularyPair
from drafttrain.ops.tree_attention import TreeLayout
from drafttrain.ops.tree_cache import TreeCache

# Slots in a cache for the nodes of a growing tree; the cache grows when it needs more.
_TREE_SLOTS = 64


class SeparateCaches:
    """Attention context of packed tokens: each session's tokens see its own cache."""

    def __init__(self, caches: Sequence[TreeCache], sizes: Sequence[int]):
        self.caches, self.sizes = caches, list(sizes)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **form: Any) -> Tensor:
        parts = zip(
            self.caches,
            *(x.split(self.sizes, dim=2) for x in (query, key, value)),
            strict=True,
        )
        return torch.cat([cache.attend(layer, q, k, v, **form) for cache, q, k, v in parts], dim=1)


class DraftModelSession(JointSession):
    """One sequence being drafted.

    The cache holds the keys of all committed tokens but the last, then the last one (the root),
    then this round's nodes in the order they were opened. Nodes that are committed keep their keys:
    a node sees its own path only, so reading the committed tokens again would give the same keys.

    Attributes:
        root: [1, d] logits after the last committed token; None before the first `extend`, and once
            the sequence exceeds the draft model's context.
        tokens, parents: of the opened nodes. full: the sequence exceeds the context.
    """

    def __init__(self, drafter: Any, prompt_ids: Tensor, max_length: int):
        self.drafter = drafter
        self.cache = TreeCache(max_length + _TREE_SLOTS)
        self.unread = prompt_ids[:1]  # no extend() contains the prompt's first token
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.full = False

    @property
    def held(self) -> int:
        return self.cache.lengths[0] + 1

    def advance(self, count: int) -> None:
        self.cache.lengths[0] += count

    def place(self, steps: DraftSteps, row: int) -> None:
        super().place(steps, row)
        self.cache = steps.cache.view(row)

    def reaches(self, depth: int) -> bool:
        """True if a node of this depth is inside the draft model's context."""
        limit = self.drafter.runner.max_positions
        return limit is None or self.cache.lengths[0] + 1 + depth <= limit

    def take(self, new: Tensor) -> Tensor:
        """Commits the root and the drafted nodes that `new` [m] follows, opens a pass over the rest
        and returns it.

        The rest contains at least the last token, whose logits are the next round's root.
        """
        if self.full:
            return new[:0]
        if self.root is not None:
            kept = [0]
            for token in new[:-1].tolist():
                child = self._child(kept[-1] - 1, token)
                if child < 0:
                    break
                kept.append(child + 1)
            self.cache.open(
                [(0, TreeLayout(self.cache.lengths[0], self.parents, held=1 + len(self.parents)))]
            )
            self.cache.commit([kept])
            new = new[len(kept) - 1 :]
        self.forget()
        new, self.unread = torch.cat((self.unread, new)), new[:0]
        self.full = not self.reaches(len(new) - 1)
        if self.full:
            self.root = None
            return new[:0]
        self.cache.reserve(self.cache.lengths[0] + len(new))
        self.cache.open([(0, len(new))])
        return new

    def _child(self, parent: int, token: int) -> int:
        found = (
            i
            for i, node in enumerate(zip(self.parents, self.tokens, strict=True))
            if node == (parent, token)
        )
        return next(found, -1)

    def offer(self, tree: TokenTree, spec: TreeSpec) -> TokenTree:
        """The drafted tree in the target's ids."""
        return tree

    def forget(self) -> None:
        """Drops the opened nodes."""
        self.tokens = []
        self.parents = []

    def open(self, tokens: Tensor, parents: list[int]) -> None:
        """Opens a pass over nodes: ids [m], and their parents among all opened nodes (-1: the
        root).
        """
        length = self.cache.lengths[0]
        held = 1 + len(self.parents)
        self.tokens += tokens.tolist()
        self.parents += parents
        if length + 1 + len(self.parents) > self.cache.capacity:
            self.cache.reserve(length + 1 + len(self.parents) + _TREE_SLOTS)
        self.cache.open([(0, TreeLayout(length, self.parents, held=held))])


class OwnVocabularySession(DraftModelSession):
    """A sequence whose committed text the draft model reads in its own tokens.

    New text may change the tokens before it: their keys are dropped and the text is read again from
    there. text: the committed text with the ids of all tokens that are read.
    """

    def __init__(self, drafter: Any, pair: VocabularyPair, prompt_ids: Tensor, max_length: int):
        super().__init__(drafter, prompt_ids, max_length)
        self.text, self._first, self.unread = (
            CommittedText(pair),
            self.unread.tolist(),
            prompt_ids[:0],
        )

    def take(self, new: Tensor) -> Tensor:
        held = len(self.text.ids)
        kept = self.text.extend(self._first + new.tolist())
        self._first = []
        if kept < held:  # keys of all but the last are in the cache
            self.root = None
            self.cache.lengths[0] = kept
        own = torch.tensor(self.text.ids[kept:], dtype=torch.long, device=new.device)
        if len(own):
            return super().take(own)
        self.forget()
        return own

    def offer(self, tree: TokenTree, spec: TreeSpec) -> TokenTree:
        if self.text.pair.by_text(spec):
            return self.text.rewrite(tree, spec)
        return tree
