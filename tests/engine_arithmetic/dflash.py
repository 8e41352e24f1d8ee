"""DFlash as vLLM's DFlashDraftModel computes it, from the exported files alone, and two blocks compared with our drafter's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.drafters.common.block import BlockDrafter
from drafttrain.drafters.common.layers import Rotary, rotate
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from drafttrain.target import Target

_MASK_FILE = "mask_embedding.pt"
_PROMPT = 24
_KEPT = 3
TOLERANCE = 1e-3  # of log-probabilities in float32


class EngineBlock:
    """An exported drafter as vLLM's class runs it, on the CPU in float32; shares no forward with drafters/block.py.

    Args:
        embed: the target's embedding. head: [v, h] the target's, for files without one of their own.

    Raises:
        UserError: the files lack a weight, hold one that the class does not know, or one of another shape.
    """

    def __init__(self, folder: Path, config: dict[str, Any], embed: Any, head: Tensor):
        self.c = config
        self.embed = embed
        weights = load_file(folder / "model.safetensors")
        shift = weights.pop("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.long))
        self.target_ids = torch.arange(len(shift)) + shift
        self.w = {name: value.float() for name, value in weights.items()}
        self.head = self.w.pop("lm_head.weight", head.float())
        shapes = {name: tuple(value.shape) for name, value in self.w.items()}
        wanted = self._expected()
        if shapes != wanted or len(self.head) != len(shift):
            wrong = sorted({name for name, _ in shapes.items() ^ wanted.items()}) or [
                "lm_head.weight"
            ]
            raise UserError(
                f"{str(folder)!r}: {', '.join(wrong)} is not what vLLM's class has; export anew"
            )
        self.mask_token = config["dflash_config"]["mask_token_id"]
        self.mask: Tensor | None = None
        if (folder / _MASK_FILE).is_file():
            self.mask = torch.load(folder / _MASK_FILE, weights_only=True)["embedding"].float()
        self.rotary = Rotary(config["head_dim"], config["rope_parameters"])
        self.context: list[list[tuple[Tensor, Tensor]]] = [
            [] for _ in range(config["num_hidden_layers"])
        ]

    def _expected(self) -> dict[str, tuple[int, ...]]:
        c = self.c
        h = c["hidden_size"]
        inner = c["intermediate_size"]
        e = c["head_dim"]
        heads = c["num_attention_heads"] * e
        kv = c["num_key_value_heads"] * e
        found: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, h * len(c["dflash_config"]["target_layer_ids"]))
        }
        found |= {"hidden_norm.weight": (h,), "norm.weight": (h,)}
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (h,), "post_attention_layernorm": (h,), "self_attn.q_proj": (heads, h),
            "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h), "self_attn.o_proj": (h, heads),
            "self_attn.q_norm": (e,), "self_attn.k_norm": (e,), "mlp.gate_proj": (inner, h), "mlp.up_proj": (inner, h),
            "mlp.down_proj": (h, inner),
        }  # fmt: skip
        return found | {
            f"layers.{i}.{name}.weight": shape
            for i in range(c["num_hidden_layers"])
            for name, shape in layer.items()
        }

    def _norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.c["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def _heads(self, x: Tensor, layer: int, name: str, positions: Tensor | None) -> Tensor:
        """One of q, k, v of a layer: [heads, t, e], normed and rotated but for v."""
        out = F.linear(x, self.w[f"layers.{layer}.self_attn.{name}_proj.weight"]).view(
            len(x), -1, self.c["head_dim"]
        )
        if positions is not None:
            out = self._norm(out, f"layers.{layer}.self_attn.{name}_norm")
            out = rotate(out, *self.rotary.tables(positions, out.dtype))
        return out.transpose(0, 1)

    def read(self, features: Tensor, begin: int) -> None:
        """Keys and values of committed context, features [t, f*h] at positions from `begin` on."""
        states = self._norm(F.linear(features, self.w["fc.weight"]), "hidden_norm")
        positions = torch.arange(begin, begin + len(states))
        for layer, kept in enumerate(self.context):
            kept.append(
                (self._heads(states, layer, "k", positions), self._heads(states, layer, "v", None))
            )

    def draft(self, token: Tensor, begin: int) -> Tensor:
        """[block_size - 1, d] log-probabilities behind the last committed token, which stands at position `begin`."""
        size = self.c["block_size"]
        ids = torch.cat((token.view(1), torch.full((size - 1,), self.mask_token)))
        state = self.embed(ids)
        if self.mask is not None:
            state = torch.where((ids == self.mask_token)[:, None], self.mask, state)
        positions = torch.arange(begin, begin + size)
        groups = self.c["num_attention_heads"] // self.c["num_key_value_heads"]
        for i, kept in enumerate(self.context):
            x = self._norm(state, f"layers.{i}.input_layernorm")
            own = self._heads(x, i, "k", positions), self._heads(x, i, "v", None)
            keys, values = (torch.cat(parts, dim=1) for parts in zip(*kept, own, strict=True))
            keys, values = (part.repeat_interleave(groups, dim=0) for part in (keys, values))
            scores = (
                self._heads(x, i, "q", positions)
                @ keys.transpose(1, 2)
                * self.c["head_dim"] ** -0.5
            )
            if (
                window := self.c["dflash_config"].get("use_swa")
                and self.c["dflash_config"]["swa_window_size"]
            ):
                distance = positions[:, None] - torch.arange(begin + size)
                scores = scores.masked_fill(distance.abs() >= window, float("-inf"))
            attended = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
            state = state + F.linear(attended, self.w[f"layers.{i}.self_attn.o_proj.weight"])
            x = self._norm(state, f"layers.{i}.post_attention_layernorm")
            gate, up = (
                F.linear(x, self.w[f"layers.{i}.mlp.{name}_proj.weight"]) for name in ("gate", "up")
            )
            state = state + F.linear(F.silu(gate) * up, self.w[f"layers.{i}.mlp.down_proj.weight"])
        return F.linear(self._norm(state, "norm")[1:], self.head).log_softmax(-1)


@torch.no_grad()
def compare_blocks(
    drafter: BlockDrafter, target: Target, folder: Path, config: dict[str, Any]
) -> dict[str, Any]:
    """Drafts two blocks on random features both ways: after a prompt, and after tokens that the target committed.

    Args:
        drafter: ours, bound to the target, on the CPU; its weights are rounded as the exported ones are.

    Returns:
        rounds, depth, max_log_prob_difference.

    Raises:
        UserError: the files do not hold what vLLM looks for, or the outputs differ.
    """
    dtype = getattr(torch, config["torch_dtype"])
    ours: Any = drafter
    ours.to(dtype).float().eval()
    ours.bind(target)
    for parameter in ours.frozen[0].parameters() if ours.frozen else ():
        parameter.data = parameter.data.to(dtype).float()
    ours.embed = lambda ids: target.embed(ids).float()
    engine = EngineBlock(folder, config, ours.embed, ours.head.weight)
    made = torch.Generator().manual_seed(0)
    total = _PROMPT + _KEPT
    features = torch.randn(total, ours.fc.in_features, generator=made)
    tokens = torch.randint(drafter.config.vocab_size, (total + 1,), generator=made)
    session = ours.start(tokens[:_PROMPT], total + 1)
    worst = 0.0
    begin = 0
    for end in (_PROMPT, total):
        session.extend(tokens[begin + 1 : end + 1], features[begin:end])
        engine.read(features[begin:end], begin)
        theirs = engine.draft(tokens[end], end)
        tree = session.propose(TreeSpec.parse(f"chain:{drafter.config.depth}"))
        assert tree.log_probs is not None, "blocks carry log-probabilities"
        path = theirs.max(-1).values.cumsum(0)
        same = engine.target_ids[theirs.argmax(-1)].tolist() == tree.tokens.tolist()
        worst = max(worst, (path - tree.log_probs).abs().max().item() if same else float("inf"))
        begin = end
    if not worst <= TOLERANCE:
        raise UserError(
            f"{str(folder)!r} computes something else than the drafter (log-probabilities differ by {worst:.3g}); a key or "
            "weight was lost: export anew, and report this if it stays"
        )
    return {"rounds": 2, "depth": drafter.config.depth, "max_log_prob_difference": worst}
