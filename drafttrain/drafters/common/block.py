"""The backbone of block-parallel drafters: one pass over [last committed token, mask, mask, ...] drafts a whole block.

    anchor t, block of 4      context                        block
    position                  0 .. t-1   t                   t+1       t+2       t+3       t+4
    read                      f_0 ..     f_t                 x_{t+1}   mask      mask      mask
    predicts                                                           x_{t+2}   x_{t+3}   x_{t+4}

Fused target features, hidden_norm(fc features), give each layer keys and values of the context, made once per committed
token. The block's tokens see all of them and each other, in both directions. What a mask predicts is the token of its own
place: depth k, at position t+2+k, is aligned with the target's distribution at position t+1+k. Embedding and head are the
target's.

Training draws anchors and lays a block behind each; the blocks of a row see the context up to their anchor, and not each other.
Source: DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.batch import Batch, StepOutput, TargetOutput, TokenTree
from drafttrain.drafters.common.block_config import BlockConfig
from drafttrain.drafters.common.block_start import block_start
from drafttrain.drafters.common.expand import Said, grow
from drafttrain.drafters.common.layer_session import CacheShape, LayerSession
from drafttrain.drafters.common.layers import MLP, Attend, Attention, RMSNorm, Rotary
from drafttrain.drafters.common.linear_start import Source
from drafttrain.drafters.common.shared import anchors_by_depth, copy_layer, copy_norm
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.losses import TargetRows, linear_divergence
from drafttrain.ops.block_attention import block_attention
from drafttrain.ops.cpu_layers import DecoderLayer, LayerWeights
from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.packing import SKINNY_ROWS, PackedLinear
from drafttrain.ops.path_attention import Spans
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target


class BlockLayer(nn.Module):
    """A pre-norm decoder layer whose attention norms queries and keys; names follow the published checkpoints."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.input_layernorm = RMSNorm(h, eps)
        self.self_attn = Attention(h, h, heads, kv_heads, config.head_dim, norm_eps=eps)
        self.post_attention_layernorm = RMSNorm(h, eps)
        self.mlp = MLP(h, config.intermediate_size)
        self.native: DecoderLayer | None = None

    def pack(self, rotary_dim: int) -> None:
        """Readies the layer for inference on a CPU: from now on few rows take two kernel calls around the attention."""
        attention, norm = self.self_attn, self.post_attention_layernorm
        weights = LayerWeights.of(
            attention,
            self.mlp,
            rotary_dim=rotary_dim,
            eps=norm.eps,
            input_norm=self.input_layernorm.weight,
            mlp_norm=norm.weight,
            query_norm=attention.q_norm.weight,
            key_norm=attention.k_norm.weight,
        )
        self.native = DecoderLayer(weights)

    def forward(self, state: Tensor, cos: Tensor, sin: Tensor, attend: Attend, queries: Tensor | None = None) -> Tensor:
        """state [t, h] of block tokens -> [t, h], or of the rows in `queries` only; attend knows the context."""
        if self.native is not None and len(state) <= SKINNY_ROWS:
            return self.native.forward(state, state, cos, sin, attend, queries)
        attended = self.self_attn(self.input_layernorm(state), cos, sin, attend, queries)
        state = (state if queries is None else state[queries]) + attended
        return state + self.mlp(self.post_attention_layernorm(state))


class Drawn(NamedTuple):
    """The blocks that a step trains on, and which of their predictions count, t in all.

    Attributes:
        anchors: [m] flat positions. live: [m, depth] bool, what counts.
        depth_of: [t] depths. at: [t] flat positions of the tokens before those that are predicted; the target's distributions
            there are what the predictions are aligned with.
        scale: each block's weight in the loss.
    """

    anchors: Tensor
    live: Tensor
    depth_of: Tensor
    at: Tensor
    scale: Tensor


