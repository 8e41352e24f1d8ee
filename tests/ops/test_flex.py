"""FlexAttention as training on GPUs calls it: how often it compiles, what happens at torch's limit, which blocks fit a device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from drafttrain.errors import UserError
from drafttrain.ops import flex_spans as module
from drafttrain.ops.flex_spans import flex_options, span_attention_gpu
from drafttrain.ops.path_attention import Spans, span_attention
from tests.gpu.flex_ahead import SHARED, environment

# Bytes of shared memory, forward and backward, that our blocks take on sm_86, by bytes of a number, head size and blocks
# (BLOCK_M, BLOCK_N, the backward's): printed by tests/gpu/flex_ahead.py.
MEASURED = {
    (2, 256, 32, 64, 32): (86_016, 70_400),
    (4, 128, 64, 32, 16): (73_984, 33_792),
    (4, 256, 32, 16, 16): (67_712, 66_560),
}


def attend(tokens: int, flex, heads: int = 4, width: int = 16, base: int = 0):
    own = torch.arange(tokens)
    spans = Spans(torch.zeros_like(own), own, torch.zeros_like(own))
    query, key, value = (
        torch.randn(n, h, width)
        for n, h in ((tokens, heads), (base or tokens, 2), (base or tokens, 2))
    )
    return span_attention_gpu(query, key, value, spans, flex), (query, key, value, spans)


def compiled(monkeypatch, backend, options=()):
    """FlexAttention as on a GPU, but for the backend."""
    build = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **given: build(function, backend=backend, **given)
    )
    torch._dynamo.reset()
    return module._compiled_flex.__wrapped__(options)


@pytest.mark.slow
def test_one_compilation_serves_all_lengths(monkeypatch):
    counter = CompileCounterWithBackend("eager")
    flex = compiled(monkeypatch, counter, (("fwd_BLOCK_M", "32"), ("bwd_num_stages", "2")))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # return_lse is deprecated
        for tokens in (300, 700, 513):
            (out, lse), given = attend(tokens, flex)
            want, want_lse = span_attention(*given)
            torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1
    (given,) = (
        node.args[6]
        for node in counter.graphs[0].graph.nodes
        if "flex_attention" in str(node.target)
    )
    assert (given["fwd_BLOCK_M"], given["bwd_num_stages"]) == (32, 2), (
        "constants: a kernel cannot have a symbol as a block"
    )


@pytest.mark.slow
def test_more_compilations_than_torch_allows_are_an_error(monkeypatch):
    """torch would go on without the kernel, with all scores in memory."""
    monkeypatch.setattr(module, "_COMPILED", 1)
    flex = compiled(monkeypatch, "eager")
    attend(200, flex)
    with pytest.raises(
        UserError,
        match=r"compiled for 1 kinds of shapes.*the same command again.*TORCH_LOGS=recompiles",
    ):
        attend(200, flex, heads=2, width=32)


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256])
def test_blocks_fit_the_device(capability, itemsize, head_dim):
    options = flex_options(head_dim, itemsize, SHARED[capability])
    assert options.pop("FORCE_USE_FLEX_ATTENTION")
    width = max(64, 1 << (head_dim - 1).bit_length())
    too_large = {(2, 256), (4, 128), (4, 256)}  # torch's blocks for 99 KB
    assert bool(options) == (
        (itemsize, width) in too_large
        and (SHARED[capability] < 163_840 or itemsize * head_dim == 768)
    )
    if options:
        (back,) = {options[f"bwd_BLOCK_{name}"] for name in ("M1", "N1", "M2", "N2")}
        bytes_used = MEASURED[itemsize, width, options["fwd_BLOCK_M"], options["fwd_BLOCK_N"], back]
        assert max(bytes_used) <= SHARED[capability]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "bfloat16:128:86",
        "bfloat16:256:86",
        "bfloat16:256:120",
        "bfloat16:256:90",
        "float32:128:89",
        "float32:256:120",
    ],
)
def test_compiled_kernels_fit_the_device(case, tmp_path):
    """Ahead of time; $CUDA_TORCH_PYTHON names a Python whose torch is built for CUDA."""
    python = sys.executable if torch.version.cuda else os.environ.get("CUDA_TORCH_PYTHON")
    if not python:
        pytest.skip("needs a build of torch for CUDA: set CUDA_TORCH_PYTHON")
    paths = os.pathsep.join(path for path in sys.path if path and "site-packages" not in path)
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": paths
    }
    command = [python, "tests/gpu/flex_ahead.py", case]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**variables, **environment(tmp_path)}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    used = re.search(r"forward, backward: (\d+) (\d+) limit: (\d+)", done.stdout)
    assert used, done.stdout
    forward, backward, limit = map(int, used.groups())
    assert 0 < forward <= limit and 0 < backward <= limit, done.stdout
