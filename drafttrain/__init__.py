"""drafttrain: train, prove and publish drafters for lossless speculative decoding.

from drafttrain import generate
out = generate("smollm2-135m", "The capital of France is", drafter="ngram")
print(out.text, out.stats.accepted_length)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drafttrain.api import evaluate, generate, load_drafter, stream
    from drafttrain.drafters.base import Drafter
    from drafttrain.target import Target

__version__ = "0.1.0"
__all__ = ["Drafter", "Target", "evaluate", "generate", "load_drafter", "stream"]

# Loaded on first use: `import drafttrain` and the command line's --help stay quick.
_CALLS = ("evaluate", "generate", "load_drafter", "stream")
_HOMES = {
    "Drafter": "drafttrain.drafters.base",
    "Target": "drafttrain.target.target",
    **dict.fromkeys(_CALLS, "drafttrain.api"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
