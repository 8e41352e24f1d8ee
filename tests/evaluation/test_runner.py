from __future__ import annotations

import inspect
import json
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from drafttrain import cli
from drafttrain.commands.eval import evaluate
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import default_tree, load_drafter
from drafttrain.evaluation import runner, sides
from drafttrain.evaluation.metrics import open_log, saved_records
from drafttrain.evaluation.suites import Question, load_suite
from drafttrain.files import write_jsonl
from drafttrain.target import Target
from drafttrain.tuning import eval_command
from drafttrain.tuning import tune as tuning
from tests.conftest import QUESTIONS, make_target
from tests.data.templates.families import FOLDER
from tests.drafters.helpers import make_drafter
from tests.evaluation import records
from tests.files import load_json


@pytest.fixture
def command(target_dir, suite, tmp_path):
    def arguments(**changes):
        options = {
            "target": target_dir,
            "drafter": "ngram",
            "suite": suite,
            "dtype": "float32",
            "max-new-tokens": 16,
            "tree": "chain:3",
            "output": tmp_path / "results.json",
            **changes,
        }
        return [
            "eval",
            *(part for key, value in options.items() for part in (f"--{key}", str(value))),
        ]

    return arguments


def read(tmp_path):
    return load_json(tmp_path / "results.json")


def error_of(capsys, arguments) -> str:
    assert cli.main(arguments) == 2
    return capsys.readouterr().err


@pytest.mark.thorough
def test_results_hold_what_was_measured(command, tmp_path, capsys):
    assert cli.main(command()) == 0
    results = read(tmp_path)
    assert {
        "drafttrain",
        "versions",
        "command",
        "device",
        "threads",
        "dtype",
        "compute_dtype",
        "target",
        "drafter",
    } <= (results.keys())
    assert (results["kind"], results["dtype"], results["tree_search"]) == ("ngram", "float32", None)
    assert results["decoding"]["tree"]["spec"] == "chain:3"
    assert results["implementation"].keys() == {"target", "drafter"}
    overall = results["overall"]
    assert overall["prompts"] == 4
    assert list(results["categories"]) == ["chat", "code"]
    assert overall["identical_outputs"] == overall["identical_to_hf_generate"] == 1.0
    assert set(overall["speedup"]) == set(overall["baselines"]) == {"autoregressive", "hf_generate"}
    assert [(r["question_id"], r["turn"]) for r in results["prompts"]] == [
        ("q1", 0),
        ("q1", 1),
        ("q2", 0),
        ("q3", 0),
    ]
    tokens = [
        {side["tokens"] for side in record["sides"].values()} for record in results["prompts"]
    ]
    assert all(len(counts) == 1 for counts in tokens)
    assert results["prompts"][1]["prompt_tokens"] > results["prompts"][0]["prompt_tokens"]
    assert not (tmp_path / "results.json.partial.jsonl").exists()
    shown = capsys.readouterr().out
    assert "accepted length" in shown
    assert (
        "identical to plain decoding on 4 of 4 prompts; identical to transformers generate on 4 of 4"
        in shown
    )


@pytest.mark.thorough
def test_tools_of_a_suite_are_measured_by_category(command, target_dir, tmp_path, capsys):
    tool = {
        "type": "function",
        "function": {"name": "look_up", "description": "Looks up.", "parameters": {}},
    }
    rows = [{**row, "tools": [tool]} for row in QUESTIONS]
    path = tmp_path / "tools.jsonl"
    write_jsonl(path, rows)
    options = {"max-new-tokens": 4, "baselines": "autoregressive"}
    error = error_of(capsys, command(suite=path, **options)).splitlines()[-1]
    assert "question 'q1': the chat template does not read `tools`" in error
    (target_dir / "chat_template.jinja").write_text((FOLDER / "qwen3.jinja").read_text())
    assert cli.main(command(suite=path, **options)) == 0
    with_tools = read(tmp_path)
    assert cli.main(command(output=tmp_path / "plain.json", **options)) == 0
    plain = load_json(tmp_path / "plain.json")
    assert with_tools["suite_digest"] != plain["suite_digest"]
    assert {name: part["prompts"] for name, part in with_tools["categories"].items()} == {
        "chat": 3,
        "code": 1,
    }
    counts = [
        [record["prompt_tokens"] for record in results["prompts"]]
        for results in (with_tools, plain)
    ]
    assert all(more > len(json.dumps(tool)) + less for more, less in zip(*counts, strict=True))


