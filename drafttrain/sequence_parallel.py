"""Sequence parallelism: the processes of a group share the tokens of each batch (DeepSpeed-Ulysses,
arXiv 2309.14509).

Everything but attention is per token, so each process computes it for its own part of the tokens.
Around every attention two all-to-alls, DeepSpeed's, exchange tokens for heads:

    process 0   tokens 0 .. 9, all heads     to_heads      tokens 0 .. 19, heads 0, 1      to_tokens    tokens 0 .. 9, all
    process 1   tokens 10 .. 19, all heads   --------->    tokens 0 .. 19, heads 2, 3      --------->   tokens 10 .. 19, all

All processes of a group hold the same token ids and masks, a few bytes per token. So every shift of
inputs, targets and masks is computed on whole rows, and what a process needs of them is then cut
out (`SharedPart.of`). Accelerate's own path for models of transformers (`UlyssesSPAttentionHF`)
cuts rows before the model sees them and shifts labels by one; an anchor reads tokens and target
distributions further behind, and its keys of later depths are no sequence, so only the exchange is
DeepSpeed's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Sampler

from drafttrain.batch import Attend, Batch, Part, anchors_by_depth
from drafttrain.errors import UserError


@dataclass(frozen=True)
class SequenceGroup:
    """The processes that share rows.

    Attributes:
        group: of torch.distributed. rank: of this process in it, from 0.
    """

    group: Any
    rank: int
    size: int

    @classmethod
    def join(cls, size: int) -> SequenceGroup:
        """The group of this process, of `size` successive ones; every process calls it once."""
        # Only runs that share rows need DeepSpeed, whose import takes seconds.
        from deepspeed import comm
        from deepspeed.runtime.sequence_parallel import parallel_state_sp
        from deepspeed.sequence.layer import register_all_to_all_group

        if not comm.is_initialized():
            # Accelerate has started torch's processes; DeepSpeed takes them over.
            comm.init_distributed(dist.get_backend(), auto_mpi_discovery=False)
        if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
            parallel_state_sp.initialize_sequence_parallel(size)
        group = parallel_state_sp.get_sequence_parallel_group()
        register_all_to_all_group(group)
        return cls(group, dist.get_rank(group), size)

    def share(self, batch: Batch, reach: int) -> Batch:
        """The batch of this process, with an equal part of its work. reach: see `SharedPart`.

        An anchor costs as much at each of about `reach` depths as a token does once. Padding costs
        nothing.
        """
        device = batch.input_ids.device
        # The work of each flat position, and cuts where its sum passes a process's share.
        weights = torch.zeros(batch.input_ids.numel(), dtype=torch.double, device=device)
        tokens, _ = batch.anchors()
        anchors = anchors_by_depth(batch.response_mask, 1)[0]
        weights[tokens] = 1.0
        weights[anchors] += reach
        total = weights.cumsum(0)  # [b*s]
        shares = total[-1] * torch.arange(1, self.size, device=device) / self.size
        cuts = torch.searchsorted(total, shares).tolist()
        return replace(batch, shared=SharedPart((0, *cuts, len(weights)), reach, self))

    def exchange(self, x: Tensor) -> Tensor:
        """[size, ...], a piece for each process -> [size, ...], a piece from each; differentiable."""
        from deepspeed.sequence.layer import _dim_zero_all_to_all

        return _dim_zero_all_to_all(self.group, x)

    def same(self, x: Tensor) -> Tensor:
        """The first process's x in all: for what is drawn at random."""
        dist.broadcast(x, group_src=0, group=self.group)
        return x

    def behind(self, x: Tensor) -> Tensor:
        """[n, ...] of different n -> all later processes' x in order; not differentiable."""
        # all_gather takes tensors of one size.
        count = torch.tensor([len(x)], device=x.device)
        counts = [torch.empty_like(count) for _ in range(self.size)]
        dist.all_gather(counts, count, group=self.group)
        lengths = torch.cat(counts).tolist()
        padding = x.new_zeros(max(lengths) - len(x), *x.shape[1:])
        padded = torch.cat((x, padding))
        found = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(found, padded, group=self.group)
        pieces = [x[:0]]
        for rank in range(self.rank + 1, self.size):
            pieces.append(found[rank][: lengths[rank]])
        return torch.cat(pieces)


