"""DFlash drafters as vLLM, SGLang and TensorRT-LLM load them (`DFlashDraftModel`), as transformers does, and as GGUF files.

config.json   a Qwen3 config of the layers, block_size, dflash_config {mask_token_id, target_layer_ids: ours - 1}
weights       fc, hidden_norm, norm, layers.{i}.* as ours; with a pruned vocabulary or a trained head also lm_head and d2t
mask          a learned one is mask_embedding.pt, the only form that vLLM reads it in, by torch.load(weights_only=True); it
              stands for one token id, for which a token that the drafter does not keep is taken. A pickle is not published:
              the Hub gets our own format, from which `drafttrain export` writes this one

SGLang draws from the target's embedding and head alone: it has no place for a pruned vocabulary, a trained head or a learned
mask. Nor has transformers, whose `generate(speculation_type="dflash")` takes the same network as `MuseGlimmerAssistantModel`:
fc and hidden_norm are encoder.fc and encoder.output_norm_enc there, and the config says layer_types.

Sources: vllm/model_executor/models/qwen3_dflash.py and vllm/v1/spec_decode/dflash.py of vLLM 0.32;
srt/models/dflash.py and srt/speculative/dflash_utils.py of SGLang 0.5.11 to 0.5.23; TensorRT-LLM's features/speculative-decoding;
transformers 5.23 models/muse_glimmer_assistant and generation/candidate_generator.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import gguf
import torch
from torch import Tensor

from drafttrain.drafters.common.block import BlockDrafter
from drafttrain.drafters.dflash.model import DFlash, DFlashConfig
from drafttrain.drafters.gguf_heads import GgufHeads
from drafttrain.drafters.shipping import EngineRelease, Exported, ExportRequest, Format, Trained, engine_of
from drafttrain.errors import UserError
from drafttrain.files import Json, writing
from drafttrain.formats.weights import dtype_name, read_pickle, write_checkpoint
from drafttrain.target import Target

_MASK_FILE = "mask_embedding.pt"
_TRANSFORMERS = "5.23"  # the release that was read; its one DFlash class is a family's own, and general
_GLIMMER = "muse_glimmer_assistant"
_SAME = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_parameters", "max_position_embeddings", "vocab_size", "draft_vocab_size", "block_size",
)  # fmt: skip


Block = TypeVar("Block", bound=BlockDrafter)


class BlockFiles(GgufHeads[Block]):
    """Block drafters in llama.cpp's dflash model, whose target layers are those whose input it reads, as ours are."""

    formats = {"gguf": Format("a block drafter as GGUF file", ("llama.cpp",))}
    verifiable = {"llama.cpp": "gguf"}
    in_root = ("gguf",)
    gguf_arch = "dflash"
    gguf_layers = gguf.MODEL_ARCH.QWEN3
    gguf_names = {"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight"}

    def gguf_keys(self, drafter: Block) -> Json:
        return {
            "target_layers": list(drafter.config.feature_layers),
            "target_hidden_size": drafter.config.hidden_size,
            "block_size": drafter.config.block_size,
            "attention.causal": False,
            "sample_from_anchor": False,  # a block predicts at its masks, not at the last committed token
        }

    def gguf_fields(self, keys: Json, like: Block) -> Json:
        mask = keys["tokenizer.ggml.mask_token_id"]
        return {
            "feature_layers": tuple(keys["target_layers"]),
            "block_size": keys["block_size"],
            "mask_token_id": None if mask == like.config.vocab_size else mask,
        }

    def checked_depth(self, config: Json) -> int:
        return config["block_size"] - 1

    def block_depth(self, trained: Trained) -> int:
        return trained.config["block_size"] - 1

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, object]]:
        return {"llama.cpp": {"spec-type": f"draft-{trained.kind}"}}


