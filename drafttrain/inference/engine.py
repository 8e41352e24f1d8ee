"""The inference engine: draft, verify, commit; one continuous batch for every drafter, every tree,
and no drafter at all.

    prefill    target over the prompts of new sequences    -> first tokens (uncommitted roots), features for the drafter
    round      drafter.propose_all                         -> a tree below each sequence's root (and probes)
               target over all [root + nodes], packed      -> logits at each of them
               verify                                      -> accepted path + bonus token, which is the next root
               cache.commit, drafter.extend_all            -> both hold committed tokens only

Sequences are packed, not padded: a forward is [1, N] over the new tokens of all sequences, and only
attention separates the rows. So each sequence accepts its own number of tokens, finished ones
leave, and waiting prompts take their rows at no cost to the others. Without a drafter the trees are
empty and a round is a plain decoding step of the same code.

An `Engine` is the state of one call: its cache, its sequences, its captured passes. `Decoder`
(prompts to tokens, with or without a drafter) and `responses.ResponseEngine` (any number of
requests, for data) make one per call, so they may serve several threads and interleaved streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from collections.abc import Sequence as Items
from contextlib import closing
from itertools import accumulate

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.static_draft import DraftSteps
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.inference.adaptive import Adaptive, Pace, RoundReport
from drafttrain.inference.feedback import answer_probes, share_predictions
from drafttrain.inference.sequence import (
    Clock,
    Generation,
    Mark,
    Sequence,
    Stats,
    TextStream,
    check_stop,
    chunks,
    token_ids,
    token_limit,
)
from drafttrain.inference.static import Pass, TargetSteps
from drafttrain.inference.verify import ProcessedText, Verdict, Verifier, verify_batch
from drafttrain.ops.sampling import SamplingParams, argmax
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target import Target
from drafttrain.target.generation import LogitsRules
from drafttrain.target.snapshots import SnapshotCache
from drafttrain.values import Count, Seed, check

# Most tokens of one prefill forward: bounds activations and features for prompts of any length.
_CHUNK = 2048
Prompt = Tensor | Items[int]
Limit = int | list[int]  # of new tokens, one per prompt
NewTokens = tuple[Sequence, list[int]]
Observer = Callable[[int, TokenTree, Verdict, Tensor], None]


class Engine:
    """A continuous batch. Callers add sequences with `prefill`, advance all with `round`, and
    `release` finished ones.

    Args:
        target: the target.
        capacity: positions per row; `reserve` grows it. rows: most sequences at a time.
        plain: whether the argmax of the raw logits chooses every token: greedy without logits
            processors.
        drafter, spec, pace: as in `Decoder`; nothing is drafted without a drafter.
        graphs: see `TargetSteps.lease`. observer: see `Decoder`.
        capture: without a drafter, target states that `Sequence.states` collects; see
            `Target.forward`.

    Attributes:
        active: running sequences. free: unused rows.
        cache: keys and values of all rows. clock: of all timings.
    """

    def __init__(
        self,
        target: Target,
        capacity: int,
        rows: int,
        plain: bool,
        *,
        drafter: Drafter | None = None,
        spec: TreeSpec | None = None,
        pace: Pace | None = None,
        graphs: bool | None = None,
        capture: Items[int] = (),
        observer: Observer | None = None,
    ):
        self.target = target
        self.drafter = drafter
        self.pace = pace
        self.observer = observer
        self.spec = spec or TreeSpec.parse("none")
        self.active: list[Sequence] = []
        self.free, self._capture = list(range(rows)), tuple(capture)
        self._layers = drafter.feature_layers if drafter is not None else self._capture
        if drafter is not None:
            self._probes = drafter.probes
            self._predictions = drafter.predictions
        else:
            self._probes = 0
            self._predictions = 0
        self._no_tree = TokenTree.empty(target.device)
        snapshots = target.continuation is not None
        if snapshots:
            self._steps = None
        else:
            self._steps = TargetSteps.lease(target, graphs)
        self._drafts: DraftSteps | None = None
        self.cache: TreeCache | SnapshotCache
        if self._steps is None:
            if snapshots:
                self.cache = SnapshotCache(target, capacity, rows)
            else:
                self.cache = TreeCache(capacity, rows)
        else:
            self.cache = self._steps.open(capacity, rows, self._layers, choose=plain)
            if drafter is not None:
                self._drafts = self._steps.open_drafts(drafter, self.spec)
        self.clock = Clock(target.device, None if self._steps is None else self._steps.pool)
        self._charges: list[
            tuple[Items[Sequence], Mark, Mark]
        ] = []  # drafting whose time is not known yet

    @property
    def memory(self) -> tuple[int, str]:
        """Bytes of cache and CUDA graphs, and their description."""
        if self._steps is None:
            return (self.cache.nbytes, str(self.cache))
        return self._steps.memory

    @property
    def graph_failure(self) -> str:
        """Why the target's passes are not captured; empty unless a capture failed."""
        if self._steps is None:
            return ""
        return self._steps.failure

    def close(self) -> None:
        """Returns the captured passes to the target."""
        if self._steps is not None:
            self._steps.release()

    def reserve(self, capacity: int) -> None:
        """Grows the cache to `capacity` positions per row."""
        if self._steps is None:
            self.cache.reserve(capacity)
        else:
            self._steps.reserve(capacity)

    def join(self, sequence: Sequence) -> None:
        """Gives a sequence an empty row; `prefill` must follow."""
        sequence.row = self.free.pop(0)
        self.cache.clear(sequence.row)

    def release(self, sequence: Sequence) -> None:
        """Frees the row of a finished sequence."""
        self.free.append(sequence.row)

    def read(self, row: int, tokens: Tensor) -> list[Tensor]:
        """Appends tokens [n] to a row without predicting the next one; returns captured states per
        chunk.
        """
        states = []
        for part in tokens.split(_CHUNK):
            self.cache.open([(row, len(part))])
            out = self.target.forward(
                part[None],
                self._layers,
                self.cache.positions(part.device),
                self.cache,
            )
            self.cache.commit([range(len(part))])
            states.append(out.features[0].bfloat16())
        return states

    def prefill(self, sequences: list[Sequence]) -> Iterator[NewTokens]:
        """Reads the sequences' prompts, `_CHUNK` tokens per forward, and yields each one's first
        token.
        """
        begun = self.clock.now()
        for sequence in sequences:
            sequence.joined = begun
        self.active += sequences
        for pieces in chunks([len(sequence.prompt) for sequence in sequences], _CHUNK):
            parts = [(sequences[i], begin, end) for i, begin, end in pieces]
            sizes = [end - begin for _, begin, end in parts]
            self.cache.open(
                [(sequence.row, size) for (sequence, _, _), size in zip(parts, sizes, strict=True)]
            )
            ids = _join([sequence.prompt[begin:end] for sequence, begin, end in parts])  # [N]
            out = self.target.forward(
                ids[None],
                self._layers,
                self.cache.positions(ids.device),
                self.cache,
            )
            self.cache.commit([range(size) for size in sizes])
            news = self._first_tokens(parts, out.last_hidden[0])
            extended = []
            for (sequence, begin, end), features in zip(
                parts,
                out.features[0].split(sizes),
                strict=True,
            ):
                follow = torch.cat((sequence.prompt[begin + 1 : end + 1], sequence.root))
                # One more token leaves nothing to draft.
                wanted = sequence.speculate and sequence.limit > 2 and not sequence.stats.finish
                if self.drafter is not None and begin == 0 and wanted:
                    sequence.session = self.drafter.start(
                        sequence.prompt, len(sequence.prompt) + sequence.limit
                    )
                    if self._drafts is not None:
                        sequence.session.place(self._drafts, sequence.row)
                if sequence.session is not None and not sequence.stats.finish:
                    extended.append((sequence, follow, features))
                if self._capture:
                    sequence.states.append(features.bfloat16())
            self._extend(extended)
            yield from news
        self._drop_finished()

    def _first_tokens(
        self,
        parts: list[tuple[Sequence, int, int]],
        hidden: Tensor,
    ) -> list[NewTokens]:
        """First tokens of the sequences whose prompt is complete. parts: (sequence, begin, end);
        hidden [N, h] of all.
        """
        lasts = [end - 1 for end in accumulate(end - begin for _, begin, end in parts)]
        done = [i for i, (sequence, _, end) in enumerate(parts) if end == len(sequence.prompt)]
        sequences = [parts[i][0] for i in done]
        if not sequences:
            return []
        logits = self.target.head(hidden[[lasts[i] for i in done]])  # [len(done), v]
        verdicts = self._verify(sequences, [self._no_tree] * len(sequences), logits)
        moment = self.clock.now()
        news = []
        for sequence, verdict in zip(sequences, verdicts, strict=True):
            tokens = sequence.record(verdict, moment)
            sequence.stats.prefill_seconds = sequence.stats.total_seconds
            sequence.root = torch.tensor(tokens, device=hidden.device)
            news.append((sequence, tokens))
        return news

    def round(self) -> Iterator[NewTokens]:
        """One draft, one packed target pass and one verdict per active sequence; yields what each
        committed.
        """
        sequences = self.active
        clock = self.clock
        started = clock.now()
        if not sequences:
            return
        behind = 0
        if self.pace is not None:
            behind = sum(sequence.behind for sequence in sequences)
        if self.pace is None:
            spec = self.spec
        else:
            spec = self.pace.choose(len(sequences), behind)
        trees, begun_reading, begun_drafting, begun = self._draft(sequences, spec)
        layouts = self.cache.open(
            [(s.row, tree.parents) for s, tree in zip(sequences, trees, strict=True)]
        )
        ids: list[Tensor] = []
        for sequence, tree in zip(sequences, trees, strict=True):
            if len(tree):
                ids += (sequence.root, tree.tokens)
            else:
                ids += (sequence.root,)
        features, logits, choices = self.run_target(_join(ids))
        passed = clock.mark()
        sizes = [layout.count for layout in layouts]
        verdicts = self._verify(sequences, trees, logits, choices)  # waits for the device
        share = clock.between(begun, passed) / len(sequences)
        self._settle()
        if self.observer is not None:
            for sequence, *seen in zip(
                sequences,
                trees,
                verdicts,
                logits.split(sizes),
                strict=True,
            ):
                self.observer(sequence.index, *seen)
        if any(sequence.probed for sequence in sequences):
            answer_probes(sequences, argmax(logits) if choices is None else choices, sizes)
        if self._predictions:
            share_predictions(sequences, trees, logits, self._predictions)
        kept = [[0, *(node + 1 for node in verdict.path)] for verdict in verdicts]
        self.cache.commit(kept)
        moment = clock.now()
        news = []
        for sequence, tree, verdict in zip(sequences, trees, verdicts, strict=True):
            tokens = sequence.record(verdict, moment)
            sequence.count(len(verdict.path), len(tokens), tree.drafted_depth, share)
            news.append((sequence, tokens))
        self._advance(news, kept, sizes, features)
        if self.pace is not None:
            judged = zip(sequences, trees, verdicts, strict=True)
            drafted = [
                (tree, verdict.path)
                for s, tree, verdict in judged
                if s.session is not None and len(tree)
            ]
            seconds = clock.now() - started
            read_seconds = clock.between(begun_reading, begun_drafting)
            draft_seconds = clock.between(begun_drafting, begun)
            read = behind if read_seconds else 0
            sizes_and_times = len(sequences), sum(sizes), seconds, draft_seconds, read, read_seconds
            self.pace.observe(RoundReport(spec, *sizes_and_times, drafted))
        yield from news
        self._drop_finished()

    def run_target(self, ids: Tensor) -> Pass:
        """The target over the roots and nodes [N] that `cache.open` has announced, captured or
        dynamic.
        """
        if self._steps is None:
            out = None
        else:
            out = self._steps.run(ids)
        if out is not None:
            return out
        places = self.cache.positions(ids.device)
        return Pass(*self.target.score(ids[None], self._layers, places, self.cache), choices=None)

    def _verify(
        self,
        sequences: list[Sequence],
        trees: list[TokenTree],
        logits: Tensor,
        choices: Tensor | None = None,
    ) -> list[Verdict]:
        """A verdict per sequence; logits [N, v] at every root and its nodes, one sequence after the
        other.
        """
        return verify_batch([sequence.verifier for sequence in sequences], trees, logits, choices)

    def _advance(
        self,
        news: list[NewTokens],
        kept: list[list[int]],
        sizes: list[int],
        features: Tensor,
    ) -> None:
        """Sets the next root of sequences that continue, and keeps committed tokens and features
        for their sessions.

        Args:
            news: sequences with their committed tokens. kept: new tokens of the pass whose features
                those follow.
            sizes: new tokens of each sequence in the pass. features: [N, f*h] of all.
        """
        if self._capture:
            # The pass may own the features, and overwrite them when it is replayed. There is no
            # drafter, so every sequence has one new token.
            states = features.to(torch.bfloat16, copy=True)  # [N, f*h]
            for (sequence, _), state in zip(news, states.split(1), strict=True):
                sequence.states.append(state)
        going = [i for i, (sequence, _) in enumerate(news) if not sequence.stats.finish]
        numbers = [token for i in going for token in news[i][1]]
        count = len(numbers)
        alone = len(going) == 1
        drafting = any(news[i][0].session is not None for i in going)
        if drafting:
            starts = [0, *accumulate(sizes)]
            numbers += [starts[i] + node for i in going for node in kept[i]]
        uploaded = torch.tensor(numbers).to(features.device, non_blocking=True)  # one transfer
        tokens = uploaded[:count]
        if drafting:
            features = features.index_select(0, uploaded[count:])  # [count, f*h]
        extended = []
        begin = 0
        for i in going:
            sequence = news[i][0]
            end = begin + len(news[i][1])
            if count == 1:
                sequence.root = tokens
            else:
                sequence.root = tokens[end - 1 : end]
            if sequence.session is not None:
                if alone:
                    own = (tokens, features)
                else:
                    own = (tokens[begin:end], features[begin:end])
                extended.append((sequence, *own))
            begin = end
        self._extend(extended)

    def _drop_finished(self) -> None:
        self.active = [sequence for sequence in self.active if not sequence.stats.finish]

    # -- drafter -----------------------------------------------------------------------------------

    def _draft(
        self,
        sequences: list[Sequence],
        spec: TreeSpec,
    ) -> tuple[list[TokenTree], Mark, Mark, Mark]:
        """A tree per sequence, perhaps empty; and marks before the sessions read, before they
        draft, and behind.
        """
        drafting = [s for s in sequences if s.session is not None and s.left > 1]
        begun = self.clock.mark()
        if self.drafter is None or spec.shape == "none" or not drafting:
            return [self._no_tree] * len(sequences), begun, begun, begun
        read = self._read_pending(drafting) or begun
        sessions = [sequence.session for sequence in drafting]
        samplers = [sequence.verifier.sampler for sequence in drafting]
        drafted = self.drafter.propose_all(sessions, [spec] * len(drafting), samplers)
        if self._probes:  # probes are merged on the host: one transfer each way for all sequences
            drafted = TokenTree.moved(drafted, torch.device("cpu"))
        trees = {}
        for sequence, tree in zip(drafting, drafted, strict=True):
            tree = tree.prune(sequence.left - 1, spec.cut)
            if self._probes and sequence.session is not None:
                tree, sequence.probed = tree.with_probes(
                    *sequence.session.probe(), sequence.left - 1
                )
            trees[sequence.row] = tree
        if self._probes:
            trees = dict(
                zip(trees, TokenTree.moved([*trees.values()], self.target.device), strict=True)
            )
        done = self.clock.mark()
        self._charges.append((drafting, read, done))
        return [trees.get(sequence.row, self._no_tree) for sequence in sequences], begun, read, done

    def _extend(self, news: list[tuple[Sequence, Tensor, Tensor]]) -> None:
        """Keeps committed tokens [m] and features [m, f*h] for the sessions.

        A session reads them before its next proposal, so that rounds without drafting cost nothing;
        or once they fill a chunk.
        """
        for sequence, tokens, features in news:
            sequence.pending.append((tokens, features))
        full = [sequence for sequence, _, _ in news if sequence.behind >= _CHUNK]
        if full:
            self._read_pending(full)

    def _read_pending(self, sequences: list[Sequence]) -> Mark | None:
        """Lets the sessions read what was committed since their last proposal; a mark behind, None
        if there was nothing.
        """
        sequences = [sequence for sequence in sequences if sequence.pending]
        if self.drafter is None or not sequences:
            return None
        begun = self.clock.mark()
        news = [
            [_join(parts) for parts in zip(*sequence.pending, strict=True)]
            for sequence in sequences
        ]
        self.drafter.extend_all(
            [sequence.session for sequence in sequences], *zip(*news, strict=True)
        )
        for sequence in sequences:
            sequence.pending = []
        done = self.clock.mark()
        self._charges.append((sequences, begun, done))
        return done

    def _settle(self) -> None:
        """Adds the time of drafting to the sequences' records, once the device has passed its
        marks.
        """
        for sequences, begun, done in self._charges:
            for sequence in sequences:
                sequence.stats.draft_seconds += self.clock.between(begun, done) / len(sequences)
        self._charges = []


