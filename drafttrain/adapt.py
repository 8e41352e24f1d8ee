"""`drafttrain adapt`: goes on training a drafter from a server's log, and serves each version that
decodes better.

    read     new lines of the log -> answers as tokens; by a hash of the prompt, a share of them only judges
    train    new answers and a sample of earlier ones, a few passes, within the allowance
    judge    replay of the newest held-out answers with both drafters; ratio of accepted lengths with a paired interval
    swap     better: OUTPUT/current -> the new version; worse: back to the old one; neither: training continues from it

    OUTPUT/current         link to the drafter to serve: the first one, or a version
    OUTPUT/version-0007/   a drafter, complete under this name; adapted.json says how it was judged
    OUTPUT/journal.jsonl   decisions of --watch, see watch.py
    OUTPUT/state.jsonl     positions in logs, allowance, rounds; then a line per kept answer. Replaced in one step

A process that is killed loses the running round at most: versions get their name when they are
complete, and the state, which names the version to continue, is written last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import fmean

import torch
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from drafttrain.data.answer_log import LogReader, Place, read_answer
from drafttrain.data.loader import count_tokens, cut_row, keep_frequent, similar_rows
from drafttrain.data.store import load_records, read_meta
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.registry import load_trained
from drafttrain.environment import __version__
from drafttrain.errors import UserError
from drafttrain.evaluation.held_out import judged_rows
from drafttrain.evaluation.resampling import FEWEST, lengths_ratio
from drafttrain.files import Json, check_json, read_jsonl, replacing, violation, write_json, writing
from drafttrain.flags import load_target
from drafttrain.folders import PARTIAL, OutputFolder, inputs_of
from drafttrain.outcome import conclude, next_command
from drafttrain.progress import counted
from drafttrain.serving.prometheus import FiguresPage
from drafttrain.target import Target, load_shell
from drafttrain.train import check_data
from drafttrain.training.checkpoint import sync_files
from drafttrain.training.continued import (
    STEP_TOKENS,
    ContinuedTraining,
    continued,
    source_of,
)
from drafttrain.watch import Watch, Watched

STATE = "state.jsonl"
CURRENT = "current"
RECORD = "adapted.json"
_POLL_SECONDS = 2.0
_NICE = 10
_SAVED_HOURS = 6.0  # of unspent allowance
_FALL = 0.95  # of the logged accepted length, which spends the whole allowance
_JUDGES = 32  # newest held-out answers that judge a round
_STAGE_ROWS = 64  # answers of a stage
_RECORDED = 50  # rounds and unusable lines in the state
_FIRST_DATA = 2**40  # first index of rows of the first data; below are numbers of answers
_FIX = "delete the file to begin again"
# Flags that mean something with another one only.
_TOGETHER = {
    "server": "watch",
    "metrics": "watch",
    "api_key_env": "server",
    "states_dir": "target_url",
}


class _Answer(TypedDict):
    """A kept answer. trained: rounds that trained on it; replayed: [committed, passes] by version;
    held: it only judges.
    """

    number: int
    tokens: list[int]
    start: int
    held: bool
    trained: int
    replayed: dict[str, list[int]]


@dataclass
class _State:
    """The first line of state.jsonl.

    Attributes:
        first: the drafter that it began with. places: positions in the logs.
        read, unusable, passed_over: lines. failures: the last unusable ones.
        fresh: answers since the last round. recent: their accepted lengths, where logged; usual:
            the length before.
        allowance: seconds to spend, as of the time `at`. spent, began: seconds of work, and since
            when they count.
        judging: seconds that judging takes. trial: version to train on from, not served; number: of
            the newest version. watched: of --watch.
    """

    first: str
    places: list[Place] = field(default_factory=list)
    read: int = 0
    unusable: int = 0
    passed_over: int = 0
    failures: list[Json] = field(default_factory=list)
    fresh: int = 0
    recent: list[float] = field(default_factory=list)
    usual: float = 0.0
    allowance: float = 0.0
    at: float = field(default_factory=time.time)
    spent: float = 0.0
    began: float = field(default_factory=time.time)
    judging: float = 0.0
    trial: str = ""
    number: int = 0
    rounds: list[Json] = field(default_factory=list)
    watched: Watched = field(default_factory=Watched)


class Adapter:
    """Follows a log, and trains and judges a drafter.

    Args:
        args: the command's flags. output: the locked folder.
    """

    def __init__(self, args: argparse.Namespace, output: Path):
        self.args = args
        self.output = output
        self.first = Path(args.drafter).expanduser().resolve()
        self.state, self.answers = self._read_state()
        # A drafter records the target that it was trained for.
        name = args.target or load_trained(str(self.first)).config.target["name"]
        if args.target_url:
            self.target: Target = load_shell(
                name,
                args.dtype,
                args.device,
                args.trust_remote_code,
                weights=True,
            )
        # States come from a server then, and the target here has its embedding and head only.
        else:
            self.target = load_target(args, name)
        self._tidy()
        going_on = CURRENT
        if self.state.trial:
            going_on = self.state.trial
        drafter = continued(self.target, str(output / going_on))
        self.drafter = drafter
        self.source = source_of(self.target, drafter, args.target_url, args.states_dir)
        self.watch: Watch | None = None
        self.complains = False  # that most of the newest lines cannot be used
        # Another sequence than before a restart, which went on from another version.
        self.random = random.Random(f"{args.seed} {self.state.number}")
        self.earlier = self._first_data()
        self.training: ContinuedTraining | None = None
        self.on_cpu = self.target.device.type == "cpu"
        if self.on_cpu:
            self.cores = len(os.sched_getaffinity(0))
            # `account` charges the difference to the next reading.
            self.clock = 0.0  # the CPU time that this process has spent so far counts
        else:
            self.cores = 1
            self.clock = time.perf_counter()

    # -- files -------------------------------------------------------------------------------------

    def _read_state(self) -> tuple[_State, list[_Answer]]:
        path = self.output / STATE
        if not path.exists():
            return _State(str(self.first)), []
        lines = list(read_jsonl(path, fix=_FIX))
        head = lines[0][1]
        try:
            state = TypeAdapter(_State).validate_python(head)
        except ValidationError as error:
            raise UserError(f"{path} line 1: {violation(error)}; {_FIX}") from error
        if state.first != str(self.first):
            rule = "one folder continues one drafter"
            raise UserError(
                f"drafter={self.args.drafter!r}: {self.output} continues {state.first}; {rule}: choose another --output"
            )
        answers: list[_Answer] = []
        for number, row in lines[1:]:
            check_json(row, f"{path} line {number}", _FIX, _Answer)
            answers.append(row)  # type: ignore[arg-type]  # checked
        return state, answers

    def save(self) -> None:
        """Replaces the state."""
        path = self.output / STATE
        lines = [json.dumps(asdict(self.state))]
        for answer in self.answers:
            lines.append(json.dumps(answer))
        with writing(path), replacing(path) as part:
            part.chmod(0o600)  # users' text
            part.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _tidy(self) -> None:
        """Completes what a killed process left: the link to the drafter, and versions that no state
        names.
        """
        link = self.output / CURRENT
        if not link.is_symlink():
            self._link(self.first)
        records = sorted(self.output.glob(f"version-*/{RECORD}"))
        versions = [record.parent for record in records]  # the newest last
        # What serves and what training continues from stay, however old they are.
        kept = {link.resolve().name, self.state.trial, Path(self.state.watched.previous).name}
        for path in versions[: -self.args.keep]:
            if path.name not in kept:
                shutil.rmtree(path)

    def _link(self, folder: Path) -> None:
        """Makes OUTPUT/current lead to a drafter, in one step."""
        # A link cannot be changed in place: a new one takes the old one's name.
        part = self.output / f".{CURRENT}"
        part.unlink(missing_ok=True)
        place = str(folder)
        if folder.parent == self.output:
            place = folder.name  # so that the folder may move
        part.symlink_to(place)
        os.replace(part, self.output / CURRENT)

    def _store(self, record: Json) -> str:
        """Saves the drafter as a new version; returns its name."""
        # A killed process may have left versions that the state does not know.
        newest = self.state.number
        for path in self.output.glob("version-*"):
            number = path.name.removeprefix("version-")
            if number.isdecimal():
                newest = max(newest, int(number))
        self.state.number = newest + 1
        name = f"version-{self.state.number:04d}"
        part = self.output / PARTIAL
        with writing(self.output, reads=True):
            shutil.rmtree(part, ignore_errors=True)
            self.drafter.save_pretrained(part)
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(self.first / "decoding.json", part)  # the tree that was tuned
            write_json(part / RECORD, record)
            sync_files(part)
            os.replace(part, self.output / name)
        return name

    def _first_data(self) -> list[Json]:
        """A sample of the first training's conversations."""
        if not self.args.data:
            return []
        check_data(read_meta(self.args.data), None, self.target, self.args.data)
        records = load_records(self.args.data)
        count = min(len(records), 4 * self.args.every)
        rows = []
        for number in self.random.sample(range(len(records)), count):
            record = records[number]
            row = cut_row(
                record["tokens"],
                record["spans"],
                _FIRST_DATA + number,
                self.args.max_length,
            )
            if row["spans"]:
                rows.append(row)
        return rows

    # -- allowance ---------------------------------------------------------------------------------

    def account(self, work: bool = True) -> None:
        """Adds the time that has passed to the allowance, and subtracts what was done since the
        last call.

        That is CPU time of all threads; on an accelerator, time. work: False leaves it out, after
        waiting.
        """
        state = self.state
        now = time.time()
        if self.on_cpu:
            clock = time.process_time()
        else:
            clock = time.perf_counter()
        done = 0.0
        if work:
            done = clock - self.clock
        self.clock = clock
        # The share of one core's second on an accelerator, of all cores' on a CPU.
        gain = self.args.share * self.cores
        saved = state.allowance + gain * max(now - state.at, 0)
        state.allowance = min(saved, gain * 3600 * _SAVED_HOURS) - done
        state.at = now
        state.spent += done

    @property
    def cost(self) -> float:
        """Share of the machine's time that was spent since the first start."""
        return self.state.spent / max((self.state.at - self.state.began) * self.cores, 1e-9)

    @property
    def fallen(self) -> bool:
        """Whether the logged accepted length fell; True where none is logged."""
        if not self.state.recent:
            return True
        return fmean(self.state.recent) < _FALL * self.state.usual

    def budget(self) -> float:
        """Seconds that a round may spend now."""
        self.account()
        if self.fallen:
            return self.state.allowance
        return self.state.allowance / 2

    # -- reading -----------------------------------------------------------------------------------

    def read(self) -> int:
        """Reads what the log has got; returns the number of new answers."""
        state = self.state
        every = self.args.every
        reader = LogReader(Path(self.args.log).expanduser(), state.places)
        # So many lines at once that a long log is read in several steps, each of which is saved.
        lines, passed_over = reader.read(8 * every)
        before = state.fresh
        unusable = state.unusable
        for where, path, line in lines:
            try:
                found = read_answer(
                    line,
                    path,
                    self.target,
                    self.args.chat_template_kwargs,
                    self.args.max_length,
                )
            except UserError as error:
                state.unusable += 1
                state.failures.append({"line": where, "reason": str(error)[:300]})
                state.failures = state.failures[-_RECORDED:]
                continue
            # By a hash of the prompt: equal prompts stay on one side.
            key = sha256(repr(found.tokens[: found.start]).encode()).digest()
            held = int.from_bytes(key[:4], "little") < self.args.hold_out * 2**32
            state.read += 1
            state.fresh += 1
            if found.accepted:
                state.recent.append(found.accepted)
                state.recent = state.recent[-every:]
                # The server's own counters are preferred.
                if self.watch is not None and self.watch.swapper is None:
                    self.watch.add(found.accepted)
            made = _Answer(
                number=state.read,
                tokens=found.tokens,
                start=found.start,
                held=held,
                trained=0,
                replayed={},
            )
            self.answers.append(made)
        if lines:
            # Said once, as of another target's log.
            is_most = 2 * (state.unusable - unusable) > len(lines)
            if is_most and not self.complains:
                failure = state.failures[-1]
                reason = f"{failure['line']}: {failure['reason']}"
                print(
                    f"most new lines of the log cannot be used; the last one, {reason}", flush=True
                )
                if self.watch:
                    self.watch.note("unusable", reason=reason)
            self.complains = is_most
            state.places = reader.places
            state.passed_over += passed_over
            self._bound()
            self.account()
            self.save()
        return state.fresh - before

    def _bound(self) -> None:
        """Keeps the newest answers and, of earlier ones, a random part."""
        every = self.args.every
        judges = [it for it in self.answers if it["held"]][-2 * _JUDGES :]
        others = [it for it in self.answers if not it["held"]]
        # Of answers that training has seen, an even sample of all times.
        older = others[: -2 * every]
        newer = others[-2 * every :]
        older = self.random.sample(older, min(len(older), 4 * every))
        older.sort(key=lambda it: it["number"])
        self.answers = judges + older + newer
        # States of answers that are gone will not be read again.
        self.source.kept.keep_only({it["number"] for it in self.answers})

    # -- a round -----------------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether there are enough new answers to train on and to judge by, and twice the time that
        judging takes.
        """
        # A single look at the server gives no samples.
        if self.watch and self.watch.waits and not self.args.once:
            return False
        judges = sum(it["held"] for it in self.answers)
        others = sum(_is_new(it) for it in self.answers)
        # Fewer judges than FEWEST give no interval.
        enough = self.state.fresh >= self.args.every and judges >= FEWEST and others > 0
        return enough and self.budget() > 2 * self.state.judging

    def round(self) -> Json:
        """Trains, judges and swaps; returns the round's record, empty if the allowance was spent
        before the first step.
        """
        state = self.state
        budget = self.budget()
        began = state.spent
        served = (self.output / CURRENT).resolve()
        fallen = self.fallen
        judges = self._judges()
        # The served drafter's figures are kept with the answers; only new judges are replayed.
        if any(served.name not in it["replayed"] for it in judges):
            self._replay(continued(self.target, str(served)), served.name, judges)

        # train
        new = [it for it in self.answers if _is_new(it)][-self.args.every :]
        earlier = self._earlier(len(new))
        rows = [_row_of(it) for it in new]
        words = self._renew_words()
        # Time for judging is kept back.
        steps, tokens = self._train(rows + earlier, began + budget - state.judging)
        if not steps:  # waits for more of the allowance
            state.judging = max(state.judging, state.spent - began)
            return {}

        # judge
        mark = state.spent
        self._replay(self.drafter, "", judges)
        theirs = [it["replayed"][served.name] for it in judges]
        ours = [it["replayed"].pop("") for it in judges]
        ratio, before, after = lengths_ratio(theirs, ours)
        # The present round counts fully if it took longer, else only by a fifth.
        state.judging = max(0.8 * state.judging, state.spent - mark)

        number = 1
        if state.rounds:
            number = state.rounds[-1]["round"] + 1
        logged = None
        if state.recent:
            logged = round(fmean(state.recent), 3)
        record: Json = {
            "round": number,
            "answers": state.read,
            "new": len(new),
            "earlier": len(earlier),
            "words": words,
            "steps": steps,
            "tokens": tokens,
            "judges": len(judges),
            "before": before,
            "after": after,
            "ratio": ratio.value,
            "interval": [ratio.low, ratio.high],
            "fallen": fallen,
            "logged_accepted_length": logged,
        }

        # swap
        if ratio.high < 1:
            record |= {"verdict": "worse", "version": served.name}
            state.trial = ""
            self.training = None
            self.drafter = continued(self.target, str(served))
        else:
            name = self._store({"drafttrain": __version__, "first": str(self.first), **record})
            if ratio.low > 1:
                record |= {"verdict": "better", "version": name}
                state.trial = ""
                for it, replayed in zip(judges, ours, strict=True):
                    # Figures of other versions will not be compared any more.
                    it["replayed"] = {name: replayed}
                self._link(self.output / name)
            else:
                # Not shown to be better: training goes on from it, and the served drafter stays.
                record |= {"verdict": "undecided", "version": served.name}
                state.trial = name

        for it in new:
            it["trained"] += 1
        if state.recent:
            recent = fmean(state.recent)
            # A moving average over rounds, which begins at the first one's.
            state.usual = 0.8 * (state.usual or recent) + 0.2 * recent
        state.fresh = 0
        self.account()
        record |= {"seconds": round(state.spent - began, 2), "cost": round(self.cost, 5)}
        state.rounds.append(record)
        state.rounds = state.rounds[-_RECORDED:]
        self._bring(record, served)
        self.save()
        self._tidy()
        return record

    def _bring(self, record: Json, before: Path) -> None:
        """Brings a round's better version into the watched server; back to the one before if it is
        refused.
        """
        if self.watch is None:
            return
        self.watch.note("round", **record)
        if record["verdict"] != "better":
            return
        if self.watch.bring(self.output / record["version"]):
            self.state.watched.begin(before)
            return
        self._link(before)
        self.state.trial = record["version"]
        record |= {"verdict": "refused", "version": before.name}

    def look(self) -> None:
        """Looks after the watched version: brings it into the server, samples what is accepted of
        its drafts, and goes back to the version before where that fell.
        """
        if self.watch is None:
            return
        served = (self.output / CURRENT).resolve()
        self.watch.bring(served)
        self.watch.sample(served.name)
        before = self.watch.falls(served.name)
        if before is None:
            return
        self._link(before)
        # Training goes on from what serves.
        self.state.trial = ""
        self.training = None
        self.drafter = continued(self.target, str(before))
        self.watch.bring(before)
        self.save()
        print(f"{served.name} falls below {before.name}, which serves again", flush=True)

    def figures(self) -> dict[str, float]:
        """What Prometheus gets, by name: the watcher's figures, the log, the cost, the last round."""
        assert self.watch is not None
        state = self.state
        found = {
            "lines_read_total": state.read,
            "lines_unusable_total": state.unusable,
            "lines_passed_over_total": state.passed_over,
            "work_seconds_total": state.spent,
            "allowance_seconds": state.allowance,
            **self.watch.figures(),
        }
        number = (self.output / CURRENT).resolve().name.removeprefix("version-")
        found["served_version"] = 0
        if number.isdecimal():  # the first drafter has none
            found["served_version"] = int(number)
        if state.rounds:
            last = state.rounds[-1]
            for key in ("before", "after"):
                found[f"round_{key}"] = last[key]
            found["round_ratio_low"] = last["interval"][0]
        return found

    def _judges(self) -> list[_Answer]:
        """The newest held-out answers: those since the last round, and of earlier ones a half."""
        held = [it for it in self.answers if it["held"]][-_JUDGES:]
        judges = []
        for place, answer in enumerate(held):
            fresh = answer["number"] > self.state.read - self.state.fresh
            if fresh or place >= len(held) - _JUDGES // 2:
                judges.append(answer)
        return judges

    def _earlier(self, new: int) -> list[Json]:
        """Rows of earlier answers, half of them from the first training's data, if given."""
        count = round(self.args.replay * new)
        old = [it for it in self.answers if not it["held"] and it["trained"]]
        first = count
        if old:
            first = count // 2
        rows = self.random.sample(self.earlier, min(len(self.earlier), first))
        for it in self.random.sample(old, min(len(old), count - len(rows))):
            rows.append(_row_of(it))
        return rows

    def _renew_words(self) -> int:
        """Gives the drafter the tokens that answers hold now, if its head allows that; returns how
        many are new to it.
        """
        known = self.drafter.kept_ids.cpu()
        rows = [_row_of(it) for it in self.answers if not it["held"]]
        counts = count_tokens(rows + self.earlier, self.target.vocab_size)
        # Of tokens that occur equally often, those that it has already stay.
        counts *= 2
        counts[known] += 1
        words = keep_frequent(counts, len(known), self.target.eos_ids)
        new = int((~torch.isin(words, known)).sum())
        if not new or not self.drafter.take_words(self.target, words):
            return 0
        return new

    def _train(self, rows: list[Json], until: float) -> tuple[int, int]:
        """Trains on rows until `until` seconds are spent in all; returns steps and tokens."""
        if self.training is None:
            self.training = ContinuedTraining(self.drafter, self.args.learning_rate)
        self.source.read_words(self.drafter.kept_ids)
        start = self.state.spent

        def spent() -> float:
            self.account()
            return (self.state.spent - start) / max(until - start, 1e-9)

        order = self._order(rows)
        steps = len(self.training.train(order, self.source, spent))
        tokens = sum(row["length"] for batch in order[:steps] for row in batch)
        return steps, tokens

    def _order(self, rows: list[Json]) -> list[list[Json]]:
        """The batches of all passes.

        A stage of a few steps has all its passes before the next begins: the target's forward costs
        more than a pass.
        """
        self.random.shuffle(rows)
        stages = []
        for begin in range(0, len(rows), _STAGE_ROWS):
            part = rows[begin : begin + _STAGE_ROWS]
            stages.append(similar_rows(part, STEP_TOKENS))
        order = []
        for stage in stages:
            for _ in range(self.args.passes):
                order += self.random.sample(stage, len(stage))
        return order

    def _replay(
        self,
        drafter: TrainableDrafter,
        version: str,
        judges: Sequence[_Answer],
    ) -> None:
        """Notes in each answer what a drafter commits in how many passes."""
        todo = [it for it in judges if version not in it["replayed"]]
        rows = [_row_of(it) for it in todo]
        made = judged_rows(drafter, rows, self.source)  # type: ignore[arg-type]  # states, no top-k
        for it, amounts in zip(todo, made, strict=True):
            it["replayed"][version] = amounts
        self.account()


