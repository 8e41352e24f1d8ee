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
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.batch import Batch, TokenTree, anchors_by_depth
from drafttrain.config import TrainConfig, load_config
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import kind_class, kinds, load_drafter, untrained
from drafttrain.errors import UserError
from drafttrain.inference import SamplingParams, generate, generate_batch
from drafttrain.ops.sampling import Sampler
from drafttrain.states.source import TargetSource
from drafttrain.target import Target
from drafttrain.train import build_drafter
from tests.conftest import make_target

KINDS = kinds()
TRAINED = [kind for kind in KINDS if kind_class(kind).trainable]
RECIPES = Path(__file__).parents[2] / "configs" / "smollm2-135m"
# What a kind cannot do without; all others are built from their defaults.
NEEDED: dict[str, dict[str, Any]] = {"draft_model": {"layers": [0, 3]}}
TREES = (
    "chain:3",
    "fanout:3x2x1",
    "dynamic:4,3,8",
    "paths:0,1,0-0,1-0,0-0-1",
    "chain:4@stop=0.2",
    "none",
)
PROMPTS = ([5, 9, 11, 9, 11, 30, 2, 9, 11, 4], [7, 8, 7, 8, 7], [60, 3, 90, 14, 15, 92, 65])
NEW = 14
MOST_STEPS = 300


@functools.cache
def the_target(packed: bool = False) -> Target:
    """The same model for training, and packed for decoding."""
    target = make_target(layers=4, hidden=32, vocab_size=300)
    return target.pack() if packed else target


@functools.cache
def answers() -> list[list[int]]:
    """The target's own greedy continuations of the prompts."""
    made = generate_batch(the_target(packed=True), None, PROMPTS, max_new_tokens=NEW, eos_ids=())
    return [generation.tokens for generation in made]


