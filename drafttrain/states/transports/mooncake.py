"""States as objects of a Mooncake store, for machines without a common disk."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from torch import Tensor

from drafttrain.data.failures import BadReply, one_line
from drafttrain.data.servers import UNREACHABLE
from drafttrain.errors import UserError, first_line
from drafttrain.states.engines.drafttrain_address import own_address
from drafttrain.states.transports.transport import StatesTransport, StoreRecord, StoreReply

_OBJECT = re.compile(r"[\w-]+", re.ASCII)
_PUT_SECONDS = 30.0  # from a reply until its object is in the store
# objects of a store that are read at a time; each keeps a buffer of the largest that it has read
_READERS = 4


class MooncakeTransport(StatesTransport):
    """Objects of a Mooncake store, for machines without a common disk. Threads may share it.

    Args:
        record: of the server. url: of the server.
        before: of the same server before it started again; its connection is used where the store
            is the same.
    """

    fix = "give the store more memory: --mooncake-gib"

    def __init__(
        self,
        record: StoreRecord,
        url: str,
        before: StatesTransport | None = None,
    ):
        self.record: StoreRecord = record
        self.url = url
        self._replaced = False  # the server announced another record since
        self.where = f"{record['protocol']} Mooncake store of {record['master']}"
        self.store: Any  # a MooncakeHiddenStatesStore
        self.readers: ThreadPoolExecutor
        if isinstance(before, MooncakeTransport) and before.where == self.where:
            self.store = before.store
            self.readers = before.readers
        else:
            self.store = self._connected()
            self.readers = ThreadPoolExecutor(_READERS, "mooncake")

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
                f"url={self.url!r} puts states into a Mooncake store, which needs another package "
                f"here ({first_line(error)}); pip install 'drafttrain[mooncake]', or without a "
                "GPU hs-connectors mooncake-transfer-engine-non-cuda; the engine needs the "
                "system's libibverbs1"
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
                f"url={self.url!r} names the object {one_line(named['handle'])!r}, which is not a "
                "name of states"
            )
        if named.get("record") != self.record:
            self._replaced = True  # its states stay in the store until that needs the room
            raise BadReply(
                "started again",
                "the server announces another record than before",
                retry=True,
            )
        reading = self.readers.submit(self._take, named, min(seconds, _PUT_SECONDS))
        return reading.result()

    def _take(self, named: StoreReply, seconds: float) -> dict[str, Tensor]:
        try:
            found: dict[str, Tensor] = self.store.get_sample(named, timeout=seconds)
        except TimeoutError as error:
            raise BadReply(
                "no object",
                f"{named['handle']} did not come in {seconds:g} s",
                retry=True,
            ) from error
        except RuntimeError as error:
            if type(error) is RuntimeError:
                raise BadReply(UNREACHABLE, str(error)) from error
            # A MooncakeIntegrityError: torn, refused by a full store, or not finite.
            reason = "torn object"
            if "Non-finite" in str(error):
                reason = "not finite"
            raise BadReply(reason, str(error), retry=True) from error
        finally:
            with suppress(RuntimeError):
                self.store.delete_sample(named["handle"])
        if not {"hidden_states", "token_ids"} <= found.keys() or not found["hidden_states"].ndim:
            raise BadReply("torn object", f"{named['handle']} holds {', '.join(found)}", retry=True)
        return found
