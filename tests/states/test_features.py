"""`drafttrain features`: stored and online training are the same; sizes, disks and kills."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections import namedtuple
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain import cli
from drafttrain.batch import Batch
from drafttrain.cli import main
from drafttrain.data.loader import collate, training_rows
from drafttrain.data.store import FeatureStore, ShardWriter, Share, load_records
from drafttrain.drafters.base import StepInputs
from drafttrain.errors import UserError
from drafttrain.files import write_jsonl
from drafttrain.states import features, served
from drafttrain.states.origins import Stored
from drafttrain.states.source import TargetSource
from drafttrain.states.transports.folder import RECORD
from drafttrain.target import Target
from drafttrain.target.attention import LAST
from tests.drafters.helpers import make_drafter
from tests.files import load_jsonl
from tests.states.fake_state_server import FakeStateServer
from tests.states.stand_ins import LAYERS, SERVED, stored
from tests.training.runs import write_data


def extract(data, *more: str) -> int:
    return main(["features", "--data", str(data), "--layers", "1,2,3", "--dtype", "float32", *more])


def loss_of(data, target, stored: bool, loss: str = "kl"):
    """The loss of a drafter on all rows, its gradient, and how the target's part was come by."""
    records = load_records(data)
    rows, _ = training_rows(records, 2048, 0, 0)
    drafter = make_drafter(
        target, torch.arange(10, 250), ttt_steps=3, feature_layers=LAYERS, loss=loss
    )
    origin = None
    if stored:
        origin = Stored(FeatureStore.open(data, LAYERS), list(records["id"]))
    source = TargetSource(target, LAYERS, drafter.kept_ids, origin)
    batch = Batch.of(collate(list(rows)))
    features, wanted, row_of = source(batch)
    step = drafter(
        StepInputs(batch, target.embed(batch.input_ids), features, wanted, row_of, 100.0)
    )
    step.loss.backward()
    return step.loss.detach(), drafter.fc.weight.grad, source.hits, step.metrics


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "rtol"),
    [
        (["--store-dtype", "float32"], 0.0),
        ([], 2e-2),
        (["--store-dtype", "int8"], 6e-2),
        (["--store-dtype", "float8"], 1.5e-1),
        (["--store-dtype", "float32", "--top-k", "300"], 1e-5),
    ],
)
def test_stored_and_online_losses_are_the_same(data, target_dir, options, rtol, capsys):
    target = Target.load(str(target_dir), "float32")
    online = loss_of(data, target, stored=False)
    assert extract(data, *options) == 0
    said = capsys.readouterr().out
    assert (
        "layers 1,2,3" in said
        and "6 of 6 conversations to do, about 0.000 GB" in said
        and "GB are free" in said
    )
    offline = loss_of(data, target, stored=True)
    assert offline[2] == {"memory": 0, "stored": 6, "online": 0} and online[2]["online"] == 6
    for ours, theirs in ((offline[0], online[0]), (offline[1], online[1])):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol * float(theirs.abs().max()))
    for name in ("alpha", "agree", "count"):
        torch.testing.assert_close(offline[3][name], online[3][name], rtol=rtol, atol=2 * rtol)


@pytest.mark.thorough
def test_few_likeliest_tokens_come_close(data, target_dir):
    target = Target.load(str(target_dir), "float32")
    full = loss_of(data, target, stored=False)
    gaps = []
    for k in ("8", "200"):
        assert extract(data, "--store-dtype", "float32", "--top-k", k, "--overwrite") == 0
        assert FeatureStore.open(data, LAYERS).get("row0")["topk_ids"].shape[1] == int(k)
        assert FeatureStore.open(data, (LAST,)) is None
        stored = loss_of(data, target, stored=True)
        assert torch.equal(stored[3]["agree"], full[3]["agree"])
        gaps.append(float((stored[1] - full[1]).norm() / full[1].norm()))
    assert gaps[1] < 0.5 * gaps[0]


