"""Draft models of another vocabulary: tokens as bytes, text from ids to ids, sessions, lossless decoding, training."""

from __future__ import annotations

import json
import random

import pytest
import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.draft_model.model import DraftModel, DraftModelConfig
from drafttrain.drafters.draft_model.vocabularies import CommittedText, TokenBytes, VocabularyPair
from drafttrain.drafters.kinds import split_name
from drafttrain.drafters.registry import load_drafter
from drafttrain.drafters.shipping import find_drafter, shipping
from drafttrain.errors import UserError
from drafttrain.evaluation.diagnose import _vocabulary as diagnose_vocabulary
from drafttrain.inference import SamplingParams, generate, generate_batch
from drafttrain.ops.sampling import Sampler
from drafttrain.states.source import NoTarget, TargetSource
from drafttrain.target import Target
from tests.conftest import make_target, make_tokenizer
from tests.drafters.helpers import make_batch, random_path, session_after

PROSE = (
    "The keeper of the lighthouse counted the waves and the ships. In 1998 the committee didn't mention the naïve café, "
    "and the children were playing where the water was calm and the weather was fine. "
)
CODE = 'def count(ships):\n    return {"where": len(ships), "water": 2 ** 10}\n\n\nfor ship in ships:\n    print(ship)\n🙂🙂'
TEXTS = [
    PROSE[:90],
    CODE,
    "naïve café, Straße, 你好,世界。",
    "🙂🚀 and 🧑‍🚀!",
    "  two spaces\n\n\tand tabs ",
    "<|end|>The ships<|only|> count",
    "e\u0301 is two characters",
]
KINDS = ["byte_level", "sentencepiece", "llama"]


def train_tokenizer(kind: str, text: str, size: int = 420, special: tuple[str, ...] = ("<|end|>",)):
    """Byte-level BPE; SentencePiece's marks with byte tokens; the same with BOS and a space before every text (Llama 2)."""
    first = (
        list(special)
        if kind == "byte_level"
        else ["<s>", *special, *(f"<0x{i:02X}>" for i in range(256))]
    )
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind != "byte_level", unk_token=None))
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "byte_level" else []
    if kind == "byte_level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        steps = [normalizers.Replace(" ", "▁")]
        back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if kind == "llama":
            steps = [normalizers.Prepend("▁"), *steps]
            back = [*back, decoders.Strip(" ", 1, 0)]
        tokenizer.normalizer, tokenizer.decoder = (
            normalizers.Sequence(steps),
            decoders.Sequence(back),
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.train_from_iterator(
        text.split("\n"),
        trainers.BpeTrainer(vocab_size=size, special_tokens=first, initial_alphabet=alphabet),
    )
    if (
        kind != "byte_level"
    ):  # training marks byte tokens as special, which published tokenizers do not
        content = json.loads(tokenizer.to_str())
        content["added_tokens"] = [
            token for token in content["added_tokens"] if token["id"] <= len(special)
        ]
        tokenizer = Tokenizer.from_str(json.dumps(content))
    named = {"bos_token": "<s>"} if kind != "byte_level" else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], **named)
    fast.add_tokens([AddedToken("<table>", normalized=False)])
    if kind != "llama":  # which puts a space behind any added token
        fast.add_tokens([AddedToken("\n\n", normalized=False)])
    else:
        from tokenizers.processors import TemplateProcessing

        fast.backend_tokenizer.post_processor = TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", 0)]
        )
    return fast


@pytest.fixture(scope="module")
def tokenizers():
    return {
        "byte_level": train_tokenizer("byte_level", PROSE * 3),
        "sentencepiece": train_tokenizer(
            "sentencepiece", CODE * 3, special=("<|end|>", "<|only|>")
        ),
        "llama": train_tokenizer("llama", (PROSE + CODE) * 2),
        "other": train_tokenizer("byte_level", CODE * 3, size=350),
    }


def pair_of(target, own, mode="tokens"):
    sides = [TokenBytes(each, len(each), "tiny") for each in (target, own)]
    return VocabularyPair(*sides, mode, torch.device("cpu"))


def model_of(tokenizer, seed=0, hidden=16):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3,
        hidden_size=hidden,
        intermediate_size=24,
        num_hidden_layers=1,
        bos_token_id=None,
        num_attention_heads=2,
        initializer_range=0.4,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def target_of(tokenizer, seed=0):
    return Target.wrap(model_of(tokenizer, seed), tokenizer, name="tiny", dtype=torch.float32)


