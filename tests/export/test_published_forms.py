"""Published checkpoints of other projects, by hand with their keys and tensor names: imported, decoded, exported.

Each case is a row of the table in docs/publishing.md. Sources of the forms: docstrings of the kinds' export.py and reading.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.cli import main
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.published_keys import FIXED, NESTED, UNREAD
from drafttrain.drafters.registry import load_drafter
from drafttrain.drafters.shipping import Exported, find_drafter, shipped_kinds, shipping
from drafttrain.errors import UserError
from drafttrain.inference import generate
from drafttrain.target import Target
from tests.conftest import make_target
from tests.drafters.block_kinds import BLOCK_KINDS, MIXED, begun, shaken
from tests.drafters.helpers import make_batch, make_heads
from tests.drafters.layer_kinds import make_kind

KEPT = torch.arange(0, 300, 2)
PAGE = Path(__file__).parents[2] / "docs" / "publishing.md"
# A Llama or Qwen3 layer as every trainer writes it, for the tiny target's shapes.
LAYER: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8, "hidden_act": "silu",
    "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 64, "max_position_embeddings": 40960,
    "max_window_layers": 36, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "sliding_window": None, "tie_word_embeddings": False, "transformers_version": "4.57.1",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 300,
}  # fmt: skip
EAGLE = {
    **LAYER,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 150,
    "torch_dtype": "bfloat16",
}
BLOCK = {**LAYER, "model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "dtype": "bfloat16",
         "num_target_layers": 8}  # fmt: skip
IDS = {"mask_token_id": 290, "target_layer_ids": [1, 3, 4]}
MARKOV = {
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
VERIFIER = {"algorithm": "", "default_proposal_method": "greedy", "verifier": {"name_or_path": "a/b", "architectures": []},
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}]}  # fmt: skip


class Case(NamedTuple):
    """A row of the page: project, form; and how its checkpoint looks."""

    project: str
    form: str
    kind: str
    options: dict[str, Any]  # of our drafter with the same computation
    config: dict[str, Any]
    rename: Callable[[dict[str, Tensor], Any], dict[str, Tensor]]  # our tensors -> published ones
    drafts: bool = True  # what is read back is compared with our drafter's drafts


def tables(drafter) -> dict[str, Tensor]:
    kept = drafter.kept_ids
    return {"d2t": kept - torch.arange(len(kept)), "t2d": torch.isin(torch.arange(300), kept)}


def midlayer(state, drafter):
    return {**{k: v for k, v in state.items() if k != "kept_ids"}, **tables(drafter)}


def numbered(state, drafter):
    return {k.replace("midlayer.", "layers.0."): v for k, v in midlayer(state, drafter).items()}


def with_copies(names):
    """Beside the tensors, frozen copies of the target's."""

    def rename(state, drafter):
        target = drafter.own_target
        copies = {"embed_tokens.weight": target.embed_weight, "lm_head.weight": target.head_weight}
        return {**blocks(state, drafter), **{name: copies[name].clone() for name in names}}

    return rename


MARKOV_NAMES = {
    "markov_in.weight": "markov_head.markov_w1.weight", "markov_out.weight": "markov_head.markov_w2.weight",
    "confidence.weight": "confidence_head.proj.weight", "confidence.bias": "confidence_head.proj.bias",
    **{f"{part}_proj.{name}": f"markov_head.{part}_proj.{name}" for part in ("gate", "joint") for name in ("weight", "bias")},
}  # fmt: skip


SELECTOR = {
    "markov_in.weight": "candidate_selector.predecessor_codebook", "markov_out.weight": "candidate_selector.successor_codebook",
    "gate.weight": "candidate_selector.hidden_projection.weight",
}  # fmt: skip


def selector(state, drafter):
    return {SELECTOR.get(k, k): v for k, v in state.items() if k != "kept_ids"}


