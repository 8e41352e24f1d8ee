"""States as files that vLLM's connector writes into a folder: read once complete, and deleted."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from drafttrain.credentials import redact
from drafttrain.data.failures import BadReply, one_line
from drafttrain.data.servers import TIME_OUT
from drafttrain.errors import UserError
from drafttrain.files import read_json, write_json
from drafttrain.states.transports.transport import FileReply, StatesRecord, StatesTransport
from drafttrain.target import Target

RECORD = "drafttrain-states.json"  # in a folder of states: what `serve-target` serves
_FILE = re.compile(r"\w[\w.:@-]*\.safetensors", re.ASCII)
_SETTLE = 5.0  # seconds in which a complete file appears on a network disk


def write_record(folder: Path, target: Target, layers: Sequence[int]) -> None:
    """Announces what a server is about to write into a folder.

    The file's new time makes clients prove the server again.
    """
    record: StatesRecord = {
        "target": target.identity(),  # type: ignore[typeddict-item]
        "layers": list(layers),
        "folder": str(folder),
    }
    write_json(folder / RECORD, record)


class FolderTransport(StatesTransport):
    """Files of a folder that both sides see. The arguments are those of `open_transport`."""

    fix = "free space in its --states-dir"

    def __init__(self, named: FileReply, states_dir: str, url: str, start: str):
        self.url = url
        self.start = start
        folder = os.path.dirname(named["hidden_states_path"])
        self.folder = Path(states_dir or folder).expanduser()
        if not self.folder.is_dir():
            raise UserError(
                f"url={url!r} writes states to {folder!r}, which this machine does not see; mount "
                "that folder, and name it here with states_dir if its path differs"
            )
        fix = f"write it again: {start} --states-dir {shlex.quote(folder)}"
        self.where = str(self.folder / RECORD)
        self.record: StatesRecord = read_json(self.folder / RECORD, "states_dir", fix, StatesRecord)
        self.written = self._time()

    def _time(self) -> int:
        """Time of the folder's record in nanoseconds; 0 without one."""
        try:
            return (self.folder / RECORD).stat().st_mtime_ns
        except OSError:
            return 0

    def is_current(self) -> bool:
        return self._time() == self.written

    def take(self, named: FileReply, seconds: float) -> dict[str, Tensor]:
        folder, name = os.path.split(named["hidden_states_path"])
        if folder != self.record["folder"] or not _FILE.fullmatch(name):
            raise UserError(
                f"url={self.url!r} names the file {one_line(named['hidden_states_path'])!r}, "
                f"which is not a file of states in its folder {self.record['folder']!r}; start it "
                f"with: {self.start}"
            )
        return take_states(self.folder / name, seconds)


def take_states(path: Path, seconds: float) -> dict[str, Tensor]:
    """Reads a file of states when its writer has unlocked it, and deletes it with its lock.

    Args:
        seconds: to wait for the writer.

    Returns:
        hidden_states [n, layers, h], token_ids [n].

    Raises:
        BadReply: no complete file; it may be torn because its writer was killed.
    """
    lock = path.with_name(f"{path.name}.lock")
    began = time.monotonic()
    pause = 0.001
    unlocked: float | None = None  # since when the writer is done
    try:
        while True:
            if not _is_locked(lock):
                try:
                    found = safetensors.torch.load(_read_regular(path))
                    if {"hidden_states", "token_ids"} <= found.keys() and found[
                        "hidden_states"
                    ].ndim:
                        return found
                    problem = f"holds {one_line(', '.join(found))}"
                    reason = "torn file"
                except FileNotFoundError:
                    problem = "was announced and is not there"
                    reason = "no file"
                except (OSError, SafetensorError, ValueError) as error:
                    problem = f"cannot be read ({error})"
                    reason = "torn file"
                if unlocked is None:
                    unlocked = time.monotonic()
                if time.monotonic() - unlocked > _SETTLE:
                    raise BadReply(reason, redact(f"{path} {problem}"), retry=True)
            elif time.monotonic() - began > seconds:
                raise BadReply(TIME_OUT, f"{path} is still being written after {seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
    finally:
        for file in (path, lock):
            with suppress(OSError):
                file.unlink()


def _read_regular(path: Path) -> bytes:
    """A file's bytes.

    Raises:
        OSError: a link or a special file. A server may not make us read elsewhere.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path.name} is not a regular file")
        return opened.read()


def _is_locked(lock: Path) -> bool:
    """Whether a writer holds the lock; vLLM takes it before it names the file."""
    try:
        file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system: a complete file counts
        return False
    finally:
        os.close(file)
    return False
