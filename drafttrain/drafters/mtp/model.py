"""Multi-token prediction as DeepSeek-V3 trains it (arXiv 2412.19437), on top of a finished target.

    anchor t, depth 0:   state = f_t, which the target's head reads    token x_{t+1}        predicts x_{t+2}
    anchor t, depth k:   state = own output at depth k-1               token x_{t+1+k}      predicts x_{t+2+k}

    x = eh_proj(enorm(embed(token)) ++ hnorm(state));  out = norm(layer(x));  logits = lm_head(out)

One module serves all depths, as in serving engines, or each depth has its own. The target's head
reads f_t after its final norm, so the next depth reads `out` after our norm. With several modules
each depth's keys come from its own module, and all depths see the keys that the first module
computes from true states: a cache as with one module. (DeepSeek's modules have a causal cache each,
which every drafted path would have to recompute.)
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.batch import Batch
from drafttrain.drafters.base import Source
from drafttrain.drafters.common import starts
from drafttrain.drafters.common.configs import Decay, LastStateConfig, Layers
from drafttrain.drafters.common.layer_model import LayerDrafter
from drafttrain.drafters.common.layers import DraftLayer, RMSNorm, Rotary
from drafttrain.drafters.mtp.checkpoint_modules import NativeModule, plain_layer, read_native
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.ops.cpu_draft import DraftWeights
from drafttrain.ops.layer_ops import Tables
from drafttrain.target import Target
from drafttrain.target.own_layer import (
    PLACES,
    OwnLayer,
    causal,
    read_own_layer,
    relative_error,
    spec_of,
)

# Options that shape a plain layer, and that a layer of the target's class has from the target.
_LAYER_KEYS = (
    "intermediate_size", "rms_norm_eps", "qk_norm", "attention_bias", "mlp_bias", "hidden_act", "rope_theta", "rope_parameters"
)  # fmt: skip


class MTPConfig(LastStateConfig):
    """Config of an MTP drafter.

    Attributes:
        modules: 1, or more for one per depth; deeper depths use the last one. Each has one layer.
        train_head: train and save a copy of the target's head rows; False uses the target's,
            frozen, as engines do.
        target_layer: of modules whose layer is of the target's class: its config and index
            (`target.own_layer.spec_of`), and the form of the checkpoint it came from; set by
            init=native. Empty for plain layers.
    """

    model_type = "drafttrain_mtp"
    modules: Layers = 1
    train_head: bool = True
    depth_decay: Decay = 0.6
    target_layer: Json = field(default_factory=dict)

    def check(self) -> None:
        super().check()
        if not 1 <= self.modules <= self.ttt_steps:
            raise UserError(
                f"modules={self.modules} must be from 1 to ttt_steps={self.ttt_steps}: others never train"
            )
        if self.num_hidden_layers != 1:
            raise UserError(
                f"num_hidden_layers={self.num_hidden_layers}: a module has 1 layer; set modules instead"
            )


class MTPModule(nn.Module):
    """A prediction module: projection and layer; names are DeepSeek's."""

    def __init__(self, config: MTPConfig):
        super().__init__()
        h = config.hidden_size
        eps = config.rms_norm_eps
        self.enorm = RMSNorm(h, eps)  # of the embedding
        self.hnorm = RMSNorm(h, eps)  # of the state
        self.eh_proj = nn.Linear(2 * h, h, bias=False)
        self.layer: DraftLayer | OwnLayer
        if config.target_layer:
            self.layer = OwnLayer(config.target_layer)
        else:
            self.layer = DraftLayer(config)


class FamilyRotary(Rotary):
    """The rotary tables of a family's layer."""

    width = 0  # no CPU kernel reads these tables

    def __init__(self, layer: OwnLayer):
        self.layer = layer

    def tables(self, positions: Tensor, dtype: torch.dtype) -> Tables:
        return self.layer.tables(positions, dtype)


