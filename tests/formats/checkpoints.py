"""Tiny checkpoints of the families that GGUF files hold."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.conftest import CHAT_TEMPLATE

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 258,
    "eos_token_id": 259,
}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FAMILIES = {
    "llama": lambda **more: LlamaForCausalLM(
        LlamaConfig(**SHAPE | more, rope_parameters=ROPE, tie_word_embeddings=True)
    ),
    "llama3": lambda **more: LlamaForCausalLM(
        LlamaConfig(**SHAPE | more, rope_parameters=LLAMA3, tie_word_embeddings=False)
    ),
    "qwen2": lambda **more: Qwen2ForCausalLM(
        Qwen2Config(**{**SHAPE, "head_dim": 8, **more}, rope_parameters=ROPE)
    ),
    "qwen3": lambda **more: Qwen3ForCausalLM(
        Qwen3Config(
            **{**SHAPE, "head_dim": 128, **more}, rope_parameters=ROPE, tie_word_embeddings=False
        )
    ),
    # 128 and 256 are what transformers' loader takes for granted in these families
    "gemma3": lambda **more: Gemma3ForCausalLM(
        Gemma3TextConfig(**{**SHAPE, "head_dim": 256, **more}, sliding_window=64)
    ),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, two merges, two chat markers."""
    vocab = {
        symbol: i
        for i, symbol in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "he"])
    }
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ"), ("h", "e")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    marks = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **marks)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_checkpoint(folder, family: str, tokenizer=None, **shape):
    torch.manual_seed(0)
    model = FAMILIES[family](**shape).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(parameter, 0.2, 0.8)
        parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return model
