"""Targets that read images: their parts load apart, and states are the model's own."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor

from drafttrain.errors import UserError
from drafttrain.images import Picture
from drafttrain.inference import Decoder
from drafttrain.target import Target
from drafttrain.target.parts import Parts
from drafttrain.target.shell import load_shell
from drafttrain.target.sight import Sight
from tests.conftest import make_target
from tests.vlm_models import SEEN, build, picture


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return build("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return build("llava", tmp_path_factory.mktemp("llava"))


def changed(built, folder, change):
    """A copy of the checkpoint whose weights `change` has changed."""
    shutil.copytree(built.folder, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return built._replace(folder=str(folder))


def shown(built, target, *seeds):
    """A prompt with a picture per seed."""
    text = "look: " + f"{built.marker} and ".join([""] * (len(seeds) + 1)) + "what?"
    return target.image_prompt(text, [picture(seed) for seed in seeds])


def test_text_loads_and_runs_nothing_of_the_towers(qwen):
    target = qwen.load()
    assert not Parts(target.model).towers and type(target.model) is type(qwen.model)
    ids = torch.arange(5, 30)
    with torch.no_grad():
        want = qwen.model(input_ids=ids[None]).logits
    got = target.head(target.forward(ids[None], ()).last_hidden)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    Decoder(target.pack(), None).generate([ids], max_new_tokens=4)
    assert target.sight._eyes is None


@pytest.mark.parametrize("packed", [False, True])
def test_states_are_the_inputs_of_the_models_own_layers(qwen, packed):
    """At positions of images too, where deepstack adds to them."""
    target = qwen.load()
    if packed:
        target.pack()
    prompt = shown(qwen, target, 1, 2)
    inputs = {}

    def enters(layer, args, kwargs):
        inputs[layer] = args[0] if args else kwargs["hidden_states"]

    layers = qwen.model.model.language_model.layers
    hooks = [layer.register_forward_pre_hook(enters, with_kwargs=True) for layer in layers]
    logits = qwen.logits(prompt)
    for hook in hooks:
        hook.remove()
    out = target.read_images(prompt, (0, 1, 2))
    want = torch.cat([inputs[layer] for layer in layers], dim=-1)
    torch.testing.assert_close(out.features, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.head(out.last_hidden), logits, atol=1e-3, rtol=1e-4)
    # The text part is held once, and keeps nothing of the call.
    held = dict(target.sight._eyes.named_parameters())
    assert not any(name.startswith("model.language_model") for name in held)
    assert not target.body._forward_hooks and not target.body._forward_pre_hooks


def test_what_a_prompt_leaves_on_the_model_does_not_reach_the_next_text(qwen):
    target = qwen.load()
    ids = torch.arange(5, 30)
    before = target.model(input_ids=ids[None], use_cache=True)
    target.read_images(shown(qwen, target, 1, 2), ())
    after = target.model(input_ids=ids[None], use_cache=True)
    torch.testing.assert_close(after.logits, before.logits)
    assert target.model.model.rope_deltas is None
    assert target.sight._eyes.model.rope_deltas is None


def test_threads_may_begin_together(qwen, monkeypatch):
    target = qwen.load()
    prompts = [shown(qwen, target, seed) for seed in (1, 2, 3, 4)]
    want = [qwen.load().read_images(prompt, (1,)).features for prompt in prompts]
    loads = []
    load = Sight._load_eyes
    monkeypatch.setattr(Sight, "_load_eyes", lambda self: loads.append(1) or load(self))
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda prompt: target.read_images(prompt, (1,)).features, prompts))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert loads == [1]


TOWER = "model.visual.blocks.0.attn.qkv.weight"
FAULTS = {
    "lack weights model.visual.blocks.0.attn.qkv.weight": lambda weights: weights.pop(TOWER),
    "have unknown weights model.visual.blocks.0.extra": lambda weights: weights.update(
        {"model.visual.blocks.0.extra": torch.ones(2)}
    ),
    "have another shape of weights model.visual.blocks.0.attn.qkv.weight": lambda weights: (
        weights.update({TOWER: torch.ones(3, 3)})
    ),
    "model.visual.blocks.0.attn.qkv.weight holds values that are not finite": lambda weights: (
        weights[TOWER].fill_(float("nan"))
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_of_towers_are_checked_with_the_first_image(qwen, tmp_path, fault):
    built = changed(qwen, tmp_path, FAULTS[fault])
    target = built.load()
    ids = torch.arange(5, 30)
    target.forward(ids[None], ())
    for _ in range(2):  # the second prompt is no better
        with pytest.raises(UserError, match=fault) as error:
            target.read_images(shown(built, target, 1), ())
        assert "its vision part" in str(error.value) and len(str(error.value).splitlines()) == 1


def test_weights_of_the_text_part_are_checked_at_load(qwen, tmp_path):
    built = changed(
        qwen,
        tmp_path / "more",
        lambda weights: weights.update({"model.language_model.layers.0.extra": torch.ones(2)}),
    )
    with pytest.raises(UserError, match=r"unknown weights model.language_model.layers.0.extra"):
        built.load()
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    built = changed(qwen, tmp_path / "less", lambda weights: weights.pop(name))
    with pytest.raises(UserError, match=f"lack weights {name}"):
        built.load()


def test_sizes_of_towers_are_checked_before_they_are_built(qwen, tmp_path):
    shutil.copytree(qwen.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["depth"] = 10**9
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"=1000000000 in config.json must be 1 to 1000"):
        qwen._replace(folder=str(tmp_path)).load()


def test_a_loaded_model_sees_with_its_own_towers(qwen):
    """Its own generate is as before, and its towers keep their attention."""
    model = copy.deepcopy(qwen.model)
    towers = model.config.vision_config._attn_implementation
    target = Target.from_pretrained(model, tokenizer=qwen.processor.tokenizer)
    target.sight._processor = qwen.processor
    prompt = shown(qwen, target, 1, 2)
    want = qwen.generate(prompt, 12)
    assert qwen._replace(model=model).generate(prompt, 12) == want
    assert model.config.vision_config._attn_implementation == towers
    (got,) = Decoder(target, None, eos_ids=()).generate([prompt], max_new_tokens=12)
    assert got.tokens == want
    assert target.sight._eyes is model


def test_a_target_without_layers_embeds_as_the_whole(qwen):
    shell = load_shell(qwen.folder, dtype="float32", device="cpu", weights=True)
    target = qwen.load()
    ids = torch.arange(5, 30)
    torch.testing.assert_close(shell.embed(ids), target.embed(ids))
    states = target.forward(ids[None], (target.num_layers,))
    got = shell.head(shell.final_norm(states.features))
    torch.testing.assert_close(got, target.head(states.last_hidden), atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match="loaded without its layers"):
        shell.read_images(shown(qwen, target, 1), ())


def test_bfloat16_weights_see(qwen, tmp_path):
    """Towers compute in what the text part computes in, before and after it widens."""
    target = Target.load(qwen.folder, dtype="bfloat16", device="cpu")
    target.sight._processor = qwen.processor
    prompt = shown(qwen, target, 1)
    want = qwen.load().read_images(prompt, (1,)).features
    for _ in range(2):
        got = target.read_images(prompt, (1,)).features.float()
        assert (got - want).norm() < 0.1 * want.norm()
        target.pack()


def test_refusals_are_one_line(qwen, llava, monkeypatch):
    target = llava.load()
    text_only = make_target()
    text_only.name = "llama"
    with pytest.raises(UserError, match=r"target='llama' \(LlamaForCausalLM\) reads no images"):
        text_only.image_prompt("what?", [picture(1)])
    one = f"look: {llava.marker} what?"
    with pytest.raises(UserError, match=r"2 images .* give one image per marker"):
        target.read_images(target.image_prompt(one, [picture(1), picture(2)]), ())
    with pytest.raises(UserError, match="give one image per marker"):
        target.image_prompt(one * 2, [picture(1)])
    with pytest.raises(UserError, match="its processor cannot be loaded"):
        Target.load(llava.folder, dtype="float32", device="cpu").image_prompt(one, [picture(1)])

    def needs(*_, **__):
        raise ImportError("Qwen3VLVideoProcessor requires the Torchvision library, and more\nlines")

    monkeypatch.setattr(AutoProcessor, "from_pretrained", needs)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    fresh = Target.load(qwen.folder, dtype="float32", device="cpu")
    with pytest.raises(
        UserError,
        match=r"its processor needs torchvision, which is not installed: pip install 'drafttrain\[vision\]' \(beside a "
        r"torch for CPUs: .* --index-url https://download.pytorch.org/whl/cpu\)",
    ):
        fresh.image_prompt(one, [picture(1)])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match="needs PIL, which is not installed"):
        Picture(b"").pixels()


def test_a_model_that_does_not_continue_as_we_do_is_refused(qwen, monkeypatch):
    """Here because the text behind an image is put at its plain index."""
    target = qwen.load()
    run = Sight._run
    monkeypatch.setattr(
        Sight, "_run", lambda self, *rest, **more: run(self, *rest, **more)._replace(shift=0)
    )
    with pytest.raises(UserError, match="continues a prompt with images in another way than text"):
        target.read_images(shown(qwen, target, 1, 2), ())


def test_prefixes_in_both_directions_are_refused(tmp_path):
    built = build("paligemma", tmp_path)
    with pytest.raises(UserError, match=r"PaliGemma.* states that change with later tokens"):
        built.load()


def test_a_processor_is_loaded_from_the_targets_folder(qwen, tmp_path):
    pytest.importorskip("torchvision", reason="its video processor needs it")
    shutil.copytree(qwen.folder, tmp_path, dirs_exist_ok=True)
    parts = qwen.processor
    sizes = {"shortest_edge": SEEN * SEEN, "longest_edge": 112 * 112}
    videos = hf.Qwen3VLVideoProcessor(size=sizes, patch_size=16)
    kind = hf.Qwen3VLProcessor
    kind(parts.image_processor, parts.tokenizer, videos).save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), dtype="float32", device="cpu")
    prompt = shown(qwen, target, 1, 2)
    (got,) = Decoder(target, None, eos_ids=()).generate([prompt], max_new_tokens=8)
    assert got.tokens == qwen.generate(prompt, 8)
