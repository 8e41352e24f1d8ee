"""A language model as drafter: beginnings, distillation, trees with kept keys, plain checkpoints, other vocabularies."""

from __future__ import annotations

import contextlib
from random import Random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.draft_model.model import DraftModel, DraftModelConfig
from drafttrain.drafters.registry import kind_of, load_drafter
from drafttrain.errors import UserError
from drafttrain.inference import SamplingParams, generate
from drafttrain.ops.native import cpu_kernels
from drafttrain.ops.packing import pack_panels
from drafttrain.states.source import NoTarget
from tests.conftest import make_target, make_tokenizer
from tests.drafters.draft_models import BEGINNINGS, SHAPES, make_drafter
from tests.drafters.helpers import (
    make_batch,
    packed_batch,
    random_path,
    run_step,
    session_after,
)
from tests.files import load_json
from tests.inference.fakes import FAMILIES, VOCAB, family


def other_rows(target, rows, seed=2):
    """A drafter of the target's vocabulary whose embedding is padded to other rows."""
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=rows, initializer_range=0.3, tie_word_embeddings=True, **SHAPES)
    drafter = DraftModel(
        LlamaForCausalLM(config), make_tokenizer(min(rows, 290)), DraftModelConfig()
    )
    drafter.bind(target)
    return drafter


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(BEGINNINGS))
def test_every_trained_parameter_gets_a_finite_gradient(target, name):
    drafter = make_drafter(target, name)
    step = run_step(drafter.train(), target, make_batch())
    step.loss.backward()
    assert step.loss.isfinite() and step.metrics["count"].tolist() == [17.0]
    trained = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
    for key, parameter in trained.items():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        # B begins as zeros, so nothing reaches A in the first step.
        assert parameter.grad.abs().sum() > 0 or "lora_A" in key, key
    if name == "lora":
        assert all("lora_" in key for key in trained) and len(trained) == 2 * 7 * 2
    embedding = drafter.lm.get_input_embeddings().weight
    assert embedding.requires_grad == (name in ("layers", "random"))
    assert (embedding.data_ptr() == target.embed_weight.data_ptr()) == (name == "shared")
    assert not any(p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize("biased", [False, True])
def test_the_loss_is_the_divergence_of_the_models_own_logits(target, biased):
    """Straight from two transformers forwards: KL at response tokens whose successor is in the response."""
    drafter = make_drafter(target)
    batch = make_batch()
    if biased:  # Phi's head has a bias
        torch.manual_seed(0)
        lm = PhiForCausalLM(
            PhiConfig(vocab_size=300, bos_token_id=1, eos_token_id=2, pad_token_id=2, **SHAPES)
        )
        torch.nn.init.normal_(lm.lm_head.bias)
        drafter = DraftModel(lm, target.tokenizer, DraftModelConfig())
        drafter.bind(target)
    step = run_step(drafter, target, batch)
    want = 0.0
    alpha = 0.0
    count = 0
    for row, length in enumerate(batch.lengths.tolist()):
        ids = batch.input_ids[row : row + 1, :length]
        p, q = (
            model(input_ids=ids).logits[0].log_softmax(-1) for model in (target.model, drafter.lm)
        )
        mask = batch.response_mask[row, :length]
        at = (mask[:-1] & mask[1:]).nonzero().squeeze(1)
        want += (p.exp() * (p - q)).sum(-1)[at].sum()
        alpha += torch.minimum(p.exp(), q.exp()).sum(-1)[at].sum()
        count += len(at)
    torch.testing.assert_close(step.loss, want / count, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step.metrics["alpha"][0], alpha, rtol=1e-4, atol=1e-4)
    if biased:
        step.loss.backward()
        assert lm.lm_head.bias.grad.abs().sum() > 0


def test_pretraining_is_next_token_cross_entropy(target):
    drafter = make_drafter(target, "random", loss="next_token")
    batch = make_batch((17, 11))
    step = run_step(drafter, target, batch, source=NoTarget())
    step.loss.backward()
    want = 0.0
    count = 0
    for row in range(2):
        logits = drafter.lm(input_ids=batch.input_ids[row : row + 1]).logits[0]
        mask = batch.response_mask[row]
        at = (mask[:-1] & mask[1:]).nonzero().squeeze(1)
        want += torch.nn.functional.cross_entropy(
            logits[at], batch.input_ids[row, at + 1], reduction="sum"
        )
        count += len(at)
    torch.testing.assert_close(step.loss, want / count, rtol=1e-5, atol=1e-5)
    assert all(p.grad.abs().sum() > 0 for p in drafter.parameters())


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_all_layers_of_any_family_are_the_target_again(name):
    """No divergence in training, and every draft is right."""
    target, _ = family(name)
    begin = ("target", {"layers": list(range(target.num_layers))}, "kl")
    if target.softcap is not None:
        with pytest.raises(UserError, match=r"caps its logits, which training does not support"):
            DraftModel.begin(target, *begin)
        return
    drafter = DraftModel.begin(target, *begin).eval()
    drafter.bind(target)
    batch = make_batch((17, 11))
    batch.input_ids %= VOCAB
    step = run_step(drafter, target, batch)
    means = {key: float(value / step.metrics["count"]) for key, value in step.metrics.items()}
    assert abs(means["loss"]) < 1e-3 and means["alpha"] > 0.999 and means["agree"] == 1
    spec = TreeSpec.parse("chain:3")
    done = generate(target, drafter, list(range(3, 15)), max_new_tokens=13, spec=spec, eos_ids=())
    assert done.stats.accepted == [3, 3, 3]


def gradients(drafter, target, batch, source=None):
    drafter.zero_grad()
    step = run_step(drafter, target, batch, source=source)
    step.loss.backward()
    return step, [p.grad.clone() for p in drafter.parameters() if p.grad is not None]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma2"])
def test_packed_rows_train_as_single_ones_in_any_family(name):
    target, _ = family(name)
    drafter = DraftModel.begin(
        target, "target", {"layers": [0, 1]}, "kl"
    ).eval()  # some families drop out
    drafter.bind(target)
    drafter.check_packing()
    whole = make_batch((17, 11, 9), start=2)
    whole.input_ids %= VOCAB
    packed = packed_batch(whole, [[1, 0], [2]])
    (one, grads), (other, packed_grads) = (
        gradients(drafter, target, batch) for batch in (whole, packed)
    )
    assert one.metrics["count"] == other.metrics["count"] > 10
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(grads, packed_grads, strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-3, atol=1e-4 * max(1.0, float(mine.abs().max()))
        )


def test_packed_rows_pretrain_as_single_ones_and_may_be_checkpointed(target):
    drafter = make_drafter(target, "random", loss="next_token").train()
    whole = make_batch((17, 11, 9), start=0)
    packed = packed_batch(whole, [[1, 0], [2]])
    packed.response_mask[packed.documents[:, 0], packed.documents[:, 1]] = (
        False  # as collate has it
    )
    one, grads = gradients(drafter, target, whole, NoTarget())
    drafter.gradient_checkpointing_enable()
    other, packed_grads = gradients(drafter, target, packed, NoTarget())
    torch.testing.assert_close(one.loss, other.loss)
    for mine, theirs in zip(grads, packed_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_a_model_that_lets_neighbours_in_is_not_packed(target, monkeypatch):
    drafter = make_drafter(target)
    monkeypatch.setattr(
        "transformers.masking_utils.find_packed_sequence_indices", lambda positions: None
    )
    drafter.check_packing()
    monkeypatch.setattr("drafttrain.drafters.draft_model.model.apart", contextlib.nullcontext)
    with pytest.raises(UserError, match=r"packing=true, but LlamaForCausalLM has masks of its own"):
        drafter.check_packing()


# -- drafting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 5])
def test_rounds_leave_what_a_fresh_reading_gives(window):
    """Whatever is accepted, the root's logits and the kept keys are those of a session that reads the text at once."""
    options = {} if window is None else {"sliding_window": window}
    target = make_target()
    if window is not None:
        from transformers import MistralConfig, MistralForCausalLM

        torch.manual_seed(4)
        config = MistralConfig(
            vocab_size=300, num_key_value_heads=1, initializer_range=0.3, **SHAPES, **options
        )
        drafter = DraftModel(
            MistralForCausalLM(config).eval(), target.tokenizer, DraftModelConfig()
        )
        drafter.bind(target)
    else:
        drafter = make_drafter(target).eval()
    text = make_batch((12,)).input_ids[0]
    session = session_after(drafter, text)
    random = Random(0)
    for spec in (
        "fanout:3x2x2",
        "chain:3",
        "dynamic:4,3,12",
        "none",
        "fanout:3x2x2",
        "dynamic:4,3,12",
    ):
        tree = session.propose(TreeSpec.parse(spec))
        new = [*random_path(tree, random), random.randrange(250)]
        session.extend(torch.tensor(new), torch.empty(len(new), 0))
        text = torch.cat((text, torch.tensor(new)))
        fresh = session_after(drafter, text)
        assert session.length == fresh.length == len(text)
        torch.testing.assert_close(session.root, fresh.root, rtol=1e-4, atol=1e-4)
        for layer in range(drafter.runner.num_layers):
            for ours, theirs in zip(
                session.cache._layers[layer], fresh.cache._layers[layer], strict=True
            ):
                torch.testing.assert_close(
                    ours[:, : len(text)], theirs[:, : len(text)], rtol=1e-4, atol=1e-4
                )


def test_accepted_tokens_are_not_read_again(target):
    drafter = make_drafter(target).eval()
    session = session_after(drafter, make_batch((12,)).input_ids[0])
    tree = session.propose(TreeSpec.parse("chain:4"))
    sizes = []
    forward = drafter.runner.forward
    drafter.runner.forward = lambda ids, *rest: sizes.append(ids.shape[1]) or forward(ids, *rest)
    session.extend(torch.cat((tree.tokens[:3], torch.tensor([7]))), torch.empty(4, 0))
    assert sizes == [1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["shared", "lora"])
def test_another_one_with_the_same_weights_drafts_the_same(target, name):
    """What ZeRO-3 decodes with while the weights themselves are scattered."""
    drafter = make_drafter(target, name)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    other = drafter.blank()
    other.load_state_dict(drafter.state_dict())
    other.bind(target)
    trees = [
        generate(target, model.eval(), [5, 6, 7], max_new_tokens=9).stats.accepted
        for model in (drafter, other)
    ]
    prompt = torch.arange(5, 17)
    features = torch.empty(11, 0)
    for model in (drafter, other):
        session = model.start(prompt, 64)
        session.extend(prompt[1:], features)
        trees.append(session.propose(TreeSpec.parse("fanout:3x2x1")).tokens.tolist())
    assert trees[0] == trees[1] and trees[2] == trees[3]


def test_a_model_that_is_the_target_is_always_right(target):
    drafter = DraftModel.begin(target, "target", {"layers": [0, 1, 2, 3]}, "kl").eval()
    drafter.bind(target)
    done = generate(
        target, drafter, [5, 6, 7], max_new_tokens=21, spec=TreeSpec.parse("chain:3"), eos_ids=()
    )
    assert done.stats.accepted == [3] * 5
    drawn = generate(
        target,
        drafter,
        [5, 6, 7],
        max_new_tokens=21,
        spec=TreeSpec.parse("fanout:2x1x1@sample"),
        sampling=SamplingParams(temperature=1.0),
        eos_ids=(),
    )
    assert drawn.stats.accepted == [3] * 5, "p = q, so the first draw is always accepted"


@pytest.mark.thorough
def test_beyond_what_it_reads_nothing_is_drafted():
    target = make_target()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=300, max_position_embeddings=16, **SHAPES)
    drafter = DraftModel(LlamaForCausalLM(config).eval(), target.tokenizer, DraftModelConfig())
    drafter.bind(target)
    want = generate(target, None, [5, 6, 7], max_new_tokens=40, eos_ids=()).tokens
    done = generate(
        target, drafter, [5, 6, 7], max_new_tokens=40, spec=TreeSpec.parse("chain:3"), eos_ids=()
    )
    assert done.tokens == want and done.stats.offered[0] == 3 and done.stats.offered[-1] == 0


# -- vocabularies -----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("rows", [288, 320])
def test_rows_that_pad_the_vocabulary_do_no_harm(target, rows):
    """The target has 300 rows. Loss over the common ones, proposals of common ones, committed ones of any."""
    drafter = other_rows(target, rows)
    batch = make_batch()
    batch.input_ids[0, 6:9] = torch.tensor([299, 289, 298])
    common = min(rows, 300)
    assert torch.equal(drafter.kept_ids, torch.arange(common))
    step = run_step(drafter, target, batch)
    step.loss.backward()
    assert step.loss.isfinite()
    grad = drafter.lm.get_output_embeddings().weight.grad
    assert grad[:common].abs().sum() > 0
    if rows > 300:
        assert grad[300:].abs().sum() == 0
    for text, temperature in (("fanout:3x2", 0.0), ("fanout:3x2@sample", 1.5)):
        done = generate(
            target,
            drafter.eval(),
            [5, 299, 7],
            max_new_tokens=20,
            spec=TreeSpec.parse(text),
            eos_ids=(),
            sampling=SamplingParams(temperature=temperature),
        )
        assert len(done.tokens) == 20
        if temperature == 0:
            assert (
                done.tokens
                == generate(target, None, [5, 299, 7], max_new_tokens=20, eos_ids=()).tokens
            )
    assert drafter.as_target().vocab_size == common


def test_one_other_id_makes_it_another_vocabulary(target):
    tokenizer = make_tokenizer()
    drafter = DraftModel(make_drafter(target).lm, tokenizer, DraftModelConfig())
    drafter.bind(target)
    assert drafter.pair is None
    other = make_tokenizer(280)
    other.add_tokens(["<tool>"])
    drafter.tokenizer = other
    drafter.bind(target)
    assert drafter.pair.way == "tokens" and drafter.kept_ids.tolist() == list(range(280))


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(BEGINNINGS))
def test_it_is_saved_as_a_plain_checkpoint(target, name, tmp_path):
    drafter = make_drafter(target, name).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    drafter.save_pretrained(tmp_path)
    config = load_json(tmp_path / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"] and "drafter_kind" not in config
    assert load_json(tmp_path / "drafttrain.json")["target"]["name"] == "tiny"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = make_batch().input_ids
    torch.testing.assert_close(theirs(ids).logits, drafter.lm(ids).logits, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == target.tokenizer.get_vocab()
    assert kind_of(str(tmp_path)) == "draft_model"
    loaded = load_drafter(str(tmp_path), target)
    spec = TreeSpec.parse("fanout:3x2")
    ours, again = (session_after(d, ids[0]).propose(spec) for d in (drafter, loaded))
    assert torch.equal(ours.tokens, again.tokens) and ours.parents == again.parents
    if name == "lora":
        from peft import PeftModel

        torch.manual_seed(1)
        base = DraftModel.begin(target, "target", {"layers": [0, 2]}, "kl").lm
        with_adapter = PeftModel.from_pretrained(base, tmp_path / "adapter")
        torch.testing.assert_close(
            with_adapter(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4
        )
    fresh = make_drafter(target, name)
    fresh.load_checkpoint(tmp_path)
    state = fresh.state_dict()
    for key, value in drafter.state_dict().items():
        assert torch.equal(state[key], value), key


def test_any_causal_language_model_is_a_drafter(target, target_dir):
    drafter = load_drafter(str(target_dir), target)
    assert drafter.kind == kind_of(str(target_dir)) == "draft_model"
    done = generate(
        target, drafter, [5, 6, 7], max_new_tokens=13, spec=TreeSpec.parse("chain:3"), eos_ids=()
    )
    assert done.stats.accepted == [3] * 3


def test_rotary_frequencies_keep_their_precision_in_bfloat16(target, target_dir):
    from drafttrain.target import Target

    rounded = Target.load(str(target_dir), "bfloat16")
    drafter = load_drafter(str(target_dir), rounded)
    want = target.model.model.rotary_emb.inv_freq
    assert torch.equal(drafter.lm.model.rotary_emb.inv_freq, want)


@pytest.mark.skipif(cpu_kernels() is None, reason="int8 panels need the kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_drafter_of_bfloat16_streams_int8_and_stays_lossless(target_dir, dtype):
    from drafttrain.target import Target

    exact = Target.load(str(target_dir), dtype).pack()
    drafter = load_drafter(str(target_dir), exact)
    linear = [
        drafter.lm.model.layers[0].self_attn.q_proj.weight,
        drafter.lm.model.layers[1].mlp.down_proj.weight,
    ]
    form = torch.int8 if dtype == "bfloat16" else torch.float32
    assert [pack_panels(weight.detach()).dtype for weight in linear] == [form] * 2
    prompt = [5, 6, 7]
    spec = TreeSpec.parse("chain:3")
    plain = generate(exact, None, prompt, max_new_tokens=24, eos_ids=())
    done = generate(exact, drafter, prompt, max_new_tokens=24, spec=spec, eos_ids=())
    assert done.tokens == plain.tokens
    assert done.stats.accepted_length > 2  # the target's own weights, rounded, still mostly agree


@pytest.mark.parametrize(
    ("init", "options", "message"),
    [
        ("target", {}, r"drafter.layers=\[\] must be ascending layers of target 'tiny', 0 to 3"),
        ("target", {"layers": [0, 4]}, r"drafter.layers=\[0, 4\] must be ascending"),
        ("target", {"layers": [2, 1]}, r"drafter.layers=\[2, 1\] must be ascending"),
        (
            "target",
            {"layers": [0], "config": {}},
            r"unknown key drafter.config for kind=draft_model with init='target'",
        ),
        (
            "target",
            {"layers": [0], "lora": {"rank": 4}},
            r"unknown key drafter.lora.rank; there are r, alpha",
        ),
        (
            "target",
            {"layers": [0], "lora": {"targets": ["q"]}},
            r"drafter.lora=.*[Tt]arget modules",
        ),
        (
            "random",
            {"config": {"model_type": "lama"}},
            r"drafter.config=.*makes no causal language model",
        ),
        ("/nowhere/at/all", {}, r"no model folder with a config.json there"),
    ],
)
def test_each_mistake_ends_in_one_clear_line(target, init, options, message):
    with pytest.raises(UserError, match=message):
        DraftModel.begin(target, init, options, "kl")
