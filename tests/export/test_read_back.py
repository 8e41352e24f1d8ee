"""Every kind's export, as `drafttrain verify` checks it without an engine: tensors, then the drafts of what is read back."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.cli import main
from drafttrain.drafters.registry import kind_class
from drafttrain.drafters.shipping import (
    ExportRequest,
    check_expressible,
    find_drafter,
    shipped_kinds,
    shipping,
)
from drafttrain.errors import UserError
from drafttrain.formats.engines import ENGINES
from drafttrain.formats.weights import write_checkpoint
from drafttrain.target import Target
from tests.conftest import loaded_target, make_target, save_target
from tests.drafters.block_kinds import BLOCK_KINDS, shaken
from tests.drafters.eagle3_options import YARN
from tests.drafters.helpers import make_heads
from tests.drafters.layer_kinds import make_kind
from tests.files import dump_json, load_json

KEPT = torch.arange(40, 240)
# What `drafttrain verify --output` has under "files"; more keys may come, none may go.
KEYS = {
    "eagle3": {"rounds", "depth", "max_log_prob_difference", "same_tokens"},
    "eagle1": {"depth", "max_state_difference"},
    "peagle": {"depth", "max_log_prob_difference"},
    "medusa": {"depth", "max_log_prob_difference", "same_tokens"},
    "mlp_speculator": {"depth", "max_log_prob_difference", "same_tokens"},
    "dflash": {"rounds", "depth", "max_log_prob_difference"},
    "dspark": {"rounds", "depth", "max_log_prob_difference", "same_tokens"},
    "dflash2": {"rounds", "depth", "max_log_prob_difference", "same_tokens"},
    "domino": {"rounds", "depth", "max_log_prob_difference", "same_tokens"},
    "jetspec": {"rounds", "depth", "max_log_prob_difference"},
    "mtp": {"rounds", "depth", "max_log_prob_difference"},
}
DOMINO = {"gru_hidden_dim": 24, "emb_dim": 16}
CASES = [
    ("eagle3", "vllm", {"fc_norm": True, "norm_output": True}),
    ("eagle3", "sglang", {}),
    ("eagle1", "vllm", {"num_hidden_layers": 2}),
    ("eagle1", "sglang", {}),
    ("eagle1", "vllm", {"attention_bias": True, "rope_parameters": YARN}),
    ("peagle", "vllm", {"mask_token_id": 7}),
    ("peagle", "vllm", {"num_hidden_layers": 2, "qk_norm": True, "norm_before_residual": True}),
    ("medusa", "vllm", {"blocks": 2, "shared_head": True}),
    ("medusa", "vllm", {"num_heads": 3}),
    ("mlp_speculator", "vllm", {"tie_weights": True}),
    ("mlp_speculator", "vllm", {"scale_input": False, "inner_dim": 24, "n_predict": 4}),
    ("mlp_speculator", "vllm", {"tie_weights": True, "n_predict": 1}),
    ("mtp", "vllm", {"train_head": False}),
    ("dflash", "vllm", {}),
    ("dflash", "vllm", {"num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 6}),
    (
        "dflash",
        "vllm",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    ("dflash", "sglang", {"mask_token_id": 290, "kept": torch.arange(300)}),
    ("dflash", "vllm", {"train_head": True, "mask_token_id": 290}),
    ("dflash", "speculators", {"mask_token_id": 290, "sliding_window": 12, "causal": True}),
    ("dspark", "speculators", {"markov_rank": 8, "mask_token_id": 290, "sample_from_anchor": True}),
    (
        "dflash2",
        "speculators",
        {"markov_rank": 8, "mask_token_id": 290, "kept": torch.arange(300), "selector_top_k": 9},
    ),
    ("jetspec", "vllm", {}),
    ("jetspec", "vllm", {"mask_token_id": 290, "sliding_window": 12}),
    ("dspark", "vllm", {"markov_rank": 8, "sample_from_anchor": True}),
    ("dspark", "sglang", {"markov_rank": 8, "mask_token_id": 290, "kept": torch.arange(300)}),
    (
        "dflash2",
        "vllm",
        {"markov_rank": 8, "mask_token_id": 290, "kept": torch.arange(300), "selector_top_k": 9},
    ),
    ("dflash2", "sglang", {"markov_rank": 8, "mask_token_id": 290, "kept": torch.arange(300)}),
    ("domino", "sglang", {**DOMINO, "mask_token_id": 290, "kept": torch.arange(300)}),
    (
        "domino",
        "sglang",
        {**DOMINO, "mask_token_id": 290, "kept": torch.arange(300), "sample_from_anchor": True},
    ),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return loaded_target(folder, layers=8)


def exported(target, tmp_path, kind, form, dtype=torch.bfloat16, **options):
    if kind in BLOCK_KINDS:
        drafter = shaken(kind_class(kind), target, feature_layers=(1, 2, 3), **options)
    elif kind in ("medusa", "mlp_speculator"):
        drafter = make_heads(target, kind, KEPT, **options)
    else:
        drafter = make_kind(kind, target, KEPT, shake=True, **options)
    drafter.save_pretrained(tmp_path / "drafter")
    trained = find_drafter(str(tmp_path / "drafter"))
    folder = tmp_path / "exported"
    check_expressible(trained, form).write(
        trained, form, ExportRequest(folder, dtype, str(target.path))
    )
    return trained, folder


def test_every_kind_with_a_format_of_its_own_is_tried():
    # GGUF files: tests/drafters/test_gguf_heads.py.
    kinds = {kind for kind in shipped_kinds() if shipping(kind).formats.keys() - {"gguf"}} - {
        "draft_model"
    }
    assert kinds == KEYS.keys() == {kind for kind, _, _ in CASES}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "form", "options"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else len(value),
)
def test_an_export_drafts_what_the_drafter_does(target, tmp_path, kind, form, options):
    trained, folder = exported(target, tmp_path, kind, form, **options)
    found = shipping(kind).check(trained, folder)
    assert (
        KEYS[kind] <= found.keys()
        and found["same_tokens"]
        and found["max_log_prob_difference"] < 1e-5
    )
    if (kind, form, options) != next(case for case in CASES if case[0] == kind):
        return  # what follows is of the kind, whatever its options are
    weights = load_file(folder / "model.safetensors")
    file = folder / "model.safetensors"
    name = next(name for name, value in weights.items() if value.dtype == torch.bfloat16)
    for changed, message in (
        ({**weights, "extra": torch.zeros(1)}, "has unknown weights: extra"),
        (
            {**weights, name: weights[name] * float("nan")},
            f"{name} holds values that are not finite",
        ),
        (
            {**weights, name: weights[name].float()},
            f"{name} has dtype torch.float32, must be torch.bfloat16",
        ),
        ({**weights, name: torch.cat((weights[name], weights[name]))}, "has shape"),
        ({**weights, name: torch.randn_like(weights[name])}, "computes something else"),
        (
            {key: value for key, value in weights.items() if key != name},
            f"lacks weights: .*{name.split('.')[-2]}",
        ),
    ):
        save_file(changed, file)
        with pytest.raises(UserError, match=message):
            shipping(kind).check(trained, folder)
    save_file(weights, file)
    config = load_json(folder / "config.json")
    dump_json(folder / "config.json", {**config, "torch_dtype": "bfloat17", "dtype": "bfloat17"})
    with pytest.raises(UserError, match="names dtype='bfloat17'"):
        shipping(kind).check(trained, folder)


def test_copies_of_a_shared_module_are_one(target, tmp_path):
    trained, folder = exported(target, tmp_path, "mlp_speculator", "vllm", tie_weights=True)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {**weights, "emb.1.weight": weights["emb.1.weight"] + 1}, folder / "model.safetensors"
    )
    with pytest.raises(
        UserError,
        match=r"computes something else: emb.1.weight differs from the copy that shares it",
    ):
        shipping("mlp_speculator").check(trained, folder)


def test_what_the_drafter_lacks_must_be_silent(target, tmp_path):
    trained, folder = exported(target, tmp_path, "eagle1", "sglang")
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "fc.bias": weights["fc.bias"] + 1}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"computes something else: fc.bias is not zero"):
        shipping("eagle1").check(trained, folder)


def test_a_frozen_head_is_the_targets(target, tmp_path):
    trained, folder = exported(target, tmp_path, "dflash", "vllm")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {**weights, "lm_head.weight": weights["lm_head.weight"].roll(1, 0)},
        folder / "model.safetensors",
    )
    with pytest.raises(
        UserError, match=r"computes something else: lm_head.weight is not the target's"
    ):
        shipping("dflash").check(trained, folder)
    save_file(weights, folder / "model.safetensors")
    torch.save({"mask": torch.ones(32)}, folder / "mask_embedding.pt")
    with pytest.raises(UserError, match="has no embedding; export again"):
        shipping("dflash").read(folder, target.identity(), allow_pickle=True)
    (folder / "mask_embedding.pt").unlink()
    with pytest.raises(UserError, match="lacks weights: mask"):
        shipping("dflash").check(trained, folder)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "medusa", "mlp_speculator", "dflash"])
def test_an_export_of_another_drafter_is_an_error_of_the_user(target, tmp_path, kind):
    """One of another width and vocabulary, and one of another kind."""
    trained, _ = exported(target, tmp_path / "own", kind, "vllm")
    other = make_target(layers=8, hidden=48, vocab_size=310)
    folder = tmp_path / "target"
    save_target(other, folder)
    _, wrong = exported(
        Target.load(str(folder), "float32", "cpu"), tmp_path / "other", kind, "vllm"
    )
    with pytest.raises(
        UserError, match=r"does not fit|computes something else|is for a target with"
    ):
        shipping(kind).check(trained, wrong)
    foreign = "medusa" if kind != "medusa" else "eagle1"
    _, wrong = exported(target, tmp_path / "foreign", foreign, "vllm")
    with pytest.raises(UserError, match=r"config.json has no|has unknown weights|lacks weights"):
        shipping(kind).check(trained, wrong)


@pytest.mark.thorough
def test_import_checks_and_keeps_an_exported_head(target, tmp_path, capsys):
    trained, folder = exported(target, tmp_path, "eagle3", "vllm", torch.float32, norm_output=True)
    command = [
        "import",
        "--checkpoint",
        str(folder),
        "--target",
        str(target.path),
        "--output",
        str(tmp_path / "ours"),
    ]
    assert main(command) == 0
    assert "an EAGLE-3 head (arXiv 2503.01840), one decoder layer" in capsys.readouterr().out
    back = find_drafter(str(tmp_path / "ours")).load()
    own = trained.load()
    assert back.config.norm_output and all(
        torch.equal(back.state_dict()[k], v) for k, v in own.state_dict().items()
    )
    weights = load_file(folder / "model.safetensors")
    save_file(
        {**weights, "norm.weight": weights["norm.weight"] * float("nan")},
        folder / "model.safetensors",
    )
    assert main([*command[:-1], str(tmp_path / "none")]) == 2
    assert "norm.weight holds values that are not finite" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_an_output_that_cannot_be_written_is_named(target, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"output='.*file/below' cannot be written \(Not a directory\)"
    ):
        write_checkpoint(tmp_path / "file" / "below", {}, {}, torch.float32)


def test_verify_writes_the_figures(target, tmp_path, capsys):
    exported(target, tmp_path, "eagle3", "vllm")
    report = tmp_path / "verify.json"
    command = [
        "verify",
        "--drafter",
        str(tmp_path / "drafter"),
        "--engine",
        "none",
        "--output",
        str(report),
    ]
    assert main(command) == 0
    assert (
        "as an engine loads them, they compute what the drafter does (rounds 2, depth 4"
        in capsys.readouterr().out
    )
    found = load_json(report)
    assert KEYS["eagle3"] == found["files"].keys() and "versions" in found and "command" in found


@pytest.mark.parametrize(
    ("kind", "form", "known"),
    [
        ("dflash", "vllm", True),
        ("dflash", "sglang", True),
        ("dspark", "vllm", True),
        ("dflash2", "vllm", False),
    ],
)
def test_causal_blocks_are_written_where_the_engines_class_reads_them(
    target, tmp_path, kind, form, known
):
    """Elsewhere the engine would show a block's later tokens."""
    options = {"kept": torch.arange(300), "mask_token_id": 290, "causal": True}
    drafter = shaken(kind_class(kind), target, feature_layers=(1, 2, 3), **options)
    drafter.save_pretrained(tmp_path)
    found = shipping(kind).unsupported(find_drafter(str(tmp_path)), form)
    assert any("causal=true" in reason for reason in found) != known
    assert shipping(kind).unsupported(find_drafter(str(tmp_path)), form, ENGINES["MLX"])
