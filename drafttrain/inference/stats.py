"""What a generation did: its record, which metrics are made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Stats:
    """What one generation did. Seconds are wall-clock.

    The prefill yields the first token; it is no round, and that token counts in no accepted length. What rows of a batch
    do together is charged to them in equal shares, so that sums over rows are wall-clock times of the batch.

    Attributes:
        prompt_tokens, new_tokens: lengths; EOS counts as a token.
        target_passes: rounds, i.e. target forwards after the prefill.
        accepted: drafted tokens accepted, per round.
        offered: depth of the tree, per round; where EOS or a stop string cut the path, the depth of the cut (nothing
            below it was tested).
        draft_seconds: in the drafter (its prefill included); `target_seconds`: in the rounds' target forwards and head.
        prefill_seconds: from joining the batch until the first token was known, which is the time to first token.
        total_seconds: from joining the batch until the last token was known; not a share.
        token_seconds: per new token, when it was known, counted from joining.
        finish: why it ended: `eos`, `stop` (a stop string) or `length`; empty while it goes on.
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
    finish: str = ""

    @property
    def ended(self) -> bool:
        """By EOS or a stop string, not by the limit."""
        return self.finish in ("eos", "stop")

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
    """Attributes: tokens: the new tokens, EOS included; stats: how they came about; text: where it was asked for."""

    tokens: list[int]
    stats: Stats
    text: str = ""
