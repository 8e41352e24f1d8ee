"""Modules of decoder layers that drafter kinds share.

Tokens are flat, [t, ...]; an `Attend` selects the keys that each of them sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP

from drafttrain.batch import Attend, Part
from drafttrain.drafters.common.configs import BlockConfig, LayerConfig
from drafttrain.files import Json, value_of
from drafttrain.ops.cpu_layers import DecoderLayer
from drafttrain.ops.layer_ops import Tables, has_kernels, rotate_heads
from drafttrain.ops.packing import SKINNY_ROWS

LayerShape = LayerConfig | BlockConfig
ANCHORED = 4  # first tokens of a conversation, which `moved` leaves in place

# Activations of the CPU kernels, and whether each is the tanh form of GELU.
_NATIVE_ACTS = {"silu": False, "gelu_pytorch_tanh": True}


class Rotary:
    """Rotary position embedding in the half-split layout of Llama (RoFormer, arXiv 2104.09864).

    Args:
        head_dim: e. parameters: as in transformers 5: rope_theta, and for long contexts rope_type,
            factor, ...; `partial_rotary_factor` rotates a head's first entries only.

    Attributes:
        width: r, entries of a head that are rotated.
    """

    def __init__(self, head_dim: int, parameters: Json):
        self.head_dim = head_dim
        self.parameters = dict(parameters)
        rotated = value_of(self.parameters, "partial_rotary_factor", 1.0)
        self.width = int(head_dim * rotated)
        # Per device: frequencies [r / 2], and the factor of cosine and sine.
        self._known: dict[torch.device, tuple[Tensor, float]] = {}

    @property
    def frequencies(self) -> Tensor:
        """[r / 2] float32, radians per position; other trainers store `rotary_emb.inv_freq`."""
        return self._frequencies(torch.device("cpu"))[0]

    def tables(self, positions: Tensor, dtype: torch.dtype) -> Tables:
        """positions [t] int64, also negative ones -> cos, sin [t, 1, r]."""
        device = positions.device
        if device not in self._known:
            self._known[device] = self._frequencies(device)
        frequencies, scale = self._known[device]
        angles = positions[:, None].float() * frequencies  # [t, r / 2]
        angles = torch.cat((angles, angles), dim=-1)[:, None]  # [t, 1, r]
        cos = (angles.cos() * scale).to(dtype)
        sin = (angles.sin() * scale).to(dtype)
        return cos, sin

    def _frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        """Frequencies [r / 2] float32, and the factor of cosine and sine."""
        parameters = self.parameters
        kind = parameters.get("rope_type", "default")
        if kind == "default":
            steps = torch.arange(0, self.width, 2, device=device, dtype=torch.float)
            return parameters["rope_theta"] ** (-steps / self.width), 1.0
        # transformers' functions read a config; one of a single head has the same frequencies.
        original = value_of(parameters, "original_max_position_embeddings", 2048)
        factor = value_of(parameters, "factor", 1.0)
        config = LlamaConfig(
            hidden_size=self.head_dim,
            num_attention_heads=1,
            head_dim=self.head_dim,
            max_position_embeddings=int(original * factor),
            rope_parameters=dict(parameters),
        )
        return ROPE_INIT_FUNCTIONS[kind](config, device)


def moved(place: Tensor, most: int, part: Part) -> Tensor:
    """Rotary positions [t] in training with `position_offset`, from places [t] in conversations.

    A conversation's first tokens, to which attention often goes, stay where they are, and all
    others move by one random number up to `most`. So short rows train distances of long ones.
    Source: LongSpec, arXiv 2502.17421.
    """
    first = place == 0  # [t] bool
    drawn = part.same(torch.rand(int(first.sum()), device=place.device))  # one per conversation
    offset = (drawn * (most + 1)).long()
    offset = offset[first.cumsum(0) - 1]  # [t]
    return torch.where(place < ANCHORED, place, place + offset)


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """x [t, heads, e]; tables: cos and sin [t, 1, r] with r <= e."""
    cos, sin = tables
    if not torch.is_grad_enabled() and x.dtype == cos.dtype and has_kernels(x):
        return rotate_heads(x, tables)
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], tables), x[..., width:]), dim=-1)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class RMSNorm(nn.RMSNorm):
    """torch's RMS norm, whose weight takes the dtype of a narrower input under autocast.

    torch's fused kernel supports no mixture of dtypes.
    """

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.weight.dtype != x.dtype and torch.is_autocast_enabled(x.device.type)
        if mixed:
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
        return super().forward(x)


class Attending(nn.Module):
    """Attention of a layer's tokens: kinds of it say what queries, keys, values and outputs are.

    Attributes:
        heads, kv_heads: numbers of query heads, and of key and value heads. head_dim: e, their width.
        o_proj: projection of what the heads have read, to the state.
        attention_sink_bias: [heads] logits of keys without values; None for none.
    """

    heads: int
    kv_heads: int
    head_dim: int
    o_proj: nn.Linear
    attention_sink_bias: nn.Parameter | None

    def keys_values(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """x [t, width]; tables as in `rotate` -> rotated keys and values [t, kv_heads, e]."""
        raise NotImplementedError

    def queries(self, x: Tensor, tables: Tables) -> Tensor:
        """As `keys_values` -> rotated queries [t, heads, e]."""
        raise NotImplementedError

    def output(self, read: Tensor) -> Tensor:
        """[t, heads * e] that the heads have read -> [t, hidden]."""
        return self.o_proj(read)

    def forward(
        self,
        x: Tensor,
        tables: Tables,
        attend: Attend,
        queries: Tensor | None = None,
    ) -> Tensor:
        """Attention over the keys that `attend` selects, cached ones included.

        Args:
            x: [t, width], a key and a value each. tables: as in `rotate`.
            queries: [tq] int64 rows of x that need an output; None means all.

        Returns:
            [tq, hidden].
        """
        key, value = self.keys_values(x, tables)  # [t, kv_heads, e] each
        if queries is not None:
            x = x[queries]
            cos, sin = tables
            tables = (cos[queries], sin[queries])
        return self.output(attend(self.queries(x, tables), key, value))


class Attention(Attending):
    """Grouped-query attention.

    Args:
        width: of the input, which may exceed the output's (EAGLE-3 reads embedding ++ state).
    """

    def __init__(self, config: LayerShape, width: int):
        super().__init__()
        bias = config.attention_bias
        eps = config.rms_norm_eps
        e = config.head_dim
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = e
        self.q_proj = nn.Linear(width, self.heads * e, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * e, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * e, bias=bias)
        self.o_proj = nn.Linear(self.heads * e, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(e, eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(e, eps) if config.qk_norm else nn.Identity()
        self.attention_sink_bias = None
        if config.attention_sink_bias:
            self.attention_sink_bias = nn.Parameter(torch.zeros(self.heads))

    def keys_values(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        shape = (-1, self.kv_heads, self.head_dim)
        key = self.k_norm(self.k_proj(x).view(shape))
        value = self.v_proj(x).view(shape)
        return rotate(key, tables), value

    def queries(self, x: Tensor, tables: Tables) -> Tensor:
        query = self.q_norm(self.q_proj(x).view(-1, self.heads, self.head_dim))
        return rotate(query, tables)


class LatentAttention(Attending):
    """Multi-head latent attention: keys and values come from one narrow vector per token.

    The last `qk_rope_head_dim` entries of a head are rotated, in pairs of neighbours; all heads
    share those of the keys. Our cache holds keys and values of all heads, the values with zeros
    up to the keys' width; engines keep the narrow vectors.

    Source: DeepSeek-V2, arXiv 2405.04434; names and norms as in vLLM's DeepseekV2MLAAttention.

    Args:
        width: as of `Attention`.
    """

    def __init__(self, config: LayerConfig, width: int):
        super().__init__()
        eps = config.rms_norm_eps
        h = config.hidden_size
        self.rank = config.kv_lora_rank
        self.plain = config.qk_nope_head_dim  # entries that are not rotated
        self.rotated = config.qk_rope_head_dim
        self.value_dim = config.v_head_dim
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        outs = self.heads * self.head_dim
        if config.q_lora_rank:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, outs, bias=False)
        else:
            self.q_proj = nn.Linear(width, outs, bias=False)
        self.attention_sink_bias = None
        self.narrow_queries = bool(config.q_lora_rank)
        self.kv_a_proj_with_mqa = nn.Linear(width, self.rank + self.rotated, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, eps)
        of_head = self.plain + self.value_dim
        self.kv_b_proj = nn.Linear(self.rank, self.heads * of_head, bias=False)
        self.o_proj = nn.Linear(self.heads * self.value_dim, h, bias=False)
        self.sharpness = _yarn_sharpness(config.rope_parameters or {})

    def keys_values(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        narrow, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.rotated], dim=-1)
        shared = rotate(_halves(shared[:, None]), tables)  # [t, 1, r]
        wide = self.kv_b_proj(self.kv_a_layernorm(narrow)).unflatten(-1, (self.heads, -1))
        plain, value = wide.split([self.plain, self.value_dim], dim=-1)
        key = torch.cat((plain, shared.expand(-1, self.heads, -1)), dim=-1)
        return key, F.pad(value, (0, self.head_dim - self.value_dim))

    def queries(self, x: Tensor, tables: Tables) -> Tensor:
        if self.narrow_queries:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        else:
            query = self.q_proj(x)
        query = query.view(-1, self.heads, self.head_dim)
        plain, rotated = query.split([self.plain, self.rotated], dim=-1)
        rotated = rotate(_halves(rotated), tables)
        return torch.cat((plain, rotated), dim=-1) * self.sharpness

    def output(self, read: Tensor) -> Tensor:
        by_head = read.view(-1, self.heads, self.head_dim)[..., : self.value_dim]
        return self.o_proj(by_head.flatten(1))


def _halves(x: Tensor) -> Tensor:
    """[..., r] of pairs of neighbours -> of halves, as `rotate` takes them."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _yarn_sharpness(rope: Json) -> float:
    """Factor of latent attention's scores under YaRN, which DeepSeek's configs call `mscale_all_dim`."""
    share = rope.get("mscale_all_dim")
    if rope.get("rope_type") != "yarn" or not share:
        return 1.0
    return (0.1 * share * math.log(rope["factor"]) + 1.0) ** 2


