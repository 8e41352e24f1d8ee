"""Builds a draft model from some of the target's layers, from a config, or from a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from drafttrain.drafters.common.lora import check_state
from drafttrain.errors import UserError, text_of
from drafttrain.files import Json
from drafttrain.formats.weights import read_weights
from drafttrain.target import Target, resolve_target
from drafttrain.target.loading import load_language_model, loading
from drafttrain.target.parts import find_body


def own_layers(target: Target, layers: Sequence[int], share: bool) -> Any:
    """A model of the target's family with a subset of its layers.

    Embedding, last norm and head are the target's too.

    Args:
        layers: indices, ascending.
        share: embedding and head are the target's, frozen, and in the same memory if the formats
            agree; else trained copies.

    Raises:
        UserError: no such layers, or a family whose layers do not work without the others.
    """
    count = target.num_layers
    if not layers or layers[-1] >= count or any(a >= b for a, b in pairwise(layers)):
        raise UserError(
            f"drafter.layers={list(layers)} must be ascending layers of target {target.name!r}, 0 to {count - 1}; for "
            f"example [0, 1, {count // 2}, {count - 2}, {count - 1}]"
        )
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(layers)
    for key, value in list(vars(config).items()):  # layer_types and the like
        if isinstance(value, list) and len(value) == count:
            setattr(config, key, [value[i] for i in layers])
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    body = find_body(lm)

    # The target's weights, with the chosen layers renumbered.
    modules = target.body.named_modules()
    prefix = next(name for name, module in modules if module is target.layers) + "."
    place = {str(layer): str(i) for i, layer in enumerate(layers)}
    state = {}
    for name, value in target.body.state_dict().items():
        if name.startswith(prefix):
            layer, dot, rest = name.removeprefix(prefix).partition(".")
            if layer not in place:
                continue
            name = prefix + place[layer] + dot + rest
        state[name] = value
    try:
        body.load_state_dict(state)
    except RuntimeError as error:
        reason = str(error).split("\n")[1].strip()  # below the line that names the class
        raise UserError(
            f"drafter.layers={list(layers)}: layers of target {target.name!r} cannot be chosen singly ({reason}); use "
            "init=random with drafter.config, or a checkpoint"
        ) from error
    head = lm.get_output_embeddings()
    head.load_state_dict(target.lm_head.state_dict())  # type: ignore[operator]
    lm.generation_config = copy.deepcopy(target.model.generation_config)
    if share:
        embedding = lm.get_input_embeddings()
        tied = head.weight is embedding.weight
        embedding.weight = _frozen(target.embed_weight)
        if tied:
            head.weight = embedding.weight
        else:
            head.weight = _frozen(target.lm_head.weight)  # type: ignore[arg-type]
    return lm


def _frozen(weight: Tensor) -> nn.Parameter:
    """A frozen parameter in float32, in the same memory if the weight is float32."""
    return nn.Parameter(weight.detach().float(), requires_grad=False)


def from_config(target: Target, config: str | Json) -> Any:
    """A model with random weights and the target's vocabulary.

    Args:
        config: a folder or Hub id with a config.json, or the fields of a transformers config, with
            `model_type` (default: llama).

    Raises:
        UserError: no config there, or fields that do not fit together.
    """
    own = target.config
    fixed: Json = {"vocab_size": target.vocab_size}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fixed[key] = getattr(own, key, None)
    try:
        if isinstance(config, str):  # the shapes of another model
            made = AutoConfig.from_pretrained(resolve_target(config)).get_text_config()
            for key, value in fixed.items():
                setattr(made, key, value)
        else:
            shapes: Json = {
                "tie_word_embeddings": True,
                "max_position_embeddings": target.max_positions or 4096,
            }
            shapes |= config
            shapes |= fixed
            made = AutoConfig.for_model(shapes.pop("model_type", "llama"), **shapes)
        return AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(
            f"drafter.config={config!r} makes no causal language model ({text_of(error)[:200]}); write "
            "for example {hidden_size: 256, num_hidden_layers: 4, num_attention_heads: 4, intermediate_size: 768}"
        ) from error


def from_checkpoint(name: str) -> tuple[Any, Any]:
    """Loads (model in float32, tokenizer) by folder, Hub id or the short name of a fetched model.

    Raises:
        UserError: no model, one whose weights are not exactly those that its config describes, or
            no tokenizer next to it.
    """
    where = resolve_target(name)
    what = f"drafter={name!r} as a draft model"
    fix = "give a folder or Hub id with config.json, safetensors and the tokenizer's files"
    lm = load_language_model(where, what, fix, dtype=torch.float32)
    with loading(what, fix):
        return lm, AutoTokenizer.from_pretrained(where)


def load_weights(lm: Any, folder: Path) -> None:
    """Loads weights that `save_pretrained` wrote to a folder.

    Raises:
        UserError: they are another model's.
    """
    state = read_weights(folder)
    tied = set(lm.all_tied_weights_keys)  # stored once
    expected = {}
    for name, value in lm.state_dict().items():
        if name in state or name not in tied:
            expected[name] = tuple(value.shape)
    check_state(state, expected, folder)
    lm.load_state_dict(state, strict=False)


def differing_ids(tokenizer: Any, target: Target) -> list[int]:
    """Ids that stand for other tokens in a tokenizer than in the target's.

    Ids of only one of them do not differ: they are added tokens, and rows that pad the embedding to
    a round number.
    """
    if tokenizer is None or target.tokenizer is None:
        return []
    ours = {i: token for token, i in tokenizer.get_vocab().items()}
    theirs = {i: token for token, i in target.tokenizer.get_vocab().items()}
    return sorted(i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i])
