"""Decoding with static steps and captured graphs, and what it must equal."""

from __future__ import annotations

import copy

import torch

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.target import Target
from tests.inference.fakes import ANY, FakeBatch, family

PROMPTS = [
    [5, 9, 11, 9, 11, 30, 2, 9, 11, 4, 44, 9],
    [7],
    [3, 3, 3, 8, 3, 3],
    list(range(20)),
    [59, 1, 59, 1],
]


def decode(
    target,
    drafter,
    prompts,
    graphs,
    spec="chain:3",
    max_rows=3,
    count=12,
    seed=0,
    sampling=None,
    eos_ids=(),
):
    tree = TreeSpec.parse(spec) if isinstance(spec, str) else spec
    decoder = Decoder(
        target,
        drafter,
        spec=tree,
        sampling=sampling,
        eos_ids=eos_ids,
        max_rows=max_rows,
        graphs=graphs,
    )
    made = decoder.generate(prompts, max_new_tokens=count, seed=seed)
    return [(generation.tokens, generation.stats.accepted) for generation in made]


def on_gpu(name):
    return Target.wrap(copy.deepcopy(family(name)[0].model).cuda(), None, name=name)


def check_captured_graphs(name, temperature):
    """Captured graphs decode as dynamic passes do."""
    target = on_gpu(name)
    options = {"sampling": SamplingParams(temperature), "count": 24}
    truths = dict(
        zip(
            map(tuple, PROMPTS),
            (t for t, _ in decode(target, None, PROMPTS, False, **options)),
            strict=True,
        )
    )
    for max_rows, nodes in ((1, 7), (3, 12), (1, 30)):
        form = {"agree": 0.7, "nodes": nodes, "feature_layers": (1, target.num_layers)}
        want = FakeBatch(truths, **form)
        got = FakeBatch(truths, **form)
        dynamic = decode(target, want, PROMPTS, False, ANY, max_rows, **options)
        assert decode(target, got, PROMPTS, True, ANY, max_rows, **options) == dynamic
        for ours, theirs in zip(got.sessions, want.sessions, strict=True):
            torch.testing.assert_close(
                torch.cat(ours.features), torch.cat(theirs.features), atol=1e-3, rtol=1e-3
            )
    (steps,) = target.idle_steps
    if name in (
        "llama",
        "gemma2",
        "gpt2",
    ):  # others may wait for the device, experts in float32 for one
        assert not steps.failure
    made = steps._passes.made
    assert steps.failure or all(replay != step.forward for step, replay in made.values())
    assert bool(steps.failure) == (not made)


def check_waiting_forwards(capsys):
    """A forward that waits for the device is not captured."""
    target = on_gpu("gpt2")  # whose own modules run
    want = decode(target, None, PROMPTS, False)
    target.model.transformer.h[1].mlp.register_forward_hook(
        lambda _m, _a, out: out if out.sum().item() else -out
    )
    assert decode(target, None, PROMPTS, True) == want
    assert "decodes without CUDA graphs" in capsys.readouterr().err
    assert torch.cuda.get_sync_debug_mode() == 0
