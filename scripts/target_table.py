"""Writes the table of model families into docs/targets.md: how each one decodes, as `Target.wrap` finds for a tiny random model.

python scripts/target_table.py         # takes minutes; a slow test compares the file with `table()`
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from transformers.utils import logging  # noqa: E402

from drafttrain.errors import UserError  # noqa: E402
from drafttrain.target import Target  # noqa: E402
from tests.inference import any_family as every  # noqa: E402
from tests.inference import fakes  # noqa: E402

PAGE = ROOT / "docs" / "targets.md"
BEGIN = "<!-- families: written by scripts/target_table.py -->\n"
END = "<!-- end of families -->\n"
_KNOWN = {each["model_type"]: name for name, each in {**fakes.FAMILIES, **fakes.OWN}.items()}
_PACKED = "packed trees"
_UNBUILT = "not tried: no tiny model of these sizes"


def outcome(model_type: str) -> str:
    """How a family decodes, or why it is refused."""
    if model_type in _KNOWN:
        target, _ = fakes.family(_KNOWN[model_type])
        return _PACKED if target.continuation is None else f"own cache: {target.continuation}"
    for more in every.VARIANTS.values():
        try:
            model = every.build(every.FAMILIES[model_type], more)
        except Exception:
            continue  # sizes that this family does not take together
        try:
            target = Target.wrap(model, None, model_type)
        except UserError as error:
            line = str(error).partition(") ")[2]  # behind the class; other errors are of the sizes
            if not line:
                continue
            reason = re.sub(r"\(.*", "", line).partition(";")[0].strip()
            return f"refused: {re.sub('[0-9]+', 'n', reason)}"
        return _PACKED if target.continuation is None else f"own cache: {target.continuation}"
    return _UNBUILT


def table() -> str:
    """The table, families of one outcome in a row; bold ones are compared with transformers token by token."""
    found = defaultdict(list)
    for model_type in sorted({*every.FAMILIES, *_KNOWN}):
        found[outcome(model_type)].append(
            f"**{model_type}**" if model_type in _KNOWN else model_type
        )
    order = sorted(
        found, key=lambda key: (key != _PACKED, key == _UNBUILT, "refused" in key, -len(found[key]))
    )
    lines = [f"| {key} | {len(found[key])} | {', '.join(found[key])} |" for key in order]
    return (
        "\n".join(
            ("| decoding | count | model types of transformers |", "| --- | --- | --- |", *lines)
        )
        + "\n"
    )


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")
    print(f"wrote the families of {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
