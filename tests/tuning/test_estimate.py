from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from drafttrain import cli
from drafttrain.errors import UserError
from drafttrain.tuning.estimate import (
    Device,
    Profile,
    Sizes,
    advice,
    break_even,
    drafter_params,
    estimate,
    profile_of,
)
from drafttrain.tuning.plan_recipe import read_config
from tests.evaluation.records import prompt, results_of
from tests.files import dump_json, load_json

# 1 GB/s, 10 GFLOP/s, no overhead: a weight of 1 byte takes 1 ns to read and 0.2 ns a token to compute
SLOW = Device("slow", 1e9, 1e10, 1e12, 0.0)


def test_a_pass_is_bound_by_bytes_and_then_by_operations():
    model = Sizes(1e9)
    assert model.seconds(SLOW, 1, 1, 0, 1.0) == 1.0
    assert model.seconds(SLOW, 5, 5, 0, 1.0) == 1.0
    assert model.seconds(SLOW, 50, 50, 0, 1.0) == 10.0
    cached = Sizes(1e9, kv=1e5)
    assert cached.seconds(SLOW, 1, 1, 10_000, 1.0) == 2.0


def test_experts_are_read_as_tokens_ask_for_them():
    model = Sizes(1e9, 1e9, experts=8, chosen=2)
    assert model.read(1) == 3e9
    assert model.read(2) == pytest.approx(1e9 + 8e9 * (1 - 0.75**2))
    assert model.read(1000) == pytest.approx(model.total)


def test_sizes_that_no_model_has_are_refused_before_one_is_made(tmp_path):
    path = tmp_path / "config.json"
    dump_json(path, {"model_type": "llama", "num_hidden_layers": 10**9})
    with pytest.raises(UserError, match="target='t': num_hidden_layers=1000000000 in"):
        read_config("t", str(path), "target", "give it")


def test_a_drafters_weights_are_counted(tmp_path):
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "model.safetensors")
    assert drafter_params(tmp_path) == 17


def test_the_speed_up_by_hand():
    profile = Profile((0.6, 0.4), nodes=2)
    got = estimate(Sizes(1e9), 1e8, profile, SLOW, 1, 0, 1.0, price=3.6)
    # a round reads the target once and the drafter twice; two tokens more are free
    assert (got["length"], got["accepted_length"], got["bound"]) == (2, 2.0, "memory")
    assert got["speedup"] == pytest.approx(2.0 / 1.2, abs=1e-4)
    assert got["cost_per_million_tokens"] == pytest.approx(3.6 / 3600 / (2.0 / 1.2) * 1e6, abs=1e-3)
    assert got["plain_cost_per_million_tokens"] == pytest.approx(1000.0)
    assert got["break_even"] == pytest.approx(0.1708, abs=1e-3)  # 1 + a + a^2 = 1.2
    large = estimate(Sizes(1e9), 1e8, profile, SLOW, 64, 0, 1.0, price=None)
    assert (large["length"], large["speedup"]) == (0, 1.0)
    assert "cost_per_million_tokens" not in large
    assert "from batch size 64 on" in advice([got, large])
    assert advice([large]).endswith(
        "does not pay at batch size 64, the only one: disable it from batch size 64 on"
    )
    odd = [
        {**got, "batch_size": size, "speedup": speedup}
        for size, speedup in ((1, 1.4), (4, 0.9), (16, 1.2))
    ]
    assert "starts paying between batch size 4 and 16: disable it at 4; elsewhere" in advice(odd)


@pytest.mark.parametrize(
    ("need", "length", "rate"), [(1.0, 3, 0.0), (1.5, 1, 0.5), (4.0, 3, 1.0), (4.1, 3, None)]
)
def test_break_even(need, length, rate):
    assert break_even(need, length) == (None if rate is None else pytest.approx(rate, abs=1e-3))


def test_the_profile_is_what_was_measured():
    results = results_of([prompt(accepted=1, offered=2)])
    results["decoding"]["tree"] |= {"depth": 2, "budget": 8}
    assert profile_of(results) == Profile((1.0, 0.0), 8)


def test_the_command(tmp_path, capsys):
    results = results_of([prompt(accepted=1, offered=2)])
    results["decoding"]["tree"] |= {"depth": 2, "budget": 2}
    dump_json(tmp_path / "r.json", results)
    arguments = [
        "estimate",
        "--results",
        str(tmp_path / "r.json"),
        "--target-params",
        "8e9",
        "--drafter-params",
        "4e8",
    ]
    assert cli.main([*arguments, "--price", "2", "--output", str(tmp_path / "e.json")]) == 0
    content = load_json(tmp_path / "e.json")
    speedups = [row["speedup"] for row in content["rows"]]
    assert speedups[0] > 1.5
    assert speedups == sorted(speedups, reverse=True)
    assert all(speedup >= 1 for speedup in speedups)
    assert content["advice"] in capsys.readouterr().out.replace("\n", " ")
    assert cli.main([*arguments, "--device", "abacus"]) == 2
    assert "device='abacus' is not one of h100" in capsys.readouterr().err
    without = [part for part in arguments if part not in ("--drafter-params", "4e8")]
    assert cli.main(without) == 2
    assert "give --drafter FOLDER or --drafter-params" in capsys.readouterr().err
