"""`drafttrain verify` as a table of engines: rows that agree, differ, fail and cannot run; resuming; the docs' table."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.cli import main
from drafttrain.drafters.registry import load_drafter
from drafttrain.errors import UserError
from drafttrain.export import engine_runs, tiny_drafters, verify_export
from drafttrain.export.verify_matrix import DrafterRows
from drafttrain.formats.engines import ENGINES
from drafttrain.inference import generate
from drafttrain.target import Target
from scripts import verify_table
from tests.conftest import make_target, make_tokenizer, save_target
from tests.drafters.eagle3_files import make_head
from tests.drafters.layer_kinds import make_kind
from tests.files import ROOT, load_json

RUN = ["verify", "--prompts", "2", "--max-new-tokens", "10"]


def in_all_engines(head, output):
    return [*RUN, *f"--drafter {head} --dtype float32 --engine all --output {output}".split()]


def rows_of(path):
    return {(row["kind"], row["engine"]): row for row in load_json(path)["rows"]}


@pytest.mark.thorough
def test_a_tiny_drafter_of_each_kind_is_verified_in_transformers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tiny_drafters, "shipped_kinds", lambda: ["dflash", "draft_model", "medusa"])
    monkeypatch.setattr(tiny_drafters, "_STEPS", 12)
    output = tmp_path / "kinds.json"
    assert main([*RUN, "--all-kinds", "--engine", "transformers", "--output", str(output)]) == 0
    rows = rows_of(output)
    for kind in ("dflash", "draft_model"):
        row = rows[kind, "transformers"]
        assert row["verdict"] == "same" and row["same_text"] == row["prompts"] == 2 and row["loads"]
        assert row["accepted_length"] == row["ours"] > 1.2 and row["rounds"] < 18
    assert (
        rows["medusa", "transformers"]["verdict"].startswith("unsupported")
        and "│" in capsys.readouterr().out
    )
    assert not list(tmp_path.glob("*.partial.jsonl"))


@pytest.fixture
def pair(tmp_path):
    """A tiny target's folder and an untrained EAGLE-3 head's."""
    target = tiny_drafters.tiny_target(tmp_path / "target")
    head = make_head(target)
    head.config.target["name"] = str(tmp_path / "target")
    head.save_pretrained(tmp_path / "head")
    return target, tmp_path / "head"


def answers(target, change=0, fewer=0):
    """What an engine's side returns for a job: our greedy tokens, `change` added to the last one."""

    def side(python, script, job, environment):
        made = [
            generate(target, None, prompt, max_new_tokens=job["tokens"]).tokens
            for prompt in job["prompts"]
        ]
        made[-1][-1] += change
        rounds = sum(len(each) - 1 for each in made) - fewer
        return {"tokens": made, "rounds": rounds, "runs": [], "counters": {}, "version": "9.9"}

    return side


def test_mlx_drafts_with_vllms_files(tmp_path, monkeypatch, capsys):
    """Its job names mode, folder and ends; a rule of its own refuses a pruned vocabulary."""
    target = make_target(layers=8)
    save_target(target, tmp_path / "target")
    monkeypatch.setattr(verify_export, "missing", lambda python, package: "")
    jobs = []

    def side(python, script, job, environment):
        jobs.append(job)
        return answers(target)(python, script, job, environment)

    monkeypatch.setattr(engine_runs, "run_side", side)
    every = torch.arange(target.vocab_size)
    for name, kept in (("whole", every), ("pruned", every[:200])):
        drafter = make_kind("dflash", target, kept, shake=True, mask_token_id=299)
        drafter.config.target["name"] = str(tmp_path / "target")
        drafter.save_pretrained(tmp_path / name)
    words = ["--target", str(tmp_path / "target"), "--engine", "mlx", "--dtype", "float32"]
    main([*RUN, "--drafter", str(tmp_path / "whole"), *words])
    (job,) = jobs
    assert job["mode"] == "dflash" and job["exact"] and job["ends"] == sorted(target.eos_ids)
    assert main([*RUN, "--drafter", str(tmp_path / "pruned"), *words]) == 2
    assert "MLX drafts over the whole vocabulary" in capsys.readouterr().err


