"""Prompt suites: files, drafttrain's own, and public benchmarks.

drafttrain contains no text of a public benchmark. It reads them from the Hub or from a file in
their own format. The license is the one that the source states; texts of a collection may have
others. Every name also reads rows in FastChat's question format, in which many projects
redistribute these benchmarks.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from drafttrain.data.chat import NO_INPUTS, ChatInputs, Message, prompt_ids
from drafttrain.data.image_parts import in_front, row_images, with_uris
from drafttrain.data.image_prompts import chat_prompt
from drafttrain.environment import suites_folder
from drafttrain.errors import UserError
from drafttrain.evaluation import bfcl
from drafttrain.files import Json, check_json, hub_problem, parse_json, read_jsonl, reading
from drafttrain.images import BadPicture, Picture, read_picture
from drafttrain.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from drafttrain.target.sight import ImagePrompt

# SPEED-Bench replaces texts that NVIDIA may not redistribute by this note; NVIDIA's script fetches
# them.
_MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
# Spec-Bench reports six tasks and counts MT-bench's eight categories as one of them.
_MT_BENCH = {
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
}
# The subsets that speculators' own evaluation reports.
_SPECULATOR_SUBSETS = (
    "HumanEval",
    "math_reasoning",
    "qa",
    "question",
    "rag",
    "summarization",
    "tool_call",
    "translation",
    "writing",
)
_ROW_FIX = (
    "correct or delete that row; each needs turns, a list of texts (FastChat's question format)"
)
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")


# One line without control characters, which would change a terminal's state.
Category = Annotated[
    str,
    Field(
        min_length=1,
        max_length=200,
        pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$",
    ),
]


class OpeningMessage(TypedDict):
    """A message before the first turn."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class SuiteTool(TypedDict):
    """A function that the target may call."""

    type: Literal["function"]
    function: Json


class SuiteRow(TypedDict):
    """A line of a suite's file: FastChat's question format, and what the chat template gets besides
    the turns.
    """

    question_id: NotRequired[str | int | None]
    category: NotRequired[Category | None]
    turns: Annotated[list[Annotated[str, Field(pattern=r"\S")]], Field(min_length=1)]
    images: NotRequired[list[str]]
    opening: NotRequired[list[OpeningMessage]]
    tools: NotRequired[list[SuiteTool]]
    chat_template_kwargs: NotRequired[Json]


@dataclass(frozen=True)
class Question:
    """One row of a suite.

    Attributes:
        turns: of the user; each after the first follows the answer to the turn before. opening:
            messages before them.
        inputs: tools and chat_template_kwargs.
        images: before the text of the first turn.
    """

    question_id: str
    category: str
    turns: tuple[str, ...]
    opening: tuple[Message, ...] = ()
    inputs: ChatInputs = NO_INPUTS
    images: tuple[Picture, ...] = ()

    @staticmethod
    def from_row(
        row: Mapping[str, Any],
        index: int,
        category: str,
        defaults: Json | None = None,
        images: Sequence[Picture] = (),
    ) -> Question:
        """Reads a checked row.

        Args:
            index: its id if it has none. category: if it names none. defaults: chat_template_kwargs.
            images: of the row, which have been read.
        """
        key = row.get("question_id")
        if key is None:
            key = index
        return Question(
            question_id=str(key),
            category=row.get("category") or category,
            turns=tuple(row["turns"]),
            opening=tuple(dict(message) for message in row.get("opening", ())),
            inputs=ChatInputs.of(dict(row), defaults),
            images=tuple(images),
        )

    def messages(self, answers: Sequence[str] = ()) -> list[Json]:
        """The conversation up to the turn after these answers; images as pictures."""
        made: list[Json] = [dict(message) for message in self.opening]
        for turn, answer in zip(self.turns, answers, strict=False):
            made.append({"role": "user", "content": turn})
            made.append({"role": "assistant", "content": answer})
        if len(answers) < len(self.turns):
            made.append({"role": "user", "content": self.turns[len(answers)]})
        return in_front(made, self.images)

    def request(self) -> Json:
        """The first turn as the body of a chat completion."""
        body: Json = {"messages": with_uris(self.messages())}
        if self.inputs.tools:
            body["tools"] = list(self.inputs.tools)
        if self.inputs.kwargs:
            body["chat_template_kwargs"] = self.inputs.kwargs
        return body

    def prompt(self, tokenizer: PreTrainedTokenizerBase, answers: Sequence[str] = ()) -> list[int]:
        """Token ids of `messages` up to where the target answers.

        Raises UserError: the chat template refuses them, or there are images, which ids cannot show.
        """
        if self.images:
            raise UserError(
                f"question {self.question_id!r} shows images, which are not read here; choose a suite of text"
            )
        return prompt_ids(tokenizer, self.messages(answers), self.inputs)

    def prompt_for(self, target: Target, answers: Sequence[str] = ()) -> list[int] | ImagePrompt:
        """`prompt`, with its images. Raises UserError: also a target that does not read them."""
        return chat_prompt(target, self.messages(answers), self.inputs)


