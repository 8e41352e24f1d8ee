"""The inference engines: how each drafts with an export here, and what serves it.

Every engine answers the same prompts, greedily, with a chain of the same length, as our decoder
does. The accepted length of both is the number of tokens committed per target pass after the
prefill, bonus token included.

Sources of the commands: vLLM docs/features/spec_decode, SGLang
docs/advanced_features/speculative_decoding, TensorRT-LLM docs/features/speculative-decoding and
triton_backend/all_models/llmapi, llama.cpp tools/server (`llama-server --help`).
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
from types import MappingProxyType
from typing import NamedTuple

import torch
from transformers import AutoModel, AutoTokenizer, GenerationConfig
from transformers import __version__ as transformers_release

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.shipping import (
    GGUF_NAME,
    TARGET_OVERRIDES,
    TOKENIZERS,
    Trained,
    shipping,
)
from drafttrain.errors import UserError
from drafttrain.export.batch_schedule import Entry, sglang_config, vllm_keys
from drafttrain.files import Json, scratch_folder
from drafttrain.formats.engines import ENGINES
from drafttrain.formats.weights import dtype_name
from drafttrain.formats.write_gguf import write_gguf
from drafttrain.images import Picture
from drafttrain.inference import generate
from drafttrain.target import Target, resolve_dtype
from drafttrain.target.generation import LogitsRules
from drafttrain.target.loading import check_loaded, load_language_model, loading
from drafttrain.target.sight import ImagePrompt
from drafttrain.texts import fill_template

SIDES = Path(__file__).with_name("engines")  # scripts for the engines' own environments
# The line that ends a traceback.
_EXCEPTION = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b")
# Probability below which llama.cpp's draft ends, as its drafts of language models long had it.
_P_MIN = 0.75
_ENGINE_SHARE = 0.9  # of the GPU's free memory that an engine fills, vLLM's default
_TIMEOUT = 3600  # seconds; vLLM alone takes minutes to start on a CPU


class SeenPrompt(NamedTuple):
    """A prompt with images."""

    prompt: ImagePrompt  # as our decoder reads it
    pictures: Sequence[Picture]


class EngineJob(NamedTuple):
    """What our decoder and every engine do with a drafter."""

    trained: Trained
    target: Target  # loaded here
    target_name: str
    dtype: str  # of the target and of what is exported
    prompts: list[list[int]]  # token ids
    tokens: int  # new ones per prompt at most
    depth: int  # drafted tokens per round
    scratch: Path  # folder for what an engine needs besides the export
    # Prompts with images by their number; `prompts` has their ids too.
    seen: Mapping[int, SeenPrompt] = MappingProxyType({})

    @property
    def longest_prompt(self) -> int:
        return max(len(prompt) for prompt in self.prompts)


class Serving(NamedTuple):
    """What a serving command names."""

    target: str  # Hub ids or folders
    drafter: str
    tree: TreeSpec
    options: Mapping[str, object]  # of the engine, see `Shipping.options`
    schedule: list[Entry] | None = None  # draft lengths by batch size, if the drafts follow them
    swap_root: str = ""  # folder whose heads the server may swap in

    def over(self, defaults: Mapping[str, object]) -> Json:
        """The kind's options over an engine's defaults; None drops a key."""
        every = {**defaults, **self.options, TARGET_OVERRIDES: None, TOKENIZERS: None}
        return {key: value for key, value in every.items() if value is not None}


def ours(job: EngineJob, drafter: Drafter | None) -> Json:
    """Runs our decoder.

    Returns:
        accepted_length: tokens committed per target pass after the prefill, bonus included; tokens.
    """
    spec = TreeSpec.parse(f"chain:{job.depth}")
    target = job.target.pack()
    if drafter is not None:
        drafter.uses_text = False  # engines draft the kept tokens alone
    # Engines take the argmax of the logits, whatever the target's generation_config says.
    raw = LogitsRules()
    tokens = []
    passes = 0
    for number, ids in enumerate(job.prompts):
        prompt = job.seen[number].prompt if number in job.seen else ids
        made = generate(target, drafter, prompt, max_new_tokens=job.tokens, spec=spec, rules=raw)
        tokens.append(made.tokens)
        passes += made.stats.target_passes
    return {"accepted_length": _accepted_length(tokens, passes), "tokens": tokens}


def _accepted_length(tokens: Sequence[Sequence[int]], rounds: int) -> float:
    """Tokens that a round commits: all of the answers, but for the first of each, a prefill's."""
    committed = sum(len(made) - 1 for made in tokens)
    return round(committed / max(rounds, 1), 4)


