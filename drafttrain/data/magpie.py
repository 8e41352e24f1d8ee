"""Prompts that the target writes itself: an instruction-tuned model goes on from its template's opening as a user.

    template    <|im_start|>user\\n | what a user might ask | <|im_end|>\\n ...
                prefix               sampled                 its first token ends the turn

Nothing is known about the template but what rendering a marker as the user's message shows. Models without a chat
template run freely from BOS instead, and each text is the beginning of a document to continue.

Source: Xu et al., Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing (arXiv
2406.08464). The openings are our addition: small models ask about few things unless somebody begins the sentence.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drafttrain.data.chat import render_text, text_prompt
from drafttrain.data.filters import is_repetitive
from drafttrain.data.formats import Prompt
from drafttrain.errors import UserError
from drafttrain.inference.responses import Finished, ResponseRequest
from drafttrain.target import Target

# First words of user turns, ten of each sort, so that every sort of task gets its share.
BUILTIN_OPENINGS = (
    # chat and writing
    *("Write a", "How can I", "Explain", "What is the difference between", "Give me", "Can you help me", "Why do"),
    *("Describe", "Tell me about", "Suggest"),
    # code
    *("Write a Python function", "Write a JavaScript function", "Write a SQL query", "Fix the bug in this code:\n\n"),
    *("What does this code do?\n\n```python\n", "Write a program", "How do I implement", "Explain this code:\n\n"),
    *("Write a C++ function", "Complete this function:\n\ndef"),
    # mathematics
    *("Solve", "Calculate", "If a", "A train", "How many", "Find the", "Prove that", "What is the value of"),
    *("A store sells", "Sarah has"),
    # summaries and rewriting
    *(
        "Summarize the following text:\n\n",
        "Summarize this article in one paragraph:\n\n",
        "Shorten this paragraph:\n\n",
    ),
    *("Write a short summary of this text.\n\n", "Give me the main points of the following passage:\n\n"),
    *("Rewrite the following text:\n\n", "Summarize this story:\n\n", "Write a headline for this article:\n\n"),
    *("Make the following text more concise:\n\n", "What is the main idea of this text?\n\n"),
    # questions about a given text, and about facts
    *("Read the passage and answer the question.\n\nPassage:", "Based on the following text, answer the question.\n\n"),
    *("Answer the question using the text below.\n\nText:", "Use the information in this paragraph to answer:\n\n"),
    *("Context:", "Passage:", "Who was", "When did", "Where is", "Which"),
    # translation and language
    *("Translate the following sentence into French:", "Translate into German:", "Translate this into Spanish:"),
    *("Translate the following text into English:", "How do you say", "What does the word", "Correct the grammar:"),
    *(
        "Translate the following paragraph into Italian:\n\n",
        "What is the French word for",
        "Paraphrase this sentence:",
    ),
)

# A document's first part should be long enough to say what it is about, and short enough to leave the rest to say.
_TEXT_TOKENS = (16, 64)


@dataclass(frozen=True)
class Frame:
    """What stands around a user's first turn.

    Attributes:
        prefix_ids: tokens before the content.
        stop_ids: tokens that end the turn; the target's end tokens among them.
        ending: the text that follows the content, for templates that end a turn with plain text.
    """

    prefix_ids: list[int]
    stop_ids: frozenset[int]
    ending: str


def user_frame(target: Target) -> Frame:
    """Derives the frame by rendering a marker as the user's message.

    Raises:
        UserError: the template does not show the marker, or nothing stands before it.
    """
    tokenizer = target.tokenizer
    if not tokenizer.chat_template:
        prefix = text_prompt(tokenizer, "") or [tokenizer.bos_token_id or target.eos_ids[0]]
        return Frame(prefix, frozenset(target.eos_ids), "")
    marker = "drafttrain marks this place"
    before, found, after = render_text(tokenizer, [{"role": "user", "content": marker}], generation=True).partition(
        marker
    )
    prefix = tokenizer(before, add_special_tokens=False)["input_ids"]
    if not found or not prefix:
        raise UserError(
            f"target={target.name!r}: its chat template has no opening for a user's turn; use --source file or a "
            "data set id instead of magpie"
        )
    ending = tokenizer(after, add_special_tokens=False)["input_ids"]
    markers = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    stops = {ending[0]} & markers if ending else set()
    return Frame(prefix, frozenset(stops | set(target.eos_ids)), "" if stops else after.strip())


class Writer:
    """Makes the requests for an engine, and prompts of its answers.

    Args:
        target: writes the prompts.
        openings: beginnings of turns; [] for none.
        share: part of the prompts, 0 to 1, that get an opening.
        max_tokens: longest prompt; longer ones are dropped as unfinished.
        seed: chooses the openings; the same number always gives the same request.
    """

    def __init__(self, target: Target, openings: Sequence[str], share: float, max_tokens: int, seed: int):
        self.tokenizer, self.frame = target.tokenizer, user_frame(target)
        self.openings, self.share, self.max_tokens, self.seed = list(openings), share, max_tokens, seed
        self.is_chat = bool(target.tokenizer.chat_template)

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence."""
        longest = max((len(self._ids(opening)) for opening in self.openings), default=0)
        return len(self.frame.prefix_ids) + longest + self.max_tokens + 1

    def requests(self, start: int) -> Iterator[ResponseRequest]:
        """Endless requests from number `start` on; their keys are the numbers."""
        number = start
        while True:
            opening, limit = self._plan(number)
            prompt = self.frame.prefix_ids + self._ids(opening)
            yield ResponseRequest(str(number), prompt, limit, self.frame.stop_ids)
            number += 1

    def prompt(self, finished: Finished) -> Prompt | str:
        """The prompt that an answer makes, or the reason why it makes none."""
        opening, _ = self._plan(int(finished.key))
        tokens = list(finished.tokens)
        if tokens and tokens[-1] in self.frame.stop_ids:
            tokens.pop()
        text = opening + self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not self.is_chat:
            return self._document(text)
        if self.frame.ending:
            text, ended, _ = text.partition(self.frame.ending)
            if not ended and finished.finish_reason != "stop":
                return "unfinished"
        elif finished.finish_reason != "stop":
            return "unfinished"
        text = text.strip()
        if not text or text == opening.strip():
            return "empty"
        if is_repetitive(text):
            return "repetitive"
        return {"messages": [{"role": "user", "content": text}]}

    def _document(self, text: str) -> Prompt | str:
        """The beginning of a document; the last word may be cut, so it goes."""
        text = text.rstrip("\ufffd").lstrip()
        kept = text.rsplit(None, 1)[0] if len(text.split()) > 4 else text.strip()
        if not kept:
            return "empty"
        return "repetitive" if is_repetitive(kept) else {"text": kept}

    def _plan(self, number: int) -> tuple[str, int]:
        """Opening and token limit of a request, from its number alone: a resumed run needs no further memory."""
        chance = random.Random(f"{self.seed}/{number}")
        opening = chance.choice(self.openings) if self.openings and chance.random() < self.share else ""
        if self.is_chat:
            return opening, self.max_tokens
        low, high = _TEXT_TOKENS
        return opening, chance.randint(min(low, self.max_tokens), min(high, self.max_tokens))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids


def load_openings(name: str) -> list[str]:
    """`builtin`, `none`, or a file with one opening per line (\\n in a line stands for a line break).

    Raises:
        UserError: no such file, or an empty one.
    """
    if name in ("builtin", "none"):
        return list(BUILTIN_OPENINGS) if name == "builtin" else []
    try:
        with open(name, encoding="utf-8") as file:
            lines = [line.rstrip("\n").replace("\\n", "\n") for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"openings={name!r} cannot be read ({error}); give builtin, none, or a text file") from error
    if not lines:
        raise UserError(f"openings={name!r} is empty; write one beginning of a user's turn per line, or give none")
    return lines
