"""A decoder layer of a target's own class with other weights, for drafters that are built like it.

Published prediction modules (MTP) contain a layer of their family: gated or latent attention, a
mixture of experts, norms of some convention. No family is written here. The layer's class, config
and tensor names come from transformers, and its attention reaches ours through the attention
interface, as a target's does (attention.py).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from drafttrain.batch import Attend
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.ops.layer_ops import Tables
from drafttrain.ops.tree_attention import AttentionForm
from drafttrain.target.attention import ATTENTION, attention_context
from drafttrain.target.loading import is_known
from drafttrain.target.parts import build_language_model
from drafttrain.target.proof import described, relative_error

if TYPE_CHECKING:
    from drafttrain.target.target import Target

_EXACT = 1e-3  # largest relative error of the layer's output through our attention
# Positions of the tokens of a proof; far ones show other rotary tables.
PLACES = (0, 1, 2, 3, 4, 500)


class LayerShape(NamedTuple):
    """The shape of a layer's attention."""

    heads: int  # of queries
    kv_heads: int
    width: int  # of keys or values, whichever are wider
    window: int  # visible positions, 0 for all


class OwnLayer(nn.Module):
    """A decoder layer of a transformers family, for flat tokens [t, h].

    Args:
        spec: as `spec_of` makes it; JSON, saved with the drafter.

    Attributes:
        layer: the family's module; its parameters have the family's names.
        native: None, because no CPU kernel serves it.
        rotary: the embedding of the family's model; in a list, because it is neither trained nor
            saved.
    """

    native = None

    def __init__(self, spec: Json):
        super().__init__()
        model = skeleton(spec["config"])
        model.config._attn_implementation = ATTENTION
        _, layers = layers_of(model)
        kind: Any = type(layers[spec["index"]])
        self.layer = kind(model.config, spec["index"])
        with torch.device("cpu"):  # also where a loader builds drafters on the meta device
            self.rotary = [type(model.get_decoder().rotary_emb)(model.config)]

    def pack(self, rotary_dim: int) -> None:
        """Nothing to do: linear layers are packed one by one."""

    def forward(
        self,
        state: Tensor,
        embeds: Tensor | None,
        tables: Tables,
        attend: Attend,
        queries: Tensor | None = None,
    ) -> Tensor:
        """As `DraftLayer`: state [t, h]; tables: cos, sin [t, 1, r] -> [t or queries, h]; ignores embeds."""
        count = len(state)
        # A depth without anchors: the weights need a gradient too, and no family runs without
        # tokens.
        if not count:
            state = state.new_zeros(1, *state.shape[1:])
            cos, sin = tables
            tables = (cos.new_zeros(1, *cos.shape[1:]), sin.new_zeros(1, *sin.shape[1:]))
        rows = queries
        if rows is None:
            rows = torch.arange(count, device=state.device)
        with attention_context(_Flat(attend, count, rows)):
            out = self.run(state[None], tables)[0]
        # Only the rows that were asked for, and never the spare token.
        if queries is None and count:
            return out
        return out[rows]

    def run(
        self,
        states: Tensor,
        tables: Tables,
        mask: Tensor | None = None,
    ) -> Tensor:
        """states [1, t, h]; cos, sin [t, 1, r] -> [1, t, h], through the attention that is set."""
        # Drafters checkpoint whole depths, with the attention that is set then.
        self.layer.gradient_checkpointing = False
        cos, sin = tables
        out = self.layer(
            states,
            attention_mask=mask,
            position_embeddings=(cos.transpose(0, 1), sin.transpose(0, 1)),
            past_key_values=None,
        )
        if isinstance(out, tuple):
            return out[0]
        return out

    def tables(self, positions: Tensor, dtype: torch.dtype) -> Tables:
        """positions [t] int64 -> cos, sin [t, 1, r] of the family's rotary embedding."""
        like = torch.empty(0, dtype=dtype, device=positions.device)
        cos, sin = self.rotary[0].to(positions.device)(like, positions[None])  # [1, t, r]
        return cos.transpose(0, 1), sin.transpose(0, 1)

    @torch.no_grad()
    def prove(self) -> LayerShape:
        """The shape of the layer's attention, after a proof.

        The layer must compute the same through our attention as through its own.

        Raises:
            UserError: a form of attention that drafters lack, or other states; names the relative
                error.
        """
        states, tables = self.probe()
        count = len(states)
        probe = _Flat(causal, count, torch.arange(count))
        with attention_context(probe):
            ours = self.run(states[None], tables)
        mask = torch.full((count, count), torch.finfo(states.dtype).min).triu(1)
        self.layer_config._attn_implementation = "eager"
        try:
            own = self.run(states[None], tables, mask[None, None])
        finally:
            self.layer_config._attn_implementation = ATTENTION
        off = relative_error(ours, own)
        if not off <= _EXACT or probe.shape is None:  # NaN fails too
            raise UserError(f"its attention is not computed by ours (relative error {off:.2g})")
        return probe.shape

    def shape(self) -> LayerShape:
        """The shape of the attention of a layer without weights, on the meta device."""

        def stop(
            query: Tensor,
            key: Tensor,
            value: Tensor,
        ) -> Tensor:
            raise StopIteration  # the rest of the layer may need numbers

        states, tables = self.probe()
        seen = _Flat(stop, len(states), torch.arange(len(states)))
        cos, sin = tables
        with contextlib.suppress(StopIteration), attention_context(seen):
            self.run(states[None].to("meta"), (cos.to("meta"), sin.to("meta")))
        assert seen.shape is not None
        return seen.shape

    def probe(self) -> tuple[Tensor, Tables]:
        """Random states [t, h] at near and far positions, with their rotary tables [t, 1, r]."""
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(
            len(PLACES),
            self.layer_config.hidden_size,
            generator=generator,
        )
        return states, self.tables(torch.tensor(PLACES), states.dtype)

    @property
    def layer_config(self) -> PreTrainedConfig:
        """The config that the layer's modules read."""
        return next(module.config for module in self.layer.modules() if hasattr(module, "config"))


