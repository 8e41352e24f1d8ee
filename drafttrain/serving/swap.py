"""Asks a vLLM server to put another head in the place of the one that serves.

The server needs drafttrain's route (inside_vllm/). It reads the head itself, from a folder below
its root; only the folder's name and the digest of the files are sent. swap_sglang.py asks SGLang.
"""

from __future__ import annotations

from pathlib import Path

from typing_extensions import TypedDict

from drafttrain.data.failures import BadReply
from drafttrain.data.servers import Requests, server_address
from drafttrain.drafters.shipping import find_drafter
from drafttrain.errors import UserError
from drafttrain.export.export_drafter import export
from drafttrain.files import Json
from drafttrain.inside_vllm.head_files import SwapRefused, read_head
from drafttrain.inside_vllm.swap_route import PATH
from drafttrain.target import resolve_dtype

SECONDS = 600.0  # a swap waits for a step, and large heads are read from a disk


class ServedDrafter(TypedDict):
    """The head that serves, as the server says it."""

    folder: str
    sha256: str
    root: str
    dtype: str


class HeadRefused(UserError):
    """A head that the server does not take. The old one serves on."""


class NoRoute(UserError):
    """A server without drafttrain's route."""


class Swapper:
    """Swaps heads of one vLLM server.

    Args:
        server: its address. variable: environment variable of its API key; '' for none.

    Raises:
        UserError: not an address.
    """

    form = "vllm"  # of the files that the server reads

    def __init__(self, server: str, variable: str = ""):
        self.url = server_address(server)
        self._requests = Requests(variable)

    def close(self) -> None:
        self._requests.close()

    def ask(self, body: Json | None = None) -> ServedDrafter:
        """Which head serves, or after a swap will.

        Args:
            body: of `head_below`; None swaps nothing.

        Raises:
            HeadRefused: the server checked the head and refuses it.
            UserError: no server with the route, or no answer.
        """
        method = "POST" if body else "GET"
        try:
            return self._requests.json(method, self.url + PATH, body, ServedDrafter, SECONDS)
        except BadReply as bad:
            if bad.reason == "HTTP 404":
                raise NoRoute(
                    f"server={self.url!r} has no route for swaps; start it as drafttrain export "
                    "--swap-root DIR prints it"
                ) from bad
            if bad.reason == "HTTP 409":
                raise HeadRefused(
                    f"server={self.url!r} refuses, its head serves on: {bad.detail}"
                ) from bad
            raise UserError(
                f"server={self.url!r} did not answer ({bad}); ask which head serves: "
                f"drafttrain swap --server {self.url}"
            ) from bad


def head_below(drafter: str, served: ServedDrafter, form: str = "vllm") -> Json:
    """The body of a swap's request.

    Args:
        form: of the server's files.
        drafter: a folder below the server's root, or its name there; or a trained drafter, which is
            exported into the root.

    Raises:
        HeadRefused: none of them, or files that cannot be read.
    """
    root = Path(served["root"]).resolve()
    folder = Path(drafter).expanduser()
    if not folder.is_dir():
        folder = root / drafter
    # The server may have its disk elsewhere, and says what is wrong with a name.
    if not folder.is_dir():
        return {"folder": drafter}
    folder = folder.resolve()
    try:
        if root not in folder.parents:
            trained = find_drafter(str(folder))
            name = folder.name
            # The files of a head that serves stay: others are compared with them, and they come back.
            if (root / name).exists():
                name += f"-{read_head(folder, drafter).digest[:12]}"
            folder = root / name
            export(trained, form, folder, resolve_dtype(served["dtype"]), trained.target_name)
        digest = read_head(folder, drafter).digest
    except (UserError, SwapRefused) as error:
        raise HeadRefused(
            f"drafter={drafter!r} is no export below the server's root {str(root)!r}, and not a "
            f"trained drafter that can be exported there ({error})"
        ) from error
    return {"folder": str(folder.relative_to(root)), "sha256": digest}
