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
import contextlib
import ipaddress
import json
import os
from collections.abc import Sequence
from typing import Any, Protocol

from drafttrain.inside_vllm.head_files import ROOT
from drafttrain.inside_vllm.swap_worker import EXTENSION

PATH = "/v1/drafter"
_LONGEST = 10_000  # bytes of a request
Answer = dict[str, Any]


class Engine(Protocol):
    """vLLM's EngineClient, as far as it is used here."""

    vllm_config: Any

    async def collective_rpc(self, method: str, *, args: tuple[object, ...] = ()) -> list[Answer]:
        """What each worker answers."""

    async def reset_prefix_cache(self) -> bool:
        """Whether the cache was emptied; False while requests run."""


class Failure(Exception):
    """An error that the client gets: status and line."""

    def __init__(self, status: int, line: str):
        super().__init__(line)
        self.status = status


class DrafterSwapRoute:
    """The route of one API server."""

    name = "drafttrain_swap"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.engine: Engine | None = None
        # One swap at a time: the steps of two would mix.
        self.lock = asyncio.Lock()
        self.running: set[asyncio.Task[Answer]] = set()

    def attach_router(self, app: Any) -> None:
        """Registers the route."""
        app.add_route(PATH, self.handle, methods=["GET", "POST"])

    async def init_state(
        self, engine: Engine | None, state: object, args: argparse.Namespace
    ) -> None:
        """Has every worker read the served head's files before anybody can change them.

        Raises:
            ValueError: an open address without an API key.
        """
        check_address(args)
        self.engine = engine
        try:
            served = await self.show()
            print(f"drafttrain: heads below {served['root']} can be swapped in: POST {PATH}")
        except Failure as failure:
            print(f"drafttrain: {PATH} refuses every swap: {failure}")

    async def handle(self, request: Any) -> Any:
        """Answers a request of Starlette's."""
        from starlette.responses import JSONResponse

        try:
            if request.method == "POST":
                content = b""
                async for piece in request.stream():
                    content += piece
                    if len(content) > _LONGEST:
                        raise Failure(413, f"a request has at most {_LONGEST} bytes")
                return JSONResponse(await self.post(content))
            return JSONResponse(await self.show())
        except Failure as failure:
            return JSONResponse({"error": str(failure)}, status_code=failure.status)

    async def show(self) -> Answer:
        """Which head serves. Raises Failure: workers that disagree, or cannot swap."""
        answers = await self._ask("drafttrain_show")
        return {key: value for key, value in _same(answers).items() if key != "ok"}

    async def post(self, content: bytes) -> Answer:
        """Swaps as a request's body asks. Raises Failure: a bad body, or a refused head."""
        try:
            body = json.loads(content)
            folder = body["folder"]
            digest = body.get("sha256", "")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Failure(400, 'the body must be {"folder": NAME}, and may have sha256') from error
        if not isinstance(folder, str) or not isinstance(digest, str):
            raise Failure(400, "folder and sha256 must be text")
        # A task of its own: a client that leaves in the middle does not end it there.
        task = asyncio.ensure_future(self._swap(folder, digest))
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return await asyncio.shield(task)

    async def _swap(self, folder: str, digest: str) -> Answer:
        async with self.lock:
            self._check_parallel()
            checked = await self._ask("drafttrain_check", folder, digest)
            found = _same(checked)["sha256"]
            applied = await self._ask("drafttrain_apply", found)
            failed = _errors(applied)
            # All workers or none.
            settled = await self._ask("drafttrain_settle", not failed)
            failed += _errors(settled)
            if failed:
                raise Failure(409, "; ".join(failed))
            # The old head's keys and values of cached prefixes would lower the acceptance, no more.
            # The cache stays while requests hold blocks of it.
            dropped = bool(await self.engine.reset_prefix_cache())  # type: ignore[union-attr]
            return {**await self.show(), "prefix_cache_dropped": dropped}

    def _check_parallel(self) -> None:
        """Raises Failure: an arrangement in which not every worker can be asked."""
        parallel = self.engine.vllm_config.parallel_config  # type: ignore[union-attr]
        for key in ("data_parallel_size", "pipeline_parallel_size"):
            size = getattr(parallel, key)
            if size > 1:
                raise Failure(
                    409,
                    f"{key}={size}: vLLM returns the answers of one group of workers only, so a swap "
                    "in all of them cannot be proven; restart the server with the new drafter",
                )

    async def _ask(self, method: str, *args: object) -> list[Answer]:
        """What every worker answers. Raises Failure: not all of them do."""
        if self.engine is None:
            raise Failure(409, "this server has no engine")
        try:
            answers = await self.engine.collective_rpc(method, args=args)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise Failure(
                500,
                f"the workers do not answer ({reason}); was the server started with "
                f"--worker-extension-cls {EXTENSION}?",
            ) from error
        expected = self.engine.vllm_config.parallel_config.world_size
        if len(answers) != expected:
            raise Failure(409, f"{len(answers)} of {expected} workers answered {method}")
        return answers


def check_address(args: argparse.Namespace) -> None:
    """Raises ValueError: the server listens to others without an API key.

    Args:
        args: of vLLM's server.
    """
    if getattr(args, "uds", None) or args.api_key or os.environ.get("VLLM_API_KEY"):
        return
    host = args.host or "0.0.0.0"  # vLLM's own default
    is_own = host == "localhost"
    with contextlib.suppress(ValueError):
        is_own = is_own or ipaddress.ip_address(host).is_loopback
    if not is_own:
        raise ValueError(
            f"drafttrain_swap: host={host!r} lets others swap the head; add --host 127.0.0.1 or "
            f"--api-key, or drop {ROOT} and drafttrain_swap from VLLM_PLUGINS"
        )


def _errors(answers: Sequence[Answer]) -> list[str]:
    """The different errors among answers."""
    return sorted({str(answer["error"]) for answer in answers if not answer["ok"]})


def _same(answers: Sequence[Answer]) -> Answer:
    """The answer that all workers give. Raises Failure: an error, or different ones."""
    failed = _errors(answers)
    if failed:
        raise Failure(409, "; ".join(failed))
    for answer in answers[1:]:
        if answer["sha256"] != answers[0]["sha256"]:
            raise Failure(409, "the workers read different files; is the folder the same on all?")
    return answers[0]
