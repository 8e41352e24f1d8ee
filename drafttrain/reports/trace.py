"""`drafttrain trace`: one answer token by token, with its producers and the trees they came from."""

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
from drafttrain.drafters.registry import chosen_tree, load_drafter
from drafttrain.environment import describe_environment, describe_run
from drafttrain.errors import UserError
from drafttrain.files import write_text
from drafttrain.flags import load_target, sampling_of
from drafttrain.folders import asked_file
from drafttrain.inference import Decoder, Stats
from drafttrain.inference.sequence import TextStream
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

    def boxes(self) -> list[tuple[tuple[int, ...], tuple[str, str, str]]]:
        """The boxes of the drawn tree, each before those below it, siblings in order.

        Returns:
            (path from the root, (classes, text, second line)) each.
        """
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        boxes = {paths[-1]: ("root", self.root, "committed before")}
        for index, node in enumerate(self.nodes):
            paths[index] = (*paths[node.parent], index)
            kind = "rejected"
            if node.accepted:
                kind = "accepted"
            if node.match:
                kind += " match"
            line = f"target {node.target:.2f}"
            if node.draft is not None:
                line = f"{node.draft:.2f} \u2192 {line}"
                if node.match:
                    line = f"match {line}"
            boxes[paths[index]] = (kind, node.text, line)
        if self.own:
            own = (*paths[self.last], len(self.nodes))
            boxes[own] = ("own", self.own, f"target's own {self.own_target:.2f}")
        return sorted(boxes.items())


