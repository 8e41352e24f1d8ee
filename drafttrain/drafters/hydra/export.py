"""Hydra heads, which no engine runs."""

from __future__ import annotations

from drafttrain.drafters.shipping import Shipping
from drafttrain.drafters.trained import Trained


class HydraShipping(Shipping):
    """Our own format only."""

    description = "{num_heads} Hydra heads (arXiv 2402.05109), {parameters} parameters, {kept}"

    def unsupported(self, trained: Trained, form: str) -> list[str]:
        return ["Hydra heads read the drafted tokens' embeddings, and engines run heads (Medusa's) on the state alone"]


SHIPPING = HydraShipping()
