"""Names of drafters: how a folder, a Hub id or KIND:OPTIONS becomes a drafter."""

from __future__ import annotations

import importlib
import inspect
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typing_extensions import NotRequired, TypedDict

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.combined import CombinedDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.kinds import kinds, split_name, untrained_kinds
from drafttrain.errors import UserError
from drafttrain.files import Json, hub_snapshot, is_hub_id, read_json, write_json
from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.packing import round_to_int8
from drafttrain.target import Target, resolve_device, resolve_dtype, resolve_target

# Records the kind of a drafter whose config.json is another library's, next to it.
META_FILE = "drafttrain.json"
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt"]


class _Decoding(TypedDict):
    """The content of a decoding.json."""

    tree: str  # the default tree
    off: NotRequired[list[str]]  # categories of requests that are decoded without the drafter


class _Kind(TypedDict):
    """What a config.json says about the kind."""

    drafter_kind: NotRequired[str | None]
    architectures: NotRequired[list[str] | None]


_preparing = threading.RLock()
_BOOLS = {"true": True, "false": False}


def kind_class(name: str) -> type[Drafter]:
    """The class of a kind.

    Raises:
        UserError: no such kind; lists the known ones.
    """
    if name not in kinds():
        raise UserError(f"kind={name!r} is not a drafter kind; there are {', '.join(kinds())}")
    return importlib.import_module(f"{__package__}.{name}.model").KIND


def load_drafter(name: str, target: Target) -> Drafter | None:
    """A drafter for decoding, by name:

    FOLDER or Hub id           a trained drafter, or any causal language model, with the target's vocabulary or another
    FOLDER:OPTION=VALUE,...    the same with fields of its config set, those of the class's `name_options`
    KIND, KIND:OPTIONS         a kind without weights; see `untrained` for the options
    FIRST+KIND, ..+KIND:..     FIRST, with the matches of a kind without weights merged into its tree
    none                       no drafter

    Returns it bound to the target, on its device and in its compute dtype.

    Raises:
        UserError: nothing there, not a drafter of ours, a wrong option, or trained for another
            target.
    """
    if name == "none":
        return None
    drafter = main = load_unbound(name)
    # What is saved belongs to the drafter with weights, which may be inside several others.
    while isinstance(main, CombinedDrafter):
        main = main.main
    if isinstance(main, PreTrainedModel):
        main.keep_saved(Path(main.name_or_path))  # type: ignore[operator]  # of a trained kind
    return prepare(drafter, target)


def load_unbound(
    name: str,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str = "",
) -> Drafter:
    """The drafter of a name as in `load_drafter`, not bound to a target.

    The other parameters are those of `Drafter.from_pretrained`.
    """
    # From the right: A+ngram+suffix is (A+ngram) with suffix.
    first, plus, second = name.rpartition("+")
    if plus and is_untrained(second):
        if first == "none":
            raise UserError(f"drafter={name!r}: there is nothing to combine with; use {second}")
        main = load_unbound(first, dtype, device, revision)
        drafter: Any = CombinedDrafter(main, untrained(second, beside=True))
    elif is_untrained(name):
        if revision or dtype is not None:
            raise UserError(
                f"drafter={name!r} has no weights, and so neither revision nor dtype; leave them out"
            )
        drafter = untrained(name)
    else:
        drafter = _with_options(name, revision).eval()
        if dtype is not None:
            wanted = resolve_dtype(dtype, resolve_device(device or "cpu"))
            # Buffers keep their precision, which rotary frequencies need.
            for weight in drafter.parameters():
                weight.data = weight.data.to(wanted)
        if device is not None:
            drafter = drafter.to(resolve_device(device))
    drafter.name = name
    drafter.fresh = True
    return drafter


Drafter.load_named = staticmethod(load_unbound)


def prepare(drafter: Drafter, target: Target) -> Drafter:
    """Makes a drafter that was loaded without a target ready to decode with one.

    It is bound to the target, on its device and in its compute dtype.

    Raises:
        UserError: it was trained for another target.
    """
    with _preparing:  # several threads may use it first
        if isinstance(drafter, CombinedDrafter):
            prepare(drafter.main, target)
            prepare(drafter.side, target)
        # Later calls, from other threads too, find it ready.
        elif drafter.fresh:
            if drafter.trainable:
                _fit(drafter, target)
            drafter.bind(target)
        drafter.fresh = False
    return drafter


