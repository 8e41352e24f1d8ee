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
from torch import nn

from drafttrain.cli import main
from drafttrain.inside_vllm import head_files
from drafttrain.inside_vllm.head_files import SwapRefused, digest_of, folder_below, read_head
from drafttrain.inside_vllm.swap_route import DrafterSwapRoute, Failure, check_address
from drafttrain.inside_vllm.swap_worker import (
    EXTENSION,
    DrafterSwapWorker,
    served_files,
    shared_parts,
)
from tests.serving.live_server import (
    CONFIG,
    LiveServer,
    StandInEngine,
    StandInWorker,
    route_of,
    write_head,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture
def heads(tmp_path):
    """A root with the head that serves, a, and another one, b."""
    root = tmp_path / "heads"
    write_head(root / "a", 1.0)
    write_head(root / "b", 2.0)
    return root


def engine_of(heads, workers=1, fails=(), **parallel):
    made = [StandInWorker(heads / "a", heads) for _ in range(workers)]
    if fails:
        made[-1].head.fails = fails
    return StandInEngine(made, **parallel)


def post(engine, **body):
    return asyncio.run(route_of(engine).post(json.dumps(body).encode()))


def test_a_head_is_swapped_in_and_back(heads):
    engine = engine_of(heads, workers=2)
    found = post(engine, folder="b", sha256=digest_of(heads / "b"))
    assert engine.values == [2.0, 2.0]
    assert found["folder"] == "b" and found["swaps"] == 1 and found["prefix_cache_dropped"]
    assert found["sha256"] == digest_of(heads / "b") and found["dtypes"] == ["float32"]
    assert post(engine, folder="a")["swaps"] == 2 and engine.values == [1.0, 1.0]


def test_nothing_changes_before_all_workers_have_checked(heads):
    engine = engine_of(heads, workers=2)
    engine.workers[1]._drafttrain_state.root = str(heads / "b")  # has no folder b
    with pytest.raises(Failure, match="no such folder"):
        post(engine, folder="b")
    assert engine.values == [1.0, 1.0] and "drafttrain_apply" not in engine.calls


@pytest.mark.parametrize("workers", [1, 2])
def test_a_load_that_fails_is_rolled_back_on_all_workers(heads, workers):
    engine = engine_of(heads, workers, fails=(2,))  # the first load is the server's start
    with pytest.raises(
        Failure, match=r"rolled back, the new head did not load \(RuntimeError: no memory\)"
    ):
        post(engine, folder="b")
    assert engine.values == [1.0] * workers
    shown = asyncio.run(route_of(engine).show())
    assert shown["folder"] == "first" and shown["swaps"] == 0
    assert post(engine, folder="b")["swaps"] == 1 and engine.values == [2.0] * workers


def test_a_rollback_that_fails_asks_for_a_restart(heads):
    with pytest.raises(Failure, match=r"did not load again \(RuntimeError\): restart the server"):
        post(engine_of(heads, fails=(2, 3)), folder="b")


def damage(folder, how):
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    if how == "torn":
        weights.write_bytes(content[:-5])
    elif how == "header":
        weights.write_bytes(b"\xff" * 8 + content[8:])
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "large":
        with weights.open("ab") as file:
            file.truncate(3_000_000)
    elif how == "pipe":
        weights.unlink()
        os.mkfifo(weights)
    elif how == "missing":
        weights.unlink()
    elif how == "shards":
        (folder / "model.safetensors.index.json").write_text("{}")
    elif how == "config":
        (folder / "config.json").write_text("[1]")
    elif how == "config torn":
        (folder / "config.json").write_text('{"a": ')
    else:
        weights.unlink()
        weights.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("torn", "damaged file"),
        ("header", "damaged file"),
        ("empty", "damaged file"),
        ("large", "3000000 bytes, more than"),
        ("pipe", "no model.safetensors"),
        ("missing", "no model.safetensors"),
        ("shards", "weights in several files"),
        ("config", "not a JSON object"),
        ("config torn", "damaged file"),
        ("link", "leads out of the server's root"),
    ],
)
def test_damaged_files_are_refused(heads, how, message):
    engine = engine_of(heads)
    damage(heads / "b", how)
    with pytest.raises(Failure, match=message) as caught:
        post(engine, folder="b")
    assert caught.value.status == 409 and "\n" not in str(caught.value)
    assert engine.values == [1.0] and engine.workers[0].head.loads == 1


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (None, {"fc__weight": torch.zeros(2, 3)}, r"fc.weight: float32 \[2, 3\], served float32 \[2, 6\]"),
        (None, {"fc__weight": torch.zeros(2, 6).half()}, r"fc.weight: float16"),
        (None, {"fc__weight": None}, "1 tensors differ .* as fc.weight: missing"),
        (None, {"embed_tokens__weight": torch.zeros(1)}, "embed_tokens.weight: .*served missing"),
        (None, {"fc__weight": torch.full((2, 6), float("nan"))}, "fc.weight holds values that are not"),
        (None, {"d2t": torch.tensor([3, 3, 8])}, "d2t leads to token 10 .* vocabulary of 10"),
        (None, {"d2t": torch.tensor([-1, 3, 5])}, "d2t leads to token"),
        (None, {"d2t": torch.tensor([3, 2, 5])}, "to a token twice"),
        ({**CONFIG, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, {},
         r"eagle_aux_hidden_state_layer_ids \(eagle_aux_hidden_state_layer_ids: \[1, 2, 4\]"),
        ({**CONFIG, "draft_vocab_size": 4}, {}, r"draft_vocab_size \(draft_vocab_size: 4, served null"),
    ],
)  # fmt: skip
def test_foreign_heads_are_refused(heads, config, tensors, message):
    engine = engine_of(heads)
    write_head(heads / "b", 2.0, config, **tensors)
    with pytest.raises(Failure, match=message):
        post(engine, folder="b")
    assert engine.values == [1.0]


