"""train, tune, evaluate, export and push from Python: options of the commands, typed results, no output."""

from __future__ import annotations

import inspect
import io
import logging
import os
import pydoc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from drafttrain import (
    Drafter,
    Target,
    evaluate,
    export,
    generate,
    load_drafter,
    push,
    train,
    tune,
)
from drafttrain.command import cli_parameters
from drafttrain.commands import function_of
from drafttrain.config import TrainConfig
from drafttrain.errors import UserError
from drafttrain.outcome import conclude, concluded
from drafttrain.progress import Progress
from scripts import run_notebook
from tests.conftest import make_target
from tests.drafters.helpers import make_drafter
from tests.files import ROOT
from tests.training.runs import write_data

STRICT = """
from pathlib import Path
from drafttrain import Drafter, Target, evaluate, export, generate, load_drafter, push, stream, train, tune
target = Target.from_pretrained("smollm2-135m", dtype="float32")
folder: Path = train("recipe.yaml", data="data", output_dir="out", max_steps=4, progress=True).output_dir
tree: str = tune(target, folder, dry_run=True).tree
length: float = evaluate(target, "ngram", limit=3, baselines=["autoregressive"])["overall"]["accepted_length"]
drafter = Drafter.from_pretrained(folder)
drafter.save_pretrained("copy")
text: str = generate(target, "hi", drafter, max_new_tokens=3, no_repeat_ngram_size=3).text
texts: list[str] = [out.text for out in generate(target, ["hi", "ho"], load_drafter("ngram", target))]
several = generate(target, [1, 2, 3], do_sample=True, num_return_sequences=2)
speed: float = several[0].stats.accepted_length
pieces: list[str] = [piece.upper() for piece in stream(target, [{"role": "user", "content": "hi"}], temperature=0.7)]
written: tuple[Path, ...] = export(folder, "vllm", "out").files
url: str = push(folder, "user/name", dry_run=True, output="x").url
"""


@pytest.mark.parametrize(
    ("command", "function"),
    [("eval", evaluate), ("tune", tune), ("export", export), ("push", push)],
)
def test_a_function_is_the_command(command, function):
    assert inspect.signature(function) == inspect.signature(function_of(command))
    flags = {one.name for one in cli_parameters(function_of(command))}
    assert {*inspect.signature(function).parameters} - flags <= {"tokenizer", "progress"}


def test_options_of_train_are_keys_of_recipes():
    known = {one.name for one in (*fields(TrainConfig), *fields(TrainingArguments))}
    parameters = {*inspect.signature(train).parameters}
    named = parameters - {"recipe", "overrides", "progress", "others"}
    assert named <= known and len(named) > 12


def test_train_and_export_are_modules_and_functions():
    """The import system sets the modules as attributes of the package, whatever is imported first."""
    import drafttrain.export.serving_recipes
    import drafttrain.train as module

    assert module is drafttrain.train is train is sys.modules["drafttrain.train"] and callable(
        module.setup
    )
    for called in (train, export):
        name = called.__name__.rpartition(".")[2]
        assert inspect.signature(called) == inspect.signature(function_of(name))
        shown = pydoc.plain(pydoc.render_doc(called))
        assert f"{name}({next(iter(inspect.signature(called).parameters))}" in shown
        assert "Args:" in shown and "check_pretraining" not in shown
    with pytest.raises(UserError, match=r"config='/no/recipe\.yaml': no such file"):
        train("/no/recipe.yaml", data="x")


@pytest.mark.thorough
def test_a_loaded_target_takes_the_place_of_its_name(tmp_path, capfd):
    target = make_target()
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    (tmp_path / "suite.jsonl").write_text(
        '{"question_id": "a", "category": "chat", "turns": ["Hello there"]}\n'
    )
    options = {
        "suite": tmp_path / "suite.jsonl",
        "max_new_tokens": 8,
        "tree": "chain:2",
        "baselines": ["autoregressive"],
    }
    capfd.readouterr()
    results = evaluate(target, tmp_path / "drafter", **options)
    assert (results["target"], results["overall"]["prompts"]) == ("tiny", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter", "suite.jsonl"], (
        "nothing was written"
    )
    assert (
        evaluate(target, None, tmp_path / "r.json", **options)["kind"] == "none"
        and (tmp_path / "r.json").is_file()
    )
    assert capfd.readouterr() == ("", ""), "a library call is quiet"
    evaluate(target, "ngram", progress=True, **options)
    assert "accepted" in capfd.readouterr().out


