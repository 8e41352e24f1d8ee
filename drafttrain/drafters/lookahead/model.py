"""Lookahead decoding: n-grams that the target generates while it verifies. No weights, no training.

Source: Fu et al. 2024, arXiv 2402.02057. Next to the root and the drafted tokens, each pass of the
target verifies a window of guessed future tokens. The target's choices after them are better
guesses (Jacobi iteration), and successive guesses form n-grams of the target's own. They are stored
by their first token, and drafted when that token is the root.

    position          p      p+1    p+2    p+3    p+4        window W = 3, n-grams N = 4
    row 0 (oldest)    root   a1     a2
    row 1                    b0     b1     b2
    row 2 (newest)                  c0     c1     c2
    target's choice                        d0     d1     d2     after row 2

Column i is an n-gram: a_i b_i c_i d_i. A guess sees the root, row 0 up to its column, and its
column above it, so the window is a tree below the root. Its nodes are probes (see `Session.probe`):
never accepted, only learned from. After the round, rows 1 and 2 and the choices are the new rows,
one position later. Rows move by one position even if more tokens were committed: their guesses
improve within a few rounds, whereas new columns would start with random n-grams.
"""

from __future__ import annotations

import random
from collections import defaultdict

from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.base import Drafter, Session
from drafttrain.drafters.common.best_first import Guess, HitRates, grow_guesses
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.ops.sampling import Sampler

# Weight, in observed guesses, of the prior that half of them are right.
_BELIEF = 4


class LookaheadDrafter(Drafter):
    """Drafts the n-grams of its own window.

    Args:
        window: W, columns. ngram: N, tokens of an n-gram, its first one included. Each pass has W
            (N - 1) - 1 probes.
        guesses: G, n-grams stored and drafted per first token, the newest.

    Raises:
        UserError: window or ngram below 2, guesses below 1.
    """

    kind = "lookahead"

    def __init__(self, window: int = 5, ngram: int = 4, guesses: int = 4):
        if min(window, ngram) < 2 or guesses < 1:
            raise UserError(
                f"window={window}, ngram={ngram}, guesses={guesses}: window and ngram must be at least 2, guesses at least 1"
            )
        self.window = window
        self.ngram = ngram
        self.guesses = guesses
        self.probes = window * (ngram - 1) - 1

    def start(self, prompt_ids: Tensor, max_length: int) -> LookaheadSession:
        return LookaheadSession(self, prompt_ids)


class LookaheadSession(Session):
    """One sequence's window and n-grams.

    Attributes:
        tokens: committed so far. rows: N - 1 rows of W guesses. made: number of rows that the
            target has generated.
        pool: by first token, the n-grams' other tokens, the newest last. first: those of the newest
            n-gram of the root.
        rates: of the newest n-gram's next token, by step.
    """

    def __init__(self, drafter: LookaheadDrafter, prompt_ids: Tensor):
        self.device = prompt_ids.device
        self.window = drafter.window
        self.ngram = drafter.ngram
        self.guesses = drafter.guesses
        self.tokens: list[int] = prompt_ids[:1].tolist()
        self.random = random.Random(0)
        self.rows: list[list[int]] = []
        self.made = 0
        self.pool: defaultdict[int, dict[tuple[int, ...], None]] = defaultdict(dict)
        self.first: tuple[int, ...] = ()
        self.rates = HitRates(_BELIEF)

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        new = tokens.tolist()
        for step, (guess, token) in enumerate(zip(self.first, new, strict=False)):
            if guess != token:
                self.rates.add(step, None)
                break
            self.rates.add(step, 0)
        self.tokens += new
        known = self.pool.get(self.tokens[-1], {})
        self.first = next(reversed(known), ())

    def chance(self, step: int) -> float:
        """Probability that an n-gram's token is right if all before it are."""
        return self.rates.chance(step, 1 / 2)

    def propose(self, spec: TreeSpec, sampler: Sampler | None = None) -> TokenTree:
        """Drafts the n-grams that start with the root, the newest first."""
        guesses = []
        for gram in reversed(self.pool.get(self.tokens[-1], {})):
            guesses.append(Guess(dict(enumerate(gram)).get, self.chance))
        return grow_guesses(spec, guesses, self.device)

    def probe(self) -> tuple[list[int], list[int]]:
        """The window below the root. Its first guesses are random tokens of the text."""
        if not self.rows:
            for _ in range(self.ngram - 1):
                self.rows.append(self.random.choices(self.tokens, k=self.window))
        self.rows[0][0] = self.tokens[-1]  # the root
        # The first row is a chain below the root; each column hangs below its token in that row.
        tokens = self.rows[0][1:]
        parents = list(range(-1, self.window - 2))
        for column in range(self.window):
            above = column - 1
            for row in self.rows[1:]:
                parents.append(above)
                above = len(tokens)
                tokens.append(row[column])
        return tokens, parents

    def observe(self, chosen: list[int]) -> None:
        """Stores the n-grams that the target's choices complete; the choices are the newest row."""
        height = self.ngram - 2  # probes of a column below the first row
        newest = []
        for column in range(self.window):
            # Choices follow the root, then the first row's W - 1 probes, then `height` of each
            # column.
            # The choice after the column's last probe; without further rows, after the first row's.
            end = column
            if height:
                end = self.window - 1 + (column + 1) * height
            last = chosen[end]
            if last < 0:  # too deep to be verified
                last = self.random.choice(self.tokens)
            elif self.made >= self.ngram - 2:  # the first row may be random
                gram = [row[column] for row in self.rows]
                self._keep([*gram, last])
            newest.append(last)
        self.rows = [*self.rows[1:], newest]
        self.made = min(self.made + 1, self.ngram - 1)

    def _keep(self, gram: list[int]) -> None:
        """Stores an n-gram as the newest of its first token; may drop the oldest."""
        known = self.pool[gram[0]]
        rest = tuple(gram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self.guesses:
            del known[next(iter(known))]


KIND = LookaheadDrafter
