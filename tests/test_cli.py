"""The command line as a whole: help, `drafttrain` alone, `python -m drafttrain`, completion, other spellings of keys."""

from __future__ import annotations

import subprocess
import sys

import pytest

from drafttrain.cli import main, parsed
from drafttrain.command import cli_parameters, helps_of, is_word, spelled
from drafttrain.commands import COMMANDS, function_of
from drafttrain.config import TrainConfig, TrainerKeys
from drafttrain.drafters.kinds import kinds, untrained_kinds
from drafttrain.drafters.registry import kind_class
from drafttrain.errors import UserError
from drafttrain.evaluation.baselines import ALL_BASELINES
from drafttrain.evaluation.suites import known_suites
from drafttrain.export.verify_matrix import TOLERANCE
from drafttrain.formats.engines import FORMATS, GGUF_TYPES, engine_of
from drafttrain.formats.write_gguf import TYPES
from drafttrain.reports import terminal_chat
from drafttrain.values import table

SCRIPT = """
import sys
from drafttrain.cli import main
from drafttrain.commands import COMMANDS
for command in COMMANDS:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0
    heavy = {"torch", "transformers", "datasets", "accelerate", "numpy", "huggingface_hub"} & set(sys.modules)
    assert not heavy, f"drafttrain {command} --help imports {heavy}"
"""


@pytest.mark.thorough
def test_help_imports_no_large_package():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    shown = done.stdout.lower()
    assert all(f"usage: drafttrain {command} " in shown for command in COMMANDS)


def test_alone_it_shows_the_pipeline(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "drafttrain generate -> data/" in shown and "drafttrain COMMAND --help" in shown


def test_it_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "drafttrain", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("drafttrain ")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("recipes > /dev/full", 2, "error: stdout cannot be written (its disk is full)"),
        ("report --help > /dev/full", 2, "error: stdout cannot be written (its disk is full)"),
        ("recipes <&- >&- 2>&-", 0, ""),
        ("recipes nope/nope >&-", 2, "error: "),
    ],
)
def test_a_stdout_that_takes_no_text(line, status, said):
    command = f"{sys.executable} -m drafttrain {line}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == status
    assert done.stderr.startswith(said) and done.stderr.count("\n") == bool(said)


@pytest.mark.parametrize(
    ("name", "word", "rule"),
    [
        ("TQDM_DELAY", "abc", "a number"),
        ("TQDM_MININTERVAL", "", "a number"),
        ("TQDM_NCOLS", "8.5", "a whole number"),
    ],
)
def test_a_variable_of_tqdm_that_is_no_number(name, word, rule, monkeypatch, capsys):
    monkeypatch.setenv(name, word)
    assert main(["recipes"]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {name}={word!r} must be {rule}; correct it, or unset it\n"
    )


@pytest.mark.parametrize("name", kinds())
def test_packages_of_kinds_without_weights_say_so(name):
    assert (name in untrained_kinds()) != kind_class(name).trainable


def test_types_of_gguf_files_are_those_that_are_written():
    assert set(GGUF_TYPES) == set(TYPES)


@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS)
def test_help_comes_from_the_signature(command, monkeypatch, capsys):
    function = function_of(command)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for one in cli_parameters(function):
        assert helps_of(function)[one.name], f"{one.name} has no help"
        assert is_word(one) or f"--{spelled(one.name)} " in shown
        if isinstance(one.default, int | float) and not isinstance(one.default, bool):
            assert f"[default: {one.default}]" in shown or "default" in helps_of(function)[one.name]
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert all(len(line) <= 60 for line in capsys.readouterr().out.splitlines())


