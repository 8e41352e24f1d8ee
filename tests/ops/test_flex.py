"""FlexAttention as training on GPUs calls it: how often it compiles, what happens at torch's limit, which blocks fit a device."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

from drafttrain.errors import UserError
from drafttrain.ops import path_attention as module
from drafttrain.ops.path_attention import Spans, span_attention_gpu


def attend(tokens: int, flex, heads: int = 4, width: int = 16, base: int = 0):
    own = torch.arange(tokens)
    spans = Spans(torch.zeros_like(own), own, torch.zeros_like(own))
    query, key, value = (torch.randn(n, h, width) for n, h in ((tokens, heads), (base or tokens, 2), (base or tokens, 2)))
    return span_attention_gpu(query, key, value, spans, flex), (query, key, value, spans)


@pytest.mark.slow
def test_one_compilation_serves_all_lengths():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    flex = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=counter)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # return_lse is deprecated
        for tokens in (300, 700, 513):
            (out, lse), given = attend(tokens, flex)
            want, want_lse = module.span_attention(*given)
            torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.thorough
def test_more_compilations_than_torch_allows_are_an_error(monkeypatch):
    """torch would go on without the kernel, with all scores in memory."""
    build = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: build(function, backend="eager", **options))
    monkeypatch.setattr(module, "_COMPILED", 1)
    torch._dynamo.reset()
    flex = module._compiled_flex.__wrapped__()
    attend(200, flex)
    with pytest.raises(UserError, match=r"compiled for 1 sorts of shapes.*the same command again.*TORCH_LOGS=recompiles"):
        attend(200, flex, heads=2, width=32)
