"""Models that decode with a cache of their own, against transformers: states, tokens, distributions, batches."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, PreTrainedModel

from drafttrain.batch import TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.errors import UserError
from drafttrain.inference import Decoder, SamplingParams, generate
from drafttrain.inference.responses import ResponseEngine, ResponseRequest
from drafttrain.target import Target
from drafttrain.target.attention import CausalRows
from drafttrain.target.snapshots import SnapshotCache
from tests.drafters.helpers import make_drafter
from tests.inference.fakes import ANY, OWN, VOCAB, FakeBatch, FakeDrafter, family, hf_greedy, tokens

FAMILIES = [
    pytest.param(name, marks=[] if name in ("bloom", "lfm2") else pytest.mark.slow) for name in OWN
]
LENGTHS = (1, 11, 70)
COUNT = 44
SHIFTED = (
    "mamba",
    "mamba2",
    "rwkv",
)  # transformers' hidden_states begin with the output of the first layer


@torch.no_grad()
def layer_states(reference, ids):
    """Logits; each layer's input and the last one's output [b, s, (layers + 1) * h]; and transformers' hidden_states."""
    body = next(
        (child for child in reference.children() if isinstance(child, PreTrainedModel)), reference
    )
    layers = next(child for child in body.modules() if isinstance(child, torch.nn.ModuleList))
    caught = []
    hooks = []

    def keep(_module, args, kwargs):
        caught.append(args[0] if args else kwargs["hidden_states"])

    def last(_module, _args, output):
        caught.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(last))
    out = reference(input_ids=ids, output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    return out.logits, torch.cat(caught, dim=-1), out.hidden_states


def prompts_of(lengths=LENGTHS):
    return [tokens(length, seed=length).tolist() for length in lengths]


def error(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


def decoded(target, drafter, spec, prompts, count, rows, **options):
    decoder = Decoder(
        target, drafter, spec=TreeSpec.parse(spec), eos_ids=(), max_rows=rows, **options
    )
    return decoder, decoder.generate(prompts, max_new_tokens=count)


def passes_of(decoder):
    assert isinstance(decoder.cache, SnapshotCache)
    return decoder.cache.passes


@pytest.mark.parametrize("name", FAMILIES)
def test_states_and_logits_are_those_of_transformers(name):
    target, reference = family(name)
    assert target.decoding_path == "snapshot" and target.reason
    ids = tokens(2, 24, seed=6)
    logits, states, named = layer_states(reference, ids)
    out = target.forward(ids, range(target.num_layers + 1))
    assert error(out.features, states) < 1e-5
    assert error(target.head(out.last_hidden), logits) < 1e-5
    shift = 1 if name in SHIFTED else 0
    for i in range(1, target.num_layers):
        assert error(target.forward(ids, (i,)).features, named[i - shift]) < 1e-5
    # A row of a ragged batch, padded on the right, has the states that it has alone.
    alone = target.forward(ids[1:, :13], range(target.num_layers + 1))
    assert error(out.features[1:, :13], alone.features) < 1e-5


def assert_greedy(name, prompts, count, sides, batches):
    target, reference = family(name)
    # xLSTM's own generate fails on a CPU with the cache that it makes.
    want = [hf_greedy(reference, prompt, count, use_cache=name != "xlstm") for prompt in prompts]
    truths = {tuple(prompt): tokens for prompt, tokens in zip(prompts, want, strict=True)}
    drafters = {
        "none": lambda: None,
        "chain:4": NgramDrafter,
        "chain:3": lambda: make_drafter(target).eval(),  # an EAGLE-3 head, which reads features
        str(ANY): lambda: FakeBatch(truths, agree=0.7, nodes=9, seed=1),  # trees
    }
    for spec in sides:
        for rows in batches:
            _, got = decoded(target, drafters[spec](), spec, prompts, count, rows)
            assert [one.tokens for one in got] == want, (spec, rows)
    return got


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_greedy_is_what_transformers_generates(name):
    got = assert_greedy(name, prompts_of(), COUNT, ("none", "chain:4", "chain:3", str(ANY)), (1, 3))
    assert got[1].stats.accepted_length > 1.3  # of the trees


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["bloom", "lfm2", "mamba2"])
def test_a_few_tokens_are_what_transformers_generates(name):
    """Of a cache that drops tokens, the same with convolutions, and one that cannot."""
    assert_greedy(name, prompts_of((1, 11)), 6, ("none", "chain:3", str(ANY)), (2,))


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_packed_weights_change_nothing(name):
    target, _ = family(name)
    packed = Target.wrap(copy.deepcopy(target.model), None).pack()
    ids = tokens(1, 16, seed=7)
    torch.testing.assert_close(
        packed.forward(ids, ()).last_hidden,
        target.forward(ids, ()).last_hidden,
        atol=1e-4,
        rtol=1e-4,
    )
    sides = [
        generate(side, None, ids[0].tolist(), max_new_tokens=9, eos_ids=()).tokens
        for side in (target, packed)
    ]
    assert sides[0] == sides[1]


@pytest.mark.thorough
def test_plain_sequences_share_a_forward_as_they_come_and_go():
    """Five sequences of different length in three rows; each round is one forward, also where sequences leave and join."""
    target, reference = family("lfm2")
    prompts = prompts_of((3, 9, 1, 14, 5))
    count = 6
    decoder, got = decoded(target, None, "none", prompts, count, rows=3)
    assert [one.tokens for one in got] == [
        hf_greedy(reference, prompt, count) for prompt in prompts
    ]
    # Three rows, and two that join when these end: a forward per prompt, then one per round.
    assert passes_of(decoder) == {"read": 5 + 2 * (count - 1)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "jamba"])
