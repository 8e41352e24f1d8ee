"""`drafttrain generate`: the target answers prompts; every token is stored with its origin."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from drafttrain.data.backends import Backend, LocalBackend, OpenAIBackend, ResponseSettings
from drafttrain.data.chat import ChatInputs, TemplateRefuses, check_inputs, has_template
from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.data.failures import BadReply, Failures
from drafttrain.data.masks import conversation_records
from drafttrain.data.row_file import RowFile, line_starts
from drafttrain.data.store import FeatureWriter, Share, Store, check_space
from drafttrain.data.vllm_backend import VllmBackend, applied_rules, engine_options, named_options
from drafttrain.environment import __version__
from drafttrain.errors import UserError, shown
from drafttrain.files import Json, read_jsonl, write_json
from drafttrain.flags import load_target, sampling_of
from drafttrain.folders import beside, check_folder, inputs_of
from drafttrain.inference.responses import Finished
from drafttrain.outcome import command_line, conclude, next_command
from drafttrain.progress import Progress, counted
from drafttrain.target import Target, load_shell
from drafttrain.target.generation import LogitsRules

logger = logging.getLogger(__name__)


_TEMPLATE = "chat template"  # the reason of prompts that it does not render
_TEMPLATE_FIX = "change those prompts, or use a target whose chat template reads them"
_ROW = "unusable row"  # the reason of existing answers that cannot be learned from
_ROW_FIX = "mend those rows, or clean the file with: drafttrain prompts --source file"
_LEAST_RESPONSE = 16  # response tokens that a prompt must leave below --max-length


def run(args: argparse.Namespace) -> int:
    """Generates the missing conversations and prints a summary.

    Raises UserError: bad prompts, settings that contradict the data set, no disk space, an
    unreachable server.
    """
    share = Share.of_process()
    sampling = sampling_of(args)
    limits = {key: getattr(args, key) for key in ("max_new_tokens", "max_length", "seed")}
    if args.overwrite and share.world > 1:
        raise UserError(
            "overwrite=True with several processes deletes the others' work; delete the folder yourself"
        )
    if args.features != "none" and args.backend != "local":
        raise UserError(
            f"features={args.features!r} needs --backend local: the other backends return no hidden states"
        )
    if args.backend != "openai" and (args.url or args.model):
        raise UserError(
            f"url and model need --backend openai; --backend {args.backend} asks no server"
        )
    if args.backend != "vllm" and (given := [*named_options(args), *args.vllm_flags]):
        raise UserError(
            f"{given[0]!r} is for --backend vllm; servers get such flags when they start"
        )
    check_folder(args.output, "generate", inputs_of(args))
    existing = args.backend == "existing"
    kwargs = args.chat_template_kwargs
    ids: list[str] = []
    conversations = None
    if not existing:
        ids, conversations = read_prompts(Path(args.prompts).expanduser(), kwargs)
    if args.backend == "local":
        target = load_target(args)
    else:
        target = load_shell(args.target, trust_remote_code=args.trust_remote_code)
    if kwargs:
        if not has_template(target.tokenizer):
            raise UserError(
                f"chat_template_kwargs: target={target.name!r} has no chat template; drop them"
            )
        check_inputs(target.tokenizer.get_chat_template(), ChatInputs((), kwargs))
    layers = parse_layers(args.features, target)
    rules = backend_rules(args.backend, target)
    settings = ResponseSettings(ChatRenderer(target), sampling, **limits)
    meta = {
        "target": target.identity(),
        "sampling": {"max_length": args.max_length}
        if existing
        else {**rules.recorded(sampling), **limits},
        "backend": args.backend,
        "features": {"layers": list(layers), "dtype": "bfloat16"} if layers else None,
        **({"chat_template_kwargs": kwargs} if kwargs else {}),
    }
    with Store(args.output, meta, share.rank, args.overwrite) as store:
        done = store.done_ids()
        this_run = run_counts(0, 0, 0.0, {})
        missing = [i for i, key in enumerate(ids) if key not in done and share.owns(key)]
        mine = conversations.chosen(missing) if conversations is not None else []
        if layers:
            needed = feature_bytes(mine, args, settings, (len(layers) + 1) * target.hidden_size * 2)
            check_space(store.directory, needed, "features")
        if existing:
            this_run = store_existing(args, target, store, share)
        elif mine:
            backend = make_backend(args, target, settings, layers, len(mine))
            this_run = generate_missing(args, settings, store, backend, mine)
        report(args, store, this_run, None if existing else len(ids), share)
    return 0


def backend_rules(backend: str, target: Target) -> LogitsRules:
    """What a backend applies of the target's generation_config: all rules, those that vLLM takes,
    or what a server does.
    """
    if backend in ("openai", "existing"):
        return LogitsRules()
    rules = target.generation.rules
    if backend == "local":
        return rules
    applied = applied_rules(rules)
    if left := ", ".join(key for key in rules.settings if key not in applied.settings):
        logger.warning(
            "backend=vllm does not apply %s of the target's generation_config; --backend local does",
            left,
        )
    return applied


def read_prompts(path: Path, kwargs: Json | None = None) -> tuple[list[str], RowFile[Conversation]]:
    """Checks a prompts file; returns the ids in order, and the conversations, which stay on disk.

    kwargs: chat_template_kwargs for rows that do not set them.

    Raises UserError: no file, a line that is no prompt, a repeated id, or no prompts at all.
    """
    if not path.is_file():
        raise UserError(f"prompts={str(path)!r}: no such file; make one: drafttrain prompts --help")
    seen: dict[str, None] = {}

    def places() -> Iterator[tuple[int, int]]:
        for (number, start), (_, row) in zip(line_starts(path), read_jsonl(path), strict=True):
            where = f"{path} line {number}"
            if "id" not in row:
                raise UserError(
                    f'{where}: needs an "id"; drafttrain prompts --source file writes them'
                )
            key = Conversation.from_row(row, where).id
            if key in seen:
                raise UserError(f"{where}: id={key!r} occurs twice; ids must be unique")
            seen[key] = None
            yield number, start

    conversations = RowFile(path, partial(Conversation.from_row, kwargs=kwargs), places())
    if not seen:
        raise UserError(f"prompts={str(path)!r} is empty; make some: drafttrain prompts --help")
    return list(seen), conversations


def parse_layers(text: str, target: Target) -> tuple[int, ...]:
    """Reads --features; wide: the default three, those halfway between them, and the input of the
    last layer.

    Raises UserError: not 'none', 'default', 'wide' or distinct layer numbers of the target.
    """
    if text == "none":
        return ()
    if text == "default":
        return target.default_feature_layers
    if text == "wide":
        usual = target.default_feature_layers
        halfway = ((low + high + 1) // 2 for low, high in itertools.pairwise(usual))
        return tuple(sorted({*usual, *halfway, target.num_layers - 1}))
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = (-1,)  # fails the check below
    if len(set(layers)) < len(layers) or not all(
        0 <= layer <= target.num_layers for layer in layers
    ):
        raise UserError(
            f"features={shown(text)} must be none, default, wide, or distinct layers from 0 to {target.num_layers}, as 2,15,27"
        )
    return layers


def feature_bytes(
    conversations: Sequence[Conversation],
    args: argparse.Namespace,
    settings: ResponseSettings,
    row_bytes: int,
) -> float:
    """Estimated size of the stored states: prompt lengths from a sample, responses at their limit
    or the token budget.
    """
    sample = conversations[:: max(1, len(conversations) // 32)]  # 32 to 63 of them
    lengths = []
    for it in sample:
        with contextlib.suppress(TemplateRefuses):
            lengths.append(len(it.open(settings.renderer)))
    if not lengths:
        return 0.0
    prompt = sum(lengths) / len(lengths)
    turns = sum(it.total_turns for it in sample) / len(sample)
    response = min(turns * settings.max_new_tokens, settings.max_length)
    count = len(conversations)
    if args.max_tokens:
        count = min(count, math.ceil(args.max_tokens / response) + 1)
    return count * min(prompt + response, settings.max_length) * row_bytes


def make_backend(
    args: argparse.Namespace,
    target: Target,
    settings: ResponseSettings,
    layers: tuple[int, ...],
    count: int,
) -> Backend:
    """The backend of --backend. count: conversations to answer, which bounds the slots."""
    given = None if args.slots == "auto" else args.slots
    if args.backend == "openai":
        return OpenAIBackend(args.url, args.model, settings, given)
    if args.backend == "vllm":
        return VllmBackend(
            target,
            args.dtype,
            settings,
            args.trust_remote_code,
            engine_options(args),
            given,
        )
    slots = min(choose_slots(args.slots, target, settings.max_length, len(layers)), count)
    return LocalBackend(target, settings, slots, layers)


def choose_slots(slots: int | str, target: Target, max_length: int, features: int = 0) -> int:
    """The value of --slots. 'auto' is 128 (256 on a GPU), or fewer if they would fill more than
    half of the free memory.
    """
    if isinstance(slots, int):
        return slots
    config = target.config
    every = (
        getattr(config, "num_attention_heads", None) or 1
    )  # Mamba has none, and a state of about this size
    heads = getattr(config, "num_key_value_heads", None) or every
    width = getattr(config, "head_dim", None) or config.hidden_size // every
    # a CPU's cache is float32
    itemsize = 4
    if target.device.type != "cpu":
        itemsize = target.compute_dtype.itemsize
    token = 2 * target.num_layers * heads * width * itemsize  # bytes per token: keys and values
    # captured states in bfloat16
    if features:
        token += (features + 1) * target.hidden_size * 2
    else:
        token += 0
    if target.device.type == "cuda":
        most = 256
        free = torch.cuda.mem_get_info(target.device)[0]
    else:
        most = 128
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(most, int(free / 2 / (token * max_length))))


class RowKeeper:
    """Stores the rows of conversations, those of one together, so that it is stored with all of its
    turns or not at all.

    Attributes:
        held: rows of conversations that go on. conversations: stored ones.
    """

    def __init__(self, store: Store, writer: FeatureWriter | None):
        self.store = store
        self.writer = writer
        self.conversations = 0
        self.held: dict[str, list[tuple[Json, Finished | None]]] = {}

    def add(self, it: Conversation, record: Json, finished: Finished | None) -> None:
        """Adds a conversation's next row. finished: with its states, if they are stored."""
        self.held.setdefault(it.id, []).append((record, finished))
        if not it.follows:
            self._store(self.held.pop(it.id))

    def end(self) -> None:
        """Stores conversations that the budget has ended between two rows."""
        for key, rows in self.held.items():
            rows[-1][0].update(id=key)
            del rows[-1][0]["part"]
            self._store(rows)

    def _store(self, rows: Sequence[tuple[Json, Finished | None]]) -> None:
        for record, finished in rows:
            if self.writer is None:
                self.store.append(record)
            else:
                assert (
                    finished is not None
                    and finished.features is not None
                    and finished.last_hidden is not None
                )
                fed = len(record["tokens"]) - 1  # the last token was never an input
                self.writer.append(record, finished.features[:fed], finished.last_hidden[:fed])
        self.conversations += 1


