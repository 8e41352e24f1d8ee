from __future__ import annotations

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from drafttrain.batch import Proposal, TokenTree
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.inference import SamplingParams, generate
from drafttrain.inference.rejection import try_drawn
from drafttrain.inference.verify import ProcessedText, Verifier, argmax_at, verify_batch
from tests.inference.fakes import ANY, FakeDrafter, family

#      root
#     /    \
#    3      5        nodes 0, 1
#   / \     |
#  7   3    7        nodes 2, 3, 4
TREE = TokenTree(torch.tensor([3, 5, 7, 3, 7]), [-1, -1, 0, 0, 1])
HOT = SamplingParams(1.0)


def verifier(sampling=None, eos=(), seed=0, prompt=(0,)):
    sampling = sampling or SamplingParams()
    text = None
    if sampling.repetition_penalty:
        processor = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
        text = ProcessedText([processor], torch.tensor(prompt), limit=100)
    return Verifier(sampling, eos, torch.Generator().manual_seed(seed), text)


def choosing(*tokens):
    logits = torch.zeros(len(tokens), 10)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 50.0
    return logits


def parts(verdict):
    return verdict.path, verdict.tokens, verdict.ended


def verified(one, tree, logits):
    return parts(verify_batch([one], [tree], logits)[0])


@pytest.mark.parametrize(
    ("choices", "path", "tokens"),
    [
        ((9, 1, 1, 1, 1, 1), [], [9]),  # never accepted
        ((7, 1, 1, 1, 1, 1), [], [7]),  # a grandchild's token is no child's
        ((3, 9, 1, 1, 1, 1), [0], [3, 9]),
        ((5, 9, 7, 1, 1, 2), [1, 4], [5, 7, 2]),  # all of the second branch
        ((3, 3, 1, 1, 8, 1), [0, 3], [3, 3, 8]),
    ],
)
def test_walks_the_targets_choices(choices, path, tokens):
    drawn = TokenTree(
        TREE.tokens, TREE.parents, proposal=Proposal(torch.full((3, 10), 0.1), [0, 0, 1, 1, 2])
    )
    for tree in (TREE, drawn):
        for sampling in (SamplingParams(), HOT):
            found = verified(verifier(sampling), tree, choosing(*choices))
            assert found == (path, tokens, False)


def test_eos_inside_the_path_cuts_it_and_there_is_no_bonus():
    assert verified(verifier(eos={3}), TREE, choosing(3, 7, 1, 1, 1, 1)) == ([0], [3], True)


def test_eos_as_bonus_ends():
    assert verified(verifier(eos={9}), TREE, choosing(3, 9, 1, 1, 1, 1)) == ([0], [3, 9], True)


def test_an_empty_tree_is_a_plain_step():
    assert verified(verifier(eos={9}), TokenTree.empty(), choosing(4)) == ([], [4], False)


def random_tree(generator, drawn):
    """A small tree over 10 tokens, some of its nodes drawn and some chosen by a rule."""
    size = int(torch.randint(0, 8, (1,), generator=generator))
    parents = []
    tokens = []
    for node in range(size):
        parent = int(torch.randint(-1, node, (1,), generator=generator)) if node else -1
        taken = [tokens[i] for i, above in enumerate(parents) if above == parent]
        tokens.append(
            next(t for t in torch.randperm(10, generator=generator).tolist() if t not in taken)
        )
        parents.append(parent)
    rows = [parent + 1 if node % 4 != 3 else -1 for node, parent in enumerate(parents)]
    q = torch.rand(size + 1, 10, generator=generator).softmax(-1)
    return TokenTree(
        torch.tensor(tokens, dtype=torch.long), parents, None, Proposal(q, rows) if drawn else None
    )


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(repetition_penalty=1.5),
        HOT,
        SamplingParams(0.9, 6, 0.9, 0.05, 1.3),
    ],
)
@pytest.mark.parametrize("drawn", [False, True])
def test_a_batch_gives_each_sequence_what_it_gets_alone(sampling, drawn):
    generator = torch.Generator().manual_seed(5)
    alone = [verifier(sampling, {9}, seed, [seed]) for seed in range(8)]
    together = [verifier(sampling, {9}, seed, [seed]) for seed in range(8)]
    longest = 0
    for _ in range(6):
        trees = [random_tree(generator, drawn and row % 3 > 0) for row in range(8)]
        logits = [2 * torch.randn(len(tree) + 1, 10, generator=generator) for tree in trees]
        for tree, rows in zip(trees, logits, strict=True):
            rows[[parent + 1 for parent in tree.parents], tree.tokens] += 2
        want = list(map(verified, alone, trees, logits))
        assert [
            parts(verdict) for verdict in verify_batch(together, trees, torch.cat(logits))
        ] == want
        longest = max(longest, *(len(path) for path, _, _ in want))
    assert longest > 1


def test_plain_greedy_needs_one_transfer(monkeypatch):
    calls = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: calls.append(1) or tolist(x))
    logits = choosing(3, 3, 1, 1, 8, 1, 5, 9, 7, 1, 1, 2)
    verify_batch([verifier(), verifier()], [TREE, TREE], logits, logits.argmax(-1))
    assert len(calls) == 1


