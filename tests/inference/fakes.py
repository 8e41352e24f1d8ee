"""Drafters with a known relation to the target, and tiny targets of several families."""

from __future__ import annotations

import copy
import functools
import random

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.batch import TargetOutput, TokenTree
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.target import Target
from drafttrain.target.generation import TargetGeneration

VOCAB = 60


class FakeDrafter(Drafter):
    """Drafts random trees; with `truth` (the target's own continuation) each node on the true path may agree with it.

    Args:
        prompt_len, truth: the greedy continuation of a prompt of that length; None drafts blindly.
        agree: probability that a node whose parent is on the true path carries the true token.
        nodes: most nodes per tree.
        seed: of shapes and tokens.
    """

    kind = "fake"

    def __init__(self, truth=None, agree=0.5, nodes=6, seed=0, feature_layers=(), vocab=VOCAB):
        self.truth = truth
        self.agree = agree
        self.nodes = nodes
        self.vocab = vocab
        self.feature_layers = feature_layers
        self.random = random.Random(seed)
        self.tokens: list[int] = []
        self.features: list[Tensor] = []

    def start(self, prompt_ids, max_length):
        self.prompt = prompt_ids.tolist()
        self.device = prompt_ids.device
        self.tokens = self.prompt[:1]
        self.features = []
        self.max_length = max_length
        return self

    def extend(self, tokens, features):
        assert tokens.shape[0] == features.shape[0]
        self.tokens += tokens.tolist()
        self.features.append(features)

    def propose(self, spec, sampler=None):
        done = len(self.tokens) - len(self.prompt)
        tokens = []
        parents = []
        depths = []
        on_path = []
        for _ in range(self.random.randint(0, self.nodes)):
            parent = self.random.randint(-1, len(tokens) - 1)
            depth = 1 + (depths[parent] if parent >= 0 else 0)
            follows = parent < 0 or on_path[parent]
            place = done + depth - 1
            siblings = {tokens[i] for i, p in enumerate(parents) if p == parent}
            token = self.random.randrange(self.vocab)
            if (
                self.truth is not None
                and follows
                and place < len(self.truth)
                and self.random.random() < self.agree
            ):
                token = self.truth[place]
            if token in siblings:
                continue
            on_path.append(
                follows
                and self.truth is not None
                and place < len(self.truth)
                and token == self.truth[place]
            )
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        return TokenTree(torch.tensor(tokens, dtype=torch.long, device=self.device), parents)


class FakeBatch(Drafter):
    """A `FakeDrafter` for each of several prompts. Args: truths: by prompt, its continuation; options: of `FakeDrafter`."""

    kind = "fakes"

    def __init__(self, truths, **options):
        self.truths = truths
        self.options = options
        self.feature_layers = options.get("feature_layers", ())
        self.sessions = []

    def start(self, prompt_ids, max_length):
        truth = self.truths[tuple(prompt_ids.tolist())]
        seed = self.options.get("seed", 0) + len(self.sessions)
        self.sessions.append(FakeDrafter(truth, **{**self.options, "seed": seed}))
        return self.sessions[-1].start(prompt_ids, max_length)


ANY = TreeSpec.parse(
    "fanout:4x4x4"
)  # fake drafters choose their own shapes; only the budget counts


class MarkovTarget:
    """A target without attention: the next token depends on the last one by a table of logits [v, v]."""

    device = torch.device("cpu")
    dtype = torch.float32
    name = "markov"
    eos_ids: list[int] = []
    max_positions = None
    continuation = None
    generation = TargetGeneration(None, 0, name)

    def __init__(self, vocab=4, seed=0):
        self.vocab_size = vocab
        self.table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))

    def require_layers(self):
        return self

    def forward(self, input_ids, feature_layers, position_ids=None, context=None):
        hidden = self.table[input_ids]
        return TargetOutput(hidden[..., :0], hidden)

    def score(self, input_ids, feature_layers, context):
        out = self.forward(input_ids, feature_layers, None, context)
        return out.features[0], self.head(out.last_hidden[0])

    def head(self, hidden):
        return hidden