def generate_missing(
    args: argparse.Namespace,
    settings: ResponseSettings,
    store: Store,
    backend: Backend,
    todo: Sequence[Conversation],
) -> Json:
    """Answers the conversations and stores each when it ends, until the budget is spent; returns
    the run's counts.
    """
    if args.features != "none":
        writer = FeatureWriter(store)
    else:
        writer = None
    dropped = dict.fromkeys(
        ("prompt_too_long", "turns_not_reached", "other_tool_calls", "template_refuses_answer"), 0
    )
    rows = RowKeeper(store, writer)
    least = min(_LEAST_RESPONSE, settings.max_new_tokens)
    failures = Failures(store.directory, store.rank)
    tokens = 0
    began = time.perf_counter()

    def show(count: int) -> float:
        """Counts finished conversations; returns the spent share of the token or time budget,
        whichever is larger.
        """
        seconds = time.perf_counter() - began
        made = backend.new_tokens
        by_tokens = 0.0
        if args.max_tokens > 0:
            by_tokens = made / args.max_tokens
        by_time = 0.0
        if args.max_minutes > 0:
            by_time = seconds / (60 * args.max_minutes)
        note = f"{made} response tokens, {made / max(seconds, 1e-9):.0f} tokens/s" + (
            f", failed: {failures}" if failures.counts else ""
        )
        progress.advance(count, note, max(by_tokens, by_time))
        return max(by_tokens, by_time)

    def opened() -> Iterator[Conversation]:
        for it in todo:
            try:
                length = len(it.open(settings.renderer))
            except TemplateRefuses as error:
                failures.add(it.id, BadReply(_TEMPLATE, str(error)))
                show(1)
                continue
            if 0 < length <= settings.max_length - least:
                yield it
            else:
                dropped["prompt_too_long"] += 1
                show(1)

    with Progress("generate", len(todo), "conversations") as progress:
        try:
            for it, finished in backend.run(opened(), lambda: show(0) >= 1):
                if isinstance(finished, BadReply):
                    rows.held.pop(it.id, None)
                    failures.add(it.id, finished)
                    show(1)
                    continue
                tokens += sum(end - start for start, end in it.spans)
                rows.add(it, it.record(settings.renderer), finished)
                if it.follows:
                    continue
                dropped["turns_not_reached"] += it.total_turns - len(it.spans)
                if it.ended:
                    dropped[it.ended] += 1
                show(1)
            rows.end()
        finally:  # an interrupted run keeps the states of what was finished
            if writer is not None:
                writer.flush()
    done = store.done_ids()
    failures.settle(done)
    if failures.counts and not done:
        if failures.counts.keys() == {_TEMPLATE}:  # nothing was asked
            raise UserError(
                f"no prompt could be rendered; {_TEMPLATE_FIX}; the last: {failures.last}; all: {failures.path}"
            )
        raise UserError(
            f"no conversation has got an answer ({failures}; the last reply: {failures.last}); check the server and the name "
            f"of its model, and run the same command again; {failures.path} lists the reasons"
        )
    counts = run_counts(rows.conversations, tokens, time.perf_counter() - began, dropped)
    return {**counts, "failed": dict(failures.counts)}


