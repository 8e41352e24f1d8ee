"""Public benchmarks by name, from the Hub or from a file in their own format. drafttrain contains none of their texts.

name            source                                         stated license             turns, categories
spec_bench      hemingkx/Spec-Bench (GitHub)                   Apache-2.0                 as given; MT-bench's are one
mt_bench        HuggingFaceH4/mt_bench_prompts                 Apache-2.0                 two; eight categories
humaneval       openai/openai_humaneval                        MIT                        one
gsm8k           openai/gsm8k                                   MIT                        one
alpaca          tatsu-lab/alpaca                               CC BY-NC 4.0               one
cnn_dm          abisee/cnn_dailymail 3.0.0                     Apache-2.0                 one
speed_bench     nvidia/SPEED-Bench qualitative                 NVIDIA evaluation dataset  as given; eleven categories
speed_bench_1k  nvidia/SPEED-Bench throughput_1k, also 2k, 8k, 16k, 32k

The license is the one that the source states; texts of a collection may have others. Every name also reads rows in FastChat's
question format, in which many projects redistribute these benchmarks.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from drafttrain.errors import UserError, first_line
from drafttrain.files import Json

# SPEED-Bench replaces texts that NVIDIA may not redistribute by this note; NVIDIA's script fetches them.
_MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
_MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")


@dataclass(frozen=True)
class PublicSuite:
    """Source of a benchmark and the format of its rows.

    Attributes:
        source: a Hub data set, or the URL of a JSON-lines file. license: as the source states it.
        turns: reads the user's turns of a row. Raises KeyError for a row in another format.
        config, split: of the Hub data set. id_key: key of the row's own id, if it has one.
        category: reads the category of a row; None stands for the suite's name.
    """

    source: str
    license: str
    turns: Callable[[Json], list[str]]
    config: str | None = None
    split: str = "test"
    id_key: str = "question_id"
    category: Callable[[Json], str | None] = lambda row: row.get("category")


def are_turns(value: object) -> TypeGuard[list[str]]:
    """Whether a value is a non-empty list of non-empty strings."""
    return isinstance(value, list) and bool(value) and all(isinstance(turn, str) and turn.strip() for turn in value)


def _humaneval(row: Json) -> list[str]:
    return [
        f"Complete this Python function. Answer with the whole function.\n\n```python\n{row['prompt'].rstrip()}\n```"
    ]


def _alpaca(row: Json) -> list[str]:
    return ["\n\n".join(part for part in (row["instruction"], row.get("input")) if part)]


def _cnn_dm(row: Json) -> list[str]:
    return [f"Summarise this article in three or four sentences.\n\n{row['article']}"]


def _spec_bench_category(row: Json) -> str | None:
    """Spec-Bench reports six tasks and counts MT-bench's eight categories as one of them."""
    category = row.get("category")
    return "mt_bench" if category in _MT_BENCH else category


def _speed_bench(config: str) -> PublicSuite:
    return PublicSuite("nvidia/SPEED-Bench", "NVIDIA evaluation dataset license", lambda row: row["turns"], config)


PUBLIC: dict[str, PublicSuite] = {
    "spec_bench": PublicSuite(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        "Apache-2.0",
        lambda row: row["turns"],
        split="train",
        category=_spec_bench_category,
    ),
    "mt_bench": PublicSuite(
        "HuggingFaceH4/mt_bench_prompts", "Apache-2.0", lambda row: row["prompt"], split="train", id_key="prompt_id"
    ),
    "humaneval": PublicSuite("openai/openai_humaneval", "MIT", _humaneval, id_key="task_id"),
    "gsm8k": PublicSuite("openai/gsm8k", "MIT", lambda row: [row["question"]], "main"),
    "alpaca": PublicSuite("tatsu-lab/alpaca", "CC BY-NC 4.0", _alpaca, split="train"),
    "cnn_dm": PublicSuite("abisee/cnn_dailymail", "Apache-2.0", _cnn_dm, "3.0.0", id_key="id"),
    "speed_bench": _speed_bench("qualitative"),
    **{f"speed_bench_{size}": _speed_bench(f"throughput_{size}") for size in ("1k", "2k", "8k", "16k", "32k")},
}


def read_public(name: str, path: str = "") -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yields (question id, category, turns) of a public benchmark.

    Args:
        name: one of PUBLIC.
        path: a file or folder in the benchmark's own format or in FastChat's; empty to load from the Hub.

    Raises:
        UserError: the benchmark cannot be loaded (offline, no such file), a row in another format, or masked rows.
    """
    suite, where = PUBLIC[name], f"suite={name}:{path}" if path else f"suite={name}"
    rows = _local_rows(where, suite, Path(path).expanduser()) if path else _hub_rows(name, suite)
    masked = 0
    for index, row in enumerate(rows):
        try:
            turns = row["turns"] if "turns" in row else suite.turns(row)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{where} row {index + 1} has the keys {_keys(row)}, which is not {name}'s format (no {error}); "
                "give the benchmark's own file, or JSON lines with turns"
            ) from error
        if not are_turns(turns):
            raise UserError(f"{where} row {index + 1}: its turns must be a non-empty list of non-empty strings")
        masked += any(turn.startswith(_MASKED) for turn in turns)
        key = row.get("question_id", row.get(suite.id_key))
        yield str(index if key is None else key), suite.category(row) or name, tuple(turns)
    if masked:
        raise UserError(
            f"{where}: {masked} rows hold only a note that their text must be fetched from its owner; prepare the set with "
            f"NVIDIA's specdec_bench (prepare_data.py) and give the result as {name}:FILE"
        )


def _keys(row: object) -> str:
    return ", ".join(map(str, row)) or "none" if isinstance(row, dict) else f"of a {type(row).__name__}"


def _hub_rows(name: str, suite: PublicSuite) -> Iterable[Json]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        if suite.source.startswith("https://"):
            return load_dataset("json", data_files=suite.source, split=suite.split)
        return load_dataset(suite.source, suite.config, split=suite.split)
    except (OSError, ValueError, DatasetsError) as error:
        raise UserError(
            f"suite={name!r} cannot be loaded from {suite.source} ({first_line(error)}); go online once, or give its file as "
            f"{name}:FILE"
        ) from error


def _local_rows(where: str, suite: PublicSuite, path: Path) -> Iterator[Json]:
    for file in _files(where, suite, path):
        try:
            yield from _file_rows(file)
        except (OSError, ValueError) as error:
            raise UserError(f"{where}: {file} cannot be read ({error}); check the file") from error


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
    """Reads the rows of one file. Raises OSError or ValueError, also for broken JSON, parquet and CSV."""
    if file.name.endswith((".parquet", ".csv")):
        import pyarrow.csv
        import pyarrow.parquet

        read = pyarrow.parquet.read_table if file.suffix == ".parquet" else pyarrow.csv.read_csv
        return read(file).to_pylist()
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    text = raw.decode("utf-8")
    if file.suffix == ".json" and text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines() if line.strip()]
