"""`drafttrain recipes`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.command import command, result_of
from drafttrain.values import Place

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def recipes(
    name: Place | Path | None = None,
    /,
    *,
    copy: Place | Path | None = None,
) -> Json:
    """List the recipes that come with drafttrain, print one, or copy it to edit.

    ```
    drafttrain recipes                                      one line each: name, GPUs, memory, disk, hours
    drafttrain recipes llama-3.1-8b/eagle3                  prints it: commands, GPUs, memory, hours, sources, keys
    drafttrain recipes llama-3.1-8b/eagle3 --copy .         writes it to configs/ here, with accelerate's and DeepSpeed's files
    drafttrain train llama-3.1-8b/eagle3 data=runs/data learning_rate=5e-5
    ```

    The plans are sums over shapes and a roofline (drafttrain plan), not measurements.

    Args:
        name: a recipe as the list names it, TARGET/KIND, or a YAML file
        copy: folder to copy it to: it lies below DIR/configs, from where the commands of its head work
    """
    return result_of("recipes", locals())
