"""Drafting on a CPU by the kernels of cpu_draft.c.

    DraftHead     top tokens of a head, by 4-bit scores of all tokens and exact products of a shortlist
    DraftStep     one depth of a drafter for tokens of several sequences, or all depths of their trees in one call

Objects hold packed weights and nothing else: threads share them. A call's state is an argument or
is allocated by the call.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.ops.cpu_layers import DecoderLayer, fields, make_struct
from drafttrain.ops.layer_ops import Tables
from drafttrain.ops.native import built_kernels
from drafttrain.ops.packing import (
    PackedLinear,
    address_of,
    check,
    check_rows,
    pack_panels,
)
from drafttrain.ops.tree_attention import CpuPlan
from drafttrain.ops.tree_cache import Addresses

_STRIP = 64  # as in cpu_draft.c
_LEVELS = 15  # highest of the integers that weights are rounded to
OPENED = 64  # most tokens of a tree whose children are drafted, the root included
RotaryOf = Callable[[Tensor, torch.dtype], Tables]


class _Head(ctypes.Structure):
    """struct head of cpu_draft.c."""

    _fields_ = [
        ("panels", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("column", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("exact", ctypes.c_void_p),
        ("vocabulary", ctypes.c_long),
        ("width", ctypes.c_long),
        ("noise", ctypes.c_float),
    ]


class _Draft(ctypes.Structure):
    """struct draft of cpu_draft.c."""

    _fields_ = [
        ("layers", ctypes.c_void_p),
        *fields(
            "project fuse",
            "embed_norm state_norm norm project_bias",
            "count embed_width hidden returns_normed residual_normed features",
        ),
        ("eps", ctypes.c_float),
    ]


class _Shape(ctypes.Structure):
    """struct shape of cpu_draft.c."""

    _fields_ = [
        ("depth", ctypes.c_long),
        ("width", ctypes.c_long),
        ("budget", ctypes.c_long),
        ("dynamic", ctypes.c_long),
        ("floor", ctypes.c_double),
        ("fanout", ctypes.c_void_p),
    ]


class DraftHead:
    """Top tokens of a drafter's head, for trees whose tokens are chosen, not drawn.

    A pass over 4-bit weights, an eighth of float32's bytes, scores the vocabulary; the 64 highest
    scores (or four times the tokens that are wanted) get exact products. Drafts need no more: the
    target verifies every token, and a missed one costs acceptance only. It must not make the
    target's own choice, nor score tokens that are drawn, whose q must be known.

    Args:
        weight: [d, h] float32 on the CPU; kept, for the exact products.

    Raises:
        ValueError, TypeError: another dtype, device or layout.
    """

    def __init__(self, weight: Tensor):
        self.vocabulary, self.width = weight.shape
        weight = weight.detach()
        check("weight", weight, (self.vocabulary, self.width))
        mean = weight.mean(0)  # [h]
        deviation = (weight - mean).square().mean(0).sqrt()  # [h]
        column = deviation.clamp_min(1e-12).sqrt()  # [h] factors of the states

        # Round the weights to 4 bits, some rows at a time.
        panels = []
        scales = []
        errors = []
        for rows in weight.split(8192):
            integers, factors, error = _round_rows((rows - mean) / column)
            panels.append(integers)
            scales.append(factors)
            errors.append(error)

        # Two integers share a byte: those of steps of 8 inputs, 4 apart.
        count = -(-self.vocabulary // _STRIP)  # strips, rounded up
        missing = count * _STRIP - self.vocabulary
        padded = F.pad(torch.cat(panels), (0, -self.width % 8, 0, missing))
        steps = padded.view(count, _STRIP, -1, 2, 4)
        low, high = steps.permute(3, 0, 2, 1, 4)  # [panels, steps, outputs, 4] each
        self._head, self._kept = make_struct(
            _Head,
            panels=low | high << 4,
            scale=F.pad(torch.cat(scales), (0, missing)),
            column=column,
            mean=mean,
            exact=weight,
            vocabulary=self.vocabulary,
            width=self.width,
            noise=sum(errors) / weight.numel(),  # mean squared error of a weight
        )
        self.address = ctypes.addressof(self._head)
        self._kernels = built_kernels()

    @staticmethod
    def of(linear: object) -> DraftHead | None:
        """The draft head of a packed linear layer, made on first use; None without a kernel."""
        if not isinstance(linear, PackedLinear) or not linear.kernel or linear.bias is not None:
            return None
        if linear.draft_head is None:
            linear.draft_head = DraftHead(linear.weight)
        assert isinstance(linear.draft_head, DraftHead)
        return linear.draft_head

    def top(self, reads: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest tokens of states [n, h] float32.

        Args:
            width: tokens per state, at most d.

        Returns:
            Ids [n, width] int64; log-probabilities [n, width] float32, descending; log-sum-exp [n]
            of all logits, estimated beyond the shortlist. A state's result does not depend on the
            others.
        """
        reads = reads.contiguous()
        count = check_rows("reads", reads, self.width)
        if not 0 < width <= self.vocabulary:
            raise ValueError(
                f"width={width} must be from 1 to the {self.vocabulary} tokens of the head"
            )
        ids = reads.new_empty(count, width, dtype=torch.long)
        top = reads.new_empty(count, width)
        sums = reads.new_empty(count)
        self._kernels.head_top(
            self.address,
            reads.data_ptr(),
            count,
            width,
            ids.data_ptr(),
            top.data_ptr(),
            sums.data_ptr(),
            torch.get_num_threads(),
        )
        return ids, top, sums


