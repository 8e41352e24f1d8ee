"""The sessions of draft models: each holds one sequence's keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.common.rows import Children, JointSession
from drafttrain.drafters.common.tree_growth import GrowingTree
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.draft_model.vocabularies import CommittedText, VocabularyPair
from drafttrain.ops.tree_attention import TreeLayout
from drafttrain.ops.tree_cache import ROOM, TreeCache


class DraftModelSession(JointSession):
    """One sequence being drafted.

    Nodes that are committed keep their keys: a node sees its own path only, so reading the
    committed tokens again would give the same keys.

    Attributes:
        root: [1, d] logits after the last committed token; None before the first `extend`, and once
            the sequence exceeds the draft model's context.
        tokens, parents: of the opened nodes. full: the sequence exceeds the context.
    """

    def __init__(self, drafter: Any, prompt_ids: Tensor, max_length: int):
        super().__init__(drafter, TreeCache(max_length + ROOM, dtype=drafter.runner.dtype))
        self.unread = prompt_ids[:1]  # no extend() contains the prompt's first token
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.full = False
        # Columns of the model's logits that a tree is drafted from.
        self.columns: slice | Tensor = slice(None)

    def reaches(self, count: int) -> bool:
        """True if this many further tokens are inside the draft model's context."""
        limit = self.drafter.runner.max_positions
        return limit is None or self.length + count <= limit

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
            # A forward of no new tokens: the root, which is committed already, and all nodes are
            # stored, and some of the nodes are kept.
            self.advance(-1)
            held = 1 + len(self.parents)
            self.cache.open([(0, TreeLayout(self.length, self.parents, held=held))])
            self.cache.commit([kept])
            new = new[len(kept) - 1 :]
        self.forget()
        new = torch.cat((self.unread, new))
        self.unread = new[:0]
        self.full = not self.reaches(len(new))
        if self.full:
            self.root = None
            return new[:0]
        return new

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

    def read_children(self, children: Children) -> Children:
        assert children.logits is not None
        return children._replace(logits=children.logits[:, self.columns])


class OwnVocabularySession(DraftModelSession):
    """A sequence whose committed text the draft model reads in its own tokens.

    New text may change the tokens before it: their keys are dropped and the text is read again from
    there.

    Attributes:
        committed: the text with the ids of all tokens that are read.
    """

    def __init__(
        self,
        drafter: Any,
        pair: VocabularyPair,
        prompt_ids: Tensor,
        max_length: int,
    ):
        super().__init__(drafter, prompt_ids, max_length)
        self.committed = CommittedText(pair)
        self._first = self.unread.tolist()
        self.unread = prompt_ids[:0]

    def take(self, new: Tensor) -> Tensor:
        held = len(self.committed.ids)
        kept = self.committed.extend(self._first + new.tolist())
        self._first = []
        if kept < held:
            self.root = None
            self.cache.lengths[0] = kept
        own = torch.tensor(self.committed.ids[kept:], dtype=torch.long, device=new.device)
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
        if self.committed.pair.by_text(spec):
            return self.committed.rewrite(tree, spec)
        return tree
