"""Suites with images: their layouts, the drawn one, and `drafttrain eval` and `chat` on them."""

from __future__ import annotations

import base64
import io
import json
import sys
from types import SimpleNamespace

import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value

from drafttrain import cli
from drafttrain.errors import UserError
from drafttrain.evaluation.runner import EvalSettings, check_sight
from drafttrain.evaluation.suites import known_suites, load_suite
from drafttrain.images import Picture, read_picture
from drafttrain.target import load_shell
from drafttrain.target.sight import Sight
from scripts import draw_suite
from tests.data.seeing import TOKENS, make_seeing, picture, shown

KEPT = {"bytes": picture(1).data, "path": None}


def parquet(folder, row, **types):
    """A file of one row in the Hub's layout."""
    features = Features({**{key: Value("string") for key in row}, **types, "image": Image()})
    path = folder / "val-00000-of-00001.parquet"
    rows = Dataset.from_dict({key: [value] for key, value in row.items()}, features=features)
    rows.to_parquet(path)
    return path


@pytest.mark.parametrize(
    ("name", "row", "types", "turn", "category"),
    [
        (
            "mmstar",
            {
                "index": 4,
                "question": "How many? Options: A: 1, B: 2",
                "image": KEPT,
                "answer": "A",
                "category": "math",
                "l2_category": "geometry",
            },
            {"index": Value("int64")},
            "How many? Options: A: 1, B: 2",
            "math",
        ),
        (
            "chartqa",
            {"image": KEPT, "query": "Which bar?", "label": ["red"], "human_or_machine": 1},
            {
                "label": [Value("string")],
                "human_or_machine": ClassLabel(names=["human", "machine"]),
            },
            "Which bar?\n\nSay what the chart shows about it, then give the answer.",
            "machine",
        ),
        (
            "coco_captions",
            {"question_id": "1.jpg", "image": KEPT, "question": "...", "answer": ["a cat"]},
            {"answer": [Value("string")]},
            "Describe this image in a paragraph.",
            "coco_captions",
        ),
    ],
)
def test_layouts_of_the_hub(tmp_path, name, row, types, turn, category):
    parquet(tmp_path, row, **types)
    suite = load_suite(f"{name}:{tmp_path}")
    (question,) = suite.questions
    assert question.images == (picture(1),)
    assert question.turns == (turn,) and question.category == category
    sent = question.request()["messages"][0]["content"]
    assert sent[0]["image_url"]["url"] == picture(1).uri and sent[1]["text"] == turn


def test_a_row_without_its_image(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "a", "category": "math"}) + "\n")
    with pytest.raises(UserError, match="row 1 has no image"):
        load_suite(f"mmstar:{path}")
    path.write_text(json.dumps({"question": "a", "image": "gone.png"}) + "\n")
    with pytest.raises(UserError, match="row 1: image: no such file"):
        load_suite(f"mmstar:{path}")


def test_a_suite_of_ones_own(tmp_path):
    (tmp_path / "a.png").write_bytes(picture(0).data)
    uri = "data:image/png;base64," + base64.b64encode(picture(1).data).decode()
    path = tmp_path / "suite.jsonl"
    path.write_text(json.dumps({"turns": ["a?", "b?"], "images": ["a.png", uri]}) + "\n")
    suite = load_suite(str(path))
    (question,) = suite.questions
    first, _, second = question.messages(["x"])
    assert first["content"][:2] == [shown(picture(0)), shown(picture(1))]
    assert second["content"] == "b?"
    with pytest.raises(UserError, match="shows images, which are not read here"):
        question.prompt(None)
    # Another picture in the file makes another suite.
    (tmp_path / "a.png").write_bytes(picture(2).data)
    assert load_suite(str(path)).digest != suite.digest


