"""`drafttrain tune`: the fastest tree for a drafter here, predicted for all and measured for one.

Three measurements, none of which depends on the chosen tree:

    acceptance      one plain run with generous trees, which replays every candidate's rounds exactly (`replay`)
    costs           seconds of verifying by number of nodes and of drafting by depth (`measure_costs`)
    the check       the chosen tree, fixed and adaptive, against plain decoding, interleaved, next to the prediction

Costs are measured before the check and after it, and the prediction takes their mean: memory that is shared
with other machines changes its speed within a minute.

Timing every candidate instead takes longer and picks by luck: candidates differ by a few per cent,
and so does a timing. What is kept after the check is decided by paired differences: another setting
than the simplest must be better beyond their interval.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from drafttrain.data.chat import ChatInputs, prompt_ids
from drafttrain.data.image_parts import sources_in
from drafttrain.data.row_formats import parse_row, prompt_texts
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.combined import parts_of
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.kinds import split_name
from drafttrain.drafters.registry import (
    decoding_file,
    decoding_settings,
    load_drafter,
    prepare,
)
from drafttrain.environment import describe_environment, describe_run
from drafttrain.errors import UserError
from drafttrain.evaluation.resampling import Ratio, paired_ratio
from drafttrain.evaluation.results_schema import EngineSide
from drafttrain.evaluation.sides import SideRequest, by_turns, engine_side
from drafttrain.evaluation.verdicts import OPEN, PAYS, judge
from drafttrain.files import Json, read_jsonl, write_json
from drafttrain.flags import load_target, sampling_of
from drafttrain.folders import beside, inputs_of, output_file
from drafttrain.images import BadPicture
from drafttrain.inference import Decoder, SamplingParams, token_limit
from drafttrain.outcome import command_line, conclude, next_command
from drafttrain.progress import Progress
from drafttrain.reports.output import table_of, wide_console
from drafttrain.target import Target
from drafttrain.tuning.replay import (
    CYCLES,
    DEPTH,
    NODES,
    CostModel,
    Replayed,
    Track,
    chances,
    measure_costs,
    recall,
    record,
    replay,
)

TOKENS = 64  # per prompt
ROWS = 6  # prompts
REPEATS = 2  # of the final measurement
PROMPTS = (
    "Give three reasons why people keep diaries, with a short example of each.",
    "Write a function that removes duplicates from a list while keeping the order, and explain it.",
    "A train covers 150 km in two and a half hours. What is its mean speed, and how far does it get in four hours?",
    "Summarize in two sentences: Bees fly from flower to flower to collect nectar. On the way they carry pollen, which "
    "lets plants form seeds. Many crops depend on them, so farmers rent hives in spring.",
    "Which planets have rings, and what are the rings made of?",
    "Write a polite message that moves a dentist's appointment from Monday to Thursday.",
)
# Numbers of nodes of candidates, beside those whose costs are measured.
NODES_BETWEEN = (3, 5, 6, 19)
# Costs of a pass, in plain passes, up to which a match that is drafted alone may grow.
CHEAP = (1.5, 2.5)
SAME = 1.01  # predictions of about this ratio are equal: the simpler tree comes first
# relative difference in accepted length of trees that are worth measuring against each other
APART = 0.02
BEHIND = 0.9  # of the fastest prediction: slower trees are not measured
FINALISTS = 4  # trees that are measured
TIE = 0.02  # a simpler tree is kept if it is slower by at most this, and not beyond the interval
# relative difference of prediction and measurement that is pointed out if it lies beyond the
# interval
PARTED = 0.05
SHOWN = 12  # candidates of a table
_NONE = TreeSpec.parse("none")


@dataclass(frozen=True)
class TuneSettings:
    """How to tune.

    Attributes:
        tokens: new tokens per prompt. repeats: of the final measurement. cycles: samples of each
            cost.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    tokens: int = TOKENS
    repeats: int = REPEATS
    cycles: int = CYCLES


