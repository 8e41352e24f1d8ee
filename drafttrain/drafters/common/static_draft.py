"""Static draft steps: what a drafter reads and drafts in a round, as functions of fixed buffers
that CUDA graphs replay.

    round      committed tokens and features of R sequences    ->  ReadStep    keys of the tokens, `roots` of the next trees
               roots                                           ->  GrowStep    all depths of all trees, one transfer at the end

The launches of a depth take a GPU longer than its work, and a tree that the host chooses waits for
the device at every depth. `DraftSteps` holds the steps of a drafter and the cache that its sessions
share. A session's buffers are views of its row there, so prompts, and what no step serves, take the
dynamic passes (`extend_all`, `propose_all`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Unpack

import numpy as np
import torch
from torch import Tensor

from drafttrain.batch import Attend, Proposal, TokenTree
from drafttrain.drafters.common.tensor_growth import Ask, Grown, TensorGrowth
from drafttrain.drafters.common.tree_growth import Logits
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import first_line
from drafttrain.ops.graphs import BUCKETS, GraphPool, bucket, padded_rows, step_shape, upload
from drafttrain.ops.sampling import Sampler, SamplingParams
from drafttrain.ops.tree_attention import AttentionForm, TreeLayout
from drafttrain.ops.tree_attention_triton import (
    PackedPlan,
    PlanShape,
    pack_plan,
    packed_tree_attention,
)
from drafttrain.ops.tree_cache import TreeCache

_WORD = 32
_MOST_OPENED = BUCKETS[-1]  # nodes of all trees at one depth, and of one tree


class SlotAttention:
    """Attention of new tokens that are stored at given slots of a cache, as a plan defines it (an
    `AttentionContext`).

    Args:
        slots: [n] int64 of the new keys, on the cache's common axis. plan: of the queries, perhaps
            each row's last ones only.
    """

    def __init__(self, cache: TreeCache, slots: Tensor, plan: PackedPlan):
        self.cache = cache
        self.slots = slots
        self.plan = plan

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **form: Unpack[AttentionForm]
    ) -> Tensor:
        """See `AttentionContext.attend`."""
        self.cache.store(layer, self.slots, key, value)
        return packed_tree_attention(query, *self.cache.by_row(layer), self.plan, **form).transpose(
            1, 2
        )

    def layers(self, count: int, window: int) -> list[Attend]:
        """The same for a drafter's layers, whose tokens are flat; window: visible positions, 0 for
        all.
        """

        def of_layer(layer: int) -> Attend:
            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                parts = (part.transpose(0, 1)[None] for part in (query, key, value))
                scaling = query.shape[-1] ** -0.5
                out = self.attend(
                    layer,
                    *parts,
                    scaling=scaling,
                    window=window or None,
                    softcap=None,
                    sinks=None,
                )
                return out[0].flatten(1)  # [n, heads * e]

            return attend

        return [of_layer(layer) for layer in range(count)]


class DraftPlaces:
    """Where the new tokens of a round's draft stand behind the committed ones, computed on the
    device.

    Args:
        cache: of the sessions. rows: [R] int64 each sequence's. held: [R] int64 its committed
            tokens whose keys are in place.
        growth: of the trees that grow behind the last committed token, their root.

    Attributes:
        depth: of the deepest node.
    """

    def __init__(self, cache: TreeCache, rows: Tensor, held: Tensor, growth: TensorGrowth):
        self.cache = cache
        self.rows = rows
        self.held = held
        most = 1 + sum(growth.opens)
        self.depth = growth.depth
        self.chain = all(count == 1 for count in growth.opens)
        self._level = 0
        self._next = 1
        shape = (len(rows), most)
        self._positions = (held - 1)[:, None].expand(shape).to(torch.int32).contiguous()
        words = 1
        if not self.chain:
            words = -(-most // _WORD)
        self._ancestors = torch.zeros((*shape, words), dtype=torch.int32, device=rows.device)
        self._ancestors[:, 0, 0].fill_(1)

    def open(self, depth: int, parents: Tensor) -> tuple[Tensor, SlotAttention]:
        """A depth's nodes, whose parents [R, m] are counted among those opened before: positions [R
        * m], and their attention.
        """
        (_, m), begin = parents.shape, self._next
        own = torch.arange(begin, begin + m, device=parents.device)  # numbers in the tree
        self._positions[:, begin : begin + m] += depth
        if not self.chain:
            words = torch.arange(self._ancestors.shape[2], device=parents.device)
            # [m, words]
            bits = torch.where(words == own[:, None] // _WORD, (1 << own % _WORD)[:, None], 0).to(
                torch.int32
            )
            above = (self._level + parents)[:, :, None].expand(-1, -1, len(words))
            self._ancestors[:, begin : begin + m] = self._ancestors.gather(1, above) | bits
        self._level = begin
        self._next = begin + m
        return self._attention(self.held - 1, own, m, self._positions, self._ancestors, self.chain)

    def behind(
        self,
        count: int,
        queries: int,
        mutual: bool = False,
    ) -> tuple[Tensor, SlotAttention]:
        """`count` tokens in a row behind the committed ones; mutual: they see each other in both
        directions.

        Returns:
            Positions [R * count], and the attention of each sequence's last `queries` tokens.
        """
        own = torch.arange(count, device=self.rows.device)
        positions = (self.held[:, None] + own).to(torch.int32)
        words = torch.full(
            (*positions.shape, -(-count // _WORD)),
            -1,
            dtype=torch.int32,
            device=own.device,
        )  # all bits
        return self._attention(self.held, own, queries, positions, words, not mutual)

    def _attention(
        self,
        prefix: Tensor,
        own: Tensor,
        queries: int,
        positions: Tensor,
        ancestors: Tensor,
        chain: bool,
    ) -> tuple[Tensor, SlotAttention]:
        """Stores tokens `own` [n] of each tree at the slots behind `prefix` [R]; the last `queries`
        of them attend.
        """
        rows = len(self.rows)
        device = own.device
        slots = (self.rows * self.cache.capacity + prefix)[:, None] + own  # [R, n]
        each = torch.arange(rows + 1, dtype=torch.int32, device=device)
        whole = lambda number: torch.full((rows,), number, dtype=torch.int32, device=device)  # noqa: E731
        begin = self._level if positions is self._positions else 0
        plan = PackedPlan(
            rows=self.rows.to(torch.int32),
            offsets=each * queries,
            prefix_lens=prefix.to(torch.int32),
            chains=whole(int(chain)),
            helds=whole(begin + len(own) - queries),
            places=each[:-1] * positions.shape[1],
            positions=positions.flatten(),
            ancestors=ancestors.flatten(0, 1),
            max_new=queries,
            queries=rows * queries,
        )
        at = positions[:, begin : begin + len(own)].flatten().long()
        return at, SlotAttention(self.cache, slots.flatten(), plan)


class StaticDrafter(Protocol):
    """What `DraftSteps` needs of a drafter; `TrainableDrafter` describes the methods."""

    kind: str
    kept_ids: Tensor
    static_depth: int | None

    def static_layers(self) -> dict[int, tuple[Tensor, Tensor]]: ...
    def read_static(
        self,
        ids: Tensor,
        features: Tensor,
        positions: Tensor,
        context: SlotAttention,
        ends: Tensor,
    ) -> Tensor: ...
    def draft_static(self, roots: Tensor, places: DraftPlaces) -> tuple[Logits, Ask]: ...


class PlacedSession(Protocol):
    """What `DraftSteps` needs of a session; `JointSession` describes it."""

    root: Tensor | None
    row: int

    @property
    def held(self) -> int: ...
    def reaches(self, depth: int) -> bool: ...
    def advance(self, count: int) -> None: ...


class ReadStep:
    """Reads the tokens that a round committed, of all sequences, packed and padded to a shape."""

    def __init__(self, steps: DraftSteps, shape: PlanShape, features: Tensor):
        self.steps, self.shape, tokens, device = steps, shape, shape.tokens, features.device
        self.ids = torch.zeros(tokens, dtype=torch.long, device=device)
        self.features = features.new_zeros(tokens, features.shape[1])
        # int32 numbers of the plan, then int64 ones: slots [N], the row of each sequence and its
        # last token [R].
        self._numbers = torch.zeros(
            shape.numbers + 2 * (tokens + 2 * shape.rows),
            dtype=torch.int32,
            device=device,
        )
        self.plan = PackedPlan.static(self._numbers[: shape.numbers], shape)
        long = self._numbers[shape.numbers :].view(torch.int64)
        self.slots, self.rows, self.ends = long.split([tokens, shape.rows, shape.rows])

    def fill(
        self,
        rows: Sequence[int],
        layouts: Sequence[TreeLayout],
        ids: Tensor,
        features: Tensor,
    ) -> None:
        """Writes ids [n] and features [n, f*h] of the given cache rows to the buffers."""
        n = len(ids)
        cache = self.steps.cache
        self.ids[:n].copy_(ids)
        self.features[:n].copy_(features)
        counts = [layout.count for layout in layouts]
        ends = np.cumsum(counts) - 1
        counts[-1] += self.shape.tokens - n
        starts = [
            row * cache.capacity + layout.prefix_len
            for row, layout in zip(rows, layouts, strict=True)
        ]
        slots = [
            np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)
        ]
        spare = self.shape.rows - len(rows)
        long = np.concatenate((*slots, rows, [cache.rows - 1] * spare, ends, [0] * spare)).astype(
            np.int64
        )
        numbers = np.concatenate((pack_plan(layouts, rows, self.shape), long.view(np.int32)))
        upload(torch.from_numpy(numbers), self._numbers)

    @torch.no_grad()
    def forward(self) -> None:
        context = SlotAttention(self.steps.cache, self.slots, self.plan)
        positions = self.plan.positions.long()
        roots = self.steps.drafter.read_static(
            self.ids,
            self.features,
            positions,
            context,
            self.ends,
        )
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
        self.rows, self.held = self._numbers.split(rows)
        self.uniforms = (
            torch.zeros(rows, growth.depth, dtype=torch.float64, device=device) if params else None
        )

    def fill(
        self,
        rows: Sequence[int],
        held: Sequence[int],
        samplers: Sequence[Sampler | None],
    ) -> None:
        """Writes the sequences' cache rows and committed tokens to the buffers, and a random number
        per drawn token.
        """
        spare = len(self.rows) - len(rows)
        upload(
            torch.tensor([*rows, *[self.steps.cache.rows - 1] * spare, *held, *[1] * spare]),
            self._numbers,
        )
        if self.uniforms is not None:
            depth = self.growth.depth
            drawn = [
                torch.rand(depth, dtype=torch.float64, generator=each.generator)
                for each in samplers
                if each
            ]
            upload(torch.stack(drawn), self.uniforms[: len(drawn)])

    @torch.no_grad()
    def forward(self) -> Grown:
        steps = self.steps
        places = DraftPlaces(steps.cache, self.rows, self.held, self.growth)
        first, ask = steps.drafter.draft_static(steps.roots[self.rows], places)
        grown = self.growth.grow(first, ask, self.params, self.uniforms)
        return grown._replace(tokens=steps.drafter.kept_ids[grown.tokens])


class DraftSteps:
    """The static steps of a drafter, and the cache that its sessions share.

    Args:
        drafter: whose forward can be captured. pool: of the graphs, perhaps the target's.
        capacity: most tokens of a sequence. rows: most sequences at a time. spec: the largest tree.

    Attributes:
        roots: [rows + 1, w] each session's root, what a kind keeps of a sequence's last committed
            token; set by the first draft. The last row, here and in the cache, belongs to padding.
        failure: why drafts stay dynamic; empty unless a capture failed.
    """

    roots: Tensor

    def __init__(self, drafter: Any, pool: GraphPool, capacity: int, rows: int, spec: TreeSpec):
        self.drafter: StaticDrafter = drafter
        self.pool = pool
        self.failure = ""
        self._limits = (capacity, rows)
        kept = drafter.kept_ids
        self._growths: dict[TreeSpec, TensorGrowth] = {}
        self._device, self._vocabulary = kept.device, len(kept)
        self._most_read = spec.depth + 1
        self._behind = max(
            1 + sum(self._growth(spec).opens), getattr(drafter.config, "block_size", 0)
        )
        padding = bucket(min(padded_rows(rows) * self._most_read, BUCKETS[-1]))
        self.cache = TreeCache(capacity + self._behind + padding, rows + 1)
        self.cache.allocate(drafter.static_layers())
        self._roots: list[Tensor] = []
        self._steps: dict[object, tuple[Any, Callable[[], Any]]] = {}

    def fits(self, drafter: object, capacity: int, rows: int, spec: TreeSpec) -> bool:
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

    def _take_root(self, session: PlacedSession) -> None:
        """Moves a session's root to its row of `roots`, where a dynamic pass does not leave it."""
        assert session.root is not None
        if not self._roots:
            self.roots = session.root.new_zeros(self.cache.rows, *session.root.shape[1:])
            self._roots = list(self.roots.split(1))
        place = self._roots[session.row]
        if session.root is not place:
            place.copy_(session.root)
            session.root = place

    def _step(
        self,
        key: object,
        make: Callable[[], Any],
        fill: Callable[[Any], None],
    ) -> Callable[[], Any] | None:
        """The captured step of a key, its buffers filled; None if it cannot be captured."""
        if self.failure:
            return None
        if key in self._steps:
            step, run = self._steps[key]
            fill(step)
            return run
        step = make()
        fill(step)
        try:
            run = self.pool.capture(step.forward)
        except Exception as error:  # whatever prevents a capture, the drafter drafts without graphs
            self.failure = first_line(error)
            print(
                f"drafter ({self.drafter.kind}) drafts without CUDA graphs: {self.failure}",
                file=sys.stderr,
                flush=True,
            )
            return None
        self._steps[key] = step, run
        return run

    def read(
        self,
        sessions: Sequence[PlacedSession],
        tokens: Sequence[Tensor],
        features: Sequence[Tensor],
    ) -> bool:
        """Reads what the target committed, as `Drafter.extend_all`; False where a dynamic pass
        must.
        """
        counts = [len(new) for new in tokens]
        usual = padded_rows(len(counts)) * self._most_read
        shape = step_shape(counts)
        if shape is None or any(session.root is None for session in sessions):
            return False
        if (
            max(counts) <= self._most_read and usual <= BUCKETS[-1]
        ):  # one shape whatever was accepted
            most = bucket(usual)
            shape = PlanShape(shape.rows, most, most, -(-most // _WORD))
        padding = shape.tokens - sum(counts)
        ends = [session.held + count for session, count in zip(sessions, counts, strict=True)]
        if max(*ends, ends[-1] + padding) > self.cache.capacity:
            return False
        if not all(session.reaches(count) for session, count in zip(sessions, counts, strict=True)):
            return False
        for session in sessions:
            self._take_root(session)
        rows = [session.row for session in sessions]
        layouts = [
            TreeLayout(session.held, count=count)
            for session, count in zip(sessions, counts, strict=True)
        ]
        ids = torch.cat(list(tokens))
        states = torch.cat(list(features))
        run = self._step(
            shape,
            lambda: ReadStep(self, shape, states),
            lambda step: step.fill(rows, layouts, ids, states),
        )
        if run is None:
            return False
        run()
        for session, count in zip(sessions, counts, strict=True):
            session.advance(count)
        return True

    def propose(
        self,
        sessions: Sequence[PlacedSession],
        specs: Sequence[TreeSpec],
        samplers: Sequence[Sampler | None],
    ) -> list[TokenTree] | None:
        """A tree per session, as `Drafter.propose_all`; None where dynamic passes must draft."""
        spec = specs[0]
        sampler = samplers[0]
        if spec.sampled and sampler is not None:
            params = sampler.params
        else:
            params = None
        if any(other != spec for other in specs) or not TensorGrowth.serves(spec):
            return None
        if any(session.root is None or not session.reaches(spec.depth) for session in sessions):
            return None
        growth = self._growth(spec)
        rows = padded_rows(len(sessions))
        most = 1 + sum(growth.opens)
        if rows * max(growth.opens, default=0) > _MOST_OPENED or most > _MOST_OPENED:
            return None
        if any(session.held + most > self.cache.capacity for session in sessions):
            return None
        for session in sessions:
            self._take_root(session)
        at = [session.row for session in sessions], [session.held for session in sessions]
        run = self._step(
            (spec, rows, params),
            lambda: GrowStep(self, growth, rows, params),
            lambda step: step.fill(*at, samplers),
        )
        if run is None:
            return None
        return self._trees(run(), growth, len(sessions))

    def _trees(self, grown: Grown, growth: TensorGrowth, count: int) -> list[TokenTree]:
        """Copies the trees of `count` sequences; one transfer where their shapes depend on scores."""
        tokens = grown.tokens[:count].clone()
        scores = grown.scores[:count].float()
        if growth.fixed:
            scores = scores.clone()  # the next replay overwrites what the step made
            rows = list(range(growth.nodes))
            kept = self.drafter.kept_ids
            if grown.proposals is None:
                q = None
            else:
                q = grown.proposals[:count].clone()
            drawn = [None] * count if q is None else [Proposal(each, rows, kept) for each in q]
            parts = zip(tokens, scores, drawn, strict=True)
            return [
                TokenTree(ids, list(growth.parents), log_probs, q) for ids, log_probs, q in parts
            ]
        packed = torch.cat(
            (grown.counts[:count, None], grown.parents[:count], scores.view(torch.int32).long()),
            dim=1,
        )
        table = packed.cpu()  # the round's one transfer
        nodes = tokens.shape[1]
        log_probs = table[:, 1 + nodes :].to(torch.int32).view(torch.float32)
        lists = zip(tokens, log_probs, table[:, : 1 + nodes].tolist(), strict=True)
        return [
            TokenTree(ids[:size], parents[:size], scores[:size])
            for ids, scores, (size, *parents) in lists
        ]
