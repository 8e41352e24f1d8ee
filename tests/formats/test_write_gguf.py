"""GGUF files from tiny checkpoints, read back by transformers' loader."""

from __future__ import annotations

import gguf
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from drafttrain.cli import main
from drafttrain.errors import UserError
from drafttrain.formats.gguf_tokenizer import RULES
from drafttrain.formats.write_gguf import write_gguf
from tests.conftest import make_tokenizer as without_merges
from tests.files import dump_json, load_json
from tests.formats.checkpoints import make_checkpoint, make_tokenizer


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_logits_come_back(tmp_path, family):
    model = make_checkpoint(tmp_path / "hf", family)
    path = write_gguf(tmp_path / "hf", tmp_path / "out" / "m.gguf", "bfloat16")
    back = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    ids = torch.arange(1, 41)[None]
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_llama3_frequencies(tmp_path):
    """transformers' loader drops this tensor, so it is read as llama.cpp does: frequencies are divided by it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = make_checkpoint(tmp_path / "hf", "llama3")
    path = write_gguf(tmp_path / "hf", tmp_path / "m.gguf", "float32")
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}[
        "rope_freqs.weight"
    ]
    plain = 1.0 / 5000.0 ** (torch.arange(0, 16, 2) / 16)
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    torch.testing.assert_close(plain / torch.tensor(found), wanted)
    assert not torch.allclose(plain, wanted)


def split_tokenizer(pattern: str):
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    return tokenizer


def test_the_rule_for_cutting_text_is_recognised_or_refused(tmp_path):
    for parts, name in RULES.items():
        if len(parts) == 1 and parts != ("bytes",):
            make_checkpoint(tmp_path / name, "llama", split_tokenizer(parts[0]))
            path = write_gguf(tmp_path / name, tmp_path / name / "m.gguf", "float32")
            assert gguf.GGUFReader(path).get_field("tokenizer.ggml.pre").contents() == name
    make_checkpoint(tmp_path / "odd", "llama", split_tokenizer(r"\d"))
    with pytest.raises(
        UserError, match=r"cuts text by \['\\\\d'\], for which no name of llama.cpp is known"
    ):
        write_gguf(tmp_path / "odd", tmp_path / "odd.gguf", "float32")
    assert not (tmp_path / "odd.gguf").exists()


def test_a_tokenizer_comes_back(tmp_path):
    make_checkpoint(tmp_path / "hf", "llama")
    path = write_gguf(tmp_path / "hf", tmp_path / "out" / "m.gguf", "float32")
    before = AutoTokenizer.from_pretrained(tmp_path / "hf")
    after = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = "<|im_start|>user\n Héllo 42\n\n1.<|im_end|>"
    assert after(text).input_ids == before(text).input_ids
    reader = gguf.GGUFReader(path)
    for name, wanted in (("bos", 258), ("eos", 259), ("padding", 259)):
        assert reader.get_field(f"tokenizer.ggml.{name}_token_id").contents() == wanted
    assert reader.get_field("tokenizer.ggml.add_bos_token").contents() is False
    assert reader.get_field("tokenizer.chat_template").contents() == before.chat_template


def test_scores_give_the_order_of_merges(tmp_path):
    """Byte-fallback BPE becomes SentencePiece's form, whose best score goes first."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{i:02X}>": 3 + i for i in range(256)}}
    for text in ("▁", "a", "b", "c", "ab", "bc", "▁a"):
        vocab[text] = len(vocab)
    model = models.BPE(
        vocab=vocab,
        merges=[("b", "c"), ("a", "b"), ("▁", "a")],
        byte_fallback=True,
        unk_token="<unk>",
    )
    raw = Tokenizer(model)
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    make_checkpoint(tmp_path / "hf", "llama", tokenizer)
    path = write_gguf(tmp_path / "hf", tmp_path / "m.gguf", "float32")
    reader = gguf.GGUFReader(path)
    scores, types = (
        reader.get_field(f"tokenizer.ggml.{name}").contents() for name in ("scores", "token_type")
    )
    assert reader.get_field("tokenizer.ggml.model").contents() == "llama"
    assert scores[vocab["bc"]] > scores[vocab["ab"]] > scores[vocab["▁a"]]
    assert types[vocab["<0x41>"]] == 6 and types[1] == 3 and types[vocab["a"]] == 1
    assert types[len(vocab)] == 5  # rows of the embedding beyond the tokenizer


