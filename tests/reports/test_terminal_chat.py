"""`drafttrain chat`: the same text as plain decoding, who drafted what, commands, pipes and terminals."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import sys
import termios
import threading
import time
from contextlib import closing
from itertools import islice

import pytest

from drafttrain.cli import main
from drafttrain.drafters.combined import CombinedDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.errors import UserError
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.progress import plain_console
from drafttrain.reports.terminal_chat import ChatSession, ChatTurn, LiveView, PlainView
from tests.files import load_json
from tests.inference.fakes import FakeDrafter

TURNS = ["hello there", "and again", "once more"]
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def session_of(target, drafter, tokens=40, sampling=None, tree="dynamic:3,4,8") -> ChatSession:
    spec = TreeSpec.parse(tree)
    sampling = sampling or SamplingParams()
    decoder = Decoder(target, drafter, spec=spec, sampling=sampling, keep=True)
    return ChatSession(decoder, tokens)


def last(session: ChatSession, text: str, rounds: int = 10**6) -> ChatTurn:
    """The answer to a message, left after some rounds."""
    with closing(session.answer(text)) as answer:
        return list(islice(answer, rounds))[-1]


def test_the_time_of_showing_is_left_out(target):
    with closing(session_of(target, None, 8).answer("hello there")) as rounds:
        for turn in rounds:
            if turn.finish:
                time.sleep(0.5)  # longer than all of the decoding
    assert turn.decoded[1] > 0
    assert turn.decoded[1] == pytest.approx(
        turn.stats.total_seconds - turn.stats.prefill_seconds - turn.shown
    )


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_those_of_plain_decoding(target, temperature):
    drafted, plain = (
        session_of(target, drafter, 24, SamplingParams(temperature))
        for drafter in (NgramDrafter(), None)
    )
    for text in TURNS:
        turn = last(drafted, text)
        expected = last(plain, text)
        assert turn.text == expected.text and turn.finish == expected.finish
        assert turn.producers.total() == turn.stats.new_tokens == expected.stats.new_tokens
        assert expected.producers == {"target": expected.stats.new_tokens}
    assert sum(turn.producers["ngram"] for turn in drafted.turns) >= (temperature == 0)
    assert drafted.messages == plain.messages and len(plain.messages) == 6


@pytest.mark.thorough
def test_each_accepted_token_has_its_producer(target):
    expected = last(session_of(target, None, 120), TURNS[0])
    prompt = session_of(target, None).target.tokenizer.apply_chat_template(
        [{"role": "user", "content": TURNS[0]}], add_generation_prompt=True, return_dict=False
    )
    tokens = Decoder(target, None).generate([prompt], max_new_tokens=120)[0].tokens
    head = FakeDrafter(tokens, agree=0.6, vocab=300, seed=3)
    session = session_of(
        target, CombinedDrafter(head, NgramDrafter()), 120, tree="chain:3@alone=0.3"
    )
    turn = last(session, TURNS[0])
    assert session.names == [head.kind, "ngram"] and turn.text == expected.text
    assert turn.producers[head.kind] > 0 and turn.producers["ngram"] > 0
    bonus = turn.stats.target_passes + 1
    assert bonus - 1 <= turn.producers["target"] <= bonus
    figures = session.figures(turn)
    assert f"{head.kind} {turn.producers[head.kind] / turn.stats.new_tokens:.0%}" in figures
    assert f"accepted length {turn.stats.accepted_length:.2f}" in figures


def test_a_stopped_answer_stays_in_the_conversation(target):
    session = session_of(target, NgramDrafter())
    turn = last(session, TURNS[0], rounds=2)
    assert turn.finish == "stopped" and session.turns == [turn] and 0 < turn.stats.new_tokens < 40
    assert session.messages[1] == {"role": "assistant", "content": turn.text}
    assert last(session, TURNS[1]).stats.prompt_tokens > turn.stats.prompt_tokens + len(turn.pieces)


@pytest.mark.thorough
def test_plain_decoding_is_measured_when_drafting_is_off(target):
    session = session_of(target, NgramDrafter())
    turn = last(session, TURNS[0])
    assert session.record(turn)[
        "plain_tokens_per_second"
    ] is None and "/plain measures it" in session.figures(turn)
    session.drafting = False
    assert last(session, TURNS[1]).producers.keys() == {"target"}
    assert session.turns[1].plain[0] == session.turns[1].decoded[0]
    session.drafting = True
    turn = last(session, TURNS[2])
    with closing(session.answer_again()) as rounds:
        assert [again.drafting for again in rounds][-1] is False
    assert session.turns[-1] is turn and len(session.turns) == 3
    assert turn.plain[0] == turn.decoded[0]
    assert session.record(turn)["plain_tokens_per_second"] > 0
    assert re.search(r"plain [\d.]+ tokens/s \([\d.]+x\)", session.figures(turn))


def test_a_ratio_is_of_the_same_answer(target):
    """Plain decoding of another answer, of a part of it, or of another text gives no ratio."""
    session = session_of(target, NgramDrafter(), 12)
    session.drafting = False
    last(session, TURNS[0])
    session.drafting = True
    drafted = last(session, TURNS[1])
    view = PlainView(session, as_json=False)
    assert session.record(drafted)["plain_tokens_per_second"] is None
    assert not re.search(r"\d+x\)", session.figures(drafted))

    with closing(session.answer_again()) as rounds:
        next(rounds)
    assert drafted.plain == (0, 0.0), "a part"
    drafted.pieces.append(("more", "target"))
    view.compare()
    assert drafted.plain == (0, 0.0), "another text"
    drafted.pieces.pop()
    view.compare()
    assert re.search(r"\d+x\)", session.figures(drafted))


def test_a_full_context_is_said(target):
    target.max_positions = 40
    session = session_of(target, None, 100)
    assert last(
        session, TURNS[0]
    ).finish == "length" and "context is full: /reset" in session.figures(session.turns[0])
    with pytest.raises(UserError, match="reads at most 40"):
        last(session, TURNS[1])
    assert len(session.turns) == 1


@pytest.fixture
def chat(target_dir, monkeypatch, capsys):
    """Runs the command on piped lines; returns exit status, stdout and stderr."""

    def run(text: str, *more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(
            sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogateescape")))
        )
        words = [
            "--target",
            str(target_dir),
            "--drafter",
            "ngram",
            "--dtype",
            "float32",
            "--max-new-tokens",
            "12",
        ]
        status = main(["chat", *words, *more])
        return status, *capsys.readouterr()

    return run


@pytest.mark.thorough
def test_a_drafter_that_drafts_nothing_is_said(chat):
    status, _, err = chat("hello there\n", "--tree", "none")
    assert (
        status == 0 and "--tree none: nothing is drafted; --tree chain:3 drafts all the same" in err
    )


@pytest.mark.thorough
def test_a_pipe_gets_one_answer_per_line(chat, tmp_path):
    saved = tmp_path / "chat.json"
    foreign = tmp_path / "mine.json"
    foreign.write_text("{}")
    lines = [
        "hello there",
        "",
        "/plain",
        "and again",
        f"/save {saved}",
        "/reset",
        "/system Be brief.",
        "once\udcff",
        "/quit",
        "x",
    ]
    status, out, err = chat("\n".join(lines))
    assert status == 0 and "\x1b" not in out + err
    written = load_json(saved)
    first, second = written["turns"]
    assert out.startswith(f"{first['answer']}\n{second['answer']}\n") and out.count("\n") >= 3
    assert [first["drafting"], second["drafting"]] == [True, False]
    assert [message["role"] for message in written["messages"]] == ["user", "assistant"] * 2
    assert err.count("tokens/s") >= 3 and f"wrote {saved}" in err
    status, _, err = chat(f"/save {foreign}\n")
    assert (
        status == 2
        and "contains files that drafttrain chat did not write" in err
        and foreign.read_text() == "{}"
    )
    status, _, err = chat("/plian\nhello")
    assert status == 2 and "error: /plian is not one of /plain, /image, /system" in err


def test_json_has_one_object_per_turn(chat):
    status, out, _ = chat(
        "/help\nhello there\n/plain\n /and again\n", "--json", "--system", "Be brief."
    )
    first, second = map(json.loads, out.splitlines())
    assert status == 0 and (first["user"], second["user"]) == ("hello there", " /and again")
    assert (
        first["tokens"] == sum(first["producers"].values())
        and second["plain_tokens_per_second"] > 0
    )


class Terminal:
    """A pseudo-terminal in place of this process's stdin and stdout. screen: what was written, without escape sequences."""

    def __init__(self, monkeypatch):
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (24, 60))
        self.seen = b""
        monkeypatch.setattr(sys, "stdin", os.fdopen(os.dup(self.slave), "r"))
        monkeypatch.setattr(sys, "stdout", os.fdopen(os.dup(self.slave), "w", buffering=1))
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLORTERM", "truecolor")
        monkeypatch.delenv("COLUMNS", raising=False)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        while True:
            self.seen += os.read(self.master, 4096)

    @property
    def screen(self) -> str:
        return ANSI.sub("", self.seen.decode())

    def script(self, *steps):
        """Types each step's text, or calls it, once what it waits for is on the screen behind the last step's."""

        def play():
            place = 0
            for wanted, action in steps:
                until = time.monotonic() + 600  # ends a hung test, never a slow one
                while (found := self.screen.find(wanted, place)) < 0 and time.monotonic() < until:
                    time.sleep(0.005)
                place = found + len(wanted)
                action() if callable(action) else os.write(self.master, action.encode())

        threading.Thread(target=play, daemon=True).start()


