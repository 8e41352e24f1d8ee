"""`drafttrain estimate`: the expected speed-up on other hardware, from sizes and a measured acceptance
profile.

The time of a pass comes from the roofline of costs.py: speculation is nearly free while bytes are
the limit, and costs in proportion once operations are. Real engines reach only a share of both
limits: the efficiencies. Everything but the acceptance is computed, not measured.

Source: speed-up tau / (c * gamma + cost of the wider pass) as in Leviathan et al. 2023, arXiv
2211.17192.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from drafttrain.drafters.kinds import split_name
from drafttrain.drafters.registry import is_untrained
from drafttrain.errors import UserError
from drafttrain.evaluation.metrics import load_results
from drafttrain.evaluation.verdicts import crossover
from drafttrain.files import Json, value_of, write_json
from drafttrain.folders import asked_file
from drafttrain.formats.weights import file_shapes
from drafttrain.outcome import command_line, conclude, next_command
from drafttrain.reports.output import table_of, wide_console
from drafttrain.tuning.costs import Device, Sizes, model_sizes
from drafttrain.tuning.hardware import DEVICES
from drafttrain.tuning.plan_recipe import read_config, without_weights


def sizes_of(target: str) -> Sizes:
    """Sizes of the target with this name, or of its config.json.

    Raises:
        UserError: see `read_config`.
    """
    fix = "give --target-params instead"
    config = read_config(target, target, "target", fix)
    return model_sizes(without_weights(config, target, fix), config)


def drafter_params(folder: Path) -> float:
    """Weights of a saved drafter, without the target's embedding.

    Raises:
        UserError: a folder without safetensors files.
    """
    try:
        shapes = file_shapes(folder)
    except UserError as error:
        raise UserError(f"{error}; or give --drafter-params") from error
    return sum(map(math.prod, shapes.values()))


@dataclass(frozen=True)
class Profile:
    """A measured acceptance profile.

    Attributes:
        joint: share of rounds that accept at least k tokens, by k. nodes: of the tree that was
            used.
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
    depth = len(joint)
    if tree.get("depth"):  # a match may be longer than the tree is deep
        depth = min(depth, tree["depth"])
    return Profile(joint[:depth], max(depth, value_of(tree, "budget", 0)))


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
        length: the fastest draft depth, 0 for none; speedup and accepted_length there.
        tokens_per_second: of all sequences; plain_tokens_per_second; round_ms, plain_ms.
        break_even: acceptance rate per token of a chain of the measured depth (at least 1) at
            which speculation starts to pay, None if it never does.
        bound: the limit of a round. fits: weights and caches fit the device.
        cost_per_million_tokens, plain_cost_per_million_tokens.
    """
    plain = target.seconds(device, batch, batch, context, width)
    small = Sizes(drafter)

    def round_seconds(depth: int, nodes: float) -> float:
        if depth == 0:
            return plain
        # A draft step expands about as many nodes per depth as the tree keeps.
        step = small.seconds(device, batch * max(1.0, nodes / depth), batch, 0, width)
        verification = target.seconds(device, batch * (1 + nodes), batch, context, width)
        return verification + depth * step

    # The fastest depth.
    best = 0
    seconds = plain
    for depth in range(1, len(profile.joint) + 1):
        now = round_seconds(depth, profile.nodes_at(depth))
        if profile.accepted_length(depth) / now > profile.accepted_length(best) / seconds:
            best = depth
            seconds = now

    # What limits a round there.
    tokens = batch * (1 + profile.nodes_at(best))
    reading = target.bytes_moved(tokens, batch, context, width) / device.bandwidth
    bound = "compute"
    if reading + device.overhead >= target.seconds(device, tokens, batch, context, width):
        bound = "memory"

    tau = profile.accepted_length(best)
    chain = max(1, len(profile.joint))
    rate = batch * tau / seconds  # tokens per second
    plain_rate = batch / plain
    held = width * (target.total + drafter + batch * context * target.kv)
    result = {
        "batch_size": batch,
        "length": best,
        "accepted_length": round(tau, 4),
        "speedup": round(tau * plain / seconds, 4),
        "tokens_per_second": round(rate, 2),
        "plain_tokens_per_second": round(plain_rate, 2),
        "round_ms": round(1000 * seconds, 4),
        "plain_ms": round(1000 * plain, 4),
        "break_even": break_even(round_seconds(chain, chain) / plain, chain),
        "bound": bound,
        "fits": held <= device.memory,
    }
    if price is not None:
        result["cost_per_million_tokens"] = round(price / 3600 / rate * 1e6, 4)
        result["plain_cost_per_million_tokens"] = round(price / 3600 / plain_rate * 1e6, 4)
    return result


def break_even(need: float, length: int) -> float | None:
    """Solves 1 + a + ... + a**length = need for a chain's acceptance rate a; None if 1 is too little."""
    if need > 1 + length:
        return None
    low = 0.0
    high = 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**k for k in range(length + 1)) < need:
            low = middle
        else:
            high = middle
    return round(high, 4)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        UserError: an unknown device, an unknown size, or a value out of range.
    """
    output = asked_file(args, "estimate")
    results = load_results(args.results)
    device = device_of(args)

    # Sizes of both models.
    if args.target_params:
        target = Sizes(args.target_params)
    else:
        name = args.target
        if not name:
            name = results["target"]
        target = sizes_of(name)
    named = results["drafter"]
    if args.drafter:
        named = args.drafter
    folder = split_name(named)[0]
    drafter = args.drafter_params
    if drafter is None:
        drafter = _params_of(folder)

    profile = profile_of(results)
    width = args.bits / 8
    rows = []
    for batch in args.batches:
        rows.append(
            estimate(target, drafter, profile, device, batch, args.context, width, args.price)
        )
    print_rows(rows, device, profile)

    content: Json = {"drafter_params": drafter, "rows": rows, "advice": advice(rows)}
    if output is None:
        conclude(content, [])
        return 0
    head = {"command": command_line(), "device": asdict(device), "target": asdict(target)}
    content = {**head, **content}
    write_json(output, content)
    then = next_command(
        "export",
        drafter=folder,
        format="vllm",
        output=output.with_name("export"),
        schedule=output,
    )
    conclude(content, [output], then)
    return 0


def _params_of(name: str) -> float:
    """Weights of the drafter in a folder; 0 for a kind without weights."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return drafter_params(folder)
    if not is_untrained(name):
        raise UserError(
            f"drafter={str(folder)!r}: no such folder; give --drafter FOLDER or --drafter-params"
        )
    return 0.0


