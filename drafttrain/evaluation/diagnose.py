"""`drafttrain diagnose`: likely causes of low acceptance, from measured figures, with advice.

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
    accepted_below,
    load_results,
    summarize,
    training_record,
)
from drafttrain.evaluation.verdicts import (
    FEWEST,
    LOSES,
    PAYS,
    categories_of,
    category_states,
    fastest,
    verdict_of,
    verdict_on,
)
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
LEAST = 8  # prompts that a cause needs: single answers decide the figures of fewer


def finding(cause: str, figures: str, advice: str, off: Sequence[str] = ()) -> Json:
    """A likely cause, as in results.json.

    Args:
        figures: the evidence. advice: what to do. off: categories to switch off.
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
        others: results, compared where they are the same drafter's at a lower temperature.

    Returns:
        The arguments of `finding`, by name; the first finding is the verdict. Fewer than LEAST
        prompts show no cause.
    """
    overall = results["overall"]
    if not overall["acceptance_by_depth"]["joint"]:
        return [finding("verdict", "no round offered a token", verdict_of(overall).advice)]
    training = training or {}
    kwargs = results["decoding"].get("chat_template_kwargs") or {}
    settings = other_template_kwargs(kwargs, training)
    if overall["prompts"] < LEAST:
        return [each for each in (_too_few(overall), settings) if each is not None]
    found = [
        _verdict(results),
        settings,
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


def _too_few(overall: Json) -> Json:
    """The figures of a few prompts, from which nothing follows."""
    figures = f"accepted length {overall['accepted_length']:.2f}"
    found = verdict_of(overall)
    if found.figures:
        figures += f"; {found.figures}"
    prompts = overall["prompts"]
    counted = "1 prompt is" if prompts == 1 else f"{prompts} prompts are"
    advice = f"{counted} too few to say whether it pays and why: measure at least {LEAST}"
    return finding("verdict", figures, advice)


def _verdict(results: Json) -> Json:
    overall = results["overall"]
    rate = overall["acceptance_rate"]
    found = verdict_on(results)
    rule = "between 40 and 80 %: the length is about right"
    if rate < USELESS:
        rule = "below 30 % speculation is called useless"
    elif rate < SHORTEN:
        rule = "below 40 %: draft fewer tokens"
    elif rate > LENGTHEN:
        rule = "above 80 %: draft more tokens"
    figures = (
        f"acceptance rate {rate:.0%}, accepted length {overall['accepted_length']:.2f} "
        f"(rule of thumb: {rule})"
    )
    if found.figures:
        figures += f"; {found.figures}"
    advice = found.advice
    if found.state == LOSES:
        advice += "; see the causes, run `drafttrain tune`, or switch it off"
    elif found.state == PAYS and rate < USELESS:
        advice += " although the rule of thumb says otherwise: verification is cheap here"
    return finding("verdict", figures, advice)


def other_template_kwargs(given: Json, training: Json) -> Json | None:
    """A finding where chat_template_kwargs differ from those of the drafter's training data."""
    learned = training.get("data_set", {}).get("chat_template_kwargs")
    if learned is None or learned == given:
        return None
    return finding(
        "other chat_template_kwargs",
        f"the drafter learned from answers with {json.dumps(learned)}, "
        f"and is measured with {json.dumps(given)}",
        f"add --chat-template-kwargs '{json.dumps(learned)}', "
        "or generate data as the target is used",
    )


