"""Before and during an upload: a Hub that is not there, and what a refused push leaves behind."""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError
from markdown_it import MarkdownIt

from drafttrain.errors import UserError
from drafttrain.hub import upload
from drafttrain.hub.upload import _fenced, _link, write_card
from tests.files import dump_json
from tests.hub.hub_server import TOKEN, HubServer, Repository


def arguments(**values: object) -> argparse.Namespace:
    known = {"repo": "writer/head", "private": False, "dry_run": False, "output": None, "tag": ""}
    return argparse.Namespace(**{**known, **values})


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in (
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)


def refusal(*prepared: str) -> str:
    with pytest.raises(UserError) as caught:
        upload.publish(arguments(), "push", "model", "message", lambda folder: prepared.append("x"))
    assert not prepared, "nothing is prepared for a Hub that is not there"
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_hub_that_refuses_is_named_at_once(online, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://me:secret9@127.0.0.1:{closed_port()}")
    monkeypatch.setattr(upload, "_REACHED", 600.0)
    message = refusal()
    assert "no answer within" not in message, "it waited for a Hub that had refused"
    assert "does not answer" in message and "HTTPS_PROXY" in message and "secret9" not in message


def test_a_hub_that_is_silent_is_named_in_time(online, monkeypatch):
    assert upload._REACHED <= 9
    monkeypatch.setattr(upload, "_REACHED", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "does not answer" in refusal()


def test_a_name_without_an_address(online, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://nowhere.invalid")
    monkeypatch.setattr(upload, "_REACHED", 2.0)
    assert "http://nowhere.invalid does not answer" in refusal()


def test_the_proxy_of_the_environment_is_used(online, monkeypatch):
    with HubServer() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setattr(constants, "ENDPOINT", "http://nowhere.invalid")
        upload.check_reachable("a/b")
        assert proxy.log == ["HEAD http://nowhere.invalid"] or proxy.log == [
            "HEAD http://nowhere.invalid/"
        ]


def test_offline_mode_is_said(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set; unset it to publish, or use --dry-run" in refusal()


CLIENT = sys.modules[
    HTTPError.__module__.partition(".")[0]
]  # httpx or httpx2, by the Hub client's release


@pytest.mark.parametrize(
    "error", [CLIENT.ConnectError("no route"), CLIENT.ReadTimeout("slow"), OSError("reset")]
)
def test_a_connection_that_breaks_later_is_one_line(error, monkeypatch, tmp_path):
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", broken)
    with pytest.raises(UserError, match=r"the upload broke off .*; run the same command again"):
        upload.upload(tmp_path, "a/b", "model", False, "message")


@pytest.mark.parametrize("existed", [False, True])
def test_a_refused_push_leaves_no_folder_behind(tmp_path, existed):
    out = tmp_path / "out"
    if existed:
        out.mkdir()

    def prepare(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "README.md").write_text("a card")
        dump_json(folder / "meta.json", {"note": f"by {TOKEN}"})

    with pytest.raises(
        UserError, match=r"meta.json line 1 holds what looks like a Hugging Face token; remove it"
    ) as caught:
        upload.publish(
            arguments(dry_run=True, output=str(out)), "push", "model", "message", prepare
        )
    assert TOKEN not in str(caught.value)
    assert not out.exists() or existed


_XET = """
import sys
from pathlib import Path
from drafttrain.errors import UserError
from drafttrain.files import hub_snapshot
from drafttrain.hub.upload import upload
for step in (lambda: upload(Path(sys.argv[1]), "writer/head", "model", False, "message"),
             lambda: hub_snapshot("writer/stored", ["*.safetensors"], "drafter")):
    try:
        print("done", step())
    except UserError as error:
        print(error)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("switched_off", [False, True])
def test_what_fails_in_xet_names_the_switch_that_goes_without_it(tmp_path, switched_off):
    """The storage behind Xet refuses; the Hub itself answers, and with HF_HUB_DISABLE_XET=1 all goes through it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    with HubServer() as server:
        server.xet = True
        server.repositories["models", "writer/stored"] = Repository(
            False, {"a" * 40: {"model.safetensors": b"w" * 5000}}
        )
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("HF_") and "_proxy" not in key.lower()},
            "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_TOKEN": TOKEN,
            **({"HF_HUB_DISABLE_XET": "1"} if switched_off else {}),
        }  # fmt: skip
        done = subprocess.run([sys.executable, "-c", _XET, str(folder)], env=environment, capture_output=True, text=True,
                              check=False, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    pushed, read = done.stdout.strip().splitlines()
    asked = any(line.partition(" ")[2].startswith("/cas") for line in server.log)
    assert asked != switched_off
    if switched_off:
        assert pushed.startswith("done http") and read.startswith("done ")
    else:
        assert "the upload broke off" in pushed and "the Hub does not provide it" in read
        assert "HF_HUB_DISABLE_XET=1" in pushed and "HF_HUB_DISABLE_XET=1" in read, (
            pushed,
            read,
            server.log,
        )


HOSTILE = "x](http://e.vil) ![p](http://e.vil/p.png) <img src=y> | cell `code`\n# Heading\n- item www.e.vil"


def test_a_card_shows_values_as_text(tmp_path):
    """No heading, link, picture, table cell or list of a value's own; code stays within its fence."""
    counts = {"conversations": 1, "responses": 1, "response_tokens": 1, "truncated": 0}
    identity = {"model_type": HOSTILE, "num_layers": 1, "vocab_size": 1, "tokenizer": HOSTILE}
    write_card(
        tmp_path,
        "data_card.md.jinja",
        {"license": HOSTILE},
        repo="user/name",
        target=HOSTILE,
        identity=identity,
        counts=counts,
        sources=[(HOSTILE, 1)],
        sampling=[("temperature", HOSTILE)],
        backend=HOSTILE,
        prompt_license=HOSTILE,
    )
    text = (tmp_path / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["license"] == HOSTILE
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(body)
    headings = re.findall(r"<h[1-6][^>]*>(.*?)</h", html)
    assert headings == ["user/name", "How it was made", "Columns"]
    assert "href" not in html and "<img" not in html and "Heading" in html
    # An address alone becomes a link too, but for those in code.
    assert "http://e.vil" not in re.sub(r"^```.*?^```", "", body, flags=re.DOTALL | re.MULTILINE)
    for line in body.splitlines():
        if line.startswith("|"):
            assert line.count("|") - line.count("\\|") == 3


def test_a_link_of_a_card_is_a_repositorys(tmp_path):
    for name, expected in (
        ("user/name", "[user/name](https://huggingface.co/user/name)"),
        ("a/b](http://e.vil)", "a/b](http://e.vil)"),
        ("tiny", "tiny"),
    ):
        assert _link(name) == expected
    assert _fenced("a\n```\nb").startswith("````\n")
