"""Swaps of a served head: what is refused, what is rolled back, and the command, against stand-ins for vLLM."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import tomllib
import torch

from drafttrain.cli import main
from drafttrain.inside_vllm.head_files import ROOT, SwapRefused, folder_below, read_head
from drafttrain.inside_vllm.swap_route import DrafterSwapRoute, check_address
from drafttrain.inside_vllm.swap_worker import EXTENSION, DrafterSwapWorker, shared_parts
from tests.serving.live_server import (
    CONFIG,
    LiveServer,
    StandInEngine,
    drafting,
    worker_of,
    write_head,
)

PROJECT = Path(__file__).parents[2]
DRAFTERS = PROJECT / "tests" / "fixtures" / "drafters"


@pytest.fixture
def heads(tmp_path, monkeypatch):
    """A root with the head that serves, a, and another one, b."""
    root = tmp_path / "heads"
    monkeypatch.setenv(ROOT, str(root))
    write_head(root / "a", 1.0)
    write_head(root / "b", 2.0)
    return root


def post(engine, folder="b", digest=""):
    route = DrafterSwapRoute()
    route.engine = engine
    return asyncio.run(route.post(json.dumps({"folder": folder, "sha256": digest}).encode()))


def test_a_head_is_swapped_in_and_back_in_all_workers(heads):
    engine = StandInEngine(worker_of(heads / "a"), worker_of(heads / "a"))
    digest = read_head(heads / "b", "b").digest
    found = post(engine, "b", digest)
    assert engine.values == [2.0, 2.0] and found["prefix_cache_dropped"]
    assert (found["folder"], found["sha256"], found["dtype"]) == ("b", digest, "float32")
    assert post(engine, "a")["folder"] == "a" and engine.values == [1.0, 1.0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_load_that_fails_is_rolled_back_in_all_workers(heads, workers):
    engine = StandInEngine(*(worker_of(heads / "a") for _ in range(workers)))
    engine.heads[-1].fails = (1,)
    with pytest.raises(SwapRefused, match=r"rolled back, the new head did not load \(no memory\)"):
        post(engine)
    assert engine.values == [1.0] * workers
    post(engine)
    assert engine.values == [2.0] * workers


def test_nothing_changes_unless_every_worker_has_the_head(heads):
    engine = StandInEngine(worker_of(heads / "a"), worker_of(heads / "a"))
    engine.heads[1].served = engine.heads[1].served._replace(size=-1_000_000)
    with pytest.raises(SwapRefused, match="more than the served head's shape"):
        post(engine)
    assert [head.loads for head in engine.heads] == [0, 0]


def damaged(folder, how):
    """Damages a head's files in a named way."""
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    if how == "pipe":
        os.mkfifo(weights)
    elif how == "link":
        weights.symlink_to("/etc/passwd")
    elif how != "missing":
        contents = {
            "torn": content[:-5],
            "header": b"\xff" * 9,
            "large": content + bytes(3_000_000),
        }
        weights.write_bytes(contents.get(how, content))
    if how == "config":
        (folder / "config.json").write_text('{"a": ')


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("torn", "damaged file"),
        ("header", "damaged file"),
        ("config", "damaged file"),
        ("large", "bytes, more than"),
        ("pipe", "has no model.safetensors"),
        ("missing", "has no model.safetensors"),
        ("link", "leads out of the server's root"),
    ],
)
def test_damaged_files_are_refused_in_one_line(heads, how, message):
    engine = StandInEngine(worker_of(heads / "a"))
    damaged(heads / "b", how)
    with pytest.raises(SwapRefused, match=message) as caught:
        post(engine)
    assert "\n" not in str(caught.value) and engine.heads[0].loads == 0


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {"fc": torch.zeros(2, 3)}, r"fc is torch.float32 \[2, 3\], served torch.float32 \[2, 6\]"),
        ({}, {"fc": torch.zeros(2, 6).half()}, r"fc is torch.float16"),
        ({}, {"more": torch.zeros(1)}, r"more is torch.float32 \[1\], served None"),
        ({}, {"fc": torch.full((2, 6), torch.inf)}, "fc holds values that are not finite"),
        ({}, {"d2t": torch.tensor([3, 3, 298])}, "twice, or outside of the target's vocabulary of 300"),
        ({}, {"d2t": torch.tensor([-1, 3, 5])}, "d2t leads to a token twice, or outside"),
        ({}, {"d2t": torch.tensor([3, 2, 5])}, "d2t leads to a token twice"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, {}, r"is \[1, 2, 4\], served \[1, 2, 3\]"),
        ({"draft_vocab_size": 4}, {}, "draft_vocab_size is 4, served None"),
    ],
)  # fmt: skip
def test_foreign_heads_are_refused(heads, config, tensors, message):
    engine = StandInEngine(worker_of(heads / "a"))
    write_head(heads / "b", 2.0, {**CONFIG, **config}, **tensors)
    with pytest.raises(SwapRefused, match=message):
        post(engine)
    assert engine.heads[0].loads == 0
    write_head(heads / "b", 2.0, {**CONFIG, "speculators_config": {"verifier": 1}})
    assert post(engine)["folder"] == "b"  # names alone differ


