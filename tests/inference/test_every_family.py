"""Every causal language model that the installed transformers has: proven equal when it is wrapped, or one line of error."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.inference import generate
from tests.inference.any_family import FAMILIES, PROMPT, VARIANTS, build, wrapped
from tests.inference.fakes import ANY, FakeDrafter


def outcome_of(model, name):
    """'packed' or 'snapshot', or the line of the refusal; asserts that what was accepted decodes as the model itself computes."""
    model.generation_config.forced_eos_token_id = None  # BART's rule for the last token
    with torch.no_grad():
        own = model(input_ids=PROMPT[None], use_cache=False).logits
    target, line = wrapped(model, name)
    if target is None:
        assert len(line.splitlines()) == 1
        return line
    ours = target.head(target.forward(PROMPT[None], ()).last_hidden)
    assert (ours - own).norm() <= 1e-3 * own.norm()
    plain = generate(
        target, None, PROMPT.tolist(), max_new_tokens=12, spec=TreeSpec.parse("none"), eos_ids=()
    ).tokens
    read = torch.cat((PROMPT, torch.tensor(plain)))[None]
    with torch.no_grad():
        again = model(input_ids=read, use_cache=False).logits[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert again.tolist() == plain
    for packed in (False, True):
        drafter = FakeDrafter(plain, 0.6, nodes=16, seed=1)
        got = generate(target, drafter, PROMPT.tolist(), max_new_tokens=12, spec=ANY, eos_ids=())
        assert got.tokens == plain, packed
        target.pack()
    return target.decoding_path


@pytest.mark.parametrize(
    "name",  # DeepSeek-V2 rotates by one complex tensor, where others have cosines and sines
    [
        pytest.param(name, marks=() if name == "deepseek_v2" else pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_a_family_is_proven_or_refused(name):
    built = 0
    for more in VARIANTS.values():
        try:
            model = build(FAMILIES[name], more)
        except Exception:
            continue  # sizes that this family does not take together
        built += 1
        outcome_of(model, name)
    if not built:
        pytest.skip("no variant of the sizes makes a model")