def drafter_of(tokenizer, target, mode="auto", seed=1):
    drafter = DraftModel(
        model_of(tokenizer, seed), tokenizer, DraftModelConfig(vocabulary_match=mode), "small"
    ).eval()
    drafter.bind(target)
    return drafter


# -- tokens as bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "other"])
def test_tokens_are_their_bytes(tokenizers, kind):
    """The pieces of every encoding make up the text, byte for byte; and every byte has a token."""
    tokenizer = tokenizers[kind]
    side = TokenBytes(tokenizer, len(tokenizer) + 2, kind)
    for text in TEXTS if kind != "llama" else TEXTS[:5]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert side.text(ids).removeprefix(b" " * side.spaced) == text.encode(), text
    assert all((False, bytes([i])) in side.ids for i in range(256))
    assert side.spaced == (kind == "llama") and side.prefix == ([0] if kind == "llama" else [])
    assert (
        side.pieces[-1] == b""
        and side.pieces[tokenizer.convert_tokens_to_ids("<table>")] == b"<table>"
    )
    broken = "🙂".encode()[:3]
    assert (
        side.text(side.write(b"the " + broken)).removeprefix(b" " * side.spaced) == b"the " + broken
    )


def test_special_tokens_match_special_tokens_only(tokenizers):
    pair = pair_of(tokenizers["byte_level"], tokenizers["sentencepiece"])
    own = dict(zip(pair.kept_ids.tolist(), pair.own_ids.tolist(), strict=True))
    by_name = [tokenizers[kind].convert_tokens_to_ids for kind in ("byte_level", "sentencepiece")]
    assert own[by_name[0]("<|end|>")] == by_name[1]("<|end|>")
    assert own[by_name[0]("Ġ")] == by_name[1]("▁") and own[by_name[0]("A")] == by_name[1]("<0x41>")
    assert own[by_name[0]("Ĥ")] == by_name[1]("<0x82>"), "a part of a character"
    assert by_name[1]("<|only|>") not in own.values() and by_name[1]("<s>") not in own.values()
    text = tokenizers["byte_level"]
    text.add_tokens(["<s>"])  # the other one's BOS is text here
    again = pair_of(text, tokenizers["sentencepiece"])
    assert len(again.kept_ids) == len(pair.kept_ids) and len(set(own.values())) == len(own)
    pieces = zip(pair.kept_ids.tolist(), pair.own_ids.tolist(), strict=True)
    assert all(pair.target.pieces[a] == pair.own.pieces[b] for a, b in pieces)


def test_a_tokenizer_without_bytes_is_refused(tokenizers):
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    fast = PreTrainedTokenizerFast(tokenizer_object=words)
    with pytest.raises(
        UserError,
        match=r"the tokenizer of 'words' decodes by WordPiece; use one that is byte-level",
    ):
        TokenBytes(fast, 2, "words")


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_written_as_its_surroundings_ask(tokenizers, kind):
    side = TokenBytes(tokenizers[kind], len(tokenizers[kind]), kind)
    for before, data in (
        ("count the", " waves"),
        ("🙂 and", "🙂"),
        ("wat", "er was calm"),
        ("ships", ""),
        ("\n", "\nfor"),
    ):
        ids = side.write_behind(before.encode(), data.encode())
        assert side.text(ids) == data.encode()
        if before == "count the":
            assert [*side.write(before.encode()), *ids] == side.write((before + data).encode())


