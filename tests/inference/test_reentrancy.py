"""Calls at a time: threads and interleaved streams of one target and one decoder write what each writes alone."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.inference import Decoder, SamplingParams, static
from drafttrain.inference.responses import ResponseEngine, ResponseRequest
from tests.conftest import make_target
from tests.drafters.helpers import make_drafter

THREADS = 4
ROUNDS = 2
COUNT = 16
PROMPTS = [
    [[7 * i + j for j in range(3 + i)], [i, 9, 11, 9, 11, 30 + i], list(range(i, i + 20))]
    for i in range(THREADS)
]


@pytest.fixture(scope="module")
def packed():
    """float32 with heads of 16 numbers: passes take the C kernels, which release the interpreter's lock."""
    target = make_target(hidden=64)
    target.head_drafter = make_drafter(target, kept=torch.arange(40, 240)).eval()
    return target.pack()


def decoders(target, drafting, temperature):
    spec = TreeSpec.parse("dynamic:4,4,12" if drafting else "none")
    drafter = target.head_drafter if drafting else None
    return Decoder(
        target, drafter, spec=spec, sampling=SamplingParams(temperature), eos_ids=(), max_rows=2
    )


def tokens_of(decoder, prompts):
    return [made.tokens for made in decoder.generate(prompts, max_new_tokens=COUNT, seed=5)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("temperature", "drafting", "shared"),
    [
        (0.0, True, True),
        (1.1, False, True),
        pytest.param(0.0, False, False, marks=pytest.mark.slow),
        pytest.param(1.1, True, False, marks=pytest.mark.slow),
        pytest.param(0.0, True, False, marks=pytest.mark.slow),
        pytest.param(0.0, False, True, marks=pytest.mark.slow),
        pytest.param(1.1, True, True, marks=pytest.mark.slow),
        pytest.param(1.1, False, False, marks=pytest.mark.slow),
    ],
)
def test_threads_write_what_one_thread_writes(packed, shared, drafting, temperature):
    one = decoders(packed, drafting, temperature)
    want = [tokens_of(one, prompts) for prompts in PROMPTS]
    used = [one if shared else decoders(packed, drafting, temperature) for _ in PROMPTS]
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(ROUNDS):
            assert list(pool.map(tokens_of, used, PROMPTS)) == want


@pytest.mark.thorough
def test_responses_in_threads(packed):
    engine = ResponseEngine(packed, slots=3, max_length=128)

    def run(prompts):
        requests = [ResponseRequest(str(i), prompt, COUNT, ()) for i, prompt in enumerate(prompts)]
        return {done.key: done.tokens for done in engine.run(requests, SamplingParams(1.1), seed=5)}

    want = [run(prompts) for prompts in PROMPTS]
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(ROUNDS):
            assert list(pool.map(run, PROMPTS)) == want


@pytest.mark.thorough
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("drafting", [pytest.param(False, marks=pytest.mark.slow), True])
def test_streams_of_one_decoder_interleave(packed, monkeypatch, graphs, drafting):
    monkeypatch.setattr(static, "_serves", lambda device: graphs)
    decoder = decoders(packed, drafting, 0.0)
    want = [tokens_of(decoder, prompts) for prompts in PROMPTS[:2]]
    got = [[[] for _ in prompts] for prompts in PROMPTS[:2]]
    streams = [decoder.stream(prompts, max_new_tokens=COUNT, seed=5) for prompts in PROMPTS[:2]]
    running = list(zip(streams, got, strict=True))
    while running:
        for stream, found in list(running):
            step = next(stream, None)
            if step is None:
                running.remove((stream, found))
            else:
                found[step[0]] += step[1]
    assert got == want
    packed.idle_steps.clear()


@pytest.mark.thorough
def test_an_abandoned_stream_returns_its_lease(packed, monkeypatch):
    monkeypatch.setattr(static, "_serves", lambda device: True)
    packed.idle_steps.clear()
    decoder = decoders(packed, False, 0.0)
    want = tokens_of(decoder, PROMPTS[0])
    (steps,) = packed.idle_steps
    never = decoder.stream(PROMPTS[0], max_new_tokens=COUNT)  # not started: leases nothing
    abandoned = decoder.stream(PROMPTS[1], max_new_tokens=COUNT)
    next(abandoned), next(abandoned)
    assert not packed.idle_steps
    abandoned.close()
    assert packed.idle_steps == [steps]
    dropped = decoder.stream(PROMPTS[1], max_new_tokens=COUNT)
    next(dropped)
    del dropped, never
    gc.collect()
    assert packed.idle_steps == [steps]
    assert tokens_of(decoder, PROMPTS[0]) == want
    packed.idle_steps.clear()
