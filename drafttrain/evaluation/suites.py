"""Prompt suites: loading, taking an even part, and rendering turns as the target's token ids."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import Message, prompt_ids
from drafttrain.errors import UserError
from drafttrain.evaluation.public_suites import PUBLIC, are_turns, read_public
from drafttrain.files import read_jsonl, suites_folder


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
        questions = tuple(_question(row, f"{path} line {line}", i) for i, (line, row) in enumerate(read_jsonl(path)))
        content, license_name = path.read_bytes(), ""
    else:
        questions = tuple(Question(*fields) for fields in read_public(public, file))
        texts = [(question.category, question.turns) for question in questions]
        content, license_name = json.dumps(texts, ensure_ascii=False).encode(), PUBLIC[public].license
    if not questions:
        raise UserError(f"suite={name!r} holds no questions; each line is a JSON object with turns")
    return Suite(name, questions, hashlib.sha256(content).hexdigest()[:16], license_name)


def _question(row: dict[str, object], where: str, index: int) -> Question:
    turns = row.get("turns")
    if not are_turns(turns):
        raise UserError(f"{where}: turns must be a non-empty list of non-empty strings (FastChat question format)")
    return Question(str(row.get("question_id", index)), str(row.get("category", "all")), tuple(turns))


def take_evenly(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """Takes `limit` questions in the suite's order, as many of each category as possible. None takes all.

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
    return [questions[index] for index in sorted(index for _, index in sorted(ranked)[:limit])]


def render(tokenizer: PreTrainedTokenizerBase, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
    """Token ids of a conversation up to where the answer to the last turn begins.

    Args:
        turns: the user's turns. answers: replies to all but the last of them.
    """
    messages: list[Message] = []
    for index, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        messages += [{"role": "assistant", "content": answer} for answer in answers[index : index + 1]]
    return prompt_ids(tokenizer, messages)
