"""Batches: every row gets what it would get alone, whatever the others do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.errors import UserError
from drafttrain.inference import (
    Decoder,
    SamplingParams,
    Stats,
    engine,
    generate,
    generate_batch,
    strip_padding,
)
from drafttrain.ops import tree_cache
from drafttrain.ops.tree_attention import TreeLayout
from drafttrain.target import Target
from tests.conftest import make_target
from tests.drafters.helpers import check_same_trees, make_drafter
from tests.inference.fakes import ANY, FakeBatch, MarkovTarget, family, hf_greedy

PROMPTS = [
    [5, 9, 11, 9, 11, 30, 2, 9, 11, 4, 44, 9],
    [7],
    [3, 3, 3, 8, 3, 3],
    list(range(20)),
    [59, 1, 59, 1],
]
SPECS = ("none", "chain:1", "chain:4", "fanout:3x2x1", "dynamic:4,3,9")

prompt_lists = st.lists(
    st.lists(st.integers(0, 59), min_size=1, max_size=12), min_size=1, max_size=6
)


def alone(target, drafter, prompts, seed=0, **options):
    return [
        generate(target, drafter, prompt, seed=seed + i, **options).tokens
        for i, prompt in enumerate(prompts)
    ]


def tokens_of(generations):
    return [generation.tokens for generation in generations]


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    prompts=prompt_lists,
    seed=st.integers(0, 10_000),
    agree=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    nodes=st.integers(0, 30),
    count=st.integers(1, 25),
    max_rows=st.integers(1, 7),
    eos_ids=st.lists(st.integers(0, 59), max_size=4),
    temperature=st.sampled_from([0.0, 1.2]),
)
def test_rows_do_not_change_each_other(
    prompts, seed, agree, nodes, count, max_rows, eos_ids, temperature
):
    """Drafters that always, never or sometimes agree; EOS anywhere; more prompts than rows; greedy and sampled."""
    target = MarkovTarget(vocab=60, seed=seed % 7)
    options = {"max_new_tokens": count, "sampling": SamplingParams(temperature), "seed": seed}
    free = alone(target, None, prompts, eos_ids=(), **options)
    want = [
        tokens[: next((i + 1 for i, t in enumerate(tokens) if t in eos_ids), count)]
        for tokens in free
    ]
    drafter = FakeBatch(
        dict(zip(map(tuple, prompts), free, strict=True)), agree=agree, nodes=nodes, seed=seed
    )
    got = generate_batch(
        target, drafter, prompts, spec=ANY, eos_ids=eos_ids, max_rows=max_rows, **options
    )
    assert tokens_of(got) == want
    for generation, tokens in zip(got, want, strict=True):
        ended = tokens[-1] in eos_ids
        assert generation.stats.finish == ("eos" if ended else "length")
        assert generation.stats.new_tokens == len(tokens)


@pytest.mark.thorough
@settings(max_examples=10, deadline=None)
@given(
    name=st.sampled_from(["llama", "gemma3", "mistral"]),
    prompts=prompt_lists,
    seed=st.integers(0, 10_000),
    agree=st.sampled_from([0.0, 0.6, 1.0]),
    nodes=st.integers(0, 20),
    count=st.integers(1, 15),
    max_rows=st.integers(2, 4),
    eos=st.integers(0, 59),
)
def test_real_models_in_batches(name, prompts, seed, agree, nodes, count, max_rows, eos):
    target, _ = family(name)
    options = {"max_new_tokens": count, "eos_ids": [eos]}
    want = alone(target, None, prompts, **options)
    drafter = FakeBatch(
        dict(zip(map(tuple, prompts), want, strict=True)), agree=agree, nodes=nodes, seed=seed
    )
    got = generate_batch(target, drafter, prompts, spec=ANY, max_rows=max_rows, **options)
    assert tokens_of(got) == want


def test_eagle3_steps_once_per_depth_for_all_rows(target):
    drafter = make_drafter(target).eval()
    # room for all: no path ends early
    spec = TreeSpec.parse("dynamic:4,3,30")
    steps = []
    step = drafter.step
    sessions = []
    for prompt in PROMPTS:
        ids = torch.tensor([*prompt, 2])
        sessions.append(drafter.start(ids[:-1], 64))
        features = target.forward(ids[None, :-1], drafter.feature_layers).features[0]
        sessions[-1].extend(ids[1:], features)
    want = [session.propose(spec) for session in sessions]
    drafter.step = lambda *args: steps.append(args) or step(*args)
    got = drafter.propose_all(sessions, spec, [None] * len(sessions))
    assert len(steps) == spec.depth - 1
    check_same_trees(got, want, rtol=1.3e-6, atol=1e-5)


def test_rows_join_as_others_finish(monkeypatch):
    target, _ = family("llama")
    decoder = Decoder(target, None, eos_ids=(), max_rows=2)
    sizes = []
    opened = type(decoder.cache).open
    monkeypatch.setattr(
        type(decoder.cache), "open", lambda self, new: sizes.append(len(new)) or opened(self, new)
    )
    list(decoder.stream(PROMPTS, max_new_tokens=5))
    assert max(sizes) == decoder.cache.rows == 2
    # Two prefills of two prompts and four rounds each, then the fifth alone.
    assert sizes == [2] * 10 + [1] * 5


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 5, 13])
def test_prompts_in_pieces(monkeypatch, size):
    """Chunks cross the borders of prompts; drafters still get every feature, in order."""
    monkeypatch.setattr(engine, "_CHUNK", size)
    target, _ = family("gemma3")
    want = alone(target, None, PROMPTS, max_new_tokens=12, eos_ids=())
    drafter = FakeBatch(
        dict(zip(map(tuple, PROMPTS), want, strict=True)), agree=0.7, feature_layers=(1, 3)
    )
    got = generate_batch(
        target, drafter, PROMPTS, max_new_tokens=12, spec=ANY, eos_ids=(), max_rows=3
    )
    assert tokens_of(got) == want
    for session, prompt, tokens in zip(drafter.sessions, PROMPTS, want, strict=True):
        features = torch.cat(session.features)
        assert session.tokens == (prompt + tokens)[: len(features) + 1]
        reference = target.forward(
            torch.tensor([(prompt + tokens)[: len(features)]]), (1, 3)
        ).features[0]
        torch.testing.assert_close(features, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.thorough
def test_long_prompts_need_no_quadratic_mask(monkeypatch):
    length = 4300
    target = make_target(layers=2, hidden=16, max_position_embeddings=16384)
    prompt = torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    sizes = []
    mask = TreeLayout.mask

    def spy(self, *args):
        first, made = mask(self, *args)
        sizes.append(0 if made is None else made.numel())
        return first, made

    monkeypatch.setattr(TreeLayout, "mask", spy)
    got = generate_batch(
        target, NgramDrafter(), [prompt, prompt[:2100]], max_new_tokens=4, eos_ids=(), max_rows=2
    )
    target.model.set_attn_implementation("sdpa")
    assert got[0].tokens == hf_greedy(target.model, prompt, 4)
    assert got[1].tokens == hf_greedy(target.model, prompt[:2100], 4)
    assert max(sizes) <= 2 * 256 * (
        length + 256
    )  # a block of rows, for either query head of a group


def test_shares_add_up():
    target, _ = family("llama")
    stats = [Stats() for _ in PROMPTS]
    decoder = Decoder(target, NgramDrafter(), eos_ids=(), max_rows=5)
    list(decoder.stream(PROMPTS, max_new_tokens=12, stats=stats))
    wall = max(s.total_seconds for s in stats)
    assert 0 < sum(s.target_seconds + s.draft_seconds for s in stats) <= wall
    assert all(
        s.new_tokens == 12 and s.prompt_tokens == len(p)
        for s, p in zip(stats, PROMPTS, strict=True)
    )
    assert all(s.new_tokens == 1 + sum(a + 1 for a in s.accepted) for s in stats)
    assert decoder.memory == (decoder.cache.nbytes, str(decoder.cache))
    assert "(5 rows x 35 positions)" in decoder.memory[1]


def test_padding_is_stripped_on_either_side():
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 0]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert [row.tolist() for row in strip_padding(ids, mask)] == [[5, 6], [7, 8, 9]]


def test_bad_input_is_named():
    target, _ = family("llama")
    with pytest.raises(UserError, match="prompt 1: prompt is empty"):
        generate_batch(target, None, [[1], []], max_new_tokens=4)
    with pytest.raises(UserError, match="max_rows=0 must be a whole number from 1"):
        generate_batch(target, None, [[1]], max_new_tokens=4, max_rows=0)
    assert generate_batch(target, None, [], max_new_tokens=4) == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_packed_kernel_serves_the_cache(name, monkeypatch):
    """What a GPU does, with the kernel's torch reference in its place: the same tokens, one plan per round."""
    target, _ = family(name)
    options = {"max_new_tokens": 12, "eos_ids": (), "spec": TreeSpec.parse("dynamic:3,3,8")}
    want = tokens_of(generate_batch(target, NgramDrafter(), PROMPTS, max_rows=3, **options))
    plans = []
    calls = []
    build = tree_cache.PackedPlan.build
    attend = tree_cache.packed_tree_attention
    monkeypatch.setattr(tree_cache, "_on_gpu", lambda query: True)
    monkeypatch.setattr(
        tree_cache.PackedPlan, "build", lambda *args: plans.append(1) or build(*args)
    )
    monkeypatch.setattr(
        tree_cache, "packed_tree_attention", lambda *a, **k: calls.append(1) or attend(*a, **k)
    )
    assert tokens_of(generate_batch(target, NgramDrafter(), PROMPTS, max_rows=3, **options)) == want
    assert len(calls) == target.num_layers * len(plans) > 0


