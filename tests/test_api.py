"""The public calls: every form of model and prompt, stop strings, text as a stream."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import drafttrain
from drafttrain import Target, generate, load_drafter, stream
from drafttrain.errors import UserError
from drafttrain.inference.sequence import TextStream
from tests.conftest import make_target, make_tokenizer
from tests.drafters.helpers import make_drafter
from tests.inference.fakes import hf_greedy

TEXT = "hello there"
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tiny() -> Target:
    """Writes characters of one byte, so that any part of its text may be a stop string."""
    target = make_target(eos_token_id=None)
    plain = [target.tokenizer.decode([i]).isascii() for i in range(target.vocab_size)]
    target.lm_head.weight.data[~torch.tensor(plain)] = 0
    return target


def ids_of(target, text):
    return target.tokenizer(text).input_ids


def test_a_loaded_model_works_and_stays_usable(tiny):
    model = tiny.model
    tokenizer = tiny.tokenizer
    out = generate(
        model, TEXT, drafter="ngram", tokenizer=tokenizer, tree="dynamic:3,4,8", max_new_tokens=20
    )
    assert out.tokens == hf_greedy(model, ids_of(tiny, TEXT), 20)
    assert out.text == tokenizer.decode(out.tokens, skip_special_tokens=True)
    assert (out.stats.new_tokens, out.stats.finish) == (20, "length")


def test_forms_of_prompts(tiny):
    ids = ids_of(tiny, TEXT)
    want = generate(tiny, TEXT, max_new_tokens=6)
    for prompt in (ids, torch.tensor(ids), tiny.tokenizer(TEXT)):
        assert generate(tiny, prompt, max_new_tokens=6).tokens == want.tokens
    chat = generate(tiny, CHAT, max_new_tokens=6).tokens
    rendered = tiny.tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False
    )
    assert chat == generate(tiny, rendered, max_new_tokens=6).tokens
    several = [TEXT, CHAT, ids[:3]]
    alone = [generate(tiny, prompt, max_new_tokens=6).tokens for prompt in several]
    together = generate(tiny, several, "ngram", max_new_tokens=6, batch_size=2)
    assert [out.tokens for out in together] == alone
    assert all(isinstance(out.text, str) for out in together)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(tiny, side):
    tokenizer = make_tokenizer()
    tokenizer.padding_side = side
    texts = [TEXT, "a much longer prompt", "x"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    alone = [generate(tiny, text, max_new_tokens=6).tokens for text in texts]
    assert [out.tokens for out in generate(tiny, batch, max_new_tokens=6)] == alone


@pytest.mark.thorough
def test_names_of_models_and_drafters(target_dir, target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    name = str(tmp_path / "drafter")
    want = generate(str(target_dir), TEXT, max_new_tokens=8)
    (tmp_path / "drafter" / "decoding.json").write_text('{"tree": "fanout:3x2"}')
    out = generate(str(target_dir), TEXT, drafter=name, max_new_tokens=8)
    assert out.tokens == want.tokens
    assert max(out.stats.offered) == 2
    loaded = load_drafter(f"{name}+ngram", target)
    assert (
        generate(target, TEXT, loaded, tree="dynamic:3,3,8", max_new_tokens=8).tokens == want.tokens
    )


def test_sampling_takes_a_seed(tiny):
    def texts(seed):
        return [
            out.text
            for out in generate(
                tiny, [TEXT] * 4, "ngram", temperature=1.0, max_new_tokens=8, seed=seed
            )
        ]

    first = texts(3)
    assert first == texts(3)
    assert len(set(first)) == 4
    assert first[1] == generate(tiny, TEXT, temperature=1.0, max_new_tokens=8, seed=4).text


@pytest.mark.thorough
@pytest.mark.parametrize("tree", ["none", "dynamic:4,3,9"])
def test_stop_strings_end_the_text_wherever_they_begin(tiny, tree):
    whole = generate(tiny, TEXT, max_new_tokens=30)
    for begin in range(0, len(whole.text) - 3, 9):
        stop = whole.text[begin : begin + 3]
        place = whole.text.index(stop)
        out = generate(
            tiny, TEXT, "ngram", tree=tree, max_new_tokens=30, stop=["never there", stop]
        )
        assert out.text == whole.text[:place]
        assert out.stats.finish == "stop" and out.stats.ended
        assert out.tokens == whole.tokens[: len(out.tokens)]
        assert out.stats.new_tokens == len(out.tokens)
        assert stop in tiny.tokenizer.decode(out.tokens, skip_special_tokens=True)
        assert stop not in tiny.tokenizer.decode(out.tokens[:-1], skip_special_tokens=True)
        pieces = list(stream(tiny, TEXT, "ngram", tree=tree, max_new_tokens=30, stop=stop))
        assert "".join(pieces) == out.text


def test_kinds_of_request_that_are_switched_off(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter" / "decoding.json").write_text('{"tree": "chain:2", "off": ["poetry"]}')
    drafter = str(tmp_path / "drafter")
    off, on = generate(
        target, [TEXT, TEXT], drafter, max_new_tokens=12, category=["poetry", "code"]
    )
    assert off.tokens == on.tokens
    assert off.stats.draft_seconds == 0.0 < on.stats.draft_seconds
    assert (
        generate(target, TEXT, drafter, max_new_tokens=12, category="poetry").stats.draft_seconds
        == 0.0
    )
    with pytest.raises(UserError, match="category has 1 entries for 2 prompts"):
        generate(target, [TEXT, TEXT], drafter, category=["poetry"])
    (tmp_path / "drafter" / "decoding.json").write_text('{"tree": "chain:2", "off": "poetry"}')
    with pytest.raises(UserError, match="off='poetry': input should be a valid list"):
        generate(target, TEXT, drafter)


@pytest.mark.thorough
def test_streams_come_in_pieces(tiny):
    whole = generate(tiny, TEXT, max_new_tokens=30)
    pieces = list(stream(tiny, TEXT, "ngram", max_new_tokens=30))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 3


def test_characters_that_span_tokens_appear_whole():
    tokenizer = make_tokenizer()
    written = "a€ü\n\nb"
    ids = tokenizer(written).input_ids
    assert len(ids) > len(written)
    text = TextStream(tokenizer)
    pieces = []
    for token in ids:
        assert text.push([token]) == 1
        pieces.append(text.take())
    assert [piece for piece in pieces if piece] == list(written)
    broken = TextStream(tokenizer)
    broken.push(ids[:2])
    assert (broken.take(), broken.take(last=True)) == ("a", "\N{REPLACEMENT CHARACTER}")


def test_what_may_become_a_stop_string_waits():
    tokenizer = make_tokenizer()
    text = TextStream(tokenizer, ["\n\n", "END"])
    pieces = []
    for token in tokenizer("x\ny\nEN z\n\nw").input_ids:
        assert text.push([token]) == 1
        pieces.append(text.take())
        if text.stopped:
            break
    assert pieces == ["x", "", "\ny", "", "\n", "", "EN ", "z", "", ""]
    assert text.take(last=True) == ""
    assert text.text == "x\ny\nEN z"


def test_eos_is_named(tiny, monkeypatch):
    whole = generate(tiny, TEXT, max_new_tokens=12)
    monkeypatch.setattr(tiny, "eos_ids", [whole.tokens[4]])
    out = generate(tiny, TEXT, max_new_tokens=12)
    assert out.stats.finish == "eos"
    assert out.tokens == whole.tokens[: whole.tokens.index(whole.tokens[4]) + 1]


def test_bad_input_is_named(tiny):
    bare = make_target().model
    with pytest.raises(UserError, match="is text, but the model has no tokenizer; pass tokenizer="):
        generate(bare, TEXT)
    with pytest.raises(UserError, match="stream gives text, but the model has no tokenizer"):
        stream(bare, [1, 2])
    with pytest.raises(UserError, match=r"stop=\('x',\) needs text"):
        generate(bare, [1, 2], stop="x")
    with pytest.raises(UserError, match="an empty string stops nothing"):
        generate(tiny, TEXT, stop=["x", ""])
    with pytest.raises(UserError, match="tree='bush' is not a tree"):
        generate(tiny, TEXT, tree="bush")
    with pytest.raises(UserError, match="has no chat template"):
        generate(Target.wrap(bare, make_tokenizer_without_template()), CHAT)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        drafttrain.nothing  # noqa: B018


def make_tokenizer_without_template():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def test_importing_the_package_loads_no_library():
    subprocess.run(
        [sys.executable, "-c", "import sys, drafttrain; assert 'torch' not in sys.modules"],
        check=True,
    )


def test_the_names_of_the_package():
    for name in drafttrain.__all__:
        assert getattr(drafttrain, name).__name__.removeprefix("drafttrain.") == name
        assert name in dir(drafttrain) and callable(getattr(drafttrain, name))
