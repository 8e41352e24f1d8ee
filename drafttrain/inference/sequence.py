"""The sequences of a batch: the state of each, the record of its generation, and its text.

`Sequence` holds what the engine knows of one sequence, `Stats` records the generation for metrics,
`Clock` measures it, and `TextStream` turns tokens into text and finds stop strings.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from drafttrain.drafters.base import Session
from drafttrain.errors import UserError, shown
from drafttrain.inference.verify import Verdict, Verifier
from drafttrain.ops.graphs import GraphPool
from drafttrain.target import Target
from drafttrain.target.sight import ImagePrompt
from drafttrain.values import AnyText, Count, check


@dataclass(repr=False)
class Stats:
    """The record of one generation. Seconds are wall-clock.

    The prefill yields the first token. It is not a round, so that token counts in no accepted
    length. Sequences of a batch share the time of a round equally, so that sums over sequences are
    wall-clock times of the batch.

    Attributes:
        prompt_tokens, new_tokens: lengths; EOS counts as a token.
        target_passes: rounds, i.e. target forwards after the prefill.
        accepted: accepted draft tokens per round.
        offered: depth of the tree per round. Where EOS or a stop string cuts the path, the depth of
            the cut, because nothing below it was tested.
        draft_seconds: time in the drafter, its prefill included.
        target_seconds: time in the rounds' target forwards and head.
        prefill_seconds: from joining the batch to the first token (time to first token).
        total_seconds: from joining the batch to the last token; not shared.
        token_seconds: per new token, the time at which it was known, counted from joining.
        finish: `eos`, `stop` (a stop string) or `length`; empty while the sequence runs.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    target_passes: int = 0
    accepted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    prefill_seconds: float = 0.0
    total_seconds: float = 0.0
    token_seconds: list[float] = field(default_factory=list)
    finish: str = ""

    def __repr__(self) -> str:
        return (
            f"Stats({self.new_tokens} tokens in {self.target_passes} passes, accepted length {self.accepted_length:.2f}, "
            f"{self.total_seconds:.2f} s, prompt of {self.prompt_tokens} tokens, finish={self.finish!r})"
        )

    @property
    def ended(self) -> bool:
        """Whether EOS or a stop string ended the sequence, not the limit."""
        return self.finish in ("eos", "stop")

    @property
    def accepted_length(self) -> float:
        """Tokens committed per round, bonus token included; 0 without rounds."""
        if self.target_passes:
            return (self.new_tokens - 1) / self.target_passes
        return 0.0

    @property
    def rounds(self) -> Counter[tuple[int, int]]:
        """Number of rounds that accepted a tokens of an offered depth o, by (a, o)."""
        return Counter(zip(self.accepted, self.offered, strict=True))


@dataclass(repr=False)
class Generation:
    """The continuation of a prompt."""

    tokens: list[int]  # the new tokens, EOS included
    stats: Stats  # their record
    text: str = ""  # set by `drafttrain.generate`

    def __repr__(self) -> str:
        return f"Generation({shown(self.text or self.tokens)}, {self.stats!r})"


@dataclass(eq=False)
class Sequence:
    """A running sequence.

    Attributes:
        index: number of its prompt.
        prompt: [L] int64, tokens that the next prefill reads.
        images: the prompt with its images, which the next prefill reads in one forward; None for text.
        digests: of the images among all its tokens.
        seen: tokens from the beginning to the end of the prompt that brought the images.
        limit: most new tokens.
        verifier: decides which draft tokens are accepted.
        text: finds stop strings; None without any.
        stats: the record.
        speculate: whether the drafter drafts for it.
        row: its row of the cache, -1 before it joins.
        root: [1] int64, the last committed token; its keys are not in the cache yet.
        session: the drafter's state; None if nothing is drafted.
        pending: committed tokens [m] and features [m, f*h] that the session has not read yet.
        probed: the node of each probe that the session requested in this round.
        states: captured features [m, f*h] bfloat16 of each forward, in order, if the engine
            captures.
        joined: time at which its prefill began.
    """

    index: int
    prompt: Tensor
    limit: int
    verifier: Verifier
    text: TextStream | None = None
    stats: Stats = field(default_factory=Stats)
    speculate: bool = True
    images: ImagePrompt | None = None
    digests: tuple[str, ...] = ()
    seen: int = 0
    row: int = -1
    root: Tensor = field(init=False)
    session: Session | None = None
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    probed: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    joined: float = 0.0

    def __post_init__(self) -> None:
        self.root = self.prompt[:0]  # empty: no token is committed yet
        if self.images is not None:
            self.digests = self.images.digests
            self.seen = len(self.images)
        self.stats.prompt_tokens = len(self.prompt)

    @property
    def left(self) -> int:
        """Tokens until the limit."""
        return self.limit - self.stats.new_tokens

    @property
    def drafts(self) -> bool:
        """Whether a drafter may help: one token behind the first leaves nothing to draft."""
        return self.speculate and self.limit > 2

    @property
    def behind(self) -> int:
        """Committed tokens that the session has not read yet."""
        return sum(tokens.shape[0] for tokens, _ in self.pending)

    def record(self, verdict: Verdict, moment: float) -> list[int]:
        """Records a round whose tokens are known at `moment`.

        Returns:
            The tokens, cut after a stop string.
        """
        stats = self.stats
        tokens = verdict.tokens
        if self.text is not None:
            tokens = tokens[: self.text.push(tokens)]
        stats.new_tokens += len(tokens)
        stats.total_seconds = moment - self.joined
        stats.token_seconds += [stats.total_seconds] * len(tokens)
        if self.text is not None and self.text.stopped:
            stats.finish = "stop"
        elif verdict.ended:
            stats.finish = "eos"
        elif self.left <= 0:
            stats.finish = "length"
        return tokens

    def count(
        self,
        accepted: int,
        tokens: int,
        depth: int,
        seconds: float,
    ) -> None:
        """Counts a round.

        Args:
            accepted: draft tokens. tokens: committed ones. depth: of the tree.
            seconds: of the target's pass.
        """
        if self.stats.ended and tokens <= accepted:
            # EOS or a stop string cut the accepted path: nothing below the cut was tested.
            accepted = tokens
            depth = tokens
        self.stats.target_passes += 1
        self.stats.target_seconds += seconds
        self.stats.accepted.append(accepted)
        self.stats.offered.append(depth)