# -- committed text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "own"),
    [
        ("byte_level", "sentencepiece"),
        ("sentencepiece", "byte_level"),
        ("llama", "other"),
        ("byte_level", "llama"),
    ],
)
def test_committed_text_is_at_any_time_what_the_tokenizer_writes_at_once(tokenizers, target, own):
    pair = pair_of(tokenizers[target], tokenizers[own])
    draw = random.Random(0)
    ids = tokenizers[target]("\n".join(TEXTS) + PROSE)["input_ids"][:160]
    text = CommittedText(pair)
    done = 0
    while done < len(ids):
        count = draw.choice([1, 1, 2, 5])
        before = list(text.ids)
        kept = text.extend(ids[done : done + count])
        done += count
        begun = (
            len(pair.target.prefix) if ids[: len(pair.target.prefix)] == pair.target.prefix else 0
        )
        data = pair.target.text(ids[begun:done]).removeprefix(b" " * pair.target.spaced)
        assert bytes(text.data) == data
        assert text.ids == [*pair.own.prefix, *pair.own.write(data)]
        assert text.ids[:kept] == before[:kept] and (kept == len(before) or kept < len(text.ids))


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["tokens", "text"])
@pytest.mark.parametrize(
    ("theirs", "own"), [("byte_level", "sentencepiece"), ("llama", "byte_level")]
)
def test_rounds_leave_what_a_fresh_reading_gives(tokenizers, theirs, own, mode):
    target = target_of(tokenizers[theirs])
    drafter = drafter_of(tokenizers[own], target, mode)
    draw = random.Random(1)
    ids = torch.tensor(tokenizers[theirs](TEXTS[0] + TEXTS[3])["input_ids"])
    session = session_after(drafter, ids, pieces=3)
    for spec in ("chain:3", "fanout:3x2", "dynamic:3,3,8", "none", "chain:4", "dynamic:4,3,12"):
        tree = session.propose(TreeSpec.parse(spec))
        new = [*random_path(tree, draw), draw.randrange(len(tokenizers[theirs]))]
        session.extend(torch.tensor(new), torch.empty(len(new), 0))
        ids = torch.cat((ids, torch.tensor(new)))
        assert session.committed.ids == session_after(drafter, ids).committed.ids
        assert session.length == len(session.committed.ids)
        want = drafter.lm(torch.tensor([session.committed.ids])).logits[0, -1]
        torch.testing.assert_close(session.root[0], want, rtol=1e-4, atol=1e-4)


# -- drafts -----------------------------------------------------------------------------------------------------------


def test_drafts_by_tokens_are_the_shared_ones_with_the_restricted_distribution(tokenizers):
    target = target_of(tokenizers["byte_level"])
    drafter = drafter_of(tokenizers["sentencepiece"], target, "tokens")
    pair = drafter.pair
    ids = torch.tensor(tokenizers["byte_level"](PROSE)["input_ids"])
    session = session_after(drafter, ids)
    tree = session.propose(TreeSpec.parse("fanout:4x2"))
    logits = (
        drafter.lm(torch.tensor([session.committed.ids]))
        .logits[0, -1][pair.own_ids]
        .log_softmax(-1)
    )
    best = logits.topk(4)
    assert tree.tokens[:4].tolist() == pair.kept_ids[best.indices].tolist()
    torch.testing.assert_close(tree.log_probs[:4], best.values, rtol=1e-4, atol=1e-4)
    below = drafter.lm(
        torch.tensor([[*session.committed.ids, int(pair.own_ids[best.indices[0]])]])
    ).logits[0, -1]
    assert int(tree.tokens[4]) == int(pair.kept_ids[below[pair.own_ids].argmax()])


def test_drafts_by_text_are_what_the_targets_tokenizer_writes(tokenizers):
    """Two drafted paths with a common beginning: probabilities are those of the drafted tokens that complete the bytes."""
    pair = pair_of(tokenizers["byte_level"], tokenizers["sentencepiece"], "text")
    text = CommittedText(pair)
    text.extend(tokenizers["byte_level"](" count the")["input_ids"])
    waves, ships = (pair.own.write(words.encode()) for words in (" waves", " ships"))
    path = [*waves, *pair.own.write(b" and"), pair.own.ids[True, b"<|only|>"], *waves]
    tree = TokenTree(
        torch.tensor([*path, *ships]),
        [*range(-1, len(path) - 1), -1, *range(len(path), len(path) + len(ships) - 1)],
        torch.tensor([-0.1 * (i + 1) for i in range(len(path))] + [-2.0] * len(ships)),
    )
    made = text.rewrite(tree, TreeSpec.parse("dynamic:9,4,64"))
    written = [
        pair.target.write_behind(b" count the", words) for words in (b" waves and", b" ships")
    ]
    for ids in written:
        assert made.match(ids[:9]) == len(ids[:9])
    assert len(made) == len(
        {tuple(ids[:n]) for ids in written for n in range(1, 1 + min(9, len(ids)))}
    )
    node = -1
    first = pair.target.text(written[0][:1])
    node = next(
        i
        for i, (p, t) in enumerate(zip(made.parents, made.tokens, strict=True))
        if (p, t) == (-1, written[0][0])
    )
    needed = next(n for n in range(1, 9) if len(pair.own.text(waves[:n])) >= len(first))
    torch.testing.assert_close(made.log_probs[node], torch.tensor(-0.1 * needed))
    assert len(text.rewrite(tree, TreeSpec.parse("chain:2"))) == 2


