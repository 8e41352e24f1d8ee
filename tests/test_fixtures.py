"""What users wrote with the tree of commit b95ce8f loads as it is and computes what it computed then.

tests/fixtures holds those files, fixtures/expected.json what they computed; `git show 9215aaf6:tests/fixtures/make.py` is the
script that made them, which runs with that tree alone. They stand for what users have on their disks: do not make them anew. Only
`from drafttrain import ...` and the command line read them, so that these tests need no change when modules move.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from gguf import GGUFReader
from safetensors.torch import load_file

from drafttrain import Target, evaluate, generate, load_drafter
from drafttrain.cli import main
from tests.files import FIXTURES, load_json

EXPECTED = load_json(FIXTURES / "expected.json")
EXPORTS = {path.name: path.name.rpartition("_") for path in sorted(FIXTURES.glob("exports/*"))}
EVAL = {"suite": "suite.jsonl", "dtype": "float32", "max_new_tokens": 16}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A copy of the files, as the current folder: the names in them are relative."""
    shutil.copytree(FIXTURES, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A copy for tests that write elsewhere, and so share what is cached with a data set."""
    return shutil.copytree(FIXTURES, tmp_path_factory.mktemp("shared") / "home")


@pytest.fixture(scope="module")
def target():
    return Target.load(str(FIXTURES / "target"), "float32")


def name_of(entry):
    return " ".join(
        str(entry[key])
        for key in ("checkpoint", "drafter", "init", "data", "tree", "category")
        if key in entry
    )


def check_decoded(target, entry, drafter=None):
    """Tokens and accepted counts of a greedy or a seeded generation."""
    options = {
        key: value
        for key, value in entry.items()
        if key not in ("drafter", "checkpoint", "tokens", "accepted")
    }
    drafter = drafter or entry["drafter"]
    made = generate(
        target,
        EXPECTED["prompt"],
        drafter=drafter,
        max_new_tokens=EXPECTED["max_new_tokens"],
        **options,
    )
    assert (made.tokens, made.stats.accepted) == (entry["tokens"], entry["accepted"])


def train(*words, **options):
    """A run from options, or from a recipe's file."""
    if options:
        Path("recipe.yaml").write_text(yaml.safe_dump(options))
        words = ("recipe.yaml", *words)
    assert main(["train", *words]) == 0


def read(path):
    return load_json(Path(path))


# -- drafters ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("entry", EXPECTED["decoded"], ids=name_of)
def test_a_drafter_decodes_as_before(target, entry, monkeypatch):
    monkeypatch.chdir(FIXTURES)  # nothing is written
    check_decoded(target, entry)


@pytest.mark.parametrize("folder", sorted(path.name for path in FIXTURES.glob("drafters/*")))
def test_a_drafter_keeps_its_kind(target, folder):
    entry = next(entry for entry in EXPECTED["losses"] if entry["init"] == f"drafters/{folder}")
    assert load_drafter(str(FIXTURES / "drafters" / folder), target).kind == entry["kind"]


@pytest.mark.thorough
@pytest.mark.parametrize("entry", EXPECTED["losses"], ids=name_of)
def test_a_drafter_is_continued_with_the_weights_and_the_loss_it_had(
    entry, shared, tmp_path, monkeypatch
):
    """A learning rate of 0 leaves the weights, whose loss on the held-out conversations is that of then."""
    monkeypatch.chdir(shared)
    options = {key: value for key, value in entry.items() if key != "held_out"}
    quiet = {"output_dir": str(tmp_path), "max_steps": 1, "learning_rate": 0.0, "decode_prompts": 0}
    train(**{**EXPECTED["recipe"], **options, **quiet})
    held_out = read(tmp_path / "training.json")["held_out"]
    # States that are kept are bfloat16; since then their denominators are those of the rounded states.
    assert {key: held_out[key] for key in entry["held_out"]} == pytest.approx(
        entry["held_out"], abs=1e-3
    )
    saved, before = (
        load_file(Path(folder, "model.safetensors")) for folder in (tmp_path, entry["init"])
    )
    torch.testing.assert_close(saved, before, rtol=0, atol=0)


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_repeated(home, capsys):
    before = Path("run/model.safetensors").read_bytes()
    train("run.yaml")
    assert (
        "already trained" in capsys.readouterr().out
        and Path("run/model.safetensors").read_bytes() == before
    )


@pytest.mark.thorough
def test_an_interrupted_run_goes_on_to_the_same_weights(home, capsys):
    shutil.rmtree("run/checkpoint-4")
    for name in ("training.json", "model.safetensors"):
        Path("run", name).unlink()
    train("run.yaml")
    assert "going on from run/checkpoint-2" in capsys.readouterr().out
    torch.testing.assert_close(
        load_file("run/model.safetensors"), load_file(FIXTURES / "run" / "model.safetensors")
    )
    logs, before = (
        [
            log["loss"]
            for log in read(root / "run/checkpoint-4/trainer_state.json")["log_history"]
            if "loss" in log
        ]
        for root in (Path(), FIXTURES)
    )
    assert logs == pytest.approx(before, abs=1e-4) and len(logs) == 4
    summary = read("run/training.json")
    before = read(FIXTURES / "run/training.json")
    assert (
        summary["best"]["step"] == before["best"]["step"]
        and summary["config"].items() >= before["config"].items()
    )


@pytest.mark.thorough
def test_a_finished_run_is_lengthened(home, capsys):
    train("run.yaml", "max_steps=5")
    assert (
        "going on from run/checkpoint-4" in capsys.readouterr().out
        and read("run/training.json")["steps"] == 5
    )


# -- data -------------------------------------------------------------------------------------------------------------

GENERATE = "generate --target target --prompts prompts.jsonl --dtype float32 --temperature 0 --max-new-tokens 20 "
GENERATE += "--max-length 256 --slots 4 --device cpu --output data"


def test_collected_prompts_are_left_alone(home, capsys):
    assert (
        main(["prompts", "--source", "file", "--input", "chats.jsonl", "--output", "prompts.jsonl"])
        == 0
    )
    assert "made with the same settings" in capsys.readouterr().out


def test_an_interrupted_data_set_is_completed(home, capsys):
    part = Path("data/part-0000.jsonl")
    whole = part.read_text()
    lines = whole.splitlines(keepends=True)
    part.write_text("".join(lines[:13]) + lines[13][:20])  # as a killed process leaves it
    assert main(GENERATE.split()) == 0
    assert part.read_text().startswith("".join(lines[:13]))
    added = part.read_text().replace(',"reasoning":[0]', "")  # which that release did not count
    assert sorted(added.splitlines()) == sorted(whole.splitlines())
    assert read("data/meta.json") == read(FIXTURES / "data" / "meta.json")
    assert main([*GENERATE.split(), "--temperature", "1"]) == 2
    assert "was begun with sampling.temperature=0" in capsys.readouterr().err


@pytest.mark.parametrize(("data", "words"), [("data_top_k", ["--top-k", "4"]), ("data_states", [])])
def test_stored_states_are_found(home, data, words, capsys):
    before = {path: path.read_bytes() for path in Path(data, "features").glob("part-*")}
    layers = [] if data == "data_states" else ["--layers", "2,4,5"]
    assert main(["features", "--data", data, *layers, *words, "--dtype", "float32"]) == 0
    assert "0 of 16 conversations to do" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in Path(data, "features").glob("part-*")} == before