@pytest.mark.thorough
def test_every_engine_has_a_row(pair, tmp_path, monkeypatch, capsys):
    target, head = pair
    output = tmp_path / "m.json"
    calls = []
    monkeypatch.setattr(
        verify_export,
        "missing",
        lambda python, package: "" if package == "vllm" else "no such package",
    )

    def run(side, *more):
        monkeypatch.setattr(engine_runs, "run_side", lambda *args: calls.append(1) or side(*args))
        return main([*in_all_engines(head, output), *more])

    assert run(answers(target, change=1)) == 1  # another text, in float32
    captured = capsys.readouterr()
    assert (
        "eagle3 in vLLM: differs: 1 other texts" in captured.err
        and "2 prompts say little" in captured.err
    )
    rows = rows_of(output)
    assert [engine for _, engine in rows] == [
        "vLLM",
        "SGLang",
        "TensorRT-LLM, Triton",
        "llama.cpp",
        "transformers",
        "MLX",
    ]
    vllm = rows["eagle3", "vLLM"]
    assert (
        vllm["release"] == "9.9"
        and vllm["same_text"] == 1
        and vllm["accepted_length"] == vllm["ours"] == 1.0
    )
    assert "drafttrain does not start it" in rows["eagle3", "SGLang"]["verdict"]
    assert "no such package" in rows["eagle3", "llama.cpp"]["verdict"]
    assert rows["eagle3", "transformers"]["verdict"].startswith("unsupported by release")
    found = load_json(output)
    assert found["ours"]["accepted_length"] == 1.0 and found["vllm"]["accepted_length"] == 1.0
    assert run(answers(target, fewer=1)) == 1  # the same texts in fewer rounds
    assert "differs: accepted length +" in capsys.readouterr().err

    def stops(*_):
        raise UserError("the engine stopped (exit code 3)")

    assert run(stops) == 1
    assert (
        rows_of(output)["eagle3", "vLLM"]["verdict"] == "failed: the engine stopped (exit code 3)"
    )
    assert run(answers(target)) == 0 and len(calls) == 4
    # Answers of one token leave nothing to draft.
    assert run(answers(target), "--max-new-tokens", "1") == 0
    assert "accepted length 0.000, ours 0.000; identical texts on 2 of 2" in capsys.readouterr().out


@pytest.mark.thorough
def test_an_interrupted_run_keeps_its_rows(pair, tmp_path, monkeypatch):
    target, head = pair
    output = tmp_path / "m.json"
    calls = []
    monkeypatch.setattr(verify_export, "missing", lambda python, package: "")

    def side(python, script, job, environment):
        calls.append(script.stem)
        if script.stem == "llama_side" and len(calls) == 2:
            raise KeyboardInterrupt
        more = {"offered": [3, 3], "accepted": [0, 0]}
        return {**answers(target)(python, script, job, environment), **more}

    monkeypatch.setattr(engine_runs, "run_side", side)
    args = in_all_engines(head, output)
    assert main(args) == 130 and not output.exists()
    assert main(args) == 0 and calls == ["vllm_side", "llama_side", "llama_side"]
    rows = rows_of(output)
    assert rows["eagle3", "vLLM"]["verdict"] == rows["eagle3", "llama.cpp"]["verdict"] == "same"
    assert load_json(output)["vllm"]["version"] == "9.9" and not list(
        tmp_path.glob("*.partial.jsonl")
    )


@pytest.mark.thorough
def test_a_draft_model_with_another_vocabulary_runs_in_transformers(tmp_path, capsys):
    target = tiny_drafters.tiny_target(tmp_path / "target")
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=300)).save_pretrained(tmp_path / "draft")
    make_tokenizer(300).save_pretrained(tmp_path / "draft")
    output = tmp_path / "m.json"
    args = [
        "--drafter",
        str(tmp_path / "draft"),
        "--target",
        str(tmp_path / "target"),
        "--dtype",
        "float32",
    ]
    assert main([*RUN, *args, "--engine", "transformers", "--output", str(output)]) == 0
    row = rows_of(output)["draft_model", "transformers"]
    assert row["verdict"] == "same" and row["same_text"] == 2 and row["ours"] is None
    assert (
        load_drafter(str(tmp_path / "draft"), target).fit()["vocabulary"]["drafts_by"] == "tokens"
    )
    assert isinstance(target, Target) and "no run here" in capsys.readouterr().out


