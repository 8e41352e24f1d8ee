"""Compares all drafter kinds: same data, same training time, same measurement.

    python eval/compare_kinds.py --target smollm2-135m --data runs/smollm2-135m/data --minutes 20 --cpu-time --cores 0 1 \
        --limit 24 --output eval/results/kinds_smollm2-135m_cpu.json --page docs/choosing.md --plot docs/kinds.png

Trains every trainable kind from its recipe for the given time. With --cores as many kinds are trained at a time, each by one
thread on a core of its own; --cpu-time counts the time that the process computes, so that trainings which share a machine learn
equally long. Then measures these kinds, each alone and beside a second drafter, and the kinds without weights with
`drafttrain eval`, interleaved with plain decoding, for each temperature and tree; one at a time. With sampling, trees of fixed
shape are drawn (`@sample`). Differences between kinds are paired: the same prompts are drawn for both.

Each training and each cell of the comparison runs in its own process and has its own folder or file under --folder, named by
a hash of everything it depends on: after an interruption the same command continues. A failure is recorded with its error,
tried again next time, and does not stop the rest. The output is rewritten after every cell.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from drafttrain.config import CPU_CACHE_GB
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import kind_class, kinds
from drafttrain.environment import describe_environment
from drafttrain.errors import UserError
from drafttrain.evaluation.resampling import draws, ends
from drafttrain.files import Json, write_json, write_text
from drafttrain.folders import OutputFolder, inputs_of, output_file
from drafttrain.progress import Progress
from drafttrain.reports.charts import Chart, Series, picture
from drafttrain.reports.figures import TIMES

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- begin: eval/compare_kinds.py -->"
END = "<!-- end: eval/compare_kinds.py -->"
# Runs train.py with a budget of CPU time, which a busy machine does not shorten.
CPU_TIME = (
    "import runpy, sys, time; from drafttrain.training.limits import TimeBudget; sys.argv = sys.argv[1:]; "
    "TimeBudget.clock = staticmethod(time.process_time); runpy.run_path(sys.argv[0], run_name='__main__')"
)


@dataclass
class Entry:
    """A drafter to compare.

    Attributes:
        label: its name in tables. name: its name for `drafttrain eval`. kind: its (first) kind.
        cells: measured figures, or {"error"}, by setting.
    """

    label: str
    name: str
    kind: str
    cells: dict[str, Json] = field(default_factory=dict)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", default="smollm2-135m", help="short name, folder or Hub id")
    add("--data", required=True, help="data set that all are trained on")
    add("--minutes", type=float, required=True, help="training time of each")
    add(
        "--cpu-time",
        action="store_true",
        help="count the time that a training computes, not the time that passes",
    )
    add(
        "--cores",
        type=int,
        nargs="+",
        help="train as many kinds at a time, each by one thread on one of these cores",
    )
    add("--against", default="eagle3", help="the kind from which the others' differences are shown")
    add("--kinds", nargs="+", help="kinds to compare, trained or not (default: all)")
    add("--recipes", default=str(ROOT / "configs" / "smollm2-135m"), help="folder of KIND.yaml")
    add(
        "--beside",
        nargs="*",
        default=["ngram"],
        help="kinds without weights that trained kinds are also measured with",
    )
    add("--train", nargs="*", default=[], metavar="KEY=VALUE", help="more keys for every training")
    add("--trees", nargs="+", default=["chain:3", "dynamic:3,4,8"])
    add("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    add("--suite", default="drafttrain", help="as for drafttrain eval")
    add("--limit", type=int, help="questions at most")
    add("--max-new-tokens", type=int, default=64)
    add("--dtype", default="auto", help="of the target, while decoding")
    add("--device", default="auto")
    add("--seed", type=int, default=0)
    add("--cell-minutes", type=float, default=30, help="a cell that takes longer has failed")
    add("--folder", type=Path, default=Path("runs/kinds"), help="drafters, cells and their logs")
    add("--output", type=Path, default=Path("runs/kinds/kinds.json"))
    add("--table", type=Path, help="markdown to write")
    add("--page", type=Path, help="page whose marked part becomes the table of both trees")
    add("--plot", type=Path, help="picture to write (.png, .svg)")
    args = parser.parse_args(words)
    for text in args.trees:
        TreeSpec.parse(text)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if args.cores and not set(args.cores) <= allowed:
        raise UserError(
            f"cores={args.cores}: this process may use {sorted(allowed)}; choose among them, each once"
        )
    return args


def execute(command: list[str], log: Path, minutes: float, core: int | None = None) -> None:
    """Runs a command with its output in a log; core: the only one that it uses.

    Raises:
        RuntimeError: the command failed or took too long; with the last line of its output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    with log.open("w") as out:
        try:
            done = subprocess.run(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=60 * minutes,
                env={**os.environ, "PYTHONPATH": path}
                | ({} if core is None else {"OMP_NUM_THREADS": "1"}),
                preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
            )
        except subprocess.TimeoutExpired as late:
            raise RuntimeError(f"took more than {minutes:g} minutes, see {log.name}") from late
    if done.returncode:
        lines = [
            line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()
        ]
        raise RuntimeError(
            f"exit status {done.returncode}: {lines[-1] if lines else 'no output'}, see {log.name}"
        )


def digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]


def resolved(name: str) -> str:
    """Makes a path absolute; other names stay. A plain word is a name even if a folder has it (the suite `drafttrain`)."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_file() or (path.exists() and "/" in name) else name


# -- training -------------------------------------------------------------------------------------------------------


def train(kind: str, args: argparse.Namespace, core: int | None = None) -> Json:
    """Trains a kind unless it is trained already; returns its folder below --folder and the training's figures.

    Raises:
        RuntimeError: no recipe, or the training failed.
    """
    recipe = Path(args.recipes) / f"{kind}.yaml"
    if not recipe.is_file():
        raise RuntimeError(f"no recipe {recipe.name} in --recipes")
    keys = [
        f"target={resolved(args.target)}",
        f"data={resolved(args.data)}",
        f"max_minutes={args.minutes}",
    ]
    keys += [f"seed={args.seed}"]
    if (
        args.cores
    ):  # what a training alone keeps of the target's features, shared by those that run at a time
        keys.append(f"cache_gb={CPU_CACHE_GB / len(args.cores):g}")
    keys += args.train  # of keys that occur twice the last counts
    timing = ["cpu time"] if args.cpu_time else []
    folder = (args.folder / f"{kind}-{digest([recipe.read_text(), *keys, *timing])}").resolve()
    if not (folder / "training.json").is_file():
        python = [sys.executable, "-c", CPU_TIME] if args.cpu_time else [sys.executable]
        command = [
            *python,
            str(ROOT / "drafttrain" / "train.py"),
            str(recipe),
            *keys,
            f"output_dir={folder}",
        ]
        # Loading, evaluation and saving do not count as training time, and CPU time passes slowly on a busy machine.
        limit = (8 if args.cpu_time else 2) * args.minutes + 15
        execute(
            command, folder.with_suffix(".log"), limit, **({} if core is None else {"core": core})
        )
    return {"folder": folder.name, **training_figures(folder)}


def training_figures(folder: Path) -> Json:
    """The figures in training.json and the newest checkpoint's state."""
    done = json.loads((folder / "training.json").read_text())
    states = sorted(
        folder.glob("checkpoint-*/trainer_state.json"),
        key=lambda path: int(path.parent.name.split("-")[1]),
    )
    state = json.loads(states[-1].read_text()) if states else {}
    # Counted training time over all runs of an interrupted training.
    budget = state.get("stateful_callbacks", {}).get("TimeBudget", {}).get("attributes", {})
    tokens = state.get("num_input_tokens_seen")
    seconds = round(budget.get("used", done["seconds"]), 1)
    return {
        "parameters": done["parameters"],
        "steps": done["steps"],
        "seconds": seconds,
        "tokens_seen": tokens,
        "epochs": round(state["epoch"], 3) if state.get("epoch") is not None else None,
        "tokens_per_second": round(tokens / seconds, 1) if tokens and seconds else None,
        "best": done["best"],
        "held_out": done["held_out"],
        "loss": done["config"]["loss"],
        "options": done["config"]["drafter"],
    }