def test_names_that_no_head_depends_on_may_differ(heads):
    write_head(heads / "b", 2.0, {**CONFIG, "torch_dtype": "x", "speculators_config": {}})
    assert post(engine_of(heads), folder="b")["swaps"] == 1


def test_what_the_head_shares_with_the_target_is_not_written(heads):
    for name in ("a", "b"):
        write_head(heads / name, 1.0, lm_head__weight=torch.zeros(1))
    engine = engine_of(heads)
    engine.workers[0].head.parts = {"lm_head", "norm"}
    with pytest.raises(
        Failure, match=r"shares the target's lm_head .* lm_head.weight would change"
    ):
        post(engine, folder="b")


def test_shared_parts_are_found_by_module_and_by_weight():
    target = nn.ModuleDict(
        {"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3), "empty": nn.Embedding(0, 2)}
    )
    drafter = nn.ModuleDict({"model": nn.ModuleDict({"embed_tokens": target["embed"]})})
    drafter["lm_head"] = nn.Linear(2, 3)
    drafter["empty"] = nn.Embedding(0, 2)
    assert shared_parts(drafter, target) == {"embed_tokens"}
    drafter["lm_head"].weight = target["head"].weight
    assert shared_parts(drafter, target) == {"embed_tokens", "lm_head"}


@pytest.mark.parametrize("name", ["", ".", "..", "../heads", "/etc", "a/../..", "a\0b", "x" * 2000])
def test_names_lead_nowhere_else(heads, name):
    with pytest.raises(SwapRefused):
        folder_below(str(heads), name)


def test_without_a_root_nothing_is_swapped(heads):
    with pytest.raises(SwapRefused, match=f"no {head_files.ROOT}"):
        folder_below("", "a")


def test_what_is_loaded_is_what_was_checked(heads):
    """Files that change between check and load, or before it, are not loaded."""
    worker = StandInWorker(heads / "a", heads)
    wanted = digest_of(heads / "b")
    found = worker.drafttrain_check("b", wanted)
    write_head(heads / "b", 9.0)
    assert worker.drafttrain_apply("f" * 64) == {
        "ok": False,
        "error": "another swap came between; try again",
    }
    assert worker.drafttrain_check("b", wanted)["error"].startswith(
        "folder='b' has other files here"
    )
    write_head(heads / "b", 2.0)
    assert worker.drafttrain_check("b", wanted) == found
    write_head(heads / "b", 9.0)
    assert worker.drafttrain_apply(wanted)["ok"] and worker.head.value == 2.0


def test_a_client_that_leaves_in_the_middle_does_not_end_the_swap(heads):
    engine = engine_of(heads)

    async def leave():
        route = route_of(engine)
        asked = asyncio.ensure_future(route.post(b'{"folder": "b"}'))
        while "drafttrain_check" not in engine.calls:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(*route.running)
        return await route.show()

    assert asyncio.run(leave())["folder"] == "b" and engine.values == [2.0]


def test_swaps_at_once_come_one_after_the_other(heads):
    engine = engine_of(heads)

    async def ask():
        route = route_of(engine)
        bodies = [b'{"folder": "b"}', b'{"folder": "a"}'] * 5
        return await asyncio.gather(*map(route.post, bodies))

    found = asyncio.run(ask())
    assert [it["swaps"] for it in found] == list(range(1, 11)) and engine.values == [1.0]


@pytest.mark.parametrize("key", ["data_parallel_size", "pipeline_parallel_size"])
def test_arrangements_with_workers_that_do_not_answer_are_refused(heads, key):
    engine = engine_of(heads, **{key: 2})
    with pytest.raises(Failure, match=f"{key}=2: vLLM returns the answers of one group"):
        post(engine, folder="b")
    with pytest.raises(Failure, match="1 of 2 workers answered"):
        post(engine_of(heads, world_size=2), folder="b")


def test_a_server_without_the_extension_says_which_flag_is_missing(heads):
    with pytest.raises(
        Failure, match=r"drafttrain_check.*--worker-extension-cls drafttrain"
    ) as caught:
        post(StandInEngine([object()]), folder="b")
    assert caught.value.status == 500


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (None, "does not draft"),
        ("ngram", "drafts by ngram, and swaps are proven for"),
        ("mtp", "drafts by mtp"),
        ("medusa", "drafts by medusa"),
        ("dflash", "drafts by dflash"),
        ("eagle3", "drafts in parallel"),
    ],
)
def test_other_methods_are_refused_in_one_line(method, message):
    worker = DrafterSwapWorker()
    speculative = method and Namespace(method=method, parallel_drafting=True)
    worker.vllm_config = Namespace(speculative_config=speculative)
    answer = worker.drafttrain_show()
    assert not answer["ok"] and message in answer["error"]
    with pytest.raises(SwapRefused, match=message):
        served_files(worker.vllm_config)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"folder": 1}', b'{"folder": "b", "sha256": 3}', b"\xff", b"[" * 5000],
)
def test_malformed_requests_are_answered(heads, body):
    with pytest.raises(Failure) as caught:
        asyncio.run(route_of(engine_of(heads)).post(body))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("host", "key", "fine"),
    [
        ("127.0.0.1", None, True),
        ("::1", None, True),
        ("localhost", None, True),
        (None, None, False),
        ("0.0.0.0", None, False),
        ("server.lan", None, False),
        (None, ["k"], True),
    ],
)
def test_an_open_address_needs_a_key(monkeypatch, host, key, fine):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    args = Namespace(host=host, api_key=key, uds=None)
    if fine:
        check_address(args)
    else:
        with pytest.raises(ValueError, match="lets others swap"):
            check_address(args)


