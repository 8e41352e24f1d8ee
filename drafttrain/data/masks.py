"""Recorded conversations as token rows with the spans that the assistant wrote.

The conversation is rendered turn by turn; the code never searches for a template's markers in text:

    render(messages[:i], add_generation_prompt=True)     p p p p p p
    render(messages[:i + 1])                             p p p p p p r r r r e n
    span of turn i (what the target would have written)              r r r r e

p prompt, r the assistant's answer (reasoning, content, calls), e the token that ends the turn, n
what the template adds after it (a line break).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from drafttrain.data.answers import answer_format, rendered_answer
from drafttrain.data.chat import (
    ChatInputs,
    Message,
    TemplateRefuses,
    encode,
    longest_token,
    render_text,
    text_ids,
)
from drafttrain.data.conversation import ChatRenderer
from drafttrain.data.image_parts import content_text, images_in, read_images, sources_in
from drafttrain.data.image_prompts import seeing_inputs, shown_prompt
from drafttrain.data.row_formats import parse_row, row_id
from drafttrain.data.transcript import Transcript
from drafttrain.errors import UserError
from drafttrain.files import Json, read_jsonl
from drafttrain.target import Target


class TemplateRewrites(UserError):
    """The chat template renders an earlier turn differently once a later one follows.

    For example, without its reasoning.
    """


class RecordedTranscript(Transcript):
    """A row that grows by recorded answers.

    Args:
        messages: of the whole conversation.
        stops: tokens that end the target's responses, besides the tokenizer's special ones.
        target: reads the pictures of the messages; None where there must be none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        inputs: ChatInputs,
        stops: Collection[int],
        target: Target | None = None,
    ):
        super().__init__(inputs=inputs)
        self.tokenizer = tokenizer
        self.target = target
        self.messages = messages
        self.stops = stops
        self.text = ""  # that the tokens stand for

    def add(self, i: int, id: str) -> None:
        """Appends the prompt before message i, and the message.

        Raises TemplateRewrites, which leaves the row as it is; UserError, BadPicture.
        """
        where = f"row id={id!r}, message {i}"
        answer = self.messages[i]
        before = self.messages[:i]
        content = (answer.get("content") or "").strip()
        reasoning = (answer.get("reasoning_content") or "").strip()
        if not content and not reasoning and not answer.get("tool_calls"):
            raise UserError(
                f"{where}: empty mask: the assistant's content is empty; drop such rows"
            )
        if i == 0:
            raise UserError(
                f"{where}: the assistant's turn does not begin where a prompt ends; start with a user turn"
            )

        try:
            # The prompt must go on from the row as it is.
            prompt = render_text(self.tokenizer, before, True, self.inputs)
        except TemplateRefuses as error:
            raise UserError(f"{where}: {error}") from error
        images = images_in(before)
        if self.text and len(images) > len(self.images):
            raise TemplateRewrites(f"{where}: the turns before it bring new images")
        if not prompt.startswith(self.text):
            raise TemplateRewrites(
                f"{where}: the chat template renders the turns before it differently from here on"
            )
        try:
            text, end = rendered_answer(
                self.tokenizer,
                before,
                answer,
                self.inputs,
                self.stops,
            )
        except TemplateRefuses as error:
            raise UserError(
                f"{where}: {error}; let the target answer again: drafttrain generate"
            ) from error
        if end and (end in content or end in reasoning):
            raise UserError(
                f"{where}: the content itself holds {end!r}, the token that ends a turn; drop such rows"
            )

        # Prompt and answer are encoded one after the other, as the target meets them.
        if images and not self.text:
            self._see(prompt, before)
        self._extend(prompt)
        start = len(self.tokens)
        self._extend(prompt + text)
        self.spans.append([start, len(self.tokens)])
        if end:
            self.finish.append("stop")
        else:
            self.finish.append("length")

    def _extend(self, text: str) -> None:
        """Appends the tokens of what `text` adds to the row's text.

        A token may span the border, as of a line break that ends the prompt and one that begins the
        answer. The rest is then encoded separately, because the target generates its answer after a
        complete prompt.
        """
        ids: list[int] = []
        if not self.images:  # whose placeholders the text does not repeat
            ids = encode(self.tokenizer, text)
        if ids[: len(self.tokens)] != self.tokens:
            ids = self.tokens + text_ids(self.tokenizer, text[len(self.text) :])
        self.tokens = ids
        self.text = text

    def _see(self, text: str, before: Sequence[Message]) -> None:
        """Begins the row with a prompt with images. Raises BadPicture, UserError."""
        if self.target is None:
            raise UserError("images in these conversations are not read; give text only")
        self.tokens = shown_prompt(self.target, text, before).ids.tolist()
        self.images = images_in(before)
        self.text = text
        self.shown = (text, len(self.tokens))

    def record(self, id: str) -> Json:
        """The stored record."""
        return self.stored(self.tokenizer, answer_format(self.tokenizer, self.inputs), id)


