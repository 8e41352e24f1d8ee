"""Medusa, Hydra and the MLP speculator: gradients, starts, trees, and the parity of training with decoding."""

from __future__ import annotations

import pytest
import torch

from drafttrain.batch import Batch
from drafttrain.cli import main
from drafttrain.data.store import FeatureStore, Store
from drafttrain.drafters.common.path_heads import likeliest_paths
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import default_tree, load_drafter
from drafttrain.inference import generate
from tests.drafters.helpers import (
    check_gradients,
    make_batch,
    make_heads,
    run_step,
    source_of,
)
from tests.drafters.layer_kinds import check_packed_rows, check_parity
from tests.training.runs import write_data, write_recipe

# Every option of every kind, each away from its default at least once.
FORMS = [
    ("medusa", {}),
    ("medusa", {"blocks": 2, "shared_head": True, "num_heads": 3}),
    ("hydra", {}),
    ("hydra", {"blocks": 2, "shared_head": True, "num_heads": 3}),
    ("mlp_speculator", {}),
    (
        "mlp_speculator",
        {"tie_weights": True, "scale_input": False, "inner_dim": 24, "n_predict": 4},
    ),
    ("mlp_speculator", {"inner_dim": 48, "n_predict": 1, "tie_weights": True}),
]
KINDS = ["medusa", "hydra", "mlp_speculator"]
every_form = pytest.mark.parametrize(("kind", "options"), FORMS)
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "options"), [form for form in FORMS if form[1]])
def test_every_parameter_gets_a_finite_gradient(target, kind, options):
    drafter = make_heads(target, kind, spread=0.0, **options)
    step = run_step(drafter, target, make_batch())
    step.loss.backward()
    check_gradients(drafter)
    assert step.metrics["count"].shape == (drafter.depths,)


@every_form
def test_training_step_k_is_what_the_decoder_computes_at_depth_k(target, kind, options):
    drafter = make_heads(target, kind, **options)
    kept = torch.arange(40, 240)
    check_parity(lambda: make_heads(target, kind, kept, **options), target, drafter.depths)


def test_depth_k_is_aligned_with_the_target_two_tokens_beyond_the_anchor(target):
    """A Medusa at its start says at every depth what the target's head says at the anchor itself."""
    drafter = make_heads(target, "medusa", spread=0.0, num_heads=2)
    batch = make_batch((9,))
    output = target.forward(batch.input_ids, drafter.feature_layers)
    assert torch.equal(output.features, output.last_hidden)
    p = target.head(output.last_hidden)[0].log_softmax(-1)
    for k, (at, state) in enumerate(drafter.walk(batch, output.features)):
        anchors = at - 1 - k
        torch.testing.assert_close(drafter.logits(state, k).log_softmax(-1), p[anchors])
        assert batch.response_mask[0, anchors + 1].all() and batch.response_mask[0, at + 1].all()
    loss = [(p[3 + k : 7].exp() * (p[3 + k : 7] - p[2 : 6 - k])).sum() for k in (0, 1)]
    step = run_step(
        drafter, target, Batch(batch.input_ids, batch.lengths, _only(9, 3, 8), batch.index)
    )
    torch.testing.assert_close(step.metrics["loss"], torch.stack(loss), rtol=1e-3, atol=1e-3)


def _only(length, start, end):
    mask = torch.zeros(1, length, dtype=torch.bool)
    mask[:, start:end] = True
    return mask


@every_kind
def test_packed_rows_and_padding_change_nothing(target, kind):
    check_packed_rows(make_heads(target, kind), target)


