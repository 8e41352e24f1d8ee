"""results.json, sweeps' summaries, training.json and partial logs: everything that reads them, up to drawing charts."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given

from drafttrain import cli
from drafttrain.drafters.shipping import find_drafter
from drafttrain.evaluation.diagnose import diagnose, print_findings, slow_categories
from drafttrain.evaluation.metrics import (
    is_sweep,
    load_results,
    open_log,
    read_training,
    saved_records,
)
from drafttrain.evaluation.verdicts import against, outliers, verdict_of
from drafttrain.hub.push import check_results
from drafttrain.reports import report_page
from drafttrain.reports.figures import settings_table
from drafttrain.reports.report import identity_line, print_results
from drafttrain.tuning import estimate, sweep
from tests.files import FIXTURES, dump_json, load_json
from tests.fuzz import fuzz, json_faults, outcome, seeds, text_faults

RESULTS = {
    name: load_json(FIXTURES / "results" / f"{name}.json") for name in ("eagle3", "off", "sampled")
}
SWEEP = load_json(FIXTURES / "results" / "sweep" / "summary.json")
TARGET = estimate.Sizes(1e9)
DEVICE = estimate.Device("d", 1e12, 1e14, 1e11, 1e-5)
TRAINED = find_drafter(str(FIXTURES / "drafters" / "eagle3"))


def use(path: Path) -> None:
    """Report, diagnose, estimate and push's check, without drawing and without a model."""
    content = load_results(str(path), sweeps=True)
    if is_sweep(content):
        report_page.make_charts([], [], [content])
        return
    print_results(content)
    print_findings(diagnose(content, {}, [RESULTS["off"]]))
    slow_categories(content)
    report_page.run_names([content, RESULTS["off"]], ["a.json", "b.json"])
    charts = report_page.make_charts([content, RESULTS["off"]], ["a", "b"], [])
    for chart in [*charts, *report_page.main_charts(content)]:
        chart.rows()
        chart.height(True)
    report_page._diffs(content)
    settings_table([content])
    report_page.page([content, RESULTS["off"]], ["a", "b"], [], [["same"], ["same"]])
    report_page.differing([content, RESULTS["off"]])
    verdict_of(content["overall"])
    outliers(content)
    against(content, RESULTS["off"])
    identity_line(content)
    profile = estimate.profile_of(load_results(str(path)))
    estimate.print_rows(
        [estimate.estimate(TARGET, 1e8, profile, DEVICE, 4, 64, 2.0, 1.0)], DEVICE, profile
    )
    check_results(TRAINED, str(path), content)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "results.json"


@fuzz(examples=18)
@given(fault=text_faults(), seed=seeds())
def test_bytes(path, fault, seed):
    random = Random(seed)
    content = json.dumps(random.choice([RESULTS["eagle3"], SWEEP])).encode()
    path.write_bytes(fault.apply(content, random))
    outcome("results.json", fault.name, lambda: use(path))


@fuzz(examples=48)
@given(fault=json_faults(), seed=seeds())
def test_values(path, fault, seed):
    random = Random(seed)
    content = {**random.choice([*RESULTS.values()])}
    if random.random() < 0.7:  # most places are in the prompts
        prompts = content.pop("prompts")
        content = {**fault.apply(content, random), "prompts": prompts}
    else:
        content = fault.apply(content, random)
    dump_json(path, content)
    outcome("results.json", fault.name, lambda: use(path))


@fuzz(examples=24)
@given(fault=json_faults(), seed=seeds())
def test_values_of_a_sweep(path, fault, seed):
    dump_json(path, fault.apply(SWEEP, Random(seed)))
    outcome("sweep's summary.json", fault.name, lambda: use(path))


@fuzz(examples=24)
@given(fault=json_faults(), seed=seeds())
def test_cells_of_a_sweep(path, fault, seed):
    cell = load_json(next(iter((FIXTURES / "results" / "sweep").glob("a*.json"))))
    dump_json(path, fault.apply(cell, Random(seed)))

    def call():
        results = sweep.finished(path, {**cell["sweep"], "target_files": "hash"})
        if results is not None:
            figures = {name: results["overall"].get(name) for name in sweep.FIGURES}
            row = {
                "cell": results["sweep"]["cell"],
                "spec": results["decoding"]["tree"]["spec"],
                **figures,
            }
            sweep.crossovers([row])

    outcome("sweep's cell", fault.name, call)


