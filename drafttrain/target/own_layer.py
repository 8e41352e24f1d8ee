"""A decoder layer of a target's own class with weights of its own, for drafters that are built like
the target's layers.

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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig

from drafttrain.batch import Attend
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.ops.tree_attention import AttentionForm
from drafttrain.target.attention import ATTENTION, attention_context
from drafttrain.target.loading import is_known

if TYPE_CHECKING:
    from drafttrain.target.target import Target

_EXACT = 1e-3  # largest relative error of the layer's output through our attention
PLACES = (
    0,
    1,
    2,
    3,
    4,
    500,
)  # positions of the tokens of a proof; far ones show other rotary tables


class LayerShape(NamedTuple):
    """What a layer's attention hands over: heads of queries and of keys, the wider of keys' and
    values' widths, and the visible positions (0 for all).
    """

    heads: int
    kv_heads: int
    width: int
    window: int


class OwnLayer(nn.Module):
    """A decoder layer of a transformers family, for flat tokens [t, h].

    Args:
        spec: as `spec_of` makes it; JSON, saved with the drafter.

    Attributes:
        layer: the family's module; its parameters have the family's names.
        native: no CPU kernel serves it. rotary: of the family's model; in a list, as it is neither
            trained nor saved.
    """

    native = None

    def __init__(self, spec: Json):
        super().__init__()
        model = skeleton(spec["config"])
        model.config._attn_implementation = ATTENTION
        kind: Any = type(layers_of(model)[1][spec["index"]])
        self.layer = kind(model.config, spec["index"])
        with torch.device("cpu"):  # also where a loader builds drafters on the meta device
            self.rotary = [type(model.get_decoder().rotary_emb)(model.config)]

    def pack(self, rotary_dim: int) -> None:
        """Nothing to do: linear layers are packed one by one."""

    def forward(
        self,
        state: Tensor,
        embeds: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        queries: Tensor | None = None,
    ) -> Tensor:
        """As `DraftLayer`: state [t, h]; cos, sin [t, 1, r] -> [t or queries, h]. embeds are not
        read.
        """
        count = len(state)
        # A depth without anchors: the weights need a gradient all the same, and no family runs
        # without tokens.
        if not count:
            state, cos, sin = (x.new_zeros(1, *x.shape[1:]) for x in (state, cos, sin))
        if queries is None:
            rows = torch.arange(count, device=state.device)
        else:
            rows = queries
        with attention_context(_Flat(attend, count, rows)):
            out = self.run(state[None], cos.transpose(0, 1), sin.transpose(0, 1))[0]
        if queries is None and count:
            return out
        return out[rows]

    def run(self, states: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """states [1, t, h]; cos, sin [1, t, r] -> [1, t, h], through the attention that is set."""
        self.layer.gradient_checkpointing = (
            False  # drafters compute whole depths again, with the attention that is set
        )
        out = self.layer(
            states,
            attention_mask=mask,
            position_embeddings=(cos, sin),
            past_key_values=None,
        )
        if isinstance(out, tuple):
            return out[0]
        return out

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [t] int64 -> cos, sin [t, 1, r] of the family's rotary embedding."""
        like = torch.empty(0, dtype=dtype, device=positions.device)
        cos, sin = self.rotary[0].to(positions.device)(like, positions[None])  # [1, t, r]
        return cos.transpose(0, 1), sin.transpose(0, 1)

    @torch.no_grad()
    def prove(self) -> LayerShape:
        """The shape of the layer's attention. The layer through ours must compute what it computes
        through its own.

        Raises:
            UserError: a form of attention that drafters lack, or other states; names the relative
                error.
        """
        states, cos, sin = self.probe()
        probe = _Flat(causal, len(states), torch.arange(len(states)))
        inputs = states[None], cos.transpose(0, 1), sin.transpose(0, 1)
        with attention_context(probe):
            ours = self.run(*inputs)
        mask = torch.full((len(states), len(states)), torch.finfo(states.dtype).min).triu(1)[
            None, None
        ]
        self.layer_config._attn_implementation = "eager"
        try:
            own = self.run(*inputs, mask)
        finally:
            self.layer_config._attn_implementation = ATTENTION
        off = relative_error(ours, own)
        if not off <= _EXACT or probe.shape is None:
            raise UserError(f"its attention is not computed by ours (relative error {off:.2g})")
        return probe.shape

    def shape(self) -> LayerShape:
        """The shape of the attention of a layer without weights, on the meta device."""

        def stop(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            raise StopIteration  # what follows attention may need numbers

        states, cos, sin = (x.to("meta") for x in self.probe())
        seen = _Flat(stop, len(states), torch.arange(len(states)))
        with contextlib.suppress(StopIteration), attention_context(seen):
            self.run(states[None], cos.transpose(0, 1), sin.transpose(0, 1))
        assert seen.shape is not None
        return seen.shape

    def probe(self) -> tuple[Tensor, Tensor, Tensor]:
        """Random states [t, h] at near and far positions, with their rotary tables [t, 1, r]."""
        states = torch.randn(
            len(PLACES),
            self.layer_config.hidden_size,
            generator=torch.Generator().manual_seed(0),
        )
        return states, *self.tables(torch.tensor(PLACES), states.dtype)

    @property
    def layer_config(self) -> PreTrainedConfig:
        """The config that the layer's modules read."""
        return next(module.config for module in self.layer.modules() if hasattr(module, "config"))


class _Flat:
    """The attention context of flat tokens: hands a layer's queries, keys and values to an
    `Attend`.

    Values narrower than keys (latent attention) are padded, so that caches and kernels see one
    width.

    Args:
        count: tokens, of which each has a key; behind them there may be a spare one. queries: [tq]
            of them that need an output, the others get zeros.
    """

    shape: LayerShape | None = None  # of the last call

    def __init__(self, attend: Attend, count: int, queries: Tensor):
        self.inner = attend
        self.count = count
        self.queries = queries

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **form: Unpack[AttentionForm]
    ) -> Tensor:
        """[1, heads, t, width] each -> [1, t, heads, value width]."""
        if form["softcap"] is not None or form["sinks"] is not None:
            raise UserError("its attention has a soft cap or sinks, which drafters lack")
        own = value.shape[-1]
        width = max(query.shape[-1], value.shape[-1])
        self.shape = LayerShape(query.shape[1], key.shape[1], width, form["window"] or 0)
        factor = form["scaling"] * width**0.5  # drafters scale by width ** -0.5
        flat = (
            F.pad(x[0].transpose(0, 1), (0, width - x.shape[-1]))
            for x in (query * factor, key, value)
        )
        rows, keys, values = (x[: self.count].contiguous() for x in flat)  # [t, heads, width] each
        few = len(self.queries) < query.shape[2]
        out = self.inner(rows[self.queries] if few else rows, keys, values)
        out = out.view(len(out), query.shape[1], width)[..., :own]
        if few:
            out = out.new_zeros(query.shape[2], *out.shape[1:]).index_copy(0, self.queries, out)
        return out[None]


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Plain causal attention over one row of flat tokens, as an `Attend`."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, t, width] each
    return (
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
        .transpose(0, 1)
        .flatten(1)
    )


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


