"""The contract that every kind keeps: a target, overfitted drafters of each kind, and checks of both halves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from drafttrain.batch import Batch, TokenTree, anchors_by_depth
from drafttrain.config import TrainConfig
from drafttrain.drafters.base import Session, StepInputs
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import kind_class, kinds
from drafttrain.inference import SamplingParams, generate_batch
from drafttrain.ops.sampling import Sampler
from drafttrain.states.source import TargetSource
from drafttrain.target import Target
from drafttrain.train import build_drafter
from tests.conftest import has_gpu, make_target
from tests.drafters import helpers

KINDS = kinds()
TRAINED = [kind for kind in KINDS if kind_class(kind).trainable]
# What a kind cannot do without, or what its default makes large; all others are built from their defaults.
NEEDED: dict[str, dict[str, Any]] = {
    "draft_model": {"layers": [0, 3]},
    "domino": {"gru_hidden_dim": 32, "emb_dim": 16},
}
PROMPTS = ([5, 9, 11, 9, 11, 30, 2, 9, 11, 4], [7, 8, 7, 8, 7], [60, 3, 90, 14, 15, 92, 65])
NEW = 14
MOST_STEPS = 300


@functools.cache
def the_target(packed: bool = False) -> Target:
    """The same model for training, and packed for decoding."""
    # FlexAttention's kernels need heads of at least 16 numbers; other tests are quicker with 8.
    target = make_target(layers=4, hidden=64 if has_gpu() else 32, vocab_size=300)
    return target.pack() if packed else target


@functools.cache
def answers() -> list[list[int]]:
    """The target's own greedy continuations of the prompts."""
    made = generate_batch(the_target(packed=True), None, PROMPTS, max_new_tokens=NEW, eos_ids=())
    return [generation.tokens for generation in made]


