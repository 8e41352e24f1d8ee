"""Prompt suites: files, drafttrain's own, and public benchmarks; taking an even part, and rendering turns as token ids.

drafttrain contains no text of a public benchmark. It reads them from the Hub or from a file in their own format. The license
is the one that the source states; texts of a collection may have others. Every name also reads rows in FastChat's question
format, in which many projects redistribute these benchmarks.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from drafttrain.data.chat import Message, prompt_ids
from drafttrain.errors import UserError
from drafttrain.files import Json, check_json, parse_json, read_jsonl, reading, suites_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# SPEED-Bench replaces texts that NVIDIA may not redistribute by this note; NVIDIA's script fetches them.
_MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
# Spec-Bench reports six tasks and counts MT-bench's eight categories as one of them.
_MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
_ROW_FIX = "correct or delete that row; each needs turns, a list of texts (FastChat's question format)"
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")


# One line without control characters, which would change a terminal's state.
Category = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]


class SuiteRow(TypedDict):
    """A line of a suite's file, in FastChat's question format."""

    question_id: NotRequired[str | int | None]
    category: NotRequired[Category | None]
    turns: Annotated[list[Annotated[str, Field(pattern=r"\S")]], Field(min_length=1)]


@dataclass(frozen=True)
class Question:
    """One row in FastChat's question format. Each turn after the first follows the answer to the turn before."""

    question_id: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """A set of questions. name: as the user gave it; digest: hash of the content; license: of a public suite, else empty."""

    name: str
    questions: tuple[Question, ...]
    digest: str
    license: str = ""


class PublicSuite(NamedTuple):
    """Source of a benchmark and the format of its rows.

    Attributes:
        source: a Hub data set, or the URL of a JSON-lines file. license: as the source states it.
        turns: reads the user's turns of a row. Raises KeyError for a row in another format.
        config, split: of the Hub data set. id_key: key of the row's own id, if it has one.
        category: reads the category of a row; None stands for the suite's name.
    """

    source: str
    license: str
    turns: Callable[[Json], list[str]] = lambda row: row["turns"]
    config: str | None = None
    split: str = "test"
    id_key: str = "question_id"
    category: Callable[[Json], str | None] = lambda row: row.get("category")


def _humaneval(row: Json) -> list[str]:
    task = "Complete this Python function. Answer with the whole function."
    return [f"{task}\n\n```python\n{row['prompt'].rstrip()}\n```"]


def _livecodebench(row: Json) -> list[str]:
    starter = row.get("starter_code")
    form = f"Complete this code:\n\n```python\n{starter}\n```" if starter else "Read from stdin and write to stdout."
    return [f"Solve this task with a Python program.\n\n{row['question_content']}\n\n{form}"]


def _longbench(row: Json) -> list[str]:
    if "choice_A" not in row:  # the first version
        return ["\n\n".join(filter(None, (row["context"], row.get("input"))))]
    choices = "\n".join(f"({letter}) {row[f'choice_{letter}']}" for letter in "ABCD")
    return [
        f"{row['context']}\n\n{row['question']}\n{choices}\n\nAnswer with a letter, and say why in a few sentences."
    ]


