"""Swaps of a served head: what is refused, what is rolled back, and the command, against stand-ins for vLLM."""

from __future__ import annotations

import asyncio
import errno
import importlib
import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import tomllib
import torch

from drafttrain.cli import main
from drafttrain.formats import weights
from drafttrain.inside_vllm.head_files import ROOT, SwapRefused, read_head
from drafttrain.inside_vllm.swap_route import DrafterSwapRoute, check_address
from drafttrain.inside_vllm.swap_worker import EXTENSION, shared_parts
from drafttrain.serving.swap import head_below
from tests.serving.live_server import route_of, serve, worker_of, write_head

PROJECT = Path(__file__).parents[2]
DRAFTERS = PROJECT / "tests" / "fixtures" / "drafters"


@pytest.fixture
def heads(tmp_path, monkeypatch):
    """A root with the head that serves, a, and another one, b."""
    monkeypatch.setenv(ROOT, str(tmp_path / "heads"))
    write_head(tmp_path / "heads" / "a", 1.0)
    return write_head(tmp_path / "heads" / "b", 2.0).parent


def post(
    route,
    folder="b",
    digest="",
):
    return asyncio.run(route.post(json.dumps({"folder": folder, "sha256": digest}).encode()))


def refused(
    route,
    message,
    folder="b",
    digest="",
):
    """Asserts that a swap is refused in one line and loads nothing."""
    with pytest.raises(SwapRefused, match=message) as caught:
        post(route, folder, digest)
    assert "\n" not in str(caught.value)
    assert all(head.loads == 0 for head in route.heads)


def test_a_head_is_swapped_in_and_back_in_all_workers(heads):
    route = route_of(heads / "a", workers=2)
    found = post(route, "b", read_head(heads / "b", "").digest)
    assert found["folder"] == "b" and found["prefix_cache_dropped"]
    assert [head.value for head in route.heads] == [2.0, 2.0]
    assert post(route, "a")["folder"] == "a"
    assert [head.value for head in route.heads] == [1.0, 1.0]


def test_a_root_is_named_in_full(heads, monkeypatch):
    monkeypatch.chdir(heads.parent)
    monkeypatch.setenv(ROOT, heads.name)
    assert asyncio.run(route_of(heads / "a").show())["root"] == str(heads)


def test_a_load_that_fails_is_rolled_back_in_all_workers(heads):
    route = route_of(heads / "a", workers=2)
    route.heads[1].fails = True
    with pytest.raises(SwapRefused, match=r"rolled back, .* did not load \(no memory\)"):
        post(route)
    assert [head.value for head in route.heads] == [1.0, 1.0]
    assert post(route)["folder"] == "b"


def test_nothing_changes_unless_every_worker_has_the_head(heads):
    route = route_of(heads / "a", workers=2)
    route.heads[1].served = route.heads[1].served._replace(size=-1_000_000)
    refused(route, "more than the served head's shape")


def test_damaged_files_are_refused(heads):
    route = route_of(heads / "a")
    saved = heads / "b" / "model.safetensors"
    whole = saved.read_bytes()
    for content in (whole[:-5], b"\xff" * 9, b""):
        saved.write_bytes(content)
        refused(route, "damaged file")
    saved.write_bytes(whole + bytes(3_000_000))
    refused(route, "bytes, more than")
    saved.unlink()
    refused(route, "has no model.safetensors")
    os.mkfifo(saved)
    refused(route, "has no model.safetensors")
    saved.unlink()
    saved.symlink_to("/etc/passwd")
    refused(route, "leads out of the server's root")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("fc", torch.zeros(2, 3), r"fc is torch.float32 \[2, 3\], served torch.float32 \[2, 6\]"),
        ("fc", torch.full((2, 6), torch.inf), "fc holds values that are not finite"),
        ("more", torch.zeros(1), r"more is torch.float32 \[1\], served None"),
        ("d2t", torch.tensor([3, 3, 298]), "twice, or outside of the target's vocabulary of 300"),
        ("d2t", torch.tensor([-1, 3, 5]), "twice, or outside"),
        ("d2t", torch.tensor([3, 2, 5]), "leads to a token twice"),
    ],
)
def test_foreign_tensors_are_refused(
    heads,
    name,
    tensor,
    message,
):
    write_head(heads / "b", 2.0, {name: tensor})
    refused(route_of(heads / "a"), message)


