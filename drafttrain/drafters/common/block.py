"""Block-parallel drafters: one pass over [last committed token, mask, mask, ...] drafts a block.

    anchor t, block of 4      context                        block
    position                  0 .. t-1   t                   t+1       t+2       t+3       t+4
    read                      f_0 ..     f_t                 x_{t+1}   mask      mask      mask
    predicts                                                           x_{t+2}   x_{t+3}   x_{t+4}
    with sample_from_anchor                                  x_{t+2}   x_{t+3}   x_{t+4}   x_{t+5}

Fused target features, hidden_norm(fc features), give each layer the keys and values of the context,
computed once per committed token. The block's tokens see the context and each other, in both
directions. A mask predicts the token at its own position: depth k, at position t+2+k, is aligned
with the target's distribution at position t+1+k. Embedding and head are the target's.

Training draws anchors and places a block behind each; a block sees its context up to its anchor,
and no other block. Source: DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.batch import Attend, Part, StepOutput, TokenTree, anchors_by_depth
from drafttrain.drafters.base import Samplers, Specs, StepInputs, Tensors
from drafttrain.drafters.common import starts
from drafttrain.drafters.common.configs import BlockConfig
from drafttrain.drafters.common.layer_model import attend_packed, layouts_of
from drafttrain.drafters.common.layer_session import LayerSession, stores_of, tables_of
from drafttrain.drafters.common.layers import DraftLayer, RMSNorm, moved
from drafttrain.drafters.common.static_draft import DraftPlaces, SlotAttention
from drafttrain.drafters.common.tensor_growth import Ask
from drafttrain.drafters.common.trainable import DecoderDrafter
from drafttrain.drafters.common.tree_growth import (
    GrowingTree,
    Likeliest,
    Logits,
    grow_trees,
    rows_of,
    widest,
)
from drafttrain.losses import TargetRows, linear_divergence
from drafttrain.ops.cpu_draft import DraftHead, DraftStep, DraftWeights, kernel_of, plan_of
from drafttrain.ops.packing import SKINNY_ROWS, PackedLinear, without_grad
from drafttrain.ops.path_attention import Spans, block_attention
from drafttrain.ops.tree_attention import TreeLayout
from drafttrain.sequence_parallel import SharedPart
from drafttrain.target import Target


class BlockDrafter(DecoderDrafter):
    """Both halves of the contract for kinds that draft blocks.

    `bind` attaches the target's embedding and head. A kind may let a prediction depend on the token
    before it (`readout` in training, `conditional` in decoding, which compute the same), and add a
    loss term (`other_loss`) with metrics (`measures`).
    """

    static = True
    measures: tuple[str, ...] = ()
    config: BlockConfig
    solve_start = starts.block_start
    layer_class: type[DraftLayer] = DraftLayer
    mixes_tokens = False
    draft_step: DraftStep | None = None  # the CPU kernel of all layers and the final norm

    @property
    def static_depth(self) -> int:  # type: ignore[override]
        return self.config.depth

    @property
    def sequence_reach(self) -> int:
        return self.config.depth

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
        if config.train_head:
            self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False)
        else:
            self.lm_head = None
        # The target's head; in a list, so that it is neither trained nor saved.
        self.frozen: list[nn.Linear | PackedLinear] = []
        # The target's factor of logits. Its bare head rows lack it, so the final norm applies it.
        self.logit_scale = 1.0
        self.finish(config.num_hidden_layers)

    @property
    def head(self) -> nn.Linear | PackedLinear:
        """The linear layer over the drafter's vocabulary."""
        if self.lm_head is not None:
            return self.lm_head
        return self.frozen[0]

    @property
    def head_weight(self) -> Tensor:
        return self.head.weight

    def bind(self, target: Target) -> None:
        """Checks the target and attaches its embedding and head."""
        super().bind(target)
        self.logit_scale = target.logit_scale
        if self.lm_head is None:
            self.frozen = [starts.frozen_head(target, self.kept_ids, self.packed)]

    def copy_from(self, target: Target) -> list[str]:
        """Copies the target's last layers and final norm, and its head rows if the head is trained.

        `fc` starts as the identity on the highest feature, under the input norm of the target's
        last layer, so that the context's keys and values are near that layer's own. A learned mask
        starts as the mean embedding.
        """
        starts.identity_on_last(self.fc)
        names = ["fc"]
        if self.lm_head is not None:
            self.lm_head.weight.copy_(starts.head_rows(target, self.kept_ids))
            names.append("lm_head")
        if self.mask is not None:
            self.mask.copy_(target.embed(self.kept_ids.to(target.device)).float().mean(0))
            names.append("mask")
        if starts.copy_norm(self.norm, starts.final_norm(target)):
            self.norm.weight.mul_(target.logit_scale)
            names.append("norm")
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
        cos, sin = self.rotary.tables(positions, state.dtype)
        # [m * depth] int64, the tokens that predict
        last = torch.arange(len(state), device=state.device).view(-1, size)[:, -depth:].flatten()
        for layer, attend, count in zip(self.layers, attends, self.computed, strict=True):
            queries = None if count == size else last
            state = layer(
                state,
                None,
                cos,
                sin,
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
        weights = DraftWeights(config.hidden_size, 0, config.rms_norm_eps, norm=self.norm.weight)
        self.draft_step = kernel_of([layer.native for layer in self.decoder_layers], weights)

    def conditional(self, logits: Tensor, reads: Tensor, parents: Tensor) -> Logits:
        """Logits of the children of n nodes.

        Args:
            logits: [n, d] of the block at their depth, computed from reads [n, h]. parents: [n]
                int64 the nodes' target ids.
        """
        return logits

    def readout(self, reads: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [t, .] and weights [d, .] whose products are the logits of `conditional`.

        reads: [t, h]. parents: [t] int64 target ids.
        """
        return reads, self.head.weight

    def other_loss(
        self,
        hidden: Tensor,
        alpha: Tensor | None,
        weight: Tensor,
    ) -> tuple[Tensor | float, list[Tensor]]:
        """A kind's second loss term, and its metrics [t] of each prediction (`measures`).

        Args:
            hidden: [t, .] of `readout`; weight: [t] float32, of each prediction in the loss.
            alpha: [t] acceptance rates; None if not measured.
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
        for layer, count in zip(self.decoder_layers, self.computed, strict=True):
            attends.append(self._over_context(layer, context, tables, spans, part, sizes, count))

        # One pass over this process's blocks; of its predictions, those that count.
        anchors = every[blocks]  # [m]
        live = live[blocks]  # [m, depth]
        block_of, depth_of = live.nonzero(as_tuple=True)  # [t] each
        roots = inputs.embeds.flatten(0, 1)[anchors + 1 - part.begin]
        reads = self.run(roots, positions[own[blocks]] + 1, attends)[live]  # [t, h]

        # The loss.
        before = anchors[block_of] + 1 + depth_of  # [t] flat positions before the predicted tokens
        at = inputs.row_of.flatten()[before]  # [t] rows of the target's distributions
        parents = batch.input_ids.flatten()[before]
        hidden, head = self.readout(reads, parents)
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
            weight,
            config.loss,
            measure=inputs.measure or bool(self.measures),
        )
        more, measured = self.other_loss(hidden, out.alpha, weight)
        if out.alpha is None or out.agree is None or not inputs.measure:
            return StepOutput(out.loss + more, {})
        values = torch.stack(
            (torch.ones_like(out.values), out.values, out.alpha, out.agree.float(), *measured),
            dim=1,
        )
        sums = values.new_zeros(self.config.depth, values.shape[1]).index_add_(
            0,
            depth_of,
            values.detach(),
        )
        names = ("count", "loss", "alpha", "agree", *self.measures)
        return StepOutput(out.loss + more, dict(zip(names, sums.unbind(1), strict=True)))

    def _over_context(
        self,
        layer: DraftLayer,
        context: Tensor,
        tables: tuple[Tensor, Tensor],
        spans: Spans,
        part: Part,
        sizes: tuple[list[int], list[int]],
        queries: int,
    ) -> Attend:
        """Attention of training's blocks, each over its span of context states [t, h].

        Args:
            spans: of the blocks of all processes that share the rows. part: this process's part of
                the rows.
            sizes: blocks and context tokens of each process. queries: of a block.
        """
        cos, sin = tables
        window = self.cache_shape.window
        blocks, tokens = sizes
        asked = [queries * n for n in blocks]
        held = [self.config.block_size * n for n in blocks]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            base_key, base_value = layer.self_attn.keys_values(
                context, cos, sin
            )  # [t, kv_heads, e]
            _, heads, e = query.shape
            # Processes that share the rows exchange tokens for heads, attend, and exchange them back.
            if isinstance(part, SharedPart):
                key = part.to_heads(key, held, keys=True)
                value = part.to_heads(value, held, keys=True)
                base_key = part.to_heads(base_key, tokens, keys=True)
                base_value = part.to_heads(base_value, tokens, keys=True)
                query = part.to_heads(query, asked)
            out = block_attention(query, key, value, base_key, base_value, spans, window=window)
            if not isinstance(part, SharedPart):
                return out
            return part.to_tokens(out.view(sum(asked), -1, e), asked).reshape(-1, heads * e)

        return attend

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
        if config.weighting == "exp":
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
            right = torch.where(rows.sampled_at(at) >= 0, (-ce).exp(), 0.0)
            smooth = ones.new_ones(live.shape)
            smooth[live] = ((1 - config.dpace_alpha) * right + config.dpace_alpha).float()
            # That a block is right down to a depth, and the sum of these from there on.
            reached = smooth.cumprod(1) * live
            deeper = reached.flip(1).cumsum(1).flip(1)
            return deeper[live] / config.depth * scale

    # -- proposal half -----------------------------------------------------------------------------

    def start(self, prompt_ids: Tensor, max_length: int) -> BlockSession:
        text = self.open_text()
        return BlockSession(self, self.cache_shape, max_length + self.config.block_size, text)

    def read_static(
        self,
        ids: Tensor,
        features: Tensor,
        positions: Tensor,
        context: SlotAttention,
        ends: Tensor,
    ) -> Tensor:
        states = self.fuse(features)  # [n, h]
        cos, sin = self.rotary.tables(positions, states.dtype)
        for i, layer in enumerate(self.decoder_layers):
            key, value = layer.self_attn.keys_values(states, cos, sin)  # [n, kv_heads, e] each
            key = key.transpose(0, 1)[None]
            value = value.transpose(0, 1)[None]
            context.cache.store(i, context.slots, key, value)
        return ids[ends]

    def draft_static(self, roots: Tensor, places: DraftPlaces) -> tuple[Logits, Ask]:
        size = self.config.block_size
        last = len(self.layers) - 1
        window = self.cache_shape.window
        # The last layer computes fewer tokens than those below.
        _, context = places.behind(size, size, mutual=True)
        _, ending = places.behind(size, self.computed[-1], mutual=True)
        attends = context.layers(last, window)
        attends.append(ending.layers(last + 1, window)[last])
        reads = self.run(self.embed(roots), places.held, attends)  # [R, depth, h]
        block = self.logits(reads)  # [R, depth, d]

        def children(depth: int, m: int, ids: Tensor) -> Logits:
            """Logits [R, m, d] of the children of nodes with target ids [R * m]."""
            own = block[:, depth, None].expand(-1, m, -1).flatten(0, 1)  # [R * m, d]
            read = reads[:, depth, None].expand(-1, m, -1).flatten(0, 1)  # [R * m, h]
            logits = self.conditional(own, read, ids)
            shape = (len(block), m)
            if isinstance(logits, tuple):
                return logits[0].unflatten(0, shape), logits[1].unflatten(0, shape)
            return logits.unflatten(0, shape)

        def ask(depth: int, tokens: Tensor, parents: Tensor) -> Logits:
            return children(depth, tokens.shape[1], self.kept_ids[tokens.flatten()])

        return children(0, 1, roots), ask

    @without_grad
    def extend_all(
        self,
        sessions: Sequence[BlockSession],
        tokens: Tensors,
        features: Tensors,
    ) -> None:
        """Stores keys and values of the new context, of all sessions at once."""
        steps = sessions[0].steps
        if steps is not None and steps.read(sessions, tokens, features):
            return
        context = self.fuse(torch.cat(list(features)))  # [t, h]
        if not self._kernel_context(sessions, tokens, context):
            sizes = []
            places = []
            for session, new in zip(sessions, tokens, strict=True):
                begin = session.dropped + session.length
                sizes.append(len(new))
                places.append(torch.arange(begin, begin + len(new)))
            positions = torch.cat(places).to(context.device)  # [t] int64
            cos, sin = self.rotary.tables(positions, context.dtype)
            for i, layer in enumerate(self.decoder_layers):
                keys, values = layer.self_attn.keys_values(context, cos, sin)
                parts = zip(sessions, keys.split(sizes), values.split(sizes), strict=True)
                for session, key, value in parts:
                    session.store(i, session.length, key, value)
        for session, new in zip(sessions, tokens, strict=True):
            session.length += len(new)
            session.root = new[-1:]
            session.trim()
            if session.text is not None:
                session.text.read(new.tolist())

    @without_grad
    def propose_all(
        self,
        sessions: Sequence[BlockSession],
        specs: Specs,
        samplers: Samplers,
    ) -> list[TokenTree]:
        """Drafts the blocks of all sessions in one pass; their trees grow without the layers."""
        steps = sessions[0].steps
        if steps is not None:
            static = steps.propose(sessions, specs, samplers)
            if static is not None:
                return static

        roots = torch.cat([session.root for session in sessions])  # [sessions] int64
        reads = self._kernel_block(sessions, roots)  # [sessions, depth, h]
        if reads is None:
            begins = [session.dropped + session.length for session in sessions]
            attends = []
            for layer, queries in enumerate(self.computed):
                own = [partial(session.attend_all, layer) for session in sessions]
                keys = [self.config.block_size] * len(own)
                attends.append(attend_packed(own, [queries] * len(own), keys))
            reads = self.run(self.embed(roots), torch.tensor(begins, device=roots.device), attends)

        width = widest(specs)
        if any(session.text for session in sessions):  # joined tokens need all logits
            width = None
        deepest = max(1, min(self.config.depth, max(spec.depth for spec in specs)))
        block = self._predict(reads[:, :deepest], width)
        first = self._children(block, reads, roots, slice(None), 0)  # of the roots
        trees = []
        for row, session in enumerate(sessions):
            logits = session.shape_logits(first, reads[:, 0], row, row + 1)
            tree = GrowingTree(
                specs[row],
                rows_of(logits, 0),
                session.ids,
                samplers[row],
                self.config.depth,
                row,
            )
            trees.append(tree)

        def step(growing: list[GrowingTree], depth: int) -> list[Logits]:
            of_nodes: list[int] = []  # the session of each node
            for tree in growing:
                of_nodes += [tree.row] * len(tree.parents)
            rows = torch.tensor(of_nodes, device=roots.device)  # [n]
            tokens = torch.cat([tree.target_ids for tree in growing])  # [n]
            logits = self._children(block, reads, tokens, rows, depth)
            read = reads[rows, depth]  # [n, h]
            each = []
            begin = 0
            for tree in growing:
                end = begin + len(tree.parents)
                each.append(sessions[tree.row].shape_logits(logits, read, begin, end))
                begin = end
            return each

        return grow_trees(trees, step)

    def _predict(self, reads: Tensor, width: int | None) -> Logits:
        """Logits [m, depth, d] of blocks, or their `width` top tokens where a kernel finds them.

        A kernel does so where logits do not depend on the parents. width: None if all are needed.
        """
        head = None
        plain = type(self).conditional is BlockDrafter.conditional
        if plain and width is not None and self.packed:
            head = DraftHead.of(self.head)
        if head is None or width is None:
            return self.logits(reads)
        shape = reads.shape[:2]
        ids, top, _ = head.top(reads.flatten(0, 1), min(width, head.vocabulary))
        return Likeliest(ids.unflatten(0, shape), top.unflatten(0, shape))

    def _children(
        self,
        block: Logits,
        reads: Tensor,
        parents: Tensor,
        rows: Tensor | slice,
        depth: int,
    ) -> Logits:
        """Logits of the children of nodes [n] at a depth, of blocks `rows`."""
        if isinstance(block, Likeliest):
            return Likeliest(block.ids[rows, depth], block.log_probs[rows, depth])
        assert isinstance(block, Tensor)
        return self.conditional(block[rows, depth], reads[rows, depth], parents)

    def _kernel_context(
        self,
        sessions: Sequence[BlockSession],
        tokens: Tensors,
        context: Tensor,
    ) -> bool:
        """Stores the keys and values of new context by the CPU kernel.

        Returns:
            False where the kernel does not apply.
        """
        step = self.draft_step
        if step is None or not step.reads_context or len(context) > SKINNY_ROWS:
            return False
        plan = plan_of(layouts_of(sessions, tokens))
        if plan is None:
            return False
        tables = tables_of(self.rotary, sessions, plan.positions)  # cos, sin [., 1, r]
        if tables is None:
            return False
        stores = stores_of(sessions, plan.ends, context)
        step.store_context(context.contiguous(), tables, stores, plan)
        return True

    def _kernel_block(self, sessions: Sequence[BlockSession], roots: Tensor) -> Tensor | None:
        """`run` of a block behind each session by the CPU kernel, [sessions, depth, h].

        None where the kernel does not apply.
        """
        size = self.config.block_size
        if self.draft_step is None or len(sessions) * size > SKINNY_ROWS:
            return None
        plan = plan_of([BlockLayout(session.length, size) for session in sessions])
        if plan is None:
            return None
        tables = tables_of(self.rotary, sessions, plan.positions)
        if tables is None:
            return None
        states = self.enter(self.embed(roots).to(self.fc.weight.dtype))  # [sessions * size, h]
        stores = stores_of(sessions, plan.ends, states)
        _, reads = self.draft_step.run(
            None,
            states,
            tables,
            stores,
            plan,
            self.cache_shape.window,
        )
        return reads.view(len(sessions), size, -1)[:, -self.config.depth :]


class BlockLayout(TreeLayout):
    """A block behind a prefix, whose tokens see each other in both directions."""

    def __init__(self, prefix_len: int, count: int):
        super().__init__(prefix_len, count=count)
        self.ancestors = [(1 << count) - 1] * count


class BlockSession(LayerSession):
    """One sequence's context.

    A round's block stores its keys and values behind it, and the next context overwrites them.

    Attributes:
        root: [1] int64, the last committed token.
    """

    def shape_logits(
        self,
        logits: Logits,
        reads: Tensor,
        begin: int,
        end: int,
    ) -> Logits:
        """Logits [m, d and further tokens] of nodes begin to end.

        logits: [n, d] of all sessions' nodes, computed from reads [n, h].
        """
        own = rows_of(logits, slice(begin, end))  # [m, d]
        if not self.text:
            return own
        assert not isinstance(own, Likeliest)
        read = reads[begin:end]  # [m, h]
        if isinstance(own, tuple):  # with confidences
            return (self.text.shape(own[0], read), own[1])
        return self.text.shape(own, read)

    def attend_all(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Attention of a block over the context and all of the block.

        query [m, heads, e], key and value [block, kv_heads, e] -> [m, heads * e].
        """
        m, heads, e = query.shape
        kv = self.shape.kv_heads
        group = heads // kv
        end = self.length + len(key)
        self.store(layer, self.length, key, value)
        begin = 0
        mask = None
        window = self.shape.window
        if window:
            begin = max(0, end - m + 1 - window)
            last = torch.arange(end - m, end, device=key.device)  # [m] positions of the queries
            seen = torch.arange(begin, end, device=key.device) > last[:, None] - window
            mask = seen.repeat(group, 1)  # [group * m, end - begin]
        keys, values = self.layers[layer]  # [kv_heads, capacity, e] each
        keys = keys[None, :, begin:end]
        values = values[None, :, begin:end]
        # Query heads of a group become rows, so that keys and values are read once and never
        # repeated.
        folded = query.view(m, kv, group, e).permute(1, 2, 0, 3).reshape(1, kv, -1, e)
        out = F.scaled_dot_product_attention(folded, keys, values, mask)
        return out.view(kv, group, m, e).permute(2, 0, 1, 3).reshape(m, heads * e)
