"""Conversations as token rows with the spans that the assistant wrote, found by rendering the chat
template.

The conversation is rendered turn by turn; the code never searches for a template's markers in text:

    render(messages[:i], add_generation_prompt=True)     p p p p p p
    render(messages[:i + 1])                             p p p p p p r r r r e n
    span of turn i (what the target would have written)              r r r r e

p prompt, r the assistant's answer (reasoning, content, calls), e the token that ends the turn, n
what the template adds after it (a line break).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from drafttrain.data.answers import answer_format, rendered_answer
from drafttrain.data.chat import (
    NO_INPUTS,
    ChatInputs,
    Message,
    TemplateRefuses,
    encode,
    render_text,
    text_ids,
)
from drafttrain.data.row_formats import parse_row, row_id
from drafttrain.errors import UserError
from drafttrain.files import Json, read_jsonl


class TemplateRewrites(UserError):
    """The chat template renders an earlier turn differently once a later one follows, for example
    without its reasoning.
    """


class _Row:
    """A growing row: the tokens of some turns of a conversation and the spans of its answers."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        inputs: ChatInputs,
        stops: Collection[int],
    ):
        self.tokenizer = tokenizer
        self.messages = messages
        self.inputs = inputs
        self.stops = stops
        self.tokens: list[int] = []
        self.text = ""
        self.spans: list[list[int]] = []
        self.finish: list[str] = []

    def add(self, i: int, id: str) -> None:
        """Appends message i and its prompt. Raises TemplateRewrites, which leaves the row as it is;
        UserError.
        """
        where = f"row id={id!r}, message {i}"
        answer = self.messages[i]
        tokenizer = self.tokenizer
        said = [(answer.get(key) or "").strip() for key in ("content", "reasoning_content")]
        if not any(said) and not answer.get("tool_calls"):
            raise UserError(
                f"{where}: empty mask: the assistant's content is empty; drop such rows"
            )
        if i == 0:
            raise UserError(
                f"{where}: the assistant's turn does not begin where a prompt ends; start with a user turn"
            )
        try:
            before = render_text(tokenizer, self.messages[:i], True, self.inputs)
        except TemplateRefuses as error:
            raise UserError(f"{where}: {error}") from error
        if not before.startswith(self.text):
            raise TemplateRewrites(
                f"{where}: the chat template renders the turns before it differently from here on"
            )
        try:
            text, end = rendered_answer(
                tokenizer,
                self.messages[:i],
                answer,
                self.inputs,
                self.stops,
            )
        except TemplateRefuses as error:
            raise UserError(
                f"{where}: {error}; let the target answer again: drafttrain generate"
            ) from error
        if end and any(end in part for part in said):
            raise UserError(
                f"{where}: the content itself holds {end!r}, the token that ends a turn; drop such rows"
            )
        prompt = _extend(tokenizer, self.tokens, self.text, before)
        self.tokens = _extend(tokenizer, prompt, before, before + text)
        self.text = before + text
        self.spans.append([len(prompt), len(self.tokens)])
        self.finish.append("stop" if end else "length")

    def record(self, id: str) -> Json:
        """The stored record."""
        form = answer_format(self.tokenizer, self.inputs)
        known = [
            form.reasoning_tokens(self.tokenizer, self.tokens[start:end])
            for start, end in self.spans
        ]
        record = {"id": id, "tokens": self.tokens, "spans": self.spans, "finish": self.finish}
        return record | ({} if None in known else {"reasoning": known})


