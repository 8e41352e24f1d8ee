from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from drafttrain import cli
from drafttrain.evaluation.metrics import by_category, summarize
from drafttrain.reports import charts
from drafttrain.reports.report_page import crossover, make_charts, mark, run_names, verdict
from tests.evaluation.test_metrics import OURS, PLAIN, record

VOID = {"meta", "link", "br", "path", "rect", "use", "circle", "line"}


def results(drafter="ngram", tree="chain:2", same=False, outputs=True):
    records = [
        record("chat", OURS, PLAIN, {"tokens": 11, "seconds": 2.5}),
        record("code", OURS, PLAIN, PLAIN, same=same),
    ]
    for number, one in enumerate(records):
        one |= {"question_id": str(number), "turn": 0, "prompt_tokens": 5}
    if outputs and not same:
        records[1]["outputs"] = {"drafter": "if a < b: left()", "autoregressive": "if a < b: right() <script>"}
    content = {
        "drafttrain": "0.1.0",
        "versions": {"torch": "2.13"},
        "command": ["drafttrain", "eval"],
        "device": "a CPU",
        "target": "tiny",
        "drafter": drafter,
        "suite": "mine",
        "dtype": "float32",
        "decoding": {"temperature": 0.0, "batch_size": 1, "tree": {"spec": tree}},
        "overall": summarize(records),
        "categories": by_category(records),
        "prompts": records,
    }
    content["diagnosis"] = [{"cause": "domain", "figures": "code accepts less", "advice": "train on code", "off": []}]
    content["overall"]["confidence"] = {
        "accepted_length": [1.8, 2.2],
        "speedup": {"autoregressive": [1.9, 2.1], "hf_generate": [1.5, 1.8]},
    }
    return content


def sweep():
    cells = [
        {"batch_size": size, "tree": tree, "temperature": 0.0, "overall": {"speedup_vs_fastest": factor}}
        for tree, factors in (("chain:3", (1.4, 1.1, 0.8)), ("chain:6", (1.6, 0.9, 0.6)))
        for size, factor in zip((1, 4, 16), factors, strict=True)
    ]
    return {"cells": cells, "crossover": None}


class Page(HTMLParser):
    """Checks that tags close in order, and gathers what a page refers to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.text = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs[key] for key in ("href", "src", "xlink:href") if key in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def write(tmp_path):
    def to(name, content):
        path = tmp_path / name
        path.write_text(json.dumps(content))
        return str(path)

    return to


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A page with two drafters and a sweep."""
    folder = tmp_path_factory.mktemp("report")
    contents = {"a": results(), "b": results("head", same=True), "s": sweep()}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    output = folder / "out" / "compared.html"
    assert cli.main(["report", *(str(folder / f"{name}.json") for name in contents), "--output", str(output)]) == 0
    return output


@pytest.mark.thorough
def test_one_drafter(write, tmp_path, capsys):
    output = tmp_path / "one.html"
    assert cli.main(["report", write("a.json", results()), "--output", str(output)]) == 0
    assert "tiny + ngram" in capsys.readouterr().out, "the table in the terminal stays"
    source = output.read_text()
    page = Page(source)
    text = " ".join("".join(page.text).split())
    for part in (
        "1.62 times as fast as the faster baseline (95 % interval 1.50 to 1.80), at 2.00 tokens per target pass.",
        "over the faster baseline; 95 % interval 1.50 to 1.80",
        "code, question 1, turn 1",
        "In float32 all should be: please report this",
        "drafttrain eval",
        "2.13",
    ):
        assert part in text
    assert "<del>right</del>" in source
    assert "<ins>left</ins>" in source
    assert "train on code" in text
    assert "<script" not in source, "text of the results is escaped"
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith(("#", "data:")) for link in page.links), "a page stands alone"
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert not re.search(r"#fe01[0-9a-f]{2}", source), "every colour follows the theme"
    pictures = {path.stem for path in (tmp_path / "one_charts").iterdir()}
    assert pictures == {"speedup", "accepted_length", "acceptance", "histogram", "ttft_ms", "tpot_ms", "rates"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "one_charts").iterdir())


@pytest.mark.thorough
def test_several_drafters_and_a_sweep(compared):
    text = " ".join("".join(Page(compared.read_text()).text).split())
    for part in ("2 drafters compared", "ngram: 1.62 times", "head: 1.62 times", "differs", "Speed-up by batch size"):
        assert part in text
    assert "Chain:3: stops paying between 4 and 16; chain:6: stops paying between 1 and 4." in text
    assert (compared.parent / "compared_charts" / "crossover.png").is_file()


