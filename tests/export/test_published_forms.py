"""Published checkpoints of other projects, by hand with their keys and tensor names: imported, decoded, exported.

Each case is a row of the table in docs/publishing.md. Sources of the forms: docstrings of the kinds' export.py and reading.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.cli import main
from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.published_keys import FIXED, NESTED, UNREAD
from drafttrain.drafters.registry import load_drafter
from drafttrain.drafters.shipping import Exported, find_drafter, shipped_kinds, shipping
from drafttrain.errors import UserError
from drafttrain.inference import generate
from drafttrain.target import Target
from drafttrain.target.devices import usual_device
from tests.conftest import loaded_target
from tests.drafters.block_kinds import BLOCK_KINDS, begun, shaken
from tests.drafters.helpers import make_batch, make_heads
from tests.drafters.layer_kinds import make_kind
from tests.files import ROOT, dump_json

KEPT = {"half": torch.arange(0, 300, 2), "all": torch.arange(300)}
PAGE = ROOT / "docs" / "publishing.md"
TABLE = yaml.safe_load(Path(__file__).with_name("published_forms.yaml").read_text())


class Case(NamedTuple):
    """A row of the page: project, form; and how its checkpoint looks."""

    project: str
    form: str
    kind: str
    options: dict[str, Any]  # of our drafter with the same computation
    config: dict[str, Any]
    rename: Callable[[dict[str, Tensor], Any], dict[str, Tensor]]  # our tensors -> published ones


def tables(drafter) -> dict[str, Tensor]:
    kept = drafter.kept_ids
    return {"d2t": kept - torch.arange(len(kept)), "t2d": torch.isin(torch.arange(300), kept)}


def midlayer(state, drafter):
    return {**{k: v for k, v in state.items() if k != "kept_ids"}, **tables(drafter)}


def numbered(state, drafter):
    return {k.replace("midlayer.", "layers.0."): v for k, v in midlayer(state, drafter).items()}


def with_copies(names):
    """Beside the tensors, frozen copies of the target's."""

    def rename(state, drafter):
        target = drafter.own_target
        copies = {"embed_tokens.weight": target.embed_weight, "lm_head.weight": target.head_weight}
        return {**blocks(state, drafter), **{name: copies[name].clone() for name in names}}

    return rename


MARKOV_NAMES = {
    "markov_in.weight": "markov_head.markov_w1.weight", "markov_out.weight": "markov_head.markov_w2.weight",
    "confidence.weight": "confidence_head.proj.weight", "confidence.bias": "confidence_head.proj.bias",
    **{f"{part}_proj.{name}": f"markov_head.{part}_proj.{name}" for part in ("gate", "joint") for name in ("weight", "bias")},
}  # fmt: skip


SELECTOR = {
    "markov_in.weight": "candidate_selector.predecessor_codebook", "markov_out.weight": "candidate_selector.successor_codebook",
    "gate.weight": "candidate_selector.hidden_projection.weight",
}  # fmt: skip


def selector(state, drafter):
    return {SELECTOR.get(k, k): v for k, v in state.items() if k != "kept_ids"}


DOMINO_NAMES = {
    "gru.reads.weight": "prefix_gru.weight_ih_l0", "gru.keeps.weight": "prefix_gru.weight_hh_l0",
    "correction_in.weight": "embed_proj.0.weight", "correction_out.weight": "embed_proj.2.weight",
}  # fmt: skip


def blocks(state, drafter):
    names = MARKOV_NAMES | DOMINO_NAMES
    return {names.get(k, k): v for k, v in state.items() if k != "kept_ids"}


def modelopt_markov(state, drafter):
    names = {"markov_head.": "", "confidence_head.proj": "confidence_proj"}
    found = blocks(state, drafter)
    for theirs, ours in names.items():
        found = {k.replace(theirs, ours): v for k, v in found.items()}
    return found


def speculators_block(state, drafter):
    head = {
        "lm_head.weight": drafter.head.weight,
        "embed_tokens.weight": drafter.own_target.embed_weight.clone(),
    }
    return {**blocks(state, drafter), **head, **tables(drafter)}


def eagle1(state, drafter):
    return {
        **{k: v for k, v in state.items() if k != "kept_ids"},
        "embed_tokens.weight": drafter.own_target.embed_weight.clone(),
    }


MTP_NAMES = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}


def mtp_module(state, drafter):
    found = {"mtp_layers.0.final_layernorm.weight": state["norm.weight"]}
    for name, value in state.items():
        if name.startswith("blocks.0."):
            own, _, rest = name.removeprefix("blocks.0.").partition(".")
            place = f"{MTP_NAMES[own]}.{rest}" if own in MTP_NAMES else rest
            found[f"mtp_layers.0.{place}"] = value
    return found


def plain(state, drafter):
    return {k: v for k, v in state.items() if k != "kept_ids"}


def medusa(state, drafter):
    return {
        re.sub(r"^blocks\.(\d)\.(\d)\.linear", r"blocks.\1.layers.\2", k): v
        for k, v in plain(state, drafter).items()
    }


def accelerator(state, drafter):
    return {
        f"speculator.{k.replace('lm_heads', 'head')}": v for k, v in plain(state, drafter).items()
    }


NAMING = (
    midlayer,
    numbered,
    selector,
    blocks,
    modelopt_markov,
    speculators_block,
    eagle1,
    mtp_module,
    plain,
    medusa,
    accelerator,
)


