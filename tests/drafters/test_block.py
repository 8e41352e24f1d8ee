"""The block-parallel backbone in both kinds: gradients, weights of the loss, parity, trees, losslessness."""

from __future__ import annotations

import pytest
import torch

from drafttrain.batch import Batch
from drafttrain.drafters.common.block import Paths
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.dflash.model import DFlash
from drafttrain.drafters.dflash2.model import DFlash2
from drafttrain.drafters.domino.model import Domino
from drafttrain.drafters.dspark.model import DSpark
from drafttrain.drafters.jetspec.model import JetSpec
from drafttrain.errors import UserError
from drafttrain.ops.native import cpu_kernels
from tests.drafters.block_kinds import MIXED, begun, make_drafter, shaken
from tests.drafters.helpers import (
    check_gradients,
    make_batch,
    run_step,
    source_of,
    step_inputs,
)
from tests.drafters.layer_kinds import check_packed_rows, check_parity
from tests.drafters.overfitting import overfit

KINDS = [DFlash, DSpark, DFlash2, Domino]
OPTIONS = [
    {"num_hidden_layers": 1},
    {"num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 6, "intermediate_size": 40},
    {"block_size": 2},
    {"mask_token_id": 290},
    {"train_head": True},
    {"feature_layers": (1, 4)},
    {"sample_from_anchor": True, "block_size": 4},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    {"sliding_window": 6},
    {"causal": True},
    {"causal": True, "sliding_window": 6, "num_hidden_layers": 3},
]
DIFFERENT = [
    (DFlash, {**MIXED, "causal": "sliding", "attention_sink_bias": True}),
    (JetSpec, MIXED),
    (DSpark, {"markov_head_type": "gated"}),
    (DSpark, {"markov_head_type": "rnn", "sample_from_anchor": True, **MIXED}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "options"), [(kind, {}) for kind in KINDS] + DIFFERENT)
def test_every_parameter_gets_a_finite_gradient(
    target,
    kind,
    options,
):
    options = {"train_head": True, "weighting": "dpace", **options}
    drafter = make_drafter(kind, target, torch.arange(300), **options)
    run_step(drafter, target, make_batch((12, 9))).loss.backward()
    check_gradients(drafter)
    plain = make_drafter(kind, target, torch.arange(300))
    assert "lm_head.weight" in dict(drafter.named_parameters())
    assert "lm_head.weight" not in dict(plain.named_parameters())


@pytest.mark.thorough
def test_confidence_becomes_the_share_that_is_accepted(target):
    drafter = make_drafter(DSpark, target, torch.arange(300), weighting="dpace")
    batch = make_batch((12, 9))

    def learned(step):
        share = {
            name: step.metrics[name].sum() / step.metrics["count"].sum() for name in step.metrics
        }
        return share["agree"] > 0.8 and (share["confidence"] - share["alpha"]).abs() < 0.1

    step = overfit(drafter, step_inputs(drafter, target, batch), learned, lr=5e-3, most=100)
    assert learned(step), step.metrics


@pytest.mark.thorough
def test_what_the_selector_prefers_is_among_what_it_rescores(target):
    drafter = make_drafter(DFlash2, target, torch.arange(300), selector_top_k=4)
    inputs = step_inputs(drafter, target, make_batch((12, 9)))

    def learned(step):
        return step.metrics["agree"].sum() > 0.9 * step.metrics["count"].sum()

    step = overfit(drafter, inputs, learned, lr=5e-3, most=100)
    assert learned(step)
    seen = []
    other_loss = drafter.other_loss
    drafter.other_loss = lambda *args: seen.append(args) or other_loss(*args)
    drafter(inputs)
    hidden, _, _, parents = seen[0]
    weight = torch.cat((drafter.head.weight, drafter.markov_out.weight), dim=1)
    trained = (hidden @ weight.T).argmax(-1)
    reads = hidden[:, :32]
    children, _ = drafter.conditional(reads @ drafter.head.weight.T, Paths(reads, parents, 0, None))
    decoded = children.logits.argmax(-1)
    assert (trained == decoded).float().mean() > 0.9


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {}) for kind in KINDS]
    # A third of the options with each kind: they are of the block that all kinds share.
    + [(KINDS[number % 3], options) for number, options in enumerate(OPTIONS)]
    + [(kind, OPTIONS[-1]) for kind in KINDS[:2]]
    + DIFFERENT,
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value.__name__,
)
def test_training_at_depth_k_is_what_decoding_says_there(
    target,
    kind,
    options,
):
    drafter = shaken(kind, target, **options)
    depth = drafter.config.depth
    make = lambda: shaken(kind, target, **options)  # noqa: E731
    ending = "@sample" if kind is DSpark else ""  # whose scores hold its confidence
    check_parity(make, target, depth, ending)
    if cpu_kernels() is not None:
        drafter.pack()
        drafter.bind(target)
        assert (drafter.layers[0].native is None) == drafter.mixes_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_packing_changes_nothing(target, kind):
    check_packed_rows(shaken(kind, target), target)


