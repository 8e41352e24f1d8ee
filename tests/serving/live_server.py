"""Stand-ins for vLLM around the real route and the real swaps: a worker's head, an engine of several workers, a server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace as Record

import torch
from safetensors.torch import save_file
from torch import nn

from drafttrain.data.failures import BadReply
from drafttrain.data.servers import Requests
from drafttrain.inside_vllm.head_files import SwapRefused
from drafttrain.inside_vllm.swap_route import DrafterSwapRoute
from drafttrain.inside_vllm.swap_worker import DrafterSwapWorker, ServedHead

CONFIG = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "torch_dtype": "float32"}


def write_head(folder: Path, value: float, tensors=None, **config) -> Path:
    """A head whose weights are all `value`; tensors and keys replace its own."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"fc": torch.full((2, 6), value), "d2t": torch.tensor([3, 3, 5])}
    save_file(found | (tensors or {}), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


class StandInHead(ServedHead):
    """The head of an engine. fails: its next load does, half-way. value: its first weight."""

    value = 1.0
    loads = 0
    fails = False

    def load(self, head):
        self.loads += 1
        self.value = float(head.tensors.get("fc", torch.zeros(1, 1))[0, 0])
        if self.fails:
            self.fails = False
            raise RuntimeError("no memory")


def worker_of(folder: Path, method: str = "eagle3", parallel: bool = False) -> DrafterSwapWorker:
    """A worker of a server that was started with a head and shares the target's embedding."""
    worker = DrafterSwapWorker()
    model = Record(model=str(folder))
    drafting = Record(method=method, parallel_drafting=parallel, draft_model_config=model)
    target = nn.ModuleDict({"embed": nn.Embedding(3, 2)})
    drafter = nn.ModuleDict({"embed_tokens": target["embed"], "lm_head": nn.Linear(2, 3)})
    sizes = Record(get_vocab_size=lambda: 300)
    worker.vllm_config = Record(speculative_config=drafting, model_config=sizes)
    worker.model_runner = Record(get_model=lambda: target, get_draft_model=lambda: drafter)
    return worker


def route_of(folder: Path, workers: int = 1, **parallel) -> DrafterSwapRoute:
    """The route of an engine whose workers serve a head; they are its `workers`, and their heads its `heads`."""
    route = DrafterSwapRoute()
    route.workers = [worker_of(folder) for _ in range(workers)]
    route.heads = []
    for worker in route.workers:
        worker._drafttrain_served = StandInHead(worker)
        route.heads.append(worker._drafttrain_served)

    async def call(method, args):
        await asyncio.sleep(0)  # between two steps
        return [getattr(worker, method)(*args) for worker in route.workers]

    sizes = {"data_parallel_size": 1, "pipeline_parallel_size": 1, "world_size": workers}
    config = Record(parallel_config=Record(**sizes | parallel))

    async def drop():
        return True

    route.engine = Record(vllm_config=config, collective_rpc=call, reset_prefix_cache=drop)
    return route


def serve(route: DrafterSwapRoute, monkeypatch) -> None:
    """Lets clients reach the route; `route.away` is what they meet instead. With `route.dies` the next swap ends it."""
    route.away = ""
    route.dies = False

    def answer(self, method, url, body, schema, seconds):
        if body and route.dies:
            route.dies = False
            route.away = "connection reset"
        if route.away:
            raise BadReply(route.away)
        act = route.post(json.dumps(body).encode()) if body else route.show()
        try:
            return asyncio.run(act)
        except SwapRefused as refused:
            raise BadReply("HTTP 409", str(refused)) from refused

    monkeypatch.setattr(Requests, "json", answer)
