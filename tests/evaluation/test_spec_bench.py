from __future__ import annotations

import json

import pytest
import torch

from drafttrain.errors import UserError
from drafttrain.evaluation.spec_bench import committed, forward_function
from drafttrain.inference import SamplingParams, Stats
from tests.conftest import make_target


class Inputs(dict):
    """What `tokenizer(..., return_tensors="pt").to(device)` gives: keys that are also attributes."""

    __getattr__ = dict.__getitem__


@torch.inference_mode()
def spec_bench_loop(
    model, tokenizer, forward_func, questions, max_new_tokens, num_choices=1, **kwargs
):
    """What evaluation/eval.py does with the function: conversations turn by turn, seeds per choice, the record kept."""
    model.eval()
    rows = []
    for question in questions:
        choices = []
        for index in range(num_choices):
            torch.manual_seed(index)
            text = ""
            choice = {
                "index": index,
                "turns": [],
                "decoding_steps": [],
                "new_tokens": [],
                "accept_lengths": [],
            }
            for turn in question["turns"]:
                text += f"USER: {turn} ASSISTANT: "
                inputs = tokenizer([text], return_tensors="pt")
                output_ids, new_token, step, accept_lengths = forward_func(
                    Inputs(inputs), model, tokenizer, max_new_tokens, **kwargs
                )
                answer = output_ids[0][len(inputs.input_ids[0]) :]
                assert len(answer) == int(new_token)
                assert (
                    output_ids[0][: len(inputs.input_ids[0])].tolist()
                    == inputs.input_ids[0].tolist()
                )
                output = tokenizer.decode(answer)
                choice["turns"].append(output)
                choice["decoding_steps"].append(int(step))
                choice["new_tokens"].append(int(new_token))
                choice["accept_lengths"].extend(accept_lengths)
                text += output
            choices.append(choice)
        rows.append(
            json.loads(json.dumps({"question_id": question["question_id"], "choices": choices}))
        )
    return rows


QUESTIONS = [
    {"question_id": 1, "turns": ["one two one two", "again"]},
    {"question_id": 2, "turns": ["aaaa aaaa"]},
]


@pytest.fixture
def parts():
    target = make_target()
    return target.model, target.tokenizer


@pytest.mark.thorough
def test_our_decoder_runs_in_their_loop(parts):
    model, tokenizer = parts
    drafted = spec_bench_loop(
        model, tokenizer, forward_function(model, tokenizer, "ngram", tree="chain:3"), QUESTIONS, 24
    )
    plain = spec_bench_loop(
        model, tokenizer, forward_function(model, tokenizer, "none"), QUESTIONS, 24
    )
    for ours, theirs in zip(drafted, plain, strict=True):
        (choice,), (baseline,) = ours["choices"], theirs["choices"]
        assert choice["turns"] == baseline["turns"]
        assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
        assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) - len(choice["turns"])
        assert set(baseline["accept_lengths"]) == {1}
    lengths = [length for row in drafted for length in row["choices"][0]["accept_lengths"]]
    assert max(lengths) > 1, "nothing was accepted, so the test shows nothing"


def test_choices_follow_the_seed_of_the_loop(parts):
    model, tokenizer = parts
    forward = forward_function(model, tokenizer, "none", sampling=SamplingParams(temperature=5.0))
    first, second = (
        spec_bench_loop(model, tokenizer, forward, QUESTIONS[1:], 16, num_choices=2)
        for _ in range(2)
    )
    assert first == second
    assert first[0]["choices"][0]["turns"] != first[0]["choices"][1]["turns"]


def test_padding_is_no_prompt_and_batches_are_refused(parts):
    model, tokenizer = parts
    forward = forward_function(model, tokenizer, "none")
    ids = tokenizer("hello there", return_tensors="pt").input_ids
    padded = torch.cat((torch.full((1, 3), 257), ids), dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    alone, *_ = forward(Inputs(input_ids=ids), model, tokenizer, 8)
    beside, *_ = forward(Inputs(input_ids=padded, attention_mask=mask), model, tokenizer, 8)
    assert beside[0, padded.shape[1] :].tolist() == alone[0, ids.shape[1] :].tolist()
    with pytest.raises(UserError, match="2 rows"):
        forward(Inputs(input_ids=ids.repeat(2, 1)), model, tokenizer, 8)


@pytest.mark.parametrize(
    ("accepted", "new_tokens", "lengths"),
    [
        ([2, 0, 1], 7, [3, 1, 2]),
        ([2, 2], 6, [3, 2]),
        ([], 1, []),
    ],  # the second: EOS was the last drafted token
)
def test_lengths_of_rounds(accepted, new_tokens, lengths):
    stats = Stats(
        new_tokens=new_tokens, accepted=accepted, offered=accepted, target_passes=len(accepted)
    )
    assert committed(stats) == lengths
