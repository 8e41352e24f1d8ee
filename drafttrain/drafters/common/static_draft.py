"""Static draft steps: a drafter's round as functions of fixed buffers, which CUDA graphs replay.

    round      committed tokens and features of R sequences    ->  ReadStep    keys of the tokens, `roots` of the next trees
               roots                                           ->  GrowStep    all depths of all trees, one transfer at the end

The launches of a depth take a GPU longer than its work, and a tree that the host chooses waits for
the device at every depth. `DraftSteps` holds the steps of a drafter and the cache that its sessions
share. A session's own is a view of its row there, so prompts, and what no step serves, take the passes
of rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from drafttrain.batch import Proposal, TokenTree
from drafttrain.drafters.common.rows import DraftPass, JointSession, Nodes
from drafttrain.drafters.common.tensor_growth import Grown, TensorGrowth
from drafttrain.drafters.common.tree_growth import Children
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.ops.graphs import (
    BUCKETS,
    Captured,
    GraphPool,
    PlanBuffers,
    bucket,
    padded_rows,
    step_shape,
    upload,
)
from drafttrain.ops.sampling import Sampler, SamplingParams
from drafttrain.ops.tree_attention import AttentionForm, TreeLayout
from drafttrain.ops.tree_attention_triton import (
    Opened,
    PackedPlan,
    PlanShape,
    packed_tree_attention,
)
from drafttrain.ops.tree_cache import TreeCache

_WORD = 32  # bits of a word of ancestor masks
_MOST_OPENED = BUCKETS[-1]  # nodes of all trees at one depth, and of one tree


class SlotAttention:
    """Attention of new tokens, stored at given slots of a cache (an `AttentionContext`).

    Args:
        slots: [n] int64 of the new keys, on the cache's common axis. plans: by their number of
            queries, which are all tokens or each row's last ones.
    """

    def __init__(
        self,
        cache: TreeCache,
        slots: Tensor,
        plans: Sequence[PackedPlan],
    ):
        self.cache = cache
        self.slots = slots
        self.plans = {plan.queries: plan for plan in plans}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **form: Unpack[AttentionForm],
    ) -> Tensor:
        """See `AttentionContext.attend`."""
        self.write(layer, key, value)
        keys, values = self.cache.by_row(layer)
        return packed_tree_attention(
            query,
            keys,
            values,
            self.plans[query.shape[2]],
            **form,
        ).transpose(1, 2)

    def write(
        self,
        layer: int,
        key: Tensor,
        value: Tensor,
    ) -> None:
        """Stores a layer's keys and values [1, kv_heads, n, e] without attending."""
        self.cache.store(layer, self.slots, key, value)


class StaticPass(SlotAttention, DraftPass):
    """A pass over slots of the cache that static steps share."""

    def __init__(
        self,
        cache: TreeCache,
        slots: Tensor,
        plans: Sequence[PackedPlan],
        positions: Tensor,
        ends: Tensor,
        windows: tuple[int, ...],
    ):
        super().__init__(cache, slots, plans)
        self.positions = positions
        self.ends = ends
        self.windows = windows


