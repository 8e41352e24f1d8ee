"""The command line as a whole: quick help, `drafttrain` alone, `python -m drafttrain`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from drafttrain.cli import COMMANDS, main
from drafttrain.drafters.kinds import kinds, untrained_kinds
from drafttrain.drafters.registry import kind_class
from drafttrain.formats.engines import GGUF_TYPES
from drafttrain.formats.write_gguf import TYPES

SCRIPT = """
import sys
from drafttrain.cli import COMMANDS, main
for command in COMMANDS:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0
    heavy = {"torch", "transformers", "datasets", "accelerate", "numpy", "huggingface_hub"} & set(sys.modules)
    assert not heavy, f"drafttrain {command} --help imports {heavy}"
"""


def test_help_imports_no_large_package():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(f"usage: drafttrain {command} " in done.stdout for command in COMMANDS)


def test_alone_it_shows_the_pipeline(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "drafttrain generate -> data/" in shown and "drafttrain COMMAND --help" in shown


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "drafttrain", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("drafttrain ")


@pytest.mark.parametrize("name", kinds())
def test_packages_of_kinds_without_weights_say_so(name):
    assert (name in untrained_kinds()) != kind_class(name).trainable


def test_types_of_gguf_files_are_those_that_are_written():
    assert set(GGUF_TYPES) == set(TYPES)
