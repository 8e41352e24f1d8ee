"""A disk that fills at any byte: every writer ends in one line, loses nothing, and its rerun completes.

A limit on the size of files stands for the disk: writes beyond it fail as they do on a full one, also those of C++ and Rust.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drafttrain.cli import main
from drafttrain.errors import UserError
from drafttrain.files import JsonlLog
from tests.files import FIXTURES

MODELS = "--target target --drafter drafters/eagle3 --dtype float32"
QUICK = "--max-new-tokens 16"
# Words of every command that writes, and what it writes.
WRITERS = {
    "prompts": ("prompts --source file --input chats.jsonl --output out/p.jsonl", "out"),
    "generate": ("generate --target target --dtype float32 --prompts prompts.jsonl --output out --max-new-tokens 8 --slots 4 "
                 "--max-length 256 --features default", "out"),
    "features": ("features --data data --dtype float32", "data/features"),
    "ngram-store": ("ngram-store --data data --output out/store.safetensors", "out"),
    "eval": (f"eval {MODELS} --suite suite.jsonl {QUICK} --tree chain:2 --baselines none --output out/r.json", "out"),
    "sweep": (f"sweep {MODELS} --suite suite.jsonl --max-new-tokens 8 --limit 2 --lengths 1 --baselines none --output out"
              .replace("--dtype float32", "--dtypes float32"), "out"),
    "tune": (f"tune {MODELS} --prompts 1 {QUICK} --repeats 1 --dry-run --output out/t.json", "out"),
    "estimate": ("estimate --results results/eagle3.json --output out/e.json", "out"),
    "page": ("report results/eagle3.json --output out/r.html", "out"),
    "picture": ("report results/eagle3.json --output out/r.png", "out"),
    "trace": (f"trace {MODELS} --prompt x {QUICK} --output out/t.html", "out"),
    "export": ("export --drafter drafters/eagle3 --format vllm --output out", "out"),
    "export gguf": ("export --drafter drafters/draft_model --format gguf --output out", "out"),
    "export transformers": ("export --drafter drafters/draft_model --format transformers --output out", "out"),
    "import": ("import --checkpoint exports/eagle3_sglang --target target --output out", "out"),
    "push": ("push --drafter drafters/eagle3 --results results/eagle3.json --repo a/b --base-model c/d --accept-implausible "
             "--dry-run --output out", "out"),
    "push-data": ("push-data --data data --repo a/b --prompt-license own --dry-run --output out", "out"),
    "train": ("train run.yaml output_dir=out", "out"),
    "plan": ("plan run.yaml --output out/p.json", "out"),
    "adapt": ("adapt --drafter drafters/eagle3 --log chats.jsonl --once --output out", "out"),
}  # fmt: skip
SLOW = ("train", "plan", "page", "picture", "push", "sweep", "tune")


@contextlib.contextmanager
def full_at(size: int):
    """No file of this process may grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fills(command: str, sizes: list[int], capsys) -> None:
    words, place = WRITERS[command]
    refused = 0
    for size in sizes:
        with full_at(size):
            status = main([*words.split(), *(["--overwrite"] if command == "features" else [])])
        said = capsys.readouterr().err
        assert status in (0, 2), (size, said)
        if status == 2:
            refused += 1
            line = said.splitlines()[-1]
            assert line.startswith("error: ") and "Traceback" not in said, said
            assert "cannot be written" in line or "no space left" in line, (size, line)
        gc.collect()
    assert refused, "no limit was reached"
    assert main(words.split()) == 0
    left = [path for path in Path(place).rglob(".*") if path.name != ".drafttrain"]
    assert not left and any(Path(place).rglob("*")), left


@pytest.fixture
def home(tmp_path, monkeypatch):
    shutil.copytree(FIXTURES, tmp_path / "home")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path / "home")
    yield
    assert not list((tmp_path / "tmp").glob("drafttrain-*"))


@pytest.mark.thorough
@pytest.mark.parametrize("command", [name for name in WRITERS if name not in SLOW])
def test_a_full_disk_costs_one_line(home, capsys, command):
    fills(command, [700], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("command", list(WRITERS))
def test_a_disk_that_is_full_at_any_byte(home, capsys, command):
    fills(command, [0, 1, 40, 100, 300, 900, 3_000, 9_000, 20_000, 50_000, 150_000, 0], capsys)


@pytest.mark.parametrize("size", range(0, 90, 7))
def test_a_log_holds_whole_lines_whatever_was_written(tmp_path, size):
    """The log of `prompts --source magpie` and of `eval`."""
    rows = [{"number": number} for number in range(4)]
    path = tmp_path / "log"

    def write():
        with full_at(size), contextlib.closing(JsonlLog(path, {"seed": 1})) as log:
            for row in [*rows, {"text": "x" * 100}]:
                log.add(row)

    with pytest.raises(UserError, match="cannot be written"):
        write()
    kept = path.read_bytes()
    assert not kept or kept.endswith(b"\n")
    with contextlib.closing(JsonlLog(path, {"seed": 1})) as log:
        assert log.rows == rows[: len(log.rows)]
        for row in rows[len(log.rows) :]:
            log.add(row)
    assert path.read_text().count("\n") == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["generate", "eval", "export transformers", "import", "push", "picture"]
)
def test_a_killed_run_is_run_again_and_nothing_of_it_stays(home, tmp_path, command):
    words, place = WRITERS[command]
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path / "tmp"),
        "PYTHONPATH": str(FIXTURES.parents[1]),
    }
    run = [sys.executable, "-m", "drafttrain.cli", *words.split()]
    began = time.perf_counter()
    subprocess.run(run, check=True, env=environment, capture_output=True)
    whole = time.perf_counter() - began
    before = names(place)
    for share in (0.6, 0.8, 0.9, 0.95, 1.0):
        shutil.rmtree(place)
        child = subprocess.Popen(
            run, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(share * whole)
        child.kill()
        child.wait()
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert names(place) == before
    assert not list((tmp_path / "tmp").glob("drafttrain-*"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "again", "names"),
    [
        ("train", "resume=false", ["checkpoint-keep/notes.txt", "adapter/mine.txt", "model-mine.safetensors"]),
        ("generate", "--overwrite", ["part-mine.jsonl", "arrow/mine.txt", "features/mine.safetensors"]),
        ("features", "--overwrite", ["mine.txt", "part-mine.safetensors", "part-0000-mine.safetensors"]),
    ],
)  # fmt: skip
def test_files_of_users_stay_when_a_command_starts_over(home, command, again, names):
    words, place = WRITERS[command]
    assert main(words.split()) == 0
    for name in names:
        Path(place, name).parent.mkdir(parents=True, exist_ok=True)
        Path(place, name).write_text("mine")
    assert main([*words.split(), again]) == 0
    assert [Path(place, name).read_text() for name in names] == ["mine"] * len(names)


def names(place: str) -> set[str]:
    return {str(path) for path in Path(place).rglob("*") if path.is_file()}
