"""Prompt suites for evaluation: loading, taking a fair part, and rendering turns for the target."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError
from drafttrain.evaluation.public_suites import PUBLIC, read_public
from drafttrain.files import suites_folder


@dataclass(frozen=True)
class Question:
    """One row in FastChat's question format; each turn after the first follows the answer to the one before."""

    question_id: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """Attributes: name: as the user gave it; questions; digest: of the content; licence: of a public one, else empty."""

    name: str
    questions: tuple[Question, ...]
    digest: str
    licence: str = ""


def known_suites() -> list[str]:
    """Names that `load_suite` finds without a path: those that come with drafttrain, then the public ones."""
    return [*sorted(path.stem for path in suites_folder().glob("*.jsonl")), *PUBLIC]


def load_suite(name: str) -> Suite:
    """Reads a suite.

    Args:
        name: a JSONL file with `turns` and optionally `question_id` and `category`; a name of `known_suites`; or
            NAME:FILE, a public benchmark of that name in a file of its own format.

    Raises:
        UserError: no such file, a public benchmark that cannot be had, a row that is not in the format, or no rows.
    """
    candidates = [Path(name).expanduser(), suites_folder() / f"{name}.jsonl"]
    path = next((path for path in candidates if path.is_file()), None)
    public, _, file = name.partition(":")
    if path is None and public in PUBLIC:
        return _public(name, public, file)
    if path is None:
        raise UserError(
            f"suite={name!r} is neither a file nor a known suite ({', '.join(known_suites())}); give a JSONL path, a "
            "known name, or NAME:FILE for a public one in a file"
        )
    content = path.read_bytes()
    questions: list[Question] = []
    for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), 1):
        if line.strip():
            questions.append(_parse(line, f"suite={name!r} line {number}", len(questions)))
    if not questions:
        raise UserError(f"suite={name!r} ({path}) holds no questions; each line is a JSON object with turns")
    return Suite(name, tuple(questions), hashlib.sha256(content).hexdigest()[:16])


def _public(name: str, public: str, file: str) -> Suite:
    questions = tuple(Question(*fields) for fields in read_public(public, file))
    if not questions:
        raise UserError(f"suite={name!r} holds no questions; check the file")
    content = json.dumps([(question.category, question.turns) for question in questions], ensure_ascii=False)
    return Suite(name, questions, hashlib.sha256(content.encode()).hexdigest()[:16], PUBLIC[public].licence)


def _parse(line: str, where: str, index: int) -> Question:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); each line is one object with turns") from error
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UserError(f"{where}: turns must be a non-empty list of non-empty strings (FastChat question format)")
    return Question(str(row.get("question_id", index)), str(row.get("category", "all")), tuple(turns))


def take_evenly(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """The first `limit` questions, one category after the other in turn; in the suite's own order. None takes all.

    Raises:
        UserError: a limit below 1.
    """
    if limit is None:
        return list(questions)
    if limit < 1:
        raise UserError(f"limit={limit} must be at least 1; leave it out to take the whole suite")
    nth: defaultdict[str, int] = defaultdict(int)
    ranked = []
    for index, question in enumerate(questions):
        ranked.append((nth[question.category], index))
        nth[question.category] += 1
    return [questions[index] for index in sorted(index for _, index in sorted(ranked)[:limit])]


def render(tokenizer: Any, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
    """Token ids that ask for the answer to the last turn.

    Args:
        tokenizer: the target's; without a chat template (base models) the conversation is plain text.
        turns: user turns so far.
        answers: replies to all but the last of them.
    """
    if getattr(tokenizer, "chat_template", None):
        messages = []
        for index, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            messages += [{"role": "assistant", "content": answer} for answer in answers[index : index + 1]]
        return render_messages(tokenizer, messages)
    parts = [part for index, turn in enumerate(turns) for part in (turn, *answers[index : index + 1])]
    return tokenizer("\n\n".join(parts)).input_ids


def render_messages(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a chat up to the opening of the assistant's next message."""
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
