"""Rows with images: the forms that are read, what is refused, filters, and `drafttrain prompts`."""

from __future__ import annotations

import base64
import json
import sys
from types import SimpleNamespace

import pytest
from datasets import Dataset, Image

from drafttrain import cli
from drafttrain.data.filters import EvaluationImage, Filter, PromptLimits
from drafttrain.data.row_formats import checked_messages, parse_row
from drafttrain.data.sources import collect, easy_vqa_rows
from drafttrain.errors import UserError
from drafttrain.images import BadPicture, PictureStore
from tests.data.seeing import answer, picture, said, shown, stored, user

SEE = "What is on the left of this picture?"


def uri(number):
    return "data:image/png;base64," + base64.b64encode(picture(number).data).decode()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # OpenAI, with an object and with a bare string; HF with each of its keys.
        (
            {"messages": [user({"type": "image_url", "image_url": {"url": "a.png"}}, SEE)]},
            [shown("a.png"), said(SEE)],
        ),
        (
            {"messages": [user(SEE, {"type": "image_url", "image_url": "a.png"})]},
            [said(SEE), shown("a.png")],
        ),
        ({"messages": [user(shown("a.png"), SEE)]}, [shown("a.png"), said(SEE)]),
        ({"messages": [user({"type": "image", "path": "a.png"})]}, [shown("a.png")]),
        ({"messages": [user({"type": "image", "url": "http://a"})]}, [shown("http://a")]),
        # Places in the messages, images in a column.
        (
            {"messages": [user({"type": "image"}, SEE, {"type": "image"})], "images": ["a", "b"]},
            [shown("a"), said(SEE), shown("b")],
        ),
        (
            {"messages": [user({"type": "image", "text": None}, SEE)], "images": [b"x"]},
            [shown(b"x"), said(SEE)],
        ),
        # LLaVA and ShareGPT4V.
        (
            {
                "id": "1",
                "image": "coco/1.jpg",
                "conversations": [
                    {"from": "human", "value": f"<image>\n{SEE}"},
                    {"from": "gpt", "value": "a cat"},
                ],
            },
            [shown("coco/1.jpg"), said(SEE)],
        ),
        (
            {
                "images": ["a", "b"],
                "conversations": [{"from": "human", "value": "One <image>, two <image>."}],
            },
            [said("One "), shown("a"), said(", two "), shown("b"), said(".")],
        ),
        # A column alone: the images stand before the first question.
        (
            {"question": SEE, "answer": "no", "image": {"bytes": b"x", "path": None}},
            [shown({"bytes": b"x", "path": None}), said(SEE)],
        ),
        ({"messages": [{"role": "user", "content": SEE}], "images": ["a"]}, [shown("a"), said(SEE)]),
    ],
)
def test_forms_of_rows(row, expected):
    assert parse_row(row)["messages"][0]["content"] == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [user({"type": "image"}, SEE)]}, "image: no place"),
        ({"messages": [user(shown("a"), SEE)], "images": ["b", "c"]}, "image: no place"),
        ({"messages": [user({"type": "image"}, SEE)], "images": ["b", "c"]}, "image: no place"),
        (
            {"image": "a", "conversations": [{"from": "human", "value": "<image> or <image>"}]},
            "image: no place",
        ),
        ({"messages": [user(SEE, {"type": "input_audio", "input_audio": {}})]}, "audio or video"),
        ({"messages": [user(SEE, {"type": "video", "video": "a.mp4"})]}, "audio or video"),
        (
            {"messages": [user(SEE), {"role": "assistant", "content": [shown("a")]}]},
            "image: not in a prompt",
        ),
        (
            {"messages": [user(SEE), {"role": "tool", "content": [shown("a")]}]},
            "image: not in a prompt",
        ),
        ({"text": "Once upon a time", "image": "a"}, "image: without a message"),
    ],
)
def test_rows_that_are_refused(row, reason):
    with pytest.raises(BadPicture) as caught:
        parse_row(row)
    assert caught.value.reason == reason


def test_text_stays_text():
    plain = {"messages": [{"role": "user", "content": [said("a"), "b"]}], "image": None}
    assert parse_row(plain)["messages"] == [{"role": "user", "content": "a\nb"}]
    marked = {"conversations": [{"from": "human", "value": "What does <image> do in HTML?"}]}
    assert parse_row(marked)["messages"][0]["content"] == "What does <image> do in HTML?"


def test_messages_of_a_prompts_file():
    row = {"messages": [user({"type": "image_url", "image_url": {"url": "a"}}, SEE)]}
    assert checked_messages(row, "p")[0]["content"] == [shown("a"), said(SEE)]
    with pytest.raises(UserError, match="line 3: audio or video"):
        checked_messages({"messages": [user({"type": "audio", "audio": "a"})]}, "line 3")
    with pytest.raises(UserError, match="neither text nor an image"):
        checked_messages({"messages": [user({"type": "file"})]}, "line 3")


# -- filters --------------------------------------------------------------------------------------


def test_prompts_that_differ_in_their_images_only_are_different():
    keep = Filter(PromptLimits(), [EvaluationImage("eval.png")])

    def kept(text, *names):
        return keep.keeps({"messages": [user(*(shown(name) for name in names), text)]})

    assert kept(SEE, "a.png") and kept(SEE, "b.png") and kept(SEE, "a.png", "b.png") and kept(SEE)
    assert not kept(SEE.upper(), "a.png") and keep.dropped["duplicate"] == 1
    longer = " ".join(f"word{i}" for i in range(30))
    assert kept(f"{longer} end", "a.png") and kept(f"{longer} end", "b.png")
    assert not kept(f"{longer} stop", "a.png") and keep.dropped["near duplicate"] == 1
    assert not kept(SEE, "c.png", "eval.png")
    assert keep.dropped["overlaps with an evaluation prompt"] == 1