@pytest.mark.slow
def test_transformers_own_speculation_beside_ours(command, target_dir, tmp_path, capsys):
    names = "hf_generate,hf_prompt_lookup,hf_assisted"
    for assistant in ("", str(target_dir)):
        assert cli.main(command(baselines=names, assistant=assistant)) == 0
        results = read(tmp_path)
        overall = results["overall"]
        assert set(overall["speedup"]) == set(names.split(","))
        assert overall["speedup_vs_fastest"] == overall["speedup"]["hf_generate"]
        for record in results["prompts"]:
            assert set(record["identical"].values()) == {True}
        (tmp_path / "results.json").unlink()
    assert cli.main(command(baselines=names, **{"batch-size": 2})) == 2
    assert "single prompts only" in capsys.readouterr().err


# The second turn, which one question has, is longer than two first turns together.
@pytest.mark.thorough
def test_batches_give_the_same_answers_on_every_side(command, tmp_path, capsys):
    assert cli.main(command()) == 0
    alone = read(tmp_path)
    assert "key/value cache" in capsys.readouterr().out
    assert cli.main(command(**{"batch-size": 2})) == 0
    results = read(tmp_path)
    assert results["decoding"]["batch_size"] == 2
    assert (
        results["overall"]["identical_outputs"]
        == results["overall"]["identical_to_hf_generate"]
        == 1.0
    )
    for one, many in zip(alone["prompts"], results["prompts"], strict=True):
        for key in ("question_id", "turn", "prompt_tokens", "identical"):
            assert one[key] == many[key]
        assert one["sides"]["drafter"]["rounds"] == many["sides"]["drafter"]["rounds"]
    ours = [record["sides"]["drafter"] for record in results["prompts"] if record["turn"] == 0]
    # Shares of one batch are equal, and their sum is no less than anyone's own time.
    first = ours[:2]
    assert len({side["seconds"] for side in first}) == 1
    assert sum(side["seconds"] for side in first) >= max(side["latency"] for side in first) - 1e-3
    assert "(1 row x" in capsys.readouterr().out


@pytest.mark.thorough
def test_sampled_runs_compare_no_tokens(command, tmp_path, capsys):
    changes = {
        "temperature": 0.8,
        "top-k": 20,
        "top-p": 0.9,
        "min-p": 0.01,
        "limit": 2,
        "tree": "chain:2@sample",
    }
    assert cli.main(command(**changes)) == 0
    overall = read(tmp_path)["overall"]
    assert overall["identical_outputs"] is None
    assert overall["prompts"] == 3
    assert "sampled" in capsys.readouterr().out


@pytest.mark.thorough
def test_every_side_follows_the_targets_generation_config(command, target_dir, tmp_path):
    path = target_dir / "generation_config.json"
    path.write_text(
        json.dumps({**load_json(path), "repetition_penalty": 1.5, "suppress_tokens": [3]})
    )
    assert cli.main(command(limit=2)) == 0
    results = read(tmp_path)
    assert results["decoding"]["repetition_penalty"] == 1.5
    assert results["decoding"]["generation_config"] == {"suppress_tokens": [3]}
    assert (
        results["overall"]["identical_outputs"]
        == results["overall"]["identical_to_hf_generate"]
        == 1.0
    )
    outputs = [record["outputs"] for record in results["prompts"] if "outputs" in record]
    assert not outputs


def test_none_drafts_nothing(command, tmp_path):
    assert cli.main(command(drafter="none", baselines="none", limit=1)) == 0
    results = read(tmp_path)
    assert results["overall"]["accepted_length"] == 1.0
    assert results["decoding"]["tree"]["spec"] == "none"
    assert results["overall"]["speedup"] == {}


