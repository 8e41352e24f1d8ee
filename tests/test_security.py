"""Rules of docs/security.md that have no test elsewhere."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from safetensors.torch import save_file

from drafttrain.errors import UserError
from drafttrain.formats.weights import read_weights
from drafttrain.hub.upload import write_card
from drafttrain.reports.report_page import make_charts, page
from drafttrain.target import Target
from tests.files import ROOT, dump_json, load_json

RESULTS = load_json(ROOT / "eval" / "results" / "quickstart_smollm2-135m_zen5_cpu.json")
HOSTILE = "<script>alert('x')</script>{{ 7 * 7 }}"


def test_a_report_escapes_everything():
    results = copy.deepcopy(RESULTS)
    results |= dict.fromkeys(("target", "drafter", "suite", "device", "note", "kind"), HOSTILE)
    results["command"] = ["drafttrain", HOSTILE]
    results["categories"] = {HOSTILE: next(iter(results["categories"].values()))}
    for prompt in results["prompts"]:
        prompt |= {"category": HOSTILE, "question_id": HOSTILE}
        prompt |= {
            "identical": {"autoregressive": False},
            "outputs": {"autoregressive": HOSTILE, "drafter": f"a {HOSTILE}"},
        }
    html = page([results], [HOSTILE], make_charts([results], [HOSTILE], []), [[HOSTILE, HOSTILE]])
    assert "<script>alert" not in html and "&lt;script&gt;" in html
    assert "49" not in re.findall(r"</script&gt;(\d+)", html) and "{{ 7 * 7 }}" in html
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", html)


def test_values_are_not_templates(tmp_path):
    write_card(
        tmp_path, "data_card.md.jinja", {"license": HOSTILE}, repo=HOSTILE, target=HOSTILE, prompt_license=HOSTILE,
        identity={"model_type": HOSTILE, "num_layers": 1, "vocab_size": 1, "tokenizer": HOSTILE},
        counts={"conversations": 1, "responses": 1, "response_tokens": 1, "truncated": 0}, sources=[(HOSTILE, 1)],
        sampling=[(HOSTILE, HOSTILE)], backend=HOSTILE,
    )  # fmt: skip
    card = (tmp_path / "README.md").read_text()
    assert "{{ 7 * 7 }}" in card and "</script>49" not in card


def test_an_index_cannot_point_outside(tmp_path):
    folder = tmp_path / "head"
    folder.mkdir()
    save_file({"secret": torch.ones(1)}, str(tmp_path / "outside.safetensors"))
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        index = {"metadata": {}, "weight_map": {"secret": name}}
        dump_json(folder / "model.safetensors.index.json", index)
        with pytest.raises(UserError):
            read_weights(folder)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "attack",
    [
        "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% set x = messages.append({}) %}{{ lipsum.__globals__['os'].popen('touch MARK').read() }}",
    ],
)
def test_a_chat_template_cannot_leave_its_sandbox(attack, target_dir, tmp_path):
    target = Target.load(str(target_dir), "float32")
    target.tokenizer.chat_template = attack.replace("MARK", str(tmp_path / "mark"))
    with pytest.raises(Exception, match=r"unsafe|SecurityError|undefined|attribute"):
        target.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert not (tmp_path / "mark").exists()


@pytest.mark.thorough
def test_code_of_a_model_does_not_run(tmp_path):
    config = {
        "model_type": "custom",
        "auto_map": {"AutoConfig": "code.Custom", "AutoModelForCausalLM": "code.Custom"},
    }
    dump_json(tmp_path / "config.json", config)
    (tmp_path / "code.py").write_text(
        f"open({str(tmp_path / 'mark')!r}, 'w')\nclass Custom: pass\n"
    )
    with pytest.raises(UserError):
        Target.load(str(tmp_path), "float32")
    assert not (tmp_path / "mark").exists()
