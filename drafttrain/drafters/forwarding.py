"""A drafter that passes all but some methods on to another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drafttrain.drafters.base import Drafter

# Not a subclass when it runs: what `Drafter` defines would hide what the inner drafter defines.
if TYPE_CHECKING:
    Base = Drafter
else:
    Base = object


class ForwardingDrafter(Base):
    """Passes everything but a subclass's own methods to another drafter.

    Hooks that will be added to the contract are passed on too.
    """

    def __init__(self, inner: Drafter):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
