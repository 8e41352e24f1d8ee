"""The target's answers as token ids and as messages of a chat template, with reasoning and calls.

How a target writes them is derived from its template, by rendering messages with marked parts:

    prompt | <think> marked reasoning </think> marked content              <tool_call>{"name": "marked name", ...
             opening                  closing ...                          lead                      follow
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from drafttrain.data.chat import (
    CALL_IDS,
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
    shared_length,
    template_of,
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
        closing: token that ends the reasoning; None if it is not a token of its own.
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
        """Number of the response's first tokens that are reasoning, its end included.

        None if that cannot be known.
        """
        text = decode(tokenizer, response).lstrip()
        if self.opening is None:
            for tag in self.blocks:
                if text.startswith(tag):
                    block = text.partition(f"{tag[0]}/{tag[1:]}")[0]
                    if not self.called(block):
                        return None  # what the block holds may be reasoning
                    return 0
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
            return [without_spaces(call["name"]) for call in _json_calls(text)]
        pieces = without_spaces(text).split(self.lead)[1:]
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
            # What the template writes between the end of the reasoning and the content.
            gap = self.between.lstrip().removeprefix(close)
            made["content"] = rest.removeprefix(gap)
            made["reasoning_content"] = reasoning.strip("\n")
        elif self.direct and text.startswith(self.direct):
            made["content"] = text[len(self.direct) :]
        if keys is None:
            return made

        # Calls in JSON first; some formats write the name before the arguments.
        calls = list(_json_calls(made["content"]))
        if not calls:
            calls = list(self._called_with(made["content"]))
        if not calls:
            return made
        made["tool_calls"] = []
        for number, call in enumerate(calls):
            key = call.get("id")
            if not key:
                key = keys[number] if number < len(keys) else ""
            function = {"name": call["name"], "arguments": call["arguments"]}
            made["tool_calls"].append({"type": "function", "id": key, "function": function})

        # What stands before the first token of calls is content, unless it names the function.
        added = [re.escape(token) for token in tokenizer.added_tokens_encoder if token.strip()]
        said = [made["content"]]
        if added:
            said = re.split("|".join(added), made["content"], maxsplit=1)
        made["content"] = ""
        if len(said) > 1 and calls[0]["name"] not in said[0]:
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
            made = {"name": name, "arguments": arguments}
            kimi = re.compile(rf"functions\.{re.escape(name)}:\d+")
            key = kimi.search(text, max(0, at - 10), begin)
            if key:
                made["id"] = key[0]
            yield made


def _json_calls(text: str) -> Iterator[Json]:
    """The JSON objects in a text that are calls, as {"name", "arguments", "id"?}."""
    at = text.find("{")
    while at >= 0:
        try:
            found, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            found = None
            end = at + 1
        if isinstance(found, dict) and isinstance(found.get("name"), str):
            arguments = found.get("arguments", found.get("parameters"))
            if isinstance(arguments, dict):
                yield {**found, "arguments": arguments}
        at = text.find("{", end)


def without_spaces(text: str) -> str:
    """The text without any white space, in which templates differ."""
    return "".join(text.split())


def answer_format(tokenizer: PreTrainedTokenizerBase, inputs: ChatInputs) -> AnswerFormat:
    """The format of the target's answers under these inputs.

    Raises TemplateRefuses: the template does not read them.
    """
    if not has_template(tokenizer, inputs):
        return AnswerFormat()
    kwargs = json.dumps(inputs.kwargs, sort_keys=True)
    return _derived(tokenizer, template_of(tokenizer, inputs), kwargs, inputs.template)


@lru_cache(maxsize=256)
def _derived(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    kwargs: str,
    own: str,
) -> AnswerFormat:
    """The format under the variables `kwargs`, as JSON; from the template without tools.

    Args:
        own: the template that the inputs bring; '' for the tokenizer's.
    """
    inputs = ChatInputs((), json.loads(kwargs), own)
    before = render_text(tokenizer, _HELLO, True, inputs)
    # Reasoning: from history, or where the prompt opens it.
    reasoning = _reasoning_frame(tokenizer, before, inputs)
    if reasoning is None:
        opening, closing = _opened_by_prompt(tokenizer, before)
        between = ""
        if closing is not None:
            between = decode(tokenizer, [closing])
    else:
        opening, closing, between = reasoning

    # Content without reasoning.
    content_only = {"role": "assistant", "content": _CONTENT}
    plain = render_text(tokenizer, [*_HELLO, content_only], inputs=inputs)
    direct = ""
    if plain.startswith(before):
        direct = plain.partition(_CONTENT)[0].removeprefix(before)
    lead, follow = _call_frame(tokenizer, before, inputs)
    if opening is not None:
        return AnswerFormat(opening, closing, between, direct, lead, follow)

    # Tags that the template names: what may open reasoning that it does not read.
    blocks = []
    for end in sorted(set(re.findall(r"</\w+>|\[/\w+\]", template))):
        tag = end[0] + end[2:]
        if not lead.startswith(tag):
            blocks.append(tag)
    return AnswerFormat(None, None, between, direct, lead, follow, tuple(blocks))


def _reasoning_frame(
    tokenizer: PreTrainedTokenizerBase,
    before: str,
    inputs: ChatInputs,
) -> tuple[str | None, int | None, str] | None:
    """`opening`, `closing` and `between` of AnswerFormat; None if the template writes no reasoning.

    Args:
        before: the prompt of `_HELLO`.
    """
    answer = {"role": "assistant", "content": _CONTENT, "reasoning_content": _REASONING}
    calls = marked_calls("functions.{}", 1)["tool_calls"]
    for message in (answer, {**answer, "tool_calls": calls}):  # some keep it beside calls only
        try:
            text = render_text(tokenizer, [*_HELLO, message], inputs=inputs)
        except TemplateRefuses:
            continue
        head, found, rest = text.partition(_REASONING)
        between, after, _ = rest.partition(_CONTENT)
        if not found or not after:
            continue
        opening = None
        if head.startswith(before):
            opening = head[len(before) :]
        closing = min(leading_special(tokenizer, between.lstrip()), default=None)
        return opening, closing, between
    return None


def _opened_by_prompt(
    tokenizer: PreTrainedTokenizerBase, before: str
) -> tuple[str | None, int | None]:
    """`opening` and `closing` where a prompt ends with the token that opens reasoning.

    Such a template keeps no reasoning in history. (None, None) for others.
    """
    tag = decode(tokenizer, text_ids(tokenizer, before.rstrip())[-1:]).strip()
    if not tag or not leading_special(tokenizer, tag):
        return None, None
    closing = min(leading_special(tokenizer, f"{tag[:1]}/{tag[1:]}"), default=None)
    if closing is None:
        return None, None
    return "", closing


def _call_frame(
    tokenizer: PreTrainedTokenizerBase,
    before: str,
    inputs: ChatInputs,
) -> tuple[str, str]:
    """`lead` and `follow` of AnswerFormat."""
    for key in CALL_IDS:
        leads: list[str] = []
        follow = ""
        # Some templates write one call a turn, or no content beside calls.
        for content, count in ((_CONTENT, 2), (_CONTENT, 1), ("", 2), ("", 1)):
            answer = {**marked_calls(key, count), "content": content}
            try:
                text = render_text(tokenizer, [*_HELLO, answer], inputs=inputs)
            except TemplateRefuses:
                continue
            # What the prompt and the content hold is not part of a call.
            text = text[shared_length(before, text) :].rpartition(_CONTENT)[2]
            pieces = [without_spaces(part) for part in text.split(MARKED_NAME)]
            if len(pieces) == count + 1:
                leads += pieces[:-1]
                follow = pieces[-1][:1]
        if leads:
            # The end that all of them share: reversed, it is a beginning.
            alike = min(shared_length(leads[0][::-1], lead[::-1]) for lead in leads)
            return leads[0][len(leads[0]) - alike :], follow
    return "", ""


def _tail(
    tokenizer: PreTrainedTokenizerBase,
    form: AnswerFormat,
    before: str,
    after: str,
    answer: Message,
) -> str | None:
    """What a rendering adds to its prompt, with reasoning that the template leaves out of history.

    Args:
        before: the prompt. after: the rendering with the answer.

    Returns:
        The text; None if the rendering does not begin as the prompt does.
    """
    tail = None
    if after.startswith(before):
        tail = after[len(before) :]
    if form.closing is None or form.opening is None:
        return tail
    thought = ""
    if answer.get("reasoning_content"):
        thought = answer["reasoning_content"]
    if tail is not None and thought.strip() in tail:
        return tail

    # Put the reasoning where the prompt ends; a prompt may open it itself.
    close = decode(tokenizer, [form.closing])
    bare = before
    if not form.opening:
        bare = before.rstrip().removesuffix(close[:1] + close[2:])
    if not after.startswith(bare):
        return None
    if not answer.get("content") and not answer.get("tool_calls"):
        return form.opening + thought
    rest = after[len(bare) :]
    if form.opening and rest.startswith(form.opening):  # an empty block
        rest = rest[len(form.opening) :].lstrip()
    if not rest.startswith(close):
        rest = f"\n{close}\n\n{rest}"
    return form.opening + thought + rest


def rendered_answer(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    answer: Message,
    inputs: ChatInputs,
    stop_ids: Collection[int] = (),
    complete: bool = True,
) -> tuple[str, str]:
    """An answer as the target generates it after its prompt, and the token at its end.

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
    calls = answer.get("tool_calls")
    before, tail = _rendered_tail(tokenizer, messages, answer, inputs)
    end = _end_of_parts(tail, answer)
    # A cut answer, or reasoning alone, has no end.
    if not calls and not (complete and answer.get("content")):
        return tail[:end], ""

    # The end token: a special token that the template writes behind the answer.
    text = tail.rstrip()
    special = {decode(tokenizer, [i]) for i in {*stop_ids, *tokenizer.all_special_ids}}
    stop = ""
    for token in special:
        if token.strip() and text.endswith(token) and len(token) > len(stop):
            stop = token
    if stop or not has_template(tokenizer, inputs):
        return text, stop

    # Otherwise the first token of the next turn ends this one, if the target stops at it.
    header = closing_token(tokenizer)
    if calls:
        # Calls may end otherwise than content: a tool follows them.
        result = {"role": "tool", "content": "hello"}
        longer = render_text(tokenizer, [*messages, answer, result], inputs=inputs)
        after = ""
        if longer.startswith(before + text):
            after = longer[len(before) + len(text) :]
        header = leading_special(tokenizer, after.lstrip())
    if header & set(stop_ids):
        stop = decode(tokenizer, sorted(header))
    return text + stop, stop


