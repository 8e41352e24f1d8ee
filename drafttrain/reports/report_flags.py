"""`drafttrain report`: its help and flags."""

from __future__ import annotations

import argparse

from drafttrain.values import File, Place, adder

FORMATS = (".html", ".png", ".svg", ".pdf")

HELP = """Show results.json as a table, and make a page or a picture of it.

  drafttrain report results.json
  drafttrain report eagle.json ngram.json sweep.json --output compared.html
  drafttrain report results.json --output report.html --output report.png

A page needs no network. FOLDER/NAME_charts/ next to it gets a PNG of each chart. Several files are compared; a sweep's summary
adds its cells and where speculation stops paying. A picture has a row of three charts per file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("results", File, nargs="+", help="files written by drafttrain eval, and sweeps' summaries")
    add("--output", Place, action="append", help=f"page or picture to write ({', '.join(FORMATS)}), perhaps several times; "
        "default: report.html beside the first results")  # fmt: skip
