"""Ten families of chat templates with small tokenizers, and what a target of each writes.

The templates are our own, with the structure of the published ones: markers, what is rewritten, what is left out and what is
refused. `Family.write` says in Python what a target generates; it shares nothing with the template, so the two check each other.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.data.templates.conversations import CASES, Case, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
# How text is cut before merging: as Llama 3 and Qwen do, whose line breaks are one piece; others use GPT-2's, where the last
# line break before a letter is a piece of its own.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True, eq=False)
class Family:
    """A family.

    Attributes:
        markers: tokens that the tokenizer does not split. special: those that it takes for special; as in the published
            tokenizers, tags of reasoning and calls often are not. bos, eos: of the tokenizer. ends: tokens that end a response.
        write: text that the target generates for a message, and the token that ends it. thinking: as `Case.thinking`.
        thinking: chat_template_kwargs that let the target reason, and those that do not. tools_key: where the tools go.
        calls: most tool calls of a turn that the template writes; 0 if it has no calls, None for any number.
        reasons: whether its targets reason. call_id: form of the ids of calls. gpt2: whether text is cut as by GPT-2.
        raw: whether the template knows neither reasoning nor calls, so that a turn's content is all that the target wrote.
        marks: before reasoning, after it, and before calls, where servers part the text by them.
        agent: whether the target reasons where it may call tools.
    """

    name: str
    file: str
    special: tuple[str, ...]
    ends: tuple[str, ...]
    write: Callable[[Message, bool], tuple[str, str]]
    bos: str
    eos: str
    plain: tuple[str, ...] = ()
    thinking: tuple[Mapping[str, Any], Mapping[str, Any]] = field(default_factory=lambda: ({}, {}))
    tools_key: str = "tools"
    calls: int | None = None
    reasons: bool = True
    call_id: str = "functions.{name}:{number}"
    gpt2: bool = False
    raw: bool = False
    marks: tuple[str, str, str] | None = None
    agent: bool = True

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A byte-level BPE with a few hundred merges, some of them across the borders of turns."""
        from tokenizers import (
            AddedToken,
            Regex,
            Tokenizer,
            decoders,
            models,
            pre_tokenizers,
            trainers,
        )
        from transformers import PreTrainedTokenizerFast

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if not self.gpt2:
            split = pre_tokenizers.Split(Regex(PIECES), "isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
            )
        tokenizer.decoder = decoders.ByteLevel()
        texts = [json.dumps(case.messages, ensure_ascii=False) for case in CASES] * 2
        texts += ["\n\n", ">\n", "\n\n\n", "<think>\n\n</think>\n\n"] * 3
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(
            texts,
            trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False),
        )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=self.bos, eos_token=self.eos
        )
        fast.add_special_tokens(
            {
                "additional_special_tokens": [
                    t for t in self.special if t not in (self.bos, self.eos)
                ]
            }
        )
        fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in self.plain])
        fast.chat_template = (FOLDER / f"{self.file}.jinja").read_text()
        return fast

    @property
    def end_ids(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(token) for token in self.ends]

    def thinks(self, case: Case) -> bool:
        return self.reasons and case.thinking and (self.agent or not case.tools)

    def kwargs(self, case: Case) -> dict[str, Any]:
        """The row's chat_template_kwargs."""
        tools = {self.tools_key: case.tools} if case.tools and self.tools_key != "tools" else {}
        return {
            **self.thinking[0 if case.thinking and (self.agent or not case.tools) else 1],
            **tools,
        }

    def turns(self, case: Case) -> Iterator[tuple[Message, Written | None]]:
        """The messages of a conversation as a data set of this family holds them, and what the target wrote for its own."""
        ids: dict[str, str] = {}
        for message in copy.deepcopy(case.messages):
            for call in message.get("tool_calls", []):
                name = call["function"]["name"]
                ids[call["id"]] = call["id"] = self.call_id.format(name=name, number=len(ids))
            if "tool_call_id" in message:
                message["tool_call_id"] = ids[message["tool_call_id"]]
            if message["role"] != "assistant":
                yield message, None
                continue
            if not self.thinks(case):
                cut = message["reasoning_content"]
                message["reasoning_content"] = ""
                message["content"] = cut if message["cut"] else message["content"]
            text, end = self.write(message, self.thinks(case))
            end = "" if message.pop("cut") else end
            if self.raw:
                message = {"role": "assistant", "content": text}
            yield message, Written(text, end, self._parsed(message, text, self.thinks(case)))

    def _parsed(self, message: Message, text: str, thinks: bool) -> Message:
        """What a server's parsers make of the target's text: with marks, the pieces between them with all white space."""
        if not self.marks:
            return message
        opening, closing, calls = self.marks
        before, _, rest = text.partition(closing) if thinks else ("", "", text)
        return {
            **message,
            "reasoning_content": before.removeprefix(opening),
            "content": rest.partition(calls)[0],
        }


