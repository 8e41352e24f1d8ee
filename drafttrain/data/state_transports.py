"""How a server's states come here: as files of a folder that both sides see, or as objects of a
Mooncake store.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import Field
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from drafttrain.data.backends import UNREACHABLE
from drafttrain.data.engines.drafttrain_address import own_address
from drafttrain.data.failures import BadReply, one_line
from drafttrain.data.state_files import take_states
from drafttrain.data.store import TargetIdentity
from drafttrain.errors import UserError, first_line
from drafttrain.files import read_json, write_json
from drafttrain.target import Target

RECORD = "drafttrain-states.json"  # in a folder of states: what `serve-target` serves
_FILE = re.compile(r"\w[\w.:@-]*\.safetensors", re.ASCII)
_OBJECT = re.compile(r"[\w-]+", re.ASCII)
_SETTLE = 5.0  # seconds in which a complete file appears on a network disk
_PUT_SECONDS = 30.0  # from a reply until its object is in the store
# objects of a store that are read at a time; each keeps a buffer of the largest that it has read
_READERS = 4


class Announced(TypedDict):
    """What a server hands out."""

    # Layers ascend; the last is the target's number of layers, the state that the final norm reads.
    target: TargetIdentity
    layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class StatesRecord(Announced):
    """What a folder of states holds: RECORD, written by `serve-target`. `folder` is its path on the
    server's machine.
    """

    folder: str


class StoreRecord(Announced):
    """What a server puts into a Mooncake store; part of each reply."""

    master: str  # HOST:PORT of the store's master
    protocol: Literal["tcp", "rdma"]
    started: int  # time.time_ns() of the server's start


@final
class FileReply(TypedDict):
    """Where a reply's states are: in a file."""

    hidden_states_path: str


@final
class StoreReply(TypedDict):
    """Where a reply's states are: in an object of a store. hs-connectors reads the other keys."""

    handle: str
    version: int
    tensors: dict[str, Any]
    metadata: dict[str, Any]
    record: NotRequired[StoreRecord | None]


def write_record(folder: Path, target: Target, layers: Sequence[int]) -> None:
    """Announces what a server is about to write into a folder. A new time tells clients to prove
    the server again.
    """
    record: StatesRecord = {
        "target": target.identity(),  # type: ignore[typeddict-item]
        "layers": list(layers),
        "folder": str(folder),
    }
    write_json(folder / RECORD, record)


class StatesTransport(ABC):
    """Where a server puts states.

    Attributes:
        record: what it announces. where: the record's place, for messages.
        fix: what helps where states keep missing or being damaged.
    """

    record: Announced
    where: str
    fix: str

    @abstractmethod
    def is_current(self) -> bool:
        """Whether the server has not announced anything else since."""

    @abstractmethod
    def take(self, named: Any, seconds: float) -> dict[str, Tensor]:
        """Reads the states that a reply names, and deletes them.

        Args:
            named: a FileReply or StoreReply. seconds: to wait for the writer.

        Returns:
            hidden_states [n, layers, h], token_ids [n].

        Raises:
            BadReply: nothing complete. UserError: a name outside what the server announced.
        """


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
                f"url={url!r} writes states to {folder!r}, which this machine does not see; mount that folder, and name it here "
                "with states_dir if its path differs"
            )
        fix = f"write it again: {start} --states-dir {folder}"
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
                f"url={self.url!r} names the file {one_line(named['hidden_states_path'])!r}, which is no file of states in its "
                f"folder {self.record['folder']!r}; start it with: {self.start}"
            )
        return take_states(self.folder / name, seconds, _SETTLE)


