"""Processes that share rows compute what one computes, in a part of its memory."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from transformers import TrainerState, TrainingArguments

from drafttrain.batch import anchors_by_depth
from drafttrain.config import TrainConfig
from drafttrain.data.store import FeatureStore
from drafttrain.errors import UserError
from drafttrain.sequence_parallel import SharedBatches
from drafttrain.states.origins import Stored
from drafttrain.states.source import TargetSource
from drafttrain.training.arguments import sequence_group
from drafttrain.training.loop import evaluate
from drafttrain.training.step import TrainingStep
from tests.conftest import make_target
from tests.drafters.draft_models import make_drafter as make_draft_model
from tests.drafters.helpers import make_batch, packed_batch
from tests.drafters.layer_kinds import make_kind
from tests.training.shared_rows import Board, ThreadGroup, shared_steps, step

KINDS: dict[str, dict] = {
    "eagle3": {"num_hidden_layers": 2, "sliding_window": 9, "ttt_steps": 3, "depth_share": 0.6},
    "eagle1": {"feature_noise": 0.0, "ttt_steps": 2, "qk_norm": True},
    "peagle": {"ttt_steps": 3},
    "mtp": {"modules": 2, "ttt_steps": 3},
    "dflash": {"block_size": 4, "anchor_share": 0.5, "num_hidden_layers": 2},
    "dspark": {"block_size": 4, "weighting": "dpace"},
    "dflash2": {"block_size": 4},
    "domino": {"block_size": 4},
}


@functools.cache
def the_target(kv_heads: int = 2):
    return make_target(num_key_value_heads=kv_heads)


def drafter_of(kind: str, target):
    if kind == "draft_model":
        return make_draft_model(target).train()
    return make_kind(kind, target, **KINDS[kind], num_key_value_heads=2).train()


def check(drafter, target, batch, size, source=None):
    source = source or (lambda: TargetSource(target, drafter.feature_layers, drafter.kept_ids))
    count = len(anchors_by_depth(batch.response_mask, 1)[0])
    torch.manual_seed(0)  # what `ThreadGroup.same` draws
    alone = step(drafter, target, source(), batch, count)
    parts = shared_steps(drafter, target, source, batch, count, size)
    torch.testing.assert_close(sum(part[0] for part in parts), alone[0], rtol=1e-5, atol=1e-6)
    for name, grad in alone[1].items():
        together = sum(part[1][name] for part in parts)
        difference = float((together - grad).abs().max() / grad.abs().max())
        assert difference < 1e-5, f"{name}: {difference:.1e}"
    for name, value in alone[2].items():
        torch.testing.assert_close(
            sum(part[2][name] for part in parts), value, rtol=1e-4, atol=1e-4
        )
    return alone, parts


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [*KINDS, "draft_model"])
def test_two_processes_that_share_rows_give_the_loss_and_gradients_of_one(kind):
    """Several conversations a row, responses that end in the other part, and a window."""
    target = the_target()
    batch = packed_batch(make_batch((17, 11, 30, 9), start=2), [[2, 0], [3, 1]])
    check(drafter_of(kind, target), target, batch, 2)


@pytest.mark.thorough
def test_four_processes_repeat_key_heads_and_may_hold_no_anchor():
    """Two key heads for four processes, and one response of five tokens, all in the last parts."""
    batch = make_batch((40,))
    batch.response_mask[:] = False
    batch.response_mask[0, 33:38] = True
    for kind in ("eagle3", "dflash"):
        target = the_target()
        _, parts = check(drafter_of(kind, target), target, batch, 4)
        assert any(part[2]["count"][0] == 0 for part in parts)


class Shards:
    """Features on disk, as far as a source reads them; counts the rows that leave it."""

    def __init__(self, states: dict[str, dict[str, torch.Tensor]], top_k: int = 0):
        self.states = states
        self.top_k = top_k

    def get(self, name: str) -> dict[str, torch.Tensor] | None:
        return self.states.get(name)


def test_stored_states_are_read_in_parts():
    target = the_target()
    drafter = drafter_of("eagle3", target)
    batch = make_batch((33, 20))
    out = target.forward(batch.input_ids, drafter.feature_layers)
    states = {
        str(row): {
            "features": out.features[row, : length - 1],
            "last_hidden": out.last_hidden[row, : length - 1],
        }
        for row, length in enumerate(batch.lengths.tolist())
    }

    def source() -> TargetSource:
        store: FeatureStore = Shards(states)  # type: ignore[assignment]
        origin = Stored(store, ["0", "1"])
        return TargetSource(target, drafter.feature_layers, drafter.kept_ids, origin)

    check(drafter, target, batch, 2, source)
    _, parts = check(drafter, target, batch, 2)  # the same without
    assert all(part[3][1] > 0 for part in parts)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "draft_model"])
def test_memory_of_a_long_row_falls_by_half(kind):
    target = the_target()
    options = {"eagle3": {}, "dflash": {"block_size": 4, "anchor_share": 0.3}}.get(kind, {})
    drafter = (
        make_draft_model(target) if kind == "draft_model" else make_kind(kind, target, **options)
    )
    batch = make_batch((400,), start=100)
    alone, parts = check(drafter.train(), target, batch, 2)
    for part in parts:
        for own, whole in zip(part[3], alone[3], strict=True):
            assert own < 0.6 * whole or whole == 0


def test_heads_that_cannot_be_divided_are_refused():
    target = the_target()
    drafter = make_kind("eagle3", target, num_attention_heads=2, num_key_value_heads=2)
    with pytest.raises(
        UserError,
        match=r"sequence_parallel=4: a layer has 2 attention heads, which 4 processes cannot",
    ):
        check(drafter, target, make_batch((20,)), 4)


def test_all_processes_of_a_group_read_each_batch():
    order = list(range(10))
    read = list(SharedBatches(order, batch=2, processes=4, sharing=2))  # type: ignore[arg-type]
    turns = [read[i : i + 2] for i in range(0, len(read), 2)]  # of processes 0, 1, 2, 3, 0, ...
    assert turns[0::4] == turns[1::4] == [[0, 1], [4, 5], [8, 9]]
    assert (
        turns[2::4] == turns[3::4] == [[2, 3], [6, 7], [0, 1]]
    )  # the last round is filled from the beginning
    assert len(SharedBatches(order, 2, 4, 2)) == len(read)  # type: ignore[arg-type]


def measured(drafter, target, rows, rank: int, board: Board, sharing: int) -> dict[str, float]:
    """`evaluate` of one of the processes of a board, with the sums that they take together."""
    world = board.size
    given = vars(TrainingArguments("out", use_cpu=True, train_sampling_strategy="sequential"))
    own = {"world_size": world, "process_index": rank, "device": torch.device("cpu")}
    args = SimpleNamespace(**{**given, **own, "eval_batch_size": 2, "dataloader_pin_memory": False})
    accelerator = SimpleNamespace(
        prepare=lambda loader: prepare_data_loader(loader, num_processes=world, process_index=rank),
        reduce=lambda value: sum(board.all(rank, value)),
    )
    group = ThreadGroup(board, rank, sharing) if sharing > 1 else None
    source = TargetSource(target, drafter.feature_layers, drafter.kept_ids)
    step = TrainingStep(drafter, target, source, args, TrainerState(), accelerator, group)
    nothing = SimpleNamespace(eval=lambda: None, write_held_out=lambda *_: None)
    training = SimpleNamespace(
        run=SimpleNamespace(drafter=drafter, held_out=rows, source=source, sequence=group),
        args=args,
        step=step,
        accelerator=accelerator,
        optimizer=nothing,
        logs=nothing,
    )
    return evaluate(training)


@pytest.mark.parametrize("sharing", [1, 2])
def test_held_out_rows_that_fill_up_the_last_batch_count_once(sharing):
    target = the_target()
    drafter = drafter_of("eagle3", target)
    rows = Dataset.from_list(
        [
            {"tokens": [*range(n, 2 * n)], "spans": [[2, n]], "length": n, "index": n}
            for n in (9, 14, 7, 12, 20)
        ]
    )
    alone = measured(drafter, target, rows, 0, Board(1), 1)
    run = functools.partial(measured, drafter, target, rows, board=Board(2), sharing=sharing)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(run, (0, 1)):
            assert found == pytest.approx(alone, abs=2e-4)


def arguments_of(**changes):
    given = {"world_size": 4, "parallelism_config": None, "deepspeed_plugin": object()}
    return SimpleNamespace(**{**given, "train_sampling_strategy": "group_by_length", **changes})


@pytest.mark.parametrize(
    ("recipe", "run", "message"),
    [
        ({"kind": "medusa"}, {}, "kind='medusa' has no attention"),
        ({}, {"deepspeed_plugin": None}, "start with accelerate launch --use_deepspeed"),
        ({}, {"world_size": 3}, "does not divide the 3 processes"),
        ({"on_policy": {"share": 0.5}}, {}, "leave on_policy out"),
        ({"cache_gb": 2.0}, {}, "cache_gb=2: parts of rows are not kept"),
        ({}, {"train_sampling_strategy": "random"}, "train_sampling_strategy='random'"),
    ],
)
def test_what_does_not_go_with_shared_rows_is_said(recipe, run, message):
    with pytest.raises(UserError, match=f"^sequence_parallel=2: .*{message}"):
        sequence_group(TrainConfig(**recipe, sequence_parallel=2), arguments_of(**run))


def test_rows_cut_by_accelerate_are_refused(monkeypatch):
    assert sequence_group(TrainConfig(), arguments_of()) is None
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    with pytest.raises(
        UserError, match=r"parallelism_config cuts rows .* set the recipe's sequence_parallel"
    ):
        sequence_group(TrainConfig(), arguments_of())
