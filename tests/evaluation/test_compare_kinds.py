"""eval/compare_kinds.py: trains, measures, records what fails, and goes on where it stopped."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import yaml

from drafttrain import cli
from tests.evaluation.test_runner import suite  # noqa: F401 - a fixture
from tests.training.test_train import write_data

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "eval")
    monkeypatch.delitem(sys.modules, "compare_kinds", raising=False)
    return importlib.import_module("compare_kinds")


@pytest.fixture
def compare(script, monkeypatch):
    """The script, its processes run in this one; `ran` lists them."""
    module = script
    module.ran = []

    def execute(command, log, minutes):
        words = command[2:] if command[1].endswith("train.py") else command[3:]
        module.ran.append(log.stem)
        if status := cli.run(words if words[0] == "eval" else ["train", *words]):
            raise RuntimeError(f"exit status {status}")

    monkeypatch.setattr(module, "execute", execute)
    return module


@pytest.mark.thorough
def test_all_kinds_are_compared_and_failures_stop_nothing(compare, target, target_dir, suite, tmp_path, capsys):  # noqa: F811
    data = write_data(tmp_path / "data", target)
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    common = {"per_device_train_batch_size": 4, "use_cpu": True, "dtype": "float32", "decode_prompts": 1}
    good = {"kind": "eagle3", "output_dir": "x", "drafter": {"ttt_steps": 2}, **common}
    (recipes / "eagle3.yaml").write_text(yaml.safe_dump(good))
    words = ["--target", str(target_dir), "--data", str(data), "--minutes", "0.02", "--recipes", str(recipes)]
    words += [
        "--kinds",
        "eagle3",
        "draft_model",
        "ngram",
        "--suite",
        str(suite),
        "--limit",
        "2",
        "--max-new-tokens",
        "6",
    ]
    words += ["--trees", "chain:2", "--temperatures", "0", "1", "--dtype", "float32"]
    for name in ("folder", "output", "table", "plot"):
        ending = {"folder": "", "output": ".json", "table": ".md", "plot": ".png"}[name]
        words += [f"--{name}", str(tmp_path / f"out_{name}{ending}")]
    args = compare.arguments(words)
    summary = compare.run(args)

    assert summary == json.loads(args.output.read_text())
    assert summary["settings"] == ["T=0 chain:2", "T=1 chain:2"]
    done = summary["trainings"]["eagle3"]
    assert done["steps"] > 0 and done["tokens_seen"] > 0 and done["tokens_per_second"] > 0 and done["parameters"] > 0
    assert "no recipe" in summary["trainings"]["draft_model"]["error"]
    assert list(summary["drafters"]) == ["ngram", "eagle3", "eagle3+ngram"]
    for entry in summary["drafters"].values():
        assert list(entry["cells"]) == summary["settings"]
        for cell in entry["cells"].values():
            assert cell["accepted_length"] >= 1 and cell["speedup"] > 0 and cell["drafting_ms_per_round"] >= 0
            low, high = cell["accepted_length_interval"]
            assert low <= cell["accepted_length"] <= high
        assert entry["cells"]["T=0 chain:2"]["identical_outputs"] == 1.0
    assert summary["drafters"]["eagle3"]["cells"]["T=1 chain:2"]["tree"] == "chain:2@sample"
    assert str(tmp_path) not in json.dumps({**summary, "command": [], "target": "", "data": "", "suite": ""})
    table = args.table.read_text()
    assert table.count("| eagle3+ngram |") == 2 and "| draft_model | failed: no recipe" in table
    assert args.plot.stat().st_size > 1000

    # A cell that is lost is measured again, and a recipe that comes is trained; nothing else runs.
    (args.folder / summary["drafters"]["ngram"]["cells"]["T=0 chain:2"]["file"]).unlink()
    bad = {"kind": "draft_model", "output_dir": "x", "drafter": {"layer": [0]}, **common}
    (recipes / "draft_model.yaml").write_text(yaml.safe_dump(bad))
    compare.ran.clear()

    def fails(command, log, minutes, execute=compare.execute):
        try:
            execute(command, log, minutes)
        except Exception as error:
            raise RuntimeError(str(error)) from error

    compare.execute = fails
    again = compare.run(args)
    assert [name.partition("-")[0] for name in compare.ran] == ["draft_model", "ngram_T_0_chain_2"]
    assert "unknown key drafter.layer" in again["trainings"]["draft_model"]["error"]
    assert again["drafters"]["eagle3"] == summary["drafters"]["eagle3"]


@pytest.mark.thorough
def test_a_process_that_fails_leaves_its_last_line(script, tmp_path):
    log = tmp_path / "logs" / "one.log"
    with pytest.raises(RuntimeError, match=r"exit status 3: no good, see one\.log"):
        script.execute(["bash", "-c", "echo fine; echo no good >&2; exit 3"], log, 1)
    with pytest.raises(RuntimeError, match="took more than"):
        script.execute(["sleep", "5"], log, 0.005)
