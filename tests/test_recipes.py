"""`drafttrain recipes` and names of recipes, in a checkout and where a wheel installs them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import tomllib

from drafttrain import environment, recipes, train
from drafttrain.cli import main
from drafttrain.config import load_config
from drafttrain.errors import UserError
from drafttrain.recipes import recipe_names, recipe_path
from tests.files import ROOT


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package where no repository is around it, with its data files where pip puts them; nothing in the current folder."""
    share = tmp_path / "prefix" / "share" / "drafttrain"
    shutil.copytree(ROOT / "configs", share / "configs")
    monkeypatch.setattr(
        environment, "__file__", str(tmp_path / "site-packages" / "drafttrain" / "environment.py")
    )
    monkeypatch.setattr(
        environment.sysconfig, "get_path", lambda name, scheme="": str(tmp_path / "prefix")
    )
    monkeypatch.chdir(tmp_path)
    return share / "configs"


def test_the_list_has_a_line_per_recipe(capsys):
    assert main(["recipes"]) == 0
    rows = capsys.readouterr().out.splitlines()
    names = recipe_names()
    assert [row.split()[0] for row in rows[1 : len(names) + 1]] == names and rows[
        -1
    ] == "next: drafttrain recipes NAME"
    assert max(map(len, rows)) <= 80
    (one,) = (row for row in rows if row.startswith("llama-3.1-8b/eagle3 "))
    assert re.search(r" 1 x 80 GB +\d+ +\d+ GB +300,000 +\d+$", one)
    (served,) = (row for row in rows if row.startswith("qwen3-32b/eagle3 "))
    assert " GB, vLLM " in served


def test_every_plan_has_its_figures_in_the_list():
    planned = [one for one in recipes.shipped_recipes() if " GPU" in one.about]
    assert len(planned) > 25 and all(len(one.cells()) == 6 for one in planned)


def test_json_names_recipe_target_and_first_plan(capsys):
    assert main(["recipes", "--json"]) == 0
    rows = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)["result"]["recipes"]}
    served = rows["qwen3-32b/eagle3"]
    assert served["target"] == "Qwen/Qwen3-32B"
    assert re.fullmatch(
        r"300,000 answers; 6 x 80 GB: \d+ GB per training GPU \(vLLM has its own\), disk \d+ GB; "
        r"answers [\d.]+ h, training [\d.]+ h",
        served["plan"],
    )
    assert rows["smollm2-135m/eagle3"]["plan"] == "EAGLE-3 head for SmolLM2-135M-Instruct"
    assert rows["quickstart"]["target"] == "any"


OWN = "kind: eagle3\ntarget: t\ndata: d\noutput_dir: o\n"


def test_a_recipe_trains_with_a_plan_a_head_of_comments_or_neither(tmp_path):
    path = tmp_path / "own.yaml"
    found = []
    head = "# Plan: 1 x 80 GB: 29 GB per GPU, disk 37 GB; answers 4.0 h, training 31 h\n"
    for text in (OWN, head + OWN, OWN + "plan: {answers: 3, states: online, runs: []}\n"):
        path.write_text(text)
        found.append(load_config(str(path), [], []))
    assert found[0] == found[1] == found[2]


def test_a_plan_of_another_form_is_one_line(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(OWN + "plan: {answers: many, states: online, runs: []}\n")
    with pytest.raises(UserError, match=r"plan: answers='many': .*; .*leave it out of your own"):
        load_config(str(path), [], [])


def test_a_name_is_found_where_a_wheel_installs_it(installed, capsys):
    assert recipe_path("qwen3-8b/eagle3") == installed / "qwen3-8b" / "eagle3.yaml"
    assert main(["recipes", "qwen3-8b/eagle3"]) == 0
    assert capsys.readouterr().out == (ROOT / "configs" / "qwen3-8b" / "eagle3.yaml").read_text()


def test_a_file_of_the_user_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("kind: eagle3\n")
    assert recipe_path("quickstart") == Path("quickstart")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama3.1-8b/eagle3", "did you mean llama-3.1-8b/eagle3?"),
        ("Qwen3-8B/dflash", "did you mean qwen3-8b/dflash?"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "did you mean mistral-small-24b/dflash2 or "),
        ("gemma-3-12b", "did you mean gemma-3-12b/eagle3?"),
        ("glm-4.5-air/eagle", "did you mean glm-4.5-air/eagle3 or glm-4.5-air/mtp?"),
        ("nothing/like/it.yaml", "drafttrain recipes lists"),
    ],
)
def test_a_near_miss_is_named(name, said):
    with pytest.raises(
        UserError, match=re.escape(f"recipe='{name}': no such file, and no recipe of that name")
    ) as caught:
        recipe_path(name)
    assert said in str(caught.value)


