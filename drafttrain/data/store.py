"""The distillation data set on disk: conversations as token ids, and perhaps the target's states.

    DIR/meta.json                           target, settings, version, counts
    DIR/part-0003.jsonl                     one line per conversation, written by process 3
    DIR/features/part-0003-00012.safetensors  states of some of them, complete or absent
    DIR/features/features.json              their settings, if `drafttrain features` wrote them
    DIR/images/                             pictures of the prompts, `<SHA-256>.png`
    DIR/arrow/                              the cache of `load_records`, see record_cache.py

A line {"id", "tokens", "spans": [[start, end], ...], "finish": ["stop" | "length", ...], "source",
"reasoning", "part", "images"}: spans are the responses' token ranges, end exclusive, stop token included;
finish names per span how it ended; reasoning counts per span the first tokens that are reasoning
(absent if unknown); part numbers the rows of a conversation that another row continues, because the
chat template rewrites earlier turns; images names the pictures of the prompt before the first span, in
order, whose placeholders are among the tokens. Lines are only appended, each by one write; an incomplete last
line of a killed process is cut off when its part is opened again. All parts together determine
which conversations are done, so any number of processes can continue the work of any other.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from datasets import Dataset
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from drafttrain.data.quantized_rows import restored, scale_columns, scale_names
from drafttrain.data.record_cache import StoredIds, cached_records
from drafttrain.data.row_images import has_images
from drafttrain.environment import __version__
from drafttrain.errors import UserError, reason_of, shown
from drafttrain.files import (
    Json,
    append_line,
    check_json,
    complete_bytes,
    first_change,
    is_disk_full,
    open_tensors,
    read_json,
    reading,
    replacing,
    write_json,
    writing,
)
from drafttrain.folders import OutputFolder
from drafttrain.target.attention import LAST

FORMAT = 1
_SYNC_SECONDS = 5.0  # between calls of fsync
_SHARD_BYTES = 64_000_000
_OPEN_SHARDS = 256  # a process may have 65,530 mappings
_PART_FIX = "delete it to redo its conversations"
_STATES_FIX = "store the states again: drafttrain features --data DIR --overwrite"
_SHARD_FIX = "delete this file, and store its states again: drafttrain features --data DIR"
_PART = re.compile(r"part-\d{4,}\.jsonl")
_SHARDS = "part-[0-9][0-9][0-9][0-9]*-[0-9]*.safetensors"
# Variables of a launcher.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_BOOKKEEPING = ("format", "drafttrain", "counts")  # keys of meta.json that are no settings


class TargetIdentity(TypedDict):
    """The target that wrote a data set or its states: `Target.identity()`."""

    name: str
    model_type: str
    hidden_size: Annotated[int, Field(ge=1)]
    num_layers: Annotated[int, Field(ge=1)]
    vocab_size: Annotated[int, Field(ge=1)]
    tokenizer: str


class StoredStates(TypedDict):
    """Settings of stored states: features.json, or `features` in meta.json."""

    layers: list[Annotated[int, Field(ge=0)]]
    dtype: NotRequired[str]
    asked_dtype: NotRequired[str]  # of --store-dtype, where servers compute in a narrower one
    top_k: NotRequired[Annotated[int, Field(ge=0)]]
    target: NotRequired[TargetIdentity]


class DataMeta(TypedDict):
    """meta.json. `sampling` and other keys are settings that all runs into one data set share."""

    target: TargetIdentity
    features: NotRequired[StoredStates | None]
    sampling: NotRequired[Json]
    counts: NotRequired[Json]


@dataclass(frozen=True)
class Share:
    """The conversations that one of several processes works on, independent of their order."""

    rank: int
    world: int

    @staticmethod
    def of_process() -> Share:
        """This process's share, from the variables that `accelerate launch` and torchrun set.

        Raises UserError: variables that are not numbers, or contradict each other.
        """
        numbers: dict[str, int] = {}
        for name in _LAUNCHERS:
            text = os.environ.get(name, "")
            if not text:
                continue
            if not text.removeprefix("-").isdecimal():
                raise UserError(
                    f"{name}={shown(text)} in the environment is not a whole number; unset it, or start with accelerate launch"
                )
            numbers[name] = int(text)
        rank = numbers.get("RANK", 0)
        world = numbers.get("WORLD_SIZE", 1)
        if not 0 <= rank < world:
            raise UserError(
                f"RANK={rank} in the environment must be from 0 to WORLD_SIZE - 1 = {world - 1}; unset it, or start with "
                "accelerate launch"
            )
        return Share(rank, world)

    def owns(self, key: str) -> bool:
        """Whether the conversation with this id belongs to the share."""
        # A hash spreads ids evenly over the processes, whatever their form.
        digest = hashlib.sha256(key.encode()).digest()
        return int.from_bytes(digest[:8], "little") % self.world == self.rank


def read_meta(directory: str | Path) -> Json:
    """The meta.json of a data set.

    Raises UserError: no data set there, a damaged one, or one of another format.
    """
    path = Path(directory).expanduser() / "meta.json"
    name = str(directory)
    fix = "make one: drafttrain generate --target T --prompts P.jsonl --output DIR"
    if not path.is_file():
        raise UserError(f"data={name!r} is not a data set (it holds no meta.json); {fix}")
    fix = f"restore that file, or {fix}"
    meta: Json = read_json(path, "data", fix)
    held = meta.get("format")
    if held != FORMAT:
        raise UserError(
            f"data={name!r} has format {held!r}, this drafttrain reads {FORMAT}; generate it again"
        )
    check_json(meta, f"data={str(path)!r}", fix, DataMeta)
    return meta


def not_written(directory: Path, kept: str, error: Exception) -> UserError:
    """The error of a write that failed; kept: what is stored, with its verb."""
    free = shutil.disk_usage(directory).free
    if is_disk_full(error):
        reason = "no space left on the device"
    else:
        reason = reason_of(error)
    return UserError(
        f"output={str(directory)!r}: {reason} ({free / 1e6:.0f} MB free); {kept} kept, free some "
        "space and run the same command again to continue"
    )


def check_space(
    directory: Path,
    needed: float,
    remedy: str = "choose another disk, fewer prompts or --features none",
) -> None:
    """Checks before any work that `needed` bytes of features have room.

    Raises UserError: they have not; with a remedy.
    """
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise UserError(
            f"output={str(directory)!r}: features need about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; {remedy}"
        )


def _parts(directory: Path) -> list[Path]:
    """The parts that `generate` wrote, one per process.

    Raises UserError: one is a pipe, which would be waited for, or a folder.
    """
    found = [path for path in directory.glob("part-*.jsonl") if _PART.fullmatch(path.name)]
    for path in found:
        if not path.is_file():
            raise UserError(f"data={str(path)!r} is not a regular file; {_PART_FIX}")
    return sorted(found)


def load_records(directory: str | Path, images: bool = False) -> Dataset:
    """All conversations as a memory-mapped `datasets.Dataset` with the columns of a line.

    Args:
        images: the caller reads a row's pictures (`PictureStore(directory).get(name)`), or needs
            none; without them the ids of placeholders mean nothing.

    Raises UserError: no data set there, an empty one, a damaged line, or rows with images that the
        caller does not read.
    """
    root = Path(directory).expanduser()
    meta = read_meta(root)
    rows = cached_records(root, _parts(root), meta["target"]["vocab_size"])
    if not len(rows):
        name = str(directory)
        raise UserError(
            f"data={name!r} is empty: no conversation in its part-*.jsonl; run drafttrain generate"
        )
    if not images and has_images(rows):
        raise UserError(
            f"data={str(directory)!r} has rows with images, which this command does not read; generate one of text"
        )
    return rows


class Store:
    """Writes one process's part of a data set.

    Args:
        directory: created when missing. overwrite: replace an existing data set; it is deleted when
            this one is complete.
        meta: settings that all runs into one data set share: {"target": identity, "sampling":
            {...}, "features": {...} or None, ...}.
        rank: number of this process; it writes its own part.

    Attributes:
        appended: conversations this process has written.

    Raises:
        UserError: the folder holds other files, was begun with other settings, or another process
            writes this part.
    """

    def __init__(
        self,
        directory: str | Path,
        meta: Json,
        rank: int = 0,
        overwrite: bool = False,
    ):
        self.directory = Path(directory).expanduser()
        self.rank = rank
        self.appended = 0
        self._part = self.directory / f"part-{rank:04d}.jsonl"
        self._stored = StoredIds()
        self._shards: ShardWriter | None = None
        self._held: list[Json] = []  # rows whose states are not in a shard yet
        # A run that replaces the data set is alone; others share the folder.
        locked_rank = None if overwrite else rank
        self._folder = OutputFolder(self.directory, "generate", rank=locked_rank)
        try:
            with writing(self.directory):
                if overwrite:
                    self._folder.set_aside()
                self._claim(meta)
                self._file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            # A file that is whole keeps its modification time, by which readers cache.
            whole = complete_bytes(self._part)
            if whole < self._part.stat().st_size:
                os.truncate(self._part, whole)
        except BaseException:
            self._folder.close()
            raise
        self._synced = time.monotonic()

    def _claim(self, meta: Json) -> None:
        """Writes meta.json, or compares the one that is there. Raises UserError: other settings."""
        path = self.directory / "meta.json"
        if not path.exists():
            write_json(path, {"format": FORMAT, "drafttrain": __version__, **meta, "counts": {}})
        recorded = read_meta(self.directory)
        for key in _BOOKKEEPING:
            recorded.pop(key, None)
        # As JSON, so that tuples compare equal to the lists of the file.
        given = json.loads(json.dumps(meta))
        changed = first_change(_flatten(recorded), _flatten(given))
        if changed:
            raise UserError(
                f"output={str(self.directory)!r} was begun with {changed}; one data set has one setting: choose another "
                "--output, or delete it with --overwrite"
            )

    def done_ids(self) -> set[str]:
        """Ids of the conversations in all parts. The set grows with later calls."""
        self._stored.update(_parts(self.directory))
        return self._stored.ids

    def add(self, rows: Sequence[Json], states: Sequence[dict[str, Tensor]] = ()) -> None:
        """Stores the rows of a conversation.

        With states, the shard that holds a row's is written first, and the row is appended second.
        So every stored row has its states, and a killed process redoes at most one shard.

        Args:
            states: per row its features [n, f*h] and last_hidden [n, h], n = tokens - 1.
        """
        if not states:
            for row in rows:
                self.append(row)
            return
        for row, tensors in zip(rows, states, strict=True):
            self.shards.add(row["id"], **tensors)
            if not self.shards.pending:
                self._append_held()  # of earlier conversations; this one's rows stay together
        self._held += rows
        if not self.shards.pending:
            self._append_held()

    @property
    def shards(self) -> ShardWriter:
        """The writer of this process's shards."""
        if self._shards is None:
            self._shards = ShardWriter(self.directory / "features", self.rank, lambda: self.kept)
        return self._shards

    def flush(self) -> None:
        """Writes the pending states as a shard, then their rows.

        Raises UserError: the disk is full.
        """
        if self._held:
            self.shards.flush()
            self._append_held()

    def _append_held(self) -> None:
        # One by one: an interrupted flush is called again and must store none twice.
        while self._held:
            self.append(self._held.pop(0))

    def append(self, record: Json) -> None:
        """Appends one row, completely or not at all.

        Raises UserError: it cannot be written (the disk is full).
        """
        try:
            append_line(self._file, record)
            # A loss of power costs the rows of a few seconds.
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                os.fsync(self._file)
                self._synced = time.monotonic()
        except OSError as error:
            raise not_written(self.directory, self.kept, error) from error
        self.appended += 1

    @property
    def kept(self) -> str:
        """The work that a full disk does not destroy, for the error."""
        return f"{self.appended} conversations of this run are"

    def finish(self) -> dict[str, int]:
        """Flushes, updates the counts in meta.json, and returns them."""
        self.flush()
        with writing(self.directory):
            os.fsync(self._file)
        self._stored.update(_parts(self.directory))
        counts = self._stored.counts
        write_json(self.directory / "meta.json", {**read_meta(self.directory), "counts": counts})
        return counts

    def close(self) -> None:
        """Closes the part and unlocks the folder."""
        os.close(self._file)
        self._folder.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            if kind is None:
                self.finish()
                self._folder.forget()
            elif not self.appended:
                self._folder.restore()
        finally:
            self.close()