def calibration_prompts(
    target: Target,
    file: str | None,
    kwargs: Json,
    exclude: Collection[str] = (),
    tokens: int = TOKENS,
    count: int = ROWS,
) -> list[list[int]]:
    """Token ids of the prompts that a search runs on, at most `count`.

    Args:
        file: JSON lines with `messages` (the assistant's last message is left out), `turns` or
            `text`; None takes the built-in prompts.
        kwargs: chat_template_kwargs of rows that do not set them.
        exclude: texts of the suite that will be measured; prompts with one of them are left out.
        tokens: new tokens that must fit into the target's context after a prompt.

    Raises:
        UserError: a file that is missing or malformed, or no usable row.
    """
    rows: list[Json] = [{"text": text} for text in PROMPTS]
    if file:
        try:
            rows = [row for _, row in read_jsonl(Path(file).expanduser())]
        except UserError as error:
            raise UserError(f"calibrate={file!r} cannot be read: {error}") from error

    prompts: list[list[int]] = []
    for row in rows:
        prompt: Json = {}
        with contextlib.suppress(BadPicture):  # images are not read here
            prompt = parse_row(row) or prompt
        messages = _messages(row, prompt)
        texts = prompt_texts({"messages": messages})
        if sources_in(messages) or not texts or not set(texts).isdisjoint(exclude):
            continue
        ids = prompt_ids(target.tokenizer, messages, ChatInputs.of(prompt, kwargs))
        with contextlib.suppress(UserError):  # the target's context is too short for the prompt
            if token_limit(target, len(ids), tokens) == tokens:
                prompts.append(ids)
    if not prompts:
        raise UserError(
            f"calibrate={file or 'built-in prompts'!r} has no usable row: each needs messages, turns or text, without "
            f"images and not in the suite, with room for {tokens} tokens in the target's context"
        )
    return prompts[:count]


def _messages(row: Json, prompt: Json) -> list[dict[str, str]]:
    """The messages of a row up to where the assistant answers. prompt: as `parse_row` reads it."""
    if "text" in prompt:
        return [{"role": "user", "content": prompt["text"]}]
    messages = prompt.get("messages", [])
    if isinstance(row.get("turns"), list):
        return messages[:1]
    if messages and messages[-1]["role"] == "assistant":
        return messages[:-1]
    return messages


def candidates(drafter: Drafter, costs: CostModel) -> list[TreeSpec]:
    """Every tree that can be replayed: chains and dynamic trees with their options.

    Options are early stops or cuts, and how a second drafter's matches are merged. Chains without
    matches are for engines, see `Search.chain`.

    Args:
        costs: what passes cost here, which says how long a match drafted alone may be.
    """
    main, side = parts_of(drafter)
    stops = [""]
    if main.trainable:
        stops += ["@stop=0.1", "@stop=0.3", "@cut=0.05", "@cut=0.12"]

    chain_matches = [""]
    tree_matches = [""]
    if side is not None:
        cheap = sorted({costs.affordable(factor) for factor in CHEAP})
        longer = [f"@match={nodes}" for nodes in cheap if nodes > 1]
        chain_matches += ["@nomatch", *longer]
        tree_matches += ["@alone=0.5", "@alone=0.9", *longer]
        tree_matches += [f"@alone=0.5{match}" for match in longer]

    texts = ["none"]
    depths = range(1, DEPTH + 1)
    for depth, stop, match in itertools.product(depths, stops, chain_matches):
        texts.append(f"chain:{depth}{stop}{match}")
    sizes = sorted({*NODES, *NODES_BETWEEN})
    for depth, k, nodes, stop, match in itertools.product(
        depths, (4, 8), sizes, stops, tree_matches
    ):
        # As many nodes as the depth takes at least, and as k children of k nodes a depth at most.
        if max(2, depth) <= nodes <= k + (depth - 1) * k * k:
            texts.append(f"dynamic:{depth},{k},{nodes}{stop}{match}")
    return [TreeSpec.parse(text) for text in texts]