@pytest.mark.thorough
def test_older_results_lack_histogram_texts_and_intervals(write, tmp_path):
    content = results(outputs=False)
    del content["overall"]["accepted_length_histogram"], content["overall"]["confidence"]
    del content["diagnosis"], content["device"], content["versions"]
    output = tmp_path / "old.html"
    assert cli.main(["report", write("a.json", content), "--output", str(output)]) == 0
    source = output.read_text()
    assert "came without the texts" in source
    assert (tmp_path / "old_charts" / "histogram.png").is_file(), "made from the prompts' rounds"
    assert "interval" not in source


def test_both_forms_of_a_cell_and_an_axis_of_its_own():
    flat = {
        "cells": [
            {"cell": {k: v for k, v in cell.items() if k != "overall"}, **cell["overall"]} for cell in sweep()["cells"]
        ]
    }
    for cell in flat["cells"]:
        cell["spec"] = cell["cell"]["tree"]
        cell["cell"]["tree"] = None if cell["spec"] == "chain:3" else cell["spec"]
    nested = make_charts([], [], [sweep()])
    assert [chart.key for chart in nested] == ["crossover", "sweep_tree"]
    assert [chart.rows() for chart in make_charts([], [], [flat])] == [chart.rows() for chart in nested]
    assert nested[1].rows() == [("chain:3", ["1.40\u00d7"]), ("chain:6", ["1.60\u00d7"])]


@pytest.mark.thorough
def test_a_sweep_alone_and_where_it_cannot_go(write, tmp_path, capsys):
    file = write("s.json", sweep())
    assert cli.main(["report", file, "--output", str(tmp_path / "s.html")]) == 0
    assert "Speed-up by batch size" in (tmp_path / "s.html").read_text()
    assert cli.main(["report", file, "--output", str(tmp_path / "s.png")]) == 2
    assert "end the name in .html" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ((1.5, 1.2), "pays up to 4 at least"),
        ((1.5, 0.9), "stops paying between 1 and 4"),
        ((0.9, 1.2), "does not pay, from 1 on"),
        ((None, 0.9), "does not pay, from 4 on"),
        ((None, None), "not measured"),
    ],
)
def test_crossover_in_words(factors, words):
    assert crossover((1, 4), factors) == words


def test_names_say_what_differs():
    one, two = results(), results(tree="chain:4")
    assert run_names([one], ["a.json"]) == ["ngram"]
    assert run_names([one, two], ["a.json", "b.json"]) == ["chain:2", "chain:4"]
    assert run_names([one, one], ["x/a.json", "b.json"]) == ["a", "b"]


def test_verdicts_do_not_flatter():
    overall = {"speedup_vs_fastest": 0.8, "accepted_length": 1.1, "tokens_per_second": 5.0}
    assert verdict(overall) == (
        "0.80 times the faster baseline: slower than not speculating, at 1.10 tokens per target pass.",
        "bad",
    )
    assert verdict(overall | {"speedup_vs_fastest": 1.01})[1] == ""
    assert "no baseline was run" in verdict(overall | {"speedup_vs_fastest": None})[0]


def test_words_that_differ_are_marked():
    left, right = mark("the cat sat", "the dog sat down")
    assert left == [("same", "the "), ("del", "cat"), ("same", " sat")]
    assert right == [("same", "the "), ("ins", "dog"), ("same", " sat"), ("ins", " down")]
    left, _ = mark("a " * 200 + "x", "a " * 200 + "y")
    assert left[0][1].startswith("\u2026") and len(left[0][1]) < 200


def test_charts_are_tables_too():
    (chart, *_) = make_charts([results(), results("head")], ["ngram", "head"], [])
    assert chart.rows()[-1] == ("all", ["1.62\u00d7 (1.50\u00d7 to 1.80\u00d7)"] * 2)
    assert 'aria-label="Speed-up by category' in charts.svg(chart, "c")


def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, (os.environ.get("CHROME", ""), *names))), None)


@pytest.mark.skipif(browser() is None, reason="no Chromium on this machine (set CHROME to its path)")
@pytest.mark.parametrize("width", [1280, 500])
def test_it_renders_without_console_errors(compared, tmp_path, width):
    """A script added to a copy reports the layout; the page itself has none, and the console must stay silent."""
    probe = tmp_path / "probe.html"
    wide, drawn = (
        "document.documentElement.scrollWidth - innerWidth",
        "document.querySelectorAll('figure svg path').length",
    )
    measure = f"document.title = [{wide}, {drawn}]"
    probe.write_text(compared.read_text().replace("</body>", f"<script>{measure}</script></body>"))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},900"]
    done = subprocess.run(
        [browser(), *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", probe.as_uri()],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>([^<]*)</title>", done.stdout)
    overflow, paths = map(int, title[1].split(","))
    assert overflow <= 0, "the page scrolls sideways"
    assert paths > 20
