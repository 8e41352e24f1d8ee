"""Swaps in an SGLang server, through its routes for new weights.

    /server_info, /model_info      how the server drafts, and the name of the head that serves
    /weights_checker               checksums of the weights of every rank
    /begin_weight_update, /update_weights_from_tensor, /end_weight_update
                                   tensors for the drafter alone (`selector`)

SGLang checks nothing of what it gets: a tensor of another shape ends the server, an embedding is
written into the target. So the client compares the head with the files that the server was started
with, and reads the checksums before and after. The routes' names are those of SGLang 0.5.23.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
from collections.abc import Mapping, Set
from pathlib import Path

from packaging.version import Version
from typing_extensions import NotRequired, TypedDict

from drafttrain.data.failures import BadReply
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.inside_vllm.head_files import HeadFiles, SwapRefused, check, read_head
from drafttrain.serving.swap import SECONDS, HeadRefused, ServedDrafter, Swapper

OLDEST = "0.5.23"  # the oldest release whose sources were read
_ALGORITHMS = ("EAGLE3", "EAGLE")
_NAME = "drafttrain"  # begins the server's weight_version after a swap; then digest and folder
_STARTED = "default"  # the weight_version before any update
_TOKEN_MAPS = ("d2t", "t2d")  # SGLang reads them when it starts


class ServerInfo(TypedDict):
    """What /server_info says of the drafter and of the ranks."""

    version: str
    tp_size: int
    dp_size: int
    pp_size: int
    speculative_algorithm: NotRequired[str | None]
    speculative_draft_model_path: NotRequired[str | None]
    speculative_draft_model_quantization: NotRequired[str | None]
    enable_multi_layer_eagle: NotRequired[bool]


class _ModelInfo(TypedDict):
    weight_version: str


class _Outcome(TypedDict):
    success: bool  # a failure has the status 400 besides


class _Rank(TypedDict):
    checksums: dict[str, str]  # by the weight's name


class _Checked(TypedDict):
    ranks: list[_Rank]


class SglangSwapper(Swapper):
    """Swaps heads of one SGLang server.

    A swap waits until requests in flight have ended, and SGLang holds new ones meanwhile.
    """

    form = "sglang"

    def ask(self, body: Json | None = None) -> ServedDrafter:
        """Which head serves, or after a swap will.

        Args:
            body: of `head_below`; None swaps nothing.

        Raises:
            HeadRefused: the head or the server cannot be swapped, or the old head is back.
            UserError: no answer, or a server that is not as before.
        """
        try:
            url = f"{self.url}/server_info"
            info = self._requests.json("GET", url, None, ServerInfo, SECONDS)
            check_server(self.url, info)
            # Heads come from the folder around the head that the server was started with.
            first = Path(str(info.get("speculative_draft_model_path"))).resolve()
            started = read_head(first, str(first))
            version = self._version()
            served = _served(version, first, started)
            if body is None:
                return served
            # Bytes of the file's names and shapes may differ a little.
            folder = Path(served["root"], str(body["folder"]))
            if version == _STARTED and folder.resolve() == first:
                raise SwapRefused(
                    f"it was started with folder={body['folder']!r}, whose files may have changed since; export "
                    "the new head to another folder beside it"
                )
            new = read_head(folder, str(body["folder"]), started.size + 1_000_000)
            check_head(new, started, str(info.get("speculative_algorithm")))
            if new.digest != served["sha256"]:
                self._swap(new, served, info["tp_size"])
            return {**served, "folder": new.folder, "sha256": new.digest}
        except SwapRefused as refused:
            raise HeadRefused(
                f"server={self.url!r} keeps its head, which serves on: {refused}"
            ) from refused
        except BadReply as bad:
            raise UserError(
                f"server={self.url!r} has no route for swaps, or did not answer ({bad}); start vLLM as "
                "drafttrain export --swap-root DIR prints it, or ask which head serves: "
                f"drafttrain swap --server {self.url}"
            ) from bad

    def _version(self) -> str:
        """The server's weight_version. Raises SwapRefused: somebody else counts versions there."""
        found = self._requests.json("GET", f"{self.url}/model_info", None, _ModelInfo, SECONDS)
        version = found["weight_version"]
        if version != _STARTED and not version.startswith(f"{_NAME}:"):
            raise SwapRefused(
                f"its weight_version is {version!r}, which a swap would overwrite; swaps are for servers "
                "whose weights nobody else updates"
            )
        return version

    def _swap(self, new: HeadFiles, served: ServedDrafter, ranks: int) -> None:
        """Sends a head to all ranks, and the old one again where that fails.

        Raises:
            SwapRefused: the old weights serve. UserError: they do not.
        """
        # Without the old head's files nothing could be put right.
        old = read_head(Path(served["root"], served["folder"]), served["folder"])
        target = self._checksums("target", ranks)
        before = self._checksums("draft", ranks)
        failure = self._send(new, ranks)
        if self._checksums("target", ranks) != target:
            raise UserError(
                f"server={self.url!r}: the update changed the target's weights, so its answers are others "
                "now; restart it"
            )
        after = self._checksums("draft", ranks)
        kept = [now == then for now, then in zip(after, before, strict=True)]
        if not any(kept) and not failure:
            return
        # A part of the ranks has the new weights: all get the old ones.
        if not all(kept):
            # Whatever becomes of it, the checksums tell what serves.
            with contextlib.suppress(SwapRefused):
                self._send(old, ranks)
            kept = [self._checksums("draft", ranks) == before]
        reason = failure or "not every rank took the new weights, or they serve already"
        if not all(kept):
            raise UserError(
                f"server={self.url!r} has weights of two heads ({reason}); answers are right, but slow until "
                "it is restarted"
            )
        raise SwapRefused(reason)

    def _send(self, head: HeadFiles, ranks: int) -> str:
        """Loads a head's weights into the drafter of every rank; returns what failed, '' for nothing.

        Raises:
            SwapRefused: nothing was sent.
        """
        begun = self._act("begin_weight_update", {"selector": "draft"})
        if begun:
            raise SwapRefused(begun)
        # Pairs of name and tensor, pickled: SGLang's unpickler admits tensors alone.
        sent = [(name, tensor) for name, tensor in head.tensors.items() if name not in _TOKEN_MAPS]
        body: Json = {
            "selector": "draft",
            # Each rank reads its own entry; the loaders of weights cut out its part.
            "serialized_named_tensors": [base64.b64encode(pickle.dumps(sent)).decode()] * ranks,
            # A flush that requests prevent would count as a failed update.
            "flush_cache": False,
            "weight_version": f"{_NAME}:{head.digest}:{head.folder}",
        }
        failure = self._act("update_weights_from_tensor", body)
        failure = self._act("end_weight_update", {}) or failure
        # The old head's keys of cached prefixes lower the acceptance only. The reply is no JSON.
        with contextlib.suppress(BadReply):
            self._requests.json("POST", f"{self.url}/flush_cache", {}, _Outcome, SECONDS)
        return failure

    def _act(self, route: str, body: Json) -> str:
        """What a route of SGLang's says against a request; '' if it did it."""
        try:
            self._requests.json("POST", f"{self.url}/{route}", body, _Outcome, SECONDS)
        except BadReply as bad:
            # Any other status says nothing about the update.
            if bad.reason != "HTTP 400":
                raise
            return f"/{route} answers {bad.detail}"
        return ""

    def _checksums(self, selector: str, ranks: int) -> list[_Rank]:
        """Of the target's or the drafter's weights. Raises SwapRefused: not all ranks answer."""
        body: Json = {"action": "checksum", "selector": selector}
        url = f"{self.url}/weights_checker"
        found = self._requests.json("POST", url, body, _Checked, SECONDS)["ranks"]
        if len(found) != ranks:
            raise SwapRefused(f"{len(found)} of {ranks} ranks give checksums of their weights")
        return found


