from __future__ import annotations

import itertools
import json
import threading

import pytest
import torch

from drafttrain.data import conversation
from drafttrain.data.chat import render_text
from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.data.store import FeatureStore, Share, Store, load_records, read_meta
from drafttrain.files import write_jsonl
from drafttrain.target import Target
from tests.data import commands
from tests.data.templates.families import FOLDER
from tests.files import dump_jsonl, load_json


def chat(key: str, *users: str, system: str = "") -> dict:
    messages = [{"role": "system", "content": system}] if system else []
    for user in users:
        messages += [
            {"role": "user", "content": user},
            {"role": "assistant", "content": "to be dropped"},
        ]
    return {"id": key, "messages": messages, "source": "test"}


@pytest.fixture
def prompts(tmp_path):
    rows = [
        chat(f"c{i}", *["say", "more", "again"][: 1 + i % 3], system="be kind" * (i % 2))
        for i in range(12)
    ]
    rows += [{"id": f"t{i}", "text": "once upon " * (i + 1)} for i in range(3)]
    path = tmp_path / "prompts.jsonl"
    write_jsonl(path, rows)
    return path


@pytest.fixture
def chatty_dir(target_dir):
    """A target that ends its turns often: turns of a few tokens."""
    target = Target.load(str(target_dir))
    with torch.no_grad():
        target.model.lm_head.weight[257] = target.model.lm_head.weight.mean(0)
        target.model.lm_head.weight.mul_(0.3)
    target.model.save_pretrained(target_dir)
    return target_dir


def generate(target, prompts, output, *more: str) -> int:
    # "auto" would take bfloat16 on CPUs that multiply it natively, where rounding depends on a row's neighbors.
    fixed = ["--max-new-tokens", "20", "--max-length", "400", "--slots", "4", "--dtype", "float32"]
    return commands.generate(target, prompts, output, *fixed, *more)


def test_answers_are_made_while_earlier_ones_are_stored(target_dir, prompts, tmp_path, monkeypatch):
    made = threading.Event()
    add = Store.add
    record = Conversation.record
    numbers = itertools.count(1)

    def recorded(*args):
        if next(numbers) == 2:
            made.set()
        return record(*args)

    def added(*args):
        assert made.wait(300), "the second answer waits until the first is stored"
        add(*args)

    monkeypatch.setattr(Conversation, "record", recorded)
    monkeypatch.setattr(Store, "add", added)
    assert generate(target_dir, prompts, tmp_path / "data") == 0
    assert len(list(load_records(tmp_path / "data"))) == 15


