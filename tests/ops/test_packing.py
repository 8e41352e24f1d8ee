from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from drafttrain.errors import UserError
from drafttrain.ops import native, packing
from drafttrain.ops.packing import (
    SKINNY_ROWS,
    PackedLinear,
    PackedRMSNorm,
    pack,
    pack_panels,
    round_to_int8,
    skinny_linear,
)
from tests.marks import needs_compiler

ROUNDED = {
    torch.float32: lambda weight: weight,
    torch.bfloat16: lambda weight: weight.bfloat16().float(),
    torch.uint8: lambda weight: weight.bfloat16().float(),  # in 12 bits
    torch.int8: round_to_int8,
}


@pytest.fixture
def sixteen_bits(monkeypatch):
    monkeypatch.setenv(packing.WEIGHTS_VARIABLE, "bfloat16")


@pytest.fixture
def twelve_bits(monkeypatch):
    """Also of matrices that are too small to gain."""
    monkeypatch.setenv(packing.WEIGHTS_VARIABLE, "packed")
    monkeypatch.setattr(packing, "_MOST_SIZE", 9)


@pytest.fixture
def form(request, monkeypatch):
    """A format of panels, which `weights` of it get."""
    if request.param != torch.int8:
        width = "twelve_bits" if request.param == torch.uint8 else "sixteen_bits"
        request.getfixturevalue(width)
    return request.param


def weights(out, width, form, seed=0):
    return ROUNDED[form](
        torch.randn(out, width, generator=torch.Generator().manual_seed(seed)) / width**0.5
    )


@needs_compiler
@pytest.mark.parametrize("form", ROUNDED, indirect=True)
@pytest.mark.parametrize(("out", "width"), [(1, 3), (31, 17), (32, 64), (33, 8), (100, 300)])
def test_skinny_linear_equals_the_product(out, width, form):
    weight = weights(out, width, form)
    panels = pack_panels(weight)
    assert panels.dtype == form
    for rows in (1, 2, 5, 12, 13, 24, SKINNY_ROWS, SKINNY_ROWS + 1, 200):
        x = torch.randn(rows, width)
        exact = (x.double() @ weight.double().t()).float()
        torch.testing.assert_close(skinny_linear(x, panels, out), exact, atol=1e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("form", ROUNDED, indirect=True)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_does_not_depend_on_the_others(form, threads):
    """Nor on how many threads there are, which may share a panel of weights."""
    panels = pack_panels(weights(70, 129, form))
    x = torch.randn(200, 129)
    before = torch.get_num_threads()
    together = skinny_linear(x, panels, 70)
    try:
        torch.set_num_threads(threads)
        for rows in (1, 3, 8, 13, SKINNY_ROWS, SKINNY_ROWS + 1, 150, 200):
            assert torch.equal(skinny_linear(x[:rows], panels, 70), together[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("form", [torch.bfloat16, torch.uint8, torch.int8], indirect=True)
def test_one_value_off_the_grid_keeps_the_weight_in_float32(form):
    weight = weights(40, 40, form)
    assert pack_panels(weight).dtype == form
    weight[39, 39] *= 1 + 2**-12
    assert pack_panels(weight).dtype == torch.float32


@needs_compiler
def test_twelve_bits_hold_every_bfloat16_number(twelve_bits, monkeypatch):
    """All 65,536 of them, as the inputs of one output each, so that most exponents have no name."""
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = words.view(torch.bfloat16).float()
    numbers = numbers[numbers.isfinite()]
    weight = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))]
    weight = weight.view(-1, 170)  # [384, 170]
    panels = pack_panels(weight)
    assert panels.dtype == torch.uint8
    assert torch.equal(skinny_linear(torch.eye(170), panels, len(weight)), weight.t())


@needs_compiler
def test_twelve_bits_are_for_matrices_that_they_shrink(monkeypatch):
    monkeypatch.setenv(packing.WEIGHTS_VARIABLE, "packed")
    assert pack_panels(weights(64, 576, torch.bfloat16)).dtype == torch.uint8
    assert pack_panels(weights(64, 8, torch.bfloat16)).dtype == torch.bfloat16
    spread = torch.ldexp(weights(64, 576, torch.bfloat16), -torch.arange(576) % 60)
    assert pack_panels(spread).dtype == torch.bfloat16


