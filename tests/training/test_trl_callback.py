"""The callback of GRPO trainers: rollouts of the policy, and a drafter that follows it."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerControl, TrainerState

from drafttrain import Follower, Target, generate
from drafttrain.errors import UserError
from drafttrain.trl_callback import FollowPolicy
from tests.conftest import make_target

PROMPTS = ["abc", [{"role": "user", "content": "hi"}]]


def trainer_of(output, **changed):
    """What the callback reads of a GRPOTrainer."""
    args = SimpleNamespace(
        output_dir=str(output),
        seed=7,
        world_size=1,
        process_index=0,
        max_completion_length=12,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=None,
        repetition_penalty=1.0,
        generation_kwargs=None,
        chat_template_kwargs=None,
    )
    vars(args).update(changed)
    return SimpleNamespace(args=args, tools=[])


def adapted():
    """A policy with an adapter that changes its tokens."""
    policy = get_peft_model(make_target().model, LoraConfig(target_modules=["v_proj"], r=2))
    torch.manual_seed(1)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data += 0.5
    return policy.train()


def test_rollouts_are_the_policys_and_the_drafter_follows(head_folder, tmp_path):
    policy = adapted()
    tokenizer = make_target().tokenizer
    sent = []
    follower = Follower(str(head_folder), policy, tokenizer, steps=2)
    following = FollowPolicy(follower, every=2, send=sent.append, tree="chain:2")
    trainer = trainer_of(tmp_path)
    state = TrainerState(global_step=1)
    event = (trainer.args, state, TrainerControl())
    following.on_train_begin(*event, model=policy)

    made = following.rollouts(PROMPTS, trainer)
    merged = Target.wrap(copy.deepcopy(policy).merge_and_unload(), tokenizer)
    plain = generate(merged, made["prompt_ids"], None, max_new_tokens=12, temperature=1.0, seed=7)
    assert made["completion_ids"] == [each.tokens for each in plain]
    assert made["logprobs"] is None and following.accepted_length >= 1
    # A resumed trainer reads its state from a checkpoint: no seed occurs twice.
    state.save_to_json(str(tmp_path / "state.json"))
    resumed = FollowPolicy(Follower(str(head_folder), policy, tokenizer), tree="chain:2")
    kept = TrainerState.load_from_json(str(tmp_path / "state.json"))
    resumed.on_train_begin(trainer.args, kept, TrainerControl(), model=policy)
    later = resumed.rollouts(PROMPTS, trainer)["completion_ids"]
    assert later == following.rollouts(PROMPTS, trainer)["completion_ids"]
    assert later != made["completion_ids"]
    following.on_step_end(*event)
    assert not sent
    state.global_step = 2
    following.on_step_end(*event)
    assert len(sent) == 1 and follower.taken == 2
    following.on_save(*event)
    saved = tmp_path / "checkpoint-2" / "drafter"
    assert Follower(str(saved), policy, tokenizer).taken == 2


def test_completions_of_the_trainer_are_followed(head_folder, tmp_path):
    target = make_target()
    follower = Follower(str(head_folder), target.model, target.tokenizer, steps=1)
    following = FollowPolicy(follower)
    target.tokenizer.chat_template += "{{ tone }}"
    args = trainer_of(tmp_path, chat_template_kwargs={"tone": "q"}).args
    event = (args, TrainerState(global_step=1), TrainerControl())
    following.on_train_begin(*event, model=target.model)
    with pytest.raises(UserError, match="has no rollouts"):
        following.on_step_end(*event)
    following.watch(prompts=PROMPTS[1:], completion_ids=[[7]])
    (tokens, start), *_ = following.last
    assert target.tokenizer.decode(tokens[:start]).endswith("q")  # as the trainer has rendered it
    rewards = following.watch(prompts=PROMPTS, completions=["", ""], completion_ids=[[5, 6], [7]])
    assert rewards == [None, None]
    following.on_step_end(*event)
    assert follower.taken == 1
    assert following.last[0] == ([*target.tokenizer("abc")["input_ids"], 5, 6], 3)


def test_what_cannot_be_decoded_is_refused(head_folder, tmp_path):
    target = make_target()
    following = FollowPolicy(Follower(str(head_folder), target.model, target.tokenizer))
    trainer = trainer_of(tmp_path)
    image = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(UserError, match="images are not followed"):
        following.rollouts([image], trainer)
    with pytest.raises(UserError, match="num_beams"):
        following.rollouts(PROMPTS, trainer_of(tmp_path, generation_kwargs={"num_beams": 4}))
    trainer.tools = [print]
    with pytest.raises(UserError, match="tools are called"):
        following.rollouts(PROMPTS, trainer)
