"""DSpark drafters as vLLM and SGLang load them (`Qwen3DSparkModel`), and as GGUF files.

A GGUF file is llama.cpp's dflash with a Markov head:

ours                      engines, GGUF
markov_in [d + 1, r]      markov_head.markov_w1, markov_w1.weight: a row per token; the last of ours for tokens that are not kept
markov_out [d, r]         markov_head.markov_w2, markov_w2.weight
gate_proj, joint_proj     markov_head.gate_proj, joint_proj; SGLang and speculators alone have the heads that read more
confidence [1, h + r]     confidence_head.proj, conf_proj; llama.cpp reads it with --spec-draft-p-min above 0, vLLM with adaptive
                          verification, SGLang with a ragged one
mask                      a learned one stands behind the target's rows in embed_tokens, as token number v

config.json has a Qwen3 config's keys, target_layer_ids (ours - 1), mask_token_id, markov_rank,
block_size (predicted tokens). Sinks and windows stand in dflash_config too. Engines predict at a block's first token too unless
`sample_from_anchor` is false. SGLang draws from the target's embedding and head alone, as for
DFlash. vLLM's runner of this method needs a GPU. Sources: vLLM 0.32 models/qwen3_dspark.py,
v1/worker/gpu/spec_decode/dspark; SGLang 0.5.16 to 0.5.23 srt/models/dspark.py,
srt/speculative/dspark_components.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.drafters.dflash.block_reading import own_keys
from drafttrain.drafters.dflash.export import (
    BlockFiles,
    MarkovFiles,
    attention_keys,
    block_options,
)
from drafttrain.drafters.dspark.model import DSpark
from drafttrain.drafters.eagle3.reading import check_embedding
from drafttrain.drafters.form import Form, Weight
from drafttrain.drafters.shipping import EngineSettings, Exported, ExportRequest, Format, Trained
from drafttrain.files import Json
from drafttrain.formats.engines import EngineRelease

# Confidence of checkpoints without such a head, before the sigmoid: no estimate stops a draft.
_CERTAIN = 20.0
_MARKOV = "markov_head.markov_w1.weight"
_VANILLA = "vanilla"


class DSparkShipping(MarkovFiles[DSpark]):
    """vLLM, SGLang and llama.cpp; our own format goes to the Hub too."""

    description = "a DSpark drafter, blocks of {block_size} with a Markov head, {layers}, {parameters} parameters"
    formats = {
        "vllm": Format("DSpark as Qwen3DSparkModel", ("vLLM",)),
        "sglang": Format("DSpark without head and mask of its own", ("SGLang",)),
        "speculators": Format("DSpark in speculators' form", ("speculators",)),
        **BlockFiles.formats,
    }
    drafter_class = DSpark
    causal_in = ("vLLM", "SGLang", "speculators")
    speculators_class = "DSparkSpeculator"
    architecture = "Qwen3DSparkModel"
    since = ("0.5.16", "0.5.19")
    mlx_has_head = True
    reads = "DSpark drafters (Qwen3DSparkModel, DSparkDraftModel, speculators' form)"
    own_names = {
        "markov_in.weight": _MARKOV,
        "markov_out.weight": "markov_head.markov_w2.weight",
        "gate_proj.weight": "markov_head.gate_proj.weight",
        "gate_proj.bias": "markov_head.gate_proj.bias",
        "joint_proj.weight": "markov_head.joint_proj.weight",
        "joint_proj.bias": "markov_head.joint_proj.bias",
        "confidence.weight": "confidence_head.proj.weight",
        "confidence.bias": "confidence_head.proj.bias",
    }
    gguf_names = {
        **BlockFiles.gguf_names,
        "markov_in.weight": "markov_w1.weight",
        "markov_out.weight": "markov_w2.weight",
        "confidence.weight": "conf_proj.weight",
        "confidence.bias": "conf_proj.bias",
    }

    def lacking(self, trained: Trained, form: str, engine: EngineRelease) -> list[str]:
        found = super().lacking(trained, form, engine)
        head = trained.config.get("markov_head_type", _VANILLA)
        if head != _VANILLA and form not in ("sglang", "speculators"):
            found.append(f"markov_head_type={head}: {engine.name} has the {_VANILLA} head only")
        if engine.name == "MLX" and not trained.config.get("sample_from_anchor"):
            found.append(
                "sample_from_anchor=false: MLX counts the block's first token among block_size, vLLM does not"
            )
        return found

    def engine_config(self, drafter: DSpark, form: str, request: ExportRequest) -> Json:
        described = super().engine_config(drafter, form, request)
        if drafter.mask is not None:  # a token of its own
            described["vocab_size"] += 1
        return described

    def lends(self, drafter: DSpark) -> bool:
        return super().lends(drafter) or drafter.mask is not None

    def block_keys(self, drafter: DSpark) -> Json:
        config = drafter.config
        mask_token = config.mask_token_id
        if mask_token is None:
            mask_token = config.vocab_size
        own: Json = {
            "target_layer_ids": [layer - 1 for layer in config.feature_layers],
            "mask_token_id": mask_token,
        }
        return {
            **own,
            "block_size": config.depth,
            "sample_from_anchor": config.sample_from_anchor,
            "dflash_config": own | attention_keys(config),
            **self.speculators_keys(drafter),
        }

    def speculators_keys(self, drafter: DSpark) -> Json:
        return {
            "markov_rank": drafter.config.markov_rank,
            "markov_head_type": drafter.config.markov_head_type,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }

    def checked_depth(self, config: Json) -> int:
        ours = config.get("model_type") == self.drafter_class.config_class.model_type
        flat = "speculators_model_type" not in config
        # An engine's form counts predicted tokens in block_size.
        if flat and not ours and "markov_head_type" in config:
            return config["block_size"]
        return super().checked_depth(config)

    def form(self, drafter: DSpark, config: Json) -> Form:
        form = super().form(drafter, config)
        if form.pop("mask", None):
            own = drafter.embed(torch.arange(drafter.config.vocab_size))  # [v, h]
            form["embed_tokens.weight"] = Weight(
                "mask",
                there=lambda mask: torch.cat((own.to(mask), mask[None])),
                back=lambda table: table[-1],
            )
        return form

    def more_fields(self, original: DSpark, export: Exported) -> Json:
        keys = own_keys(export.config)
        return {
            "markov_rank": keys.get("markov_rank", 256),
            "markov_head_type": keys.get("markov_head_type", _VANILLA),
            "markov_all": True,
        }

    def drafter_weights(
        self,
        original: DSpark,
        back: DSpark,
        export: Exported,
    ) -> dict[str, Tensor]:
        table = export.weights.get("embed_tokens.weight")
        if table is not None:
            check_embedding(table[:-1], back.config.target["name"], export.where)
        return super().drafter_weights(original, back, export)

    def published(self, checkpoint: Exported, target: Json) -> Exported:
        """As other blocks; a missing confidence is certain."""
        found = dict(super().published(checkpoint, target).weights)
        # Rows beyond the target's vocabulary are of no token that is committed.
        table = found.get(_MARKOV)
        if table is not None and "embed_tokens.weight" not in found:
            found[_MARKOV] = table[: target["vocab_size"]]
        h = target["hidden_size"]
        r = own_keys(checkpoint.config).get("markov_rank", 256)
        confidence = found.get("confidence_head.proj.weight")
        if confidence is None:
            found["confidence_head.proj.weight"] = torch.zeros(1, h + r)
            found["confidence_head.proj.bias"] = torch.full((1,), _CERTAIN)
        elif confidence.shape == (1, h):  # it reads the state alone
            found["confidence_head.proj.weight"] = torch.cat(
                (confidence, confidence.new_zeros(1, r)),
                dim=1,
            )
        return checkpoint._replace(weights=found)

    def gguf_keys(self, drafter: DSpark) -> Json:
        return {**super().gguf_keys(drafter), "has_confidence_head": True}

    def options(self, trained: Trained) -> EngineSettings:
        depth = self.block_depth(trained)
        return {**super().options(trained), **block_options("dspark", "DSPARK", depth)}


SHIPPING = DSparkShipping()
