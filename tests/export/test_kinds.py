"""What export, push, import and the card ask of a kind, and a kind that no engine loads."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import yaml

from drafttrain.cli import main
from drafttrain.drafters import shipping as module
from drafttrain.drafters.registry import kind_class, kinds, load_trained
from drafttrain.drafters.shipping import find_drafter, format_lines, shipped_kinds, shipping
from drafttrain.export.serving_recipes import recipes
from drafttrain.formats.engines import ENGINES, FORMATS, SPECULATORS
from tests.conftest import make_target, save_target
from tests.drafters.eagle3_files import make_head
from tests.drafters.layer_kinds import make_kind
from tests.files import ROOT, dump_json

CONFIGS = ROOT / "configs"


@pytest.fixture
def drafter(tmp_path):
    target = make_target(layers=8)
    make_head(target).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_every_module_is_of_a_trained_kind_and_names_known_formats_and_engines():
    assert {"eagle3", "draft_model"} <= set(shipped_kinds())
    for name in shipped_kinds():
        kind = shipping(name)
        assert name in kinds() and kind_class(name).trainable != bool(kind.own_drafting)
        assert kind.formats.keys() <= set(FORMATS) and set(kind.in_root) <= kind.formats.keys()
        assert set(kind.verifiable.values()) <= kind.formats.keys()
        for form, described in kind.formats.items():
            assert described.engines and set(described.engines) <= {*ENGINES, SPECULATORS.name}
            line = next(line for line in format_lines(name) if described.text in line)
            assert form in line.partition(described.text)[0]


def test_a_kind_without_a_module_is_published_in_our_own_format_and_nowhere_else(
    drafter, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(module, "shipped_kinds", lambda: ["draft_model"])
    args = ["--drafter", str(drafter)]
    for form in FORMATS:
        assert main(["export", *args, "--format", form, "--output", str(tmp_path / "x")]) == 2
        assert (
            f"format='{form}' cannot express this drafter: no {form} format is known"
            in capsys.readouterr().err
        )
    assert not (tmp_path / "x").exists()
    assert main(["verify", *args]) == 2
    assert "no engine format is known for kind 'eagle3'" in capsys.readouterr().err
    push = [
        "push",
        *args,
        "--repo",
        "some/one",
        "--without-evaluation",
        "--dry-run",
        "--base-model",
        "a/b",
    ]
    assert main([*push, "--output", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "of kind eagle3, an unrecorded number of parameters" in card
    assert card.count("not served") == len(ENGINES) and "out = generate(" in card
    back = load_trained(str(tmp_path / "out"))
    assert (
        torch.equal(back.kept_ids, load_trained(str(drafter)).kept_ids)
        and back.config.target["name"] == "a/b"
    )


def test_formats_beside_our_own_are_fetched_from_their_folder(drafter, monkeypatch):
    trained = find_drafter(str(drafter))
    by_engine = {
        recipe.engine: recipe for recipe in recipes(trained, "some/one", "a/b", published=True)
    }
    assert (
        by_engine["vLLM"].commands.startswith("vllm serve a/b")
        and '"model": "some/one"' in by_engine["vLLM"].commands
    )
    assert "is not a language model of its own" in by_engine["transformers"].reasons[0]
    first, second, _, third = by_engine["llama.cpp"].commands.splitlines()[:4]
    assert (
        first == "hf download some/one draft.gguf --local-dir some/one" and "a/b as GGUF" in second
    )
    assert third.startswith("llama-server -m target.gguf --spec-type draft-eagle3 ")
    monkeypatch.setattr(type(shipping("eagle3")), "in_root", ())
    monkeypatch.setattr(
        type(shipping("eagle3")),
        "options",
        lambda self, trained: {"vLLM": {"method": "medusa", "num_speculative_tokens": 2}},
    )
    by_engine = {
        recipe.engine: recipe for recipe in recipes(trained, "some/one", "a/b", 5, published=True)
    }
    first, second = by_engine["vLLM"].commands.splitlines()
    assert first == "hf download some/one --include 'vllm/*' --local-dir some/one"
    assert (
        '"model": "some/one/vllm", "num_speculative_tokens": 2' in second
        and '"method": "medusa"' in second
    )
    assert by_engine["SGLang"].reasons == ["it knows no drafter of kind eagle3"]


@pytest.mark.parametrize(("kind", "engine"), [("domino", "SGLang"), ("jetspec", "vLLM")])
def test_a_kind_of_one_engine_has_its_command(tmp_path, kind, engine):
    head = make_kind(kind, make_target(layers=8), torch.arange(300), mask_token_id=299)
    head.save_pretrained(tmp_path)
    made = {each.engine: each.commands for each in recipes(find_drafter(str(tmp_path)), "D", "T")}
    assert made[engine]


def test_engines_that_draft_chains_get_the_best_chain(drafter):
    """Not the depth of our tree: a deep tree pays where a chain of its depth does not."""
    trained = find_drafter(str(drafter))
    chain = {
        "decoding": {"tree": {"spec": "chain:2", "depth": 2}},
        "overall": {"speedup_vs_fastest": 1.2},
        "kind": "eagle3",
    }
    tree = {
        "decoding": {"tree": {"spec": "dynamic:6,4,8", "depth": 6}},
        "overall": {"speedup_vs_fastest": 1.9},
        "kind": "eagle3",
    }

    def tokens(*results):
        by_engine = {
            each.engine: each.commands
            for each in recipes(trained, "some/one", "a/b", results=results)
        }
        assert "--speculative-num-steps 6" in by_engine["SGLang"] or tree not in results
        assert ("dynamic_tree_max_topK: 4" in by_engine["TensorRT-LLM, Triton"]) == (
            tree in results
        )
        return json.loads(by_engine["vLLM"].partition("'")[2].rstrip("'"))["num_speculative_tokens"]

    assert tokens(chain, tree) == 2 and tokens(chain) == 2 and tokens(tree) == 6
    decoding = trained.folder / "decoding.json"
    decoding.write_text('{"tree": "dynamic:6,4,8", "chain": "chain:3"}')
    assert tokens(tree) == 3 and tokens(chain, tree) == 2
    decoding.unlink()


def test_a_checkpoint_of_no_kind_is_refused_with_what_is_read(tmp_path, capsys):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert (
        main(
            [
                "import",
                "--checkpoint",
                str(tmp_path / "c"),
                "--target",
                "x",
                "--output",
                str(tmp_path / "o"),
            ]
        )
        == 2
    )
    printed = capsys.readouterr().err
    assert (
        "GPT2LMHeadModel" in printed
        and "import reads DFlash drafters" in printed
        and "EAGLE-3 heads" in printed
    )


@pytest.mark.thorough
def test_draft_models_with_more_tokens_than_the_target(tmp_path):
    """Per engine: settings that make it work, or the reason and the release; transformers runs here."""
    target = make_target()
    draft = make_target(layers=2, vocab_size=310)
    for name, built in (("target", target), ("draft", draft)):
        save_target(built, tmp_path / name)
    meta = {
        "drafter_kind": "draft_model",
        "target": {"name": str(tmp_path / "target"), "vocab_size": 300},
    }
    dump_json(tmp_path / "draft" / "drafttrain.json", meta)
    trained = find_drafter(str(tmp_path / "draft"))
    kind = shipping("draft_model")
    made = {recipe.engine: recipe for recipe in recipes(trained, "some/draft", "a/b")}
    assert '"use_heterogeneous_vocab": true' in made["vLLM"].commands
    assert (
        "takes it, earlier releases"
        in kind.unsupported(trained, "vllm", ENGINES["vLLM"].of_release("0.31.0"))[0]
    )
    assert (
        "stops at it since 0.5.15" in made["SGLang"].reasons[0]
        and "by token id" in made["TensorRT-LLM, Triton"].reasons[0]
    )
    assert made["llama.cpp"].commands and not made["llama.cpp"].reasons
    far = replace(trained, config={**trained.config, "vocab_size": 430})
    assert "at most 128 tokens more or less" in kind.unsupported(far, "gguf")[0]
    assert "assistant_tokenizer=AutoTokenizer.from_pretrained" in made["transformers"].commands
    ids = torch.arange(20, 32)[None]
    words = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    plain = target.model.generate(ids, **words)
    both = {
        "assistant_model": draft.model,
        "tokenizer": target.tokenizer,
        "assistant_tokenizer": draft.tokenizer,
    }
    assert torch.equal(target.model.generate(ids, **words, **both), plain)
    with pytest.raises(ValueError, match="have different tokenizers"):
        target.model.generate(ids, **words, assistant_model=draft.model)


def test_export_says_which_formats_cannot_express_a_drafter(tmp_path, capsys):
    """A head of six feature layers: llama.cpp takes three."""
    target = make_target(layers=8)
    make_head(target, feature_layers=(1, 2, 3, 4, 5, 6)).save_pretrained(tmp_path / "six")
    assert main(["export", "--drafter", str(tmp_path / "six")]) == 0
    printed = capsys.readouterr().out
    assert (
        "gguf cannot express this drafter: 6 feature layers: llama.cpp b11549 takes three"
        in printed
    )
    assert "next: drafttrain export" in printed and "--format vllm" in printed
    assert "vllm cannot" not in printed


def test_an_older_release_is_named_with_what_it_lacks(tmp_path, capsys):
    make_head(make_target(layers=8), fc_norm=True).save_pretrained(tmp_path / "head")
    command = [
        "export",
        "--drafter",
        str(tmp_path / "head"),
        "--format",
        "sglang",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main([*command, "--engine-version", "0.5.11"]) == 2
    said = capsys.readouterr().err
    assert "cannot express this drafter for SGLang 0.5.11: fc_norm" in said
    assert (
        "supported since SGLang 0.5.12" in said and "without --engine-version, 0.5.23 can" in said
    )
    assert main(command) == 0


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_recipes_of_blocks_have_a_mask_that_sglang_takes(tmp_path, kind):
    recipe = yaml.safe_load((CONFIGS / "smollm2-135m" / f"{kind}.yaml").read_text())
    options = {
        "mask_token_id": recipe["drafter"]["mask_token_id"],
        "num_hidden_layers": 1,
        "feature_layers": (1, 3),
    }
    cls = kind_class(kind)
    cls(cls.config_class.for_target(make_target(layers=8), **options)).save_pretrained(tmp_path)
    assert shipping(kind).unsupported(find_drafter(str(tmp_path)), "sglang") == []
