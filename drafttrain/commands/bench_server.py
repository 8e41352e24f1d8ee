"""`drafttrain bench-server`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from drafttrain.command import command, result_of
from drafttrain.errors import UserError
from drafttrain.flags import NO_KWARGS, TemplateKwargs
from drafttrain.values import Commas, Count, Place, PositiveAmount, Seed, Size, Temperature

if TYPE_CHECKING:
    from drafttrain.files import Json


@command
def bench_server(
    *,
    url: str,
    url2: str | None = None,
    model: str = "",
    model2: str = "",
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
    """Measure an OpenAI-compatible server under load, or two of them side by side.

    ```
    drafttrain bench-server --url http://localhost:8000 --concurrency 1,2,4,8 --output server.json
    drafttrain bench-server --url http://localhost:8000 --url2 http://localhost:8001 --request-rate 0.5,1,2
    ```

    --concurrency keeps a constant number of requests in flight; --request-rate sends requests at
    random times at an average rate, whether or not the server keeps up. Each step ends after
    --requests requests or --seconds, whichever is first. With --url2 (for example the same model
    without speculation) each step runs four times on each server. The servers alternate and never
    run at the same time, and the ratio of their token rates has a 95 % interval over the repeats.
    Acceptance is read from the Prometheus page of a server that has vLLM's or SGLang's speculation
    metrics. A bad reply counts as a failed request. After an interruption, OUTPUT.partial holds the
    finished steps.

    Args:
        url: http://HOST:PORT, with or without /v1
        url2: a second server to compare with, such as one without speculation
        model: name of the model in the requests (default: the first that the server lists)
        model2: the same for --url2
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
    return result_of("serving.bench", locals())
