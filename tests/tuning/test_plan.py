"""`drafttrain plan`: ZeRO's arithmetic, extrapolation, advice in order of harm, shapes without weights, and real dry steps."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconH1Config,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
)

from drafttrain.cli import main
from drafttrain.errors import UserError
from drafttrain.ops.launch import has_triton
from drafttrain.training.dry_step import StepMemory, StepSetting
from drafttrain.tuning import plan_memory
from drafttrain.tuning.costs import model_sizes
from drafttrain.tuning.plan import Job, plan, print_plan
from drafttrain.tuning.plan_memory import Memory, buckets_of
from drafttrain.tuning.plan_recipe import deepspeed_of, read_config, stored_bits
from tests.files import ROOT, dump_json, load_json
from tests.tuning.settings import SETTING

KERNELS = ("drafttrain.ops.tree_attention_kernels", "drafttrain.ops.divergence_kernels")
SHAPES = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
TRAINED = 10**9


def linear_step(setting):
    """A dry step whose activations are 1 MB a token, a third with checkpointing, above a constant part."""
    width = setting.drafter_dtype.itemsize
    tokens = setting.rows * setting.length
    target = 16e9 if setting.source == "online" else 2e9
    share = 0.3 if setting.checkpointing else 1.0
    activations = round(1e6 * tokens * share) if setting.trains else 0
    sizes = (
        round(target),
        width * TRAINED,
        width * TRAINED,
        10**6 * setting.rows,
        10**8,
        activations,
    )
    return StepMemory(*sizes, "", TRAINED, 1e9 * tokens, 256)


@pytest.fixture
def linear(monkeypatch):
    """Plans in which no dry step runs; its value counts those that were asked for."""
    asked = []

    def noted(config, setting, loss, build):
        asked.append(setting)
        return linear_step(setting)

    monkeypatch.setattr(plan_memory, "dry_step", noted)
    return asked


@pytest.fixture
def memory(linear):
    return Memory(
        LlamaConfig(**SHAPES),
        "kl",
        lambda t: t,
    )


@pytest.fixture
def recipe(tmp_path):
    dump_json(tmp_path / "target.json", SHAPES)
    keys = {
        "kind": "eagle3",
        "target": "nobody/tiny",
        "data": "none",
        "output_dir": str(tmp_path / "out"),
        "drafter": {"draft_vocab_size": 500, "ttt_steps": 2},
        "max_length": 128,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
    }
    path = tmp_path / "eagle3.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    return str(path)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"),
    [(0, 4, 4, 8), (1, 2, 2, 12 / 8), (2, 2, 2 / 8, 12 / 8), (3, 2 + 2 / 8, 2 / 8, 12 / 8)],
)
def test_zero_shards_optimizer_then_gradients_then_weights(
    memory, stage, weights, gradients, optimizer
):
    """Gigabytes per 10^9 trained weights on eight GPUs; under stage 3 a forward gathers all of these."""
    parts = memory.parts(replace(SETTING, processes=8, stage=stage))
    found = [parts[name] / TRAINED for name in ("drafter", "gradients", "optimizer")]
    assert found == pytest.approx([weights, gradients, optimizer])
    # DistributedDataParallel holds every gradient a second time, DeepSpeed a buffer of 500 million.
    assert parts["gradient buckets"] / TRAINED == (4 if stage == 0 else 1)


@pytest.mark.parametrize(("stage", "buckets", "weights"), [(1, 0, 2), (2, 6, 2), (3, 6, 6 + 2 / 8)])
def test_the_largest_module_is_reduced_and_gathered_whole(
    memory, monkeypatch, stage, buckets, weights
):
    """Three thousand million weights of an experts' module: its gradients before they are divided, itself in stage 3."""
    run = memory._run
    monkeypatch.setattr(memory, "_run", lambda *each: replace(run(*each), largest=3 * TRAINED))
    parts = memory.parts(replace(SETTING, processes=8, stage=stage, buckets=0))
    assert parts["gradient buckets"] / TRAINED == buckets and parts[
        "drafter"
    ] / TRAINED == pytest.approx(weights)


def test_a_stage_stands_for_its_shipped_file():
    sizes = {stage: buckets_of(deepspeed_of(stage, {}, 8)[0]) for stage in ("1", "2", "3")}
    assert sizes == {
        "1": 50_000_000,
        "2": 100_000_000,
        "3": 50_000_000,
    }  # overlap_comm has two in stage 2
    assert buckets_of({"zero_optimization": {"stage": 2}}) == 500_000_000


