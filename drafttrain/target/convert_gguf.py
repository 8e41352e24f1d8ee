"""GGUF file -> folder with bfloat16 safetensors, config, tokenizer and generation config that any HF tool loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from drafttrain.errors import UserError

# Names that GGUF's tokenizer.ggml.pre gives to GPT-2-like tokenizers which cut every digit off before they look for
# words. transformers builds a plain GPT-2 pre-tokenizer for them, which differs where blanks meet digits: in "\n\n1."
# it makes two tokens of the line breaks, where the model was trained to see one.
_DIGITS_APART = {"smollm", "starcoder", "refact"}


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes the model in `gguf` to `folder`.

    transformers does the dequantising; the rest is what its loader leaves open: a config that claims to be quantised
    (and so refuses to be saved), tokenizer details, and the token ids that end a response.

    Args:
        gguf: the file; its architecture must be one that transformers reads.
        folder: created; must not exist.

    Raises:
        UserError: the file lacks weights that the model needs.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if _gguf_string(gguf, "tokenizer.ggml.pre") in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
    )
    model, loading = loaded
    if loading["missing_keys"]:
        raise UserError(
            f"{gguf}: no weights for {', '.join(sorted(loading['missing_keys'])[:3])}; the file is incomplete"
        )
    tokenizer.model_max_length = model.config.max_position_embeddings
    clean = _without_quantization(model)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    clean.generation_config = GenerationConfig(**ends, pad_token_id=tokenizer.pad_token_id)
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 5's name for a plain fast tokenizer is unknown to engines that still run on 4.
    written = folder / "tokenizer_config.json"
    written.write_text(written.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in bfloat16 in a model that does not remember having come from a quantised file."""
    kept = {
        key: _as_decimal(value)
        for key, value in model.config.to_dict().items()
        if key not in ("quantization_config", "dtype") and not key.startswith("_")
    }
    with torch.device("meta"):
        clean = AutoModelForCausalLM.from_config(type(model.config)(**kept), dtype=torch.bfloat16)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    clean.load_state_dict(weights, assign=True)
    clean.tie_weights()
    return clean


def _as_decimal(value: Any) -> Any:
    """GGUF keeps numbers as float32; seven digits bring 9.99999974e-06 back to the 1e-05 that was meant."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _gguf_string(gguf: Path, key: str) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field(key)
    return None if field is None else field.contents()
