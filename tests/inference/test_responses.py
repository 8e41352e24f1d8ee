from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, Gemma3ForCausalLM, Gemma3TextConfig

from drafttrain.errors import UserError
from drafttrain.inference import static
from drafttrain.inference.responses import ResponseEngine, ResponseRequest, choose_slots
from drafttrain.ops.sampling import SamplingParams
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target import Target
from drafttrain.target.native_body import NativeBody
from tests.conftest import make_target, make_tokenizer
from tests.inference import fakes

STOPS = [257, *range(0, 250, 12)]


def make_gemma(window: int = 8) -> Target:
    """A tiny Gemma 3: sliding layers whose window is shorter than the sequences, query norms, scaled embedding."""
    torch.manual_seed(3)
    config = Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=300,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=8,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
        initializer_range=0.4,
        tie_word_embeddings=False,
    )
    return Target.wrap(
        Gemma3ForCausalLM(config), make_tokenizer(), name="gemma", dtype=torch.float32
    )


def make_prompts(
    count: int, prefix: list[int], longest: int = 40, seed: int = 1
) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [prefix + torch.randint(0, 250, (n,), generator=generator).tolist() for n in lengths]


def hf_greedy(target: Target, prompt: list[int], count: int, stops: list[int]) -> list[int]:
    return fakes.hf_greedy(target.model, prompt, count, eos_token_id=stops, pad_token_id=257)


def run(
    target: Target,
    requests: list[ResponseRequest],
    slots: int,
    sampling: SamplingParams | None = None,
    **options,
):
    engine = ResponseEngine(
        target, slots=slots, max_length=256, feature_layers=options.pop("feature_layers", ())
    )
    return {
        done.key: done for done in engine.run(requests, sampling or SamplingParams(0.0), **options)
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "prefix"),
    [(make_target, []), (make_gemma, [256, *range(1, 20)])],
    ids=["llama", "gemma3"],
)
def test_greedy_equals_transformers(make, prefix):
    target = make()
    prompts = make_prompts(11, prefix)
    want = {str(i): hf_greedy(target, prompt, 25 + i, STOPS) for i, prompt in enumerate(prompts)}
    assert len({len(tokens) for tokens in want.values()}) > 5, "the lengths should be ragged"
    requests = [
        ResponseRequest(str(i), prompt, 25 + i, set(STOPS)) for i, prompt in enumerate(prompts)
    ]
    got = run(target, requests, slots=5)
    assert {key: done.tokens for key, done in got.items()} == want
    for key, done in got.items():
        assert done.finish_reason == ("stop" if done.tokens[-1] in STOPS else "length")
        assert done.sequence == prompts[int(key)] + done.tokens


@pytest.mark.thorough
def test_long_prompts_are_read_in_pieces(monkeypatch):
    monkeypatch.setattr("drafttrain.inference.engine._CHUNK", 7)
    target = make_gemma()
    prompts = make_prompts(9, [256, *range(20)])
    requests = [ResponseRequest(str(i), prompt, 12, {257}) for i, prompt in enumerate(prompts)]
    got = run(target, requests, slots=4)
    for i, prompt in enumerate(prompts):
        assert got[str(i)].tokens == hf_greedy(target, prompt, 12, [257])


@pytest.mark.thorough
def test_prefix_is_computed_once_and_drain_runs_fewer_rows(monkeypatch, target):
    shapes: list[tuple[int, ...]] = []
    target.pack()  # which runs forwards of its own
    look_up = NativeBody._look_up  # in prompts' forwards and in rounds

    def spy(self, ids):
        shapes.append(tuple(ids.shape))
        return look_up(self, ids)

    monkeypatch.setattr(NativeBody, "_look_up", spy)
    prefix = [256, *range(30)]
    requests = [
        ResponseRequest(str(i), [*prefix, 40 + i, 41 + i], 60 if i == 7 else 4, {257})
        for i in range(8)
    ]
    got = run(target, requests, slots=8)
    monkeypatch.undo()
    assert len(got["7"].tokens) == 60
    assert got["7"].tokens == hf_greedy(target, requests[7].prompt_ids, 60, [257])
    assert shapes[0] == (1, len(prefix))
    assert shapes[1] == (1, 8 * 2)
    assert shapes.count((1, 8)) == 3
    assert shapes.count((1, 1)) == 56