def test_ngrams_alone_are_measured_beside_a_trained_drafter(command, target_dir, tmp_path, capsys):
    """By default, at the same prompts: what did training add?"""
    assert inspect.signature(evaluate).parameters["baselines"].default.endswith(",ngram")
    folder = tmp_path / "drafter"
    make_drafter(Target.load(str(target_dir), "float32", "cpu")).save_pretrained(folder)
    arguments = command(drafter=folder, baselines="autoregressive,ngram", **{"max-new-tokens": 8})
    assert cli.main(arguments) == 0
    results = read(tmp_path)
    overall = results["overall"]
    assert list(overall["speedup"]) == ["autoregressive", "ngram"]
    assert {"ngram"} < overall["confidence"]["speedup"].keys()
    assert results["decoding"]["ngram_tree"] == "chain:5"
    for record in results["prompts"]:
        assert record["identical"] == {"autoregressive": True, "ngram": True}
        assert record["sides"]["ngram"]["rounds"]
    shown = capsys.readouterr().out
    assert "x as fast as n-grams alone (" in shown
    assert "prompts of " in shown

    (tmp_path / "results.json").unlink()
    arguments = command(baselines="autoregressive,ngram", limit=1, **{"max-new-tokens": 2})
    assert cli.main(arguments) == 0
    assert "ngram" not in read(tmp_path)["overall"]["speedup"], "n-grams beside themselves"


@pytest.mark.thorough
def test_the_order_of_sides_rotates(command, tmp_path, monkeypatch):
    order = []
    original = runner.engine_side

    def spy(decoder, **options):
        side = original(decoder, **options)

        def answer(request):
            order.append("ours" if decoder.drafter else "plain")
            return side(request)

        return answer

    monkeypatch.setattr(runner, "engine_side", spy)
    assert cli.main(command(baselines="autoregressive")) == 0
    assert order[2:] == ["ours", "plain", "plain", "ours", "plain", "ours", "ours", "plain"]


@pytest.mark.thorough
def test_an_interrupted_run_goes_on(command, tmp_path, monkeypatch):
    original = runner.answer
    seen = []

    def stop_at_the_second(plan, batch, sides):
        (question,) = batch.values()
        if question.question_id == "q2" and not seen.count("q2"):
            seen.append("q2")
            raise KeyboardInterrupt
        seen.append(question.question_id)
        return original(plan, batch, sides)

    monkeypatch.setattr(runner, "answer", stop_at_the_second)
    arguments = command(baselines="autoregressive")
    assert cli.main(arguments) == 130
    partial = tmp_path / "results.json.partial.jsonl"
    with partial.open("a") as file:
        file.write('{"question": "1:q2", "rec')  # killed while writing
    assert cli.main(arguments) == 0
    assert seen == ["q1", "q2", "q2", "q3"]
    assert read(tmp_path)["overall"]["prompts"] == 4
    assert not partial.exists()


RECORD = {
    "question_id": "a",
    "turn": 0,
    "prompt_tokens": 5,
    **records.record("chat", records.OURS, records.PLAIN),
}


def test_other_settings_do_not_reuse_records(tmp_path):
    output = tmp_path / "r.json"
    partial = open_log(output, "one")
    partial.add({"tree": "chain:2", "tree_search": []})
    partial.add({"question": "0:a", "records": [RECORD]})
    partial.close()
    same = open_log(output, "one")
    assert saved_records(same) == {"0:a": [RECORD]}
    assert same.rows[0] == {"tree": "chain:2", "tree_search": []}
    with pytest.raises(
        runner.UserError, match=r"r.json.partial.jsonl' is being written by another process"
    ):
        open_log(output, "one")
    same.close()
    other = open_log(output, "two")
    assert other.rows == []
    other.close()
    (tmp_path / "r.json.partial.jsonl").write_text('{"thesis": 1}\n')
    with pytest.raises(runner.UserError, match=r"was begun with thesis=1"):
        open_log(output, "two")


