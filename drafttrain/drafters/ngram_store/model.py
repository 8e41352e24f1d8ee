"""An n-gram store: the suffix drafter under the name that it had when it knew a corpus only."""

from __future__ import annotations

from drafttrain.drafters.suffix.model import SuffixDrafter

# Tokens of earlier answers that `grow` keeps.
_GROWN = 100_000


class NgramStoreDrafter(SuffixDrafter):
    """`suffix` by its former options.

    Args:
        file: a store that `drafttrain ngram-store` wrote. grow: sequences learn from each other's
            answers, see `suffix`'s memory.
        min_n, min_p: as in `suffix`.
    """

    kind = "ngram_store"

    def __init__(
        self,
        file: str = "",
        grow: bool = False,
        min_n: int = 1,
        min_p: float = 0.02,
    ):
        super().__init__(file, _GROWN if grow else 0, min_n, min_p)


KIND = NgramStoreDrafter
