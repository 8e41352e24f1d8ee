"""drafttrain: train, prove and publish drafters for lossless speculative decoding.

from drafttrain import generate
out = generate("smollm2-135m", "The capital of France is", drafter="ngram")
print(out.text, out.stats.accepted_length)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from drafttrain.environment import __version__ as __version__

if TYPE_CHECKING:
    from drafttrain.api import generate, load_drafter, stream
    from drafttrain.commands.eval import evaluate
    from drafttrain.commands.export import export
    from drafttrain.commands.push import push
    from drafttrain.commands.tune import tune
    from drafttrain.drafters.base import Drafter
    from drafttrain.pipeline import train
    from drafttrain.target.target import Target

__all__ = [
    "Drafter", "Target", "evaluate", "export", "generate", "load_drafter", "push", "stream", "train", "tune",
]  # fmt: skip

# Modules that load on first use, so that `import drafttrain` and `drafttrain --help` stay quick.
_MODULES = {
    "Drafter": "drafttrain.drafters.base",
    "Target": "drafttrain.target.target",
    **dict.fromkeys(("generate", "load_drafter", "stream"), "drafttrain.api"),
    "evaluate": "drafttrain.commands.eval",
    "push": "drafttrain.commands.push",
    "tune": "drafttrain.commands.tune",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name in ("export", "train"):  # modules that can be called
        return importlib.import_module(f"drafttrain.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