class DraftLayer(nn.Module):
    """A pre-norm decoder layer; names follow published checkpoints.

    Args:
        embed_width: width of the token embedding that the layer reads next to the state, as
            EAGLE-3's first layer does; 0 for none.
        normed: False for a layer that reads the state without a norm, as EAGLE-1's first layer
            does.
        norm_before_residual: the residual is the normed state, for layers that read embeddings.
    """

    native: DecoderLayer | None  # the layer's CPU kernels
    # Set by transformers with `gradient_checkpointing`: whether backward computes the layer again,
    # and the function that arranges it.
    gradient_checkpointing = False
    _gradient_checkpointing_func: Callable[..., Tensor]

    def __init__(
        self,
        config: LayerShape,
        embed_width: int = 0,
        normed: bool = True,
        norm_before_residual: bool = False,
    ):
        super().__init__()
        h = config.hidden_size
        eps = config.rms_norm_eps
        self.eps = eps
        self.norm_before_residual = norm_before_residual
        # With embeddings, the input norm is theirs, and the state has a norm of its own.
        self.input_layernorm = RMSNorm(embed_width or h, eps) if normed else nn.Identity()
        self.hidden_norm = RMSNorm(h, eps) if embed_width else None
        self.self_attn: Attending
        if isinstance(config, LayerConfig) and config.kv_lora_rank:
            self.self_attn = LatentAttention(config, embed_width + h)
        else:
            self.self_attn = Attention(config, embed_width + h)
        self.post_attention_layernorm = RMSNorm(h, eps)
        self.mlp = LlamaMLP(config)  # gated, with the config's activation and biases
        # Whether the activation is the tanh form of GELU; None: a form that the kernels lack.
        self.native_gelu: bool | None = None
        if not config.attention_bias and not config.mlp_bias:
            self.native_gelu = _NATIVE_ACTS.get(config.hidden_act)
        self.native = None

    def pack(self, rotary_dim: int) -> None:
        """Makes few rows take two CPU kernel calls around the attention.

        Layers whose form the kernels lack stay as they are.
        """
        attention = self.self_attn
        if self.native_gelu is None or not isinstance(attention, Attention):
            return
        norms = {"query_norm": attention.q_norm, "key_norm": attention.k_norm}
        if self.hidden_norm is None:
            norms["input_norm"] = self.input_layernorm
        factors = {name: norm.weight for name, norm in norms.items() if isinstance(norm, RMSNorm)}
        self.native = DecoderLayer(
            attention,
            self.mlp,
            rotary_dim,
            self.eps,
            self.native_gelu,
            mlp_norm=self.post_attention_layernorm.weight,
            **factors,
        )

    def forward(
        self,
        state: Tensor,
        embeds: Tensor | None,
        tables: Tables,
        attend: Attend,
        queries: Tensor | None,
    ) -> Tensor:
        """state [t, h], embeds [t, embed_width] if the layer reads them -> [t or queries, h]."""
        if self.gradient_checkpointing and self.training:
            # Checkpoint attention and MLP separately, so that backward holds one at a time.
            state = self._gradient_checkpointing_func(
                self._attended,
                state,
                embeds,
                tables,
                attend,
                queries,
            )
            return self._gradient_checkpointing_func(self._transformed, state)
        if self.native is not None and len(state) <= SKINNY_ROWS:
            x = state  # the kernel applies the input norm, unless embeddings are read too
            if self.hidden_norm is not None and embeds is not None:
                state, x = self._inputs(state, embeds)
            return self.native.forward(
                state,
                x,
                tables,
                attend,
                queries,
            )
        state = self._attended(state, embeds, tables, attend, queries)
        return self._transformed(state)

    def _inputs(self, state: Tensor, embeds: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual [t, h], and what attention reads [t, h or embed_width + h]."""
        if self.hidden_norm is None or embeds is None:
            return state, self.input_layernorm(state)
        normed = self.hidden_norm(state)
        x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        if self.norm_before_residual:
            return normed, x
        return state, x

    def _attended(
        self,
        state: Tensor,
        embeds: Tensor | None,
        tables: Tables,
        attend: Attend,
        queries: Tensor | None,
    ) -> Tensor:
        """The state behind the attention, [t or queries, h]."""
        state, x = self._inputs(state, embeds)
        if queries is not None:
            state = state[queries]
        return state + self.self_attn(x, tables, attend, queries)

    def _transformed(self, state: Tensor) -> Tensor:
        """The state behind the MLP, [t, h]."""
        return state + self.mlp(self.post_attention_layernorm(state))
