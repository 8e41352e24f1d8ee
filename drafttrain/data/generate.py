"""`drafttrain generate`: the target answers prompts; every token is stored with its origin."""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from drafttrain.data.backends import Backend, LocalBackend, OpenAIBackend, ResponseSettings
from drafttrain.data.chat import ChatInputs, TemplateRefuses, check_inputs, has_template
from drafttrain.data.conversation import ChatRenderer, Conversation
from drafttrain.data.existing_backend import UNUSABLE, UNUSABLE_FIX, ExistingBackend
from drafttrain.data.failures import BadReply, Failures
from drafttrain.data.image_prompts import TOO_LONG, too_long
from drafttrain.data.row_file import RowFile, check_row_file, line_starts
from drafttrain.data.store import Share, Store, check_space
from drafttrain.data.vllm_backend import VllmBackend, applied_rules, engine_options, named_options
from drafttrain.environment import __version__
from drafttrain.errors import UserError, shown
from drafttrain.files import Json, read_jsonl, write_json
from drafttrain.flags import load_target, sampling_of
from drafttrain.folders import beside, check_folder, inputs_of
from drafttrain.images import BadPicture, PictureStore
from drafttrain.inference.responses import Finished, choose_slots
from drafttrain.outcome import command_line, conclude, next_command
from drafttrain.progress import Progress, counted
from drafttrain.target import Target, load_shell
from drafttrain.target.generation import LogitsRules

logger = logging.getLogger(__name__)


_TEMPLATE = "chat template"  # the reason of prompts that it does not render
_TEMPLATE_FIX = "change those prompts, or use a target whose chat template reads them"
_FIXES = {
    _TEMPLATE: _TEMPLATE_FIX,
    UNUSABLE: UNUSABLE_FIX,
    TOO_LONG: "raise --max-length, or use smaller images",
    "image": "replace that image, or drop those rows",
}
_ROWS_FIX = "drafttrain prompts --source DIR writes them from a folder of such files"
_LEAST_RESPONSE = 16  # response tokens that a prompt must leave below --max-length
_STORING = 32  # finished conversations that wait for the disk


def run(args: argparse.Namespace) -> int:
    """Generates the missing conversations and prints a summary.

    Raises UserError: bad prompts, settings that contradict the data set, no disk space, an
    unreachable server.
    """
    share = Share.of_process()
    _check(args, share)
    check_folder(args.output, "generate", inputs_of(args))
    args.prompts = Path(args.prompts).expanduser()
    check_row_file(args.prompts, "prompts", _ROWS_FIX)
    existing = args.backend == "existing"
    ids: list[str] = []
    conversations = None
    prompts = None
    if not existing:
        ids, conversations = read_prompts(args.prompts, args.chat_template_kwargs)
        prompts = len(ids)
    target = _load_target(args)
    layers = parse_layers(args.features, target)
    settings = ResponseSettings(
        ChatRenderer(target, PictureStore(args.prompts.parent, args.allow_urls)),
        sampling_of(args),
        args.max_new_tokens,
        args.max_length,
        args.seed,
    )
    with Store(args.output, _meta(args, target, layers), share.rank, args.overwrite) as store:
        done = store.done_ids()
        mine: Sequence[Conversation] = []
        if conversations is not None:
            missing = [i for i, key in enumerate(ids) if key not in done and share.owns(key)]
            mine = conversations.chosen(missing)
        if layers:
            # The layers' states and the last one, at 2 bytes a number.
            row_bytes = (len(layers) + 1) * target.hidden_size * 2
            check_space(store.directory, feature_bytes(mine, args, settings, row_bytes))

        this_run = run_counts(0, 0, 0.0, {})
        if existing or mine:
            backend = make_backend(
                args,
                target,
                settings,
                layers,
                len(mine),
                done,
                share,
            )
            this_run = store_answers(args, settings, store, backend, mine)
        report(args, store, this_run, prompts, share)
    return 0


def _check(args: argparse.Namespace, share: Share) -> None:
    """Raises UserError: flags that contradict each other."""
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
    given = [*named_options(args), *args.vllm_flags]
    if args.backend != "vllm" and given:
        raise UserError(
            f"{given[0]!r} is for --backend vllm; servers get such flags when they start"
        )


def _load_target(args: argparse.Namespace) -> Target:
    """The target, with weights if it answers here.

    Raises UserError: chat_template_kwargs that its template does not read.
    """
    target: Target
    if args.backend == "local":
        target = load_target(args)
    else:
        target = load_shell(args.target, trust_remote_code=args.trust_remote_code)
    kwargs = args.chat_template_kwargs
    if kwargs:
        if not has_template(target.tokenizer):
            raise UserError(
                f"chat_template_kwargs: target={target.name!r} has no chat template; drop them"
            )
        check_inputs(target.tokenizer.get_chat_template(), ChatInputs((), kwargs))
    return target


