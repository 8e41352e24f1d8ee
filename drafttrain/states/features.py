"""`drafttrain features`: stores the target's hidden states of a data set, for training without
running the target.

The states come from the target in this process, from a vLLM server that the command starts, or from
servers that run already.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor

from drafttrain.credentials import redact
from drafttrain.data.generate import parse_layers, train_command
from drafttrain.data.loader import similar_rows
from drafttrain.data.quantized_rows import QUANTIZED, stored_as, value_bytes
from drafttrain.data.row_images import RowImages, cut_length, readable_rows, sendable_rows
from drafttrain.data.store import (
    FeatureStore,
    ShardWriter,
    Share,
    check_space,
    load_records,
    read_meta,
    stored_features,
)
from drafttrain.errors import UserError
from drafttrain.files import first_change, write_json
from drafttrain.flags import load_target
from drafttrain.folders import OutputFolder, check_folder
from drafttrain.images import PictureStore
from drafttrain.outcome import conclude
from drafttrain.progress import Progress, counted
from drafttrain.states.ahead import Ahead, ahead
from drafttrain.states.engine_server import flag_value, free_port, refuse_flags
from drafttrain.states.origins import Origin, Row, RowStates, TopTokens
from drafttrain.states.served import Served
from drafttrain.states.server import TAKEN, StateServer
from drafttrain.states.source import Online
from drafttrain.target import Target, load_shell
from drafttrain.values import StoreDtype

_BATCH_TOKENS = 16_384  # padded tokens of one forward on a GPU; on a CPU rows run one by one
_AHEAD_BYTES = 1e9  # of states that servers are asked for before they are written


def run(args: argparse.Namespace) -> int:
    """Extracts the missing states.

    Raises:
        UserError: no data set there, one of another tokenizer, stored states of other settings,
            or too little disk.
    """
    share = Share.of_process()
    root = check_folder(args.data, "generate", key="data")
    meta = read_meta(root)
    records = load_records(root, images=True)
    name = args.target or meta["target"]["name"]
    check_backend(args, share)
    if args.backend == "local":
        target = load_target(args, name, args.target_device_map)
    else:
        target = load_shell(
            name,
            args.dtype,
            args.device,
            args.trust_remote_code,
            weights=True,
        )
    if meta["target"]["tokenizer"] != target.identity()["tokenizer"]:
        raise UserError(
            f"data={args.data!r} was tokenized for target {meta['target']['name']!r}, not for "
            f"{name!r}"
        )
    if args.top_k and args.store_dtype in QUANTIZED:
        raise UserError(
            f"store_dtype={args.store_dtype} stores states, but top_k={args.top_k} stores logits; drop --top-k, "
            "or store in bfloat16"
        )
    if args.top_k > target.vocab_size:
        raise UserError(
            f"top_k={args.top_k} is more than the {target.vocab_size} tokens of target {name!r}"
        )
    records = readable_rows(records, target)
    if args.backend == "vllm":
        records = sendable_rows(records, target, args.max_length)
    layers = parse_layers(args.layers, target)
    if not layers:
        raise UserError(
            f"layers={args.layers!r} stores nothing; write default, or layer numbers such as "
            "2,15,27"
        )
    # Processes of one launch share the folder's lock, and lock a rank each.
    rank = share.rank if share.world > 1 else None
    with OutputFolder(root, "generate", key="data", rank=rank) as output:
        if args.overwrite:
            output.set_aside("features/part-*.safetensors", "features/features.json")
        try:
            with ExitStack() as stack:
                extract(args, target, layers, share, records, stack)
        except BaseException:
            if not any(root.glob("features/part-*.safetensors")):
                output.restore()
            raise
        output.forget()
    if share.rank == 0:
        result = {"layers": list(layers), "conversations": len(records)}
        conclude(result, [root / "features"], train_command(name, args.data))
    return 0


def check_backend(args: argparse.Namespace, share: Share) -> None:
    """Checks that the flags belong to one backend.

    Raises:
        UserError: flags of both, or a flag of vLLM that is set here.
    """
    if args.overwrite and share.world > 1:
        raise UserError(
            "overwrite=True with several processes deletes the others' work; delete DATA/features "
            "yourself"
        )
    local = args.backend == "local"
    given = {"url": args.url, "states_dir": args.states_dir, "flags behind --": args.flags}
    if args.engine_python != sys.executable:  # the default
        given["engine_python"] = args.engine_python
    for key, value in given.items():
        if local and value:
            raise UserError(f"{key}={value!r} belongs to --backend vllm; give that too, or drop it")
    if not local and args.target_device_map:
        raise UserError(
            f"target_device_map={args.target_device_map!r} belongs to --backend local; vLLM "
            "spreads the target by its own flags, behind --: --tensor-parallel-size N"
        )
    if args.url and args.flags:
        raise UserError(
            f"{args.flags[0]!r} is for a server that starts here, --url names one that runs; drop "
            "one"
        )
    if not local and not args.url and share.world > 1:
        raise UserError(
            f"backend=vllm without --url would start {share.world} servers, one per process; "
            "start them with drafttrain serve-target, and name them with --url"
        )
    refuse_flags(args.flags, TAKEN)


def extract(
    args: argparse.Namespace,
    target: Target,
    layers: tuple[int, ...],
    share: Share,
    records: Dataset,
    stack: ExitStack,
) -> None:
    """Computes and stores the missing states of this process's conversations.

    Args:
        stack: ends what the backend starts.
    """
    root = Path(args.data).expanduser()
    dtype = args.store_dtype
    recorded = stored_features(root) or {}
    if recorded.get("asked_dtype") == dtype:
        dtype = recorded["dtype"]
    describe(root, target, layers, args, dtype)
    done = FeatureStore(root)
    keys: list[str] = []  # conversations without states
    names: list[list[str] | None] = []  # of their pictures
    rows: list[Row] = []
    tokens = 0  # no state is needed at the last token
    for record in records:
        if record["id"] in done:
            continue
        ids = torch.tensor(record["tokens"], dtype=torch.long)  # [s]
        ids = ids[: cut_length(record, args.max_length)]
        rows.append(Row(len(keys), ids))
        keys.append(record["id"])
        names.append(record["images"])
        tokens += len(ids) - 1

    # Bytes of a token: features, and the last state or the likeliest tokens; 1 % for headers.
    element = value_bytes(dtype, target.hidden_size)
    features = element * len(layers) * target.hidden_size
    last = element * target.hidden_size
    if args.top_k:
        last = 8.0 * args.top_k + 4  # ids, logits and log_z
    needed = 1.01 * (features + last) * tokens
    if share.rank == 0:
        free = shutil.disk_usage(root).free
        kind = "last states"
        if args.top_k:
            kind = f"the {args.top_k} most likely tokens"
        print(
            f"{args.data}: states of layers {','.join(map(str, layers))} and {kind} in "
            f"{dtype}, {len(rows)} of {counted(len(records), 'conversations')} to do, "
            f"about {needed / 1e9:.3f} GB; {free / 1e9:.1f} GB are free",
            flush=True,
        )
    remedy = "choose another disk for the data, --top-k 64, fewer --layers, --max-length"
    check_space(root, needed, remedy)

    # Shards are written before their process ends; those of a killed one are computed again.
    writer = ShardWriter(root / "features", share.rank)
    mine = [row for row in rows if share.owns(keys[row.index])]
    if not mine:
        return
    images = RowImages(target, PictureStore(root), names)
    images.check()
    if args.backend == "local":
        found = computed(Online(target, layers, images=images), mine)
    else:
        served = stack.enter_context(proven_servers(args, target, layers))
        served.images = images
        dtype = served_dtype(args.store_dtype, served)
        describe(root, target, layers, args, dtype)
        token_bytes = 4 * (len(layers) + 1) * target.hidden_size  # of float32
        found = read_ahead(served, mine, token_bytes)
    with Progress("features", len(mine), "conversations") as progress:
        for row, states in found:
            tensors = stored_tensors(target, states, args.top_k, dtype)
            writer.add(keys[row.index], **tensors)
            progress.advance()
        writer.flush()


def served_dtype(asked: StoreDtype, served: Served) -> StoreDtype:
    """The dtype to store: bfloat16 where float32 would only hold the servers' rounded values."""
    found = {server.dtype for server in served.servers}
    if asked != "float32" or found != {"bfloat16"}:
        return asked
    print(
        "the servers' states are bfloat16, so they are stored in bfloat16 instead of float32; for "
        "states in float32 let vLLM compute in it: --dtype float32",
        flush=True,
    )
    return "bfloat16"