DOMINO = {"emb_dim": 16, "gru_hidden_dim": 24, "pure_draft_prefix_len": 1}
DOMINO_NAMES = {
    "gru.reads.weight": "prefix_gru.weight_ih_l0", "gru.keeps.weight": "prefix_gru.weight_hh_l0",
    "correction_in.weight": "embed_proj.0.weight", "correction_out.weight": "embed_proj.2.weight",
}  # fmt: skip


def blocks(state, drafter):
    names = MARKOV_NAMES | DOMINO_NAMES
    return {names.get(k, k): v for k, v in state.items() if k != "kept_ids"}


def modelopt_markov(state, drafter):
    names = {"markov_head.": "", "confidence_head.proj": "confidence_proj"}
    found = blocks(state, drafter)
    for theirs, ours in names.items():
        found = {k.replace(theirs, ours): v for k, v in found.items()}
    return found


def speculators_block(state, drafter):
    head = {
        "lm_head.weight": drafter.head.weight,
        "embed_tokens.weight": drafter.own_target.embed_weight.clone(),
    }
    return {**blocks(state, drafter), **head, **tables(drafter)}


def eagle1(state, drafter):
    return {
        **{k: v for k, v in state.items() if k != "kept_ids"},
        "embed_tokens.weight": drafter.own_target.embed_weight.clone(),
    }


MTP_NAMES = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}


def mtp_module(state, drafter):
    found = {"mtp_layers.0.final_layernorm.weight": state["norm.weight"]}
    for name, value in state.items():
        if name.startswith("blocks.0."):
            own, _, rest = name.removeprefix("blocks.0.").partition(".")
            place = f"{MTP_NAMES[own]}.{rest}" if own in MTP_NAMES else rest
            found[f"mtp_layers.0.{place}"] = value
    return found


def plain(state, drafter):
    return {k: v for k, v in state.items() if k != "kept_ids"}


def medusa(state, drafter):
    return {
        re.sub(r"^blocks\.(\d)\.(\d)\.linear", r"blocks.\1.layers.\2", k): v
        for k, v in plain(state, drafter).items()
    }


def accelerator(state, drafter):
    return {
        f"speculator.{k.replace('lm_heads', 'head')}": v for k, v in plain(state, drafter).items()
    }


def speculators(kind, layer, **keys):
    own = {
        "speculators_model_type": kind,
        "speculators_version": "0.7.0",
        "speculators_config": {**VERIFIER, "algorithm": kind},
    }
    return {**own, "transformer_layer_config": layer, **keys}