def _meta(args: argparse.Namespace, target: Target, layers: tuple[int, ...]) -> Json:
    """The settings that all runs into one data set share."""
    sampling: Json = {"max_length": args.max_length}
    if args.backend != "existing":
        sampling = {
            **backend_rules(args.backend, target).recorded(sampling_of(args)),
            "max_new_tokens": args.max_new_tokens,
            "max_length": args.max_length,
            "seed": args.seed,
        }
    meta: Json = {
        "target": target.identity(),
        "sampling": sampling,
        "backend": args.backend,
        "features": None,
    }
    if layers:
        meta["features"] = {"layers": list(layers), "dtype": "bfloat16"}
    if args.chat_template_kwargs:
        meta["chat_template_kwargs"] = args.chat_template_kwargs
    return meta


def backend_rules(backend: str, target: Target) -> LogitsRules:
    """What a backend applies of the target's generation_config.

    The target in this process applies all rules, vLLM those that it can express, a server its own.
    """
    if backend in ("openai", "existing"):
        return LogitsRules()
    rules = target.generation.rules
    if backend == "local":
        return rules
    applied = applied_rules(rules)
    left = [key for key in rules.settings if key not in applied.settings]
    if left:
        logger.warning(
            "backend=vllm does not apply %s of the target's generation_config; --backend local does",
            ", ".join(left),
        )
    return applied


def read_prompts(path: Path, kwargs: Json | None = None) -> tuple[list[str], RowFile[Conversation]]:
    """Checks a prompts file; returns the ids in order, and the conversations, which stay on disk.

    kwargs: chat_template_kwargs for rows that do not set them.

    Raises UserError: no file, a line that is not a prompt, a repeated id, one that a part of another
        prompt's conversation would get, or no prompts at all.
    """
    if not path.is_file():
        raise UserError(f"prompts={str(path)!r}: no such file; make one: drafttrain prompts --help")
    seen: dict[str, int] = {}  # turns by id, in order

    def places() -> Iterator[tuple[int, int]]:
        # Each line by its place in the file and by its content.
        for (number, start), (_, row) in zip(line_starts(path), read_jsonl(path), strict=True):
            where = f"{path} line {number}"
            if "id" not in row:
                raise UserError(
                    f'{where}: needs an "id"; drafttrain prompts --source file writes them'
                )
            prompt = Conversation.from_row(row, where)
            if prompt.id in seen:
                raise UserError(f"{where}: id={prompt.id!r} occurs twice; ids must be unique")
            seen[prompt.id] = prompt.total_turns
            yield number, start

    conversations = RowFile(path, partial(Conversation.from_row, kwargs=kwargs), places())
    if not seen:
        raise UserError(f"prompts={str(path)!r} is empty; make some: drafttrain prompts --help")
    for key, turns in seen.items():
        for part in range(turns - 1):
            if f"{key}/{part}" in seen:
                raise UserError(
                    f"prompts={str(path)!r}: id='{key}/{part}' is also that of a part of {key!r}, a conversation of {turns} "
                    "turns; rename one of them"
                )
    return list(seen), conversations


