"""`drafttrain tune`: which tree is fastest for this drafter on this machine, predicted for all and measured for one.

Three measurements, none of which depends on the tree that is picked:

    acceptance      one plain run with generous trees (`replay`), in which every candidate's rounds are played back exactly
    costs           seconds of verifying by number of nodes and of drafting by depth (`costs`)
    the check       the picked tree against plain decoding, turn and turn about, beside what was predicted

Timing every candidate instead takes longer and picks by luck: candidates differ by a few per cent, and so does a timing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import decoding_file, decoding_settings, load_drafter, names_help
from drafttrain.environment import describe_environment
from drafttrain.errors import UserError
from drafttrain.evaluation.suites import render, render_messages
from drafttrain.files import write_json
from drafttrain.inference import Decoder, SamplingParams, token_limit
from drafttrain.progress import Progress
from drafttrain.reports.console import wide_console
from drafttrain.target import Target
from drafttrain.tuning.costs import CYCLES, CostModel, measure_costs
from drafttrain.tuning.replay import DEPTH, Track, chances, parts_of, recall, record, replay

HELP = """Find the fastest tree for a drafter on this machine, and keep it as the drafter's default.

  drafttrain tune --target smollm2-135m --drafter runs/quickstart/drafter+ngram --output tune.json

Takes about a minute for a small model: acceptance is recorded once, costs are measured by nodes and depth, all candidates are
predicted from both, and the best one is measured against plain decoding. Writes decoding.json into the drafter's folder, which
`drafttrain eval` and `drafttrain.generate` read. Speed-ups are of decoding, the prompt's pass is not counted."""

PROMPTS = (
    "Give three reasons why people keep diaries, with a short example of each.",
    "Write a function that removes duplicates from a list while keeping the order, and explain it.",
    "A train covers 150 km in two and a half hours. What is its mean speed, and how far does it get in four hours?",
    "Summarise in two sentences: Bees fly from flower to flower to collect nectar. On the way they carry pollen, which "
    "lets plants form seeds. Many crops depend on them, so farmers rent hives in spring.",
    "Which planets have rings, and what are the rings made of?",
    "Write a polite message that moves a dentist's appointment from Monday to Thursday.",
)
TOKENS = 64
ROWS = 6
REPEATS = 2
NODES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48)
# Adaptive speculation guards against text that the drafter is bad at, but takes rounds to find out: it becomes the default
# where it is as fast as the fixed tree on the prompts at hand.
KEEP_ADAPTIVE = 1.0


def calibration_prompts(
    target: Target, file: str | None, exclude: Collection[str] = (), tokens: int = TOKENS
) -> list[list[int]]:
    """Token ids of prompts for the search.

    Args:
        target: renders them, and limits their length.
        file: JSON lines with `messages` (an assistant's last message is left out), `turns` or `text`; None takes
            built-in ones.
        exclude: texts of the suite that will be measured; prompts that are among them are left out.
        tokens: that must fit into the target's context behind a prompt.

    Raises:
        UserError: a file that is missing, malformed, or has no usable row.
    """
    if file is None:
        built_in = [render(target.tokenizer, [prompt], []) for prompt in PROMPTS if prompt not in exclude]
        return [ids for ids in built_in if _fits(target, ids, tokens)]
    try:
        rows = [json.loads(line) for line in Path(file).expanduser().read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"calibrate={file!r} cannot be read as JSON lines ({error}); check the path") from error
    prompts: list[list[int]] = []
    for row in rows:
        ids = _row_ids(target, row, exclude) if isinstance(row, dict) else []
        if ids and _fits(target, ids, tokens):
            prompts.append(ids)
        if len(prompts) == ROWS:
            break
    if not prompts:
        raise UserError(
            f"calibrate={file!r} has no usable row: each needs messages, turns or text that the suite lacks"
        )
    return prompts


