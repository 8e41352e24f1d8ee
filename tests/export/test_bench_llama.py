"""eval/bench_llama.py with a program in llama.cpp's place."""

from __future__ import annotations

import importlib
import sys

import pytest

from drafttrain.target import Target
from tests.drafters.layer_kinds import make_kind
from tests.files import ROOT, load_json, load_jsonl
from tests.formats.checkpoints import make_checkpoint

EVAL = ROOT / "eval"
# Has every package, and answers with six tokens: a second to read, 0.5 s to decode. Of drafts it
# accepts three tokens in all.
STAND_IN = f"""#!{sys.executable}
import json, sys
if sys.argv[1] == "-c":
    sys.exit()
job = json.load(open(sys.argv[2]))
with open({{jobs!r}}, "a") as file:
    print(json.dumps(job), file=file)
timings = {{{{"prompt_ms": 1000.0, "predicted_ms": 500.0, "predicted_n": 6}}}}
if job["draft"]:
    timings |= {{{{"draft_n": 6, "draft_n_accepted": 3}}}}
count = len(job["prompts"])
answer = {{{{"tokens": [[1, 2, 3, 4, 5, 6]] * count, "timings": [timings] * count}}}}
answer |= {{{{"version": "b1", "instructions": "AVX2"}}}}
json.dump(answer, open(job["answer"], "w"))
"""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(EVAL)
    return importlib.import_module("bench_llama")


def test_times_of_a_server_are_split_at_the_first_token(bench):
    plain = bench.server_answer([1, 2, 3, 4, 5], {"prompt_ms": 2000.0, "predicted_ms": 80.0})
    drafted = bench.server_answer(
        [1, 2, 3, 4, 5],
        {"prompt_ms": 1000.0, "predicted_ms": 40.0, "draft_n": 6, "draft_n_accepted": 2},
    )
    assert bench.figures([plain]) == {
        "reading_seconds": 2.0,
        "ms_per_token": 20.0,
        "accepted_length": 1.0,
    }
    assert bench.figures([drafted])["accepted_length"] == 2.0  # two rounds of two tokens
    assert bench.figures([plain, drafted])["ms_per_token"] == 15.0


def test_tokens_count_until_the_first_difference(bench):
    mine = [bench.Answer([1, 2, 3, 4], 0, 0, 0), bench.Answer([5, 6], 0, 0, 0)]
    theirs = [bench.Answer([1, 2, 9, 4], 0, 0, 0), bench.Answer([5, 6, 7], 0, 0, 0)]
    assert bench.tokens_alike(theirs, mine) == 4


def test_ratios_are_their_times_over_ours(bench):
    times = {
        bench.PLAIN: (10.0, 1.0),
        bench.NGRAM: (8.0, 1.0),
        bench.BFLOAT16: (20.0, 3.0),
        bench.Q8_0: (16.0, 2.0),
    }
    sides = {name: {"ms_per_token": ms, "reading_seconds": s} for name, (ms, s) in times.items()}
    assert bench.ratios(sides) == {
        "decoding_over_bfloat16": 2.0,
        "decoding_over_q8_0": 1.6,
        "drafted_over_best": 2.0,
        "reading_over_bfloat16": 3.0,
        "reading_over_q8_0": 2.0,
    }


@pytest.mark.thorough
@pytest.mark.parametrize("layers", [(1, 2, 3), (0, 1, 2, 3)], ids=["loads", "refused"])
def test_all_sides_answer_the_same_prompts(bench, layers, suite, tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    make_checkpoint(tmp_path / "hf", "llama", num_hidden_layers=4, max_position_embeddings=512)
    target = Target.load(str(tmp_path / "hf"), "float32", "cpu")
    make_kind("eagle3", target, feature_layers=layers).save_pretrained(tmp_path / "drafter")
    python = tmp_path / "python"
    jobs = tmp_path / "jobs.jsonl"
    python.write_text(STAND_IN.format(jobs=str(jobs)))
    python.chmod(0o755)
    words = f"--llama-python {python} --target {tmp_path / 'hf'} --drafter {tmp_path / 'drafter'}"
    words += f" --suite {suite} --lengths 12 20 --prompts 1 --tokens 6 --repeats 1 --tree chain:2"
    output = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["bench_llama.py", *words.split(), "--output", str(output)])
    bench.main()

    result = load_json(output)
    asked = load_jsonl(jobs)
    ours = [bench.PLAIN, bench.NGRAM, bench.HEAD]
    theirs = [bench.BFLOAT16, bench.Q8_0]
    chances = [0.0, 0.0]
    if len(layers) == 3:
        theirs += [bench.LLAMA_HEAD, f"{bench.LLAMA_HEAD}, p-min 0.75"]
        chances += [0.0, 0.75]
        assert result["refused"] is None
    else:
        assert "4 feature layers" in result["refused"]
        assert f"{bench.LLAMA_HEAD}: left out" in capsys.readouterr().out
    assert [job.get("p_min", 0.0) for job in asked] == 2 * chances
    assert [len(prompt) for job in asked for prompt in job["prompts"]] == (
        [12] * 2 * len(theirs) + [20] * 2 * len(theirs)
    )
    for length in ("12", "20"):
        sides = result["sides"][length]
        assert set(sides) == {*ours, *theirs}
        for name in ours:  # drafts change no token
            assert sides[name]["tokens_alike"] == sides[name]["tokens"] == 6
        for name in theirs:
            assert sides[name]["reading_seconds"] == 1.0
            assert sides[name]["ms_per_token"] == 100.0
    least = min(ratios["decoding_over_bfloat16"] for ratios in result["ratios"].values())
    assert result["ratio"] == least
    assert result["llama_cpp"] == {"version": "b1", "instructions": "AVX2"}
