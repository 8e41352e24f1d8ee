"""`drafttrain features`: stored and online training are the same; sizes, disks and kills."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.batch import Batch
from drafttrain.cli import main
from drafttrain.data.loader import collate, training_rows
from drafttrain.data.store import FeatureStore, load_records
from drafttrain.drafters.base import StepInputs
from drafttrain.errors import UserError
from drafttrain.states.origins import Stored
from drafttrain.states.source import TargetSource
from drafttrain.target import Target
from drafttrain.target.attention import LAST
from tests.drafters.test_eagle3 import make_drafter
from tests.training.test_train import ROOT

LAYERS = (1, 2, 3)


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
    data, capsys, monkeypatch
):
    assert extract(data) == 0
    assert extract(data, "--top-k", "4") == 2
    assert "holds features with top_k=0, this run has top_k=4" in capsys.readouterr().err
    shutil.rmtree(data / "features")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1000))
    assert extract(data) == 2
    assert "features need about 0.0 GB, 0.0 GB are free" in capsys.readouterr().err
    assert not list((data / "features").glob("*.safetensors"))


KILL = """
import os, signal, sys
from drafttrain.data import store
from drafttrain.states import features
plain, written = os.replace, []
def replace(source, goal):
    if str(goal).endswith(".safetensors"):
        written.append(goal)
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    plain(source, goal)
os.replace = replace
features.ShardWriter.full = True
from drafttrain.cli import main
main(sys.argv[1:])
"""


@pytest.mark.thorough
def test_killed_in_the_middle_of_a_shard_it_goes_on(data, capsys):
    words = ["features", "--data", str(data), "--layers", "1,2,3", "--dtype", "float32"]
    killed = subprocess.run(
        [sys.executable, "-c", KILL, *words], cwd=ROOT, capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert len(FeatureStore.open(data, LAYERS)) == 2 and list((data / "features").glob(".part-*"))
    assert main(words) == 0
    assert "4 of 6 conversations to do" in capsys.readouterr().out
    stored = FeatureStore.open(data, LAYERS)
    assert len(stored) == 6 and not list((data / "features").glob(".part-*"))
    row = load_records(data)[5]
    assert stored.get(row["id"])["features"].shape == (len(row["tokens"]) - 1, 3 * 32)
    assert main(words) == 0
    assert "0 of 6 conversations to do" in capsys.readouterr().out


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