@pytest.mark.thorough
def test_loaded_drafters_take_the_place_of_their_names(tmp_path):
    target = make_target()
    folder = tmp_path / "drafter"
    made = make_drafter(target)
    made.save_pretrained(folder)
    (folder / "decoding.json").write_text('{"tree": "chain:2"}')
    (tmp_path / "suite.jsonl").write_text(
        '{"question_id": "a", "category": "chat", "turns": ["Hello there"]}\n'
    )
    options = {"suite": tmp_path / "suite.jsonl", "max_new_tokens": 8, "baselines": "none"}

    # The same answers, settings and names as by name.
    named = evaluate(target, folder, **options)
    for loaded in (load_drafter(str(folder), target), Drafter.from_pretrained(folder)):
        results = evaluate(target, loaded, **options)
        assert results["command"] == named["command"]
        for key in ("drafter", "kind", "decoding"):
            assert results[key] == named[key], key
        for key in ("tokens", "target_passes", "accepted_length", "acceptance_by_depth"):
            assert results["overall"][key] == named["overall"][key], key
    assert evaluate(target.model, folder, tokenizer=target.tokenizer, **options)["kind"] == "eagle3"
    without = load_drafter("ngram:min_n=2", target)
    assert evaluate(target, without, tree="chain:2", **options)["drafter"] == "ngram:min_n=2"

    # One that was never saved has no settings, and nothing to continue from.
    output = tmp_path / "made.json"
    results = evaluate(target, made, output, tree="chain:2", **options)
    assert (results["drafter"], results["kind"]) == ("eagle3 (not saved)", "eagle3")
    tuned = tune(target, made, max_new_tokens=16, prompts=1, repeats=1)
    assert tuned.record["drafter"] == "eagle3 (not saved)"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "drafter",
        "made.json",
        "suite.jsonl",
    ]

    # The export of an object has its weights, and the tree of the folder it was loaded from.
    by_name = export(folder, "vllm", tmp_path / "one", target="user/model")
    by_object = export(
        Drafter.from_pretrained(folder), "vllm", tmp_path / "two", target="user/model"
    )
    assert by_object.serve == by_name.serve.replace(str(tmp_path / "one"), str(tmp_path / "two"))
    for first, second in zip(by_name.files, by_object.files, strict=True):
        assert first.read_bytes() == second.read_bytes()
    assert export(made).formats[0].startswith("vllm ")


def test_what_does_not_go_with_a_loaded_target_is_named(tmp_path):
    target = make_target()
    for call in (evaluate, tune):
        name = call.__name__
        with pytest.raises(
            UserError, match=f"{name}: dtype='float32' is for a name, but this target is loaded"
        ):
            call(target, "ngram", dtype="float32")
        with pytest.raises(
            UserError,
            match=f"{name} renders prompts, but model 'LlamaForCausalLM' has no tokenizer; pass tok",
        ):
            call(make_target().model, "ngram")
        with pytest.raises(
            UserError, match=f"{name}: tokenizer= goes with a loaded model; target='x' is a name"
        ):
            call("x", "ngram", tokenizer=target.tokenizer)
        with pytest.raises(
            UserError, match=f"{name}: drafter=LlamaForCausalLM.* must be a name, or a drafter from"
        ):
            call(target, target.model)
        with pytest.raises(UserError, match=f"{name}: 3 is neither a name nor a loaded model"):
            call(3, "ngram")
        with pytest.raises(
            UserError,
            match=rf"{name}: max_new_token= is no option of it; did you mean max_new_tokens",
        ):
            call(target, "ngram", max_new_token=4)
    with pytest.raises(
        UserError, match="baselines=hf_generate load target 'tiny' again, but it has no files"
    ):
        evaluate(
            target, "ngram", baselines="hf_generate", limit=1, max_new_tokens=2, tree="chain:1"
        )
    with pytest.raises(UserError, match="has no files for training to load"):
        train({}, target=target)
    with pytest.raises(UserError, match=r"output_dir=<object .* is not a valid recipe value"):
        train({}, output_dir=object())
    with pytest.raises(
        UserError, match="unknown config key 'max_stps' in the recipe; did you mean max_steps"
    ):
        train({"max_stps": 3})


@pytest.mark.thorough
def test_export_and_push_say_what_they_wrote(target, tmp_path, capfd):
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    capfd.readouterr()
    exported = export(tmp_path / "drafter", "vllm", tmp_path / "out", target="user/model")
    assert {path.name for path in exported.files} == {"config.json", "model.safetensors"}
    assert all(path.is_file() and path.parent == exported.output for path in exported.files)
    assert exported.serve.startswith("-- vLLM") and "user/model" in exported.serve
    options = {
        "base_model": "user/model",
        "without_evaluation": True,
        "dry_run": True,
        "output": tmp_path / "published",
    }
    published = push(tmp_path / "drafter", "user/name", **options)
    assert published.url == "" and {"README.md", "config.json", "model.safetensors"} <= {
        *published.files
    }
    assert capfd.readouterr().out == ""
    with pytest.raises(UserError, match="repo='no/such/name' must be user/name"):
        push(tmp_path / "drafter", "no/such/name", **options)