def describe(
    root: Path,
    target: Target,
    layers: tuple[int, ...],
    args: argparse.Namespace,
    dtype: StoreDtype,
) -> None:
    """Writes features.json, or checks that stored states were made with the same settings.

    Args:
        dtype: of the stored states; that of --store-dtype is noted too if it is another.

    Raises:
        UserError: they were not.
    """
    wanted = {
        "target": target.identity(),
        "layers": list(layers),
        "dtype": dtype,
        "top_k": args.top_k,
        "max_length": args.max_length,
    }
    # A setting that an earlier version did not write had its default.
    held = {**wanted, **(stored_features(root) or {})}
    held["target"] = held["target"]["name"]
    changed = first_change({key: held[key] for key in wanted}, {**wanted, "target": target.name})
    if changed and any((root / "features").glob("part-*.safetensors")):
        raise UserError(
            f"data={args.data!r} holds features with {changed}; use the same, or replace them: "
            "--overwrite"
        )
    if dtype != args.store_dtype:
        wanted["asked_dtype"] = args.store_dtype
    write_json(root / "features" / "features.json", wanted)


def computed(origin: Online, rows: list[Row]) -> Iterator[tuple[Row, RowStates]]:
    """States of all but the last token of each row, from the target in this process.

    On a GPU rows of similar length share forwards.
    """
    device = origin.target.device
    groups: Iterable[list[Row]] = ([row] for row in rows)
    if device.type != "cpu":
        groups = similar_rows(rows, _BATCH_TOKENS, lambda row: len(row.tokens))
    for group in groups:
        made = origin.states([Row(row.index, row.tokens.to(device)) for row in group])
        for row, states in zip(group, made, strict=True):
            assert states is not None and isinstance(states.last, Tensor)
            # No token follows the last one.
            yield row, RowStates(states.features[:-1], states.last[:-1])


