"""`drafttrain estimate`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.tuning.hardware import BATCHES, DEVICES
from drafttrain.values import (
    Amount,
    Count,
    File,
    Name,
    PositiveAmount,
    PositiveFraction,
    adder,
    value,
    values,
)

HELP = """Expected speed-up, cost and break-even on other hardware, from sizes and a measured acceptance profile.

  drafttrain estimate --target Qwen/Qwen3-8B --drafter runs/drafter --results results.json --device h100 --price 2.5
  drafttrain estimate --target-params 8e9 --drafter-params 4e8 --results results.json --bandwidth 1000 --tflops 165

Prints a line per batch size: the draft length to use there, 0 where speculation should be off. The figures come from a roofline
model, not from measurements."""


def add_arguments(parser: argparse.ArgumentParser) -> None:

    def add(
        name: str,
        help: str,
        kind: object = Name,
        default: object = None,
        required: bool = False,
    ) -> None:
        if default is None:
            shown = ""
        else:
            shown = " (default: %(default)s)"
        parser.add_argument(
            name,
            help=help + shown,
            type=value(kind),
            default=default,
            required=required,
        )

    add("--results", "a results.json of this drafter: its acceptance profile", File, required=True)
    add(
        "--target",
        "short name, folder, Hub id or config.json (default: the one that the results name)",
    )
    add(
        "--target-params",
        "weights instead, such as 8e9; contexts then cost nothing",
        PositiveAmount,
    )
    add("--drafter", "the drafter's folder (default: the one that the results name)")
    add("--drafter-params", "weights instead, such as 4e8; 0 for n-grams", Amount)
    add("--device", f"one of {', '.join(DEVICES)}", default="h100")
    add("--bandwidth", "GB/s, instead of the device's", PositiveAmount)
    add("--tflops", "dense TFLOP/s in the weights' type, instead of the device's", PositiveAmount)
    add("--memory", "GB, instead of the device's", PositiveAmount)
    add("--devices", "number that share the model, without loss (tensor parallel)", Count, 1)
    add("--memory-efficiency", "achieved share of the bandwidth", PositiveFraction, 0.75)
    add("--compute-efficiency", "achieved share of the FLOP rate", PositiveFraction, 0.5)
    add("--overhead-us", "fixed time of each pass in microseconds", Amount, 50.0)
    add("--bits", "per weight and cached number", PositiveAmount, 16.0)
    batches = ",".join(map(str, BATCHES))
    adder(parser)(
        "--batches",
        values(Count),
        default=batches,
        help="sequences at a time (default: %(default)s)",
    )
    add("--context", "tokens that each sequence has", Count, 1024)
    add("--price", "of the devices per hour: adds the cost per million tokens", Amount)
    add("--output", "JSON file with the same figures")
