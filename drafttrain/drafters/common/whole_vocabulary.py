"""Export of heads to engines that know no table of kept tokens: a row for every token of the target's vocabulary."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from drafttrain.drafters.common.path_heads import PathHeads
from drafttrain.drafters.shipping import Exported, Shipping
from drafttrain.files import Json


def whole_rows(head: Tensor, kept_ids: Tensor, vocab_size: int) -> Tensor:
    """[d, w] head rows of the kept tokens -> [vocab_size, w].

    Tokens that the drafter does not keep get the mean of the kept tokens' rows: their logit is the mean logit, which is never
    the highest, so engines that take the likeliest token draft what we draft.
    """
    rows = head.mean(0).expand(vocab_size, -1).clone()  # [v, w]
    rows[kept_ids] = head
    return rows


H = TypeVar("H", bound=PathHeads)


class WholeVocabularyShipping(Shipping[H]):
    """Kinds whose `lm_heads` are written for the whole vocabulary."""

    def engine_weights(self, drafter: H, config: Json) -> dict[str, Tensor]:
        names, weights = self.engine_names(drafter, config), super().engine_weights(drafter, config)
        return {
            name: whole_rows(value, drafter.kept_ids, config["vocab_size"]) if "lm_heads" in names[name] else value
            for name, value in weights.items()
        }

    def drafter_weights(self, original: H, back: H, export: Exported) -> dict[str, Tensor]:
        state = super().drafter_weights(original, back, export)
        return {name: value[original.kept_ids] if "lm_heads" in name else value for name, value in state.items()}
