"""EAGLE-3: decoder layers over fused target features, trained by training-time test (arXiv 2503.01840).

    anchor t, depth 0:   state = fc(features_t)              token x_{t+1}        predicts x_{t+2}
    anchor t, depth k:   state = own output at depth k-1     token x_{t+1+k}      predicts x_{t+2+k}

    out = layers(state, embed(token))     q, k, v of the first read norm(embed) ++ norm(state); the residual is the state
    logits = lm_head(norm(out))           over the drafter's own, pruned vocabulary

A query at (t, k) sees the depth-0 keys of anchors 0..t and its own keys at depths 1..k. Its rotary position is t + k. The
decoder computes just that: depth-0 keys come from true target features of committed tokens, deeper ones belong to the
drafted path. Both call `Eagle3.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.batch import Batch, StepOutput, TargetOutput
from drafttrain.drafters.eagle3_config import Eagle3Config
from drafttrain.drafters.layer_session import CacheShape, LayerDrafting
from drafttrain.drafters.layers import MLP, Attend, Attention, RMSNorm, Rotary
from drafttrain.drafters.linear_start import Source, linear_start
from drafttrain.drafters.shared import anchors_by_depth, bind_target, copy_layer, copy_norm
from drafttrain.losses import TargetRows, linear_divergence
from drafttrain.ops.decoder_layer import DecoderLayer, LayerWeights
from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.packing import SKINNY_ROWS, pack
from drafttrain.ops.path_attention import PathAttention
from drafttrain.target import Target

# Activations that the CPU kernels know, and whether each is the tanh form of GELU.
_NATIVE_ACTS = {"silu": False, "gelu_pytorch_tanh": True}


class Eagle3Layer(nn.Module):
    """A decoder layer; names follow the published checkpoints. The first one reads the token beside the state."""

    def __init__(self, config: Eagle3Config, first: bool):
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.first = config, first
        self.input_layernorm = RMSNorm(config.target_hidden_size if first else h, eps)
        if first:
            self.hidden_norm = RMSNorm(h, eps)
        self.self_attn = Attention(
            config.target_hidden_size + h if first else h,
            h,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.attention_bias,
            eps if config.qk_norm else None,
        )
        self.post_attention_layernorm = RMSNorm(h, eps)
        self.mlp = MLP(h, config.intermediate_size, config.mlp_bias, config.hidden_act)
        self.native: DecoderLayer | None = None

    def pack(self, rotary_dim: int) -> None:
        """Readies the layer for inference on a CPU: from now on few rows take two kernel calls around the attention.

        Layers with biases or an activation that the kernels lack keep the plain form.
        """
        config, attention, mlp = self.config, self.self_attn, self.mlp
        if config.attention_bias or config.mlp_bias or config.hidden_act not in _NATIVE_ACTS:
            return
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
                rotary_dim=rotary_dim,
                eps=self.post_attention_layernorm.eps,
                gelu=_NATIVE_ACTS[config.hidden_act],
                query_norm=attention.q_norm.weight.detach() if config.qk_norm else None,
                key_norm=attention.k_norm.weight.detach() if config.qk_norm else None,
            )
        )

    def forward(
        self, state: Tensor, embeds: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend, queries: Tensor | None
    ) -> Tensor:
        """state [t, h], embeds [t, target h] for the first layer -> [t or queries, h]."""
        if embeds is None:
            x = self.input_layernorm(state)
        else:
            normed = self.hidden_norm(state)
            x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
            state = normed if self.config.norm_before_residual else state
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


class Eagle3(LayerDrafting, PreTrainedModel):
    """The drafter. Its embedding is the target's, frozen and never saved; `bind` attaches it."""

    config_class = Eagle3Config
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _keys_to_ignore_on_load_unexpected = ["d2t", "t2d"]
    kind = "eagle3"
    trainable = True
    takes_packed_rows = True
    kept_ids: Tensor
    embed: Callable[[Tensor], Tensor]  # given by bind()

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        self.fc = nn.Linear(len(config.feature_layers) * config.target_hidden_size, config.hidden_size, bias=False)
        self.fc_norm = nn.ModuleList(
            RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.feature_layers if config.fc_norm
        )
        self.midlayer = Eagle3Layer(config, first=True)
        # Numbered as engines number them: the middle layer is their layer 0.
        self.layers = nn.ModuleDict(
            {str(i): Eagle3Layer(config, first=False) for i in range(1, config.num_hidden_layers)}
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("kept_ids", torch.arange(config.draft_vocab_size))
        self.rotary = Rotary(config.head_dim, config.rope_parameters)
        self.cache_shape = CacheShape(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, config.sliding_window
        )
        self.gradient_checkpointing = False
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

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

    @property
    def decoder_layers(self) -> list[Any]:
        return [self.midlayer, *self.layers.values()]

    def bind(self, target: Target) -> None:
        """Checks that this drafter was made for the target and borrows its embedding."""
        bind_target(self, target)

    def pack(self) -> None:
        """Readies the drafter for inference on a CPU in float32; elsewhere linear layers and norms as far as served."""
        if cpu_kernels() is not None and self.fc.weight.dtype == torch.float32 and self.fc.weight.device.type == "cpu":
            for layer in self.decoder_layers:
                layer.pack(self.rotary.width)
        pack(self)

    @torch.no_grad()
    def initialise(self, target: Target, kept_ids: Tensor) -> list[str]:
        """Starts from the target: head rows of the kept tokens, and its last layers (the first on its input's state half).

        `fc` starts as the identity on the highest feature, so the untrained drafter is the target's last layers on a late
        state. Returns the names of what was copied; nothing fits a drafter of another hidden size.
        """
        h = self.config.hidden_size
        self.kept_ids.copy_(kept_ids)
        if h != self.config.target_hidden_size:
            return []
        self.lm_head.weight.copy_(target.head_weight[kept_ids])
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -h:].add_(torch.eye(h))
        names = ["lm_head", "fc"]
        if copy_norm(self.norm, getattr(target.body, "norm", None)):
            names.append("norm")
        ours = self.decoder_layers[-target.num_layers :]
        for layer, theirs in zip(ours, target.layers[-len(ours) :], strict=True):
            copied = copy_layer(layer, theirs, "hidden_norm" if layer.first else "input_layernorm")
            names += copied if layer is self.midlayer else []
        return names

    def solve_start(self, batches: list[Batch], source: Source) -> float:
        """Fits the linear part in closed form, see `linear_start`; returns the share of variance explained."""
        return linear_start(self, batches, source)

    # -- the one forward ----------------------------------------------------------------------------------------

    def fuse(self, features: Tensor) -> Tensor:
        """[t, f * target h] target features -> [t, h], the state that depth 0 reads."""
        return self.fc(self.norm_features(features))

    def norm_features(self, features: Tensor) -> Tensor:
        """What `fc` reads, in its dtype: each feature under its own norm, where there are norms."""
        features = features.to(self.fc.weight.dtype)
        if not self.fc_norm:
            return features
        parts = features.chunk(len(self.fc_norm), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)

    def step(
        self, state: Tensor, embeds: Tensor, positions: Tensor, attends: Sequence[Attend], queries: Tensor | None = None
    ) -> Tensor:
        """One depth for t tokens.

        Args:
            state: [t, h]: fused features at depth 0, the previous depth's output below.
            embeds: [t, target h], of the tokens read; positions: [t] int64.
            attends: per layer, which keys each query sees. queries: rows that need an output (all if None).

        Returns:
            [t or queries, h], what the next depth reads: the last layer's output, normed if the config says so.
        """
        cos, sin = self.rotary.tables(positions, state.dtype)
        layers = self.decoder_layers
        read: Tensor | None = embeds.to(state.dtype)
        for layer, attend in zip(layers, attends, strict=True):
            state = layer(state, read, cos, sin, attend, queries if layer is layers[-1] else None)
            read = None
        return self.norm(state) if self.config.norm_output else state

    def read_out(self, state: Tensor) -> Tensor:
        """What the head reads of a step's output."""
        return state if self.config.norm_output else self.norm(state)

    def logits(self, state: Tensor) -> Tensor:
        """[t, h] outputs of steps -> [t, d] over the drafter's vocabulary."""
        return self.lm_head(self.read_out(state))

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
        asking = anchors_by_depth(batch.response_mask, config.ttt_steps, share)  # k -> flat positions, nested
        valid, place = batch.anchors()
        own = [torch.searchsorted(valid, anchors) for anchors in asking]  # the same among the first-depth tokens
        embeds = embeds.reshape(b * s, -1)
        state = self.fuse(output.features.reshape(b * s, -1)[valid])
        decay = config.depth_decay ** torch.arange(config.ttt_steps, dtype=torch.float32, device=embeds.device)
        decay = decay / decay.sum()

        begin = torch.arange(len(valid), device=valid.device) - place
        attentions = [PathAttention(begin, config.sliding_window) for _ in range(config.num_hidden_layers)]
        losses: list[Tensor] = []
        sums: list[Tensor] = []
        for k, anchors in enumerate(asking):
            if k == 0:
                state = self._depth(state, embeds[valid + 1], place, attentions, own[0], whole=True)
            else:
                if len(own[k]) < len(own[k - 1]):  # anchors are nested: keep those of the previous depth that go on
                    state = state[torch.searchsorted(own[k - 1], own[k])]
                state = self._depth(state, embeds[anchors + 1 + k], place[own[k]] + k, attentions, own[k])
            weight = (decay[k] / (count * (share if k else 1.0))).expand(len(anchors))
            at = row_of.flatten()[anchors + 1 + k]
            read, head = self.read_out(state), self.lm_head.weight
            out = linear_divergence(read, head, rows, at, weight, config.loss, measure=measure)
            losses.append(out.loss)
            if out.alpha is not None and out.agree is not None:
                values = torch.ones_like(out.values), out.values, out.alpha, out.agree.float()
                sums.append(torch.stack([value.sum() for value in values]))
        names = ("count", "loss", "alpha", "agree")
        metrics = dict(zip(names, torch.stack(sums, dim=1), strict=True)) if sums else {}
        return StepOutput(torch.stack(losses).sum(), metrics)

    def _depth(
        self,
        state: Tensor,
        embeds: Tensor,
        positions: Tensor,
        attentions: Sequence[PathAttention],
        own: Tensor,
        whole: bool = False,
    ) -> Tensor:
        """One depth of training-time test, whose layers then remember its keys; recomputed in backward if so asked.

        Args:
            state, embeds, positions: of the tokens at this depth; attentions: of each layer.
            own: [tq] int64 first-depth tokens that anchors are; whole: all first-depth tokens give keys, not just those.
        """
        queries, everything = (own, torch.arange(len(state), device=own.device)) if whole else (None, own)
        asking = [*[everything] * (len(attentions) - 1), own]
        fresh: list[list[Tensor]] = [[] for _ in attentions]
        attends = [attention.attend(who, new) for attention, who, new in zip(attentions, asking, fresh, strict=True)]

        def run(state: Tensor, embeds: Tensor) -> tuple[Tensor, ...]:
            out = self.step(state, embeds, positions, attends, queries)
            return out, *(tensor for pair in fresh for tensor in pair)

        if self.gradient_checkpointing and self.training:
            out, *cached = self._gradient_checkpointing_func(run, state, embeds)
        else:
            out, *cached = run(state, embeds)
        for attention, key, value in zip(attentions, cached[::2], cached[1::2], strict=True):
            attention.remember(own, key, value)
        return out


KIND = Eagle3
