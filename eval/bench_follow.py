"""A GRPO run of TRL in which the policy moves: the stale head, the one that follows, and n-grams on fresh rollouts.

    python eval/bench_follow.py --drafter runs/quickstart/drafter --output follow.json

TRL trains the target in float32 to answer in another style (`--reward`), with rollouts by our decoder (`FollowPolicy`). Before
the first step and after every `--every` steps the policy answers held-out prompts, sampled as in training, with each side; a
seed gives the same text with any of them. Seconds are CPU time of the process, wall time beside it.

    none, stale, followed, ngram    our decoder, with a packed copy of the policy; the time to make it is noted apart
    transformers                    the policy's own generate, as TRL calls it
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from drafttrain import Follower, generate, load_drafter
from drafttrain.data.chat import prompt_ids
from drafttrain.environment import describe_environment
from drafttrain.files import write_json
from drafttrain.target.borrowed import decoding
from drafttrain.target.fetch import resolve_target
from drafttrain.trl_callback import FollowPolicy

PROMPTS = json.loads(Path(__file__).with_name("adapt_prompts.json").read_text())["general"]
HELD_OUT = 2  # forms of prompts that only measure


def capitals(text: str) -> float:
    """Share of letters that are capitals."""
    letters = [letter for letter in text if letter.isalpha()]
    return sum(letter.isupper() for letter in letters) / max(len(letters), 1)


def lists(text: str) -> float:
    """Share of lines that are items of a list."""
    lines = [line for line in text.splitlines() if line.strip()]
    return sum(line.startswith("- ") for line in lines) / max(len(lines), 1)


def short(text: str) -> float:
    """Words are short: minus their mean length."""
    words = text.split()
    return -sum(map(len, words)) / max(len(words), 1)


REWARDS = {"capitals": capitals, "lists": lists, "short": short}


class Clock:
    """CPU and wall seconds of a block."""

    def __enter__(self) -> Clock:
        self.begun = (time.process_time(), time.perf_counter())
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu = round(time.process_time() - self.begun[0], 2)
        self.wall = round(time.perf_counter() - self.begun[1], 2)


class Measure(TrainerCallback):
    """Fresh rollouts with every side, every few steps."""

    def __init__(self, args, model, tokenizer, following):
        self.args = args
        self.model = model
        self.first = copy.deepcopy(model) if not args.lora else None
        self.tokenizer = tokenizer
        self.following = following
        self.stale = Follower(args.drafter, model, tokenizer)
        forms = PROMPTS["forms"][:HELD_OUT]
        subjects = PROMPTS["subjects"]
        texts = [form.format(subject) for form in forms for subject in subjects]
        self.prompts = [ids_of(tokenizer, text) for text in texts[:: len(texts) // args.prompts]]
        self.prompts = self.prompts[: args.prompts]
        self.points: list[dict] = []
        self.follows: list[float] = []

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self.args.every == 0:
            self.measure(state.global_step)

    def measure(self, step: int) -> None:
        point: dict = {"step": step, "sides": {}}
        with Clock() as copying:
            context = decoding(self.model, self.tokenizer)
            target = context.__enter__()
        point["copy_cpu_seconds"] = copying.cpu
        sides = {
            "none": None,
            "stale": self.stale.drafting(target),
            "followed": self.following.follower.drafting(target),
            "ngram": load_drafter("ngram", target),
        }
        first = None
        for name, drafter in sides.items():
            with Clock() as clock:
                made = generate(
                    target, self.prompts, drafter, tree=self.args.tree, temperature=self.args.temperature,
                    max_new_tokens=self.args.max_new_tokens, seed=100 * step, batch_size=len(self.prompts),
                )  # fmt: skip
            answers = [each.tokens for each in made]
            first = first or answers
            passes = sum(each.stats.target_passes for each in made)
            tokens = sum(map(len, answers))
            point["sides"][name] = {
                "accepted_length": round((tokens - len(answers)) / passes, 4),
                "cpu_seconds": clock.cpu,
                "wall_seconds": clock.wall,
                "same_text": answers == first,
            }
        context.__exit__(None, None, None)
        if step in (0, self.args.steps):
            point["sides"]["transformers"] = self.own_generate()
        texts = self.tokenizer.batch_decode(first, skip_special_tokens=True)
        reward = [REWARDS[self.args.reward](text) for text in texts]
        point["reward"] = round(sum(reward) / len(reward), 4)
        point["tokens"] = sum(map(len, first))
        point["nats_from_first"] = round(self.moved(first), 4)
        self.points.append(point)
        print(json.dumps(point), texts[0][:120], flush=True)
        self.write()

    @torch.no_grad()
    def own_generate(self) -> dict:
        """Seconds of transformers' generate with the policy as it is."""
        padded = self.tokenizer.pad(
            {"input_ids": self.prompts}, padding_side="left", return_tensors="pt"
        )
        with Clock() as clock:
            self.model.eval().generate(
                **padded, do_sample=True, temperature=self.args.temperature, top_k=0, max_new_tokens=self.args.max_new_tokens
            )  # fmt: skip
        self.model.train()
        return {"cpu_seconds": clock.cpu, "wall_seconds": clock.wall}

    @torch.no_grad()
    def moved(self, answers: list[list[int]]) -> float:
        """Mean log-probability of the policy's tokens, minus that of the first policy, per token."""
        rows = list(zip(self.prompts, answers, strict=True))
        now = [self.logprobs(self.model, *row) for row in rows]
        if self.first is None:
            with self.model.disable_adapter():
                before = [self.logprobs(self.model, *row) for row in rows]
        else:
            before = [self.logprobs(self.first, *row) for row in rows]
        return float((torch.cat(now) - torch.cat(before)).mean())

    def logprobs(self, model, prompt: list[int], answer: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt + answer])
        places = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
        logits = model(ids, use_cache=False).logits[0, places].float() / self.args.temperature
        return logits.log_softmax(-1)[range(len(answer)), answer]

    def write(self) -> None:
        last = self.points[-1]["sides"]
        write_json(
            self.args.output,
            {
                **describe_environment(self.model.device),
                "trl": importlib.metadata.version("trl"),
                "command": [
                    "python",
                    "eval/bench_follow.py",
                    *[
                        word if word != str(self.args.output) else self.args.output.name
                        for word in sys.argv[1:]
                    ],
                ],
                "target": self.args.target,
                "settings": {
                    name: value
                    for name, value in vars(self.args).items()
                    if name not in ("output", "drafter", "target")
                },
                "ratio": last["followed"]["accepted_length"] / last["stale"]["accepted_length"],
                "goal": 1.0,
                "follow_cpu_seconds": self.follows,
                "sides": {str(point["step"]): point for point in self.points},
            },
        )


