"""Loading language models: exactly the weights that the config promises came, all finite, or one
line says what is wrong.

transformers initializes weights that a file lacks at random and drops those that the model does not
have, with a warning at most. Both compute something else than the published model, so both are
errors here. Allowed are tied weights, which are stored once, buffers of older versions, and parts
that no language model reads: towers of other modalities and prediction modules (MTP).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as logs

from drafttrain.errors import UserError, without_xet
from drafttrain.files import hub_snapshot, open_tensors, read_json
from drafttrain.target.fetch import resolve_target
from drafttrain.values import ShardIndex

# Buffers that earlier versions of transformers stored, and parts that are not the language model's.
_BUFFERS = re.compile(
    r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias|position_ids)$"
)
_APART = re.compile(
    r"^(model\.|language_model\.)*(mtp|vision|visual|audio|image|speech|multi_modal|mm_|embed_(vision|audio))"
)
_PREDICTION = (
    "eh_proj.weight",
    "enorm.weight",
    "hnorm.weight",
)  # of a module stored as a further layer (DeepSeek, GLM)
# of a config's decoder layers, and of any other of its counts and sizes
_MOST_LAYERS = 1000
_MOST = 2**24
_SIZES = ("hidden_size", "vocab_size", "num_attention_heads")
_REPORTERS = (
    "modeling_utils",
    "utils.loading_report",
    "distributed.tensor_parallel",
)  # modules that log reports of a load
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "tok_embeddings.weight")


# Weights per byte of the files: 4 bits each, and some that are tied.
_MOST_PER_BYTE = 4


@contextlib.contextmanager
def quiet_bars() -> Iterator[None]:
    """Hides transformers' progress bars in calls from Python; commands, which show what the package
    logs, keep them.
    """
    was_on = logs.is_progress_bar_enabled() and not logging.getLogger("drafttrain").isEnabledFor(
        logging.INFO
    )
    if was_on:
        logs.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logs.enable_progress_bar()


@contextlib.contextmanager
def loading(what: str, fix: str) -> Iterator[None]:
    """Reports any failure of a library's loader, whose errors come in many classes, as one line:
    WHAT cannot be loaded.

    Its own reports of missing weights, many lines on stderr, are left out: `check_loaded` names
    them.
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
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{what} cannot be loaded ({reason[:300]}); {fix}{without_xet(error)}"
        ) from error
    finally:
        for logger, level in zip(quiet, levels, strict=True):
            logger.setLevel(level)


def load_language_model(where: str, what: str, fix: str, **options: Any) -> Any:
    """A causal language model with exactly the weights that its config promises.

    Args:
        where: folder or Hub id. what: names the model in errors (`target='...'`). fix: what the
            user can do, ends the error.
        options: of `from_pretrained`; weights are safetensors unless they name a gguf_file.

    Raises:
        UserError: not loadable; weights that are missing, unknown, of another shape or not finite.
    """
    # Weights of another shape are reported by name with the others.
    if "gguf_file" in options:
        safe = {}
    else:
        safe = {"use_safetensors": True, "ignore_mismatched_sizes": True}
    with loading(what, fix):
        if safe:
            check_sizes(AutoConfig.from_pretrained(where, **_remote(options)), where, what, fix)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where,
            output_loading_info=True,
            **safe,
            **options,
        )
    model, info = loaded
    check_loaded(model, info, what, fix)
    return model


def _remote(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"trust_remote_code": options.get("trust_remote_code", False)}


def check_sizes(config: PreTrainedConfig, where: str, what: str, fix: str) -> None:
    """Checks, before anything is allocated, that a config's counts and sizes are plausible and that
    its files can hold them.

    Raises:
        UserError: names the key, or the number of weights.
    """
    own = config.get_text_config()
    limits = dict.fromkeys((*_SIZES, *(key for key in vars(own) if key.startswith("num_"))), _MOST)
    for key, most in {**limits, "num_hidden_layers": _MOST_LAYERS}.items():
        value = getattr(own, key, None)
        least = int(key in (*_SIZES, "num_hidden_layers"))
        if value is not None and isinstance(value, int) and not least <= value <= most:
            raise UserError(
                f"{what}: {key}={value} in config.json must be {least} to {most}; {fix}"
            )
    stored = sum(path.stat().st_size for path in Path(where).glob("*.safetensors"))
    if stored:  # a Hub id has none here
        with torch.device("meta"):
            if is_known(config):
                model = AutoModelForCausalLM.from_config(config)
            else:
                model = None
        count = 0
        if model is not None:
            count = sum(weight.numel() for weight in model.parameters())
        if count > _MOST_PER_BYTE * stored:
            raise UserError(
                f"{what}: config.json promises {count:,} weights, but its files have {stored:,} bytes; {fix}"
            )