def test_copies_of_gradients_in_the_optimizers_step_count_where_they_exceed_the_activations(memory):
    small = replace(SETTING, rows=1, length=8, stage=2, processes=1, buckets=0)
    parts = memory.parts(small)
    working = sum(parts[name] for name in ("features", "logits", "activations"))
    # Flat and float32 copies of all gradients: 2 + 2 + 4 bytes each.
    assert parts["optimizer"] + parts["gradients"] + working == pytest.approx((12 + 8) * TRAINED)


def test_large_batches_are_extrapolated_and_no_step_runs_twice(memory, linear):
    big = memory.step(replace(SETTING, rows=64))
    assert (
        big.activations == 64 * 1024 * 10**6 and big.features == 64 * 10**6 and big.logits == 10**8
    )
    assert memory.step(replace(SETTING, rows=1, length=32768)).activations == 32768 * 10**6
    before = len(linear)
    memory.parts(replace(SETTING, rows=64, processes=8, shards=2, state_bytes=2))
    assert len(linear) == before and all(each.rows * each.length <= 8192 for each in linear)


def test_a_cpu_holds_no_more_states_than_the_data_has(memory):
    small = replace(SETTING, gpu=False, states="stored", kept=4e9, ahead=1e9, data_tokens=1000)
    parts = memory.parts(small)
    assert (
        parts["states kept"] == parts["states ahead"] == 2 * 256 * 1000 and "reserve" not in parts
    )
    parts = memory.parts(replace(small, data_tokens=1e9, states="online"))
    assert (parts["states kept"], parts["states ahead"]) == (4e9, 0.0)


def test_the_largest_batch_fits_and_one_more_does_not(memory):
    limit = 60e9
    rows = memory.most(SETTING, limit, "rows", 4096)
    assert (
        memory.total(replace(SETTING, rows=rows))
        <= limit
        < memory.total(replace(SETTING, rows=rows + 1))
    )
    length = memory.most(SETTING, limit, "length", 10**6, 256)
    assert (
        memory.total(replace(SETTING, length=length))
        <= limit
        < memory.total(replace(SETTING, length=length + 256))
    )
    assert memory.most(SETTING, 20e9, "rows", 4096) == 0
    assert memory.most(SETTING, limit, "length", 512, 256) == 512


def test_an_evaluation_that_exceeds_the_training_step_sets_the_peak(memory, monkeypatch):
    def trained(setting):
        return linear_step(StepSetting(setting.rows, setting.length, drafter_dtype=torch.float32))

    monkeypatch.setattr(memory, "_run", trained)
    small = replace(SETTING, rows=1, length=64)
    assert "evaluation" not in memory.parts(replace(small, eval_rows=1))
    more = memory.parts(replace(small, eval_rows=128))
    assert more["evaluation"] == pytest.approx(127 * 64e6 + 127e6 - 4 * TRAINED)


def test_advice_takes_the_least_harmful_change_that_fits(linear, recipe):
    words = ["per_device_train_batch_size=32", "max_length=1024"]
    # GB: 32.8 of activations, 9.8 with checkpointing; 16 of target; 16 of drafter, gradients and optimizer; 1 to 3 of reserve.
    assert plan(recipe, words, Job(gpu_memory=80)).advice == []
    assert [
        line.partition(":")[0]
        for line in plan(recipe, words, Job(device="h100", gpu_memory=50)).advice
    ] == ["gradient_checkpointing=true"]
    tight = plan(recipe, words, Job(device="h100", gpu_memory=39))
    assert not tight.fits and tight.largest["rows"] < 32
    assert [line.partition(":")[0] for line in tight.advice] == [
        "gradient_checkpointing=true",
        "per_device_train_batch_size=16 gradient_accumulation_steps=2",
    ]
    assert "states from vLLM" in plan(recipe, words, Job(device="h100", gpu_memory=28)).advice[0]
    assert (
        plan(recipe, words, Job(device="h100", gpu_memory=15))
        .advice[-1]
        .startswith("4 GPUs under ZeRO-2")
    )
    assert (
        "no such change fits 5 GB"
        in plan(recipe, words, Job(device="h100", gpu_memory=5)).advice[0]
    )


