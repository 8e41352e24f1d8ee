"""The frozen target.

target.py                        load, forward with features, embedding, head; `compute_dtype`, `pack`
loading.py, fetch.py             weights as their config promises; small targets by name
attention.py, proof.py           the attention interface; the proof that a model runs through it
sight.py, parts.py               prompts with images: towers that load with the first one
snapshots.py, own_cache.py       models that keep their own forward and cache
native_body.py                   decoding on a CPU: layers by C kernels (products: ops/packing.py)
fused_body.py                    layers with fewer launches on a GPU (kernels: ops/layer_kernels.py)
devices.py                       names of dtypes and devices
shell.py                         a target without its layers
borrowed.py                      a model in training as a target for a while
generation.py                    generation_config and its logits processors

Names of target.py and shell.py load on first use, so that `drafttrain fetch` does not import torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drafttrain.target.shell import TargetShell, load_shell  # noqa: F401
    from drafttrain.target.target import *  # noqa: F403


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import drafttrain.target.shell as shell
    import drafttrain.target.target as module

    if name in ("TargetShell", "load_shell"):
        return getattr(shell, name)
    return getattr(module, name)
