"""Training throughput and peak memory of eagle3: our path, the same with plain logits and dense masks, and speculators.

Every side trains the same drafter (same sizes, TTT depths, vocabulary, precision, AdamW, clipping) on the same packed rows of
stored target states, in a process of its own, so that peaks are its own; the processes run interleaved, one at a time.

    ours          states/source.py and drafters/eagle3 as `drafttrain train` runs them offline
    plain         the textbook: logits [rows, s, d] of every position and depth, attention under a dense [s, k*s] mask, the
                  target's logits over its whole vocabulary; fed with our weights, and checked to give our loss
    speculators   its model, loss and masks (eval/speculators_side.py), if --peer-python has them

    python eval/bench_train.py --target smollm2-135m --data runs/quickstart/data --output eval/results/train_cpu.json \
        --peer-python ~/peer/bin/python
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmark import alternate, median, result_path, write_result
from side import Side, serve
from torch import Tensor

from drafttrain.batch import Batch, anchors_by_depth
from drafttrain.data.loader import collate, count_tokens, keep_frequent, pack_rows, training_rows
from drafttrain.data.store import load_records
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.common.layers import rotate
from drafttrain.drafters.eagle3.model import Eagle3, Eagle3Config
from drafttrain.states.origins import Stored
from drafttrain.states.source import TargetSource
from drafttrain.target import Target, resolve_device

GOAL = 1.5
DECAY = 0.8
Step = Callable[[int], Tensor]


# -- the data ---------------------------------------------------------------------------------------------------------


def make_job(args: argparse.Namespace, device: torch.device, path: Path) -> dict[str, Any]:
    """Runs the target once over all rows and stores what the sides train on; returns its description."""
    target = Target.load(args.target, args.dtype, str(device))
    records = load_records(args.data)
    rows = pack_rows(training_rows(records, args.sequence, 0.0, 0)[0], args.sequence, seed=0)
    wanted = [rows[i] for i in range(args.rows * args.batches)]
    kept = keep_frequent(
        count_tokens(records, target.vocab_size), args.draft_vocab_size, target.eos_ids
    )
    layers = target.default_feature_layers
    h = target.hidden_size
    batches: list[Any] = []
    for number, row in enumerate(wanted):
        if number % args.rows == 0:
            batches.append([])
        packed = Batch.of(collate([row]))
        documents = []
        for index, (_, start, length) in zip(
            row["index"], packed.conversations().tolist(), strict=True
        ):
            part = slice(start, start + length)
            out = target.forward(packed.input_ids[:, part].to(device), (*layers, target.num_layers))
            documents.append(
                {
                    "index": index,
                    "tokens": packed.input_ids[0, part],
                    "response": packed.response_mask[0, part],
                    "features": out.features[0, :, :-h].cpu(),
                    "before_norm": out.features[0, :, -h:].cpu(),
                    "last_hidden": out.last_hidden[0].cpu(),
                }
            )
        batches[-1].append(documents)
    job = {
        "target": target.path,
        "dtype": args.dtype,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "feature_layers": layers,
        "kept_ids": kept,
        "ttt_steps": args.ttt_steps,
        "depth_decay": DECAY,
        "checkpointing": args.gradient_checkpointing,
        "batches": batches,
        "rows": wanted,
        "rows_per_batch": args.rows,
    }
    torch.save(job, path)
    return job


# -- the sides --------------------------------------------------------------------------------------------------------


class _Stored:
    """The job's states in the place of a FeatureStore."""

    top_k = 0  # whole states

    def __init__(self, job: dict[str, Any]):
        documents = [document for rows in job["batches"] for row in rows for document in row]
        self.documents = {str(document["index"]): document for document in documents}

    def get(self, key: str) -> dict[str, Tensor]:
        document = self.documents[key]
        return {name: document[name] for name in ("features", "last_hidden")}


