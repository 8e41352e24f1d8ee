"""Every flag of every command with every kind of wrong word: one line on stderr and exit 2, or a value in its range.

Commands run up to the point where they load a model, ask a server or write: those functions are replaced.
"""

from __future__ import annotations

import functools
import itertools
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafttrain import recipes
from drafttrain.cli import main
from drafttrain.command import cli_parameters, is_word, kinds_of, required, spelled
from drafttrain.commands import COMMANDS, function_of
from drafttrain.errors import UserError
from drafttrain.values import check, rule
from tests.files import FIXTURES, load_json
from tests.fuzz import WRONG_WORDS, fuzz, outcome, wrong_words

PROMPTS = str(FIXTURES / "prompts.jsonl")
RESULTS = str(next((FIXTURES / "results").glob("*.json")))
RECIPE = str(FIXTURES / "run.yaml")
DRAFTER = str(FIXTURES / "drafters" / "eagle3")
TARGET = ["--target", str(FIXTURES / "target")]
BOTH = [*TARGET, "--drafter", "ngram"]
# Words with which a command's values are all valid; OUT is a file in a new folder.
NEEDED = {
    "fetch": ["smollm2-135m"],
    "prompts": ["--source", "file", "--input", PROMPTS, "--output", "OUT"],
    "generate": [*TARGET, "--prompts", PROMPTS, "--output", "OUT"],
    "features": ["--data", "DATA"],
    "serve-target": [*TARGET, "--dry-run"],
    "recipes": [],
    "plan": [RECIPE],
    "train": [RECIPE],
    "adapt": ["--drafter", DRAFTER, "--log", PROMPTS, "--output", "OUT"],
    "ngram-store": ["--data", "DATA", "--output", "OUT"],
    "eval": [*BOTH, "--output", "OUT"],
    "suites": ["prepare", "speed-bench", "--output", "OUT"],
    "tune": [*BOTH, "--output", "OUT"],
    "sweep": [*BOTH, "--output", "OUT"],
    "diagnose": [RESULTS],
    "estimate": ["--results", RESULTS, "--target-params", "1e8", "--drafter-params", "1e6"],
    "report": [RESULTS],
    "chat": BOTH,
    "trace": [*BOTH, "--prompt", "hi"],
    "bench-server": ["--url", "http://127.0.0.1:9", "--output", "OUT"],
    "swap": ["--server", "http://127.0.0.1:9"],
    "export": ["--drafter", "/no/drafter", "--format", "vllm", "--output", "OUT"],
    "import": ["--checkpoint", "/no/drafter", *TARGET, "--output", "OUT"],
    "doctor": ["/no/head", *TARGET],
    "verify": ["--drafter", "/no/drafter"],
    "push": ["--drafter", "/no/drafter", "--repo", "a/b"],
    "completion": ["bash"],
    "push-data": ["--data", "/no/data", "--prompt-license", "x", "--repo", "a/b"],
}
LOADERS = (
    "target.fetch.fetch",
    "data.sources.collect",
    "data.prompts.evaluation_texts",
    "data.generate.load_target",
    "data.generate.load_shell",
    "states.features.load_target",
    "states.features.load_shell",
    "serving.serve_target.load_shell",
    "adapt.load_target",
    "adapt.load_shell",
    "data.ngram_corpus.NgramTable.build",
    "train.prepare",
    "tuning.plan.plan",
    "tuning.eval_command.load_target",
    "tuning.tune.load_target",
    "tuning.sweep.Target.load",
    "evaluation.diagnose.apply",
    "reports.report.print_results",
    "reports.terminal_chat.load_target",
    "reports.trace.load_target",
    "serving.bench.connect",
    "serving.swap_command.swapper_of",
    "serving.bench.measure_lengths",
)


def flags_of(command: str) -> list[str]:
    every = cli_parameters(function_of(command))
    return [f"--{spelled(one.name)}" for one in every if not is_word(one)]


FLAGS = [(command, flag) for command in COMMANDS for flag in flags_of(command)]
# What a flag may hold as it is; every other value has a kind.
FREE = {"--prompt", "--note", "--url", "--url2", "--model", "--model2", "--api-key-env", "--subset", "--split", "--columns",
    "--tree", "--trees", "--baselines", "--features", "--layers", "--tag", "--license", "--prompt-license"}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("flags")
    shutil.copytree(FIXTURES / "data", made / "data")  # reading a data set leaves a cache in it
    return made


@pytest.fixture(scope="module", autouse=True)
def stubs(folder):
    def stop(*_, **__):
        raise UserError("stub: the values are fine")

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for place in LOADERS:
            patch.setattr(f"drafttrain.{place}", stop)
        patch.setattr("os.nice", lambda by: 0)  # of adapt, for the whole process
        # A recipe of a wrong name is compared with all that come with drafttrain.
        patch.setattr(recipes, "shipped_recipes", functools.cache(recipes.shipped_recipes))
        yield


def run(folder: Path, words: list[str], capsys) -> str:
    """The command's line on stderr."""
    places = {"OUT": str(folder / "out" / "file"), "DATA": str(folder / "data")}
    words = [places.get(word, word) for word in words]
    try:
        status = main(words)
    finally:
        shutil.rmtree(folder / "out", ignore_errors=True)
    said = capsys.readouterr().err
    if status == 2:
        error = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(error) == 1 and said.endswith(error[0] + "\n"), said
        raise UserError(error[0])
    return said


