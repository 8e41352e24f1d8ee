"""`drafttrain doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.command import command, result_of
from drafttrain.flags import NO_KWARGS, Device, TemplateKwargs
from drafttrain.values import Dtype, Name, Place, Size

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def doctor(
    head: Place | Path,
    /,
    *,
    target: Place | Path,
    engine_version: Name = "",
    texts: Size = 8,
    suite: Place | Path = "drafttrain",
    chat_template_kwargs: TemplateKwargs = NO_KWARGS,
    dtype: Dtype = "auto",
    device: Device = "auto",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    output: Place | Path | None = None,
) -> Json:
    """Say what fits between a published head, its target and the engines, and how to mend the rest.

    ```
    drafttrain doctor yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --target meta-llama/Llama-3.1-8B-Instruct --allow-pickle
    drafttrain doctor runs/export --target smollm2-135m --engine-version vllm=0.25.1 --output doctor.json
    ```

    The head has any form that drafttrain import reads, or is a drafter of ours. A table has a row
    per check, with the evidence and the fix: keys of config.json beside the target's, tensors, what
    import refuses, and known bugs of engines and trainers that meet this head. Where the target's
    weights are at hand, it writes texts, and the head's likeliest tokens are compared with them:
    as the head is read, and with each key that trainers get wrong set otherwise.

    Exit status 1 if something does not fit.

    Args:
        head: folder or Hub id of the head
        target: the model it was trained for: short name, folder or Hub id
        engine_version: release that will serve it, as vllm=0.32.0 or sglang=0.5.23 (default: the
            newest known ones)
        texts: texts that the target writes to compare the head with; 0 for none
        suite: source of their prompts: a suite's name or JSONL file
        chat_template_kwargs: variables of the target's chat template, as JSON:
            '{"enable_thinking": false}'; a question's own come first
        dtype: float32, bfloat16, float16 or auto (bfloat16 where the device has it)
        device: cpu, cuda, cuda:N or auto
        allow_pickle: also read .bin and .pt files (torch.load with weights_only)
        trust_remote_code: run model code that comes with the target
        output: JSON file to write
    """
    return result_of("export.doctor", locals())
