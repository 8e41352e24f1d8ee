"""Block-parallel drafters: one pass over [last committed token, mask, mask, ...] drafts a block.

    anchor t, block of 4      context                        block
    position                  0 .. t-1   t                   t+1       t+2       t+3       t+4
    read                      f_0 ..     f_t                 x_{t+1}   mask      mask      mask
    predicts                                                           x_{t+2}   x_{t+3}   x_{t+4}
    with sample_from_anchor                                  x_{t+2}   x_{t+3}   x_{t+4}   x_{t+5}

Fused target features, hidden_norm(fc features), give each layer the keys and values of the context,
computed once per committed token. The block's tokens see the context and each other, in both
directions, or earlier ones alone (`causal`); layers may differ in that, and in how far they see
back (`layer_types`). A mask predicts the token at its own position: depth k, at position t+2+k, is aligned
with the target's distribution at position t+1+k. Embedding and head are the target's.

Training draws anchors and places a block behind each; a block sees its context up to its anchor,
and no other block. Source: DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drafttrain.batch import Attend, Part, StepOutput, anchors_by_depth
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.common import starts
from drafttrain.drafters.common.configs import BlockConfig
from drafttrain.drafters.common.layers import DraftLayer, RMSNorm, moved
from drafttrain.drafters.common.rows import Ask, Children, DraftPass, Nodes, Places, top_or_all
from drafttrain.drafters.common.trainable import DecoderDrafter
from drafttrain.losses import Aligned, TargetRows, linear_divergence
from drafttrain.ops.cpu_draft import DraftStep, DraftWeights, kernel_of
from drafttrain.ops.layer_ops import Tables
from drafttrain.ops.path_attention import Spans, block_attention
from drafttrain.target import Target

# A second loss term, and its metrics [t] of each prediction.
OtherLoss = tuple[Tensor | float, list[Tensor]]


class Paths(NamedTuple):
    """What n predictions depend on.

    Attributes:
        reads: [n, h] block states at their depth, from 0. parents: [n] int64 target ids of the
            tokens before.
        states: [n, .] of the paths before those; None as of `first_states`.
    """

    reads: Tensor
    parents: Tensor
    depth: int
    states: Tensor | None


class BlockDrafter(DecoderDrafter):
    """Both halves of the contract for kinds that draft blocks.

    `bind` attaches the target's embedding and head. A kind may let a prediction depend on the path
    before it (`readout_of_blocks` in training, `conditional` in decoding, which compute the same;
    common/markov.py has both), and add a loss term (`other_loss`) with metrics (`measures`).
    """

    static = True
    measures: tuple[str, ...] = ()
    config: BlockConfig
    solve_start = starts.block_start
    layer_class: type[DraftLayer] = DraftLayer
    mixes_tokens = False
    scales_head = False
    corrected = False  # the kind has `conditional`
    draft_step: DraftStep | None = None  # the CPU kernel of all layers and the final norm

    @property
    def static_depth(self) -> int:  # type: ignore[override]
        return self.config.depth

    @property
    def sequence_reach(self) -> int:
        return self.config.depth

    @property
    def loss_share(self) -> float:
        """Weight of the predictions' own loss, beside that of `other_loss`."""
        return 1.0

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        h = config.hidden_size
        eps = config.rms_norm_eps
        self.fc = nn.Linear(len(config.feature_layers) * h, h, bias=False)
        self.hidden_norm = RMSNorm(h, eps)
        self.layers = nn.ModuleList(
            self.layer_class(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(h, eps)
        self.mask: nn.Parameter | None = None
        if config.mask_token_id is None:
            self.mask = nn.Parameter(torch.randn(h) * h**-0.5)
        # The target's factor of logits. Its bare head rows lack it, so the final norm applies it.
        self.logit_scale = 1.0
        self.finish(config.train_head)

    def bind(self, target: Target) -> None:
        super().bind(target)
        self.logit_scale = target.logit_scale

    def copy_from(self, target: Target) -> list[str]:
        """Copies the target's last layers and final norm, and its head rows if the head is trained.

        `fc` starts as the identity on the highest feature, under the input norm of the target's
        last layer, so that the context's keys and values are near that layer's own. A learned mask
        starts as the mean embedding.
        """
        starts.identity_on_last(self.fc)
        names = ["fc", *starts.copy_ends(self, target)]
        if "norm" in names:
            self.norm.weight.mul_(target.logit_scale)
        if self.mask is not None:
            self.mask.copy_(target.embed(self.kept_ids.to(target.device)).float().mean(0))
            names.append("mask")
        theirs = target.last_layers(len(self.decoder_layers))
        if theirs:  # the context is normed as the input of the target's last layer
            input_norm = getattr(theirs[-1], "input_layernorm", None)
            if starts.copy_norm(self.hidden_norm, input_norm):
                names.append("hidden_norm")
        for i, parts in enumerate(starts.copy_last_layers(self.decoder_layers, theirs)):
            for name in parts:
                names.append(f"layers.{i}.{name}")
        return names

    # -- forward pass, shared by training and decoding ---------------------------------------------

    @property
    def computed(self) -> list[int]:
        """How many last tokens of a block each layer computes.

        All of them, but the last layer only those that predict, unless tokens are mixed later.
        """
        size = self.config.block_size
        last = size if self.mixes_tokens else self.config.depth
        return [size] * (len(self.layers) - 1) + [last]

    def fuse(self, features: Tensor) -> Tensor:
        """[t, f*h] target features -> [t, h], input of each layer's context keys and values."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def mask_embedding(self) -> Tensor:
        """[h], the input at positions to predict."""
        if self.mask is not None:
            return self.mask
        mask = torch.full((), self.config.mask_token_id or 0, device=self.kept_ids.device)
        return self.embed(mask).to(self.fc.weight.dtype)

    def enter(self, roots: Tensor) -> Tensor:
        """[m, h] embeddings of last committed tokens -> [m * block size, h], the layers' input."""
        masks = self.mask_embedding().expand(len(roots), self.config.block_size - 1, -1)
        return torch.cat((roots[:, None], masks), dim=1).flatten(0, 1)

    def run(self, roots: Tensor, begins: Tensor, attends: Sequence[Attend]) -> Tensor:
        """All layers over m blocks.

        Args:
            roots: [m, h] embeddings of the blocks' first tokens; begins: [m] int64 their positions.
            attends: per layer, attention of the `computed` tokens over each block's own tokens and
                its context.

        Returns:
            [m, depth, h], input of the head.
        """
        size = self.config.block_size
        depth = self.config.depth
        state = self.enter(roots.to(self.fc.weight.dtype))  # [m * size, h]
        positions = (begins[:, None] + torch.arange(size, device=begins.device)).flatten()
        tables = self.rotary.tables(positions, state.dtype)
        # [m * depth] int64, the tokens that predict
        tokens = torch.arange(len(state), device=state.device).view(-1, size)
        last = tokens[:, -depth:].flatten()
        for layer, attend, count in zip(self.layers, attends, self.computed, strict=True):
            queries = None if count == size else last
            state = layer(
                state,
                None,
                tables,
                attend,
                queries,
            )
        if self.mixes_tokens:
            state = state[last]
        return self.norm(state).view(-1, depth, state.shape[-1])

    def logits(self, reads: Tensor) -> Tensor:
        """[..., h] -> [..., d] over the drafter's vocabulary."""
        return self.head(reads.to(self.head.weight.dtype))

    def pack_depths(self) -> None:
        config = self.config
        # A call of the kernel has one mask for all layers, and no sinks.
        if config.layer_types is not None or config.attention_sink_bias:
            return
        weights = DraftWeights(config.hidden_size, 0, config.rms_norm_eps, norm=self.norm.weight)
        self.draft_step = kernel_of(
            [layer.native for layer in self.decoder_layers],
            weights,
            self.rotary.tables,
            min(self.windows),
        )

    @property
    def steps_in_c(self) -> bool:
        return self.draft_step is not None

    def first_states(self, count: int) -> Tensor | None:
        """[count, .] what paths begin with, for kinds that read more of a path than its last token."""
        return None

    def conditional(self, logits: Tensor, at: Paths) -> tuple[Children, Tensor | None]:
        """The children of n nodes, for kinds whose predictions depend on the path before.

        Args:
            logits: [n, d] of the block at their depth.

        Returns:
            These, and the states of the paths up to the nodes.
        """
        raise NotImplementedError

    def readout_of_blocks(
        self,
        reads: Tensor,
        ids: Tensor,
        roots: Tensor,
        live: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Rows [t, .] and weights [d, .] whose products are the logits of a step's predictions.

        Args:
            reads: [t, h] in the order of live [m, depth] bool, predictions that count.
            ids: tokens, flat. roots: [m] positions of the blocks' first tokens.
        """
        return reads, self.head.weight

    def other_loss(
        self,
        hidden: Tensor,
        aligned: Aligned,
        alpha: Tensor | None,
        parents: Tensor,
    ) -> OtherLoss:
        """A kind's second loss term, and its metrics [t] of each prediction (`measures`).

        Args:
            hidden: [t, .] of `readout_of_blocks`. alpha: [t] acceptance rates; None if not measured.
            parents: [t] int64 target ids of the tokens before.
        """
        return 0.0, []

    # -- training half -----------------------------------------------------------------------------

    def forward(self, inputs: StepInputs) -> StepOutput:
        """Computes one pass over a block behind each drawn anchor; see `Drafter.forward`."""
        config = self.config
        batch = inputs.batch
        part = batch.part  # of the tokens, in a process that shares its rows; else all
        every, live, scale = self.draw(batch.response_mask, inputs.total, part)
        valid, place = batch.anchors()  # [t] flat positions, and positions in their conversations
        own = torch.searchsorted(valid, every)  # [m] indices into `valid`
        begin = own - place[own]  # [m] index of each conversation's first token
        held = part.of(valid)  # this process's tokens
        blocks = part.of(every)  # and blocks

        # The context, and each layer's attention over it.
        features = inputs.features.flatten(0, 1)  # [part, f*h]
        context = self.fuse(features[valid[held] - part.begin])  # [part, h]
        positions = place  # [t] int64 rotary positions
        if self.training and config.position_offset:
            positions = moved(place, config.position_offset, part)
        tables = self.rotary.tables(positions[held], context.dtype)
        spans = Spans(begin, own, begin)
        sizes = (part.counts(every), part.counts(valid))
        attends = []
        for number in range(len(self.layers)):
            attends.append(
                self._over_context(
                    number,
                    context,
                    tables,
                    spans,
                    part,
                    sizes,
                )
            )

        # One pass over this process's blocks; of its predictions, those that count.
        anchors = every[blocks]  # [m]
        live = live[blocks]  # [m, depth]
        block_of, depth_of = live.nonzero(as_tuple=True)  # [t] each
        roots = inputs.embeds.flatten(0, 1)[anchors + 1 - part.begin]
        reads = self.run(roots, positions[own[blocks]] + 1, attends)[live]  # [t, h]

        # The loss.
        before = anchors[block_of] + 1 + depth_of  # [t] flat positions before the predicted tokens
        at = inputs.row_of.flatten()[before]  # [t] rows of the target's distributions
        ids = batch.input_ids.flatten()
        hidden, head = self.readout_of_blocks(reads, ids, anchors + 1, live)
        weight = self.weigh(
            live,
            scale,
            hidden,
            head,
            inputs.rows,
            at,
        )
        out = linear_divergence(
            hidden,
            head,
            inputs.rows,
            at,
            weight * self.loss_share,
            config.loss,
            measure=inputs.measure or bool(self.measures),
        )
        aligned = Aligned(inputs.rows, at, weight)
        more, measured = self.other_loss(hidden, aligned, out.alpha, ids[before])
        if out.alpha is None or out.agree is None or not inputs.measure:
            return StepOutput(out.loss + more, {})
        values = torch.stack(
            (torch.ones_like(out.values), out.values, out.alpha, out.agree.float(), *measured),
            dim=1,
        )
        sums = values.new_zeros(config.depth, values.shape[1])  # [depth, metrics]
        sums.index_add_(0, depth_of, values.detach())
        names = ("count", "loss", "alpha", "agree", *self.measures)
        return StepOutput(out.loss + more, dict(zip(names, sums.unbind(1), strict=True)))

    def _over_context(
        self,
        number: int,
        context: Tensor,
        tables: Tables,
        spans: Spans,
        part: Part,
        sizes: tuple[list[int], list[int]],
    ) -> Attend:
        """Attention of training's blocks in a layer, each over its span of context states [t, h].

        Args:
            number: of the layer.
            spans: of the blocks of all processes that share the rows. part: this process's part of
                the rows.
            sizes: blocks and context tokens of each process.
        """
        blocks, tokens = sizes
        attention = self.decoder_layers[number].self_attn
        asked = [self.computed[number] * n for n in blocks]  # queries of each process
        held = [self.config.block_size * n for n in blocks]  # tokens of its blocks

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            base_key, base_value = attention.keys_values(context, tables)  # [t, kv_heads, e]
            own = [key, value]
            if attention.attention_sink_bias is not None:
                own.append(part.own_heads(attention.attention_sink_bias))
            return block_attention(
                query,
                own,
                (
                    part.to_heads(base_key, tokens, keys=True),
                    part.to_heads(base_value, tokens, keys=True),
                ),
                spans,
                window=self.config.windows[number],
                causal=self.config.causal_layers[number],
            )

        return part.attend(attend, asked, held)

    def draw(
        self,
        response_mask: Tensor,
        count: Tensor | float,
        part: Part | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Chooses the blocks of a step.

        In training every n-th anchor from a random one on, otherwise all.

        Returns:
            Flat positions of their m anchors; [m, depth] bool, predictions that count; each block's
            weight in the loss.
        """
        depth = self.config.depth
        share = 1.0
        if self.training:
            share = self.config.anchor_share
        by_depth = anchors_by_depth(response_mask, depth)
        anchors = by_depth[0]
        device = anchors.device
        if share < 1:
            # An anchor is taken wherever its multiple of `share` passes a whole number.
            steps = torch.arange(len(anchors) + 1, device=device, dtype=torch.float64) * share
            offset = torch.rand((), dtype=torch.float64).to(device)
            if part:
                offset = part.same(offset)
            anchors = anchors[(steps + offset).floor().diff() > 0]
        # Number of depths that count at each position.
        reach = torch.zeros(response_mask.numel(), dtype=torch.long, device=device)
        for reached in by_depth:
            reach[reached] += 1
        live = torch.arange(depth, device=device) < reach[anchors][:, None]  # [m, depth]
        return anchors, live, 1.0 / (torch.as_tensor(count, device=device) * share)

    def weigh(
        self,
        live: Tensor,
        scale: Tensor,
        hidden: Tensor,
        head: Tensor,
        rows: TargetRows,
        at: Tensor,
    ) -> Tensor:
        """[t] float32, weight of each prediction in the loss; see `BlockConfig.weighting`."""
        config = self.config
        depths = torch.arange(config.depth, device=at.device)
        if config.weighting != "dpace":
            if config.weighting == "equal":
                decay = torch.ones(config.depth, device=at.device)
            else:
                decay = torch.exp(-depths / config.gamma)  # [depth]
            return (decay / decay.sum() * scale).expand_as(live)[live]
        with torch.no_grad():
            ones = torch.ones(len(at), device=at.device)
            ce = linear_divergence(
                hidden.detach(),
                head.detach(),
                rows,
                at,
                ones,
                "ce",
                measure=False,
            ).values
            # Probability that each prediction is right, [t], and smoothed [m, depth].
            # 0 where no token was sampled.
            right = torch.where(rows.sampled_at(at) >= 0, (-ce).exp(), 0.0)
            smooth = ones.new_ones(live.shape)
            smooth[live] = ((1 - config.dpace_alpha) * right + config.dpace_alpha).float()
            # That a block is right down to a depth, and the sum of these from there on.
            reached = smooth.cumprod(1) * live
            deeper = reached.flip(1).cumsum(1).flip(1)
            return deeper[live] / config.depth * scale

    # -- proposal half -----------------------------------------------------------------------------

    def read_committed(self, ids: Tensor, features: Tensor, at: DraftPass) -> Tensor:
        """Stores keys and values of the new context; roots [R] are the last tokens.

        A round's block stands behind it, and the next context overwrites the block's.
        """
        context = self.fuse(features)  # [n, h]
        step = self.draft_step
        placed = at.placed(step)
        if step is not None and step.reads_context and placed is not None:
            step.store_context(context, placed)
        else:
            tables = self.rotary.tables(at.positions, context.dtype)
            for i, layer in enumerate(self.decoder_layers):
                key, value = layer.self_attn.keys_values(context, tables)
                at.store(i, key, value)  # [n, kv_heads, e] each
        return ids[at.ends]

    def behind(self, places: Places) -> tuple[DraftPass, Sequence[Callable[..., Tensor]]]:
        """The pass over the blocks of a round, and each layer's attention in it."""
        size = self.config.block_size
        causal = self.config.causal_layers
        # Blocks that are causal in some layers have two masks over the same slots.
        passes = {way: places.behind(size, self.computed, mutual=not way) for way in set(causal)}
        attends = []
        for i, layer in enumerate(self.decoder_layers):
            attend = passes[causal[i]].attends[i]
            attends.append(partial(attend, sinks=layer.self_attn.attention_sink_bias))
        return passes[causal[0]], attends

    def draft(
        self,
        roots: Tensor,
        places: Places,
        width: int | None,
    ) -> tuple[Children, Ask]:
        """One pass over all blocks; trees grow without the layers."""
        size = self.config.block_size
        at, attends = self.behind(places)
        embeds = self.embed(roots)
        placed = at.placed(self.draft_step)
        if self.draft_step is None or placed is None:
            reads = self.run(embeds, at.positions[::size], attends)  # [R, depth, h]
        else:
            made = self.draft_step.run(None, self.enter(embeds.to(self.fc.weight.dtype)), placed)
            blocks = made[:, 1].unflatten(0, (len(roots), -1))  # [R, tokens, h] the head's inputs
            reads = blocks[:, -self.config.depth :]

        # A tree may be shallower than the block.
        depths = max(1, min(self.config.depth, places.depth))
        reads = reads[:, :depths]
        flat = reads.flatten(0, 1)  # [R * depths, h]
        if not self.corrected:
            block = top_or_all(self.head, flat, width, self.logits)._replace(shared=True)
            return block.every(depths, 0), lambda nodes: block.every(depths, nodes.depth)

        logits = self.logits(reads)  # [R, depths, d]
        states = self.first_states(len(roots))  # of the paths to the nodes that were opened last

        def children(
            depth: int,
            rows: Tensor | slice,
            ids: Tensor,
            before: Tensor | None,
        ) -> Children:
            """Of nodes [n] with target ids, and their parents' states."""
            nonlocal states
            own = reads[rows, depth]
            found, states = self.conditional(logits[rows, depth], Paths(own, ids, depth, before))
            return found._replace(reads=own)

        def ask(nodes: Nodes) -> Children:
            rows = torch.as_tensor(nodes.rows, device=roots.device)
            before = states
            if before is not None:
                before = before[nodes.above()]
            return children(nodes.depth, rows, nodes.tokens(), before)

        return children(0, slice(None), roots, states), ask
