"""Draft, verify, commit: one loop for every kind of drafter and every shape of tree, and for no drafter at all.

    prefill    target over the prompt                      -> first token (uncommitted root), features for the drafter
    round      session.propose                             -> tree below the root
               target over [root + nodes], tree attention  -> logits at each of them
               verify                                      -> accepted path + bonus token, which is the next root
               cache.commit, session.extend                -> both hold committed tokens only

Without a drafter the tree is empty and a round is a plain decoding step, by the very same code.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.decode.cache import TreeCache
from drafttrain.decode.verify import Verdict, Verifier
from drafttrain.drafters.base import Drafter, TreeSpec
from drafttrain.errors import UserError
from drafttrain.ops.sampling import SamplingParams
from drafttrain.target import Target


@dataclass
class Stats:
    """What one generation did. Seconds are wall-clock.

    The prefill yields the first token; it is no round, and that token counts in no accepted length.

    Attributes:
        prompt_tokens, new_tokens: lengths; EOS counts as a token.
        target_passes: rounds, i.e. target forwards after the prefill.
        accepted: drafted tokens accepted, per round.
        offered: depth of the tree, per round; where EOS cut the path, the depth of EOS (nothing below it was tested).
        draft_seconds: in the drafter (its prefill included); `target_seconds`: in the rounds' target forwards and head.
        prefill_seconds: until the first token was known, which is the time to first token.
        token_seconds: per new token, when it was known, counted from the start.
        ended: by EOS, not by the limit.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    target_passes: int = 0
    accepted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    prefill_seconds: float = 0.0
    total_seconds: float = 0.0
    token_seconds: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def accepted_length(self) -> float:
        """Tokens committed per round, bonus token included; 0 without rounds."""
        return (self.new_tokens - 1) / self.target_passes if self.target_passes else 0.0

    @property
    def rounds(self) -> Counter[tuple[int, int]]:
        """How many rounds accepted a tokens of an offered depth o, by (a, o)."""
        return Counter(zip(self.accepted, self.offered, strict=True))


@dataclass
class Generation:
    """Attributes: tokens: the new tokens, EOS included; stats: how they came about."""

    tokens: list[int]
    stats: Stats


def token_limit(target: Target, prompt_tokens: int, max_new_tokens: int) -> int:
    """How many tokens may follow the prompt: max_new_tokens, or less where the target's context ends first.

    Raises:
        UserError: nothing to continue from, no room, or no token asked for.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if prompt_tokens < 1:
        raise UserError("prompt is empty: decoding needs at least one token; add a BOS token or some text")
    context = getattr(target.config, "max_position_embeddings", None)
    if context is None:
        return max_new_tokens
    if prompt_tokens >= context:
        raise UserError(
            f"prompt has {prompt_tokens} tokens, but target {target.name!r} has max_position_embeddings={context}; "
            "shorten the prompt"
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
    generator: torch.Generator | None = None,
    eos_ids: Collection[int] | None = None,
) -> Generation:
    """Continues one prompt; the output is the target's own, whatever the drafter.

    Args:
        target: any Target; `target.pack()` it first for speed on a CPU.
        drafter: bound to the target, or None for plain autoregressive decoding.
        prompt_ids: [L] token ids.
        max_new_tokens: upper limit, never exceeded; the target's context length limits it further.
        spec: the tree that a round drafts; chain:3 unless given, `none` decodes plainly.
        sampling: greedy unless given.
        seed: of the sampling; a `generator` (on the CPU) goes before it. In exact arithmetic the same seed gives the
            same tokens with any drafter and spec that draws nothing itself (no `@sample`).
        eos_ids: tokens that end the sequence; the target's own unless given.

    Raises:
        UserError: an empty prompt, one that fills the target's context, max_new_tokens below 1, or a spec that draws tokens
            while decoding is greedy.
    """
    stats = Stats()
    rounds = stream(
        target,
        drafter,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        spec=spec,
        sampling=sampling,
        seed=seed,
        generator=generator,
        eos_ids=eos_ids,
        stats=stats,
    )
    return Generation([token for tokens in rounds for token in tokens], stats)


def stream(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: Tensor | Sequence[int],
    *,
    max_new_tokens: int,
    spec: TreeSpec | None = None,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    generator: torch.Generator | None = None,
    eos_ids: Collection[int] | None = None,
    stats: Stats | None = None,
) -> Iterator[list[int]]:
    """Like `generate`, but yields each round's tokens as they come; `stats` is filled on the way."""
    prompt = torch.as_tensor(prompt_ids, dtype=torch.long, device=target.device).flatten()
    limit = token_limit(target, prompt.numel(), max_new_tokens)
    spec = spec or TreeSpec.parse("chain:3")
    sampling = sampling or SamplingParams()
    spec.check(sampling)
    generator = generator or torch.Generator().manual_seed(seed)
    eos = frozenset(target.eos_ids if eos_ids is None else eos_ids)
    verifier = Verifier(sampling, eos, generator, prompt)
    return _rounds(target, None if spec.shape == "none" else drafter, prompt, limit, spec, verifier, stats or Stats())