def effort(spec: TreeSpec) -> tuple[int, ...]:
    """How complicated a tree is: options, then nodes, then depth.

    Of trees that are about as fast the simplest is taken.
    """
    options = (spec.stop, spec.cut, spec.alone, spec.match, not spec.matches)
    return sum(map(bool, options)), spec.budget, spec.depth, spec.top_k


class Prediction(NamedTuple):
    """The expected performance of a tree.

    Attributes:
        tokens_per_second: of decoding, prefill and first token left out. request_seconds: of all
            answers, with them.
    """

    spec: TreeSpec
    tokens_per_second: float
    accepted_length: float
    request_seconds: float


def predict(spec: TreeSpec, tracks: Sequence[Track], costs: CostModel) -> Prediction:
    """Replays a tree's rounds and adds up their costs."""
    rounds: list[Replayed] = []
    for track in tracks:
        rounds += replay(track, spec)
    if not rounds:
        return Prediction(spec, 0.0, 0.0, 0.0)

    # Rounds of the same size cost the same.
    counts = Counter((done.nodes, done.depth) for done in rounds)
    seconds = 0.0
    for (nodes, depth), count in counts.items():
        drafts = nodes + depth > 0
        seconds += count * costs.round(spec if drafts else _NONE, nodes, depth)
    prompt_tokens = sum(track.prompt_tokens for track in tracks)
    if spec.shape != "none":
        seconds += costs.read_prompt * prompt_tokens

    tokens = sum(done.committed for done in rounds)
    request_seconds = seconds + costs.prompt * prompt_tokens
    return Prediction(spec, tokens / seconds, tokens / len(rounds), request_seconds)


@dataclass
class Search:
    """What was recorded, measured and predicted.

    Attributes:
        ranking: the fastest first.
    """

    tracks: list[Track]
    costs: CostModel
    ranking: list[Prediction]

    @property
    def choices(self) -> list[Prediction]:
        """The trees to choose from, the fastest first: those that merge matches, if there are any.

        Matches cost next to nothing, and texts in use repeat more than a few short answers to
        short prompts do: what leaves them out here lost a quarter of the speed elsewhere.
        """
        return [each for each in self.ranking if each.spec.matches]

    @property
    def best(self) -> Prediction:
        return self.choices[0]

    @property
    def plain(self) -> Prediction:
        return self.prediction(_NONE)

    def prediction(self, spec: TreeSpec) -> Prediction:
        return next(each for each in self.ranking if each.spec == spec)

    def priced(self, costs: CostModel) -> Search:
        """The same trees and records by other costs."""
        specs = [each.spec for each in self.ranking]
        return Search(self.tracks, costs, ranking(specs, self.tracks, costs))

    @property
    def chain(self) -> Prediction | None:
        """The fastest chain of the trained drafter alone, for engines without trees and matches."""
        merges = any(not each.spec.matches for each in self.ranking)
        for each in self.ranking:
            spec = each.spec
            whole = spec.shape == "chain" and not spec.stop and not spec.cut
            if whole and not (merges and spec.matches):
                return each
        return None

    def finalists(self) -> list[TreeSpec]:
        """The fastest trees that differ in accepted length.

        So errors of the costs do not concern all of them alike.
        """
        least = BEHIND * self.best.tokens_per_second
        found: list[Prediction] = []
        for each in self.choices:
            if each.spec.shape == "none" or each.tokens_per_second < least:
                continue
            lengths = (other.accepted_length for other in found)
            if all(abs(each.accepted_length / length - 1) > APART for length in lengths):
                found.append(each)
        return [each.spec for each in found[:FINALISTS]]

    def table(self, picked: Prediction | None = None) -> list[Json]:
        """The fastest candidates, the picked one and plain decoding, as rows of results.json."""
        shown = self.choices[:SHOWN]
        for each in (picked, self.plain):
            if each is not None and each not in shown:
                shown.append(each)
        return [self.row(each) for each in shown]

    def row(self, each: Prediction) -> Json:
        """A candidate as a row of results.json."""
        plain = self.plain.tokens_per_second
        return {
            "tree": str(each.spec),
            "tokens_per_second": round(each.tokens_per_second, 3),
            "accepted_length": round(each.accepted_length, 4),
            "predicted_speedup": round(each.tokens_per_second / plain, 4),
        }