# -- measuring ------------------------------------------------------------------------------------------------------


def setting(tree: str, temperature: float) -> str:
    return f"T={temperature:g} {tree}"


def tree_for(text: str, temperature: float) -> str:
    """The tree to draft: with sampling, a tree of fixed shape is drawn."""
    spec = TreeSpec.parse(text)
    return (
        f"{text}@sample"
        if temperature > 0 and spec.shape not in ("dynamic", "none") and not spec.sampled
        else text
    )


def measure(entry: Entry, tree: str, temperature: float, args: argparse.Namespace) -> Json:
    """Returns a cell's figures from its results file; runs the evaluation if there is no file.

    Raises:
        RuntimeError: the evaluation failed.
    """
    options = {
        "target": resolved(args.target),
        "drafter": entry.name,
        "suite": resolved(args.suite),
        "dtype": args.dtype,
        "device": args.device,
        "temperature": f"{temperature:g}",
        "max-new-tokens": str(args.max_new_tokens),
        "tree": tree_for(tree, temperature),
        "seed": str(args.seed),
        "baselines": "autoregressive",
        **({"limit": str(args.limit)} if args.limit is not None else {}),
    }
    words = [part for key, value in options.items() for part in (f"--{key}", value)]
    slug = re.sub(r"[^A-Za-z0-9]+", "_", f"{entry.label} {setting(tree, temperature)}").strip("_")
    file = (args.folder / "cells" / f"{slug}-{digest(words)}.json").resolve()
    if not file.is_file():
        command = [sys.executable, "-m", "drafttrain.cli", "eval", *words, "--output", str(file)]
        execute(command, file.with_suffix(".log"), args.cell_minutes)
    return cell_figures(json.loads(file.read_text()), f"cells/{file.name}")


def cell_figures(results: Json, file: str) -> Json:
    overall = results["overall"]
    sides = [record["sides"]["drafter"] for record in results["prompts"]]
    passes = sum(side["passes"] for side in sides)
    return {
        "tree": results["decoding"]["tree"]["spec"],
        "accepted_length": overall["accepted_length"],
        "accepted_length_interval": overall["confidence"]["accepted_length"],
        "speedup": overall["speedup"]["autoregressive"],
        "speedup_interval": overall["confidence"]["speedup"]["autoregressive"],
        "tokens_per_second": overall["tokens_per_second"],
        "plain_tokens_per_second": overall["baselines"]["autoregressive"]["tokens_per_second"],
        "drafting_ms_per_round": round(
            1000 * sum(side["draft_seconds"] for side in sides) / passes, 3
        )
        if passes
        else None,
        "drafting_share": overall["draft_fraction"],
        "acceptance_by_depth": overall["acceptance_by_depth"]["conditional"],
        "identical_outputs": overall["identical_outputs"],
        "prompts": overall["prompts"],
        "tokens": overall["tokens"],
        "by_prompt": [_of_prompt(record["sides"]) for record in results["prompts"]],
        "file": file,  # below --folder
    }


def _of_prompt(sides: Json) -> list[float]:
    """Tokens after the first, passes, tokens, seconds; tokens and seconds of plain decoding."""
    ours = sides["drafter"]
    plain = sides["autoregressive"]
    return [
        ours["tokens"] - 1,
        ours["passes"],
        ours["tokens"],
        ours["seconds"],
        plain["tokens"],
        plain["seconds"],
    ]


