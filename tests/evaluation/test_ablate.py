"""eval/ablate.py: variants of a recipe, each with several seeds, compared on the same prompts."""

from __future__ import annotations

import importlib
import sys

import pytest

from drafttrain.errors import UserError
from tests.files import ROOT, load_json

# What each run accepts: tokens and passes of two prompts.
PASSES = {"plain": (20, 10), "normed": (16, 8)}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "eval")
    for name in ("compare_kinds", "ablate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("ablate")


def words_of(tmp_path):
    output = str(tmp_path / "out.json")
    base = ["--data", "d", "--minutes", "1", "--output", output, "--folder", str(tmp_path / "runs")]
    return [
        *base,
        "--variant",
        "plain",
        "--variant",
        "normed",
        "drafter.fc_norm=true",
        "kind=dflash",
    ]


def test_each_variant_is_trained_by_each_seed_and_compared_with_the_first(
    script, tmp_path, monkeypatch
):
    trained = []

    def train(kind, args, core):
        trained.append((kind, args.train, args.seed))
        return {
            "folder": f"{kind}-{args.seed}",
            "steps": 5,
            "seconds": 60.0,
            "parameters": 7,
            "held_out": {},
        }

    def measure(entry, tree, temperature, args):
        assert (tree, temperature) == ("chain:4", 0.0)
        passes = PASSES[entry.label.split()[0]]
        rows = [[40.0, count, 41.0, 1.0, 41.0, 2.0] for count in passes]
        return {"by_prompt": rows, "accepted_length": 80 / sum(passes), "identical_outputs": 1.0}

    monkeypatch.setattr(script.compare_kinds, "train", train)
    monkeypatch.setattr(script.compare_kinds, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["ablate.py", *words_of(tmp_path), "--seeds", "0", "3"])
    assert script.main() == 0
    found = load_json(tmp_path / "out.json")

    assert sorted(trained) == [
        ("dflash", ["drafter.fc_norm=true"], 0),
        ("dflash", ["drafter.fc_norm=true"], 3),
        ("eagle3", [], 0),
        ("eagle3", [], 3),
    ]
    assert found["variants"]["plain"]["beyond"] == [1.0, 1.0, 1.0]
    # Every prompt takes 0.8 of the passes, so the interval has no width.
    assert found["variants"]["normed"]["beyond"] == [1.25, 1.25, 1.25]
    assert list(found["variants"]["normed"]["seeds"]) == ["0", "3"]
    assert (
        "| normed | drafter.fc_norm=true | 3.333 | 1.250 [1.250, 1.250] | 3.333, 3.333 |"
        in script.markdown(found)
    )


def test_variants_are_told_apart(script, tmp_path):
    words = words_of(tmp_path)
    with pytest.raises(UserError, match="variant x: 'fc_norm' must be KEY=VALUE"):
        script.arguments([*words, "--variant", "x", "fc_norm"])
    with pytest.raises(UserError, match="two have one name"):
        script.arguments([*words, "--variant", "plain"])
