"""Conversion of a GGUF file to a folder that any HF tool loads.

The folder holds bfloat16 safetensors, config, tokenizer and generation config.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from drafttrain.errors import UserError
from drafttrain.extras import require
from drafttrain.files import Json

# Values of GGUF's tokenizer.ggml.pre for GPT-2-like tokenizers that split off every digit first.
# transformers builds a plain GPT-2 pre-tokenizer for them, which differs where blanks meet digits:
# in "\n\n1." it makes two tokens of the line breaks, where the model was trained with one.
_DIGITS_APART = {"smollm", "starcoder", "refact"}


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes the model in `gguf` to `folder`.

    transformers dequantizes the weights; it must read the file's architecture. This function
    corrects what its loader gets wrong: a config that still claims to be quantized (and so cannot
    be saved), tokenizer details, and the token ids that end a response. The folder must not exist.

    Raises:
        UserError: the file lacks weights that the model needs.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    kind = require("gguf").GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if kind is not None and kind.contents() in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    options: Json = {"gguf_file": gguf.name, "dtype": torch.float32, "output_loading_info": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    model, loading = loaded
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise UserError(f"{gguf}: no weights for {missing}; the file is incomplete")
    tokenizer.model_max_length = model.config.max_position_embeddings
    clean = _without_quantization(model)
    clean.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Engines that run on transformers 4 do not know version 5's name of a plain fast tokenizer.
    written = folder / "tokenizer_config.json"
    text = written.read_text()
    written.write_text(text.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in bfloat16 in a model whose config has no quantization entry."""
    kept: Json = {}
    for key, value in model.config.to_dict().items():
        if key in ("quantization_config", "dtype") or key.startswith("_"):
            continue
        # GGUF stores float32: seven digits make 9.99999974e-06 1e-05 again.
        kept[key] = float(f"{value:.7g}") if isinstance(value, float) else value
    with torch.device("meta"):
        clean = AutoModelForCausalLM.from_config(type(model.config)(**kept), dtype=torch.bfloat16)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    clean.load_state_dict(weights, assign=True)
    clean.tie_weights()
    return clean
