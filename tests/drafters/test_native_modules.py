"""Prediction modules in the layouts of Qwen3-Next, Qwen3.5, DeepSeek-V3 and GLM-4.x-MoE: read, run, trained, decoded, written."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.drafters.mtp.model import MTP
from drafttrain.drafters.registry import load_drafter
from drafttrain.drafters.shipping import ExportRequest, check_expressible, find_drafter, shipping
from drafttrain.errors import UserError
from drafttrain.target import Target, load_shell
from drafttrain.target.own_layer import OwnLayer, causal
from tests.drafters.helpers import check_gradients, make_batch, run_step
from tests.drafters.layer_kinds import check_parity
from tests.drafters.native_families import FAMILIES, VOCAB, H, reference, write_checkpoint
from tests.files import load_json

ALL = torch.arange(VOCAB)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_a_module_computes_what_is_published(name, tmp_path):
    """All tensors of the real layout are read, and the first depth gives the reference's states."""
    tensors = write_checkpoint(name, tmp_path)
    shell = load_shell(str(tmp_path), "float32", weights=True)
    drafter = MTP.native(shell, ALL, {}).eval()
    assert isinstance(drafter.blocks[0].layer, OwnLayer)
    generator = torch.Generator().manual_seed(2)
    embeds, states = torch.randn(2, 9, H, generator=generator)
    positions = torch.arange(9) + 20
    with torch.no_grad():
        ours = drafter.step(drafter.fuse(states), embeds, positions, [causal])
        last = drafter.step(
            drafter.fuse(states),
            embeds,
            positions,
            [lambda q, k, v: causal_rows(q, k, v)],
            torch.tensor([8]),
        )
    torch.testing.assert_close(
        ours, reference(name, tensors, embeds, states, positions), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(last, ours[8:], rtol=1e-4, atol=1e-5)


def causal_rows(query, key, value):
    """Attention of the last token only."""
    padded = torch.cat((query.new_zeros(len(key) - len(query), *query.shape[1:]), query))
    return causal(padded, key, value)[-len(query) :]


def begin(target, **options):
    drafter = MTP.native(target, options.pop("kept", ALL), options)
    drafter.bind(target)
    return drafter


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["deepseek-v3", pytest.param("glm-4-moe", marks=pytest.mark.slow)])
def test_both_halves_are_one_forward(name, tmp_path):
    write_checkpoint(name, tmp_path)
    target = Target.load(str(tmp_path), "float32", "cpu")
    check_parity(lambda: begin(target, ttt_steps=4).eval(), target)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_alone_gives_the_shapes_of_the_checkpoints_module(name, tmp_path):
    write_checkpoint(name, tmp_path)
    held = MTP.native(
        load_shell(str(tmp_path), "float32", weights=True), ALL, {"train_head": False}
    )
    with torch.device("meta"):
        target = Target.wrap(
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)), None, name=name
        )
        options = MTP.native_options(target)
        planned = MTP(
            MTP.config_class.for_target(target, draft_vocab_size=VOCAB, train_head=False, **options)
        )
    shapes = [
        {part: weight.shape for part, weight in each.state_dict().items()}
        for each in (held, planned)
    ]
    assert shapes[0] == shapes[1]
    for key in options.keys() - {"target_layer"}:
        assert getattr(held.config, key) == getattr(planned.config, key), key


def test_gradients_are_the_same_with_checkpointing(tmp_path):
    """Backward computes the family's layer again, with the drafter's attention."""
    write_checkpoint("deepseek-v3", tmp_path)
    drafter = begin(target := Target.load(str(tmp_path), "float32", "cpu")).train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            drafter.gradient_checkpointing_enable()
        drafter.zero_grad()
        run_step(drafter, target, make_batch()).loss.backward()
        found.append({part: weight.grad.clone() for part, weight in drafter.named_parameters()})
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_training_goes_on_decodes_and_is_saved(name, tmp_path):
    """One batch is learned from the module on, and a saved drafter is the same."""
    write_checkpoint(name, tmp_path / "target")
    target = Target.load(str(tmp_path / "target"), "float32", "cpu")
    drafter = begin(target)
    before = run_step(drafter, target, make_batch())
    before.loss.backward()
    check_gradients(drafter)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    for _ in range(12):
        optimizer.zero_grad()
        run_step(drafter, target, make_batch()).loss.backward()
        optimizer.step()
    assert run_step(drafter, target, make_batch()).loss < 0.8 * before.loss.detach()
    drafter.eval()
    drafter.save_pretrained(tmp_path / "drafter")
    again = load_drafter(str(tmp_path / "drafter"), target)
    losses = [run_step(each, target, make_batch()).loss for each in (drafter, again)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        name if name == "deepseek-v3" else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_an_export_is_the_familys_own_layout(name, tmp_path):
    """Trained or not, all tensors return under their names, and the export drafts what the drafter does."""
    target = tmp_path / "target"
    tensors = write_checkpoint(name, tmp_path / "target")
    shell = load_shell(str(target), "float32", weights=True)
    drafter = begin(shell, train_head=False)
    drafter.save_pretrained(tmp_path / "drafter")
    trained = find_drafter(str(tmp_path / "drafter"))
    form = FAMILIES[name]
    out = tmp_path / "out"
    check_expressible(trained, "vllm").write(
        trained, "vllm", ExportRequest(out, torch.float32, str(target))
    )
    written = load_file(out / "model.safetensors")
    assert written.keys() == {form.module + key for key in tensors}
    for key, weight in tensors.items():
        torch.testing.assert_close(written[form.module + key], weight, msg=key)
    config = load_json(out / "config.json")
    assert config["architectures"] == [form.model.__name__]
    assert config.get("num_nextn_predict_layers") or config["mtp_num_hidden_layers"] == 1
    figures = shipping("mtp").check(trained, out)
    assert figures["same_tokens"] and figures["max_log_prob_difference"] < 1e-4
    written[next(iter(written))] += 0.5
    save_file(written, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError):
        shipping("mtp").check(trained, out)


@pytest.mark.thorough
def test_what_engines_cannot_load_of_it(tmp_path):
    target = tmp_path / "target"
    write_checkpoint("qwen3.5", target)
    begin(load_shell(str(target), "float32", weights=True), modules=2).save_pretrained(
        tmp_path / "drafter"
    )
    trained = find_drafter(str(tmp_path / "drafter"))
    reasons = " ".join(shipping("mtp").unsupported(trained, "vllm"))
    assert "train_head=true" in reasons and "modules=2" in reasons and "model_type" not in reasons
    assert "model_type=qwen3_5_text" in " ".join(shipping("mtp").unsupported(trained, "sglang"))
    assert shipping("mtp").options(trained)["vLLM"] == {"method": "mtp"}
