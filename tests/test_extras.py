"""The core installation: no module needs a package of an extra to load, and commands that need one name it in a line."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from drafttrain.cli import main
from drafttrain.errors import UserError
from drafttrain.extras import EXTRAS, LazyPackage, require
from tests.files import FIXTURES, ROOT, dump_json

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Commands that a core installation runs, and others with the package that they need; in a copy of tests/fixtures.
CORE = [
    "eval --target target --drafter drafters/draft_model --suite suite.jsonl --dtype float32 --max-new-tokens 8 --output e.json",
    "train run.yaml output_dir=out max_steps=2",
    "export --drafter out --format vllm --output exported",
    "tune --target target --drafter ngram --dtype float32 --prompts 2 --max-new-tokens 16 --repeats 1 --dry-run",
    "diagnose results/eagle3.json",
    "trace --target target --drafter ngram --prompt hello --dtype float32 --output trace.html",
    "push --drafter drafters/eagle1 --repo user/name --without-evaluation --license mit --dry-run --output card",
]
NEEDS = {
    "report results/eagle3.json --output page.html": "matplotlib",
    "report results/eagle3.json --output page.png": "matplotlib",
    "export --drafter drafters/draft_model --target target --format gguf --output gguf": "gguf",
    "fetch smollm2-135m --source pypi --cache cache": "gguf",
    "train lora.yaml": "peft",
    "train run.yaml report_to=wandb": "wandb",
    "train run.yaml deepspeed=zero2.json": "deepspeed",
}
BLOCKED = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *more):
        return None if name.partition(".")[0] in {blocked} else self.finder.find_spec(name, *more)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Without, sys.meta_path)
import importlib, pkgutil, drafttrain
from drafttrain.cli import main
for module in pkgutil.walk_packages(drafttrain.__path__, "drafttrain."):
    if not module.name.endswith(("_kernels", "__main__")) and ".engines." not in module.name:  # of triton and vLLM
        importlib.import_module(module.name)
for words in {commands}:
    if status := main(words.split()):
        sys.exit(f"{{words}} ends with {{status}}")
"""


def test_each_package_has_an_extra_of_its_own():
    optional = PROJECT["optional-dependencies"]
    brought = {"PIL": "pillow", "prometheus_client": "prometheus-client"}
    for package, extra in EXTRAS.items():
        assert brought.get(package, package) in [
            re.split(r"[<>=]", one)[0] for one in optional[extra]
        ]
    assert len(set(EXTRAS.values())) == len(EXTRAS) - 1  # vision brings two
    core = {re.split(r"[<>=;]", one)[0] for one in PROJECT["dependencies"]}
    assert not core & set(EXTRAS)
    everything = set(re.search(r"\[(.*)\]", optional["all"][0])[1].split(","))
    # A torchvision of another build than torch's would break all commands.
    assert everything == set(optional) - {"all", "dev", "docs", "vision"}


def top_level(body: list[ast.stmt]):
    """Packages that a module imports when it is imported; `if TYPE_CHECKING` and functions do not count."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from top_level(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.ClassDef | ast.With):
            yield from top_level(node.body)


@pytest.mark.thorough
def test_no_module_imports_an_extra_when_it_loads():
    found = {
        (path.name, package)
        for path in sorted((ROOT / "drafttrain").rglob("*.py"))
        for package in top_level(ast.parse(path.read_text()).body)
    }
    assert ("charts.py", "io") in found
    assert [each for each in found if each[1] in EXTRAS] == []


@pytest.fixture
def home(tmp_path, monkeypatch):
    shutil.copytree(FIXTURES, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    Path("zero2.json").write_text("{}")
    recipe = {
        "kind": "draft_model",
        "target": "target",
        "data": "data",
        "output_dir": "out",
        "dtype": "float32",
    }
    dump_json(
        Path("lora.yaml"),
        {**recipe, "use_cpu": True, "drafter": {"layers": [0, 4], "lora": {"r": 2}}},
    )


@pytest.mark.thorough
@pytest.mark.parametrize("words", NEEDS)
def test_a_missing_package_is_one_line_that_names_the_extra(home, monkeypatch, capsys, words):
    package = NEEDS[words]
    importlib.import_module("transformers.trainer")  # asks for peft once, when it loads
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert main(words.split()) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (
        f"needs {package}, which is not installed: pip install 'drafttrain[{EXTRAS[package]}]'"
        in line
    )


def test_a_broken_package_says_why(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("import a_module_that_is_not_there")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UserError,
        match=r"report_to needs wandb, which cannot be imported \(No module named 'a_module",
    ):
        require("wandb", "report_to")


def test_a_lazy_package_is_the_package():
    import gguf

    assert LazyPackage("gguf").MODEL_ARCH is gguf.MODEL_ARCH


def run_core(commands: list[str]) -> None:
    """Imports every module, and runs commands, where no package of an extra can be found."""
    blocked = {*EXTRAS, "mooncake", "hs_connectors"}
    script = BLOCKED.format(blocked=blocked, commands=commands)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_a_core_installation_runs_what_needs_no_extra(home):
    run_core(CORE)
