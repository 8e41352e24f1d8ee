"""Swaps in a real vLLM server, with tiny models. VLLM_PYTHON names the interpreter of an environment with vLLM."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load, save_file

from drafttrain.cli import main
from drafttrain.drafters.shipping import shipping
from drafttrain.export.export_drafter import export
from drafttrain.export.tiny_drafters import shipped_drafters, tiny_prompts, tiny_target
from drafttrain.inference import generate
from drafttrain.inside_vllm.head_files import ROOT, read_head
from drafttrain.inside_vllm.swap_worker import EXTENSION
from drafttrain.states.engine_server import EngineServer, free_port, look_for_vllm, vllm_serve

PYTHON = os.environ.get("VLLM_PYTHON", "")
PROJECT = Path(__file__).parents[2]
PROMPTS = tiny_prompts(8)
SETTINGS = (
    "--dtype float32 --max-model-len 512 --enforce-eager --host 127.0.0.1 --worker-extension-cls"
)
# What an installation of the package adds to vLLM's environment.
POINT = "[vllm.endpoint_plugins]\ndrafttrain_swap = drafttrain.inside_vllm.swap_route:DrafterSwapRoute\n"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is not set")]


class SwapServer(EngineServer):
    """vLLM with a trained head, a. Another one, c, is a with noise. exact: the target's own greedy answers."""

    words: list[str] = []
    variables: dict[str, str] = {}

    def __init__(self, place: Path, kind: str):
        self.target = tiny_target(place / "target")
        self.exact = [generate(self.target, None, it, max_new_tokens=48).tokens for it in PROMPTS]
        (trained,) = shipped_drafters(self.target, PROMPTS, 48, place / "drafters", only=(kind,))
        self.root = place / "heads"
        export(trained, "vllm", self.root / "a", torch.float32, str(place / "target"), 3)
        shutil.copytree(self.root / "a", self.root / "c")
        self.weights = load((self.root / "a" / "model.safetensors").read_bytes())
        torch.manual_seed(1)
        noisy = {name: it + it.std() * torch.randn(it.shape) for name, it in self.weights.items()}
        save_file(noisy, self.root / "c" / "model.safetensors")
        info = place / "drafttrain-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: drafttrain\nVersion: 0\n")
        (info / "entry_points.txt").write_text(POINT)
        self.variables = {
            "PYTHONPATH": f"{PROJECT}:{place}",
            "VLLM_PLUGINS": "drafttrain_swap",
            ROOT: str(self.root),
            "VLLM_API_KEY": "key-of-tests",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        drafting = {"model": str(self.root / "a"), "num_speculative_tokens": 3}
        drafting |= shipping(kind).options(trained)["vLLM"]
        self.model = str(place / "target")
        self.words = vllm_serve(PYTHON, look_for_vllm(PYTHON), self.model)
        self.words += ["--port", str(port), *SETTINGS.split(), EXTENSION]
        self.words += ["--speculative-config", json.dumps(drafting)]
        headers = {"Authorization": "Bearer key-of-tests"}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=300)

    def complete(self, prompt, **more):
        body = {"model": self.model, "prompt": prompt, "return_token_ids": True, **more}
        reply = self.client.post("/v1/completions", json=body).raise_for_status()
        return [choice["token_ids"] for choice in reply.json()["choices"]]

    def is_exact(self, number: int) -> bool:
        """Whether a greedy answer is the target's own."""
        number %= len(PROMPTS)
        return self.complete(PROMPTS[number], max_tokens=48, temperature=0) == [self.exact[number]]

    def accepted_length(self) -> float:
        """Of all prompts, whose answers must be exact."""
        counts = []
        for last in (False, True):
            page = self.client.get("/metrics").text.splitlines()
            for name in ("drafts", "accepted_tokens"):
                rows = [it for it in page if it.startswith(f"vllm:spec_decode_num_{name}_total{{")]
                counts.append(float(rows[0].split()[-1]))
            assert last or all(self.is_exact(number) for number in range(len(PROMPTS)))
        return 1 + (counts[3] - counts[1]) / (counts[2] - counts[0])

    def swap(self, folder: str) -> httpx.Response:
        return self.client.post("/v1/drafter", json={"folder": folder})

    def memory(self) -> int:
        """Bytes of the server's processes."""
        pages = 0
        for process in Path("/proc").glob("[0-9]*/statm"):
            if os.getsid(int(process.parent.name)) == self.child.pid:
                pages += int(process.read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory, request):
    server = SwapServer(tmp_path_factory.mktemp("vllm"), getattr(request, "param", "eagle3"))
    try:
        server.start()
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def test_the_length_becomes_the_new_heads_and_texts_stay(vllm, monkeypatch):
    trained = vllm.accepted_length()
    monkeypatch.setenv("SWAP_KEY", "key-of-tests")
    words = ["swap", "--server", vllm.url, "--api-key-env", "SWAP_KEY", "--drafter"]
    assert main([*words, str(vllm.root / "c")]) == 0
    poor = vllm.accepted_length()
    assert main([*words, "a"]) == 0
    assert vllm.accepted_length() == pytest.approx(trained, rel=0.02) and poor < 1.3 < 2 < trained
    assert httpx.post(f"{vllm.url}/v1/drafter", json={"folder": "c"}).status_code == 401
    assert httpx.post(f"{vllm.url}/collective_rpc").status_code == 404


