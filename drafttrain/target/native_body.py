"""The target's body without transformers' per-layer Python: for the few tokens of a decoding step on a CPU.

Nothing here goes by a family's name. A layer qualifies by its parts (RMS norms, bias-free gated MLP, rotary attention);
how it attends is recorded from one pass of the model itself; and the whole is proven against that model before use, at
low and at high positions. A model that differs in anything keeps transformers' forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.batch import TargetOutput
from drafttrain.ops.decoder_layer import DecoderLayer, LayerStack, LayerWeights
from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.packing import PackedRMSNorm
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target.attention import LAST, Rows

_LAYER_PARTS = {
    "self_attn", "mlp", "input_layernorm", "post_attention_layernorm",
    "pre_feedforward_layernorm", "post_feedforward_layernorm",
}  # fmt: skip
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_PROBE_TOKENS = 12
# Most tokens of a pass that goes this way. From 33 on MKL's product is the faster one, but not by what it saves in dispatch.
NATIVE_ROWS = 64


class NativeBody:
    """The layers of a target, ready to run on [1, n] tokens with an attention context."""

    def __init__(self, target: Any, layers: list[DecoderLayer], attention: list[dict[str, Any]], rotary: _Rotary):
        self.body, self.layers, self.attention, self.rotary = target.body, layers, attention, rotary
        self.embed = target.model.get_input_embeddings()
        self.stack = LayerStack(layers, attention, rotary.of_layer)

    @staticmethod
    def of(target: Any) -> NativeBody | None:
        """For an unpacked target; None where its layers are of another kind or the proof fails."""
        if target.device.type != "cpu" or target.compute_dtype != torch.float32 or cpu_kernels() is None:
            return None
        rotary_embedding = getattr(target.body, "rotary_emb", None)
        if rotary_embedding is None or not hasattr(target.body, "norm"):
            return None
        rotary = _Rotary(rotary_embedding)
        probe = _Noting()
        expected = [_probe(target, probe, start, rotary) for start in _starts(target)]
        layers = []
        for module in target.layers:
            weights = layer_weights(module, rotary.width)
            if weights is None:
                return None
            layers.append(DecoderLayer(weights))
        if len(probe.options) != len(layers) or len(rotary.of_layer) != len(layers):
            return None
        native = NativeBody(target, layers, probe.options, rotary)
        every = range(target.num_layers + 1)
        for start, want in zip(_starts(target), expected, strict=True):
            ids, positions = _probe_tokens(target, start)
            cache = TreeCache(_PROBE_TOKENS)
            cache.open([(0, _PROBE_TOKENS)])
            got = native.forward(ids, every, positions, cache)
            for ours, theirs in ((got.features, want.features), (got.last_hidden, want.last_hidden)):
                if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item()):
                    return None
        return native

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, feature_layers: Sequence[int], position_ids: Tensor, context: Any
    ) -> TargetOutput:
        """As `Target.forward` with a context, for one packed row: input_ids and position_ids [1, n]."""
        embedded = self.embed(input_ids)
        x = embedded[0].contiguous().clone()
        tables = self.rotary.tables(embedded, position_ids)
        wanted = sorted({layer for layer in feature_layers if layer != LAST})
        plan = context.cpu_plan() if isinstance(context, TreeCache) and self.stack.served else None
        if plan is not None:
            caught = self.stack.forward(x, tables, plan, context.addresses(self.stack.shapes), wanted)
        else:
            caught = self._layer_by_layer(x, tables, context, wanted)
        last = self.body.norm(x)[None]
        if list(feature_layers) == wanted:
            return TargetOutput(caught.flatten(1)[None], last)
        parts = [last[0] if layer == LAST else caught[:, wanted.index(layer)] for layer in feature_layers]
        return TargetOutput(torch.cat(parts, dim=-1)[None], last)

    def _layer_by_layer(
        self, x: Tensor, tables: list[tuple[Tensor, Tensor]], context: Any, wanted: list[int]
    ) -> Tensor:
        """As `LayerStack.forward`, where the context has its own way to attend: long prefixes, many tokens."""
        caught, threads = [], torch.get_num_threads()
        for i, layer in enumerate(self.layers):
            if i in wanted:
                caught.append(x.clone())
            query, key, value = layer.before(x, *tables[self.rotary.of_layer[i]], threads)
            attended = context.attend(i, query, key, value, **self.attention[i])
            layer.after(x, attended.contiguous(), threads)
        if len(self.layers) in wanted:
            caught.append(x.clone())
        return torch.stack(caught, dim=1) if caught else x.new_empty(len(x), 0, x.shape[1])


class _Rotary:
    """The model's rotary tables: which calls it makes per pass, and which layer reads which."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.calls: list[tuple] = []  # what is passed behind (hidden states, position ids): a layer type, or nothing
        self.of_layer: list[int] = []
        self.width = 0

    def tables(self, hidden: Tensor, position_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per call cosine and sine [n, rotary_dim]."""
        pairs = (self.module(hidden, position_ids, *extra) for extra in self.calls)
        return [(cosine[0].contiguous(), sine[0].contiguous()) for cosine, sine in pairs]


class _Noting(Rows):
    """Attends within the pass's own tokens, and keeps what each layer asks for."""

    def __init__(self) -> None:
        super().__init__(_PROBE_TOKENS)
        self.options: list[dict[str, Any]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if layer == len(self.options):
            self.options.append(options)
        return super().attend(layer, query, key, value, **options)


def _starts(target: Any) -> tuple[int, ...]:
    """Positions to prove at: some models scale attention or rotation beyond a length."""
    most = target.max_positions or 4096
    return (0, max(0, most - _PROBE_TOKENS))


def _probe_tokens(target: Any, start: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(target.vocab_size, (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(start))
    return ids, torch.arange(start, start + _PROBE_TOKENS)[None]


def _probe(target: Any, probe: _Noting, start: int, rotary: _Rotary) -> TargetOutput:
    """The model's own pass; notes the calls of the rotary module and which layer gets which tables."""
    outputs: list[Any] = []
    calls: list[tuple] = []
    readers: list[int] = []

    def called(_module, args, kwargs, output):
        calls.append(tuple(args[2:]) + tuple(v for k, v in kwargs.items() if k not in ("x", "position_ids")))
        outputs.append(output)

    def entered(_module, _args, kwargs):
        given = kwargs.get("position_embeddings")
        readers.extend(i for i, output in enumerate(outputs) if given is not None and given[0] is output[0])

    handles = [rotary.module.register_forward_hook(called, with_kwargs=True)]
    handles += [layer.register_forward_pre_hook(entered, with_kwargs=True) for layer in target.layers]
    ids, positions = _probe_tokens(target, start)
    try:
        out = target.forward(ids, range(target.num_layers + 1), positions, probe)
    finally:
        for handle in handles:
            handle.remove()
    rotary.calls, rotary.of_layer = calls, readers
    rotary.width = outputs[0][0].shape[-1] if outputs else 0
    return out


def layer_weights(layer: nn.Module, rotary_dim: int) -> LayerWeights | None:
    """The layer's weights if it is built of nothing but the parts that `DecoderLayer` knows."""
    parts, attention, mlp = (dict(m.named_children()) if m is not None else {} for m in _blocks(layer))
    if not (parts.keys() <= _LAYER_PARTS and attention.keys() <= _ATTENTION_PARTS and mlp.keys() <= _MLP_PARTS):
        return None
    linear: dict[str, Any] = {name: {**attention, **mlp}.get(name) for name in _LINEAR}
    if any(type(module) is not nn.Linear for module in linear.values()):
        return None
    if any(linear[name].bias is not None for name in _LINEAR if name not in _QKV):
        return None
    biases = [linear[name].bias for name in _QKV]
    head_dim = getattr(layer.self_attn, "head_dim", 0)
    norms = {name: PackedRMSNorm.like(m) for name, m in {**parts, **attention}.items() if name.endswith("norm")}
    if not head_dim or any(norm is None for norm in norms.values()) or len({n.eps for n in norms.values() if n}) != 1:
        return None
    if sum(bias is not None for bias in biases) not in (0, 3) or not norms.get("input_layernorm"):
        return None
    gelu = _is_gelu(mlp["act_fn"]) if "act_fn" in mlp else None
    factor = {name: norm.weight for name, norm in norms.items() if norm is not None}
    sandwich = "pre_feedforward_layernorm" in factor
    if gelu is None or "post_attention_layernorm" not in factor:
        return None
    join = lambda names: torch.cat([linear[name].weight for name in names]).detach()  # noqa: E731
    return LayerWeights(
        qkv=join(_QKV),
        qkv_bias=torch.cat(biases).detach() if biases[0] is not None else None,
        o=linear["o_proj"].weight.detach(),
        gate_up=join(("gate_proj", "up_proj")),
        down=linear["down_proj"].weight.detach(),
        input_norm=factor["input_layernorm"],
        mlp_norm=factor["pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"],
        attended_norm=factor["post_attention_layernorm"] if sandwich else None,
        mlp_out_norm=factor.get("post_feedforward_layernorm"),
        query_norm=factor.get("q_norm"),
        key_norm=factor.get("k_norm"),
        heads=linear["q_proj"].out_features // head_dim,
        kv_heads=linear["k_proj"].out_features // head_dim,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        eps=next(norm.eps for norm in norms.values() if norm is not None),
        gelu=gelu,
    )


_QKV = ("q_proj", "k_proj", "v_proj")
_LINEAR = (*_QKV, "o_proj", "gate_proj", "up_proj", "down_proj")


def _blocks(layer: nn.Module) -> tuple[Any, Any, Any]:
    return layer, getattr(layer, "self_attn", None), getattr(layer, "mlp", None)


def _is_gelu(activation: Any) -> bool | None:
    """True for GELU by tanh, False for SiLU, None for anything else."""
    x = torch.linspace(-6, 6, 101)
    y = activation(x)
    if torch.allclose(y, F.silu(x), atol=1e-5):
        return False
    return True if torch.allclose(y, F.gelu(x, approximate="tanh"), atol=1e-5) else None
