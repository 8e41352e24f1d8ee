"""Exported heads: outputs from the files alone, how many heads are written, and what is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.cli import main
from drafttrain.drafters.form import whole_rows
from drafttrain.drafters.shipping import (
    ExportRequest,
    check_expressible,
    find_drafter,
    shipping,
)
from drafttrain.errors import UserError
from tests.drafters.helpers import make_heads
from tests.engine_arithmetic.heads import largest_difference
from tests.files import dump_json, load_json

KEPT = torch.arange(40, 240)
FORMS = [
    {"inner_dim": 48},
    {"tie_weights": True, "scale_input": False, "inner_dim": 24, "n_predict": 4},
    {"tie_weights": True, "n_predict": 1},
]


def exported(target, tmp_path, kind, dtype=torch.float32, depth=3, **options):
    make_heads(target, kind, KEPT, **options).save_pretrained(tmp_path / "ours")
    trained = find_drafter(str(tmp_path / "ours"))
    check_expressible(trained, "vllm").write(
        trained, "vllm", ExportRequest(tmp_path / "theirs", dtype, depth=depth)
    )
    return trained, tmp_path / "theirs"


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", FORMS)
def test_the_files_alone_compute_what_the_drafter_does(target, tmp_path, options, dtype):
    trained, folder = exported(target, tmp_path, "mlp_speculator", dtype, **options)
    assert largest_difference(trained.load(), folder) < 1e-3
    assert shipping("mlp_speculator").check(trained, folder)["depth"] == options.get("n_predict", 3)
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {dtype}
    name = next(iter(weights))
    save_file({**weights, name: weights[name] * 1.1 + 0.1}, folder / "model.safetensors")
    assert largest_difference(trained.load(), folder) > 1e-3


def test_tokens_beyond_the_drafters_vocabulary_are_never_the_likeliest():
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(5, 8, generator=generator)
    kept = torch.tensor([1, 3, 4, 8, 9])
    logits = torch.randn(200, 8, generator=generator) @ whole_rows(head, kept, 12).T
    assert set(logits.argmax(-1).tolist()) == set(kept.tolist())


def test_more_tokens_than_heads_are_refused(target, tmp_path):
    with pytest.raises(UserError, match="speculative-tokens=5, but the drafter has 4 heads"):
        exported(target, tmp_path, "medusa", depth=5)


def test_by_default_an_engine_is_told_to_draft_no_more_than_there_are_heads(
    target, tmp_path, capsys
):
    exported(target, tmp_path, "medusa", depth=2, num_heads=2)
    folder = tmp_path / "again"
    words = ["--drafter", str(tmp_path / "ours"), "--format", "vllm", "--output", str(folder)]
    assert main(["export", *words]) == 0
    assert '"num_speculative_tokens": 2' in capsys.readouterr().out
    assert load_json(folder / "config.json")["num_heads"] == 2
    # The chain that was tuned for engines, not the depth of our own tree.
    tuned = {"tree": "fanout:2x1", "chain": "chain:1"}
    dump_json(tmp_path / "ours" / "decoding.json", tuned)
    assert main(["export", *words]) == 0
    assert '"num_speculative_tokens": 1' in capsys.readouterr().out
    assert load_json(folder / "config.json")["num_heads"] == 1


def test_few_published_heads_are_imported(target, target_dir, tmp_path):
    _, folder = exported(target, tmp_path, "medusa", depth=2, num_heads=2)
    words = ["--checkpoint", str(folder), "--target", str(target_dir)]
    assert main(["import", *words, "--output", str(tmp_path / "read")]) == 0
    assert find_drafter(str(tmp_path / "read")).config["num_heads"] == 2


def test_hydra_is_refused_with_the_reason(target, tmp_path):
    with pytest.raises(
        UserError,
        match=r"format='vllm' cannot express this drafter: Hydra heads read the drafted tokens",
    ):
        exported(target, tmp_path, "hydra")
