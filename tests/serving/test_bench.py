"""Against a small server of our own: streaming, errors of every kind, and both engines' Prometheus pages."""

from __future__ import annotations

import asyncio
import itertools
import json
from argparse import Namespace
from types import SimpleNamespace

import httpx
import pytest
import torch

from drafttrain import cli
from drafttrain.data.servers import server_address
from drafttrain.files import write_jsonl
from drafttrain.serving import client
from drafttrain.serving.bench import Load, compare, figures
from drafttrain.serving.client import Answer, parse_metrics, passes, speculation
from drafttrain.serving.draft_lengths import servers
from tests.conftest import make_target
from tests.drafters.layer_kinds import make_kind
from tests.files import ROOT, load_json, load_jsonl
from tests.serving.fake_server import FakeServer, vllm_page
from tests.states.stand_ins import engine

KEPT = torch.arange(40, 240)
SGLANG = """sglang:spec_verify_calls_total{{model_name="tiny"}} {passes}
sglang:generation_tokens_total{{model_name="tiny",is_streaming="true"}} {tokens}
sglang:num_requests_total{{model_name="tiny",is_streaming="true"}} {requests}
sglang:token_usage{{model_name="tiny"}} NaN
"""


def sglang_page(requests):
    """Of answers of eleven tokens in four passes behind the prompt's."""
    return SGLANG.format(passes=4 * requests, tokens=11 * requests, requests=requests)


@pytest.fixture
def bench(tmp_path):
    suite = tmp_path / "suite.jsonl"
    write_jsonl(suite, [{"turns": [f"question {i}"]} for i in range(3)])

    def run(*arguments, status=0):
        output = tmp_path / "server.json"
        base = [
            "bench-server",
            "--suite",
            str(suite),
            "--output",
            str(output),
            "--requests",
            "6",
            "--max-tokens",
            "8",
        ]
        assert cli.main([*base, *map(str, arguments)]) == status
        return json.loads(output.read_text()) if output.is_file() else None

    return run


@pytest.mark.thorough
def test_a_concurrency_sweep(bench, capsys, monkeypatch):
    # Each look of the client at its clock is 20 ms later than the one before, however fast the machine is.
    ticks = itertools.count()
    monkeypatch.setattr(client, "time", SimpleNamespace(perf_counter=lambda: 0.02 * next(ticks)))
    with FakeServer(gap=0.02, page=lambda asked: vllm_page(100 + 8 * asked)) as server:
        results = bench(
            "--url",
            server.url + "/v1/",
            "--concurrency",
            "1,3",
            "--warm-up",
            "1",
            "--note",
            "quiet",
        )
        assert server.most == 3
    assert len(server.asked) == 1 + 6 + 6
    assert [body["messages"][0]["content"] for body in server.asked[1:4]] == [
        "question 0",
        "question 1",
        "question 2",
    ]
    assert {(body["model"], body["stream"], body["max_tokens"]) for body in server.asked} == {
        ("tiny", True, 8)
    }
    assert results["note"] == "quiet"
    assert {"drafttrain", "versions", "device", "command", "workload"} <= results.keys()
    one, three = results["servers"]["url"]["cells"]
    assert (one["concurrency"], one["completed"], one["errors"], one["tokens"]) == (1, 6, {}, 48)
    assert one["tokens_counted"] is True
    assert one["tokens_per_chunk"] == 2.0
    # Four pieces 20 ms apart: the first after one gap; seven tokens follow it in three gaps; the end comes a gap later.
    assert (one["ttft_ms"]["p50"], one["itl_ms"]["p50"], one["latency_ms"]["p50"]) == (
        20.0,
        20.0,
        100.0,
    )
    assert one["tpot_ms"]["p50"] == pytest.approx(3 * 20 / 7, abs=1e-3)
    assert one["tokens_per_second"] == pytest.approx(48 / one["seconds"], rel=0.01)
    for cell in (one, three):
        assert cell["speculation"] == {
            "source": "vllm counters",
            "drafts": 48,
            "accepted_length": 1.75,
            "acceptance_rate": 0.375,
            "acceptance_by_depth": {"conditional": [0.5, 0.5], "joint": [0.5, 0.25]},
        }
    shown = capsys.readouterr().out
    assert "3 at once" in shown
    assert "1.75" in shown