def parse_layers(text: str, target: Target) -> tuple[int, ...]:
    """Reads --features.

    wide: the default three, those halfway between them, and the input of the last layer.

    Raises UserError: not 'none', 'default', 'wide' or distinct layer numbers of the target.
    """
    if text == "none":
        return ()
    if text == "default":
        return target.default_feature_layers
    if text == "wide":
        usual = target.default_feature_layers
        wide = {*usual, target.num_layers - 1}
        for low, high in itertools.pairwise(usual):
            # Halfway, rounded up.
            wide.add((low + high + 1) // 2)
        return tuple(sorted(wide))
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = (-1,)  # fails the check below
    known = range(target.num_layers + 1)
    if len(set(layers)) < len(layers) or not set(layers) <= set(known):
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
    """Estimated size of the stored states.

    Prompt lengths come from a sample; responses count at their limit or the token budget.
    """
    sample = conversations[:: max(1, len(conversations) // 32)]  # 32 to 63 of them
    lengths = []
    for it in sample:
        if not it.may_fit(settings.renderer, settings.max_length):
            continue
        try:
            lengths.append(len(it.open(settings.renderer)))
        except (TemplateRefuses, BadPicture):
            continue
    if not lengths:
        return 0.0
    prompt = sum(lengths) / len(lengths)
    turns = sum(it.total_turns for it in sample) / len(sample)
    response = min(turns * settings.max_new_tokens, settings.max_length)
    count = len(conversations)
    if args.max_tokens:
        # A token budget ends the run before all are answered.
        count = min(count, math.ceil(args.max_tokens / response) + 1)
    return count * min(prompt + response, settings.max_length) * row_bytes


def make_backend(
    args: argparse.Namespace,
    target: Target,
    settings: ResponseSettings,
    layers: tuple[int, ...],
    count: int,
    done: set[str],
    share: Share,
) -> Backend:
    """The backend of --backend.

    Args:
        count: conversations to answer, which bounds the slots.
        done: ids of stored rows. share: the rows of this process.
    """
    if args.backend == "existing":
        return ExistingBackend(
            settings.renderer,
            args.prompts,
            args.chat_template_kwargs,
            args.max_length,
            done,
            share,
        )
    given = args.slots
    if given == "auto":
        given = None
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
    if given is None:
        given = choose_slots(target, settings.max_length, len(layers))
    return LocalBackend(target, settings, min(given, count), layers)


class _Rows(NamedTuple):
    """Rows of a conversation, with the target's states if they are stored."""

    records: list[Json]
    states: list[dict[str, Tensor]]


def longest_prompt(settings: ResponseSettings) -> int:
    """Most tokens of a first prompt."""
    return settings.max_length - min(_LEAST_RESPONSE, settings.max_new_tokens)


def open_prompt(it: Conversation, settings: ResponseSettings) -> int | BadReply:
    """Opens a conversation; returns its tokens, 0 for far too many, or why it is not asked."""
    try:
        if not it.may_fit(settings.renderer, settings.max_length):
            return 0
        length = len(it.open(settings.renderer))
    except TemplateRefuses as error:
        return BadReply(_TEMPLATE, str(error))
    except BadPicture as error:
        return BadReply(error.reason, error.detail)
    if it.images and length > longest_prompt(settings):
        return too_long(length, len(it.images), settings.max_length)
    return length


def store_answers(
    args: argparse.Namespace,
    settings: ResponseSettings,
    store: Store,
    backend: Backend,
    todo: Sequence[Conversation],
) -> Json:
    """Answers the conversations and stores each when it ends, until the budget is spent.

    Args:
        todo: conversations to answer; none where the backend has its own.

    Returns:
        The run's counts.

    Raises:
        UserError: no conversation could be stored.
    """
    dropped = dict.fromkeys(backend.drops, 0)
    failures = Failures(store.directory, store.rank)
    pictures = PictureStore(store.directory)
    # The rows of conversations that go on: those of one are stored together.
    held: dict[str, _Rows] = {}
    conversations = 0
    tokens = 0
    writer = ThreadPoolExecutor(1)
    storing: deque[Future[None]] = deque()
    began = time.perf_counter()

    def show(count: int) -> float:
        """Counts finished conversations; returns the spent share of the token or time budget."""
        seconds = time.perf_counter() - began
        made = backend.new_tokens
        spent = 0.0
        if args.max_tokens > 0:
            spent = made / args.max_tokens
        if args.max_minutes > 0:
            spent = max(spent, seconds / (60 * args.max_minutes))
        note = f"{made} response tokens, {made / max(seconds, 1e-9):.0f} tokens/s"
        if failures.counts:
            note += f", failed: {failures}"
        progress.advance(count, note, spent)
        return spent

    def keep(rows: _Rows) -> None:
        """Stores the rows of a conversation while the next answers are made.

        Raises UserError: those of this one or of an earlier one cannot be written.
        """
        storing.append(writer.submit(store.add, rows.records, rows.states))
        # The result of a write that is done raises what failed in it.
        while storing and (storing[0].done() or len(storing) > _STORING):
            storing.popleft().result()

    def opened() -> Iterator[Conversation]:
        for it in todo:
            length = open_prompt(it, settings)
            if isinstance(length, BadReply):
                failures.add(it.id, length)
                show(1)
            elif 0 < length <= longest_prompt(settings):
                yield it
            else:
                dropped["prompt_too_long"] += 1
                show(1)

    total = None  # unknown where the backend reads a file
    if backend.asks:
        total = len(todo)
    with Progress("generate", total, "conversations") as progress:
        try:
            for it, result in backend.run(opened(), lambda: show(0) >= 1):
                if isinstance(result, BadReply):
                    held.pop(it.id, None)
                    failures.add(it.id, result)
                    show(1)
                    continue
                rows = held.setdefault(it.id, _Rows([], []))
                if it.spans:
                    tokens += sum(end - start for start, end in it.spans)
                    record = it.record(settings.renderer)
                    for picture in it.images:
                        pictures.add(picture)
                    rows.records.append(record)
                    if args.features != "none":
                        rows.states.append(_states_of(record, result))
                if it.follows:
                    continue

                del held[it.id]
                keep(rows)
                # A row of a file is stored by itself; all but the last of a conversation have a part.
                if rows.records and "part" not in rows.records[-1]:
                    conversations += 1
                if backend.asks:
                    dropped["turns_not_reached"] += it.turns_left
                if it.ended:
                    dropped[it.ended] += 1
                show(1)

            # Conversations that the budget has ended between two rows end with the earlier one.
            for key, rows in held.items():
                rows.records[-1]["id"] = key
                del rows.records[-1]["part"]
                keep(rows)
                conversations += 1
            while storing:
                storing.popleft().result()
        finally:  # an interrupted run keeps the states of what was finished
            writer.shutdown()
            store.flush()

    done = store.done_ids()
    failures.settle(done)
    if backend.asks and failures.counts and not done:
        raise _nothing_stored(failures)
    counts = run_counts(conversations, tokens, time.perf_counter() - began, dropped)
    return {**counts, "failed": dict(failures.counts)}


def _nothing_stored(failures: Failures) -> UserError:
    fixes = [_fix_of(reason) for reason in failures.counts]
    if all(fixes):  # nothing was asked
        return UserError(
            f"no prompt could be rendered; {fixes[-1]}; the last: {failures.last}; all: {failures.path}"
        )
    return UserError(
        f"no conversation has got an answer ({failures}; the last reply: {failures.last}); check the server and the name "
        f"of its model, and run the same command again; {failures.path} lists the reasons"
    )


def _states_of(record: Json, result: Finished | None) -> dict[str, Tensor]:
    """The states to store for a row, which the backend has captured."""
    assert result is not None
    assert result.features is not None
    assert result.last_hidden is not None
    fed = len(record["tokens"]) - 1  # the last token was never an input
    return {"features": result.features[:fed], "last_hidden": result.last_hidden[:fed]}


def run_counts(
    conversations: int,
    tokens: int,
    seconds: float,
    dropped: dict[str, int],
) -> Json:
    """The part of summary.json about one run."""
    rate = round(tokens / max(seconds, 1e-9), 1)
    counts = {"conversations": conversations, "response_tokens": tokens}
    return {**counts, "seconds": round(seconds, 1), "tokens_per_second": rate, "dropped": dropped}


def train_command(target: str, data: str) -> str:
    """The command that follows a data set."""
    output = beside(data, "drafter")
    return next_command(
        "train", "RECIPE", f"target={target}", f"data={data}", f"output_dir={output}"
    )


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
    truncated = counts["truncated"] / responses  # share of responses that a limit ended
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
    advice = ""
    if truncated >= 0.25:
        limit = "--max-length" if args.backend == "existing" else "--max-new-tokens"
        advice = f" at {limit}: raise it to keep their ends"
    print(
        f"{args.output}: {counts['conversations']} of {counted(prompts, 'conversations')}, {counts['response_tokens']} response "
        f"tokens, mean {summary['mean_response_tokens']} a response, {100 * truncated:.1f} % truncated{advice}"
    )
    dropped = ""
    for name, count in this_run["dropped"].items():
        if count:
            dropped += f", {name.replace('_', ' ')} {count}"
    if dropped:
        dropped = f"; dropped: {dropped[2:]}"
    print(
        f"this run: {counted(this_run['conversations'], 'conversations')}, {this_run['response_tokens']} response tokens in "
        f"{this_run['seconds']} s ({this_run['tokens_per_second']} tokens/s){dropped}",
        flush=True,
    )
    if this_run.get("failed"):
        failed = this_run["failed"]
        reasons = ", ".join(f"{reason} {count}" for reason, count in failed.items())
        fixes = [f"{reason}: {_fix_of(reason)}" for reason in failed if _fix_of(reason)]
        if len(fixes) < len(failed):
            fixes.insert(0, "run the same command again to ask for them again")
        print(
            f"failed: {counted(sum(failed.values()), 'conversations')} ({reasons}), listed in "
            f"{args.output}/failed-{share.rank:04d}.jsonl; {'; '.join(fixes)}",
            flush=True,
        )
    if share.rank == 0:
        conclude(summary, [args.output], train_command(args.target, args.output))


def _fix_of(reason: str) -> str:
    """What to do about rows that failed for a reason; '' for those that may be asked for again."""
    return _FIXES.get(reason.partition(":")[0], "")
