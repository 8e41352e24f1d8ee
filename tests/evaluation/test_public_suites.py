"""Each public benchmark's own format, written on the spot with made-up rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from drafttrain.cli import main
from drafttrain.errors import UserError
from drafttrain.evaluation import bfcl, prepare_suite
from drafttrain.evaluation.suites import Question, load_suite, public_suites
from drafttrain.files import write_jsonl
from tests.files import dump_json

TABLE = yaml.safe_load(Path(__file__).with_name("public_rows.yaml").read_text())
ROWS = {name: entry["row"] for name, entry in TABLE.items()}


def write(path, *rows):
    write_jsonl(path, rows)
    return path


@pytest.mark.parametrize("name", ROWS)
def test_rows_in_the_benchmarks_own_format(tmp_path, name):
    suite = load_suite(f"{name}:{write(tmp_path / 'rows.jsonl', ROWS[name])}")
    (question,) = suite.questions
    assert suite.license == public_suites()[name].license
    if "question" in TABLE[name]:
        assert question == Question.from_row(TABLE[name]["question"], 0, "")
    elif name == "humaneval":
        assert (question.question_id, question.category) == ("HumanEval/0", "humaneval")
        assert "```python\ndef f(x):\n    '''One more.'''\n```" in question.turns[0]
        assert "return x" not in question.turns[0]
    else:
        assert question.question_id == "f001"
        assert question.turns[0].endswith("\n\nIt rained.")


def test_every_public_suite_is_covered():
    # Those with images: tests/evaluation/test_image_suites.py.
    texts = {name for name, suite in public_suites().items() if not suite.sees}
    assert set(ROWS) == {name for name in texts if not name.startswith("speed_bench_")}


def test_longbench_of_the_first_version_and_starter_code(tmp_path):
    row = {
        "input": "Summarize it.",
        "context": "A story.",
        "answers": [],
        "length": 2,
        "dataset": "qasper",
        "_id": "1f",
    }
    (question,) = load_suite(f"longbench:{write(tmp_path / 'l.jsonl', row)}").questions
    assert question == Question("1f", "qasper", ("A story.\n\nSummarize it.",))
    row = {**ROWS["livecodebench"], "starter_code": "class Solution:"}
    (question,) = load_suite(f"livecodebench:{write(tmp_path / 'c.jsonl', row)}").questions
    assert (
        "```python\nclass Solution:\n```" in question.turns[0] and "stdin" not in question.turns[0]
    )


def test_alpaca_without_input(tmp_path):
    path = write(tmp_path / "a.jsonl", {**ROWS["alpaca"], "input": ""})
    assert load_suite(f"alpaca:{path}").questions[0].turns == ("Sort these.",)


def test_files_as_the_hub_keeps_them(tmp_path):
    """Folders by config and split, parquet; OpenAI's own gzipped lines; a JSON array."""
    table = pyarrow.Table.from_pylist([ROWS["gsm8k"]])
    for place in ("main/test", "main/train", "socratic/test"):
        path = tmp_path / "hub" / f"{place}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, path)
    assert len(load_suite(f"gsm8k:{tmp_path / 'hub'}").questions) == 1
    zipped = tmp_path / "HumanEval.jsonl.gz"
    zipped.write_bytes(gzip.compress(json.dumps(ROWS["humaneval"]).encode()))
    assert load_suite(f"humaneval:{zipped}").questions[0].question_id == "HumanEval/0"
    array = tmp_path / "alpaca_data.json"
    dump_json(array, [ROWS["alpaca"]] * 2)
    assert len(load_suite(f"alpaca:{array}").questions) == 2
    csv = tmp_path / "test.csv"
    csv.write_text('id,article,highlights\n7,"It rained.",Rain.\n')
    assert load_suite(f"cnn_dm:{csv}").questions[0].question_id == "7"


def test_fastchat_rows_pass_under_every_name(tmp_path):
    path = write(tmp_path / "q.jsonl", {"question_id": 3, "category": "x", "turns": ["a"]})
    for name in ("gsm8k", "humaneval", "mt_bench"):
        assert load_suite(f"{name}:{path}").questions == (Question("3", "x", ("a",)),)


