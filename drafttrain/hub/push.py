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
from collections.abc import Callable, Sequence
from pathlib import Path

from drafttrain.data.store import read_meta
from drafttrain.drafters.registry import decoding_settings
from drafttrain.drafters.shipping import ExportRequest, Trained, find_drafter, shipping
from drafttrain.errors import UserError
from drafttrain.evaluation.metrics import load_results, read_training
from drafttrain.evaluation.plausibility import implausible
from drafttrain.evaluation.verdicts import verdict_of
from drafttrain.export.batch_schedule import batch_schedule
from drafttrain.export.serving_recipes import engine_depth, recipes, tuned_tree
from drafttrain.files import Json
from drafttrain.formats.public_names import public_name, shorten, write_clean_json
from drafttrain.formats.weights import read_config
from drafttrain.hub.upload import publish, write_card
from drafttrain.reports.report import draw, identity_line
from drafttrain.target import resolve_dtype, resolve_target


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    trained = find_drafter(args.drafter)
    results = [load_results(name) for name in args.results]
    if not results and not args.without_evaluation:
        raise UserError(
            "results: there is no evaluation to publish; run drafttrain eval --output results.json and pass --results "
            "results.json, or pass --without-evaluation"
        )
    if args.schedule:
        args.batch_schedule = batch_schedule(Path(args.schedule).expanduser())
    else:
        args.batch_schedule = None
    for name, run_results in zip(args.results, results, strict=True):
        check_results(trained, name, run_results)
    check_plausible(args, results)
    message = "Update the drafter, its results and its card"
    return publish(
        args,
        "push",
        "model",
        message,
        lambda folder: prepare(args, trained, results, folder),
    )


def check_plausible(args: argparse.Namespace, results: Sequence[Json]) -> None:
    """Raises UserError for figures that cannot be right, unless --accept-implausible is set."""
    sources = {
        f"results={name!r}": content for name, content in zip(args.results, results, strict=True)
    }
    sources["decoding.json of the drafter"] = decoding_settings(args.drafter)
    for name, content in sources.items():
        if not args.accept_implausible and (reasons := implausible(content)):
            raise UserError(
                f"{name} is implausible: {reasons[0]}; or publish it as it is: --accept-implausible"
            )


def check_results(trained: Trained, name: str, results: Json) -> None:
    """Raises UserError for an evaluation of another kind of drafter or of another target."""
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
    """Writes all files of the repository into an empty folder. Raises UserError: it cannot be
    written.
    """
    base_model = base_model_name(trained, args.base_model)
    kind = shipping(trained.kind)
    tree = tuned_tree(trained.folder, results)
    depth = engine_depth(trained, tree)
    request = ExportRequest(
        folder,
        resolve_dtype(args.dtype),
        base_model,
        depth,
        source=trained.target_name,
    )
    files = kind.publish(trained, request)
    write_clean_json(folder / "decoding.json", {"tree": str(tree)})
    files.append(
        (
            "decoding.json",
            "the tree to draft, as measured to be fastest" if results else "the tree to draft",
        )
    )
    training = read_training(trained.folder)  # none for a drafter from elsewhere
    if training:
        write_clean_json(folder / "training.json", _public_training(training))
        files.append(("training.json", "recipe, steps, time and held-out figures of the training"))
    runs = []
    for number, run_results in enumerate(results, 1):
        public = {**run_results, "drafter": args.repo, "target": base_model}
        suite = _slug(public.get("suite", "suite"))
        temperature = public["decoding"]["temperature"]
        name = f"results/{number}-{suite}-t{temperature:g}.json"
        write_clean_json(folder / name, public)
        more = {
            "alone": _alone(run_results, results),
            "verdict": verdict_of(public["overall"]).text,
        }
        runs.append((name, {**shorten(public), **more}, identity_line(public).capitalize()))
        files.append((name, "all measured figures, prompt by prompt"))
    if runs:
        draw([public for _, public, _ in runs], folder / "plots" / "results.png")
    count = training.get("parameters")
    recorded = (training.get("config") or {}).get("data", "")
    has_data = recorded and (Path(recorded).expanduser() / "meta.json").is_file()
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
        kind_line=kind.line(trained, f"{count:,}" if count else "an unrecorded number of"),
        runs=runs,
        training=shorten(training),
        repo=args.repo,
        plots=["plots/results.png"] if runs else [],
        recipes=recipes(
            trained,
            args.repo,
            base_model,
            results=results,
            published=True,
            schedule=args.batch_schedule,
        ),
        files=files,
        data=read_meta(args.data or recorded)
        if args.data or has_data
        else training.get("data_set") or None,
        dataset=args.dataset,
    )


def _alone(run: Json, results: Sequence[Json]) -> float | None:
    """The accepted length of the trained drafter alone where a run merged matches into its tree;
    None if not measured.
    """
    kind, plus, _ = str(run.get("kind", "")).partition("+")

    def same(other: Json) -> bool:
        settings = ("temperature", "top_k", "top_p", "max_new_tokens")
        return (
            other.get("kind") == kind
            and other.get("suite") == run.get("suite")
            and all(other["decoding"].get(key) == run["decoding"].get(key) for key in settings)
        )

    return next(
        (other["overall"]["accepted_length"] for other in results if plus and same(other)), None
    )


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
    public: dict[str, Callable[[str], str]] = {"target": public_name, "init": shorten}
    public |= dict.fromkeys(("data", "output_dir"), lambda path: Path(path).name)
    return {
        **training,
        "config": config
        | {key: change(config[key]) for key, change in public.items() if key in config},
    }


def _target_license(trained: Trained) -> str:
    """The license that drafttrain fetch noted for the target, as the Hub spells it; empty if none
    is known.
    """
    if not trained.target_name:
        return ""
    try:
        noted = read_config(Path(resolve_target(trained.target_name)), "fetched.json", missing={})
    except UserError:
        return ""
    return {"Apache-2.0": "apache-2.0", "MIT": "mit"}.get(
        noted.get("license") or noted.get("licence", ""), ""
    )


def _slug(text: str) -> str:
    name = Path(str(text)).stem
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name).strip("-") or "suite"
