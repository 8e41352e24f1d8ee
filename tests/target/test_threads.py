"""One packed target or drafter serves several threads at a time: nothing of a call is kept in shared fields."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.ops.cpu_draft import DraftStep
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target import Target
from tests.conftest import make_target
from tests.drafters.helpers import THREADS, in_threads, make_drafter
from tests.marks import needs_compiler

pytestmark = needs_compiler

REPEATS = 60


def check_together(job: Callable[[int], list[Tensor]]) -> None:
    """Every result of REPEATS calls in each thread equals the one of a call alone, to the bit."""
    alone = [job(i) for i in range(THREADS)]

    def differing(i: int) -> list[str]:
        outputs = [job(i) for _ in range(REPEATS)]
        return [
            f"thread {i}, repeat {repeat}, step {step}"
            for repeat, found in enumerate(outputs)
            for step, (ours, expected) in enumerate(zip(found, alone[i], strict=True))
            if not torch.equal(ours, expected)
        ]

    assert in_threads(differing) == [[]] * THREADS


def decode(target: Target, seed: int) -> list[Tensor]:
    """Features and logits of a prefill, of three trees behind it and of single tokens, each with a cache of its own."""
    generator = torch.Generator().manual_seed(seed)
    cache = TreeCache(64)
    outputs = []
    for shape in (11 + seed, [-1, -1, 0, 2], [-1, 0, 1], [-1, -1], 1, 1):
        cache.open([(0, shape)])
        count = shape if isinstance(shape, int) else len(shape) + 1
        ids = torch.randint(target.vocab_size, (1, count), generator=generator)
        out = target.forward(ids, (1, 3), cache.positions(), cache)
        outputs += [out.features, target.head(out.last_hidden)]
        cache.commit([range(count) if isinstance(shape, int) else [0]])
    return outputs


@pytest.mark.thorough
@pytest.mark.parametrize(
    "hidden",
    [64, pytest.param(32, marks=pytest.mark.slow)],
    ids=["all layers in one call", "layer by layer"],
)
def test_threads_share_a_packed_target(hidden):
    target = make_target(hidden=hidden).pack()
    assert target._native is not None
    check_together(lambda i: decode(target, i))


@pytest.mark.thorough
def test_threads_share_an_unpacked_target_whose_hooks_are_registered_by_the_first_of_them():
    fresh = [make_target() for _ in range(REPEATS // 10 + 1)]
    expected = decode(fresh.pop(), 0)
    for target in fresh:
        results = in_threads(lambda _, target=target: decode(target, 0))
        assert all(
            torch.equal(ours, want)
            for found in results
            for ours, want in zip(found, expected, strict=True)
        )
        hooks = [len(layer._forward_pre_hooks) for layer in target.layers]
        assert hooks == [0, 1, 0, 1], "once per feature layer, however many threads came first"


@pytest.mark.thorough
def test_threads_share_a_packed_drafter(monkeypatch):
    """Sessions of different length, so that the rotary tables that a drafter keeps grow while others read them."""
    target = make_target(hidden=64)
    calls: list[int] = []
    grow = DraftStep.trees
    monkeypatch.setattr(DraftStep, "trees", lambda *args: calls.append(1) or grow(*args))
    prompts = [
        torch.randint(300, (9 + 40 * i,), generator=torch.Generator().manual_seed(i))
        for i in range(THREADS)
    ]
    drafters = [make_drafter(target).eval()]
    features = [
        target.forward(ids[None], drafters[0].feature_layers).features[0] for ids in prompts
    ]

    def draft(i: int) -> list[Tensor]:
        drafter = drafters[-1]
        session = drafter.start(prompts[i][:-3], len(prompts[i]))
        drafter.extend_all([session], [prompts[i][1:]], [features[i][:-1]])
        (tree,) = drafter.propose_all([session], TreeSpec.parse("dynamic:4,3,9"), [None])
        return [tree.tokens, torch.tensor(tree.parents), tree.log_probs]

    drafters[0].pack()
    check_together(draft)
    assert calls


@pytest.mark.thorough
def test_captured_steps_are_leased_once():
    target = make_target()
    for _ in range(100):
        target.idle_steps.append(object())
        assert in_threads(lambda _: target.take_idle_steps()).count(None) == THREADS - 1
        assert not target.idle_steps
