"""DSpark drafters as GGUF files: llama.cpp's dflash model with a Markov head.

ours                      GGUF
markov_in [d + 1, r]      markov_w1.weight, a row per token of the file; the last of ours for tokens that are not kept
markov_out [d, r]         markov_w2.weight
confidence [1, h + r]     conf_proj.weight, conf_proj.bias; read with --spec-draft-p-min above 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.drafters.dflash.export import BlockFiles
from drafttrain.drafters.dspark.model import DSpark
from drafttrain.files import Json
from drafttrain.target import Target


class DSparkShipping(BlockFiles[DSpark]):
    """llama.cpp alone; our own format goes to the Hub too."""

    description = "a DSpark drafter, blocks of {block_size} with a Markov head, {layers}, {parameters} parameters"
    tiny = {"mask_token_id": 300, "num_hidden_layers": 2, "block_size": 4, "markov_rank": 16}
    gguf_names = {
        **BlockFiles.gguf_names,
        "markov_in.weight": "markov_w1.weight",
        "markov_out.weight": "markov_w2.weight",
        "confidence.weight": "conf_proj.weight",
        "confidence.bias": "conf_proj.bias",
    }

    def gguf_keys(self, drafter: DSpark) -> Json:
        return {**super().gguf_keys(drafter), "has_confidence_head": True}

    def gguf_weights(self, drafter: DSpark, target: Target) -> dict[str, Tensor]:
        made = super().gguf_weights(drafter, target)
        made["markov_w1.weight"] = drafter.markov_in.weight[_own_ids(drafter)]
        return made

    def gguf_own(self, found: dict[str, Tensor], back: DSpark, original: DSpark) -> dict[str, Tensor]:
        rows, ids = found.get("markov_w1.weight"), _own_ids(back)
        if rows is None or rows.shape != (len(ids), back.config.markov_rank):
            return found
        table = original.markov_in.weight.detach().float().clone()  # [d + 1, r]; the last row may stand for no token
        table[ids] = rows
        return {**found, "markov_w1.weight": table}


def _own_ids(drafter: DSpark) -> Tensor:
    """[tokens of a GGUF file] int64 rows of `markov_in`."""
    size, kept = drafter.config.vocab_size + (drafter.mask is not None), drafter.kept_ids.cpu()
    ids = torch.full((size,), len(kept))
    ids[kept] = torch.arange(len(kept))
    return ids


SHIPPING = DSparkShipping()
