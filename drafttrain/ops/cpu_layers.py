"""Decoder layers on a CPU as single calls of cpu_layers.c: one layer, all layers of a target, one depth of a drafter.

A small model over a few tokens is some 1500 tiny torch operations, whose dispatch costs as much as reading the weights. Here

    DecoderLayer   norm, projections, rotation | attention (the caller's) | output projection, norm, gated MLP
    LayerStack     all layers of a target with the attention of the same C file: one call per forward
    DraftStep      one depth of a drafter: norms and projection of the input, its layers, the head's logits

An object holds packed weights and nothing else. Everything that belongs to a call (where tokens stand, the addresses of the
cache, outputs) is an argument or is allocated by the call, because ctypes releases the GIL: threads share the weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from drafttrain.ops.native import built_kernels
from drafttrain.ops.packing import BFLOAT16_DOT, FORMATS, check, form_of, pack_gated, pack_panels
from drafttrain.ops.tree_attention import AttentionForm, CpuPlan
from drafttrain.ops.tree_cache import Addresses

# Attention of a caller: query [n, heads, e], key and value [n, kv_heads, e] -> [n, heads * e].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class AttentionModule(Protocol):
    """Attention projections by their names in published checkpoints."""

    head_dim: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear


class GatedMLP(Protocol):
    """MLP projections by their names in published checkpoints."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear


def _fields(panels: str, vectors: str, numbers: str) -> list[tuple[str, type]]:
    """Fields of a C struct: pointers to panels and vectors, the panels' formats, int numbers; in this order."""
    pointers = [(name, ctypes.c_void_p) for name in f"{panels} {vectors}".split()]
    formats = [(f"{name}_format", ctypes.c_int) for name in panels.split()]
    return [*pointers, *formats, *((name, ctypes.c_int) for name in numbers.split())]


class _Layer(ctypes.Structure):
    """struct layer of cpu_layers.c."""

    _fields_ = [
        *_fields(
            "qkv o gate_up down",
            "qkv_bias input_norm query_norm key_norm attended_norm mlp_norm mlp_out_norm",
            "width hidden heads kv_heads head_dim rotary_dim inner gelu",
        ),
        ("eps", ctypes.c_float),
    ]


class _Draft(ctypes.Structure):
    """struct draft of cpu_layers.c."""

    _fields_ = [
        ("layers", ctypes.c_void_p),
        *_fields("project head", "embed_norm state_norm norm", "count embed_width hidden returns_normed"),
        ("vocabulary", ctypes.c_long),
        ("eps", ctypes.c_float),
    ]


def _struct(kind: type[_Layer | _Draft], **content: Tensor | float | None) -> tuple[ctypes.Structure, list[Tensor]]:
    """A C struct with numbers and pointers to tensors, and the tensors, which must outlive it."""
    fields = {field[0] for field in kind._fields_}
    kept = {name: value.detach().contiguous() for name, value in content.items() if isinstance(value, Tensor)}
    formats = {f"{name}_format": form_of(value) for name, value in kept.items() if f"{name}_format" in fields}
    assert content.keys() <= fields, "ctypes ignores names that are no fields"
    return kind(**content | formats | {name: value.data_ptr() for name, value in kept.items()}), list(kept.values())


