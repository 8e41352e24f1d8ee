"""`drafttrain bench-server`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.flags import add_template_flag
from drafttrain.values import Count, Place, PositiveAmount, Seed, Size, Temperature, adder, values

HELP = """Measure an OpenAI-compatible server under load, or two of them side by side.

  drafttrain bench-server --url http://localhost:8000 --concurrency 1,2,4,8 --output server.json
  drafttrain bench-server --url http://localhost:8000 --url2 http://localhost:8001 --request-rate 0.5,1,2

--concurrency keeps a constant number of requests in flight; --request-rate sends requests at random times at an average rate,
whether or not the server keeps up. Each step ends after --requests requests or --seconds, whichever is first. With --url2 (for
example the same model without speculation) the servers alternate at every step and never run at the same time. Acceptance is
read from the Prometheus page of a server that has vLLM's or SGLang's speculation metrics. A bad reply counts as a failed
request. After an interruption, OUTPUT.partial holds the finished steps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--url", required=True, help="http://HOST:PORT, with or without /v1")
    add("--url2", help="a second server to compare with, such as one without speculation")
    add(
        "--model",
        default="",
        help="name of the model in the requests (default: the first that the server lists)",
    )
    add("--model2", default="", help="the same for --url2")
    add(
        "--suite",
        Place,
        default="drafttrain",
        help="the questions to ask (first turns), as in drafttrain eval",
    )
    add_template_flag(parser, "; the server's template reads them")
    load = parser.add_mutually_exclusive_group()
    adder(load)(
        "--concurrency",
        values(Count),
        help="steps of requests in flight, such as 1,2,4,8 (the default)",
    )
    adder(load)(
        "--request-rate",
        values(PositiveAmount),
        help="steps of requests per second, such as 0.5,1,2",
    )
    add("--requests", Count, default=32, help="requests of a step at most")
    add(
        "--seconds",
        PositiveAmount,
        default=60.0,
        help="no request of a step begins later than this",
    )
    add("--timeout", PositiveAmount, default=120.0, help="seconds after which a request has failed")
    add("--warm-up", Size, default=2, help="uncounted requests before each server's first step")
    add("--max-tokens", Count, default=128, help="of an answer")
    add("--temperature", Temperature, default=0.0, help="of the requests")
    add(
        "--ignore-eos",
        action="store_true",
        help="ask for answers of full length (a field of vLLM and SGLang)",
    )
    add(
        "--api-key-env",
        metavar="NAME",
        help="environment variable with the API key, if the server wants one",
    )
    add("--seed", Seed, default=0, help="of the times of --request-rate")
    add(
        "--note",
        default="",
        help="a sentence to keep with the results, such as what else ran on the machine",
    )
    add("--output", Place, default="server.json", help="results file")
