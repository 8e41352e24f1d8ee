"""`drafttrain completion`: its help and flags."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")
HELP = """Print a script that completes drafttrain's commands, flags, values and files.

  drafttrain completion bash > ~/.local/share/bash-completion/completions/drafttrain
  drafttrain completion zsh > ~/.zsh/completions/_drafttrain         # a folder of $fpath, before compinit runs
  drafttrain completion fish > ~/.config/fish/completions/drafttrain.fish

A new shell then completes; run it again after an update of drafttrain."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
