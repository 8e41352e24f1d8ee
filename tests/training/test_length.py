"""A drafter with a window, trained on short rows, accepts as much far beyond them."""

from __future__ import annotations

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from drafttrain.batch import Batch, anchors_by_depth
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.inference import generate_batch
from drafttrain.states.source import TargetSource
from drafttrain.target import Target
from tests.conftest import make_tokenizer
from tests.drafters.layer_kinds import make_kind

SYMBOLS = 16
TRAINED = 256
FAR = 2048


def text(rows: int, length: int, seed: int) -> torch.Tensor:
    """A language of order two: the next symbol follows from the last two, in one case of eight from chance."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(SYMBOLS, (SYMBOLS, SYMBOLS), generator=torch.Generator().manual_seed(0))
    found = torch.randint(SYMBOLS, (rows, length), generator=generator)
    chance = torch.rand(rows, length, generator=generator) < 0.125
    for i in range(2, length):
        found[:, i] = torch.where(
            chance[:, i], found[:, i], table[found[:, i - 2], found[:, i - 1]]
        )
    return found


def make_target() -> Target:
    """A model of that language. Its own window makes it the same function of the last tokens at every length."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    model = MistralForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        ids = text(16, 64, 100 + step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return Target.wrap(model.eval(), make_tokenizer(), "language")


def train(target: Target, kind: str, steps: int = 80, **options):
    drafter = make_kind(kind, target, **options).train()
    source = TargetSource(target, drafter.feature_layers, drafter.kept_ids)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=2e-3)
    for step in range(steps):
        ids = text(2, TRAINED, 1000 + step)
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[:, :8] = False
        batch = Batch(ids, torch.full((2,), TRAINED), mask, torch.full((2,), -1))
        count = len(anchors_by_depth(mask, 1)[0])
        features, rows, row_of = source(batch)
        drafter(StepInputs(batch, target.embed(ids), features, rows, row_of, count)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


def accepted(target: Target, drafter, length: int, prompts: int = 16, tokens: int = 48) -> float:
    """Tokens per target pass of a chain of three, in answers that end at `length` tokens."""
    rows = text(prompts, length - tokens, 7).tolist()
    made = generate_batch(
        target,
        drafter,
        rows,
        max_new_tokens=tokens,
        spec=TreeSpec.parse("chain:3"),
        eos_ids=(),
        max_rows=8,
    )
    return sum(len(one.tokens) for one in made) / sum(one.stats.target_passes for one in made)


@pytest.fixture(scope="module")
def language() -> Target:
    return make_target()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle3", {"ttt_steps": 3, "sliding_window": 32}),
        ("mtp", {"ttt_steps": 3, "sliding_window": 32}),
        ("dflash", {"block_size": 4, "sliding_window": 32}),
    ],
)
def test_a_window_holds_beyond_the_trained_length(language, kind, options):
    drafter = train(language, kind, **options)
    near, far = (accepted(language, drafter, length) for length in (TRAINED, FAR))
    assert near > 1.5
    assert far == pytest.approx(near, rel=0.05)
