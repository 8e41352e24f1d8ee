"""Stand-ins for vLLM around the real route and the real swaps: a worker's head, an engine of several workers, a server."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace as Record

import torch
from safetensors.torch import save_file
from torch import nn

from drafttrain.inside_vllm.head_files import SwapRefused
from drafttrain.inside_vllm.swap_route import DrafterSwapRoute
from drafttrain.inside_vllm.swap_worker import DrafterSwapWorker, ServedHead

CONFIG = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "torch_dtype": "float32"}


def write_head(folder: Path, value: float, config=CONFIG, **tensors) -> Path:
    """A head whose weights are all `value`; tensors replace its own."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"fc": torch.full((2, 6), value), "d2t": torch.tensor([3, 3, 5]), **tensors}
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def drafting(method: str, parallel: bool = False, model: str = "") -> Record:
    """vLLM's config of a server that drafts."""
    model_config = Record(get_vocab_size=lambda: 300)
    described = Record(
        method=method, parallel_drafting=parallel, draft_model_config=Record(model=model)
    )
    return Record(speculative_config=described, model_config=model_config)


class StandInHead(ServedHead):
    """The head of an engine. fails: numbers of the coming loads that fail half-way. value: its first weight."""

    value = 1.0
    loads = 0
    fails: tuple[int, ...] = ()

    def load(self, head):
        self.loads += 1
        if self.loads in self.fails:
            raise RuntimeError("no memory")
        self.value = float(head.tensors.get("fc", torch.zeros(1, 1))[0, 0])


def worker_of(first: Path) -> DrafterSwapWorker:
    """A worker that serves a head, whose root is in the environment."""
    worker = DrafterSwapWorker()
    worker.vllm_config = drafting("eagle3", model=str(first))
    target = nn.ModuleDict({"embed": nn.Embedding(3, 2)})
    drafter = nn.ModuleDict({"embed_tokens": target["embed"], "lm_head": nn.Linear(2, 3)})
    worker.model_runner = Record(get_model=lambda: target, get_draft_model=lambda: drafter)
    worker._drafttrain_served = StandInHead(worker)
    return worker


class StandInEngine:
    """vLLM's EngineClient. Each call of the workers is one step, between which others run."""

    def __init__(self, *workers, **parallel):
        self.workers = list(workers)
        sizes = {"data_parallel_size": 1, "pipeline_parallel_size": 1, "world_size": len(workers)}
        self.vllm_config = Record(parallel_config=Record(**sizes | parallel))

    async def collective_rpc(self, method, *, args=()):
        await asyncio.sleep(0)
        return [getattr(worker, method)(*args) for worker in self.workers]

    async def reset_prefix_cache(self):
        return True

    @property
    def heads(self):
        return [worker._drafttrain_served for worker in self.workers]

    @property
    def values(self):
        return [head.value for head in self.heads]


class LiveServer:
    """An HTTP server with the route, for its `with` block. key: what clients must send; page: makes the metrics."""

    def __init__(self, engine, key="", page=None, port=0):
        route = self.route = DrafterSwapRoute()
        route.engine = engine

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, content = 200, ""
                if self.path == "/metrics" and page:
                    content = page()
                elif route.engine is None:
                    status = 404
                elif key and self.headers.get("Authorization") != f"Bearer {key}":
                    status = 401
                else:
                    act = route.post(body) if body else route.show()
                    try:
                        content = json.dumps(asyncio.run(act))
                    except SwapRefused as refused:
                        status, content = 409, str(refused)
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content.encode())

            do_POST = do_GET

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