@pytest.mark.thorough
@pytest.mark.parametrize("gigabytes", [50, 39, 28, 15])
def test_a_plan_with_its_own_advice_fits(linear, recipe, gigabytes):
    """Each line's size is what `plan` says of the recipe with that line and those before it."""
    words = ["per_device_train_batch_size=32", "max_length=1024"]
    job = Job(device="h100", gpu_memory=gigabytes)
    found = plan(recipe, words, job)
    assert not found.fits and found.advice
    for line in found.advice:
        text, _, size = line.rpartition(": ")
        if text.startswith("states from vLLM"):
            job = replace(job, states="vllm")
            stored = plan(recipe, words, replace(job, states="stored"))
            assert f"{stored.disk_gb['states']:,.0f} GB of disk" in text
        elif "GPUs under" in text:
            job = replace(job, gpus=int(text.split()[0]), deepspeed="2")
        else:
            words = [*words, *text.split()]
        followed = plan(recipe, words, job)
        assert size == f"{followed.memory_gb['total']:.1f} GB"
    assert followed.fits


def test_activation_checkpointing_is_planned_by_either_name(linear, recipe):
    for word in ("activation_checkpointing=true", "gradient_checkpointing=true"):
        assert plan(recipe, [word], Job()).setting["gradient_checkpointing"]


def test_a_run_with_muon_is_planned_and_advised_without_deepspeed(linear, recipe):
    words = ["per_device_train_batch_size=32", "max_length=1024", "optim=muon"]
    found = plan(recipe, words, Job(device="h100", gpu_memory=5, gpus=4))
    assert found.setting["processes"] == 4 and found.setting["zero_stage"] == 0
    assert "no such change fits 5 GB" in found.advice[0]


def test_advice_names_no_disk_that_is_too_small(linear, recipe):
    words = ["per_device_train_batch_size=32", "max_length=1024"]
    job = Job(device="h100", gpu_memory=28, disk=10**9)
    assert "from disk" in plan(recipe, words, job).advice[0]
    assert "from disk" not in plan(recipe, words, replace(job, disk=30)).advice[0]


def test_advice_about_the_disk_is_planned_anew(linear, recipe):
    """Each change that is named makes the run fit; none is named that does not."""
    job = Job(conversations=100_000, tokens=100, states="stored", deepspeed="0")
    whole = plan(recipe, [], job).disk_gb["total"]
    changes = {
        "store states as int8": plan(recipe, [], replace(job, store_dtype="int8")),
        "train with target_url": plan(recipe, [], replace(job, states="vllm")),
        "save_total_limit=1": plan(recipe, ["save_total_limit=1"], job),
    }
    for disk in (whole - 0.1, changes["save_total_limit=1"].disk_gb["total"] + 0.1, 1.0):
        found = plan(recipe, [], replace(job, disk=disk))
        (line,) = found.advice
        for text, changed in changes.items():
            size = changed.disk_gb["total"]
            assert (text in line) == (size <= disk)
            assert (f"{size:,.1f} GB" in line) or size > disk
    assert "take fewer conversations" in line


def test_the_verdict_counts_the_gpus_of_the_engine(linear, recipe, tmp_path, capsys):
    """A target that needs more GPUs than train: vLLM has its own, and answers are written before."""
    large = tmp_path / "large.json"
    dump_json(large, {**SHAPES, "hidden_size": 8192, "intermediate_size": 10**6})
    job = Job(gpus=2, target_config=str(large), states="vllm")
    found = plan(recipe, [], job)
    assert found.parameters["target"] > 70e9
    assert (found.setting["gpus"], found.setting["gpus_in_all"]) == (2, 6)
    print_plan(found)
    shown = " ".join(capsys.readouterr().out.split())  # lines wrap at the console's width
    assert "GB at the peak of 2 GPUs, and 4 more to run vLLM meanwhile: 6 in all" in shown
    assert plan(recipe, [], replace(job, states="stored")).setting["gpus_in_all"] == 4
    assert plan(recipe).setting["gpus_in_all"] == 1


@pytest.mark.parametrize(
    ("gigabytes", "choice"),
    [
        (24, "--device l4 or rtx3090 or rtx4090"),
        (40, "--device a100-40"),
        (141, "--device h200"),
        (5, "the closest --device of h100, h200, a100, a100-40, l4, rtx3090, rtx4090"),
    ],
)
def test_a_memory_that_no_h100_has_asks_for_the_device(linear, recipe, gigabytes, choice):
    with pytest.raises(UserError, match=f"gpu-memory={gigabytes} is not that of .*: {choice}"):
        plan(recipe, [], Job(gpu_memory=gigabytes))
    assert plan(recipe, [], Job(gpu_memory=85)).setting["device"] == "h100"
    assert plan(recipe, [], Job(device="h100", gpu_memory=gigabytes)).memory_gb["total"] > 0


