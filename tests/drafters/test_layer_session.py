"""Sessions of kinds with decoder layers: the attention of growing trees, alone and together."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.common.layer_model import LayerSession
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.ops import tree_attention
from drafttrain.ops.cpu_draft import DraftStep
from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.tree_attention import CpuPlan
from tests.conftest import make_target
from tests.drafters.helpers import make_batch, make_drafter
from tests.drafters.layer_kinds import check_parity, make_kind


@pytest.mark.skipif(cpu_kernels() is None, reason="no C compiler here")
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 6}, {"num_hidden_layers": 2, "sliding_window": 9}], ids=str
)
def test_kernel_and_torch_draft_the_same_trees_alone_and_together(monkeypatch, options):
    target = make_target(hidden=64)  # heads of 16, which the kernel serves
    drafter = make_drafter(target, **options).eval()
    ids = make_batch((9, 14, 30)).input_ids
    prefixes = [row[:length] for row, length in zip(ids, (9, 14, 30), strict=True)]
    features = [
        target.forward(prefix[None], drafter.feature_layers).features[0] for prefix in prefixes
    ]

    def draft(text, rows):
        """After the prompt and two more tokens, in sessions whose buffers have to grow."""
        sessions = [drafter.start(prefixes[row][:-3], len(prefixes[row])) for row in rows]
        for cut in (slice(0, -2), slice(-2, None)):
            new = (
                [prefixes[row][1:][cut] for row in rows],
                [features[row][:-1][cut] for row in rows],
            )
            drafter.extend_all(sessions, *new)
        return drafter.propose_all(sessions, [TreeSpec.parse(text)] * len(rows), [None] * len(rows))

    served = []
    attend = CpuPlan.attend
    monkeypatch.setattr(
        CpuPlan,
        "attend",
        lambda plan, *args, **kw: served.append(plan) or attend(plan, *args, **kw),
    )
    for text in ("chain:4", "fanout:3x2x2", "dynamic:4,3,9"):
        kinds = [draft(text, range(3)), [draft(text, [row])[0] for row in range(3)]]
        calls = len(served)
        with monkeypatch.context() as patch:
            patch.setattr(tree_attention, "cpu_kernels", lambda: None)
            kinds.append(draft(text, range(3)))
        assert len(served) == calls > 0
        for trees in kinds[1:]:
            for tree, other in zip(kinds[0], trees, strict=True):
                assert (
                    tree.tokens.tolist() == other.tokens.tolist() and tree.parents == other.parents
                )
                torch.testing.assert_close(tree.log_probs, other.log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.skipif(cpu_kernels() is None, reason="no C compiler here")
@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("eagle3", {}, "read read trees"),
        (
            "eagle3",
            {"num_hidden_layers": 2, "sliding_window": 7, "norm_output": True, "qk_norm": True},
            "read read trees",
        ),
        ("eagle3", {"norm_before_residual": True, "fc_norm": True}, "run run trees"),
        ("eagle3", {"norm_before_fc": True}, "run run trees"),
        ("mtp", {"qk_norm": True}, "read read trees"),
        ("mtp", {"modules": 2, "train_head": False}, "read read run run run"),
        ("eagle1", {"fc_bias": True, "ttt_steps": 4}, "read read trees"),
        ("peagle", {}, "read read run"),
        ("dflash", {"block_size": 5, "num_hidden_layers": 2}, "context context run"),
        ("dflash", {"block_size": 5, "sliding_window": 8, "qk_norm": True}, "context context run"),
    ],
    ids=str,
)
def test_the_kernel_for_a_depth_is_the_one_forward(monkeypatch, kind, options, expected):
    calls = []
    for name in ("read", "run", "trees", "store_context"):
        function = getattr(DraftStep, name)
        word = name.removeprefix("store_")
        monkeypatch.setattr(
            DraftStep, name, lambda *args, f=function, word=word: calls.append(word) or f(*args)
        )
    target = make_target(hidden=64)
    check_parity(
        lambda: make_kind(kind, target, torch.arange(40, 240), shake=True, **options), target
    )
    assert " ".join(calls) == expected, "both times that tokens were committed, and the tree"


@pytest.mark.parametrize(
    ("kind", "options", "packed"),
    [
        ("eagle3", {"sliding_window": 6, "num_hidden_layers": 2}, False),
        ("eagle3", {"sliding_window": 6, "num_hidden_layers": 2}, True),
        ("peagle", {"sliding_window": 8}, True),
        ("dflash2", {"sliding_window": 9, "block_size": 5}, True),
    ],
)
def test_a_window_bounds_the_cache_and_changes_no_tree(monkeypatch, kind, options, packed):
    """Two sequences of different lengths, in rounds of one to four tokens, against sessions that keep every key."""
    target = make_target(hidden=64)
    drafter = make_kind(kind, target, shake=True, **options)
    if packed:
        if cpu_kernels() is None:
            pytest.skip("no C compiler here")
        drafter.pack()
    rows = make_batch((300, 150)).input_ids
    features = [target.forward(row[None], drafter.feature_layers).features[0] for row in rows]

    def draft():
        sessions = [drafter.start(row[:5], 400) for row in rows]
        trees = []
        at = 0
        for count in (40, *[1, 4, 2, 3] * 10):
            new = (
                [row[at + 1 : at + 1 + count] for row in rows],
                [part[at : at + count] for part in features],
            )
            drafter.extend_all(sessions, *new)
            at += count
            trees += drafter.propose_all(sessions, [TreeSpec.parse("fanout:2x2")] * 2, [None] * 2)
            trees.append(sessions[1].propose(TreeSpec.parse("chain:4")))
        return sessions, trees

    sessions, trees = draft()
    for session in sessions:
        assert session.dropped > 90 and session.length + session.dropped == 140
        assert (
            session.capacity == session.layers[0][0].shape[1] <= 2 * options["sliding_window"] + 64
        )
    monkeypatch.setattr(LayerSession, "trim", lambda session: None)
    whole, others = draft()
    assert whole[0].length == 140 and not whole[0].dropped
    for tree, other in zip(trees, others, strict=True):
        assert tree.tokens.tolist() == other.tokens.tolist() and tree.parents == other.parents
        torch.testing.assert_close(tree.log_probs, other.log_probs, rtol=1e-3, atol=1e-4)
