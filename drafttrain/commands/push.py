"""`drafttrain push`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from drafttrain.command import Alias, Several, Shown, command, result_of
from drafttrain.values import File, FileDtype, Name, Place

if TYPE_CHECKING:
    Files = str | Path | Sequence[str | Path]
else:
    Files = Annotated[Sequence[File | Path], Several()]


@dataclass(frozen=True)
class PushResult:
    """A published drafter. url: of the tagged revision, empty in a dry run. files: names in the
    repository.
    """

    repo: str
    url: str
    files: tuple[str, ...] = field(repr=False)


@command
def push(
    drafter: Place | Path,
    repo: Place,
    *,
    results: Files = (),
    without_evaluation: bool = False,
    accept_implausible: bool = False,
    license: Annotated[str, Alias("--licence")] = "",
    base_model: Name | Path = "",
    data: Name | Path = "",
    dataset: Name = "",
    verified: File | Path | None = None,
    schedule: File | Path | None = None,
    dtype: FileDtype = "bfloat16",
    private: bool = False,
    dry_run: bool = False,
    output: Place | Path | None = None,
    tag: str = "",
    progress: Shown = False,
) -> PushResult:
    """Publish a drafter on the Hugging Face Hub with a model card made from measured results.

    ```
    drafttrain push --drafter runs/drafter --repo user/name --results runs/results.json --dry-run --output runs/publish
    hf auth login
    drafttrain push --drafter runs/drafter --repo user/name --results runs/results.json
    ```

    --dry-run writes the folder and prints what would be uploaded. A second push updates the files
    and tags the new revision (v1, v2, ...); nothing is ever deleted. An interrupted upload
    continues when the command is run again. Only safetensors, JSON, pictures and GGUF are
    published; local paths and tokens are kept out. Afterwards: drafttrain eval --drafter user/name

    Args:
        drafter: a trained drafter's folder
        repo: user/name or organization/name
        results: files that drafttrain eval wrote for this drafter
        without_evaluation: publish although nothing was measured; the card says so
        accept_implausible: publish figures that cannot be right, such as a baseline that varies
            more than 3x between prompts (drafttrain report names them)
        license: license of the drafter, as the Hub spells it, such as apache-2.0 (default: the
            target's, where drafttrain fetch noted it)
        base_model: the target's Hub id (default: the recorded name)
        data: training data's folder, for the card (default: the recorded one)
        dataset: Hub id of the training data, if published (drafttrain push-data)
        verified: what drafttrain verify --output wrote for this drafter: the card then shows the
            engines' own accepted lengths
        schedule: a sweep's summary.json or an estimate's output: recipes of vLLM and SGLang then
            draft by batch size
        dtype: type of the weights
        private: make the repository private, if it is created now
        dry_run: write the folder, print what would be uploaded, and stop
        output: folder to prepare it in (default: a temporary one; needed with --dry-run)
        tag: tag of the new revision (default: the next of v1, v2, ...)
        progress: print what the command prints; the logger `drafttrain` gets it otherwise
    """
    found = result_of("hub.push", locals())
    return PushResult(repo, found.get("url", ""), tuple(found["files"]))
