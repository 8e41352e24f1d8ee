"""Loading of language models with exactly the weights that their configs promise, all finite.

transformers initializes weights that a file lacks at random and drops those that the model does not
have, with a warning at most. The result differs from the published model, so both are errors here.
Allowed are tied weights, which are stored once, buffers of older versions, and parts that no
language model reads: towers of other modalities and prediction modules (MTP).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging as logs

from drafttrain.errors import UserError, text_of, without_xet
from drafttrain.files import Json, hub_snapshot, open_tensors, read_json
from drafttrain.target.fetch import resolve_target
from drafttrain.target.parts import (
    build_language_model,
    image_class,
    part_class,
    whole_again,
)
from drafttrain.values import ShardIndex

# Buffers that earlier versions of transformers stored, and parts that are not the language model's.
_BUFFERS = re.compile(
    r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias|position_ids)$"
)
_APART = re.compile(
    r"^(model\.|language_model\.)*(mtp|vision|visual|audio|image|speech|multi_modal|mm_|embed_(vision|audio))"
)
# Weights of a prediction module that is stored as a further layer (DeepSeek, GLM).
_PREDICTION = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
# Largest plausible number of a config's decoder layers, and of any other count or size.
_MOST_LAYERS = 1000
_MOST = 2**24
_SIZES = ("hidden_size", "vocab_size", "num_attention_heads")
# transformers' modules that log reports of a load.
_REPORTERS = ("modeling_utils", "utils.loading_report", "distributed.tensor_parallel")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "tok_embeddings.weight")
# Weights per byte of the files: 4 bits each, and some that are tied.
_MOST_PER_BYTE = 4


@contextlib.contextmanager
def quiet_bars() -> Iterator[None]:
    """Hides transformers' progress bars in calls from Python.

    Commands, which show what the package logs, keep the bars.
    """
    in_command = logging.getLogger("drafttrain").isEnabledFor(logging.INFO)
    hides = logs.is_progress_bar_enabled() and not in_command
    if hides:
        logs.disable_progress_bar()
    try:
        yield
    finally:
        if hides:
            logs.enable_progress_bar()


@contextlib.contextmanager
def loading(what: str, fix: str) -> Iterator[None]:
    """Reports any failure of a library's loader as one line: WHAT cannot be loaded.

    The library's own reports of missing weights, many lines on stderr, are left out:
    `check_loaded` names the weights.
    """
    quiet = [logging.getLogger(f"transformers.{name}") for name in _REPORTERS]
    levels = [logger.level for logger in quiet]
    for logger in quiet:
        logger.setLevel(logging.CRITICAL)
    try:
        with quiet_bars():
            yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{what} cannot be loaded ({text_of(error)[:300]}); {fix}{without_xet(error)}"
        ) from error
    finally:
        for logger, level in zip(quiet, levels, strict=True):
            logger.setLevel(level)


def load_language_model(where: str, what: str, fix: str, **options: Any) -> Any:
    """A causal language model with exactly the weights that its config promises.

    Of a model that reads images too, it is the text part: towers are neither built nor read.

    Args:
        where: folder or Hub id.
        what: names the model in errors (`target='...'`).
        fix: ends the error: what the user can do.
        options: of `from_pretrained`; weights are safetensors unless they name a gguf_file.

    Raises:
        UserError: not loadable; weights that are missing, unknown, of another shape or not finite.
    """
    with loading(what, fix):
        if "gguf_file" not in options:
            config = model_config(where, options.get("trust_remote_code", False))
            check_sizes(config, where, what, fix)
            options["config"] = config
            whole = image_class(config)
            if whole is not None:
                return load_part(whole, where, what, fix, text=True, **options)
            options["use_safetensors"] = True
            # Weights of another shape are reported by name with the others.
            options["ignore_mismatched_sizes"] = True
        options["output_loading_info"] = True
        loaded: Any = AutoModelForCausalLM.from_pretrained(where, **options)
    model, info = loaded
    check_loaded(model, info, what, fix)
    return model


def load_part(
    whole: type[PreTrainedModel],
    where: str,
    what: str,
    fix: str,
    *,
    text: bool,
    **options: Any,
) -> PreTrainedModel:
    """The text part of a model that reads images, or all but its text part, checked as a whole model is.

    Args:
        whole: its class. text: which part.

    Raises:
        UserError: as `load_language_model`.
    """
    options.pop("trust_remote_code", None)  # the class is transformers' own
    with loading(what, fix):
        found: tuple[PreTrainedModel, Json] = part_class(whole, text).from_pretrained(  # type: ignore[assignment]
            where,
            output_loading_info=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    model, info = found
    parts = whole_again(model)
    # Each part is checked for its own weights, and does not know the other's.
    unknown = [str(name) for name in info.get("unexpected_keys") or ()]
    info["unexpected_keys"] = [name for name in unknown if parts.is_tower(name) != text]
    check_loaded(model, info, what, fix, apart=text)
    return model


def model_config(where: str, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a folder, a config.json or a Hub id; raises what transformers raises.

    Repositories may name a model type of their own (`kimi_k2`) for a class that transformers has: it is then read as
    that class's family, without code of the repository's.
    """
    raw, _ = PreTrainedConfig.get_config_dict(where)
    if raw.get("model_type") not in CONFIG_MAPPING:
        config = known_config(raw)
        if config is not None:
            return config
    return AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)


