from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from drafttrain.data import store as store_module
from drafttrain.data.store import (
    FeatureStore,
    ShardWriter,
    Store,
    load_records,
    read_meta,
)
from drafttrain.errors import UserError
from drafttrain.target.attention import LAST

META = {
    "target": {
        "name": "tiny",
        "model_type": "llama",
        "hidden_size": 4,
        "num_layers": 3,
        "vocab_size": 10,
        "tokenizer": "abc",
    },
    "sampling": {"temperature": 1.0, "seed": 0},
    "features": {"layers": [1, 2], "dtype": "bfloat16"},
}


def record(key: str, tokens: int = 6) -> dict:
    spans = [[2, tokens]]
    return {
        "id": key,
        "tokens": list(range(tokens)),
        "spans": spans,
        "finish": ["stop"],
        "source": "test",
    }


def write(directory, keys, rank=0):
    with Store(directory, META, rank) as store:
        for key in keys:
            store.append(record(key))


def test_round_trip(tmp_path):
    write(tmp_path / "d", ["a", "b"], rank=0)
    write(tmp_path / "d", ["c"], rank=1)
    rows = load_records(tmp_path / "d")
    assert list(rows["id"]) == ["a", "b", "c"]
    assert rows[0] == {**record("a"), "reasoning": None, "part": None, "images": None}
    meta = read_meta(tmp_path / "d")
    assert meta["target"] == META["target"]
    assert meta["format"] == 1
    assert meta["counts"] == {
        "conversations": 3,
        "responses": 3,
        "response_tokens": 12,
        "truncated": 0,
    }


def test_what_grew_is_read_anew(tmp_path):
    write(tmp_path, ["a"])
    assert len(load_records(tmp_path)) == 1
    write(tmp_path, ["b"])
    assert list(load_records(tmp_path)["id"]) == ["a", "b"]


def test_torn_line_is_cut_and_redone(tmp_path):
    write(tmp_path, ["a", "b"])
    part = tmp_path / "part-0000.jsonl"
    whole = part.read_bytes()
    part.write_bytes(whole[:-9])
    assert list(load_records(tmp_path)["id"]) == ["a"]
    with Store(tmp_path, META) as store:
        assert store.done_ids() == {"a"}
        store.append(record("b"))
    assert part.read_bytes() == whole


def test_torn_line_of_another_process_is_left_alone(tmp_path):
    write(tmp_path, ["a"], rank=0)
    part = tmp_path / "part-0000.jsonl"
    part.write_bytes(part.read_bytes() + b'{"id": "half')
    with Store(tmp_path, META, rank=1) as store:
        assert store.done_ids() == {"a"}
    assert part.read_bytes().endswith(b"half")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sampling": {"temperature": 0.5, "seed": 0}},
            r"begun with sampling.temperature=1.0.*sampling.temperature=0.5",
        ),
        (
            {"target": {**META["target"], "tokenizer": "xyz"}},
            r"target.tokenizer='abc'.*'xyz'.*--overwrite",
        ),
        ({"features": None}, r"this run has features(.layers)?=None"),
    ],
)
def test_other_settings_are_refused(tmp_path, change, message):
    write(tmp_path, ["a"])
    with pytest.raises(UserError, match=message):
        Store(tmp_path, {**META, **change})
    with Store(tmp_path, {**META, **change}, overwrite=True) as store:
        assert store.done_ids() == set()


def test_unreadable_data(tmp_path):
    with pytest.raises(
        UserError,
        match=r"is not a data set \(it holds no meta.json\); make one: drafttrain generate",
    ):
        load_records(tmp_path)
    write(tmp_path, [])
    with pytest.raises(UserError, match=r"is empty.*run drafttrain generate"):
        load_records(tmp_path)
    (tmp_path / "part-0000.jsonl").write_text('{"id": 3,\n')
    with pytest.raises(UserError, match=r"part-0000.jsonl line 1: not JSON .*; delete that line"):
        load_records(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="has format 99, this drafttrain reads 1"):
        load_records(tmp_path)


