"""Hydra heads, which no engine runs."""

from __future__ import annotations

from drafttrain.drafters.shipping import Shipping


class HydraShipping(Shipping):
    """Our own format only."""

    description = "{num_heads} Hydra heads (arXiv 2402.05109), {parameters} parameters, {kept}"
    no_format = "Hydra heads read the drafted tokens' embeddings, and engines run heads (Medusa's) on the state alone"


SHIPPING = HydraShipping()
