"""One depth of a drafter with decoder layers as one kernel call of ops/cpu_layers.c.

A depth over a few tokens reads some megabytes of weights in half a millisecond; forty torch operations around them took
longer than that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.ops.decoder_layer import DecoderLayer
from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.packing import FORMATS, pack_panels
from drafttrain.ops.tree_attention import CpuPlan


@dataclass
class DraftWeights:
    """What surrounds the layers; all float32 on the CPU.

    Attributes:
        head: [d, h], from the output to logits. beside: width of the embeddings that are read.
        embed_norm, state_norm: RMS-norm factors of what is read; norm: of the last layer's output; or None.
        project: [h, beside + h], from embedding and state, joined, to a state; None where the first layer reads them joined.
        hands_on_normed: the next depth reads the output behind `norm`. eps: of all norms.
    """

    head: Tensor
    beside: int
    eps: float
    embed_norm: Tensor | None = None
    state_norm: Tensor | None = None
    norm: Tensor | None = None
    project: Tensor | None = None
    hands_on_normed: bool = False


_VECTORS, _PANELS = ("embed_norm", "state_norm", "norm"), ("project", "head")


class _Draft(ctypes.Structure):
    """struct draft of cpu_layers.c."""

    _fields_ = [
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in (*_VECTORS, *_PANELS)),
        *(
            (name, ctypes.c_int)
            for name in ("count", "beside", "hidden", "project_format", "head_format", "hands_on_normed")
        ),
        ("vocabulary", ctypes.c_long),
        ("eps", ctypes.c_float),
    ]


class DraftStep:
    """The kernel and its weights."""

    def __init__(self, layers: Sequence[DecoderLayer], weights: DraftWeights):
        self.vocabulary, self.hidden = weights.head.shape
        addresses = (ctypes.c_void_p * len(layers))(*(layer.address for layer in layers))
        vectors = {name: getattr(weights, name) for name in _VECTORS}
        panels = {name: pack_panels(getattr(weights, name)) for name in _PANELS if getattr(weights, name) is not None}
        kept = {name: value.detach().contiguous() for name, value in (vectors | panels).items() if value is not None}
        self._kept = (layers, addresses, kept)
        self._struct = _Draft(
            layers=ctypes.addressof(addresses),
            **{name: value.data_ptr() for name, value in kept.items()},
            **{f"{name}_format": FORMATS[value.dtype] for name, value in panels.items()},
            count=len(layers),
            beside=weights.beside,
            hidden=self.hidden,
            hands_on_normed=weights.hands_on_normed,
            vocabulary=self.vocabulary,
            eps=weights.eps,
        )
        self._address = ctypes.addressof(self._struct)
        self._kernels = cpu_kernels()

    def run(
        self,
        embeds: Tensor,
        states: Tensor,
        tables: tuple[Tensor, Tensor],
        buffers: Sequence[tuple[Tensor, Tensor]],
        plan: CpuPlan,
        window: int,
        asking: int,
    ) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values and computes a depth; all tensors float32 and contiguous.

        Args:
            embeds: [n, beside]; states: [n, h].
            tables: cosine and sine [positions, 1, rotary_dim] of all positions from 0 on.
            buffers: keys and values [kv_heads, slots, e] of each layer, all of one shape.
            plan: of this sequence, where the tokens stand. window: visible positions, 0 for all.
            asking: how many of the last tokens need logits.

        Returns:
            What the next depth reads [n, h], and logits [asking, d].
        """
        n = states.shape[0]
        out, logits = torch.empty(n, self.hidden), torch.empty(asking, self.vocabulary)
        keys, values = zip(*buffers, strict=True)
        pointers = ctypes.c_void_p * len(buffers)
        parts, _, ancestors, depths = plan.pointers
        self._kernels.draft_step(  # type: ignore[union-attr]
            *(self._address, embeds.data_ptr(), states.data_ptr(), n, tables[0].data_ptr(), tables[1].data_ptr()),
            *(pointers(*(key.data_ptr() for key in keys)), pointers(*(value.data_ptr() for value in values))),
            *(keys[0].stride(0), parts, ancestors, depths, window),
            *(out.data_ptr(), logits.data_ptr(), asking, torch.get_num_threads()),
        )
        return out, logits