KEPT_ALL = {"kept": KEPT}
# What speculators 0.9 writes of its block drafters' layers.
SLIDING = {
    "layer_types": ["sliding_attention"] * 2, "sliding_window": 2048, "use_sliding_window": True, "max_window_layers": 28,
}  # fmt: skip
# What NeMo Automodel 0.7 writes beside IDS, and verl-SpeCo 0.1 of a block drafter.
NEMO = {
    "block_size": 5,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "input_embedding_scale": 1.0,
}
VERL = {
    **{key: LAYER[key] for key in ("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
                                   "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "vocab_size")},
    **IDS, "dtype": "bfloat16", "head_dim": 8, "loss_decay_gamma": 7.0, "num_anchors": 512, "num_context_layers": 3,
    "num_hidden_layers": 2, "num_target_layers": 8, "target_hidden_size": 32, "target_num_hidden_layers": 8,
}  # fmt: skip
WHOLE = {"kept": torch.arange(300)}
FIRST = {"feature_layers": (2, 4, 5), "mask_token_id": 290}
CASES = [
    Case("SafeAILab EAGLE-3", "LlamaForCausalLM", "eagle3", KEPT_ALL, {**EAGLE, "architectures": ["LlamaForCausalLM"]}, midlayer),
    Case("SpecForge", "LlamaForCausalLMEagle3", "eagle3", {**KEPT_ALL, "feature_layers": (2, 4, 6)},
         {**EAGLE, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}},
         midlayer),
    Case("SpecForge", "EAGLE-3.1", "eagle3", {**KEPT_ALL, "fc_norm": True, "norm_output": True},
         {**EAGLE, "architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": True}, midlayer),
    Case("speculators", "eagle3", "eagle3", {**KEPT_ALL, "feature_layers": (2, 4, 6), "norm_before_residual": True},
         speculators("eagle3", {**EAGLE, "mlp_bias": False}, architectures=["Eagle3Speculator"], draft_vocab_size=150,
                     norm_before_residual=True, target_hidden_size=None, eagle_aux_hidden_state_layer_ids=[2, 4, 6],
                     norm_before_fc=False, fc_norm=False, norm_output=False, embed_requires_grad=False), numbered),
    Case("speculators", "eagle3 of 0.9", "eagle3",
         {**WHOLE, "feature_layers": (2, 4, 5), "norm_before_residual": True, "norm_output": True, "norm_before_fc": True,
          "sliding_window": 2048},
         speculators("eagle3", {**EAGLE, "layer_types": ["sliding_attention"], "sliding_window": 2048,
                                "use_sliding_window": True},
                     architectures=["Eagle3DraftModel"], draft_vocab_size=300, norm_before_residual=True, target_hidden_size=None,
                     eagle_aux_hidden_state_layer_ids=[2, 4, 5], norm_before_fc=True, fc_norm=False, norm_output=True,
                     embed_requires_grad=False, tie_word_embeddings=False), numbered),
    Case("AngelSlim", "Eagle3LlamaForCausalLM", "eagle3", KEPT_ALL,
         {**EAGLE, "architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "qwen3", "modal_type": "LLM"}, midlayer),
    Case("NVIDIA ModelOpt", "LlamaForCausalLMEagle3", "eagle3", KEPT_ALL,
         {**EAGLE, "architectures": ["LlamaForCausalLMEagle3"], "mlp_bias": False, "pretraining_tp": 1, "pad_token_id": None,
          "eagle_config": {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True,
                           "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
                           "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None}},
         numbered),
    Case("speculators", "peagle", "peagle", {**KEPT_ALL, "mask_token_id": 290},
         speculators("peagle", EAGLE, architectures=["PEagleSpeculator"], draft_vocab_size=150, norm_before_residual=False,
                     mask_token_id=290, embed_requires_grad=True), numbered),
    Case("verl-SpeCo", "LlamaForCausalLMPeagle", "peagle", {**KEPT_ALL, "mask_token_id": 290, "num_hidden_layers": 2},
         {**EAGLE, "architectures": ["LlamaForCausalLMPeagle"], "model_type": "llama_peagle", "num_hidden_layers": 8,
          "num_draft_layers": 2, "num_depths": 8, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2, "mask_token_id": 290,
          "fc_norm": False, "norm_output": False, "num_aux_hidden_states": 3, "parallel_drafting": True,
          "target_hidden_size": 32, "mlp_bias": False, "pretraining_tp": 1}, numbered),
    Case("z-lab DFlash", "DFlashDraftModel", "dflash", {**WHOLE, **FIRST},
         {**BLOCK, "architectures": ["DFlashDraftModel"], "block_size": 5, "dflash_config": IDS,
          "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}, blocks),
    Case("AngelSlim", "QwenDFlashDraftModel", "dflash", {**WHOLE, **FIRST},
         {**BLOCK, "architectures": ["QwenDFlashDraftModel"], "block_size": 5, "dflash_config": IDS, "num_anchors": 512,
          "loss_decay_gamma": 7.0, "attention_backend": "flex_attention"}, blocks),
    Case("NVIDIA ModelOpt", "DFlashDraftModel", "dflash", {**WHOLE, **FIRST},
         {**BLOCK, "architectures": ["DFlashDraftModel"], "block_size": 5, "dflash_config": {**IDS, "causal": False}}, blocks),
    Case("speculators", "dflash", "dflash", {**KEPT_ALL, **FIRST},
         speculators("dflash", BLOCK, architectures=["DFlashDraftModel"], draft_vocab_size=150, block_size=5,
                     aux_hidden_state_layer_ids=[2, 4, 5], mask_token_id=290, sliding_window_non_causal=False,
                     sample_from_anchor=False, target_hidden_size=None), speculators_block),
    Case("DeepSpec", "Qwen3DSparkModel without Markov head", "dflash", {**WHOLE, **FIRST, "sample_from_anchor": True},
         {**BLOCK, **IDS, "architectures": ["Qwen3DSparkModel"], "block_size": 5, "num_anchors": 512, "markov_rank": 0,
          "enable_confidence_head": False}, with_copies(["embed_tokens.weight", "lm_head.weight"])),
    Case("DeepSpec", "Qwen3DSparkModel", "dspark",
         {**WHOLE, **FIRST, "sample_from_anchor": True, "markov_rank": 8, "markov_all": True},
         {**BLOCK, **IDS, **MARKOV, "architectures": ["Qwen3DSparkModel"], "block_size": 5, "num_anchors": 512},
         with_copies(["embed_tokens.weight", "lm_head.weight"])),
    Case("SpecForge", "DSparkDraftModel", "dspark",
         {**WHOLE, **FIRST, "sample_from_anchor": True, "markov_rank": 8, "markov_all": True},
         {**BLOCK, "architectures": ["DSparkDraftModel"], "block_size": 5,
          "dflash_config": {**IDS, **MARKOV, "attention_mode": "gqa", "confidence_head_alpha": 1.0, "projector_type": "dspark"}},
         blocks),
    Case("NVIDIA ModelOpt", "DFlashDraftModel with projector_type dspark", "dspark",
         {**WHOLE, **FIRST, "sample_from_anchor": True, "markov_rank": 8, "markov_all": True},
         {**BLOCK, "architectures": ["DFlashDraftModel"], "block_size": 5,
          "dflash_config": {**IDS, "causal": False, "projector_type": "dspark", "shift_label": True, "markov_rank": 8,
                            "markov_head_type": "vanilla", "use_confidence_head": True}}, modelopt_markov),
    Case("NVIDIA ModelOpt", "DFlashDraftModel with a window", "dflash", {**WHOLE, **FIRST, "sliding_window": 16},
         {**BLOCK, "architectures": ["DFlashDraftModel"], "block_size": 5, "sliding_window": 16,
          "dflash_config": {**IDS, "use_swa": True, "swa_window_size": 16, "causal": False}}, blocks),
    Case("NVIDIA ModelOpt", "DFlashDraftModel with projector_type domino", "domino",
         {**WHOLE, **FIRST, **DOMINO, "sample_from_anchor": True},
         {**BLOCK, "architectures": ["DFlashDraftModel"], "block_size": 5, "emb_dim": 16,
          "dflash_config": {**IDS, **DOMINO, "causal": False, "projector_type": "domino", "shift_label": True}}, blocks),
    Case("vLLM", "Qwen3DSparkModel with other spellings", "dspark",
         {**WHOLE, **FIRST, "sample_from_anchor": True, "markov_rank": 8, "markov_all": True},
         {**BLOCK, "architectures": ["Qwen3DSparkModel"], "block_size": 5, "target_layer_ids": [1, 3, 4], "pard_token": 290,
          "dspark_markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True}, blocks),
    Case("inco.ai, z-lab", "DFlash2DraftModel", "dflash2",
         {**WHOLE, **FIRST, "markov_rank": 8, "markov_all": True, "selector_top_k": 16, "sliding_window": 16},
         {**BLOCK, "architectures": ["DFlash2DraftModel"], "is_causal": False, "rms_norm_eps": 1e-6, "sliding_window": 16,
          "layer_types": ["sliding_attention"] * 2,
          "dflash_config": {**IDS, "block_size": 5, "conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 8,
                            "selector_top_k": 16}}, selector),
    Case("SpecForge", "DominoDraftModel", "domino", {**WHOLE, **FIRST, **DOMINO, "sample_from_anchor": True},
         {**BLOCK, "architectures": ["DominoDraftModel"], "auto_map": {"AutoModel": "domino.DominoDraftModel"}, "block_size": 5,
          "emb_dim": 16, "dflash_config": {**IDS, **DOMINO, "projector_type": "domino", "shift_label": True}}, blocks),
    Case("NeMo Automodel", "Qwen3DFlashDraftModel with projector_type domino", "domino", {**WHOLE, **FIRST, **DOMINO},
         {**BLOCK, "architectures": ["Qwen3DFlashDraftModel"], "block_size": 5, "is_causal": False,
          "dflash_config": {**IDS, **DOMINO, **NEMO, "projector_type": "domino", "shift_label": False}}, blocks),
    Case("verl-SpeCo", "DominoDraftModel with keys outside", "domino",
         {**WHOLE, **FIRST, **DOMINO, "sample_from_anchor": True},
         {**VERL, **DOMINO, "architectures": ["DominoDraftModel"], "model_type": "domino", "block_size": 5,
          "lambda_base_decay_steps": 2000, "lambda_base_start": 1.0, "projector_type": "domino", "shift_label": True},
         with_copies(["embed_tokens.weight"])),
    Case("JetSpec", "DFlashDraftModel with causal_head", "jetspec", {**WHOLE, **FIRST},
         {**BLOCK, "architectures": ["DFlashDraftModel"], "block_size": 5,
          "dflash_config": {**IDS, "causal_head": True}}, blocks),
    Case("NeMo Automodel", "Qwen3DFlashDraftModel with causal", "jetspec", {**WHOLE, **FIRST},
         {**BLOCK, "architectures": ["Qwen3DFlashDraftModel"], "block_size": 5, "is_causal": False,
          "dflash_config": {**IDS, **NEMO, "causal": True}}, blocks),
    Case("NeMo Automodel", "Qwen3DFlashDraftModel", "dflash", {**WHOLE, **FIRST, "sliding_window": 16},
         {**BLOCK, "architectures": ["Qwen3DFlashDraftModel"], "block_size": 5, "is_causal": False, "sliding_window": 16,
          "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2, "dflash_config": {**IDS, **NEMO}}, blocks),
    Case("NeMo Automodel", "Qwen3DFlash2DraftModel", "dflash2",
         {**WHOLE, **FIRST, "markov_rank": 8, "markov_all": True, "selector_top_k": 16},
         {**BLOCK, "architectures": ["Qwen3DFlash2DraftModel"], "block_size": 5, "is_causal": False, "rms_norm_eps": 1e-6,
          "dflash_config": {**IDS, **NEMO, "conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 8,
                            "selector_top_k": 16}}, selector),
    Case("speculators", "dflash of 0.9", "dflash", {**WHOLE, **FIRST, "causal": True, "sliding_window": 2048},
         speculators("dflash", {**BLOCK, **SLIDING}, architectures=["DFlashDraftModel"], draft_vocab_size=300, block_size=5,
                     aux_hidden_state_layer_ids=[2, 4, 5], mask_token_id=290, sliding_window_non_causal=False,
                     sample_from_anchor=False, target_hidden_size=None, tie_word_embeddings=False), blocks),
    Case("speculators", "dspark of 0.9", "dspark",
         {**WHOLE, **FIRST, "markov_rank": 8, "markov_all": True, "sample_from_anchor": True, "causal": True,
          "sliding_window": 2048},
         speculators("dspark", {**BLOCK, **SLIDING}, **MARKOV, architectures=["DSparkDraftModel"], draft_vocab_size=300,
                     block_size=5, aux_hidden_state_layer_ids=[2, 4, 5], mask_token_id=290, sample_from_anchor=True,
                     sliding_window_non_causal=False), blocks),
    Case("NVIDIA ModelOpt", "DFlashDraftModel with causal queries", "dflash", {**WHOLE, **FIRST, "causal": True},
         {**BLOCK, "architectures": ["DFlashDraftModel"], "block_size": 5,
          "dflash_config": {**IDS, "dflash_query_causal": True}}, blocks),
    Case("speculators", "dflash2", "dflash2",
         {**WHOLE, **FIRST, "markov_rank": 8, "markov_all": True, "selector_top_k": 16, "sliding_window": 2048},
         speculators("dflash2", {**BLOCK, **SLIDING, "rms_norm_eps": 1e-6},
                     architectures=["DFlash2DraftModel"], draft_vocab_size=300, block_size=5, conv_kernel_size=2,
                     conv_group_size=16, selector_rank=8, selector_top_k=16, aux_hidden_state_layer_ids=[2, 4, 5],
                     mask_token_id=290, sample_from_anchor=False, sliding_window_non_causal=True, target_hidden_size=None,
                     tie_word_embeddings=False), selector),
    Case("speculators", "dspark", "dspark", {**KEPT_ALL, **FIRST, "markov_rank": 8, "markov_all": True},
         speculators("dspark", BLOCK, **MARKOV, architectures=["DSparkDraftModel"], draft_vocab_size=150, block_size=5,
                     aux_hidden_state_layer_ids=[2, 4, 5], mask_token_id=290, sample_from_anchor=False), speculators_block),
    Case("z-lab DFlash", "DFlashDraftModel of Qwen3.6", "dflash", {**WHOLE, **FIRST, **MIXED, "causal": "sliding"},
         {**BLOCK, **MIXED, "architectures": ["DFlashDraftModel"], "block_size": 5, "use_sliding_window": True,
          "max_window_layers": 5, "dflash_config": IDS, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}, blocks),
    Case("speculators", "dflash with mixed layers", "dflash", {**WHOLE, **FIRST, **MIXED, "causal": "sliding"},
         speculators("dflash", {**BLOCK, **SLIDING, **MIXED}, architectures=["DFlashDraftModel"], draft_vocab_size=300,
                     block_size=5, aux_hidden_state_layer_ids=[2, 4, 5], mask_token_id=290, sliding_window_non_causal=False,
                     sample_from_anchor=False, target_hidden_size=None, tie_word_embeddings=False), blocks),
    Case("NVIDIA Nemotron 3.5", "Qwen3DSparkModel with sinks", "dspark",
         {**WHOLE, **FIRST, "markov_rank": 8, "markov_all": True, "attention_sink_bias": True, "causal": True,
          "sliding_window": 16},
         {**BLOCK, **MARKOV, "architectures": ["Qwen3DSparkModel"], "block_size": 4, "attention_sink_bias": True,
          "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "has_embed_tokens": True, "has_lm_head": False,
          "layer_types": ["sliding_attention"] * 2,
          "dflash_config": {**IDS, "sample_from_anchor": False, "causal": True, "attention_sink_bias": True, "use_swa": True,
                            "swa_window_size": 16}}, with_copies(["embed_tokens.weight"])),
    Case("NVIDIA ModelOpt", "DFlashDraftModel with a recurrent head", "dspark",
         {**WHOLE, **FIRST, "sample_from_anchor": True, "markov_rank": 8, "markov_all": True, "markov_head_type": "rnn"},
         {**BLOCK, "architectures": ["DFlashDraftModel"], "block_size": 5,
          "dflash_config": {**IDS, "causal": False, "projector_type": "dspark", "shift_label": True, "markov_rank": 8,
                            "markov_head_type": "rnn", "use_confidence_head": True}}, modelopt_markov),
    Case("SafeAILab EAGLE-1", "LlamaForCausalLM of one layer", "eagle1", {**WHOLE, "fc_bias": True},
         {**LAYER, "model_type": "llama", "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}, eagle1),
    Case("verl-SpeCo", "LlamaForCausalLMEagle1", "eagle1", {**WHOLE, "normed_layers": True},
         {**LAYER, "architectures": ["LlamaForCausalLMEagle1"], "model_type": "llama_eagle1", "num_hidden_layers": 1,
          "draft_num_hidden_layers": 1, "target_hidden_size": 32, "num_aux_hidden_states": 1, "mlp_bias": False,
          "pretraining_tp": 1}, eagle1),
    Case("speculators", "mtp", "mtp", {**WHOLE, "qk_norm": True, "train_head": False},
         speculators("mtp", {**BLOCK, "num_hidden_layers": 8, "layer_types": ["full_attention"] * 8},
                     architectures=["MTPDraftModel"], num_nextn_predict_layers=1), mtp_module),
    Case("vLLM, SGLang", "EagleLlamaForCausalLM, LlamaForCausalLMEagle", "eagle1", WHOLE,
         {**LAYER, "model_type": "llama", "num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]}, plain),
    Case("vLLM", "MedusaModel", "medusa", WHOLE,
         {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 32, "vocab_size": 300, "num_heads": 4,
          "num_hidden_layers": 1, "medusa_fc_bias": False, "original_lm_head": False, "truncated_vocab_size": 300}, medusa),
    Case("IBM accelerators", "MLPSpeculatorPreTrainedModel", "mlp_speculator", {**WHOLE, "scale_input": False, "inner_dim": 24},
         {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": 32, "inner_dim": 24,
          "n_candidates": 5, "n_predict": 3, "top_k_tokens_per_head": [4, 3, 2], "torch_dtype": "float16",
          "vocab_size": 300}, accelerator),
]  # fmt: skip
# One case per way of reading in the quick run; the others differ from one of them in names.
QUICK = {
    "SafeAILab EAGLE-3",
    "NVIDIA ModelOpt",
    "z-lab DFlash",
    "SafeAILab EAGLE-1",
    "IBM accelerators",
}
MARKED = [
    pytest.param(
        case,
        marks=() if case.project in QUICK or case.form == "dspark" else pytest.mark.slow,
        id=f"{case.project} {case.form}",
    )
    for case in CASES
]
REFUSED = [
    ("DFlash 2 without sizes of its parts", {**BLOCK, "architectures": ["DFlash2DraftModel"], "block_size": 5,
     "dflash_config": {**IDS, "conv_kernel_size": 2, "conv_group_size": 16}}, "has no selector_rank"),
    ("Domino without sizes", {**BLOCK, "architectures": ["DFlashDraftModel"], "block_size": 5,
     "dflash_config": {**IDS, "projector_type": "domino"}}, "has no 'emb_dim'"),
    ("LiLiCorr", {**BLOCK, "architectures": ["DFlashDraftModel"], "block_size": 5,
     "dflash_config": {**IDS, "projector_type": "lilicorr"}}, "is of projector_type='lilicorr'"),
    ("a recurrent Markov head that reads the block's first token",
     speculators("dspark", BLOCK, **{**MARKOV, "markov_head_type": "rnn"}, draft_vocab_size=300, block_size=5,
                 aux_hidden_state_layer_ids=[2, 4, 5], mask_token_id=290, sample_from_anchor=False),
     "markov_head_type='rnn' needs sample_from_anchor=true"),
    ("a window without a size", {**BLOCK, "architectures": ["DFlashDraftModel"], "block_size": 5, "is_causal": False,
     "dflash_config": IDS, "layer_types": ["sliding_attention"] * 2},
     "do not fit num_hidden_layers=2 and sliding_window=0"),
    ("two lists of features that differ", {**BLOCK, "architectures": ["DFlashDraftModel"], "block_size": 5,
     "dflash_config": IDS, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "other layers than target_layer_ids"),
    ("quantized weights", {**EAGLE, "architectures": ["LlamaForCausalLMEagle3"], "quantization_config": {"quant": "fp8"}},
     "is quantized"),
    ("speculators mtp with layers of another family",
     speculators("mtp", {**BLOCK, "model_type": "qwen3_next"}, num_nextn_predict_layers=1),
     "layers of model_type='qwen3_next'; ours are qwen3's"),
    ("speculators xpress", speculators("xpress", BLOCK), "has .*xpress.*; import reads"),
    ("SpecForge PEagleDraftModel", {**EAGLE, "architectures": ["PEagleDraftModel"]}, "config.json has no mask_token_id"),
    ("ModelOpt heads with parallel drafting", {**EAGLE, "architectures": ["LlamaForCausalLMEagle3"],
     "eagle_config": {"parallel_draft_step": 4}}, "has Medusa-like heads"),
]  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    built = make_target(layers=8)
    built.model.save_pretrained(folder)
    built.tokenizer.save_pretrained(folder)
    return Target.load(str(folder), "float32", "cpu")


def make(case: Case, target: Target) -> Any:
    options = dict(case.options)
    if case.kind in BLOCK_KINDS:
        drafter = shaken(shipping(case.kind).drafter_class, target, **options)
    elif case.kind in ("medusa", "mlp_speculator"):
        drafter = make_heads(target, case.kind, options.pop("kept"), **options)
    else:
        drafter = make_kind(case.kind, target, options.pop("kept"), shake=True, **options)
    drafter.own_target = target
    return drafter


@pytest.mark.thorough
@pytest.mark.parametrize("case", MARKED)
def test_a_published_form_is_read_drafts_and_is_written_again(target, tmp_path, capsys, case):
    drafter = make(case, target)
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(case.config))
    weights = {
        name: value.detach().clone()
        for name, value in case.rename(drafter.state_dict(), drafter).items()
    }
    save_file(weights, folder / "model.safetensors")
    command = [
        "import",
        "--checkpoint",
        str(folder),
        "--target",
        str(target.path),
        "--output",
        str(tmp_path / "ours"),
    ]
    assert main(command) == 0, capsys.readouterr().err
    trained = find_drafter(str(tmp_path / "ours"))
    back = load_drafter(str(tmp_path / "ours"), target)
    assert trained.kind == case.kind and torch.equal(back.kept_ids, drafter.kept_ids)
    prefix = make_batch((9,)).input_ids[0]
    spec = TreeSpec.parse("fanout:3x2")
    trees = [begun(one, target, prefix).propose(spec) for one in (drafter.eval(), back)]
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    torch.testing.assert_close(trees[0].log_probs, trees[1].log_probs, rtol=1e-4, atol=1e-4)
    wanted = generate(target, None, prefix, max_new_tokens=8, eos_ids=[]).tokens
    assert (
        generate(
            target, back, prefix, max_new_tokens=8, spec=TreeSpec.parse("chain:3"), eos_ids=[]
        ).tokens
        == wanted
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.project} {case.form}")
def test_a_key_is_read_or_has_a_reason_or_is_refused(case):
    """Each key of each form, in every place where trainers put keys, and one that nobody knows there."""
    kind = shipping(case.kind)
    places: list[dict[str, Any]] = [{}]  # what leads to a place
    places += [{key: case.config[key]} for key in NESTED if isinstance(case.config.get(key), dict)]
    kind.check_published(Exported("it", case.config, {}))
    for place in places:
        changed: dict[str, Any] = {"warp_factor": 9}
        for key, inner in place.items():
            changed = {key: {**inner, "warp_factor": 9}}
        with pytest.raises(UserError, match=r"keys that import does not know \(warp_factor=9\)"):
            kind.check_published(Exported("it", {**case.config, **changed}, {}))


def test_no_key_has_two_rules():
    for name in shipped_kinds():
        kind = shipping(name)
        read, fixed = set(kind.published_keys), {*FIXED, *kind.fixed_keys}
        assert not read & UNREAD.keys() and not read & fixed and not fixed & UNREAD.keys(), name


@pytest.mark.parametrize(
    ("name", "config", "message"),
    REFUSED,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_computed_is_one_line(target, tmp_path, capsys, name, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.zeros(32, 96)}, tmp_path / "model.safetensors")
    command = [
        "import",
        "--checkpoint",
        str(tmp_path),
        "--target",
        str(target.path),
        "--output",
        str(tmp_path / "ours"),
    ]
    assert main(command) == 2
    printed = capsys.readouterr().err.strip()
    assert re.search(message, printed) and "\n" not in printed


def test_the_page_lists_what_is_tried():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `?(\w+)`? \|", PAGE.read_text(), re.MULTILINE)
    assert {(p, f.replace("`", ""), k) for p, f, k in rows} >= {
        (case.project, case.form, case.kind) for case in CASES
    }
    page = PAGE.read_text().lower()
    for name, _, _ in REFUSED:
        assert name.lower() in page, name
