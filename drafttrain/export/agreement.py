"""How often a head's likeliest token is the target's, as the head is read and with other values.

One forward of the target over texts that it wrote itself gives the states of all its layers; each
reading of the head is then one forward of the head over the same texts.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator

import torch

from drafttrain.batch import Batch
from drafttrain.drafters.base import StepInputs
from drafttrain.drafters.common.configs import rope_parameters_of
from drafttrain.drafters.common.trainable import TrainableDrafter
from drafttrain.files import Json
from drafttrain.states.source import TargetSource
from drafttrain.target import Target

AS_READ = "agreement"  # the row of the head as it is read
# By which agreement must differ to mean anything: so much, and so many standard errors.
_LEAST = 0.05
_ERRORS = 3.0
_USELESS = 0.02  # agreement of a head that knows nothing of its target
_SHIFT = "features_moved"  # a reading that moves features by tokens, beside fields of the config
# Flags of our configs, and keys of their rotary embedding with what trainers take that miss one, by
# the row of the table that each belongs to.
_FLAGS = {
    "norm_before_residual": "norms",
    "norm_output": "norms",
    "causal": "causality",
    "sample_from_anchor": "anchor",
}
ROPE_KEYS = {
    "rope_theta": ("rotary base", 10000.0),
    "partial_rotary_factor": ("partial rotation", 1.0),
}
# By row of the table: text and gain of each reading, see `measure`.
Agreement = dict[str, list[tuple[str, float]]]


@torch.no_grad()
def measure(drafter: TrainableDrafter, target: Target, batch: Batch) -> Agreement:
    """Compares a head with its target on texts that the target wrote.

    Returns:
        For each reading its agreement by depth, as text, and its gain: the mean over the depths
        beyond that of the head as it is read, 0 if chance gives as much.

    Raises:
        UserError: the head is for another target.
    """
    layers = range(-1, target.num_layers + 1)  # LAST and all others
    states, rows, row_of = TargetSource(target, tuple(layers), drafter.kept_ids)(batch)
    states = states.unflatten(-1, (len(layers), -1))  # [b, s, layers, h]
    embeds = target.embed(batch.input_ids)  # [b, s, h]
    rows.prepare()
    found: Agreement = defaultdict(list)
    base = None  # [depths] of the head as it is read
    for check, fields in _readings(drafter, target):
        head = _read(drafter, fields, target)
        read = states[:, :, [layer + 1 for layer in head.feature_layers]].flatten(2)
        features = read.roll(fields.get(_SHIFT, 0), dims=1)
        inputs = StepInputs(batch, embeds, features, rows, row_of, 1.0)  # type: ignore[arg-type]  # of a target online
        metrics = head(inputs).metrics
        count = metrics["count"].clamp(min=1)  # [depths]
        shares = metrics["agree"] / count
        if base is None:
            base = shares
        depths = min(len(base), len(shares))
        gain = (shares[:depths] - base[:depths]).mean().item()
        # The standard error of a difference of two shares is at most sqrt(1 / 2n).
        least = max(_LEAST, _ERRORS * (2 * count.sum().item()) ** -0.5)
        if fields.get(_SHIFT) == -1:
            # The states of the next token know more, so a good head too may read them better.
            least = max(least, base.mean().item())
        if abs(gain) < least:
            gain = 0.0
        if check == AS_READ and shares[0] < _USELESS:
            gain = 1.0  # any other reading would be better
        shown = " ".join(f"{share:.2f}" for share in shares.tolist())
        found[check].append((f"{shown} {fields or 'as it says'}", gain))
    return found


def _read(drafter: TrainableDrafter, fields: Json, target: Target) -> TrainableDrafter:
    """The head with other fields in its config, bound to the target."""
    config = copy.deepcopy(drafter.config)
    vars(config).update(fields)
    head = type(drafter)(config)
    head.load_state_dict(drafter.state_dict())
    head.to(target.device, target.compute_dtype)  # type: ignore[arg-type]
    head.bind(target)
    return head.eval()


def _readings(drafter: TrainableDrafter, target: Target) -> Iterator[tuple[str, Json]]:
    """The head as it is read, and the readings that undo mistakes of trainers and converters."""
    yield AS_READ, {}
    fields = vars(drafter.config)
    layers = drafter.feature_layers
    for step in (-1, 1):
        yield "features", {_SHIFT: step}
        moved = [layer + step for layer in layers]
        # LAST (-1), the state behind the final norm, has no neighbors.
        if -1 not in (*layers, *moved) and max(moved) <= target.num_layers:
            yield "layer numbering", {"feature_layers": moved}
        if fields.get("mask_token_id"):
            mask = (fields["mask_token_id"] + step) % target.vocab_size
            yield "mask token", {"mask_token_id": mask}
    for name, check in _FLAGS.items():
        if name in fields:
            yield check, {name: not fields[name]}
    rope = fields.get("rope_parameters")  # of kinds with attention
    theirs = rope_parameters_of(target.config)
    for key, (check, default) in ROPE_KEYS.items():
        if rope:
            for value in {theirs.get(key, default), default} - {rope.get(key, default)}:
                yield check, {"rope_parameters": {**rope, key: value}}