@dataclass(frozen=True)
class Written:
    """An answer: text that the target generates, the token that ends it ('' where the limit did), and a server's message."""

    text: str
    end: str
    reply: Message


def _json(arguments: Mapping[str, object]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _calls(message: Message) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(id, name, arguments) of each call."""
    return [
        (it["id"], it["function"]["name"], it["function"]["arguments"])
        for it in message.get("tool_calls", [])
    ]


def _llama3(message: Message, thinking: bool) -> tuple[str, str]:
    calls = [
        f'{{"name": "{name}", "parameters": {_json(args)}}}' for _, name, args in _calls(message)
    ]
    return "".join(calls) or message["content"], "<|eot_id|>"


def _tags(
    opened: bool, function: Callable[[str, Mapping[str, Any]], str], gap: str
) -> Callable[..., tuple[str, str]]:
    """Qwen's turns: reasoning in tags, then content, then calls. opened: the prompt holds the opening tag."""

    def write(message: Message, thinking: bool) -> tuple[str, str]:
        text = ""
        if thinking:
            text = ("" if opened else "<think>\n") + message["reasoning_content"]
            if message["cut"]:
                return text, ""
            text += "\n</think>\n\n"
        content = message["content"]
        calls = "\n".join(
            f"<tool_call>\n{function(name, args)}\n</tool_call>"
            for _, name, args in _calls(message)
        )
        return text + content + (gap if content and calls else "") + calls, "<|im_end|>"

    return write


def _hermes(name: str, arguments: Mapping[str, Any]) -> str:
    return f'{{"name": "{name}", "arguments": {_json(arguments)}}}'


def _parameters(name: str, arguments: Mapping[str, Any]) -> str:
    inner = "".join(
        f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<function={name}>\n{inner}</function>"


def _deepseek(message: Message, thinking: bool) -> tuple[str, str]:
    text = message["reasoning_content"] if thinking else ""
    if message["cut"]:
        return text, ""
    text += ("</think>" if thinking else "") + message["content"]
    calls = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(args)}<｜tool▁call▁end｜>"
        for _, name, args in _calls(message)
    )
    return text + (
        f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    ), "<｜end▁of▁sentence｜>"


def _harmony(message: Message, thinking: bool) -> tuple[str, str]:
    parts = []
    analysis = message["reasoning_content"] if thinking else ""
    if analysis:
        parts.append(f"<|channel|>analysis<|message|>{analysis}")
    if message["cut"]:
        return parts[0], ""
    calls = _calls(message)
    if calls:
        if message["content"]:  # a preamble
            parts.append(f"<|channel|>commentary<|message|>{message['content']}")
        parts += [
            f" to=functions.{name}<|channel|>commentary json<|message|>{_json(args)}"
            for _, name, args in calls[:1]
        ]
    else:
        parts.append(f"<|channel|>final<|message|>{message['content']}")
    return "<|end|><|start|>assistant".join(parts), "<|call|>" if calls else "<|return|>"


def _gemma(message: Message, thinking: bool) -> tuple[str, str]:
    return message["content"], "<end_of_turn>"


def _mistral(message: Message, thinking: bool) -> tuple[str, str]:
    calls = [
        f'{{"name": "{name}", "arguments": {_json(args)}, "id": "{key}"}}'
        for key, name, args in _calls(message)
    ]
    return message["content"] + (f"[TOOL_CALLS][{', '.join(calls)}]" if calls else ""), "</s>"


def _glm(message: Message, thinking: bool) -> tuple[str, str]:
    text = ""
    if thinking:
        text = "\n<think>" + message["reasoning_content"]
        if message["cut"]:
            return text, ""
        text += "</think>"
    text += "\n" + message["content"] if message["content"] else ""
    for _, name, args in _calls(message):
        pairs = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
            for key, value in args.items()
        )
        text += f"\n<tool_call>{name}\n{''.join(pairs)}</tool_call>"
    return text, "<|observation|>" if _calls(message) else "<|user|>"


def _kimi(message: Message, thinking: bool) -> tuple[str, str]:
    text = "<think>" + message["reasoning_content"] if thinking else ""
    if message["cut"]:
        return text, ""
    text += ("</think>" if thinking else "") + message["content"]
    calls = "".join(
        f"<|tool_call_begin|>{key}<|tool_call_argument_begin|>{_json(args)}<|tool_call_end|>"
        for key, _, args in _calls(message)
    )
    return text + (
        f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    ), "<|im_end|>"


THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")
ENABLE = ({"enable_thinking": True}, {"enable_thinking": False})
THINKING = ({"thinking": True}, {"thinking": False})

FAMILIES = [
    Family(
        "Llama 3",
        "llama3",
        (
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|python_tag|>",
            "<|end_of_text|>",
        ),
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        _llama3,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        calls=1,
        reasons=False,
    ),
    Family(
        "Qwen3",
        "qwen3",
        CHATML,
        ("<|im_end|>", "<|endoftext|>"),
        _tags(False, _hermes, "\n"),
        bos="<|endoftext|>",
        eos="<|im_end|>",
        marks=("<think>", "</think>", "<tool_call>"),
        plain=(*THINK, *CALL, "<tool_response>", "</tool_response>"),
        thinking=ENABLE,
    ),
    Family(
        "Qwen3.5",
        "qwen3_5",
        CHATML,
        ("<|im_end|>", "<|endoftext|>"),
        _tags(True, _parameters, "\n\n"),
        bos="<|endoftext|>",
        eos="<|im_end|>",
        marks=("<think>", "</think>", "<tool_call>"),
        plain=(*THINK, *CALL, "<tool_response>", "</tool_response>"),
        thinking=ENABLE,
    ),
    Family(
        "DeepSeek-V3.1",
        "deepseek",
        (
            "<｜User｜>",
            "<｜Assistant｜>",
            *(
                f"<｜tool▁{what}｜>"
                for what in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
            ),
            *(f"<｜tool▁{what}｜>" for what in ("output▁begin", "output▁end")),
        ),
        ("<｜end▁of▁sentence｜>",),
        _deepseek,
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        marks=("<think>", "</think>", "<｜tool▁calls▁begin｜>"),
        agent=False,
        plain=THINK,
        thinking=THINKING,
    ),
    Family(
        "gpt-oss",
        "harmony",
        tuple(
            f"<|{w}|>"
            for w in (
                "start",
                "end",
                "message",
                "channel",
                "constrain",
                "return",
                "call",
                "endoftext",
            )
        ),
        ("<|return|>", "<|call|>", "<|endoftext|>"),
        _harmony,
        bos="<|startoftext|>",
        eos="<|return|>",
        thinking=({"reasoning_effort": "high"}, {"reasoning_effort": "low"}),
        calls=1,
    ),
    Family(
        "Gemma",
        "gemma",
        ("<start_of_turn>", "<end_of_turn>"),
        ("<eos>", "<end_of_turn>"),
        _gemma,
        bos="<bos>",
        eos="<eos>",
        calls=0,
        reasons=False,
    ),
    Family(
        "Mistral",
        "mistral",
        (
            *(
                "[INST]",
                "[/INST]",
                "[SYSTEM_PROMPT]",
                "[/SYSTEM_PROMPT]",
                "[AVAILABLE_TOOLS]",
                "[/AVAILABLE_TOOLS]",
            ),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        ("</s>",),
        _mistral,
        bos="<s>",
        eos="</s>",
        reasons=False,
        call_id="call0000{number}",
    ),
    Family(
        "GLM-4.5",
        "glm",
        (
            "[gMASK]",
            "<sop>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
            "<|endoftext|>",
        ),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        _glm,
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        marks=("\n<think>", "</think>", "<tool_call>"),
        plain=(*THINK, *CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
        thinking=ENABLE,
    ),
    Family(
        "Kimi K2",
        "kimi",
        (
            *(f"<|im_{word}|>" for word in ("system", "user", "assistant", "middle", "end")),
            *(
                f"<|tool_{word}|>"
                for word in ("calls_section_begin", "calls_section_end", "call_begin", "call_end")
            ),
            "<|tool_call_argument_begin|>",
        ),
        ("<|im_end|>",),
        _kimi,
        bos="[BOS]",
        eos="<|im_end|>",
        marks=("<think>", "</think>", "<|tool_calls_section_begin|>"),
        plain=THINK,
        thinking=THINKING,
    ),
    Family(
        "SmolLM3",
        "smollm3",
        CHATML,
        ("<|im_end|>",),
        _tags(False, _hermes, "\n"),
        bos="<|endoftext|>",
        eos="<|im_end|>",
        plain=(*THINK, *CALL),
        thinking=ENABLE,
        tools_key="xml_tools",
        gpt2=True,
        raw=True,
    ),
]
