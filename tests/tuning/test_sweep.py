from __future__ import annotations

import json
from argparse import Namespace

import pytest

from drafttrain import cli
from drafttrain.evaluation import runner
from drafttrain.evaluation.suites import load_suite
from drafttrain.evaluation.verdicts import crossovers
from drafttrain.tuning import sweep
from tests.files import ROOT, load_json


@pytest.fixture
def command(target_dir, suite, tmp_path):
    def arguments(*more):
        return ["sweep", "--target", str(target_dir), "--drafter", "ngram", "--suite", str(suite), "--dtypes", "float32",
                "--max-new-tokens", "6", "--limit", "2", "--output", str(tmp_path / "sweep"), *more]  # fmt: skip

    return arguments


@pytest.mark.thorough
def test_a_sweep_saves_every_cell_and_goes_on(command, target_dir, tmp_path, monkeypatch, capsys):
    arguments = command(
        "--lengths", "1,2", "--batch-sizes", "1,2", "--contexts", "0,64", "--temperatures", "0,1"
    )
    evaluate = runner.evaluate
    calls = []

    def stop_at_the_third(settings, *rest):
        calls.append(settings.output)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return evaluate(settings, *rest)

    monkeypatch.setattr(runner, "evaluate", stop_at_the_third)
    assert cli.main(arguments) == 130
    assert cli.main(arguments) == 0
    # chain:1 alone, then chain:2, temperature 1, batch 2, context 64: five cells, the first two kept
    assert len(calls) == 6
    assert calls[3] == calls[2]
    summary = load_json(tmp_path / "sweep" / "summary.json")
    assert [row["cell"]["tree"] for row in summary["cells"]].count("chain:2") == 1
    assert len({row["file"] for row in summary["cells"]}) == len(summary["cells"]) == 5
    for row in summary["cells"]:
        results = load_json(tmp_path / "sweep" / row["file"])
        assert results["overall"]["accepted_length"] == row["accepted_length"]
        assert results["decoding"]["batch_size"] == row["cell"]["batch_size"]
        assert results["decoding"]["temperature"] == row["cell"]["temperature"]
        assert all(
            record["prompt_tokens"] >= row["cell"]["context"] for record in results["prompts"]
        )
    assert [each["axis"] for each in summary["crossover"]] == [
        "batch_size",
        "context",
        "temperature",
    ]
    assert (
        summary["target"] == str(target_dir)
        and summary["max_new_tokens"] == 6
        and summary["limit"] == 2
    )
    assert {"device", "threads", "suite", "command", "date", "machine"} <= summary.keys()
    shown = capsys.readouterr().out
    assert "speed-up" in shown and "inconclusive" in shown


def test_cells_that_were_measured_without_ngrams_alone_stay_finished(suite):
    def key(baselines):
        settings = {"target": "t", "drafter": "ngram", "device": "cpu", "limit": 2, "seed": 0}
        args = Namespace(**settings, max_new_tokens=4, baselines=baselines)
        return sweep.key_of(args, {"tree": "chain:2"}, load_suite(str(suite)))

    assert key("autoregressive,ngram") == key("autoregressive") != key("none")


def test_cells_of_a_target_whose_files_changed_are_measured_again(tmp_path):
    path = tmp_path / "cell.json"
    note = {"cell": {}, "key": "k", "target_files": "a"}
    results = load_json(ROOT / "tests" / "fixtures" / "results" / "eagle3.json")
    for earlier in (note, {"cell": {}, "key": "k"}):  # 0.1 noted no files
        path.write_text(json.dumps({**results, "sweep": earlier}))
        assert sweep.finished(path, note) is not None
    path.write_text(json.dumps({**results, "sweep": note}))
    assert sweep.finished(path, {**note, "target_files": "b"}) is None
    assert sweep.finished(path, {**note, "key": "other"}) is None


def test_axes_one_at_a_time_or_crossed():
    axes = {
        "dtype": ["a", "b"],
        "tree": ["x", "y"],
        "temperature": [0.0],
        "batch_size": [1, 2, 4],
        "context": [0],
    }
    single = list(sweep.cells(axes, False))
    crossed = list(sweep.cells(axes, True))
    assert (len(single), len(crossed)) == (5, 12)
    assert [cell["dtype"] for cell in single] == ["a"] * 4 + [
        "b"
    ]  # a model is loaded once per dtype


def cell(batch, speedup, tree="chain:2"):
    return {"cell": {"batch_size": batch, "tree": tree}, "speedup_vs_fastest": speedup}


def test_the_crossover_is_read_off_between_two_sizes():
    rows = [
        cell(1, 1.5),
        cell(4, 1.2),
        cell(16, 0.8),
        cell(1, 1.5, "chain:4"),
        cell(8, 1.1, "chain:4"),
    ]
    rows += [cell(1, 0.9, "chain:8"), cell(2, 0.8, "chain:8"), cell(1, 2.0, "alone")]
    found = {each["cell"]["tree"]: each["batch_size"] for each in crossovers(rows)}
    assert found == {"chain:2": 8.0, "chain:4": None, "chain:8": 0}


def test_every_axis_of_numbers_has_its_crossover(capsys):
    base = {"dtype": "float32", "tree": None, "temperature": 0.0, "batch_size": 1, "context": 0}
    figures = {
        "spec": "chain:2",
        "accepted_length": 2.0,
        "tokens_per_second": 9.0,
        "prompts": 8,
        "acceptance_rate": 0.5,
    }
    rows = [
        {"cell": base | {"context": context}, **figures, "speedup_vs_fastest": speedup, "speedup": {"autoregressive": speedup},
         "confidence": {"speedup": {"autoregressive": [speedup - 0.15, speedup + 0.15]}}}
        for context, speedup in ((0, 1.5), (512, 1.1), (2048, 0.8))
    ]  # fmt: skip
    (found,) = crossovers(rows)
    assert (found["axis"], found["cell"].get("context"), found["cell"]["batch_size"]) == (
        "context",
        None,
        1,
    )
    assert found["verdict"] == "stops paying between context 0 and 2048 (inconclusive at 512)"
    sweep.print_summary(rows)
    shown = capsys.readouterr().out
    assert "no crossover: one batch size was measured" in shown
    assert all(state in shown for state in ("pays", "does not pay", "inconclusive"))

    # Without baselines nothing crosses, however many sizes there were.
    for row, size in zip(rows, (1, 4, 16), strict=True):
        row |= {"cell": base | {"batch_size": size}, "speedup_vs_fastest": None, "speedup": {}}
        row["confidence"] = {}
    sweep.print_summary(rows)
    assert "one batch size" not in capsys.readouterr().out


def test_prompts_are_lengthened_to_a_few_tokens(target, suite):
    loaded = load_suite(str(suite))
    longer = sweep.lengthen(target, loaded, 200, 8)
    for before, after in zip(loaded.questions, longer.questions, strict=True):
        count = len(after.prompt(target.tokenizer))
        assert 200 <= count < 320
        assert after.turns[0].endswith(before.turns[0])
        assert after.turns[1:] == before.turns[1:]
    assert longer.digest != loaded.digest
    assert sweep.lengthen(target, loaded, 0, 8) is loaded


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--batch-sizes", "1,4"),
            "4 prompts at a time take as many questions, but limit=2; raise --limit",
        ),
        (("--trees", "bush"), "tree='bush' is not a tree"),
        (("--contexts", "9000"), "prompt has 9000 tokens"),
    ],
)
def test_bad_input_is_named(command, capsys, more, message):
    assert cli.main(command(*more)) == 2
    assert message in capsys.readouterr().err