def differences(cell: Json, base: Json) -> dict[str, list[float]]:
    """[difference, low, high] of accepted length and speed-up to another cell on the same prompts, 95 % intervals."""
    mine, theirs = (np.array(each["by_prompt"]) for each in (cell, base))  # [prompts, 6]
    if mine.shape != theirs.shape:
        return {}
    drawn = draws(len(mine))  # [resamples, prompts]
    every = np.arange(len(mine))[None]
    figures = {
        "accepted_length": lambda t: t[:, 0] / t[:, 1],
        "speedup": lambda t: t[:, 2] / t[:, 3] * t[:, 5] / t[:, 4],
    }
    found = {}
    for name, of in figures.items():
        apart = [of(mine[rows].sum(1)) - of(theirs[rows].sum(1)) for rows in (every, drawn)]
        found[name] = [
            round(float(number), 4) for number in (apart[0][0], *ends(apart[1], len(mine)))
        ]
    return found


# -- showing --------------------------------------------------------------------------------------------------------


def markdown(summary: Json) -> str:
    """The trainings, and a table per setting, the fastest drafter first."""
    lines = [
        f"{summary['target']}, {summary['minutes']:g} minutes of training each; {summary['device']}, "
        f"{summary['threads']} threads.",
        "",
        "| kind | parameters (M) | steps | tokens seen | training tokens/s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind, done in summary["trainings"].items():
        if "error" in done:
            lines.append(f"| {kind} | failed: {_cell(done['error'])} | | | |")
            continue
        tokens = done["tokens_seen"]
        rate = done["tokens_per_second"]
        cells = [
            f"{done['parameters'] / 1e6:.1f}",
            str(done["steps"]),
            f"{tokens:,}" if tokens else "",
            f"{rate:,.0f}" if rate else "",
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    for name in summary["settings"]:
        lines += [
            "",
            f"**{name}**",
            "",
            "| drafter | accepted length | speed-up | drafting, ms a round | share |",
        ]
        lines.append("| --- | --- | --- | --- | --- |")
        for label, cell in ranked(summary, name):
            if "error" in cell:
                lines.append(f"| {label} | failed: {_cell(cell['error'])} | | | |")
                continue
            length = f"{cell['accepted_length']:.2f}{_interval(cell['accepted_length_interval'])}"
            speed = f"{cell['speedup']:.2f}x{_interval(cell['speedup_interval'])}"
            cost = (
                f"{cell['drafting_ms_per_round']:.1f}"
                if cell["drafting_ms_per_round"] is not None
                else ""
            )
            lines.append(
                f"| {label} | {length} | {speed} | {cost} | {100 * cell['drafting_share']:.0f} % |"
            )
    return "\n".join(lines) + "\n"


def ranked(summary: Json, name: str) -> list[tuple[str, Json]]:
    """A setting's cells by drafter, the fastest first, failures last."""
    cells = {
        label: entry["cells"][name]
        for label, entry in summary["drafters"].items()
        if name in entry["cells"]
    }
    return sorted(cells.items(), key=lambda item: -item[1].get("speedup", -1.0))


def page(summary: Json) -> str:
    """One table of all drafters at the first temperature: both trees, and what each accepts beyond `--against`, paired."""
    names = [
        name for name in summary["settings"] if name.startswith(summary["settings"][0].split()[0])
    ]
    trees = [name.split()[1] for name in names]
    base = summary["against"]
    measured = [
        cell
        for entry in summary["drafters"].values()
        for cell in entry["cells"].values()
        if "prompts" in cell
    ]
    prompts = max((cell["prompts"] for cell in measured), default=0)
    budget = f"{summary['minutes']:g} minutes{' of CPU time' if summary['cpu_time'] else ''}"
    lines = [
        f"{summary['target']}, {budget} of training each on the same data; then {prompts} prompts of the {summary['suite']}",
        f"suite, {summary['max_new_tokens']} tokens each, {names[0].split()[0]}, interleaved with plain decoding",
        f"({summary['device']}, {summary['threads']} threads). Brackets hold 95 % intervals over prompts;",
        f"differences to `{base}` are paired.",
        f"`{summary['output']}` holds every figure.",
        "",
        "| drafter | parameters (M) | "
        + " | ".join(f"{tree}: accepted | beyond `{base}` | speed-up" for tree in trees)
        + " |",
        "| --- | --- | " + " | ".join(["--- | --- | ---"] * len(trees)) + " |",
    ]
    for label in _order(summary, names[-1]):
        entry = summary["drafters"][label]
        size = summary["trainings"].get(entry["kind"], {}).get("parameters")
        cells = [
            _page_cells(entry["cells"].get(name, {"error": "not measured"}), label == base)
            for name in names
        ]
        lines.append(f"| `{label}` | {f'{size / 1e6:.1f}' if size else ''} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _order(summary: Json, name: str) -> list[str]:
    """Drafters, those that accept most in a setting first."""
    reached = {
        label: entry["cells"].get(name, {}).get("accepted_length", 0.0)
        for label, entry in summary["drafters"].items()
    }
    return sorted(reached, key=lambda label: -reached[label])


def _page_cells(cell: Json, is_base: bool) -> str:
    if "error" in cell:
        return "failed | | "
    length = f"{cell['accepted_length']:.2f}{_interval(cell['accepted_length_interval'])}"
    apart = cell.get("beyond", {}).get("accepted_length")
    beyond = "" if is_base or not apart else f"{apart[0]:+.2f} [{apart[1]:+.2f}, {apart[2]:+.2f}]"
    return f"{length} | {beyond} | {cell['speedup']:.2f}x{_interval(cell['speedup_interval'])}"


def write_page(path: Path, text: str) -> None:
    """Replaces what stands between the marks. Raises UserError: a page without them."""
    old = path.read_text()
    if BEGIN not in old or END not in old:
        raise UserError(
            f"page={str(path)!r} has no lines {BEGIN} and {END}; add them where the table belongs"
        )
    head, rest = old.split(BEGIN, 1)
    write_text(path, f"{head}{BEGIN}\n\n{text}\n{END}{rest.split(END, 1)[1]}")


def _interval(ends: list[float] | None) -> str:
    return f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else ""


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:160]


def draw(summary: Json, output: Path) -> None:
    """Writes a chart per setting: speed-up with its interval; the labels hold the accepted length."""
    charts = []
    for name in summary["settings"]:
        rows = [item for item in ranked(summary, name) if "error" not in item[1]]
        labels = [f"{label}  {cell['accepted_length']:.2f}" for label, cell in rows]
        spans = [
            (ends[0], ends[1]) if (ends := cell["speedup_interval"]) else None for _, cell in rows
        ]
        series = Series("speed-up", [cell["speedup"] for _, cell in rows], spans=spans)
        charts += (
            [Chart("kinds", name, "", "bars", labels, [series], "kind", TIMES, reference=1.0)]
            if rows
            else []
        )
    if charts:
        picture([charts], output, ["Accepted length (number after the name) and speed-up (bar)"])


# -- all together ---------------------------------------------------------------------------------------------------


def summarize(args: argparse.Namespace, trainings: Json, entries: Sequence[Entry]) -> Json:
    """Writes the results so far, and returns them."""
    base = next((entry.cells for entry in entries if entry.label == args.against), {})
    for entry in entries:
        for name, cell in entry.cells.items():
            if (
                "by_prompt" in cell
                and "by_prompt" in base.get(name, {})
                and entry.label != args.against
            ):
                cell["beyond"] = differences(cell, base[name])
    summary = {
        **describe_environment(
            torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
        ),
        "target": args.target,
        "data": args.data,
        "minutes": args.minutes,
        "cpu_time": args.cpu_time,
        "against": args.against,
        "output": args.output.name,
        "suite": args.suite,
        "limit": args.limit,
        "max_new_tokens": args.max_new_tokens,
        "dtype": args.dtype,
        "seed": args.seed,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "settings": [
            setting(tree, temperature) for temperature in args.temperatures for tree in args.trees
        ],
        "trainings": trainings,
        "drafters": {entry.label: {"kind": entry.kind, "cells": entry.cells} for entry in entries},
    }
    write_json(args.output, summary)
    if args.table:
        write_text(args.table, markdown(summary))
    return summary


def train_all(trained: Sequence[str], args: argparse.Namespace) -> Json:
    """The trainings by kind; as many at a time as there are cores of their own."""
    free: SimpleQueue[int | None] = SimpleQueue()
    for core in args.cores or [None]:
        free.put(core)

    def one(kind: str) -> Json:
        core = free.get()
        try:
            return train(kind, args, core)
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            print(f"FAILED training {kind}: {error}", file=sys.stderr, flush=True)
            return {"error": str(error)}
        finally:
            free.put(core)

    found: Json = {}
    with (
        Progress("training", len(trained), "kinds") as meter,
        ThreadPoolExecutor(len(args.cores or [None])) as pool,
    ):
        jobs = {pool.submit(one, kind): kind for kind in trained}
        for job in as_completed(jobs):
            found[jobs[job]] = job.result()
            meter.advance(note=jobs[job])
            summarize(args, {kind: found[kind] for kind in trained if kind in found}, [])
    return {kind: found[kind] for kind in trained}


def run(args: argparse.Namespace) -> Json:
    """Trains, measures and draws; returns the content of the output file."""
    wanted = args.kinds or kinds()
    trained = [kind for kind in wanted if kind_class(kind).trainable]
    trainings = train_all(trained, args)
    entries = [Entry(kind, kind, kind) for kind in wanted if kind not in trained]
    for kind, done in trainings.items():
        if "error" not in done:
            folder = str((args.folder / done["folder"]).resolve())
            entries.append(Entry(kind, folder, kind))
            entries += [Entry(f"{kind}+{side}", f"{folder}+{side}", kind) for side in args.beside]
    plan = [(t, tree, entry) for t in args.temperatures for tree in args.trees for entry in entries]
    with Progress("measuring", len(plan), "cells") as meter:
        for temperature, tree, entry in plan:
            name = setting(tree, temperature)
            try:
                entry.cells[name] = measure(entry, tree, temperature, args)
                note = f"{entry.label} {name}: {entry.cells[name]['speedup']:.2f}x"
            except (RuntimeError, OSError, ValueError, KeyError) as error:
                entry.cells[name] = {"error": str(error)}
                note = f"{entry.label} {name} failed"
                print(f"FAILED {entry.label} {name}: {error}", file=sys.stderr, flush=True)
            meter.advance(note=note)
            summarize(args, trainings, entries)
    summary = summarize(args, trainings, entries)
    if args.plot:
        draw(summary, args.plot)
    if args.page:
        write_page(args.page, page(summary))
    return summary


def main() -> int:
    try:
        args = arguments()
        inputs = [*inputs_of(args, "folder", "table", "plot")]
        args.output = output_file(args.output, "compare", inputs)
        args.table = (
            output_file(args.table, "compare table", inputs, "table")
            if args.table is not None
            else None
        )
        args.plot = (
            output_file(args.plot, "report", inputs, "plot") if args.plot is not None else None
        )
        with OutputFolder(args.folder, "compare", inputs, "folder"):
            summary = run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(summary))
    print(f"wrote {args.output}")
    failed = [kind for kind, done in summary["trainings"].items() if "error" in done]
    failed += [f"{label} {name}" for label, entry in summary["drafters"].items()
               for name, cell in entry["cells"].items() if "error" in cell]  # fmt: skip
    if failed:
        print(f"failed: {', '.join(failed)}; the same command tries them again", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
