"""Static draft steps give the trees of dynamic passes, for every kind of drafter."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.combined import CombinedDrafter
from drafttrain.drafters.common.static_draft import DraftSteps
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.drafters.registry import kind_class
from drafttrain.inference import Decoder, SamplingParams, static, verify
from tests.conftest import make_target

PROMPTS = [[5, 9, 11, 9, 11, 30, 2, 9, 11, 4, 44, 9], [7], list(range(20)), [59, 1, 59, 1]]
OPTIONS = {
    "eagle3": {"ttt_steps": 3, "num_hidden_layers": 2},
    "eagle1": {"ttt_steps": 2},
    "peagle": {"ttt_steps": 3},
    "mtp": {"ttt_steps": 2, "modules": 2},
    "dflash": {"block_size": 4, "num_hidden_layers": 2},
    "dspark": {"block_size": 4, "markov_rank": 8, "causal": True, "sliding_window": 6},
    "dflash2": {"block_size": 4, "markov_rank": 8, "selector_top_k": 20},
    "domino": {"block_size": 4, "gru_hidden_dim": 8, "emb_dim": 8},
    "medusa": {},
    "hydra": {},
    "mlp_speculator": {},
    "draft_model": {},
}


def build(name, target) -> Drafter:
    torch.manual_seed(1)
    if name == "draft_model":
        drafter = kind_class(name).begin(target, "target", {"layers": [0, 1]}, "kl")
    else:
        kept = torch.arange(0, target.vocab_size - 40)
        kind = kind_class(name)
        options = {**OPTIONS[name], "draft_vocab_size": len(kept), "loss": "kl"}
        drafter = kind(kind.config_class.for_target(target, **options))
        drafter.initialize(target, kept)
    drafter.bind(target)
    return drafter.eval()


@pytest.fixture
def used(monkeypatch):
    """Static steps also run here, uncaptured; how often they read and drafted."""
    monkeypatch.setattr(static, "_serves", lambda device: True)
    counts = {"read": 0, "propose": 0}

    def counting(name):
        method = getattr(DraftSteps, name)

        def call(self, *args):
            result = method(self, *args)
            counts[name] += result not in (None, False)
            return result

        return call

    for name in counts:
        monkeypatch.setattr(DraftSteps, name, counting(name))
    return counts


def decode(target, drafter, spec, rows, graphs, sampling=None, count=10):
    decoder = Decoder(
        target,
        drafter,
        spec=TreeSpec.parse(spec),
        sampling=sampling,
        eos_ids=(),
        max_rows=rows,
        graphs=graphs,
    )
    trees = []
    decoder.observer = lambda index, tree, verdict, _: trees.append(
        (index, tree.tokens.tolist(), tree.parents, verdict.path)
    )
    made = decoder.generate(PROMPTS, max_new_tokens=count)
    return [generation.tokens for generation in made], sorted(trees)


SPECS = ["chain:3", "dynamic:4,3,9", "fanout:3x2@stop=0.02", "paths:0,1,0-0,0-2,0-0-0"]
QUICK = {("eagle3", SPECS[1]), ("draft_model", SPECS[1]), ("dspark", SPECS[2])}


def slow_unless(quick, *values):
    return pytest.param(*values, marks=pytest.mark.thorough if quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "spec"),
    [slow_unless((name, spec) in QUICK, name, spec) for name in OPTIONS for spec in SPECS],
)
def test_trees_are_those_of_dynamic_passes(name, spec, used):
    target = make_target(hidden=32)
    drafter = build(name, target)
    for rows in (3,) if (name, spec) in QUICK else (1, 3):
        used.update(read=0, propose=0)
        want = decode(target, drafter, spec, rows, False)
        assert not used["propose"]
        assert decode(target, drafter, spec, rows, True) == want
        assert used["read"] > 3 and used["propose"] > 3


@pytest.mark.parametrize("name", [slow_unless(False, name) for name in OPTIONS])
def test_drawn_chains_are_those_of_dynamic_passes(name, used):
    target = make_target(hidden=32)
    drafter = build(name, target)
    sampling = SamplingParams(0.7, top_p=0.9)
    want = decode(target, drafter, "chain:3@sample", 2, False, sampling)
    assert decode(target, drafter, "chain:3@sample", 2, True, sampling) == want
    assert used["propose"] > 3


@pytest.mark.parametrize(
    ("spec", "sampling"),
    [
        slow_unless(spec == "chain:3@sample" and sampling.top_k, spec, sampling)
        for spec in ("none", "chain:3", "chain:3@sample", "fanout:3x2@sample", "dynamic:3,3,8")
        for sampling in (SamplingParams(1.0), SamplingParams(0.8, top_k=20, top_p=0.9))
    ],
)
def test_choices_at_all_nodes_are_those_of_a_walk(spec, sampling, monkeypatch):
    target = make_target(hidden=32)
    drafter = build("eagle3", target)
    want = decode(target, drafter, spec, 3, False, sampling)
    calls = []
    ahead = verify._Walk.choices_ahead
    monkeypatch.setattr(verify, "_draws_ahead", lambda verifiers, logits: True)
    monkeypatch.setattr(verify._Walk, "choices_ahead", lambda walk: calls.append(1) or ahead(walk))
    assert decode(target, drafter, spec, 3, False, sampling) == want
    assert calls


@pytest.mark.thorough
def test_steps_of_weights_that_moved_are_not_used(used):
    target = make_target(hidden=32)
    main = build("eagle3", target)
    combined = CombinedDrafter(main, NgramDrafter(min_n=2))
    for drafter in (main, combined, CombinedDrafter(combined, NgramDrafter(min_n=3))):
        kept = []
        for _ in range(3):
            decode(target, drafter, "chain:3", 2, True)
            kept.append(target.idle_steps[0]._drafts[1])
            if len(kept) == 2:
                main.lm_head.weight.data = main.lm_head.weight.data.clone()
        assert kept[0] is kept[1] and kept[2] is not kept[1]
