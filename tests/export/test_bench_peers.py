"""eval/bench_peers.py with programs in the peers' places."""

from __future__ import annotations

import importlib
import sys
from functools import partial

import pytest

from tests.files import ROOT, load_json
from tests.formats.checkpoints import make_checkpoint

EVAL = ROOT / "eval"
# Answers every prompt with its own tokens, reversed; a second each.
STAND_IN = f"""#!{sys.executable}
import json, sys
job = json.load(open(sys.argv[2]))
print("a library's line", flush=True)
print(json.dumps({{"version": "1.2"}}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    tokens = job["prompts"][order["prompt"]][::-1]
    print(json.dumps({{"tokens": tokens, "seconds": 1.0}}), flush=True)
"""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(EVAL)
    return importlib.import_module("bench_peers")


def stand_in(folder):
    path = folder / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return str(path)


def test_a_side_answers_in_a_process_of_its_own(bench, tmp_path):
    job = {"decoder": "economize", "target": "T", "prompts": [[1, 2, 3], [4, 5]], "tokens": 8}
    side = bench.Side(stand_in(tmp_path), job, tmp_path, 2)
    kept = {}
    assert side.version == "1.2"
    assert bench.run(side, 2, 1, kept) == {"tokens_per_second": 2.5}
    assert kept == {0: [3, 2, 1], 1: [5, 4]}
    side.close()
    assert side.process.returncode == 0


def test_a_side_that_ends_early_or_changes_its_answer_ends_the_benchmark(bench, tmp_path):
    job = {"decoder": "economize", "target": "T", "prompts": [[1, 2, 3]], "tokens": 8}
    with pytest.raises(SystemExit, match="a side ended early"):
        bench.Side("/bin/true", job, tmp_path, 1)
    with pytest.raises(SystemExit, match="prompt 0 has another answer now"):
        bench.keep({0: [3, 2, 1]}, 0, [3, 2])


def test_lossless_prompts_and_the_headline_are_of_the_same_run(bench):
    def side(answers, rate, threads, kept):
        for prompt, tokens in enumerate(answers):
            bench.keep(kept, prompt, tokens)
        return {"tokens_per_second": rate * threads}

    right = [[1, 2], [3]]
    sides = {
        "transformers": partial(side, right, 10.0),
        "ngram": partial(side, right, 24.0),
        "economize": partial(side, [[1, 2], [4]], 12.0),
    }
    found = bench.measure(sides, 2, 2, 3)
    assert found["ngram"]["tokens_per_second"] == 48.0
    assert [found[name]["lossless_prompts"] for name in sides] == [2, 2, 1]
    assert bench.headline(found) == 2.0  # over the fastest other side, lossless or not
    table = bench.table({2: found}, 2)
    assert "| 2 | ngram | 48.0 | 2.40x | 2 of 2 |" in table
    assert "| 2 | economize | 24.0 | 1.20x | 1 of 2 |" in table


@pytest.mark.slow  # three processes that import torch
def test_our_sides_equal_transformers_on_a_tiny_target(bench, tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "target", "llama", max_position_embeddings=512)
    output = tmp_path / "peers.json"
    words = ["bench_peers.py", "--target", str(tmp_path / "target"), "--output", str(output)]
    words += ["--prompts", "2", "--tokens", "6", "--repeats", "1", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", [*words, "--peer", f"economize={stand_in(tmp_path)}"])
    bench.main()
    found = load_json(output)
    sides = found["sides"]["1"]
    assert [sides[name]["lossless_prompts"] for name in ("transformers", "plain", "ngram")] == [
        2,
        2,
        2,
    ]
    assert sides["economize"]["lossless_prompts"] == 0
    assert found["versions_of_sides"]["economize"] == "1.2"


@pytest.mark.parametrize("word", ["economize", "vllm=/bin/python", "flashspec="])
def test_unknown_peers_are_refused(bench, word, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", "--peer", word])
    with pytest.raises(SystemExit):
        bench.main()
    assert (
        "is not NAME=PYTHON with one of economize, flashspec, llama.cpp" in capsys.readouterr().err
    )
