"""Draft models: ordinary causal language models, which engines load as they are or as GGUF."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from drafttrain.drafters.draft_model.model import DraftModel
from drafttrain.drafters.draft_model.start import differing_ids
from drafttrain.drafters.registry import META_FILE
from drafttrain.drafters.shipping import (
    GGUF_NAME,
    TOKENIZERS,
    EngineSettings,
    ExportRequest,
    Format,
    Shipping,
    Trained,
)
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.engines import ENGINE_FORMATS, EngineRelease
from drafttrain.formats.public_names import write_clean_json
from drafttrain.formats.weights import dtype_name, read_config
from drafttrain.formats.write_gguf import write_gguf
from drafttrain.target import Target, load_shell, resolve_target
from drafttrain.target.loading import load_language_model

_PLAIN = Format(
    "a draft model as plain HF checkpoint",
    ("transformers", "vLLM", "SGLang", "TensorRT-LLM, Triton"),
)
_AGAIN = "train it again, or use the folder as training wrote it"
# The release whose use_heterogeneous_vocab drafts among the tokens that both vocabularies have.
_VLLM_OTHER = "0.32.0"
_LLAMA_APART = 128  # tokens by which llama.cpp lets the sizes of vocabularies differ
_TOLERANCE = 2e-2  # of the largest log-probability: two loaders of one file agree up to rounding


class DraftModelShipping(Shipping[DraftModel]):
    """One checkpoint for every engine but llama.cpp, written without our own keys."""

    description = "a small language model of {parameters} parameters with the same tokenizer, trained to predict what it writes"
    formats = dict.fromkeys(ENGINE_FORMATS, _PLAIN) | {
        "gguf": Format("a draft model as GGUF file", ("llama.cpp",))
    }
    verifiable = {
        "vllm": "vllm",
        "transformers": "transformers",
        "llama.cpp": "gguf",
    }
    in_root = ENGINE_FORMATS
    tiny = {"layers": (0, 1, 6, 7)}
    serving = {
        "vLLM": {"method": "draft_model"},
        "SGLang": {"speculative-algorithm": "STANDALONE"},
        "TensorRT-LLM, Triton": {"decoding_type": "DraftTarget"},
        "llama.cpp": {"spec-type": "draft-simple"},
        "transformers": {},
    }

    def lacking(self, trained: Trained, form: str, engine: EngineRelease) -> list[str]:
        """What an engine does not support: vocabularies of other sizes, or of other ids.

        Of other sizes, the common ids are the same tokens (`differing_ids`). Sources: vLLM 0.32
        config/speculative.py; SGLang srt/speculative/standalone_worker_v2.py; llama.cpp b11549
        common/speculative.cpp; TensorRT-LLM's features/speculative-decoding.
        """
        theirs, own = _sizes(trained)
        other = _other_vocabulary(trained)
        if theirs == own and not other:
            return []
        found = []
        differs = f"vocab_size={own} differs from the target's {theirs}"
        if other:
            differs = "the draft model has another vocabulary than its target"
        if engine.name == "vLLM":
            if engine.before(_VLLM_OTHER):
                found.append(
                    f"{differs}: vLLM {_VLLM_OTHER} takes it, earlier releases want one size"
                )
        elif engine.name == "transformers":
            pass  # it compares texts
        elif other:
            found.append(f"{differs}: {engine.name} verifies drafts by token id")
        elif engine.name == "SGLang":
            found.append(
                f"{differs}: SGLang stops at it since 0.5.15, and before it commits tokens of the wrong text"
            )
        elif engine.name != "llama.cpp":
            found.append(f"{differs}: the engine verifies drafts by token id")
        elif abs(own - theirs) > _LLAMA_APART:
            found.append(
                f"{differs}: llama.cpp b11549 takes at most {_LLAMA_APART} tokens more or less"
            )
        return found

    def options(self, trained: Trained) -> EngineSettings:
        theirs, own = _sizes(trained)
        if theirs == own and not _other_vocabulary(trained):
            return self.serving
        return {
            **self.serving,
            "vLLM": {**self.serving["vLLM"], "use_heterogeneous_vocab": True},
            "transformers": {TOKENIZERS: True},
        }

    def shares_vocabulary(self, trained: Trained, target: Target) -> bool:
        drafter = trained.load()
        try:
            drafter.bind(target)
        except UserError:
            return False
        return not drafter.fit()

    def write(self, trained: Trained, form: str, request: ExportRequest) -> list[Path]:
        """Loads the model once, to prove that its checkpoint is complete, and writes it."""
        tokenizer = _tokenizer_folder(trained, request.target_files)
        model = _load_complete(trained.folder, request.dtype)
        if form == "gguf":
            if tokenizer is None:
                raise UserError(
                    "format='gguf' needs a tokenizer, and the drafter has none; pass --target"
                )
            path = request.output / GGUF_NAME
            return [write_gguf(trained.folder, path, dtype_name(request.dtype), tokenizer)]
        model.save_pretrained(request.output)
        if tokenizer is not None:
            AutoTokenizer.from_pretrained(tokenizer).save_pretrained(request.output)
        return sorted(path for path in request.output.iterdir() if path.is_file())

    @torch.no_grad()
    def check(self, trained: Trained, exported: Path) -> Json:
        """Compares the draft model and its export on one row of tokens.

        Returns:
            max_log_prob_difference, largest_log_prob, same_argmax: share of positions with the same
                likeliest token.

        Raises:
            UserError: logits that differ beyond rounding.
        """
        folder = str(trained.folder)
        where = repr(str(exported))
        ours = load_language_model(folder, f"drafter={folder!r}", _AGAIN, dtype=torch.float32)
        form: Json = {"dtype": torch.float32}
        if (exported / GGUF_NAME).is_file():
            form["gguf_file"] = GGUF_NAME
        theirs = load_language_model(str(exported), where, "export again", **form)
        size = ours.config.vocab_size
        if theirs.config.vocab_size != size:
            raise UserError(
                f"{where} has vocab_size={theirs.config.vocab_size}, the draft model {size}; pass its own export"
            )
        ids = torch.arange(1, 33)[None] * 97 % size  # [1, 32] int64
        left = ours.eval()(ids).logits.log_softmax(-1)  # [1, 32, v]
        right = theirs.eval()(ids).logits.log_softmax(-1)
        scale = left.abs().max().item()
        worst = (left - right).abs().max().item()
        if not worst <= _TOLERANCE * scale:
            raise UserError(
                f"{where} computes other logits than the draft model (log-probabilities differ by {worst:.3g} of "
                f"{scale:.3g}); export again, and report this if it stays"
            )
        agree = (left.argmax(-1) == right.argmax(-1)).float().mean().item()
        return {
            "max_log_prob_difference": worst,
            "largest_log_prob": scale,
            "same_argmax": agree,
        }

    def publish(self, trained: Trained, request: ExportRequest) -> list[tuple[str, str]]:
        self.write(trained, "transformers", request)
        described = read_config(trained.folder, META_FILE, missing={})
        described = {**described, "drafter_kind": trained.kind}
        described["target"] = {**trained.target, "name": request.target}
        write_clean_json(request.output / META_FILE, described)
        meta = "kind, target and beginning of the draft model, for drafttrain"
        weights = "the draft model, for transformers, vLLM, SGLang, TensorRT-LLM and drafttrain"
        files = [(META_FILE, meta), ("model.safetensors", weights)]
        return files + self.publish_gguf(trained, request)


def _other_vocabulary(trained: Trained) -> bool:
    """Whether the draft model's ids mean other tokens than its target's.

    Training records it; without a record both tokenizers are compared.
    """
    recorded = read_config(trained.folder, META_FILE, missing={})
    if recorded.get("target") or not trained.target or _tokenizer_folder(trained, "") is None:
        return bool(recorded.get("other_vocabulary"))
    tokenizer = AutoTokenizer.from_pretrained(trained.folder)
    return bool(differing_ids(tokenizer, load_shell(trained.target_name)))


def _sizes(trained: Trained) -> tuple[int, int]:
    """Tokens of the target's vocabulary and of the draft model's.

    They are the same where no target is recorded.
    """
    own = trained.config["vocab_size"]
    return trained.target.get("vocab_size") or own, own


def _load_complete(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A language model without our own config keys.

    Raises:
        UserError: its weights and config disagree.
    """
    model = load_language_model(str(folder), f"drafter={str(folder)!r}", _AGAIN, dtype=dtype)
    for key in ("drafter_kind", "target", "loss"):
        model.config.__dict__.pop(key, None)
    return model


def _tokenizer_folder(trained: Trained, target: str) -> Path | None:
    """The folder of a draft model's tokenizer, its own or its target's; None if neither has one."""
    if (trained.folder / "tokenizer_config.json").is_file():
        return trained.folder
    try:
        if target and load_shell(target):
            return Path(resolve_target(target))
        return None
    except UserError:
        return None


SHIPPING = DraftModelShipping()