def test_plain_greedy_looks_only_where_a_walk_comes_by(monkeypatch):
    looked = []
    monkeypatch.setattr(
        "drafttrain.inference.verify.argmax_at",
        lambda logits, rows: looked.append(rows) or argmax_at(logits, rows),
    )
    logits = choosing(3, 3, 1, 1, 8, 1, 5, 9, 7, 1, 1, 2)
    assert [
        parts(verdict) for verdict in verify_batch([verifier(), verifier()], [TREE, TREE], logits)
    ] == [
        ([0, 3], [3, 3, 8], False),
        ([1, 4], [5, 7, 2], False),
    ]
    assert looked == [[0, 6], [1, 8], [4, 11]]


@pytest.mark.parametrize("choices", [False, True])
def test_probes_are_never_accepted(choices):
    tree = TokenTree(TREE.tokens, TREE.parents, probes=2)
    logits = choosing(5, 9, 7, 1, 1, 2)
    (verdict,) = verify_batch([verifier()], [tree], logits, logits.argmax(-1) if choices else None)
    assert parts(verdict) == ([1], [5, 7], False)


def test_a_rejected_child_leaves_what_q_had_less_of():
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.1, 0.1, 0.4, 0.4]], dtype=torch.float64)

    def tried(drawn, *uniforms):
        return try_drawn(
            p, q, torch.tensor([drawn]), torch.tensor([uniforms], dtype=torch.float64)
        )[0].tolist()

    assert tried([0], 0.99) == [1, 0, 0, 0]  # q < p: always accepted
    assert tried([2], 0.49) == [0, 0, 1, 0]  # p / q is 0.5
    assert tried([2], 0.51) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    # The second child comes from q without the first, [1/6, 1/6, 0, 4/6], and is tried against the residual.
    assert tried([2, 3], 0.51, 0.0) == pytest.approx(
        [(2 / 3 - 1 / 6) / (4 / 6), (1 / 3 - 1 / 6) / (4 / 6), 0, 0]
    )
    assert tried([2, -1], 0.51, 0.0) == pytest.approx([2 / 3, 1 / 3, 0, 0])


def test_drawing_from_the_target_itself_is_always_accepted():
    p = torch.rand(300, 7, generator=torch.Generator().manual_seed(0)).double().softmax(-1)
    child = torch.arange(300)[:, None] % 7
    uniforms = torch.rand(300, 1, dtype=torch.float64)
    assert torch.equal(try_drawn(p, p.clone(), child, uniforms).argmax(-1, keepdim=True), child)


def test_q_may_cover_a_part_of_the_vocabulary():
    """Drafter ids 0..2 are target tokens 7, 2, 5; the bonus token may be any of the target's."""
    kept = torch.tensor([7, 2, 5])
    tree = TokenTree(
        torch.tensor([2]), [-1], None, Proposal(torch.tensor([[0.2, 0.6, 0.2]]), [0], kept)
    )
    logits = torch.full((2, 10), -50.0)
    logits[:, 9] = 0
    for seed in range(5):
        assert verified(verifier(HOT, seed=seed), tree, logits) == ([], [9], False)
    logits[:, 2] = 30
    assert verified(verifier(HOT), tree, logits)[0] == [0]


PROMPT = [5, 9, 11, 9, 11, 30, 2, 9, 11, 4, 44, 9]


def hf(reference, **options):
    ids = torch.tensor([PROMPT])
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, **options)
    return out[0, len(PROMPT) :].tolist()


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "penalty"), [("llama", 0.7), ("gemma3", 2.0)])
def test_greedy_with_a_repetition_penalty_is_what_transformers_generates(name, penalty):
    target, reference = family(name)
    want = hf(reference, do_sample=False, repetition_penalty=penalty)
    assert want != hf(reference, do_sample=False)
    sampling = SamplingParams(repetition_penalty=penalty)
    drafters = [None, NgramDrafter(), FakeDrafter(want, 0.7, nodes=20, seed=3)]
    for drafter, spec in zip(drafters, ("none", "dynamic:4,3,9", str(ANY)), strict=True):
        spec = TreeSpec.parse(spec)
        got = generate(
            target, drafter, PROMPT, max_new_tokens=40, spec=spec, sampling=sampling, eos_ids=()
        )
        assert got.tokens == want, spec
    assert got.stats.accepted_length > 1.3


def test_one_token_vocabularies_of_the_warpers_are_what_transformers_generates():
    """With top_k=1 sampling has no choice left: all of the chain of processors at work, token for token."""
    target, reference = family("llama")
    want = hf(
        reference,
        do_sample=True,
        temperature=0.7,
        top_k=1,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.4,
    )
    sampling = SamplingParams(0.7, 1, 0.9, 0.1, 1.4)
    got = generate(
        target,
        FakeDrafter(want, 0.8, 12),
        PROMPT,
        max_new_tokens=40,
        spec=ANY,
        sampling=sampling,
        eos_ids=(),
    )
    assert got.tokens == want