def test_help_names_every_kind_and_command():
    """Docstrings are constants: what they list of other tables is compared with them here."""
    untrained = ", ".join(untrained_kinds())
    names = f"a drafter's folder or Hub id, also with :OPTION=VALUE, KIND or KIND:OPTIONS ({untrained}), or FOLDER+KIND"
    for command in ("chat", "eval", "tune", "trace"):
        assert names in " ".join(helps_of(function_of(command))["drafter"].split())
    suites = " ".join(helps_of(function_of("eval"))["suite"].split())
    assert suites.startswith(", ".join([*known_suites(), "a JSONL file"]))
    assert (
        f"a list of {', '.join(ALL_BASELINES)}, or none"
        in helps_of(function_of("eval"))["baselines"]
    )
    releases = " ".join(helps_of(function_of("export"))["engine_version"].split())
    for form in FORMATS:
        assert f"{form}: {engine_of(form).name} {engine_of(form).release}" in releases
    shown = function_of("chat").__doc__ or ""
    for command, meaning in terminal_chat.COMMANDS.items():
        assert f"{command:<15} {meaning}\n" in shown
    assert f"more than {TOLERANCE:.0%} apart" in " ".join(
        (function_of("verify").__doc__ or "").split()
    )


def test_the_function_of_a_command_is_the_python_call(tmp_path):
    function = function_of("report")
    with pytest.raises(UserError, match=r"report: outptu= is no option of it; did you mean output"):
        function("results.json", outptu="x")
    with pytest.raises(UserError, match=r"report: results=.* must be an existing file"):
        function(tmp_path / "none.json")
    with pytest.raises(UserError, match="estimate: devices=0 must be a whole number from 1 to"):
        function_of("estimate")(results=__file__, devices=0)


def test_the_beginning_of_a_flag_stands_for_it(capsys):
    assert main(["sweep", "--target", "x", "--drafter", "y", "--max-new", "0"]) == 2
    assert "--max-new-tokens='0' must be a whole number" in capsys.readouterr().err


def test_help_of_train_lists_the_keys(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, _, default, meaning in (*table(TrainConfig), *table(TrainerKeys)):
        end = "" if default in (None, "", {}) else f" [default: {str(default).lower()}]"
        assert f" --{name} STR {' '.join(meaning.split())}{end}" in shown


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        ("--max_steps 4", ["max_steps=4"]),
        ("--max-steps=4 kind=medusa", ["max_steps=4", "kind=medusa"]),
        ("a=1 --bf16 --packing loss=kl", ["a=1", "bf16=true", "packing=true", "loss=kl"]),
        ("--max_steps -1 --drafter.ttt_steps 3", ["max_steps=-1", "drafter.ttt_steps=3"]),
        (
            "--quiet max_steps=4 --json --learning-rate 1e-4 seed=0",
            ["max_steps=4", "learning_rate=1e-4", "seed=0"],
        ),
    ],
)
def test_keys_of_train_may_be_written_as_flags(words, overrides):
    _, values, switches = parsed(["train", "recipe.yaml", *words.split()])
    assert values["recipe"] == "recipe.yaml" and values["overrides"] == overrides
    assert switches == {"quiet": "--quiet" in words, "json": "--json" in words}


def test_a_near_miss_of_a_command_is_named(capsys):
    assert (
        main(["trian"]) == 2
        and "unknown command 'trian'; did you mean train" in capsys.readouterr().err
    )
    assert main(["xyzzy"]) == 2 and "known: fetch, prompts" in capsys.readouterr().err


COMPLETE = """
source /dev/stdin <<< "$SCRIPT"
COMP_WORDS=(drafttrain $WORDS); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_drafttrain; echo "${COMPREPLY[@]}"
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "found"),
    [("ev", "eval"), ("eval --temp", "--temperature"), ("generate --backend ex", "existing")],
)
def test_bash_completes(words, found, capsys):
    assert main(["completion", "bash"]) == 0
    env = {"SCRIPT": capsys.readouterr().out, "WORDS": words}
    done = subprocess.run(["bash", "-c", COMPLETE], capture_output=True, text=True, env=env)
    assert done.stdout.split() == [found], done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_command(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS) and "max-new-tokens" in script