# -- the family's model, from whose class a layer comes --------------------------------------------


def skeleton(config: Json) -> Any:
    """The family's model of a text config, on the meta device. Raises UserError: a config that
    transformers does not build.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    except Exception as error:  # of the library, in many classes
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"its class cannot be built ({reason})") from error


def layers_of(model: Any) -> tuple[str, nn.ModuleList]:
    """The name and list of a model's decoder layers."""
    count = model.config.num_hidden_layers
    lists = (
        (name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)
    )
    return next((name, part) for name, part in lists if len(part) == count)


def spec_of(config: PreTrainedConfig, index: int) -> Json:
    """What a drafter's config records of a layer's class: the text config, cut behind that layer,
    and the layer's index.

    A layer's position decides its form in many families: dense or a mixture, with a window or
    without.
    """
    own = json.loads(config.to_json_string(use_diff=False))
    count = config.num_hidden_layers
    cut = {
        key: value[: index + 1]
        for key, value in own.items()
        if isinstance(value, list) and len(value) == count
    }
    left_out = ("quantization_config", "architectures", "auto_map", "_name_or_path")
    kept = {key: value for key, value in {**own, **cut}.items() if key not in left_out}
    return {"config": {**kept, "num_hidden_layers": index + 1}, "index": index}


def _mapping(model: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """How transformers turns a checkpoint's tensors into a model's: all rules, those that rename,
    those that convert.
    """
    rules: list[Any] = get_model_conversion_mapping(model)
    renamed, converted = (
        [rule for rule in rules if isinstance(rule, kind)]
        for kind in (WeightRenaming, WeightConverter)
    )
    return rules, renamed, converted


@torch.no_grad()
def read_own_layer(target: Target, weights: Mapping[str, Tensor]) -> tuple[OwnLayer, Json]:
    """A layer of the target's class with given weights, and its spec.

    Args:
        weights: by their names in the target's checkpoint, behind those of a layer.

    Raises:
        UserError: no layer of the target has these weights; names those that are unknown, missing
            or of another shape.
    """
    if not is_known(target.config):
        raise UserError("its class is not transformers' own")
    whole = skeleton(spec_of(target.config, target.num_layers - 1)["config"])
    (where, layers), (_, renamed, converted) = layers_of(whole), _mapping(whole)
    kinds = getattr(whole.config, "layer_types", None) or [""] * len(layers)
    # Of the layers that the weights fit, one that sees all positions.
    order = sorted(range(len(layers)), key=lambda i: (kinds[i] != "full_attention", i))
    tried: dict[tuple[str, ...], set[str]] = {}  # names of a form of layer -> those that differ
    for index in order:
        expected = layers[index].state_dict().keys()
        if (form := tuple(sorted(expected))) in tried:
            continue
        place = f"{where}.{index}."
        found = {
            rename_source_key(place + name, renamed, converted)[0].removeprefix(place): name
            for name in weights
        }
        tried[form] = {found.get(name, name) for name in found.keys() ^ expected}
        if not tried[form]:
            spec = spec_of(target.config, index)
            own = OwnLayer(spec)
            fill(own, spec, weights)
            return own, spec
    closest: set[str] = min(tried.values(), key=len)
    wrong = sorted(closest)
    raise UserError(f"{'unknown' if wrong[0] in weights else 'missing'} are {', '.join(wrong[:3])}")


@torch.no_grad()
def fill(own: OwnLayer, spec: Json, weights: Mapping[str, Tensor]) -> None:
    """Gives a layer these weights, as transformers loads them; see `read_own_layer`. Raises
    UserError.
    """
    model = skeleton(spec["config"])
    where, layers = layers_of(model)
    place = f"{where}.{spec['index']}."
    load = LoadStateDictConfig(
        device_map={"": "cpu"},
        dtype=torch.float32,
        weight_mapping=_mapping(model)[0],
    )
    info, _ = convert_and_load_state_dict_in_model(
        model,
        {place + name: x for name, x in weights.items()},
        load,
    )
    for name, ours, theirs in info.mismatched_keys:
        raise UserError(f"{name.removeprefix(place)} is {list(ours)}, not {list(theirs)}")
    loaded = layers[spec["index"]].state_dict()
    if wrong := [
        *info.conversion_errors,
        *(name for name, x in loaded.items() if x.device.type == "meta"),
    ]:
        raise UserError(f"{wrong[0]} cannot be read")
    if lost := {name for name, _ in own.layer.named_buffers()} - loaded.keys():
        raise UserError(f"{min(lost)} is computed by its class, and drafters save weights only")
    own.layer.load_state_dict(loaded)


def layer_tensors(own: OwnLayer, spec: Json) -> dict[str, Tensor]:
    """A layer's weights by their names in a checkpoint of the family, behind those of a layer:
    `read_own_layer` turned round.
    """
    model = skeleton(spec["config"])
    place = f"{layers_of(model)[0]}.{spec['index']}."
    state = {place + name: value for name, value in own.layer.state_dict().items()}
    return {
        name.removeprefix(place): value
        for name, value in revert_weight_conversion(model, state).items()
    }
