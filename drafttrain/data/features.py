"""`drafttrain features`: stores the target's hidden states of a data set, for training without
running the target.

The states come from the target in this process, from a vLLM server that the command starts, or from
servers that run already.
"""

from __future__ import annotations

import argparse
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor

from drafttrain.data.generate import parse_layers, train_command
from drafttrain.data.int8_rows import stored_as, value_bytes
from drafttrain.data.state_client import RowStates, StateClient
from drafttrain.data.state_server import StateServer, check_flags, flag_value, free_port
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
from drafttrain.outcome import conclude
from drafttrain.progress import Progress, counted
from drafttrain.target import Target, load_shell
from drafttrain.values import StoreDtype

_BATCH_TOKENS = 16_384  # padded tokens of one forward on a GPU; on a CPU rows run one by one
_IN_FLIGHT = 16  # rows that a server is asked for at a time
Row = tuple[str, list[int]]  # a conversation's id and tokens


def run(args: argparse.Namespace) -> int:
    """Extracts the missing states.

    Raises UserError: no data set there, one of another tokenizer, stored states of other settings,
    or too little disk.
    """
    share = Share.of_process()
    root = check_folder(args.data, "generate", key="data")
    meta = read_meta(root)
    records = load_records(root)
    name = args.target or meta["target"]["name"]
    check_backend(args, share)
    if args.backend == "local":
        target = load_target(args, name, args.target_device_map)
    else:
        target = load_shell(name, args.dtype, args.device, args.trust_remote_code, weights=True)
    if meta["target"]["tokenizer"] != target.identity()["tokenizer"]:
        raise UserError(
            f"data={args.data!r} was tokenized for target {meta['target']['name']!r}, not for {name!r}"
        )
    if args.top_k and args.store_dtype == "int8":
        raise UserError(
            f"store_dtype=int8 stores states, but top_k={args.top_k} stores logits; drop --top-k, or store in bfloat16"
        )
    if args.top_k > target.vocab_size:
        raise UserError(
            f"top_k={args.top_k} is more than the {target.vocab_size} tokens of target {name!r}"
        )
    layers = parse_layers(args.layers, target)
    if not layers:
        raise UserError(
            f"layers={args.layers!r} stores nothing; write default, or layer numbers such as 2,15,27"
        )
    with OutputFolder(
        root,
        "generate",
        key="data",
        rank=share.rank if share.world > 1 else None,
    ) as output:
        if args.overwrite and share.world == 1:
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
    """Raises UserError: flags of one backend together with the other, or a flag of vLLM that is set
    here.
    """
    local = args.backend == "local"
    given = {"url": args.url, "states_dir": args.states_dir, "flags behind --": args.flags}
    if local and (set_ := [key for key, value in given.items() if value]):
        raise UserError(
            f"{set_[0]}={given[set_[0]]!r} belongs to --backend vllm; give that too, or drop it"
        )
    if not local and args.target_device_map:
        raise UserError(
            f"target_device_map={args.target_device_map!r} belongs to --backend local; vLLM spreads the target by its own "
            "flags, behind --: --tensor-parallel-size N"
        )
    if args.url and args.flags:
        raise UserError(
            f"{args.flags[0]!r} is for a server that starts here, --url names one that runs; drop one"
        )
    if not local and not args.url and share.world > 1:
        raise UserError(
            f"backend=vllm without --url would start {share.world} servers, one per process; start them with drafttrain "
            "serve-target, and name them with --url"
        )
    check_flags(args.flags)


def extract(
    args: argparse.Namespace,
    target: Target,
    layers: tuple[int, ...],
    share: Share,
    records: Dataset,
    stack: ExitStack,
) -> None:
    """Computes and stores the missing states of this process's conversations. stack: ends what the
    backend starts.
    """
    root = Path(args.data).expanduser()
    describe(root, target, layers, args)
    done = FeatureStore(root)
    limit = args.max_length or None
    todo = [(row["id"], row["tokens"][:limit]) for row in records if row["id"] not in done]
    element = value_bytes(args.store_dtype, target.hidden_size)
    # ids, logits and log_z, or the state
    if args.top_k:
        last = 8 * args.top_k + 4
    else:
        last = element * target.hidden_size
    row_bytes = 1.01 * (element * len(layers) * target.hidden_size + last)
    needed = row_bytes * sum(
        len(tokens) - 1 for _, tokens in todo
    )  # no state is needed at the last token
    if share.rank == 0:
        free = shutil.disk_usage(root).free
        kind = "last states"
        if args.top_k:
            kind = f"the {args.top_k} most likely tokens"
        print(
            f"{args.data}: states of layers {','.join(map(str, layers))} and {kind} in {args.store_dtype}, {len(todo)} of "
            f"{counted(len(records), 'conversations')} to do, about {needed / 1e9:.3f} GB; {free / 1e9:.1f} GB are free",
            flush=True,
        )
    check_space(
        root,
        needed,
        "features",
        "choose another disk for the data, --top-k 64, fewer --layers, --max-length",
    )
    writer = ShardWriter(root / "features", share.rank)
    mine = [it for it in todo if share.owns(it[0])]
    if not mine:
        return
    top_k = args.top_k
    dtype = args.store_dtype
    if args.backend == "local":
        found = local_states(target, mine, layers, top_k, dtype)
    else:
        client = stack.enter_context(proven_client(args, target, layers))
        found = served_states(client, mine, _IN_FLIGHT * len(client.servers), top_k, dtype)
    with Progress("features", len(mine), "conversations") as progress:
        for key, tensors in found:
            writer.add(key, **tensors)
            progress.advance()
        writer.flush()