def test_from_the_hub(monkeypatch):
    import datasets

    asked = []

    def load(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list([{"turns": ["a"], "question_id": 1, "category": "qa"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    load_suite("gsm8k")
    load_suite("spec_bench")
    load_suite("speed_bench_8k")
    assert asked[0] == (("openai/gsm8k", "main"), {"split": "test"})
    assert asked[1][0] == ("json",)
    assert asked[1][1]["data_files"].endswith("Spec-Bench/main/data/spec_bench/question.jsonl")
    assert asked[2] == (("nvidia/SPEED-Bench", "throughput_8k"), {"split": "test"})


def bfcl_folder(folder):
    """The Hub's layout: a file per category, descriptions of the functions of several turns, and files of other forms."""
    turns = [[{"role": "user", "content": text}] for text in ("List the files.", "Sort them.")]
    row = {
        "id": "multi_turn_miss_func_7",
        "question": [*turns, [], turns[0]],
        "involved_classes": ["GorillaFileSystem"],
    }
    row |= {
        "path": ["GorillaFileSystem.ls"],
        "missed_function": {"2": ["sort"]},
        "initial_config": {},
    }
    functions = [
        {
            "name": name,
            "description": f"Runs {name}.",
            "parameters": {"type": "dict", "properties": {}},
            "response": {},
        }
        for name in ("ls", "sort", "cat")
    ]
    for name in ("multi_turn_func_doc", "possible_answer"):
        (folder / name).mkdir(parents=True)
    write(folder / "multi_turn_func_doc" / "gorilla_file_system.json", *functions)
    write(folder / "BFCL_v3_multi_turn_miss_func.json", row)
    write(folder / "BFCL_v3_live_multiple.json", ROWS["bfcl"])
    write(folder / "BFCL_v3_rest.json", {"id": "rest_0"})
    write(
        folder / "possible_answer" / "BFCL_v3_live_multiple.json",
        {"id": "live_multiple_3-2-0", "ground_truth": []},
    )
    return folder


def test_bfcl_as_the_hub_keeps_it(tmp_path, monkeypatch):
    folder = bfcl_folder(tmp_path / "hub")
    first, second = load_suite(f"bfcl:{folder}").questions
    assert (first.category, second.category) == ("live_multiple", "multi_turn_miss_func")
    assert second.turns == ("List the files.", "Sort them.")  # the third turn would add a function
    assert [tool["function"]["name"] for tool in second.inputs.tools] == ["ls", "cat"]
    assert second.inputs.tools[0]["function"].keys() == {"name", "description", "parameters"}
    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, **more: asked.update(more) or str(folder)
    )
    assert load_suite("bfcl").digest == load_suite(f"bfcl:{folder}").digest
    assert (
        asked["repo_type"] == "dataset" and "multi_turn_func_doc/*.json" in asked["allow_patterns"]
    )


def test_subsets_of_speculators_are_its_categories(tmp_path, monkeypatch):
    """Each of the nine files is a category; others in the folder are not read."""
    asked = {}
    for name in ("HumanEval", "qa", "writing", "notes"):
        write(tmp_path / f"{name}.jsonl", {"prompt": f"From {name}."})
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda repo, **more: asked.update(repo=repo, **more) or str(tmp_path),
    )
    questions = load_suite("speculator_benchmarks").questions
    assert [(q.category, q.turns[0]) for q in questions] == [
        ("HumanEval", "From HumanEval."),
        ("qa", "From qa."),
        ("writing", "From writing."),
    ]
    assert asked["repo"] == "RedHatAI/speculator_benchmarks" and len(asked["allow_patterns"]) == 9


def test_the_full_set_of_mbpp(tmp_path):
    row = {**ROWS["mbpp"], "text": "Return the sum."}
    del row["prompt"]
    (question,) = load_suite(f"mbpp:{write(tmp_path / 'full.jsonl', row)}").questions
    assert "Return the sum." in question.turns[0]


def test_speed_bench_as_nvidias_script_writes_it(tmp_path):
    """prepare.py --output_dir FOLDER writes a file per config, with messages in place of turns."""
    row = {**ROWS["speed_bench"], "messages": [{"role": "user", "content": "a"}] * 2}
    del row["turns"]
    write(tmp_path / "qualitative.jsonl", row)
    write(tmp_path / "throughput_8k.jsonl", {**row, "category": "high_entropy"})
    assert load_suite(f"speed_bench:{tmp_path}").questions == (
        Question("q-1", "coding", ("a", "a")),
    )
    (question,) = load_suite(f"speed_bench_8k:{tmp_path}").questions
    assert question.category == "high_entropy"
    row["messages"] = [{"role": "user", "content": "FULL BENCHMARK DATA SHOULD BE FETCHED FROM"}]
    write(tmp_path / "qualitative.jsonl", row)
    with pytest.raises(UserError, match=r"1 rows hold only a note .* suites prepare"):
        load_suite(f"speed_bench:{tmp_path}")


STAND_IN = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--config")
parser.add_argument("--output_dir", type=pathlib.Path)
args = parser.parse_args()
if args.config == "throughput_2k":
    raise SystemExit("no network")
row = {"question_id": "q-1", "category": args.config, "messages": [{"role": "user", "content": "a"}]}
(args.output_dir / f"{args.config}.jsonl").write_text(json.dumps(row))
"""


def test_speed_bench_is_prepared_by_its_owners_script(tmp_path, monkeypatch, capsys):
    """A stand-in writes what NVIDIA's does; what was written before an error is kept, like a user's files."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(prepare_suite, "SCRIPT", script.as_uri())
    monkeypatch.setattr(prepare_suite, "NEEDS", ("datasets",))
    folder = tmp_path / "speed"
    words = ["suites", "prepare", "speed-bench", "--output", str(folder)]
    assert main(words) == 2
    assert "give --trust-remote-code" in capsys.readouterr().err
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert main([*words, "--trust-remote-code"]) == 2
    assert "stopped at config=throughput_2k (exit status 1" in capsys.readouterr().err
    names = {path.name for path in folder.iterdir()}
    assert names == {"notes.txt", "qualitative.jsonl", "throughput_1k.jsonl"}
    (question,) = load_suite(f"speed_bench_1k:{folder}").questions
    assert question.category == "throughput_1k"

    # Again: what is there is kept and the rest is written.
    kept = (folder / "qualitative.jsonl").read_bytes()
    script.write_text(STAND_IN.replace("throughput_2k", "none").replace('"a"', '"b"'))
    assert main([*words, "--trust-remote-code"]) == 0
    shown = capsys.readouterr().out
    assert "throughput_32k: 1 rows" in shown and f"speed_bench:{folder}" in shown
    assert (folder / "qualitative.jsonl").read_bytes() == kept
    (question,) = load_suite(f"speed_bench_2k:{folder}").questions
    assert question.turns == ("b",)


def test_a_package_or_script_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    words = [
        "suites",
        "prepare",
        "speed-bench",
        "--output",
        str(tmp_path / "a"),
        "--trust-remote-code",
    ]
    monkeypatch.setattr(prepare_suite, "NEEDS", ("tokens_of_nobody",))
    assert main(words) == 2
    assert "needs tokens_of_nobody, which is not installed: pip install" in capsys.readouterr().err
    monkeypatch.setattr(prepare_suite, "NEEDS", ())
    monkeypatch.setattr(prepare_suite, "SCRIPT", (tmp_path / "none.py").as_uri())
    assert main(words) == 2
    assert "cannot be downloaded from file:" in capsys.readouterr().err


def test_bfcl_without_what_it_needs(tmp_path):
    folder = bfcl_folder(tmp_path / "hub")
    (folder / "multi_turn_func_doc" / "gorilla_file_system.json").rename(
        tmp_path / "elsewhere.json"
    )
    bfcl._functions.cache_clear()
    with pytest.raises(
        UserError,
        match=r"no .*gorilla_file_system\.json, which describes functions; give the folder",
    ):
        load_suite(f"bfcl:{folder / 'BFCL_v3_multi_turn_miss_func.json'}")
    with pytest.raises(UserError, match="no folder with files as BFCL_v"):
        load_suite(f"bfcl:{tmp_path}")
    path = write(tmp_path / "row.json", {**ROWS["bfcl"], "function": [{"name": "f"}]})
    with pytest.raises(
        UserError, match="row 1 has the keys id, question, function, which is not bfcl's format"
    ):
        load_suite(f"bfcl:{path}")


def test_offline_says_what_to_do(monkeypatch):
    import datasets

    def load(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\n(trace)")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        UserError,
        match=r"(?s)^suite='gsm8k': source='openai/gsm8k' cannot be read \(Couldn't [^\n]*gsm8k:FILE$",
    ):
        load_suite("gsm8k")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}], "row 1 has the keys text, which is not gsm8k's format"),
        ([{"question": "a"}, {"question": " "}], "row 2: turns.0="),
        ([["a"]], "row 1 has the keys of a list"),
        ([{"turns": "abc"}], "row 1: turns=.abc.: input should be a valid list"),
        (
            [{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM ..."]}, {"turns": ["a"]}],
            "1 rows hold only a note",
        ),
        ([], "holds no questions"),
    ],
)
def test_what_is_not_the_benchmark_is_refused(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        load_suite(f"gsm8k:{write(tmp_path / 'rows.jsonl', *rows)}")


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_suite(f"gsm8k:{tmp_path / 'nope.jsonl'}")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet")
    with pytest.raises(UserError, match=r"broken\.parquet. cannot be read"):
        load_suite(f"gsm8k:{broken}")
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / name, ROWS["gsm8k"])
    with pytest.raises(UserError, match="none of split 'test'"):
        load_suite(f"gsm8k:{tmp_path}")