def device_of(args: argparse.Namespace) -> Device:
    """The device that the flags describe.

    Raises:
        UserError: an unknown device without --bandwidth and --tflops.
    """
    bandwidth, tflops, memory = DEVICES.get(args.device.lower(), (None, None, None))
    if args.bandwidth is not None:
        bandwidth = args.bandwidth
    if args.tflops is not None:
        tflops = args.tflops
    if args.memory is not None:
        memory = args.memory
    if not bandwidth or not tflops:
        names = ", ".join(DEVICES)
        raise UserError(
            f"device={args.device!r} is not one of {names}; choose one, or give --bandwidth and --tflops"
        )
    one = Device(
        name=args.device,
        bandwidth=1e9 * bandwidth * args.memory_efficiency,
        flops=1e12 * tflops * args.compute_efficiency,
        memory=1e9 * memory if memory else float("inf"),
        overhead=1e-6 * args.overhead_us,
    )
    return one.times(args.devices)


def advice(rows: Sequence[Json]) -> str:
    """The batch sizes at which speculation should be off, in words."""
    off = []
    points = []
    for row in rows:
        points.append((row["batch_size"], {"speedup_vs_fastest": row["speedup"]}))
        if row["length"] == 0 or row["speedup"] <= 1:
            off.append(row["batch_size"])
    text = f"estimated, not measured: speculation {crossover('batch size', points)}"
    if not off:
        return text
    sizes = [row["batch_size"] for row in rows]
    at = f"at {', '.join(map(str, off))}"
    if off == sizes[-len(off) :]:
        at = f"from batch size {off[0]} on"
    text = f"{text}: disable it {at}"
    if len(off) < len(sizes):
        text += "; elsewhere use the length of each row"
    return text


def print_rows(rows: Sequence[Json], device: Device, profile: Profile) -> None:
    """Prints a table with a line per batch size, and when to disable speculation."""
    acceptance = "break-even\nacceptance"
    headings = ["batch", "length", "speed-up", "tokens/s", "plain", "bound", acceptance]
    costs = "cost_per_million_tokens" in rows[0]
    if costs:
        headings.append("cost of 1M\ntokens (plain)")
    shown = []
    for row in rows:
        bound = row["bound"]
        if not row["fits"]:
            bound += ", too large"
        needed = "never"
        if row["break_even"] is not None:
            needed = f"{row['break_even']:.0%}"
        cells = [
            str(row["batch_size"]),
            str(row["length"]),
            f"{row['speedup']:.2f}x",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['plain_tokens_per_second']:,.0f}",
            bound,
            needed,
        ]
        if costs:
            cost = row["cost_per_million_tokens"]
            plain_cost = row["plain_cost_per_million_tokens"]
            cells.append(f"{cost:.3g} ({plain_cost:.3g})")
        shown.append(cells)
    console = wide_console()
    console.print(table_of(headings, shown, f"{device.name}: estimate, not measured"))
    length = max(1, len(profile.joint))
    console.print(f"break-even: acceptance rate per token from which a chain of {length} pays")
    console.print(advice(rows), soft_wrap=True)
