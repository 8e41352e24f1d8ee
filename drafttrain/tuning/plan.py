"""`drafttrain plan`: memory, disk and hours of a recipe before anything is downloaded, and what to
change if it does not fit.

    plan_recipe.py         the target's and drafter's shapes, without weights
    plan_memory.py         bytes of a process by part, from the training step itself on tensors without data
    costs.py               seconds of a pass by a roofline; nothing is measured
    here                   disk from counts of tokens and weights; hours; the largest batch; advice
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from drafttrain.config import TrainerKeys, load_config
from drafttrain.data.quantized_rows import value_bytes
from drafttrain.data.store import read_meta, stored_features
from drafttrain.drafters.common.trainable import DecoderDrafter
from drafttrain.drafters.registry import kind_class
from drafttrain.errors import UserError
from drafttrain.files import Json, value_of, write_json
from drafttrain.folders import asked_file
from drafttrain.outcome import command_line, conclude, next_command
from drafttrain.recipes import recipe_path
from drafttrain.reports.output import table_of, wide_console
from drafttrain.target.devices import resolve_dtype
from drafttrain.training import muon
from drafttrain.training.arguments import KEYS, check_recipe
from drafttrain.tuning.costs import Device, EngineRates, Sizes, model_sizes
from drafttrain.tuning.hardware import DEVICES
from drafttrain.tuning.job import Job
from drafttrain.tuning.plan_memory import Memory, Setting, States, buckets_of, optimizer_states
from drafttrain.tuning.plan_recipe import (
    deepspeed_of,
    drafter_of,
    given_config,
    shipped_config,
    stored_bits,
    vision_weights,
    without_weights,
)

# Of a data set that does not exist yet; tokens of a conversation on average.
_CONVERSATIONS = 60_000
_TOKENS = 1024
# Bytes of the optimizer per trained weight; AdamW's: 8.
_STATE_BYTES = {"sgd": 0, "adafactor": 0, "adamw_8bit": 2, "adamw_bnb_8bit": 2}
# Bytes per weight and optimizer step: weight, gradient and two states are read, all but one written.
_ADAMW_MOVES = 28
_DEVICE = "h100"  # unless another is named
_OVERHEAD = 5e-5  # seconds per pass of an engine
_SHORTEST = 512  # tokens of a row that advice suggests
_UNIT = 256  # of lengths


@dataclass(frozen=True)
class Plan:
    """What a run takes. Gigabytes are 10^9 bytes; memory is that of the fullest process at its
    peak.

    Attributes:
        setting: what was planned: GPUs, rows, tokens, precision, ZeRO stage, where the target's
            states come from.
        parameters: of the target, those that one token uses (active), and the drafter's trained
            ones.
        memory_gb, disk_gb, hours: by part, with their total. tokens_per_second: by the roofline
            that gives the hours.
        largest: rows that fit at the recipe's length, and length at its rows; 0 where none fits.
        advice: what to change, in order of harm; empty if the run fits. notes: what is assumed or
            left out.
    """

    recipe: str
    setting: Json
    parameters: dict[str, int]
    memory_gb: dict[str, float]
    disk_gb: dict[str, float]
    hours: dict[str, float]
    tokens_per_second: dict[str, float]
    fits: bool
    largest: dict[str, int]
    advice: list[str]
    notes: list[str]


def plan(
    recipe: str,
    overrides: Sequence[str] = (),
    job: Job | None = None,
    largest: bool = True,
) -> Plan:
    """Plans a training run from its recipe and overrides, which are those of `drafttrain train`.

    Args:
        largest: search for the largest batch too; without, `Plan.largest` is empty.

    Raises:
        UserError: a recipe, device or file with an error, or a target or drafter whose shapes are
            not known.
    """
    planner = _Planner(str(recipe_path(recipe)), overrides, job or Job())
    return replace(planner.plan(largest), recipe=recipe)


class _Change(NamedTuple):
    """A change that advice suggests, and the plan with it.

    Attributes:
        text: empty for the plan as it is.
    """

    text: str
    planner: _Planner


class _Planner:
    """One plan: the target's shapes, the data's counts, and the device, which its parts share.

    Attributes:
        weights: number of the target's, which read text. vision: of its vision part. width: bytes per weight in
            its files.
    """

    target: PretrainedConfig
    sizes: Sizes
    weights: int
    vision: int
    width: float
    memory: Memory

    def __init__(
        self,
        recipe: str,
        overrides: Sequence[str],
        job: Job,
        shared: _Planner | None = None,
    ):
        """Args: shared: a plan of the same target and drafter, whose shapes are taken."""
        if shared is not None:
            vars(self).update(vars(shared))
        self.recipe = recipe
        self.overrides = overrides
        self.job = job
        self.notes: list[str] = []
        self.config = load_config(recipe, list(overrides), KEYS)
        check_recipe(self.config)
        self.kind = kind_class(self.config.kind)
        self.trainer: Json = {**vars(TrainerKeys()), **self.config.trainer}
        name = _device_of(job)
        if self.config.sequence_parallel > 1:
            raise UserError(
                f"sequence_parallel={self.config.sequence_parallel}: rows that processes share are not planned; set "
                "sequence_parallel=1, and max_length to a process's part of a row"
            )

        if shared is None:
            self._read_shapes()

        bandwidth, tflops, memory = DEVICES[name]
        self.device = Device(
            name=name,
            bandwidth=1e9 * bandwidth * job.memory_efficiency,
            flops=1e12 * tflops * job.compute_efficiency,
            memory=1e9 * (job.gpu_memory or memory),
            overhead=_OVERHEAD,
        )
        self.engine = EngineRates(self.sizes, self.weights, self.width, self.device)
        self._read_data()
        self.setting = self._setting()
        self.step = self.memory.step(self.setting)

    def _read_shapes(self) -> None:
        """Reads the shapes of the target and of the drafter, without weights."""
        job = self.job
        name = self.config.target
        shipped = shipped_config(self.recipe, self.overrides, "target", "target.json")
        self.target = given_config(name, job.target_config, shipped)
        fix = "give another --target-config"
        model = without_weights(self.target, name, fix)
        self.vision = vision_weights(self.target, name, fix)
        if job.image_tokens and not self.vision:
            raise UserError(
                f"image_tokens={job.image_tokens} needs a target that reads images, and the config of target={name!r} has no "
                "vision part; give the whole model's: --target-config FILE, or leave it out"
            )
        self.sizes = model_sizes(model, self.target)
        self.weights = sum(weight.numel() for weight in model.parameters())
        self.width = stored_bits(self.target) / 8

        build, note = drafter_of(self.config, self.recipe, self.overrides, job.init_config)
        if note:
            self.notes.append(note)
        self.memory = Memory(self.target, self.config.loss, build)

    # -- the recipe and its data -------------------------------------------------------------------

    def _read_data(self) -> None:
        """Reads what the data set holds, or assumes it.

        Sets `conversations`, their `tokens` and `prompt` tokens on average, and `stored`, settings
        of stored states.
        """
        job = self.job
        folder = Path(self.config.data).expanduser()
        self.stored: Json | None = None
        counts: Json = {}
        if (folder / "meta.json").is_file():
            counts = value_of(read_meta(folder), "counts", {})
            self.stored = stored_features(folder)

        held = counts.get("conversations", 0)
        self.conversations = job.conversations
        if not self.conversations:
            self.conversations = held or _CONVERSATIONS
        tokens = job.tokens
        if not tokens:
            tokens = _TOKENS
            if held:
                tokens = counts.get("response_tokens", 0) // held + job.prompt_tokens
            tokens += job.image_tokens
        self.tokens = min(tokens, self.config.max_length)
        self.prompt = min(job.prompt_tokens + job.image_tokens, max(self.tokens - 2, 0))
        if job.image_tokens:
            self.notes.append("hours leave out the passes of the target's vision part")

        if not held and not (job.conversations and job.tokens):
            assumed = f"{self.conversations:,} conversations of {self.tokens:,} tokens (--conversations, --tokens)"
            self.notes.append(
                f"data={self.config.data!r} is not complete yet; assumed are {assumed}"
            )

    def _states(self) -> States:
        if self.config.loss == "next_token":
            return "none"
        if self.job.states:
            return self.job.states
        if self.config.target_url:
            return "vllm"
        if self.stored:
            return "stored"
        return "online"

    def _setting(self) -> Setting:
        config = self.config
        trainer = self.trainer
        gpu = not self.device.name.startswith("cpu")
        states = self._states()

        # Processes, and what DeepSpeed divides among them. A target that is spread over the GPUs
        # leaves one process.
        spread = bool(config.target_device_map)
        asked = self.job.gpus
        if spread:
            asked = 1
        launch = deepspeed_of(self.job.deepspeed, trainer, asked)
        self.gpus = self.job.gpus or launch.processes or 1
        processes = self.gpus
        if spread and not launch.processes:
            processes = 1
        shards = self.gpus // processes
        orthogonal = trainer.get("optim") == muon.NAME
        if orthogonal and launch.deepspeed:
            raise UserError(muon.NOT_CUT)
        if any("offload" in key for key in launch.zero):
            self.notes.append(
                "what DeepSpeed offloads to the host is counted as if it stayed on the GPU"
            )

        # Precision of the drafter's products, which a DeepSpeed file may fix, and of the target.
        half = bool(trainer.get("bf16", trainer.get("fp16") or gpu))
        fixed = (launch.deepspeed.get("bf16") or {}).get("enabled", "auto")
        if fixed != "auto":
            half = bool(fixed)
        if gpu and config.dtype == "auto":
            dtype = torch.bfloat16
        else:
            dtype = resolve_dtype(config.dtype, torch.device("cpu"))

        # A draft model may copy the target's layers; a drafter that writes answers has the whole
        # target score them.
        loaded = 0
        copies = states == "none" or self.kind.loads_language_models
        streams = config.target_url and config.init != "target"
        if config.on_policy or (copies and not streams):
            loaded = self.weights * dtype.itemsize

        eval_rows = 0
        if config.validation:
            eval_rows = trainer["per_device_eval_batch_size"]
        prompt = self.prompt
        if states == "none":
            prompt = 0
        recomputes = gpu and states == "online" and issubclass(self.kind, DecoderDrafter)
        older = value_of(trainer, "gradient_checkpointing", recomputes)  # its former name
        return Setting(
            rows=trainer["per_device_train_batch_size"],
            length=config.max_length,
            eval_rows=eval_rows,
            prompt=prompt,
            gpu=gpu,
            target_dtype=dtype,
            half=half,
            checkpointing=bool(value_of(trainer, "activation_checkpointing", older)),
            states=states,
            loaded=loaded,
            shards=shards,
            processes=processes,
            stage=launch.zero.get("stage", 0),
            buckets=buckets_of(launch.deepspeed),
            accumulates=trainer["gradient_accumulation_steps"] > 1,
            state_bytes=_STATE_BYTES.get(str(trainer.get("optim", "")), 8),
            muon=orthogonal,
            vision=self.vision
            * dtype.itemsize
            * bool(self.job.image_tokens and states == "online"),
            kept=1e9 * config.cache_size(gpu),
            ahead=1e9 * config.prefetch_gb,
            data_tokens=self.conversations * self.tokens,
        )

    # -- figures -----------------------------------------------------------------------------------

    def plan(self, search: bool) -> Plan:
        """The figures of the recipe's setting, the largest batch, and advice if it does not fit."""
        setting = self.setting
        limit = self.device.memory
        memory = self.memory.parts(setting)
        disk = self._disk()
        rates = self._rates()
        hours = self._hours(rates)

        largest: dict[str, int] = {}
        if search:
            text = self.target.get_text_config()
            longest = getattr(text, "max_position_embeddings", None) or 2**20
            largest["rows"] = self.memory.most(setting, limit, "rows", 4096)
            largest["length"] = self.memory.most(setting, limit, "length", longest, _UNIT)

        advice: list[str] = []
        if sum(memory.values()) > limit:
            advice += self._advice()
        free = self.job.disk
        if free is not None and sum(disk.values()) > 1e9 * free:
            advice.append(f"--disk {free:g} GB is too small: {self._disk_advice(1e9 * free)}")
        self._more_notes(memory)

        precision = "float32"
        if setting.gpu and setting.half:
            precision = "bfloat16"
        efficiency = {
            "compute": self.job.compute_efficiency,
            "memory": self.job.memory_efficiency,
        }
        shown = {
            "target": self.config.target,
            "data": self.config.data,
            "gpus": self.gpus,
            "gpus_in_all": self._gpus_in_all(),
            "device": self.device.name,
            "gpu_memory_gb": limit / 1e9,
            "processes": setting.processes,
            "zero_stage": setting.stage,
            "precision": precision,
            "gradient_checkpointing": setting.checkpointing,
            "states": setting.states,
            "rows": setting.rows,
            "length": setting.length,
            "conversations": self.conversations,
            "tokens": self.tokens,
            "efficiency": efficiency,
        }
        parameters = {
            "target": self.weights,
            "active": round(self.sizes.active),
            "drafter": self.step.trained,
        }
        if self.vision:
            parameters["vision"] = self.vision
        return Plan(
            recipe=self.recipe,
            setting=shown,
            parameters=parameters,
            memory_gb=_totaled(memory, 1e9),
            disk_gb=_totaled(disk, 1e9),
            hours=_totaled(hours),
            tokens_per_second=rates,
            fits=not advice,
            largest=largest,
            advice=advice,
            notes=self.notes,
        )

    def _disk(self) -> dict[str, float]:
        """Bytes by part; parts of no bytes are left out."""
        setting = self.setting
        trained = self.step.trained
        text = self.target.get_text_config()
        tokens = self.conversations * self.tokens
        parts = {"target": (self.weights + self.vision) * self.width}
        if setting.states != "none":
            parts["prompts"] = self.conversations * (5.0 * self.prompt + 100)

        # A token id takes about as many characters as the largest one, once as text and once in
        # Arrow's cache.
        characters = len(str(text.vocab_size)) + 8
        parts["answers"] = tokens * characters + 200.0 * self.conversations
        if setting.states == "stored":  # as drafttrain features counts
            values = value_bytes(self.job.store_dtype, text.hidden_size)
            parts["states"] = 1.01 * values * self.step.state_width * tokens

        # Weights in float32 and the optimizer's states; DeepSpeed adds the weights in 16 bits.
        width = 6.0 if setting.stage else 4.0
        size = width * trained + optimizer_states(setting, self.step)
        kept = (self.trainer["save_total_limit"] or 10) + 1  # and the one that is being written
        parts["checkpoints"] = kept * size
        parts["drafter"] = 4.0 * trained
        return {name: size for name, size in parts.items() if size}

    def _rates(self) -> dict[str, float]:
        """Tokens per second by part."""
        setting = self.setting
        rates: dict[str, float] = {}
        forward = self.gpus * self.engine.forward_rate(self.tokens)
        if setting.states != "none":
            rates["generate"] = self.gpus * self.engine.decode_rate(self.tokens)
        if setting.states == "stored":
            rates["features"] = forward

        # Operations of one row: attention across rows of a batch would be counted too.
        flops = self.memory.step(replace(setting, rows=1)).flops * setting.rows
        reading = self.step.target / self.device.bandwidth
        seconds = max(flops / self.device.flops, reading)
        owners = setting.processes if setting.stage else 1
        moved = _ADAMW_MOVES * self.step.trained / owners
        seconds += moved / self.device.bandwidth / self.trainer["gradient_accumulation_steps"]
        rates["train"] = setting.processes * (setting.rows * setting.length) / seconds

        if setting.states == "vllm":  # the server has as many GPUs as the trainer
            rates["vllm states"] = forward
        return rates

    def _hours(self, rates: dict[str, float]) -> dict[str, float]:
        """Hours by part."""
        setting = self.setting
        trainer = self.trainer
        tokens = self.conversations * self.tokens
        hours: dict[str, float] = {}
        if "generate" in rates:
            answers = self.conversations * (self.tokens - self.prompt)
            hours["generate"] = answers / rates["generate"] / 3600
        if "features" in rates:
            hours["features"] = tokens / rates["features"] / 3600

        if trainer["max_steps"] > 0:
            steps = trainer["max_steps"] * trainer["gradient_accumulation_steps"]
            per_row = setting.length if self.config.packing else self.tokens
            trained = steps * setting.rows * setting.processes * per_row
        else:
            trained = tokens * (1 - self.config.validation) * trainer["num_train_epochs"]
        hours["train"] = trained / rates["train"] / 3600
        if "vllm states" in rates:  # the target runs meanwhile
            hours["train"] = max(hours["train"], trained / rates["vllm states"] / 3600)
        if self.config.max_minutes:
            hours["train"] = self.config.max_minutes / 60
        return hours

    # -- advice ------------------------------------------------------------------------------------

    def changed(self, *words: str, **job: object) -> _Planner:
        """The plan with more overrides of the recipe, and other fields of the job.

        It shares the shapes and the dry steps.
        """
        fields: Json = {**vars(self.job), **job}
        return _Planner(self.recipe, [*self.overrides, *words], Job(**fields), self)

    def total(self) -> float:
        """Bytes of a process at its peak."""
        return self.memory.total(self.setting)

    def _advice(self) -> list[str]:
        """Changes in order of harm, each on top of those before it, up to one that fits.

        Every change is planned again, as the user will plan or train with it.
        """
        limit = self.device.memory
        starts = [_Change("", self)]
        if self.setting.states == "online" and not self.kind.loads_language_models:
            starts.append(_Change(self._states_advice(), self.changed(states="vllm")))
        ways = []
        for start in starts:
            ways.append([start, *start.planner._changes()])
        for way in ways[:]:
            ways.append([*way, *way[-1].planner._more_gpus()])

        smallest = float("inf")
        for way in ways:
            lines: list[str] = []
            for change in way:
                size = change.planner.total()
                smallest = min(smallest, size)
                if change.text:
                    lines.append(f"{change.text}: {size / 1e9:.1f} GB")
                if size <= limit:
                    return lines
        return [
            f"no such change fits {limit / 1e9:.0f} GB; the smallest takes {smallest / 1e9:.1f} GB: use larger GPUs"
        ]

    def _states_advice(self) -> str:
        """What replaces an online target, and what it takes."""
        more = "1 more GPU" if self.engine.gpus == 1 else f"{self.engine.gpus} more GPUs"
        text = f"states from vLLM (target_url, {more})"
        disk = self.changed(states="stored")._disk()
        free = self.job.disk
        if free is None or sum(disk.values()) <= 1e9 * free:
            text += f" or from disk (drafttrain features, {disk['states'] / 1e9:,.0f} GB of disk)"
        return f"{text} in place of an online target"

    def _changes(self) -> Iterator[_Change]:
        """Changes of the recipe, each on top of those before it.

        Of each group the first that fits, else the last; those that save nothing are left out.
        """
        setting = self.setting
        groups: list[list[tuple[str, Json]]] = []
        if issubclass(self.kind, DecoderDrafter):
            groups.append([("gradient_checkpointing=true", {})])
        if setting.processes > 1 and not setting.muon:
            groups.append([("", {"deepspeed": "2"})])
        if setting.eval_rows > 1:
            groups.append([("per_device_eval_batch_size=1", {})])

        pieces = self.trainer["gradient_accumulation_steps"]
        rows: list[tuple[str, Json]] = []
        lengths: list[tuple[str, Json]] = []
        for n in (2**power for power in range(1, 16)):
            if n <= setting.rows:
                batch = f"per_device_train_batch_size={setting.rows // n}"
                steps = f"gradient_accumulation_steps={n * pieces}"
                rows.append((f"{batch} {steps}", {}))
            if setting.length // n >= _SHORTEST:
                lengths.append((f"max_length={setting.length // n}", {}))
        groups += [rows, lengths]

        now = self
        for group in groups:
            chosen = now
            text = ""
            for words, job in group:
                chosen = now.changed(*words.split(), **job)
                text = words or "ZeRO-2 (--deepspeed 2)"
                if chosen.total() <= self.device.memory:
                    break
            if chosen.total() < 0.99 * now.total():
                now = chosen
                yield _Change(text, now)

    def _more_gpus(self) -> Iterator[_Change]:
        if self.setting.muon:  # each GPU would hold all of it
            return
        deepspeed = self.job.deepspeed
        if self.setting.stage <= 1:
            deepspeed = "2"
        for count in (2, 4, 8, 16):
            if count > self.setting.processes:
                more = self.changed(gpus=count, deepspeed=deepspeed)
                if more.setting.processes == count:  # else the target is spread over them
                    yield _Change(f"{count} GPUs under ZeRO-{more.setting.stage}", more)

    def _disk_advice(self, free: float) -> str:
        """Each change by which the run takes at most `free` bytes of disk, each planned again."""
        ways = {"save_total_limit=1": self.changed("save_total_limit=1")}
        if self.setting.states == "stored":
            url = "train with target_url in place of stored states"
            ways = {url: self.changed(states="vllm"), **ways}
            if self.job.store_dtype != "int8":
                int8 = "store states as int8 (drafttrain features --store-dtype int8)"
                ways = {int8: self.changed(store_dtype="int8"), **ways}
        sizes = {text: sum(planner._disk().values()) for text, planner in ways.items()}
        fitting = [f"{text}: {size / 1e9:,.1f} GB" for text, size in sizes.items() if size <= free]
        if fitting:
            return " or ".join(fitting)
        return f"the smallest change takes {min(sizes.values()) / 1e9:,.1f} GB: take fewer conversations"

    def _gpus_in_all(self) -> int:
        """GPUs that train, and those of an engine that runs the target for them."""
        if self.setting.states == "vllm":  # meanwhile
            return self.gpus + self.engine.gpus
        if self.setting.states == "none":
            return self.gpus
        return max(self.gpus, self.engine.gpus)  # the engine has written the answers before

    def _more_notes(self, memory: dict[str, float]) -> None:
        states = self.setting.states
        needed = self.engine.gpus
        if states == "vllm":
            room = f"at least {needed} of {self.device.memory / 1e9:.0f} GB"
            self.notes.append(f"vLLM needs GPUs of its own: {room}; hours assume as many as train")
        elif needed > self.gpus and states != "none":
            self.notes.append(
                f"the target needs {needed} GPUs in an engine that generates its answers"
            )
        if "evaluation" in memory:
            rows = self.setting.eval_rows
            lower = f"per_device_eval_batch_size={max(1, rows // 2)} (now {rows}) lowers it"
            self.notes.append(f"evaluation sets the peak; {lower}")
        if self.config.on_policy:
            self.notes.append(
                "on_policy: memory and time of the drafter's own responses are left out"
            )
        if self.width < 2 and states == "online":
            self.notes.append(
                "the target's weights are quantized; training is counted with 16 bits per weight"
            )