# -- the command ------------------------------------------------------------------------------------------------------


def command(server, *words):
    return main(["swap", "--server", server.url, *words])


def test_the_command_swaps_and_says_what_serves(heads, capsys):
    with LiveServer(engine_of(heads)) as server:
        assert command(server) == 0
        assert "serves first" in capsys.readouterr().out
        assert command(server, "--drafter", str(heads / "b"), "--json") == 0
        result = json.loads(capsys.readouterr().out)["result"]
        assert result["before"]["folder"] == "first" and result["served"]["folder"] == "b"
        assert command(server, "--drafter", "a") == 0
        assert "-> a (" in capsys.readouterr().out
        write_head(heads / "c", 3.0, {**CONFIG, "draft_vocab_size": 4})
        assert command(server, "--drafter", "c") == 2
        said = capsys.readouterr().err
        assert (
            "drafter='c' is refused, and the old head serves on" in said
            and "draft_vocab_size" in said
        )
        assert command(server, "--drafter", str(heads.parent)) == 2
        assert "outside of the server's root" in capsys.readouterr().err
        assert command(server, "--drafter", "/no/such") == 2
        assert "no such folder" in capsys.readouterr().err


def test_a_key_is_asked_for_and_never_shown(heads, capsys, monkeypatch):
    with LiveServer(engine_of(heads), key="s3cret-k3y") as server:
        assert command(server) == 2
        assert "--api-key-env" in capsys.readouterr().err
        monkeypatch.setenv("SWAP_KEY", "s3cret-k3y")
        assert command(server, "--api-key-env", "SWAP_KEY") == 0
        assert "s3cret" not in "".join(capsys.readouterr())


