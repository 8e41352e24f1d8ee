"""Targets that read images: their parts load apart, and states are the model's own."""

from __future__ import annotations

import copy
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor

from drafttrain.errors import UserError
from drafttrain.inference import Decoder
from drafttrain.target import Target
from drafttrain.target.parts import Parts
from drafttrain.target.shell import load_shell
from drafttrain.target.sight import ImagePrompt, Sight
from tests.conftest import make_target
from tests.vlm_models import build, picture


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return build("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


def changed(
    built,
    folder,
    change,
):
    """A copy of the checkpoint whose weights `change` has changed."""
    shutil.copytree(built.folder, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return built._replace(folder=str(folder))


def shown(
    built,
    target,
    *seeds,
):
    """A prompt with a picture per seed."""
    text = "look: " + f"{built.marker} and ".join([""] * (len(seeds) + 1)) + "what?"
    return target.image_prompt(text, [picture(seed) for seed in seeds])


TEXT = torch.arange(5, 30)


def written(
    target,
    prompt,
    count,
):
    (made,) = Decoder(target, None, eos_ids=()).generate([prompt], max_new_tokens=count)
    return made.tokens


def test_text_loads_and_runs_nothing_of_the_towers(qwen):
    target = qwen.load()
    assert not Parts(target.model).towers
    assert written(target.pack(), TEXT, 4) == qwen.generate(ImagePrompt(TEXT, {}, ()), 4)
    assert target.sight._eyes is None


@pytest.mark.parametrize("packed", [False, True])
def test_states_are_the_inputs_of_the_models_own_layers(qwen, packed):
    """At positions of images too, where deepstack adds to them."""
    target = qwen.load()
    if packed:
        target.pack()
    prompt = shown(qwen, target, 1, 2)
    inputs = {}

    def enters(
        layer,
        args,
        kwargs,
    ):
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
    # A text prompt behind it begins at position 0.
    assert target.model.model.rope_deltas is None
    assert target.sight._eyes.model.rope_deltas is None


def test_threads_may_begin_together(qwen, monkeypatch):
    target = qwen.load()
    prompts = [shown(qwen, target, seed) for seed in (1, 2, 3, 4)]
    loads = []
    load = Sight._load_eyes
    monkeypatch.setattr(Sight, "_load_eyes", lambda self: loads.append(1) or load(self))

    def read(prompt):
        return target.read_images(prompt, (1,)).features

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(read, prompts))
    for mine, prompt in zip(got, prompts, strict=True):
        torch.testing.assert_close(mine, read(prompt))
    assert loads == [1]


TOWER = "model.visual.blocks.0.attn.qkv.weight"
FAULTS = {
    "lack weights model.visual.blocks.0.attn.qkv.weight": lambda weights: weights.pop(TOWER),
    "have unknown weights model.visual.blocks.0.extra": lambda weights: weights.update(
        {"model.visual.blocks.0.extra": torch.ones(2)}
    ),
    "model.visual.blocks.0.attn.qkv.weight holds values that are not finite": lambda weights: (
        weights[TOWER].fill_(float("nan"))
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_of_towers_are_checked_with_the_first_image(
    qwen,
    tmp_path,
    fault,
):
    built = changed(qwen, tmp_path, FAULTS[fault])
    target = built.load()
    assert written(target, TEXT, 4) == qwen.generate(ImagePrompt(TEXT, {}, ()), 4)
    for _ in range(2):  # the second prompt is no better
        with pytest.raises(UserError, match=f"its vision part: .*{fault}"):
            target.read_images(shown(built, target, 1), ())


def test_weights_of_the_text_part_are_checked_at_load(qwen, tmp_path):
    name = "model.language_model.layers.0.extra"
    built = changed(qwen, tmp_path, lambda weights: weights.update({name: torch.ones(2)}))
    with pytest.raises(UserError, match=f"unknown weights {name}"):
        built.load()


def test_a_loaded_model_sees_with_its_own_towers(qwen):
    """Its own generate is as before, and its towers keep their attention."""
    model = copy.deepcopy(qwen.model)
    target = Target.from_pretrained(model, tokenizer=qwen.processor.tokenizer)
    target.sight._processor = qwen.processor
    prompt = shown(qwen, target, 1, 2)
    want = qwen.generate(prompt, 12)
    assert qwen._replace(model=model).generate(prompt, 12) == want
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert written(target, prompt, 12) == want
    assert target.sight._eyes is model


def test_a_target_without_layers_is_of_the_same_class(qwen):
    shell = load_shell(qwen.folder, dtype="float32", device="cpu", weights=True)
    target = qwen.load()
    states = target.forward(TEXT[None], (target.num_layers,))
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


def test_refusals_are_one_line(qwen, monkeypatch):
    target = qwen.load()
    one = f"look: {qwen.marker} what?"
    with pytest.raises(UserError, match=r"\(LlamaForCausalLM\) reads no images"):
        make_target().image_prompt(one, [picture(1)])
    with pytest.raises(UserError, match=r"with 2 images"):
        target.read_images(target.image_prompt(one, [picture(1), picture(2)]), ())
    with pytest.raises(UserError, match="give one image per marker"):
        target.image_prompt(one * 2, [picture(1)])
    target.sight._processor = None  # the folder has none
    with pytest.raises(UserError, match="its processor cannot be loaded"):
        target.image_prompt(one, [picture(1)])

    def needs(*_, **__):
        raise ImportError("Qwen3VLVideoProcessor requires the Torchvision library, and more\nlines")

    monkeypatch.setattr(AutoProcessor, "from_pretrained", needs)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(
        UserError,
        match=r"its processor needs torchvision, which is not installed: pip install 'drafttrain\[vision\]' \(beside a "
        r"torch for CPUs: .* --index-url https://download.pytorch.org/whl/cpu\)",
    ):
        target.image_prompt(one, [picture(1)])


def test_a_model_that_does_not_continue_as_we_do_is_refused(qwen, monkeypatch):
    """Here because the text behind an image is put at its plain index."""
    target = qwen.load()
    run = Sight._run
    monkeypatch.setattr(
        Sight, "_run", lambda self, *rest, **more: run(self, *rest, **more)._replace(shift=0)
    )
    with pytest.raises(UserError, match="it continues them in another way than text"):
        target.read_images(shown(qwen, target, 1, 2), ())


def test_a_processor_is_loaded_from_the_targets_folder(qwen, tmp_path):
    pytest.importorskip("torchvision", reason="its video processor needs it")
    shutil.copytree(qwen.folder, tmp_path, dirs_exist_ok=True)
    parts = qwen.processor
    videos = hf.Qwen3VLVideoProcessor(patch_size=16)
    made = hf.Qwen3VLProcessor(parts.image_processor, parts.tokenizer, videos)
    made.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), dtype="float32", device="cpu")
    prompt = shown(qwen, target, 1, 2)
    assert written(target, prompt, 8) == qwen.generate(prompt, 8)


ROW_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}MARKER{% else %}{{ c['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
)


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "gemma3", "idefics3", "lighton_ocr"])
def test_markers_stand_for_the_tokens_of_images_in_a_row(family, tmp_path):
    """Runs of placeholders, rows with breaks between them, and tokens around them; side by side too."""
    built = build(family, tmp_path)
    target = built.load()
    for holder in (built.processor, target.tokenizer):
        holder.chat_template = ROW_TEMPLATE.replace("MARKER", built.marker)
    text = f"Look: {built.marker}{built.marker}, or {built.marker}?"
    pictures = [picture(1), picture(2, 120, 60), picture(1)]
    row = target.image_prompt(text, pictures).ids.tolist()
    marked = target.sight.marked_ids(row, pictures)
    assert marked == target.tokenizer(text, add_special_tokens=False)["input_ids"] != row
    with pytest.raises(UserError, match=r"does not hold the .* tokens of its image 4"):
        target.sight.marked_ids(row, [*pictures, picture(1)])


def test_a_shell_knows_the_placeholder_of_the_whole_model(tmp_path):
    built = build("llava", tmp_path)
    shell = load_shell(built.folder)
    assert shell.config.model_type == "llama"
    assert shell.sight.placeholder == built.model.config.image_token_index