def _mismatch(results: Json, training: Json) -> Json | None:
    """Train/serve mismatch: acceptance far below that on held-out training data."""
    trained = training.get("held_out", {}).get("eval_agree@1")
    joint = results["overall"]["acceptance_by_depth"]["joint"]
    if not trained or not joint or joint[0] >= MISMATCH * trained:
        return None
    figures = (
        f"first drafted token: {trained:.2f} right on held-out training data, "
        f"{joint[0]:.2f} accepted here"
    )

    several = 0  # categories that have enough prompts
    good = []  # those that accept as on training data
    for name, part in results["categories"].items():
        if part["prompts"] >= LEAST:
            several += 1
            first = part["acceptance_by_depth"]["joint"][:1]
            if first and first[0] >= MISMATCH * trained:
                good.append(name)
    if good:
        figures += f"; as trained in {', '.join(good)}"
        return finding("domain", figures, "train on prompts like the others")

    name = training.get("config", {}).get("target")
    if name and name != results["target"]:
        figures += f"; trained for {name!r}, used with {results['target']!r}"
    if several > 1:
        figures += "; low in every category"
    advice = (
        "compare the chat template, the system prompt and the target's weights "
        "with those of the training data (`drafttrain generate` uses the template that eval uses)"
    )
    return finding("tokenizer or template mismatch", figures, advice)


def _vocabulary(results: Json) -> Json | None:
    """A pruned vocabulary that lacks tokens of the answers."""
    tokens = 0
    known = 0.0
    for record in results.get("prompts", []):
        if "covered" in record:
            count = record["sides"]["drafter"]["tokens"]
            tokens += count
            known += record["covered"] * count
    if not tokens or known / tokens >= COVERAGE:
        return None
    covered = known / tokens
    lost = 1.0
    conditional = results["overall"]["acceptance_by_depth"]["conditional"]
    if conditional:
        lost -= conditional[0]
    figures = (
        f"the drafter's vocabulary holds {covered:.1%} of the answers' tokens; "
        f"{1 - covered:.1%} can never be accepted, "
        f"of {lost:.1%} that are rejected at the first depth"
    )
    advice = "raise draft_vocab_size, or count the kept tokens on data like these prompts"
    if "vocabulary" in results:
        advice = "set vocabulary_match: text, which drafts in the draft model's own tokens"
    return finding("vocabulary coverage", figures, advice)


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
    """Long prompts after which less is accepted."""
    records = sorted(results.get("prompts", []), key=lambda record: record["prompt_tokens"])
    third = len(records) // 3
    if third < FEWEST:
        return None
    short = records[:third]
    long = records[-third:]
    short_tokens = sum(record["prompt_tokens"] for record in short) / third
    long_tokens = sum(record["prompt_tokens"] for record in long) / third
    if long_tokens < 2 * short_tokens or not accepted_below(long, short, LESS):
        return None
    figures = (
        f"accepted tokens per round: {summarize(short)['accepted_length'] - 1:.2f} "
        f"after {short_tokens:.0f} prompt tokens, "
        f"{summarize(long)['accepted_length'] - 1:.2f} after {long_tokens:.0f}"
    )
    limit = training.get("config", {}).get("max_length")
    if limit and limit < long_tokens:
        figures += f"; trained on at most {limit} tokens"
    advice = (
        "train on longer rows (max_length), or check with `drafttrain sweep --contexts`: "
        "categories differ in length too"
    )
    return finding("long context", figures, advice)


def slow_categories(results: Json) -> tuple[str, ...]:
    """Categories that speculation slows down beyond noise, against the faster plain baseline."""
    states = category_states(results)
    return tuple(name for name, state in states.items() if state == LOSES)


def _categories(results: Json) -> Json | None:
    """Categories that accept less than the others, or that speculation slows down."""
    parts = categories_of(results)
    low = []
    for name, part in parts.items():
        rest = [record for record in results["prompts"] if record["category"] != name]
        if len(rest) >= FEWEST and accepted_below(part, rest, LESS, len(parts)):
            low.append(name)
    slow = slow_categories(results)
    if not low and not slow:
        return None

    overall = results["overall"]
    baseline = fastest(overall)
    shown = []
    for name in dict.fromkeys((*low, *slow)):
        figures = results["categories"][name]
        text = f"{name} {figures['accepted_length']:.2f}"
        speedup = figures["speedup"].get(baseline)
        if speedup:
            text += f" ({speedup:.2f}x)"
        shown.append(text)
    advice = []
    if low:
        advice.append("add training prompts of these kinds")
    if slow:
        advice.append(
            f"speculation slows {', '.join(slow)} down: "
            "switch it off there (`drafttrain diagnose --apply`)"
        )
    evidence = (
        f"accepted length by category: {', '.join(shown)}, "
        f"against {overall['accepted_length']:.2f} overall"
    )
    return finding("domain", evidence, "; ".join(advice), slow)


