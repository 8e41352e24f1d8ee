"""`drafttrain trace`: one answer, token by token: who produced each, and the tree that it came from."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import default_tree, load_drafter, names_help
from drafttrain.errors import UserError
from drafttrain.evaluation.suites import render
from drafttrain.inference import Decoder, SamplingParams, Stats
from drafttrain.inference.verify import Verdict
from drafttrain.ops.sampling import probabilities
from drafttrain.reports.page import render_page, write_page
from drafttrain.target import Target

HELP = """Show who produced each token of one answer, and what a round drafted.

  drafttrain trace --target smollm2-135m --drafter runs/drafter --prompt "Name three rivers." --output trace.html
  drafttrain trace --target smollm2-135m --drafter ngram --prompt "Count to ten, twice." --tree chain:4 --round 12

Tokens of the drafter are shaded by the depth at which they were accepted; the others are the target's own. The page shows
every round's tree, the terminal that of --round (the round that accepted most, unless given)."""

# Backgrounds of accepted tokens in the terminal, by depth; deeper ones repeat the last.
_SHADES = ("black on #cfe8ff", "black on #93c5fd", "black on #5aa2f5", "white on #2463c9", "white on #173f8a")


@dataclass
class Node:
    """A drafted token.

    Attributes:
        text: as shown; parent: index of its parent, -1 below the root; depth: 1 below the root.
        draft: the drafter's probability of it after its parent; None where the drafter gives none (a match, a rule).
        target: the target's probability of it after its parent.
        accepted: on the path that was committed.
    """

    text: str
    parent: int
    depth: int
    draft: float | None
    target: float
    accepted: bool


@dataclass
class Round:
    """A draft and its verdict.

    Attributes:
        number: from 1. root: text of the last committed token, which the tree hangs from.
        accepted: tokens of the tree that were committed; depth: the depth offered.
        tokens: ids committed. own: text of the target's own token that ended the round; empty where EOS ended the path.
        own_target: the target's probability of that token.
    """

    number: int
    root: str
    nodes: list[Node]
    path: list[int]
    depth: int
    tokens: list[int]
    own: str
    own_target: float

    @property
    def accepted(self) -> int:
        return len(self.path)


@dataclass
class Piece:
    """A token of the answer. depth: at which it was accepted, 0 for the target's own; round: 0 for the prefill's token."""

    text: str
    depth: int
    round: int


