"""`drafttrain swap`: puts another head in the place of the one that a server drafts with."""

from __future__ import annotations

import argparse
import contextlib

from drafttrain.outcome import conclude
from drafttrain.serving.swap import NoRoute, Swapper, head_below
from drafttrain.serving.swap_sglang import SglangSwapper


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises UserError: no server that swaps, or a refused head."""
    with contextlib.closing(swapper_of(args.server, args.api_key_env or "")) as swapper:
        served = swapper.ask()
        if args.drafter:
            print(f"{swapper.url} serves {served['folder']}")
            served = swapper.ask(head_below(args.drafter, served, swapper.form))
    print(f"{swapper.url} serves {served['folder']} (sha256 {served['sha256'][:12]})")
    conclude({"served": served})
    return 0


def swapper_of(server: str, variable: str) -> Swapper:
    """What swaps the heads of a server: by drafttrain's route where it is, else as in SGLang.

    Args:
        variable: environment variable of its API key; '' for none.

    Raises:
        UserError: the server does not answer, or has a route that cannot swap.
    """
    vllm = Swapper(server, variable)
    with contextlib.suppress(NoRoute):
        vllm.ask()
        return vllm
    vllm.close()
    return SglangSwapper(server, variable)
