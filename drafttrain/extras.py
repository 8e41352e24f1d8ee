"""Packages of the extras in pyproject.toml: `pip install drafttrain` leaves them out, the commands
that need one name it.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from drafttrain.errors import UserError, first_line

EXTRAS = {
    "deepspeed": "deepspeed",
    "gguf": "gguf",
    "matplotlib": "plots",
    "peft": "peft",
    "wandb": "wandb",
}


def require(package: str, purpose: str = "this") -> ModuleType:
    """Imports a package of an extra. purpose: what needs it. Raises UserError: it is not installed,
    or does not import.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        missing = "is not installed"
        if error.name != package:
            missing = f"cannot be imported ({first_line(error)})"
        fix = f"pip install 'drafttrain[{EXTRAS[package]}]'"
        raise UserError(f"{purpose} needs {package}, which {missing}: {fix}") from error


class LazyPackage(ModuleType):
    """Stands for a package of an extra at the top of a module, and is imported with its first
    attribute; see `require`.
    """

    def __getattr__(self, name: str) -> object:
        return getattr(require(self.__name__), name)