def _with_options(name: str, revision: str = "") -> Any:
    """A trained drafter with the options of its name.

    Raises:
        UserError: an unknown option, or a value that is not valid for it.
    """
    folder, options = split_name(name)
    if revision:
        folder = str(drafter_folder(folder, revision=revision))
    drafter = load_trained(folder)
    for key in options:
        if key not in drafter.name_options:
            known = ", which takes none"
            if drafter.name_options:
                known = f"; there are {', '.join(drafter.name_options)}"
            raise UserError(
                f"drafter={name!r}: {key!r} is not an option of a {drafter.kind}{known}"
            )
    for key, value in drafter.check_options(options).items():
        setattr(drafter.config, key, value)
    return drafter


def _fit(drafter: Any, target: Target) -> None:
    """Moves a trained drafter to the target's device and dtype, and packs it on a CPU."""
    drafter.keep_saved()
    target.widen()  # before the drafter takes its compute_dtype
    for weight in drafter.parameters():
        # Rounded to the requested dtype like the target's weights: bfloat16 values stream at half
        # the bytes. Buffers keep their precision, which rotary frequencies need.
        weight.data = weight.data.to(target.dtype).to(target.compute_dtype)
    drafter.to(target.device)
    if target.device.type == "cpu":
        # Only weights that were rounded to bfloat16 anyway are rounded further.
        widened = target.dtype == torch.bfloat16 and target.compute_dtype == torch.float32
        if widened and cpu_kernels() is not None:
            # A depth costs about the time to read its weights: int8 is a quarter of float32's
            # bytes. Rounding cannot cost correctness: the target verifies every node, and sampled
            # tokens are weighed by the q they were drawn from.
            for module in drafter.modules():
                if isinstance(module, nn.Linear):
                    module.weight.data = round_to_int8(module.weight.data)
            drafter.stored = target.dtype  # of keys and values, which are as many bytes as weights
        drafter.pack()


def is_untrained(name: str) -> bool:
    """True for KIND or KIND:OPTIONS of a kind without weights."""
    kind = name.partition(":")[0]
    return kind in kinds() and not kind_class(kind).trainable


def untrained(name: str, beside: bool = False) -> Drafter:
    """A drafter without weights from KIND:OPTIONS.

    Options are the parameters of the class, separated by commas: NAME=VALUE, or a bare value for
    the first parameter.

    Args:
        beside: it drafts beside another drafter, so the class's `defaults_beside` apply to options
            that the name omits.

    Raises:
        UserError: an unknown option, or a value of the wrong type.
    """
    kind, _, text = name.partition(":")
    cls = kind_class(kind)
    # The options and their defaults.
    known = {key: parameter.default for key, parameter in inspect.signature(cls).parameters.items()}
    given: Json = {}
    for part in text.split(","):
        if not part:
            continue
        key, equals, value = part.partition("=")
        if not equals:  # a bare value is the first option's
            key = next(iter(known))
            value = part
        if key not in known:
            raise UserError(
                f"drafter={name!r}: {key!r} is not an option of {kind}; there are {', '.join(known)}"
            )
        if key in given:
            raise UserError(
                f"drafter={name!r} sets {key} twice; write NAME=VALUE for options after the first, of {', '.join(known)}"
            )
        # An option's default shows its type.
        example = known[key]
        try:
            if isinstance(example, bool):
                given[key] = _BOOLS[value]
            else:
                given[key] = type(example)(value)
        except (KeyError, ValueError) as error:
            wrong = f"{key}={value!r} is not a valid {type(example).__name__}; write for example {kind}:{key}={example}"
            raise UserError(f"drafter={name!r}: {wrong}") from error
    if beside:
        given = {**cls.defaults_beside, **given}
    drafter = cls(**given)
    drafter.fresh = True
    return drafter