@dataclass
class Trace:
    """An answer. stats: of its generation."""

    pieces: list[Piece] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    @property
    def drafted(self) -> int:
        """Tokens of the answer that the drafter produced."""
        return sum(piece.depth > 0 for piece in self.pieces)

    def best(self) -> int:
        """The round that accepted most; of several, the one with the largest tree. 0 without rounds."""
        return max(self.rounds, key=lambda r: (r.accepted, len(r.nodes), -r.number)).number if self.rounds else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True, help="short name, folder or Hub id")
    add("--drafter", required=True, help=names_help())
    add("--prompt", required=True, help="what the user says; the chat template is applied")
    add("--tree", help="chain:3, dynamic:5,8,24, ... (default: what the drafter's decoding.json says, else chain:3)")
    add("--dtype", default="auto", help="float32, bfloat16, float16 or auto")
    add("--device", default="auto", help="cpu, cuda or auto")
    add("--temperature", type=float, default=0.0, help="0 decodes greedily")
    add("--top-p", type=float, default=1.0, help="1 keeps all tokens")
    add("--top-k", type=int, default=0, help="0 keeps all tokens")
    add("--max-new-tokens", type=int, default=96, help="length of the answer")
    add("--seed", type=int, default=0, help="of the sampling")
    add("--round", type=int, help="whose tree to show")
    add("--output", help="page to write (.html)")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    Raises:
        UserError: an argument out of its range, or anything that cannot be loaded.
    """
    if args.output and not args.output.endswith(".html"):
        raise UserError(f"output={args.output!r}: the ending must be .html")
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p)
    spec = TreeSpec.parse(args.tree or default_tree(args.drafter) or "chain:3")
    spec.check(sampling)
    target = Target.load(args.target, args.dtype, args.device)
    drafter = load_drafter(args.drafter, target)
    target.pack()
    decoder = Decoder(target, drafter, spec=spec, sampling=sampling)
    prompt = render(target.tokenizer, [args.prompt], [])
    trace = record(decoder, prompt, max_new_tokens=args.max_new_tokens, seed=args.seed)
    chosen = trace.best() if args.round is None else args.round
    if args.round is not None and not 1 <= args.round <= len(trace.rounds):
        raise UserError(f"round={args.round}: the answer has rounds 1 to {len(trace.rounds)}; choose one of them")
    print_trace(trace, chosen)
    if args.output:
        facts = {"target": args.target, "drafter": args.drafter, "tree": str(spec), "dtype": str(target.dtype)[6:]}
        facts["sampling"] = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}, seed {args.seed}"
        write_page(Path(args.output).expanduser(), page(trace, args.prompt, facts, chosen))
        print(f"wrote {args.output}")
    return 0


def record(decoder: Decoder, prompt: list[int], *, max_new_tokens: int, seed: int = 0) -> Trace:
    """Decodes one prompt and keeps every round.

    Args:
        decoder: its observer is taken for the time of the call; it has no stop strings.
        prompt: token ids.
    """
    trace, seen = Trace(), list[tuple[TokenTree, Verdict, list[float], list[float]]]()
    sampling = decoder.sampling

    def observe(_: int, tree: TokenTree, verdict: Verdict, logits: Tensor) -> None:
        tree = tree.drafts()
        p = logits.float().softmax(-1) if sampling.greedy else probabilities(logits.float(), sampling)
        rows = torch.tensor([parent + 1 for parent in tree.parents], dtype=torch.long, device=p.device)
        last = verdict.path[-1] + 1 if verdict.path else 0
        seen.append((tree, verdict, p[rows, tree.tokens].tolist(), [float(p[last, verdict.tokens[-1]])]))

    decoder.observer = observe
    try:
        (made,) = decoder.generate([prompt], max_new_tokens=max_new_tokens, seed=seed)
    finally:
        decoder.observer = None
    trace.stats = made.stats
    tokenizer = decoder.target.tokenizer
    texts = pieces_of(tokenizer, made.tokens)
    trace.pieces.append(Piece(texts[0], 0, 0))
    for number, (tree, verdict, target, own) in enumerate(seen, 1):
        bonus = len(verdict.tokens) > len(verdict.path)
        trace.rounds.append(
            Round(
                number,
                trace.pieces[-1].text,
                _nodes(tokenizer, tree, verdict, target),
                verdict.path,
                tree.drafted_depth,
                verdict.tokens,
                token_text(tokenizer, verdict.tokens[-1]) if bonus else "",
                own[0],
            )
        )
        for depth in range(1, len(verdict.tokens) + 1):
            text = texts[len(trace.pieces)]
            trace.pieces.append(Piece(text, depth if depth <= len(verdict.path) else 0, number))
    return trace


def _nodes(tokenizer: Any, tree: TokenTree, verdict: Verdict, target: list[float]) -> list[Node]:
    paths = tree.log_probs.tolist() if tree.log_probs is not None else [math.nan] * len(tree)
    drafts: list[float | None] = []
    for node, parent in enumerate(tree.parents):
        share = paths[node] - (paths[parent] if parent >= 0 else 0.0)
        drafts.append(None if math.isnan(share) else math.exp(share))
    return [
        Node(token_text(tokenizer, token), parent, depth, draft, p, node in verdict.path)
        for node, (token, parent, depth, draft, p) in enumerate(
            zip(tree.tokens.tolist(), tree.parents, tree.depths, drafts, target, strict=True)
        )
    ]


def token_text(tokenizer: Any, token: int) -> str:
    """A token by itself; part of a character shows as the replacement character."""
    return tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def pieces_of(tokenizer: Any, tokens: list[int]) -> list[str]:
    """What each token adds to the text; a character that spans tokens comes with its last one."""
    texts, done, start = [], "", 0
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        whole = not text.endswith("\N{REPLACEMENT CHARACTER}") or end == len(tokens)
        texts.append(text[len(done) :] if whole else "")
        done = text if whole else done
        if whole and end - start >= 32:  # a few tokens before the new ones are context enough
            start = end - 8
            done = tokenizer.decode(tokens[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return texts


def print_trace(trace: Trace, chosen: int, console: Console | None = None) -> None:
    """Prints the coloured answer, the rounds and the chosen round's tree."""
    console = console or Console(highlight=False)
    answer = Text()
    for piece in trace.pieces:
        answer.append(piece.text, style=_SHADES[min(piece.depth, len(_SHADES)) - 1] if piece.depth else "")
    console.print(answer)
    deepest = max((piece.depth for piece in trace.pieces), default=0)
    legend = Text("\ntarget's own")
    for depth in range(1, deepest + 1):
        legend.append("  ").append(f" accepted at depth {depth} ", style=_SHADES[min(depth, len(_SHADES)) - 1])
    console.print(legend)
    stats = trace.stats
    console.print(
        f"{stats.new_tokens} tokens in {stats.target_passes} rounds, accepted length {stats.accepted_length:.2f}; "
        f"{trace.drafted} tokens by the drafter\n",
        highlight=False,
    )
    table = Table("round", "nodes", "depth", "accepted", "by the drafter", "by the target")
    for one in trace.rounds:
        path = "".join(one.nodes[node].text for node in one.path)
        cells = [str(one.number), str(len(one.nodes)), str(one.depth), str(one.accepted)]
        table.add_row(*cells, Text(_shown(path)), Text(_shown(one.own)), style="bold" if one.number == chosen else None)
    console.print(table)
    if chosen:
        console.print(_tree(trace.rounds[chosen - 1]))