class Timed(FollowPolicy):
    """Notes the CPU seconds of following."""

    follows: list[float]

    def on_step_end(self, args, state, control, **given):
        with Clock() as clock:
            super().on_step_end(args, state, control, **given)
        self.follows.append(clock.cpu)


def training_texts() -> list[str]:
    forms = PROMPTS["forms"][HELD_OUT:]
    return [form.format(subject) for form in forms for subject in PROMPTS["subjects"]]


def ids_of(tokenizer, text: str) -> list[int]:
    return prompt_ids(tokenizer, [{"role": "user", "content": text}])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--reward", choices=sorted(REWARDS), default="capitals")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=4, help="steps between measurements")
    parser.add_argument("--generations", type=int, default=4, help="answers per prompt")
    parser.add_argument("--batch", type=int, default=8, help="answers per step")
    parser.add_argument("--prompts", type=int, default=8, help="of a measurement")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="of the policy")
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter; 0 trains all")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tree", default="chain:3")
    parser.add_argument("--follow-steps", type=int, default=4)
    parser.add_argument("--follow-rate", type=float, default=2e-5)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run(args, scratch)


def run(args: argparse.Namespace, scratch: str) -> None:
    """Trains and measures."""
    from trl import GRPOConfig, GRPOTrainer

    where = resolve_target(args.target)
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(where)
    if args.lora:
        adapter = LoraConfig(r=args.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter)
    follower = Follower(
        args.drafter, model, tokenizer, steps=args.follow_steps, rate=args.follow_rate
    )
    following = Timed(follower, tree=args.tree)
    measure = Measure(args, model, tokenizer, following)
    following.follows = measure.follows

    def reward(completions, **_):
        return [REWARDS[args.reward](each[0]["content"]) for each in completions]

    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": text}]} for text in training_texts()]
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=data,
        processing_class=tokenizer,
        rollout_func=following.rollouts,
        callbacks=[following, measure],
        args=GRPOConfig(
            output_dir=f"{scratch}/grpo", use_cpu=True, bf16=False, report_to="none", save_strategy="no", beta=0.0,
            per_device_train_batch_size=args.batch, num_generations=args.generations, temperature=args.temperature,
            max_completion_length=args.max_new_tokens, learning_rate=args.learning_rate, max_steps=args.steps,
            lr_scheduler_type="constant", gradient_checkpointing=False, logging_steps=1,
        ),
    )  # fmt: skip
    measure.measure(0)
    trainer.train()


if __name__ == "__main__":
    main()
