"""A small causal language model as drafter.

Speculative decoding as in arXiv 2211.17192 and 2302.01318.
It reads tokens only, no target features, and predicts as any language model does:

    position t            0    1    2    3    4
    token                 x0   x1   x2   x3   x4
    drafter distribution  q1   q2   q3   q4   q5      q_{t+1} knows x0..x_t, is aligned with the target's p_{t+1}

In the notation of batch.py, depth k of anchor t is position t + 1 + k. Every depth is the same
function of the tokens before it, so training has one depth: white-box distillation at each response
position (DistillSpec, arXiv 2310.08461), on the target's responses or on the drafter's own
(training/on_policy.py).

The model runs as the target does: `Target` with its attention contexts, a `TreeCache`, the CPU
kernels for few tokens. It is saved as a plain checkpoint of its own architecture, which vLLM,
transformers and llama.cpp load.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.batch import Batch, StepOutput, anchors_by_depth
from drafttrain.drafters.base import KeepTokens, StepInputs
from drafttrain.drafters.common import lora
from drafttrain.drafters.common.configs import TargetedConfig
from drafttrain.drafters.common.rows import Ask, Children, DraftPass, Nodes, Places
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.draft_model import start as language_models
from drafttrain.drafters.draft_model.draft_sessions import (
    DraftModelSession,
    OwnVocabularySession,
)
from drafttrain.drafters.draft_model.vocabularies import TokenBytes, VocabularyPair
from drafttrain.drafters.registry import META_FILE
from drafttrain.environment import __version__
from drafttrain.errors import UserError
from drafttrain.files import Json, write_json
from drafttrain.formats.weights import read_config
from drafttrain.losses import StoredTopK, linear_divergence, sums_by_depth
from drafttrain.ops.tree_cache import Buffers, TreeCache
from drafttrain.sequence_parallel import SharedPart
from drafttrain.target import Target
from drafttrain.target.attention import DocumentAttention, apart, attention_context
from drafttrain.target.shared_rows import SharedRows
from drafttrain.values import Name, Size


class DraftModelConfig(TargetedConfig):
    """How a draft model began and is trained; its shapes are in the language model's own config.

    Attributes:
        layers: the target's layers that it is built from, for init=target.
        embedding: for init=target: `copied` (trained) or `shared` (frozen, the target's own).
        config: folder, Hub id or fields of the language model's config, for init=random.
        lora: adapters to train, {r: 8, alpha: 16, targets: all-linear, dropout: 0}; empty trains
            all weights.
        vocabulary_match: how a draft model whose vocabulary is not the target's drafts for it, by
            shared tokens or by text.
    """

    model_type = "drafttrain_draft_model"
    recipe_keys = ("loss", "vocabulary_match")
    layers: tuple[Size, ...] = ()
    embedding: Literal["copied", "shared"] = "copied"
    config: Name | Json = ""
    lora: Json | None = field(default_factory=dict)
    vocabulary_match: Literal["auto", "tokens", "text"] = "auto"

    def check(self) -> None:
        if self.lora is None:
            self.lora = {}

    def described(self) -> Json:
        """Content of drafttrain.json."""
        return {
            "drafttrain": __version__,
            "drafter_kind": self.drafter_kind,
            "layers": self.layers,
            "embedding": self.embedding,
            "config": self.config,
            "lora": self.lora,
            "vocabulary_match": self.vocabulary_match,
            "loss": self.loss,
            "target": self.target,
        }


logger = logging.getLogger(__name__)
# A recipe's `drafter:` keys by `init`.
_OPTIONS = {
    "target": {"layers", "embedding", "lora"},
    "random": {"config", "lora"},
    "checkpoint": {"lora", "vocabulary_match"},
}


class DraftModel(TrainableDrafter):
    """A causal language model as a drafter.

    Attributes:
        lm: the language model, trained in place. runner: the same model as a `Target`, for
            decoding.
        kept_ids: [d] the target's ids of tokens that both vocabularies have: 0 to d - 1, d being
            the smaller number of rows, if the same ids mean the same tokens.
        pair: both vocabularies, where the draft model's own ids differ from the target's; None
            where they do not.
    """

    config_class = DraftModelConfig
    kind = "draft_model"
    pretrains = True
    writes_responses = True
    loads_language_models = True
    chain_depth = 4
    name_options = ("vocabulary_match",)

    def __init__(
        self,
        lm: Any,
        tokenizer: Any,
        config: DraftModelConfig,
        name: str = "",
    ):
        super().__init__(config)
        self.lm = lm
        self.tokenizer = tokenizer
        self._no_split_modules = getattr(lm, "_no_split_modules", None)
        if config.lora:
            lora.add_lora(lm, config.lora)
        try:
            self.runner = Target.wrap(lm, tokenizer, name or type(lm).__name__, freeze=False)
        except UserError as error:
            # The drafter's model is checked as a target's is.
            reason = str(error).replace("target=", "drafter=", 1)
            raise UserError(f"{reason}: draft models need packed trees") from error
        self.vocab_size = self.runner.vocab_size
        self.target_vocab_size = self.vocab_size
        self.register_buffer("kept_ids", torch.arange(self.vocab_size), persistent=False)
        self.pair: VocabularyPair | None = None

    @classmethod
    def begin(  # type: ignore[override]
        cls,
        target: Target,
        init: str,
        options: Json,
        loss: str,
        keep: KeepTokens | None = None,
    ) -> DraftModel:
        """Returns a draft model to train.

        Its vocabulary is the language model's, so `keep` is unused.

        Args:
            init: `target` for some of the target's own layers, `random` for a config, else a
                checkpoint.
        """
        known = _OPTIONS.get(init, _OPTIONS["checkpoint"])
        for key in options:
            if key not in known:
                raise UserError(
                    f"unknown key drafter.{key} for kind=draft_model with init={init!r}; there are {', '.join(sorted(known))}"
                )
        config = DraftModelConfig(
            **cls.check_options(options),
            loss=loss,
            target=target.identity(),
        )
        tokenizer = target.tokenizer
        if init == "target":
            lm = language_models.own_layers(target, config.layers, config.embedding == "shared")
        elif init == "random":
            lm = language_models.from_config(target, config.config)
        else:
            lm, tokenizer = language_models.from_checkpoint(init)
        drafter = cls(lm, tokenizer, config, init)
        if drafter.runner.softcap is not None:
            raise UserError(
                f"init={init!r}: {type(lm).__name__} caps its logits, which training does not support; start from a model "
                "without final_logit_softcapping"
            )
        return drafter

    # -- loading and saving ------------------------------------------------------------------------

    @classmethod
    def saved_config(cls, folder: Path) -> DraftModelConfig:
        recorded = read_config(folder, META_FILE, missing={})
        # A trained adapter is merged into the saved weights.
        keys = ("layers", "embedding", "config", "vocabulary_match", "loss", "target")
        return DraftModelConfig(**{key: recorded[key] for key in keys if key in recorded})

    @classmethod
    def load(cls, folder: Path) -> DraftModel:  # type: ignore[override]
        """Loads what `save_pretrained` wrote, or any causal language model, in float32."""
        lm, tokenizer = language_models.from_checkpoint(str(folder))
        drafter = cls(lm, tokenizer, cls.saved_config(folder), str(folder))
        drafter.name_or_path = str(folder)
        return drafter

    def write(
        self,
        folder: str | Path,
        state_dict: dict[str, Tensor] | None = None,
        is_main_process: bool = True,
        **_: Any,
    ) -> None:
        """Writes a plain checkpoint of the language model, with tokenizer and drafttrain.json.

        Adapters are merged into its weights, and are in a folder of their own too.

        Args:
            state_dict: of this module, where its own weights are sharded.
        """
        if not is_main_process:
            return
        folder = Path(folder)
        state = self._lm_state(state_dict)
        self.lm.save_pretrained(folder, state_dict=self._plain_state(state))
        if self.config.lora:
            lora.save_adapter(self.lm, state, folder / lora.FOLDER)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        described = self.config.described()
        described["other_vocabulary"] = self.pair is not None
        write_json(folder / META_FILE, described)

    def load_checkpoint(self, folder: str | Path) -> bool:
        """Reads the weights that the same training wrote; with LoRA, the adapter."""
        if self.config.lora:
            lora.load_adapter(self.lm, Path(folder) / lora.FOLDER)
        else:
            language_models.load_weights(self.lm, Path(folder))
        return True

    def _lm_state(self, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The state dict of the language model, with adapters."""
        if state is None:
            state = self.state_dict()
        return {name.removeprefix("lm."): value for name, value in state.items()}

    def _plain_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of the language model with its adapters merged."""
        if self.config.lora:
            return lora.merged(self.lm, state)
        return state

    # -- vocabulary, packing, copies ---------------------------------------------------------------

    def bind(self, target: Target) -> None:
        """Compares the vocabularies.

        With the target's ids the model fits whatever its size. With others it drafts by shared
        tokens or through the text, and logs how.

        Raises:
            UserError: a tokenizer whose tokens cannot be read as bytes, or no shared token to
                draft.
        """
        self.target_vocab_size = target.vocab_size
        wanted = self.config.vocabulary_match
        if self.pair is not None and self.pair.target.tokenizer is target.tokenizer:
            return
        self.pair = None
        self.kept_ids = torch.arange(min(self.vocab_size, target.vocab_size), device=target.device)
        differing = language_models.differing_ids(self.tokenizer, target)
        if not differing and (wanted != "text" or self.tokenizer is None):
            return
        # Vocabularies that differ: their tokens are compared as bytes.
        theirs = TokenBytes(target.tokenizer, target.vocab_size, target.name)
        own = TokenBytes(self.tokenizer, self.vocab_size, self.runner.name)
        self.pair = VocabularyPair(theirs, own, wanted, target.device)
        self.kept_ids = self.pair.kept_ids
        logger.info(
            f"drafter={self.runner.name!r} has a vocabulary of its own and drafts by {self.pair.way} (vocabulary_match="
            f"{wanted}): it shares {len(self.kept_ids):,} of {target.name!r}'s {len(theirs.ids):,} tokens, and "
            f"{100 * self.pair.of_text:.0f} % of those of a sample text"
        )

    @property
    def vocabulary(self) -> Tensor | None:
        if self.pair is not None and self.pair.way != "tokens":
            return None
        return self.kept_ids

    def fit(self) -> Json:
        if self.pair is None:
            return {}
        return {"vocabulary": self.pair.recorded}

    @torch.no_grad()
    def check_packing(self) -> None:
        """Computes two conversations in one row and alone.

        Raises:
            UserError: the model mixes them up.
        """
        ids = torch.arange(1, 7, device=self.device)[None] * self.vocab_size // 8  # spread ids
        begins = torch.tensor([[0, 0, 0, 3, 3, 3]], device=self.device)
        together = self._states(ids, begins)[:, 3:]
        alone = self._states(ids[:, 3:])
        if not torch.allclose(together, alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max())):
            raise UserError(
                f"packing=true, but {type(self.lm).__name__} has masks of its own, which do not keep the conversations of a "
                "row apart; set packing=false"
            )

    def blank(self) -> DraftModel:
        lm = type(self.lm)(copy.deepcopy(self.lm.config))
        config = copy.deepcopy(self.config)
        other = type(self)(lm, self.tokenizer, config, self.runner.name)  # type: ignore[arg-type]
        other.pair = self.pair
        other.kept_ids = self.kept_ids
        return other

    def pack(self) -> None:
        self.keep_saved()
        self.runner.pack()

    def implementation(self, spec: TreeSpec) -> str:
        return self.runner.implementation

    def as_target(self) -> Target:
        """A frozen copy with only the ids that both vocabularies have.

        Raises:
            UserError: ids of another vocabulary than the target's.
        """
        if self.pair is not None:
            raise UserError(
                f"on_policy: {self.runner.name!r} has another vocabulary than the target, so its answers are not target "
                "tokens; leave it out"
            )
        lm = type(self.lm)(copy.deepcopy(self.lm.config))
        lm.load_state_dict(self._plain_state(self._lm_state()))
        if len(self.kept_ids) < self.vocab_size:
            lm.resize_token_embeddings(len(self.kept_ids))
        return Target.wrap(lm.to(self.device), self.tokenizer, self.runner.name)

    # -- training half -----------------------------------------------------------------------------

    @property
    def sequence_reach(self) -> int:
        return 1

    def forward(self, inputs: StepInputs) -> StepOutput:
        """Computes one pass over the rows.

        Without `rows` the loss is the cross-entropy of the batch's own tokens (pretraining).
        """
        batch = inputs.batch
        ids = batch.input_ids
        at = anchors_by_depth(batch.response_mask, 1)[0] + 1  # [t] flat positions

        # States [t, h] that predict the next tokens.
        if self.pair is not None:
            states, at = self._states_of_text(self.pair, inputs, at)
        elif batch.shared is None:
            begins = None
            if batch.documents is not None:
                begins = batch.begins()
            states = self._states(ids, begins).flatten(0, 1)[at]
        else:
            at = at[batch.part.of(at)]  # of this process
            states = self._shared_states(batch, at)

        # Head rows [d, h] of the tokens that both vocabularies have.
        head = self.lm.get_output_embeddings()
        d = len(self.kept_ids)
        own: slice | Tensor = slice(d)
        if self.pair is not None:
            own = self.pair.own_ids
        weight = head.weight[own]
        if self.runner.logit_scale != 1.0:
            states = states * self.runner.logit_scale
        if head.bias is not None:  # one more column whose input is 1
            states = torch.cat((states, states.new_ones(len(states), 1)), dim=1)
            weight = torch.cat((weight, head.bias[own, None]), dim=1)

        # The loss. In pretraining the text's own tokens take the place of the target's predictions.
        rows = inputs.rows
        if rows is None or inputs.row_of is None:
            index = torch.arange(len(at), device=at.device)
            loss = "ce"
            rows = StoredTopK.of_tokens(ids.flatten()[at + 1], d)
        else:
            index = inputs.row_of.flatten()[at]  # [t] rows of the target's distributions
            loss = self.config.loss
        total = torch.as_tensor(inputs.total, device=ids.device)
        share = (1.0 / total).float().expand(len(at))  # [t], weight of each prediction
        out = linear_divergence(
            states,
            weight,
            rows,
            index,
            share,
            loss,
            measure=inputs.measure,
        )
        return StepOutput(out.loss, sums_by_depth([out]))

    def _states(self, ids: Tensor, begins: Tensor | None = None) -> Tensor:
        """[b, s] ids -> [b, s, h].

        begins: [b, s] start of each token's conversation; None for one conversation per row.
        """
        read = self._readable(ids)
        if begins is None:
            return self.runner.body(input_ids=read, use_cache=False).last_hidden_state
        positions = torch.arange(ids.shape[1], device=ids.device) - begins
        with apart(begins):
            out = self.runner.body(
                input_ids=read,
                position_ids=positions,
                use_cache=False,
            )
        return out.last_hidden_state

    def _states_of_text(
        self,
        pair: VocabularyPair,
        inputs: StepInputs,
        at: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """States of a model with its own vocabulary, at flat positions `at` [t].

        Returns:
            States [u, h], and the u positions of them where a token of the model ends with the
            target's: at the others it has read more or less than the target.
        """
        refused = ""
        if inputs.rows is None:
            refused = "loss=next_token"
            fix = "loss=kl"
        elif inputs.batch.shared is not None:
            refused = "sequence_parallel"
            fix = "sequence_parallel=1"
        if refused:
            raise UserError(
                f"{refused}: {self.runner.name!r} has another vocabulary than the target, which this does not support; set {fix}"
            )
        ids, found, flat = pair.align(inputs.batch, at)  # [c, s'], [t], [u]
        states = self.runner.body(input_ids=ids, use_cache=False).last_hidden_state  # [c, s', h]
        return states.flatten(0, 1)[flat], at[found]

    def _shared_states(self, batch: Batch, at: Tensor) -> Tensor:
        """States [t, h] at flat positions `at`, in this process's part of shared rows."""
        if self.lm.is_gradient_checkpointing and self.training:
            raise UserError(
                "gradient_checkpointing=true: the layers of a language model cannot be computed again while processes share "
                "rows; leave it out, or raise sequence_parallel"
            )
        assert isinstance(batch.shared, SharedPart)
        valid, place = batch.anchors()  # [n] flat positions, and positions in their conversations
        counts = batch.part.counts(valid)
        own = batch.part.of(valid)
        lengths = (batch.conversations()[:, 2] - 1).clamp(min=0)  # [c] tokens to read
        context = SharedRows(DocumentAttention(lengths[lengths > 0].tolist()), batch.shared, counts)
        spare = int(own.stop == own.start)  # a model runs no less than one token
        read = self._readable(batch.input_ids.flatten()[F.pad(valid[own], (0, spare))])
        positions = F.pad(place[own], (0, spare))
        with attention_context(context):
            out = self.runner.body(
                input_ids=read[None],
                position_ids=positions[None],
                use_cache=False,
            )
        return out.last_hidden_state[0][torch.searchsorted(valid[own], at)]

    def _readable(self, ids: Tensor) -> Tensor:
        """Replaces ids that the drafter has no row for, all of them padding, by its last id."""
        if self.vocab_size < self.target_vocab_size:
            return ids.clamp(max=self.vocab_size - 1)
        return ids

    # -- proposal half -----------------------------------------------------------------------------

    def start(self, prompt_ids: Tensor, max_length: int) -> DraftModelSession:
        if self.pair is not None:
            return OwnVocabularySession(self, self.pair, prompt_ids, max_length)
        return DraftModelSession(self, prompt_ids, max_length)

    @property
    def static(self) -> bool:  # type: ignore[override]
        """False with another vocabulary: its tokens come from text, on the host."""
        return self.pair is None

    @torch.no_grad()
    def static_layers(self) -> Buffers:
        # One token shows the shapes of all layers' keys.
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        cache = TreeCache(1)
        cache.open([(0, 1)])
        self.runner.forward(ids, (), ids, cache)
        return cache.layers

    def read_committed(self, ids: Tensor, features: Tensor, at: DraftPass) -> Tensor:
        """Roots [R, d], the logits after the last tokens."""
        return self._logits(self._pass(ids, at)[at.ends])

    def draft(
        self,
        roots: Tensor,
        places: Places,
        width: int | None,
    ) -> tuple[Children, Ask]:
        def ask(nodes: Nodes) -> Children:
            return Children(self._logits(self._pass(nodes.tokens(), nodes.place())))

        return Children(roots), ask

    def _pass(self, ids: Tensor, at: DraftPass) -> Tensor:
        """States [n, h] of new tokens."""
        read = self._readable(ids)[None]
        out = self.runner.forward(read, (), at.positions[None], at.context)
        return out.last_hidden[0]

    def choice_of(self, spec: TreeSpec) -> tuple[slice | Tensor, Tensor | None]:
        """The columns of `_logits` that a tree is drafted from, and their target ids.

        The ids are None if they are the same, or if the tree is drafted in the model's own tokens.
        """
        if self.pair is None:
            if len(self.kept_ids) == self.target_vocab_size:
                return (slice(None), None)
            return (slice(None), self.kept_ids)
        if self.pair.by_text(spec):
            return (slice(None), None)
        return (self.pair.own_ids, self.pair.kept_ids)

    def _logits(self, states: Tensor) -> Tensor:
        """[n, h] -> [n, d] float32 over the ids that both vocabularies have.

        A model with another vocabulary has logits of all its own ids.
        """
        logits = self.runner.head(states)
        if self.pair is None:
            return logits[:, : len(self.kept_ids)]
        return logits


KIND = DraftModel