def sharpen(model: nn.Module, seed: int) -> None:
    """Random weights that are wide enough apart for greedy choices to have no near ties; norms stay near their own."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        norm = "Norm" in type(module).__name__
        for parameter in module.parameters(recurse=False):
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.data = parameter.data + noise / 3 if norm else noise


_SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # tied ones make random models repeat themselves
}
_GROUPED = {**_SIZE, "intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 2}
_WINDOW = {"sliding_window": 7}
_MIXED = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_MULTIPLIED = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
}
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1],
    "long_factor": [2.0, 4.0],
    "factor": 4.0,
}
_LINEAR = {
    **{
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
_MAMBA2 = {"n_groups": 1, "chunk_size": 4}
_EXPERTS = {**_ROUTED, "num_experts": 4}
_LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_BLOCKS = ["linear_attention", "hybrid", "linear_attention"]
_EMBED = {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 512,
    "rotary_dim": 4,
    "vocab_size": VOCAB,
}
_EMBED |= {"bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False}


def _without(settings: dict, *names: str) -> dict:
    return {name: value for name, value in settings.items() if name not in names}


# model_type and settings of each family, with a window (if any) shorter than the tests' prompts.
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", _GROUPED),
    "qwen2": ("qwen2", {**_GROUPED, **_MIXED, "use_sliding_window": True}),
    "qwen3": ("qwen3", {**_GROUPED, **_MIXED, "use_sliding_window": True}),
    "mistral": ("mistral", {**_GROUPED, **_WINDOW}),
    "mixtral": (
        "mixtral",
        {**_GROUPED, **_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": ("qwen3_moe", {**_GROUPED, **_ROUTED, "num_experts": 4, "mlp_only_layers": [1]}),
    "gemma2": (
        "gemma2",
        {**_GROUPED, **_MIXED, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": (
        "gemma3_text",
        {**_GROUPED, **_MIXED, "num_key_value_heads": 1, "query_pre_attn_scalar": 8},
    ),
    "phi": (
        "phi",
        {**_SIZE, "intermediate_size": 48, "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    ),
    "phi3": ("phi3", {**_GROUPED, **_WINDOW}),
    "phi3_longrope": (
        "phi3",
        {
            **_GROUPED,
            "original_max_position_embeddings": 128,
            "rope_parameters": {**_LONGROPE, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "opt": ("opt", {**_SIZE, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt_post_norm": (
        "opt",
        {
            **_SIZE,
            "ffn_dim": 48,
            "word_embed_proj_dim": 16,
            "do_layer_norm_before": False,
            "enable_bias": False,
        },
    ),
    "gpt2": ("gpt2", {**_SIZE, "n_inner": 48, "tie_word_embeddings": True}),
    "gpt_neox": (
        "gpt_neox",
        {**_SIZE, "intermediate_size": 48, "rotary_pct": 0.25, "use_parallel_residual": True},
    ),
    "granite": ("granite", {**_GROUPED, **_MULTIPLIED}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_without(_GROUPED, "head_dim"),
            **_LATENT,
            **_ROUTED,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
        }
        | {
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "n_shared_experts": 1,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_GROUPED,
            **_MIXED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": _YARN,
        },
    ),
}


# Families that decode with their own cache.
OWN: dict[str, tuple[str, dict]] = {
    "qwen3_next": (
        "qwen3_next",
        {**_GROUPED, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_5": ("qwen3_5_text", {**_GROUPED, **_LINEAR}),
    "falcon_h1": ("falcon_h1", {**_GROUPED, **_MAMBA, "mamba_d_ssm": 64}),
    "lfm2": (
        "lfm2",
        {
            **_GROUPED,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "granite_hybrid": (
        "granitemoehybrid",
        {
            **_GROUPED,
            **_MAMBA,
            "layer_types": _LINEAR["layer_types"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        }
        | {"shared_intermediate_size": 24},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_without(_GROUPED, "num_hidden_layers"),
            **_MAMBA2,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
        }
        | {
            "ssm_state_size": 8,
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        },
    ),
    "bamba": ("bamba", {**_GROUPED, **_MAMBA, "attn_layer_indices": [1]}),
    "jamba": (
        "jamba",
        {
            **_GROUPED,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        }
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "mamba": ("mamba", {**_SIZE, "state_size": 8}),
    "mamba2": ("mamba2", {**_SIZE, **_MAMBA2, "state_size": 8, "num_heads": 8, "head_dim": 8}),
    "recurrent_gemma": (
        "recurrent_gemma",
        {**_without(_GROUPED, "head_dim"), "lru_width": 32, "attention_window_size": 7}
        | {"block_types": ["recurrent", "attention", "recurrent"]},
    ),
    "minimax": (
        "minimax",
        {
            **_GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": _LINEAR["layer_types"],
        }
        | {"block_size": 4},
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **_GROUPED,
            **_EXPERTS,
            **_LATENT,
            "num_key_value_heads": 4,
            "layer_types": _LINEAR["layer_types"],
        }
        | {"q_lora_rank": None, "linear_num_heads": 4, "linear_head_dim": 8},
    ),
    "rwkv": ("rwkv", {**_SIZE, "attention_hidden_size": 32, "context_length": 512}),
    "xlstm": ("xlstm", {**_SIZE, "num_heads": 4, "embedding_dim": 32, "num_blocks": 3}),
    "zamba": (
        "zamba",
        {
            **_without(_GROUPED, "head_dim"),
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "n_mamba_heads": 2,
        }
        | {"layers_block_type": _BLOCKS, "mamba_d_state": 8, "use_mamba_kernels": False},
    ),
    "zamba2": (
        "zamba2",
        {
            **_GROUPED,
            "layers_block_type": _BLOCKS,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
        }
        | {
            "mamba_ngroups": 1,
            "chunk_size": 4,
            "adapter_rank": 8,
            "num_mem_blocks": 1,
            "mamba_expand": 2,
        },
    ),
    "falcon_alibi": ("falcon", {**_SIZE, "alibi": True, "multi_query": True}),
    "falcon": ("falcon", _SIZE),
    "bloom": ("bloom", {**_SIZE, "n_layer": 3, "n_head": 4}),
    "mpt": (
        "mpt",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 3,
            "vocab_size": VOCAB,
            "max_seq_len": 512,
            "expansion_ratio": 2,
        }
        | {"tie_word_embeddings": False, "eos_token_id": None},
    ),
    "gptj": ("gptj", _EMBED),
    "codegen": ("codegen", _EMBED),
    "gpt_neo": (
        "gpt_neo",
        {
            **_without(_SIZE, "num_hidden_layers", "num_attention_heads"),
            "num_layers": 4,
            "num_heads": 4,
        }
        | {"attention_types": [[["global", "local"], 2]], "window_size": 7},
    ),
    "llama4": (
        "llama4_text",
        {**_GROUPED, "num_hidden_layers": 4, "num_local_experts": 2, "intermediate_size_mlp": 48}
        | {
            "attention_chunk_size": 7,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    "qwen2_moe_window": (
        "qwen2_moe",
        {
            **_GROUPED,
            **_EXPERTS,
            **_MIXED,
            "shared_expert_intermediate_size": 24,
            "use_sliding_window": True,
        },
    ),
}


@functools.cache
def family(name: str) -> tuple[Target, nn.Module]:
    """A tiny target of a family, and an untouched copy of its model, which attends as transformers' eager functions do where the
    target is packed."""
    model_type, settings = {**FAMILIES, **OWN}[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    sharpen(model, seed=8)
    model.eval()
    reference = copy.deepcopy(model)
    if name in FAMILIES:
        reference.set_attn_implementation("eager")
    return Target.wrap(model, None, name=name), reference


def hf_greedy(
    reference: nn.Module, prompt: list[int], count: int, use_cache: bool = True
) -> list[int]:
    out = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=count,
        do_sample=False,
        use_cache=use_cache,
    )
    return out[0, len(prompt) :].tolist()


def tokens(*shape, seed=0):
    """Random token ids of a shape."""
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