@every_kind
def test_least_squares_improves_the_start(target, kind):
    """Tokens that repeat with a period of three: what comes is told by what was."""
    ids = torch.arange(3).repeat(20)[None] + torch.tensor([[40], [90], [130], [170]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    batch = Batch(ids, torch.full((4,), 60), mask, torch.arange(4))
    drafter = make_heads(target, kind, torch.arange(30, 250), spread=0.0)
    before = run_step(drafter, target, batch).loss
    source = source_of(target, drafter)
    explained = drafter.solve_start([batch], source)
    after = run_step(drafter, target, batch).loss
    assert 0.5 < explained <= 1 and after < 0.5 * before
    short = Batch(ids[:, :5], torch.full((4,), 5), mask[:, :5], torch.arange(4))
    drafter.solve_start([short], source)
    assert all(parameter.isfinite().all() for parameter in drafter.parameters())


def test_likeliest_paths_are_those_of_highest_product():
    shares = torch.tensor([[0.5, 0.2, 0.1], [0.4, 0.3, 0.0], [0.3, 0.05, 0.1]])
    every = {}
    for a in range(3):
        every[(a,)] = shares[0, a]
        for b in range(2):
            every[(a, b)] = shares[0, a] * shares[1, b]
            for c, last in enumerate((0.3, 0.05, 0.05)):  # rank 2 never goes before rank 1
                every[(a, b, c)] = shares[0, a] * shares[1, b] * last
    for nodes in (1, 5, 12):
        found = likeliest_paths(shares, nodes)
        assert len({*found}) == nodes
        best = sorted(map(float, every.values()), reverse=True)[:nodes]
        assert [float(every[path]) for path in found] == pytest.approx(best)
    assert len(likeliest_paths(shares, 1000)) == len(every)
    assert likeliest_paths(torch.zeros(2, 3), 5) == []


@pytest.mark.parametrize("kind", ["medusa", "mlp_speculator"])
def test_the_default_tree_follows_what_is_right_on_held_out_data(target, kind):
    drafter = make_heads(target, kind, spread=0.05, tree_nodes=7)
    batch = make_batch((20, 20))
    source = source_of(target, drafter)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-2)
    for _ in range(40):
        optimizer.zero_grad()
        run_step(drafter, target, batch).loss.backward()
        optimizer.step()
    spec = TreeSpec.parse(drafter.suggest_tree([batch], source))
    # What was learned by heart is right at the first rank: the longest chain comes first.
    assert spec.shape == "paths" and len(spec.paths) <= 7
    assert {(0,) * depth for depth in range(1, drafter.depths + 1)} <= {*spec.paths}


def test_stored_last_states_serve_without_the_target(target, tmp_path):
    """Every data set with features has them, whatever layers it stores."""
    features = torch.randn(5, 64)
    last = torch.randn(5, 32)
    meta = {
        "target": target.identity(),
        "sampling": {},
        "features": {"layers": [1, 2], "dtype": "float32"},
    }
    with Store(tmp_path, meta) as store:
        record = {
            "id": "a",
            "tokens": [1, 2, 3, 4, 5, 6],
            "spans": [[2, 6]],
            "finish": ["stop"],
            "source": "test",
        }
        store.add([record], [{"features": features, "last_hidden": last}])
    drafter = make_heads(target, "medusa")
    found = FeatureStore.open(tmp_path, drafter.feature_layers).get("a")
    assert torch.equal(found["features"].float(), last) and torch.equal(
        found["last_hidden"].float(), last
    )
    both = FeatureStore.open(tmp_path, (2, *drafter.feature_layers)).get("a")["features"]
    assert torch.equal(both.float(), torch.cat((features[:, 32:], last), dim=-1))


@pytest.mark.thorough
def test_a_training_run_starts_by_least_squares_and_leaves_a_tree(
    target, target_dir, tmp_path, capsys
):
    drafter = {"draft_vocab_size": 255, "num_heads": 2, "tree_nodes": 5}
    data = write_data(tmp_path / "data", target)
    words = write_recipe(
        tmp_path, target_dir, data, kind="medusa", drafter=drafter, decode_prompts=0
    )
    assert main(["train", *words]) == 0
    out = capsys.readouterr().out
    assert "least-squares start" in out and "default tree" in out
    folder = str(tmp_path / "drafter")
    assert TreeSpec.parse(default_tree(folder)).shape == "paths"
    drafter = load_drafter(folder, target)
    plain = generate(target, None, [40, 41, 42], max_new_tokens=10).tokens
    spec = TreeSpec.parse(default_tree(folder))
    assert generate(target, drafter, [40, 41, 42], spec=spec, max_new_tokens=10).tokens == plain
