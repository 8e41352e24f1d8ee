"""The frozen target: loading, attention interface, native CPU body, fetching."""

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
