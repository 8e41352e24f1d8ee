"""vLLM endpoint plugin: GET /v1/drafter says which head serves, POST swaps another one in.

    VLLM_PLUGINS=drafttrain_swap DRAFTTRAIN_SWAP_ROOT=HEADS vllm serve ... \\
        --worker-extension-cls drafttrain.inside_vllm.swap_worker.DrafterSwapWorker

The route is below /v1, so vLLM's --api-key guards it. VLLM_SERVER_DEV_MODE, whose routes let anyone
run any method of the workers, is not needed. A request names a folder below DRAFTTRAIN_SWAP_ROOT
and may give the digest that its files must have; it never carries weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os

from drafttrain.inside_vllm.head_files import SwapRefused
from drafttrain.inside_vllm.swap_worker import EXTENSION, Answer, Vllms

PATH = "/v1/drafter"
_OWN = ("127.0.0.1", "::1", "localhost")  # addresses that only this machine reaches


class DrafterSwapRoute:
    """The route of one API server."""

    name = "drafttrain_swap"
    required_tasks = ("generate",)
    engine: Vllms  # its EngineClient

    def __init__(self) -> None:
        # One swap at a time: the steps of two would mix.
        self.lock = asyncio.Lock()
        self.running: set[asyncio.Task[Answer]] = set()

    def attach_router(self, app: Vllms) -> None:
        """Registers the route."""
        app.add_route(PATH, self.handle, methods=["GET", "POST"])

    async def init_state(self, engine: Vllms, state: object, args: argparse.Namespace) -> None:
        """Has every worker read the served head's files before anybody can change them.

        Raises:
            ValueError: an open address without an API key.
            SwapRefused: a server that cannot swap. It does not start.
        """
        check_address(args)
        self.engine = engine
        print(f"drafttrain: POST {PATH} swaps the head: {await self.show()}")

    async def handle(self, request: Vllms) -> Vllms:
        """Answers a request of Starlette's."""
        from starlette.responses import JSONResponse

        try:
            if request.method == "GET":
                return JSONResponse(await self.show())
            return JSONResponse(await self.post(await request.body()))
        except SwapRefused as refused:
            return JSONResponse({"error": str(refused)}, status_code=409)

    async def show(self) -> Answer:
        """Which head serves. Raises SwapRefused: workers that disagree, or cannot swap."""
        return await self._ask("show")

    async def post(self, content: bytes) -> Answer:
        """Swaps as a request's body asks. Raises SwapRefused: a bad body, or a refused head."""
        try:
            body = json.loads(content)
            folder = body["folder"]
            digest = body.get("sha256", "")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise SwapRefused('the body must be {"folder": NAME}, and may have sha256') from error
        # A task of its own: a client that leaves in the middle does not end it there.
        task = asyncio.ensure_future(self._swap(folder, digest))
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return await asyncio.shield(task)

    async def _swap(self, folder: str, digest: str) -> Answer:
        async with self.lock:
            before = await self.show()
            checked = await self._ask("check", folder, digest)
            try:
                after = await self._ask("apply", str(checked["sha256"]))
            except SwapRefused:
                # All workers or none.
                await self._ask("apply", str(before["sha256"]))
                raise
            # The old head's keys and values of cached prefixes lower the acceptance, no more. The
            # cache stays while requests hold blocks of it.
            dropped = await self.engine.reset_prefix_cache()
            return {**after, "prefix_cache_dropped": bool(dropped)}

    async def _ask(self, *args: str) -> Answer:
        """What all workers answer. Raises SwapRefused: not all do, or not the same."""
        parallel = self.engine.vllm_config.parallel_config
        if parallel.data_parallel_size * parallel.pipeline_parallel_size > 1:
            raise SwapRefused(
                "vLLM returns the answers of one group of workers only, so data and pipeline parallel "
                "servers cannot swap; restart with the new drafter"
            )
        try:
            answers = await self.engine.collective_rpc("drafttrain_head", args=args)
        except Exception as error:
            raise SwapRefused(
                f"the workers do not answer ({error}); does the server have "
                f"--worker-extension-cls {EXTENSION}?"
            ) from error
        errors = {answer["error"] for answer in answers if "error" in answer}
        if errors:
            raise SwapRefused("; ".join(sorted(errors)))
        if answers != [answers[0]] * parallel.world_size:
            raise SwapRefused(
                f"{len(answers)} of {parallel.world_size} workers answer, or they read different files"
            )
        return answers[0]  # type: ignore[no-any-return]


def check_address(args: argparse.Namespace) -> None:
    """Raises ValueError: the server listens to others without an API key.

    Args:
        args: of vLLM's server, which listens to all addresses by default.
    """
    if args.api_key or os.environ.get("VLLM_API_KEY") or args.uds or args.host in _OWN:
        return
    raise ValueError(
        f"drafttrain_swap: host={args.host!r} lets others swap the head; add --host 127.0.0.1 or "
        "--api-key, or drop drafttrain_swap from VLLM_PLUGINS"
    )
