"""`drafttrain chat`: its help, flags and slash commands."""

from __future__ import annotations

import argparse

from drafttrain.flags import (
    add_drafter_flag,
    add_sampling_flags,
    add_target_flags,
    add_template_flag,
)
from drafttrain.values import AnyText, Count, adder

COMMANDS = {
    "/plain": "switch drafting off, which measures plain decoding, and on again",
    "/system TEXT": "set the system message, or none",
    "/reset": "begin a new conversation",
    "/save FILE": "write the conversation and its figures as JSON",
    "/help": "show this list",
    "/quit": "end, as Ctrl-D does",
}

HELP = """Talk to the target in the terminal and watch the drafter at work.

  drafttrain chat --target smollm2-135m --drafter runs/drafter+ngram
  drafttrain chat --target smollm2-135m --drafter ngram --temperature 0.7 --system "You answer in one sentence."
  drafttrain chat --target smollm2-135m --drafter runs/drafter --json < questions.txt > answers.jsonl

Tokens that a drafter proposed are shaded, matches of the text in another color; the others are the target's own. The line
below an answer shows tokens per second and accepted length beside plain decoding's rate, which /plain measures. The
text is the target's own either way. Without a terminal each line of the input is a message; answers go to stdout, figures to
stderr. In the conversation:

""" + "\n".join(f"  {command:<15} {meaning}" for command, meaning in COMMANDS.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add_target_flags(parser)
    add_drafter_flag(parser)
    add_template_flag(parser)
    add(
        "--system",
        AnyText,
        default="",
        metavar="TEXT",
        help="the system message (default: as the chat template says)",
    )
    add(
        "--tree",
        help="chain:3, dynamic:5,8,24, ... (default: the tree in the drafter's decoding.json, else chain:3)",
    )
    add_sampling_flags(parser, penalties=True)
    add(
        "--max-new-tokens",
        Count,
        default=1024,
        help="most tokens of an answer (default: %(default)s)",
    )
    add("--json", action="store_true", help="print one JSON object per turn, and no colors")
