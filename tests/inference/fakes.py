"""Drafters with a known relation to the target, and tiny targets of several families."""

from __future__ import annotations

import copy
import functools
import random
from pathlib import Path

import torch
import yaml
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


_TABLE = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text())
FAMILIES: dict[str, dict] = _TABLE["packed"]
OWN: dict[str, dict] = _TABLE["own"]


@functools.cache
def family(name: str) -> tuple[Target, nn.Module]:
    """A tiny target of a family, and an untouched copy of its model, which attends as transformers' eager functions do where the
    target is packed."""
    settings = copy.deepcopy({**FAMILIES, **OWN}[name])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    sharpen(model, seed=8)
    model.eval()
    reference = copy.deepcopy(model)
    if name in FAMILIES:
        reference.set_attn_implementation("eager")
    return Target.wrap(model, None, name=name), reference


def hf_greedy(reference: nn.Module, prompt: list[int], count: int, **options) -> list[int]:
    """What transformers' generate writes; options: of that call."""
    out = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=count,
        do_sample=False,
        **options,
    )
    return out[0, len(prompt) :].tolist()


def tokens(*shape, seed=0):
    """Random token ids of a shape."""
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
