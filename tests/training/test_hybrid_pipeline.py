"""The whole pipeline on a tiny Qwen3-Next: prompts, generate, train, eval, export, verify; replay in training equals decoding."""

from __future__ import annotations

import shutil

import pytest

from drafttrain.cli import main
from drafttrain.drafters.registry import kind_class
from drafttrain.files import write_jsonl
from drafttrain.target import Target
from tests.drafters.native_families import write_checkpoint
from tests.files import load_json
from tests.training.runs import check_replayed, write_recipe

PLAIN = ["--dtype", "float32", "--device", "cpu"]
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
KINDS = {
    "eagle3": {},
    "mtp": {"kind": "mtp", "init": "native", "drafter": {"ttt_steps": 2, "train_head": False}},
    "draft_model": {"kind": "draft_model", "init": "random", "drafter": {"config": SMALL}},
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """(folder of a target with states and a prediction module, folder of its greedy answers with all states)."""
    folder = tmp_path_factory.mktemp("hybrid")
    write_checkpoint("qwen3-next", folder / "target")
    rows = [
        {"id": f"p{i}", "messages": [{"role": "user", "content": chr(97 + i) * (3 + 5 * (i % 4))}]}
        for i in range(10)
    ]
    write_jsonl(folder / "prompts.jsonl", rows)
    words = [
        "generate",
        "--target",
        str(folder / "target"),
        "--prompts",
        str(folder / "prompts.jsonl"),
        "--temperature",
        "0",
    ]
    words += ["--output", str(folder / "data"), "--max-new-tokens", "24", "--slots", "4", *PLAIN]
    assert main(words) == 0
    assert (
        main(
            [
                "features",
                "--data",
                str(folder / "data"),
                "--layers",
                "1,2",
                "--store-dtype",
                "float32",
                *PLAIN,
            ]
        )
        == 0
    )
    return folder / "target", folder / "data"


def train(tmp_path, hybrid, kind, **extra):
    recipe = write_recipe(
        tmp_path, *hybrid, validation=0.3, **{"learning_rate": 5e-3, **KINDS[kind], **extra}
    )
    assert main(["train", *recipe]) == 0
    return tmp_path / "drafter"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_hybrid_goes_through_the_whole_pipeline(hybrid, tmp_path, kind, capsys):
    target, _ = hybrid
    drafter = train(tmp_path, hybrid, kind)
    questions = tmp_path / "questions.jsonl"
    results = tmp_path / "results.json"
    write_jsonl(questions, [{"question_id": i, "turns": ["abc" * i]} for i in range(1, 4)])
    words = [
        "eval",
        "--target",
        str(target),
        "--drafter",
        str(drafter),
        "--suite",
        str(questions),
        "--tree",
        "chain:3",
        *PLAIN,
    ]
    assert main([*words, "--max-new-tokens", "16", "--output", str(results)]) == 0
    overall = load_json(results)["overall"]
    assert overall["identical_outputs"] == 1.0 and overall["accepted_length"] >= 1.0
    form = "transformers" if kind == "draft_model" else "vllm"
    words = [
        "--drafter",
        str(drafter),
        "--target",
        str(target),
        "--format",
        form,
        "--dtype",
        "float32",
    ]
    assert main(["export", *words, "--output", str(tmp_path / "out")]) == 0
    assert main(["verify", *words, "--engine", "none", "--exported", str(tmp_path / "out")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_replay_in_training_gives_the_figures_of_decoding(hybrid, tmp_path, kind, capsys):
    """Accepted length of a trained head: the stored answers verify, without the target's layers, or the target does."""
    folder, data = hybrid
    trained = train(tmp_path, hybrid, kind)
    target = Target.load(str(folder), "float32", "cpu")
    assert target.decoding_path == "snapshot"
    drafter = kind_class(kind).load(trained).eval()
    check_replayed(target, data, drafter, ["chain:3", "fanout:3x2"], 20)


@pytest.mark.slow
def test_training_runs_the_target_where_no_states_are_stored(hybrid, tmp_path, capsys):
    """Online, in packed rows and with answers of the drafter's own: the held-out loss is that of stored states."""
    target, data = hybrid
    shutil.copytree(data, tmp_path / "data", ignore=shutil.ignore_patterns("features"))
    losses = []
    for name, own, extra in (
        ("stored", data, {}),
        ("online", tmp_path / "data", {}),
        ("packed", tmp_path / "data", {"packing": True}),
    ):
        (tmp_path / name).mkdir()
        folder = train(
            tmp_path / name, (target, own), "eagle3", cache_gb=0, decode_prompts=0, **extra
        )
        losses.append(load_json(folder / "training.json")["held_out"]["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and losses[2] > 0
    (tmp_path / "own").mkdir()
    own_answers = {
        "on_policy": {"share": 0.5, "refresh_steps": 3, "responses": 4, "max_new_tokens": 8}
    }
    train(tmp_path / "own", (target, tmp_path / "data"), "draft_model", **own_answers)