@pytest.mark.thorough
def test_identical_prompts_share_all_but_one_token(target):
    prompt = [256, *range(20)]
    requests = [ResponseRequest(str(i), prompt, 20, {257}) for i in range(6)]
    got = run(target, requests, 3, SamplingParams(2.0))
    assert len({tuple(done.tokens) for done in got.values()}) == 6, "own random numbers each"
    want = hf_greedy(target, prompt, 20, [257])
    assert all(done.tokens == want for done in run(target, requests, 3).values())


@pytest.mark.thorough
def test_sampled_output_does_not_depend_on_neighbours(target):
    prompts = make_prompts(12, [256])
    requests = [ResponseRequest(str(i), prompt, 30, {257}) for i, prompt in enumerate(prompts)]
    sampling = SamplingParams(1.3, top_k=40, top_p=0.95)
    together = run(target, requests, 5, sampling, seed=7)
    alone = run(target, requests[4:5], 1, sampling, seed=7)
    assert together["4"].tokens == alone["4"].tokens
    assert run(target, requests[4:5], 1, sampling, seed=8)["4"].tokens != alone["4"].tokens


@pytest.mark.parametrize("make", [make_target, make_gemma], ids=["llama", "gemma3"])
def test_captured_features_equal_the_forward(make):
    target = make()
    prompts = make_prompts(9, [256, *range(20)])
    requests = [
        ResponseRequest(str(i), prompt, 9 + i, set(STOPS)) for i, prompt in enumerate(prompts)
    ]
    got = run(target, requests, 4, feature_layers=(1, 2, 4))
    assert len(got) == 9
    for done in got.values():
        want = target.forward(torch.tensor([done.sequence[:-1]]), (1, 2, 4))
        assert done.features.dtype == torch.bfloat16
        assert done.features.shape == want.features[0].shape
        torch.testing.assert_close(done.features.float(), want.features[0], rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(
            done.last_hidden.float(), want.last_hidden[0], rtol=1e-2, atol=1e-3
        )


@pytest.mark.thorough
def test_follow_up_goes_on_in_the_slot(target):
    """Turn two equals a fresh run over the whole history, and its features cover both turns."""
    prompts = make_prompts(7, [256, 1])
    requests = [ResponseRequest(str(i), prompt, 6 + i, {257}) for i, prompt in enumerate(prompts)]
    seen: dict[str, int] = {}

    def follow_up(done):
        seen[done.key] = seen.get(done.key, 0) + 1
        return [33, 34, 35 + int(done.key)] if seen[done.key] == 1 else None

    got = run(target, requests, 3, feature_layers=(1,), follow_up=follow_up)
    for i, prompt in enumerate(prompts):
        first = hf_greedy(target, prompt, 6 + i, [257])
        history = [*prompt, *first, 33, 34, 35 + i]
        done = got[str(i)]
        assert done.tokens == hf_greedy(target, history, 6 + i, [257])
        assert done.sequence == history + done.tokens
        want = target.forward(torch.tensor([done.sequence[:-1]]), (1,))
        torch.testing.assert_close(done.features.float(), want.features[0], rtol=1e-2, atol=1e-3)


def test_stop_yields_what_runs(target):
    engine = ResponseEngine(target, slots=2, max_length=256)
    requests = (ResponseRequest(str(i), [256, i + 1], 50, {257}) for i in range(100))
    done = list(engine.run(requests, SamplingParams(0.0), stop=lambda: engine.new_tokens >= 20))
    assert [it.finish_reason for it in done] == ["length"] * 2
    assert sum(len(it.tokens) for it in done) == 20
    assert next(requests).key == "6", "requests are read a few slots' worth ahead, not all"


def test_length_limits(target):
    engine = ResponseEngine(target, slots=2, max_length=10)
    (done,) = engine.run([ResponseRequest("a", [256] * 7, 50, ())], SamplingParams(0.0))
    assert len(done.sequence) == 10
    assert done.finish_reason == "length"
    with pytest.raises(
        UserError, match="max_length=4097, but target 'tiny' reads at most 4096 tokens; use"
    ):
        ResponseEngine(target, max_length=4097)
    with pytest.raises(UserError, match=r"prompt 'b' has 10 tokens.*max_length=10, at most 9"):
        list(engine.run([ResponseRequest("b", [256] * 10, 5, ())], SamplingParams(0.0)))
    assert list(engine.run([], SamplingParams(0.0))) == []


@pytest.mark.thorough
@pytest.mark.parametrize("capture", [(), (1, 3)])
def test_the_cache_grows_with_the_sequences(target, monkeypatch, capture):
    """Also with static passes, whose buffers a growing cache moves."""
    monkeypatch.setattr("drafttrain.inference.static._serves", lambda device: True)
    monkeypatch.setattr("drafttrain.inference.static._CAPACITY_STEP", 8)
    prompts = make_prompts(9, [256, 1, 2, 3])
    requests = [ResponseRequest(str(i), prompt, 20, {257}) for i, prompt in enumerate(prompts)]
    want = run(target, requests, 3, SamplingParams(1.0), feature_layers=capture)
    monkeypatch.setattr("drafttrain.inference.responses._FIRST_CAPACITY", 8)
    grown: list[int] = []
    reserve = TreeCache.reserve
    monkeypatch.setattr(
        TreeCache, "reserve", lambda self, size: grown.append(size) or reserve(self, size)
    )
    for graphs in ("1", "0"):
        monkeypatch.setenv("DRAFTTRAIN_GRAPHS", graphs)
        grown.clear()
        target.idle_steps.clear()
        got = run(target, requests, 3, SamplingParams(1.0), feature_layers=capture)
        assert {key: done.tokens for key, done in got.items()} == {
            key: done.tokens for key, done in want.items()
        }
        assert len(grown) > (graphs == "0")
        for key, done in got.items() if capture else ():
            torch.testing.assert_close(done.features, want[key].features, rtol=1e-2, atol=1e-3)


def test_runs_may_interleave(target):
    """Two runs of one engine at a time: each has a cache of its own."""
    prompts = make_prompts(8, [256, 7])
    requests = [ResponseRequest(str(i), prompt, 12, {257}) for i, prompt in enumerate(prompts)]
    engine = ResponseEngine(target, slots=3, max_length=256)
    hot = SamplingParams(1.1)
    greedy = SamplingParams(0.0)
    want = [
        {done.key: done.tokens for done in engine.run(requests, rule, seed=4)}
        for rule in (hot, greedy)
    ]
    got: list[dict[str, list[int]]] = [{}, {}]
    runs = [engine.run(requests, rule, seed=4) for rule in (hot, greedy)]
    for pair in zip(*runs, strict=True):
        for found, done in zip(got, pair, strict=True):
            found[done.key] = done.tokens
    assert got == want


@pytest.mark.parametrize(
    ("family", "numbers"),
    [
        ("llama", 32 * 2 * 32 * 128),
        ("gemma4_text", 2 * 4 * (25 * 256 + 5 * 512)),  # heads of two widths
        ("deepseek_v3", 61 * 2 * 128 * 192),  # narrow vectors, which our cache holds expanded
        ("deepseek_v4", 43 * 2 * 512),
    ],
)
def test_as_many_sequences_run_as_half_of_the_memory_holds(monkeypatch, family, numbers):
    """By the numbers of a token's keys and values, of families whose layers say their heads in other ways."""
    config = AutoConfig.for_model(family)
    target = SimpleNamespace(
        config=config, num_layers=config.num_hidden_layers, device=torch.device("cpu")
    )
    row = 4 * numbers * static.rounded_capacity(300)  # bytes
    memory = {"SC_AVPHYS_PAGES": 2 * row, "SC_PAGE_SIZE": 11}
    monkeypatch.setattr("os.sysconf", memory.get)
    assert choose_slots(target, 300) == 10  # and a row for a shared prefix


# -- sampling -----------------------------------------------------------------------------------------------------


def test_a_prefix_is_not_that_of_an_earlier_run(monkeypatch):
    """Captured passes keep their cache between runs."""
    monkeypatch.setattr(static, "_serves", lambda device: True)
    target = make_target(layers=2)
    for first in (1, 50):
        prompts = make_prompts(4, [256, *range(first, first + 30)])
        requests = [ResponseRequest(str(i), prompt, 6, {257}) for i, prompt in enumerate(prompts)]
        for key, done in run(target, requests, slots=3).items():
            assert done.tokens == hf_greedy(target, prompts[int(key)], 6, [257])
    assert len(target.idle_steps) == 1
