"""Sources, filters and the command of `drafttrain prompts`."""

from __future__ import annotations

import csv
import itertools
import json
import random
from contextlib import closing

import pytest

from drafttrain.cli import main
from drafttrain.data import filters
from drafttrain.data import prompts as module
from drafttrain.data.filters import (
    Filter,
    NearDuplicates,
    PromptLimits,
    is_readable,
    is_repetitive,
    stable_id,
)
from drafttrain.data.magpie import PromptWriter, load_openings
from drafttrain.data.row_formats import parse_row
from drafttrain.data.sources import SOURCES, Source, collect, parse_columns, write_prompts
from drafttrain.errors import UserError
from drafttrain.files import JsonlLog, write_jsonl
from drafttrain.inference.responses import Finished, ResponseEngine
from drafttrain.ops.sampling import SamplingParams
from tests.files import load_json, load_jsonl

TOPICS = ["red", "green", "blue", "slow", "quick", "round", "flat", "small"]


def user(text):
    return {"messages": [{"role": "user", "content": text}]}


def distinct(i):
    """Texts that share few words, so that none is a near duplicate."""
    return " ".join(f"{topic}{i * 31 + j}" for j, topic in enumerate(TOPICS[: 5 + i % 4]))


def write_lines(path, rows):
    write_jsonl(path, rows)
    return path


def prompts(*args):
    return main(["prompts", *map(str, args)])


# -- formats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question_id": 1, "turns": ["a", "b"]}, [("user", "a"), ("user", "b")]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            [("user", "a"), ("assistant", "b")],
        ),
        (
            {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "a"}]},
            [("user", "a")],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            [("user", "a")],
        ),
        (
            {"system": "s", "messages": [{"role": "user", "content": "a"}]},
            [("system", "s"), ("user", "a")],
        ),
        (
            {"instruction": "a", "input": "b", "output": "c"},
            [("user", "a\n\nb"), ("assistant", "c")],
        ),
        ({"prompt": "a"}, [("user", "a")]),
        ({"text": "a"}, "a"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, None),
        ({"messages": [{"role": "tool", "content": "a"}]}, None),
        ({"messages": [{"role": "assistant", "content": "a"}]}, None),
        ({"turns": []}, None),
        ({"turns": ["a", ""]}, None),
        ({"label": 1}, None),
    ],
)
def test_shapes_of_rows(row, expected):
    prompt = parse_row(row)
    if isinstance(expected, list):
        assert [(m["role"], m["content"]) for m in prompt["messages"]] == expected
    else:
        assert (prompt or {}).get("text") == expected


# -- filters --------------------------------------------------------------------------------------------------------


def test_reasons_to_drop(tokenizer):
    evaluation = ["one two three four five six seven eight nine", "Very short question?"]
    keep = Filter(PromptLimits(5, 200, 0, 150), evaluation, 8, tokenizer)
    cases = {
        "hm": "shorter than 5 characters",
        "x" * 201: "longer than 200 characters",
        "y" * 180: "longer than 150 tokens",
        "hello\x07 you": "unreadable characters",
        "what is <|im_end|> for": "contains a special token",
        "He said: ONE, two three four five six seven-eight!": "overlaps with an evaluation prompt",
        "very short question": "overlaps with an evaluation prompt",
        "Tell me a joke": None,
        "tell me  a JOKE ": "duplicate",
        "one two three four five six seven": None,
        "a very short question": None,
    }
    for text, reason in cases.items():
        before = keep.dropped.copy()
        assert keep.keeps(user(text)) == (reason is None), text
        assert (keep.dropped - before) == ({reason: 1} if reason else {}), text


def test_answers_are_checked_for_contamination_too():
    row = {
        "messages": [
            {"role": "user", "content": "some question"},
            {"role": "assistant", "content": "a b c d"},
        ]
    }
    assert not Filter(PromptLimits(), ["a b c d e"], 3).keeps(row)
    assert Filter(PromptLimits(), ["a b x c d"], 3).keeps(row)


def test_near_duplicates():
    near = NearDuplicates()
    base = [f"word{i}" for i in range(40)]
    assert not near.seen(" ".join(base))
    assert near.seen(" ".join([*base[:39], "other"]))
    assert not near.seen(" ".join(base[:20] + [f"else{i}" for i in range(20)]))
    assert not near.seen("!!!")
    assert not any(near.seen(distinct(i)) for i in range(300))


