"""`drafttrain sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from drafttrain.command import command, result_of
from drafttrain.flags import NO_KWARGS, Device, TemplateKwargs
from drafttrain.values import Commas, Count, Depth, Dtype, Place, Seed, Size, Temperature

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def sweep(
    *,
    target: Place | Path,
    drafter: Place | Path,
    suite: Place | Path = "drafttrain",
    chat_template_kwargs: TemplateKwargs = NO_KWARGS,
    temperatures: Annotated[Sequence[Temperature], Commas()] = (0.0,),
    trees: str = "",
    lengths: Annotated[Sequence[Depth], Commas()] = (),
    batch_sizes: Annotated[Sequence[Count], Commas()] = (1,),
    contexts: Annotated[Sequence[Size], Commas()] = (0,),
    dtypes: Annotated[Sequence[Dtype], Commas()] = ("auto",),
    device: Device = "auto",
    max_new_tokens: Count = 64,
    limit: Count | None = None,
    seed: Seed = 0,
    baselines: str = "autoregressive,ngram",
    grid: bool = False,
    output: Place | Path | None = None,
    trust_remote_code: bool = False,
) -> Json:
    """Measure a drafter over a range of settings; one results.json per cell, and summary.json over all of them.

    ```
    drafttrain sweep --target smollm2-135m --drafter runs/drafter --output runs/sweep --batch-sizes 1,2,4,8,16 \\
        --lengths 1,2,4,8 --temperatures 0,0.7,1 --contexts 0,512,2048 --limit 16
    ```

    One axis varies at a time, the others keep their first value; --grid crosses them all. After an
    interruption the same command keeps finished cells and continues the unfinished one. The summary
    says at which batch size speculation stops paying.

    Args:
        target: short name, folder or Hub id
        drafter: as in drafttrain eval
        suite: as in drafttrain eval
        chat_template_kwargs: variables of the target's chat template, as JSON:
            '{"enable_thinking": false}'; a question's own come first
        temperatures: a list, such as 0,0.7,1
        trees: a list split by ; or spaces, such as 'chain:3 dynamic:3,4,8' (default: as in
            eval)
        lengths: speculation lengths, such as 1,2,4,8: chains, added to --trees
        batch_sizes: prompts at a time, such as 1,2,4,8,16
        contexts: least prompt tokens, such as 0,512,2048; 0 changes nothing
        dtypes: types of the target's weights, such as bfloat16,float32
        device: cpu, cuda or auto
        max_new_tokens: most tokens of an answer
        limit: questions at most per cell, taken evenly from all categories
        seed: seed of the sampling
        baselines: as in drafttrain eval
        grid: cross all axes instead of varying one at a time
        output: folder for the cells and summary.json (default: sweep beside the drafter)
        trust_remote_code: run model code that comes with the target
    """
    return result_of("tuning.sweep", locals())