def test_a_copy_works_from_its_folder(installed, tmp_path, monkeypatch, capsys):
    assert main(["recipes", "deepseek-v3/mtp", "--copy", "mine"]) == 0
    assert (
        "next: cd mine && drafttrain train configs/deepseek-v3/mtp.yaml" in capsys.readouterr().out
    )
    monkeypatch.chdir(tmp_path / "mine")
    text = Path("configs/deepseek-v3/mtp.yaml").read_text()
    assert (
        text == (installed / "deepseek-v3" / "mtp.yaml").read_text()
        and Path("configs/deepseek-v3/target.json").is_file()
    )
    launch = Path("configs/accelerate/gpu-8.yaml").read_text()
    for named in re.findall(r"configs/[\w./-]+\.(?:yaml|json)", text + launch):
        assert Path(named).is_file(), named


def test_a_copy_replaces_nothing_that_was_edited(tmp_path):
    written = recipes.copy_recipe("qwen3-8b/eagle3", tmp_path)
    assert recipes.copy_recipe("qwen3-8b/eagle3", tmp_path) == []
    assert recipes.copy_recipe("qwen3-8b/dflash", tmp_path) == [
        tmp_path / "configs" / "qwen3-8b" / "dflash.yaml"
    ]
    written[0].write_text("kind: eagle3\n")
    with pytest.raises(
        UserError, match=r"eagle3\.yaml is there with another content; choose another folder"
    ):
        recipes.copy_recipe("qwen3-8b/eagle3", tmp_path)
    assert written[0].read_text() == "kind: eagle3\n"
    with pytest.raises(
        UserError, match="is a file of your own; --copy is for those that come with drafttrain"
    ):
        recipes.copy_recipe(str(written[0]), tmp_path / "other")


def test_copy_needs_a_name():
    with pytest.raises(UserError, match=r"^--copy needs the name of a recipe"):
        recipes.run(recipes.argparse.Namespace(name=None, copy="here"))


@pytest.mark.parametrize(
    ("words", "config", "overrides"),
    [
        (
            ["--recipe", "qwen3-8b/eagle3", "max_steps=3", "data=d"],
            "qwen3-8b/eagle3",
            ["max_steps=3", "data=d"],
        ),
        (["--recipe", "qwen3-8b/eagle3"], "qwen3-8b/eagle3", []),
        (["qwen3-8b/eagle3", "max_steps=3"], "qwen3-8b/eagle3", ["max_steps=3"]),
    ],
)
def test_train_takes_a_name(words, config, overrides, monkeypatch):
    def stop(*given: object) -> None:
        raise UserError(f"{given}")

    monkeypatch.setattr(train, "setup", stop)
    with pytest.raises(UserError, match=re.escape(str((config, overrides)))):
        main_raising(["train", *words])


def test_train_without_a_recipe_says_what_to_give():
    with pytest.raises(UserError, match=r"config must be given: a YAML recipe, or --recipe NAME"):
        main_raising(["train"])


def main_raising(words: list[str]) -> None:
    """The command line, with errors as exceptions."""
    from drafttrain.cli import run

    run(words)


def test_every_folder_of_recipes_is_in_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "data-files"
    ]
    held = {
        path
        for patterns in settings.values()
        for pattern in patterns
        for path in ROOT.glob(pattern)
    }
    assert {path for path in (ROOT / "configs").rglob("*.*") if path.is_file()} <= held
    for place, patterns in settings.items():
        if "configs" in place:
            assert {str(Path(pattern).parent) for pattern in patterns} == {
                place.removeprefix("share/drafttrain/")
            }