class ServingEngine:
    """An inference engine: its answers to a job, and the command that serves a drafter.

    Attributes:
        name: in ENGINES, which holds its release and the form of its files.
        template: of its command, a file in templates/.
        draws_trees: whether it drafts dynamic trees; others draft chains.
        sees: whether `run` takes prompts with images.
    """

    name: str
    template: str
    draws_trees = False
    sees = False

    def run(self, job: EngineJob, exported: Path, python: str) -> Json:
        """Answers a job with an exported drafter.

        Args:
            python: interpreter of the engine's environment.

        Returns:
            version, rounds, accepted_length, tokens, and what else the engine reports.
        """
        raise NotImplementedError(f"drafttrain does not start {self.name}")

    def command(self, serving: Serving) -> str:
        """What to type to serve a drafter."""
        return fill_template(
            f"export/templates/{self.template}",
            engine=self,
            serving=serving,
            settings=self.settings(serving),
        )

    def settings(self, serving: Serving) -> Json:
        """What makes the engine draft, by the names of its own settings or flags."""
        return serving.over({})

    def flags(self, serving: Serving) -> list[str]:
        """The part of the command that makes the engine draft."""
        raise NotImplementedError(f"drafttrain does not serve with {self.name}")

    def follows(self, options: Mapping[str, object]) -> bool:
        """Whether drafts of a kind with these options can follow the batch size."""
        return False


class Vllm(ServingEngine):
    """vLLM; its counters give the accepted length."""

    name = "vLLM"
    template = "vllm.jinja"
    sees = True

    def run(self, job: EngineJob, exported: Path, python: str) -> Json:
        options = dict(shipping(job.trained.kind).options(job.trained)[self.name])
        overrides = options.pop(TARGET_OVERRIDES, None)
        described = {
            "target": job.target.path,
            "hf_overrides": overrides,
            "dtype": job.dtype,
            **self._prompts(job),
            "tokens": job.tokens,
            "steps": True,
            "warm_up": False,
            "max_model_len": job.longest_prompt + job.tokens + 32,
            "speculative": {
                "model": str(exported),
                "num_speculative_tokens": job.depth,
                **options,
            },
            "ignore_eos": False,
        }
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            **os.environ,
        }
        # vLLM loads the target again, and asks for most of the GPU.
        with job.target.off_gpu() as free:
            if free is not None:
                described["memory"] = {"gpu_memory_utilization": round(_ENGINE_SHARE * free, 3)}
            answer = run_side(python, SIDES / "vllm_side.py", described, environment)
        del answer["runs"]  # texts are compared here, not speed
        prompts = answer.pop("read", [])
        for number in job.seen:
            read = prompts[number]
            if read != job.prompts[number]:
                raise UserError(
                    f"vLLM {answer['version']} reads prompt {number} as {len(read)} tokens, the target here as "
                    f"{len(job.prompts[number])}, which differ; its processor is another one"
                )
        for key, value in answer.pop("counters").items():
            answer[key.removeprefix("vllm:spec_decode_")] = value
        answer["accepted_length"] = _accepted_length(answer["tokens"], answer["rounds"])
        return answer

    @staticmethod
    def _prompts(job: EngineJob) -> Json:
        """Token ids with a marker per image, and files of the images."""
        prompts = list(job.prompts)
        images: list[list[str]] = [[] for _ in prompts]
        for number, seen in job.seen.items():
            sight = job.target.require_sight()
            prompts[number] = sight.marked_ids(prompts[number], seen.pictures)
            for picture in seen.pictures:
                # As pixels, which every engine decodes alike.
                path = job.scratch / f"{picture.digest}.png"
                picture.pixels().save(path)
                images[number].append(str(path))
        return {"prompts": prompts, "images": images}

    def flags(self, serving: Serving) -> list[str]:
        words = []
        if TARGET_OVERRIDES in serving.options:
            words += ["--hf-overrides", json.dumps(serving.options[TARGET_OVERRIDES])]
        words += ["--speculative-config", json.dumps(self.settings(serving))]
        return words

    def settings(self, serving: Serving) -> Json:
        """The content of --speculative-config."""
        chosen = serving.over(
            {
                "method": None,
                "model": serving.drafter,
                "num_speculative_tokens": serving.tree.depth,
            }
        )
        if serving.schedule:
            chosen |= vllm_keys(serving.schedule)
        return chosen

    def follows(self, options: Mapping[str, object]) -> bool:
        return "num_speculative_tokens" not in options


