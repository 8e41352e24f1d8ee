"""vLLM's own EAGLE-3 classes on exported heads: what its loader takes, and what its layers compute, against our drafter.

VLLM_PYTHON names the interpreter of an environment with vLLM (scripts/verify_engines_cpu.sh makes one); no engine runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.dspark.model import DSpark
from drafttrain.drafters.shipping import ExportRequest, find_drafter, shipping
from drafttrain.export.engine_runs import run_side
from tests import engine_arithmetic
from tests.conftest import make_target, save_target
from tests.drafters.block_kinds import shaken
from tests.drafters.eagle3_files import FLAGS, FLAT, SPECULATORS, make_head, write_eagle3

PYTHON = os.environ.get("VLLM_PYTHON", "")
SIDE = Path(engine_arithmetic.__file__).with_name("vllm_class_side.py")
BLOCK_SIDE = SIDE.with_name("vllm_block_side.py")
BLOCKS: list[dict[str, Any]] = [
    {"mask_token_id": 7},
    {"kept": torch.arange(20, 290)},
    {"sample_from_anchor": True, "mask_token_id": 7},
    {
        "kept": torch.arange(300),
        "train_head": True,
        "num_hidden_layers": 3,
        "feature_layers": (2, 5),
    },
]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"draft_vocab_size": 0},
    {"feature_layers": (1, 6)},
    {"feature_layers": (1, 3, 5, 6), "fc_norm": True},
    {"qk_norm": True, "num_hidden_layers": 2, "norm_before_residual": True},
    {"mlp_bias": True, "num_hidden_layers": 2},
    *FLAGS,
]


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is not set")
def test_vllm_loads_and_computes_every_variant(tmp_path):
    target = make_target(layers=8, hidden=128)
    save_target(target, tmp_path / "target")
    made = torch.Generator().manual_seed(0)
    table = torch.randn(300, 128, generator=made)
    cases = []
    for number, options in enumerate(VARIANTS):
        for form in (SPECULATORS, FLAT):
            head = make_head(target, **options)
            folder = tmp_path / f"{number}-{form}"
            write_eagle3(head, folder, form, dtype=torch.float32, target_name="target")
            count = len(head.config.feature_layers)
            inputs = {
                "table": table,
                "tokens": torch.randint(300, (17,), generator=made),
                "features": torch.randn(17, count * 128, generator=made),
            }
            save_file(inputs, f"{folder}.inputs.safetensors")
            cases.append((options, head, folder, inputs))
    job = {"target": str(tmp_path / "target"), "heads": [str(folder) for *_, folder, _ in cases]}
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    answer = run_side(PYTHON, SIDE, job, environment)
    wrong = []
    for (options, head, folder, inputs), loaded in zip(cases, answer["heads"], strict=True):
        family = "Qwen3" if options.get("qk_norm") else "Llama"
        if "kv_lora_rank" in options:
            family = "DeepseekV2"
        assert loaded["class"] == f"Eagle3{family}ForCausalLM"
        if "feature_layers" in options:
            assert loaded["feature_layers"] == list(options["feature_layers"])
        head.embed = lambda ids: table[ids]
        session = head.start(torch.zeros(1, dtype=torch.long), 64)
        with torch.no_grad():
            session.extend(inputs["tokens"], inputs["features"])
            tree = session.propose(TreeSpec.parse("chain:2"))
            ours = head.logits(session.root[:, 0])[0].log_softmax(-1)
        theirs = load_file(f"{folder}.outputs.safetensors")["logits"].log_softmax(-1)
        paths = theirs.max(-1)
        apart = (ours - theirs[0][head.kept_ids]).abs().max().item()
        apart = max(apart, (tree.log_probs - paths.values.cumsum(0)).abs().max().item())
        if tree.tokens.tolist() != paths.indices.tolist() or not apart < 1e-3:
            wrong.append((options, folder.name, apart))
    assert not wrong


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is not set")
def test_vllm_loads_and_computes_dspark_blocks(tmp_path):
    """Tokens, probabilities and confidences of whole blocks; the runner of this method needs a GPU."""
    target = make_target(layers=8, hidden=128)
    made = torch.Generator().manual_seed(0)
    cases = []
    save_target(target, tmp_path / "target")
    target.name = target.path = str(tmp_path / "target")
    for number, options in enumerate(BLOCKS):
        options = {
            "feature_layers": (2, 4, 5),
            "kept": torch.arange(300),
            "markov_rank": 16,
            **options,
        }
        drafter = shaken(DSpark, target, **options)
        folder = tmp_path / str(number)
        drafter.save_pretrained(tmp_path / f"{number}-ours")
        trained = find_drafter(str(tmp_path / f"{number}-ours"))
        request = ExportRequest(folder, torch.float32, target.name)
        shipping("dspark").write(trained, "vllm", request)
        assert shipping("dspark").check(trained, folder)["same_tokens"]
        tokens = torch.randint(300, (18,), generator=made)
        features = torch.randn(17, drafter.fc.in_features, generator=made)
        save_file({"features": features, "root": tokens[-1:]}, f"{folder}.inputs.safetensors")
        session = drafter.start(tokens[:1], 64)
        session.extend(tokens[1:], features)
        cases.append((folder, session.propose(TreeSpec.parse(f"chain:{drafter.config.depth}"))))
    job = {"target": target.name, "heads": [str(folder) for folder, _ in cases]}
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    answer = run_side(PYTHON, BLOCK_SIDE, job, environment)
    assert {loaded["class"] for loaded in answer["heads"]} == {"Qwen3DSparkForCausalLM"}
    for folder, tree in cases:
        theirs = load_file(f"{folder}.outputs.safetensors")
        assert theirs["tokens"].tolist() == tree.tokens.tolist(), folder.name
        path = (theirs["log_probs"].max(-1).values + theirs["confidence"].log()).cumsum(0)
        print(folder.name, (path - tree.log_probs).abs().max().item())
        torch.testing.assert_close(path, tree.log_probs, rtol=0, atol=1e-4)
