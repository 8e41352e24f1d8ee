"""Conversations turn by turn, with the origin of every token.

Tokens are appended as they are produced and never parsed out of text: the prompt, the target's responses with their stop
tokens, and the glue, which the chat template writes between a response and the next one.

    piece   opening (system, user 1, assistant header)  response 1 + stop  glue (user 2, assistant header)  response 2
    span                                                [start, end)                                        [start, end)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from drafttrain.data.chat import closing_token, decode, has_template, prompt_ids, turn_glue
from drafttrain.data.row_formats import are_messages, row_id
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.target import Target

Turn = list[dict[str, str]]  # messages {"role", "content"} before a response


class ChatRenderer:
    """What a target's conversations need of its tokenizer.

    Attributes:
        stop_ids: tokens that end a response: the target's own, and the special token that closes the template's turns.
        closing_id: the stop token to append to a finished response of which only the text is known.

    Raises:
        UserError: no token ends the target's responses.
    """

    def __init__(self, target: Target):
        self.target, self.tokenizer = target, target.tokenizer
        closing = closing_token(self.tokenizer)
        self.stop_ids: set[int] = set(target.eos_ids) | closing
        if not self.stop_ids:
            raise UserError(f"target={target.name!r} has no end-of-sequence token: set eos_token_id in its config.json")
        self.closing_id = min(closing or {self.tokenizer.eos_token_id} & self.stop_ids or self.stop_ids)

    def open(self, prompt: str | Turn) -> list[int]:
        """Token ids before the first response. prompt: messages, or plain text (a pretrained-only model's prompt)."""
        if not isinstance(prompt, str) and not has_template(self.tokenizer):
            raise UserError(
                f"target={self.target.name!r} has no chat template, so `messages` cannot be rendered; give prompts "
                "with `text`, or a target with a chat template"
            )
        return prompt_ids(self.tokenizer, prompt)


@dataclass
class Conversation:
    """One row of the prompts file, and what has been generated for it."""

    id: str
    source: str
    turns: list[Turn] = field(default_factory=list)  # messages before each response (user, system); [] for `text`
    text: str = ""
    tokens: list[int] = field(default_factory=list)  # tokens, spans, finish: as in a stored record
    spans: list[list[int]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    replies: Turn = field(default_factory=list)  # the responses as messages, from servers that return text

    @staticmethod
    def from_row(row: Json, where: str) -> Conversation:
        """Reads {"id", "messages"} or {"id", "text"}; drops assistant messages, because the target answers again.

        Raises UserError: neither, an id of another type, or messages without a user turn or of an unknown form.
        """
        conversation = Conversation(row_id(row["id"], where), str(row.get("source") or ""))
        if isinstance(row.get("text"), str) and row["text"] and "messages" not in row:
            conversation.text = row["text"]
            return conversation
        messages = row.get("messages")
        if messages is None or not are_messages(messages):
            raise UserError(f'{where}: needs "text", or "messages" as a list of {{"role": ..., "content": ...}}')
        turn: Turn = []
        for message in [*messages, {"role": "assistant"}]:  # the added one closes the last turn
            if message["role"] != "assistant":
                turn.append({"role": message["role"], "content": message["content"]})
            elif turn:
                conversation.turns.append(turn)
                turn = []
        if not any(message["role"] == "user" for turn in conversation.turns for message in turn):
            raise UserError(f"{where}: no message has the role user; add one, or drop the row")
        return conversation

    @property
    def total_turns(self) -> int:
        return len(self.turns) or 1

    def open(self, renderer: ChatRenderer) -> list[int]:
        """Starts the conversation; returns the first prompt's ids."""
        self.tokens = renderer.open(self.turns[0] if self.turns else self.text)
        return self.tokens

    def accept(self, tokens: Sequence[int], finish: str) -> None:
        """Appends the next response, stop token included."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self.spans.append([start, start + len(tokens)])
        self.finish.append(finish)

    def next_turn(self, renderer: ChatRenderer, max_length: int) -> list[int] | None:
        """Appends and returns the glue to the next response; None when the conversation ends: after its last turn, after a
        truncated response, where the template allows no glue, and where max_length leaves no token for a response."""
        done = len(self.spans)
        if done >= self.total_turns or self.finish[-1] != "stop":
            return None
        start, end = self.spans[-1]
        answer = decode(renderer.tokenizer, self.tokens[start : end - 1])
        glue = turn_glue(renderer.tokenizer, self.turns[: done + 1], self.tokens[-1], answer)
        if glue is None or len(self.tokens) + len(glue) + 1 > max_length:
            return None
        self.tokens.extend(glue)
        return glue

    def record(self) -> Json:
        """The record that the store keeps."""
        end = self.spans[-1][1]
        tokens = self.tokens[:end]
        return {"id": self.id, "tokens": tokens, "spans": self.spans, "finish": self.finish, "source": self.source}
