"""Keys of published config.json files: which matter, which do not and why, and which are refused.

Trainers write many keys. One that import does not know may change what the drafter computes, so it
is refused, unless `UNREAD` says why it does not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from drafttrain.errors import UserError
from drafttrain.files import Json

# Keys that nothing reads, by the reason.
_REASONS = {
    "names, versions and classes that a checkpoint was written by or for": """
        _name_or_path architectures auto_map base_model base_model_name_or_path modal_type model_type name_or_path
        speculators_config speculators_model_type speculators_version target_model_type transformers_version version""",
    "the type of stored numbers, which the tensors have themselves": "dtype torch_dtype use_bfloat16",
    "tokens that begin and end a text, which are the target's": """
        begin_suppress_tokens bos_token_id decoder_start_token_id eos_token_id forced_bos_token_id forced_eos_token_id
        pad_token_id sep_token_id suppress_tokens tokenizer_class""",
    "settings of training alone": """
        attention_backend attention_dropout confidence_head_alpha down_sample_ratio down_sample_ratio_min
        gradient_checkpointing hidden_dropout
        initializer_range lambda_base_decay_steps lambda_base_start loss_decay_gamma num_anchors num_depths
        resid_pdrop""",
    "settings of generation, which the engine makes": """
        bad_words_ids diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
        exponential_decay_length_penalty length_penalty max_length min_length n_candidates no_repeat_ngram_size
        num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
        return_dict_in_generate temperature top_k top_k_tokens_per_head top_p typical_p use_cache""",
    "how transformers runs a model, not what it computes": """
        _attn_implementation chunk_size_feed_forward output_attentions output_hidden_states pruned_heads return_dict
        tf_legacy_loss torchscript""",
    "heads of other tasks than language modeling": """
        finetuning_task id2label label2id prefix problem_type task_specific_params""",
    "decoders that read an encoder, which these drafters are not": """
        add_cross_attention cross_attention_hidden_size is_decoder is_encoder_decoder tie_encoder_decoder""",
    "the tensors of the checkpoint say the same": """
        bias confidence_head_with_markov embed_requires_grad enable_confidence_head has_embed_tokens has_lm_head
        num_aux_hidden_states num_context_layers
        parallel_draft_heads_num_layers tie_word_embeddings truncated_vocab_size use_confidence_head""",
    "experts of a target's layers; a layer that had some would have their tensors": """
        aux_loss_alpha ep_size first_k_dense_replace moe_intermediate_size moe_layer_freq n_group n_routed_experts
        n_shared_experts norm_topk_prob num_experts_per_tok routed_scaling_factor
        scoring_func seq_aux topk_group topk_method""",
    "the sum of qk_nope_head_dim and qk_rope_head_dim": "qk_head_dim",
    "read together with layer_types, which decide": "max_window_layers",
    "sizes of the target, which is at hand": "num_target_layers target_num_hidden_layers",
}
UNREAD = {key: reason for reason, keys in _REASONS.items() for key in keys.split()}


class Fixed(NamedTuple):
    """A key of which ours computes some values only.

    Attributes:
        values: those. other: what another value means, with {key} and {value}.
    """

    values: tuple[object, ...]
    other: str = "has {key}={value!r:.60}"


# Keys that hold further keys.
NESTED = ("transformer_layer_config", "eagle_config", "dflash_config", "dspark_config")
# Keys of which no kind computes other values.
FIXED: Mapping[str, Fixed] = {
    "quantization_config": Fixed((), "is quantized (quantization_config)"),
    "compression_config": Fixed((), "is quantized (compression_config)"),
    "pretraining_tp": Fixed((1,)),
    "logit_scale": Fixed((1,), "has logit_scale={value}, a factor on its logits"),
}


# Spellings of rotary embeddings and of windows, which `published_rope` and `windows_of` read.
LAYER_FORMS = {
    "layer_types", "partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "use_sliding_window",
}  # fmt: skip


def windows_of(layer: Json, mixed: bool = False) -> list[str]:
    """What a published config says of windows that a kind of ours has not.

    mixed: the kind may have layers with a window beside others; else it has one for all.
    """
    types = layer.get("layer_types")
    if types:
        other = sorted(set(map(str, types)) - {"full_attention", "sliding_attention"})
        if other:
            return [f"has layers of type {', '.join(other)}"]
        if len(set(types)) > 1 and not mixed:
            return ["mixes layers with and without a window; ours of this kind have one for all"]
    elif layer.get("use_sliding_window"):
        return ["has use_sliding_window without layer_types, which say which layers have a window"]
    return []


def check_published(
    config: Json,
    read: Collection[str],
    fixed: Mapping[str, Fixed],
    where: str,
    more: Collection[str] = (),
) -> None:
    """Checks a published config: ours computes what its keys say, and every key is known.

    Args:
        read: keys that the kind reads, or checks itself.
        fixed: keys with few values, beside FIXED.
        more: reasons against the checkpoint that were found elsewhere.

    Raises:
        UserError: names every value that ours does not compute, or every key that is not known.
    """
    reasons = []
    unknown = []
    rules = {**FIXED, **fixed}
    for key, value in entries(config):
        if key in read:
            continue
        if key in rules:
            if value not in rules[key].values:
                reasons.append(rules[key].other.format(key=key, value=value))
        elif key not in UNREAD:
            unknown.append(f"{key}={value!r:.60}")
    reasons += more
    if reasons:
        raise UserError(f"{where} {'; it '.join(reasons)}, which drafters of ours do not compute")
    if unknown:
        raise UserError(
            f"{where}: config.json has keys that import does not know ({', '.join(unknown):.300}); they may change what the "
            "drafter computes. Ask its author, and remove those that do not matter from a copy"
        )


def entries(config: Json) -> Iterator[tuple[str, object]]:
    """A config's keys and values, also those of NESTED keys; null is no value."""
    for key, value in config.items():
        if key in NESTED and isinstance(value, dict):
            yield from entries(value)
        elif value is not None:
            yield key, value
