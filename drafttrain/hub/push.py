"""`drafttrain push`: a drafter on the Hub, in the engines' formats, with its measured results and a model card.

config.json, model.safetensors     the drafter (a Hub id works wherever a drafter's folder does), where possible in a form that
                                   engines load too, with our own keys beside theirs; see hub/kinds
speculators/, vllm/, draft.gguf    other engines' forms
decoding.json, training.json       the tuned tree; how it was trained
results/, plots/                   what drafttrain eval measured
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafttrain.drafters.shipping import Request, shipping
from drafttrain.drafters.trained import Trained, find_drafter, parse_dtype
from drafttrain.errors import UserError
from drafttrain.evaluation.records import load_results
from drafttrain.export.serving_recipes import engine_depth, public_name, recipes, tuned_tree
from drafttrain.hub.card import base_model_name, default_licence, model_card, read_training
from drafttrain.hub.upload import check_private, check_repo, list_files, print_files, shorten, upload, write_clean_json
from drafttrain.reports.report import draw
from drafttrain.target import resolve_target

HELP = """Publish a drafter on the Hugging Face Hub with a model card made from measured results.

  drafttrain push --drafter runs/drafter --repo user/name --results runs/results.json --dry-run --output runs/publish
  hf auth login
  drafttrain push --drafter runs/drafter --repo user/name --results runs/results.json

--dry-run writes the folder and prints what would go up. Pushing again updates the files and tags the new revision (v1, v2, ...);
nothing is ever deleted. An interrupted upload goes on when run again. Only safetensors, JSON, pictures and GGUF are published;
local paths and tokens are kept out. Afterwards: drafttrain eval --drafter user/name"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--drafter", required=True, help="a trained drafter's folder")
    add("--repo", required=True, help="user/name or organisation/name")
    add("--results", nargs="+", default=[], help="files that drafttrain eval wrote for this drafter")
    add("--without-evaluation", action="store_true", help="publish although nothing was measured; the card says so")
    add("--private", action="store_true", help="make the repository private, if it is made now")
    add("--dry-run", action="store_true", help="write the folder, print what would go up, and stop")
    add("--output", help="folder to prepare it in (default: a temporary one; needed with --dry-run)")
    add("--base-model", default="", help="the target's Hub id (default: the recorded name)")
    add("--licence", default="", help="of the drafter, as the Hub spells it, such as apache-2.0 (default: the target's, where "
        "drafttrain fetch noted it)")  # fmt: skip
    add(
        "--data",
        default="",
        help="the training data's folder, for the card (default: as recorded, if it is still there)",
    )
    add("--dataset", default="", help="Hub id of the training data, if published (drafttrain push-data)")
    add("--dtype", default="bfloat16", help="of the weights: bfloat16 (default), float16, float32")
    add("--tag", default="", help="of the new revision (default: the next of v1, v2, ...)")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    Raises:
        UserError: no evaluation, one of another drafter, something private in the files, or a failed upload.
    """
    check_repo(args.repo)
    trained = find_drafter(args.drafter)
    results = [load_results(name) for name in args.results]
    if not results and not args.without_evaluation:
        raise UserError(
            "results: there is no evaluation to publish; run drafttrain eval --output results.json and pass --results "
            "results.json, or say --without-evaluation"
        )
    for name, run_results in zip(args.results, results, strict=True):
        check_results(trained, name, run_results)
    if args.dry_run and not args.output:
        raise UserError("dry-run leaves the prepared folder for you to look at; say where: --output DIR")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.output).expanduser() if args.output else Path(scratch) / "repository"
        prepare(args, trained, results, folder)
        print_files(folder, args.repo, "model")
        if args.dry_run:
            print("dry run: nothing was uploaded")
            return 0
        message = "Update the drafter, its results and its card"
        print(upload(folder, args.repo, "model", args.private, message, args.tag))
    return 0


def check_results(trained: Trained, name: str, results: dict[str, Any]) -> None:
    """Raises UserError for an evaluation of another kind of drafter or of another target."""
    kind = str(results.get("kind", "")).partition("+")[0]
    if kind not in (trained.kind, ""):
        raise UserError(
            f"results={name!r} measured a drafter of kind {kind!r}, this one is {trained.kind!r}; pass its own"
        )
    measured, recorded = str(results.get("target", "")), trained.target_name
    if recorded and public_name(measured) != public_name(recorded):
        raise UserError(f"results={name!r} are for target {measured!r}, this drafter is for {recorded!r}; pass its own")


def prepare(args: argparse.Namespace, trained: Trained, results: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes everything that goes up.

    Raises:
        UserError: the folder holds other things or cannot be written, or something private would go up.
    """
    _make_empty(folder)
    base_model = base_model_name(trained, args.base_model)
    tree = tuned_tree(trained.folder, results)
    request = Request(folder, parse_dtype(args.dtype), base_model, engine_depth(trained, tree))
    files = shipping(trained.kind).publish(trained, request)
    write_clean_json(folder / "decoding.json", {"tree": str(tree)})
    files.append(("decoding.json", "the tree to draft, as measured to be fastest" if results else "the tree to draft"))
    training = read_training(trained.folder)
    if training:
        write_clean_json(folder / "training.json", _public_training(training))
        files.append(("training.json", "recipe, steps, time and held-out figures of the training"))
    named = []
    for number, run in enumerate(results, 1):
        name = f"results/{number}-{_slug(run.get('suite', 'suite'))}-t{run['decoding']['temperature']:g}.json"
        write_clean_json(folder / name, {**run, "drafter": args.repo, "target": base_model})
        named.append((name, run))
        files.append((name, "all measured figures, prompt by prompt"))
    plots = []
    if results:
        public = [{**run, "drafter": args.repo, "target": base_model} for run in results]
        draw(public, folder / "plots" / "results.png")
        plots.append("plots/results.png")
    data = _data_meta(args.data, training)
    served = recipes(trained, args.repo, base_model, results=results, published=True)
    licence = args.licence or _target_licence(trained)
    card = model_card(trained, args.repo, base_model, licence, named, plots, served, files, data, args.dataset)
    (folder / "README.md").write_text(card, encoding="utf-8")
    check_private(folder, list_files(folder))


def _make_empty(folder: Path) -> None:
    """A folder of an earlier run is written anew; one that holds other things is left alone."""
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / "README.md").is_file() or not (folder / "decoding.json").is_file():
            raise UserError(f"output={str(folder)!r} holds other files; choose an empty folder")
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output={str(folder)!r} cannot be made ({error.strerror}); choose another place") from error


def _public_training(training: dict[str, Any]) -> dict[str, Any]:
    """training.json with names for paths."""
    config = dict(training.get("config") or {})
    for key in ("data", "output_dir"):
        if key in config:
            config[key] = Path(config[key]).name
    for key in ("target", "init"):
        if key in config:
            config[key] = public_name(config[key]) if key == "target" else shorten(config[key])
    return {**training, "config": config}


def _data_meta(given: str, training: dict[str, Any]) -> dict[str, Any] | None:
    from drafttrain.data.store import read_meta

    if given:
        return read_meta(given)
    recorded = (training.get("config") or {}).get("data", "")
    return read_meta(recorded) if recorded and (Path(recorded).expanduser() / "meta.json").is_file() else None


def _target_licence(trained: Trained) -> str:
    try:
        return default_licence(Path(resolve_target(trained.target_name))) if trained.target_name else ""
    except UserError:
        return ""


def _slug(text: str) -> str:
    name = Path(str(text)).stem
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name).strip("-") or "suite"
