"""`drafttrain diagnose`: likely causes of low acceptance, from measured figures, and what to do
about them.

A finding names a cause only if a figure supports it, and shows that figure. The field's rules of
thumb appear next to the measured speed-up, and the measurement decides: with cheap verification a
short tree pays even at low acceptance rates. Advice on categories needs a difference beyond noise,
at a level that is divided by the number of categories looked at.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from drafttrain.drafters.kinds import untrained_kinds
from drafttrain.drafters.registry import decoding_file, decoding_settings
from drafttrain.errors import UserError
from drafttrain.evaluation.metrics import (
    Record,
    accepted_below,
    intervals,
    load_results,
    summarize,
    training_record,
)
from drafttrain.evaluation.verdicts import FEWEST, LOSES, PAYS, fastest, verdict_of
from drafttrain.files import Json, write_json
from drafttrain.folders import output_file
from drafttrain.outcome import conclude, next_command
from drafttrain.progress import plain_console

# the field's rules of thumb for the acceptance rate
USELESS = 0.3
SHORTEN = 0.4
LENGTHEN = 0.8
COVERAGE = 0.95  # below this share of covered tokens the pruned vocabulary costs acceptance
MISMATCH = 0.7  # measured / trained acceptance at the first depth
FALL = 0.7  # acceptance at the last depth / at the first
LESS = 0.85  # accepted tokens of a part / of the rest
EXPENSIVE = 0.35  # share of time in the drafter
CUT = 0.25  # share of answers that end at max_new_tokens


def finding(cause: str, figures: str, advice: str, off: Sequence[str] = ()) -> Json:
    """A likely cause, as in results.json. figures: the evidence; advice: what to do; off:
    categories to switch off.
    """
    return {"cause": cause, "figures": figures, "advice": advice, "off": off}


def diagnose(
    results: Json,
    training: Json | None = None,
    others: Sequence[Json] = (),
) -> list[Json]:
    """Finds likely causes, the most important first.

    Args:
        results: content of a results.json. training: content of the drafter's training.json, if
            there is one.
        others: further results of the same drafter, compared by temperature.

    Returns:
        The arguments of `finding`, by name; the first finding is the verdict.
    """
    if not results["overall"]["acceptance_by_depth"]["joint"]:
        return [
            finding("verdict", "no round offered a token", verdict_of(results["overall"]).advice)
        ]
    training = training or {}
    given = results["decoding"].get("chat_template_kwargs") or {}
    found = [
        _verdict(results),
        other_template_kwargs(given, training),
        _mismatch(results, training),
        _vocabulary(results),
        _depth(results, training),
        _context(results, training),
        _categories(results),
        _cost(results),
        _temperature(results, others),
        _cut(results),
    ]
    return [each for each in found if each is not None]


def _tree(results: Json) -> Json:
    """The measured tree; empty where an earlier version did not record it."""
    return results["decoding"].get("tree", {})


def _verdict(results: Json) -> Json:
    overall = results["overall"]
    rate = overall["acceptance_rate"]
    found = verdict_of(overall)
    rule = "between 40 and 80 %: the length is about right"
    if rate < USELESS:
        rule = "below 30 % speculation is called useless"
    elif rate < SHORTEN:
        rule = "below 40 %: draft fewer tokens"
    elif rate > LENGTHEN:
        rule = "above 80 %: draft more tokens"
    figures = f"acceptance rate {rate:.0%}, accepted length {overall['accepted_length']:.2f} (rule of thumb: {rule})"
    if found.figures:
        figures += f"; {found.figures}"
    else:
        figures += ""
    advice = found.advice
    if found.state == LOSES:
        advice += "; see the causes, run `drafttrain tune`, or switch it off"
    elif found.state == PAYS and rate < USELESS:
        advice += " although the rule of thumb says otherwise: verification is cheap here"
    return finding("verdict", figures, advice)


def other_template_kwargs(given: Json, training: Json) -> Json | None:
    """A finding where chat_template_kwargs differ from those that the drafter's data were generated
    with.
    """
    learned = training.get("data_set", {}).get("chat_template_kwargs")
    if learned is None or learned == given:
        return None
    return finding(
        "other chat_template_kwargs",
        f"the drafter learned from answers with {json.dumps(learned)}, and is measured with {json.dumps(given)}",
        f"add --chat-template-kwargs '{json.dumps(learned)}', or generate data as the target is used",
    )


def _mismatch(results: Json, training: Json) -> Json | None:
    """Train/serve mismatch: acceptance far below that on held-out training data, everywhere or in
    some categories.
    """
    trained = training.get("held_out", {}).get("eval_agree@1")
    joint = results["overall"]["acceptance_by_depth"]["joint"]
    if not trained or not joint or joint[0] >= MISMATCH * trained:
        return None
    several = {
        name: part for name, part in results["categories"].items() if part["prompts"] >= FEWEST
    }
    first = {name: part["acceptance_by_depth"]["joint"][:1] for name, part in several.items()}
    good = [name for name, value in first.items() if value and value[0] >= MISMATCH * trained]
    figures = f"first drafted token: {trained:.2f} right on held-out training data, {joint[0]:.2f} accepted here"
    if good:
        return finding(
            "domain",
            f"{figures}; as trained in {', '.join(good)}",
            "train on prompts like the others",
        )
    name = training.get("config", {}).get("target")
    if name and name != results["target"]:
        figures += f"; trained for {name!r}, used with {results['target']!r}"
    else:
        figures += ""
    return finding(
        "tokenizer or template mismatch",
        figures + ("; low in every category" if len(several) > 1 else ""),
        "compare the chat template, the system prompt and the target's weights with those of the training data "
        "(`drafttrain generate` uses the template that eval uses)",
    )


def _vocabulary(results: Json) -> Json | None:
    known = [record for record in results.get("prompts", []) if "covered" in record]
    tokens = sum(record["sides"]["drafter"]["tokens"] for record in known)
    covered = sum(
        record["covered"] * record["sides"]["drafter"]["tokens"] for record in known
    ) / max(tokens, 1)
    if not tokens or covered >= COVERAGE:
        return None
    conditional = results["overall"]["acceptance_by_depth"]["conditional"]
    lost = 1 - (conditional[0] if conditional else 0.0)
    return finding(
        "vocabulary coverage",
        f"the drafter's vocabulary holds {covered:.1%} of the answers' tokens; {1 - covered:.1%} can never be accepted, of "
        f"{lost:.1%} that are rejected at the first depth",
        "set vocabulary_match: text, which drafts in the draft model's own tokens"
        if "vocabulary" in results
        else "raise draft_vocab_size, or count the kept tokens on data like these prompts",
    )


def _depth(results: Json, training: Json) -> Json | None:
    conditional = results["overall"]["acceptance_by_depth"]["conditional"]
    if len(conditional) < 2 or conditional[0] < 0.1 or conditional[-1] >= FALL * conditional[0]:
        return None
    steps = training.get("config", {}).get("drafter", {}).get("ttt_steps")
    shown = " ".join(f"{share:.2f}" for share in conditional)
    deeper = ""
    if steps and steps < len(conditional):
        deeper = f"; trained for {steps} depths, drafts {len(conditional)}"
    advice = "draft a shallower, wider tree: `drafttrain tune`"
    if results["kind"].partition("+")[0] not in untrained_kinds():
        advice = f"train more depths (drafter.ttt_steps, depth_share=1), or {advice}"
    return finding(
        "acceptance falls by depth",
        f"given the tokens before it, a drafted token is accepted with {shown} by depth{deeper}",
        advice,
    )


def _context(results: Json, training: Json) -> Json | None:
    records = sorted(results.get("prompts", []), key=lambda record: record["prompt_tokens"])
    third = len(records) // 3
    if third < FEWEST:
        return None
    parts = (records[:third], records[-third:])
    lengths = [sum(record["prompt_tokens"] for record in part) / third for part in parts]
    accepted = [summarize(part)["accepted_length"] - 1 for part in parts]
    if lengths[1] < 2 * lengths[0] or not accepted_below(parts[1], parts[0], LESS):
        return None
    limit = training.get("config", {}).get("max_length")
    beyond = ""
    if limit and limit < lengths[1]:
        beyond = f"; trained on at most {limit} tokens"
    return finding(
        "long context",
        f"accepted tokens per round: {accepted[0]:.2f} after {lengths[0]:.0f} prompt tokens, {accepted[1]:.2f} after "
        f"{lengths[1]:.0f}{beyond}",
        "train on longer rows (max_length), or check with `drafttrain sweep --contexts`: categories differ in length too",
    )


def _records_by_category(results: Json) -> dict[str, list[Record]]:
    """The prompts of each category that has enough of them to be judged; empty if only one category
    was measured.
    """
    found: dict[str, list[Record]] = {}
    for record in results.get("prompts", []):
        found.setdefault(record["category"], []).append(record)
    if len(found) > 1:
        return {name: part for name, part in found.items() if len(part) >= FEWEST}
    return {}


def slow_categories(results: Json) -> tuple[str, ...]:
    """Categories that speculation slows down beyond noise, compared with the faster plain baseline."""
    parts = _records_by_category(results)
    name = fastest(results["overall"])
    spans = {
        category: intervals(part, [name], len(parts))["speedup"][name]
        for category, part in parts.items()
        if name
    }
    return tuple(category for category, span in spans.items() if span and span[1] < 1)


def _categories(results: Json) -> Json | None:
    """Categories that accept less than the others, or that speculation slows down."""
    parts = _records_by_category(results)
    overall = results["overall"]
    low = []
    for name, part in parts.items():
        rest = [record for record in results["prompts"] if record["category"] != name]
        if len(rest) >= FEWEST and accepted_below(part, rest, LESS, len(parts)):
            low.append(name)
    slow = slow_categories(results)
    if not low and not slow:
        return None
    baseline = fastest(overall)
    categories = results["categories"]
    speedups = {name: categories[name]["speedup"].get(baseline) for name in (*low, *slow)}
    shown = [
        f"{name} {categories[name]['accepted_length']:.2f}"
        + (f" ({speedup:.2f}x)" if speedup else "")
        for name, speedup in speedups.items()
    ]
    if low:
        advice = ["add training prompts of these kinds"]
    else:
        advice = []
    if slow:
        advice.append(
            f"speculation slows {', '.join(slow)} down: switch it off there (`drafttrain diagnose --apply`)"
        )
    figures = f"accepted length by category: {', '.join(shown)}, against {overall['accepted_length']:.2f} overall"
    return finding("domain", figures, "; ".join(advice), slow)


def _cost(results: Json) -> Json | None:
    share = results["overall"]["draft_fraction"]
    figures = f"{share:.0%} of the time is spent in the drafter"
    advice = "draft fewer depths: `drafttrain tune`"
    if share >= EXPENSIVE:
        return finding("drafting takes long", figures, advice)
    return None


def _temperature(results: Json, others: Sequence[Json]) -> Json | None:
    heat = results["decoding"]["temperature"]
    same = [other for other in others if other["drafter"] == results["drafter"]]
    cooler = [other for other in same if other["decoding"]["temperature"] < heat]
    ours = results["overall"]["accepted_length"] - 1
    best = max(cooler, key=lambda other: other["overall"]["accepted_length"], default=None)
    if best is None or ours >= LESS * (best["overall"]["accepted_length"] - 1):
        return None
    runs = results.get("prompts"), best.get("prompts")
    if runs[0] and runs[1] and not accepted_below(runs[0], runs[1], LESS):
        return None
    if _tree(results).get("sampled"):
        draw = ""
    else:
        draw = "draw the drafts too (--tree chain:3@sample), or "
    return finding(
        "temperature",
        f"accepted tokens per round: {best['overall']['accepted_length'] - 1:.2f} at temperature "
        f"{best['decoding']['temperature']:g}, {ours:.2f} at {heat:g}",
        f"{draw}train on answers that were sampled at {heat:g}",
    )


def _cut(results: Json) -> Json | None:
    """Answers that --max-new-tokens cut off."""
    limit = results["decoding"].get("max_new_tokens")
    records = results.get("prompts", [])
    cut = 0
    if limit:
        cut = sum(record["sides"]["drafter"]["tokens"] >= limit for record in records)
    if not cut or cut < CUT * len(records):
        return None
    return finding(
        "answers cut off",
        f"{cut} of {len(records)} answers reached --max-new-tokens {limit}, so how their ends decode is not measured",
        f"measure with --max-new-tokens {4 * limit}, or compare only with runs of the same limit",
    )


def print_findings(findings: Sequence[Json]) -> None:
    """Prints two lines per finding: the figures and the advice."""
    console = plain_console(soft_wrap=True)
    for each in findings:
        console.print(
            Text(each["cause"], style="bold").append(
                f": {each['figures']}\n  -> {each['advice']}", "not bold"
            )
        )


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises UserError for a file that is not a results.json, or no drafter
    folder to write to.
    """
    runs = [load_results(name) for name in args.results]
    found = dict[str, object]()
    wrote = list[Path]()
    then = ""
    for name, results in zip(args.results, runs, strict=True):
        print(name)
        folder = args.drafter or results["drafter"]
        others = [other for other in runs if other is not results]
        print_findings(findings := diagnose(results, training_record(folder), others))
        found[name] = findings
        if args.apply:
            wrote.append(apply(folder, results))
            then = next_command("eval", target=results["target"], drafter=folder)
    conclude(found, wrote, then)
    return 0


def apply(drafter: str, results: Json) -> Path:
    """Writes slow categories into decoding.json, whose path it returns. Raises UserError for a
    missing folder.

    Unmeasured categories keep their entry.
    """
    place = decoding_file(drafter)
    if not place.parent.joinpath("config.json").is_file():
        message = f"drafter={drafter!r} is no drafter's folder, so there is no decoding.json; give --drafter FOLDER"
        raise UserError(message)
    output_file(place, "decoding", key="drafter")
    settings = decoding_settings(drafter) or {"tree": _tree(results).get("spec", "chain:3")}
    plain = {
        record["category"]
        for record in results.get("prompts", [])
        if record.get("speculation") is False
    }
    known = set(results["categories"]) - plain
    off = sorted({*slow_categories(results)} & known | set(settings.get("off", ())) - known)
    write_json(place, {**settings, "off": off})
    print(f"speculation off for {', '.join(off) or 'nothing'}")
    return place
