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

from packaging.version import InvalidVersion, Version
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from drafttrain.data.failures import BadReply
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.inside_vllm.head_files import HeadFiles, SwapRefused, check, read_head
from drafttrain.serving.swap import SECONDS, HeadRefused, ServedDrafter, Swapper, head_below

OLDEST = "0.5.23"  # its sources were read; earlier releases load every tensor into the target too
_ALGORITHMS = ("EAGLE3", "EAGLE")
_NAME = "drafttrain"  # begins the server's weight_version after a swap; then digest and folder
_MOST_BYTES = 2_000_000_000  # of a request
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


class _Done(TypedDict):
    success: bool
    message: str


class _Rank(TypedDict):
    checksums: dict[str, str]  # by the weight's name; the drafter's have its role in front


class _Checked(TypedDict):
    ranks: list[_Rank]


class SglangSwapper(Swapper):
    """Swaps heads of one SGLang server.

    A swap waits until requests in flight have ended, and SGLang holds new ones meanwhile.
    """

    def info(self) -> ServerInfo:
        """How the server drafts. Raises BadReply: it is not SGLang."""
        found = self._requests.json("GET", f"{self.url}/server_info", None, ServerInfo, SECONDS)
        return found

    def ask(self, body: Json | None = None) -> ServedDrafter:
        """Which head serves, or after a swap will.

        Args:
            body: of `head_below`; None swaps nothing.

        Raises:
            HeadRefused: the head or the server cannot be swapped, or the old head is back.
            UserError: no answer, or a server that is not as before.
        """
        try:
            info = self.info()
            check_server(self.url, info)
            first = Path(str(info.get("speculative_draft_model_path"))).resolve()
            started = read_head(first, str(first))
            served = self._served(first, started)
            if body is None:
                return served
            folder = Path(served["root"], str(body["folder"]))
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
                f"server={self.url!r} did not answer ({bad}); ask which head serves: "
                f"drafttrain swap --server {self.url}"
            ) from bad

    def put(self, drafter: str, served: ServedDrafter) -> ServedDrafter:
        return self.ask(head_below(drafter, served, "sglang"))

    def _served(self, first: Path, started: HeadFiles) -> ServedDrafter:
        """The head that serves, by the server's weight_version.

        Raises:
            SwapRefused: somebody else counts versions there.
        """
        found = self._requests.json("GET", f"{self.url}/model_info", None, _ModelInfo, SECONDS)
        version = found["weight_version"]
        folder = first.name
        digest = started.digest
        if version.startswith(f"{_NAME}:"):
            _, digest, folder = version.split(":", 2)
        elif version != "default":
            raise SwapRefused(
                f"its weight_version is {version!r}, which a swap would overwrite; swaps are for servers "
                "whose weights nobody else updates"
            )
        dtype = str(started.config.get("torch_dtype"))
        return {"folder": folder, "sha256": digest, "root": str(first.parent), "dtype": dtype}

    def _swap(self, new: HeadFiles, served: ServedDrafter, ranks: int) -> None:
        """Sends a head to all ranks, and the old one again where that fails.

        Raises:
            SwapRefused: the old weights serve. UserError: they do not.
        """
        before = self._checksums(ranks)
        failure = self._send(new, ranks)
        target, drafter = _changed(before, self._checksums(ranks))
        if True in target:
            raise UserError(
                f"server={self.url!r}: the update changed the target's weights, so its answers are others "
                "now; restart it"
            )
        if not failure and drafter == {True}:
            return
        reason = failure or "not every rank took the new weights"
        if True not in drafter:
            raise SwapRefused(failure or "no weight changed, so the server has these already")
        try:
            old = read_head(Path(served["root"], served["folder"]), served["folder"])
            back = self._send(old, ranks)
            if back or True in _changed(before, self._checksums(ranks))[1]:
                raise SwapRefused(back or "other weights")
        except SwapRefused as refused:
            raise UserError(
                f"server={self.url!r} has weights of two heads ({reason}), and the old ones did not come "
                f"back ({refused}); answers are right and slow until it is restarted"
            ) from refused
        raise SwapRefused(f"rolled back, {reason}")

    def _send(self, head: HeadFiles, ranks: int) -> str:
        """Loads a head's weights into the drafter of every rank; returns what failed, '' for nothing.

        Raises:
            SwapRefused: nothing was sent.
        """
        content = payload(head.tensors)
        if len(content) * ranks > _MOST_BYTES:
            raise SwapRefused(
                f"folder={head.folder!r} times {ranks} ranks is a request of {len(content) * ranks} bytes, "
                f"more than {_MOST_BYTES}; restart the server with the new drafter"
            )
        begun = self._act("begin_weight_update", {"selector": "draft"})
        if begun:
            raise SwapRefused(begun)
        body: Json = {
            "selector": "draft",
            "serialized_named_tensors": [content] * ranks,
            # A flush that requests prevent would count as a failed update.
            "flush_cache": False,
            "weight_version": f"{_NAME}:{head.digest}:{head.folder}",
        }
        failure = self._act("update_weights_from_tensor", body)
        failure = self._act("end_weight_update", {}) or failure
        # The old head's keys of cached prefixes lower the acceptance only. The reply is no JSON.
        with contextlib.suppress(BadReply):
            self._requests.json("POST", f"{self.url}/flush_cache", {}, _Done, SECONDS)
        return failure

    def _act(self, route: str, body: Json) -> str:
        """What a route of SGLang's says against a request; '' if it did it."""
        try:
            done = self._requests.json("POST", f"{self.url}/{route}", body, _Done, SECONDS)
        except BadReply as bad:
            if bad.reason != "HTTP 400":
                raise
            return f"/{route} answers {bad.detail}"
        return "" if done["success"] else f"/{route} answers {done['message']}"

    def _checksums(self, ranks: int) -> list[_Rank]:
        """Of all weights. Raises SwapRefused: not all ranks answer, or not for their drafters."""
        body: Json = {"action": "checksum", "selector": "all"}
        url = f"{self.url}/weights_checker"
        found = self._requests.json("POST", url, body, _Checked, SECONDS)["ranks"]
        drafting = [rank for rank in found if any(map(_is_drafters, rank["checksums"]))]
        if len(found) != ranks or len(drafting) != ranks:
            raise SwapRefused(f"{len(drafting)} of {ranks} ranks give checksums of their drafters")
        return found


