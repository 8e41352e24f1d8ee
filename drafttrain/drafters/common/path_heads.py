"""What the kinds share that draft by one head per depth from the target's last state: no attention, no cache.

    position t          0    1    2    3    4
    token               x0   x1   x2   x3   x4
    last state          h0   h1   h2   h3   h4      h_t is what the target's head reads: it chose x_{t+1} by it

    anchor t, depth 0:  state = enter(h_t, x_{t+1})                head 0 predicts x_{t+2}
    anchor t, depth k:  state = advance(state, x_{t+1+k}, k)       head k predicts x_{t+2+k}

Training walks along the data's tokens, decoding along drafted ones; both call `enter`, `advance` and `read`. A session keeps
one state, that of the last committed token, made anew from the target's own state in every round.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count as counting
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.batch import Batch, StepOutput, TargetOutput, TokenTree
from drafttrain.drafters.base import JointSession
from drafttrain.drafters.common.expand import StateGrowing, grow
from drafttrain.drafters.common.linear_start import LeastSquares, Source
from drafttrain.drafters.common.shared import anchors_by_depth, sums_by_depth
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.losses import TargetRows, linear_divergence
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target
from drafttrain.target.attention import LAST

# Children of a node that a default tree may have; the paper's trees end there too.
_RANKS = 10
# Rows whose logits are held at a time while these are counted.
_CHUNK = 256


class PathHeads(TrainableDrafter):
    """Both halves of the contract; the kind brings the three functions, its config and its modules.

    Of its config it takes target, vocab_size, draft_vocab_size, depth_decay, tree_nodes and loss.

    Attributes:
        depths: heads, the deepest tree. independent: states do not depend on drafted tokens.
        lm_heads: [d, .] one per depth, or fewer, the last of which serves all further depths.
        kept_ids: [d] target ids of the vocabulary. embed: the target's embedding, given by `bind`.
    """

    supports_gradient_checkpointing = False
    feature_layers = (LAST,)
    independent = False
    depths: int
    lm_heads: Any

    def finish(self, width: int, heads: int) -> None:
        """Ends `__init__`: the heads, which read `width` columns, and the vocabulary."""
        size = self.config.draft_vocab_size
        self.lm_heads = nn.ModuleList(nn.Linear(width, size, bias=False) for _ in range(heads))
        self.register_buffer("kept_ids", torch.arange(size))
        self.post_init()

    # -- the one forward, filled in by the kind -----------------------------------------------------------------

    def enter(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """[t, h] last states and [t] the tokens chosen by them -> [t, w] states at depth 0."""
        raise NotImplementedError

    def advance(self, state: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """[t, w] states one depth above and [t] the tokens drafted from them -> states at `depth`, 1 or more."""
        raise NotImplementedError

    def read(self, state: Tensor, depth: int) -> Tensor:
        """What the depth's head reads of the states."""
        raise NotImplementedError

    def head(self, depth: int) -> Any:
        return self.lm_heads[min(depth, len(self.lm_heads) - 1)]

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """[t, w] states -> [t, d] over the drafter's vocabulary."""
        return self.head(depth)(self.read(state, depth))

    # -- training half ------------------------------------------------------------------------------------------

    def walk(self, batch: Batch, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What each depth is trained on, from the first on: the flat positions [t] that its predictions are aligned with
        (of the tokens read last), and the states there."""
        ids = batch.input_ids.flatten()
        asking = anchors_by_depth(batch.response_mask, self.depths)
        state = self.enter(features.flatten(0, 1)[asking[0]], ids[asking[0] + 1])
        yield asking[0] + 1, state
        for k, anchors in enumerate(asking[1:], 1):
            state = state[torch.searchsorted(asking[k - 1], anchors)]  # those of the previous depth that go on
            state = self.advance(state, ids[anchors + 1 + k], k)
            yield anchors + 1 + k, state

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
        """All depths of all anchors along the data's tokens.

        Args:
            batch: [b, s] tokens and masks; embeds: not read, what a kind needs of embeddings it looks up.
            output: the target's last states [b, s, h] as features.
            rows: the target's distributions; row_of: [b, s] int64, the row of each position (-1 where none is needed).
            count: anchors in the whole optimizer step, over all ranks and accumulation steps.
            measure: also return metrics.

        Returns:
            Loss (depth k weighted by depth_decay ** k, weights summing to 1; divided by count) and per-depth sums: count,
            loss, alpha, agree; each [depths].
        """
        decay = self.config.depth_decay ** torch.arange(self.depths, dtype=torch.float32, device=row_of.device)
        decay = decay / decay.sum()
        losses: list[Tensor] = []
        outs = []
        for k, (at, state) in enumerate(self.walk(batch, output.features)):
            weight = (decay[k] / count).expand(len(at))
            out = linear_divergence(
                self.read(state, k),
                self.head(k).weight,
                rows,
                row_of.flatten()[at],
                weight,
                self.config.loss,
                measure=measure,
            )
            losses.append(out.loss)
            outs.append(out)
        return StepOutput(torch.stack(losses).sum(), sums_by_depth(outs))

    # -- start from the target ----------------------------------------------------------------------------------

    @torch.no_grad()
    def initialize(self, target: Target, kept_ids: Tensor) -> list[str]:
        """Starts from the target: heads of its width take its rows of the kept tokens. Returns the names of what was copied."""
        self.kept_ids.copy_(kept_ids)
        rows = target.head_weight[kept_ids.to(target.head_weight.device)]
        if self.lm_heads[0].weight.shape != rows.shape:
            return []
        for head in self.lm_heads:
            head.weight.copy_(rows)
        return ["lm_heads"]

    def fitted(self, state: Tensor, depth: int) -> tuple[int, Tensor]:
        """Which linear map `solve_start` finds from these states, and what that reads of them [t, i]."""
        return min(depth, len(self.lm_heads) - 1), self.read(state, depth)

    def take_map(self, index: int, found: Tensor, rows: Tensor) -> None:
        """Puts a map [h, i] to the target's last state in its place; rows: [d, h] of the target's head."""
        self.lm_heads[index].weight.copy_(rows @ found)

    @torch.no_grad()
    def solve_start(self, batches: list[Batch], source: Source) -> float:
        """Starts from the best linear guess of the target's last state at each depth, by least squares over the batches.

        Returns:
            The share of that state's power which the guess explains, over all depths, 0 to 1.
        """
        fits: dict[int, LeastSquares] = {}
        power = 0.0
        for batch in batches:
            output, rows, row_of = source(batch)
            for k, (at, state) in enumerate(self.walk(batch, output.features)):
                index, x = self.fitted(state, k)
                y = rows.hidden[row_of.flatten()[at]].float()
                fits.setdefault(index, LeastSquares()).add(x.float(), y)
                power += float(y.square().sum())
        explained = 0.0
        for index, fit in fits.items():
            if not fit.count:  # no response was as long
                continue
            assert fit.xx is not None and fit.xy is not None
            found = fit.solve(each=True)
            explained += float((2 * found * fit.xy.T).sum() - ((found @ fit.xx) * found).sum())
            self.take_map(index, found, rows.weight.float())
        return explained / max(power, 1e-9)

    # -- proposal half ------------------------------------------------------------------------------------------

    def start(self, prompt_ids: Tensor, max_length: int) -> PathSession:
        return PathSession(self)

    @torch.no_grad()
    def extend_all(self, sessions: Sequence[PathSession], tokens: Sequence[Tensor], features: Sequence[Tensor]) -> None:
        """Only the last committed token of each session drafts; nothing is kept of the others."""
        last = torch.cat([states[-1:] for states in features]), torch.cat([new[-1:] for new in tokens])
        for session, state in zip(sessions, self.enter(*last).split(1), strict=True):
            session.root = state

    @torch.no_grad()
    def propose_all(
        self, sessions: Sequence[PathSession], specs: Sequence[TreeSpec], samplers: Sequence[Sampler | None]
    ) -> list[TokenTree]:
        """The trees of all sessions grow together, one step per depth, down to the last head."""
        specs = [replace(spec, depth=min(spec.depth, self.depths)) for spec in specs]
        first = self.logits(torch.cat([session.state for session in sessions]), 0)
        drafts = [
            StateGrowing(grow(spec, logits, self.kept_ids, sampler), session.state)
            for session, spec, sampler, logits in zip(sessions, specs, samplers, first, strict=True)
        ]
        for depth in counting(1):
            growing = [draft for draft in drafts if draft.tree is None]
            if not growing:
                break
            if not self.independent:
                states = torch.cat([draft.above() for draft in growing])
                tokens = self.kept_ids[torch.cat([draft.tokens for draft in growing])]
                sizes = [len(draft.parents) for draft in growing]
                states = self.advance(states, tokens, depth)
                for draft, own in zip(growing, states.split(sizes), strict=True):
                    draft.states = own
            else:  # one row tells for all nodes of a depth
                states, sizes = torch.cat([draft.states for draft in growing]), [1] * len(growing)
            for draft, logits in zip(growing, self.logits(states, depth).split(sizes), strict=True):
                draft.grow(logits)
        return [draft.tree for draft in drafts if draft.tree is not None]

    # -- default tree -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def suggest_tree(self, batches: list[Batch], source: Source) -> str | None:
        """A fixed tree of `tree_nodes` nodes by how often each rank of each head is the target's choice on held-out data.

        Returns:
            Its text form, or None if no head was ever right.

        Source: Medusa, arXiv 2401.10774, on tree construction.
        """
        hits = torch.zeros(self.depths, min(_RANKS, self.config.draft_vocab_size))
        anchors = torch.zeros(self.depths, 1)
        for batch in batches:
            output, rows, row_of = source(batch)
            for k, (at, state) in enumerate(self.walk(batch, output.features)):
                wanted = rows.argmax[row_of.flatten()[at]][:, None]
                for part, right in zip(state.split(_CHUNK), wanted.split(_CHUNK), strict=True):
                    found = self.logits(part, k).topk(hits.shape[1], dim=-1).indices
                    hits[k] += (found == right).sum(0).cpu()
                anchors[k] += len(at)
        paths = likeliest_paths(hits / anchors.clamp(min=1), self.config.tree_nodes)
        return "paths:" + ",".join("-".join(map(str, path)) for path in paths) if paths else None


def likeliest_paths(shares: Tensor, nodes: int) -> list[tuple[int, ...]]:
    """The nodes of highest product of shares along their paths, as if depths were right independently of each other.

    Args:
        shares: [depths, ranks], how often the token of each rank is right at each depth.
        nodes: how many; fewer if there are no more with a chance.

    Returns:
        Each node's ranks from the root, the likeliest first, so parents come before children.
    """
    falling = shares.cummin(dim=1).values.tolist()  # a rank is never taken before the better one
    found: list[tuple[int, ...]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(-falling[0][0], (0,))]
    while frontier and len(found) < nodes and frontier[0][0] < 0:
        score, path = heapq.heappop(frontier)
        found.append(path)
        own = falling[len(path) - 1]
        if path[-1] + 1 < len(own):
            beside = score / own[path[-1]] * own[path[-1] + 1]
            heapq.heappush(frontier, (beside, (*path[:-1], path[-1] + 1)))
        if len(path) < len(falling):
            heapq.heappush(frontier, (score * falling[len(path)][0], (*path, 0)))
    return found


class PathSession(JointSession):
    """One sequence being drafted.

    Attributes:
        root: [1, w] state at the last committed token.
    """

    def __init__(self, drafter: PathHeads):
        self.drafter = drafter
        self.root: Tensor | None = None

    @property
    def state(self) -> Tensor:
        assert self.root is not None, "extend() comes before propose()"
        return self.root
