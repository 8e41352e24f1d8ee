"""What every kind with decoder layers must hold; `make(**options)` gives a fresh drafter of the kind, bound to the target."""

from __future__ import annotations

import torch

from drafttrain.batch import Batch
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.registry import kind_class, load_drafter
from drafttrain.inference import SamplingParams, generate
from drafttrain.ops.sampling import Sampler
from tests.drafters.helpers import (
    check_gradients,
    make_batch,
    packed_batch,
    run_step,
    source_of,
)


def make_kind(kind, target, kept=None, shake=False, **options):
    """A drafter as train.py begins one; shake: with norms and biases that matter."""
    torch.manual_seed(3)
    kept = torch.arange(target.vocab_size) if kept is None else kept
    cls = kind_class(kind)
    drafter = cls(cls.config_class.for_target(target, draft_vocab_size=len(kept), **options))
    drafter.kept_ids.copy_(kept)
    assert drafter.initialize(target, kept)
    if shake:
        generator = torch.Generator().manual_seed(9)
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    drafter.bind(target)
    return drafter.train(not shake)


def check_training(drafter, target):
    """A gradient on everything that is trained; test_contract overfits a batch with every kind."""
    first = run_step(drafter, target, make_batch())
    assert first.loss.isfinite()
    first.loss.backward()
    check_gradients(drafter)


def check_padding(drafter, target):
    """Rows of a padded batch have the metrics that they have alone."""
    both = make_batch((17, 11))
    together = run_step(drafter, target, both)
    alone = []
    for row, length in enumerate((17, 11)):
        part = Batch(
            both.input_ids[row : row + 1, :length],
            both.lengths[row : row + 1],
            both.response_mask[row : row + 1, :length],
            both.index[row : row + 1],
        )
        alone.append(run_step(drafter, target, part))
    for name in together.metrics:
        total = alone[0].metrics[name] + alone[1].metrics[name]
        torch.testing.assert_close(together.metrics[name], total, rtol=1e-4, atol=1e-4)


def check_packed_rows(drafter, target):
    whole = make_batch((17, 11, 30, 9), start=2)
    results = []
    for batch in (whole, packed_batch(whole, [[2, 0], [3, 1]])):
        drafter.zero_grad()
        step = run_step(drafter, target, batch)
        step.loss.backward()
        results.append((step, [parameter.grad.clone() for parameter in drafter.parameters()]))
    (one, grads), (other, packed_grads) = results
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-5, atol=1e-6)
    for name in one.metrics:
        torch.testing.assert_close(one.metrics[name], other.metrics[name], rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(grads, packed_grads, strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-3, atol=1e-5 * max(1.0, float(mine.abs().max()))
        )


def check_parity(make, target, depth=4, sampled=False):
    """log q of a drafted chain is what training computes for that chain as the text, at every depth, plain and packed.

    sampled: whether the chain is drawn, of kinds whose trees have other scores than log q.
    """
    prefix = make_batch((12,)).input_ids[0]
    anchor = len(prefix) - 2
    drafter = make()
    features = target.forward(prefix[None], drafter.feature_layers).features[0]
    log_q = []
    trees = []
    for packed in (False, True):
        decoder = make()
        if packed:
            decoder.pack()
            decoder.bind(target)
        decoder.uses_text = False  # training knows nothing of it
        session = decoder.start(
            prefix[: anchor + 1], max_length=13
        )  # so that the buffers have to grow
        session.extend(prefix[1 : anchor - 2], features[: anchor - 3])  # in pieces, as rounds do
        session.extend(prefix[anchor - 2 : anchor + 2], features[anchor - 3 : anchor + 1])
        if sampled:
            sampler = Sampler(SamplingParams(temperature=1.0), torch.Generator().manual_seed(1))
            tree = session.propose(TreeSpec.parse(f"chain:{depth}@sample"), sampler)
            place = (decoder.kept_ids == tree.tokens[:, None]).int().argmax(1)
            log_q.append(tree.proposal.probs[tree.proposal.rows, place].log())  # [depth]
        else:
            tree = session.propose(TreeSpec.parse(f"chain:{depth}"))
            log_q.append(torch.diff(tree.log_probs, prepend=torch.zeros(1)))  # [depth]
        trees.append(tree)
    assert torch.equal(trees[0].tokens, trees[1].tokens) and len(trees[0]) == depth
    torch.testing.assert_close(log_q[0], log_q[1], rtol=1e-3, atol=1e-4)

    # The conversation stands behind another one in its row; the response is cut so that only this anchor reaches depth k.
    ids = torch.cat((torch.arange(7), prefix, trees[0].tokens, torch.tensor([7])))[None]
    documents = torch.tensor([[0, 0, 7], [0, 7, ids.shape[1] - 7]])
    drafter.config.loss = "ce"
    for k in range(depth):
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, anchor + 8 : anchor + 10 + k] = True
        batch = Batch(ids, torch.tensor([ids.shape[1]]), mask, torch.tensor([0, 1]), documents)
        metrics = run_step(drafter, target, batch).metrics
        assert metrics["count"][k] == 1
        torch.testing.assert_close(metrics["loss"][k], -log_q[0][k], rtol=1e-3, atol=1e-4)


