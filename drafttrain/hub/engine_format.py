"""EAGLE-3 heads in the checkpoint form that vLLM and SGLang load: `LlamaForCausalLMEagle3`.

Weights keep their names. What differs: the kept ids become `d2t` (target id minus drafter id) and `t2d` (which target
ids are kept), and the config speaks of a Llama with one layer. The engine brings the target's embedding itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from drafttrain.drafters.base import kind_class
from drafttrain.errors import UserError
from drafttrain.files import write_json


def export_eagle3(folder: str | Path, output: str | Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Writes config.json and model.safetensors that an engine loads as method "eagle3".

    Args:
        folder: a saved drafter of kind eagle3.
        output: folder to write.

    Returns:
        The output folder.

    Raises:
        UserError: not an EAGLE-3 head of ours.
    """
    source = Path(folder).expanduser()
    try:
        drafter = kind_class("eagle3").from_pretrained(source, use_safetensors=True)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"drafter={str(folder)!r} is no EAGLE-3 head of drafttrain ({first}); give its folder"
        ) from error
    config, kept = drafter.config, drafter.kept_ids
    weights = {name: value.to(dtype).contiguous() for name, value in drafter.state_dict().items() if name != "kept_ids"}
    weights["d2t"] = kept - torch.arange(len(kept))
    weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
    weights["t2d"][kept] = True
    described: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 131072,
        "rope_scaling": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **{name: getattr(config, name) for name in _SHARED},
    }
    layers, count = tuple(config.feature_layers), config.target.get("num_layers", 0)
    if layers != (2, count // 2, count - 3):  # vLLM's own choice needs no key, and SGLang counts such keys from one
        described["eagle_aux_hidden_state_layer_ids"] = list(layers)
    path = Path(output).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    write_json(path / "config.json", described)
    return path


_SHARED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "rope_theta", "vocab_size", "draft_vocab_size", "target_hidden_size",
)  # fmt: skip
