"""Modules that can be called: `drafttrain.train` and `drafttrain.export` are modules and functions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType


class CallableModule(ModuleType):
    """A module that the Python API calls by its name, as the function of that name in pipeline.py."""

    @property
    def __wrapped__(self) -> Callable[..., object]:
        # What inspect.signature, help in notebooks and tab completion read.
        pipeline = importlib.import_module("drafttrain.pipeline")
        return getattr(pipeline, self.__name__.rpartition(".")[2])

    def __call__(self, *arguments: object, **options: object) -> object:
        return self.__wrapped__(*arguments, **options)