def test_quiet_calls_log_and_leave_other_threads_text(capfd, caplog):
    inside = threading.Event()
    go_on = threading.Event()

    def command() -> None:
        print("a line of the command")
        with Progress("working", 3, "things") as meter:
            meter.advance(3)
        inside.set()
        assert go_on.wait(120)
        conclude({"figure": 1}, ["there"])

    found = []
    with caplog.at_level(logging.INFO, logger="drafttrain"):
        thread = threading.Thread(target=lambda: found.append(concluded(command, progress=False)))
        thread.start()
        assert inside.wait(120)
        print("a line of the caller")
        go_on.set()
        thread.join()
    assert found == [{"wrote": ["there"], "next": "", "result": {"figure": 1}}]
    assert capfd.readouterr().out == "a line of the caller\n"
    assert [line for line in caplog.messages if "1 of" not in line][:1] == ["a line of the command"]
    assert (
        any(line.startswith("working: 3 of 3 things") for line in caplog.messages)
        and "wrote there" in caplog.messages
    )
    assert isinstance(sys.stdout, io.TextIOBase), "restored"


def test_bars_in_notebooks(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    with Progress("answering", 4, "prompts") as meter:
        meter.advance(3, note="7 tokens/s")
        meter.advance()
    said = capfd.readouterr().err
    assert "answering: 100%" in said and "4/4" in said


def run_tour(tmp_path, monkeypatch, **replaced):
    monkeypatch.chdir(tmp_path)
    return run_notebook.run(ROOT / "docs" / "tutorials" / "tour.ipynb", replaced)


@pytest.mark.thorough
def test_train_returns_what_it_wrote(target, target_dir, tmp_path, capfd):
    data = write_data(tmp_path / "data", target)
    recipe = {
        "kind": "medusa",
        "drafter": {"num_heads": 2},
        "decode_prompts": 1,
        "decode_tokens": 4,
        "validation": 0.1,
    }
    options = {
        "target": Target.load(str(target_dir), "float32"),
        "data": data,
        "output_dir": tmp_path / "out",
    }
    capfd.readouterr()
    options |= {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "dtype": "float32",
    }
    with ThreadPoolExecutor(1) as threads:  # which may not handle signals
        trained = threads.submit(train, recipe, **options).result()
    assert capfd.readouterr() == ("", "")
    assert (trained.output_dir, trained.steps) == (tmp_path / "out", 2) and trained.metrics[
        "eval_loss"
    ] > 0
    assert trained.record["config"]["target"] == str(target_dir) and len(repr(trained)) < 200
    assert trained.load_drafter(target).kind == "medusa"
    assert train(recipe, **options) == trained, "a finished run is left as it is"
    with pytest.raises(UserError, match="config key 'output_dir' is missing in the recipe"):
        train({}, target=str(target_dir), data=data)


@pytest.mark.slow
def test_the_tour_with_a_tiny_target(target_dir, tmp_path, monkeypatch):
    names = run_tour(tmp_path, monkeypatch, model=str(target_dir), questions=8, steps=2)
    assert names["trained"].steps == 2 and names["results"]["overall"]["identical_outputs"] == 1
    drafter = Drafter.from_pretrained(names["trained"].output_dir)
    assert generate(names["target"], "x", drafter, max_new_tokens=3).stats.new_tokens == 3


@pytest.mark.slow
def test_the_tour(tmp_path, monkeypatch):
    if not (Path.home() / ".cache/drafttrain/models/smollm2-135m").is_dir():
        pytest.skip("drafttrain fetch smollm2-135m was not run")
    names = run_tour(tmp_path, monkeypatch)
    assert names["results"]["overall"]["identical_outputs"] == 1


def test_the_notebook_holds_small_outputs():
    path = ROOT / "docs" / "tutorials" / "tour.ipynb"
    assert path.stat().st_size < 40_000
    assert run_notebook.run_cell("a = 3\nprint(a)\na + 1", {}) == "3\n4\n"
    assert run_notebook.shorten("x\n" * 99).count("\n") == run_notebook.MOST_LINES


@pytest.mark.slow
def test_a_users_script_passes_strict_types(tmp_path):
    (tmp_path / "script.py").write_text(STRICT)
    (tmp_path / "mypy.ini").write_text("[mypy]\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "mypy.ini", "script.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout
    (tmp_path / "script.py").write_text(
        "from drafttrain import evaluate, generate\nevaluate('a', 'b', colour=3)\ngenerate('a', 'b', temprature=1)\n"
    )
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (
        'Unexpected keyword argument "colour"' in done.stdout
        and 'Unexpected keyword argument "temprature"' in done.stdout
    )