@pytest.mark.parametrize("command", COMMANDS)
def test_every_parameter_has_a_kind(command):
    function = function_of(command)
    for one in cli_parameters(function):
        kind = kinds_of(function)[one.name]
        flag = f"--{spelled(one.name)}"
        plain = required(kind) in (int, float, Path, str)
        assert not plain or flag in FREE, f"{command} {flag}: use a kind of drafttrain/values.py"
        assert rule(kind), f"{command} {flag} has no rule"


@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS)
def test_valid_words_get_through(folder, command, capsys):
    text = outcome("flag", "none", lambda: run(folder, [command, *NEEDED[command]], capsys))
    # The third is how tests run, the fourth what asks before it downloads.
    ends = ("stub", "/no/", "HF_HUB_OFFLINE", "give --trust-remote-code")
    assert not text or any(end in text for end in ends), text


@pytest.mark.thorough
@fuzz(examples=80)
@given(flag=st.sampled_from(FLAGS), word=wrong_words(), apart=st.booleans())
def test_flags(folder, capsys, flag, word, apart):
    """`--flag=word`, and the word apart from its flag."""
    command, name = flag
    value = [name, word[1]] if apart else [f"{name}={word[1]}"]
    words = [command, *NEEDED[command], *value]
    outcome("flag", word[0], lambda: run(folder, words, capsys))


@fuzz(examples=24)
@given(command=st.sampled_from(["train", "fetch", "report", "diagnose", ""]), word=wrong_words())
def test_words_without_a_flag(folder, capsys, command, word):
    outcome(
        "flag", word[0], lambda: run(folder, [command, word[1]] if command else [word[1]], capsys)
    )


def test_numbers_stay_in_their_ranges(folder):
    """Every flag with a kind, and every wrong word: what is accepted is finite, and of the type of the default."""
    wrong = [word for words in WRONG_WORDS.values() for word in words]
    functions = [function_of(command) for command in COMMANDS]
    kinds = {
        str(kind := required(kinds_of(function)[one.name])): kind
        for function in functions
        for one in cli_parameters(function)
    }
    for kind, word in itertools.product(kinds.values(), wrong):
        try:
            value = check("flag", word, kind, words=True)
        except UserError:
            continue
        for number in value if isinstance(value, list) else [value]:
            assert not isinstance(number, float) or (math.isfinite(number) and number >= 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evla"], "unknown command 'evla'; did you mean eval"),
        (
            ["eval", *BOTH, "--limt", "3"],
            "unknown flag '--limt'; did you mean --limit",
        ),
        (["eval", *BOTH, "--limit", "-1"], r"--limit='-1' must be a whole number from 1 to"),
        (["eval", *BOTH, "--limit"], "--limit expected one argument"),
        (
            ["eval", *BOTH, "--device", "tpu"],
            "--device='tpu' is not one of auto, cpu.*this machine has",
        ),
        (["eval", *BOTH, "--device", "cuda:77"], "--device='cuda:77' is not one of"),
        (["eval", *BOTH, "--device", "mps"], "--device='mps' is not one of"),
        (["eval", *BOTH, "--device", "meta"], "--device='meta' is not one of"),
        (["eval", *BOTH, "--tree", "fanout:1000x1000"], "is too large"),
        (
            ["eval", *BOTH, "--temperature", "nan"],
            "--temperature='nan' must be a number from 0 to 1000",
        ),
        (["eval", "--drafter", "ngram"], "--target must be given; see drafttrain eval --help"),
        (["eval", *BOTH, "--seed", "-1"], "--seed='-1' must be"),
        (["eval", *BOTH, "--limit", "\u0663"], "--limit='\u0663' must be"),
        (["eval", *BOTH, "--limit", "9" * 5000], r"--limit='9+\.\.\. must be"),
        (["eval", *BOTH, "--suite", "a\0b"], "NUL"),
        (
            ["push", *NEEDED["push"], "--results", "no.json"],
            r"--results=\['no.json'\] must be a list, each item an existing file",
        ),
        (["sweep", *BOTH, "--batch-sizes", ""], "--batch-sizes='' must have 1 to 64 values"),
        (["sweep", *BOTH, "--seed", "two"], "--seed='two' must be a whole number from 0"),
        (["sweep", *BOTH, "--dtypes", "int8"], "--dtypes='int8' must be one of auto"),
        (
            ["generate", *TARGET, "--prompts", PROMPTS, "--output", "OUT", "--backend", "cloud"],
            "--backend='cloud' must be one of local, openai",
        ),
        (
            ["train", RECIPE, "--max-stps", "4"],
            "unknown config key 'max_stps'.*did you mean max_steps",
        ),
        (["train", RECIPE, "--resume", "perhaps"], "resume='perhaps' must be true or false"),
    ],
)
def test_each_mistake_is_one_line(folder, capsys, words, message):
    import re

    assert re.search(message, outcome("flag", "named", lambda: run(folder, words, capsys)))


def test_fixture_words_cover_every_command():
    assert set(NEEDED) == set(COMMANDS) and load_json(Path(RESULTS))