@pytest.mark.parametrize("spec", ["chain:3", "dynamic:4,3,9"])
def test_stop_strings_end_rows_as_they_end_alone(spec):
    target = make_target().pack()
    prompts = [target.tokenizer(text).input_ids for text in ("one", "two rivers", "three", "4")]
    options = {"max_new_tokens": 40, "spec": TreeSpec.parse(spec), "eos_ids": ()}
    whole = generate_batch(target, None, prompts, **options)
    stops = []
    for made, place in zip(whole[:3], (4, 11, 23), strict=True):
        text = target.tokenizer.decode(made.tokens)
        stops.append(text[place : place + 2])
    together = generate_batch(target, NgramDrafter(), prompts, stop=stops, max_rows=3, **options)
    assert tokens_of(together) == alone(target, NgramDrafter(), prompts, stop=stops, **options)
    for made, longer in zip(together, whole, strict=True):
        assert made.tokens == longer.tokens[: len(made.tokens)]
    assert [made.stats.finish for made in together[:3]] == ["stop"] * 3


@pytest.mark.thorough
@pytest.mark.parametrize("spec", ["none", "dynamic:4,3,9"])
def test_bfloat16_rows_are_what_they_are_alone(target, target_dir, spec):
    drafter = make_drafter(target)
    target = Target.load(str(target_dir), "bfloat16").pack()
    drafter.bind(target)
    options = {"max_new_tokens": 20, "spec": TreeSpec.parse(spec), "eos_ids": ()}
    together = generate_batch(target, drafter, PROMPTS, max_rows=3, **options)
    assert tokens_of(together) == alone(target, drafter, PROMPTS, **options)
    assert tokens_of(together) == alone(target, None, PROMPTS, **options)
