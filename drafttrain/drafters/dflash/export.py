"""DFlash drafters as vLLM loads them (`DFlashDraftModel`).

config.json   a Qwen3 config of the layers, block_size, dflash_config {mask_token_id, target_layer_ids: ours - 1}
weights       fc, hidden_norm, norm, layers.{i}.* as ours; with a pruned vocabulary or a trained head also lm_head and d2t
mask          a learned one is mask_embedding.pt, the only form that vLLM reads it in; it stands for one token id, for
              which a token that the drafter does not keep is taken

Sources: vllm/model_executor/models/qwen3_dflash.py and vllm/v1/spec_decode/dflash.py of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from drafttrain.drafters.dflash.model import DFlash, DFlashConfig
from drafttrain.drafters.shipping import ExportRequest, Format, Shipping
from drafttrain.drafters.trained import Trained
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.llama_layers import layer_shapes
from drafttrain.formats.weights import Shapes, dtype_name, write_checkpoint
from drafttrain.target import Target

_MASK_FILE = "mask_embedding.pt"
_SAME = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_parameters", "max_position_embeddings", "vocab_size", "draft_vocab_size", "block_size",
)  # fmt: skip


class DFlashShipping(Shipping):
    """vLLM alone; our own format goes to the Hub too."""

    formats = {"vllm": Format("DFlash as DFlashDraftModel", ("vLLM",))}

    def line(self, trained: Trained, parameters: str) -> str:
        config = trained.config
        return (
            f"a DFlash drafter (arXiv 2602.06036), blocks of {config.get('block_size', 0)}, "
            f"{config.get('num_hidden_layers', 0)} decoder layers, {parameters} parameters"
        )

    def unsupported(self, trained: Trained, form: str) -> list[str]:
        return super().unsupported(trained, form) or unsupported_features(trained.config, trained.target)

    def write(self, trained: Trained, form: str, request: ExportRequest) -> list[Path]:
        target = Target.load(request.target or trained.target_name, "float32", "cpu")
        drafter: DFlash = trained.load()
        drafter.bind(target)
        return write_dflash(drafter, target, request.output, request.dtype)

    def expected_weights(self, trained: Trained, config: Json) -> Shapes:
        h, d, count = (
            config["hidden_size"],
            config["draft_vocab_size"],
            len(config["dflash_config"]["target_layer_ids"]),
        )
        shapes: Shapes = {"fc.weight": (h, h * count), "hidden_norm.weight": (h,), "norm.weight": (h,)}
        layer = layer_shapes(config, h)
        shapes |= {
            f"layers.{i}.{name}": shape for i in range(config["num_hidden_layers"]) for name, shape in layer.items()
        }
        pruned = d != config["vocab_size"]
        if pruned:
            shapes["d2t"] = (d,)
        if pruned or trained.config.get("train_head"):
            shapes["lm_head.weight"] = (d, h)
        return shapes

    def read_back(self, trained: Trained, exported: Path, config: Json, weights: dict[str, Tensor]) -> DFlash:
        """Leaves a frozen head to the target, after its rows have been compared with the target's.

        Raises:
            UserError: the head's rows are not the target's.
        """
        kept = torch.arange(config["draft_vocab_size"]) + weights.pop("d2t", 0)  # [d] int64
        if "lm_head.weight" in weights and not trained.config.get("train_head"):
            rows = weights.pop("lm_head.weight")  # [d, h]
            wanted = Target.load(trained.target_name, "float32", "cpu").head_weight[kept].to(rows.dtype)
            if not torch.equal(rows, wanted):
                raise UserError(
                    f"{str(exported)!r} computes something else: lm_head.weight is not the target's; export again"
                )
        has_mask = (exported / _MASK_FILE).is_file()
        if has_mask:
            weights["mask"] = torch.load(exported / _MASK_FILE, weights_only=True)["embedding"]
        own = config["dflash_config"]
        back = DFlash(
            DFlashConfig(
                **{name: config[name] for name in _SAME},
                feature_layers=tuple(layer + 1 for layer in own["target_layer_ids"]),
                mask_token_id=None if has_mask else own["mask_token_id"],
                train_head="lm_head.weight" in weights,
                target=trained.target,
            )
        )
        back.load_state_dict({**weights, "kept_ids": kept})
        return back

    def checked_depth(self, config: Json) -> int:
        return config["block_size"] - 1

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, object]]:
        # vLLM drafts one mask per requested token, and the drafter knows one number of them.
        depth = trained.config.get("block_size", 8) - 1
        return {"vLLM": {"method": "dflash", "num_speculative_tokens": depth}}


def unsupported_features(config: Json, target: Json) -> list[str]:
    """The features of a drafter with this config and target that vLLM does not support; empty if none."""
    layers, last = list(config.get("feature_layers", ())), target.get("num_layers", 0)
    reasons = []
    if any(layer in (0, last) for layer in layers):
        reasons.append(f"feature_layers={layers}: vLLM provides the inputs of layers 1 to {last - 1} only")
    if layers != sorted(layers):
        reasons.append(f"feature_layers={layers}: vLLM provides features in ascending order")
    return reasons


def write_dflash(drafter: DFlash, target: Target, output: Path, dtype: torch.dtype = torch.bfloat16) -> list[Path]:
    """Writes config.json, model.safetensors and, for a learned mask, mask_embedding.pt.

    Args:
        drafter: bound to `target`, whose head rows are written where an engine cannot pick them itself.

    Raises:
        UserError: vLLM cannot compute what the drafter does (every reason), or the output cannot be written.
    """
    config = drafter.config
    fields = config.to_dict()
    reasons = unsupported_features(fields, target.identity())
    if target.embed_scale != 1.0:
        reasons.append(f"the target scales its embeddings by {target.embed_scale:g}, and vLLM's class does not")
    if reasons:
        raise UserError(f"this drafter cannot be written for vLLM: {'; '.join(reasons)}")
    kept = drafter.kept_ids.cpu()  # [d] int64
    mask_token = config.mask_token_id
    if mask_token is None:
        spare = torch.ones(config.vocab_size, dtype=torch.bool)
        spare[kept] = False
        mask_token = int(spare.nonzero().max()) if spare.any() else config.vocab_size - 1
    described = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **{name: fields[name] for name in _SAME},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_target_layers": target.num_layers,
        "dflash_config": {
            "mask_token_id": mask_token,
            "target_layer_ids": [layer - 1 for layer in config.feature_layers],
        },
        "torch_dtype": dtype_name(dtype),
    }
    weights = {name: value for name, value in drafter.state_dict().items() if name not in ("kept_ids", "mask")}
    if config.draft_vocab_size != config.vocab_size:
        weights |= {"lm_head.weight": drafter.head.weight, "d2t": kept - torch.arange(len(kept))}
    written = write_checkpoint(output, described, weights, dtype)
    if drafter.mask is not None:
        learned = {"embedding": drafter.mask.detach().to("cpu", dtype), "mask_token_id": mask_token}
        try:
            torch.save(learned, output / _MASK_FILE)
        except (OSError, RuntimeError) as error:
            raise UserError(f"output={str(output)!r} cannot be written ({error}); choose another place") from error
        written.append(output / _MASK_FILE)
    return written


SHIPPING = DFlashShipping()
