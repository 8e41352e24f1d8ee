"""This machine's address for others. Both drafttrain and vLLM's process, which lacks drafttrain,
import this file.
"""

from __future__ import annotations

import os
import socket


def own_address(peer: str) -> str:
    """This machine's address on the way to `peer`, HOST:PORT; $MOONCAKE_LOCAL_HOSTNAME where that
    is set. Raises OSError.
    """
    if given := os.environ.get("MOONCAKE_LOCAL_HOSTNAME"):
        return given
    host, _, port = peer.rpartition(":")
    family, kind, number, _, address = socket.getaddrinfo(
        host.strip("[]"),
        int(port),
        type=socket.SOCK_DGRAM,
    )[0]
    with socket.socket(family, kind, number) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