def _row_ids(target: Target, row: dict[str, Any], exclude: Collection[str]) -> list[int]:
    tokenizer = target.tokenizer
    if row.get("messages"):
        messages = [{"role": message["role"], "content": message["content"]} for message in row["messages"]]
        if messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages or any(message["content"] in exclude for message in messages):
            return []
        if getattr(tokenizer, "chat_template", None):
            return render_messages(tokenizer, messages)
        return tokenizer("\n\n".join(message["content"] for message in messages)).input_ids
    turns = row.get("turns") or ([row["text"]] if row.get("text") else [])
    return render(tokenizer, turns[:1], []) if turns and turns[0] not in exclude else []


def _fits(target: Target, ids: list[int], tokens: int) -> bool:
    try:
        return token_limit(target, len(ids), tokens) == tokens
    except UserError:
        return False


def candidates(drafter: Drafter) -> list[TreeSpec]:
    """Every tree that can be replayed: chains, dynamic trees, some that stop early, matches left out or alone sooner or later."""
    main, side = parts_of(drafter)
    stops = ("", "@stop=0.1", "@stop=0.3") if main.trainable else ("",)
    # A root and 11 nodes are what the CPU's kernel multiplies at a time.
    sure = ("@alone=0.5", "@alone=0.9", "@match=11", "@alone=0.5@match=11")
    shares = ("", "@nomatch", *sure) if side is not None else ("",)
    chains = [f"chain:{d}{s}{m}" for d, s, m in itertools.product(range(1, DEPTH + 1), stops, shares[:2])]
    trees = [
        f"dynamic:{d},{k},{n}{s}{m}"
        for d, k, n, s, m in itertools.product(range(1, DEPTH + 1), (4, 8), NODES, stops, shares)
        if max(2, d) <= n <= k + (d - 1) * k * k
    ]
    return [TreeSpec.parse(text) for text in ["none", *chains, *trees]]


@dataclass
class Prediction:
    """What a tree is expected to do. tokens_per_second: of decoding, the first token and its pass left out."""

    spec: TreeSpec
    tokens_per_second: float
    accepted_length: float

    def row(self) -> dict[str, Any]:
        return {
            "tree": str(self.spec),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "accepted_length": round(self.accepted_length, 4),
        }


def predict(spec: TreeSpec, tracks: Sequence[Track], costs: CostModel) -> Prediction:
    """Plays a tree's rounds back and adds up what they cost."""
    rounds = [done for track in tracks for done in replay(track, spec)]
    tokens = sum(done.committed for done in rounds)
    seconds = sum(costs.round(spec if done.nodes or done.depth else _NONE, done.nodes, done.depth) for done in rounds)
    if spec.shape != "none":
        seconds += costs.read_prompt * sum(track.prompt_tokens for track in tracks)
    return Prediction(spec, tokens / seconds if seconds else 0.0, tokens / len(rounds) if rounds else 0.0)


_NONE = TreeSpec.parse("none")


@dataclass
class Search:
    """What was recorded, measured and predicted. ranking: the fastest first."""

    tracks: list[Track]
    costs: CostModel
    ranking: list[Prediction]

    @property
    def best(self) -> Prediction:
        return self.ranking[0]

    @property
    def plain(self) -> Prediction:
        return next(each for each in self.ranking if each.spec.shape == "none")

    def table(self, count: int = 12) -> list[dict[str, Any]]:
        """The fastest candidates and plain decoding."""
        plain = self.plain.tokens_per_second or 1.0
        shown = self.ranking[:count] + ([] if self.plain in self.ranking[:count] else [self.plain])
        return [{**each.row(), "predicted_speedup": round(each.tokens_per_second / plain, 4)} for each in shown]


def search_tree(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    tokens: int = TOKENS,
    cycles: int = CYCLES,
) -> Search:
    """Predicts every candidate's speed.

    Args:
        target: packed already, if it is going to be.
        prompts: token ids; not from the suite that is going to be measured.
        sampling: as in the measurement. tokens: per prompt.

    Raises:
        UserError: a kind with probes, which learns from passes that a replay does not make.
    """
    if drafter.probes:
        raise UserError(
            f"drafter={drafter.kind!r} learns from its own rounds, so trees cannot be predicted; name one: --tree fanout:4x1x1"
        )
    with Progress("recording acceptance", tokens - 1, "positions") as meter:
        tracks = record(target, drafter, prompts, sampling, tokens, meter.advance)
    with Progress("measuring costs", None, "rounds") as meter:
        costs = measure_costs(target, drafter, prompts, sampling, tokens, cycles, meter.advance)
    # Of trees that are predicted alike the smaller one goes first.
    ranking = sorted(
        (predict(spec, tracks, costs) for spec in candidates(drafter)),
        key=lambda each: (-each.tokens_per_second, each.spec.budget, each.spec.depth),
    )
    return Search(tracks, costs, ranking)


