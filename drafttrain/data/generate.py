"""`drafttrain generate`: the target answers prompts, and every token's provenance is stored."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from drafttrain.data.backends import Backend, Limits, LocalBackend, OpenAIBackend, VllmBackend
from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.data.existing import store_existing
from drafttrain.data.store import FeatureWriter, Store, check_space
from drafttrain.environment import __version__
from drafttrain.errors import UserError
from drafttrain.files import write_json
from drafttrain.ops.sampling import SamplingParams
from drafttrain.target import Target, resolve_target

HELP = """let the target answer the prompts: the distillation data

Conversations are regenerated turn by turn; token ids, response ranges and finish reasons go to DIR. Run it again and it
goes on; several processes share the work.

  drafttrain generate --target smollm2-135m --prompts prompts.jsonl --output data --max-new-tokens 256
  accelerate launch --num_processes 8 -m drafttrain.cli generate --target T --prompts P --output DIR
  drafttrain generate --target T --prompts P --output DIR --backend openai --url http://a:8000/v1 --url http://b:8000/v1
  drafttrain generate --target T --prompts chats.jsonl --output DIR --backend existing     # keep the answers in the file
"""

# A prompt has to leave room for this many response tokens.
_LEAST_ROOM = 16
_LINE_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, help="short name, folder or Hub id")
    parser.add_argument("--prompts", required=True, help='JSONL: {"id", "messages": [...]} or {"id", "text"} a line')
    parser.add_argument("--output", required=True, help="folder of the data set")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 = greedy (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1 = off (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="0 = off (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of a response (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a conversation (default: %(default)s)")
    parser.add_argument("--slots", default="auto", help="sequences that run together (default: auto, by free memory)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=0, help="stop after so many response tokens of this process")
    parser.add_argument(
        "--max-minutes", type=float, default=0, help="stop after this time; what runs is cut and so marked"
    )
    parser.add_argument("--features", default="none", help="target states to store: none, default, or 2,15,27")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="local", choices=["local", "openai", "vllm", "existing"])
    parser.add_argument("--url", action="append", default=[], help="server of --backend openai; repeat it for several")
    parser.add_argument("--model", default="", help="name to ask the server for (default: the first it lists)")
    parser.add_argument("--overwrite", action="store_true", help="delete the data set in --output first")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the target")


def run(args: argparse.Namespace) -> int:
    """Generates what is missing and prints a summary.

    Raises:
        UserError: bad prompts, settings that contradict the data set, no disk space, an unreachable server.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p)
    for key in ("max_new_tokens", "max_length"):
        if getattr(args, key) < 1:
            raise UserError(f"{key}={getattr(args, key)} must be at least 1")
    if args.overwrite and world > 1:
        raise UserError(
            "overwrite=True with several processes deletes what the others write; delete the folder yourself"
        )
    if args.features != "none" and args.backend != "local":
        raise UserError(f"features={args.features!r} needs --backend local: only there its states are seen")
    existing = args.backend == "existing"
    conversations = [] if existing else read_prompts(Path(args.prompts).expanduser())
    target = load_target(args)
    layers = parse_layers(args.features, target)
    renderer = ChatRenderer(target)
    settings = {
        "target": target.identity(),
        "sampling": {"max_length": args.max_length}
        if existing
        else {**vars(sampling), **{key: getattr(args, key) for key in ("max_new_tokens", "max_length", "seed")}},
        "backend": args.backend,
        "features": {"layers": list(layers), "dtype": "bfloat16"} if layers else None,
    }
    with Store(args.output, settings, rank, args.overwrite) as store:
        done = store.done_ids()
        mine = [it for it in conversations if it.id not in done and owner(it.id, world) == rank]
        if layers:
            needed = feature_bytes(mine, renderer, args, (len(layers) + 1) * target.hidden_size * 2)
            check_space(store.directory, needed, "features")
        summary: dict[str, Any] = {
            "conversations": 0,
            "response_tokens": 0,
            "seconds": 0.0,
            "tokens_per_second": 0.0,
            "dropped": {},
        }
        prompts = len(conversations)
        if existing:
            summary = store_existing(args, target.tokenizer, store, rank, lambda key: owner(key, world))
            prompts = len(store.done_ids()) + summary["dropped"]["answer_beyond_max_length"]
        elif mine:
            backend = make_backend(args, target, renderer, sampling, layers, len(mine))
            summary = _Job(args, renderer, store, backend, mine).run()
        report(args, store, summary, prompts, world)
    return 0


