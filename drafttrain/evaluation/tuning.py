"""Which tree is fastest for this drafter on this machine: a timed search over a short list."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.decode import SamplingParams, generate, token_limit
from drafttrain.drafters.base import Drafter, TreeSpec
from drafttrain.errors import UserError
from drafttrain.evaluation.suites import render, render_messages
from drafttrain.target import Target

CANDIDATES = (
    "none",
    "chain:1",
    "chain:2",
    "chain:4",
    "dynamic:2,6,8",
    "dynamic:3,4,8",
    "dynamic:3,6,16",
    "dynamic:5,8,24",
)
PROMPTS = (
    "Give three reasons why people keep diaries, with a short example of each.",
    "Write a function that removes duplicates from a list while keeping the order, and explain it.",
    "A train covers 150 km in two and a half hours. What is its mean speed, and how far does it get in four hours?",
    "Summarise in two sentences: Bees fly from flower to flower to collect nectar. On the way they carry pollen, which "
    "lets plants form seeds. Many crops depend on them, so farmers rent hives in spring.",
)
TOKENS = 40
ROWS = 4
# A candidate this much slower than the best so far is not timed on further prompts.
DROP_BELOW = 0.85


@dataclass
class _Trial:
    spec: TreeSpec
    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0
    prompts: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def calibration_prompts(target: Target, file: str | None, exclude: Collection[str] = ()) -> list[list[int]]:
    """Token ids of prompts for the search.

    Args:
        target: renders them, and limits their length.
        file: JSON lines with `messages` (an assistant's last message is left out), `turns` or `text`; None takes
            built-in ones.
        exclude: texts of the suite that will be measured; prompts that are among them are left out.

    Raises:
        UserError: a file that is missing, malformed, or has no usable row.
    """
    if file is None:
        return [render(target.tokenizer, [prompt], []) for prompt in PROMPTS if prompt not in exclude]
    try:
        rows = [json.loads(line) for line in Path(file).expanduser().read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"calibrate={file!r} cannot be read as JSON lines ({error}); check the path") from error
    prompts: list[list[int]] = []
    for row in rows:
        ids = _row_ids(target, row, exclude) if isinstance(row, dict) else []
        if ids and _fits(target, ids):
            prompts.append(ids)
        if len(prompts) == ROWS:
            break
    if not prompts:
        raise UserError(
            f"calibrate={file!r} has no usable row: each needs messages, turns or text that the suite lacks"
        )
    return prompts


def _row_ids(target: Target, row: dict[str, Any], exclude: Collection[str]) -> list[int]:
    tokenizer = target.tokenizer
    if row.get("messages"):
        messages = [{"role": message["role"], "content": message["content"]} for message in row["messages"]]
        if messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages or any(message["content"] in exclude for message in messages):
            return []
        if getattr(tokenizer, "chat_template", None):
            return render_messages(tokenizer, messages)
        return tokenizer("\n\n".join(message["content"] for message in messages)).input_ids
    turns = row.get("turns") or ([row["text"]] if row.get("text") else [])
    return render(tokenizer, turns[:1], []) if turns and turns[0] not in exclude else []


def _fits(target: Target, ids: list[int]) -> bool:
    try:
        return token_limit(target, len(ids), TOKENS) == TOKENS
    except UserError:
        return False


def search_tree(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    candidates: Sequence[str] = CANDIDATES,
    advance: Callable[[], None] = lambda: None,
) -> tuple[TreeSpec, list[dict[str, Any]]]:
    """Times every candidate on every prompt, turn and turn about, dropping clearly slow ones as it goes.

    Args:
        target: packed already, if it is going to be.
        prompts: token ids; not from the suite that is going to be measured.
        sampling: as in the measurement.
        advance: called after each generation.

    Returns:
        The candidate with the highest decoding rate, and a row per candidate: tree, tokens_per_second (after the
        first token), accepted_length, prompts (how many it was timed on). Fastest first.
    """
    trials = [_Trial(TreeSpec.parse(text)) for text in candidates]
    generate(target, drafter, prompts[0], max_new_tokens=8, spec=trials[-1].spec, sampling=sampling)
    running = list(trials)
    for number, prompt in enumerate(prompts):
        turn = number % len(running)
        for trial in running[turn:] + running[:turn]:
            stats = generate(
                target, drafter, prompt, max_new_tokens=TOKENS, spec=trial.spec, sampling=sampling, seed=number
            ).stats
            trial.tokens += stats.new_tokens - 1
            trial.seconds += stats.total_seconds - stats.prefill_seconds
            trial.passes += stats.target_passes
            trial.prompts += 1
            advance()
        best = max(trial.rate for trial in running)
        running = [trial for trial in running if trial.rate >= DROP_BELOW * best]
    ranking = sorted(trials, key=lambda trial: (-trial.prompts, -trial.rate))
    table = [
        {
            "tree": str(trial.spec),
            "tokens_per_second": round(trial.rate, 3),
            "accepted_length": round(trial.tokens / trial.passes, 4) if trial.passes else 0.0,
            "prompts": trial.prompts,
        }
        for trial in ranking
    ]
    return ranking[0].spec, table