def search_tree(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    settings: TuneSettings,
) -> Search:
    """Predicts the speed of every candidate.

    Args:
        target: packed before the call, if it will be packed later.
        prompts: token ids; not from the suite that will be measured.

    Raises:
        UserError: a drafter that learns from passes, which a replay does not make, or answers of
            one token each.
    """
    if drafter.probes or drafter.predictions:
        reason = "learns from its own rounds, so trees cannot be predicted"
        raise UserError(f"drafter={drafter.kind!r} {reason}; name one: --tree fanout:4x1x1")
    sampling = settings.sampling
    tokens = settings.tokens
    with Progress("recording acceptance", tokens - 1, "positions") as meter:
        tracks = record(target, drafter, prompts, sampling, tokens, meter.advance)
    costs = costs_here(target, drafter, prompts, settings)
    return Search(tracks, costs, ranking(candidates(drafter, costs), tracks, costs))


def ranking(
    specs: Sequence[TreeSpec],
    tracks: Sequence[Track],
    costs: CostModel,
) -> list[Prediction]:
    """What is predicted of each tree, the fastest first; of about equal ones the simplest."""
    predictions = [predict(spec, tracks, costs) for spec in specs]
    top = max(each.tokens_per_second for each in predictions)
    if not top:
        raise UserError(
            "the target ends its answers to all prompts at once, which tells nothing about trees; give other prompts: "
            "--calibrate FILE"
        )

    def order(each: Prediction) -> tuple[float, ...]:
        behind = math.log(top / max(each.tokens_per_second, 1e-9)) / math.log(SAME)
        return math.floor(behind), *effort(each.spec)

    return sorted(predictions, key=order)


def costs_here(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    settings: TuneSettings,
) -> CostModel:
    """What rounds cost at this moment."""
    with Progress("measuring costs", None, "rounds") as meter:
        return measure_costs(
            target,
            drafter,
            prompts,
            settings.sampling,
            settings.tokens,
            settings.cycles,
            meter.advance,
        )


