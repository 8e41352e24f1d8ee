"""Draft models: ordinary causal language models, which engines load as they are, and llama.cpp as a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from drafttrain.drafters.draft_model.model import DraftModel
from drafttrain.drafters.registry import META_FILE
from drafttrain.drafters.shipping import (
    FORMATS,
    GGUF_NAME,
    TRANSLATES,
    EngineRelease,
    ExportRequest,
    Format,
    Shipping,
    Trained,
    engine_of,
)
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.public_names import write_clean_json
from drafttrain.formats.weights import dtype_name, read_config
from drafttrain.formats.write_gguf import write_gguf
from drafttrain.target import Target, load_shell, resolve_target
from drafttrain.target.loading import load_language_model
from drafttrain.target.target import tokenizer_fingerprint

_PLAIN = Format("a draft model as plain HF checkpoint", ("transformers", "vLLM", "SGLang", "TensorRT-LLM, Triton"))
_AGAIN = "train it again, or use the folder as training wrote it"
_VLLM_TRANSLATES = "0.32"  # the release whose sources have use_heterogeneous_vocab, drafting with shared tokens only
_TOLERANCE = 2e-2  # of the largest log-probability: two loaders of one file agree up to rounding


class DraftModelShipping(Shipping[DraftModel]):
    """One checkpoint for every engine but llama.cpp, written without our own keys."""

    description = (
        "a small language model of {parameters} parameters with the same tokenizer, trained to predict what it writes"
    )
    formats = dict.fromkeys(FORMATS, _PLAIN) | {"gguf": Format("a draft model as GGUF file", ("llama.cpp",))}
    verifiable = {"vllm": "vllm", "transformers": "transformers", "llama.cpp": "gguf"}
    in_root = FORMATS
    tiny = {"layers": (0, 1, 6, 7)}
    serving = {
        "vLLM": {"method": "draft_model"},
        "SGLang": {"speculative-algorithm": "STANDALONE"},
        "TensorRT-LLM, Triton": {"decoding_type": "DraftTarget"},
        "llama.cpp": {"spec-type": "draft-simple"},
        "transformers": {},
    }

    def unsupported(self, trained: Trained, form: str, engine: EngineRelease | None = None) -> list[str]:
        found, engine = super().unsupported(trained, form, engine), engine or engine_of(form)
        recorded, own = trained.target.get("vocab_size"), trained.config["vocab_size"]
        if found or form not in ("vllm", "sglang") or not recorded or recorded == own:
            return found
        differs = f"vocab_size={own} differs from the target's {recorded}, and"
        if engine.name != "vLLM" or engine.before(_VLLM_TRANSLATES):
            since = f" before {_VLLM_TRANSLATES}" if engine.name == "vLLM" else ""
            return [f"{differs} {engine.name}{since} verifies drafts by token id"]
        has = (trained.folder / "tokenizer_config.json").is_file()
        return [] if has else [f"{differs} {engine.name} translates by the draft model's own tokenizer, which it lacks"]

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, object]]:
        recorded, own = trained.target, trained.config["vocab_size"]
        same = own == recorded.get("vocab_size", own)
        if same and recorded.get("tokenizer") and (trained.folder / "tokenizer_config.json").is_file():
            same = tokenizer_fingerprint(AutoTokenizer.from_pretrained(trained.folder)) == recorded["tokenizer"]
        if same:
            return self.serving
        by_text = (
            {TRANSLATES: True} if own != recorded.get("vocab_size", own) else {}
        )  # which it requires, or else refuses
        vllm = {"method": "draft_model", "use_heterogeneous_vocab": True}
        return {**self.serving, "vLLM": vllm, "transformers": by_text}

    def shares_vocabulary(self, trained: Trained, target: Target) -> bool:
        try:
            trained.load().bind(target)
        except UserError:
            return False
        return True

    def write(self, trained: Trained, form: str, request: ExportRequest) -> list[Path]:
        """Loads the model once, to prove that its checkpoint is complete, and writes it."""
        tokenizer = _tokenizer_folder(trained, request.target_files)
        model = _load_complete(trained.folder, request.dtype)
        if form == "gguf":
            if tokenizer is None:
                raise UserError("format='gguf' needs a tokenizer, and the drafter has none; pass --target")
            return [write_gguf(trained.folder, request.output / GGUF_NAME, dtype_name(request.dtype), tokenizer)]
        model.save_pretrained(request.output)
        if tokenizer is not None:
            AutoTokenizer.from_pretrained(tokenizer).save_pretrained(request.output)
        return sorted(path for path in request.output.iterdir() if path.is_file())

    @torch.no_grad()
    def check(self, trained: Trained, exported: Path) -> Json:
        """Compares the draft model and its export, a GGUF file or a plain checkpoint, on one row of tokens.

        Returns:
            max_log_prob_difference, largest_log_prob, same_argmax: share of positions with the same likeliest token.

        Raises:
            UserError: logits that differ beyond rounding.
        """
        ours = load_language_model(str(trained.folder), f"drafter={str(trained.folder)!r}", _AGAIN, dtype=torch.float32)
        form: Json = {"gguf_file": GGUF_NAME} if (exported / GGUF_NAME).is_file() else {}
        theirs = load_language_model(str(exported), repr(str(exported)), "export again", dtype=torch.float32, **form)
        if theirs.config.vocab_size != ours.config.vocab_size:
            raise UserError(
                f"{str(exported)!r} has vocab_size={theirs.config.vocab_size}, the draft model {ours.config.vocab_size}; "
                "pass its own export"
            )
        ids = torch.arange(1, 33)[None] * 97 % ours.config.vocab_size  # [1, 32] int64
        left, right = (model.eval()(ids).logits.log_softmax(-1) for model in (ours, theirs))  # [1, 32, v]
        scale, worst = left.abs().max().item(), (left - right).abs().max().item()
        if not worst <= _TOLERANCE * scale:
            raise UserError(
                f"{str(exported)!r} computes other logits than the draft model (log-probabilities differ by {worst:.3g} of "
                f"{scale:.3g}); export again, and report this if it stays"
            )
        agree = (left.argmax(-1) == right.argmax(-1)).float().mean().item()
        return {"max_log_prob_difference": worst, "largest_log_prob": scale, "same_argmax": agree}

    def publish(self, trained: Trained, request: ExportRequest) -> list[tuple[str, str]]:
        self.write(trained, "transformers", request)
        described = {
            **read_config(trained.folder, META_FILE, missing={}),
            "drafter_kind": trained.kind,
            "target": {**trained.target, "name": request.target},
        }
        write_clean_json(request.output / META_FILE, described)
        files = [
            (META_FILE, "kind, target and beginning of the draft model, for drafttrain"),
            ("model.safetensors", "the draft model, for transformers, vLLM, SGLang, TensorRT-LLM and drafttrain"),
        ]
        return files + self.publish_gguf(trained, request)


def _load_complete(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A language model without our own config keys; raises UserError if its weights and config disagree."""
    model = load_language_model(str(folder), f"drafter={str(folder)!r}", _AGAIN, dtype=dtype)
    for key in ("drafter_kind", "target", "loss"):
        model.config.__dict__.pop(key, None)
    return model


def _tokenizer_folder(trained: Trained, target: str) -> Path | None:
    """Where a draft model's tokenizer is: in its own folder or its target's; None if neither is at hand."""
    if (trained.folder / "tokenizer_config.json").is_file():
        return trained.folder
    try:
        return Path(resolve_target(target)) if target and load_shell(target) else None
    except UserError:
        return None


SHIPPING = DraftModelShipping()