PUBLIC: dict[str, PublicSuite] = {
    "spec_bench": PublicSuite(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        "Apache-2.0",
        split="train",
        category=lambda row: "mt_bench" if row.get("category") in _MT_BENCH else row.get("category"),
    ),
    "mt_bench": PublicSuite(
        "HuggingFaceH4/mt_bench_prompts", "Apache-2.0", lambda row: row["prompt"], split="train", id_key="prompt_id"
    ),
    "humaneval": PublicSuite("openai/openai_humaneval", "MIT", _humaneval, id_key="task_id"),
    "gsm8k": PublicSuite("openai/gsm8k", "MIT", lambda row: [row["question"]], "main"),
    "math_500": PublicSuite(
        "HuggingFaceH4/MATH-500",
        "MIT (of MATH)",
        lambda row: [row["problem"]],
        id_key="unique_id",
        category=lambda row: row.get("subject"),
    ),
    "aime_2024": PublicSuite(
        "HuggingFaceH4/aime_2024", "not stated", lambda row: [row["problem"]], split="train", id_key="id"
    ),
    "aime_2025": PublicSuite("math-ai/aime25", "Apache-2.0", lambda row: [row["problem"]], id_key="id"),
    "livecodebench": PublicSuite(
        "lighteval/code_generation_lite",
        "CC",
        _livecodebench,
        "v6",
        category=lambda row: row.get("difficulty"),
    ),
    "longbench": PublicSuite(
        "zai-org/LongBench-v2",
        "Apache-2.0",
        _longbench,
        split="train",
        id_key="_id",
        category=lambda row: row.get("domain") or row.get("dataset"),
    ),
    "alpaca": PublicSuite(
        "tatsu-lab/alpaca",
        "CC BY-NC 4.0",
        lambda row: ["\n\n".join(filter(None, (row["instruction"], row.get("input"))))],
        split="train",
    ),
    "cnn_dm": PublicSuite(
        "abisee/cnn_dailymail",
        "Apache-2.0",
        lambda row: [f"Summarise this article in three or four sentences.\n\n{row['article']}"],
        "3.0.0",
        id_key="id",
    ),
    **{
        name: PublicSuite("nvidia/SPEED-Bench", "NVIDIA evaluation dataset license", config=config)
        for name, config in [("speed_bench", "qualitative")]
        + [(f"speed_bench_{size}", f"throughput_{size}") for size in ("1k", "2k", "8k", "16k", "32k")]
    },
}


def known_suites() -> list[str]:
    """Names that `load_suite` finds without a path: suites that come with drafttrain, then public ones."""
    return [*sorted(path.stem for path in suites_folder().glob("*.jsonl")), *PUBLIC]


def load_suite(name: str) -> Suite:
    """Reads a suite.

    Args:
        name: a JSONL file with `turns` and optionally `question_id` and `category`; a name of `known_suites`; or
            NAME:FILE, a public benchmark in a file of its own format.

    Raises:
        UserError: a missing file, a public benchmark that cannot be loaded, a malformed row, or no rows.
    """
    candidates = [Path(name).expanduser(), suites_folder() / f"{name}.jsonl"]
    path = next((path for path in candidates if path.is_file()), None)
    public, _, file = name.partition(":")
    if path is None and public not in PUBLIC:
        raise UserError(
            f"suite={name!r} is neither a file nor a known suite ({', '.join(known_suites())}); give a JSONL path, a "
            "known name, or NAME:FILE for a public one in a file"
        )
    if path is not None:
        questions = tuple(
            Question(
                str(index if row.get("question_id") is None else row["question_id"]),
                row.get("category") or "all",
                tuple(row["turns"]),
            )
            for index, (_, row) in enumerate(read_jsonl(path, fix=_ROW_FIX, schema=SuiteRow))
        )
        content, license_name = path.read_bytes(), ""
    else:
        questions = tuple(_read_public(public, file))
        texts = [(question.category, question.turns) for question in questions]
        content, license_name = json.dumps(texts, ensure_ascii=False).encode(), PUBLIC[public].license
    if not questions:
        raise UserError(f"suite={name!r} holds no questions; each line is a JSON object with turns")
    return Suite(name, questions, hashlib.sha256(content).hexdigest()[:16], license_name)


