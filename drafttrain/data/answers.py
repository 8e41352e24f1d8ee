"""The target's answers as token ids, as messages of a chat template, and back: reasoning, content and tool calls.

How a target writes them is derived from its template, by rendering messages with marked parts:

    prompt | <think> marked reasoning </think> marked content              <tool_call>{"name": "marked name", ...
             opening                  closing ...                          lead                      follow
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

from drafttrain.data.chat import (
    MARKED_NAME,
    ChatInputs,
    Message,
    TemplateRefuses,
    closing_token,
    decode,
    has_template,
    leading_special,
    marked_calls,
    render_text,
    text_ids,
)
from drafttrain.files import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HELLO: list[Message] = [{"role": "user", "content": "hello"}]
_REASONING, _CONTENT = "drafttrain marks this reasoning", "drafttrain marks this content"
_KEYS = ("marks000{}", f"functions.{MARKED_NAME}:{{}}")  # ids of calls in the forms that templates ask for
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class AnswerFormat:
    """How a target writes its answers.

    Attributes:
        opening: text that begins the reasoning; '' where the prompt ends with it, None where the target does not reason.
        closing: token that ends the reasoning; None if it is no token of its own.
        between: text from the reasoning to the content. header: text before the content of an answer without reasoning.
        lead, follow: text before the name of a called function and the letter after it, without whitespace; '' if unknown.
    """

    opening: str | None = None
    closing: int | None = None
    between: str = ""
    header: str = ""
    lead: str = ""
    follow: str = ""

    def reasoning_tokens(self, tokenizer: PreTrainedTokenizerBase, response: Sequence[int]) -> int | None:
        """Number of the response's first tokens that are reasoning, its end included; None if that cannot be known."""
        if self.opening is None or not decode(tokenizer, response).lstrip().startswith(self.opening.strip()):
            return 0
        if self.closing is None:
            return None
        return list(response).index(self.closing) + 1 if self.closing in response else len(response)

    def called(self, text: str) -> list[str]:
        """Names of the functions that an answer calls, without whitespace."""
        if not self.lead:
            return ["".join(call["name"].split()) for call in _json_calls(text)]
        pieces = "".join(text.split()).split(self.lead)[1:]
        return [piece.partition(self.follow)[0] for piece in pieces]

    def message(self, tokenizer: PreTrainedTokenizerBase, text: str, keys: Sequence[str]) -> Json:
        """An answer's text as a message with its reasoning and JSON calls apart. keys: ids for calls that have none."""
        made: Json = {"role": "assistant", "content": text}
        close = decode(tokenizer, [self.closing]) if self.closing is not None else ""
        if close and self.opening is not None and text.startswith(self.opening):
            reasoning, _, rest = text[len(self.opening) :].partition(close)
            gap = self.between.lstrip().removeprefix(close)
            made |= {"content": rest.removeprefix(gap), "reasoning_content": reasoning.strip("\n")}
        elif self.header:
            made["content"] = text.removeprefix(self.header)
        if calls := list(_json_calls(made["content"])) or list(self._called_with(made["content"])):
            ids = [call.get("id") or key for call, key in zip(calls, [*keys, *[""] * len(calls)], strict=False)]
            made["tool_calls"] = [
                {"type": "function", "id": key, "function": {"name": call["name"], "arguments": call["arguments"]}}
                for call, key in zip(calls, ids, strict=True)
            ]
            made["content"] = ""
        return made

    def _called_with(self, text: str) -> Iterator[Json]:
        """The calls of an answer whose names stand before their arguments in JSON."""
        end = 0
        for name in self.called(text):
            at = text.find(name, end)
            begin = text.find("{", at)
            try:
                arguments, end = _DECODER.raw_decode(text, begin) if 0 <= at < begin else ({}, len(text))
            except (ValueError, RecursionError):
                return
            key = re.compile(rf"functions\.{re.escape(name)}:\d+").search(
                text, max(0, at - 10), begin
            )  # of Kimi's calls
            yield {"name": name, "arguments": arguments} | ({"id": key[0]} if key else {})


def _json_calls(text: str) -> Iterator[Json]:
    """The JSON objects in a text that are calls, as {"name", "arguments", "id"?}."""
    at = text.find("{")
    while at >= 0:
        try:
            found, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            found, end = None, at + 1
        arguments = found.get("arguments", found.get("parameters")) if isinstance(found, dict) else None
        if isinstance(arguments, dict) and isinstance(found.get("name"), str):
            yield {**found, "arguments": arguments}
        at = text.find("{", end)


