"""DFlash 2 drafters as vLLM and SGLang load them (`DFlash2DraftModel`), and as GGUF: llama.cpp's
dflash with its tensors.

ours                      engines                                      GGUF
markov_in [d + 1, r]      candidate_selector.predecessor_codebook      selector_predecessor.weight: a row per target token
markov_out [d, r]         candidate_selector.successor_codebook        selector_successor.weight: a row per target token
gate [r, h]               candidate_selector.hidden_projection         selector_hidden.weight
layers.{i}.attention_conv, mlp_conv: {base_kernel, kernel_projection}  blk.{i}.attn_conv, ffn_conv: {_base, _proj.weight}

dflash_config holds conv_kernel_size, conv_group_size, selector_rank and selector_top_k too. Engines
rescore so many tokens of a position; where ours rescores all, exports say 16. vLLM and SGLang take
them from the target's whole vocabulary; llama.cpp maps a smaller one (d2t). vLLM has the class
since 0.28, SGLang since 0.5.19, llama.cpp since August 2026. Sources: vLLM models/qwen3_dflash2.py;
SGLang pull request 35371; llama.cpp pull request 27342, src/models/dflash.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from drafttrain.drafters.dflash.block_reading import own_keys
from drafttrain.drafters.dflash.export import BlockFiles, EngineBlocks
from drafttrain.drafters.dflash2.model import DFlash2, DFlash2Config
from drafttrain.drafters.gguf_heads import RELEASE
from drafttrain.drafters.shipping import Exported, Format, Trained
from drafttrain.errors import UserError
from drafttrain.files import Json
from drafttrain.formats.engines import EngineRelease
from drafttrain.target import Target

_NEED = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_ARCHITECTURE = "DFlash2DraftModel"
_CANDIDATES = 16  # of published drafters
_SELECTOR = {
    "markov_in.weight": "predecessor",
    "markov_out.weight": "successor",
    "gate.weight": "hidden",
}
_MASKS = "sample_from_anchor=true: engines predict at masks only, for kind dflash2"


class DFlash2Shipping(EngineBlocks[DFlash2]):
    """vLLM, SGLang and llama.cpp; our own format goes to the Hub too."""

    description = "a DFlash 2 drafter, blocks of {block_size} with convolutions and a selector, {layers}, {parameters} parameters"
    formats = {
        "vllm": Format("DFlash 2 as vLLM's DFlash2DraftModel", ("vLLM",)),
        "sglang": Format("DFlash 2 as SGLang's DFlash2DraftModel", ("SGLang",)),
        **BlockFiles.formats,
    }
    needs_gpu = ("vLLM",)
    tiny = {"mask_token_id": 300, "num_hidden_layers": 2, "block_size": 4, "markov_rank": 16}
    drafter_class = DFlash2
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
        **{own: f"selector_{theirs}.weight" for own, theirs in _SELECTOR.items()},
    }

    def unsupported(
        self,
        trained: Trained,
        form: str,
        engine: EngineRelease | None = None,
    ) -> list[str]:
        found = super().unsupported(trained, form, engine)
        config = trained.config
        kept = config.get("draft_vocab_size")
        v = config.get("vocab_size")
        other = engine and engine.form == "sglang"
        checks = {
            _MASKS: bool(config.get("sample_from_anchor")),
            f"draft_vocab_size={kept}: vLLM selects among all {v} tokens": form == "vllm"
            and kept != v,
            "mask_token_id=null, a learned mask: vLLM takes a token's embedding": form == "vllm"
            and config.get("mask_token_id") is None,
        }
        if other and engine and engine.name != "SGLang":
            return [f"{engine.name} knows no drafter of kind dflash2"]
        return [
            *found,
            *(reason for reason, applies in checks.items() if applies and form in self.formats),
        ]

    def block_keys(self, drafter: DFlash2) -> Json:
        keys = super().block_keys(drafter)
        keys["dflash_config"] |= {
            **_numbers(drafter.config),
            "block_size": drafter.config.block_size,
        }
        return keys

    def engine_weights(self, drafter: DFlash2, config: Json) -> dict[str, Tensor]:
        rows = {self.own_names["markov_in.weight"]: drafter.markov_in.weight[drafter.file_rows()]}
        return super().engine_weights(drafter, config) | rows

    def recognizes(self, config: Mapping[str, object]) -> bool:
        names = config.get("architectures")
        return isinstance(names, list) and _ARCHITECTURE in names

    def more_fields(self, config: Json) -> Json:
        keys = own_keys(config)
        if missing := [name for name in _NEED if not isinstance(keys.get(name), int)]:
            raise UserError(
                f"a DFlash 2 drafter's config.json has no {missing[0]}; get an intact copy of it"
            )
        return {
            "markov_rank": keys["selector_rank"],
            "markov_all": True,
            **{name: keys[name] for name in _NEED if "rank" not in name},
        }

    def drafter_from(self, original: DFlash2, export: Exported) -> DFlash2:
        """As other blocks; an original that rescores all tokens is compared so, as exports name a
        number of them.
        """
        back = super().drafter_from(original, export)
        back.config.selector_top_k = original.config.selector_top_k and back.config.selector_top_k
        return back

    def gguf_keys(self, drafter: DFlash2) -> Json:
        return {**super().gguf_keys(drafter), **_numbers(drafter.config)}

    def gguf_unsupported(self, drafter: DFlash2) -> list[str]:
        count = drafter.config.selector_top_k
        h = drafter.config.hidden_size
        many = f"selector_top_k={count}: llama.cpp {RELEASE} needs top_k * (top_k + 1) <= hidden_size={h}"
        return [*([many] if count * (count + 1) > h else []), *super().gguf_unsupported(drafter)]

    def gguf_fields(self, keys: Json, like: DFlash2) -> Json:
        ours = {name: keys[name] for name in ("conv_kernel_size", "conv_group_size")}
        if like.config.selector_top_k:
            chosen = {"selector_top_k": keys["selector_top_k"]}
        else:
            chosen = {}
        return {
            **super().gguf_fields(keys, like),
            **ours,
            **chosen,
            "markov_rank": keys["selector_rank"],
        }

    def gguf_name(self, own: str, drafter: DFlash2) -> str:  # type: ignore[override]
        if "_conv." not in own:
            return super().gguf_name(own, drafter)
        _, layer, conv, name, *_ = own.split(".")
        end = "base" if name == "base_kernel" else "proj.weight"
        return f"blk.{layer}.{'attn' if conv == 'attention_conv' else 'ffn'}_conv_{end}"

    def gguf_weights(self, drafter: DFlash2, target: Target) -> dict[str, Tensor]:
        made = super().gguf_weights(drafter, target)
        rows = drafter.file_rows()
        out = torch.zeros(len(rows), drafter.config.markov_rank)
        out[drafter.kept_ids.cpu()] = drafter.markov_out.weight.detach().float()
        return made | {
            "selector_predecessor.weight": drafter.markov_in.weight[rows],
            "selector_successor.weight": out,
        }

    def gguf_own(
        self,
        found: dict[str, Tensor],
        back: DFlash2,
        original: DFlash2,
    ) -> dict[str, Tensor]:
        into = found.get("selector_predecessor.weight")
        out = found.get("selector_successor.weight")
        rows = back.file_rows()
        if into is None or out is None or into.shape != out.shape or len(out) != len(rows):
            return found
        table = (
            original.markov_in.weight.detach().float().clone()
        )  # [d + 1, r]; the last row may stand for no token
        table[rows] = into
        return {
            **found,
            "selector_predecessor.weight": table,
            "selector_successor.weight": out[back.kept_ids],
        }

    def options(self, trained: Trained) -> Mapping[str, Mapping[str, object]]:
        depth = self.block_depth(trained)
        return {
            **super().options(trained),
            "llama.cpp": {"spec-type": "draft-dflash"},
            "vLLM": {"method": "dflash", "num_speculative_tokens": depth},
            "SGLang": {
                "speculative-algorithm": "DFLASH",
                "speculative-num-steps": None,
                "speculative-eagle-topk": None,
                "speculative-num-draft-tokens": depth + 1,
            },
        }


def _numbers(config: DFlash2Config) -> Json:
    """Sizes of the convolutions and the selector by engines' names; llama.cpp needs k * (k + 1) <=
    h.
    """
    most = next(k for k in range(_CANDIDATES, 0, -1) if k * (k + 1) <= config.hidden_size)
    return {
        "conv_kernel_size": config.conv_kernel_size,
        "conv_group_size": config.conv_group_size,
        "selector_rank": config.markov_rank,
        "selector_top_k": config.selector_top_k or most,
    }


SHIPPING = DFlash2Shipping()
