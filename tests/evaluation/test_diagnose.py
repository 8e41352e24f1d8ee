from __future__ import annotations

import pytest

from drafttrain import cli
from drafttrain.evaluation.diagnose import diagnose, slow_categories
from tests.evaluation.records import prompt, results_of
from tests.files import dump_json, load_json


def causes(records, training=None, others=(), **more):
    return {
        finding["cause"]: finding
        for finding in diagnose(results_of(records, **more), training, others)
    }


def test_nothing_is_wrong_with_a_good_drafter():
    found = causes([prompt(accepted=2)] * 12, {"held_out": {"eval_agree@1": 0.9}})
    assert list(found) == ["verdict"]
    assert "above 80 %: draft more" in found["verdict"]["figures"]
    assert (
        "3.10x as fast as plain decoding (95 % interval 3.10 to 3.10, 12 prompts)"
        in found["verdict"]["figures"]
    )


@pytest.mark.parametrize(
    ("accepted", "offered", "rule"),
    [(0, 4, "useless"), (1, 3, "draft fewer"), (1, 2, "about right"), (2, 2, "draft more")],
)
def test_rules_of_thumb_stand_beside(accepted, offered, rule):
    assert rule in causes([prompt(accepted=accepted, offered=offered)] * 8)["verdict"]["figures"]


def test_measurement_goes_before_the_rule():
    found = causes([prompt(accepted=1, seconds=0.5, offered=4)] * 8)
    assert "useless" in found["verdict"]["figures"]
    assert found["verdict"]["advice"].startswith("it pays here although")
    assert "it does not pay" in causes([prompt(accepted=0, seconds=2.0)] * 8)["verdict"]["advice"]


@pytest.mark.parametrize(("count", "words"), [(1, "1 prompt is"), (4, "4 prompts are")])
def test_a_few_prompts_show_nothing(count, words):
    """However clear they look: slow, short of trained acceptance, and with a poor vocabulary."""
    training = {"held_out": {"eval_agree@1": 0.9}}
    found = causes([prompt(accepted=0, seconds=9.0, covered=0.5, draft=8.0)] * count, training)
    assert list(found) == ["verdict"]
    assert found["verdict"]["advice"] == (
        f"{words} too few to say whether it pays and why: measure at least 8"
    )
    assert "rule of thumb" not in found["verdict"]["figures"]


def test_low_everywhere_against_training_is_a_mismatch():
    training = {"held_out": {"eval_agree@1": 0.6}, "config": {"target": "other"}}
    found = causes([prompt(accepted=0), prompt("code", accepted=0)] * 4, training)[
        "tokenizer or template mismatch"
    ]
    assert "0.60 right on held-out" in found["figures"]
    assert "trained for 'other', used with 't'" in found["figures"]


def test_low_in_one_category_against_training_is_the_domain():
    records = [prompt(accepted=2)] * 8 + [prompt("code", accepted=0, seconds=3.0)] * 8
    assert "domain" not in causes(records[:11], {}), "three prompts of a category show nothing"
    assert "domain" not in causes(records[8:], {}), "a single category has nothing to differ from"
    found = causes(records, {"held_out": {"eval_agree@1": 0.6}})
    assert "mismatch" not in " ".join(found)
    assert found["domain"]["off"] == ("code",)


def noisy(category, accepted, seconds, count=4):
    """Prompts whose speed varies by a third."""
    return [
        prompt(category, accepted=accepted, seconds=seconds * (0.75, 1.25)[number % 2])
        for number in range(count)
    ]


def test_advice_on_categories_is_corrected_for_their_number():
    """A category that is slow by its own 95 % interval is not called so when it was one of eight looked at."""
    fast = noisy("chat", 2, 1.2)
    slow = noisy("code", 1, 2.7, count=12)  # plain decoding takes 2.1 s
    pair = results_of(fast + slow)
    assert pair["categories"]["code"]["confidence"]["speedup"]["autoregressive"][1] < 1
    assert slow_categories(pair) == ("code",)
    others = [one for name in "abcdef" for one in noisy(name, 2, 1.2)]
    assert slow_categories(results_of(fast + slow + others)) == ()
    # Far slower is called slow in any company.
    assert slow_categories(results_of(fast + noisy("code", 0, 5.0) + others)) == ("code",)
    del pair["prompts"]
    assert slow_categories(pair) == (), "without prompts nothing can be corrected"