class BlockDrafter(TrainableDrafter):
    """Both halves of a kind that drafts blocks. The target's embedding, and its head unless trained, are given by `bind`.

    A kind may let a prediction depend on the token before it (`readout` in training, `conditional` in decoding, which compute
    the same), and add to the loss (`beside`).
    """

    measures: tuple[str, ...] = ()
    config: BlockConfig

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        h, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.feature_layers) * h, h, bias=False)
        self.hidden_norm = RMSNorm(h, eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(h, eps)
        self.mask = nn.Parameter(torch.randn(h) * h**-0.5) if config.mask_token_id is None else None
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False) if config.train_head else None
        self.frozen: list[Any] = []  # the target's head otherwise: in a list, so that it is neither trained nor saved
        self.feature_layers = tuple(config.feature_layers)
        self.register_buffer("kept_ids", torch.arange(config.draft_vocab_size))
        self.rotary = Rotary(config.head_dim, config.rope_parameters)
        self.cache_shape = CacheShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        self.logit_scale = 1.0  # of the target, which its bare head rows lack; the final norm brings it
        self.gradient_checkpointing = False
        self.packed = False
        self.post_init()

    @property
    def head(self) -> Any:
        """The linear layer over the drafter's vocabulary."""
        return self.lm_head if self.lm_head is not None else self.frozen[0]

    def bind(self, target: Target) -> None:
        """Checks that this drafter was made for the target and borrows its embedding and head."""
        super().bind(target)
        self.logit_scale = target.logit_scale
        if self.lm_head is None:
            rows = target.head_weight
            rows = rows if len(self.kept_ids) == len(rows) else rows[self.kept_ids.to(rows.device)]
            head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
            head.weight = nn.Parameter(rows.detach().to(target.device), requires_grad=False)
            self.frozen = [PackedLinear(head) if self.packed else head]

    def pack(self) -> None:
        """Readies the drafter for inference on a CPU in float32; elsewhere linear layers and norms as far as served."""
        if cpu_kernels() is not None and self.fc.weight.dtype == torch.float32 and self.fc.weight.device.type == "cpu":
            for layer in self.layers:
                layer.pack(self.rotary.width)  # type: ignore[operator]
        super().pack()
        self.packed = True

    @torch.no_grad()
    def initialize(self, target: Target, kept_ids: Tensor) -> list[str]:
        """Starts from the target: its last layers and final norm, its head's rows if the head is trained.

        `fc` starts as the identity on the highest feature under the norm that the target's last layer has for its input, so
        that the context's keys and values are near that layer's own. A learned mask starts as the mean embedding. Returns
        the names of what was copied.
        """
        self.kept_ids.copy_(kept_ids)
        h = self.config.hidden_size
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -h:].add_(torch.eye(h))
        names = ["fc"]
        if self.lm_head is not None:
            self.lm_head.weight.copy_(target.head_weight[kept_ids])
            names.append("lm_head")
        if self.mask is not None:
            self.mask.copy_(target.embed(kept_ids.to(target.device)).float().mean(0))
            names.append("mask")
        if copy_norm(self.norm, getattr(target.body, "norm", None)):
            self.norm.weight.mul_(target.logit_scale)
            names.append("norm")
        if copy_norm(self.hidden_norm, getattr(target.layers[-1], "input_layernorm", None)):
            names.append("hidden_norm")
        ours: list[Any] = list(self.layers)[-target.num_layers :]
        for i, (layer, theirs) in enumerate(zip(ours, target.layers[-len(ours) :], strict=True)):
            names += [f"layers.{i}.{name}" for name in copy_layer(layer, theirs)]
        return names

    def solve_start(self, batches: list[Batch], source: Source) -> float:
        """Fits a linear guess in closed form, see `block_start`; returns the share of variance explained."""
        return block_start(self, batches, source)

    # -- the one forward ----------------------------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """[t, f*h] target features -> [t, h], what every layer's keys and values of the context are made from."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def mask_embedding(self) -> Tensor:
        """[h], what stands where a token is to be predicted."""
        if self.mask is not None:
            return self.mask
        return self.embed(torch.tensor(self.config.mask_token_id, device=self.kept_ids.device)).to(self.fc.weight.dtype)

    def enter(self, roots: Tensor) -> Tensor:
        """[m, h] embeddings of last committed tokens -> [m * B, h], the blocks as the first layer reads them."""
        mask = self.mask_embedding()
        return torch.cat((roots[:, None], mask.expand(len(roots), self.config.depth, -1)), dim=1).flatten(0, 1)

    def run(self, roots: Tensor, begins: Tensor, attends: Sequence[Attend]) -> Tensor:
        """All layers over m blocks.

        Args:
            roots: [m, h] embeddings of the blocks' first tokens; begins: [m] int64 their positions.
            attends: per layer, attention over each block's own tokens and its context; the last is asked for masks only.

        Returns:
            [m, depth, h], what the head reads.
        """
        size = self.config.block_size
        state = self.enter(roots.to(self.fc.weight.dtype))
        positions = (begins[:, None] + torch.arange(size, device=begins.device)).flatten()
        cos, sin = self.rotary.tables(positions, state.dtype)
        masks = torch.arange(len(state), device=state.device).view(-1, size)[:, 1:].flatten()
        for layer, attend in zip(self.layers, attends, strict=True):
            queries = masks if layer is self.layers[-1] else None
            if self.gradient_checkpointing and self.training:
                state = self._gradient_checkpointing_func(layer, state, cos, sin, attend, queries)
            else:
                state = layer(state, cos, sin, attend, queries)
        return self.norm(state).view(-1, self.config.depth, state.shape[-1])

    def logits(self, reads: Tensor) -> Tensor:
        """[..., h] -> [..., d] over the drafter's vocabulary."""
        return self.head(reads.to(self.head.weight.dtype))

    def conditional(self, logits: Tensor, reads: Tensor, parents: Tensor) -> Said:
        """What the drafter says below nodes.

        Args:
            logits: [n, d] of the block at their depth; reads: [n, h], what those were made from.
            parents: [n] int64 target ids of the nodes themselves.
        """
        return logits

    def readout(self, reads: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [t, .] and weights [d, .] whose products are the logits of `conditional`; reads [t, h], parents [t]."""
        return reads, self.head.weight

    def beside(self, hidden: Tensor, alpha: Tensor | None, weight: Tensor) -> tuple[Tensor | float, list[Tensor]]:
        """What a kind adds to the loss, and what it measures of each prediction: [t] each, named by `measures`.

        Args:
            hidden: [t, .] of `readout`; weight: [t] float32, of each prediction in the loss.
            alpha: [t] their acceptance rates; None if they were not asked for and the kind has no `measures`.
        """
        return 0.0, []

    # -- training half ------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: Batch,
        embeds: Tensor,
        output: TargetOutput,
        rows: TargetRows,
        row_of: Tensor,
        count: Tensor | float,
        measure: bool = True,
    ) -> StepOutput:
        """One pass over a block behind each drawn anchor.

        Args:
            batch: [b, s] tokens and masks; embeds: [b, s, h] of its tokens; output: the target's features.
            rows: the target's distributions; row_of: [b, s] int64, the row of each position (-1 where none is needed).
            count: anchors in the whole optimizer step, over all ranks and accumulation steps.
            measure: also return metrics.

        Returns:
            Loss (depth-weighted, divided by count) and per-depth sums: count, loss, alpha, agree; each [depth].
        """
        drawn = self.draw(batch.response_mask, count)
        valid, place = batch.anchors()
        own = torch.searchsorted(valid, drawn.anchors)
        begin = own - place[own]
        context = self.fuse(output.features.flatten(0, 1)[valid])
        tables = self.rotary.tables(place, context.dtype)
        attends = [_over_context(layer, context, tables, Spans(begin, own, begin)) for layer in self.layers]
        roots = embeds.flatten(0, 1)[drawn.anchors + 1]
        reads = self.run(roots, place[own] + 1, attends)[drawn.live]

        at, parents = row_of.flatten()[drawn.at], batch.input_ids.flatten()[drawn.at]
        hidden, head = self.readout(reads, parents)
        weight = self.weigh(drawn, hidden, head, rows, at)
        wanted = measure or bool(self.measures)
        out = linear_divergence(hidden, head, rows, at, weight, self.config.loss, measure=wanted)
        more, measured = self.beside(hidden, out.alpha, weight)
        if out.alpha is None or out.agree is None or not measure:
            return StepOutput(out.loss + more, {})
        values = torch.stack((torch.ones_like(out.values), out.values, out.alpha, out.agree.float(), *measured), dim=1)
        sums = values.new_zeros(self.config.depth, values.shape[1]).index_add_(0, drawn.depth_of, values.detach())
        names = ("count", "loss", "alpha", "agree", *self.measures)
        return StepOutput(out.loss + more, dict(zip(names, sums.unbind(1), strict=True)))

    def draw(self, response_mask: Tensor, count: Tensor | float) -> Drawn:
        """Chooses the blocks of a step: every n-th anchor from a random one on while training, all of them otherwise."""
        depth, share = self.config.depth, self.config.anchor_share if self.training else 1.0
        asking = anchors_by_depth(response_mask, depth)
        anchors = asking[0]
        if share < 1:
            steps = torch.arange(len(anchors) + 1, device=anchors.device, dtype=torch.float64) * share
            anchors = anchors[(steps + torch.rand((), dtype=torch.float64).to(steps.device)).floor().diff() > 0]
        reach = torch.zeros(response_mask.numel(), dtype=torch.long, device=anchors.device)
        for reached in asking:
            reach[reached] += 1
        depths = torch.arange(depth, device=anchors.device)
        live = depths < reach[anchors][:, None]
        at = (anchors[:, None] + 1 + depths)[live]
        scale = 1.0 / (torch.as_tensor(count, device=anchors.device) * share)
        return Drawn(anchors, live, depths.expand_as(live)[live], at, scale)

    def weigh(self, drawn: Drawn, hidden: Tensor, head: Tensor, rows: TargetRows, at: Tensor) -> Tensor:
        """[t] float32, how much each prediction counts in the loss; see `BlockConfig.weighting`."""
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
        return BlockSession(self, max_length + self.config.block_size)

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
        for i, layer in enumerate(self.layers):
            parts = (new.split(sizes) for new in layer.self_attn.keys_values(context, cos, sin))  # type: ignore[operator, union-attr]
            for session, key, value in zip(sessions, *parts, strict=True):
                session.store(i, session.length, key, value)
        for session, new in zip(sessions, tokens, strict=True):
            session.length += len(new)
            session.last = new[-1:]

    @torch.no_grad()
    def propose_all(
        self, sessions: Sequence[BlockSession], specs: Sequence[TreeSpec], samplers: Sequence[Sampler | None]
    ) -> list[TokenTree]:
        """One pass drafts the blocks of all sessions; then their trees grow together, a depth at a time."""
        deepest = max(1, min(self.config.depth, max(spec.depth for spec in specs)))
        roots = torch.cat([session.root for session in sessions])
        begins = torch.tensor([session.length for session in sessions], device=roots.device)
        attends = [_over_sessions(sessions, i) for i in range(len(self.layers))]
        reads = self.run(self.embed(roots), begins, attends)[:, :deepest]
        block = self.logits(reads)
        said = self.conditional(block[:, 0], reads[:, 0], roots)
        growing = [
            grow(spec, _part(said, i), self.kept_ids, sampler, self.config.depth)
            for i, (spec, sampler) in enumerate(zip(specs, samplers, strict=True))
        ]
        trees: dict[int, TokenTree] = {}
        opened: dict[int, Tensor] = {}

        def advance(i: int, said: Said | None) -> None:
            try:
                opened[i] = next(growing[i])[0] if said is None else growing[i].send(said)[0]
            except StopIteration as done:
                trees[i] = done.value

        for i in range(len(sessions)):
            advance(i, None)
        for k in range(1, deepest):
            nodes, opened = opened, {}
            if not nodes:
                break
            ends = [0, *accumulate(map(len, nodes.values()))]
            rows = torch.repeat_interleave(torch.tensor(list(nodes)), torch.tensor(ends).diff()).to(roots.device)
            tokens = self.kept_ids[torch.cat(list(nodes.values()))]
            said = self.conditional(block[rows, k], reads[rows, k], tokens)
            for i, begin, end in zip(nodes, ends[:-1], ends[1:], strict=True):
                advance(i, _part(said, slice(begin, end)))
        return [trees[i] for i in range(len(sessions))]


class BlockSession(LayerSession):
    """One sequence being drafted: the context's keys and values, behind which a round's block puts its own."""

    last: Tensor | None  # [1] int64, the last committed token

    def attend_all(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of a block [m, heads, e] over the context and all of the block, whose keys are stored behind it.

        Returns:
            [m, heads * e].
        """
        (m, heads, e), end = query.shape, self.length + len(key)
        self.store(layer, self.length, key, value)
        keys, values = (buffer[None, :, :end] for buffer in self.layers[layer])
        # Query heads of a group become rows, so that keys and values are read once and never repeated.
        kv = self.shape.kv_heads
        folded = query.view(m, kv, heads // kv, e).permute(1, 2, 0, 3).reshape(1, kv, -1, e)
        out = F.scaled_dot_product_attention(folded, keys, values)
        return out.view(kv, heads // kv, m, e).permute(2, 0, 1, 3).reshape(m, heads * e)


def _part(said: Said, where: int | slice) -> Said:
    return (said[0][where], said[1][where]) if isinstance(said, tuple) else said[where]


def _over_context(layer: Any, context: Tensor, tables: tuple[Tensor, Tensor], spans: Spans) -> Attend:
    """Attention of training's blocks, each over its span of context states [T, h]."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        base_key, base_value = layer.self_attn.keys_values(context, *tables)
        return block_attention(query, key, value, base_key, base_value, spans)

    return attend


def _over_sessions(sessions: Sequence[BlockSession], layer: int) -> Attend:
    """Attention of decoding's blocks, each over its session's keys and its own, which the next context overwrites."""
    count = len(sessions)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(sessions, query.chunk(count), key.chunk(count), value.chunk(count), strict=True)
        outs = [session.attend_all(layer, *own) for session, *own in parts]
        return torch.cat(outs)

    return attend