def test_easy_vqa(monkeypatch, tmp_path):
    (tmp_path / "0.png").write_bytes(picture(0).data)
    test = (["a?", "b?", "c?"], ["red", "yes", "circle"], [0, 0, 0])
    package = SimpleNamespace(
        get_test_questions=lambda: test,
        get_test_image_paths=lambda: {0: str(tmp_path / "0.png")},
    )
    monkeypatch.setitem(sys.modules, "easy_vqa", package)
    suite = load_suite("easy_vqa")
    kinds = [question.category for question in suite.questions]
    assert kinds == ["a word", "yes or no", "a word"]
    assert suite.questions[2].question_id == "easy-vqa-test-2" and suite.license == "MIT"


def test_the_drawn_suite_is_the_same_everywhere():
    made = list(draw_suite.drawn_rows())
    suite = load_suite("drawn")
    assert len({question.images for question in suite.questions}) == len(made) == 40
    for row, question in zip(made, suite.questions, strict=True):
        (uri,) = row["images"]
        pixels = read_picture(uri).pixels().tobytes()
        assert pixels == question.images[0].pixels().tobytes()
        assert question.turns == tuple(row["turns"])
    kinds = {question.category for question in suite.questions}
    assert kinds == {"shapes", "bar chart", "line chart", "table", "text"}
    assert {"drawn", "mmstar", "easy_vqa"} <= set(known_suites())


def test_baselines_that_read_no_images():
    with pytest.raises(UserError, match="hf_prompt_lookup: not measured on suites with images"):
        check_sight(EvalSettings(baselines=("hf_prompt_lookup",)))
    with pytest.raises(UserError, match="batch-size=2: hf_generate reads single prompts"):
        check_sight(EvalSettings(batch_size=2))
    check_sight(EvalSettings(batch_size=2, baselines=("autoregressive",)))


# -- a tiny target --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return make_seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(autouse=True)
def processor(request, monkeypatch):
    if "built" in request.fixturenames:
        built = request.getfixturevalue("built")
        monkeypatch.setattr(Sight, "_load_processor", lambda self: built.processor)


def test_eval(built, tmp_path, capsys):
    output = tmp_path / "r.json"
    words = ["--target", built.folder, "--drafter", "ngram", "--suite", "drawn", "--limit", "5"]
    words += ["--tree", "chain:3", "--max-new-tokens", "6", "--dtype", "float32"]
    assert cli.main(["eval", *words, "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    assert results["suite"] == "drawn" and len(results["categories"]) == 5
    for record in results["prompts"]:
        assert record["identical"] == {"autoregressive": True, "hf_generate": True}
        assert record["prompt_tokens"] > TOKENS
    # Another image gives another answer: it is read.
    questions = load_suite("drawn").questions
    target = load_shell(built.folder)
    one, two = (question.prompt_for(target) for question in questions[:2])
    assert one.ids.tolist() == two.ids.tolist() and one.digests != two.digests


def test_eval_of_a_target_that_reads_text(target_dir, tmp_path, capsys):
    words = ["--target", str(target_dir), "--drafter", "ngram", "--suite", "drawn"]
    assert cli.main(["eval", *words, "--output", str(tmp_path / "r.json")]) == 2
    assert "reads no images" in capsys.readouterr().err


def test_chat(built, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.png").write_bytes(picture(0).data)
    lines = [f"/image {tmp_path / 'a.png'}", "what is it?", "and now?"]
    lines += [f"/save {tmp_path / 'chat.json'}", "/image gone.png"]
    words = ["--target", built.folder, "--drafter", "ngram", "--dtype", "float32"]
    words += ["--max-new-tokens", "4", "--json"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert cli.main(["chat", *words]) == 2
    out, err = capsys.readouterr()
    assert "the next message shows 1 image" in err and "image: no such file" in err
    first, second = (json.loads(line) for line in out.splitlines())
    assert first["images"] == [picture(0).name] and "images" not in second
    assert first["prompt_tokens"] == len("user: what is it?assistant: ") + 1 + TOKENS
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved["messages"][0]["content"][0] == shown(picture(0).name)
    assert Picture(picture(0).data).digest in json.dumps(saved)