def test_what_slows_down_is_judged_against_the_faster_baseline():
    records = [prompt("chat", accepted=2)] * 4 + [prompt("code", accepted=0, seconds=1.0)] * 4
    for each in records:
        tokens = each["sides"]["drafter"]["tokens"]
        each["sides"]["hf_generate"] = {
            "tokens": tokens,
            "seconds": 0.05 * tokens,
        }  # twice as fast as our own
    results = results_of(records)
    assert results["categories"]["code"]["speedup"] == {"autoregressive": 1.1, "hf_generate": 0.55}
    assert slow_categories(results) == ("code",)


def test_answers_that_the_limit_cut_off_have_a_remedy():
    results = results_of([prompt()] * 3 + [prompt(accepted=0)] * 5)
    results["decoding"]["max_new_tokens"] = 21  # what the first three have
    found = {each["cause"]: each for each in diagnose(results)}["answers cut off"]
    assert "3 of 8 answers reached --max-new-tokens 21" in found["figures"]
    assert "--max-new-tokens 84" in found["advice"]
    results["decoding"]["max_new_tokens"] = 22
    assert "answers cut off" not in {each["cause"] for each in diagnose(results)}


def test_vocabulary():
    found = causes([prompt(covered=0.8)] * 8)["vocabulary coverage"]
    assert "holds 80.0% of the answers' tokens; 20.0% can never be accepted" in found["figures"]
    assert "vocabulary coverage" not in causes([prompt(covered=0.97)] * 8)


def test_acceptance_that_falls_by_depth():
    records = [prompt(accepted=1, offered=3)] * 10 + [prompt(accepted=2, offered=3)] * 2
    found = causes(records, {"config": {"drafter": {"ttt_steps": 2}}})["acceptance falls by depth"]
    assert "1.00 0.17 0.00 by depth" in found["figures"]
    assert (
        "trained for 2 depths, drafts 3" in found["figures"]
        and "train more depths" in found["advice"]
    )
    assert "train" not in causes(records, kind="ngram")["acceptance falls by depth"][
        "advice"
    ].replace("drafttrain", "")


def test_long_context():
    records = (
        [prompt(accepted=2, prompt_tokens=40)] * 4
        + [prompt(prompt_tokens=90)] * 4
        + [prompt(accepted=1, prompt_tokens=900)] * 4
    )
    found = causes(records, {"config": {"max_length": 512}})["long context"]
    assert "2.00 after 40 prompt tokens, 1.00 after 900" in found["figures"]
    assert "trained on at most 512" in found["figures"]
    assert "long context" not in causes(records[:8])


def test_temperature_is_seen_between_runs():
    cold = results_of([prompt(accepted=2)] * 8)
    found = causes([prompt(accepted=1)] * 8, others=[cold], temperature=1.0)["temperature"]
    assert "2.00 at temperature 0, 1.00 at 1" in found["figures"]
    assert "@sample" in found["advice"]
    assert "temperature" not in causes([prompt(accepted=2)] * 8, others=[cold], temperature=1.0)
    easier = {**cold, "suite": "other"}
    assert "temperature" not in causes([prompt(accepted=1)] * 8, others=[easier], temperature=1.0)


def test_a_slow_drafter():
    assert "50% of the time" in causes([prompt(draft=0.5)] * 8)["drafting takes long"]["figures"]


def test_slow_kinds_are_switched_off_in_the_drafters_folder(tmp_path, capsys):
    records = [prompt("chat", accepted=2), *[prompt("code", accepted=0, seconds=2.0)] * 4]
    records += [{**prompt("poetry", accepted=0), "speculation": False}]
    dump_json(tmp_path / "results.json", results_of(records))
    arguments = ["diagnose", str(tmp_path / "results.json"), "--apply", "--drafter"]
    assert cli.main([*arguments, str(tmp_path / "nowhere")]) == 2
    assert "is not a drafter's folder" in capsys.readouterr().err
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "decoding.json").write_text('{"tree": "chain:4", "off": ["chat", "poetry", "maths"]}')
    assert cli.main([*arguments, f"{folder}+ngram"]) == 0
    # chat pays again, code does not, poetry was decoded plainly and maths not asked: both stay
    assert load_json(folder / "decoding.json") == {
        "tree": "chain:4",
        "off": ["code", "maths", "poetry"],
    }
    assert "verdict" in capsys.readouterr().out