@dataclass(frozen=True)
class Suite:
    """A set of questions.

    Attributes:
        name: as the user gave it. digest: hash of the content. license: of a public suite.
    """

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
        more: reads other keys of a `SuiteRow` from a row and its file.
        files: patterns of the Hub's files, for sets that `datasets` cannot read. beside: of files
            that `more` reads.
        sees: whether the column `image` or `images` belongs to the prompt.
        rows: makes the rows, where they come from a package or are drawn.
    """

    source: str
    license: str
    turns: Callable[[Json], list[str]] = lambda row: row["turns"]
    config: str | None = None
    split: str = "test"
    id_key: str = "question_id"
    category: Callable[[Json], str | None] = lambda row: row.get("category")
    more: Callable[[Json, Path], Json] = lambda row, file: {}
    files: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    sees: bool = False
    rows: Callable[[], Iterable[Json]] | None = None


def _humaneval(row: Json) -> list[str]:
    task = "Complete this Python function. Answer with the whole function."
    return [f"{task}\n\n```python\n{row['prompt'].rstrip()}\n```"]


def _livecodebench(row: Json) -> list[str]:
    starter = row.get("starter_code")
    form = "Read from stdin and write to stdout."
    if starter:
        form = f"Complete this code:\n\n```python\n{starter}\n```"
    return [f"Solve this task with a Python program.\n\n{row['question_content']}\n\n{form}"]


def _longbench(row: Json) -> list[str]:
    if "choice_A" not in row:  # the first version
        return ["\n\n".join(filter(None, (row["context"], row.get("input"))))]
    choices = "\n".join(f"({letter}) {row[f'choice_{letter}']}" for letter in "ABCD")
    return [
        f"{row['context']}\n\n{row['question']}\n{choices}\n\nAnswer with a letter, and say why in a few sentences."
    ]


def _mbpp(row: Json) -> list[str]:
    task = row.get("prompt") or row["text"]  # of the sanitized and of the full set
    tests = "\n".join(row["test_list"])
    return [f"Write a Python function. {task}\n\nThese tests must pass:\n\n```python\n{tests}\n```"]


def _gpqa(row: Json) -> list[str]:
    # In the alphabet's order the right answer has no place of its own.
    names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    answers = sorted(row[name].strip() for name in names)
    choices = "\n".join(
        f"({letter}) {answer}" for letter, answer in zip("ABCD", answers, strict=True)
    )
    return [
        f"{row['Question'].strip()}\n\n{choices}\n\nReason step by step, then answer with a letter."
    ]


def _chartqa(row: Json) -> list[str]:
    return [f"{row['query']}\n\nSay what the chart shows about it, then give the answer."]


def _easy_vqa_rows() -> list[Json]:
    from drafttrain.data.sources import easy_vqa_rows

    return easy_vqa_rows("test")


def _prepared_turns(row: Json) -> list[str]:
    """The turns of SPEED-Bench as NVIDIA's script writes it."""
    return [message["content"] for message in row["messages"] if message["role"] == "user"]


def _speed_bench(config: str) -> PublicSuite:
    return PublicSuite(
        "nvidia/SPEED-Bench",
        "NVIDIA evaluation dataset license",
        _prepared_turns,
        config=config,
    )


