"""The drafter contract: every fact and hook that other subpackages use, each with its default.

A kind is a folder drafters/KIND/ whose model.py defines `KIND`, a subclass of `Drafter`:

    facts            class attributes: what the kind is and which features it supports
    training half    begin -> bind -> solve_start -> forward, forward, ... -> suggest_tree -> save_pretrained
    proposal half    load -> pack -> bind -> start -> Session; then extend_all and propose_all once per round
    shipping half    formats, unsupported features, writing and reading: drafters/KIND/export.py, see drafters/shipping.py

Kinds without weights implement the proposal half only. Trained kinds are `PreTrainedModel`s too and
inherit `common.trainable.TrainableDrafter`, which implements most hooks.
docs/developer/add-a-drafter-kind.md builds one.

Shapes: see batch.py for b, s, h, f, v, d, n, k and for the alignment of anchors and depths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from drafttrain.batch import Batch, StepOutput, TokenTree
from drafttrain.drafters.common.rows import Predictions as Predictions
from drafttrain.drafters.common.rows import Session as Session
from drafttrain.drafters.common.saving import NamedDrafter
from drafttrain.drafters.common.static_draft import DraftSteps
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.losses import TargetRows
from drafttrain.ops.graphs import GraphPool
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target

# Runs the target on a batch: features [b, s, f*h], distributions, row of each position [b, s] (-1
# where none is needed).
Source = Callable[[Batch], tuple[Tensor, TargetRows, Tensor]]
# The kept target ids [d] for a vocabulary of at most `size` tokens; 0 keeps all.
KeepTokens = Callable[[int], Tensor]
# Of several sessions, entry i belongs to session i.
Tensors = Sequence[Tensor]  # tokens or features
Samplers = Sequence[Sampler | None]  # which draw the trees' tokens
# Values of a recipe's `init` that make a new drafter; any other value names a drafter to continue.
NEW = ("target", "random", "native")


class StepInputs(NamedTuple):
    """What a drafter reads in one training step.

    Attributes:
        batch: tokens and masks [b, s].
        embeds: [b, s, h], the target's embeddings of the batch's tokens.
        features: [b, s, f*h], the target's for `feature_layers`.
        rows: the target's distributions; with `pretrains` None: the loss is the batch's own next
            tokens'.
        row_of: [b, s] int64, the row of each position in `rows`; -1 where none is needed.
        total: anchors in the whole optimizer step, over all ranks and accumulation steps; the loss
            is divided by it.
        measure: also return metrics.
    """

    batch: Batch
    embeds: Tensor
    features: Tensor
    rows: TargetRows
    row_of: Tensor
    total: Tensor | float
    measure: bool = True


class Drafter(NamedDrafter):
    """Base class of all drafters.

    Every hook that other subpackages call is declared here with its default.

    Attributes:
        kind: the kind's name, which is its folder's.
        trainable: the kind has weights, and `drafttrain train` accepts it.
        feature_layers: target hidden states that the drafter reads, concatenated to [., f*h]; see
            `Target.forward`.
        reads_features: name of the weight [h, f*h] that reads them; empty in kinds without one.
        probes: most probes per round of a session, see `Session.probe`.
        predictions: the target's likeliest tokens per node that sessions read, see
            `Session.read_predictions`.
        drafts_alone: beside another drafter (FIRST+KIND), likely matches are drafted without a pass
            of the other one.
        takes_packed_rows: `forward` accepts rows that hold several conversations.
        pretrains: `forward` accepts rows=None and row_of=None, the loss `next_token` on plain text.
        writes_responses: the drafter is a language model that can answer prompts, see `as_target`.
        loads_language_models: a causal language model that is not ours loads as this kind.
        chain_depth: depth of the chain that training's estimate of the accepted length assumes; 0:
            the trained depths.
        defaults_beside: options of a kind without weights when it drafts beside another drafter
            (FIRST+KIND).
        name_options: fields of the config that a drafter's name may set (FOLDER:OPTION=VALUE).
        progress: share of its training that is done, 0 to 1; the trainer sets it before each step.
        uses_text: a sequence's tokens may join its vocabulary (`ContextTokens`); False drafts as
            engines do.
    """

    trainable: bool = False
    feature_layers: tuple[int, ...] = ()
    reads_features: str = ""
    probes: int = 0
    predictions: int = 0
    drafts_alone: bool = True
    takes_packed_rows: bool = False
    pretrains: bool = False
    writes_responses: bool = False
    loads_language_models: bool = False
    chain_depth: int = 0
    defaults_beside: ClassVar[Mapping[str, Any]] = {}
    name_options: ClassVar[tuple[str, ...]] = ()
    uses_text: bool = True
    progress: float = 1.0

    @property
    def later_depths_from(self) -> float:
        """Share of its training after which it learns depths behind the first."""
        return 0.0

    @property
    def sequence_reach(self) -> int:
        """Positions behind an anchor that `forward` reads; 0: processes may not share rows."""
        return 0

    @property
    def vocabulary(self) -> Tensor | None:
        """[d] int64, target ids that the drafter can propose; None: all of them.

        Trained kinds store it as `kept_ids`.
        """
        return None

    @property
    def joins_tokens(self) -> bool:
        """Whether tokens of a sequence's text join `vocabulary` in its session."""
        return False

    # -- training half -----------------------------------------------------------------------------

    def norm_features(self, features: Tensor) -> Tensor:
        """[t, f*h] target features as the weight `reads_features` reads them."""
        return features

    @classmethod
    def begin(
        cls,
        target: Target,
        init: str,
        options: Json,
        loss: str,
        keep: KeepTokens | None = None,
    ) -> Self:
        """Returns a drafter to train, bound to the target unless `init` is one of NEW.

        Args:
            init: one of NEW, or the folder or Hub id of a drafter to continue.
            options: the recipe's `drafter:` keys. loss: the recipe's loss. keep: chooses the
                drafter's vocabulary.

        Raises:
            UserError: a kind without weights, an unknown option, or a drafter that does not fit the
                target.
        """
        raise UserError(
            f"kind={cls.kind!r} has no weights to train; use it directly: drafttrain eval --drafter {cls.kind}"
        )

    @classmethod
    def native(
        cls,
        target: Target,
        kept_ids: Tensor,
        options: Json,
    ) -> Self:
        """Returns a drafter with the weights of the target's own module (init=native).

        Raises:
            UserError: targets come with no drafter of this kind (the default), or this target does
                not.
        """
        raise UserError(
            f"init='native': no target comes with a drafter of kind={cls.kind!r}; use init=target"
        )

    @classmethod
    def native_options(cls, target: Target) -> Json:
        """Returns the options with which a drafter on the meta device has the shapes of `native`.

        They follow from the target's config alone.

        Raises:
            UserError: as `native`.
        """
        raise UserError(
            f"init='native': no target comes with a drafter of kind={cls.kind!r}; use init=target"
        )

    def initialize(self, target: Target, kept_ids: Tensor) -> list[str]:
        """Copies what fits from the target (init=target) and stores `kept_ids` [d].

        Returns:
            The names of what it copied.
        """
        return []

    def solve_start(self, batches: list[Batch], source: Source) -> float | None:
        """Solves part of the weights in closed form on some training data, before the first step.

        Returns:
            Share of the target's last state that the start explains, 0 to 1; None for kinds without
            a closed form.
        """
        return None

    def suggest_tree(self, batches: list[Batch], source: Source) -> str | None:
        """Chooses a default tree on held-out data after training.

        Returns:
            Its text form; None for no suggestion.
        """
        return None

    def check_packing(self) -> None:
        """Raises UserError if this drafter mixes up the conversations of a packed row."""

    def forward(self, inputs: StepInputs) -> StepOutput:
        """One training step: the loss of all depths at all anchors of a batch.

        Returns:
            The loss and, per depth, the sums over anchors of count, loss, alpha and agree, each
            [depths] float32.
        """
        raise NotImplementedError

    def blank(self) -> Self:
        """Returns another drafter of the same shapes, for a copy of sharded weights."""
        raise NotImplementedError

    def plain_state(self) -> dict[str, Tensor]:
        """The state dict that `blank` takes, with adapters merged."""
        raise NotImplementedError

    def load_checkpoint(self, folder: str | Path) -> bool:
        """Reads the weights of a training checkpoint.

        Returns:
            False if the trainer should load them by their names instead.
        """
        return False

    def as_target(self) -> Target:
        """Returns a frozen copy of the drafter as a target, which samples on-policy responses.

        Raises:
            UserError: a kind without `writes_responses`.
        """
        raise UserError(
            f"on_policy: a drafter of kind={self.kind!r} cannot write responses by itself; leave it out"
        )

    # -- proposal half -----------------------------------------------------------------------------

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Returns a saved drafter, not bound to a target. Only for trained kinds."""
        raise NotImplementedError

    def pack(self) -> None:
        """Prepares the weights for inference on a CPU; called after loading and before `bind`."""

    def bind(self, target: Target) -> None:
        """Attaches what is shared with the target (embedding, head), after checking that it fits.

        Raises:
            UserError: trained for another hidden size, vocabulary or tokenizer.
        """

    def open_steps(
        self,
        pool: GraphPool,
        capacity: int,
        rows: int,
        spec: TreeSpec,
        last: DraftSteps | None,
    ) -> DraftSteps | None:
        """Static steps for a call that decodes on a GPU; None: all passes are dynamic.

        Args:
            pool: of the graphs. capacity: most tokens of a sequence. rows: most sequences at a
                time. spec: the largest tree.
            last: steps of an earlier call, which may have been another drafter's.
        """
        return None

    def fit(self) -> Json:
        """What results record about how the drafter was bound, by key; empty by default."""
        return {}

    def implementation(self, spec: TreeSpec) -> str:
        """What drafts trees of a spec where the drafter is, and why nothing faster does."""
        return "looked up, without weights"

    def start(self, prompt_ids: Tensor, max_length: int) -> Session:
        """Returns a session for a new sequence.

        Args:
            prompt_ids: [L] int64. max_length: most tokens that the sequence can reach, which sizes
                the cache.
        """
        raise NotImplementedError

    def rewind(
        self,
        session: Session,
        prompt_ids: Tensor,
        read: int,
        max_length: int,
    ) -> Session | None:
        """Returns a session for a prompt whose beginning another one has read.

        Args:
            session: of a text that begins with the prompt's first `read + 1` tokens; it is used up.
            read: features that the returned session has read, each with the token behind it.
            prompt_ids, max_length: see `start`.

        Returns:
            None where the session cannot go back and its features are needed again.
        """
        tokens = prompt_ids[1 : read + 1]
        if self.feature_layers:
            return session if session.go_back(tokens) else None
        # Tokens alone can be read again.
        session = self.start(prompt_ids, max_length)
        session.extend(tokens, prompt_ids.new_empty(read, 0))
        return session

    def extend_all(
        self,
        sessions: Sequence[Any],
        tokens: Tensors,
        features: Tensors,
    ) -> None:
        """`Session.extend` of several of this drafter's sessions."""
        # Kinds without weights read tokens on the host: one transfer for all of them.
        if not self.trainable and tokens and not tokens[0].is_cpu:
            sizes = [len(new) for new in tokens]
            tokens = torch.cat(list(tokens)).cpu().split(sizes)
        for session, new, states in zip(sessions, tokens, features, strict=True):
            session.extend(new, states)

    def propose_all(
        self,
        sessions: Sequence[Any],
        spec: TreeSpec,
        samplers: Samplers,
    ) -> list[TokenTree]:
        """`Session.propose` of several of this drafter's sessions."""
        trees = []
        for session, sampler in zip(sessions, samplers, strict=True):
            trees.append(session.propose(spec, sampler))
        return trees