def is_known(config: PreTrainedConfig) -> bool:
    """Whether the config's class is transformers' own: code of others is built once only."""
    return type(config).__module__.startswith("transformers.")


def check_loaded(model: nn.Module, info: Mapping[str, Any], what: str, fix: str) -> None:
    """Checks a loader's report and the loaded values.

    Args:
        info: of `from_pretrained(output_loading_info=True)`.

    Raises:
        UserError: names the first weights that are missing, unknown, of another shape or not
            finite.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names = {
        "lack": set(map(str, info.get("missing_keys") or ())) - set(tied),
        "have unknown": set(_not_apart(map(str, info.get("unexpected_keys") or ()))),
        "have another shape of": {str(entry[0]) for entry in info.get("mismatched_keys") or ()},
    }
    for word, wrong in names.items():
        if wrong:
            shown = ", ".join(sorted(wrong)[:3])
            raise UserError(
                f"{what}: config.json does not describe its files, which {word} weights {shown}; {fix}"
            )
    check_finite(model.named_parameters(), what, fix)


def _not_apart(names: Iterable[str]) -> Iterator[str]:
    """The names that are not of buffers, towers and prediction modules."""
    names = list(names)
    modules = {
        name.removesuffix(part) for name in names for part in _PREDICTION if name.endswith(part)
    }
    for name in names:
        if not (_BUFFERS.search(name) or _APART.search(name) or name.startswith(tuple(modules))):
            yield name


def check_finite(tensors: Iterable[tuple[str, Tensor]], what: str, fix: str) -> None:
    """Reads every tensor once: its sum is finite if all values are. Tensors without data
    (offloaded) are skipped.

    Raises:
        UserError: names the first tensor that holds NaN or infinity.
    """
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.device.type != "meta" and not is_finite(tensor):
            raise UserError(f"{what}: {name} holds values that are not finite; {fix}")


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; a sum, which needs no mask in memory, decides unless it
    overflows.
    """
    # torch does not sum 8-bit floats
    if tensor.element_size() == 1:
        values = tensor.float()
    else:
        values = tensor
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def tensor_files(where: str) -> dict[str, str]:
    """The file of each tensor in the safetensors of a folder or Hub id; without an index the only
    file is downloaded.

    Raises UserError: neither an index nor model.safetensors there, or a damaged one.
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
    """The input embedding [v, h] in the safetensors of a folder or Hub id, of which one file is
    read; None without any.

    Args:
        names: how its name may end.
    """
    found = ((name, file) for name, file in tensor_files(where).items() if name.endswith(names))
    name, file = next(found, ("", ""))
    if not name:
        return None
    with open_tensors(
        weights_folder(where, [file]) / file,
        "target",
        "download it again",
    ) as tensors:
        return tensors.get_tensor(name)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """A short hash of the vocabulary (token text -> id); equal hashes mean that token ids mean the
    same.
    """
    if tokenizer is None:
        return ""
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocab, ensure_ascii=True).encode()).hexdigest()[:16]


def architectures_of(target: str) -> list[str]:
    """The class names in a target's config; empty if there is no target or its config cannot be
    loaded.
    """
    try:
        if target:
            return list(AutoConfig.from_pretrained(resolve_target(target)).architectures or [])
        return []
    except (UserError, OSError, ValueError):
        return []


def longest_row(config: PreTrainedConfig) -> int | None:
    """The longest sequence that a model reads; None if nothing limits it.

    LongRoPE (Phi-3) changes the keys of all positions once a sequence is longer than the original
    length. Cached keys and rows packed with longer ones would be wrong there, so the original
    length is the limit.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return (
            rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or limit > 0:
        return limit
    return None