def read_case(entry: dict[str, Any]) -> Case:
    """A form of published_forms.yaml."""
    options = {**entry["options"], "kept": KEPT[entry["options"]["kept"]]}
    if "feature_layers" in options:
        options["feature_layers"] = tuple(options["feature_layers"])
    if "copies" in entry:
        rename = with_copies(entry["copies"])
    else:
        rename = {each.__name__: each for each in NAMING}[entry["tensors"]]
    return Case(entry["project"], entry["form"], entry["kind"], options, entry["config"], rename)


CASES = [read_case(entry) for entry in TABLE["forms"]]
# One case per way of reading in the quick run; the others differ from one of them in names.
QUICK = {
    "SafeAILab EAGLE-3",
    "NVIDIA ModelOpt",
    "z-lab DFlash",
    "SafeAILab EAGLE-1",
    "IBM accelerators",
}
MARKED = [
    pytest.param(
        case,
        marks=() if case.project in QUICK or case.form == "dspark" else pytest.mark.slow,
        id=f"{case.project} {case.form}",
    )
    for case in CASES
]
REFUSED = [(entry["name"], entry["config"], entry["message"]) for entry in TABLE["refused"]]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return loaded_target(folder, layers=8)


def make(case: Case, target: Target) -> Any:
    options = dict(case.options)
    if case.kind in BLOCK_KINDS:
        drafter = shaken(shipping(case.kind).drafter_class, target, **options)
    elif case.kind in ("medusa", "mlp_speculator"):
        drafter = make_heads(target, case.kind, options.pop("kept"), **options)
    else:
        drafter = make_kind(case.kind, target, options.pop("kept"), shake=True, **options)
    drafter.own_target = target
    return drafter


@pytest.mark.thorough
@pytest.mark.parametrize("case", MARKED)
def test_a_published_form_is_read_drafts_and_is_written_again(target, tmp_path, capsys, case):
    drafter = make(case, target)
    folder = tmp_path / "published"
    folder.mkdir()
    dump_json(folder / "config.json", case.config)
    weights = {
        name: value.detach().clone()
        for name, value in case.rename(drafter.state_dict(), drafter).items()
    }
    save_file(weights, folder / "model.safetensors")
    command = [
        "import",
        "--checkpoint",
        str(folder),
        "--target",
        str(target.path),
        "--output",
        str(tmp_path / "ours"),
    ]
    assert main(command) == 0, capsys.readouterr().err
    trained = find_drafter(str(tmp_path / "ours"))
    back = load_drafter(str(tmp_path / "ours"), target)
    assert trained.kind == case.kind and torch.equal(back.kept_ids, drafter.kept_ids)
    prefix = make_batch((9,)).input_ids[0]
    spec = TreeSpec.parse("fanout:3x2")
    trees = [begun(one, target, prefix).propose(spec) for one in (drafter.eval(), back)]
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    torch.testing.assert_close(trees[0].log_probs, trees[1].log_probs, rtol=1e-4, atol=1e-4)
    wanted = generate(target, None, prefix, max_new_tokens=8, eos_ids=[]).tokens
    assert (
        generate(
            target, back, prefix, max_new_tokens=8, spec=TreeSpec.parse("chain:3"), eos_ids=[]
        ).tokens
        == wanted
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.project} {case.form}")
def test_a_key_is_read_or_has_a_reason_or_is_refused(case):
    """Each key of each form, in every place where trainers put keys, and one that nobody knows there."""
    kind = shipping(case.kind)
    places: list[dict[str, Any]] = [{}]  # what leads to a place
    places += [{key: case.config[key]} for key in NESTED if isinstance(case.config.get(key), dict)]
    kind.check_published(Exported("it", case.config, {}))
    for place in places:
        changed: dict[str, Any] = {"warp_factor": 9}
        for key, inner in place.items():
            changed = {key: {**inner, "warp_factor": 9}}
        with pytest.raises(UserError, match=r"keys that import does not know \(warp_factor=9\)"):
            kind.check_published(Exported("it", {**case.config, **changed}, {}))


def test_no_key_has_two_rules():
    for name in shipped_kinds():
        kind = shipping(name)
        read, fixed = set(kind.published_keys), {*FIXED, *kind.fixed_keys}
        assert not read & UNREAD.keys() and not read & fixed and not fixed & UNREAD.keys(), name


@pytest.mark.parametrize(
    ("name", "config", "message"),
    REFUSED,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_computed_is_one_line(target, tmp_path, capsys, name, config, message):
    dump_json(tmp_path / "config.json", config)
    save_file({"fc.weight": torch.zeros(32, 96)}, tmp_path / "model.safetensors")
    command = [
        "import",
        "--checkpoint",
        str(tmp_path),
        "--target",
        str(target.path),
        "--output",
        str(tmp_path / "ours"),
    ]
    usual_device()  # which logs a line once per process
    assert main(command) == 2
    printed = capsys.readouterr().err.strip()
    assert re.search(message, printed) and "\n" not in printed


def test_the_page_lists_what_is_tried():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `?(\w+)`? \|", PAGE.read_text(), re.MULTILINE)
    assert {(p, f.replace("`", ""), k) for p, f, k in rows} >= {
        (case.project, case.form, case.kind) for case in CASES
    }
    page = PAGE.read_text().lower()
    for name, _, _ in REFUSED:
        assert name.lower() in page, name
