"""speculators' own classes on exported folders, on the CPU: loaded, and one block's hidden states. Imports nothing of ours.

    python speculators_side.py JOB.json

The job says heads (exported folders), folder (where the target's folder is), features [t, f*h], block (token ids, its first one
and masks) and answer, the file to write: per head an error, tensors that are no numbers or differ from the file's, and the states
[block, h] behind the final norm. Windows count from each token, as engines count them.
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel


def read(folder, features, block):
    try:
        model = SpeculatorModel.from_pretrained(folder).float().eval()
        own = model.state_dict()
        wrong = [
            name for name, value in own.items() if value.is_floating_point() and value.isnan().any()
        ]
        for name, value in load_file(Path(folder) / "model.safetensors").items():
            if name not in own or not torch.equal(own[name].to(value), value):
                wrong.append(name)
        found = states(model, features, block)
        bias = []
        if hasattr(model, "markov_head"):  # of each position, below the block's token there
            made = model.markov_head.block_bias(
                prev_token_ids=block[None], hidden_states=found[None]
            )
            bias = made[0].tolist()
        return {"error": "", "wrong": wrong, "states": found.tolist(), "bias": bias}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


@torch.no_grad()
def states(model, features, block):
    """The layers over [context, block], with the mask that speculators trains with, as a dense one."""
    config = model.config
    layer_config = config.transformer_layer_config
    layer_config._attn_implementation = "eager"
    context = model.hidden_norm(model.fc(features))[None]
    hidden = model.embed_tokens(block)[None]
    t = context.shape[1]
    size = len(block)
    at = torch.arange(t + size)
    tables = model.rotary_emb(hidden, at[None])
    queries = at[t:, None]
    for index, layer in enumerate(model.layers):
        seen = torch.ones(size, t + size, dtype=torch.bool)
        if index in model.sliding_window_indices:
            seen &= queries - at < model.sliding_window
            if not model.sliding_window_non_causal:
                seen &= at <= queries
        mask = torch.zeros(size, t + size).masked_fill(~seen, torch.finfo(torch.float32).min)
        hidden = layer(
            hidden_states=hidden,
            target_hidden=context,
            attention_mask=mask[None, None],
            position_ids=at[None],
            position_embeddings=tables,
        )
        if isinstance(hidden, tuple):
            hidden = hidden[0]
    return model.norm(hidden)[0]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.chdir(job["folder"])
    features = torch.tensor(job["features"])
    block = torch.tensor(job["block"])
    heads = [read(folder, features, block) for folder in job["heads"]]
    Path(job["answer"]).write_text(json.dumps({"heads": heads}))


if __name__ == "__main__":
    main()
