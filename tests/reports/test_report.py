from __future__ import annotations

import pytest

from drafttrain import cli
from drafttrain.evaluation.metrics import by_category, summarize
from tests.evaluation.records import OURS, PLAIN, record
from tests.files import dump_json, load_json


@pytest.fixture
def results(tmp_path):
    records = [
        record("chat", OURS, PLAIN, {"tokens": 11, "seconds": 2.5}),
        record("code", OURS, PLAIN, PLAIN),
    ]
    content = {
        "target": "tiny",
        "drafter": "ngram",
        "suite": "mine",
        "dtype": "float32",
        "decoding": {"temperature": 0.0, "tree": {"spec": "chain:2"}},
        "overall": summarize(records),
        "categories": by_category(records),
    }
    path = tmp_path / "results.json"
    dump_json(path, content)
    return path


@pytest.mark.thorough
def test_table_and_picture(results, tmp_path, capsys):
    picture = tmp_path / "out" / "report.png"
    assert cli.main(["report", str(results), str(results), "--output", str(picture)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "tiny + ngram",
        "chain:2",
        "chat",
        "code",
        "2.00x",
        ".75 .67",
        "identical to plain decoding on 2 of 2",
    ):
        assert part in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


@pytest.mark.thorough
def test_a_page_and_a_picture_in_one_call_beside_the_results(
    results, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path.parent)
    assert cli.main(["report", str(results)]) == 0
    assert (tmp_path / "report.html").is_file(), "next to the results, not in the current folder"
    both = [str(tmp_path / "out" / name) for name in ("a.html", "b.png")]
    assert cli.main(["report", str(results), "--output", both[0], "--output", both[1]]) == 0
    assert (tmp_path / "out" / "b.png").read_bytes().startswith(b"\x89PNG")
    assert "<h1>ngram</h1>" in (tmp_path / "out" / "a.html").read_text()
    assert capsys.readouterr().out.count("wrote ") == 3
    # Nothing is written when one of several names cannot be.
    assert (
        cli.main(
            ["report", str(results), "--output", str(tmp_path / "c.html"), "--output", "d.docx"]
        )
        == 2
    )
    assert not (tmp_path / "c.html").exists()


@pytest.mark.thorough
def test_a_picture_without_baselines(results, tmp_path):
    content = load_json(results)
    for figures in (content["overall"], *content["categories"].values()):
        figures |= {"baselines": {}, "speedup": {}, "speedup_vs_fastest": None}
    dump_json(results, content)
    assert cli.main(["report", str(results), "--output", str(tmp_path / "bare.svg")]) == 0
    shown = (tmp_path / "bare.svg").read_text()
    assert "Acceptance by depth" in shown
    assert "Speed-up by category" not in shown


@pytest.mark.parametrize(
    ("content", "output", "message"),
    [
        (None, "r.png", "must be an existing file"),
        ("{broken", "r.png", "is not JSON"),
        (
            '{"sides": {}}',
            "r.png",
            "target: field required; give a file that drafttrain eval wrote",
        ),
        ("{}", "r.docx", "the ending must be one of .html, .png, .svg, .pdf"),
    ],
)
def test_bad_input_is_named(tmp_path, capsys, content, output, message):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert cli.main(["report", str(path), "--output", output]) == 2
    assert message in capsys.readouterr().err