def test_the_store_of_a_data_set_is_counted_as_before(home):
    assert main(["ngram-store", "--data", "data", "--output", "again.safetensors"]) == 0
    torch.testing.assert_close(
        load_file("again.safetensors"), load_file("store.safetensors"), rtol=0, atol=0
    )


def test_a_data_set_is_prepared_for_the_hub(home, capsys):
    words = [
        "--data",
        "data",
        "--repo",
        "some/one",
        "--prompt-licence",
        "none",
        "--dry-run",
        "--output",
        "published",
    ]
    assert main(["push-data", *words]) == 0
    assert "dry run" in capsys.readouterr().out and Path("published/README.md").is_file()


# -- results ----------------------------------------------------------------------------------------------------------


def counts(results):
    """The figures that do not depend on the machine's speed."""
    names = ("prompts", "tokens", "target_passes", "accepted_length", "acceptance_by_depth")
    return {name: results["overall"][name] for name in names} | {
        "kind": results["kind"],
        "suite": results["suite_digest"],
    }


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["eagle3", "off"])
def test_an_evaluation_measures_what_it_measured(home, name):
    options = {"tree": "chain:3"} if name == "eagle3" else {}
    results = evaluate(
        "target", "drafters/eagle3", "again.json", **EVAL, **options, baselines="none"
    )
    before = read(f"results/{name}.json")
    assert counts(results) == counts(before)
    now = results["decoding"]
    then = before["decoding"]
    assert now.pop("tree").items() >= then.pop("tree").items() and now.items() >= then.items()


