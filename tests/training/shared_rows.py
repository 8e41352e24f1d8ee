"""Processes that share rows, as threads of one process: the same calls in the same order, without DeepSpeed."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from drafttrain.drafters.base import StepInputs
from drafttrain.sequence_parallel import SequenceGroup


class Board:
    """Where `size` threads leave tensors for each other. A thread that fails breaks the barrier, so that none waits for it."""

    def __init__(self, size: int):
        self.size, self.barrier = size, threading.Barrier(size, timeout=120)
        self.posted: list = [None] * size

    def all(self, rank: int, value):
        self.posted[rank] = value
        self.barrier.wait()
        found = list(self.posted)
        self.barrier.wait()
        return found


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, board: Board, rank: int) -> Tensor:
        ctx.board, ctx.rank = board, rank
        assert len(x) == board.size
        return torch.stack([piece[rank] for piece in board.all(rank, x.detach().clone())])

    @staticmethod
    def backward(ctx, grad: Tensor):
        return Swap.apply(grad, ctx.board, ctx.rank), None, None


class ThreadGroup(SequenceGroup):
    def exchange(self, x: Tensor) -> Tensor:
        return Swap.apply(x, self.group, self.rank)

    def same(self, x: Tensor) -> Tensor:
        return torch.rand(
            x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0)
        )  # threads share torch's own

    def behind(self, x: Tensor) -> Tensor:
        return torch.cat([x[:0], *self.group.all(self.rank, x)[self.rank + 1 :]])


def step(drafter, target, source, batch, count):
    """Loss and gradients of one process, its metrics, and bytes: kept for backward, and given by the target."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if isinstance(x, torch.nn.Parameter):
            return x
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    drafter.zero_grad()
    features, rows, row_of = source(batch)
    read = batch.input_ids.flatten()[batch.part.seen][None] if batch.shared else batch.input_ids
    inputs = StepInputs(batch, target.embed(read), features, rows, row_of, count)
    with saved_tensors_hooks(keep, lambda x: x):
        out = drafter(inputs)
    given = features.nbytes + getattr(rows, "hidden", features[:0]).nbytes
    out.loss.backward()
    grads = {name: p.grad for name, p in drafter.named_parameters() if p.requires_grad}
    return out.loss.detach(), grads, out.metrics, (sum(kept.values()), given)


def shared_steps(drafter, target, source, batch, count, size: int) -> list:
    """`step` of each of `size` processes that share the batch; `source` makes a source."""
    board = Board(size)

    def run(rank: int):
        try:
            group = ThreadGroup(board, rank, size)
            return step(
                mine[rank], target, source(), group.share(batch, drafter.sequence_reach), count
            )
        except BaseException:
            board.barrier.abort()
            raise

    mine = [copy.deepcopy(drafter) for _ in range(size)]
    for each in mine:
        each.bind(target)
    with ThreadPoolExecutor(size) as pool:
        tasks = [pool.submit(run, rank) for rank in range(size)]
        errors = [task.exception() for task in tasks]
    first = [
        error for error in errors if error and not isinstance(error, threading.BrokenBarrierError)
    ]
    if first:
        raise first[0]
    return [task.result() for task in tasks]
