"""The shapes of tree that a round may draft, and their text form."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated

from pydantic import Field

from drafttrain.errors import UserError, shown
from drafttrain.files import Json, read_json
from drafttrain.ops.sampling import SamplingParams
from drafttrain.values import Name, check, number

MOST_NODES = 1024  # of any tree
MOST_DEPTH = 256  # also the most children per node of a dynamic tree
# Depths and numbers of nodes among which tuning and adaptive decoding choose.
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 768)
_LONGEST_FILE = 1_000_000  # bytes

# A file's content: the ranks on the path to each node.
_Paths = Annotated[
    list[Annotated[list[Annotated[int, Field(ge=0, le=1_000_000)]], Field(min_length=1)]],
    Field(min_length=1),
]


@dataclass(frozen=True)
class TreeSpec:
    """The shape of the tree that a round drafts.

    shape      text form             meaning
    none       none                  no drafting: plain autoregressive decoding
    chain      chain:3               the 3 likeliest tokens one after the other
    fanout     fanout:4x2x1          4 children of the root, 2 of each of them, 1 of each of those
    dynamic    dynamic:5,8,24        EAGLE-2 (arXiv 2406.16858): depth 5, the 8 likeliest paths expand by 8 tokens each,
                                     the 24 likeliest nodes by path probability are verified
    paths      paths:0,1,0-0,0-1     a fixed tree, each node by the ranks on its path: 0-1 is the second likeliest token
                                     after the likeliest one
               paths:FILE.json       the same as a list of lists, [[0], [1], [0, 0], [0, 1]] (as Medusa's choices are)

    A tree has at most 1024 nodes, is at most 256 deep, and a dynamic one has at most 256 children
    per node.

    option     appended to a shape   meaning
    sampled    chain:3@sample        tokens are drawn from the drafter's own distribution, without replacement, under the
                                     target's temperature, top-k, top-p and min-p; not for dynamic
                                     trees
    stop       chain:8@stop=0.2      paths whose probability is below this are not continued
    cut        dynamic:4,4,16@cut=0.05  nodes whose path's probability is below this are not verified; not with @sample
    alone      chain:8@alone=0.6     a second drafter's match of this probability is drafted alone (default 0.75 in dynamic
                                     trees, which both drafters share otherwise; 0.5 in other
                                     shapes)
    match      dynamic:4,4,6@match=11  most nodes of a match that is drafted alone, as far as they are likely (default: the
                                     tree's own number)
    nomatch    chain:8@nomatch       the second drafter is not used
    adapt      dynamic:5,8,24@adapt  at most this tree: rounds draft less, or nothing, where that is faster

    Attributes:
        depth: of the deepest node; fanout: most children per node at each depth (not for dynamic
            trees).
        top_k: most children of any node; budget: most nodes; most: the same including matches that
            are drafted alone.
        paths: every node's ranks in shape `paths`, parents first.
    """

    shape: str = "chain"
    depth: int = 3
    fanout: tuple[int, ...] = ()
    top_k: int = 1
    budget: int = 3
    paths: tuple[tuple[int, ...], ...] = ()
    sampled: bool = False
    stop: float = 0.0
    cut: float = 0.0
    alone: float = 0.0
    match: int = 0
    matches: bool = True
    adaptive: bool = False

    @staticmethod
    def parse(text: str) -> TreeSpec:
        """Reads the text form above.

        Raises:
            UserError: an unknown shape or option, a number out of its range, a tree that is too
                large, nodes without their parents, or options that do not go together.
        """
        named = f"tree={shown(text)}"
        if not isinstance(text, str):
            raise UserError(f"{named} must be text such as chain:3")
        body, *options = text.strip().split("@", 20)  # no text has more options
        spec = _parse_shape(named, body)
        for option in options:
            fields = _option_fields(option)
            if not fields or spec.shape == "none":
                raise UserError(
                    f"{named}: {shown(option)} is not a valid option; write @sample, @stop=P, @cut=P or @alone=P with P "
                    "between 0 and 1, @match=NODES, @nomatch or @adapt"
                )
            spec = replace(spec, **fields)
        # Dropping drawn tokens by their outcome would leave tokens that are not distributed as q.
        if spec.sampled and spec.shape == "dynamic":
            raise UserError(
                f"{named}: a dynamic tree drops tokens after drawing them, which biases; use fanout:4x2x1"
            )
        if spec.sampled and spec.cut:
            raise UserError(
                f"{named}: @cut drops tokens after drawing them, which biases; use @stop={spec.cut:g}"
            )
        if spec.sampled:
            for ranks in ranks_below(spec.paths).values():
                if ranks != list(range(len(ranks))):
                    raise UserError(
                        f"{named}: ranks of drawn siblings must be 0, 1, 2, ... without a gap"
                    )
        return spec

    @functools.cached_property
    def floor(self) -> float:
        """Paths of a lower log-probability are not continued."""
        least = max(self.stop, self.cut)
        if least:
            return math.log(least)
        return -math.inf

    @functools.cached_property
    def most(self) -> int:
        return max(self.budget, self.match)

    def check(self, sampling: SamplingParams) -> None:
        """Raises UserError for a sampled tree with greedy decoding."""
        if self.sampled and sampling.greedy:
            raise UserError(
                f"tree='{self}' draws its tokens, but temperature=0 is greedy; set one, or drop @sample"
            )

    def __str__(self) -> str:
        text = {
            "none": "none",
            "chain": f"chain:{self.depth}",
            "fanout": fanout_text(self.fanout),
            "dynamic": f"dynamic:{self.depth},{self.top_k},{self.budget}",
            "paths": paths_text(self.paths),
        }[self.shape]
        if self.sampled:
            text += "@sample"
        for name in ("stop", "cut", "alone", "match"):
            value = getattr(self, name)
            if value:
                text += f"@{name}={value}"
        if not self.matches:
            text += "@nomatch"
        if self.adaptive:
            text += "@adapt"
        return text

    def smaller(self) -> list[TreeSpec]:
        """The trees that an adaptive decoder may choose, from the smallest to this one.

        `none` is not among them.
        """
        depths = _sizes_to(self.depth)
        if self.shape == "chain":
            texts = [f"chain:{depth}" for depth in depths]
        elif self.shape == "dynamic":
            texts = []
            for size in _sizes_to(self.budget):
                for depth in depths:
                    if depth <= size or size == self.budget:
                        texts.append(f"dynamic:{depth},{min(self.top_k, size)},{size}")
        elif self.shape == "fanout":
            texts = [fanout_text(self.fanout[:depth]) for depth in depths]
        else:
            texts = []
            for depth in depths:
                texts.append(paths_text([path for path in self.paths if len(path) <= depth]))

        _, at, options = str(replace(self, adaptive=False)).partition("@")
        return [TreeSpec.parse(text + at + options) for text in texts]


def _sizes_to(most: int) -> list[int]:
    """The usual sizes below a largest one, and that one."""
    return [size for size in SIZES if size < most] + [most]


def _too_large(named: str) -> UserError:
    return UserError(
        f"{named} is too large: a tree has at most {MOST_NODES} nodes and is at most {MOST_DEPTH} deep, a dynamic one has at "
        f"most {MOST_DEPTH} children per node; write a smaller one, such as dynamic:5,8,24"
    )


def _no_tree(named: str) -> UserError:
    return UserError(
        f"{named} is not a tree; write none, chain:3, fanout:4x2x1, dynamic:DEPTH,TOPK,NODES (dynamic:5,8,24), "
        "paths:0,1,0-0 or paths:FILE.json"
    )


def _whole(text: str) -> int:
    """The number that a text of ASCII digits is, at most 10**9; -1 for any other text."""
    if not (text.isascii() and text.isdigit()):
        return -1
    if len(text) < 10:
        return int(text)
    return 10**9


def _parse_shape(named: str, body: str) -> TreeSpec:
    shape, _, rest = body.partition(":")
    if shape == "none" and not rest:
        return TreeSpec("none", 0, (), 0, 0)
    if shape == "paths" and rest:
        return _parse_paths(named, rest)
    # Only fan-outs are written with an x.
    parts = rest.replace("x", ",").split(",", MOST_DEPTH)
    numbers = tuple(map(_whole, parts[:MOST_DEPTH]))
    wanted = {
        "chain": 1,
        "dynamic": 3,
        "fanout": len(numbers),
    }.get(shape)
    if min(numbers) < 1 or len(numbers) != wanted:
        raise _no_tree(named)
    # Of a chain and a dynamic tree; a fan-out's follow from all its numbers.
    depth = numbers[0]
    nodes = numbers[-1]
    widest = 1
    if shape == "fanout":
        depth = len(parts)
        nodes = sum(accumulate(numbers, mul))
        widest = max(numbers)
    if depth > MOST_DEPTH or nodes > MOST_NODES or (shape == "dynamic" and numbers[1] > MOST_DEPTH):
        raise _too_large(named)
    if shape == "dynamic":
        return TreeSpec("dynamic", depth, (), numbers[1], nodes)
    if shape == "chain":
        numbers = (1,) * depth
    return TreeSpec(shape, depth, numbers, widest, nodes)


def _parse_paths(named: str, rest: str) -> TreeSpec:
    """Reads the nodes of a fixed tree, from text or a file.

    Raises:
        UserError: no list of paths, a file that is missing or holds none, too many nodes, or a node
            without its parent.
    """
    if rest.endswith(".json"):
        path = Path(check(f"{named}: file", rest, Name)).expanduser()
        if path.is_file() and path.stat().st_size > _LONGEST_FILE:
            raise _too_large(named)
        fix = "it must hold a list of lists of ranks, such as [[0], [1], [0, 0]]"
        found = read_json(path, f"{named}: file", fix, list[list[int]])
    else:
        nodes = [path.split("-", MOST_DEPTH) for path in rest.split(",", MOST_NODES)]
        if len(nodes) > MOST_NODES or max(map(len, nodes)) > MOST_DEPTH:
            raise _too_large(named)
        found = [list(map(_whole, node)) for node in nodes]
    unique = {tuple(path) for path in found}
    paths = tuple(sorted(unique, key=lambda path: (len(path), path)))  # parents first
    if not paths or not paths[0] or min(map(min, paths)) < 0:
        raise _no_tree(named)
    if len(found) > MOST_NODES or len(paths[-1]) > MOST_DEPTH or max(map(max, paths)) >= MOST_NODES:
        raise _too_large(named)
    known = set(paths)
    for ranks in paths:
        above = ranks[:-1]
        if above and above not in known:
            child = _path_text(ranks)[:80]
            parent = _path_text(above)[:80]
            raise UserError(f"{named}: node {child} has no parent; add {parent}")

    fanout = [0] * len(paths[-1])  # most children per node, by depth
    for node, children in ranks_below(paths).items():
        depth = len(node)
        fanout[depth] = max(fanout[depth], len(children))
    return TreeSpec(
        "paths",
        len(fanout),
        tuple(fanout),
        max(fanout),
        len(paths),
        paths,
    )


def _option_fields(option: str) -> Json:
    """The fields that an option sets; none for an unknown option or value."""
    name, _, value = option.partition("=")
    if name in ("stop", "cut", "alone"):
        share = number(value) or 0
        if 1e-6 <= share < 1:
            return {name: float(value)}
    if name == "match" and 0 < _whole(value) <= MOST_NODES:
        return {name: int(value)}
    return {
        "sample": {"sampled": True},
        "adapt": {"adaptive": True},
        "nomatch": {"matches": False},
    }.get(option, {})


def fanout_text(fanout: Iterable[int]) -> str:
    """The text form of a fan-out."""
    return "fanout:" + "x".join(map(str, fanout))


def paths_text(paths: Iterable[tuple[int, ...]]) -> str:
    """The text form of a fixed tree."""
    return "paths:" + ",".join(map(_path_text, paths))


def _path_text(ranks: Iterable[int]) -> str:
    return "-".join(map(str, ranks))


@functools.cache
def ranks_below(paths: tuple[tuple[int, ...], ...]) -> dict[tuple[int, ...], list[int]]:
    """The ranks of each node's children, ascending, by the node's path; () is the root."""
    below: dict[tuple[int, ...], list[int]] = {}
    for path in sorted(paths):
        below.setdefault(path[:-1], []).append(path[-1])
    return below
