"""Swaps in a real vLLM server, with tiny models. VLLM_PYTHON names the interpreter of an environment with vLLM."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load, save_file
from scipy import stats
from torch import Tensor

from drafttrain import adapt
from drafttrain.cli import main
from drafttrain.drafters.shipping import find_drafter, shipping
from drafttrain.export.export_drafter import export
from drafttrain.export.tiny_drafters import shipped_drafters, tiny_prompts, tiny_target
from drafttrain.inference import generate
from drafttrain.inside_vllm.head_files import ROOT, read_head
from drafttrain.inside_vllm.swap_worker import EXTENSION
from drafttrain.serving.client import parse_metrics, speculation
from drafttrain.states.engine_server import EngineServer, free_port, look_for_vllm, vllm_serve
from drafttrain.target import Target

PYTHON = os.environ.get("VLLM_PYTHON", "")
PROJECT = Path(__file__).parents[2]
PROMPTS = tiny_prompts(8)
SETTINGS = (
    "--dtype float32 --max-model-len 512 --enforce-eager --host 127.0.0.1 --worker-extension-cls"
)
# Entry points by distribution: what an installation of the package adds to vLLM's environment, and what mends vLLM on
# CPUs; apart, because a checkout with an installation of its own hides another one of the same name.
POINTS = {
    "drafttrain": """[vllm.endpoint_plugins]
drafttrain_swap = drafttrain.inside_vllm.swap_route:DrafterSwapRoute
""",
    "mend_vllm": """[vllm.general_plugins]
mend_vllm = tests.serving.mend_vllm:mend
""",
}
SAMPLES = 4096
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is not set")]


class SwapServer(EngineServer):
    """vLLM with a trained head, a. Another one, c, is a with noise. exact: the target's own greedy answers."""

    words: list[str] = []
    variables: dict[str, str] = {}
    parallel: tuple[str, ...] = ()  # flags

    def __init__(
        self,
        place: Path,
        kind: str,
    ):
        self.target = target = self.make_target(place / "target")
        self.exact = [generate(target, None, it, max_new_tokens=48).tokens for it in PROMPTS]
        (trained,) = shipped_drafters(target, PROMPTS, 48, place / "drafters", only=(kind,))
        self.root = place / "heads"
        export(trained, "vllm", self.root / "a", torch.float32, str(place / "target"), 3)
        shutil.copytree(self.root / "a", self.root / "c")
        self.weights = load((self.root / "a" / "model.safetensors").read_bytes())
        torch.manual_seed(1)
        noisy = {name: it + it.std() * torch.randn(it.shape) for name, it in self.weights.items()}
        save_file(noisy, self.root / "c" / "model.safetensors")
        for name, points in POINTS.items():
            info = place / f"{name}-0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
            (info / "entry_points.txt").write_text(points)
        self.variables = {
            "PYTHONPATH": f"{PROJECT}:{place}",
            "VLLM_PLUGINS": "drafttrain_swap,mend_vllm",
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
        self.words += ["--port", str(port), *SETTINGS.split(), EXTENSION, *self.parallel]
        self.words += ["--speculative-config", json.dumps(drafting)]
        headers = {"Authorization": "Bearer key-of-tests"}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=300)

    def make_target(self, folder: Path) -> Target:
        return tiny_target(folder)

    def answer(self, prompt: list[int]) -> list[int]:
        """A greedy answer."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 48, "temperature": 0}
        reply = self.client.post("/v1/completions", json={**body, "return_token_ids": True})
        return reply.json()["choices"][0]["token_ids"]

    def is_exact(self, number: int) -> bool:
        """Whether a greedy answer is the target's own."""
        number %= len(PROMPTS)
        return self.answer(PROMPTS[number]) == self.exact[number]

    def accepted_length(self) -> float:
        """Of all prompts, whose answers must be exact."""
        before = parse_metrics(self.client.get("/metrics").text)
        assert all(self.is_exact(number) for number in range(len(PROMPTS)))
        after = parse_metrics(self.client.get("/metrics").text)
        return speculation(before, after)["accepted_length"]

    def sampled(self) -> list[list[int]]:
        """64 answers of two tokens, at temperature 0.5. The first comes from the prefill, the second from a draft."""
        body = {"model": self.model, "prompt": PROMPTS[0], "max_tokens": 2, "temperature": 0.5}
        body |= {"n": 64, "ignore_eos": True, "return_token_ids": True}
        reply = self.client.post("/v1/completions", json=body)
        return [choice["token_ids"] for choice in reply.json()["choices"]]

    def chances(self, temperature: float) -> Tensor:
        """Exact probabilities of an answer's two tokens, [vocabulary, vocabulary] float32."""
        tokens = range(self.target.vocab_size)
        rows = torch.tensor([[*PROMPTS[0], token] for token in tokens])
        with torch.no_grad():
            logits = self.target.model(rows).logits[:, -2:] / temperature
        likely = logits.softmax(-1)
        return likely[0, 0, :, None] * likely[:, 1]

    def swap(self, folder: str) -> httpx.Response:
        return self.client.post("/v1/drafter", json={"folder": folder})


