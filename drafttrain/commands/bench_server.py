"""`drafttrain bench-server`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from drafttrain.command import AnyNumber, command, result_of
from drafttrain.errors import UserError
from drafttrain.flags import NO_KWARGS, TemplateKwargs
from drafttrain.values import (
    AnyText,
    Commas,
    Count,
    File,
    FileDtype,
    Name,
    Place,
    PositiveAmount,
    Seed,
    Size,
    Temperature,
)

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def bench_server(
    *flags: Annotated[AnyText, AnyNumber()],
    url: str = "",
    url2: str | None = None,
    model: str = "",
    model2: str = "",
    drafter: Place | Path | None = None,
    draft_lengths: Annotated[Sequence[Size], Commas()] | None = None,
    target: Name | Path = "",
    engine: Literal["vllm", "sglang"] = "vllm",
    engine_python: File | Path = sys.executable,
    dtype: FileDtype = "bfloat16",
    suite: Place | Path = "drafttrain",
    chat_template_kwargs: TemplateKwargs = NO_KWARGS,
    concurrency: Annotated[Sequence[Count], Commas()] | None = None,
    request_rate: Annotated[Sequence[PositiveAmount], Commas()] | None = None,
    requests: Count = 32,
    repeats: Count | None = None,
    seconds: PositiveAmount = 60.0,
    timeout: PositiveAmount = 120.0,
    warm_up: Size = 2,
    max_tokens: Count = 128,
    temperature: Temperature = 0.0,
    ignore_eos: bool = False,
    api_key_env: str | None = None,
    seed: Seed = 0,
    note: str = "",
    output: Place | Path = "server.json",
) -> Json:
    """Measure a server under load, two side by side, or a drafter by its draft length.

    ```
    drafttrain bench-server --url http://localhost:8000 --concurrency 1,2,4,8 --output server.json
    drafttrain bench-server --url http://localhost:8000 --url2 http://localhost:8001 --request-rate 0.5,1,2
    drafttrain bench-server --drafter runs/drafter --draft-lengths 0,1,3,5 --engine-python ~/vllm/bin/python
    ```

    --concurrency keeps a constant number of requests in flight; --request-rate sends requests at
    random times at an average rate, whether or not the server keeps up. Each step ends after
    --requests requests or --seconds, whichever is first. With --url2 (for example the same model
    without speculation) each step runs four times on each server. The servers alternate and never
    run at the same time, and the ratio of their token rates has a 95 % interval over the repeats.
    With --drafter the command exports it, starts the engine once for each of --draft-lengths (flags
    behind -- are the engine's), and compares each with the first; 0 is plain decoding.
    Acceptance is read from the Prometheus page of a server that has vLLM's or SGLang's speculation
    metrics. A bad reply counts as a failed request. After an interruption, OUTPUT.partial holds the
    finished steps.

    Args:
        flags: flags of the engine that --drafter starts
        url: http://HOST:PORT, with or without /v1
        url2: a second server to compare with, such as one without speculation
        model: name of the model in the requests (default: the first that the server lists)
        model2: the same for --url2
        drafter: a trained drafter to serve with each draft length, in place of --url
        draft_lengths: numbers of drafted tokens per round (default: 0,1,2,3,5)
        target: short name, folder or Hub id of what --drafter serves (default: the recorded one)
        engine: the engine that serves --drafter
        engine_python: interpreter of the environment that has the engine (default: this one)
        dtype: type of the exported drafter's weights
        suite: the questions to ask (first turns), as in drafttrain eval
        chat_template_kwargs: variables of the target's chat template, as JSON:
            '{"enable_thinking": false}'; the server's template reads them
        concurrency: steps of requests in flight, such as 1,2,4,8 (the default)
        request_rate: steps of requests per second, such as 0.5,1,2
        requests: requests of each run of a step at most
        repeats: runs of each step on each server (default: 4 with --url2, else 1)
        seconds: no request of a run begins later than this
        timeout: seconds after which a request has failed
        warm_up: uncounted requests before each server's first step
        max_tokens: most tokens of an answer
        temperature: sampling temperature of the requests; 0 is greedy
        ignore_eos: ask for answers of full length (a field of vLLM and SGLang)
        api_key_env: environment variable with the API key, if the server wants one
        seed: seed of the random times of --request-rate
        note: a sentence to keep with the results, such as what else ran on the machine
        output: results file
    """
    if concurrency is not None and request_rate is not None:
        raise UserError("--request-rate does not go with --concurrency; give one of them")
    if (drafter is None) == (not url):
        raise UserError("give either --url URL, or --drafter D for an engine that is started here")
    if drafter is None and (draft_lengths is not None or target or flags):
        raise UserError(
            "--draft-lengths, --target and flags behind -- go with --drafter; give that too"
        )
    if drafter is not None and (url2 or model):
        raise UserError("--url2 and --model go with --url; drop them, or --drafter")
    if model2 and not url2:
        raise UserError("--model2 goes with --url2; give that too")
    draft_lengths = draft_lengths or (0, 1, 2, 3, 5)
    return result_of("serving.bench", locals())