@needs_compiler
def test_the_variable_chooses_the_form_of_weights(monkeypatch):
    weight = weights(64, 576, torch.bfloat16)
    assert isinstance(packing._twelve_bits_are_quicker(), bool)
    monkeypatch.setattr(packing, "_twelve_bits_are_quicker", lambda: True)
    for wanted, form in (
        ("auto", torch.uint8),
        ("packed", torch.uint8),
        ("bfloat16", torch.bfloat16),
    ):
        monkeypatch.setenv(packing.WEIGHTS_VARIABLE, wanted)
        assert pack_panels(weight).dtype == form
    monkeypatch.setenv(packing.WEIGHTS_VARIABLE, "12")
    with pytest.raises(UserError, match="CPU_WEIGHTS='12' must be auto, packed or bfloat16"):
        pack_panels(weight)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e4])
def test_rounding_to_int8_errs_by_half_a_step_and_is_known_again(scale):
    weight = torch.randn(2000, 50, generator=torch.Generator().manual_seed(1)) * scale
    weight[7] = 0
    rounded = round_to_int8(weight)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded - weight).abs() <= 0.5001 * step).all()
    assert pack_panels(rounded).dtype == torch.int8
    assert torch.equal(round_to_int8(rounded), rounded)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 8, SKINNY_ROWS, SKINNY_ROWS + 1, 100])
def test_packed_linear_is_a_drop_in(monkeypatch, rows, bias, compiled):
    if not compiled:
        monkeypatch.setattr(packing, "cpu_kernels", lambda: None)
    torch.manual_seed(0)
    linear = nn.Linear(48, 70, bias=bias).requires_grad_(False)
    x = torch.randn(2, rows, 48) if rows == 8 else torch.randn(rows, 48)
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x), atol=1e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("norm_class", [LlamaRMSNorm, Gemma3RMSNorm])
def test_packed_norm_equals_its_family(norm_class):
    norm = norm_class(70, eps=1e-6).requires_grad_(False)
    norm.weight.data.normal_()
    packed = PackedRMSNorm.like(norm)
    x = torch.randn(2, 3, 70)
    torch.testing.assert_close(packed(x), norm(x), atol=1e-5, rtol=1e-5)
    assert torch.equal(packed(x[:, 1:2]), packed(x)[:, 1:2])
    strided = torch.randn(2, 70, 3).transpose(1, 2)
    torch.testing.assert_close(packed(strided), norm(strided), atol=1e-5, rtol=1e-5)


def test_another_function_called_rms_norm_stays():
    class OddRMSNorm(LlamaRMSNorm):
        def forward(self, x):
            return super().forward(x) + 0.1

    model = nn.ModuleDict(
        {"odd": OddRMSNorm(16), "small": LlamaRMSNorm(16).bfloat16(), "layer": nn.LayerNorm(16)}
    )
    pack(model)
    assert [type(module).__name__ for module in model.values()] == [
        "OddRMSNorm",
        "LlamaRMSNorm",
        "LayerNorm",
    ]


def test_without_a_compiler_there_are_no_kernels(monkeypatch, caplog):
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    assert native.cpu_kernels.__wrapped__() is None
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_is_reported(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(native.shutil, "which", lambda _: "/bin/false")
    assert native.cpu_kernels.__wrapped__() is None
    assert "cannot be built" in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@needs_compiler
def test_a_shrunk_layer_computes_and_saves_what_it_did():
    torch.manual_seed(0)
    for weight, kept in (
        (weights(70, 48, torch.bfloat16), torch.bfloat16),
        (torch.randn(70, 48), torch.float32),
    ):
        linear = nn.Linear(48, 70).requires_grad_(False)
        linear.weight.copy_(weight)
        packed = PackedLinear(linear)
        packed.shrink()
        assert packed.stored.dtype == kept
        assert torch.equal(packed.weight, weight)
        assert packed.state_dict().keys() == linear.state_dict().keys()
        assert torch.equal(packed.state_dict()["weight"], weight)
        x = torch.randn(3, 48)
        assert torch.equal(packed(x), PackedLinear(linear)(x))
