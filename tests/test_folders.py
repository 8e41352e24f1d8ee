"""No command removes or replaces a file that it did not write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from drafttrain import folders
from drafttrain.errors import UserError
from drafttrain.files import lock, replacing, scratch_folder, write_json
from drafttrain.folders import MARKER, OutputFolder, check_folder, inputs_of, output_file
from tests.files import FIXTURES, load_json

BUSY = "is being written by another process"


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_torch_is_not_needed():
    code = "import sys, drafttrain.folders; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "output='' names nothing"),
        (".", "it is a folder.; name a file"),
        ("file/x.json", "cannot be written .Not a directory"),
        ("/dev/null", "it is not a plain file"),
        ("~nobody-of-that-name/x.json", "is not a valid path"),
        ("a\0b", "is not a valid path .embedded null byte"),
        ("x" * 300, "File name too long"),
        ("file", "contains files that drafttrain eval did not write"),
        ("config.json", "contains files that drafttrain eval did not write"),
        ("link", "contains files that drafttrain eval did not write"),
        ("tune.json", "contains files that drafttrain eval did not write"),
    ],
)
def test_a_file_that_is_no_place_for_results(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("thesis")
    Path("config.json").write_text('{"model_type": "llama"}')
    Path("link").symlink_to("config.json")
    Path("tune.json").write_bytes((FIXTURES / "results" / "tune.json").read_bytes())
    with pytest.raises(UserError, match=message) as caught:
        output_file(name, "eval")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("eval", "results/eagle3.json"),
        ("tune", "results/tune.json"),
        ("estimate", "results/estimate.json"),
        ("bench-server", "results/server.json"),
        ("sweep", "results/sweep/summary.json"),
        ("trace", "results/trace.html"),
        ("prompts", "prompts.jsonl"),
        ("ngram-store", "store.safetensors"),
        ("decoding", "drafters/eagle3/decoding.json"),
    ],
)
def test_results_of_earlier_versions_are_replaced_by_their_command_only(kind, name):
    """tests/fixtures holds what an earlier version wrote."""
    assert output_file(FIXTURES / name, kind) == FIXTURES / name
    others = {*folders._JSON_KEYS, *folders._TEXTS, "prompts"} - {kind}
    assert [other for other in others if folders.wrote_file(FIXTURES / name, other)] in (
        [],
        ["decoding"],
    )


def test_an_input_is_no_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = (FIXTURES / "results" / "eagle3.json").read_bytes()
    Path("data").mkdir()
    Path("data", "a.json").write_bytes(results)
    Path("b.json").symlink_to("data/a.json")
    Path("c").symlink_to("data")
    for given in (
        "data/a.json",
        "b.json",
        "c/a.json",
        "data/../data/a.json",
        "drafter+ngram_store:data/a.json",
    ):
        for output in ("data/a.json", "b.json", "c/a.json", "./c/../data/a.json"):
            args = Namespace(drafter=given, output=output, limit=3)
            with pytest.raises(UserError, match="is or holds the input drafter="):
                output_file(output, "eval", inputs_of(args))
    assert output_file(
        "data/a.json", "eval", inputs_of(Namespace(drafter="data", output="data/a.json"))
    )
    for output in ("data", "c", ".", "data/..", tmp_path.parent):
        with pytest.raises(UserError, match="is or holds the input x="):
            check_folder(output, "sweep", [("x", "b.json")])


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_of_another_command_or_with_other_files(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "llama"}')
    for kind in ("train", "import", "export", "generate", "push", "push-data"):
        with pytest.raises(
            UserError,
            match=rf"holds other files \(config.json\); choose an empty folder.*{kind} wrote",
        ):
            OutputFolder(foreign, kind)
    (foreign / "config.json").rename(foreign / "notes.txt")
    for kind in folders.KINDS:
        if folders.KINDS[kind].alone or folders.KINDS[kind].published:
            with pytest.raises(UserError, match="holds other files"):
                OutputFolder(foreign, kind)
        else:
            OutputFolder(foreign, kind).close()
    assert names(foreign) == {"notes.txt"}
    with OutputFolder(tmp_path / "run", "export") as output:
        (output.path / "config.json").write_text(
            '{"model_type": "llama"}'
        )  # of a draft model, as any other
    assert names(tmp_path / "run") == {MARKER, "config.json"}
    with pytest.raises(UserError, match="was written by drafttrain export, not by train"):
        OutputFolder(tmp_path / "run", "train")
    OutputFolder(tmp_path / "run", "export").close()


def test_folders_of_earlier_versions_are_known_by_their_files(tmp_path):
    """Each of the fixtures' folders is its command's, and no other's."""
    found = {"data": "generate", "run": "train"}
    found |= {f"drafters/{path.name}": "train" for path in (FIXTURES / "drafters").iterdir()}
    found |= {f"exports/{path.name}": "export" for path in (FIXTURES / "exports").iterdir()}
    del found["exports/draft_model_transformers"]  # like any language model
    check_folder(FIXTURES / "results" / "sweep", "sweep")
    for name, kind in found.items():
        check_folder(FIXTURES / name, kind)
        for other in {"generate", "train", "import", "export", "push", "push-data"} - {kind}:
            with pytest.raises(
                UserError, match=f"was written by drafttrain {kind}, not by {other}"
            ):
                check_folder(FIXTURES / name, other)
    for kind in ("train", "import", "export", "generate", "push", "push-data"):
        with pytest.raises(UserError, match="holds other files"):
            check_folder(FIXTURES / "target", kind)


