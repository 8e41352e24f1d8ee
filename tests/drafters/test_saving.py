"""Drafters of every kind load, save and upload as transformers does, packed for decoding or not."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import subprocess
import sys

import pytest
import torch

from drafttrain import Drafter, Target
from drafttrain.drafters.registry import kind_class, load_drafter, prepare
from drafttrain.errors import UserError
from tests.drafters import contract
from tests.hub.hub_server import TOKEN, HubServer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of an untrained drafter of a kind."""

    @functools.cache
    def save(kind):
        folder = tmp_path_factory.mktemp("saved") / kind
        contract.build(kind).save_pretrained(folder)
        return folder

    return save


def assert_same_files(folder, other):
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in other.iterdir()
    )
    want, found = (Drafter.from_pretrained(each).state_dict() for each in (folder, other))
    assert want.keys() == found.keys() and all(
        torch.equal(value, found[name]) for name, value in want.items()
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", contract.TRAINED)
def test_packed_drafters_save_what_they_were_loaded_from(kind, saved, tmp_path, capfd):
    target = contract.the_target(packed=True)
    drafter = load_drafter(str(saved(kind)), target)
    assert drafter.device.type == "cpu" and drafter.dtype == torch.float32 and kind in repr(drafter)
    capfd.readouterr()
    drafter.save_pretrained(tmp_path / "again")
    assert_same_files(saved(kind), tmp_path / "again")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", ["draft_model", "medusa", "peagle"])
def test_packed_drafters_save_the_weights_that_they_had(kind, saved, tmp_path):
    changed = Drafter.from_pretrained(saved(kind))
    with torch.no_grad():
        for weight in changed.parameters():
            weight.mul_(0.5)
    changed.save_pretrained(tmp_path / "halved")
    changed.pack()
    changed.save_pretrained(tmp_path / "packed")
    assert_same_files(tmp_path / "halved", tmp_path / "packed")


@pytest.mark.parametrize("kind", ["draft_model", "medusa", "eagle3", "dspark"])
def test_copies_of_a_packed_drafter_are_unpacked(kind, saved):
    """Kernels hold addresses, which no copy may share; weights are not replaced behind them."""
    drafter = Drafter.from_pretrained(saved(kind))
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    target = contract.the_target(packed=True)
    prepare(drafter, target)
    for other in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert other.fresh and other.kind == kind
        state = other.state_dict()
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], value) for name, value in before.items())
        other.load_state_dict(before)
        prepare(other, target)
    with pytest.raises(
        UserError, match=r"packed for decoding, so load_state_dict cannot"
    ) as failure:
        drafter.load_state_dict(before)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("kind", ["draft_model", "medusa", "mtp"])
def test_the_class_of_a_kind_loads_that_kind(kind, saved):
    cls = kind_class(kind)
    made = cls.from_pretrained(saved(kind), torch_dtype="bfloat16", device="cpu")
    assert type(made) is type(Drafter.from_pretrained(str(saved(kind)))) is cls
    assert {weight.dtype for weight in made.parameters()} == {
        torch.bfloat16
    } and made.kept_ids.dtype == torch.long
    other = contract.TRAINED[contract.TRAINED.index(kind) - 1]
    with pytest.raises(
        UserError, match=f"is of kind '{kind}', not '{other}'; use Drafter.from_pretrained"
    ):
        kind_class(other).from_pretrained(saved(kind))


def test_what_has_no_weights(saved, tmp_path):
    drafter = Drafter.from_pretrained("ngram:max_n=4")
    assert drafter.max_n == 4
    both = Drafter.from_pretrained(f"{saved('medusa')}+ngram")
    assert both.main.kind == "medusa" and " + NgramDrafter(" in repr(both)
    for each in (drafter, both):
        with pytest.raises(UserError, match="has no weights of its own to save"):
            each.save_pretrained(tmp_path / "out")
        with pytest.raises(UserError, match="has no weights of its own to publish"):
            each.push_to_hub("user/name")


def test_mistakes_are_named(saved, target_dir, target):
    folder = saved("medusa")
    for call, message in (
        (lambda: Drafter.from_pretrained(folder, devce="cpu"), "devce= is no option of it; did you mean device"),
        (lambda: Drafter.from_pretrained(folder, revision="v1"), "revision='v1' is of a Hub id"),
        (lambda: Drafter.from_pretrained(folder, dtype="half"), "dtype='half' is not one of"),
        (lambda: Drafter.from_pretrained("ngram", dtype="float32"), "has no weights, and so neither revision nor dtype"),
        (lambda: Drafter.from_pretrained(folder).save_pretrained("x", repo_id="a/b"), "repo_id is of an upload; set push"),
        (lambda: Target.from_pretrained(target_dir, revision="v1"), "revision='v1' needs a Hub id"),
        (lambda: Target.from_pretrained(target_dir, dtyp="float32"), "dtyp= is no option of it; did you mean dtype"),
        (lambda: Target.from_pretrained(target.model, dtype="float32"), "dtype= is for a name, but this"),
        (lambda: Target.from_pretrained(3), "model=3 must be a name, a loaded model, or a Target"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            call()


def test_targets_load_as_in_transformers(target_dir, target, capfd):
    capfd.readouterr()
    made = Target.from_pretrained(target_dir, torch_dtype=torch.float32, device=torch.device("cpu"))
    assert (
        made._packed
        and made.compute_dtype == torch.float32
        and Target.from_pretrained(made) is made
    )
    assert capfd.readouterr() == ("", ""), "a library call is quiet"
    other = Target.from_pretrained(
        str(target_dir), dtype="auto", tokenizer=target.tokenizer, packed=False
    )
    assert other.tokenizer is target.tokenizer and not other._packed
    wrapped = Target.from_pretrained(target.model, tokenizer=target.tokenizer)
    assert wrapped.model is target.model and wrapped.tokenizer is target.tokenizer


UPLOAD = """
import sys
from drafttrain import Drafter, Target, load_drafter
folder, target = sys.argv[1:]
drafter = load_drafter(folder, Target.from_pretrained(target, dtype="float32"))
drafter.save_pretrained(folder + "-copy", push_to_hub=True, repo_id="writer/head")
Drafter.from_pretrained(folder).push_to_hub("writer/other", private=True)
back = [Drafter.from_pretrained("writer/head", revision="main"), Drafter.from_pretrained("writer/other")]
assert all(each.state_dict().keys() == drafter._unpacked().state_dict().keys() for each in back)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "draft_model"])
def test_uploads_and_revisions(kind, saved, target_dir, tmp_path):
    with HubServer() as server:
        settings = {
            "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": TOKEN, "NO_PROXY": "*", "no_proxy": "*",
        }  # fmt: skip
        command = [sys.executable, "-c", UPLOAD, str(saved(kind)), str(target_dir)]
        done = subprocess.run(
            command, env={**os.environ, **settings}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        held = {name: repository for (_, name), repository in server.repositories.items()}
        files = {
            name: {*list(repository.commits.values())[-1]} for name, repository in held.items()
        }
    own = {path.name for path in saved(kind).iterdir()}
    assert own <= files["writer/head"] & files["writer/other"] and held["writer/other"].private