def _shared(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def answer_format(tokenizer: PreTrainedTokenizerBase, inputs: ChatInputs) -> AnswerFormat:
    """The format of the target's answers under these inputs. Raises TemplateRefuses: the template does not read them."""
    if not has_template(tokenizer):
        return AnswerFormat()
    template = tokenizer.get_chat_template(tools=list(inputs.tools) or None)
    return _derived(tokenizer, template, json.dumps(inputs.kwargs, sort_keys=True), bool(inputs.tools))


@lru_cache(maxsize=256)
def _derived(tokenizer: PreTrainedTokenizerBase, template: str, kwargs: str, tools: bool) -> AnswerFormat:
    inputs = ChatInputs((), json.loads(kwargs))
    before = render_text(tokenizer, _HELLO, True, inputs)
    marked = {"role": "assistant", "content": _CONTENT, "reasoning_content": _REASONING}
    bare = render_text(tokenizer, [*_HELLO, {"role": "assistant", "content": _CONTENT}], inputs=inputs).partition(
        _CONTENT
    )
    header = bare[0].removeprefix(before) if bare[0].startswith(before) else ""
    head, found, rest = "", "", ""
    for more in ({}, *(marked_calls(key, 1) for key in _KEYS)):  # some keep reasoning only beside calls
        with contextlib.suppress(TemplateRefuses):
            text = render_text(tokenizer, [*_HELLO, {**more, **marked}], inputs=inputs)
            head, found, rest = text.partition(_REASONING)
        if found:
            break
    between, after, _ = rest.partition(_CONTENT)
    opening, closing = None, None
    if found and after:
        opening = head[len(before) :] if head.startswith(before) else None
        closing = min(leading_special(tokenizer, between.lstrip()), default=None)
    elif last := text_ids(tokenizer, before.rstrip())[-1:]:  # the prompt may open reasoning that no history keeps
        tag = decode(tokenizer, last).strip()
        closing = min(leading_special(tokenizer, tag[:1] + "/" + tag[1:]), default=None) if tag else None
        if closing is not None and leading_special(tokenizer, tag):
            opening, between = "", decode(tokenizer, [closing])
    if opening is not None and header.split() == (opening + between).split() or not header.strip():
        header = ""  # nothing, or a block of no reasoning
    closing = closing if opening is not None else None
    return AnswerFormat(opening, closing, between, header, *_call_frame(tokenizer, before, inputs))


def _call_frame(tokenizer: PreTrainedTokenizerBase, before: str, inputs: ChatInputs) -> tuple[str, str]:
    """`lead` and `follow` of AnswerFormat."""
    for key in _KEYS:
        for count in (2, 1):  # some templates write one call a turn
            try:
                text = render_text(tokenizer, [*_HELLO, marked_calls(key, count)], inputs=inputs)
            except TemplateRefuses:
                continue
            text = text[_shared(before, text) :]
            first, *others = ("".join(part.split()) for part in text.split(MARKED_NAME))
            if len(others) != count:
                continue
            alike = _shared(first[::-1], others[0][::-1]) if count == 2 else len(first)
            return first[len(first) - alike :], others[-1][:1]
    return "", ""


def rendered_answer(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    answer: Message,
    inputs: ChatInputs,
    stop_ids: Collection[int] = (),
    complete: bool = True,
) -> tuple[str, str]:
    """An answer as text that the target generates after its prompt, and the token at its end, which the text includes.

    Args:
        messages: before the answer. stop_ids: tokens that end the target's responses, besides special ones.
        complete: whether the answer was ended by the target; '' takes the place of the end token otherwise.

    Returns:
        (text, end); end is '' where the template writes no token at the end.

    Raises:
        TemplateRefuses: the template does not write all of the answer where the target would.
    """
    before = render_text(tokenizer, messages, True, inputs)
    after = render_text(tokenizer, [*messages, answer], inputs=inputs)
    form, reasoning = answer_format(tokenizer, inputs), (answer.get("reasoning_content") or "").strip()
    tail = after[len(before) :] if after.startswith(before) else None
    if form.opening == "" and form.closing is not None and reasoning and reasoning not in (tail or ""):
        # The template keeps no reasoning: it goes between the prompt, which opens it, and the rest.
        close = decode(tokenizer, [form.closing])
        bare = before.rstrip().removesuffix(close[:1] + close[2:])
        if after.startswith(bare):
            rest = after[len(bare) :]
            joined = answer["reasoning_content"] + (rest if rest.startswith(close) else f"\n{close}\n\n{rest}")
            tail = joined if complete or answer.get("content") else answer["reasoning_content"]
    if tail is None:  # the answer changes what stands before it, so it is rendered after a question alone
        alone = render_text(tokenizer, _HELLO, True, inputs)
        tail = render_text(tokenizer, [*_HELLO, answer], inputs=inputs)
        tail = tail[len(alone) :] if tail.startswith(alone) else None
    empty = (form.opening or "") + form.between
    if tail is not None and empty and reasoning not in tail and tail.startswith(empty):
        # The template keeps no reasoning of an answer without calls: it goes into the block that is left empty.
        tail = f"{form.opening}{answer['reasoning_content']}{form.between}{tail[len(empty) :]}"
    if tail is None:
        raise TemplateRefuses("the assistant's turn does not begin where the chat template's generation prompt ends")
    end, calls = 0, [("call", call["function"]["name"]) for call in answer.get("tool_calls") or ()]
    for what, part in [("reasoning", reasoning), ("content", (answer.get("content") or "").strip()), *calls]:
        at = tail.find(part, end)
        if at < 0:
            raise TemplateRefuses(
                f"the chat template's rendering does not contain the assistant's {what} as given ({part[:40]!r}...)"
            )
        end = at + len(part)
    if not answer.get("tool_calls") and not (complete and answer.get("content")):
        return tail[:end], ""
    text = tail.rstrip()
    special = {decode(tokenizer, [i]) for i in {*stop_ids, *tokenizer.all_special_ids}}
    stop = max((token for token in special if token.strip() and text.endswith(token)), key=len, default="")
    if stop or not has_template(tokenizer):
        return text, stop
    header = closing_token(tokenizer)  # the next turn's first token ends this one
    if answer.get("tool_calls"):
        longer = render_text(tokenizer, [*messages, answer, {"role": "tool", "content": "hello"}], inputs=inputs)
        after = longer[len(before) + len(text) :] if longer.startswith(before + text) else ""
        header = leading_special(tokenizer, after.lstrip())
    stop = decode(tokenizer, sorted(header)) if header & set(stop_ids) else ""
    return text + stop, stop