def test_flags_that_do_not_go_together_are_refused(pair, tmp_path, capsys):
    _, head = pair
    for more, wanted in (
        (["--drafter", str(head), "--engine", "all", "--format", "vllm"], "format='vllm' is of one format"),
        (["--all-kinds", "--target", "x"], "target='x' goes with --drafter"),
        (["--drafter", str(head), "--engine", "all", "--engine-python", "python"], "must be ENGINE=PATH, ENGINE one of"),
        (["--drafter", str(head), "--engine", "all", "--engine-python", "vllm=/no/file"], "is not an existing file"),
        (["--drafter", str(head), "--engine", "vllm", "--engine-python", "transformers=/x"], "drafttrain's own environment"),
        (["--drafter", str(head), "--engine", "vllm", "--chat-template-kwargs", '{"a": 1}'], "need a target with a chat"),
        (["--all-kinds", "--chat-template-kwargs", '{"foo": 1}'], "goes with --drafter"),
        (["--drafter", str(head), "--engine", "vllm"], "engine='vllm' ran nothing: not run here (no vllm in"),
    ):  # fmt: skip
        assert main([*RUN, *more]) == 2
        assert wanted in capsys.readouterr().err
    assert main(["export", "--drafter", "ngram", "--target", "a/b"]) == 0
    printed = capsys.readouterr().out
    assert (
        '"method": "ngram"' in printed
        and '"method": "suffix"' in printed
        and "arctic-inference" in printed
    )
    assert main(["export", "--drafter", "ngram", "--output", str(tmp_path / "x")]) == 2
    assert main(["export", "--drafter", "lookahead"]) == 2
    assert "they have settings for ngram" in capsys.readouterr().err


def has_ended(status: Path) -> bool:
    """Whether a killed process is gone; a busy machine takes its time to end it."""
    try:
        if "zombie" in status.read_text():
            return True
    except (FileNotFoundError, ProcessLookupError):
        return True
    time.sleep(0.1)
    return False


@pytest.mark.thorough
def test_an_engine_that_is_stopped_leaves_no_process(tmp_path, monkeypatch):
    script = tmp_path / "side.py"
    started = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '3600'])\n"
    script.write_text(
        f"{started}open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))\ntime.sleep(60)"
    )
    for seconds in (
        1,
        8,
        64,
    ):  # a busy machine needs longer to start the engine that is to be stopped
        monkeypatch.setattr(engine_runs, "_TIMEOUT", seconds)
        with pytest.raises(UserError, match=rf"side.py was stopped after {seconds} s"):
            engine_runs.run_side(sys.executable, script, {}, dict(os.environ))
        if (tmp_path / "pid").exists():
            break
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/status")
    assert any(has_ended(status) for _ in range(6000)), status.read_text()


def test_the_script_prints_its_commands():
    script = [
        "bash",
        "scripts/verify_engines_cpu.sh",
        "--dry-run",
        "out",
        "runs/a/",
        "--",
        "--prompts",
        "6",
    ]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    pythons = "--engine-python vllm=.venv-vllm/bin/python llama.cpp=.venv-llama/bin/python mlx=.venv-mlx/bin/python"
    assert first == f"drafttrain verify --all-kinds --engine all {pythons} --output out/kinds.json"
    assert second.startswith(
        "drafttrain verify --drafter runs/a --dtype float32 --prompts 6 --engine all"
    )
    assert second.endswith("--output out/a.json")


def test_the_docs_table_is_the_measured_one():
    written = verify_table.page(load_json(verify_table.MATRIX))
    assert verify_table.PAGE.read_text() == written, "run scripts/verify_table.py"


def test_of_an_engines_traceback_the_exception_is_shown():
    stderr = """INFO starting
Traceback (most recent call last):
  File "engine.py", line 183, in run
    config = make()
             ^^^^^^
pydantic_core.ValidationError: 1 validation error for Config
  Value error, this runner does not support: dspark
"""
    said = "pydantic_core.ValidationError: 1 validation error for Config | Value error, this runner does not support: dspark"
    assert engine_runs._last_words(stderr) == said
    assert engine_runs._last_words("killed\nby something\n") == "killed | by something"


def test_an_engine_that_needs_a_gpu_is_not_started_without_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    kind = SimpleNamespace(
        needs_gpu=("vLLM",),
        verifiable={"vllm": "vllm"},
        unserved=lambda *_: [],
    )
    rows = DrafterRows.__new__(DrafterRows)
    rows.job, rows.kind, rows.form = (
        SimpleNamespace(trained=SimpleNamespace(kind="dspark")),
        kind,
        "",
    )
    monkeypatch.setattr(rows, "prove", lambda form: Path(form))
    row = rows.row(ENGINES["vLLM"], python="python")
    assert (
        row["verdict"].startswith("not run here (it drafts with dspark on GPUs only)")
        and row["loads"] is None
    )