@pytest.mark.thorough
def test_conversations_are_stored_with_provenance(chatty_dir, prompts, tmp_path, capsys):
    assert (
        generate(
            chatty_dir,
            prompts,
            tmp_path / "out",
            "--features",
            "1,3",
            "--temperature",
            "1.5",
            "--dtype",
            "float32",
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "15 of 15 conversations" in said
    assert "tokens/s" in said
    assert "truncated" in said
    target = Target.load(str(chatty_dir), "float32")
    rows = {row["id"]: row for row in load_records(tmp_path / "out")}
    assert len(rows) == 15
    turns = []
    for key, row in rows.items():
        assert len(row["spans"]) == len(row["finish"]) >= 1
        for (start, end), finish in zip(row["spans"], row["finish"], strict=True):
            assert (row["tokens"][end - 1] == 257) == (finish == "stop")
            assert 257 not in row["tokens"][start : end - 1]
        assert row["spans"][-1][1] == len(row["tokens"])
        turns.append(len(row["spans"]))
        if key.startswith("c"):
            i = int(key[1:])
            messages = [{"role": "system", "content": "be kind"}] if i % 2 else []
            for user, (start, end) in zip(["say", "more", "again"], row["spans"], strict=False):
                messages.append({"role": "user", "content": user})
                opening = target.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
                assert target.tokenizer.decode(row["tokens"][:start]) == opening
                said = target.tokenizer.decode(row["tokens"][start : end - 1])
                messages.append({"role": "assistant", "content": said})
    assert max(turns) >= 2, "some conversation should have reached its second turn"
    stored = FeatureStore.open(tmp_path / "out", (1, 3))
    for key, row in rows.items():
        want = target.forward(torch.tensor([row["tokens"][:-1]]), (1, 3))
        torch.testing.assert_close(
            stored.get(key)["features"].float(), want.features[0].float(), rtol=1e-2, atol=1e-3
        )
    summary = load_json(tmp_path / "out" / "summary.json")
    assert summary["conversations"] == 15
    assert summary["this_run"]["response_tokens"] == summary["response_tokens"]
    assert summary["truncated_share"] == pytest.approx(
        summary["truncated"] / summary["responses"], abs=1e-3
    )


@pytest.mark.thorough
def test_resumed_run_equals_an_uninterrupted_one(chatty_dir, prompts, tmp_path, capsys):
    assert generate(chatty_dir, prompts, tmp_path / "whole") == 0
    assert generate(chatty_dir, prompts, tmp_path / "torn") == 0
    part = tmp_path / "torn" / "part-0000.jsonl"
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:6]) + lines[6][:-20])
    capsys.readouterr()
    assert generate(chatty_dir, prompts, tmp_path / "torn") == 0
    assert "this run: 9 conversations" in capsys.readouterr().out
    whole, torn = (
        sorted(load_records(tmp_path / name), key=lambda row: row["id"])
        for name in ("whole", "torn")
    )
    assert whole == torn
    assert generate(chatty_dir, prompts, tmp_path / "torn") == 0
    assert "this run: 0 conversations" in capsys.readouterr().out