def describe(root: Path, target: Target, layers: tuple[int, ...], args: argparse.Namespace) -> None:
    """Writes features.json, or checks that stored states were made with the same settings. Raises
    UserError: they were not.
    """
    wanted = {
        "layers": list(layers),
        "dtype": args.store_dtype,
        "top_k": args.top_k,
        "max_length": args.max_length,
    }
    held = stored_features(root) or {}
    changed = first_change({**wanted, **{key: held[key] for key in wanted if key in held}}, wanted)
    if changed and any((root / "features").glob("part-*.safetensors")):
        raise UserError(
            f"data={args.data!r} holds features with {changed}; use the same, or replace them: --overwrite"
        )
    write_json(root / "features" / "features.json", {"target": target.identity(), **wanted})


def batches(todo: list[tuple[str, list[int]]], limit: int) -> Iterator[list[tuple[str, list[int]]]]:
    """Groups conversations of similar length, at most `limit` padded tokens or a single
    conversation per group.
    """
    group: list[tuple[str, list[int]]] = []
    for key, tokens in sorted(todo, key=lambda it: len(it[1])) if limit > 1 else todo:
        if group and (len(group) + 1) * len(tokens) > limit:
            yield group
            group = []
        group.append((key, tokens))
    if group:
        yield group


@torch.no_grad()
def local_states(
    target: Target,
    rows: list[Row],
    layers: tuple[int, ...],
    top_k: int,
    dtype: StoreDtype,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Ids and stored tensors of rows, from the target in this process; in the order in which rows
    share forwards.
    """
    for group in batches(rows, 1 if target.device.type == "cpu" else _BATCH_TOKENS):
        ids = torch.zeros(
            len(group),
            max(len(tokens) for _, tokens in group),
            dtype=torch.long,
        )  # [b, s]
        for i, (_, tokens) in enumerate(group):
            ids[i, : len(tokens)] = torch.as_tensor(tokens)
        out = target.forward(ids.to(target.device), layers)
        for i, (key, tokens) in enumerate(group):
            n = len(tokens) - 1
            yield (
                key,
                stored_tensors(
                    target,
                    RowStates(out.features[i, :n], out.last_hidden[i, :n]),
                    top_k,
                    dtype,
                ),
            )


def served_states(
    client: StateClient,
    rows: list[Row],
    in_flight: int,
    top_k: int,
    dtype: StoreDtype,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Ids and stored tensors of rows, in their order, from servers that are asked for `in_flight`
    rows at a time.
    """
    waiting: deque[tuple[str, Future[RowStates]]] = deque()
    with ThreadPoolExecutor(in_flight) as pool:
        try:
            for at in range(len(rows) + in_flight):
                if at < len(rows):
                    key, tokens = rows[at]
                    waiting.append((key, pool.submit(client.request, tokens[:-1])))
                if at >= in_flight and waiting:
                    key, asked = waiting.popleft()
                    yield key, stored_tensors(client.shell, asked.result(), top_k, dtype)
        finally:
            client.close()  # requests that wait for a server end
            pool.shutdown(cancel_futures=True)


@torch.no_grad()
def stored_tensors(
    target: Target,
    row: RowStates,
    top_k: int,
    dtype: StoreDtype,
) -> dict[str, Tensor]:
    """The tensors to store for a row, on the CPU."""
    found = stored_as("features", row.features, dtype, target.hidden_size)  # [n, f*h]
    if top_k:
        last = row.last_hidden.to(target.device, target.embed_weight.dtype)
        parts = [top_tokens(target.head(part), top_k) for part in last.split(256)]
        names = ("topk_ids", "topk_logits", "log_z")
        found.update(zip(names, map(torch.cat, zip(*parts, strict=True)), strict=True))
    else:
        found |= stored_as("last_hidden", row.last_hidden, dtype, target.hidden_size)  # [n, h]
    return {name: tensor.cpu() for name, tensor in found.items()}


@contextmanager
def proven_client(
    args: argparse.Namespace,
    shell: Target,
    layers: tuple[int, ...],
) -> Iterator[StateClient]:
    """A client of the servers that --url names, or of one that starts here and ends with the block;
    proven.

    Raises UserError: a server does not start, or does not serve this target.
    """
    with ExitStack() as stack:
        urls = args.url
        states_dir = args.states_dir
        if not urls:
            if flag_value(args.flags, "--port", ""):
                port = []
            else:
                port = ["--port", str(free_port())]
            if args.dtype == "auto" or flag_value(args.flags, "--dtype", ""):
                dtype = []
            else:
                dtype = ["--dtype", args.dtype]
            flags = [*args.flags, *port, *dtype]
            server = StateServer(
                shell,
                layers,
                flags,
                args.engine_python,
                states_dir,
                args.trust_remote_code,
            )
            stack.callback(server.stop, 1.0)  # an interrupted command has little more
            print(f"starting {server}", flush=True)
            server.start()
            server.wait_until_ready()
            urls = [server.url]
            states_dir = ""
        client = StateClient(urls, shell, layers, states_dir)
        stack.callback(client.close)
        client.prove()
        print("\n".join(client.proofs), flush=True)
        yield client


def top_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """[n, v] -> ids [n, k] int32, most likely first, their logits [n, k], and log of the full
    softmax denominator [n].
    """
    top = logits.topk(k, dim=-1)
    return top.indices.int(), top.values, logits.logsumexp(-1)
