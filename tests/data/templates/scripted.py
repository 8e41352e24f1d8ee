"""A target of a family that answers the conversations of `conversations.py` as recorded: as a server and as an engine."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from jinja2 import TemplateError
from pydantic import TypeAdapter

from drafttrain.data.backends import OpenAIBackend, ResponseSettings
from drafttrain.data.failures import BadReply
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.inference.responses import Finished, ResponseRequest
from drafttrain.ops.sampling import SamplingParams
from tests.data.templates.conversations import Case, Message
from tests.data.templates.families import Family, Written

NAMES = (
    "reasoning_content",
    "reasoning",
    "thinking",
)  # of reasoning, in the templates that read it


@dataclass(frozen=True)
class Served:
    """A response. ids: all that the target generated. reasoning: how many of the first are; None if no token ends it."""

    ids: list[int]
    finish: str
    written: Written
    reasoning: int | None = None


@dataclass
class Script:
    """What a family's target answers in a conversation, by the text of the prompt.

    Attributes:
        pieces: whether the target's ids are other pieces of its text than the tokenizer's, as sampled ids may be.
        cut: whether a limit ends the answers that the conversation says; a data set does not say it of plain text.
        prompts: text of each prompt -> the response. log: (prompt's ids, response) of everything that was asked.
        unknown: prompts that no server with this chat template would make of the conversation.
    """

    family: Family
    case: Case
    pieces: bool = False
    cut: bool = True
    prompts: dict[str, Served] = field(default_factory=dict)
    log: list[tuple[list[int], Served]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for texts, written in histories(self.family, self.case):
            end = (
                written.end
                if self.cut or written.end
                else self.family.write(written.reply | {"cut": True}, False)[1]
            )
            ids = self.sampled(written.text + end)
            served = Served(ids, "stop" if end else "length", written, self.reasoning(ids))
            self.prompts |= dict.fromkeys(texts, served)

    def reasoning(self, ids: Sequence[int]) -> int | None:
        if not self.family.marks:
            return None
        end = self.family.tokenizer.convert_tokens_to_ids(self.family.marks[1])
        return (
            0
            if not self.family.thinks(self.case)
            else list(ids).index(end) + 1
            if end in ids
            else len(ids)
        )

    def sampled(self, text: str) -> list[int]:
        ids = self.family.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not self.pieces:
            return ids
        vocab = self.family.tokenizer.get_vocab()
        made = []
        for token in self.family.tokenizer.convert_ids_to_tokens(ids):
            whole = (
                len(token) == 1
                or token in self.family.tokenizer.added_tokens_encoder
                or len(made) % 3
            )
            made += [vocab[token]] if whole else [vocab[letter] for letter in token]
        return made

    def by_ids(self, prompt: list[int]) -> Served | None:
        """What was generated after a prompt that was read in these ids; None if none was."""
        return next((served for ids, served in self.log if ids == prompt), None)

    def by_text(self, prompt: list[int]) -> Served | None:
        """The same for a prompt of this text, which a server may have read in other ids."""
        return self.prompts.get(self.text(prompt))

    def text(self, ids: Sequence[int]) -> str:
        return str(
            self.family.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def answer(self, ids: Sequence[int]) -> Served | None:
        """The response to a prompt; None for one that is unknown."""
        text = self.text(ids)
        served = self.prompts.get(text)
        if served is None:
            self.unknown.append(text)
        else:
            self.log.append((list(ids), served))
        return served


@cache
def histories(family: Family, case: Case) -> list[tuple[list[str], Written]]:
    """Each answer with the prompts that a server reads before it: of the conversation's messages, and of its own replies."""
    history: list[Message] = []
    replied: list[Message] = []
    found = []
    for message, written in family.turns(case):
        if written is not None:
            texts = []
            for messages in (history, replied):
                with contextlib.suppress(
                    TemplateError, TypeError
                ):  # the template refuses the turns so far
                    tools = case.tools if family.tools_key == "tools" else []
                    texts.append(prompt_text(family, messages, tools, family.kwargs(case)))
            found.append((texts, written))
        history.append(message)
        replied.append(written.reply if written else message)
    return found


def prompt_text(
    family: Family, messages: Sequence[Message], tools: Sequence[Json], kwargs: Json
) -> str:
    """The prompt that a server's chat template makes of messages."""
    given = [as_server(message) for message in messages]
    options = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": True}
    return str(family.tokenizer.apply_chat_template(given, **options, **kwargs))


def as_server(message: Message) -> Message:
    """A message as servers hand it to the template: arguments as objects, reasoning under every name."""
    made = copy.deepcopy({key: value for key, value in message.items() if value not in ("", None)})
    made.setdefault("content", "")
    reasoning = next((made.pop(name) for name in NAMES if name in made), "")
    made |= dict.fromkeys(NAMES, reasoning) if reasoning else {}
    for call in made.get("tool_calls", []):
        if isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return made


class ScriptedEngine:
    """In the place of `ResponseEngine` in a local backend."""

    def __init__(self, script: Script):
        self.script = script
        self.new_tokens = 0

    def run(
        self,
        requests: Iterable[ResponseRequest],
        sampling: SamplingParams,
        seed: int = 0,
        follow_up: Callable[[Finished], list[int] | None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[Finished]:
        for request in requests:
            sequence = list(request.prompt_ids)
            more = []
            while more is not None:
                served = self.script.answer(sequence)
                if served is None:
                    raise UserError(f"unknown prompt: ...{self.script.unknown[-1][-300:]!r}")
                sequence += served.ids
                finished = Finished(request.key, list(served.ids), served.finish, list(sequence))
                more = follow_up(finished) if follow_up else None
                sequence += more or []
            yield finished


class ScriptedServers(OpenAIBackend):
    """The backend of OpenAI servers that exchange token ids, unless `by_ids` is unset; the script's target answers."""

    def __init__(self, settings: ResponseSettings, script: Script):
        self.script = script
        super().__init__(["http://scripted"], "served", settings)

    def _model(self, url: str, given: str) -> str:
        return given

    def _post(self, url: str, path: str, body: Json, schema: type) -> Json:
        status, content = self.reply(json.loads(json.dumps(body)))
        if status != 200:
            raise BadReply(f"HTTP {status}", str(content))
        checked: Json = TypeAdapter(schema).validate_python(
            json.loads(json.dumps(content)), strict=True
        )
        return checked

    def reply(self, body: Json) -> tuple[int, Json]:
        tokenizer = self.script.family.tokenizer
        if "messages" not in body:
            prompt = body["prompt"]
            prompt = (
                tokenizer(prompt, add_special_tokens=False)["input_ids"]
                if isinstance(prompt, str)
                else prompt
            )
            if body["max_tokens"] == 1:  # whether ids are exchanged
                return 200, {
                    "choices": [
                        {"token_ids": [1], "prompt_token_ids": prompt, "finish_reason": "length"}
                    ]
                }
            served = self.script.answer(prompt)
            if served is None:
                return 400, {"error": f"unknown prompt: ...{self.script.unknown[-1][-300:]!r}"}
            choice = {
                "token_ids": served.ids,
                "prompt_token_ids": prompt,
                "finish_reason": served.finish,
            }
            return 200, {"choices": [choice]}
        try:
            kwargs = body.get("chat_template_kwargs") or {}
            text = prompt_text(
                self.script.family, body["messages"], body.get("tools") or [], kwargs
            )
        except Exception as error:
            return 400, {"error": f"the template refuses it: {error}"}
        served = self.script.answer(tokenizer(text, add_special_tokens=False)["input_ids"])
        if served is None:
            return 400, {"error": f"unknown prompt: ...{self.script.unknown[-1][-300:]!r}"}
        reply = served.written.reply
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in reply.get("tool_calls", [])
        ]
        # A parser that found no reasoning says null, and '' of an empty block.
        reasoning = (
            reply["reasoning_content"]
            if self.script.family.thinks(self.script.case) and not self.script.family.raw
            else None
        )
        texts = {"content": reply["content"] or None, "reasoning_content": reasoning}
        message = {"role": "assistant", **texts, **({"tool_calls": calls} if calls else {})}
        finish = "tool_calls" if calls and served.finish == "stop" else served.finish
        end = served.written.end  # vLLM names the token, but for the tokenizer's own
        stop = tokenizer.convert_tokens_to_ids(end) if end and end != tokenizer.eos_token else None
        return 200, {
            "choices": [
                {"index": 0, "message": message, "finish_reason": finish, "stop_reason": stop}
            ]
        }
