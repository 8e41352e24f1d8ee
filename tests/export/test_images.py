"""Heads of targets that read images: what engines are given in `verify`, and targets that an engine serves without a head."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Gemma3Config, Lfm2VlConfig, LlavaConfig

from drafttrain.drafters.shipping import Trained, shipping
from drafttrain.errors import UserError
from drafttrain.export import engine_runs
from drafttrain.export.engine_runs import EngineJob, SeenPrompt, Vllm
from drafttrain.export.verify_export import _log
from drafttrain.export.verify_matrix import DrafterRows, empty_row
from drafttrain.formats.engines import ENGINES
from drafttrain.target.loading import seeing_target
from tests.data.seeing import PLACEHOLDER, TOKENS, picture
from tests.drafters.eagle3_files import make_head


@pytest.fixture(scope="module")
def target(seeing):
    return seeing.load()


@pytest.fixture
def job(target, tmp_path):
    """Two prompts, the second one with two images."""
    pictures = [picture(1), picture(2)]
    shown = target.image_prompt("user: <|image|>, <|image|>?", pictures)
    text = list(range(40, 60))
    head = make_head(target)
    head.save_pretrained(tmp_path / "head")
    trained = Trained(tmp_path / "head", "eagle3", head.config.to_dict(), target.identity())
    seen = {1: SeenPrompt(shown, pictures)}
    prompts = [text, shown.ids.tolist()]
    return EngineJob(trained, target, target.path, "float32", prompts, 6, 2, tmp_path, seen)


def answer_of(job, described, read=None):
    """vLLM's answer, with the texts of our decoder."""
    mine = engine_runs.ours(job, None)["tokens"]
    return {
        "version": "0.32.0",
        "runs": [],
        "counters": {},
        "tokens": mine,
        "rounds": sum(len(text) - 1 for text in mine),
        "read": read or job.prompts,
    }


def test_vllm_gets_markers_and_files_and_our_decoder_the_images(job, monkeypatch):
    asked = []

    def side(python, script, described, environment):
        asked.append(described)
        return answer_of(job, described)

    monkeypatch.setattr(engine_runs, "run_side", side)
    found = Vllm().run(job, job.trained.folder, "python")
    (described,) = asked
    text, marked = described["prompts"]
    assert text == job.prompts[0]
    assert marked.count(PLACEHOLDER) == 2 and job.prompts[1].count(PLACEHOLDER) == 2 * TOKENS
    none, files = described["images"]
    assert none == []
    assert len(set(files)) == 2
    assert all(Path(file).is_file() for file in files)
    blind = engine_runs.ours(job._replace(seen={}), None)["tokens"]
    assert found["tokens"][0] == blind[0]
    assert found["tokens"][1] != blind[1]


def test_other_images_are_verified_again(job, target, tmp_path):
    """An interrupted run's rows are of these images, of which ids say nothing."""
    args = SimpleNamespace(max_new_tokens=6, target=target.path)
    pictures = [picture(3), picture(4)]
    shown = target.image_prompt("user: <|image|>, <|image|>?", pictures)
    assert shown.ids.tolist() == job.prompts[1]
    other = job._replace(seen={1: SeenPrompt(shown, pictures)})
    kept = []
    for each in (job, job, other):
        log = _log(args, tmp_path / "v.json", [DrafterRows(each, {})], {})
        kept.append(len(log.rows))
        log.add({"row": empty_row("eagle3", ENGINES["vLLM"]), "found": {}})
        log.close()
    assert kept == [0, 1, 0]


def test_an_engine_that_reads_other_tokens_is_refused(job, monkeypatch):
    blind = [job.prompts[0], [9, 9]]
    monkeypatch.setattr(
        engine_runs, "run_side", lambda *given: answer_of(job, given[2], read=blind)
    )
    with pytest.raises(UserError, match=r"reads prompt 1 as 2 tokens, the target here as \d+"):
        Vllm().run(job, job.trained.folder, "python")


def test_other_engines_are_not_run_with_images(job, monkeypatch):
    monkeypatch.setattr(DrafterRows, "prove", lambda self, form: Path())
    row = DrafterRows(job, {}).row(ENGINES["llama.cpp"], "python")
    assert "not run here (prompts with images are compared in vLLM alone)" in row["verdict"]


@pytest.fixture
def of_class(tmp_path, monkeypatch):
    """What an engine lacks for a head of a target with this config."""

    def lacks(config, architecture, engine, kind="eagle3"):
        ships = shipping(kind)
        monkeypatch.setattr(type(ships), "lacking", lambda *_: [])
        config.architectures = [architecture]
        config.save_pretrained(tmp_path)
        seeing_target.cache_clear()
        head = {"feature_layers": [1, 2], "block_size": 4}
        trained = Trained(tmp_path, kind, head, {"name": str(tmp_path)})
        return ships.unsupported(trained, "vllm", ENGINES[engine])

    return lacks


def test_a_class_without_features_for_heads_is_refused(of_class):
    gemma = "Gemma3ForConditionalGeneration"
    (reason,) = of_class(Gemma3Config(), gemma, "vLLM")
    assert reason == f"vLLM 0.32.0 gives drafters no features of a target of class {gemma}"
    assert of_class(Gemma3Config(), gemma, "SGLang") == []
    assert (
        of_class(Gemma3Config(), gemma, "TensorRT-LLM, Triton") == []
    )  # its classes are not known
    llava = "LlavaForConditionalGeneration"
    assert of_class(LlavaConfig(), llava, "vLLM") == []
    assert "SGLang" in of_class(LlavaConfig(), llava, "SGLang")[0]


def test_sglang_gives_some_classes_features_for_one_way_of_drafting(of_class):
    gemma = "Gemma3ForConditionalGeneration"
    (reason,) = of_class(Gemma3Config(), gemma, "SGLang", "dflash")
    assert reason.endswith(f"no features of a target of class {gemma} by DFLASH")
    liquid = "Lfm2VlForConditionalGeneration"
    assert of_class(Lfm2VlConfig(), liquid, "SGLang", "dflash") == []
    assert of_class(Lfm2VlConfig(), liquid, "SGLang", "dspark") == []
    assert "by EAGLE3" in of_class(Lfm2VlConfig(), liquid, "SGLang")[0]
