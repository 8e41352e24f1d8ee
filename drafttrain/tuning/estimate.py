"""`drafttrain estimate`: the expected speed-up on other hardware, from sizes and a measured
acceptance profile (roofline).

A pass over N tokens of B sequences takes

    max( bytes / bandwidth,  operations / FLOP rate ) + overhead
    bytes       the weights that the tokens use, once, and the keys and values of B contexts
    operations  2 per weight and token, and 4 per head column, position and token for attention

so speculation is nearly free while bytes are the limit, and costs in proportion once operations
are. Real engines reach only a share of both limits: the efficiencies. Everything but the acceptance
is computed, not measured.

Source: the roofline model (Williams et al. 2009); speed-up tau / (c * gamma + cost of the wider
pass) as in Leviathan et al. 2023, arXiv 2211.17192.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from drafttrain.drafters.kinds import split_name
from drafttrain.drafters.registry import is_untrained
from drafttrain.errors import UserError, first_line
from drafttrain.evaluation.metrics import load_results
from drafttrain.evaluation.verdicts import crossover
from drafttrain.files import Json, check_json, open_tensors, read_json, write_json
from drafttrain.folders import inputs_of, output_file
from drafttrain.outcome import command_line, conclude, next_command
from drafttrain.reports.output import table_of, wide_console
from drafttrain.target import resolve_target
from drafttrain.tuning.hardware import DEVICES


@dataclass(frozen=True)
class Device:
    """Achieved bandwidth in bytes/s and flops in 1/s; memory in bytes; overhead in seconds per
    pass.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    overhead: float


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model that decide the cost of a pass.

    Attributes:
        always: weights that every token uses (attention, dense layers, head). expert: weights of
            one expert over all layers; experts, chosen: number of experts, and how many a token
            uses (0 without experts).
        kv: numbers of keys and values per position. columns: head columns over all layers, for
            attention's operations.
    """

    always: float
    expert: float = 0.0
    experts: int = 0
    chosen: int = 0
    kv: float = 0.0
    columns: float = 0.0

    @property
    def total(self) -> float:
        return self.always + self.expert * self.experts

    def read(self, tokens: float) -> float:
        """Weights used by `tokens` tokens: of the experts, the expected number of distinct ones."""
        share = 0.0
        if self.experts:
            share = 1 - (1 - self.chosen / self.experts) ** tokens
        return self.always + self.expert * self.experts * share

    def seconds(
        self,
        device: Device,
        tokens: float,
        batch: int,
        context: int,
        width: float,
    ) -> float:
        """A pass over `tokens` new tokens of `batch` sequences after `context` positions; width:
        bytes per number.
        """
        moved = width * (self.read(tokens) + batch * context * self.kv)
        done = (
            2 * tokens * (self.always + self.expert * self.chosen)
            + 4 * tokens * context * self.columns
        )
        return max(moved / device.bandwidth, done / device.flops) + device.overhead


_Number = Annotated[int, Field(ge=1, le=10**9)]


class ModelSizes(TypedDict, total=False):
    """The part of a decoder's config.json that decides its size."""

    hidden_size: _Number
    num_hidden_layers: _Number
    num_attention_heads: _Number
    num_key_value_heads: _Number | None
    head_dim: _Number | None
    num_local_experts: _Number | None
    num_experts: _Number | None
    num_experts_per_tok: _Number
    intermediate_size: _Number | None
    moe_intermediate_size: _Number | None
    vocab_size: _Number


def sizes_of(config: Json) -> Sizes:
    """Sizes by a decoder's config.json: gated MLPs, in all layers experts if in any. Raises
    UserError for missing keys.
    """
    config = {**config, **(config.get("text_config") or {})}
    check_json(config, "target: config.json", "give --target-params instead", ModelSizes)
    try:
        h, layers, heads = (
            config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        kv_heads = config.get("num_key_value_heads") or heads
        e = config.get("head_dim") or h // heads
        experts = config.get("num_local_experts") or config.get("num_experts") or 0
        intermediate = (config.get("moe_intermediate_size") if experts else None) or config[
            "intermediate_size"
        ]
        vocab = config["vocab_size"]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"config.json lacks {error}, so the size is not known; give --target-params instead"
        ) from error
    # The head is read in full; the embedding is a lookup.
    shared = layers * h * e * (2 * heads + 2 * kv_heads) + h * vocab
    mlp = layers * 3 * h * intermediate
    kv = 2 * layers * kv_heads * e
    columns = layers * heads * e
    if experts:
        return Sizes(shared, mlp, experts, config.get("num_experts_per_tok", 2), kv, columns)
    return Sizes(shared + mlp, kv=kv, columns=columns)


