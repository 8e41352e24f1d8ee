"""What exported heads over the target's last state have in common: rows for the whole vocabulary, and the proof of the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.drafters.common.path_heads import PathHeads
from drafttrain.errors import UserError
from drafttrain.formats.weights import read_config, read_weights
from drafttrain.hub.upload import write_clean_json

TOLERANCE = 1e-3  # of log-probabilities in float32
_ANCHORS = 6

# config, weights in float32, last states [n, h], tokens [n, depths] that the depths read -> logits, a [n, v] per depth
Engine = Callable[[dict[str, Any], dict[str, Tensor], Tensor, Tensor], list[Tensor]]


def whole_rows(head: Tensor, kept_ids: Tensor, vocab_size: int) -> Tensor:
    """[d, w] head rows of the kept tokens -> [vocab_size, w].

    Tokens that the drafter cannot say get the mean of the others' rows: their logit is the mean logit, which is never the
    highest, so engines that take the likeliest token draft what we draft.
    """
    rows = head.mean(0).expand(vocab_size, -1).clone()
    rows[kept_ids] = head
    return rows


def save_heads(folder: Path, weights: Mapping[str, Tensor], config: dict[str, Any], dtype: torch.dtype) -> list[Path]:
    """Writes config.json and model.safetensors; returns both.

    Raises:
        UserError: the folder cannot be written.
    """
    tensors = {name: tensor.detach().to(dtype).contiguous().clone() for name, tensor in weights.items()}
    files = [folder / "config.json", folder / "model.safetensors"]
    try:
        write_clean_json(files[0], {**config, "dtype": str(dtype).removeprefix("torch.")})
        save_file(tensors, files[1], metadata={"format": "pt"})
    except OSError as error:
        raise UserError(f"output={str(folder)!r} cannot be written ({error.strerror}); choose another place") from error
    return files


@torch.no_grad()
def compare_heads(drafter: PathHeads, exported: Path, engine: Engine, seed: int = 0) -> dict[str, Any]:
    """Computes all depths on random states and tokens from the exported files alone, and with our drafter.

    Args:
        drafter: on the CPU; its weights are rounded as the exported ones are. engine: what an engine computes.

    Returns:
        depth, max_log_prob_difference (over the kept tokens), same_tokens: whether both find the same likeliest ones.

    Raises:
        UserError: the files do not hold what an engine looks for, or the outputs differ.
    """
    weights = read_weights(exported)
    ours: Any = drafter
    ours.to(next(iter(weights.values())).dtype).float().eval()
    made = torch.Generator().manual_seed(seed)
    hidden = torch.randn(_ANCHORS, ours.config.hidden_size, generator=made)
    tokens = torch.randint(ours.config.vocab_size, (_ANCHORS, ours.depths), generator=made)
    try:
        theirs = engine(read_config(exported), {name: w.float() for name, w in weights.items()}, hidden, tokens)
    except (KeyError, RuntimeError) as error:
        raise UserError(
            f"{str(exported)!r} lacks what an engine looks for, or in another shape ({error}); export anew"
        ) from error
    worst, same = 0.0, 0 < len(theirs) <= ours.depths
    state = ours.enter(hidden, tokens[:, 0])
    for k, logits in enumerate(theirs):
        state = ours.advance(state, tokens[:, k], k) if k else state
        own = ours.logits(state, k)
        gap = own.log_softmax(-1) - logits[:, ours.kept_ids].log_softmax(-1)
        worst = max(worst, gap.abs().max().item())
        same = same and bool((ours.kept_ids[own.argmax(-1)] == logits.argmax(-1)).all())
    if not same or not worst <= TOLERANCE:
        raise UserError(
            f"{str(exported)!r} computes something else than the drafter (log-probabilities differ by {worst:.3g}, same "
            f"tokens: {same}); a flag or weight was lost: export anew, and report this if it stays"
        )
    return {"depth": len(theirs), "max_log_prob_difference": worst, "same_tokens": same}
