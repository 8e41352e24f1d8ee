"""Ctrl-C and SIGTERM end every command soon: one line, exit status 130 or 143, finished work stored."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest
import torch

from drafttrain import cli
from drafttrain.files import write_jsonl
from tests.data.faulty_server import FaultyServer
from tests.files import FIXTURES, load_json

MANY = 24  # conversations
# Seconds after which a command counts as stuck. The aim is 2; a loaded machine may take far longer, so what
# blocks a command below blocks it for an hour.
SLACK = 120.0
LINES = {
    signal.SIGINT: "interrupted; what was finished is kept",
    signal.SIGTERM: "terminated; what was finished is kept",
}
SIGNALS = pytest.mark.parametrize("number", LINES, ids=["SIGINT", "SIGTERM"])


class Forked:
    """A command in a child of this process, which has loaded torch before; as much of Popen as is used here."""

    def __init__(self, words: list[str], folder: Path, out: TextIO, err: TextIO):
        self._child = multiprocessing.get_context("fork").Process(
            target=self._run, args=(words, folder, out, err)
        )
        self._child.start()
        self.pid = self._child.pid

    @staticmethod
    def _run(words: list[str], folder: Path, out: TextIO, err: TextIO) -> None:
        os.chdir(folder)
        for number, file in ((1, out), (2, err)):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        torch.set_num_threads(1)  # threads of the parent's do not live on in a child
        sys.argv = ["drafttrain", *words]
        sys.exit(cli.main())

    @property
    def returncode(self) -> int | None:
        return self._child.exitcode

    def poll(self) -> int | None:
        return self._child.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float) -> None:
        self._child.join(seconds)
        if self._child.is_alive():
            raise subprocess.TimeoutExpired(self._child.name, seconds)

    def kill(self) -> None:
        self._child.kill()


class Command:
    """A command in a process of its own, in `folder`; its output goes to files there.

    script: a Python file instead of the command line. fork: whether this process's modules are kept, which saves their import.
    """

    def __init__(
        self,
        folder: Path,
        words: list[str],
        script: str = "",
        fork: bool = False,
        **environment: str,
    ):
        self.folder = folder
        self.words = words
        self.out = folder / "stdout"
        self.err = folder / "stderr"
        variables = {**os.environ, "PYTHONPATH": str(FIXTURES.parents[1]), **environment}
        with self.out.open("w") as out, self.err.open("w") as err:
            if fork and not torch.cuda.is_initialized():  # CUDA does not work in a forked child
                self.process = Forked(words, folder, out, err)
                return
            self.process = subprocess.Popen(
                [sys.executable, *([script] if script else ["-m", "drafttrain.cli"]), *words],
                cwd=folder,
                env=variables,
                stdout=out,
                stderr=err,
                preexec_fn=lambda: signal.signal(
                    signal.SIGINT, signal.SIG_DFL
                ),  # a runner in the background ignores it
            )

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Waits until the condition holds; False if the command has ended before."""
        until = time.monotonic() + 120
        while not condition():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < until, self.err.read_text()[-2000:]
            time.sleep(0.01)
        return True

    def listening(self) -> bool:
        """The handlers are installed: SIGTERM, which Python leaves alone, is caught."""
        caught = next(
            line for line in self._proc("status").splitlines() if line.startswith("SigCgt")
        )
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    def loads_torch(self) -> bool:
        return "libtorch" in self._proc("maps")

    def _proc(self, name: str) -> str:
        try:
            return Path(f"/proc/{self.process.pid}/{name}").read_text()
        except OSError:  # it has ended
            return "SigCgt: 0"

    def ends(self, number: int, line: str = "") -> None:
        """Sends the signal and checks how the command ends."""
        self.process.send_signal(number)
        try:
            self.process.wait(SLACK)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        said = self.err.read_text()
        assert self.process.returncode == 128 + number, said[-2000:]
        assert not any(
            word in said for word in ("Traceback", "Exception ignored", "error:", "Error")
        ), said[-2000:]
        lines = said.strip().splitlines()
        assert lines[-1].startswith(line or LINES[number]), said[-2000:]
        assert sum("; what was finished is kept" in each for each in lines) <= 1


