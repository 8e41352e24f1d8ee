"""Tiny drafters of every kind that engines load, for a tiny random target: made, trained for
seconds and saved on the spot.

They overfit the target's answers, so that engines accept tokens at every depth.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafttrain.batch import Batch, anchors_by_depth
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.drafters.registry import kind_class
from drafttrain.drafters.shipping import Trained, find_drafter, shipped_kinds, shipping
from drafttrain.inference import generate
from drafttrain.progress import Progress
from drafttrain.states.source import TargetSource
from drafttrain.target import Target
from drafttrain.training.loop import Learner, take_steps
from drafttrain.training.step import step_inputs

_VOCAB = 320
_STEPS = 80
_RATE = 3e-3
_PROMPT = 24  # tokens


def tiny_target(folder: Path) -> Target:
    """A random Llama that every engine runs: heads of 32, byte-level tokenizer, peaked logits
    without near ties.
    """
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "he"]
    raw = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(alphabet)},
            merges=[("Ċ", "Ċ"), ("h", "e")],
        )
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    )
    tokenizer.add_tokens([f"<unused{i}>" for i in range(_VOCAB - len(tokenizer))])
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        vocab_size=_VOCAB, max_position_embeddings=1024, rms_norm_eps=1e-5, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Target.load(str(folder), "float32", "cpu")


def tiny_prompts(count: int) -> list[list[int]]:
    """Random token ids, none of them special."""
    made = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (count, _PROMPT), generator=made).tolist()


def shipped_drafters(
    target: Target,
    prompts: Sequence[list[int]],
    tokens: int,
    folder: Path,
    only: Sequence[str] = (),
) -> list[Trained]:
    """A drafter of each kind that has a format, in a folder of its name.

    Args:
        prompts, tokens: what the drafters learn: the target's answers, of so many tokens.
        only: kinds to make; all unless given.
    """
    answers = []
    for prompt in prompts:
        answers.append(generate(target, None, prompt, max_new_tokens=tokens).tokens)
    batch = answered(prompts, answers)
    made = []
    kinds = [kind for kind in only or shipped_kinds() if shipping(kind).formats]
    with (
        Progress("training tiny drafters", len(kinds), "kinds") as progress,
        torch.random.fork_rng(),
    ):
        for kind in kinds:
            torch.manual_seed(1)
            with contextlib.redirect_stdout(io.StringIO()):  # what it copied
                drafter = kind_class(kind).begin(target, "target", dict(shipping(kind).tiny), "kl")
            assert isinstance(drafter, TrainableDrafter), "kinds without weights have no formats"
            drafter.bind(target)
            _learn(drafter, target, batch)
            drafter.save_pretrained(folder / kind)
            made.append(find_drafter(str(folder / kind)))
            progress.advance(note=kind)
    return made


def answered(prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Batch:
    """The answers behind their prompts, padded on their right."""
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        rows.append(torch.tensor(prompt + answer))
    lengths = torch.tensor([len(row) for row in rows])  # [b]
    begins = torch.tensor([len(prompt) for prompt in prompts])  # [b]
    places = torch.arange(int(lengths.max()))  # [s]
    # The response, which losses read.
    mask = (places >= begins[:, None]) & (places < lengths[:, None])  # [b, s]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # [b, s]
    return Batch(ids, lengths, mask, torch.full((len(rows),), -1))


def _learn(drafter: TrainableDrafter, target: Target, batch: Batch) -> None:
    source = TargetSource(target, drafter.feature_layers, drafter.kept_ids)
    anchors = len(anchors_by_depth(batch.response_mask, 1)[0])
    inputs = step_inputs(batch, target, source, total=anchors, measure=False)
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    learner: Learner[StepInputs] = Learner(
        model=drafter,
        optimizer=torch.optim.AdamW(trained, lr=_RATE),
        loss=lambda given: drafter(given).loss,
    )
    for _ in take_steps(learner, [[inputs]] * _STEPS):
        pass
    drafter.eval()
