"""`drafttrain import`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.command import command, result_of
from drafttrain.values import Place

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def import_drafter(
    *,
    checkpoint: Place | Path,
    target: Place | Path,
    output: Place | Path,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Json:
    """Bring a published drafter into drafttrain, to measure, tune or train it further.

    Import reads what trainers and engines publish: docs/reference/cli.md lists the forms,
    docs/publishing.md the projects and releases.

    ```
    drafttrain import --checkpoint yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --target meta-llama/Llama-3.1-8B-Instruct \\
        --allow-pickle --output runs/eagle3-llama
    drafttrain eval --target meta-llama/Llama-3.1-8B-Instruct --drafter runs/eagle3-llama --output results.json
    ```

    Before the drafter is kept, it is exported and checked as by drafttrain verify. Of the target
    only config and tokenizer are read, and the embedding if the drafter brings one. Nothing runs on
    load: weights are safetensors, unless --allow-pickle admits a .bin file.

    Args:
        checkpoint: folder or Hub id of the drafter
        target: the model it was trained for: short name, folder or Hub id
        output: folder to write
        allow_pickle: also read .bin and .pt files (torch.load with weights_only)
        trust_remote_code: run model code that comes with the target
    """
    return result_of("export.import_drafter", locals())
