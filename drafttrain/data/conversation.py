"""Conversations turn by turn, with the provenance of every token.

The tokens of a conversation are pieced together, never parsed back out of text: what the prompt was, what the target
said (its stop token included), and the glue that the chat template puts between a response and the next one's start.

    piece   opening (system, user 1, assistant header)  response 1 + stop  glue (user 2, assistant header)  response 2
    span                                                [start, end)                                        [start, end)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateError

from drafttrain.errors import UserError
from drafttrain.target import Target

Message = dict[str, str]
# Stands in for responses while the template is probed; plain words that no template strips or rewrites.
_SENTINEL = "drafttrain sentinel response {}"


class ChatRenderer:
    """Renders openings and glue as token ids.

    Args:
        target: its tokenizer and chat template are used.

    Attributes:
        stop_ids: tokens that end a response: the target's own, and the special token that closes the template's turns.
        closing_id: the one of them that a finished response ends with where only its text is known.

    Raises:
        UserError: nothing ends the target's responses.
    """

    def __init__(self, target: Target):
        self.target, self.tokenizer = target, target.tokenizer
        self.stop_ids: set[int] = set(target.eos_ids)
        closing = self._closing_token() if self.tokenizer.chat_template else set()
        self.stop_ids |= closing
        if not self.stop_ids:
            raise UserError(f"target={target.name!r} has no end-of-sequence token: set eos_token_id in its config.json")
        preferred = closing or {self.tokenizer.eos_token_id} & self.stop_ids or self.stop_ids
        self.closing_id = min(preferred)

    def _closing_token(self) -> set[int]:
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _SENTINEL.format(0)}]
        _, found, after = self._render(messages, False).partition(_SENTINEL.format(0))
        ids = self.ids(after.lstrip()) if found else []
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        return {ids[0]} & special if ids else set()

    def ids(self, text: str) -> list[int]:
        """Token ids of text that holds its own special tokens."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _render(self, messages: Sequence[Message], opening: bool) -> str:
        if not self.tokenizer.chat_template:
            raise UserError(
                f"target={self.target.name!r} has no chat template, so `messages` cannot be rendered; give prompts "
                "with `text`, or a target with a chat template"
            )
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opening)
        except TemplateError as error:
            raise UserError(f"the chat template of target={self.target.name!r} refuses messages: {error}") from error

    def open(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """The text and ids that a first response follows."""
        text = self._render(messages, True)
        return text, self.ids(text)

    def open_text(self, text: str) -> tuple[str, list[int]]:
        """The same for plain text (a base model's prompt), with the special tokens that the tokenizer adds."""
        return text, self.tokenizer(text)["input_ids"]

    def glue(self, turns: Sequence[Sequence[Message]], stop_id: int) -> list[int] | None:
        """What stands between a response and the next.

        Args:
            turns: the messages before each response; the last entry is what the glue opens. At least two.
            stop_id: the last token of the response before the glue, which is not repeated.

        Returns:
            The ids, or None if the template rewrites what came before, or closes turns with another token: then the
            tokens so far are not how the target would see them, and the conversation has to end.
        """
        messages: list[Message] = []
        for i, turn in enumerate(turns[:-1]):
            messages += turn
            before = self._render(messages, True) if i == len(turns) - 2 else ""
            messages.append({"role": "assistant", "content": _SENTINEL.format(i)})
        history, found, after = self._render([*messages, *turns[-1]], True).partition(_SENTINEL.format(len(turns) - 2))
        if not found or history != before:
            return None
        ids = self.ids(after.lstrip())
        return ids[1:] if ids and ids[0] == stop_id and len(ids) > 1 else None


@dataclass
class Conversation:
    """One row of the prompts file on its way through the turns.

    Attributes:
        turns: messages before each response (user, perhaps system ones); [] for plain `text`.
        tokens, spans, finish: as in a stored record.
        replies: the responses as text, where a backend speaks in text.
    """

    id: str
    source: str
    turns: list[list[Message]] = field(default_factory=list)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    replies: list[str] = field(default_factory=list)

    @staticmethod
    def from_row(row: dict[str, Any], where: str) -> Conversation:
        """Reads {"id", "messages"} or {"id", "text"}; assistant messages are dropped, for the target answers anew.

        Raises:
            UserError: neither, or messages without a user turn or of an unknown form.
        """
        conversation = Conversation(str(row["id"]), str(row.get("source") or ""))
        if isinstance(row.get("text"), str) and row["text"] and "messages" not in row:
            conversation.text = row["text"]
            return conversation
        messages = row.get("messages")
        well_formed = isinstance(messages, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages
        )
        if not well_formed:
            raise UserError(f'{where}: needs "text", or "messages" as a list of {{"role": ..., "content": ...}}')
        turn: list[Message] = []
        for message in messages or []:
            if message["role"] == "assistant":
                if turn:
                    conversation.turns.append(turn)
                turn = []
            else:
                turn.append({"role": message["role"], "content": message["content"]})
        if turn:
            conversation.turns.append(turn)
        if not any(message["role"] == "user" for turn in conversation.turns for message in turn):
            raise UserError(f"{where}: no message has the role user; add one, or drop the row")
        return conversation

    @property
    def total_turns(self) -> int:
        return len(self.turns) if self.turns else 1

    def open(self, renderer: ChatRenderer) -> list[int]:
        """Starts the conversation; returns the first prompt's ids."""
        _, ids = renderer.open(self.turns[0]) if self.turns else renderer.open_text(self.text)
        self.tokens = list(ids)
        return self.tokens

    def accept(self, tokens: Sequence[int], finish: str) -> None:
        """Takes the next response, stop token included."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self.spans.append([start, start + len(tokens)])
        self.finish.append(finish)

    def next_turn(self, renderer: ChatRenderer, max_length: int) -> list[int] | None:
        """Appends and returns the glue to the next response; None when the conversation is over.

        It is over after its last turn, after a truncated response, where the template allows no glue, and where nothing
        could be said within max_length.
        """
        done = len(self.spans)
        if done >= self.total_turns or self.finish[-1] != "stop":
            return None
        glue = renderer.glue(self.turns[: done + 1], self.tokens[-1])
        if glue is None or len(self.tokens) + len(glue) + 1 > max_length:
            return None
        self.tokens.extend(glue)
        return glue

    def record(self) -> dict[str, Any]:
        """What the store keeps."""
        end = self.spans[-1][1]
        return {
            "id": self.id,
            "tokens": self.tokens[:end],
            "spans": self.spans,
            "finish": self.finish,
            "source": self.source,
        }
