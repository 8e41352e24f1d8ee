"""DFlash drafters as engines load them (`DFlashDraftModel`), as transformers does, and as GGUF.

config.json   a Qwen3 config of the layers, block_size, dflash_config {mask_token_id, target_layer_ids: ours - 1}
weights       fc, hidden_norm, norm, layers.{i}.* as ours; with a pruned vocabulary or a trained head also lm_head and d2t
mask          a learned one is mask_embedding.pt, the only form that vLLM reads it in, by torch.load(weights_only=True); it
              stands for one token id, for which a token that the drafter does not keep is taken. A pickle is not
              published: the Hub gets our own format, from which `drafttrain export` writes this one

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

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from drafttrain.drafters.common.block import BlockDrafter
from drafttrain.drafters.common.configs import BlockConfig
from drafttrain.drafters.common.markov import MarkovBlock
from drafttrain.drafters.dflash.block_reading import (
    FIXED_KEYS,
    PUBLISHED_KEYS,
    block_fields,
    block_kind,
    foreign_block,
    named,
    own_keys,
    without_copies,
)
from drafttrain.drafters.dflash.model import DFlash
from drafttrain.drafters.eagle3.export import speculators_proposal
from drafttrain.drafters.form import Form, Weight, kept_tables
from drafttrain.drafters.gguf_heads import GgufHeads
from drafttrain.drafters.shipping import EngineSettings, Exported, ExportRequest, Format, Trained
from drafttrain.errors import UserError
from drafttrain.files import Json, writing
from drafttrain.formats.engines import EngineRelease
from drafttrain.formats.weights import (
    architectures_in,
    dtype_name,
    read_pickle,
    write_checkpoint,
)
from drafttrain.target import Target, load_shell

_MASK_FILE = "mask_embedding.pt"
# The release that was read; its one DFlash class is a family's own, and general.
_TRANSFORMERS = "5.23"
_GLIMMER = "muse_glimmer_assistant"
# Engines whose classes have windows that show a block's later tokens, and sinks.
_WINDOWS = ("vLLM", "SGLang", "llama.cpp", "speculators")
_SINKS = ("vLLM", "SGLang")
_SGLANG = "0.5.20"  # its first release with all of them
# Its names of what feeds the layers.
_ENCODER = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}
# Architectures of published block drafters, whose keys tell their kinds (`block_kind`).
PUBLISHED_BLOCKS = {
    "DFlashDraftModel", "QwenDFlashDraftModel", "Qwen3DFlashDraftModel", "Qwen3DSparkModel", "DSparkDraftModel",
    "LingDSparkModel", "DominoDraftModel",
}  # fmt: skip
_SAME = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "rope_parameters", "max_position_embeddings", "vocab_size", "draft_vocab_size",
)  # fmt: skip


Block = TypeVar("Block", bound=BlockDrafter)
Markov = TypeVar("Markov", bound=MarkovBlock)


class BlockFiles(GgufHeads[Block]):
    """Block drafters in llama.cpp's dflash model.

    Its target layers are those whose input it reads, as ours are.
    """

    formats = {"gguf": Format("a block drafter as GGUF file", ("llama.cpp",))}
    verifiable: Mapping[str, str] = {"llama.cpp": "gguf"}
    in_root: Sequence[str] = ("gguf",)
    gguf_arch = "dflash"
    gguf_layers = "QWEN3"
    gguf_names = {"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight"}

    def gguf_keys(self, drafter: Block) -> Json:
        config = drafter.config
        keys: Json = {
            "target_layers": list(config.feature_layers),
            "target_hidden_size": config.hidden_size,
            "block_size": config.block_size,
            "attention.causal": False,
            "sample_from_anchor": config.sample_from_anchor,
        }
        if config.sliding_window:
            keys["attention.sliding_window"] = config.sliding_window
            keys["attention.sliding_window_pattern"] = [window > 0 for window in config.windows]
        return keys

    def checked_depth(self, config: Json) -> int:
        if config.get("sample_from_anchor"):
            return config["block_size"]
        return config["block_size"] - 1

    def block_depth(self, trained: Trained) -> int:
        return self.checked_depth(trained.config)

    def options(self, trained: Trained) -> EngineSettings:
        return {"llama.cpp": {"spec-type": f"draft-{trained.kind}"}}


class EngineBlocks(BlockFiles[Block]):
    """Block drafters in the form that vLLM and SGLang load, which published drafters have too.

    Attributes:
        architecture: the engines' name of the kind's class.
        own_names: the form's name of a tensor of ours, where it differs.
        speculators_class: speculators' name of the class. causal_in: where causal blocks were tried.
        since: SGLang's first release that drafts with the kind, and the first that predicts at the
            masks alone, as ours do by default.
        mlx_has_head: mlx-dspark reads the drafter's own embedding, head and map of tokens.
    """

    tiny: Mapping[str, object] = {"mask_token_id": 300, "num_hidden_layers": 2, "block_size": 4}
    published_keys: Collection[str] = PUBLISHED_KEYS
    fixed_keys = FIXED_KEYS
    architecture = ""
    own_names: Mapping[str, str] = {}
    since = ("", "")
    mlx_has_head = False
    speculators_class = ""
    causal_in: tuple[str, ...] = ("speculators",)

    def lacking(self, trained: Trained, form: str, engine: EngineRelease) -> list[str]:
        name = engine.name
        config = trained.config
        found = self._lacking_attention(config, engine)
        if form == "gguf":
            return found + super().lacking(trained, form, engine)
        if form == "speculators":
            return found + self._lacking_in_speculators(config)
        layers = list(config.get("feature_layers", ()))
        provides = f"feature_layers={layers}: {name} provides"
        last = trained.target.get("num_layers", 0)
        if 0 in layers or last in layers:
            found.append(f"{provides} the inputs of layers 1 to {last - 1} only")
        if layers != sorted(layers):
            found.append(f"{provides} features in ascending order")
        if form == "vllm" and (name != "MLX" or self.mlx_has_head):
            return found

        # The other engines draw from the target's embedding and head alone.
        kept = config.get("draft_vocab_size")
        v = config.get("vocab_size")
        if kept != v:
            found.append(
                f"draft_vocab_size={kept}: {name} drafts over the whole vocabulary of {v} tokens"
            )
        if config.get("train_head"):
            found.append(f"train_head=true: {name} drafts with the target's head")
        if config.get("mask_token_id") is None:
            found.append(f"mask_token_id=null, a learned mask: {name} takes a token's embedding")
        if name == "SGLang":
            first, masks = self.since
            if engine.before(first):
                found.append(f"SGLang has {trained.kind} since {first}")
            elif engine.before(masks) and not config.get("sample_from_anchor"):
                found.append(f"sample_from_anchor=false: SGLang reads it since {masks}")
        return found

    def _lacking_attention(self, config: Json, engine: EngineRelease) -> list[str]:
        """Directions, windows and sinks that an engine's class of this kind does not compute."""
        old = engine.name == "SGLang" and engine.before(_SGLANG)
        found = []
        for key, engines, rule in (
            ("causal", self.causal_in, "blocks whose tokens see earlier ones alone"),
            ("sliding_window", _WINDOWS, "windows that show a block's later tokens"),
            ("attention_sink_bias", _SINKS, "sinks"),
        ):
            value = config.get(key)
            if value and (old or engine.name not in engines):
                spelled = str(value).lower()
                found.append(
                    f"{key}={spelled}: {rule} were not found in {engine.name} {engine.release}"
                )
        return found

    def _lacking_in_speculators(self, config: Json) -> list[str]:
        """What speculators' classes do not compute."""
        found = []
        whole = config.get("draft_vocab_size") == config.get("vocab_size")
        if config.get("mask_token_id") is None:
            found.append(
                "mask_token_id=null, a learned mask: speculators takes a token's embedding"
            )
        if config.get("train_head") and whole:
            found.append("train_head=true: speculators takes the target's head for all tokens")
        windowed = config.get("sliding_window") and not config.get("layer_types")
        if config.get("causal") is True and not windowed:
            found.append(
                "causal=true in layers without a window: speculators hides later tokens in windows only"
            )
        return found

    def write(self, trained: Trained, form: str, request: ExportRequest) -> list[Path]:
        """Writes config.json, model.safetensors and perhaps mask_embedding.pt; GGUF as the base.

        A learned mask is in mask_embedding.pt unless the kind has another place for it.
        """
        if form == "gguf":
            return super().write(trained, form, request)
        drafter = self.load(trained)
        name = request.target_of(trained)
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
            path = request.output / _MASK_FILE
            embedding = mask.detach().to("cpu", request.dtype)
            token = own_keys(config)["mask_token_id"]
            with writing(request.output):
                torch.save({"embedding": embedding, "mask_token_id": token}, path)
            written.append(path)
        return written

    def engine_config(self, drafter: Block, form: str, request: ExportRequest) -> Json:
        fields = drafter.config.to_dict()
        keys: Json = {"architectures": [self.architecture], "model_type": "qwen3"}
        for name in _SAME:
            keys[name] = fields[name]
        keys["hidden_act"] = "silu"
        keys["attention_bias"] = False
        keys["tie_word_embeddings"] = False
        if form == "speculators":
            return self._speculators_config(drafter, keys, request)
        keys["num_target_layers"] = drafter.config.target["num_layers"]
        keys |= attention_keys(drafter.config)
        keys |= self.block_keys(drafter)
        keys["torch_dtype"] = dtype_name(request.dtype)
        return keys

    def _speculators_config(self, drafter: Block, layer: Json, request: ExportRequest) -> Json:
        """The config in speculators' form. layer: keys of the layers."""
        config = drafter.config
        window = config.sliding_window
        del layer["architectures"]
        layer["num_hidden_layers"] = config.num_hidden_layers
        layer["layer_types"] = config.each_type
        layer["use_sliding_window"] = bool(window)
        layer["sliding_window"] = window or None
        algorithm = drafter.kind
        return {
            "architectures": [self.speculators_class],
            "speculators_model_type": algorithm,
            "transformer_layer_config": layer,
            "draft_vocab_size": layer.pop("draft_vocab_size"),
            "block_size": config.block_size,
            "aux_hidden_state_layer_ids": list(config.feature_layers),
            "mask_token_id": config.mask_token_id,
            "sliding_window_non_causal": not config.causal,
            "sample_from_anchor": config.sample_from_anchor,
            **self.speculators_keys(drafter),
            "speculators_config": speculators_proposal(algorithm, config.depth, request),
            "torch_dtype": dtype_name(request.dtype),
        }

    def speculators_keys(self, drafter: Block) -> Json:
        """A kind's own keys in speculators' form."""
        return {}

    def block_keys(self, drafter: Block) -> Json:
        """Keys beside those of the layers: block, mask, target layers."""
        config = drafter.config
        mask_token = config.mask_token_id
        if (
            mask_token is None
        ):  # a learned mask stands for a token that is not kept, if there is one
            spare = torch.ones(config.vocab_size, dtype=torch.bool)
            spare[drafter.kept_ids.cpu()] = False
            mask_token = config.vocab_size - 1
            if spare.any():
                mask_token = int(spare.nonzero().max())
        own: Json = {
            "mask_token_id": mask_token,
            "target_layer_ids": [layer - 1 for layer in config.feature_layers],
        }
        own |= attention_keys(config)
        return {"block_size": config.block_size, "dflash_config": own}

    def form(self, drafter: Block, config: Json) -> Form:
        form: Form = {}
        for own, weight in super().form(drafter, config).items():
            form[self.own_names.get(own, own)] = weight
        kept = drafter.config.draft_vocab_size
        trainer = "speculators_model_type" in config
        tables = kept_tables(kept, drafter.config.vocab_size, mask=trainer)
        if tables and drafter.lm_head is None:
            tables["lm_head.weight"] = drafter.head.weight
        return form | tables

    def lends(self, drafter: Block) -> bool:
        """Whether an export holds rows of the target's, which engines cannot pick themselves.

        Other exports need no weights of the target.
        """
        return drafter.lm_head is None and len(drafter.kept_ids) != drafter.config.vocab_size

    # -- reading -----------------------------------------------------------------------------------

    def drafter_from(self, original: Block, export: Exported) -> Block:
        weights = dict(export.weights)
        if original.mask is not None:  # also if the export lost it
            weights["mask"] = original.mask
        fields = block_fields(export._replace(weights=weights), original.config.target)
        fields |= self.more_fields(original, export)
        back = self.drafter_class(self.drafter_class.config_class(**fields))
        # Of what an unbound drafter takes from the target, only the shapes matter.
        if back.mask is not None:
            back.embed = lambda ids: torch.zeros(*ids.shape, back.config.hidden_size)
        return back

    def exported_weights(self, exported: Path) -> dict[str, Tensor]:
        return super().exported_weights(exported) | _stored_mask(exported)

    def compare(
        self,
        original: Block,
        back: Block,
        dtype: torch.dtype,
        depth: int,
        where: str,
    ) -> Json:
        """As the base class; a frozen head's rows are compared with the target's.

        The drafts then use the same random head.
        """
        if back.lm_head is not None and original.lm_head is None:
            name = original.config.target["name"]
            target = load_shell(
                name,
                dtype="float32",
                device="cpu",
                weights=True,
            )
            rows = target.head_weight[back.kept_ids].to(dtype)  # [d, h]
            if not torch.equal(back.lm_head.weight.to(dtype), rows):
                raise UserError(
                    f"{where} computes something else: lm_head.weight is not the target's; export again"
                )
            back.lm_head = None
        return super().compare(original, back, dtype, depth, where)

    def recognizes(self, config: Mapping[str, object]) -> bool:
        known = config.get("speculators_model_type") in ("dflash", "dspark")
        if PUBLISHED_BLOCKS.intersection(architectures_in(config)):
            known = True
        return known and block_kind(config) == self.drafter_class.kind

    def foreign(self, checkpoint: Exported) -> list[str]:
        return foreign_block(checkpoint)

    def published(self, checkpoint: Exported, target: Json) -> Exported:
        weights = without_copies(named(checkpoint.weights), checkpoint, target)
        return checkpoint._replace(weights=weights)

    def published_weights(self, folder: Path, allow_pickle: bool) -> dict[str, Tensor]:
        weights = super().published_weights(folder, allow_pickle)
        if not allow_pickle and (folder / _MASK_FILE).is_file():
            raise UserError(
                f"{str(folder)!r} has its mask in {_MASK_FILE}, a pickle; pass --allow-pickle to read it"
            )
        return weights | _stored_mask(folder)


