"""EAGLE-3 heads in engines' forms, for tests."""

from __future__ import annotations

import torch

from drafttrain.drafters.eagle3.export import SHIPPING
from drafttrain.drafters.eagle3.model import Eagle3, Eagle3Config
from drafttrain.drafters.shipping import ExportRequest, find_drafter
from drafttrain.formats.weights import write_checkpoint
from tests.drafters.eagle3_options import LATENT

SPECULATORS = "vllm"
FLAT = "sglang"
FLAGS = [
    {"norm_before_residual": True},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_output": True},
    {"qk_norm": True},
    {"attention_bias": True, "mlp_bias": True},
    {"num_hidden_layers": 3, "norm_output": True},
    {"sliding_window": 9},
    {**LATENT, "num_hidden_layers": 2, "norm_before_residual": True},
    {
        **LATENT,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        },
    },
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.5,
        }
    },
]


def make_head(target, **options) -> Eagle3:
    """A random head whose norms are not all ones, over a pruned vocabulary unless told otherwise."""
    torch.manual_seed(1)
    head = Eagle3(Eagle3Config.for_target(target, **{"draft_vocab_size": 80, **options})).eval()
    for parameter in head.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if head.config.draft_vocab_size < target.vocab_size:
        head.kept_ids.copy_(torch.randperm(target.vocab_size)[: len(head.kept_ids)].sort().values)
    return head


def write_eagle3(head, folder, form, dtype=torch.bfloat16, speculative_tokens=3, target_name=""):
    """Writes a head in an engine's form."""
    config = SHIPPING.engine_config(
        head, form, ExportRequest(folder, dtype, target_name, speculative_tokens)
    )
    return write_checkpoint(folder, config, SHIPPING.engine_weights(head, config), dtype)


def prove(head, folder, exported):
    """What `drafttrain verify` finds of an export of a head, which is saved to `folder`."""
    head.save_pretrained(folder)
    return SHIPPING.check(find_drafter(str(folder)), exported)
