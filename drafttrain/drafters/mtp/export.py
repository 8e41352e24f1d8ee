"""Multi-token prediction modules: no engine loads one from a checkpoint of its own."""

from __future__ import annotations

from drafttrain.drafters.shipping import Shipping, Trained


class MTPShipping(Shipping):
    """Our own format only."""

    no_format = (
        "engines read prediction modules out of the target's own checkpoint, for families that come with one; train an eagle1 "
        "or eagle3 drafter for serving there"
    )

    def line(self, trained: Trained, parameters: str) -> str:
        modules = trained.config.get("modules", 1)
        many = "a multi-token prediction module" if modules == 1 else f"{modules} multi-token prediction modules"
        return f"{many} (arXiv 2412.19437), {parameters} parameters"


SHIPPING = MTPShipping()