def check_trees(drafter, target):
    """Shapes, distinct siblings, kept tokens; paths drafted alone have the same probabilities; drawn ones have their q."""
    prefix = make_batch((9,)).input_ids[0]
    features = target.forward(prefix[None], drafter.feature_layers).features[0]

    def draft(text, sampler=None):
        session = drafter.start(prefix[:-1], 32)
        session.extend(prefix[1:], features[:-1])
        return session.propose(TreeSpec.parse(text), sampler)

    kept = set(drafter.kept_ids.tolist())
    for text, size in (
        ("none", 0),
        ("chain:3", 3),
        ("fanout:3x2x1", 15),
        ("dynamic:4,3,10", 10),
        ("paths:0,1,0-1", 3),
    ):
        tree = draft(text)
        assert len(tree) == size, text
        assert all(parent < i for i, parent in enumerate(tree.parents))
        pairs = list(zip(tree.parents, tree.tokens.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs) and set(tree.tokens.tolist()) <= kept
    wide = draft("fanout:3x2x2")
    chain = draft("chain:3")
    node = -1
    score = []
    for token in chain.tokens.tolist():
        node = next(i for i, p in enumerate(wide.parents) if p == node and wide.tokens[i] == token)
        score.append(wide.log_probs[node])
    torch.testing.assert_close(torch.stack(score), chain.log_probs, rtol=1e-4, atol=1e-4)
    assert len(draft("chain:3@stop=0.999999")) == 1

    sampler = Sampler(SamplingParams(temperature=0.9), torch.Generator().manual_seed(1))
    drawn = draft("fanout:2x1@sample", sampler)
    q = drawn.proposal.probs[drawn.proposal.rows]
    torch.testing.assert_close(q.sum(-1), torch.ones(len(drawn)))
    place = {token: i for i, token in enumerate(drafter.kept_ids.tolist())}
    own = q[torch.arange(len(drawn)), [place[token] for token in drawn.tokens.tolist()]].log()
    above = torch.tensor([drawn.log_probs[p] if p >= 0 else 0.0 for p in drawn.parents])
    torch.testing.assert_close(drawn.log_probs, above + own, rtol=1e-4, atol=1e-4)


def check_closed_form_start(drafter, target, depths=None):
    """The closed-form start lowers the loss of copied weights at these first depths, or at all; returns the step behind it."""
    batches = [make_batch((60, 50), seed=seed) for seed in range(20)]
    before = run_step(drafter, target, batches[0])
    explained = drafter.solve_start(batches, source_of(target, drafter))
    after = run_step(drafter, target, batches[0])
    assert 0.1 < explained <= 1.0
    assert (after.metrics["loss"] < before.metrics["loss"])[:depths].all()
    assert after.loss < before.loss
    return after


def check_round_trip(drafter, target, folder):
    drafter.save_pretrained(folder)
    loaded = load_drafter(str(folder), target)
    plain = type(drafter).from_pretrained(folder)
    assert (
        torch.equal(plain.kept_ids, drafter.kept_ids)
        and plain.feature_layers == drafter.feature_layers
    )
    plain.bind(target)
    a, b = (run_step(d.eval(), target, make_batch()).loss for d in (drafter, plain))
    torch.testing.assert_close(a, b)
    prompt = [5, 9, 11, 9, 11, 30]
    texts = [
        generate(target, d, prompt, max_new_tokens=12, spec=TreeSpec.parse("chain:3"), eos_ids=())
        for d in (drafter, loaded)
    ]
    assert texts[0].tokens == texts[1].tokens
    assert texts[0].stats.accepted_length == texts[1].stats.accepted_length