def _round_rows(weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """Rounds rows of a weight [d, h] to 4 bits: weight ~ (integer - 7.5) * factor.

    Each row tries some factors and takes the one of least error: clipping a few weights leaves
    finer steps to all others.

    Returns:
        Integers [d, h] uint8, factors [d], and the sum of squared errors.
    """
    most = weight.abs().amax(1).clamp_min(1e-12)
    least = torch.full((len(weight),), torch.inf)
    best = torch.zeros_like(weight, dtype=torch.uint8)
    scale = torch.ones(len(weight))
    for share in (0.6, 0.7, 0.8, 0.9):
        factor = most * (2 * share / _LEVELS)  # 15 steps from -share * most to share * most
        rounded = (weight / factor[:, None] + _LEVELS / 2).round_().clamp_(0, _LEVELS)
        error = ((rounded - _LEVELS / 2) * factor[:, None] - weight).square_().sum(1)
        better = error < least  # [d]
        best[better] = rounded[better].byte()
        scale[better] = factor[better]
        least[better] = error[better]
    return best, scale, float(least.sum())


@dataclass
class DraftWeights:
    """What surrounds a drafter's layers in one depth, float32 on the CPU. None: not applied."""

    hidden: int  # of the states
    embed_width: int  # of the token embeddings that are read; 0 for none
    eps: float  # of all norms
    embed_norm: Tensor | None = None  # [embed_width], RMS-norm factor of the embeddings read
    state_norm: Tensor | None = None  # [h], of the states that are read
    norm: Tensor | None = None  # [h], of the last layer's output
    # [h, embed_width + h], joined input to a state; None if the first layer reads it joined
    project: Tensor | None = None
    project_bias: Tensor | None = None  # [h]
    # [h, f * target h], features to the state that depth 0 reads; None: they are the state
    fuse: Tensor | None = None
    reads_features: bool = True  # `fuse` is all that happens to features
    returns_normed: bool = False  # the next depth reads the output behind `norm`
    residual_normed: bool = False  # the first layer's residual is the state behind `state_norm`


class Placed:
    """Where the tokens of a call stand, and where their keys are.

    Args:
        plan: of the sequences' new tokens, whose slots begin at 0.
        caches: of each sequence.

    Attributes:
        rows: address of the addresses [sequences] of each one's struct buffers.
    """

    def __init__(self, plan: CpuPlan, caches: Sequence[Addresses]):
        self.plan = plan
        self.caches = caches
        self._rows = array("Q", [cache.address for cache in caches])
        self.rows = address_of(self._rows)


@dataclass(frozen=True)
class TreeShape:
    """A greedy tree that `DraftStep.trees` grows; see `TreeSpec`. Its struct is made once."""

    depth: int
    width: int  # most children of a node
    budget: int
    fanout: tuple[int, ...]  # children at each depth; empty for a dynamic tree
    floor: float  # log-probability below which a path is not continued

    @cached_property
    def opens(self) -> int:
        """Most tokens whose children are drafted, the root included."""
        if not self.fanout:
            # The root, then at each depth but the last the likeliest `width` nodes.
            return 1 + self.width * (self.depth - 1)
        total = 0
        level = 1  # nodes at this depth
        for children in self.fanout:
            total += level
            level *= children
        return total

    @cached_property
    def room(self) -> int:
        """Most candidates."""
        if not self.fanout:
            # The root's children, then those of `width` nodes at each further depth.
            return self.width + self.width**2 * (self.depth - 1)
        return int(np.cumprod(self.fanout).sum())

    @cached_property
    def form(self) -> tuple[_Shape, array[int]]:
        """What the kernel reads, and the numbers that it points to."""
        fanout = array("q", self.fanout)
        form = _Shape(
            self.depth,
            self.width,
            self.budget,
            not self.fanout,
            self.floor,
            address_of(fanout),
        )
        return form, fanout


class DraftStep:
    """One depth of a drafter with decoder layers, for tokens of one or more sequences.

    A depth over a few tokens reads some megabytes of weights in half a millisecond; torch's forty
    operations took longer.

    Args:
        layers: in order. weights: around them.
        rotary: cosine and sine [t, 1, rotary_dim] of positions [t], in a dtype.
        window: visible positions, 0 for all.

    Attributes:
        shapes: (kv_heads, head_dim) of each layer's keys and values.

    Raises:
        ValueError, TypeError: layers and weights that do not fit together.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        weights: DraftWeights,
        rotary: RotaryOf,
        window: int = 0,
    ):
        if window < 0:
            raise ValueError(f"window={window} may not be negative")
        self.window = window
        self._rotary = rotary
        self._known = (torch.empty(0), torch.empty(0))  # cosine and sine of the first positions
        first = layers[0]
        h = weights.hidden
        joined = weights.embed_width + h
        self.embed_width = weights.embed_width
        self.hidden = h
        self.shapes = [(first.kv_heads, first.head_dim)] * len(layers)
        self.rotary_dim = first.rotary_dim
        self.features = h if weights.fuse is None else weights.fuse.shape[1]
        self.reads_features = weights.reads_features
        # The kernel computes keys and values alone where they begin at a panel of their own.
        self.reads_context = first.heads * first.head_dim % 32 == 0

        expected = (first.heads, first.kv_heads, first.head_dim, first.rotary_dim)
        for i, layer in enumerate(layers):
            reads = h
            if i == 0 and weights.project is None:
                reads = joined
            form = (layer.heads, layer.kv_heads, layer.head_dim, layer.rotary_dim)
            fits = (layer.width, layer.hidden) == (reads, h) and form == expected
            if not fits or layer.head_dim % 16:
                raise ValueError(
                    f"layer {i} maps {layer.width} to {layer.hidden}, heads {form}; {reads} to {h} expected"
                )
        sizes: dict[str, tuple[int, ...]] = {
            "project": (h, joined),
            "project_bias": (h,),
            "norm": (h,),
            "embed_norm": (weights.embed_width,),
            "state_norm": (h,),
            "fuse": (h, self.features),
        }
        content = dict(vars(weights))
        for name, size in sizes.items():
            if content[name] is not None:
                check(name, content[name].contiguous(), size)

        addresses = (ctypes.c_void_p * len(layers))()
        for i, layer in enumerate(layers):
            addresses[i] = layer.address
        del content["reads_features"]
        for name in ("project", "fuse"):
            if content[name] is not None:
                content[name] = pack_panels(content[name].detach())
        content["features"] = self.features
        content["layers"] = ctypes.addressof(addresses)
        content["count"] = len(layers)
        self._draft, kept = make_struct(_Draft, **content)
        self._kept = (layers, addresses, kept)
        self._address = ctypes.addressof(self._draft)
        self._kernels = built_kernels()

    def run(
        self,
        embeds: Tensor | None,
        states: Tensor,
        at: Placed,
    ) -> Tensor:
        """Stores the new keys and values and computes a depth; all tensors float32.

        Args:
            embeds: [n, embed_width], None where the drafter reads none; states: [n, h].

        Returns:
            [n, 2, h], what the next depth reads and the head's input of each token.
        """
        n = at.plan.tokens
        states = states.contiguous()
        if embeds is not None:
            embeds = embeds.contiguous()
            check("embeds", embeds, (n, self.embed_width))
        elif self.embed_width:
            check("embeds", states[:, :0], (n, self.embed_width))  # missing: the check refuses it
        check("states", states, (n, self.hidden))
        self._check(at)
        made = states.new_empty(2, n, self.hidden)
        out = made.data_ptr()
        cosine, sine = self._tables(at.plan.positions)
        self._kernels.draft_step(
            self._address,
            None if embeds is None else embeds.data_ptr(),
            states.data_ptr(),
            n,
            cosine.data_ptr(),
            sine.data_ptr(),
            at.rows,
            at.plan.address,
            self.window,
            out,
            out + 4 * n * self.hidden,  # bytes
            torch.get_num_threads(),
        )
        return made.transpose(0, 1)

    def read(
        self,
        tokens: Tensor,
        features: Tensor,
        table: Tensor,
        at: Placed,
    ) -> Tensor:
        """Depth 0 of committed tokens, from the target's features to the roots of the next trees.

        One call, since its parts in Python take as long as the layer.

        Args:
            tokens: [n] int64 target ids, packed. features: [n, f * target h] before them.
            table: [v, embed_width], the target's embedding.

        Returns:
            [sequences, 2, h], as `run` of each sequence's last token.
        """
        n = at.plan.tokens
        features = features.contiguous()
        check("tokens", tokens, (n,), torch.long)
        check("features", features, (n, self.features))
        check_rows("table", table, self.embed_width)
        if 0 in at.plan.counts or not self.reads_features:
            raise ValueError(
                f"counts={at.plan.counts}: each sequence has a token, and the drafter reads features"
            )
        self._check(at)
        count = len(at.caches)
        made = features.new_empty(2, count, self.hidden)
        out = made.data_ptr()
        cosine, sine = self._tables(at.plan.positions)
        self._kernels.draft_read(
            self._address,
            tokens.data_ptr(),
            features.data_ptr(),
            n,
            table.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
            at.rows,
            at.plan.address,
            self.window,
            out,
            out + 4 * count * self.hidden,  # bytes
            torch.get_num_threads(),
        )
        return made.transpose(0, 1)

    def store_context(self, states: Tensor, at: Placed) -> None:
        """Stores every layer's keys and values of context states, as block drafters read them.

        Args:
            states: [n, h].

        Raises:
            ValueError: `reads_context` is not set.
        """
        states = states.contiguous()
        check("states", states, (at.plan.tokens, self.hidden))
        self._check(at)
        if not self.reads_context:
            raise ValueError("query rows that are not a multiple of 32 share a panel with keys")
        cosine, sine = self._tables(at.plan.positions)
        self._kernels.draft_context(
            self._address,
            states.data_ptr(),
            at.plan.tokens,
            cosine.data_ptr(),
            sine.data_ptr(),
            at.rows,
            at.plan.address,
            torch.get_num_threads(),
        )

    def trees(
        self,
        head: DraftHead,
        shape: TreeShape,
        table: Tensor,
        kept_ids: Tensor,
        at: Placed,
        roots: Tensor,
    ) -> list[tuple[np.ndarray, list[int], np.ndarray]]:
        """Grows the trees of several sequences, one step per depth for all of them.

        Args:
            table: [v, embed_width], the target's embedding.
            kept_ids: [d] int64, target id of each drafter id.
            at: of the roots alone, which are stored already; a cache has `shape.opens` - 1 slots
                behind them.
            roots: [sequences, 2, h] of the last committed tokens, as `read` returns them.

        Returns:
            Per sequence the tree's tokens [n] int64 in target ids, parents and log-probabilities
            [n] float32.
        """
        count = len(at.caches)
        states, reads = roots.transpose(0, 1).contiguous().unbind()
        check("states", states, (count, self.hidden))
        check("reads", reads, (count, self.hidden))
        check_rows("table", table, self.embed_width)
        check("kept_ids", kept_ids, (head.vocabulary,), torch.long)
        if head.width != self.hidden or shape.opens > OPENED or at.plan.counts != [1] * count:
            found = f"head of {head.width}, {shape.opens} opened, counts={at.plan.counts}"
            raise ValueError(f"{found}: must be {self.hidden}, at most {OPENED}, and 1 each")
        self._check(at, shape.opens - 1)
        form, _ = shape.form
        # Nodes of the last depth are not read.
        cosine, sine = self._tables(at.plan.positions + shape.depth - 1)
        # What the kernel writes: nodes of each tree, and their numbers [sequences, budget].
        sizes = array("q", bytes(8 * count))
        # Rows have room for a full tree; a smaller one leaves the rest unwritten.
        tokens, parents = np.empty((2, count, shape.budget), dtype=np.int64)
        scores = np.empty((count, shape.budget), dtype=np.float32)
        self._kernels.draft_trees(
            self._address,
            head.address,
            ctypes.addressof(form),
            shape.room,
            table.data_ptr(),
            kept_ids.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
            at.rows,
            at.plan.address,
            self.window,
            states.data_ptr(),
            reads.data_ptr(),
            tokens.ctypes.data,
            parents.ctypes.data,
            scores.ctypes.data,
            address_of(sizes),
            torch.get_num_threads(),
        )
        return [
            (tokens[i, :n], parents[i, :n].tolist(), scores[i, :n]) for i, n in enumerate(sizes)
        ]

    def _tables(self, end: int) -> Tables:
        """Cosine and sine of at least the positions [0, end), which callers must hold."""
        known = self._known  # another thread may replace the tables by shorter ones
        if end > len(known[0]):
            # Doubles: grows seldom.
            positions = torch.arange(max(256, 1 << end.bit_length()))
            known = self._rotary(positions, torch.float32)
            for name, table in zip(("cosine", "sine"), known, strict=True):
                check(name, table, (len(positions), 1, self.rotary_dim))
            self._known = known
        return known

    def _check(self, at: Placed, slots: int = 0) -> None:
        """Raises unless the caches are large enough.

        slots: that the call takes behind each sequence's tokens.
        """
        plan = at.plan
        if plan.parts != len(at.caches):
            raise ValueError(f"parts={plan.parts}, caches={len(at.caches)}: must be equal")
        for cache, end in zip(at.caches, plan.ends, strict=True):
            if cache.shapes != self.shapes or cache.slots < end + slots:
                found = f"layers of {cache.shapes} with {cache.slots} slots"
                raise ValueError(
                    f"the cache has {found}; {self.shapes} with {end + slots} are needed"
                )


def kernel_of(
    layers: Sequence[DecoderLayer | None],
    weights: DraftWeights | None,
    rotary: RotaryOf,
    window: int,
) -> DraftStep | None:
    """The kernel of packed layers and what surrounds them; None for a form that kernels lack.

    Args:
        layers: None for a layer whose form the kernels lack.
    """
    natives = [layer for layer in layers if layer is not None]
    if weights is None or len(natives) < len(layers) or natives[0].head_dim % 16:
        return None
    return DraftStep(natives, weights, rotary, window)
