"""States through a Mooncake store: equal to the target's own, bounded in tries, and proven with the real engine where it is."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from drafttrain.cli import main
from drafttrain.errors import UserError
from drafttrain.states.engine_server import free_port
from drafttrain.states.engines.drafttrain_address import own_address
from drafttrain.states.served import Served
from drafttrain.states.server import MooncakeStore
from drafttrain.target import Target
from tests.conftest import make_target
from tests.files import ROOT
from tests.states.fake_state_server import FakeStateServer
from tests.states.stand_ins import SERVED, assert_states, engine, stored
from tests.training.runs import write_data

ROW = list(range(5, 40))


class MooncakeIntegrityError(RuntimeError):
    """As hs-connectors names it."""


class FakeStore:
    """hs_connectors.mooncake_store with one store for all in this process; raises what that module raises."""

    objects: dict[str, dict[str, torch.Tensor] | str] = {}
    configs: list[dict[str, object]] = []
    away = False

    def __init__(self, config: dict[str, object]):
        self.configs.append(config)

    def setup(self) -> FakeStore:
        if self.away:
            raise RuntimeError("Mooncake setup failed for key=127.0.0.1 with status=-1")
        return self

    def get_sample(self, manifest: dict, timeout: float) -> dict[str, torch.Tensor]:
        found = self.objects.get(manifest["handle"])
        if self.away:
            raise RuntimeError(
                f"Mooncake is_exist failed for key={manifest['handle']} with status=-900"
            )
        if found is None:
            raise TimeoutError(f"Timed out waiting for Mooncake key: {manifest['handle']}")
        if isinstance(found, str):
            raise MooncakeIntegrityError(
                f"Mooncake producer error for key={manifest['handle']}: {found}"
            )
        return found

    def delete_sample(self, handle: str) -> None:
        if self.away:
            raise RuntimeError("Mooncake remove failed")
        self.objects.pop(handle, None)


class FakeMooncakeServer(FakeStateServer):
    """A server whose replies name objects of the store."""

    record: dict | None = None
    marker = handle = ""

    def answer(self, body: dict, fault: str) -> dict:
        reply = super().answer(body, "")
        handle = self.handle or Path(reply["kv_transfer_params"]["hidden_states_path"]).stem
        if fault in ("error", "Non-finite"):
            FakeStore.objects[handle] = f"{fault} producer tensor"
        elif fault != "lost":
            FakeStore.objects[handle] = self.made
        manifest = {
            "handle": handle,
            "version": 1,
            "tensors": {},
            "metadata": {},
            "record": self.record,
        }
        return {**reply, "kv_transfer_params": manifest}

    def write(self, ids: torch.Tensor, states: torch.Tensor, fault: str) -> Path:
        self.made = {"hidden_states": states, "token_ids": ids}
        return super().write(ids, states, fault)


@pytest.fixture(scope="module")
def target() -> Target:
    made = make_target()
    made.final_norm = made.body.norm
    return made


@pytest.fixture
def server(tmp_path, target, monkeypatch):
    package = ModuleType("hs_connectors")
    module = ModuleType("hs_connectors.mooncake_store")
    module.MooncakeHiddenStatesStore = FakeStore
    module.MooncakeStoreConfig = lambda host, **settings: {"local_hostname": host, **settings}
    monkeypatch.setitem(sys.modules, "hs_connectors", package)
    monkeypatch.setitem(sys.modules, "hs_connectors.mooncake_store", module)
    for name, value in (("objects", {}), ("configs", []), ("away", False)):
        monkeypatch.setattr(FakeStore, name, value)
    with FakeMooncakeServer(target, tmp_path / "states", SERVED) as running:
        running.record = {
            "target": target.identity(), "layers": list(SERVED), "master": "127.0.0.1:50051", "protocol": "tcp",
            "started": 1,
        }  # fmt: skip
        yield running


@pytest.fixture
def client(server, target):
    made = Served([server.url], target, (1, 3), timeout=600.0, patience=600.0)
    yield made
    made.close()


def test_states_are_the_targets_own_and_no_object_stays(client, server, target):
    assert_states(client, target, ROW)
    assert len(server.requests) == 3 and not FakeStore.objects  # two of the proof
    given = {
        "local_hostname": "127.0.0.1",
        "master_server_address": "127.0.0.1:50051",
        "protocol": "tcp",
    }
    assert FakeStore.configs == [{**given, "global_segment_size": 0, "local_buffer_size": 0}]


@pytest.mark.parametrize("fault", ["lost", "error", "Non-finite"])
def test_a_lost_or_refused_object_costs_retries_and_then_is_one_line(client, server, target, fault):
    client.prove()
    server.faults.extend([fault, fault])
    assert_states(client, target, ROW)
    assert not FakeStore.objects
    server.always = fault
    fix = (
        "serve the target in bfloat16"
        if fault == "Non-finite"
        else "give the store more memory: --mooncake-gib"
    )
    with pytest.raises(UserError, match=f"in every try; {fix}") as raised:
        client.request(ROW)
    assert "\n" not in str(raised.value)


def test_a_master_that_is_away_is_waited_for_and_named(client, server, target, monkeypatch):
    assert_states(client, target, ROW)
    FakeStore.away = True
    threading.Timer(0.1, setattr, (FakeStore, "away", False)).start()
    assert_states(client, target, ROW)
    FakeStore.away = True
    client.patience = 0.1
    with pytest.raises(
        UserError, match=r"is_exist failed .* start it again with the same serve-target command"
    ):
        client.request(ROW)


def test_a_server_that_started_again_unnoticed_is_proven_again_over_the_same_connection(
    client, server, target
):
    assert_states(client, target, ROW)
    server.record = {**server.record, "started": 2}
    assert_states(client, target, ROW)
    assert (
        len(server.requests) == 3 + 4 and len(FakeStore.configs) == 1
    )  # one reply refused, then proof and row
    server.record = {**server.record, "started": 3}
    server.computes = make_target(seed=1)
    with pytest.raises(
        UserError, match=r"does not serve target 'tiny': its log-probabilities differ .* by \d"
    ):
        client.request(ROW)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"record": None},
            "without a record; start it with: drafttrain serve-target --target tiny --transport mooncake",
        ),
        ({"handle": "../etc"}, "names the object '../etc', which is not a name of states"),
        ({"record": {"master": "m:1"}}, r"malformed: kv_transfer_params"),
    ],
)
def test_a_reply_that_announces_nothing_or_another_name_is_refused(client, server, change, message):
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(UserError, match=message):
        client.prove()


def test_a_folder_for_a_store_and_a_missing_package_are_refused(server, target, monkeypatch):
    with pytest.raises(
        UserError,
        match=r"states_dir='/mnt' is for servers with a folder; url=.* uses Mooncake; drop it",
    ):
        Served([server.url], target, (1,), states_dir="/mnt").prove()
    monkeypatch.setitem(sys.modules, "hs_connectors.mooncake_store", None)
    with pytest.raises(
        UserError, match=r"needs another package here .*pip install 'drafttrain\[mooncake\]'"
    ):
        Served([server.url], target, (1,)).prove()


def test_the_own_address_is_that_of_the_way_to_the_master(monkeypatch):
    assert own_address("127.0.0.1:50051") == "127.0.0.1"
    monkeypatch.setenv("MOONCAKE_LOCAL_HOSTNAME", "10.1.2.3")
    assert own_address("127.0.0.1:50051") == "10.1.2.3"


# -- serve-target -----------------------------------------------------------------------------------------------------


def serve(tmp_path, target_dir, *more: str, mooncake: str = "") -> int:
    python = engine(tmp_path, gpu=True, mooncake=mooncake)
    return main(
        [
            "serve-target",
            "--target",
            str(target_dir),
            "--layers",
            "3,1",
            "--engine-python",
            python,
            *more,
        ]
    )


def test_the_command_has_store_and_record(tmp_path, target_dir, capsys):
    words = [
        "--transport",
        "mooncake",
        "--mooncake-master",
        "10.0.0.5:50051",
        "--mooncake-gib",
        "0.5",
        "--dry-run",
    ]
    assert serve(tmp_path, target_dir, *words) == 0
    said = capsys.readouterr().out
    transfer = json.loads(said.split("--kv-transfer-config '")[1].split("'")[0])
    extra = transfer["kv_connector_extra_config"]
    assert (
        said.startswith("PYTHONPATH=")
        and transfer["kv_connector_module_path"] == "drafttrain_mooncake_states"
    )
    assert extra["mooncake"]["master_server_address"] == "10.0.0.5:50051"
    assert extra["mooncake"]["global_segment_size"] == 2**29
    assert extra["record"]["layers"] == [1, 3, 4] and extra["record"]["master"] == "10.0.0.5:50051"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--mooncake-master", "h:1"],
            "mooncake_master='h:1' belongs to --transport mooncake; give that too",
        ),
        (
            ["--transport", "mooncake"],
            "mooncake_master='' is not HOST:PORT; name where mooncake_master runs",
        ),
        (
            ["--transport", "mooncake", "--states-dir", "/x"],
            "states_dir='/x' belongs to --transport folder; drop it",
        ),
        (
            ["--transport", "mooncake", "--mooncake-master", "h:1"],
            "cannot use Mooncake (no libibverbs)",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_one_line(tmp_path, target_dir, words, message, capsys):
    assert serve(tmp_path, target_dir, *words, "--dry-run", mooncake="no libibverbs") == 2
    assert message in capsys.readouterr().err


def test_a_master_that_does_not_answer_is_named_before_vllm_starts():
    port = free_port()
    with pytest.raises(
        UserError, match=f"'127.0.0.1:{port}' does not answer .*: mooncake_master --rpc_port {port}"
    ):
        MooncakeStore(f"127.0.0.1:{port}").check()


# -- the real engine --------------------------------------------------------------------------------------------------

# Interpreters with hs-connectors and mooncake-transfer-engine: vLLM's, and one with drafttrain's packages too. The folder of the
# second one has mooncake_master.
VLLM = os.environ.get("VLLM_PYTHON", "")
CLIENT = os.environ.get("MOONCAKE_PYTHON", "")


@pytest.mark.slow
@pytest.mark.skipif(not (VLLM and CLIENT), reason="VLLM_PYTHON and MOONCAKE_PYTHON are not set")
def test_vllms_states_through_a_real_store_are_the_local_ones(tmp_path, monkeypatch):
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    target = Target.load("smollm2-135m", "float32", "cpu")
    data = write_data(tmp_path / "data", target, rows=8)
    port = free_port()
    master = f"127.0.0.1:{free_port()}"
    begin = [CLIENT, "-m", "drafttrain.cli"]
    serve = [
        *begin,
        "serve-target",
        "--target",
        "smollm2-135m",
        "--layers",
        "2,15,27",
        "--engine-python",
        VLLM,
    ]
    serve += ["--transport", "mooncake", "--mooncake-master", master, "--mooncake-gib", "0.25"]
    flags = [
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max-model-len",
        "2048",
        "--enforce-eager",
    ]
    words = [
        "features",
        "--data",
        str(data),
        "--layers",
        "2,15,27",
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]
    words += ["--store-dtype", "float32", "--target", "smollm2-135m"]
    store = [str(Path(CLIENT).with_name("mooncake_master")), "--rpc_port", master.split(":")[1]]
    with (
        started([*store, "--metrics_port", str(free_port())]) as runs_store,
        started(
            [*serve, "--", *flags], lambda: listens(int(master.split(":")[1]), runs_store)
        ) as runs,
    ):
        until(lambda: listens(port, runs))
        subprocess.run(
            [*begin, *words, "--backend", "vllm", "--url", f"http://127.0.0.1:{port}"], check=True
        )
        runs.send_signal(signal.SIGINT)
        assert runs.wait(300) == 128 + signal.SIGINT
    theirs = stored(data, (2, 15, 27))
    assert main([*words, "--overwrite"]) == 0
    for key, tensors in stored(data, (2, 15, 27)).items():
        for name, tensor in tensors.items():
            assert (theirs[key][name] - tensor).norm() <= 1e-4 * tensor.norm(), (key, name)


@contextmanager
def started(
    words: list[str], first: Callable[[], bool] = lambda: True
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is started when `first` holds, and ends with the block."""
    until(first)
    process = subprocess.Popen(words)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(300)


def until(holds: Callable[[], bool]) -> None:
    for _ in range(1200):
        if holds():
            return
        time.sleep(0.25)
    raise AssertionError("not ready in 300 s")


def listens(port: int, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, f"ended with {process.poll()}"
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
