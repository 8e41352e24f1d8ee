"""`drafttrain estimate`: the speed-up to expect on other hardware, from sizes and a measured acceptance profile (roofline).

A pass over N tokens of B sequences takes

    max( bytes / bandwidth,  operations / FLOP rate ) + overhead
    bytes       the weights that the tokens use, once, and the keys and values of B contexts
    operations  2 per weight and token, and 4 per head column, position and token for attention

so speculation is nearly free while bytes decide, and costs in proportion where operations do. It is an upper bound in kind:
real engines reach a share of both limits, which the efficiencies stand for. Nothing here was measured but the acceptance.

Source: the roofline model (Williams et al. 2009); speed-up tau / (c * gamma + cost of the wider pass) as in Leviathan et al.
2023, arXiv 2211.17192.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from drafttrain.drafters.registry import is_untrained
from drafttrain.errors import UserError
from drafttrain.files import write_json
from drafttrain.reports.console import wide_console
from drafttrain.reports.report import load_results
from drafttrain.target import resolve_target

HELP = """Expected speed-up, cost and break-even on other hardware, from sizes and a measured acceptance profile.

  drafttrain estimate --target Qwen/Qwen3-8B --drafter runs/drafter --results results.json --device h100 --price 2.5
  drafttrain estimate --target-params 8e9 --drafter-params 4e8 --results results.json --bandwidth 1000 --tflops 165

Prints a line per batch size: the draft length to use there, 0 where speculation should be off. Figures are a roofline model's,
not measurements."""

# Memory bandwidth in GB/s, dense 16-bit TFLOP/s, memory in GB: makers' data sheets; CPUs and unified memory: typical.
DEVICES = {
    "h100": (3350, 989, 80),  # SXM
    "h200": (4800, 989, 141),
    "a100": (2039, 312, 80),  # SXM
    "l4": (300, 121, 24),
    "rtx4090": (1008, 165, 24),
    "m3max": (400, 28, 128),
    "m2ultra": (800, 54, 192),
    "cpu-desktop": (80, 1.5, 64),  # two channels of DDR5, AVX2
    "cpu-server": (300, 20, 512),  # eight channels of DDR5, AMX
}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Device:
    """bandwidth in bytes/s and flops in 1/s, both as reached; memory in bytes; overhead in seconds per pass."""

    name: str
    bandwidth: float
    flops: float
    memory: float
    overhead: float


@dataclass(frozen=True)
class Sizes:
    """What a pass reads and computes.

    Attributes:
        always: weights that every token uses (attention, dense layers, the head). expert: weights of one expert over all
            layers; experts, chosen: how many there are, and how many a token uses (0 without experts).
        kv: numbers of keys and values per position. columns: head columns over all layers, for attention's operations.
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
        """Weights that so many tokens use: of experts, the expected number of different ones."""
        if not self.experts:
            return self.always
        return self.always + self.expert * self.experts * (1 - (1 - self.chosen / self.experts) ** tokens)

    def seconds(self, device: Device, tokens: float, batch: int, context: int, width: float) -> float:
        """A pass over `tokens` new tokens of `batch` sequences behind `context` positions; width: bytes per number."""
        moved = width * (self.read(tokens) + batch * context * self.kv)
        done = 2 * tokens * (self.always + self.expert * self.chosen) + 4 * tokens * context * self.columns
        return max(moved / device.bandwidth, done / device.flops) + device.overhead


