"""`drafttrain push`: publishes a drafter on the Hub, in the engines' formats, with measured results
and a model card.

config.json, model.safetensors     the drafter (a Hub id works wherever a drafter's folder does), where possible in a form that
                                   engines load too, with our own keys added; see
                                   drafters/KIND/export.py
speculators/, vllm/, draft.gguf    other engines' forms
decoding.json, training.json       the tuned tree; how it was trained
results/, plots/                   what drafttrain eval measured
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import TypedDict

from drafttrain.data.store import load_records, read_meta
from drafttrain.drafters.engine_trees import engine_chain, tuned_tree
from drafttrain.drafters.registry import decoding_settings
from drafttrain.drafters.shipping import ExportRequest, Trained, find_drafter, shipping
from drafttrain.errors import UserError
from drafttrain.evaluation.metrics import load_results, read_training
from drafttrain.evaluation.plausibility import implausible
from drafttrain.evaluation.verdicts import verdict_on
from drafttrain.export.serving_recipes import read_schedule, recipes
from drafttrain.export.verify_matrix import VerifyRow
from drafttrain.files import Json, read_json
from drafttrain.formats.engines import ENGINES
from drafttrain.formats.public_names import public_name, shorten, write_clean_json
from drafttrain.formats.weights import read_config
from drafttrain.hub.upload import publish, write_card
from drafttrain.outcome import next_command
from drafttrain.reports.report import draw, identity_line
from drafttrain.target import resolve_dtype, resolve_target

# Temperatures that readers of a card compare: greedy, and the target's own distribution.
_TEMPERATURES = (0.0, 1.0)


class _VerifyFile(TypedDict):
    rows: list[VerifyRow]


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    trained = find_drafter(args.drafter)
    results = [load_results(name) for name in args.results]
    if not results and not args.without_evaluation:
        raise UserError(
            "results: there is no evaluation to publish; run drafttrain eval --output results.json and pass --results "
            "results.json, or pass --without-evaluation"
        )
    args.batch_schedule = None
    if args.schedule:
        args.batch_schedule = read_schedule(trained, str(args.schedule), ENGINES)
    for name, run_results in zip(args.results, results, strict=True):
        check_results(trained, name, run_results)
    check_plausible(args, results)

    def fill(folder: Path) -> None:
        prepare(args, trained, results, folder)

    return publish(
        args,
        "push",
        "model",
        "Update the drafter, its results and its card",
        fill,
    )


def check_plausible(args: argparse.Namespace, results: Sequence[Json]) -> None:
    """Checks results and the drafter's settings, unless --accept-implausible is set.

    Raises:
        UserError: figures that cannot be right.
    """
    if args.accept_implausible:
        return
    sources = {}
    for name, content in zip(args.results, results, strict=True):
        sources[f"results={name!r}"] = content
    sources["decoding.json of the drafter"] = decoding_settings(args.drafter)
    for name, content in sources.items():
        reasons = implausible(content)
        if reasons:
            raise UserError(
                f"{name} is implausible: {reasons[0]}; or publish it as it is: --accept-implausible"
            )


def check_results(trained: Trained, name: str, results: Json) -> None:
    """Checks that an evaluation measured this drafter.

    Raises:
        UserError: it measured another kind of drafter, or another target.
    """
    kind = str(results.get("kind", "")).partition("+")[0]
    if kind not in (trained.kind, ""):
        raise UserError(
            f"results={name!r} measured a drafter of kind {kind!r}, this one is {trained.kind!r}; pass its own"
        )
    measured = str(results.get("target", ""))
    recorded = trained.target_name
    if recorded and public_name(measured) != public_name(recorded):
        raise UserError(
            f"results={name!r} are for target {measured!r}, this drafter is for {recorded!r}; pass its own"
        )


def prepare(
    args: argparse.Namespace,
    trained: Trained,
    results: Sequence[Json],
    folder: Path,
) -> None:
    """Writes all files of the repository into an empty folder.

    Raises:
        UserError: it cannot be written.
    """
    base_model = base_model_name(trained, args.base_model)
    kind = shipping(trained.kind)
    unmeasured = _unmeasured(results, base_model, args.repo)
    for temperature, command in unmeasured:
        print(f"note: no results at temperature {temperature:g}, and the card says so: {command}")

    # The drafter, in our form and in the engines'.
    tree = tuned_tree(trained.folder, results)
    depth = engine_chain(trained, results)
    request = ExportRequest(
        folder,
        resolve_dtype(args.dtype),
        base_model,
        depth,
        source=trained.target_name,
    )
    files = kind.publish(trained, request)  # names, and what each file is
    about_tree = "the tree to draft"
    if results:
        about_tree += ", as measured to be fastest"
    settings: Json = {"tree": str(tree)}
    chain = decoding_settings(str(trained.folder)).get("chain")
    if chain or results:  # for engines that draft chains
        settings["chain"] = f"chain:{depth}"
    write_clean_json(folder / "decoding.json", settings)
    files.append(("decoding.json", about_tree))
    training = read_training(trained.folder)  # none for a drafter from elsewhere
    if training:
        write_clean_json(folder / "training.json", _public_training(training))
        files.append(("training.json", "recipe, steps, time and held-out figures of the training"))

    # Measured results, and a plot of them.
    runs = []
    for number, run_results in enumerate(results, 1):
        public = {**run_results, "drafter": args.repo, "target": base_model}
        temperature = public["decoding"]["temperature"]
        name = f"results/{number}-{_slug(public.get('suite', 'suite'))}-t{temperature:g}.json"
        write_clean_json(folder / name, public)
        files.append((name, "all measured figures, prompt by prompt"))
        shown = {
            **shorten(public),
            "alone": _alone(run_results, results),
            "verdict": verdict_on(public).text,
        }
        runs.append((name, shown, identity_line(public).capitalize()))
    plots = []
    if runs:
        plots.append("plots/results.png")
        draw([shown for _, shown, _ in runs], folder / "plots" / "results.png")

    # The card.
    place = args.data or _recorded_data(training)
    data = read_meta(place) if place else training.get("data_set") or None
    weights = "an unrecorded number of"
    if training.get("parameters"):
        weights = f"{training['parameters']:,}"
    # A drafter repeats parts of its target, whose license it takes unless one is given.
    license = args.license or _target_license(trained)
    metadata = {
        "base_model": base_model if "/" in base_model else "",
        "license": license,
        "datasets": [args.dataset] if args.dataset else [],
        "library_name": "drafttrain",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "drafter", trained.kind.replace("_", "-"), "drafttrain"],
    }
    write_card(
        folder,
        "model_card.md.jinja",
        metadata,
        base_model=base_model,
        license=license,
        kind_line=kind.line(trained, weights),
        runs=runs,
        training=shorten(training),
        repo=args.repo,
        plots=plots,
        recipes=recipes(
            trained,
            args.repo,
            base_model,
            results=results,
            published=True,
            schedule=args.batch_schedule,
        ),
        files=files,
        data=data,
        sources=_prompt_sources(place),
        verified=_verified(args.verified, trained),
        measure=next_command("eval", target=base_model, drafter=args.repo),
        unmeasured=unmeasured,
        dataset=args.dataset,
    )


def _unmeasured(
    results: Sequence[Json],
    base_model: str,
    drafter: str,
) -> list[tuple[float, str]]:
    """Temperatures that lack results, each with the command that measures it; none without any results."""
    measured = [run["decoding"]["temperature"] for run in results]
    # A card without any evaluation says that itself.
    if not measured:
        return []
    missing = []
    for temperature in _TEMPERATURES:
        if temperature not in measured:
            command = next_command(
                "eval",
                target=base_model,
                drafter=drafter,
                temperature=f"{temperature:g}",
            )
            missing.append((temperature, command))
    return missing


def _recorded_data(training: Json) -> str:
    """The folder of the data that trained the drafter, if it is still there; else empty."""
    recorded = (training.get("config") or {}).get("data", "")
    if recorded and (Path(recorded).expanduser() / "meta.json").is_file():
        return recorded
    return ""


def _prompt_sources(place: str) -> list[tuple[str, int]]:
    """Where the prompts of a data set came from, and their number; names of local files stay here."""
    if not place:
        return []
    try:
        found = Counter(load_records(place, images=True)["source"])
    except UserError as error:
        print(f"no sources of prompts in the card: {error}")
        return []
    counts: Counter[str] = Counter()
    for name, count in found.items():
        if not name:
            counts["unnamed"] += count
        elif shorten(name) != name or Path(name).suffix in (".json", ".jsonl"):
            counts["a file of the publisher's"] += count
        else:
            counts[name] += count
    return counts.most_common(10)


def _verified(name: str | None, trained: Trained) -> list[VerifyRow]:
    """The engines that `drafttrain verify --output` ran this kind of drafter in.

    Raises:
        UserError: not a file of that command, or of another kind of drafter.
    """
    if not name:
        return []
    fix = "give the --output of drafttrain verify --drafter"
    content = read_json(Path(name).expanduser(), "verified", fix, _VerifyFile)
    kinds = {row["kind"] for row in content["rows"]}
    if kinds != {trained.kind}:
        raise UserError(
            f"verified={name!r} is of {', '.join(sorted(kinds)) or 'no drafter'}, this drafter is {trained.kind!r}; {fix}"
        )
    return [row for row in content["rows"] if row["prompts"]]


def _alone(run: Json, results: Sequence[Json]) -> float | None:
    """The accepted length of the trained drafter alone, where a run merged matches into its tree.

    None if no other result has it under the same settings.
    """
    kind, plus, _ = str(run.get("kind", "")).partition("+")
    if not plus:
        return None
    settings = ("temperature", "top_k", "top_p", "max_new_tokens")
    for other in results:
        if other.get("kind") != kind or other.get("suite") != run.get("suite"):
            continue
        if all(other["decoding"].get(key) == run["decoding"].get(key) for key in settings):
            length: float = other["overall"]["accepted_length"]
            return length
    return None


def base_model_name(trained: Trained, given: str) -> str:
    """The target's Hub id for links.

    Raises:
        UserError: the drafter records no target, or one by a local path only.
    """
    name = given or trained.target_name
    if not name:
        raise UserError("the drafter does not record its target; pass --base-model user/name")
    public = public_name(name)
    if given and "/" not in public:
        raise UserError(
            f"base-model={given!r} must be a Hub id (user/name), or a short name of drafttrain fetch"
        )
    return public


def _public_training(training: Json) -> Json:
    """training.json with names for paths."""
    config = dict(training.get("config") or {})
    if "target" in config:
        config["target"] = public_name(config["target"])
    if "init" in config:
        config["init"] = shorten(config["init"])
    for key in ("data", "output_dir"):
        if key in config:
            config[key] = Path(config[key]).name
    return {**training, "config": config}


def _target_license(trained: Trained) -> str:
    """The license that drafttrain fetch noted for the target, as the Hub spells it, or empty."""
    if not trained.target_name:
        return ""
    try:
        noted = read_config(Path(resolve_target(trained.target_name)), "fetched.json", missing={})
    except UserError:
        return ""
    name = noted.get("license") or noted.get("licence", "")
    return {"Apache-2.0": "apache-2.0", "MIT": "mit"}.get(name, "")


def _slug(text: str) -> str:
    """A file name's letters, digits, hyphens and underscores; others become hyphens."""
    name = re.sub(r"[^\w-]", "-", Path(str(text)).stem).strip("-")
    if name:
        return name
    return "suite"
