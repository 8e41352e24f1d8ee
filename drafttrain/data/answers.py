"""The target's answers as token ids, as messages of a chat template, and back: reasoning, content
and tool calls.

How a target writes them is derived from its template, by rendering messages with marked parts:

    prompt | <think> marked reasoning </think> marked content              <tool_call>{"name": "marked name", ...
             opening                  closing ...                          lead                      follow
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
_REASONING = "drafttrain marks this reasoning"
_CONTENT = "drafttrain marks this content"
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class AnswerFormat:
    """How a target writes its answers.

    Attributes:
        opening: text that begins the reasoning; '' where the prompt ends with it, None where the
            target does not reason.
        closing: token that ends the reasoning; None if it is no token of its own.
        between, direct: text from the reasoning to the content, and from the prompt to the content
            without reasoning.
        lead, follow: text before the name of a called function and the letter after it, without
            whitespace; '' if unknown.
        blocks: tags whose ends the template names, of a target whose reasoning it does not read:
            what may open reasoning.
    """

    opening: str | None = None
    closing: int | None = None
    between: str = ""
    direct: str = ""
    lead: str = ""
    follow: str = ""
    blocks: tuple[str, ...] = ()

    def reasoning_tokens(
        self,
        tokenizer: PreTrainedTokenizerBase,
        response: Sequence[int],
    ) -> int | None:
        """Number of the response's first tokens that are reasoning, its end included; None if that
        cannot be known.
        """
        text = decode(tokenizer, response).lstrip()
        if self.opening is None:
            block = next(
                (
                    text.partition(f"{tag[0]}/{tag[1:]}")[0]
                    for tag in self.blocks
                    if text.startswith(tag)
                ),
                "",
            )
            if block and not self.called(block):
                return None
            return 0
        if not text.startswith(self.opening.strip()):
            return 0
        if self.closing is None:
            return None
        if self.closing in response:
            return list(response).index(self.closing) + 1
        return len(response)

    def called(self, text: str) -> list[str]:
        """Names of the functions that an answer calls, without whitespace."""
        if not self.lead:
            return ["".join(call["name"].split()) for call in _json_calls(text)]
        pieces = "".join(text.split()).split(self.lead)[1:]
        return [piece.partition(self.follow)[0] for piece in pieces]

    def message(
        self,
        tokenizer: PreTrainedTokenizerBase,
        text: str,
        keys: Sequence[str] | None,
    ) -> Json:
        """An answer's text as a message with its reasoning and JSON calls apart.

        keys: ids for calls that have none; None for an answer that makes no calls.
        """
        made: Json = {"role": "assistant", "content": text}
        close = ""
        if self.closing is not None:
            close = decode(tokenizer, [self.closing])
        if close and self.opening is not None and text.startswith(self.opening):
            reasoning, _, rest = text[len(self.opening) :].partition(close)
            gap = self.between.lstrip().removeprefix(close)
            made |= {"content": rest.removeprefix(gap), "reasoning_content": reasoning.strip("\n")}
        elif self.direct and text.startswith(self.direct):
            made["content"] = text[len(self.direct) :]
        if keys is not None and (
            calls := list(_json_calls(made["content"])) or list(self._called_with(made["content"]))
        ):
            ids = [
                call.get("id") or key
                for call, key in zip(calls, [*keys, *[""] * len(calls)], strict=False)
            ]
            made["tool_calls"] = [
                {
                    "type": "function",
                    "id": key,
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call, key in zip(calls, ids, strict=True)
            ]
            marks = "|".join(map(re.escape, filter(str.strip, tokenizer.added_tokens_encoder)))
            if marks:
                said = re.split(marks, made["content"], maxsplit=1)
            else:
                said = []
            named = len(said) < 2 or calls[0]["name"] in said[0]
            # what stands before the first token of calls
            if named:
                made["content"] = ""
            else:
                made["content"] = said[0].strip()
        return made

    def _called_with(self, text: str) -> Iterator[Json]:
        """The calls of an answer whose names stand before their arguments in JSON."""
        end = 0
        for name in self.called(text):
            at = text.find(name, end)
            begin = text.find("{", at)
            try:
                if 0 <= at < begin:
                    arguments, end = _DECODER.raw_decode(text, begin)
                else:
                    arguments = {}
                    end = len(text)
            except (ValueError, RecursionError):
                return
            key = re.compile(rf"functions\.{re.escape(name)}:\d+").search(
                text,
                max(0, at - 10),
                begin,
            )  # Kimi's
            yield {"name": name, "arguments": arguments} | ({"id": key[0]} if key else {})


def _json_calls(text: str) -> Iterator[Json]:
    """The JSON objects in a text that are calls, as {"name", "arguments", "id"?}."""
    at = text.find("{")
    while at >= 0:
        try:
            found, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            found = None
            end = at + 1
        if isinstance(found, dict):
            arguments = found.get("arguments", found.get("parameters"))
        else:
            arguments = None
        if isinstance(arguments, dict) and isinstance(found.get("name"), str):
            yield {**found, "arguments": arguments}
        at = text.find("{", end)


def _shared(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    return sum(
        1
        for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    )


def answer_format(tokenizer: PreTrainedTokenizerBase, inputs: ChatInputs) -> AnswerFormat:
    """The format of the target's answers under these inputs. Raises TemplateRefuses: the template
    does not read them.
    """
    if not has_template(tokenizer):
        return AnswerFormat()
    template = tokenizer.get_chat_template(tools=list(inputs.tools) or None)
    return _derived(
        tokenizer,
        template,
        json.dumps(inputs.kwargs, sort_keys=True),
        bool(inputs.tools),
    )


@lru_cache(maxsize=256)
def _derived(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    kwargs: str,
    tools: bool,
) -> AnswerFormat:
    inputs = ChatInputs((), json.loads(kwargs))
    before = render_text(tokenizer, _HELLO, True, inputs)
    opening = None
    closing = None
    between = ""
    marked = {"role": "assistant", "content": _CONTENT, "reasoning_content": _REASONING}
    for calls in (
        {},
        {"tool_calls": marked_calls("functions.{}", 1)["tool_calls"]},
    ):  # some keep it beside calls only
        try:
            head, found, rest = render_text(
                tokenizer,
                [*_HELLO, {**marked, **calls}],
                inputs=inputs,
            ).partition(_REASONING)
        except TemplateRefuses:
            continue
        between, after, _ = rest.partition(_CONTENT)
        if found and after:
            if head.startswith(before):
                opening = head[len(before) :]
            else:
                opening = None
            closing = min(leading_special(tokenizer, between.lstrip()), default=None)
            break
    else:
        opening, closing = _opened_by_prompt(tokenizer, before)
        between = ""
        if closing is not None:
            between = decode(tokenizer, [closing])
    plain = render_text(
        tokenizer,
        [*_HELLO, {"role": "assistant", "content": _CONTENT}],
        inputs=inputs,
    )
    direct = ""
    if plain.startswith(before):
        direct = plain.partition(_CONTENT)[0].removeprefix(before)
    closing = closing if opening is not None else None
    lead, follow = _call_frame(tokenizer, before, inputs)
    ends = () if opening is not None else sorted({*re.findall(r"</\w+>|\[/\w+\]", template)})
    blocks = tuple(tag for tag in (end[0] + end[2:] for end in ends) if not lead.startswith(tag))
    return AnswerFormat(opening, closing, between, direct, lead, follow, blocks)


def _opened_by_prompt(
    tokenizer: PreTrainedTokenizerBase, before: str
) -> tuple[str | None, int | None]:
    """`opening` and `closing` where a prompt ends with the token that opens reasoning, which no
    history keeps.
    """
    tag = decode(tokenizer, text_ids(tokenizer, before.rstrip())[-1:]).strip()
    if tag:
        closing = min(leading_special(tokenizer, tag[:1] + "/" + tag[1:]), default=None)
    else:
        closing = None
    if closing is not None and leading_special(tokenizer, tag):
        return ("", closing)
    return (None, None)


def _call_frame(
    tokenizer: PreTrainedTokenizerBase,
    before: str,
    inputs: ChatInputs,
) -> tuple[str, str]:
    """`lead` and `follow` of AnswerFormat."""
    for key in ("marks000{}", f"functions.{MARKED_NAME}:{{}}"):
        leads = list[str]()
        follow = ""
        for content, count in itertools.product(
            (_CONTENT, ""), (2, 1)
        ):  # some write one call a turn, or no content
            try:
                text = render_text(
                    tokenizer,
                    [*_HELLO, {**marked_calls(key, count), "content": content}],
                    inputs=inputs,
                )
            except TemplateRefuses:
                continue
            text = text[_shared(before, text) :].rpartition(_CONTENT)[2]
            pieces = ["".join(part.split()) for part in text.split(MARKED_NAME)]
            if len(pieces) == count + 1:
                leads = [*leads, *pieces[:-1]]
                follow = pieces[-1][:1]
        if leads:
            alike = min(_shared(leads[0][::-1], lead[::-1]) for lead in leads)
            return leads[0][len(leads[0]) - alike :], follow
    return "", ""


def _tail(
    tokenizer: PreTrainedTokenizerBase,
    form: AnswerFormat,
    before: str,
    after: str,
    answer: Message,
) -> str | None:
    """What a rendering adds to its prompt, with reasoning that the template leaves out of history;
    None if they differ.
    """
    if after.startswith(before):
        tail = after[len(before) :]
    else:
        tail = None
    thought = answer.get("reasoning_content") or ""
    if (
        form.closing is None
        or form.opening is None
        or (tail is not None and thought.strip() in tail)
    ):
        return tail
    close = decode(tokenizer, [form.closing])
    if form.opening:
        bare = before
    else:
        bare = before.rstrip().removesuffix(close[:1] + close[2:])
    if not after.startswith(bare):
        return None
    rest = after[len(bare) :]
    said = answer.get("content") or answer.get("tool_calls")
    if form.opening and rest.startswith(form.opening):  # an empty block
        rest = rest[len(form.opening) :].lstrip()
    if rest.startswith(close):
        joined = rest
    else:
        joined = f"\n{close}\n\n{rest}"
    return form.opening + thought + (joined if said else "")


def rendered_answer(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    answer: Message,
    inputs: ChatInputs,
    stop_ids: Collection[int] = (),
    complete: bool = True,
) -> tuple[str, str]:
    """An answer as text that the target generates after its prompt, and the token at its end, which
    the text includes.

    Args:
        messages: before the answer. stop_ids: tokens that end the target's responses, besides
            special ones.
        complete: whether the answer was ended by the target; '' takes the place of the end token
            otherwise.

    Returns:
        (text, end); end is '' where the template writes no token at the end.

    Raises:
        TemplateRefuses: the template does not write all of the answer where the target would.
    """
    form = answer_format(tokenizer, inputs)
    reasoning = (answer.get("reasoning_content") or "").strip()
    for context in (messages, _HELLO):  # the answer may change how the turns before it are rendered
        before = render_text(tokenizer, context, True, inputs)
        after = render_text(tokenizer, [*context, answer], inputs=inputs)
        tail = _tail(tokenizer, form, before, after, answer)
        if tail is not None:
            break
    if tail is None:
        raise TemplateRefuses(
            "the assistant's turn does not begin where the chat template's generation prompt ends"
        )
    end = 0
    calls = [("call", call["function"]["name"]) for call in answer.get("tool_calls") or ()]
    for what, part in [
        ("reasoning", reasoning),
        ("content", (answer.get("content") or "").strip()),
        *calls,
    ]:
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
    stop = max(
        (token for token in special if token.strip() and text.endswith(token)), key=len, default=""
    )
    if stop or not has_template(tokenizer):
        return text, stop
    header = closing_token(tokenizer)  # the next turn's first token ends this one
    if answer.get("tool_calls"):
        longer = render_text(
            tokenizer,
            [*messages, answer, {"role": "tool", "content": "hello"}],
            inputs=inputs,
        )
        after = ""
        if longer.startswith(before + text):
            after = longer[len(before) + len(text) :]
        header = leading_special(tokenizer, after.lstrip())
    stop = ""
    if header & set(stop_ids):
        stop = decode(tokenizer, sorted(header))
    return text + stop, stop
