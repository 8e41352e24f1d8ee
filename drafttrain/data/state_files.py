"""Files of states that vLLM's connector writes: read once complete, and deleted."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from drafttrain.credentials import redact
from drafttrain.data.backends import TIME_OUT
from drafttrain.data.failures import BadReply, one_line


def take_states(path: Path, seconds: float, settle: float) -> dict[str, Tensor]:
    """Reads a file of states when its writer has unlocked it, and deletes it with its lock.

    Args:
        seconds: to wait for the writer. settle: seconds in which a complete file then appears;
            network disks are late.

    Returns:
        hidden_states [n, layers, h], token_ids [n].

    Raises:
        BadReply: no complete file; it may be torn because its writer was killed.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        return _read_unlocked(path, lock, seconds, settle)
    finally:
        for file in (path, lock):
            with suppress(OSError):
                file.unlink()


def _read_unlocked(path: Path, lock: Path, seconds: float, settle: float) -> dict[str, Tensor]:
    began = time.monotonic()
    pause = 0.001
    unlocked = 0.0
    while True:
        if not _is_locked(lock):
            try:
                found = safetensors.torch.load(_read_regular(path))
                if {"hidden_states", "token_ids"} <= found.keys() and found["hidden_states"].ndim:
                    return found
                problem = f"holds {one_line(', '.join(found))}"
                reason = "torn file"
            except FileNotFoundError:
                problem = "was announced and is not there"
                reason = "no file"
            except (OSError, SafetensorError, ValueError) as error:
                problem = f"cannot be read ({error})"
                reason = "torn file"
            unlocked = unlocked or time.monotonic()
            if time.monotonic() - unlocked > settle:
                raise BadReply(reason, redact(f"{path} {problem}"), retry=True)
        elif time.monotonic() - began > seconds:
            raise BadReply(TIME_OUT, f"{path} is still being written after {seconds:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def _read_regular(path: Path) -> bytes:
    """A file's bytes. Raises OSError: a link, or nothing regular; a server may not make us read
    elsewhere.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path.name} is no regular file")
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