def sizes_of(config: dict[str, Any]) -> Sizes:
    """Sizes of a decoder-only model from its config.json, with gated MLPs where it does not say otherwise.

    Raises:
        UserError: a config without the usual keys.
    """
    config = {**config, **config.get("text_config", {})}
    try:
        h, layers, heads = (config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        vocab = config["vocab_size"]
        kv_heads = config.get("num_key_value_heads") or heads
        e = config.get("head_dim") or h // heads
        experts = config.get("num_local_experts") or config.get("num_experts") or 0
        attention = h * e * (2 * heads + 2 * kv_heads)
        mlp = (
            3
            * h
            * (
                config.get("moe_intermediate_size") or config["intermediate_size"]
                if experts
                else config["intermediate_size"]
            )
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"config.json lacks {error}, so the size is not known; give --target-params instead") from error
    # The head is read, the embedding looked up. Layers of mixture models are taken as all of them having experts.
    shared = layers * attention + h * vocab
    if experts:
        chosen = config.get("num_experts_per_tok", 2)
        return Sizes(shared, layers * mlp, experts, chosen, 2 * layers * kv_heads * e, layers * heads * e)
    return Sizes(shared + layers * mlp, 0.0, 0, 0, 2 * layers * kv_heads * e, layers * heads * e)


def drafter_params(folder: Path) -> float:
    """Weights of a saved drafter, from its files' headers: what a draft step reads, its target's embedding left out.

    Raises:
        UserError: no safetensors file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"drafter={str(folder)!r} holds no safetensors file; give --drafter-params")
    count = 0
    for file in files:
        with file.open("rb") as weights:  # eight bytes say how long the JSON header is
            header = json.loads(weights.read(int.from_bytes(weights.read(8), "little")))
        count += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return float(count)


@dataclass(frozen=True)
class Profile:
    """Measured acceptance. joint: share of rounds that accept k tokens or more, by k; nodes: of the tree that was used."""

    joint: tuple[float, ...]
    nodes: int

    def accepted_length(self, depth: int) -> float:
        """Tokens a round with trees cut at this depth."""
        return 1 + sum(self.joint[:depth])

    def nodes_at(self, depth: int) -> float:
        """Nodes of a tree cut at this depth, as if they were spread evenly."""
        return self.nodes * depth / len(self.joint) if self.joint else 0.0


def profile_of(results: dict[str, Any]) -> Profile:
    joint = tuple(results["overall"]["acceptance_by_depth"]["joint"])
    tree = results["decoding"].get("tree", {})
    # A match may be longer than the tree is deep; depths that no tree offers are left out.
    depth = min(len(joint), tree.get("depth") or len(joint))
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
) -> dict[str, Any]:
    """One batch size's figures.

    Args:
        drafter: weights that a draft step reads. width: bytes per number.
        price: of the device per hour, in any currency; None leaves costs out.

    Returns:
        length: the draft depth that is fastest, 0 for none; speedup and accepted_length there; tokens_per_second: of all
        sequences; plain_tokens_per_second; round_ms, plain_ms; break_even: acceptance rate per token of a chain of the
        measured depth (at least 1) from which on speculation pays, None if no rate does; bound: what limits a round;
        fits: weights and caches fit the device; cost_per_million_tokens, plain_cost_per_million_tokens.
    """
    plain = target.seconds(device, batch, batch, context, width)
    small = Sizes(drafter)

    def round_seconds(depth: int, nodes: float) -> float:
        if depth == 0:
            return plain
        # A step opens about as many nodes per depth as the tree keeps.
        steps = depth * small.seconds(device, batch * max(1.0, nodes / depth), batch, 0, width)
        return target.seconds(device, batch * (1 + nodes), batch, context, width) + steps

    costs = {depth: round_seconds(depth, profile.nodes_at(depth)) for depth in range(len(profile.joint) + 1)}
    best = max(costs, key=lambda depth: profile.accepted_length(depth) / costs[depth])
    tau, seconds = profile.accepted_length(best), costs[best]
    chain = max(1, len(profile.joint))
    need = round_seconds(chain, chain) / plain
    tokens = batch * (1 + profile.nodes_at(best))
    moved = width * (target.read(tokens) + batch * context * target.kv) / device.bandwidth
    rates = {"tokens_per_second": batch * tau / seconds, "plain_tokens_per_second": batch / plain}
    kept = width * (target.total + drafter + batch * context * target.kv)
    result = {
        "batch_size": batch,
        "length": best,
        "accepted_length": round(tau, 4),
        "speedup": round(tau * plain / seconds, 4),
        **{name: round(rate, 2) for name, rate in rates.items()},
        "round_ms": round(1000 * seconds, 4),
        "plain_ms": round(1000 * plain, 4),
        "break_even": break_even(need, chain),
        "bound": "memory"
        if moved + device.overhead >= target.seconds(device, tokens, batch, context, width)
        else "compute",
        "fits": kept <= device.memory,
    }
    if price is not None:
        costs_of = {
            "cost_per_million_tokens": "tokens_per_second",
            "plain_cost_per_million_tokens": "plain_tokens_per_second",
        }
        result |= {name: round(price / 3600 / rates[rate] * 1e6, 4) for name, rate in costs_of.items()}
    return result


def break_even(need: float, length: int) -> float | None:
    """The acceptance rate a of a chain with 1 + a + ... + a**length = need; None if even a = 1 is too little."""
    if need > 1 + length:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(length + 1)) < need else (low, middle)
    return round(high, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--results", required=True, help="a results.json of this drafter: its acceptance profile")
    add("--target", help="short name, folder, Hub id or config.json (default: what the results name)")
    add("--target-params", type=float, help="weights instead, such as 8e9; contexts then cost nothing")
    add("--drafter", help="the drafter's folder (default: what the results name)")
    add("--drafter-params", type=float, help="weights instead, such as 4e8; 0 for n-grams")
    add("--device", default="h100", help=f"one of {', '.join(DEVICES)} (default: %(default)s)")
    add("--bandwidth", type=float, help="GB/s, instead of the device's")
    add("--tflops", type=float, help="dense TFLOP/s in the weights' type, instead of the device's")
    add("--memory", type=float, help="GB, instead of the device's")
    add("--devices", type=int, default=1, help="how many share the model, as if without loss (tensor parallel)")
    add(
        "--memory-efficiency",
        type=float,
        default=0.75,
        help="share of the bandwidth that is reached (default: %(default)s)",
    )
    add(
        "--compute-efficiency",
        type=float,
        default=0.5,
        help="share of the FLOP rate that is reached (default: %(default)s)",
    )
    add(
        "--overhead-us", type=float, default=50.0, help="fixed time of each pass in microseconds (default: %(default)s)"
    )
    add("--bits", type=float, default=16, help="per weight and cached number (default: %(default)s)")
    add("--batches", default=",".join(map(str, BATCHES)), help="sequences at a time (default: %(default)s)")
    add("--context", type=int, default=1024, help="tokens that each sequence has (default: %(default)s)")
    add("--price", type=float, help="of the devices per hour: adds the cost per million tokens")
    add("--output", help="JSON file with the same figures")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    Raises:
        UserError: an unknown device, a size that is not known, or a value out of range.
    """
    for name in ("devices", "context", "bits", "memory_efficiency", "compute_efficiency"):
        if getattr(args, name) <= 0:
            raise UserError(f"{name.replace('_', '-')}={getattr(args, name)} must be above 0")
    results = load_results(args.results)
    device = device_of(args)
    target = (
        Sizes(args.target_params) if args.target_params else sizes_of(target_config(args.target or results["target"]))
    )
    drafter = args.drafter_params
    if drafter is None:
        name = (args.drafter or results["drafter"]).partition("+")[0]
        folder = Path(name).expanduser()
        drafter = drafter_params(folder) if folder.is_dir() else 0.0 if is_untrained(name) else None
        if drafter is None:
            raise UserError(f"drafter={str(folder)!r}: no such folder; give --drafter FOLDER or --drafter-params")
    try:
        batches = [int(part) for part in args.batches.split(",")]
    except ValueError as error:
        raise UserError(f"batches={args.batches!r} is no list of numbers; write for example 1,8,64") from error
    profile = profile_of(results)
    rows = [
        estimate(target, drafter, profile, device, batch, args.context, args.bits / 8, args.price) for batch in batches
    ]
    print_rows(rows, device, profile)
    if args.output:
        head = {"command": [Path(sys.argv[0]).name, *sys.argv[1:]], "device": asdict(device), "target": asdict(target)}
        write_json(
            Path(args.output).expanduser(), {**head, "drafter_params": drafter, "rows": rows, "advice": advice(rows)}
        )
        print(f"wrote {args.output}")
    return 0


def device_of(args: argparse.Namespace) -> Device:
    """Raises UserError for an unknown device whose figures are not all given."""
    given = (args.bandwidth, args.tflops, args.memory)
    known = DEVICES.get(args.device.lower(), (None, None, None))
    bandwidth, tflops, memory = (own if own is not None else table for own, table in zip(given, known, strict=True))
    if not bandwidth or not tflops:
        raise UserError(
            f"device={args.device!r} is not one of {', '.join(DEVICES)}; choose one, or give --bandwidth and --tflops"
        )
    return Device(
        args.device,
        1e9 * bandwidth * args.memory_efficiency * args.devices,
        1e12 * tflops * args.compute_efficiency * args.devices,
        1e9 * memory * args.devices if memory else float("inf"),
        1e-6 * args.overhead_us,
    )


def target_config(name: str) -> dict[str, Any]:
    """A model's config.json, from a file, a folder, the cache or the Hub.

    Raises:
        UserError: it cannot be found.
    """
    path = Path(name).expanduser()
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text())
        found = Path(resolve_target(name))
        if found.is_dir():
            return json.loads((found / "config.json").read_text())
        from huggingface_hub import hf_hub_download

        return json.loads(Path(hf_hub_download(name, "config.json")).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"target={name!r}: no config.json ({error}); give --target-params instead") from error


