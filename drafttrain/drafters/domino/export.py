"""Domino drafters as SGLang loads them: `DFlashDraftModel` with projector_type domino.

ours                   published
gru.reads.weight       prefix_gru.weight_ih_l0     [3g, h]: reset gate, update gate, new state
gru.keeps.weight       prefix_gru.weight_hh_l0     [3g, g]
correction_in.weight   embed_proj.0.weight         [r, h + g]: block state, then the path's
correction_out.weight  embed_proj.2.weight         [v, r]: a row per target token

dflash_config holds projector_type, emb_dim, gru_hidden_dim, pure_draft_prefix_len and shift_label,
which is our sample_from_anchor. SGLang has the class since 0.5.20, for CUDA and bfloat16. It drafts
block_size - 1 tokens also where the first token of a block predicts, and corrects only the
likeliest 2048 tokens of a block (--speculative-domino-candidate-pool-size).

Sources: SGLang 0.5.23 models/dflash.py, speculative/{dflash_utils,domino_utils}.py; the trainers
that model.py names; verl-SpeCo 0.1 models/domino, whose keys stand outside dflash_config.
"""

from __future__ import annotations

from drafttrain.drafters.dflash.block_reading import FIXED_KEYS, own_keys
from drafttrain.drafters.dflash.export import EngineBlocks, sglang_block
from drafttrain.drafters.domino.model import Domino
from drafttrain.drafters.published_keys import Fixed
from drafttrain.drafters.shipping import EngineSettings, Exported, Format, Trained
from drafttrain.files import Json
from drafttrain.formats.engines import EngineRelease

_PREFIX = 1  # the only pure_draft_prefix_len that SGLang computes


class DominoShipping(EngineBlocks[Domino]):
    """SGLang; our own format goes to the Hub too."""

    description = "a Domino drafter (arXiv 2605.29707), blocks of {block_size}, {layers}, {parameters} parameters"
    formats = {"sglang": Format("Domino as SGLang's DFlashDraftModel", ("SGLang",))}
    verifiable = {}
    in_root = ()
    tiny = {**EngineBlocks.tiny, "gru_hidden_dim": 16, "emb_dim": 16}
    drafter_class = Domino
    published_keys = {
        *EngineBlocks.published_keys,
        "emb_dim",
        "gru_hidden_dim",
        "pure_draft_prefix_len",
    }
    fixed_keys = {**FIXED_KEYS, "projector_type": Fixed(("domino",), "is of {key}={value!r:.60}")}
    architecture = "DFlashDraftModel"
    since = ("0.5.20", "0.5.20")
    causal_in = ("SGLang",)
    reads = "Domino drafters (DominoDraftModel, DFlashDraftModel with projector_type domino)"
    own_names = {
        "gru.reads.weight": "prefix_gru.weight_ih_l0",
        "gru.keeps.weight": "prefix_gru.weight_hh_l0",
        "correction_in.weight": "embed_proj.0.weight",
        "correction_out.weight": "embed_proj.2.weight",
    }

    def lacking(self, trained: Trained, form: str, engine: EngineRelease) -> list[str]:
        found = super().lacking(trained, form, engine)
        prefix = trained.config.get("pure_draft_prefix_len")
        if prefix != _PREFIX:
            found.append(f"pure_draft_prefix_len={prefix}: SGLang computes {_PREFIX} only")
        return found

    def block_keys(self, drafter: Domino) -> Json:
        config = drafter.config
        keys = super().block_keys(drafter)
        keys["dflash_config"] |= {
            "projector_type": "domino",
            "emb_dim": config.emb_dim,
            "gru_hidden_dim": config.gru_hidden_dim,
            "pure_draft_prefix_len": config.pure_draft_prefix_len,
            "shift_label": config.sample_from_anchor,
        }
        return keys

    def checked_depth(self, config: Json) -> int:
        return config["block_size"] - 1

    def more_fields(self, original: Domino, export: Exported) -> Json:
        keys = own_keys(export.config)
        return {
            "emb_dim": keys["emb_dim"],
            "gru_hidden_dim": keys["gru_hidden_dim"],
            "pure_draft_prefix_len": keys.get("pure_draft_prefix_len", 0),
        }

    def options(self, trained: Trained) -> EngineSettings:
        return {"SGLang": sglang_block("DFLASH", self.block_depth(trained))}


SHIPPING = DominoShipping()
