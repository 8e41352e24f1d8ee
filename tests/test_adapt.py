"""Adaptation while serving: rounds, swaps, state, allowance and what a killed process leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch

from drafttrain import adapt
from drafttrain.cli import main
from drafttrain.data.answer_log import AnswerLog
from drafttrain.data.store import Store, load_records
from drafttrain.drafters.latest import LatestDrafter
from drafttrain.drafters.registry import load_trained
from drafttrain.drafters.shipping import find_drafter
from drafttrain.errors import UserError
from drafttrain.evaluation.resampling import Ratio, lengths_ratio
from drafttrain.export.export_drafter import export
from drafttrain.inference import generate
from drafttrain.inside_vllm.head_files import ROOT, read_head
from drafttrain.serving.client import parse_metrics
from drafttrain.target import Target
from drafttrain.watch import Watch, Watched
from tests.conftest import make_target, save_target
from tests.drafters.helpers import make_drafter
from tests.files import load_jsonl
from tests.serving.fake_server import vllm_page
from tests.serving.live_server import route_of, serve, write_head
from tests.states.fake_state_server import FakeStateServer
from tests.states.stand_ins import SERVED
from tests.training.runs import write_data


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder with a target, an untrained drafter, and a log of 24 answers."""
    place = tmp_path_factory.mktemp("served")
    target = make_target()
    save_target(target, place / "target")
    drafter = make_drafter(target, ttt_steps=2)
    drafter.save_pretrained(place / "drafter")
    (place / "drafter" / "decoding.json").write_text('{"tree": "chain:2"}')
    log = AnswerLog(place / "log.jsonl")
    for i in range(24):
        prompt = [5, 6, 7 + i % 12, 8 + i]
        log.add(prompt, generate(target, None, prompt, max_new_tokens=12))
    log.close()
    return place


def words(
    served,
    output,
    *more: str,
) -> list[str]:
    given = {
        "drafter": served / "drafter",
        "target": served / "target",
        "log": served / "log.jsonl",
        "output": output,
        "every": 16,
        "share": 1,
        "hold-out": 0.4,
        "passes": 30,
        "learning-rate": 3e-3,
        "dtype": "float32",
    }
    return ["adapt", "--once", *(f"--{key}={value}" for key, value in given.items()), *more]


