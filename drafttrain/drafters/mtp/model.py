"""Multi-token prediction as DeepSeek-V3 trains it (arXiv 2412.19437), on top of a finished target.

    anchor t, depth 0:   state = f_t, which the target's head reads    token x_{t+1}        predicts x_{t+2}
    anchor t, depth k:   state = own output at depth k-1               token x_{t+1+k}      predicts x_{t+2+k}

    x = eh_proj(enorm(embed(token)) ++ hnorm(state));  out = norm(layer(x));  logits = lm_head(out)

One module serves all depths, as in serving engines, or each depth has its own. The target's head reads f_t after its final
norm, so the next depth reads `out` after our norm. With several modules each depth's keys come from its own module, and all
depths see the keys that the first module computes from true states: a cache as with one module.
(DeepSeek's modules have a causal cache each, which every drafted path would have to recompute.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from drafttrain.batch import Batch
from drafttrain.drafters.base import Source
from drafttrain.drafters.common import starts
from drafttrain.drafters.common.configs import Decay, LastStateConfig, Layers
from drafttrain.drafters.common.layer_model import LayerDrafter
from drafttrain.drafters.common.layers import DraftLayer, RMSNorm
from drafttrain.errors import UserError
from drafttrain.files import Json, hub_snapshot
from drafttrain.ops.cpu_layers import DraftWeights
from drafttrain.ops.packing import PackedLinear
from drafttrain.target import Target
from drafttrain.target.loading import check_finite, loading


class MTPConfig(LastStateConfig):
    """Config of an MTP drafter.

    Attributes:
        modules: 1, or more for one per depth; deeper depths use the last one. Each has one layer.
        train_head: train and save a copy of the target's head rows; False uses the target's, frozen, as engines do.
    """

    model_type = "drafttrain_mtp"
    modules: Layers = 1
    train_head: bool = True
    depth_decay: Decay = 0.6

    def check(self) -> None:
        super().check()
        if not 1 <= self.modules <= self.ttt_steps:
            raise UserError(
                f"modules={self.modules} must be from 1 to ttt_steps={self.ttt_steps}, or some are never trained"
            )
        if self.num_hidden_layers != 1:
            raise UserError(f"num_hidden_layers={self.num_hidden_layers}: a module has 1 layer; set modules instead")


class MTPModule(nn.Module):
    """A prediction module: projection and layer; names are DeepSeek's."""

    def __init__(self, config: MTPConfig):
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(h, eps), RMSNorm(h, eps)
        self.eh_proj = nn.Linear(2 * h, h, bias=False)
        self.layer = DraftLayer(config)