class MarkovFiles(EngineBlocks[Markov]):
    """Blocks that are corrected by the token before: their files have a row of it per token."""

    needs_gpu = ("vLLM",)
    verifiable = {"mlx": "vllm", **BlockFiles.verifiable}
    tiny = {**EngineBlocks.tiny, "markov_rank": 16}

    def form(self, drafter: Markov, config: Json) -> Form:
        form = super().form(drafter, config)
        rows = drafter.file_rows()
        stored = len(drafter.markov_in.weight)
        form[self.own_names["markov_in.weight"]] = Weight(
            "markov_in.weight",
            there=lambda table: table[rows],
            back=lambda table: table[:stored],
        )
        return form

    def gguf_form(self, drafter: Markov, target: Target) -> Form:
        rows = drafter.file_rows()

        def back(table: Tensor) -> Tensor:
            # [d + 1, r]; the last row may stand for no token, and is then not in the file
            own = drafter.markov_in.weight.detach().float().clone()
            own[rows] = table
            return own

        form = super().gguf_form(drafter, target)
        form[self.gguf_names["markov_in.weight"]] = Weight(
            "markov_in.weight", there=lambda table: table[rows], back=back
        )
        return form


def _stored_mask(folder: Path) -> dict[str, Tensor]:
    """A learned mask, by our name of it; empty where a folder has none."""
    path = folder / _MASK_FILE
    if not path.is_file():
        return {}
    found = read_pickle(path)
    if "embedding" not in found:
        raise UserError(f"{str(path)!r} has no embedding; export again, or get an intact copy")
    return {"mask": found["embedding"]}


