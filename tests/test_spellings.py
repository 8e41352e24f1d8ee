"""transformers' spellings in generate and stream: what works does what transformers does, for the rest one line names ours."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest
import torch
from transformers import GenerationConfig

from drafttrain import Drafter, generate, load_drafter, stream
from drafttrain.errors import UserError
from drafttrain.inference.call_options import APPLIED, GenerateOptions, read_options
from tests.conftest import make_target

IDS = [5, 9, 11, 9, 11, 30, 2, 9, 11, 4]


@pytest.fixture(scope="module")
def tiny():
    return make_target(layers=2, eos_token_id=None)


def theirs(target, ids=IDS, **options) -> list[list[int]]:
    """New tokens of transformers' own generate."""
    rows = torch.tensor([ids])
    options = {
        "attention_mask": torch.ones_like(rows),
        "do_sample": False,
        "pad_token_id": 0,
        **options,
    }
    return target.model.generate(rows, **options)[:, len(ids) :].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 22},
        {"max_new_tokens": 12, "no_repeat_ngram_size": 2},
        {
            "max_new_tokens": 12,
            "generation_config": GenerationConfig(repetition_penalty=1.3, suppress_tokens=[9, 11]),
        },
        {"generation_config": GenerationConfig(max_new_tokens=7)},
        {"max_new_tokens": 12, "min_new_tokens": 4, "bad_words_ids": [[11]]},
    ],
    ids=lambda options: ",".join(options),
)
def test_greedy_options_choose_transformers_tokens(tiny, options):
    want = theirs(tiny, **options)[0]
    made = generate(
        tiny,
        IDS,
        "ngram",
        tree="chain:3",
        do_sample=False,
        pad_token_id=0,
        use_cache=True,
        **options,
    )
    assert made.tokens == want


def test_ends(tiny):
    whole = generate(tiny, IDS, max_new_tokens=12)
    end = whole.tokens[5]
    for ends in (end, [end, 1], torch.tensor([end]), (1, end)):
        out = generate(tiny, IDS, max_new_tokens=12, eos_token_id=ends)
        assert (
            out.tokens == whole.tokens[: whole.tokens.index(end) + 1] and out.stats.finish == "eos"
        )
    text = generate(tiny, IDS, max_new_tokens=12).text
    stop = text[3:5]
    assert (
        generate(tiny, IDS, max_new_tokens=12, stop_strings=stop).text == text[: text.index(stop)]
    )
    config = {"stop_strings": [stop], "max_new_tokens": 12}
    assert generate(tiny, IDS, generation_config=config).text == text[: text.index(stop)]
    assert "".join(stream(tiny, IDS, generation_config=config)) == text[: text.index(stop)]


def test_do_sample_takes_transformers_values():
    target = make_target(layers=1)
    sampling = lambda **given: read_options(target, "generate", given)[0]["sampling"]  # noqa: E731
    assert (
        sampling().greedy
        and sampling(do_sample=False).greedy
        and sampling(temperature=0.5).temperature == 0.5
    )
    assert (sampling(do_sample=True).temperature, sampling(do_sample=True).top_k) == (1.0, 50)
    target.model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9)
    assert sampling().greedy, "the call decides whether to sample"
    own = sampling(do_sample=True)
    assert (own.temperature, own.top_p, own.top_k) == (0.6, 0.9, 50)
    asked = sampling(
        generation_config=GenerationConfig(do_sample=True, temperature=0.3, top_k=7), top_p=0.5
    )
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.3, 7, 0.5)


def test_samples_per_prompt(tiny):
    made = generate(
        tiny,
        [IDS, IDS[:4]],
        "ngram",
        do_sample=True,
        num_return_sequences=3,
        max_new_tokens=6,
        seed=2,
    )
    want = [generate(tiny, ids, do_sample=True, max_new_tokens=6, seed=2 + i).tokens
            for i, ids in enumerate([IDS] * 3 + [IDS[:4]] * 3)]  # fmt: skip
    assert [out.tokens for out in made] == want and len({tuple(tokens) for tokens in want}) > 2
    assert isinstance(generate(tiny, IDS, num_return_sequences=1, max_new_tokens=2), list)


def test_a_tokenizers_output_as_keywords(tiny):
    want = [generate(tiny, text, max_new_tokens=5).tokens for text in ("hello there", "x")]
    tiny.tokenizer.padding_side = "left"
    batch = tiny.tokenizer(["hello there", "x"], padding=True, return_tensors="pt")
    assert [out.tokens for out in generate(tiny, **batch, max_new_tokens=5)] == want
    lists = tiny.tokenizer(["hello there", "x"], padding=True)
    assert [out.tokens for out in generate(tiny, max_new_tokens=5, **lists)] == want
    assert [
        out.tokens
        for out in generate(
            tiny, batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=5
        )
    ] == want
    row = {"input_ids": batch.input_ids[1], "attention_mask": batch.attention_mask[1]}
    assert generate(tiny, **row, max_new_tokens=5).tokens == want[1]
    assert (
        "".join(stream(tiny, **row, max_new_tokens=5)) == generate(tiny, "x", max_new_tokens=5).text
    )


