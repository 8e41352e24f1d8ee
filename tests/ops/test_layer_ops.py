"""What layers do between products: the kernels and their references compute what torch's operations compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drafttrain.drafters.common.layers import rotate
from drafttrain.ops import layer_ops
from drafttrain.ops.layer_ops import NormForm, add_norm, gate, rotate_heads
from drafttrain.target.proof import relative_error

DTYPES = (torch.float32, torch.bfloat16)
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 6e-3}


@pytest.fixture(params=("reference", "kernels"))
def place(request, monkeypatch):
    """The device, where fused operations run as torch's operations, or as kernels (on a CPU interpreted)."""
    if request.param == "reference":
        return "cpu"
    pytest.importorskip("triton", reason="triton has no build for this platform")
    monkeypatch.setattr(layer_ops, "has_kernels", lambda x: True)
    return "cuda" if torch.cuda.is_available() else "cpu"


def random(*sizes, dtype):
    draw = torch.Generator().manual_seed(len(sizes) * 7 + sizes[-1])
    return torch.randn(*sizes, generator=draw).to(dtype)


def near(ours, theirs):
    error = relative_error(ours, theirs)
    assert error < CLOSE[ours.dtype], error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("plus", [0.0, 1.0])
def test_a_norm_of_the_sum_changes_the_state(place, dtype, width, plus):
    state, delta = random(3, width, dtype=dtype), random(1, 3, width, dtype=dtype)[0]
    weight = random(width, dtype=dtype)
    total = state + delta  # as the model adds them, rounded
    wide = total.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + plus)
    state = state.to(place)
    form = NormForm(weight.to(place), 1e-5, plus)
    near(add_norm(state, delta.to(place), form), want)
    near(state, total.double())  # Triton's interpreter rounds down
    near(add_norm(state, None, form), want)
    near(state, total.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rotary"), [(16, 16), (20, 20), (24, 8)])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_normed_and_rotated_in_halves(place, dtype, width, rotary, normed):
    x = random(3, 2, width, dtype=dtype)
    angles = random(3, rotary // 2, dtype=torch.float32).repeat(1, 2)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    wide = x.double()
    form = None
    if normed:
        weight = random(width, dtype=dtype)
        form = NormForm(weight.to(place), 1e-6, 1.0)
        wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + 1)
    want = rotate(wide, tuple(table.double()[:, None] for table in tables))
    cosine, sine = (table.to(place) for table in tables)
    near(rotate_heads(x.to(place), (cosine, sine), form), want)
    near(rotate_heads(x.to(place), (cosine[:, None], sine[:, None]), form), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
def test_an_activation_gates(place, dtype, gelu):
    gated, up = random(5, 300, dtype=dtype), random(1, 5, 300, dtype=dtype)[0]
    wide = gated.double()
    activated = F.gelu(wide, approximate="tanh") if gelu else F.silu(wide)
    near(gate(gated.to(place), up.to(place), gelu), activated * up.double())


def test_a_tokens_results_do_not_depend_on_others(place):
    state, delta = random(6, 64, dtype=torch.float32), random(1, 6, 64, dtype=torch.float32)[0]
    form = NormForm(random(64, dtype=torch.float32).to(place), 1e-6, 0.0)
    together = add_norm(state.clone().to(place), delta.to(place), form)
    for i in range(6):
        alone = add_norm(state[i : i + 1].clone().to(place), delta[i : i + 1].to(place), form)
        assert torch.equal(together[i : i + 1], alone)


class ShiftedRMSNorm(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x) + 0.1


class OffsetRMSNorm(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


def test_a_norm_is_known_by_what_it_computes():
    plain = nn.RMSNorm(32, eps=1e-6)
    nn.init.normal_(plain.weight)
    for norm, plus in ((plain, 0.0), (plain.bfloat16(), 0.0), (OffsetRMSNorm(32, eps=1e-6), 1.0)):
        form = NormForm.of(norm)
        assert form is not None and form.plus == plus and form.weight is norm.weight
    assert NormForm.of(ShiftedRMSNorm(32, eps=1e-6)) is None
    assert NormForm.of(nn.LayerNorm(32)) is None
    assert not layer_ops.has_kernels(torch.zeros(1))
