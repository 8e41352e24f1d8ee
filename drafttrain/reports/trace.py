"""`drafttrain trace`: one answer, token by token: the producer of each, and the tree that it came
from.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from drafttrain.batch import TokenTree
from drafttrain.data.chat import ChatInputs, decode, prompt_ids
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import default_tree, load_drafter
from drafttrain.environment import describe_environment, describe_run
from drafttrain.errors import UserError
from drafttrain.files import Json, write_text
from drafttrain.flags import load_target, sampling_of
from drafttrain.folders import inputs_of, output_file
from drafttrain.inference import Decoder, Stats
from drafttrain.inference.verify import Verdict
from drafttrain.ops.sampling import probabilities
from drafttrain.outcome import conclude, next_command
from drafttrain.progress import plain_console
from drafttrain.reports.figures import conditions, sentence
from drafttrain.reports.output import render_page

# Background of accepted tokens in the terminal by depth; deeper tokens get the last one.
_SHADES = (
    "black on #cfe8ff",
    "black on #93c5fd",
    "black on #5aa2f5",
    "white on #2463c9",
    "white on #173f8a",
)
_MATCHED = "black on #fdba74"  # accepted tokens that only a merged match proposed


class TracedNode(NamedTuple):
    """A drafted token.

    Attributes:
        parent: index of the parent node, -1 below the root. depth: 1 below the root.
        draft: the drafter's probability of the token given its parent; None if it gives none.
        target: the target's probability of the token given its parent.
        accepted: on the committed path. match: only a merged match (DRAFTER+ngram) proposed it.
    """

    text: str
    parent: int
    depth: int
    draft: float | None
    target: float
    accepted: bool
    match: bool = False


@dataclass
class TracedRound:
    """A drafted tree and its verification.

    Attributes:
        number: from 1. root: text of the last committed token. path: accepted nodes. depth: the
            offered depth.
        tokens: committed ids. own: text of the target's own token that ended the round; empty if
            EOS ended the path.
        own_target: the target's probability of that token.
    """

    number: int
    root: str
    nodes: list[TracedNode]
    path: list[int]
    depth: int
    tokens: list[int]
    own: str
    own_target: float

    @property
    def accepted(self) -> int:
        return len(self.path)

    @property
    def last(self) -> int:
        """The node that the target's own token follows; -1 is the root."""
        if self.path:
            return self.path[-1]
        return -1


class Piece(NamedTuple):
    """A token of the answer. depth: where it was accepted, 0 for the target's own; round: 0 for the
    prefill's token; match: only a merged match proposed it.
    """

    text: str
    depth: int
    round: int
    match: bool = False


