"""How a server's states arrive: as files of a folder, or as objects of a Mooncake store."""

from __future__ import annotations

from drafttrain.errors import UserError
from drafttrain.states.transports.folder import FolderTransport
from drafttrain.states.transports.mooncake import MooncakeTransport
from drafttrain.states.transports.transport import (
    FileReply,
    StatesTransport,
    StoreRecord,
    StoreReply,
)


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
            f"url={url!r} puts states into a Mooncake store without a record; start it with: "
            f"{start} --transport mooncake"
        )
    if states_dir:
        raise UserError(
            f"states_dir={states_dir!r} is for servers with a folder; url={url!r} uses Mooncake; "
            "drop it"
        )
    return MooncakeTransport(record, url, before)
