"""`drafttrain doctor`: good heads of published forms are not accused; each planted fault is named by its row."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from packaging.specifiers import SpecifierSet
from safetensors.torch import load_file, save_file

from drafttrain.cli import main
from drafttrain.commands.doctor import doctor
from drafttrain.drafters.registry import kind_class, load_trained
from drafttrain.drafters.shipping import ExportRequest, find_drafter, shipping
from drafttrain.export import doctor as module
from drafttrain.export.tiny_drafters import answered
from drafttrain.inference import generate_batch
from drafttrain.plain_yaml import read_yaml
from drafttrain.target import Target
from tests.conftest import loaded_target
from tests.drafters.helpers import step_inputs
from tests.drafters.overfitting import overfit
from tests.files import dump_json, load_json

MASK = 290
STATES = (2, 4, 5)
WHOLE = torch.arange(300)
# Kinds and options of the heads, steps in which they learn the texts, and the format that they are written in.
HEADS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "speculators eagle3": ("eagle3", {"ttt_steps": 2, "norm_before_residual": True, "feature_layers": STATES}, 18, "vllm"),
    "LlamaForCausalLMEagle3": ("eagle3", {"ttt_steps": 2, "feature_layers": STATES}, 12, "sglang"),
    "DFlashDraftModel": ("dflash", {"block_size": 3, "mask_token_id": MASK, "feature_layers": STATES}, 38, "vllm"),
    "Qwen3DSparkModel": ("dspark", {"block_size": 3, "mask_token_id": MASK, "feature_layers": STATES, "markov_rank": 8,
                                    "sample_from_anchor": True}, 8, "vllm"),
    "EagleLlamaForCausalLM": ("eagle1", {"ttt_steps": 2}, 8, "vllm"),
    "MedusaModel": ("medusa", {"num_heads": 2}, 10, "vllm"),
    "ours": ("mtp", {"ttt_steps": 2}, 8, ""),
}  # fmt: skip


class Tiny(NamedTuple):
    target: Target
    batch: Any  # texts that the target has written


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    target = loaded_target(folder, layers=8)
    prompts = [list(range(10 + i, 22 + i)) for i in range(2)]
    answers = generate_batch(target, None, prompts, max_new_tokens=40, eos_ids=[])
    return Tiny(target, answered(prompts, [answer.tokens for answer in answers]))


def learned(tiny, kind, options, steps, kept=WHOLE, shift=0):
    """A head that knows the texts by heart. shift: tokens by which its features came late."""
    torch.manual_seed(0)
    cls = kind_class(kind)
    config = cls.config_class.for_target(
        tiny.target, draft_vocab_size=len(kept), loss="ce", **options
    )
    head = cls(config)
    head.initialize(tiny.target, kept)
    head.bind(tiny.target)
    inputs = step_inputs(head, tiny.target, tiny.batch)
    inputs = inputs._replace(features=inputs.features.roll(shift, dims=1))
    overfit(head.train(), inputs, lambda step: False, 2e-2, steps)
    return head


def write(head, tiny, folder, form):
    """Writes a head in a format; the folder."""
    head.save_pretrained(folder / "ours")
    if not form:
        return folder / "ours"
    trained = find_drafter(str(folder / "ours"))
    request = ExportRequest(folder / form, torch.float32, tiny.target.name, 2)
    shipping(trained.kind).write(trained, form, request)
    return folder / form


@pytest.fixture(scope="module")
def heads(tiny, tmp_path_factory):
    """The folder of a good head of each form."""
    found = {}
    for name, (kind, options, steps, form) in HEADS.items():
        head = learned(tiny, kind, options, steps)
        found[name] = write(head, tiny, tmp_path_factory.mktemp("head"), form)
    return found


@pytest.fixture
def examine(tiny, monkeypatch, capsys):
    """Rows of the table by check, for a head that is compared with the texts."""
    monkeypatch.setattr(module, "load_target", lambda _: tiny.target)
    monkeypatch.setattr(module, "load_shell", lambda *_, **__: tiny.target)
    monkeypatch.setattr(module, "texts", lambda *_: tiny.batch)

    def rows(folder, **options):
        found = doctor(folder, target=tiny.target.path, **options)["rows"]
        return {row["check"]: row for row in found}

    return rows


def accused(rows) -> list[str]:
    return [name for name, row in rows.items() if row["verdict"] == "wrong"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", HEADS)
def test_good_heads_are_not_accused(heads, examine, name):
    rows = examine(heads[name])
    assert not accused(rows)
    assert rows["agreement"]["evidence"] and rows["features"]["evidence"]


# -- planted faults --------------------------------------------------------------------------------

Config = dict[str, Any]
Weights = dict[str, torch.Tensor]


class Fault(NamedTuple):
    """A mistake in a good head.

    Attributes:
        rows: that name it, and no others. head: of the fixture `odd`. plant: edits config and weights in place.
        options: of the call.
    """

    rows: set[str]
    head: str
    plant: Callable[[Config, Weights], object]
    options: dict[str, Any] = {}


def layer(**keys):
    """Keys of the decoder layer in speculators' form."""
    return lambda config, _: config["transformer_layer_config"].update(keys)


