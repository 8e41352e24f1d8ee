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
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.packing import FORMATS, pack_gated, pack_panels
from drafttrain.ops.tree_attention import AttentionForm, CpuPlan

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


@dataclass
class LayerWeights:
    """Weights of a pre-norm decoder layer, float32 on the CPU.

    Attributes:
        input_norm: RMS-norm factors before the attention; None if the layer's input is already normed.
        attended_norm, mlp_out_norm: RMS-norm factors after attention and MLP (Gemma), or None.
        query_norm, key_norm: RMS-norm factors per head (Qwen3, Gemma 3), or None.
        rotary_dim: the first entries of a head are rotated, in halves.
        eps: of all norms. gelu: tanh-approximated GELU in the MLP instead of SiLU.
    """

    qkv: Tensor  # [(heads + 2 * kv_heads) * e, width]: query, key and value projections, rows joined
    o: Tensor  # [h, heads * e]
    gate_up: Tensor  # [2 * inner, h]: gate and up projections, rows joined
    down: Tensor  # [h, inner]
    mlp_norm: Tensor  # [h]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    eps: float
    gelu: bool = False
    qkv_bias: Tensor | None = None
    input_norm: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    attended_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None

    @classmethod
    def of(
        cls,
        attention: AttentionModule,
        mlp: GatedMLP,
        *,
        mlp_norm: Tensor,
        rotary_dim: int,
        eps: float,
        gelu: bool = False,
        **norms: Tensor | None,
    ) -> LayerWeights:
        """Joins the projections of a layer's modules; only those of queries, keys and values may have biases.

        Args:
            norms: the optional norm factors by attribute name.
        """
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [module.bias for module in projections if module.bias is not None]
        return cls(
            qkv=torch.cat([module.weight for module in projections]),
            qkv_bias=torch.cat(biases) if biases else None,
            o=attention.o_proj.weight,
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=mlp.down_proj.weight,
            mlp_norm=mlp_norm,
            heads=attention.q_proj.out_features // attention.head_dim,
            kv_heads=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            rotary_dim=rotary_dim,
            eps=eps,
            gelu=gelu,
            **norms,
        )


class _Layer(ctypes.Structure):
    """struct layer of cpu_layers.c."""

    _panels_ = ("qkv", "o", "gate_up", "down")
    _vectors_ = ("qkv_bias", "input_norm", "query_norm", "key_norm", "attended_norm", "mlp_norm", "mlp_out_norm")
    _numbers_ = ("width", "hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "inner", "gelu")
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*_panels_, *_vectors_)),
        *((f"{name}_format", ctypes.c_int) for name in _panels_),
        *((name, ctypes.c_int) for name in _numbers_),
        ("eps", ctypes.c_float),
    ]


class _Draft(ctypes.Structure):
    """struct draft of cpu_layers.c."""

    _panels_ = ("project", "head")
    _vectors_ = ("embed_norm", "state_norm", "norm")
    _numbers_ = ("count", "embed_width", "hidden", "returns_normed")
    _fields_ = [
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in (*_panels_, *_vectors_)),
        *((f"{name}_format", ctypes.c_int) for name in _panels_),
        *((name, ctypes.c_int) for name in _numbers_),
        ("vocabulary", ctypes.c_long),
        ("eps", ctypes.c_float),
    ]


def _struct(
    kind: type[_Layer | _Draft], panels: dict[str, Tensor], weights: LayerWeights | DraftWeights, **numbers: float
) -> tuple[ctypes.Structure, list[Tensor]]:
    """A C struct that points to panels and to the vectors of `weights`, and the tensors that must outlive it."""
    vectors = {name: getattr(weights, name) for name in kind._vectors_}
    kept = {name: value.detach().contiguous() for name, value in (panels | vectors).items() if value is not None}
    assert all(value.device.type == "cpu" for value in kept.values())
    assert all(kept[name].dtype == torch.float32 for name in vectors.keys() & kept.keys())
    addresses = {name: value.data_ptr() for name, value in kept.items()}
    formats = {f"{name}_format": FORMATS[panel.dtype] for name, panel in panels.items()}
    return kind(**addresses, **formats, **numbers), list(kept.values())