@pytest.mark.thorough
def test_near_duplicates_are_found_after_the_tables_have_grown(monkeypatch):
    near = NearDuplicates()
    texts = [" ".join(f"t{i}w{j}" for j in range(20)) for i in range(2500)]
    assert not any(map(near.seen, texts)) and near.count == 2500 and len(near.signatures) == 4096
    assert all(near.seen(text + " more") for text in texts[::50])
    monkeypatch.setattr(filters, "_LONGEST", 1)  # only the newest text of a bucket is compared
    alike = [
        f"{texts[0]} {' '.join(f'{i}x{j}' for j in range(14))}" for i in range(40)
    ]  # share half of their runs
    assert not any(map(near.seen, alike)) and near.seen(alike[-1])


def test_readable_and_repetitive():
    assert is_readable("Tabs\tand\nlines, é 東京 🙂")
    assert not any(map(is_readable, ("\ufffd", "a\x00", "\ue000")))
    assert is_repetitive("and then the cat sat down " * 8)
    assert not is_repetitive(" ".join(f"w{i}" for i in range(60)))
    assert not is_repetitive("no no no no")


def test_ids_depend_on_content_only():
    assert stable_id(user("a")) == stable_id(user("a")) != stable_id(user("b"))


def test_a_rows_own_id_stays(tmp_path, capsys):
    rows = [
        {"id": 7, "prompt": distinct(1)},
        {"id": "a/b", "prompt": distinct(2)},
        {"id": None, "prompt": distinct(3)},
    ]
    rows.append(
        {"id": "a/b", "prompt": distinct(2)}
    )  # a duplicate, dropped before ids are compared
    source = write_lines(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out.jsonl"
    assert prompts("--source", "file", "--input", source, "--output", output) == 0
    ids = {row["id"] for row in load_jsonl(output)}
    assert {"7", "a/b"} < ids and len(ids) == 3
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [
        f"wrote {output}",
        f"next: drafttrain generate --target TARGET --prompts {output} --output {tmp_path / 'data'}",
    ]
    twice = write_lines(tmp_path / "twice.jsonl", [rows[0], {"id": "7", "prompt": distinct(2)}])
    assert prompts("--source", "file", "--input", twice, "--output", tmp_path / "other.jsonl") == 2
    assert (
        "source=twice.jsonl: id='7' occurs twice; make ids unique, or drop them"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "other.jsonl").exists()


# -- files and data sets --------------------------------------------------------------------------------------------


def test_file_source_end_to_end(tmp_path, capsys):
    rows = [{"prompt": distinct(i)} for i in range(20)] + [
        {"turns": [distinct(3)]},
        {"label": 1},
        {"text": "tiny"},
    ]
    rows.append({"turns": ["Tell me about the seven wonders of the ancient world in order"]})
    source = write_lines(tmp_path / "in.jsonl", rows)
    exclude = write_lines(
        tmp_path / "eval.jsonl",
        [{"turns": ["Name the seven wonders of the ancient world in order."]}],
    )
    output = tmp_path / "out" / "prompts.jsonl"
    args = (
        "--source",
        "file",
        "--input",
        source,
        "--output",
        output,
        "--exclude",
        exclude,
        "--seed",
        1,
    )
    assert prompts(*args) == 0
    kept = load_jsonl(output)
    assert sorted(row["messages"][0]["content"] for row in kept) == sorted(
        distinct(i) for i in range(20)
    )
    assert [row["messages"][0]["content"] for row in kept] != [distinct(i) for i in range(20)]
    assert len({row["id"] for row in kept}) == 20
    assert {row["source"] for row in kept} == {"in.jsonl"}
    summary = load_json(tmp_path / "out" / "prompts.jsonl.summary.json")
    assert (summary["read"], summary["kept"]) == (24, 20)
    assert summary["dropped"] == {
        "unknown format": 1,
        "duplicate": 1,
        "shorter than 10 characters": 1,
        "overlaps with an evaluation prompt": 1,
    }
    assert "dropped: duplicate" in capsys.readouterr().out

    assert prompts(*args) == 0
    assert "left as it is" in capsys.readouterr().out
    assert prompts(*args[:-1], 2) == 2
    assert "was made with seed=1; give --overwrite" in capsys.readouterr().err
    assert prompts(*args[:-1], 2, "--overwrite", "--count", 5) == 0
    assert len(load_jsonl(output)) == 5
    assert [path.name for path in output.parent.iterdir() if path.name.startswith(".")] == []


def test_own_suites_are_kept_clear_of_by_default(tmp_path):
    assert module.suites_folder().is_dir()
    own = json.loads(next(module.suites_folder().glob("*.jsonl")).read_text().splitlines()[0])
    source = write_lines(tmp_path / "in.jsonl", [{"turns": own["turns"]}, {"prompt": distinct(0)}])
    args = ("--source", "file", "--input", source, "--output")
    assert prompts(*args, tmp_path / "a.jsonl") == 0
    assert len(load_jsonl(tmp_path / "a.jsonl")) == 1
    assert prompts(*args, tmp_path / "b.jsonl", "--no-exclude-suites") == 0
    assert len(load_jsonl(tmp_path / "b.jsonl")) == 2


def test_dataset_source_with_mapped_columns(tmp_path, capsys):
    (tmp_path / "set").mkdir()
    write_lines(tmp_path / "set" / "train.jsonl", [{"ask": distinct(i), "n": i} for i in range(30)])
    args = (
        "--source",
        tmp_path / "set",
        "--count",
        7,
        "--output",
        tmp_path / "out.jsonl",
        "--columns",
    )
    assert prompts(*args, "prompt=question") == 2
    assert "has no column 'question'; it has ask, n" in capsys.readouterr().err
    assert prompts(*args, "prompt=ask") == 0
    assert len(load_jsonl(tmp_path / "out.jsonl")) == 7
    assert prompts("--source", tmp_path / "none", "--output", tmp_path / "x.jsonl") == 2
    assert "cannot be read" in capsys.readouterr().err


def test_token_limits_use_the_targets_tokenizer(tmp_path, target_dir):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "a" * 40}, {"prompt": "b" * 60}])
    args = (
        "--source",
        "file",
        "--input",
        source,
        "--output",
        tmp_path / "out.jsonl",
        "--max-tokens",
        50,
    )
    assert prompts(*args, "--target", target_dir) == 0
    assert [row["messages"][0]["content"] for row in load_jsonl(tmp_path / "out.jsonl")] == [
        "a" * 40
    ]


