"""On-policy distillation: some responses are sampled by the drafter, and scored by the target.

From its second token on, a drafter continues *its own* tokens in decoding, while the data holds the
target's responses only. So every few steps a frozen copy of the drafter answers prompts of the
data, and its responses replace a share of the rows until the next refresh. The loss on them is the
same: the divergence from the target's distribution at each of their tokens.

Source: DistillSpec, arXiv 2310.08461 (and GKD, arXiv 2306.13649).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from transformers import TrainingArguments

from drafttrain.batch import Batch
from drafttrain.data.loader import collate, cut_row, fill_rows, join_rows
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.inference.responses import ResponseEngine, ResponseRequest
from drafttrain.ops.sampling import SamplingParams
from drafttrain.states.ahead import Inputs
from drafttrain.states.source import BatchSource
from drafttrain.target import Target
from drafttrain.target.generation import LogitsRules
from drafttrain.training.held_out_decoding import gather_drafter
from drafttrain.values import Count, PositiveFraction, Temperature, check_fields, key


@dataclass(frozen=True)
class OnPolicyOptions:
    """The recipe's `on_policy:`."""

    share: PositiveFraction = key(
        0.5, "of the rows that responses of the drafter replace, on average"
    )
    refresh_steps: Count = key(50, "optimizer steps between refreshes")
    responses: Count = key(64, "responses per refresh, over all processes")
    temperature: Temperature = key(1.0, "of the drafter's sampling")
    max_new_tokens: Count = key(128, "tokens per response")

    def __post_init__(self) -> None:
        check_fields(self, "on_policy.", words=True)

    @classmethod
    def parse(cls, given: Json) -> OnPolicyOptions:
        """The recipe's options; raises UserError for an unknown option, or a value out of range."""
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise UserError(
                    f"unknown key on_policy.{name}; there are {', '.join(cls.__dataclass_fields__)}"
                )
        return cls(**given)