@pytest.mark.thorough
def test_two_servers_take_turns(bench, capsys):
    # The slow server never answers within 100 ms; a busy machine delays the quick one by less.
    with FakeServer(page=sglang_page) as quick, FakeServer(gap=0.1) as slow:
        more = ("--concurrency", "1,2", "--warm-up", 0, "--requests", 1)
        results = bench("--url", quick.url, "--url2", slow.url, *more)
    assert [len(server.asked) for server in (quick, slow)] == [8, 8]  # four times each step
    assert results["workload"]["repeats"] == 4
    cells = results["servers"]["url"]["cells"]
    assert cells[0]["speculation"] == {
        "source": "sglang counters",
        "drafts": 16,
        "accepted_length": 2.5,
        "acceptance_rate": None,
    }
    assert "speculation" not in results["servers"]["url2"]["cells"][0]
    shown = capsys.readouterr().out
    assert "url over url2 (above 1" in shown
    for row in results["comparison"]:
        assert (row["server"], row["over"]) == ("url", "url2")
        assert min(row["tokens_per_second"], row["ttft_ms"], row["tpot_ms"], row["latency_ms"]) > 1
        low, high = row["interval"]
        assert 1 < low <= row["tokens_per_second"] <= high
        assert f"x ({low:.2f} to {high:.2f})" in shown


def test_a_noisy_comparison_says_how_little_it_knows():
    """The same two servers gave 1.40 and 0.58 in two runs; one repeat has no interval."""

    def cells(*seconds):
        answers = [Answer([0.1], 10, True, 0.2)] * len(seconds)
        cell = figures(answers, sum(seconds))
        cell["repeats"] = {"tokens": [10] * len(seconds), "seconds": list(seconds)}
        return {"cells": [{"concurrency": 1, **cell}]}

    (row,) = compare(cells(1.0, 2.4, 1.0, 2.4), cells(1.4, 1.4, 1.4, 1.4))
    low, high = row["interval"]
    assert low < 0.7 and high > 1.3
    (row,) = compare(cells(1.0, 1.01, 0.99, 1.0), cells(1.4, 1.41, 1.4, 1.39))
    low, high = row["interval"]
    assert 1.38 < low < row["tokens_per_second"] < high < 1.42
    assert compare(cells(1.0), cells(1.4))[0]["interval"] is None


def test_the_ratio_of_short_repeats_lies_in_its_interval():
    """Rounded to milliseconds, these repeats gave a ratio of 52.6 beside an interval up to 51.5."""

    def results(*seconds):
        load = Load({"concurrency": 1})
        for took in seconds:
            load.answers.append(Answer([took], 10, True, took))
            load.tokens.append(10)
            load.seconds.append(took)
        return {"cells": [load.cell()]}

    quick = results(0.00951, 0.00952, 0.00953, 0.00954)
    slow = results(0.5002, 0.5003, 0.5001, 0.5002)
    (row,) = compare(quick, slow)
    low, high = row["interval"]
    assert row["tokens_per_second"] == pytest.approx(2.0008 / 0.0381, abs=1e-3)
    assert low <= row["tokens_per_second"] <= high


@pytest.mark.thorough
def test_requests_at_a_rate_do_not_wait_for_each_other(bench):
    with FakeServer(pieces=2, gap=0.15) as server:
        results = bench("--url", server.url, "--request-rate", 40, "--warm-up", 0)
        assert server.most > 2
    (cell,) = results["servers"]["url"]["cells"]
    assert (cell["request_rate"], cell["completed"]) == (40.0, 6)


@pytest.mark.thorough
def test_a_step_ends_in_time(bench):
    with FakeServer(pieces=1, gap=0.1) as server:
        closed = bench("--url", server.url, "--concurrency", 1, "--seconds", 0.25, "--warm-up", 0)
        opened = bench("--url", server.url, "--request-rate", 1, "--seconds", 0.25, "--warm-up", 0)
    assert 1 <= closed["servers"]["url"]["cells"][0]["requests"] <= 3
    assert 1 <= opened["servers"]["url"]["cells"][0]["requests"] <= 3


