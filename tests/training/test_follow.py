"""Following a policy: the head improves on it, the policy stays as it was, and a run goes on."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from drafttrain import Follower, follow
from drafttrain.drafters.draft_model.model import language_models
from drafttrain.drafters.registry import default_tree, load_trained
from drafttrain.drafters.shipping import find_drafter
from drafttrain.errors import UserError
from drafttrain.export.export_drafter import export
from drafttrain.formats.weights import read_weights
from drafttrain.inference import generate_batch
from drafttrain.target import Target
from drafttrain.training.continued import continued
from tests.conftest import make_target, make_tokenizer
from tests.drafters.draft_models import make_drafter as make_draft_model
from tests.drafters.helpers import make_heads
from tests.files import dump_json

PROMPTS = [[5, 6, 7 + number, 8] for number in range(12)]


def moved(seed: int = 0, by: float = 0.02):
    """A policy whose weights have moved, in training mode, with one frozen weight, and one that has no gradient."""
    policy = make_target().model
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += by * torch.randn_like(weight)
    policy.set_attn_implementation("sdpa")
    policy.requires_grad_(True).train()
    policy.model.norm.weight.requires_grad_(False)
    policy.model.layers[1].eval()
    whole = torch.zeros(2, dtype=torch.uint8)  # as quantized weights are
    policy.lm_head.register_parameter("whole", torch.nn.Parameter(whole, requires_grad=False))
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
        found += [weight.requires_grad, weight.grad, weight.detach().numpy().tobytes()]
    return found


@pytest.mark.thorough
def test_a_followed_head_improves_and_the_policy_is_untouched(head_folder):
    policy = moved()
    follower = Follower(str(head_folder), policy, make_tokenizer(), steps=40, rate=3e-3)
    stale = passes(policy, follower)
    rollouts = rollouts_of(policy)
    before = left(policy)
    made = follower.follow(rollouts)
    assert left(policy) == before
    assert made.steps == follower.taken == 40
    assert sum(made.loss[-5:]) < 0.5 * sum(made.loss[:5])
    assert passes(policy, follower) < 0.8 * stale


def test_the_random_numbers_of_all_gpus_are_as_before(head_folder, monkeypatch):
    follower = Follower(str(head_folder), moved(), make_tokenizer(), steps=1)
    kept: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.random, "fork_rng", lambda gpus: kept.extend(gpus) or nullcontext())
    follower.follow([([5, 6, 7, 8], 1)])
    assert kept == [0, 1]  # the policy may be on another one than the head was


@pytest.mark.thorough
def test_a_head_in_bfloat16_learns_in_float32(head_folder, tmp_path):
    half = load_trained(str(head_folder)).bfloat16()
    half.save_pretrained(tmp_path)
    follower = Follower(str(tmp_path), moved(), make_tokenizer(), steps=4)
    before = {name: weight.clone() for name, weight in follower.head.named_parameters()}
    follower.follow(rollouts_of(follower.policy))
    for name, weight in follower.head.named_parameters():
        assert torch.equal(before[name], dict(half.named_parameters())[name].float())
        if weight.requires_grad:  # its steps are far below the distance of two numbers of bfloat16
            assert (weight != before[name]).float().mean() > 0.5


@pytest.mark.thorough
def test_a_head_is_judged_before_it_learns_and_a_worse_one_goes_back(head_folder):
    policy = moved()
    rollouts = rollouts_of(policy)
    follower = Follower(str(head_folder), policy, make_tokenizer(), steps=40, rate=3e-3, judges=12)
    first = follower.follow(rollouts)
    assert (first.verdict, first.ratio) == ("undecided", None)  # the head that it began with
    second = follower.follow(rollouts)
    assert second.verdict == "better" and second.ratio.low > 1
    proven = {name: value.clone() for name, value in follower._proven.items()}

    with torch.no_grad():
        for weight in follower.head.midlayer.parameters():
            weight.copy_(torch.randn_like(weight))
    moments = follower.training.optimizer
    follower.steps = 1
    follower.training.rate = 0.0
    follower.rate = 0.0
    third = follower.follow(rollouts)
    assert third.verdict == "worse" and third.ratio.high < 1
    assert follower.training.optimizer is not moments
    now = follower.head.state_dict()
    assert all(torch.equal(now[name], proven[name]) for name in proven)
    assert follower.follow(rollouts).verdict == "undecided"  # the same head on both sides


@pytest.mark.thorough
def test_judges_can_be_left_out(head_folder):
    policy = moved()
    follower = Follower(str(head_folder), policy, make_tokenizer(), steps=1, judges=0)
    rollouts = rollouts_of(policy)[:4]
    for _ in range(2):
        assert follower.follow(rollouts).ratio is None


@pytest.mark.thorough
def test_answers_without_a_prompt_train_and_judge(head_folder):
    policy = moved()
    follower = Follower(str(head_folder), policy, make_tokenizer(), steps=1)
    rollouts = [(tokens, 0) for tokens, _ in rollouts_of(policy)]
    assert follower.follow(rollouts).ratio is None
    assert follower.follow(rollouts).ratio.value == pytest.approx(1, abs=0.2)


def test_a_drafter_goes_on_as_it_was_and_is_read_once(tmp_path, monkeypatch):
    target = make_target()
    drafter = make_draft_model(target, loss="js:0.5")
    drafter.config.vocabulary_match = "text"
    drafter.save_pretrained(tmp_path / "drafter")
    read = []
    load = language_models.from_checkpoint
    monkeypatch.setattr(
        language_models, "from_checkpoint", lambda name: read.append(name) or load(name)
    )
    made = continued(target, str(tmp_path / "drafter"))
    assert (made.config.loss, made.config.vocabulary_match) == ("js:0.5", "text")
    assert len(read) == 1


def test_the_tensors_are_those_of_the_export(head_folder, tmp_path):
    policy = moved()
    follower = Follower(str(head_folder), policy, make_tokenizer(), steps=2)
    followed = follow(policy, [("ab", "cdef"), ("ab", "")], follower)
    sent = followed.tensors
    assert followed.tokens == 12  # twice the only answer, with its prompt
    saved = follower.save(tmp_path / "version-1")
    export(find_drafter(str(saved)), "vllm", tmp_path / "export")
    exported = read_weights(tmp_path / "export")
    assert sent.keys() == exported.keys()
    assert all(torch.equal(sent[name], exported[name]) for name in sent)


@pytest.mark.parametrize(("heads", "tuned", "sent"), [(2, "", 2), (5, "chain:4", 4)])
def test_as_many_medusa_heads_are_sent_as_its_export_has(tmp_path, heads, tuned, sent):
    make_heads(make_target(), "medusa", num_heads=heads).save_pretrained(tmp_path)
    if tuned:
        dump_json(tmp_path / "decoding.json", {"tree": "fanout:2,2", "chain": tuned})
    follower = Follower(str(tmp_path), moved(), make_tokenizer())
    found = {name.split(".")[1] for name in follower.tensors() if name.startswith("blocks.")}
    assert len(found) == sent


def test_a_saved_follower_has_the_tuned_tree(head_folder, tmp_path):
    tuned = tmp_path / "tuned"
    shutil.copytree(head_folder, tuned)
    dump_json(tuned / "decoding.json", {"tree": "chain:2"})
    saved = Follower(str(tuned), moved(), make_tokenizer()).save(tmp_path / "saved")
    assert default_tree(str(saved)) == "chain:2"


@pytest.mark.thorough
def test_a_saved_follower_goes_on_to_the_bit(head_folder, tmp_path):
    policy = moved()
    rollouts = rollouts_of(policy)
    whole = Follower(str(head_folder), policy, make_tokenizer(), steps=3, format="")
    whole.follow(rollouts)
    saved = whole.save(tmp_path / "saved")
    resumed = Follower(str(saved), policy, make_tokenizer(), steps=3, format="")
    expected = whole.follow(rollouts).tensors
    found = resumed.follow(rollouts).tensors
    assert resumed.taken == 6
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.thorough
def test_an_adapter_is_followed(head_folder):
    """Its states are the adapted policy's, as merging the adapter shows."""
    policy = get_peft_model(moved(), LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight += 0.3
    policy.train()
    merged = copy.deepcopy(policy).merge_and_unload()
    rollouts = rollouts_of(merged)
    before = left(policy)
    losses = []
    for each in (policy, merged):
        follower = Follower(str(head_folder), each, make_tokenizer(), steps=3)
        losses.append(follower.follow(rollouts).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert left(policy) == before


def test_a_policy_whose_tokens_come_from_elsewhere_is_refused(head_folder):
    prompted = get_peft_model(
        moved(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(UserError, match="outside of its transformers model"):
        Follower(str(head_folder), prompted, make_tokenizer())
    headed = get_peft_model(moved(), LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(UserError, match="embedding or head has an adapter"):
        Follower(str(head_folder), headed, make_tokenizer())
    with pytest.raises(UserError, match="not whole in this process"):
        Follower(str(head_folder), copy.deepcopy(moved()).to("meta"), make_tokenizer())


def test_foreign_policies_and_rollouts_are_refused(head_folder):
    other = make_target(vocab_size=310)
    with pytest.raises(UserError, match="vocab_size=300"):
        Follower(str(head_folder), other.model, other.tokenizer)
    policy = moved()
    before = left(policy)
    follower = Follower(str(head_folder), policy, make_tokenizer())
    with pytest.raises(UserError, match="none of 2 has two tokens of an answer"):
        follower.follow([([5, 6, 7], 3), ([5, 6, 7], 2)])
    with pytest.raises(UserError, match="token ids up to 300"):
        follower.follow([([5, 6, 300, 7], 1)])
    assert left(policy) == before