def take_evenly(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """Takes `limit` questions in order, evenly from all categories; None takes all. Raises UserError for a limit below 1."""
    if limit is None:
        return list(questions)
    if limit < 1:
        raise UserError(f"limit={limit} must be at least 1; leave it out to take the whole suite")
    count: defaultdict[str, int] = defaultdict(int)
    ranked = []  # (position within the category, index)
    for index, question in enumerate(questions):
        ranked.append((count[question.category], index))
        count[question.category] += 1
    return [questions[index] for index in sorted(index for _, index in sorted(ranked)[:limit])]


def render(tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
    """Token ids of a conversation up to the answer to its last turn. answers: the replies to all turns but the last."""
    messages: list[Message] = []
    for index, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        messages += [{"role": "assistant", "content": answer} for answer in answers[index : index + 1]]
    return prompt_ids(tokenizer, messages)


# -- public benchmarks ------------------------------------------------------------------------------------------------


def _read_public(name: str, path: str) -> Iterator[Question]:
    """Reads a benchmark from a file or folder in its own format or FastChat's; an empty path is the Hub. Raises UserError."""
    suite, where = PUBLIC[name], f"suite={name}:{path}" if path else f"suite={name}"
    rows = _local_rows(where, suite, Path(path).expanduser()) if path else _hub_rows(name, suite)
    masked = 0
    for index, row in enumerate(rows):
        try:
            turns = row["turns"] if "turns" in row else suite.turns(row)
        except (KeyError, TypeError, AttributeError) as error:
            keys = ", ".join(map(str, row)) or "none" if isinstance(row, dict) else f"of a {type(row).__name__}"
            raise UserError(
                f"{where} row {index + 1} has the keys {keys}, which is not {name}'s format (no {error}); "
                "give the benchmark's own file, or JSON lines with turns"
            ) from error
        key, category = row.get("question_id", row.get(suite.id_key)), suite.category(row) or name
        read = {"question_id": index if key is None else key, "category": category, "turns": turns}
        check_json(read, f"{where} row {index + 1}", _ROW_FIX, SuiteRow)
        masked += any(turn.startswith(_MASKED) for turn in turns)
        yield Question(str(read["question_id"]), category, tuple(turns))
    if masked:
        raise UserError(
            f"{where}: {masked} rows hold only a note that their text must be fetched from its owner; prepare the set with "
            f"NVIDIA's specdec_bench (prepare_data.py) and give the result as {name}:FILE"
        )


def _hub_rows(name: str, suite: PublicSuite) -> Iterable[Json]:
    from datasets import load_dataset

    with reading(suite.source, f"suite={name!r}: source", f"go online once, or give its file as {name}:FILE"):
        if suite.source.startswith("https://"):
            return load_dataset("json", data_files=suite.source, split=suite.split)
        return load_dataset(suite.source, suite.config, split=suite.split)


def _local_rows(where: str, suite: PublicSuite, path: Path) -> Iterator[Json]:
    for file in _files(where, suite, path):
        with reading(file, "suite", "check the file"):
            rows = _file_rows(file)
        yield from rows


def _files(where: str, suite: PublicSuite, path: Path) -> list[Path]:
    """The file itself; in a folder with the Hub's layout, the files of the config and split."""
    if path.is_file():
        return [path]
    folder = path / suite.config if suite.config and (path / suite.config).is_dir() else path
    files = sorted(file for file in folder.rglob("*") if file.name.endswith(_SUFFIXES)) if folder.is_dir() else []
    split = [file for file in files if file.name.startswith(suite.split)]
    if not files:
        raise UserError(f"{where}: no such file, and no folder with {', '.join(_SUFFIXES)} files; check the path")
    if not split and len(files) > 1:
        raise UserError(
            f"{where}: the folder holds {len(files)} files, none of the split {suite.split!r}; give one of them"
        )
    return split or files


def _file_rows(file: Path) -> Iterable[Json]:
    """The rows of one file. pyarrow, gzip and json raise errors of many classes for a damaged one."""
    if file.name.endswith((".parquet", ".csv")):
        import pyarrow.csv
        import pyarrow.parquet

        read = pyarrow.parquet.read_table if file.suffix == ".parquet" else pyarrow.csv.read_csv
        return read(file).to_pylist()
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    text = raw.decode("utf-8-sig")
    if file.suffix == ".json" and text.lstrip().startswith("["):
        return parse_json(text)
    return [parse_json(line) for line in text.split("\n") if line.strip()]  # splitlines would break a line at U+2028