def test_disk_and_hours_follow_the_data(linear, recipe):
    job = Job(conversations=1000, tokens=100, prompt_tokens=20, states="stored", deepspeed="0")
    found = plan(recipe, ["save_total_limit=1", "num_train_epochs=3", "validation=0"], job)
    assert found.disk_gb["states"] == pytest.approx(
        1.01 * 2 * 256 * 100_000 / 1e9
    )  # bfloat16, 256 numbers a token
    assert found.disk_gb["checkpoints"] == pytest.approx(
        2 * 12.0
    )  # the last and the one being written
    assert found.hours["train"] == pytest.approx(300_000 / found.tokens_per_second["train"] / 3600)
    assert set(found.hours) == {"generate", "features", "train", "total"}
    half = plan(
        recipe,
        ["max_steps=10", "validation=0"],
        replace(job, store_dtype="int8", memory_efficiency=1.0),
    )
    assert half.disk_gb["states"] < 0.52 * found.disk_gb["states"]
    assert half.hours["train"] == pytest.approx(
        10 * 2 * 100 / half.tokens_per_second["train"] / 3600
    )
    assert found.tokens_per_second["train"] < half.tokens_per_second["train"]
    small = plan(recipe, [], replace(job, disk=10.0))
    assert not small.fits and "--disk 10 GB is too small" in small.advice[0]


def test_a_draft_models_target_is_loaded_whole_unless_states_stream_to_another_model(
    linear, recipe, tmp_path
):
    words = ["kind=draft_model", "drafter={}"]
    large = tmp_path / "large.json"
    dump_json(large, {**SHAPES, "hidden_size": 4096, "intermediate_size": 10**5})
    job = Job(states="stored", target_config=str(large))
    assert plan(recipe, [], job).memory_gb["target"] == 2.0  # the stand-in's shell
    copied = plan(recipe, words, job)
    assert (
        copied.memory_gb["target"] == pytest.approx(2e-9 * copied.parameters["target"])
        and copied.parameters["target"] > 2e9
    )
    streams = [*words, "init=x/y", "target_url=http://localhost:1"]
    assert (
        plan(recipe, streams, replace(job, states="", init_config=str(large))).memory_gb["target"]
        == 2.0
    )


def test_shapes_come_from_the_file_next_to_the_recipe_unless_the_target_is_another(
    linear, recipe, tmp_path
):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES))
    assert plan(recipe).parameters["target"] == model.num_parameters()
    with pytest.raises(
        UserError, match=r"target='other/one': no config.json .*--target-config FILE"
    ):
        plan(recipe, ["target=other/one"])
    given = tmp_path / "own.json"
    dump_json(given, {**SHAPES, "num_hidden_layers": 5})
    found = plan(recipe, ["target=other/one"], Job(target_config=str(given)))
    assert found.parameters["target"] > plan(recipe).parameters["target"]


def test_a_config_of_a_repositorys_own_name_is_read_as_its_class(tmp_path):
    path = tmp_path / "config.json"
    dump_json(
        path, {**SHAPES, "model_type": "own", "architectures": ["LlamaForCausalLM"], "auto_map": {}}
    )
    assert isinstance(read_config("x/y", str(path), "target", "give it"), LlamaConfig)
    dump_json(path, {**SHAPES, "model_type": "own", "architectures": ["OwnForCausalLM"]})
    with pytest.raises(
        UserError, match="target='x/y': this transformers has no class for model_type='own'"
    ):
        read_config("x/y", str(path), "target", "give it")


def test_sizes_tell_experts_and_compressed_keys_by_the_models_own_weights():
    shapes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    config = MixtralConfig(
        **shapes,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    with torch.device("meta"):
        sizes = model_sizes(model := AutoModelForCausalLM.from_config(config), config)
    assert sizes.expert == 2 * 3 * 32 * 48 and (sizes.experts, sizes.chosen) == (8, 2)
    assert sizes.total == model.num_parameters() - 100 * 32  # the embedding is a lookup
    assert sizes.kv == 2 * 2 * 2 * 8
    latent = DeepseekV3Config(
        **shapes, kv_lora_rank=16, qk_rope_head_dim=4, n_routed_experts=8, first_k_dense_replace=1
    )
    with torch.device("meta"):
        assert model_sizes(AutoModelForCausalLM.from_config(latent), latent).kv == 2 * (16 + 4)
    hybrid = FalconH1Config(**shapes, num_key_value_heads=2)
    with torch.device("meta"):
        assert model_sizes(AutoModelForCausalLM.from_config(hybrid), hybrid).kv == 2 * 2 * 2 * 8
        stateful = MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=100)
        assert model_sizes(AutoModelForCausalLM.from_config(stateful), stateful).kv == 0
    latent.quantization_config = {"quant_method": "fp8"}
    assert (stored_bits(latent), stored_bits(config)) == (8.0, 16.0)