class DecoderLayer:
    """A packed layer in two kernel calls, around an attention that the caller brings."""

    def __init__(self, weights: LayerWeights):
        w = weights
        self.heads, self.kv_heads, self.head_dim = w.heads, w.kv_heads, w.head_dim
        panels = {name: pack_panels(getattr(w, name).detach()) for name in ("qkv", "o", "down")}
        panels["gate_up"] = pack_gated(w.gate_up.detach())
        numbers = {name: getattr(w, name) for name in ("heads", "kv_heads", "head_dim", "rotary_dim", "gelu", "eps")}
        width, hidden, inner = w.qkv.shape[1], w.o.shape[0], w.down.shape[1]
        self._layer, self._kept = _struct(_Layer, panels, w, **numbers, width=width, hidden=hidden, inner=inner)
        self.address = ctypes.addressof(self._layer)
        self._kernels = cpu_kernels()

    def project(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The half before the attention: norm, projections, rotation.

        Args:
            x: [n, width]; cosine, sine: [n, rotary_dim] or [n, 1, rotary_dim]. All float32 and contiguous.

        Returns:
            Query [n, heads, e], key and value [n, kv_heads, e], views of one buffer.
        """
        assert self._kernels is not None
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        out = torch.empty(x.shape[0], sum(sizes), self.head_dim)
        pointers = x.data_ptr(), x.shape[0], cosine.data_ptr(), sine.data_ptr(), out.data_ptr()
        self._kernels.layer_before_attention(self.address, *pointers, torch.get_num_threads())
        query, key, value = out.split(sizes, dim=1)
        return query, key, value

    def finish(self, x: Tensor, attended: Tensor) -> None:
        """The half after the attention: adds output projection and MLP to x [n, h], in place; attended [n, heads * e]."""
        assert self._kernels is not None
        attended, threads = attended.contiguous(), torch.get_num_threads()
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
    """

    def __init__(self, layers: Sequence[DecoderLayer], forms: Sequence[AttentionForm], table_of: Sequence[int]):
        self.shapes = [(layer.kv_heads, layer.head_dim) for layer in layers]
        self._layers = np.array([layer.address for layer in layers], dtype=np.uint64)
        sinks = [None if form["sinks"] is None else form["sinks"].float().contiguous() for form in forms]
        self._kept = (layers, sinks)
        rows = [
            (0 if sink is None else sink.data_ptr(), form["window"] or 0, table, form["scaling"], form["softcap"] or 0)
            for form, sink, table in zip(forms, sinks, table_of, strict=True)
        ]
        self._forms = np.array(rows, dtype=_FORM)
        self._kernels = cpu_kernels()

    @property
    def served(self) -> bool:
        """Whether the C attention supports these head widths."""
        return all(width % 16 == 0 for _, width in self.shapes)

    def forward(
        self, x: Tensor, tables: Sequence[tuple[Tensor, Tensor]], plan: CpuPlan, buffers: np.ndarray, wanted: list[int]
    ) -> Tensor:
        """Runs the layers over x [n, h] in place and stores the new keys and values.

        Args:
            tables: cosine and sine [n, rotary_dim] of each rotary table.
            plan: where each token stands.
            buffers: [4, layers] int64, see `TreeCache.addresses`.
            wanted: ascending layers whose inputs are returned; the number of layers means the last layer's output.

        Returns:
            [n, len(wanted), h].
        """
        assert self._kernels is not None
        n, hidden = x.shape
        caught = torch.empty((n, len(wanted), hidden))
        slots = np.ascontiguousarray(buffers.T)  # [layers, 4], struct buffers of cpu_layers.c
        rotary = np.array([part.data_ptr() for pair in tables for part in pair], dtype=np.uint64)
        features = np.array(wanted, dtype=np.int64)
        self._kernels.body_forward(
            *(self._layers.ctypes.data, self._forms.ctypes.data, slots.ctypes.data, len(self._layers)),
            *(x.data_ptr(), n, rotary.ctypes.data, *plan.pointers),
            *(features.ctypes.data, len(wanted), caught.data_ptr(), torch.get_num_threads()),
        )
        return caught


@dataclass
class DraftWeights:
    """What surrounds a drafter's layers in one depth, float32 on the CPU.

    Attributes:
        embed_width: width of the token embeddings that are read.
        embed_norm, state_norm: RMS-norm factors of what is read; norm: of the last layer's output; or None.
        project: maps embedding and state, joined, to a state; None if the first layer reads them joined.
        returns_normed: the next depth reads the output behind `norm`.
    """

    head: Tensor  # [d, h]
    embed_width: int
    eps: float
    embed_norm: Tensor | None = None  # [embed_width]
    state_norm: Tensor | None = None  # [h]
    norm: Tensor | None = None  # [h]
    project: Tensor | None = None  # [h, embed_width + h]
    returns_normed: bool = False


class DraftStep:
    """One depth of a drafter with decoder layers, for tokens of one sequence.

    A depth over a few tokens reads some megabytes of weights in half a millisecond; torch's forty operations took longer.
    """

    def __init__(self, layers: Sequence[DecoderLayer], weights: DraftWeights):
        self.vocabulary, self.hidden = weights.head.shape
        addresses = (ctypes.c_void_p * len(layers))(*(layer.address for layer in layers))
        panels = {"head": pack_panels(weights.head.detach())}
        if weights.project is not None:
            panels["project"] = pack_panels(weights.project.detach())
        numbers = {"count": len(layers), "hidden": self.hidden, "vocabulary": self.vocabulary}
        numbers |= {name: getattr(weights, name) for name in ("embed_width", "returns_normed", "eps")}
        self._draft, kept = _struct(_Draft, panels, weights, layers=ctypes.addressof(addresses), **numbers)
        self._kept = (layers, addresses, kept)
        self._address = ctypes.addressof(self._draft)
        self._kernels = cpu_kernels()

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
        assert self._kernels is not None
        n = states.shape[0]
        out, logits = torch.empty(n, self.hidden), torch.empty(queries, self.vocabulary)
        keys, values = zip(*buffers, strict=True)
        pointers = ctypes.c_void_p * len(buffers)
        parts, _, ancestors, depths = plan.pointers
        self._kernels.draft_step(
            *(self._address, embeds.data_ptr(), states.data_ptr(), n, tables[0].data_ptr(), tables[1].data_ptr()),
            *(pointers(*(key.data_ptr() for key in keys)), pointers(*(value.data_ptr() for value in values))),
            *(keys[0].stride(0), parts, ancestors, depths, window),
            *(out.data_ptr(), logits.data_ptr(), queries, torch.get_num_threads()),
        )
        return out, logits