def decoding_file(name: str) -> Path:
    """The file of a drafter's default decoding settings, next to its weights."""
    return Path(split_name(name)[0]).expanduser() / "decoding.json"


def default_tree(name: str) -> str | None:
    """The tree in a drafter folder's decoding.json; None without the file.

    Raises:
        UserError: as `decoding_settings`.
    """
    settings = decoding_settings(name)
    if settings:
        return str(settings["tree"])
    return None


def chosen_tree(tree: str | None, name: str) -> TreeSpec:
    """The tree of a drafter's rounds: the given one, else decoding.json's, else chain:3.

    Raises:
        UserError: not a tree, or as `decoding_settings`.
    """
    if not tree:
        tree = default_tree(name)
    if not tree:
        tree = "chain:3"
    return TreeSpec.parse(tree)


def decoding_settings(name: str) -> Json:
    """Content of a drafter folder's decoding.json; empty without the file.

    Its keys are `tree`, and possibly `off`, the categories of requests that are decoded without the
    drafter.

    Raises:
        UserError: a decoding.json without a tree, or whose `off` is not a list.
    """
    first = split_name(name)[0]
    path = decoding_file(name)
    # On the Hub, unless a folder here has that name.
    if is_hub_id(first) and not path.parent.exists():
        path = drafter_folder(first) / path.name
    if not path.is_file():
        return {}
    fix = 'write {"tree": "chain:3", "off": ["translation"]}, or pass a tree'
    settings: Any = read_json(path, "decoding", fix, _Decoding)
    return settings


def keep_decoding(name: str, folder: Path) -> None:
    """Writes a drafter's decoding.json, if it has one, into a folder where the drafter is saved anew."""
    settings = decoding_settings(name)
    if settings:
        write_json(folder / "decoding.json", settings)


def drafter_folder(name: str, key: str = "drafter", revision: str = "") -> Path:
    """The folder of a trained drafter.

    One on the Hub is downloaded to the Hub's cache (JSON and safetensors only).

    Args:
        key: the setting that the user gave the name for. revision: branch, tag or commit of a Hub
            id.

    Raises:
        UserError: no such folder, and not a Hub id that can be read.
    """
    path = Path(name).expanduser()
    if revision and (path.exists() or not is_hub_id(name)):
        raise UserError(
            f"revision={revision!r} is of a Hub id (user/name), and {key}={name!r} is none; leave it out"
        )
    if not path.exists() and "/" not in name:
        path = Path(resolve_target(name))  # a model that `drafttrain fetch` has cached
    if path.exists():
        return path
    if not is_hub_id(name):
        known = ", ".join(untrained_kinds())
        raise UserError(
            f"{key}={name!r}: no such folder, and not a Hub id (user/name); kinds without weights: {known}"
        )
    # Without subfolders, which hold checkpoints and results.
    return hub_snapshot(name, _PATTERNS, key, ignore=["*/*"], revision=revision)


def kind_of(name: str, key: str = "drafter") -> str:
    """The kind of a drafter, named as for `load_drafter`.

    For a causal language model that is not ours, the kind that loads it.

    Raises:
        UserError: nothing there, or not a drafter.
    """
    if name == "none" or is_untrained(name):
        return name
    path = drafter_folder(split_name(name)[0], key) / "config.json"
    config: Any = read_json(path, key, "train one, or check the path", _Kind)
    kind = config.get("drafter_kind")
    if kind and kind not in kinds():
        raise UserError(
            f"{key}={name!r}: config.json: drafter_kind={kind!r} is not one of {', '.join(kinds())}; check the path"
        )
    if kind:
        return kind
    # A language model of transformers, which is not ours.
    names = config.get("architectures")
    if names and set(names) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return next(kind for kind in kinds() if kind_class(kind).loads_language_models)
    raise UserError(
        f"{key}={name!r}: config.json names no drafter_kind and no causal language model, so it is not a drafter of ours; bring "
        "a published EAGLE-3 head in by: drafttrain import"
    )


def load_trained(name: str, key: str = "drafter") -> Any:
    """A saved drafter, by folder or Hub id, not bound to a target; see `kind_of`."""
    return kind_class(kind_of(name, key)).load(drafter_folder(name, key))