def read_ahead(
    origin: Origin, rows: list[Row], token_bytes: float
) -> Iterator[tuple[Row, RowStates]]:
    """States of all but the last token of each row in their order, with many requests at once."""
    reading = Ahead(origin, _AHEAD_BYTES, token_bytes)
    try:
        for row in ahead(rows, reading.expect, lambda: reading.room, hold=2 * origin.threads):
            states = reading.take(row)
            assert states is not None
            yield row, states
    finally:
        origin.close()  # requests that wait for a server end
        reading.close()


@torch.no_grad()
def stored_tensors(
    target: Target,
    row: RowStates,
    top_k: int,
    dtype: StoreDtype,
) -> dict[str, Tensor]:
    """The tensors to store for a row, on the CPU."""
    assert isinstance(row.last, Tensor)
    found = stored_as("features", row.features, dtype, target.hidden_size)  # [n, f*h]
    if top_k:
        last = row.last.to(target.device, target.embed_weight.dtype)
        # Logits [256, v] exist for a part of the row at a time.
        parts = [top_tokens(target.head(part), top_k) for part in last.split(256)]
        found["topk_ids"] = torch.cat([part.ids for part in parts])
        found["topk_logits"] = torch.cat([part.logits for part in parts])
        found["log_z"] = torch.cat([part.log_z for part in parts])
    else:
        found |= stored_as("last_hidden", row.last, dtype, target.hidden_size)  # [n, h]
    return {name: tensor.cpu() for name, tensor in found.items()}


@contextmanager
def proven_servers(
    args: argparse.Namespace,
    shell: Target,
    layers: tuple[int, ...],
) -> Iterator[Served]:
    """The proven servers of --url, or one that starts here and ends with the block.

    Raises:
        UserError: a server does not start, or does not serve this target.
    """
    with ExitStack() as stack:
        urls = args.url
        states_dir = args.states_dir
        if not urls:
            flags = list(args.flags)
            if not flag_value(flags, "--port", ""):
                flags += ["--port", str(free_port())]
            if args.dtype != "auto" and not flag_value(flags, "--dtype", ""):
                flags += ["--dtype", args.dtype]
            server = StateServer(
                shell, layers, flags, args.engine_python, states_dir, args.trust_remote_code
            )
            stack.callback(server.stop, 1.0)  # an interrupted command has little more
            print(f"starting {server}", flush=True)
            server.start()
            server.wait_until_ready()
            urls = [server.url]
            states_dir = ""
        served = Served(urls, shell, layers, states_dir)
        stack.callback(served.close)
        served.prove()
        print(redact("\n".join(served.proofs)), flush=True)
        yield served


def top_tokens(logits: Tensor, k: int) -> TopTokens:
    """The k likeliest tokens of logits [n, v]."""
    top = logits.topk(k, dim=-1)
    return TopTokens(top.indices.int(), top.values, logits.logsumexp(-1))