def _served(version: str, first: Path, started: HeadFiles) -> ServedDrafter:
    """The head that serves, by the server's weight_version."""
    folder = first.name
    digest = started.digest
    if version != _STARTED:
        _, digest, folder = version.split(":", 2)
    return {"folder": folder, "sha256": digest, "root": str(first.parent), "dtype": started.dtype}


def check_server(url: str, info: ServerInfo) -> None:
    """Raises SwapRefused: SGLang cannot swap the server's drafter for all ranks or none."""
    algorithm = info.get("speculative_algorithm")
    place = str(info.get("speculative_draft_model_path"))
    reason = ""
    if Version(info["version"]) < Version(OLDEST):
        reason = f"it is SGLang {info['version']}, and swaps need {OLDEST}"
    elif info["dp_size"] * info["pp_size"] > 1:
        reason = "SGLang updates the drafter of one data-parallel and pipeline stage only"
    elif algorithm not in _ALGORITHMS or info.get("enable_multi_layer_eagle"):
        reason = f"it drafts by {algorithm}, and swaps are for one head of {', '.join(_ALGORITHMS)}"
    elif info.get("speculative_draft_model_quantization"):
        reason = "its drafter is quantized, and would draft from unpacked weights during the update"
    elif not Path(place).is_dir():
        reason = f"the files of its head ({place}) are not on this machine to compare others with"
    if reason:
        raise SwapRefused(f"{reason}; restart {url} with the new drafter")


def check_head(new: HeadFiles, started: HeadFiles, algorithm: str) -> None:
    """Raises SwapRefused: a head that would end the server, or change the target.

    Args:
        started: what the server was started with. algorithm: of its speculation.
    """
    check(new, started, shared_parts(started.config, algorithm), None)
    # Their storages pickle in a way that SGLang's unpickler does not know.
    for name, tensor in new.tensors.items():
        if tensor.is_floating_point() and tensor.element_size() == 1:
            raise SwapRefused(
                f"folder={new.folder!r}: SGLang's update does not read {name} of {tensor.dtype}; restart "
                "the server with the new drafter"
            )
    if "d2t" in new.tensors and not new.tensors["d2t"].equal(started.tensors["d2t"]):
        raise SwapRefused(
            f"folder={new.folder!r} keeps other tokens (d2t) than the head that the server was started "
            "with, and SGLang reads them at the start only"
        )


def shared_parts(config: Mapping[str, object], algorithm: str) -> Set[str]:
    """Names of the parts that SGLang's drafter shares with the target."""
    has_own_output = config.get("draft_vocab_size") and not config.get("tie_word_embeddings")
    if algorithm == "EAGLE3" and has_own_output:
        return {"embed_tokens"}
    return {"embed_tokens", "lm_head"}