@pytest.mark.thorough
def test_a_share_of_the_blocks_has_the_same_loss_in_expectation(target):
    drafter = shaken(DFlash, target, anchor_share=0.3)
    batch = make_batch((40, 33))
    every = run_step(drafter, target, batch)
    drafter.train()
    torch.manual_seed(0)
    some = [run_step(drafter, target, batch) for _ in range(60)]
    counts = [int(step.metrics["count"][0]) for step in some]
    anchors = int(every.metrics["count"][0])
    assert {int(0.3 * anchors), int(0.3 * anchors) + 1} == set(counts)
    torch.testing.assert_close(
        torch.stack([step.loss for step in some]).mean(), every.loss, rtol=0.03, atol=0
    )
    drafter.config.anchor_share = 1e-6  # no block at all: a loss of zero, with gradients
    step = run_step(drafter, target, batch)
    step.loss.backward()
    assert step.loss == 0 and all(not parameter.grad.any() for parameter in drafter.parameters())


def test_dpace_weighs_by_how_far_the_block_is_right(target):
    drafter = shaken(DFlash, target, weighting="dpace", dpace_alpha=0.25)
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[0, :3] = False  # anchors 2, .., 6, whose blocks of 4 reach 4, 4, 3, 2 and 1 deep
    batch = Batch(torch.arange(50, 59)[None], torch.tensor([9]), mask, torch.tensor([0]))
    _, rows, row_of = source_of(target, drafter)(batch)
    anchors, live, scale = drafter.draw(mask, 5)
    assert anchors.tolist() == [2, 3, 4, 5, 6] and live.sum(1).tolist() == [4, 4, 3, 2, 1]
    hidden = torch.randn(14, 32, generator=torch.Generator().manual_seed(0)) * 0.1
    at = row_of.flatten()[(anchors[:, None] + 1 + torch.arange(4))[live]]
    weights = drafter.weigh(live, scale, hidden, drafter.head.weight, rows, at).split(
        live.sum(1).tolist()
    )
    q = drafter.logits(hidden).softmax(-1).gather(1, rows.sampled_at(at)[:, None]).flatten()
    smooth = (0.75 * q + 0.25).split(live.sum(1).tolist())
    for weight, row in zip(weights, smooth, strict=True):
        wanted = [sum(row[: m + 1].prod() for m in range(j, len(row))) for j in range(len(row))]
        torch.testing.assert_close(weight, torch.stack(wanted) / 4 / 5, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_go_no_deeper_than_the_block(target, kind):
    drafter = shaken(kind, target)
    prefix = make_batch((9,)).input_ids[0]
    tree = begun(drafter, target, prefix).propose(TreeSpec.parse("chain:9"))
    assert tree.depths == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 48}, "its width is the target's, 32"),
        ({"mask_token_id": 300}, "mask_token_id=300 is not a token"),
        ({"sliding_window": 8}, "sliding_window=8 must be larger than block_size=8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope' is not one of"),
    ],
)
def test_what_cannot_work_is_said(
    target,
    options,
    message,
):
    with pytest.raises(UserError, match=message):
        DFlash.config_class.for_target(target, **options)
