"""What `adapt --watch` knows of a server: samples, swaps, the way back, and the journal."""

from __future__ import annotations

import json

import pytest

from drafttrain import watch
from drafttrain.errors import UserError
from drafttrain.watch import Journal, Watch, Watched, interval_of
from tests.serving.fake_server import vllm_page
from tests.serving.live_server import (
    CONFIG,
    LiveServer,
    StandInEngine,
    StandInWorker,
    write_head,
)


@pytest.fixture
def engine(tmp_path):
    """An engine that serves the head a of the root heads; b is another one."""
    root = tmp_path / "heads"
    write_head(root / "a", 1.0)
    write_head(root / "b", 2.0)
    (tmp_path / "out").mkdir()
    return StandInEngine([StandInWorker(root / "a", root)])


def journal_of(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def events_of(folder):
    return [row["event"] for row in journal_of(folder)]


def test_samples_are_differences_of_the_servers_counters(tmp_path, engine):
    rounds = [0]
    watched = Watched()
    with LiveServer(engine, page=lambda: vllm_page(rounds[0])) as server:
        seen = Watch(server.url, "", tmp_path / "out", watched)
        found = []
        for rounds[0] in (1000, 1050, 1100, 1150, 10, 60, 111):  # started again behind 1150
            found.append(seen.sample())
        seen.close()
    assert found == [0, 0, 1.75, 0, 0, 0, 1.75] and watched.samples == [1.75, 1.75]


def test_a_version_is_brought_once_and_again_after_a_restart(tmp_path, engine):
    watched = Watched()
    root = tmp_path / "heads"
    out = tmp_path / "out"
    with LiveServer(engine) as server:
        seen = Watch(server.url, "", out, watched)
        assert seen.bring(root / "b") == "" and engine.values == [1.0], (
            "the first one needs no swap"
        )
        watched.swapped = True
        for _ in range(2):
            assert seen.bring(root / "b") == "" and engine.values == [2.0]
        engine.workers[:] = [StandInWorker(root / "a", root)]  # the server was started again
        assert seen.bring(root / "b") == "" and engine.values == [2.0]
        write_head(root / "c", 3.0, {**CONFIG, "draft_vocab_size": 4})
        assert "draft_vocab_size" in seen.bring(root / "c") and engine.values == [2.0]
        seen.close()
    assert events_of(out) == ["start", "swap", "swap", "refused", "stop"]
    assert journal_of(out)[1]["version"] == "b"


def test_a_server_that_dies_is_noted_once_and_gets_the_version_when_it_is_back(tmp_path, engine):
    watched = Watched(swapped=True)
    root = tmp_path / "heads"
    with LiveServer(engine) as server:
        seen = Watch(server.url, "", tmp_path / "out", watched)
        port = server.http.server_port
    for _ in range(2):
        assert seen.bring(root / "b") == "" and engine.values == [1.0]
        assert seen.sample() == 0
    with LiveServer(engine, port=port):
        assert seen.bring(root / "b") == "" and engine.values == [2.0]
    seen.close()
    assert events_of(tmp_path / "out") == ["start", "away", "back", "swap", "stop"]


def test_two_watchers_of_one_server_are_refused(tmp_path, engine):
    (tmp_path / "other").mkdir()
    with LiveServer(engine) as server:
        first = Watch(server.url, "", tmp_path / "out", Watched())
        with pytest.raises(UserError, match="another drafttrain adapt --watch swaps heads below"):
            Watch(server.url, "", tmp_path / "other", Watched())
        first.close()
        Watch(server.url, "", tmp_path / "other", Watched()).close()


def test_a_root_on_another_machine_is_one_line(tmp_path, engine):
    engine.workers[0]._drafttrain_state.root = "/no/such/root"
    with (
        LiveServer(engine) as server,
        pytest.raises(UserError, match="is not on this machine"),
    ):
        Watch(server.url, "", tmp_path / "out", Watched())


def lengths(mean, count):
    """Samples around a mean."""
    return [mean + 0.1 * (i % 3 - 1) for i in range(count)]


@pytest.mark.parametrize(
    ("old", "new", "goes_back", "event"),
    [
        (lengths(2.0, 20), lengths(1.5, 16), True, "rollback"),
        (lengths(2.0, 20), lengths(1.5, 15), False, None),  # too few yet
        (lengths(2.0, 20), lengths(2.0, 16), False, None),
        (lengths(2.0, 20), lengths(2.2, 64), False, "proven"),
        (lengths(2.0, 3), lengths(1.0, 30), False, None),  # the old one's interval is unknown
    ],
)
def test_the_old_version_comes_back_below_its_interval(tmp_path, old, new, goes_back, event):
    watched = Watched(samples=old)
    seen = Watch("", "", tmp_path, watched)
    seen.begin_trial(tmp_path / "version-0001")
    for length in new:
        seen.logged(length)
    assert seen.judge("version-0002") is goes_back
    last = journal_of(tmp_path)[-1]
    assert last["event"] == (event or "start")
    if event:
        assert last["version"] == "version-0002" and last["samples"] == len(new)
        assert last["usual"] == interval_of(old)
    assert seen.judge("version-0002") is goes_back, "decided once, or as before"


def test_the_interval_holds_the_mean_and_needs_samples():
    mean, low, high = interval_of(lengths(2.0, 30))
    assert low < mean == 2.0 < high and high - low < 0.1
    assert interval_of([2.0, 2.0, 2.0]) == []


def test_a_torn_line_of_the_journal_is_cut_off(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.add("start")
    with journal.path.open("a") as file:
        file.write('{"time": 1, "eve')
    journal.add("stop", reason="x")
    assert events_of(tmp_path) == ["start", "stop"]


def test_samples_do_not_grow_without_end(tmp_path):
    watched = Watched()
    seen = Watch("", "", tmp_path, watched)
    for number in range(1000):
        seen.logged(float(number))
    assert watched.samples == [float(number) for number in range(1000 - watch._PROVEN, 1000)]
