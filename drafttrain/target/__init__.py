"""The frozen target: loading, attention interface, native CPU body, fetching.

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
