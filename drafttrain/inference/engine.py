"""Draft, verify, commit: one loop for every kind of drafter, every shape of tree, every batch, and for no drafter at all.

    join       target over the prompts of new rows         -> first tokens (uncommitted roots), features for the drafter
    round      drafter.propose_all                         -> a tree below each row's root (and probes, if the kind has any)
               target over all [root + nodes], packed      -> logits at each of them
               verify, row by row                          -> accepted path + bonus token, which is the row's next root
               cache.commit, drafter.extend_all            -> both hold committed tokens only

Rows are packed, not padded: a forward is [1, N] over the new tokens of all rows, and only attention knows about rows. So
each row accepts what it accepts, finished rows retire and waiting prompts take their place, at no cost to the others.
Without a drafter the trees are empty and a round is a plain decoding step, by the very same code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from drafttrain.batch import TargetOutput, TokenTree
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.inference.adaptive import Adaptive, Pace, Round
from drafttrain.inference.rows import Row, chunks
from drafttrain.inference.static import TargetSteps
from drafttrain.inference.stats import Generation, Stats
from drafttrain.inference.text import TextStream, check_stop
from drafttrain.inference.verify import Verdict, Verifier, verify_batch
from drafttrain.ops.sampling import SamplingParams, argmax
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target import Target

# Most tokens of one prefill forward: it bounds activations and features, whatever the length of a prompt.
_CHUNK = 2048


def token_limit(target: Target, prompt_tokens: int, max_new_tokens: int) -> int:
    """How many tokens may follow the prompt: max_new_tokens, or less where the target's context ends first.

    Raises:
        UserError: nothing to continue from, no room, or no token asked for.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if prompt_tokens < 1:
        raise UserError("prompt is empty: decoding needs at least one token; add a BOS token or some text")
    context = target.max_positions
    if context is None:
        return max_new_tokens
    if prompt_tokens >= context:
        raise UserError(
            f"prompt has {prompt_tokens} tokens, but target {target.name!r} reads at most {context}; shorten the prompt"
        )
    return min(max_new_tokens, context - prompt_tokens)


def generate(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: Tensor | Sequence[int],
    *,
    max_new_tokens: int,
    spec: TreeSpec | None = None,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    eos_ids: Collection[int] | None = None,
    stop: str | Sequence[str] = (),
) -> Generation:
    """Continues one prompt; the output is the target's own, whatever the drafter. See `Decoder` for the arguments."""
    decoder = Decoder(target, drafter, spec=spec, sampling=sampling, eos_ids=eos_ids, stop=stop)
    return decoder.generate([prompt_ids], max_new_tokens=max_new_tokens, seed=seed)[0]


def generate_batch(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Tensor | Sequence[int]],
    *,
    max_new_tokens: int,
    spec: TreeSpec | None = None,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    eos_ids: Collection[int] | None = None,
    stop: str | Sequence[str] = (),
    max_rows: int = 8,
) -> list[Generation]:
    """Continues many prompts, `max_rows` at a time; each gets the output that it would get alone. See `Decoder`."""
    decoder = Decoder(target, drafter, spec=spec, sampling=sampling, eos_ids=eos_ids, stop=stop, max_rows=max_rows)
    return decoder.generate(prompts, max_new_tokens=max_new_tokens, seed=seed)


def stream(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: Tensor | Sequence[int],
    *,
    max_new_tokens: int,
    spec: TreeSpec | None = None,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    eos_ids: Collection[int] | None = None,
    stop: str | Sequence[str] = (),
    stats: Stats | None = None,
) -> Iterator[list[int]]:
    """Like `generate`, but yields each round's tokens as they come; `stats` is filled on the way."""
    decoder = Decoder(target, drafter, spec=spec, sampling=sampling, eos_ids=eos_ids, stop=stop)
    rounds = decoder.stream([prompt_ids], max_new_tokens=max_new_tokens, seed=seed, stats=[stats or Stats()])
    return (tokens for _, tokens in rounds)


