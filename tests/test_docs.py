"""The documentation: every code block is run, parsed or marked; quoted errors, named pages and the API exist; the site builds."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from transformers import TrainingArguments

import drafttrain
from drafttrain.cli import main, parsed
from drafttrain.command import SWITCHES, cli_parameters, spelled
from drafttrain.commands import COMMANDS, function_of
from drafttrain.config import TrainConfig, load_config, parse_overrides
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.errors import UserError
from scripts import docs_commands
from tests.files import FIXTURES, ROOT

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
LANGUAGES = {"bash", "python", "json", "yaml", "text", "jinja", "dockerfile", "cpp"}
# Programs of others, whose flags this test does not know.
OTHERS = {
    "apt",
    "apt-get",
    "cd",
    "cmake",
    "cp",
    "curl",
    "docker",
    "echo",
    "export",
    "git",
    "hf",
    "jq",
    "llama-server",
    "ls",
    "mkdir",
    "mlx-dspark",
    "mooncake_master",
    "nvidia-smi",
    "pip",
    "printf",
    "pre-commit",
    "python3",
    "ray",
    "source",
    "vllm",
}
# Pages whose blocks run in tests, in order, in one process and folder; the first ones by default.
QUICK = ["how-to/diagnose.md", "how-to/trace.md"]
SLOW = [
    "how-to/adaptive.md",
    "how-to/batches-and-threads.md",
    "how-to/choose-a-loss.md",
    "how-to/continue-a-drafter.md",
    "how-to/decode.md",
    "how-to/draft-model.md",
    "how-to/evaluate.md",
    "how-to/resume.md",
    "how-to/store-features.md",
    "how-to/report.md",
    "how-to/sweep.md",
    "how-to/train.md",
    "how-to/tune.md",
    "how-to/without-training.md",
]
# Settings that end a command within seconds, after those of the page.
SMALL = {
    "prompts": ["--count", "4", "--max-prompt-tokens", "16"],
    "generate": ["--max-new-tokens", "12"],
    "eval": ["--limit", "1", "--max-new-tokens", "4", "--baselines", "autoregressive"],
    "tune": ["--max-new-tokens", "16", "--dry-run"],
    "sweep": [
        "--limit",
        "2",
        "--max-new-tokens",
        "4",
        "--batch-sizes",
        "1,2",
        "--lengths",
        "1,2",
        "--contexts",
        "0,16",
    ],
    "trace": ["--max-new-tokens", "6"],
}
TRAIN = [
    "max_steps=2",
    "max_length=64",
    "decode_prompts=1",
    "decode_tokens=4",
    "use_cpu=true",
    "validation=0.2",
    "per_device_train_batch_size=2",
]
OPTIONS = {  # by recipe: sizes of the fixtures
    "eagle3": ["drafter.draft_vocab_size=128", "drafter.num_key_value_heads=1"],
    "draft_model": ["drafter.layers=[0,1]"],
}
OUTPUTS = {"docs/api/batch.md", "docs/gguf.md"}  # of other projects


class Block(NamedTuple):
    """A fenced block. mark: the reason of a comment `not run: ...` or `not checked: ...` above it, or empty."""

    language: str
    text: str
    mark: str
    where: str


def blocks(page: Path) -> list[Block]:
    found = re.finditer(
        r"(?:<!-- (not \w+: [^>]+?) -->\n)?^( *)```(.*)\n((?s:.*?))^\2```", page.read_text(), re.M
    )
    return [
        Block(m[3].strip(), textwrap.dedent(m[4]), m[1] or "", f"{page.name}: {m[4][:60]!r}")
        for m in found
    ]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a block, also behind `|` and `&&`, without `A=b` before it and comments."""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r" [<>] \S+", "", line)
        for _, part in itertools.groupby(
            shlex.split(line, comments=True), key=lambda word: word in ("|", "&&", ";")
        ):
            words = list(itertools.dropwhile(re.compile(r"[A-Z_]+=.*").fullmatch, part))
            if words and words[0] not in ("|", "&&", ";"):
                yield words


def is_left_out(word: str) -> bool:
    """Whether a word stands for what a reader fills in: `...`, `[more.json`, `...]`."""
    return "..." in word or word.startswith("[") or word.endswith("]")


