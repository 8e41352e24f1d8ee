"""Which device is used, by whom and in which precision: several GPUs, old drivers, old GPUs, memory that decoding leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.config import load_config
from drafttrain.errors import UserError
from drafttrain.evaluation import sides
from drafttrain.export import engine_runs
from drafttrain.inference import SamplingParams, generate
from drafttrain.inference.responses import choose_slots
from drafttrain.inference.static import TargetSteps
from drafttrain.losses import SharedHead, TargetRows, linear_divergence
from drafttrain.ops import launch, tree_attention_kernels
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target import Target, devices
from drafttrain.target import target as target_module
from drafttrain.training import arguments
from drafttrain.training.held_out_decoding import DecodeHeldOut
from tests.conftest import make_target
from tests.gpu.count import moved_target


def recipe(tmp_path, monkeypatch, **keys):
    """The trainer's arguments of a recipe on whatever GPUs there are."""
    monkeypatch.delenv(
        "DS_ACCELERATOR", raising=False
    )  # which the tests set, so that training does not ask for a GPU
    devices.usual_device.cache_clear()
    (tmp_path / "recipe.yaml").write_text("target: t\ndata: d\n")
    words = [f"{key}={value}" for key, value in {"output_dir": tmp_path / "out", **keys}.items()]
    return arguments.training_arguments(
        load_config(str(tmp_path / "recipe.yaml"), words, arguments.KEYS)
    )


@pytest.mark.thorough
def test_one_process_trains_on_one_gpu_and_says_how_to_use_all(
    two_gpus, tmp_path, monkeypatch, capfd, caplog
):
    caplog.set_level("INFO", "drafttrain")
    args = recipe(tmp_path, monkeypatch)
    assert args.n_gpu == 1, "transformers wraps the drafter in DataParallel beyond one"
    assert (
        args.train_batch_size == args.per_device_train_batch_size
        and args.device == torch.device("cuda:0")
    )
    said = capfd.readouterr().err
    assert "device cuda:0: pretend GPU sm_90" in caplog.messages
    assert "2 GPUs are visible and one is used; all: accelerate launch --num_processes 2" in said
    assert recipe(tmp_path, monkeypatch, target_device_map="auto").n_gpu == 1
    assert "are visible" not in capfd.readouterr().err, "the target is spread over them"


@pytest.mark.parametrize(
    ("keys", "capability", "said"),
    [
        ({}, (9, 0), "bfloat16, with weights and optimizer in float32"),
        ({}, (7, 5), "float32"),
        ({"bf16": "false"}, (9, 0), "float32"),
        ({"fp16": "true"}, (9, 0), "float16, with weights and optimizer in float32"),
        ({"deepspeed": '{"fp16": {"enabled": true}}', "fp16": "true"}, (9, 0), "float16"),
        ({"use_cpu": "true"}, (9, 0), "float32"),
    ],
)
def test_training_computes_in_bfloat16_unless_the_recipe_or_the_gpu_says_otherwise(
    gpu, tmp_path, monkeypatch, keys, capability, said
):
    gpu.capability = capability
    properties = torch.cuda.get_device_properties()
    properties.major, properties.minor = capability
    if "deepspeed" in keys:
        (tmp_path / "ds.json").write_text(keys["deepspeed"])
        options = {"deepspeed": str(tmp_path / "ds.json")}
        assert arguments.wants_bfloat16(options) is False
        return
    args = recipe(tmp_path, monkeypatch, **keys)
    assert arguments.precision(args) == said
    assert args.bf16 == said.startswith("bfloat16")


def test_a_zero_stage_of_ours_leaves_the_precision_to_the_default(gpu):
    assert arguments.wants_bfloat16({"deepspeed": "configs/deepspeed/zero2.json"})


