"""`drafttrain report`: the table, the page and the pictures of results.json files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from drafttrain.errors import UserError
from drafttrain.reports import charts, report_page
from drafttrain.reports.page import write_page

HELP = """Show results.json as a table, and make a page or a picture of it.

  drafttrain report results.json --output report.html
  drafttrain report eagle.json ngram.json sweep.json --output compared.html
  drafttrain report results.json --output report.png

A page stands alone: it needs no network. Beside it, FOLDER/NAME_charts/ gets a PNG of each chart. Several files are compared;
a sweep's summary adds speed-up by batch size. A picture has a row of panels per file."""

FORMATS = (".html", ".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", help="files written by drafttrain eval, and sweeps' summaries")
    parser.add_argument("--output", default="report.png", help=f"page or picture to write ({', '.join(FORMATS)})")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    Raises:
        UserError: a file that is no results.json, or an unknown format.
    """
    output = Path(args.output).expanduser()
    if output.suffix not in FORMATS:
        raise UserError(f"output={args.output!r}: the ending must be one of {', '.join(FORMATS)}")
    loaded = [(name, load_results(name)) for name in args.results]
    runs = [(name, content) for name, content in loaded if not report_page.is_sweep(content)]
    sweeps = [content for _, content in loaded if report_page.is_sweep(content)]
    for _, results in runs:
        print_results(results)
    if output.suffix == ".html":
        write_report([name for name, _ in runs], [results for _, results in runs], sweeps, output)
    elif sweeps:
        raise UserError(f"output={args.output!r}: a sweep is shown on a page; end the name in .html")
    else:
        draw([results for _, results in runs], output)
    print(f"wrote {output}")
    return 0


def write_report(files: list[str], runs: list[dict[str, Any]], sweeps: list[dict[str, Any]], output: Path) -> None:
    """Writes the page, and a PNG of each chart into a folder beside it.

    Args:
        files: where each of the runs came from. sweeps: summaries of sweeps.

    Raises:
        UserError: the place cannot be written.
    """
    names = report_page.run_names(runs, files)
    drawn = report_page.make_charts(runs, names, sweeps)
    write_page(output, report_page.page(runs, names, sweeps, drawn, [identity_line(run) for run in runs]))
    for chart in drawn:
        charts.png(chart, output.with_name(f"{output.stem}_charts") / f"{chart.key}.png")


def load_results(name: str) -> dict[str, Any]:
    """Reads a results file, or the summary of a sweep.

    Raises:
        UserError: not there, not JSON, or not written by drafttrain eval.
    """
    try:
        results = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"results={name!r} cannot be read ({error}); give a file that drafttrain eval wrote") from error
    if report_page.is_sweep(results):
        return results
    if not isinstance(results, dict) or not {"overall", "categories", "decoding"} <= results.keys():
        raise UserError(
            f"results={name!r} is not a results file (no overall figures); give one that drafttrain eval wrote"
        )
    return results


def summary_table(results: dict[str, Any]) -> Table:
    """One row per category and one for the whole suite."""
    overall = results["overall"]
    tree = results["decoding"].get("tree", {}).get("spec", "")
    title = f"{results['target']} + {results['drafter']}   {results['suite']}, {results['dtype']}, tree {tree}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("category")
    headings = ["prompts", "accepted\nlength", "acceptance\nby depth", "tokens/s"]
    headings += [f"{name}\ntokens/s" for name in overall["baselines"]] + [f"vs\n{name}" for name in overall["speedup"]]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, figures in results["categories"].items():
        table.add_row(name, *_cells(figures))
    table.add_section()
    table.add_row("all", *_cells(overall), style="bold")
    return table


def _cells(figures: dict[str, Any]) -> list[str]:
    depths = " ".join(f"{share:.2f}".lstrip("0") for share in figures["acceptance_by_depth"]["conditional"])
    cells = [
        str(figures["prompts"]),
        f"{figures['accepted_length']:.2f}",
        depths,
        f"{figures['tokens_per_second']:.1f}",
    ]
    cells += [f"{baseline['tokens_per_second']:.1f}" for baseline in figures["baselines"].values()]
    return cells + [f"{factor:.2f}x" for factor in figures["speedup"].values()]


def identity_line(results: dict[str, Any]) -> str:
    """Says whether outputs were those of plain decoding, and what that means in this dtype."""
    overall = results["overall"]
    if results["decoding"]["temperature"] > 0:
        return "outputs: sampled, so they are compared in distribution (by the tests), not token by token"
    shares = {
        "plain decoding": overall["identical_outputs"],
        "transformers generate": overall["identical_to_hf_generate"],
    }
    parts = [
        f"identical to {name} on {round(share * overall['prompts'])} of {overall['prompts']} prompts"
        for name, share in shares.items()
        if share is not None
    ]
    if not parts:
        return "outputs: not compared (no baseline was run)"
    line = "outputs: " + "; ".join(parts)
    if all(share in (None, 1.0) for share in shares.values()):
        return line
    if results["dtype"] == "float32":
        return line + ". In float32 all should be: please report this"
    return (
        line + f". {results['dtype']} rounds by the number of rows computed at once, so near ties may fall differently"
    )


def print_results(results: dict[str, Any], console: Console | None = None) -> None:
    """Prints the table, the headline and the line about identical outputs."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)
    console.print(summary_table(results))
    overall = results["overall"]
    line = f"accepted length {overall['accepted_length']:.2f}, {overall['tokens_per_second']:.1f} tokens/s"
    if overall["speedup_vs_fastest"] is not None:
        line += f", {overall['speedup_vs_fastest']:.2f}x the faster baseline"
    console.print(line, highlight=False)
    console.print(identity_line(results), highlight=False, soft_wrap=True)