def keys(**found):
    return lambda config, _: config.update(found)


def block_keys(**found):
    return lambda config, _: config["dflash_config"].update(found)


def rope(**found):
    def plant(config, _):
        config["rope_parameters"] = {**config["rope_parameters"], **found}
        config.pop("rope_scaling", None)

    return plant


def weight(name, change):
    def plant(_, weights):
        weights[name] = change(weights[name])

    return plant


def tables(d2t, t2d=None):
    """A vocabulary of 150 tokens, every second one, with tables as given by the offsets and the mask."""

    def plant(config, weights):
        kept = torch.arange(0, 300, 2)
        offsets = kept - torch.arange(150)
        mask = torch.isin(WHOLE, kept)
        config["draft_vocab_size"] = 150
        weights["lm_head.weight"] = weights["lm_head.weight"][kept].contiguous()
        found = {"d2t": d2t(offsets), "t2d": t2d(mask) if t2d else mask}
        weights.update({key: value for key, value in found.items() if value is not None})

    return plant


def same(value):
    return value


OFF = {"texts": 0}
FAULTS = {
    "another rotary base": Fault(
        {"rotary base"}, "speculators eagle3",
        layer(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    "SGLang's layer numbers in vLLM's key": Fault(
        {"layer numbering"}, "speculators eagle3", keys(eagle_aux_hidden_state_layer_ids=[1, 3, 4])),
    "a layer that the target lacks": Fault(
        {"layer numbering"}, "speculators eagle3", keys(eagle_aux_hidden_state_layer_ids=[2, 4, 9])),
    "speculators #705, the number of layers as a layer": Fault(
        {"layer numbering", "speculators #705 0.6.0"}, "speculators dflash",
        keys(aux_hidden_state_layer_ids=[*STATES, 8], speculators_version="0.6.0")),
    "features that came a token late": Fault({"features"}, "shifted", lambda *_: None),
    "speculators #733, whole heads rotated": Fault(
        {"partial rotation", "speculators #733 0.6.0"}, "speculators dflash",
        lambda config, _: config.update(speculators_version="0.6.0") or layer(
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25})(config, _)),
    "DeepSpec #71, whole heads rotated": Fault(
        {"partial rotation", "DeepSpec #71"}, "DeepSpec", rope(partial_rotary_factor=0.25),
        {"engine_version": "llama.cpp=11549"}),
    "vLLM #49614, blocks that predict at their first token": Fault(
        {"anchor"}, "anchored", lambda *_: None),
    "vLLM #49614, the same where the config says so": Fault(
        {"vLLM #49614 0.32.0"}, "DeepSpec", lambda *_: None, {"engine_version": "0.32.0"}),
    "vLLM #38111, a norm before fc that a release leaves out": Fault(
        {"vLLM #38111 0.18.1"}, "norm before fc", lambda *_: None, {**OFF, "engine_version": "vllm=0.18.1"}),
    "SpecForge #76, fewer tokens in the data than in the head": Fault(
        {"vocabulary map", "SpecForge #76"}, "LlamaForCausalLMEagle3", tables(lambda d2t: d2t[:120].clone())),
    "absolute ids in d2t": Fault(
        {"vocabulary map"}, "LlamaForCausalLMEagle3", tables(lambda d2t: d2t + torch.arange(150)), OFF),
    "another t2d": Fault({"vocabulary map"}, "LlamaForCausalLMEagle3", tables(same, lambda mask: mask.roll(1)), OFF),
    "no d2t": Fault({"vocabulary map"}, "LlamaForCausalLMEagle3", tables(lambda _: None), OFF),
    "a flag of the residual": Fault({"norms"}, "speculators eagle3", keys(norm_before_residual=False)),
    "a flag without its norm": Fault({"norms"}, "speculators eagle3", keys(norm_before_fc=True)),
    "norms minus one": Fault({"norms"}, "speculators eagle3", weight("norm.weight", lambda norm: norm - norm.mean()), OFF),
    "the next mask token": Fault({"mask token"}, "DFlashDraftModel", block_keys(mask_token_id=MASK + 1)),
    "a mask token beyond the vocabulary": Fault({"mask token"}, "DFlashDraftModel", block_keys(mask_token_id=5000)),
    "vLLM #56692, full layers that turn causal": Fault(
        {"vLLM #56692 0.32.0"}, "speculators dflash", keys(sliding_window_non_causal=False), OFF),
    "NeMo's is_causal beside another causal": Fault(
        {"causality"}, "DFlashDraftModel",
        lambda config, _: config["dflash_config"].update(causal=True) or config.update(is_causal=False), OFF),
    "windows without a size": Fault(
        {"window"}, "DFlashDraftModel", keys(layer_types=["sliding_attention"] * 2)),
    "another embedding": Fault(
        {"embeddings"}, "LlamaForCausalLMEagle3",
        lambda _, weights: weights.update({"embed_tokens.weight": torch.ones(300, 32)})),
    "SpecForge #139, tied embeddings in a pruned head": Fault(
        {"SpecForge #139"}, "LlamaForCausalLMEagle3",
        lambda config, weights: config.update(tie_word_embeddings=True) or tables(same)(config, weights), OFF),
    "sections of other rotary widths": Fault({"mrope"}, "DFlashDraftModel", rope(mrope_section=[1, 1, 0])),
    "another target's head": Fault({"target"}, "MedusaModel", keys(hidden_size=64)),
    "a head that knows nothing": Fault({"agreement"}, "LlamaForCausalLMEagle3", weight("lm_head.weight", lambda head: -head)),
    "SGLang #6783, vLLM #48894, a head for short texts": Fault(
        {"vLLM #48894 0.26.0"}, "LlamaForCausalLMEagle3", keys(max_position_embeddings=2048),
        {**OFF, "engine_version": "0.26.0"}),
    "a key that nobody knows": Fault({"import"}, "MedusaModel", keys(warp_factor=9), OFF),
    "a form that nobody reads": Fault({"import"}, "MedusaModel", keys(architectures=["Oracle"]), OFF),
}  # fmt: skip


def rewritten(folder, to, change):
    """A copy of a checkpoint whose config and weights are edited in place."""
    config = load_json(folder / "config.json")
    weights = load_file(folder / "model.safetensors")
    change(config, weights)
    to.mkdir(exist_ok=True)
    dump_json(to / "config.json", config)
    save_file(weights, to / "model.safetensors")
    return to


def as_deepspec(config, _):
    config |= config.pop("dflash_config")
    config.update(architectures=["Qwen3DSparkModel"], markov_rank=0, enable_confidence_head=False)


def as_speculators(config, _):
    own = config.pop("dflash_config")
    layers = {key: config.pop(key) for key in list(config) if key != "block_size"}
    states = [layer + 1 for layer in own["target_layer_ids"]]
    config.update(
        speculators_model_type="dflash", transformer_layer_config=layers, mask_token_id=own["mask_token_id"],
        aux_hidden_state_layer_ids=states, sample_from_anchor=False, draft_vocab_size=300,
    )  # fmt: skip


@pytest.fixture(scope="module")
def odd(tiny, heads, tmp_path_factory):
    """Heads to plant mistakes in by name, those of `heads` too."""
    folder = tmp_path_factory.mktemp("odd")
    kind, options, steps, form = HEADS["DFlashDraftModel"]
    anchored = learned(tiny, kind, {**options, "sample_from_anchor": True}, steps)
    blocks = write(anchored, tiny, folder / "blocks", form)
    kind, options, steps, form = HEADS["speculators eagle3"]
    late = learned(tiny, kind, options, steps, shift=1)
    normed = learned(tiny, kind, {**options, "norm_before_fc": True}, 1)
    return {
        **heads,
        "anchored": blocks,
        "DeepSpec": rewritten(blocks, folder / "deepspec", as_deepspec),
        "speculators dflash": rewritten(
            heads["DFlashDraftModel"], folder / "speculators", as_speculators
        ),
        "shifted": write(late, tiny, folder / "late", form),
        "norm before fc": write(normed, tiny, folder / "normed", form),
    }


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_by_its_rows(odd, examine, tmp_path, name):
    fault = FAULTS[name]
    folder = rewritten(odd[fault.head], tmp_path / "head", fault.plant)
    rows = examine(folder, **fault.options)
    assert set(accused(rows)) == fault.rows
    for row in fault.rows:
        assert rows[row]["fix"] or row == "import"


@pytest.mark.thorough
def test_releases_without_a_bug_are_not_accused(odd, examine):
    assert not accused(examine(odd["speculators dflash"]))
    assert not accused(examine(odd["DeepSpec"], engine_version="llama.cpp=11549", texts=0))
    assert not accused(examine(odd["norm before fc"], engine_version="0.19.0", texts=0))
    found = accused(examine(odd["DeepSpec"], texts=0))
    assert set(found) == {"vLLM #49614 0.32.0", "SGLang #40144 0.5.23"}


@pytest.mark.thorough
def test_the_head_of_another_chat_template(heads, examine, tmp_path, tiny):
    folder = rewritten(heads["MedusaModel"], tmp_path / "head", lambda *_: None)
    dump_json(folder / "tokenizer_config.json", {"chat_template": None})
    assert not accused(examine(folder, texts=0))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert accused(examine(folder, texts=0)) == ["chat template"]
    (folder / "chat_template.jinja").write_text(tiny.target.tokenizer.chat_template)
    assert not accused(examine(folder, texts=0))


def test_an_adapter_is_examined_with_its_drafter(heads, examine, tmp_path):
    base = heads["LlamaForCausalLMEagle3"].parent / "ours"
    adapted = load_trained(str(base))
    adapted.add_adapters({"r": 2}, str(base))
    adapted.save_pretrained(tmp_path)
    rows = examine(tmp_path / "adapter")
    assert not accused(rows)
    assert rows["agreement"]["evidence"] and rows["rotary base"]["evidence"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("norm.weight", torch.ones(64, dtype=torch.int64)), ("d2t", torch.zeros(300, 2).long())],
)
def test_tensors_of_another_form_are_in_the_table(heads, examine, tmp_path, name, value):
    def plant(_, weights):
        weights[name] = value

    folder = rewritten(heads["LlamaForCausalLMEagle3"], tmp_path / "head", plant)
    assert accused(examine(folder, texts=0))