@dataclass(frozen=True)
class Timings:
    """Measured answers of several sides to the same prompts.

    Attributes:
        tokens: [sides, prompts] new tokens after the first. seconds: [sides, prompts] that they
            took, median over the repeats. requests: the same from the request on, with the prefill.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    requests: np.ndarray

    def rate(self, side: int) -> float:
        """Tokens per second of a side over all prompts."""
        return float(self.tokens[side].sum() / self.seconds[side].sum())

    def ratio(self, side: int, over: int) -> Ratio:
        """The rate of a side over that of another, with its interval, paired by prompt."""
        return paired_ratio(
            [self.tokens[side], self.seconds[over]],
            [self.seconds[side], self.tokens[over]],
        )

    @property
    def whole(self) -> Timings:
        """The same of whole requests."""
        return replace(self, tokens=self.tokens + 1, seconds=self.requests)

    def faster(self, side: int, over: int) -> bool:
        """Whether a side is faster than another beyond noise."""
        ratio = self.ratio(side, over)
        return judge(ratio.value, (ratio.low, ratio.high), self.tokens.shape[1]).state == PAYS


def measure(
    target: Target,
    drafter: Drafter,
    specs: Sequence[TreeSpec],
    prompts: Sequence[list[int]],
    settings: TuneSettings,
) -> Timings:
    """Measures several trees on the same prompts, interleaved."""
    sides = {}
    for spec in specs:
        decoder = Decoder(target, drafter, spec=spec, sampling=settings.sampling)
        sides[str(spec)] = engine_side(decoder)
    number = {name: side for side, name in enumerate(sides)}
    seconds = np.zeros((settings.repeats, len(specs), len(prompts)))
    requests = np.zeros_like(seconds)
    tokens = np.zeros((len(specs), len(prompts)))
    with Progress("measuring the pick", seconds.size, "answers") as meter:
        for side in sides.values():  # warm up
            side(SideRequest(prompts[:1], [min(12, settings.tokens)]))
        every = itertools.product(range(settings.repeats), enumerate(prompts))
        for turn, (repeat, (prompt, ids)) in enumerate(every):
            request = SideRequest([ids], [settings.tokens])
            for name, (answer,) in by_turns(sides, request, turn):
                figures = cast("EngineSide", answer.figures)
                decoding = figures["latency"] - figures["ttft"]  # seconds without the prefill
                row = number[name]
                seconds[repeat, row, prompt] = max(decoding, 1e-9)
                requests[repeat, row, prompt] = figures["latency"]
                tokens[row, prompt] = max(figures["tokens"] - 1, 1)
                meter.advance()
    return Timings(tokens, np.median(seconds, axis=0), np.median(requests, axis=0))


def run(
    args: argparse.Namespace,
    target: Target | None = None,
    drafter: Drafter | None = None,
) -> int:
    """Runs the command.

    Args:
        target, drafter: loaded already; `args` has their names.

    Raises:
        UserError: values out of range, nothing to tune, or anything that cannot be loaded.
    """
    if args.max_new_tokens < 16:
        raise UserError(
            f"max-new-tokens={args.max_new_tokens} tells too little about a tree; use 16 or more"
        )
    settings = TuneSettings(sampling_of(args), args.max_new_tokens, args.repeats)
    if args.output is None:
        args.output = str(beside(split_name(args.drafter)[0], "tune.json"))
    output = output_file(args.output, "tune", inputs_of(args))
    place = decoding_file(args.drafter)
    writes_tree = not args.dry_run and place.parent.joinpath("config.json").is_file()
    if writes_tree:
        output_file(place, "decoding", key="drafter")

    target = (target or load_target(args)).pack()
    if drafter is None:
        drafter = load_drafter(args.drafter, target)
    else:
        prepare(drafter, target)
    if drafter is None:
        raise UserError(
            f"drafter={args.drafter!r} drafts nothing, so there is no tree to tune; name a drafter"
        )
    prompts = calibration_prompts(
        target,
        args.calibrate,
        args.chat_template_kwargs,
        tokens=args.max_new_tokens,
        count=args.prompts,
    )
    if len(prompts) < args.prompts:
        print(
            f"{len(prompts)} prompts fit, not {args.prompts}: give a file with more by --calibrate"
        )
    result = {
        **describe_run(),
        **describe_environment(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": args.target,
        "drafter": args.drafter,
        "sampling": {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p},
        "command": command_line(),
        **tune(target, drafter, prompts, settings),
    }

    write_json(output, result)
    wrote = [output]
    print_result(result)
    if writes_tree:
        keys = ("device", "dtype", "drafter", "predicted_speedup", "measured_speedup")
        decoding = {
            **decoding_settings(args.drafter),
            "tree": result["tree"],
            "chain": None,
            "tuned": {key: result[key] for key in keys},
        }
        if result["chain"]:  # without its options, which engines do not know
            decoding["chain"] = result["chain"]["tree"].partition("@")[0]
        write_json(place, decoding)
        wrote.insert(0, place)
        print(f"the drafter's default from now on: {result['tree']}")
    then = next_command("eval", carry=args, target=args.target, drafter=args.drafter)
    conclude(result, wrote, then)
    return 0


def tune(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    settings: TuneSettings,
) -> Json:
    """Searches a tree, measures it fixed and adaptive against plain decoding, and decides.

    Returns:
        tree: the setting to keep, see `keep`; picked: the best fixed tree, see `simplest`; chain:
            the fastest chain of the trained drafter alone, for engines that draft chains.
        predicted_speedup, measured_speedup: of the picked tree over plain decoding, prefill left
            out; relative_error: predicted / measured - 1. adaptive_speedup: of the same tree with
            @adapt. intervals: 95 %, of both and of @adapt over the fixed tree.
        predicted_request_speedup, measured_request_speedup: of whole requests, whose prompts have
            prompt_tokens tokens on average.
        contest: tokens per second of the trees that were measured against each other.
        costs, acceptance, candidates: the basis of the prediction.
    """
    search = search_tree(target, drafter, prompts, settings)
    best = search.best.spec
    # Measure the fastest predictions against each other, once.
    contest = {}
    trees = search.finalists()
    if len(trees) > 1 and best.shape != "none":
        timings = measure(target, drafter, trees, prompts, replace(settings, repeats=1))
        for side, spec in enumerate(trees):
            contest[str(spec)] = round(timings.rate(side), 3)
        best = trees[simplest(timings, trees)]

    # Measure the pick, fixed and adaptive, against plain decoding.
    measured = 1.0
    measured_request = 1.0
    adaptive = None
    rates = {}
    intervals = {}
    tree = best
    if best.shape != "none":
        specs = (_NONE, best, replace(best, adaptive=True))
        timings = measure(target, drafter, specs, prompts, settings)
        for side, spec in enumerate(specs):
            rates[str(spec)] = round(timings.rate(side), 3)
        ratios = {
            "measured_speedup": timings.ratio(1, 0),
            "measured_request_speedup": timings.whole.ratio(1, 0),
            "adaptive_speedup": timings.ratio(2, 0),
            "adaptive_over_fixed": timings.ratio(2, 1),
        }
        for name, ratio in ratios.items():
            intervals[name] = [round(ratio.low, 4), round(ratio.high, 4)]
        measured = ratios["measured_speedup"].value
        measured_request = ratios["measured_request_speedup"].value
        adaptive = round(ratios["adaptive_speedup"].value, 4)
        tree = specs[keep(timings)]

        # The prediction is of the machine as it was around the check.
        later = costs_here(target, drafter, prompts, settings)
        search = search.priced(search.costs.averaged(later))

    picked = search.prediction(best)
    predicted = picked.tokens_per_second / search.plain.tokens_per_second
    predicted_request = search.plain.request_seconds / picked.request_seconds
    return {
        "tree": str(tree),
        "picked": str(best),
        "chain": search.chain and search.row(search.chain),
        "predicted_speedup": round(predicted, 4),
        "measured_speedup": round(measured, 4),
        "relative_error": round(predicted / measured - 1, 4),
        "predicted_request_speedup": round(predicted_request, 4),
        "measured_request_speedup": round(measured_request, 4),
        "prompt_tokens": round(sum(map(len, prompts)) / len(prompts), 1),
        "adaptive_speedup": adaptive,
        "intervals": intervals,
        "tokens_per_second": rates,
        "contest": contest,
        "prompts": len(prompts),
        "max_new_tokens": settings.tokens,
        "costs": search.costs.table(),
        "acceptance": {"chain": chances(search.tracks), "recall": recall(search.tracks)},
        "candidates": sorted(
            search.table(picked=picked), key=lambda row: -row["predicted_speedup"]
        ),
        "candidates_predicted": len(search.ranking),
    }


def simplest(timings: Timings, specs: Sequence[TreeSpec]) -> int:
    """The side of the simplest tree that is about as fast as the fastest.

    It is slower by 2 % at most, and not beyond the interval of their paired difference. So noise
    does not choose complicated trees, and no choice costs much.
    """
    best = max(range(len(specs)), key=timings.rate)
    least = (1 - TIE) * timings.rate(best)
    close = []
    for side in range(len(specs)):
        if timings.rate(side) >= least and not timings.faster(best, side):
            close.append(side)
    return min(close, key=lambda side: effort(specs[side]))


def keep(timings: Timings) -> int:
    """The side to keep of plain decoding (0), the fixed tree (1) and the adaptive one (2).

    The adaptive tree is kept only if it is faster than the fixed one beyond the interval of their
    paired difference: noise favours neither. Plain decoding is kept if it is faster than what was
    kept so, likewise.
    """
    tree = 2 if timings.faster(2, 1) else 1
    if timings.faster(0, tree):
        return 0
    return tree


def print_result(result: Json) -> None:
    """Prints the costs, the acceptance, the best candidates, and prediction against measurement."""
    console = wide_console()

    def line(label: str, values: Mapping[str, float], digits: int, note: str = "") -> None:
        shown = [f"{key}: {value:.{digits}f}" for key, value in values.items()]
        console.print(f"{label:<28}{'  '.join(shown)}{note}")

    costs = result["costs"]
    line("verification, ms by nodes", costs["verification_ms"], 1)
    for k, by_depth in costs["drafting_ms"].items():
        line("drafting, ms by depth", by_depth, 1, f"   ({k} per node)")
    for top, shares in result["acceptance"]["recall"].items():
        shown = "  ".join(f"{share:.2f}" for share in shares)
        console.print(f"{f'true token in the top {top}':<28}{shown}   (by depth)")

    rows = []
    for each in result["candidates"]:
        speedup = f"{each['predicted_speedup']:.2f}x"
        note = "picked" if each["tree"] == result["picked"] else ""
        rows.append([each["tree"], speedup, f"{each['accepted_length']:.2f}", note])
    headings = ("tree", "predicted\nspeed-up", "predicted\naccepted length", "")
    console.print(table_of(headings, rows, "fastest candidates"))
    console.print(verdict(result), soft_wrap=True)


def _about_adapting(result: Json) -> str:
    """How the tree that is chosen again in every round compares with the fixed one."""
    low, high = result["intervals"]["adaptive_over_fixed"]
    fixed = "the fixed tree"
    if low > 1:
        compared = f"faster than {fixed} by {low - 1:.0%} to {high - 1:.0%}"
    elif high < 1:
        compared = f"slower than {fixed} by {1 - high:.0%} to {1 - low:.0%}"
    else:
        compared = f"no different from {fixed} beyond noise ({low - 1:+.0%} to {high - 1:+.0%})"
    speedup = result["adaptive_speedup"]
    return f"{result['picked']}@adapt, adapted every round: measured {speedup:.2f}x, {compared}"


def _about_requests(result: Json) -> str:
    """The speed-up that a user sees, who waits for the prompt's pass too."""
    low, high = result["intervals"]["measured_request_speedup"]
    return (
        f"whole requests, with prompts of {result['prompt_tokens']:.0f} tokens and answers of "
        f"{result['max_new_tokens']}: predicted {result['predicted_request_speedup']:.2f}x, "
        f"measured {result['measured_request_speedup']:.2f}x [{low:.2f}, {high:.2f}]"
    )