def test_what_the_head_shares_with_the_target_is_not_written(heads):
    for name in "ab":
        write_head(heads / name, 1.0, **{"model.embed_tokens.weight": torch.zeros(1)})
    worker = worker_of(heads / "a")
    with pytest.raises(SwapRefused, match=r"model.embed_tokens.weight would change the target"):
        post(StandInEngine(worker))
    target, drafter = worker.model_runner.get_model(), worker.model_runner.get_draft_model()
    assert shared_parts(drafter, target) == {"embed_tokens"}
    target["out"] = torch.nn.Linear(2, 3)
    drafter["lm_head"].weight = target["out"].weight
    assert shared_parts(drafter, target) == {"embed_tokens", "lm_head"}


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../heads", "/etc", "a/../..", "a\0b", "x" * 2000, 3]
)
def test_names_lead_nowhere_else(heads, name):
    engine = StandInEngine(worker_of(heads / "a"))
    with pytest.raises(SwapRefused):
        post(engine, name)
    assert engine.heads[0].loads == 0
    assert folder_below(str(heads), "a/../b") == heads / "b"


def test_what_is_loaded_is_what_was_checked(heads):
    worker = worker_of(heads / "a")
    wanted = read_head(heads / "b", "b").digest
    assert worker.drafttrain_head("check", "b", wanted) == {"sha256": wanted}
    write_head(heads / "b", 9.0)
    assert "another swap" in worker.drafttrain_head("apply", "f" * 64)["error"]
    assert worker.drafttrain_head("apply", wanted)["sha256"] == wanted
    assert worker._drafttrain_served.value == 2.0
    with pytest.raises(SwapRefused, match="has other files here"):
        post(StandInEngine(worker), "b", wanted)


def test_clients_that_leave_and_swaps_at_once_do_not_disturb_a_swap(heads):
    engine = StandInEngine(worker_of(heads / "a"))

    async def ask():
        route = DrafterSwapRoute()
        route.engine = engine
        asked = [
            asyncio.ensure_future(route.post(b'{"folder": "%s"}' % name))
            for name in (b"b", b"a") * 5
        ]
        await asyncio.sleep(0)
        for one in asked[:5]:
            one.cancel()
        found = await asyncio.gather(*asked[5:])
        return [it["folder"] for it in found]

    assert asyncio.run(ask()) == ["a", "b", "a", "b", "a"] and engine.heads[0].loads == 10


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"data_parallel_size": 2}, "data and pipeline parallel servers cannot swap"),
        ({"pipeline_parallel_size": 2}, "data and pipeline parallel servers cannot swap"),
        ({"world_size": 2}, "1 of 2 workers answer"),
    ],
)
def test_servers_whose_workers_do_not_all_answer_are_refused(heads, parallel, message):
    with pytest.raises(SwapRefused, match=message):
        post(StandInEngine(worker_of(heads / "a"), **parallel))