def test_the_lines_of_all_writers_are_counted(tmp_path):
    odd = [
        record('a"b\\c "spans":[[0,1]]'),
        {**record("é\n"), "finish": ["length"]},
        {**record("d"), "source": '"spans":[[9,9]]'},
    ]
    with Store(tmp_path, META) as store:
        for row in odd:
            store.append(row)
        assert store.done_ids() == {row["id"] for row in odd}
        store.append(record("e"))
        assert len(store.done_ids()) == 4
        with (tmp_path / "part-0007.jsonl").open(
            "w"
        ) as other:  # another writer's order of keys and spaces
            other.write(
                json.dumps({"source": "", **record("f")})
                + f"\n\n{json.dumps(record('d'))}\n"
                + json.dumps(record("g"))[:-3]
            )
        assert store.done_ids() == {row["id"] for row in odd} | {"e", "f"}
        assert store.finish() == {
            "conversations": 5,
            "responses": 5,
            "response_tokens": 20,
            "truncated": 1,
        }


@pytest.mark.parametrize(
    "end", [b'"spans":[[0,2]],"finish":["stop"]', b'"spans":[[0]],"finish":["stop"],"source":""}']
)
def test_a_damaged_end_is_an_error(tmp_path, end):
    write(tmp_path, ["a"])
    with (tmp_path / "part-0000.jsonl").open("ab") as part:
        part.write(b'{"id":"b","tokens":[1,2],' + end + b"\n")
    with pytest.raises(
        UserError, match=r"part-0000.jsonl line 2: .*; delete that line to redo its conversation"
    ):
        Store(tmp_path, META).done_ids()


# -- features -----------------------------------------------------------------------------------------------------


def states(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(5, 8, generator=generator).bfloat16()
    last_hidden = torch.randn(5, 4, generator=generator).bfloat16()
    return {"features": features, "last_hidden": last_hidden}


def test_features_appear_with_their_records(tmp_path):
    store = Store(tmp_path, META)
    store.shards.shard_bytes = 240  # two conversations of 120 bytes
    for i in range(5):
        store.add([record(f"c/{i}")], [states(i)])
        assert len(store.done_ids()) == (i + 1) // 2 * 2, (
            "a record is stored once its shard is complete"
        )
    store.flush()
    store.close()
    assert len(list((tmp_path / "features").glob("*.safetensors"))) == 3
    stored = FeatureStore.open(tmp_path, (1, 2))
    assert stored.count == 5
    assert "c/4" in stored
    assert stored.get("nobody") is None
    for i in range(5):
        found = stored.get(f"c/{i}")
        assert torch.equal(found["features"], states(i)["features"])
        assert torch.equal(found["last_hidden"], states(i)["last_hidden"])
    swapped = FeatureStore.open(tmp_path, (2,)).get("c/3")
    assert torch.equal(swapped["features"], states(3)["features"][:, 4:])
    assert FeatureStore.open(tmp_path, (1, 3)) is None
    last = FeatureStore.open(tmp_path, (LAST, 1)).get("c/3")["features"]
    assert torch.equal(
        last, torch.cat((states(3)["last_hidden"], states(3)["features"][:, :4]), dim=1)
    )


def test_a_conversation_that_two_processes_answered_has_the_states_of_its_row(tmp_path):
    for rank in (1, 0):
        with Store(tmp_path, META, rank) as store:
            store.shards.add("a", **states(2))
            store.shards.flush()  # and it was killed before it wrote the row
            store.add([{**record("a"), "source": str(rank)}], [states(rank)])
    assert load_records(tmp_path)["source"] == ["0"]
    found = FeatureStore.open(tmp_path, (1, 2)).get("a")
    assert torch.equal(found["features"], states(0)["features"])


def test_rows_of_a_conversation_wait_for_the_states_of_its_last_one(tmp_path):
    with Store(tmp_path, META) as store:
        store.shards.shard_bytes = 240  # two rows of 120 bytes
        store.add([record("a")], [states(0)])
        store.add([{**record("b/0"), "part": 0}, record("b")], [states(1), states(2)])
        assert store.done_ids() == {"a"}
    assert load_records(tmp_path)["id"] == ["a", "b/0", "b"]


def test_torn_shard_is_not_there(tmp_path):
    store = Store(tmp_path, META)
    store.add([record("a")], [states(0)])
    store.flush()
    store.add([record("b")], [states(1)])
    store.close()  # killed before the second flush, in mid-write:
    leftover = tmp_path / "features" / ".part-0000-00001.safetensors"
    leftover.write_bytes(b"half a shard")
    with Store(tmp_path, META) as again:
        assert again.done_ids() == {"a"}
        assert again.shards.next_shard == 1
        assert not leftover.exists()
        again.add([record("b")], [states(1)])
    assert FeatureStore.open(tmp_path, (1, 2)).count == 2


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path):
    with Store(tmp_path, META) as store:
        store.add([record("a")], [states(0)])
    os.mkfifo(tmp_path / "features" / "part-0001-00000.safetensors")
    with pytest.raises(
        UserError, match=r"00000.safetensors' cannot be read \(not a plain file\); del"
    ):
        FeatureStore.open(tmp_path, (1, 2))
    os.mkfifo(tmp_path / "part-0001.jsonl")
    with pytest.raises(
        UserError, match=r"part-0001.jsonl' is not a regular file; delete it to redo"
    ):
        load_records(tmp_path)