@pytest.mark.thorough
def test_other_settings_and_full_disks_are_refused_before_anything_is_written(
    data, target_dir, capsys, monkeypatch
):
    assert extract(data) == 0
    assert extract(data, "--top-k", "4") == 2
    assert "holds features with top_k=0, this run has top_k=4" in capsys.readouterr().err
    other = shutil.copytree(target_dir, target_dir.with_name("tuned"))
    assert extract(data, "--target", str(other)) == 2
    assert f"this run has target={str(other)!r}; use the same" in capsys.readouterr().err
    shutil.rmtree(data / "features")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1000))
    assert extract(data) == 2
    assert "features need about 0.0 GB, 0.0 GB are free" in capsys.readouterr().err
    assert not list((data / "features").glob("*.safetensors"))


def test_int8_is_noted_and_refused_for_likeliest_tokens(data, capsys):
    assert extract(data, "--store-dtype", "int8", "--top-k", "4") == 2
    assert "top_k=4 stores logits; drop --top-k" in capsys.readouterr().err
    assert extract(data, "--store-dtype", "int8") == 0
    assert json.loads((data / "features" / "features.json").read_text())["dtype"] == "int8"
    assert FeatureStore.open(data, LAYERS).get("row0")["features"].dtype == torch.bfloat16
    assert extract(data) == 2 and "--overwrite" in capsys.readouterr().err
    (shard,) = (data / "features").glob("part-*.safetensors")
    tensors = load_file(shard)
    tensors["row1/features_scale"][0, 0] = float("nan")
    save_file(tensors, shard)
    with pytest.raises(UserError, match="'row1': features holds NaN"):
        FeatureStore.open(data, LAYERS).get("row1")
    tensors["row2/last_hidden_scale"] = tensors["row2/last_hidden_scale"].repeat(1, 2)
    save_file(tensors, shard)
    with pytest.raises(UserError, match="the scales of last_hidden are"):
        FeatureStore.open(data, LAYERS).get("row2")


# -- from servers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path, target):
    with FakeStateServer(target, tmp_path / "states", SERVED) as running:
        yield running


def parsed(command: str, *words: str):
    return argparse.Namespace(**cli.parsed([command, *words])[1])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [["--store-dtype", "float32"], ["--store-dtype", "float32", "--top-k", "5"]]
)
def test_states_from_a_server_are_those_of_the_local_backend(
    data, server, options, capsys, monkeypatch
):
    assert extract(data, *options) == 0
    ours = stored(data)
    local = json.loads((data / "features" / "features.json").read_text())
    monkeypatch.setattr(served, "_IN_FLIGHT", 2)  # rows wait for each other
    server.faults.extend(["503", "", "torn file", "NaN"])
    assert extract(data, *options, "--backend", "vllm", "--url", server.url, "--overwrite") == 0
    theirs = stored(data)
    assert "log-probabilities differ by" in capsys.readouterr().out and os.listdir(
        server.folder
    ) == [RECORD]
    assert (
        json.loads((data / "features" / "features.json").read_text()) == local
        and ours.keys() == theirs.keys()
    )
    for key, tensors in ours.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(theirs[key][name], tensor, rtol=1e-5, atol=1e-5)
    asked = len(server.requests)
    assert (
        extract(data, *options, "--backend", "vllm", "--url", server.url) == 0
    )  # nothing is left to do, nobody is asked
    assert len(server.requests) == asked


@pytest.mark.thorough
def test_a_server_that_fails_for_good_keeps_what_was_stored_and_the_next_run_goes_on(
    data, server, monkeypatch, capsys
):
    monkeypatch.setattr(features, "ShardWriter", partial(ShardWriter, shard_bytes=1))
    monkeypatch.setattr(served, "_IN_FLIGHT", 1)
    server.faults.extend([""] * 5)  # a proof and three rows
    server.always = "400"
    assert extract(data, "--backend", "vllm", "--url", server.url) == 2
    assert "HTTP 400" in capsys.readouterr().err and FeatureStore.open(data, LAYERS).count == 3
    server.always = ""
    assert extract(data, "--backend", "vllm", "--url", server.url) == 0
    assert (
        "3 of 6 conversations to do" in capsys.readouterr().out
        and FeatureStore.open(data, LAYERS).count == 6
    )