def test_a_run_that_began_without_ngrams_alone_goes_on_without_them(tmp_path):
    alone = {"ngram": records.PLAIN, **RECORD["sides"]}
    with closing(open_log(tmp_path / "r.json", "key")) as saved:
        assert not runner._lacks_ngrams(saved)
        saved.add({"question": "0:a", "records": [{**RECORD, "sides": alone}]})
    with closing(open_log(tmp_path / "r.json", "key")) as saved:
        assert not runner._lacks_ngrams(saved)
        saved.add({"question": "1:a", "records": [RECORD]})
    with closing(open_log(tmp_path / "r.json", "key")) as saved:
        assert runner._lacks_ngrams(saved)


def test_a_partial_file_keeps_texts_with_any_line_separator(tmp_path):
    records = [{**RECORD, "outputs": {"drafter": "one\u2028two\x85three"}}]
    with closing(open_log(tmp_path / "r.json", "key")) as saved:
        saved.add({"question": "0:a", "records": records})
    for _ in range(2):  # opening the file rewrites it
        with closing(open_log(tmp_path / "r.json", "key")) as saved:
            assert saved_records(saved) == {"0:a": records}


def test_the_runner_takes_any_search(target, suite, tmp_path):
    calls = []

    def search(target, drafter, sampling, exclude):
        calls.append(exclude)
        return TreeSpec.parse("chain:2"), [{"tree": "chain:2"}]

    settings = runner.EvalSettings(
        "tiny", "ngram", tmp_path / "r.json", tree="auto", max_new_tokens=4, baselines=()
    )
    results = runner.evaluate(
        settings, target, load_drafter("ngram", target), load_suite(str(suite)), search
    )
    assert calls == [{"hello there", "and again", "print(1)", "hi"}]
    assert (results["decoding"]["tree"]["spec"], results["tree_search"]) == (
        "chain:2",
        [{"tree": "chain:2"}],
    )
    assert load_json(tmp_path / "r.json")["tree_search"] == results["tree_search"]


@pytest.mark.thorough
def test_auto_takes_the_tree_that_was_predicted_fastest(command, tmp_path, monkeypatch):
    search = tuning.search_tree
    monkeypatch.setattr(
        eval_command,
        "search_tree",
        lambda *args: search(*args[:3], replace(args[3], tokens=16, cycles=1)),
    )
    rows = [
        {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]}
    ]
    rows += [{"text": "hello there"}, {"text": "x y z"}]  # the first is in the suite
    calibration = tmp_path / "prompts.jsonl"
    write_jsonl(calibration, rows)
    assert cli.main(command(tree="auto", calibrate=calibration, baselines="none", limit=1)) == 0
    results = read(tmp_path)
    table = results["tree_search"]
    assert results["decoding"]["tree"]["spec"] == table[0]["tree"]
    rates = [
        row["tokens_per_second"] for row in table
    ]  # of those within a factor of SAME the simpler tree comes first
    assert all(rate * tuning.SAME * 1.0001 >= max(rates[i:]) for i, rate in enumerate(rates))
    assert {row["tree"]: row["predicted_speedup"] for row in table}["none"] == 1.0


def test_a_drafter_folder_may_name_its_tree(tmp_path):
    assert default_tree(str(tmp_path)) is None
    (tmp_path / "decoding.json").write_text('{"tree": "dynamic:4,6,16"}')
    assert default_tree(str(tmp_path)) == "dynamic:4,6,16"
    (tmp_path / "decoding.json").write_text("{}")
    with pytest.raises(
        runner.UserError, match=r"decoding.json.*tree: field required; .* or pass a tree"
    ):
        default_tree(str(tmp_path))


