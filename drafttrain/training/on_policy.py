"""On-policy distillation: some responses are sampled by the drafter, and scored by the target.

Decoding asks a drafter what follows *its own* tokens as soon as it drafts more than one. On the target's responses alone
it never sees such text. So every few steps a frozen copy of the drafter answers prompts of the data, and these answers
stand for a share of the rows until the next refresh. The loss on them is the same: the divergence from the target's
distribution at each of their tokens.

Source: DistillSpec, arXiv 2310.08461 (and GKD, arXiv 2306.13649).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from drafttrain.data.loader import collate, fill_rows, join_rows, to_batch
from drafttrain.errors import UserError
from drafttrain.inference.responses import ResponseEngine, ResponseRequest
from drafttrain.ops.sampling import SamplingParams
from drafttrain.target import Target
from drafttrain.training.callbacks import whole


@dataclass(frozen=True)
class OnPolicyOptions:
    """The recipe's `on_policy:`.

    Attributes:
        share: of the rows that a response of the drafter replaces, on average.
        refresh_steps: optimizer steps after which the drafter answers anew.
        responses: how many it answers each time, over all processes.
        temperature: of its sampling. max_new_tokens: per response.
    """

    share: float = 0.5
    refresh_steps: int = 50
    responses: int = 64
    temperature: float = 1.0
    max_new_tokens: int = 128


class OnPolicy(TrainerCallback, ExportableState):
    """The drafter's responses of the moment, and the hand that puts them into batches.

    What is replaced follows from seed, step and row alone, and the responses are part of the checkpoint: a resumed run
    sees what the interrupted one would have seen.

    Args:
        drafter: of a kind with `as_target`. rows: training rows {tokens, spans}, whose prompts are answered.
        target: whose end-of-sequence tokens end a response. max_length: of a row.
        seed: of choice and sampling; rank, world: this process among so many.
        packing: batches hold packed rows, so responses are packed as well.

    Attributes:
        round: which refresh the responses are from, -1 before the first.
        pool: rows {tokens, spans, length, index} that the drafter has written; ready: the same as they enter batches.
        used: rows replaced so far in this process.
    """

    def __init__(
        self,
        options: OnPolicyOptions,
        drafter: Any,
        rows: Any,
        target: Target,
        max_length: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        packing: bool = False,
    ):
        self.options, self.drafter, self.rows, self.target = options, drafter, rows, target
        self.max_length, self.seed, self.rank, self.world = max_length, seed, rank, world
        self.packing, self.round, self.used = packing, -1, 0
        self._take([])

    @classmethod
    def of(
        cls,
        given: dict[str, Any],
        drafter: Any,
        rows: Any,
        target: Target,
        max_length: int,
        args: Any,
        packing: bool = False,
    ) -> OnPolicy | None:
        """From a recipe; None without `on_policy`.

        Raises:
            UserError: an unknown option or value, or a kind that cannot write responses.
        """
        if not given:
            return None
        known = vars(OnPolicyOptions())
        for key, value in given.items():
            if key not in known:
                raise UserError(f"unknown key on_policy.{key}; there are {', '.join(known)}")
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or value < 0 or (value == 0 and key != "temperature"):
                raise UserError(f"on_policy.{key}={value!r} must be a positive number")
        options = OnPolicyOptions(**given)
        if options.share > 1:
            raise UserError(f"on_policy.share={options.share} must be at most 1")
        if not drafter.writes_responses:
            raise UserError(f"on_policy: kind={drafter.kind!r} cannot write responses by itself; leave it out")
        place = (args.seed, args.process_index, args.world_size)
        return cls(options, drafter, rows, target, max_length, *place, packing)

    def refresh(self, step: int) -> None:
        """Lets the drafter answer anew where a round begins."""
        begun = step // self.options.refresh_steps
        if begun == self.round:
            return
        self.round = begun
        choose = random.Random(f"{self.seed}/{begun}")
        chosen = [choose.randrange(len(self.rows)) for _ in range(self.options.responses)]
        requests = []
        for number, index in enumerate(chosen):
            row = self.rows[index]
            begin = choose.choice(row["spans"])[0]
            if number % self.world == self.rank and 0 < begin < self.max_length - 1:
                limit = min(self.options.max_new_tokens, self.max_length - begin)
                requests.append(ResponseRequest(str(number), row["tokens"][:begin], limit, self.target.eos_ids))
        made = self._answer(requests)
        gathered = gather_object(made) if self.world > 1 else made
        self._take([row for _, row in sorted(gathered, key=lambda pair: pair[0])])

    def _take(self, pool: list[dict[str, Any]]) -> None:
        self.pool = self.ready = pool
        if self.packing:
            rows = fill_rows([row["length"] for row in pool], self.max_length, self.seed + self.round)
            self.ready = [join_rows([pool[number] for number in row]) for row in rows]

    def _answer(self, requests: list[ResponseRequest]) -> list[tuple[int, dict[str, Any]]]:
        """(number, row) of each response with two tokens at least: fewer have nothing to learn from."""
        drafter = whole(self.drafter, self.target, bool(requests))
        if not requests:
            return []
        engine = ResponseEngine(drafter.as_target(), len(requests), self.max_length)
        made = []
        for done in engine.run(requests, SamplingParams(self.options.temperature), self.seed + self.round):
            length = len(done.sequence)
            span = [length - len(done.tokens), length]
            if len(done.tokens) > 1:
                made.append((int(done.key), {"tokens": done.sequence, "spans": [span], "length": length, "index": -1}))
        return made

    def mix(self, inputs: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """A collated batch with a share of its rows replaced, packed rows as a whole."""
        if not self.ready:
            return inputs
        rows = _rows(inputs)
        replaced = 0
        for place, row in enumerate(rows):
            index = row["index"][0] if self.packing else row["index"]
            draw = random.Random(f"{self.seed}/{step}/{index}")
            if draw.random() < self.options.share:
                rows[place] = draw.choice(self.ready)
                replaced += 1
        self.used += replaced
        if not replaced:
            return inputs
        device = inputs["input_ids"].device
        return {name: value.to(device) for name, value in collate(rows).items()}

    # -- resuming -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        # Token lists as text: the file is indented, and would give each number a line of its own.
        pool = [[" ".join(map(str, row["tokens"])), row["spans"][0][0]] for row in self.pool]
        return {"args": {}, "attributes": {"round": self.round, "used": self.used, "pool": pool}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if not saved:
            return
        self.round, self.used = saved["attributes"]["round"], saved["attributes"]["used"]
        pool = []
        for text, begin in saved["attributes"]["pool"]:
            tokens = [int(token) for token in text.split()]
            pool.append({"tokens": tokens, "spans": [[begin, len(tokens)]], "length": len(tokens), "index": -1})
        self._take(pool)


def _rows(inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The rows of a collated batch as they were before."""
    batch = to_batch(inputs)
    rows: list[dict[str, Any]] = []
    for place, length in enumerate(batch.lengths.tolist()):
        mask = batch.response_mask[place, :length].to(torch.int8)
        edges = torch.nn.functional.pad(mask, (1, 1)).diff().nonzero().flatten().tolist()
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        tokens = batch.input_ids[place, :length].tolist()
        rows.append({"tokens": tokens, "spans": spans, "length": length, "index": [], "documents": []})
    for index, (place, _, length) in zip(batch.index.tolist(), batch.conversations().tolist(), strict=True):
        rows[place]["index"].append(index)
        rows[place]["documents"].append(length)
    if batch.documents is None:
        for row in rows:
            row["index"] = row["index"][0]
            del row["documents"]
    return rows
