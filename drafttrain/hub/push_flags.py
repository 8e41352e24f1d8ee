"""`drafttrain push`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.flags import SCHEDULE_HELP, WEIGHTS_HELP
from drafttrain.values import File, FileDtype, Name, Place, adder

HELP = """Publish a drafter on the Hugging Face Hub with a model card made from measured results.

  drafttrain push --drafter runs/drafter --repo user/name --results runs/results.json --dry-run --output runs/publish
  hf auth login
  drafttrain push --drafter runs/drafter --repo user/name --results runs/results.json

--dry-run writes the folder and prints what would be uploaded. A second push updates the files and tags the new revision (v1,
v2, ...); nothing is ever deleted. An interrupted upload continues when the command is run again. Only safetensors, JSON, pictures
and GGUF are published; local paths and tokens are kept out. Afterwards: drafttrain eval --drafter user/name"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--drafter", Place, required=True, help="a trained drafter's folder")
    add_publishing_flags(parser)
    add("--license", "--licence", default="", help="of the drafter, as the Hub spells it, such as apache-2.0 (default: the "
        "target's, where drafttrain fetch noted it)")  # fmt: skip
    add(
        "--results",
        File,
        nargs="+",
        default=[],
        help="files that drafttrain eval wrote for this drafter",
    )
    add(
        "--without-evaluation",
        action="store_true",
        help="publish although nothing was measured; the card says so",
    )
    add("--accept-implausible", action="store_true", help="publish figures that cannot be right, such as a baseline that "
        "varies more than 3x between prompts (drafttrain report names them)")  # fmt: skip
    add("--schedule", File, help=SCHEDULE_HELP)
    add("--base-model", Name, default="", help="the target's Hub id (default: the recorded name)")
    add(
        "--data",
        Name,
        default="",
        help="training data's folder, for the card (default: the recorded one)",
    )
    add(
        "--dataset",
        Name,
        default="",
        help="Hub id of the training data, if published (drafttrain push-data)",
    )
    add("--dtype", FileDtype, default="bfloat16", help=WEIGHTS_HELP)


def add_publishing_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --repo, --private, --dry-run, --output and --tag."""
    add = adder(parser)
    add("--repo", Place, required=True, help="user/name or organization/name")
    add("--private", action="store_true", help="make the repository private, if it is created now")
    add(
        "--dry-run",
        action="store_true",
        help="write the folder, print what would be uploaded, and stop",
    )
    add(
        "--output",
        Place,
        help="folder to prepare it in (default: a temporary one; needed with --dry-run)",
    )
    add("--tag", default="", help="of the new revision (default: the next of v1, v2, ...)")