def check_server(url: str, info: ServerInfo) -> None:
    """Raises SwapRefused: SGLang cannot swap the server's drafter for all ranks or none."""
    try:
        is_old = Version(info["version"]) < Version(OLDEST)
    except InvalidVersion:
        is_old = True
    reason = ""
    if is_old:
        reason = f"it is SGLang {info['version']}, and swaps need {OLDEST}"
    elif info["dp_size"] * info["pp_size"] > 1:
        reason = "SGLang updates the drafter of one data-parallel and pipeline stage only"
    elif info.get("speculative_algorithm") not in _ALGORITHMS or info.get(
        "enable_multi_layer_eagle"
    ):
        reason = (
            f"it drafts by {info.get('speculative_algorithm')}, and swaps are for one head of "
            f"{', '.join(_ALGORITHMS)}"
        )
    elif info.get("speculative_draft_model_quantization"):
        reason = "its drafter is quantized, and would draft from unpacked weights during the update"
    elif not Path(str(info.get("speculative_draft_model_path"))).is_dir():
        reason = (
            f"the files of its head ({info.get('speculative_draft_model_path')}) are not on this machine, so "
            "another one cannot be compared with them"
        )
    if reason:
        raise SwapRefused(f"{reason}; restart {url} with the new drafter")


def check_head(new: HeadFiles, started: HeadFiles, algorithm: str) -> None:
    """Raises SwapRefused: a head that would end the server, or change the target.

    Args:
        started: what the server was started with. algorithm: of its speculation.
    """
    check(new, started, shared_parts(started.config, algorithm), None)
    for name, tensor in new.tensors.items():
        if tensor.is_floating_point() and tensor.element_size() == 1:
            raise SwapRefused(
                f"folder={new.folder!r}: SGLang's update does not read {name} of {tensor.dtype}; restart "
                "the server with the new drafter"
            )
    for name in _TOKEN_MAPS:
        if name in new.tensors and not new.tensors[name].equal(started.tensors[name]):
            raise SwapRefused(
                f"folder={new.folder!r} keeps other tokens ({name}) than the head that the server was "
                "started with, and SGLang reads them at the start only"
            )


def shared_parts(config: Mapping[str, object], algorithm: str) -> Set[str]:
    """Names of the parts that SGLang's drafter shares with the target."""
    has_own_output = config.get("draft_vocab_size") and not config.get("tie_word_embeddings")
    if algorithm == "EAGLE3" and has_own_output:
        return {"embed_tokens"}
    return {"embed_tokens", "lm_head"}


def payload(tensors: Mapping[str, Tensor]) -> str:
    """Weights in SGLang's form: pairs of name and tensor, pickled, in base64.

    SGLang reads it with an unpickler that admits tensors alone.
    """
    sent = [(name, tensor) for name, tensor in tensors.items() if name not in _TOKEN_MAPS]
    return base64.b64encode(pickle.dumps(sent)).decode()


def _is_drafters(name: str) -> bool:
    return name.startswith(("draft.", "draft_"))


def _changed(before: list[_Rank], after: list[_Rank]) -> tuple[set[bool], set[bool]]:
    """Whether weights changed, over all ranks: of the target, and of the drafter."""
    target = set()
    drafter = set()
    for old, new in zip(before, after, strict=True):
        changed = {
            name for name, value in new["checksums"].items() if old["checksums"][name] != value
        }
        drafters = {name for name in changed if _is_drafters(name)}
        target.add(changed != drafters)
        drafter.add(bool(drafters))
    return target, drafter
