"""Step outputs of an exported EAGLE-3 head, computed as an engine does, against those of our drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.eagle3.model import Eagle3
from drafttrain.errors import UserError
from drafttrain.formats.engine_eagle3 import EngineHead

_PROMPT, _DEPTH, _KEPT = 24, 4, 2
TOLERANCE = 1e-3  # of log-probabilities in float32; layouts and order of sums differ, nothing else does


@torch.no_grad()
def compare_steps(drafter: Eagle3, exported: Path, seed: int = 0) -> dict[str, Any]:
    """Drafts two chains on random inputs both ways: after a prompt, and after tokens that the target committed.

    Args:
        drafter: ours, on the CPU; its weights are rounded as the exported ones are.

    Returns:
        rounds, depth, max_log_prob_difference, same_tokens: whether both drafted the same.

    Raises:
        UserError: the files do not hold what an engine looks for, or the outputs differ.
    """
    head = EngineHead(exported)
    ours: Any = drafter
    ours.to(head.dtype).float().eval()
    config = ours.config
    made = torch.Generator().manual_seed(seed)
    table = torch.randn(64, config.target_hidden_size, generator=made)
    ours.embed = lambda ids: table[ids % len(table)]
    total = _PROMPT + _KEPT
    width = len(config.feature_layers) * config.target_hidden_size
    features = torch.randn(total, width, generator=made)
    tokens = torch.randint(config.vocab_size, (total + 1,), generator=made)
    session = ours.start(tokens[:_PROMPT], total + _DEPTH + 1)
    worst, same, begin = 0.0, True, 0
    for end in (_PROMPT, total):
        session.extend(tokens[begin + 1 : end + 1], features[begin:end])
        tree = session.propose(TreeSpec.parse(f"chain:{_DEPTH}"))
        first = ours.logits(session.root)[0].log_softmax(-1)
        theirs, drafted = _chain(head, ours.embed(tokens[begin + 1 : end + 1]), features[begin:end], begin, ours.embed)
        assert tree.log_probs is not None, "a chain of EAGLE-3 carries log-probabilities"
        worst = max(worst, (first - theirs[0]).abs().max().item())
        same = same and tree.tokens.tolist() == head.target_ids[drafted].tolist()
        path = torch.stack([row[token] for row, token in zip(theirs, drafted, strict=True)]).cumsum(0)
        if same:
            worst = max(worst, (tree.log_probs - path).abs().max().item())
        head.forget(end)
        begin = end
    if not same or not worst <= TOLERANCE:
        raise UserError(
            f"{str(exported)!r} computes something else than the drafter (log-probabilities differ by {worst:.3g}, same "
            f"tokens: {same}); a flag or weight was lost: export anew, and report this if it stays"
        )
    return {"rounds": 2, "depth": _DEPTH, "max_log_prob_difference": worst, "same_tokens": same}


def _chain(head: EngineHead, embeds: Tensor, features: Tensor, begin: int, embed: Any) -> tuple[list[Tensor], Tensor]:
    """A greedy chain: log-probabilities [d] of each depth, and the tokens [depth] in the drafter's ids."""
    positions = torch.arange(begin, begin + len(embeds))
    logits, states = head.step(embeds, head.combine(features), positions)
    rows, drafted = [logits[-1].log_softmax(-1)], [logits[-1].argmax()]
    state, at = states[-1:], begin + len(embeds)
    while len(rows) < _DEPTH:
        logits, state = head.step(embed(head.target_ids[drafted[-1]])[None], state, torch.tensor([at]))
        rows.append(logits[0].log_softmax(-1))
        drafted.append(logits[0].argmax())
        at += 1
    return rows, torch.stack(drafted)