def permuted(target, mode, eos="<|im_end|>"):
    """The target itself as a draft model whose ids are in another order. eos: the name of its EOS."""
    vocab = target.tokenizer.get_vocab()
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0)).tolist()
    content = json.loads(target.tokenizer.backend_tokenizer.to_str())
    content["model"]["vocab"] = {token: order[i] for token, i in vocab.items() if i < 256}
    for token in content["added_tokens"]:
        token["content"] = eos if token["content"] == "<|im_end|>" else token["content"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token=eos, pad_token=eos
    )
    lm = type(target.model)(target.config)
    state = {name: value.clone() for name, value in target.model.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name][torch.tensor(order)] = target.model.state_dict()[name][:256]
    lm.load_state_dict(state)
    drafter = DraftModel(lm.eval(), tokenizer, DraftModelConfig(vocabulary_match=mode), "permuted")
    drafter.bind(target)
    return drafter


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_the_target_itself_in_other_ids_is_right_as_far_as_its_choices_have_bytes(target, mode):
    """Bytes only, so every text is written in one way; tokens of several bytes would be written otherwise."""
    drafter = permuted(target, mode)
    assert len(drafter.pair.kept_ids) == 300 and not torch.equal(
        drafter.pair.kept_ids, drafter.pair.own_ids
    )
    done = generate(
        target, drafter, [5, 6, 7], max_new_tokens=25, spec=TreeSpec.parse("chain:3"), eos_ids=()
    )
    assert done.tokens == generate(target, None, [5, 6, 7], max_new_tokens=25, eos_ids=()).tokens
    assert done.stats.accepted_length > 3.4


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_the_end_of_an_answer_is_drafted_whatever_its_name(mode):
    """A drafter that is the target under another name of EOS drafts the target's EOS where the target writes it."""
    target = make_target()
    eos = target.tokenizer.eos_token_id
    target.model.lm_head.weight.data[eos] *= 6
    drafter = permuted(target, mode, eos="</s>")
    own = dict(zip(drafter.pair.kept_ids.tolist(), drafter.pair.own_ids.tolist(), strict=True))
    assert (
        own[eos] == drafter.tokenizer.eos_token_id and drafter.pair.own.pieces[own[eos]] == b"</s>"
    )
    prompt = [5, 6, 7]
    want = generate(target, None, prompt, max_new_tokens=25)
    done = generate(target, drafter, prompt, max_new_tokens=25, spec=TreeSpec.parse("chain:3"))
    assert done.tokens == want.tokens and want.tokens[-1] == eos and 3 < len(want.tokens) < 25
    assert done.stats.accepted[-1] > 0, (
        "the last round's tokens, EOS the last of them, were drafted"
    )


def test_names_that_another_token_has_already_are_left_alone(tokenizers):
    """EOS is paired only where neither side's equals another token by its bytes."""
    other = train_tokenizer("byte_level", CODE * 3, size=350, special=("<|stop|>", "<|end|>"))
    pair = pair_of(tokenizers["byte_level"], other)
    own = dict(zip(pair.kept_ids.tolist(), pair.own_ids.tolist(), strict=True))
    assert (
        own[tokenizers["byte_level"].eos_token_id]
        == other.convert_tokens_to_ids("<|end|>")
        != other.eos_token_id
    )
    assert other.eos_token_id not in own.values()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("theirs", "own", "mode"),
    [
        ("byte_level", "sentencepiece", "tokens"),
        ("byte_level", "sentencepiece", "text"),
        ("llama", "byte_level", "tokens"),
        ("other", "byte_level", "text"),
    ],
)
def test_greedy_decoding_is_lossless_alone_and_together(tokenizers, theirs, own, mode):
    target = target_of(tokenizers[theirs])
    drafter = drafter_of(tokenizers[own], target, mode)
    prompts = [tokenizers[theirs](text)["input_ids"] for text in TEXTS]
    plain = generate_batch(target, None, prompts, max_new_tokens=7, eos_ids=(), max_rows=7)
    done = generate_batch(
        target,
        drafter,
        prompts,
        max_new_tokens=7,
        spec=TreeSpec.parse("dynamic:3,3,8"),
        eos_ids=(),
        max_rows=4,
    )
    assert [each.tokens for each in done] == [each.tokens for each in plain]
    alone = generate(
        target, drafter, prompts[0], max_new_tokens=7, spec=TreeSpec.parse("fanout:3x2"), eos_ids=()
    )
    assert alone.tokens == plain[0].tokens
    if mode == "text":  # guesses by a rule: the same random numbers as plain decoding
        sampling = SamplingParams(temperature=1.0)
        plain, drafted = (
            generate(
                target, each, prompts[1], max_new_tokens=6, eos_ids=(), sampling=sampling, spec=spec
            )
            for each, spec in ((None, None), (drafter, TreeSpec.parse("chain:3@sample")))
        )
        assert plain.tokens == drafted.tokens


