"""The frozen target: loading, attention interface, native CPU body, shells without weights, fetching.

Names load on first use, so that `drafttrain fetch` does not import torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drafttrain.target.target import (
        DTYPES,
        Target,
        resolve_device,
        resolve_dtype,
        resolve_target,
        share_of_gpus,
        tokenizer_fingerprint,
    )

__all__ = [
    "DTYPES",
    "Target",
    "resolve_device",
    "resolve_dtype",
    "resolve_target",
    "share_of_gpus",
    "tokenizer_fingerprint",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import drafttrain.target.target as module

    return getattr(module, name)
