"""Decoding of prompts with images: the text is transformers' own, whatever drafts it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import drafttrain
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.ngram.model import NgramDrafter
from drafttrain.errors import UserError
from drafttrain.inference import Decoder, SamplingParams, static
from drafttrain.inference.responses import ResponseEngine, ResponseRequest
from tests.data.seeing import picture as seeing_picture
from tests.data.seeing import shown, user
from tests.drafters.helpers import make_drafter
from tests.inference.fakes import ANY, FakeBatch
from tests.vlm_models import FAMILIES, VOCAB, build, picture, prompt_with

NEW = 10
# Positions on three axes, with deepstack; images that attend in both directions under windows; a recurrent state.
VARIED = ("qwen3_vl", "gemma3", "qwen3_5")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Checkpoints by family, built on first use."""
    made = {}

    def of(family):
        if family not in made:
            made[family] = build(family, tmp_path_factory.mktemp(family))
        return made[family]

    return of


def shown_by(case):
    """Prompts with their pictures: in front, inside, behind, several, of several sizes, and none."""
    mark = case.marker
    return {
        f"look: {mark} and {mark} what?": [picture(1), picture(2, 56, 112)],
        f"{mark}why": [picture(3, 98, 42)],
        "only text here": [],
        f"so {mark}": [picture(4)],
    }


def prompts_of(case, target):
    shown = shown_by(case)
    return [target.image_prompt(text, pictures) for text, pictures in shown.items()]


def only_images(monkeypatch, case):
    """Gives the processor a chat template."""
    template = "{% for c in messages[0]['content'] %}{% if 'text' in c %}{{ c['text'] }}{% else %}"
    template += case.marker + "{% endif %}{% endfor %}"
    monkeypatch.setattr(case.processor, "chat_template", template, raising=False)


def tokens_of(
    target,
    drafter,
    prompts,
    spec="none",
    **options,
):
    spec = TreeSpec.parse(spec) if isinstance(spec, str) else spec
    decoder = Decoder(target, drafter, spec=spec, eos_ids=(), max_rows=3, **options)
    return [each.tokens for each in decoder.generate(prompts, max_new_tokens=NEW)]


