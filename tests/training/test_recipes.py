"""configs/: the launch lines on top of every file are typed in here, as they stand, for a tiny stand-in."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from drafttrain.cli import parsed
from drafttrain.drafters.registry import kind_class
from drafttrain.errors import UserError
from drafttrain.recipes import recipe_path
from drafttrain.train import setup
from scripts import docs_commands
from tests.conftest import make_target, make_tokenizer
from tests.files import load_json
from tests.training.runs import ROOT, write_data

CONFIGS = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml"))
RECIPES = [path for path in CONFIGS if path.parent.name != "accelerate"]
LARGE = {
    path for path in RECIPES if (ROOT / path).with_name("target.json").is_file()
}  # see test_recipe_shapes.py
LAUNCHERS = [path for path in CONFIGS if path.parent.name == "accelerate"]
PLAIN = "configs/smollm2-135m/eagle3.yaml"
FIRST_DOCKER_LINE = (
    "docker run --rm --gpus all --entrypoint accelerate drafttrain:cuda launch --config_file configs/accelerate/gpu-8.yaml "
    "-m drafttrain.train configs/quickstart.yaml data=runs/data output_dir=runs/drafter"
)


def lines(path: Path) -> list[str]:
    """The commands in a file's head comment, each in one line."""
    head = "".join(re.findall(r"^# ?.*\n", (ROOT / path).read_text(), re.MULTILINE))
    joined = re.sub(r"\\\n#\s*", "", head)
    return re.findall(
        r"^#   ((?:[A-Z_]+=\S+ )*(?:accelerate launch|drafttrain) .*)$", joined, re.MULTILINE
    )


EVERY = [(path, line) for path in CONFIGS for line in lines(path)]


def accelerated(line: str) -> list[str]:
    """What accelerate gets, with a recipe and an address filled in."""
    filled = (
        line.replace("RECIPE", PLAIN)
        .replace("HOST", "127.0.0.1")
        .replace("machine_rank N", "machine_rank 1")
    )
    return shlex.split(filled.partition("accelerate launch ")[2])


def test_every_file_says_how_it_is_launched():
    assert len(RECIPES) >= 5 and len(LAUNCHERS) >= 4
    assert {path for path, _ in EVERY} == set(CONFIGS)
    for path, line in EVERY:
        for named in re.findall(r"configs/\S+|drafttrain/train.py", line):
            assert (ROOT / named).is_file(), f"{path}: {named}"


@pytest.mark.parametrize("path", RECIPES, ids=str)
def test_every_key_of_a_recipe_is_known(path):
    words = ["target=t", "data=d", "output_dir=o", "use_cpu=true"]
    config, args = setup(str(ROOT / path), words)
    assert args.max_steps > 0 or args.num_train_epochs > 0
    known = vars(kind_class(config.kind).config_class())
    assert set(config.drafter) <= set(known)


@pytest.mark.thorough
@pytest.mark.parametrize("path", sorted(LARGE), ids=str)
def test_the_lines_of_large_targets_are_read(path, monkeypatch):
    """accelerate's flags and files, the recipe, its overrides, and the flags of drafttrain's own commands."""
    monkeypatch.chdir(ROOT)
    served = False
    for line in lines(path):
        words = shlex.split(
            re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line).replace("~/vllm/bin/python", sys.executable)
        )
        if words[0] == "drafttrain":
            values = parsed(words[1:])[1]
            assert words[1] == "features" or Path(values["recipe"]) == path
            served |= words[1] == "serve-target"
            continue
        args = _validate_launch_command(launch_command_parser().parse_args(accelerated(line)))[0]
        assert (
            args.module
            and args.training_script == "drafttrain.train"
            and Path(args.training_script_args[0]) == path
        )
        assert not args.use_deepspeed or Path(args.deepspeed_config_file).is_file()
        config, trained = setup(str(path), [*args.training_script_args[1:], "use_cpu=true"])
        assert (
            trained.per_device_train_batch_size
            * trained.gradient_accumulation_steps
            * args.num_processes
            >= 8
        )
    assert served == bool(config.target_url)