@pytest.fixture
def folder(tmp_path):
    """The fixtures' target, drafter, data, suite and prompts."""
    for name in (
        "target",
        "drafters/eagle3",
        "data",
        "suite.jsonl",
        "prompts.jsonl",
        "chats.jsonl",
        "run.yaml",
    ):
        copy = shutil.copytree if (FIXTURES / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy(FIXTURES / name, tmp_path / name)
    shutil.copy(FIXTURES / "results/eagle3.json", tmp_path / "results.json")
    many = [
        {"id": f"c{i}", "messages": [{"role": "user", "content": f"Name {i} songs."}]}
        for i in range(MANY)
    ]
    write_jsonl(tmp_path / "many.jsonl", many)
    answers = [
        {"messages": [*row["messages"], {"role": "assistant", "content": "la " * 20}]}
        for row in many
    ]
    write_jsonl(tmp_path / "answers.jsonl", answers)
    questions = [{"turns": [f"Name {i} keys."]} for i in range(7)]
    write_jsonl(tmp_path / "many_suite.jsonl", questions)
    return tmp_path


def lines_of(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\n")[:-1] if path.is_file() else []


GENERATE = [
    "generate",
    "--target",
    "target",
    "--prompts",
    "many.jsonl",
    "--output",
    "out",
    "--max-length",
    "256",
]


@pytest.mark.thorough
def test_while_modules_are_imported(folder):
    command = Command(folder, ["eval", "--target", "target", "--drafter", "ngram"])
    assert command.wait_for(command.loads_torch)
    command.ends(signal.SIGINT)
    assert lines_of(command.err) == [
        LINES[signal.SIGINT] + ": run the same command again to continue"
    ]


@pytest.mark.thorough
def test_generation_keeps_what_was_finished(folder, monkeypatch):
    command = Command(folder, [*GENERATE, "--slots", "1", "--max-new-tokens", "48"], fork=True)
    part = folder / "out" / "part-0000.jsonl"
    assert command.wait_for(lambda: len(lines_of(part)) > 3)
    command.ends(signal.SIGINT)
    kept = lines_of(part)
    assert 3 < len(kept) < MANY and part.read_bytes().endswith(b"\n")
    monkeypatch.chdir(folder)
    assert cli.main([*GENERATE, "--max-new-tokens", "48"]) == 0
    rows = [json.loads(line) for line in lines_of(part)]
    assert lines_of(part)[: len(kept)] == kept
    assert sorted(row["id"] for row in rows) == sorted(f"c{i}" for i in range(MANY))


@pytest.mark.thorough
def test_while_a_server_hangs(folder, monkeypatch):
    with FaultyServer(script={f"Name {i} songs.": "hang" for i in range(2, 12)}) as server:
        command = Command(
            folder, [*GENERATE, "--backend", "openai", "--url", server.url], fork=True
        )
        part = folder / "out" / "part-0000.jsonl"
        assert command.wait_for(
            lambda: server.struck["hang"] == 10 and len(lines_of(part)) == MANY - 10
        )
        command.ends(signal.SIGTERM)
    monkeypatch.chdir(folder)
    with FaultyServer() as server:
        assert (
            cli.main([*GENERATE, "--backend", "openai", "--url", server.url]) == 0
            and len(server.requests) == 10
        )
    assert len({json.loads(line)["id"] for line in lines_of(part)}) == len(lines_of(part)) == MANY


@pytest.mark.thorough
def test_a_load_test_keeps_its_finished_steps(folder):
    words = [
        "bench-server",
        "--suite",
        "suite.jsonl",
        "--requests",
        "2",
        "--warm-up",
        "0",
        "--concurrency",
        "1,2",
    ]
    with (
        FaultyServer() as server
    ):  # its replies are no streams, so requests fail, and later ones hang
        asked = server.asked
        server.asked = lambda body: (
            "hang" if len(server.requests) >= 2 else None,
            *asked(body)[1:],
        )
        command = Command(
            folder, [*words, "--url", server.url, "--output", "server.json"], fork=True
        )
        assert command.wait_for(lambda: len(server.requests) > 2)
        command.ends(signal.SIGINT)
    assert not (folder / "server.json").exists()
    partial = load_json(folder / "server.json.partial")
    assert [cell["requests"] for cell in partial["servers"]["url"]["cells"]] == [2]


STUCK = {
    "in C": 'hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)',  # one call, without a look at signals
    "swallowed": """
        while True:
            try:
                time.sleep(3600)
            except BaseException:
                pass""",
    "a thread": "threading.Thread(target=time.sleep, args=(3600,)).start(); time.sleep(3600)",
    "another error": """
        try:
            time.sleep(3600)
        except BaseException as error:
            raise RuntimeError("a loader failed") from error""",
    "a deleted object": """
        class Slow:
            def __del__(self):
                time.sleep(3600)
        Slow()
        time.sleep(3600)""",
    "an event loop": """
        async def busy():
            loop = asyncio.get_running_loop()
            while True:
                await loop.run_in_executor(None, time.sleep, 0.01)
        async def both():
            await asyncio.gather(busy(), busy())
        asyncio.run(both())""",
    "a forked child": """
        import multiprocessing
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,)).start()
        time.sleep(3600)""",
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "stuck",
    [
        pytest.param(
            name, marks=[] if name in ("in C", "swallowed", "a forked child") else pytest.mark.slow
        )
        for name in STUCK
    ],
)
def test_whatever_the_main_thread_does(tmp_path, stuck):
    """A process that is stuck ends by its watching thread."""
    body = textwrap.indent(textwrap.dedent(STUCK[stuck]).strip(), "    ")
    script = tmp_path / "script.py"
    script.write_text(f"""
import asyncio, hashlib, sys, threading, time
from drafttrain import cli
def run(argv):
    print("running", flush=True)
{body}
cli.run = run
sys.exit(cli.main())
""")
    command = Command(tmp_path, [], script=str(script))
    assert command.wait_for(lambda: "running" in command.out.read_text())
    time.sleep(0.3)
    command.ends(signal.SIGINT)
    assert lines_of(command.err) == [
        LINES[signal.SIGINT] + ": run the same command again to continue"
    ]


# -- every command ----------------------------------------------------------------------------------------------------

HUB = {"HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_x"}
MODELS = "--target target --drafter drafters/eagle3"
# Words of each command. URL stands for a server that hangs.
WORDS = {
    "fetch": "smollm2-135m --source hub --cache-dir cache",
    "prompts": "--source magpie --target target --count 5000 --output p.jsonl --slots 4",
    "generate": " ".join([*GENERATE[1:], "--slots 2 --max-new-tokens 200"]),
    "features": "--data data --target target",
    "serve-target": "--target target --layers 1 --dry-run",
    "recipes": "",
    "plan": "run.yaml --target-config target/config.json",
    "train": "run.yaml max_steps=3000 save_steps=100",
    "adapt": f"{MODELS} --log answers.jsonl --output adapted --every 8 --share 1",
    "swap": "--server URL",
    "ngram-store": "--data data --output store.safetensors",
    "eval": f"{MODELS} --suite many_suite.jsonl --output r.json --max-new-tokens 100",
    "suites": "prepare speed-bench --output rows",
    "tune": f"{MODELS} --repeats 50 --output tune.json",
    "sweep": f"{MODELS} --suite many_suite.jsonl --output sweep --batch-sizes 1,2,4",
    "diagnose": "results.json",
    "estimate": "--results results.json --target target --device h100",
    "report": "results.json --output page.html",
    "chat": MODELS,  # ends by itself without input
    "trace": f"{MODELS} --prompt hello --max-new-tokens 2000 --output t.html",
    "bench-server": "--url URL --model m --suite suite.jsonl --output s.json",
    "export": "--drafter drafters/eagle3 --format vllm --output export",
    "import": "--checkpoint drafters/eagle3 --target target --output imported",
    "doctor": "drafters/eagle3 --target target",
    "verify": f"{MODELS} --format vllm --engine none",
    "push": "--drafter drafters/eagle3 --repo user/name --without-evaluation --license mit --output published",
    "push-data": "--data data --repo user/name --prompt-license MIT --output published",
    "completion": "bash",
}


def test_every_command_is_swept():
    assert set(WORDS) == set(cli.COMMANDS)


@pytest.mark.slow
@SIGNALS
@pytest.mark.parametrize("moment", ["start", "import", "1 s later", "3 s later"])
@pytest.mark.parametrize("name", WORDS)
def test_every_command_ends(folder, name, moment, number):
    with FaultyServer(share=1, faults=["hang"]) as server:
        server.http.RequestHandlerClass = type(
            "Hanging", (server.http.RequestHandlerClass,), {"do_GET": lambda it: it.hang()}
        )
        words = WORDS[name].replace("URL", server.url).split()
        command = Command(folder, [name, *words], **{**HUB, "HF_ENDPOINT": server.url})
        early = moment == "start" or name == "fetch"  # which loads no torch
        going = command.wait_for(command.listening if early else command.loads_torch)
        if going and moment.endswith("later"):
            until = time.monotonic() + int(moment[0])
            going = command.wait_for(lambda: time.monotonic() > until)
        if not going:
            assert command.process.returncode == 0, command.err.read_text()[-2000:]
            pytest.skip("it has ended before")
        if name == "train" and "step 1/" in command.out.read_text():
            command.ends(number, f"{signal.Signals(number).name}: saved run/checkpoint-")
        else:
            command.ends(number)
