"""Decoder layers on a CPU as single calls of cpu_layers.c: one layer, or all layers of a target.

A small model over a few tokens is some 1500 tiny torch operations, whose dispatch costs as much as
reading the weights. Here

    DecoderLayer   norm, projections, rotation | attention (the caller's) | output projection, norm, gated MLP
    LayerStack     all layers of a target with the attention of the same C file: one call per forward

An object holds packed weights and nothing else. Everything that belongs to a call (positions of
tokens, the addresses of the cache, outputs) is an argument or is allocated by the call, because
ctypes releases the GIL: threads share the weights.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from drafttrain.ops.native import built_kernels
from drafttrain.ops.packing import (
    ROUNDED,
    PackedLinear,
    PackedRMSNorm,
    address_of,
    check,
    check_panels,
    check_rows,
    form_of,
    pack_gated,
    pack_panels,
)
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


def fields(
    panels: str,
    vectors: str,
    numbers: str,
) -> list[tuple[str, type]]:
    """Fields of a C struct, in order: pointers to panels and vectors, the panels' formats, ints."""
    made: list[tuple[str, type]] = []
    for name in panels.split() + vectors.split():
        made.append((name, ctypes.c_void_p))
    for name in panels.split():
        made.append((f"{name}_format", ctypes.c_int))
    for name in numbers.split():
        made.append((name, ctypes.c_int))
    return made


class _Layer(ctypes.Structure):
    """struct layer of cpu_layers.c."""

    _fields_ = [
        *fields(
            "qkv o gate_up down",
            "qkv_bias input_norm query_norm key_norm attended_norm mlp_norm mlp_out_norm",
            "width hidden heads kv_heads head_dim rotary_dim inner gelu",
        ),
        ("eps", ctypes.c_float),
    ]


def make_struct(
    kind: type[ctypes.Structure], **content: Tensor | float | None
) -> tuple[ctypes.Structure, list[Tensor]]:
    """A C struct with numbers and pointers to tensors, and the tensors, which must outlive it."""
    names = {field[0] for field in kind._fields_}
    assert content.keys() <= names, "ctypes ignores names that are not fields"
    kept = []
    values: dict[str, float | None] = {}
    for name, value in content.items():
        if not isinstance(value, Tensor):
            values[name] = value
            continue
        tensor = value.detach().contiguous()
        kept.append(tensor)
        values[name] = tensor.data_ptr()
        if f"{name}_format" in names:
            values[f"{name}_format"] = form_of(tensor)
    return kind(**values), kept


