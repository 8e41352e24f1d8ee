"""`drafttrain adapt`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.flags import add_target_flags, add_template_flag
from drafttrain.values import (
    Amount,
    AnyText,
    Count,
    Fraction,
    Name,
    Place,
    PositiveFraction,
    Seed,
    adder,
)

HELP = """Go on training a drafter from a server's log of prompts and answers, next to the server.

  drafttrain adapt --drafter runs/drafter --log answers.jsonl --every 200
  drafttrain adapt --drafter runs/drafter --log logs/ --every 200 --once                      # from cron
  drafttrain adapt --drafter runs/drafter --log logs/ --every 200 --target-url http://node1:8000     # states from vLLM

After every N new answers it trains on most of them and on earlier ones, replays the rest, which it never trains on, and puts
the new drafter at OUTPUT/current if these decode better than with the old one: the 95 % interval of the accepted length's
ratio lies above 1. Text does not change, since a drafter only proposes. Serve OUTPUT/current from the beginning.

It spends at most --share of the machine's time and runs at a low priority. Time that is not spent is saved for up to six
hours. Where lines hold accepted_length, half of the time is kept for a fall of the accepted length by 5 %: a
stream that switches domain. OUTPUT/state.jsonl holds answers, is bounded and readable by you alone. Start it again at any time;
nothing is lost."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--drafter", Place, required=True, help="a trained drafter's folder; it stays as it is")
    add(
        "--log",
        Place,
        required=True,
        help="JSONL file, read with its rotated siblings, or a folder of *.jsonl files",
    )
    add("--every", Count, default=200, help="answers between rounds (default: %(default)s)")
    add("--output", Name, default="", help="folder of the versions (default: DRAFTER-adapted)")
    add(
        "--once",
        action="store_true",
        help="read what is there, run a round if one is due, and end",
    )
    add(
        "--share",
        PositiveFraction,
        default=0.02,
        help="of the machine's time, at most (default: %(default)s)",
    )
    add(
        "--hold-out",
        PositiveFraction,
        default=0.15,
        help="share of answers that only judge (default: %(default)s)",
    )
    add(
        "--replay",
        Amount,
        default=0.25,
        help="earlier answers per new one in training (default: %(default)s)",
    )
    add(
        "--data",
        Name,
        default="",
        help="data set of the first training, which then gives half of the earlier answers",
    )
    add("--passes", Count, default=3, help="over a round's answers, at most (default: %(default)s)")
    add("--learning-rate", Fraction, default=3e-4, help="of AdamW (default: %(default)s)")
    add(
        "--max-length",
        Count,
        default=1024,
        help="tokens used of prompt and answer (default: %(default)s)",
    )
    add(
        "--keep",
        Count,
        default=3,
        help="versions to keep; --drafter itself is never touched (default: %(default)s)",
    )
    add("--seed", Seed, default=0, help="of the choice of earlier answers (default: %(default)s)")
    add_target_flags(
        parser,
        "short name, folder or Hub id (default: the target that the drafter names)",
        required=False,
    )
    add_template_flag(parser, "; those of a line come first")
    more = "server that serve-target started, which computes the states in place of the target here; repeat it for several"
    add("--target-url", AnyText, action="append", default=[], help=more)
    more = "folder of the servers' states, as seen here (default: as the server says)"
    add("--states-dir", Name, default="", help=more)
