"""Following a policy: the head improves on it, the policy stays as it was, and a run goes on."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from drafttrain import Follower, follow
from drafttrain.drafters.shipping import find_drafter
from drafttrain.errors import UserError
from drafttrain.export.export_drafter import export
from drafttrain.formats.weights import read_weights
from drafttrain.inference import generate_batch
from drafttrain.target import Target
from tests.conftest import make_target, make_tokenizer
from tests.drafters.helpers import make_drafter

PROMPTS = [[5, 6, 7 + number, 8] for number in range(12)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of an untrained drafter."""
    folder = tmp_path_factory.mktemp("follow") / "drafter"
    make_drafter(make_target(), ttt_steps=2).save_pretrained(folder)
    return folder


def moved(seed: int = 0, by: float = 0.02):
    """A policy whose weights have moved, in training mode, with one frozen weight."""
    policy = make_target().model
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += by * torch.randn_like(weight)
    policy.set_attn_implementation("sdpa")
    policy.requires_grad_(True).train()
    policy.model.norm.weight.requires_grad_(False)
    policy.model.layers[1].eval()
    return policy


def rollouts_of(policy, prompts=PROMPTS) -> list[tuple[list[int], int]]:
    """Greedy answers, decoded by a copy."""
    target = Target.wrap(copy.deepcopy(policy), make_tokenizer())
    made = generate_batch(target, None, prompts, max_new_tokens=24)
    return [
        (prompt + answer.tokens, len(prompt)) for prompt, answer in zip(prompts, made, strict=True)
    ]


def passes(policy, follower: Follower) -> int:
    """Target passes of the answers to all prompts with the follower's head."""
    target = Target.wrap(copy.deepcopy(policy), make_tokenizer())
    made = generate_batch(target, follower.drafting(target), PROMPTS, max_new_tokens=24)
    assert [answer.tokens for answer in made] == [
        tokens[start:] for tokens, start in rollouts_of(policy)
    ]
    return sum(answer.stats.target_passes for answer in made)


def left(policy) -> list[object]:
    """All that a call must leave as it is."""
    found: list[object] = [policy.config._attn_implementation, torch.get_rng_state().tolist()]
    for module in policy.modules():
        found += [module.training, len(module._forward_pre_hooks), len(module._forward_hooks)]
    for weight in policy.parameters():
        found += [weight.requires_grad, weight.grad, weight.detach().clone()]
    return found


def same(one: list[object], other: list[object]) -> bool:
    return all(
        torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
        for left, right in zip(one, other, strict=True)
    )


def test_a_followed_head_improves_and_the_policy_is_untouched(place):
    policy = moved()
    before = left(policy)
    follower = Follower(str(place), policy, make_tokenizer(), steps=40, rate=3e-3)
    stale = passes(policy, follower)
    torch.set_rng_state(torch.tensor(before[1], dtype=torch.uint8))
    made = follower.follow(rollouts_of(policy))
    assert same(left(policy), before)
    assert made.steps == follower.taken == 40
    assert sum(made.loss[-5:]) < 0.5 * sum(made.loss[:5])
    assert passes(policy, follower) < 0.8 * stale


def test_the_tensors_are_those_of_the_export(place, tmp_path):
    policy = moved()
    follower = Follower(str(place), policy, make_tokenizer(), steps=2)
    sent = follow(policy, rollouts_of(policy), follower).tensors
    saved = follower.save(tmp_path / "version-1")
    export(find_drafter(str(saved)), "vllm", tmp_path / "export")
    exported = read_weights(tmp_path / "export")
    assert sent.keys() == exported.keys()
    assert all(torch.equal(sent[name], exported[name]) for name in sent)


def test_a_saved_follower_goes_on_to_the_bit(place, tmp_path):
    policy = moved()
    rollouts = rollouts_of(policy)
    whole = Follower(str(place), policy, make_tokenizer(), steps=3, format="")
    whole.follow(rollouts)
    saved = whole.save(tmp_path / "saved")
    resumed = Follower(str(saved), policy, make_tokenizer(), steps=3, format="")
    expected = whole.follow(rollouts).tensors
    found = resumed.follow(rollouts).tensors
    assert resumed.taken == 6
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_texts_are_rollouts(place):
    policy = moved()
    follower = Follower(str(place), policy, make_tokenizer(), steps=1)
    assert follower.follow([("ab", "cdef"), ("ab", "")]).tokens == 6


def test_an_adapter_is_followed(place):
    """Its states are the adapted policy's, so a head that follows it learns from those."""
    base = moved()
    policy = get_peft_model(base, LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
    plain = copy.deepcopy(base)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight += 0.3
    policy.train()
    before = left(policy)
    merged = copy.deepcopy(policy).merge_and_unload()
    rollouts = rollouts_of(merged)
    torch.set_rng_state(torch.tensor(before[1], dtype=torch.uint8))
    losses = []
    for each in (policy, merged, plain):
        follower = Follower(str(place), each, make_tokenizer(), steps=3, rate=0.0)
        losses.append(follower.follow(rollouts).loss)
        if each is policy:
            assert same(left(policy), before)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] != pytest.approx(losses[2], rel=1e-3)


def test_a_policy_whose_tokens_come_from_elsewhere_is_refused(place):
    prompted = get_peft_model(
        moved(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(UserError, match="outside of its transformers model"):
        Follower(str(place), prompted, make_tokenizer())
    headed = get_peft_model(moved(), LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(UserError, match="embedding or head has an adapter"):
        Follower(str(place), headed, make_tokenizer())
    with pytest.raises(UserError, match="not whole in this process"):
        Follower(str(place), copy.deepcopy(moved()).to("meta"), make_tokenizer())
    with pytest.raises(UserError, match="without a transformers model"):
        Follower(str(place), torch.nn.Linear(2, 2), make_tokenizer())


def test_foreign_policies_and_rollouts_are_refused(place):
    other = make_target(vocab_size=310)
    with pytest.raises(UserError, match="vocab_size=300"):
        Follower(str(place), other.model, other.tokenizer)
    policy = moved()
    before = left(policy)
    follower = Follower(str(place), policy, make_tokenizer())
    with pytest.raises(UserError, match="none of 2 has two tokens of an answer"):
        follower.follow([([5, 6, 7], 3), ([5, 6, 7], 2)])
    with pytest.raises(UserError, match="token ids up to 300"):
        follower.follow([([5, 6, 300, 7], 1)])
    with pytest.raises(UserError, match="steps=0"):
        Follower(str(place), policy, make_tokenizer(), steps=0)
    with pytest.raises(UserError, match="format='medusa'"):
        Follower(str(place), policy, make_tokenizer(), format="medusa")
    assert same(left(policy), before)
