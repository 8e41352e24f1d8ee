"""Conversations turn by turn, with the origin of every token.

Tokens are appended as they are produced and never parsed out of text: the prompt, the target's
responses with their stop tokens, and the glue, which the chat template writes between a response
and the next one.

    piece   opening (system, user 1, assistant header)  response 1 + stop  glue (user 2, assistant header)  response 2
    span                                                [start, end)                                        [start, end)

A template may write earlier turns otherwise once a later one follows, for example without their
reasoning. The tokens so far are then no longer what the target reads, and the conversation goes on
in a row of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drafttrain.data.answers import AnswerFormat, answer_format
from drafttrain.data.chat import (
    NO_INPUTS,
    ChatInputs,
    TemplateRefuses,
    closing_token,
    decode,
    has_template,
    prompt_ids,
    render_text,
    text_ids,
    turn_glue,
)
from drafttrain.data.row_formats import checked_messages, row_id
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = list[Json]  # messages before a response: of the user, the system, or tools


class ChatRenderer:
    """What a target's conversations need of its tokenizer.

    Attributes:
        stop_ids: tokens that end a response: the target's own, and the special token that closes
            the template's turns.
        closing_id: the stop token to append to a finished response of which only the text is known.

    Raises:
        UserError: no token ends the target's responses.
    """

    def __init__(self, target: Target):
        self.target, self.tokenizer = target, target.tokenizer
        closing = closing_token(self.tokenizer)
        self.stop_ids: set[int] = set(target.eos_ids) | closing
        if not self.stop_ids:
            raise UserError(
                f"target={target.name!r} has no end-of-sequence token: set eos_token_id in its config.json"
            )
        self.closing_id = min(
            closing or {self.tokenizer.eos_token_id} & self.stop_ids or self.stop_ids
        )

    def open(self, prompt: str | Turn, inputs: ChatInputs = NO_INPUTS) -> list[int]:
        """Token ids before the first response. prompt: messages, or plain text (a pretrained-only
        model's prompt).
        """
        if not isinstance(prompt, str) and not has_template(self.tokenizer):
            raise UserError(
                f"target={self.target.name!r} has no chat template, so `messages` cannot be rendered; give prompts "
                "with `text`, or a target with a chat template"
            )
        return prompt_ids(self.tokenizer, prompt, inputs)


@dataclass
class Conversation:
    """One row of the prompts file, and what has been generated for it.

    Attributes:
        turns: messages before each response (user, system, tool); [] for `text`.
        called: names of the functions that the recorded answer to each turn calls, and the ids of
            the calls.
        tokens, spans, finish: of the present row, as in a stored record.
        history, answers: messages before the row's first turn, and the row's responses as messages.
        reply: the last response as a message, from a server that returns text.
        ended: why the conversation ended before its last turn, for the counts; '' if for no reason
            of its own.
        part: number of rows before the present one; follows: whether another row continues it.
    """

    id: str
    source: str
    turns: list[Turn] = field(default_factory=list)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    inputs: ChatInputs = NO_INPUTS
    called: list[list[tuple[str, str]]] = field(default_factory=list)
    history: list[Json] = field(default_factory=list)
    answers: list[Json] = field(default_factory=list)
    reply: Json | None = None
    ended: str = ""
    part: int = 0
    follows: bool = False

    @staticmethod
    def from_row(row: Json, where: str, kwargs: Json | None = None) -> Conversation:
        """Reads {"id", "messages", "tools"?, "chat_template_kwargs"?} or {"id", "text"}.

        Assistant messages are dropped, because the target answers again; the names of the functions
        that they call stay.

        Args:
            kwargs: chat_template_kwargs for rows that do not set them.

        Raises:
            UserError: neither, an id of another type, or messages without a user turn or of an
                unknown form.
        """
        conversation = Conversation(row_id(row["id"], where), str(row.get("source") or ""))
        if isinstance(row.get("text"), str) and row["text"] and "messages" not in row:
            conversation.text = row["text"]
            return conversation
        turn: Turn = []
        for message in [
            *checked_messages(row, where),
            {"role": "assistant"},
        ]:  # the added one closes the last turn
            if message["role"] != "assistant":
                turn.append(message)
            elif turn:
                calls = message.get("tool_calls", ())
                conversation.turns.append(turn)
                conversation.called.append(
                    [(it["function"]["name"], it.get("id", "")) for it in calls]
                )
                turn = []
        if not any(message["role"] == "user" for turn in conversation.turns for message in turn):
            raise UserError(f"{where}: no message has the role user; add one, or drop the row")
        conversation.inputs = ChatInputs.of(row, kwargs)
        return conversation

    @property
    def total_turns(self) -> int:
        return len(self.turns) or 1

    def open(self, renderer: ChatRenderer) -> list[int]:
        """Starts the conversation; returns the first prompt's ids."""
        self.tokens = renderer.open(
            [*self.history, *self.turns[0]] if self.turns else self.text, self.inputs
        )
        return self.tokens

    def accept(self, tokens: Sequence[int], finish: str) -> None:
        """Appends the next response, stop token included."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        self.spans.append([start, start + len(tokens)])
        self.finish.append(finish)

    @property
    def messages(self) -> list[Json]:
        """All messages before the next response, the target's answers as `answers` has them."""
        found = list(self.history)
        for turn, answer in zip(self.turns, [*self.answers, None], strict=False):
            if answer is None:
                found += turn
            else:
                found += [*turn, answer]
        return found

    def next_turn(self, renderer: ChatRenderer, max_length: int) -> list[int] | None:
        """Appends and returns the glue to the next response. None when the row ends: after its last
        turn, after a truncated response, where the template rewrites earlier turns (`rest` then
        continues), where the target made other calls than the tools' recorded results answer, and
        where max_length leaves no token for a response.
        """
        done = len(self.spans)
        if done >= self.total_turns or self.finish[-1] != "stop":
            return None
        tokenizer, form = renderer.tokenizer, answer_format(renderer.tokenizer, self.inputs)
        start, end = self.spans[-1]
        so_far = decode(tokenizer, self.tokens)
        answer = decode(tokenizer, self.tokens[start : end - 1])
        if not self._made_the_recorded_calls(form, answer):
            self.ended = "other_tool_calls"
            return None
        glue = None
        chosen = None
        for message in self._as_messages(
            tokenizer,
            form,
            answer,
            decode(tokenizer, self.tokens[: end - 1]),
        ):
            self.answers[done - 1 :] = [message]
            try:
                said = render_text(tokenizer, self.messages, True, self.inputs)
            except TemplateRefuses:
                continue
            if said.startswith(so_far):
                glue = text_ids(tokenizer, said[len(so_far) :])
            else:
                glue = None
            if not glue and not any(
                "tool_calls" in it or it["role"] == "tool" for it in self.messages
            ):
                texts = [decode(tokenizer, self.tokens[a : b - 1]) for a, b in self.spans]
                turns = [[*self.history, *self.turns[0]], *self.turns[1 : done + 1]]
                with contextlib.suppress(
                    TemplateRefuses
                ):  # one that trims an answer writes what surrounds it
                    glue = turn_glue(tokenizer, turns, self.tokens[-1], texts, self.inputs)
            if glue:
                chosen = message
            else:
                chosen = chosen or message
            if glue:
                break
        self.answers[done - 1 :] = [chosen or {"role": "assistant", "content": answer}]
        self.follows = chosen is not None and not glue
        if chosen:
            self.ended = ""
        else:
            self.ended = "template_refuses_answer"
        if not glue or len(self.tokens) + len(glue) + 1 > max_length:
            return None
        self.tokens.extend(glue)
        return glue

    def _made_the_recorded_calls(self, form: AnswerFormat, answer: str) -> bool:
        """Whether the last response calls the functions that the recorded one called, in that
        order.
        """
        if self.called:
            recorded = ["".join(name.split()) for name, _ in self.called[len(self.spans) - 1]]
        else:
            recorded = []
        if not recorded and not self.inputs.tools:
            return True
        calls = (self.reply or {}).get("tool_calls")
        if calls:
            made = [it["function"]["name"] for it in calls]
        else:
            made = form.called(answer)
        return ["".join(name.split()) for name in made] == recorded

    def _as_messages(
        self,
        tokenizer: PreTrainedTokenizerBase,
        form: AnswerFormat,
        answer: str,
        so_far: str,
    ) -> Iterator[Json]:
        """The last response as a message, in the forms that its template may read, the best last.

        Args:
            answer: its text. so_far: the text of the row up to its end.
        """
        done = len(self.spans)
        if self.called:
            keys = [key for _, key in self.called[done - 1]]
        else:
            keys = []
        made = self.reply or form.message(
            tokenizer,
            answer,
            keys if self.inputs.tools or keys else None,
        )
        ids = [call.get("id") for call in made.get("tool_calls", ())]
        results = [it for it in self.turns[done] if it["role"] == "tool"]
        for key, result in zip(ids, results, strict=False):
            result["tool_call_id"] = key or result.get("tool_call_id", "")
        if self.reply is not None:
            yield self.reply
            return
        plain = {"role": "assistant", "content": answer}

        def again(message: Json) -> str | None:
            """The row with the message as the template renders it; None if it refuses."""
            try:
                return render_text(tokenizer, [*before, message], inputs=self.inputs)
            except TemplateRefuses:
                return None

        before = self.messages
        if made == plain:
            yield plain
            return
        exact = again(made)
        if exact is None and "tool_calls" in made and form.lead:
            return  # no server would make a prompt of these calls
        if (again(plain) or "").startswith(so_far):
            yield plain
        if exact is not None and ("tool_calls" not in made or exact.startswith(so_far)):
            yield made

    def rest(self, renderer: ChatRenderer, max_length: int, least: int = 1) -> Conversation | None:
        """The conversation's next row, opened, where `next_turn` ended this one because the
        template rewrites earlier turns.
        """
        if not self.follows:
            return None
        done = len(self.spans)
        turns = self.turns[done:]
        called = self.called[done:]
        later = Conversation(
            self.id,
            self.source,
            turns,
            inputs=self.inputs,
            called=called,
            part=self.part + 1,
        )
        later.history = self.messages[: -len(self.turns[done])]
        self.follows = len(later.open(renderer)) + least <= max_length
        return later if self.follows else None

    def record(self, renderer: ChatRenderer) -> Json:
        """The record that the store keeps."""
        end = self.spans[-1][1]
        # The last row has the plain id: all are stored then.
        if self.follows:
            key = f"{self.id}/{self.part}"
        else:
            key = self.id
        record = {
            "id": key,
            "tokens": self.tokens[:end],
            "spans": self.spans,
            "finish": self.finish,
            "source": self.source,
        }
        if self.turns:
            form = answer_format(renderer.tokenizer, self.inputs)
        else:
            form = AnswerFormat()
        known = [
            form.reasoning_tokens(renderer.tokenizer, self.tokens[start:end])
            for start, end in self.spans
        ]
        return (
            record
            | ({} if None in known else {"reasoning": known})
            | ({"part": self.part} if self.follows else {})
        )