# -- the command ----------------------------------------------------------------------------------


def prompts(*words):
    return cli.main(["prompts", *map(str, words)])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_of_a_file(tmp_path, capsys):
    folder = tmp_path / "llava"
    (folder / "coco").mkdir(parents=True)
    (folder / "coco" / "1.png").write_bytes(picture(1).data)
    (folder / "broken.png").write_bytes(picture(1).data[:50])

    def llava(source, text):
        return {"image": source, "conversations": [{"from": "human", "value": f"<image>\n{text}"}]}

    rows = [
        llava("coco/1.png", SEE),
        llava(uri(1), "And what is on the right of it?"),
        llava(uri(2), SEE),
        llava("coco/1.png", SEE),
        llava("gone.png", SEE),
        llava("broken.png", SEE),
        llava("http://127.0.0.1:9/a.png", SEE),
        {"prompt": "A question about nothing that can be seen"},
    ]
    given = folder / "rows.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "out" / "p.jsonl"
    assert prompts("--source", "file", "--input", given, "--output", output) == 0
    found = lines(output)
    names = {picture(1).name, picture(2).name}
    assert {path.name for path in (tmp_path / "out" / "images").iterdir()} == names
    seen = [row["messages"][0]["content"] for row in found]
    assert sorted(parts[0]["image"] for parts in seen if isinstance(parts, list)) == sorted(
        [picture(1).name, picture(1).name, picture(2).name]
    )
    counts = json.loads((tmp_path / "out" / "p.jsonl.summary.json").read_text())
    assert counts["kept"] == 4
    assert counts["dropped"] == {
        "duplicate": 1,
        "image: no such file": 1,
        "image: broken": 1,
        "image: URL": 1,
    }

    # The stored form reads itself; its images are then an evaluation's.
    again = tmp_path / "again" / "p.jsonl"
    assert prompts("--source", "file", "--input", output, "--output", again) == 0
    assert sorted(row["id"] for row in lines(again)) == sorted(row["id"] for row in found)
    rest = tmp_path / "rest" / "p.jsonl"
    words = ("--source", "file", "--input", given, "--output", rest, "--exclude", output)
    assert prompts(*words) == 2
    assert "overlaps with an evaluation prompt" in capsys.readouterr().err

    # Images elsewhere than the rows.
    moved = tmp_path / "moved.jsonl"
    moved.write_text(json.dumps(rows[0]) + "\n")
    there = tmp_path / "there.jsonl"
    assert prompts("--source", "file", "--input", moved, "--output", there) == 2
    error = capsys.readouterr().err
    assert "image: no such file" in error and "coco/1.png" in error
    words = ("--source", "file", "--input", moved, "--output", there, "--images", folder)
    assert prompts(*words) == 0 and len(lines(there)) == 1


def test_columns_of_datasets(tmp_path):
    table = {
        "question": [f"{SEE} {i}" for i in range(3)],
        "picture": [{"bytes": picture(i).data, "path": None} for i in range(3)],
    }
    folder = tmp_path / "set"
    folder.mkdir()
    rows = Dataset.from_dict(table).cast_column("picture", Image())
    rows.to_parquet(folder / "train.parquet")
    output = tmp_path / "p.jsonl"
    words = ["--source", folder, "--columns", "question=question,image=picture"]
    assert prompts(*words, "--output", output) == 0
    shows = {row["messages"][0]["content"][0]["image"] for row in lines(output)}
    assert shows == {picture(i).name for i in range(3)}


def test_images_that_have_been_decoded(tmp_path):
    class Kept:
        unread = ""
        dropped = Filter(PromptLimits()).dropped

        def keeps(self, prompt):
            return True

    rows = [{"question": SEE, "image": picture(1).pixels()}]
    assert list(collect(rows, Kept(), None, "x")) == []
    assert dict(Kept.dropped) == {"image: no place": 1}


@pytest.fixture
def easy_vqa(monkeypatch, tmp_path):
    """Stands for the package."""
    stored(tmp_path / "package")
    paths = {i: str(tmp_path / "package" / "images" / picture(i).name) for i in range(4)}
    train = (["what is the blue shape?", "is there a circle?"], ["circle", "no"], [0, 1])
    test = (["what color is the shape?"], ["red"], [2])
    package = SimpleNamespace(
        get_train_questions=lambda: train,
        get_test_questions=lambda: test,
        get_train_image_paths=lambda: paths,
        get_test_image_paths=lambda: paths,
    )
    monkeypatch.setitem(sys.modules, "easy_vqa", package)


def test_easy_vqa(easy_vqa, tmp_path, capsys, monkeypatch):
    output = tmp_path / "p.jsonl"
    assert prompts("--source", "easy-vqa", "--output", output) == 0
    found = {row["id"]: row["messages"] for row in lines(output)}
    question = user(shown(picture(0).name), "what is the blue shape?")
    assert found["easy-vqa-train-0"] == [question, answer("circle")]
    assert PictureStore(tmp_path).get(picture(1).name) == picture(1)
    words = ("--source", "easy-vqa", "--split", "test", "--output", tmp_path / "q.jsonl")
    assert prompts(*words) == 2
    assert "test is the suite easy_vqa" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "easy_vqa", None)
    with pytest.raises(UserError, match="pip install easy-vqa"):
        easy_vqa_rows("test")
