"""What scripts/quickstart.sh shows of the commands that it runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "quickstart.sh"
# Every command prints a table, advice and the command that follows, as the real ones do.
STAND_IN = """#!/usr/bin/env bash
echo "ran $1"
echo "\u250f table of $1"
echo "  -> advice of $1"
echo "next: drafttrain something"
"""


def test_the_quickstart_shows_one_table_and_no_other_next_step(tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(SCRIPT, scripts)
    (scripts / "env.sh").write_text("install_drafttrain() { :; }\n")
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
    assert "next:" not in done.stdout
    for command in ("fetch", "prompts", "generate", "train"):
        assert f"ran {command}" in done.stdout
    tables = [line for line in done.stdout.splitlines() if "table of " in line]
    assert [line for line in tables if line.endswith((" tune", " eval", " report"))] == [
        "\u250f table of report"
    ]
    assert "advice of tune" not in done.stdout and "advice of eval" not in done.stdout
    for name in ("tune", "eval"):
        assert f"table of {name}" in (tmp_path / "runs" / f"{name}.txt").read_text()
    assert "talk to it: drafttrain chat" in done.stdout
