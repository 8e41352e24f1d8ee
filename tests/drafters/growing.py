"""Growing one tree from a function, as drafters do for many."""

from __future__ import annotations

from drafttrain.drafters.common.tree_growth import GrowingTree, grow_trees


def expand(spec, root, advance, kept_ids=None, sampler=None):
    """Grows a tree. advance: (tokens, parents) of the nodes to open -> logits of their children."""
    tree = GrowingTree(spec, root, kept_ids, sampler)
    return grow_trees([tree], lambda growing, depth: [advance(tree.tokens, tree.parents)])[0]