@pytest.mark.thorough
def test_errors_are_counted_by_kind(bench, capsys):
    ways = ["busy", "garbage", "error", "empty", "cut", "hang"]
    with FakeServer(behave=lambda number: ways[number] if number < 6 else "fine") as server:
        results = bench(
            "--url",
            server.url,
            "--concurrency",
            1,
            "--warm-up",
            0,
            "--requests",
            8,
            "--timeout",
            1.5,
        )
    (cell,) = results["servers"]["url"]["cells"]
    assert cell["errors"] == {"http_503": 1, "stream": 2, "server": 1, "empty": 1, "timeout": 1}
    assert (cell["requests"], cell["completed"], cell["tokens"]) == (8, 2, 16)
    assert cell["error_examples"]["http_503"] == '{"error": "overloaded"}'
    assert "1 http_503" in capsys.readouterr().out


def test_all_failed_is_a_failure(bench):
    with FakeServer(behave=lambda number: "busy") as server:
        results = bench("--url", server.url, "--concurrency", 2, "--warm-up", 0, status=1)
    assert results["servers"]["url"]["cells"][0]["ttft_ms"]["p50"] == 0.0


def test_without_usage_each_piece_counts(bench, capsys):
    with FakeServer(usage=False) as server:
        results = bench("--url", server.url, "--concurrency", 1, "--warm-up", 0)
    (cell,) = results["servers"]["url"]["cells"]
    assert (cell["tokens"], cell["tokens_counted"]) == (24, False)
    assert "does not count tokens" in capsys.readouterr().out


def test_more_tokens_than_were_asked_for_are_an_error(bench):
    with FakeServer(usage=10**6) as server:
        results = bench("--url", server.url, "--concurrency", 1, "--warm-up", 0, status=1)
    (cell,) = results["servers"]["url"]["cells"]
    assert cell["errors"] == {"server": cell["requests"]} and cell["tokens"] == 0


@pytest.mark.parametrize(
    ("status", "piece", "encoding", "error"),
    [
        (500, b" " * 1000, "", "http_500: endless: a line of 11000 bytes and no end"),
        (500, b"\n" * 1000, "", "http_500: "),
        (500, b"too busy\n" * 1000, "", "http_500: too busy"),
        (200, b"data: " + b"[" * 1000, "", "stream: endless: a line of 10060 bytes and no end"),
        (200, b": a comment\n" * 1000, "", "stream: endless: 108000 bytes and no end"),
        (200, b"", "gzip, gzip", "stream: bad encoding: Content-Encoding: gzip, gzip"),
        (500, b"", "br", "http_500: bad encoding: Content-Encoding: br"),
    ],
)
def test_replies_are_bounded(monkeypatch, status, piece, encoding, error):
    monkeypatch.setattr(client, "_LONGEST_STREAM", 100_000)
    monkeypatch.setattr(client, "_LONGEST_PAGE", 100_000)
    monkeypatch.setattr(client, "_LONGEST_LINE", 10_000)

    async def endless():
        while True:
            yield piece

    async def asked():
        def reply(request):
            return httpx.Response(status, content=endless(), headers={"Content-Encoding": encoding})

        async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as requests:
            server = client.Server("http://server", "m")
            assert await client.read_metrics(requests, server) == {}
            return await client.ask(requests, server, {"messages": []}, 5.0)

    answer = asyncio.run(asked())
    assert f"{answer.error}: {answer.detail}" == error


