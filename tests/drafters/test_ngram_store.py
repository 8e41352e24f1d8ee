"""The n-gram store: counts by hand, files, names and the command; tests/drafters/test_suffix.py drafts with it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from drafttrain import cli
from drafttrain.data.store import Store
from drafttrain.drafters.common import ngram_table as module
from drafttrain.drafters.common.ngram_table import NgramTable
from drafttrain.drafters.registry import load_drafter
from drafttrain.errors import UserError
from drafttrain.files import write_jsonl
from drafttrain.target import tokenizer_fingerprint
from tests.drafters.helpers import make_drafter

CORPUS = [[1, 2, 3, 4], [1, 2, 3, 5], [9, 2, 3, 5], [7, 7, 7]]


documents = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8)


@settings(max_examples=60, deadline=None)
@given(documents=documents, max_n=st.integers(1, 4), block=st.integers(1, 30))
def test_counts_are_those_of_a_plain_loop(documents, max_n, block):
    """Counting in blocks adds up; no context crosses documents."""
    wanted: dict[tuple[int, ...], Counter] = {}
    for document in documents:
        for n in range(1, max_n + 1):
            for i in range(len(document) - n):
                wanted.setdefault(tuple(document[i : i + n]), Counter())[document[i + n]] += 1
    whole = module._BLOCK
    module._BLOCK = block
    try:
        table = NgramTable.build(documents, max_n)
    finally:
        module._BLOCK = whole
    assert len(table.hashes) == len(wanted)
    for context, counts in wanted.items():
        shares = {token: count / counts.total() for token, count in counts.items()}
        assert dict(table.likeliest(context)) == pytest.approx(shares)
    assert table.likeliest((12345,)) == []


def test_memory_is_bounded(monkeypatch):
    table = NgramTable.build(CORPUS, max_n=2, max_entries=3)
    assert len(table.tokens) == 3
    assert table.likeliest((2,)) == [(3, 1.0)]  # the most frequent pairs stay
    monkeypatch.setattr(module, "_FOLLOWERS", 2)
    many = NgramTable.build([[1, 5], [1, 6], [1, 7], [1, 6], [1, 7]], max_n=1)
    assert many.likeliest((1,)) == [(6, 0.5), (7, 0.5)]


def test_names_and_files(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path / "head")
    file = tmp_path / "store.safetensors"
    NgramTable.build(CORPUS).save(file, tokenizer_fingerprint(target.tokenizer))
    drafter = load_drafter(f"ngram_store:{file},grow=true,min_n=3", target)
    assert (drafter.kind, drafter.table.max_n, drafter.min_n, drafter.memory is not None) == (
        "ngram_store",
        4,
        3,
        True,
    )
    both = load_drafter(f"{tmp_path / 'head'}+ngram_store:{file}", target)
    assert both.kind == "eagle3+ngram_store" and both.side.min_n == 2
    assert load_drafter("ngram:5", target).max_n == 5
    assert load_drafter("ngram:max_n=6,min_n=2", target).min_n == 2
    assert load_drafter("ngram+ngram_store:min_n=3", target).side.min_n == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ngram:size=3", "'size' is not an option of ngram; there are max_n, min_n"),
        (
            "ngram:8,2",
            "sets max_n twice; write NAME=VALUE for options after the first, of max_n, min_n",
        ),
        ("ngram:max_n=x", "max_n='x' is not a valid int; write for example ngram:max_n=8"),
        ("ngram_store:grow=maybe", "grow='maybe' is not a valid bool"),
        (
            "ngram_store:max_n=2",
            "'max_n' is not an option of ngram_store; there are file, grow, min_n, min_p",
        ),
        ("ngram_store:min_p=1.5", "min_p at least 0 and below 1"),
        ("ngram_store:/no/file", "'/no/file' cannot be read"),
        ("ngram_store:{tmp}/other.safetensors", "is not an n-gram store; build one"),
        (
            "ngram_store:{tmp}/foreign.safetensors",
            "was built with tokenizer 'abc', but target 'tiny' has",
        ),
        (
            "ngram+ngram_store:{tmp}/foreign.safetensors",
            "was built with tokenizer 'abc', but target 'tiny' has",
        ),
    ],
)
def test_bad_names_are_named(target, tmp_path, name, message):
    save_file({"x": module.np.zeros(1)}, tmp_path / "other.safetensors")
    NgramTable.build(CORPUS).save(tmp_path / "foreign.safetensors", "abc")
    with pytest.raises(UserError, match=message):
        load_drafter(name.format(tmp=tmp_path), target)


def test_the_command_counts_data_sets_and_texts(target, target_dir, tmp_path, capsys):
    fingerprint = tokenizer_fingerprint(target.tokenizer)
    with Store(tmp_path / "data", {"target": target.identity()}, 0) as data:
        row = {
            "id": "a",
            "tokens": [9, 8, 1, 2, 1, 2, 30],
            "spans": [[2, 6]],
            "finish": ["stop"],
            "source": "test",
        }
        data.append(row)
    file = str(tmp_path / "out" / "store.safetensors")
    assert cli.main(["ngram-store", "--data", str(tmp_path / "data"), "--output", file]) == 0
    printed = capsys.readouterr().out
    assert "contexts" in printed and f"--drafter suffix:{file}" in printed
    table, written = NgramTable.load(file)
    assert written == fingerprint
    assert table.likeliest((1, 2)) == [(1, 1.0)]  # 30 is not part of the response
    assert table.likeliest((9, 8)) == [(1, 1.0)]
    lines = [{"text": "abab"}, {"messages": [{"role": "user", "content": "abab"}]}]
    write_jsonl(tmp_path / "c.jsonl", lines)
    (tmp_path / "c.txt").write_text("abab\nabab\n")
    a, b = target.tokenizer("ab").input_ids
    for name in ("c.jsonl", "c.txt"):
        arguments = [
            "ngram-store",
            "--text",
            str(tmp_path / name),
            "--target",
            str(target_dir),
            "--output",
            file,
        ]
        assert cli.main(arguments) == 0
        assert NgramTable.load(file)[0].likeliest((a,))[0] == (b, 1.0)
        assert load_drafter(f"ngram_store:{file}", target)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --data DIR or --text FILE"),
        (["--text", "{tmp}/empty.txt"], "needs --target"),
        (["--data", "/no/data"], "data='/no/data' is not a data set"),
        (["--text", "{tmp}/empty.txt", "--target", "{target}"], "has no two tokens in a row"),
        (["--text", "{tmp}/bad.jsonl", "--target", "{target}"], "line 1: no text and no messages"),
    ],
)
def test_bad_arguments_are_named(arguments, message, target_dir, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"other": 1}\n')
    filled = [part.format(target=target_dir, tmp=tmp_path) for part in arguments]
    assert cli.main(["ngram-store", *filled, "--output", str(tmp_path / "o.safetensors")]) == 2
    assert message in capsys.readouterr().err