def _is_new(it: _Answer) -> bool:
    return not it["held"] and not it["trained"]


def _row_of(answer: _Answer) -> Json:
    """The training row of an answer."""
    tokens = answer["tokens"]
    return cut_row(tokens, [[answer["start"], len(tokens)]], answer["number"], len(tokens))


def show(record: Json, share: float) -> None:
    """A round as a line."""
    low, high = record["interval"]
    words = ""
    if record["words"]:
        words = f"{record['words']} words exchanged, "
    print(
        f"round {record['round']}: {record['new']} new and {record['earlier']} earlier answers, "
        f"{words}{record['tokens']} tokens in {record['steps']} steps, {record['seconds']:.1f} s; "
        f"{record['judges']} held-out answers: accepted length {record['before']:.2f} -> {record['after']:.2f} "
        f"(x{record['ratio']:.3f}, 95 % interval {low:.3f} to {high:.3f}), "
        f"{record['verdict']}: {record['version']} serves; cost so far {100 * record['cost']:.2f} % of {100 * share:g} %",
        flush=True,
    )


def run(args: argparse.Namespace) -> int:
    """Follows the log until it is stopped, or once. Raises UserError: bad flags, no log, or a
    target that does not fit.
    """
    first = Path(args.drafter).expanduser()
    log = Path(args.log).expanduser()
    if not first.is_dir():
        raise UserError(
            f"drafter={args.drafter!r}: no such folder; adapt continues a drafter on this machine"
        )
    if not log.is_dir() and not log.parent.is_dir():
        raise UserError(
            f"log={args.log!r}: no such file or folder; see the forms of a log in docs/how-to/adapt.md"
        )
    for key, other in _TOGETHER.items():
        given = vars(args)[key]
        if given and not vars(args)[other]:
            flag = other.replace("_", "-")
            raise UserError(f"{key}={given!r} goes with --{flag}; give that too, or drop it")
    place = args.output or f"{str(first).rstrip('/')}-adapted"
    with contextlib.suppress(OSError):
        # `nice(0)` tells the present priority; one that is lower already stays.
        os.nice(max(0, _NICE - os.nice(0)))
    with (
        OutputFolder(place, "adapt", inputs_of(args)) as output,
        contextlib.ExitStack() as closing,
    ):
        adapter = Adapter(args, output.path)
        closing.callback(adapter.source.close)  # threads that read states end before the process
        state = adapter.state
        adapter.save()
        if args.watch:
            watch = Watch(args.server, args.api_key_env or "", output.path, state.watched)
            closing.callback(watch.close)
            adapter.watch = watch
            if args.metrics:
                closing.callback(FiguresPage(args.metrics, adapter.figures).close)
        print(f"serve {output.path / CURRENT}; following {log}", flush=True)
        ran = []
        while True:
            adapter.read()
            adapter.look()
            if adapter.due() and (record := adapter.round()):
                ran.append(record)
                show(record, args.share)
            if args.once:
                break
            adapter.account()
            time.sleep(_POLL_SECONDS)
            # On a CPU the process's own clock stands while it sleeps; elsewhere the wait must not
            # count.
            adapter.account(work=adapter.on_cpu)
        lines = f"{counted(state.read, 'answers')} read, {state.fresh} since the last round"
        failed = ""
        if state.unusable:
            failed = f"; {state.unusable} unusable lines, the last ones in {output.path / STATE}"
        print(f"{lines}{failed}; {max(state.allowance, 0):.1f} s of allowance left")
        keys = ("read", "unusable", "passed_over", "fresh", "failures", "allowance", "spent")
        current = output.path / CURRENT
        figures = {key: getattr(state, key) for key in keys}
        conclude(
            {**figures, "cost": adapter.cost, "rounds": ran, "serving": str(current.resolve())},
            [output.path],
            next_command("export", drafter=current),
        )
    return 0