def our_step(job: dict[str, Any], target: Target, drafter: Eagle3) -> Step:
    stored: Any = _Stored(job)
    ids = [str(i) for i in range(1 + max(map(int, stored.documents)))]
    source = TargetSource(target, drafter.feature_layers, drafter.kept_ids, Stored(stored, ids))
    if job["checkpointing"]:
        drafter.gradient_checkpointing_enable()

    def step(number: int) -> Tensor:
        rows = job["rows"][number * job["rows_per_batch"] : (number + 1) * job["rows_per_batch"]]
        inputs = collate(rows)
        batch = Batch.of(inputs).to(target.device)
        count = float((inputs["shift_labels"] != -100).sum())
        read = StepInputs(
            batch, target.embed(batch.input_ids), *source(batch), total=count, measure=False
        )
        return drafter(read).loss

    return step


def plain_step(job: dict[str, Any], target: Target, drafter: Eagle3) -> Step:
    """The textbook form, written out; one layer without the options that the benchmark does not use."""
    layer = drafter.midlayer
    attention = drafter.midlayer.self_attn
    kept = drafter.kept_ids
    heads = attention.heads
    kv = attention.kv_heads
    e = attention.head_dim
    dtype = drafter.fc.weight.dtype

    def step(number: int) -> Tensor:
        rows = job["rows"][number * job["rows_per_batch"] : (number + 1) * job["rows_per_batch"]]
        batch = Batch.of(collate(rows)).to(target.device)
        b, s = batch.input_ids.shape
        features, last, document, place = _lay_out(job["batches"][number], b, s, target.device)
        with torch.no_grad():
            log_p = target.head(last.to(target.compute_dtype))[..., kept].log_softmax(-1)
            p = log_p.exp()
        reach = torch.arange(s, device=target.device)
        same = document[:, :, None] == document[:, None, :]
        mask = (same & (reach[None, :, None] >= reach[None, None, :]))[:, None]
        own = torch.eye(s, dtype=torch.bool, device=target.device).expand(b, 1, s, s)
        decay = DECAY ** torch.arange(job["ttt_steps"]).float()
        count = len(anchors_by_depth(batch.response_mask, 1)[0])
        state = drafter.fc(features.to(dtype))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        losses = []
        for k in range(job["ttt_steps"]):
            ids = F.pad(batch.input_ids[:, 1 + k :], (0, min(1 + k, s)))[:, :s]
            x = torch.cat(
                (layer.input_layernorm(target.embed(ids).to(dtype)), layer.hidden_norm(state)),
                dim=-1,
            )
            tables = drafter.rotary.tables((place + k).flatten(), dtype)
            query, key = (
                rotate(linear(x).view(b * s, n, e), tables).view(b, s, n, e).transpose(1, 2)
                for linear, n in ((attention.q_proj, heads), (attention.k_proj, kv))
            )
            value = attention.v_proj(x).view(b, s, kv, e).transpose(1, 2)
            keys.append(key.repeat_interleave(heads // kv, dim=1))
            values.append(value.repeat_interleave(heads // kv, dim=1))
            if k:
                mask = torch.cat((mask, own), dim=-1)
            scores = query @ torch.cat(keys, dim=2).transpose(-1, -2) * e**-0.5
            weights = (
                scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(dtype)
            )
            attended = (weights @ torch.cat(values, dim=2)).transpose(1, 2).reshape(b, s, heads * e)
            state = state + attention.o_proj(attended)
            state = state + layer.mlp(layer.post_attention_layernorm(state))
            log_q = drafter.lm_head(drafter.norm(state)).float().log_softmax(-1)  # [b, s, d]
            wanted, wanted_log = (F.pad(x[:, 1 + k :], (0, 0, 0, 1 + k))[:, :s] for x in (p, log_p))
            divergence = (wanted * (wanted_log - log_q)).sum(-1)
            anchors = anchors_by_depth(batch.response_mask, k + 1)[k]
            counted = torch.zeros(b * s, device=target.device).index_fill(0, anchors, 1.0)
            losses.append(decay[k] / decay.sum() * (divergence.flatten() * counted).sum() / count)
        return torch.stack(losses).sum()

    return step


def _lay_out(
    rows: list[Any], b: int, s: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """features [b, s, f*h], last states [b, s, h], document number and position [b, s]."""
    first = rows[0][0]
    features, last = (
        torch.zeros(b, s, first[name].shape[-1]) for name in ("features", "last_hidden")
    )
    document = torch.full((b, s), -1)
    place = torch.zeros(b, s, dtype=torch.long)
    for i, row in enumerate(rows):
        start = 0
        for number, part in enumerate(row):
            at = slice(start, start + len(part["tokens"]))
            features[i, at], last[i, at] = part["features"], part["last_hidden"]
            document[i, at], place[i, at] = number, torch.arange(len(part["tokens"]))
            start = at.stop
    return features.to(device), last.to(device), document.to(device), place.to(device)


def work(path: str, side: str) -> None:
    """A side's process: a step for every line that comes in."""
    job = torch.load(path, weights_only=False)
    device = torch.device(job["device"])
    torch.set_num_threads(job["threads"])
    target = Target.load(job["target"], job["dtype"], job["device"])
    torch.manual_seed(0)
    shape = {
        "draft_vocab_size": len(job["kept_ids"]),
        "ttt_steps": job["ttt_steps"],
        "depth_decay": DECAY,
    }
    drafter = Eagle3(Eagle3Config.for_target(target, **shape))
    drafter.initialize(target, job["kept_ids"])
    drafter.bind(target)
    drafter = drafter.to(device=device, dtype=target.compute_dtype).train()
    step = {"ours": our_step, "plain": plain_step}[side](job, target, drafter)
    serve(step, drafter.parameters(), device)


# -- the measurement --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--data", help="folder written by drafttrain generate")
    parser.add_argument(
        "--sequence", type=int, default=1024, help="tokens of a packed row (default 1024)"
    )
    parser.add_argument("--rows", type=int, default=1, help="rows of a step (default 1)")
    parser.add_argument("--batches", type=int, default=2, help="different batches (default 2)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="in our path")
    parser.add_argument("--peer-python", help="an interpreter with speculators")
    parser.add_argument("--output", type=result_path)
    parser.add_argument("--work", nargs=2, metavar=("JOB", "SIDE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(*args.work)

    device = resolve_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.pt"
        job = make_job(args, device, path)
        here = Path(__file__).resolve()
        commands = {
            name: [sys.executable, str(here), "--work", str(path), name]
            for name in ("ours", "plain")
        }
        if args.peer_python:
            commands["speculators"] = [
                args.peer_python,
                str(here.with_name("speculators_side.py")),
                str(path),
            ]
        sides = {name: Side(command) for name, command in commands.items()}
        first = {
            name: side.step(0) for name, side in sides.items()
        }  # also shows that ours and plain are one loss
        print({name: answer["loss"] for name, answer in first.items()}, flush=True)
        torch.testing.assert_close(
            first["ours"]["loss"], first["plain"]["loss"], rtol=1e-3, atol=1e-4
        )
        steps = {name: _pass(side, args.batches) for name, side in sides.items()}
        runs = alternate(steps, args.repeats)
        for side in sides.values():
            side.close()
    tokens = sum(row["length"] for row in job["rows"])
    results = {}
    for name, answers in runs.items():
        rest = answers[0]["at_rest_mb"]
        results[name] = {
            "tokens_per_second": round(tokens / median(answers, "seconds"), 1),
            "seconds_per_step": [round(answer["seconds"] / args.batches, 4) for answer in answers],
            "peak_mb": round(answers[-1]["peak_mb"]),
            "peak_above_rest_mb": round(answers[-1]["peak_mb"] - rest),
            "first_loss": round(first[name]["loss"], 5),
        }
    rates = {name: result["tokens_per_second"] for name, result in results.items()}
    memory = {name: result["peak_above_rest_mb"] for name, result in results.items()}
    write_result(
        args.output,
        rates["ours"] / rates["plain"],
        GOAL,
        results,
        device,
        against={
            name: round(rates["ours"] / rate, 3) for name, rate in rates.items() if name != "ours"
        },
        memory_against={
            name: round(memory["ours"] / mb, 3) for name, mb in memory.items() if name != "ours"
        },
        tokens=tokens,
    )


def _pass(side: Side, batches: int) -> Callable[[], dict[str, float]]:
    def run() -> dict[str, float]:
        answers = [side.step(number) for number in range(batches)]
        return {**answers[-1], "seconds": sum(answer["seconds"] for answer in answers)}

    return run


if __name__ == "__main__":
    main()
