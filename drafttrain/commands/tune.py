"""`drafttrain tune`."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.command import (
    Drafting,
    Model,
    Shown,
    Tokenizer,
    command,
    outcome_of,
    take_drafter,
    take_target,
)
from drafttrain.flags import NO_KWARGS, Device, TemplateKwargs
from drafttrain.values import Count, Dtype, File, Place, PositiveFraction, Size, Temperature

if TYPE_CHECKING:
    from drafttrain.files import Json


@dataclass(frozen=True)
class TuneResult:
    """A tuned tree.

    Attributes:
        tree: the setting to keep, which is now the drafter's default unless dry_run. chain: the
            fastest chain of the trained drafter alone. predicted_speedup, measured_speedup: over
            plain decoding. interval: 95 %, of the measured one.
        record: everything that was measured and predicted, as in tune.json.
    """

    tree: str
    chain: str | None
    predicted_speedup: float
    measured_speedup: float
    interval: tuple[float, float] | None
    record: Json = field(repr=False)


@command
def tune(
    target: Model,
    drafter: Drafting,
    output: Place | Path | None = None,
    *,
    tokenizer: Tokenizer = None,
    calibrate: File | Path | None = None,
    prompts: Count = 6,
    max_new_tokens: Count = 64,
    repeats: Count = 2,
    temperature: Temperature = 0.0,
    top_p: PositiveFraction = 1.0,
    top_k: Size = 0,
    chat_template_kwargs: TemplateKwargs = NO_KWARGS,
    dry_run: bool = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: bool = False,
    progress: Shown = False,
) -> TuneResult:
    """Find the fastest tree for a drafter on this machine, and keep it as the drafter's default.

    ```
    drafttrain tune --target smollm2-135m --drafter runs/quickstart/drafter+ngram --output tune.json
    ```

    Takes about a minute for a small model: records acceptance once, measures costs by nodes and
    depth, predicts all candidates from both, and measures the best one against plain decoding.
    Writes decoding.json into the drafter's folder, which `drafttrain eval` and
    `drafttrain.generate` read. Says the speed-up of decoding, by which the tree is chosen, and that
    of whole requests, whose prompts take their pass with any tree.

    Args:
        target: short name, folder or Hub id; from Python also a Target, or a loaded model
        drafter: a drafter's folder or Hub id, also with :OPTION=VALUE, KIND or KIND:OPTIONS
            (lookahead, ngram, ngram_store, suffix, token_recycling), or FOLDER+KIND; from Python
            also a loaded drafter
        output: file of what was measured and predicted (default: tune.json beside the drafter;
            from Python none)
        tokenizer: the tokenizer of a loaded model
        calibrate: JSONL of messages, turns or text (default: built-in prompts)
        prompts: prompts at most
        max_new_tokens: tokens per prompt
        repeats: repeats of the final measurement
        temperature: sampling temperature; 0 decodes greedily
        top_p: share of probability to sample from; 1 keeps all tokens
        top_k: number of likeliest tokens to sample from; 0 keeps all
        chat_template_kwargs: variables of the target's chat template, as JSON:
            '{"enable_thinking": false}'; those of a row of --calibrate come first
        dry_run: leave the drafter's decoding.json as it is
        dtype: float32, bfloat16, float16 or auto (bfloat16 where the device has it)
        device: cpu, cuda, cuda:N or auto
        trust_remote_code: run model code that comes with the target
        progress: print what the command prints; the logger `drafttrain` gets it otherwise
    """
    args = Namespace(**locals())
    loaded = (take_target("tune", args), take_drafter("tune", args))
    found = outcome_of("tuning.tune", args, *loaded, keeps=False)
    record = {**found["result"]}
    chain = None
    if record["chain"]:
        chain = record["chain"]["tree"]
    interval = None
    if "measured_speedup" in record["intervals"]:
        low, high = record["intervals"]["measured_speedup"]
        interval = (low, high)
    return TuneResult(
        tree=record["tree"],
        chain=chain,
        predicted_speedup=record["predicted_speedup"],
        measured_speedup=record["measured_speedup"],
        interval=interval,
        record=record,
    )
