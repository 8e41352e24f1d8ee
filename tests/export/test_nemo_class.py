"""NeMo Automodel's own draft classes on our exports: the same tensors, and the same states of a block.

NEMO_WHEEL names a wheel: pip download --no-deps nemo-automodel==0.7.0
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.drafters.registry import kind_class
from drafttrain.drafters.shipping import ExportRequest, find_drafter, shipping
from tests.conftest import loaded_target
from tests.drafters.block_kinds import MIXED, block_states, shaken
from tests.files import load_json

WHEEL = os.environ.get("NEMO_WHEEL", "")
PACKAGE = "nemo_automodel.components.speculative.dflash"
WHOLE = {"kept": torch.arange(300), "mask_token_id": 290}
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("dflash", "vllm", "Qwen3DFlashDraftModel", {}),
    ("dflash", "vllm", "Qwen3DFlashDraftModel", {"sliding_window": 12}),
    ("dflash", "vllm", "Qwen3DFlashDraftModel", MIXED),
    ("jetspec", "vllm", "Qwen3DFlashDraftModel", {}),
    ("domino", "sglang", "Qwen3DFlashDraftModel", {"gru_hidden_dim": 24, "emb_dim": 16}),
    ("dflash2", "vllm", "Qwen3DFlash2DraftModel", {"markov_rank": 8, "selector_top_k": 16}),
]


@pytest.fixture
def classes(monkeypatch):
    """The wheel's modules, without what its packages import."""
    parts = PACKAGE.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        package = types.ModuleType(name)
        package.__path__ = ["/".join((WHEEL, *parts[:count]))]
        monkeypatch.setitem(sys.modules, name, package)
    return {
        "Qwen3DFlashDraftModel": importlib.import_module(f"{PACKAGE}.draft_qwen3"),
        "Qwen3DFlash2DraftModel": importlib.import_module(f"{PACKAGE}.draft_qwen3_dflash2"),
    }


@pytest.mark.slow
@pytest.mark.skipif(not WHEEL, reason="NEMO_WHEEL is not set")
@pytest.mark.parametrize(("kind", "form", "name", "options"), CASES)
@torch.no_grad()
def test_nemo_computes_what_our_drafter_does(tmp_path, classes, kind, form, name, options):
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    target = loaded_target(tmp_path / "target", layers=8)
    drafter = shaken(kind_class(kind), target, feature_layers=(1, 2, 3), **WHOLE, **options)
    drafter.save_pretrained(tmp_path / "ours")
    trained = find_drafter(str(tmp_path / "ours"))
    request = ExportRequest(tmp_path / "out", torch.float32, target.name)
    shipping(kind).write(trained, form, request)
    described = load_json(tmp_path / "out" / "config.json")
    config = Qwen3Config.from_dict({**described, "architectures": [name]})
    config._attn_implementation = "eager"
    model = getattr(classes[name], name)(config).float().eval()
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)

    features = torch.randn(20, 96, generator=torch.Generator().manual_seed(0))
    size = drafter.config.block_size
    root = 5
    block = torch.tensor([root] + [290] * (size - 1))
    at = torch.arange(20 + size)
    queries = at[20:, None]
    seen = torch.ones(size, len(at), dtype=torch.bool)
    if drafter.config.sliding_window:
        seen &= queries - at < drafter.config.sliding_window
    if drafter.config.causal:
        seen &= at <= queries
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    if options is MIXED:
        mask = None  # each layer makes its own
    theirs = model(
        position_ids=at[None],
        noise_embedding=target.embed(block)[None],
        target_hidden=features[None],
        attention_mask=mask,
    )[0, 1:]
    ours = block_states(drafter, features, root)
    difference = float((theirs - ours).abs().max())
    print(kind, sorted(options), f"{difference:.1e}")
    assert difference < 1e-5
    if kind == "domino":
        path = torch.tensor([[root, 9, 17, 30]])
        gru = model.prefix_gru(target.embed(path))[0]  # [1, depth, g]
        wanted = model.embed_proj(torch.cat((theirs[None], gru), dim=-1))[0, 1:]  # [depth - 1, v]
        live = torch.ones(1, 4, dtype=torch.bool)
        hidden, _ = drafter.readout_of_blocks(ours, path[0], torch.tensor([0]), live)
        bent = hidden[:, drafter.config.hidden_size :]
        torch.testing.assert_close(drafter.correction_out(bent[1:]), wanted, rtol=1e-4, atol=1e-5)
        assert not bent[0].any()
