"""The same prompts, greedily, with a chain of the same length, in an engine and in our decoder.

The accepted length of both sides is the number of tokens committed per target pass after the
prefill, bonus token included.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModel, AutoTokenizer, GenerationConfig
from transformers import __version__ as transformers_release

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.shipping import TARGET_OVERRIDES, TOKENIZERS
from drafttrain.errors import UserError
from drafttrain.files import Json, scratch_folder
from drafttrain.inference import generate
from drafttrain.target import Target
from drafttrain.target.generation import LogitsRules
from drafttrain.target.loading import check_loaded, load_language_model, loading

SIDES = Path(__file__).with_name("engines")  # scripts for the engines' own environments
_EXCEPTION = re.compile(
    r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b"
)  # the line that ends a traceback
_TIMEOUT = 3600  # seconds; vLLM alone takes minutes to start on a CPU


class EngineJob(NamedTuple):
    """What every engine answers."""

    target: Target  # loaded here
    dtype: str  # name of its numeric format
    prompts: Sequence[list[int]]  # token ids
    tokens: int  # new ones per prompt at most
    depth: int  # drafted tokens per round
    python: str  # interpreter of the engine's environment


def ours(job: EngineJob, drafter: Drafter | None) -> Json:
    """Runs our decoder: accepted_length (tokens committed per target pass after the prefill, bonus
    included), tokens.
    """
    spec = TreeSpec.parse(f"chain:{job.depth}")
    target = job.target.pack()
    if drafter is not None:
        drafter.uses_text = False  # engines draft the kept tokens alone
    raw = (
        LogitsRules()
    )  # the engines take the argmax of the logits, whatever the target's generation_config says
    made = [
        generate(target, drafter, ids, max_new_tokens=job.tokens, spec=spec, rules=raw)
        for ids in job.prompts
    ]
    passes = sum(generation.stats.target_passes for generation in made)
    new = sum(generation.stats.new_tokens - 1 for generation in made)
    return {
        "accepted_length": round(new / max(passes, 1), 4),
        "tokens": [generation.tokens for generation in made],
    }


def vllm(job: EngineJob, drafter: Path, options: Mapping[str, object]) -> Json:
    """Runs vLLM with the exported drafter; its counters give the accepted length. options: of its
    speculative_config.
    """
    speculative = {"model": str(drafter), "num_speculative_tokens": job.depth, **options}
    described = {
        "target": job.target.path,
        "hf_overrides": speculative.pop(TARGET_OVERRIDES, None),
        "dtype": job.dtype,
        "prompts": list(job.prompts),
        "tokens": job.tokens,
        "steps": True,
        "warm_up": False,
        "max_model_len": max(map(len, job.prompts)) + job.tokens + 32,
        "speculative": speculative,
        "ignore_eos": False,
    }
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        **os.environ,
    }
    answer = run_side(job.python, SIDES / "vllm_side.py", described, environment)
    del answer["runs"]  # texts are compared here, not speed
    drafted = {
        key.removeprefix("vllm:spec_decode_"): value
        for key, value in answer.pop("counters").items()
    }
    after_prefill = sum(len(made) - 1 for made in answer["tokens"])
    length = round(after_prefill / max(answer["rounds"], 1), 4)
    return {**answer, **drafted, "accepted_length": length}


def llama_cpp(job: EngineJob, target: Path, draft: Path, kind: str) -> Json:
    """Runs llama.cpp's server on two GGUF files. It counts drafted and accepted tokens; rounds
    follow from them.

    kind: the server's --spec-type.
    """
    described = {
        "target": str(target),
        "draft": str(draft),
        "type": kind,
        "exact": job.dtype == "float32",
        "prompts": list(job.prompts),
        "tokens": job.tokens,
        "depth": job.depth,
        "max_model_len": max(map(len, job.prompts)) + job.tokens + 2 * job.depth + 32,
        "threads": torch.get_num_threads(),
    }
    answer = run_side(
        job.python,
        SIDES / "llama_side.py",
        described,
        {**os.environ, "GGML_NO_BACKTRACE": "1"},
    )
    rounds = after_prefill = 0
    for made, offered, accepted in zip(
        answer["tokens"],
        answer["offered"],
        answer["accepted"],
        strict=True,
    ):
        # A round commits the accepted tokens and one more, except the last round, if it accepted
        # the end of the text.
        after_prefill += len(made) - 1
        rounds += max(len(made) - 1 - accepted, -(-offered // job.depth))
    rounds = max(rounds, 1)
    return {**answer, "rounds": rounds, "accepted_length": round(after_prefill / rounds, 4)}


@torch.no_grad()
def transformers(job: EngineJob, drafter: Path, options: Mapping[str, object]) -> Json:
    """Runs transformers' assisted generation in this process, on models of its own.

    options: arguments of `generate`, see `Shipping.options`.
    """
    target = job.target
    again = "export again"
    reads_states = "speculation_type" in options
    model = load_language_model(
        str(target.path),
        repr(str(target.path)),
        again,
        dtype=target.compute_dtype,
    )
    if reads_states:  # a drafter without head, which is no causal language model
        what = repr(str(drafter))
        with loading(what, again):
            assistant, info = AutoModel.from_pretrained(
                drafter,
                dtype=target.compute_dtype,
                output_loading_info=True,
            )
        check_loaded(assistant, info, what, again)
    else:
        assistant = load_language_model(
            str(drafter),
            repr(str(drafter)),
            again,
            dtype=target.compute_dtype,
        )
        assistant.generation_config.num_assistant_tokens = job.depth
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
    for each in (model, assistant):
        each.eval().to(target.device)
    end = target.eos_ids or None
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end[0] if end else 0)
    settings = dict(options)
    if settings.pop(TOKENIZERS, False):
        settings |= {
            "tokenizer": target.tokenizer,
            "assistant_tokenizer": AutoTokenizer.from_pretrained(drafter),
        }
    passes = 0
    rounds = 0
    made = []

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    handle = model.register_forward_hook(count)
    for prompt in job.prompts:
        ids = torch.tensor([prompt], device=target.device)  # [1, L] int64
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            do_sample=False,
        )  # [1, L + 1]
        if job.tokens > 1 and out[0, -1].item() not in target.eos_ids:
            # A draft model drafts before the first pass, which then is a round like ours if the
            # first token is known. Other drafters read the states of that pass, so it is a prefill.
            start = ids if reads_states else out
            passes = 0
            most = len(prompt) + job.tokens - start.shape[1]
            limits = {
                "attention_mask": torch.ones_like(start),
                "max_new_tokens": most,
                "do_sample": False,
            }
            out = model.generate(start, assistant_model=assistant, **limits, **settings)
            rounds += passes - reads_states
        made.append(out[0, len(prompt) :].tolist())
    handle.remove()
    length = round(sum(len(each) - 1 for each in made) / max(rounds, 1), 4)
    return {
        "version": transformers_release,
        "rounds": rounds,
        "accepted_length": length,
        "tokens": made,
    }


def missing(python: str, package: str) -> str:
    """Why an interpreter cannot run an engine; empty if it has the engine's package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} does not run ({error})"
    if done.returncode:
        return f"no {package} in {python}"
    return ""


