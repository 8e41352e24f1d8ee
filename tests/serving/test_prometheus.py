"""The watcher's figures for Prometheus, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
import socket
from argparse import Namespace
from importlib.resources import files

import httpx
import pytest

from drafttrain.adapt import Adapter, _State
from drafttrain.errors import UserError
from drafttrain.serving.client import parse_metrics
from drafttrain.serving.prometheus import FiguresPage
from drafttrain.watch import Watch, Watched

BOARD = json.loads((files("drafttrain.serving") / "grafana.json").read_text())


def expressions():
    for panel in BOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (it["target"]["expr"] for it in BOARD["annotations"]["list"])


class Figures(Adapter):
    """An adapter after a round, without models."""

    def __init__(self, output):
        record = {"before": 1.5, "after": 1.8, "interval": [1.1, 1.3], "verdict": "better"}
        self.args = Namespace()
        self.output = output
        self.state = _State("", read=200, spent=3.5, rounds=[record])
        (output / "version-0007").mkdir()
        (output / "current").symlink_to("version-0007")
        self.watch = Watch("", "", output, Watched(samples=[2.0, 2.2], first=1.5))


def test_the_page_holds_every_figure_of_the_dashboard(tmp_path):
    pytest.importorskip("prometheus_client")
    page = FiguresPage("0", Figures(tmp_path).figures)
    url = f"http://127.0.0.1:{page._server.server_port}/metrics"
    text = httpx.get(url, trust_env=False).text
    page.close()
    found = {name: values[0][1] for name, values in parse_metrics(text).items()}
    assert found["drafttrain_served_version"] == 7 and found["drafttrain_lines_read"] == 200
    assert found["drafttrain_speedup_over_first"] == pytest.approx(1.4)
    assert "# TYPE drafttrain_swap_total counter" in text
    shown = set()
    for expression in expressions():
        shown.update(re.findall(r"drafttrain_\w+", expression))
    assert shown and {name.removesuffix("_total") for name in shown} <= found.keys()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_the_dashboard_asks_for_series_that_vllm_has():
    known = {"drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"}
    names = set(re.findall(r"vllm:\w+", " ".join(expressions())))
    ours = {f"vllm:spec_decode_num_{name}_total" for name in known}
    assert names == {*ours, "vllm:generation_tokens_total"}
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_addresses_that_cannot_be_listened_to_are_one_line():
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = str(taken.getsockname()[1])
        for address in (used, "here", "70000", ""):
            with pytest.raises(UserError, match=r"cannot be listened to .*give PORT or HOST:PORT"):
                FiguresPage(address, dict)
