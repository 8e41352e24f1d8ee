"""Outputs: whatever path a command is to write, no file changes that it did not write, and the outcome is success or one line."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.cli import main
from drafttrain.errors import UserError
from drafttrain.target import Target
from tests.files import FIXTURES, dump_jsonl
from tests.fuzz import fuzz, outcome

MODELS = "--target target --drafter drafters/eagle3"
# Every command that writes: its words without the output, and the folder and file that it reads first.
COMMANDS = {
    "prompts": ("prompts --source file --input chats.jsonl --overwrite --output", "chats.jsonl"),
    "prompts magpie": ("prompts --source magpie --target target --openings chats.jsonl --overwrite --output", "chats.jsonl"),
    "generate": ("generate --target target --prompts prompts.jsonl --output", "prompts.jsonl"),
    "generate --overwrite": ("generate --target target --prompts prompts.jsonl --overwrite --output", "prompts.jsonl"),
    "train": ("train run.yaml", "target"),
    "train resume=false": ("train run.yaml resume=false", "target"),
    "adapt": ("adapt --drafter drafters/eagle3 --log chats.jsonl --once --output", "drafters/eagle3"),
    "ngram-store": ("ngram-store --data data --output", "data"),
    "eval": (f"eval {MODELS} --suite suite.jsonl --output", "suite.jsonl"),
    "tune": (f"tune {MODELS} --output", "drafters/eagle3"),
    "sweep": (f"sweep {MODELS} --suite suite.jsonl --output", "suite.jsonl"),
    "estimate": ("estimate --results results/eagle3.json --output", "results/eagle3.json"),
    "report": ("report results/eagle3.json --output", "results/eagle3.json"),
    "trace": (f"trace {MODELS} --prompt x --output", "drafters/eagle3"),
    "bench-server": ("bench-server http://127.0.0.1:9 --suite suite.jsonl --output", "suite.jsonl"),
    "export": ("export --drafter drafters/eagle3 --format vllm --output", "drafters/eagle3"),
    "import": ("import --checkpoint exports/eagle3_sglang --target target --output", "exports/eagle3_sglang"),
    "doctor": ("doctor drafters/eagle3 --texts 0 --target target --output", "drafters/eagle3"),
    "verify": ("verify --drafter drafters/eagle3 --engine none --target target --output", "drafters/eagle3"),
    "push": ("push --drafter drafters/eagle3 --repo a/b --without-evaluation --base-model c/d --dry-run --output",
             "drafters/eagle3"),
    "plan": ("plan run.yaml --output", "run.yaml"),
    "push-data": ("push-data --data data --repo a/b --prompt-license own --dry-run --output", "data"),
}  # fmt: skip
OUTPUTS = {
    "own input": lambda given: given,
    "parent of the input": lambda given: given.parent,
    "the current folder": lambda given: Path("."),
    "through ..": lambda given: Path("target", "..", given),
    "link to the input": lambda given: _link("link", given),
    "below a link": lambda given: _link("below", given.parent) / given.name,
    "dangling link": lambda given: _link("dangling", "nowhere"),
    "other files": lambda given: Path("foreign"),
    "a text file": lambda given: Path("foreign", "thesis.txt"),
    "below a file": lambda given: Path("foreign", "thesis.txt", "x"),
    "missing parent": lambda given: Path("new", "deep", "out"),
    "empty": lambda given: "",
    "home": lambda given: "~",
    "below home": lambda given: "~/out",
    "no such home": lambda given: "~nobody-of-that-name/x",
    "line break": lambda given: Path("new", "a\nb"),
    "surrogate": lambda given: Path("new", "a\udc80b"),
    "null byte": lambda given: "a\0b",
    "long name": lambda given: "x" * 300,
    "device": lambda given: "/dev/null",
    "read-only": lambda given: Path("readonly", "out"),
    "no folder to make": lambda given: Path("/proc/nowhere/out"),
    "a model": lambda given: Path("target"),
    "a model's config": lambda given: Path("target", "config.json"),
    "a model's weights": lambda given: Path("target", "model.safetensors"),
    **{
        f"{name}'s": lambda given, path=path: Path(path)
        for name, path in {
            "generate": "data_states", "train": "drafters/medusa", "adapt": "adapted", "import": "imported",
            "export": "exports/eagle1_vllm",
            "sweep": "results/sweep", "eval": "results/off.json", "tune": "results/tune.json", "prompts": "prompts.jsonl",
            "trace": "results/trace.html", "meta": "data/meta.json", "store": "store.safetensors",
        }.items()
    },
}  # fmt: skip
# The outputs that a command wrote itself, so that it may write them again.
OWN = {
    ("ngram-store", "store's"),
    *(
        (name, f"{name}'s")
        for name in [
            "generate",
            "train",
            "import",
            "export",
            "sweep",
            "eval",
            "tune",
            "trace",
            "prompts",
        ]
    ),
}

NOT_YAML = ("surrogate", "null byte", "line break")  # an override's value is YAML


def _link(name: str, to: str | Path) -> Path:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)
    os.symlink(Path(to).absolute(), name)
    return Path(name)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The files of an earlier version, and a user's own."""
    root = shutil.copytree(FIXTURES, tmp_path_factory.mktemp("outputs") / "home")
    shutil.copytree(
        root / "drafters" / "eagle3",
        root / "imported",
        ignore=shutil.ignore_patterns("training.json"),
    )
    shutil.copytree(root / "drafters" / "eagle3", root / "adapted" / "version-0001")
    state = {"first": str(root / "drafters" / "eagle3"), "places": [], "allowance": 1.0}
    dump_jsonl(root / "adapted" / "state.jsonl", [state])
    for name in (
        "config.json",
        "model.safetensors",
        "meta.json",
        "README.md",
        "results.json",
        "thesis.txt",
    ):
        (root / "foreign").mkdir(exist_ok=True)
        (root / "foreign" / name).write_text('{"mine": 1}\n')
    (root / "readonly").mkdir(mode=0o500)
    return root


