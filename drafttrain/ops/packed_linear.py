"""Linear layers with weights packed once for the CPU's matrix kernels.

Decoding multiplies a few rows (1 to ~64 tree nodes) with every weight of the model. In that range torch's CPU linear
repacks the weight on every call and reaches a third of the memory bandwidth, so 8 rows cost twice as much as one.
Packed once, 1 to 16 rows cost about the same, which is what makes verifying a tree nearly free.

Two packers: MKL for float32, oneDNN for bfloat16 on CPUs that multiply it natively.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

# MKL chooses its blocking from the row count given when packing; 128 was fastest or equal for every count from 1 to 128.
_PACK_ROWS = 128


def cpu_has_bfloat16() -> bool:
    """True if this CPU multiplies bfloat16 natively (AVX512-BF16 or AMX); others emulate it several times slower."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in probes)


@cache
def _mkl_serves_any_rows() -> bool:
    """MKL documents packed weights for the packing's own row count only, so prove on this machine that others work."""
    if not (torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")):
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 80, generator=generator)
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, _PACK_ROWS)
    for rows in (1, 2, 7, 16, 33, 128, 300):
        x = torch.randn(rows, 80, generator=generator)
        y = torch.ops.mkl._mkl_linear(x, packed, weight, None, rows)
        if not torch.allclose(y, x @ weight.t(), atol=1e-4):
            return False
    return True


class PackedLinear(nn.Module):
    """y = x W^T + b with W packed for this CPU: a drop-in for nn.Linear in inference.

    The plain `weight` stays readable (tied embeddings, heads whose rows are read), so packing costs one more copy.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight.detach().contiguous()
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.mkl = self.weight.dtype == torch.float32 and _mkl_serves_any_rows()
        if self.mkl:
            self.packed = torch.ops.mkl._mkl_reorder_linear_weight(self.weight, _PACK_ROWS)
        else:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in the weight's dtype."""
        if self.mkl:
            rows = x.numel() // self.in_features
            return torch.ops.mkl._mkl_linear(x, self.packed, self.weight, self.bias, rows)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, backend={'mkl' if self.mkl else 'onednn'}"


def pack_linears(module: nn.Module) -> int:
    """Replaces every nn.Linear on a CPU below `module` by a PackedLinear, in place; returns how many.

    Returns 0 where neither packer serves the dtype: float32 needs MKL or oneDNN, bfloat16 needs native support.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.weight.device.type != "cpu":
                continue
            if child.weight.dtype == torch.float32 or (child.weight.dtype == torch.bfloat16 and cpu_has_bfloat16()):
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count
