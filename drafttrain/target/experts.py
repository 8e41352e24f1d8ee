"""Experts on GPUs where torch's grouped products wait for the device.

transformers multiplies the tokens of all experts by torch's `grouped_mm`. torch has a kernel for it in
bfloat16 on GPUs of compute capability 9 and 10. Elsewhere it reads the sizes of the groups on the
host, launches a product per expert, and cannot be captured in a CUDA graph. Passes of few tokens
copy the weights of each token's experts instead, which no host waits for.

Source: aten/src/ATen/native/cuda/GroupedBlas.cpp of torch 2.10; transformers.integrations.moe.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

FEW = "drafttrain"  # our name among transformers' functions of experts
# A launch takes 5 us, in which a GPU copies 5 MB. A layer has about 12 pairs of other launches.
_LAUNCH_BYTES = 5e6
_OTHERS = 12
logger = logging.getLogger(__name__)


def most_pairs(experts: nn.Module) -> int:
    """The most pairs of a token and an expert whose copied weights cost less than the launches."""
    # A pair copies one expert's weights; grouped products launch at least one product per expert.
    nbytes = sum(weight.nbytes for weight in experts.parameters())
    count = int(experts.num_experts)  # type: ignore[arg-type]
    return int((count + _OTHERS) * _LAUNCH_BYTES * count / nbytes)


def _few_or_grouped(
    experts: nn.Module,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """The experts' sum [n, h] of tokens [n, h] with `chosen` experts [n, k] and their weights [n, k]."""
    if chosen.numel() <= most_pairs(experts):
        return batched_mm_experts_forward(experts, hidden, chosen, weights)
    return grouped_mm_experts_forward(experts, hidden, chosen, weights)


ALL_EXPERTS_FUNCTIONS.register(FEW, _few_or_grouped)


def most_captured(model: PreTrainedModel, name: str) -> int | None:
    """Makes passes of few tokens capturable; returns the most tokens, None if nothing waits.

    Args:
        model: on a GPU. name: of the target, for the line that says what is lost.
    """
    config = model.config.get_text_config()
    kernel = torch.cuda.get_device_capability(model.device)[0] in (9, 10)
    quantized = getattr(model.config, "quantization_config", None) is not None
    if config._experts_implementation not in ("grouped_mm", FEW) or quantized:
        return None
    # Expert modules of transformers have this attribute.
    mixtures = [part for part in model.modules() if hasattr(part, "_is_expert_parallel")]
    if not mixtures or (kernel and model.dtype == torch.bfloat16):
        return None
    each = 1  # experts of a token, under either family's name
    for key in ("num_experts_per_tok", "top_k_experts"):
        each = getattr(config, key, None) or each
    # The smallest layer's bound is the model's: a pass runs through all layers.
    tokens = min(map(most_pairs, mixtures)) // each
    model.config._experts_implementation = FEW
    logger.warning(
        f"target {name!r}: passes of more than {tokens} tokens run without CUDA graphs, because torch's products "
        "of experts wait for this GPU; in bfloat16 on compute capability 9 or 10 they do not"
    )
    return tokens