class DFlashShipping(EngineBlocks[DFlash]):
    """One checkpoint form for three engines, GGUF for llama.cpp, our own format for the Hub."""

    description = "a DFlash drafter (arXiv 2602.06036), blocks of {block_size}, {layers}, {parameters} parameters"
    formats = {
        "vllm": Format("DFlash as DFlashDraftModel", ("vLLM",)),
        "sglang": Format(
            "DFlash without head and mask of its own", ("SGLang", "TensorRT-LLM, Triton")
        ),
        "transformers": Format("DFlash as MuseGlimmerAssistantModel", ("transformers",)),
        "speculators": Format("DFlash in speculators' form", ("speculators",)),
        **BlockFiles.formats,
    }
    verifiable = {
        "vllm": "vllm",
        "transformers": "transformers",
        "mlx": "vllm",
        **BlockFiles.verifiable,
    }
    drafter_class = DFlash
    speculators_class = "DFlashSpeculator"
    causal_in = ("vLLM", "SGLang", "speculators")
    architecture = "DFlashDraftModel"
    since = ("0.5.11", "0.5.11")
    reads = "DFlash drafters (DFlashDraftModel, speculators' form, DeepSpec's)"

    def lacking(self, trained: Trained, form: str, engine: EngineRelease) -> list[str]:
        found = super().lacking(trained, form, engine)
        if form == "transformers" and engine.before(_TRANSFORMERS):
            found.append(f"transformers has DFlash since {_TRANSFORMERS}")
        anchor = trained.config.get("sample_from_anchor")
        if anchor and form not in ("gguf", "speculators"):
            found.append(
                f"sample_from_anchor=true: {engine.name} predicts at masks only, for kind dflash"
            )
        return found

    def engine_config(self, drafter: DFlash, form: str, request: ExportRequest) -> Json:
        described = super().engine_config(drafter, form, request)
        if form != "transformers":
            return described
        described["architectures"] = ["MuseGlimmerAssistantModel"]
        described["model_type"] = _GLIMMER
        described |= described["dflash_config"]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            described[name] = None  # not the family's defaults
        described["layer_types"] = drafter.config.each_type
        return described

    def form(self, drafter: DFlash, config: Json) -> Form:
        form = super().form(drafter, config)
        if config.get("model_type") != _GLIMMER:
            return form
        return {_ENCODER.get(name, name): weight for name, weight in form.items()}

    def withheld(self, trained: Trained, form: str) -> str:
        if form != "vllm" or trained.config.get("mask_token_id") is not None:
            return ""
        return (
            f"vLLM reads a learned mask from {_MASK_FILE} alone, and pickles are not published; users of the repository "
            f"write it by drafttrain export --format {form}"
        )

    def options(self, trained: Trained) -> EngineSettings:
        depth = self.block_depth(trained)
        return {
            **super().options(trained),
            **block_options("dflash", "DFLASH", depth),
            "TensorRT-LLM, Triton": {"decoding_type": "DFlash", "max_draft_len": depth},
            "transformers": {"speculation_type": "dflash"},
        }


