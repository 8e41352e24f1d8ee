"""Drafter heads as GGUF files: keys, names, shapes and values as llama.cpp reads them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.cli import main
from drafttrain.drafters.gguf_heads import RELEASE
from drafttrain.drafters.shipping import (
    GGUF_NAME,
    ExportRequest,
    check_expressible,
    find_drafter,
    shipping,
)
from drafttrain.errors import UserError
from drafttrain.formats.read_gguf import read_gguf
from drafttrain.formats.write_gguf import to_neighbors
from drafttrain.target import Target
from tests.drafters.layer_kinds import make_kind
from tests.formats.checkpoints import ROPE, make_checkpoint

KEPT = torch.arange(20, 290)
LLAMA3 = {
    **ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    made = {}
    for family in ("llama", "gemma3"):
        folder = tmp_path_factory.mktemp(family)
        make_checkpoint(folder, family, num_hidden_layers=4)
        made[family] = Target.load(str(folder), "float32", "cpu")
    return made


def trained(target, folder, kind, **options):
    drafter = make_kind(kind, target, **{"shake": True, "feature_layers": (1, 2, 3), **options})
    drafter.save_pretrained(folder)
    return drafter, find_drafter(str(folder))


def written(target, folder, kind, dtype=torch.float32, **options):
    """The drafter, how it is trained and shipped, the file's keys and tensors."""
    drafter, described = trained(target, folder / "ours", kind, **options)
    check_expressible(described, "gguf").write(
        described, "gguf", ExportRequest(folder / "out", dtype)
    )
    return drafter, described, *read_gguf(folder / "out" / GGUF_NAME)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kept": KEPT, "norm_before_residual": True},
        {"kept": KEPT[::2], "feature_layers": (3, 0, 1), "num_key_value_heads": 4, "head_dim": 6},
        {"rope_parameters": LLAMA3},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_eagle3_heads(targets, tmp_path, options):
    target = targets["llama"]
    drafter, described, keys, tensors = written(target, tmp_path, "eagle3", **options)
    config = drafter.config
    own = drafter.state_dict()
    assert keys["general.architecture"] == "eagle3"
    assert (
        keys["eagle3.target_layers"] == keys["eagle3.extract_layers"] == list(config.feature_layers)
    )
    assert keys["eagle3.target_hidden_size"] == 32 and keys["eagle3.vocab_size"] == 300
    assert keys["eagle3.norm_before_residual"] is config.norm_before_residual
    assert (
        keys["eagle3.rope.dimension_count"] == config.head_dim
        and keys["eagle3.rope.freq_base"] == 5000.0
    )
    plain = {
        "fc": "fc", "blk.0.attn_norm": "midlayer.input_layernorm", "blk.0.attn_norm_2": "midlayer.hidden_norm",
        "blk.0.attn_v": "midlayer.self_attn.v_proj", "blk.0.attn_output": "midlayer.self_attn.o_proj",
        "blk.0.ffn_norm": "midlayer.post_attention_layernorm", "blk.0.ffn_gate": "midlayer.mlp.gate_proj",
        "blk.0.ffn_up": "midlayer.mlp.up_proj", "blk.0.ffn_down": "midlayer.mlp.down_proj", "output_norm": "norm",
        "output": "lm_head",
    }  # fmt: skip
    turned = {
        "blk.0.attn_q": "midlayer.self_attn.q_proj",
        "blk.0.attn_k": "midlayer.self_attn.k_proj",
    }
    others = (
        {"d2t"}
        if "kept" in options
        else {"rope_freqs.weight"}
        if "rope_parameters" in options
        else set()
    )
    assert tensors.keys() == {f"{name}.weight" for name in plain | turned} | others
    for theirs, ours in plain.items():
        assert torch.equal(tensors[f"{theirs}.weight"], own[f"{ours}.weight"]), theirs
    half = config.head_dim // 2
    for theirs, ours in turned.items():
        rows = tensors[f"{theirs}.weight"]
        expected = own[f"{ours}.weight"]
        for head in range(len(rows) // config.head_dim):
            base = head * config.head_dim
            for i in range(half):  # llama.cpp rotates (2i, 2i + 1), we (i, i + e/2)
                assert torch.equal(rows[base + 2 * i], expected[base + i])
                assert torch.equal(rows[base + 2 * i + 1], expected[base + half + i])
    if "kept" in options:
        assert tensors["d2t"].dtype == torch.int64 and torch.equal(
            tensors["d2t"], options["kept"]
        )  # absolute ids
    assert shipping("eagle3").check(described, tmp_path / "out")["max_log_prob_difference"] < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dflash", {"mask_token_id": 7}),
        ("dflash", {"kept": KEPT, "num_hidden_layers": 3, "feature_layers": (0, 2)}),
        ("dflash", {"mask_token_id": 7, "kept": KEPT, "train_head": True}),
        ("dspark", {"kept": KEPT, "markov_rank": 8}),
        ("dspark", {"mask_token_id": 7, "markov_rank": 8}),
        ("dflash2", {"kept": KEPT, "markov_rank": 8}),
        ("dflash2", {"mask_token_id": 7, "markov_rank": 8, "conv_kernel_size": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_block_drafters(targets, tmp_path, kind, options):
    target = targets["llama"]
    drafter, described, keys, tensors = written(target, tmp_path, kind, **options)
    own = drafter.state_dict()
    learned = drafter.mask is not None
    kept = drafter.kept_ids
    assert keys["general.architecture"] == "dflash" and keys["dflash.block_size"] == 8
    assert keys["dflash.target_layers"] == list(
        drafter.config.feature_layers
    )  # layers whose input is read, as ours
    assert keys["dflash.sample_from_anchor"] is False and keys["dflash.attention.causal"] is False
    assert (
        keys["tokenizer.ggml.mask_token_id"]
        == (300 if learned else 7)
        == keys["dflash.vocab_size"] - 1
        or not learned
    )
    for theirs, ours in {"fc": "fc", "enc.output_norm": "hidden_norm", "output_norm": "norm",
                         "blk.1.attn_q": "layers.1.self_attn.q_proj", "blk.1.attn_k": "layers.1.self_attn.k_proj",
                         "blk.0.attn_q_norm": "layers.0.self_attn.q_norm"}.items():  # fmt: skip
        assert torch.equal(tensors[f"{theirs}.weight"], own[f"{ours}.weight"]), (
            theirs
        )  # rotated in halves, as ours
    assert ("token_embd.weight" in tensors) == learned
    if learned:
        assert torch.equal(
            tensors["token_embd.weight"], torch.cat((target.embed_weight, drafter.mask[None]))
        )
    assert ("d2t" in tensors) == ("output.weight" in tensors) == ("kept" in options)
    if "kept" in options:
        head = own["lm_head.weight"] if "train_head" in options else target.head_weight[kept]
        assert torch.equal(tensors["d2t"], kept) and torch.equal(tensors["output.weight"], head)
    if kind == "dspark":
        rows = tensors["markov_w1.weight"]  # [tokens of the file, r]
        assert (
            torch.equal(rows[kept], own["markov_in.weight"][:-1])
            and len(rows) == keys["dflash.vocab_size"]
        )
        if learned:
            assert torch.equal(rows[300], own["markov_in.weight"][-1]) and torch.equal(
                rows[300], rows[0]
            )
        assert torch.equal(tensors["markov_w2.weight"], own["markov_out.weight"])
        assert (
            torch.equal(tensors["conf_proj.weight"], own["confidence.weight"])
            and "conf_proj.bias" in tensors
        )
    if kind == "dflash2":
        before, after = (
            tensors[f"selector_{name}.weight"] for name in ("predecessor", "successor")
        )  # [file's tokens, r]
        assert len(before) == len(after) == keys["dflash.vocab_size"]
        assert torch.equal(before[kept], own["markov_in.weight"][:-1]) and torch.equal(
            after[kept], own["markov_out.weight"]
        )
        assert torch.equal(tensors["selector_hidden.weight"], own["gate.weight"])
        assert (
            keys["dflash.selector_rank"] == 8 and keys["dflash.selector_top_k"] == 5
        )  # 5 * 6 <= 32
        assert tensors["blk.1.ffn_conv_base"].shape == (2, keys["dflash.conv_kernel_size"], 32)
        assert torch.equal(
            tensors["blk.0.attn_conv_proj.weight"],
            own["layers.0.attention_conv.kernel_projection.weight"],
        )
    assert shipping(kind).check(described, tmp_path / "out")["max_log_prob_difference"] < 1e-5
    assert shipping(kind).block_depth(described) == 7


@pytest.mark.thorough
def test_half_precision_and_scaled_embeddings(targets, tmp_path):
    """The file of a target that scales its embedding holds scaled rows; its states are not given out by this release."""
    _, described = trained(
        targets["gemma3"], tmp_path / "ours", "eagle3", qk_norm=False, hidden_act="silu"
    )
    kind = shipping("eagle3")
    assert kind.unsupported(described, "gguf") == [
        f"target of family gemma3_text: llama.cpp {RELEASE} gives no states of it and stops"
    ]
    kind.write(described, "gguf", ExportRequest(tmp_path / "out", torch.bfloat16))
    keys, tensors = read_gguf(tmp_path / "out" / GGUF_NAME)
    rows = targets["gemma3"].embed(torch.arange(300))
    assert torch.equal(tensors["token_embd.weight"], rows.bfloat16().float())
    assert not torch.allclose(rows, targets["gemma3"].embed_weight)
    assert (
        tensors["blk.0.attn_norm.weight"].dtype == torch.float32 and keys["general.file_type"] == 32
    )
    assert kind.check(described, tmp_path / "out")["same_tokens"]


@pytest.mark.thorough
def test_what_is_lost_in_a_file_is_noticed(targets, tmp_path, capsys):
    _, described, *_ = written(targets["llama"], tmp_path, "eagle3", kept=KEPT)
    trained(targets["llama"], tmp_path / "second", "eagle3", kept=KEPT, num_key_value_heads=4)
    check = [
        "verify",
        "--drafter",
        str(tmp_path / "second"),
        "--exported",
        str(tmp_path / "out"),
        "--engine",
        "none",
    ]
    assert main(check) == 2
    assert (
        "says eagle3.attention.head_count_kv=2, and the drafter has 4; pass its own export"
        in capsys.readouterr().err
    )
    changed, third = trained(targets["llama"], tmp_path / "third", "eagle3", kept=KEPT)
    changed.fc.weight.data.mul_(-1)
    changed.save_pretrained(tmp_path / "third")
    with pytest.raises(UserError, match="computes something else than the drafter"):
        shipping("eagle3").check(third, tmp_path / "out")
    path = tmp_path / "out" / GGUF_NAME
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"draft.gguf' is not a complete GGUF file .*export again"):
        shipping("eagle3").check(described, tmp_path / "out")
    _, dflash = trained(targets["llama"], tmp_path / "block", "dflash", mask_token_id=7)
    check_expressible(dflash, "gguf").write(
        dflash, "gguf", ExportRequest(tmp_path / "out", torch.float32)
    )
    with pytest.raises(
        UserError, match="is of architecture dflash, and the drafter is written as eagle3"
    ):
        shipping("eagle3").check(described, tmp_path / "out")


IGNORED: list[tuple[str, dict[str, Any], str]] = [
    ("eagle3", {"feature_layers": (1, 2)}, "2 feature layers: llama.cpp b11549 takes three"),
    ("eagle3", {"feature_layers": (0, 1, 2, 3)}, "4 feature layers"),
    ("eagle3", {"feature_layers": (1, 2, 4)}, r"feature_layers=\[4\]: llama.cpp b11549 gives the inputs of layers"),
    ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers=2: llama.cpp b11549 computes one layer"),
    ("eagle3", {"hidden_size": 16, "head_dim": 8}, "hidden_size=16 differs from the target's 32"),
    ("eagle3", {"sliding_window": 16}, "sliding_window=16: the engine's layer attends to everything"),
    ("eagle3", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("eagle3", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("eagle3", {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn': llama.cpp b11549"),
    *(("eagle3", {key: True}, f"{key}: llama.cpp b11549 has no such thing")
      for key in ("attention_bias", "mlp_bias", "qk_norm", "fc_norm", "norm_output")),
    ("dflash", {"rope_parameters": LLAMA3}, "rope_type='llama3': llama.cpp b11549 computes default, linear in dflash"),
    ("dflash", {"feature_layers": (1, 4)}, r"feature_layers=\[4\]"),
    ("dspark", {"feature_layers": (-1,)}, r"feature_layers=\[-1\]"),
    ("dflash2", {"selector_top_k": 6}, r"selector_top_k=6: llama.cpp b11549 needs top_k \* \(top_k \+ 1\) <= hidden_size=32"),
    ("dflash2", {"sample_from_anchor": True}, "sample_from_anchor=true: engines predict at masks only"),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    IGNORED,
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_llama_cpp_would_ignore_is_refused(targets, tmp_path, kind, options, reason):
    _, described = trained(targets["llama"], tmp_path, kind, **options)
    with pytest.raises(UserError, match=reason) as caught:
        check_expressible(described, "gguf")
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_the_tokenizer_is_needed_and_a_block_has_one_length(targets, tmp_path, capsys):
    _, described = trained(targets["llama"], tmp_path / "ours", "dflash", mask_token_id=7)
    args = ["--drafter", str(tmp_path / "ours")]
    assert (
        main(["verify", *args, "--speculative-tokens", "3", "--engine", "none", "--format", "gguf"])
        == 2
    )
    assert (
        "speculative-tokens=3: this drafter drafts blocks of 7 tokens; drop the flag"
        in capsys.readouterr().err
    )
    out = str(tmp_path / "out")
    export = ["export", *args, "--output", out]
    assert main([*export, "--format", "vllm", "--speculative-tokens", "3"]) == 2
    assert "drafts blocks of 7 tokens; drop the flag" in capsys.readouterr().err
    assert (
        main(["export", *args, "--format", "vllm", "--target-gguf", "q8_0", "--output", out]) == 2
    )
    assert "target-gguf='q8_0' goes with --format gguf, not 'vllm'" in capsys.readouterr().err
    assert (
        main(["export", *args, "--format", "gguf", "--target-gguf", "q8_0", "--output", out]) == 0
    )
    printed = capsys.readouterr().out
    assert (
        f"llama-server -m {out}/target.gguf --spec-type draft-dflash" in printed
        and "--spec-draft-n-max 7" in printed
    )
    types = {
        tensor.name: tensor.tensor_type.name
        for tensor in gguf.GGUFReader(tmp_path / "out" / "target.gguf").tensors
    }
    assert types["blk.0.attn_q.weight"] == "Q8_0" and types["output_norm.weight"] == "F32"
    unnamed = replace(described, target={})
    with pytest.raises(
        UserError, match=r"format='gguf' needs the target's tokenizer, .* pass --target"
    ):
        shipping("dflash").write(unnamed, "gguf", ExportRequest(tmp_path / "x"))


@settings(deadline=None)
@given(
    heads=st.integers(1, 6),
    shared=st.integers(1, 3),
    half=st.integers(1, 8),
    columns=st.integers(1, 5),
)
def test_rotary_order_there_and_back(heads, shared, half, columns):
    config: Any = SimpleNamespace(num_attention_heads=heads * shared, num_key_value_heads=heads)
    for name, count in (
        ("blk.0.attn_q.weight", heads * shared),
        ("blk.0.attn_k.weight", heads),
        ("blk.0.attn_v.weight", 1),
    ):
        rows = torch.arange(count * 2 * half * columns).view(-1, columns)
        turned = to_neighbors(name, rows, config)
        assert torch.equal(to_neighbors(name, turned, config, back=True), rows)
        assert turned.shape == rows.shape and (name.split(".")[2] == "attn_v") <= torch.equal(
            turned, rows
        )
