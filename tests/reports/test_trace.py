from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from drafttrain import cli
from drafttrain.drafters.combined import CombinedDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.reports.trace import page, pieces_of, print_trace, record
from tests.inference.fakes import FakeDrafter
from tests.reports.html_page import Page

PROMPT = [65, 66, 67, 65, 66]
TOKENS = 40


@pytest.fixture
def plain(target):
    return Decoder(target, None).generate([PROMPT], max_new_tokens=TOKENS)[0].tokens


@pytest.fixture
def traced(target, plain):
    drafter = FakeDrafter(plain, agree=0.8, vocab=300, seed=3)
    return record(
        Decoder(target, drafter, spec=TreeSpec.parse("dynamic:4,4,8")),
        PROMPT,
        max_new_tokens=TOKENS,
    )


def test_every_token_has_its_producer(traced, plain, target):
    stats = traced.stats
    assert len(traced.pieces) == len(plain) == stats.new_tokens
    assert "".join(piece.text for piece in traced.pieces) == target.tokenizer.decode(plain)
    assert len(traced.rounds) == stats.target_passes
    assert traced.drafted == sum(stats.accepted) == sum(one.accepted for one in traced.rounds) > 5
    assert [one.depth for one in traced.rounds] == stats.offered
    # What the rounds committed, one after the other, is the answer; within a round depths count up and the own token ends it.
    assert [token for one in traced.rounds for token in one.tokens] == plain[1:]
    for one in traced.rounds:
        depths = [piece.depth for piece in traced.pieces if piece.round == one.number]
        assert depths == [*range(1, one.accepted + 1), 0]
        assert [node for node, each in enumerate(one.nodes) if each.accepted] == one.path


def test_tokens_without_text_of_their_own_keep_their_place(target, plain, monkeypatch):
    monkeypatch.setattr("drafttrain.reports.trace.decode", lambda *_: "")
    pieces = record(Decoder(target, None), PROMPT, max_new_tokens=TOKENS).pieces
    assert "".join(piece.text for piece in pieces) == target.tokenizer.decode(plain)


def test_probabilities_are_the_targets(target, traced, plain):
    """Greedily, what was accepted and the own token are the target's likeliest; checked against a forward of its own."""
    done = 1
    for one in traced.rounds:
        ids = torch.tensor([PROMPT + plain[: done + one.accepted]])
        logits = target.model(ids).logits[0].softmax(-1)
        assert one.own_target == pytest.approx(float(logits[-1].max()), abs=1e-4)
        for depth, node in enumerate(one.path):
            row = logits[len(PROMPT) + done - 1 + depth]
            assert one.nodes[node].target == pytest.approx(float(row.max()), abs=1e-4)
        done += len(one.tokens)


def test_drafters_without_probabilities_say_none(traced):
    assert all(node.draft is None for one in traced.rounds for node in one.nodes)


def test_sampled_probabilities_are_those_that_were_drawn_from(target):
    decoder = Decoder(target, None, sampling=SamplingParams(temperature=1.0, top_k=1))
    assert {one.own_target for one in record(decoder, PROMPT, max_new_tokens=6).rounds} == {1.0}
    assert decoder.observer is None


def test_eos_ends_a_path_without_an_own_token(target, plain):
    drafter = FakeDrafter(plain, agree=1.0, vocab=300, seed=1)
    for end in range(4, 20):
        decoder = Decoder(target, drafter, spec=TreeSpec.parse("chain:4"), eos_ids=[plain[end]])
        trace = record(decoder, PROMPT, max_new_tokens=TOKENS)
        last = trace.rounds[-1]
        if len(last.tokens) == last.accepted:
            assert last.own == ""
            trace.rounds[:] = [last]
            assert 'class="box own' not in page(trace, "", {"drafter": "fake"}, 1)
            return
    pytest.fail("no path ended in EOS, so the test shows nothing")


def test_characters_that_span_tokens(tokenizer):
    text = "aé€\N{GRINNING FACE}b" * 12
    ids = tokenizer(text).input_ids
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    assert pieces[:3] == ["a", "", "é"]
    assert pieces_of(tokenizer, ids[:2])[-1] == "\N{REPLACEMENT CHARACTER}"


def test_the_page_draws_every_node_once(traced):
    source = page(traced, "", {"drafter": "fake"}, traced.best())
    kinds = ("root", "own", "accepted", "rejected")
    drawn = [len(one.nodes) for one in traced.rounds if one.nodes]
    rejected = sum(drawn) - traced.drafted
    counts = [source.count(f'class="box {kind}') for kind in kinds]
    assert counts == [len(drawn), len(drawn), traced.drafted, rejected] and rejected > 0


def test_terminal_colours_follow_depth(traced):
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200)
    print_trace(traced, traced.best(), console)
    shown = console.file.getvalue()
    assert "48;2;207;232;255" in shown, "the background of depth 1"
    assert f"{traced.drafted} tokens by the drafter" in shown
    best = traced.rounds[traced.best() - 1]
    assert f"round {best.number}, after" in shown
    assert "the target's own" in shown


def test_tokens_of_matches_are_colored_apart(target, plain):
    """Next to a drafter that is always wrong, only matches are accepted; a repeating answer has many."""
    prompt = [65, 66, 67] * 4
    wrong = FakeDrafter(plain, agree=0.0, vocab=300, seed=3)
    decoder = Decoder(
        target, CombinedDrafter(wrong, NgramDrafter()), spec=TreeSpec.parse("dynamic:4,4,8")
    )
    trace = record(decoder, prompt, max_new_tokens=TOKENS)
    for one in trace.rounds:
        pieces = [piece for piece in trace.pieces if piece.round == one.number]
        assert [piece.match for piece in pieces][: one.accepted] == [
            one.nodes[node].match for node in one.path
        ]
    assert trace.matched > 0 and trace.matched == sum(piece.match for piece in trace.pieces)
    source = page(trace, "repeat", {"drafter": "fake+ngram"}, trace.best())
    assert source.count('class="m"') == trace.matched and "from a match alone" in source
    matches = sum(node.match for one in trace.rounds for node in one.nodes)
    assert source.count(' match"><b>') == matches > 0


def test_the_page_stands_alone(traced):
    source = page(traced, "say <b>", {"drafter": "fake", "target": "tiny"}, traced.best())
    parsed = Page(source)
    assert all(link.startswith(("#", "data:")) for link in parsed.links)
    assert {link[1:] for link in parsed.links if link.startswith("#")} <= set(parsed.ids)
    assert "say &lt;b&gt;" in source
    assert source.count('class="round chosen"') == 1
    assert source.count('<section class="round') == len(traced.rounds)


@pytest.mark.thorough
def test_command(target_dir, tmp_path, capsys):
    output = tmp_path / "trace.html"
    base = [
        "trace",
        "--target",
        str(target_dir),
        "--drafter",
        "ngram",
        "--prompt",
        "abcabcabc",
        "--max-new-tokens",
        "24",
    ]
    assert cli.main([*base, "--dtype", "float32", "--output", str(output)]) == 0
    assert "accepted length" in capsys.readouterr().out
    Page(output.read_text())
    for extra, message in (
        (["--round", "99"], "rounds 1 to"),
        (["--output", "x.pdf"], "must be .html"),
        (["--chat-template-kwargs", '{"foo": 1}'], "'foo' is not a variable of the chat template"),
    ):
        assert cli.main([*base, *extra]) == 2
        assert message in capsys.readouterr().err
