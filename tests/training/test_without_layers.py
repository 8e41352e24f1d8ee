"""Training without the target's layers: the same run to the bit, checkpoints chosen by replay, and reasons to load the layers."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.cli import main
from drafttrain.data.store import Store
from drafttrain.inference import generate
from drafttrain.target import Target
from tests.conftest import make_target
from tests.drafters.helpers import make_drafter
from tests.files import load_json
from tests.target.layer_files import delete_layer_files, save
from tests.training.runs import check_replayed, write_recipe


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """(folder of a tiny target in several files, folder of its greedy answers with all states in float32)."""
    folder = tmp_path_factory.mktemp("stored")
    target = make_target()
    name = save(target.model, folder / "target", shard="20KB")
    with Store(
        folder / "data", {"target": target.identity(), "sampling": {"temperature": 0.0}}
    ) as store:
        for i in range(16):
            prompt = [(7 * i + j) % 250 for j in range(3 + i % 4)]
            made = generate(target, None, prompt, max_new_tokens=24)
            tokens = prompt + made.tokens
            finish = "stop" if made.tokens[-1] in target.eos_ids else "length"
            store.append(
                {
                    "id": f"row{i}",
                    "tokens": tokens,
                    "spans": [[len(prompt), len(tokens)]],
                    "finish": [finish],
                    "source": "test",
                }
            )
    words = [
        "features",
        "--data",
        str(folder / "data"),
        "--target",
        name,
        "--store-dtype",
        "float32",
    ]
    assert main([*words, "--dtype", "float32", "--device", "cpu"]) == 0
    return folder / "target", folder / "data"


def run(tmp_path, name, target, data, **extra):
    """Trains; returns training.json's losses and the weights."""
    (tmp_path / name).mkdir()
    recipe = write_recipe(
        tmp_path / name, target, data, **{"decode_prompts": 2, "decode_tokens": 12, **extra}
    )
    assert main(["train", *recipe]) == 0
    out = tmp_path / name / "drafter"
    return load_json(out / "training.json"), load_file(out / "model.safetensors")


@pytest.mark.thorough
def test_a_run_without_layers_is_the_same_to_the_bit(stored, tmp_path, monkeypatch, capsys):
    target, data = stored
    shell, with_shell = run(tmp_path, "shell", target, data)
    assert "without its layers: every conversation has stored states" in capsys.readouterr().out
    monkeypatch.setattr("drafttrain.train.layers_needed", lambda *_: "of a test")
    whole, with_target = run(tmp_path, "whole", target, data)
    assert "because of a test" in capsys.readouterr().out
    assert with_shell.keys() == with_target.keys()
    assert all(torch.equal(with_shell[name], with_target[name]) for name in with_target)
    assert (
        shell["train_loss"] == whole["train_loss"]
        and shell["held_out"]["eval_loss"] == whole["held_out"]["eval_loss"]
    )
    assert shell["best"] == whole["best"] and shell["target_features"]["online"] == 0


@pytest.mark.thorough
def test_a_run_needs_no_files_of_layers(stored, tmp_path, capsys):
    target, data = stored
    model = Target.load(str(target), "float32", "cpu").model
    save(model, tmp_path / "target", shard="20KB")
    delete_layer_files(tmp_path / "target")
    before, weights = run(tmp_path, "all", target, data, init="random")
    after, same = run(tmp_path, "few", tmp_path / "target", data, init="random")
    assert (
        all(torch.equal(same[name], weights[name]) for name in weights)
        and before["train_loss"] == after["train_loss"]
    )
    capsys.readouterr()
    run(tmp_path, "copied", tmp_path / "target", data, init="target")
    assert "note: nothing is copied from the layers of target" in capsys.readouterr().out
    words = ["--drafter", str(tmp_path / "few" / "drafter"), "--output", str(tmp_path / "exported")]
    assert main(["export", *words, "--format", "vllm"]) == 0
    words = ["--checkpoint", str(tmp_path / "exported"), "--target", str(tmp_path / "target")]
    assert main(["import", *words, "--output", str(tmp_path / "imported")]) == 0
    words = [
        "--drafter",
        str(tmp_path / "few" / "drafter"),
        "--repo",
        "user/name",
        "--license",
        "mit",
        "--without-evaluation",
    ]
    assert main(["push", *words, "--dry-run", "--output", str(tmp_path / "published")]) == 0


@pytest.mark.thorough
def test_the_layers_are_loaded_for_a_reason(stored, tmp_path, capsys):
    target, data = stored
    for more, reason in [
        ({"on_policy": {"share": 0.5}}, "because on_policy runs it"),
        (
            {"drafter": {"feature_layers": [0], "draft_vocab_size": 255, "ttt_steps": 2}},
            "stored states lack some of the layers 0",
        ),
    ]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        main(
            [
                "train",
                *write_recipe(
                    folder, target, data, max_steps=1, save_steps=1, decode_prompts=0, **more
                ),
            ]
        )
        out = capsys.readouterr().out
        assert reason in out and "without its layers" not in out


@pytest.mark.thorough
@pytest.mark.parametrize(("drafter", "layers"), [({}, [1, 2, 3]), ({"feature_layers": [2]}, [2])])
def test_a_new_drafter_reads_the_layers_that_are_stored(stored, tmp_path, capsys, drafter, layers):
    target = stored[0]
    data = shutil.copytree(stored[1], tmp_path / "data")
    words = [
        "features",
        "--data",
        str(data),
        "--target",
        str(target),
        "--layers",
        "wide",
        "--overwrite",
    ]
    assert main([*words, "--dtype", "float32", "--device", "cpu"]) == 0
    drafter = {"draft_vocab_size": 255, "ttt_steps": 2, **drafter}
    run(
        tmp_path, "wide", target, data, drafter=drafter, max_steps=1, save_steps=1, decode_prompts=0
    )
    assert load_json(tmp_path / "wide" / "drafter" / "config.json")["feature_layers"] == layers
    out = capsys.readouterr().out
    assert "without its layers" in out and (
        "feature layers 1, 2, 3, which the data stores" in out
    ) == (len(layers) > 1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tree", "most"), [("chain:3", 24), ("dynamic:3,3,8", 9), ("fanout:3x2", 9), ("fanout:3x2", 24)]
)
def test_replayed_answers_give_the_figures_of_decoding(stored, tree, most):
    """`most` tokens: some answers are cut, or all end where the data does."""
    folder, data = stored
    target = Target.load(str(folder), "float32", "cpu")
    check_replayed(target, data, make_drafter(target), [tree], most)
