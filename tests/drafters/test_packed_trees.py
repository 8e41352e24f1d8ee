"""Every kind drafts every shape of tree behind prompts of any length, packed for the CPU kernels and not."""

from __future__ import annotations

import functools

import pytest
import torch

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import kind_class
from drafttrain.inference import SamplingParams
from drafttrain.ops.sampling import Sampler
from tests.conftest import make_target
from tests.drafters.helpers import check_tree
from tests.drafters.layer_kinds import make_kind

FORMS = {
    "eagle3": {},
    "eagle3 with the text's tokens": {"extra_vocab_size": 20},
    "eagle3 in a window": {"sliding_window": 16},
    "eagle1": {},
    "mtp": {"modules": 3, "ttt_steps": 3},
    "peagle": {"ttt_steps": 3},
    "dflash": {"block_size": 5},
    "dspark": {"block_size": 5, "markov_rank": 8},
    "dflash2": {"block_size": 5, "markov_rank": 8},
    "domino": {"block_size": 5, "gru_hidden_dim": 16, "emb_dim": 16},
    "medusa": {},
    "hydra": {},
    "mlp_speculator": {},
    "draft_model": {},
}
# Rotary tables grow at powers of two; siblings share a position, so trees take more slots than that.
LENGTHS = (2, 31, *range(52, 60), 64)
# The last two open more than the 64 nodes of a kernel's tree.
SHAPES = (
    "chain:4", "chain:4@sample", "dynamic:4,3,10", "fanout:4x2x1", "fanout:4x2x1@sample",
    "paths:0,1,2,0-0,0-1,1-0,0-0-0", "paths:0,1,0-0@sample", "fanout:8x8x2", "dynamic:9,10,60",
)  # fmt: skip


@functools.cache
def the_target():
    return make_target(hidden=64)


@pytest.mark.parametrize(
    "packed",
    [pytest.param(False, marks=pytest.mark.thorough, id="plain"), pytest.param(True, id="packed")],
)
@pytest.mark.parametrize("form", FORMS)
def test_every_tree_behind_prompts_of_any_length(form, packed):
    target = the_target()
    kind = form.split()[0]
    if kind == "draft_model":
        drafter = kind_class(kind).begin(target, "target", {"layers": [0, 1]}, "kl").eval()
        drafter.bind(target)
    else:
        drafter = make_kind(kind, target, torch.arange(40, 240), shake=True, **FORMS[form])
    if packed:
        drafter.pack()
        drafter.bind(target)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(target.vocab_size, (max(LENGTHS) + 1,), generator=generator)
    width = len(drafter.feature_layers) * target.hidden_size
    features = torch.randn(len(ids), width, generator=generator)
    # What is not packed has no kernels, whose slots end at certain lengths.
    for number, length in enumerate(LENGTHS if packed else LENGTHS[::3]):
        session = drafter.start(ids[:length], length + 40)
        session.extend(ids[1 : length + 1], features[:length])
        for text in SHAPES[number % 2 :: 2]:
            spec = TreeSpec.parse(text)
            sampler = Sampler(SamplingParams(temperature=0.7), generator)
            tree = session.propose(spec, sampler)
            check_tree(tree, spec, tolerance=1e-4)
            assert len(tree)