@pytest.mark.thorough
def test_an_interrupted_evaluation_goes_on(home, capsys, monkeypatch):
    """The first line names a hash of the machine and of the files' times, so a new file's takes its place."""
    words = ["eval", "--target", "target", "--drafter", "drafters/eagle3", "--tree", "chain:3"]
    words += [f"--{key.replace('_', '-')}={value}" for key, value in EVAL.items()] + [
        "--output",
        "results/killed.json",
    ]
    partial = Path("results/killed.json.partial.jsonl")
    place = Path("results/killed.json")
    before = partial.read_text().splitlines(keepends=True)
    with monkeypatch.context() as patch:  # killed when all is measured
        patch.setattr("drafttrain.evaluation.runner.write_json", lambda *_: sys.exit(9))
        with pytest.raises(SystemExit):
            main(words)
    header = partial.read_text().splitlines(keepends=True)[0]
    assert json.loads(header).keys() == json.loads(before[0]).keys()
    partial.write_text(header + "".join(before[1:]))
    assert main(words) == 0 and not partial.exists()
    results = read(place)
    kept = [record for line in before[1:3] for record in json.loads(line)["records"]]
    assert (
        results["prompts"][: len(kept)] == kept and len(results["prompts"]) == 5
    )  # times included
    assert counts(results) == counts(read("results/eagle3.json"))


def test_a_finished_sweep_is_kept(home, capsys):
    before = {path.name: path.read_bytes() for path in Path("results/sweep").glob("*.json")}
    words = "sweep --target target --drafter ngram --suite suite.jsonl --dtypes float32 --lengths 1,2 --batch-sizes 1,2"
    assert (
        main([*words.split(), "--max-new-tokens", "8", "--limit", "2", "--output", "results/sweep"])
        == 0
    )
    after = {path.name: path.read_bytes() for path in Path("results/sweep").glob("*.json")}
    assert before.keys() == after.keys()
    cells = {name for name in before if name != "summary.json"}
    assert len(cells) == 3 and all(before[name] == after[name] for name in cells)
    summary = json.loads(after["summary.json"])
    earlier = json.loads(before["summary.json"])
    assert summary["axes"] == earlier["axes"]
    for key in ("cells", "crossover"):  # what was written is the same; more is written now
        assert [
            {name: new[name] for name in old}
            for old, new in zip(earlier[key], summary[key], strict=True)
        ] == earlier[key]


@pytest.mark.slow  # draws charts
def test_results_are_shown_on_a_page(home, capsys):
    names = [f"results/{name}.json" for name in ("eagle3", "sampled", "sweep/summary")]
    assert main(["report", *names, "--output", "report.html"]) == 0
    page = Path("report.html").read_text()
    printed = capsys.readouterr().out
    length = f"{read('results/eagle3.json')['overall']['accepted_length']:.2f}"
    assert "drafters/eagle3+ngram" in page and length in page and length in printed