def test_responses_share_prefix_and_rows(name):
    """Data generation: a shared system prompt, follow-ups in their row, rows that end at different times."""
    target, _ = family(name)
    prefix = tokens(20, seed=1).tolist()
    prompts = [[*prefix, *tokens(3 + i, seed=2 + i).tolist()] for i in range(4)]
    limits = [4, 9, 6, 5]

    def alone(prompt, count):
        return generate(target, None, prompt, max_new_tokens=count, eos_ids=()).tokens

    def follow(finished):
        return [7, 8, 9] if len(finished.sequence) < 40 and finished.key == "1" else None

    engine = ResponseEngine(target, slots=3, max_length=80, feature_layers=(1,))
    requests = [
        ResponseRequest(str(i), prompt, limit, ())
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    done = {one.key: one for one in engine.run(requests, SamplingParams(), follow_up=follow)}
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        first = alone(prompt, limit)
        expected = (
            [*prompt, *first]
            if i != 1
            else [*prompt, *first, 7, 8, 9, *alone([*prompt, *first, 7, 8, 9], limit)]
        )
        assert done[str(i)].sequence == expected
        states = target.forward(torch.tensor([expected[:-1]]), (1,))
        assert (
            done[str(i)].features.float() - states.features[0]
        ).norm() <= 1e-2 * states.features.norm()


class WrongDrafter(FakeDrafter):
    """Drafts three tokens each round, the first of which is not the target's."""

    def propose(self, spec, sampler=None):
        follows = [*self.truth, 0][len(self.tokens) - len(self.prompt)]
        return TokenTree(torch.tensor([(follows + 1 + i) % VOCAB for i in range(3)]), [-1, 0, 1])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "moves"), [("lfm2", False), ("falcon_h1", True), ("jamba", True)])
def test_rejected_drafts_leave_no_trace_and_snapshots_move_on(name, moves):
    """Every draft is wrong: a state would keep them. Tokens since the snapshot are read again until it moves on."""
    target, reference = family(name)
    prompt = tokens(6, seed=3).tolist()
    want = hf_greedy(reference, prompt, 40)
    wrong = WrongDrafter(want)
    decoder, got = decoded(target, wrong, "chain:3", [prompt], 40, rows=1)
    assert got[0].tokens == want and got[0].stats.accepted_length < 1.1
    assert (passes_of(decoder)["snapshot"] > 0) == moves
    assert passes_of(decoder)["snapshot"] <= 3


def test_encoders_and_packed_rows_are_refused():
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    encoder = BertLMHeadModel(BertConfig(vocab_size=VOCAB, **sizes, initializer_range=0.3))
    with pytest.raises(
        UserError, match=r"\(BertLMHeadModel\) computes states that change with later tokens"
    ):
        Target.wrap(encoder, None)
    target, _ = family("bloom")
    with pytest.raises(
        UserError, match="runs its own forward and cache, which packed rows cannot share"
    ):
        target.forward(tokens(1, 6), (), torch.arange(6)[None], CausalRows(6))
    with pytest.raises(UserError, match="runs its own forward and cache"):
        target.forward(tokens(1, 6), (), torch.tensor([[0, 1, 2, 0, 1, 2]]))


def test_misuse_of_the_cache_is_refused():
    cache = SnapshotCache(family("bloom")[0], 32, rows=2)
    cache.open([(0, 5)])
    cache.target.forward(tokens(1, 5), (), None, cache)
    with pytest.raises(ValueError, match="must be all 5 tokens of row 0"):
        cache.commit([[0, 1]])
    with pytest.raises(ValueError, match="must be distinct numbers from 0 to 1"):
        cache.open([(0, 1), (0, 1)])
    with pytest.raises(ValueError, match="not all tokens"):
        cache.copy(0, 1, 2)