def csv_prompts(request):
    """The source of docs/developer/add-a-source-of-prompts.md."""
    args = request.args
    if not args.input:
        raise UserError("source=csv needs --input FILE.csv")
    with args.input.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    random.Random(args.seed).shuffle(rows)
    return collect(rows, request, args.input.name, len(rows))


def test_a_source_is_a_function_and_an_entry(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SOURCES, "csv", Source(csv_prompts))
    table = tmp_path / "questions.csv"
    table.write_text(
        "id,question\n" + "".join(f"q{i},{distinct(i)}\n" for i in range(5)) + "q5,hm\n"
    )
    output = tmp_path / "out.jsonl"

    assert prompts("--source", "csv", "--output", output) == 2
    assert "source=csv needs --input FILE.csv" in capsys.readouterr().err
    assert prompts("--source", "csv", "--input", table, "--output", output) == 0
    assert sorted(row["id"] for row in load_jsonl(output)) == [f"q{i}" for i in range(5)]
    assert {row["source"] for row in load_jsonl(output)} == {"questions.csv"}
    assert "dropped: shorter than 10 characters" in capsys.readouterr().out


def test_a_source_may_have_a_count_of_its_own(tmp_path, monkeypatch):
    def endless(request):
        rows = ({"prompt": distinct(i)} for i in itertools.count())
        return collect(rows, request, "endless")

    monkeypatch.setitem(SOURCES, "endless", Source(endless, default_count=7))
    assert prompts("--source", "endless", "--output", tmp_path / "out.jsonl") == 0
    assert len(load_jsonl(tmp_path / "out.jsonl")) == 7


# -- magpie ---------------------------------------------------------------------------------------------------------


def test_the_frame_comes_from_the_template(target):
    tokenizer = target.tokenizer

    def write() -> PromptWriter:
        return PromptWriter(target, [], 0.0, 64, seed=0)

    assert tokenizer.decode(write().prefix_ids) == "<|im_start|>user\n"
    assert write().stop_ids == {tokenizer.eos_token_id}
    tokenizer.chat_template = "{% for m in messages %}[ASK] {{ m['content'] }} [/ASK]{% endfor %}"
    assert (tokenizer.decode(write().prefix_ids), write().ending) == ("[ASK] ", "[/ASK]")
    assert write().stop_ids == set(target.eos_ids)
    tokenizer.chat_template = None
    assert write().prefix_ids == [tokenizer.bos_token_id]
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(
        UserError, match="target='tiny': its chat template has no opening for a user's turn"
    ):
        write()


def finished(target, text, stop=True, key="0"):
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    return Finished(
        key, ids + [target.tokenizer.eos_token_id] * stop, "stop" if stop else "length", []
    )