@pytest.mark.parametrize("path", LAUNCHERS, ids=str)
def test_accelerate_reads_its_files(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    loaded = load_config_from_file(str(path))  # unknown keys are errors
    (line,) = lines(path)
    args = _validate_launch_command(launch_command_parser().parse_args(accelerated(line)))[0]
    given = yaml.safe_load(path.read_text())
    assert (
        args.num_processes == loaded.num_processes == given["num_processes"]
        and args.dynamo_backend == "no"
    )
    assert args.training_script == "drafttrain/train.py" and args.training_script_args[0] == PLAIN
    if path.stem != "gpu-1":
        assert args.use_deepspeed and Path(args.deepspeed_config_file).is_file()
    if path.stem == "multi-node":
        assert (args.num_machines, args.machine_rank, args.main_process_ip) == (2, 1, "127.0.0.1")
        assert args.deepspeed_multinode_launcher == "standard"


LAUNCHED = [
    words
    for page in docs_commands.PAGES
    for words in map(docs_commands.inside, docs_commands.written(page))
    if words[0] == "accelerate" and {"drafttrain.train", "drafttrain/train.py"} & {*words}
    if not docs_commands.left_out(shlex.join(docs_commands.started(words)))
]


def check_launch(words, monkeypatch):
    """Raises UserError: the recipe of a launcher's line, with its overrides and DeepSpeed file, is not complete."""
    monkeypatch.chdir(ROOT)
    args = _validate_launch_command(launch_command_parser().parse_args(words[2:]))[0]
    if args.deepspeed_config_file:
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", args.deepspeed_config_file)
    recipe, *overrides = args.training_script_args
    setup(str(recipe_path(recipe)), [*overrides, "use_cpu=true"])


@pytest.mark.parametrize("words", LAUNCHED, ids=shlex.join)
def test_what_the_docs_launch_is_complete(words, monkeypatch):
    check_launch(words, monkeypatch)


def test_a_launcher_without_a_target_is_found(monkeypatch):
    assert any("smollm2-135m/eagle3" in words for words in LAUNCHED), "docker's"
    words = docs_commands.inside(shlex.split(FIRST_DOCKER_LINE))
    with pytest.raises(UserError, match="target"):
        check_launch(words, monkeypatch)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_reads_its_files(stage):
    given = load_json(ROOT / f"configs/deepspeed/zero{stage}.json")["zero_optimization"]
    assert DeepSpeedZeroConfig(**given).stage == stage  # unknown keys are errors


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Folders of a target in the shape of SmolLM2 and of one in that of Gemma 3, but tiny, and of data for both."""
    folder = tmp_path_factory.mktemp("stand-ins")
    target = make_target(
        layers=30, hidden=36, num_attention_heads=9, num_key_value_heads=3, head_dim=4
    )
    target.model.save_pretrained(folder / "smollm2-135m")
    torch.manual_seed(0)
    shapes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    gemma = Gemma3TextConfig(vocab_size=300, num_key_value_heads=1, sliding_window=16, **shapes)
    Gemma3ForCausalLM(gemma).save_pretrained(folder / "gemma3-270m")
    for name in ("smollm2-135m", "gemma3-270m"):
        make_tokenizer().save_pretrained(folder / name)
    write_data(folder / "data", target)
    return folder


RUNNABLE = [
    (path, line)
    for path, line in EVERY
    if path not in LARGE and path.stem not in ("gpu-8", "multi-node")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "line"), RUNNABLE, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_line_starts(stand_ins, tmp_path, path, line):
    recipe = PLAIN if path in LAUNCHERS else str(path)
    config = yaml.safe_load((ROOT / recipe).read_text())
    target = stand_ins / config.get("target", "smollm2-135m")
    words = [
        f"target={target}",
        f"data={stand_ins / 'data'}",
        f"output_dir={tmp_path / 'out'}",
        "use_cpu=true",
    ]
    words += ["max_steps=1", "max_length=64", "dtype=float32", "decode_tokens=8"]
    words += ["max_minutes=0.01"] if "max_minutes" in line else []
    words += (
        ["on_policy.responses=4", "on_policy.max_new_tokens=8"] if "on_policy" in config else []
    )
    words += (
        ["drafter.conv_group_size=12"] if config["kind"] == "dflash2" else []
    )  # must divide the stand-in's 36
    words += [f"init={target}"] if "init=" in line else []  # a checkpoint that another line leaves
    _, env, rest = line.rpartition("DS_ACCELERATOR=cpu ")
    if rest.startswith("accelerate launch"):
        command = [sys.executable, "-m", "accelerate.commands.launch", *accelerated(rest)]
    else:
        command = [sys.executable, "-m", "drafttrain.cli", *shlex.split(rest)[1:]]
    full = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, *words], cwd=ROOT, env=full, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = load_json(tmp_path / "out" / "training.json")
    assert summary["steps"] >= 1 and summary["processes"] == (2 if env else 1)
    assert (summary["engine"] == "DeepSpeedEngine") == bool(env)
