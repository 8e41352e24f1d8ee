"""`drafttrain report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.command import command, result_of
from drafttrain.values import File, Place

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def report(
    *results: File | Path,
    output: Sequence[Place | Path] = (),
) -> Json:
    """Show results.json as a table, and make a page or a picture of it.

    ```
    drafttrain report results.json
    drafttrain report eagle.json ngram.json sweep.json --output compared.html
    drafttrain report results.json --output report.html --output report.png
    drafttrain report runs/drafter-adapted/journal.jsonl --output adapted.html
    ```

    A page needs no network. FOLDER/NAME_charts/ next to it gets a PNG of each chart. Several files
    are compared; a sweep's summary adds its cells and where speculation stops paying. A journal of
    adapt --watch shows the served accepted length over time, its rounds and its decisions. A
    picture has a row of three charts per file.

    Args:
        results: files written by drafttrain eval, sweeps' summaries, and journals of adapt --watch
        output: page or picture to write (.html, .png, .svg, .pdf), perhaps several times;
            default: report.html beside the first results
    """
    return result_of("reports.report", locals())
