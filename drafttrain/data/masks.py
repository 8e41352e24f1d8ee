"""Conversations as token rows with the spans that the assistant wrote, found by rendering the chat template.

The conversation is rendered turn by turn; the code never searches for a template's markers in text:

    render(messages[:i], add_generation_prompt=True)     p p p p p p
    render(messages[:i + 1])                             p p p p p p r r r r e n
    span of turn i (what the target would have written)              r r r r e

p prompt, r the assistant's answer, e the token that ends the turn, n what the template adds after it (a line break).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import Message, decode, encode, render_text
from drafttrain.data.row_formats import parse_row, row_id
from drafttrain.errors import UserError
from drafttrain.files import Json, read_jsonl


class TemplateRewrites(UserError):
    """The chat template renders an earlier turn differently once a later one follows, for example without its reasoning."""


def conversation_record(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], id: str) -> Json:
    """A conversation as tokens with the spans that the assistant wrote.

    Args:
        messages: turns in order; `content` is text. Turns after the last assistant turn are left out.

    Returns:
        {"id", "tokens", "spans": [[start, end], ...], "finish": "stop" or "length" per span}. A span holds the token
        that ends the turn, where the template writes one ("stop"), because the target has to predict it too.

    Raises:
        TemplateRewrites: the template renders earlier turns differently later on; make a record per turn.
        UserError: no assistant turn, an empty one, or one whose text the rendering does not contain.
    """
    tokens: list[int] = []
    text, spans, finish = "", [], []
    for i in _assistant_turns(messages, id):
        tokens, text, span, reason = _add_turn(tokenizer, messages, i, id, tokens, text)
        spans.append(span)
        finish.append(reason)
    return {"id": id, "tokens": tokens[: spans[-1][1]], "spans": spans, "finish": finish}


def conversation_records(tokenizer: PreTrainedTokenizerBase, path: Path) -> Iterator[Json]:
    """Records of a JSONL file of conversations: OpenAI, ShareGPT, or instruction and answer.

    If the template rewrites earlier turns, a conversation becomes one record per assistant turn (id "row/2" for message 2),
    each rendered as the target sees it at that point.

    Raises:
        UserError: as in `conversation_record`, or a row that is not a conversation.
    """
    for number, row in read_jsonl(path):
        messages = (parse_row(row) or {}).get("messages")
        if messages is None:
            raise UserError(
                f"{path} line {number}: no conversation in a known format with text in every turn; clean the file "
                "with: drafttrain prompts --source file"
            )
        id, source = (
            row_id(row.get("id", number), f"{path} line {number}"),
            {"source": str(row.get("source") or path.name)},
        )
        try:
            yield conversation_record(tokenizer, messages, id) | source
        except TemplateRewrites:
            for i in _assistant_turns(messages, id):
                tokens, _, span, reason = _add_turn(tokenizer, messages, i, id, [], "")
                yield {"id": f"{id}/{i}", "tokens": tokens[: span[1]], "spans": [span], "finish": [reason]} | source


def _assistant_turns(messages: Sequence[Message], id: str) -> list[int]:
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UserError(
            f"row id={id!r}: empty mask: no message has the role assistant, so there is nothing to learn from"
        )
    return turns


def _add_turn(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], i: int, id: str, tokens: list[int], text: str
) -> tuple[list[int], str, list[int], str]:
    """Appends message i and its prompt to a row of the earlier turns: the row's tokens and text, i's span, and how i ends."""
    where = f"row id={id!r}, message {i}"
    before = render_text(tokenizer, messages[:i], generation=True) if i else ""
    after = render_text(tokenizer, messages[: i + 1])
    if not before.startswith(text):
        raise TemplateRewrites(f"{where}: the chat template renders the turns before it differently from here on")
    if not before or not after.startswith(before):
        raise UserError(
            f"{where}: the assistant's turn does not begin where the chat template's generation prompt ends, so its "
            "span is unknown; start with a user turn, or let the target answer again: drafttrain generate"
        )
    prompt = _extend(tokenizer, tokens, text, before)
    row = _extend(tokenizer, prompt, before, after)
    length, stopped = _response_length(tokenizer, row[len(prompt) :], messages[i]["content"], where)
    return row, after, [len(prompt), len(prompt) + length], "stop" if stopped else "length"


def _extend(tokenizer: PreTrainedTokenizerBase, tokens: list[int], text: str, longer: str) -> list[int]:
    """Token ids of `longer` that begin with `tokens`, the ids of its prefix `text`.

    If a token would span the border (a line break that ends the prompt and one that begins the answer), the rest is encoded
    separately, as the target generates its answer after a complete prompt.
    """
    ids = encode(tokenizer, longer)
    if ids[: len(tokens)] == tokens:
        return ids
    return tokens + tokenizer(longer[len(text) :], add_special_tokens=False)["input_ids"]


def _response_length(tokenizer: PreTrainedTokenizerBase, tail: list[int], content: str, where: str) -> tuple[int, bool]:
    """Number of tokens in `tail` that the target generates: the answer and the stop token, if there is one (True)."""
    wanted = content.strip()  # many templates strip the content
    if not wanted:
        raise UserError(f"{where}: empty mask: the assistant's content is empty; drop such rows")
    text = decode(tokenizer, tail)
    # Text that the template puts before the content (an empty reasoning block) may contain it, so search from the end.
    begin = text.find(wanted) if text.lstrip().startswith(wanted) else text.rfind(wanted)
    if begin < 0:
        raise UserError(
            f"{where}: the chat template's rendering does not contain the assistant's content as given "
            f"({wanted[:40]!r}...), so its mask cannot be verified; let the target answer again: drafttrain generate"
        )
    end = len(tail)
    while len(decode(tokenizer, tail[: end - 1])) >= begin + len(wanted):
        end -= 1
    special = set(tokenizer.all_special_ids)
    for position, token in enumerate(tail[end:], end):
        shown = decode(tokenizer, [token])
        if token in special and token in tail[:end]:
            raise UserError(f"{where}: the content itself holds {shown!r}, the token that ends a turn; drop such rows")
        if token in special:
            return position + 1, True
        if shown.strip():
            break
    return end, False
