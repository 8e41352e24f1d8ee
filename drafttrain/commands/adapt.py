"""`drafttrain adapt`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.command import command, result_of
from drafttrain.flags import NO_KWARGS, Device, TemplateKwargs
from drafttrain.values import (
    Amount,
    AnyText,
    Count,
    Dtype,
    Fraction,
    Name,
    Place,
    PositiveFraction,
    Seed,
)

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def adapt(
    *,
    drafter: Place | Path,
    log: Place | Path,
    every: Count = 200,
    output: Name | Path = "",
    once: bool = False,
    watch: bool = False,
    server: AnyText = "",
    api_key_env: str | None = None,
    metrics: AnyText = "",
    share: PositiveFraction = 0.02,
    hold_out: PositiveFraction = 0.15,
    replay: Amount = 0.25,
    data: Name | Path = "",
    passes: Count = 3,
    learning_rate: Fraction = 0.0003,
    max_length: Count = 1024,
    keep: Count = 3,
    seed: Seed = 0,
    target: Name | Path = "",
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: bool = False,
    chat_template_kwargs: TemplateKwargs = NO_KWARGS,
    target_url: Sequence[AnyText] = (),
    states_dir: Name | Path = "",
) -> Json:
    """Go on training a drafter from a server's log of prompts and answers, next to the server.

    ```
    drafttrain adapt --drafter runs/drafter --log answers.jsonl --every 200
    drafttrain adapt --drafter runs/drafter --log logs/ --every 200 --once                      # from cron
    drafttrain adapt --drafter runs/drafter --log logs/ --every 200 --target-url http://node1:8000     # states from vLLM
    drafttrain adapt --drafter runs/drafter --log logs/ --watch --server http://127.0.0.1:8000         # swaps in vLLM or SGLang
    ```

    After every N new answers it trains on most of them and on earlier ones, replays the rest, which
    it never trains on, and puts the new drafter at OUTPUT/current if these decode better than with
    the old one: the 95 % interval of the accepted length's ratio lies above 1. Text does not
    change, since a drafter only proposes. Serve OUTPUT/current from the beginning.

    It spends at most --share of the machine's time and runs at a low priority. Time that is not
    spent is saved for up to six hours. Where lines hold accepted_length, half of the time is kept
    for a fall of the accepted length by 5 %: a stream that switches domain. OUTPUT/state.jsonl
    holds answers, is bounded and readable by you alone. Start it again at any time; nothing is
    lost.

    Args:
        drafter: a trained drafter's folder; it stays as it is
        log: JSONL file, read with its rotated siblings, or a folder of *.jsonl files
        every: answers between rounds
        output: folder of the versions (default: DRAFTER-adapted)
        once: read what is there, run a round if one is due, and end
        watch: go back to the version before where the served accepted length falls below its
            interval, and write every decision to OUTPUT/journal.jsonl
        server: with --watch: vLLM or SGLang server that swaps heads (drafttrain swap); each better version
            goes into it, and its counters give the served length
        api_key_env: environment variable with that server's API key, if it wants one
        metrics: with --watch: PORT or HOST:PORT of a page with its figures for Prometheus
        share: share of the machine's time, at most
        hold_out: share of answers that only judge
        replay: earlier answers per new one in training
        data: data set of the first training, which then gives half of the earlier answers
        passes: passes over a round's answers, at most
        learning_rate: learning rate of AdamW
        max_length: most tokens used of prompt and answer
        keep: versions to keep; --drafter itself is never touched
        seed: seed of the choice of earlier answers
        target: short name, folder or Hub id (default: the target that the drafter names)
        dtype: float32, bfloat16, float16 or auto (bfloat16 where the device has it)
        device: cpu, cuda, cuda:N or auto
        trust_remote_code: run model code that comes with the target
        chat_template_kwargs: variables of the target's chat template, as JSON:
            '{"enable_thinking": false}'; those of a line come first
        target_url: server that serve-target started, which computes the states in place of the
            target here; repeat it for several
        states_dir: folder of the servers' states, as seen here (default: as the server says)
    """
    return result_of("adapt", locals())
