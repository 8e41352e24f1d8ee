"""Targets without layers or without any weights, and the dtypes of files and devices."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaModel

from drafttrain.errors import UserError
from drafttrain.inference import generate
from drafttrain.states.source import run_rows
from drafttrain.target import Target, load_shell, loading, resolve_dtype
from drafttrain.target.loading import architectures_of
from tests.conftest import make_target
from tests.files import dump_json, load_json
from tests.inference.any_family import FAMILIES, PROMPT, VARIANTS, build, wrapped
from tests.target.layer_files import delete_layer_files, save


def test_a_shell_has_the_identity_of_its_target_and_no_weights(target_dir):
    shell = load_shell(str(target_dir))
    target = Target.load(str(target_dir), device="cpu")
    assert shell.identity() == target.identity()
    assert (
        shell.device.type == "meta" and shell.forms == [] and len(target.forms) == target.num_layers
    )
    assert architectures_of(str(target_dir)) == ["LlamaForCausalLM"]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    ("name", "more", "path"),
    [
        ("llama", {}, "packed"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "snapshot"),
    ],
)
def test_a_shell_has_the_decoding_path_of_its_config_and_does_not_decode(
    name, more, path, weights, tmp_path
):
    shell = load_shell(
        save(build(FAMILIES[name], more), tmp_path), "float32", "cpu", weights=weights
    )
    assert shell.decoding_path == path and bool(shell.reason) == (path == "snapshot")
    for use in (
        lambda: generate(shell, None, [1, 2], max_new_tokens=1),
        lambda: list(run_rows(shell, (1,), [PROMPT])),
    ):
        with pytest.raises(
            UserError,
            match="was loaded without its layers, so it can neither compute states nor decode",
        ):
            use()


def test_a_missing_target_is_an_error_for_shells_and_no_architectures(tmp_path):
    missing = str(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"target=.*no model folder with a config\.json there"):
        load_shell(missing)
    assert architectures_of(missing) == architectures_of("") == []


def test_auto_is_the_dtype_of_a_device_and_none_of_a_file(monkeypatch):
    monkeypatch.setattr("drafttrain.target.devices.has_bfloat16", lambda: True)
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16") == torch.float16
    with pytest.raises(UserError, match=r"dtype='auto' is not one of float32, bfloat16, float16$"):
        resolve_dtype("auto")
    with pytest.raises(UserError, match=r"dtype='int3' is not one of auto, float32"):
        resolve_dtype("int3", torch.device("cpu"))


# -- shells with weights ----------------------------------------------------------------------------------------------


def assert_same(shell, target, ids):
    """Embedding, final norm and head are those of the whole target, to the bit."""
    out = target.forward(ids, (target.num_layers,))
    states = torch.randn(1, 5, target.hidden_size).to(target.compute_dtype)
    assert torch.equal(shell.embed(ids), target.embed(ids))
    assert torch.equal(shell.final_norm(out.features), out.last_hidden)
    assert torch.equal(shell.head(states), target.head(states))
    assert (
        torch.equal(shell.head_weight, target.head_weight) and shell.identity() == target.identity()
    )


CHEAP = [
    "llama", "gpt2", "opt", "phi", "gemma3_text", "cohere", "granite", "minicpm3", "hyperclovax", "gpt_neox", "qwen3_moe",
    "deepseek_v3", "lfm2", "gemma4_text",
]  # fmt: skip


def shell_or_line(folder):
    """The shell and '', or None and the error."""
    try:
        return load_shell(folder, dtype="float32", device="cpu", weights=True), ""
    except UserError as error:
        return None, str(error)


def check_family(name, tmp_path):
    """A shell equals its target, in each variant of the family; a family that is no target is one line or a shell too."""
    built = 0
    for number, more in enumerate(VARIANTS.values()):
        try:
            model = build(FAMILIES[name], more)
        except Exception:
            continue  # sizes that this family does not take together
        built += 1
        try:
            folder = save(model, tmp_path / str(number))
        except Exception:
            continue  # transformers cannot save it
        target, _ = wrapped(model, name)
        shell, line = shell_or_line(folder)
        if shell is None:
            assert len(line.splitlines()) == 1
            # The first three have streams of states, Inkling's states pass more than one norm.
            streams = ("gemma3n_text", "deepseek_v4", "hy_v4")
            assert target is None or name in (*streams, "inkling2_text")
        elif target is not None:
            assert_same(shell, Target.wrap(model, shell.tokenizer, folder), PROMPT[None])
        if name in CHEAP:
            return True
    return bool(built)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHEAP)
def test_a_shell_has_the_embedding_norm_and_head_of_its_target(name, tmp_path):
    assert check_family(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(CHEAP)))
def test_every_family_has_a_shell_or_a_reason(name, tmp_path):
    if not check_family(name, tmp_path):
        pytest.skip("no variant of the sizes makes a model")


@pytest.mark.thorough
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shell_needs_no_files_of_layers(tied, dtype, tmp_path):
    model = make_target(tie_word_embeddings=tied).model
    name = save(model, tmp_path, shard="20KB")
    target = Target.load(name, dtype, "cpu")
    delete_layer_files(tmp_path)
    shell = load_shell(name, dtype=dtype, device="cpu", weights=True)
    assert shell.compute_dtype == getattr(torch, dtype) and shell.device.type == "cpu"
    if (
        target.compute_dtype == shell.compute_dtype
    ):  # CPUs without bfloat16 units hold whole targets as float32
        assert_same(shell, target, PROMPT[None])
    assert (shell.head_weight.data_ptr() == shell.embed_weight.data_ptr()) == tied
    assert all(weight.device.type == "meta" for weight in shell.layers.parameters())
    with pytest.raises(UserError, match=r"cannot be loaded|is not there"):
        Target.load(name, dtype, "cpu")


def test_a_model_type_of_the_repositorys_own_is_read_as_its_class_is(tmp_path):
    """Kimi K2's config.json: a DeepSeek-V3 of a type that transformers lacks, with code of its own."""
    folder = save(build(FAMILIES["deepseek_v3"], {"num_key_value_heads": 4}), tmp_path)
    file = tmp_path / "config.json"
    own = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration.DeepseekV3Config"}}
    file.write_text(json.dumps(load_json(file) | own))
    shell = load_shell(folder, "float32", "cpu", trust_remote_code=True, weights=True)
    assert_same(shell, Target.load(folder, "float32", "cpu"), PROMPT[None])


