"""A decoder layer on a CPU as two calls of cpu_layers.c, around an attention that the caller gives.

    DecoderLayer   norm, projections, rotation | attention | output projection, norm, gated MLP

Drafters' and targets' layers are packed alike; calls over all layers read them by their addresses
(cpu_draft.py, target/native_body.py). An object holds packed weights and nothing else. Everything
that belongs to a call (positions of tokens, the addresses of the cache, outputs) is an argument or
is allocated by the call, because ctypes releases the GIL: threads share the weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from drafttrain.ops.layer_ops import Tables
from drafttrain.ops.native import built_kernels
from drafttrain.ops.packing import (
    ROUNDED,
    check,
    form_of,
    pack_gated,
    pack_panels,
)

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
        tables: Tables,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The half before the attention: norm, projections, rotation.

        Args:
            x: [n, width]. tables: cosine, sine [n, rotary_dim] or [n, 1, rotary_dim]. All float32 and
                contiguous.

        Returns:
            Query [n, heads, e], key and value [n, kv_heads, e], views of one buffer.
        """
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        check("x", x, (len(x), self.width))
        cosine, sine = tables
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
        tables: Tables,
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
        query, key, value = self.project(read, tables)
        if queries is None:
            out = state.clone()  # [n, h], which `finish` changes
        else:
            out = state[queries]  # [m, h]
            query = query[queries]
        self.finish(out, attend(query, key, value))
        return out