def check_shares(output) -> None:
    parts = [(output / f"part-000{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    ids = [{json.loads(line)["id"] for line in part} for part in parts]
    assert ids[0]
    assert ids[1]
    assert not ids[0] & ids[1]
    assert len(ids[0] | ids[1]) == 15
    assert all(Share(rank, 2).owns(key) for rank in range(2) for key in ids[rank])
    assert read_meta(output)["counts"]["conversations"] == 15


@pytest.mark.thorough
def test_answers_follow_the_targets_generation_config(chatty_dir, prompts, tmp_path, capsys):
    path = chatty_dir / "generation_config.json"
    rules = {"no_repeat_ngram_size": 2, "min_new_tokens": 4}
    path.write_text(json.dumps({**load_json(path), "repetition_penalty": 1.3, **rules}))
    assert generate(chatty_dir, prompts, tmp_path / "out", "--temperature", "0") == 0
    sampling = read_meta(tmp_path / "out")["sampling"]
    assert sampling["repetition_penalty"] == 1.3
    assert sampling["generation_config"] == rules
    target = Target.load(str(chatty_dir), "float32")
    for row in load_records(tmp_path / "out"):
        for start, end in row["spans"]:
            ids = torch.tensor([row["tokens"][:start]])
            stops = {"eos_token_id": 257, "pad_token_id": 257, "max_new_tokens": end - start}
            want = target.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, **stops
            )
            assert row["tokens"][start:end] == want[0, start:].tolist()


@pytest.mark.thorough
def test_processes_share_the_work(chatty_dir, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert generate(chatty_dir, prompts, tmp_path / "out") == 0
    check_shares(tmp_path / "out")


@pytest.mark.thorough
def test_another_world_size_goes_on(chatty_dir, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert generate(chatty_dir, prompts, tmp_path / "out") == 0
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert generate(chatty_dir, prompts, tmp_path / "out") == 0
    lines = [
        line for part in (tmp_path / "out").glob("part-*") for line in part.read_text().splitlines()
    ]
    assert len(lines) == 15 == len(load_records(tmp_path / "out"))


def test_budgets_cut_and_mark(target_dir, prompts, tmp_path):
    assert generate(target_dir, prompts, tmp_path / "tokens", "--max-tokens", "30") == 0
    rows = load_records(tmp_path / "tokens")
    assert 0 < sum(end - start for row in rows for start, end in row["spans"]) <= 34
    assert generate(target_dir, prompts, tmp_path / "minutes", "--max-minutes", "1e-9") == 0
    assert read_meta(tmp_path / "minutes")["counts"]["conversations"] == 0


def test_long_prompts_are_dropped_and_counted(target_dir, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        json.dumps({"id": "long", "text": "x" * 390})
        + "\n"
        + json.dumps({"id": "ok", "text": "x"})
        + "\n"
    )
    assert generate(target_dir, path, tmp_path / "out") == 0
    assert "dropped: prompt too long 1" in capsys.readouterr().out
    assert list(load_records(tmp_path / "out")["id"]) == ["ok"]


def test_prompts_that_cannot_fit_are_dropped_unread(target_dir, tmp_path, capsys, monkeypatch):
    """30 MB of text take a tokenizer minutes; the longest token says that they cannot fit."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": "long", "text": "x" * 1_000_000}, chat("turns", "hi", "x" * 1_000_000)]
    write_jsonl(path, rows)
    read = []
    plain = conversation.text_ids

    def text_ids(tokenizer, text):
        read.append(len(text))
        return plain(tokenizer, text)

    monkeypatch.setattr(conversation, "text_ids", text_ids)
    monkeypatch.setattr(
        conversation.ChatRenderer,
        "open",
        lambda self, prompt, *rest: read.append(len(str(prompt))) or [1, 2, 3],
    )
    assert generate(target_dir, path, tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "prompt too long 1" in said and "1 of 2 conversations" in said
    assert read and max(read) < 1000


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "5"}, "RANK=5 in the environment must be from 0 to WORLD_SIZE - 1 = 0; unset it"),
        ({"RANK": "x"}, "RANK='x' in the environment is not a whole number; unset it"),
        (
            {"RANK": "0", "WORLD_SIZE": "many"},
            "WORLD_SIZE='many' in the environment is not a whole number",
        ),
        (
            {"RANK": "-1", "WORLD_SIZE": "2"},
            "RANK=-1 in the environment must be from 0 to WORLD_SIZE - 1 = 1",
        ),
    ],
)
def test_a_rank_without_a_share_is_refused(
    target_dir, prompts, tmp_path, capsys, monkeypatch, variables, message
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert generate(target_dir, prompts, tmp_path / "out") == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.csv", "id,text\na,b\n", "p.csv' is a .csv table, and rows are read from JSON lines"),
        ("p.json", '[{"id": "a", "text": "b"}]', "p.json' is a JSON array, and rows are read from"),
    ],
)
@pytest.mark.parametrize("backend", ["local", "existing"])
def test_tables_and_arrays_are_refused_with_the_fix(
    target_dir, tmp_path, capsys, name, content, message, backend
):
    path = tmp_path / name
    path.write_text(content)
    assert generate(target_dir, path, tmp_path / "out", "--backend", backend) == 2
    error = capsys.readouterr().err
    assert message in error and "drafttrain prompts --source DIR writes them" in error


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", r"prompts=.* is empty"),
        ("nonsense\n", r"prompts.jsonl line 1: not JSON"),
        ('{"text": "a"}\n', r'prompts.jsonl line 1: needs an "id"'),
        ('{"id": "a"}\n', r'prompts.jsonl line 1: needs "text", or "messages"'),
        ('{"id": "a", "messages": [{"role": "user"}]}\n', r'needs "text", or "messages" as a list'),
        (
            '{"id": "a", "messages": [{"role": "system", "content": "b"}]}\n',
            r"no message has the role user",
        ),
        (
            '{"id": "a", "text": "b"}\n\n{"id": "a", "text": "c"}\n',
            r"prompts.jsonl line 3: id='a' occurs twice",
        ),
        (
            '{"id": "a/0", "text": "b"}\n{"id": "a", "messages": [{"role": "user", "content": "b"}, '
            '{"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]}\n',
            r"id='a/0' is also that of a part of 'a', a conversation of 2 turns; rename one",
        ),
    ],
)
def test_bad_prompts(target_dir, tmp_path, capsys, lines, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    assert generate(target_dir, path, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--features", "2,99"],
            "features='2,99' must be none, default, wide, or distinct layers from 0 to 4",
        ),
        (["--features", "x"], "features='x' must be none, default"),
        (["--features", "1", "--backend", "openai"], "features='1' needs --backend local"),
        (["--backend", "openai"], "backend=openai needs --url"),
    ],
)
def test_bad_options(target_dir, prompts, tmp_path, capsys, options, message):
    assert generate(target_dir, prompts, tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err


def test_other_settings_missing_prompts_and_overwrite(
    target_dir, prompts, tmp_path, capsys, monkeypatch
):
    assert generate(target_dir, tmp_path / "none.jsonl", tmp_path / "out") == 2
    assert "no such file" in capsys.readouterr().err
    assert generate(target_dir, prompts, tmp_path / "out", "--max-tokens", "1") == 0
    assert generate(target_dir, prompts, tmp_path / "out", "--seed", "5") == 2
    assert "begun with sampling.seed=0, this run has sampling.seed=5" in capsys.readouterr().err
    assert (
        generate(
            target_dir, prompts, tmp_path / "out", "--seed", "5", "--overwrite", "--max-tokens", "1"
        )
        == 0
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert generate(target_dir, prompts, tmp_path / "out", "--overwrite") == 2
    assert "overwrite=True with several processes" in capsys.readouterr().err


# -- rendering ----------------------------------------------------------------------------------------------------


def test_truncated_or_full_conversations_end(target):
    renderer = ChatRenderer(target)
    turns = [[{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]]
    cut = Conversation("a", "", turns)
    cut.open(renderer)
    cut.accept([1, 2, 3], "length")
    assert cut.next_turn(renderer, 1000) is None
    full = Conversation("b", "", turns)
    length = len(full.open(renderer))
    full.accept([1, 257], "stop")
    assert full.next_turn(renderer, length + 10) is None
    assert full.record(renderer)["tokens"] == full.tokens
    assert full.record(renderer)["spans"] == [[length, length + 2]]


def test_an_answer_that_the_template_would_trim_stays_as_it_was_sampled(target):
    tokenizer = target.tokenizer
    trimmed = tokenizer.chat_template.replace("['content']", "['content'] | trim")
    tokenizer.chat_template = trimmed
    renderer = ChatRenderer(target)
    turns = [[{"role": "user", "content": word}] for word in ("one", "two", "three")]
    it = Conversation("a", "", turns)
    it.open(renderer)
    said = [*tokenizer(" so\n", add_special_tokens=False)["input_ids"], renderer.closing_id]
    for _ in turns[1:]:
        it.accept(said, "stop")
        assert it.next_turn(renderer, 1000) is not None and not it.follows
    assert " so\n" not in render_text(tokenizer, it.messages)
    assert [it.tokens[start:end] for start, end in it.spans] == [said, said]


def test_turn_marker_that_is_no_eos_still_ends_responses(target):
    target.eos_ids = [3]
    renderer = ChatRenderer(target)
    assert renderer.stop_ids == {3, 257}
    assert renderer.closing_id == 257


def test_base_models_need_text(target_dir, prompts, tmp_path, capsys):
    (target_dir / "chat_template.jinja").unlink()
    assert generate(target_dir, prompts, tmp_path / "out") == 2
    assert "has no chat template, so `messages` cannot be rendered" in capsys.readouterr().err


def test_existing_conversations_keep_their_answers(target_dir, tmp_path, capsys):
    rows = [
        {
            "id": "a",
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello you"},
            ],
        },
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]},
        {
            "id": "long",
            "messages": [
                {"role": "user", "content": "x" * 90},
                {"role": "assistant", "content": "never"},
            ],
        },
        {
            "id": "cut",
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "y" * 90},
            ],
        },
    ]
    path = tmp_path / "chats.jsonl"
    write_jsonl(path, rows)
    options = ["--backend", "existing", "--max-length", "80"]
    assert generate(target_dir, path, tmp_path / "out", *options) == 0
    said = capsys.readouterr().out
    assert "3 of 4 conversations" in said
    assert "33.3 % truncated at --max-length: raise it" in said
    assert "answer beyond max length 1" in said
    records = {row["id"]: row for row in load_records(tmp_path / "out")}
    tokenizer = Target.load(str(target_dir)).tokenizer
    (start, end) = records["a"]["spans"][0]
    assert tokenizer.decode(records["a"]["tokens"][start:end]) == "hello you<|im_end|>"
    assert records["a"]["finish"] == ["stop"]
    assert records["cut"]["finish"] == ["length"]
    assert len(records["cut"]["tokens"]) == 80
    # Run again, nothing is added; other settings are refused.
    assert generate(target_dir, path, tmp_path / "out", *options) == 0
    assert len(list(load_records(tmp_path / "out"))) == 3


def test_existing_conversations_in_several_rows_are_counted_once(target_dir, tmp_path, capsys):
    (target_dir / "chat_template.jinja").write_text((FOLDER / "qwen3.jinja").read_text())
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "so"}
    rows = [{"id": id, "messages": [{"role": "user", "content": "hi"}, answer] * 2} for id in "ab"]
    path = tmp_path / "chats.jsonl"
    write_jsonl(path, rows)
    assert generate(target_dir, path, tmp_path / "out", "--backend", "existing") == 0
    said = capsys.readouterr().out
    assert "4 rows, because the chat template rewrites" in said
    assert "2 of 2 conversations" in said and "this run: 2 conversations" in said


def test_prompts_that_the_template_does_not_read_name_the_fix(target_dir, tmp_path, capsys):
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    rows = [
        {"id": id, "messages": [{"role": "user", "content": "hi"}], "tools": tools} for id in "ab"
    ]
    path = tmp_path / "tools.jsonl"
    write_jsonl(path, rows)
    assert generate(target_dir, path, tmp_path / "out") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        "no prompt could be rendered; change those prompts" in error
        and "does not read `tools`; drop them;" in error
    )
    del rows[0]["tools"]
    write_jsonl(path, rows)
    assert generate(target_dir, path, tmp_path / "out") == 0
    *_, last, _, _ = capsys.readouterr().out.splitlines()
    assert (
        last.startswith("failed: 1 conversation (chat template 1)")
        and "change those prompts" in last
    )
    assert "run the same command again" not in last


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "q", "messages": [{"role": "user", "content": "hi"}]}, "empty mask"),
        ({"id": "q", "text": "no turns"}, "no conversation in a known format"),
    ],
)
def test_existing_conversations_that_teach_nothing(target_dir, tmp_path, capsys, row, message):
    path = tmp_path / "chats.jsonl"
    dump_jsonl(path, [row])
    assert generate(target_dir, path, tmp_path / "out", "--backend", "existing") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        error.startswith("error: no row can be used (unusable row 1; the last: ")
        and message in error
    )
    answered = {
        "id": "good",
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
    }
    dump_jsonl(path, [row, answered])
    assert generate(target_dir, path, tmp_path / "out", "--backend", "existing") == 0
    out = tmp_path / "out"
    *_, last, wrote, then = capsys.readouterr().out.splitlines()
    assert last.startswith(
        f"failed: 1 conversation (unusable row 1), listed in {out}/failed-0000.jsonl; unusable row: mend"
    )
    listed = load_json(out / "failed-0000.jsonl")
    assert listed["id"] == "q" and message in listed["detail"]
    assert wrote == f"wrote {out}"
    assert (
        then
        == f"next: drafttrain train RECIPE target={target_dir} data={out} output_dir={tmp_path / 'drafter'}"
    )