def answer_record(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    inputs: ChatInputs,
    stop_ids: Collection[int],
) -> Json:
    """The record of a logged conversation with its last answer as the only span.

    The row is what the target saw when it gave that answer.

    Args:
        stop_ids: tokens that end the target's responses, besides the tokenizer's special ones.

    Raises UserError: no answer, an empty one, or one whose text the rendering does not contain.
    """
    row = RecordedTranscript(tokenizer, messages, inputs, stop_ids)
    row.add(assistant_turns(messages, "log")[-1], "log")
    return row.record("log")


def recorded_conversations(
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    kwargs: Json | None = None,
    stop_ids: Collection[int] = (),
    max_length: int | None = None,
    renderer: ChatRenderer | None = None,
) -> Iterator[tuple[str, list[Json] | UserError]]:
    """Conversations of a JSONL file: OpenAI, ShareGPT, instruction and answer, or with tools.

    Where the template rewrites earlier turns, a conversation goes on in another record, rendered as
    the target sees it from there. All records of such a conversation have ids like "row/2", for
    message 2 as the first answer; all but the last have a "part".

    Args:
        kwargs: chat_template_kwargs for rows that do not set them. stop_ids: as in
            `answer_record`.
        max_length: tokens of a record that are used; what is far behind them is not read.
        renderer: of the target that reads the file's images, whose pictures a record holds; None
            where there must be none.

    Yields:
        A row's id with its records, or with the reason why it cannot be used: an error of
        `RecordedTranscript.add`, or it is not a conversation.
    """

    def records_of(number: int, row: Json) -> list[Json]:
        """The records of a row. Raises UserError."""
        parsed = parse_row(row)
        if parsed is None or "messages" not in parsed:
            raise UserError(
                f"{path} line {number}: no conversation in a known format with text in every turn; clean the file "
                "with: drafttrain prompts --source file"
            )
        id = row_id(row.get("id", number), f"{path} line {number}")
        source = str(row.get("source") or path.name)
        messages = parsed["messages"]
        if max_length is not None:
            messages = _beginning(messages, max_length * longest_token(tokenizer))
        inputs = ChatInputs.of(parsed, kwargs)
        target = None
        if renderer is not None and sources_in(messages):
            target = renderer.target
            messages = read_images(messages, renderer.store.read)
            inputs = seeing_inputs(target, inputs)

        # A row grows until the template rewrites its turns; then another one begins.
        rows: dict[int, RecordedTranscript] = {}  # by the message that is the first answer
        current = RecordedTranscript(tokenizer, messages, inputs, stop_ids, target)
        for i in assistant_turns(messages, id):
            try:
                current.add(i, id)
            except TemplateRewrites:
                current = RecordedTranscript(tokenizer, messages, inputs, stop_ids, target)
                current.add(i, id)
            if len(current.spans) == 1:
                rows[i] = current
            # Where the template rewrites nothing, all later answers lie behind the row's end. Each would
            # render every turn before it.
            if max_length is not None and len(rows) == 1 and len(current.tokens) > max_length:
                break

        records = []
        for i, made in rows.items():
            key = id
            if len(rows) > 1:
                key = f"{id}/{i}"
            record = {**made.record(key), "source": source}
            if made.images:
                record["pictures"] = made.images
            records.append(record)
        # The last row has no part: it completes the conversation.
        for part, record in enumerate(records[:-1]):
            record["part"] = part
        return records

    for number, row in read_jsonl(path):
        records: list[Json] | UserError
        try:
            records = records_of(number, row)
        except UserError as error:
            records = error
        yield str(row.get("id", number)), records


def _beginning(messages: Sequence[Message], letters: int) -> list[Message]:
    """The messages up to the first answer behind so many letters, and longer texts cut there.

    Splitting 30 MB into tokens takes minutes.
    """
    kept: list[Message] = []
    read = 0
    for message in messages:
        shorter = dict(message)
        for key in ("content", "reasoning_content"):
            if isinstance(message.get(key), str):  # None beside calls of tools
                shorter[key] = message[key][: letters + 1]
        kept.append(shorter)
        read += len(content_text(shorter.get("content")))
        if read > letters and message["role"] == "assistant":
            break
    return kept


def assistant_turns(messages: Sequence[Message], id: str) -> list[int]:
    """Indices of the assistant's messages. Raises UserError: there are none."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UserError(
            f"row id={id!r}: empty mask: no message of role assistant, so there is nothing to learn from"
        )
    return turns
