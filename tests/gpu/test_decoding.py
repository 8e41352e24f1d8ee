"""Decoding of every kind on a GPU, with captured graphs: the CPU's tokens. Pretend GPUs also count waits; a table bounds them."""

from __future__ import annotations

import copy

import pytest
import torch

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.inference import Decoder, SamplingParams
from drafttrain.inference.responses import ResponseEngine, ResponseRequest
from drafttrain.inference.sequence import Mark
from drafttrain.ops import sampling
from drafttrain.target import Target, experts
from drafttrain.target.borrowed import borrowed
from tests.conftest import has_gpu
from tests.data.seeing import picture
from tests.drafters import contract
from tests.drafters.helpers import make_drafter
from tests.gpu.count import DECODERS, TREES, budgets, count_rounds, drafter_of, moved, moved_target
from tests.inference.fakes import family

SAMPLED = SamplingParams(1.0, top_p=0.9)

KINDS = [
    kind if kind == "eagle3" else pytest.param(kind, marks=pytest.mark.slow) for kind in DECODERS
]


def decode(target, drafter, tree, rows, sampling, graphs=None):
    decoder = Decoder(
        target,
        drafter,
        spec=TreeSpec.parse(tree),
        max_rows=rows,
        graphs=graphs,
        eos_ids=(),
        sampling=sampling,
    )
    made = decoder.generate(
        [list(prompt) for prompt in contract.PROMPTS[:rows]], max_new_tokens=contract.NEW
    )
    return [one.tokens for one in made], sum(sum(one.stats.accepted) for one in made)


def compare(request, kind, cases, trained):
    """Tokens and accepted nodes on the CPU and on a GPU, which the request opens after the CPU's runs."""
    drafter = drafter_of(kind, trained)
    want = [decode(contract.the_target(), drafter, *case) for case in cases]
    gpu = request.getfixturevalue("any_gpu")
    target = moved_target()
    on_gpu = moved(drafter, target)
    for case, expected in zip(cases, want, strict=True):
        assert decode(target, on_gpu, *case, graphs=True) == expected, case
    assert gpu.replays > 0
    return want


@pytest.mark.thorough
@pytest.mark.any_gpu
def test_tokens_are_the_cpus(request):
    compare(request, "eagle3", [("dynamic:4,4,8", 3, SamplingParams())], trained=False)


@pytest.mark.slow
@pytest.mark.any_gpu
@pytest.mark.parametrize("kind", DECODERS)
def test_tokens_of_every_kind_are_the_cpus(request, kind):
    greedy = [("dynamic:4,4,8", 3), ("chain:4", 1), ("fanout:3x2x1", 2)]
    cases = [(*case, SamplingParams()) for case in greedy]
    if not has_gpu():  # a real one draws other numbers
        cases += [("chain:3", 1, SAMPLED), ("chain:3@sample", 2, SAMPLED)]
    want = compare(request, kind, cases, trained=True)
    assert kind not in contract.TRAINED or any(accepted for _, accepted in want), (
        "accepts nothing, so commits nothing"
    )


@pytest.mark.slow
def test_tokens_under_the_interpreters_kernels_are_the_cpus():
    from tests.gpu.pretend import PretendGpu

    trained = drafter_of("eagle3", trained=True)
    case = ("dynamic:3,2,5", 2, SamplingParams())
    want = decode(contract.the_target(), trained, *case)
    with PretendGpu(interpret=True):
        target = moved_target()
        assert decode(target, moved(trained, target), *case, graphs=True) == want


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_waits_no_more_than_the_table_allows(request, kind):
    drafter = drafter_of(kind)
    quick = kind == "eagle3"
    gpu = request.getfixturevalue("gpu")
    target = moved_target()
    drafter = moved(drafter, target)
    for tree in TREES[-1:] if quick else TREES:
        for batch in (1,) if quick else (1, 8):
            allowed = budgets()["rounds"][kind][tree][str(batch)]
            made = count_rounds(gpu, target, drafter, tree, batch)
            syncs, calls = made.total
            # Rounds differ by what was accepted. Fewer are welcome: write them with --budgets.
            assert syncs <= 1.03 * allowed["syncs"] + 0.5, (tree, batch, made.syncs)
            assert calls <= 1.05 * allowed["calls"] + 2, (tree, batch, made.calls)


def test_the_next_plain_pass_is_queued_before_tokens_are_read(gpu, monkeypatch):
    """The device computes while the host records."""
    waited = []
    monkeypatch.setattr(Mark, "wait", lambda mark: waited.append(gpu.replays))
    decode(moved_target(), None, "none", 3, SamplingParams(), graphs=True)
    rounds = contract.NEW - 1  # the prompt's pass gives the first token
    assert waited == [*range(2, rounds + 1), rounds]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sampling",
    [pytest.param(SamplingParams(), marks=pytest.mark.slow), SamplingParams(1.0)],
    ids=["greedy", "sampled"],
)
def test_answers_that_end_within_a_queued_pass_continue_as_on_a_cpu(request, sampling):
    """Turns follow each other in a row whose last pass went one token too far."""

    def follow_up(finished):
        turns[finished.key] = turns.get(finished.key, 0) + 1
        return [7, 8] if turns[finished.key] < 3 else None

    def run(target):
        turns.clear()
        engine = ResponseEngine(target, slots=2, max_length=64, feature_layers=(1, 3))
        requests = []
        for number, prompt in enumerate([*contract.PROMPTS, [5], [9, 9]]):
            stops = range(number, 300, 7)  # ends come at different rounds
            requests.append(ResponseRequest(str(number), list(prompt), 6, tuple(stops)))
        made = list(engine.run(requests, sampling, follow_up=follow_up))
        made.sort(key=lambda finished: finished.key)
        return made

    turns = {}
    want = run(contract.the_target(packed=True))
    assert len({len(finished.sequence) for finished in want}) > 2
    request.getfixturevalue("gpu")
    for ours, theirs in zip(run(moved_target()), want, strict=True):
        assert ours.sequence == theirs.sequence
        torch.testing.assert_close(
            ours.features.float(), theirs.features.float(), atol=0.02, rtol=0.02
        )