def known_config(raw: Json) -> PreTrainedConfig | None:
    """The values of a config.json in transformers' own class; None if it has none for the model."""
    kind = str(raw.get("model_type", ""))
    if kind not in CONFIG_MAPPING:
        kind = _family_of(raw.get("architectures"))
    if not kind:
        return None
    values = {**raw, "model_type": kind}
    values.pop("auto_map", None)  # names code
    return CONFIG_MAPPING[kind].from_dict(values)


def _family_of(architectures: object) -> str:
    """The model type of a class that transformers has; empty if it lacks the class."""
    if not isinstance(architectures, list) or not architectures:
        return ""
    own = str(architectures[0])
    kinds = [kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == own]
    # Some classes serve several families; prefer the one that bears the class's name.
    family = own.removesuffix("ForCausalLM").lower()
    for kind in kinds:
        if kind.replace("_", "") == family:
            return kind
    return kinds[0] if kinds else ""


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the language model in one that reads images too, where the whole has no class for text alone.

    Kimi K2.6 and MiniMax M3 are such; Gemma 4 and Qwen3.5 stay whole.
    """
    text = config.get_text_config()
    if (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        return text
    return config


def check_sizes(
    config: PreTrainedConfig,
    where: str,
    what: str,
    fix: str,
) -> None:
    """Checks that a config's sizes are plausible and fit its files, before anything is allocated.

    Raises:
        UserError: names the key, or the number of weights.
    """
    text = config.get_text_config()
    parts = [text]
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig) and part is not text:
            parts.append(part)
    for own in parts:
        _check_counts(own, int(own is text), what, fix)
    stored = sum(path.stat().st_size for path in Path(where).glob("*.safetensors"))
    # On the meta device weights have shapes and no memory.
    if stored and is_known(config):  # a Hub id has no files here
        with torch.device("meta"):
            model = build_language_model(config)
        count = sum(weight.numel() for weight in model.parameters())
        if count > _MOST_PER_BYTE * stored:
            raise UserError(
                f"{what}: config.json promises {count:,} weights, but its files have {stored:,} bytes; {fix}"
            )


def _check_counts(
    own: PreTrainedConfig,
    least: int,
    what: str,
    fix: str,
) -> None:
    """Checks the sizes of the text's config, or of a tower's, which may lack a part."""
    limits = dict.fromkeys(_SIZES, (least, _MOST))  # least and most of each count or size
    # Other counts of any name (heads, experts) may be 0, where a family has none.
    for key in vars(own):
        if key.startswith("num_"):
            limits.setdefault(key, (0, _MOST))
    limits["num_hidden_layers"] = (least, _MOST_LAYERS)
    limits["depth"] = (least, _MOST_LAYERS)  # towers' word for it
    held = vars(own)
    for key, (low, high) in limits.items():
        # The attribute itself raises an error where layers differ in it (Gemma 4's key heads).
        value = held[key] if key in held else getattr(own, key, None)
        if isinstance(value, int) and not low <= value <= high:
            raise UserError(f"{what}: {key}={value} in config.json must be {low} to {high}; {fix}")


def is_known(config: PreTrainedConfig) -> bool:
    """Whether the config's class is transformers' own; models of others' code are built only once."""
    return type(config).__module__.startswith("transformers.")


def check_loaded(
    model: nn.Module,
    info: Mapping[str, Any],
    what: str,
    fix: str,
    apart: bool = True,
) -> None:
    """Checks a loader's report and the loaded values.

    Args:
        info: of `from_pretrained(output_loading_info=True)`.
        apart: whether towers and prediction modules may be unknown.

    Raises:
        UserError: names the first weights that are missing, unknown, of another shape or not
            finite.
    """
    # A loader may report None for nothing.
    lacking = {str(name) for name in info.get("missing_keys") or ()}
    unknown = [str(name) for name in info.get("unexpected_keys") or ()]
    # A tied weight is stored once, under the other name.
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied:
        lacking -= set(tied)
    names = {
        "lack": lacking,
        "have unknown": set(_not_apart(unknown) if apart else unknown),
        "have another shape of": {str(entry[0]) for entry in info.get("mismatched_keys") or ()},
    }
    for word, wrong in names.items():
        if wrong:
            shown = ", ".join(sorted(wrong)[:3])
            raise UserError(
                f"{what}: config.json does not describe its files, which {word} weights {shown}; {fix}"
            )
    check_finite(model.named_parameters(), what, fix)