def test_a_pipe_is_no_sign_of_a_command(tmp_path):
    os.mkfifo(tmp_path / "meta.json")
    with pytest.raises(UserError, match="holds other files"):
        check_folder(tmp_path, "generate")
    with pytest.raises(UserError, match="it is not a plain file"):
        output_file(tmp_path / "meta.json", "eval")


def test_a_folder_is_locked_and_leaves_nothing_when_nothing_was_written(tmp_path):
    with OutputFolder(tmp_path / "new" / "run", "train") as first:
        with pytest.raises(UserError, match=BUSY):
            OutputFolder(first.path, "train")
        assert names(first.path) == {MARKER}
    assert not (tmp_path / "new").exists()
    ranks = [OutputFolder(tmp_path / "data", "generate", rank=rank) for rank in (0, 1)]
    for rank in (1, None):
        with pytest.raises(UserError, match=BUSY):
            OutputFolder(tmp_path / "data", "generate", rank=rank)
    (tmp_path / "data" / "meta.json").write_text('{"format": 1, "target": {}}')
    ranks[0].close()
    with pytest.raises(UserError, match=BUSY):
        OutputFolder(tmp_path / "data", "generate")
    ranks[1].close()
    assert names(tmp_path / "data") == {"meta.json", MARKER}
    OutputFolder(tmp_path / "data", "generate").close()


def written(folder, kind, *files, **options):
    """A finished run of a command that writes these files."""
    with OutputFolder(folder, kind, **options) as output:
        for name in files:
            (output.path / name).parent.mkdir(parents=True, exist_ok=True)
            (output.path / name).write_text("ours")


