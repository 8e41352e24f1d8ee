from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest

from drafttrain import cli
from drafttrain.evaluation.metrics import by_category, summarize
from drafttrain.reports import charts
from drafttrain.reports.report_page import differing, make_charts, mark, page, run_names
from tests.evaluation.records import OURS, PLAIN, record
from tests.files import dump_json
from tests.reports.html_page import Page


def results(drafter="ngram", tree="chain:2", same=False, outputs=True):
    records = [
        record("chat", OURS, PLAIN, {"tokens": 11, "seconds": 2.5}),
        record("code", OURS, PLAIN, PLAIN, same=same),
    ]
    for number, one in enumerate(records):
        one |= {"question_id": str(number), "turn": 0, "prompt_tokens": 5}
    if outputs and not same:
        records[1]["outputs"] = {
            "drafter": "if a < b: left()",
            "autoregressive": "if a < b: right() <script>",
        }
    content = {
        "drafttrain": "0.1.0",
        "date": "2026-11-23T05:00:00+00:00",
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
    content["diagnosis"] = [
        {"cause": "domain", "figures": "code accepts less", "advice": "train on code", "off": []}
    ]
    content["overall"]["prompts"] = 12
    content["overall"]["confidence"] = {
        "accepted_length": [1.8, 2.2],
        "speedup": {"autoregressive": [1.9, 2.1], "hf_generate": [1.5, 1.8]},
    }
    return content


def sweep():
    cells = [
        {
            "batch_size": size,
            "tree": tree,
            "temperature": 0.0,
            "overall": {"speedup_vs_fastest": factor},
        }
        for tree, factors in (("chain:3", (1.4, 1.1, 0.8)), ("chain:6", (1.6, 0.9, 0.6)))
        for size, factor in zip((1, 4, 16), factors, strict=True)
    ]
    return {"cells": cells, "crossover": None}


@pytest.fixture
def write(tmp_path):
    def to(name, content):
        path = tmp_path / name
        dump_json(path, content)
        return str(path)

    return to


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A page with two drafters and a sweep."""
    folder = tmp_path_factory.mktemp("report")
    contents = {"a": results(), "b": results("head", same=True), "s": sweep()}
    for name, content in contents.items():
        dump_json(folder / f"{name}.json", content)
    output = folder / "out" / "compared.html"
    assert (
        cli.main(
            [
                "report",
                *(str(folder / f"{name}.json") for name in contents),
                "--output",
                str(output),
            ]
        )
        == 0
    )
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
        "1.62x as fast as transformers generate (95 % interval 1.50 to 1.80, 12 prompts): it pays here. 2.00 tokens per target",
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
    assert pictures == {
        "speedup",
        "speedup_others",
        "accepted_length",
        "acceptance",
        "histogram",
        "ttft_ms",
        "tpot_ms",
        "rates",
    }
    assert all(
        path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "one_charts").iterdir()
    )


@pytest.mark.thorough
def test_several_drafters_and_a_sweep(compared):
    text = " ".join("".join(Page(compared.read_text()).text).split())
    for part in (
        "2 drafters compared",
        "ngram: 1.62x as fast",
        "head: 1.62x as fast",
        "differs",
        "Speed-up by batch size",
    ):
        assert part in text
    assert (
        "Chain:3: stops paying between batch size 4 and 16; chain:6: stops paying between batch size 1 and 4."
        in text
    )
    assert "Tree chain:3: stops paying between batch size 4 and 16." in text
    assert (compared.parent / "compared_charts" / "crossover.png").is_file()


@pytest.mark.thorough
def test_older_results_lack_histogram_texts_and_intervals(write, tmp_path):
    content = results(outputs=False)
    del content["overall"]["accepted_length_histogram"], content["overall"]["confidence"]
    del content["diagnosis"], content["device"], content["versions"], content["date"]
    output = tmp_path / "old.html"
    assert cli.main(["report", write("a.json", content), "--output", str(output)]) == 0
    source = output.read_text()
    assert "came without the texts" in source
    assert (tmp_path / "old_charts" / "histogram.png").is_file(), "made from the prompts' rounds"
    assert "95 % interval" not in " ".join(source.split()).replace("intervals", ""), (
        "none is recorded"
    )
    assert "no interval is known" in source


def test_both_forms_of_a_cell_and_an_axis_of_its_own():
    flat = {
        "cells": [
            {"cell": {k: v for k, v in cell.items() if k != "overall"}, **cell["overall"]}
            for cell in sweep()["cells"]
        ]
    }
    for cell in flat["cells"]:
        cell["spec"] = cell["cell"]["tree"]
        cell["cell"]["tree"] = None if cell["spec"] == "chain:3" else cell["spec"]
    nested = make_charts([], [], [sweep()])
    assert [chart.key for chart in nested] == ["crossover", "sweep_tree"]
    assert [chart.rows() for chart in make_charts([], [], [flat])] == [
        chart.rows() for chart in nested
    ]
    assert nested[1].rows() == [("chain:3", ["1.40\u00d7"]), ("chain:6", ["1.60\u00d7"])]


@pytest.mark.thorough
def test_a_sweep_alone_and_where_it_cannot_go(write, tmp_path, capsys):
    file = write("s.json", sweep())
    assert cli.main(["report", file, "--output", str(tmp_path / "s.html")]) == 0
    text = " ".join("".join(Page((tmp_path / "s.html").read_text()).text).split())
    for part in (
        "Sweep",
        "Speed-up by batch size",
        "chain:60.016\u2013\u20130.60\u00d7no interval recorded",
        "Settings of",
    ):
        assert part in text
    assert cli.main(["report", file, "--output", str(tmp_path / "s.png")]) == 2
    assert "end the name in .html" in capsys.readouterr().err


def test_names_say_what_differs():
    one = results()
    two = results(tree="chain:4")
    assert run_names([one], ["a.json"]) == ["ngram"]
    assert run_names([one, two], ["a.json", "b.json"]) == ["chain:2", "chain:4"]
    assert run_names([one, one], ["x/a.json", "b.json"]) == ["a", "b"]


def test_only_comparable_runs_get_a_ratio_and_a_best():
    """Equal runs are within noise; a run of another dtype or with other limits gets no ratio, and none is called best."""
    slow = results()
    fast = results("head")
    for number, one in enumerate(slow["prompts"] * 4):
        for run, seconds in ((slow, 2.0), (fast, 1.0)):
            run["prompts"] += [{**json.loads(json.dumps(one)), "question_id": f"more {number}"}]
            run["prompts"][-1]["sides"]["drafter"]["seconds"] = seconds + 0.01 * number
    for run in (slow, fast):
        run["overall"] = summarize(run["prompts"])
    assert differing([slow, fast]) == []

    def source(*runs):
        names = run_names(runs, ["a", "b"])
        return " ".join(
            "".join(Page(page(runs, names, [], [["outputs: the same"]] * 2)).text).split()
        )

    text = source(slow, fast)
    assert "Times as fast as ngram11.65 (1.33 to 1.97), faster" in text and "\N{BLACK STAR}" in text
    text = source(slow, {**slow, "drafter": "head", "overall": {**slow["overall"], "mbsu": 9.0}})
    assert (
        "Times as fast as ngram11.00 (1.00 to 1.00), within noise" in text
        and "\N{BLACK STAR}" not in text
    )
    other = {**fast, "dtype": "bfloat16", "decoding": {**fast["decoding"], "max_new_tokens": 32}}
    assert differing([{**slow, "decoding": {**slow["decoding"], "max_new_tokens": 64}}, other]) == [
        "dtype (float32, bfloat16)",
        "max new tokens (64, 32)",
    ]
    text = source(slow, other)
    assert "Not comparable. The runs differ in dtype (float32, bfloat16)." in text
    assert "Times as fast" not in text and "\N{BLACK STAR}" not in text


def test_one_drafter_on_two_suites_is_not_called_two():
    runs = [results(), {**results(), "suite": "other", "suite_digest": "x"}]

    def heading(*runs):
        names = run_names(runs, ["a.json", "b.json"])
        source = page(runs, names, [], [["outputs: the same"]] * 2)
        return re.search(r"<h1>(.*)</h1>", source)[1], "Drafters compared" in source

    assert heading(*runs) == ("2 results of ngram compared", False)
    assert heading(runs[0], results("head")) == ("2 drafters compared", True)


def test_every_chart_names_both_of_its_axes():
    for chart in make_charts([results()], ["a"], [sweep()]):
        assert chart.label and chart.unit, chart.key
        drawn = charts.svg(chart, "c")
        assert f">{chart.label}</text>" in drawn and f">{chart.unit}</text>" in drawn, chart.key


def test_a_slow_baseline_does_not_flatten_the_speed_up():
    run = results()
    run["overall"]["speedup"] |= {"hf_prompt_lookup": 4.0, "hf_assisted": 38.0}
    speedup, others = make_charts([run], ["a"], [])[:2]
    assert (speedup.title, speedup.longest(), len(speedup.series)) == (
        "Speed-up by category",
        2.1,
        1,
    )
    assert others.labels == [
        "transformers generate",
        "transformers prompt lookup",
        "transformers assisted",
    ]
    assert others.top == pytest.approx(5.2) and "is cut" in others.note
    assert "38.00\u00d7, bar cut" in charts.svg(others, "c")
    del run["overall"]["speedup"]["hf_assisted"]
    assert make_charts([run], ["a"], [])[1].top is None


def test_intervals_need_several_prompts():
    run = results()
    run["overall"]["prompts"] = 3
    (chart, *_) = make_charts([run], ["a"], [])
    assert chart.rows()[-1] == ("all", ["2.00\u00d7"])


def test_advice_of_earlier_versions_is_given_anew():
    run = results()
    assert "train on code" in page([run], ["a"], [], [["outputs: the same"]])
    del run["date"]
    old = page([run], ["a"], [], [["outputs: the same"]])
    assert "train on code" not in old and "<dt>verdict</dt><dd>it pays here" in old


def test_words_that_differ_are_marked():
    left, right = mark("the cat sat", "the dog sat down")
    assert left == [("same", "the "), ("del", "cat"), ("same", " sat")]
    assert right == [("same", "the "), ("ins", "dog"), ("same", " sat"), ("ins", " down")]
    left, _ = mark("a " * 200 + "x", "a " * 200 + "y")
    assert left[0][1].startswith("\u2026") and len(left[0][1]) < 200


def test_charts_are_tables_too():
    (chart, *_) = make_charts([results(), results("head")], ["ngram", "head"], [])
    assert chart.rows()[-1] == ("all", ["2.00\u00d7 (1.90\u00d7 to 2.10\u00d7)"] * 2)
    assert 'aria-label="Speed-up by category' in charts.svg(chart, "c")


def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, (os.environ.get("CHROME", ""), *names))), None)


@pytest.mark.skipif(
    browser() is None, reason="no Chromium on this machine (set CHROME to its path)"
)
@pytest.mark.parametrize("width", [1280, 400])
def test_it_renders_without_console_errors(compared, tmp_path, width):
    """A script added to a copy reports the layout; the page itself has none, and the console must stay silent.

    The copy is in a frame, because a browser's window cannot be as narrow as a telephone's.
    """
    probe = tmp_path / "probe.html"
    frame = tmp_path / "frame.html"
    listen = "<title></title><script>onmessage = event => document.title = event.data</script>"
    frame.write_text(
        f'{listen}<iframe src="probe.html" style="border: 0; width: {width}px; height: 900px"></iframe>'
    )
    wide = "document.documentElement.scrollWidth - innerWidth"
    drawn = "document.querySelectorAll('figure svg path').length"
    measure = f"parent.postMessage([{wide}, {drawn}].join(), '*')"
    probe.write_text(compared.read_text().replace("</body>", f"<script>{measure}</script></body>"))
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=3000",
    ]
    done = subprocess.run(
        [
            browser(),
            *flags,
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            frame.as_uri(),
        ],
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
