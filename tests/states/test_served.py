"""The client of servers that hand out states: equal to the target's own, proven, and steady while servers fail."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from drafttrain.data.failures import BadReply
from drafttrain.errors import UserError
from drafttrain.states import served
from drafttrain.states.served import Served
from drafttrain.states.transports.folder import RECORD, write_record
from drafttrain.target import Target
from drafttrain.target.attention import LAST
from tests.conftest import make_target
from tests.states.fake_state_server import FakeStateServer
from tests.states.stand_ins import SERVED, assert_states

LAYERS = (1, 3, LAST)
ROWS = [list(range(5 + i, 40 + 3 * i)) for i in range(12)]


@pytest.fixture(scope="module")
def target() -> Target:
    made = make_target()
    made.final_norm = made.body.norm
    return made


@pytest.fixture
def server(tmp_path, target):
    with FakeStateServer(target, tmp_path / "states", SERVED) as running:
        yield running


@pytest.fixture
def client(server, target):
    # No test is late, however busy the machine is.
    made = Served([server.url], target, LAYERS, timeout=600.0, patience=600.0)
    yield made
    made.close()


def left(server: FakeStateServer) -> set[str]:
    return set(os.listdir(server.folder)) - {RECORD}


def test_states_are_the_targets_own_and_no_file_stays(client, server, target):
    client.prove()
    assert (
        client.servers[0].gap < 1e-4 and len(server.requests) == 2
    )  # ids from all over the vocabulary, and a text
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda row: assert_states(client, target, row), ROWS))
    assert sorted(map(len, server.requests[2:])) == sorted(map(len, ROWS)) and not left(server)


def test_several_servers_share_the_rows(tmp_path, target):
    servers = [FakeStateServer(target, tmp_path / name, SERVED) for name in "ab"]
    client = Served([server.url + "/v1" for server in servers], target, LAYERS)
    client.prove()
    gate = threading.Barrier(4)
    for server in servers:
        server.before_answer = gate.wait  # so four requests are always in flight
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(client.request, ROWS))
    assert [len(server.requests) - 2 for server in servers] == [6, 6]
    for server in servers:
        server.before_answer = lambda: None
    servers[0].stop()  # the other one does all the work
    for row in ROWS[:3]:
        assert_states(client, target, row)
    servers[1].stop()


FAULTS = [
    "torn file",
    "no file",
    "NaN",
    "other row",
    "link",
    "late file",
    "503",
    "500",
    "reset",
    "429",
    "too short",
]


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_a_retry_and_nothing_else(client, server, target, fault):
    client.prove()
    server.faults.extend([fault, fault])
    assert_states(client, target, ROWS[0])
    assert not left(server) and len(server.requests) >= (3 if fault == "late file" else 5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "torn file",
            r"torn file: .*cannot be read.* in every try; free space in its --states-dir",
        ),
        ("no file", "no file: .*was announced and is not there in every try"),
        ("link", "torn file: .*cannot be read"),
        (
            "NaN",
            r"not finite: states of 35 tokens hold NaN or infinity in every try; serve the target in bfloat16",
        ),
        ("other row", "other tokens: states of 35 tokens that are not the row's in every try"),
        (
            "wrong width",
            r"hands out states \[35, 4, 31\] torch.float32 of 35 tokens, its record .* announces 4 layers of width 32",
        ),
        (
            "outside",
            "names the file '/etc/hosts.safetensors', which is not a file of states in its folder",
        ),
        ("no states", "hands out no states; start it with: drafttrain serve-target --target tiny"),
        ("400", r"HTTP 400: .*way.*; see the server's log"),
        ("bad JSON", "not JSON.*; see the server's log"),
    ],
)
def test_a_fault_that_stays_is_one_line_with_the_fix(client, server, fault, message):
    client.prove()
    server.always = fault
    with pytest.raises(UserError, match=f"^url='{server.url}'.* *{message}") as raised:
        client.request(ROWS[0])
    assert "\n" not in str(raised.value) and os.path.exists("/etc/hosts")


def test_a_row_without_tokens_needs_no_server_and_long_outages_no_longer_pauses(
    client, server, target
):
    empty = client.request([])
    assert (
        empty.features.shape == (0, 3 * 32) and empty.last.shape == (0, 32) and not server.requests
    )
    client.servers[0].failures = 5000
    server.faults.append("503")
    assert_states(client, target, ROWS[0])


def test_requests_that_fail_together_lengthen_the_pause_once(client, monkeypatch):
    monkeypatch.setattr(served, "_FIRST_PAUSE", 60.0)
    server = client.servers[0]
    for _ in range(16):
        with suppress(BadReply), client._in_flight(server):
            raise BadReply("connection lost", "the server was killed", retry=True)
    assert server.failures == 1
    before = random.getstate()
    server.rests_until = 0.0
    with suppress(BadReply), client._in_flight(server):
        raise BadReply("connection lost", "and again", retry=True)
    assert server.failures == 2 and random.getstate() == before, (
        "a checkpoint holds this generator's state"
    )


def test_a_server_that_stays_away_is_named_with_the_time(client, server):
    client.prove()
    client.patience = 0.1
    server.stop()
    with pytest.raises(
        UserError,
        match=r"no connection: .* \(asked for 0 s\); start it again with the same serve-target",
    ):
        client.request(ROWS[0])


def test_a_server_that_never_answered_is_given_up_within_seconds(server, target, monkeypatch):
    server.stop()
    monkeypatch.setattr(served, "_FIRST_PATIENCE", 0.0)  # of 15 minutes for one that was there
    with pytest.raises(
        UserError, match=r"no connection: .*; start it with drafttrain serve-target, or correct the"
    ):
        Served([server.url], target, LAYERS).prove()


def test_a_restart_is_waited_for_and_the_server_proven_again(client, server, target):
    assert_states(client, target, ROWS[0])
    server.stop()
    threading.Timer(0.15, server.start).start()
    assert_states(client, target, ROWS[1])
    assert len(server.requests) == 6  # two rows, proven twice
    server.stop()
    server.computes = make_target(seed=1)
    server.start()
    with pytest.raises(
        UserError, match=r"does not serve target 'tiny': its log-probabilities differ .* by \d"
    ):
        client.request(ROWS[0])


def test_a_server_that_started_again_unnoticed_is_proven_by_the_time_of_its_record(
    client, server, target
):
    assert_states(client, target, ROWS[0])
    server.computes = make_target(seed=1)
    write_record(server.folder, target, SERVED)
    with pytest.raises(UserError, match="another model, other layers or another final norm"):
        client.request(ROWS[0])


def scaled_norm() -> Target:
    other = make_target()
    other.body.norm.weight.data[::2] *= 0.9
    return other


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda it: setattr(it, "computes", make_target(seed=1)),
            r"log-probabilities differ .* by \d.*allowed",
        ),
        (
            lambda it: setattr(it, "computes", scaled_norm()),
            r"log-probabilities differ .* by 0\.\d",
        ),
        (lambda it: setattr(it, "shift", -1), r"log-probabilities differ .* by \d"),
        (
            lambda it: setattr(it, "tokenizer", lambda text: {"input_ids": [5, 6]}),
            "its tokenizer makes 2 tokens of a text",
        ),
        (lambda it: setattr(it, "always", "NaN"), "not finite: states of 48 tokens"),
        (
            lambda it: write_record(it.folder, make_target(hidden=64), SERVED),
            "announces hidden_size=64, the target has",
        ),
        (
            lambda it: write_record(it.folder, it.announces, (1, 2, 4)),
            "layers 1,2,4, and 1,3,4 .* --layers 1,3,4",
        ),
        (lambda it: (it.folder / RECORD).unlink(), f"states_dir='.*{RECORD}' cannot be read"),
        (lambda it: (it.folder / RECORD).write_text("{"), "is not JSON"),
    ],
)
def test_another_target_is_refused_with_the_figure(client, server, change, message):
    change(server)
    with pytest.raises(UserError, match=message) as raised:
        client.prove()
    assert "\n" not in str(raised.value)


def test_the_embedding_is_compared_where_layer_0_is_asked_for(tmp_path, target):
    other = make_target()
    other.embed_weight.data[:] += 0.01
    with FakeStateServer(target, tmp_path / "states", (0, 4)) as server:
        client = Served([server.url], target, (0,))
        assert_states(client, target, ROWS[0])
        server.answer = lambda body, fault: _with_layer_0(
            FakeStateServer.answer(server, body, fault), other, server
        )
        write_record(server.folder, target, (0, 4))
        with pytest.raises(UserError, match=r"its input embedding differs by 0\.\d+ of its norm"):
            client.request(ROWS[0])


def _with_layer_0(reply: dict, other: Target, server: FakeStateServer) -> dict:
    """Replaces the written states of layer 0 by another target's."""
    from safetensors.torch import load_file, save_file

    path = reply["kv_transfer_params"]["hidden_states_path"]
    found = load_file(path)
    found["hidden_states"] = found["hidden_states"].clone()
    found["hidden_states"][:, 0] = other.embed(found["token_ids"])
    save_file(found, path)
    return reply


