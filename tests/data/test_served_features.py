"""States from servers: `drafttrain features` stores what the local backend stores, and serve-target runs and ends vLLM."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time

import pytest
import torch

from drafttrain.cli import flags_module, main
from drafttrain.data.store import FeatureStore, Share, load_records
from drafttrain.errors import UserError
from drafttrain.serving import serve_target
from drafttrain.states import features, served
from drafttrain.states.server import StateServer, flag_value, free_port, served_layers
from drafttrain.states.transports.folder import RECORD
from drafttrain.target import Target, load_shell
from drafttrain.target.attention import LAST
from tests.data.fake_state_server import FakeStateServer
from tests.training.test_train import write_data

LAYERS = (1, 2, 3)
# An interpreter that says it is vLLM's environment, and whose server is a process that does nothing.
ENGINE = """#!{python}
import json, os, sys, time
if sys.argv[1] == "-c":
    print(json.dumps({found}))
else:
    open({seen!r}, "w").write(json.dumps([os.getpid(), os.environ.get("PYTHONPATH"), sys.argv[1:]]))
    {does}
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(served, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr("drafttrain.states.transports.folder._SETTLE", 0.02)
    without = functools.partial(
        served.httpx.Client, verify=False
    )  # reading certificates takes 0.1 s
    monkeypatch.setattr(served.httpx, "Client", without)


@pytest.fixture
def server(tmp_path, target):
    with FakeStateServer(target, tmp_path / "states", (1, 2, 3, 4)) as running:
        yield running


def extract(data, *more: str) -> int:
    return main(["features", "--data", str(data), "--layers", "1,2,3", "--dtype", "float32", *more])


def stored(data, layers=LAYERS) -> dict[str, dict[str, torch.Tensor]]:
    held = FeatureStore.open(data, layers)
    return {row["id"]: held.get(row["id"]) for row in load_records(data)}


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
    monkeypatch.setattr(features.ShardWriter, "full", True)
    monkeypatch.setattr(served, "_IN_FLIGHT", 1)
    server.faults.extend([""] * 5)  # a proof and three rows
    server.always = "400"
    assert extract(data, "--backend", "vllm", "--url", server.url) == 2
    assert "HTTP 400" in capsys.readouterr().err and len(FeatureStore.open(data, LAYERS)) == 3
    server.always = ""
    assert extract(data, "--backend", "vllm", "--url", server.url) == 0
    assert (
        "3 of 6 conversations to do" in capsys.readouterr().out
        and len(FeatureStore.open(data, LAYERS)) == 6
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "http://h:1"], r"url=\['http://h:1'\] belongs to --backend vllm"),
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


def parsed(command: str, *words: str):
    import argparse

    parser = argparse.ArgumentParser()
    flags_module(command).add_arguments(parser)
    return parser.parse_args(words)


# -- serve-target -----------------------------------------------------------------------------------------------------


def engine(
    folder,
    does: str = "time.sleep(60)",
    vllm: bool = True,
    gpu: bool = False,
    named: bool = True,
    mooncake: str = "",
) -> str:
    """The path of a program that stands for vLLM's interpreter."""
    path = folder / "python"
    found = {"vllm": vllm, "named": named, "gpu": gpu, "mooncake": mooncake}
    path.write_text(
        ENGINE.format(python=sys.executable, found=found, does=does, seen=str(folder / "seen.json"))
    )
    path.chmod(0o755)
    return str(path)


