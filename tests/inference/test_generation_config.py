"""A target's generation_config changes our tokens as it changes those of transformers' generate."""

from __future__ import annotations

import copy
import functools
import itertools
import logging

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import drafttrain
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.errors import UserError
from drafttrain.inference import SamplingParams, generate, generate_batch, static
from drafttrain.inference.decode import stream
from drafttrain.inference.responses import ResponseEngine, ResponseRequest
from drafttrain.target import Target
from drafttrain.target.generation import AppliedKeys, LogitsRules, ignored_line
from tests.conftest import make_tokenizer
from tests.drafters.layer_kinds import make_kind
from tests.inference.fakes import ANY, FakeDrafter, sharpen

VOCAB = 60
COUNT = 20
PROMPTS = [[5, 9, 11, 9, 11, 30, 2, 9, 11, 4, 44, 9], [7], [30, 31, 30, 31, 30]]


@functools.cache
def make_model(seed=8):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    special = {
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, vocab_size=VOCAB, max_position_embeddings=512, **special)
    )
    sharpen(model, seed)
    return model.eval()


@functools.cache
def ending_in(*end) -> list[list[int]]:
    """The greedy answers to the prompts with no rule but these end tokens."""
    return [hf({"eos_token_id": list(end) or None}, prompt) for prompt in PROMPTS]


def hf(settings, prompt, count=COUNT, **options):
    """Tokens of transformers' generate for one prompt."""
    model = make_model()
    model.generation_config = GenerationConfig(**{"pad_token_id": 0, **copy.deepcopy(settings)})
    ids = torch.tensor([prompt])
    options = {
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": count,
        **options,
    }
    return model.generate(ids, **options)[0, len(prompt) :].tolist()


def tiny(settings, tokenizer=None) -> Target:
    model = copy.deepcopy(make_model())
    model.generation_config = GenerationConfig(**{"pad_token_id": 0, **copy.deepcopy(settings)})
    return Target.wrap(model, tokenizer, name="tiny")


@functools.cache
def plain() -> list[list[int]]:
    """The greedy answers to the prompts without rules."""
    return ending_in()


def ends() -> list[int]:
    """Tokens of the plain answers, one of each, to end answers with."""
    return [plain()[0][3], plain()[2][5], plain()[1][4]]


NAMES = [
    "repetition_penalty",
    "rewarded_repetition",
    "penalty_as_integer",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids",
    "bad_words_ids_long",
    "sequence_bias",
    "sequence_bias_long",
    "min_length",
    "min_new_tokens",
    "min_new_tokens_over_min_length",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "forced_eos_token_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "begin_after_bos",
    "exponential_decay_length_penalty",
    "remove_invalid_values",
    "all_at_once",
]


@functools.cache
def rules() -> dict[str, dict]:
    """By name, settings that change the greedy answer of at least one prompt."""
    a, b, c = plain()[0][:3]
    return {
        "repetition_penalty": {"repetition_penalty": 1.7},
        "rewarded_repetition": {"repetition_penalty": 0.6, "eos_token_id": ends()},
        "penalty_as_integer": {"repetition_penalty": 2},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[a], [plain()[2][1]]], "eos_token_id": ends()},
        "bad_words_ids_long": {
            "bad_words_ids": [[a, b], [PROMPTS[1][0], plain()[1][0]], [1, 2, 3]]
        },
        "sequence_bias": {"sequence_bias": [[[a], -9.0], [[plain()[2][0]], -30]]},
        "sequence_bias_long": {
            "sequence_bias": [[[a, b], -30.0], [[40], 4.0], [[9, a], float("-inf")]]
        },
        "min_length": {"min_length": 16, "eos_token_id": ends()},
        "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": ends()},
        "min_new_tokens_over_min_length": {
            "min_new_tokens": 2,
            "min_length": 40,
            "eos_token_id": ends(),
        },
        "forced_bos_token_id": {"forced_bos_token_id": 33},
        "forced_eos_token_id": {"forced_eos_token_id": 6},
        "forced_eos_token_ids": {"forced_eos_token_id": [50, 6], "eos_token_id": [6, 50]},
        "suppress_tokens": {"suppress_tokens": [a, c, 17]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [plain()[i][0] for i in range(3)]},
        "begin_after_bos": {
            "begin_suppress_tokens": [plain()[1][1]],
            "forced_bos_token_id": plain()[1][0],
        },
        "exponential_decay_length_penalty": {
            "exponential_decay_length_penalty": [4, 1.3],
            "eos_token_id": [ends()[0], 13],
        },
        "remove_invalid_values": {"remove_invalid_values": True, "suppress_tokens": [a]},
        "all_at_once": {
            "sequence_bias": [[[40, 41], 2.0]],
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 3,
            "bad_words_ids": [[a, b], [12]],
            "min_new_tokens": 5,
            "suppress_tokens": [c],
            "begin_suppress_tokens": [a],
            "eos_token_id": ends(),
        },
    }


