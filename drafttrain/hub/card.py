"""The model card: what was measured, how to serve the drafter, how it was trained. Text is in templates/, facts are in files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from jinja2 import Environment, StrictUndefined

from drafttrain.drafters.shipping import Trained, shipping
from drafttrain.environment import __version__
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.public_names import public_name, shorten
from drafttrain.reports.report import identity_line

_TRAINER_KEYS = (
    "per_device_train_batch_size",
    "learning_rate",
    "warmup_steps",
    "num_train_epochs",
    "max_steps",
    "seed",
)


def render(template: str, **values: object) -> str:
    """Fills in a template of this package. A value that the template needs and does not get is an error."""
    source = (Path(__file__).with_name("templates") / template).read_text(encoding="utf-8")
    # No HTML escapes: they would show in Markdown.
    environment = Environment(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)
    return environment.from_string(source).render(version=__version__, **values)


def front_matter(values: Json) -> str:
    """A card's metadata as YAML, without empty values."""
    kept = {key: value for key, value in values.items() if value}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True).strip()


def link(model: str) -> str:
    """A model's name, as a link if it is a Hub id."""
    return f"[{model}](https://huggingface.co/{model})" if "/" in model else model


def model_card(
    trained: Trained,
    base_model: str,
    license: str,
    results: Sequence[tuple[str, Json]],
    training: Json,
    **facts: object,
) -> str:
    """Renders the README.md of a published drafter.

    Args:
        base_model: the target's Hub id. license: as the Hub spells it, or empty. training: training.json, empty if none.
        results: file in the repository and content of each results.json.
        facts: repo; plots, files of pictures; recipes, one per engine; files, names with their purpose; data, meta.json of the
            training data or None; dataset, its Hub id or empty.
    """
    count = training.get("parameters")
    metadata = {
        "base_model": base_model if "/" in base_model else "",
        "license": license,
        "datasets": [facts["dataset"]] if facts["dataset"] else [],
        "library_name": "drafttrain",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "drafter", trained.kind.replace("_", "-"), "drafttrain"],
    }
    return render(
        "model_card.md.jinja",
        metadata=front_matter(metadata),
        base_model=base_model,
        base_link=link(base_model),
        license=license,
        kind_line=shipping(trained.kind).line(trained, f"{count:,}" if count else "an unrecorded number of"),
        runs=[(file, shorten(run), identity_line(run).capitalize()) for file, run in results],
        training=shorten(training),
        trainer_keys=_TRAINER_KEYS,
        **facts,
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
        raise UserError(f"base-model={given!r} must be a Hub id (user/name), or a short name of drafttrain fetch")
    return public
