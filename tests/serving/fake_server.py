"""A server of completions and metrics pages."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="tiny"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="tiny"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="tiny"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="1"}} {second}
vllm:spec_decode_num_drafts_created{{engine="0",model_name="tiny"}} 1.7e+09
"""


def vllm_page(rounds):
    return VLLM.format(
        drafts=rounds,
        drafted=2 * rounds,
        accepted=0.75 * rounds,
        first=0.5 * rounds,
        second=0.25 * rounds,
    )


class FakeServer:
    """Answers every request with `pieces` of two tokens each; `behave` says what the i-th request meets instead.

    Attributes: url; asked: bodies of the chat requests, in order; most: greatest number of requests at a time.
    """

    def __init__(
        self, pieces=4, gap=0.0, page="", behave=lambda number: "fine", usage=True, port=0
    ):
        self.asked = []
        self.headers = []
        self.going = 0
        self.most = 0
        self.closing = threading.Event()
        lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                found = {"/health": "", "/v1/models": json.dumps({"data": [{"id": "tiny"}]})}
                if page:
                    found["/metrics"] = page(len(fake.asked)) if callable(page) else page
                self.reply(200 if self.path in found else 404, found.get(self.path, "not found"))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(fake.asked)
                    fake.asked.append(body)
                    fake.headers.append(dict(self.headers))
                    fake.going += 1
                    fake.most = max(fake.most, fake.going)
                try:
                    self.answer(behave(number))
                finally:
                    with lock:
                        fake.going -= 1

            def answer(self, way):
                if way == "busy":
                    return self.reply(503, '{"error": "overloaded"}\nmore')
                if way == "echo":
                    key = self.headers["Authorization"].removeprefix("Bearer ")
                    return self.reply(403, f"wrong key: {key}")
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                if way == "garbage":
                    return self.wfile.write(b"data: {not json\n\n")
                if way == "error":
                    return self.event({"error": {"message": "out of memory"}})
                if way == "hang":
                    return fake.closing.wait(60)
                self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
                for _ in range(0 if way == "empty" else pieces):
                    time.sleep(gap)
                    self.event({"choices": [{"delta": {"content": "two tokens"}}]})
                if way == "cut":
                    return None
                self.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
                if usage:
                    self.event(
                        {
                            "choices": [],
                            "usage": {"completion_tokens": 2 * pieces * usage, "prompt_tokens": 5},
                        }
                    )
                return self.wfile.write(b"data: [DONE]\n\n")

            def event(self, content):
                self.wfile.write(f": a comment\n\ndata: {json.dumps(content)}\n\n".encode())

            def reply(self, status, text):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