class DFlashShipping(BlockFiles[DFlash]):
    """One checkpoint form for three engines, GGUF for llama.cpp; our own format goes to the Hub too."""

    description = "a DFlash drafter (arXiv 2602.06036), blocks of {block_size}, {layers}, {parameters} parameters"
    formats = {
        "vllm": Format("DFlash as DFlashDraftModel", ("vLLM",)),
        "sglang": Format("DFlash without head and mask of its own", ("SGLang", "TensorRT-LLM, Triton")),
        "transformers": Format("DFlash as MuseGlimmerAssistantModel", ("transformers",)),
        **BlockFiles.formats,
    }
    verifiable = {"vllm": "vllm", "transformers": "transformers", **BlockFiles.verifiable}

    tiny = {"mask_token_id": 300, "num_hidden_layers": 2, "block_size": 4}

    def unsupported(self, trained: Trained, form: str, engine: EngineRelease | None = None) -> list[str]:
        found = super().unsupported(trained, form, engine)
        if found or form == "gguf":
            return found
        engine, config = engine or engine_of(form), trained.config
        layers, last = list(config.get("feature_layers", ())), trained.target.get("num_layers", 0)
        name, where = engine.name, f"feature_layers={layers}: {engine.name} provides"
        checks = {
            f"{where} the inputs of layers 1 to {last - 1} only": any(layer in (0, last) for layer in layers),
            f"{where} features in ascending order": layers != sorted(layers),
        }
        if form != "vllm":
            kept, v = config.get("draft_vocab_size"), config.get("vocab_size")
            checks |= {
                f"draft_vocab_size={kept}: {name} drafts over the whole vocabulary of {v} tokens": kept != v,
                f"train_head=true: {name} drafts with the target's head": bool(config.get("train_head")),
                f"mask_token_id=null, a learned mask: {name} takes a token's embedding": config.get("mask_token_id")
                is None,
                "SGLang has DFlash since 0.5.11": name == "SGLang" and engine.before("0.5.11"),
                f"transformers has DFlash since {_TRANSFORMERS}": name == "transformers"
                and engine.before(_TRANSFORMERS),
            }
        return [reason for reason, found in checks.items() if found]

    def withheld(self, trained: Trained, form: str) -> str:
        learned = form == "vllm" and trained.config.get("mask_token_id") is None
        reason = f"vLLM reads a learned mask from {_MASK_FILE} alone, and pickles are not published"
        return f"{reason}; users of the repository write it by drafttrain export --format {form}" if learned else ""

    def write(self, trained: Trained, form: str, request: ExportRequest) -> list[Path]:
        """Writes config.json, model.safetensors and, for a learned mask, mask_embedding.pt; GGUF as the base class."""
        if form == "gguf":
            return super().write(trained, form, request)
        target = Target.load(request.target_files or trained.target_name, "float32", "cpu")
        if target.embed_scale != 1.0 and form != "transformers":
            scale = f"the target scales its embeddings by {target.embed_scale:g}, and vLLM's class does not"
            raise UserError(f"this drafter cannot be written for vLLM: {scale}")
        drafter = self.load(trained)
        drafter.bind(target)  # its head rows are written where an engine cannot pick them itself
        config = self.engine_config(drafter, form, request)
        weights = self.engine_weights(drafter, config)
        mask = weights.pop("mask", None)
        written = write_checkpoint(request.output, config, weights, request.dtype)
        if mask is not None:
            token, embedding = config["dflash_config"]["mask_token_id"], mask.detach().to("cpu", request.dtype)
            written.append(request.output / _MASK_FILE)
            with writing(request.output):
                torch.save({"embedding": embedding, "mask_token_id": token}, written[-1])
        return written

    def engine_config(self, drafter: DFlash, form: str, request: ExportRequest) -> Json:
        config, fields = drafter.config, drafter.config.to_dict()
        mask_token = config.mask_token_id
        if mask_token is None:
            spare = torch.ones(config.vocab_size, dtype=torch.bool)
            spare[drafter.kept_ids.cpu()] = False
            mask_token = int(spare.nonzero().max()) if spare.any() else config.vocab_size - 1
        layers = [layer - 1 for layer in config.feature_layers]
        described = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **{name: fields[name] for name in _SAME},
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "num_target_layers": config.target["num_layers"],
            "dflash_config": {
                "mask_token_id": mask_token,
                "target_layer_ids": layers,
            },
            "torch_dtype": dtype_name(request.dtype),
        }
        if form != "transformers":
            return described
        own = {"architectures": ["MuseGlimmerAssistantModel"], "model_type": _GLIMMER, **described["dflash_config"]}
        own |= dict.fromkeys(
            ("bos_token_id", "eos_token_id", "pad_token_id")
        )  # not the family's, which it would default to
        return {**described, **own, "layer_types": ["full_attention"] * config.num_hidden_layers}

    def engine_names(self, drafter: DFlash, config: Json) -> dict[str, str]:
        names = super().engine_names(drafter, config)
        if config["model_type"] != _GLIMMER:
            return names
        encoder = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
        return {encoder.get(name, name): own for name, own in names.items()}

    def engine_weights(self, drafter: DFlash, config: Json) -> dict[str, Tensor]:
        weights = super().engine_weights(drafter, config)
        if config["draft_vocab_size"] != config["vocab_size"]:
            kept = drafter.kept_ids.cpu()  # [d] int64
            weights |= {"lm_head.weight": drafter.head.weight, "d2t": kept - torch.arange(len(kept))}
        return weights

    def drafter_from(self, original: DFlash, export: Exported) -> DFlash:
        own, learned = export.config["dflash_config"], original.mask is not None
        return DFlash(
            DFlashConfig(
                **{name: export.config[name] for name in _SAME},
                feature_layers=tuple(layer + 1 for layer in own["target_layer_ids"]),
                mask_token_id=None if learned else own["mask_token_id"],
                train_head=export.config["draft_vocab_size"] != export.config["vocab_size"]
                or original.lm_head is not None,
                target=original.config.target,
            )
        )

    def drafter_weights(self, original: DFlash, back: DFlash, export: Exported) -> dict[str, Tensor]:
        state = super().drafter_weights(original, back, export)
        kept = torch.arange(export.config["draft_vocab_size"]) + export.weights.get("d2t", 0)  # [d] int64
        return {**state, "kept_ids": kept}

    def exported_weights(self, exported: Path) -> dict[str, Tensor]:
        weights, path = super().exported_weights(exported), exported / _MASK_FILE
        mask = read_pickle(path).get("embedding") if path.is_file() else None
        return weights if mask is None else {**weights, "mask": mask}

    def compare(self, original: DFlash, back: DFlash, dtype: torch.dtype, depth: int, where: str) -> Json:
        """Compares a frozen head's rows with the target's; the drafts then use the same random head."""
        if back.lm_head is not None and original.lm_head is None:
            target = Target.load(original.config.target["name"], "float32", "cpu")
            if not torch.equal(back.lm_head.weight.to(dtype), target.head_weight[back.kept_ids].to(dtype)):
                raise UserError(f"{where} computes something else: lm_head.weight is not the target's; export again")
            back.lm_head = None
        return super().compare(original, back, dtype, depth, where)

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, object]]:
        # vLLM drafts one mask per requested token, and the drafter knows one number of them.
        depth = self.block_depth(trained)
        return {
            **super().options(trained),
            "vLLM": {"method": "dflash", "num_speculative_tokens": depth},
            "SGLang": {
                "speculative-algorithm": "DFLASH",
                "speculative-num-steps": None,
                "speculative-eagle-topk": None,
                "speculative-num-draft-tokens": depth + 1,  # its block, the last committed token included
            },
            "TensorRT-LLM, Triton": {"decoding_type": "DFlash", "max_draft_len": depth},
            "transformers": {"speculation_type": "dflash"},
        }


SHIPPING = DFlashShipping()
