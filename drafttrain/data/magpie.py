"""Prompts that the target writes itself.

An instruction-tuned model continues its template's opening of a user turn.

    template    <|im_start|>user\\n | a user's message | <|im_end|>\\n ...
                prefix               sampled            its first token ends the turn

The frame around the message comes from rendering a marker as a user's message. Models without a
chat template run freely from BOS instead, and each text becomes the beginning of a document to
continue.

Source: Xu et al., Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with
Nothing (arXiv 2406.08464). The openings are our addition: without them, small models write about
few topics.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from drafttrain.data.chat import decode, has_template, text_ids, text_prompt, user_frame
from drafttrain.data.filters import is_repetitive
from drafttrain.data.row_formats import Prompt
from drafttrain.errors import UserError
from drafttrain.files import read_text
from drafttrain.inference.responses import Finished, ResponseRequest
from drafttrain.target import Target

# Tokens of a document's beginning: enough to show its topic, few enough to leave most of it to the
# target.
_TEXT_TOKENS = (16, 64)


class PromptWriter:
    """Makes the requests for an engine, and prompts of its answers.

    Args:
        target: writes the prompts.
        openings: beginnings of turns; [] for none. share: part of the prompts, 0 to 1, that get
            one.
        max_tokens: longest prompt; longer ones are dropped as unfinished.
        seed: chooses the openings; the same number always gives the same request.

    Raises:
        UserError: the template shows no opening of a user's turn.
    """

    def __init__(
        self,
        target: Target,
        openings: Sequence[str],
        share: float,
        max_tokens: int,
        seed: int,
    ):
        self.tokenizer = target.tokenizer
        self.openings = list(openings)
        self.share = share
        self.max_tokens = max_tokens
        self.seed = seed
        self.is_chat = has_template(self.tokenizer)
        # A template adds the token that closes a user turn.
        self.stop_ids = frozenset(target.eos_ids)
        self.ending = ""
        if not self.is_chat:
            self.prefix_ids = text_prompt(self.tokenizer, "")
            if not self.prefix_ids:  # the tokenizer adds no BOS
                bos = self.tokenizer.bos_token_id
                self.prefix_ids = [bos if bos else target.eos_ids[0]]
            return
        frame = user_frame(self.tokenizer)
        if frame is None:
            raise UserError(
                f"target={target.name!r}: its chat template has no opening for a user's turn; use --source file or a "
                "data set id instead of magpie"
            )
        self.stop_ids |= frame.stop_ids
        self.ending = frame.ending
        self.prefix_ids = frame.prefix_ids

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence."""
        lengths = [len(text_ids(self.tokenizer, opening)) for opening in self.openings]
        longest = max(lengths, default=0)
        return len(self.prefix_ids) + longest + self.max_tokens + 1  # 1: the stop token

    def requests(self, start: int) -> Iterator[ResponseRequest]:
        """Endless requests from number `start` on; their keys are the numbers."""
        for number in itertools.count(start):
            opening, limit = self._plan(number)
            prompt = self.prefix_ids + text_ids(self.tokenizer, opening)
            yield ResponseRequest(str(number), prompt, limit, self.stop_ids)

    def prompt(self, finished: Finished) -> Prompt | str:
        """The prompt that an answer makes, or the reason why it makes none."""
        opening, _ = self._plan(int(finished.key))
        tokens = list(finished.tokens)
        # The stop token is not part of the prompt.
        if tokens and tokens[-1] in self.stop_ids:
            tokens.pop()
        text = opening + decode(self.tokenizer, tokens)
        prompt: Prompt
        if self.is_chat:
            ended = finished.finish_reason == "stop"
            if self.ending and self.ending in text:
                text = text.partition(self.ending)[0]
                ended = True
            if not ended:
                return "unfinished"
            text = text.strip()
            if text == opening.strip():
                text = ""
            prompt = {"messages": [{"role": "user", "content": text}]}
        else:  # the beginning of a document, without its last word, which may be cut
            text = text.rstrip("\ufffd").strip()
            if len(text.split()) > 4:
                text = text.rsplit(None, 1)[0]
            prompt = {"text": text}
        if not text:
            return "empty"
        if is_repetitive(text):
            return "repetitive"
        return prompt

    def _plan(self, number: int) -> tuple[str, int]:
        """Opening and token limit of a request.

        They depend on its number only, so a resumed run needs no other state.
        """
        # A generator per request: its number alone decides.
        chance = random.Random(f"{self.seed}/{number}")
        opening = ""
        if self.openings and chance.random() < self.share:
            opening = chance.choice(self.openings)
        if self.is_chat:
            return opening, self.max_tokens
        least = min(_TEXT_TOKENS[0], self.max_tokens)
        most = min(_TEXT_TOKENS[1], self.max_tokens)
        return opening, chance.randint(least, most)


def load_openings(name: str) -> list[str]:
    """Openings of `builtin`, of `none`, or of a file with one per line.

    \\n in a line stands for a line break.

    Raises UserError: no such file, or an empty one.
    """
    if name == "none":
        return []
    path = Path(name)
    if name == "builtin":  # ten of each group, so that each gets its share
        path = Path(__file__).with_name("openings.txt")
    lines = []
    for line in read_text(path, "openings", "give builtin, none, or a text file").split("\n"):
        if line.strip():
            lines.append(line.removesuffix("\r").replace("\\n", "\n"))
    if not lines:
        raise UserError(
            f"openings={name!r} is empty; write one beginning of a user's turn per line, or give none"
        )
    return lines