@pytest.mark.thorough
def test_a_terminal_shades_stops_and_ends(target_dir, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal(monkeypatch)
    interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    handler = signal.getsignal(signal.SIGINT)
    sent = threading.Event()
    answer = ChatSession.answer
    answered = []

    def waits(session, text):
        """The second answer goes on when the interrupt is sent, however slow the other thread is."""
        answered.append(text)
        with closing(answer(session, text)) as rounds:
            for turn in rounds:
                yield turn
                if len(answered) == 2:
                    sent.wait()

    def interrupt_the_answer():
        interrupt()
        sent.set()

    monkeypatch.setattr(ChatSession, "answer", waits)
    terminal.script(
        (">", "hello there\n"),
        ("plain measures it", ""),
        ("cut by", ""),
        ("> ", interrupt),  # at the prompt
        ("ends the conversation", ""),
        ("> ", "/nothing\n"),
        ("is not one of", ""),
        ("> ", "/reset\n"),
        ("> ", "hello there\n"),
        ("tokens |", interrupt_the_answer),
        ("stopped", ""),
        ("> ", "\x04"),
    )
    words = [
        "--target",
        str(target_dir),
        "--drafter",
        "ngram",
        "--dtype",
        "float32",
        "--max-new-tokens",
        "400",
    ]
    assert main(["chat", *words]) == 0
    assert signal.getsignal(signal.SIGINT) is handler
    assert "\x1b[30;48;2;147;197;253m" in terminal.seen.decode()  # tokens by the n-gram matches
    assert terminal.screen.count("| stopped") == 1 and "Traceback" not in terminal.screen


def test_answers_cannot_write_escape_sequences(target, monkeypatch, capsys):
    session = session_of(target, None)
    pieces = [("a\x1b]0;title\x07", "target"), ("b\nc", "target")]
    turn = ChatTurn("hi", False, [], 0, pieces=pieces, finish="eos")
    monkeypatch.setattr(session, "answer", lambda text: (each for each in [turn]))
    LiveView(session, plain_console(force_terminal=True, no_color=True, width=40)).answer("hi")
    out = capsys.readouterr().out
    assert "\x1b]0" not in out and "\x07" not in out and "a\N{REPLACEMENT CHARACTER}]0;title" in out
    assert "48;2" not in out


def test_long_answers_scroll_away_whole(target, monkeypatch, capsys):
    """Every row is printed once below the last, whatever the pieces; only the last is drawn again."""
    session = session_of(target, None)
    text = "".join(f"word{number} " + "\n" * (number % 7 == 0) for number in range(200))
    turn = ChatTurn("hi", False, [], 0)

    def answer(_):
        for begin in range(0, len(text), 3):
            turn.pieces.append((text[begin : begin + 3], "target"))
            yield turn

    monkeypatch.setattr(session, "answer", answer)
    LiveView(session, plain_console(force_terminal=True, width=30)).answer("hi")
    shown = ANSI.sub(" ", capsys.readouterr().out).split()
    for number in range(200):
        assert f"word{number}" in shown


@pytest.mark.slow
def test_a_shells_terminal_edits_lines_and_sends_signals(target_dir):
    """With a controlling terminal: the arrow keys bring lines back, Ctrl-C stops an answer."""
    words = [
        "--target",
        str(target_dir),
        "--drafter",
        "ngram",
        "--dtype",
        "float32",
        "--max-new-tokens",
        "3500",
    ]
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe(
            sys.executable,
            [sys.executable, "-m", "drafttrain", "chat", *words],
            {**os.environ, "TERM": "xterm"},
        )
    seen = ""
    place = 0

    def until(wanted: str, keys: str) -> None:
        nonlocal seen, place
        while (found := seen.find(wanted, place)) < 0:
            seen += os.read(terminal, 65536).decode(errors="replace")
        place = found + len(wanted)
        os.write(terminal, keys.encode())

    until("> ", "hello there\n")
    until("tokens |", "\x03")
    until("stopped", "")
    until("> ", "/reset\n")
    until("> ", "\x1b[A\x1b[A\n")  # the line before the last
    until("hello there", "")
    until("tokens |", "\x03")
    until("stopped", "")
    until("> ", "\x04")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
