"""States arrive ahead of the step: in order, within bounds, also from servers, with the result of states that are there."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.cli import main
from drafttrain.data.loader import collate
from drafttrain.data.store import ShardWriter, load_records
from drafttrain.errors import UserError
from drafttrain.files import write_json
from drafttrain.states.ahead import MOST_STEPS, Ahead, StatesLostError, ahead
from drafttrain.states.origins import Origin, Row, RowStates
from drafttrain.states.served import Served
from drafttrain.target import Target
from drafttrain.training.checkpoint import Checkpoints
from drafttrain.training.step import TrainingStep
from tests.conftest import make_target, save_target
from tests.files import load_json
from tests.states.fake_state_server import FakeStateServer
from tests.states.stand_ins import LAYERS, SERVED
from tests.training.runs import ROOT, TWO, launch, write_data, write_recipe

ROW_BYTES = 10 * 4.0  # of a row's states, at one float32 per token


def row(index: int, length: int = 10) -> Row:
    return Row(index, torch.arange(length))


class Reader(Origin):
    """Reads a float32 per token; notes the order, and waits for `gate` if one is set."""

    name = "reader"
    reads = True
    threads = 2

    def __init__(self):
        self.asked: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def states(self, rows: Sequence[Row]) -> list[RowStates | None]:
        (row,) = rows
        self.asked.append(row.index)
        self.gate.wait()
        if row.index == 13:
            raise UserError("url='http://x': gone")
        states = torch.full((len(row.tokens), 1), float(row.index))
        return [RowStates(states, states[:, :0])]


@pytest.fixture
def reader():
    return Reader()


@pytest.fixture
def reading(reader):
    made = Ahead(reader, 3 * ROW_BYTES, 4.0)
    yield made
    reader.gate.set()
    made.close()


def test_no_more_is_asked_for_than_fits_and_the_order_is_that_of_the_steps(reading, reader):
    for index in range(8):
        reading.expect(row(index))
        assert reading.held <= reading.limit
    assert reading.held == 3 * ROW_BYTES and not reading.room
    for index in range(8):
        assert reading.take(row(index)).features[0] == index
        assert reading.held == min(3, 7 - index) * ROW_BYTES
    assert reading.room and sorted(reader.asked) == list(range(8))


def test_what_a_step_waits_for_is_read_at_once_and_a_row_larger_than_the_limit_alone(
    reading, reader
):
    reader.gate.clear()
    for index in range(6):
        reading.expect(row(index))
    reading.ask(row(5))
    reading.ask(row(9))  # was not announced
    assert reading.held == 5 * ROW_BYTES
    reader.gate.set()
    order = [5, 9, 0, 1, 2, 3, 4]
    assert [int(reading.take(row(index)).features[0]) for index in order] == order
    reading.expect(row(10, 100))
    reading.expect(row(11))
    assert not reading.room and reading.held == 10 * ROW_BYTES
    assert len(reading.take(row(10, 100)).features) == 100 and reading.room


def test_a_row_that_two_batches_need_is_read_once_and_a_replaced_one_makes_room(reading, reader):
    for index in (1, 1, 2, 3, 4):
        reading.expect(row(index))
    assert not reading.room
    reading.release(4)  # before it was asked for
    reading.release(3)
    assert reading.room and reading.held == 2 * ROW_BYTES
    assert reading.take(row(1)) is not None and reading.held == 2 * ROW_BYTES
    assert reading.take(row(1)) is not None and reading.held == ROW_BYTES
    reading.take(row(2))
    assert reading.held == 0 and reader.asked.count(1) == 1 and 4 not in reader.asked


def test_a_failure_is_raised_where_the_states_are_needed(reading):
    for index in (12, 13):
        reading.expect(row(index))
    assert reading.take(row(12)) is not None
    with pytest.raises(StatesLostError, match="http://x': gone"):
        reading.take(row(13))


def test_waiting_is_measured_and_only_waiting(reading, monkeypatch):
    times = iter([1.0, 3.5, 10.0, 10.25])
    monkeypatch.setattr(reading, "clock", lambda: next(times))
    reading.take(row(1))
    reading.take(row(2))
    assert reading.waited == 2.75


def test_what_a_step_takes_is_cut_and_rows_of_no_data_set_are_not_read(reading, reader):
    needed = torch.tensor([2, 5])
    (cut, other) = reading.states([Row(1, torch.arange(10), needed, slice(3, 10)), row(-1)])
    assert cut.features.tolist() == [[1.0]] * 7 and len(cut.last) == 2
    assert other is None and reader.asked == [1]


def test_announcing_waits_for_room_and_holds_a_bounded_number():
    announced: list[int] = []
    room = False
    coming = ahead(range(200), announced.append, lambda: room)
    assert next(coming) == 0
    assert announced == [0]
    room = True
    assert next(coming) == 1
    assert len(announced) == 2 + MOST_STEPS - 1
    assert list(coming) == list(range(2, 200)), "all are handed out, once"
    assert announced == list(range(200))


# -- training from servers --------------------------------------------------------------------------------------------

RECIPE = {
    "drafter": {"draft_vocab_size": 255, "ttt_steps": 2, "feature_layers": list(LAYERS)},
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 9,  # of 5 steps an epoch
    "logging_steps": 1,
    "save_steps": 4,
    "decode_prompts": 2,
    "init": "random",
    "cache_gb": 0,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """(folder of a tiny target, data, the same data with the server's states stored); nobody writes to them."""
    folder = tmp_path_factory.mktemp("streaming")
    target = make_target()
    save_target(target, folder / "target")
    data = write_data(folder / "data", target)
    stored = folder / "stored"
    shutil.copytree(data, stored)
    target.final_norm = target.body.norm
    with FakeStateServer(target, folder / "states", SERVED) as server:
        client = Served([server.url], target, LAYERS)
        writer = ShardWriter(stored / "features", 0, shard_bytes=4000)
        for row in load_records(stored):
            states = client.request(row["tokens"][:-1])
            writer.add(
                row["id"],
                features=states.features.bfloat16(),
                last_hidden=states.last.bfloat16(),
            )
        writer.flush()
        client.close()
    write_json(stored / "features" / "features.json", {"layers": list(LAYERS), "dtype": "bfloat16"})
    return folder / "target", data, stored


@pytest.fixture
def server(place, tmp_path):
    target = Target.load(str(place[0]), "float32", "cpu")
    with FakeStateServer(target, tmp_path / "states", SERVED) as running:
        yield running


def train(folder: Path, target: Path, data: Path, **extra: object) -> dict[str, Tensor]:
    folder.mkdir()
    words = write_recipe(folder, target, data, **{**RECIPE, **extra})
    assert main(["train", *words]) == 0
    return load_file(
        folder / "drafter" / "checkpoint-9" / "model.safetensors"
    )  # of the last step, whichever is the best


@pytest.mark.thorough
@pytest.mark.parametrize(
    "packing", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["rows", "packed"]
)
def test_streamed_states_train_what_stored_ones_train_and_are_asked_for_ahead(
    place, server, tmp_path, monkeypatch, capsys, packing
):
    target, data, stored = place
    events: list[tuple[str, set[int]]] = []
    start = Ahead._start
    loss = TrainingStep.compute_loss

    def started(self, coming):
        events.append(("asked", {coming.row.index}))
        start(self, coming)

    def computed(self, model, inputs, *args, **kwargs):
        if model.training:
            events.append(("step", set(inputs["index"].tolist())))
        return loss(self, model, inputs, *args, **kwargs)

    extra = {"packing": packing, "max_length": 64 if packing else 2048}
    server.faults.extend(["torn file", "NaN", "503", "no file"])  # cost retries only
    monkeypatch.setattr(Ahead, "_start", started)
    monkeypatch.setattr(TrainingStep, "compute_loss", computed)
    streamed = train(tmp_path / "streamed", target, data, target_url=server.url, **extra)
    out = capsys.readouterr().out
    assert (
        "without its layers: its states stream from target_url" in out
        and f"{server.url} serves" in out
    )
    steps = [at for at, (kind, _) in enumerate(events) if kind == "step"]
    for now, after in itertools.pairwise(steps):  # across the end of an epoch too
        before = set().union(*(rows for kind, rows in events[:now] if kind == "asked"))
        assert events[after][1] <= before, (
            "the rows of the next micro-batch are asked for before this one's loss"
        )
    rows = {row["id"]: row["tokens"][:-1] for row in load_records(data)}
    asked = Counter(tuple(prompt) for prompt in server.requests if isinstance(prompt, list))
    assert all(asked[tuple(tokens)] for tokens in rows.values()), "every row is asked for"
    assert not list(server.folder.glob("cmpl-*")), "what was read is deleted"

    kept = train(tmp_path / "kept", target, stored, **extra)
    note = (
        f"note: the data's states are those of target 'tiny'; if {str(target)!r} has other weights"
    )
    assert note in capsys.readouterr().out
    assert streamed.keys() == kept.keys()
    for name, tensor in streamed.items():
        assert torch.equal(tensor, kept[name]), name
    figures, others = (
        load_json(tmp_path / name / "drafter" / "training.json") for name in ("streamed", "kept")
    )
    assert figures["train_loss"] == others["train_loss"]
    assert figures["held_out"]["eval_loss"] == others["held_out"]["eval_loss"]
    assert figures["best"] == others["best"] and figures["target_features"]["streamed"] > 36
    assert figures["target_features"]["streamed"] == others["target_features"]["stored"]
    assert figures["target_features"]["online"] == 0 and 0 <= figures["states_wait"] <= 1


@pytest.mark.thorough
def test_a_server_that_is_gone_ends_the_run_in_a_line_that_names_the_checkpoint_and_the_run_goes_on(
    place, server, tmp_path, monkeypatch, capsys
):
    target, data, stored = place
    whole = train(tmp_path / "whole", target, stored, decode_prompts=0)
    patient = Served.__init__
    monkeypatch.setattr(
        Served, "__init__", lambda self, *args, **more: patient(self, *args, patience=0.05, **more)
    )
    save = Checkpoints.save_model
    monkeypatch.setattr(
        Checkpoints,
        "save_model",
        lambda self, *args, **kw: (save(self, *args, **kw), server.stop()),
    )
    (tmp_path / "cut").mkdir()
    options = {**RECIPE, "target_url": [server.url], "decode_prompts": 0, "prefetch_gb": 0}
    words = write_recipe(tmp_path / "cut", target, data, **options)
    capsys.readouterr()
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert server.url in error and error.endswith(
        f"{tmp_path / 'cut' / 'drafter' / 'checkpoint-4'} is kept, the same command continues from there"
    )
    monkeypatch.setattr(Checkpoints, "save_model", save)
    server.start()
    assert main(["train", *words]) == 0
    again = load_file(tmp_path / "cut" / "drafter" / "checkpoint-9" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


@pytest.mark.slow
def test_two_processes_train_from_servers_what_they_train_from_stored_states(
    place, server, tmp_path
):
    """Under DeepSpeed; each asks for the rows of its own micro-batches only."""
    target, data, stored = place
    launcher = [
        *TWO,
        "--use_deepspeed",
        "--deepspeed_config_file",
        str(ROOT / "configs/deepspeed/zero2.json"),
    ]
    # 20 rows to train on, of which a step takes two, one in each process: an epoch of 10 steps and the beginning of a second.
    one_row = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "validation": 4 / 24,
        "max_steps": 12,
    }
    weights = {}
    figures = {}
    for name, rows, extra in (
        ("stored", stored, {}),
        ("streamed", data, {"target_url": [server.url]}),
    ):
        (tmp_path / name).mkdir()
        words = write_recipe(tmp_path / name, target, rows, **{**RECIPE, **one_row, **extra})
        done = launch(words, [*launcher, "--dynamo_backend", "no"], DS_ACCELERATOR="cpu")
        assert done.returncode == 0, done.stderr[-4000:]
        drafter = tmp_path / name / "drafter"
        weights[name] = load_file(drafter / "checkpoint-12" / "model.safetensors")
        figures[name] = load_json(drafter / "training.json")
    assert all(
        figure["processes"] == 2 and figure["engine"] == "DeepSpeedEngine"
        for figure in figures.values()
    )
    assert figures["streamed"]["train_loss"] == figures["stored"]["train_loss"]
    assert (
        figures["streamed"]["held_out"]["eval_loss"] == figures["stored"]["held_out"]["eval_loss"]
    )
    for key, tensor in weights["stored"].items():
        assert torch.equal(weights["streamed"][key], tensor), key
    texts = {tuple(row["tokens"][:-1]) for row in load_records(data)}
    asked = Counter(tuple(prompt) for prompt in server.requests if tuple(prompt) in texts)
    trained = sorted(asked[text] for text in texts)[
        :20
    ]  # held-out rows are asked for by each measurement
    assert len(texts) == 24 and min(trained) == 1 and 20 <= sum(trained) <= 24, (
        "one process asks for a row, not both"
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"kind": "draft_model", "drafter": {"layers": [0]}, "on_policy": {"share": 0.5}},
            "on_policy runs the target",
        ),
        (
            {"kind": "draft_model", "loss": "next_token", "drafter": {"layers": [0]}},
            "does not read; leave it out",
        ),
        (
            {"kind": "draft_model", "init": "target", "drafter": {"layers": [0]}},
            "gives states, not layers",
        ),
        ({"target_url": "nowhere"}, "url='nowhere' is not an address"),
    ],
)
def test_what_contradicts_streaming_is_refused(place, tmp_path, capsys, extra, message):
    words = write_recipe(
        tmp_path, *place[:2], **{**RECIPE, "target_url": "http://127.0.0.1:1", **extra}
    )
    assert main(["train", *words]) == 2 and message in capsys.readouterr().err


def test_collated_rows_are_what_is_announced():
    """The index of a packed row's conversations comes in the order of their tokens."""
    rows = [
        {
            "tokens": [1, 2, 3, 4, 5],
            "spans": [[1, 3]],
            "length": 5,
            "index": [7, 3],
            "documents": [3, 2],
        }
    ]
    assert collate(rows)["index"].tolist() == [7, 3]