def conversation_record(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    id: str,
    inputs: ChatInputs = NO_INPUTS,
    stop_ids: Collection[int] = (),
) -> Json:
    """A conversation as tokens with the spans that the assistant wrote.

    Args:
        messages: turns in order. Turns after the last assistant turn are left out.
        stop_ids: tokens that end the target's responses, besides the tokenizer's special ones.

    Returns:
        {"id", "tokens", "spans": [[start, end], ...], "finish": "stop" or "length" per span,
        "reasoning": its tokens per span}.
        A span holds the token that ends the turn, where the template writes one ("stop"): the
        target has to predict it too.

    Raises:
        TemplateRewrites: the template renders earlier turns differently later on; the conversation
            takes several records.
        UserError: no assistant turn, an empty one, or one whose text the rendering does not
            contain.
    """
    row = _Row(tokenizer, messages, inputs, stop_ids)
    for i in _assistant_turns(messages, id):
        row.add(i, id)
    return row.record(id)


def answer_record(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    id: str,
    inputs: ChatInputs = NO_INPUTS,
    stop_ids: Collection[int] = (),
) -> Json:
    """`conversation_record` with the last answer as the only span, as the target saw it when it
    gave that answer.
    """
    row = _Row(tokenizer, messages, inputs, stop_ids)
    row.add(_assistant_turns(messages, id)[-1], id)
    return row.record(id)


def conversation_records(
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    kwargs: Json | None = None,
    stop_ids: Collection[int] = (),
    unusable: Callable[[str, UserError], None] | None = None,
) -> Iterator[Json]:
    """Records of a JSONL file of conversations: OpenAI, ShareGPT, instruction and answer, or with
    tools.

    Where the template rewrites earlier turns, a conversation goes on in another record, rendered as
    the target sees it from there. All records of such a conversation have ids like "row/2", for
    message 2 as the first answer; all but the last have a "part".

    Args:
        kwargs: chat_template_kwargs for rows that do not set them. stop_ids: as in
            `conversation_record`.
        unusable: called with the id and the error of a row that is left out; None raises the error.

    Raises:
        UserError: as in `conversation_record`, or a row that is not a conversation.
    """
    for number, row in read_jsonl(path):
        try:
            yield from _records_of(tokenizer, path, number, row, kwargs, stop_ids)
        except UserError as error:
            if unusable is None:
                raise
            unusable(str(row.get("id", number)), error)


def _records_of(
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    number: int,
    row: Json,
    kwargs: Json | None,
    stop_ids: Collection[int],
) -> list[Json]:
    """The records of a row; see `conversation_records`."""
    parsed = parse_row(row) or {}
    if "messages" not in parsed:
        raise UserError(
            f"{path} line {number}: no conversation in a known format with text in every turn; clean the file "
            "with: drafttrain prompts --source file"
        )
    id = row_id(row.get("id", number), f"{path} line {number}")
    source = {"source": str(row.get("source") or path.name)}
    messages = parsed["messages"]
    inputs = ChatInputs.of(parsed, kwargs)
    made: list[tuple[int, _Row]] = []
    for i in _assistant_turns(messages, id):
        try:
            if not made:
                raise TemplateRewrites("the first row")
            made[-1][1].add(i, id)
        except TemplateRewrites:
            made.append((i, _Row(tokenizer, messages, inputs, stop_ids)))
            made[-1][1].add(i, id)
    records = [built.record(id if len(made) == 1 else f"{id}/{i}") | source for i, built in made]
    return [*({**record, "part": part} for part, record in enumerate(records[:-1])), records[-1]]


def _assistant_turns(messages: Sequence[Message], id: str) -> list[int]:
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UserError(
            f"row id={id!r}: empty mask: no message of role assistant, so there is nothing to learn from"
        )
    return turns


def _extend(
    tokenizer: PreTrainedTokenizerBase,
    tokens: list[int],
    text: str,
    longer: str,
) -> list[int]:
    """Token ids of `longer` that begin with `tokens`, the ids of its prefix `text`.

    If a token would span the border (a line break that ends the prompt and one that begins the
    answer), the rest is encoded separately, as the target generates its answer after a complete
    prompt.
    """
    ids = encode(tokenizer, longer)
    if ids[: len(tokens)] == tokens:
        return ids
    return tokens + text_ids(tokenizer, longer[len(text) :])
