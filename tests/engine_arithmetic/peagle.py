"""P-EAGLE as vLLM computes it, from the exported files alone, and a drafted chain compared with our drafter's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.peagle.model import PEagle
from drafttrain.errors import UserError
from drafttrain.files import write_json
from drafttrain.formats.weights import read_config, read_weights
from tests.engine_arithmetic.eagle3 import EngineHead

_PROMPT = 24
_DEPTH = 4
TOLERANCE = 1e-3  # of log-probabilities in float32


@torch.no_grad()
def compare_depths(drafter: PEagle, exported: Path, seed: int = 0) -> dict[str, Any]:
    """Drafts a chain on random inputs both ways: ours, and the exported files as an engine runs them.

    Args:
        drafter: ours, on the CPU; its weights are rounded as the exported ones are.

    Returns:
        depth, max_log_prob_difference.

    Raises:
        UserError: the files do not hold what an engine looks for, or the outputs differ.
    """
    described = read_config(exported)
    weights = read_weights(exported)
    mask = weights.pop("mask_hidden").float().view(1, -1)
    with tempfile.TemporaryDirectory() as folder:  # but for the masks it is an EAGLE-3 head
        save_file(weights, Path(folder) / "model.safetensors")
        write_json(Path(folder) / "config.json", _as(described, "Eagle3Speculator", "eagle3"))
        head = EngineHead(Path(folder))
    ours: Any = drafter
    ours.to(head.dtype).float().eval()
    config = ours.config
    made = torch.Generator().manual_seed(seed)
    table = torch.randn(64, config.target_hidden_size, generator=made)
    ours.embed = lambda ids: table[ids % len(table)]
    features = torch.randn(_PROMPT, mask.shape[1], generator=made)
    tokens = torch.randint(config.vocab_size, (_PROMPT + 1,), generator=made)
    session = ours.start(tokens[:_PROMPT], _PROMPT + _DEPTH)
    session.extend(tokens[1:], features)
    tree = session.propose(TreeSpec.parse(f"chain:{_DEPTH}"))
    masks = torch.full((_DEPTH - 1,), described["mask_token_id"])
    embeds = ours.embed(torch.cat((tokens[1:], masks)))
    hidden = head.combine(torch.cat((features, mask.expand(_DEPTH - 1, -1))))
    logits, _ = head.step(embeds, hidden, torch.arange(len(hidden)))
    path = logits[-_DEPTH:].log_softmax(-1).max(-1)
    same = tree.tokens.tolist() == head.target_ids[path.indices].tolist()
    worst = float((tree.log_probs - path.values.cumsum(0)).abs().max())
    if not same or not worst <= TOLERANCE:
        raise UserError(
            f"{str(exported)!r} computes something else than the drafter (log-probabilities differ by {worst:.3g}, same "
            f"tokens: {same}); a flag or weight was lost: export anew, and report this if it stays"
        )
    return {"depth": _DEPTH, "max_log_prob_difference": worst}


def _as(described: dict[str, Any], architecture: str, kind: str) -> dict[str, Any]:
    """The same config of another algorithm."""
    algorithm = {**described["speculators_config"], "algorithm": kind}
    return {
        **described, "architectures": [architecture], "speculators_model_type": kind, "speculators_config": algorithm
    }  # fmt: skip