def draw(runs: list[dict[str, Any]], output: Path) -> None:
    """Writes a picture with a row of three panels per run.

    Raises:
        UserError: the place cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(len(runs), 3, figsize=(15, 4.2 * len(runs)), squeeze=False, layout="constrained")
    for axes, results in zip(rows, runs, strict=True):
        _draw_speedup(axes[0], results)
        _draw_acceptance(axes[1], results["overall"])
        _draw_rates(axes[2], results["overall"])
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=120)
    except OSError as error:
        raise UserError(f"output={str(output)!r} cannot be written ({error.strerror}); choose another place") from error
    finally:
        plt.close(figure)


def _draw_speedup(axes: Any, results: dict[str, Any]) -> None:
    groups = {**results["categories"], "all": results["overall"]}
    names = list(results["overall"]["speedup"])
    height = 0.8 / max(len(names), 1)
    for offset, baseline in enumerate(names):
        places = [row + offset * height for row in range(len(groups))]
        axes.barh(
            places, [group["speedup"].get(baseline, 0) for group in groups.values()], height, label=f"vs {baseline}"
        )
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(groups))], list(groups))
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("speed-up")
    axes.set_title("speed-up by category")
    axes.annotate(
        f"{results['target']} + {results['drafter']}", (0, 1.1), xycoords="axes fraction", annotation_clip=False
    )
    if names:
        axes.legend(loc="best", fontsize="small")


def _draw_acceptance(axes: Any, overall: dict[str, Any]) -> None:
    for name, shares in overall["acceptance_by_depth"].items():
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, len(overall["acceptance_by_depth"]["joint"]) + 1))
    axes.set_xlabel("depth")
    axes.set_ylabel("share accepted")
    axes.set_title(f"acceptance by depth (accepted length {overall['accepted_length']:.2f})")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_rates(axes: Any, overall: dict[str, Any]) -> None:
    rates = {"with drafter": overall["tokens_per_second"]}
    rates |= {name: baseline["tokens_per_second"] for name, baseline in overall["baselines"].items()}
    bars = axes.bar(list(rates), list(rates.values()), width=0.6)
    axes.bar_label(bars, fmt="%.1f")
    axes.set_ylabel("tokens/s")
    axes.set_title("tokens per second")
