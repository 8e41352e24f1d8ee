"""The n-gram store: counts by hand, memory bounds, files, and drafting from corpus and committed tokens together."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from drafttrain import cli
from drafttrain.data.store import Store
from drafttrain.drafters.combined import CombinedDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram_store import model as module
from drafttrain.drafters.ngram_store.model import NgramStoreDrafter, NgramTable, _hash
from drafttrain.drafters.registry import load_drafter
from drafttrain.errors import UserError
from drafttrain.inference import generate, generate_batch
from drafttrain.target import tokenizer_fingerprint
from tests.drafters.test_combined import paths
from tests.drafters.test_eagle3 import make_drafter

CORPUS = [[1, 2, 3, 4], [1, 2, 3, 5], [9, 2, 3, 5], [7, 7, 7]]


def stored(tmp_path, documents, fingerprint="", **options):
    NgramTable.build(documents).save(tmp_path / "store.safetensors", fingerprint)
    return NgramStoreDrafter(str(tmp_path / "store.safetensors"), **options)


def session_after(drafter, tokens):
    ids = torch.tensor(tokens)
    session = drafter.start(ids[:-1], 100)
    session.extend(ids[1:], torch.empty(len(tokens) - 1, 0))
    return session


def propose(drafter, tokens, spec):
    return session_after(drafter, tokens).propose(TreeSpec.parse(spec))


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
    whole, module._BLOCK = module._BLOCK, block
    try:
        table = NgramTable.build(documents, max_n)
    finally:
        module._BLOCK = whole
    assert len(table.hashes) == len(wanted)
    assert all(table.followers(_hash(context)) == counts for context, counts in wanted.items())
    assert table.followers(12345) == {}


def test_memory_is_bounded(monkeypatch):
    table = NgramTable.build(CORPUS, max_n=2, max_entries=3)
    assert len(table.tokens) == 3
    assert table.followers(_hash([2])) == {3: 3}  # the most frequent pairs stay
    monkeypatch.setattr(module, "_FOLLOWERS", 2)
    many = NgramTable.build([[1, 5], [1, 6], [1, 7], [1, 6], [1, 7]], max_n=1)
    assert many.followers(_hash([1])) == {6: 2, 7: 2}
    monkeypatch.setattr(module, "_LIVE_CONTEXTS", 3)
    session = session_after(NgramStoreDrafter(min_n=1, max_n=1), [1, 2, 3, 4, 5])
    assert session.live.followers(_hash([1])) == {}
    assert session.live.followers(_hash([4])) == {5: 1}


def test_likely_paths_come_first(tmp_path):
    drafter = stored(tmp_path, CORPUS)
    assert paths(propose(drafter, [8, 2], "chain:2")) == {(3,), (3, 5)}
    # After 1 2 3 both 4 and 5 came once; after 2 3 it was 5 twice.
    tree = propose(drafter, [9, 2, 3], "fanout:2")
    assert tree.tokens.tolist() == [5, 4]
    # After 9 2 3: one count of one kind leaves half. After 2 3, without 5: 4 once, so half of that.
    assert tree.log_probs.exp().tolist() == pytest.approx([1 / 2, 1 / 4])
    assert len(propose(drafter, [8, 6], "dynamic:3,3,8")) == 0


def test_committed_tokens_count_too(tmp_path):
    drafter = stored(tmp_path, CORPUS)
    assert propose(drafter, [1, 2, 3, 6, 8, 1, 2, 3, 6, 1, 2, 3], "chain:1").tokens.tolist() == [6]
    assert len(propose(drafter, [6], "chain:1")) == 0  # another sequence does not know
    growing = stored(tmp_path, CORPUS, grow=True)
    session_after(growing, [1, 2, 3, 6, 8])
    assert propose(growing, [3, 6], "chain:1").tokens.tolist() == [8]
    alone = NgramStoreDrafter()
    assert propose(alone, [1, 2, 1], "chain:3").tokens.tolist() == [2, 1, 2]


def test_unlikely_paths_are_not_drafted(tmp_path):
    many = [[1, 2, k] for k in range(10, 30)]
    assert len(propose(stored(tmp_path, many, min_p=0.0), [1, 2], "fanout:20")) == 20
    assert len(propose(stored(tmp_path, many, min_p=0.1), [1, 2], "fanout:20")) == 0


@given(
    tokens=st.lists(st.integers(0, 3), min_size=2, max_size=40),
    spec=st.sampled_from(["chain:4", "fanout:3x2x2", "dynamic:5,3,11", "none"]),
)
def test_trees_are_well_formed_and_within_the_spec(tokens, spec):
    spec = TreeSpec.parse(spec)
    tree = session_after(NgramStoreDrafter(), tokens).propose(spec)
    assert len(tree) <= spec.budget
    assert tree.drafted_depth <= spec.depth
    pairs = list(zip(tree.parents, tree.tokens.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    assert all(parent < i for i, parent in enumerate(tree.parents))
    for i, parent in enumerate(tree.parents):
        assert tree.log_probs[i] <= (tree.log_probs[parent] if parent >= 0 else 0)
    for depth, width in enumerate(spec.fanout):
        assert all(
            tree.parents.count(node) <= width
            for node in range(-1, len(tree))
            if (0 if node < 0 else tree.depths[node]) == depth
        )


@pytest.mark.thorough
def test_greedy_output_does_not_change(target, tmp_path):
    prompts = [[5, 9, 11, 9, 11], [7], [3, 3, 3, 8]]
    want = [generate(target, None, prompt, max_new_tokens=24, eos_ids=()).tokens for prompt in prompts]
    fingerprint = tokenizer_fingerprint(target.tokenizer)
    knowing = stored(tmp_path, [p + w for p, w in zip(prompts, want, strict=True)], fingerprint)
    knowing.bind(target)
    combined = CombinedDrafter(make_drafter(target).eval(), knowing)
    for drafter in (knowing, NgramStoreDrafter(grow=True), combined):
        for spec in ("chain:4", "dynamic:4,3,9"):
            got = generate_batch(
                target, drafter, prompts, max_new_tokens=24, spec=TreeSpec.parse(spec), eos_ids=(), max_rows=2
            )
            assert [generation.tokens for generation in got] == want
            if drafter is not combined and drafter is knowing:
                assert min(generation.stats.accepted_length for generation in got) > 3


def test_names_and_files(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path / "head")
    file = tmp_path / "store.safetensors"
    NgramTable.build(CORPUS).save(file, tokenizer_fingerprint(target.tokenizer))
    drafter = load_drafter(f"ngram_store:{file},grow=true,max_n=3", target)
    assert (drafter.max_n, drafter.min_n, drafter.shared is not None) == (3, 1, True)
    both = load_drafter(f"{tmp_path / 'head'}+ngram_store:{file}", target)
    assert both.kind == "eagle3+ngram_store" and both.side.min_n == 2
    assert load_drafter("ngram:5", target).max_n == 5
    assert load_drafter("ngram:max_n=6,min_n=2", target).min_n == 2
    assert load_drafter("ngram+ngram_store:min_n=3", target).side.min_n == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ngram:size=3", "'size' is no option of ngram; there are max_n, min_n"),
        ("ngram:max_n=x", "max_n='x' is no int; write for example ngram:max_n=8"),
        ("ngram_store:grow=maybe", "grow='maybe' is no bool"),
        ("ngram_store:min_n=3,max_n=2", "must satisfy 1 <= min_n <= max_n"),
        ("ngram_store:min_p=1.5", "min_p=1.5 must be at least 0 and below 1"),
        ("ngram_store:/no/file", "'/no/file' cannot be read"),
        ("ngram_store:{tmp}/other.safetensors", "is no n-gram store; build one"),
        ("ngram_store:{tmp}/foreign.safetensors", "was built with tokenizer 'abc', but target 'tiny' has"),
        ("ngram+ngram_store:{tmp}/foreign.safetensors", "was built with tokenizer 'abc', but target 'tiny' has"),
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
        row = {"id": "a", "tokens": [9, 8, 1, 2, 1, 2, 30], "spans": [[2, 6]], "finish": ["stop"], "source": "test"}
        data.append(row)
    file = str(tmp_path / "out" / "store.safetensors")
    assert cli.main(["ngram-store", "--data", str(tmp_path / "data"), "--output", file]) == 0
    assert "contexts" in capsys.readouterr().out
    table, written = NgramTable.load(file)
    assert written == fingerprint
    assert table.followers(_hash([1, 2])) == {1: 1}  # 30 is no part of the response
    assert table.followers(_hash([9, 8])) == {1: 1}
    lines = [{"text": "abab"}, {"messages": [{"role": "user", "content": "abab"}]}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "c.txt").write_text("abab\nabab\n")
    a, b = target.tokenizer("ab").input_ids
    for name in ("c.jsonl", "c.txt"):
        arguments = ["ngram-store", "--text", str(tmp_path / name), "--target", str(target_dir), "--output", file]
        assert cli.main(arguments) == 0
        assert NgramTable.load(file)[0].followers(_hash([a]))[b] == 4
        assert load_drafter(f"ngram_store:{file}", target)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --data DIR or --text FILE"),
        (["--text", "{tmp}/empty.txt"], "needs --target"),
        (["--data", "/no/data"], "data='/no/data' is not a data set"),
        (["--text", "/no/file.txt", "--target", "{target}"], "--text='/no/file.txt' must be an existing file"),
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
