"""Stand-ins for vLLM around the real route and the real swaps: a worker's head, an engine of several workers, a server."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

from drafttrain.inside_vllm.head_files import read_head
from drafttrain.inside_vllm.swap_route import PATH, DrafterSwapRoute, Failure
from drafttrain.inside_vllm.swap_worker import DrafterSwapWorker, HeadSwaps

CONFIG = {"architectures": ["Eagle3Speculator"], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


def write_head(folder: Path, value: float, config: dict | None = None, **tensors) -> Path:
    """A head whose weights are all `value`; tensors replace its own, and None leaves one out."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"fc.weight": torch.full((2, 6), value), "d2t": torch.tensor([3, 3, 5])}
    found |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    found = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    return folder


class StandInHead:
    """The head of an engine. fails: numbers of the loads that fail half-way, counted from 1."""

    vocabulary = 10

    def __init__(self, fails=()):
        self.value = 0.0
        self.loads = 0
        self.fails = fails
        self.parts: set[str] = set()

    def load(self, tensors):
        self.loads += 1
        self.value = float("nan")
        if self.loads in self.fails:
            raise RuntimeError("no memory\nmore")
        self.value = float(tensors["fc.weight"][0, 0])

    def shared(self):
        return self.parts


class StandInWorker(DrafterSwapWorker):
    def __init__(self, first: Path, root: Path, fails=()):
        self.head = StandInHead(fails)
        served = read_head(first, "first")
        self.head.load(served.tensors)
        self._drafttrain_state = HeadSwaps(self.head, served, str(root))


class StandInEngine:
    """vLLM's EngineClient. Each call of a worker is one step, between which others run."""

    def __init__(self, workers, **parallel):
        self.workers = workers
        sizes = {"data_parallel_size": 1, "pipeline_parallel_size": 1, "world_size": len(workers)}
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(**sizes | parallel))
        self.calls = []

    async def collective_rpc(self, method, *, args=()):
        self.calls.append(method)
        await asyncio.sleep(0)
        return [getattr(worker, method)(*args) for worker in self.workers]

    async def reset_prefix_cache(self):
        return True

    @property
    def values(self):
        return [worker.head.value for worker in self.workers]


def route_of(engine) -> DrafterSwapRoute:
    route = DrafterSwapRoute()
    route.engine = engine
    return route


class LiveServer:
    """An HTTP server with the route. key: what clients must send, if anything; page: of metrics."""

    def __init__(self, engine, key="", page=None, port=0):
        route = self.route = route_of(engine)
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()

        class Handler(BaseHTTPRequestHandler):
            def answer(self, act):
                if key and self.headers.get("Authorization") != f"Bearer {key}":
                    return self.reply(401, {"error": "Unauthorized"})
                if self.path != PATH or engine is None:
                    return self.reply(404, {"detail": "Not Found"})
                try:
                    found = asyncio.run_coroutine_threadsafe(act(), loop).result()
                except Failure as failure:
                    return self.reply(failure.status, {"error": str(failure)})
                return self.reply(200, found)

            def do_GET(self):
                if page is not None and self.path == "/metrics":
                    return self.reply(200, page())
                return self.answer(route.show)

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.answer(lambda: route.post(body))

            def reply(self, status, content):
                data = (content if isinstance(content, str) else json.dumps(content)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()
