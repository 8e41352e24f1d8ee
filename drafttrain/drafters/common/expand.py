"""Growing a token tree from a drafter that can be stepped one depth at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from drafttrain.batch import Proposal, TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec, ranks_below
from drafttrain.ops.sampling import Sampler, draw_distinct, probabilities, top_log_probs

# nodes to open: their own tokens [m], and their parents' order among all opened nodes so far
Nodes = tuple[Tensor, list[int]]
# logits [m, d] of nodes, alone or with confidences [m]
Said = Tensor | tuple[Tensor, Tensor]
Advance = Callable[[Tensor, list[int]], Tensor]  # nodes to open -> logits [m, d]


class _Grower:
    """Candidates found so far.

    Attributes:
        paths: ranks from the root to each candidate. scores: log-probabilities of whole paths.
        opened: the order in which each candidate was given to `advance`, -1 if it was not.
        rows: which row of the stacked `proposals` each candidate was drawn from.
    """

    def __init__(self, spec: TreeSpec, sampler: Sampler | None) -> None:
        assert sampler is not None or not spec.sampled, "drawing takes a sampler"
        self.spec, self.sampler = spec, sampler if spec.sampled else None
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.paths: list[tuple[int, ...]] = []
        self.scores: list[float] = []
        self.opened: list[int] = []
        self.opened_count = 0
        self.rows: list[int] = []
        self.proposals: list[Tensor] = []

    def ranks(self, node: int) -> Sequence[int]:
        """Which of its likeliest (or which draws of its) tokens become the children of a node."""
        path = self.paths[node] if node >= 0 else ()
        if self.spec.shape == "paths":
            return ranks_below(self.spec.paths).get(path, ())
        return range(self.spec.top_k if self.spec.shape == "dynamic" else self.spec.fanout[len(path)])

    def add_children(self, parents: list[int], said: Said) -> list[int]:
        """Adds children of the given nodes, whose logits [m, d], and perhaps confidences [m], these are; one row of logits
        [1, d] is that of all of them."""
        logits, confidence = said if isinstance(said, tuple) else (said, None)
        wanted = [self.ranks(parent) for parent in parents]
        width = min(1 + max(map(max, wanted)), logits.shape[-1])
        first_row = sum(map(len, self.proposals))
        if self.sampler is None:
            scores, tokens = top_log_probs(logits, width)
            if scores.shape[0] < len(parents):
                scores, tokens = scores.expand(len(parents), -1), tokens.expand(len(parents), -1)
        else:
            q = probabilities(logits, self.sampler.params).expand(len(parents), -1)
            tokens = draw_distinct(q, width, self.sampler.generator)
            scores = q.gather(-1, tokens.clamp_min(0)).log()
            self.proposals.append(q)
        if confidence is not None:
            scores = scores + confidence.log().unsqueeze(1)
        first = len(self.tokens)
        for row, (parent, ids, values) in enumerate(zip(parents, tokens.tolist(), scores.tolist(), strict=True)):
            above, path = (self.scores[parent], self.paths[parent]) if parent >= 0 else (0.0, ())
            # The vocabulary, or what top-k and top-p leave of it, may be smaller.
            ranks = [rank for rank in wanted[row] if rank < width and ids[rank] >= 0]
            self.tokens += [ids[rank] for rank in ranks]
            self.parents += [parent] * len(ranks)
            self.paths += [(*path, rank) for rank in ranks]
            self.scores += [above + values[rank] for rank in ranks]
            self.opened += [-1] * len(ranks)
            self.rows += [first_row + row] * len(ranks)
        return list(range(first, len(self.tokens)))

    def open(self, nodes: list[int], device: torch.device) -> Nodes:
        parents = [self.opened[self.parents[i]] if self.parents[i] >= 0 else -1 for i in nodes]
        for i in nodes:
            self.opened[i] = self.opened_count
            self.opened_count += 1
        return torch.tensor([self.tokens[i] for i in nodes], device=device), parents

    def best(self, nodes: list[int], count: int) -> list[int]:
        """The likeliest paths; equal scores keep the older node first, so a parent never loses to its child."""
        return sorted(nodes, key=lambda i: (-self.scores[i], i))[:count]

    def promising(self, nodes: list[int]) -> list[int]:
        """Those whose children may be among the `budget` likeliest: no child is likelier than its parent, so not where as
        many candidates are as likely as the parent, itself among them, and older than its children."""
        if len(self.scores) < self.spec.budget:
            return nodes
        bar = sorted(self.scores, reverse=True)[self.spec.budget - 1]
        return [node for node in nodes if self.scores[node] > bar]


def expand(
    spec: TreeSpec, first: Tensor, advance: Advance, kept_ids: Tensor | None = None, sampler: Sampler | None = None
) -> TokenTree:
    """Drafts a tree of the asked shape for one sequence; see `grow`.

    Args:
        advance: runs the drafter one step on given nodes.
    """
    growth = grow(spec, first, kept_ids, sampler)
    try:
        nodes = next(growth)
        while True:
            nodes = growth.send(advance(*nodes))
    except StopIteration as done:
        return done.value


class Growing:
    """A tree that grows step by step, beside others.

    Attributes:
        tree: the result, once it is done.
        tokens, parents: the nodes to open next: drafter ids [m], and their parents among the opened nodes (-1: the root).
    """

    def __init__(self, growth: Generator[Nodes, Said, TokenTree]):
        self.tree: TokenTree | None = None
        self._growth = growth
        self.grow(None)

    def grow(self, said: Said | None) -> None:
        """Takes what is said of the nodes just opened, see the function `grow`; None to begin."""
        try:
            self.tokens, self.parents = next(self._growth) if said is None else self._growth.send(said)
        except StopIteration as done:
            self.tree = done.value


class StateGrowing(Growing):
    """A tree whose nodes are opened from their parents' states.

    Attributes:
        states: [m, w] of the nodes opened last; the root's at first.
    """

    def __init__(self, growth: Generator[Nodes, Said, TokenTree], root: Tensor):
        self.states, self._first, self._opened = root, -1, 0
        super().__init__(growth)

    def above(self) -> Tensor:
        """[m, w] states of the nodes' parents, which are always among those opened last; from now on these are."""
        rows = [parent - self._first for parent in self.parents]
        self._first, self._opened = self._opened, self._opened + len(rows)
        if rows == list(range(self.states.shape[0])):
            return self.states
        return self.states[torch.tensor(rows, device=self.states.device)]


