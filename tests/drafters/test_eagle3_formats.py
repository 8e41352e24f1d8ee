"""EAGLE-3 heads in the engines' forms: there and back, what is refused, and the drafts of what is read back."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.drafters.eagle3.export import SHIPPING, unsupported_features
from drafttrain.drafters.eagle3.model import Eagle3
from drafttrain.errors import UserError
from drafttrain.formats.engines import ENGINES
from tests.conftest import make_target
from tests.drafters.eagle3_files import FLAGS, FLAT, SPECULATORS, make_head, prove, write_eagle3
from tests.files import dump_json, load_json

# the format of each form
VLLM = ENGINES["vLLM"]
SGLANG = ENGINES["SGLang"]


@pytest.fixture(scope="module")
def target():
    return make_target(layers=8)


@pytest.mark.parametrize("form", [SPECULATORS, FLAT])
def test_a_changed_key_is_noticed(target, tmp_path, form):
    head = make_head(target)
    write_eagle3(head, tmp_path, form, dtype=torch.float32)
    described = load_json(tmp_path / "config.json")
    layer = described["transformer_layer_config"] if form == SPECULATORS else described
    layer["rms_norm_eps"] = 0.1
    dump_json(tmp_path / "config.json", described)
    with pytest.raises(UserError, match="computes something else"):
        prove(head, tmp_path / "ours", tmp_path)


def test_keys_are_the_engines(target, tmp_path):
    """What their loaders look for, written down once more; tests/test_fixtures.py holds names and tensors."""
    head = make_head(target, feature_layers=(1, 3, 6))
    write_eagle3(head, tmp_path / "s", SPECULATORS, speculative_tokens=5, target_name="user/target")
    write_eagle3(head, tmp_path / "f", FLAT)
    config = load_json(tmp_path / "s" / "config.json")
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert (
        "rope_scaling" not in config["transformer_layer_config"]
    )  # null there erases rope_parameters in vLLM
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["speculators_config"]["verifier"]["name_or_path"] == "user/target"
    for flag in (
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "tie_word_embeddings",
    ):
        assert config[flag] is False
    flat = load_json(tmp_path / "f" / "config.json")
    assert flat["architectures"] == ["LlamaForCausalLMEagle3"]
    assert flat["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]  # vLLM takes them as they are
    assert flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]  # SGLang adds one


def test_stored_rotary_frequencies_must_be_the_configs(target, tmp_path):
    """Some trainers store them; dropping others than those of the config would change what the head computes."""
    head = make_head(target, rope_theta=5000.0)
    _, file = write_eagle3(head, tmp_path, FLAT)
    weights = load_file(file)
    stored = head.rotary.frequencies
    assert stored.shape == (head.config.head_dim // 2,) and stored[0] == 1.0
    save_file({**weights, "midlayer.self_attn.rotary_emb.inv_freq": stored.bfloat16()}, file)
    assert SHIPPING.read(tmp_path, target.identity()).config.rope_theta == 5000.0
    save_file({**weights, "midlayer.self_attn.rotary_emb.inv_freq": stored * 0.5}, file)
    with pytest.raises(UserError, match=r"inv_freq is not what config.json's rope_parameters give"):
        SHIPPING.read(tmp_path, target.identity())


def test_what_a_form_cannot_say_is_refused_with_every_reason(target, tmp_path):
    head = make_head(target, feature_layers=(6, 3), draft_vocab_size=0)
    with pytest.raises(UserError, match=r"in ascending order, each once"):
        write_eagle3(head, tmp_path / "x", FLAT)
    assert not (tmp_path / "x").exists()
    two = make_head(target, feature_layers=(3, 6))
    assert unsupported_features(two, VLLM) == unsupported_features(two, SGLANG) == []
    assert unsupported_features(two, SGLANG.of_release("0.5.11"))[0].endswith(
        "fc takes three; supported since SGLang 0.5.12"
    )
    write_eagle3(two, tmp_path / "two", FLAT, dtype=torch.float32)
    described = load_json(tmp_path / "two" / "config.json")
    assert (
        described["architectures"] == ["LlamaForCausalLMEagle3"]
        and described["num_aux_hidden_states"] == 2
    )
    assert prove(two, tmp_path / "ours", tmp_path / "two")["same_tokens"]
    other = make_head(make_target(layers=8), hidden_size=64)
    assert "needs both of one width" in unsupported_features(other, VLLM)[0]


def test_imports_of_others_checkpoints(target, tmp_path):
    """Published variants: prefixes, copies of the target's weights, other spellings of rope, SGLang's layer numbers."""
    head = make_head(target, feature_layers=(2, 4, 6))
    write_eagle3(head, tmp_path, FLAT, dtype=torch.float32)
    file = tmp_path / "model.safetensors"
    config = tmp_path / "config.json"
    weights = load_file(file)
    described = load_json(config)
    for key in (
        "rope_parameters",
        "num_aux_hidden_states",
        "target_hidden_size",
        "eagle_aux_hidden_state_layer_ids",
    ):
        described.pop(key)
    described |= {"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    dump_json(config, described)
    save_file({f"model.{k}" if "midlayer" in k else k: v for k, v in weights.items()}
              | {"embed_tokens.weight": target.embed_weight.half()}, file)  # fmt: skip
    target.model.save_pretrained(tmp_path / "target")
    back = SHIPPING.read(tmp_path, {**target.identity(), "name": str(tmp_path / "target")})
    assert back.config.feature_layers == (2, 4, 6)
    rope = back.config.rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("linear", 77.0, 2.0)
    assert torch.equal(back.kept_ids, head.kept_ids)
    refused = {
        "vocabulary": ({"vocab_size": 301}, "vocab_size=301, but 'tiny' has 300"),
        "architecture": ({"architectures": ["Qwen2ForCausalLM"]}, "import reads EAGLE-3 heads"),
        "layers": ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, r"fc takes 3 target states"),
        "missing": ({"intermediate_size": None}, "no intermediate_size"),
    }
    for change, message in refused.values():
        dump_json(config, {**described, **change})
        with pytest.raises(UserError, match=message):
            SHIPPING.read(tmp_path, target.identity())


def test_variants_of_published_configs(target, tmp_path):
    """Nested layer keys with other spellings, integer tables, shards; and what would compute something else."""
    head = make_head(target, feature_layers=(2, 4, 6))
    write_eagle3(head, tmp_path, SPECULATORS, dtype=torch.float16)
    file = tmp_path / "model.safetensors"
    config = tmp_path / "config.json"
    weights = load_file(file)
    described = load_json(config)
    layer = described["transformer_layer_config"]
    for key in ("rope_parameters", "num_aux_hidden_states", "attention_bias", "mlp_bias"):
        layer.pop(key)
    for key in ("norm_before_residual", "fc_norm", "norm_output", "embed_requires_grad"):
        described.pop(key)
    layer |= {
        "rope_theta": 77.0,
        "rope_scaling": None,
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    }
    dump_json(config, described)
    weights |= {
        "d2t": weights["d2t"].int(),
        "t2d": weights["t2d"].long(),
        "verifier_norm.weight": torch.ones(32),
    }
    names = sorted(weights)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: weights[name] for name in held}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    dump_json(tmp_path / "model.safetensors.index.json", index)
    file.unlink()
    back = SHIPPING.read(tmp_path, target.identity())
    assert back.config.norm_before_residual is True  # what vLLM takes where this form does not say
    assert (back.config.rope_parameters["rope_theta"], back.config.feature_layers) == (
        77.0,
        (2, 4, 6),
    )
    assert back.fc.weight.dtype == torch.float16
    for name, value in head.state_dict().items():
        assert torch.equal(
            back.state_dict()[name], value.half() if value.is_floating_point() else value
        ), name
    for change, message in (
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"norm_before_fc": True}, "lacks weights: input_norm.weight"),
        ({"eagle_config": {"norm_before_fc": True}}, "lacks weights: input_norm.weight"),
    ):
        dump_json(config, {**described, "transformer_layer_config": {**layer, **change}, **change})
        with pytest.raises(UserError, match=message):
            SHIPPING.read(tmp_path, target.identity())
    (tmp_path / "model-2.safetensors").unlink()
    dump_json(config, described)
    with pytest.raises(UserError, match="cannot be read"):
        SHIPPING.read(tmp_path, target.identity())


def test_pickles_are_read_only_on_demand_and_only_tensors(target, tmp_path):
    head = make_head(target)
    write_eagle3(head, tmp_path, FLAT, dtype=torch.float32)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickle, which can run code when loaded.*--allow-pickle"):
        SHIPPING.read(tmp_path, target.identity())
    assert torch.equal(
        SHIPPING.read(tmp_path, target.identity(), allow_pickle=True).fc.weight, head.fc.weight
    )

    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").write_text, ("yes",))

    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="more than tensors"):
        SHIPPING.read(tmp_path, target.identity(), allow_pickle=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("form", [SPECULATORS, FLAT])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags))
def test_every_flag_is_written_read_and_computed(target, tmp_path, form, flags):
    """And losing it is noticed: the head computes something else without it."""
    head = make_head(target, **flags)
    write_eagle3(head, tmp_path / "a", form, dtype=torch.float32)
    back = SHIPPING.read(tmp_path / "a", target.identity())
    for name, value in flags.items():
        found = getattr(back.config, name)
        assert {**found, **value} == found if isinstance(value, dict) else found == value, name
    assert all(
        torch.equal(back.state_dict()[name], value) for name, value in head.state_dict().items()
    )
    assert prove(head, tmp_path / "ours", tmp_path / "a")["same_tokens"]
    assert unsupported_features(head, VLLM) == []
    latent = "kv_lora_rank" in flags
    yarn = flags.get("rope_parameters", {}).get("rope_type") == "yarn"
    plain = yarn and not latent
    newer = flags.keys() <= {"fc_norm", "norm_output", "sliding_window", "num_hidden_layers"}
    everywhere = yarn or newer  # of the cases with latent attention, one
    assert (unsupported_features(head, SGLANG) == []) == everywhere
    assert (unsupported_features(head, SGLANG.of_release("0.5.11")) == []) == plain
    tensorrt = flags.keys() <= {"fc_norm", "norm_output", "attention_bias", "mlp_bias"}
    assert (unsupported_features(head, ENGINES["TensorRT-LLM, Triton"]) == []) == (
        plain or tensorrt
    )
    if form == FLAT and not everywhere:
        described = load_json(tmp_path / "a" / "config.json")
        family = "Qwen3" if "qk_norm" in flags else "Llama"
        if latent:
            family = "DeepseekV3"
        assert described["architectures"] == [f"Eagle3{family}ForCausalLM"]
    unweighted = set(flags) & {
        "norm_before_residual",
        "norm_output",
        "sliding_window",
        "rope_parameters",
    }
    unset = {"rope_parameters": None, "sliding_window": 0}
    for name in unweighted:
        setattr(head.config, name, unset.get(name, False))
    if unweighted:
        write_eagle3(head, tmp_path / "b", form, dtype=torch.float32)
        with pytest.raises(UserError, match="computes something else"):
            prove(back, tmp_path / "ours", tmp_path / "b")


@pytest.mark.thorough
@pytest.mark.parametrize("form", [SPECULATORS, FLAT])
@pytest.mark.parametrize(
    "options",
    [{}, {"draft_vocab_size": 0}, {"feature_layers": (1, 6)}, *FLAGS],
    ids=lambda options: "+".join(options),
)
def test_export_import_and_export_again_gives_the_same_bytes(target, tmp_path, form, options):
    write_eagle3(make_head(target, **options), tmp_path / "a", form)
    SHIPPING.read(tmp_path / "a", target.identity()).save_pretrained(tmp_path / "ours")
    write_eagle3(Eagle3.load(tmp_path / "ours"), tmp_path / "b", form)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_flags_that_vllm_has_no_class_for(target, tmp_path):
    for flags, message in (
        ({"qk_norm": True, "mlp_bias": True}, "has an MLP without bias"),
        ({"qk_norm": True, "attention_bias": True}, "has no o_proj bias"),
        ({"hidden_act": "gelu"}, "raises on anything but silu"),
    ):
        with pytest.raises(UserError, match=message):
            write_eagle3(make_head(target, **flags), tmp_path / "x", FLAT)
