"""`drafttrain diagnose`: why a drafter's acceptance is what it is, from what was measured, and what to do about it.

A finding names a likely cause only if a figure points at it, and shows that figure. The field's rules of thumb stand beside
the measurement, which decides: a short tree on a machine where verification is cheap pays at acceptances that the rules call
useless.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from drafttrain.drafters.registry import decoding_file, decoding_settings
from drafttrain.errors import UserError
from drafttrain.evaluation.metrics import summarise
from drafttrain.files import write_json
from drafttrain.reports.console import wide_console
from drafttrain.reports.report import load_results

HELP = """Say why acceptance is what it is, from results.json, and what to do.

  drafttrain diagnose results.json
  drafttrain diagnose results.json --drafter runs/drafter --apply

With --apply, kinds of request that speculation slows down are written into the drafter's decoding.json (`off`), which
`drafttrain eval` and `generate(..., category=...)` then decode plainly; kinds that pay are taken out again. Several files of
one drafter are compared by temperature."""

USELESS, SHORTEN, LENGTHEN = 0.3, 0.4, 0.8  # the field's rules of thumb for the acceptance rate
COVERAGE = 0.95  # below this the drafter's vocabulary costs more than rounding
MISMATCH = 0.7  # measured over trained acceptance at the first depth
FALL = 0.7  # acceptance at the last depth over that at the first
LESS = 0.85  # accepted tokens of a part over those of the rest
DEAR = 0.35  # share of time in the drafter
FEWEST = 4  # prompts that a comparison of parts needs on each side


@dataclass
class Finding:
    """A likely cause. cause: its name; figures: what points at it; advice: what to do; off: categories to switch off."""

    cause: str
    figures: str
    advice: str
    off: tuple[str, ...] = ()


def diagnose(
    results: dict[str, Any], training: dict[str, Any] | None = None, others: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Findings, those that matter most first.

    Args:
        results: content of a results.json. training: of the drafter's training.json, if there is one.
        others: further results of the same drafter, compared by temperature.

    Returns:
        Finding fields, as in JSON; the first one is the verdict.
    """
    if not results["overall"]["target_passes"] or results["decoding"]["tree"].get("shape") == "none":
        return []
    rules = (_mismatch, _vocabulary, _depth, _context, _categories, _cost)
    found = [finding for rule in rules if (finding := rule(results, training or {})) is not None]
    heat = _temperature(results, others)
    return [asdict(finding) for finding in [_verdict(results), *found, *([heat] if heat else [])]]


def _verdict(results: dict[str, Any]) -> Finding:
    overall = results["overall"]
    rate, speedup = overall["acceptance_rate"], overall["speedup_vs_fastest"]
    rule = "between 40 and 80 %: the length is about right"
    if rate < USELESS:
        rule = "below 30 % speculation is called useless"
    elif rate < SHORTEN:
        rule = "below 40 %: draft fewer tokens"
    elif rate > LENGTHEN:
        rule = "above 80 %: draft more tokens"
    figures = f"acceptance rate {rate:.0%}, accepted length {overall['accepted_length']:.2f} (rule of thumb: {rule})"
    if speedup is None:
        return Finding("verdict", figures, "no baseline was run: measure one to know whether it pays")
    interval = overall.get("confidence", {"speedup": {}})["speedup"].get("autoregressive")
    figures += f"; measured {speedup:.2f}x" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")
    if speedup < 1:
        return Finding(
            "verdict", figures, "it slows decoding down here: see the causes, run `drafttrain tune`, or switch it off"
        )
    odd = " although the rule of thumb says otherwise: verification is cheap here" if rate < USELESS else ""
    return Finding("verdict", figures, "it pays here" + odd)


