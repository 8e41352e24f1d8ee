"""Swaps in a real vLLM server, with tiny models. VLLM_PYTHON names the interpreter of an environment with vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import tomllib
import torch
from safetensors.torch import load, load_file, save_file

from drafttrain.cli import main
from drafttrain.drafters.shipping import shipping
from drafttrain.export.export_drafter import export
from drafttrain.export.tiny_drafters import shipped_drafters, tiny_prompts, tiny_target
from drafttrain.inference import generate
from drafttrain.inside_vllm.head_files import ROOT, digest_of
from drafttrain.inside_vllm.swap_worker import EXTENSION
from drafttrain.states.engine_server import free_port

PYTHON = os.environ.get("VLLM_PYTHON", "")
LIMIT = 600.0  # seconds of the server's start
PROJECT = Path(__file__).parents[2]
KEY = "a-key-of-the-tests"
TOKENS = 48
PROMPTS = tiny_prompts(8)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is not set"),
]


def noisy(head: Path, folder: Path) -> None:
    """A copy of a head whose matrices are mostly noise: it loads, and little of its drafts is accepted."""
    shutil.copytree(head, folder)
    made = torch.Generator().manual_seed(1)
    tensors = load_file(head / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dim() > 1:
            tensors[name] = tensor + tensor.std() * torch.randn(tensor.shape, generator=made)
    save_file(tensors, folder / "model.safetensors")


def install(folder: Path) -> None:
    """What an installation of the package adds to an environment: its entry points."""
    described = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / "drafttrain-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: drafttrain\nVersion: 0\n")
    lines = []
    for group, named in described.items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {value}" for name, value in named.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


class Vllm:
    """A server with a trained head, a; a noisy one, c, lies beside it. exact: the target's own greedy answers."""

    def __init__(self, place: Path, kind: str):
        target = tiny_target(place / "target")
        self.exact = [generate(target, None, ids, max_new_tokens=TOKENS).tokens for ids in PROMPTS]
        self.target = target
        (trained,) = shipped_drafters(target, PROMPTS, TOKENS, place / "drafters", only=(kind,))
        self.root = place / "heads"
        export(trained, "vllm", self.root / "a", torch.float32, str(place / "target"), 3)
        noisy(self.root / "a", self.root / "c")
        install(place / "installed")
        self.model = str(place / "target")
        settings = {
            "method": kind,
            "model": str(self.root / "a"),
            "num_speculative_tokens": 3,
            **shipping(kind).options(trained)["vLLM"],
        }
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
        command += [
            "--max-model-len",
            "512",
            "--enforce-eager",
            "--worker-extension-cls",
            EXTENSION,
        ]
        command += ["--speculative-config", json.dumps(settings)]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(PROJECT), str(place / "installed")]),
            "VLLM_PLUGINS": "drafttrain_swap",
            ROOT: str(self.root),
            "VLLM_API_KEY": KEY,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
        }
        variables.pop("OMP_NUM_THREADS", None)
        self.log = place / "server.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=variables, stdout=log, stderr=log, cwd=place, start_new_session=True
            )
        headers = {"Authorization": f"Bearer {KEY}"}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=300)

    def wait(self) -> None:
        until = time.monotonic() + LIMIT
        while True:
            with contextlib.suppress(httpx.HTTPError):
                self.client.get("/v1/models").raise_for_status()
                return
            said = self.log.read_text()[-3000:]
            assert self.process.poll() is None and time.monotonic() < until, said
            time.sleep(1)

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, number)
                self.process.wait(20)

    def ask(self, number: int) -> list[int]:
        """The answer to a prompt, greedily."""
        body = {"model": self.model, "prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": TOKENS}
        body |= {"temperature": 0, "return_token_ids": True}
        reply = self.client.post("/v1/completions", json=body).raise_for_status()
        return reply.json()["choices"][0]["token_ids"]

    def counters(self) -> tuple[float, float]:
        """Drafts and accepted tokens so far."""
        found = []
        for name in ("drafts", "accepted_tokens"):
            start = f"vllm:spec_decode_num_{name}_total{{"
            page = self.client.get("/metrics").text.splitlines()
            found.append(sum(float(it.split()[-1]) for it in page if it.startswith(start)))
        return found[0], found[1]

    def accepted_length(self) -> float:
        """Of all prompts, whose answers must be the exact ones."""
        drafts, accepted = self.counters()
        assert [self.ask(number) for number in range(len(PROMPTS))] == self.exact
        after = self.counters()
        return 1 + (after[1] - accepted) / (after[0] - drafts)

    def swap(self, folder: str, **more) -> httpx.Response:
        return self.client.post("/v1/drafter", json={"folder": folder, **more})

    def served(self) -> str:
        return self.client.get("/v1/drafter").raise_for_status().json()["sha256"]

    def memory(self) -> int:
        """Kilobytes of the server's processes."""
        pages = 0
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, IndexError):
                fields = status.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid:  # the session
                    pages += int((status.parent / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 1024


@pytest.fixture(scope="module")
def vllm(tmp_path_factory, request):
    server = Vllm(tmp_path_factory.mktemp("vllm"), getattr(request, "param", "eagle3"))
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def test_the_length_becomes_the_new_heads_and_texts_stay(vllm, capsys, monkeypatch):
    trained = vllm.accepted_length()
    assert vllm.swap("c").raise_for_status().json()["sha256"] == digest_of(vllm.root / "c")
    poor = vllm.accepted_length()
    assert poor < 1.3 < 2 < trained
    monkeypatch.setenv("SWAP_KEY", KEY)
    words = ["swap", "--server", vllm.url, "--api-key-env", "SWAP_KEY", "--drafter"]
    assert main([*words, str(vllm.root / "a")]) == 0
    assert "-> a (" in capsys.readouterr().out
    assert vllm.accepted_length() == pytest.approx(trained, rel=0.02)


def test_requests_without_the_key_are_refused(vllm):
    for method in ("GET", "POST"):
        reply = httpx.request(method, f"{vllm.url}/v1/drafter", json={"folder": "c"})
        assert reply.status_code == 401
    assert (
        httpx.post(f"{vllm.url}/collective_rpc", json={"method": "drafttrain_show"}).status_code
        == 404
    )


def test_torn_and_foreign_heads_leave_the_old_one(vllm):
    before = vllm.served()
    damaged = vllm.root / "damaged"
    noisy(vllm.root / "a", damaged)
    weights = damaged / "model.safetensors"
    content = weights.read_bytes()
    tensors = load(content)
    config = json.loads((damaged / "config.json").read_text())

    def refused(message: str, name: str = "damaged") -> None:
        reply = vllm.swap(name)
        assert reply.status_code == 409 and message in reply.json()["error"], reply.text

    weights.write_bytes(content[: len(content) // 2])
    refused("damaged file")
    save_file({**tensors, "embed_tokens.weight": torch.zeros(320, 128)}, weights)
    refused("embed_tokens.weight")
    save_file({**tensors, "fc.weight": torch.zeros(128, 128)}, weights)
    refused("fc.weight")
    save_file({**tensors, "fc.weight": tensors["fc.weight"] * float("inf")}, weights)
    refused("not finite")
    weights.write_bytes(content)
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    (damaged / "config.json").write_text(json.dumps(config))
    refused("eagle_aux_hidden_state_layer_ids")
    refused("leads out", "../target")
    refused("no such folder", "nothing")
    shutil.rmtree(damaged)
    assert vllm.swap("c", sha256="0" * 64).status_code == 409
    assert vllm.served() == before and vllm.accepted_length() > 2


def test_a_client_that_is_killed_leaves_a_whole_head(vllm):
    """A killed client resets its connection: with half a request, and while its swap runs."""
    body = b'{"folder": "c"}'
    host, port = vllm.url.removeprefix("http://").split(":")
    known = {digest_of(vllm.root / name) for name in "ac"}
    for sent, pause in ((body[:5], 0.0), (body, 0.0), (body, 0.02), (body, 0.1)):
        head = f"POST /v1/drafter HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(head.encode() + sent)
            time.sleep(pause)
        assert vllm.ask(0) == vllm.exact[0] and vllm.served() in known
    assert vllm.swap("a").status_code == 200 and vllm.accepted_length() > 2


def test_swaps_under_load_lose_no_request_and_change_no_text(vllm):
    ended = threading.Event()
    answers: list[bool] = []
    errors: list[Exception] = []

    def stream(number: int) -> None:
        while not ended.is_set() or number < 8:
            try:
                answers.append(vllm.ask(number) == vllm.exact[number % len(PROMPTS)])
            except Exception as error:
                errors.append(error)
            number += 4

    streams = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
    for thread in streams:
        thread.start()
    memory = []
    for number in range(40):
        vllm.swap("ca"[number % 2]).raise_for_status()
        memory.append(vllm.memory())
    ended.set()
    for thread in streams:
        thread.join()
    assert not errors and len(answers) >= 8 and all(answers)
    assert vllm.accepted_length() > 2
    # Flat behind the first swaps, in which buffers of the allocator grow.
    assert max(memory[30:]) < 1.01 * max(memory[10:20])


def test_sampled_answers_keep_their_distribution_across_swaps(vllm):
    """Chi-square of the first two tokens against the target's own probabilities. The second one is drafted."""
    stats = pytest.importorskip("scipy.stats")
    temperature = 2.0
    prompt = PROMPTS[0]
    seen: Counter[tuple[int, ...]] = Counter()
    for number in range(16):
        body = {"model": vllm.model, "prompt": prompt, "max_tokens": 4, "n": 50, "seed": number}
        body |= {"temperature": temperature, "return_token_ids": True, "ignore_eos": True}
        asked = threading.Thread(target=vllm.swap, args=("ca"[number % 2],))
        asked.start()
        reply = vllm.client.post("/v1/completions", json=body).raise_for_status()
        asked.join()
        for choice in reply.json()["choices"]:
            seen[tuple(choice["token_ids"][:2])] += 1
    total = sum(seen.values())

    model = vllm.target.model
    with torch.no_grad():
        first = (model(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
        likely = first.topk(20).indices.tolist()
        rows = torch.tensor([[*prompt, token] for token in likely])
        second = (model(rows).logits[:, -1] / temperature).softmax(-1)
    expected = {}
    for token, chances in zip(likely, second, strict=True):
        for other, chance in enumerate((first[token] * chances).tolist()):
            if chance * total >= 5:
                expected[token, other] = chance * total
    assert len(expected) >= 10
    found = [seen[pair] for pair in expected]
    # All other pairs together.
    found.append(total - sum(found))
    wanted = [*expected.values(), total - sum(expected.values())]
    assert stats.chisquare(found, wanted).pvalue > 1e-3
    assert vllm.swap("a").status_code == 200


@pytest.mark.parametrize("vllm", ["eagle1"], indirect=True)
def test_other_methods_are_swapped_too(vllm):
    trained = vllm.accepted_length()
    assert vllm.swap("c").status_code == 200
    poor = vllm.accepted_length()
    assert vllm.swap("a").status_code == 200
    assert vllm.accepted_length() == pytest.approx(trained, rel=0.02) and poor < 1.3 < trained