def _tree(one: Round) -> Tree:
    """A round's tree; what was accepted is bold and marked."""
    tree = Tree(Text(f"round {one.number}, after {_shown(one.root)}"))
    places = {-1: tree}
    for index, node in enumerate(one.nodes):
        draft = f"drafter {node.draft:.2f}  " if node.draft is not None else ""
        label = Text(f"{_shown(node.text)}  ", style="bold" if node.accepted else "")
        label.append(f"{draft}target {node.target:.2f}{'  accepted' if node.accepted else ''}")
        places[index] = places[node.parent].add(label)
    if one.own:
        last = one.path[-1] if one.path else -1
        places[last].add(Text(f"{_shown(one.own)}  target {one.own_target:.2f}  the target's own", style="italic"))
    return tree


def _shown(text: str) -> str:
    """A token's text with what cannot be seen made visible."""
    return text.replace("\n", "\u21b5").replace("\t", "\u21e5").replace(" ", "\u00b7")


# -- page -----------------------------------------------------------------------------------------------------------

_COLUMN, _ROW, _WIDTH, _HEIGHT = 164, 50, 132, 38  # of the drawn tree, in pixels


def page(trace: Trace, prompt: str, facts: dict[str, str], chosen: int) -> str:
    """The trace as a self-contained page.

    Args:
        facts: what to say about the run, by name.
        chosen: number of the round whose tree is open at first.
    """
    deepest = max((piece.depth for piece in trace.pieces), default=0)
    return render_page(
        "trace.html",
        trace=trace,
        prompt=prompt,
        facts=facts,
        chosen=chosen,
        depths=range(1, deepest + 1),
        drawings={one.number: drawing(one) for one in trace.rounds if one.nodes},
        shown=_shown,
    )


def drawing(one: Round) -> dict[str, Any]:
    """Where the boxes and lines of a round's tree go: depth to the right, leaves below each other.

    Returns:
        width, height; boxes: dicts with x, y, w, h, kind (root, accepted, rejected, own), text, lines; edges: dicts with
        path (SVG) and accepted.
    """
    last = one.path[-1] if one.path else -1
    depths = [0] + [node.depth for node in one.nodes]
    parents = [-1] + [node.parent + 1 for node in one.nodes]
    if one.own:
        depths.append(depths[last + 1] + 1)
        parents.append(last + 1)
    children: dict[int, list[int]] = {}
    for box, parent in enumerate(parents):
        children.setdefault(parent, []).append(box)
    rows: dict[int, float] = {}
    free = 0

    def place(box: int) -> float:
        nonlocal free
        below = [place(child) for child in children.get(box, [])]
        if not below:
            free += 1
        rows[box] = (below[0] + below[-1]) / 2 if below else free - 1
        return rows[box]

    place(0)
    boxes, edges = [], []
    for box, depth in enumerate(depths):
        x, y = depth * _COLUMN + 2, rows[box] * _ROW + 2
        boxes.append({"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT, **_box(one, box)})
        if box:
            x0, y0 = depths[parents[box]] * _COLUMN + 2 + _WIDTH, rows[parents[box]] * _ROW + 2 + _HEIGHT / 2
            y1, bend = y + _HEIGHT / 2, (_COLUMN - _WIDTH) / 2
            path = f"M{x0:g} {y0:g}C{x0 + bend:g} {y0:g} {x - bend:g} {y1:g} {x:g} {y1:g}"
            edges.append({"path": path, "kind": boxes[-1]["kind"]})
    return {
        "width": max(depths) * _COLUMN + _WIDTH + 4,
        "height": (free - 1) * _ROW + _HEIGHT + 4,
        "boxes": boxes,
        "edges": edges,
    }


def _box(one: Round, box: int) -> dict[str, str]:
    if box == 0:
        return {"kind": "root", "text": _short(one.root), "line": "committed before"}
    if box > len(one.nodes):
        return {"kind": "own", "text": _short(one.own), "line": f"target's own {one.own_target:.2f}"}
    node = one.nodes[box - 1]
    draft = f"{node.draft:.2f} " if node.draft is not None else "match "
    return {
        "kind": "accepted" if node.accepted else "rejected",
        "text": _short(node.text),
        "line": f"{draft}\u2192 target {node.target:.2f}",
    }


def _short(text: str, most: int = 14) -> str:
    text = _shown(text)
    return text if len(text) <= most else text[: most - 1] + "\u2026"