class Decoder:
    """Continues prompts with a target and a drafter; several at a time share every forward.

    Holds no state of a call: one decoder may serve several threads and interleaved streams.

    Args:
        target: any Target; `target.pack()` it first for speed on a CPU.
        drafter: bound to the target, or None for plain autoregressive decoding.
        spec: the tree that a round drafts; chain:3 unless given, `none` decodes plainly.
        sampling: greedy unless given.
        eos_ids: tokens that end a sequence; the target's own unless given.
        stop: strings that end a sequence; its tokens then end with the one that completes the
            string.
        max_rows: most sequences at a time; the others wait for a free row.
        pace: chooses each round's tree, none larger than `spec`; an `Adaptive` one for an adaptive
            spec.
        graphs: False runs rounds on a GPU without CUDA graphs; see `TargetSteps.lease`.
        rules: how logits are processed; as the target's generation_config says unless given. A
            repetition penalty in `sampling` replaces theirs.

    Attributes:
        cache: of the latest call. memory: bytes and description of the largest one so far, its CUDA
            graphs included.
        capture_seconds: that the latest call spent on CUDA graphs; no record counts them.
        observer: called with each round's (index of the prompt, tree, verdict, logits [n+1, v]);
            None by default.

    Raises:
        UserError: max_rows below 1, stop strings without a tokenizer, or a spec that samples tokens
            with greedy decoding.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        spec: TreeSpec | None = None,
        sampling: SamplingParams | None = None,
        eos_ids: Collection[int] | None = None,
        stop: str | Items[str] = (),
        max_rows: int = 1,
        pace: Pace | None = None,
        graphs: bool | None = None,
        rules: LogitsRules | None = None,
    ):
        self.target, self.spec = target.require_layers(), spec or TreeSpec.parse("chain:3")
        if self.spec.shape == "none":
            self.drafter = None
        else:
            self.drafter = drafter
        self.pace = pace or (
            Adaptive(self.spec) if self.drafter is not None and self.spec.adaptive else None
        )
        self.sampling = sampling or SamplingParams()
        self.spec.check(self.sampling)
        self.rules = target.generation.rules_for(self.sampling, rules)
        self.eos_ids = frozenset(target.eos_ids if eos_ids is None else eos_ids)
        self.stop, self.max_rows = check_stop(stop, target), check("max_rows", max_rows, Count)
        self.cache: TreeCache | SnapshotCache = TreeCache(0)
        self.graphs, self.capture_seconds, self.memory = graphs, 0.0, (0, str(self.cache))
        self.observer: Observer | None = None

    def generate(
        self,
        prompts: Items[Prompt],
        *,
        max_new_tokens: Limit,
        seed: int = 0,
        speculate: Items[bool] | None = None,
    ) -> list[Generation]:
        """The continuation of each prompt, in the prompts' order. See `stream`."""
        made = [Generation([], Stats()) for _ in prompts]
        stats = [each.stats for each in made]
        most = max_new_tokens
        for index, tokens in self.stream(
            prompts,
            max_new_tokens=most,
            seed=seed,
            stats=stats,
            speculate=speculate,
        ):
            made[index].tokens += tokens
        return made

    def stream(
        self, prompts: Items[Prompt], *, max_new_tokens: Limit, seed: int = 0, stats: Items[Stats] | None = None,
        speculate: Items[bool] | None = None,
    ) -> Generator[tuple[int, list[int]]]:  # fmt: skip
        """Yields (index of the prompt, new tokens) as they are committed.

        Args:
            prompts: token ids, [L] each, without padding (see `strip_padding`).
            max_new_tokens: upper limit, or a list with one per prompt; the target's context length
                limits it further.
            seed: prompt i samples with seed + i, so its tokens do not depend on the batch. In exact
                arithmetic the same seed gives the same tokens with any drafter and any spec that
                does not sample (`@sample`).
            stats: one per prompt, filled during the call.
            speculate: per prompt, False decodes it plainly; all True unless given.

        Raises:
            UserError: an empty prompt, one that fills the target's context, or max_new_tokens below
                1.
        """
        sequences = []
        seed = check("seed", seed, Seed)
        for index, ids in enumerate(prompts):
            try:
                prompt = token_ids(self.target, ids)
                if isinstance(max_new_tokens, list):
                    most = max_new_tokens[index]
                else:
                    most = max_new_tokens
                limit = token_limit(self.target, len(prompt), most)
            except UserError as error:
                raise UserError(
                    f"prompt {index}: {error}" if len(prompts) > 1 else str(error)
                ) from error
            numbers = torch.Generator().manual_seed(seed + index)
            processed = ProcessedText.of(self.rules, self.target, prompt, limit, self.eos_ids)
            verifier = Verifier(self.sampling, self.eos_ids, numbers, processed)
            if self.stop:
                text = TextStream(self.target.tokenizer, self.stop)
            else:
                text = None
            if stats is not None:
                record = stats[index]
            else:
                record = Stats()
            drafting = speculate is None or speculate[index]
            sequences.append(Sequence(index, prompt, limit, verifier, text, record, drafting))
        return self._run(sequences)

    @torch.no_grad()
    def _run(self, sequences: list[Sequence]) -> Generator[tuple[int, list[int]]]:
        # Leased here, not in `stream`: a generator that never starts is never closed.
        margin = 0
        if self.drafter is not None:
            margin = self.spec.most + self.drafter.probes
        capacity = max((len(s.prompt) + s.limit for s in sequences), default=0) + margin
        engine = Engine(
            self.target,
            capacity,
            min(self.max_rows, len(sequences)),
            self.sampling.greedy and not self.rules,
            drafter=self.drafter,
            spec=self.spec,
            pace=self.pace,
            graphs=self.graphs,
            observer=self.observer,
        )
        self.cache, waiting, before = engine.cache, deque(sequences), engine.clock.captured
        with closing(engine):
            while waiting or engine.active:
                joining = [waiting.popleft() for _ in range(min(len(engine.free), len(waiting)))]
                for sequence in joining:
                    engine.join(sequence)
                for step in (engine.prefill(joining) if joining else (), engine.round()):
                    for sequence, tokens in step:
                        yield sequence.index, tokens
                        if sequence.stats.finish:
                            engine.release(sequence)
                self.capture_seconds = engine.clock.captured - before
            self.memory = max(self.memory, engine.memory)


def _join(parts: Items[Tensor]) -> Tensor:
    """Concatenates parts; a single part needs no copy."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts))
