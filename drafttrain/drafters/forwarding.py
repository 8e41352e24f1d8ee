"""A drafter around another one, of which it changes some methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drafttrain.drafters.base import Drafter

# Not a subclass when it runs: what `Drafter` defines would hide what the inner drafter defines.
if TYPE_CHECKING:
    Base = Drafter
else:
    Base = object


class WrappedDrafter(Base):
    """Another drafter, except for the methods that a subclass defines.

    Everything else is the inner drafter's, hooks that will be added to the contract included.
    """

    def __init__(self, inner: Drafter):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
