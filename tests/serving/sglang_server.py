"""A server that speaks SGLang's routes for new weights, as SGLang 0.5.23's sources define them.

entrypoints/http_server.py, managers/io_struct.py, managers/scheduler_components/weight_updater.py,
utils/common.py (SafeUnpickler), utils/weight_checker.py, models/llama_eagle3.py
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from drafttrain.inside_vllm.head_files import read_head

# The part of SafeUnpickler's list that CPU tensors need.
ALLOWED = {("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2")}


class Unpickler(pickle.Unpickler):
    """SGLang's, which admits tensors and reads their storages with weights_only."""

    def find_class(self, module, name):
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        raise RuntimeError(f"Blocked unsafe global ({module}.{name})")


class Rank:
    """One rank's weights: the target's, and a drafter that shares the target's embedding."""

    def __init__(self, folder: Path):
        self.target = {"model.embed_tokens.weight": torch.ones(4, 2)}
        self.draft = dict(read_head(folder, "").tensors)
        self.draft.pop("d2t", None)
        self.draft["embed_tokens.weight"] = self.target["model.embed_tokens.weight"]

    def load(self, pairs):
        """load_weights: names that the drafter lacks are skipped, another shape ends the scheduler."""
        for name, tensor in pairs:
            if "d2t" in name:  # on a GPU: an index of another device
                raise AssertionError("SGLang cannot read d2t again")
            if name in self.draft:
                assert self.draft[name].shape == tensor.shape, "the scheduler ends"
                self.draft[name].copy_(tensor)

    def checksums(self, selector):
        weights = {"target": self.target, "draft": self.draft}[selector]
        return {"checksums": {name: str(tensor.tolist()) for name, tensor in weights.items()}}


class SglangServer:
    """The server, on a port of its own.

    Attributes: url; info: what /server_info says; version: of the weights; ranks; open: whether an
    update is; routes: those asked for, in order; counters: of /metrics, None without the page.
    """

    def __init__(self, folder: Path, ranks: int = 1, **info):
        self.ranks = [Rank(folder) for _ in range(ranks)]
        self.info = {
            "version": "0.5.23",
            "tp_size": ranks,
            "dp_size": 1,
            "pp_size": 1,
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(folder),
            "speculative_draft_model_quantization": None,
        } | info
        self.version = "default"
        self.counters = Counter()
        self.open = False
        self.routes = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer({})

            def do_POST(self):
                content = self.rfile.read(int(self.headers["Content-Length"]))
                fake.routes.append(self.path)
                self.answer(json.loads(content))

            def answer(self, body):
                act = getattr(fake, self.path.strip("/"), None)
                status, said = act(**body) if act else (404, "Not Found")
                text = said if isinstance(said, str) else json.dumps(said)
                content = text.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self._server.shutdown()

    def server_info(self):
        return 200, self.info

    def model_info(self):
        return 200, {"weight_version": self.version}

    def metrics(self):
        if self.counters is None:
            return 404, "Not Found"
        lines = ['sglang:token_usage{model_name="tiny"} NaN', "python_info 1"]
        for name, count in self.counters.items():
            lines.append(f'sglang:{name}_total{{model_name="tiny",is_streaming="true"}} {count}')
        return 200, "\n".join(lines)

    def begin_weight_update(self, selector="all"):
        if self.open:
            return said("a weight-update session is already open; call end_weight_update() first")
        self.open = True
        return said()

    def end_weight_update(self):
        if not self.open:
            return said("no weight-update session is open; call begin_weight_update() first")
        self.open = False
        return said()

    def update_weights_from_tensor(
        self,
        serialized_named_tensors,
        selector="all",
        flush_cache=True,
        weight_version=None,
    ):
        if not self.open:
            return said(
                "update_weights_from_tensor must run between begin_ and end_weight_update()"
            )
        assert selector == "draft" and not flush_cache, "this would load a head into the target"
        for number, rank in enumerate(self.ranks):
            content = base64.b64decode(serialized_named_tensors[number])
            rank.load(Unpickler(io.BytesIO(content)).load())
        self.version = weight_version or self.version
        return said()

    def weights_checker(self, action="checksum", selector="all"):
        return 200, {"ranks": [rank.checksums(selector) for rank in self.ranks]}


def said(message=""):
    """What a route answers; a message is a failure."""
    return 400 if message else 200, {"success": not message, "message": message}