def drafter_params(folder: Path) -> float:
    """Weights of a saved drafter, without the target's embedding. Raises UserError for a folder
    without safetensors files.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"drafter={str(folder)!r} holds no safetensors file; give --drafter-params")
    count = 0.0
    for file in files:
        with open_tensors(file, "drafter", "give --drafter-params") as weights:
            count += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return count


@dataclass(frozen=True)
class Profile:
    """Measured acceptance. joint: share of rounds that accept at least k tokens, by k; nodes: of
    the tree that was used.
    """

    joint: tuple[float, ...]
    nodes: int

    def accepted_length(self, depth: int) -> float:
        """Tokens per round with trees cut at this depth."""
        return 1 + sum(self.joint[:depth])

    def nodes_at(self, depth: int) -> float:
        """Nodes of a tree cut at this depth, assuming an even spread."""
        if self.joint:
            return self.nodes * depth / len(self.joint)
        return 0.0


def profile_of(results: Json) -> Profile:
    """The acceptance profile in a results.json."""
    joint = tuple(results["overall"]["acceptance_by_depth"]["joint"])
    tree = results["decoding"].get("tree", {})
    depth = min(
        len(joint), tree.get("depth") or len(joint)
    )  # a match may be longer than the tree is deep
    return Profile(joint[:depth], max(tree.get("budget") or depth, depth))


def estimate(
    target: Sizes,
    drafter: float,
    profile: Profile,
    device: Device,
    batch: int,
    context: int,
    width: float,
    price: float | None,
) -> Json:
    """Estimates one batch size.

    Args:
        drafter: weights that a draft step reads. width: bytes per number.
        price: of the device per hour, in any currency; None leaves costs out.

    Returns:
        length: the fastest draft depth, 0 for none; speedup and accepted_length there;
            tokens_per_second: of all
        sequences; plain_tokens_per_second; round_ms, plain_ms; break_even: acceptance rate per
        token of a chain of the
        measured depth (at least 1) at which speculation starts to pay, None if it never does;
        bound: the limit of a round;
        fits: weights and caches fit the device; cost_per_million_tokens,
            plain_cost_per_million_tokens.
    """
    plain = target.seconds(device, batch, batch, context, width)
    small = Sizes(drafter)

    def round_seconds(depth: int, nodes: float) -> float:
        if depth == 0:
            return plain
        # A draft step expands about as many nodes per depth as the tree keeps.
        steps = depth * small.seconds(device, batch * max(1.0, nodes / depth), batch, 0, width)
        return target.seconds(device, batch * (1 + nodes), batch, context, width) + steps

    costs = {
        depth: round_seconds(depth, profile.nodes_at(depth))
        for depth in range(len(profile.joint) + 1)
    }
    best = max(costs, key=lambda depth: profile.accepted_length(depth) / costs[depth])
    tau = profile.accepted_length(best)
    seconds = costs[best]
    chain = max(1, len(profile.joint))
    tokens = batch * (1 + profile.nodes_at(best))
    moved = width * (target.read(tokens) + batch * context * target.kv) / device.bandwidth
    by_memory = moved + device.overhead >= target.seconds(device, tokens, batch, context, width)
    rates = {"": batch * tau / seconds, "plain_": batch / plain}  # tokens per second
    result = {
        "batch_size": batch,
        "length": best,
        "accepted_length": round(tau, 4),
        "speedup": round(tau * plain / seconds, 4),
        **{f"{side}tokens_per_second": round(rate, 2) for side, rate in rates.items()},
        "round_ms": round(1000 * seconds, 4),
        "plain_ms": round(1000 * plain, 4),
        "break_even": break_even(round_seconds(chain, chain) / plain, chain),
        "bound": "memory" if by_memory else "compute",
        "fits": width * (target.total + drafter + batch * context * target.kv) <= device.memory,
    }
    if price is not None:
        result |= {
            f"{side}cost_per_million_tokens": round(price / 3600 / rate * 1e6, 4)
            for side, rate in rates.items()
        }
    return result


def break_even(need: float, length: int) -> float | None:
    """Solves 1 + a + ... + a**length = need for the acceptance rate a of a chain; None if a = 1 is
    too little.
    """
    if need > 1 + length:
        return None
    low = 0.0
    high = 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**k for k in range(length + 1)) < need:
            low = middle
            high = high
        else:
            low = low
            high = middle
    return round(high, 4)


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises UserError for an unknown device, an unknown size, or a value out of
    range.
    """
    if args.output is not None:
        output = output_file(args.output, "estimate", inputs_of(args))
    else:
        output = None
    results = load_results(args.results)
    device = device_of(args)
    name = args.target or results["target"]
    if args.target_params:
        target = Sizes(args.target_params)
    else:
        target = sizes_of(target_config(name))
    drafter = args.drafter_params
    if drafter is None:
        name = split_name(args.drafter or results["drafter"])[0]
        folder = Path(name).expanduser()
        if not folder.is_dir() and not is_untrained(name):
            raise UserError(
                f"drafter={str(folder)!r}: no such folder; give --drafter FOLDER or --drafter-params"
            )
        drafter = 0.0
        if folder.is_dir():
            drafter = drafter_params(folder)
    profile = profile_of(results)
    width = args.bits / 8
    rows = [
        estimate(target, drafter, profile, device, batch, args.context, width, args.price)
        for batch in args.batches
    ]
    print_rows(rows, device, profile)
    content: Json = {"drafter_params": drafter, "rows": rows, "advice": advice(rows)}
    then = ""
    if output is not None:
        head = {"command": command_line(), "device": asdict(device), "target": asdict(target)}
        content = {**head, **content}
        write_json(output, content)
        name = split_name(args.drafter or results["drafter"])[0]
        then = next_command(
            "export",
            drafter=name,
            format="vllm",
            output=output.with_name("export"),
            schedule=output,
        )
    conclude(content, [output] if output else [], then)
    return 0


