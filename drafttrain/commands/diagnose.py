"""`drafttrain diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.command import command, result_of
from drafttrain.values import File, Name

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def diagnose(
    *results: File | Path,
    drafter: Name | Path = "",
    apply: bool = False,
) -> Json:
    """Say why acceptance is what it is, from results.json, and what to do.

    ```
    drafttrain diagnose results.json
    drafttrain diagnose results.json --drafter runs/drafter --apply
    ```

    --apply writes the categories that speculation slows down into the drafter's decoding.json
    (`off`); `drafttrain eval` and `generate(..., category=...)` then decode them plainly.
    Categories that pay are removed from the list again. Several files of one drafter are compared
    by temperature.

    Args:
        results: files written by drafttrain eval; each is diagnosed
        drafter: the drafter's folder (default: the one that the results name)
        apply: write the categories to switch off into the drafter's decoding.json
    """
    return result_of("evaluation.diagnose", locals())
