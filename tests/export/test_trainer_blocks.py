"""NeMo Automodel's and ModelOpt's own draft classes on our exports: the same tensors, and the same states of a block.

NEMO_WHEEL and MODELOPT_WHEEL name wheels: pip download --no-deps nemo-automodel==0.7.0 nvidia-modelopt==0.47.0
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.cli import main
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import kind_class, load_drafter
from drafttrain.drafters.shipping import ExportRequest, find_drafter, shipping
from drafttrain.target import Target
from tests.conftest import loaded_target, make_target
from tests.drafters.block_kinds import MIXED, block_states, shaken
from tests.drafters.eagle3_options import LATENT

WHEEL = os.environ.get("NEMO_WHEEL", "")
WHOLE = {"kept": torch.arange(300), "mask_token_id": 290}
DSPARK = {"markov_rank": 8, "sample_from_anchor": True}
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("dflash", "vllm", "Qwen3DFlashDraftModel", {}),
    ("dflash", "vllm", "Qwen3DFlashDraftModel", {"sliding_window": 12}),
    ("dflash", "vllm", "Qwen3DFlashDraftModel", MIXED),
    ("jetspec", "vllm", "Qwen3DFlashDraftModel", {}),
    ("domino", "sglang", "Qwen3DFlashDraftModel", {"gru_hidden_dim": 24, "emb_dim": 16}),
    ("dflash2", "vllm", "Qwen3DFlash2DraftModel", {"markov_rank": 8, "selector_top_k": 16}),
    ("dflash", "vllm", "DFlashModule", {}),
    ("dflash", "vllm", "DFlashModule", {"sliding_window": 12, "attention_sink_bias": True}),
    ("dflash", "vllm", "DFlashModule", {"causal": True, "attention_sink_bias": True}),
    ("dspark", "vllm", "DSparkModule", DSPARK),
    ("dspark", "vllm", "DSparkModule", {**DSPARK, "markov_head_type": "gated"}),
    ("dspark", "vllm", "DSparkModule", {**DSPARK, "markov_head_type": "rnn"}),
    (
        "domino",
        "sglang",
        "DominoModule",
        {"gru_hidden_dim": 24, "emb_dim": 16, "sample_from_anchor": True},
    ),
]


class Trainer(NamedTuple):
    """Where a trainer's classes are, without what its packages import."""

    wheel: str  # as a path of imports
    package: str
    modules: dict[str, str]  # class -> module


NEMO = Trainer(
    WHEEL,
    "nemo_automodel.components.speculative.dflash",
    {"Qwen3DFlashDraftModel": "draft_qwen3", "Qwen3DFlash2DraftModel": "draft_qwen3_dflash2"},
)
MODELOPT = Trainer(
    os.environ.get("MODELOPT_WHEEL", ""),
    "modelopt.torch.speculative.plugins",
    {
        "DFlashModule": "modeling_dflash",
        "DSparkModule": "modeling_dspark",
        "DominoModule": "modeling_domino",
    },
)


def class_of(trainer: Trainer, name: str, monkeypatch) -> Any:
    """A trainer's class; its packages are empty, so that nothing else of the wheel is imported."""
    parts = trainer.package.split(".")
    for count in range(1, len(parts) + 1):
        package = types.ModuleType(".".join(parts[:count]))
        package.__path__ = ["/".join((trainer.wheel, *parts[:count]))]
        monkeypatch.setitem(sys.modules, package.__name__, package)
    return getattr(importlib.import_module(f"{trainer.package}.{trainer.modules[name]}"), name)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form", "name", "options"), CASES)
