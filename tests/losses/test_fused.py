"""The kernel against the torch form: on a GPU as compiled, elsewhere in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from drafttrain.errors import UserError
from drafttrain.losses import (
    DIVERGENCES,
    StoredLogits,
    StoredTopK,
    TargetRows,
    divergence,
    fused,
    linear_divergence,
)
from drafttrain.losses.fused import plan
from drafttrain.losses.spec import parse_loss
from tests.ops.ahead_of_time import compile_for_gpus

pytest.importorskip("triton", reason="triton has no build for this platform")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MIXES = ["kl@0.7", "0.9*kl+0.1*ce", "kl@2+js:0.2+js:0.8+tvd+++0.5*lk_lambda:1@2"]


def make(
    kept: int = 151,
    full: int = 200,
    dtype: torch.dtype = torch.float32,
    tokens: int = 5,
    rows: int = 4,
):
    generator = torch.Generator().manual_seed(kept)
    head = torch.randn(full, 8, generator=generator).to(DEVICE)
    states = torch.randn(rows, 8, generator=generator).to(DEVICE)
    logits = states @ head.T
    likeliest = logits.argmax(-1)
    argmax = torch.where(likeliest < kept, likeliest, -1)
    sampled = torch.randint(-1, kept, (rows,), generator=generator).to(DEVICE)
    log_z_at = {t: (logits / t).logsumexp(-1) for t in (0.7, 2.0)}
    head = head[:kept].to(dtype)
    states = states.to(dtype)
    target = TargetRows(states, head, logits.logsumexp(-1), argmax, None, sampled, log_z_at)
    x = (torch.randn(tokens, 8, generator=generator).to(DEVICE)).to(dtype).requires_grad_()
    w = (torch.randn(kept, 8, generator=generator).to(DEVICE)).to(dtype).requires_grad_()
    index = torch.randint(0, rows, (tokens,), generator=generator).to(DEVICE)
    weight = (
        torch.rand(1, generator=generator).to(DEVICE).expand(tokens)
    )  # as a depth's weights come, without a stride
    return x, w, target, index, weight


def compare(monkeypatch, x, w, target, index, weight, loss, measure=True, chunk=2):
    """The same call with the kernel and without; their values and gradients must agree."""
    results = []
    for kernel in (True, False):
        monkeypatch.setattr(divergence, "has_kernel", lambda hidden, kernel=kernel: kernel)
        out = linear_divergence(x, w, target, index, weight, loss, chunk, measure)
        results.append((out, torch.autograd.grad(-2.5 * out.loss, (x, w))))
    (got, got_grads), (want, want_grads) = results
    close = {"atol": TOLERANCE[x.dtype] * 5, "rtol": TOLERANCE[x.dtype] * 5}
    torch.testing.assert_close((got.values, got.loss), (want.values, want.loss), **close)
    for a, b in zip(got_grads, want_grads, strict=True):
        assert a.dtype == x.dtype and (a - b).abs().max() <= TOLERANCE[
            x.dtype
        ] * b.abs().max().clamp(min=0.05)
    if measure:
        torch.testing.assert_close(got.alpha, want.alpha, **close)
        assert torch.equal(got.agree, want.agree)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [*DIVERGENCES, *MIXES])
def test_every_loss_matches_torch(monkeypatch, loss):
    compare(monkeypatch, *make(), loss)


@pytest.mark.thorough
@pytest.mark.parametrize("kept", [1, 128, 129, 300])
def test_odd_widths_and_several_blocks(monkeypatch, kept):
    monkeypatch.setattr(fused, "_BLOCK", 128)
    compare(monkeypatch, *make(kept, max(kept + 3, 200)), "kl+js+lk_lambda+reverse_kl+ce", chunk=3)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", ["kl", "0.5*js+0.5*reverse_kl", "kl@2+ce"])
def test_low_precision(monkeypatch, dtype, loss):
    compare(monkeypatch, *make(dtype=dtype), loss)


@pytest.mark.parametrize("loss", ["kl", "ce", "kl@2", "lk_alpha"])
def test_without_metrics(monkeypatch, loss):
    compare(monkeypatch, *make(), loss, measure=False)


@pytest.mark.thorough
def test_every_form_of_a_target(monkeypatch):
    x, w, target, index, weight = make()
    logits = target.logits(torch.arange(4))
    log_p, ids = (logits - target.log_z[:, None]).topk(6)
    forms = (
        TargetRows(
            target.hidden,
            target.weight,
            target.log_z,
            target.argmax,
            lambda raw: 5 * torch.tanh(raw / 5),
        ),
        StoredLogits(
            logits.bfloat16().index_fill(1, index[:2], float("-inf")), target.log_z, target.argmax
        ),
        StoredTopK(ids, log_p, 1 - log_p.exp().sum(-1), target.argmax),
    )
    for form in forms:
        compare(monkeypatch, x, w, form, index, weight, "kl+reverse_kl+tv")


def test_stored_top_k_has_no_temperature_here_either(monkeypatch):
    x, w, target, index, weight = make()
    monkeypatch.setattr(divergence, "has_kernel", lambda hidden: True)
    rows = StoredTopK.of_tokens(target.sampled, 151)
    with pytest.raises(UserError, match="@2 cannot be applied to stored top-k"):
        linear_divergence(x, w, rows, index, weight, "kl+tv@2", measure=False)


def test_an_agreeing_drafter_is_seen(monkeypatch):
    monkeypatch.setattr(divergence, "has_kernel", lambda hidden: True)
    _, _, target, index, weight = make(kept=200)
    out = linear_divergence(target.hidden[index], target.weight, target, index, weight, "js")
    assert out.agree.all() and (out.alpha > 0.999).all() and out.values.abs().max() < 1e-5


def test_launches_are_as_few_as_the_terms_allow():
    assert [launch.weights for launch in plan(parse_loss("kl+2*kl+ce+tv"))] == [
        {"kl": 3.0, "ce": 1.0, "tv": 1.0}
    ]
    several = plan(parse_loss("kl@2+js:0.2+js:0.8+ce"))
    assert [launch.temperature for launch in several] == [1.0, 1.0, 2.0]
    assert [launch.parameters.get("js") for launch in several] == [0.2, 0.8, None]


def test_the_kernel_is_for_gpus_and_not_for_float64():
    assert not divergence.has_kernel(torch.zeros(1))
    if DEVICE == "cuda":
        assert divergence.has_kernel(torch.zeros(1, device=DEVICE))
        assert not divergence.has_kernel(torch.zeros(1, device=DEVICE, dtype=torch.float64))


COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from drafttrain.ops.divergence_kernels import divergence_rows as kernel

FLAGS = ("KL", "REVERSE", "JS", "ACCEPT", "CE", "MEASURE", "GRAD", "ADD")
for line in sys.argv[1:]:
    capability, dtype, target_dtype, flags = line.split(",")
    constants = {name: name in flags.split("+") for name in FLAGS} | {"BLOCK": 4096}
    kinds = {"z": "*" + dtype, "y": "*" + target_dtype, "grad": "*" + dtype, "agrees": "*i1"}
    kinds |= dict.fromkeys(["values", "alphas", "full_log_z", "row_weight"], "*fp32")
    kinds |= dict.fromkeys(["likeliest", "sampled"], "*i64")
    kinds |= dict.fromkeys(["z_stride", "y_stride", "grad_stride", "width"], "i32")
    signature = {name: "constexpr" if name in constants else kinds.get(name, "fp32") for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    target = GPUTarget("cuda", int(capability), 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 8})
    assert compiled.asm["cubin"], line
    # The gradient replaces the logits. A warp that is late with z[label] must not read what another has written.
    barrier = compiled.asm["ttir"].find("barrier")
    assert "CE" not in flags or 0 < barrier < compiled.asm["ttir"].rfind("tt.store"), line
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "lines",
    [
        ["90,bf16,bf16,KL+CE+GRAD"],
        pytest.param(
            [
                f"{capability},{dtype},{flags}"
                for capability in (80, 86, 90)
                for dtype, flags in (
                    ("bf16,bf16", "KL+GRAD"), ("bf16,fp32", "CE+GRAD"), ("fp16,bf16", "JS+MEASURE+GRAD"),
                    ("fp32,fp32", "KL+REVERSE+JS+ACCEPT+CE+MEASURE+GRAD+ADD"), ("bf16,bf16", "MEASURE"),
                )
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one", "many"],
)  # fmt: skip
def test_the_kernel_compiles_for_gpus(lines, tmp_path):
    compile_for_gpus(COMPILE, lines, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_large_vocabulary_on_a_gpu(monkeypatch, dtype):
    compare(
        monkeypatch,
        *make(151_936, 152_000, dtype, tokens=300, rows=200),
        "kl+lk_lambda+js+ce",
        chunk=128,
    )