class _Flat:
    """The attention context of flat tokens: passes a layer's queries, keys and values to an `Attend`.

    Values narrower than keys (latent attention) are padded, so that caches and kernels see one
    width.

    Args:
        count: tokens with a key; a spare token may follow them.
        queries: [tq], the tokens that need an output; the others get zeros.
    """

    shape: LayerShape | None = None  # of the last call

    def __init__(
        self,
        attend: Attend,
        count: int,
        queries: Tensor,
    ):
        self.inner = attend
        self.count = count
        self.queries = queries

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **form: Unpack[AttentionForm],
    ) -> Tensor:
        """[1, heads, t, width] each -> [1, t, heads, value width]."""
        if form["softcap"] is not None or form["sinks"] is not None:
            raise UserError("its attention has a soft cap or sinks, which drafters lack")
        own = value.shape[-1]
        width = max(query.shape[-1], value.shape[-1])
        self.shape = LayerShape(
            query.shape[1],
            key.shape[1],
            width,
            form["window"] or 0,
        )
        factor = form["scaling"] * width**0.5  # drafters scale by width ** -0.5
        rows = self._flat(query * factor, width)  # [t, heads, width]
        keys = self._flat(key, width)  # [t, kv_heads, width]
        values = self._flat(value, width)
        few = len(self.queries) < query.shape[2]
        if few:
            rows = rows[self.queries]
        out = self.inner(rows, keys, values)
        out = out.view(len(out), query.shape[1], width)[..., :own]
        if few:
            every = out.new_zeros(query.shape[2], *out.shape[1:])
            out = every.index_copy(0, self.queries, out)
        return out[None]

    def _flat(self, x: Tensor, width: int) -> Tensor:
        """[1, heads, t, e] -> [count, heads, width], padded with zeros."""
        padded = F.pad(x[0].transpose(0, 1), (0, width - x.shape[-1]))
        return padded[: self.count].contiguous()


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Plain causal attention over one row of flat tokens, as an `Attend`."""
    q = query.transpose(0, 1)[None]  # [1, heads, t, width]
    k = key.transpose(0, 1)[None]  # [1, kv_heads, t, width]
    v = value.transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).flatten(1)  # [t, heads * width]


# -- the family's model, from whose class a layer comes --------------------------------------------


def skeleton(config: Json) -> Any:
    """The family's model of a text config, on the meta device.

    Raises:
        UserError: a config that transformers does not build.
    """
    try:
        with torch.device("meta"):
            made = AutoConfig.for_model(**config)
            if type(made) in MODEL_FOR_CAUSAL_LM_MAPPING:
                return build_language_model(made)
            return AutoModel.from_config(made)  # the text part of one that reads images
    except Exception as error:  # the library raises many classes
        raise UserError(f"its class cannot be built ({described(error)})") from error


def layers_of(model: Any) -> tuple[str, nn.ModuleList]:
    """The name and list of a model's decoder layers."""
    count = model.config.num_hidden_layers
    for name, part in model.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return name, part
    raise UserError(f"its class has no list of {count} decoder layers")