def _flatten(tree: Json, prefix: str = "") -> Json:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: Json = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@dataclass
class ShardWriter:
    """Writes tensors of conversations into shards of `shard_bytes`.

    A shard file appears complete or not at all.

    Args:
        folder: created when missing.
        rank: number of this process; it writes its own shards.
        kept: the work that a full disk does not destroy, for the error.
    """

    folder: Path
    rank: int
    kept: Callable[[], str] = lambda: "the shards written so far are"
    shard_bytes: int = _SHARD_BYTES

    def __post_init__(self) -> None:
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        numbers = [-1]
        for shard in self.folder.glob(f"part-{self.rank:04d}-*.safetensors"):
            number = shard.stem.rpartition("-")[2]
            if number.isdecimal():  # not a user's file
                numbers.append(int(number))
        self.next_shard = max(numbers) + 1
        # A killed process leaves a shard that is not complete.
        for leftover in self.folder.glob(f".part-{self.rank:04d}-*"):
            leftover.unlink()
        self.pending: dict[str, Tensor] = {}  # "ID/features" -> tensor
        self._bytes = 0

    def add(self, key: str, **tensors: Tensor) -> None:
        """Adds a conversation's tensors, and writes the shard if it is full."""
        for name, tensor in tensors.items():
            self.pending[f"{key}/{name}"] = tensor.contiguous()
            self._bytes += tensor.nbytes
        if self._bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes the pending tensors as a shard. Raises UserError: the disk is full."""
        if not self.pending:
            return
        path = self.folder / f"part-{self.rank:04d}-{self.next_shard:05d}.safetensors"
        try:
            with replacing(path) as part:
                save_file(self.pending, part)
        except Exception as error:
            # safetensors has an error of its own for a full disk.
            if not isinstance(error, OSError) and not is_disk_full(error):
                raise
            raise not_written(self.folder, self.kept(), error) from error
        self.next_shard += 1
        self.pending = {}
        self._bytes = 0


def stored_features(root: Path) -> Json | None:
    """Settings of a data set's stored states: layers, dtype, top_k, target; None if it has none.

    `drafttrain features` writes its own description; `drafttrain generate --features` notes them in
    meta.json.

    Raises UserError: a damaged description.
    """
    path = root / "features" / "features.json"
    meta = read_meta(root)
    held: Json | None = meta.get("features")
    if path.exists():
        held = {**read_json(path, "data", _STATES_FIX, StoredStates)}
    if not held:
        return None
    return {"top_k": 0, "target": meta["target"], **held}


@dataclass
class FeatureStore:
    """Looks up the states of stored conversations.

    Args:
        directory: of the data set.
        columns: [start, end) ranges of stored features to return, in the requested order (None in
            place of a range for the last state); None for all.
        top_k: number of most likely tokens stored in place of last states; 0 if last states are
            stored.
        layers, width, vocab_size: of the stored features, to check them by; 0 layers for a store
            that is only asked which conversations it holds.

    Raises:
        UserError: a damaged shard.
    """

    directory: Path
    columns: list[tuple[int, int] | None] | None = None
    top_k: int = 0
    layers: int = 0
    width: int = 0
    vocab_size: int = 0

    def __post_init__(self) -> None:
        # The shards used last; each is a mapping of memory.
        self._files: OrderedDict[Path, safe_open] = OrderedDict()
        self._opening = threading.Lock()
        self._where: dict[str, Path] = {}  # conversation -> shard
        # A killed process may have left states without their row, which it makes anew; of rows that
        # two processes made, the first counts.
        shards = sorted((self.directory / "features").glob(_SHARDS), reverse=True)
        for shard in sorted(shards, key=lambda path: path.name.rpartition("-")[0]):
            with open_tensors(shard, "data", _SHARD_FIX) as file:
                # Keys are "ID/features", "ID/last_hidden", ...
                for key in file.keys():  # noqa: SIM118 - safe_open is not a dict
                    self._where.setdefault(key.rsplit("/", 1)[0], shard)

    @staticmethod
    def open(directory: str | Path, feature_layers: Sequence[int]) -> FeatureStore | None:
        """The states of these layers, or None if the data set does not hold them all."""
        root = Path(directory).expanduser()
        held = stored_features(root)
        if held is None or not held["layers"]:
            return None
        layers = held["layers"]
        available = set(layers)
        if not held["top_k"]:  # else the likeliest tokens are stored in place of last states
            available.add(LAST)
        if not set(feature_layers) <= available:
            return None

        target = held["target"]
        width = target["hidden_size"]
        columns = None
        if list(feature_layers) != layers:
            place = {}  # columns of each layer
            for i, layer in enumerate(layers):
                place[layer] = (i * width, (i + 1) * width)
            columns = [place.get(layer) for layer in feature_layers]
        return FeatureStore(
            root,
            columns,
            held["top_k"],
            len(layers),
            width,
            target["vocab_size"],
        )

    @property
    def count(self) -> int:
        """Number of conversations."""
        # No __len__: a store whose shards were deleted would be taken for none.
        return len(self._where)

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def get(self, key: str) -> dict[str, Tensor] | None:
        """The stored tensors of a conversation, or None; n is tokens - 1. Threads may share a store.

        "features" [n, f*h], and either "last_hidden" [n, h], or "topk_ids" [n, k] int32 (most
        likely first), "topk_logits" [n, k] and "log_z" [n] float32, the log of the softmax
        denominator over the full vocabulary. Quantized states come as bfloat16.

        Raises:
            UserError: a damaged shard, a tensor that is missing or has another shape, or values
                that no target computes.
        """
        shard = self._where.get(key)
        if shard is None:
            return None
        # Read the tensors, and the scales of those that are quantized.
        names = ["features"]
        if self.top_k:
            names += ["topk_ids", "topk_logits", "log_z"]
        else:
            names.append("last_hidden")
        found = {}
        scales = {}  # of the tensors that are stored as int8 or float8
        with reading(shard, "data", _SHARD_FIX):
            file = self._open(shard)
            for name in names:
                found[name] = file.get_tensor(f"{key}/{name}")
                for scale in scale_names(name, found[name]):
                    scales[name] = file.get_tensor(f"{key}/{scale}")
        fault = self._fault(found, scales)
        if fault:
            raise UserError(f"data={str(shard)!r}, conversation {key!r}: {fault}; {_SHARD_FIX}")

        for name in names:
            if name in scales:
                found[name] = restored(found[name], scales[name])
            else:
                found[name] = found[name].clone()  # a view keeps the whole shard mapped
        if self.columns is not None:
            stored = found["features"]  # [n, layers*h]
            parts = [stored[:, :0]]
            for part in self.columns:
                if part is None:
                    parts.append(found["last_hidden"])
                else:
                    parts.append(stored[:, slice(*part)])
            found["features"] = torch.cat(parts, dim=-1)  # [n, f*h]
        return found

    def _open(self, shard: Path) -> safe_open:
        with self._opening:
            file = self._files.pop(shard, None)
            if file is None:
                file = open_tensors(shard, "data", _SHARD_FIX)
            self._files[shard] = file
            if len(self._files) > _OPEN_SHARDS:
                self._files.popitem(last=False)
        return file

    def _fault(self, found: dict[str, Tensor], scales: dict[str, Tensor]) -> str:
        """What is wrong with a conversation's tensors; '' if nothing is."""
        rows = found["features"].shape[:1]  # [n]
        columns: dict[str, tuple[int, ...]] = {
            "features": (self.layers * self.width,),
            "last_hidden": (self.width,),
            "topk_ids": (self.top_k,),
            "topk_logits": (self.top_k,),
            "log_z": (),
        }
        for name, tensor in found.items():
            wanted = (*rows, *columns[name])  # [n, ...]
            if tuple(tensor.shape) != wanted:
                return f"{name} has the shape {list(tensor.shape)} instead of {list(wanted)}"
            if name == "topk_ids":
                is_sound = tensor.dtype == torch.int32
            else:
                is_sound = tensor.is_floating_point() or name in scales
            if not is_sound:
                return f"{name} has the type {tensor.dtype}"

            if name in scales:  # quantized values are finite; their scales may not be
                blocks = (*rows, scale_columns(tensor, self.width))
                tensor = scales[name]
                if tuple(tensor.shape) != blocks or not tensor.is_floating_point():
                    return f"the scales of {name} are {tensor.dtype} {list(tensor.shape)} instead of {list(blocks)}"
            # One pass without a copy: NaN and infinity survive the sum.
            if tensor.is_floating_point() and not math.isfinite(tensor.sum(dtype=torch.float32)):
                return f"{name} holds NaN or infinite values"

        ids = found.get("topk_ids", torch.zeros(1))  # in place of none
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            return f"topk_ids are outside the target's vocabulary of {self.vocab_size}"
        return ""
