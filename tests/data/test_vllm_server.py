"""Answers of a real vLLM server are stored id by id. VLLM_PYTHON names the interpreter of an environment with vLLM."""

from __future__ import annotations

import os
import socket
import subprocess
import time

import httpx
import pytest

from drafttrain import cli
from drafttrain.data.servers import Requests
from drafttrain.data.store import load_records
from drafttrain.files import write_jsonl
from tests.conftest import make_target, save_target

PYTHON = os.environ.get("VLLM_PYTHON", "")
LIMIT = 600.0  # seconds of the server's start


@pytest.fixture
def server(tmp_path):
    """URL of vLLM with a tiny target, saved in tmp_path/target."""
    target = make_target(hidden=128)
    save_target(target, tmp_path / "target")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        PYTHON,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(tmp_path / "target"),
        "--port",
        str(port),
    ]
    command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }
    environment = {**os.environ, **settings}
    environment.pop("PYTHONPATH", None)
    with (
        (tmp_path / "server.log").open("wb") as log,
        subprocess.Popen(command, env=environment, stderr=log) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            until = time.monotonic() + LIMIT
            while True:
                try:
                    httpx.get(f"{url}/v1/models").raise_for_status()
                    break
                except httpx.HTTPError:
                    said = (tmp_path / "server.log").read_text()[-2000:]
                    assert process.poll() is None and time.monotonic() < until, said
                    time.sleep(1)
            yield url
        finally:
            process.terminate()


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is not set")
def test_stored_ids_are_the_served_ids(server, tmp_path, monkeypatch, capsys):
    plain = Requests.json
    served = []

    def send(self, method, url, body, *rest):
        reply = plain(self, method, url, body, *rest)
        if url.endswith("/completions") and body["max_tokens"] > 1:
            choice = reply["choices"][0]
            served.append(
                (choice["prompt_token_ids"], choice["token_ids"], choice["finish_reason"])
            )
        return reply

    monkeypatch.setattr(Requests, "json", send)
    users = ["hello", "and then?", "go on \u732b"]
    rows = [
        {
            "id": f"c{i}",
            "messages": [
                m
                for text in users[: 1 + i % 3]
                for m in (
                    {"role": "user", "content": f"{text} {i}"},
                    {"role": "assistant", "content": "x"},
                )
            ],
        }
        for i in range(9)
    ]
    path = tmp_path / "prompts.jsonl"
    write_jsonl(path, [*rows, {"id": "text", "text": "once"}])
    options = [
        "--backend",
        "openai",
        "--url",
        server,
        "--max-new-tokens",
        "40",
        "--max-length",
        "500",
        "--top-k",
        "40",
    ]
    command = [
        "generate",
        "--target",
        str(tmp_path / "target"),
        "--prompts",
        str(path),
        "--output",
        str(tmp_path / "out"),
    ]
    assert cli.main([*command, *options]) == 0
    assert "exchanged as token ids, and stored as served" in capsys.readouterr().out
    records = list(load_records(tmp_path / "out"))
    stored = [
        (row["tokens"][:start], row["tokens"][start:end], finish)
        for row in records
        for (start, end), finish in zip(row["spans"], row["finish"], strict=True)
    ]
    assert len(records) == 10 and sorted(stored) == sorted(served)
    assert all((ids[-1] == 257) == (finish == "stop") for _, ids, finish in stored)
    tokenizer = make_target(layers=1).tokenizer
    again = [
        tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]
        for _, ids, _ in stored
    ]
    assert again != [ids for _, ids, _ in stored], "text would have lost some of them"
