"""Conversations turn by turn, with the origin of every token.

Tokens are appended as they are produced and never parsed out of text: the prompt, the target's
responses with their stop tokens, and the glue, which the chat template writes between a response
and the next one.

    piece   opening (system, user 1, assistant header)  response 1 + stop  glue (user 2, assistant header)  response 2
    span                                                [start, end)                                        [start, end)

The images of a row are read with its first prompt. A turn that brings new ones begins another row.

A template may write earlier turns otherwise once a later one follows, for example without their
reasoning. The tokens so far are then no longer what the target reads, and the conversation goes on
in a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.data.answers import AnswerFormat, answer_format, without_spaces
from drafttrain.data.chat import (
    NO_INPUTS,
    ChatInputs,
    TemplateRefuses,
    closing_token,
    decode,
    has_template,
    longest_token,
    prompt_ids,
    render_text,
    text_ids,
    turn_glue,
)
from drafttrain.data.image_parts import content_text, images_in, read_images
from drafttrain.data.image_prompts import seeing_inputs, shown_prompt
from drafttrain.data.row_formats import checked_messages, row_id
from drafttrain.data.transcript import Transcript
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.images import BadPicture, PictureStore
from drafttrain.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from drafttrain.target.sight import ImagePrompt

Turn = list[Json]  # messages before a response: of the user, the system, or tools


class ChatRenderer:
    """What a target's conversations need of its tokenizer.

    Attributes:
        store: reads the pictures of prompts, which lie beside them.
        stop_ids: tokens that end a response: the target's own, and the special token that closes
            the template's turns.
        closing_id: the stop token to append to a finished response of which only the text is known.

    Raises:
        UserError: no token ends the target's responses.
    """

    def __init__(self, target: Target, store: PictureStore = PictureStore(Path())):  # noqa: B008
        self.target = target
        self.store = store
        self.tokenizer = target.tokenizer
        closing = closing_token(self.tokenizer)
        self.stop_ids: set[int] = set(target.eos_ids) | closing
        if not self.stop_ids:
            raise UserError(
                f"target={target.name!r} has no end-of-sequence token: set eos_token_id in its config.json"
            )
        if not closing:
            # The template closes no turn: take the end of the sequence, or any stop token.
            closing = {self.tokenizer.eos_token_id} & self.stop_ids
        if not closing:
            closing = self.stop_ids
        self.closing_id = min(closing)

    def open(self, prompt: str | Turn, inputs: ChatInputs = NO_INPUTS) -> list[int]:
        """Token ids before the first response.

        Args:
            prompt: messages, or plain text (a pretrained-only model's prompt).
        """
        if not isinstance(prompt, str) and not has_template(self.tokenizer):
            raise UserError(
                f"target={self.target.name!r} has no chat template, so `messages` cannot be rendered; give prompts "
                "with `text`, or a target with a chat template"
            )
        return prompt_ids(self.tokenizer, prompt, inputs)


@dataclass
class Conversation(Transcript):
    """One row of the prompts file, and what has been generated for it.

    Attributes:
        turns: messages before each response (user, system, tool); [] for `text`.
        called: names of the functions that the recorded answer to each turn calls, and the ids of
            the calls.
        history, answers: messages before the row's first turn, and the row's responses as messages.
        reply: the last response as a message, from a server that returns text.
        ended: why the conversation ended before its last turn, for the counts; '' if for no reason
            of its own.
        part: number of rows before the present one; follows: whether another row continues it.
        recorded: the record of a row with the answers of a file; nothing is generated for it.
        image_prompt: the first prompt with its images, until a backend has read it.
    """

    id: str
    source: str
    turns: list[Turn] = field(default_factory=list)
    text: str = ""
    called: list[list[tuple[str, str]]] = field(default_factory=list)
    history: list[Json] = field(default_factory=list)
    answers: list[Json] = field(default_factory=list)
    reply: Json | None = None
    ended: str = ""
    part: int = 0
    follows: bool = False
    recorded: Json | None = None
    image_prompt: ImagePrompt | None = None

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

        closed = [*checked_messages(row, where), {"role": "assistant"}]  # ends the last turn
        asked = False
        turn: Turn = []
        for message in closed:
            if message["role"] != "assistant":
                turn.append(message)
                if message["role"] == "user":
                    asked = True
            elif turn:
                calls = message.get("tool_calls", ())
                named = [(call["function"]["name"], call.get("id", "")) for call in calls]
                conversation.turns.append(turn)
                conversation.called.append(named)
                turn = []
        if not asked:
            raise UserError(f"{where}: no message has the role user; add one, or drop the row")
        conversation.inputs = ChatInputs.of(row, kwargs)
        return conversation

    @property
    def total_turns(self) -> int:
        return max(len(self.turns), 1)

    @property
    def turns_left(self) -> int:
        """Number of turns without a response."""
        return self.total_turns - len(self.spans)

    def open(self, renderer: ChatRenderer) -> list[int]:
        """Starts the conversation; returns the first prompt's ids.

        Raises:
            BadPicture: a picture of any turn that cannot be used.
            UserError: the template refuses the turns, or the target reads no images.
        """
        if not self.part:
            read = renderer.store.read
            self.turns = [read_images(turn, read) for turn in self.turns]
        if not self.turns:
            self.tokens = renderer.open(self.text, self.inputs)
            return self.tokens
        prompt = self.history + self.turns[0]
        self.images = images_in(prompt)
        if not self.images:
            self.tokens = renderer.open(prompt, self.inputs)
            return self.tokens

        # The images of the first prompt; later turns with images begin rows of their own.
        self.inputs = seeing_inputs(renderer.target, self.inputs)
        text = render_text(renderer.tokenizer, prompt, True, self.inputs)
        self.image_prompt = shown_prompt(renderer.target, text, prompt)
        self.tokens = self.image_prompt.ids.tolist()
        self.shown = (text, len(self.tokens))
        return self.tokens

    def may_fit(self, renderer: ChatRenderer, max_length: int) -> bool:
        """Whether the first prompt's text is short enough for so many tokens."""
        letters = len(self.text)
        if self.turns:
            letters = sum(len(content_text(message["content"])) for message in self.turns[0])
        return letters <= max_length * longest_token(renderer.tokenizer)

    @property
    def messages(self) -> list[Json]:
        """All messages before the next response, the target's answers as `answers` has them."""
        found = list(self.history)
        for number, turn in enumerate(self.turns[: len(self.answers) + 1]):
            found += turn
            if number < len(self.answers):
                found.append(self.answers[number])
        return found

    def next_turn(self, renderer: ChatRenderer, max_length: int) -> list[int] | None:
        """Appends and returns the glue to the next response; None when the row ends.

        A row ends after its last turn, after a truncated response, where the template rewrites earlier
        turns (`rest` then continues), where the target made other calls than the tools' recorded results
        answer, and where max_length leaves no token for a response.
        """
        if not self.turns_left or self.finish[-1] != "stop":
            return None
        tokenizer = renderer.tokenizer
        form = answer_format(tokenizer, self.inputs)
        start, end = self.spans[-1]
        answer = decode(tokenizer, self.tokens[start : end - 1])  # without the stop token
        if not self._made_the_recorded_calls(form, answer):
            self.ended = "other_tool_calls"
            return None

        # Look for a message with which the template writes the row's text and continues it. The
        # first message that the template reads at all begins the next row otherwise.
        before = self.written(tokenizer, end - 1)
        self.ended = ""
        self.follows = False
        chosen = None
        glue = None
        for message in self._as_messages(tokenizer, form, answer, before):
            self._answer_with(message)
            try:
                prompt = render_text(tokenizer, self.messages, True, self.inputs)
            except TemplateRefuses:
                continue
            if len(prompt) > max_length * longest_token(tokenizer):
                return None
            glue = self._glue(tokenizer, prompt)
            if glue or chosen is None:
                chosen = message
            if glue:
                break

        if chosen is None:
            self.ended = "template_refuses_answer"
            self._answer_with({"role": "assistant", "content": answer})
            return None
        self.follows = not glue
        self._answer_with(chosen)
        if not glue or len(self.tokens) + len(glue) + 1 > max_length:
            return None
        self.tokens.extend(glue)
        return glue

    def _answer_with(self, message: Json) -> None:
        """Makes the message the last response's."""
        del self.answers[len(self.spans) - 1 :]
        self.answers.append(message)

    def _glue(self, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int] | None:
        """Tokens from the row's end to the end of the next prompt's text.

        None if the template writes the row differently there, or the turn brings images.
        """
        if images_in(self.turns[len(self.spans)]):
            return None  # new images are read with a new row
        so_far = self.written(tokenizer)
        if prompt.startswith(so_far) and len(prompt) > len(so_far):
            return text_ids(tokenizer, prompt[len(so_far) :])
        for message in self.messages:
            if "tool_calls" in message or message["role"] == "tool":
                return None

        # A template that trims an answer still writes the same around it.
        texts = [decode(tokenizer, self.tokens[start : end - 1]) for start, end in self.spans]
        turns = [self.history + self.turns[0]]
        turns += self.turns[1 : len(self.spans) + 1]
        try:
            return turn_glue(tokenizer, turns, self.tokens[-1], texts, self.inputs)
        except TemplateRefuses:
            return None

    def _made_the_recorded_calls(self, form: AnswerFormat, answer: str) -> bool:
        """Whether the last response calls the functions of the recorded one, in that order."""
        recorded = []
        if self.called:
            recorded = [name for name, _ in self.called[len(self.spans) - 1]]
        if not recorded and not self.inputs.tools:
            return True
        if self.reply is not None and self.reply.get("tool_calls"):
            made = [call["function"]["name"] for call in self.reply["tool_calls"]]
        else:
            made = form.called(answer)
        return [without_spaces(name) for name in made] == [
            without_spaces(name) for name in recorded
        ]

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
        keys = []
        if self.called:
            keys = [key for _, key in self.called[done - 1]]
        if self.reply is not None:
            made = self.reply
        elif self.inputs.tools or keys:
            made = form.message(tokenizer, answer, keys)
        else:
            made = form.message(tokenizer, answer, None)

        # The recorded results answer the calls that were made.
        ids = [call.get("id") for call in made.get("tool_calls", ())]
        results = [message for message in self.turns[done] if message["role"] == "tool"]
        for key, result in zip(ids, results, strict=False):
            if key:
                result["tool_call_id"] = key
            else:
                result.setdefault("tool_call_id", "")
        plain = {"role": "assistant", "content": answer}
        if self.reply is not None or made == plain:
            yield made
            return

        before = self.messages
        # The parts of the answer apart, and all of it as content.
        exact = _rendering(tokenizer, [*before, made], self.inputs)
        if exact is None and "tool_calls" in made and form.lead:
            return  # no server would make a prompt of these calls
        as_text = _rendering(tokenizer, [*before, plain], self.inputs)
        if as_text is not None and as_text.startswith(so_far):
            yield plain
        if exact is not None and ("tool_calls" not in made or exact.startswith(so_far)):
            yield made

    def rest(self, renderer: ChatRenderer, max_length: int) -> Conversation | None:
        """The conversation's next row, opened; None if no row follows.

        One follows where the template rewrites earlier turns, and where a turn brings new images.
        """
        if not self.follows:
            return None
        done = len(self.spans)
        later = Conversation(
            self.id,
            self.source,
            self.turns[done:],
            inputs=self.inputs,
            called=self.called[done:],
            history=self.messages[: -len(self.turns[done])],
            part=self.part + 1,
        )
        # A row without room for a response is not begun.
        try:
            self.follows = len(later.open(renderer)) < max_length
        except BadPicture:
            self.ended = "later_image_refused"
            self.follows = False
        if self.follows:
            return later
        return None

    def record(self, renderer: ChatRenderer) -> Json:
        """The record that the store keeps."""
        if self.recorded is not None:
            return self.recorded
        form = AnswerFormat()
        if self.turns:
            form = answer_format(renderer.tokenizer, self.inputs)
        if not self.follows:  # the last row has the plain id: all are stored then
            return self.stored(renderer.tokenizer, form, self.id, self.source)
        record = self.stored(renderer.tokenizer, form, f"{self.id}/{self.part}", self.source)
        record["part"] = self.part
        return record


def _rendering(
    tokenizer: PreTrainedTokenizerBase, messages: list[Json], inputs: ChatInputs
) -> str | None:
    """The messages as the template renders them; None if it refuses."""
    try:
        return render_text(tokenizer, messages, inputs=inputs)
    except TemplateRefuses:
        return None
