"""A target whose layers are not all in one place: hooks fetch weights and move states, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from accelerate import dispatch_model

from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.inference import generate
from drafttrain.states.source import TargetSource
from drafttrain.target import Target
from tests.conftest import make_target
from tests.drafters.helpers import make_batch, make_drafter, run_step


def places(target: Target, elsewhere: str) -> dict[str, str]:
    """Embedding, norm and head at hand, every second layer elsewhere."""
    layers = {f"model.layers.{i}": elsewhere if i % 2 else "cpu" for i in range(target.num_layers)}
    return {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.norm": "cpu",
        "lm_head": "cpu",
        **layers,
    }


@pytest.mark.thorough
def test_layers_that_are_fetched_give_the_same_training_step_and_decoding(tmp_path):
    whole = make_target()
    other = make_target()
    model = dispatch_model(
        other.model, places(other, "disk"), main_device="cpu", offload_dir=tmp_path
    )
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    spread = Target.wrap(model, other.tokenizer, name="tiny", dtype=torch.float32)
    batch = make_batch()
    results = []
    for target in (whole, spread):
        drafter = make_drafter(whole)
        drafter.bind(target)
        tokens = generate(
            target, drafter.eval(), [5, 6, 7], max_new_tokens=12, spec=TreeSpec.parse("chain:2")
        ).tokens
        results.append((run_step(drafter.train(), target, batch).loss, tokens))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_device_map_of_one_device_loads(target_dir):
    spread = Target.load(str(target_dir), "float32", device_map="auto")
    whole = Target.load(str(target_dir), "float32")
    ids = torch.arange(10)[None].to(spread.device)
    ours, theirs = (target.forward(ids.to(target.device), (1, 2)) for target in (spread, whole))
    torch.testing.assert_close(ours.features, theirs.features)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_and_decode(target_dir):
    target = Target.load(str(target_dir), "float32", "cuda:0", device_map=_halves())
    drafter = make_drafter(Target.load(str(target_dir), "float32", "cpu")).to("cuda:0")
    drafter.bind(target)
    batch = make_batch().to(torch.device("cuda:0"))
    features, rows, row_of = TargetSource(target, drafter.feature_layers, drafter.kept_ids)(batch)
    assert drafter(
        StepInputs(batch, target.embed(batch.input_ids), features, rows, row_of, 1.0)
    ).loss.isfinite()
    plain = generate(target, None, [5, 6, 7], max_new_tokens=12, spec=TreeSpec.parse("none"))
    assert generate(target, drafter.eval(), [5, 6, 7], max_new_tokens=12).tokens == plain.tokens


def _halves() -> dict[str, int]:
    layers = {f"model.layers.{i}": i // 2 for i in range(4)}
    return {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1, **layers}
