"""Attention of long prompts on a GPU where no kernel of torch serves it: windows, soft caps, sinks, and a prefix."""

from __future__ import annotations

import pytest
import torch

from drafttrain.ops.tree_attention import TreeLayout, tree_attention
from drafttrain.ops.tree_attention_triton import PackedPlan, static_reference
from tests.gpu.pretend import PretendTensor


def heads(count, length, seed, device="cuda"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, length, 16, generator=generator).bfloat16().to(device)


@pytest.mark.parametrize(
    "form", [{"window": 40}, {"sinks": True}, {}], ids=["window", "sinks", "beyond 2048 tokens"]
)
def test_masks_are_made_on_the_device_once_for_all_layers(gpu, form):
    prefix = 300
    n = 600
    query = heads(4, n, 1)
    key = heads(2, prefix + n, 2)
    sinks = (
        torch.zeros(4, dtype=torch.bfloat16, device="cuda") if form.pop("sinks", False) else None
    )
    layout = TreeLayout(prefix, count=n)
    made = []
    gpu.reset()
    for _ in range(3):  # layers
        before = sum(gpu.calls.values())
        tree_attention(query, key, key, layout, scaling=0.25, sinks=sinks, **form)
        made.append(sum(gpu.calls.values()) - before)
    assert not gpu.syncs and not gpu.uploads
    assert made[0] > made[1] == made[2], "later layers find the masks"


def exact(query, key, value, scaling, softcap, sinks):
    """The textbook form in float64, causal, with the bfloat16 inputs."""
    query, key, value = (x.data_on_cpu.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    n, seen = scores.shape[2:]
    scores = scores.masked_fill(
        torch.ones(n, seen, dtype=torch.bool).triu(seen - n + 1), float("-inf")
    )
    if sinks is not None:
        column = sinks.data_on_cpu.double().view(1, -1, 1, 1).expand(1, -1, n, 1)
        scores = torch.cat((scores, column), dim=-1)
    return scores.softmax(-1)[..., :seen] @ value


@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("static", [False, True], ids=["prefill", "round"])
def test_scores_are_summed_in_float32(gpu, softcap, sinks, static):
    """A score of 30 rounds to a multiple of 1/8 in bfloat16, which changes a weight by 6 %; rounding weights, by 0.4 %."""
    prefix, n = (0, 20) if static else (10, 300)
    query = 4 * heads(4, n, 1)
    key = 4 * heads(2, prefix + n, 2)
    value = heads(2, prefix + n, 3)
    sink = torch.linspace(0, 30, 4, dtype=torch.bfloat16).to("cuda") if sinks else None
    form = {"scaling": 0.25, "window": None, "softcap": softcap, "sinks": sink}
    if static:
        plan = PackedPlan.build([(0, TreeLayout(0, count=n))], "cuda")
        got = static_reference(query, key, value, plan, **form)
    else:
        got = tree_attention(query, key, value, TreeLayout(prefix, count=n), **form)
    assert isinstance(got, PretendTensor) and got.dtype == torch.bfloat16
    want = exact(query, key, value, 0.25, softcap, sink)
    error = (got.data_on_cpu.double() - want).abs().max().item()
    assert error < 0.02, error
