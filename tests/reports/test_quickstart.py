"""What scripts/quickstart.sh shows of the commands that it runs."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.files import ROOT

SCRIPT = ROOT / "scripts" / "quickstart.sh"
# Every command prints a table, advice and the command that follows, as the real ones do.
STAND_IN = """#!/usr/bin/env bash
echo "ran $*"
if [ "$1" = prompts ]; then seq 20 > "$7"; fi
echo "\u250f table of $1"
echo "  -> advice of $1"
echo "next: drafttrain something"
"""


def quickstart(tmp_path, on_gpu):
    """What the script prints with commands that stand in for drafttrain's."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(SCRIPT, scripts)
    (scripts / "env.sh").write_text(f"install_drafttrain() {{ :; }}\non_gpu() {{ {on_gpu}; }}\n")
    stand_in = tmp_path / "bin" / "drafttrain"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    (tmp_path / "runs").mkdir()
    done = subprocess.run(
        ["bash", str(scripts / "quickstart.sh"), "--output", str(tmp_path / "runs")],
        env={"PATH": f"{stand_in.parent}:/usr/bin:/bin", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(("on_gpu", "features"), [("true", "none"), ("false", "default")])
def test_no_states_are_stored_where_a_gpu_computes_them_again(tmp_path, on_gpu, features):
    """The states of an 8B for an hour of training are hundreds of GB."""
    said = quickstart(tmp_path, on_gpu)
    (generated,) = [line for line in said.splitlines() if line.startswith("ran generate")]
    assert f"--features {features}" in generated
    assert ("no states are stored" in said) == (on_gpu == "true")


def test_the_tree_is_tuned_on_prompts_that_the_head_has_not_learned(tmp_path):
    quickstart(tmp_path, on_gpu="false")
    lines = {}
    for name in ("tune-prompts", "train-prompts"):
        lines[name] = (tmp_path / "runs" / f"{name}.jsonl").read_text().split()
    assert lines["tune-prompts"] == [str(number) for number in range(1, 9)]
    assert lines["train-prompts"] == [str(number) for number in range(9, 21)]


def test_the_quickstart_shows_one_table_and_no_other_next_step(tmp_path):
    said = quickstart(tmp_path, on_gpu="false")
    assert "next:" not in said
    for command in ("fetch", "prompts", "generate", "train"):
        assert f"ran {command}" in said
    tables = [line for line in said.splitlines() if "table of " in line]
    assert [line for line in tables if line.endswith((" tune", " eval", " report"))] == [
        "\u250f table of report"
    ]
    assert "advice of tune" not in said and "advice of eval" not in said
    for name in ("tune", "eval"):
        assert f"table of {name}" in (tmp_path / "runs" / f"{name}.txt").read_text()
    assert "talk to it: drafttrain chat" in said