def store_existing(args: argparse.Namespace, target: Target, store: Store, share: Share) -> Json:
    """Stores this process's conversations with the answers in the file; returns the run's counts.

    Another model's answers teach the drafter that model's habits, so the target's own answers work
    better. Rows longer than --max-length are cut; a cut answer ends in "length", as a truncated one
    does.

    A row that is no conversation, or has no answer, is left out and listed; see `Failures`.

    Raises:
        UserError: an id that occurs twice, or no row that can be used.
    """
    done = store.done_ids()
    seen = set()
    failures = Failures(store.directory, share.rank)
    conversations = tokens = beyond = 0
    began = time.perf_counter()

    def unusable(key: str, error: UserError) -> None:
        if share.owns(key):
            failures.add(key, BadReply(_ROW, str(error)))

    with Progress("conversations", None, "conversations") as progress:
        path = Path(args.prompts).expanduser()
        for record in conversation_records(
            target.tokenizer,
            path,
            args.chat_template_kwargs,
            target.eos_ids,
            unusable,
        ):
            key = record["id"]
            if key in seen:
                raise UserError(f"{args.prompts}: id={key!r} occurs twice; ids must be unique")
            seen.add(key)
            if key in done or not share.owns(key):
                continue
            kept = cut(record, args.max_length)
            if kept is None:
                beyond += "part" not in record  # a conversation's other rows have a part
                continue
            store.append(kept)
            conversations += "part" not in record
            tokens += sum(end - start for start, end in kept["spans"])
            progress.advance()
            if 0 < args.max_tokens <= tokens:
                break
    if not seen and failures.last:
        raise UserError(
            f"no row can be used ({failures}; the last: {failures.last.detail}); {_ROW_FIX}"
        )
    if not seen:
        raise UserError(f"prompts={args.prompts!r} is empty: it must hold one conversation a line")
    failures.settle(store.done_ids())
    counts = run_counts(
        conversations,
        tokens,
        time.perf_counter() - began,
        {"answer_beyond_max_length": beyond},
    )
    return {**counts, "failed": dict(failures.counts)}


