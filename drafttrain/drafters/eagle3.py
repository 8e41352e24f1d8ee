"""EAGLE-3: one decoder layer over fused target features, trained by training-time test (arXiv 2503.01840).

    anchor t, depth 0:   state = fc(features_t)              token x_{t+1}        predicts x_{t+2}
    anchor t, depth k:   state = own output at depth k-1     token x_{t+1+k}      predicts x_{t+2+k}

    out = layer(state, embed(token))      q, k, v read norm(embed) ++ norm(state); the residual is the state
    logits = lm_head(norm(out))           over the drafter's own, pruned vocabulary

A query at (t, k) sees the depth-0 keys of anchors 0..t and its own keys at depths 1..k. Its rotary position is t + k. The
decoder computes just that: depth-0 keys come from true target features of committed tokens, deeper ones belong to the
drafted path. Both call `Eagle3.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from drafttrain.batch import Batch, StepOutput, TargetOutput, TokenTree
from drafttrain.drafters.base import TreeSpec
from drafttrain.drafters.expand import grow
from drafttrain.drafters.layers import MLP, Attend, Attention, RMSNorm, Rotary
from drafttrain.drafters.linear_start import Source, linear_start
from drafttrain.drafters.shared import anchors_by_depth, bind_target, copy_linear, copy_norm
from drafttrain.losses import TargetRows, linear_divergence
from drafttrain.ops.decoder_layer import DecoderLayer, LayerWeights
from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.packing import SKINNY_ROWS, pack
from drafttrain.ops.path_attention import PathAttention
from drafttrain.ops.sampling import Sampler
from drafttrain.target import Target


class Eagle3Config(PreTrainedConfig):
    """Shape and training recipe of an EAGLE-3 drafter.

    Attributes:
        draft_vocab_size: d, kept tokens; 0 keeps the target's whole vocabulary.
        feature_layers: target hidden states that are fused; empty means the target's default three.
        ttt_steps: depths trained. depth_decay: weight of depth k is depth_decay ** k.
        depth_share: share of anchors, drawn anew each step, that go on to depths after the first. Those losses keep their
            weight in expectation; less than 1 trains more first-depth anchors in the same time.
        target: the target's identity, checked before use.
    """

    model_type = "drafttrain_eagle3"

    def __init__(
        self,
        hidden_size: int = 64,
        intermediate_size: int = 0,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 0,
        head_dim: int = 0,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        vocab_size: int = 0,
        draft_vocab_size: int = 0,
        feature_layers: tuple[int, ...] = (),
        target_hidden_size: int = 0,
        ttt_steps: int = 4,
        depth_decay: float = 0.8,
        depth_share: float = 1.0,
        loss: str = "kl",
        target: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.drafter_kind = "eagle3"
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size or 4 * hidden_size
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.vocab_size = vocab_size
        self.draft_vocab_size = draft_vocab_size or vocab_size
        self.feature_layers = tuple(feature_layers)
        self.target_hidden_size = target_hidden_size or hidden_size
        self.ttt_steps = ttt_steps
        self.depth_decay = depth_decay
        self.depth_share = depth_share
        self.loss = loss
        self.target = target or {}
        super().__init__(**{"tie_word_embeddings": False, **kwargs})

    @classmethod
    def for_target(cls, target: Target, **options: Any) -> Eagle3Config:
        """The target's own shapes where `options` say nothing."""
        config = target.config
        rope = getattr(config, "rope_parameters", None) or {}
        rope = rope.get("full_attention", rope)
        shapes = {
            "hidden_size": target.hidden_size,
            "intermediate_size": getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            "head_dim": getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads,
            "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-5),
            "rope_theta": rope.get("rope_theta", 10000.0),
            "feature_layers": target.default_feature_layers,
        }
        fixed = {
            "vocab_size": target.vocab_size,
            "target_hidden_size": target.hidden_size,
            "target": target.identity(),
        }
        return cls(**{**shapes, **options, **fixed})