class SharedPart(Part):
    """The part of a process that shares rows: successive flat positions of [b, s].

    Args:
        ends: process r holds positions from ends[r] up to ends[r + 1].
        reach: positions behind the part whose tokens and target distributions its last anchors
            read.
    """

    def __init__(self, ends: tuple[int, ...], reach: int, group: SequenceGroup):
        self.ends = ends
        self.reach = reach
        self.group = group
        self.begin = ends[group.rank]
        self.end = ends[group.rank + 1]
        self.seen = slice(self.begin, min(self.end + reach, ends[-1]))

    def counts(self, flat: Tensor) -> list[int]:
        ends = torch.tensor(self.ends, device=flat.device)
        cuts = torch.searchsorted(flat, ends).tolist()  # numbers of each part's first position
        return [after - before for before, after in pairwise(cuts)]

    def of(self, flat: Tensor) -> slice:
        counts = self.counts(flat)
        rank = self.group.rank
        begin = sum(counts[:rank])
        return slice(begin, begin + counts[rank])

    def same(self, x: Tensor) -> Tensor:
        return self.group.same(x)

    def attend(self, attend: Attend, queries: list[int], keys: list[int]) -> Attend:
        def shared(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # [all tokens, heads / size, e] each
            found = attend(
                self.to_heads(query, queries),
                self.to_heads(key, keys, keys=True),
                self.to_heads(value, keys, keys=True),
            )
            found = found.unflatten(1, (query.shape[1] // self.group.size, -1))
            return self.to_tokens(found, queries).flatten(1)

        return shared

    def to_heads(self, x: Tensor, counts: list[int], keys: bool = False) -> Tensor:
        """This process's tokens -> all tokens of this process's heads.

        [n, heads, e] -> [sum(counts), heads / size, e]

        Fewer key heads than processes (keys=True) are repeated, so that each process has the one
        that its query heads read.

        Raises:
            UserError: heads that cannot be divided.
        """
        size = self.group.size
        heads, e = x.shape[1:]
        if heads % size and not (keys and size % heads == 0):
            name = "attention"
            rule = f"divides {heads}"
            if keys:
                name = "key"
                rule = f"divides or is a multiple of {heads}"
            raise UserError(
                f"sequence_parallel={size}: a layer has {heads} {name} heads, which {size} processes "
                f"cannot divide among them; choose a number that {rule}"
            )
        if heads < size:
            x = x.repeat_interleave(size // heads, dim=1)  # to those whose query heads read it
            heads = size
        most = max(*counts, 1)  # DeepSpeed exchanges pieces of one size
        padded = F.pad(x, (0, 0, 0, 0, 0, most - len(x)))
        # [size, most, heads / size, e].
        pieces = padded.view(most, size, heads // size, e).transpose(0, 1)
        found = self.group.exchange(pieces)  # [size, most, heads / size, e]
        return torch.cat([piece[:count] for piece, count in zip(found, counts, strict=True)])

    def own_heads(self, x: Tensor) -> Tensor:
        return x.chunk(self.group.size)[self.group.rank]

    def to_tokens(self, x: Tensor, counts: list[int]) -> Tensor:
        """The reverse of `to_heads`.

        [sum(counts), heads / size, e] -> [n, heads, e]
        """
        most = max(*counts, 1)
        own = counts[self.group.rank]
        pieces = []
        for piece in x.split(counts):
            pieces.append(F.pad(piece, (0, 0, 0, 0, 0, most - len(piece))))
        found = self.group.exchange(torch.stack(pieces))  # [size, most, heads / size, e]
        return found[:, :own].transpose(0, 1).flatten(1, 2)


@dataclass(eq=False)
class SharedBatches(Sampler[int]):
    """Repeats each batch of another order, so that processes that share rows read the same ones.

    Processes take successive batches in turn. The last batches are filled from the beginning of the
    order, as Accelerate fills them.

    Args:
        batch: rows of a batch. processes: of the run. sharing: processes of a group.
    """

    order: Sampler[int]
    batch: int
    processes: int
    sharing: int

    def __len__(self) -> int:
        # Rows that all groups read at once; the last round is filled up.
        per_round = self.batch * self.processes // self.sharing
        rounds = math.ceil(len(self.order) / per_round)  # type: ignore[arg-type]
        return rounds * per_round * self.sharing

    def __iter__(self) -> Iterator[int]:
        rows = list(self.order)
        rows = list(islice(cycle(rows), len(self) // self.sharing))
        for begin in range(0, len(rows), self.batch):
            for _ in range(self.sharing):
                yield from rows[begin : begin + self.batch]
