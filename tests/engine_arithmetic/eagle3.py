"""EAGLE-3 as engines compute it, from the exported files alone, and two drafted chains compared with our drafter's.

Written after vLLM's and SGLang's model classes and sharing nothing with drafters/eagle3/model.py, so that a misunderstanding of
the format shows. Weights are taken by name and shape: vLLM raises on a name it does not know, and SGLang skips it silently, which
is a fault here. Sources: see drafters/eagle3/export.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.eagle3.export import SHIPPING
from drafttrain.drafters.eagle3.model import Eagle3
from drafttrain.errors import UserError
from drafttrain.formats.weights import check_names, read_config, read_weights

_PROMPT = 24
_DEPTH = 4
_KEPT = 2
TOLERANCE = (
    1e-3  # of log-probabilities in float32; layouts and order of sums differ, nothing else does
)


class EngineHead:
    """One exported head on the CPU in float32.

    Attributes:
        dtype: of the weights in the file.
    """

    def __init__(self, folder: Path):
        described = read_config(folder)
        layer = described
        assert SHIPPING.recognizes(described)
        if "transformer_layer_config" in described:
            # vLLM builds the config from the layer's keys and copies these from outside.
            names = (
                "draft_vocab_size",
                "target_hidden_size",
                "norm_before_residual",
                "fc_norm",
                "norm_output",
            )
            layer = {
                **described["transformer_layer_config"],
                **{name: described.get(name) for name in names},
            }
        self.config: dict[str, Any] = layer
        self.flat = layer is described
        self.kind = layer["model_type"]
        weights = {
            name.replace("midlayer.", "layers.0."): value
            for name, value in read_weights(folder).items()
        }
        weights.pop("t2d", None)
        check_names(weights, self._expected(), str(folder))
        self.dtype = weights["fc.weight"].dtype
        self.weights = {name: value.float() for name, value in weights.items() if name != "d2t"}
        order = torch.arange(layer["draft_vocab_size"])
        self.target_ids = order + weights["d2t"] if "d2t" in weights else order
        self.keys: list[list[Tensor]] = [[] for _ in range(layer["num_hidden_layers"])]
        self.values: list[list[Tensor]] = [[] for _ in range(layer["num_hidden_layers"])]
        rope = {**layer["rope_parameters"]}
        shape = {name: layer[name] for name in ("hidden_size", "num_attention_heads", "head_dim")}
        config = LlamaConfig(
            **shape, rope_parameters=rope, max_position_embeddings=layer["max_position_embeddings"]
        )
        if rope["rope_type"] == "default":
            width = int(layer["head_dim"] * rope.get("partial_rotary_factor", 1.0))
            steps = torch.arange(0, width, 2).float() / width
            self.frequencies = 1.0 / rope["rope_theta"] ** steps
            self.rope_scale = 1.0
        else:
            self.frequencies, self.rope_scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
                config, torch.device("cpu")
            )

    def _expected(self) -> dict[str, tuple[int, ...]]:
        """Every parameter that vLLM's class creates for this config, as the file names it."""
        c = self.config
        h = c["hidden_size"]
        inner = c["intermediate_size"]
        e = c["head_dim"]
        q = c["num_attention_heads"] * e
        kv = c["num_key_value_heads"] * e
        target = c["target_hidden_size"]
        count = c["num_aux_hidden_states"]
        d = c["draft_vocab_size"]
        names: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, count * target),
            "norm.weight": (h,),
            "lm_head.weight": (d, h),
        }
        if d != c["vocab_size"]:
            names["d2t"] = (d,)
        if c.get("fc_norm"):
            names |= {f"fc_norm.{i}.weight": (target,) for i in range(count)}
        for i in range(c["num_hidden_layers"]):
            width = 2 * h if i == 0 else h
            block = {
                "self_attn.q_proj.weight": (q, width),
                "self_attn.k_proj.weight": (kv, width),
                "self_attn.v_proj.weight": (kv, width),
                "self_attn.o_proj.weight": (h, q),
                "mlp.gate_proj.weight": (inner, h),
                "mlp.up_proj.weight": (inner, h),
                "mlp.down_proj.weight": (h, inner),
                "input_layernorm.weight": (h,),
                "post_attention_layernorm.weight": (h,),
            }
            if (
                i == 0 or self.flat
            ):  # of later layers SGLang reads hidden_norm, vLLM input_layernorm
                block["hidden_norm.weight"] = (h,)
            biased = ("q_proj", "k_proj", "v_proj", *(("o_proj",) if self.kind == "llama" else ()))
            if c["attention_bias"]:
                block |= {f"self_attn.{n}.bias": block[f"self_attn.{n}.weight"][:1] for n in biased}
            if c["mlp_bias"]:
                block |= {
                    f"mlp.{n}.bias": block[f"mlp.{n}.weight"][:1]
                    for n in ("gate_proj", "up_proj", "down_proj")
                }
            if self.kind == "qwen3":
                block |= {"self_attn.q_norm.weight": (e,), "self_attn.k_norm.weight": (e,)}
            names |= {f"layers.{i}.{name}": shape for name, shape in block.items()}
        return names

    # -- arithmetic ---------------------------------------------------------------------------------------------

    def _norm(self, x: Tensor, name: str) -> Tensor:
        spread = x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return x * spread.rsqrt() * self.weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None, None].float() * self.frequencies
        cos = angles.cos() * self.rope_scale
        sin = angles.sin() * self.rope_scale
        half = len(self.frequencies)
        left = x[..., :half]
        right = x[..., half : 2 * half]
        rest = x[..., 2 * half :]
        return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)

    def _attend(self, x: Tensor, positions: Tensor, layer: int) -> Tensor:
        """x [t, width] at the positions after those in the cache -> [t, h]; the cache grows by t."""
        c = self.config
        name = f"layers.{layer}.self_attn"
        query, key, value = (self._linear(x, f"{name}.{part}").view(len(x), -1, c["head_dim"]) for part in
                             ("q_proj", "k_proj", "v_proj"))  # fmt: skip
        if self.kind == "qwen3":
            query = self._norm(query, f"{name}.q_norm")
            key = self._norm(key, f"{name}.k_norm")
        self.keys[layer].append(self._rotate(key, positions))
        self.values[layer].append(value)
        keys = torch.cat(self.keys[layer])
        values = torch.cat(self.values[layer])
        groups = c["num_attention_heads"] // c["num_key_value_heads"]
        keys, values = (each.repeat_interleave(groups, dim=1) for each in (keys, values))
        scores = (
            torch.einsum("qhe,khe->hqk", self._rotate(query, positions), keys)
            * c["head_dim"] ** -0.5
        )
        places = torch.arange(len(keys))
        seen = places <= positions[:, None]
        if "sliding_attention" in (c.get("layer_types") or []):
            seen &= places > positions[:, None] - c["sliding_window"]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return self._linear(
            torch.einsum("hqk,khe->qhe", weights, values).flatten(1), f"{name}.o_proj"
        )

    def combine(self, features: Tensor) -> Tensor:
        """[t, f*h] target states -> [t, h]."""
        if self.config.get("fc_norm"):
            parts = features.chunk(self.config["num_aux_hidden_states"], dim=-1)
            features = torch.cat(
                [self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], dim=-1
            )
        return self._linear(features, "fc")

    def step(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over t tokens, whose keys and values join the cache.

        Args:
            embeds: [t, h] of the tokens; hidden: [t, h] beside them; positions: [t] int64, consecutive.

        Returns:
            logits [t, d] and the states [t, h] that the next depth reads.
        """
        residual = hidden
        for i in range(self.config["num_hidden_layers"]):
            name = f"layers.{i}"
            if i == 0:
                normed = self._norm(hidden, f"{name}.hidden_norm")
                residual = normed if self.config.get("norm_before_residual") else hidden
                x = torch.cat((self._norm(embeds, f"{name}.input_layernorm"), normed), dim=-1)
            else:
                residual = residual + hidden
                x = self._norm(
                    residual, f"{name}.{'hidden_norm' if self.flat else 'input_layernorm'}"
                )
            residual = residual + self._attend(x, positions, i)
            x = self._norm(residual, f"{name}.post_attention_layernorm")
            gate = self._linear(x, f"{name}.mlp.gate_proj")
            hidden = self._linear(
                gate * gate.sigmoid() * self._linear(x, f"{name}.mlp.up_proj"),
                f"{name}.mlp.down_proj",
            )
        residual = residual + hidden
        normed = self._norm(residual, "norm")
        return self._linear(normed, "lm_head"), normed if self.config.get(
            "norm_output"
        ) else residual

    def forget(self, length: int) -> None:
        """Drops cached positions from `length` on, as an engine does with drafted ones."""
        for cache in (*self.keys, *self.values):
            kept = torch.cat(cache)[:length]
            cache[:] = [kept]


@torch.no_grad()
def compare_steps(drafter: Eagle3, exported: Path, seed: int = 0) -> dict[str, Any]:
    """Drafts two chains on random inputs both ways: after a prompt, and after tokens that the target committed.

    Args:
        drafter: ours, on the CPU; its weights are rounded as the exported ones are.

    Returns:
        rounds, depth, max_log_prob_difference, same_tokens: whether both drafted the same.

    Raises:
        UserError: the files do not hold what an engine looks for, or the outputs differ.
    """
    head = EngineHead(exported)
    ours: Any = drafter
    ours.to(head.dtype).float().eval()
    config = ours.config
    made = torch.Generator().manual_seed(seed)
    table = torch.randn(64, config.target_hidden_size, generator=made)
    ours.embed = lambda ids: table[ids % len(table)]
    total = _PROMPT + _KEPT
    width = len(config.feature_layers) * config.target_hidden_size
    features = torch.randn(total, width, generator=made)
    tokens = torch.randint(config.vocab_size, (total + 1,), generator=made)
    session = ours.start(tokens[:_PROMPT], total + _DEPTH + 1)
    worst = 0.0
    same = True
    begin = 0
    for end in (_PROMPT, total):
        session.extend(tokens[begin + 1 : end + 1], features[begin:end])
        tree = session.propose(TreeSpec.parse(f"chain:{_DEPTH}"))
        first = ours.logits(session.root)[0].log_softmax(-1)
        theirs, drafted = _chain(
            head, ours.embed(tokens[begin + 1 : end + 1]), features[begin:end], begin, ours.embed
        )
        assert tree.log_probs is not None, "a chain of EAGLE-3 carries log-probabilities"
        worst = max(worst, (first - theirs[0]).abs().max().item())
        same = same and tree.tokens.tolist() == head.target_ids[drafted].tolist()
        path = torch.stack([row[token] for row, token in zip(theirs, drafted, strict=True)]).cumsum(
            0
        )
        if same:
            worst = max(worst, (tree.log_probs - path).abs().max().item())
        head.forget(end)
        begin = end
    if not same or not worst <= TOLERANCE:
        raise UserError(
            f"{str(exported)!r} computes something else than the drafter (log-probabilities differ by {worst:.3g}, same "
            f"tokens: {same}); a flag or weight was lost: export anew, and report this if it stays"
        )
    return {"rounds": 2, "depth": _DEPTH, "max_log_prob_difference": worst, "same_tokens": same}


def _chain(
    head: EngineHead, embeds: Tensor, features: Tensor, begin: int, embed: Any
) -> tuple[list[Tensor], Tensor]:
    """A greedy chain: log-probabilities [d] of each depth, and the tokens [depth] in the drafter's ids."""
    positions = torch.arange(begin, begin + len(embeds))
    logits, states = head.step(embeds, head.combine(features), positions)
    rows = [logits[-1].log_softmax(-1)]
    drafted = [logits[-1].argmax()]
    state = states[-1:]
    at = begin + len(embeds)
    while len(rows) < _DEPTH:
        logits, state = head.step(
            embed(head.target_ids[drafted[-1]])[None], state, torch.tensor([at])
        )
        rows.append(logits[0].log_softmax(-1))
        drafted.append(logits[0].argmax())
        at += 1
    return rows, torch.stack(drafted)
