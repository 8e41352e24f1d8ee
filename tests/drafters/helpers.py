"""Drafters, batches and sessions that tests of drafters, training and decoding share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import TypeVar

import torch

from drafttrain.batch import Batch, TokenTree, anchors_by_depth
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.eagle3.model import Eagle3, Eagle3Config
from drafttrain.drafters.registry import kind_class
from drafttrain.states.source import TargetSource

THREADS = 4
T = TypeVar("T")


def in_threads(job: Callable[[int], T]) -> list[T]:
    """The results of job(0..THREADS-1), each in a thread of its own that starts when all are there."""
    start = threading.Barrier(THREADS)
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda i: (start.wait(), job(i))[1], range(THREADS)))


def make_drafter(target, kept=None, **options):
    """An EAGLE-3 drafter that is bound to the target, as init=target begins one."""
    torch.manual_seed(3)
    if kept is None:
        kept = torch.arange(target.vocab_size)
    drafter = Eagle3(Eagle3Config.for_target(target, draft_vocab_size=len(kept), **options))
    drafter.initialize(target, kept)
    drafter.bind(target)
    return drafter


def new_drafter(kind: str, **options):
    """What builds a new drafter of a target."""
    cls = kind_class(kind)
    return lambda target: cls(cls.config_class.for_target(target, **options))


def make_batch(lengths=(17, 11), start=4, seed=5):
    """Rows of random tokens, a conversation each; row i responds from token start + i on."""
    generator = torch.Generator().manual_seed(seed)
    s = max(lengths)
    ids = torch.randint(0, 250, (len(lengths), s), generator=generator)
    mask = torch.zeros(len(lengths), s, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, start + row : length] = True
    return Batch(ids, torch.tensor(lengths), mask, torch.arange(len(lengths)))


def packed_batch(whole: Batch, rows: list[list[int]]) -> Batch:
    """The conversations of an unpacked batch, several per row."""
    lengths = whole.lengths.tolist()
    s = max(sum(lengths[i] for i in row) for row in rows)
    ids = torch.zeros(len(rows), s, dtype=torch.long)
    mask = torch.zeros(len(rows), s, dtype=torch.bool)
    documents = []
    for r, members in enumerate(rows):
        start = 0
        for i in members:
            ids[r, start : start + lengths[i]] = whole.input_ids[i, : lengths[i]]
            mask[r, start : start + lengths[i]] = whole.response_mask[i, : lengths[i]]
            documents.append([r, start, lengths[i]])
            start += lengths[i]
    index = torch.tensor([i for row in rows for i in row])
    totals = torch.tensor([sum(lengths[i] for i in row) for row in rows])
    return Batch(ids, totals, mask, index, torch.tensor(documents))


def source_of(target, drafter):
    """What runs the target for a drafter's training."""
    return TargetSource(target, drafter.feature_layers, drafter.kept_ids)


def step_inputs(drafter, target, batch, count=None, source=None):
    """What a drafter reads in a step. count: anchors (default: the batch's); source: of its rows."""
    if source is None:
        source = source_of(target, drafter)
    features, rows, row_of = source(batch)
    if count is None:
        count = len(anchors_by_depth(batch.response_mask, 1)[0])
    return StepInputs(batch, target.embed(batch.input_ids), features, rows, row_of, count)


def run_step(drafter, target, batch, count=None, source=None):
    """One training step's loss and metrics; the arguments are those of `step_inputs`."""
    return drafter(step_inputs(drafter, target, batch, count, source))


def check_gradients(drafter):
    """Asserts that backward has given every parameter a finite gradient other than zero."""
    for name, parameter in drafter.named_parameters():
        gradient = parameter.grad
        assert gradient is not None and gradient.isfinite().all(), name
        assert gradient.abs().sum() > 0, name


def make_heads(target, kind, kept=None, spread=0.3, **options):
    """A drafter off its start: zero-initialised branches would hide mistakes."""
    torch.manual_seed(3)
    kept = torch.arange(target.vocab_size) if kept is None else kept
    cls = kind_class(kind)
    drafter = cls(cls.config_class.for_target(target, draft_vocab_size=len(kept), **options))
    drafter.initialize(target, kept)
    for parameter in drafter.parameters():
        parameter.data += (
            spread
            * parameter.data.std().nan_to_num(1.0).clamp(min=0.1)
            * torch.randn_like(parameter)
        )
    drafter.bind(target)
    return drafter.eval()


def session_after(drafter, ids, pieces=1):
    """A session that has read ids, brought as decoding brings them."""
    session = drafter.start(ids[:-1], 64)
    for part in ids[1:].split(-(-(len(ids) - 1) // pieces)):
        session.extend(part, part.new_empty(len(part), 0))
    return session


def random_path(tree: TokenTree, random: Random) -> list[int]:
    """Tokens of a random path from the root down, often to a leaf."""
    node = -1
    path: list[int] = []
    while children := [i for i, parent in enumerate(tree.parents) if parent == node]:
        if path and random.random() < 0.3:
            break
        node = random.choice(children)
        path.append(int(tree.tokens[node]))
    return path


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """A tree's nodes by the tokens on their paths."""
    found: list[tuple[int, ...]] = []
    for parent, token in zip(tree.parents, tree.tokens.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def check_same_trees(trees, others, rtol: float = 1e-4, atol: float = 1e-4) -> None:
    """Trees drafted in two ways have the same nodes, and nearly the same probabilities."""
    for tree, other in zip(trees, others, strict=True):
        assert (tree.tokens.tolist(), tree.parents) == (other.tokens.tolist(), other.parents)
        torch.testing.assert_close(tree.log_probs, other.log_probs, rtol=rtol, atol=atol)


def check_tree(tree: TokenTree, spec: TreeSpec, tolerance: float = 0.0) -> None:
    """A tree keeps to its spec: parents come first, siblings differ, and probabilities fall along a path."""
    assert len(tree) <= spec.budget and tree.drafted_depth <= spec.depth
    siblings = list(zip(tree.parents, tree.tokens.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)
    assert tree.log_probs is None or len(tree.log_probs) == len(tree)
    for node, parent in enumerate(tree.parents):
        assert -1 <= parent < node
        if tree.log_probs is not None:
            above = tree.log_probs[parent] if parent >= 0 else 0.0
            assert tree.log_probs[node] <= above + tolerance
    for depth, width in enumerate(spec.fanout):
        for node in range(-1, len(tree)):
            if (0 if node < 0 else tree.depths[node]) == depth:
                assert tree.parents.count(node) <= width