def test_the_command_has_layers_connector_and_folder(tmp_path, target_dir, capsys):
    where = tmp_path / "states"
    words = [
        "serve-target",
        "--target",
        str(target_dir),
        "--states-dir",
        str(where),
        "--dry-run",
        "--layers",
        "3,1",
    ]
    assert (
        main(
            [
                *words,
                "--engine-python",
                engine(tmp_path, gpu=True),
                "--",
                "--tensor-parallel-size",
                "8",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    ours = "--no-enable-prefix-caching --no-async-scheduling"
    assert f"vllm.entrypoints.cli.main serve {target_dir} {ours} --tensor-parallel-size 8" in said
    assert '"eagle_aux_hidden_state_layer_ids": [1, 3, 4]' in said and "PYTHONPATH" not in said
    assert '"ExampleHiddenStatesConnector"' in said and f'"shared_storage_path": "{where}"' in said
    assert main([*words, "--engine-python", engine(tmp_path, named=False)]) == 0
    said = capsys.readouterr().out
    assert (
        "-m vllm.entrypoints.openai.api_server --model" in said
        and '"CpuHiddenStatesConnector"' in said
    )
    assert said.startswith("PYTHONPATH=") and not where.exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("recipe", "layers"),
    [
        ("kind: eagle3\ndrafter: {feature_layers: [0, 3]}", "0, 3, 4"),
        ("kind: eagle3", "1, 2, 4"),
        ("kind: medusa", "4"),
    ],
)
def test_a_recipe_names_target_and_layers(tmp_path, target_dir, recipe, layers, capsys):
    (tmp_path / "r.yaml").write_text(
        f"target: {target_dir}\ndata: d\noutput_dir: {tmp_path}\n{recipe}\n"
    )
    words = [
        "serve-target",
        "--recipe",
        str(tmp_path / "r.yaml"),
        "--dry-run",
        "--engine-python",
        engine(tmp_path),
    ]
    assert main(words) == 0
    assert f'"eagle_aux_hidden_state_layer_ids": [{layers}]' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "target='' names nothing to serve; give --target T, or --recipe FILE"),
        (["--target", "TARGET", "--engine-python", "ENGINE"], "has no vLLM; name the interpreter of an environment that has it"),
        (["--target", "TARGET", "--", "--speculative-config", "{}"], "--speculative-config is set by this command"),
        (["--target", "TARGET", "--", "--port", "x"], "--port='x' must be a whole number"),
        (["--target", "TARGET", "--layers", "9"], "must be none, default, wide, or distinct layers from 0 to 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_one_line(tmp_path, target_dir, words, message, capsys):
    places = {"TARGET": str(target_dir), "ENGINE": engine(tmp_path, vllm=False)}
    assert main(["serve-target", *(places.get(word, word) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_of_others_and_one_in_use_are_refused_and_left_alone(tmp_path, target_dir):
    shell = load_shell(str(target_dir))
    python = engine(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").touch()
    with pytest.raises(
        UserError,
        match="holds other files, or belongs to another user; name an empty or new folder",
    ):
        StateServer(shell, (1,), (), python, str(tmp_path / "mine")).start()
    first, second = (
        StateServer(shell, (1,), (), python, str(tmp_path / "states")) for _ in range(2)
    )
    first.start()
    try:
        old = first.folder / "cmpl-1.safetensors"
        new = first.folder / "cmpl-2.safetensors"
        for path in (old, new):
            path.touch()
        os.utime(old, (1, 1))
        first.sweep()
        assert not old.exists() and new.exists()  # a client may be about to read it
        with pytest.raises(
            UserError,
            match="belongs to a server that is running; give each one a folder and a port",
        ):
            second.start()
    finally:
        second.stop()
        first.stop()
    assert not first.folder.exists() and (tmp_path / "mine" / "model.safetensors").exists()


def test_a_server_that_ends_by_itself_is_one_line_with_its_command(
    tmp_path, target_dir, monkeypatch
):
    python = engine(tmp_path, does="sys.exit(3)")
    server = StateServer(
        load_shell(str(target_dir)), (1,), ("--port", "1"), python, str(tmp_path / "states")
    )
    server.start()
    server.child.wait()
    with pytest.raises(
        UserError,
        match=r"vLLM ended with exit status 3, its lines above say why; try the command by hand: .*vllm",
    ):
        server.wait_until_ready()
    server.stop()


@pytest.mark.thorough
def test_a_signal_ends_both_also_a_server_that_does_not_listen(
    tmp_path, target_dir, monkeypatch, capsys
):
    monkeypatch.setattr(StateServer.stop, "__defaults__", (0.2,))
    monkeypatch.setattr(serve_target, "_LOOK_SECONDS", 0.02)
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    python = engine(
        tmp_path, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    )
    server = StateServer(
        load_shell(str(target_dir)), (1,), ("--port", "1"), python, str(tmp_path / "states")
    )
    seen = tmp_path / "seen.json"

    def press() -> None:
        while not (seen.exists() and seen.read_text().endswith("]")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    try:
        assert serve_target.watch(server, "tiny") == 128 + signal.SIGINT
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "ended by SIGINT; vLLM has ended, and its states are deleted" in capsys.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(json.loads(seen.read_text())[0], 0)
    assert not (tmp_path / "states").exists()


def test_layers_and_flags(target):
    assert served_layers((3, LAST, 1), target) == (1, 3, 4) and served_layers((4, 2), target) == (
        2,
        4,
    )
    assert served_layers((), target) == (4,)
    assert (
        flag_value(["--port", "1", "--port=2"], "--port", "8000") == "2"
        and flag_value(["--port"], "--port", "8") == "8"
    )
    assert free_port() > 1023


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
    lines = [json.loads(line) for line in (data / "part-0000.jsonl").read_text().splitlines()]
    longer = [{**row, "id": row["id"] + "-long", "tokens": row["tokens"] * 4} for row in lines]
    (data / "part-0000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines + longer))
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
