"""`drafttrain swap`: puts another head in the place of the one that a server drafts with."""

from __future__ import annotations

import argparse
import contextlib

from drafttrain.data.failures import BadReply
from drafttrain.errors import UserError
from drafttrain.outcome import conclude
from drafttrain.serving.swap import NoRoute, Swapper
from drafttrain.serving.swap_sglang import SglangSwapper


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises UserError: no server that swaps, or a refused head."""
    with contextlib.closing(swapper_of(args.server, args.api_key_env or "")) as swapper:
        served = swapper.ask()
        if args.drafter:
            print(f"{swapper.url} serves {served['folder']}")
            served = swapper.put(args.drafter, served)
    print(f"{swapper.url} serves {served['folder']} (sha256 {served['sha256'][:12]})")
    conclude({"served": served})
    return 0


def swapper_of(server: str, variable: str) -> Swapper:
    """What swaps the heads of a server, chosen by what the server answers.

    Args:
        variable: environment variable of its API key; '' for none.

    Raises:
        UserError: neither drafttrain's route in vLLM nor SGLang answers.
    """
    vllm = Swapper(server, variable)
    try:
        vllm.ask()
    except NoRoute:
        vllm.close()
    except BaseException:
        vllm.close()
        raise
    else:
        return vllm
    sglang = SglangSwapper(server, variable)
    try:
        sglang.info()
    except BadReply as bad:
        sglang.close()
        raise UserError(
            f"server={sglang.url!r} has no route for swaps, and is not SGLang ({bad}); start vLLM as "
            "drafttrain export --swap-root DIR prints it"
        ) from bad
    return sglang