class StaticPlaces:
    """Places of a round's drafted tokens behind the committed ones, computed on the device.

    Args:
        cache: of the sessions. rows: [R] int64 each sequence's. held: [R] int64 its committed
            tokens whose keys are in place.
        growth: of the trees that grow behind the last committed token, their root.
        windows: of the drafter's layers.

    Attributes:
        depth: of the deepest node.
    """

    def __init__(
        self,
        cache: TreeCache,
        rows: Tensor,
        held: Tensor,
        growth: TensorGrowth,
        windows: tuple[int, ...],
    ):
        self.cache = cache
        self.windows = windows
        self.rows = rows
        self.held = held
        self.depth = growth.depth
        self.chain = all(count == 1 for count in growth.opens)
        self._level = 0  # number of the first node that was opened last; the root is 0
        self._next = 1  # number of the next node
        count = len(rows)
        most = 1 + sum(growth.opens)
        # [R, most] int32, of the root and the nodes
        self._positions = (held - 1)[:, None].expand(count, most).to(torch.int32).contiguous()
        words = 1
        if not self.chain:
            words = -(-most // _WORD)
        # [R, most, words] int32: bit i is set if node i is an ancestor or the node itself
        self._ancestors = torch.zeros(
            count,
            most,
            words,
            dtype=torch.int32,
            device=rows.device,
        )
        self._ancestors[:, 0, 0].fill_(1)

    def open(self, depth: int, parents: Tensor) -> StaticPass:
        """The pass over a depth's nodes.

        parents: [R, m] int64, counted among the nodes that were opened before.
        """
        m = parents.shape[1]
        begin = self._next
        own = torch.arange(begin, begin + m, device=parents.device)  # numbers in the tree
        self._positions[:, begin : begin + m] += depth  # from the root's on
        if not self.chain:
            # A node's ancestors are its parent's and itself.
            words = torch.arange(self._ancestors.shape[2], device=parents.device)
            bit = (1 << own % _WORD)[:, None]
            bits = torch.where(words == own[:, None] // _WORD, bit, 0)  # [m, words]
            above = (self._level + parents)[:, :, None].expand(-1, -1, len(words))
            ancestors = self._ancestors.gather(1, above) | bits.to(torch.int32)  # [R, m, words]
            self._ancestors[:, begin : begin + m] = ancestors
        self._level = begin
        self._next = begin + m
        return self._attention(
            self.held - 1,
            own,
            {m},
            self._positions,
            self._ancestors,
            self.chain,
        )

    def behind(
        self,
        count: int,
        computed: Sequence[int] | None = None,
        mutual: bool = False,
    ) -> StaticPass:
        """See `Places.behind`."""
        own = torch.arange(count, device=self.rows.device)
        positions = (self.held[:, None] + own).to(torch.int32)  # [R, count]
        shape = (len(positions), count, -(-count // _WORD))
        every = torch.full(shape, -1, dtype=torch.int32, device=own.device)  # all bits are set
        return self._attention(
            self.held,
            own,
            set(computed or [count]),
            positions,
            every,
            not mutual,
        )

    def _attention(
        self,
        prefix: Tensor,
        own: Tensor,
        computed: set[int],
        positions: Tensor,
        ancestors: Tensor,
        chain: bool,
    ) -> StaticPass:
        """The pass over tokens `own` [n] of each tree, behind `prefix` [R] slots.

        computed: how many last ones attend, in some layer each.
        """
        rows = len(self.rows)
        slots = (self.rows * self.cache.capacity + prefix)[:, None] + own  # [R, n]
        each = torch.arange(rows + 1, dtype=torch.int32, device=own.device)
        # Numbers of a growing tree's tokens begin at its level; those of a block at 0.
        begin = self._level if positions is self._positions else 0
        plans = []
        for queries in computed:
            plan = PackedPlan(
                rows=self.rows.to(torch.int32),
                offsets=each * queries,
                prefix_lens=prefix.to(torch.int32),
                chains=torch.full_like(each[:-1], int(chain)),
                # The kernel numbers queries behind held tokens, so all before the queries are held.
                helds=torch.full_like(each[:-1], begin + len(own) - queries),
                places=each[:-1] * positions.shape[1],
                positions=positions.flatten(),
                ancestors=ancestors.flatten(0, 1),
                max_new=queries,
                queries=rows * queries,
            )
            plans.append(plan)
        at = positions[:, begin : begin + len(own)].flatten().long()
        ends = each[1:].long() * len(own) - 1
        return StaticPass(self.cache, slots.flatten(), plans, at, ends, self.windows)


class ReadStep:
    """Reads the tokens that a round committed, of all sequences, packed and padded to a shape."""

    def __init__(self, steps: DraftSteps, shape: PlanShape, features: Tensor):
        tokens = shape.tokens
        device = features.device
        self.steps = steps
        self.shape = shape
        self.ids = torch.zeros(tokens, dtype=torch.long, device=device)  # [N]
        self.features = features.new_zeros(tokens, features.shape[1])  # [N, f*h]
        # Behind the slots: the row of each sequence [R] and its last token [R].
        self.places = PlanBuffers(shape, device, 2 * shape.rows)
        self.rows, self.ends = self.places.more.split(shape.rows)

    def fill(
        self,
        opened: Opened,
        ids: Tensor,
        features: Tensor,
    ) -> None:
        """Writes ids [n] and features [n, f*h] of the given cache rows to the buffers."""
        n = len(ids)
        cache = self.steps.cache
        self.ids[:n].copy_(ids)
        self.features[:n].copy_(features)
        ends = np.cumsum([layout.count for _, layout in opened]) - 1
        spare = self.shape.rows - len(opened)  # padding rows use the cache's last row
        more = [row for row, _ in opened] + [cache.rows - 1] * spare
        more += ends.tolist() + [0] * spare
        self.places.fill(opened, cache.capacity, more)

    @torch.no_grad()
    def forward(self) -> None:
        drafter = self.steps.drafter
        places = self.places
        at = StaticPass(
            self.steps.cache,
            places.slots,
            [places.plan],
            places.plan.positions.long(),
            self.ends,
            drafter.windows,
        )
        roots = drafter.read_committed(self.ids, self.features, at)
        self.steps.roots.index_copy_(0, self.rows, roots.to(self.steps.roots.dtype))


class GrowStep:
    """Grows the trees of R sequences."""

    def __init__(
        self,
        steps: DraftSteps,
        growth: TensorGrowth,
        rows: int,
        params: SamplingParams | None,
    ):
        self.steps = steps
        self.growth = growth
        self.params = params
        device = growth.device
        self._numbers = torch.zeros(2 * rows, dtype=torch.int64, device=device)
        self.rows, self.held = self._numbers.split(rows)  # [R] each
        self.uniforms: Tensor | None = None  # [R, depth], a random number per drawn token
        if params is not None:
            self.uniforms = torch.zeros(rows, growth.depth, dtype=torch.float64, device=device)

    def fill(
        self,
        rows: Sequence[int],
        held: Sequence[int],
        samplers: Sequence[Sampler | None],
    ) -> None:
        """Writes the sequences' cache rows, committed tokens and random numbers to the buffers."""
        spare = len(self.rows) - len(rows)  # padding rows use the cache's last row
        numbers = list(rows) + [self.steps.cache.rows - 1] * spare
        numbers += list(held) + [1] * spare
        upload(torch.tensor(numbers), self._numbers)
        if self.uniforms is not None:
            drawn = []
            for sampler in samplers:
                if sampler is not None:
                    uniforms = torch.rand(
                        self.growth.depth, dtype=torch.float64, generator=sampler.generator
                    )
                    drawn.append(uniforms)
            upload(torch.stack(drawn), self.uniforms[: len(drawn)])

    @torch.no_grad()
    def forward(self) -> Grown:
        steps = self.steps
        drafter = steps.drafter
        places = StaticPlaces(
            steps.cache,
            self.rows,
            self.held,
            self.growth,
            drafter.windows,
        )
        first, ask = drafter.draft(steps.roots[self.rows], places, None)
        trees = torch.arange(len(self.rows), device=self.rows.device)[:, None]  # [R, 1]
        before = 1  # nodes of a tree that were opened last

        def below(depth: int, tokens: Tensor, parents: Tensor) -> Children:
            nonlocal before
            above = trees * before + parents  # [R, m]
            before = tokens.shape[1]
            nodes = Nodes(
                depth,
                rows=trees.expand_as(tokens).flatten(),
                tokens=lambda: drafter.kept_ids[tokens.flatten()],
                above=above.flatten,
                place=partial(places.open, depth, parents),
            )
            return ask(nodes)

        grown = self.growth.grow(first, below, self.params, self.uniforms)
        return grown._replace(tokens=drafter.kept_ids[grown.tokens])


class DraftSteps:
    """The static steps of a drafter, and the cache that its sessions share.

    Args:
        drafter: a `TrainableDrafter` whose forward can be captured. pool: of the graphs, perhaps the target's.
        capacity: most tokens of a sequence. rows: most sequences at a time. spec: the largest tree.

    Attributes:
        roots: [rows + 1, w] each session's root, what a kind keeps of a sequence's last committed
            token; set by the first draft. The last row, here and in the cache, belongs to padding.
    """

    roots: Tensor

    def __init__(
        self,
        drafter: Any,
        pool: GraphPool,
        capacity: int,
        rows: int,
        spec: TreeSpec,
    ):
        self.drafter = drafter
        self._captured = Captured(pool, f"drafter ({self.drafter.kind}) drafts without CUDA graphs")
        self._limits = (capacity, rows)
        self._growths: dict[TreeSpec, TensorGrowth] = {}
        self._device = drafter.kept_ids.device
        self._vocabulary = len(drafter.kept_ids)
        self._most_read = spec.depth + 1  # tokens that a round may commit
        # Slots behind the committed tokens: of a tree's opened nodes and root, or of a block.
        opened = 1 + sum(self._growth(spec).opens)
        self._behind = max(opened, getattr(drafter.config, "block_size", 0))
        # Tokens, of a read step.
        padding = bucket(min(padded_rows(rows) * self._most_read, BUCKETS[-1]))
        self.cache = TreeCache(capacity + self._behind + padding, rows + 1)
        self.cache.allocate(drafter.static_layers())
        self._roots: list[Tensor] = []

    def fits(
        self,
        drafter: object,
        capacity: int,
        rows: int,
        spec: TreeSpec,
    ) -> bool:
        """Whether these steps serve such a call."""
        if drafter is not self.drafter or capacity > self._limits[0] or rows > self._limits[1]:
            return False
        return spec.depth < self._most_read and sum(self._growth(spec).opens) < self._behind

    def _growth(self, spec: TreeSpec) -> TensorGrowth:
        if spec not in self._growths:
            self._growths[spec] = TensorGrowth(
                spec,
                self._vocabulary,
                self.drafter.static_depth,
                self._device,
            )
        return self._growths[spec]

    def _take_root(self, session: JointSession) -> None:
        """Moves a session's root to its row of `roots`; a dynamic pass leaves it elsewhere."""
        assert session.root is not None
        if not self._roots:
            self.roots = session.root.new_zeros(self.cache.rows, *session.root.shape[1:])
            self._roots = list(self.roots.split(1))
        place = self._roots[session.row]
        if session.root is not place:
            place.copy_(session.root)
            session.root = place  # a view, which later read steps fill

    def read(
        self,
        sessions: Sequence[JointSession],
        tokens: Sequence[Tensor],
        features: Sequence[Tensor],
    ) -> bool:
        """Reads what the target committed, as `Drafter.extend_all`.

        Returns:
            False where a dynamic pass must read it.
        """
        counts = [len(new) for new in tokens]
        shape = step_shape(counts)
        if shape is None:
            return False
        # One shape for all rounds, whatever was accepted.
        usual = padded_rows(len(counts)) * self._most_read
        if max(counts) <= self._most_read and usual <= BUCKETS[-1]:
            most = bucket(usual)
            shape = PlanShape(shape.rows, most, most, -(-most // _WORD))

        padding = shape.tokens - sum(counts)  # written behind the last sequence's tokens
        end = 0
        for session, count in zip(sessions, counts, strict=True):
            if session.root is None or not session.reaches(count):
                return False
            end = session.length + count
            if end > self.cache.capacity:
                return False
        if end + padding > self.cache.capacity:
            return False

        opened = []
        for session, count in zip(sessions, counts, strict=True):
            self._take_root(session)
            opened.append((session.row, TreeLayout(session.length, count=count)))
        ids = torch.cat(list(tokens))  # [n]
        states = torch.cat(list(features))  # [n, f*h]
        run = self._captured.step(
            shape,
            lambda: ReadStep(self, shape, states),
            lambda step: step.fill(opened, ids, states),
        )
        if run is None:
            return False
        run()
        for session, count in zip(sessions, counts, strict=True):
            session.advance(count)
        return True

    def propose(
        self,
        sessions: Sequence[JointSession],
        spec: TreeSpec,
        samplers: Sequence[Sampler | None],
    ) -> list[TokenTree] | None:
        """A tree per session, as `Drafter.propose_all`; None where dynamic passes must draft."""
        if not TensorGrowth.serves(spec):
            return None
        growth = self._growth(spec)
        rows = padded_rows(len(sessions))
        most = 1 + sum(growth.opens)  # slots of a tree: its root and opened nodes
        if rows * max(growth.opens, default=0) > _MOST_OPENED or most > _MOST_OPENED:
            return None
        for session in sessions:
            if session.root is None or not session.reaches(spec.depth):
                return None
            if session.length + most > self.cache.capacity:
                return None

        at = []  # cache rows
        held = []  # committed tokens
        for session in sessions:
            self._take_root(session)
            at.append(session.row)
            held.append(session.length)
        params = None
        sampler = samplers[0]
        if spec.sampled and sampler is not None:
            params = sampler.params
        run = self._captured.step(
            (spec, rows, params),
            lambda: GrowStep(self, growth, rows, params),
            lambda step: step.fill(at, held, samplers),
        )
        if run is None:
            return None
        return self._trees(run(), growth, len(sessions))

    def _trees(self, grown: Grown, growth: TensorGrowth, count: int) -> list[TokenTree]:
        """Copies the trees of `count` sequences; one transfer if their shapes depend on scores."""
        tokens = grown.tokens[:count].clone()  # [count, n]
        scores = grown.scores[:count].float()  # [count, n]
        trees = []
        if growth.fixed:
            scores = scores.clone()  # the next replay overwrites what the step made
            rows = list(range(growth.nodes))
            q = grown.proposals  # [R, n, d]
            if q is not None:
                q = q[:count].clone()
            for i in range(count):
                tree = TokenTree(tokens[i], list(growth.parents), scores[i])
                if q is not None:
                    tree.proposal = Proposal(q[i], rows, self.drafter.kept_ids)
                trees.append(tree)
            return trees

        # Counts, parents and the bits of scores in one table, which is the round's one transfer.
        # Integers hold a float's 32 bits exactly, whatever it is.
        bits = scores.view(torch.int32).long()
        table = torch.cat((grown.counts[:count, None], grown.parents[:count], bits), dim=1).cpu()
        nodes = tokens.shape[1]
        sizes = table[:, 0].tolist()
        parents = table[:, 1 : 1 + nodes].tolist()
        log_probs = table[:, 1 + nodes :].to(torch.int32).view(torch.float32)
        for i, size in enumerate(sizes):
            trees.append(TokenTree(tokens[i, :size], parents[i][:size], log_probs[i, :size]))
        return trees
