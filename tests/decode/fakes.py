"""Drafters with a known relation to the target, and tiny targets of several families."""

from __future__ import annotations

import copy
import functools
import random

import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

from drafttrain.batch import TargetOutput, TokenTree
from drafttrain.drafters.base import TreeSpec
from drafttrain.target import Target
from tests.conftest import make_target

VOCAB = 60


class FakeDrafter:
    """Drafts random trees; with `truth` (the target's own continuation) each node on the true path may agree with it.

    Args:
        prompt_len, truth: the greedy continuation of a prompt of that length; None drafts blindly.
        agree: probability that a node whose parent is on the true path carries the true token.
        nodes: most nodes per tree.
        seed: of shapes and tokens.
    """

    kind = "fake"

    def __init__(self, truth=None, agree=0.5, nodes=6, seed=0, feature_layers=(), vocab=VOCAB):
        self.truth, self.agree, self.nodes, self.vocab = truth, agree, nodes, vocab
        self.feature_layers = feature_layers
        self.random = random.Random(seed)
        self.tokens: list[int] = []
        self.features: list[Tensor] = []

    def start(self, prompt_ids, max_length):
        self.prompt = prompt_ids.tolist()
        self.tokens, self.features, self.max_length = self.prompt[:1], [], max_length
        return self

    def extend(self, tokens, features):
        assert tokens.shape[0] == features.shape[0]
        self.tokens += tokens.tolist()
        self.features.append(features)

    def propose(self, spec, sampler=None):
        done = len(self.tokens) - len(self.prompt)
        tokens, parents, depths, on_path = [], [], [], []
        for _ in range(self.random.randint(0, self.nodes)):
            parent = self.random.randint(-1, len(tokens) - 1)
            depth = 1 + (depths[parent] if parent >= 0 else 0)
            follows = parent < 0 or on_path[parent]
            place = done + depth - 1
            siblings = {tokens[i] for i, p in enumerate(parents) if p == parent}
            token = self.random.randrange(self.vocab)
            if self.truth is not None and follows and place < len(self.truth) and self.random.random() < self.agree:
                token = self.truth[place]
            if token in siblings:
                continue
            on_path.append(
                follows and self.truth is not None and place < len(self.truth) and token == self.truth[place]
            )
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        return TokenTree(torch.tensor(tokens, dtype=torch.long), parents)


ANY = TreeSpec.parse("fanout:4x4x4")  # fake drafters choose their own shapes; only the budget counts


class MarkovTarget:
    """A target without attention: the next token depends on the last one by a table of logits [v, v]."""

    device = torch.device("cpu")
    name = "markov"
    eos_ids: list[int] = []

    def __init__(self, vocab=4, seed=0):
        self.table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))
        self.config = type("Config", (), {})()

    def forward(self, input_ids, feature_layers, position_ids=None, context=None):
        hidden = self.table[input_ids]
        return TargetOutput(hidden[..., :0], hidden)

    def head(self, hidden):
        return hidden


def sharpen(model: nn.Module, seed: int) -> None:
    """Random weights that are wide enough apart for greedy choices to have no near ties."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(0, 0.2, generator=generator)


@functools.cache
def family(name: str) -> tuple[Target, nn.Module]:
    """A tiny target, and an untouched copy of its model for transformers' own generate."""
    size = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if name == "llama":
        target = make_target(layers=3, vocab_size=300)
        reference = copy.deepcopy(target.model)
        reference.set_attn_implementation("sdpa")
        return target, reference
    mixed = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7}
    if name == "gemma3":
        model = Gemma3ForCausalLM(Gemma3TextConfig(**size, **mixed, num_key_value_heads=1, query_pre_attn_scalar=8))
    elif name == "gemma2":
        config = Gemma2Config(**size, **mixed, num_key_value_heads=2, attn_logit_softcapping=5.0)
        model = Gemma2ForCausalLM(config)
        model._supports_sdpa = True  # soft caps are beyond sdpa, not beyond our own attention
    else:
        model = MistralForCausalLM(MistralConfig(**size, num_key_value_heads=2, sliding_window=7))
    sharpen(model, seed=3)
    model.eval()
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    return Target.wrap(model, None, name=name), reference


def hf_greedy(reference: nn.Module, prompt: list[int], count: int) -> list[int]:
    out = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=count, do_sample=False
    )
    return out[0, len(prompt) :].tolist()