def test_a_folder_under_another_path_and_one_that_is_not_here(tmp_path, server, target):
    elsewhere = tmp_path / "mounted"
    server.write = lambda ids, states, fault: "/nowhere/cmpl-1.safetensors"
    with pytest.raises(
        UserError,
        match="'/nowhere', which this machine does not see; mount that folder, and name it here with",
    ):
        Served([server.url], target, LAYERS).prove()
    os.rename(server.folder, elsewhere)
    server.write = lambda ids, states, fault: _moved(server, elsewhere, ids, states)
    assert_states(Served([server.url], target, LAYERS, states_dir=str(elsewhere)), target, ROWS[0])
    assert set(os.listdir(elsewhere)) == {RECORD}


def _moved(server: FakeStateServer, elsewhere, ids, states):
    """Writes where the client looks, and names the path that the server sees."""
    own = server.folder
    server.folder = elsewhere
    path = FakeStateServer.write(server, ids, states, "")
    server.folder = own
    return own / path.name


def test_longer_rows_than_the_server_reads_are_refused_before_they_are_sent(client, server):
    server.longest = 60
    client.prove()
    with pytest.raises(
        UserError,
        match="reads rows of at most 59 tokens, one has 60; start it with -- --max-model-len 61",
    ):
        client.request(list(range(60)))


def test_addresses_are_checked_and_credentials_are_not_shown(target):
    with pytest.raises(
        UserError, match="url='localhost:8000' is not an address; write http://HOST:PORT"
    ):
        Served(["localhost:8000"], target, LAYERS)
    with pytest.raises(UserError, match="url='' is not an address"):
        Served([], target, LAYERS)
    client = Served(["http://user:hunter2secret@127.0.0.1:9"], target, LAYERS, patience=0.01)
    with pytest.raises(UserError) as raised:
        client.prove()
    assert "hunter2secret" not in str(raised.value)
