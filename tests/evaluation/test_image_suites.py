"""Suites with images: their layouts, the drawn one, and `drafttrain eval` and `chat` on them."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest
from datasets import Dataset, Image

from drafttrain import cli
from drafttrain.errors import UserError
from drafttrain.evaluation.runner import EvalSettings, check_sight
from drafttrain.evaluation.suites import load_suite
from drafttrain.images import read_picture
from scripts import draw_suite
from tests.data.seeing import picture, shown, write_rows

OPTIONS = "How many? Options: A: 1, B: 2"


@pytest.mark.parametrize(
    ("name", "row", "turn", "category"),
    [
        ("mmstar", {"index": 4, "question": OPTIONS, "category": "math"}, OPTIONS, "math"),
        ("chartqa", {"query": "Which bar?", "human_or_machine": 1}, "Which bar?", "machine"),
        ("coco_captions", {"question_id": "1.jpg"}, "Describe this image", "coco_captions"),
    ],
)
def test_layouts_of_the_hub(
    tmp_path,
    name,
    row,
    turn,
    category,
):
    columns = {**row, "image": {"bytes": picture(1).data, "path": None}}
    rows = Dataset.from_list([columns]).cast_column("image", Image())
    rows.to_parquet(tmp_path / "test-00000-of-00001.parquet")
    (question,) = load_suite(f"{name}:{tmp_path}").questions
    assert question.images == (picture(1),) and question.category == category
    assert question.turns[0].startswith(turn)
    sent = question.request()["messages"][0]["content"]
    assert sent[0]["image_url"]["url"] == picture(1).uri and sent[1]["text"] == question.turns[0]


def test_rows_without_their_image(tmp_path):
    path = tmp_path / "rows.jsonl"
    for more, message in (
        ({}, "row 1 has no image"),
        ({"image": "gone.png"}, "row 1: image: no such file"),
    ):
        write_rows(path, [{"question": "a", "category": "math", **more}], 0)
        with pytest.raises(UserError, match=message):
            load_suite(f"mmstar:{path}")


def test_a_suite_of_ones_own(tmp_path):
    path = tmp_path / "suite.jsonl"
    write_rows(path, [{"turns": ["a?", "b?"], "images": ["a.png", picture(1).uri]}], 0)
    digests = set()
    for number in (0, 2):  # another picture in the file makes another suite
        (tmp_path / "a.png").write_bytes(picture(number).data)
        suite = load_suite(str(path))
        digests.add(suite.digest)
        first, _, second = suite.questions[0].messages(["x"])
        assert first["content"][:2] == [shown(picture(number)), shown(picture(1))]
        assert second["content"] == "b?"
    assert len(digests) == 2
    with pytest.raises(UserError, match="shows images, which are not read here"):
        suite.questions[0].prompt(None)
    write_rows(path, [{"turns": ["a?"], "image": "a.png"}], 0)
    assert load_suite(str(path)).questions[0].images == (picture(2),)


def test_easy_vqa(monkeypatch, tmp_path):
    (tmp_path / "0.png").write_bytes(picture(0).data)
    package = SimpleNamespace(
        get_test_questions=lambda: (["a?", "b?"], ["red", "yes"], [0, 0]),
        get_test_image_paths=lambda: {0: str(tmp_path / "0.png")},
    )
    monkeypatch.setitem(sys.modules, "easy_vqa", package)
    suite = load_suite("easy_vqa")
    assert [question.category for question in suite.questions] == ["a word", "yes or no"]
    assert suite.questions[1].images == (picture(0),) and suite.license == "MIT"


def test_the_drawn_suite_is_what_its_script_draws():
    suite = load_suite("drawn")
    for row, question in zip(draw_suite.drawn_rows(), suite.questions, strict=True):
        pixels = read_picture(row["images"][0]).pixels().tobytes()
        assert pixels == question.images[0].pixels().tobytes()
        assert question.turns == tuple(row["turns"])
    assert len({question.category for question in suite.questions}) == 5
    assert len({question.images for question in suite.questions}) == 40


def test_baselines_that_read_no_images():
    with pytest.raises(UserError, match="hf_prompt_lookup: not measured on suites with images"):
        check_sight(EvalSettings(baselines=("hf_prompt_lookup",)))
    with pytest.raises(UserError, match="batch-size=2: hf_generate reads single prompts"):
        check_sight(EvalSettings(batch_size=2))
    check_sight(EvalSettings(batch_size=2, baselines=("autoregressive",)))


# -- a tiny target --------------------------------------------------------------------------------


@pytest.fixture
def words(seeing, seeing_processor):
    """Flags of the target that reads images."""
    return ["--target", seeing.folder, "--drafter=ngram", "--dtype=float32", "--max-new-tokens=6"]


def test_eval(words, tmp_path):
    output = tmp_path / "r.json"
    words = [*words, "--suite=drawn", "--limit=5", "--tree=chain:3", "--output", str(output)]
    assert cli.main(["eval", *words]) == 0
    results = json.loads(output.read_text())
    assert len(results["categories"]) == 5
    for record in results["prompts"]:
        assert record["identical"] == {"autoregressive": True, "hf_generate": True}


def test_chat(
    words,
    tmp_path,
    monkeypatch,
    capsys,
):
    (tmp_path / "a.png").write_bytes(picture(0).data)
    lines = [f"/image {tmp_path / 'a.png'}", "what is it?", "and now?"]
    lines += [f"/save {tmp_path / 'chat.json'}", "/image gone.png"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert cli.main(["chat", *words, "--json"]) == 2
    out, err = capsys.readouterr()
    assert "the next message shows 1 image" in err and "image: no such file" in err
    first, second = map(json.loads, out.splitlines())
    assert first["images"] == [picture(0).name] and "images" not in second
    assert (
        first["prompt_tokens"] == len("user: what is it?assistant: ") + 5
    )  # </s> and 4 of the image
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved["messages"][0]["content"][0] == shown(picture(0).name)
