"""The pretend GPU itself: it refuses what a GPU refuses, counts what a GPU waits for, and computes what the CPU computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.gpu.pretend import PretendTensor


def test_devices_do_not_mix(gpu):
    here = torch.ones(3)
    there = torch.ones(3, device="cuda")
    assert there.is_cuda and there.device == torch.device("cuda:0") and not here.is_cuda
    with pytest.raises(
        RuntimeError, match=r"same device.*test_pretend\.py:\d+ test_devices_do_not_mix"
    ):
        here + there
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat((there, torch.tensor(1.0)[None]))
    with pytest.raises(RuntimeError, match="should be on the CPU"):
        here[torch.zeros(1, dtype=torch.long, device="cuda")]
    with pytest.raises(TypeError, match=r"use Tensor\.cpu"):
        there.numpy()
    with pytest.raises(RuntimeError, match="invalid device ordinal 1"):
        torch.ones(1, device="cuda:1")
    assert (there * torch.tensor(2.0)).tolist() == [2, 2, 2], "a number of the host may mix"


@pytest.mark.parametrize(
    ("run", "waits"),
    [
        (lambda x: x + 1, 0),
        (lambda x: x.topk(2), 0),
        (lambda x: x.sum().item(), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: bool((x > 0).all()), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 1], 1),
        (lambda x: x[torch.tensor([0])], 1),
        (lambda x: torch.tensor([1, 2], device=x.device), 1),
        (lambda x: torch.tensor([1, 2]).to(x.device, non_blocking=True), 0),
        (lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.long, device=x.device)), 1),
        (
            lambda x: x.repeat_interleave(
                torch.ones(4, dtype=torch.long, device=x.device), output_size=4
            ),
            0,
        ),
        (lambda x: torch.cuda.synchronize(), 1),
        (lambda x: torch.cuda.current_stream().synchronize(), 1),
    ],
)
def test_what_the_host_waits_for(gpu, run, waits):
    x = torch.arange(4.0, device="cuda")
    gpu.reset()
    run(x)
    assert sum(gpu.syncs.values()) == waits
    assert all("test_pretend.py" in line for line in gpu.syncs)


def test_a_graph_computes_when_it_is_replayed(gpu):
    given = torch.ones(3, device="cuda")
    total = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        made = (given * 2).relu()
        total.add_(made)
    assert made.isnan().all() and total.tolist() == [0, 0, 0], "a capture computes nothing"
    for number in (1, 2):
        given.fill_(number)
        graph.replay()
    assert made.tolist() == [4, 4, 4] and total.tolist() == [6, 6, 6]
    assert gpu.replays == 2 and gpu.captures == gpu.streams == 1
    for wait in (
        lambda: given.sum().item(),
        lambda: given[given > 0],
        lambda: torch.tensor([1], device="cuda"),
    ):
        with (
            pytest.raises(RuntimeError, match="synchronizing"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            wait()
    assert gpu.recording is None


def test_modules_move_with_their_tied_weights_and_learn(gpu):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    x = torch.randn(2, 4)
    grads = []
    for each in (model, copy.deepcopy(model).to("cuda")):
        assert each[0].weight is each[2].weight
        each(x.to(each[0].weight.device)).pow(2).sum().backward()
        grads.append(each[0].weight.grad.cpu())
    torch.testing.assert_close(grads[1], grads[0])
    optimizer = torch.optim.AdamW(each.parameters(), fused=False)
    optimizer.step()
    assert isinstance(each[0].weight, PretendTensor) and not torch.equal(
        each[0].weight.cpu(), model[0].weight
    )


def test_autocast_multiplies_in_bfloat16(gpu):
    layer = nn.Linear(4, 4).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(torch.ones(1, 4, device="cuda")).dtype == torch.bfloat16


def test_the_current_device_and_streams(two_gpus):
    other = torch.ones(1, device="cuda:1")
    with torch.cuda.device_of(other):
        assert torch.cuda.current_device() == 1 and torch.ones(1, device="cuda").device.index == 1
    assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match="same device"):
        other + torch.ones(1, device="cuda:0")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
    assert torch.cuda.current_stream() is torch.cuda.default_stream()


def test_what_is_left_behind_says_so(gpu):
    gpu.__exit__(None, None, None)
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1, device="cuda")
    gpu.__enter__()