def _mismatch(results: dict[str, Any], training: dict[str, Any]) -> Finding | None:
    """A drafter that was good on held-out training data and is bad everywhere here sees something else than it learned."""
    trained = training.get("held_out", {}).get("eval_agree@1")
    joint = results["overall"]["acceptance_by_depth"]["joint"]
    if not trained or not joint or joint[0] >= MISMATCH * trained:
        return None
    first = {name: part["acceptance_by_depth"]["joint"][:1] for name, part in results["categories"].items()}
    good = [name for name, value in first.items() if value and value[0] >= MISMATCH * trained]
    figures = f"first drafted token: {trained:.2f} right on held-out training data, {joint[0]:.2f} accepted here"
    if good:
        return Finding("domain", f"{figures}; as trained in {', '.join(good)}", "train on prompts like the others")
    name = training.get("config", {}).get("target")
    figures += f"; trained for {name!r}, used with {results['target']!r}" if name and name != results["target"] else ""
    return Finding(
        "tokenizer or template mismatch",
        f"{figures}; low in every category",
        "compare the chat template, the system prompt and the target's weights with those of the training data "
        "(`drafttrain generate` uses the template that eval uses)",
    )


def _vocabulary(results: dict[str, Any], _: dict[str, Any]) -> Finding | None:
    known = [record for record in results["prompts"] if "covered" in record]
    tokens = sum(record["sides"]["drafter"]["tokens"] for record in known)
    if not tokens:
        return None
    covered = sum(record["covered"] * record["sides"]["drafter"]["tokens"] for record in known) / tokens
    if covered >= COVERAGE:
        return None
    conditional = results["overall"]["acceptance_by_depth"]["conditional"]
    lost = 1 - (conditional[0] if conditional else 0.0)
    return Finding(
        "vocabulary coverage",
        f"the drafter's vocabulary holds {covered:.1%} of the answers' tokens; {1 - covered:.1%} can never be accepted, of "
        f"{lost:.1%} that are rejected at the first depth",
        "raise draft_vocab_size, or count the kept tokens on data like these prompts",
    )


def _depth(results: dict[str, Any], training: dict[str, Any]) -> Finding | None:
    conditional = results["overall"]["acceptance_by_depth"]["conditional"]
    if len(conditional) < 2 or conditional[0] < 0.1 or conditional[-1] >= FALL * conditional[0]:
        return None
    steps = training.get("config", {}).get("drafter", {}).get("ttt_steps")
    shown = " ".join(f"{share:.2f}" for share in conditional)
    deeper = f"; trained for {steps} depths, drafts {len(conditional)}" if steps and steps < len(conditional) else ""
    return Finding(
        "acceptance falls by depth",
        f"given the tokens before it, a drafted token is accepted with {shown} by depth{deeper}",
        "train more depths (drafter.ttt_steps, depth_share=1), or draft a shallower, wider tree: `drafttrain tune`",
    )


def _accepted(records: Sequence[dict[str, Any]]) -> float:
    return summarise(records)["accepted_length"] - 1


def _context(results: dict[str, Any], training: dict[str, Any]) -> Finding | None:
    records = sorted(results["prompts"], key=lambda record: record["prompt_tokens"])
    third = len(records) // 3
    if third < FEWEST:
        return None
    short, long_ = records[:third], records[-third:]
    lengths = [sum(record["prompt_tokens"] for record in part) / third for part in (short, long_)]
    accepted = [_accepted(part) for part in (short, long_)]
    if lengths[1] < 2 * lengths[0] or accepted[1] >= LESS * accepted[0]:
        return None
    limit = training.get("config", {}).get("max_length")
    beyond = f"; trained on at most {limit} tokens" if limit and limit < lengths[1] else ""
    return Finding(
        "long context",
        f"accepted tokens a round: {accepted[0]:.2f} behind {lengths[0]:.0f} prompt tokens, {accepted[1]:.2f} behind "
        f"{lengths[1]:.0f}{beyond}",
        "train on longer rows (max_length), or check with `drafttrain sweep --contexts`: categories differ in length too",
    )


def slow_categories(results: dict[str, Any]) -> tuple[str, ...]:
    """Categories that speculation slows down, by the plain engine's rate, or whatever baseline there is."""
    name = next(iter(results["overall"]["speedup"]), None)
    parts = {category: part["speedup"].get(name, 1.0) for category, part in results["categories"].items()}
    return tuple(category for category, speedup in parts.items() if speedup < 1)


