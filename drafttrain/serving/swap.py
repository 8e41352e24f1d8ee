"""`drafttrain swap`: asks a vLLM server to put another head in the place of the one that serves.

The server needs drafttrain's route (inside_vllm/). It reads the head itself, from a folder below
its root; only the folder's name and the digest of the files are sent.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import NotRequired

from typing_extensions import TypedDict

from drafttrain.data.failures import BadReply
from drafttrain.data.servers import Requests, server_address
from drafttrain.drafters.shipping import ExportRequest, find_drafter, shipping
from drafttrain.errors import UserError
from drafttrain.export.export_drafter import export
from drafttrain.files import Json
from drafttrain.inside_vllm.head_files import SwapRefused, digest_of
from drafttrain.outcome import conclude
from drafttrain.target import resolve_dtype

PATH = "/v1/drafter"
_ASK_SECONDS = 60.0
_SWAP_SECONDS = 600.0  # a swap waits for a step, and large heads are read from a disk


class ServedDrafter(TypedDict):
    """The head that serves, as the route says it."""

    folder: str
    sha256: str
    swaps: int
    root: str
    architectures: list[str]
    dtypes: list[str]
    prefix_cache_dropped: NotRequired[bool]


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises UserError: no server with the route, or a refused head."""
    with contextlib.closing(Swapper(args.server, args.api_key_env or "")) as swapper:
        before = swapper.show()
        if not args.drafter:
            print(f"{swapper.url} serves {before['folder']} ({before['sha256'][:12]})")
            conclude({"served": before})
            return 0
        after = swapper.swap(args.drafter, before)
    kept = ""
    if not after.get("prefix_cache_dropped"):
        kept = "; cached prefixes keep the old head's keys until they are dropped"
    print(
        f"{swapper.url}: {before['folder']} ({before['sha256'][:12]}) -> {after['folder']} "
        f"({after['sha256'][:12]}), swap {after['swaps']} of this server{kept}"
    )
    conclude({"before": before, "served": after})
    return 0


class HeadRefused(UserError):
    """A head that the server, or its form, does not take. The old one serves on."""


class Swapper:
    """Swaps heads of one server.

    Args:
        server: its address. variable: environment variable of its API key; '' for none.

    Raises:
        UserError: not an address.
    """

    def __init__(self, server: str, variable: str = ""):
        self.url = server_address(server)
        self._requests = Requests(variable)

    def close(self) -> None:
        self._requests.close()

    def show(self) -> ServedDrafter:
        """The head that serves. Raises UserError: no server with the route."""
        try:
            return self._requests.json(
                "GET", f"{self.url}{PATH}", None, ServedDrafter, _ASK_SECONDS
            )
        except BadReply as bad:
            if bad.reason == "HTTP 404":
                raise UserError(
                    f"server={self.url!r} has no route for swaps; start it as drafttrain export "
                    "--swap-root DIR prints it"
                ) from bad
            raise UserError(f"server={self.url!r} cannot swap heads ({bad})") from bad

    def swap(self, drafter: str, served: ServedDrafter) -> ServedDrafter:
        """Puts a head in the served one's place.

        Args:
            drafter: a folder below the server's root, or its name there; or a trained drafter,
                which is exported into the root first.
            served: of `show`.

        Raises:
            UserError: the server refuses it, or does not answer.
        """
        return self.send(head_below(drafter, served))

    def send(self, body: Json) -> ServedDrafter:
        """Asks for a swap.

        Args:
            body: of `head_below`.

        Raises:
            HeadRefused: the server checked the head and refuses it.
            UserError: the server does not answer.
        """
        try:
            return self._requests.json(
                "POST", f"{self.url}{PATH}", body, ServedDrafter, _SWAP_SECONDS
            )
        except BadReply as bad:
            if bad.reason.startswith("HTTP 4"):
                raise HeadRefused(
                    f"drafter={body['folder']!r} is refused, and the old head serves on ({bad.detail})"
                ) from bad
            raise UserError(
                f"server={self.url!r} did not confirm the swap ({bad}); ask which head serves: "
                f"drafttrain swap --server {self.url}"
            ) from bad


def head_below(drafter: str, served: ServedDrafter) -> Json:
    """The body of a swap's request.

    Raises:
        HeadRefused: a folder that is neither below the server's root nor a trained drafter, or that
            cannot be read.
    """
    folder = Path(drafter).expanduser()
    root = Path(served["root"])
    if not folder.is_dir():
        # The server may have its disk elsewhere.
        if folder.is_absolute():
            raise HeadRefused(f"drafter={drafter!r}: no such folder; name one below {str(root)!r}")
        below = root / drafter
        if not below.is_dir():
            return {"folder": drafter}
        folder = below
    folder = folder.resolve()
    if root.resolve() not in folder.parents:
        folder = _exported(folder, root.resolve(), served)
    try:
        digest = digest_of(folder)
    except SwapRefused as refused:
        raise HeadRefused(f"drafter={drafter!r} cannot be swapped in: {refused}") from refused
    return {"folder": str(folder.relative_to(root.resolve())), "sha256": digest}


def _exported(folder: Path, root: Path, served: ServedDrafter) -> Path:
    """A trained drafter in the served form, below the server's root.

    Raises:
        HeadRefused: not a trained drafter, or a root that is not on this machine.
    """
    fix = f"export it to a folder below {str(root)!r}, which the server reads"
    if not root.is_dir():
        raise HeadRefused(
            f"drafter={str(folder)!r}: the server's root {str(root)!r} is not on this machine; "
            "copy an export there, and name its folder"
        )
    try:
        trained = find_drafter(str(folder))
    except UserError as error:
        raise HeadRefused(
            f"drafter={str(folder)!r} is outside of the server's root; {fix}"
        ) from error
    place = root / folder.name
    dtype = resolve_dtype(served["dtypes"][0])
    kind = shipping(trained.kind)
    for form in kind.formats:
        if form not in ("vllm", "sglang") or kind.unsupported(trained, form):
            continue
        request = ExportRequest(place, dtype, trained.target_name, 1)
        described = kind.engine_config(kind.load(trained), form, request)
        if described.get("architectures") == served["architectures"]:
            export(trained, form, place, dtype, trained.target_name)
            return place
    raise HeadRefused(
        f"drafter={str(folder)!r}: its kind {trained.kind} is not written as "
        f"{', '.join(served['architectures'])}, which the server drafts with; restart it"
    )