def test_a_server_without_the_route_is_one_line(capsys):
    with LiveServer(None) as server:
        assert command(server, "--drafter", "b") == 2
        assert (
            "has no route for swaps; start it as drafttrain export --swap-root"
            in capsys.readouterr().err
        )
    assert command(server) == 2
    assert "cannot swap heads (no connection" in capsys.readouterr().err


def test_digests_cover_both_files(heads):
    first = read_head(heads / "a").digest
    assert first == digest_of(heads / "a")
    (heads / "a" / "config.json").write_text("{}")
    assert digest_of(heads / "a") != first


# -- the recipe -------------------------------------------------------------------------------------------------------


def test_a_recipe_has_the_flags_that_swaps_need(tmp_path, capsys):
    drafter = str(FIXTURES / "drafters" / "eagle3")
    words = ["export", "--drafter", drafter, "--format", "vllm"]
    root = tmp_path / "my heads"
    assert main([*words, "--output", str(root / "a"), "--swap-root", str(root)]) == 0
    said = capsys.readouterr().out
    assert f"VLLM_PLUGINS=drafttrain_swap DRAFTTRAIN_SWAP_ROOT='{root}' \\\nvllm serve" in said
    assert f"--host 127.0.0.1 --worker-extension-cls {EXTENSION}\n" in said
    module, _, name = EXTENSION.rpartition(".")
    assert getattr(importlib.import_module(module), name) is DrafterSwapWorker
    assert main([*words, "--output", str(tmp_path / "b"), "--swap-root", str(root)]) == 2
    assert "must be a folder around --output" in capsys.readouterr().err
    words[2] = str(FIXTURES / "drafters" / "draft_model")
    assert main([*words, "--output", str(root / "c"), "--swap-root", str(root)]) == 2
    assert "swaps are proven for" in capsys.readouterr().err


def test_the_wheel_names_the_route():
    described = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    named = described["project"]["entry-points"]["vllm.endpoint_plugins"][DrafterSwapRoute.name]
    module, _, name = named.partition(":")
    assert getattr(importlib.import_module(module), name) is DrafterSwapRoute


def test_vllms_processes_import_nothing_else_of_the_package():
    code = (
        "import sys, drafttrain.inside_vllm.swap_route, drafttrain.inside_vllm.swap_worker\n"
        "print(sorted(name for name in sys.modules if name.startswith('drafttrain.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = [
        f"drafttrain.inside_vllm{name}"
        for name in ("", ".head_files", ".swap_route", ".swap_worker")
    ]
    assert done.stdout.strip() == str(["drafttrain.environment", *names])