def check_command(words: list[str]) -> None:
    """Raises an error if drafttrain's own program, script or recipe does not take these words."""
    program, *rest = words
    if program == "accelerate":  # its launcher, then a program
        start = next(i for i, word in enumerate(rest) if word in ("-m", "drafttrain/train.py"))
        rest = rest[start:]
        return check_command(["python", *rest])
    if program in ("python", "bash") or program.endswith("bin/python"):
        if rest[0] == "-m":
            name, *rest = rest[1:]
            if name.startswith("drafttrain"):
                return check_command(
                    [
                        *{"drafttrain.train": ["drafttrain", "train"]}.get(name, ["drafttrain"]),
                        *rest,
                    ]
                )
            assert (
                name in ("pip", "venv", "pytest", "http")
                or (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
            )
            return None
        if rest[0] == "drafttrain/train.py":
            return check_command(["drafttrain", "train", *rest[1:]])
        assert (ROOT / rest[0]).is_file(), f"{rest[0]} does not exist"
        source = (ROOT / rest[0]).read_text() + (ROOT / "eval/benchmark.py").read_text()
        missing = [
            word
            for word in rest[1:]
            if word.startswith("--") and word.partition("=")[0] not in source
        ]
        assert not missing, f"{rest[0]} has no {missing}"
        return None
    if program.startswith("drafttrain/"):
        return check_command(["python", *words])
    assert program == "drafttrain" or Path(program).name in OTHERS, (
        f"{program}: unknown; mark the block, or add it to OTHERS"
    )
    return check_flags(rest) if program == "drafttrain" else None


def check_flags(words: list[str]) -> None:
    if not words or words[0] in ("--help", "--version", "COMMAND"):
        return None
    name, *rest = words
    assert name in COMMANDS, f"drafttrain {name}: no such command"
    if "--help" in rest:
        return None
    if any(map(is_left_out, rest)):
        every = cli_parameters(function_of(name))
        known = {*SWITCHES, *(f"--{spelled(one.name)}" for one in every)}
        ours = rest[: rest.index("--")] if "--" in rest else rest
        missing = [
            word for word in ours if word.startswith("--") and word.partition("=")[0] not in known
        ]
        assert not missing, f"drafttrain {name} has no {missing}"
        return None
    for word in rest:  # flags that name a file want one
        if (
            re.fullmatch(r"[\w./-]+\.(json|jsonl|txt|yaml)|RECIPE", word)
            and not (ROOT / word).is_file()
        ):
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).touch()
    words = [word.replace("~/vllm/bin/python", sys.executable) for word in rest]
    _, values, _ = parsed([name, *words])
    if values.get("tree") not in (None, "", "auto"):
        TreeSpec.parse(values["tree"])
    if name == "train" and values["recipe"]:
        recipe = ROOT / values["recipe"]
        overrides = values["overrides"]
        keys = [one.name for one in fields(TrainingArguments)]
        if recipe.is_file():
            given = [f"{key}=x" for key in ("target", "data", "output_dir")]
            named = {word.partition("=")[0] for word in overrides}
            had = set(yaml.safe_load(recipe.read_text())) | named
            load_config(str(recipe), [*overrides, *(g for g in given if g[:-2] not in had)], keys)
        else:
            check_keys(parse_overrides(overrides))
    return None


def check_keys(recipe: dict) -> None:
    known = {one.name for one in (*fields(TrainConfig), *fields(TrainingArguments))}
    assert set(recipe) <= known, f"unknown keys {sorted(set(recipe) - known)}"


def check_code(text: str) -> None:
    """Raises an error for code that does not compile, or imports from drafttrain what is not there."""
    first, _, rest = text.partition("\n")
    code = (
        f"class Part:\n{rest}" if first.startswith("# ") and rest.startswith("    ") else text
    )  # of the file in line one
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "drafttrain":
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


def check(block: Block) -> None:
    if block.language not in LANGUAGES:
        pytest.fail(
            f"{block.where}: name its language, one of {', '.join(sorted(LANGUAGES))}",
            pytrace=False,
        )
    if block.mark.startswith("not checked"):
        return
    try:
        if block.language == "bash":
            for words in commands(block.text):
                check_command(words)
        elif block.language == "python":
            check_code(block.text)
        elif block.language == "json" and "..." not in block.text:
            for text in (
                [block.text]
                if not block.text.lstrip().startswith("{")
                else [*documents(block.text)]
            ):
                json.loads(text)
        elif block.language == "yaml":
            recipe = yaml.safe_load(block.text)
            if isinstance(recipe, dict) and "kind" in recipe:
                check_keys(recipe)
    except (AssertionError, UserError, SyntaxError, ValueError, ImportError) as error:
        pytest.fail(f"{block.where}: {error}", pytrace=False)