class Eagle3Layer(nn.Module):
    """The decoder layer; names follow the published checkpoints."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.target_hidden_size, eps)
        self.hidden_norm = RMSNorm(h, eps)
        self.self_attn = Attention(
            config.target_hidden_size + h,
            h,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.post_attention_layernorm = RMSNorm(h, eps)
        self.mlp = MLP(h, config.intermediate_size)
        self.native: DecoderLayer | None = None

    def pack(self) -> None:
        """Readies the layer for inference on a CPU: from now on few rows take two kernel calls around the attention."""
        attention, mlp = self.self_attn, self.mlp
        self.native = DecoderLayer(
            LayerWeights(
                qkv=torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).detach(),
                o=attention.o_proj.weight.detach(),
                gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).detach(),
                down=mlp.down_proj.weight.detach(),
                input_norm=None,
                mlp_norm=self.post_attention_layernorm.weight.detach(),
                heads=attention.heads,
                kv_heads=attention.kv_heads,
                head_dim=attention.head_dim,
                rotary_dim=attention.head_dim,
                eps=self.post_attention_layernorm.eps,
            )
        )

    def forward(self, state: Tensor, embeds: Tensor, cos: Tensor, sin: Tensor, attend: Attend, queries: Tensor | None):
        x = torch.cat((self.input_layernorm(embeds), self.hidden_norm(state)), dim=-1)
        if self.native is not None and len(x) <= SKINNY_ROWS:
            return self._native_forward(self.native, state, x, cos, sin, attend, queries)
        if queries is not None:
            state = state[queries]
        state = state + self.self_attn(x, cos, sin, attend, queries)
        return state + self.mlp(self.post_attention_layernorm(state))

    @staticmethod
    def _native_forward(
        native: DecoderLayer, state: Tensor, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, queries: Tensor | None
    ) -> Tensor:
        threads = torch.get_num_threads()
        query, key, value = (part[0].transpose(0, 1) for part in native.before(x, cos, sin, threads))
        out = state.clone() if queries is None else state[queries]
        native.after(out, attend(query if queries is None else query[queries], key, value).contiguous(), threads)
        return out


class Eagle3(PreTrainedModel):
    """The drafter. Its embedding is the target's, frozen and never saved; `bind` attaches it."""

    config_class = Eagle3Config
    base_model_prefix = ""
    _keys_to_ignore_on_load_unexpected = ["d2t", "t2d"]
    kind = "eagle3"
    trainable = True
    kept_ids: Tensor
    embed: Callable[[Tensor], Tensor]  # given by bind()

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        self.fc = nn.Linear(len(config.feature_layers) * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("kept_ids", torch.arange(config.draft_vocab_size))
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)

    @classmethod
    def load(cls, folder: Path) -> Eagle3:
        """A saved drafter, published ones included: those hold the kept ids as the engines' d2t, target id minus drafter id."""
        loaded: Any = cls.from_pretrained(folder, use_safetensors=True, output_loading_info=True)
        drafter, info = loaded
        if "kept_ids" in info["missing_keys"]:
            drafter.kept_ids = torch.arange(drafter.config.draft_vocab_size)
            if drafter.config.draft_vocab_size != drafter.config.vocab_size:
                with safe_open(folder / "model.safetensors", "pt") as file:
                    drafter.kept_ids += file.get_tensor("d2t")
        return drafter

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.config.feature_layers)

    def bind(self, target: Target) -> None:
        """Checks that this drafter was made for the target and borrows its embedding."""
        bind_target(self, target)

    def pack(self) -> None:
        """Readies the drafter for inference on a CPU in float32; elsewhere linear layers and norms as far as served."""
        if cpu_kernels() is not None and self.fc.weight.dtype == torch.float32 and self.fc.weight.device.type == "cpu":
            self.midlayer.pack()
        pack(self)

    @torch.no_grad()
    def initialise(self, target: Target, kept_ids: Tensor) -> list[str]:
        """Starts from the target: head rows of the kept tokens, and its last layer on the state half of the input.

        `fc` starts as the identity on the highest feature, so the untrained drafter is the target's last layer on a late
        state. Returns the names of what was copied.
        """
        h, ours, theirs = self.config.hidden_size, self.midlayer, target.layers[-1]
        self.kept_ids.copy_(kept_ids)
        if h != self.config.target_hidden_size:
            return []
        self.lm_head.weight.copy_(target.head_weight[kept_ids])
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -h:].add_(torch.eye(h))
        # Families with four norms a layer name the one before the MLP differently.
        before_mlp = getattr(theirs, "pre_feedforward_layernorm", None) or getattr(
            theirs, "post_attention_layernorm", None
        )
        done = {
            "norm": copy_norm(self.norm, getattr(target.body, "norm", None)),
            "hidden_norm": copy_norm(ours.hidden_norm, getattr(theirs, "input_layernorm", None)),
            "post_attention_layernorm": copy_norm(ours.post_attention_layernorm, before_mlp),
        }
        for block, names in (
            ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
            ("mlp", ("gate_proj", "up_proj", "down_proj")),
        ):
            for name in names:
                head_dim = self.config.head_dim if name in ("k_proj", "v_proj") else 0
                other = getattr(getattr(theirs, block, None), name, None)
                done[f"{block}.{name}"] = copy_linear(getattr(getattr(ours, block), name), other, head_dim)
        return ["lm_head", "fc", *(name for name, copied in done.items() if copied)]

    def solve_start(self, batches: list[Batch], source: Source) -> float:
        """Fits the linear part in closed form, see `linear_start`; returns the share of variance explained."""
        return linear_start(self, batches, source)

    # -- the one forward ----------------------------------------------------------------------------------------

    def step(
        self, state: Tensor, embeds: Tensor, positions: Tensor, attend: Attend, queries: Tensor | None = None
    ) -> Tensor:
        """One depth for t tokens.

        Args:
            state: [t, h]: fused features at depth 0, the previous depth's output below.
            embeds: [t, target h], of the tokens read; positions: [t] int64.
            attend: which keys each query sees. queries: rows that need an output (all if None).

        Returns:
            [tq, h] outputs before the final norm: what the next depth reads.
        """
        cos, sin = self.rotary.tables(positions, state.dtype)
        return self.midlayer(state, embeds.to(state.dtype), cos, sin, attend, queries)

    def logits(self, state: Tensor) -> Tensor:
        """[t, h] outputs -> [t, d] over the drafter's vocabulary."""
        return self.lm_head(self.norm(state))

    # -- training half ------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: Batch,
        embeds: Tensor,
        output: TargetOutput,
        rows: TargetRows,
        row_of: Tensor,
        count: Tensor | float,
        measure: bool = True,
    ) -> StepOutput:
        """Training-time test: `ttt_steps` depths, each fed with the previous one's output, all in one graph.

        Args:
            batch: [b, s] tokens and masks; embeds: [b, s, h] of its tokens; output: the target's features.
            rows: the target's distributions; row_of: [b, s] int64, the row of each position (-1 where none is needed).
            count: anchors in the whole optimizer step, over all ranks and accumulation steps.
            measure: also return metrics.

        Returns:
            Loss (depth-weighted, divided by count) and per-depth sums: count, loss, alpha, agree; each [ttt_steps].
        """
        config = self.config
        b, s = batch.input_ids.shape
        share = config.depth_share if self.training else 1.0
        anchors = anchors_by_depth(batch.response_mask, config.ttt_steps, share)  # k -> flat positions, nested
        valid = (torch.arange(s, device=embeds.device) < batch.lengths[:, None] - 1).flatten().nonzero().squeeze(1)
        embeds = embeds.reshape(b * s, -1)
        state = self.fc(output.features.reshape(b * s, -1)[valid].to(self.fc.weight.dtype))
        place = torch.full((b * s,), -1, device=embeds.device)
        place[valid] = torch.arange(len(valid), device=embeds.device)
        decay = config.depth_decay ** torch.arange(config.ttt_steps, dtype=torch.float32, device=embeds.device)
        decay = decay / decay.sum()

        attention = PathAttention(b, s, valid)
        losses: list[Tensor] = []
        sums: list[Tensor] = []
        for k, asking in enumerate(anchors):
            if k == 0:
                tokens_at, queries = valid + 1, place[asking]
            else:
                # Anchors are nested: keep those of the previous depth that go on.
                going_on = torch.isin(anchors[k - 1], asking, assume_unique=True)
                state = state[going_on]
                if k > 1:
                    attention.keep(going_on)
                tokens_at, queries = asking + 1 + k, None
            positions = (valid if k == 0 else asking) % s + k
            state = self.step(state, embeds[tokens_at], positions, attention.attend(asking), queries)
            weight = (decay[k] / (count * (share if k else 1.0))).expand(len(asking))
            at = row_of.flatten()[asking + 1 + k]
            out = linear_divergence(
                self.norm(state), self.lm_head.weight, rows, at, weight, config.loss, measure=measure
            )
            losses.append(out.loss)
            if out.alpha is not None and out.agree is not None:
                values = torch.ones_like(out.values), out.values, out.alpha, out.agree.float()
                sums.append(torch.stack([value.sum() for value in values]))
        names = ("count", "loss", "alpha", "agree")
        metrics = dict(zip(names, torch.stack(sums, dim=1), strict=True)) if sums else {}
        return StepOutput(torch.stack(losses).sum(), metrics)

    # -- proposal half ------------------------------------------------------------------------------------------

    def start(self, prompt_ids: Tensor, max_length: int) -> Eagle3Session:
        return Eagle3Session(self, max_length)

    @torch.no_grad()
    def extend_all(
        self, sessions: Sequence[Eagle3Session], tokens: Sequence[Tensor], features: Sequence[Tensor]
    ) -> None:
        """One step over the new tokens of all sessions. Only each last anchor drafts; the others leave their keys."""
        sizes = [len(new) for new in tokens]
        device = tokens[0].device
        starts = [session.length for session in sessions]
        positions = _cat([torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
        last = torch.tensor([end - 1 for end in accumulate(sizes)])

        states = self.fc(_cat(features).to(self.fc.weight.dtype))
        attend = _attend_apart(sessions, starts, [None] * len(sizes), [1] * len(sizes), sizes)
        out = self.step(states, self.embed(_cat(tokens)), positions.to(device), attend, last.to(device))
        for session, size, state in zip(sessions, sizes, out.split(1), strict=True):
            session.last = state
            session.length += size

    @torch.no_grad()
    def propose_all(
        self, sessions: Sequence[Eagle3Session], specs: Sequence[TreeSpec], samplers: Sequence[Sampler | None]
    ) -> list[TokenTree]:
        """The trees of all sessions grow together: one step per depth over the nodes that any of them opens."""
        first = self.logits(_cat([session.root for session in sessions]))
        drafts = [_Draft(*each, self.kept_ids) for each in zip(sessions, specs, samplers, first, strict=True)]
        growing = [draft for draft in drafts if draft.tree is None]
        while growing:
            sizes = [len(draft.parents) for draft in growing]
            tokens = _cat([draft.tokens for draft in growing])
            states = torch.stack([draft.state_of(parent) for draft in growing for parent in draft.parents])
            masks = [draft.open().to(tokens.device) for draft in growing]
            positions = torch.tensor([at for draft in growing for at in draft.positions], device=tokens.device)
            own = [draft.session for draft in growing]
            attend = _attend_apart(own, [draft.begin for draft in growing], masks, sizes, sizes)
            out = self.step(states, self.embed(self.kept_ids[tokens]), positions, attend)
            for draft, state, logits in zip(growing, out.split(sizes), self.logits(out).split(sizes), strict=True):
                draft.states.extend(state)
                draft.grow(logits)
            growing = [draft for draft in growing if draft.tree is None]
        return [draft.tree for draft in drafts if draft.tree is not None]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _attend_apart(
    sessions: Sequence[Eagle3Session],
    begins: Sequence[int],
    masks: Sequence[Tensor | None],
    asking: Sequence[int],
    sizes: Sequence[int],
) -> Attend:
    """Attention of packed tokens, each session's over its own keys.

    Args:
        begins: slot of each session's first new token; masks: which slots its queries see.
        asking: queries per session; sizes: new keys per session.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outs = []
        parts = zip(query.split(asking), key.split(sizes), value.split(sizes), strict=True)
        for session, begin, mask, (q, k, v) in zip(sessions, begins, masks, parts, strict=True):
            outs.append(session.attention(q, session.store(begin, k, v), mask))
        return _cat(outs)

    return attend


class Eagle3Session:
    """One sequence being drafted.

    Keys and values live in one buffer [kv_heads, capacity, e]: committed positions first, then the nodes opened in this
    round in the order they were opened.
    """

    def __init__(self, drafter: Eagle3, max_length: int):
        self.drafter = drafter
        weight = drafter.fc.weight
        shape = (drafter.config.num_key_value_heads, max_length, drafter.config.head_dim)
        self.keys, self.values = weight.new_empty(shape), weight.new_empty(shape)
        self.length = 0
        self.last: Tensor | None = None  # [1, h] output at the last committed anchor

    @property
    def root(self) -> Tensor:
        assert self.last is not None, "extend() comes before propose()"
        return self.last

    def extend(self, tokens: Tensor, features: Tensor) -> None:
        self.drafter.extend_all([self], [tokens], [features])

    def propose(self, spec: TreeSpec, sampler: Sampler | None = None) -> TokenTree:
        return self.drafter.propose_all([self], [spec], [sampler])[0]

    def store(self, start: int, key: Tensor, value: Tensor) -> int:
        """Writes keys and values [m, kv_heads, e] to slots from `start` on; returns the end."""
        end = start + key.shape[0]
        if end > self.keys.shape[1]:
            # Trees need a little room beyond the longest sequence.
            room = self.keys.new_empty(self.keys.shape[0], end, self.keys.shape[2])
            for name in ("keys", "values"):
                grown = room.clone()
                grown[:, :start] = getattr(self, name)[:, :start]
                setattr(self, name, grown)
        self.keys[:, start:end] = key.transpose(0, 1)
        self.values[:, start:end] = value.transpose(0, 1)
        return end

    def attention(self, query: Tensor, end: int, mask: Tensor | None) -> Tensor:
        """query [m, heads, e] over slots [0, end); mask [m, end] bool or None for all. Returns [m, heads * e]."""
        m, heads, e = query.shape
        kv = self.keys.shape[0]
        groups = heads // kv
        # Query heads of a group become rows, so that keys and values are read once and never repeated.
        folded = query.view(m, kv, groups, e).permute(1, 2, 0, 3).reshape(1, kv, groups * m, e)
        if mask is not None:
            mask = mask.repeat(groups, 1)
        out = F.scaled_dot_product_attention(folded, self.keys[None, :, :end], self.values[None, :, :end], mask)
        return out.view(kv, groups, m, e).permute(2, 0, 1, 3).reshape(m, heads * e)


class _Draft:
    """A session's tree while it grows.

    Attributes:
        tree: the result, once it is done.
        tokens, parents: the nodes to open next: drafter ids [m], and their parents among the opened nodes (-1: the root).
        begin: the slot of the first of them; positions: their rotary positions.
        states: [h] outputs of the opened nodes.
    """

    def __init__(
        self, session: Eagle3Session, spec: TreeSpec, sampler: Sampler | None, first: Tensor, kept_ids: Tensor
    ):
        self.session = session
        self.tree: TokenTree | None = None
        self.states: list[Tensor] = []
        self._slots: list[list[int]] = []  # opened node -> slots of its path, its own included
        self._growth = grow(spec, first, kept_ids, sampler)
        self.grow(None)

    def grow(self, logits: Tensor | None) -> None:
        """Takes the logits [m, d] of the nodes just opened, None to begin."""
        try:
            self.tokens, self.parents = next(self._growth) if logits is None else self._growth.send(logits)
        except StopIteration as done:
            self.tree = done.value

    def state_of(self, node: int) -> Tensor:
        return self.states[node] if node >= 0 else self.session.root[0]

    def open(self) -> Tensor:
        """Gives the nodes their slots and positions; returns [m, end] bool, the slots that each may see."""
        length = self.session.length
        self.begin = length + len(self._slots)
        mask = torch.zeros(len(self.parents), self.begin + len(self.parents), dtype=torch.bool)
        mask[:, :length] = True
        self.positions = []
        for row, parent in enumerate(self.parents):
            path = [*(self._slots[parent] if parent >= 0 else []), self.begin + row]
            mask[row, path] = True
            self._slots.append(path)
            self.positions.append(length - 1 + len(path))
        return mask


KIND = Eagle3
