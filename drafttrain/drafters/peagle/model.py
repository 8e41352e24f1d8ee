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

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from drafttrain.batch import Batch, TokenTree, anchors_by_depth
from drafttrain.drafters.base import Samplers, Source, Specs
from drafttrain.drafters.common.layer_session import LayerSession
from drafttrain.drafters.common.static_draft import DraftPlaces
from drafttrain.drafters.common.tensor_growth import Ask
from drafttrain.drafters.common.tree_growth import GrowingTree, Logits, grow_trees, rows_of, widest
from drafttrain.drafters.eagle3.model import Eagle3, Eagle3Config
from drafttrain.errors import UserError
from drafttrain.ops.tree_attention import TreeLayout
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
    def solve_start(self, batches: list[Batch], source: Source) -> float:
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

    def draft_static(self, roots: Tensor, places: DraftPlaces) -> tuple[Logits, Ask]:
        rows = len(roots)
        states = roots[:, None]  # [R, 1, h]
        count = places.depth - 1  # masks per tree
        if count:
            positions, context = places.behind(count, count)
            attends = context.layers(self.cache_shape.layers, self.cache_shape.window)
            state, embeds = self.masks(rows * count)
            deeper = self.step(
                state,
                embeds,
                positions,
                attends,
                None,
                1,
            )
            states = torch.cat((states, deeper.unflatten(0, (rows, count))), dim=1)  # [R, depth, h]
        logits = self.logits(states.flatten(0, 1)).unflatten(0, states.shape[:2])  # [R, depth, d]
        return logits[:, :1], lambda depth, tokens, parents: logits[:, depth, None]

    @torch.no_grad()
    def propose_all(
        self,
        sessions: Sequence[LayerSession],
        specs: Specs,
        samplers: Samplers,
    ) -> list[TokenTree]:
        """Drafts all depths of all sessions in one step over masked positions."""
        steps = sessions[0].steps
        if steps is not None:
            static = steps.propose(sessions, specs, samplers)
            if static is not None:
                return static

        # The head's input at the roots, then at the masks of the sessions whose trees are deeper.
        reads = []
        rows = []  # of the deeper trees
        masked = []
        layouts = []
        for row, session in enumerate(sessions):
            read = session.read
            if read is None:
                read = self.read_out(session.root)
            reads.append(read)
            if specs[row].depth > 1:
                rows.append(row)
                masked.append(session)
                layouts.append(TreeLayout(session.length, count=specs[row].depth - 1))
        sizes = [layout.count for layout in layouts]
        if masked:
            states, embeds = self.masks(sum(sizes))
            made = self.kernel_step(masked, layouts, states, embeds, depth=1)
            if made is None:
                read = self.read_out(self.packed_step(masked, layouts, states, embeds, depth=1))
            else:
                _, read = made
            reads.append(read)
        owners = list(sessions) + masked
        counts = [1] * len(sessions) + sizes
        parts = self.predict(owners, counts, torch.cat(reads), widest(specs))
        deeper = dict(zip(rows, parts[len(sessions) :], strict=True))  # by row

        trees = []
        for row, session in enumerate(sessions):
            root = rows_of(parts[row], 0)
            trees.append(GrowingTree(specs[row], root, session.ids, samplers[row], row=row))

        def step(growing: list[GrowingTree], depth: int) -> list[Logits]:
            return [rows_of(deeper[tree.row], slice(depth - 1, depth)) for tree in growing]

        return grow_trees(trees, step)


KIND = PEagle
