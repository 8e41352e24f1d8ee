"""Rows with images: the forms that are read, what is refused, filters, and `drafttrain prompts`."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import datasets
import pytest
from datasets import Dataset, Image

from drafttrain import cli
from drafttrain.data.filters import EvaluationImage, Filter, PromptLimits
from drafttrain.data.row_formats import checked_messages, parse_row
from drafttrain.errors import UserError
from drafttrain.images import BadPicture, PictureStore
from tests.data.seeing import answer, picture, said, shown, stored, user, write_rows
from tests.files import load_json, load_jsonl

SEE = "What is on the left of this picture?"
IMAGE = {"type": "image"}


def human(text, **row):
    return {**row, "conversations": [{"from": "human", "value": text}]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # OpenAI, with an object and with a bare string; HF with each of its keys.
        ({"messages": [user({"type": "image_url", "image_url": {"url": "a"}}, SEE)]}, ["a", SEE]),
        ({"messages": [user(SEE, {"type": "image_url", "image_url": "a"})]}, [SEE, "a"]),
        (
            {"messages": [user(shown("a"), {**IMAGE, "path": "b"}, {**IMAGE, "url": "c"})]},
            list("abc"),
        ),
        # Places in the messages, images in a column.
        ({"messages": [user(IMAGE, SEE, IMAGE)], "images": ["a", "b"]}, ["a", SEE, "b"]),
        # LLaVA and ShareGPT4V.
        (human(f"<image>\n{SEE}", image="coco/1.jpg"), ["coco/1.jpg", SEE]),
        (human("One <image>, two <image>.", images=["a", "b"]), ["One ", "a", ", two ", "b", "."]),
        # A column alone: the images stand before the first question.
        ({"question": SEE, "answer": "no", "image": {"bytes": b"x"}}, [{"bytes": b"x"}, SEE]),
    ],
)
def test_forms_of_rows(row, expected):
    parts = parse_row(row)["messages"][0]["content"]
    assert [part.get("image", part.get("text")) for part in parts] == expected
    assert all(part["type"] == ("image" if "image" in part else "text") for part in parts)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [user(IMAGE, SEE)]}, "image: no place"),
        ({"messages": [user(shown("a"), SEE)], "images": ["b"]}, "image: no place"),
        (human("<image> or <image>", image="a"), "image: no place"),
        ({"messages": [user(SEE, {"type": "input_audio", "input_audio": {}})]}, "audio or video"),
        ({"messages": [user(SEE, {"type": "video", "video": "a.mp4"})]}, "audio or video"),
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
    assert parse_row(plain)["messages"][0]["content"] == "a\nb"
    assert parse_row(human("What does <image> do?"))["messages"][0]["content"].count("<image>") == 1


def test_messages_of_a_prompts_file():
    row = {"messages": [user({"type": "image_url", "image_url": {"url": "a"}}, SEE)]}
    assert checked_messages(row, "p")[0]["content"] == [shown("a"), said(SEE)]
    for part, message in (
        ("audio", "line 3: audio or video"),
        ("file", "neither text nor an image"),
    ):
        with pytest.raises(UserError, match=message):
            checked_messages({"messages": [user({"type": part})]}, "line 3")


def test_prompts_that_differ_in_their_images_only_are_different():
    keep = Filter(PromptLimits(), [EvaluationImage("eval.png")])

    def kept(text, *names):
        return keep.keeps({"messages": [user(*map(shown, names), text)]})

    longer = " ".join(f"word{i}" for i in range(30))
    for text in (SEE, f"{longer} end"):
        assert kept(text, "a.png") and kept(text, "b.png") and kept(text, "a.png", "b.png")
    assert not kept(SEE.upper(), "a.png") and not kept(f"{longer} stop", "a.png")
    assert not kept(SEE, "c.png", "eval.png")
    reasons = ("duplicate", "near duplicate", "overlaps with an evaluation prompt")
    assert keep.dropped == dict.fromkeys(reasons, 1)


# -- the command ----------------------------------------------------------------------------------


def prompts(*words):
    return cli.main(["prompts", *map(str, words)])


def lines(path):
    return load_jsonl(path)


def test_rows_of_a_file(tmp_path, capsys):
    given = tmp_path / "llava" / "rows.jsonl"
    (given.parent / "coco").mkdir(parents=True)
    (given.parent / "coco" / "1.png").write_bytes(picture(1).data)
    (given.parent / "broken.png").write_bytes(picture(1).data[:50])
    sources = ["coco/1.png", picture(2).uri, "coco/1.png", "gone.png", "broken.png", "http://a/b"]
    rows = [human(f"<image>\n{SEE}", image=source) for source in sources]
    write_rows(given, [*rows, human("A question about nothing that can be seen")], 0)
    output = tmp_path / "out" / "p.jsonl"
    words = ("--source", "file", "--input", given)
    assert prompts(*words, "--output", output) == 0
    names = {picture(1).name, picture(2).name}
    assert {path.name for path in (output.parent / "images").iterdir()} == names
    found = [row["messages"][0]["content"] for row in lines(output)]
    assert {parts[0]["image"] for parts in found if isinstance(parts, list)} == names
    counts = load_json(output.with_name("p.jsonl.summary.json"))
    bad = ("duplicate", "image: no such file", "image: broken", "image: URL")
    assert counts["kept"] == 3 and counts["dropped"] == dict.fromkeys(bad, 1)

    # The stored form is read again; as an evaluation's, its images are not learned.
    again = tmp_path / "again.jsonl"
    assert prompts("--source", "file", "--input", output, "--output", again) == 0
    assert {row["id"] for row in lines(again)} == {row["id"] for row in lines(output)}
    words = ("--source", "file", "--output", tmp_path / "rest.jsonl", "--input")
    assert prompts(*words, given, "--exclude", output) == 2
    assert "overlaps with an evaluation prompt" in capsys.readouterr().err

    # Images elsewhere than the rows.
    moved = tmp_path / "moved.jsonl"
    write_rows(moved, rows[:1], 0)
    assert prompts(*words, moved) == 2
    assert "image: no such file" in capsys.readouterr().err
    assert prompts(*words, moved, "--images", given.parent) == 0


def test_columns_of_datasets(tmp_path, monkeypatch):
    # Which the library waits behind a shuffled stream, for the sake of a process that ends.
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # of 5 seconds
    table = {
        "question": [f"{SEE} {i}" for i in range(3)],
        "picture": [{"bytes": picture(i).data, "path": None} for i in range(3)],
    }
    (tmp_path / "set").mkdir()
    Dataset.from_dict(table).cast_column("picture", Image()).to_parquet(
        tmp_path / "set" / "a.parquet"
    )
    output = tmp_path / "p.jsonl"
    words = ("--source", tmp_path / "set", "--columns", "question=question,image=picture")
    assert prompts(*words, "--output", output) == 0
    found = {row["messages"][0]["content"][0]["image"] for row in lines(output)}
    assert found == {picture(i).name for i in range(3)}


def test_easy_vqa(
    tmp_path,
    capsys,
    monkeypatch,
):
    names = stored(tmp_path / "package")
    package = SimpleNamespace(
        get_train_questions=lambda: (["what is the blue shape?"], ["circle"], [0]),
        get_train_image_paths=lambda: {0: str(tmp_path / "package" / "images" / names[0])},
    )
    monkeypatch.setitem(sys.modules, "easy_vqa", package)
    output = tmp_path / "p.jsonl"
    words = ("--source", "easy-vqa", "--output", output)
    assert prompts(*words) == 0
    (row,) = lines(output)
    assert row["id"] == "easy-vqa-train-0" and PictureStore(tmp_path).get(names[0])
    assert row["messages"] == [user(shown(names[0]), "what is the blue shape?"), answer("circle")]
    monkeypatch.setitem(sys.modules, "easy_vqa", None)
    for more, message in (
        ("--split=test", "the suite easy_vqa"),
        ("--seed=1", "pip install easy-vqa"),
    ):
        assert prompts(*words, "--overwrite", more) == 2
        assert message in capsys.readouterr().err
