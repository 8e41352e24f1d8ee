"""Modules packed for inference on a CPU: weights in panels for the kernels, each norm in one call.

Decoding multiplies a few rows (1 to ~64 tree nodes) with every weight of the model, so it should
cost one pass over the weights in memory. torch's CPU linear repacks the weight on every call and
reaches a third of the memory bandwidth. `eval/bench_linear.py` compares both over shapes, rows and
dtypes.

Published weights are bfloat16. A float32 weight that holds only such values is streamed as
bfloat16: half the bytes. What is multiplied depends on the dtype that the user asked for:

    float32     weights are widened in registers, exactly; float32 products and sums
    bfloat16    inputs are rounded to bfloat16, as in any bfloat16 model, if the processor
                multiplies bfloat16 (AVX512-BF16, AMX, NEON's BF16), at twice the rate; sums are
                float32. Other processors compute as for float32.

bfloat16 weights whose exponents are few are streamed in 12 bits, without loss: three quarters of
the bytes, the same words in registers. Rows that are integers up to 127 times a factor are streamed
as int8. In every format a row's result is the same to the bit, alone and among other rows.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.errors import UserError, shown
from drafttrain.ops.layer_ops import NormForm
from drafttrain.ops.native import built_kernels, cpu_kernels, multiplies_bfloat16

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
SKINNY_ROWS = 64  # most tokens of a draft step in the kernels, whose trees have as many
_LANES = 16  # as in cpu.c
# dtype of panels -> enum format of cpu_linear.c; uint8 panels hold weights in 12 bits
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 4}
# format -> the one of the same panels whose inputs are rounded to bfloat16
ROUNDED = {1: 3, 4: 5}
WEIGHTS_VARIABLE = "DRAFTTRAIN_CPU_WEIGHTS"
_QUAD_WORDS = 128  # 16-bit words that are packed together, as in cpu_linear.c
_QUAD = 192  # bytes of them in 12 bits
_LEGEND = 64  # bytes of struct legend
_REST = 8  # bytes of struct rest
# A matrix is packed in 12 bits if that takes at most this share of its bytes in bfloat16: weights of
# rare exponents take 8 bytes more each, narrow panels their legends.
_MOST_SIZE = 0.79


def form_of(panels: Tensor, rounded: bool = False) -> int:
    """The enum format of panels.

    Args:
        rounded: inputs of bfloat16 weights are rounded to bfloat16.
    """
    form = FORMATS[panels.dtype]
    if rounded:
        return ROUNDED.get(form, form)
    return form


def cpu_has_bfloat16() -> bool:
    """True if this CPU multiplies bfloat16 natively (AVX512-BF16 or AMX); emulation is slower."""
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        supported = getattr(torch.cpu, name, None)  # missing in some builds of torch
        if supported is not None and supported():
            return True
    return False


def round_to_int8(weight: Tensor) -> Tensor:
    """[out, in] -> a near matrix of the same dtype whose rows are integers up to 127 times a factor.

    `pack_panels` detects such a matrix: the factor keeps 16 bits, so 127 times the factor is exact
    in float32.
    """
    numbers = weight.float()  # [out, in]
    least = torch.finfo(torch.float32).tiny * 2**16  # keeps the factor a normal number
    highest = numbers.abs().amax(1, keepdim=True).clamp_min(least)  # [out, 1]
    bits = (highest / 127).view(torch.int32)
    factor = ((bits + 0xFF) & ~0xFF).view(torch.float32)  # [out, 1], rounded up to 16 bits
    return ((numbers / factor).round() * factor).to(weight.dtype)


def _as_int8(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Integers [out, in] int8 and factors [out] whose products are exactly a float32 weight.

    None for a weight that has no such form.
    """

    def parts(rows: Tensor) -> tuple[Tensor, Tensor, bool]:
        factor = rows.abs().amax(1, keepdim=True) / 127  # [rows, 1]
        integers = (rows / factor).nan_to_num().round()  # 0 / 0 in a row of zeros
        return integers, factor[:, 0], torch.equal(integers * factor, rows)

    # Most weights fail at their first row, which is cheap to test.
    _, _, exact = parts(weight[:1])
    if not exact:
        return None
    integers, factor, exact = parts(weight)
    if not exact:
        return None
    return integers.to(torch.int8), factor


