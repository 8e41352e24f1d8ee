"""The drafter contract, and how a kind's name becomes its class.

A kind is one module in this folder that defines `KIND`, the class with that contract. Trained kinds are
`PreTrainedModel`s with both halves; training-free kinds fulfil the proposal half only.

    training half    training_step(batch, target_output, teacher, ...) -> StepOutput
    proposal half    start(prompt_ids, ...) -> Session;  session.extend(tokens, features);  session.propose(spec, sampler)

Sessions are one per sequence. A kind that can serve several at once overrides `extend_all` and `propose_all`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from drafttrain.batch import TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target


class Session(Protocol):
    """A drafter at work on one sequence. Its cache always reflects committed tokens and true target features."""

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        """Takes what the target has just committed.

        Args:
            tokens: [m] int64; tokens[i] follows the position that features[i] belongs to. The first calls after `start`
                cover the prompt, a long one in several pieces: tokens are prompt[1:] plus the first sampled token.
            features: [m, f*h], the target's features at those positions (f may be 0).
        """
        ...

    def propose(self, spec: TreeSpec, sampler: Sampler | None = None) -> TokenTree:
        """Drafts a tree below the last committed token. May return fewer nodes than asked, or none.

        Args:
            spec: kinds that know no probabilities propose by their rule whatever `sampled` and `stop` say.
            sampler: what `spec.sampled` draws by; needed only then.
        """
        ...


class ProbingSession(Session, Protocol):
    """A session of a kind with `probes`: nodes that the target's pass carries beside what is drafted, only to learn from."""

    def probe(self) -> tuple[list[int], list[int]]:
        """This round's probes, asked for after `propose`: their tokens, and their parents among them (-1: the root)."""
        ...

    def observe(self, chosen: list[int]) -> None:
        """Is told what the target holds for likeliest behind the root and behind each probe; -1 where it was not asked.

        It comes before the `extend` with what the round has committed, and leaves what is drafted lossless: it is known
        before the next round's tokens are chosen.
        """
        ...


class Drafter(Protocol):
    """The proposal half of the contract, which every kind fulfils; one that inherits it gets the joint steps as loops.

    Attributes:
        probes: most nodes that its sessions add to a tree; above 0 they are `ProbingSession`s.
    """

    kind: str
    feature_layers: tuple[int, ...]
    probes: int = 0
    trainable: bool = False
    kept_ids: Tensor | None

    def start(self, prompt_ids: Tensor, max_length: int) -> Session:
        """Begins a sequence. prompt_ids: [L] int64; max_length: most tokens the sequence can reach (cache size)."""
        ...

    def bind(self, target: Target) -> None:
        """Attaches what is shared with the target (embedding) and checks that the two belong together.

        Raises:
            UserError: trained for another hidden size, vocabulary or tokenizer.
        """
        ...

    def extend_all(self, sessions: Sequence[Any], tokens: Sequence[Tensor], features: Sequence[Tensor]) -> None:
        """`Session.extend` of several of this drafter's sessions; each entry belongs to one of them."""
        for session, new, states in zip(sessions, tokens, features, strict=True):
            session.extend(new, states)

    def propose_all(
        self, sessions: Sequence[Any], specs: Sequence[TreeSpec], samplers: Sequence[Sampler | None]
    ) -> list[TokenTree]:
        """`Session.propose` of several of this drafter's sessions; each spec and sampler belongs to one of them."""
        return [session.propose(*each) for session, *each in zip(sessions, specs, samplers, strict=True)]
