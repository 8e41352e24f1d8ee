"""Hydra heads, which no engine runs."""

from __future__ import annotations

from drafttrain.drafters.shipping import Shipping
from drafttrain.drafters.trained import Trained


class HydraShipping(Shipping):
    def line(self, trained: Trained, parameters: str) -> str:
        config = trained.config
        return (
            f"{config['num_heads']} Hydra heads (arXiv 2402.05109), {parameters} parameters, "
            f"{config.get('draft_vocab_size', 0):,} of its {config.get('vocab_size', 0):,} tokens"
        )

    def refusals(self, trained: Trained, form: str) -> list[str]:
        return ["Hydra heads read the drafted tokens' embeddings, and engines run heads (Medusa's) on the state alone"]


SHIPPING = HydraShipping()