class Mark(NamedTuple):
    """A point in the device's queue."""

    event: Any  # torch.cuda.Event; None on a CPU
    seconds: float  # the host's time, captures not counted
    captured: float  # seconds spent on captures before

    def wait(self) -> None:
        """Waits until the device has done the work before the mark."""
        if self.event is not None:
            self.event.synchronize()


class Clock:
    """Wall-clock seconds without captures. Marks never wait for the device.

    Args:
        pool: its captures are not counted; None without graphs.
    """

    def __init__(self, device: torch.device, pool: GraphPool | None):
        self.device = device
        self._pool = pool
        self._queues = device.type == "cuda"

    @property
    def captured(self) -> float:
        """Seconds spent on captures, in earlier calls too."""
        if self._pool is None:
            return 0.0
        return self._pool.seconds

    def now(self) -> float:
        """The host's time."""
        if self._pool is None:
            return time.perf_counter()
        return time.perf_counter() - self._pool.seconds

    def mark(self) -> Mark:
        """A mark behind the work that is queued so far."""
        if not self._queues:
            return Mark(None, self.now(), 0.0)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return Mark(event, self.now(), self.captured)

    def between(self, begin: Mark, end: Mark) -> float:
        """Seconds between two marks that the device has passed, as any transfer behind them shows."""
        if begin.event is None:
            return end.seconds - begin.seconds
        # If a target is spread over devices, another device may be ahead of this one.
        if not end.event.query():
            end.event.synchronize()
        elapsed = begin.event.elapsed_time(end.event) / 1000  # from milliseconds
        # The host captures while the device waits: those seconds lie between the marks too.
        return max(0.0, elapsed - (end.captured - begin.captured))