def _rendered_tail(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    answer: Message,
    inputs: ChatInputs,
) -> tuple[str, str]:
    """The prompt of a rendering, and what the answer adds to it. Raises TemplateRefuses."""
    form = answer_format(tokenizer, inputs)
    # The answer may change how the turns before it are rendered; a greeting has no such turns.
    for context in (messages, _HELLO):
        before = render_text(tokenizer, context, True, inputs)
        after = render_text(tokenizer, [*context, answer], inputs=inputs)
        tail = _tail(tokenizer, form, before, after, answer)
        if tail is not None:
            return before, tail
    raise TemplateRefuses(
        "the assistant's turn does not begin where the chat template's generation prompt ends"
    )


def _end_of_parts(tail: str, answer: Message) -> int:
    """Where the answer's parts end in its rendering. Raises TemplateRefuses: one is not there."""
    parts = []
    for what, key in (("reasoning", "reasoning_content"), ("content", "content")):
        if answer.get(key):
            parts.append((what, answer[key].strip()))
    if answer.get("tool_calls"):
        parts += [("call", call["function"]["name"]) for call in answer["tool_calls"]]
    end = 0
    for what, part in parts:
        at = tail.find(part, end)
        if at < 0:
            raise TemplateRefuses(
                f"the chat template's rendering does not contain the assistant's {what} as given ({part[:40]!r}...)"
            )
        end = at + len(part)
    return end
