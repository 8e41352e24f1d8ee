"""The target's body with fused operations between its products, for decoding on a GPU.

    a layer      add_norm   q k v   rotate_heads (2)   attention   o   add_norm   gate up   gate   down
    launches of a Llama's, attention and cache left out: 12 in place of 39

A decoding step on a GPU waits for launches, and for the start and end of each small kernel, longer
than small kernels compute. The products stay the model's own modules, so quantized and adapted ones
serve as well; an MLP of another form (a mixture of experts) runs as it is. As in native_body.py a
layer qualifies by its modules and by a proof, not by a family's name: each layer, given the state
that the model's own forward gave it, must return what it returned. A model that differs in anything
keeps transformers' forward.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from drafttrain.batch import TargetOutput
from drafttrain.errors import first_line
from drafttrain.ops.cpu_layers import AttentionModule, GatedMLP
from drafttrain.ops.layer_ops import NormForm, Tables, add_norm, gate, rotate_heads
from drafttrain.ops.packing import without_grad
from drafttrain.ops.tree_attention import AttentionForm
from drafttrain.target.attention import LAST, AttentionContext, CausalRows
from drafttrain.target.native_body import (
    MLP_PARTS,
    PROOF_TOKENS,
    LayerParts,
    RotaryTables,
    by_role,
    is_gelu,
    record_proofs,
)
from drafttrain.target.proof import ProvenModel

logger = logging.getLogger(__name__)

# Largest error of a layer's output, relative to what it adds, and to its output where that was
# rounded: in float32 and in half precision. Other positions or factors give 0.1 and more.
_ADDED = (1e-3, 2e-2)
_ROUNDED = (1e-5, 2**-8)


@dataclass(frozen=True)
class FusedLayer:
    """A pre-norm decoder layer as its modules and the forms of its norms.

    Attributes:
        mlp: run as it is, unless it is of gate, up and down.
        form: how the layer attends.
        gelu: whether that is the activation of a gated MLP, not SiLU; None for another MLP.
        attended_norm, mlp_out_norm: of what attention and MLP add (Gemma), before it is added.
    """

    attention: AttentionModule
    mlp: nn.Module
    form: AttentionForm
    gelu: bool | None
    input_norm: NormForm
    mlp_norm: NormForm
    attended_norm: NormForm | None
    mlp_out_norm: NormForm | None
    query_norm: NormForm | None
    key_norm: NormForm | None

    @staticmethod
    def of(module: nn.Module, form: AttentionForm) -> FusedLayer | None:
        """None for a layer with other modules than these."""
        parts = LayerParts.of(module)
        if parts is None:
            return None
        norms: dict[str, NormForm] = {}
        for name, part in parts.norms.items():
            norm = NormForm.of(part)
            if norm is None:
                return None
            norms[name] = norm
        gelu = None
        if {name for name, _ in parts.mlp.named_children()} == MLP_PARTS:
            gelu = is_gelu(parts.mlp.get_submodule("act_fn"))
        return FusedLayer(
            parts.attention,
            parts.mlp,
            form,
            gelu,
            **by_role(norms),
        )

    def forward(
        self,
        index: int,
        state: Tensor,
        read: Tensor,
        tables: Tables,
        context: AttentionContext,
    ) -> Tensor:
        """What the MLP adds to the state, which the attention's share is added to in place.

        Args:
            index: of the layer. state: [n, h]. read: [n, h], its input norm.
        """
        attention = self.attention
        shape = (len(read), -1, attention.head_dim)
        query = rotate_heads(attention.q_proj(read).view(shape), tables, self.query_norm)
        key = rotate_heads(attention.k_proj(read).view(shape), tables, self.key_norm)
        value = attention.v_proj(read).view(shape)
        attended = context.attend(
            index,
            query.transpose(0, 1)[None],  # [1, heads, n, e]
            key.transpose(0, 1)[None],  # [1, kv_heads, n, e]
            value.transpose(0, 1)[None],
            **self.form,
        )
        added = attention.o_proj(attended.reshape(len(read), -1))
        if self.attended_norm is not None:
            added = add_norm(added, None, self.attended_norm)

        read = add_norm(state, added, self.mlp_norm)
        added = self._transform(read)
        if self.mlp_out_norm is not None:
            added = add_norm(added, None, self.mlp_out_norm)
        return added

    def _transform(self, read: Tensor) -> Tensor:
        if self.gelu is not None:
            mlp = cast(GatedMLP, self.mlp)
            return mlp.down_proj(gate(mlp.gate_proj(read), mlp.up_proj(read), self.gelu))
        out = self.mlp(read[None])
        if isinstance(out, tuple):  # a mixture of experts may return its router's scores, too
            out = out[0]
        return out[0]


class FusedBody:
    """The layers of a target on one GPU, ready to run on [1, n] tokens with an attention context.

    It holds no state of a call, and no copy of a weight.

    Args:
        norm: behind the last layer.
        halved: the model's rotary tables hold each angle once (gpt-oss), not once for either half.
    """

    def __init__(
        self,
        target: ProvenModel,
        layers: list[FusedLayer],
        norm: NormForm,
        rotary: RotaryTables,
        halved: bool,
    ):
        self.embed = target.model.get_input_embeddings()
        self.layers = layers
        self.norm = norm
        self.rotary = rotary
        self.halved = halved

    @staticmethod
    @torch.no_grad()
    def of(target: ProvenModel) -> FusedBody | None:
        """None if the layers are of another kind, are spread over devices, or the proof fails."""
        try:
            return _proven(target)
        except Exception as error:  # modules of the same names may take other arguments
            logger.info("target %r keeps its own layers: %s", target.name, first_line(error))
            return None

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
        state = self.embed(input_ids)[0].contiguous()  # [n, h]
        tables = self.tables(state, position_ids)
        caught: dict[int, Tensor] = {}  # features [1, n, h] by layer
        added: Tensor | None = None  # by the layer before
        for index, layer in enumerate(self.layers):
            read = add_norm(state, added, layer.input_norm)
            if index in feature_layers:
                caught[index] = state[None].clone()
            at = tables[self.rotary.of_layer[index]]
            added = layer.forward(index, state, read, at, context)
        last = add_norm(state, added, self.norm)[None]  # [1, n, h]
        caught[len(self.layers)] = state[None]
        caught[LAST] = last
        return TargetOutput.of(caught, feature_layers, last)

    def tables(self, state: Tensor, position_ids: Tensor) -> list[Tables]:
        """Cosine and sine [n, r] of each rotary table at positions [1, n]."""
        made = self.rotary.compute(state[None], position_ids)
        if not self.halved:
            return made
        return [(cosine.repeat(1, 2), sine.repeat(1, 2)) for cosine, sine in made]


def _proven(target: ProvenModel) -> FusedBody | None:
    """`FusedBody.of`; other modules may raise anything."""
    devices = {weight.device for weight in target.model.parameters()}
    norm = NormForm.of(getattr(target.body, "norm", nn.Identity()))
    if len(devices) != 1:
        return None
    if norm is None:
        return None
    layers: list[FusedLayer] = []
    for module, form in zip(target.layers, target.forms, strict=True):
        layer = FusedLayer.of(module, form)
        if layer is None:
            return None
        layers.append(layer)
    recorded = record_proofs(target)
    if recorded is None:
        return None
    rotary, proofs = recorded
    for halved in (False, True):
        body = FusedBody(target, layers, norm, rotary, halved)
        if all(_reproduced(body, *proof) for proof in proofs):
            return body
    return None


def _reproduced(
    body: FusedBody,
    ids: Tensor,
    positions: Tensor,
    want: TargetOutput,
) -> bool:
    """Whether each part of a body returns what the model's own did, in the forward `want`.

    Each is given what the model's own part was given, so that rounding does not add up.
    """
    states = want.features[0].unflatten(1, (len(body.layers) + 1, -1))  # [n, layers + 1, h]
    first = body.embed(ids)[0]
    if not torch.equal(first, states[:, 0]):
        return False
    tables = body.tables(first, positions)
    for index, layer in enumerate(body.layers):
        given = states[:, index].clone(memory_format=torch.contiguous_format)
        read = add_norm(given, None, layer.input_norm)
        at = tables[body.rotary.of_layer[index]]
        added = layer.forward(index, given, read, at, CausalRows(PROOF_TOKENS))
        agree = _agree(given + added, states[:, index + 1], states[:, index])
        # Rounding may send a token to other experts.
        share = 1.0 if layer.gelu is not None or first.dtype == torch.float32 else 0.5
        if agree.float().mean() < share:
            return False
    last = want.last_hidden[0]
    ours = add_norm(states[:, -1].contiguous(), None, body.norm)
    return bool(_agree(ours, last, torch.zeros_like(last)).all())


def _agree(ours: Tensor, theirs: Tensor, before: Tensor) -> Tensor:
    """Whether outputs [n, h] of a layer agree, by token [n]; `before` is its input."""
    half = theirs.dtype.itemsize < 4
    ours, theirs, before = ours.float(), theirs.float(), before.float()
    allowed = _ADDED[half] * (theirs - before).norm(dim=1) + _ROUNDED[half] * theirs.norm(dim=1)
    return (ours - theirs).norm(dim=1) <= allowed