class MTP(LayerDrafter):
    """A multi-token prediction drafter."""

    config_class = MTPConfig
    kind = "mtp"

    def __init__(self, config: MTPConfig):
        super().__init__(config)
        self.blocks: Any = nn.ModuleList(MTPModule(config) for _ in range(config.modules))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.train_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        # The target's head; in a list, so that it is neither trained nor saved.
        self.frozen: list[nn.Linear | PackedLinear] = []
        self.finish(layers=1)

    @property
    def head(self) -> nn.Linear | PackedLinear:
        """The linear layer over the drafter's vocabulary."""
        return self.lm_head if self.config.train_head else self.frozen[0]

    @property
    def head_weight(self) -> Tensor:
        return self.head.weight

    def logits(self, state: Tensor) -> Tensor:
        return self.head(state.to(self.head_weight.dtype))

    def bind(self, target: Target) -> None:
        """Attaches the target's embedding, and its head unless the drafter has one; UserError for capped logits then."""
        super().bind(target)
        if not self.config.train_head:
            if target.softcap is not None:
                raise UserError(
                    f"drafter.train_head=false: target {target.name!r} caps its logits, and the head is trained without a cap; "
                    "set drafter.train_head=true"
                )
            self.frozen = [starts.frozen_head(target, self.kept_ids, self.packed, target.logit_scale)]
            if self.packed:  # the kernel of a depth reads the head too
                self.pack_depths()

    @property
    def decoder_layers(self) -> list[DraftLayer]:
        return [block.layer for block in self.blocks]

    def block_at(self, depth: int) -> MTPModule:
        return self.blocks[min(depth, len(self.blocks) - 1)]

    def layers_at(self, depth: int) -> list[DraftLayer]:
        return [self.block_at(depth).layer]

    def draft_weights(self) -> DraftWeights | None:
        if len(self.blocks) > 1 or not (self.config.train_head or self.frozen):
            return None
        block = self.blocks[0]
        return DraftWeights(
            head=self.head_weight,
            embed_width=self.config.hidden_size,
            eps=self.config.rms_norm_eps,
            embed_norm=block.enorm.weight,
            state_norm=block.hnorm.weight,
            norm=self.norm.weight,
            project=block.eh_proj.weight,
            returns_normed=True,
        )

    def fuse(self, features: Tensor) -> Tensor:
        return features.to(self.norm.weight.dtype)

    def enter(self, state: Tensor, embeds: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        block = self.block_at(depth)
        return block.eh_proj(torch.cat((block.enorm(embeds), block.hnorm(state)), dim=-1)), None

    def leave(self, state: Tensor) -> Tensor:
        return self.norm(state)

    @classmethod
    def native(cls, target: Target, kept_ids: Tensor, options: Json) -> MTP:
        """A drafter with the weights of the MTP module in the target's checkpoint; of several, the first, for all depths."""
        shapes, state = read_native(target)
        drafter = cls(MTPConfig.for_target(target, **{**shapes, **options}, draft_vocab_size=len(kept_ids)))
        drafter.initialize(target, kept_ids)
        where, block = f"init='native': the prediction module of target {target.name!r}", drafter.blocks[0]
        expected = {"norm.weight", *(name for name, _ in block.named_parameters())}
        if wrong := sorted(expected ^ state.keys()):
            raise UserError(
                f"{where} {'has unknown' if wrong[0] in state else 'lacks'} weights: {wrong[0]}; use init=target"
            )
        check_finite(state.items(), where, "use init=target")
        for name, weight in state.items():
            ours = drafter.norm.weight if name == "norm.weight" else block.get_parameter(name)
            if ours.shape != weight.shape:
                raise UserError(
                    f"init='native': {name} of target {target.name!r} is {list(weight.shape)}, not {list(ours.shape)} as in a "
                    "plain layer of its sizes (gated attention?); use init=target"
                )
            ours.data.copy_(weight)
        for block in drafter.blocks[1:]:
            block.load_state_dict(drafter.blocks[0].state_dict())
        return drafter

    def copy_from(self, target: Target) -> list[str]:
        """Copies head rows, final norm and, into each module, the last layer; projections start as the identity on the state."""
        names = ["eh_proj"]
        if self.config.train_head:
            self.lm_head.weight.copy_(starts.head_rows(target, self.kept_ids))
            names.append("lm_head")
        if starts.copy_norm(self.norm, starts.final_norm(target)):
            names.append("norm")
        last, copied = target.last_layers(1), list[str]()
        for block in self.blocks:
            starts.identity_on_last(block.eh_proj)
            copied = starts.copy_layer(block.layer, last[0]) if last else []
        return names + copied

    @torch.no_grad()
    def solve_start(self, batches: list[Batch], source: Source) -> float | None:
        """Fits the projections."""
        for block in self.blocks:
            for norm in (block.enorm, block.hnorm):
                norm.weight.fill_(1.0)
        projections = [block.eh_proj for block in self.blocks]
        explained, size = starts.projection_start(self, projections, batches, source, normed=True)
        self.norm.weight.fill_(size)
        starts.set_temperature(self, batches[0], source, self.norm.weight)
        return explained


class _Form(NamedTuple):
    """How a family stores its first module.

    Attributes:
        module: prefix of its tensors; {n} is the target's number of layers. layer: prefix of the decoder layer's, after that.
        names: the family's names -> ours, without `.weight`.
        swapped: the projection reads the state before the embedding.
    """

    module: str
    layer: str
    names: dict[str, str]
    swapped: bool = False


_DEEPSEEK = _Form(  # GLM-4 too
    "model.layers.{n}.", "", {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"}
)
_QWEN = _Form(
    "mtp.",
    "layers.0.",
    {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"},
)
MIMO = _Form(
    "model.mtp_layers.0.",
    "",
    {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"},
    swapped=True,
)
# Copies of the target's own tensors.
_SHARED = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
# Parts of tensor names that show an unsupported layer, and its description.
_FOREIGN = {"experts": "a mixture of experts", "kv_a_proj": "multi-head latent attention", "scale": "quantized"}
_PLAIN = {f"{block}.{name}" for block, names in starts.PROJECTIONS.items() for name in names}
_PLAIN |= {"self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"}


def read_native(target: Target) -> tuple[Json, dict[str, Tensor]]:
    """Reads the first MTP module of the target's checkpoint.

    Returns:
        The drafter's config options that it fixes, and its tensors by the names of `MTPModule`, and `norm.weight`.

    Raises:
        UserError: no such tensors, or a module that is not dense with plain attention.
    """
    form, prefix, own = _find(target)
    layer, names = form.layer, form.names
    state: dict[str, Tensor] = {}
    for name, path in own.items():
        stem, _, part = name.rpartition(".")
        inner = stem.removeprefix(layer)
        if stem in names:
            ours = f"{names[stem]}.{part}"
        elif inner in _PLAIN and name.startswith(layer) and part in ("weight", "bias"):
            ours = f"layer.{inner}.{part}"
        elif name.endswith(_SHARED) or (layer and name.startswith("layers.") and not name.startswith(layer)):
            continue  # shared, or a further module's
        else:
            what = next((what for sign, what in _FOREIGN.items() if sign in name), "of another kind")
            raise UserError(
                f"init='native': the prediction module of target {target.name!r} is {what} ({prefix}{name}), and only dense "
                "ones with plain attention are supported; use init=target"
            )
        with loading(f"target={target.path!r}", "download it again"), safe_open(path, "pt") as file:
            state[ours] = file.get_tensor(prefix + name).float()
    offset = _norm_offset(target)
    for name in state:
        if "norm" in name:
            state[name] = state[name] + offset
    if form.swapped:
        state["eh_proj.weight"] = torch.cat(state["eh_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
    gate = state.get("layer.mlp.gate_proj.weight", torch.empty(1, 1))
    shapes: Json = {
        "intermediate_size": len(gate),
        "qk_norm": "layer.self_attn.q_norm.weight" in state,
    }
    if "layer.self_attn.q_proj.bias" in state:
        shapes["attention_bias"] = True  # of all four; one that is missing is zero
        state.setdefault("layer.self_attn.o_proj.bias", torch.zeros(target.hidden_size))
    return shapes, state


def _find(target: Target) -> tuple[_Form, str, dict[str, Path]]:
    """The form of the checkpoint's module, the prefix of its tensors, and the file of each tensor by the rest of its name."""
    folder = Path(target.path)
    if not folder.is_dir():
        folder = hub_snapshot(target.path, ["*.safetensors"], "target")
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with loading(f"target={target.path!r}", "download it again"), safe_open(path, "pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    for form in (_DEEPSEEK, _QWEN, MIMO):
        prefix = form.module.format(n=target.num_layers)
        own = {name.removeprefix(prefix): path for name, path in files.items() if name.startswith(prefix)}
        if all(f"{name}.weight" in own for name in form.names):
            return form, prefix, own
    raise UserError(
        f"init='native': the checkpoint of target {target.name!r} ({target.path}) holds no multi-token prediction module "
        "(eh_proj, mtp.fc or mtp_layers); use init=target"
    )


def _norm_offset(target: Target) -> float:
    """1 for families whose norms store their factors minus one, read off the target's final norm; else 0."""
    norm = starts.final_norm(target)
    weight = None if norm is None else starts.norm_weight(norm)
    return 0.0 if norm is None or weight is None else float((weight - next(norm.parameters())).float().mean().round())


KIND = MTP
