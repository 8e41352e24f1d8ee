"""A drafter that follows a policy in reinforcement learning.

    policy      moves with every step of RL; its weights are read where they are, never written
    rollouts    its last answers                        -> rows {tokens, spans}
    judge       replay of the rollouts, which nothing has learned from, by this head and the last proven one
    train       `steps` steps of continued.py, on the policy's present states and distributions
    send        the drafter's tensors, as engines read them; or a folder for `drafttrain swap`

A `Follower` keeps drafter, optimizer, the proven head and what was accepted from call to call, and
nothing else: no states, no rollouts, no hooks on the policy.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from drafttrain.data.loader import cut_row, similar_rows
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.engine_trees import engine_chain
from drafttrain.drafters.registry import keep_decoding, prepare
from drafttrain.drafters.shipping import ExportRequest, check_expressible, find_drafter
from drafttrain.errors import UserError
from drafttrain.evaluation.held_out import judged_rows
from drafttrain.evaluation.resampling import FEWEST, Ratio, lengths_ratio
from drafttrain.files import Json, reading, scratch_folder, writing
from drafttrain.formats.weights import read_weights
from drafttrain.states.source import TargetSource
from drafttrain.target import Target, load_shell
from drafttrain.target.borrowed import borrowed
from drafttrain.target.target import Tokenizer
from drafttrain.training.continued import (
    STEP_TOKENS,
    ContinuedTraining,
    continued,
    source_of,
)
from drafttrain.values import Count, Size, check

STATE = "follower.pt"
_JUDGED = 96  # answers, the newest

# Token ids of prompt and answer, and the prompt's length; or both as text.
Rollout = tuple[Sequence[int], int] | tuple[str, str]


class Followed(NamedTuple):
    """A call of `follow`.

    Attributes:
        steps, tokens: that were trained on. loss: mean per step, by step.
        verdict: on the head before this call: better than the proven one, and now the proven one; worse,
            and the proven one trains on in its place; undecided.
        ratio: of their accepted lengths, with its interval; None before enough answers were judged.
        tensors: the drafter, by the names and with the shapes of its export; on the CPU.
    """

    steps: int
    tokens: int
    loss: list[float]
    verdict: Literal["better", "worse", "undecided"]
    ratio: Ratio | None
    tensors: dict[str, Tensor]


@dataclass
class Follower:
    """Trains a drafter on a policy's last rollouts, call after call.

    Args:
        drafter: folder or Hub id of a trained drafter, or what `save` wrote, which goes on.
        policy: the policy, a transformers model, also wrapped by PEFT or DDP. With `target_url`:
            name or folder of its present weights, of which embedding, norm and head are read.
        tokenizer: of the policy in memory; a drafter knows its target by it.
        target_url: of each `drafttrain serve-target` of the policy; they compute its states then.
        steps: of a call. step_tokens: padded tokens of a step.
        rate: learning rate. A head's first training has more tokens in a step, and a higher rate.
        judges: rollouts of a call that judge the head before it learns from them; 0 judges never.
        max_length: tokens that are read of a rollout.
        format: of the tensors that are sent, as of `drafttrain export`; '' for the drafter's own.
        dtype: of the tensors that are sent.
        seed: of the order of rows.

    Raises:
        UserError: a drafter of another target, a policy whose weights are not whole here, or a
            format that cannot express the drafter.
    """

    drafter: str
    policy: nn.Module | str
    tokenizer: Tokenizer = None
    target_url: Sequence[str] = ()
    steps: int = 16
    step_tokens: int = STEP_TOKENS
    rate: float = 2e-5
    judges: int = 8
    max_length: int = 2048
    format: str = "vllm"
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "step_tokens", "max_length"):
            check(name, getattr(self, name), Count)
        check("judges", self.judges, Size)
        self.taken = 0  # steps of all calls
        # What cannot be sent is refused before anything is trained.
        check("format", self.format, Literal["", "vllm", "sglang"])
        if self.format:
            check_expressible(find_drafter(self.drafter), self.format)
        with self._target() as target:
            self.head = continued(target, self.drafter)
        self.training = ContinuedTraining(self.head, self.rate)
        self._proven = _copied(self.head)
        # By judged answer: tokens that were committed, and in how many passes.
        self._proven_counts: list[list[int]] = []
        self._counts: list[list[int]] = []
        state = Path(self.drafter) / STATE
        if state.is_file():
            self._restore(state)

    @contextlib.contextmanager
    def _target(self) -> Iterator[Target]:
        """The policy as it is now."""
        if isinstance(self.policy, str):
            yield load_shell(self.policy, weights=True)
            return
        with borrowed(self.policy, self.tokenizer) as target:
            yield target

    def follow(self, rollouts: Sequence[Rollout]) -> Followed:
        """Trains on the policy's last rollouts.

        Random numbers, the policy's mode, gradients and hooks are as before afterwards.

        Raises:
            UserError: no rollout has two tokens of an answer, or ids beyond the vocabulary.
        """
        chance = random.Random(f"{self.seed} {self.taken}")
        # Seeding reaches every GPU, also one to which the policy has moved.
        with self._target() as target, torch.random.fork_rng(range(torch.cuda.device_count())):
            if target.device != self.head.device:  # a trainer has moved the policy
                self.head.to(target.device)  # type: ignore[arg-type]
                optimizer = self.training.optimizer
                optimizer.load_state_dict(optimizer.state_dict())  # to the weights' device
            # A resumed follower draws what an uninterrupted one would.
            torch.manual_seed(chance.getrandbits(32))
            self.head.bind(target)  # the target may be another object than before
            rows = self._rows(rollouts, target)
            batches = similar_rows(rows, self.step_tokens)
            # Passes over all batches, cut to the steps; with more batches than steps, a sample.
            order: list[list[Json]] = []
            while len(order) < self.steps:
                order += chance.sample(batches, len(batches))
            order = order[: self.steps]
            # States of the policy as it is now: none is kept for the next call.
            with contextlib.closing(source_of(target, self.head, self.target_url)) as source:
                judges = chance.sample(rows, min(self.judges, len(rows)))
                verdict, ratio = self._judge(judges, source)
                steps = self.training.train(order, source)
        self.head.eval()
        self.taken += len(steps)
        return Followed(
            steps=len(steps),
            tokens=sum(row["length"] for batch in order for row in batch),
            loss=[float(step.losses[0]) for step in steps],
            verdict=verdict,
            ratio=ratio,
            tensors=self.tensors(),
        )

    def _judge(
        self,
        rows: list[Json],
        source: TargetSource,
    ) -> tuple[Literal["better", "worse", "undecided"], Ratio | None]:
        """Compares the head with the last proven one, and takes the better of them; see `Followed`."""
        if not rows or not self.taken:
            return "undecided", None
        self._counts += judged_rows(self.head, rows, source)  # type: ignore[arg-type]  # states, no top-k
        present = _copied(self.head)
        self.head.load_state_dict(self._proven)
        self._proven_counts += judged_rows(self.head, rows, source)  # type: ignore[arg-type]
        self.head.load_state_dict(present)
        self._counts = self._counts[-_JUDGED:]
        self._proven_counts = self._proven_counts[-_JUDGED:]
        if len(self._counts) < FEWEST:
            return "undecided", None

        ratio, _, _ = lengths_ratio(self._proven_counts, self._counts)
        if ratio.low <= 1 <= ratio.high:
            return "undecided", ratio
        self._counts = []
        self._proven_counts = []
        if ratio.low > 1:
            self._proven = present
            return "better", ratio
        self.head.load_state_dict(self._proven)
        self.training = ContinuedTraining(self.head, self.rate)  # its moments led to the worse head
        return "worse", ratio

    def _rows(self, rollouts: Sequence[Rollout], target: Target) -> list[Json]:
        rows = []
        for number, (first, second) in enumerate(rollouts):
            if isinstance(first, str):
                # Apart, as the prompt was when the policy answered it.
                tokens = list(target.tokenizer(first)["input_ids"])
                start = len(tokens)
                tokens += target.tokenizer(second, add_special_tokens=False)["input_ids"]
            else:
                tokens = [int(token) for token in first]
                start = int(second)
            if tokens and not 0 <= min(tokens) <= max(tokens) < target.vocab_size:
                raise UserError(
                    f"rollouts: {number} has token ids up to {max(tokens)}, and the policy has "
                    f"{target.vocab_size} tokens; give rollouts of this policy"
                )
            row = cut_row(tokens, [[start, len(tokens)]], number, self.max_length)
            if row["spans"]:
                rows.append(row)
        if not rows:
            raise UserError(
                f"rollouts: none of {len(rollouts)} has two tokens of an answer within max_length="
                f"{self.max_length}; give prompts with their answers"
            )
        return rows

    # -- what is sent ------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The drafter's tensors, as an export has them."""
        # Written and read again, so that they are the export's to the bit, in every kind's form.
        with scratch_folder() as scratch:
            place = scratch / "drafter"
            self.head.save_pretrained(place)
            if self.format:
                trained = find_drafter(str(place))
                kind = check_expressible(trained, self.format)
                place = scratch / self.format
                # Kinds with a part per drafted token send as many as the engine's export has.
                depth = engine_chain(find_drafter(self.drafter))
                request = ExportRequest(place, self.dtype, depth=depth)
                kind.write(trained, self.format, request)
            return read_weights(place)

    def drafting(self, target: Target) -> Drafter:
        """A copy of the drafter that decodes with a target; training leaves it as it is."""
        with torch.random.fork_rng([]):  # a new module draws its weights
            made = self.head.blank().eval()
        made.load_state_dict(self.head.state_dict())
        made.fresh = True  # packed for the target, in its number format
        return prepare(made, target)

    def save(self, folder: str | Path) -> Path:
        """Writes the drafter for `drafttrain swap`, with what a new `Follower` needs to go on."""
        place = Path(folder).expanduser()
        self.head.save_pretrained(place)
        keep_decoding(self.drafter, place)
        kept = {
            "taken": self.taken,
            "warm": self.training.warm,
            "optimizer": self.training.optimizer.state_dict(),
            "proven": self._proven,
            "counts": [self._proven_counts, self._counts],
        }
        with writing(place):
            torch.save(kept, place / STATE)
        return place

    def _restore(self, path: Path) -> None:
        with reading(path, "drafter", "delete it to begin with a new optimizer"):
            kept = torch.load(path, map_location="cpu", weights_only=True)
        self.taken = kept["taken"]
        self.training.warm = kept["warm"]
        self.training.optimizer.load_state_dict(kept["optimizer"])
        if "proven" in kept:  # older files lack it
            self._proven = kept["proven"]
            self._proven_counts, self._counts = kept["counts"]


def _copied(head: TrainableDrafter) -> dict[str, Tensor]:
    """The head's weights, which training leaves as they are."""
    return {name: value.clone() for name, value in head.state_dict().items()}


def follow(
    policy: nn.Module | str,
    rollouts: Sequence[Rollout],
    drafter: str | Follower,
    tokenizer: Tokenizer = None,
) -> Followed:
    """Trains a drafter on a policy's last rollouts; see `Follower`, which also has the settings.

    Args:
        drafter: a trained drafter's folder or Hub id, whose optimizer begins anew; or the
            `Follower` of the calls before.
    """
    follower = drafter
    if isinstance(follower, str):
        follower = Follower(follower, policy, tokenizer)
    follower.policy = policy
    return follower.follow(rollouts)
