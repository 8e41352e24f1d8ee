"""A small causal language model as drafter (speculative decoding as in arXiv 2211.17192 and 2302.01318).

It reads tokens only, no target features, and predicts as any language model does:

    position t            0    1    2    3    4
    token                 x0   x1   x2   x3   x4
    drafter distribution  q1   q2   q3   q4   q5      q_{t+1} knows x0..x_t, is aligned with the target's p_{t+1}

In the notation of batch.py, depth k of anchor t is position t + 1 + k. Every depth is the same function of the tokens before
it, so training has one depth: white-box distillation at each response position (DistillSpec, arXiv 2310.08461),
on the target's responses or on the drafter's own (training/on_policy.py).

The model runs as the target does: `Target` with its attention contexts, a `TreeCache`, the CPU kernels for few tokens. It is
saved as a plain checkpoint of its own architecture, which vLLM, transformers and llama.cpp load.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.batch import Batch, StepOutput, TokenTree, anchors_by_depth, sums_by_depth
from drafttrain.drafters.base import JointSession, KeepTokens, Samplers, Specs, StepInputs, Tensors
from drafttrain.drafters.common.configs import TargetedConfig
from drafttrain.drafters.common.static_draft import DraftPlaces, DraftSteps, SlotAttention
from drafttrain.drafters.common.tensor_growth import Ask
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.common.tree_growth import GrowingTree, Logits, grow_trees
from drafttrain.drafters.draft_model import start as language_models
from drafttrain.drafters.registry import META_FILE
from drafttrain.environment import __version__
from drafttrain.errors import UserError
from drafttrain.files import Json, write_json
from drafttrain.formats.weights import read_config
from drafttrain.losses import StoredTopK, linear_divergence
from drafttrain.ops.tree_attention import TreeLayout
from drafttrain.ops.tree_cache import TreeCache
from drafttrain.sequence_parallel import SharedPart
from drafttrain.target import Target
from drafttrain.target.attention import DocumentAttention, apart, attention_context
from drafttrain.target.shared_rows import SharedRows
from drafttrain.values import Name, Size

_ADAPTER = "adapter"
# Slots in a cache for the nodes of a growing tree; the cache grows when it needs more.
_TREE_SLOTS = 64


class DraftModelConfig(TargetedConfig):
    """How a draft model began and is trained; its shapes are in the language model's own config.

    Attributes:
        layers: the target's layers that it was built from, for init=target.
        embedding: for init=target: `copied` (trained) or `shared` (frozen, the target's own).
        config: folder, Hub id or fields of the language model's config, for init=random.
        lora: options of `start.add_lora`; empty trains all weights.
    """

    model_type = "drafttrain_draft_model"
    layers: tuple[Size, ...] = ()
    embedding: Literal["copied", "shared"] = "copied"
    config: Name | Json = ""
    lora: Json | None = field(default_factory=dict)

    def check(self) -> None:
        self.lora = self.lora or {}

    def described(self) -> Json:
        """Content of drafttrain.json."""
        names = ("drafter_kind", "layers", "embedding", "config", "lora", "loss", "target")
        return {"drafttrain": __version__, **{name: getattr(self, name) for name in names}}


# A recipe's `drafter:` keys by `init`.
_OPTIONS = {"target": {"layers", "embedding", "lora"}, "random": {"config", "lora"}, "checkpoint": {"lora"}}


class DraftModel(TrainableDrafter):
    """A causal language model as a drafter.

    Attributes:
        lm: the language model, trained in place; runner: the same model as a `Target`, for decoding.
        kept_ids: [d] the ids that both vocabularies have: 0 to d - 1, d being the smaller number of rows.
    """

    config_class = DraftModelConfig
    kind = "draft_model"
    static = True
    pretrains = True
    writes_responses = True
    loads_language_models = True
    chain_depth = 4

    def __init__(self, lm: Any, tokenizer: Any, config: DraftModelConfig, name: str = ""):
        super().__init__(config)
        self.lm, self.tokenizer = lm, tokenizer
        self._no_split_modules = getattr(lm, "_no_split_modules", None)
        if config.lora:
            language_models.add_lora(lm, config.lora)
        try:
            self.runner = Target.wrap(lm, tokenizer, name or type(lm).__name__, freeze=False)
        except UserError as error:
            raise UserError(f"draft model: {error}") from error
        self.vocab_size = self.target_vocab_size = self.runner.vocab_size
        self.register_buffer("kept_ids", torch.arange(self.vocab_size), persistent=False)

    @classmethod
    def begin(  # type: ignore[override]
        cls, target: Target, init: str, options: Json, loss: str, keep: KeepTokens | None = None
    ) -> DraftModel:
        """Returns a draft model to train; its vocabulary is the language model's, so `keep` is unused.

        init: `target` for some of the target's own layers, `random` for a config, else a checkpoint.
        """
        known = _OPTIONS.get(init, _OPTIONS["checkpoint"])
        for key in options:
            if key not in known:
                raise UserError(
                    f"unknown key drafter.{key} for kind=draft_model with init={init!r}; there are {', '.join(sorted(known))}"
                )
        config = DraftModelConfig(**cls.check_options(options), loss=loss, target=target.identity())
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

    # -- loading and saving -------------------------------------------------------------------------------------

    @classmethod
    def load(cls, folder: Path) -> DraftModel:  # type: ignore[override]
        return cls.from_pretrained(str(folder))

    @classmethod
    def from_pretrained(cls, name: str, use_safetensors: bool = True) -> DraftModel:  # type: ignore[override]
        """Loads what `save_pretrained` wrote, or any causal language model with its tokenizer, in float32."""
        lm, tokenizer = language_models.from_checkpoint(name)
        recorded = read_config(Path(name).expanduser(), META_FILE, missing={})
        # A trained adapter is merged into the saved weights.
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
        self.lm.save_pretrained(
            folder, state_dict=language_models.merged(self.lm, state) if self.config.lora else state
        )
        if self.config.lora:
            language_models.save_adapter(self.lm, state, folder / _ADAPTER)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        write_json(folder / META_FILE, self.config.described())

    def load_checkpoint(self, folder: str | Path) -> bool:
        """Reads the weights that `save_pretrained` wrote during the same training; with LoRA, the adapter."""
        if self.config.lora:
            language_models.load_adapter(self.lm, Path(folder) / _ADAPTER)
        else:
            language_models.load_weights(self.lm, Path(folder))
        return True

    def _lm_state(self, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        state = self.state_dict() if state is None else state
        return {name.removeprefix("lm."): value for name, value in state.items()}

    # -- vocabulary, packing, copies ----------------------------------------------------------------------------

    def bind(self, target: Target) -> None:
        """Checks that token ids mean the same to both. Any target with this vocabulary fits, whatever its size."""
        language_models.check_vocabulary(self.tokenizer, target, self.runner.name)
        self.target_vocab_size = target.vocab_size
        self.kept_ids = torch.arange(min(self.vocab_size, target.vocab_size), device=target.device)

    @torch.no_grad()
    def check_packing(self) -> None:
        """Computes two conversations in one row and alone; raises UserError if the model mixes them up."""
        ids = torch.arange(1, 7, device=self.device)[None] * self.vocab_size // 8
        together = self._states(ids, torch.tensor([[0, 0, 0, 3, 3, 3]], device=self.device))[:, 3:]
        alone = self._states(ids[:, 3:])
        if not torch.allclose(together, alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max())):
            raise UserError(
                f"packing=true, but {type(self.lm).__name__} has masks of its own, which do not keep the conversations of a "
                "row apart; set packing=false"
            )

    def blank(self) -> DraftModel:
        lm, config = type(self.lm)(copy.deepcopy(self.lm.config)), copy.deepcopy(self.config)
        return type(self)(lm, self.tokenizer, config, self.runner.name)  # type: ignore[arg-type]

    def pack(self) -> None:
        self.runner.pack()

    def as_target(self) -> Target:
        """A frozen copy with only the ids that both vocabularies have."""
        state = self._lm_state()
        lm = type(self.lm)(copy.deepcopy(self.lm.config))
        lm.load_state_dict(language_models.merged(self.lm, state) if self.config.lora else state)
        if len(self.kept_ids) < self.vocab_size:
            lm.resize_token_embeddings(len(self.kept_ids))
        return Target.wrap(lm.to(self.device), self.tokenizer, self.runner.name)

    # -- training half ------------------------------------------------------------------------------------------

    @property
    def sequence_reach(self) -> int:
        return 1

    def forward(self, inputs: StepInputs) -> StepOutput:
        """One pass over the rows.

        Without `rows` the loss is the cross-entropy of the batch's own tokens (pretraining).
        """
        batch, _, _, rows, row_of, count, measure = inputs
        ids = batch.input_ids
        at = anchors_by_depth(batch.response_mask, 1)[0] + 1  # [t] flat positions
        if batch.shared is None:
            states = self._states(ids, None if batch.documents is None else batch.begins()).flatten(0, 1)[at]
        else:
            at = at[batch.part.of(at)]  # of this process
            states = self._shared_states(batch, at)
        head, d = self.lm.get_output_embeddings(), len(self.kept_ids)
        weight = head.weight[:d]  # [d, h]
        if self.runner.logit_scale != 1.0:
            states = states * self.runner.logit_scale
        if head.bias is not None:  # one more column whose input is 1
            states = torch.cat((states, states.new_ones(len(states), 1)), dim=1)
            weight = torch.cat((weight, head.bias[:d, None]), dim=1)
        if rows is None or row_of is None:  # pretraining: the text's own tokens take the place of the target
            index, loss = torch.arange(len(at), device=at.device), "ce"
            rows = StoredTopK.of_tokens(ids.flatten()[at + 1], d)
        else:
            index, loss = row_of.flatten()[at], self.config.loss
        share = (1.0 / torch.as_tensor(count, device=ids.device)).float().expand(len(at))
        out = linear_divergence(states, weight, rows, index, share, loss, measure=measure)
        return StepOutput(out.loss, sums_by_depth([out]))

    def _states(self, ids: Tensor, begins: Tensor | None = None) -> Tensor:
        """[b, s] ids -> [b, s, h]; begins: [b, s] start of each token's conversation, None for one conversation per row."""
        read = self._readable(ids)
        if begins is None:
            return self.runner.body(input_ids=read, use_cache=False).last_hidden_state
        positions = torch.arange(ids.shape[1], device=ids.device) - begins
        with apart(begins):
            return self.runner.body(input_ids=read, position_ids=positions, use_cache=False).last_hidden_state

    def _shared_states(self, batch: Batch, at: Tensor) -> Tensor:
        """States [t, h] at flat positions `at` in this process's part of rows that several share."""
        if self.lm.is_gradient_checkpointing and self.training:
            raise UserError(
                "gradient_checkpointing=true: the layers of a language model cannot be computed again while processes share "
                "rows; leave it out, or raise sequence_parallel"
            )
        assert isinstance(batch.shared, SharedPart)
        valid, place = batch.anchors()
        counts, own = batch.part.counts(valid), batch.part.of(valid)
        lengths = (batch.conversations()[:, 2] - 1).clamp(min=0)
        context = SharedRows(DocumentAttention(lengths[lengths > 0].tolist()), batch.shared, counts)
        spare = int(own.stop == own.start)  # a model runs no less than one token
        read = self._readable(batch.input_ids.flatten()[F.pad(valid[own], (0, spare))])
        with attention_context(context):
            out = self.runner.body(
                input_ids=read[None], position_ids=F.pad(place[own], (0, spare))[None], use_cache=False
            )
        return out.last_hidden_state[0][torch.searchsorted(valid[own], at)]

    def _readable(self, ids: Tensor) -> Tensor:
        """Replaces ids that the drafter has no row for, all of them padding, by its last id."""
        return ids.clamp(max=self.vocab_size - 1) if self.vocab_size < self.target_vocab_size else ids

    # -- proposal half ------------------------------------------------------------------------------------------

    def start(self, prompt_ids: Tensor, max_length: int) -> DraftModelSession:
        return DraftModelSession(self, prompt_ids, max_length)

    @torch.no_grad()
    def static_layers(self) -> dict[int, tuple[Tensor, Tensor]]:
        ids, cache = torch.zeros(1, 1, dtype=torch.long, device=self.device), TreeCache(1)
        cache.open([(0, 1)])
        self.runner.forward(ids, (), ids, cache)
        return cache.layers

    def read_static(
        self, ids: Tensor, features: Tensor, positions: Tensor, context: SlotAttention, ends: Tensor
    ) -> Tensor:
        read = self.runner.forward(self._readable(ids)[None], (), positions[None], context).last_hidden[0]
        return self._logits(read[ends])

    def draft_static(self, roots: Tensor, places: DraftPlaces) -> tuple[Logits, Ask]:
        def ask(depth: int, tokens: Tensor, parents: Tensor) -> Logits:
            positions, context = places.open(depth, parents)
            read = self.runner.forward(tokens.flatten()[None], (), positions[None], context).last_hidden[0]
            return self._logits(read).unflatten(0, tokens.shape)

        return roots[:, None], ask

    @torch.no_grad()
    def extend_all(self, sessions: Sequence[DraftModelSession], tokens: Tensors, features: Tensors) -> None:
        """One pass over the tokens that the sessions have not read yet; each session's last token becomes its root."""
        if (steps := sessions[0].steps) is not None and steps.read(sessions, tokens, features):
            return
        parts = [
            (session, rest) for session, new in zip(sessions, tokens, strict=True) if len(rest := session.take(new))
        ]
        if not parts:
            return
        sizes = [len(rest) for _, rest in parts]
        hidden = self._read([session for session, _ in parts], [rest for _, rest in parts])
        ends = torch.tensor(sizes, device=hidden.device).cumsum(0) - 1
        logits = self._logits(hidden[ends])
        for (session, rest), root in zip(parts, logits.split(1), strict=True):
            session.cache.commit([range(len(rest) - 1)])
            session.root = root

    @torch.no_grad()
    def propose_all(self, sessions: Sequence[DraftModelSession], specs: Specs, samplers: Samplers) -> list[TokenTree]:
        """One pass per depth over the nodes that any of the trees opens."""
        steps = sessions[0].steps
        if steps is not None and (static := steps.propose(sessions, specs, samplers)) is not None:
            return static
        kept = None if len(self.kept_ids) == self.target_vocab_size else self.kept_ids
        trees = []
        for row, (session, spec, sampler) in enumerate(zip(sessions, specs, samplers, strict=True)):
            session.forget()
            if session.root is not None and session.reaches(spec.depth):
                trees.append(GrowingTree(spec, session.root[0], kept, sampler, row=row))

        def step(growing: list[GrowingTree], depth: int) -> Sequence[Tensor]:
            own, tokens = [sessions[tree.row] for tree in growing], [tree.tokens for tree in growing]
            for session, tree in zip(own, growing, strict=True):
                session.open(tree.tokens, tree.parents)
            return self._logits(self._read(own, tokens)).split([len(new) for new in tokens])

        drafted = dict(zip((tree.row for tree in trees), grow_trees(trees, step), strict=True))
        return [drafted.get(row, TokenTree.empty(session.unread.device)) for row, session in enumerate(sessions)]

    def _read(self, sessions: Sequence[DraftModelSession], tokens: Sequence[Tensor]) -> Tensor:
        """The pass that the sessions' caches have opened, packed: states [n, h] of all new tokens."""
        ids = self._readable(torch.cat(list(tokens)))
        caches = [session.cache for session in sessions]
        positions = torch.cat([cache.positions(ids.device) for cache in caches], dim=1)
        context = caches[0] if len(caches) == 1 else _SeparateCaches(caches, [len(new) for new in tokens])
        return self.runner.forward(ids[None], (), positions, context).last_hidden[0]

    def _logits(self, states: Tensor) -> Tensor:
        """[n, h] -> [n, d] float32 over the ids that both vocabularies have."""
        return self.runner.head(states)[:, : len(self.kept_ids)]


class _SeparateCaches:
    """Attention context of packed tokens: each session's tokens see its own cache."""

    def __init__(self, caches: Sequence[TreeCache], sizes: Sequence[int]):
        self.caches, self.sizes = caches, list(sizes)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **form: Any) -> Tensor:
        parts = zip(self.caches, *(x.split(self.sizes, dim=2) for x in (query, key, value)), strict=True)
        return torch.cat([cache.attend(layer, q, k, v, **form) for cache, q, k, v in parts], dim=1)


