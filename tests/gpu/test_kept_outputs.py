"""What outlives a captured pass is a copy: the next replay overwrites the pass's own outputs.

The target's residual stream is the token's embedding, and its next token a fixed permutation with a wide margin, so
that states and tokens are known exactly in bfloat16.
"""

from __future__ import annotations

import copy

import pytest
import torch

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.inference.responses import ResponseEngine, ResponseRequest
from drafttrain.target import Target
from tests.drafters import contract
from tests.gpu.count import drafter_of, moved
from tests.inference.fakes import ANY, FakeBatch

VOCABULARY = 300
STEP = 7  # the token after t is t + STEP; 7 and 300 share no factor, so all tokens are visited
LAYERS = (1, 3)
PROMPTS = [[5, 9, 11, 30], [7], [3, 3, 8]]
NEW = 9


pytestmark = pytest.mark.any_gpu


def permuting_target(dtype=torch.bfloat16):
    """A target on the GPU whose states are embeddings and whose next token is known."""
    base = contract.the_target()
    model = copy.deepcopy(base.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = torch.randn(model.model.embed_tokens.weight.shape, generator=generator)
        embeddings /= embeddings.square().mean(1, keepdim=True).sqrt()
        model.model.embed_tokens.weight.copy_(embeddings)
        model.model.norm.weight.fill_(1)
        model.lm_head.weight.copy_(embeddings.roll(STEP, 0))
    return Target.wrap(model.to("cuda", dtype), base.tokenizer, name=base.name, dtype=dtype)


def continuation(prompt):
    return [(prompt[-1] + STEP * (number + 1)) % VOCABULARY for number in range(NEW)]


@pytest.mark.thorough
def test_states_of_responses_are_those_of_their_tokens(any_gpu, monkeypatch):
    monkeypatch.setenv("DRAFTTRAIN_GRAPHS", "1")
    target = permuting_target()
    engine = ResponseEngine(target, slots=2, max_length=64, feature_layers=LAYERS)
    requests = [
        ResponseRequest(str(number), prompt, NEW, ()) for number, prompt in enumerate(PROMPTS)
    ]
    embeddings = target.model.model.embed_tokens.weight.detach().cpu()
    for finished in engine.run(requests, SamplingParams()):
        prompt = PROMPTS[int(finished.key)]
        assert finished.sequence == prompt + continuation(prompt)
        want = embeddings[torch.tensor(finished.sequence[:-1])]  # [n, h] bfloat16
        assert torch.equal(finished.features, torch.cat([want] * len(LAYERS), dim=1))
        assert torch.allclose(finished.last_hidden.float(), want.float(), atol=0.02, rtol=0.02)
    assert any_gpu.replays > 0


@pytest.mark.thorough
def test_sessions_get_the_features_of_committed_tokens(any_gpu):
    target = permuting_target()
    truths = {tuple(prompt): continuation(prompt) for prompt in PROMPTS}
    drafter = FakeBatch(truths, agree=0.6, feature_layers=LAYERS, vocab=VOCABULARY)
    decoder = Decoder(target, drafter, spec=ANY, max_rows=3, eos_ids=(), graphs=True)
    made = decoder.generate(PROMPTS, max_new_tokens=NEW)
    assert any_gpu.replays > 0
    assert [one.tokens for one in made] == list(truths.values())
    embeddings = target.model.model.embed_tokens.weight.detach().cpu()
    for session in drafter.sessions:
        read = torch.cat([part.cpu() for part in session.features])  # [n, f*h]
        text = session.prompt + truths[tuple(session.prompt)]
        want = embeddings[torch.tensor(text[: len(read)])]
        assert torch.equal(read, torch.cat([want] * len(LAYERS), dim=1))


@pytest.mark.thorough
def test_trees_that_an_observer_keeps_stay_as_they_were(any_gpu):
    target = permuting_target(torch.float32)
    drafter = moved(drafter_of("eagle3"), target)
    spec = TreeSpec.parse("fanout:2x2")
    decoder = Decoder(target, drafter, spec=spec, eos_ids=(), graphs=True)
    seen = []

    def observe(_, tree, verdict, logits):
        if len(tree):
            seen.append((tree, tree.tokens.tolist(), tree.log_probs.tolist()))

    decoder.observer = observe
    decoder.generate(PROMPTS[:1], max_new_tokens=NEW)
    assert any_gpu.replays > 0
    assert len({tuple(scores) for _, _, scores in seen}) > 1  # rounds differ
    for kept, tokens, scores in seen:
        assert kept.tokens.tolist() == tokens
        assert kept.log_probs.tolist() == scores


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["lookahead", "token_recycling"])
def test_sessions_hear_the_same_choices_from_captured_passes(any_gpu, kind):
    """Probes and predictions are read from a pass's logits, which the next replay overwrites."""
    heard = {}
    for captured in (False, True):
        target = permuting_target()
        drafter = moved(drafter_of(kind), target)
        heard[captured] = listen(drafter)
        decoder = Decoder(
            target, drafter, spec=TreeSpec.parse("chain:3"), eos_ids=(), max_rows=3, graphs=captured
        )
        for prompt, made in zip(
            PROMPTS, decoder.generate(PROMPTS, max_new_tokens=NEW), strict=True
        ):
            assert made.tokens == continuation(prompt)
    assert any_gpu.replays > 0
    assert heard[True] == heard[False]
    assert heard[True]


def listen(drafter):
    """The tokens that a drafter's sessions observe or read as predictions, in order."""
    heard = []
    start = drafter.start

    def started(prompt, longest):
        session = start(prompt, longest)
        observe = session.observe
        read = session.read_predictions

        def observed(chosen):
            heard.append(list(chosen))
            observe(chosen)

        def predicted(tree, predictions):
            heard.append([ids for ids, _ in predictions])
            read(tree, predictions)

        session.observe = observed
        session.read_predictions = predicted
        return session

    drafter.start = started
    return heard