def test_what_a_file_cannot_say_is_refused(tmp_path):
    make_checkpoint(tmp_path / "hf", "llama")
    config = tmp_path / "hf" / "config.json"
    described = load_json(config)
    for change, message in (
        ({"hidden_act": "gelu"}, "llama.cpp computes silu"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}},
            "rope_type='dynamic' is not written",
        ),
        ({"model_type": "gpt2"}, "is a gpt2 model; GGUF is written for llama"),
    ):
        dump_json(config, {**described, **change})
        with pytest.raises(UserError, match=message):
            write_gguf(tmp_path / "hf", tmp_path / "m.gguf", "float32")
    make_checkpoint(tmp_path / "bytes", "llama", without_merges())
    with pytest.raises(UserError, match=r"has no merges, without which llama.cpp does not load it"):
        write_gguf(tmp_path / "bytes", tmp_path / "m.gguf", "float32")


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["transformers", "vllm", "gguf"])
def test_export_and_verify_of_a_draft_model(tmp_path, capsys, form):
    make_checkpoint(tmp_path / "hf", "llama")
    described = {"drafter_kind": "draft_model", "target": {"name": "user/big", "vocab_size": 300}}
    dump_json(tmp_path / "hf" / "drafttrain.json", described)
    args = ["--drafter", str(tmp_path / "hf")]
    assert (
        main(
            [
                "export",
                *args,
                "--format",
                form,
                "--output",
                str(tmp_path / "out"),
                "--speculative-tokens",
                "5",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    if form == "gguf":
        assert "--spec-draft-n-max 5" in printed and "draft.gguf" in printed
    else:
        assert (
            '"method": "draft_model"' in printed
            and '"num_speculative_tokens": 5' in printed
            and "user/big" in printed
        )
        assert "drafter_kind" not in (tmp_path / "out" / "config.json").read_text()
        assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab").input_ids
    assert main(["verify", *args, "--exported", str(tmp_path / "out")]) == 0
    other = make_checkpoint(tmp_path / "other", "llama")
    other.model.norm.weight.data.mul_(2.0)
    other.save_pretrained(tmp_path / "other")
    assert main(["verify", *args, "--exported", str(tmp_path / "other")]) == 2
    assert "computes other logits than the draft model" in capsys.readouterr().err


def test_a_downloaded_draft_model_is_compared_with_the_target_of_the_command(tmp_path, capsys):
    make_checkpoint(tmp_path / "hf", "llama")
    make_checkpoint(tmp_path / "same", "llama")
    make_checkpoint(tmp_path / "big", "llama")
    state = load_json(tmp_path / "big" / "tokenizer.json")
    vocabulary = state["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    dump_json(tmp_path / "big" / "tokenizer.json", state)
    command = [
        "export",
        "--drafter",
        str(tmp_path / "hf"),
        "--output",
        str(tmp_path / "out"),
        "--format",
        "sglang",
    ]
    assert main([*command, "--target", str(tmp_path / "big")]) == 2
    assert "the draft model has another vocabulary than its target" in capsys.readouterr().err
    assert main([*command, "--target", str(tmp_path / "same")]) == 0
    assert main([*command, "--target", "user/elsewhere"]) == 0
    assert (
        "target='user/elsewhere' cannot be read here: vocabularies are not compared"
        in capsys.readouterr().err
    )


def test_a_draft_model_with_another_vocabulary_is_for_engines_that_translate(tmp_path, capsys):
    make_checkpoint(tmp_path / "hf", "llama")
    described = {"drafter_kind": "draft_model", "target": {"name": "user/big", "vocab_size": 301}}
    dump_json(tmp_path / "hf" / "drafttrain.json", described)
    command = ["export", "--drafter", str(tmp_path / "hf"), "--output", str(tmp_path / "out")]
    for more in (["--format", "sglang"], ["--format", "vllm", "--engine-version", "0.31.0"]):
        assert main([*command, *more]) == 2
        assert "vocab_size=300 differs from the target's 301" in capsys.readouterr().err
