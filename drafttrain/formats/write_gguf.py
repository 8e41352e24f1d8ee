"""Writes GGUF files for llama.cpp: Hugging Face checkpoints of the Llama, Qwen2, Qwen3 or Gemma 3
family, and drafter heads.

Tensor names, types, merges and special tokens come from the gguf library. Written here is what a
family needs besides: Llama's query and key rows in llama.cpp's rotary order and Gemma's norm
factors plus one. The tokenizer is in gguf_tokenizer.py. Source:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafttrain.errors import UserError
from drafttrain.extras import LazyPackage
from drafttrain.files import Json, replacing, writing
from drafttrain.formats.gguf_tokenizer import add_tokenizer
from drafttrain.formats.weights import read_weights

if TYPE_CHECKING:
    import gguf
else:
    gguf = LazyPackage("gguf")

# Model type of a checkpoint's config -> name in gguf.MODEL_ARCH.
FAMILIES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gemma3_text": "GEMMA3"}
# Type of a file's matrices, by a name that users give -> names in gguf.GGMLQuantizationType and
# gguf.LlamaFileType.
TYPES = {
    "float32": ("F32", "ALL_F32"),
    "float16": ("F16", "MOSTLY_F16"),
    "bfloat16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
}
ROPES = ("default", "linear", "llama3")
_BLOCK = 32  # columns that share a scale in q8_0


def write_gguf(
    folder: Path,
    output: Path,
    kind: str,
    tokenizer_folder: Path | None = None,
) -> Path:
    """Writes the model in `folder` to the file `output`; vectors are float32, matrices of type
    `kind` (one of TYPES).

    Args:
        tokenizer_folder: where the tokenizer is, if not with the model.

    Raises:
        UserError: a family, rotary embedding, bias or tokenizer that the format or llama.cpp does
            not support.
    """
    config = AutoConfig.from_pretrained(folder)
    family = config.model_type
    if family not in FAMILIES:
        raise UserError(
            f"{str(folder)!r} is a {family} model; GGUF is written for {', '.join(FAMILIES)}: use llama.cpp's own converter"
        )
    tensors = _tensors(config, read_weights(folder))
    # Two steps: gguf numbers architectures, and names them by number.
    arch = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[FAMILIES[family]]]
    return write_file(
        output,
        arch,
        config,
        {},
        tensors,
        kind,
        tokenizer_folder or folder,
    )


def write_file(
    output: Path,
    arch: str,
    config: PreTrainedConfig,
    keys: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    kind: str,
    tokenizer_folder: Path,
    vocab_size: int = 0,
) -> Path:
    """Writes one file.

    Args:
        arch: llama.cpp's name of the architecture. config: shape of its layers, under the names of
            Llama's config.
        keys: further keys, by name.
        tensors: by llama.cpp's names; int64 tensors and vectors keep their type, matrices become
            `kind`.
        vocab_size: tokens of the file (default: the config's); those beyond the tokenizer are
            placeholders.
    """
    _check_shape(config)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    # A learned mask adds a token, so that drafters may have one more than the config says.
    vocab_size = vocab_size or config.vocab_size
    with writing(output), replacing(output) as part:
        writer = gguf.GGUFWriter(str(part), arch)
        _add_keys(writer, layer_keys(arch, config, vocab_size))
        writer.add_file_type(gguf.LlamaFileType[TYPES[kind][1]])
        _add_keys(writer, keys)
        add_tokenizer(writer, tokenizer, vocab_size)
        for name, tensor in tensors.items():
            data, stored = _stored(tensor, kind)
            writer.add_tensor(name, data, raw_dtype=stored)
        factors = rope_factors(config)
        if factors is not None:
            writer.add_tensor("rope_freqs.weight", factors)
        # The format's order: header, keys, then tensors.
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return output


# -- weights ---------------------------------------------------------------------------------------


def _stored(tensor: Tensor, kind: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """A tensor as the file holds it."""
    values = tensor.detach().cpu().contiguous()
    if values.dtype == torch.int64:
        return values.numpy(), gguf.GGMLQuantizationType.I64
    stored = gguf.GGMLQuantizationType.F32
    if values.dim() > 1:
        stored = gguf.GGMLQuantizationType[TYPES[kind][0]]
    if stored == gguf.GGMLQuantizationType.Q8_0 and values.shape[-1] % _BLOCK:
        stored = gguf.GGMLQuantizationType.F16  # as llama.cpp's converter does
    return gguf.quants.quantize(values.float().numpy(), stored), stored


def _tensors(config: PreTrainedConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The file's tensors by llama.cpp's names."""
    made: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        # A tied head repeats the embedding, and llama.cpp takes that one.
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = tensor_name(FAMILIES[config.model_type], config.num_hidden_layers, name)
        if theirs is None:
            raise UserError(
                f"{name} has no place in a {config.model_type} GGUF file: no plain checkpoint"
            )
        values = tensor
        if config.model_type == "llama":
            values = to_neighbors(theirs, values, config)
        if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            # Gemma multiplies by 1 + weight, llama.cpp by the weight.
            values = values.float() + 1
        made[theirs] = values
    return made


def tensor_name(family: str, layers: int, name: str) -> str | None:
    """llama.cpp's name of a Hugging Face checkpoint's tensor, None if the family has none such."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family], layers)
    return names.get_name(name, try_suffixes=(".weight", ".bias"))


def to_neighbors(
    name: str,
    values: Tensor,
    config: PreTrainedConfig,
    back: bool = False,
) -> Tensor:
    """Reorders rows of queries and keys [heads * e, ...]; others stay.

    From rotary pairs (i, i + e/2) to (2i, 2i + 1).

    Args:
        name: llama.cpp's. back: from (2i, 2i + 1) to (i, i + e/2).
    """
    part = name.split(".")[-2]
    if part == "attn_q":
        heads = config.num_attention_heads
    elif part == "attn_k":
        heads = config.num_key_value_heads
    else:
        return values
    # [heads, 2, e/2] to [heads, e/2, 2], or the other way round.
    pairs = (heads, -1, 2) if back else (heads, 2, -1)
    return values.unflatten(0, pairs).transpose(1, 2).flatten(0, 2)


def rope_factors(config: PreTrainedConfig) -> np.ndarray | None:
    """[e/2] divisors of the rotary frequencies, the file's form of Llama 3's scaling; None without
    that scaling.
    """
    rope = rope_of(config)
    if rope["rope_type"] != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))  # [e/2]
    size = _head_dim(config)
    # The quotient is the scaling alone: llama.cpp computes the plain frequencies itself.
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    return (plain / scaled).numpy()


def rope_of(config: PreTrainedConfig) -> Json:
    """The rotary parameters of full attention, with their type."""
    rope = config.rope_parameters or {}
    rope = rope.get("full_attention", rope)
    return {"rope_type": "default", **rope}


def _head_dim(config: PreTrainedConfig) -> int:
    own = getattr(config, "head_dim", None)
    if own:
        return own
    return config.hidden_size // config.num_attention_heads


def layer_keys(arch: str, config: PreTrainedConfig, vocab_size: int) -> Json:
    """A file's keys for a model's layers, by their full names, and the size of its vocabulary."""
    size = _head_dim(config)
    rope = rope_of(config)
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": size,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "linear":
        keys["rope.scaling.type"] = "linear"
        keys["rope.scaling.factor"] = float(rope["factor"])
    if config.model_type == "gemma3_text":
        keys["attention.sliding_window"] = config.sliding_window
    keys["vocab_size"] = vocab_size
    return {f"{arch}.{name}": value for name, value in keys.items()}


def _add_keys(writer: gguf.GGUFWriter, keys: Mapping[str, object]) -> None:
    """Writes keys by their type: flags, counts and ids, numbers, names, or lists of these."""
    for name, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)


def _check_shape(config: PreTrainedConfig) -> None:
    """Raises UserError for what llama.cpp computes otherwise."""
    size = _head_dim(config)
    rope = rope_of(config)
    kind = rope["rope_type"]
    family = config.model_type
    fields = config.to_dict()
    gemma = family == "gemma3_text"
    window = fields.get("sliding_window")
    scalar = fields.get("query_pre_attn_scalar")
    if gemma:
        wanted = "gelu_pytorch_tanh"
        found = config.hidden_activation
    else:
        wanted = "silu"
        found = config.hidden_act

    reasons = []
    if kind not in ROPES:
        reasons.append(f"rope_type={kind!r} is not written to GGUF; default, linear and llama3 are")
    if kind == "llama3" and family in FAMILIES and family != "llama":
        reasons.append(f"rope_type='llama3': llama.cpp's {family} has no such scaling")
    if found != wanted:
        reasons.append(f"hidden_act={found!r}: llama.cpp computes {wanted} for {family} models")
    if gemma and scalar != size:
        reasons.append(
            f"query_pre_attn_scalar={scalar}: "
            f"llama.cpp scales by head_dim={size} for {family} models"
        )
    # Drafters, which are of no family, write the windows of their layers themselves.
    windowed = "sliding_attention" in (fields.get("layer_types") or [])
    if windowed and family in FAMILIES and not gemma:
        reasons.append(f"sliding_window={window}: llama.cpp's {family} attends to everything")
    if reasons:
        raise UserError("; ".join(reasons))
