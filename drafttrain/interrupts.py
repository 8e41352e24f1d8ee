"""Ctrl-C and SIGTERM end a command within two seconds: finished work stays, one line, exit status
130 or 143.

The signal's handler raises `Interrupted` in the main thread. Python runs handlers between its own
instructions only, so a long call into C, a library that catches everything, or a thread that waits
for a server could delay the end. A watching thread, woken by the signal itself, therefore ends the
process after GRACE seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

GRACE = 1.5  # seconds from the signal to the end of the process at the latest
_received = 0  # the signal that ends this process
_saying = threading.Lock()  # taken by the thread that writes the line


class Interrupted(KeyboardInterrupt):
    """A signal ends the command. Libraries treat it as Ctrl-C."""


def interrupt(number: int, frame: FrameType | None = None) -> None:
    """The signals' handler. Further signals change nothing: the process is ending."""
    global _received
    if _received:
        return
    _received = number
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            _exit(number)  # an exception inside the import of a C++ library may abort the process
        frame = frame.f_back
    logging = sys.modules.get("logging")
    if logging:
        logging.disable()  # asyncio and others would log the exception with its traceback
    raise Interrupted


def install() -> None:
    """Makes this process end on SIGINT and SIGTERM as described above; `main` of the command line
    calls it first.

    Signals that are ignored (nohup, a shell's background job) stay ignored. Forked children get a
    quiet default: their parent ends them.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    threading.Thread(
        target=_watch,
        args=(signals,),
        daemon=True,
    ).start()
    os.register_at_fork(after_in_child=_in_child)
    atexit.register(_leave)  # registered first, so it runs last
    report = sys.unraisablehook  # prints `Exception ignored in ...`
    sys.unraisablehook = lambda unraisable: None if _received else report(unraisable)


def _watch(signals: int) -> None:
    """Ends the process GRACE seconds after a signal, unless it ends by itself before."""
    while number := os.read(signals, 1)[0]:
        if signal.getsignal(number) is interrupt:  # training answers signals itself: SaveOnTerm
            time.sleep(GRACE)
            _exit(number)


def _exit(number: int) -> NoReturn:
    """Ends the process from anywhere: writes the line, unless it is written, and leaves no child
    behind.
    """
    if _saying.acquire(blocking=False):
        show_cursor = ""
        if os.isatty(2):  # progress bars hide it
            show_cursor = "\x1b[?25h"
        with contextlib.suppress(OSError):
            os.write(2, f"{show_cursor}{_line(number)}\n".encode())
    for library in {"multiprocessing", "multiprocess"} & sys.modules.keys():
        # The function is missing while the module is imported.
        children = getattr(sys.modules[library], "active_children", list)
        for child in children():
            child.kill()
    os._exit(128 + number)


def _leave() -> None:
    """Leaves out that Python takes its modules apart, which takes seconds with torch and which
    nothing could cut short.
    """
    if _received:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(128 + _received)


def _in_child() -> None:
    # A signal to a child must not wake the parent's watching thread through the shared pipe.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _line(number: int) -> str:
    word = "interrupted"
    if number == signal.SIGTERM:
        word = "terminated"
    return f"{word}; what was finished is kept: run the same command again to continue"


def cause(error: BaseException) -> int:
    """The signal behind an exception, which libraries may have turned into another one; 0 if there
    is none.
    """
    if _received:
        return _received
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    return 0


def end(number: int) -> int:
    """Writes the line and returns the exit status. What libraries write while the process ends is
    silenced.
    """
    if not _received or _saying.acquire(blocking=False):
        print(_line(number), file=sys.stderr, flush=True)
    if _received:
        # Standard error leads nowhere from now on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return 128 + number