class Decoder:
    """Continues prompts with a target and a drafter; several at a time share every forward.

    Args:
        target: any Target; `target.pack()` it first for speed on a CPU.
        drafter: bound to the target, or None for plain autoregressive decoding.
        spec: the tree that a round drafts; chain:3 unless given, `none` decodes plainly.
        sampling: greedy unless given.
        eos_ids: tokens that end a sequence; the target's own unless given.
        stop: strings that end a sequence; its tokens then end with the one that completed the string.
        max_rows: most sequences at a time; the others wait for a row to finish.
        pace: chooses each round's tree, none larger than `spec`; an `Adaptive` one if the spec is.
        graphs: False runs rounds on a GPU without CUDA graphs; see `TargetSteps.lease`.

    Attributes:
        cache: of the last call. memory: bytes and description of the largest one so far, its CUDA graphs included.
        observer: called with each round's (index of the prompt, tree, verdict, logits [n+1, v]); None by default.

    Raises:
        UserError: no row, stop strings that cannot be looked for, or a spec that draws tokens while decoding is greedy.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        spec: TreeSpec | None = None,
        sampling: SamplingParams | None = None,
        eos_ids: Collection[int] | None = None,
        stop: str | Sequence[str] = (),
        max_rows: int = 1,
        pace: Pace | None = None,
        graphs: bool | None = None,
    ):
        if max_rows < 1:
            raise UserError(f"max_rows={max_rows} must be at least 1")
        self.target, self.spec = target, spec or TreeSpec.parse("chain:3")
        self.drafter = None if self.spec.shape == "none" else drafter
        self.pace = pace or (Adaptive(self.spec) if self.drafter is not None and self.spec.adaptive else None)
        self.sampling = sampling or SamplingParams()
        self.spec.check(self.sampling)
        self.eos_ids = frozenset(target.eos_ids if eos_ids is None else eos_ids)
        self.stop, self.max_rows = check_stop(stop, target), max_rows
        self.cache, self.graphs = TreeCache(0), graphs
        self.memory = (0, str(self.cache))
        self.observer: Callable[[int, TokenTree, Verdict, Tensor], None] | None = None
        self._layers = self.drafter.feature_layers if self.drafter is not None else ()
        self._probes = self.drafter.probes if self.drafter is not None else 0
        self._now, self._nothing = _clock(target.device), TokenTree.empty(target.device)

    def generate(
        self,
        prompts: Sequence[Tensor | Sequence[int]],
        *,
        max_new_tokens: int,
        seed: int = 0,
        speculate: Sequence[bool] | None = None,
    ) -> list[Generation]:
        """The continuation of each prompt, in the prompts' order. See `stream`."""
        made = [Generation([], Stats()) for _ in prompts]
        every = [generation.stats for generation in made]
        rounds = self.stream(prompts, max_new_tokens=max_new_tokens, seed=seed, stats=every, speculate=speculate)
        for index, tokens in rounds:
            made[index].tokens += tokens
        return made

    def stream(
        self,
        prompts: Sequence[Tensor | Sequence[int]],
        *,
        max_new_tokens: int,
        seed: int = 0,
        stats: Sequence[Stats] | None = None,
        speculate: Sequence[bool] | None = None,
    ) -> Iterator[tuple[int, list[int]]]:
        """Yields (index of the prompt, new tokens) as they come.

        Args:
            prompts: token ids, [L] each, without padding (see `strip_padding`).
            max_new_tokens: upper limit, never exceeded; the target's context length limits it further.
            seed: prompt i samples with seed + i, so its tokens do not depend on the batch. In exact arithmetic the same
                seed gives the same tokens with any drafter and spec that draws nothing itself (no `@sample`).
            stats: one per prompt, filled on the way.
            speculate: per prompt, False decodes it plainly; all True unless given.

        Raises:
            UserError: an empty prompt, one that fills the target's context, or max_new_tokens below 1.
        """
        device = self.target.device
        rows = []
        for index, ids in enumerate(prompts):
            prompt = torch.as_tensor(ids, dtype=torch.long, device=device).flatten()
            try:
                limit = token_limit(self.target, prompt.numel(), max_new_tokens)
            except UserError as error:
                raise UserError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from error
            record = stats[index] if stats is not None else Stats()
            record.prompt_tokens = prompt.numel()
            text = TextStream(self.target.tokenizer, self.stop) if self.stop else None
            numbers = torch.Generator().manual_seed(seed + index)
            verifier = Verifier(self.sampling, self.eos_ids, numbers, prompt)
            drafting = speculate is None or speculate[index]
            rows.append(Row(index, prompt, limit, verifier, text, record, prompt[:0], drafting))
        room = self.spec.most + self._probes if self.drafter is not None else 0
        need = max((row.prompt.numel() + row.limit for row in rows), default=0) + room
        plain = self.sampling.greedy and self.sampling.repetition_penalty == 1
        self._steps = TargetSteps.lease(self.target, self.graphs)
        self.cache = self._steps.open(need, min(self.max_rows, len(rows)), self._layers, choose=plain)
        return self._run(deque(rows))

    @torch.no_grad()
    def _run(self, waiting: deque[Row]) -> Iterator[tuple[int, list[int]]]:
        free = list(range(min(self.max_rows, self.cache.rows)))
        active: list[Row] = []
        while waiting or active:
            joining = [waiting.popleft() for _ in range(min(len(free), len(waiting)))]
            for row in joining:
                row.slot = free.pop(0)
                self.cache.clear(row.slot)
            if joining:
                yield from self._prefill(joining)
            active += joining
            going = [row for row in active if not row.stats.finish]
            if going:
                yield from self._round(going)
            free += [row.slot for row in active if row.stats.finish]
            active = [row for row in active if not row.stats.finish]
        self.memory = max(self.memory, self._steps.memory)
        self._steps.release()

    def _prefill(self, rows: list[Row]) -> Iterator[tuple[int, list[int]]]:
        """Runs the rows' prompts, as many tokens at a time as a chunk holds, and yields each one's first token."""
        begun = self._now()
        for row in rows:
            row.joined = begun
        for pieces in chunks([row.prompt.numel() for row in rows], _CHUNK):
            parts = [(rows[i], begin, end) for i, begin, end in pieces]
            self.cache.open([(row.slot, end - begin) for row, begin, end in parts])
            out = self._forward([row.prompt[begin:end] for row, begin, end in parts])
            sizes = [end - begin for _, begin, end in parts]
            self.cache.commit([range(size) for size in sizes])
            told = self._first_tokens(parts, out.last_hidden[0])
            extended = []
            for (row, begin, end), features in zip(parts, out.features[0].split(sizes), strict=True):
                follow = torch.cat((row.prompt[begin + 1 : end + 1], row.root))
                # With one more token to come there is nothing to draft.
                wanted = row.speculate and row.limit > 2 and not row.stats.finish
                if self.drafter is not None and begin == 0 and wanted:
                    row.session = self.drafter.start(row.prompt, row.prompt.numel() + row.limit)
                if row.session is not None and not row.stats.finish:
                    extended.append((row, follow, features))
            self._extend(extended)
            yield from told

    def _first_tokens(self, parts: list[tuple[Row, int, int]], hidden: Tensor) -> list[tuple[int, list[int]]]:
        """The first tokens of rows whose prompt is complete. parts: (row, begin, end); hidden [N, h] over all of them."""
        lasts = [end - 1 for end in accumulate(end - begin for _, begin, end in parts)]
        done = [i for i, (row, _, end) in enumerate(parts) if end == row.prompt.numel()]
        rows = [parts[i][0] for i in done]
        if not rows:
            return []
        logits = self.target.head(hidden[[lasts[i] for i in done]])
        verdicts = self._verify(rows, [self._nothing] * len(rows), logits)
        moment = self._now()
        told = []
        for row, verdict in zip(rows, verdicts, strict=True):
            told.append((row.index, row.record(verdict, moment)))
            row.stats.prefill_seconds = row.stats.total_seconds
            row.root = torch.tensor(told[-1][1], device=hidden.device)
        return told

    def _round(self, rows: list[Row]) -> Iterator[tuple[int, list[int]]]:
        """One draft, one packed target pass and one verdict for each row; yields what each committed."""
        asked = self._now()
        behind = sum(row.behind for row in rows) if self.pace is not None else 0
        spec = self.spec if self.pace is None else self.pace.choose(len(rows), behind)
        trees, read_seconds = self._draft(rows, spec)
        begun = self._now()
        layouts = self.cache.open([(row.slot, tree.parents) for row, tree in zip(rows, trees, strict=True)])
        ids: list[Tensor] = []
        for row, tree in zip(rows, trees, strict=True):
            ids += (row.root, tree.tokens) if len(tree) else (row.root,)
        out = self._steps.run(_join(ids))
        share = (self._now() - begun) / len(rows)
        sizes = [layout.count for layout in layouts]
        verdicts = self._verify(rows, trees, out.logits, out.choices)
        if self.observer is not None:
            for row, *seen in zip(rows, trees, verdicts, out.logits.split(sizes), strict=True):
                self.observer(row.index, *seen)
        if self._probes:
            chosen = argmax(out.logits) if out.choices is None else out.choices
            self._answer_probes(rows, chosen.split(sizes))
        kept = [[0, *(node + 1 for node in verdict.path)] for verdict in verdicts]
        self.cache.commit(kept)
        moment = self._now()
        told = []
        for row, tree, verdict in zip(rows, trees, verdicts, strict=True):
            tokens = row.record(verdict, moment)
            row.count(len(verdict.path), len(tokens), tree.drafted_depth)
            row.stats.target_seconds += share
            told.append((row.index, tokens))
        self._hand_on(rows, [tokens for _, tokens in told], kept, sizes, out.features)
        if self.pace is not None:
            asking = zip(rows, trees, verdicts, strict=True)
            drafted = [(tree, verdict.path) for row, tree, verdict in asking if row.session is not None and len(tree)]
            self.pace.observe(
                Round(
                    spec, len(rows), sum(sizes), self._now() - asked, begun - asked - read_seconds,
                    behind if read_seconds else 0, read_seconds, drafted,
                )
            )  # fmt: skip
        yield from told

    def _hand_on(
        self, rows: list[Row], tokens: list[list[int]], kept: list[list[int]], sizes: list[int], features: Tensor
    ) -> None:
        """Gives rows that go on their new root, and their drafters what was committed.

        Args:
            tokens: per row what it committed; kept: the new tokens of its pass whose features those follow.
            sizes: per row new tokens in the pass; features [N, f*h] of all.
        """
        going = [i for i, row in enumerate(rows) if not row.stats.finish]
        numbers = [token for i in going for token in tokens[i]]
        count, alone = len(numbers), len(going) == 1
        drafting = any(rows[i].session is not None for i in going)
        if drafting:
            starts = [0, *accumulate(sizes)]
            numbers += [starts[i] + node for i in going for node in kept[i]]
        news = torch.tensor(numbers, device=rows[0].root.device)  # one transfer
        if drafting:
            news, nodes = news[:count], news[count:]
            features = features.index_select(0, nodes)
        extended, begin = [], 0
        for i in going:
            row, end = rows[i], begin + len(tokens[i])
            row.root = news if count == 1 else news[end - 1 : end]
            if row.session is not None:
                extended.append((row, news, features) if alone else (row, news[begin:end], features[begin:end]))
            begin = end
        if extended:
            self._extend(extended)

    def _verify(
        self, rows: list[Row], trees: list[TokenTree], logits: Tensor, choices: Tensor | None = None
    ) -> list[Verdict]:
        """A verdict per row; logits [N, v] at every row's root and nodes, one row after the other."""
        return verify_batch([row.verifier for row in rows], trees, logits, choices)

    def _forward(self, parts: list[Tensor]) -> TargetOutput:
        """The target over the announced new tokens of all rows, one after the other."""
        ids = _join(parts)
        return self.target.forward(ids[None], self._layers, self.cache.positions(ids.device), self.cache)

    def _draft(self, rows: list[Row], spec: TreeSpec) -> tuple[list[TokenTree], float]:
        """A tree per row, an empty one where nothing is drafted; and the seconds that the drafter read before."""
        asking = [row for row in rows if row.session is not None and row.left > 1]
        trees = {row.index: self._nothing for row in rows}
        if self.drafter is None or spec.shape == "none" or not asking:
            return list(trees.values()), 0.0
        read_seconds = self._read(asking)
        begun = self._now()
        sessions = [row.session for row in asking]
        samplers = [row.verifier.sampler for row in asking]
        drafted = self.drafter.propose_all(sessions, [spec] * len(asking), samplers)
        for row, tree in zip(asking, drafted, strict=True):
            trees[row.index] = tree = tree.prune(row.left - 1)
            if self._probes:
                assert row.session is not None
                wanted = row.session.probe()
                trees[row.index], row.probed = tree.with_probes(*wanted, row.left - 1)
        self._charge(asking, begun)
        return list(trees.values()), read_seconds

    def _answer_probes(self, rows: list[Row], chosen: Sequence[Tensor]) -> None:
        """Tells the sessions what the target chooses behind root and probes; chosen: per row [n+1] at root and nodes."""
        asked = [(row, tokens) for row, tokens in zip(rows, chosen, strict=True) if row.probed]
        for row, tokens in asked:
            root, *nodes = tokens.tolist()
            found = [nodes[node] if node >= 0 else -1 for node in row.probed]
            assert row.session is not None
            row.session.observe([root, *found])
            row.probed = []

    def _extend(self, news: list[tuple[Row, Tensor, Tensor]]) -> None:
        """Keeps what was committed for the drafter: rows with a session, their tokens [m] and features [m, f*h].

        The drafter takes it in when it is next asked, so that rounds without drafting cost nothing; a whole chunk at once.
        """
        for row, tokens, features in news:
            row.pending.append((tokens, features))
        full = [row for row, _, _ in news if row.behind >= _CHUNK]
        if full:
            self._read(full)

    def _read(self, rows: list[Row]) -> float:
        """Gives the drafter what was committed since it was last asked; returns the seconds that took."""
        rows = [row for row in rows if row.pending]
        if self.drafter is None or not rows:
            return 0.0
        begun = self._now()
        news = [[_join(parts) for parts in zip(*row.pending, strict=True)] for row in rows]
        tokens, features = zip(*news, strict=True)
        self.drafter.extend_all([row.session for row in rows], tokens, features)
        for row in rows:
            row.pending = []
        return self._charge(rows, begun)

    def _charge(self, rows: Sequence[Row], begun: float) -> float:
        seconds = self._now() - begun
        for row in rows:
            row.stats.draft_seconds += seconds / len(rows)
        return seconds


def _join(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Parts one after the other; one alone is spared the call."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def strip_padding(input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
    """The prompts in a padded batch, as transformers' tokenizers make it.

    Args:
        input_ids: [b, s]; attention_mask: [b, s], 0 at padding, left or right.

    Returns:
        One [L] tensor per row.
    """
    return [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]


def _clock(device: torch.device) -> Callable[[], float]:
    """Wall-clock seconds once the device has finished what was asked of it."""
    if device.type != "cuda":
        return time.perf_counter

    def synchronized() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronized
