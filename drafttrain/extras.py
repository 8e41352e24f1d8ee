"""Packages of the extras in pyproject.toml, which `pip install drafttrain` leaves out.

Commands that need one name it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from drafttrain.errors import UserError, first_line

# Package -> extra that brings it.
EXTRAS = {
    "PIL": "vision",
    "deepspeed": "deepspeed",
    "gguf": "gguf",
    "matplotlib": "plots",
    "peft": "peft",
    "prometheus_client": "metrics",
    "torchvision": "vision",
    "wandb": "wandb",
}

# What the command of an extra does not know: the build must be torch's own.
_BUILDS = {
    "torchvision": " (beside a torch for CPUs: pip install torchvision --index-url https://download.pytorch.org/whl/cpu)"
}


def require(package: str, purpose: str = "this") -> ModuleType:
    """Imports a package of an extra.

    Args:
        purpose: what needs it, for the message of an error.

    Raises:
        UserError: it is not installed, or does not import.
    """
    try:
        return importlib.import_module(package)
    # torchvision for another build of torch raises RuntimeError.
    except (ImportError, RuntimeError) as error:
        missing = "is not installed"
        if getattr(error, "name", None) != package:
            missing = f"cannot be imported ({first_line(error)})"
        fix = f"pip install 'drafttrain[{EXTRAS[package]}]'"
        fix += _BUILDS.get(package, "")
        raise UserError(f"{purpose} needs {package}, which {missing}: {fix}") from error


class LazyPackage(ModuleType):
    """Stands for a package of an extra at the top of a module; see `require`.

    The package is imported with its first attribute.
    """

    def __getattr__(self, name: str) -> object:
        return getattr(require(self.__name__), name)