PUBLIC: dict[str, PublicSuite] = {
    "spec_bench": PublicSuite(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        "Apache-2.0",
        split="train",
        category=lambda row: (
            "mt_bench" if row.get("category") in _MT_BENCH else row.get("category")
        ),
    ),
    "mt_bench": PublicSuite(
        "HuggingFaceH4/mt_bench_prompts",
        "Apache-2.0",
        lambda row: row["prompt"],
        split="train",
        id_key="prompt_id",
    ),
    "humaneval": PublicSuite("openai/openai_humaneval", "MIT", _humaneval, id_key="task_id"),
    "mbpp": PublicSuite(
        "google-research-datasets/mbpp",
        "CC BY 4.0",
        _mbpp,
        "sanitized",
        id_key="task_id",
    ),
    "gsm8k": PublicSuite("openai/gsm8k", "MIT", lambda row: [row["question"]], "main"),
    "math_500": PublicSuite(
        "HuggingFaceH4/MATH-500",
        "MIT (of MATH)",
        lambda row: [row["problem"]],
        id_key="unique_id",
        category=lambda row: row.get("subject"),
    ),
    "aime_2024": PublicSuite(
        "HuggingFaceH4/aime_2024",
        "not stated",
        lambda row: [row["problem"]],
        split="train",
        id_key="id",
    ),
    "aime_2025": PublicSuite(
        "math-ai/aime25",
        "Apache-2.0",
        lambda row: [row["problem"]],
        id_key="id",
    ),
    "gpqa": PublicSuite(
        "Idavidrein/gpqa",
        "CC BY 4.0",
        _gpqa,
        "gpqa_diamond",
        split="train",
        id_key="Record ID",
        category=lambda row: row.get("High-level domain"),
    ),
    "arena_hard": PublicSuite(
        "lmarena-ai/arena-hard-auto",
        "Apache-2.0",
        lambda row: [row["prompt"]],
        id_key="uid",
        files=("data/arena-hard-v2.0/question.jsonl",),
    ),
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
    "bfcl": PublicSuite(
        "gorilla-llm/Berkeley-Function-Calling-Leaderboard",
        "Apache-2.0",
        bfcl.bfcl_turns,
        id_key="id",
        category=bfcl.bfcl_category,
        more=bfcl.bfcl_more,
        files=bfcl.FILES,
        beside=(f"{bfcl.DOCS}/*.json",),
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
    "speculator_benchmarks": PublicSuite(
        "RedHatAI/speculator_benchmarks",
        "as its sources state",
        lambda row: [row["prompt"]],
        more=lambda row, file: {"category": file.stem},
        files=tuple(f"{name}.jsonl" for name in _SPECULATOR_SUBSETS),
    ),
    "mmstar": PublicSuite(
        "Lin-Chen/MMStar",
        "not stated",
        lambda row: [row["question"]],
        "val",
        split="val",
        id_key="index",
        sees=True,
    ),
    "chartqa": PublicSuite(
        "HuggingFaceM4/ChartQA",
        "GPL-3.0",
        _chartqa,
        category=lambda row: ("human", "machine")[row["human_or_machine"]],
        sees=True,
    ),
    "coco_captions": PublicSuite(
        "lmms-lab/COCO-Caption2017",
        "CC BY 4.0",
        lambda row: ["Describe this image in a paragraph."],
        split="val",
        sees=True,
    ),
    "easy_vqa": PublicSuite(
        "the package easy-vqa",
        "MIT",
        lambda row: [row["question"]],
        id_key="id",
        category=lambda row: "yes or no" if row["answer"] in ("yes", "no") else "a word",
        sees=True,
        rows=_easy_vqa_rows,
    ),
    "speed_bench": _speed_bench("qualitative"),
    "speed_bench_1k": _speed_bench("throughput_1k"),
    "speed_bench_2k": _speed_bench("throughput_2k"),
    "speed_bench_8k": _speed_bench("throughput_8k"),
    "speed_bench_16k": _speed_bench("throughput_16k"),
    "speed_bench_32k": _speed_bench("throughput_32k"),
}


def known_suites() -> list[str]:
    """Names that `load_suite` finds without a path: suites that come with drafttrain, then public
    ones.
    """
    return [*sorted(path.stem for path in suites_folder().glob("*.jsonl")), *PUBLIC]


def load_suite(name: str, defaults: Json | None = None) -> Suite:
    """Reads a suite.

    Args:
        name: a JSONL file with `turns` and optionally `question_id` and `category`; a name of
            `known_suites`; or NAME:FILE, a public benchmark in a file of its own format.
        defaults: chat_template_kwargs of questions that do not name them.

    Raises:
        UserError: a missing file, a public benchmark that cannot be loaded, a malformed row, or no
            rows.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        path = suites_folder() / f"{name}.jsonl"
    public, _, file = name.partition(":")
    questions = []
    license_name = ""
    if path.is_file():
        for index, (_, row) in enumerate(read_jsonl(path, fix=_ROW_FIX, schema=SuiteRow)):
            place = f"{path} row {index + 1}"
            pictures = _pictures(row.get("images", ()), path.parent, place)
            questions.append(Question.from_row(row, index, "all", defaults, pictures))
        content = path.read_bytes()
        for question in questions:
            content += "".join(picture.digest for picture in question.images).encode()
        # Other variables of the template make other prompts.
        if defaults:
            content += json.dumps(defaults).encode()
    elif public in PUBLIC:
        questions += _read_public(public, file, defaults)
        texts = [_content(question) for question in questions]
        content = json.dumps(texts, ensure_ascii=False).encode()
        license_name = PUBLIC[public].license
    else:
        raise UserError(
            f"suite={name!r} is neither a file nor a known suite ({', '.join(known_suites())}); "
            "give a JSONL path, a known name, or NAME:FILE for a public one in a file"
        )
    if not questions:
        raise UserError(f"suite={name!r} holds no questions; each line is a JSON object with turns")
    digest = hashlib.sha256(content).hexdigest()[:16]
    return Suite(name, tuple(questions), digest, license_name)


def take_evenly(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """Takes `limit` questions in order, evenly from all categories; None takes all.

    Raises:
        UserError: a limit below 1.
    """
    if limit is None:
        return list(questions)
    if limit < 1:
        raise UserError(f"limit={limit} must be at least 1; leave it out to take the whole suite")
    count: defaultdict[str, int] = defaultdict(int)
    ranked = []  # (position within the category, index)
    for index, question in enumerate(questions):
        ranked.append((count[question.category], index))
        count[question.category] += 1
    # The first of every category, then the second of every category, and so on.
    ranked.sort()
    chosen = sorted(index for _, index in ranked[:limit])
    return [questions[index] for index in chosen]


def _content(question: Question) -> list[object]:
    """What a digest covers. Questions without `more` have the digests of earlier versions."""
    content: list[object] = [question.category, question.turns]
    more = [question.opening, question.inputs.tools, question.inputs.kwargs]
    if any(more):
        content += more
    if question.images:
        content.append([picture.digest for picture in question.images])
    return content


def _pictures(sources: Iterable[object], folder: Path, place: str) -> list[Picture]:
    """The pictures of a row. Raises UserError, which names the place."""
    try:
        return [read_picture(source, folder) for source in sources]
    except BadPicture as bad:
        raise UserError(f"{place}: {bad}") from bad


# -- public benchmarks -----------------------------------------------------------------------------


def _read_public(name: str, path: str, defaults: Json | None) -> Iterator[Question]:
    """Reads a benchmark from a file or folder in its own format or FastChat's.

    Args:
        path: empty for the Hub.

    Raises:
        UserError: a missing file, a row in another format, or masked texts.
    """
    suite = PUBLIC[name]
    where = f"suite={name}"
    if path:
        where += f":{path}"
        rows = _local_rows(where, suite, Path(path).expanduser())
    else:
        rows = _hub_rows(name, suite)
    masked = 0
    for index, (row, file) in enumerate(rows):
        place = f"{where} row {index + 1}"
        try:
            read: Json = {"category": suite.category(row) or name}
            if "turns" in row:  # FastChat's format
                read["turns"] = row["turns"]
            else:
                read["turns"] = suite.turns(row)
                read |= suite.more(row, file)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            keys = f"of a {type(row).__name__}"
            if row == {}:
                keys = "none"
            elif isinstance(row, dict):
                keys = ", ".join(map(str, row))
            raise UserError(
                f"{place} has the keys {keys}, which is not {name}'s format (no {error}); "
                "give the benchmark's own file, or JSON lines with turns"
            ) from error
        read["question_id"] = row.get("question_id", row.get(suite.id_key))
        check_json(read, place, _ROW_FIX, SuiteRow)
        masked += any(turn.startswith(_MASKED) for turn in read["turns"])
        pictures = []
        if suite.sees:
            pictures = _pictures(row_images(row), file.parent, place)
            if not pictures:
                raise UserError(f"{place} has no image, which the questions of {name} are about")
        yield Question.from_row(read, index, name, defaults, pictures)
    if masked:
        raise UserError(
            f"{where}: {masked} rows hold only a note that their text must be fetched "
            "from its owner; run NVIDIA's prepare.py (docs/how-to/suites.md has the command) "
            f"and give its folder as {name}:FOLDER"
        )


def _hub_rows(name: str, suite: PublicSuite) -> Iterator[tuple[Json, Path]]:
    """Each row, and its file where `suite.files` names files."""
    from datasets import load_dataset
    from huggingface_hub import snapshot_download

    if suite.rows is not None:
        for made in suite.rows():
            yield made, Path()
        return
    what = f"suite={name!r}: source"
    hub_problem()
    with reading(suite.source, what, f"go online once, or give its file as {name}:FILE"):
        if suite.files:
            chosen = [*suite.files, *suite.beside]
            path = Path(snapshot_download(suite.source, repo_type="dataset", allow_patterns=chosen))
            rows = _local_rows(f"suite={name}", suite, path)
        else:
            if suite.source.startswith("https://"):
                loaded = load_dataset("json", data_files=suite.source, split=suite.split)
            else:
                loaded = load_dataset(suite.source, suite.config, split=suite.split)
            if suite.sees:  # images as their encoded bytes
                loaded = loaded.to_iterable_dataset().decode(False)
            rows = ((row, Path()) for row in loaded)
    yield from rows


def _local_rows(where: str, suite: PublicSuite, path: Path) -> Iterator[tuple[Json, Path]]:
    for file in _files(where, suite, path):
        with reading(file, "suite", "check the file"):
            rows = _file_rows(file)
        for row in rows:
            yield row, file


def _files(where: str, suite: PublicSuite, path: Path) -> list[Path]:
    """The file itself; in a folder with the Hub's layout, the files of the config and split."""
    if path.is_file():
        return [path]
    if suite.files:
        named = set[Path]()
        for pattern in suite.files:
            named.update(path.glob(pattern))
        if not named:
            raise UserError(
                f"{where}: no such file, and no folder with files as {suite.files[0]}; "
                "check the path"
            )
        return sorted(named)

    folder = path
    if suite.config:
        prepared = path / f"{suite.config}.jsonl"
        if prepared.is_file():
            return [prepared]
        if (path / suite.config).is_dir():
            folder = path / suite.config
    files = []
    if folder.is_dir():
        files = sorted(file for file in folder.rglob("*") if file.name.endswith(_SUFFIXES))
    if not files:
        raise UserError(
            f"{where}: no such file, and no folder with {', '.join(_SUFFIXES)} files; "
            "check the path"
        )
    # The Hub's layout: test-00000-of-00001.parquet.
    split = [file for file in files if file.name.startswith(suite.split)]
    if not split and len(files) > 1:
        raise UserError(
            f"{where}: a folder of {len(files)} files, none of split {suite.split!r}; "
            "give one of them"
        )
    return split or files


def _file_rows(file: Path) -> Iterable[Json]:
    """The rows of one file.

    pyarrow, gzip and json raise errors of many classes for a damaged one.
    """
    if file.name.endswith((".parquet", ".csv")):
        import pyarrow.csv
        import pyarrow.parquet

        if file.suffix == ".parquet":
            return pyarrow.parquet.read_table(file).to_pylist()
        return pyarrow.csv.read_csv(file).to_pylist()
    raw = file.read_bytes()
    if file.suffix == ".gz":
        raw = gzip.decompress(raw)
    text = raw.decode("utf-8-sig")
    if file.suffix == ".json" and text.lstrip().startswith("["):
        return parse_json(text)
    # splitlines would break a line at U+2028
    return [parse_json(line) for line in text.split("\n") if line.strip()]