def verdict(result: Json) -> str:
    """What was measured and what is kept, in a few sentences."""
    refused = "do not use this drafter on this machine"
    if result["picked"] == "none":
        return f"no tree is faster than plain decoding here: {refused}"
    spans = result["intervals"]
    kept = "measured_speedup"
    if result["tree"].endswith("@adapt") and "adaptive_speedup" in spans:
        kept = "adaptive_speedup"
    found = judge(result[kept], spans[kept], result["prompts"])
    low, high = spans["measured_speedup"]
    predicted = result["predicted_speedup"]
    text = (
        f"{result['picked']}: decoding predicted {predicted:.2f}x, "
        f"measured {result['measured_speedup']:.2f}x [{low:.2f}, {high:.2f}]\n"
        f"{_about_requests(result)}\n"
        f"{_about_adapting(result)}\n"
        f"keeping {result['tree']}: {found.text}"
    )
    if result["tree"] == "none":
        text += f"; {refused}"
    elif found.state == OPEN:
        text += " (--calibrate FILE --prompts N)"
    if abs(result["relative_error"]) > PARTED and not low <= predicted <= high:
        text += (
            f"\nprediction and measurement part by {result['relative_error']:+.0%}, "
            "beyond the interval: trust the measurement, which decided what is kept; "
            "the predicted speed-ups above are off by about as much. "
            "Was the machine busy? Then run tune again on a quiet one"
        )
    return text
