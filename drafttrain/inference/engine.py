"""The inference engine: draft, verify, commit, in one continuous batch, with or without a drafter.

    prefill    target over the prompts of new sequences    -> first tokens (uncommitted roots), features for the drafter
               (each prompt with images in one forward)
    round      drafter.propose_all                         -> a tree below each sequence's root (and probes)
               target over all [root + nodes], packed      -> logits at each of them
               verify                                      -> accepted path + bonus token, which is the next root
               cache.commit, drafter.extend_all            -> both hold committed tokens only

Sequences are packed, not padded: a forward is [1, N] over the new tokens of all sequences, and only
attention separates the rows. So each sequence accepts its own number of tokens, finished sequences
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
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from drafttrain.batch import TargetOutput, TokenTree, cat
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
    images_of,
    token_ids,
    token_limit,
)
from drafttrain.inference.static import Pass, TargetSteps
from drafttrain.inference.verify import (
    ProcessedText,
    Verdict,
    Verifier,
    next_tokens,
    verdict_of,
    verify_batch,
)
from drafttrain.ops.sampling import SamplingParams, argmax
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target import Target
from drafttrain.target.generation import LogitsRules
from drafttrain.target.sight import ImagePrompt
from drafttrain.target.snapshots import SnapshotCache
from drafttrain.values import Count, Seed, check

# Most tokens of one prefill forward: bounds activations and features for prompts of any length.
_CHUNK = 2048
Prompt = Tensor | Items[int] | ImagePrompt
Limit = int | list[int]  # of new tokens; a list has one per prompt
NewTokens = tuple[Sequence, list[int]]
Piece = tuple[Sequence, int, int]  # with begin and end in its prompt
# index of the prompt, tree, verdict, logits [n+1, v]
Observer = Callable[[int, TokenTree, Verdict, Tensor], None]


@dataclass
class _Launched:
    """A pass without trees that the device may still compute.

    Attributes:
        tokens: [b] the next token of each sequence. read: the same on the host, behind `passed`.
        states: [b, f*h] bfloat16 of the captured layers.
    """

    sequences: list[Sequence]
    tokens: Tensor
    read: Tensor
    states: Tensor
    begun: Mark
    passed: Mark


class Kept(NamedTuple):
    """A finished sequence whose row the engine still holds, and its prompt and answer [n] int64."""

    engine: Engine
    sequence: Sequence
    tokens: Tensor


class Engine:
    """A continuous batch.

    Callers add sequences with `prefill`, advance all with `round`, and `release` finished ones.

    Args:
        target: the target.
        capacity: positions per row; `reserve` grows it.
        rows: most sequences at a time.
        plain: whether the argmax of the raw logits chooses every token: greedy without logits
            processors.
        drafter, spec, pace: as in `Decoder`; nothing is drafted without a drafter.
        graphs: see `TargetSteps.lease`.
        observer: see `Decoder`.
        keep: sessions read the last tokens of finished sequences too, from which `resume` goes on;
            no effect where passes are captured.
        capture: without a drafter, target states that `Sequence.states` collects; see
            `Target.forward`.

    Attributes:
        active: running sequences.
        free: unused rows.
        cache: keys and values of all rows.
        clock: of all timings.
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
        keep: bool = False,
    ):
        self.target = target
        self.drafter = drafter
        self.pace = pace
        self.observer = observer
        if spec is None:
            spec = TreeSpec.parse("none")
        self.spec = spec
        self.active: list[Sequence] = []
        self.free = list(range(rows))
        self._capture = tuple(capture)
        self._no_tree = TokenTree.empty(target.device)
        # What the drafter reads: target layers, probes, predictions.
        self._layers = self._capture
        self._probes = 0
        self._predictions = 0
        if drafter is not None:
            self._layers = drafter.feature_layers
            self._probes = drafter.probes
            self._predictions = drafter.predictions
        # The cache, and captured passes on a GPU.
        self._steps: TargetSteps | None = None
        self._drafts: DraftSteps | None = None
        self.cache: TreeCache | SnapshotCache
        pool = None
        if target.continuation is not None:
            self.cache = SnapshotCache(target, capacity, rows)
        else:
            self._steps = TargetSteps.lease(target, graphs)
            if self._steps is None:
                self.cache = TreeCache(capacity, rows, target.dtype)
            else:
                self.cache = self._steps.open(
                    capacity,
                    rows,
                    self._layers,
                    choose=plain,
                )
                pool = self._steps.pool
                if drafter is not None:
                    self._drafts = self._steps.open_drafts(drafter, self.spec)
        self.keep = keep and self._steps is None  # which belong to the next call
        self.clock = Clock(target.device, pool)
        # Drafting whose time is not known yet: sequences, mark before, mark behind.
        self._charges: list[tuple[Items[Sequence], Mark, Mark]] = []
        self._launched: _Launched | None = None  # the next round's pass

    @property
    def memory(self) -> tuple[int, str]:
        """Bytes of cache and CUDA graphs, and their description."""
        if self._steps is None:
            return self.cache.nbytes, str(self.cache)
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

    def resume(self, kept: Kept, sequence: Sequence, capacity: int) -> bool:
        """Gives a sequence the row of a finished one whose text begins as its prompt does.

        `prefill` must follow, and reads the rest of the prompt. A drafter's session continues too,
        or goes back to where the texts part.

        Args:
            capacity: positions that the sequence needs.

        Returns:
            False, with nothing done, if they begin differently, or what is held cannot go back.
        """
        prompt = sequence.prompt
        # Other images have the same placeholders.
        if kept.sequence.digests != sequence.digests:
            return False
        equal = kept.tokens[: len(prompt)] == prompt[: len(kept.tokens)]
        shared = int(equal.cumprod(0).sum())  # tokens
        row = kept.sequence.row
        stored = self.cache.lengths[row]
        # The prefill predicts from the prompt's last token, so it must read at least that one.
        held = min(shared, stored, len(prompt) - 1)
        whole = len(kept.tokens) - 1  # tokens whose features are known
        if self.drafter is not None and shared > whole:
            held = whole
        elif self.drafter is not None:
            # Each feature is read with the token behind it.
            held = min(held, shared - 1, whole - kept.sequence.behind)
        exact = isinstance(self.cache, SnapshotCache)  # states that cannot go back
        if held < 1 or (held < stored and exact):
            return False
        # Images are read with all tokens before them: what is left to read must be text.
        if held < kept.sequence.seen:
            return False
        session = kept.sequence.session
        pending = kept.sequence.pending
        if self.drafter is not None and held < whole:
            pending = []
            if session is not None:
                longest = len(prompt) + sequence.limit
                session = self.drafter.rewind(session, prompt, held, longest)
        if self.drafter is not None and session is None:
            return False
        self.reserve(capacity)
        self.free.remove(row)
        self.cache.lengths[row] = held  # what the row holds beyond is forgotten
        sequence.row = row
        sequence.prompt = prompt[held:]
        sequence.images = None
        sequence.seen = kept.sequence.seen
        if sequence.drafts:
            sequence.session = session
            sequence.pending = pending
        return True

    def release(self, sequence: Sequence) -> None:
        """Frees the row of a finished sequence."""
        self.free.append(sequence.row)

    def read(self, row: int, tokens: Tensor) -> list[Tensor]:
        """Appends tokens [n] to a row without predicting the next one.

        Returns:
            Captured states [m, f*h] bfloat16 of each chunk.
        """
        states = []
        for part in tokens.split(_CHUNK):
            out = self._append([row], [part])
            states.append(out.features[0].bfloat16())
        return states

    def _append(self, rows: list[int], tokens: list[Tensor]) -> TargetOutput:
        """The target over more tokens [n] of each row, packed; all of them are committed."""
        sizes = [len(own) for own in tokens]
        self.cache.open(list(zip(rows, sizes, strict=True)))
        ids = cat(tokens)  # [N]
        positions = self.cache.positions(ids.device)
        out = self.target.forward(
            ids[None],
            self._layers,
            positions,
            self.cache,
        )
        self.cache.commit([range(size) for size in sizes])
        return out

    def prefill(self, sequences: list[Sequence]) -> Iterator[NewTokens]:
        """Reads the sequences' prompts, `_CHUNK` tokens per forward; yields each one's first token."""
        begun = self.clock.now()
        for sequence in sequences:
            sequence.joined = begun
        self.active += sequences
        for parts in _pieces(sequences):
            # The target reads the chunk: pieces of several prompts, packed, or a prompt with images.
            sizes = [end - begin for _, begin, end in parts]
            images = parts[0][0].images
            if images is not None:
                out = self.target.prefill_images(
                    images,
                    self._layers,
                    self.cache,
                    parts[0][0].row,
                )
            else:
                out = self._append(
                    [sequence.row for sequence, _, _ in parts],
                    [sequence.prompt[begin:end] for sequence, begin, end in parts],
                )
            news = self._first_tokens(parts, out.last_hidden[0])

            # Sessions begin with their prompt's first piece, and read each piece's next tokens.
            extended = []
            features_of = out.features[0].split(sizes)
            for (sequence, begin, end), features in zip(parts, features_of, strict=True):
                # [m] the token after each feature. The root is empty until the prompt's last piece
                # is read.
                follow = torch.cat((sequence.prompt[begin + 1 : end + 1], sequence.root))
                # A finished sequence may be resumed, by a session that has read all of it.
                going = self.keep or not sequence.stats.finish
                wanted = begin == 0 and sequence.drafts and going
                if self.drafter is not None and wanted and sequence.session is None:
                    longest = len(sequence.prompt) + sequence.limit
                    sequence.session = self.drafter.start(sequence.prompt, longest)
                    if self._drafts is not None:
                        sequence.session.place(self._drafts, sequence.row)
                if sequence.session is not None and going:
                    extended.append((sequence, follow, features))
                if self._capture:
                    sequence.states.append(features.bfloat16())
            self._extend(extended)
            yield from news
        self._drop_finished()

    def _first_tokens(
        self,
        parts: list[Piece],
        hidden: Tensor,
    ) -> list[NewTokens]:
        """First tokens of the sequences whose prompt is complete.

        Args:
            parts: (sequence, begin, end). hidden: [N, h] of all parts.
        """
        sequences: list[Sequence] = []
        lasts: list[int] = []  # each one's last token among the N
        read = 0
        for sequence, begin, end in parts:
            read += end - begin
            if end == len(sequence.prompt):
                sequences.append(sequence)
                lasts.append(read - 1)
        if not sequences:
            return []
        logits = self.target.head(hidden[lasts])  # [sequences, v]
        verifiers = [sequence.verifier for sequence in sequences]
        verdicts = verify_batch(verifiers, [self._no_tree] * len(sequences), logits)
        moment = self.clock.now()
        news = []
        for sequence, verdict in zip(sequences, verdicts, strict=True):
            tokens = sequence.record(verdict, moment)
            sequence.stats.prefill_seconds = sequence.stats.total_seconds
            sequence.root = torch.tensor(tokens, device=hidden.device)
            news.append((sequence, tokens))
        return news

    def round(self) -> Iterator[NewTokens]:
        """One draft, one packed target pass and one verdict per active sequence.

        Yields:
            Each sequence with the tokens that it committed.
        """
        if not self.active:
            self._launched = None  # all of its sequences have ended
        elif self._launches_ahead(self.active[0].verifier):
            yield from self._round_ahead()
        else:
            yield from self._round_of_trees()

    def _round_of_trees(self) -> Iterator[NewTokens]:
        sequences = self.active
        clock = self.clock
        started = clock.now()

        # Draft.
        behind = 0  # committed tokens that sessions read before they draft
        spec = self.spec
        if self.pace is not None:
            behind = sum(sequence.behind for sequence in sequences)
            spec = self.pace.choose(len(sequences), behind)
        trees, begun_reading, begun_drafting, begun = self._draft(sequences, spec)

        # The target reads all roots and nodes.
        opened = []
        ids: list[Tensor] = []
        sizes: list[int] = []
        for sequence, tree in zip(sequences, trees, strict=True):
            opened.append((sequence.row, tree.parents))
            ids.append(sequence.root)
            if len(tree):
                ids.append(tree.tokens)
            sizes.append(1 + len(tree))
        self.cache.open(opened)
        out = self.run_target(cat(ids))
        passed = clock.mark()

        # Verify, which waits for the device, and pass on what the target said.
        verifiers = [sequence.verifier for sequence in sequences]
        verdicts = verify_batch(verifiers, trees, out.logits, out.choices)
        # The tokens have arrived, so the device has passed both marks.
        share = clock.between(begun, passed) / len(sequences)
        self._settle()
        if self.observer is not None:
            seen = zip(
                sequences,
                trees,
                verdicts,
                out.logits.split(sizes),
                strict=True,
            )
            for sequence, tree, verdict, own in seen:
                self.observer(sequence.index, tree, verdict, own)
        if any(sequence.probed for sequence in sequences):
            chosen = argmax(out.logits) if out.choices is None else out.choices
            answer_probes(sequences, chosen, sizes)
        if self._predictions:
            share_predictions(sequences, trees, out.logits, self._predictions)

        # Commit the root and the accepted path of each tree.
        # In its part of the pass, the root is token 0 and node i is token i + 1.
        kept = [[0, *(node + 1 for node in verdict.path)] for verdict in verdicts]
        self.cache.commit(kept)
        moment = clock.now()
        news = []
        for sequence, tree, verdict in zip(sequences, trees, verdicts, strict=True):
            tokens = sequence.record(verdict, moment)
            sequence.count(
                len(verdict.path),
                len(tokens),
                tree.drafted_depth,
                share,
            )
            news.append((sequence, tokens))
        self._advance(news, kept, sizes, out.features)

        if self.pace is not None:
            drafted = []
            for sequence, tree, verdict in zip(sequences, trees, verdicts, strict=True):
                if sequence.session is not None and len(tree):
                    drafted.append((tree, verdict.path))
            # Nothing was read if no sequence could draft, however far the sessions are behind.
            read_seconds = clock.between(begun_reading, begun_drafting)
            report = RoundReport(
                spec=spec,
                rows=len(sequences),
                new_tokens=sum(sizes),
                seconds=clock.now() - started,
                draft_seconds=clock.between(begun_drafting, begun),
                read=behind if read_seconds else 0,
                read_seconds=read_seconds,
                drafted=drafted,
            )
            self.pace.observe(report)
        yield from news
        self._drop_finished()

    def _launches_ahead(self, verifier: Verifier) -> bool:
        """Whether the device chooses the next tokens alone, so that a pass needs nothing read back."""
        if self._steps is None or self.drafter is not None or self.observer is not None:
            return False
        # Sampling needs its random numbers before the pass: only `uniforms` are known by then.
        known = verifier.sampler.params.greedy or verifier.uniforms is not None
        return known and verifier.text is None

    def _launch(self, sequences: list[Sequence]) -> _Launched:
        """Queues the pass over the sequences' roots, which are committed with it."""
        begun = self.clock.mark()
        self.cache.open([(sequence.row, ()) for sequence in sequences])
        out = self.run_target(cat([sequence.root for sequence in sequences]))
        self.cache.commit([[0]] * len(sequences))
        tokens = next_tokens([s.verifier for s in sequences], out.logits, out.choices)
        # The next pass overwrites this one's outputs.
        states = out.features.to(torch.bfloat16, copy=True)
        read = tokens.to("cpu", non_blocking=True)
        return _Launched(sequences, tokens, read, states, begun, self.clock.mark())

    def _round_ahead(self) -> Iterator[NewTokens]:
        """A round without trees whose successor is queued before its tokens are read.

        So the device computes while the host records. The queued pass holds all sequences that may
        go on; the part of one that ends with the tokens read here is dropped.
        """
        launched = self._launched
        if launched is None:
            launched = self._launch(self.active)
        unread = set(launched.sequences)  # sequences whose newest token is on the device only
        for place, sequence in enumerate(launched.sequences):
            sequence.root = launched.tokens[place : place + 1]
        going = []
        # A token in flight is the last one of a sequence that has one left.
        for sequence in self.active:
            if sequence.left > 1 or sequence not in unread:
                going.append(sequence)
        self._launched = None
        unread = set()
        # Every row needs a slot for one more token.
        lengths = self.cache.lengths
        if going and max(lengths[it.row] for it in going) < self.cache.capacity:
            self._launched = self._launch(going)
            unread = set(going)

        launched.passed.wait()
        share = self.clock.between(launched.begun, launched.passed) / len(launched.sequences)
        moment = self.clock.now()
        news = []
        for place, (sequence, token) in enumerate(
            zip(launched.sequences, launched.read.tolist(), strict=True)
        ):
            if sequence.stats.finish:  # it ended while this pass was queued
                continue
            tokens = sequence.record(verdict_of(sequence.verifier, token), moment)
            sequence.count(0, len(tokens), 0, share)
            if self._capture:
                sequence.states.append(launched.states[place : place + 1])
            if sequence.stats.finish and sequence in unread:
                lengths[sequence.row] -= 1  # of the root that the queued pass has committed
            news.append((sequence, tokens))
        yield from news
        self._drop_finished()

    def run_target(self, ids: Tensor) -> Pass:
        """The target over the roots and nodes [N] that `cache.open` has announced.

        The pass is captured or dynamic.
        """
        if self._steps is not None:
            out = self._steps.run(ids)
            if out is not None:
                return out
        features, logits = self.target.score(ids[None], self._layers, self.cache)
        return Pass(features, logits, choices=None)

    def _advance(
        self,
        news: list[NewTokens],
        kept: list[list[int]],
        sizes: list[int],
        features: Tensor,
    ) -> None:
        """Sets the next roots, and keeps committed tokens and features for the sessions.

        Args:
            news: sequences with their committed tokens.
            kept: new tokens of the pass whose features the committed tokens follow.
            sizes: new tokens of each sequence in the pass.
            features: [N, f*h] of all.
        """
        if self._capture:
            # The pass may own the features, and overwrite them when it is replayed. There is no
            # drafter, so every sequence has one new token.
            states = features.to(torch.bfloat16, copy=True)  # [N, f*h]
            for (sequence, _), state in zip(news, states.split(1), strict=True):
                sequence.states.append(state)
        going: list[NewTokens] = []  # sequences that continue
        numbers: list[int] = []  # their committed tokens
        places: list[int] = []  # where the features before those are
        drafting = False
        start = 0  # of the sequence's new tokens in the pass
        for (sequence, own), nodes, size in zip(news, kept, sizes, strict=True):
            if self.keep or not sequence.stats.finish:
                going.append((sequence, own))
                numbers += own
                # A stop string may have cut what a finished sequence committed.
                places += [start + node for node in nodes[: len(own)]]
                if sequence.session is not None:
                    drafting = True
            start += size
        count = len(numbers)
        if drafting:
            numbers += places
        uploaded = torch.tensor(numbers).to(features.device, non_blocking=True)  # one transfer
        tokens = uploaded[:count]
        if drafting:
            features = features.index_select(0, uploaded[count:])  # [count, f*h]

        extended = []
        begin = 0
        for sequence, own in going:
            end = begin + len(own)
            # The last committed token is the next root; one token needs no slice.
            sequence.root = tokens if count == 1 else tokens[end - 1 : end]
            if sequence.session is not None:
                if len(going) == 1:
                    extended.append((sequence, tokens, features))
                else:
                    extended.append((sequence, tokens[begin:end], features[begin:end]))
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
        """Drafts for every sequence that may still take more than one token.

        Returns:
            A tree per sequence, perhaps empty; and marks before the sessions read, before they
            draft, and behind.
        """
        # With one token left, the bonus token ends the sequence.
        drafting = [s for s in sequences if s.session is not None and s.left > 1]
        begun = self.clock.mark()
        if self.drafter is None or spec.shape == "none" or not drafting:
            return [self._no_tree] * len(sequences), begun, begun, begun
        read = self._read_pending(drafting)
        if read is None:
            read = begun
        sessions = [sequence.session for sequence in drafting]
        samplers = [sequence.verifier.sampler for sequence in drafting]
        drafted = self.drafter.propose_all(
            sessions,
            spec,
            samplers,
        )
        if self._probes:  # probes are merged on the host: one transfer each way for all sequences
            drafted = TokenTree.moved(drafted, torch.device("cpu"))
        pruned = []
        # The bonus token takes one of the tokens that are left.
        for sequence, tree in zip(drafting, drafted, strict=True):
            tree = tree.prune(sequence.left - 1, spec.cut)
            if self._probes and sequence.session is not None:
                tokens, parents = sequence.session.probe()
                tree, sequence.probed = tree.with_probes(
                    tokens,
                    parents,
                    sequence.left - 1,
                )
            pruned.append(tree)
        if self._probes:
            pruned = TokenTree.moved(pruned, self.target.device)
        trees = {sequence.row: tree for sequence, tree in zip(drafting, pruned, strict=True)}
        done = self.clock.mark()
        self._charges.append((drafting, read, done))
        return [trees.get(sequence.row, self._no_tree) for sequence in sequences], begun, read, done

    def _extend(self, news: list[tuple[Sequence, Tensor, Tensor]]) -> None:
        """Keeps committed tokens [m] and features [m, f*h] for the sessions.

        A session reads them before its next proposal, so that rounds without drafting cost nothing,
        or once they fill a chunk.
        """
        for sequence, tokens, features in news:
            sequence.pending.append((tokens, features))
        full = [sequence for sequence, _, _ in news if sequence.behind >= _CHUNK]
        if full:
            self._read_pending(full)

    def _read_pending(self, sequences: list[Sequence]) -> Mark | None:
        """Lets the sessions read what was committed since their last proposal.

        Returns:
            A mark behind; None if there was nothing to read.
        """
        sequences = [sequence for sequence in sequences if sequence.pending]
        if self.drafter is None or not sequences:
            return None
        begun = self.clock.mark()
        sessions = []
        tokens = []
        features = []
        for sequence in sequences:
            sessions.append(sequence.session)
            tokens.append(cat([own for own, _ in sequence.pending]))  # [m]
            features.append(cat([own for _, own in sequence.pending]))  # [m, f*h]
            sequence.pending = []
        self.drafter.extend_all(sessions, tokens, features)
        done = self.clock.mark()
        self._charges.append((sequences, begun, done))
        return done

    def _settle(self) -> None:
        """Adds the time of drafting to the records; the device must have passed its marks."""
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
        keep: after a call with one prompt, keep its keys and values and its drafter's, so that a
            next call whose prompt begins as that text does (the next turn of a chat, another
            request behind one system prompt) reads only what is new. For one thread; no effect
            where passes are captured in CUDA graphs.

    Attributes:
        cache: of the latest call.
        memory: bytes and description of the largest cache so far, its CUDA graphs included.
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
        keep: bool = False,
    ):
        self.target = target.require_layers()
        self.spec = TreeSpec.parse("chain:3") if spec is None else spec
        self.drafter = None if self.spec.shape == "none" else drafter
        if pace is None and self.drafter is not None and self.spec.adaptive:
            pace = Adaptive(self.spec)
        self.pace = pace
        self.sampling = SamplingParams() if sampling is None else sampling
        self.spec.check(self.sampling)
        self.rules = target.generation.rules_for(self.sampling, rules)
        self.eos_ids = frozenset(target.eos_ids if eos_ids is None else eos_ids)
        self.stop = check_stop(stop, target)
        self.max_rows = check("max_rows", max_rows, Count)
        self.graphs = graphs
        self.cache: TreeCache | SnapshotCache = TreeCache(0)
        self.memory = (0, str(self.cache))
        self.capture_seconds = 0.0
        self.observer: Observer | None = None
        self.keep = keep
        self._kept: Kept | None = None

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
        news = self.stream(
            prompts,
            max_new_tokens=max_new_tokens,
            seed=seed,
            stats=[each.stats for each in made],
            speculate=speculate,
        )
        for index, tokens in news:
            made[index].tokens += tokens
        return made

    @torch.inference_mode(False)  # what outlives the call may be changed in any mode
    def stream(
        self,
        prompts: Items[Prompt],
        *,
        max_new_tokens: Limit,
        seed: int = 0,
        stats: Items[Stats] | None = None,
        speculate: Items[bool] | None = None,
    ) -> Generator[tuple[int, list[int]]]:
        """Yields (index of the prompt, new tokens) as they are committed.

        Args:
            prompts: token ids, [L] each, without padding (see `strip_padding`), or prompts with
                images (see `Target.image_prompt`).
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
            most = max_new_tokens[index] if isinstance(max_new_tokens, list) else max_new_tokens
            try:
                prompt = token_ids(self.target, ids)
                limit = token_limit(self.target, len(prompt), most)
            except UserError as error:
                if len(prompts) == 1:
                    raise
                raise UserError(f"prompt {index}: {error}") from error
            numbers = torch.Generator().manual_seed(seed + index)
            processed = ProcessedText.of(
                self.rules,
                self.target,
                prompt,
                limit,
                self.eos_ids,
            )
            text = None
            if self.stop:
                text = TextStream(self.target.tokenizer, self.stop)
            sequence = Sequence(
                index=index,
                prompt=prompt,
                limit=limit,
                verifier=Verifier(self.sampling, self.eos_ids, numbers, processed),
                text=text,
                stats=Stats() if stats is None else stats[index],
                speculate=speculate is None or speculate[index],
                images=images_of(ids),
            )
            sequences.append(sequence)
        return self._run(sequences)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _run(self, sequences: list[Sequence]) -> Generator[tuple[int, list[int]]]:
        # Leased here, not in `stream`: a generator that never starts is never closed.
        capacity = max((len(s.prompt) + s.limit for s in sequences), default=0)
        if self.drafter is not None:  # room for a round's tree
            capacity += self.spec.most + self.drafter.probes
        keeps = self.keep and len(sequences) == 1
        text: list[int] = []  # prompt and answer, if they are kept
        if keeps:
            text += sequences[0].prompt.tolist()
        waiting = deque(sequences)
        joining: list[Sequence] = []
        engine = self._resumed(sequences, capacity)
        if engine is None:
            engine = self._engine(capacity, min(self.max_rows, len(sequences)))
        else:
            joining.append(waiting.popleft())
        self.cache = engine.cache
        before = engine.clock.captured
        with closing(engine):
            while waiting or joining or engine.active:
                # Waiting sequences take the free rows.
                while waiting and engine.free:
                    sequence = waiting.popleft()
                    engine.join(sequence)
                    joining.append(sequence)
                steps = [engine.round()]  # begins when the prefill has ended
                if joining:
                    steps.insert(0, engine.prefill(joining))
                joining = []
                for step in steps:
                    for sequence, tokens in step:
                        if keeps:
                            text += tokens
                        yield sequence.index, tokens
                        if sequence.stats.finish:
                            engine.release(sequence)
                self.capture_seconds = engine.clock.captured - before
            self.memory = max(self.memory, engine.memory)
        if keeps and engine.keep:
            whole = torch.tensor(text, device=self.target.device)
            self._kept = Kept(engine, sequences[0], whole)

    def _resumed(self, sequences: list[Sequence], capacity: int) -> Engine | None:
        """The kept engine, in which the one sequence has a row; None if it does not continue it."""
        kept = self._kept
        self._kept = None
        if kept is None or len(sequences) != 1:
            return None
        if not kept.engine.resume(kept, sequences[0], capacity):
            return None
        kept.engine.observer = self.observer
        return kept.engine

    def _engine(self, capacity: int, rows: int) -> Engine:
        return Engine(
            self.target,
            capacity=capacity,
            rows=rows,
            plain=self.sampling.greedy and not self.rules,
            drafter=self.drafter,
            spec=self.spec,
            pace=self.pace,
            graphs=self.graphs,
            observer=self.observer,
            keep=self.keep,
        )


def _pieces(sequences: Items[Sequence]) -> Iterator[list[Piece]]:
    """What each forward of a prefill reads: a whole prompt with images, or pieces of several others."""
    text: list[Sequence] = []
    for sequence in sequences:
        if sequence.images is None:
            text.append(sequence)
        else:
            yield [(sequence, 0, len(sequence.prompt))]
    for pieces in chunks([len(sequence.prompt) for sequence in text], _CHUNK):
        yield [(text[i], begin, end) for i, begin, end in pieces]
