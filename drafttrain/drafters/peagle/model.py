"""P-EAGLE: an EAGLE-3 drafter that predicts all depths in one pass.

    anchor t, depth 0:   state = fc(features_t)       token x_{t+1}        predicts x_{t+2}
    anchor t, depth k:   state = fc(mask_hidden)      the mask token       predicts x_{t+2+k}

Depths after the first have neither a state nor a token of their own: they read one learned vector
and the embedding of one fixed token, at position t + k. They see the same keys as EAGLE-3's depths:
those of anchors 0..t at depth 0 and of their own path, here of masks. So, given the committed text,
all nodes of a depth have the same distribution.

Source: speculators' models/peagle (create_peagle_mask_mod: depth-0 keys up to the anchor, and the
own chain), vLLM's parallel drafting (`mask_token_id`, `mask_hidden`).
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from drafttrain.batch import Batch, anchors_by_depth
from drafttrain.drafters.base import Source
from drafttrain.drafters.common.rows import Ask, Children, Places
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.eagle3.model import Eagle3, Eagle3Config
from drafttrain.errors import UserError
from drafttrain.target import Target
from drafttrain.values import Size


class PEagleConfig(Eagle3Config):
    """Config of a P-EAGLE drafter.

    Attributes:
        mask_token_id: the token whose (frozen) embedding later depths read; the target's padding or
            end token by default.
    """

    model_type = "drafttrain_peagle"
    mask_token_id: Size = 0

    def check(self) -> None:
        super().check()
        if self.ttt_steps < 2:
            raise UserError(
                f"ttt_steps={self.ttt_steps}: the first depth reads no mask, so at least 2 are trained"
            )

    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Self:
        spare = getattr(target.tokenizer, "pad_token_id", None)
        if spare is None:
            spare = next(iter(target.eos_ids), 0)
        mask = options.setdefault("mask_token_id", spare)
        if not 0 <= mask < target.vocab_size:
            raise UserError(
                f"mask_token_id={mask} is not a token of {target.name!r}, which has {target.vocab_size}"
            )
        return super().for_target(target, **options)


class PEagle(Eagle3):
    """A P-EAGLE drafter."""

    config_class = PEagleConfig
    kind = "peagle"

    def __init__(self, config: PEagleConfig):
        super().__init__(config)
        # In the form of published checkpoints: replaces the target's features, before `fc`.
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    @torch.no_grad()
    def solve_start(self, batches: list[Batch], source: Source) -> float | None:
        """As EAGLE-3's; `mask_hidden` starts as the mean of the features that it replaces."""
        total = torch.zeros(self.mask_hidden.shape[-1], device=self.mask_hidden.device)
        count = 0
        for batch in batches:
            features, _, _ = source(batch)  # [b, s, f*h]
            anchors = anchors_by_depth(batch.response_mask, 1)[0]
            total += features.flatten(0, 1)[anchors].float().sum(0)
            count += len(anchors)
        self.mask_hidden.copy_((total / count).view_as(self.mask_hidden))
        return super().solve_start(batches, source)

    def masks(self, count: int) -> tuple[Tensor, Tensor]:
        """States [count, h] and embeddings [count, target h] of `count` masked positions."""
        state = self.fuse(self.mask_hidden.view(1, -1))  # [1, h]
        token = torch.full((1,), self.config.mask_token_id, device=state.device)
        return state.expand(count, -1), self.embed(token).expand(count, -1)

    def next_inputs(self, state: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        return self.masks(len(embeds))

    def draft(
        self,
        roots: Tensor,
        places: Places,
        width: int | None,
    ) -> tuple[Children, Ask]:
        """One step over the masked positions of all depths and sequences."""
        reads = roots[:, 1:]  # [R, 1, h] the head's input
        count = places.depth - 1  # masks per tree
        if count > 0:
            states, embeds = self.masks(len(roots) * count)
            made = self.advance(states, embeds, places.behind(count), 1)
            deeper = made[:, 1].unflatten(0, (len(roots), count))
            reads = torch.cat((reads, deeper), dim=1)  # [R, depth, h]
        # The depths of a sequence stand together, and all nodes of a depth share its row.
        every = self.predict(reads.flatten(0, 1), width)._replace(shared=True)
        depths = reads.shape[1]
        return every.every(depths, 0), lambda nodes: every.every(depths, nodes.depth)

    def kernel_lacks(self, spec: TreeSpec) -> str:
        return "all depths come from one pass"


KIND = PEagle
