"""One way to draft: a trained kind writes its forward as two functions, and this module runs it.

    read_committed(ids, features, at)    committed tokens of all sequences  ->  roots [R, ...], one per sequence
    draft(roots, places, width)          roots  ->  `Children` of the roots, and `ask`, which gives those of deeper nodes

The same two functions serve three ways to run a round. `propose` is the only door and takes the first
that applies: static steps in CUDA graphs (static_draft.py), one C call that grows greedy trees, and
growth on the host (tree_growth.py) with one pass per depth.

A `DraftPass` says where the new tokens stand and what they see: `HostPass` over the sessions' own caches (`TreeCache`),
`StaticPass` over the cache that static steps share, of which a session's own is a view.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, Unpack

import torch
from torch import Tensor

from drafttrain.batch import TokenTree, cat
from drafttrain.drafters.common.context_tokens import ContextTokens
from drafttrain.drafters.common.tree_growth import Children as Children
from drafttrain.drafters.common.tree_growth import GrowingTree, grow_trees, widest
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.ops.cpu_draft import DraftHead, DraftStep, Placed, TreeShape
from drafttrain.ops.packing import SKINNY_ROWS, without_grad
from drafttrain.ops.sampling import Sampler
from drafttrain.ops.tree_attention import AttentionForm, BlockLayout, CpuPlan, TreeLayout
from drafttrain.ops.tree_cache import TreeCache

Sessions = Sequence[Any]  # of one drafter; the kind's own class
# The target's likeliest next tokens and their probabilities, descending.
Predictions = tuple[list[int], list[float]]


class DraftPass:
    """The new tokens of a forward of all sequences, one after the other: an `AttentionContext`.

    Attributes:
        windows: of the drafter's layers; none for a language model's.
        positions: [n] int64. ends: [R] int64, number of each sequence's last token.
        queries: [q] int64 tokens that the last layer computes; None for all.
    """

    windows: tuple[int, ...]
    positions: Tensor
    ends: Tensor
    queries: Tensor | None = None

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **form: Unpack[AttentionForm],
    ) -> Tensor:
        """See `AttentionContext.attend`; queries may be fewer: each sequence's last tokens."""
        raise NotImplementedError

    def write(
        self,
        layer: int,
        key: Tensor,
        value: Tensor,
    ) -> None:
        """Stores a layer's keys and values [1, kv_heads, n, e] without attending."""
        raise NotImplementedError

    def placed(self, step: DraftStep | None) -> Placed | None:
        """Where the CPU kernels find the tokens; None where they do not apply."""
        return None

    @property
    def context(self) -> Any:
        """The same `AttentionContext` for a language model."""
        return self

    @property
    def attends(self) -> list[Callable[..., Tensor]]:
        """Attention of each of the drafter's layers (`_attend_flat`)."""
        return [partial(self._attend_flat, layer) for layer in range(len(self.windows))]

    def _attend_flat(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [q, heads, e], key and value [n, kv_heads, e] -> [q, heads * e].

        sinks: [heads], see `AttentionForm`.
        """
        out = self.attend(
            layer,
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            scaling=query.shape[-1] ** -0.5,
            window=self.windows[layer] or None,
            softcap=None,
            sinks=sinks,
        )  # [1, q, heads, e]
        return out[0].flatten(1)

    def store(
        self,
        layer: int,
        key: Tensor,
        value: Tensor,
    ) -> None:
        """Stores a layer's keys and values [n, kv_heads, e] without attending."""
        self.write(layer, key.transpose(0, 1)[None], value.transpose(0, 1)[None])


class Nodes(NamedTuple):
    """Nodes of all trees that are opened at a depth.

    Attributes:
        depth: of their children's logits, from 1. rows: [n], each node's sequence; a tensor in
            static steps.

    What not every kind reads is made by a call:

        tokens: [n] int64 target ids.
        above: [n] int64, number of each node's parent among those that were opened before (the
            roots at first).
        place: the pass over them.
    """

    depth: int
    rows: Sequence[int] | Tensor
    tokens: Callable[[], Tensor]
    above: Callable[[], Tensor]
    place: Callable[[], DraftPass]


Ask = Callable[[Nodes], Children]


class Places(Protocol):
    """Where a round's tokens stand behind the committed ones.

    Attributes:
        depth: of the deepest node of any tree.
    """

    depth: int

    def behind(
        self,
        count: int,
        computed: Sequence[int] | None = None,
        mutual: bool = False,
    ) -> DraftPass:
        """The pass over `count` tokens in a row behind each sequence.

        Args:
            computed: how many last tokens of a sequence each layer computes; None for all.
            mutual: the tokens see each other in both directions.
        """


class HostPass(DraftPass):
    """A pass over the sessions' own caches.

    Args:
        layouts: where each session's new tokens stand. The caches get room for them.
        last: the last layer computes each session's last token only.
    """

    def __init__(
        self,
        sessions: Sessions,
        layouts: Sequence[TreeLayout],
        last: bool = False,
    ):
        self.sessions = sessions
        self.layouts = layouts
        self.counts = [layout.count for layout in layouts]
        self.last = last
        self.windows = sessions[0].drafter.windows
        for session, layout in zip(sessions, layouts, strict=True):
            cache = session.cache
            cache.reserve(layout.end)  # a tree may reach beyond the longest sequence
            layout.base = cache.base

    @property
    def caches(self) -> list[TreeCache]:
        """Those of the sessions, to which the tokens are announced; kernels need no announcement.

        A block that some layers see in one direction has two passes over the same slots.
        """
        caches = [session.cache for session in self.sessions]
        for cache, layout in zip(caches, self.layouts, strict=True):
            if cache.opened != [(0, layout)]:
                cache.open([(0, layout)])
        return caches

    @cached_property
    def ends(self) -> Tensor:  # type: ignore[override]
        last = [end - 1 for end in accumulate(self.counts)]
        return torch.tensor(last, device=self.sessions[0].drafter.kept_ids.device)

    @property
    def queries(self) -> Tensor | None:  # type: ignore[override]
        return self.ends if self.last else None

    @cached_property
    def positions(self) -> Tensor:  # type: ignore[override]
        each = [layout.positions()[0] for layout in self.layouts]
        return cat(each).to(self.sessions[0].drafter.kept_ids.device)

    @property
    def context(self) -> Any:
        """A single sequence's cache, whose kernels serve all layers in one call."""
        if len(self.caches) == 1:
            return self.caches[0]
        return self

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **form: Unpack[AttentionForm],
    ) -> Tensor:
        counts = self.counts
        asked = counts
        if query.shape[2] < key.shape[2]:
            asked = [query.shape[2] // len(counts)] * len(counts)
        queries = split(query, asked, 2)
        keys = split(key, counts, 2)
        values = split(value, counts, 2)
        outs = []
        for i, cache in enumerate(self.caches):
            outs.append(cache.attend(layer, queries[i], keys[i], values[i], **form))
        return cat(outs, 1)

    def write(
        self,
        layer: int,
        key: Tensor,
        value: Tensor,
    ) -> None:
        keys = split(key, self.counts, 2)
        values = split(value, self.counts, 2)
        for i, cache in enumerate(self.caches):
            cache.write(layer, keys[i], values[i])

    def placed(self, step: DraftStep | None, room: int = 0) -> Placed | None:
        """See `DraftPass.placed`; room: further slots behind the tokens."""
        # Many tokens, as of a prompt, are read faster by torch's layers.
        if step is None or sum(self.counts) > SKINNY_ROWS:
            return None
        plan = CpuPlan.build([(0, layout) for layout in self.layouts])
        if plan is None:
            return None
        caches = []
        for session, end in zip(self.sessions, plan.ends, strict=True):
            if room:
                session.cache.reserve(end + room)
            caches.append(session.cache.addresses(step.shapes))
        return Placed(plan, caches)


class Steps(Protocol):
    """What sessions and the driver need of static steps (`DraftSteps`)."""

    cache: TreeCache

    def read(
        self,
        sessions: Sessions,
        tokens: Sequence[Tensor],
        features: Sequence[Tensor],
    ) -> bool: ...
    def propose(
        self,
        sessions: Sessions,
        spec: TreeSpec,
        samplers: Sequence[Sampler | None],
    ) -> list[TokenTree] | None: ...


class Session:
    """A drafter's state for one sequence.

    Its cache holds committed tokens and true target features only.
    """

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        """Reads what the target has just committed.

        Args:
            tokens: [m] int64; tokens[i] follows the position of features[i]. The first calls after
                `start` cover the prompt, a long one in several pieces: tokens are prompt[1:] plus
                the first sampled token.
            features: [m, f*h], the target's features at those positions (f may be 0).
        """
        raise NotImplementedError

    def propose(self, spec: TreeSpec, sampler: Sampler | None = None) -> TokenTree:
        """Drafts a tree below the last committed token.

        It may have fewer nodes than `spec` allows, or none.

        Args:
            spec: the tree's shape. Kinds that draft by a rule ignore `sampled`.
            sampler: draws the tokens; required if `spec.sampled`.
        """
        raise NotImplementedError

    def go_back(self, tokens: Tensor) -> bool:
        """Forgets all that it has read behind `tokens` [m] and their features.

        Returns:
            False, with nothing done, where that is not possible (the default).
        """
        return False

    def probe(self) -> tuple[list[int], list[int]]:
        """Returns the tokens of this round's probes and their parents (-1: the root).

        Called after `propose`. Parents are counted among the probes.
        Probes are nodes that the target verifies in the same pass but never accepts; only the
        session learns from them.
        """
        return [], []

    def place(self, steps: Steps, row: int) -> None:
        """Makes the session, which is new, use a row of static steps (`Drafter.open_steps`)."""

    def observe(self, chosen: list[int]) -> None:
        """Reads the target's likeliest token after the root and after each probe.

        It is -1 for probes that were not verified. Called before the `extend` of the same round.
        Decoding stays lossless: the next round's tokens are not chosen yet.
        """

    def read_predictions(self, tree: TokenTree, predictions: list[Predictions]) -> None:
        """Reads the target's likeliest tokens after the root and each node of a round's tree.

        Called as `observe`, for nodes accepted or not. The tree hangs below the last token that the
        session has read.

        Args:
            predictions: [n + 1], of `Drafter.predictions` tokens each. Probabilities are of the
                logits as they are, among these tokens alone.
        """


class JointSession(Session):
    """A session of a drafter that serves several in one pass (`extend_all`, `propose_all`).

    Attributes:
        root: what the drafter keeps of the last committed token, a row [1, ...]; None before the
            first `extend`.
        steps, row: static steps that serve the session, and its row there; None: all its passes are
            dynamic.
        cache: keys and values of the committed tokens, then of this round's nodes in the order they
            were opened; without layers in kinds that keep none.
        text: `ContextTokens`, tokens that joined the vocabulary; None where none may, as with
            static steps.
    """

    root: Any = None
    steps: Steps | None = None
    row = 0

    def __init__(
        self,
        drafter: Any,
        cache: TreeCache,
        text: Any = None,
    ):
        self.drafter = drafter
        self.cache = cache
        self.text = text

    @property
    def length(self) -> int:
        """Committed tokens in the cache."""
        return self.cache.lengths[0]

    @property
    def ids(self) -> Tensor:
        """[d and further tokens] int64, target id of each drafter id."""
        if self.text is None:
            return self.drafter.kept_ids
        return self.text.ids

    def go_back(self, tokens: Tensor) -> bool:
        # Windows drop keys, and static steps have rows of their own.
        if self.steps is not None or self.cache.base or len(tokens) > self.length:
            return False
        self.cache.lengths[0] = len(tokens)
        if self.text is not None:
            self.text = ContextTokens(self.text.source)
            self.text.read(tokens.tolist())
        return True

    # What rows.py asks of a session; most kinds need the defaults.

    def take(self, new: Tensor) -> Tensor:
        """Returns what the next pass reads of committed tokens [m]; perhaps nothing."""
        return new

    def commit(self, tokens: Tensor, root: Tensor) -> None:
        """Notes that a pass has read committed tokens [m]; root: [1, ...] of the last one."""
        self.root = root
        self.advance(len(tokens))
        self.cache.trim()
        if self.text is not None:
            self.text.read(tokens.tolist())

    def form(self, spec: TreeSpec) -> tuple[TreeSpec, Tensor | None]:
        """The tree to grow for a spec, and the target id of each drafter id; None if equal."""
        return spec, self.ids

    def open_nodes(self, tree: GrowingTree) -> Tensor:
        """[m] int64, ids of the nodes to open as the drafter reads them."""
        return tree.target_ids

    def read_children(self, children: Children) -> Children:
        """Those of nodes of this sequence, with the tokens that joined."""
        logits = children.logits
        if not self.text or children.reads is None or logits is None:
            return children
        return children._replace(logits=self.text.shape(logits, children.reads))

    def offer(self, tree: TokenTree, spec: TreeSpec) -> TokenTree:
        """The grown tree in the target's ids."""
        return tree

    def reaches(self, count: int) -> bool:
        """Whether the drafter can read this many tokens behind the committed ones."""
        return True

    def advance(self, count: int) -> None:
        """Notes that `count` committed tokens are read and their keys stored."""
        self.cache.lengths[0] += count

    def place(self, steps: Steps, row: int) -> None:
        self.steps = steps
        self.row = row
        self.cache = steps.cache.view(row)
        self.text = None

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        self.drafter.extend_all([self], [tokens], [features])

    def propose(self, spec: TreeSpec, sampler: Sampler | None = None) -> TokenTree:
        return self.drafter.propose_all([self], spec, [sampler])[0]


class HostPlaces:
    """`Places` of growth on the host."""

    def __init__(self, sessions: Sessions, depth: int):
        self.sessions = sessions
        self.depth = depth

    def behind(
        self,
        count: int,
        computed: Sequence[int] | None = None,
        mutual: bool = False,
    ) -> HostPass:
        layouts: list[TreeLayout] = []
        for session in self.sessions:
            if mutual:
                layouts.append(BlockLayout(session.length, count))
            else:
                layouts.append(TreeLayout(session.length, count=count))
        return HostPass(self.sessions, layouts)

    def roots(self) -> HostPass:
        """The pass over each sequence's last committed token, which is stored already."""
        layouts = [TreeLayout(session.length - 1, count=1) for session in self.sessions]
        return HostPass(self.sessions, layouts)

    def open(self, growing: Sequence[GrowingTree]) -> HostPass:
        """The pass over the nodes that trees open."""
        own = []
        layouts = []
        for tree in growing:
            session = self.sessions[tree.row]
            # The root is the last committed token; nodes stand behind it in the order they were
            # opened.
            held = 1 + len(tree.opened) - len(tree.above)
            own.append(session)
            layouts.append(TreeLayout(session.length - 1, tree.opened, held=held))
        return HostPass(own, layouts)


@without_grad
def propose(
    drafter: Any,
    sessions: Sessions,
    spec: TreeSpec,
    samplers: Sequence[Sampler | None],
) -> list[TokenTree]:
    """Drafts a tree per session, see `Drafter.propose_all`."""
    steps = sessions[0].steps
    if steps is not None:
        static = steps.propose(sessions, spec, samplers)
        if static is not None:
            return static

    # Sessions that cannot draft get empty trees; the others draft together.
    ready = []
    for row, session in enumerate(sessions):
        if session.root is not None and session.reaches(spec.depth):
            ready.append(row)
    trees = [TokenTree.empty(drafter.kept_ids.device)] * len(sessions)
    if not ready:
        return trees
    drafting = [sessions[row] for row in ready]
    roots = cat([session.root for session in drafting])  # [ready, ...]
    drafted = drafter.grow_by_kernel(drafting, spec, roots)
    if drafted is None:
        drawing = [samplers[row] for row in ready]
        drafted = _grow_on_host(drafter, drafting, spec, drawing, roots)
    for row, tree in zip(ready, drafted, strict=True):
        trees[row] = tree
    return trees


def _grow_on_host(
    drafter: Any,
    sessions: Sessions,
    spec: TreeSpec,
    samplers: Sequence[Sampler | None],
    roots: Tensor,
) -> list[TokenTree]:
    """Grows all trees together below roots [R, ...], one pass per depth."""
    width = widest(spec)
    if any(session.text for session in sessions):  # joined tokens need all logits
        width = None
    places = HostPlaces(sessions, spec.depth)
    first, ask = drafter.draft(roots, places, width)
    trees = []
    for row, session in enumerate(sessions):
        own, ids = session.form(spec)
        tree = GrowingTree(
            own,
            session.read_children(first.part(slice(row, row + 1))),
            ids,
            samplers[row],
            drafter.static_depth,
            row,
        )
        trees.append(tree)

    def step(growing: list[GrowingTree], depth: int) -> list[Children]:
        rows: list[int] = []
        above: list[int] = []
        for tree in growing:
            above += [tree.place + parent for parent in tree.above]
            tree.place = len(rows)
            rows += [tree.row] * len(tree.above)
        nodes = Nodes(
            depth,
            rows,
            tokens=lambda: cat([sessions[tree.row].open_nodes(tree) for tree in growing]),
            above=lambda: torch.tensor(above, device=roots.device),
            place=partial(places.open, growing),
        )
        children = ask(nodes)
        each = []
        for tree in growing:
            own = slice(tree.place, tree.place + len(tree.above))
            if children.shared:
                own = slice(tree.row, tree.row + 1)
            each.append(sessions[tree.row].read_children(children.part(own)))
        return each

    drafted = []
    for row, grown in enumerate(grow_trees(trees, step)):
        drafted.append(sessions[row].offer(grown, spec))
    return drafted


@without_grad
def extend(
    drafter: Any,
    sessions: Sessions,
    tokens: Sequence[Tensor],
    features: Sequence[Tensor],
) -> None:
    """Reads what the target committed in one pass, see `Drafter.extend_all`."""
    steps = sessions[0].steps
    if steps is not None and steps.read(sessions, tokens, features):
        return
    reading = []
    layouts = []
    unread = []
    states = []
    for session, new, own in zip(sessions, tokens, features, strict=True):
        rest = session.take(new)
        if rest.shape[0]:
            reading.append(session)
            layouts.append(TreeLayout(session.length, count=rest.shape[0]))
            unread.append(rest)
            states.append(own)
    if not reading:
        return
    # Only each last token needs an output, the root of the next tree.
    at = HostPass(reading, layouts, last=True)
    roots = drafter.read_committed(cat(unread), cat(states), at)
    for row, (session, rest) in enumerate(zip(reading, unread, strict=True)):
        session.commit(rest, roots[row : row + 1])


@functools.cache
def tree_shape(spec: TreeSpec) -> TreeShape | None:
    """The greedy tree that a kernel grows; None if tokens are drawn, or paths of ranks."""
    if spec.sampled or spec.shape not in ("chain", "fanout", "dynamic"):
        return None
    fanout = () if spec.shape == "dynamic" else spec.fanout
    return TreeShape(spec.depth, spec.top_k, spec.budget, fanout, spec.floor)


def top_or_all(
    head: object,
    reads: Tensor,
    width: int | None,
    score: Callable[[Tensor], Tensor],
) -> Children:
    """All logits of states [n, h], or their `width` top tokens where the head has a kernel for them.

    width: None if all logits are needed.
    """
    top = None
    if width is not None:
        top = DraftHead.of(head)
    if width is None or top is None:
        return Children(score(reads), reads=reads)
    ids, log_probs, _ = top.top(reads, min(width, top.vocabulary))  # [n, width] each
    return Children(ids=ids, log_probs=log_probs, reads=reads)


def split(packed: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    """Unpacks what `cat` packed; no call for a single session."""
    if len(sizes) == 1:
        return [packed]
    return packed.split(sizes, dim)