def cut(record: Json, limit: int) -> Json | None:
    """The record's first `limit` tokens; None if no answer begins there."""
    if len(record["tokens"]) <= limit:
        return record
    spans = [[start, min(end, limit)] for start, end in record["spans"] if start < limit]
    if not spans:
        return None
    finish = list(record["finish"][: len(spans)])
    if spans[-1][1] < record["spans"][len(spans) - 1][1]:
        finish[-1] = "length"
    kept = {**record, "tokens": record["tokens"][: spans[-1][1]], "spans": spans, "finish": finish}
    if "reasoning" in record:
        kept["reasoning"] = [
            min(n, end - start) for n, (start, end) in zip(record["reasoning"], spans, strict=False)
        ]
    return kept


def run_counts(conversations: int, tokens: int, seconds: float, dropped: dict[str, int]) -> Json:
    """The part of summary.json about one run."""
    rate = round(tokens / max(seconds, 1e-9), 1)
    counts = {"conversations": conversations, "response_tokens": tokens}
    return {**counts, "seconds": round(seconds, 1), "tokens_per_second": rate, "dropped": dropped}


def train_command(target: str, data: str) -> str:
    """The command that follows a data set."""
    settings = {"target": target, "data": data, "output_dir": beside(data, "drafter")}
    return next_command("train", "RECIPE", *(f"{key}={value}" for key, value in settings.items()))