class Sglang(ServingEngine):
    """SGLang, which drafttrain does not start."""

    name = "SGLang"
    template = "sglang.jinja"
    draws_trees = True
    lengths = staticmethod(sglang_config)

    def flags(self, serving: Serving) -> list[str]:
        words = []
        for flag, value in self.settings(serving).items():
            words.append(f"--{flag}")
            if value != "":  # a flag alone
                words.append(str(value))
        return words

    def settings(self, serving: Serving) -> Json:
        """Flags of launch_server."""
        tree = serving.tree
        if serving.schedule:  # for chains only
            longest = max(entry.tokens for entry in serving.schedule)
            tree = TreeSpec.parse(f"chain:{max(1, longest)}")
        top_k = 1
        nodes = tree.depth
        if tree.shape == "dynamic":
            top_k = tree.top_k
            nodes = tree.budget
        chosen = serving.over(
            {
                "speculative-algorithm": None,
                "speculative-draft-model-path": serving.drafter,
                "speculative-num-steps": tree.depth,
                "speculative-eagle-topk": top_k,
                "speculative-num-draft-tokens": nodes + 1,
            }
        )
        if serving.schedule:
            chosen |= {"speculative-adaptive": "", "speculative-adaptive-config": "adaptive.json"}
        return chosen

    def follows(self, options: Mapping[str, object]) -> bool:
        return options.get("speculative-algorithm") in ("EAGLE", "EAGLE3")


class TensorRt(ServingEngine):
    """TensorRT-LLM, also behind Triton; drafttrain does not start it."""

    name = "TensorRT-LLM, Triton"
    template = "tensorrt.jinja"
    draws_trees = True

    def settings(self, serving: Serving) -> Json:
        tree = serving.tree
        defaults: dict[str, object] = {
            "decoding_type": None,
            "max_draft_len": tree.depth,
            "speculative_model": serving.drafter,
        }
        if serving.options.get("decoding_type") == "Eagle3" and tree.shape == "dynamic":
            # Nodes that its rule admits.
            budget = min(max(tree.budget, tree.depth), tree.top_k * tree.depth)
            defaults |= {
                "use_dynamic_tree": "true",
                "dynamic_tree_max_topK": tree.top_k,
                "max_total_draft_tokens": budget,
            }
        return serving.over(defaults)