class DecoderLayer:
    """A pre-norm decoder layer, packed: two kernel calls around an attention that the caller brings.

    Args:
        attention, mlp: float32 on the CPU. Only the projections of queries, keys and values may have biases.
        rotary_dim: the first entries of a head are rotated, in halves.
        eps: of all norms. gelu: tanh-approximated GELU in the MLP instead of SiLU.
        mlp_norm: [h] RMS-norm factor before the MLP.
        norms: other RMS-norm factors by name; a missing one is not applied. `input_norm` [h] is before the attention,
            `attended_norm` and `mlp_out_norm` [h] after attention and MLP (Gemma), `query_norm` and `key_norm` [e] per head
            (Qwen3, Gemma 3).

    Raises:
        ValueError, TypeError: sizes that do not fit together, weights of another dtype or device.
    """

    def __init__(
        self,
        attention: AttentionModule,
        mlp: GatedMLP,
        rotary_dim: int,
        eps: float,
        gelu: bool = False,
        *,
        mlp_norm: Tensor,
        **norms: Tensor | None,
    ):
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases: list[Tensor] = [module.bias for module in projections if module.bias is not None]
        width, hidden, inner = projections[0].in_features, attention.o_proj.out_features, mlp.down_proj.in_features
        self.head_dim = e = attention.head_dim
        self.heads, self.kv_heads = (module.out_features // e for module in projections[:2])
        self.width, self.hidden, self.rotary_dim = width, hidden, rotary_dim
        if not self.kv_heads or self.heads % self.kv_heads or not 0 <= rotary_dim <= e or rotary_dim % 2:
            sizes = f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={e}, rotary_dim={rotary_dim}"
            raise ValueError(f"{sizes}: key heads must divide heads, and rotary_dim be even and at most head_dim")
        rows, keys = self.heads * e, self.kv_heads * e
        for name, module, size in (
            *(("q_proj", attention.q_proj, (rows, width)), ("k_proj", attention.k_proj, (keys, width))),
            *(("v_proj", attention.v_proj, (keys, width)), ("o_proj", attention.o_proj, (hidden, rows))),
            *(("gate_proj", mlp.gate_proj, (inner, hidden)), ("up_proj", mlp.up_proj, (inner, hidden))),
            ("down_proj", mlp.down_proj, (hidden, inner)),
        ):
            check(name, module.weight.contiguous(), size)
            if module.bias is not None and (module not in projections or len(biases) != 3):
                raise ValueError(f"{name} has a bias; only queries, keys and values together may have one")
        panels = {
            "qkv": pack_panels(torch.cat([module.weight for module in projections]).detach()),
            "o": pack_panels(attention.o_proj.weight.detach()),
            "gate_up": pack_gated(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()),
            "down": pack_panels(mlp.down_proj.weight.detach()),
        }
        norms |= {"qkv_bias": torch.cat(biases) if biases else None, "mlp_norm": mlp_norm}
        lengths = {"qkv_bias": rows + 2 * keys, "input_norm": width, "query_norm": e, "key_norm": e}
        for name, factor in norms.items():
            if factor is not None:
                check(name, factor.contiguous(), (lengths.get(name, hidden),))
        numbers = {"width": width, "hidden": hidden, "inner": inner, "rotary_dim": rotary_dim, "gelu": gelu, "eps": eps}
        numbers |= {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": e}
        self._layer, self._kept = _struct(_Layer, **panels, **norms, **numbers)
        self.address = ctypes.addressof(self._layer)
        self._kernels = built_kernels()

    def round_inputs(self) -> None:
        """From now on bfloat16 weights multiply inputs that are rounded to bfloat16; see `packing.form_of`."""
        for field in _Layer._fields_:
            if field[0].endswith("_format") and getattr(self._layer, field[0]) == FORMATS[torch.bfloat16]:
                setattr(self._layer, field[0], BFLOAT16_DOT)

    def project(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The half before the attention: norm, projections, rotation.

        Args:
            x: [n, width]; cosine, sine: [n, rotary_dim] or [n, 1, rotary_dim]. All float32 and contiguous.

        Returns:
            Query [n, heads, e], key and value [n, kv_heads, e], views of one buffer.
        """
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        check("x", x, (len(x), self.width))
        for name, table in (("cosine", cosine), ("sine", sine)):
            check(name, table.squeeze(1) if table.dim() == 3 else table, (len(x), self.rotary_dim))
        out = x.new_empty(x.shape[0], sum(sizes), self.head_dim)
        pointers = x.data_ptr(), x.shape[0], cosine.data_ptr(), sine.data_ptr(), out.data_ptr()
        self._kernels.layer_before_attention(self.address, *pointers, torch.get_num_threads())
        query, key, value = out.split(sizes, dim=1)
        return query, key, value

    def finish(self, x: Tensor, attended: Tensor) -> None:
        """The half after the attention: adds output projection and MLP to x [n, h], in place; attended [n, heads * e]."""
        attended, threads = attended.contiguous(), torch.get_num_threads()
        check("x", x, (len(x), self.hidden))
        check("attended", attended.flatten(), (len(x) * self.heads * self.head_dim,))
        self._kernels.layer_after_attention(self.address, x.data_ptr(), attended.data_ptr(), x.shape[0], threads)

    def forward(
        self, state: Tensor, read: Tensor, cosine: Tensor, sine: Tensor, attend: Attend, queries: Tensor | None = None
    ) -> Tensor:
        """A full layer.

        Args:
            state: [n, h], the residual stream. read: [n, width], input of the projections; often `state` itself.
            queries: [m] int64 rows that need an output; None for all.

        Returns:
            [n or m, h].
        """
        query, key, value = self.project(read, cosine, sine)
        out = state.clone() if queries is None else state[queries]  # [n or m, h]
        self.finish(out, attend(query if queries is None else query[queries], key, value))
        return out


# struct form of cpu_layers.c: what a layer's attention computes.
_FORM = np.dtype(
    [("sinks", np.uint64), ("window", np.int64), ("table", np.int64), ("scaling", np.float32), ("softcap", np.float32)]
)


class LayerStack:
    """All layers of a target in one call.

    Args:
        layers: in order. forms: how each layer attends. table_of: index of the rotary table that each layer reads.

    Attributes:
        shapes: (kv_heads, head_dim) of each layer's keys and values.
        served: whether the C attention supports these head widths.

    Raises:
        ValueError: layers, forms and tables that do not fit together.
    """

    def __init__(self, layers: Sequence[DecoderLayer], forms: Sequence[AttentionForm], table_of: Sequence[int]):
        self.shapes = [(layer.kv_heads, layer.head_dim) for layer in layers]
        self.served = all(width % 16 == 0 for _, width in self.shapes)
        self._layers = np.array([layer.address for layer in layers], dtype=np.uint64)
        sinks = [None if form["sinks"] is None else form["sinks"].float().contiguous() for form in forms]
        self._kept = (layers, sinks)
        self.hidden = layers[0].hidden
        self._widths = set(zip(table_of, (layer.rotary_dim for layer in layers), strict=True))  # of rotary tables
        for layer, form, sink, table in zip(layers, forms, sinks, table_of, strict=True):
            if {layer.hidden, layer.width} != {self.hidden} or table < 0:
                raise ValueError(
                    f"a layer of width {layer.width} to {layer.hidden} does not continue one of {self.hidden}"
                )
            if (form["window"] or 0) < 0 or (form["softcap"] or 0) < 0:
                raise ValueError(f"window={form['window']}, softcap={form['softcap']}: none may be negative")
            if sink is not None:
                check("sinks", sink, (layer.heads,))
        rows = [
            (0 if sink is None else sink.data_ptr(), form["window"] or 0, table, form["scaling"], form["softcap"] or 0)
            for form, sink, table in zip(forms, sinks, table_of, strict=True)
        ]
        self._forms = np.array(rows, dtype=_FORM)
        self._kernels = built_kernels()

    def forward(
        self, x: Tensor, tables: Sequence[tuple[Tensor, Tensor]], plan: CpuPlan, buffers: Addresses, wanted: list[int]
    ) -> Tensor:
        """Runs the layers over x [n, h] in place and stores the new keys and values.

        Args:
            tables: cosine and sine [n, rotary_dim] of each rotary table.
            plan: where each token stands.
            buffers: of a cache, see `TreeCache.addresses`.
            wanted: ascending layers whose inputs are returned; the number of layers means the last layer's output.

        Returns:
            [n, len(wanted), h].
        """
        n, hidden, count = plan.tokens, self.hidden, len(self._layers)
        check("x", x, (n, hidden))
        if not self.served or buffers.shapes != self.shapes or buffers.slots < plan.slots:
            raise ValueError(
                f"the cache holds {buffers.slots} slots of {buffers.shapes}, the call needs {plan.slots} of {self.shapes} "
                "in multiples of 16"
            )
        if sorted({i for i in wanted if 0 <= i <= count}) != wanted or max(self._widths)[0] >= len(tables):
            raise ValueError(f"wanted={wanted} must ascend from 0 to {count} at most; {len(tables)} rotary tables")
        for i, width in self._widths:
            check("cosine", tables[i][0], (n, width))
            check("sine", tables[i][1], (n, width))
        caught = x.new_empty((n, len(wanted), hidden))
        slots = np.ascontiguousarray(buffers.table)  # [layers, 4], struct buffers of cpu_layers.c
        rotary = np.array([part.data_ptr() for pair in tables for part in pair], dtype=np.uint64)
        features = np.array(wanted, dtype=np.int64)
        self._kernels.body_forward(
            *(self._layers.ctypes.data, self._forms.ctypes.data, slots.ctypes.data, count),
            *(x.data_ptr(), n, rotary.ctypes.data, plan.address),
            *(features.ctypes.data, len(wanted), caught.data_ptr(), torch.get_num_threads()),
        )
        return caught


@dataclass
class DraftWeights:
    """What surrounds a drafter's layers in one depth, float32 on the CPU. None: not applied."""

    head: Tensor  # [d, h]
    embed_width: int  # of the token embeddings that are read
    eps: float  # of all norms
    embed_norm: Tensor | None = None  # [embed_width], RMS-norm factor of the embeddings that are read
    state_norm: Tensor | None = None  # [h], of the states that are read
    norm: Tensor | None = None  # [h], of the last layer's output
    # [h, embed_width + h], joined input to a state; None if the first layer reads it joined
    project: Tensor | None = None
    returns_normed: bool = False  # the next depth reads the output behind `norm`


class DraftStep:
    """One depth of a drafter with decoder layers, for tokens of one sequence.

    A depth over a few tokens reads some megabytes of weights in half a millisecond; torch's forty operations took longer.

    Raises:
        ValueError, TypeError: layers and weights that do not fit together.
    """

    def __init__(self, layers: Sequence[DecoderLayer], weights: DraftWeights):
        self.vocabulary, self.hidden = weights.head.shape
        self.embed_width, h, joined = weights.embed_width, self.hidden, weights.embed_width + self.hidden
        self.cache_shape = (layers[0].kv_heads, layers[0].head_dim)
        self.rotary_dim, self.count = layers[0].rotary_dim, len(layers)
        for i, layer in enumerate(layers):
            reads = h if i or weights.project is not None else joined
            form = layer.heads, layer.kv_heads, layer.head_dim, layer.rotary_dim
            same = form == (layers[0].heads, *self.cache_shape, self.rotary_dim)
            if (layer.width, layer.hidden) != (reads, h) or not same or layer.head_dim % 16:
                raise ValueError(
                    f"layer {i} maps {layer.width} to {layer.hidden}, heads {form}; {reads} to {h} expected"
                )
        sizes: dict[str, tuple[int, ...]] = {"head": (self.vocabulary, h), "project": (h, joined)}
        sizes |= {"embed_norm": (weights.embed_width,), "state_norm": (h,), "norm": (h,)}
        for name, size in sizes.items():
            if (tensor := vars(weights)[name]) is not None:
                check(name, tensor.contiguous(), size)
        addresses = (ctypes.c_void_p * len(layers))(*(layer.address for layer in layers))
        panels = {"head": pack_panels(weights.head.detach())}
        if weights.project is not None:
            panels["project"] = pack_panels(weights.project.detach())
        numbers = {"layers": ctypes.addressof(addresses), "count": len(layers)}
        numbers |= {"hidden": self.hidden, "vocabulary": self.vocabulary}
        self._draft, kept = _struct(_Draft, **(vars(weights) | panels | numbers))
        self._kept = (layers, addresses, kept)
        self._address = ctypes.addressof(self._draft)
        self._kernels = built_kernels()

    def run(
        self,
        embeds: Tensor,
        states: Tensor,
        tables: tuple[Tensor, Tensor],
        buffers: Sequence[tuple[Tensor, Tensor]],
        plan: CpuPlan,
        window: int,
        queries: int,
    ) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values and computes a depth; all tensors float32 and contiguous.

        Args:
            embeds: [n, embed_width]; states: [n, h].
            tables: cosine and sine [positions, 1, rotary_dim] of all positions from 0 on.
            buffers: keys and values [kv_heads, slots, e] of each layer, all of one shape.
            plan: where the sequence's tokens stand. window: visible positions, 0 for all.
            queries: how many of the last tokens need logits.

        Returns:
            What the next depth reads [n, h], and logits [queries, d].
        """
        n, (kv_heads, e) = plan.tokens, self.cache_shape
        check("embeds", embeds, (n, self.embed_width))
        check("states", states, (n, self.hidden))
        for name, table in zip(("cosine", "sine"), tables, strict=True):
            check(name, table, (len(table), 1, self.rotary_dim))
            if len(table) < plan.positions:
                raise ValueError(f"{name} has {len(table)} positions, but the tokens reach {plan.positions}")
        if plan.sequences != 1 or not 0 <= queries <= n or window < 0 or len(buffers) != self.count:
            found = f"sequences={plan.sequences}, queries={queries}, window={window}, buffers={len(buffers)}"
            raise ValueError(f"{found}: must be 1, from 0 to {n}, from 0 on, and {self.count}")
        for buffer in chain.from_iterable(buffers):
            check("keys and values", buffer, (kv_heads, buffers[0][0].shape[1], e))
        if buffers[0][0].shape[1] < plan.slots:
            raise ValueError(f"keys and values have {buffers[0][0].shape[1]} slots, but the tokens need {plan.slots}")
        out, logits = states.new_empty(n, self.hidden), states.new_empty(queries, self.vocabulary)
        keys, values = zip(*buffers, strict=True)
        pointers = ctypes.c_void_p * len(buffers)
        self._kernels.draft_step(
            *(self._address, embeds.data_ptr(), states.data_ptr(), n, tables[0].data_ptr(), tables[1].data_ptr()),
            *(pointers(*(key.data_ptr() for key in keys)), pointers(*(value.data_ptr() for value in values))),
            *(keys[0].stride(0), plan.address, window),
            *(out.data_ptr(), logits.data_ptr(), queries, torch.get_num_threads()),
        )
        return out, logits
