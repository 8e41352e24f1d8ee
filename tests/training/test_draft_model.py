"""Training runs of a draft model: from layers, with LoRA and on-policy data, pretrained on text, resumed."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.cli import main
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import load_drafter
from drafttrain.files import write_jsonl
from drafttrain.inference import generate
from drafttrain.target import Target
from tests.files import load_json
from tests.training.runs import write_recipe

SHAPES = "{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2}"


@pytest.fixture
def train(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def run(*words):
        recipe = write_recipe(
            tmp_path, *tiny, kind="draft_model", drafter={}, lr_scheduler_type="constant"
        )
        return main(["train", *recipe, *words])

    return run


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "more",
    [[], pytest.param(["packing=true", "max_length=64"], marks=pytest.mark.slow)],
    ids=["", "packed"],
)
def test_layers_of_the_target_are_distilled_and_the_run_goes_on_exactly(
    train, tiny, tmp_path, more
):
    words = [
        "drafter.layers=[0, 2]",
        "on_policy={share: 0.5, refresh_steps: 2, responses: 4, max_new_tokens: 8}",
        *more,
    ]
    assert train(*words, f"output_dir={tmp_path / 'whole'}") == 0
    assert train(*words, "max_steps=3") == 0
    assert train(*words) == 0
    summary = load_json(tmp_path / "drafter" / "training.json")
    assert (
        summary["steps"] == 6
        and summary["vocabulary"]["size"] == 300
        and summary["on_policy_rows"] > 0
    )
    assert (
        1 <= summary["held_out"]["eval_accepted_length"] <= 5
        and "eval_agree@2" not in summary["held_out"]
    )
    whole, resumed = (weights(tmp_path / name) for name in ("whole", "drafter"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    target = Target.load(str(tiny[0]), "float32")
    drafter = load_drafter(str(tmp_path / "drafter"), target)
    assert drafter.kind == "draft_model" and drafter.runner.num_layers == 2
    want = generate(target, None, [5, 6, 7], max_new_tokens=20).tokens
    assert (
        generate(
            target, drafter, [5, 6, 7], max_new_tokens=20, spec=TreeSpec.parse("fanout:3x2")
        ).tokens
        == want
    )


@pytest.mark.thorough
def test_lora_goes_on_from_its_adapter(train, tmp_path):
    words = ["drafter.layers=[0, 2]", "drafter.lora={r: 4}", "learning_rate=0.01"]
    assert train(*words, f"output_dir={tmp_path / 'whole'}") == 0
    assert train(*words, "max_steps=3") == 0
    assert train(*words) == 0
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        whole, resumed = (load_file(tmp_path / folder / name) for folder in ("whole", "drafter"))
        assert all(torch.equal(whole[key], resumed[key]) for key in whole), name
    before, after = (
        weights(tmp_path / "drafter" / name) for name in ("checkpoint-3", "checkpoint-6")
    )
    assert any(not torch.equal(before[key], after[key]) for key in before)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "more", [[], ["drafter.lora={r: 4}", "learning_rate=0.01"]], ids=["", "lora"]
)
def test_the_weights_that_decode_best_are_taken_at_the_end(train, tmp_path, monkeypatch, more):
    lengths = iter((2.0, 1.5))
    monkeypatch.setattr(
        "drafttrain.train.acceptance", lambda *_: {"accepted_length": next(lengths)}
    )
    assert train("drafter.layers=[0, 2]", *more) == 0
    taken, best, last = (
        weights(tmp_path / "drafter" / name) for name in ("", "checkpoint-3", "checkpoint-6")
    )
    assert all(torch.equal(taken[key], best[key]) for key in best)
    assert any(not torch.equal(taken[key], last[key]) for key in last)


@pytest.mark.thorough
def test_text_pretrains_and_the_result_is_distilled(train, tiny, tmp_path):
    text = tmp_path / "corpus.jsonl"
    write_jsonl(text, [{"text": f"one two three {i} " * 20} for i in range(12)])
    first = tmp_path / "pretrained"
    words = ["init=random", f"drafter.config={SHAPES}", "loss=next_token", "max_length=64"]
    assert (
        train(*words, f"data={text}", f"output_dir={first}", "learning_rate=0.01", "max_steps=12")
        == 0
    )
    held = load_json(first / "training.json")["held_out"]
    assert held["eval_loss"] < 4.5, "the alphabet alone leaves 5.6"
    assert train(f"init={first}", "max_steps=2") == 0
    assert not torch.equal(
        *(weights(f)["model.norm.weight"] for f in (first, tmp_path / "drafter"))
    )
    assert (
        train(*words, f"output_dir={tmp_path / 'answers'}", "max_steps=2") == 0
    )  # a data set's tokens, all of them


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["init=target"], r"error: drafter.layers=\[\] must be ascending layers"),
        (["drafter.ttt_steps=3"], r"error: unknown key drafter.ttt_steps"),
        (
            ["kind=eagle3", "loss=next_token"],
            r"error: loss='next_token' pretrains language models; kind='eagle3'",
        ),
        (
            ["data=corpus.txt"],
            r"error: data='corpus.txt' is raw text, which only loss=next_token learns from",
        ),
        (["data=corpus.txt", "loss=next_token"], r"error: data='corpus.txt': no such text file"),
        (
            ["loss=next_token", "on_policy={share: 0.5}"],
            r"error: on_policy is scored by the target",
        ),
        (["on_policy={shares: 0.5}", "drafter.layers=[0]"], r"error: unknown key on_policy.shares"),
    ],
)
def test_each_mistake_ends_in_one_clear_line(train, capsys, words, message):
    assert train(*words) == 2
    assert re.search(message, capsys.readouterr().err)