def test_keys_come_from_the_environment(bench, monkeypatch, capsys):
    monkeypatch.setenv("TINY_KEY", "secret")
    monkeypatch.setenv("WORD", "opensesame-7")  # its name does not say that it is a key
    with FakeServer(behave=lambda number: "echo") as server:
        results = bench("--url", server.url, "--api-key-env", "WORD", "--warm-up", 0, status=1)
        example = results["servers"]["url"]["cells"][0]["error_examples"]["http_403"]
        assert example == "wrong key: ***"
    with FakeServer() as server:
        results = bench(
            "--url", server.url, "--api-key-env", "TINY_KEY", "--concurrency", 1, "--warm-up", 0
        )
        assert bench("--url", server.url, "--api-key-env", "NO_SUCH_KEY", status=2)
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in json.dumps(results)
    assert "no such environment variable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "localhost:8000"], "is not an address"),
        (["--url", "http://127.0.0.1:9"], "does not say which models it has"),
        (["--url", "http://127.0.0.1:9", "--model", "m"], "does not answer"),
        (["--url", "http://127.0.0.1:9", "--request-rate", "x"], "request-rate='x'"),
    ],
)
def test_bad_input_is_named(bench, capsys, arguments, message):
    bench(*arguments, status=2)
    assert message in capsys.readouterr().err


def test_addresses_with_and_without_v1():
    assert {
        server_address(url)
        for url in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/")
    } == {"http://a:1"}


def test_prometheus_pages():
    samples = parse_metrics(
        '# TYPE a counter\na_total{x="1",y="q\\"}"} 3\na_total{x="2"} 4.5e1\nb 1 1700000000\nbroken\nc nan?\n'
    )
    assert samples["a"] == [({"x": "1", "y": 'q\\"}'}, 3.0), ({"x": "2"}, 45.0)]
    assert samples["b"] == [({}, 1.0)]
    assert "c" not in samples
    assert speculation({}, {}) == {}
    page = parse_metrics(vllm_page(10))
    assert speculation(page, page) == {}, "nothing was drafted in between"
    assert speculation({}, page) == {}, "the first reading is missing"
    page = parse_metrics(sglang_page(3))
    assert speculation(page, page) == {}
    assert passes(page, parse_metrics(sglang_page(5))) == 8
    assert passes(page, parse_metrics(sglang_page(1))) < 0


def test_figures_by_hand():
    answers = [
        Answer([0.1, 0.3, 0.5], 5, True, 0.6),
        Answer([0.2], 1, True, 0.3),
        Answer(error="connect", detail="refused"),
    ]
    got = figures(answers, 2.0)
    assert (got["requests"], got["completed"], got["errors"]) == (3, 2, {"connect": 1})
    assert (got["tokens"], got["tokens_per_second"], got["requests_per_second"]) == (6, 3.0, 1.0)
    assert got["ttft_ms"]["p50"] == 150.0
    assert got["tpot_ms"]["p50"] == 100.0
    assert got["itl_ms"]["p50"] == 200.0
    assert got["latency_ms"]["p50"] == 450.0
    none = figures(answers[2:], 2.0)
    got["repeats"] = none["repeats"] = {"tokens": [6], "seconds": [2.0]}
    (row,) = compare(
        {"cells": [{"concurrency": 1, **got}]}, {"cells": [{"concurrency": 1, **none}]}
    )
    assert row == {
        "concurrency": 1,
        "tokens_per_second": None,
        "interval": None,
        "ttft_ms": None,
        "tpot_ms": None,
        "latency_ms": None,
    }


# An engine whose rounds commit a token more for each drafted one, and whose later pieces come sooner.
SERVES = """
    sys.path.insert(0, {root!r})
    from tests.serving.fake_server import FakeServer, vllm_page
    words = sys.argv
    config = json.loads(words[words.index("--speculative-config") + 1]) if "--speculative-config" in words else {{}}
    k = config.get("num_speculative_tokens", 0)
    open({log!r}, "a").write(json.dumps(words[1:]) + chr(10))
    port = int(words[words.index("--port") + 1])
    page = (lambda asked: vllm_page(8 * asked)) if k else ""
    with FakeServer(gap=0.1 / (1 + k), page=page, port=port):
        time.sleep(60)
"""


def saved(folder, kind):
    """A trained drafter and its target, as commands find them."""
    target = make_target(layers=8)
    target.model.save_pretrained(folder / "target")
    make_kind(kind, target, KEPT, shake=True).save_pretrained(folder / "drafter")
    return folder