def test_refused_heads_and_killed_clients_leave_a_whole_head(vllm):
    save = vllm.root / "bad" / "model.safetensors"
    shutil.copytree(vllm.root / "a", save.parent)
    for name, tensor in {
        "fc.weight": torch.zeros(1),
        "embed_tokens.weight": torch.zeros(320, 128),
    }.items():
        save_file({**vllm.weights, name: tensor}, save)
        assert name in vllm.swap("bad").json()["error"]
    save.write_bytes(save.read_bytes()[:-9])
    assert "damaged file" in vllm.swap("bad").json()["error"]
    assert vllm.swap("../target").status_code == 409

    body = b'{"folder": "c"}'
    known = {read_head(vllm.root / name, "").digest for name in "ac"}
    head = "POST /v1/drafter HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-of-tests\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    for size, pause in ((5, 0.0), (15, 0.0), (15, 0.02), (15, 0.1)):
        with socket.create_connection(("127.0.0.1", int(vllm.url.rpartition(":")[2]))) as client:
            # The end of a killed process: what it has not read is reset.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(head.encode() + body[:size])
            time.sleep(pause)
        assert vllm.is_exact(0) and vllm.client.get("/v1/drafter").json()["sha256"] in known
    assert vllm.swap("a").status_code == 200 and vllm.accepted_length() > 2


def test_swaps_under_load_lose_no_request_and_change_no_text(vllm):
    ended = threading.Event()
    found = []

    def stream(number: int) -> None:
        while not ended.is_set():
            try:
                found.append(vllm.is_exact(number))
            except Exception as error:
                found.append(error)
            number += 4

    streams = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
    for thread in streams:
        thread.start()
    memory = []
    for number in range(40):
        assert vllm.swap("ca"[number % 2]).status_code == 200
        memory.append(vllm.memory())
    ended.set()
    for thread in streams:
        thread.join()
    assert found == [True] * len(found) and len(found) >= 8
    # Flat behind the first swaps, in which the allocator's buffers grow.
    assert max(memory[30:]) < 1.01 * max(memory[10:20])


def test_sampled_answers_keep_their_distribution_across_swaps(vllm):
    """Chi-square of the first two tokens against the target's own probabilities. The second one is drafted."""
    stats = pytest.importorskip("scipy.stats")
    given = {"max_tokens": 4, "n": 50, "temperature": 0.5, "ignore_eos": True}
    seen: Counter[tuple[int, ...]] = Counter()
    for number in range(16):
        swap = threading.Thread(target=vllm.swap, args=("ca"[number % 2],))
        swap.start()
        made = vllm.complete(PROMPTS[0], seed=1000 * number, **given)
        seen.update(tuple(ids[:2]) for ids in made)
        swap.join()
    with torch.no_grad():
        rows = torch.tensor([[*PROMPTS[0], token] for token in range(320)])
        chances = (vllm.target.model(rows).logits[:, -2:] / 0.5).softmax(-1)  # [320, 2, 320]
    expected = 800 * chances[0, 0, :, None] * chances[:, 1]  # [320, 320] by first and second token
    pairs = (expected >= 5).nonzero().tolist()
    counts = [seen[first, second] for first, second in pairs]
    wanted = [float(expected[first, second]) for first, second in pairs]
    # All other pairs together.
    found = stats.chisquare([*counts, 800 - sum(counts)], [*wanted, 800 - sum(wanted)])
    assert len(pairs) >= 10 and found.pvalue > 1e-3


@pytest.mark.parametrize("vllm", ["eagle1"], indirect=True)
def test_eagle1_is_swapped_too(vllm):
    trained = vllm.accepted_length()
    for name in "ca":
        assert vllm.swap(name).status_code == 200
        assert (vllm.accepted_length() == pytest.approx(trained, rel=0.02)) == (name == "a")