def test_what_a_writer_makes_of_answers(target):
    writer = PromptWriter(target, [], 0.0, 64, seed=0)
    assert writer.prompt(finished(target, " What is é? ")) == user("What is é?")
    assert writer.prompt(finished(target, "cut", stop=False)) == "unfinished"
    assert writer.prompt(finished(target, " \n")) == "empty"
    assert writer.prompt(finished(target, "on and on it goes " * 9)) == "repetitive"
    opened = PromptWriter(target, ["Explain"], 1.0, 64, seed=0)
    request = next(opened.requests(5))
    assert request.key == "5"
    assert target.tokenizer.decode(request.prompt_ids) == "<|im_start|>user\nExplain"
    assert opened.prompt(finished(target, " rain", key="5")) == user("Explain rain")
    assert opened.prompt(finished(target, "", key="5")) == "empty"
    assert len(request.prompt_ids) + request.max_new_tokens < opened.max_length


def test_templates_that_end_a_turn_in_plain_text(target):
    target.tokenizer.chat_template = (
        "{% for m in messages %}[ASK] {{ m['content'] }} [/ASK]{% endfor %}"
    )
    writer = PromptWriter(target, [], 0.0, 64, seed=0)
    assert writer.prompt(finished(target, "Why? [/ASK] Because", stop=False)) == user("Why?")
    assert writer.prompt(finished(target, "Why", stop=False)) == "unfinished"


def test_models_without_a_template_write_beginnings(target):
    target.tokenizer.chat_template = None
    writer = PromptWriter(target, [], 0.0, 64, seed=0)
    text = "The river ran past the old mi"
    assert writer.prompt(finished(target, text, stop=False)) == {
        "text": "The river ran past the old"
    }
    limits = {request.max_new_tokens for request in itertools.islice(writer.requests(0), 50)}
    assert min(limits) >= 16
    assert max(limits) <= 64
    assert len(limits) > 10


def test_openings(tmp_path, target):
    assert load_openings("none") == []
    assert len(set(load_openings("builtin"))) == 60
    path = tmp_path / "openings.txt"
    path.write_text("Why\n\nRead:\\n\\n\n")
    assert load_openings(str(path)) == ["Why", "Read:\n\n"]
    path.write_text("\n")
    with pytest.raises(UserError, match="is empty; write one beginning"):
        load_openings(str(path))
    with pytest.raises(UserError, match=r"openings='/nowhere' cannot be read"):
        load_openings("/nowhere")
    writer = PromptWriter(target, ["Why"], 0.5, 64, seed=3)
    opened = [
        len(request.prompt_ids) > len(writer.prefix_ids)
        for request in itertools.islice(writer.requests(0), 400)
    ]
    assert 150 < sum(opened) < 250


class FakeEngine:
    """Answers request n with a text made of n; every fifth is unfinished; stops the world after `life` answers."""

    def __init__(self, target, life=10**9):
        self.target = target
        self.life = life
        self.keys = []

    def run(self, requests, sampling, seed):
        for request in requests:
            if len(self.keys) == self.life:
                raise KeyboardInterrupt
            self.keys.append(int(request.key))
            yield finished(
                self.target, distinct(self.keys[-1]), self.keys[-1] % 5 != 4, request.key
            )


def magpie(target, engine, path, count, minutes=None, settings=None):
    writer = PromptWriter(target, [], 0.0, 64, seed=0)
    keep = Filter(PromptLimits())
    with closing(JsonlLog(path, settings or {"seed": 0})) as log:
        return write_prompts(
            writer,
            lambda start: engine.run(writer.requests(start), None, 0),
            log,
            keep,
            count,
            minutes,
            0,
        ), keep


def test_magpie_stops_at_the_count_and_goes_on_after_a_kill(tmp_path, target):
    whole, keep = magpie(target, FakeEngine(target), tmp_path / "a.partial", 24)
    assert len(whole) == 24
    assert keep.dropped == {"unfinished": 5}
    with pytest.raises(KeyboardInterrupt):
        magpie(target, FakeEngine(target, life=13), tmp_path / "b.partial", 24)
    with (tmp_path / "b.partial").open("ab") as file:
        file.write(b'{"number": 13, "res')  # killed while writing
    second = FakeEngine(target)
    resumed, keep_resumed = magpie(target, second, tmp_path / "b.partial", 24)
    assert second.keys[0] == 13
    assert (resumed, keep_resumed.dropped) == (whole, keep.dropped)
    with pytest.raises(
        UserError, match=r"b.partial was begun with seed=0; use those, or give --overwrite"
    ):
        magpie(target, second, tmp_path / "b.partial", 24, settings={"seed": 1})