def _cost(results: Json) -> Json | None:
    share = results["overall"]["draft_fraction"]
    if share < EXPENSIVE:
        return None
    figures = f"{share:.0%} of the time is spent in the drafter"
    return finding("drafting takes long", figures, "draft fewer depths: `drafttrain tune`")


def _temperature(results: Json, others: Sequence[Json]) -> Json | None:
    """Acceptance that is lower than at a lower temperature."""
    heat = results["decoding"]["temperature"]
    cooler = []
    for other in others:
        # Prompts of another suite accept less or more at any temperature.
        same = all(other[key] == results[key] for key in ("drafter", "target", "suite"))
        if same and other["decoding"]["temperature"] < heat:
            cooler.append(other)
    if not cooler:
        return None
    best = max(cooler, key=lambda other: other["overall"]["accepted_length"])
    ours = results["overall"]["accepted_length"] - 1
    theirs = best["overall"]["accepted_length"] - 1
    if ours >= LESS * theirs:
        return None
    our_prompts = results.get("prompts")
    their_prompts = best.get("prompts")
    if our_prompts and their_prompts and not accepted_below(our_prompts, their_prompts, LESS):
        return None

    figures = (
        f"accepted tokens per round: {theirs:.2f} at temperature "
        f"{best['decoding']['temperature']:g}, {ours:.2f} at {heat:g}"
    )
    advice = f"train on answers that were sampled at {heat:g}"
    if not _tree(results).get("sampled"):
        advice = f"draw the drafts too (--tree chain:3@sample), or {advice}"
    return finding("temperature", figures, advice)


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
        text = Text(each["cause"], style="bold")
        text.append(f": {each['figures']}\n  -> {each['advice']}", "not bold")
        console.print(text)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        UserError: a file that is not a results.json, or no drafter folder to write to.
    """
    runs = [load_results(name) for name in args.results]
    found: dict[str, object] = {}
    wrote = []
    then = ""
    for name, results in zip(args.results, runs, strict=True):
        print(name)
        folder = results["drafter"]
        if args.drafter:
            folder = args.drafter
        findings = diagnose(results, training_record(folder), runs)
        print_findings(findings)
        found[name] = findings
        if args.apply:
            wrote.append(apply(folder, results))
            then = next_command("eval", target=results["target"], drafter=folder)
    conclude(found, wrote, then)
    return 0


def apply(drafter: str, results: Json) -> Path:
    """Writes slow categories into decoding.json, whose path it returns.

    Unmeasured categories keep their entry.

    Raises:
        UserError: a missing folder.
    """
    place = decoding_file(drafter)
    if not place.parent.joinpath("config.json").is_file():
        raise UserError(
            f"drafter={drafter!r} is not a drafter's folder, so there is no decoding.json; "
            "give --drafter FOLDER"
        )
    output_file(place, "decoding", key="drafter")
    settings = decoding_settings(drafter)
    if not settings:
        settings = {"tree": _tree(results).get("spec", "chain:3")}

    # Categories that were decoded plainly say nothing about speculation.
    measured = set(results["categories"])
    for record in results.get("prompts", []):
        if record.get("speculation") is False:
            measured.discard(record["category"])
    slow = set(slow_categories(results)) & measured
    kept = set(settings.get("off", ())) - measured
    off = sorted(slow | kept)
    write_json(place, {**settings, "off": off})
    print(f"speculation off for {', '.join(off) or 'nothing'}")
    return place
