"""Values of the Python API: each argument with wrong and with unusual values gives text and tokens, or one line of UserError."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafttrain import evaluate, generate, load_drafter, stream
from drafttrain.ops.sampling import SamplingParams
from tests.conftest import make_target
from tests.fuzz import WRONG_VALUES, fuzz, outcome

VALUES = [(name, value) for name, values in WRONG_VALUES.items() for value in values]
NUMBERS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "batch_size",
)
OTHERS = ("stop", "category", "tree", "drafter")
IDS = [5, 6, 7]


@pytest.fixture(scope="module")
def tiny():
    return make_target(layers=1, hidden=16)


@fuzz(examples=60)
@given(name=st.sampled_from((*NUMBERS, *OTHERS)), fault=st.sampled_from(VALUES))
def test_arguments(tiny, name, fault):
    options = {"max_new_tokens": 2, name: fault[1]}
    if name == "max_new_tokens" and isinstance(fault[1], int) and fault[1] > 1000:
        return  # a length that is valid
    outcome(
        "API",
        fault[0],
        lambda: generate(tiny, IDS, **{"drafter": "ngram", "tree": "chain:2", **options}),
    )


PROMPTS = [None, 3, 2.5, True, "", [], [[]], [""], ["a", 3], [None], [1.5, 2], [True, False], [10**30], [-1], [300], [1, None],
    [[1], [2.5]], [[1, 2], [-1]], {}, {"input_ids": None}, {"input_ids": [1, 999]}, {"a": 1}, {1, 2}, b"abc", object(),
    "\ud800", "a\0b", [{}], [{"role": "user"}],
    [{"role": 3, "content": "x"}], [{"role": "user", "content": None}],
    [{"role": "user", "content": "\ud800"}],
    torch.tensor(3), torch.tensor([1.5]), torch.tensor([[1, 2], [3, 4]]), torch.tensor([], dtype=torch.long),
    torch.zeros(2, 2, 2, dtype=torch.long),
    torch.tensor([2**40]), torch.tensor([True]), np.array([1.5]), np.array(["a"]),
    np.array([1, 2**50]), np.array([[1, 2]])]  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: type(prompt).__name__)
@pytest.mark.parametrize("call", [generate, stream])
def test_prompts(tiny, call, prompt):
    outcome(
        "API",
        "prompt",
        lambda: (
            list(call(tiny, prompt, max_new_tokens=1) or ())
            if call is stream
            else call(tiny, prompt, max_new_tokens=1)
        ),
    )


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (IDS, {"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be a whole number from 1"),
        (IDS, {"max_new_tokens": True}, "max_new_tokens=True must be"),
        (IDS, {"max_new_tokens": -1}, "max_new_tokens=-1 must be"),
        (IDS, {"seed": -1}, "seed=-1 must be a whole number from 0"),
        (IDS, {"seed": 2**70}, "seed=1180591620717411303424 must be"),
        (IDS, {"temperature": float("nan")}, "temperature=nan must be a number from 0"),
        (IDS, {"temperature": "hot"}, "temperature='hot' must be"),
        (IDS, {"temperature": 1e-30}, "temperature=1e-30 must be 0"),
        (IDS, {"top_k": 1.5}, "top_k=1.5 must be a whole number"),
        (IDS, {"batch_size": 0}, "max_rows=0 must be"),
        (IDS, {"tree": ""}, "tree='' is not a tree"),
        (IDS, {"stop": [3]}, "stop="),
        ([-1], {}, "prompt has token id -1, but target 'tiny' has 0 to "),
        ([5, 10**6], {}, "prompt has token id 1000000"),
        ([1.5], {}, "must be token ids: one list of whole numbers"),
        ([], {}, "prompt is empty"),
        (None, {}, "prompt=None must be text, token ids"),
    ],
)
def test_each_mistake_is_one_line(tiny, prompt, options, message):
    assert message in outcome(
        "API", "named", lambda: generate(tiny, prompt, **{"max_new_tokens": 2, **options})
    )


def test_numbers_of_other_libraries_are_numbers(tiny):
    want = generate(tiny, IDS, max_new_tokens=3, temperature=1.0, seed=4).tokens
    options = {
        "max_new_tokens": np.int64(3),
        "temperature": np.float32(1),
        "seed": torch.tensor(4),
        "top_p": 1,
    }
    for ids in (
        np.array(IDS),
        torch.tensor(IDS),
        [np.int64(i) for i in IDS],
        tuple(IDS),
        np.array([IDS], dtype=np.uint8),
    ):
        made = generate(tiny, ids, **options)
        assert (made[0] if isinstance(made, list) else made).tokens == want


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"])
def test_sampling_fields(field):
    for name, value in VALUES:
        outcome("API", name, lambda value=value: SamplingParams(**{field: value}))


@pytest.mark.parametrize(
    "value", [None, 3, 2.5, [], {}, "", "a\0b", "\ud800", "/no/such/folder"], ids=repr
)
def test_names(tiny, value, tmp_path):
    assert outcome("API", "model", lambda: generate(value, IDS))
    if value is not None:
        assert outcome("API", "drafter", lambda: load_drafter(value, tiny))
        assert outcome("API", "evaluate", lambda: evaluate(value, "ngram", tmp_path / "r.json"))
    for option in ("limit", "tree", "seed", "dtype", "device", "no_such_option"):
        assert outcome(
            "API",
            "evaluate",
            lambda option=option: evaluate(
                "/no/target", "ngram", tmp_path / "r", **{option: value}
            ),
        )
