"""What stands for vLLM's environment in tests, and what several tests of states read."""

from __future__ import annotations

import sys

import torch

from drafttrain.data.store import FeatureStore, load_records
from drafttrain.states.served import Served
from drafttrain.target import Target

SERVED = (1, 2, 3, 4)  # layers of a server
LAYERS = (1, 2, 3)  # of a drafter
# An interpreter that says it is vLLM's environment, and whose server is a process that does nothing.
ENGINE = """#!{python}
import json, os, sys, time
if sys.argv[1] == "-c":
    print(json.dumps({found}))
else:
    open({seen!r}, "w").write(json.dumps([os.getpid(), os.environ.get("PYTHONPATH"), sys.argv[1:]]))
    {does}
"""


def engine(
    folder,
    does: str = "time.sleep(60)",
    vllm: bool = True,
    gpu: bool = False,
    named: bool = True,
    mooncake: str = "",
) -> str:
    """The path of a program that stands for vLLM's interpreter."""
    path = folder / "python"
    found = {"vllm": vllm, "named": named, "gpu": gpu, "mooncake": mooncake}
    path.write_text(
        ENGINE.format(python=sys.executable, found=found, does=does, seen=str(folder / "seen.json"))
    )
    path.chmod(0o755)
    return str(path)


def stored(data, layers=LAYERS) -> dict[str, dict[str, torch.Tensor]]:
    held = FeatureStore.open(data, layers)
    return {row["id"]: held.get(row["id"]) for row in load_records(data)}


def assert_states(client: Served, target: Target, row: list[int]) -> None:
    """The states that a client gets are the target's own."""
    ours = target.forward(torch.tensor([row]), client.layers)
    got = client.request(row)
    torch.testing.assert_close(got.features, ours.features[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.last, ours.last_hidden[0], rtol=1e-5, atol=1e-6)