MISTAKES = [
    ({"temprature": 0.5}, "temprature= is no option of it; did you mean temperature"),
    ({"max_tokens": 3}, "max_tokens= is named max_new_tokens here"),
    ({"assistant_model": "x"}, "assistant_model= is named drafter here"),
    ({"streamer": print}, "streamer= is named drafttrain.stream here"),
    ({"num_beams": 4}, "num_beams=4 has no counterpart in speculative decoding; leave it out"),
    ({"penalty_alpha": 0.6}, "penalty_alpha=0.6 has no counterpart"),
    ({"return_dict_in_generate": True}, "return_dict_in_generate= is no option of it"),
    ({"generation_config": {"num_beams": 3}}, "num_beams=3 has no counterpart"),
    (
        {"generation_config": {"tempe": 3}},
        "generation_config: tempe= is no option of it; did you mean temperature",
    ),
    ({"generation_config": 3}, "generation_config=3 must be a GenerationConfig"),
    ({"max_length": 4}, "max_length=4 includes the prompt's 10 tokens"),
    (
        {"max_length": 40, "max_new_tokens": 4},
        "max_length= counts prompt and answer, max_new_tokens= the answer alone; give one",
    ),
    ({"do_sample": True, "temperature": 0}, "do_sample=True contradicts temperature=0"),
    (
        {"do_sample": False, "temperature": 0.5},
        "do_sample=False is greedy, but temperature=0.5 samples",
    ),
    ({"do_sample": "yes"}, "do_sample='yes' must be"),
    ({"stop": "x", "stop_strings": "y"}, "stop= and stop_strings= mean the same; give one"),
    ({"eos_token_id": 300}, "eos_token_id=300 is outside the 300 tokens of 'tiny'"),
    ({"eos_token_id": "x"}, "eos_token_id='x' must be"),
    (
        {"no_repeat_ngram_size": -1},
        "no_repeat_ngram_size=-1: input should be greater than or equal to 0",
    ),
    ({"input_ids": [1]}, "prompt and input_ids= are both given; give one"),
    ({"attention_mask": [1, 0]}, "attention_mask has 2 entries for 10 input_ids"),
]


@pytest.mark.parametrize(
    ("options", "message"),
    MISTAKES,
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_each_other_spelling_is_one_line(tiny, options, message):
    for call in (generate, stream):
        with pytest.raises(UserError) as caught:
            call(tiny, IDS, **options)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_options_of_one_call_only(tiny):
    with pytest.raises(
        UserError, match="num_return_sequences=2 needs sampling: greedy answers are equal"
    ):
        generate(tiny, IDS, num_return_sequences=2)
    with pytest.raises(
        UserError, match="stream gives the text of one answer; use generate for several"
    ):
        stream(tiny, [IDS, IDS])
    with pytest.raises(UserError, match="stream: batch_size= is no option of it"):
        stream(tiny, IDS, batch_size=2)
    with pytest.raises(UserError, match="attention_mask has 1 rows for 2 input_ids"):
        generate(tiny, input_ids=[[1, 2], [3, 4]], attention_mask=[[1, 1]])


def test_the_typed_options_are_those_of_the_signature():
    own = {*inspect.signature(generate).parameters} - {
        "model",
        "prompt",
        "drafter",
        "others",
        "num_return_sequences",
    }
    assert {*get_type_hints(GenerateOptions)} == own | {*APPLIED}


def test_a_drafter_without_a_target_is_prepared_once(tiny, tmp_path):
    from tests.drafters.helpers import make_drafter

    make_drafter(tiny).save_pretrained(tmp_path / "drafter")
    want = generate(tiny, IDS, max_new_tokens=8)
    fresh = Drafter.from_pretrained(tmp_path / "drafter")
    assert fresh.fresh and "fresh" in repr(fresh)
    assert generate(tiny, IDS, fresh, max_new_tokens=8).tokens == want.tokens
    assert not fresh.fresh and "packed for decoding" in repr(fresh)
    bare = make_target(layers=2, eos_token_id=None).model
    with pytest.raises(
        UserError, match="has no tokenizer, by which a drafter knows its target; pass tokenizer="
    ):
        load_drafter(str(tmp_path / "drafter"), bare)
    assert load_drafter(str(tmp_path / "drafter"), bare, tiny.tokenizer).kind == "eagle3"


def test_readable_reprs(tiny):
    out = generate(tiny, IDS, "ngram", tree="chain:2", max_new_tokens=40)
    assert (
        repr(out.stats).startswith("Stats(40 tokens in ")
        and "finish='length'" in repr(out.stats)
        and len(repr(out)) < 250
    )
    assert repr(out).startswith("Generation('") and repr(out.stats) in repr(out)
    assert (
        repr(tiny)
        == "Target('tiny': LlamaForCausalLM, 0.0M parameters, float32 on cpu, 2 layers, 300 tokens, not packed)"
    )
    assert repr(load_drafter("ngram", tiny)) == "NgramDrafter(kind=ngram, no weights)"