def test_auto_is_bfloat16_for_targets_on_gpus_that_multiply_it(gpu):
    assert devices.resolve_dtype("auto", torch.device("cuda:0")) == torch.bfloat16
    gpu.capability = (7, 5)
    assert devices.resolve_dtype("auto", torch.device("cuda:0")) == torch.float32


@pytest.mark.parametrize(
    ("reason", "build", "visible", "pci", "error"),
    [
        (
            "The NVIDIA driver on your system is too old (found version 11040). Update it.",
            "13.0",
            None,
            False,
            "too old",
        ),
        (
            "Found no NVIDIA driver on your system. Please check.",
            "13.0",
            None,
            True,
            "no NVIDIA driver",
        ),
        ("Found no NVIDIA driver on your system. Please check.", "13.0", None, False, ""),
        ("No CUDA GPUs are available", "13.0", "", True, ""),
        ("", None, None, True, ""),
    ],
)
def test_a_gpu_that_cannot_be_used_is_an_error_and_no_gpu_is_a_line(
    monkeypatch, capfd, caplog, tmp_path, reason, build, visible, pci, error
):
    def init() -> None:
        raise RuntimeError(reason)

    folder = tmp_path / "0000:01:00.0"
    folder.mkdir()
    (folder / "vendor").write_text("0x10de\n" if pci else "0x8086\n")
    (folder / "class").write_text("0x030200\n")
    monkeypatch.setattr(devices, "_PCI", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", build)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    devices.usual_device.cache_clear()
    assert devices.resolve_device("cpu").type == "cpu", "asked for"
    if error:
        with pytest.raises(
            UserError, match=rf"built for CUDA 13.0, but no GPU can be used .*{error}.*--device cpu"
        ):
            devices.resolve_device("auto")
    else:
        caplog.set_level("INFO", "drafttrain")
        assert devices.resolve_device("auto").type == "cpu"
        assert len(caplog.messages) == 1 and caplog.messages[0].startswith("device cpu: ")
        assert (reason.partition(". ")[0] or "built without CUDA") in caplog.messages[0]
        devices.resolve_device("auto")
        assert len(caplog.messages) == 1 and not capfd.readouterr().err, "logged once"
    devices.usual_device.cache_clear()


@pytest.mark.thorough
def test_kernels_run_on_the_device_of_their_tensors(two_gpus):
    """Triton launches on the current device, here cuda:0, whatever its pointers say."""
    target = moved_target("cuda:1")
    plain = generate(make_target(), None, [5, 9, 11, 9], max_new_tokens=6).tokens
    assert generate(target, None, [5, 9, 11, 9], max_new_tokens=6).tokens == plain
    cache = TreeCache(8)
    key = torch.randn(1, 2, 3, 16, device="cuda:1")
    cache.open([(0, [-1, -1])])
    form = {"scaling": 0.25, "window": None, "softcap": None, "sinks": None}
    cache.attend(0, torch.randn(1, 4, 3, 16, device="cuda:1"), key, key, **form)
    cache.commit([[0, 2]])  # moves a slot
    torch.testing.assert_close(cache.by_row(0)[0][0, :, 1].cpu(), key[0, :, 2].cpu())
    states = torch.randn(3, 8, device="cuda:1")
    head = torch.randn(40, 8, device="cuda:1")
    rows = TargetRows(states, head, (states @ head.T).logsumexp(-1), (states @ head.T).argmax(-1))
    out = linear_divergence(
        states, head, rows, torch.arange(3, device="cuda:1"), torch.ones(3, device="cuda:1")
    )
    assert out.loss.abs() < 1e-5 and torch.cuda.current_device() == 0


def test_a_frozen_head_is_not_copied_to_another_dtype(gpu):
    head = SharedHead(torch.zeros(8, 4, dtype=torch.bfloat16, device="cuda"))
    assert head.weight_for(torch.zeros(1, 4, device="cuda")).dtype == torch.bfloat16, (
        "gigabytes for 128k words"
    )


@pytest.mark.thorough
def test_decoding_during_training_leaves_no_graphs_and_no_cache(gpu):
    target = moved_target()
    drafter = SimpleNamespace(eval=lambda: drafter, parameters=lambda: [], train=lambda: None)

    def decode(_):
        generate(target, None, [5, 9, 11, 9], max_new_tokens=4)
        assert target.idle_steps, "graphs stay for the next call"
        return {"accepted_length": 1.0}

    state = SimpleNamespace(global_step=1, is_world_process_zero=True, best_metric=None)
    control = SimpleNamespace(should_save=True, should_training_stop=False, should_log=False)
    decoding = DecodeHeldOut(drafter, target, 0, decode)
    assert decoding.due(state.global_step, control)
    decoding.measure(state, control, lambda logs: None)
    assert not target.idle_steps


@pytest.mark.thorough
def test_a_target_is_loaded_to_its_device(gpu, target_dir, monkeypatch):
    """Without a copy in the host's memory, one per rank."""
    asked = {}

    def load(where, what, fix, **options):
        asked.update(options)
        raise UserError("enough")

    monkeypatch.setattr(target_module, "load_language_model", load)
    for device, wanted in (("cuda", {"": torch.device("cuda")}), ("cpu", None)):
        asked.clear()
        with pytest.raises(UserError, match="enough"):
            Target.load(str(target_dir), device=device)
        assert asked.get("device_map") == wanted


def test_layers_are_computed_again_where_the_target_runs_beside_the_head(
    gpu, tmp_path, monkeypatch
):
    chosen = lambda **keys: recipe(tmp_path, monkeypatch, **keys).gradient_checkpointing  # noqa: E731
    assert chosen() and chosen(kind="dflash") and not chosen(gradient_checkpointing="false")
    assert not chosen(kind="medusa") and not chosen(use_cpu="true"), "no layers; no GPU"
    monkeypatch.setattr(arguments, "stored_features", lambda data: {"layers": [1]})
    assert not chosen(data=tmp_path), "stored states"
    with pytest.raises(UserError, match="use_reentrant=true: kind='eagle3' reads keys"):
        recipe(tmp_path, monkeypatch, gradient_checkpointing_kwargs="{use_reentrant: true}")


@pytest.mark.parametrize("units", [True, False])
def test_without_a_gpu_the_cpu_decides_and_no_activation_is_computed_twice(
    tmp_path, monkeypatch, units
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(arguments, "usual_device", lambda: "cpu")
    monkeypatch.setattr(arguments, "cpu_has_bfloat16", lambda: units)
    args = recipe(tmp_path, monkeypatch)
    assert (args.bf16, args.use_cpu, args.gradient_checkpointing) == (units, True, False)
    assert not recipe(tmp_path, monkeypatch, bf16="false").bf16


@pytest.mark.thorough
def test_transformers_generate_shares_the_targets_weights(gpu, monkeypatch):
    """A second copy of an 8B target does not fit a card of 24 GB."""
    target = moved_target()
    monkeypatch.setattr(sides.AutoModelForCausalLM, "from_pretrained", None)
    (side,) = sides.hf_sides(target, SamplingParams(), ["hf_generate"]).values()
    (answer,) = side(sides.SideRequest([[1, 2, 3]], [5]))
    assert answer.tokens == generate(target, None, [1, 2, 3], max_new_tokens=5).tokens
    model = target.unwrapped()
    assert model.config._attn_implementation == "sdpa"
    theirs = target.model.state_dict()
    for name, weight in model.state_dict().items():
        assert weight.untyped_storage().data_ptr() == theirs[name].untyped_storage().data_ptr()


def test_attention_of_all_lengths_is_not_planned_by_cudnn(gpu):
    torch.backends.cuda.enable_cudnn_sdp(True)
    moved_target()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.thorough
def test_vllm_has_the_gpu_for_itself_while_it_verifies(gpu, monkeypatch, caplog):
    """It asks for nine tenths of the card, which a target of ours fills in part."""
    caplog.set_level("INFO", "drafttrain")
    target = moved_target()
    plain = generate(target, None, [1, 2, 3], max_new_tokens=5).tokens
    seen = []

    def side(python, script, job, environment):
        assert target.device.type == "cpu" and not target.idle_steps
        seen.append(job["memory"])
        return {"tokens": [plain], "rounds": 4, "runs": [], "counters": {}, "version": "9.9"}

    monkeypatch.setattr(engine_runs, "run_side", side)
    options = SimpleNamespace(options=lambda trained: {"vLLM": {}})
    monkeypatch.setattr(engine_runs, "shipping", lambda kind: options)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device=None: (gpu.memory // 2, gpu.memory)
    )
    trained = SimpleNamespace(kind="eagle3")
    job = engine_runs.EngineJob(trained, target, "tiny", "float32", [[1, 2, 3]], 5, 3, Path())
    assert engine_runs.Vllm().run(job, Path("out"), "python")["accepted_length"] == 1
    assert seen == [{"gpu_memory_utilization": 0.45}] and target.device.type == "cuda"
    assert "is in the host's memory while another program has the GPU" in caplog.text
    assert generate(target, None, [1, 2, 3], max_new_tokens=5).tokens == plain


def test_without_a_c_compiler_a_line_says_what_triton_lacks(gpu, monkeypatch, caplog):
    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    launch.has_triton.cache_clear()
    assert launch.has_triton()
    launch.has_triton.cache_clear()
    monkeypatch.setattr(tree_attention_kernels, "mark", Broken())
    try:
        assert not launch.has_triton()
    finally:
        launch.has_triton.cache_clear()
    (line,) = caplog.messages
    assert "(Failed to find C compiler.)" in line and "apt-get install gcc python3-dev" in line


SHAPES = {
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "Gemma-3-12B": ("gemma3_text", 3840, 15360, 48, 16, 8, 256, 262208, True),
    "Qwen3-32B": ("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False),
}
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "vocab_size", "tie_word_embeddings")  # fmt: skip


def empty_target(name, monkeypatch):
    """A target of a published shape in bfloat16, without weights, that says it is on the GPU; and its bytes."""
    kind, *values = SHAPES[name]
    config = AutoConfig.for_model(kind, **dict(zip(KEYS, values, strict=True)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    target = Target.wrap(model, None, name=name, dtype=torch.bfloat16)
    monkeypatch.setattr(Target, "device", torch.device("cuda", 0))
    return target, sum(weight.nbytes for weight in model.parameters())


@pytest.mark.thorough
@pytest.mark.parametrize("name", SHAPES)
def test_as_many_sequences_run_as_fit_beside_the_weights(gpu, monkeypatch, name):
    """The cache that the engine grows to, with a row for a shared prefix, of prompts, answers and long answers."""
    target, weights = empty_target(name, monkeypatch)
    config = target.config
    gpu.memory = 80 * 10**9 - weights
    like = torch.empty(
        1, config.num_key_value_heads, 0, config.head_dim, dtype=torch.bfloat16, device="meta"
    )
    for length in (310, 1400, 2048):
        slots = choose_slots(target, length)
        steps = TargetSteps(target)
        cache = steps.open(min(length, 1024), slots + 1, (), choose=True)
        cache.allocate(dict.fromkeys(range(target.num_layers), (like, like)))
        steps.reserve(length)
        assert cache.capacity < length + 160
        assert cache.nbytes <= gpu.memory / 2
        assert slots == 256 or cache.nbytes * (slots + 2) / (slots + 1) > gpu.memory / 2
    assert slots > 10, "Qwen3-32B leaves 14.5 GB"

    with pytest.raises(UserError, match=r"max_length=\d+: two sequences take \d+.\d GB .* leaves"):
        choose_slots(target, 131072 * 4)
