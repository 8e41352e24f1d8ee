"""Draft models: ordinary causal language models, which engines load as they are, and llama.cpp as a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafttrain.drafters.shipping import GGUF_NAME, Format, Request, Shipping
from drafttrain.drafters.trained import META_FILE, Trained, load_shell
from drafttrain.errors import UserError
from drafttrain.formats.weights import read_config
from drafttrain.hub.upload import write_clean_json
from drafttrain.target import resolve_target

_TEXT = "a draft model as plain HF checkpoint"
_ENGINES = ("transformers", "vLLM", "SGLang", "TensorRT-LLM, Triton")
_LOGITS = 2e-2  # of the largest logit: two loaders of one file agree to rounding


class DraftModelShipping(Shipping):
    """One checkpoint for every engine but llama.cpp, written without our own keys."""

    formats = {
        "vllm": Format(_TEXT, _ENGINES),
        "sglang": Format(_TEXT, _ENGINES),
        "transformers": Format(_TEXT, _ENGINES),
        "gguf": Format("a draft model as GGUF file", ("llama.cpp",)),
    }
    verifiable = {"vllm": "vllm", "transformers": "transformers", "llama.cpp": "gguf"}
    in_root = ("vllm", "sglang", "transformers", "gguf")

    def line(self, trained: Trained, parameters: str) -> str:
        return f"a small language model of {parameters} parameters with the same tokenizer, trained to guess what it writes"

    def refusals(self, trained: Trained, form: str) -> list[str]:
        recorded, own = trained.target.get("vocab_size"), trained.config["vocab_size"]
        if form in ("vllm", "sglang") and recorded and recorded != own:
            return [
                f"vocab_size={own} differs from the target's {recorded}, and the engine verifies drafts by token id"
            ]
        return super().refusals(trained, form)

    def write(self, trained: Trained, form: str, request: Request) -> list[Path]:
        """Loads the model once, to prove that it is whole."""
        tokenizer = _tokenizer_folder(trained, request.target)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                trained.folder, dtype=request.dtype, use_safetensors=True, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(f"drafter={str(trained.folder)!r} is no causal language model ({first})") from error
        model, info = loaded
        wrong = sorted({*info["missing_keys"], *info["unexpected_keys"]})
        if wrong:
            raise UserError(
                f"drafter={str(trained.folder)!r}: weights and config disagree on {', '.join(map(str, wrong[:3]))}"
            )
        for key in ("drafter_kind", "target", "loss"):
            if hasattr(model.config, key):
                delattr(model.config, key)
        if form == "gguf":
            from drafttrain.formats.write_gguf import write_gguf

            if tokenizer is None:
                raise UserError(
                    "format='gguf' holds the tokenizer too, and the drafter's folder has none; pass --target"
                )
            return [write_gguf(trained.folder, request.output / GGUF_NAME, request.dtype, tokenizer)]
        model.save_pretrained(request.output)
        if tokenizer is not None:
            AutoTokenizer.from_pretrained(tokenizer).save_pretrained(request.output)
        return sorted(path for path in request.output.iterdir() if path.is_file())

    def check(self, trained: Trained, exported: Path) -> dict[str, Any]:
        return compare_logits(trained.folder, exported)

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, Any]]:
        return {
            "vLLM": {"method": "draft_model"},
            "SGLang": {"speculative-algorithm": "STANDALONE"},
            "TensorRT-LLM, Triton": {"decoding_type": "DraftTarget"},
            "llama.cpp": {},
            "transformers": {},
        }

    def publish(self, trained: Trained, request: Request) -> list[tuple[str, str]]:
        folder = request.output
        local = replace(request, target=trained.target_name)  # where a tokenizer may be
        self.write(trained, "transformers", local)
        own = read_config(trained.folder, META_FILE) if (trained.folder / META_FILE).is_file() else {}
        described = {**own, "drafter_kind": trained.kind, "target": {**trained.target, "name": request.target}}
        write_clean_json(folder / META_FILE, described)
        files = [
            (META_FILE, "kind, target and beginning of the draft model, for drafttrain"),
            ("model.safetensors", "the draft model, for transformers, vLLM, SGLang, TensorRT-LLM and drafttrain"),
        ]
        try:
            self.write(trained, "gguf", local)
            files.append((GGUF_NAME, "the same for llama.cpp"))
        except UserError as error:
            print(f"no GGUF file: {error}")
        return files


def _tokenizer_folder(trained: Trained, target: str) -> Path | None:
    """Where a draft model's tokenizer is: with it, or with its target; None if neither is at hand."""
    if (trained.folder / "tokenizer_config.json").is_file():
        return trained.folder
    try:
        return Path(resolve_target(target)) if target and load_shell(target) else None
    except UserError:
        return None


@torch.no_grad()
def compare_logits(folder: Path, exported: Path) -> dict[str, Any]:
    """A draft model and its export, a GGUF file or a plain checkpoint, on one row of tokens.

    Raises:
        UserError: logits that differ beyond rounding.
    """
    gguf = exported / GGUF_NAME
    form: dict[str, Any] = {"gguf_file": GGUF_NAME} if gguf.is_file() else {"use_safetensors": True}
    theirs: Any = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, **form)
    ours: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    ids = torch.arange(1, 33)[None] * 97 % ours.config.vocab_size
    left, right = ours.eval()(ids).logits.log_softmax(-1), theirs.eval()(ids).logits.log_softmax(-1)
    scale = left.abs().max().item()
    worst = (left - right).abs().max().item()
    agree = (left.argmax(-1) == right.argmax(-1)).float().mean().item()
    if not worst <= _LOGITS * scale:
        raise UserError(
            f"{str(exported)!r} computes other logits than the draft model (log-probabilities differ by {worst:.3g} of "
            f"{scale:.3g}); export anew, and report this if it stays"
        )
    return {"max_log_prob_difference": worst, "largest_log_prob": scale, "same_argmax": agree}


SHIPPING = DraftModelShipping()
