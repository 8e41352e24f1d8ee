"""Draft lengths by batch size, from a sweep and from an estimate, as vLLM and SGLang take them."""

from __future__ import annotations

import pytest

from drafttrain.cli import main
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.export.batch_schedule import Entry, batch_schedule, sglang_config, vllm_keys
from drafttrain.export.engine_runs import RUNS, Serving, Vllm
from tests.files import FIXTURES, dump_json

RESULTS = FIXTURES / "results"


def write_sweep(path, rows):
    cells = [
        {"cell": {"batch_size": size}, "spec": spec, "speedup_vs_fastest": speedup}
        for size, spec, speedup in rows
    ]
    dump_json(path, {"axes": {}, "cells": cells, "crossover": []})
    return path


def test_the_fastest_chain_of_each_batch_size(tmp_path):
    rows = [
        *((1, f"chain:{n}", speedup) for n, speedup in ((1, 1.3), (3, 1.9), (5, 1.8))),
        *((4, f"chain:{n}", speedup) for n, speedup in ((1, 1.2), (3, 1.4), (5, 1.3))),
        *((16, f"chain:{n}", speedup) for n, speedup in ((1, 1.1), (3, 0.9), (5, 0.7))),
        *((64, f"chain:{n}", speedup) for n, speedup in ((1, 0.9), (3, 0.6), (5, None))),
        (1, "dynamic:4,4,8", 3.0),  # engines that follow a schedule draft chains
    ]
    schedule = batch_schedule(write_sweep(tmp_path / "summary.json", rows))
    assert schedule == [Entry(1, 15, 3), Entry(16, 63, 1), Entry(64, 4096, 0)]
    assert vllm_keys(schedule) == {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 15, 3], [16, 63, 1], [64, 4096, 0]],
    }
    assert sglang_config(schedule) == {
        "1": {"candidate_steps": [3]},
        "16": {"candidate_steps": [1]},
        "64": {"candidate_steps": [0]},
    }
    tree = TreeSpec.parse("dynamic:4,4,8")
    options = {"speculative-algorithm": "EAGLE3"}
    flags = RUNS["SGLang"].command(Serving("T", "D", tree, options, schedule))
    assert "--speculative-eagle-topk 1" in flags and "--speculative-num-steps 3" in flags
    assert "--speculative-adaptive --speculative-adaptive-config adaptive.json" in flags.replace(
        " \\\n ", ""
    )
    kept = Vllm().settings(Serving("T", "D", tree, {"method": "eagle3"}, schedule))
    assert kept["num_speculative_tokens_per_batch_size"][0] == [1, 15, 3]


def test_of_earlier_files():
    assert batch_schedule(RESULTS / "sweep" / "summary.json") == [Entry(1, 4096, 1)]
    assert batch_schedule(RESULTS / "estimate.json")[0].first == 1


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"cells": []}',
        '{"rows": [1]}',
        '{"cells": [{"cell": 1}]}',
        "[]",
        "x",
        '{"rows": 3}',
        '{"rows": [{"batch_size": "x", "length": 1}, {"batch_size": 2, "length": 1}]}',
        '{"rows": [{"batch_size": 0, "length": 1}]}',
        '{"rows": [{"batch_size": 1, "length": -1}]}',
    ],
)
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "f.json").write_text(content)
    with pytest.raises(UserError, match="schedule="):
        batch_schedule(tmp_path / "f.json")


@pytest.mark.parametrize(
    ("drafter", "form"),
    [("eagle3", "gguf"), ("mlp_speculator", "vllm"), ("dflash", "vllm")],
)
def test_a_schedule_that_no_recipe_follows_is_refused(tmp_path, capsys, drafter, form):
    schedule = ["--schedule", str(RESULTS / "estimate.json")]
    words = ["export", "--drafter", str(FIXTURES / "drafters" / drafter), *schedule]
    assert main([*words, "--format", form, "--output", str(tmp_path / "out")]) == 2
    assert "drafts this drafter by batch size" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    push = ["push", *words[1:], "--repo", "a/b", "--without-evaluation", "--dry-run"]
    if drafter == "dflash":
        assert main([*push, "--output", str(tmp_path / "out")]) == 2
    assert main(["export", "--drafter", "ngram", *schedule]) == 2
    assert "without --format, --output and --schedule" in capsys.readouterr().err


def test_a_schedule_beyond_the_heads_is_refused(tmp_path, capsys):
    path = write_sweep(tmp_path / "summary.json", [(1, "chain:9", 2.0)])
    words = ["--drafter", str(FIXTURES / "drafters" / "medusa"), "--output", str(tmp_path / "out")]
    assert main(["export", *words, "--format", "vllm", "--schedule", str(path)]) == 2
    assert "schedule=9: this drafter reaches" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_an_export_prints_the_schedule(tmp_path, capsys, form):
    words = ["--drafter", str(FIXTURES / "drafters" / "eagle3"), "--output", str(tmp_path / "out")]
    schedule = ["--schedule", str(RESULTS / "estimate.json")]
    assert main(["export", *words, "--format", form, *schedule]) == 0
    followed = {"vllm": "tokens_per_batch_size", "sglang": "--speculative-adaptive-config"}
    assert followed[form] in capsys.readouterr().out
