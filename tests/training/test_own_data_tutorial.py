"""The commands of the tutorial "Your own data", on a tiny target and a head of the quickstart's recipe."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from drafttrain.cli import main
from tests.conftest import make_target, save_target
from tests.files import dump_json
from tests.training.runs import ROOT

PAGE = ROOT / "docs" / "tutorials" / "own-data.md"
SMALLER = {  # flags behind a command, so that it takes seconds
    "prompts": ["--min-chars", "1"],
    "generate": ["--max-new-tokens", "16"],
    "eval": ["--max-new-tokens", "8", "--baselines", "autoregressive"],
    "train": ["max_steps=2", "decode_prompts=1", "decode_tokens=8"],
    "tune": ["--prompts", "2", "--max-new-tokens", "16", "--repeats", "1"],
}


def commands() -> list[list[str]]:
    """The words of each drafttrain command of the page, in order."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["drafttrain"]:
                found.append(words[1:])
    return found


@pytest.mark.slow
def test_every_command_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    target = make_target(layers=8)
    save_target(target, "target")
    lines = [json.dumps({"prompt": f"Write {number} lines about tea."}) for number in range(24)]
    (tmp_path / "support.jsonl").write_text("\n".join(lines))
    question = {"question_id": 1, "category": "repairs", "turns": ["The chain jumps. Why?"]}
    dump_json(tmp_path / "heldout.jsonl", question)

    def run(words: list[str]) -> str:
        words = [word.replace("smollm2-135m", "target") for word in words]
        words = [word for word in words if not word.startswith("max_minutes=")]
        assert main([*words, *SMALLER.get(words[0], [])]) == 0, (words, capsys.readouterr().err)
        return capsys.readouterr().out

    # The quickstart's head: what scripts/quickstart.sh does before this page begins.
    made = {words[0]: words for words in commands()}
    prompts = "runs/quickstart/prompts.jsonl"
    run(["prompts", "--source", "file", "--input", "support.jsonl", "--output", prompts])
    generate = [
        *("generate", "--target", "target", "--prompts", prompts),
        *("--output", "runs/quickstart/data", "--features", "default"),
    ]
    run(generate)
    train = [word for word in made["train"] if not word.startswith(("init=", "data=", "output"))]
    run([*train, "data=runs/quickstart/data", "output_dir=runs/quickstart/drafter"])

    for words in commands():
        out = run(words)
        if words[0] == "train":
            assert "without its layers" in out and "loading target" not in out