@dataclass
class Trace:
    """A traced answer. stats: of its generation."""

    pieces: list[Piece]
    rounds: list[TracedRound]
    stats: Stats

    @property
    def drafted(self) -> int:
        """Number of the answer's tokens that the drafter produced."""
        return sum(piece.depth > 0 for piece in self.pieces)

    @property
    def depths(self) -> range:
        """The depths at which tokens were accepted, from 1."""
        return range(
            1, max((piece.depth for piece in self.pieces if not piece.match), default=0) + 1
        )

    @property
    def matched(self) -> int:
        """Number of the answer's tokens that only a merged match proposed."""
        return sum(piece.match for piece in self.pieces)

    def best(self) -> int:
        """Number of the round that accepted most, of several the one with the largest tree; 0
        without rounds.
        """
        if self.rounds:
            return max(self.rounds, key=lambda r: (r.accepted, len(r.nodes), -r.number)).number
        return 0


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises UserError for values out of range, or anything that cannot be
    loaded.
    """
    if args.output is not None:
        output = output_file(args.output, "trace", inputs_of(args, "prompt"))
    else:
        output = None
    if output is not None and output.suffix != ".html":
        raise UserError(f"output={args.output!r}: the ending must be .html")
    sampling = sampling_of(args)
    spec = TreeSpec.parse(args.tree or default_tree(args.drafter) or "chain:3")
    spec.check(sampling)
    target = load_target(args)
    drafter = load_drafter(args.drafter, target)
    decoder = Decoder(target.pack(), drafter, spec=spec, sampling=sampling)
    messages = [{"role": "user", "content": args.prompt}]
    inputs = ChatInputs((), args.chat_template_kwargs)
    prompt = prompt_ids(target.tokenizer, messages, inputs)
    trace = record(decoder, prompt, max_new_tokens=args.max_new_tokens, seed=args.seed)
    if args.round is None:
        chosen = trace.best()
    else:
        chosen = args.round
    if args.round is not None and not 1 <= args.round <= len(trace.rounds):
        raise UserError(
            f"round={args.round}: the answer has rounds 1 to {len(trace.rounds)}; choose one of them"
        )
    print_trace(trace, chosen)
    if output is not None:
        facts = {
            "target": args.target,
            "drafter": args.drafter,
            "tree": str(spec),
            "dtype": str(target.dtype)[6:],
        }
        facts["measured"] = conditions({**describe_run(), **describe_environment(target.device)})
        if sampling.greedy:
            facts["sampling"] = "greedy"
        else:
            facts["sampling"] = f"temperature {sampling.temperature:g}, seed {args.seed}"
        write_text(output, page(trace, args.prompt, facts, chosen))
    result = {"text": "".join(piece.text for piece in trace.pieces), "rounds": len(trace.rounds),
              "tokens": trace.stats.new_tokens, "accepted_length": trace.stats.accepted_length}  # fmt: skip
    then = next_command("eval", carry=args, target=args.target, drafter=args.drafter)
    conclude(result, [output] if output is not None else [], then)
    return 0


def record(decoder: Decoder, prompt: list[int], *, max_new_tokens: int, seed: int = 0) -> Trace:
    """Decodes one prompt and keeps every round.

    Args:
        decoder: without stop strings; the call uses its observer. prompt: token ids.
    """
    seen: list[tuple[TokenTree, Verdict, list[float], float]] = []
    sampling = decoder.sampling

    def observe(_: int, tree: TokenTree, verdict: Verdict, logits: Tensor) -> None:
        tree = tree.drafts()
        # [1 + n, v]
        if sampling.greedy:
            p = logits.float().softmax(-1)
        else:
            p = probabilities(logits.float(), sampling)
        rows = torch.tensor(
            [parent + 1 for parent in tree.parents],
            dtype=torch.long,
            device=p.device,
        )  # [n]
        last = 0
        if verdict.path:
            last = verdict.path[-1] + 1
        seen.append(
            (tree, verdict, p[rows, tree.tokens].tolist(), float(p[last, verdict.tokens[-1]]))
        )

    decoder.observer = observe
    try:
        (made,) = decoder.generate([prompt], max_new_tokens=max_new_tokens, seed=seed)
    finally:
        decoder.observer = None
    tokenizer = decoder.target.tokenizer
    texts = iter(pieces_of(tokenizer, made.tokens))
    trace = Trace([Piece(next(texts), 0, 0)], [], made.stats)
    for number, (tree, verdict, target, own_target) in enumerate(seen, 1):
        accepted = len(verdict.path)
        tokens = verdict.tokens
        own = ""
        if len(tokens) > accepted:
            own = decode(tokenizer, tokens[-1:])
        root = trace.pieces[-1].text
        nodes = _nodes(tokenizer, tree, verdict, target)
        trace.rounds.append(
            TracedRound(
                number,
                root,
                nodes,
                verdict.path,
                tree.drafted_depth,
                tokens,
                own,
                own_target,
            )
        )
        trace.pieces += [
            Piece(next(texts), nodes[node].depth, number, nodes[node].match)
            for node in verdict.path
        ]
        trace.pieces += [Piece(next(texts), 0, number)] if own else []
    return trace


def _nodes(
    tokenizer: PreTrainedTokenizerBase,
    tree: TokenTree,
    verdict: Verdict,
    target: list[float],
) -> list[TracedNode]:
    if tree.log_probs is not None:
        paths = tree.log_probs.tolist()
    else:
        paths = [math.nan] * len(tree)
    nodes = []
    for node, (token, parent, depth) in enumerate(
        zip(tree.tokens.tolist(), tree.parents, tree.depths, strict=True)
    ):
        log_prob = paths[node] - (paths[parent] if parent >= 0 else 0.0)
        if math.isnan(log_prob):
            draft = None
        else:
            draft = math.exp(log_prob)
        text = decode(tokenizer, [token])
        accepted = node in verdict.path
        nodes.append(
            TracedNode(text, parent, depth, draft, target[node], accepted, node in tree.matched)
        )
    return nodes


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """The text that each token adds; a character that spans several tokens belongs to the last of
    them.
    """
    texts = []
    done = ""
    start = 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokenizer, tokens[start:end])
        complete = not text.endswith("\N{REPLACEMENT CHARACTER}") or end == len(tokens)
        texts.append(text[len(done) :] if complete else "")
        done = text if complete else done
        if complete and end - start >= 32:  # a few tokens of context are enough
            start = end - 8
            done = decode(tokenizer, tokens[start:end])
    return texts


def print_trace(trace: Trace, chosen: int, console: Console | None = None) -> None:
    """Prints the colored answer, the rounds and the chosen round's tree."""
    console = console or plain_console()
    console.print(Text.assemble(*((piece.text, _shade(piece)) for piece in trace.pieces)))
    legend = Text("\ntarget's own")
    for depth in trace.depths:
        legend.append("  ").append(
            f" accepted at depth {depth} ",
            style=_shade(Piece("", depth, 0)),
        )
    if trace.matched:
        legend.append("  ").append(" from a match ", style=_MATCHED)
    console.print(legend)
    stats = trace.stats
    console.print(
        f"{stats.new_tokens} tokens in {stats.target_passes} rounds, accepted length {stats.accepted_length:.2f}; "
        f"{trace.drafted} tokens by the drafter{f', {trace.matched} of them from matches' if trace.matched else ''}\n",
        highlight=False,
    )
    table = Table("round", "nodes", "depth", "accepted", "by the drafter", "by the target")
    for one in trace.rounds:
        path = "".join(one.nodes[node].text for node in one.path)
        cells = map(str, (one.number, len(one.nodes), one.depth, one.accepted))
        table.add_row(
            *cells,
            Text(_shown(path)),
            Text(_shown(one.own)),
            style="bold" if one.number == chosen else None,
        )
    console.print(table)
    if chosen:
        console.print(_tree(trace.rounds[chosen - 1]))