class MTP(LayerDrafter):
    """A multi-token prediction drafter."""

    config_class = MTPConfig
    kind = "mtp"

    def __init__(self, config: MTPConfig):
        super().__init__(config)
        self.blocks: Any = nn.ModuleList(MTPModule(config) for _ in range(config.modules))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.finish(config.train_head)
        own = self.blocks[0].layer
        if isinstance(own, OwnLayer):
            self.rotary = FamilyRotary(own)

    def bind(self, target: Target) -> None:
        """As the base class.

        Raises:
            UserError: the drafter has no head, and the target caps its logits.
        """
        super().bind(target)
        if self.lm_head is None and target.softcap is not None:
            raise UserError(
                f"drafter.train_head=false: target {target.name!r} caps its logits, and the head is trained without a cap; "
                "set drafter.train_head=true"
            )

    @property
    def decoder_layers(self) -> list[Any]:  # DraftLayer or OwnLayer
        return [block.layer for block in self.blocks]

    def block_at(self, depth: int) -> MTPModule:
        """The module of a depth; depths after the last module use that one."""
        return self.blocks[min(depth, len(self.blocks) - 1)]

    def layers_at(self, depth: int) -> list[Any]:
        return [self.block_at(depth).layer]

    @property
    def own_depths(self) -> int:
        return len(self.blocks)

    def draft_weights(self, depth: int) -> DraftWeights | None:
        if self.config.target_layer:
            return None
        block = self.block_at(depth)
        return DraftWeights(
            hidden=self.config.hidden_size,
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

    def enter(
        self,
        state: Tensor,
        embeds: Tensor,
        depth: int,
    ) -> tuple[Tensor, Tensor | None]:
        block = self.block_at(depth)
        both = torch.cat((block.enorm(embeds), block.hnorm(state)), dim=-1)  # [t, 2h]
        return block.eh_proj(both), None

    def leave(self, state: Tensor) -> Tensor:
        return self.norm(state)

    @classmethod
    def check_options(cls, options: Json) -> Json:
        if "target_layer" in options:
            raise UserError(
                "drafter.target_layer is in the target's checkpoint: drop the key, and set init=native"
            )
        return super().check_options(options)

    @classmethod
    def native(
        cls,
        target: Target,
        kept_ids: Tensor,
        options: Json,
    ) -> MTP:
        """A drafter with the weights of the MTP module in the target's checkpoint.

        Of several modules, the first serves all depths.

        Raises:
            UserError: no module, or one that neither a `DraftLayer` nor a layer of the target's
                class computes.
        """
        module = read_native(target)
        reasons = []
        made = []
        for build in (cls._plain_native, cls._own_native):
            try:
                made.append(build(target, module, kept_ids, options))
            except UserError as error:
                reasons.append(str(error))
        if not made:
            raise UserError(
                f"init='native': the prediction module of target {target.name!r} is {reasons[0]}, nor a layer of the target's "
                f"class: {reasons[1]}; use init=target"
            )
        # A plain layer with the same weights may compute something else: other rotary tables, a
        # gate, a scale.
        if len(made) == 2 and not made[0]._computes_as(made[1]):
            made.reverse()
        drafter = made[0]
        if module.head is not None:
            if drafter.lm_head is None:
                raise UserError(
                    f"drafter.train_head=false: the prediction module of target {target.name!r} has a head of its own; set "
                    "drafter.train_head=true"
                )
            drafter.lm_head.weight.data.copy_(module.head[kept_ids])
        first = drafter.blocks[0]
        for block in drafter.blocks[1:]:
            block.load_state_dict(first.state_dict())
        kind = "a layer of the target's class"
        if isinstance(first.layer, DraftLayer):
            kind = "a plain layer"
        origin = f"the prediction module of target {target.name!r}"
        print(f"initialized from {origin}, {kind}", flush=True)
        return drafter

    @classmethod
    def _plain_native(
        cls,
        target: Target,
        module: NativeModule,
        kept_ids: Tensor,
        options: Json,
    ) -> MTP:
        shapes, state = plain_layer(module, target)
        return cls._around(target, module, {**shapes, **options}, kept_ids, state)

    @classmethod
    def _own_native(
        cls,
        target: Target,
        module: NativeModule,
        kept_ids: Tensor,
        options: Json,
    ) -> MTP:
        own, spec = read_own_layer(target, module.layer)
        heads, kv_heads, width, window = own.prove()
        shapes = {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": width,
        }
        # The layer is the target's: a recipe cannot change its shapes.
        for name, value in options.items():
            fixed = name in shapes or name in _LAYER_KEYS
            if fixed and value != shapes.get(name):
                raise UserError(f"drafter.{name}={value!r} does not change it; drop the key")
        all_options: Json = {"sliding_window": window}
        all_options |= options
        all_options |= shapes
        all_options["target_layer"] = {**spec, "form": module.form}
        return cls._around(target, module, all_options, kept_ids, dict(own.state_dict()))

    @classmethod
    def native_options(cls, target: Target) -> Json:
        # The layer is counted as the target's last one that sees all positions, as it is in
        # published families.
        count = target.num_layers
        kinds = getattr(target.config, "layer_types", None)
        if not kinds:
            kinds = [""] * count
        full = [i for i in range(count) if kinds[i] == "full_attention"]
        index = count - 1
        if full:
            index = full[-1]
        spec = spec_of(target.config, index)
        heads, kv_heads, width, window = OwnLayer(spec).shape()
        shapes = {
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": width,
        }
        return {**shapes, "sliding_window": window, "target_layer": spec}

    @classmethod
    def _around(
        cls,
        target: Target,
        module: NativeModule,
        options: Json,
        kept_ids: Tensor,
        layer: dict[str, Tensor],
    ) -> MTP:
        """A drafter whose first block has the module's weights, and its layer those of `layer`.

        Raises:
            UserError: weights that do not fit a drafter of these options.
        """
        options = {**options, "draft_vocab_size": len(kept_ids)}
        drafter = cls(MTPConfig.for_target(target, **options))
        drafter.initialize(target, kept_ids)
        # Every weight of the first block must be in the checkpoint, and no other.
        ours = {"norm.weight": drafter.norm.weight, **drafter.blocks[0].state_dict()}
        theirs = dict(module.around)
        for name, weight in layer.items():
            theirs[f"layer.{name}"] = weight
        wrong = sorted(ours.keys() ^ theirs.keys())
        if wrong:
            what = "unknown" if wrong[0] in theirs else "missing"
            raise UserError(f"not a plain layer: {what} is {wrong[0]}")
        for name, weight in theirs.items():
            if ours[name].shape != weight.shape:
                raise UserError(
                    f"not a plain layer: {name} is {list(weight.shape)}, not {list(ours[name].shape)}"
                )
            ours[name].data.copy_(weight)
        return drafter

    @torch.no_grad()
    def _computes_as(self, other: MTP) -> bool:
        """Whether this drafter's first layer gives the states of another drafter's.

        This one's is a plain layer, the other's an `OwnLayer`.
        """
        own = other.blocks[0].layer
        states, tables = own.probe()
        theirs = own(
            states,
            None,
            tables,
            causal,
            None,
        )
        tables = self.rotary.tables(torch.tensor(PLACES), states.dtype)
        ours = self.blocks[0].layer(
            states,
            None,
            tables,
            causal,
            None,
        )
        return relative_error(ours, theirs) < 1e-4

    def copy_from(self, target: Target) -> list[str]:
        """Copies head rows, final norm and, into each module, the last layer.

        Projections start as the identity on the state.
        """
        names = ["eh_proj", *starts.copy_ends(self, target)]
        last = target.last_layers(1)
        copied: list[str] = []  # the same for each module
        for block in self.blocks:
            starts.identity_on_last(block.eh_proj)
            if last and isinstance(block.layer, DraftLayer):
                copied = starts.copy_layer(block.layer, last[0])
        return names + copied

    @torch.no_grad()
    def solve_start(self, batches: list[Batch], source: Source) -> float | None:
        """Fits the projections."""
        for block in self.blocks:
            block.enorm.weight.fill_(1.0)
            block.hnorm.weight.fill_(1.0)
        projections = [block.eh_proj for block in self.blocks]
        explained, size = starts.projection_start(
            self,
            projections,
            batches,
            source,
            normed=True,
        )
        self.norm.weight.fill_(size)
        starts.set_temperature(self, batches[0], source, self.norm.weight)
        return explained


KIND = MTP