class OpenServer(SwapServer):
    """A target without attention, each of whose tokens follows from the one before: a head can learn it from other
    prompts. The head that serves, poor, is a trained one with noise; its drafter is in the folder `drafter`.
    """

    def make_target(self, folder: Path) -> Target:
        target = tiny_target(folder)
        with torch.no_grad():
            for layer in target.model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
        target.model.save_pretrained(folder)
        return Target.load(str(folder), "float32", "cpu")

    def serve_poor(self) -> None:
        self.drafter = self.root.parent / "poor"
        shutil.copytree(self.root.parent / "drafters" / "eagle3", self.drafter)
        file = self.drafter / "model.safetensors"
        torch.manual_seed(1)
        noisy = {}
        for name, it in load(file.read_bytes()).items():
            noisy[name] = it
            if it.is_floating_point() and it.dim() == 2:
                noisy[name] = it + it.std() * torch.randn(it.shape)
        save_file(noisy, file, {"format": "pt"})
        export(
            find_drafter(str(self.drafter)),
            "vllm",
            self.root / "poor",
            torch.float32,
            self.model,
            3,
        )
        assert self.swap("poor").status_code == 200

    def log(self, file: Path, prompts: list[list[int]]) -> None:
        """Appends the answers to prompts, as a client of the server would."""
        for prompt in prompts:
            line = {"prompt_token_ids": prompt, "token_ids": self.answer(prompt)}
            with file.open("a") as part:
                part.write(json.dumps(line) + "\n")


class TwoRanks(SwapServer):
    """Two processes with half of the target's and the head's rows each."""

    parallel = ("--tensor-parallel-size", "2")


SERVERS = {"open": OpenServer, "two ranks": TwoRanks}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory, request):
    place = tmp_path_factory.mktemp("vllm")
    asked = getattr(request, "param", "eagle3")
    kind = "eagle3" if asked in SERVERS else asked
    server = SERVERS.get(asked, SwapServer)(place, kind)
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


@pytest.mark.parametrize("vllm", ["open"], indirect=True)
def test_what_the_watcher_learned_serves_and_more_is_accepted(vllm, tmp_path, monkeypatch):
    vllm.serve_poor()
    poor = vllm.accepted_length()
    vllm.log(tmp_path / "log.jsonl", tiny_prompts(40))
    monkeypatch.setenv("SWAP_KEY", "key-of-tests")
    monkeypatch.setattr(adapt.Adapter, "budget", lambda self: self.account() or 1e6)
    words = ["adapt", "--once", "--watch", "--server", vllm.url, "--api-key-env", "SWAP_KEY"]
    given = {
        "drafter": vllm.drafter,
        "log": tmp_path / "log.jsonl",
        "output": tmp_path / "out",
        "target": vllm.model,
        "every": 32,
        "hold-out": 0.4,
        "passes": 20,
        "learning-rate": 3e-3,
        "dtype": "float32",
    }
    assert main([*words, *(f"--{key}={value}" for key, value in given.items())]) == 0
    assert vllm.client.get("/v1/drafter").json()["folder"] == "version-0001"
    assert vllm.accepted_length() > 1.2 * poor
    rows = [json.loads(line) for line in (tmp_path / "out" / "journal.jsonl").open()]
    assert [row["event"] for row in rows] == ["start", "round", "swap", "stop"]


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
    for number in range(40):
        assert vllm.swap("ca"[number % 2]).status_code == 200
    ended.set()
    for thread in streams:
        thread.join()
    assert found == [True] * len(found) and len(found) >= 8


def fits(seen: Tensor, chances: Tensor) -> float:
    """p of a chi-square test; cells that expect fewer than 5 are one cell."""
    total = float(seen.sum())
    expected = chances.flatten().double() * total
    often = expected >= 5
    found = seen.flatten()[often].tolist()
    wanted = expected[often].tolist()
    assert len(found) > 50
    found.append(total - sum(found))
    wanted.append(total - sum(wanted))
    return float(stats.chisquare(found, wanted).pvalue)


def test_sampled_answers_keep_their_distribution_across_swaps(vllm):
    exact = vllm.chances(0.5)
    seen = torch.zeros_like(exact)
    for number in range(SAMPLES // 64):
        swap = threading.Thread(target=vllm.swap, args=("ca"[number % 2],))
        swap.start()
        for first, second in vllm.sampled():
            seen[first, second] += 1
        swap.join()
    assert fits(seen, exact) > 1e-4
    # So many answers tell another temperature apart.
    assert fits(seen, vllm.chances(0.6)) < 1e-6


@pytest.mark.parametrize("vllm", ["eagle1"], indirect=True)
def test_eagle1_is_swapped_too(vllm):
    trained = vllm.accepted_length()
    for name in "ca":
        assert vllm.swap(name).status_code == 200
        assert (vllm.accepted_length() == pytest.approx(trained, rel=0.02)) == (name == "a")


@pytest.mark.parametrize("vllm", ["two ranks"], indirect=True)
def test_both_ranks_take_the_head_or_none(vllm):
    trained = vllm.accepted_length()
    digests = {name: read_head(vllm.root / name, "").digest for name in "ac"}
    assert vllm.swap("c").json()["sha256"] == digests["c"]
    assert vllm.accepted_length() < 1.3 < 2 < trained
    assert vllm.swap("missing").status_code == 409
    assert vllm.client.get("/v1/drafter").json()["sha256"] == digests["c"]
    assert vllm.swap("a").json()["sha256"] == digests["a"]
    assert vllm.accepted_length() == pytest.approx(trained, rel=0.02)
