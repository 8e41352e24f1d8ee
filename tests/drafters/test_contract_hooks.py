"""The contract is declared: no hook is found by name at run time; mypy finds hooks that the base class lacks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from torch import nn

from drafttrain.drafters.base import Drafter, Session
from drafttrain.drafters.common.rows import JointSession
from drafttrain.drafters.registry import kind_class, kinds
from drafttrain.errors import UserError
from tests.files import ROOT

PACKAGE = ROOT / "drafttrain"
FOLDERS = (
    "drafters",
    "training",
    "inference",
    "evaluation",
    "tuning",
    "export",
    "hub",
    "reports",
    "data",
)
FILES = [path for folder in FOLDERS for path in sorted((PACKAGE / folder).rglob("*.py"))]
FILES += [PACKAGE / "train.py", PACKAGE / "api.py"]
# Names that hold a drafter, a kind's class or a session; `self.model` of a trainer is a drafter too.
DRAFTERS = {"drafter", "drafters", "kind", "main", "side", "part", "head", "trained"}
MODELS = {"model"}  # a drafter in training/ and train.py
SESSIONS = {"session", "sessions"}


def last_name(node: ast.expr) -> str:
    """`x` of x, self.x, f(x).x, x[0] and x()."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript | ast.Starred):
        return last_name(node.value)
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        return {"kind_class": "kind", "unwrap_model": "model", "load_drafter": "drafter"}.get(
            name, ""
        )
    return node.id if isinstance(node, ast.Name) else ""


def looked_up(source: str, models: bool) -> Iterator[str]:
    """Every hasattr and getattr on a drafter, a kind or a session."""
    names = DRAFTERS | SESSIONS | (MODELS if models else set())
    for node in ast.walk(ast.parse(source)):
        call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if call and node.func.id in ("hasattr", "getattr") and last_name(node.args[0]) in names:
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.thorough
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_hook_is_found_by_name(path):
    models = path.name == "train.py" or path.parent.name == "training"
    assert list(looked_up(path.read_text(), models)) == []


@pytest.mark.parametrize(
    "source",
    [
        "hasattr(drafter, 'blank')",
        "getattr(self.model, 'load_checkpoint', None)",
        "getattr(kind_class(name), 'pretrains', False)",
        "hasattr(self.accelerator.unwrap_model(x), 'chain_depth')",
        "getattr(row.session, 'probe')",
    ],
)
def test_the_search_finds_lookups(source):
    assert len(list(looked_up(source, models=True))) == 1


@pytest.mark.parametrize("kind", kinds())
def test_kinds_inherit_the_contract(kind):
    cls = kind_class(kind)
    assert issubclass(cls, Drafter) and cls.kind == kind
    assert cls.trainable == issubclass(cls, nn.Module)


def test_the_defaults():
    """A kind that declares nothing trains nothing, drafts nothing by itself, and reports errors that name it."""

    class Bare(Drafter):
        kind = "bare"

        def start(self, prompt_ids, max_length):
            return Session()

    bare = Bare()
    assert (
        bare.trainable,
        bare.feature_layers,
        bare.probes,
        bare.chain_depth,
        bare.vocabulary,
    ) == (
        False,
        (),
        0,
        0,
        None,
    )
    assert bare.solve_start([], None) is None and bare.suggest_tree([], None) is None
    assert bare.load_checkpoint("nowhere") is False
    bare.pack(), bare.bind(None), bare.check_packing()
    for call in (
        lambda: Bare.begin(None, "target", {}, "kl"),
        lambda: Bare.native(None, None, {}),
        bare.as_target,
    ):
        with pytest.raises(UserError, match="bare"):
            call()
    session = bare.start(None, 0)
    assert session.probe() == ([], []) and session.observe([1]) is None
    with pytest.raises(NotImplementedError):
        session.propose(None)
    assert issubclass(JointSession, Session)