@fuzz(examples=24)
@given(fault=json_faults(), seed=seeds())
def test_values_of_training_json(path, fault, seed):
    record = load_json(FIXTURES / "run" / "training.json")
    dump_json(path.with_name("training.json"), fault.apply(record, Random(seed)))
    outcome(
        "training.json",
        fault.name,
        lambda: diagnose(RESULTS["sampled"], read_training(path.parent)),
    )


@fuzz(examples=24)
@given(fault=json_faults(), damage=text_faults(), seed=seeds())
def test_partial_logs(path, fault, damage, seed):
    random = Random(seed)
    log = path.with_name("results.json.partial.jsonl")
    content = (FIXTURES / "results" / "killed.json.partial.jsonl").read_bytes()
    key = json.loads(content.split(b"\n")[0])["settings"]
    if random.random() < 0.5:
        rows = [json.loads(line) for line in content.split(b"\n")[:-1]]
        content = "".join(json.dumps(row) + "\n" for row in fault.apply(rows, random)).encode()
        name = fault.name
    else:
        content = damage.apply(content, random)
        name = damage.name
    log.write_bytes(content)

    def call():
        saved = open_log(path, key)
        for records in saved_records(saved).values():
            assert all(record["sides"]["drafter"]["tokens"] >= 0 for record in records)
        saved.close()

    outcome("partial log of eval", name, call)


@pytest.mark.parametrize("command", ["report", "diagnose", "estimate", "push"])
@pytest.mark.parametrize(
    "content", ["[]", '{"cells": []}', '{"overall": {}}', json.dumps(SWEEP), "null", "NaN"]
)
def test_other_content_is_refused_by_every_command(tmp_path, monkeypatch, capsys, command, content):
    (tmp_path / "r.json").write_text(content)
    monkeypatch.chdir(tmp_path)
    words = {
        "report": ["report", "r.json", "--output", "r.png"],
        "diagnose": ["diagnose", "r.json"],
        "estimate": [
            "estimate",
            "--results",
            "r.json",
            "--target-params",
            "1e9",
            "--drafter-params",
            "1e8",
        ],
        "push": [
            "push",
            "--drafter",
            TRAINED.folder.as_posix(),
            "--repo",
            "a/b",
            "--results",
            "r.json",
            "--dry-run",
        ],
    }[command]
    assert cli.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1 and [
        path.name for path in tmp_path.iterdir()
    ] == ["r.json"]


def test_categories_are_shown_as_they_are(capsys):
    names = ["[/bold]", "[red]x[/red]", ":smile:", "[link=http://a]", "é" * 30]
    content = {
        **RESULTS["eagle3"],
        "categories": dict.fromkeys(names, RESULTS["eagle3"]["categories"]["chat"]),
    }
    content |= {"target": "[/]", "drafter": "[bold]d"}
    print_results(content)
    print_findings(
        [*diagnose(content), {"cause": "[red]", "figures": "[/red]", "advice": ":x:", "off": []}]
    )
    shown = capsys.readouterr().out
    for name in (*names[:4], "[/] + [bold]d", "[red]: [/red]", ":x:"):
        assert name in shown


def test_a_tuned_result_is_printed_as_it_is(capsys):
    device = estimate.Device("[/bold]", 1e12, 1e14, 1e11, 1e-5)
    profile = estimate.profile_of(RESULTS["eagle3"])
    estimate.print_rows(
        [estimate.estimate(TARGET, 1e8, profile, device, 1, 64, 2.0, None)], device, profile
    )
    assert "[/bold]: estimate" in capsys.readouterr().out


@fuzz(examples=24)
@given(fault=json_faults(), seed=seeds())
def test_values_of_a_targets_config(path, fault, seed):
    config = load_json(FIXTURES / "target" / "config.json")
    file = path.with_name("config.json")
    dump_json(file, fault.apply(config, Random(seed)))
    outcome("estimate: config.json", fault.name, lambda: estimate.sizes_of(str(file)))


def test_a_drafter_with_torn_weights_is_not_counted(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    said = outcome("estimate: weights", "another file", lambda: estimate.drafter_params(tmp_path))
    assert "model.safetensors" in said and "--drafter-params" in said
