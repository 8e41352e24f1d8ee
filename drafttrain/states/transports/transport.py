"""What a server announces and replies, and the interface of a way for its states to arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal, final

from pydantic import Field
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from drafttrain.data.store import TargetIdentity


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
