"""`drafttrain report`: the table, the page and the pictures of results.json files; journals."""

from __future__ import annotations

import argparse
from pathlib import Path

from drafttrain.drafters.kinds import split_name
from drafttrain.errors import UserError
from drafttrain.evaluation.baselines import NGRAM
from drafttrain.evaluation.metrics import is_sweep, load_results
from drafttrain.evaluation.plausibility import implausible
from drafttrain.evaluation.verdicts import verdict_of, verdict_on
from drafttrain.files import Json, write_text
from drafttrain.folders import beside, inputs_of, output_file
from drafttrain.outcome import conclude, next_command
from drafttrain.reports import report_page
from drafttrain.reports.charts import picture
from drafttrain.reports.figures import conditions, lengths_text
from drafttrain.reports.journal_page import read_journal
from drafttrain.reports.output import table_of, wide_console

FORMATS = (".html", ".png", ".svg", ".pdf")
MOST_DEPTHS = 6  # in the table
_SHORT = {"autoregressive": "plain", NGRAM: "n-grams"}  # baselines in headings


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        UserError: a file that is not a results.json or a journal, or an unknown format.
    """
    wanted = args.output
    if not wanted:
        wanted = [beside(args.results[0], "report.html")]
    outputs = [output_file(name, "report", inputs_of(args)) for name in wanted]
    for output in outputs:
        if output.suffix not in FORMATS:
            raise UserError(
                f"output={str(output)!r}: the ending must be one of {', '.join(FORMATS)}"
            )

    files: list[str] = []  # of the runs
    runs: list[Json] = []
    sweeps: list[Json] = []
    journals: list[list[Json]] = []
    for name in args.results:
        if str(name).endswith(".jsonl"):
            journals.append(read_journal(name))
            continue
        content = load_results(name, sweeps=True)
        if is_sweep(content):
            sweeps.append(content)
        else:
            files.append(name)
            runs.append(content)
    for output in outputs:
        if (sweeps or journals) and output.suffix != ".html":
            raise UserError(
                f"output={str(output)!r}: a sweep or a journal is shown on a page; end the name in .html"
            )

    for results in runs:
        print_results(results)
    for output in outputs:
        if output.suffix != ".html":
            draw(runs, output)
            continue
        # The page, and a PNG of each chart in a folder next to it.
        names = report_page.run_names(runs, files)
        drawn = report_page.make_charts(runs, names, sweeps, journals)
        folder = output.with_name(f"{output.stem}_charts")
        pictures = [output_file(folder / f"{chart.key}.png", "report") for chart in drawn]
        notes = [[identity_line(run), *warnings_of(run)] for run in runs]
        write_text(output, report_page.page(runs, names, drawn, notes, sweeps, journals))
        for chart, path in zip(drawn, pictures, strict=True):
            picture([[chart]], path)
    figures = []
    for name, results in zip(files, runs, strict=True):
        figures.append({**results["overall"], "file": name})
    drafters = {split_name(results["drafter"])[0] for results in runs} - {"none"}
    then = ""
    if len(drafters) == 1:
        then = next_command("export", drafter=drafters.pop())
    conclude({"runs": figures}, outputs, then)
    return 0


def draw(runs: list[Json], output: Path) -> None:
    """Writes a picture: per run, speed-up by category, acceptance by depth and tokens per second.

    Raises:
        UserError: the file cannot be written.
    """
    headings = []
    for run in runs:
        line = f"accepted length {run['overall']['accepted_length']:.2f}"
        found = verdict_of(run["overall"])
        if found.figures:
            line += f", {found.figures}"
        headings.append(f"{run['target']} + {run['drafter']}: {line}\n{conditions(run)}")
    picture([report_page.main_charts(run) for run in runs], output, headings)


def identity_line(results: Json) -> str:
    """Whether outputs equal those of plain decoding, and what a difference means in this dtype."""
    overall = results["overall"]
    if results["decoding"]["temperature"] > 0:
        return "outputs: sampled, so they are compared in distribution (by the tests), not token by token"
    sides = {
        "plain decoding": "identical_outputs",
        "transformers generate": "identical_to_hf_generate",
    }
    count = overall["prompts"]
    parts = []
    equal = True
    for name, key in sides.items():
        share = overall[key]
        if share is not None:
            parts.append(f"identical to {name} on {round(share * count)} of {count} prompts")
            equal = equal and share == 1.0
    if not parts:
        return "outputs: not compared (no baseline was run)"
    line = "outputs: " + "; ".join(parts)
    if equal:
        return line
    if results["dtype"] == "float32":
        return f"{line}. In float32 all should be: please report this"
    cause = "rounds by the number of rows computed at once, so near ties may fall differently"
    return f"{line}. {results['dtype']} {cause}"


def warnings_of(results: Json) -> list[str]:
    """A line for each figure that cannot be right."""
    return [f"implausible: {reason}" for reason in implausible(results)]


def print_results(results: Json) -> None:
    """Prints a row per category and one for all prompts, the verdict, and a line about outputs."""
    overall = results["overall"]
    headings = ["category", "prompts", "accepted\nlength", "acceptance\nby depth", "tokens/s"]
    for name in overall["baselines"]:
        headings.append(f"{_SHORT.get(name, name)}\ntokens/s")
    for name in overall["speedup"]:
        headings.append(f"vs\n{_SHORT.get(name, name)}")
    for name in overall.get("decoding_speedup", {}):
        headings.append(f"decoding\nvs {_SHORT.get(name, name)}")
    tree = results["decoding"].get("tree", {}).get("spec", "")
    title = (
        f"{results['target']} + {results['drafter']}   "
        f"{results['suite']}, {results['dtype']}, tree {tree}"
    )
    rows = [_row(name, figures) for name, figures in results["categories"].items()]
    table = table_of(headings, rows, title, right=True)
    table.add_section()
    table.add_row(*_row("all", overall), style="bold")
    console = wide_console()
    console.print(table)
    line = f"accepted length {overall['accepted_length']:.2f}"
    if tree:
        line += f" with {tree}"
    console.print(f"{line}, {overall['tokens_per_second']:.1f} tokens/s")
    lengths = lengths_text(overall)
    if lengths:
        console.print(lengths, highlight=False)
    console.print(verdict_on(results).text, soft_wrap=True, highlight=False)
    for line in (identity_line(results), *warnings_of(results)):
        console.print(line, soft_wrap=True, markup=False)


def _row(name: str, figures: Json) -> list[str]:
    by_depth = figures["acceptance_by_depth"]["conditional"]
    depths = " ".join(f"{share:.2f}".lstrip("0") for share in by_depth[:MOST_DEPTHS])
    if len(by_depth) > MOST_DEPTHS:
        depths += " ..."
    cells = [name, str(figures["prompts"]), f"{figures['accepted_length']:.2f}", depths]
    for side in (figures, *figures["baselines"].values()):
        cells.append(f"{side['tokens_per_second']:.1f}")
    for factors in (figures["speedup"], figures.get("decoding_speedup", {})):
        for factor in factors.values():
            cells.append(f"{factor:.2f}x")
    return cells