def report(
    args: argparse.Namespace,
    store: Store,
    this_run: Json,
    prompts: int | None,
    share: Share,
) -> None:
    """Prints the summary and writes DIR/summary.json: the whole data set, and this process's run."""
    counts = store.finish()
    if prompts is None:  # existing answers: what the file held is not known in advance
        prompts = counts["conversations"] + this_run["dropped"].get("answer_beyond_max_length", 0)
    responses = max(counts["responses"], 1)
    truncated = counts["truncated"] / responses
    summary = {
        "drafttrain": __version__,
        "command": command_line(),
        "prompts": prompts,
        **counts,
        "truncated_share": round(truncated, 4),
        "mean_response_tokens": round(counts["response_tokens"] / responses, 1),
        "processes": share.world,
        "this_run": this_run,
    }
    write_json(store.directory / "summary.json", summary)
    if "rows" in counts:
        print(
            f"{args.output}: {counts['rows']} rows, because the chat template rewrites earlier turns"
        )
    dropped = ", ".join(
        f"{name.replace('_', ' ')} {count}" for name, count in this_run["dropped"].items() if count
    )
    print(
        f"{args.output}: {counts['conversations']} of {counted(prompts, 'conversations')}, {counts['response_tokens']} response "
        f"tokens, mean {summary['mean_response_tokens']} a response, {100 * truncated:.1f} % truncated"
        f"{' at --max-new-tokens: raise it to keep their ends' if truncated >= 0.25 else ''}\n"
        f"this run: {counted(this_run['conversations'], 'conversations')}, {this_run['response_tokens']} response tokens in "
        f"{this_run['seconds']} s ({this_run['tokens_per_second']} tokens/s)"
        + (f"; dropped: {dropped}" if dropped else ""),
        flush=True,
    )
    if failed := this_run.get("failed"):
        reasons = ", ".join(f"{reason} {count}" for reason, count in failed.items())
        known = {_TEMPLATE: _TEMPLATE_FIX, _ROW: _ROW_FIX}
        if failed.keys() - known.keys():
            fixes = ["run the same command again to ask for them again"]
        else:
            fixes = []
        fixes += [f"{reason}: {known[reason]}" for reason in failed if reason in known]
        print(
            f"failed: {counted(sum(failed.values()), 'conversations')} ({reasons}), listed in "
            f"{args.output}/failed-{share.rank:04d}.jsonl; {'; '.join(fixes)}",
            flush=True,
        )
    if share.rank == 0:
        conclude(summary, [args.output], train_command(args.target, args.output))
