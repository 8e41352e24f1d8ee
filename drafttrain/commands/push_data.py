"""`drafttrain push-data`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from drafttrain.command import Alias, command, result_of
from drafttrain.values import Place

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def push_data(
    *,
    data: Place | Path,
    prompt_license: Annotated[str, Alias("--prompt-licence")],
    repo: Place | Path,
    license: Annotated[str, Alias("--licence")] = "",
    private: bool = False,
    dry_run: bool = False,
    output: Place | Path | None = None,
    tag: str = "",
) -> Json:
    """Publish a distillation data set on the Hugging Face Hub with a data card.

    ```
    drafttrain push-data --data runs/data --repo user/name-data --prompt-license "MIT (magpie, written by the target)" \\
        --dry-run --output runs/publish-data
    ```

    The conversations are uploaded as JSON lines that drafttrain and datasets read; stored target
    states are not, they can be computed again. --dry-run writes the folder and prints what would be
    uploaded.

    Args:
        data: folder written by drafttrain generate
        prompt_license: license of the prompts (their source's), in words
        repo: user/name or organization/name
        license: license of the data set, as the Hub spells it (default: none stated)
        private: make the repository private, if it is created now
        dry_run: write the folder, print what would be uploaded, and stop
        output: folder to prepare it in (default: a temporary one; needed with --dry-run)
        tag: tag of the new revision (default: the next of v1, v2, ...)
    """
    return result_of("hub.push_data", locals())