def advice(rows: Sequence[dict[str, Any]]) -> str:
    """From which batch size on speculation should be off."""
    off = [row["batch_size"] for row in rows if row["length"] == 0 or row["speedup"] <= 1]
    if not off:
        return f"speculation pays up to batch size {rows[-1]['batch_size']}"
    if len(off) == len(rows):
        return "disable speculation on this device: no batch size gains"
    first = min(off)
    return f"disable speculation from batch size {first} on; below it, use the length of each row"


def print_rows(
    rows: Sequence[dict[str, Any]], device: Device, profile: Profile, console: Console | None = None
) -> None:
    """A table with a line per batch size, and when to disable speculation."""
    console = console or wide_console()
    table = Table(
        "batch", "length", "speed-up", "tokens/s", "plain", "bound", "break-even\nacceptance", title_justify="left"
    )
    table.title = f"{device.name}: estimate, not measured"
    priced = "cost_per_million_tokens" in rows[0]
    if priced:
        table.add_column("cost of 1M\ntokens (plain)")
    for row in rows:
        needed = "never" if row["break_even"] is None else f"{row['break_even']:.0%}"
        cells = [
            str(row["batch_size"]),
            str(row["length"]),
            f"{row['speedup']:.2f}x",
            f"{row['tokens_per_second']:,.0f}",
        ]
        cells += [
            f"{row['plain_tokens_per_second']:,.0f}",
            row["bound"] + ("" if row["fits"] else ", too large"),
            needed,
        ]
        if priced:
            cells.append(f"{row['cost_per_million_tokens']:.3g} ({row['plain_cost_per_million_tokens']:.3g})")
        table.add_row(*cells)
    console.print(table)
    length = max(1, len(profile.joint))
    console.print(f"break-even: acceptance rate per token from which a chain of {length} pays", highlight=False)
    console.print(advice(rows), highlight=False)
