"""The dry step against what torch allocates in a real one on this CPU, by the profiler's record of the allocator."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.batch import Batch
from drafttrain.drafters.base import StepInputs
from drafttrain.states.source import TargetSource
from drafttrain.target import Target
from drafttrain.training.dry_step import StepSetting, dry_step
from tests.drafters.helpers import new_drafter

ROWS = 2
LENGTH = 384
PROMPT = 16
OPTIONS = {
    "eagle3": {"draft_vocab_size": 2000, "ttt_steps": 3},
    "medusa": {"draft_vocab_size": 2000},
    "dflash": {"draft_vocab_size": 2000, "block_size": 4},
}


SHAPES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 4000, "tie_word_embeddings": False,
}  # fmt: skip


def config(**sizes):
    return LlamaConfig(**{**SHAPES, **sizes})


def allocated(run) -> int:
    """Most bytes that `run` held at a time beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = run()
    del result
    found = record.profiler.kineto_results.events()
    events = sorted((e for e in found if e.name() == "[memory]"), key=lambda e: e.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def real_step(kind: str, checkpointing: bool) -> int:
    torch.manual_seed(0)
    target = Target.wrap(LlamaForCausalLM(config()), None, name="tiny", dtype=torch.float32)
    drafter = new_drafter(kind, **OPTIONS[kind])(target).train()
    drafter.kept_ids.copy_(torch.arange(len(drafter.kept_ids)))
    drafter.bind(target)
    if checkpointing:
        drafter.gradient_checkpointing_enable()
    mask = (torch.arange(LENGTH) >= PROMPT).repeat(ROWS, 1)
    ids = torch.randint(0, 4000, (ROWS, LENGTH))
    batch = Batch(ids, torch.full((ROWS,), LENGTH), mask, torch.arange(ROWS))
    source = TargetSource(target, drafter.feature_layers, drafter.kept_ids)

    def step():
        given = source(batch)
        made = drafter(
            StepInputs(batch, target.embed(batch.input_ids), *given, torch.tensor(ROWS * LENGTH))
        )
        made.loss.backward()
        return made

    return allocated(step)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [
        ("eagle3", False),
        ("eagle3", True),
        ("medusa", False),
        pytest.param("dflash", False, marks=pytest.mark.slow),
    ],
)
def test_a_dry_step_takes_what_a_real_one_takes(kind, checkpointing):
    want = real_step(kind, checkpointing)
    setting = StepSetting(
        rows=ROWS, length=LENGTH, prompt=PROMPT, gpu=False, target_dtype=torch.float32, autocast=None,
        checkpointing=checkpointing,
    )  # fmt: skip
    memory = dry_step(config(), setting, "kl", new_drafter(kind, **OPTIONS[kind]))
    assert memory.working + memory.gradients == pytest.approx(want, rel=0.1)
    model = LlamaForCausalLM(config())
    assert memory.target == pytest.approx(sum(x.nbytes for x in model.parameters()), rel=0.01)
    assert memory.gradients > 1e6 and 4 * memory.trained == memory.gradients and memory.at


@pytest.mark.slow
def test_an_eagle3_head_of_an_8b_target_in_bfloat16():
    """The shapes of Llama-3.1-8B: no weight is allocated, and a second row adds activations alone."""
    big = config(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip
    build = new_drafter("eagle3", draft_vocab_size=32000)
    one, two = (dry_step(big, StepSetting(rows=rows, length=1024), "kl", build) for rows in (1, 2))
    assert one.target == pytest.approx(16.06e9, rel=0.01)
    for part in ("target", "drafter", "gradients", "trained"):
        assert getattr(one, part) == getattr(two, part)
    assert 1.3 * one.working < two.working < 2.1 * one.working
    unnarrowed = StepSetting(length=1024, autocast=None)
    wide = dry_step(big, unnarrowed, "kl", build)
    assert wide.working > 1.1 * one.working
    single, four = (
        dry_step(big, StepSetting(rows=rows, checkpointing=True), "kl", build) for rows in (1, 4)
    )
    for step, most in ((single, 24e9), (four, 30e9)):
        held = step.target + step.drafter + step.gradients + 8 * step.trained
        assert held + step.working < most