def test_a_store_whose_shards_were_deleted_is_a_store(tmp_path):
    with Store(tmp_path, META) as store:
        store.add([record("a")], [states(0)])
    for shard in (tmp_path / "features").glob("*.safetensors"):
        shard.unlink()
    empty = FeatureStore.open(tmp_path, (1, 2))
    assert empty and empty.count == 0 and empty.get("a") is None


def test_int8_rows_are_half_of_bfloat16_and_a_loud_layer_leaves_the_others_alone():
    from drafttrain.data.quantized_rows import block_size, restored, stored_as, value_bytes

    assert [block_size(width) for width in (576, 4096, 100, 32)] == [64, 64, 50, 32]
    states = torch.randn(7, 2 * 576, generator=torch.Generator().manual_seed(0))
    states[:, 576:] *= 1000
    states[:, 3] *= 100  # an outlier column, as models have
    states[5] = 0
    kept = stored_as("features", states, "int8", 576)
    held = sum(tensor.nbytes for tensor in kept.values())
    assert held == value_bytes("int8", 576) * states.numel() <= 0.52 * states.bfloat16().nbytes
    again = restored(kept["features"], kept["features_scale"]).float()
    blocks = states.view(7, -1, 64).abs().amax(-1, keepdim=True).expand(7, -1, 64).reshape(7, -1)
    assert ((again - states).abs() <= blocks * (0.5 / 127 + 2**-8)).all(), (
        "within half a step of the block, and bfloat16"
    )
    quiet = slice(64, 576)  # neither the outlier's block nor the loud layer
    assert (again - states)[:5, quiet].norm() < 0.015 * states[:5, quiet].norm()
    states[0, 0] = float("nan")
    assert not torch.isfinite(stored_as("x", states, "int8", 576)["x_scale"]).all()


def test_float8_rows_have_one_scale_and_an_error_that_follows_each_value():
    """The rule of hs-connectors' files: the largest value of a row is 448, float8's largest."""
    from drafttrain.data.quantized_rows import restored, stored_as, value_bytes

    states = torch.randn(7, 2 * 576, generator=torch.Generator().manual_seed(0))
    states[:, 3] *= 100  # an outlier column
    states[5] = 0
    kept = stored_as("features", states, "float8", 576)
    values = kept["features"]
    scale = kept["features_scale"]
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (7, 1)
    torch.testing.assert_close(scale[:, 0] * 448, states.abs().amax(-1))
    held = sum(tensor.nbytes for tensor in kept.values())
    assert held <= value_bytes("float8", 576) * states.numel()

    again = restored(values, scale).float()
    # Half of the last of 3 bits, bfloat16's rounding, and half of the smallest value.
    allowed = states.abs() * (2**-4 + 2**-8) + scale * 2**-10
    assert ((again - states).abs() <= allowed).all()
    states[0, 0] = float("inf")
    assert not torch.isfinite(stored_as("x", states, "float8", 576)["x_scale"]).all()


def test_many_shards_are_read_with_few_open_and_none_stays_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_OPEN_SHARDS", 3)
    directory = tmp_path / "data"
    (directory / "features").mkdir(parents=True)
    writer = ShardWriter(directory / "features", 0, shard_bytes=1)
    for i in range(12):
        writer.add(
            f"c{i}", features=torch.full((2, 4), float(i)), last_hidden=torch.full((2, 2), float(i))
        )
    store = FeatureStore(directory, None, 0, 2, 2, 10)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: store.get(f"c{i % 12}"), range(48)))
    assert all(
        (got["features"] == i % 12).all() and (got["last_hidden"] == i % 12).all()
        for i, got in enumerate(found)
    )
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert (
            len(
                {
                    line.split()[-1]
                    for line in maps.read_text().splitlines()
                    if str(directory) in line
                }
            )
            <= 3
        )