def test_magpie_stops_when_time_is_up(tmp_path, target):
    rows, _ = magpie(target, FakeEngine(target), tmp_path / "a.partial", 10**6, minutes=0.001)
    assert 0 < len(rows) < 10**6


def test_the_magpie_command(tmp_path, target_dir, monkeypatch, capsys):
    from drafttrain.inference import responses

    made = []

    def engine(target, slots, max_length):
        made.append((slots, max_length))
        return FakeEngine(target)

    monkeypatch.setattr(responses, "ResponseEngine", engine)
    output = tmp_path / "p.jsonl"
    args = [
        "--source",
        "magpie",
        "--target",
        target_dir,
        "--output",
        output,
        "--count",
        9,
        "--slots",
        8,
    ]
    assert prompts(*args, "--openings", "none") == 0
    assert made[0][0] == 8
    assert {row["source"] for row in load_jsonl(output)} == {"magpie"}
    assert len(load_jsonl(output)) == 9
    assert sorted(path.name for path in tmp_path.glob("p.*")) == ["p.jsonl", "p.jsonl.summary.json"]
    assert "dropped: unfinished" in capsys.readouterr().out

    monkeypatch.setattr(responses, "choose_slots", lambda target, length: 3)
    assert prompts(*args[:-2], "--openings", "none", "--overwrite") == 0
    assert made[1][0] == 3, "by free memory, as generate does"


@pytest.mark.parametrize("template", [True, False])
def test_requests_run_on_the_real_engine(target, template):
    if not template:
        target.tokenizer.chat_template = None
    writer = PromptWriter(target, load_openings("builtin"), 0.5, 24, seed=0)
    engine = ResponseEngine(target, slots=4, max_length=writer.max_length)
    results = list(
        itertools.islice(engine.run(writer.requests(3), SamplingParams(1.0, 0, 0.9), 0), 8)
    )
    assert all(3 <= int(result.key) < 16 and 0 < len(result.tokens) <= 24 for result in results)
    assert len({result.key for result in results}) == 8
    assert all(isinstance(writer.prompt(result), (str, dict)) for result in results)


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--source magpie", "source=magpie needs --target"),
        ("--source file", "source=file needs --input"),
        ("x.jsonl --url http://a", "url is for source=magpie"),
        ("x.jsonl --max-tokens 5", "min_tokens and max_tokens need --target"),
        ("x.jsonl --max-chars 5", "max_chars=5 is below min_chars=10"),
        ("x.jsonl --max-prompt-tokens 2", "max_prompt_tokens=2 must be at least 8"),
        ("bad.jsonl", "bad.jsonl line 2: not JSON"),
        ("list.jsonl", "list.jsonl line 1: list instead of a JSON object per line"),
        ("x.csv", "x.csv' is a .csv table, and rows are read"),
        (
            "x.json",
            "from JSON lines, one object per line; give its folder as the data set: --source DIR",
        ),
        ("latin.jsonl", "latin.jsonl line 1: not UTF-8 text"),
        ("none.jsonl", "source=file: no prompt is left (unknown format 1; row 1 has label)"),
        ("empty.jsonl", "source=file: no prompt is left (the source is empty)"),
        ("x.jsonl --exclude none.jsonl", "exclude=none.jsonl: no row in a known format"),
        ("x.jsonl --target ./nowhere", "target='./nowhere'"),
    ],
)
def test_bad_input_is_said_in_one_line(args, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "x.jsonl", [{"prompt": distinct(0)}])
    (tmp_path / "bad.jsonl").write_text('{"prompt": "fine here"}\n{"prompt"\n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "x.csv").write_text("prompt\nfine here\n")
    (tmp_path / "x.json").write_text('[\n  {"prompt": "fine here"}\n]\n')
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "café"}\n'.encode("latin-1"))
    (tmp_path / "none.jsonl").write_text('{"label": 1}\n')
    (tmp_path / "empty.jsonl").write_text("")
    if not args.startswith("--source"):
        args = f"--source file --input {args}"
    assert prompts(*args.split(), "--output", tmp_path / "out.jsonl") == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_column_maps():
    assert parse_columns("messages=chat, system = pre") == {"messages": "chat", "system": "pre"}
    assert parse_columns("") == {}
    with pytest.raises(UserError, match=r"columns='messages' must read OURS=THEIRS"):
        parse_columns("messages")