def measure(
    target: Target,
    drafter: Drafter,
    specs: Sequence[TreeSpec],
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    tokens: int = TOKENS,
    repeats: int = REPEATS,
) -> list[float]:
    """Decoding rates of several trees on the same prompts, turn and turn about; prefill left out.

    Returns:
        Tokens per second of each: all tokens over the sum of each prompt's median time.
    """
    decoders = [Decoder(target, drafter, spec=spec, sampling=sampling) for spec in specs]
    seconds: dict[tuple[int, int], list[float]] = {}
    count = [0] * len(specs)
    with Progress("measuring the pick", len(specs) * len(prompts) * repeats, "answers") as meter:
        for decoder in decoders:
            decoder.generate(prompts[:1], max_new_tokens=min(12, tokens))
        for turn, (repeat, (i, prompt)) in enumerate(itertools.product(range(repeats), enumerate(prompts))):
            for side in (*range(turn % len(specs), len(specs)), *range(turn % len(specs))):
                stats = decoders[side].generate([prompt], max_new_tokens=tokens)[0].stats
                seconds.setdefault((side, i), []).append(stats.total_seconds - stats.prefill_seconds)
                count[side] += (stats.new_tokens - 1) * (repeat == 0)
                meter.advance()
    whole = [sum(median(times) for (side, _), times in seconds.items() if side == at) for at in range(len(specs))]
    return [tokens / spent if spent else 0.0 for tokens, spent in zip(count, whole, strict=True)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True, help="short name, folder or Hub id")
    add("--drafter", required=True, help=names_help())
    add("--dtype", default="auto", help="float32, bfloat16, float16 or auto (bfloat16 where the device has it)")
    add("--device", default="auto", help="cpu, cuda or auto")
    add("--temperature", type=float, default=0.0, help="0 decodes greedily")
    add("--top-p", type=float, default=1.0, help="1 keeps all tokens")
    add("--top-k", type=int, default=0, help="0 keeps all tokens")
    add(
        "--calibrate",
        metavar="FILE",
        help="prompts (JSONL with messages, turns or text) like those to come; default: built-in",
    )
    add("--prompts", type=int, default=ROWS, help="prompts at most (default: %(default)s)")
    add("--max-new-tokens", type=int, default=TOKENS, help="per prompt (default: %(default)s)")
    add("--repeats", type=int, default=REPEATS, help="of the final measurement (default: %(default)s)")
    add("--output", default="tune.json", help="what was measured and predicted")
    add("--dry-run", action="store_true", help="leave the drafter's decoding.json as it is")
    add("--trust-remote-code", action="store_true", help="run model code that comes with the target")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    Raises:
        UserError: an argument out of its range, nothing to tune, or anything that cannot be loaded.
    """
    for name in ("prompts", "repeats"):
        if getattr(args, name) < 1:
            raise UserError(f"{name}={getattr(args, name)} must be at least 1")
    if args.max_new_tokens < 16:
        raise UserError(f"max-new-tokens={args.max_new_tokens} tells too little about a tree; use 16 or more")
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p)
    target = Target.load(args.target, args.dtype, args.device, args.trust_remote_code).pack()
    drafter = load_drafter(args.drafter, target)
    if drafter is None:
        raise UserError(f"drafter={args.drafter!r} drafts nothing, so there is no tree to tune; name a drafter")
    prompts = calibration_prompts(target, args.calibrate, tokens=args.max_new_tokens)[: args.prompts]
    result = tune(target, drafter, prompts, sampling, args.max_new_tokens, args.repeats)
    result = {
        **describe_environment(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": args.target,
        "drafter": args.drafter,
        "sampling": {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p},
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        **result,
    }
    write_json(Path(args.output).expanduser(), result)
    print_result(result)
    place = decoding_file(args.drafter)
    if not args.dry_run and place.parent.is_dir() and place.parent.joinpath("config.json").is_file():
        keys = ("device", "dtype", "drafter", "predicted_speedup", "measured_speedup")
        old = decoding_settings(args.drafter)
        write_json(place, {**old, "tree": result["tree"], "tuned": {key: result[key] for key in keys}})
        print(f"wrote {place}: the drafter's default from now on")
    print(f"wrote {args.output}")
    return 0


def tune(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    tokens: int = TOKENS,
    repeats: int = REPEATS,
    cycles: int = CYCLES,
) -> dict[str, Any]:
    """Searches, measures the pick, fixed and adaptive, against plain decoding, and says what to use.

    Returns:
        tree: the setting to keep; picked: the fixed tree that was predicted fastest.
        predicted_speedup, measured_speedup: of the picked tree over plain decoding, prefill left out; relative_error:
            predicted / measured - 1. adaptive_speedup: the same tree with @adapt.
        costs, acceptance, candidates: what the prediction was made of.
    """
    search = search_tree(target, drafter, prompts, sampling, tokens, cycles)
    best, plain = search.best, search.plain
    predicted = best.tokens_per_second / plain.tokens_per_second
    measured, adaptive, rates = 1.0, None, {}
    tree = best.spec
    if best.spec.shape != "none":
        guarded = replace(best.spec, adaptive=True)
        sides = (_NONE, best.spec, guarded)
        speeds = measure(target, drafter, sides, prompts, sampling, tokens, repeats)
        rates = {str(spec): round(speed, 3) for spec, speed in zip(sides, speeds, strict=True)}
        measured, adaptive = speeds[1] / speeds[0], round(speeds[2] / speeds[0], 4)
        tree = guarded if speeds[2] >= KEEP_ADAPTIVE * speeds[1] else best.spec
    return {
        "tree": str(tree),
        "picked": str(best.spec),
        "predicted_speedup": round(predicted, 4),
        "measured_speedup": round(measured, 4),
        "relative_error": round(predicted / measured - 1, 4),
        "adaptive_speedup": adaptive,
        "tokens_per_second": rates,
        "prompts": len(prompts),
        "max_new_tokens": tokens,
        "costs": search.costs.table(),
        "acceptance": {"chain": chances(search.tracks), "recall": recall(search.tracks)},
        "candidates": search.table(),
        "candidates_predicted": len(search.ranking),
    }


def print_result(result: dict[str, Any], console: Console | None = None) -> None:
    """Prints the costs, the acceptance, the best candidates and the comparison of prediction and measurement."""
    console = console or wide_console()
    costs = result["costs"]
    verify = "  ".join(f"{nodes}: {ms:.1f}" for nodes, ms in costs["verification_ms"].items())
    console.print(f"verification, ms by nodes   {verify}", highlight=False)
    for k, by_depth in costs["drafting_ms"].items():
        cells = "  ".join(f"{depth}: {ms:.1f}" for depth, ms in by_depth.items())
        console.print(f"drafting, ms by depth       {cells}   ({k} per node)", highlight=False)
    for top, shares in result["acceptance"]["recall"].items():
        cells = "  ".join(f"{share:.2f}" for share in shares)
        console.print(f"true token in the top {top}      {cells}   (by depth)", highlight=False)
    table = Table("tree", "predicted\nspeed-up", "accepted\nlength", title="fastest candidates", title_justify="left")
    for row in result["candidates"]:
        table.add_row(row["tree"], f"{row['predicted_speedup']:.2f}x", f"{row['accepted_length']:.2f}")
    console.print(table)
    if result["picked"] == "none":
        console.print("no tree is faster than plain decoding here: do not use this drafter on this machine")
        return
    console.print(
        f"{result['picked']}: predicted {result['predicted_speedup']:.2f}x, measured {result['measured_speedup']:.2f}x "
        f"({result['relative_error']:+.1%}); adaptive {result['adaptive_speedup']:.2f}x; keeping {result['tree']}",
        highlight=False,
        soft_wrap=True,
    )