def run_side(python: str, script: Path, job: Json, environment: dict[str, str]) -> Json:
    """Runs a script in another environment and returns the JSON file that it writes.

    Raises:
        UserError: no such interpreter, or the engine failed, with the last lines that it wrote.
    """
    with scratch_folder() as folder:
        path = folder / "job.json"
        answer = folder / "answer.json"
        path.write_text(json.dumps({**job, "answer": str(answer)}))
        command = [python, str(script), str(path)]
        try:
            # A group of its own: engines start processes that outlive the script when it is killed.
            side = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                    process_group=0)  # fmt: skip
        except OSError as error:
            fix = "give the engine's interpreter"
            raise UserError(
                f"engine-python={python!r} cannot run {script.name} ({error}); {fix}"
            ) from error
        try:
            _, stderr = side.communicate(timeout=_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"{script.name} was stopped after {_TIMEOUT} s; ask for fewer prompts or tokens"
            ) from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(side.pid, signal.SIGKILL)
            side.wait()
        if side.returncode or not answer.is_file():
            raise UserError(
                f"the engine stopped (exit code {side.returncode}): " + _last_words(stderr)
            )
        return json.loads(answer.read_text())


def _last_words(stderr: str) -> str:
    """The last exception that a program reported, without its traceback; else its last lines."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    found = [number for number, line in enumerate(lines) if _EXCEPTION.match(line)]
    return " | ".join(lines[found[-1] :] if found else lines[-12:])
