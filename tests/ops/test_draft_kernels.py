"""Top tokens of a draft head, and trees that grow in one kernel call."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch

from drafttrain.drafters.common.layer_model import LayerDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.ops import native
from drafttrain.ops.cpu_draft import DraftHead
from drafttrain.ops.packing import PackedLinear
from drafttrain.ops.tree_cache import TreeCache
from tests.conftest import make_target
from tests.drafters.helpers import check_same_trees, make_batch
from tests.drafters.layer_kinds import make_kind
from tests.marks import needs_compiler

pytestmark = needs_compiler


def head_and_states(d=3000, h=76, count=9):
    """A head and states as models have them: some wide columns, a mean, and likely tokens that stand out."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(d, h, generator=generator) * torch.rand(h, generator=generator) + 0.3
    return weight, weight[:count] * 4 + torch.randn(count, h, generator=generator)


def test_top_tokens_are_the_heads_and_their_sum_is_near():
    weight, states = head_and_states()
    head = DraftHead(weight)
    logits = states @ weight.T
    ids, top, sums = head.top(states, 8)
    want, likely = logits.log_softmax(-1).topk(8)
    assert (ids[:, 0] == likely[:, 0]).all()
    assert (ids[:, :, None] == likely[:, None]).any(1).float().mean() > 0.98
    torch.testing.assert_close(sums, logits.logsumexp(-1), atol=0.1, rtol=0)
    torch.testing.assert_close(
        top + sums[:, None], logits.gather(1, ids), rtol=1e-4, atol=1e-3
    )  # exact products
    assert (top.diff() <= 0).all()
    torch.testing.assert_close(top[:, 0], want[:, 0], atol=0.1, rtol=0)


def test_a_small_vocabulary_is_listed_whole():
    weight, states = head_and_states(d=500)
    ids, top, _ = DraftHead(weight).top(states, 500)
    want = (states @ weight.T).log_softmax(-1)
    torch.testing.assert_close(
        torch.zeros_like(want).scatter_(1, ids, top), want, rtol=1e-4, atol=1e-4
    )


def test_top_tokens_of_a_state_depend_neither_on_others_nor_on_threads():
    weight, states = head_and_states()
    head = DraftHead(weight)
    threads = torch.get_num_threads()
    together = head.top(states, 5)
    alone = [
        torch.cat(parts)
        for parts in zip(*(head.top(state[None], 5) for state in states), strict=True)
    ]
    try:
        torch.set_num_threads(3)
        shared = head.top(states, 5)
    finally:
        torch.set_num_threads(threads)
    for parts in (alone, shared):
        assert all(torch.equal(one, other) for one, other in zip(together, parts, strict=True))


def test_what_a_draft_head_does_not_read_is_refused():
    weight, states = head_and_states(d=600)
    head = DraftHead(weight)
    for wrong, message in (
        (states[:, 1:], "reads has shape"),
        (states.double(), "reads is torch.float64"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            head.top(wrong, 3)
    with pytest.raises(ValueError, match="width=601 must be from 1 to the 600 tokens"):
        head.top(states, 601)
    assert (
        DraftHead.of(torch.nn.Linear(8, 8)) is None
        and DraftHead.of(PackedLinear(torch.nn.Linear(8, 8))) is None
    )
    packed = PackedLinear(torch.nn.Linear(8, 8, bias=False))
    assert DraftHead.of(packed) is DraftHead.of(packed) and "shortlist" in repr(packed)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) for path in ("avx2", "avx512", "baseline")],
)
def test_every_instruction_set_has_the_same_sums(tmp_path, path):
    """Scores are integers, and a small k leaves nothing to rounding but the exact products."""
    processor = set(native._processor().split())
    known = native.PATHS.get(path)
    if known is None or not known.needs <= processor:
        pytest.skip(f"no {path} here")
    built = tmp_path / "built.so"
    command = [
        shutil.which("cc") or "gcc",
        *native._FLAGS,
        *known.flags.split(),
        str(native._SOURCE),
        "-o",
        str(built),
        "-lm",
    ]
    subprocess.run(command, check=True)
    weight, states = head_and_states(count=7)
    head = DraftHead(weight)
    want = head.top(states, 6)
    ids, top, sums = (torch.empty_like(part) for part in want)
    function = ctypes.CDLL(str(built)).head_top
    function.argtypes = native.cpu_kernels().head_top.argtypes
    function(
        head.address, states.data_ptr(), 7, 6, ids.data_ptr(), top.data_ptr(), sums.data_ptr(), 1
    )
    assert torch.equal(ids, want[0])
    torch.testing.assert_close(top, want[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums, want[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("like", [torch.zeros(1, 1, 0, 16), torch.zeros(1, 2, 0, 16).double()])
def test_buffers_that_no_kernel_reads_are_refused(like):
    cache = TreeCache(9)
    cache.allocate({0: (like, like)})
    with pytest.raises((TypeError, ValueError), match="keys and values"):
        cache.addresses([(2, 16)])


@pytest.mark.parametrize(
    "text",
    ["chain:1", "chain:5", "chain:6@stop=0.01", "fanout:3x2x2", "fanout:4x1x3@stop=0.02", "dynamic:4,3,9", "dynamic:5,4,40",
     "dynamic:3,8,5@stop=0.05", "dynamic:1,6,4"],
)  # fmt: skip
def test_one_call_grows_the_tree_that_python_grows(monkeypatch, text):
    """Alone and with others, whose trees end at other depths."""
    target = make_target(hidden=64)
    drafter = make_kind("eagle3", target, torch.arange(40, 240), shake=True)
    drafter.pack()
    drafter.bind(target)
    rows = make_batch((12, 7, 21)).input_ids
    prompts = [row[:n] for row, n in zip(rows, (12, 7, 21), strict=True)]
    features = [
        target.forward(prompt[None], drafter.feature_layers).features[0] for prompt in prompts
    ]
    spec = TreeSpec.parse(text)
    used = []

    def draft(which):
        sessions = [drafter.start(prompts[i][:1], 24) for i in which]
        drafter.extend_all(
            sessions, [prompts[i][1:] for i in which], [features[i][:-1] for i in which]
        )
        return drafter.propose_all(sessions, spec, [None] * len(which))

    grow_by_kernel = LayerDrafter.grow_by_kernel
    monkeypatch.setattr(
        LayerDrafter, "grow_by_kernel", lambda *args: used.append(1) or grow_by_kernel(*args)
    )
    fast = [*draft([0, 1, 2]), *(draft([i])[0] for i in range(3))]
    assert len(used) == 4
    monkeypatch.setattr(LayerDrafter, "grow_by_kernel", lambda *args: None)
    check_same_trees(fast, draft([0, 1, 2]) * 2)
    assert all(len(tree) <= spec.budget and tree.log_probs.isfinite().all() for tree in fast)