class MooncakeTransport(StatesTransport):
    """Objects of a Mooncake store, for machines without a common disk. Threads may share it.

    Args:
        record: of the server. url: of the server.
        before: of the same server before it started again; its connection is used where the store
            is the same.
    """

    fix = "give the store more memory: --mooncake-gib"

    def __init__(self, record: StoreRecord, url: str, before: StatesTransport | None = None):
        self.record: StoreRecord = record
        self.url = url
        self._replaced = False
        self.where = f"{record['protocol']} Mooncake store of {record['master']}"
        self.store: Any  # a MooncakeHiddenStatesStore
        self.readers: ThreadPoolExecutor
        if isinstance(before, MooncakeTransport) and before.where == self.where:
            self.store = before.store
            self.readers = before.readers
        else:
            self.store, self.readers = self._connected(), ThreadPoolExecutor(_READERS, "mooncake")

    def _connected(self) -> Any:
        """A client of the store that holds no objects itself."""
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # the engine writes each step to stderr
        try:
            from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig

            config = MooncakeStoreConfig(
                own_address(self.record["master"]),
                master_server_address=self.record["master"],
                global_segment_size=0,
                local_buffer_size=0,  # its readers register buffers of their own
                protocol=self.record["protocol"],
            )
            return MooncakeHiddenStatesStore(config).setup()
        except ImportError as error:
            raise UserError(
                f"url={self.url!r} puts states into a Mooncake store, which needs another package here ({first_line(error)}); "
                "pip install 'drafttrain[mooncake]', or without a GPU hs-connectors mooncake-transfer-engine-non-cuda; the "
                "engine needs the system's libibverbs1"
            ) from error
        except (OSError, RuntimeError) as error:
            raise BadReply(
                UNREACHABLE, f"Mooncake master {self.record['master']}: {error}"
            ) from error

    def is_current(self) -> bool:
        return not self._replaced

    def take(self, named: StoreReply, seconds: float) -> dict[str, Tensor]:
        if not _OBJECT.fullmatch(named["handle"]):
            raise UserError(
                f"url={self.url!r} names the object {one_line(named['handle'])!r}, no name of states"
            )
        if named.get("record") != self.record:
            self._replaced = True  # its states stay in the store until that needs the room
            raise BadReply(
                "started again",
                "the server announces another record than before",
                retry=True,
            )
        return self.readers.submit(self._take, named, min(seconds, _PUT_SECONDS)).result()

    def _take(self, named: StoreReply, seconds: float) -> dict[str, Tensor]:
        try:
            found: dict[str, Tensor] = self.store.get_sample(named, timeout=seconds)
        except TimeoutError as error:
            raise BadReply(
                "no object",
                f"{named['handle']} did not come in {seconds:g} s",
                retry=True,
            ) from error
        except RuntimeError as error:  # MooncakeIntegrityError is one too: torn, refused by a full store, or not finite
            known = type(error) is not RuntimeError
            if "Non-finite" in str(error):
                reason = "not finite"
            else:
                reason = "torn object"
            raise BadReply(reason if known else UNREACHABLE, str(error), retry=known) from error
        finally:
            with suppress(RuntimeError):
                self.store.delete_sample(named["handle"])
        if not {"hidden_states", "token_ids"} <= found.keys() or not found["hidden_states"].ndim:
            raise BadReply("torn object", f"{named['handle']} holds {', '.join(found)}", retry=True)
        return found


def open_transport(
    named: FileReply | StoreReply,
    states_dir: str,
    url: str,
    start: str,
    before: StatesTransport | None,
) -> StatesTransport:
    """The transport that a server's reply belongs to.

    Args:
        states_dir: the folder as this machine sees it; '' for the server's path. start: the command
            that starts the server.
        before: the transport of earlier replies of this server.

    Raises:
        UserError: a folder that is not here, no record, or no Mooncake. BadReply: the store does
            not answer.
    """
    if "handle" not in named:
        return FolderTransport(named, states_dir, url, start)
    record: StoreRecord | None = named.get("record")
    if not record:
        raise UserError(
            f"url={url!r} puts states into a Mooncake store without a record; start it with: {start} --transport mooncake"
        )
    if states_dir:
        raise UserError(
            f"states_dir={states_dir!r} is for servers with a folder; url={url!r} uses Mooncake; drop it"
        )
    return MooncakeTransport(record, url, before)
