"""`drafttrain sweep`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.flags import DEVICE, TARGET_HELP, add_template_flag
from drafttrain.values import Count, Depth, Dtype, Place, Seed, Size, Temperature, adder, values

HELP = """Measure a drafter over a range of settings; one results.json per cell, and summary.json over all of them.

  drafttrain sweep --target smollm2-135m --drafter runs/drafter --output runs/sweep --batch-sizes 1,2,4,8,16 \\
      --lengths 1,2,4,8 --temperatures 0,0.7,1 --contexts 0,512,2048 --limit 16

One axis varies at a time, the others keep their first value; --grid crosses them all. After an interruption the same command
keeps finished cells and continues the unfinished one. The summary says at which batch size speculation stops paying."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--target", Place, required=True, help=TARGET_HELP)
    add("--drafter", Place, required=True, help="as in drafttrain eval")
    add("--suite", Place, default="drafttrain", help="as in drafttrain eval")
    add_template_flag(parser, "; a question's own come first")
    add("--temperatures", values(Temperature), default="0", help="a list, such as 0,0.7,1")
    add(
        "--trees",
        default="",
        help="a list split by ; or spaces, such as 'chain:3 dynamic:3,4,8' (default: as in eval)",
    )
    add(
        "--lengths",
        values(Depth),
        default=(),
        help="speculation lengths, such as 1,2,4,8: chains, added to --trees",
    )
    add("--batch-sizes", values(Count), default="1", help="prompts at a time, such as 1,2,4,8,16")
    add(
        "--contexts",
        values(Size),
        default="0",
        help="least prompt tokens, such as 0,512,2048; 0 changes nothing",
    )
    add("--dtypes", values(Dtype), default="auto", help="such as bfloat16,float32")
    add("--device", DEVICE, default="auto", help="cpu, cuda or auto")
    add("--max-new-tokens", Count, default=64, help="per answer")
    add("--limit", Count, help="questions at most per cell, taken evenly from all categories")
    add("--seed", Seed, default=0, help="of the sampling")
    add(
        "--baselines",
        default="autoregressive",
        help="as in drafttrain eval (default: %(default)s)",
    )
    add("--grid", action="store_true", help="cross all axes instead of varying one at a time")
    add(
        "--output",
        Place,
        help="folder for the cells and summary.json (default: sweep beside the drafter)",
    )
    add(
        "--trust-remote-code",
        action="store_true",
        help="run model code that comes with the target",
    )
