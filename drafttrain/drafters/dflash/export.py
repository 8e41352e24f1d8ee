"""DFlash drafters as vLLM, SGLang and TensorRT-LLM load them (`DFlashDraftModel`), as transformers
does, and as GGUF files.

config.json   a Qwen3 config of the layers, block_size, dflash_config {mask_token_id, target_layer_ids: ours - 1}
weights       fc, hidden_norm, norm, layers.{i}.* as ours; with a pruned vocabulary or a trained head also lm_head and d2t
mask          a learned one is mask_embedding.pt, the only form that vLLM reads it in, by torch.load(weights_only=True); it
              stands for one token id, for which a token that the drafter does not keep is taken. A
              pickle is not published:
              the Hub gets our own format, from which `drafttrain export` writes this one

SGLang draws from the target's embedding and head alone: it has no place for a pruned vocabulary, a
trained head or a learned mask. Nor has transformers, whose `generate(speculation_type="dflash")`
takes the same network as `MuseGlimmerAssistantModel`: fc and hidden_norm are encoder.fc and
encoder.output_norm_enc there, and the config says layer_types.

Sources: vllm/model_executor/models/qwen3_dflash.py and vllm/v1/spec_decode/dflash.py of vLLM 0.32;
srt/models/dflash.py and srt/speculative/dflash_utils.py of SGLang 0.5.11 to 0.5.23; TensorRT-LLM's
features/speculative-decoding; transformers 5.23 models/muse_glimmer_assistant and
generation/candidate_generator.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from drafttrain.drafters.common.block import BlockDrafter
from drafttrain.drafters.dflash.block_reading import (
    block_fields,
    is_dspark,
    named,
    own_keys,
    without_copies,
)
from drafttrain.drafters.dflash.model import DFlash
from drafttrain.drafters.gguf_heads import GgufHeads
from drafttrain.drafters.shipping import Exported, ExportRequest, Format, Trained
from drafttrain.errors import UserError
from drafttrain.files import Json, writing
from drafttrain.formats.engines import EngineRelease, engine_of
from drafttrain.formats.weights import (
    check_kept_ids,
    check_names,
    dtype_name,
    pop_kept_ids,
    read_config,
    read_pickle,
    read_weights,
    write_checkpoint,
)
from drafttrain.target import load_shell
from drafttrain.target.loading import check_finite

_MASK_FILE = "mask_embedding.pt"
_TRANSFORMERS = (
    "5.23"  # the release that was read; its one DFlash class is a family's own, and general
)
_GLIMMER = "muse_glimmer_assistant"
# Architectures of published block drafters; a Markov head, not the name, tells DSpark from DFlash.
PUBLISHED_BLOCKS = {
    "DFlashDraftModel", "QwenDFlashDraftModel", "Qwen3DSparkModel", "DSparkDraftModel", "LingDSparkModel",
}  # fmt: skip
_SAME = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_parameters", "max_position_embeddings", "vocab_size", "draft_vocab_size",
)  # fmt: skip


Block = TypeVar("Block", bound=BlockDrafter)


class BlockFiles(GgufHeads[Block]):
    """Block drafters in llama.cpp's dflash model, whose target layers are those whose input it
    reads, as ours are.
    """

    formats = {"gguf": Format("a block drafter as GGUF file", ("llama.cpp",))}
    verifiable = {"llama.cpp": "gguf"}
    in_root = ("gguf",)
    gguf_arch = "dflash"
    gguf_layers = "QWEN3"
    gguf_names = {"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight"}

    def gguf_keys(self, drafter: Block) -> Json:
        size = drafter.config.sliding_window
        layers = drafter.config.num_hidden_layers
        if size:
            window = {
                "attention.sliding_window": size,
                "attention.sliding_window_pattern": [True] * layers,
            }
        else:
            window = {}
        return {
            "target_layers": list(drafter.config.feature_layers),
            "target_hidden_size": drafter.config.hidden_size,
            "block_size": drafter.config.block_size,
            "attention.causal": False,
            "sample_from_anchor": drafter.config.sample_from_anchor,
            **window,
        }

    def gguf_fields(self, keys: Json, like: Block) -> Json:
        mask = keys["tokenizer.ggml.mask_token_id"]
        return {
            "feature_layers": tuple(keys["target_layers"]),
            "block_size": keys["block_size"],
            "sample_from_anchor": keys["sample_from_anchor"],
            "sliding_window": keys.get("attention.sliding_window", 0),
            "mask_token_id": None if mask == like.config.vocab_size else mask,
        }

    def checked_depth(self, config: Json) -> int:
        return config["block_size"] - (not config.get("sample_from_anchor"))

    def block_depth(self, trained: Trained) -> int:
        return self.checked_depth(trained.config)

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, object]]:
        return {"llama.cpp": {"spec-type": f"draft-{trained.kind}"}}


class EngineBlocks(BlockFiles[Block]):
    """Block drafters in the form that vLLM and SGLang load, which published drafters have too.

    Attributes:
        drafter_class: the kind's class. architecture: the engines' name of it.
        own_names: the form's name of a tensor of ours, where it differs.
        since: SGLang's first release that drafts with the kind, and that predicts at the masks
            alone, as ours do by default.
    """

    drafter_class: type[Block]
    architecture = ""
    own_names: Mapping[str, str] = {}
    since = ("", "")

    def unsupported(
        self,
        trained: Trained,
        form: str,
        engine: EngineRelease | None = None,
    ) -> list[str]:
        found = super().unsupported(trained, form, engine)
        if found or form == "gguf":
            return found
        engine = engine or engine_of(form)
        config = trained.config
        kind = trained.kind
        layers = list(config.get("feature_layers", ()))
        last = trained.target.get("num_layers", 0)
        name, where = engine.name, f"feature_layers={layers}: {engine.name} provides"
        checks = {
            f"{where} the inputs of layers 1 to {last - 1} only": any(
                layer in (0, last) for layer in layers
            ),
            f"{where} features in ascending order": layers != sorted(layers),
        }
        if form != "vllm":
            kept, v, first, masks = (
                config.get("draft_vocab_size"),
                config.get("vocab_size"),
                *self.since,
            )
            anchor = bool(config.get("sample_from_anchor"))
            window = config.get("sliding_window")
            checks |= {
                f"draft_vocab_size={kept}: {name} drafts over the whole vocabulary of {v} tokens": kept
                != v,
                f"train_head=true: {name} drafts with the target's head": bool(
                    config.get("train_head")
                ),
                f"mask_token_id=null, a learned mask: {name} takes a token's embedding": config.get(
                    "mask_token_id"
                )
                is None,
                f"sliding_window={window}: {name} has no window that shows a block's later tokens": bool(
                    window
                ),
            }
            if name == "SGLang":
                checks |= {
                    f"SGLang has {kind} since {first}": engine.before(first),
                    f"sample_from_anchor=false: SGLang reads it since {masks}": not anchor
                    and engine.before(masks)
                    and not engine.before(first),
                }
        return [reason for reason, found in checks.items() if found]

    def write(self, trained: Trained, form: str, request: ExportRequest) -> list[Path]:
        """Writes config.json, model.safetensors and, for a learned mask of its own file,
        mask_embedding.pt; GGUF as the base.
        """
        if form == "gguf":
            return super().write(trained, form, request)
        drafter = self.load(trained)
        name = request.target_files or trained.target_name
        target = load_shell(name, "float32", "cpu", weights=self.lends(drafter))
        if target.embed_scale != 1.0 and form != "transformers":
            scale = f"the target scales its embeddings by {target.embed_scale:g}, and the engines' class does not"
            raise UserError(f"this drafter cannot be written for {form}: {scale}")
        if self.lends(drafter):
            drafter.bind(target)
        config = self.engine_config(drafter, form, request)
        weights = self.engine_weights(drafter, config)
        mask = weights.pop("mask", None)
        written = write_checkpoint(request.output, config, weights, request.dtype)
        if mask is not None:
            token = own_keys(config)["mask_token_id"]
            embedding = mask.detach().to("cpu", request.dtype)
            written.append(request.output / _MASK_FILE)
            with writing(request.output):
                torch.save({"embedding": embedding, "mask_token_id": token}, written[-1])
        return written

    def engine_config(self, drafter: Block, form: str, request: ExportRequest) -> Json:
        config, fields = drafter.config, drafter.config.to_dict()
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            **{name: fields[name] for name in _SAME},
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "num_target_layers": config.target["num_layers"],
            **self.block_keys(drafter),
            "torch_dtype": dtype_name(request.dtype),
        }

    def block_keys(self, drafter: Block) -> Json:
        """Keys beside those of the layers: block, mask, target layers."""
        config, mask_token = drafter.config, drafter.config.mask_token_id
        if mask_token is None:
            spare = torch.ones(config.vocab_size, dtype=torch.bool)
            spare[drafter.kept_ids.cpu()] = False
            if spare.any():
                mask_token = int(spare.nonzero().max())
            else:
                mask_token = config.vocab_size - 1
        layers = [layer - 1 for layer in config.feature_layers]
        size = config.sliding_window
        # Without `causal` vLLM would take a windowed layer for one that hides a block's later
        # tokens.
        if size:
            window = {"use_swa": True, "swa_window_size": size, "causal": False}
        else:
            window = {}
        return {
            "block_size": config.block_size,
            "dflash_config": {"mask_token_id": mask_token, "target_layer_ids": layers, **window},
        }

    def engine_names(self, drafter: Block, config: Json) -> dict[str, str]:
        return {self.own_names.get(own, own): own for own in super().engine_names(drafter, config)}

    def engine_weights(self, drafter: Block, config: Json) -> dict[str, Tensor]:
        weights = super().engine_weights(drafter, config)
        if config["draft_vocab_size"] != config["vocab_size"] - self.extra_rows(drafter):
            kept = drafter.kept_ids.cpu()  # [d] int64
            weights |= {
                "lm_head.weight": drafter.head.weight,
                "d2t": kept - torch.arange(len(kept)),
            }
        return weights

    def lends(self, drafter: Block) -> bool:
        """Whether an export holds rows of the target's, which engines cannot pick themselves;
        others need no weights of it.
        """
        return drafter.lm_head is None and len(drafter.kept_ids) != drafter.config.vocab_size

    def extra_rows(self, drafter: Block) -> int:
        """Tokens of an export's vocabulary beyond the target's."""
        return 0

    # -- reading -----------------------------------------------------------------------------------

    def drafter_from(self, original: Block, export: Exported) -> Block:
        # also where the export lost it
        if original.mask is None:
            learned = {}
        else:
            learned = {"mask": original.mask}
        back = self.blank(
            export.config,
            {**named(export.weights), **learned},
            original.config.target,
            export.where,
        )
        if (
            back.mask is not None
        ):  # of an unbound drafter only the shapes of what it lends from the target matter
            back.embed = lambda ids: torch.zeros(*ids.shape, back.config.hidden_size)
        return back

    def drafter_weights(self, original: Block, back: Block, export: Exported) -> dict[str, Tensor]:
        return self.state(
            back,
            without_copies(named(export.weights), back, export.where),
            export.where,
        )

    def blank(self, config: Json, weights: Mapping[str, Tensor], target: Json, where: str) -> Block:
        """A drafter with the shapes and flags of a checkpoint."""
        fields = {**block_fields(config, weights, target, where), **self.more_fields(config)}
        return self.drafter_class(self.drafter_class.config_class(**fields))

    def more_fields(self, config: Json) -> Json:
        """A kind's own arguments of its config."""
        return {}

    def state(self, drafter: Block, found: dict[str, Tensor], where: str) -> dict[str, Tensor]:
        """The state dict of `drafter` from a checkpoint's tensors.

        Raises:
            UserError: a tensor is missing, unknown, of another shape or not finite.
        """
        config = drafter.config
        kept = pop_kept_ids(found, config.draft_vocab_size, config.vocab_size, where)
        theirs = {own: name for name, own in self.engine_names(drafter, {}).items()}
        shapes = {
            theirs[own]: tuple(value.shape)
            for own, value in drafter.state_dict().items()
            if own in theirs
        }
        check_names(found, shapes, where)
        check_kept_ids(kept, config.vocab_size, where)
        check_finite(found.items(), where, "get an intact copy of it")
        dtype = found["fc.weight"].dtype
        return {"kept_ids": kept, **{own: found[name].to(dtype) for own, name in theirs.items()}}

    def exported_weights(self, exported: Path) -> dict[str, Tensor]:
        weights = super().exported_weights(exported)
        path = exported / _MASK_FILE
        if path.is_file():
            mask = read_pickle(path).get("embedding")
        else:
            mask = None
        if mask is None:
            return weights
        return {**weights, "mask": mask}

    def compare(
        self,
        original: Block,
        back: Block,
        dtype: torch.dtype,
        depth: int,
        where: str,
    ) -> Json:
        """Compares a frozen head's rows with the target's; the drafts then use the same random
        head.
        """
        if back.lm_head is not None and original.lm_head is None:
            target = load_shell(
                original.config.target["name"],
                dtype="float32",
                device="cpu",
                weights=True,
            )
            if not torch.equal(
                back.lm_head.weight.to(dtype), target.head_weight[back.kept_ids].to(dtype)
            ):
                raise UserError(
                    f"{where} computes something else: lm_head.weight is not the target's; export again"
                )
            back.lm_head = None
        return super().compare(original, back, dtype, depth, where)

    def recognizes(self, config: Mapping[str, object]) -> bool:
        names = config.get("architectures")
        known = isinstance(names, list) and bool(PUBLISHED_BLOCKS & set(map(str, names)))
        return (known or config.get("speculators_model_type") in ("dflash", "dspark")) and (
            is_dspark(config) == (self.drafter_class.kind == "dspark")
        )

    def read(self, folder: Path, target: Json, allow_pickle: bool = False) -> Block:
        where = repr(str(folder))
        weights = named(read_weights(folder, allow_pickle))
        if allow_pickle and (folder / _MASK_FILE).is_file():
            weights["mask"] = read_pickle(folder / _MASK_FILE)["embedding"]
        elif (folder / _MASK_FILE).is_file():
            raise UserError(
                f"{where} has its mask in {_MASK_FILE}, a pickle; pass --allow-pickle to read it"
            )
        config = read_config(folder)
        with torch.device("meta"):
            drafter = self.blank(config, weights, target, where)
        found = without_copies(weights, drafter, where, loose=True)
        if "lm_head.weight" not in found and drafter.lm_head is not None:
            drafter.lm_head, drafter.config.train_head = None, False  # it is the target's own
        drafter.load_state_dict(self.state(drafter, found, where), strict=True, assign=True)
        return drafter.eval()