class DraftModelSession(JointSession):
    """One sequence being drafted.

    The cache holds the keys of all committed tokens but the last, then the last one (the root), then this round's nodes in the
    order they were opened. Nodes that are committed keep their keys: a node sees its own path only, so reading the
    committed tokens again would give the same keys.

    Attributes:
        root: [1, d] logits after the last committed token; None before the first `extend`, and once the sequence exceeds the
            draft model's context.
        tokens, parents: of the opened nodes. full: the sequence exceeds the context.
    """

    drafter: DraftModel

    def __init__(self, drafter: DraftModel, prompt_ids: Tensor, max_length: int):
        self.drafter = drafter
        self.cache = TreeCache(max_length + _TREE_SLOTS)
        self.unread = prompt_ids[:1]  # no extend() contains the prompt's first token
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.full = False

    @property
    def held(self) -> int:
        return self.cache.lengths[0] + 1

    def advance(self, count: int) -> None:
        self.cache.lengths[0] += count

    def place(self, steps: DraftSteps, row: int) -> None:
        super().place(steps, row)
        self.cache = steps.cache.view(row)

    def reaches(self, depth: int) -> bool:
        """True if a node of this depth is inside the draft model's context."""
        limit = self.drafter.runner.max_positions
        return limit is None or self.cache.lengths[0] + 1 + depth <= limit

    def take(self, new: Tensor) -> Tensor:
        """Commits the root and the drafted nodes that `new` [m] follows, opens a pass over the rest and returns it.

        The rest contains at least the last token, whose logits are the next round's root.
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
        """Drops the opened nodes."""
        self.tokens, self.parents = [], []

    def open(self, tokens: Tensor, parents: list[int]) -> None:
        """Opens a pass over nodes: ids [m], and their parents among all opened nodes (-1: the root)."""
        length, held = self.cache.lengths[0], 1 + len(self.parents)
        self.tokens += tokens.tolist()
        self.parents += parents
        if length + 1 + len(self.parents) > self.cache.capacity:
            self.cache.reserve(length + 1 + len(self.parents) + _TREE_SLOTS)
        self.cache.open([(0, TreeLayout(length, self.parents, held=held))])


KIND = DraftModel
