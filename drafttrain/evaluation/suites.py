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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jinja2 import Environment, StrictUndefined, UndefinedError
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
from drafttrain.plain_yaml import read_yaml
from drafttrain.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from drafttrain.target.sight import ImagePrompt

# SPEED-Bench replaces texts that NVIDIA may not redistribute by this note; NVIDIA's script fetches
# them.
_MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
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
    image: NotRequired[object]  # a single one
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


@dataclass(frozen=True)
class PublicSuite:
    """A benchmark of public_suites.yaml, which describes the fields."""

    source: str
    license: str
    turn: str = ""
    turns: str = "turns"
    category: str = "category"
    more: str = "{}"
    config: str | None = None
    split: str = "test"
    id_key: str = "question_id"
    files: Sequence[str] = ()
    beside: Sequence[str] = ()
    sees: bool = False
    rows: str = ""

    def read(self, row: Json, file: Path, name: str) -> Json:
        """The keys of a `SuiteRow` that a row of its own format, or of FastChat's, has.

        Args:
            file: of the row. name: the category of rows that have none.

        Raises:
            KeyError, TypeError, AttributeError, IndexError, UndefinedError: a row in another
                format.
        """
        columns = {**row, "row": row, "file": file}
        read: Json = {"category": _value(self.category, columns) or name}
        if "turns" in row:  # FastChat's format
            return {**read, "turns": row["turns"]}
        if self.turn:
            read["turns"] = [_TEMPLATES.from_string(self.turn).render(columns)]
        else:
            read["turns"] = list(_value(self.turns, columns, required=True))
        return {**read, **_value(self.more, columns)}


def _easy_vqa_rows(split: str) -> list[Json]:
    from drafttrain.data.sources import easy_vqa_rows

    return easy_vqa_rows(split)


def _written(value: object) -> object:
    """A column's value in a turn. Raises TypeError: it is null."""
    if value is None:
        raise TypeError("a column of the turn is null")
    return value


_TEMPLATES = Environment(
    undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_written
)
# What expressions of public_suites.yaml may call.
_TEMPLATES.globals = {
    "bfcl_turns": bfcl.bfcl_turns,
    "bfcl_category": bfcl.bfcl_category,
    "bfcl_more": bfcl.bfcl_more,
    "easy_vqa_rows": _easy_vqa_rows,
}


def _value(expression: str, columns: Json, required: bool = False) -> Any:
    """An expression's value; of one that is undefined None, or an error where it is used."""
    return _TEMPLATES.compile_expression(expression, undefined_to_none=not required)(columns)


@cache
def public_suites() -> dict[str, PublicSuite]:
    """The public benchmarks by name."""
    table = Path(__file__).with_name("public_suites.yaml")
    entries = read_yaml(table.read_text(encoding="utf-8"), table.name)
    return {name: PublicSuite(**entry) for name, entry in entries.items()}


def known_suites() -> list[str]:
    """Names that `load_suite` finds without a path: suites that come with drafttrain, then public
    ones.
    """
    return [*sorted(path.stem for path in suites_folder().glob("*.jsonl")), *public_suites()]


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
            pictures = _pictures(row_images(row), path.parent, place)
            questions.append(Question.from_row(row, index, "all", defaults, pictures))
        content = path.read_bytes()
        for question in questions:
            content += "".join(picture.digest for picture in question.images).encode()
        # Other variables of the template make other prompts.
        if defaults:
            content += json.dumps(defaults).encode()
    elif public in public_suites():
        questions += _read_public(public, file, defaults)
        texts = [_content(question) for question in questions]
        content = json.dumps(texts, ensure_ascii=False).encode()
        license_name = public_suites()[public].license
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
    """Takes `limit` questions in order, evenly from all categories; None takes all."""
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
    suite = public_suites()[name]
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
            read = suite.read(row, file, name)
        except (KeyError, TypeError, AttributeError, IndexError, UndefinedError) as error:
            keys = f"of a {type(row).__name__}"
            if row == {}:
                keys = "none"
            elif isinstance(row, dict):
                keys = ", ".join(map(str, row))
            raise UserError(
                f"{place} has the keys {keys}, which is not {name}'s format ({type(error).__name__}: {error}); "
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
            "from its owner; run `drafttrain suites prepare speed-bench --output FOLDER` and give "
            f"{name}:FOLDER"
        )


def _hub_rows(name: str, suite: PublicSuite) -> Iterator[tuple[Json, Path]]:
    """Each row, and its file where `suite.files` names files."""
    from datasets import load_dataset
    from huggingface_hub import snapshot_download

    if suite.rows:
        for made in _value(suite.rows, {}):
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
