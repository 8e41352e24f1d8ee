"""How deep a drafter drafts in engines: its tuned tree, the chain of those that draft chains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import decoding_settings, default_tree
from drafttrain.drafters.shipping import Trained, shipping
from drafttrain.files import Json, value_of

_CHAIN = "chain:3"  # of drafters that were not tuned


def fastest(results: Sequence[Json]) -> Json | None:
    """The measured run with the highest speed-up; None if no run drafted."""
    measured = [run for run in results if run["decoding"].get("tree", {}).get("depth")]

    def speedup(run: Json) -> float:
        return value_of(run["overall"], "speedup_vs_fastest", 0.0)

    return max(measured, key=speedup, default=None)


def engine_chain(trained: Trained, results: Sequence[Json] = ()) -> int:
    """Speculative tokens for engines that draft chains.

    Those of the fastest measured chain, else tune's, else the tree's depth.
    """
    chains = []
    for run in results:
        if run["decoding"].get("tree", {}).get("spec", "").startswith("chain:"):
            chains.append(run)
    measured = fastest(chains)
    tuned = decoding_settings(str(trained.folder)).get("chain")
    if measured is not None:
        tree = TreeSpec.parse(measured["decoding"]["tree"]["spec"])
    elif tuned:
        tree = TreeSpec.parse(tuned)
    else:
        tree = tuned_tree(trained.folder, results)
    return engine_depth(trained, tree)


def engine_depth(trained: Trained, tree: TreeSpec) -> int:
    """Speculative tokens for an engine: the tree's depth, at most what the drafter reaches.

    A drafter of blocks drafts all of a block.
    """
    kind = shipping(trained.kind)
    block = kind.block_depth(trained)
    if block:
        return block
    if kind.depth_key:
        return min(tree.depth, trained.config[kind.depth_key])
    return tree.depth


def tuned_tree(folder: Path, results: Sequence[Json] = ()) -> TreeSpec:
    """The tree to serve with.

    The fastest measured run's, else decoding.json's, else a chain of three tokens.
    """
    best = fastest(results)
    if best is not None:
        return TreeSpec.parse(best["decoding"]["tree"]["spec"])
    tree = TreeSpec.parse(default_tree(str(folder)) or _CHAIN)
    if tree.depth:
        return tree
    return TreeSpec.parse(_CHAIN)
