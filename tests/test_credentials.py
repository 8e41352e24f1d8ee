"""Commands with credentials in their values: no written file and no output holds one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drafttrain.cli import main
from drafttrain.train import setup
from tests.files import load_json
from tests.serving.fake_server import FakeServer

SECRETS = {
    "OPENAI_API_KEY": "my-own-openai-word",
    "HF_TOKEN": "hf_" + "q7" * 17,
    "WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567",
}
PASSWORD = "pa55word-of-mine"


def check_nothing_leaks(folder: Path, capsys: pytest.CaptureFixture) -> str:
    printed = capsys.readouterr()
    texts = {"output": printed.out + printed.err}
    texts |= {
        str(path): path.read_bytes().decode(errors="replace")
        for path in folder.rglob("*")
        if path.is_file()
    }
    for name, text in texts.items():
        for secret in (*SECRETS.values(), PASSWORD):
            assert secret not in text, f"{name}: {text[:500]}"
    return texts["output"]


@pytest.fixture(autouse=True)
def secrets(monkeypatch, tmp_path):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


@pytest.mark.thorough
def test_a_load_test_records_the_server_without_its_password(tmp_path, capsys, monkeypatch):
    (tmp_path / "suite.jsonl").write_text(
        '{"question_id": "a", "category": "chat", "turns": ["Hello"]}\n'
    )
    with FakeServer() as server:
        url = server.url.replace("://", f"://me:{PASSWORD}@")
        command = [
            "bench-server",
            "--url",
            url,
            "--suite",
            "suite.jsonl",
            "--concurrency",
            "1",
            "--requests",
            "2",
        ]
        more = ["--warm-up", "0", "--api-key-env", "OPENAI_API_KEY", "--output", "server.json"]
        monkeypatch.setattr("sys.argv", ["drafttrain", *command, *more])
        assert main([*command, *more]) == 0
    check_nothing_leaks(tmp_path, capsys)
    written = load_json(tmp_path / "server.json")
    assert "***@" in written["servers"]["url"]["url"] and "OPENAI_API_KEY" in written["command"]


@pytest.mark.parametrize("command", ["bench-server", "bench-server --model tiny"])
def test_a_server_that_is_not_there(command, tmp_path, capsys, monkeypatch):
    (tmp_path / "suite.jsonl").write_text(
        '{"question_id": "a", "category": "chat", "turns": ["Hello"]}\n'
    )
    words = [
        *command.split(),
        "--url",
        f"http://me:{PASSWORD}@127.0.0.1:9",
        "--suite",
        "suite.jsonl",
    ]
    assert main(words) == 2
    assert "***@127.0.0.1:9" in check_nothing_leaks(tmp_path, capsys)


def test_a_token_in_a_recipe_goes_to_the_client_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "recipe.yaml").write_text("target: t\ndata: d\noutput_dir: out\nkind: eagle3\n")
    config, arguments = setup("recipe.yaml", [f"hub_token={SECRETS['HF_TOKEN']}"])
    assert os.environ["HF_TOKEN"] == SECRETS["HF_TOKEN"]
    assert arguments.hub_token is None and "hub_token" not in config.trainer


@pytest.mark.parametrize(
    "words",
    [
        f"eval --target https://me:{PASSWORD}@host/model --drafter none",
        f"push --drafter https://me:{PASSWORD}@host/drafter --repo a/b --without-evaluation --dry-run --output out",
        f"report https://host/results.json?api_key={PASSWORD}",
        f"prompts --source file --file https://me:{PASSWORD}@host/x --output p.jsonl",
        f"train recipe.yaml hub_token={PASSWORD} unknown_key=1",
        f"export --drafter https://me:{PASSWORD}@host/x --format vllm --output out",
    ],
)
@pytest.mark.thorough
def test_errors_show_no_password(words, tmp_path, capsys):
    try:
        status = main(words.split())
    except SystemExit as stop:  # argparse
        status = stop.code
    assert status == 2
    check_nothing_leaks(tmp_path, capsys)