def test_the_deepspeed_stage_comes_from_a_number_a_file_or_the_recipe(tmp_path):
    def stage(*given):
        zero, processes = deepspeed_of(*given)
        return (zero.get("zero_optimization") or {}).get("stage", 0), processes

    assert stage("", {}, 1) == (0, 0) and stage("", {}, 8) == (2, 0) and stage("3", {}, 1) == (3, 0)
    assert stage("", {"deepspeed": str(ROOT / "configs/deepspeed/zero1.json")}, 8) == (1, 0)
    for name, expected in (("gpu-8", (2, 8)), ("gpu-1", (0, 1)), ("multi-node", (2, 16))):
        assert stage(str(ROOT / f"configs/accelerate/{name}.yaml"), {}, 1) == expected
    with pytest.raises(UserError, match="deepspeed='7': give a stage from 0 to 3"):
        deepspeed_of("7", {}, 1)
    with pytest.raises(UserError, match=r"no\.json"):
        deepspeed_of(str(tmp_path / "no.json"), {}, 1)
    launch = tmp_path / "launch.yaml"
    launch.write_text("num_processes: null\ndeepspeed_config: {zero_stage: 3}\n")
    assert stage(str(launch), {}, 1) == (3, 0)
    for text, message in (
        ("num_processes: two", "num_processes='two': input should be a valid integer"),
        ("num_processes: -4", "num_processes=-4: input should be greater"),
        ("- 1", "the content="),
        ("deepspeed_config: 3", "deepspeed_config=3: input should be a valid dictionary"),
        ("deepspeed_config: {zero_stage: x}", "zero_stage='x': input should be a valid integer"),
        ("deepspeed_config: {deepspeed_config_file: 5}", "deepspeed_config_file=5: input"),
    ):
        launch.write_text(text)
        with pytest.raises(UserError, match=message):
            deepspeed_of(str(launch), {}, 1)


@pytest.mark.parametrize(
    ("words", "job", "message"),
    [
        ([], {"device": "abacus"}, "device='abacus' is not one of"),
        (
            ["sequence_parallel=2"],
            {},
            "sequence_parallel=2: rows that processes share are not planned",
        ),
        (["kind=eagle9"], {}, "eagle9"),
        (["optim=muon"], {"deepspeed": "2"}, "optim='muon' steps whole matrices"),
    ],
)
def test_what_cannot_be_planned_is_one_line(recipe, words, job, message):
    with pytest.raises(UserError, match=message):
        plan(recipe, words, Job(**job))


@pytest.mark.thorough
def test_a_plan_needs_no_triton(recipe, monkeypatch):
    """An environment without the extra `dev` plans the same memory; a kind per sort of attention and of norm."""
    monkeypatch.setattr(plan_memory, "_MOST_TOKENS", 256)
    monkeypatch.setattr(Memory, "most", lambda *_: 0)

    def totals() -> dict[str, float]:
        kinds = ("eagle3", "dflash", "mlp_speculator")
        plans = {kind: plan(recipe, [f"kind={kind}", "drafter={}"]) for kind in kinds}
        return {kind: found.memory_gb["total"] for kind, found in plans.items()}

    want = totals()
    # As if it were not installed: neither it nor the modules of kernels can be imported.
    for name in ("triton", *KERNELS):
        monkeypatch.setitem(sys.modules, name, None)
    has_triton.cache_clear()
    try:
        assert totals() == want
    finally:
        has_triton.cache_clear()


@pytest.mark.thorough
def test_a_vocabulary_larger_than_the_targets_is_all_of_it(recipe, monkeypatch):
    monkeypatch.setattr(plan_memory, "_MOST_TOKENS", 256)
    monkeypatch.setattr(Memory, "most", lambda *_: 0)
    sizes = (0, 10**6)
    plans = [plan(recipe, [f"drafter={{draft_vocab_size: {size}}}"]) for size in sizes]
    assert plans[0].memory_gb == plans[1].memory_gb


