"""Former names of modules, and modules that can be called.

An import by a former name gives the module that took its place, with a DeprecationWarning.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Former name below drafttrain -> today's name; a name that is not listed belongs to the entry for
# its parent.
MOVED = {
    "decode": "inference",
    "decode.ngram_corpus": "data.ngram_corpus",
    "decode.rows": "inference.sequence",
    "decode.stats": "inference.sequence",
    "decode.text": "inference.sequence",
    "data.slots": "inference.responses",
    "target_attention": "target.attention",
    "hub.export": "export.export_drafter",
    "hub.import_drafter": "export.import_drafter",
    "hub.verify": "export.verify_export",
    "hub.serving": "export.serving_recipes",
    "hub.fetch": "target.fetch",
    "evaluation.report": "reports.report",
    "evaluation.trace": "reports.trace",
    "evaluation.tuning": "tuning.tune",
    "evaluation.sweep": "tuning.sweep",
    "evaluation.estimate": "tuning.estimate",
    "evaluation.serving": "serving.bench",
    "losses.linear": "losses",
    "losses.targets": "losses",
    "training.targets": "states.source",
    "training.feature_sources": "states.source",
    "training.states_ahead": "states.ahead",
    "data.features": "states.features",
    "data.state_client": "states.served",
    "data.state_server": "states.server",
    "data.state_files": "states.transports.folder",
    "data.state_transports": "states.transports",
    "data.engines": "states.engines",
    "data.formats": "data.row_formats",
    "drafters.tree_spec": "drafters.common.tree_spec",
    "drafters.layers": "drafters.common.layers",
    "drafters.layer_model": "drafters.common.layer_model",
    "drafters.layer_config": "drafters.common.configs",
}


def todays_name(former: str) -> str | None:
    """The full name of the module that took a former one's place; None for names that are not
    former ones.
    """
    name = former.removeprefix("drafttrain.")
    if name in MOVED:
        return f"drafttrain.{MOVED[name]}"
    parent, _, last = name.rpartition(".")
    if parent in MOVED:
        return f"drafttrain.{MOVED[parent]}.{last}"
    return None


class FormerNames(MetaPathFinder, Loader):
    """Finds modules by their former names.

    It comes first on `sys.meta_path`: a package imported by its former name has today's `__path__`,
    where the path finder would load every submodule a second time.
    """

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        known = name.startswith("drafttrain.") and todays_name(name) is not None
        if known:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        today = todays_name(spec.name)
        assert today is not None
        warnings.warn(f"{spec.name} is now {today}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(today)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just replaced the module's own spec by the former name's.
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state
        else:
            module.__spec__ = None


def install() -> None:
    """Makes former names importable."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerNames())


class CallableModule(ModuleType):
    """A module that the Python API calls by its name: `drafttrain.train` and `drafttrain.export`
    are modules and functions.
    """

    @property
    def __wrapped__(
        self,
    ) -> Callable[..., object]:  # what inspect.signature, help in notebooks and tab completion read
        pipeline = importlib.import_module("drafttrain.pipeline")
        return getattr(pipeline, self.__name__.rpartition(".")[2])

    def __call__(self, *arguments: object, **options: object) -> object:
        return self.__wrapped__(*arguments, **options)
