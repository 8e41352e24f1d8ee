"""A server that hands out a tiny target's states as vLLM does, and fails as servers fail."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import uuid
from collections import deque
from pathlib import Path

import torch
from safetensors.torch import save

from drafttrain.states.transports.folder import write_record
from drafttrain.target import Target
from tests.data.faulty_server import FAULTS, Handler, LocalServer

# Besides FAULTS, which concern the reply: what `faults` and `always` may name.
STATE_FAULTS = (
    "torn file",
    "no file",
    "NaN",
    "late file",
    "other row",
    "wrong width",
    "outside",
    "link",
    "no states",
)


class FakeStateServer(LocalServer):
    """Serves `layers` of a target (ascending, the last its number of layers) from `folder`.

    Attributes:
        url; requests: prompts in the order of their arrival. before_answer: called in the thread of a request; waits.
        faults: names of faults that the next requests meet, one each; always: the fault of all others.
        computes: the target that computes; another one, or one whose norm differs, is a server of another model.
        shift: added to all layers but the first, as a server with another count does.
        tokenizer: of prompts in text.
        longest: tokens of a row, one for the answer included.
    """

    def __init__(
        self,
        target: Target,
        folder: Path,
        layers: tuple[int, ...],
    ):
        self.computes = target
        self.tokenizer = target.tokenizer
        self.folder = folder
        self.layers = layers
        self.before_answer = lambda: None
        self.shift = 0
        self.longest = 4096
        self.requests: list[list[int] | str] = []
        self.faults: deque[str] = deque()
        self.always = ""
        self.lock = threading.Lock()
        self.announces = target
        self.start()

    def start(self) -> None:
        """Writes the record and listens; again on the same port after `stop`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_record(self.folder, self.announces, self.layers)
        super().start()

    @property
    def models(self) -> tuple[int, bytes]:
        return 200, json.dumps({"data": [{"id": "served", "max_model_len": self.longest}]}).encode()

    def respond(self, handler: Handler, body: dict) -> None:
        fault = self.asked(body["prompt"])
        self.before_answer()
        if fault in FAULTS:
            FAULTS[fault](handler, {"choices": [{"text": ""}]})
        else:
            handler.answer(self.answer(body, fault))

    def asked(self, prompt: list[int] | str) -> str:
        with self.lock:
            self.requests.append(prompt)
            return self.faults.popleft() if self.faults else self.always

    @torch.no_grad()
    def answer(self, body: dict, fault: str) -> dict:
        """A reply as vLLM's, after the states have been written."""
        prompt = body["prompt"]
        ids = torch.tensor(
            self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        )
        layers = [max(layer + self.shift, 0) for layer in self.layers]
        target = self.computes
        out = target.forward(ids[None], layers)
        states = out.features[0].reshape(len(ids), len(layers), -1)  # [n, layers, h]
        choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": None}
        if (most := body.get("prompt_logprobs")) is not None:
            logprobs = target.head(out.last_hidden[0]).log_softmax(-1)
            choice["prompt_logprobs"] = [None]
            for row, token in zip(logprobs, ids[1:].tolist(), strict=False):
                chosen = {*row.topk(most).indices.tolist(), token}
                choice["prompt_logprobs"].append(
                    {str(i): {"logprob": float(row[i]), "rank": 1} for i in chosen}
                )
        reply = {"object": "text_completion", "model": "served", "choices": [choice]}
        if fault != "no states":
            reply["kv_transfer_params"] = {
                "hidden_states_path": str(self.write(ids, states, fault))
            }
        return reply

    def write(self, ids: torch.Tensor, states: torch.Tensor, fault: str) -> Path:
        """Writes a file of states with its lock, as vLLM's connector does; returns the path that the reply names."""
        path = self.folder / f"cmpl-{uuid.uuid4().hex}.safetensors"
        if fault == "NaN":
            states[len(states) // 2, 0, 0] = float("nan")
        ids = ids.flip(0) if fault == "other row" else ids
        states = states[..., :-1] if fault == "wrong width" else states
        content = save({"hidden_states": states.contiguous(), "token_ids": ids.contiguous()})
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish() -> None:
            if fault == "link":
                path.symlink_to("/etc/hosts")
            elif fault != "no file":
                path.write_bytes(content[: len(content) // 2] if fault == "torn file" else content)
            os.close(lock)

        if fault == "late file":
            threading.Timer(0.2, finish).start()
        else:
            finish()
        return Path("/etc/hosts.safetensors") if fault == "outside" else path
