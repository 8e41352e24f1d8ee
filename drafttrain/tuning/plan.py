"""`drafttrain plan`: memory, disk and hours of a recipe before anything is downloaded, and what to
change if it does not fit.

    plan_recipe.py         the target's and drafter's shapes, without weights
    plan_memory.py         bytes of a process by part, from the training step itself on tensors without data
    here                   disk from counts of tokens and weights; hours from a roofline; the largest batch; advice

A roofline: operations / (FLOP rate x efficiency) or bytes / (bandwidth x efficiency), whichever is
longer; nothing is measured.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from drafttrain.config import TrainerKeys, load_config
from drafttrain.data.int8_rows import value_bytes
from drafttrain.data.store import read_meta, stored_features
from drafttrain.drafters.common.trainable import DecoderDrafter
from drafttrain.drafters.registry import kind_class
from drafttrain.errors import UserError
from drafttrain.files import Json, write_json
from drafttrain.folders import inputs_of, output_file
from drafttrain.outcome import command_line, conclude, next_command
from drafttrain.recipes import recipe_path
from drafttrain.reports.output import table_of, wide_console
from drafttrain.target.devices import resolve_dtype
from drafttrain.target.loading import loading
from drafttrain.training.arguments import KEYS, check_recipe
from drafttrain.tuning.estimate import Device, Sizes
from drafttrain.tuning.hardware import DEVICES
from drafttrain.tuning.plan_flags import Job
from drafttrain.tuning.plan_memory import Memory, Setting, States, buckets_of
from drafttrain.tuning.plan_recipe import (
    deepspeed_of,
    drafter_of,
    model_sizes,
    read_config,
    shipped_config,
    stored_bits,
)

# of a data set that does not exist yet; tokens of a conversation on average
_CONVERSATIONS = 60_000
_TOKENS = 1024
_SEQUENCES = 256  # that an engine generates at a time, memory permitting
_ENGINE_SHARE = 0.9  # of a GPU's memory that an engine fills
_STATE_BYTES = {
    "sgd": 0,
    "adafactor": 0,
    "adamw_8bit": 2,
    "adamw_bnb_8bit": 2,
}  # per weight; AdamW's: 8
# bytes per weight and optimizer step: weight, gradient and two states are read, all but one written
_ADAMW_MOVES = 28
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


def plan(recipe: str, overrides: Sequence[str] = (), job: Job | None = None) -> Plan:
    """Plans a training run from its recipe and overrides, which are those of `drafttrain train`.

    Raises:
        UserError: a recipe, device or file with an error, or a target or drafter whose shapes are
            not known.
    """
    return replace(
        _Planner(str(recipe_path(recipe)), overrides, job or Job()).plan(),
        recipe=recipe,
    )


class _Planner:
    """One plan: the target's shapes, the data's counts, and the device, which its parts share."""

    def __init__(self, recipe: str, overrides: Sequence[str], job: Job):
        self.recipe, self.job, self.notes = recipe, job, list[str]()
        self.config = config = load_config(recipe, list(overrides), KEYS)
        check_recipe(config)
        self.has_layers = issubclass(kind_class(config.kind), DecoderDrafter)
        if job.device not in DEVICES:
            raise UserError(
                f"device={job.device!r} is not one of {', '.join(DEVICES)}; choose the closest one"
            )
        if config.sequence_parallel > 1:
            raise UserError(
                f"sequence_parallel={config.sequence_parallel}: rows that processes share are not planned; set "
                "sequence_parallel=1, and max_length to a process's part of a row"
            )
        self.trainer: Json = {**vars(TrainerKeys()), **config.trainer}
        shipped = shipped_config(recipe, overrides, "target", "target.json")
        self.target = read_config(config.target, job.target_config, shipped)
        with (
            loading(f"target={config.target!r}", "give another --target-config"),
            torch.device("meta"),
        ):
            model = AutoModelForCausalLM.from_config(self.target)
        self.sizes, self.weights = (
            model_sizes(model, self.target),
            sum(x.numel() for x in model.parameters()),
        )
        self.width = stored_bits(self.target) / 8  # bytes per weight of the target's files
        build, note = drafter_of(config, recipe, overrides, job.init_config)
        self.notes += [note] if note else []
        self.memory = Memory(self.target, config.kind, config.loss, build)
        bandwidth, tflops, memory = DEVICES[job.device]
        rates = 1e9 * bandwidth * job.memory_efficiency, 1e12 * tflops * job.compute_efficiency
        self.device = Device(job.device, *rates, 1e9 * (job.gpu_memory or memory), 5e-5)
        self._read_data()
        self.setting = self._setting()
        self.step = self.memory.step(self.setting)

    # -- the recipe and its data -------------------------------------------------------------------

    def _read_data(self) -> None:
        """Sets `conversations`, their `tokens` and `prompt` tokens on average, and `stored`,
        settings of stored states.
        """
        job = self.job
        data = Path(self.config.data).expanduser()
        exists = (data / "meta.json").is_file()
        if exists:
            counts = read_meta(data).get("counts") or {}
        else:
            counts = {}
        held = counts.get("conversations", 0)
        answers = counts.get("response_tokens", 0) // max(held, 1)
        self.conversations = job.conversations or held or _CONVERSATIONS
        tokens = job.tokens or (answers + job.prompt_tokens if held else _TOKENS)
        self.tokens = min(tokens, self.config.max_length)
        self.prompt = min(job.prompt_tokens, max(self.tokens - 2, 0))
        if exists:
            self.stored = stored_features(data)
        else:
            self.stored = None
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
        job = self.job
        states = self._states()
        zero, launched = deepspeed_of(
            job.deepspeed,
            trainer,
            1 if config.target_device_map else job.gpus,
        )
        self.gpus = job.gpus or launched or 1
        if launched and not job.gpus:
            processes = launched
        else:
            processes = self.gpus
        if config.target_device_map and not launched:
            processes = 1
        if any("offload" in key for key in zero.get("zero_optimization") or {}):
            self.notes.append(
                "what DeepSpeed offloads to the host is counted as if it stayed on the GPU"
            )
        gpu = not job.device.startswith("cpu")
        half = bool(trainer.get("bf16", trainer.get("fp16") or gpu))
        fixed = (zero.get("bf16") or {}).get("enabled", "auto")
        if gpu and config.dtype == "auto":
            dtype = torch.bfloat16
        else:
            dtype = resolve_dtype(config.dtype, torch.device("cpu"))
        # A draft model may copy the target's layers, and writes answers that the whole target
        # scores.
        copies = states == "none" or kind_class(config.kind).loads_language_models
        whole = bool(config.on_policy) or (
            copies and not (config.target_url and config.init != "target")
        )
        recomputes = gpu and states == "online" and self.has_layers
        cache = 1e9 * config.cache_size(gpu)
        return Setting(
            rows=trainer["per_device_train_batch_size"],
            length=config.max_length,
            eval_rows=trainer["per_device_eval_batch_size"] if config.validation else 0,
            prompt=0 if states == "none" else self.prompt,
            gpu=gpu,
            target_dtype=dtype,
            half=half if fixed == "auto" else bool(fixed),
            checkpointing=bool(trainer.get("gradient_checkpointing", recomputes)),
            states=states,
            loaded=self.weights * dtype.itemsize if whole else 0,
            shards=max(self.gpus // processes, 1) if config.target_device_map else 1,
            processes=processes,
            stage=(zero.get("zero_optimization") or {}).get("stage", 0),
            buckets=buckets_of(zero),
            accumulates=trainer["gradient_accumulation_steps"] > 1,
            state_bytes=_STATE_BYTES.get(str(trainer.get("optim", "")), 8),
            kept=cache,
            ahead=1e9 * config.prefetch_gb,
            data_tokens=self.conversations * self.tokens,
        )

    # -- figures -----------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The figures of the recipe's setting, the largest batch, and advice if it does not fit."""
        setting = self.setting
        limit = self.device.memory
        free = self.job.disk
        memory, disk, (rates, hours) = self.memory.parts(setting), self._disk(), self._time()
        fits_memory = sum(memory.values()) <= limit
        fits_disk = free is None or sum(disk.values()) <= 1e9 * free
        longest = getattr(self.target.get_text_config(), "max_position_embeddings", None) or 2**20
        largest = {
            "rows": self.memory.most(setting, limit, "rows", 4096),
            "length": self.memory.most(setting, limit, "length", longest, _UNIT),
        }
        if fits_memory:
            advice = []
        else:
            advice = list(self._advice())
        if not fits_disk:
            advice.append(f"--disk {free:g} GB is too small: {self._disk_advice(disk)}")
        self._more_notes(memory, largest)
        if setting.gpu:
            if setting.half:
                precision = "bfloat16"
            else:
                precision = "float32"
        else:
            precision = "float32"
        shown = {
            "target": self.config.target, "data": self.config.data, "gpus": self.gpus,
            "device": self.device.name, "gpu_memory_gb": limit / 1e9, "processes": setting.processes,
            "zero_stage": setting.stage, "precision": precision, "gradient_checkpointing": setting.checkpointing,
            "states": setting.states, "rows": setting.rows, "length": setting.length, "conversations": self.conversations,
            "tokens": self.tokens, "efficiency": {"compute": self.job.compute_efficiency, "memory": self.job.memory_efficiency},
        }  # fmt: skip
        active = round(self.sizes.always + self.sizes.expert * self.sizes.chosen)
        parameters = {"target": self.weights, "active": active, "drafter": self.step.trained}
        fits = fits_memory and fits_disk
        figures = _totaled(memory, 1e9), _totaled(disk, 1e9), _totaled(hours), rates
        return Plan(self.recipe, shown, parameters, *figures, fits, largest, advice, self.notes)

    def _disk(self) -> dict[str, float]:
        """Bytes by part. Token ids take about as many characters as the largest one, once as text
        and once in Arrow's cache.
        """
        tokens = self.conversations * self.tokens
        trained = self.step.trained
        text = self.setting.states == "none"
        width = len(str(self.target.get_text_config().vocab_size)) + 8
        kept = (self.trainer["save_total_limit"] or 10) + 1  # and the one that is being written
        h = self.target.get_text_config().hidden_size
        row = (
            1.01 * value_bytes(self.job.store_dtype, h) * self.step.state_width
        )  # as drafttrain features counts
        parts = {
            "target": self.weights * self.width,
            "prompts": 0.0 if text else self.conversations * (5.0 * self.prompt + 100),
            "answers": tokens * width + 200.0 * self.conversations,
            "states": row * tokens if self.setting.states == "stored" else 0.0,
            "checkpoints": kept * (12.0 + 2 * bool(self.setting.stage)) * trained,
            "drafter": 4.0 * trained,
        }
        return {name: size for name, size in parts.items() if size}

    def _time(self) -> tuple[dict[str, float], dict[str, float]]:
        """Tokens per second and hours by part, by the roofline."""
        setting = self.setting
        device = self.device
        trainer = self.trainer
        tokens = self.conversations * self.tokens
        rates = dict[str, float]()
        hours = dict[str, float]()
        if setting.states != "none":
            rates["generate"] = self.gpus * self._decode_rate()
            hours["generate"] = (
                self.conversations * (self.tokens - self.prompt) / rates["generate"] / 3600
            )
        forward = self.gpus * self._forward_rate()
        if setting.states == "stored":
            rates["features"] = forward
            hours["features"] = tokens / forward / 3600
        batch = setting.rows * setting.length
        pieces = trainer["gradient_accumulation_steps"]
        # Operations of one row: attention across rows of a batch would be counted too.
        flops = self.memory.step(replace(setting, rows=1)).flops * setting.rows
        seconds = max(flops / device.flops, self.step.target / device.bandwidth)
        moved = _ADAMW_MOVES * self.step.trained / (setting.processes if setting.stage else 1)
        seconds += moved / device.bandwidth / pieces
        rates["train"] = setting.processes * batch / seconds
        if trainer["max_steps"] > 0:
            rows = trainer["max_steps"] * pieces * setting.rows * setting.processes
            trained = rows * (setting.length if self.config.packing else self.tokens)
        else:
            trained = tokens * (1 - self.config.validation) * trainer["num_train_epochs"]
        hours["train"] = trained / rates["train"] / 3600
        if (
            setting.states == "vllm"
        ):  # the server's GPUs, as many as the trainer's, run the target meanwhile
            rates["vllm states"] = forward
            hours["train"] = max(hours["train"], trained / forward / 3600)
        if self.config.max_minutes:
            hours["train"] = self.config.max_minutes / 60
        return rates, hours

    def _server_gpus(self) -> int:
        """GPUs that the target's weights need in an engine, a power of two."""
        least = self.weights * self.width / (0.8 * self.device.memory)
        return 2 ** max(0, math.ceil(math.log2(max(least, 1e-9))))

    def _decode_rate(self) -> float:
        """Response tokens per second and GPU of an engine that holds as many sequences as its
        memory.
        """
        needed = self._server_gpus()
        free = needed * _ENGINE_SHARE * self.device.memory - self.weights * self.width
        batch = max(1, min(_SEQUENCES, int(free / max(2 * self.sizes.kv * self.tokens, 1))))
        return batch / self._pass_seconds(batch, batch, self.tokens // 2, needed) / needed

    def _forward_rate(self) -> float:
        """Tokens per second and GPU of the target's forward over whole conversations."""
        needed = self._server_gpus()
        batch = max(1, 8192 // max(self.tokens, 1))
        return (
            batch
            * self.tokens
            / self._pass_seconds(batch * self.tokens, 0, self.tokens // 2, needed)
            / needed
        )

    def _pass_seconds(self, tokens: int, contexts: int, context: int, gpus: int) -> float:
        """A forward over `tokens` tokens on several GPUs, without loss; keys and values of
        `contexts` sequences are read.
        """
        sizes: Sizes = self.sizes
        moved = self.width * sizes.read(tokens) + 2 * contexts * context * sizes.kv
        done = (
            2 * tokens * (sizes.always + sizes.expert * sizes.chosen)
            + 4 * tokens * context * sizes.columns
        )
        return (
            max(moved / self.device.bandwidth, done / self.device.flops) / gpus
            + self.device.overhead
        )

    # -- advice ------------------------------------------------------------------------------------

    def _advice(self) -> Iterator[str]:
        """Changes in order of harm, each on top of those before it, up to one that fits."""
        first = self.setting
        limit = self.device.memory
        total = self.memory.total
        starts = [("", first)]
        if first.states == "online" and not kind_class(self.config.kind).loads_language_models:
            away = replace(first, states="vllm", shards=1)
            text = "states from vLLM (target_url) or from disk (drafttrain features) in place of an online target"
            starts.append((text, away))
        ways = [[start, *self._changes(start[1])] for start in starts]
        smallest = float("inf")
        for way in [*ways, *([*way, *self._more_gpus(way[-1][1])] for way in ways)]:
            lines = list[str]()
            for text, setting in way:
                smallest = min(smallest, size := total(setting))
                if text:
                    lines += [f"{text}: {size / 1e9:.1f} GB"]
                else:
                    lines += []
                if size <= limit:
                    yield from lines
                    return
        yield f"no such change fits {limit / 1e9:.0f} GB; the smallest takes {smallest / 1e9:.1f} GB: use larger GPUs"

    def _changes(self, setting: Setting) -> Iterator[tuple[str, Setting]]:
        """Changes of the recipe, each on top of those before it; those that save nothing are left
        out.
        """
        total = self.memory.total
        pieces = self.trainer["gradient_accumulation_steps"]
        halves = [2**n for n in range(1, 16)]
        rows = [(setting.rows // n, n * pieces) for n in halves if n <= setting.rows]
        lengths = [setting.length // n for n in halves if setting.length // n >= _SHORTEST]
        # Of each group the first that fits, else the last.
        groups: list[list[tuple[str, Json]]] = [
            [("gradient_checkpointing=true", {"checkpointing": True})] if self.has_layers else [],
            [("ZeRO-2 (--deepspeed 2)", _zero2())] if setting.processes > 1 else [],
            [("per_device_eval_batch_size=1", {"eval_rows": min(setting.eval_rows, 1)})],
            [
                (f"per_device_train_batch_size={n} gradient_accumulation_steps={m}", {"rows": n, "accumulates": True})
                for n, m in rows
            ],
            [(f"max_length={n}", {"length": n}) for n in lengths],
        ]  # fmt: skip
        for group in filter(None, groups):
            steps = [(text, replace(setting, **change)) for text, change in group]
            text, changed = next(
                (step for step in steps if total(step[1]) <= self.device.memory), steps[-1]
            )
            if total(changed) < 0.99 * total(setting):
                setting = changed
                yield text, setting

    def _more_gpus(self, setting: Setting) -> Iterator[tuple[str, Setting]]:
        for count in (2, 4, 8, 16):
            if count > setting.processes:
                if setting.stage > 1:
                    zero = {}
                else:
                    zero = _zero2()
                yield (
                    f"{count} GPUs under ZeRO-{zero.get('stage', setting.stage)}",
                    replace(setting, processes=count, **zero),
                )

    def _disk_advice(self, disk: dict[str, float]) -> str:
        if "states" in disk and self.job.store_dtype != "int8":
            return "store states as int8 (drafttrain features --store-dtype int8), or train with target_url"
        return "set save_total_limit lower, or take fewer conversations"

    def _more_notes(self, memory: dict[str, float], largest: dict[str, int]) -> None:
        needed = self._server_gpus()
        config = self.config
        if self.setting.states == "vllm":
            room = f"at least {needed} of {self.device.memory / 1e9:.0f} GB"
            self.notes.append(f"vLLM needs GPUs of its own: {room}; hours assume as many as train")
        elif needed > self.gpus and self.setting.states != "none":
            self.notes.append(
                f"the target needs {needed} GPUs in an engine that generates its answers"
            )
        if "evaluation" in memory:
            rows = self.setting.eval_rows
            lower = f"per_device_eval_batch_size={max(1, rows // 2)} (now {rows}) lowers it"
            self.notes.append(f"evaluation sets the peak; {lower}")
        if config.on_policy:
            self.notes.append(
                "on_policy: memory and time of the drafter's own responses are left out"
            )
        if self.width < 2 and self.setting.states == "online":
            self.notes.append(
                "the target's weights are quantized; training is counted with 16 bits per weight"
            )


def _zero2() -> Json:
    """The fields of a `Setting` under configs/deepspeed/zero2.json."""
    return {"stage": 2, "buckets": buckets_of(deepspeed_of("2", {}, 1)[0])}


def _totaled(parts: dict[str, float], unit: float = 1.0) -> dict[str, float]:
    parts = {name: size / unit for name, size in parts.items()}
    return {**parts, "total": sum(parts.values())}


# -- the command -----------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """The command: prints the plan, and writes it with --output. Raises UserError for a recipe with
    an error.
    """
    if args.output is not None:
        output = output_file(args.output, "plan", inputs_of(args))
    else:
        output = None
    job = Job(**{name: getattr(args, name) for name in Job.__dataclass_fields__})
    found = plan(args.recipe, args.overrides, job)
    print_plan(found)
    content = {**asdict(found), "command": command_line()}
    if output is not None:
        write_json(output, content)
    data = Path(found.setting["data"]).expanduser()
    then = ""
    if found.fits and (data / "meta.json").is_file():
        named = Path(args.recipe).is_file()
        then = next_command(
            "train",
            *[args.recipe] * named,
            *args.overrides,
            recipe="" if named else args.recipe,
        )
    elif found.fits:
        count = found.setting["conversations"]
        prompts = data.with_name("prompts.jsonl")
        then = next_command(
            "prompts",
            source="magpie",
            target=found.setting["target"],
            count=count,
            output=prompts,
        )
    conclude(content, [output] if output else [], then)
    return 0


def print_plan(found: Plan) -> None:
    """Prints a table each of memory, disk and time, then the largest batch, advice and notes."""
    console = wide_console()
    at = found.setting
    total = found.memory_gb["total"]
    limit = at["gpu_memory_gb"]
    zero = ""
    if at["zero_stage"]:
        zero = f", ZeRO-{at['zero_stage']}"
    how = f"{at['rows']} x {at['length']} tokens, {at['precision']}{zero}, states {at['states']}"
    console.print(f"{found.recipe} on {at['gpus']} x {at['device']} of {limit:g} GB: {how}")
    shapes = ", ".join(f"{name} {_short(count)}" for name, count in found.parameters.items())
    console.print(f"parameters: {shapes}")
    parts = [[name, f"{size:.2f}"] for name, size in found.memory_gb.items()]
    console.print(table_of(["memory of a process", "GB"], parts, right=True))
    console.print(
        table_of(
            ["disk", "GB"],
            [[name, f"{size:.2f}"] for name, size in found.disk_gb.items()],
            right=True,
        )
    )
    rows = [
        [
            name,
            f"{found.tokens_per_second[name]:,.0f}" if name in found.tokens_per_second else "",
            f"{hours:.2f}",
        ]
        for name, hours in found.hours.items()
    ]
    title = "a roofline, not a measurement"
    console.print(table_of(["time", "tokens/s", "hours"], rows, title, right=True))
    console.print(
        f"{'fits' if found.fits else 'does not fit'}: {total:.1f} of {limit:g} GB at the peak"
    )
    sizes = [(found.largest["rows"], at["length"]), (at["rows"], found.largest["length"])]
    largest = " or ".join(f"{rows} x {length} tokens" for rows, length in sizes if rows and length)
    console.print(f"largest that fits: {largest or 'not even one row'}")
    for number, line in enumerate(found.advice, 1):
        console.print(f"{number}. {line}")
    for line in found.notes:
        console.print(f"note: {line}")


def _short(count: int) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.2f}B"
    return f"{count / 1e6:.1f}M"
