"""eval/compare_kinds.py: trains, measures, records what fails, and goes on where it stopped."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading

import pytest
import yaml

from drafttrain import cli
from drafttrain.errors import UserError
from drafttrain.training.limits import TimeBudget
from tests.files import ROOT, load_json
from tests.training.runs import write_data


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


@pytest.mark.slow
def test_all_kinds_are_compared_and_failures_stop_nothing(
    compare,
    target,
    target_dir,
    suite,
    tmp_path,
    capsys,
):
    data = write_data(tmp_path / "data", target)
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    common = {
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "dtype": "float32",
        "decode_prompts": 1,
    }
    good = {"kind": "eagle3", "output_dir": "x", "drafter": {"ttt_steps": 2}, **common}
    (recipes / "eagle3.yaml").write_text(yaml.safe_dump(good))
    words = [
        "--target",
        str(target_dir),
        "--data",
        str(data),
        "--minutes",
        "0.02",
        "--recipes",
        str(recipes),
    ]
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
    (tmp_path / "page.md").write_text(f"before\n{compare.BEGIN}\nold table\n{compare.END}\nafter\n")
    words += ["--page", str(tmp_path / "page.md")]
    for name in ("folder", "output", "table", "plot"):
        ending = {"folder": "", "output": ".json", "table": ".md", "plot": ".png"}[name]
        words += [f"--{name}", str(tmp_path / f"out_{name}{ending}")]
    args = compare.arguments(words)
    summary = compare.run(args)

    assert summary == load_json(args.output)
    assert summary["settings"] == ["T=0 chain:2", "T=1 chain:2"]
    done = summary["trainings"]["eagle3"]
    assert (
        done["steps"] > 0
        and done["tokens_seen"] > 0
        and done["tokens_per_second"] > 0
        and done["parameters"] > 0
    )
    assert "no recipe" in summary["trainings"]["draft_model"]["error"]
    assert list(summary["drafters"]) == ["ngram", "eagle3", "eagle3+ngram"]
    for entry in summary["drafters"].values():
        assert list(entry["cells"]) == summary["settings"]
        for cell in entry["cells"].values():
            assert (
                cell["accepted_length"] >= 1
                and cell["speedup"] > 0
                and cell["drafting_ms_per_round"] >= 0
            )
            low, high = cell["accepted_length_interval"]
            assert low <= cell["accepted_length"] <= high
        assert entry["cells"]["T=0 chain:2"]["identical_outputs"] == 1.0
    assert summary["drafters"]["eagle3"]["cells"]["T=1 chain:2"]["tree"] == "chain:2@sample"
    assert str(tmp_path) not in json.dumps(
        {**summary, "command": [], "target": "", "data": "", "suite": ""}
    )
    table = args.table.read_text()
    assert table.count("| eagle3+ngram |") == 2 and "| draft_model | failed: no recipe" in table
    assert args.plot.stat().st_size > 1000
    page = args.page.read_text()
    assert page.startswith("before\n") and page.endswith("after\n") and "old table" not in page
    assert "| drafter | parameters (M) | chain:2: accepted | beyond `eagle3` | speed-up |" in page
    beyond = summary["drafters"]["eagle3+ngram"]["cells"]["T=0 chain:2"]["beyond"][
        "accepted_length"
    ]
    lengths = [
        summary["drafters"][name]["cells"]["T=0 chain:2"]["accepted_length"]
        for name in ("eagle3+ngram", "eagle3")
    ]
    assert (
        beyond[0] == pytest.approx(lengths[0] - lengths[1], abs=2e-4)
        and beyond[1] <= beyond[0] <= beyond[2]
    )
    assert "beyond" not in summary["drafters"]["eagle3"]["cells"]["T=0 chain:2"]

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


def test_differences_are_paired(script):
    """Both sides vary from prompt to prompt, their difference does not."""
    base = [[10.0 * k, 10.0, 10.0 * k, 1.0, 10.0 * k, 2.0] for k in (1, 2, 3, 4)]
    more = [[row[0] + 5, *row[1:3], 0.5, *row[4:]] for row in base]
    found = script.differences({"by_prompt": more}, {"by_prompt": base})
    assert found["accepted_length"] == [0.5, 0.5, 0.5] and found["speedup"] == [2.0, 2.0, 2.0]
    assert script.differences({"by_prompt": more[:3]}, {"by_prompt": base}) == {}


def test_trainings_share_cores_but_no_core_is_shared(script, tmp_path, monkeypatch):
    free = sorted(os.sched_getaffinity(0))
    words = ["--data", "d", "--minutes", "1", "--output", str(tmp_path / "out.json")]
    with pytest.raises(
        UserError, match=r"cores=\[999\]: this process may use .*; choose among them"
    ):
        script.arguments([*words, "--cores", "999"])
    args = script.arguments([*words, "--cores", str(free[0])])
    args.cores = [7, 8]
    busy = set()
    seen = []
    together = threading.Barrier(2)

    def train(kind, args, core):
        assert core not in busy
        busy.add(core)
        seen.append((kind, core))
        if kind in ("a", "b"):  # each waits for the other, so that both cores are in use
            together.wait(600)
        busy.remove(core)
        if kind == "bad":
            raise RuntimeError("no good")
        return {"folder": kind}

    monkeypatch.setattr(script, "train", train)
    found = script.train_all(["a", "b", "bad", "c"], args)
    assert list(found) == ["a", "b", "bad", "c"] and found["bad"] == {"error": "no good"}
    assert {core for _, core in seen} == {7, 8} and len(seen) == 4


@pytest.mark.thorough
def test_a_core_and_cpu_time_reach_the_training(script, tmp_path, monkeypatch, capsys):
    log = tmp_path / "one.log"
    core = min(os.sched_getaffinity(0))
    script.execute(
        [
            sys.executable,
            "-c",
            "import os; print(os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])",
        ],
        log,
        1,
        core,
    )
    assert log.read_text() == f"{{{core}}} 1\n"
    inner = tmp_path / "inner.py"
    inner.write_text(
        "import sys; from drafttrain.training.limits import TimeBudget; print(TimeBudget.clock.__name__, sys.argv[1:])"
    )
    monkeypatch.setattr(TimeBudget, "clock", TimeBudget.clock)  # which is put back
    monkeypatch.setattr(sys, "argv", ["-c", str(inner), "x=1"])
    exec(script.CPU_TIME, {})
    assert capsys.readouterr().out == "process_time ['x=1']\n"