@torch.no_grad()
def _rounds(
    target: Target,
    drafter: Drafter | None,
    prompt: Tensor,
    limit: int,
    spec: TreeSpec,
    verifier: Verifier,
    stats: Stats,
) -> Iterator[list[int]]:
    now, device = _clock(target.device), target.device
    layers = drafter.feature_layers if drafter is not None else ()
    nothing = TokenTree.empty(device)
    stats.prompt_tokens = prompt.numel()
    cache = TreeCache(stats.prompt_tokens + limit + (spec.budget if drafter is not None else 0))
    started = now()

    def record(verdict: Verdict) -> float:
        moment = now()
        stats.new_tokens += len(verdict.tokens)
        stats.token_seconds += [moment - started] * len(verdict.tokens)
        stats.total_seconds, stats.ended = moment - started, verdict.ended
        return moment

    positions = cache.open(count=stats.prompt_tokens).positions(device)
    out = target.forward(prompt[None], layers, positions, cache)
    cache.commit(range(stats.prompt_tokens))
    verdict = verifier.verify(nothing, target.head(out.last_hidden[0, -1:]))
    before = record(verdict)
    stats.prefill_seconds = stats.total_seconds
    yield verdict.tokens

    root = torch.tensor(verdict.tokens, device=device)
    session = None
    if drafter is not None and not verdict.ended and limit > 2:  # with one token to go there is nothing to draft
        session = drafter.start(prompt, stats.prompt_tokens + limit)
        session.extend(torch.cat((prompt[1:], root)), out.features[0])
    while not verdict.ended and stats.new_tokens < limit:
        left = limit - stats.new_tokens
        tree = session.propose(spec, verifier.sampler).prune(left - 1) if session is not None and left > 1 else nothing
        drafted = now()
        stats.draft_seconds += drafted - before if session is not None else 0.0
        layout = cache.open(tree.parents)
        ids = torch.cat((root, tree.tokens))[None]
        out = target.forward(ids, layers, layout.positions(device), cache)
        logits = target.head(out.last_hidden[0])
        stats.target_seconds += now() - drafted
        verdict = verifier.verify(tree, logits)
        kept = [0, *(node + 1 for node in verdict.path)]
        cache.commit(kept)
        cut = verdict.ended and len(verdict.tokens) == len(verdict.path)
        stats.target_passes += 1
        stats.accepted.append(len(verdict.path))
        stats.offered.append(len(verdict.path) if cut else int(layout.depths.max()))
        before = record(verdict)
        tokens = torch.tensor(verdict.tokens, device=device)
        root = tokens[-1:]
        if session is not None and not verdict.ended and stats.new_tokens < limit:
            session.extend(tokens, out.features[0, kept])
        yield verdict.tokens


def _clock(device: torch.device) -> Callable[[], float]:
    """Wall-clock seconds once the device has finished what was asked of it."""
    if device.type != "cuda":
        return time.perf_counter

    def synchronized() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronized
