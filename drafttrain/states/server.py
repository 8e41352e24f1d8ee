"""A vLLM server that hands out the target's states: its command, its folder, its life.

vLLM comes from an environment of the user's own, which needs no drafttrain. With a folder on GPUs
it runs as it is; on CPUs, and with a Mooncake store, it imports its connector from engines/. The
server is a child of this process and ends with it.
"""

from __future__ import annotations

import json
import os
import shutil
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

from drafttrain.errors import UserError, first_line
from drafttrain.files import Json, lock, writing
from drafttrain.states.engine_server import (
    END_SECONDS,
    HOST,
    EngineServer,
    address_of,
    flag_value,
    look_for_vllm,
    refuse_flags,
    vllm_serve,
)
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
TAKEN = ("--speculative-config", "-sc", "--kv-transfer-config", "--model")  # flags that we set
_FREE = 4e9  # bytes of shared memory below which the temporary folder is used
_KEPT_SECONDS = 120.0  # clients read a file when its answer comes; what stays belongs to nobody
_LOCK = ".drafttrain-states"


def served_layers(layers: Sequence[int], target: Target) -> tuple[int, ...]:
    """The layers that a server writes so that a drafter can read `layers`.

    They ascend. The target's last output, which the final norm reads, is always there.
    """
    wanted = set(layers) - {LAST} | {target.num_layers}
    return tuple(sorted(wanted))


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
class StateServer(EngineServer):
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
        refuse_flags(self.flags, TAKEN)
        self.started = time.time_ns()
        self.url = address_of(self.flags, "8000")
        folder = _default_folder(self.url.rpartition(":")[2])
        if self.states_dir:
            folder = Path(self.states_dir)
        self.folder = folder.expanduser().absolute()
        self.layers = served_layers(self.layers, self.target)
        self.found = look_for_vllm(self.python)
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
        words = vllm_serve(self.python, self.found, self.target.path)
        # vLLM alone would listen on all addresses.
        if not flag_value(self.flags, "--host", ""):
            words += ["--host", HOST]
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
        # Rows with images are sent as chats with a template of their own.
        if self.target.sight is not None and "--trust-request-chat-template" not in self.flags:
            words.append("--trust-request-chat-template")
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

    def start(self) -> None:
        """Prepares the folder and starts vLLM.

        Raises:
            UserError: a folder of others or in use, or a store without a master.
        """
        if self.store:
            self.store.check()
        else:
            self._prepare_folder()
        super().start()

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

    def stop(self, seconds: float = END_SECONDS) -> None:
        """Ends vLLM with all its processes within so many seconds, and cleans its folder."""
        super().stop(seconds)
        if self._lock is not None:
            self.sweep(0.0)
            for name in (RECORD, _LOCK):
                (self.folder / name).unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()
            os.close(self._lock)
        self._lock = None


def _default_folder(port: str) -> Path:
    parent = Path("/dev/shm")
    if not parent.is_dir() or shutil.disk_usage(parent).free <= _FREE:
        parent = Path(tempfile.gettempdir())
    return parent / f"drafttrain-states-{os.geteuid()}-{port}"