def states(root: Path) -> dict[str, tuple[int, int, int]]:
    """The inode, size and time of each file, which any writer changes."""
    found = {}
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink() and "arrow" not in path.parts:
            one = path.stat()
            found[str(path.relative_to(root))] = (one.st_ino, one.st_size, one.st_mtime_ns)
    return found


def run(command: str, output: str) -> None:
    """The command; its exit status 2 is a UserError."""
    words = COMMANDS[command][0].split()
    words += [f"output_dir={output}"] if words[0] == "train" else [output]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        status = main(words)
    if status == 2:
        said = errors.getvalue()
        raise UserError(said[said.index("error: ") :].rstrip("\n"))
    assert status in (0, 1), (command, status)


def test_every_command_that_writes_is_here():
    from drafttrain.cli import COMMANDS as all_commands

    assert {words.split()[0] for words, _ in COMMANDS.values()} == all_commands.keys() - {
        "fetch",
        "features",
        "diagnose",
        "serve-target",
        "swap",
        "recipes",  # refuses files that differ: tests/test_recipes.py
        "chat",  # writes what /save names: tests/reports/test_terminal_chat.py
        "completion",
        "suites",  # keeps what is there: tests/evaluation/test_public_suites.py
    }


@pytest.mark.thorough
@fuzz(examples=48)
@given(
    command=st.sampled_from(sorted(COMMANDS)),
    kind=st.sampled_from(sorted(OUTPUTS)),
    ending=st.sampled_from(["", "", ".json", ".html", ".png"]),
)
def test_no_file_changes_that_a_command_did_not_write(home, command, kind, ending):
    if (kind == "read-only" and os.geteuid() == 0) or (
        command.startswith("train") and kind in NOT_YAML
    ):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("HOME", str(home / "readonly" / ".." / "homes"))
        patch.setattr(sys, "argv", ["drafttrain"])
        patch.setattr(
            Target, "load", _stop
        )  # what follows takes long, and writes into what has been checked
        patch.setattr(os, "nice", lambda by: 0)  # of adapt, for the whole process
        patch.setattr("drafttrain.serving.bench.measure", _stop)
        patch.setattr("drafttrain.tuning.plan.plan", _stop)
        patch.setattr(
            "drafttrain.reports.charts._save", lambda rows, output, *_, **__: _picture(output)
        )
        os.makedirs("homes", exist_ok=True)
        before = states(home)
        output = str(OUTPUTS[kind](Path(COMMANDS[command][1])))
        output += ending if output and not os.path.exists(output) and len(output) < 300 else ""
        said = outcome("outputs", kind, lambda: run(command, output))
        after = states(home)
        changed = {name for name in before if before[name] != after.get(name)}
        assert not changed or (command.split()[0], kind) in OWN, (
            command,
            kind,
            output,
            changed,
            said,
        )
        assert not [name for name in after if "/.partial" in name or name.startswith(".partial")], (
            command,
            kind,
        )
        for name in after.keys() - before.keys():
            (home / name).unlink()
        for name in changed:
            shutil.copyfile(FIXTURES / name.replace("imported/", "drafters/eagle3/"), home / name)


def _stop(*_: object, **__: object) -> None:
    raise UserError("checked")


def _picture(output: Path | io.StringIO) -> None:
    if isinstance(output, io.StringIO):
        output.write('<svg viewBox="0 0 1 1"></svg>')
    else:
        output.write_text("written by drafttrain")
