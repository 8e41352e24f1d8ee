"""DFlash 2 drafters as vLLM and SGLang load them (`DFlash2DraftModel`), and as GGUF files.

A GGUF file is llama.cpp's dflash with further tensors:

ours                      engines                                      GGUF
markov_in [d + 1, r]      candidate_selector.predecessor_codebook      selector_predecessor.weight: a row per target token
markov_out [d, r]         candidate_selector.successor_codebook        selector_successor.weight: a row per target token
gate [r, h]               candidate_selector.hidden_projection         selector_hidden.weight
layers.{i}.attention_conv, mlp_conv: {base_kernel, kernel_projection}  blk.{i}.attn_conv, ffn_conv: {_base, _proj.weight}

dflash_config holds conv_kernel_size, conv_group_size, selector_rank and selector_top_k too. Engines
rescore so many tokens of a position; where ours rescores all, exports say 16. vLLM and SGLang take
them from the target's whole vocabulary; llama.cpp maps a smaller one (d2t). vLLM has the class
since 0.28, SGLang since 0.5.19, llama.cpp since August 2026.

Sources: vLLM models/qwen3_dflash2.py; SGLang pull request 35371; llama.cpp pull request 27342,
src/models/dflash.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from drafttrain.drafters.dflash.block_reading import own_keys
from drafttrain.drafters.dflash.export import BlockFiles, MarkovFiles, block_options
from drafttrain.drafters.dflash2.model import DFlash2, DFlash2Config
from drafttrain.drafters.form import Form, Weight
from drafttrain.drafters.gguf_heads import RELEASE
from drafttrain.drafters.shipping import EngineSettings, Exported, Format, Trained
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.engines import EngineRelease
from drafttrain.formats.weights import architectures_in
from drafttrain.target import Target

_NEED = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_ARCHITECTURE = "DFlash2DraftModel"
_CANDIDATES = 16  # of published drafters
_MASKS = "sample_from_anchor=true: engines predict at masks only, for kind dflash2"


class DFlash2Shipping(MarkovFiles[DFlash2]):
    """vLLM, SGLang and llama.cpp; our own format goes to the Hub too."""

    description = "a DFlash 2 drafter, blocks of {block_size} with convolutions and a selector, {layers}, {parameters} parameters"
    formats = {
        "vllm": Format("DFlash 2 as vLLM's DFlash2DraftModel", ("vLLM",)),
        "sglang": Format("DFlash 2 as SGLang's DFlash2DraftModel", ("SGLang",)),
        "speculators": Format("DFlash 2 in speculators' form", ("speculators",)),
        **BlockFiles.formats,
    }
    tiny = {**MarkovFiles.tiny, "selector_top_k": 4}
    drafter_class = DFlash2
    speculators_class = _ARCHITECTURE
    published_keys = {*MarkovFiles.published_keys, *_NEED}
    architecture = _ARCHITECTURE
    since = ("0.5.19", "0.5.19")
    reads = "DFlash 2 drafters (DFlash2DraftModel)"
    own_names = {
        "markov_in.weight": "candidate_selector.predecessor_codebook",
        "markov_out.weight": "candidate_selector.successor_codebook",
        "gate.weight": "candidate_selector.hidden_projection.weight",
    }
    gguf_names = {
        **BlockFiles.gguf_names,
        "markov_in.weight": "selector_predecessor.weight",
        "markov_out.weight": "selector_successor.weight",
        "gate.weight": "selector_hidden.weight",
    }

    def lacking(self, trained: Trained, form: str, engine: EngineRelease) -> list[str]:
        found = super().lacking(trained, form, engine)
        config = trained.config
        if config.get("sample_from_anchor"):
            found.append(_MASKS)
        if form == "speculators" and config.get("draft_vocab_size") != config.get("vocab_size"):
            found.append("draft_vocab_size: speculators selects among all of the target's tokens")
        if form == "vllm":
            kept = config.get("draft_vocab_size")
            v = config.get("vocab_size")
            if kept != v:
                found.append(f"draft_vocab_size={kept}: vLLM selects among all {v} tokens")
            if config.get("mask_token_id") is None:
                found.append("mask_token_id=null, a learned mask: vLLM takes a token's embedding")
        return found

    def block_keys(self, drafter: DFlash2) -> Json:
        keys = super().block_keys(drafter)
        keys["dflash_config"] |= _numbers(drafter.config)
        keys["dflash_config"]["block_size"] = drafter.config.block_size
        return keys

    def speculators_keys(self, drafter: DFlash2) -> Json:
        return _numbers(drafter.config)

    def recognizes(self, config: Mapping[str, object]) -> bool:
        return any("DFlash2DraftModel" in name for name in architectures_in(config))

    def more_fields(self, original: DFlash2, export: Exported) -> Json:
        keys = own_keys(export.config)
        for name in _NEED:
            if not isinstance(keys.get(name), int):
                raise UserError(
                    f"a DFlash 2 drafter's config.json has no {name}; get an intact copy of it"
                )
        count = keys["selector_top_k"]
        # Exports of a drafter that rescores all tokens name a number of them, yet the two are
        # compared as the original drafts.
        if isinstance(original, DFlash2) and not original.config.selector_top_k:
            count = 0
        return {
            "markov_rank": keys["selector_rank"],
            "markov_all": True,
            "conv_kernel_size": keys["conv_kernel_size"],
            "conv_group_size": keys["conv_group_size"],
            "selector_top_k": count,
        }

    def gguf_keys(self, drafter: DFlash2) -> Json:
        return {**super().gguf_keys(drafter), **_numbers(drafter.config)}

    def gguf_unsupported(self, drafter: DFlash2) -> list[str]:
        found = super().gguf_unsupported(drafter)
        count = drafter.config.selector_top_k
        h = drafter.config.hidden_size
        if count * (count + 1) > h:
            found.insert(
                0,
                f"selector_top_k={count}: llama.cpp {RELEASE} needs top_k * (top_k + 1) <= hidden_size={h}",
            )
        return found

    def gguf_name(self, own: str, drafter: DFlash2) -> str:  # type: ignore[override]
        if "_conv." not in own:
            return super().gguf_name(own, drafter)
        _, layer, conv, name, *_ = own.split(".")
        block = "attn" if conv == "attention_conv" else "ffn"
        end = "base" if name == "base_kernel" else "proj.weight"
        return f"blk.{layer}.{block}_conv_{end}"

    def gguf_form(self, drafter: DFlash2, target: Target) -> Form:
        kept = drafter.kept_ids.cpu()
        count = len(drafter.file_rows())  # tokens of the file

        def successor(table: Tensor) -> Tensor:
            out = torch.zeros(count, table.shape[1])  # [tokens, r]
            out[kept] = table.detach().float()
            return out

        form = super().gguf_form(drafter, target)
        form["selector_successor.weight"] = Weight(
            "markov_out.weight", there=successor, back=lambda rows: rows[kept]
        )
        return form

    def options(self, trained: Trained) -> EngineSettings:
        return {
            **super().options(trained),
            "llama.cpp": {"spec-type": "draft-dflash"},
            **block_options("dflash", "DFLASH", self.block_depth(trained)),
        }


def _numbers(config: DFlash2Config) -> Json:
    """Sizes of the convolutions and the selector, by engines' names."""
    count = config.selector_top_k
    if not count:  # llama.cpp needs count * (count + 1) <= h
        count = _CANDIDATES
        while count * (count + 1) > config.hidden_size:
            count -= 1
    return {
        "conv_kernel_size": config.conv_kernel_size,
        "conv_group_size": config.conv_group_size,
        "selector_rank": config.markov_rank,
        "selector_top_k": count,
    }


SHIPPING = DFlash2Shipping()
