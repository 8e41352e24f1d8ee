"""Growing one tree from a function, as drafters do for many."""

from __future__ import annotations

from drafttrain.drafters.common.tree_growth import Children, GrowingTree, grow_trees


def expand(spec, root, advance, kept_ids=None, sampler=None):
    """Grows a tree below a root with logits [d]. advance: (tokens, parents) of the nodes to open -> logits of their children."""
    tree = GrowingTree(spec, Children(root[None]), kept_ids, sampler)

    def step(_growing, _depth):
        return [Children(advance(tree.tokens, tree.opened[-len(tree.above) :]))]

    return grow_trees([tree], step)[0]
