"""How commands end: what they wrote, the command that follows, --quiet and --json."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys

import pytest

from drafttrain.cli import command_parser
from drafttrain.errors import UserError
from drafttrain.outcome import conclude, fault, next_command, voice


def test_next_commands_can_be_pasted(tmp_path):
    results = [str(tmp_path / name) for name in ("r 1.json", "r2.json")]
    for name in results:
        tmp_path.joinpath(name).write_text("{}")
    line = next_command("push", drafter="my run/drafter", repo="a/b", results=results, dry_run=True, data="")
    assert line.startswith("drafttrain push --drafter 'my run/drafter' --repo a/b --results '")
    assert line.endswith(f"r 1.json' {results[1]} --dry-run")
    args = command_parser(["push"]).parse_args(shlex.split(line)[1:])
    assert args.drafter == "my run/drafter" and args.results == results and args.dry_run


def test_next_commands_carry_what_the_target_needs():
    given = {"device": "auto", "dtype": "bfloat16", "trust_remote_code": True, "seed": 3}
    carry = argparse.Namespace(**given, chat_template_kwargs={"enable_thinking": False})
    line = next_command("eval", carry=carry, target="T", drafter="D")
    args = command_parser(["eval"]).parse_args(shlex.split(line)[1:])
    assert (args.dtype, args.trust_remote_code, args.chat_template_kwargs) == (
        "bfloat16", True, {"enable_thinking": False})  # fmt: skip
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
    expected = {"command": "eval", "wrote": ["results.json"], "next": "drafttrain report results.json"}
    assert json.loads(out) == {**expected, "result": {"speedup": 1.5}} and out.count("\n") == 1
    for line in ("a table", "a note", "from a library", "from a child", "a row failed", "wrote results.json"):
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
    assert capfd.readouterr().out.splitlines()[-2:] == ["wrote results.json", "next: drafttrain report results.json"]


def test_a_mistake_is_an_object_too(capfd):
    with pytest.raises(UserError), voice("eval", quiet=False, as_json=True):
        raise UserError("limit=0 must be more")
    assert json.loads(capfd.readouterr().out) == {"command": "eval", "error": "limit=0 must be more"}
    with voice("eval", quiet=False, as_json=True):
        pass  # a process that is not the first of a launch
    assert capfd.readouterr().out == ""