def test_a_nucleus_sorts_full_rows_only_where_the_top_tokens_are_too_few(gpu, monkeypatch):
    widths = []
    likeliest = sampling._likeliest
    monkeypatch.setattr(
        sampling, "_likeliest", lambda *args: widths.append(args[2]) or likeliest(*args)
    )
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5000, generator=generator)
    for scale, wanted in ((5.0, [1040]), (0.1, [1040, 5000])):
        want = sampling.probabilities(scale * logits, SAMPLED)
        widths.clear()
        got = sampling.probabilities((scale * logits).cuda(), SAMPLED)
        assert widths == wanted
        assert torch.equal(got.cpu(), want)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "capability", "most"),
    [("qwen3_moe", (7, 5), 99), ("mixtral", (12, 0), 2), ("mixtral", (8, 0), 0)],
)  # fmt: skip
def test_passes_of_few_tokens_are_captured_although_grouped_products_wait(
    request, monkeypatch, caplog, name, capability, most
):
    """But on compute capability 9 and 10 in bfloat16, torch reads the sizes of the groups on the host."""
    on_cpu, reference = family(name)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5]]
    (alone, together) = [plain_tokens(on_cpu, prompts, rows) for rows in (1, 3)]
    gpu = request.getfixturevalue("gpu")
    gpu.capability = capability
    if most < 99:
        monkeypatch.setattr(experts, "most_pairs", lambda module: 2 * most)  # each token has two
    target = Target.wrap(copy.deepcopy(reference).to("cuda"), None, name=name)
    assert f"target {name!r}: passes of more than" in caplog.text
    assert plain_tokens(target, prompts, 1) == alone
    assert (gpu.replays > 0) == (most > 0)
    gpu.reset()
    assert plain_tokens(target, prompts, 3) == together
    assert (gpu.replays > 0) == (most > 2), "larger passes run as they are"
    (steps,) = target.idle_steps
    assert not steps.failure


@pytest.mark.thorough
def test_grouped_products_stay_where_torch_has_a_kernel(gpu, caplog):
    _, reference = family("mixtral")
    target = Target.wrap(copy.deepcopy(reference).to("cuda", torch.bfloat16), None)
    assert target.most_captured is None and not caplog.messages
    assert target.config._experts_implementation == "grouped_mm"


@pytest.mark.thorough
def test_experts_of_a_model_that_is_wrapped_again(request):
    policy = copy.deepcopy(family("mixtral")[1])
    request.getfixturevalue("gpu").capability = (8, 0)
    policy = policy.to("cuda")
    for _ in range(2):
        with borrowed(policy, None) as target:
            assert target.most_captured is not None
        assert policy.config._experts_implementation == "grouped_mm"
    bounds = {Target.wrap(policy, None).most_captured for _ in range(2)}
    assert bounds == {target.most_captured}


def plain_tokens(target, prompts, rows):
    decoder = Decoder(target, None, max_rows=rows, graphs=True, eos_ids=())
    return [one.tokens for one in decoder.generate(prompts, max_new_tokens=8)]


@pytest.mark.thorough
@pytest.mark.any_gpu
@pytest.mark.parametrize("embeds", [False, True])
def test_tokens_behind_an_image_are_the_cpus(request, seeing, seeing_processor, embeds):
    """The prompt is one dynamic forward of the model; rounds after it run in captured graphs."""
    target = seeing.load()
    prompt = target.image_prompt("user: <|image|>what?</s>assistant: ", [picture(1)])
    prompts = [prompt, list(contract.PROMPTS[0])]
    head = make_drafter(target, image_embeds=embeds).eval()

    def tokens(target, drafter, graphs=None):
        spec = TreeSpec.parse("dynamic:3,2,6")
        decoder = Decoder(target, drafter, spec=spec, max_rows=2, graphs=graphs, eos_ids=())
        return [one.tokens for one in decoder.generate(prompts, max_new_tokens=contract.NEW)]

    want = tokens(target, head)
    gpu = request.getfixturevalue("any_gpu")
    there = Target.load(seeing.folder, "float32", "cuda:0")
    assert tokens(there, moved(head, there), graphs=True) == want
    assert gpu.replays > 0


@pytest.mark.thorough
def test_tokens_behind_an_image_of_a_spread_target_are_the_cpus(request, seeing, seeing_processor):
    """Layers on two GPUs, towers where the embedding is."""
    here = seeing.load()
    prompt = here.image_prompt("user: <|image|>what?</s>assistant: ", [picture(1)])

    def tokens(target):
        decoder = Decoder(target, NgramDrafter(), spec=TreeSpec.parse("chain:3"), eos_ids=())
        return decoder.generate([prompt], max_new_tokens=8)[0].tokens

    want = tokens(here)
    request.getfixturevalue("two_gpus")
    text = "model.language_model."
    placed = {"lm_head": 1}
    for name in ("embed_tokens", "rotary_emb", "layers.0"):
        placed[text + name] = 0
    for name in ("layers.1", "layers.2", "norm"):
        placed[text + name] = 1
    there = Target.load(seeing.folder, "float32", "cuda:0", device_map=placed)
    assert tokens(there) == want