def _not_apart(names: list[str]) -> Iterator[str]:
    """The names of weights outside buffers, towers and prediction modules."""
    modules: list[str] = []  # prefixes of prediction modules
    for name in names:
        # The prefix that names a prediction module, as in `model.layers.61.`
        for part in _PREDICTION:
            if name.endswith(part):
                modules.append(name.removesuffix(part))
    for name in names:
        if _BUFFERS.search(name) or _APART.search(name):
            continue
        if not name.startswith(tuple(modules)):
            yield name


def check_finite(
    tensors: Iterable[tuple[str, Tensor]],
    what: str,
    fix: str,
) -> None:
    """Reads every tensor once. Tensors without data (offloaded) are skipped.

    Raises:
        UserError: names the first tensor that holds NaN or infinity.
    """
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.device.type != "meta" and not is_finite(tensor):
            raise UserError(f"{what}: {name} holds values that are not finite; {fix}")


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite.

    A sum, which needs no mask in memory, decides unless it overflows.
    """
    if tensor.element_size() == 1:  # torch does not sum 8-bit floats
        tensor = tensor.float()
    # NaN and infinity carry over into a sum; a sum of finite values may be infinite too.
    if tensor.sum().isfinite():
        return True
    return bool(tensor.isfinite().all())


def tensor_files(where: str) -> dict[str, str]:
    """The file of each tensor in the safetensors of a folder or Hub id.

    Without an index the only file is downloaded.

    Raises:
        UserError: neither an index nor model.safetensors there, or a damaged one.
    """
    index = "model.safetensors.index.json"
    only = "model.safetensors"
    fix = "download it again"
    folder = weights_folder(where, [index])
    if (folder / index).is_file():
        return read_json(folder / index, "target", fix, ShardIndex)["weight_map"]
    with open_tensors(weights_folder(where, [only]) / only, "target", fix) as file:
        return dict.fromkeys(file.keys(), only)


def weights_folder(where: str, files: Iterable[str]) -> Path:
    """The folder of a local model; of a Hub id the snapshot into which these files are downloaded."""
    if Path(where).is_dir():
        return Path(where)
    return hub_snapshot(where, sorted(files), "target")


def read_embedding(where: str, names: tuple[str, ...] = _EMBEDDINGS) -> Tensor | None:
    """The input embedding [v, h] in the safetensors of a folder or Hub id; None without any.

    Only its file is read.

    Args:
        names: how its name may end.
    """
    for name, file in tensor_files(where).items():
        if name.endswith(names):
            path = weights_folder(where, [file]) / file
            with open_tensors(path, "target", "download it again") as tensors:
                return tensors.get_tensor(name)
    return None


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """A short hash of the vocabulary (token text -> id): equal hashes mean equal token ids."""
    if tokenizer is None:
        # Empty, which matches any other: nothing is known of the tokens.
        return ""
    # By id; a broken tokenizer may give two texts the same.
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    text = json.dumps(vocab, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def architectures_of(target: str) -> list[str]:
    """The class names in a target's config; empty if it cannot be loaded, or without a target."""
    config = _config_of(target)
    return list(config.architectures or []) if config else []


def _config_of(target: str) -> PreTrainedConfig | None:
    """A target's config; None if it cannot be loaded, or without a target."""
    if not target:
        return None
    try:
        return AutoConfig.from_pretrained(resolve_target(target))
    except (UserError, OSError, ValueError):
        return None


class SeeingTarget(NamedTuple):
    """What engines distinguish of a target that reads images."""

    architectures: tuple[str, ...]  # class names in its config
    has_mrope: bool  # an image's tokens have positions by row and column


@functools.cache
def seeing_target(name: str) -> SeeingTarget | None:
    """What a target's config says about images; None if it reads none, or its config cannot be loaded."""
    config = _config_of(name)
    if config is None or image_class(config) is None:
        return None
    return SeeingTarget(tuple(config.architectures or ()), has_mrope(config))


def has_mrope(config: PreTrainedConfig) -> bool:
    """Whether an image's tokens get positions by row and column."""
    rope = getattr(config.get_text_config(), "rope_parameters", None)
    return "mrope_section" in (rope or {})


def longest_row(config: PreTrainedConfig) -> int | None:
    """The longest sequence that a model reads; None if nothing limits it.

    LongRoPE (Phi-3) changes the keys of all positions once a sequence is longer than the original
    length. Cached keys and rows packed with longer ones would be wrong there, so the original
    length is the limit.
    """
    rope = getattr(config, "rope_parameters", None)
    if rope and rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings")
        return original if original else config.original_max_position_embeddings
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or limit > 0:
        return limit
    return None