def rows_of(sequences: list[tuple[list[int], list[int]]]) -> Batch:
    """A batch of (prompt, response) pairs."""
    lengths = [len(prompt) + len(answer) for prompt, answer in sequences]
    ids = torch.zeros(len(sequences), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(sequences):
        ids[row, : lengths[row]] = torch.tensor([*prompt, *answer])
        mask[row, len(prompt) : lengths[row]] = True
    return Batch(ids, torch.tensor(lengths), mask, torch.full((len(sequences),), -1))


def build(kind: str, loss: str = "kl") -> Any:
    config = TrainConfig(kind=kind, loss=loss, drafter=dict(NEEDED.get(kind, {})))
    records = [
        {"tokens": [*prompt, *answer], "spans": [[len(prompt), len(prompt) + len(answer)]]}
        for prompt, answer in zip(PROMPTS, answers(), strict=True)
    ]
    return build_drafter(config, the_target(), records)[0]


def inputs_of(drafter: Any, batch: Batch) -> StepInputs:
    """What the trainer gives a drafter."""
    source = TargetSource(the_target(), drafter.feature_layers, drafter.kept_ids)
    count = len(anchors_by_depth(batch.response_mask, 1)[0])
    return StepInputs(batch, the_target().embed(batch.input_ids), *source(batch), total=count)


@torch.no_grad()
def metrics_of(drafter: Any, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    return drafter(inputs_of(drafter, rows_of([(prompt, answer)]))).metrics


def learned(steps: list[Any]) -> bool:
    first = steps[0]
    last = steps[-1]
    return bool(
        last.loss < 0.3 * first.loss and last.metrics["agree"][0] > 0.7 * last.metrics["count"][0]
    )


@functools.cache
def overfitted(kind: str) -> tuple[Any, list[Any], dict[str, float]]:
    """A drafter that has seen one batch many times, its steps, and each parameter's gradient summed over the first ones."""
    torch.manual_seed(0)
    drafter = build(kind).train()
    inputs = inputs_of(drafter, rows_of(list(zip(PROMPTS, answers(), strict=True))))
    trainable = {name: value for name, value in drafter.named_parameters() if value.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-2, weight_decay=0.0)
    steps = []
    seen = dict.fromkeys(trainable, 0.0)
    for number in range(MOST_STEPS):
        optimizer.zero_grad()
        step = drafter(inputs)
        step.loss.backward()
        if (
            number < 3
        ):  # a factor that starts as zero keeps the other one's gradient from it for a step
            for name, value in trainable.items():
                assert value.grad is not None, f"{name} has no gradient"
                seen[name] += float(value.grad.abs().sum())
        optimizer.step()
        steps.append(step)
        if number >= 10 and learned(steps):
            break
    return drafter.eval(), steps, seen


def session_at(drafter: Any, prompt: list[int], root: int) -> Any:
    """A session behind `prompt`, whose last committed token is `root`."""
    ids = torch.tensor(prompt)
    session = drafter.start(ids, 128)
    features = the_target().forward(ids[None], drafter.feature_layers).features[0]
    session.extend(torch.tensor([*prompt[1:], root]), features)
    return session


def check_tree(tree: TokenTree, spec: TreeSpec) -> None:
    helpers.check_tree(tree, spec, tolerance=1e-5)
    assert tree.tokens.shape == (len(tree),) and tree.tokens.dtype == torch.long
    assert all(0 <= token < the_target().vocab_size for token in tree.tokens.tolist())
    if spec.shape == "dynamic":
        for parent in {-1, *range(len(tree))}:
            assert tree.parents.count(parent) <= spec.top_k


def check_overfitting(kind: str) -> None:
    """One batch is overfitted, with a gradient on every parameter."""
    _, steps, gradients = overfitted(kind)
    assert gradients
    for name, total in gradients.items():
        assert 0 < total < float("inf"), f"{name}: {total}"
    for step in steps:
        assert step.loss.isfinite() and all(
            step.metrics[name].isfinite().all() for name in ("count", "loss", "alpha", "agree")
        )
    assert learned(steps), (
        f"after {len(steps)} steps: {steps[0].loss} -> {steps[-1].loss}, {steps[-1].metrics}"
    )


def check_depths(kind: str, decoder: Any) -> None:
    """Training step k computes what decoding computes at depth k.

    Both score the same paths: -log q of the last token, by the loss and by the proposal that the token was drawn from.
    """
    trainer = build(kind, loss="ce").eval()
    trainer.load_state_dict(overfitted(kind)[0].state_dict())
    prompt = list(PROMPTS[0])
    root = answers()[0][0]
    session = session_at(decoder, prompt, root)
    compare_depths(decoder, session, root, lambda answer: metrics_of(trainer, prompt, answer))


def compare_depths(
    decoder: Any,
    session: Session,
    root: int,
    metrics_of: Callable[[list[int]], dict[str, torch.Tensor]],
    tree: str = "fanout:2x1x1@sample",
) -> None:
    """Compares a session's tree with training steps on its paths.

    Args:
        decoder: the session's drafter. session: behind a prompt, whose last committed token is `root`.
        metrics_of: a step's metrics on the prompt with an answer.
    """
    spec = TreeSpec.parse(tree)
    sampler = Sampler(SamplingParams(temperature=1.0), torch.Generator().manual_seed(1))
    drafted = session.propose(spec, sampler)
    check_tree(drafted, spec)
    assert drafted.drafted_depth >= 1
    paths: list[list[int]] = []
    compared = set()
    for node, (parent, token) in enumerate(
        zip(drafted.parents, drafted.tokens.tolist(), strict=True)
    ):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
        depth = len(paths[-1])
        # A path ends in one more token, which nothing but the mask needs; the anchor is the prompt's last position.
        metrics = metrics_of([root, *paths[-1]])
        if len(metrics["loss"]) < depth:
            continue  # drafted deeper than trained
        assert metrics["count"][depth - 1] == 1
        drafter_id = (decoder.kept_ids == token).nonzero().item()
        if drafted.proposal is not None:
            log_q = drafted.proposal.probs[drafted.proposal.rows[node], drafter_id].log()
        elif parent < 0:
            log_q = drafted.log_probs[node]
        else:
            log_q = drafted.log_probs[node] - drafted.log_probs[parent]
        torch.testing.assert_close(metrics["loss"][depth - 1], -log_q, rtol=2e-3, atol=2e-3)
        compared.add(depth)
    assert compared == set(range(1, 1 + min(drafted.drafted_depth, len(metrics["loss"]))))