def test_texts_that_cannot_be_written_are_said(heads, examine, monkeypatch, capsys):
    monkeypatch.setattr(module, "resolve_target", lambda _: "org/name")
    assert "agreement" not in examine(heads["MedusaModel"])
    assert "is not a folder with weights, so it writes no texts" in capsys.readouterr().err


def test_a_command_writes_the_table_and_says_what_is_wrong(heads, tiny, tmp_path, capsys):
    folder = rewritten(heads["MedusaModel"], tmp_path / "head", keys(warp_factor=9))
    output = tmp_path / "doctor.json"
    words = ["doctor", str(folder), "--target", str(tiny.target.path), "--texts", "0"]
    assert main([*words, "--output", str(output), "--quiet"]) == 1
    assert capsys.readouterr().err.startswith("import: ")
    found = load_json(output)["rows"]
    assert "warp_factor=9" in found[-1]["evidence"]
    assert main([*words, "--engine-version", "hal=9000"]) == 2
    assert "names no engine" in capsys.readouterr().err


def test_every_bug_has_releases_and_a_condition():
    for bug in read_yaml(module._TABLE.read_text(), "table")["bugs"]:
        assert (
            re.fullmatch(r"\w+ #\d+", bug["bug"]) and bug["effect"] and bug["fix"] and bug["when"]
        )
        SpecifierSet(bug.get("releases", ""))


@pytest.mark.parametrize(
    "keys", [{"rope_parameters": 1}, {"layer_types": False}, {"head_dim": "x"}]
)
def test_values_of_another_form_are_one_line(heads, tiny, tmp_path, capsys, keys):
    folder = rewritten(
        heads["EagleLlamaForCausalLM"], tmp_path / "head", lambda config, _: config.update(keys)
    )
    words = [str(folder), "--target", str(tiny.target.path)]
    assert main(["import", "--checkpoint", *words, "--output", str(tmp_path / "read")]) == 2
    assert main(["doctor", *words, "--texts", "0", "--quiet"]) in (1, 2)
    assert "Traceback" not in capsys.readouterr().err
