"""What every kind owes, whichever it is: a kind that is added to the folder is tested here without an edit.

A trained kind is built as train.py builds it and overfitted on the target's own answers, so that what it drafts is accepted.
One comparison needs no knowledge of the kind: trained with loss `ce`, the metrics of depth k hold -log q of the token that
follows, and a tree drawn from the drafter holds q of every node.

    position t        0 .. a-1    a       a+1     a+2 .. a+1+k
    decoding          prompt      anchor  root    a drawn path of k nodes, q of each
    training row      prompt      anchor  in      in  (responses of k+1 tokens have one anchor at depth k-1, and it is a)
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from drafttrain.config import TrainConfig, load_config
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import kind_class, load_drafter, untrained
from drafttrain.errors import UserError
from drafttrain.inference import Decoder, SamplingParams, generate, generate_batch
from drafttrain.inference.engine import Engine
from drafttrain.ops.sampling import Sampler
from drafttrain.train import build_drafter
from tests.conftest import make_target
from tests.drafters.contract import (
    KINDS,
    NEEDED,
    NEW,
    PROMPTS,
    TRAINED,
    answers,
    build,
    check_depths,
    check_overfitting,
    check_tree,
    metrics_of,
    overfitted,
    session_at,
    the_target,
)
from tests.files import ROOT
from tests.inference.turns import OPENING, talk

RECIPES = ROOT / "configs" / "smollm2-135m"
TREES = (
    "chain:3",
    "fanout:3x2x1",
    "dynamic:4,3,8",
    "paths:0,1,0-0,1-0,0-0-1",
    "chain:4@stop=0.2",
    "none",
)


@pytest.fixture(scope="module")
def decoding(tmp_path_factory):
    """Drafters as decoding loads them, by kind: trained ones from their folders."""

    @functools.cache
    def load(kind: str) -> Any:
        if kind not in TRAINED:
            return load_drafter(kind, the_target(packed=True))
        folder = tmp_path_factory.mktemp("drafters") / kind
        overfitted(kind)[0].save_pretrained(folder)
        return load_drafter(str(folder), the_target(packed=True))

    return load


# -- training half --------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("kind", TRAINED)
def test_one_batch_is_overfitted_with_a_gradient_on_every_parameter(kind):
    check_overfitting(kind)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", TRAINED)
def test_training_step_k_is_what_decoding_computes_at_depth_k(kind, decoding):
    check_depths(kind, decoding(kind))


# Language models draft for other vocabularies, see test_vocabularies.
@pytest.mark.parametrize(
    "kind", [kind for kind in TRAINED if not kind_class(kind).loads_language_models]
)
def test_another_targets_drafter_is_refused(kind):
    other = make_target(layers=3, hidden=16, vocab_size=300, seed=1)
    vocabulary = other.tokenizer.get_vocab()
    swapped = {**vocabulary, "a": vocabulary["b"], "b": vocabulary["a"]}
    other.tokenizer.get_vocab = lambda: swapped
    with pytest.raises(UserError, match="target"):
        build(kind).bind(other)


@pytest.mark.parametrize("kind", TRAINED)
def test_unknown_options_and_recipes(kind):
    """An option that a kind lacks is refused, and its recipe has none of those."""
    config = TrainConfig(kind=kind, drafter={**NEEDED.get(kind, {}), "no_such_option": 1})
    with pytest.raises(UserError, match="no_such_option"):
        build_drafter(config, the_target(), [{"tokens": [1, 2, 3], "spans": [[0, 3]]}])
    recipe = load_config(str(RECIPES / f"{kind}.yaml"), [], list(_trainer_keys()))
    assert recipe.kind == kind
    assert set(recipe.drafter) <= set(vars(kind_class(kind).config_class()))


@functools.cache
def _trainer_keys() -> tuple[str, ...]:
    import dataclasses

    from transformers import TrainingArguments

    return tuple(field.name for field in dataclasses.fields(TrainingArguments))


# -- proposal half --------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_well_formed_alone_and_together(kind, decoding):
    drafter = decoding(kind)
    for text in TREES:
        spec = TreeSpec.parse(text)
        ready = [
            session_at(drafter, list(prompt), answer[0])
            for prompt, answer in zip(PROMPTS, answers(), strict=True)
        ]
        together = drafter.propose_all(ready, spec, [None] * len(ready))
        for prompt, answer, tree in zip(PROMPTS, answers(), together, strict=True):
            check_tree(tree, spec)
            alone = session_at(drafter, list(prompt), answer[0]).propose(spec)
            assert alone.parents == tree.parents and alone.tokens.tolist() == tree.tokens.tolist()
        if kind in TRAINED and text != "none":
            assert all(len(tree) for tree in together)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", TRAINED)
def test_drawn_tokens_follow_the_q_that_is_reported(kind, decoding):
    """How often the likeliest token was drawn, against the sum of its probabilities: within four standard deviations."""
    drafter = decoding(kind)
    spec = TreeSpec.parse("chain:2@sample")
    sampler = Sampler(SamplingParams(temperature=3.0), torch.Generator().manual_seed(2))
    session = session_at(drafter, list(PROMPTS[0]), answers()[0][0])
    hits = 0
    expected = 0.0
    variance = 0.0
    for _ in range(100):
        tree = session.propose(spec, sampler)
        assert tree.proposal is not None
        for node, token in enumerate(tree.tokens.tolist()):
            q, best = tree.proposal.probs[tree.proposal.rows[node]].max(0)
            hits += token == int(drafter.kept_ids[best])
            expected += float(q)
            variance += float(q * (1 - q))
    assert variance > 0.01 and abs(hits - expected) <= 4 * variance**0.5 + 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_is_the_targets_own(kind, decoding):
    """Alone and in a ragged batch where rows join late; the overfitted drafter has something accepted."""
    drafter = decoding(kind)
    rounds = []
    for text in ("chain:3", "fanout:3x2x1", "dynamic:4,3,8@cut=0.01"):
        spec = TreeSpec.parse(text)
        made = generate_batch(
            the_target(packed=True),
            drafter,
            PROMPTS,
            max_new_tokens=NEW,
            spec=spec,
            eos_ids=(),
            max_rows=2 + (text == "chain:3"),
        )
        assert [generation.tokens for generation in made] == answers(), text
        rounds += [generation.stats.accepted_length for generation in made]
    alone = generate(the_target(packed=True), drafter, PROMPTS[0], max_new_tokens=NEW, eos_ids=())
    assert alone.tokens == answers()[0]
    if kind in TRAINED:
        assert sum(rounds) / len(rounds) > 1.3


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_sampling_by_rule_spends_the_targets_own_numbers(kind, decoding):
    """Trees chosen by a rule leave the text of a seed as it is; drawn ones are checked in tests/decode."""
    hot = SamplingParams(temperature=0.9, top_k=20)
    want = generate(
        the_target(packed=True),
        None,
        PROMPTS[0],
        max_new_tokens=NEW,
        sampling=hot,
        seed=4,
        eos_ids=(),
    ).tokens
    spec = TreeSpec.parse("fanout:3x2")
    got = generate(
        the_target(packed=True),
        decoding(kind),
        PROMPTS[0],
        max_new_tokens=NEW,
        spec=spec,
        sampling=hot,
        seed=4,
        eos_ids=(),
    )
    assert got.tokens == want


@pytest.mark.thorough
@pytest.mark.parametrize("kind", TRAINED)
def test_what_is_saved_is_what_was_trained(kind, decoding):
    loaded = decoding(kind)
    trained = overfitted(kind)[0]
    assert loaded.kind == kind == trained.kind and loaded.feature_layers == trained.feature_layers
    assert torch.equal(loaded.kept_ids, trained.kept_ids)
    a, b = (
        metrics_of(drafter, list(PROMPTS[1]), answers()[1])["loss"] for drafter in (trained, loaded)
    )
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(TRAINED)))
def test_kinds_without_weights_are_made_from_their_name(kind):
    assert untrained(kind).kind == kind
    with pytest.raises(UserError, match="no_such_option"):
        untrained(f"{kind}:no_such_option=1")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_continues_is_drafted_as_if_it_were_new(kind, decoding):
    spec = TreeSpec.parse("dynamic:4,3,8")
    target = the_target(packed=True)
    anew = talk(Decoder(target, decoding(kind), spec=spec, eos_ids=()))
    kept = talk(Decoder(target, decoding(kind), spec=spec, eos_ids=(), keep=True))
    for own, other in zip(kept, anew, strict=True):
        assert own.tokens == other.tokens
        if kind in TRAINED:  # others may learn from a text that they read twice
            assert own.stats.accepted == other.stats.accepted
        assert own.stats.prompt_tokens == other.stats.prompt_tokens


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_parts_from_the_last_is_drafted_as_if_it_were_new(kind, decoding, monkeypatch):
    """As requests behind one system prompt do: what they share is read once."""
    spec = TreeSpec.parse("dynamic:4,3,8")
    target = the_target(packed=True)
    kept = Decoder(target, decoding(kind), spec=spec, eos_ids=(), keep=True)
    read = []
    append = Engine._append
    monkeypatch.setattr(
        Engine, "_append", lambda *args: read.append(len(args[2][0])) or append(*args)
    )
    for question in ([7, 8, 7], [50], [7, 8, 4, 9]):
        prompt = [OPENING + question]
        anew = Decoder(target, decoding(kind), spec=spec, eos_ids=())
        (want,) = anew.generate(prompt, max_new_tokens=NEW)
        (found,) = kept.generate(prompt, max_new_tokens=NEW)
        assert found.tokens == want.tokens
        if kind in TRAINED:  # others may learn from a text that they read twice
            assert found.stats.accepted == want.stats.accepted
    first = len(OPENING) + 3
    # The last shared token is read again: its feature is drafted from with the token behind it.
    assert read == [first, first, first - 2, 2, first + 1, 5]