@pytest.mark.thorough
def test_a_native_module_is_counted_with_its_experts(recipe, tmp_path, monkeypatch):
    """The layer of a mixture behind the dense ones; experts' products count by the experts that a token uses."""
    monkeypatch.setattr(plan_memory, "_MOST_TOKENS", 256)
    monkeypatch.setattr(Memory, "most", lambda *_: 0)
    shapes = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "kv_lora_rank": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    }
    file = tmp_path / "target.json"
    rates = []
    words = [
        "kind=mtp",
        "init=native",
        "drafter={draft_vocab_size: 0, train_head: false, ttt_steps: 2}",
    ]
    for chosen in (2, 12):
        dump_json(file, {"model_type": "deepseek_v3", **shapes, "num_experts_per_tok": chosen})
        found = plan(recipe, words, Job(states="vllm", gpus=2, deepspeed="0"))
        rates.append(found.tokens_per_second["train"])
    with torch.device("meta"):
        layer = AutoModelForCausalLM.from_config(DeepseekV3Config(**shapes)).model.layers[-1]
    around = 2 * 64 * 64 + 3 * 64  # projection and norms
    assert (
        found.parameters["drafter"] == sum(weight.numel() for weight in layer.parameters()) + around
    )
    assert rates[1] < rates[0]
    with pytest.raises(UserError, match="no target comes with a drafter of kind='eagle3'"):
        plan(recipe, ["init=native"])


def test_a_plan_is_named_as_it_was_asked_for(linear):
    assert plan("llama-3.1-8b/eagle3").recipe == "llama-3.1-8b/eagle3"


@pytest.mark.thorough
def test_the_command_prints_and_writes_a_plan_of_real_dry_steps(
    recipe, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(plan_memory, "_MOST_TOKENS", 512)
    output = tmp_path / "plan.json"
    assert (
        main(
            [
                "plan",
                recipe,
                "--gpus",
                "2",
                "--device",
                "h100",
                "--gpu-memory",
                "24",
                "--disk",
                "1T",
                "--output",
                str(output),
            ]
        )
        == 0
    )
    found = load_json(output)
    text = capsys.readouterr().out
    parts = found["memory_gb"]
    assert found["fits"] and parts["total"] == pytest.approx(
        sum(v for name, v in parts.items() if name != "total")
    )
    assert parts["target"] == pytest.approx(2e-9 * found["parameters"]["target"], rel=0.02)
    assert (
        min(
            parts[name] for name in ("drafter", "gradients", "optimizer", "features", "activations")
        )
        > 0
    )
    assert found["setting"]["zero_stage"] == 2 and found["setting"]["precision"] == "bfloat16"
    assert found["largest"]["rows"] > 100 and found["largest"]["length"] == 4096
    assert {"target", "answers", "checkpoints", "total"} <= found["disk_gb"].keys()
    for words in (
        "2 x h100 of 24 GB",
        "a roofline, not a measurement",
        "fits: ",
        "60,000 conversations",
        f"wrote {output}",
    ):
        assert words in text
    assert (
        "next: drafttrain prompts --source magpie --target nobody/tiny --count 60000 --output prompts.jsonl"
        in text
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3 shell, stored states", "draft_model online"])
def test_a_plan_is_what_training_allocates(name, monkeypatch):
    """eval/bench_plan.py with smaller rows."""
    monkeypatch.syspath_prepend(str(ROOT / "eval"))
    bench = importlib.import_module("bench_plan")
    compared = bench.compare(name, {**bench.CASES[name], "rows": 2, "max_length": 256})
    assert abs(compared["off"]) < bench.GOAL


def test_images_add_the_vision_part_and_their_tokens(linear):
    recipe = "gemma-3-27b/eagle3"
    text = plan(recipe, [], Job(), largest=False)
    seen = plan(recipe, [], Job(image_tokens=256), largest=False)
    vision = seen.parameters["vision"]
    assert vision == pytest.approx(0.42e9, rel=0.05)  # SigLIP so400m and its projector
    added = {key: seen.memory_gb[key] - text.memory_gb.get(key, 0) for key in seen.memory_gb}
    assert added["vision part"] == pytest.approx(2 * vision / 1e9, rel=1e-3)
    assert added["target"] == 0 and text.disk_gb["target"] == seen.disk_gb["target"]
    assert seen.setting["tokens"] - text.setting["tokens"] == 256
    assert any("vision part" in note for note in seen.notes)
    with pytest.raises(UserError, match="image_tokens=256 needs a target that reads images"):
        plan("llama-3.1-8b/eagle3", [], Job(image_tokens=256), largest=False)