class DecoderLayer:
    """A packed pre-norm decoder layer: two kernel calls around an attention that the caller gives.

    Args:
        attention, mlp: float32 on the CPU. Only the projections of queries, keys and values may
            have biases.
        rotary_dim: the first entries of a head are rotated, in halves.
        eps: of all norms. gelu: tanh-approximated GELU in the MLP instead of SiLU.
        mlp_norm: [h] RMS-norm factor before the MLP.
        norms: other RMS-norm factors by name; a missing one is not applied. `input_norm` [h] is
            before the attention, `attended_norm` and `mlp_out_norm` [h] after attention and MLP
            (Gemma), `query_norm` and `key_norm` [e] per head (Qwen3, Gemma 3).

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
        width = attention.q_proj.in_features
        hidden = attention.o_proj.out_features
        inner = mlp.down_proj.in_features
        e = attention.head_dim
        self.head_dim = e
        self.heads = attention.q_proj.out_features // e
        self.kv_heads = attention.k_proj.out_features // e
        self.width = width
        self.hidden = hidden
        self.rotary_dim = rotary_dim
        grouped = self.kv_heads > 0 and self.heads % self.kv_heads == 0
        if not grouped or not 0 <= rotary_dim <= e or rotary_dim % 2:
            sizes = f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={e}, rotary_dim={rotary_dim}"
            raise ValueError(
                f"{sizes}: key heads must divide heads, and rotary_dim be even and at most head_dim"
            )

        rows = self.heads * e
        keys = self.kv_heads * e
        for name, module, size in (
            ("q_proj", attention.q_proj, (rows, width)),
            ("k_proj", attention.k_proj, (keys, width)),
            ("v_proj", attention.v_proj, (keys, width)),
            ("o_proj", attention.o_proj, (hidden, rows)),
            ("gate_proj", mlp.gate_proj, (inner, hidden)),
            ("up_proj", mlp.up_proj, (inner, hidden)),
            ("down_proj", mlp.down_proj, (hidden, inner)),
        ):
            check(name, module.weight.contiguous(), size)
            if module.bias is not None and (module not in projections or len(biases) != 3):
                raise ValueError(
                    f"{name} has a bias; only queries, keys and values together may have one"
                )
        norms["qkv_bias"] = torch.cat(biases) if biases else None
        norms["mlp_norm"] = mlp_norm
        # Others: h.
        lengths = {"qkv_bias": rows + 2 * keys, "input_norm": width, "query_norm": e, "key_norm": e}
        for name, factor in norms.items():
            if factor is not None:
                check(name, factor.contiguous(), (lengths.get(name, hidden),))

        qkv = torch.cat([module.weight for module in projections]).detach()
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach()
        self._layer, self._kept = make_struct(
            _Layer,
            qkv=pack_panels(qkv),
            o=pack_panels(attention.o_proj.weight.detach()),
            gate_up=pack_gated(gate_up),
            down=pack_panels(mlp.down_proj.weight.detach()),
            width=width,
            hidden=hidden,
            inner=inner,
            rotary_dim=rotary_dim,
            gelu=gelu,
            eps=eps,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=e,
            **norms,
        )
        self.address = ctypes.addressof(self._layer)
        self._kernels = built_kernels()

    def round_inputs(self) -> None:
        """Rounds inputs of bfloat16 weights to bfloat16 from now on; see `packing.form_of`."""
        for field in _Layer._fields_:
            name = field[0]
            if name.endswith("_format"):
                form = getattr(self._layer, name)
                setattr(self._layer, name, ROUNDED.get(form, form))

    def project(
        self,
        x: Tensor,
        cosine: Tensor,
        sine: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The half before the attention: norm, projections, rotation.

        Args:
            x: [n, width]. cosine, sine: [n, rotary_dim] or [n, 1, rotary_dim]. All float32 and
                contiguous.

        Returns:
            Query [n, heads, e], key and value [n, kv_heads, e], views of one buffer.
        """
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        check("x", x, (len(x), self.width))
        for name, table in (("cosine", cosine), ("sine", sine)):
            flat = table
            if table.dim() == 3:
                flat = table.squeeze(1)
            check(name, flat, (len(x), self.rotary_dim))
        out = x.new_empty(x.shape[0], sum(sizes), self.head_dim)
        self._kernels.layer_before_attention(
            self.address,
            x.data_ptr(),
            x.shape[0],
            cosine.data_ptr(),
            sine.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        query, key, value = out.split(sizes, dim=1)
        return query, key, value

    def finish(self, x: Tensor, attended: Tensor) -> None:
        """The half after the attention: adds output projection and MLP to x [n, h], in place.

        Args:
            attended: [n, heads * e].
        """
        attended = attended.contiguous()
        threads = torch.get_num_threads()
        check("x", x, (len(x), self.hidden))
        check(
            "attended",
            attended.flatten(),
            (len(x) * self.heads * self.head_dim,),
        )
        self._kernels.layer_after_attention(
            self.address,
            x.data_ptr(),
            attended.data_ptr(),
            x.shape[0],
            threads,
        )

    def forward(
        self,
        state: Tensor,
        read: Tensor,
        cosine: Tensor,
        sine: Tensor,
        attend: Attend,
        queries: Tensor | None = None,
    ) -> Tensor:
        """A full layer.

        Args:
            state: [n, h], the residual stream. read: [n, width], input of the projections; often
                `state` itself.
            queries: [m] int64 rows that need an output; None for all.

        Returns:
            [n or m, h].
        """
        query, key, value = self.project(read, cosine, sine)
        if queries is None:
            out = state.clone()  # [n, h], which `finish` changes
        else:
            out = state[queries]  # [m, h]
            query = query[queries]
        self.finish(out, attend(query, key, value))
        return out


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


class Ending:
    """The last norm and the head, which run in the same call as the layers.

    One call is faster than two: after each large call Python starts with cold caches.

    Args:
        norm, head: packed; the head as a kernel. rows: n, of the forward that it ends.

    Attributes:
        last: [n, h], the normed state, which `LayerStack.forward` fills.
        logits: [n, v], the head's products without its bias, likewise.

    Raises:
        ValueError: the head does not read what the norm gives.
    """

    def __init__(
        self,
        norm: PackedRMSNorm,
        head: PackedLinear,
        rows: int,
    ):
        panels = head.panels()
        hidden = len(norm.weight)
        vocabulary = head.out_features
        check_panels("head", panels, hidden, vocabulary)
        self.last = norm.weight.new_empty(rows, hidden)
        self.logits = norm.weight.new_empty(rows, vocabulary)
        self._kept = panels, norm.weight
        self.arguments = (  # of body_forward
            norm.weight.data_ptr(),
            norm.eps,
            self.last.data_ptr(),
            panels.data_ptr(),
            form_of(panels, head.rounded),
            self.logits.data_ptr(),
            vocabulary,
        )


_NO_ENDING = (None, 0.0, None, None, 0, None, 0)  # as Ending.arguments


class LayerStack:
    """All layers of a target in one call.

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
        ending: Ending | None = None,
        placed: bool = False,
    ) -> Tensor:
        """Runs the layers over x [n, h] in place and stores the new keys and values.

        Args:
            tables: cosine and sine [rows, rotary_dim] of each rotary table. A row is a token's, or a
                position's if they are `placed`, which the kernel then does.
            plan: where each token stands.
            buffers: of a cache, see `TreeCache.addresses`.
            wanted: ascending layers whose inputs are returned; the number of layers means the last
                layer's output.
            ending: runs after the layers; None for none.

        Returns:
            [n, len(wanted), h].
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
        if ending is not None:
            check("ending.last", ending.last, (n, hidden))
        caught = x.new_empty((n, len(wanted), hidden))
        rotary = array("Q")
        for cosine, sine in tables:
            rotary.extend((cosine.data_ptr(), sine.data_ptr()))
        features = array("q", wanted)
        after = _NO_ENDING if ending is None else ending.arguments
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
        return caught