def owner(key: str, world: int) -> int:
    """The process that a conversation belongs to, whatever the order of the prompts."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") % world


def read_prompts(path: Path) -> list[Conversation]:
    """The prompts file as conversations.

    Raises:
        UserError: no file, a line that is no prompt, a repeated id, or no prompts at all.
    """
    if not path.is_file():
        raise UserError(f"prompts={str(path)!r}: no such file; make one: drafttrain prompts --help")
    conversations: dict[str, Conversation] = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where} is not JSON ({error}); it must hold one JSON object a line") from error
            if not isinstance(row, dict) or "id" not in row:
                raise UserError(f'{where}: needs an "id"; drafttrain prompts --source file writes them')
            conversation = Conversation.from_row(row, where)
            if conversation.id in conversations:
                raise UserError(f"{where}: id={conversation.id!r} occurs twice; ids must be unique")
            conversations[conversation.id] = conversation
    if not conversations:
        raise UserError(f"prompts={str(path)!r} is empty; make some: drafttrain prompts --help")
    return list(conversations.values())


def load_target(args: argparse.Namespace) -> Target:
    """The target; for backends that run it elsewhere without weights (shape, tokenizer and chat template only)."""
    if args.backend == "local":
        target = Target.load(args.target, args.dtype, args.device, args.trust_remote_code)
        target.check_head()
        return target
    where = resolve_target(args.target)
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=args.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=args.trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(
            f"target={args.target!r}: config and tokenizer cannot be loaded ({str(error).strip().splitlines()[0]}); "
            "they are needed to tokenize what the server answers: give a folder or Hub id that holds them"
        ) from error
    # Many targets have none; their config and tokenizer name the end of sequence too.
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(where)
    return Target.wrap(model, tokenizer, args.target, where)


def parse_layers(text: str, target: Target) -> tuple[int, ...]:
    """Reads --features.

    Raises:
        UserError: not 'none', 'default' or distinct layer numbers of the target.
    """
    if text == "none":
        return ()
    if text == "default":
        return target.default_feature_layers
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = (-1,)
    if len(set(layers)) < len(layers) or not all(0 <= layer <= target.num_layers for layer in layers):
        raise UserError(
            f"features={text!r} must be none, default, or distinct layers from 0 to {target.num_layers}, as 2,15,27"
        )
    return layers


def feature_bytes(
    conversations: list[Conversation], renderer: ChatRenderer, args: argparse.Namespace, row_bytes: int
) -> float:
    """About how large the states get: prompts by a sample, responses at their limit or the token budget's."""
    sample = conversations[:: max(1, len(conversations) // 32)]
    if not sample:
        return 0.0
    prompt = sum(len(it.open(renderer)) for it in sample) / len(sample)
    turns = sum(it.total_turns for it in sample) / len(sample)
    response = min(turns * args.max_new_tokens, args.max_length)
    count = len(conversations)
    if args.max_tokens:
        count = min(count, math.ceil(args.max_tokens / response) + 1)
    return count * min(prompt + response, args.max_length) * row_bytes


def make_backend(
    args: argparse.Namespace,
    target: Target,
    renderer: ChatRenderer,
    sampling: SamplingParams,
    layers: tuple[int, ...],
    count: int,
) -> Backend:
    limits = Limits(args.max_new_tokens, args.max_length, args.seed)
    if args.backend == "openai":
        return OpenAIBackend(args.url, args.model, renderer, sampling, limits)
    if args.backend == "vllm":
        return VllmBackend(target.path, args.dtype, renderer, sampling, limits, args.trust_remote_code)
    slots = min(choose_slots(args.slots, target, args.max_length, len(layers)), count)
    return LocalBackend(target, renderer, sampling, limits, slots, layers)


def choose_slots(text: str, target: Target, max_length: int, features: int = 0) -> int:
    """Reads --slots; 'auto' takes 128 (256 on a GPU), or as many as fit half of the free memory at full length.

    Raises:
        UserError: neither 'auto' nor a positive number.
    """
    if text != "auto":
        if not text.isdigit() or int(text) < 1:
            raise UserError(f"slots={text!r} must be auto or a positive number")
        return int(text)
    config = target.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * target.num_layers * heads * width * target.compute_dtype.itemsize
    token += (features + 1) * target.hidden_size * 2 if features else 0
    on_gpu = target.device.type == "cuda"
    if on_gpu:
        free = torch.cuda.mem_get_info(target.device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(256 if on_gpu else 128, int(free / 2 / (token * max_length))))


class _Job:
    """One process's share of the work: feeds the backend, stores what ends, shows progress, minds the budget."""

    def __init__(
        self,
        args: argparse.Namespace,
        renderer: ChatRenderer,
        store: Store,
        backend: Backend,
        conversations: list[Conversation],
    ):
        self.args, self.renderer, self.store, self.backend = args, renderer, store, backend
        self.conversations = conversations
        self.writer = FeatureWriter(store) if args.features != "none" else None
        self.dropped = {"prompt_too_long": 0, "turns_not_reached": 0}
        self.finished = self.tokens = self.responses = self.truncated = 0
        self.start = self.shown = time.perf_counter()
        self.bar = tqdm(total=len(conversations), unit="conv", disable=not sys.stderr.isatty(), dynamic_ncols=True)

    def run(self) -> dict[str, Any]:
        try:
            for conversation, finished in self.backend.run(self._opened(), self._stop):
                self._keep(conversation, finished)
            if self.writer is not None:
                self.writer.flush()
        finally:
            self.bar.close()
        seconds = time.perf_counter() - self.start
        return {
            "conversations": self.finished,
            "response_tokens": self.tokens,
            "seconds": round(seconds, 1),
            "tokens_per_second": round(self.tokens / seconds, 1),
            "dropped": self.dropped,
        }

    def _opened(self) -> Iterator[Conversation]:
        room = min(_LEAST_ROOM, self.args.max_new_tokens)
        for it in self.conversations:
            length = len(it.open(self.renderer))
            if length == 0 or length + room > self.args.max_length:
                self.dropped["prompt_too_long"] += 1
                self.bar.update()
                continue
            yield it

    def _keep(self, it: Conversation, finished: Any) -> None:
        record = it.record()
        if self.writer is not None:
            fed = len(record["tokens"]) - 1
            self.writer.append(record, finished.features[:fed], finished.last_hidden[:fed])
        else:
            self.store.append(record)
        self.finished += 1
        self.responses += len(it.spans)
        self.tokens += sum(end - start for start, end in it.spans)
        self.truncated += it.finish.count("length")
        self.dropped["turns_not_reached"] += it.total_turns - len(it.spans)
        self.bar.update()

    def _stop(self) -> bool:
        """Shows progress; true when the budget of tokens or time is spent."""
        now = time.perf_counter()
        minutes, tokens = self.args.max_minutes, self.backend.new_tokens
        if now - self.shown > (1.0 if not self.bar.disable else _LINE_SECONDS):
            self.shown = now
            self._show(now - self.start, tokens)
        out_of_time = minutes > 0 and now - self.start >= 60 * minutes
        return out_of_time or 0 < self.args.max_tokens <= tokens

    def _show(self, seconds: float, tokens: int) -> None:
        done, total = self.finished + self.dropped["prompt_too_long"], len(self.conversations)
        left = [seconds / share - seconds for share in self._shares(seconds, tokens, done / total) if share > 0]
        remaining = f"{min(left) / 60:.1f} min left" if left else "time left unknown yet"
        rate = f"{tokens / seconds:.0f} tokens/s"
        self.bar.set_postfix_str(f"{rate}, {remaining}")
        if self.bar.disable:
            print(f"generate: {done}/{total} conversations, {tokens} response tokens, {rate}, {remaining}", flush=True)

    def _shares(self, seconds: float, tokens: int, done: float) -> Iterator[float]:
        """How far along each of the limits is."""
        yield done
        if self.args.max_tokens:
            yield tokens / self.args.max_tokens
        if self.args.max_minutes > 0:
            yield seconds / (60 * self.args.max_minutes)


def report(args: argparse.Namespace, store: Store, this_run: dict[str, Any], prompts: int, world: int) -> None:
    """Prints the summary and writes DIR/summary.json: the whole data set, and this process's run."""
    counts = store.finish()
    responses = max(counts["responses"], 1)
    truncated = counts["truncated"] / responses
    summary = {
        "drafttrain": __version__,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "prompts": prompts,
        **counts,
        "truncated_share": round(truncated, 4),
        "mean_response_tokens": round(counts["response_tokens"] / responses, 1),
        "processes": world,
        "this_run": this_run,
    }
    write_json(store.directory / "summary.json", summary)
    dropped = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in this_run["dropped"].items() if count)
    print(
        f"{args.output}: {counts['conversations']} of {prompts} conversations, {counts['response_tokens']} response "
        f"tokens, mean {summary['mean_response_tokens']} a response, {100 * truncated:.1f} % truncated\n"
        f"this run: {this_run['conversations']} conversations, {this_run['response_tokens']} response tokens in "
        f"{this_run['seconds']} s ({this_run['tokens_per_second']} tokens/s)"
        + (f"; dropped: {dropped}" if dropped else ""),
        flush=True,
    )