@pytest.mark.thorough
def test_rounded_states_of_a_server_are_stored_as_they_are_and_said(data, server, capsys):
    """float32 would take twice the bytes and say that the states are exact."""
    plain = server.write

    def rounded(ids, states, fault):
        return plain(ids, states.bfloat16(), fault)

    server.write = rounded
    words = ["--store-dtype", "float32", "--backend", "vllm", "--url", server.url]
    assert extract(data, *words) == 0
    said = capsys.readouterr().out
    assert "so they are stored in bfloat16 instead of float32" in said and "--dtype float32" in said
    for tensors in stored(data).values():
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    described = json.loads((data / "features" / "features.json").read_text())
    assert (described["dtype"], described["asked_dtype"]) == ("bfloat16", "float32")
    assert extract(data, *words) == 0  # all of it is there
    assert "0 of 6 conversations to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "http://h:1"], r"url=\['http://h:1'\] belongs to --backend vllm"),
        (["--engine-python", __file__], "engine_python=.* belongs to --backend vllm"),
        (["--", "--port", "1"], r"flags behind --=\['--port', '1'\] belongs to --backend vllm"),
        (
            ["--backend", "vllm", "--target-device-map", "auto"],
            "vLLM spreads the target by its own flags",
        ),
        (
            ["--backend", "vllm", "--url", "http://h:1", "--", "--port", "1"],
            "'--port' is for a server that starts here",
        ),
        (
            ["--backend", "vllm", "--", "--kv-transfer-config={}"],
            "--kv-transfer-config is set by this command; drop it",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        features.check_backend(parsed("features", "--data", str(tmp_path), *words), Share(0, 1))


def test_every_process_of_a_launch_would_start_a_server(tmp_path):
    with pytest.raises(
        UserError, match="backend=vllm without --url would start 8 servers, one per process"
    ):
        features.check_backend(
            parsed("features", "--data", str(tmp_path), "--backend", "vllm"), Share(0, 8)
        )


def test_several_processes_do_not_delete_each_others_states(tmp_path):
    words = ["features", "--data", str(tmp_path), "--overwrite"]
    with pytest.raises(UserError, match="overwrite=True with several processes"):
        features.check_backend(parsed(*words), Share(0, 8))


# -- the real engine --------------------------------------------------------------------------------------------------

PYTHON = os.environ.get("VLLM_PYTHON", "")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is not set")
@pytest.mark.parametrize(
    "flags", [[], ["--enable-prefix-caching", "--max-num-batched-tokens", "64"]]
)
def test_vllms_states_are_the_local_ones(tmp_path, flags, monkeypatch):
    """Cached prefixes and prompts in chunks included: every row occurs once alone, and once as the prefix of a longer one."""
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    target = Target.load("smollm2-135m", "float32", "cpu")
    data = write_data(tmp_path / "data", target, rows=8)
    lines = load_jsonl(data / "part-0000.jsonl")
    longer = [{**row, "id": row["id"] + "-long", "tokens": row["tokens"] * 4} for row in lines]
    write_jsonl(data / "part-0000.jsonl", lines + longer)
    exact = [
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--store-dtype",
        "float32",
        "--target",
        "smollm2-135m",
    ]
    words = ["features", "--data", str(data), "--layers", "2,15,27", *exact]
    assert main(words) == 0
    held = FeatureStore.open(data, (2, 15, 27))
    ours = {row["id"]: held.get(row["id"]) for row in load_records(data)}
    served = ["--backend", "vllm", "--engine-python", PYTHON, "--overwrite", "--"]
    assert (
        main(
            [
                *words,
                *served,
                "--dtype",
                "float32",
                "--max-model-len",
                "2048",
                "--enforce-eager",
                *flags,
            ]
        )
        == 0
    )
    held = FeatureStore.open(data, (2, 15, 27))
    for key, tensors in ours.items():
        for name, tensor in tensors.items():
            assert (held.get(key)[name] - tensor).norm() <= 1e-4 * tensor.norm(), (key, name)
