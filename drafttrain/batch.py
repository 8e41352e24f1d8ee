"""The notation, and the records that training and decoding exchange.

b batch, s sequence, h target hidden size, f number of target features, v target vocabulary, d
drafter vocabulary, n tree nodes, k depth, L prefix length (tokens whose keys are in the cache).

An anchor is a position at which training lets the drafter begin a draft. All kinds share this
alignment:

    position t            0    1    2    3    4
    token                 x0   x1   x2   x3   x4
    feature               f0   f1   f2   f3   f4      f_t: target states at t, computed from x0..x_t
    target distribution   p1   p2   p3   p4   p5      p_{t+1}: the target's distribution of x_{t+1}, from position t

    anchor t, depth k:    reads f_t and the tokens up to x_{t+1+k}; predicts x_{t+2+k}; its loss compares with the target
                          distribution at position t+1+k.

    anchor t = 1          x0   x1   x2   x3   x4
      depth 0 reads            f1   x2              and predicts x3, compared with p3 (position 2)
      depth 1 reads            f1   x2   x3         and predicts x4, compared with p4 (position 3)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from drafttrain.errors import UserError

# query [tq, heads, e], key and value [t, kv_heads, e] -> [tq, heads * e]; e is the head size
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenates tensors; a single one needs no copy."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), dim)


class Part:
    """The tokens of a batch that a process computes, as flat positions of [b, s].

    These are all tokens, unless processes share the rows (`sequence_parallel.SharedPart`).

    Attributes:
        begin, end: the interval of tokens. seen: the tokens that the process holds or reads.
    """

    def __init__(self, tokens: int):
        self.begin = 0
        self.end = tokens
        self.seen = slice(0, tokens)

    def counts(self, flat: Tensor) -> list[int]:
        """How many of the positions `flat` [t], ascending, each process holds."""
        return [len(flat)]

    def of(self, flat: Tensor) -> slice:
        """Which of the positions `flat` [t], ascending, this process holds."""
        return slice(0, len(flat))

    def within(self, begin: int, length: int) -> slice:
        """The positions of a conversation that this process holds; begin: its flat position."""
        first = min(max(self.begin - begin, 0), length)
        last = min(max(self.end - begin, 0), length)
        return slice(first, last)

    def same(self, x: Tensor) -> Tensor:
        """A random draw, the same in all processes that share the rows."""
        return x

    def attend(
        self,
        attend: Attend,
        queries: list[int],
        keys: list[int],
    ) -> Attend:
        """An attention over whole rows, for this process's tokens.

        Args:
            queries, keys: how many of them each process has.
        """
        return attend

    def to_heads(self, x: Tensor, counts: list[int], keys: bool = False) -> Tensor:
        """Tokens [n, heads, e] of this process -> all tokens, of the heads that it attends with."""
        return x

    def own_heads(self, x: Tensor) -> Tensor:
        """Of values [heads], those of the heads that this process attends with."""
        return x


@dataclass
class Batch:
    """Right-padded token rows for training. Padding is on the right, so causal attention needs no
    padding mask.

    A row holds one conversation or, packed, several in sequence. Packed conversations do not attend
    to each other, and each counts its positions from 0.
    """

    input_ids: Tensor  # [b, s] int64, padded with any valid id
    lengths: Tensor  # [b] int64, real tokens per row
    # [b, s] bool, True where the target (or the conversation's assistant) produced the token. The
    # first token of a packed conversation is False, so responses of neighbors do not touch.
    response_mask: Tensor
    # [c] int64, each conversation's row number in the data set, a key of the feature cache; -1 if
    # it is in no data set.
    index: Tensor  # c = b if not packed
    # [c, 3] int64 row, start and length of each conversation; None: each is a row
    documents: Tensor | None = None
    # what this process computes, if others share the rows; ids and masks are complete
    shared: Part | None = None

    @classmethod
    def of(cls, inputs: dict[str, Tensor]) -> Batch:
        """A collated batch (`data.loader.collate`) as a Batch; other entries are ignored."""
        return cls(
            input_ids=inputs["input_ids"],
            lengths=inputs["lengths"],
            response_mask=inputs["response_mask"],
            index=inputs["index"],
            documents=inputs.get("documents"),
        )

    def to(self, device: torch.device) -> Batch:
        """The batch with its tensors on a device."""
        documents = self.documents
        if documents is not None:
            documents = documents.to(device)
        return Batch(
            input_ids=self.input_ids.to(device),
            lengths=self.lengths.to(device),
            response_mask=self.response_mask.to(device),
            index=self.index.to(device),
            documents=documents,
            shared=self.shared,
        )

    @property
    def part(self) -> Part:
        """The tokens that this process computes."""
        if self.shared is not None:
            return self.shared
        return Part(self.input_ids.numel())

    def conversations(self) -> Tensor:
        """[c, 3] int64 row, start and length of each conversation, in order."""
        if self.documents is not None:
            return self.documents
        rows = torch.arange(len(self.lengths), device=self.lengths.device)
        return torch.stack((rows, torch.zeros_like(rows), self.lengths), dim=1)

    def anchors(self) -> tuple[Tensor, Tensor]:
        """Tokens that have a next token in their conversation.

        Returns:
            Their flat positions [t] int64, ascending, and their positions in the conversation [t].
        """
        row, start, length = self.conversations().unbind(1)  # each [c]
        count = (length - 1).clamp(min=0)  # [c] anchors of each conversation
        begin = torch.repeat_interleave(row * self.input_ids.shape[1] + start, count)  # [t]
        earlier = torch.repeat_interleave(count.cumsum(0) - count, count)  # [t] anchors before
        place = torch.arange(len(begin), device=begin.device) - earlier
        return begin + place, place

    def begins(self) -> Tensor:
        """[b, s] int64, the column where each token's conversation begins.

        Padding counts as a conversation of its own.
        """
        b, s = self.input_ids.shape
        device = self.input_ids.device
        row, start, _ = self.conversations().unbind(1)
        # Mark the first column of each conversation, and of the padding, with its own number.
        begin = torch.zeros(b, s + 1, dtype=torch.long, device=device)
        begin[row, start] = start
        begin[torch.arange(b, device=device), self.lengths] = self.lengths
        # The running maximum carries each start to the end of its conversation.
        return begin[:, :s].cummax(dim=1).values

    def first_rows(self, b: int) -> Batch:
        """The first b rows."""
        kept = self.conversations()[:, 0] < b  # [c] bool
        documents = self.documents
        if documents is not None:
            documents = documents[kept]
        return Batch(
            input_ids=self.input_ids[:b],
            lengths=self.lengths[:b],
            response_mask=self.response_mask[:b],
            index=self.index[kept],
            documents=documents,
        )


def anchors_by_depth(
    response_mask: Tensor,
    depths: int,
    share: float = 1.0,
    part: Part | None = None,
) -> list[Tensor]:
    """The anchors that each depth trains on: flat positions of [b, s], an int64 tensor per depth.

    Anchor t counts at depth k if x_{t+1} .. x_{t+2+k} all belong to one response: then decoding can
    stand there (the last committed token is the target's own) and the predicted token is the
    target's own choice. Deeper sets lie in earlier ones.

        response_mask     0 0 1 1 1 1 0       anchors at depth 0:  t = 1, 2, 3   (x_{t+1}, x_{t+2} both in)
        position t        0 1 2 3 4 5 6       anchors at depth 1:  t = 1, 2

    Args:
        response_mask: [b, s] bool.
        share: share of the anchors, drawn at random, that depths after the first train on.
        part: given if processes share the rows, so that all of them draw the same.
    """
    s = response_mask.shape[1]

    def ahead(j: int) -> Tensor:
        """[b, s] bool: the token j positions later belongs to a response."""
        return torch.nn.functional.pad(response_mask[:, j:], (0, min(j, s)))  # none: the row ends

    current = ahead(1)
    result = []
    for k in range(depths):
        current = current & ahead(k + 2)
        # Deeper sets lie in this one, so one draw thins them all.
        if k == 1 and share < 1:
            drawn = torch.rand(current.shape, device=current.device)
            if part is not None:
                drawn = part.same(drawn)
            current = current & (drawn < share)
        result.append(current.flatten().nonzero().squeeze(1))
    return result


@dataclass
class TargetOutput:
    """Hidden states of the frozen target for a batch."""

    features: Tensor  # [b, s, f*h], the inputs of the layers that the drafter reads, concatenated
    last_hidden: Tensor  # [b, s, h], the input of the target's head (after the final norm)

    @staticmethod
    def of(
        caught: Mapping[int, Tensor],
        layers: Sequence[int],
        last: Tensor,
    ) -> TargetOutput:
        """What a forward's hooks caught, on the device of its last states.

        Args:
            caught: [b, s, h] by feature layer. layers: the ones to concatenate. A layer with n streams of
                states per token has [b, s, n, h]; its feature is their mean, as in vLLM's DeepSeek-V4.
            last: [b, s, h], `last_hidden`.

        Raises:
            UserError: a layer holds states of another form.
        """
        parts = []
        for layer in layers:
            state = caught[layer].to(last.device)  # a spread target has states on several devices
            if state.shape[:-2] == last.shape[:-1]:
                state = state.mean(-2)
            if state.shape[:-1] != last.shape[:-1]:
                raise UserError(
                    f"feature layer {layer} of this target holds states of shape {list(state.shape)} for tokens of shape "
                    f"{list(last.shape[:-1])}, which no engine hands to a drafter; choose a kind that reads no features"
                )
            parts.append(state)
        features = torch.cat(parts, dim=-1) if parts else last[..., :0]
        return TargetOutput(features, last)


class StepOutput(NamedTuple):
    """A training step's result.

    It is a tuple because DDP and ZeRO-3 look for tensors in the outputs of a forward.
    """

    loss: Tensor  # scalar, already divided by the global number of anchors
    # Sums over this batch's anchors by name, each [k] (a value per depth); `count` is the number of
    # anchors, so metrics of several batches and ranks are added first and divided last.
    metrics: dict[str, Tensor]


@dataclass
class Proposal:
    """Proposal distributions q of a sampled tree.

    Siblings are drawn without replacement, in the order of their indices.
    """

    # [r, d] float32, the drafter's distributions q, a row per node whose children were drawn
    probs: Tensor
    # n ints, the row of `probs` that each node was drawn from; -1 for a node that was not drawn
    rows: list[int]
    # [d] target id of each drafter id; None if the vocabularies are the same
    kept_ids: Tensor | None = None


@dataclass
class TokenTree:
    """A tree of drafted tokens in topological order.

    The root, the last committed token, is not a node. Siblings carry distinct tokens. Probes are
    nodes at the end that are no drafts: the session reads the target's choice after them, and
    verification never accepts them.
    """

    tokens: Tensor  # [n] int64, target vocabulary
    # n ints, each node's parent, -1 for children of the root; smaller than the node's own index
    parents: list[int]
    # [n] float32, the drafter's log-probability of each node's path; nan for a merged match
    log_probs: Tensor | None = None
    # None if no node was drawn (top-k tokens, matches); verification then needs no q
    proposal: Proposal | None = None
    probes: int = 0  # number of probes at the end
    matched: frozenset[int] = frozenset()  # nodes that only a second drafter's match proposed

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> list[int]:
        """Depth of each node, 1 for children of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def drafted_depth(self) -> int:
        """Length of the longest drafted path, the denominator of acceptance rates."""
        return max(self.depths[: len(self) - self.probes], default=0)

    def match(self, tokens: Sequence[int]) -> int:
        """Length of the drafted path along the given tokens."""
        child = self.places()
        node = -1
        for depth, token in enumerate(tokens):
            if (node, token) not in child:
                return depth
            node = child[node, token]
        return len(tokens)

    def places(self) -> dict[tuple[int, int], int]:
        """The node of each (parent, token)."""
        keys = zip(self.parents, self.tokens.tolist(), strict=True)
        return {key: node for node, key in enumerate(keys)}

    def prune(self, depth: int, cut: float = 0.0) -> TokenTree:
        """The part down to `depth`, of paths that are at least as likely as `cut`.

        By depth alone all children of a node stay or go together, so drawn siblings stay draws
        from q. A cut verifies as many nodes as the drafter is sure of, round by round.

        Source: D-Cut, angelslim.readthedocs.io (dcut).
        """
        if not cut and len(self.parents) <= depth:  # no path has more nodes than the tree
            return self
        kept = [node for node, at in enumerate(self.depths) if at <= depth]
        if cut and self.log_probs is not None:
            least = math.log(cut)
            scores = self.log_probs.tolist()
            kept = [node for node in kept if scores[node] >= least]
        if len(kept) == len(self):
            return self
        return self.part(kept)

    @staticmethod
    def best_nodes(scores: Sequence[float], count: int) -> list[int]:
        """The `count` nodes of highest score, ascending. Of equal scores the smaller index wins.

        If no node scores above its parent, the selected nodes form a tree: parents have smaller
        indices.
        """
        if len(scores) <= count:
            return list(range(len(scores)))
        by_score = sorted(range(len(scores)), key=lambda node: -scores[node])
        return sorted(by_score[:count])

    @staticmethod
    def likeliest(
        count: int,
        tokens: list[int],
        parents: list[int],
        log_probs: list[float],
        device: torch.device,
        matched: frozenset[int] = frozenset(),
    ) -> TokenTree:
        """The tree of the `count` nodes of highest path log-probability."""
        kept = TokenTree.best_nodes(log_probs, count)
        ids = torch.tensor(tokens, dtype=torch.long).to(device, non_blocking=True)
        tree = TokenTree(
            ids,
            parents,
            torch.tensor(log_probs),
            matched=matched,
        )
        if len(kept) == len(tokens):
            return tree
        return tree.part(kept)

    def part(self, kept: list[int]) -> TokenTree:
        """The given nodes, ascending, each with its parent."""
        place = {old: new for new, old in enumerate(kept)}  # old node -> new node
        place[-1] = -1
        at = torch.tensor(kept, dtype=torch.long)
        tokens = self.tokens[at.to(self.tokens.device, non_blocking=True)]

        log_probs = self.log_probs
        if log_probs is not None:
            log_probs = log_probs[at.to(log_probs.device, non_blocking=True)]
        proposal = self.proposal
        if proposal is not None:
            proposal = replace(proposal, rows=[proposal.rows[node] for node in kept])

        drafted = len(self) - self.probes
        return TokenTree(
            tokens,
            [place[self.parents[node]] for node in kept],
            log_probs,
            proposal,
            probes=sum(node >= drafted for node in kept),
            matched=frozenset(place[node] for node in self.matched if node in place),
        )

    @staticmethod
    def moved(trees: Sequence[TokenTree], device: torch.device) -> list[TokenTree]:
        """The trees with their tokens on another device, in one transfer."""
        tokens = torch.cat([tree.tokens for tree in trees])  # [nodes of all trees]
        # A copy to the CPU must have arrived before it is read.
        tokens = tokens.to(device, non_blocking=device.type != "cpu")
        parts = tokens.split([len(tree) for tree in trees])
        return [replace(tree, tokens=own) for tree, own in zip(trees, parts, strict=True)]

    def drafts(self) -> TokenTree:
        """The tree without its probes."""
        if self.probes:
            return self.part(list(range(len(self) - self.probes)))
        return self

    def with_probes(
        self,
        tokens: list[int],
        parents: list[int],
        depth: int,
    ) -> tuple[TokenTree, list[int]]:
        """Adds probes down to `depth`. A probe whose path is drafted already shares that node.

        Args:
            tokens: of the probes, in topological order.
            parents: of the probes, as indices of probes; -1 for the root.

        Returns:
            The tree, and each probe's node in it, -1 for probes below `depth`.
        """
        ids = self.tokens.tolist()
        above = list(self.parents)
        depths = self.depths
        place = self.places()
        nodes: list[int] = []
        for token, parent in zip(tokens, parents, strict=True):
            under = -1
            if parent >= 0:
                under = nodes[parent]
            at = 1
            if under >= 0:
                at += depths[under]
            # A probe below one that is left out is left out too.
            if at > depth or (under < 0 <= parent):
                nodes.append(-1)
                continue
            if (under, token) not in place:
                place[under, token] = len(ids)
                ids.append(token)
                above.append(under)
                depths.append(at)
            nodes.append(place[under, token])
        count = len(ids) - len(self)
        log_probs = self.log_probs
        if log_probs is not None:
            # [n + count]
            log_probs = torch.nn.functional.pad(
                log_probs,
                (0, count),
                value=-torch.inf,
            )
        proposal = self.proposal
        if proposal is not None:
            proposal = replace(proposal, rows=proposal.rows + [-1] * count)
        made = torch.tensor(ids, dtype=torch.long).to(self.tokens.device, non_blocking=True)
        tree = TokenTree(
            made,
            above,
            log_probs,
            proposal,
            self.probes + count,
            self.matched,
        )
        return tree, nodes

    @staticmethod
    def empty(device: torch.device | str = "cpu") -> TokenTree:
        """A tree without nodes."""
        return TokenTree(torch.empty(0, dtype=torch.long, device=device), [])
