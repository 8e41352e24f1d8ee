"""The proof of an export: read back, it must draft what the original drafts on random inputs."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Session
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.target import Target

# Of log-probabilities in float32. Both drafters compute the same from the same weights; only the
# memory layout may differ.
TOLERANCE = 1e-4
_PROMPT = 24  # tokens before the first draft
_COMMITTED = 2  # tokens between the first draft and the second
_EMBEDDINGS = 64  # different rows of the random embedding


class RandomTarget(Target):
    """A target of the recorded shape with random embedding and head rows.

    Drafters are bound to it for the proof.
    """

    def __init__(self, drafter: TrainableDrafter):
        config = drafter.config
        self.recorded: Json = config.target
        self.name = self.recorded.get("name", "")
        self.hidden_size = getattr(config, "target_hidden_size", 0)
        if not self.hidden_size:
            self.hidden_size = config.hidden_size
        self.num_layers = self.recorded.get("num_layers", 0)
        if not self.num_layers:
            self.num_layers = max(drafter.feature_layers)
        self.vocab_size = drafter.config.vocab_size
        self.softcap = None
        self.logit_scale = 1.0
        self.embed_scale = 1.0
        self._table = self._random(_EMBEDDINGS)  # [64, h]

    def _random(self, rows: int) -> Tensor:
        return torch.randn(rows, self.hidden_size, generator=torch.Generator().manual_seed(rows))

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @cached_property
    def head_weight(self) -> Tensor:
        return self._random(self.vocab_size)  # [v, h]

    @property
    def head_bias(self) -> Tensor | None:
        return None

    def identity(self) -> Json:
        return self.recorded

    def embed(self, ids: Tensor) -> Tensor:
        return self._table[ids % _EMBEDDINGS]

    def embed_table(self) -> None:
        return None

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head_weight.T


@torch.no_grad()
def compare_drafters(
    original: TrainableDrafter,
    back: TrainableDrafter,
    dtype: torch.dtype,
    depth: int,
    where: str,
) -> Json:
    """Compares two chains of both drafters: after a prompt, and after two committed tokens.

    Args:
        original, back: the drafter, and what was read back from its export; both on the CPU.
        dtype: of the export; both drafters' weights are rounded to it. depth: tokens of a chain.
        where: names the export.

    Returns:
        rounds, depth, max_log_prob_difference, same_tokens: whether both drafted the same.

    Raises:
        UserError: the two draft different tokens or probabilities.
    """
    target = RandomTarget(original)
    for drafter in (original, back):
        drafter.to(dtype).float().eval()  # type: ignore[arg-type]
        drafter.bind(target)
        drafter.uses_text = False  # engines know the kept tokens alone
    _, chains = draft_chains(original, target, depth)
    _, their_chains = draft_chains(back, target, depth)

    same = torch.equal(original.kept_ids, back.kept_ids)
    worst = 0.0
    for ours, theirs in zip(chains, their_chains, strict=True):
        same = same and torch.equal(ours.tokens, theirs.tokens)
        if same and ours.log_probs is not None and theirs.log_probs is not None:
            difference = (ours.log_probs - theirs.log_probs).abs().max().item()
            worst = max(worst, difference)
    if not same or not worst <= TOLERANCE:
        raise UserError(
            f"{where} computes something else than the drafter (log-probabilities differ by {worst:.3g}, same tokens: {same}); "
            "a key or weight was lost: export again, and report this if it stays"
        )
    return {
        "rounds": len(chains),
        "depth": len(chains[0]),
        "max_log_prob_difference": worst,
        "same_tokens": same,
    }


def draft_chains(
    drafter: TrainableDrafter,
    target: RandomTarget,
    depth: int,
) -> tuple[Session, list[TokenTree]]:
    """Drafts two chains on random tokens and features.

    The inputs are the same for every drafter that is bound to `target`.

    Returns:
        The session, which has read everything, and the chains.
    """
    made = torch.Generator().manual_seed(0)
    total = _PROMPT + _COMMITTED
    width = len(drafter.feature_layers) * target.hidden_size
    features = torch.randn(total, width, generator=made)  # [t, f*h] float32
    tokens = torch.randint(target.vocab_size, (total + 1,), generator=made)  # [t + 1] int64
    session = drafter.start(tokens[:_PROMPT], total + depth + 1)
    chains = []
    begin = 0
    for end in (_PROMPT, total):
        session.extend(tokens[begin + 1 : end + 1], features[begin:end])
        chains.append(session.propose(TreeSpec.parse(f"chain:{depth}")))
        begin = end
    return session, chains
