"""Block-parallel drafters: one pass over [last committed token, mask, mask, ...] drafts a whole block.

    anchor t, block of 4      context                        block
    position                  0 .. t-1   t                   t+1       t+2       t+3       t+4
    read                      f_0 ..     f_t                 x_{t+1}   mask      mask      mask
    predicts                                                           x_{t+2}   x_{t+3}   x_{t+4}

Fused target features, hidden_norm(fc features), give each layer the keys and values of the context, computed once per
committed token. The block's tokens see the context and each other, in both directions. A mask predicts the token at its own
position: depth k, at position t+2+k, is aligned with the target's distribution at position t+1+k. Embedding and head are the
target's.

Training draws anchors and places a block behind each; a block sees its context up to its anchor, and no other block.
Source: DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.batch import Batch, StepOutput, TokenTree, anchors_by_depth
from drafttrain.drafters.base import Source
from drafttrain.drafters.common.block_start import block_start
from drafttrain.drafters.common.configs import BlockConfig
from drafttrain.drafters.common.layer_session import CacheShape, LayerSession
from drafttrain.drafters.common.layers import Attend, DraftLayer, RMSNorm, Rotary
from drafttrain.drafters.common.target_weights import copy_layer, copy_norm, final_norm, head_rows, identity_on_last
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.common.tree_growth import GrowingTree, Logits, grow_trees
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.losses import TargetRows, linear_divergence
from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.packing import PackedLinear
from drafttrain.ops.path_attention import Spans, block_attention
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target


class TrainedBlocks(NamedTuple):
    """The m blocks of a training step and the t predictions in them that count.

    Attributes:
        anchors: [m] flat positions. live: [m, depth] bool, predictions that count.
        depth_of: [t] depths. at: [t] flat positions of the tokens before the predicted ones, which the target's
            distributions are aligned with.
        scale: each block's weight in the loss.
    """

    anchors: Tensor
    live: Tensor
    depth_of: Tensor
    at: Tensor
    scale: Tensor


class BlockDrafter(TrainableDrafter):
    """Both halves of the contract for kinds that draft blocks; `bind` attaches the target's embedding and head.

    A kind may let a prediction depend on the token before it (`readout` in training, `conditional` in decoding, which compute
    the same), and add a loss term (`other_loss`) with metrics (`measures`).
    """

    measures: tuple[str, ...] = ()
    config: BlockConfig

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        h, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.feature_layers) * h, h, bias=False)
        self.hidden_norm = RMSNorm(h, eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(h, eps)
        self.mask = nn.Parameter(torch.randn(h) * h**-0.5) if config.mask_token_id is None else None
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False) if config.train_head else None
        self.frozen: list[
            nn.Linear | PackedLinear
        ] = []  # the target's head; a list, so that it is neither trained nor saved
        self.feature_layers = tuple(config.feature_layers)
        self.register_buffer("kept_ids", torch.arange(config.draft_vocab_size))
        self.rotary = Rotary(config.head_dim, config.rope_parameters or {})
        self.cache_shape = CacheShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        self.logit_scale = 1.0  # the target's; its bare head rows lack it, the final norm applies it
        self.gradient_checkpointing = False
        self.packed = False
        self.post_init()

    @property
    def block_layers(self) -> list[DraftLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def head(self) -> nn.Linear | PackedLinear:
        """The linear layer over the drafter's vocabulary."""
        return self.lm_head if self.lm_head is not None else self.frozen[0]

    def bind(self, target: Target) -> None:
        """Checks the target and attaches its embedding and head."""
        super().bind(target)
        self.logit_scale = target.logit_scale
        if self.lm_head is None:
            rows = target.head_weight
            rows = rows if len(self.kept_ids) == len(rows) else rows[self.kept_ids.to(rows.device)]
            head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
            head.weight = nn.Parameter(rows.detach().to(target.device), requires_grad=False)
            self.frozen = [PackedLinear(head) if self.packed else head]

    def pack(self) -> None:
        """Packs layers, linear layers and norms for the CPU kernels (float32)."""
        if cpu_kernels() is not None and self.fc.weight.dtype == torch.float32 and self.fc.weight.device.type == "cpu":
            for layer in self.block_layers:
                layer.pack(self.rotary.width)
        super().pack()
        self.packed = True

    @torch.no_grad()
    def initialize(self, target: Target, kept_ids: Tensor) -> list[str]:
        """Copies the target's last layers and final norm, and its head rows if the head is trained.

        `fc` starts as the identity on the highest feature, under the input norm of the target's last layer, so that the
        context's keys and values are near that layer's own. A learned mask starts as the mean embedding.
        """
        self.kept_ids.copy_(kept_ids)
        identity_on_last(self.fc)
        names = ["fc"]
        if self.lm_head is not None:
            self.lm_head.weight.copy_(head_rows(target, kept_ids))
            names.append("lm_head")
        if self.mask is not None:
            self.mask.copy_(target.embed(kept_ids.to(target.device)).float().mean(0))
            names.append("mask")
        if copy_norm(self.norm, final_norm(target)):
            self.norm.weight.mul_(target.logit_scale)
            names.append("norm")
        if copy_norm(self.hidden_norm, getattr(target.layers[-1], "input_layernorm", None)):
            names.append("hidden_norm")
        ours = self.block_layers[-target.num_layers :]
        for i, (layer, theirs) in enumerate(zip(ours, target.layers[-len(ours) :], strict=True)):
            names += [f"layers.{i}.{name}" for name in copy_layer(layer, theirs)]
        return names

    def solve_start(self, batches: list[Batch], source: Source) -> float | None:
        return block_start(self, batches, source)

    # -- forward pass, shared by training and decoding ----------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """[t, f*h] target features -> [t, h], input of every layer's keys and values of the context."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def mask_embedding(self) -> Tensor:
        """[h], the input at positions to predict."""
        if self.mask is not None:
            return self.mask
        return self.embed(torch.tensor(self.config.mask_token_id, device=self.kept_ids.device)).to(self.fc.weight.dtype)

    def enter(self, roots: Tensor) -> Tensor:
        """[m, h] embeddings of last committed tokens -> [m * block size, h], input of the first layer."""
        mask = self.mask_embedding()
        return torch.cat((roots[:, None], mask.expand(len(roots), self.config.depth, -1)), dim=1).flatten(0, 1)

    def run(self, roots: Tensor, begins: Tensor, attends: Sequence[Attend]) -> Tensor:
        """All layers over m blocks.

        Args:
            roots: [m, h] embeddings of the blocks' first tokens; begins: [m] int64 their positions.
            attends: per layer, attention over each block's own tokens and its context; the last layer computes masks only.

        Returns:
            [m, depth, h], input of the head.
        """
        size = self.config.block_size
        state = self.enter(roots.to(self.fc.weight.dtype))
        positions = (begins[:, None] + torch.arange(size, device=begins.device)).flatten()
        cos, sin = self.rotary.tables(positions, state.dtype)
        masks = torch.arange(len(state), device=state.device).view(-1, size)[:, 1:].flatten()  # [m * depth]
        for layer, attend in zip(self.layers, attends, strict=True):
            queries = masks if layer is self.layers[-1] else None
            if self.gradient_checkpointing and self.training:
                state = self._gradient_checkpointing_func(layer, state, None, cos, sin, attend, queries)
            else:
                state = layer(state, None, cos, sin, attend, queries)
        return self.norm(state).view(-1, self.config.depth, state.shape[-1])

    def logits(self, reads: Tensor) -> Tensor:
        """[..., h] -> [..., d] over the drafter's vocabulary."""
        return self.head(reads.to(self.head.weight.dtype))

    def conditional(self, logits: Tensor, reads: Tensor, parents: Tensor) -> Logits:
        """Logits of the children of n nodes.

        Args:
            logits: [n, d] of the block at their depth, computed from reads [n, h]. parents: [n] int64 the nodes' target ids.
        """
        return logits

    def readout(self, reads: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [t, .] and weights [d, .] whose products are the logits of `conditional`; reads [t, h], parents [t]."""
        return reads, self.head.weight

    def other_loss(self, hidden: Tensor, alpha: Tensor | None, weight: Tensor) -> tuple[Tensor | float, list[Tensor]]:
        """A kind's second loss term, and its metrics of each prediction, [t] each, named by `measures`.

        Args:
            hidden: [t, .] of `readout`; weight: [t] float32, of each prediction in the loss.
            alpha: [t] acceptance rates; None if not measured.
        """
        return 0.0, []

    # -- training half ------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: Batch,
        embeds: Tensor,
        features: Tensor,
        rows: TargetRows,
        row_of: Tensor,
        count: Tensor | float,
        measure: bool = True,
    ) -> StepOutput:
        """One pass over a block behind each drawn anchor; see `Drafter.forward`."""
        drawn = self.draw(batch.response_mask, count)
        valid, place = batch.anchors()  # [t] flat positions, and positions in their conversations
        own = torch.searchsorted(valid, drawn.anchors)  # [m] indices into `valid`
        begin = own - place[own]  # [m] index of each conversation's first token
        context = self.fuse(features.flatten(0, 1)[valid])  # [t, h]
        tables = self.rotary.tables(place, context.dtype)
        attends = [_over_context(layer, context, tables, Spans(begin, own, begin)) for layer in self.block_layers]
        roots = embeds.flatten(0, 1)[drawn.anchors + 1]
        reads = self.run(roots, place[own] + 1, attends)[drawn.live]  # [t, h] of the predictions that count

        at, parents = row_of.flatten()[drawn.at], batch.input_ids.flatten()[drawn.at]
        hidden, head = self.readout(reads, parents)
        weight = self.weigh(drawn, hidden, head, rows, at)
        wanted = measure or bool(self.measures)
        out = linear_divergence(hidden, head, rows, at, weight, self.config.loss, measure=wanted)
        more, measured = self.other_loss(hidden, out.alpha, weight)
        if out.alpha is None or out.agree is None or not measure:
            return StepOutput(out.loss + more, {})
        values = torch.stack((torch.ones_like(out.values), out.values, out.alpha, out.agree.float(), *measured), dim=1)
        sums = values.new_zeros(self.config.depth, values.shape[1]).index_add_(0, drawn.depth_of, values.detach())
        names = ("count", "loss", "alpha", "agree", *self.measures)
        return StepOutput(out.loss + more, dict(zip(names, sums.unbind(1), strict=True)))

    def draw(self, response_mask: Tensor, count: Tensor | float) -> TrainedBlocks:
        """Chooses the blocks of a step: in training every n-th anchor from a random one on, otherwise all."""
        depth, share = self.config.depth, self.config.anchor_share if self.training else 1.0
        by_depth = anchors_by_depth(response_mask, depth)
        anchors = by_depth[0]
        if share < 1:
            steps = torch.arange(len(anchors) + 1, device=anchors.device, dtype=torch.float64) * share
            anchors = anchors[(steps + torch.rand((), dtype=torch.float64).to(steps.device)).floor().diff() > 0]
        reach = torch.zeros(response_mask.numel(), dtype=torch.long, device=anchors.device)  # depths that count
        for reached in by_depth:
            reach[reached] += 1
        depths = torch.arange(depth, device=anchors.device)
        live = depths < reach[anchors][:, None]
        at = (anchors[:, None] + 1 + depths)[live]
        scale = 1.0 / (torch.as_tensor(count, device=anchors.device) * share)
        return TrainedBlocks(anchors, live, depths.expand_as(live)[live], at, scale)

    def weigh(self, drawn: TrainedBlocks, hidden: Tensor, head: Tensor, rows: TargetRows, at: Tensor) -> Tensor:
        """[t] float32, weight of each prediction in the loss; see `BlockConfig.weighting`."""
        config = self.config
        depths = torch.arange(config.depth, device=at.device)
        if config.weighting == "exp":
            decay = torch.exp(-depths / config.gamma)
            return (decay / decay.sum() * drawn.scale)[drawn.depth_of]
        with torch.no_grad():
            ones = torch.ones(len(at), device=at.device)
            ce = linear_divergence(hidden.detach(), head.detach(), rows, at, ones, "ce", measure=False).values
            right = torch.where(rows.sampled_at(at) >= 0, (-ce).exp(), 0.0)
            smooth = ones.new_ones(drawn.live.shape)
            smooth[drawn.live] = ((1 - config.dpace_alpha) * right + config.dpace_alpha).float()
            reached = smooth.cumprod(1) * drawn.live
            deeper = reached.flip(1).cumsum(1).flip(1)
            return deeper[drawn.live] / config.depth * drawn.scale

    # -- proposal half ------------------------------------------------------------------------------------------

    def start(self, prompt_ids: Tensor, max_length: int) -> BlockSession:
        return BlockSession(self, self.cache_shape, max_length + self.config.block_size)

    @torch.no_grad()
    def extend_all(
        self, sessions: Sequence[BlockSession], tokens: Sequence[Tensor], features: Sequence[Tensor]
    ) -> None:
        """Keys and values of the new context, of all sessions at once."""
        sizes = [len(new) for new in tokens]
        starts = [session.length for session in sessions]
        context = self.fuse(torch.cat(list(features)))
        positions = torch.cat([torch.arange(begin, begin + size) for begin, size in zip(starts, sizes, strict=True)])
        cos, sin = self.rotary.tables(positions.to(context.device), context.dtype)
        for i, layer in enumerate(self.block_layers):
            parts = (new.split(sizes) for new in layer.self_attn.keys_values(context, cos, sin))
            for session, key, value in zip(sessions, *parts, strict=True):
                session.store(i, session.length, key, value)
        for session, new in zip(sessions, tokens, strict=True):
            session.length += len(new)
            session.last = new[-1:]

    @torch.no_grad()
    def propose_all(
        self, sessions: Sequence[BlockSession], specs: Sequence[TreeSpec], samplers: Sequence[Sampler | None]
    ) -> list[TokenTree]:
        """One pass drafts the blocks of all sessions; their trees then grow without the layers."""
        deepest = max(1, min(self.config.depth, max(spec.depth for spec in specs)))
        roots = torch.cat([session.root for session in sessions])
        begins = torch.tensor([session.length for session in sessions], device=roots.device)
        attends = [_over_sessions(sessions, i) for i in range(len(self.layers))]
        reads = self.run(self.embed(roots), begins, attends)[:, :deepest]
        block = self.logits(reads)  # [sessions, deepest, d]
        first = self.conditional(block[:, 0], reads[:, 0], roots)
        trees = [
            GrowingTree(spec, _part(first, row), self.kept_ids, sampler, self.config.depth, row)
            for row, (spec, sampler) in enumerate(zip(specs, samplers, strict=True))
        ]

        def step(growing: list[GrowingTree], depth: int) -> list[Logits]:
            sizes = [len(tree.parents) for tree in growing]
            rows = torch.tensor(
                [tree.row for tree in growing for _ in tree.parents], device=roots.device
            )  # [n] sessions
            tokens = self.kept_ids[torch.cat([tree.tokens for tree in growing])]  # [n] target ids
            logits = self.conditional(block[rows, depth], reads[rows, depth], tokens)
            ends = [0, *accumulate(sizes)]
            return [_part(logits, slice(begin, end)) for begin, end in pairwise(ends)]

        return grow_trees(trees, step)


class BlockSession(LayerSession):
    """One sequence's context. A round's block stores its keys and values behind it, and the next context overwrites them.

    Attributes:
        last: [1] int64, the last committed token.
    """

    def attend_all(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of a block [m, heads, e] over the context and all of the block -> [m, heads * e]."""
        (m, heads, e), end = query.shape, self.length + len(key)
        self.store(layer, self.length, key, value)
        keys, values = (buffer[None, :, :end] for buffer in self.layers[layer])
        # Query heads of a group become rows, so that keys and values are read once and never repeated.
        kv = self.shape.kv_heads
        folded = query.view(m, kv, heads // kv, e).permute(1, 2, 0, 3).reshape(1, kv, -1, e)
        out = F.scaled_dot_product_attention(folded, keys, values)
        return out.view(kv, heads // kv, m, e).permute(2, 0, 1, 3).reshape(m, heads * e)


def _part(logits: Logits, where: int | slice) -> Logits:
    return (logits[0][where], logits[1][where]) if isinstance(logits, tuple) else logits[where]


def _over_context(layer: DraftLayer, context: Tensor, tables: tuple[Tensor, Tensor], spans: Spans) -> Attend:
    """Attention of training's blocks, each over its span of context states [t, h]."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        base_key, base_value = layer.self_attn.keys_values(context, *tables)
        return block_attention(query, key, value, base_key, base_value, spans)

    return attend


def _over_sessions(sessions: Sequence[BlockSession], layer: int) -> Attend:
    """Attention of decoding's blocks, each over its session's keys and its own."""
    count = len(sessions)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(sessions, query.chunk(count), key.chunk(count), value.chunk(count), strict=True)
        outs = [session.attend_all(layer, *own) for session, *own in parts]
        return torch.cat(outs)

    return attend