def test_results_are_diagnosed_and_applied(home, capsys):
    before = read("drafters/eagle3/decoding.json")
    assert main(["diagnose", "results/eagle3.json", "results/sampled.json", "--apply"]) == 0
    after = read("drafters/eagle3/decoding.json")
    assert "eagle3.json" in capsys.readouterr().out
    assert (
        {**after, "off": 0} == {**before, "off": 0}
        and before["off"] == ["translation"]
        and "tuned" in after
    )


def test_results_give_the_same_estimate(home):
    assert main(["estimate", "--results", "results/eagle3.json", "--output", "again.json"]) == 0
    after = read("again.json")
    before = read("results/estimate.json")
    # Its advice has other words in earlier versions, and its target had no weights of norms.
    words = {"command": 0, "advice": 0, "target": 0, "rows": 0}
    assert {**after, **words} == {**before, **words}
    assert "estimated, not measured" in after["advice"]
    for row, held in zip(after["rows"], before["rows"], strict=True):
        for key in ("tokens_per_second", "plain_tokens_per_second"):
            assert row.pop(key) == pytest.approx(held.pop(key), rel=1e-5)
        assert row == held


@pytest.mark.slow  # draws charts
def test_a_drafter_with_results_is_prepared_for_the_hub(home, target):
    words = [
        "--drafter",
        "drafters/eagle3",
        "--repo",
        "some/one",
        "--results",
        "results/eagle3.json",
        "results/sampled.json",
    ]
    words += ["--base-model", "some/target", "--dry-run", "--output", "published"]
    assert main(["push", *words]) == 2, "its tuning predicted 1.02x and measured 0.80x"
    assert main(["push", *words, "--accept-implausible"]) == 0
    card = Path("published/README.md").read_text()
    assert f"{read('results/eagle3.json')['overall']['accepted_length']:.2f}" in card
    entry = next(entry for entry in EXPECTED["imported"] if "vllm" in entry["checkpoint"])
    check_decoded(target, entry, "published")


# -- exports ----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("entry", EXPECTED["imported"], ids=name_of)
def test_an_export_is_imported(home, target, entry):
    words = [
        "--checkpoint",
        entry["checkpoint"],
        "--target",
        "target",
        "--output",
        entry["drafter"],
    ]
    assert main(["import", *words]) == 0
    check_decoded(target, entry)


def tensors_of(folder):
    if (folder / "draft.gguf").is_file():
        return {
            each.name: torch.tensor(each.data) for each in GGUFReader(folder / "draft.gguf").tensors
        }
    return load_file(folder / "model.safetensors")


@pytest.mark.thorough
@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_has_the_tensors_and_keys_it_had(home, name):
    drafter, _, form = EXPORTS[name]
    assert (
        main(["export", "--drafter", f"drafters/{drafter}", "--format", form, "--output", "again"])
        == 0
    )
    torch.testing.assert_close(
        tensors_of(Path("again")), tensors_of(Path("exports", name)), rtol=0, atol=0
    )
    if form != "gguf":
        before = read(Path("exports", name, "config.json"))
        now = read("again/config.json")
        kept = {key: value for key, value in before.items() if key in now}  # some keys were dropped
        assert {key: now[key] for key in kept} == kept
        assert "architectures" in kept


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name, (_, _, form) in EXPORTS.items() if form != "gguf"])
def test_an_export_is_verified(home, name):
    drafter = EXPORTS[name][0]
    words = [
        "--drafter",
        f"drafters/{drafter}",
        "--exported",
        f"exports/{name}",
        "--target",
        "target",
        "--engine",
        "none",
    ]
    words += [
        "--suite",
        "suite.jsonl",
        "--prompts",
        "1",
        "--max-new-tokens",
        "4",
        "--output",
        "verified.json",
    ]
    assert main(["verify", *words]) == 0
