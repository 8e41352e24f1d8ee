"""How commands end: what they wrote, the command that follows, --quiet and --json."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from drafttrain.cli import main, parsed
from drafttrain.commands import COMMANDS
from drafttrain.errors import UserError
from drafttrain.outcome import conclude, fault, next_command, voice
from tests.files import FIXTURES


def test_next_commands_can_be_pasted(tmp_path):
    results = [str(tmp_path / name) for name in ("r 1.json", "r2.json")]
    for name in results:
        tmp_path.joinpath(name).write_text("{}")
    line = next_command(
        "push", drafter="my run/drafter", repo="a/b", results=results, dry_run=True, data=""
    )
    assert line.startswith("drafttrain push --drafter 'my run/drafter' --repo a/b --results '")
    assert line.endswith(f"r 1.json' {results[1]} --dry-run")
    _, values, _ = parsed(shlex.split(line)[1:])
    assert values["drafter"] == "my run/drafter" and values["results"] == results
    assert values["dry_run"]


def test_next_commands_show_no_secrets(capsys):
    url = "http://joe:hunter22@host:8000/v1?api_key=sekrit99x"
    conclude({}, then=next_command("generate", url=[url]))
    line = capsys.readouterr().out
    assert "http://***@host:8000/v1?api_key=***" in line
    assert "hunter22" not in line and "sekrit99x" not in line


def test_next_commands_carry_what_the_target_needs():
    given = {"device": "auto", "dtype": "bfloat16", "trust_remote_code": True, "seed": 3}
    carry = argparse.Namespace(**given, chat_template_kwargs={"enable_thinking": False})
    line = next_command("eval", carry=carry, target="T", drafter="D")
    _, values, _ = parsed(shlex.split(line)[1:])
    assert (values["dtype"], values["trust_remote_code"]) == ("bfloat16", True)
    assert values["chat_template_kwargs"] == {"enable_thinking": False}
    assert "--device" not in line and "--seed" not in line


def speak() -> None:
    print("a table")
    print("a note", file=sys.stderr)
    os.write(1, b"from a library\n")
    subprocess.run(["echo", "from a child"], check=True)
    fault("a row failed")
    conclude({"speedup": 1.5}, ["results.json"], "drafttrain report results.json")


def test_json_is_all_of_stdout(capfd):
    with voice("eval", quiet=False, as_json=True):
        speak()
    out, err = capfd.readouterr()
    expected = {
        "command": "eval",
        "wrote": ["results.json"],
        "next": "drafttrain report results.json",
    }
    assert json.loads(out) == {**expected, "result": {"speedup": 1.5}} and out.count("\n") == 1
    for line in (
        "a table",
        "a note",
        "from a library",
        "from a child",
        "a row failed",
        "wrote results.json",
    ):
        assert line in err


def test_quiet_shows_errors_only(capfd):
    with voice("eval", quiet=True, as_json=False):
        speak()
    assert capfd.readouterr() == ("", "a row failed\n")
    with voice("eval", quiet=True, as_json=True):
        speak()
    out, err = capfd.readouterr()
    assert json.loads(out)["result"] == {"speedup": 1.5} and err == "a row failed\n"
    speak()
    assert capfd.readouterr().out.splitlines()[-2:] == [
        "wrote results.json",
        "next: drafttrain report results.json",
    ]


def test_a_mistake_is_an_object_too(capfd):
    with pytest.raises(UserError), voice("eval", quiet=False, as_json=True):
        raise UserError("limit=0 must be more")
    assert json.loads(capfd.readouterr().out) == {
        "command": "eval",
        "error": "limit=0 must be more",
    }
    with voice("eval", quiet=False, as_json=True):
        pass  # a process that is not the first of a launch
    assert capfd.readouterr().out == ""


TARGET = str(FIXTURES / "target")
WORDS = {
    "T": f"--target {shlex.quote(TARGET)} --dtype float32",
    "D": "--drafter runs/drafter",
    "CHATS": shlex.quote(str(FIXTURES / "chats.jsonl")),
    "TARGET": shlex.quote(TARGET),
    "KEYS": "kind=eagle3 max_steps=1 decode_prompts=0 validation=0.2 max_length=64 use_cpu=true drafter.ttt_steps=2",
}
# A pipeline: each command with what it must write, and the command that it must name.
PIPELINE = [
    ("recipes", None, "recipes"),
    ("prompts --source file --input {CHATS} --output runs/p.jsonl", "p.jsonl", "generate"),
    ("generate {T} --prompts runs/p.jsonl --output runs/data --max-length 128 --max-new-tokens 16", "data", "train"),
    ("plan recipe.yaml --disk 1T target={TARGET} data=runs/data output_dir=runs/drafter max_length=99 --output runs/plan.json",
     "plan.json", "train"),
    ("features --data runs/data", "data/features", "train"),
    ("train recipe.yaml target={TARGET} --data runs/data --output-dir=runs/drafter {KEYS}", "drafter", "tune"),
    ("tune {T} {D} --prompts 2 --repeats 1 --max-new-tokens 16", "tune.json", "eval"),
    ("eval {T} {D} --limit 1 --tree chain:2 --max-new-tokens 8", "results.json", "report"),
    ("report runs/results.json", "report.html", "export"),
    ("diagnose runs/results.json --apply", "drafter/decoding.json", "eval"),
    ("estimate --results runs/results.json --output runs/estimate.json", "estimate.json", "export"),
    ("trace {T} {D} --prompt Hi --max-new-tokens 8 --output runs/t.html", "t.html", "eval"),
    ("export {D}", None, "export"),
    ("export {D} --format vllm --output runs/export", "export/config.json", "verify"),
    ("verify {D} --exported runs/export --engine none", None, "push"),
    ("doctor runs/export {T} --texts 0", None, "import"),
    ("import --checkpoint runs/export --target {TARGET} --output runs/imported", "imported", "eval"),
    ("push {D} --repo a/b --results runs/results.json --accept-implausible --dry-run --output runs/p1", "p1", "push"),
    ("push-data --data runs/data --repo a/b --prompt-license 'MIT (x)' --dry-run --output runs/p2", "p2", "push-data"),
    ("ngram-store --data runs/data --output runs/s.safetensors", "s.safetensors", "eval"),
    ("sweep --target {TARGET} --drafter ngram --limit 1 --max-new-tokens 8 --output runs/sweep", "sweep/summary.json", "report"),
]  # fmt: skip


@pytest.mark.slow
def test_every_command_leads_on(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["drafttrain"])
    tmp_path.joinpath("recipe.yaml").write_text("seed: 0\n")
    before = set(tmp_path.iterdir())
    for line, wrote, following in PIPELINE:
        words = shlex.split(line.format(**WORDS))
        assert main([*words, "--json"]) == 0, line
        out, err = capfd.readouterr()
        answer = json.loads(out)
        assert answer["command"] == words[0] and answer["result"], line
        assert not any(noise in err for noise in ("Traceback", "Warning", "WARNING")), err
        assert wrote is None or f"runs/{wrote}" in [
            os.path.relpath(path) for path in answer["wrote"]
        ], line
        assert all(Path(path).exists() for path in answer["wrote"])
        known = {"RECIPE": "recipe.yaml", "TARGET": TARGET, "USER/NAME": "a/b"}
        program, *then = (known.get(word, word) for word in shlex.split(answer["next"]))
        assert (program, then[0]) == ("drafttrain", following) and parsed(then), line
        assert main([*words, "--quiet"]) == 0 and capfd.readouterr() == ("", ""), line
    assert set(tmp_path.iterdir()) - before == {
        tmp_path / "runs"
    }  # nothing lands in the current folder
    command = [
        sys.executable,
        "-m",
        "drafttrain",
        *shlex.split("trace {T} {D} --prompt Hi --max-new-tokens 8".format(**WORDS)),
    ]
    alone = {**os.environ, "PYTHONPATH": str(FIXTURES.parents[1])} | {
        "DS_ACCELERATOR": "",
        "TQDM_DELAY": "",
    }
    alone = {name: value for name, value in alone.items() if value}
    done = subprocess.run(command, capture_output=True, text=True, env=alone)
    assert "next: drafttrain eval" in done.stdout
    assert [
        line for line in done.stderr.splitlines() if not line.startswith("device ")
    ] == []  # no bars, no notices
    tested = {line.split()[0] for line, _, _ in PIPELINE}
    stopped = {"serve-target", "adapt", "chat"}  # run until they are stopped
    assert set(COMMANDS) - tested == {
        "fetch",
        "suites",
        "bench-server",
        "swap",
        "completion",
        *stopped,
    }
