"""Streamed training under kill -9 of the server and of the trainer: the rows and the result of a run that nothing interrupts."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.states.stand_ins import LAYERS, SERVED
from tests.training.checkpoint_states import same
from tests.training.checkpoint_states import state_of as full_state
from tests.training.runs import ROOT, write_recipe

# optimizer steps of two micro-batches of two rows; 20 of 24 conversations are trained on
STEPS = 40
EPOCH = 5
KILLS = 8  # of the server, and as many of the trainer
MOST_BATCHES_BETWEEN = 9  # kills of the trainer, so that it does not finish before the last one
RECIPE = {
    "drafter": {
        "draft_vocab_size": 255,
        "ttt_steps": 2,
        "feature_layers": list(LAYERS),
        "depth_share": 0.5,
    },
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "validation": 4 / 24,
    "max_steps": STEPS,
    "save_steps": 3,
    "logging_steps": 1,
    "init": "random",
    "cache_gb": 0,  # each epoch asks again
}


class ServerProcess:
    """The fake server in a process of its own, always on the same port."""

    def __init__(self, target: Path, folder: Path):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        layers = ",".join(map(str, SERVED))
        self.command = [
            sys.executable,
            "-m",
            "tests.states.fake_state_server",
            str(target),
            str(folder),
            layers,
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [*self.command, str(self.port)], cwd=ROOT, stdout=subprocess.DEVNULL
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/v1/models", timeout=1.0).is_success
        return False


class ServerKiller(threading.Thread):
    """Kills the server at random moments, and starts it again."""

    def __init__(self, server: ServerProcess, chance: random.Random):
        super().__init__(daemon=True)
        self.server, self.chance, self.done, self.kills = server, chance, threading.Event(), 0

    def run(self) -> None:
        while self.kills < KILLS and not self.done.wait(0.02):
            if self.server.answers():
                self.done.wait(self.chance.uniform(0, 2))
                self.server.kill()
                self.kills += 1
                self.done.wait(self.chance.uniform(0, 0.5))
                self.server.start()


def start_training(notes: Path, words: list[str]) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "tests.training.noted_training", str(notes), "0.05", *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def noted(notes: Path) -> list[dict]:
    """Complete lines; a killed process may leave a part of one."""
    text = notes.read_text() if notes.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]


def rows_by_step(notes: list[dict]) -> dict[int, list[list[int]]]:
    """The rows of each step's micro-batches. Each process goes on without a gap, and repeats the same rows."""
    steps: dict[int, list[list[int]]] = {}
    for _, lines in itertools.groupby(notes, lambda line: line["process"]):
        attempt = {
            step: [line["rows"] for line in part]
            for step, part in itertools.groupby(lines, lambda x: x["step"])
        }
        first = min(attempt)
        last = max(attempt)
        assert list(attempt) == list(range(first, last + 1)) and first <= len(steps), (
            "a step is left out"
        )
        for step, batches in attempt.items():
            earlier = steps.get(step, batches)
            assert all(a == b for a, b in zip(earlier, batches, strict=False)), (
                f"step {step} has other rows than before"
            )
            assert len(batches) == 2 or step == last, f"step {step} is incomplete"
        steps |= attempt
    return steps


@pytest.mark.slow
def test_kills_of_server_and_trainer_change_neither_rows_nor_weights(tiny, tmp_path):
    target, data = tiny
    server = ServerProcess(target, tmp_path / "states")
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    words = write_recipe(tmp_path, target, data, **RECIPE, target_url=server.url)
    killer = ServerKiller(server, random.Random(seed + 1))
    notes = tmp_path / "notes.jsonl"
    whole = tmp_path / "whole.jsonl"
    moments = []  # micro-batches that the killed process had computed
    try:
        with start_training(whole, [*words, f"output_dir={tmp_path / 'whole'}"]) as process:
            said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said[-3000:]
        killer.start()
        for kill in range(KILLS):
            before = len(noted(notes))
            batches = chance.randint(1, MOST_BATCHES_BETWEEN) if kill % 4 else 0
            with start_training(notes, words) as process:
                if not batches:  # while it starts, proves the server, or reads a checkpoint
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(chance.uniform(0, 6))
                while batches and len(noted(notes)) < before + batches and process.poll() is None:
                    time.sleep(0.005)
                time.sleep(chance.uniform(0, 0.1))
                process.kill()
                said, _ = process.communicate()
            moments.append(len(noted(notes)) - before)
            assert process.returncode == -signal.SIGKILL, (
                f"seed {seed}: it ended by itself\n{said[-3000:]}"
            )
        with start_training(notes, words) as process:
            said, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and "going on from" in said, f"seed {seed}: {said[-3000:]}"
        killer.join(60)
    finally:
        killer.done.set()
        if killer.ident:
            killer.join()
        server.kill()
    attempts = noted(notes)
    ours = rows_by_step(attempts)
    theirs = rows_by_step(noted(whole))
    assert list(ours) == list(range(STEPS)) and ours == theirs, f"seed {seed}"
    for epoch in range(STEPS // EPOCH):
        seen = Counter(
            row
            for step in range(epoch * EPOCH, (epoch + 1) * EPOCH)
            for rows in ours[step]
            for row in rows
        )
        assert len(seen) == 20 and set(seen.values()) == {1}, (
            f"seed {seed}: epoch {epoch} has rows {dict(seen)}"
        )
    states = [full_state(tmp_path / name / f"checkpoint-{STEPS}") for name in ("drafter", "whole")]
    for part in states[0]:
        assert same(states[0][part], states[1][part]), f"{part} differs, seed {seed}"
    assert killer.kills == KILLS
    print(f"seed {seed}: {KILLS} kills of the trainer, after {moments} micro-batches; {killer.kills} of the server; "
          f"{len(attempts)} micro-batches computed for {2 * STEPS}")  # fmt: skip