def device_of(args: argparse.Namespace) -> Device:
    """The device that the flags describe. Raises UserError for an unknown one without --bandwidth
    and --tflops.
    """
    given = (args.bandwidth, args.tflops, args.memory)
    known = DEVICES.get(args.device.lower(), (None, None, None))
    bandwidth, tflops, memory = (
        own if own is not None else table for own, table in zip(given, known, strict=True)
    )
    if not bandwidth or not tflops:
        names = ", ".join(DEVICES)
        raise UserError(
            f"device={args.device!r} is not one of {names}; choose one, or give --bandwidth and --tflops"
        )
    return Device(
        args.device,
        1e9 * bandwidth * args.memory_efficiency * args.devices,
        1e12 * tflops * args.compute_efficiency * args.devices,
        1e9 * memory * args.devices if memory else float("inf"),
        1e-6 * args.overhead_us,
    )


def target_config(
    name: str,
    key: str = "target",
    fix: str = "give --target-params instead",
) -> Json:
    """A model's config.json, from a file, a folder, the cache or the Hub. Raises UserError if there
    is none.
    """
    path = Path(name).expanduser()
    try:
        if path.suffix != ".json":
            path = Path(resolve_target(name)) / "config.json"
        if not path.is_file() and not path.parent.is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(name, "config.json"))
    except (OSError, ValueError) as error:
        raise UserError(f"{key}={name!r}: no config.json ({first_line(error)}); {fix}") from error
    return {**read_json(path, key, fix)}


def advice(rows: Sequence[Json]) -> str:
    """The batch sizes at which speculation should be off, in words."""
    sizes = [row["batch_size"] for row in rows]
    off = [row["batch_size"] for row in rows if row["length"] == 0 or row["speedup"] <= 1]
    points = [(row["batch_size"], {"speedup_vs_fastest": row["speedup"]}) for row in rows]
    text = f"estimated, not measured: speculation {crossover('batch size', points)}"
    if not off:
        return text
    if off == sizes[-len(off) :]:
        at = f"from batch size {off[0]} on"
    else:
        at = f"at {', '.join(map(str, off))}"
    return f"{text}: disable it {at}" + (
        "; elsewhere use the length of each row" if len(off) < len(sizes) else ""
    )


def print_rows(rows: Sequence[Json], device: Device, profile: Profile) -> None:
    """Prints a table with a line per batch size, and when to disable speculation."""
    headings = [
        "batch",
        "length",
        "speed-up",
        "tokens/s",
        "plain",
        "bound",
        "break-even\nacceptance",
    ]
    forms = [
        "{batch_size}",
        "{length}",
        "{speedup:.2f}x",
        "{tokens_per_second:,.0f}",
        "{plain_tokens_per_second:,.0f}",
    ]
    forms += ["{bound}{large}", "{never}"]
    if "cost_per_million_tokens" in rows[0]:
        headings.append("cost of 1M\ntokens (plain)")
        forms.append("{cost_per_million_tokens:.3g} ({plain_cost_per_million_tokens:.3g})")
    shown = []
    for row in rows:
        never = "never"
        if row["break_even"] is not None:
            never = f"{row['break_even']:.0%}"
        if row["fits"]:
            large = ""
        else:
            large = ", too large"
        shown.append([form.format(**row, never=never, large=large) for form in forms])
    console = wide_console()
    console.print(table_of(headings, shown, f"{device.name}: estimate, not measured"))
    length = max(1, len(profile.joint))
    console.print(f"break-even: acceptance rate per token from which a chain of {length} pays")
    console.print(advice(rows), soft_wrap=True)
