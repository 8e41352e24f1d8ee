"""Replays are compared with real decoding, costs and predictions with numbers made up here; nothing depends on a clock."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drafttrain import cli
from drafttrain.batch import TokenTree
from drafttrain.data.chat import decode
from drafttrain.drafters.combined import CombinedDrafter
from drafttrain.drafters.common.static_draft import DraftSteps
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.drafters.registry import decoding_settings, load_drafter
from drafttrain.errors import UserError
from drafttrain.evaluation.metrics import summarize
from drafttrain.evaluation.verdicts import judge, verdict_of
from drafttrain.files import write_jsonl
from drafttrain.inference import Decoder, SamplingParams, static
from drafttrain.tuning import replay as costs_module
from drafttrain.tuning import tune as tuning
from drafttrain.tuning.replay import (
    CostModel,
    Replayed,
    Track,
    _Recorded,
    chances,
    recall,
    record,
    replay,
)
from tests.conftest import make_target
from tests.data.tool_templates import TEMPLATE, tokenizer_with
from tests.drafters.helpers import make_drafter
from tests.evaluation.records import record as record_of
from tests.evaluation.records import side
from tests.files import load_json

PROMPTS = [[5, 9, 11, 9, 11, 30, 2, 9, 11, 4, 44, 9], [7, 8, 7, 8, 9, 7]]
COUNT = 20
TREES = (
    "chain:6",
    "chain:4@nomatch",
    "dynamic:1,4,3",
    "dynamic:3,8,12@alone=0.5",
    "dynamic:2,4,3@match=63",
    "chain:2@match=11",
)
STOPPED = (
    "chain:6@stop=0.3",
    "dynamic:5,4,16@stop=0.1@nomatch",
    "dynamic:5,4,16@cut=0.004",
    "dynamic:6,8,48@stop=0.1@cut=0.02@match=11",
)


@pytest.fixture(scope="module")
def target():
    return make_target(layers=4, hidden=16, initializer_range=0.1)


def drafters(target):
    head = make_drafter(target)
    return {
        "eagle3": head,
        "ngram": NgramDrafter(),
        "eagle3+ngram": CombinedDrafter(head, NgramDrafter(min_n=2)),
    }


GREEDY = SamplingParams()
HOT = SamplingParams(0.7, 20)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "sampling", "trees"),
    [
        ("eagle3", GREEDY, ("none", "chain:6", "dynamic:1,4,3", "dynamic:6,8,48", STOPPED[0])),
        ("ngram", GREEDY, ("chain:6", "dynamic:3,4,8")),
        ("eagle3+ngram", GREEDY, (*TREES, *STOPPED)),
        (
            "eagle3+ngram",
            HOT,
            ("chain:4@nomatch", "dynamic:3,8,12@alone=0.5", "dynamic:2,4,3@match=11", STOPPED[1]),
        ),
    ],
)
def test_a_replay_is_what_decoding_does(target, kind, sampling, trees):
    drafter = drafters(target)[kind]
    tracks = record(target, drafter, PROMPTS, sampling, COUNT)
    accepted = 0
    for tree in trees:
        spec = TreeSpec.parse(tree)
        decoder = Decoder(target, drafter, spec=spec, sampling=sampling)
        sizes = []
        decoder.observer = lambda _index, tree, *_, sizes=sizes: sizes.append(len(tree))
        for number, (prompt, track) in enumerate(zip(PROMPTS, tracks, strict=True)):
            sizes.clear()
            made = decoder.generate([prompt], max_new_tokens=COUNT, seed=number)[0]
            assert made.tokens == track.tokens
            rounds = replay(track, spec)
            assert [done.nodes for done in rounds] == sizes, tree
            assert sum(done.committed for done in rounds) == len(made.tokens) - 1
            # Where EOS ends an accepted path there is no bonus token.
            assert [done.committed - 1 for done in rounds][:-1] == made.stats.accepted[:-1], tree
            accepted += sum(made.stats.accepted)
    assert accepted > 5


def track_of(tree: TokenTree, tokens) -> Track:
    trees = [{1: _Recorded(tree), 8: _Recorded(tree)}] + [
        {1: _Recorded(TokenTree.empty()), 8: _Recorded(TokenTree.empty())}
    ] * 9
    return Track(3, 10, tokens, trees, [{k: _Recorded(TokenTree.empty()) for k in (1, 8)}] * 10)


def test_recall_and_chances_by_hand():
    # root -> 5 (likelier), 6;  6 -> 7
    tree = TokenTree(torch.tensor([5, 6, 7]), [-1, -1, 1], torch.tensor([-0.1, -0.5, -0.9]))
    track = track_of(tree, [1, 6, 8])
    got = recall([track], tops=(1, 2))
    assert got["1"][:2] == [0.0, 0.0]
    assert got["2"][:2] == [0.5, 0.0]  # two positions at depth 1, one of them with an empty tree
    assert chances([track])[0] == 0.5


MODEL = CostModel(
    {0: 1.0, 4: 1.2, 8: 2.0}, {(1, 1): 0.1, (1, 3): 0.5}, match=0.01, read=0.03, around=0.02
)


@pytest.mark.parametrize(
    ("tree", "nodes", "depth", "seconds"),
    [
        ("none", 0, 0, 1.0),
        ("chain:2@nomatch", 2, 2, 1.1 + 0.3 + 0.03 + 0.02),
        ("chain:2", 2, 2, 1.1 + 0.3 + 0.03 + 0.02 + 0.01),
        ("chain:2", 6, 0, 1.6 + 0.03 + 0.02 + 0.01),  # a match, nothing drafted
        ("chain:2@nomatch", 12, 1, 2.8 + 0.1 + 0.03 + 0.02),
    ],
)
def test_a_round_costs_its_parts(tree, nodes, depth, seconds):
    assert MODEL.round(TreeSpec.parse(tree), nodes, depth) == pytest.approx(seconds)


def test_predictions_add_up_rounds(monkeypatch):
    rounds = [Replayed(3, 2, 2), Replayed(1, 2, 2), Replayed(1, 0, 0)]
    monkeypatch.setattr(tuning, "replay", lambda track, spec: rounds)
    got = tuning.predict(TreeSpec.parse("chain:2@nomatch"), [Track(100, 8)], MODEL)
    assert got.tokens_per_second == pytest.approx(5 / (2 * 1.45 + 1.0))
    assert got.accepted_length == pytest.approx(5 / 3)


def test_costs_are_medians_by_size_and_depth(target, monkeypatch):
    """A clock that ticks by what was asked: 1 s a call, so that parts can be told from each other."""
    drafter = drafters(target)["eagle3+ngram"]
    monkeypatch.setattr(costs_module, "WARM_UP", 0)
    model = costs_module.measure_costs(target, drafter, PROMPTS, SamplingParams(), 24, cycles=2)
    assert set(model.verify) == {0, *costs_module.NODES}
    assert set(model.draft) == {(k, d) for k in (1, 4, 8) for d in costs_module.DEPTHS}
    assert all(
        seconds > 0 for seconds in (*model.verify.values(), *model.draft.values(), model.read)
    )
    table = model.table()
    assert table["verification_ms"]["8"] == round(1000 * model.verify[8], 3)
    assert table["drafting_ms"]["4"]["3"] == round(1000 * model.draft[4, 3], 3)


def test_costs_are_measured_with_the_static_steps_of_decoding(target, monkeypatch):
    """Drafting launch by launch costs more than the graphs that decoding replays."""
    monkeypatch.setattr(static, "_serves", lambda device: True)
    drafter = drafters(target)["eagle3"]
    served = []
    propose = DraftSteps.propose

    def counted(steps, sessions, spec, samplers):
        trees = propose(steps, sessions, spec, samplers)
        served.append(trees is not None)
        return trees

    monkeypatch.setattr(DraftSteps, "propose", counted)
    monkeypatch.setattr(costs_module, "WARM_UP", 0)
    costs_module.measure_costs(target, drafter, PROMPTS, SamplingParams(), 24, cycles=1)
    assert served and all(served)


def test_candidates_fit_their_drafter(target):
    costs = CostModel({0: 1.0, 1: 1.0, 8: 1.4, 15: 1.49, 31: 2.2, 63: 4.0}, {})
    every = {
        kind: set(map(str, tuning.candidates(drafter, costs)))
        for kind, drafter in drafters(target).items()
    }
    assert "none" in every["ngram"]
    assert not any(
        "@" in tree for tree in every["ngram"]
    )  # it knows no probabilities and has nothing to merge
    assert {"chain:3@stop=0.3", "dynamic:3,8,15"} <= every["eagle3"]
    assert not any("match" in tree for tree in every["eagle3"])
    assert {
        "chain:2@nomatch",
        "dynamic:3,8,15@alone=0.5@match=15",
        "chain:2@match=31",
    } <= every["eagle3+ngram"]


def tune_command(target_dir, drafter, tmp_path, *more):
    return ["tune", "--target", str(target_dir), "--drafter", str(drafter), "--dtype", "float32", "--prompts", "4",
            "--max-new-tokens", "16", "--repeats", "1", "--output", str(tmp_path / "tune.json"), *more]  # fmt: skip


@pytest.mark.thorough
def test_tune_writes_the_drafters_default(target_dir, target, tmp_path, capsys, monkeypatch):
    from drafttrain.target import Target

    own = Target.load(str(target_dir), "float32", "cpu")
    make_drafter(own).save_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter" / "decoding.json").write_text('{"tree": "chain:1", "off": ["poetry"]}')
    monkeypatch.setattr(tuning, "TuneSettings", partial(tuning.TuneSettings, cycles=1))
    # The pick is a tree whatever the machine does.
    monkeypatch.setattr(
        tuning,
        "candidates",
        lambda *_: [
            TreeSpec.parse(t) for t in ("none", "chain:2", "chain:3@nomatch", "dynamic:2,4,8")
        ],
    )
    monkeypatch.setattr(
        tuning.CostModel,
        "round",
        lambda self, spec, nodes, depth: 1.0 if spec.shape == "none" else 0.5,
    )
    sides = np.array(
        [[2.0, 2.2] * 2, [1.0, 1.1] * 2, [0.8, 0.9] * 2]
    )  # each faster than the one before

    def measured(target, drafter, specs, *_):
        decoding = sides[: len(specs)]
        return tuning.Timings(np.full((len(specs), 4), 15.0), decoding, decoding + 1.0)

    monkeypatch.setattr(tuning, "measure", measured)
    assert cli.main(tune_command(target_dir, f"{tmp_path / 'drafter'}+ngram", tmp_path)) == 0
    result = load_json(tmp_path / "tune.json")
    assert {
        "predicted_speedup",
        "measured_speedup",
        "adaptive_speedup",
        "costs",
        "acceptance",
        "device",
    } <= result.keys()
    assert result["tree"] == result["picked"] + "@adapt"
    assert result["relative_error"] == pytest.approx(
        result["predicted_speedup"] / result["measured_speedup"] - 1, rel=1e-2
    )
    settings = decoding_settings(str(tmp_path / "drafter"))
    assert settings["tree"] == result["tree"]
    assert settings["off"] == ["poetry"]
    assert settings["chain"] == "chain:3"  # for engines that know no matches
    assert settings["tuned"]["predicted_speedup"] == result["predicted_speedup"]
    assert "predicted" in capsys.readouterr().out


def timings(*seconds):
    """Plain, fixed and adaptive seconds of six prompts of very different length."""
    prompts = np.array([1.0, 2.0, 8.0, 3.0, 30.0, 5.0])
    decoding = np.array([np.asarray(side) * prompts for side in seconds])
    return tuning.Timings(np.full((3, 6), 63.0), decoding, decoding + prompts)


NOISE = np.array([1.03, 0.96, 1.02, 0.97, 1.01, 1.02])


@pytest.mark.parametrize(
    ("sides", "kept"),
    [
        ((1.0, 0.6, 0.5), 2),  # a fifth faster on every prompt
        ((1.0, 0.6, 0.6 * NOISE), 1),  # noise decides nothing
        ((1.0, 0.6, 0.6 / NOISE), 1),
        ((1.0, 0.6, 0.66), 1),
        ((1.0, 1.0 * NOISE, 1.2), 1),  # about as fast as plain decoding: the prediction stands
        ((1.0, 3.0, 3.3), 0),
        ((1.0, 1.4, 1.1), 0),
    ],
)
def test_what_is_kept_is_better_beyond_noise(sides, kept):
    assert tuning.keep(timings(*sides)) == kept


TREES_BY_EFFORT = [
    TreeSpec.parse(t)
    for t in ("dynamic:3,4,8@stop=0.1@match=15", "dynamic:3,4,8", "chain:2@nomatch")
]


@pytest.mark.parametrize(
    ("sides", "kept"),
    [
        ((0.5, 0.6, 0.7), 0),  # far faster
        ((0.6, 0.6 * NOISE, 0.7), 1),  # noise decides nothing: no options
        ((0.6 / NOISE, 0.6, 0.7), 1),
        ((0.6, 0.61, 0.7), 0),  # by less than the tie, but on every prompt
        ((0.6 * NOISE, 0.64, 0.7), 0),  # too much to lose
        ((0.6 * NOISE, 0.6 / NOISE, 0.6), 1),
    ],
)
def test_the_simplest_of_equally_fast_trees_is_picked(sides, kept):
    assert tuning.simplest(timings(*sides), TREES_BY_EFFORT) == kept


def test_finalists_differ_in_what_they_accept():
    def made(tree, rate, length):
        return tuning.Prediction(TreeSpec.parse(tree), rate, length, 100 / rate)

    ranking = [
        made("chain:3", 100, 2.0),
        made("chain:4", 99, 2.02),
        made("dynamic:3,4,8", 98, 2.2),
        made("none", 95, 1.0),
    ]
    ranking += [made("chain:2", 94, 1.8), made("chain:1", 80, 1.5)]
    search = tuning.Search([], MODEL, ranking)
    assert list(map(str, search.finalists())) == ["chain:3", "dynamic:3,4,8", "chain:2"]


def test_trees_without_matches_are_for_engines_alone():
    """Calibration texts are short; longer ones repeat more."""

    def made(tree, rate):
        return tuning.Prediction(TreeSpec.parse(tree), rate, rate / 50, 100 / rate)

    ranking = [
        made("chain:4@nomatch", 120),
        made("dynamic:3,4,8", 100),
        made("chain:3@nomatch", 90),
    ]
    search = tuning.Search([], MODEL, [*ranking, made("none", 50)])
    assert str(search.best.spec) == "dynamic:3,4,8"
    assert list(map(str, search.finalists())) == ["dynamic:3,4,8"]
    assert str(search.chain.spec) == "chain:4@nomatch"
    assert [row["tree"] for row in search.table()] == ["dynamic:3,4,8", "none"]
    trees = tuning.candidates(CombinedDrafter(make_drafter(make_target()), NgramDrafter()), MODEL)
    assert {tree.shape for tree in trees if not tree.matches} == {"chain"}


def test_of_equal_predictions_the_simpler_tree_comes_first(monkeypatch, target):
    rates = {"none": 50.0, "chain:2": 99.5, "dynamic:2,4,4@stop=0.1": 100.0, "dynamic:2,4,4": 97.0}
    monkeypatch.setattr(tuning, "record", lambda *_: [])
    monkeypatch.setattr(tuning, "measure_costs", lambda *_: MODEL)
    monkeypatch.setattr(tuning, "candidates", lambda *_: list(map(TreeSpec.parse, rates)))
    monkeypatch.setattr(
        tuning, "predict", lambda spec, *_: tuning.Prediction(spec, rates[str(spec)], 2.0, 1.0)
    )
    ranking = tuning.search_tree(target, NgramDrafter(), PROMPTS, tuning.TuneSettings()).ranking
    assert [str(each.spec) for each in ranking] == [
        "chain:2",
        "dynamic:2,4,4@stop=0.1",
        "dynamic:2,4,4",
        "none",
    ]


def test_paired_intervals_cancel_what_prompts_differ_in():
    measured = timings(1.0, 0.5, 0.5 * NOISE)
    ratio = measured.ratio(2, 1)
    assert ratio.low <= ratio.value <= ratio.high and 0.95 < ratio.low < 1 < ratio.high < 1.05
    assert measured.ratio(1, 0) == pytest.approx((2, 2, 2))
    # A prompt's pass as long as its plain answer: 1 + 1 over 1 + 0.5.
    assert measured.whole.ratio(1, 0) == pytest.approx((4 / 3, 4 / 3, 4 / 3))


REQUESTS = {
    "predicted_request_speedup": 1.02,
    "measured_request_speedup": 0.4,
    "prompt_tokens": 57.2,
    "max_new_tokens": 64,
}


def test_the_verdict_says_what_parts():
    result = {
        "picked": "chain:3",
        "tree": "chain:3",
        **REQUESTS,
        "predicted_speedup": 1.03,
        "measured_speedup": 0.31,
        "relative_error": 2.3,
        "adaptive_speedup": 1.8,
        "intervals": {
            "measured_speedup": [0.2, 1.1],
            "measured_request_speedup": [0.3, 1.0],
            "adaptive_speedup": [1.5, 2.0],
            "adaptive_over_fixed": [0.9, 1.2],
        },
        "prompts": 6,
    }
    text = tuning.verdict(result)
    assert "prompts of 57 tokens and answers of 64: predicted 1.02x, measured 0.40x" in text
    assert "measured 0.31x [0.20, 1.10]" in text and "inconclusive: 6 prompts are too few" in text
    assert "prediction and measurement part" not in text, "the interval holds the prediction"
    assert "1.80x as fast as plain decoding" in tuning.verdict(
        {**result, "tree": "chain:3@adapt"}
    ), "of the tree that is kept"
    result["intervals"]["measured_speedup"] = [0.2, 0.4]
    assert "part by +230%, beyond the interval: trust the measurement" in tuning.verdict(result)
    assert "do not use this drafter" in tuning.verdict({**result, "tree": "none"})


def test_the_table_holds_the_picked_tree_and_is_sorted(monkeypatch, target, capsys):
    """The contest may pick a tree behind the twelve that were predicted fastest."""
    rates = {f"chain:{depth}": 100.0 + depth for depth in range(1, 15)}
    rates |= {"none": 90.0, "dynamic:2,4,4": 95.0}
    made = [
        tuning.Prediction(TreeSpec.parse(tree), rate, 2.0, 100 / rate)
        for tree, rate in rates.items()
    ]
    picked = made[-1]
    monkeypatch.setattr(tuning, "search_tree", lambda *_: tuning.Search([], MODEL, made))
    monkeypatch.setattr(tuning, "costs_here", lambda *_: MODEL)
    monkeypatch.setattr(tuning.Search, "priced", lambda search, costs: search)
    monkeypatch.setattr(tuning.Search, "finalists", lambda self: [made[0].spec, picked.spec])
    monkeypatch.setattr(tuning, "simplest", lambda *_: 1)
    monkeypatch.setattr(
        tuning,
        "measure",
        lambda target, drafter, specs, *_: timings(*[1.0, 0.6, 0.6][: len(specs)]),
    )
    result = tuning.tune(target, NgramDrafter(), PROMPTS, tuning.TuneSettings())
    shown = [row["predicted_speedup"] for row in result["candidates"]]
    assert shown == sorted(shown, reverse=True)
    assert result["picked"] == "dynamic:2,4,4"
    assert [row["tree"] for row in result["candidates"]].count("dynamic:2,4,4") == 1
    tuning.print_result(result)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "picked" in line]
    assert "dynamic:2,4,4" in line


def test_the_prediction_takes_the_costs_around_the_check(monkeypatch, target):
    """Rounds with trees become dearer while trees are measured; plain decoding does not."""
    drafter = NgramDrafter()
    settings = tuning.TuneSettings(tokens=16, repeats=1)
    before = CostModel({0: 1.0, 1: 0.5, 8: 0.6}, {(1, 1): 0.1, (4, 1): 0.1, (8, 1): 0.1})
    after = replace(before, verify={0: 1.0, 1: 1.5, 8: 1.8})
    measured = iter((before, after))
    monkeypatch.setattr(tuning, "measure_costs", lambda *_: next(measured))
    prompts = [[5, 9, 11, 9, 11, 9, 11]]
    result = tuning.tune(target, drafter, prompts, settings)
    assert next(measured, None) is None, "costs are measured twice"
    assert result["costs"]["verification_ms"] == {"0": 1000.0, "1": 1000.0, "8": 1200.0}
    tracks = record(target, drafter, prompts, settings.sampling, settings.tokens)
    mean = replace(before, verify={0: 1.0, 1: 1.0, 8: 1.2})
    tree = tuning.predict(TreeSpec.parse(result["picked"]), tracks, mean)
    plain = tuning.predict(TreeSpec.parse("none"), tracks, mean)
    expected = tree.tokens_per_second / plain.tokens_per_second
    assert result["predicted_speedup"] == pytest.approx(expected, abs=1e-3)
    (row,) = [row for row in result["candidates"] if row["tree"] == result["picked"]]
    assert row["predicted_speedup"] == result["predicted_speedup"]


def test_two_measurements_of_costs_are_averaged_part_by_part():
    one = CostModel({0: 1.0, 4: 2.0}, {(4, 1): 0.2}, 0.1, 0.2, 0.3, 0.4, 0.5)
    two = CostModel({0: 3.0, 4: 2.0}, {(4, 1): 0.4}, 0.3, 0.4, 0.5, 0.6, 0.7)
    mean = one.averaged(two)
    assert mean.verify == {0: 2.0, 4: 2.0}
    assert mean.draft == {(4, 1): pytest.approx(0.3)}
    rest = (mean.match, mean.read, mean.read_prompt, mean.around, mean.prompt)
    assert rest == pytest.approx((0.2, 0.3, 0.4, 0.5, 0.6))
    # A size that one of them lacks is left out.
    assert CostModel({**one.verify, 63: 9.0}, one.draft).averaged(two).verify == mean.verify


def test_more_prompts_than_six_are_taken_from_a_file(target, tmp_path):
    file = tmp_path / "prompts.jsonl"
    write_jsonl(file, [{"text": f"question {number}"} for number in range(9)])
    assert len(tuning.calibration_prompts(target, str(file), {}, count=8)) == 8
    assert len(tuning.calibration_prompts(target, None, {}, count=8)) == 6
    with pytest.raises(
        UserError, match=r"^calibrate='built-in prompts' has no usable row: .* 9999 "
    ):
        tuning.calibration_prompts(target, None, {}, tokens=9999)


def test_rows_that_no_prompt_comes_of_are_left_out(seeing, tmp_path):
    target = seeing.load()
    image = {"type": "image", "image": "data:image/png;base64,AA"}
    parts = [{"type": "text", "text": "what is it"}]
    rows = [
        {"messages": [{"role": "user", "content": [image, *parts]}]},
        {"messages": [{"role": "user", "content": parts}]},
        {"text": "<image> q", "image": "x.png"},
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    file = str(tmp_path / "rows.jsonl")
    (ids,) = tuning.calibration_prompts(target, file, {}, exclude={"in the suite"})
    assert "what is it" in target.tokenizer.decode(ids)


def test_answers_of_one_token_tell_nothing(target):
    drafter = load_drafter("ngram", target)
    target.eos_ids = set(range(target.vocab_size))
    with pytest.raises(UserError, match="ends its answers to all prompts at once"):
        tuning.search_tree(target, drafter, [[5, 6, 7]], tuning.TuneSettings(tokens=8))


def test_tune_and_eval_agree():
    """The same answers get the same verdict, whether tune timed them or eval recorded them."""
    random = np.random.default_rng(3)
    seen = set()
    for number in range(40):
        prompts = int(random.integers(3, 8))
        seconds = (
            random.uniform(1, 3, prompts)
            * random.uniform(0.7, 1.4, (3, 1))
            * random.uniform(0.8, 1.2, (3, prompts))
        )
        measured = tuning.Timings(np.full((3, prompts), 63.0), seconds, seconds)
        records = [
            record_of("a", side(63, ours, [(1, 1, 31)]), side(63, plain))
            for plain, ours in zip(*seconds[:2], strict=True)
        ]
        state = verdict_of(summarize(records)).state
        value, *interval = measured.ratio(1, 0)
        assert judge(value, interval, prompts).state == state, number
        if measured.faster(
            1, 2
        ):  # the fixed tree beats the adaptive one, so the choice is between it and plain decoding
            assert (tuning.keep(measured) == 0) == (state == "does not pay")
        seen.add(state)
    assert seen == {"pays", "does not pay", "inconclusive"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--chat-template-kwargs", '{"foo": 1}'),
            "chat_template_kwargs: 'foo' is not a variable of the chat template",
        ),
        (("--max-new-tokens", "4"), "max-new-tokens=4 tells too little"),
        (("--drafter", "none"), "drafter='none' drafts nothing"),
    ],
)
def test_bad_input_is_named(target_dir, tmp_path, capsys, more, message):
    assert cli.main(tune_command(target_dir, "ngram", tmp_path, *more)) == 2
    assert message in capsys.readouterr().err


def test_calibration_prompts_have_the_templates_variables(tmp_path):
    """A row's own come before those of the flag."""
    target = SimpleNamespace(tokenizer=tokenizer_with(TEMPLATE), max_positions=None)
    rows = [{"text": "a"}, {"turns": ["a"], "chat_template_kwargs": {"thinking": True}}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plain, switched = (
        [
            decode(target.tokenizer, ids)
            for ids in tuning.calibration_prompts(target, str(tmp_path / "rows.jsonl"), kwargs)
        ]
        for kwargs in ({}, {"thinking": False})
    )
    assert switched == [plain[0] + "<t></t>", plain[1]] and plain[0] == plain[1]