def documents(text: str) -> Iterator[str]:
    """The JSON values of a text, one after the other: a file of JSON lines is several."""
    while text := text.strip():
        _, end = json.JSONDecoder().raw_decode(text)
        yield text[:end]
        text = text[end:]


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_parses_or_is_marked(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        check(block)


@pytest.mark.parametrize(
    ("language", "text", "message"),
    [
        ("", "x", "name its language"),
        ("bash", "drafttrain evaluate --target x", "no such command"),
        (
            "bash",
            "drafttrain eval --target x --drafter y --output z --tree chain:0",
            "is not a tree",
        ),
        ("bash", "drafttrain generate ... --warm", "has no"),
        ("bash", "python eval/nothing.py", "does not exist"),
        ("bash", "python eval/bench_decode.py --colour", "has no"),
        ("bash", "frobnicate x", "unknown"),
        (
            "bash",
            "drafttrain train configs/smollm2-135m/eagle3.yaml learning_rat=1",
            "did you mean learning_rate",
        ),
        (
            "bash",
            "accelerate launch --num_processes 2 drafttrain/train.py RECIPE learning_rat=1",
            "unknown keys",
        ),
        ("python", "from drafttrain import nothing", "has no nothing"),
        ("python", "print(", "was never closed"),
        ("json", "{'a': 1}", "Expecting property name"),
        ("bash", "drafttrain eval --target x", "must be given"),
        ("yaml", "kind: eagle3\nmax_step: 3", "unknown keys"),
    ],
)
def test_a_wrong_block_is_found(language, text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pytest.fail.Exception, match=re.escape(message)):
        check(Block(language, text, "", "page"))


def test_marks_are_read(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: needs a GPU -->\n```bash\nls\n```\n\n- item\n\n  ```text\n  x\n  ```\n"
    )
    assert [(one.language, one.text, one.mark) for one in blocks(page)] == [
        ("bash", "ls\n", "not run: needs a GPU"),
        ("text", "x\n", ""),
    ]


# -- pages that run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder like a user's: a target named smollm2-135m, the project's folders, and what pages name in runs/."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(FIXTURES / "target", folder / "target")  # its name in the data set
    for name in ("configs", "eval", "drafttrain", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    for name, source in {"drafter": "drafters/eagle3", "data": "data", "legal": "data"}.items():
        shutil.copytree(FIXTURES / source, folder / "runs" / name)
    for name, source in {"results": "eagle3", "hot": "sampled", "other": "off"}.items():
        shutil.copy(FIXTURES / "results" / f"{source}.json", folder / "runs" / f"{name}.json")
    (folder / "corpus.txt").write_text("One river.\nTwo rivers.\n" * 40)
    return folder


def enter(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.chdir(folder)
    patch.setattr(
        "drafttrain.target.fetch.cached_model",
        lambda name: folder / "target" if name == "smollm2-135m" else None,
    )


def run_block(block: Block, names: dict[str, object]) -> None:
    if block.language == "python":
        exec(compile(block.text, block.where, "exec"), names)
    for words in commands(block.text) if block.language == "bash" else ():
        if "drafttrain/train.py" in words:
            words = ["drafttrain", "train", *words[words.index("drafttrain/train.py") + 1 :]]
        if words[0] == "drafttrain" and not any(map(is_left_out, words)):
            small = SMALL.get(words[1], [])
            if words[1] == "train":
                fixed = any(
                    word.startswith("init=") for word in words
                )  # by the drafter that goes on
                small = (
                    TRAIN
                    if fixed and "draft_model" in words[2]
                    else [*TRAIN, *OPTIONS.get(Path(words[2]).stem, [])]
                )
            first = (
                ["--tree", "chain:2"] if words[1] == "eval" else []
            )  # the page's own comes behind
            assert main([words[1], *first, *words[2:], *small]) == 0, shlex.join(words)


def run_page(page: str, made: Path, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    shutil.copytree(made, tmp_path / "page", symlinks=True)
    enter(tmp_path / "page", patch)
    found = [block for block in blocks(ROOT / "docs" / page) if not block.mark]
    assert any(block.language in ("bash", "python") for block in found)
    names: dict[str, object] = {}
    for block in found:
        run_block(block, names)


@pytest.mark.thorough
@pytest.mark.parametrize("page", QUICK)
def test_the_blocks_of_a_page_run(page, made, tmp_path, monkeypatch):
    run_page(page, made, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW)
def test_the_blocks_of_every_page_run(page, made, tmp_path, monkeypatch):
    run_page(page, made, tmp_path, monkeypatch)


# -- all commands, in an environment of a user's --------------------------------------------------------------------------


@pytest.mark.parametrize("page", docs_commands.PAGES, ids=lambda page: page.stem)
def test_what_is_left_out_of_the_commands_that_run(page):
    """The reasons are few, and the first steps of README and of the tutorials on a CPU all run."""
    left = {line: docs_commands.left_out(line) for line in docs_commands.commands(page)}
    network = {"needs a network", "another program"}
    if page.stem in ("README", "cpu-tour", "own-data"):
        assert {reason for reason in left.values() if reason} <= network
    for line, reason in left.items():
        assert reason or docs_commands.small(line)[1] in COMMANDS


@pytest.mark.slow
@pytest.mark.parametrize("page", docs_commands.PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page):
    assert docs_commands.run_page(page) == 0


@pytest.mark.slow
def test_every_recipe_has_a_plan():
    assert docs_commands.plan_recipes() == 0


# -- names ---------------------------------------------------------------------------------------------------------------


def messages() -> list[str]:
    """Lines of the package's code, texts over several lines joined, with `...` for what is filled in, without quotes."""
    found = []
    for path in (ROOT / "drafttrain").rglob("*.py"):
        joined = re.sub(r"""["']\s*\n\s*f?["']""", "", path.read_text())
        found += re.sub(r"['`]", "", re.sub(r"\{[^{}\n]*\}", "...", joined)).splitlines()
    return found


def test_quoted_errors_exist():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| message \|.*\n\| ---.*\n((?:\|.*\n)+)", text, re.M)
    quoted = [row.split("|")[1].strip() for table in tables for row in table.splitlines()]
    assert len(quoted) > 30
    code = messages()
    for message in quoted:
        parts = re.sub(r"['`]", "", message).split("...")
        assert any(holds(each, parts) for each in code), f"no such message: {message}"


def holds(text: str, parts: list[str]) -> bool:
    """Whether a text has all parts, one behind the other."""
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def test_named_pages_exist():
    named = re.compile(r"\b(docs/[\w/-]+\.(?:md|png))(#[\w-]+)?")
    sources = [
        path
        for part in ("drafttrain", "configs", "scripts", "eval")
        for path in (ROOT / part).rglob("*.*")
    ]
    for path in [
        *sources,
        *(ROOT / "tests").rglob("*.py"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]:
        if path.suffix in (".py", ".yaml", ".sh", ".md", ".jinja") and path != Path(__file__):
            for page, _ in named.findall(path.read_text()):
                if page not in OUTPUTS:
                    assert (ROOT / page).is_file(), f"{path.relative_to(ROOT)} names {page}"


def test_named_files_and_modules_exist():
    """Paths of the repository, paths below drafttrain/ by their subpackage, and dotted names."""
    subpackages = "|".join(path.parent.name for path in (ROOT / "drafttrain").glob("*/__init__.py"))
    paths = re.compile(
        r"(?<![\w./{-])((?:drafttrain|scripts|tests|eval)/[a-z0-9_./-]+\.(?:py|sh|c|json))\b"
    )
    below = re.compile(rf"(?<![\w./{{-])((?:{subpackages})/[\w/]+\.(?:py|c))\b")
    dotted = re.compile(r"(?<![\w./-])drafttrain(?:\.(?!json\b)[A-Za-z_]\w*)+(?![\w/-])")
    for page in PAGES:
        text = page.read_text()
        assert [name for name in paths.findall(text) if not (ROOT / name).is_file()] == [], page
        assert [
            name for name in below.findall(text) if not (ROOT / "drafttrain" / name).is_file()
        ] == [], page
        assert [name for name in dotted.findall(text) if not is_name(name)] == [], page


def is_name(dotted: str) -> bool:
    """Whether a dotted name is a module, or what a module or its class holds."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_api_page_has_every_public_name():
    text = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("api*.md"))
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)$", text, re.M)}
    assert set(drafttrain.__all__) <= shown
    for name in re.findall(r"^::: ([\w.]+)$", text, re.M):
        module, _, member = name.rpartition(".")
        assert hasattr(importlib.import_module(module), member), name


def test_every_page_is_in_the_navigation():
    named = re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    files = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*")]
    pages = {str(path.with_suffix(".md")) for path in files if path.suffix in (".md", ".ipynb")}
    assert set(named) == pages and len(named) == len(set(named))


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="needs pip install -c constraints.txt -e '.[docs]'")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "index.html").is_file() and "doc-heading" in (
        tmp_path / "reference/api/index.html"
    ).read_text()
