"""drafttrain: train, prove and publish drafters for lossless speculative decoding.

from drafttrain import generate
out = generate("smollm2-135m", "The capital of France is", drafter="ngram")
print(out.text, out.stats.accepted_length)
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from drafttrain.environment import __version__ as __version__

if TYPE_CHECKING:
    from drafttrain.api import generate, load_drafter, stream
    from drafttrain.commands.eval import evaluate
    from drafttrain.commands.export import export
    from drafttrain.commands.push import push
    from drafttrain.commands.train import train
    from drafttrain.commands.tune import tune
    from drafttrain.drafters.base import Drafter
    from drafttrain.target.target import Target
    from drafttrain.training.follower import Follower, follow

__all__ = [
    "Drafter", "Follower", "Target", "evaluate", "export", "follow", "generate", "load_drafter", "push", "stream",
    "train", "tune",
]  # fmt: skip

# Name -> module that holds it. They load on first use, so that `import drafttrain` and
# `drafttrain --help` stay quick.
_MODULES = {
    "Drafter": "drafttrain.drafters.registry",
    "Target": "drafttrain.target.target",
    **dict.fromkeys(("Follower", "follow"), "drafttrain.training.follower"),
    **dict.fromkeys(("generate", "load_drafter", "stream"), "drafttrain.api"),
    **{name: f"drafttrain.commands.{name}" for name in ("export", "push", "train", "tune")},
    "evaluate": "drafttrain.commands.eval",
}
_CALLED = ("export", "train")  # functions whose name is also a module's


def _load(name: str) -> Callable[..., object]:
    return getattr(importlib.import_module(_MODULES[name]), name)


class _CallableModule(ModuleType):
    """A module that is called as the function of its name: `drafttrain.train(recipe)`."""

    @property
    def __wrapped__(self) -> Callable[..., object]:
        # What inspect.signature, notebooks and tab completion read.
        return _load(self.__name__.rpartition(".")[2])

    def __call__(self, *arguments: object, **options: object) -> object:
        return self.__wrapped__(*arguments, **options)

    # help() shows the function in place of the module's own names.
    __all__: tuple[str, ...] = ()

    def _help(self) -> str:
        function = self.__wrapped__
        every = inspect.signature(function).parameters.values()
        names = ", ".join(str(one.replace(annotation=one.empty)) for one in every)
        return f"{function.__name__}({names})\n\n{inspect.getdoc(function)}"

    __doc__ = property(_help)  # type: ignore[assignment]


class _Package(ModuleType):
    """This package. The import system sets its modules as its attributes."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _CALLED and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name in _CALLED:
        return importlib.import_module(f"drafttrain.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _load(name)
