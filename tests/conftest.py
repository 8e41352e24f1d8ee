"""Tiny random models and tokenizers, built on the spot: no test needs a network or a download."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import json
import os
import shutil
import signal
from typing import TYPE_CHECKING

from tests.files import dump_jsonl

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background job ignores it, and so would every subprocess
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DRAFTTRAIN_CPU_WEIGHTS", "packed")  # instead of a measurement per process


def has_gpu() -> bool:
    """A device that torch sees; asked of torch only on machines that have a device file of a driver."""
    if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return False
    import torch

    return torch.cuda.is_available()


if not has_gpu():  # before anything imports triton: its kernels then run as numpy programs
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

# Imports and collected tests are no garbage; looking for some takes a third of the time until the first test.
gc.disable()
gc.set_threshold(20_000)  # objects; Python's 700 is less than one test makes in a millisecond

# torch, transformers and drafttrain are imported where they are used: pytest-xdist's first process, which only hands tests
# out, then starts its workers seconds sooner.
if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from drafttrain.target import Target

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# A suite of three questions in two categories, one of them with two turns.
QUESTIONS = [
    {"question_id": "q1", "category": "chat", "turns": ["hello there", "and again"]},
    {"question_id": "q2", "category": "code", "turns": ["print(1)"]},
    {"question_id": "q3", "category": "chat", "turns": ["hi"]},
]


def make_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: 256 bytes, two chat markers, and unused ids up to vocab_size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    fast.add_tokens([f"<unused{i}>" for i in range(vocab_size - len(fast))])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_target(
    layers: int = 4, hidden: int = 32, vocab_size: int = 300, seed: int = 0, **overrides
) -> Target:
    """A tiny random Llama in float32 with peaked logits, so that greedy choices have no near ties."""
    import torch

    shape = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 257,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        **overrides,
    }
    pristine, random_state = built_target(json.dumps(shape), seed)
    torch.set_rng_state(random_state)  # as after the weights were drawn
    return copy.deepcopy(pristine)


def save_target(target: Target, folder: str | os.PathLike[str]) -> None:
    """Writes a target's model and tokenizer to a folder."""
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)


def loaded_target(folder: str | os.PathLike[str], **shape) -> Target:
    """A target of `make_target` as it is loaded from a folder."""
    from drafttrain.target import Target

    save_target(make_target(**shape), folder)
    return Target.load(str(folder), "float32", "cpu")


@functools.cache
def built_target(shape: str, seed: int) -> tuple[Target, torch.Tensor]:
    """A target, which takes three times as long to build as to copy, and torch's random state behind it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from drafttrain.target import Target

    torch.manual_seed(seed)
    config = LlamaConfig(**json.loads(shape))
    tokenizer = make_tokenizer(config.vocab_size)
    target = Target.wrap(LlamaForCausalLM(config), tokenizer, name="tiny", dtype=torch.float32)
    return target, torch.get_rng_state()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Garbage collections look not at the modules and tests that stay to the end."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def steady_clock(monkeypatch) -> None:
    """A clock of decoding that advances by a millisecond whenever it is read.

    `@adapt` chooses trees by what rounds cost; with this clock it chooses the same ones on every machine.
    """
    from drafttrain.inference.sequence import Clock

    readings = itertools.count()
    monkeypatch.setattr(Clock, "now", lambda self: next(readings) / 1000)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def target() -> Target:
    return make_target()


@pytest.fixture(scope="session")
def saved_target(tmp_path_factory):
    target = make_target()
    folder = tmp_path_factory.mktemp("saved") / "target"
    save_target(target, folder)
    return folder


@pytest.fixture
def target_dir(tmp_path, target, saved_target):
    """A tiny target saved as a folder that `Target.load` reads."""
    return shutil.copytree(saved_target, tmp_path / "target")


@pytest.fixture(scope="session")
def seeing(tmp_path_factory):
    """A tiny target that reads images, as tests/vlm_models.py builds one, in a folder."""
    from tests.data.seeing import make_seeing

    return make_seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def seeing_processor(seeing, monkeypatch):
    """Targets take that one's processor, which transformers itself loads with torchvision only."""
    from drafttrain.target.sight import Sight

    monkeypatch.setattr(Sight, "_load_processor", lambda self: seeing.processor)


@pytest.fixture
def suite(tmp_path):
    """The path of a suite of QUESTIONS."""
    path = tmp_path / "suite.jsonl"
    dump_jsonl(path, QUESTIONS)
    return path