def once(
    served,
    output,
    capsys,
    *more: str,
) -> dict:
    assert main([*words(served, output, *more), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["result"]


@pytest.fixture
def plenty(monkeypatch):
    """An allowance that does not depend on how fast the machine is."""
    monkeypatch.setattr(adapt.Adapter, "budget", lambda self: self.account() or 1e6)
    monkeypatch.setattr(os, "nice", lambda by: 0)


def verdicts(
    monkeypatch,
    *ratios: tuple[float, float],
) -> None:
    """Judges the coming rounds by these intervals."""
    left = list(ratios)
    monkeypatch.setattr(adapt, "lengths_ratio", lambda *_: (Ratio(1.0, *left.pop(0)), 1.0, 1.0))


@pytest.mark.thorough
def test_a_better_version_serves_and_text_stays(
    served,
    tmp_path,
    capsys,
    plenty,
    monkeypatch,
):
    verdicts(monkeypatch, (1.1, 1.2))
    output = tmp_path / "out"
    target = make_target()
    before = {path.name: path.read_bytes() for path in (served / "drafter").iterdir()}
    found = once(served, output, capsys)
    (record,) = found["rounds"]
    assert record["verdict"] == "better" and record["steps"] > 0
    assert found["read"] == 24 and record["new"] + record["judges"] == 24 and record["judges"] >= 4
    assert os.readlink(output / "current") == "version-0001" and found["serving"].endswith(
        "version-0001"
    )
    assert json.loads((output / "version-0001" / "adapted.json").read_text())["answers"] == 24
    assert json.loads((output / "current" / "decoding.json").read_text()) == {"tree": "chain:2"}
    assert stat.S_IMODE((output / "state.jsonl").stat().st_mode) == 0o600
    assert {path.name: path.read_bytes() for path in (served / "drafter").iterdir()} == before
    passes = []
    for name in (served / "drafter", output / "current"):
        made = [
            generate(
                target,
                LatestDrafter(str(name), target).get(),
                row["prompt_token_ids"],
                max_new_tokens=12,
            )
            for row in load_jsonl(served / "log.jsonl")[:8]
        ]
        passes.append(sum(it.stats.target_passes for it in made))
        logged = [
            json.loads(line)["token_ids"]
            for line in (served / "log.jsonl").read_text().splitlines()[:8]
        ]
        assert [it.tokens for it in made] == logged
    assert passes[1] < passes[0]  # answers that it has trained on
    again = once(served, output, capsys)
    assert again["rounds"] == [] and again["read"] == 24 and again["fresh"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_head_takes_the_words_that_answers_hold_now(
    served,
    tmp_path,
    capsys,
    plenty,
    monkeypatch,
    frozen,
):
    target = make_target()
    counts = torch.zeros(target.vocab_size, dtype=torch.long)
    for row in load_jsonl(served / "log.jsonl"):
        counts += torch.bincount(torch.tensor(row["token_ids"]), minlength=len(counts))
    rare = counts.argsort(stable=True)[:20].sort().values  # none of the words that the log repeats
    drafter = make_drafter(target, rare, ttt_steps=2, train_head=not frozen)
    drafter.save_pretrained(tmp_path / "drafter")
    for verdict in ((0.8, 0.9), (1.1, 1.2)):  # worse, then better: the words come back and go again
        verdicts(monkeypatch, verdict)
        output = tmp_path / str(verdict[0])
        (record,) = once(served, output, capsys, f"--drafter={tmp_path / 'drafter'}", "--passes=1")[
            "rounds"
        ]
        assert (record["words"] > 0) == frozen and record["steps"] > 0
        current = load_trained(str(output / "current"))
        if verdict[1] < 1 or not frozen:
            assert current.kept_ids.equal(rare)
            continue
        kept = current.kept_ids
        assert len(kept) == 20 and not kept.equal(rare)
        assert counts[kept].sum() > counts[rare].sum()
        rows = target.head_weight[kept]
        torch.testing.assert_close(current.lm_head.weight.detach(), rows.float())


@pytest.mark.thorough
def test_swaps_follow_the_verdict_and_the_disk_is_bounded(
    served, tmp_path, capsys, plenty, monkeypatch
):
    output = tmp_path / "out"
    log = tmp_path / "log.jsonl"
    verdicts(monkeypatch, (0.9, 1.1), (0.9, 1.1), (0.8, 0.9), (1.1, 1.2))
    lines = (served / "log.jsonl").read_text().splitlines(keepends=True)
    given = (f"--log={log}", "--keep=1", "--passes=1")
    seen = []
    for _ in range(4):
        with log.open("a") as file:
            file.writelines(lines[:16])
        rounds = once(served, output, capsys, *given)["rounds"]
        state = json.loads((output / "state.jsonl").read_text().splitlines()[0])
        versions = sorted(path.name for path in output.glob("version-*"))
        seen.append(
            (rounds[0]["verdict"], (output / "current").resolve().name, state["trial"], versions)
        )
        (output / "version-9000").mkdir(exist_ok=True)  # somebody else's
    assert seen == [
        ("undecided", "drafter", "version-0001", ["version-0001"]),
        ("undecided", "drafter", "version-9001", ["version-9000", "version-9001"]),
        ("worse", "drafter", "", ["version-9000", "version-9001"]),
        ("better", "version-9002", "", ["version-9000", "version-9002"]),
    ]


@pytest.mark.thorough
def test_what_a_killed_process_leaves_is_completed(
    served,
    tmp_path,
    capsys,
    plenty,
    monkeypatch,
):
    output = tmp_path / "out"
    verdicts(monkeypatch, (1.1, 1.2), (1.1, 1.2))
    save = adapt.Adapter.save

    def dies(self):
        if (self.output / "version-0001").exists():
            raise KeyboardInterrupt
        save(self)

    monkeypatch.setattr(adapt.Adapter, "save", dies)
    assert main(words(served, output, "--passes=1")) == 130  # between the swap and the state
    monkeypatch.setattr(adapt.Adapter, "save", save)
    (output / ".partial").mkdir()
    capsys.readouterr()
    found = once(served, output, capsys, "--passes=1")
    assert found["read"] == 24 and [it["version"] for it in found["rounds"]] == [
        "version-0002"
    ]  # the round runs again
    assert (
        not (output / ".partial").exists() and (output / "current").resolve().name == "version-0002"
    )


@pytest.mark.thorough
def test_unusable_lines_are_counted_and_listed(
    served,
    tmp_path,
    capsys,
    plenty,
):
    log = tmp_path / "log.jsonl"
    shutil.copy(served / "log.jsonl", log)
    with log.open("a") as file:
        file.write('{"level": "info"}\n{"messages": [{"role": "user"')
    found = once(served, tmp_path / "out", capsys, f"--log={log}", "--every=100")
    assert (found["read"], found["unusable"], found["rounds"]) == (24, 1, [])
    assert (
        found["failures"][0]["line"].startswith("log.jsonl byte ")
        and "no conversation" in found["failures"][0]["reason"]
    )


@pytest.mark.thorough
def test_a_log_of_another_tokenizer_is_said_once_and_the_old_head_serves(
    served, tmp_path, capsys, plenty
):
    log = tmp_path / "log.jsonl"
    line = json.dumps({"prompt_token_ids": [5, 6], "token_ids": [7, 100_000]})
    log.write_text(f"{line}\n" * 20)
    output = tmp_path / "out"
    assert main([*words(served, output, f"--log={log}", "--watch")]) == 0
    said = capsys.readouterr().out
    assert said.count("most new lines of the log cannot be used") == 1
    assert "token 100000 is outside the target's vocabulary" in said
    assert (output / "current").resolve() == served / "drafter"
    assert [row["event"] for row in journal_of(output)] == ["start", "unusable", "stop"]
    with log.open("a") as file:
        file.write((served / "log.jsonl").read_text())
    assert once(served, output, capsys, f"--log={log}", "--every=100")["read"] == 24


@pytest.mark.thorough
def test_a_log_without_end_is_kept_in_part(served, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    log.write_text((served / "log.jsonl").read_text() * 40)
    found = once(served, tmp_path / "out", capsys, f"--log={log}", "--every=2", "--hold-out=1e-9")
    assert (found["read"], found["passed_over"]) == (16, 960 - 16)
    state = (tmp_path / "out" / "state.jsonl").read_text().splitlines()
    assert len(state) - 1 == 2 * 2 + 4 * 2  # the newest answers, and a sample of earlier ones


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--metrics=9109"], "goes with --watch"),
        (["--server=http://127.0.0.1:1"], "goes with --watch"),
        (["--states-dir=/mnt/states"], "goes with --target-url; give that too"),
        (["--metrics=here", "--watch"], "metrics='here' cannot be listened to"),
        (["--drafter=/no/such"], "drafter='/no/such': no such folder"),
        (["--log=/no/such/log.jsonl"], "log='/no/such/log.jsonl': no such file or folder"),
        (["--output={target}"], "is or holds the input target"),
        (["--target={other}"], "hidden_size"),
    ],
)
def test_mistakes_are_one_line(
    served,
    tmp_path,
    capsys,
    more,
    message,
):
    if "{other}" in more[0]:
        other = make_target(hidden=64)
        save_target(other, tmp_path / "other")
    named = [word.format(target=served / "target", other=tmp_path / "other") for word in more]
    assert main([*words(served, tmp_path / "out"), *named]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.thorough
def test_one_folder_continues_one_drafter(
    served,
    tmp_path,
    capsys,
    plenty,
):
    once(served, tmp_path / "out", capsys, "--every=100")
    shutil.copytree(served / "drafter", tmp_path / "second")
    assert main(words(served, tmp_path / "out", f"--drafter={tmp_path / 'second'}")) == 2
    assert "one folder continues one drafter" in capsys.readouterr().err


@pytest.mark.thorough
def test_servers_give_the_states_of_the_first_data_too(served, tmp_path, capsys, plenty):
    target = Target.load(str(served / "target"), "float32", "cpu")
    write_data(tmp_path / "data", target, rows=8)
    meta = {"target": target.identity(), "sampling": {"temperature": 0.0}}
    with Store(tmp_path / "data", meta) as store:
        for number in range(8):  # their answers lie behind --max-length
            row = {"tokens": [7] * 80, "spans": [[50, 80]], "finish": ["stop"], "source": "test"}
            store.append({"id": f"long{number}", **row})
    given = [f"--data={tmp_path / 'data'}", "--replay=2", "--passes=2", "--max-length=40"]
    with FakeStateServer(target, tmp_path / "states", SERVED) as server:
        found = once(served, tmp_path / "out", capsys, *given, f"--target-url={server.url}")
    assert found["rounds"][0]["earlier"] == 8
    asked = Counter(tuple(prompt) for prompt in server.requests if isinstance(prompt, list))
    rows = [tuple(row["tokens"][:-1]) for row in load_records(tmp_path / "data")]
    assert [asked[row] for row in rows] == [1] * 8 + [0] * 8


def journal_of(output):
    return load_jsonl(output / "journal.jsonl")


@pytest.mark.thorough
def test_a_better_version_goes_into_the_server_and_comes_out_again(
    served, tmp_path, capsys, plenty, monkeypatch
):
    output = tmp_path / "out"
    root = tmp_path / "heads"
    monkeypatch.setenv(ROOT, str(root))
    verdicts(monkeypatch, (1.1, 1.2), (1.1, 1.2))
    trained = find_drafter(str(served / "drafter"))
    export(trained, "vllm", root / "first", torch.float32, trained.target_name)
    route = route_of(root / "first")
    serve(route, monkeypatch)
    rounds = [0]

    async def page(self):
        rounds[0] += 1000
        return {} if route.away else parse_metrics(vllm_page(rounds[0]))

    monkeypatch.setattr(Watch, "_page", page)
    given = ("--passes=1", "--watch", "--server=http://127.0.0.1:8000")
    assert once(served, output, capsys, *given)["rounds"][0]["verdict"] == "better"
    assert route.heads[0].served.folder == "version-0001"
    state = (output / "state.jsonl").read_text()
    watched = {"samples": [1.0] * 16, "previous": str(served / "drafter"), "usual": [2, 1.9, 2.1]}
    head, _, rest = state.partition("\n")
    changed = json.loads(head) | {"watched": {**watched, "swapped": True}}
    (output / "state.jsonl").write_text(json.dumps(changed) + "\n" + rest)
    once(served, output, capsys, *given)
    assert route.heads[0].served.folder == "drafter"
    assert (output / "current").resolve() == served / "drafter"
    events = [row["event"] for row in journal_of(output)]
    assert events == ["start", "round", "swap", "stop", "start", "rollback", "swap", "stop"]

    # A server with a head of another shape takes no version; one that is away is noted once.
    write_head(root / "other", 1.0)
    route.heads[0].served = read_head(root / "other", "other")
    shutil.copytree(served / "drafter", tmp_path / "again")
    more = [f"--drafter={tmp_path / 'again'}", *given]
    found = once(served, tmp_path / "second", capsys, *more)
    assert found["rounds"][0]["verdict"] == "refused"
    assert found["serving"] == str(tmp_path / "again")


def test_a_watcher_samples_brings_judges_and_notes(tmp_path, monkeypatch):
    root = tmp_path / "heads"
    monkeypatch.setenv(ROOT, str(root))
    for name, value in (("a", 1.0), ("b", 2.0)):
        write_head(root / name, value)
    route = route_of(root / "a")
    serve(route, monkeypatch)
    watched = Watched(swapped=True)
    # The server was started again behind 1150. The watcher looks once whether there is a page.
    pages = iter([900, 1000, 1050, 1100, 1150, 10, 60, 111, *range(211, 1711, 100)])

    async def page(self):
        return parse_metrics(vllm_page(next(pages)))

    monkeypatch.setattr(Watch, "_page", page)
    watch = Watch("http://127.0.0.1:8000", "", tmp_path, watched)
    with pytest.raises(UserError, match="another drafttrain adapt --watch"):
        Watch("http://127.0.0.1:8000", "", tmp_path, Watched())
    for _ in range(7):
        watch.sample("a")
    assert watched.samples == [1.75, 1.75] and watch.waits
    for _ in range(15):
        watch.sample("a")
    assert not watch.waits  # a new version can be compared now
    route.dies = True
    assert watch.bring(root / "b") and watch.bring(root / "b")
    assert route.heads[0].value == 1.0 and watch.figures()["server_away"] == 1
    route.away = ""
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"torn')
    assert watch.bring(root / "b") and route.heads[0].value == 2.0
    route.heads[0].served = read_head(root / "a", "a")  # the server was started again
    assert watch.bring(root / "b") and watch.bring(root / "b") and route.heads[0].loads == 2

    for length, count, back, event in (
        (1.5, 15, None, "swap"),
        (1.5, 16, root / "a", "rollback"),
        (2.0, 16, None, "rollback"),
        (2.0, 64, None, "proven"),
    ):
        watched.samples = [1.9, 2.0, 2.1] * 5
        watched.begin(root / "a")
        watched.samples = [length] * count
        assert watch.falls("b") == back and journal_of(tmp_path)[-1]["event"] == event
    watched.samples = [2.0] * 3
    watched.begin(root / "a")
    assert watched.previous == ""  # too few samples for an interval
    watch.close()
    rows = journal_of(tmp_path)
    events = [row["event"] for row in rows]
    assert events == ["start", "served", "away", "swap", "swap", "rollback", "proven", "stop"]
    assert rows[1]["served_accepted_length"] == 1.75 and rows[1]["samples"] == 16
    # Another watcher counts on from the journal, and compares with the first drafter.
    again = Watch("", "", tmp_path, watched)
    watched.samples = [3.0]
    figures = again.figures()
    assert (figures["swap_total"], figures["rollback_total"], figures["refused_total"]) == (2, 1, 0)
    assert figures["speedup_over_first"] == pytest.approx(3.0 / 2.0)  # the first one had 2.0


def test_what_serves_is_noted_rarely_once_it_has_proved_itself(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("drafttrain.watch.time.time", lambda: clock[0])
    watch = Watch("", "", tmp_path, Watched())
    for number in range(1000):
        clock[0] += 1
        watch.add(1 + number / 1000)
        watch.sample("drafter")
    served = [row for row in journal_of(tmp_path) if row["event"] == "served"]
    times = [row["time"] - 1000 for row in served]
    assert times == [16, 32, 48, 349, 650, 951] and served[-1]["samples"] == 64
    assert served[0]["served_accepted_length"] == pytest.approx(1.0075, abs=1e-4)


def test_the_interval_is_paired_and_the_same_is_neither_better_nor_worse():
    before = [[20, 10 + i % 3] for i in range(20)]
    ratio, first, second = lengths_ratio(before, before)
    assert ratio == (1, 1, 1) and first == second
    after = [[committed, passes - 2] for committed, passes in before]
    ratio, first, second = lengths_ratio(before, after)
    assert 1 < ratio.low < ratio.value < ratio.high and second > first


class Allowance(adapt.Adapter):
    """The accounting of an adapter alone."""

    def __init__(self, share: float):
        self.args, self.state = adapt.argparse.Namespace(share=share), adapt._State("")
        self.on_cpu, self.cores, self.clock = True, 1, time.process_time()


def test_allowance_grows_with_time_is_saved_for_hours_and_half_is_kept_for_a_fall():
    it = Allowance(0.02)
    it.state.at -= 3600
    assert it.budget() == pytest.approx(72, abs=0.5)  # no length is logged
    it.state.recent, it.state.usual = [2.0, 2.0], 2.0
    assert not it.fallen and it.budget() == pytest.approx(36, abs=0.5)
    it.state.recent = [1.8, 1.9]
    assert it.fallen and it.budget() == pytest.approx(72, abs=0.5)
    it.state.at -= 100 * 3600
    assert it.budget() == pytest.approx(6 * 72, abs=0.5)
    it.clock -= 500  # work
    assert it.budget() < 0 and it.state.spent == pytest.approx(500, abs=0.5)


def test_a_server_follows_the_link_and_keeps_what_does_not_load(
    served,
    tmp_path,
    caplog,
):
    target = make_target()
    link = tmp_path / "current"
    shutil.copytree(served / "drafter", tmp_path / "one")
    shutil.copytree(served / "drafter", tmp_path / "two")
    link.symlink_to("one")
    latest = LatestDrafter(f"{link}+ngram", target)
    first = latest.get()
    assert first is latest.get() and first.kind.endswith("ngram")

    def lead(name: str) -> None:
        (tmp_path / "new").symlink_to(name)
        os.replace(tmp_path / "new", link)

    lead("two")
    second = latest.get()
    assert second is not first and latest.version.name == "two"
    (tmp_path / "three").mkdir()
    lead("three")
    assert latest.get() is second and "does not load" in caplog.text
    assert latest.get() is second and caplog.text.count("does not load") == 1


@pytest.mark.slow
def test_killed_at_any_moment_nothing_is_lost(
    served,
    tmp_path,
    capsys,
):
    """kill -9 after growing times; then the folder loads, and a last run reads every line exactly once."""
    output = tmp_path / "out"
    command = [sys.executable, "-m", "drafttrain"]
    more = [*words(served, output, "--every=4", "--passes=2")]
    more.remove("--once")
    for i in range(6):
        process = subprocess.Popen(
            [*command, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 60
        while not (output / "state.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.4 * i)
        process.send_signal(signal.SIGKILL)
        process.wait()
        LatestDrafter(str(output / "current"), make_target())
    found = once(served, output, capsys, "--every=4", "--passes=2")
    assert found["read"] == 24 and found["unusable"] == 0
    rows = load_jsonl(output / "state.jsonl")[1:]
    assert sorted(row["number"] for row in rows) == list(range(1, 25))