# -- choice, files, training ------------------------------------------------------------------------------------------


def test_the_choice_is_stated_with_the_overlap(tokenizers, caplog):
    caplog.set_level("INFO", "drafttrain")
    target = target_of(tokenizers["byte_level"])
    few = drafter_of(tokenizers["sentencepiece"], target)
    line = caplog.text
    assert (
        few.vocabulary is None
        and few.fit()["vocabulary"]["drafts_by"] == "text, drawn trees by tokens"
    )
    assert (
        f"drafts by text, drawn trees by tokens (vocabulary_match=auto): it shares {len(few.kept_ids)} of 'tiny'"
        in line
    )
    session = session_after(few, torch.tensor(tokenizers["byte_level"](PROSE)["input_ids"]))
    sampler = Sampler(SamplingParams(temperature=1.0), torch.Generator().manual_seed(0))
    drawn = session.propose(TreeSpec.parse("fanout:2x1@sample"), sampler)
    assert torch.equal(drawn.proposal.kept_ids, few.kept_ids) and set(drawn.tokens.tolist()) <= set(
        few.kept_ids.tolist()
    )
    q = few.lm(torch.tensor([session.committed.ids])).logits[0, -1][few.pair.own_ids].softmax(-1)
    torch.testing.assert_close(drawn.proposal.probs[0], q, rtol=1e-4, atol=1e-5)
    assert session.propose(TreeSpec.parse("fanout:2x1"), sampler).proposal is None
    many = permuted(make_target(), "auto")
    assert many.pair.way == "tokens" and torch.equal(many.vocabulary, many.pair.kept_ids)
    assert (
        many.fit()["vocabulary"]["shared_of_target"]
        == many.fit()["vocabulary"]["shared_of_text"]
        == 1.0
    )
    plain = DraftModel(make_target().model, make_tokenizer(), DraftModelConfig())
    caplog.clear()
    plain.bind(make_target())
    assert plain.pair is None and plain.fit() == {} and not caplog.text
    results = {"overall": {"acceptance_by_depth": {"conditional": [0.5]}}, **many.fit()}
    results["prompts"] = [{"covered": 0.5, "sides": {"drafter": {"tokens": 10}}}]
    assert "set vocabulary_match: text" in diagnose_vocabulary(results)["advice"]
    nothing = Tokenizer(models.BPE({"☃": 0}, []))
    nothing.decoder = decoders.Metaspace()
    with pytest.raises(
        UserError,
        match=r"vocabulary_match=tokens, but the two vocabularies share no token; use text",
    ):
        drafter_of(
            PreTrainedTokenizerFast(tokenizer_object=nothing, eos_token="☃"), target, "tokens"
        )


