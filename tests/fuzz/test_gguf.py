"""Damaged GGUF files of drafters: `drafttrain verify` reads them back or reports one line."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.drafters.shipping import GGUF_NAME, ExportRequest, check_expressible, find_drafter
from drafttrain.target import Target
from tests.drafters.layer_kinds import make_kind
from tests.formats.checkpoints import make_checkpoint
from tests.fuzz import file_faults, fuzz, outcome, seeds

KINDS = {
    "eagle3": {"kept": torch.arange(20, 290)},
    "dspark": {"kept": torch.arange(20, 290), "markov_rank": 8},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Per kind: a trained drafter, its folder of the export and the file's content."""
    folder = tmp_path_factory.mktemp("files")
    made = {}
    make_checkpoint(folder / "target", "llama", num_hidden_layers=4)
    target = Target.load(str(folder / "target"), "float32", "cpu")
    for kind, options in KINDS.items():
        make_kind(kind, target, feature_layers=(1, 2, 3), shake=True, **options).save_pretrained(
            folder / kind
        )
        trained = find_drafter(str(folder / kind))
        out = folder / f"{kind}-out"
        check_expressible(trained, "gguf").write(trained, "gguf", ExportRequest(out, torch.float32))
        made[kind] = trained, out, (out / GGUF_NAME).read_bytes()
    return made


@pytest.mark.thorough
@fuzz(examples=15)
@given(kind=st.sampled_from(sorted(KINDS)), fault=file_faults(), seed=seeds(), head=st.booleans())
def test_a_damaged_file(files, kind, fault, seed, head):
    trained, out, content = files[kind]
    # Keys are at the beginning, before the tokenizer's lists; faults in them say more than faults in weights.
    parts = (content[:1500], content[1500:]) if head else (content, b"")
    (out / GGUF_NAME).write_bytes(fault.apply(parts[0], Random(seed)) + parts[1])
    outcome(
        "draft.gguf", fault.name, lambda: check_expressible(trained, "gguf").check(trained, out)
    )
