"""A small causal language model as drafter (speculative decoding as in arXiv 2211.17192 and 2302.01318).

It reads tokens only, no target features, and predicts as any language model does:

    position t            0    1    2    3    4
    token                 x0   x1   x2   x3   x4
    drafter distribution  q1   q2   q3   q4   q5      q_{t+1} knows x0..x_t, is aligned with the target's p_{t+1}

In the notation of batch.py, depth k of anchor t stands at position t + 1 + k. Every depth is the same function of the
tokens before it, so training knows one depth: white-box distillation at each response position (DistillSpec, arXiv
2310.08461), teacher-forced on the target's responses or on the drafter's own (training/on_policy.py).

The model runs by the means that the target runs by: `Target` with its attention contexts, a `TreeCache`, the kernels for
few tokens on a CPU. It is saved as a plain checkpoint of its own architecture, which vLLM, transformers and llama.cpp load.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from drafttrain.batch import Batch, StepOutput, TargetOutput, TokenTree
from drafttrain.drafters.base import JointSession, KeepTokens
from drafttrain.drafters.common.expand import Growing, grow
from drafttrain.drafters.common.shared import anchors_by_depth
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.draft_model.lora import add_lora, load_adapter, merged, save_adapter
from drafttrain.drafters.draft_model.start import (
    check_vocabulary,
    from_checkpoint,
    from_config,
    load_weights,
    own_layers,
)
from drafttrain.drafters.registry import META_FILE
from drafttrain.environment import __version__
from drafttrain.errors import UserError
from drafttrain.files import write_json
from drafttrain.losses import TargetRows, linear_divergence
from drafttrain.losses.next_token import next_token_loss
from drafttrain.ops.sampling import Sampler
from drafttrain.ops.tree_attention import TreeLayout
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.target import Target
from drafttrain.target.attention import apart

_ADAPTER = "adapter"
_EMBEDDINGS = ("copied", "shared")
# Room in a cache for the nodes of a growing tree; more is made when it is needed.
_TREE_ROOM = 64


class DraftModelConfig(PreTrainedConfig):
    """What is ours about a draft model; its shapes are in the language model's own config.

    Attributes:
        layers: the target's layers that it began with, for init=target.
        embedding: of such a beginning: `copied` (trained) or `shared` (frozen, the target's own).
        config: folder, Hub id or fields of the language model's config, for init=random.
        lora: options of `add_lora`; empty trains all weights.
        loss: divergence between target and drafter. target: the target's identity.
    """

    model_type = "drafttrain_draft_model"

    def __init__(
        self,
        layers: Sequence[int] = (),
        embedding: str = "copied",
        config: str | dict[str, Any] = "",
        lora: dict[str, Any] | None = None,
        loss: str = "kl",
        target: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.drafter_kind = "draft_model"
        self.layers = list(layers)
        self.embedding = embedding
        self.config = config
        self.lora = lora or {}
        self.loss = loss
        self.target = target or {}
        super().__init__(**kwargs)

    def described(self) -> dict[str, Any]:
        """What stands in drafttrain.json."""
        names = ("drafter_kind", "layers", "embedding", "config", "lora", "loss", "target")
        return {"drafttrain": __version__, **{name: getattr(self, name) for name in names}}


# Options of a recipe's `drafter:` by beginning.
_OPTIONS = {"target": {"layers", "embedding", "lora"}, "random": {"config", "lora"}, "checkpoint": {"lora"}}


class DraftModel(TrainableDrafter):
    """The drafter around a causal language model.

    Attributes:
        lm: the language model, trained in place; runner: the same model as a `Target`, which decoding runs.
        kept_ids: [d] the ids that both vocabularies have: 0 to d - 1, d being the smaller number of rows.
        pretrains: it can learn from text without a target (loss next_token).
        loads_language_models: any causal language model is one of these.
        chain_depth: depth of the chain that training's estimate of the accepted length is for.
    """

    config_class = DraftModelConfig
    kind = "draft_model"
    pretrains = True
    writes_responses = True
    loads_language_models = True
    chain_depth = 4

    def __init__(self, lm: Any, tokenizer: Any, config: DraftModelConfig, name: str = ""):
        super().__init__(config)
        self.lm, self.tokenizer = lm, tokenizer
        self._no_split_modules = getattr(lm, "_no_split_modules", None)
        if config.lora:
            add_lora(lm, config.lora)
        try:
            self.runner = Target.wrap(lm, tokenizer, name or type(lm).__name__, freeze=False)
        except UserError as error:
            raise UserError(f"draft model: {error}") from error
        self.vocab_size = self.target_vocab_size = self.runner.vocab_size
        self.register_buffer("kept_ids", torch.arange(self.vocab_size), persistent=False)

    @classmethod
    def begin(  # type: ignore[override]
        cls, target: Target, init: str, options: dict[str, Any], loss: str, keep: KeepTokens | None = None
    ) -> DraftModel:
        """A draft model to be trained.

        Args:
            init: `target` for some of the target's own layers, `random` for a config, else a checkpoint.
            options: fields of DraftModelConfig that belong to that beginning.

        Raises:
            UserError: an unknown or misplaced option, or a beginning that does not work out.
        """
        known = _OPTIONS.get(init, _OPTIONS["checkpoint"])
        for key in options:
            if key not in known:
                raise UserError(
                    f"unknown key drafter.{key} for kind=draft_model with init={init!r}; there are {', '.join(sorted(known))}"
                )
        config = DraftModelConfig(**options, loss=loss, target=target.identity())
        tokenizer = target.tokenizer
        if config.embedding not in _EMBEDDINGS:
            raise UserError(f"drafter.embedding={config.embedding!r} is not one of {', '.join(_EMBEDDINGS)}")
        if init == "target":
            lm = own_layers(target, config.layers, config.embedding == "shared")
        elif init == "random":
            lm = from_config(target, config.config)
        else:
            lm, tokenizer = from_checkpoint(init)
        drafter = cls(lm, tokenizer, config, init)
        if drafter.runner.softcap is not None:
            raise UserError(
                f"init={init!r}: {type(lm).__name__} caps its logits, which training does not support; begin with a model "
                "without final_logit_softcapping"
            )
        return drafter

    # -- loading and saving -------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, name: str, use_safetensors: bool = True) -> DraftModel:  # type: ignore[override]
        """Loads what `save_pretrained` wrote, or any causal language model with its tokenizer, in float32."""
        lm, tokenizer = from_checkpoint(name)
        meta = Path(name).expanduser() / META_FILE
        recorded = json.loads(meta.read_text()) if meta.is_file() else {}
        # An adapter that was trained is part of the weights by now.
        own = {key: recorded[key] for key in ("layers", "embedding", "config", "loss", "target") if key in recorded}
        return cls(lm, tokenizer, DraftModelConfig(**own), name)

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        state_dict: dict[str, Tensor] | None = None,
        is_main_process: bool = True,
        **_: Any,
    ) -> None:
        """Writes a plain checkpoint of the language model, adapters merged, with tokenizer, adapter and drafttrain.json.

        Args:
            state_dict: of this module, where its own weights are sharded.
        """
        if not is_main_process:
            return
        folder = Path(save_directory)
        state = self._lm_state(state_dict)
        self.lm.save_pretrained(folder, state_dict=merged(self.lm, state) if self.config.lora else state)
        if self.config.lora:
            save_adapter(self.lm, state, folder / _ADAPTER)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        write_json(folder / META_FILE, self.config.described())

    def load_checkpoint(self, folder: str | Path) -> bool:
        """Goes on from weights that `save_pretrained` wrote during the same training; with LoRA, from its adapter."""
        if self.config.lora:
            load_adapter(self.lm, Path(folder) / _ADAPTER)
        else:
            load_weights(self.lm, Path(folder))
        return True

    def _lm_state(self, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        state = self.state_dict() if state is None else state
        return {name.removeprefix("lm."): value for name, value in state.items()}

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        self.lm.gradient_checkpointing_enable(*args, **kwargs)

    def gradient_checkpointing_disable(self) -> None:
        self.lm.gradient_checkpointing_disable()

    # -- belonging to a target ----------------------------------------------------------------------------------

    def bind(self, target: Target) -> None:
        """Checks that token ids mean the same to both. Any target with this vocabulary will do, of whatever size."""
        check_vocabulary(self.tokenizer, target, self.runner.name)
        self.runner.check_head()
        self.target_vocab_size = target.vocab_size
        self.kept_ids = torch.arange(min(self.vocab_size, target.vocab_size), device=target.device)

    @torch.no_grad()
    def check_packing(self) -> None:
        """Proves on two conversations that the model keeps them apart when they share a row.

        Raises:
            UserError: it does not.
        """
        ids = torch.arange(1, 7, device=self.device)[None] * self.vocab_size // 8
        together = self._states(ids, torch.tensor([[0, 0, 0, 3, 3, 3]], device=self.device))[:, 3:]
        alone = self._states(ids[:, 3:])
        if not torch.allclose(together, alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max())):
            raise UserError(
                f"packing=true, but {type(self.lm).__name__} brings masks of its own, which do not keep the conversations of a "
                "row apart; set packing=false"
            )

    def blank(self) -> DraftModel:
        """Another one of the same shapes, with weights of its own."""
        lm, config = type(self.lm)(copy.deepcopy(self.lm.config)), copy.deepcopy(self.config)
        return type(self)(lm, self.tokenizer, config, self.runner.name)  # type: ignore[arg-type]

    def pack(self) -> None:
        """Readies the model for inference on a CPU."""
        self.runner.pack()

    def as_target(self) -> Target:
        """A frozen copy with only the ids that both vocabularies have: what samples on-policy responses."""
        state = self._lm_state()
        lm = type(self.lm)(copy.deepcopy(self.lm.config))
        lm.load_state_dict(merged(self.lm, state) if self.config.lora else state)
        if len(self.kept_ids) < self.vocab_size:
            lm.resize_token_embeddings(len(self.kept_ids))
        return Target.wrap(lm.to(self.device), self.tokenizer, self.runner.name)

    # -- training half ------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: Batch,
        embeds: Tensor,
        output: TargetOutput,
        rows: TargetRows | None,
        row_of: Tensor | None,
        count: Tensor | float,
        measure: bool = True,
    ) -> StepOutput:
        """One teacher-forced pass over the rows.

        Args:
            batch: [b, s] tokens and masks; embeds, output: not read.
            rows: the target's distributions; row_of: [b, s] int64, the row of each position. None for both: the loss is
                the cross-entropy of the batch's own tokens (pretraining).
            count: anchors in the whole optimizer step, over all ranks and accumulation steps.
            measure: also return metrics.

        Returns:
            Loss, divided by count, and sums: count, loss, agree, and alpha if there are rows; each [1].
        """
        ids = batch.input_ids
        at = anchors_by_depth(batch.response_mask, 1)[0] + 1
        states = self._states(ids, None if batch.documents is None else batch.begins()).flatten(0, 1)[at]
        head, d = self.lm.get_output_embeddings(), len(self.kept_ids)
        weight = head.weight[:d]
        if self.runner.logit_scale != 1.0:
            states = states * self.runner.logit_scale
        if head.bias is not None:  # one more column whose input is 1
            states = torch.cat((states, states.new_ones(len(states), 1)), dim=1)
            weight = torch.cat((weight, head.bias[:d, None]), dim=1)
        sums: dict[str, Tensor | None] = {"count": torch.ones_like(at)}
        if rows is None or row_of is None:
            values, agree = next_token_loss(states, weight, ids.flatten()[at + 1])
            loss = values.sum() / count
            sums |= {"loss": values.detach(), "agree": agree}
        else:
            share = (1.0 / torch.as_tensor(count, device=ids.device)).float().expand(len(at))
            out = linear_divergence(
                states, weight, rows, row_of.flatten()[at], share, self.config.loss, measure=measure
            )
            loss = out.loss
            sums |= {"loss": out.values, "alpha": out.alpha, "agree": out.agree}
        metrics = {name: value.float().sum()[None] for name, value in sums.items() if value is not None}
        return StepOutput(loss, metrics if measure else {})

    def _states(self, ids: Tensor, begins: Tensor | None = None) -> Tensor:
        """[b, s] ids -> [b, s, h]; begins: [b, s] where each token's conversation begins, None for one in each row."""
        read = self._readable(ids)
        if begins is None:
            return self.runner.body(input_ids=read, use_cache=False).last_hidden_state
        positions = torch.arange(ids.shape[1], device=ids.device) - begins
        with apart(begins):
            return self.runner.body(input_ids=read, position_ids=positions, use_cache=False).last_hidden_state

    def _readable(self, ids: Tensor) -> Tensor:
        """Ids that the drafter has no row for, all of them padding, are read as its last one."""
        return ids.clamp(max=self.vocab_size - 1) if self.vocab_size < self.target_vocab_size else ids

    # -- proposal half ------------------------------------------------------------------------------------------

    def start(self, prompt_ids: Tensor, max_length: int) -> DraftModelSession:
        return DraftModelSession(self, prompt_ids, max_length)

    @torch.no_grad()
    def extend_all(
        self, sessions: Sequence[DraftModelSession], tokens: Sequence[Tensor], features: Sequence[Tensor]
    ) -> None:
        """One pass over the tokens that the sessions have not read yet. The last of each becomes the root."""
        parts = [
            (session, rest) for session, new in zip(sessions, tokens, strict=True) if len(rest := session.take(new))
        ]
        if not parts:
            return
        sizes = [len(rest) for _, rest in parts]
        hidden = self._read([session for session, _ in parts], [rest for _, rest in parts])
        ends = torch.tensor(sizes, device=hidden.device).cumsum(0) - 1
        logits = self._logits(hidden[ends])
        for (session, rest), row in zip(parts, logits, strict=True):
            session.cache.commit([range(len(rest) - 1)])
            session.root = row

    @torch.no_grad()
    def propose_all(
        self, sessions: Sequence[DraftModelSession], specs: Sequence[TreeSpec], samplers: Sequence[Sampler | None]
    ) -> list[TokenTree]:
        """The trees of all sessions grow together: one pass per depth over the nodes that any of them opens."""
        kept = None if len(self.kept_ids) == self.target_vocab_size else self.kept_ids
        drafts = [_Draft(*each, kept) for each in zip(sessions, specs, samplers, strict=True)]
        growing = [draft for draft in drafts if draft.tree is None]
        while growing:
            for draft in growing:
                draft.session.open(draft.tokens, draft.parents)
            out = self._logits(self._read([draft.session for draft in growing], [draft.tokens for draft in growing]))
            for draft, logits in zip(growing, out.split([len(draft.parents) for draft in growing]), strict=True):
                draft.grow(logits)
            growing = [draft for draft in growing if draft.tree is None]
        return [draft.tree for draft in drafts if draft.tree is not None]

    def _read(self, sessions: Sequence[DraftModelSession], tokens: Sequence[Tensor]) -> Tensor:
        """The pass that the sessions' caches have announced, packed: states [N, h] of all new tokens."""
        ids = self._readable(torch.cat(list(tokens)))
        caches = [session.cache for session in sessions]
        positions = torch.cat([cache.positions(ids.device) for cache in caches], dim=1)
        context = caches[0] if len(caches) == 1 else _Apart(caches, [len(new) for new in tokens])
        return self.runner.forward(ids[None], (), positions, context).last_hidden[0]

    def _logits(self, states: Tensor) -> Tensor:
        """[n, h] -> [n, d] float32 over the ids that both vocabularies have."""
        return self.runner.head(states)[:, : len(self.kept_ids)]


class _Apart:
    """Attention of packed tokens, each session's over its own cache."""

    def __init__(self, caches: Sequence[TreeCache], sizes: Sequence[int]):
        self.caches, self.sizes = caches, list(sizes)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **form: Any) -> Tensor:
        parts = zip(self.caches, *(x.split(self.sizes, dim=2) for x in (query, key, value)), strict=True)
        return torch.cat([cache.attend(layer, q, k, v, **form) for cache, q, k, v in parts], dim=1)


