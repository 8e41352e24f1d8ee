"""Modules that can be called: `drafttrain.train` and `drafttrain.export` are modules and functions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType


class CallableModule(ModuleType):
    """A module that the Python API calls by its name, as the command of that name."""

    @property
    def __wrapped__(self) -> Callable[..., object]:
        # What inspect.signature, help in notebooks and tab completion read.
        name = self.__name__.rpartition(".")[2]
        place = "drafttrain.pipeline" if name == "train" else f"drafttrain.commands.{name}"
        return getattr(importlib.import_module(place), name)

    def __call__(self, *arguments: object, **options: object) -> object:
        return self.__wrapped__(*arguments, **options)
