"""Drafters with one head per depth that read the target's last state: no attention, no cache.

    position t          0    1    2    3    4
    token               x0   x1   x2   x3   x4
    last state          h0   h1   h2   h3   h4      h_t, from which the target's head chose x_{t+1}

    anchor t, depth 0:  state = enter(h_t, x_{t+1})                head 0 predicts x_{t+2}
    anchor t, depth k:  state = advance(state, x_{t+1+k}, k)       head k predicts x_{t+2+k}

Training walks along the data's tokens, decoding along drafted ones; both call `enter`, `advance`
and `read`. A session keeps one state, that of the last committed token, computed from the target's
own state in every round.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from operator import itemgetter

import torch
from torch import Tensor, nn

from drafttrain.batch import Batch, StepOutput, anchors_by_depth
from drafttrain.drafters.base import Source, StepInputs
from drafttrain.drafters.common.rows import Ask, Children, DraftPass, Nodes, Places, top_or_all
from drafttrain.drafters.common.starts import LeastSquares
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.common.tree_spec import paths_text
from drafttrain.losses import SharedHead, linear_divergence, sums_by_depth
from drafttrain.target import Target
from drafttrain.target.attention import LAST

# Most children of a node in a suggested tree, as in the Medusa paper.
_RANKS = 10
# Rows per chunk of logits while a tree is chosen; bounds memory.
_CHUNK = 256


class PathHeads(TrainableDrafter):
    """Both halves of the contract.

    A kind adds `enter`, `advance` and `read`, a `HeadsConfig` and its modules.

    Attributes:
        depths: number of depths, the deepest tree. independent: states do not depend on drafted
            tokens.
        lm_heads: [d, w] one per depth, or fewer: the last one serves all further depths.
    """

    supports_gradient_checkpointing = False
    static = True
    feature_layers = (LAST,)
    independent = False
    depths: int

    @property
    def static_depth(self) -> int:  # type: ignore[override]
        return self.depths

    def finish(self, width: int, heads: int) -> None:
        """Ends `__init__`: the heads, which read `width` columns, and the vocabulary."""
        size = self.config.draft_vocab_size
        self.lm_heads = nn.ModuleList(nn.Linear(width, size, bias=False) for _ in range(heads))
        self.register_buffer("kept_ids", torch.arange(size))
        self.post_init()

    # -- forward pass, shared by training and decoding ---------------------------------------------

    def enter(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """[t, h] last states and [t] the tokens chosen from them -> [t, w] states at depth 0."""
        raise NotImplementedError

    def advance(self, state: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """States [t, w'] at `depth`, 1 or more.

        state: [t, w] at the depth before. tokens: [t] int64, drafted from those states.
        """
        raise NotImplementedError

    def read(self, state: Tensor, depth: int) -> Tensor:
        """[t, w] states -> input of the depth's head."""
        raise NotImplementedError

    def head(self, depth: int) -> nn.Linear:
        return self.lm_heads[min(depth, len(self.lm_heads) - 1)]  # type: ignore[return-value]

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """[t, w] states -> [t, d] over the drafter's vocabulary."""
        return self.head(depth)(self.read(state, depth))

    def predict(self, state: Tensor, depth: int, width: int | None) -> Children:
        """Of `logits`, or their `width` top tokens where a kernel finds them; None: all are needed."""
        return top_or_all(
            self.head(depth),
            self.read(state, depth),
            width,
            self.head(depth),
        )

    # -- training half -----------------------------------------------------------------------------

    def walk(self, batch: Batch, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each depth's training inputs.

        They are flat positions [t] of the tokens read last, which its predictions are aligned with,
        and the states [t, w] there.
        """
        ids = batch.input_ids.flatten()  # [b * s]
        anchors = anchors_by_depth(batch.response_mask, self.depths)  # per depth: [t], nested
        first = anchors[0]
        state = self.enter(features.flatten(0, 1)[first], ids[first + 1])
        yield first + 1, state
        for k, flat in enumerate(anchors[1:], 1):
            # Drop the states of anchors that depth k does not train.
            state = state[torch.searchsorted(anchors[k - 1], flat)]
            state = self.advance(state, ids[flat + 1 + k], k)
            yield flat + 1 + k, state

    def forward(self, inputs: StepInputs) -> StepOutput:
        """Computes all depths of all anchors along the data's tokens.

        The loss weighs depth k by depth_decay ** k; the weights sum to 1.
        """
        row_of = inputs.row_of.flatten()  # [b * s]
        depths = torch.arange(self.depths, dtype=torch.float32, device=row_of.device)
        decay = self.config.depth_decay**depths  # [depths] float32
        decay = decay / decay.sum()
        heads = [SharedHead(head.weight) for head in self.lm_heads]  # type: ignore[arg-type]
        losses = []
        outs = []
        for k, (at, state) in enumerate(self.walk(inputs.batch, inputs.features)):
            out = linear_divergence(
                self.read(state, k),
                heads[min(k, len(heads) - 1)],
                inputs.rows,
                row_of[at],
                (decay[k] / inputs.total).expand(len(at)),  # [t] float32
                self.config.loss,
                measure=inputs.measure,
            )
            losses.append(out.loss)
            outs.append(out)
        for head in heads:
            losses.append(head.term())
        return StepOutput(torch.stack(losses).sum(), sums_by_depth(outs))

    # -- start from the target ---------------------------------------------------------------------

    def copy_from(self, target: Target) -> list[str]:
        """Copies the target's head rows of the kept tokens, into heads of the target's width."""
        rows = self.head_rows(target)
        if self.head(0).weight.shape != rows.shape:
            return []
        for depth in range(len(self.lm_heads)):
            self.head(depth).weight.copy_(rows)
        return ["lm_heads"]

    def fitted(self, state: Tensor, depth: int) -> tuple[int, Tensor]:
        """Index and input [t, i] of the linear map that `solve_start` fits on these states."""
        return min(depth, len(self.lm_heads) - 1), self.read(state, depth)

    def take_map(self, index: int, found: Tensor, rows: Tensor) -> None:
        """Stores a fitted map [h, i] to the target's last state; rows: [d, h] of its head."""
        self.head(index).weight.copy_(rows @ found)

    @torch.no_grad()
    def solve_start(self, batches: list[Batch], source: Source) -> float | None:
        """Fits the best linear prediction of the target's last state at each depth.

        By least squares; see `Drafter.solve_start`.
        """
        fits: dict[int, LeastSquares] = {}  # by the index of the map
        for batch in batches:
            features, rows, row_of = source(batch)
            for k, (at, state) in enumerate(self.walk(batch, features)):
                index, x = self.fitted(state, k)
                y = rows.hidden[row_of.flatten()[at]].float()  # [t, h]
                fits.setdefault(index, LeastSquares()).add(x.float(), y)
        explained = 0.0
        for index, fit in fits.items():
            if not fit.count:  # no response is as long
                continue
            found = fit.solve(least=1e-3)
            # Of the target's power, a map m explains 2 m xy - m xx m'.
            crossed = (2 * found * fit.xy.T).sum()
            own = ((found @ fit.xx) * found).sum()
            explained += float(crossed - own)
            self.take_map(index, found, rows.weight.float())
        power = sum(fit.power for fit in fits.values())
        return explained / max(power, 1e-9)

    # -- proposal half -----------------------------------------------------------------------------

    def read_committed(self, ids: Tensor, features: Tensor, at: DraftPass) -> Tensor:
        """Roots [R, w], the states of the last tokens; no other is kept."""
        return self.enter(features[at.ends], ids[at.ends])

    def draft(
        self,
        roots: Tensor,
        places: Places,
        width: int | None,
    ) -> tuple[Children, Ask]:
        states = roots  # [n, w] of the nodes that were opened last

        def ask(nodes: Nodes) -> Children:
            nonlocal states
            depth = nodes.depth
            if self.independent:  # one row for all nodes of a depth
                return self.predict(roots, depth, width)._replace(shared=True)
            states = self.advance(states[nodes.above()], nodes.tokens(), depth)
            return self.predict(states, depth, width)

        return self.predict(roots, 0, width), ask

    # -- default tree ------------------------------------------------------------------------------

    @torch.no_grad()
    def suggest_tree(self, batches: list[Batch], source: Source) -> str | None:
        """A fixed tree of `tree_nodes` nodes; None if no head is ever right.

        The nodes are chosen by how often each rank of each head is the target's choice on held-out
        data. Source: Medusa, arXiv 2401.10774, on tree construction.
        """
        hits = torch.zeros(self.depths, min(_RANKS, self.config.draft_vocab_size))
        anchors = torch.zeros(self.depths, 1)  # number of them at each depth
        for batch in batches:
            features, rows, row_of = source(batch)
            for k, (at, state) in enumerate(self.walk(batch, features)):
                wanted = rows.argmax[row_of.flatten()[at]][:, None]  # [t, 1]
                for part, right in zip(state.split(_CHUNK), wanted.split(_CHUNK), strict=True):
                    found = self.logits(part, k).topk(hits.shape[1], dim=-1).indices
                    hits[k] += (found == right).sum(0).cpu()
                anchors[k] += len(at)
        paths = likeliest_paths(hits / anchors.clamp(min=1), self.config.tree_nodes)
        if paths:
            return paths_text(paths)
        return None


def likeliest_paths(shares: Tensor, nodes: int) -> list[tuple[int, ...]]:
    """The paths of highest product of shares, as if depths were right independently of each other.

    Args:
        shares: [depths, ranks], how often the token of each rank is right at each depth.
        nodes: number of paths; fewer are returned if no more have a positive share.

    Returns:
        Each node's ranks from the root, the likeliest first, so parents come before children.
    """
    found: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for own in shares.cummin(dim=1).values.tolist():  # no rank before a better one
        below = []
        for score, path in level:
            for rank, share in enumerate(own):
                if share:
                    below.append((score * share, (*path, rank)))
        level = heapq.nlargest(nodes, below, key=itemgetter(0))  # more cannot be kept
        found += level
    return [path for _, path in heapq.nlargest(nodes, found, key=itemgetter(0))]