def test_a_server_without_the_extension_says_which_flag_is_missing():
    with pytest.raises(SwapRefused, match=r"drafttrain_head.*--worker-extension-cls drafttrain"):
        post(StandInEngine(object()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (drafting("mtp"), "drafts by mtp, and swaps are proven for eagle3, eagle"),
        (drafting("dflash"), "drafts by dflash"),
        (drafting("eagle3", parallel=True), "without parallel drafting"),
        (drafting("eagle3", model="org/head"), "'org/head' has no config.json"),
        (Namespace(speculative_config=None), "drafts by None"),
    ],
)
def test_other_methods_are_refused_in_one_line(heads, config, message):
    worker = DrafterSwapWorker()
    worker.vllm_config, worker.model_runner = config, None
    assert message in worker.drafttrain_head("show")["error"]
    os.environ.pop(ROOT)
    assert f"has no {ROOT}" in worker.drafttrain_head("show")["error"]


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff", b"[" * 5000, b'"folder"'])
def test_malformed_requests_are_answered(body):
    with pytest.raises(SwapRefused, match="the body must be"):
        asyncio.run(DrafterSwapRoute().post(body))


@pytest.mark.parametrize(
    ("host", "key", "opens"),
    [("127.0.0.1", None, True), ("::1", None, True), (None, None, False), ("0.0.0.0", None, False), (None, ["k"], True)],
)  # fmt: skip
def test_an_open_address_needs_a_key(monkeypatch, host, key, opens):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    args = Namespace(host=host, api_key=key, uds=None)
    if not opens:
        with pytest.raises(ValueError, match="lets others swap"):
            check_address(args)
        monkeypatch.setenv("VLLM_API_KEY", "k")
    check_address(args)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_swaps_says_what_serves_and_what_is_refused(heads, capsys, monkeypatch):
    engine = StandInEngine(worker_of(heads / "a"))
    write_head(heads / "c", 3.0, {**CONFIG, "draft_vocab_size": 4})
    with LiveServer(engine, key="s3cret-k3y") as server:
        words = ["swap", "--server", server.url]
        assert main(words) == 2
        assert "--api-key-env" in capsys.readouterr().err
        words += ["--api-key-env", "SWAP_KEY"]
        monkeypatch.setenv("SWAP_KEY", "s3cret-k3y")
        assert main([*words, "--drafter", str(heads / "b"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["result"]["served"]["folder"] == "b"
        assert main([*words, "--drafter", "a"]) == 0 and engine.values == [1.0]
        for name, message in {
            "c": "its head serves on: folder='c' does not fit",
            "nothing": "folder='nothing' has no config.json",
            str(PROJECT): "no export below the server's root",
            str(DRAFTERS / "eagle3"): "does not fit the served head",
        }.items():
            assert main([*words, "--drafter", name]) == 2
            assert message in capsys.readouterr().err
        assert engine.values == [1.0] and (heads / "eagle3" / "model.safetensors").is_file()
        server.route.engine = None
        assert main(words) == 2
        said = capsys.readouterr()
        assert "has no route for swaps" in said.err and "s3cret" not in said.out + said.err
    assert main(words) == 2
    assert "did not answer (no connection" in capsys.readouterr().err


# -- what is shipped --------------------------------------------------------------------------------------------------


def test_a_recipe_has_the_flags_that_swaps_need(tmp_path, capsys):
    root = tmp_path / "my heads"
    words = ["export", "--format", "vllm", "--swap-root", str(root)]
    eagle = ["--drafter", str(DRAFTERS / "eagle3")]
    assert main([*words, *eagle, "--output", str(root / "a")]) == 0
    said = capsys.readouterr().out
    assert f"VLLM_PLUGINS={DrafterSwapRoute.name} {ROOT}='{root}' \\\nvllm serve" in said
    assert f"--host 127.0.0.1 --worker-extension-cls {EXTENSION}\n" in said
    for more in (
        [*eagle, "--output", str(tmp_path / "b")],
        ["--drafter", str(DRAFTERS / "peagle"), "--output", str(root / "c")],
        [*eagle, "--format", "sglang", "--output", str(root / "d")],
    ):
        assert main([*words, *more]) == 2
        assert "goes with --format vllm, heads of vLLM's methods" in capsys.readouterr().err


def test_the_names_that_vllm_loads_exist():
    described = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    named = described["project"]["entry-points"]["vllm.endpoint_plugins"][DrafterSwapRoute.name]
    for place, found in (
        (named.replace(":", "."), DrafterSwapRoute),
        (EXTENSION, DrafterSwapWorker),
    ):
        module, _, name = place.rpartition(".")
        assert getattr(importlib.import_module(module), name) is found


def test_vllms_processes_import_nothing_else_of_the_package():
    code = (
        "import sys, drafttrain.inside_vllm.swap_route\n"
        "print(*sorted(name[11:] for name in sys.modules if name.startswith('drafttrain.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ["environment", "inside_vllm"]
    names += [f"inside_vllm.{name}" for name in ("head_files", "swap_route", "swap_worker")]
    assert done.stdout.split() == names
