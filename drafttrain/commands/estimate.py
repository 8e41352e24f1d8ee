"""`drafttrain estimate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from drafttrain.command import command, result_of
from drafttrain.tuning.hardware import BATCHES
from drafttrain.values import Amount, Commas, Count, File, Name, PositiveAmount, PositiveFraction

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def estimate(
    *,
    results: File | Path,
    target: Name | Path | None = None,
    target_params: PositiveAmount | None = None,
    drafter: Name | Path | None = None,
    drafter_params: Amount | None = None,
    device: Name | Path = "h100",
    bandwidth: PositiveAmount | None = None,
    tflops: PositiveAmount | None = None,
    memory: PositiveAmount | None = None,
    devices: Count = 1,
    memory_efficiency: PositiveFraction = 0.75,
    compute_efficiency: PositiveFraction = 0.5,
    overhead_us: Amount = 50.0,
    bits: PositiveAmount = 16.0,
    batches: Annotated[Sequence[Count], Commas()] = BATCHES,
    context: Count = 1024,
    price: Amount | None = None,
    output: Name | Path | None = None,
) -> Json:
    """Expected speed-up, cost and break-even on other hardware, from sizes and a measured acceptance profile.

    ```
    drafttrain estimate --target Qwen/Qwen3-8B --drafter runs/drafter --results results.json --device h100 --price 2.5
    drafttrain estimate --target-params 8e9 --drafter-params 4e8 --results results.json --bandwidth 1000 --tflops 165
    ```

    Prints a line per batch size: the draft length to use there, 0 where speculation should be off.
    The figures come from a roofline model, not from measurements.

    Args:
        results: a results.json of this drafter: its acceptance profile
        target: short name, folder, Hub id or config.json (default: the one that the results
            name)
        target_params: number of its weights instead, such as 8e9; contexts then cost nothing
        drafter: the drafter's folder (default: the one that the results name)
        drafter_params: number of its weights instead, such as 4e8; 0 for n-grams
        device: rates and memory: one of h100, h200, a100, a100-40, l4, rtx3090, rtx4090, m3max, m2ultra, cpu-desktop,
            cpu-server
        bandwidth: GB/s, instead of the device's
        tflops: dense TFLOP/s in the weights' type, instead of the device's
        memory: GB, instead of the device's
        devices: number of devices that share the model, without loss (tensor parallel)
        memory_efficiency: achieved share of the bandwidth
        compute_efficiency: achieved share of the FLOP rate
        overhead_us: fixed time of each pass in microseconds
        bits: bits per weight and cached number
        batches: sequences at a time
        context: tokens that each sequence has
        price: price of the devices per hour; adds the cost per million tokens
        output: JSON file with the same figures
    """
    return result_of("tuning.estimate", locals())
