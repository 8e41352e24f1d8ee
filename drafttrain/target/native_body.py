"""The target's body without transformers' per-layer Python, for decoding steps on a CPU.

A small model over a few tokens is some 1500 tiny torch operations, whose dispatch costs as much as
reading the weights. Here

    LayerStack   all layers with their attention, and perhaps the last norm and the head: one call of cpu_layers.c
    NativeBody   what is around that call: embedding, rotary tables, the features

Nothing here depends on a family's name. A layer qualifies by its modules (RMS norms, bias-free
gated MLP, rotary attention); how it attends was recorded when the target was wrapped; and the
native body must reproduce the model's own forward, at low and at high positions, before it is used.
A model that differs in anything keeps transformers' forward.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.batch import TargetOutput
from drafttrain.ops.cpu_layers import AttentionModule, DecoderLayer, GatedMLP
from drafttrain.ops.native import built_kernels, cpu_kernels
from drafttrain.ops.packing import (
    PackedLinear,
    PackedRMSNorm,
    address_of,
    check,
    check_panels,
    check_rows,
    form_of,
    without_grad,
)
from drafttrain.ops.tree_attention import AttentionForm, CpuPlan
from drafttrain.ops.tree_cache import Addresses, TreeCache
from drafttrain.target.attention import LAST, AttentionContext, CausalRows
from drafttrain.target.proof import ProvenModel
from drafttrain.target.snapshots import SnapshotCache

_LAYER_PARTS = {
    "self_attn",
    "mlp",
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROOF_TOKENS = 12
_KNOWN_POSITIONS = 1 << 14  # rotary tables of more positions are not kept

Tables = list[tuple[Tensor, Tensor]]  # per rotary table cosine and sine [rows, rotary_dim]
# struct form of cpu_layers.c: what a layer's attention computes.
_FORM = np.dtype(
    [
        ("sinks", np.uint64),
        ("window", np.int64),
        ("table", np.int64),
        ("scaling", np.float32),
        ("softcap", np.float32),
    ]
)
# What ends a call in its arguments: the norm's factor and eps, its output; the head's panels, their
# format, its output and its length.
_NO_ENDING = (None, 0.0, None, None, 0, None, 0)


class NativeBody:
    """The layers of a target, ready to run on [1, n] tokens with an attention context.

    It holds no state of a call.
    """

    def __init__(
        self,
        target: ProvenModel,
        layers: list[DecoderLayer],
        rotary: RotaryTables,
    ):
        self.body = target.body
        self.layers = layers
        self.forms = target.forms
        self.rotary = rotary
        self.embed = target.model.get_input_embeddings()
        self._looks_up = type(self.embed) is nn.Embedding and self.embed.max_norm is None
        self.stack = LayerStack(layers, target.forms, rotary.of_layer)

    @staticmethod
    def of(target: ProvenModel) -> NativeBody | None:
        """For an unpacked target; None if its layers are of another kind or the proof fails."""
        weight = next(target.model.parameters())
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or cpu_kernels() is None:
            return None
        recorded = record_proofs(target)
        if recorded is None:
            return None
        rotary, proofs = recorded
        layers: list[DecoderLayer] = []
        for module in target.layers:
            layer = native_layer(module, rotary.width)
            if layer is None:
                return None
            layers.append(layer)
        native = NativeBody(target, layers, rotary)
        for ids, positions, want in proofs:
            cache = TreeCache(PROOF_TOKENS)
            cache.open([(0, PROOF_TOKENS)])
            got = native.forward(
                ids,
                range(target.num_layers + 1),
                positions,
                cache,
            )
            if not _close(got.features, want.features):
                return None
            if not _close(got.last_hidden, want.last_hidden):
                return None
        return native

    @without_grad
    def forward(
        self,
        input_ids: Tensor,
        feature_layers: Sequence[int],
        position_ids: Tensor,
        context: AttentionContext,
    ) -> TargetOutput:
        """As `Target.forward` with a context, for one packed row.

        Args:
            input_ids, position_ids: [1, n].
        """
        x = self._look_up(input_ids)
        tables = self.rotary.tables(x[None], position_ids)
        wanted = wanted_inputs(feature_layers)
        cache = self._cache(context)
        if cache is not None:
            plan, addresses = cache
            caught, _, _ = self.stack.forward(x, tables, plan, addresses, wanted)
        else:
            caught = self._layer_by_layer(x, tables, context, wanted)
        last = self.body.norm(x)  # [n, h]
        features = select_features(caught, last, feature_layers, wanted)  # [n, f*h]
        return TargetOutput(features[None], last[None])

    def score(
        self,
        input_ids: Tensor,
        feature_layers: Sequence[int],
        context: TreeCache | SnapshotCache,
        head: nn.Module,
    ) -> tuple[Tensor, Tensor] | None:
        """Features and outputs of the head in one kernel call, at the positions of the context.

        Returns:
            [n, f*h] and [n, v]; None where the kernel does not apply.
        """
        norm = self.body.norm
        if not isinstance(norm, PackedRMSNorm):
            return None
        if not isinstance(head, PackedLinear) or not head.kernel:
            return None
        cache = self._cache(context)
        if cache is None:
            return None
        plan, addresses = cache
        x = self._look_up(input_ids)
        # Kept tables begin at position 0, and the kernel picks the rows. Others are computed.
        known = self.rotary.known(x, plan.positions)
        tables = known
        if tables is None:
            tables = self.rotary.compute(x[None], context.positions())
        wanted = wanted_inputs(feature_layers)
        caught, last, logits = self.stack.forward(
            x,
            tables,
            plan,
            addresses,
            wanted,
            (norm, head),
            placed=known is not None,
        )
        if head.bias is not None:
            logits.add_(head.bias)
        return select_features(caught, last, feature_layers, wanted), logits

    def _cache(self, context: object) -> tuple[CpuPlan, Addresses] | None:
        """The plan of a call and the addresses of the cache; None where the kernel does not apply."""
        if not isinstance(context, TreeCache) or not self.stack.served:
            return None
        plan = context.cpu_plan()
        if plan is None:
            return None
        return plan, context.addresses(self.stack.shapes)

    def _look_up(self, input_ids: Tensor) -> Tensor:
        """The residual stream [n, h] that the first layer reads, of [1, n] tokens."""
        if self._looks_up:
            return self.embed.weight.index_select(0, input_ids[0])
        # Some families scale or norm what they look up.
        return self.embed(input_ids)[0].contiguous().clone()  # the layers change it in place

    def _layer_by_layer(
        self,
        x: Tensor,
        tables: Tables,
        context: AttentionContext,
        wanted: list[int],
    ) -> Tensor:
        """As `LayerStack.forward`, with the context's own attention.

        Large trees and other caches need it.
        """
        caught = []
        for i, layer in enumerate(self.layers):
            if i in wanted:
                caught.append(x.clone())
            query, key, value = layer.project(x, tables[self.rotary.of_layer[i]])
            attended = context.attend(
                i,
                query.transpose(0, 1)[None],  # [1, heads, n, e]
                key.transpose(0, 1)[None],  # [1, kv_heads, n, e]
                value.transpose(0, 1)[None],  # [1, kv_heads, n, e]
                **self.forms[i],
            )
            layer.finish(x, attended)
        if len(self.layers) in wanted:
            caught.append(x.clone())
        if caught:
            return torch.stack(caught, dim=1)
        return x.new_empty(len(x), 0, x.shape[1])


class LayerStack:
    """All layers of a target in one call of cpu_layers.c.

    Args:
        layers: in order. forms: how each layer attends. table_of: index of the rotary table that
            each layer reads.

    Attributes:
        shapes: (kv_heads, head_dim) of each layer's keys and values.
        served: whether the C attention supports these head widths.

    Raises:
        ValueError: layers, forms and tables that do not fit together.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        forms: Sequence[AttentionForm],
        table_of: Sequence[int],
    ):
        self.shapes = [(layer.kv_heads, layer.head_dim) for layer in layers]
        self.served = all(width % 16 == 0 for _, width in self.shapes)
        self.hidden = layers[0].hidden
        self._layers = np.array([layer.address for layer in layers], dtype=np.uint64)
        self._widths: set[tuple[int, int]] = set()  # rotary table, its width
        kept: list[object] = [layers]
        rows: list[tuple[float, ...]] = []  # of struct form
        for layer, form, table in zip(layers, forms, table_of, strict=True):
            if {layer.hidden, layer.width} != {self.hidden} or table < 0:
                raise ValueError(
                    f"a layer of width {layer.width} to {layer.hidden} does not continue one of {self.hidden}"
                )
            # 0 stands for none.
            window = form["window"] or 0
            softcap = form["softcap"] or 0
            if window < 0 or softcap < 0:
                raise ValueError(f"window={window}, softcap={softcap}: none may be negative")
            sinks = 0
            if form["sinks"] is not None:
                numbers = form["sinks"].float().contiguous()  # [heads]
                check("sinks", numbers, (layer.heads,))
                kept.append(numbers)
                sinks = numbers.data_ptr()
            rows.append((sinks, window, table, form["scaling"], softcap))
            self._widths.add((table, layer.rotary_dim))
        self._kept = kept
        self._forms = np.array(rows, dtype=_FORM)
        # Read once: numpy looks addresses up slowly.
        self._layers_address = self._layers.ctypes.data
        self._forms_address = self._forms.ctypes.data
        self._kernels = built_kernels()

    def forward(
        self,
        x: Tensor,
        tables: Sequence[tuple[Tensor, Tensor]],
        plan: CpuPlan,
        buffers: Addresses,
        wanted: list[int],
        ending: tuple[PackedRMSNorm, PackedLinear] | None = None,
        placed: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs the layers over x [n, h] in place and stores the new keys and values.

        Args:
            tables: cosine and sine [rows, rotary_dim] of each rotary table. A row is a token's, or a
                position's if they are `placed`, which the kernel then does.
            plan: where each token stands.
            buffers: of a cache, see `TreeCache.addresses`.
            wanted: ascending layers whose inputs are returned; the number of layers means the last
                layer's output.
            ending: the last norm and the head, whose kernel serves it. They run in the same call: after
                each large call Python starts with cold caches.

        Returns:
            [n, len(wanted), h]; with an ending the normed state [n, h] and the head's products
            [n, v] without its bias, else nothing in their place.
        """
        n = plan.tokens
        hidden = self.hidden
        count = len(self._layers)
        check("x", x, (n, hidden))
        if not self.served or buffers.shapes != self.shapes or buffers.slots < plan.slots:
            raise ValueError(
                f"the cache holds {buffers.slots} slots of {buffers.shapes}, the call needs {plan.slots} of {self.shapes} "
                "in multiples of 16"
            )
        ascending = sorted({i for i in wanted if 0 <= i <= count}) == wanted
        last_table, _ = max(self._widths)  # pairs sort by table first
        if not ascending or last_table >= len(tables):
            raise ValueError(
                f"wanted={wanted} must ascend from 0 to {count} at most; {len(tables)} rotary tables"
            )
        for i, width in self._widths:
            for table in tables[i]:
                rows = check_rows("cosine and sine", table, width)
                fits = rows == n
                if placed:
                    fits = rows >= plan.positions
                if not fits:
                    raise ValueError(f"cosine and sine have {rows} rows, which do not fit the plan")
        last = x.new_empty(0, hidden)
        logits = last
        after: tuple[float | None, ...] = _NO_ENDING
        if ending is not None:
            norm, head = ending
            vocabulary = head.out_features
            panels = head.panels()
            check("norm", norm.weight, (hidden,))
            check_panels("head", panels, hidden, vocabulary)
            last = torch.empty_like(x)
            logits = x.new_empty(n, vocabulary)
            after = (
                norm.weight.data_ptr(),
                norm.eps,
                last.data_ptr(),
                panels.data_ptr(),
                form_of(panels, head.rounded),
                logits.data_ptr(),
                vocabulary,
            )
        caught = x.new_empty((n, len(wanted), hidden))
        rotary = array("Q")
        for cosine, sine in tables:
            rotary.extend((cosine.data_ptr(), sine.data_ptr()))
        features = array("q", wanted)
        self._kernels.body_forward(
            self._layers_address,
            self._forms_address,
            buffers.address,
            count,
            x.data_ptr(),
            n,
            address_of(rotary),
            placed,
            plan.address,
            address_of(features),
            len(wanted),
            caught.data_ptr(),
            *after,
            torch.get_num_threads(),
        )
        return caught, last, logits


def wanted_inputs(feature_layers: Sequence[int]) -> list[int]:
    """The layers whose inputs are features, ascending."""
    return sorted({layer for layer in feature_layers if layer != LAST})


def select_features(
    caught: Tensor,
    last: Tensor,
    feature_layers: Sequence[int],
    wanted: list[int],
) -> Tensor:
    """[n, f*h] from the inputs of the wanted layers [n, wanted, h] and the normed state [n, h]."""
    if list(feature_layers) == wanted:
        return caught.flatten(1)
    parts = [last if layer == LAST else caught[:, wanted.index(layer)] for layer in feature_layers]
    return torch.cat(parts, dim=-1)


def plain_embedding(target: Any) -> Tensor | None:
    """[v, h] float32 rows on the CPU that a target's `embed` selects.

    None where `embed` computes more, or the rows are elsewhere.
    """
    module = target.model.get_input_embeddings()
    if type(module) is not nn.Embedding:
        return None
    if target.embed_scale != 1.0 or hasattr(target.body, "project_in"):
        return None
    weight = module.weight.detach()
    if weight.is_cpu and weight.dtype == torch.float32:
        return weight
    return None


class RotaryTables:
    """The model's rotary tables.

    Attributes:
        calls: per call of the module in a forward, its arguments after hidden states and position
            ids: a layer type, or nothing.
        of_layer: index of the call whose tables each layer reads.
        width: rotated entries of a head.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.calls: list[tuple[object, ...]] = []
        self.of_layer: list[int] = []
        self.width = 0
        # Tables that depend on a position alone, not on the highest one of a forward, are computed
        # once.
        named = getattr(module, "rope_type", "dynamic")
        kinds = named.values() if isinstance(named, dict) else [named]
        self._fixed = all(kind in ("default", "linear", "llama3", "yarn") for kind in kinds)
        self._known: Tables = []  # of positions from 0 on

    def tables(self, hidden: Tensor, position_ids: Tensor) -> Tables:
        """The tables at positions [1, n]."""
        places = position_ids[0]
        known = self.known(hidden, max(places.tolist()) + 1)
        if known is None:
            return self.compute(hidden, position_ids)
        return [
            (cosine.index_select(0, places), sine.index_select(0, places)) for cosine, sine in known
        ]

    def known(self, like: Tensor, end: int) -> Tables | None:
        """The tables of at least the positions [0, end); None if they depend on more, or are too long.

        Args:
            like: a tensor of the states' dtype and device.
        """
        if not self._fixed or end > _KNOWN_POSITIONS:
            return None
        known = self._known  # another thread may replace the tables by shorter ones
        if self.calls and (not known or len(known[0][0]) < end):
            places = torch.arange(max(256, 1 << end.bit_length()), device=like.device)[None]
            known = self.compute(like, places)
            self._known = known
        return known

    def compute(self, hidden: Tensor, position_ids: Tensor) -> Tables:
        """The tables at positions [1, n], by the model's own module."""
        made: Tables = []
        for extra in self.calls:
            cosine, sine = self.module(hidden, position_ids, *extra)  # [1, n, rotary_dim] each
            made.append((cosine[0].contiguous(), sine[0].contiguous()))
        return made


def _close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(
        ours,
        theirs,
        rtol=1e-3,
        atol=1e-4 * theirs.abs().max().item(),
    )


def record_proofs(
    target: ProvenModel,
) -> tuple[RotaryTables, list[tuple[Tensor, Tensor, TargetOutput]]] | None:
    """The rotary tables of a model's layers, and its forwards of random ids.

    These have [1, PROOF_TOKENS] int64 ids and positions, at low and at high positions: some models
    scale attention or rotation beyond a length.

    Returns:
        None for a body of other parts, or layers that read no such tables.
    """
    parts = dict(target.body.named_children())
    if not {"rotary_emb", "norm"} <= parts.keys():
        return None
    # Layers of several streams hold states that are no features, so the forwards below would fail.
    if None in map(LayerParts.of, target.layers):
        return None
    rotary = RotaryTables(parts["rotary_emb"])
    proofs = []
    longest = target.max_positions or 4096
    for start in (0, max(0, longest - PROOF_TOKENS)):
        generator = torch.Generator().manual_seed(start)
        ids = torch.randint(
            target.vocab_size,
            (1, PROOF_TOKENS),
            generator=generator,
        )
        ids = ids.to(target.device)
        positions = torch.arange(start, start + PROOF_TOKENS, device=target.device)[None]
        proofs.append((ids, positions, _record(target, ids, positions, rotary)))
    if len(rotary.of_layer) != target.num_layers:
        return None
    return rotary, proofs


def _record(
    target: ProvenModel,
    ids: Tensor,
    positions: Tensor,
    rotary: RotaryTables,
) -> TargetOutput:
    """The model's own forward; records the rotary module's calls and which layer reads which."""
    outputs: list[tuple[Tensor, Tensor]] = []  # tables of each call
    rotary.calls = []
    rotary.of_layer = []

    def called(_module, args, kwargs, output):
        extra = list(args[2:])
        for name, value in kwargs.items():
            if name not in ("x", "position_ids"):
                extra.append(value)
        rotary.calls.append(tuple(extra))
        if isinstance(output, tuple):  # DeepSeek-V2's is one complex tensor, which no table is
            outputs.append(output)

    def entered(_module, _args, kwargs):
        given = kwargs.get("position_embeddings")
        if given is None:
            return
        for i, output in enumerate(outputs):
            if given[0] is output[0]:  # the same object as the call returned
                rotary.of_layer.append(i)

    handles = [rotary.module.register_forward_hook(called, with_kwargs=True)]
    for layer in target.layers:
        handles.append(layer.register_forward_pre_hook(entered, with_kwargs=True))
    every = range(target.num_layers + 1)
    try:
        out = target.forward(ids, every, positions, CausalRows(PROOF_TOKENS))
    finally:
        for handle in handles:
            handle.remove()
    rotary.width = 0
    if outputs:
        cosine, _ = outputs[0]
        rotary.width = cosine.shape[-1]
    return out


class LayerParts(NamedTuple):
    """A decoder layer's modules: an attention with projections, an MLP, and norms by their names."""

    attention: AttentionModule
    mlp: nn.Module
    norms: dict[str, nn.Module]

    @staticmethod
    def of(layer: nn.Module) -> LayerParts | None:
        """None for a layer that has other modules, or lacks some of these."""
        own = dict(layer.named_children())
        attention: Any = own.get("self_attn")
        mlp = own.get("mlp")
        if attention is None or mlp is None or not getattr(attention, "head_dim", 0):
            return None
        inside = dict(attention.named_children())
        if own.keys() - _LAYER_PARTS or inside.keys() - _ATTENTION_PARTS:
            return None
        norms = {name: part for name, part in (own | inside).items() if name.endswith("norm")}
        if not {"input_layernorm", "post_attention_layernorm"} <= norms.keys():
            return None
        return LayerParts(attention, mlp, norms)


def by_role(norms: Mapping[str, object]) -> dict[str, Any]:
    """The norms of `LayerParts`, or what stands for them, by what they are applied to."""
    mlp_norm = norms["post_attention_layernorm"]
    attended_norm = None
    if "pre_feedforward_layernorm" in norms:  # Gemma: norms before and after both blocks
        mlp_norm = norms["pre_feedforward_layernorm"]
        attended_norm = norms["post_attention_layernorm"]
    return {
        "input_norm": norms["input_layernorm"],
        "mlp_norm": mlp_norm,
        "attended_norm": attended_norm,
        "mlp_out_norm": norms.get("post_feedforward_layernorm"),
        "query_norm": norms.get("q_norm"),
        "key_norm": norms.get("k_norm"),
    }


def native_layer(layer: nn.Module, rotary_dim: int) -> DecoderLayer | None:
    """The packed layer if it consists of nothing but the modules that `DecoderLayer` computes."""
    parts = LayerParts.of(layer)
    if parts is None:
        return None
    inside = dict(layer.get_submodule("self_attn").named_children())
    gated = dict(parts.mlp.named_children())
    if gated.keys() - MLP_PARTS or "act_fn" not in gated:
        return None

    for name in _PROJECTIONS:
        if type(inside.get(name, gated.get(name))) is not nn.Linear:
            return None

    # Norms: all are RMS norms of one eps.
    factor: dict[str, Tensor] = {}
    eps = set()
    for name, part in parts.norms.items():
        norm = PackedRMSNorm.like(part)
        if norm is None:
            return None
        factor[name] = norm.weight
        eps.add(norm.eps)
    if len(eps) != 1:
        return None

    gelu = is_gelu(gated["act_fn"])
    if gelu is None:
        return None
    try:
        return DecoderLayer(
            parts.attention,
            cast(GatedMLP, parts.mlp),
            rotary_dim,
            eps.pop(),
            gelu,
            **by_role(factor),
        )
    except ValueError:  # modules of these names with other shapes or biases
        return None


def is_gelu(activation: nn.Module) -> bool | None:
    """True for tanh-approximated GELU, False for SiLU, None for anything else."""
    x = torch.linspace(-6, 6, 101)
    y = activation(x)
    if torch.allclose(y, F.silu(x), atol=1e-5):
        return False
    if torch.allclose(y, F.gelu(x, approximate="tanh"), atol=1e-5):
        return True
    return None
