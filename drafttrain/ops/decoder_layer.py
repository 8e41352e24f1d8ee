"""A pre-norm decoder layer around its attention, as two kernel calls of ops/cpu_layers.c; all layers with theirs as one.

A pass of a small model over a few tokens is some 1500 tiny torch operations, whose dispatch costs as much as reading
the weights does. Here a layer is: norm, one product for queries, keys and values, rotation | attention, the cache's
business | output product, norm, gated MLP. Where the cache's attention is the kernel of that file too, `LayerStack` runs all
layers in one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.packing import FORMATS, pack_gated, pack_panels
from drafttrain.ops.tree_attention import CpuPlan


@dataclass
class LayerWeights:
    """What a layer computes with; all float32 on the CPU, linear weights [out, in].

    Attributes:
        qkv: query, key and value projections, rows joined; qkv_bias: likewise, or None.
        o, gate_up, down: output projection; gate and up projections, rows joined; down projection.
        input_norm, mlp_norm: RMS-norm factors before attention and MLP; no input_norm where the input comes normed.
        attended_norm, mlp_out_norm: after them (Gemma); query_norm, key_norm: per head (Qwen3, Gemma 3); or None.
        heads, kv_heads, head_dim: of attention; rotary_dim: first entries of a head that are rotated, in halves.
        gelu: tanh-approximated GELU in the MLP instead of SiLU. eps: of all norms.
    """

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor | None
    mlp_norm: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    eps: float
    gelu: bool = False
    qkv_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    attended_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None


_PANELS = ("qkv", "o", "gate_up", "down")
_VECTORS = ("qkv_bias", "input_norm", "query_norm", "key_norm", "attended_norm", "mlp_norm", "mlp_out_norm")
_NUMBERS = ("width", "hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "inner", "gelu")


class _Layer(ctypes.Structure):
    """struct layer of cpu_layers.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*_PANELS, *_VECTORS)),
        *((f"{name}_format", ctypes.c_int) for name in _PANELS),
        *((name, ctypes.c_int) for name in _NUMBERS),
        ("eps", ctypes.c_float),
    ]


class DecoderLayer:
    """The two halves of a layer; keeps the packed weights alive."""

    def __init__(self, weights: LayerWeights):
        assert all(
            value.dtype == torch.float32 and value.device.type == "cpu"
            for value in (getattr(weights, field.name) for field in fields(weights))
            if isinstance(value, Tensor)
        )
        self.heads, self.kv_heads, self.head_dim = weights.heads, weights.kv_heads, weights.head_dim
        panels = {name: pack_panels(getattr(weights, name)) for name in _PANELS if name != "gate_up"}
        panels["gate_up"] = pack_gated(weights.gate_up)
        vectors = {name: getattr(weights, name) for name in _VECTORS}
        self._kept = [*panels.values(), *(v.contiguous() for v in vectors.values() if v is not None)]
        pointers = iter(self._kept[len(panels) :])
        numbers = {name: int(getattr(weights, name)) for name in _NUMBERS if hasattr(weights, name)}
        self._struct = _Layer(
            **{name: packed.data_ptr() for name, packed in panels.items()},
            **{name: next(pointers).data_ptr() for name, vector in vectors.items() if vector is not None},
            **{f"{name}_format": FORMATS[packed.dtype] for name, packed in panels.items()},
            **numbers,
            width=weights.qkv.shape[1],
            hidden=weights.o.shape[0],
            inner=weights.down.shape[1],
            eps=weights.eps,
        )
        self.address = ctypes.addressof(self._struct)
        self._width = (weights.heads + 2 * weights.kv_heads) * weights.head_dim
        self._kernels = cpu_kernels()

    def project(self, x: Tensor, cosine: Tensor, sine: Tensor, threads: int) -> Tensor:
        """x [n, columns of qkv]; cosine, sine [n, rotary_dim], all contiguous -> [n, heads + 2 kv_heads, e]: queries and
        keys, rotated, and values."""
        n = x.shape[0]
        out = torch.empty(n, self.heads + 2 * self.kv_heads, self.head_dim)
        self._kernels.layer_before_attention(  # type: ignore[union-attr]
            self.address, x.data_ptr(), n, cosine.data_ptr(), sine.data_ptr(), out.data_ptr(), threads
        )
        return out

    def before(self, x: Tensor, cosine: Tensor, sine: Tensor, threads: int) -> tuple[Tensor, Tensor, Tensor]:
        """As `project`; returns query [1, heads, n, e], key and value [1, kv_heads, n, e], views of one buffer."""
        n, e, width = x.shape[0], self.head_dim, self._width
        out = self.project(x, cosine, sine, threads)
        kv, strides = (1, self.kv_heads, n, e), (n * width, e, width, 1)
        first_key = self.heads * e
        return (
            out.as_strided((1, self.heads, n, e), strides),
            out.as_strided(kv, strides, first_key),
            out.as_strided(kv, strides, first_key + self.kv_heads * e),
        )

    def after(self, x: Tensor, attended: Tensor, threads: int) -> None:
        """Adds the attention's output projection and the MLP to x [n, hidden], in place; attended [n, heads * e]."""
        self._kernels.layer_after_attention(  # type: ignore[union-attr]
            self.address, x.data_ptr(), attended.data_ptr(), x.shape[0], threads
        )


