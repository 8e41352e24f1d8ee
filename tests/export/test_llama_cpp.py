"""llama.cpp itself on exported files: targets of every family that is written, tiny drafters, and rules for cutting text.

LLAMA_PYTHON names the interpreter of an environment with xllamacpp (pip install xllamacpp==2026.10.11549).
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drafttrain.batch import Batch
from drafttrain.drafters.registry import load_drafter
from drafttrain.drafters.shipping import ExportRequest, check_expressible, find_drafter
from drafttrain.export import engine_runs
from drafttrain.formats.gguf_tokenizer import RULES
from drafttrain.formats.write_gguf import write_gguf
from drafttrain.inference import generate
from drafttrain.target import Target
from tests import engine_arithmetic
from tests.drafters.helpers import run_step
from tests.drafters.layer_kinds import make_kind
from tests.formats.checkpoints import ROPE, make_checkpoint

SIDE = Path(engine_arithmetic.__file__).with_name("llama_tokens_side.py")
PYTHON = os.environ.get("LLAMA_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="LLAMA_PYTHON is not set")]
KEPT = torch.arange(20, 290)
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "eagle3", {}),
    ("llama3", "eagle3", {"norm_before_residual": True, "kept": KEPT}),
    ("qwen3", "eagle3", {"qk_norm": False, "kept": KEPT}),
    ("llama", "eagle3", {"feature_layers": (3, 0, 2), "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 2.0}}),
    ("llama", "dflash", {"mask_token_id": 7}),
    ("llama", "dflash", {"feature_layers": (0, 3, 1, 2), "kept": KEPT, "num_hidden_layers": 3}),
    ("qwen3", "dflash", {"mask_token_id": 7, "train_head": True, "kept": KEPT, "block_size": 4}),
    ("llama", "dspark", {"kept": KEPT, "markov_rank": 8}),
    ("qwen3", "dspark", {"mask_token_id": 7, "markov_rank": 16, "block_size": 5}),
    ("llama", "dspark", {"mask_token_id": 7, "markov_rank": 8, "block_size": 4, "sample_from_anchor": True}),
    # A file names at most 5 candidates of states of 32: ours rescore as many.
    ("llama", "dflash2", {"kept": KEPT, "markov_rank": 8, "selector_top_k": 5}),
    ("qwen3", "dflash2", {"mask_token_id": 7, "markov_rank": 16, "selector_top_k": 4, "block_size": 5,
                          "conv_kernel_size": 3, "conv_group_size": 8}),
    ("llama", "dflash", {"mask_token_id": 7, "sliding_window": 12}),
    ("llama", "dflash2", {"mask_token_id": 7, "markov_rank": 8, "selector_top_k": 5, "sliding_window": 12}),
    ("llama", "dflash", {"mask_token_id": 7, "sliding_window": 12, "num_hidden_layers": 3,
                         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
]  # fmt: skip


def learn(drafter, target, prompts, texts, steps=80):
    """Trains a drafter on the target's answers, so that llama.cpp accepts tokens at every depth."""
    rows = [torch.tensor(prompt + text) for prompt, text in zip(prompts, texts, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    places = torch.arange(ids.shape[1])
    begins = torch.tensor([len(prompt) for prompt in prompts])
    mask = (places >= begins[:, None]) & (places < lengths[:, None])
    batch = Batch(ids, lengths, mask, torch.full((len(rows),), -1))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        run_step(drafter.train(), target, batch).loss.backward()
        optimizer.step()
    drafter.eval()


@pytest.mark.parametrize(("family", "kind", "options"), CASES)
def test_every_round_is_ours(tmp_path, family, kind, options):
    make_checkpoint(tmp_path / "hf", family, num_hidden_layers=4, max_position_embeddings=512)
    target = Target.load(str(tmp_path / "hf"), "float32", "cpu")
    made = torch.Generator().manual_seed(5)
    prompts = [torch.randint(20, 250, (size,), generator=made).tolist() for size in (5, 17, 33)]
    texts = [generate(target, None, prompt, max_new_tokens=128).tokens for prompt in prompts]
    drafter = make_kind(kind, target, **{"shake": True, "feature_layers": (1, 2, 3), **options})
    learn(drafter, target, prompts, texts)
    drafter.save_pretrained(tmp_path / "drafter")
    trained = find_drafter(str(tmp_path / "drafter"))
    shipped = check_expressible(trained, "gguf")
    shipped.write(trained, "gguf", ExportRequest(tmp_path / "out", torch.float32))
    assert shipped.check(trained, tmp_path / "out")["same_tokens"]
    job = engine_runs.EngineJob(
        trained=trained,
        target=target,
        target_name=target.path,
        dtype="float32",
        prompts=prompts,
        tokens=128,
        depth=shipped.block_depth(trained) or 3,
        scratch=tmp_path,
    )
    theirs = engine_runs.RUNS["llama.cpp"].run(job, tmp_path / "out", PYTHON)
    loaded = load_drafter(str(tmp_path / "drafter"), target)
    assert loaded is not None
    mine = engine_runs.ours(job, loaded)
    print(
        kind,
        mine["accepted_length"],
        theirs["accepted_length"],
        theirs["accepted"],
        theirs["offered"],
    )
    assert theirs["tokens"] == mine["tokens"] == texts
    assert theirs["accepted_length"] == pytest.approx(mine["accepted_length"], rel=0.02)
    assert mine["accepted_length"] > 1.3


@pytest.mark.parametrize("parts", list(RULES), ids=RULES.get)
def test_text_is_cut_as_the_tokenizer_cuts_it(tmp_path, parts):
    """Every pair of neighboring bytes of the text is a merge, so a cut elsewhere gives other tokens."""
    text = "Hello  WORLDly iPhone's I'LL x1234567 3.14\n\n  def f(a,b):\n\treturn a/b //\n été ÉTÉ naïve 中文字 ... !?\n"
    if RULES[parts] not in (
        "tekken",
        "gpt-4o",
    ):  # llama.cpp's own forms of these two take no combining marks into words
        text += " नमस्ते"
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        text
    )[0][0]
    pairs = list(dict.fromkeys(pairwise(symbols)))
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in pairs:
        vocab.setdefault(left + right, len(vocab))
    raw = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    named = {
        "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "digits": pre_tokenizers.Digits(individual_digits=True),
    }
    steps = [named.get(part) or pre_tokenizers.Split(Regex(part), "isolated") for part in parts]
    if parts[-1] != "bytes":
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    raw.pre_tokenizer = pre_tokenizers.Sequence(steps)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    make_checkpoint(tmp_path / "hf", "llama", tokenizer, vocab_size=len(tokenizer))
    file = write_gguf(tmp_path / "hf", tmp_path / "m.gguf", "float32")
    job = {"target": str(file), "text": text}
    assert (
        engine_runs.run_side(PYTHON, SIDE, job, dict(os.environ))["tokens"]
        == tokenizer(text).input_ids
    )
