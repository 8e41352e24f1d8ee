"""Writes a Hugging Face checkpoint of the Llama, Qwen2, Qwen3 or Gemma 3 family as one GGUF file for llama.cpp.

Tensor names, types, merges and special tokens come from the gguf library. Written here is what a family needs besides: Llama's
query and key rows in llama.cpp's rotary order, Gemma's norm factors plus one, and the name of the tokenizer's pre-tokenization
rule. That rule is recognized by its regular expression, not guessed: llama.cpp with another rule would tokenize other text than
the target does. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafttrain.errors import UserError
from drafttrain.files import Json, replacing, scratch_folder, writing
from drafttrain.formats.weights import read_weights

Data = tuple[np.ndarray, gguf.GGMLQuantizationType]  # a tensor as the file holds it

FAMILIES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
_TYPES = {
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
_ROPES = ("default", "linear", "llama3")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Pre-tokenization rule, as tokenizer.json writes it -> llama.cpp's name for it.
_RULES = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (_WORDS.format(digits=r"\p{N}"),): "qwen2",
    (_WORDS.format(digits=r"\p{N}{1,3}"),): "llama-bpe",
}


def write_gguf(folder: Path, output: Path, dtype: torch.dtype, tokenizer_folder: Path | None = None) -> Path:
    """Writes the model in `folder` to the file `output`; vectors are float32, matrices have `dtype`.

    Args:
        tokenizer_folder: where the tokenizer is, if not with the model.

    Raises:
        UserError: a family, rotary embedding, bias or tokenizer that the format or llama.cpp does not support.
    """
    config = AutoConfig.from_pretrained(folder)
    family = config.model_type
    if family not in FAMILIES:
        raise UserError(
            f"{str(folder)!r} is a {family} model; GGUF is written for {', '.join(FAMILIES)}: use llama.cpp's own converter"
        )
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder or folder)
    tensors = _tensors(config, read_weights(folder), dtype)
    with writing(output), replacing(output) as part:
        writer = gguf.GGUFWriter(str(part), gguf.MODEL_ARCH_NAMES[FAMILIES[family]])
        _add_shape(writer, config)
        writer.add_file_type(_TYPES[dtype][1])
        _add_tokenizer(writer, tokenizer, config.vocab_size)
        for name, (data, kind) in tensors.items():
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return output


# -- weights --------------------------------------------------------------------------------------------------------


def _tensors(config: PreTrainedConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Data]:
    """The file's tensors by llama.cpp's names."""
    names = gguf.get_tensor_name_map(FAMILIES[config.model_type], config.num_hidden_layers)
    made: dict[str, Data] = {}
    for name, tensor in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise UserError(f"{name} has no place in a {config.model_type} GGUF file: no plain checkpoint")
        values = tensor.float()
        if config.model_type == "llama" and ".self_attn." in name and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            # Half-split rotary pairs (i, i + e/2) -> neighbors (2i, 2i + 1).
            values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            values = values + 1
        kind = gguf.GGMLQuantizationType.F32 if values.dim() == 1 else _TYPES[dtype][0]
        made[theirs] = gguf.quants.quantize(values.contiguous().numpy(), kind), kind
    factors = _rope_factors(config)
    if factors is not None:
        made["rope_freqs.weight"] = factors, gguf.GGMLQuantizationType.F32
    return made


def _rope_factors(config: PreTrainedConfig) -> np.ndarray | None:
    """[e/2] divisors of the rotary frequencies, the file's form of Llama 3's scaling; None without that scaling."""
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))  # [e/2]
    size = _head_dim(config)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    return (plain / scaled).numpy()


def _rope(config: PreTrainedConfig) -> Json:
    rope = config.rope_parameters or {}
    rope = rope.get("full_attention", rope)
    return {"rope_type": "default", **rope}


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_shape(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    size, rope = _head_dim(config), _rope(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope["rope_theta"])
    kind, family, fields = rope["rope_type"], config.model_type, config.to_dict()
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    gemma, window, scalar = family == "gemma3_text", fields.get("sliding_window"), fields.get("query_pre_attn_scalar")
    wanted, found = ("gelu_pytorch_tanh", config.hidden_activation) if gemma else ("silu", config.hidden_act)
    windowed = "sliding_attention" in (fields.get("layer_types") or [])
    checks = {
        f"rope_type={kind!r} is not written to GGUF; default, linear and llama3 are": kind not in _ROPES,
        f"hidden_act={found!r}: llama.cpp computes {wanted} for {family} models": found != wanted,
        f"query_pre_attn_scalar={scalar}: llama.cpp scales by head_dim={size} for {family} models": gemma
        and scalar != size,
        f"sliding_window={window}: llama.cpp's {family} attends to everything": windowed and not gemma,
    }
    if reasons := [reason for reason, unsupported in checks.items() if unsupported]:
        raise UserError("; ".join(reasons))
    if gemma:
        writer.add_sliding_window(config.sliding_window)


# -- tokenizer ------------------------------------------------------------------------------------------------------


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError("GGUF is written from a fast tokenizer (tokenizer.json); this one is slow")
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    if model["type"] != "BPE":
        raise UserError(f"tokenizers of type {model['type']} are not written to GGUF; BPE is")
    with scratch_folder() as scratch:  # gguf reads files; these hold what the tokenizer does, nothing else
        tokenizer.save_pretrained(scratch)
        special = gguf.SpecialVocab(scratch, load_merges=True, special_token_types=("bos", "eos", "pad", "unk"))
    if not special.merges:
        raise UserError("the tokenizer has no merges, without which llama.cpp does not load it")
    byte_fallback = bool(model.get("byte_fallback"))  # the SentencePiece form
    added = {token["id"]: token for token in described["added_tokens"]}
    by_id = {number: text for text, number in tokenizer.get_vocab().items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(vocab_size)]
    writer.add_tokenizer_model("llama" if byte_fallback else "gpt2")
    writer.add_token_list(tokens)
    if byte_fallback:
        writer.add_token_scores(_scores(tokens, special.merges))
        prepends = json.dumps([described["normalizer"], described["pre_tokenizer"]])
        writer.add_add_space_prefix("Prepend" in prepends or '"prepend_scheme": "first"' in prepends)
        special.merges = []
    else:
        writer.add_tokenizer_pre(_rule_name(described["pre_tokenizer"]))
    writer.add_token_types(
        [_token_type(number, text, by_id, added, byte_fallback) for number, text in enumerate(tokens)]
    )
    ids = tokenizer("a").input_ids
    special.load_merges = not byte_fallback
    special.add_special_token = {"bos": bool(ids) and ids[0] == tokenizer.bos_token_id}
    special.chat_template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    special.add_to_gguf(writer, quiet=True)


def _rule_name(pre: Json | None) -> str:
    """llama.cpp's name of a pre-tokenization rule. Raises UserError for an unknown one."""
    parts = (pre or {}).get("pretokenizers") or [pre or {"type": "none"}]
    found: list[str] = []
    for part in parts:
        if part["type"] == "Digits" and part["individual_digits"]:
            found.append("digits")
        elif part["type"] == "ByteLevel" and not part["add_prefix_space"]:
            found += ["bytes"] if part.get("use_regex", True) else []
        elif part["type"] == "Split" and "Regex" in part["pattern"] and part["behavior"] == "Isolated":
            found.append(part["pattern"]["Regex"])
        else:
            found.append(part["type"])
    if tuple(found) not in _RULES:
        raise UserError(
            f"the tokenizer cuts text by {found}, for which no name of llama.cpp is known here ({', '.join(_RULES.values())}); "
            "use its own converter"
        )
    return _RULES[tuple(found)]


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Scores that make SentencePiece merge in BPE's order: the pair with the best score is merged first.

    A token's score is minus the first rank of a merge that makes it.
    """
    best: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        best.setdefault(merge.replace(" ", ""), rank)
    return [-float(best.get(token, len(merges))) for token in tokens]


def _token_type(number: int, text: str, by_id: dict[int, str], added: dict[int, Json], byte_fallback: bool) -> int:
    if number not in by_id:
        return gguf.TokenType.UNUSED
    if number in added:
        return gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED
    if byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return gguf.TokenType.BYTE
    return gguf.TokenType.NORMAL