class Piece(NamedTuple):
    """A token of the answer.

    Attributes:
        depth: where it was accepted, 0 for the target's own. round: 0 for the prefill's token.
        match: only a merged match proposed it.
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
        depths = [piece.depth for piece in self.pieces if not piece.match]
        return range(1, max(depths, default=0) + 1)

    @property
    def matched(self) -> int:
        """Number of the answer's tokens that only a merged match proposed."""
        return sum(piece.match for piece in self.pieces)

    def best(self) -> int:
        """Number of the round that accepted most; of several, of the one with the largest tree.

        0 without rounds.
        """
        if not self.rounds:
            return 0
        return max(self.rounds, key=lambda one: (one.accepted, len(one.nodes), -one.number)).number


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        UserError: values out of range, or anything that cannot be loaded.
    """
    output = asked_file(args, "trace", "prompt")
    if output and output.suffix != ".html":
        raise UserError(f"output={args.output!r}: the ending must be .html")
    sampling = sampling_of(args)
    spec = chosen_tree(args.tree, args.drafter)
    spec.check(sampling)

    target = load_target(args)
    drafter = load_drafter(args.drafter, target)
    decoder = Decoder(target.pack(), drafter, spec=spec, sampling=sampling)
    messages = [{"role": "user", "content": args.prompt}]
    prompt = prompt_ids(target.tokenizer, messages, ChatInputs((), args.chat_template_kwargs))
    trace = record(decoder, prompt, max_new_tokens=args.max_new_tokens, seed=args.seed)
    chosen = trace.best()
    if args.round is not None:
        chosen = args.round
        if not 1 <= chosen <= len(trace.rounds):
            raise UserError(
                f"round={chosen}: the answer has rounds 1 to {len(trace.rounds)}; choose one of them"
            )
    print_trace(trace, chosen)

    wrote = []
    if output is not None:
        facts = {
            "target": args.target,
            "drafter": args.drafter,
            "tree": str(spec),
            "dtype": str(target.dtype).removeprefix("torch."),
            "measured": conditions({**describe_run(), **describe_environment(target.device)}),
            "sampling": "greedy",
        }
        if not sampling.greedy:
            facts["sampling"] = f"temperature {sampling.temperature:g}, seed {args.seed}"
        write_text(output, page(trace, args.prompt, facts, chosen))
        wrote.append(output)
    result = {
        "text": "".join(piece.text for piece in trace.pieces),
        "rounds": len(trace.rounds),
        "tokens": trace.stats.new_tokens,
        "accepted_length": trace.stats.accepted_length,
    }
    then = next_command(
        "eval",
        carry=args,
        target=args.target,
        drafter=args.drafter,
    )
    conclude(result, wrote, then)
    return 0


def record(
    decoder: Decoder,
    prompt: list[int],
    *,
    max_new_tokens: int,
    seed: int = 0,
) -> Trace:
    """Decodes one prompt and keeps every round.

    Args:
        decoder: without stop strings; the call uses its observer. prompt: token ids.
    """
    rounds: list[TracedRound] = []
    sampling = decoder.sampling
    tokenizer = decoder.target.tokenizer

    def observe(_: int, tree: TokenTree, verdict: Verdict, logits: Tensor) -> None:
        tree = tree.drafts()
        if sampling.greedy:
            p = logits.float().softmax(-1)  # [1 + n, v]; row 0 is the root's
        else:
            p = probabilities(logits.float(), sampling)
        # A node's probability is in its parent's row, which is one further than its number.
        above = [parent + 1 for parent in tree.parents]
        rows = torch.tensor(above, dtype=torch.long, device=p.device)  # [n]
        last = 0  # row of the node that the target's own token follows
        if verdict.path:
            last = verdict.path[-1] + 1
        own = ""
        if len(verdict.tokens) > len(verdict.path):
            own = decode(tokenizer, verdict.tokens[-1:])
        rounds.append(
            TracedRound(
                number=len(rounds) + 1,
                root="",  # known when all tokens are
                nodes=_nodes(tokenizer, tree, verdict.path, p[rows, tree.tokens].tolist()),
                path=verdict.path,
                depth=tree.drafted_depth,
                tokens=verdict.tokens,
                own=own,
                own_target=float(p[last, verdict.tokens[-1]]),
            )
        )

    decoder.observer = observe
    try:
        (made,) = decoder.generate([prompt], max_new_tokens=max_new_tokens, seed=seed)
    finally:
        decoder.observer = None

    texts = iter(pieces_of(tokenizer, made.tokens))
    # The prefill's token comes before all rounds.
    pieces = [Piece(next(texts), 0, 0)]
    for one in rounds:
        one.root = pieces[-1].text
        for node in one.path:
            drafted = one.nodes[node]
            pieces.append(Piece(next(texts), drafted.depth, one.number, drafted.match))
        if len(one.tokens) > len(one.path):  # its text may be empty
            pieces.append(Piece(next(texts), 0, one.number))
    return Trace(pieces, rounds, made.stats)


def _nodes(
    tokenizer: PreTrainedTokenizerBase,
    tree: TokenTree,
    path: list[int],
    target: list[float],
) -> list[TracedNode]:
    """The nodes of a tree. path: the accepted ones. target: probability of each."""
    scores = [math.nan] * len(tree)  # log-probability of each path, by the drafter
    if tree.log_probs is not None:
        scores = tree.log_probs.tolist()
    nodes = []
    for node, token in enumerate(tree.tokens.tolist()):
        parent = tree.parents[node]
        log_prob = scores[node]
        # Log-probabilities are of whole paths: the difference is the token's own.
        if parent >= 0:
            log_prob -= scores[parent]
        draft = None
        if not math.isnan(log_prob):
            draft = math.exp(log_prob)
        nodes.append(
            TracedNode(
                text=decode(tokenizer, [token]),
                parent=parent,
                depth=tree.depths[node],
                draft=draft,
                target=target[node],
                accepted=node in path,
                match=node in tree.matched,
            )
        )
    return nodes


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """The text that each token adds, special tokens included; see `TextStream`."""
    stream = TextStream(tokenizer, keep_special=True)
    texts = []
    for number, token in enumerate(tokens, 1):
        stream.push([token])
        texts.append(stream.take(last=number == len(tokens)))
    return texts


def print_trace(trace: Trace, chosen: int, console: Console | None = None) -> None:
    """Prints the colored answer, the rounds and the chosen round's tree."""
    if console is None:
        console = plain_console()
    answer = Text()
    for piece in trace.pieces:
        answer.append(piece.text, _shade(piece))
    console.print(answer)
    legend = Text("\ntarget's own")
    for depth in trace.depths:
        legend.append("  ")
        legend.append(f" accepted at depth {depth} ", style=_shade(Piece("", depth, 0)))
    if trace.matched:
        legend.append("  ")
        legend.append(" from a match ", style=_MATCHED)
    console.print(legend)

    stats = trace.stats
    drafted = f"{trace.drafted} tokens by the drafter"
    if trace.matched:
        drafted += f", {trace.matched} of them from matches"
    console.print(
        f"{stats.new_tokens} tokens in {stats.target_passes} rounds, "
        f"accepted length {stats.accepted_length:.2f}; {drafted}\n",
        highlight=False,
    )
    table = Table(
        "round",
        "nodes",
        "depth",
        "accepted",
        "by the drafter",
        "by the target",
    )
    for one in trace.rounds:
        path = "".join(one.nodes[node].text for node in one.path)
        table.add_row(
            str(one.number),
            str(len(one.nodes)),
            str(one.depth),
            str(one.accepted),
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
        label = Text(f"{_shown(node.text)}  ")
        if node.accepted:
            label.style = "bold"
        if node.draft is not None:
            proposer = "drafter"
            if node.match:
                proposer = "match"
            label.append(f"{proposer} {node.draft:.2f}  ")
        label.append(f"target {node.target:.2f}")
        if node.accepted:
            label.append("  accepted")
        places[index] = places[node.parent].add(label)
    if one.own:
        line = f"{_shown(one.own)}  target {one.own_target:.2f}  the target's own"
        places[one.last].add(Text(line, style="italic"))
    return tree


def _shown(text: str) -> str:
    """A token's text with visible whitespace."""
    return text.replace("\n", "\u21b5").replace("\t", "\u21e5").replace(" ", "\u00b7")


# -- page ------------------------------------------------------------------------------------------


def page(trace: Trace, prompt: str, facts: dict[str, str], chosen: int) -> str:
    """Renders a self-contained page.

    Args:
        facts: settings of the run by name. chosen: the round whose tree is open at first.
    """
    return render_page(
        "trace.html",
        trace=trace,
        prompt=prompt,
        facts=facts,
        chosen=chosen,
        shown=_shown,
        sentence=sentence,
    )
