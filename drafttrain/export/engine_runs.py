"""The same prompts, greedily, with a chain of the same length, in a real engine and in our decoder."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.inference import generate
from drafttrain.target import Target

ENGINES = ("vllm", "transformers", "llama.cpp")
_TIMEOUT = 1800  # seconds; vLLM alone takes minutes to start on a CPU


def ours(target: Target, drafter: Drafter, prompts: Sequence[list[int]], tokens: int, depth: int) -> dict[str, Any]:
    """accepted_length (tokens committed per target pass after the prefill, bonus included) and tokens of our decoder."""
    spec = TreeSpec.parse(f"chain:{depth}")
    made = [generate(target, drafter, ids, max_new_tokens=tokens, spec=spec) for ids in prompts]
    passes = sum(generation.stats.target_passes for generation in made)
    new = sum(generation.stats.new_tokens - 1 for generation in made)
    return {"accepted_length": round(new / max(passes, 1), 4), "tokens": [generation.tokens for generation in made]}


def vllm(
    python: str,
    target: Target,
    options: Mapping[str, Any],
    drafter: Path,
    prompts: Sequence[list[int]],
    tokens: int,
    depth: int,
    dtype: str,
) -> dict[str, Any]:
    """vLLM with the exported drafter; its counters give the accepted length. options: keys of its speculative_config."""
    job = {
        "target": target.path,
        "dtype": dtype,
        "prompts": list(prompts),
        "tokens": tokens,
        "repeats": 1,
        "warm_up": False,
        "max_model_len": max(map(len, prompts)) + tokens + 32,
        "speculative": {"model": str(drafter), "num_speculative_tokens": depth, **options},
        "ignore_eos": False,
    }
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", **os.environ}
    answer = run_side(python, "vllm_side.py", job, environment)
    counters = answer.pop("counters")
    del answer["runs"]  # the comparison is of what is said, not how fast
    rounds = sum(value for key, value in counters.items() if key.endswith("num_drafts"))
    accepted = sum(value for key, value in counters.items() if key.endswith("num_accepted_tokens"))
    return {
        **answer,
        "rounds": rounds,
        "accepted": accepted,
        "accepted_length": round(1 + accepted / max(rounds, 1), 4),
    }


def llama_cpp(
    python: str, target: Path, draft: Path, prompts: Sequence[list[int]], tokens: int, depth: int
) -> dict[str, Any]:
    """llama.cpp's server; target and draft are GGUF files. It counts drafted and accepted tokens, and rounds follow."""
    job = {
        "target": str(target),
        "draft": str(draft),
        "prompts": list(prompts),
        "tokens": tokens,
        "depth": depth,
        "max_model_len": max(map(len, prompts)) + tokens + 2 * depth + 32,
        "threads": torch.get_num_threads(),
    }
    answer = run_side(python, "llama_side.py", job, dict(os.environ))
    rounds = after_prefill = 0
    for made, offered, accepted in zip(answer["tokens"], answer["offered"], answer["accepted"], strict=True):
        # A round commits what it accepts and one token more; the last one does not, if it accepted the end of the text.
        after_prefill += len(made) - 1
        rounds += max(len(made) - 1 - accepted, -(-offered // depth))
    rounds = max(rounds, 1)
    return {**answer, "rounds": rounds, "accepted_length": round(after_prefill / rounds, 4)}


@torch.no_grad()
def transformers(
    target: Target, drafter: Path, prompts: Sequence[list[int]], tokens: int, depth: int
) -> dict[str, Any]:
    """transformers' assisted generation, in this process, on models of its own."""
    model: Any = AutoModelForCausalLM.from_pretrained(target.path, dtype=target.compute_dtype, use_safetensors=True)
    assistant: Any = AutoModelForCausalLM.from_pretrained(drafter, dtype=target.compute_dtype, use_safetensors=True)
    model.to(target.device).eval()
    assistant.to(target.device).eval()
    end = target.eos_ids or None
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end[0] if end else 0)
    assistant.generation_config.num_assistant_tokens = depth
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    handle = model.register_forward_hook(count)
    made = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=target.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, assistant_model=assistant
        )
        made.append(out[0, len(prompt) :].tolist())
    handle.remove()
    # Here the prefill verifies a draft too, so it counts as a round.
    return {"accepted_length": round(sum(map(len, made)) / max(passes, 1), 4), "rounds": passes, "tokens": made}


def run_side(python: str, script: str, job: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Runs a script of hub/engines in another environment and returns its answer.

    Raises:
        UserError: no such interpreter, or the engine failed, with its last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, answer = Path(folder) / "job.json", Path(folder) / "answer.json"
        path.write_text(json.dumps({**job, "answer": str(answer)}))
        command = [python, str(Path(__file__).with_name("engines") / script), str(path)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(
                f"engine-python={python!r} cannot run {script} ({error}); give the engine's interpreter"
            ) from error
        if done.returncode or not answer.is_file():
            lines = [line for line in done.stderr.strip().splitlines() if line.strip()][-12:]
            raise UserError(f"the engine stopped (exit code {done.returncode}): " + "\n  ".join(lines))
        return json.loads(answer.read_text())