def grow(
    spec: TreeSpec,
    first: Said,
    kept_ids: Tensor | None = None,
    sampler: Sampler | None = None,
    depth: int | None = None,
) -> Generator[Nodes, Said, TokenTree]:
    """Grows a tree of the asked shape: yields the nodes to open next and is sent their logits [m, d], or [1, d] where all
    have the same; returns the tree.

    A generator, so that the trees of several sequences can grow together, one drafter step per depth for all of them.

    Fixed shapes open every node that has children; dynamic trees open the `top_k` likeliest paths of each level and keep
    the `budget` likeliest nodes at the end. A path's probability never rises with depth, so the kept set is closed under
    parents, and paths that have fallen out of it are not continued.

    `spec.stop` decides whether a node is opened, from what is known before its children are. So it does not bias drawn
    trees: whichever nodes are opened, the children of each are drawn from its own q, and all of them stay. (Dropping
    children by what they turned out to be, as dynamic trees do, would: those that stay are no draws from q.)

    A drafter may say with a node's logits how confident it is, the share of q that it expects the target to grant (the
    acceptance rate, sum min(p, q)). A child's probability is then that share of its q. Nothing is drawn otherwise for it.

    Args:
        spec: the shape; `none` gives an empty tree.
        first: [d] logits of the root's children, perhaps with its confidence, a scalar.
        kept_ids: [d] target id of each drafter id; None if the vocabularies are the same.
        sampler: draws the tokens if `spec.sampled`. q is the drafter's distribution under the target's temperature,
            top-k, top-p and min-p; it knows no repetition penalty, which costs acceptance only.
        depth: of the deepest node that the drafter can say; None for any.

    Source: EAGLE-2, arXiv 2406.16858.
    """
    root, *sure = first if isinstance(first, tuple) else (first,)
    if spec.shape == "none":
        return TokenTree.empty(root.device)
    grower = _Grower(spec, sampler)
    floor = math.log(spec.stop) if spec.stop else -math.inf
    level = grower.add_children([-1], (root[None], sure[0][None]) if sure else root[None])
    for _ in range(min(spec.depth, depth or spec.depth) - 1):
        level = [node for node in level if grower.scores[node] >= floor and grower.ranks(node)]
        if spec.shape == "dynamic":
            level = grower.promising(grower.best(level, spec.top_k))
        if not level:
            break
        level = grower.add_children(level, (yield grower.open(level, root.device)))
    keep = list(range(len(grower.tokens)))
    if spec.shape == "dynamic":
        keep = sorted(grower.best(keep, spec.budget))
    place = {old: new for new, old in enumerate(keep)}
    tokens = torch.tensor([grower.tokens[i] for i in keep], device=root.device)
    return TokenTree(
        kept_ids[tokens] if kept_ids is not None else tokens,
        [place[grower.parents[i]] if grower.parents[i] >= 0 else -1 for i in keep],
        torch.tensor([grower.scores[i] for i in keep]),
        Proposal(torch.cat(grower.proposals), grower.rows, kept_ids) if spec.sampled else None,
    )