@pytest.fixture
def head(tmp_path):
    return saved(tmp_path, "eagle3")


@pytest.mark.thorough
def test_each_draft_length_is_served_and_compared_with_the_first(bench, head, capsys):
    more = ("--draft-lengths", "0,1,3", "--concurrency", 1, "--requests", 2, "--warm-up", 0)
    results = bench(
        "--drafter",
        head / "drafter",
        "--target",
        head / "target",
        "--engine-python",
        engine(head, does=SERVES.format(root=str(ROOT), log=str(head / "log")).strip()),
        *more,
        "--",
        "--max-model-len",
        "64",
    )
    assert list(results["servers"]) == ["0 drafted", "1 drafted", "3 drafted"]
    assert [row["server"] for row in results["comparison"]] == ["1 drafted", "3 drafted"]
    assert {row["over"] for row in results["comparison"]} == {"0 drafted"}
    assert results["servers"]["3 drafted"]["cells"][0]["speculation"]["accepted_length"] == 1.75
    assert "speculation" not in results["servers"]["0 drafted"]["cells"][0]
    shown = capsys.readouterr().out
    assert "3 drafted over 0 drafted (above 1" in shown
    # Every server had the user's flag, one address, and the exported head but for plain decoding.
    started = load_jsonl(head / "log")
    drafted = []
    for words in started:
        given = dict(itertools.pairwise(words))
        assert (given["--max-model-len"], given["--host"]) == ("64", "127.0.0.1")
        config = json.loads(given.get("--speculative-config", "{}"))
        assert config.get("method") in (None, "eagle3")
        drafted.append(config.get("num_speculative_tokens", 0))
    assert drafted == [0, 1, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give either --url URL, or --drafter D"),
        ("--url http://127.0.0.1:9 --draft-lengths 1", "--draft-lengths, --target and flags"),
        ("--drafter D --url2 http://127.0.0.1:9", "--url2 and --model go with --url"),
        ("--drafter D --model m", "--url2 and --model go with --url"),
        ("--url http://127.0.0.1:9 --model2 m", "--model2 goes with --url2"),
        ("--drafter D --target T --engine-python E -- --model m", "--model is set by this command"),
        ("--drafter D --target T --engine sglang", "no sglang in"),
        (
            "--drafter D --target T --engine-python E -- --port x",
            "--port='x' must be a whole number",
        ),
        (
            "--drafter D --target T --engine-python E",
            "vLLM ended with exit status 3, its lines above",
        ),
    ],
)
def test_draft_lengths_that_cannot_be_served_are_named(bench, head, capsys, words, message):
    places = {
        "D": head / "drafter",
        "T": head / "target",
        "E": engine(head, does="sys.exit(3)"),
    }
    bench(*[places.get(word, word) for word in words.split()], status=2)
    assert message in capsys.readouterr().err


def test_each_length_of_heads_is_served_with_as_many_heads(tmp_path):
    saved(tmp_path, "medusa")
    args = Namespace(
        drafter=str(tmp_path / "drafter"),
        target=str(tmp_path / "target"),
        engine="vllm",
        engine_python=engine(tmp_path),
        draft_lengths=[0, 2, 4, 1],
        dtype="bfloat16",
        flags=["--host", "::1", "--port", "8000"],
    )
    heads = {}
    for name, server in servers(args, tmp_path):
        heads[name] = load_json(tmp_path / "export" / "config.json")["num_heads"]
        assert server.url == "http://[::1]:8000"
    assert heads == {"0 drafted": 4, "2 drafted": 2, "4 drafted": 4, "1 drafted": 1}


def test_a_drafter_of_blocks_is_served_with_its_block(bench, tmp_path, capsys):
    saved(tmp_path, "dflash")
    flags = ["--target", tmp_path / "target", "--engine-python", engine(tmp_path)]
    bench("--drafter", tmp_path / "drafter", "--draft-lengths", "0,2", *flags, status=2)
    assert "this drafter drafts blocks of" in capsys.readouterr().err