# struct attention of cpu_layers.c.
_ATTENTION = np.dtype(
    [
        *((name, np.uint64) for name in ("keys", "values", "sinks")),
        *((name, np.int64) for name in ("key_stride", "value_stride", "window", "table")),
        *((name, np.float32) for name in ("scaling", "softcap")),
    ]
)


class LayerStack:
    """All layers of a model in one call.

    Args:
        layers: in order. attention: each one's options, as `CpuPlan.attend` takes them.
        table_of: which rotary table each layer reads.

    Attributes:
        shapes: (kv_heads, head_dim) of each layer's keys and values.
    """

    def __init__(self, layers: Sequence[DecoderLayer], attention: Sequence[dict[str, Any]], table_of: Sequence[int]):
        self.shapes = [(layer.kv_heads, layer.head_dim) for layer in layers]
        self._layers = np.array([layer.address for layer in layers], dtype=np.uint64)
        sinks = [None if form["sinks"] is None else form["sinks"].float().contiguous() for form in attention]
        self._kept = (layers, sinks)
        self._attention = np.zeros(len(layers), dtype=_ATTENTION)
        self._attention["table"] = table_of
        for row, form, sink in zip(self._attention, attention, sinks, strict=True):
            row["scaling"], row["softcap"], row["window"] = form["scaling"], form["softcap"] or 0, form["window"] or 0
            row["sinks"] = 0 if sink is None else sink.data_ptr()
        self._kernels = cpu_kernels()

    @property
    def served(self) -> bool:
        """Whether the attention kernel is written for these widths."""
        return all(width % 16 == 0 for _, width in self.shapes)

    def forward(
        self, x: Tensor, tables: Sequence[tuple[Tensor, Tensor]], plan: CpuPlan, buffers: np.ndarray, wanted: list[int]
    ) -> Tensor:
        """Runs the layers over x [n, h] in place, and stores the new keys and values.

        Args:
            tables: cosine and sine [n, rotary_dim] of each rotary table.
            plan: where each token stands. buffers: see `TreeCache.addresses`.
            wanted: layers whose inputs are returned, ascending; the number of layers stands for the last one's output.

        Returns:
            [n, len(wanted), h].
        """
        n, hidden = x.shape
        for name, column in zip(("keys", "values", "key_stride", "value_stride"), buffers, strict=True):
            self._attention[name] = column
        caught = torch.empty((n, len(wanted), hidden))
        rotary = np.array([part.data_ptr() for pair in tables for part in pair], dtype=np.uint64)
        features = np.array(wanted, dtype=np.int64)
        self._kernels.body_forward(  # type: ignore[union-attr]
            *(self._layers.ctypes.data, self._attention.ctypes.data, len(self._layers), x.data_ptr(), n),
            *(rotary.ctypes.data, *plan.pointers),
            *(features.ctypes.data, len(wanted), caught.data_ptr(), torch.get_num_threads()),
        )
        return caught
