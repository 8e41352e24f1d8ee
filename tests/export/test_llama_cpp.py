"""llama.cpp itself on exported files: targets of every family that is written, tiny drafters, and rules for cutting text.

LLAMA_PYTHON names the interpreter of an environment with xllamacpp (scripts/verify_llama_cpu.sh makes one).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from drafttrain.batch import Batch
from drafttrain.drafters.registry import load_drafter
from drafttrain.drafters.shipping import GGUF_NAME, ExportRequest, check_expressible, find_drafter
from drafttrain.export import engine_runs
from drafttrain.formats.write_gguf import write_gguf
from drafttrain.inference import generate
from drafttrain.target import Target
from tests.drafters.layer_kinds import make_kind
from tests.drafters.test_eagle3 import run_step
from tests.formats.test_write_gguf import ROPE, make_checkpoint

PYTHON = os.environ.get("LLAMA_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="LLAMA_PYTHON is not set")]
KEPT = torch.arange(20, 290)
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "eagle3", {}),
    ("llama3", "eagle3", {"norm_before_residual": True, "kept": KEPT}),
    ("qwen3", "eagle3", {"qk_norm": False, "kept": KEPT.flip(0)}),
    ("llama", "eagle3", {"feature_layers": (3, 0, 2), "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 2.0}}),
    ("llama", "dflash", {"mask_token_id": 7}),
    ("llama", "dflash", {"feature_layers": (0, 3, 1, 2), "kept": KEPT, "num_hidden_layers": 3}),
    ("qwen3", "dflash", {"mask_token_id": 7, "train_head": True, "kept": KEPT, "block_size": 4}),
    ("llama", "dspark", {"kept": KEPT, "markov_rank": 8}),
    ("qwen3", "dspark", {"mask_token_id": 7, "markov_rank": 16, "block_size": 5}),
]  # fmt: skip


def learn(drafter, target, prompts, texts, steps=80):
    """Trains a drafter on the target's answers, so that llama.cpp accepts tokens at every depth."""
    rows = [torch.tensor(prompt + text) for prompt, text in zip(prompts, texts, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    places = torch.arange(ids.shape[1])
    begins = torch.tensor([len(prompt) for prompt in prompts])
    mask = (places >= begins[:, None]) & (places < lengths[:, None])
    batch = Batch(ids, lengths, mask, torch.full((len(rows),), -1))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        run_step(drafter.train(), target, batch).loss.backward()
        optimizer.step()
    drafter.eval()


@pytest.mark.parametrize(("family", "kind", "options"), CASES)
def test_every_round_is_ours(tmp_path, family, kind, options):
    make_checkpoint(tmp_path / "hf", family, num_hidden_layers=4, max_position_embeddings=512)
    target = Target.load(str(tmp_path / "hf"), "float32", "cpu")
    made = torch.Generator().manual_seed(5)
    prompts = [torch.randint(20, 250, (size,), generator=made).tolist() for size in (5, 17, 33)]
    texts = [generate(target, None, prompt, max_new_tokens=128).tokens for prompt in prompts]
    drafter = make_kind(kind, target, **{"shake": True, "feature_layers": (1, 2, 3), **options})
    learn(drafter, target, prompts, texts)
    drafter.save_pretrained(tmp_path / "drafter")
    trained = find_drafter(str(tmp_path / "drafter"))
    shipped = check_expressible(trained, "gguf")
    shipped.write(trained, "gguf", ExportRequest(tmp_path / "out", torch.float32))
    assert shipped.check(trained, tmp_path / "out")["same_tokens"]
    file = write_gguf(tmp_path / "hf", tmp_path / "target.gguf", "float32")
    job = engine_runs.EngineJob(target, "float32", prompts, 128, shipped.block_depth(trained) or 3, PYTHON)
    spec_type = str(shipped.options(trained)["llama.cpp"]["spec-type"])
    theirs = engine_runs.llama_cpp(job, file, tmp_path / "out" / GGUF_NAME, spec_type)
    loaded = load_drafter(str(tmp_path / "drafter"), target)
    assert loaded is not None
    mine = engine_runs.ours(job, loaded)
    print(kind, mine["accepted_length"], theirs["accepted_length"], theirs["accepted"], theirs["offered"])
    assert theirs["tokens"] == mine["tokens"] == texts
    assert theirs["accepted_length"] == pytest.approx(mine["accepted_length"], rel=0.02)
    assert mine["accepted_length"] > 1.3
