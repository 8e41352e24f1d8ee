"""Reads the formats in which prompts and conversations are published.

FastChat question   {"turns": ["...", "..."]}                              user turns without answers
ShareGPT            {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}
OpenAI              {"messages": [{"role": "user", "content": "..."}, ...]}
instruction         {"instruction": "...", "input": "...", "output": "..."}, {"prompt": "...", "response": "..."}
plain text          {"text": "..."}                                        a beginning to continue
"""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.errors import UserError
from drafttrain.files import Json

Prompt = Json  # {"messages": [{"role", "content"}, ...]} or {"text": str}

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bot"), "assistant"),
    "system": "system",
}
_CONVERSATIONS = ("messages", "conversations", "conversation", "prompt")
_QUESTIONS = ("instruction", "prompt", "question")
_ANSWERS = ("output", "response", "completion", "answer")


def parse_row(row: Json) -> Prompt | None:
    """Reads a row of any format above; None if it has none of them, or no user turn.

    Assistant turns before the first user turn are left out: no template renders them.
    """
    if isinstance(row.get("turns"), list):
        return _prompt([_message("user", turn) for turn in row["turns"]])
    for key in _CONVERSATIONS:
        if isinstance(row.get(key), list):
            system = [_message("system", row["system"])] if _filled(row.get("system")) else []
            return _prompt([*system, *(_turn(turn) for turn in row[key])])
    for key in _QUESTIONS:
        if _filled(row.get(key)):
            question = row[key] + (f"\n\n{row['input']}" if _filled(row.get("input")) else "")
            answers = [row[name] for name in _ANSWERS if _filled(row.get(name))]
            return _prompt([_message("user", question), *(_message("assistant", answer) for answer in answers[:1])])
    return {"text": row["text"]} if _filled(row.get("text")) else None


def row_id(value: object, where: str) -> str:
    """A row's id as text. Raises UserError, which begins with `where`: neither text nor a whole number."""
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise UserError(
            f"{where}: id={value!r} must be text or a whole number; drafttrain prompts --source file writes ids"
        )
    return str(value)


def are_messages(value: object) -> bool:
    """Whether a value is a list of {"role": text, "content": text, ...}, as chat templates read."""
    return isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )


def prompt_texts(prompt: Prompt) -> list[str]:
    """The user turns, or the plain text."""
    if "text" in prompt:
        return [prompt["text"]]
    return [message["content"] for message in prompt["messages"] if message["role"] == "user"]


def _filled(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _message(role: str, content: object) -> dict[str, str] | None:
    """A message, or None if the content is not text. Text parts of a multi-part content are joined."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        text = [part for part in parts if isinstance(part, str)]
        content = "\n".join(text) if len(text) == len(parts) else None
    return {"role": role, "content": content} if isinstance(content, str) and content.strip() else None


def _turn(turn: object) -> dict[str, str] | None:
    if not isinstance(turn, dict):
        return None
    role = _ROLES.get(str(turn.get("role", turn.get("from"))).lower())
    return _message(role, turn.get("content", turn.get("value"))) if role else None


def _prompt(messages: Sequence[dict[str, str] | None]) -> Prompt | None:
    """A prompt of these messages; None if one could not be read or none is a user's."""
    readable = [message for message in messages if message is not None]
    first = next((i for i, message in enumerate(readable) if message["role"] == "user"), None)
    if len(readable) < len(messages) or first is None:
        return None
    return {"messages": [m for m in readable[:first] if m["role"] == "system"][:1] + readable[first:]}