def chunks(lengths: Items[int], size: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cuts prompts into forwards of at most `size` tokens, in order.

    Yields:
        Lists of (index of the prompt, begin, end), one per forward.
    """
    chunk: list[tuple[int, int, int]] = []
    free = size
    for i, length in enumerate(lengths):
        begin = 0
        while begin < length:
            end = min(length, begin + free)
            chunk.append((i, begin, end))
            free -= end - begin
            begin = end
            if free == 0:
                yield chunk
                chunk = []
                free = size
    if chunk:
        yield chunk


def images_of(prompt: Tensor | Items[int] | ImagePrompt) -> ImagePrompt | None:
    """The prompt if it has images; None for text."""
    if isinstance(prompt, ImagePrompt) and prompt.digests:
        return prompt
    return None


def token_ids(target: Target, prompt: Tensor | Items[int] | ImagePrompt) -> Tensor:
    """A prompt's token ids, [L] int64 on the target's device.

    Raises:
        UserError: no whole numbers, several rows, or an id that the target's vocabulary does not
            have.
    """
    most = target.vocab_size - 1
    if isinstance(prompt, ImagePrompt):
        prompt = prompt.ids
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):  # text, ragged rows, numbers of more than 64 bits
        ids = torch.tensor(math.nan)  # a float, refused below
    whole = not ids.is_floating_point() and not ids.is_complex() and ids.dtype != torch.bool
    one_row = ids.dim() > 0 and ids.numel() == ids.shape[-1]  # [L] or [1, L]
    if not one_row or (ids.numel() and not whole):
        raise UserError(
            f"prompt={shown(prompt)} must be token ids: one list of whole numbers from 0 to {most}"
        )
    ids = ids.to(target.device, torch.long).flatten()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= most:
        wrong = next(token for token in ids.tolist() if not 0 <= token <= most)
        raise UserError(
            f"prompt has token id {wrong}, but target {target.name!r} has 0 to {most}; use the target's own tokenizer"
        )
    return ids


def token_limit(
    target: Target,
    prompt_tokens: int,
    max_new_tokens: int,
) -> int:
    """Most tokens that may follow the prompt: max_new_tokens, or what the target's context leaves.

    Raises:
        UserError: an empty prompt, one that fills the context, or max_new_tokens below 1.
    """
    max_new_tokens = check("max_new_tokens", max_new_tokens, Count)
    if prompt_tokens < 1:
        raise UserError(
            "prompt is empty: decoding needs at least one token; add a BOS token or some text"
        )
    context = target.max_positions
    if context is None:
        return max_new_tokens
    if prompt_tokens >= context:
        raise UserError(
            f"prompt has {prompt_tokens} tokens, but target {target.name!r} reads at most {context}; shorten the prompt"
        )
    return min(max_new_tokens, context - prompt_tokens)


def check_stop(stop: str | Items[str], target: Target) -> tuple[str, ...]:
    """Stop strings as a tuple.

    Raises:
        UserError: an empty stop string, or a target without a tokenizer.
    """
    if isinstance(stop, str):
        strings = (stop,)
    else:
        strings = check("stop", stop, tuple[AnyText, ...])
    if "" in strings:
        raise UserError(f"stop={strings!r}: an empty string stops nothing; leave it out")
    if strings and target.tokenizer is None:
        raise UserError(
            f"stop={strings!r} needs text, but target {target.name!r} has no tokenizer; wrap it with one"
        )
    return strings


class TextStream:
    """Decodes tokens as they arrive; a character of several tokens appears with the last of them.

    Attributes:
        keep_special: whether special tokens are in the text.
        text: the text so far, cut before the stop string once one is found.
        stopped: whether a stop string was found.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Items[str] = (),
        keep_special: bool = False,
    ):
        self.tokenizer = tokenizer
        self.stop = stop
        self.keep_special = keep_special
        self.text = ""
        self.stopped = False
        self._ids: list[int] = []
        self._context = 0  # ids from here on are decoded together
        self._done = 0  # ids before this one are in the text
        self._early = 0  # characters of later ids that are in the text
        self._given = 0  # characters that `take` has returned

    def push(self, tokens: Items[int]) -> int:
        """Adds tokens up to the one that completes a stop string; returns their number."""
        for count, token in enumerate(tokens, 1):
            self._ids.append(token)
            before = len(self.text)
            self._decode()
            # Only new text can complete a stop string.
            if len(self.text) > before and self._cut(before):
                return count
        return len(tokens)

    def take(self, last: bool = False) -> str:
        """Returns new text that is final. Text that may be the beginning of a stop string waits.

        Args:
            last: no more tokens will come.
        """
        if last and not self.stopped:
            before = len(self.text)
            self._decode(complete=True)
            self._cut(before)
        end = len(self.text)
        if not last and not self.stopped:
            held = 0  # characters at the end that may begin a stop string
            for string in self.stop:
                # Shorter beginnings hold back less than what is held already.
                for count in range(held + 1, len(string)):
                    if self.text.endswith(string[:count]):
                        held = count
            end -= held
        part = self.text[self._given : end]
        self._given = max(self._given, end)
        return part

    def _decode(self, complete: bool = False) -> None:
        # Decoders treat the first token of a text specially, so some earlier tokens are decoded
        # with the new ones.
        old = self._read(self._ids[self._context : self._done])
        new = self._read(self._ids[self._context :])
        # A replacement character at the end: the character's other tokens are still to come.
        whole = new
        if not complete:
            whole = new.rstrip("\N{REPLACEMENT CHARACTER}")
        part = whole[len(old) + self._early :]
        self.text += part
        self._early += len(part)
        if complete or (len(new) > len(old) and whole == new):
            self._context = self._done
            self._done = len(self._ids)
            self._early = 0

    def _read(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(
            ids,
            skip_special_tokens=not self.keep_special,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def _cut(self, before: int) -> bool:
        """Cuts the text before the first stop string that ends after position `before`."""
        places = []
        for string in self.stop:
            place = self.text.find(string, max(0, before - len(string) + 1))  # ends after `before`
            if place >= 0:
                places.append(place)
        if places:
            self.text = self.text[: min(places)]
            self.stopped = True
        return self.stopped
