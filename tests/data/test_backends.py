from __future__ import annotations

import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from drafttrain import cli
from drafttrain.data import backends
from drafttrain.data.store import load_records


class Server:
    """A chat completion server that can be told to fail first."""

    def __init__(self, failures: list[int] | None = None, models: bool = True):
        self.failures, self.requests, self.lock = list(failures or []), [], threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def reply(self, status: int, body: dict) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self):
                self.reply(200, {"data": [{"id": "served-model"}] if models else []})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.requests.append((self.path, body))
                    if outer.failures:
                        self.reply(outer.failures.pop(0), {"error": "no"})
                        return
                if self.path.endswith("chat/completions"):
                    text = f"reply {len(body['messages'])}"
                    finish = "length" if body["messages"][-1]["content"] == "cut" else "stop"
                    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
                else:
                    choice = {"text": " a time", "finish_reason": "stop"}
                self.reply(200, {"choices": [choice]})

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def prompts(tmp_path):
    def user(text):
        return {"role": "user", "content": text}

    rows = [
        {"id": f"c{i}", "messages": [user(f"hello {i}"), {"role": "assistant", "content": "x"}, user("go on")]}
        for i in range(4)
    ]
    rows += [{"id": "cut", "messages": [user("cut"), {"role": "assistant", "content": "x"}, user("never asked")]}]
    rows += [{"id": "text", "text": "once upon"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(backends, "_FIRST_PAUSE", 0.001)


def generate(target_dir, prompts, output, *more: str) -> int:
    return cli.main(
        ["generate", "--target", str(target_dir), "--prompts", str(prompts), "--output", str(output), *more]
    )


def check_rows(tokenizer, rows) -> None:
    assert set(rows) == {"c0", "c1", "c2", "c3", "cut", "text"}
    first = rows["c2"]
    text = tokenizer.decode(first["tokens"])
    spans = [tokenizer.decode(first["tokens"][start:end]) for start, end in first["spans"]]
    assert spans == ["reply 1<|im_end|>", "reply 3<|im_end|>"]
    assert first["finish"] == ["stop", "stop"]
    assert text == (
        "<|im_start|>user\nhello 2<|im_end|>\n<|im_start|>assistant\nreply 1<|im_end|>\n"
        "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\nreply 3<|im_end|>"
    )
    assert rows["cut"]["finish"] == ["length"]
    assert tokenizer.decode(rows["cut"]["tokens"]).endswith("reply 1")
    assert tokenizer.decode(rows["text"]["tokens"]) == "once upon a time<|im_end|>"


@pytest.mark.thorough
def test_openai_with_two_servers_and_errors_first(target_dir, prompts, tmp_path, tokenizer):
    with Server([500, 429]) as one, Server([503]) as two:
        options = ["--backend", "openai", "--url", one.url, "--url", two.url + "/v1/", "--temperature", "0.5"]
        assert generate(target_dir, prompts, tmp_path / "out", *options, "--top-k", "9", "--max-new-tokens", "77") == 0
        asked = one.requests + two.requests
        assert one.requests
        assert two.requests
        assert len(asked) == 4 * 2 + 2 + 3
    check_rows(tokenizer, {row["id"]: row for row in load_records(tmp_path / "out")})
    path, body = next((path, body) for path, body in asked if len(body.get("messages", [])) == 3)
    assert path == "/v1/chat/completions"
    assert body["model"] == "served-model"
    assert body["max_tokens"] == 77
    assert body["temperature"] == 0.5
    assert body["top_k"] == 9
    assert body["messages"][1] == {"role": "assistant", "content": "reply 1"}
    assert len({body["seed"] for _, body in asked}) == 10, "a seed per response, kept over retries"


@pytest.mark.thorough
def test_openai_goes_on_after_a_server_died(target_dir, prompts, tmp_path, capsys, tokenizer):
    options = ["--backend", "openai", "--model", "m"]
    with Server([500] * 1000) as server:
        options += ["--url", server.url]
        assert generate(target_dir, prompts, tmp_path / "out", *options) == 2
        error = capsys.readouterr().err
        assert 'no conversation has got an answer (HTTP 500 6; the last reply: HTTP 500: {"error": "no"})' in error
        assert "run the same command again" in error
        assert len(server.requests) == 6 * 6, "six tries each"
        server.failures.clear()
        assert generate(target_dir, prompts, tmp_path / "out", *options) == 0
    check_rows(tokenizer, {row["id"]: row for row in load_records(tmp_path / "out")})


def test_unreachable_server(target_dir, prompts, tmp_path, capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    assert generate(target_dir, prompts, tmp_path / "a", "--backend", "openai", "--url", url) == 2
    assert f"url='{url}/v1' cannot be reached (ConnectError" in capsys.readouterr().err
    assert generate(target_dir, prompts, tmp_path / "b", "--backend", "openai", "--url", url, "--model", "m") == 2
    assert f"url='{url}/v1' cannot be reached (ConnectError" in capsys.readouterr().err


@pytest.mark.thorough
def test_refusing_server(target_dir, prompts, tmp_path, capsys):
    with Server([400] * 100) as server:
        assert generate(target_dir, prompts, tmp_path / "a", "--backend", "openai", "--url", server.url) == 2
        assert "no conversation has got an answer (HTTP 400 6" in capsys.readouterr().err
        assert len(server.requests) == 6, "what the client did wrong is not repeated"
    with Server(models=False) as server:
        assert generate(target_dir, prompts, tmp_path / "b", "--backend", "openai", "--url", server.url) == 2
        assert "lists no models (malformed: data=[]" in capsys.readouterr().err


def test_vllm_not_installed(target_dir, prompts, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert generate(target_dir, prompts, tmp_path / "out", "--backend", "vllm") == 2
    assert "vllm is not installed here; pip install vllm" in capsys.readouterr().err


def test_vllm_in_process(target_dir, prompts, tmp_path, tokenizer, monkeypatch):
    made: list[dict] = []

    class LLM:
        def __init__(self, **options):
            made.append(options)

        def generate(self, prompts, params):
            assert len(prompts) == len(params)
            assert all(257 in p.stop_token_ids for p in params)
            for prompt in prompts:
                ids = prompt["prompt_token_ids"]
                text = tokenizer.decode(ids)
                turns = text.count("assistant") * 2 - 1
                reply, reason, stop = (f"reply {turns}", "stop", [257]) if turns > 0 else (" a time", "stop", [])
                if "cut" in text:
                    reason, stop = "length", []
                token_ids = tokenizer(reply, add_special_tokens=False)["input_ids"] + stop
                yield SimpleNamespace(
                    outputs=[SimpleNamespace(token_ids=token_ids, finish_reason=reason, stop_reason=None)]
                )

    fake = SimpleNamespace(LLM=LLM, SamplingParams=lambda **values: SimpleNamespace(**values))
    monkeypatch.setitem(sys.modules, "vllm", fake)
    assert generate(target_dir, prompts, tmp_path / "out", "--backend", "vllm", "--max-length", "300") == 0
    check_rows(tokenizer, {row["id"]: row for row in load_records(tmp_path / "out")})
    assert made[0]["model"] == str(target_dir)
    assert made[0]["max_model_len"] == 300
