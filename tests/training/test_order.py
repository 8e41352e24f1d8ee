"""Which rows a step reads: the same whether it is reached in one run or resumed, and announced before earlier steps run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from datasets import Dataset
from transformers import TrainingArguments

from drafttrain.training.order import (
    TrainingOrder,
    announced_batches,
    announced_steps,
    held_out_loader,
)

ROWS = 23


@pytest.fixture
def order(tmp_path):
    def make(strategy: str = "group_by_length", **keys: object) -> TrainingOrder:
        args = TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            report_to=[],
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            train_sampling_strategy=strategy,
            **keys,
        )
        rows = [
            {"tokens": [1] * n, "spans": [[1, n]], "length": n, "index": n - 4}
            for n in range(4, 4 + ROWS)
        ]
        seeded = DataLoaderConfiguration(use_seedable_sampler=True)  # as in transformers' arguments
        accelerator = Accelerator(cpu=True, dataloader_config=seeded)
        return TrainingOrder(Dataset.from_list(rows), args, accelerator, None)

    return make


def indices(steps) -> list[list[list[int]]]:
    return [[inputs["index"].tolist() for inputs in step] for step in steps]


@pytest.mark.parametrize("strategy", ["group_by_length", "random", "sequential"])
def test_a_run_that_begins_at_any_step_reads_the_same_rows(order, strategy):
    whole = indices(order(strategy).steps(0, 14))
    assert (len(whole) == 14 and whole[:5] != whole[5:10]) or strategy == "sequential"
    for first in (1, 5, 7):
        assert indices(order(strategy).steps(first, 14)) == whole[first:]


def test_a_seed_of_the_order_counts_also_if_it_is_0(order):
    other = indices(order(seed=7).steps(0, 5))
    assert indices(order(seed=7, data_seed=0).steps(0, 5)) != other
    assert indices(order(seed=0, data_seed=7).steps(0, 5)) == other


def test_an_epoch_ends_with_fewer_micro_batches_and_says_how_far_it_is(order):
    made = order("sequential")  # 12 batches of two rows, the last one of one: six steps
    assert made.steps_per_epoch == 6 and made.total_steps() == 18
    assert [len(step) for step in made.steps(0, 7)] == [2] * 7
    assert made.epochs(1) == 1 / 6 and made.epochs(6) == 1.0 and made.epochs(7) == 1 + 1 / 6


def test_reading_rows_leaves_the_random_numbers_of_training_alone(order):
    made = order("random")
    before = torch.get_rng_state()
    assert len(list(made.steps(0, 9))) == 9
    assert torch.equal(torch.get_rng_state(), before)


def test_a_measurement_announces_its_batches_in_their_order(order):
    made = order(per_device_eval_batch_size=2)
    announced = []
    reading = SimpleNamespace(room=False)
    source = SimpleNamespace(
        ahead=reading, expect=lambda inputs: announced.append(inputs["index"].tolist())
    )
    loader = held_out_loader(made.rows, made.args, Accelerator(cpu=True), None)
    read = [inputs["index"].tolist() for inputs in announced_batches(loader, source)]
    assert announced == read and len(read) == 12


def test_steps_are_announced_before_earlier_ones_run_also_those_of_the_next_epoch(order):
    made = order()
    whole = indices(made.steps(0, 8))
    announced: list[list[int]] = []
    source = SimpleNamespace(
        ahead=SimpleNamespace(room=True),
        expect=lambda inputs: announced.append(inputs["index"].tolist()),
    )
    coming = announced_steps(order().steps(0, 8), source, 2)
    first = next(coming)
    assert indices([first]) == whole[:1]
    assert announced == [batch for step in whole for batch in step], "and none behind the last step"
    assert indices(coming) == whole[1:], "all are handed out, once"
