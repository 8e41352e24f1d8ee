"""FlexAttention over intervals of keys for training on GPUs.

It is compiled once per kind of shape, with blocks that fit the device's shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention

from drafttrain.errors import UserError

# FlexAttention, compiled or not: outputs and log-sum-exps
Flex = Callable[..., tuple[Tensor, AuxOutput]]
# Kinds of shapes that FlexAttention is compiled for: with gradients and without, all or some tokens
# as queries, one block or several, each in both dtypes. torch's limit is 8.
_COMPILED = 64


def _blocks(
    m: int,
    n: int,
    back: int,
    stages: int,
) -> dict[str, int]:
    """Kernel options: blocks of m queries by n keys forward, `back` by `back` in each backward."""
    return {
        "fwd_BLOCK_M": m,
        "fwd_BLOCK_N": n,
        "fwd_num_stages": 2,
        "fwd_num_warps": 4,
        "bwd_BLOCK_M1": back,
        "bwd_BLOCK_N1": back,
        "bwd_BLOCK_M2": back,
        "bwd_BLOCK_N2": back,
        "bwd_num_stages": stages,
        "bwd_num_warps": 4,
    }


# By bytes of a number and padded head width: bytes of shared memory that torch's blocks take, and
# blocks that fit 99 KB, which sm_86, sm_89 and sm_120 have. What each takes was read from the
# compiled kernels (tests/gpu/flex_ahead.py).
_FLEX_BLOCKS: dict[tuple[int, int], tuple[int, dict[str, int]]] = {
    (2, 256): (163_840, _blocks(32, 64, back=32, stages=2)),
    (4, 128): (163_840, _blocks(64, 32, back=16, stages=1)),
    (4, 256): (131_072, _blocks(32, 16, back=16, stages=1)),
}


@functools.cache
def _compiled_flex(options: tuple[tuple[str, str], ...] = ()) -> Flex:
    """FlexAttention compiled with kernel options.

    The options come as text, because numbers would become symbols of the compilation.
    """

    def attend(*args: Any, **rest: Any) -> tuple[Tensor, AuxOutput]:
        numbers = {name: int(number) for name, number in options}
        return flex_attention(*args, kernel_options=numbers, **rest)  # type: ignore[call-overload, no-any-return]

    return torch.compile(attend, dynamic=True, fullgraph=True)


def flex_options(
    head_dim: int,
    itemsize: int,
    shared: int,
) -> dict[str, int]:
    """Blocks of FlexAttention's kernels: torch's where they fit the device, else ours.

    Args:
        itemsize: bytes of a number.
        shared: bytes of shared memory that a program of the device may use.
    """
    # One kernel for any number of queries; torch would compile another one for fewer than 128.
    options = {"FORCE_USE_FLEX_ATTENTION": 1}
    # torch pads heads to a power of two.
    width = max(64, 1 << (head_dim - 1).bit_length())
    needed, own = _FLEX_BLOCKS.get((itemsize, width), (0, {}))
    # torch has chosen blocks for float32 heads of 64, 128 and 256; for others its general ones are
    # too large on every device.
    unknown = itemsize == 4 and width == 256 > head_dim
    if shared < needed or unknown:
        return options | own
    return options


class KeyIntervals(Protocol):
    """What `path_attention.Spans` gives this module, which it imports."""

    def block_mask(self, keys: int) -> BlockMask: ...


def span_attention_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: KeyIntervals,
    flex: Flex | None = None,
) -> tuple[Tensor, Tensor]:
    """`span_attention` by FlexAttention, which differentiates the log-sum-exps too.

    Returns:
        Outputs [t, heads, e] and log-sum-exps [t, heads].

    Raises:
        UserError: more kinds of shapes than torch may compile for. torch would continue without the
            kernel, with dense scores.
    """
    # The import loads the compiler, which a CPU does not need.
    from torch._dynamo.exc import FailOnRecompileLimitHit

    # FlexAttention expects a batch and heads before tokens.
    q = query.transpose(0, 1)[None]  # [1, heads, t, e]
    k = key.transpose(0, 1)[None]  # [1, kv_heads, T, e]
    v = value.transpose(0, 1)[None]  # [1, kv_heads, T, e]
    mask = spans.block_mask(len(key))
    grouped = q.shape[1] != k.shape[1]
    shared = 2**18  # enough for torch's blocks
    if q.is_cuda and torch.version.hip is None:
        facts: Any = torch.cuda.get_device_properties(q.device)  # torch's stubs lack the attribute
        shared = facts.shared_memory_per_block_optin
    options = flex_options(q.shape[3], q.element_size(), shared)
    try:
        with torch._dynamo.config.patch(recompile_limit=_COMPILED):
            if flex is None:
                # In a fixed order, so that equal options find the same kernel.
                as_text = tuple((name, str(number)) for name, number in options.items())
                flex = _compiled_flex(as_text)
            out, more = flex(
                q,
                k,
                v,
                block_mask=mask,
                enable_gqa=grouped,
                return_aux=AuxRequest(lse=True),
            )
    except FailOnRecompileLimitHit as error:
        raise UserError(
            f"FlexAttention was compiled for {_COMPILED} kinds of shapes, the most of one process; run the same command again, "
            "which continues from the last checkpoint (TORCH_LOGS=recompiles prints what differed)"
        ) from error
    # An option that asks for them returns them.
    assert more.lse is not None
    return out[0].transpose(0, 1), more.lse[0].transpose(0, 1)
