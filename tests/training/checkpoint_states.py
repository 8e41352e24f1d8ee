"""The complete state of a checkpoint, and its comparison bit by bit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.files import load_json


def same(a: object, b: object) -> bool:
    """Bit for bit, through nested containers."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return (
            isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        )
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool((a == b) if not hasattr(a, "all") else (a == b).all())


def state_of(checkpoint: Path) -> dict[str, object]:
    """Weights, optimizer, schedule, random numbers, and every loss since the start."""
    files = {
        name: torch.load(checkpoint / name, weights_only=False)
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")
    }
    state = load_json(checkpoint / "trainer_state.json")
    losses = [
        [log["step"], log["loss"], log["grad_norm"]]
        for log in state["log_history"]
        if "loss" in log
    ]
    return {
        "weights": load_file(checkpoint / "model.safetensors"),
        **files,
        "losses": losses,
        "best": state["best_metric"],
        "on_policy": state["stateful_callbacks"].get("OnPolicy", {}),
    }
