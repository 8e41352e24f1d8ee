"""A callback for TRL's GRPOTrainer: a drafter follows the policy, and drafts its rollouts.

    rollouts    `rollout_func`: our decoder answers with the policy, the drafter makes it faster
    watch       or a reward function that rewards nothing: it notes what the trainer generated itself
    step end    the drafter learns from the last rollouts what the policy has become; `send` gets it
    save        checkpoint-N/drafter, from which a `Follower` goes on

TRL is not imported: of its trainer this reads `args` and `tools`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from accelerate.utils import gather_object
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from drafttrain.api import generate
from drafttrain.data.chat import ChatInputs, prompt_ids
from drafttrain.drafters.registry import default_tree
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.target.borrowed import decoding
from drafttrain.training.follower import Followed, Follower, Rollout

if TYPE_CHECKING:
    from torch import nn

_PROMPTS = 32  # decoded together
# Of the trainer's state, which its checkpoints hold: answers so far, by process.
_ANSWERS = "drafttrain_answers"
# Fields of GRPOConfig that `generate` has under the same name.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
Prompts = Sequence[str | list[dict[str, str]]]  # as TRL's data sets have them: texts, or messages


class GrpoTrainer(Protocol):
    """What is read of TRL's GRPOTrainer."""

    args: TrainingArguments
    tools: Sequence[object]


class FollowPolicy(TrainerCallback):
    """Keeps a drafter on the policy of a GRPOTrainer.

        following = FollowPolicy(Follower("runs/quickstart/drafter", model, tokenizer))
        GRPOTrainer(model, ..., callbacks=[following], rollout_func=following.rollouts)

    Several processes train on the rollouts of all of them, so that their drafters stay equal.

    Args:
        follower: of the policy.
        every: optimizer steps between its calls.
        send: called in the first process with what each call made; for servers that draft.
        tree: of rollouts; the drafter's decoding.json, else chain:3, unless given.

    Attributes:
        last: the last rollouts. accepted_length: of those that were decoded here.
    """

    def __init__(
        self,
        follower: Follower,
        every: int = 1,
        send: Callable[[Followed], object] | None = None,
        tree: str | None = None,
    ):
        if isinstance(follower.policy, str) or follower.tokenizer is None:
            raise UserError(
                "FollowPolicy needs a follower of the policy in memory and its tokenizer"
            )
        self.follower = follower
        self.tokenizer = follower.tokenizer
        self.every = every
        self.send = send
        self.tree = tree or default_tree(follower.drafter)
        self.last: list[Rollout] = []
        self.accepted_length = 0.0
        self._state = TrainerState()
        self._kwargs: Json | None = None  # the trainer's, of the chat template

    # -- rollouts ----------------------------------------------------------------------------------

    def rollouts(self, prompts: Prompts, trainer: GrpoTrainer) -> Json:
        """TRL's `rollout_func`: an answer to each prompt, sampled as the trainer's args say.

        Returns:
            prompt_ids, completion_ids; logprobs is None, as for the trainer's own generation.

        Raises:
            UserError: tools, images, or generation_kwargs that decoding here does not have.
        """
        # Their results would have to go into the answers.
        if trainer.tools:
            raise UserError(
                "rollouts: tools are called between turns of the trainer's own generation; leave "
                "rollout_func out, and give following.watch among its reward_funcs"
            )
        args: Json = vars(trainer.args)
        ids = [self._ids(prompt, args.get("chat_template_kwargs")) for prompt in prompts]
        # Answer i samples with seed + i, and no seed occurs twice in a run.
        kept: Json = self._state.stateful_callbacks  # type: ignore[assignment]
        answers = kept.get(_ANSWERS, 0)
        seed = args["seed"] + answers * trainer.args.world_size
        seed += len(ids) * trainer.args.process_index
        kept[_ANSWERS] = answers + len(ids)
        policy: nn.Module = self.follower.policy  # type: ignore[assignment]  # no name
        with decoding(policy, self.tokenizer) as target:
            made = generate(
                target,
                ids,
                self.follower.drafting(target),
                tree=self.tree,
                max_new_tokens=args["max_completion_length"],
                batch_size=_PROMPTS,
                seed=seed,
                eos_token_id=sorted({*target.eos_ids, self.tokenizer.eos_token_id}),
                **{name: args[name] for name in _SAMPLING},
                **(args.get("generation_kwargs") or {}),
            )
        texts = [each.tokens for each in made]
        self._note(ids, texts)
        # Tokens per pass, the bonus token included.
        passes = sum(each.stats.target_passes for each in made)
        # The prompt's pass gives the first token, without a draft.
        drafted = sum(each.stats.new_tokens - 1 for each in made)
        self.accepted_length = drafted / max(passes, 1)
        return {"prompt_ids": ids, "completion_ids": texts, "logprobs": None}

    def watch(
        self,
        prompts: Prompts,
        completion_ids: Sequence[list[int]],
        **_: object,
    ) -> list[None]:
        """A reward function of TRL that rewards nothing and notes what the trainer generated."""
        self._note([self._ids(prompt, self._kwargs) for prompt in prompts], completion_ids)
        return [None] * len(prompts)

    def _ids(self, prompt: str | list[dict[str, str]], kwargs: Json | None) -> list[int]:
        if not isinstance(prompt, str) and any(type(turn["content"]) is not str for turn in prompt):
            raise UserError("prompts: a message's content must be text; images are not followed")
        return prompt_ids(self.tokenizer, prompt, ChatInputs.of({}, kwargs))

    def _note(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        self.last = [
            ([*prompt, *answer], len(prompt))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    # -- events of the trainer ---------------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **given: nn.Module,
    ) -> None:
        """Takes the trainer's policy, which PEFT may have wrapped meanwhile, and its state."""
        self._state = state
        self.follower.policy = given["model"]
        self._kwargs = vars(args).get("chat_template_kwargs")

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: object,
    ) -> None:
        """Follows the policy. Raises UserError: there are no rollouts to follow it on."""
        if state.global_step % self.every:
            return
        if not self.last:
            raise UserError(
                "FollowPolicy has no rollouts; give rollout_func=following.rollouts to the trainer, "
                "or following.watch among its reward_funcs"
            )
        rollouts = self.last
        # All processes take the same steps on the same rows.
        if args.world_size > 1:
            rollouts = gather_object(rollouts)
        followed = self.follower.follow(rollouts)
        if self.send is not None and state.is_world_process_zero:
            self.send(followed)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **_: object,
    ) -> None:
        """Saves the drafter in the trainer's checkpoint."""
        if state.is_world_process_zero:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            self.follower.save(folder / "drafter")