@pytest.mark.parametrize(
    ("whole", "text"), [("kimi_k25", "deepseek_v3"), ("minimax_m3_vl", "minimax_m3_vl_text")]
)
def test_a_shell_of_a_model_that_reads_images_is_its_language_model(whole, text, tmp_path):
    """Families that have a class for text and images, but none for the text alone of such files."""
    config = AutoConfig.for_model(
        whole,
        text_config=build(FAMILIES[text], {"num_key_value_heads": 4}).config.to_dict(),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        tie_word_embeddings=False,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    shell = load_shell(save(model, tmp_path), "float32", "cpu", weights=True)
    states = torch.randn(3, shell.hidden_size)
    normed = model.model.language_model.norm(states)
    assert torch.equal(shell.embed_weight, model.get_input_embeddings().weight)
    assert torch.equal(shell.final_norm(states), normed)
    assert torch.equal(shell.head(normed), model.lm_head(normed))


def test_a_shell_of_a_target_whose_layers_differ_in_their_heads(tmp_path):
    """Gemma 4's layers without a window have fewer key heads."""
    wide = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 16}
    folder = save(build(FAMILIES["gemma4_text"], wide), tmp_path)
    shell = load_shell(folder, "float32", "cpu", weights=True)
    assert_same(shell, Target.load(folder, "float32", "cpu"), PROMPT[None])


def test_a_shell_names_files_and_weights_that_are_missing_or_wrong(tmp_path):
    name = save(make_target().model, tmp_path / "target", shard="20KB")
    index = tmp_path / "target" / "model.safetensors.index.json"
    content = load_json(index)
    head = content["weight_map"].pop("lm_head.weight")
    dump_json(index, content)
    with pytest.raises(
        UserError, match=r"its files do not hold lm_head\.weight as config\.json describes"
    ):
        load_shell(name, device="cpu", weights=True)
    content["weight_map"]["lm_head.weight"] = head
    dump_json(index, content)
    (tmp_path / "target" / head).unlink()
    with pytest.raises(
        UserError, match=rf"{head}, which holds lm_head\.weight, is not there; download it again"
    ):
        load_shell(name, device="cpu", weights=True)
    save_file(
        {"lm_head.weight": torch.zeros(300, 32, dtype=torch.float8_e4m3fn)},
        tmp_path / "target" / head,
    )
    with pytest.raises(
        UserError, match=r"lm_head\.weight is quantized \(F8_E4M3\); load the whole target"
    ):
        load_shell(name, device="cpu", weights=True)
    save_file({"lm_head.weight": torch.full((300, 32), torch.nan)}, tmp_path / "target" / head)
    with pytest.raises(UserError, match=r"lm_head\.weight holds values that are not finite"):
        load_shell(name, device="cpu", weights=True)


def test_of_a_hub_id_only_the_files_of_the_shell_are_downloaded(tmp_path, monkeypatch):
    folder = tmp_path / "target"
    save(make_target().model, folder, shard="20KB")
    kept = delete_layer_files(folder)
    asked = []
    shell = load_shell(str(folder), dtype="float32", device="cpu")
    shell.path = "user/name"
    monkeypatch.setattr(
        loading, "hub_snapshot", lambda repo, patterns, key: asked.extend(patterns) or folder
    )
    shell.read_weights(torch.device("cpu"))
    assert set(asked) == {"model.safetensors.index.json", *kept}


def test_a_body_whose_norm_is_not_the_last_step_is_refused_with_its_class(target_dir, monkeypatch):
    forward = LlamaModel.forward

    def doubled(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.last_hidden_state = out.last_hidden_state * 2
        return out

    monkeypatch.setattr(LlamaModel, "forward", doubled)
    with pytest.raises(
        UserError,
        match=r"\(LlamaForCausalLM\) does not show its final norm \(the body's result is not one",
    ):
        load_shell(str(target_dir), device="cpu", weights=True)