def _totaled(parts: dict[str, float], unit: float = 1.0) -> dict[str, float]:
    parts = {name: size / unit for name, size in parts.items()}
    return {**parts, "total": sum(parts.values())}


def _device_of(job: Job) -> str:
    """The device whose rates count.

    Raises:
        UserError: an unknown device, or none beside a memory that the default device does not have.
    """
    if job.device:
        if job.device not in DEVICES:
            raise UserError(
                f"device={job.device!r} is not one of {', '.join(DEVICES)}; choose the closest one"
            )
        return job.device

    memory = DEVICES[_DEVICE][2]
    given = job.gpu_memory
    if given is not None and abs(given - memory) > 0.1 * memory:
        alike = [name for name, rates in DEVICES.items() if abs(given - rates[2]) <= 0.1 * given]
        choice = f"--device {' or '.join(alike)}"
        if not alike:
            choice = f"the closest --device of {', '.join(DEVICES)}"
        raise UserError(
            f"gpu-memory={given:g} is not that of the default device, {_DEVICE} ({memory} GB); "
            f"name your own, for its rates: {choice}"
        )
    return _DEVICE


# -- the command -----------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Prints the plan, and writes it with --output.

    Raises:
        UserError: a recipe with an error.
    """
    output = asked_file(args, "plan")
    job = Job(**{name: getattr(args, name) for name in Job.__dataclass_fields__})
    found = plan(args.recipe, args.overrides, job)
    print_plan(found)

    content = {**asdict(found), "command": command_line()}
    wrote = []
    if output is not None:
        write_json(output, content)
        wrote.append(output)
    then = ""
    if found.fits:
        then = _next_command(found, args.recipe, args.overrides)
    conclude(content, wrote, then)
    return 0


def _next_command(found: Plan, recipe: str, overrides: Sequence[str]) -> str:
    """`train` where the data are there, else `prompts`."""
    data = Path(found.setting["data"]).expanduser()
    if not (data / "meta.json").is_file():
        return next_command(
            "prompts",
            source="magpie",
            target=found.setting["target"],
            count=found.setting["conversations"],
            output=data.with_name("prompts.jsonl"),
        )
    if Path(recipe).is_file():
        return next_command("train", recipe, *overrides)
    return next_command("train", *overrides, recipe=recipe)


def print_plan(found: Plan) -> None:
    """Prints a table each of memory, disk and time, then the largest batch, advice and notes."""
    console = wide_console()
    at = found.setting
    limit = at["gpu_memory_gb"]

    # What was planned.
    how = f"{at['rows']} x {at['length']} tokens, {at['precision']}"
    if at["zero_stage"]:
        how += f", ZeRO-{at['zero_stage']}"
    how += f", states {at['states']}"
    console.print(f"{found.recipe} on {at['gpus']} x {at['device']} of {limit:g} GB: {how}")
    shapes = ", ".join(f"{name} {_short(count)}" for name, count in found.parameters.items())
    console.print(f"parameters: {shapes}")

    # Tables of memory, disk and time.
    for place, sizes in (("memory of a process", found.memory_gb), ("disk", found.disk_gb)):
        parts = [[name, f"{size:.2f}"] for name, size in sizes.items()]
        console.print(table_of([place, "GB"], parts, right=True))
    rows = []
    for name, hours in found.hours.items():
        rate = ""
        if name in found.tokens_per_second:
            rate = f"{found.tokens_per_second[name]:,.0f}"
        rows.append([name, rate, f"{hours:.2f}"])
    title = "a roofline, not a measurement"
    console.print(table_of(["time", "tokens/s", "hours"], rows, title, right=True))

    # The verdict.
    total = found.memory_gb["total"]
    verdict = "fits" if found.fits else "does not fit"
    verdict += f": {total:.1f} of {limit:g} GB at the peak"
    more = at["gpus_in_all"] - at["gpus"]
    if more:
        work = "write the answers before training"
        if at["states"] == "vllm":
            work = "run vLLM meanwhile"
        verdict += f" of {at['gpus']} GPUs, and {more} more to {work}: {at['gpus_in_all']} in all"
    console.print(verdict)
    largest = []
    if found.largest["rows"]:
        largest.append(f"{found.largest['rows']} x {at['length']} tokens")
    if found.largest["length"]:
        largest.append(f"{at['rows']} x {found.largest['length']} tokens")
    if not largest:
        largest.append("not even one row")
    console.print(f"largest that fits: {' or '.join(largest)}")
    for number, line in enumerate(found.advice, 1):
        console.print(f"{number}. {line}")
    for line in found.notes:
        console.print(f"note: {line}")


def _short(count: int) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.2f}B"
    return f"{count / 1e6:.1f}M"