@pytest.mark.thorough
def test_a_folder_drafts_and_is_exported_with_both_tokenizers(tokenizers, tmp_path):
    target = target_of(tokenizers["byte_level"])
    drafter = drafter_of(tokenizers["sentencepiece"], target, "tokens")
    drafter.config.target = target.identity()
    drafter.save_pretrained(tmp_path)
    again = load_drafter(str(tmp_path), target)
    assert again.pair.way == "tokens", "vocabulary_match is recorded in drafttrain.json"
    prompt = tokenizers["byte_level"](PROSE)["input_ids"]
    want = generate(target, None, prompt, max_new_tokens=6, eos_ids=()).tokens
    for drafting in (again, load_drafter(f"{tmp_path}+ngram", target)):
        spec = TreeSpec.parse("dynamic:3,3,8")
        assert (
            generate(target, drafting, prompt, max_new_tokens=6, spec=spec, eos_ids=()).tokens
            == want
        )
    other = load_drafter(f"{tmp_path}:vocabulary_match=text+ngram", target)
    assert other.main.pair.way == "text" and split_name(f"{tmp_path}:vocabulary_match=text+ngram")[
        0
    ] == str(tmp_path)
    for more, message in (
        (
            "vocabulary_match=words",
            "drafter.vocabulary_match='words' must be one of auto, tokens, text",
        ),
        ("layers=1", "'layers' is not an option of a draft_model; there are vocabulary_match"),
    ):
        with pytest.raises(UserError, match=message):
            load_drafter(f"{tmp_path}:{more}", target)
    with pytest.raises(UserError, match="no such folder"):
        find_drafter(f"{tmp_path}:vocabulary_match=text")
    trained = find_drafter(str(tmp_path))
    kind = shipping(trained.kind)
    assert not kind.shares_vocabulary(trained, target)
    assert kind.options(trained)["vLLM"] == {
        "method": "draft_model",
        "use_heterogeneous_vocab": True,
    }
    assert kind.options(trained)["transformers"]
    for form, named in (("sglang", "SGLang"), ("gguf", "llama.cpp")):
        (reason,) = kind.unsupported(trained, form)
        assert "another vocabulary" in reason and named in reason
    assert not kind.unsupported(trained, "vllm") and not kind.unsupported(trained, "transformers")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a/b", ("a/b", {})),
        ("a/b:vocabulary_match=text", ("a/b", {"vocabulary_match": "text"})),
        ("a/b:x=1,y=+ngram:max_match=3", ("a/b", {"x": "1", "y": ""})),
        ("runs+more/b+ngram_store:c.safetensors", ("runs+more/b", {})),
        ("http://a/b=c", ("http://a/b=c", {})),
    ],
)
def test_a_name_is_a_place_and_options(name, found):
    assert split_name(name) == found


def test_training_is_the_divergence_over_shared_tokens_where_both_tokens_end(tokenizers):
    """Against two transformers forwards over each conversation's own tokens."""
    target = target_of(tokenizers["byte_level"])
    drafter = drafter_of(tokenizers["other"], target, "tokens")
    pair = drafter.pair
    batch = make_batch((17, 11))
    for row, (text, length) in enumerate(zip((PROSE, CODE), (17, 11), strict=True)):
        batch.input_ids[row, :length] = torch.tensor(
            tokenizers["byte_level"](text)["input_ids"][:length]
        )
    source = TargetSource(target, (), drafter.kept_ids)
    features, rows, row_of = source(batch)
    inputs = StepInputs(batch, target.embed(batch.input_ids), features, rows, row_of, 10)
    step = drafter(inputs)
    step.loss.backward()
    total = torch.zeros(())
    count = 0
    for row, length in enumerate((17, 11)):
        ids = batch.input_ids[row, :length]
        mask = batch.response_mask[row, :length]
        own = pair.own.write(pair.target.text(ids.tolist()))
        p = target.model(ids[None]).logits[0]
        q = drafter.lm(torch.tensor([own])).logits[0]
        for t in (mask[:-1] & mask[1:]).nonzero().flatten().tolist():
            end = len(pair.target.text(ids[: t + 1].tolist()))
            found = [j for j in range(len(own)) if len(pair.own.text(own[: j + 1])) == end]
            if found:
                log_p = p[t][pair.kept_ids].log_softmax(-1)
                log_q = q[found[0]][pair.own_ids].log_softmax(-1)
                total = total + (log_p.exp() * (log_p - log_q)).sum()
                count = count + 1
    assert int(step.metrics["count"][0]) == count > 5
    torch.testing.assert_close(step.loss, total / 10, rtol=1e-4, atol=1e-5)
    assert drafter.lm.lm_head.weight.grad.abs().sum() > 0
    with pytest.raises(
        UserError,
        match=r"loss=next_token: 'small' has another vocabulary than the target.*set loss=kl",
    ):
        drafter(StepInputs(batch, inputs.embeds, *NoTarget()(batch), 10))
    with pytest.raises(
        UserError, match=r"on_policy: 'small' has another vocabulary than the target"
    ):
        drafter.as_target()