class DraftModelSession(JointSession):
    """One sequence being drafted.

    The cache holds the keys of all committed tokens but the last, then that last one (the root), then the nodes opened in
    this round, in the order they were opened. What was drafted and then committed keeps its keys: a node has seen just
    its own path, so they are those that reading the committed tokens would give.

    Attributes:
        root: [d] logits after the last committed token; None before the first `extend`, and once the sequence is longer
            than the draft model reads.
        tokens, parents: of the opened nodes.
    """

    def __init__(self, drafter: DraftModel, prompt_ids: Tensor, max_length: int):
        self.drafter = drafter
        self.cache = TreeCache(max_length + _TREE_ROOM)
        self.unread = prompt_ids[:1]  # no extend() brings the prompt's first token
        self.root: Tensor | None = None
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.full = False

    def reaches(self, depth: int) -> bool:
        """True if the draft model reads that far behind the root."""
        limit = self.drafter.runner.max_positions
        return limit is None or self.cache.lengths[0] + 1 + depth <= limit

    def take(self, new: Tensor) -> Tensor:
        """Commits root and drafted nodes as far as `new` [m] follows them, and announces the rest, which it returns.

        At least the last token is left: its logits are what the next round begins with.
        """
        if self.full:
            return new[:0]
        if self.root is not None:
            kept = [0]
            for token in new[:-1].tolist():
                child = self._child(kept[-1] - 1, token)
                if child < 0:
                    break
                kept.append(child + 1)
            self.cache.open([(0, TreeLayout(self.cache.lengths[0], self.parents, held=1 + len(self.parents)))])
            self.cache.commit([kept])
            new = new[len(kept) - 1 :]
        self.forget()
        new, self.unread = torch.cat((self.unread, new)), new[:0]
        self.full = not self.reaches(len(new) - 1)
        if self.full:
            self.root = None
            return new[:0]
        self.cache.reserve(self.cache.lengths[0] + len(new))
        self.cache.open([(0, len(new))])
        return new

    def _child(self, parent: int, token: int) -> int:
        found = (i for i, node in enumerate(zip(self.parents, self.tokens, strict=True)) if node == (parent, token))
        return next(found, -1)

    def forget(self) -> None:
        """Drops the nodes that were opened."""
        self.tokens, self.parents = [], []

    def open(self, tokens: Tensor, parents: list[int]) -> None:
        """Announces a pass over nodes: ids [m], and their parents among all opened nodes (-1: the root)."""
        length, held = self.cache.lengths[0], 1 + len(self.parents)
        self.tokens += tokens.tolist()
        self.parents += parents
        if length + 1 + len(self.parents) > self.cache.capacity:
            self.cache.reserve(length + 1 + len(self.parents) + _TREE_ROOM)
        self.cache.open([(0, TreeLayout(length, self.parents, held=held))])


class _Draft(Growing):
    """A session's tree while it grows."""

    def __init__(self, session: DraftModelSession, spec: TreeSpec, sampler: Sampler | None, kept_ids: Tensor | None):
        self.session = session
        session.forget()
        if session.root is None or not session.reaches(spec.depth):
            self.tree = TokenTree.empty(session.unread.device)
            return
        super().__init__(grow(spec, session.root, kept_ids, sampler))


KIND = DraftModel