def put(folder, *files):
    """Files of a user."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")


RUN = ("training.json", "model.safetensors", "checkpoint-4/model.safetensors", "adapter/a.json")
MINE = ("checkpoint-keep/notes.txt", "checkpoint-4/notes.txt", "adapter/mine.txt", "model-mine.safetensors")  # fmt: skip


def test_files_of_users_stay_whatever_their_names(tmp_path):
    run = tmp_path / "run"
    written(run, "train", *RUN)
    put(run, *MINE)
    with OutputFolder(run, "train") as output:
        output.set_aside()
        output.forget()
        assert names(run) == {MARKER, *MINE}
        put(run, "training.json")
    written(run, "train", *RUN)
    with OutputFolder(run, "train") as output, output.staged() as part:
        (part / "training.json").write_text("new")
    assert names(run) == {MARKER, "training.json", *MINE}
    assert (run / "model-mine.safetensors").read_text() == "mine"


def test_what_was_set_aside_comes_back_and_nothing_else_moves(tmp_path):
    run = tmp_path / "run"
    written(run, "train", *RUN)
    put(run, *MINE)
    with OutputFolder(run, "train") as output:
        output.set_aside("checkpoint-*")
        assert not (run / "checkpoint-4" / "model.safetensors").exists()
        output.restore()
    assert names(run) == {MARKER, *RUN, *MINE}


def test_a_record_survives_a_kill_and_the_ranks_of_a_launch(tmp_path):
    data = tmp_path / "data"
    written(data, "generate", "meta.json", "part-0000.jsonl")
    put(data, "part-mine.jsonl", "arrow/mine.txt")
    child = os.fork()
    if child == 0:
        output = OutputFolder(data, "generate")
        (output.path / "part-0001.jsonl").write_text("ours")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    ranks = [OutputFolder(data, "generate", rank=rank) for rank in (0, 1)]
    (data / "part-0002.jsonl").write_text("ours")
    for rank in ranks:
        rank.close()
    with OutputFolder(data, "generate") as output:
        output.set_aside()
        output.forget()
    assert names(data) == {"part-mine.jsonl", "arrow/mine.txt"}


def test_what_an_earlier_version_wrote_is_ours(tmp_path):
    """Its folders have no record: all files with the command's names are the command's."""
    run = tmp_path / "run"
    put(run, *RUN)
    (run / "training.json").write_text('{"config": {}}')
    with OutputFolder(run, "train") as output:
        output.set_aside()
        output.forget()
    assert not run.exists() or names(run) == set()


def test_a_lock_ends_with_its_process_and_file_systems_without_locks_are_written(
    tmp_path, monkeypatch
):
    child = os.fork()
    if child == 0:
        OutputFolder(tmp_path / "run", "push")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert names(tmp_path / "run") == {MARKER}
    OutputFolder(tmp_path / "run", "push").close()

    def none(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("drafttrain.files.fcntl.flock", none)
    with OutputFolder(tmp_path / "run", "push"), OutputFolder(tmp_path / "run", "push"):
        write_json(tmp_path / "run" / "config.json", {})


def test_new_files_take_the_place_of_old_ones_when_all_are_there(tmp_path):
    def write(*files: str, fail: bool = False) -> None:
        with OutputFolder(tmp_path / "out", "push") as output, output.staged() as part:
            for file in files:
                (part / file).parent.mkdir(exist_ok=True)
                (part / file).write_text(file)
            if fail:
                raise KeyboardInterrupt

    card = "README.md"
    write("config.json", card, "vllm/config.json", "results/a.json")
    before = names(tmp_path / "out")
    assert before == {MARKER, "config.json", card, "vllm/config.json", "results/a.json"}
    with pytest.raises(KeyboardInterrupt):
        write("config.json", "results/b.json", fail=True)
    assert names(tmp_path / "out") == before
    (tmp_path / "out" / ".partial").mkdir()
    (tmp_path / "out" / ".partial" / "config.json").write_text("of a killed run")
    write("config.json", card, "results/b.json")
    assert names(tmp_path / "out") == {MARKER, "config.json", card, "results/b.json"}
    (tmp_path / "out" / "thesis.txt").write_text("")
    with pytest.raises(UserError, match=r"holds other files \(thesis.txt\)"):
        write("config.json")


def test_what_is_replaced_is_kept_until_the_new_is_complete(tmp_path):
    files = (
        "meta.json",
        "part-0000.jsonl",
        "features/part-0000-00000.safetensors",
        "features/mine.txt",
        "notes.txt",
    )
    root = tmp_path / "data"
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("old" if file != "meta.json" else '{"format": 1}')
    with OutputFolder(root, "generate") as output:
        output.set_aside()
        assert names(root) >= {"features/mine.txt", "notes.txt", ".before/part-0000.jsonl"}
        assert not (root / "part-0000.jsonl").exists()
        output.restore()
        assert names(root) - {MARKER} == set(files)
        output.set_aside()
        (root / "part-0000.jsonl").write_text("new, killed")
        output.set_aside()  # the same command again
        assert (root / ".before" / "part-0000.jsonl").read_text() == "old"
        (root / "part-0000.jsonl").write_text("new")
        output.forget()
    assert names(root) == {"part-0000.jsonl", "features/mine.txt", "notes.txt", MARKER}


# -- what killed processes leave --------------------------------------------------------------------------------------


def test_temporary_files_of_killed_processes_are_removed(tmp_path, monkeypatch):
    left = [tmp_path / f".r.json.{end}" for end in ("0123abcd", "4711")]
    kept = [tmp_path / name for name in (".r.json.swp", ".other.json.0123abcd", ".r.json.89abcdef")]
    for path in (*left, *kept):
        path.write_text("{")
    running = lock(kept[-1])
    write_json(tmp_path / "r.json", {})
    os.close(running)
    assert names(tmp_path) == {"r.json", *(path.name for path in kept)}
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "r.json"):
        raise KeyboardInterrupt
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old = tmp_path / "drafttrain-killed"
    old.mkdir()
    (old / ".drafttrain-scratch").touch()
    (tmp_path / "drafttrain-mine").mkdir()
    with scratch_folder() as running, scratch_folder() as other:
        assert running.is_dir() and other.is_dir() and not old.exists()
    assert not running.exists() and (tmp_path / "drafttrain-mine").exists()
    assert load_json(tmp_path / "r.json") == {}
