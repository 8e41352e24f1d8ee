"""EAGLE-1 heads as vLLM and SGLang load them: a Llama without embedding, last norm and head, and `fc` before it.

    vLLM    architectures ["EagleLlamaForCausalLM"], fc.weight, layers.{i}.*
    SGLang  architectures ["LlamaForCausalLMEagle"], the same and fc.bias, which its class has and ours lacks: zeros

Layer 0 has no input_layernorm in either. Embedding and head are the target's, which both engines share with a head that brings
none. They draft over the whole vocabulary whatever was kept. Sources: vLLM 0.32 models/llama_eagle.py and
transformers_utils/configs/eagle.py; SGLang srt/models/llama_eagle.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.eagle1.model import Eagle1
from drafttrain.drafters.shipping import Format, Request, Shipping
from drafttrain.drafters.trained import Trained
from drafttrain.errors import UserError
from drafttrain.files import write_json
from drafttrain.formats.eagle3_formats import rope_parameters
from drafttrain.formats.weights import read_weights

_ARCHITECTURES = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
_SAME = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "max_position_embeddings", "vocab_size",
)  # fmt: skip
_PROMPT, _DEPTH = 24, 4
TOLERANCE = 1e-3  # of states, relative to their size, in float32


class Eagle1Shipping(Shipping):
    formats = {
        "vllm": Format("EAGLE as EagleLlamaForCausalLM", ("vLLM",)),
        "sglang": Format("EAGLE as LlamaForCausalLMEagle", ("SGLang",)),
    }
    verifiable = {"vllm": "vllm"}

    def line(self, trained: Trained, parameters: str) -> str:
        layers = trained.config.get("num_hidden_layers", 1)
        many = "one decoder layer" if layers == 1 else f"{layers} decoder layers"
        return f"an EAGLE-1 head (arXiv 2401.15077), {many} over the target's last state, {parameters} parameters"

    def refusals(self, trained: Trained, form: str) -> list[str]:
        if found := super().refusals(trained, form):
            return found
        config: Any = trained.load().config
        if config.hidden_act != "silu":
            found.append(f"hidden_act={config.hidden_act!r}: the engine's MLP raises on anything but silu")
        if config.sliding_window:
            found.append(f"sliding_window={config.sliding_window}: the engine's layer attends to everything")
        if rope_parameters(config).get("partial_rotary_factor", 1.0) != 1.0:
            found.append("partial_rotary_factor: the engine's layer rotates whole heads")
        if config.qk_norm:
            found.append("qk_norm: the engine's class is a Llama, which norms no queries and keys")
        if config.mlp_bias and form == "sglang":
            found.append("mlp_bias: the engine's MLP has none")
        return found

    def write(self, trained: Trained, form: str, request: Request) -> list[Path]:
        head: Any = trained.load()
        config, folder = head.config, request.output
        weights = {
            name: value.detach().to(request.dtype).contiguous().cpu()
            for name, value in head.state_dict().items()
            if name != "kept_ids"
        }
        if form == "sglang":
            weights["fc.bias"] = torch.zeros(config.hidden_size, dtype=request.dtype)
        rope = rope_parameters(config)
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        described = {
            "architectures": [_ARCHITECTURES[form]],
            "model_type": "llama",
            **{name: getattr(config, name) for name in _SAME},
            "rope_parameters": rope,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
            "tie_word_embeddings": False,
            "torch_dtype": str(request.dtype).removeprefix("torch."),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        except OSError as error:
            raise UserError(
                f"output={str(folder)!r} cannot be written ({error.strerror}); choose another place"
            ) from error
        write_json(folder / "config.json", described)
        return [folder / "config.json", folder / "model.safetensors"]

    def check(self, trained: Trained, exported: Path) -> dict[str, Any]:
        return compare_states(trained.load(), exported)

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, Any]]:
        return {"vLLM": {"method": "eagle"}, "SGLang": {"speculative-algorithm": "EAGLE"}}


class EngineHead:
    """An exported head, of transformers' Llama layers, over whole sequences without a cache."""

    def __init__(self, folder: Path):
        described = json.loads((folder / "config.json").read_text())
        keys = {
            key: value for key, value in described.items() if key not in ("architectures", "model_type", "rope_scaling")
        }
        config = LlamaConfig(**{**keys, "attn_implementation": "eager"})
        weights = read_weights(folder)
        self.dtype = weights["fc.weight"].dtype
        biased = described["architectures"] == [_ARCHITECTURES["sglang"]]
        model = nn.Module()
        model.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=biased)
        model.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        first: Any = model.layers[0]
        first.input_layernorm = nn.Identity()
        try:
            model.load_state_dict({name: value.float() for name, value in weights.items()})
        except RuntimeError as error:
            raise UserError(f"{str(folder)!r}: {' '.join(str(error).split())}") from error
        self.model: Any = model.eval()
        self.rotary = LlamaRotaryEmbedding(config)

    def states(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """[t, h] token embeddings and states at positions 0 .. t - 1 -> [t, h]."""
        x = self.model.fc(torch.cat((embeds, hidden), dim=-1))[None]
        tables = self.rotary(x, torch.arange(len(embeds))[None])
        mask = torch.full((len(embeds),) * 2, float("-inf")).triu(1)[None, None]
        for layer in self.model.layers:
            out = layer(x, attention_mask=mask, position_embeddings=tables)
            x = out[0] if isinstance(out, tuple) else out
        return x[0]


@torch.no_grad()
def compare_states(drafter: Eagle1, exported: Path, seed: int = 0) -> dict[str, Any]:
    """Drafts a chain on random inputs both ways, with a random embedding and head in place of the target's.

    Args:
        drafter: ours, on the CPU; its weights are rounded as the exported ones are.

    Returns:
        depth and max_state_difference, relative to the largest entry.

    Raises:
        UserError: the files do not hold what an engine looks for, or the states differ.
    """
    head, ours = EngineHead(exported), drafter
    ours.to(head.dtype).float().eval()  # type: ignore[arg-type, call-arg]
    h, made = ours.config.hidden_size, torch.Generator().manual_seed(seed)
    table, rows = torch.randn(64, h, generator=made), torch.randn(len(ours.kept_ids), h, generator=made)
    ours.embed, ours.frozen_head = lambda ids: table[ids % len(table)], rows
    ours.score = lambda states: states @ rows.T
    states, step = [], ours.step
    ours.step = lambda *args: states.append(step(*args)) or states[-1]  # type: ignore[func-returns-value, method-assign]
    features = torch.randn(_PROMPT, h, generator=made)
    tokens = torch.randint(ours.config.vocab_size, (_PROMPT + 1,), generator=made)
    session = ours.start(tokens[:_PROMPT], _PROMPT + _DEPTH)
    session.extend(tokens[1:], features)
    tree = session.propose(TreeSpec.parse(f"chain:{_DEPTH}"))
    embeds, hidden = ours.embed(torch.cat((tokens[1:], tree.tokens))), features
    worst, size = 0.0, 0.0
    for k in range(_DEPTH):
        theirs = head.states(embeds[: len(hidden)], hidden)[-1]
        worst = max(worst, float((theirs - states[k][-1]).abs().max()))
        size = max(size, float(theirs.abs().max()))
        hidden = torch.cat((hidden, theirs[None]))
    if not worst <= TOLERANCE * size:
        raise UserError(
            f"{str(exported)!r} computes something else than the drafter (states differ by {worst / size:.3g} of their size); a "
            "flag or weight was lost: export anew, and report this if it stays"
        )
    return {"depth": _DEPTH, "max_state_difference": worst / size}


SHIPPING = Eagle1Shipping()
