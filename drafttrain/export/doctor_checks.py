"""The rows of `drafttrain doctor`: one small function per check, in `CHECKS`.

A check says what is wrong by config and tensors. What import refuses, and what agrees more with the
target when it is read in another way, is added to the row that it belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from drafttrain.drafters.common.configs import rope_parameters_of
from drafttrain.export.agreement import ROPE_KEYS, Agreement
from drafttrain.files import Json
from drafttrain.target import Target

FITS = "fits"
WRONG = "wrong"
_FLAT = 0.2  # mean factor of a norm that is stored minus one


class Finding(NamedTuple):
    """A row of the table."""

    check: str
    verdict: str
    evidence: str
    fix: str = ""


@dataclass
class Patient:
    """A head to examine, and the target that it drafts for.

    Attributes:
        keys: of its config.json, nested ones beside the others. template: the head's chat template.
        kind: of ours. weights: by the checkpoint's names. fields: of our config, as import reads
            them; empty if it refuses the head, for `refusal`. agreement: see `measure`; empty if
            nothing was measured.
    """

    keys: Json
    target: Target
    template: str = ""
    kind: str = ""
    refusal: str = ""
    weights: dict[str, Tensor] = field(default_factory=dict)
    fields: Json = field(default_factory=dict)
    agreement: Agreement = field(default_factory=dict)

    @property
    def rope(self) -> Json:
        return self.fields.get("rope_parameters", {})


def _rotary(patient: Patient, key: str) -> str:
    default = ROPE_KEYS[key][1]
    theirs = rope_parameters_of(patient.target.config).get(key, default)
    if not patient.rope or patient.rope.get(key, default) == theirs:
        return ""
    return f"the target's is {theirs:g}, and the head was trained with one of both"


def _mrope(patient: Patient) -> str:
    section = patient.rope.get("mrope_section")
    rotated = patient.fields.get("head_dim", 0) * patient.rope.get("partial_rotary_factor", 1.0)
    if section and 2 * sum(section) != rotated:
        return f"{rotated:g} entries of a head are rotated, not twice the sum of {section}"
    return ""


def _norms(patient: Patient) -> str:
    for name, weight in patient.weights.items():
        if "norm" in name and weight.dim() == 1 and abs(weight.float().mean()) < _FLAT:
            return f"{name} has a mean near 0, as factors minus one have"
    return ""


def _causality(patient: Patient) -> str:
    """Keys that contradict each other; vLLM 0.32 reads is_causal first, we and trainers the others."""
    whole = patient.keys.get("is_causal")
    for key in ("causal", "causal_head", "dflash_query_causal"):
        own = patient.keys.get(key)
        if None not in (whole, own) and whole != own:
            return f"is_causal={whole}, which vLLM reads first, contradicts {key}={own}, which was trained"
    return ""


def _mask(patient: Patient) -> str:
    v = patient.target.vocab_size
    return "" if (patient.keys.get("mask_token_id") or 0) <= v else f"the target has {v} tokens"


def _vocabulary(patient: Patient) -> str:
    table = patient.weights.get("d2t")
    if table is None:
        return ""
    if table.dim() != 1:
        return f"d2t has the shape {list(table.shape)}, not a row per kept token"
    ids = table + torch.arange(len(table))  # [d] as engines compute them
    kept = patient.weights.get("t2d", table).nonzero().flatten()
    ascends = bool((table.diff() > 0).all())
    if ascends and (ids[-1] >= patient.target.vocab_size or torch.equal(kept, table)):
        return "d2t holds absolute ids, to which engines add the row's number"
    if "t2d" in patient.weights and not torch.equal(kept, ids):
        return f"t2d keeps {len(kept)} other ids than d2t"
    return ""


def _template(patient: Patient) -> str:
    if patient.template in ("", patient.target.tokenizer.chat_template):
        return ""
    return "the head's chat template is not the target's"


# What is wrong by config and tensors, by row; other rows hold refusals and agreement alone.
CHECKS: dict[str, Callable[[Patient], str]] = {
    "rotary base": partial(_rotary, key="rope_theta"),
    "partial rotation": partial(_rotary, key="partial_rotary_factor"),
    "mrope": _mrope,
    "norms": _norms,
    "causality": _causality,
    "mask token": _mask,
    "vocabulary map": _vocabulary,
    "chat template": _template,
}


def rows_of(patient: Patient, table: Json) -> Iterator[Finding]:
    """The rows that apply to a head.

    Args:
        table: `rows` of doctor.yaml.
    """
    refusal = patient.refusal
    best = 0.0
    for readings in patient.agreement.values():
        best = max(best, *(gain for _, gain in readings))
    for name, about in table.items():
        wrong = CHECKS[name](patient) if name in CHECKS else ""
        readings = patient.agreement.get(name, [])
        if readings and all(gain < 0 for _, gain in readings):
            wrong = ""  # the head as it is read agrees most
        # Of a head of no known kind nothing was read.
        if refusal and patient.kind and re.search(about["refused"], refusal):
            wrong = f"{refusal}; {wrong}".strip("; ")
            refusal = ""
        evidence = [wrong] if wrong else []
        for key, value in patient.keys.items():
            if re.search(about["shown"], key):
                evidence.append(f"{key}={value}")
        for shown, gain in readings:
            evidence.append(shown)
            if gain == best > 0:  # mend the largest mistake first: it can show in other rows
                wrong = shown
        if evidence:
            verdict = WRONG if wrong else FITS
            yield Finding(name, verdict, "; ".join(evidence), about["fix"] if wrong else "")
    if refusal:
        yield Finding("import", WRONG, refusal, "ask its author, or mend a copy")