def drafting(
    prompts,
    truths,
    **options,
):
    """A drafter of random trees, half of whose nodes are right."""
    by_prompt = {
        tuple(prompt.ids.tolist()): truth for prompt, truth in zip(prompts, truths, strict=True)
    }
    return FakeBatch(by_prompt, agree=0.6, nodes=8, seed=1, vocab=VOCAB, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(built, family):
    """Mixed batches without a drafter, then trees, on plain and on packed weights."""
    case = built(family)
    target = case.load()
    prompts = prompts_of(case, target)
    truths = [case.generate(prompt, NEW) for prompt in prompts]
    assert len({tuple(truth) for truth in truths}) == len(prompts)
    for _ in range(2):
        assert tokens_of(target, None, prompts) == truths
        assert tokens_of(target, drafting(prompts, truths), prompts, ANY) == truths
        target.pack()


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stored_row_is_the_prompt_that_it_was(built, monkeypatch, family):
    """Without its text, which is not stored."""
    case = built(family)
    target = case.load()
    only_images(monkeypatch, case)
    for text, pictures in shown_by(case).items():
        if not pictures:
            continue
        want = prompt_with(target.image_prompt(text, pictures), [5, 9, 5])
        got = target.image_row(want.ids, pictures)
        assert torch.equal(got.ids, want.ids) and got.digests == want.digests
        assert got.tensors.keys() == want.tensors.keys()
        for name, value in want.tensors.items():
            assert got.tensors[name].dtype == value.dtype
            assert torch.equal(got.tensors[name], value), name


def test_rows_that_are_not_the_targets(built, monkeypatch):
    case = built("qwen3_vl")
    target = case.load()
    only_images(monkeypatch, case)
    prompt = target.image_prompt(f"{case.marker}why", [picture(1)])
    token = target.sight.placeholder
    count = int((prompt.ids == token).sum())
    answered = torch.cat((prompt.ids, torch.tensor([token, 5])))
    with pytest.raises(
        UserError,
        match=f"has {count + 1} placeholders .token {token}., but its 1 images take {count}",
    ):
        target.image_row(answered, [picture(1)])
    by_place = target.image_prompt(f"{case.marker}why", [picture(1)])
    by_place.tensors["places"] = torch.arange(len(by_place))[None]
    monkeypatch.setattr(target.sight, "prompt", lambda *_: by_place)
    with pytest.raises(UserError, match="gives places by place"):
        target.image_row(prompt.ids, [picture(1)])
    monkeypatch.setattr(case.processor, "chat_template", "{{ raise_exception('no') }}")
    with pytest.raises(UserError, match="chat template refuses a message of 1 images"):
        target.image_row(prompt.ids, [picture(1)])


@pytest.mark.thorough
@pytest.mark.parametrize("family", VARIED)
def test_every_drafter_gives_the_same_text(
    built,
    monkeypatch,
    family,
):
    case = built(family)
    target = case.load()
    prompts = prompts_of(case, target)
    truths = [case.generate(prompt, NEW) for prompt in prompts]
    head = make_drafter(target).eval()
    # Static passes, as on a GPU, where the family has them.
    with monkeypatch.context() as patch:
        patch.setattr(static, "_serves", lambda device: True)
        for order in (slice(None), slice(None, None, -1)):
            drafter = drafting(prompts, truths)
            assert tokens_of(target, drafter, prompts[order], ANY) == truths[order]
    target.pack()
    for spec in ("chain:3", "dynamic:3,2,8", "fanout:2x2"):
        assert tokens_of(target, head, prompts, spec) == truths
    assert tokens_of(target, NgramDrafter(), prompts, "chain:4") == truths
    # By the Python call, among other prompts.
    several = drafttrain.generate(
        target, [prompts[0], [5, 6, 7]], head, max_new_tokens=NEW, eos_token_id=[]
    )
    assert several[0].tokens == truths[0]


@pytest.mark.thorough
@pytest.mark.parametrize("family", VARIED)
def test_turns_share_a_prefix_only_with_the_same_images(
    built,
    monkeypatch,
    family,
):
    case = built(family)
    target = case.load()
    text = f"look: {case.marker} what?"
    first, other = (target.image_prompt(text, [picture(seed)]) for seed in (1, 2))
    assert torch.equal(first.ids, other.ids)
    read = []
    prefill = target.prefill_images
    monkeypatch.setattr(
        target,
        "prefill_images",
        lambda prompt, *rest: read.append(prompt) or prefill(prompt, *rest),
    )
    decoder = Decoder(target, None, eos_ids=(), keep=True)

    def answer(prompt):
        return decoder.generate([prompt], max_new_tokens=NEW)[0].tokens

    truth = case.generate(first, NEW)
    assert answer(first) == truth
    second = prompt_with(first, [*truth, 7, 8, 9])
    assert answer(second) == case.generate(second, NEW)
    assert read == [first]  # its image is in the row already
    wrong = prompt_with(other, [*truth, 7, 8, 9])
    assert answer(wrong) == case.generate(wrong, NEW)
    assert read == [first, wrong]


@pytest.mark.thorough
@pytest.mark.parametrize("family", VARIED)
def test_responses_to_prompts_with_images(built, family):
    """A shared prefix, follow-ups behind images, and captured states."""
    case = built(family)
    target = case.load()
    words = {case.marker: [picture(1)], "so": [], f"{case.marker}?": [picture(2)], "no": []}
    prompts = {}
    for word, pictures in words.items():
        text = f"a system prompt that is long enough: {word}"
        prompts[word] = target.image_prompt(text, pictures)
    requests = [ResponseRequest(word, prompt, 5, ()) for word, prompt in prompts.items()]
    more = {word: [7, 8, 9] for word in words}
    engine = ResponseEngine(target, slots=3, max_length=256, feature_layers=(1,))
    for done in engine.run(
        requests, SamplingParams(), follow_up=lambda finished: more.pop(finished.key, None)
    ):
        prompt = prompts[done.key]
        whole = prompt_with(prompt, [*case.generate(prompt, 5), 7, 8, 9])
        assert done.tokens == case.generate(whole, 5)
        read = prompt_with(prompt, done.sequence[len(prompt) : -1])
        want = target.read_images(read, (1,)).features[0]
        assert (done.features.float() - want).norm() < 0.02 * want.norm()


def test_chats_with_images(seeing, seeing_processor, tmp_path, monkeypatch):
    """Forms of an image, and text in parts; relative paths begin in the present folder."""
    monkeypatch.chdir(tmp_path)
    target = seeing.load()
    pictures = [seeing_picture(1), seeing_picture(2)]
    Path("one.png").write_bytes(pictures[0].data)
    url = {"type": "image_url", "image_url": {"url": pictures[1].uri}}
    asked = user(shown("one.png"), "or", url)
    want = target.image_prompt("user: <|image|>or<|image|></s>assistant: ", pictures)
    options = {"max_new_tokens": 6}
    expected = drafttrain.generate(target, want, **options)
    assert drafttrain.generate(target, [asked], **options).tokens == expected.tokens
    assert "".join(drafttrain.stream(target, [asked], **options)) == expected.text
    plain = [{"role": "user", "content": "what?"}]
    made = drafttrain.generate(target, [[user("what?")], plain, [asked]], **options)
    assert made[0].tokens == made[1].tokens
    assert made[2].tokens == expected.tokens


BAD_PARTS = {
    "no such file": shown("gone.png"),
    "not downloaded": shown("https://a.b/c.png"),
    "text and images only": {"type": "video", "video": "a.mp4"},
    "neither text nor an image": {"type": "text"},
}


@pytest.mark.parametrize("message", BAD_PARTS)
def test_bad_parts_of_chats(seeing, seeing_processor, message):
    with pytest.raises(UserError, match=message):
        drafttrain.generate(seeing.load(), [user("see", BAD_PARTS[message])])


def test_chats_with_images_for_a_target_of_text(target):
    part = shown(seeing_picture(1).uri)
    with pytest.raises(UserError, match="reads no images"):
        drafttrain.generate(target, [user(part)])