@torch.no_grad()
def test_a_trainer_computes_what_our_drafter_does(tmp_path, monkeypatch, kind, form, name, options):
    trainer = MODELOPT if name in MODELOPT.modules else NEMO
    if not trainer.wheel:
        pytest.skip(f"no wheel of {trainer.package.partition('.')[0]} is named")
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    built = make_target(layers=8)
    built.model.save_pretrained(tmp_path / "target")
    built.tokenizer.save_pretrained(tmp_path / "target")
    target = Target.load(str(tmp_path / "target"), "float32", "cpu")
    drafter = shaken(kind_class(kind), target, feature_layers=(1, 2, 3), **WHOLE, **options)
    drafter.save_pretrained(tmp_path / "ours")
    trained = find_drafter(str(tmp_path / "ours"))
    request = ExportRequest(tmp_path / "out", torch.float32, target.name)
    shipping(kind).write(trained, form, request)
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    if trainer is MODELOPT:  # its exporter nests what its classes read at the top
        described |= described["dflash_config"]
        described["use_confidence_head"] = described.pop("enable_confidence_head", False)
        described.pop("layer_types", None)  # its windows are in the mask alone
    config = Qwen3Config.from_dict({**described, "architectures": [name]})
    config._attn_implementation = "eager"
    model = class_of(trainer, name, monkeypatch)(config).float().eval()
    weights = load_file(tmp_path / "out" / "model.safetensors")
    if (
        trainer is MODELOPT
    ):  # its exporter's names; and a table that its code makes for older releases
        weights = {
            key.replace("confidence_head.proj", "confidence_proj"): weights[key] for key in weights
        }
        model.rotary_emb = Qwen3RotaryEmbedding(config)
    model.load_state_dict(weights, strict=True)

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
    if trainer is MODELOPT and drafter.config.attention_sink_bias:  # without a compiler
        module = sys.modules[f"{trainer.package}.modeling_dflash"]
        monkeypatch.setattr(module, "_compiled_sink_attention", module._sink_attention_impl)
    theirs = model(
        position_ids=at[None],
        noise_embedding=target.embed(block)[None],
        target_hidden=features[None],
        attention_mask=mask,
    )[0, -drafter.config.depth :]
    ours = block_states(drafter, features, root)
    difference = float((theirs - ours).abs().max())
    print(kind, sorted(options), f"{difference:.1e}")
    assert difference < 1e-5
    if kind == "dspark":  # the correction of the block's tokens as a path, and its confidence
        live = torch.ones(1, size, dtype=torch.bool)
        hidden, _ = drafter.readout_of_blocks(ours, block, torch.tensor([0]), live)
        bent = hidden[:, drafter.config.hidden_size :]
        wanted = model.compute_markov_bias(block[None, None], theirs[None, None])[0, 0]
        torch.testing.assert_close(drafter.markov_out(bent), wanted, rtol=0, atol=1e-5)
    if kind == "domino" and trainer is NEMO:
        path = torch.tensor([[root, 9, 17, 30]])
        gru = model.prefix_gru(target.embed(path))[0]  # [1, depth, g]
        wanted = model.embed_proj(torch.cat((theirs[None], gru), dim=-1))[0, 1:]  # [depth - 1, v]
        live = torch.ones(1, 4, dtype=torch.bool)
        hidden, _ = drafter.readout_of_blocks(ours, path[0], torch.tensor([0]), live)
        bent = hidden[:, drafter.config.hidden_size :]
        torch.testing.assert_close(drafter.correction_out(bent[1:]), wanted, rtol=1e-4, atol=1e-5)
        assert not bent[0].any()


@pytest.mark.slow
@pytest.mark.skipif(not WHEEL, reason="NEMO_WHEEL is not set")
@torch.no_grad()
def test_nemos_head_with_latent_attention_is_imported_and_computes_the_same(tmp_path, monkeypatch):
    """Of two depths, the second of which reads the first one's state beside the keys of both."""
    from transformers import PreTrainedConfig

    target = loaded_target(tmp_path / "target", layers=8)
    layer = {
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
    }  # fmt: skip
    described = {
        **layer, **LATENT, "architectures": ["DeepseekV3Eagle3DraftModel"], "model_type": "deepseek_v3", "vocab_size": 300,
        "draft_vocab_size": 120, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "fc_norm": True,
        "pad_token_id": 0, "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }  # fmt: skip
    trainer = Trainer(
        WHEEL,
        "nemo_automodel.components.speculative.eagle",
        {"DeepseekV3Eagle3DraftModel": "draft_deepseek"},
    )
    torch.manual_seed(0)
    kind = class_of(trainer, "DeepseekV3Eagle3DraftModel", monkeypatch)
    theirs = kind(PreTrainedConfig(**described)).float().eval()
    for weight in theirs.parameters():
        if weight.dim() == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=0.3)
    theirs.model.embed_tokens.weight.copy_(target.embed_weight)
    theirs.set_vocab_mapping(torch.arange(40, 280, 2))
    written = tmp_path / "theirs"
    written.mkdir()
    (written / "config.json").write_text(json.dumps(described))
    save_file(theirs.state_dict(), written / "model.safetensors")
    words = ["import", "--checkpoint", str(written), "--target", str(target.path)]
    assert main([*words, "--output", str(tmp_path / "ours")]) == 0
    ours = load_drafter(str(tmp_path / "ours"), target)

    tokens = torch.randint(280, (18,))
    features = torch.randn(17, 96)
    session = ours.start(tokens[:1], 64)
    session.extend(tokens[1:], features)
    tree = session.propose(TreeSpec.parse("chain:2"))
    state = theirs.project_hidden_states(features[None])
    cache: list[list[torch.Tensor]] = [[], []]
    read = tokens[1:]
    scores = []
    for _ in range(2):
        state = theirs(read[None], state, torch.ones(1, 17), cache_hidden=cache)
        scores.append(theirs.compute_logits(state)[0, -1].log_softmax(-1).max(-1))
        # The next depth reads, at every place, the token behind the one read before.
        drafted = ours.kept_ids[scores[-1].indices]
        read = torch.cat((read[1:], drafted[None]))
    assert tree.tokens.tolist() == [int(ours.kept_ids[score.indices]) for score in scores]
    values = torch.stack([score.values for score in scores]).cumsum(0)
    apart = float((tree.log_probs - values).abs().max())
    print(f"{apart:.1e}")
    assert apart < 1e-5
