"""P-EAGLE heads in speculators' form, which vLLM loads: EAGLE-3's, with `mask_hidden` and `mask_token_id` beside it.

Sources: vLLM 0.32 transformers_utils/configs/speculators/algos.py (update_peagle) and models/llama_eagle3.py.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.peagle.model import PEagle
from drafttrain.drafters.shipping import Format, Request, Shipping
from drafttrain.drafters.trained import Trained, architectures_of
from drafttrain.errors import UserError
from drafttrain.export.serving_recipes import public_name
from drafttrain.files import write_json
from drafttrain.formats.eagle3_formats import SPECULATORS, obstacles, write_eagle3
from drafttrain.formats.engine_eagle3 import EngineHead
from drafttrain.formats.weights import read_config, read_weights

_PROMPT, _DEPTH = 24, 4
TOLERANCE = 1e-3  # of log-probabilities in float32


class PEagleShipping(Shipping):
    formats = {"vllm": Format("P-EAGLE in speculators' form", ("vLLM",))}
    verifiable = {"vllm": "vllm"}

    def line(self, trained: Trained, parameters: str) -> str:
        config = trained.config
        return (
            f"a P-EAGLE head, which drafts {config.get('ttt_steps')} tokens in one pass over the target's states "
            f"{', '.join(map(str, config.get('feature_layers', [])))}, {parameters} parameters, "
            f"{config.get('draft_vocab_size', 0):,} of its {config.get('vocab_size', 0):,} tokens"
        )

    def refusals(self, trained: Trained, form: str) -> list[str]:
        if found := super().refusals(trained, form):
            return found
        head: Any = trained.load()
        found = obstacles(head, form)
        if head.config.fc_norm:
            found.append("fc_norm: the engine does not read it for P-EAGLE and would compute something else")
        return found

    def write(self, trained: Trained, form: str, request: Request) -> list[Path]:
        head: Any = trained.load()
        write_eagle3(
            head,
            request.output,
            SPECULATORS,
            dtype=request.dtype,
            speculative_tokens=request.depth,
            target_name=public_name(request.target) if request.target else "",
            target_architectures=architectures_of(request.target),
        )
        path = request.output / "config.json"
        described = _as(json.loads(path.read_text()), "PEagleSpeculator", "peagle")
        write_json(path, {**described, "mask_token_id": head.config.mask_token_id})
        return [path, request.output / "model.safetensors"]

    def check(self, trained: Trained, exported: Path) -> dict[str, Any]:
        return compare_depths(trained.load(), exported)

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, Any]]:
        return {"vLLM": {"method": "eagle3", "parallel_drafting": True}}


def _as(described: dict[str, Any], architecture: str, kind: str) -> dict[str, Any]:
    """The same config of another algorithm."""
    algorithm = {**described["speculators_config"], "algorithm": kind}
    return {
        **described, "architectures": [architecture], "speculators_model_type": kind, "speculators_config": algorithm
    }  # fmt: skip


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
    described, weights = read_config(exported), read_weights(exported)
    mask = weights.pop("mask_hidden").float().view(1, -1)
    with tempfile.TemporaryDirectory() as folder:  # but for the masks it is an EAGLE-3 head
        save_file(weights, Path(folder) / "model.safetensors")
        write_json(Path(folder) / "config.json", _as(described, "Eagle3Speculator", "eagle3"))
        head = EngineHead(Path(folder))
    ours: Any = drafter
    ours.to(head.dtype).float().eval()
    config, made = ours.config, torch.Generator().manual_seed(seed)
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


SHIPPING = PEagleShipping()
