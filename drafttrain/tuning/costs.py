"""The roofline by which `plan` and `estimate` predict time: sizes of a target, rates of a device.

A pass over N tokens of B sequences takes

    max( bytes / bandwidth,  operations / FLOP rate ) + overhead
    bytes       the weights that the tokens use, once, and the keys and values of B contexts
    operations  2 per weight and token, and 4 per head column, position and token for attention

Sizes come from a model without data, on the meta device (`model_sizes`).

Source: the roofline model (Williams et al. 2009).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.drafters.common.configs import last_layer_config
from drafttrain.errors import UserError, first_line
from drafttrain.files import Json, read_json
from drafttrain.target import resolve_target

# Layers that keep no keys, also by their former names.
_WITHOUT_KEYS = ("linear_attention", "conv", "moe", "mamba", "recurrent")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ENGINE_SEQUENCES = 256  # most that an engine generates at a time
_ENGINE_SHARE = 0.9  # of a GPU's memory that an engine fills
_WEIGHTS_SHARE = 0.8  # of a GPU's memory that an engine's weights may take
_PREFILL_TOKENS = 8192  # of an engine's pass over whole conversations


@dataclass(frozen=True)
class Device:
    """Achieved rates of a device.

    Attributes:
        bandwidth: bytes per second. flops: operations per second. memory: bytes.
        overhead: seconds per pass.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    overhead: float

    def times(self, count: int) -> Device:
        """`count` devices that share a model, without loss."""
        return replace(
            self,
            bandwidth=self.bandwidth * count,
            flops=self.flops * count,
            memory=self.memory * count,
        )


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model that decide the cost of a pass.

    Attributes:
        always: weights that every token uses (attention, dense layers, head). expert: weights of
            one expert over all layers; experts, chosen: number of experts, and how many a token
            uses (0 without experts).
        kv: numbers of keys and values per position. columns: head columns over all layers, for
            attention's operations.
    """

    always: float
    expert: float = 0.0
    experts: int = 0
    chosen: int = 0
    kv: float = 0.0
    columns: float = 0.0

    @property
    def total(self) -> float:
        return self.always + self.expert * self.experts

    @property
    def active(self) -> float:
        """Weights that one token uses."""
        return self.always + self.expert * self.chosen

    def read(self, tokens: float) -> float:
        """Weights used by `tokens` tokens: of the experts, the expected number of distinct ones."""
        share = 0.0
        if self.experts:
            share = 1 - (1 - self.chosen / self.experts) ** tokens
        return self.always + self.expert * self.experts * share

    def bytes_moved(
        self,
        tokens: float,
        contexts: int,
        context: int,
        width: float,
        cache_width: float | None = None,
    ) -> float:
        """Bytes that a pass reads.

        Args:
            tokens: new tokens, of all sequences. contexts: sequences whose keys and values are
                read. context: positions of each.
            width: bytes per weight. cache_width: bytes per cached number; default: width.
        """
        if cache_width is None:
            cache_width = width
        return width * self.read(tokens) + cache_width * (contexts * context * self.kv)

    def seconds(
        self,
        device: Device,
        tokens: float,
        contexts: int,
        context: int,
        width: float,
        cache_width: float | None = None,
    ) -> float:
        """Time of a pass over `tokens` tokens after `context` positions; see `bytes_moved`."""
        moved = self.bytes_moved(tokens, contexts, context, width, cache_width)
        operations = 2 * tokens * self.active + 4 * tokens * context * self.columns
        return max(moved / device.bandwidth, operations / device.flops) + device.overhead


@dataclass(frozen=True)
class EngineRates:
    """An inference engine that runs the target on as few GPUs as hold it.

    Attributes:
        weights: number of the target's weights. width: bytes per weight in its files.
        device: one GPU.
    """

    sizes: Sizes
    weights: int
    width: float
    device: Device

    @property
    def gpus(self) -> int:
        """GPUs that the target's weights need, a power of two."""
        least = self.weights * self.width / (_WEIGHTS_SHARE * self.device.memory)
        return 2 ** max(0, math.ceil(math.log2(max(least, 1e-9))))

    def decode_rate(self, length: int) -> float:
        """Response tokens per second and GPU, of as many sequences of `length` tokens as fit."""
        free = self.gpus * _ENGINE_SHARE * self.device.memory - self.weights * self.width
        fitting = int(free / max(2 * self.sizes.kv * length, 1))
        batch = max(1, min(_ENGINE_SEQUENCES, fitting))
        return batch / self._pass_seconds(batch, batch, length) / self.gpus

    def forward_rate(self, length: int) -> float:
        """Tokens per second and GPU of a forward over whole conversations of `length` tokens."""
        batch = max(1, _PREFILL_TOKENS // max(length, 1))
        return batch * length / self._pass_seconds(batch * length, 0, length) / self.gpus

    def _pass_seconds(self, tokens: int, contexts: int, length: int) -> float:
        # On average half of a sequence lies before a token; keys and values have 16 bits.
        devices = self.device.times(self.gpus)
        return self.sizes.seconds(devices, tokens, contexts, length // 2, self.width, 2.0)


def model_sizes(model: PreTrainedModel, config: PretrainedConfig) -> Sizes:
    """Sizes by the weights of a model on the meta device; experts are known by their names."""
    text = last_layer_config(config.get_text_config())

    def read(name: str) -> Any:
        return getattr(text, name, None)

    layers = read("num_hidden_layers")
    heads = read("num_attention_heads") or 0  # none in state space models
    size = read("head_dim") or read("hidden_size") // max(heads, 1)
    attending = layers
    types = read("layer_types")
    if types:
        attending = sum(kind not in _WITHOUT_KEYS for kind in types)
    kv_heads = read("num_key_value_heads") or heads
    per_layer = 2 * kv_heads * size
    rank = read("kv_lora_rank")
    if rank:  # latent attention caches one compressed vector, and a rotated part
        per_layer = rank + (read("qk_rope_head_dim") or 0)
    experts = next(filter(None, map(read, _EXPERT_COUNTS)), 0)

    always = 0
    routed = 0
    for name, weight in model.named_parameters():
        if experts and ".experts." in name:
            routed += weight.numel()
        else:
            always += weight.numel()
    embedding = model.get_input_embeddings().get_parameter("weight")
    head = model.get_output_embeddings().get_parameter("weight")
    if embedding is not head:  # the head is read in full, an embedding of its own is a lookup
        always -= embedding.numel()

    sizes = Sizes(always, kv=attending * per_layer, columns=attending * heads * size)
    if routed:
        chosen = read("num_experts_per_tok") or read("top_k_experts") or 2
        sizes = replace(sizes, expert=routed / experts, experts=experts, chosen=chosen)
    return sizes


def target_config(name: str, key: str, fix: str) -> Json:
    """A model's config.json, from a file, a folder, the cache or the Hub.

    Raises:
        UserError: there is none.
    """
    path = Path(name).expanduser()
    try:
        if path.suffix != ".json":
            path = Path(resolve_target(name)) / "config.json"
        if not path.is_file() and not path.parent.is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(name, "config.json"))
    except (OSError, ValueError) as error:
        raise UserError(f"{key}={name!r}: no config.json ({first_line(error)}); {fix}") from error
    return {**read_json(path, key, fix)}
