"""SGLang's own classes on exported folders: which tensors their loaders take, per release; nothing is computed.

SGLANG_WHEEL names a wheel: pip download --no-deps sglang==0.5.23
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.drafters.shipping import ExportRequest, find_drafter, shipping
from drafttrain.export.engine_runs import run_side
from drafttrain.formats.engines import ENGINES
from tests import engine_arithmetic
from tests.conftest import loaded_target
from tests.drafters.block_kinds import BLOCK_KINDS, shaken
from tests.drafters.eagle3_options import LATENT
from tests.drafters.layer_kinds import make_kind

WHEEL = os.environ.get("SGLANG_WHEEL", "")
SIDE = Path(engine_arithmetic.__file__).with_name("sglang_class_side.py")
KEPT = torch.arange(0, 300, 2)
WHOLE = torch.arange(300)
BLOCK = {"kept": WHOLE, "feature_layers": (2, 4, 5), "mask_token_id": 290}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("eagle1", {"kept": WHOLE, "num_hidden_layers": 2}), ("eagle1", {"kept": WHOLE, "fc_bias": True, "attention_bias": True}),
    ("eagle3", {"kept": KEPT}), ("eagle3", {"kept": KEPT, "fc_norm": True, "norm_output": True, "num_hidden_layers": 3}),
    ("eagle3", {"kept": KEPT, **LATENT, "fc_norm": True, "norm_output": True}),
    ("eagle3", {"kept": KEPT, "feature_layers": (1, 3, 5, 6)}), ("dflash", BLOCK), ("dspark", {**BLOCK, "markov_rank": 8}),
    ("dspark", {**BLOCK, "markov_rank": 8, "sample_from_anchor": True}),
    ("domino", {**BLOCK, "gru_hidden_dim": 24, "emb_dim": 16}),
    ("domino", {**BLOCK, "gru_hidden_dim": 24, "emb_dim": 16, "sample_from_anchor": True}),
]  # fmt: skip
# What SGLang joins into one tensor.
JOINED = {f"midlayer.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa")}
# What SGLang lends from the target.
LENT = {"embed_tokens.weight", "lm_head.weight", "model.embed_tokens.weight"}


@pytest.mark.slow
@pytest.mark.skipif(not WHEEL, reason="SGLANG_WHEEL is not set")
def test_sglang_takes_every_tensor_of_what_its_release_supports(tmp_path):
    target = loaded_target(tmp_path / "target", layers=8)
    engine = ENGINES["SGLang"].of_release(Path(WHEEL).name.split("-")[1])
    folders = []
    for number, (kind, options) in enumerate(CASES):
        own = dict(options)
        block = kind in BLOCK_KINDS
        drafter = (
            shaken(shipping(kind).drafter_class, target, **own)
            if block
            else make_kind(kind, target, own.pop("kept"), **own)
        )
        drafter.save_pretrained(tmp_path / f"{number}-ours")
        trained = find_drafter(str(tmp_path / f"{number}-ours"))
        if shipping(kind).unsupported(trained, "sglang", engine):
            continue
        shipping(kind).write(
            trained, "sglang", ExportRequest(tmp_path / str(number), torch.float32, target.name)
        )
        folders.append(str(tmp_path / str(number)))
    answer = run_side(sys.executable, SIDE, {"wheel": WHEEL, "heads": folders}, dict(os.environ))
    print(
        engine.release,
        [
            (Path(folder).name, loaded)
            for folder, loaded in zip(folders, answer["heads"], strict=True)
        ],
    )
    for folder, loaded in zip(folders, answer["heads"], strict=True):
        assert not loaded["error"] and set(loaded["missing"]) <= LENT, (
            CASES[int(Path(folder).name)],
            loaded,
        )
        assert set(loaded["unused"]) <= {
            "d2t",
            "t2d",
            *(f"layers.{i}.hidden_norm.weight" for i in range(1, 9)),
            *JOINED,
        }, loaded