class DFlashShipping(EngineBlocks[DFlash]):
    """One checkpoint form for three engines, GGUF for llama.cpp; our own format goes to the Hub
    too.
    """

    description = "a DFlash drafter (arXiv 2602.06036), blocks of {block_size}, {layers}, {parameters} parameters"
    formats = {
        "vllm": Format("DFlash as DFlashDraftModel", ("vLLM",)),
        "sglang": Format(
            "DFlash without head and mask of its own", ("SGLang", "TensorRT-LLM, Triton")
        ),
        "transformers": Format("DFlash as MuseGlimmerAssistantModel", ("transformers",)),
        **BlockFiles.formats,
    }
    verifiable = {"vllm": "vllm", "transformers": "transformers", **BlockFiles.verifiable}
    tiny = {"mask_token_id": 300, "num_hidden_layers": 2, "block_size": 4}
    drafter_class = DFlash
    architecture = "DFlashDraftModel"
    since = ("0.5.11", "0.5.11")
    reads = "DFlash drafters (DFlashDraftModel, speculators' form, DeepSpec's)"

    def unsupported(
        self,
        trained: Trained,
        form: str,
        engine: EngineRelease | None = None,
    ) -> list[str]:
        found = super().unsupported(trained, form, engine)
        anchor = trained.config.get("sample_from_anchor")
        lacks = f"sample_from_anchor=true: {(engine or engine_of(form)).name} predicts at masks only, for kind dflash"
        if form == "transformers" and (engine or engine_of(form)).before(_TRANSFORMERS):
            found = [*found, f"transformers has DFlash since {_TRANSFORMERS}"]
        if anchor and form != "gguf" and form in self.formats:
            return [*found, lacks]
        return found

    def engine_config(self, drafter: DFlash, form: str, request: ExportRequest) -> Json:
        described = super().engine_config(drafter, form, request)
        if form != "transformers":
            return described
        own = {
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": _GLIMMER,
            **described["dflash_config"],
        }
        own |= dict.fromkeys(
            ("bos_token_id", "eos_token_id", "pad_token_id")
        )  # not the family's defaults
        return {
            **described,
            **own,
            "layer_types": ["full_attention"] * drafter.config.num_hidden_layers,
        }

    def engine_names(self, drafter: DFlash, config: Json) -> dict[str, str]:
        names = super().engine_names(drafter, config)
        if config.get("model_type") != _GLIMMER:
            return names
        encoder = {
            "fc.weight": "encoder.fc.weight",
            "hidden_norm.weight": "encoder.output_norm_enc.weight",
        }
        return {encoder.get(name, name): own for name, own in names.items()}

    def withheld(self, trained: Trained, form: str) -> str:
        learned = form == "vllm" and trained.config.get("mask_token_id") is None
        reason = f"vLLM reads a learned mask from {_MASK_FILE} alone, and pickles are not published"
        if learned:
            return (
                f"{reason}; users of the repository write it by drafttrain export --format {form}"
            )
        return ""

    def drafter_from(self, original: DFlash, export: Exported) -> DFlash:
        return super().drafter_from(original, export._replace(weights=_flat(export.weights)))

    def drafter_weights(
        self,
        original: DFlash,
        back: DFlash,
        export: Exported,
    ) -> dict[str, Tensor]:
        return super().drafter_weights(
            original,
            back,
            export._replace(weights=_flat(export.weights)),
        )

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
                "speculative-num-draft-tokens": depth
                + 1,  # its block, the last committed token included
            },
            "TensorRT-LLM, Triton": {"decoding_type": "DFlash", "max_draft_len": depth},
            "transformers": {"speculation_type": "dflash"},
        }


def _flat(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of transformers' form by the other engines' names."""
    names = {
        name: name.removeprefix("encoder.").replace("output_norm_enc", "hidden_norm")
        for name in weights
    }
    return {names[name]: value for name, value in weights.items()}


SHIPPING = DFlashShipping()
