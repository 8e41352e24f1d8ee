"""One decoder of bench_peers.py in a process of its own: takes orders, answers with tokens and seconds.

A job names the target's folder, the decoder and the prompts; an order is a line {"prompt": i, "threads": n}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
from transformers import AutoModelForCausalLM

Answer = Callable[[torch.Tensor, int], list[int]]  # prompt [1, n], new tokens at most -> new tokens


def load(target: str):
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def hf_generate(target: str) -> Answer:
    model = load(target)

    def answer(prompt: torch.Tensor, tokens: int) -> list[int]:
        mask = torch.ones_like(prompt)
        made = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=tokens)
        return made[0, prompt.shape[1] :].tolist()

    return answer


def economize(target: str) -> Answer:
    import economize as package
    from economize.techniques.lookup import LookupConfig

    decoding = package.DecodeConfig(cycle_length=6)  # five drafted tokens
    model = package.apply(load(target), LookupConfig(), decoding=decoding)

    def answer(prompt: torch.Tensor, tokens: int) -> list[int]:
        mask = torch.ones_like(prompt)
        made = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=tokens)
        return made[0, prompt.shape[1] :].tolist()

    return answer


def flashspec(target: str) -> Answer:
    from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
    from flashspec.engine import NgramDrafter, TargetModel

    device = torch.device("cpu")
    model = load(target)
    ends = model.generation_config.eos_token_id
    settings = FlashSpecConfig(
        device="cpu",
        drafter_strategy="bandit",  # its name for one drafter alone
        bandit=BanditConfig(n_arms=1),
        sampling=SamplingConfig(temperature=0.0, gamma=5),
    )
    wrapped = TargetModel(target, device, torch.float32, model=model)
    engine = SpeculativeEngine(settings, [NgramDrafter()], wrapped)

    def answer(prompt: torch.Tensor, tokens: int) -> list[int]:
        stops = ends if isinstance(ends, list) else [ends]
        made = engine.generate(prompt, max_new_tokens=tokens, eos_token_ids=stops)
        return made.output_ids[0, : made.n_tokens_generated].tolist()

    return answer


def drafttrain(target: str, drafter: str, tree: str) -> Answer:
    from drafttrain import generate
    from drafttrain.drafters.registry import load_drafter
    from drafttrain.target import Target

    loaded = Target.load(target, "float32", "cpu").pack()
    drafting = load_drafter(drafter, loaded) if drafter else None

    def answer(prompt: torch.Tensor, tokens: int) -> list[int]:
        options = {"tree": tree} if drafter else {}
        made = generate(loaded, prompt[0].tolist(), drafting, max_new_tokens=tokens, **options)
        return made.tokens

    return answer


DECODERS: dict[str, tuple[str, Callable[[str], Answer]]] = {  # by name: its package, how it loads
    "transformers": ("transformers", hf_generate),
    "economize": ("economize", economize),
    "flashspec": ("flashspec", flashspec),
    "plain": ("drafttrain", lambda target: drafttrain(target, "", "")),
    "ngram": ("drafttrain", lambda target: drafttrain(target, "ngram", "chain:5")),
}


def main() -> None:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    package, make = DECODERS[job["decoder"]]
    answer = make(job["target"])
    print(json.dumps({"version": version(package)}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        torch.set_num_threads(order["threads"])
        prompt = torch.tensor([job["prompts"][order["prompt"]]])
        with torch.no_grad():
            begin = time.perf_counter()
            tokens = answer(prompt, job["tokens"])
            seconds = time.perf_counter() - begin
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