def attention_keys(config: BlockConfig) -> Json:
    """Keys of windows, directions and sinks, none where all are the default.

    They stand at the top and in dflash_config: engines look for some at one place.
    """
    keys: Json = {}
    window = config.sliding_window
    if window:
        keys["layer_types"] = config.each_type
        keys["use_sliding_window"] = True  # else transformers drops the window
        keys["sliding_window"] = window
        keys["swa_window_size"] = window
    # Engines take a layer with a window for a causal one, and others not, unless a key says so.
    if config.causal != "sliding" and (config.causal or window):
        keys["is_causal"] = config.causal
        keys["causal"] = config.causal
    if config.attention_sink_bias:
        keys["attention_sink_bias"] = True
    return keys


# mlx-dspark's functions, by its mode.
_MLX = {
    "dflash": {"load": "load_dflash", "generate": "dflash_generate", "binds": True},
    "dspark": {"load": "load_drafter", "generate": "speculative_generate", "binds": False},
}


def block_options(method: str, algorithm: str, depth: int) -> dict[str, Mapping[str, object]]:
    """Settings of engines for blocks that predict `depth` tokens, whatever is asked."""
    return {
        "vLLM": vllm_block(method, depth),
        "MLX": {"program": "mlx-dspark", "mode": method, **_MLX[method]},
        "SGLang": sglang_block(algorithm, depth),
    }


def vllm_block(method: str, depth: int) -> Mapping[str, object]:
    """As `block_options`, of vLLM alone."""
    return {"method": method, "num_speculative_tokens": depth}


def sglang_block(algorithm: str, depth: int) -> Mapping[str, object]:
    """As `block_options`, of SGLang alone."""
    return {
        "speculative-algorithm": algorithm,
        "speculative-num-steps": None,
        "speculative-eagle-topk": None,
        # its block, the last committed token included
        "speculative-num-draft-tokens": depth + 1,
    }


SHIPPING = DFlashShipping()
