"""`drafttrain trace`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.command import command, result_of
from drafttrain.flags import NO_KWARGS, Device, TemplateKwargs
from drafttrain.values import Count, Dtype, Place, PositiveFraction, Seed, Size, Temperature

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def trace(
    *,
    target: Place | Path,
    drafter: Place | Path,
    prompt: str,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: bool = False,
    chat_template_kwargs: TemplateKwargs = NO_KWARGS,
    tree: str | None = None,
    temperature: Temperature = 0.0,
    top_p: PositiveFraction = 1.0,
    top_k: Size = 0,
    seed: Seed = 0,
    max_new_tokens: Count = 96,
    round: Count | None = None,
    output: Place | Path | None = None,
) -> Json:
    """Show who produced each token of one answer, and what a round drafted.

    ```
    drafttrain trace --target smollm2-135m --drafter runs/drafter --prompt "Name three rivers." --output trace.html
    drafttrain trace --target smollm2-135m --drafter ngram --prompt "Count to ten, twice." --tree chain:4 --round 12
    ```

    The drafter's tokens are shaded by the depth at which they were accepted; the others are the
    target's own. The page shows the tree of every round, the terminal that of --round (default: the
    round that accepted most).

    Args:
        target: short name, folder or Hub id
        drafter: a drafter's folder or Hub id, also with :OPTION=VALUE, KIND or KIND:OPTIONS
            (lookahead, ngram, ngram_store, suffix, token_recycling), or FOLDER+KIND
        prompt: the user's message; the chat template is applied
        dtype: float32, bfloat16, float16 or auto (bfloat16 where the device has it)
        device: cpu, cuda, cuda:N or auto
        trust_remote_code: run model code that comes with the target
        chat_template_kwargs: variables of the target's chat template, as JSON:
            '{"enable_thinking": false}'
        tree: tree of a round: chain:3, dynamic:5,8,24, ... (default: the tree in the drafter's decoding.json,
            else chain:3)
        temperature: sampling temperature; 0 decodes greedily
        top_p: share of probability to sample from; 1 keeps all tokens
        top_k: number of likeliest tokens to sample from; 0 keeps all
        seed: seed of the sampling
        max_new_tokens: length of the answer
        round: the round whose tree is shown
        output: page to write (.html)
    """
    return result_of("reports.trace", locals())