def twelve_bits_pay() -> bool:
    """Whether bfloat16 weights are packed in 12 bits: where this machine then multiplies quicker.

    $DRAFTTRAIN_CPU_WEIGHTS=packed or =bfloat16 decides instead, for those who compare.

    Raises:
        UserError: the variable has another value.
    """
    wanted = os.environ.get(WEIGHTS_VARIABLE, "auto")
    if wanted not in ("auto", "packed", "bfloat16"):
        raise UserError(f"{WEIGHTS_VARIABLE}={shown(wanted)} must be auto, packed or bfloat16")
    if cpu_kernels() is None or wanted == "bfloat16":
        return False
    return wanted == "packed" or _twelve_bits_are_quicker()


@functools.cache
def _twelve_bits_are_quicker() -> bool:
    """Measured once per process, in some 0.4 s, on weights that no cache holds.

    Unpacking takes instructions that a processor must have to spare while it waits for memory.
    Both forms give the same bits, so that a wrong choice on a busy machine costs time only.
    """
    width = 576
    block = torch.rand(64, width // 2, 2 * _LANES, 2) - 0.5  # panels of 2 MB
    paired = block.bfloat16().repeat(32, 1, 1, 1)
    packed = _in_twelve_bits(paired)
    assert packed is not None, "uniform numbers have few exponents"
    out = len(paired) * 2 * _LANES
    rounded = multiplies_bfloat16()
    best: dict[tuple[int, int], float] = {}  # (rows, form) -> seconds
    for _ in range(6):
        for rows in (1, 8):  # a plain step, a small tree
            x = torch.ones(rows, width)
            for form, panels in enumerate((paired, packed)):  # 0: bfloat16, 1: 12 bits
                began = time.perf_counter()
                skinny_linear(x, panels, out, rounded)
                seconds = time.perf_counter() - began
                best[rows, form] = min(seconds, best.get((rows, form), seconds))
    ratio = (best[1, 1] + best[8, 1]) / (best[1, 0] + best[8, 0])
    logger.info("weights in 12 bits take %.2f of the time of bfloat16 on this CPU", ratio)
    return ratio <= 1  # also for the memory


def _in_twelve_bits(paired: Tensor) -> Tensor | None:
    """Panels of bfloat16 weights in 12 bits, exactly: see "weights in 12 bits" in cpu_linear.c.

    Args:
        paired: [panels, in / 2, 32, 2] bfloat16, of a multiple of four inputs.

    Returns:
        Bytes; None where that saves too little.
    """
    kernels = built_kernels()
    threads = torch.get_num_threads()
    panels = len(paired)
    words = paired[0].numel()  # of a panel
    legends = torch.empty((panels, _LEGEND), dtype=torch.uint8)
    kernels.name_exponents(paired.data_ptr(), panels, words, legends.data_ptr(), threads)
    numbers = legends.view(torch.int32)  # [panels, 16]; behind 16 bytes: first, rest
    rest = numbers[:, 5]  # [panels] weights of rare exponents
    total = int(rest.sum())
    size = words // _QUAD_WORDS * _QUAD + _LEGEND
    needed = panels * size + total * _REST
    if needed > _MOST_SIZE * paired.nbytes:
        return None
    numbers[:, 4] = rest.cumsum(0) - rest  # where each panel's begin
    packed = torch.empty(needed, dtype=torch.uint8)
    kernels.pack_twelve(
        paired.data_ptr(), panels, words, legends.data_ptr(), packed.data_ptr(), threads
    )
    return packed


def pack_panels(weight: Tensor) -> Tensor:
    """[out, in] -> panels of 32 outputs for `skinny_linear`, in the smallest exact of FORMATS.

    Returns:
        [out / 32, ...], see the comments of each format.
    """
    out = len(weight)
    panels = -(-out // (2 * _LANES))  # rounded up

    def padded(values: Tensor) -> Tensor:
        """[out, ...] -> [panels, 2, lanes, ...], with zeros behind the last output."""
        rows = values.new_zeros((panels * 2 * _LANES, *values.shape[1:]))
        rows[:out] = values
        return rows.view(panels, 2, _LANES, *values.shape[1:])

    small = None
    if weight.dtype == torch.float32:
        small = _as_int8(weight)
    if small is not None:
        integers, factors = small
        by_input = padded(integers).permute(0, 3, 1, 2)  # [panels, in, 2, lanes]
        numbers = by_input.reshape(panels, -1)  # [panels, in * 32]
        ends = padded(factors).view(panels, -1).view(torch.int8)  # [panels, 32 * 4] bytes
        return torch.cat((numbers, ends), dim=1)
    half = weight.to(torch.bfloat16)
    if torch.equal(half.to(weight.dtype), weight):
        twelve = twelve_bits_pay()
        whole = 4 if twelve else 2  # inputs that are packed together
        rows = padded(F.pad(half, (0, -weight.shape[1] % whole))).flatten(1, 2)
        pairs = rows.unflatten(2, (-1, 2))  # [panels, 32, in / 2, 2]
        paired = pairs.permute(0, 2, 1, 3).contiguous()  # [panels, in / 2, 32, 2]
        packed = None
        if twelve:
            packed = _in_twelve_bits(paired)
        if packed is not None:
            return packed
        # Without the inputs that pad to a multiple of four.
        return paired[:, : -(-weight.shape[1] // 2)].contiguous()
    return padded(weight).permute(0, 3, 1, 2).contiguous()  # [panels, in, 2, lanes]


def pack_gated(weight: Tensor) -> Tensor:
    """Panels of a gated MLP's first weight for one kernel: alternately of gate and up rows.

    Args:
        weight: [2 * inner, in], the gate rows and then the up rows.
    """
    inner = len(weight) // 2
    missing = -inner % (2 * _LANES)
    halves = F.pad(weight.unflatten(0, (2, inner)), (0, 0, 0, missing))  # [2, padded inner, in]
    blocks = halves.unflatten(1, (-1, 2 * _LANES)).transpose(0, 1)  # [panels, 2, 32, in]
    return pack_panels(blocks.flatten(0, 2))


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """As `torch.no_grad()`, but costs only a test where gradients are off already."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return run


def address_of(numbers: array[int]) -> int:
    """The address of a call's numbers, which must live until the call returns.

    An `array` is quicker to make than numpy's.
    """
    address, _ = numbers.buffer_info()
    return address


def check(
    name: str,
    tensor: Tensor,
    sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raises unless a kernel may read a tensor: this dtype and shape, contiguous, in CPU memory.

    Raises:
        TypeError: another dtype. ValueError: another shape, layout or device.
    """
    check_form(name, tensor, sizes, dtype)
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} has strides {tensor.stride()}, but the kernel reads contiguous CPU memory"
        )


def check_form(
    name: str,
    tensor: Tensor,
    sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> None:
    """As `check`, for any layout."""
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} is {tensor.dtype}, but the kernel reads {dtype}; convert it first")
    if tensor.shape != sizes:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, must have {list(sizes)}")
    if not tensor.is_cpu:
        raise ValueError(f"{name} is on {tensor.device}, but the kernel reads CPU memory")


def check_rows(name: str, tensor: Tensor, *row: int) -> int:
    """As `check`, for any number of float32 rows of this shape; returns their number."""
    count = 0
    if tensor.dim():
        count = tensor.shape[0]
    check(name, tensor, (count, *row))
    return count


def check_panels(
    name: str,
    panels: Tensor,
    width: int,
    out: int,
) -> None:
    """Raises unless these are the panels of an [out, width] weight; see `pack_panels`.

    Raises:
        TypeError: another dtype. ValueError: another size, layout or device.
    """
    if panels.dtype not in FORMATS:
        raise TypeError(f"{name} is {panels.dtype}, must be panels of `pack_panels`")
    # int8 panels end with float32 factors, bfloat16 panels hold pairs of inputs.
    extra = {torch.int8: 4, torch.bfloat16: width % 2}.get(panels.dtype, 0)
    size = 2 * _LANES * (width + extra)  # numbers in a panel
    count = -(-out // (2 * _LANES))
    fits = panels.numel() == count * size
    if panels.dtype == torch.uint8:
        # Behind panels and legends, whole entries for the weights of rare exponents.
        rest = panels.numel() - count * (-(-width // 4) * _QUAD + _LEGEND)
        fits = 0 <= rest < _MOST_SIZE * panels.numel() and rest % _REST == 0
    if not fits or not panels.is_cpu or not panels.is_contiguous():
        raise ValueError(
            f"{name} of shape {list(panels.shape)} is not a packed [{out}, {width}] weight in CPU memory"
        )


def skinny_linear(
    x: Tensor,
    panels: Tensor,
    out: int,
    rounded: bool = False,
) -> Tensor:
    """x [rows, in] float32, contiguous; panels from `pack_panels`. Returns [rows, out] float32.

    A row's result does not depend on the other rows, to the bit. rounded: see `form_of`.
    """
    width = x.shape[-1]
    rows = check_rows("x", x, width)
    check_panels("panels", panels, width, out)
    y = x.new_empty((rows, out))  # not torch.empty, whose dtype users may change
    form = form_of(panels, rounded)
    threads = torch.get_num_threads()
    built_kernels().skinny_linear(
        x.data_ptr(),
        rows,
        width,
        panels.data_ptr(),
        form,
        y.data_ptr(),
        out,
        threads,
    )
    return y


class Packed(nn.Module):
    """A packed part of a model: its state dict holds the weights in `saved`, and it loads none."""

    saved: dict[str, Tensor]

    def _save_to_state_dict(
        self,
        state: dict[str, Tensor],
        prefix: str,
        *_: object,
    ) -> None:
        for name, weight in self.saved.items():
            state[prefix + name] = weight

    def _load_from_state_dict(
        self,
        state: Mapping[str, object],
        prefix: str,
        *_: object,
    ) -> None:
        if f"{prefix}weight" in state:
            raise UserError(
                f"{prefix}weight is packed for decoding and cannot be loaded; load weights before pack()"
            )


class PackedLinear(Packed):
    """y = x W^T + b with W packed for this CPU: a drop-in for nn.Linear in inference.

    float32 takes our kernel, which is at least as fast as MKL for any number of rows; bfloat16, for
    training and data generation, takes oneDNN. The plain `weight` stays readable (tied embeddings,
    heads whose rows are read). The packing, a further copy, is made on first use. If several
    threads make it at the same time, one of the copies is kept.

    Attributes:
        stored: the plain weight, after `shrink` perhaps in bfloat16.
        rounded: float32 inputs are rounded to bfloat16 where the weights are; see `form_of`.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.stored = linear.weight.detach().contiguous()
        self.dtype = self.stored.dtype
        self.bias = None if linear.bias is None else linear.bias.detach()
        # whether our kernel computes the products
        self.kernel = self.dtype == torch.float32 and cpu_kernels() is not None
        self.rounded = False
        self.packed: Tensor | None = None  # made on first use
        self.draft_head: object | None = None  # of a drafter's head: see `DraftHead.of`

    @property
    def weight(self) -> Tensor:
        """[out, in] in the dtype of inputs; made at each reading once the weight is shrunk."""
        return self.stored.to(self.dtype)

    @property
    def saved(self) -> dict[str, Tensor]:  # type: ignore[override]
        saved = {"weight": self.weight}
        if self.bias is not None:
            saved["bias"] = self.bias
        return saved

    def shrink(self) -> None:
        """Keeps the plain weight in bfloat16 if that is exact: for layers whose weight nobody reads."""
        half = self.stored.bfloat16()
        if torch.equal(half.to(self.dtype), self.stored):
            self.stored = half

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in the weight's dtype."""
        if x.dim() == 0 or x.shape[-1] != self.in_features or x.dtype != self.dtype:
            found = f"{x.dtype} of shape {list(x.shape)}"
            raise ValueError(
                f"x is {found}, must be {self.dtype} of shape [..., {self.in_features}]"
            )
        if self.kernel:
            rows = x.reshape(-1, self.in_features).contiguous()
            y = skinny_linear(
                rows,
                self.panels(),
                self.out_features,
                self.rounded,
            )
            if self.bias is not None:
                y.add_(self.bias)
            return y.view(*x.shape[:-1], self.out_features)
        if self.dtype == torch.float32:
            return F.linear(x, self.weight, self.bias)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.stored, None)
        return torch.ops.mkldnn._linear_pointwise(
            x,
            self.packed,
            self.bias,
            "none",
            [],
            "",
        )

    def panels(self) -> Tensor:
        """The weight as `skinny_linear` reads it; only where `kernel` is set."""
        packed = self.packed
        if packed is None:
            packed = self.packed = pack_panels(self.weight)
        return packed

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        text = f"{sizes}, kernel={self.kernel}, rounded={self.rounded}"
        if self.draft_head is not None:
            text += ", top_tokens=4-bit scores and exact products of a shortlist"
        return text


class PackedRMSNorm(Packed):
    """RMS norm in one kernel call instead of six torch operations; `weight` [width] is its factor."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight = weight.detach().contiguous()
        self.eps = eps
        check("weight", self.weight, (weight.numel(),))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] float32 -> the same shape."""
        width = self.weight.shape[0]
        if x.dtype is not torch.float32:
            raise TypeError(
                f"x is {x.dtype}, but a packed norm reads torch.float32; convert it first"
            )
        if not x.is_cpu or x.dim() == 0 or x.shape[-1] != width:
            raise ValueError(
                f"x has shape {list(x.shape)} on {x.device}, must be [..., {width}] on the CPU"
            )
        x = x.contiguous()
        y = torch.empty_like(x)
        rows = 0
        if width:
            rows = x.numel() // width
        built_kernels().rms_norm(
            x.data_ptr(),
            self.weight.data_ptr(),
            self.eps,
            y.data_ptr(),
            rows,
            width,
        )
        return y

    @staticmethod
    def like(norm: nn.Module) -> PackedRMSNorm | None:
        """The same norm; None for another function, dtype or device."""
        weight = getattr(norm, "weight", None)
        if weight is None or weight.dtype != torch.float32 or not weight.is_cpu:
            return None
        if cpu_kernels() is None:
            return None
        form = NormForm.of(norm)
        if form is None:
            return None
        packed = PackedRMSNorm(form.weight + form.plus, form.eps)
        packed.saved = dict(norm.state_dict())
        return packed


def weights_of(module: nn.Module) -> Iterator[Tensor]:
    """Every weight of a module, once each, also where several parts share it.

    Weights of packed parts, which are not parameters, are included.
    """
    weights: list[Tensor] = list(module.parameters())
    for part in module.modules():
        if isinstance(part, PackedRMSNorm):
            weights.append(part.weight)
        elif isinstance(part, PackedLinear):
            weights.append(part.stored)
            if part.bias is not None:
                weights.append(part.bias)
    seen = set()
    for value in weights:
        key = value.data_ptr()
        if key == 0:  # a tensor on `meta`
            key = id(value)
        if key not in seen:
            seen.add(key)
            yield value


def pack(
    module: nn.Module,
    norms: bool = True,
) -> list[tuple[nn.Module, str, nn.Module]]:
    """Packs a module's linear layers and RMS norms for inference on a CPU, in place.

    Unsupported modules stay as they are: bfloat16 without native support, other norms, other
    devices.

    Returns:
        (parent, name, child) of each linear layer that was replaced.
    """
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                dtype = child.weight.dtype
                on_cpu = child.weight.device.type == "cpu"
                served = dtype == torch.float32 or (dtype == torch.bfloat16 and cpu_has_bfloat16())
                if served and on_cpu and torch.backends.mkldnn.is_available():
                    setattr(parent, name, PackedLinear(child))
                    replaced.append((parent, name, child))
            elif norms:
                norm = PackedRMSNorm.like(child)
                if norm is not None:
                    setattr(parent, name, norm)
    return replaced
