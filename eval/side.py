"""A benchmark's side in a process of its own: takes orders as JSON lines, answers with seconds, loss and memory.

Needs nothing but torch, so that environments of other trainers can run it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch


def serve(
    loss_of: Callable[[int], torch.Tensor],
    parameters: Iterable[torch.nn.Parameter],
    device: torch.device,
) -> None:
    """One optimizer step per line {"batch": i}; AdamW and clipping are the same for every side."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95))
    rest = _memory(device, reset=True)[0]
    for line in sys.stdin:
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(json.loads(line)["batch"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        peak = _memory(device)[1]
        answer = {"seconds": seconds, "loss": loss.item(), "at_rest_mb": rest, "peak_mb": peak}
        print(json.dumps(answer), flush=True)


def _memory(device: torch.device, reset: bool = False) -> tuple[float, float]:
    """Now and at most so far, in MB: the allocator's on CUDA, the process's resident memory on Linux."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 1e6, torch.cuda.max_memory_allocated() / 1e6
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # lets VmHWM start again
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file if line.startswith("Vm"))
    now, most = (int(lines[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM"))
    return now, most


class Side:
    """The other end: a side's process, seen from the one that measures."""

    def __init__(self, command: list[str]):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self, number: int) -> dict[str, Any]:
        """Runs a step on a batch; returns seconds, loss, at_rest_mb (before the first step) and peak_mb (so far)."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"batch": number}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                return json.loads(line)
        raise SystemExit(f"a side ended early: {self.process.args}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
