"""Token Recycling: what the target predicted in earlier passes is drafted again. No weights.

Source: Luo et al. 2024, arXiv 2408.08696. A pass of the target predicts the next token at the root
and at every node, accepted or not, and decoding uses one path of it. The likeliest tokens of every
prediction are kept, by the last tokens before it; a tree is grown from what is kept:

    kept              a b -> c d e     b -> d c f     b c -> a ...
    text ends with    a b
    tree              c, d, e below the root; a below c, by "b c"

The paper keeps predictions by the last token alone and fills a tree of fixed shape. Here the
longest kept context of up to `context` tokens predicts, and the tree's nodes are the likeliest: a
child's probability is how often children of its kind were right so far, by length of the context,
rank, and how sure the prediction was. This finds what n-grams cannot: continuations that the target
considered and did not choose. They find what was written long ago (`token_recycling+ngram`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, Predictions, Session
from drafttrain.drafters.common.best_first import HitRates, grow_best_first
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.ops.sampling import Sampler

_OWN = 1 << 16  # contexts that a sequence without a memory keeps
_BELIEF = 8  # weight, in observations, of what is believed of a kind of child before any
# Believed: this share of the probability that was predicted in the context's last occurrence.
_SHARE = 0.7
_RECENT = 400  # observations after which old ones fade
_BINS = 8  # of the first token's predicted probability, which are counted together

Context = tuple[int, ...]
# Of a prediction: length of its context, bin of its first token's probability.
Kind = tuple[int, int]


class _Kept:
    """Predictions by context. Many threads may use it.

    They are in two generations: the older one is dropped when the newer one is full.

    Args:
        most: contexts. width: tokens of a prediction.

    Attributes:
        rates: by kind of prediction and rank of its token.
    """

    def __init__(self, most: int, width: int):
        self._half = max(1, most // 2)  # contexts of a generation
        self._lock = threading.Lock()
        # Newer and older one; replaced in one assignment, as other threads may read them.
        self._generations: tuple[dict[Context, Predictions], dict[Context, Predictions]] = ({}, {})
        self.rates = HitRates(_BELIEF, _RECENT, width)

    def add(self, predictions: dict[Context, Predictions]) -> None:
        with self._lock:
            if len(self._generations[0]) >= self._half:
                self._generations = ({}, self._generations[0])
            self._generations[0].update(predictions)

    def find(self, context: Context) -> tuple[Kind, Predictions] | None:
        """What was predicted behind the longest kept end of a context, and its kind."""
        newer, older = self._generations
        for n in range(len(context), 0, -1):
            end = context[-n:]
            found = newer.get(end)
            if found is None:
                found = older.get(end)
            if found is not None:
                _, shares = found
                return (n, int(_BINS * shares[0])), found
        return None

    def children(self, context: Context) -> Iterator[tuple[int, float]]:
        """Tokens that may follow a context with their probabilities, the likeliest first."""
        found = self.find(context)
        if found is None:
            return
        kind, (tokens, predicted) = found
        for rank, (token, share) in enumerate(zip(tokens, predicted, strict=True)):
            yield token, self.rates.chance(kind, _SHARE * share, rank)

    def test(self, context: Context, chosen: int) -> None:
        """Counts whether what is kept for a context predicts the target's choice."""
        found = self.find(context)
        if found is None:
            return
        kind, (tokens, _) = found
        rank = None
        if chosen in tokens:
            rank = tokens.index(chosen)
        self.rates.add(kind, rank)


class TokenRecyclingDrafter(Drafter):
    """Drafts the target's own earlier predictions.

    Args:
        context: most tokens by which a prediction is kept. width: tokens kept of each, the
            likeliest; no node has more children.
        memory: contexts kept from earlier prompts, about half a kilobyte each. With 0, the default,
            sequences know nothing of each other, as measurements of single answers require.
        min_p: paths less likely than this are not drafted.

    Raises:
        UserError: a number out of its range.
    """

    kind = "token_recycling"
    # Next to another drafter, unlikely children are not worth their nodes.
    defaults_beside = {"min_p": 0.1}
    drafts_alone = False

    def __init__(
        self,
        context: int = 3,
        width: int = 4,
        memory: int = 0,
        min_p: float = 0.02,
    ):
        if not 1 <= context <= 8 or not 1 <= width <= 64 or memory < 0 or not 0 <= min_p < 1:
            rule = "context must be from 1 to 8, width from 1 to 64, memory at least 0, min_p at least 0 and below 1"
            raise UserError(
                f"context={context}, width={width}, memory={memory}, min_p={min_p}: {rule}"
            )
        self.context = context
        self.predictions = width
        self.min_p = min_p
        self.memory = _Kept(memory, width) if memory else None

    def start(self, prompt_ids: Tensor, max_length: int) -> TokenRecyclingSession:
        return TokenRecyclingSession(self, prompt_ids)


class TokenRecyclingSession(Session):
    """One sequence.

    Attributes:
        before: its last committed tokens, as many as a context has.
        kept: predictions; with a memory, of all sequences.
    """

    def __init__(self, drafter: TokenRecyclingDrafter, prompt_ids: Tensor):
        self.drafter = drafter
        self.device = prompt_ids.device
        self.before: Context = tuple(prompt_ids[:1].tolist())
        if drafter.memory is not None:
            self.kept = drafter.memory
        else:
            self.kept = _Kept(_OWN, drafter.predictions)

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        longest = self.drafter.context
        last = tuple(tokens[-longest:].tolist())
        self.before = (self.before + last)[-longest:]

    def read_predictions(self, tree: TokenTree, predictions: list[Predictions]) -> None:
        kept = self.kept
        longest = self.drafter.context
        contexts = [self.before]  # of the root, then of each node
        for token, parent in zip(tree.tokens.tolist(), tree.parents, strict=True):
            contexts.append((*contexts[parent + 1], token)[-longest:])  # entry 0 is the root's
        news: dict[Context, Predictions] = {}
        for context, predicted in zip(contexts, predictions, strict=True):
            kept.test(context, predicted[0][0])
            for n in range(1, len(context) + 1):
                news[context[-n:]] = predicted
        kept.add(news)

    def propose(self, spec: TreeSpec, sampler: Sampler | None = None) -> TokenTree:
        """Drafts the likeliest paths, within the spec's children per node, depth and nodes."""
        longest = self.drafter.context

        def children(context: Context, path: float) -> Iterator[tuple[int, float, Context]]:
            for token, p in self.kept.children(context):
                yield token, path * p, (*context, token)[-longest:]

        floor = max(self.drafter.min_p, spec.stop)
        return grow_best_first(spec, floor, self.before, children, self.device)


KIND = TokenRecyclingDrafter