def drafters(target, wants, name):
    """Drafters with their trees: one that proposes true continuations, so that deep nodes are walked; real ones in a batch."""
    if len(wants) == 1:
        if name == "all_at_once":
            yield None, "none"
        yield FakeDrafter(wants[0], 0.8, nodes=16, vocab=VOCAB), str(ANY)
    if len(wants) > 1 or name == "all_at_once":
        if name == "all_at_once" or NAMES.index(name) % 2:
            yield NgramDrafter(), "chain:4"
        if name == "all_at_once" or not NAMES.index(name) % 2:
            yield make_kind("eagle3", target).eval(), "dynamic:3,3,8"


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers(name):
    settings = rules()[name]
    biases = [[ids, float(bias)] for ids, bias in settings.get("sequence_bias", [])] or None
    penalty = float(settings.get("repetition_penalty", 1))  # transformers itself refuses integers
    theirs = {**settings, "sequence_bias": biases, "repetition_penalty": penalty}
    want = [hf(theirs, prompt) for prompt in PROMPTS]
    end = settings.get("eos_token_id") or []
    assert want != ending_in(*([end] if isinstance(end, int) else end)), (
        "the settings change nothing"
    )
    target = tiny(settings)
    accepted = 0
    for prompts, wants in ((PROMPTS[:1], want[:1]), (PROMPTS, want)):
        for drafter, spec in drafters(target, wants, name):
            tree = TreeSpec.parse(spec)
            made = generate_batch(
                target, drafter, prompts, max_new_tokens=COUNT, spec=tree, max_rows=len(prompts)
            )
            assert [generation.tokens for generation in made] == wants, (spec, len(prompts))
            accepted = max(accepted, *(generation.stats.accepted_length for generation in made))
    assert accepted > 1.3


def test_every_applied_key_is_tested():
    assert list(rules()) == NAMES
    assert {key for settings in rules().values() for key in settings} >= set(
        AppliedKeys.__annotations__
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["repetition_penalty", "suppress_tokens", "begin_suppress_tokens", "min_new_tokens"]
)
def test_streams_and_responses_apply_them_too(name):
    settings = rules()[name]
    want = [hf(settings, prompt) for prompt in PROMPTS]
    target = tiny(settings)
    rounds = stream(
        target, NgramDrafter(), PROMPTS[0], max_new_tokens=COUNT, spec=TreeSpec.parse("chain:4")
    )
    assert list(itertools.chain.from_iterable(rounds)) == want[0]
    for slots in (1, 3):
        engine = ResponseEngine(target, slots, max_length=100)
        requests = [
            ResponseRequest(str(i), ids, COUNT, target.eos_ids) for i, ids in enumerate(PROMPTS)
        ]
        done = {each.key: each.tokens for each in engine.run(requests, SamplingParams())}
        assert [done[str(i)] for i in range(len(PROMPTS))] == want


def test_a_follow_up_turn_and_a_shared_prefix_are_part_of_the_text():
    settings = {
        "repetition_penalty": 1.6,
        "min_new_tokens": 6,
        "begin_suppress_tokens": [plain()[0][0]],
        "eos_token_id": ends(),
    }
    target = tiny(settings)
    system = list(range(20, 44))
    turns = {}

    def follow_up(finished):
        turns.setdefault(finished.key, []).append(finished)
        return [3, 8] if len(turns[finished.key]) == 1 else None

    requests = [
        ResponseRequest(str(i), system + ids, 10, target.eos_ids) for i, ids in enumerate(PROMPTS)
    ]
    list(
        ResponseEngine(target, 3, max_length=100).run(
            requests, SamplingParams(), follow_up=follow_up
        )
    )
    for i, ids in enumerate(PROMPTS):
        first, second = turns[str(i)]
        assert first.tokens == hf(settings, system + ids, 10)
        assert second.tokens == hf(settings, system + ids + first.tokens + [3, 8], 10)


def test_static_passes_apply_them(monkeypatch):
    monkeypatch.setattr(static, "_serves", lambda device: True)
    settings = rules()["all_at_once"]
    want = [hf(settings, prompt) for prompt in PROMPTS]
    ran = []
    run = static.StaticStep.forward
    monkeypatch.setattr(
        static.StaticStep, "forward", lambda self: ran.append(self.choose) or run(self)
    )
    made = generate_batch(tiny(settings), NgramDrafter(), PROMPTS, max_new_tokens=COUNT, max_rows=3)
    assert [generation.tokens for generation in made] == want
    assert ran and not any(ran)


def test_without_rules_nothing_is_processed(monkeypatch):
    """The settings that most models have (special tokens, sampling defaults) leave the argmax of raw logits in charge."""
    monkeypatch.setattr("drafttrain.inference.verify._choose_here", None)
    monkeypatch.setattr("drafttrain.inference.verify.ProcessedText.process", None)
    harmless = {
        "eos_token_id": 3,
        "min_length": 0,
        "repetition_penalty": 1,
        "bad_words_ids": None,
        "suppress_tokens": [],
    }
    made = generate(
        tiny({**harmless, "do_sample": True, "temperature": 0.6}),
        NgramDrafter(),
        PROMPTS[0],
        max_new_tokens=8,
    )
    assert made.tokens == hf({"eos_token_id": 3}, PROMPTS[0], 8)


# -- sampling; tests/inference/test_distribution.py counts tokens of processed logits ----------------------------------


def test_no_token_left_to_sample_is_an_error():
    target = tiny({"suppress_tokens": list(range(VOCAB))})
    with pytest.raises(UserError, match="bans every token at some position"):
        generate(target, None, [1, 2], max_new_tokens=2, sampling=SamplingParams(1.0))


# -- the caller's own settings, and what is not applied ------------------------------------------------------------------


def test_the_callers_own_penalty_wins():
    model = copy.deepcopy(make_model())
    model.generation_config = GenerationConfig(
        repetition_penalty=1.7, suppress_tokens=[plain()[0][2]], pad_token_id=0
    )
    options = {"max_new_tokens": COUNT, "drafter": "ngram", "tree": "chain:4"}
    for penalty, same in (
        (None, {"repetition_penalty": 1.7}),
        (1.0, {}),
        (1.2, {"repetition_penalty": 1.2}),
    ):
        got = drafttrain.generate(model, PROMPTS[0], repetition_penalty=penalty, **options)
        assert got.tokens == hf({"suppress_tokens": [plain()[0][2]], **same}, PROMPTS[0]), penalty
    target = tiny({"repetition_penalty": 1.7})
    assert (
        generate(target, None, PROMPTS[0], max_new_tokens=COUNT, rules=LogitsRules()).tokens
        == plain()[0]
    )


def test_a_changed_generation_config_counts_at_once():
    target = tiny({})
    target.model.generation_config.suppress_tokens = [plain()[0][0]]
    assert generate(target, None, PROMPTS[0], max_new_tokens=COUNT).tokens == hf(
        {"suppress_tokens": [plain()[0][0]]}, PROMPTS[0]
    )


def test_what_is_not_applied_is_named_once_per_target(caplog):
    settings = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "num_beams": 4,
        "guidance_scale": 2.0,
        "chat_format": 1,
    }
    target = tiny(settings, make_tokenizer(VOCAB))
    with caplog.at_level(logging.WARNING, logger="drafttrain"):
        for _ in range(3):
            generate(target, NgramDrafter(), [5], max_new_tokens=3)
        list(
            ResponseEngine(target, 2, 50).run([ResponseRequest("0", [5], 3, ())], SamplingParams())
        )
    (record,) = [record for record in caplog.records if record.name.startswith("drafttrain")]
    line = record.getMessage()
    assert len(line.splitlines()) == 1
    for part in (
        "target 'tiny'",
        "temperature=0.6",
        "num_beams=4",
        "chat_format=1",
        "set temperature, top_p",
    ):
        assert part in line
    assert "repetition_penalty" not in line


def test_nothing_is_said_where_everything_is_applied():
    applied = {
        "eos_token_id": 3,
        "repetition_penalty": 1.1,
        "min_length": 4,
        "suppress_tokens": [5],
        "num_beams": 1,
    }
    assert ignored_line(GenerationConfig(**applied, temperature=0.3), SamplingParams(), "t") == ""
    sampled = GenerationConfig(**applied, do_sample=True, temperature=0.3, top_p=0.9)
    assert ignored_line(sampled, SamplingParams(0.3, top_p=0.9), "t") == ""
    assert "temperature=1.0, do_sample=True" in ignored_line(
        GenerationConfig(do_sample=True), SamplingParams(), "t"
    )
    assert "max_new_tokens and stop" in ignored_line(
        GenerationConfig(max_length=40), SamplingParams(), "t"
    )
    assert ignored_line(None, SamplingParams(), "t") == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"suppress_tokens": [3, 60]},
            "suppress_tokens with token id 60, outside the vocabulary of 60 tokens",
        ),
        ({"bad_words_ids": [[3], [4, 99]]}, "bad_words_ids with token id 99"),
        ({"sequence_bias": [[[3, 77], 1.0]]}, "sequence_bias with token id 77"),
        ({"forced_bos_token_id": 10**30}, "forced_bos_token_id with token id 10000"),
        ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0: input should be greater"),
        ({"min_new_tokens": 2.5}, "min_new_tokens=2.5: input should be a valid integer"),
        ({"sequence_bias": [[[1], float("nan")]]}, "the bias must be a number"),
    ],
)
def test_wrong_values_are_refused_when_the_target_is_wrapped(settings, message):
    with pytest.raises(
        UserError, match=r"target='tiny': generation_config has .*" + message.replace(".", r"\.")
    ):
        tiny(settings)


def test_rules_that_contradict_each_other_are_refused():
    target = tiny({})
    target.model.generation_config.suppress_tokens = [4]
    target.model.generation_config.forced_eos_token_id = 4
    with pytest.raises(
        UserError,
        match=r"generation_config cannot be applied \(Every token in `forced_eos_token_id`",
    ):
        generate(target, None, [5], max_new_tokens=3)


def test_a_ban_of_the_end_itself_is_void_as_in_transformers():
    settings = {"bad_words_ids": [[ends()[0]]], "eos_token_id": ends()[0]}
    assert generate(tiny(settings), None, PROMPTS[0], max_new_tokens=COUNT).tokens == hf(
        settings, PROMPTS[0]
    )


def test_end_tokens_outside_the_vocabulary_never_occur():
    assert tiny({"eos_token_id": [4, -1, 4000]}).eos_ids == [4]
