"""`drafttrain suites`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from drafttrain.command import command, result_of
from drafttrain.values import Place

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def suites(
    action: Literal["prepare"],
    name: Literal["speed-bench"],
    /,
    *,
    output: Place | Path,
    config: Literal[
        "all",
        "qualitative",
        "throughput_1k",
        "throughput_2k",
        "throughput_8k",
        "throughput_16k",
        "throughput_32k",
    ] = "all",
    trust_remote_code: bool = False,
) -> Json:
    """Write the rows of a suite whose texts only its owner's script may put together.

    ```
    drafttrain suites prepare speed-bench --output runs/speed_bench --trust-remote-code
    drafttrain eval --target smollm2-135m --drafter runs/drafter --suite speed_bench:runs/speed_bench --output runs/speed.json
    ```

    More than half of SPEED-Bench's rows hold a note in place of their text. NVIDIA's script, pinned
    to one commit, fetches the texts from fourteen data sets of other owners, each under its own
    license, and writes a file per config. It runs in a process of its own and needs pandas, numpy
    and tiktoken. Configs that are there already are kept.

    Args:
        action: what to do with the suite
        name: of the suite
        output: folder to write
        config: the part to write
        trust_remote_code: run NVIDIA's script
    """
    return result_of("evaluation.prepare_suite", locals())