def test_foreign_settings_are_refused_but_names_may_differ(heads):
    route = route_of(heads / "a")
    write_head(heads / "b", 2.0, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    refused(route, r"layer_ids is \[1, 2, 4\], served \[1, 2, 3\]")
    write_head(heads / "b", 2.0, draft_vocab_size=4)
    refused(route, "draft_vocab_size is 4, served None")
    write_head(heads / "b", 2.0, speculators_config={"verifier": "x"})
    assert post(route)["folder"] == "b"


def test_what_the_head_shares_with_the_target_is_not_written(heads):
    for name in "ab":
        write_head(heads / name, 1.0, {"model.embed_tokens.weight": torch.zeros(1)})
    route = route_of(heads / "a")
    refused(route, r"model.embed_tokens.weight would change the target")
    runner = route.workers[0].model_runner
    runner.get_model()["out"] = torch.nn.Linear(2, 3)
    runner.get_draft_model()["lm_head"].weight = runner.get_model()["out"].weight
    assert shared_parts(runner.get_draft_model(), runner.get_model()) == {"embed_tokens", "lm_head"}


@pytest.mark.parametrize("name", ["", "..", "../heads", "/etc", "a/../..", "a\0b", "x" * 2000, 3])
def test_names_lead_nowhere_else(heads, name):
    refused(route_of(heads / "a"), ".", name)


def test_what_is_loaded_is_what_was_checked(heads):
    route = route_of(heads / "a")
    wanted = read_head(heads / "b", "").digest
    ask = route.workers[0].drafttrain_head
    assert ask("check", "b", wanted) == {"sha256": wanted}
    write_head(heads / "b", 9.0)
    refused(route, "has other files here", "b", wanted)
    assert "another swap" in ask("apply", "f" * 64)["error"]
    assert ask("apply", wanted)["sha256"] == wanted and route.heads[0].value == 2.0


def test_clients_that_leave_and_swaps_at_once_do_not_disturb_a_swap(heads):
    route = route_of(heads / "a")

    async def ask():
        asked = []
        for name in (b"b", b"a") * 3:
            asked.append(asyncio.ensure_future(route.post(b'{"folder": "%s"}' % name)))
        await asyncio.sleep(0)
        for one in asked[:3]:
            one.cancel()
        return [(await one)["folder"] for one in asked[3:]]

    assert asyncio.run(ask()) == ["a", "b", "a"] and route.heads[0].loads == 6


@pytest.mark.parametrize(
    "method",
    [
        "dflash",
        "dflash2",
        "dspark",
        "mtp",
        "medusa",
        "mlp_speculator",
        "draft_model",
        "ngram",
        "suffix",
    ],
)
def test_other_ways_to_draft_are_refused(heads, method):
    route = route_of(heads / "a")
    route.workers[:] = [worker_of(heads / "a", method)]
    refused(route, f"the server drafts by {method}, and swaps are proven for eagle3, eagle")


def test_servers_that_cannot_swap_say_why(heads, monkeypatch):
    for sizes in ({"data_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        refused(route_of(heads / "a", **sizes), "data and pipeline parallel servers cannot")
    refused(route_of(heads / "a", world_size=2), "1 of 2 workers answer")
    route = route_of(heads / "a")
    for worker, message in (
        (object(), r"drafttrain_head.*does the server have --worker-extension-cls drafttrain"),
        (worker_of(heads / "a", "mtp"), "drafts by mtp, and swaps are proven for eagle3, eagle"),
        (worker_of(heads / "a", parallel=True), "without parallel drafting"),
        (worker_of(Path("org/head")), "'org/head' has no config.json"),
    ):
        route.workers[:] = [worker]
        refused(route, message)
    monkeypatch.delenv(ROOT)
    refused(route, f"has no {ROOT}")
    for body in (b"", b"[]", b"{}", b"\xff", b"[" * 5000):
        with pytest.raises(SwapRefused, match="the body must be"):
            asyncio.run(route.post(body))


def test_an_open_address_needs_a_key(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    check_address(Namespace(host="127.0.0.1", api_key=None, uds=None))
    check_address(Namespace(host=None, api_key=["k"], uds=None))
    for host in (None, "0.0.0.0", "127.0.0.1.example.org"):
        with pytest.raises(ValueError, match="lets others swap"):
            check_address(Namespace(host=host, api_key=None, uds=None))


def test_the_command_swaps_and_says_what_is_refused(
    heads,
    capsys,
    monkeypatch,
):
    route = route_of(heads / "a")
    serve(route, monkeypatch)
    words = ["swap", "--server", "http://127.0.0.1:8000"]
    assert main([*words, "--drafter", str(heads / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["result"]["served"]["folder"] == "b"
    assert main([*words, "--drafter", "a"]) == 0 and route.heads[0].value == 1.0
    for name, message in (
        ("nothing", "its head serves on: folder='nothing' has no config.json"),
        (str(PROJECT), "no export below the server's root"),
        (str(DRAFTERS / "eagle3"), "does not fit the served head"),
    ):
        assert main([*words, "--drafter", name]) == 2
        assert message in capsys.readouterr().err
    assert (heads / "eagle3" / "model.safetensors").is_file()  # exported for the server
    for route.away, message in (("HTTP 404", "no route for swaps"), ("x", "did not answer (x)")):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_an_export_replaces_no_head_of_its_name(heads, tmp_path):
    drafter = str(shutil.copytree(DRAFTERS / "eagle3", tmp_path / "a"))
    write_head(heads / "a", 1.0, torch_dtype=None, dtype="bfloat16")
    serves = read_head(heads / "a", "a")
    served = {"root": str(heads), "folder": "a", "sha256": serves.digest, "dtype": serves.dtype}
    body = head_below(drafter, served)
    assert read_head(heads / "a", "").digest == serves.digest
    assert read_head(heads / body["folder"], "").digest == body["sha256"] != serves.digest
    assert head_below(drafter, served) == body


def test_a_full_disk_leaves_the_old_head_and_no_part_of_the_new_one(
    heads,
    capsys,
    monkeypatch,
):
    route = route_of(heads / "a")
    serve(route, monkeypatch)

    def full(tensors, path, metadata=None):
        Path(path).write_bytes(b"part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(weights, "save_file", full)
    words = ["swap", "--server", "http://127.0.0.1:8000", "--drafter", str(DRAFTERS / "eagle3")]
    assert main(words) == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
    assert {path.name for path in heads.iterdir() if not path.name.startswith(".")} == {"a", "b"}
    assert post(route)["folder"] == "b"


def test_a_recipe_has_the_flags_that_swaps_need(tmp_path, capsys):
    root = tmp_path / "my heads"
    words = ["export", "--format", "vllm", "--swap-root", str(root), "--drafter"]
    assert main([*words, str(DRAFTERS / "eagle3"), "--output", str(root / "a")]) == 0
    said = capsys.readouterr().out
    assert f"VLLM_PLUGINS={DrafterSwapRoute.name} {ROOT}='{root}' \\\nvllm serve" in said
    assert f"--host 127.0.0.1 --worker-extension-cls {EXTENSION}\n" in said
    for kind, output in (("peagle", root / "c"), ("eagle3", tmp_path / "b")):
        assert main([*words, str(DRAFTERS / kind), "--output", str(output)]) == 2
        assert "heads of vLLM's methods eagle3, eagle" in capsys.readouterr().err


@pytest.mark.thorough
def test_vllm_finds_its_parts_and_imports_nothing_else_of_the_package():
    described = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    named = described["project"]["entry-points"]["vllm.endpoint_plugins"][DrafterSwapRoute.name]
    for place in (named.replace(":", "."), EXTENSION):
        module, _, name = place.rpartition(".")
        assert getattr(importlib.import_module(module), name).__module__ == module
    code = "import sys, drafttrain.inside_vllm.swap_route; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = {name for name in done.stdout.split() if name.startswith("drafttrain.")}
    own = {name for name in names if name.startswith("drafttrain.inside_vllm")}
    assert names - own == {"drafttrain.environment"} and len(own) == 4