def rows_of(sequences: list[tuple[list[int], list[int]]]) -> Batch:
    """A batch of (prompt, response) pairs."""
    lengths = [len(prompt) + len(answer) for prompt, answer in sequences]
    ids = torch.zeros(len(sequences), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(sequences):
        ids[row, : lengths[row]] = torch.tensor([*prompt, *answer])
        mask[row, len(prompt) : lengths[row]] = True
    return Batch(ids, torch.tensor(lengths), mask, torch.full((len(sequences),), -1))


def build(kind: str, loss: str = "kl") -> Any:
    config = TrainConfig(kind=kind, loss=loss, drafter=dict(NEEDED.get(kind, {})))
    records = [
        {"tokens": [*prompt, *answer], "spans": [[len(prompt), len(prompt) + len(answer)]]}
        for prompt, answer in zip(PROMPTS, answers(), strict=True)
    ]
    return build_drafter(config, the_target(), records)[0]


def inputs_of(drafter: Any, batch: Batch) -> StepInputs:
    """What the trainer gives a drafter."""
    source = TargetSource(the_target(), drafter.feature_layers, drafter.kept_ids)
    count = len(anchors_by_depth(batch.response_mask, 1)[0])
    return StepInputs(batch, the_target().embed(batch.input_ids), *source(batch), total=count)


@torch.no_grad()
def metrics_of(drafter: Any, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    return drafter(inputs_of(drafter, rows_of([(prompt, answer)]))).metrics


def learned(steps: list[Any]) -> bool:
    first = steps[0]
    last = steps[-1]
    return bool(
        last.loss < 0.3 * first.loss and last.metrics["agree"][0] > 0.7 * last.metrics["count"][0]
    )


@functools.cache
def overfitted(kind: str) -> tuple[Any, list[Any], dict[str, float]]:
    """A drafter that has seen one batch many times, its steps, and each parameter's gradient summed over the first ones."""
    torch.manual_seed(0)
    drafter = build(kind).train()
    inputs = inputs_of(drafter, rows_of(list(zip(PROMPTS, answers(), strict=True))))
    trainable = {name: value for name, value in drafter.named_parameters() if value.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-2, weight_decay=0.0)
    steps = []
    seen = dict.fromkeys(trainable, 0.0)
    for number in range(MOST_STEPS):
        optimizer.zero_grad()
        step = drafter(inputs)
        step.loss.backward()
        if (
            number < 3
        ):  # a factor that starts as zero keeps the other one's gradient from it for a step
            for name, value in trainable.items():
                assert value.grad is not None, f"{name} has no gradient"
                seen[name] += float(value.grad.abs().sum())
        optimizer.step()
        steps.append(step)
        if number >= 10 and learned(steps):
            break
    return drafter.eval(), steps, seen


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


def session_at(drafter: Any, prompt: list[int], root: int) -> Any:
    """A session behind `prompt`, whose last committed token is `root`."""
    ids = torch.tensor(prompt)
    session = drafter.start(ids, 128)
    features = the_target().forward(ids[None], drafter.feature_layers).features[0]
    session.extend(torch.tensor([*prompt[1:], root]), features)
    return session


def check_tree(tree: TokenTree, spec: TreeSpec) -> None:
    assert len(tree) <= spec.budget and tree.drafted_depth <= spec.depth
    assert tree.tokens.shape == (len(tree),) and tree.tokens.dtype == torch.long
    assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))
    assert all(0 <= token < the_target().vocab_size for token in tree.tokens.tolist())
    siblings = list(zip(tree.parents, tree.tokens.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)
    for parent in {-1, *range(len(tree))}:
        width = spec.top_k if spec.shape == "dynamic" else max(spec.fanout, default=0)
        assert tree.parents.count(parent) <= width
    if tree.log_probs is not None:
        scores = tree.log_probs.tolist()
        assert len(scores) == len(tree)
        above = [scores[parent] if parent >= 0 else 0.0 for parent in tree.parents]
        assert all(score <= high + 1e-5 for score, high in zip(scores, above, strict=True))


# -- training half --------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("kind", TRAINED)
def test_one_batch_is_overfitted_with_a_gradient_on_every_parameter(kind):
    _, steps, gradients = overfitted(kind)
    assert gradients
    for name, total in gradients.items():
        assert 0 < total < float("inf"), f"{name}: {total}"
    for step in steps:
        assert step.loss.isfinite() and all(
            step.metrics[name].isfinite().all() for name in ("count", "loss", "alpha", "agree")
        )
    assert learned(steps), (
        f"after {len(steps)} steps: {steps[0].loss} -> {steps[-1].loss}, {steps[-1].metrics}"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", TRAINED)
def test_training_step_k_is_what_decoding_computes_at_depth_k(kind, decoding):
    """Both are asked about the same paths: -log q of their last token, by the loss and by what the token was drawn from."""
    trainer = build(kind, loss="ce").eval()
    trainer.load_state_dict(overfitted(kind)[0].state_dict())
    decoder = decoding(kind)
    prompt = list(PROMPTS[0])
    root = answers()[0][0]
    spec = TreeSpec.parse("fanout:2x1x1@sample")
    sampler = Sampler(SamplingParams(temperature=1.0), torch.Generator().manual_seed(1))
    tree = session_at(decoder, prompt, root).propose(spec, sampler)
    check_tree(tree, spec)
    assert tree.proposal is not None and tree.drafted_depth >= 1
    paths: list[list[int]] = []
    compared = set()
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens.tolist(), strict=True)):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
        depth = len(paths[-1])
        # A path ends in one more token, which nothing but the mask needs; the anchor is the prompt's last position.
        metrics = metrics_of(trainer, prompt, [root, *paths[-1]])
        if len(metrics["loss"]) < depth:
            continue  # drafted deeper than trained
        assert metrics["count"][depth - 1] == 1
        drafter_id = (decoder.kept_ids == token).nonzero().item()
        drawn = tree.proposal.probs[tree.proposal.rows[node], drafter_id]
        torch.testing.assert_close(metrics["loss"][depth - 1], -drawn.log(), rtol=2e-3, atol=2e-3)
        compared.add(depth)
    assert compared == set(range(1, 1 + min(tree.drafted_depth, len(metrics["loss"]))))


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
        together = drafter.propose_all(ready, [spec] * len(ready), [None] * len(ready))
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
