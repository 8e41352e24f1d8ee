"""Static steps give what dynamic passes give, and a CUDA graph can hold them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.inference import Decoder, SamplingParams, static
from drafttrain.inference.sequence import Clock
from drafttrain.inference.static import StaticStep, TargetSteps
from drafttrain.ops import graphs
from drafttrain.ops.graphs import step_shape
from tests.conftest import make_target
from tests.drafters.helpers import make_drafter
from tests.inference.captured import (
    PROMPTS,
    check_captured_graphs,
    check_waiting_forwards,
    decode,
    on_gpu,
)
from tests.inference.fakes import ANY, FakeBatch, FakeDrafter, family

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def on_cpu(monkeypatch):
    """Static steps also run here, uncaptured."""
    monkeypatch.setattr(static, "_serves", lambda device: True)


@pytest.fixture
def counted(monkeypatch):
    """The shapes of the static passes that ran."""
    shapes = []
    run = StaticStep.forward
    monkeypatch.setattr(StaticStep, "forward", lambda self: shapes.append(self.shape) or run(self))
    return shapes


@torch.no_grad()
def near_tie(reference, prompt, tokens):
    logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    best, second = logits.topk(2).values.unbind(-1)
    return bool((best - second < 1e-4).any())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        *("gemma2", "gpt_oss", "gpt2"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "opt_post_norm")),
    ],
)
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prompts=st.lists(st.lists(st.integers(0, 59), min_size=1, max_size=12), min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
    agree=st.sampled_from([0.0, 0.6, 1.0]),
    nodes=st.integers(0, 20),
    count=st.integers(2, 14),
    max_rows=st.integers(1, 4),
    eos=st.integers(0, 59),
    temperature=st.sampled_from([0.0, 0.0, 1.2]),
)
def test_generations_are_those_of_dynamic_passes(
    name, on_cpu, counted, prompts, seed, agree, nodes, count, max_rows, eos, temperature
):
    target, reference = family(name)
    options = {
        "count": count,
        "eos_ids": [eos],
        "seed": seed,
        "sampling": SamplingParams(temperature),
    }
    want = decode(target, None, prompts, False, "none", max_rows=1, **options)
    # Sums run in another order, so a choice between equals may differ.
    assume(
        temperature
        or not any(near_tie(reference, p, t) for p, (t, _) in zip(prompts, want, strict=True))
    )
    truths = dict(zip(map(tuple, prompts), [tokens for tokens, _ in want], strict=True))
    form = {"agree": agree, "nodes": nodes, "seed": seed, "feature_layers": (1, target.num_layers)}
    counted.clear()
    plain = FakeBatch(truths, **form)
    drafter = FakeBatch(truths, **form)
    dynamic = decode(target, plain, prompts, False, ANY, max_rows, **options)
    assert not counted
    got = decode(target, drafter, prompts, True, ANY, max_rows, **options)
    assert got == dynamic
    for session, other in zip(drafter.sessions, plain.sessions, strict=True):
        for ours, theirs in zip(session.features, other.features, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    assert counted or all(len(tokens) < 2 for tokens, _ in want)


@pytest.mark.thorough
@pytest.mark.parametrize("spec", ["none", "chain:4", "fanout:3x2", "dynamic:3,3,8@stop=0.1"])
def test_every_kind_of_tree(spec, on_cpu, counted):
    target = make_target()
    drafter = make_drafter(target, kept=torch.arange(40, 240)).eval()
    for each in (drafter, NgramDrafter()) if spec == "chain:4" else (drafter,):
        want = decode(target, each, PROMPTS, False, spec)
        assert not counted
        assert decode(target, each, PROMPTS, True, spec) == want
        assert counted
        counted.clear()


@given(st.lists(st.integers(1, 90), min_size=1, max_size=9))
def test_shapes_hold_what_they_are_made_for(counts):
    shape = step_shape(counts)
    if sum(counts) > 512:
        assert shape is None
        return
    pads = shape.tokens - sum(counts)
    assert 0 <= pads <= static._SPARE == 31
    assert shape.max_new >= max(*counts, counts[-1] + pads) > 0
    assert len(counts) <= shape.rows < 2 * len(counts)
    assert 32 * shape.words >= shape.max_new


def test_few_shapes_serve_many_passes():
    assert len({step_shape([n]) for n in range(1, 129)}) == 13
    assert step_shape([3]) == step_shape([4]) == (1, 4, 4, 1)
    assert step_shape([9, 9, 9]) == (4, 32, 16, 1)


@pytest.mark.thorough
def test_cache_and_steps_outlive_a_call(on_cpu):
    target = make_target(layers=2)
    want = decode(target, None, PROMPTS, False)
    assert not target.idle_steps
    assert decode(target, None, PROMPTS, True) == want
    (steps,) = target.idle_steps
    cache = steps.cache
    made = dict(steps._passes.made)
    assert cache.capacity == 128 and cache.rows == 3 and made
    assert decode(target, None, PROMPTS, True, max_rows=2) == want
    assert target.idle_steps == [steps] and steps.cache is cache
    assert all(steps._passes.made[key] is step for key, step in made.items())
    # A longer sequence needs another cache, which old steps do not know.
    decode(target, None, [PROMPTS[0] * 90], True)
    assert steps.cache is not cache and steps.cache.capacity == 1152
    assert not set(made.values()) & set(steps._passes.made.values())
    # Weights that moved make graphs worthless.
    target.model.lm_head.weight.data = target.model.lm_head.weight.data.clone()
    assert decode(target, None, PROMPTS, True) == want
    assert target.idle_steps and target.idle_steps[0] is not steps


def test_a_call_in_inference_mode_leaves_what_any_call_may_use(on_cpu):
    target, _ = family("gpt2")  # its passes are torch's
    target.idle_steps.clear()
    text = list(PROMPTS[0])
    options = {"sampling": SamplingParams(repetition_penalty=1.2), "eos_ids": ()}
    (want,) = Decoder(target, None, graphs=False, **options).generate([text], max_new_tokens=24)
    drafter = FakeDrafter(None, nodes=4)
    decoder = Decoder(target, drafter, spec=ANY, graphs=True, **options)
    for count in (8, 16):
        with torch.inference_mode(count == 8):
            text += decoder.generate([text], max_new_tokens=count)[0].tokens
    assert text == PROMPTS[0] + want.tokens
    target.idle_steps.clear()


def test_an_outgrown_cache_doubles_as_far_as_the_target_reads():
    steps = TargetSteps(make_target(layers=2))
    steps.target.max_positions = 5000
    capacities = [
        steps.open(least, 1, (), choose=True).capacity for least in (600, 900, 1100, 2100, 4100)
    ]
    assert capacities == [640, 1280, 1280, 2560, 5120]  # 5000 and what padding takes
    assert steps.open(600, 2, (), choose=True).capacity == 640  # more rows: as much as they need


def test_the_clock_stands_still_during_captures():
    pool = graphs.GraphPool(torch.device("cpu"))
    clock = Clock(torch.device("cpu"), pool)
    begun = clock.mark()
    pool.seconds += 1000  # as if a capture had taken them
    assert clock.between(begun, clock.mark()) == pytest.approx(-1000, abs=100)
    assert clock.captured == 1000


def test_a_model_that_cannot_be_captured_decodes_dynamically(on_cpu, counted, monkeypatch, capsys):
    target = make_target(layers=2)

    def refuse(self, step):
        raise RuntimeError("called a synchronizing CUDA operation\nmore")

    monkeypatch.setattr(graphs.GraphPool, "capture", refuse)
    want = decode(target, NgramDrafter(), PROMPTS, False)
    for _ in range(2):
        assert decode(target, NgramDrafter(), PROMPTS, True) == want
    assert not counted
    assert capsys.readouterr().err == (
        "target 'tiny' (LlamaForCausalLM) decodes without CUDA graphs: called a synchronizing CUDA operation\n"
    )


def test_a_full_cache_and_large_passes_stay_dynamic(on_cpu, counted, monkeypatch):
    target = make_target(layers=2)
    want = decode(target, NgramDrafter(), PROMPTS, False, "chain:4")
    monkeypatch.setattr(graphs, "BUCKETS", (1, 2, 4))
    assert decode(target, NgramDrafter(), PROMPTS, True, "chain:4") == want
    assert {shape.tokens for shape in counted} <= {1, 2, 4}
    monkeypatch.undo()
    steps = TargetSteps(target)
    steps.cache = cache = static.TreeCache(6)
    cache.open([(0, 3)])
    with torch.no_grad():
        target.forward(torch.tensor([[1, 2, 3]]), (), cache.positions(), cache)
    cache.commit([range(3)])
    cache.open([(0, [-1, 0])])
    # 3 + 3 fit, a fourth token that pads them does not.
    assert steps.run(torch.tensor([1, 2, 3])) is None


def test_graphs_can_be_turned_off(on_cpu, monkeypatch):
    target = make_target(layers=2)
    assert TargetSteps.lease(target, None) is not None
    assert TargetSteps.lease(target, False) is None
    monkeypatch.setenv("DRAFTTRAIN_GRAPHS", "0")
    assert TargetSteps.lease(target, None) is None
    assert TargetSteps.lease(target, True) is not None
    monkeypatch.undo()
    assert TargetSteps.lease(target, True) is None  # no graphs on a CPU


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mixtral", "gpt2", "phi3_longrope"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_graphs_decode_as_dynamic_passes(name, temperature):
    check_captured_graphs(name, temperature)


@pytest.mark.gpu
@needs_gpu
def test_a_forward_that_waits_for_the_device_is_not_captured(capsys):
    check_waiting_forwards(capsys)


@pytest.mark.gpu
@needs_gpu
def test_memory_of_graphs_is_told():
    target = on_gpu("llama")
    decoder = Decoder(target, None, eos_ids=(), graphs=True)
    decoder.generate(PROMPTS, max_new_tokens=8)
    assert "1 captured CUDA graphs" in decoder.memory[1]
    assert decoder.memory[0] > decoder.cache.nbytes