def spec_of(config: PreTrainedConfig, index: int) -> Json:
    """A drafter config's record of a layer's class: the text config, cut behind it, and its index.

    A layer's position decides its form in many families: dense or a mixture, with a window or
    without.
    """
    kept: Json = json.loads(config.to_json_string(use_diff=False))
    count = config.num_hidden_layers
    for key in ("quantization_config", "architectures", "auto_map", "_name_or_path"):
        kept.pop(key, None)
    for key, value in kept.items():
        if isinstance(value, list) and len(value) == count:  # an entry per layer
            kept[key] = value[: index + 1]
    kept["num_hidden_layers"] = index + 1
    return {"config": kept, "index": index}


def weight_rules(model: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """How transformers turns a checkpoint's tensors into a model's.

    Returns:
        All rules, those that rename, those that convert.
    """
    rules: list[Any] = get_model_conversion_mapping(model)
    renamed = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converted = [rule for rule in rules if isinstance(rule, WeightConverter)]
    return rules, renamed, converted


@torch.no_grad()
def read_own_layer(
    target: Target,
    weights: Mapping[str, Tensor],
) -> tuple[OwnLayer, Json]:
    """A layer of the target's class with given weights, and its spec.

    Args:
        weights: by their names in the target's checkpoint, without the layer's prefix.

    Raises:
        UserError: no layer of the target has these weights; names those that are unknown, missing
            or of another shape.
    """
    if not is_known(target.config):
        raise UserError("its class is not transformers' own")
    model = skeleton(spec_of(target.config, target.num_layers - 1)["config"])
    where, layers = layers_of(model)
    _, renamed, converted = weight_rules(model)
    kinds = getattr(model.config, "layer_types", None)
    if not kinds:
        kinds = [""] * len(layers)
    # Prefer layers that see all positions.
    order = sorted(range(len(layers)), key=lambda i: (kinds[i] != "full_attention", i))
    tried: dict[tuple[str, ...], set[str]] = {}  # names of a form of layer -> those that differ
    for index in order:
        expected = layers[index].state_dict().keys()
        form = tuple(sorted(expected))
        if form in tried:
            continue
        place = f"{where}.{index}."
        found: dict[str, str] = {}  # name in the layer -> name in the checkpoint
        for name in weights:
            renamed_key, _ = rename_source_key(
                place + name,
                renamed,
                converted,
            )
            found[renamed_key.removeprefix(place)] = name
        # Names on one side only, as the checkpoint calls them where it has them.
        tried[form] = {found.get(name, name) for name in found.keys() ^ expected}
        if not tried[form]:
            spec = spec_of(target.config, index)
            own = OwnLayer(spec)
            fill(own, spec, weights)
            return own, spec
    closest = min(tried.values(), key=len)
    wrong = sorted(closest)
    word = "unknown" if wrong[0] in weights else "missing"
    raise UserError(f"{word} are {', '.join(wrong[:3])}")


@torch.no_grad()
def fill(
    own: OwnLayer,
    spec: Json,
    weights: Mapping[str, Tensor],
) -> None:
    """Gives a layer these weights, as transformers loads them; see `read_own_layer`.

    Raises:
        UserError: weights of another shape, or that cannot be read.
    """
    model = skeleton(spec["config"])
    where, layers = layers_of(model)
    place = f"{where}.{spec['index']}."
    rules, _, _ = weight_rules(model)
    load = LoadStateDictConfig(
        device_map={"": "cpu"},
        dtype=torch.float32,
        weight_mapping=rules,
    )
    named = {place + name: tensor for name, tensor in weights.items()}
    info, _ = convert_and_load_state_dict_in_model(model, named, load)
    for name, ours, theirs in info.mismatched_keys:
        raise UserError(f"{name.removeprefix(place)} is {list(ours)}, not {list(theirs)}")
    loaded = layers[spec["index"]].state_dict()
    wrong = list(info.conversion_errors)
    wrong += [name for name, tensor in loaded.items() if tensor.device.type == "meta"]
    if wrong:
        raise UserError(f"{wrong[0]} cannot be read")
    lost = {name for name, _ in own.layer.named_buffers()} - loaded.keys()
    if lost:
        raise UserError(f"{min(lost)} is computed by its class, and drafters save weights only")
    own.layer.load_state_dict(loaded)


def layer_tensors(own: OwnLayer, spec: Json) -> dict[str, Tensor]:
    """A layer's weights by their names in a checkpoint of the family: reverses `read_own_layer`."""
    model = skeleton(spec["config"])
    where, _ = layers_of(model)
    place = f"{where}.{spec['index']}."
    state = {place + name: value for name, value in own.layer.state_dict().items()}
    stored = revert_weight_conversion(model, state)
    return {name.removeprefix(place): value for name, value in stored.items()}