@dataclass
class OnPolicy:
    """Keeps the drafter's current responses and puts them into batches.

    The choice of replaced rows depends on seed, step and row only, and the responses are part of
    the checkpoint, so a resumed run trains on what the interrupted one would have trained on.

    Attributes:
        drafter: of a kind with `writes_responses`. rows: training rows {tokens, spans}, whose
            prompts are answered.
        target: its end-of-sequence tokens end a response. max_length: of a row.
        args: the run's seed, rank and number of processes. packing: batches hold packed rows, so
            responses are packed too.
        round: number of the refresh that wrote the responses, -1 before the first.
        pool: rows {tokens, spans, length, index} that the drafter has written; ready: the same,
            packed if `packing`.
        used: rows replaced so far in this process.

    Raises:
        UserError: a kind that cannot write responses.
    """

    options: OnPolicyOptions
    drafter: TrainableDrafter
    rows: Sequence[Json] | Dataset
    target: Target
    max_length: int
    args: TrainingArguments
    packing: bool = False
    round: int = -1
    used: int = 0

    def __post_init__(self) -> None:
        if not self.drafter.writes_responses:
            raise UserError(
                f"on_policy: kind={self.drafter.kind!r} cannot write responses by itself; leave it out"
            )
        self._take([])

    def refresh(self, step: int) -> None:
        """Replaces the responses when `step` begins a new refresh."""
        begun = step // self.options.refresh_steps
        if begun == self.round:
            return
        self.round = begun
        choose = random.Random(f"{self.args.seed}/{begun}")
        chosen = [choose.randrange(len(self.rows)) for _ in range(self.options.responses)]
        requests = []  # of this process
        for number, index in enumerate(chosen):
            row = self.rows[index]
            begin = choose.choice(row["spans"])[0]  # drawn in all processes alike
            own = number % self.args.world_size == self.args.process_index
            if own and 0 < begin < self.max_length - 1:
                limit = min(self.options.max_new_tokens, self.max_length - begin)
                prompt = row["tokens"][:begin]
                requests.append(ResponseRequest(str(number), prompt, limit, self.target.eos_ids))
        # Copying and sampling draw random numbers, and training's must not depend on refreshes.
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            made = self._answer(requests)
        if self.args.world_size > 1:
            made = gather_object(made)
        made.sort(key=lambda pair: pair[0])
        self._take([row for _, row in made])

    def _take(self, pool: list[Json]) -> None:
        self.pool = self.ready = pool
        if self.packing:
            lengths = [row["length"] for row in pool]
            self.ready = []
            for numbers in fill_rows(lengths, self.max_length, self.args.seed + self.round):
                self.ready.append(join_rows([pool[number] for number in numbers]))

    def _answer(self, requests: list[ResponseRequest]) -> list[tuple[int, Json]]:
        """(number, row) of each response of at least two tokens; a shorter one has no anchor."""
        drafter = gather_drafter(self.drafter, self.target, bool(requests))
        if not requests or drafter is None:
            return []
        # A drafter drafts from its raw logits, so it answers from them too.
        writer = drafter.as_target()
        writer.pack(keep_dtype=True)  # training reads it too
        engine = ResponseEngine(writer, len(requests), self.max_length, rules=LogitsRules())
        made = []
        sampling = SamplingParams(self.options.temperature)
        for done in engine.run(requests, sampling, self.args.seed + self.round):
            if len(done.tokens) > 1:
                begin = len(done.sequence) - len(done.tokens)
                length = len(done.sequence)
                row = cut_row(done.sequence, [[begin, length]], -1, length)
                made.append((int(done.key), row))
        writer.release_steps()
        return made

    def replace(
        self,
        batches: list[Inputs],
        step: int,
        source: BatchSource,
    ) -> list[Inputs]:
        """The micro-batches of a step with a share of their rows replaced.

        `source` need not read the states of replaced rows.
        """
        mixed = []
        for inputs in batches:
            made = self.mix(inputs, step)
            mixed.append(made)
            if source.ahead is not None:
                for index in set(inputs["index"].tolist()) - set(made["index"].tolist()):
                    source.ahead.release(index)
        return mixed

    def mix(self, inputs: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """A collated batch with a share of its rows replaced; a packed row is replaced completely."""
        if not self.ready:
            return inputs
        rows = _rows(inputs)
        used = self.used
        for place, row in enumerate(rows):
            if self.packing:
                index = row["index"][0]
            else:
                index = row["index"]
            draw = random.Random(f"{self.args.seed}/{step}/{index}")
            if draw.random() < self.options.share:
                rows[place] = draw.choice(self.ready)
                self.used += 1
        device = inputs["input_ids"].device
        if self.used == used:
            return inputs
        return {name: value.to(device) for name, value in collate(rows).items()}

    # -- resuming ----------------------------------------------------------------------------------

    def state(self) -> Json:
        pool = []
        for row in self.pool:
            # Text: the file is indented JSON, which puts each number of a list on its own line.
            tokens = " ".join(map(str, row["tokens"]))
            pool.append([tokens, row["spans"][0][0]])
        return {"args": {}, "attributes": {"round": self.round, "used": self.used, "pool": pool}}

    def restore(self, saved: object) -> None:
        """Takes the responses of a checkpoint's `stateful_callbacks`, if it has any."""
        if not isinstance(saved, dict) or "OnPolicy" not in saved:
            return
        kept: Json = saved["OnPolicy"]["attributes"]
        self.round = kept["round"]
        self.used = kept["used"]
        pool = []
        for text, begin in kept["pool"]:
            tokens = [int(word) for word in text.split()]
            pool.append(cut_row(tokens, [[begin, len(tokens)]], -1, len(tokens)))
        self._take(pool)


def _rows(inputs: dict[str, Tensor]) -> list[Json]:
    """The rows that a batch was collated from."""
    batch = Batch.of(inputs)
    rows = []
    for place, length in enumerate(batch.lengths.tolist()):
        mask = batch.response_mask[place, :length].to(torch.int8)
        # Where the padded mask changes, spans begin and end in turn.
        edges = torch.nn.functional.pad(mask, (1, 1)).diff().nonzero().flatten().tolist()
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        tokens = batch.input_ids[place, :length].tolist()
        members = batch.conversations()[:, 0] == place  # [c] bool, the row's conversations
        index = batch.index[members].tolist()
        row: Json = {"tokens": tokens, "spans": spans, "length": length, "index": index[0]}
        if batch.documents is not None:
            row["index"] = index
            row["documents"] = batch.documents[members, 2].tolist()
        rows.append(row)
    return rows