def _categories(results: dict[str, Any], _: dict[str, Any]) -> Finding | None:
    parts, overall = results["categories"], results["overall"]
    mean = overall["accepted_length"] - 1
    low = [name for name, part in parts.items() if len(parts) > 1 and part["accepted_length"] - 1 < LESS * mean]
    slow = slow_categories(results)
    if not low and not slow:
        return None
    baseline = next(iter(overall["speedup"]), "")
    shown = ", ".join(
        f"{name} {parts[name]['accepted_length']:.2f}"
        + (f" ({parts[name]['speedup'][baseline]:.2f}x)" if baseline in parts[name]["speedup"] else "")
        for name in dict.fromkeys((*low, *slow))
    )
    advice = "add training prompts of these kinds"
    if slow:
        advice += f"; speculation slows {', '.join(slow)} down: switch it off there (`drafttrain diagnose --apply`)"
    return Finding(
        "domain",
        f"accepted length by category: {shown}, against {overall['accepted_length']:.2f} overall",
        advice,
        slow,
    )


def _cost(results: dict[str, Any], _: dict[str, Any]) -> Finding | None:
    share = results["overall"]["draft_fraction"]
    if share < DEAR:
        return None
    return Finding(
        "drafting takes long",
        f"{share:.0%} of the time is spent in the drafter",
        "draft fewer depths: `drafttrain tune`",
    )


def _temperature(results: dict[str, Any], others: Sequence[dict[str, Any]]) -> Finding | None:
    heat = results["decoding"]["temperature"]
    cooler = [
        each for each in others if each["decoding"]["temperature"] < heat and each["drafter"] == results["drafter"]
    ]
    ours = results["overall"]["accepted_length"] - 1
    best = max(cooler, key=lambda each: each["overall"]["accepted_length"], default=None)
    if best is None or ours >= LESS * (best["overall"]["accepted_length"] - 1):
        return None
    drawn = "" if results["decoding"]["tree"].get("sampled") else "draw the drafts too (--tree chain:3@sample), or "
    return Finding(
        "temperature",
        f"accepted tokens a round: {best['overall']['accepted_length'] - 1:.2f} at temperature "
        f"{best['decoding']['temperature']:g}, {ours:.2f} at {heat:g}",
        f"{drawn}train on answers that were sampled at {heat:g}",
    )


def print_findings(findings: Sequence[dict[str, Any]], console: Console | None = None) -> None:
    """A line with the figures and a line with the advice per finding."""
    console = console or wide_console()
    for finding in findings:
        console.print(f"[bold]{finding['cause']}[/bold]: {finding['figures']}", highlight=False, soft_wrap=True)
        console.print(f"  -> {finding['advice']}", highlight=False, soft_wrap=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", help="files written by drafttrain eval; each is diagnosed")
    parser.add_argument("--drafter", default="", help="the drafter's folder (default: the one that the results name)")
    parser.add_argument(
        "--apply", action="store_true", help="write the kinds to switch off into the drafter's decoding.json"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    Raises:
        UserError: a file that is no results.json, or no folder to write to.
    """
    from drafttrain.evaluation.runner import training_record

    runs = [load_results(name) for name in args.results]
    for name, results in zip(args.results, runs, strict=True):
        print(name)
        folder = args.drafter or results["drafter"]
        print_findings(diagnose(results, training_record(folder), [other for other in runs if other is not results]))
        if args.apply:
            apply(folder, results)
    return 0


def apply(drafter: str, results: dict[str, Any]) -> None:
    """Writes the kinds that speculation slows down into decoding.json. Kinds that were decoded plainly stay as they are.

    Raises:
        UserError: no such folder.
    """
    place = decoding_file(drafter)
    if not place.parent.joinpath("config.json").is_file():
        raise UserError(
            f"drafter={drafter!r} is no drafter's folder, so there is no decoding.json; give --drafter FOLDER"
        )
    settings = decoding_settings(drafter) or {"tree": results["decoding"]["tree"]["spec"]}
    unmeasured = {record["category"] for record in results["prompts"] if record.get("speculation") is False}
    known = set(results["categories"]) - unmeasured
    off = sorted({*slow_categories(results)} & known | set(settings.get("off", ())) - known)
    write_json(place, {**settings, "off": off})
    print(f"wrote {place}: speculation off for {', '.join(off) or 'nothing'}")
