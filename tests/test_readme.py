"""Figures, commands and tables of the README and the pages that people read first are those of the code and its results."""

from __future__ import annotations

import shlex

import pytest

from drafttrain.drafters.registry import kind_class, kinds
from drafttrain.drafters.shipping import shipped_kinds, shipping
from drafttrain.formats.engines import ENGINES
from scripts import concept_pictures
from tests.files import ROOT, load_json

UNDRAFTED = {"mlp_speculator": {"vLLM"}}  # vLLM 0.32 has its class but no longer drafts with it

README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = load_json(ROOT / "eval" / "results" / "quickstart_smollm2-135m_zen5_cpu.json")


def test_the_number_of_kinds_is_counted():
    words = (
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
    )
    trained = [kind for kind in kinds() if kind_class(kind).trainable]
    others = words[len(set(trained) - {"eagle3", "draft_model"})]
    assert f"any of [{others} other kinds](docs/choosing.md)" in README
    page = (ROOT / "docs" / "index.md").read_text()
    untrained = words[len(kinds()) - len(trained)]
    assert f"any of {others} other kinds; {untrained} more kinds draft without training" in page


def test_the_headline_table_is_the_measured_one():
    rows = {}
    for name, figures in {**MEASURED["categories"], "**all**": MEASURED["overall"]}.items():
        cells = [
            str(figures["prompts"]),
            f"{figures['accepted_length']:.2f}",
            f"{figures['tokens_per_second']:.1f}",
        ]
        for side in ("autoregressive", "hf_generate"):
            speed = f"{figures['speedup'][side]:.2f}x"
            cells += [f"{figures['baselines'][side]['tokens_per_second']:.1f}", speed]
        rows[name] = cells
    shown = [line.strip("| ").split(" | ") for line in README.splitlines() if line.startswith("| ")]
    shown = {
        cells[0]: [cell.strip("*") for cell in cells[1:]] for cells in shown if cells[0] in rows
    }
    assert shown == rows


def test_the_sentence_below_it_states_the_measurement():
    overall = MEASURED["overall"]
    said = " ".join(README.split())
    low, high = overall["confidence"]["speedup"]["autoregressive"]
    of = overall["prompts"]
    same = round(of * overall["identical_outputs"])
    words = [
        f"tree `{MEASURED['decoding']['tree']['spec']}` with n-grams, greedy, {MEASURED['decoding']['max_new_tokens']} new tokens"
    ]
    words += [
        f"identical output on {same} of {of} prompts",
        f"95 % interval of the speed-up {low:.2f} to {high:.2f}",
    ]
    assert [each for each in words if each not in said] == []


def test_the_measurement_is_the_command_of_the_quickstart():
    """The script evaluates with what the JSON names, in a target's and a folder's place their variables."""
    script = (ROOT / "scripts" / "quickstart.sh").read_text().replace("\\\n", " ")
    line = next(line for line in script.splitlines() if line.startswith("drafttrain eval"))
    shown = [
        word.replace("$target", "smollm2-135m").replace("$output", "runs/quickstart")
        for word in shlex.split(line)
    ]
    assert shown == MEASURED["command"]


def test_the_readme_stays_short_and_names_the_command_of_ci():
    assert len(README.splitlines()) <= 120 and README.count("![") <= 3
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "bash scripts/test.sh"
    assert "\nbash scripts/test.sh " in README


def test_pictures_of_the_concepts_are_those_of_the_script():
    kept = {
        path.stem: path.read_text(encoding="utf-8")
        for path in (ROOT / "docs" / "pictures").glob("*.svg")
    }
    assert {name: kept.get(name) for name in concept_pictures.PICTURES} == {
        name: draw().svg() for name, draw in concept_pictures.PICTURES.items()
    }


@pytest.mark.thorough
def test_the_engines_of_each_kind_are_those_of_its_exports():
    text = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    table = text.partition("\n## By engine\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    shown = {
        kind.strip("` "): {rows[0][at].split()[0] for at in range(1, 6) if row[at]}
        for row in rows[2:]
        for kind in row[0].split(",")
    }
    for kind in (
        kind for kind in shipped_kinds() if shipping(kind).formats
    ):  # ngram has recipes only
        engines = {
            name.split(",")[0]
            for form in shipping(kind).formats.values()
            for name in form.engines
            if name in ENGINES
        }
        assert shown[kind] == engines - UNDRAFTED.get(kind, set()), kind
