"""The model card: what was measured, how to serve, how it was made. Text is in templates/, facts come from files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from drafttrain.drafters.shipping import shipping
from drafttrain.drafters.trained import Trained
from drafttrain.environment import __version__
from drafttrain.errors import UserError
from drafttrain.export.serving_recipes import Recipe, public_name
from drafttrain.hub.upload import shorten
from drafttrain.reports.report import identity_line

_TRAINER_KEYS = (
    "per_device_train_batch_size",
    "learning_rate",
    "warmup_steps",
    "num_train_epochs",
    "max_steps",
    "seed",
)


def render(template: str, **values: Any) -> str:
    """A template of this package, filled in; a value that it needs and does not get is an error."""
    source = (Path(__file__).with_name("templates") / template).read_text(encoding="utf-8")
    # Values go into Markdown, where HTML escapes would show.
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=False, autoescape=False, keep_trailing_newline=True
    )
    return environment.from_string(source).render(version=__version__, **values)


def front_matter(values: dict[str, Any]) -> str:
    kept = {key: value for key, value in values.items() if value}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True).strip()


def link(model: str) -> str:
    """A model's name, as a link if it is a Hub id."""
    return f"[{model}](https://huggingface.co/{model})" if "/" in model else model


def model_card(
    trained: Trained,
    repo: str,
    base_model: str,
    licence: str,
    results: Sequence[tuple[str, dict[str, Any]]],
    plots: Sequence[str],
    recipes: Sequence[Recipe],
    files: Sequence[tuple[str, str]],
    data: dict[str, Any] | None,
    dataset: str,
) -> str:
    """The README.md of a published drafter.

    Args:
        results: file in the repository and content of each results.json. plots: files of pictures.
        files: names with their purpose. data: meta.json of the training data, if known. dataset: its Hub id, if published.
    """
    training = read_training(trained.folder)
    count = training.get("parameters")
    metadata = {
        "base_model": base_model if "/" in base_model else "",
        "license": licence,
        "datasets": [dataset] if dataset else [],
        "library_name": "drafttrain",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "drafter", trained.kind.replace("_", "-"), "drafttrain"],
    }
    return render(
        "model_card.md.jinja",
        metadata=front_matter(metadata),
        repo=repo,
        base_model=base_model,
        base_link=link(base_model),
        licence=licence,
        kind_line=shipping(trained.kind).line(trained, f"{count:,}" if count else "an unrecorded number of"),
        runs=[_run(file, run, repo) for file, run in results],
        plots=plots,
        recipes=recipes,
        files=files,
        training=_training_lines(training, data, dataset),
        max_length=(training.get("config") or {}).get("max_length"),
    )


def read_training(folder: Path) -> dict[str, Any]:
    """What drafttrain train recorded beside the weights; empty for a drafter from elsewhere.

    Raises:
        UserError: a training.json that is no JSON.
    """
    path = folder / "training.json"
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path.name} beside the drafter is not JSON ({error}); mend or remove it") from error


def _run(file: str, results: dict[str, Any], repo: str) -> dict[str, Any]:
    """A results.json as the template shows it."""
    decoding, versions = results["decoding"], results.get("versions") or {}
    names = list(results["overall"].get("speedup") or {})
    groups = {**results["categories"], "**all**": results["overall"]}
    return {
        "file": file,
        "suite": shorten(results.get("suite", "")),
        "temperature": decoding["temperature"],
        "table": "\n".join(_table(groups, names)),
        "device": results.get("device", "unknown device"),
        "threads": results.get("threads", "?"),
        "dtype": results.get("dtype", "?"),
        "compute_dtype": results.get("compute_dtype", results.get("dtype", "?")),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "drafter": results.get("kind", repo),
        "tree": decoding.get("tree", {}).get("spec", "none"),
        "max_new_tokens": decoding.get("max_new_tokens", "?"),
        "batch_size": decoding.get("batch_size", 1),
        "identity": identity_line(results).capitalize(),
    }


def _table(groups: dict[str, dict[str, Any]], baselines: Sequence[str]) -> list[str]:
    """Markdown lines: a row for each group of figures."""
    head = [
        "category",
        "prompts",
        "accepted length",
        "acceptance by depth",
        "tokens/s",
        *(f"vs {n}" for n in baselines),
    ]
    lines = [head, ["---"] * len(head)]
    for name, figures in groups.items():
        speedup = figures.get("speedup") or {}
        depths = " ".join(f"{share:.2f}" for share in figures["acceptance_by_depth"]["conditional"])
        row = [name, str(figures["prompts"]), f"{figures['accepted_length']:.2f}", depths or "-"]
        row.append(f"{figures['tokens_per_second']:.1f}")
        lines.append(row + [f"{speedup[each]:.2f}x" if each in speedup else "-" for each in baselines])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _training_lines(training: dict[str, Any], data: dict[str, Any] | None, dataset: str) -> list[str]:
    lines = []
    if data is not None:
        counts, sampling = data.get("counts") or {}, data.get("sampling") or {}
        named = f"[{dataset}](https://huggingface.co/datasets/{dataset}), " if dataset else ""
        lines.append(
            f"data: {named}{counts.get('conversations', '?')} conversations with {counts.get('response_tokens', '?')} tokens "
            f"that the target wrote itself (temperature {sampling.get('temperature', '?')}, "
            f"at most {sampling.get('max_new_tokens', '?')} a response, {counts.get('truncated', '?')} cut off there)"
        )
    config = training.get("config")
    if config:
        trainer = config.get("trainer") or {}
        options = ", ".join(f"{key} {value}" for key, value in (config.get("drafter") or {}).items())
        lines.append(
            f"recipe: kind {config['kind']}, loss {config['loss']}, init {shorten(config['init'])}; {options or 'defaults'}"
        )
        chosen = ", ".join(f"{key} {trainer[key]}" for key in _TRAINER_KEYS if key in trainer)
        lines.append(f"trainer: {chosen or 'defaults'}; conversations up to {config.get('max_length')} tokens")
    if "steps" in training:
        lines.append(
            f"run: {training['steps']} steps in {training.get('seconds', 0) / 60:.1f} minutes on "
            f"{training.get('device', '?')}, {training.get('processes', 1)} process(es)"
        )
    held_out = training.get("held_out") or {}
    if "eval_accepted_length" in held_out:
        lines.append(f"held-out conversations: simulated accepted length {held_out['eval_accepted_length']:.2f}")
    return lines


def default_licence(target_folder: Path) -> str:
    """The licence that drafttrain fetch noted for the target, as the Hub spells it; empty if none is known."""
    try:
        noted = json.loads((target_folder / "fetched.json").read_text())
    except (OSError, ValueError):
        return ""
    name = noted.get("license") or noted.get("licence")  # the second spelling is that of drafttrain 0.1
    return {"Apache-2.0": "apache-2.0", "MIT": "mit"}.get(name, "")


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
        raise UserError(f"base-model={given!r} must be a Hub id (user/name), or a short name of drafttrain fetch")
    return public