class LlamaCpp(ServingEngine):
    """llama.cpp's server on two GGUF files.

    It counts drafted and accepted tokens; rounds follow from them.
    """

    name = "llama.cpp"
    template = "llama_cpp.jinja"

    def run(self, job: EngineJob, exported: Path, python: str) -> Json:
        target = job.scratch / "target.gguf"
        if not target.exists():  # drafters of one target share it
            write_gguf(Path(job.target.path), target, dtype_name(resolve_dtype(job.dtype)))
        options = shipping(job.trained.kind).options(job.trained)[self.name]
        described = {
            "target": str(target),
            "draft": str(exported / GGUF_NAME),
            "type": str(options["spec-type"]),
            "exact": job.dtype == "float32",
            "prompts": job.prompts,
            "tokens": job.tokens,
            "depth": job.depth,
            "max_model_len": job.longest_prompt + job.tokens + 2 * job.depth + 32,
            "threads": torch.get_num_threads(),
        }
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        answer = run_side(python, SIDES / "llama_side.py", described, environment)
        rounds = 0
        for made, offered, accepted in zip(
            answer["tokens"],
            answer["offered"],
            answer["accepted"],
            strict=True,
        ):
            # A round commits the accepted tokens and one more, except the last round, if it
            # accepted the end of the text.
            rounds += max(len(made) - 1 - accepted, -(-offered // job.depth))
        length = _accepted_length(answer["tokens"], rounds)
        return {**answer, "rounds": max(rounds, 1), "accepted_length": length}

    def settings(self, serving: Serving) -> Json:
        return serving.over(
            {
                "spec-type": None,
                "spec-draft-model": f"{serving.drafter}/{GGUF_NAME}",
                "spec-draft-n-max": serving.tree.depth,
                "spec-draft-p-min": _P_MIN,
            }
        )


class Transformers(ServingEngine):
    """transformers' assisted generation in this process, on models of its own."""

    name = "transformers"
    template = "transformers.jinja"

    @torch.no_grad()
    def run(self, job: EngineJob, exported: Path, python: str) -> Json:
        target = job.target
        settings = dict(shipping(job.trained.kind).options(job.trained)[self.name])
        # A drafter without head is not a causal language model and reads the target's states.
        reads_states = "speculation_type" in settings
        again = "export again"
        dtype = target.compute_dtype
        place = str(exported)
        model = load_language_model(target.path, repr(target.path), again, dtype=dtype)
        if reads_states:
            with loading(repr(place), again):
                assistant, info = AutoModel.from_pretrained(
                    exported, dtype=dtype, output_loading_info=True
                )
            check_loaded(assistant, info, repr(place), again)
        else:
            assistant = load_language_model(place, repr(place), again, dtype=dtype)
            assistant.generation_config.num_assistant_tokens = job.depth
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
        for each in (model, assistant):
            each.eval().to(target.device)
        end = target.eos_ids or None
        pad = end[0] if end else 0
        model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
        if settings.pop(TOKENIZERS, False):
            settings["tokenizer"] = target.tokenizer
            settings["assistant_tokenizer"] = AutoTokenizer.from_pretrained(exported)

        passes = 0

        def count(*_: object) -> None:
            nonlocal passes
            passes += 1

        handle = model.register_forward_hook(count)
        rounds = 0
        made = []
        for prompt in job.prompts:
            ids = torch.tensor([prompt], device=target.device)  # [1, L] int64
            mask = torch.ones_like(ids)
            out = model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)
            if job.tokens > 1 and out[0, -1].item() not in target.eos_ids:
                # A draft model drafts before the first pass, which then is a round like ours if the
                # first token is known. Other drafters read the states of that pass, so it is a
                # prefill.
                start = ids if reads_states else out
                passes = 0
                out = model.generate(  # [1, L + new]
                    start,
                    assistant_model=assistant,
                    attention_mask=torch.ones_like(start),
                    max_new_tokens=len(prompt) + job.tokens - start.shape[1],
                    do_sample=False,
                    **settings,
                )
                rounds += passes - reads_states
            made.append(out[0, len(prompt) :].tolist())
        handle.remove()
        return {
            "version": transformers_release,
            "rounds": rounds,
            "accepted_length": _accepted_length(made, rounds),
            "tokens": made,
        }


class Mlx(ServingEngine):
    """mlx-dspark, which drafts on Apple's GPUs; on a CPU it runs to be compared with."""

    name = "MLX"
    template = "mlx.jinja"

    def run(self, job: EngineJob, exported: Path, python: str) -> Json:
        described = {
            "target": job.target.path,
            "draft": str(exported),
            **shipping(job.trained.kind).options(job.trained)[self.name],
            "exact": job.dtype == "float32",
            "prompts": job.prompts,
            "tokens": job.tokens,
            "depth": job.depth,
            "ends": sorted(job.target.eos_ids),
        }
        environment = {"HF_HUB_OFFLINE": "1", **os.environ}
        answer = run_side(python, SIDES / "mlx_side.py", described, environment)
        answer["accepted_length"] = _accepted_length(answer["tokens"], answer["rounds"])
        return answer


# In the order of ENGINES, which is that of the recipes.
RUNS: Mapping[str, ServingEngine] = {
    engine.name: engine
    for engine in (Vllm(), Sglang(), TensorRt(), LlamaCpp(), Transformers(), Mlx())
}
assert list(RUNS) == list(ENGINES), "an object per engine"


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
            side = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,
            )
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
            words = _last_words(stderr)
            raise UserError(f"the engine stopped (exit code {side.returncode}): {words}")
        return json.loads(answer.read_text())


def _last_words(stderr: str) -> str:
    """The last exception that a program reported, without its traceback; else its last lines."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    first = max(len(lines) - 12, 0)
    for number, line in enumerate(lines):
        if _EXCEPTION.match(line):
            first = number
    return " | ".join(lines[first:])
