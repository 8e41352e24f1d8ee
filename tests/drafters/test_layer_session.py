"""Kinds with decoder layers: the attention of growing trees, alone and together, and the cache behind it."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.common.rows import HostPass
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.ops.cpu_draft import DraftStep
from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.tree_cache import TreeCache
from tests.conftest import make_target
from tests.drafters.helpers import check_same_trees, make_batch
from tests.drafters.layer_kinds import check_parity, make_kind
from tests.marks import needs_compiler


@pytest.mark.thorough
@needs_compiler
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
    made = []

    def make():
        made.append(make_kind(kind, target, torch.arange(40, 240), shake=True, **options))
        return made[-1]

    check_parity(make, target)
    assert " ".join(calls) == expected, "both times that tokens were committed, and the tree"
    _, plain, packed = made
    spec = TreeSpec.parse("chain:3")
    assert plain.implementation(spec).startswith("passes module by module, ")
    how = "trees in one C call" if expected.endswith("trees") else "a C call per pass, "
    assert packed.implementation(spec).startswith(how)


WINDOWS = {
    "eagle3": {"sliding_window": 6, "num_hidden_layers": 2},
    "peagle": {"sliding_window": 8},
    "dflash2": {"sliding_window": 9, "block_size": 5},
    "dspark": {"sliding_window": 6, "block_size": 4, "causal": True},
}
# Tokens that each of two sequences reads in a round.
COUNTS = [[36, *[1, 4, 2, 3] * 10], [24, *[2, 1, 4, 3] * 10]]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        ("eagle3", None),
        ("eagle3", torch.float32),
        ("peagle", torch.float32),
        ("dflash2", torch.float32),
        ("dflash2", torch.bfloat16),
        ("dspark", torch.bfloat16),
    ],
)
def test_a_window_bounds_the_cache_and_changes_no_tree(monkeypatch, kind, stored):
    """Two sequences in rounds of one to four tokens, against sessions that keep every key.

    stored: dtype of the keys of a packed drafter; None: it is not packed. Windows of different beginnings draft together.
    """
    target = make_target(hidden=64)
    options = WINDOWS[kind]
    drafter = make_kind(kind, target, shake=True, **options)
    if stored is not None:
        if cpu_kernels() is None:
            pytest.skip("no C compiler here")
        drafter.stored = stored
        drafter.pack()
    placed = HostPass.placed
    served = []
    monkeypatch.setattr(
        HostPass, "placed", lambda *args, **room: served.append(placed(*args, **room)) or served[-1]
    )
    read = []  # of each row the tokens and the features before them, by round
    for row, counts in zip(make_batch((300, 150)).input_ids, COUNTS, strict=True):
        states = target.forward(row[None], drafter.feature_layers).features[0, : sum(counts)]
        read.append((row[1 : 1 + sum(counts)].split(counts), states.split(counts)))

    def draft():
        sessions = [drafter.start(tokens[0][:5], 400) for tokens, _ in read]
        trees = []
        for i in range(len(COUNTS[0])):
            tokens, states = zip(*((row[0][i], row[1][i]) for row in read), strict=True)
            drafter.extend_all(sessions, tokens, states)
            trees += drafter.propose_all(sessions, TreeSpec.parse("fanout:2x2"), [None] * 2)
            trees.append(sessions[1].propose(TreeSpec.parse("chain:4")))
        return sessions, trees

    sessions, trees = draft()
    for session, counts in zip(sessions, COUNTS, strict=True):
        cache = session.cache
        assert cache.base > 90 and session.length + cache.base == sum(counts)
        keys, _ = cache.by_row(0)
        assert cache.capacity == keys.shape[2] <= 2 * options["sliding_window"] + 64
    if stored is not None and kind != "dflash2":
        assert None not in served, "the kernels serve windows of different beginnings together"
    monkeypatch.setattr(TreeCache, "trim", lambda cache: None)
    whole, others = draft()
    assert whole[0].length == sum(COUNTS[0]) and not whole[0].cache.base
    check_same_trees(trees, others, rtol=1e-3)