def _shade(piece: Piece) -> str:
    if piece.match:
        return _MATCHED
    if piece.depth:
        return _SHADES[min(piece.depth, len(_SHADES)) - 1]
    return ""


def _tree(one: TracedRound) -> Tree:
    """A round's tree; accepted nodes are bold and marked."""
    tree = Tree(Text(f"round {one.number}, after {_shown(one.root)}"))
    places = {-1: tree}
    for index, node in enumerate(one.nodes):
        draft = ""
        if node.draft is not None:
            draft = f"{'match' if node.match else 'drafter'} {node.draft:.2f}  "
        label = Text(f"{_shown(node.text)}  ", style="bold" if node.accepted else "")
        label.append(f"{draft}target {node.target:.2f}{'  accepted' if node.accepted else ''}")
        places[index] = places[node.parent].add(label)
    if one.own:
        places[one.last].add(
            Text(
                f"{_shown(one.own)}  target {one.own_target:.2f}  the target's own",
                style="italic",
            )
        )
    return tree


def _shown(text: str) -> str:
    """A token's text with visible whitespace."""
    return text.replace("\n", "\u21b5").replace("\t", "\u21e5").replace(" ", "\u00b7")


# -- page ------------------------------------------------------------------------------------------

# of the drawn tree, in pixels
_COLUMN = 186
_ROW = 50
_WIDTH = 158
_HEIGHT = 38


def page(trace: Trace, prompt: str, facts: dict[str, str], chosen: int) -> str:
    """Renders a self-contained page. facts: settings of the run by name; chosen: the round whose
    tree is open at first.
    """
    drawings = {one.number: drawing(one) for one in trace.rounds if one.nodes}
    content = {
        "trace": trace,
        "prompt": prompt,
        "facts": facts,
        "chosen": chosen,
        "drawings": drawings,
    }
    return render_page("trace.html", shown=_shown, sentence=sentence, **content)


def drawing(one: TracedRound) -> Json:
    """Lays out a round's tree: depth to the right, leaves below each other.

    Returns:
        width, height; boxes: dicts with x, y, w, h, kind (root, accepted, rejected, own; of a match
        also match), text, line;
        edges: dicts with path (SVG) and kind.
    """
    # (kind, text, line below it, parent's box, depth) of each box; node i is box i + 1
    boxes = [("root", one.root, "committed before", -1, 0)]
    for node in one.nodes:
        draft = ""
        if node.draft is not None:
            draft = f"{'match ' * node.match}{node.draft:.2f} \u2192 "
        kind = ("accepted" if node.accepted else "rejected") + " match" * node.match
        boxes.append(
            (kind, node.text, f"{draft}target {node.target:.2f}", node.parent + 1, node.depth)
        )
    if one.own:
        line = f"target's own {one.own_target:.2f}"
        parent = one.last + 1
        boxes.append(("own", one.own, line, parent, boxes[parent][-1] + 1))
    rows: dict[int, float] = {}
    free = 0  # the next row without a leaf

    def place(box: int) -> float:
        nonlocal free
        below = [place(child) for child, (*_, parent, _) in enumerate(boxes) if parent == box]
        free += not below
        if below:
            rows[box] = (below[0] + below[-1]) / 2
        else:
            rows[box] = free - 1
        return rows[box]

    place(0)
    drawn = []
    edges = []
    for box, (kind, text, line, parent, depth) in enumerate(boxes):
        x = depth * _COLUMN + 2
        y = rows[box] * _ROW + 2
        drawn.append(
            {
                "x": x,
                "y": y,
                "w": _WIDTH,
                "h": _HEIGHT,
                "kind": kind,
                "text": _short(text),
                "line": line,
            }
        )
        if parent >= 0:
            x0 = boxes[parent][-1] * _COLUMN + 2 + _WIDTH
            y0 = rows[parent] * _ROW + 2 + _HEIGHT / 2
            y1 = y + _HEIGHT / 2
            bend = (_COLUMN - _WIDTH) / 2
            path = f"M{x0:g} {y0:g}C{x0 + bend:g} {y0:g} {x - bend:g} {y1:g} {x:g} {y1:g}"
            edges.append({"path": path, "kind": kind})
    width = max(depth for *_, depth in boxes) * _COLUMN + _WIDTH + 4
    return {
        "width": width,
        "height": (free - 1) * _ROW + _HEIGHT + 4,
        "boxes": drawn,
        "edges": edges,
    }


def _short(text: str, most: int = 14) -> str:
    text = _shown(text)
    if len(text) <= most:
        return text
    return text[: most - 1] + "\u2026"
