"""The sessions of draft models: each holds one sequence's keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.common.rows import Children, HostPass, JointSession, Steps
from drafttrain.drafters.common.tree_growth import GrowingTree
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.draft_model.vocabularies import CommittedText, VocabularyPair
from drafttrain.ops.tree_attention import TreeLayout
from drafttrain.ops.tree_cache import TreeCache

# Slots in a cache for the nodes of a growing tree; the cache grows when it needs more.
_TREE_SLOTS = 64


class SeparateCaches:
    """Attention context of packed tokens: each session's tokens see its own cache."""

    def __init__(self, caches: Sequence[TreeCache], sizes: Sequence[int]):
        self.caches = caches
        self.sizes = list(sizes)  # new tokens of each session

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **form: Any,
    ) -> Tensor:
        queries = query.split(self.sizes, dim=2)
        keys = key.split(self.sizes, dim=2)
        values = value.split(self.sizes, dim=2)
        outs = []
        for i, cache in enumerate(self.caches):
            outs.append(cache.attend(layer, queries[i], keys[i], values[i], **form))
        return torch.cat(outs, dim=1)


class CachePass(HostPass):
    """A pass over the caches of draft models' sessions."""

    def __init__(
        self,
        sessions: Sequence[DraftModelSession],
        counts: Sequence[int],
        computed: Sequence[int] | None = None,
        layouts: Sequence[TreeLayout] | None = None,
    ):
        super().__init__(sessions, counts, computed, layouts)
        caches = []
        for session, layout in zip(sessions, self.layouts, strict=True):
            end = layout.prefix_len + layout.held + layout.count
            if end > session.cache.capacity:
                session.cache.reserve(end + _TREE_SLOTS)
            session.cache.open([(0, layout)])
            caches.append(session.cache)
        context: TreeCache | SeparateCaches = caches[0]
        if len(caches) > 1:
            context = SeparateCaches(caches, counts)
        self.contexts = [context]


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
        super().__init__(drafter)
        self.cache = TreeCache(max_length + _TREE_SLOTS, dtype=drafter.runner.dtype)
        self.unread = prompt_ids[:1]  # no extend() contains the prompt's first token
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.full = False
        self.rooted = 0  # 1 once the root, whose keys stand behind the committed ones, is read
        # Columns of the model's logits that a tree is drafted from.
        self.columns: slice | Tensor = slice(None)

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.cache.lengths[0] + self.rooted

    @property
    def held(self) -> int:
        return self.cache.lengths[0] + 1

    def advance(self, count: int) -> None:
        self.cache.lengths[0] += count

    def place(self, steps: Steps, row: int) -> None:
        super().place(steps, row)
        self.cache = steps.cache.view(row)

    def reaches(self, depth: int) -> bool:
        """True if a node of this depth is inside the draft model's context."""
        limit = self.drafter.runner.max_positions
        return limit is None or self.cache.lengths[0] + 1 + depth <= limit

    def take(self, new: Tensor) -> Tensor:
        """Commits what of `new` [m] was drafted, and opens a pass over the rest, which it returns.

        The root and the drafted nodes that `new` follows are committed. The rest contains at least
        the last token, whose logits are the next round's root.
        """
        if self.full:
            return new[:0]
        if self.root is not None:
            kept = [0]  # the root, then nodes
            for token in new[:-1].tolist():
                child = self._child(kept[-1] - 1, token)
                if child < 0:
                    break
                kept.append(child + 1)
            held = 1 + len(self.parents)
            # A forward of no new tokens: all nodes are stored already, and some of them are kept.
            self.cache.open([(0, TreeLayout(self.cache.lengths[0], self.parents, held=held))])
            self.cache.commit([kept])
            new = new[len(kept) - 1 :]
        self.forget()
        self.rooted = 0
        new = torch.cat((self.unread, new))
        self.unread = new[:0]
        self.full = not self.reaches(len(new) - 1)
        if self.full:
            self.root = None
            return new[:0]
        return new

    def commit(self, tokens: Tensor, root: Tensor) -> None:
        self.cache.commit([range(len(tokens) - 1)])  # the last one is the root
        self.rooted = 1
        self.root = root

    def _child(self, parent: int, token: int) -> int:
        """The opened node of a token below a parent; -1 if there is none."""
        for i, node in enumerate(zip(self.parents, self.tokens, strict=True)):
            if node == (parent, token):
                return i
        return -1

    def forget(self) -> None:
        """Drops the opened nodes."""
        self.tokens = []
        self.parents = []

    def reads_to(self, spec: TreeSpec) -> bool:
        return self.root is not None and self.reaches(spec.depth)

    def form(self, spec: TreeSpec) -> tuple[TreeSpec, Tensor | None]:
        self.forget()
        self.columns, ids = self.drafter.choice_of(spec)
        return spec, ids

    def open_nodes(self, tree: GrowingTree) -> Tensor:
        new = tree.tokens
        if isinstance(self.columns, Tensor):
            new = self.columns[new]
        self.tokens += new.tolist()
        self.parents = tree.opened
        return new

    def logits_of(self, children: Children) -> Tensor:
        assert isinstance(children.logits, Tensor)
        return children.logits[:, self.columns]


class OwnVocabularySession(DraftModelSession):
    """A sequence whose committed text the draft model reads in its own tokens.

    New text may change the tokens before it: their keys are dropped and the text is read again from
    there.

    Attributes:
        text: the committed text with the ids of all tokens that are read.
    """

    def __init__(
        self,
        drafter: Any,
        pair: VocabularyPair,
        prompt_ids: Tensor,
        max_length: int,
    ):
        super().__init__(drafter, prompt_ids, max_length)
        self.text = CommittedText(pair)
        self._first = self.unread.tolist()
        self.unread = prompt_ids[:0]

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

    def form(self, spec: TreeSpec) -> tuple[TreeSpec, Tensor | None]:
        spec, ids = super().form(spec)
        if ids is None:  # text is written, not drawn
            spec = replace(spec, sampled=False)
        return spec, ids

    def offer(self, tree: TokenTree, spec: TreeSpec) -> TokenTree:
        if self.text.pair.by_text(spec):
            return self.text.rewrite(tree, spec)
        return tree