@pytest.mark.thorough
def test_kinds_that_decoding_json_switches_off_are_decoded_plainly(command, target_dir, tmp_path):
    own = Target.load(str(target_dir), "float32", "cpu")
    folder = tmp_path / "drafter"
    make_drafter(own, kept=torch.arange(200)).save_pretrained(folder)
    (folder / "decoding.json").write_text('{"tree": "dynamic:2,4,8", "off": ["chat"]}')
    arguments = [
        part
        for part in command(drafter=folder, baselines="autoregressive")
        if part not in ("--tree", "chain:3")
    ]
    for size in ("1", "4"):
        assert cli.main([*arguments, "--batch-size", size]) == 0
        results = read(tmp_path)
        chat = results["categories"]["chat"]
        code = results["categories"]["code"]
        assert (chat["accepted_length"], chat["draft_fraction"]) == (1.0, 0.0)
        assert code["draft_fraction"] > 0
        assert [record.get("speculation", True) for record in results["prompts"]] == [
            False,
            False,
            True,
            False,
        ]
        assert all(
            0 <= record["covered"] <= 1 and record["memory"] > 0 for record in results["prompts"]
        )
        assert results["overall"]["peak_memory_mb"] > 1
        assert results["diagnosis"][0]["cause"] == "verdict"
        (tmp_path / "results.json").unlink()
    assert (
        cli.main([*arguments, "--tree", "chain:2"]) == 0
    )  # a tree that is named measures every kind
    assert read(tmp_path)["categories"]["chat"]["draft_fraction"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"baselines": "vllm"},
            "baselines='vllm': 'vllm' is not one of autoregressive, hf_generate",
        ),
        ({"tree": "bush:3"}, "tree='bush:3' is not a tree"),
        (
            {"tree": "chain:3@sample"},
            "tree='chain:3@sample' draws its tokens, but temperature=0 is greedy",
        ),
        ({"suite": "nowhere"}, "suite='nowhere' is neither a file nor a known suite"),
        ({"target": "/no/such/model"}, "target='/no/such/model': no model folder"),
        ({"drafter": "/no/such/drafter"}, "drafter='/no/such/drafter': no such folder"),
        ({"output": "/proc/nowhere/r.json"}, "output='/proc/nowhere/r.json' cannot be written"),
    ],
)
def test_bad_input_is_named(command, capsys, changes, message):
    assert message in error_of(capsys, command(**changes))


def test_prompts_that_do_not_fit_are_found_first(suite):
    target = make_target(layers=1, max_position_embeddings=30)
    questions = load_suite(str(suite)).questions
    with pytest.raises(runner.UserError, match=r"question 'q1': prompt has .* reads at most 30"):
        runner.check_lengths(target, questions, 4)


def test_the_reference_model_is_untouched_and_in_the_dtype_asked_for(target_dir, monkeypatch):
    target = Target.load(str(target_dir), "bfloat16", "cpu")
    loaded = []
    load = sides.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        sides.AutoModelForCausalLM,
        "from_pretrained",
        lambda *a, **k: loaded.append(load(*a, **k)) or loaded[0],
    )
    side = sides.hf_sides(target, runner.SamplingParams(), ["hf_generate"])["hf_generate"]
    (model,) = loaded
    assert (model.dtype, model.config._attn_implementation) == (torch.bfloat16, "sdpa")
    assert model is not target.model
    (answer,) = side(sides.SideRequest([[1, 2, 3]], [5]))
    assert answer.figures["tokens"] <= 5


def test_texts_are_kept_where_outputs_differ(target):
    plan = runner.EvalPlan(
        target, None, TreeSpec.parse("none"), runner.EvalSettings(max_new_tokens=4)
    )
    ids = {text: target.tokenizer(text).input_ids for text in ("same", "other")}

    def says(*texts):
        answers = iter(texts)
        return lambda request: [sides.SideAnswer(ids[next(answers)], {})]

    question = Question("q", "chat", ("one", "two"))
    named = {
        "drafter": says("same", "same"),
        "autoregressive": says("same", "other"),
        "hf_generate": says("same", "same"),
    }
    first, second = runner.answer(plan, {0: question}, named)[0]
    assert "outputs" not in first
    assert second["outputs"] == {"drafter": "same", "autoregressive": "other"}
