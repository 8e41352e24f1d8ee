"""Block drafters for tests, at and away from their start."""

from __future__ import annotations

import torch

from drafttrain.drafters.common.rows import HostPlaces

KEPT = torch.arange(40, 240)
# Layers that differ as those of published drafters do: sliding ones and a full one.
MIXED = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 6,
    "num_hidden_layers": 3,
}
BLOCK_KINDS = ("dflash", "dspark", "dflash2", "domino", "jetspec")


def make_drafter(kind, target, kept=KEPT, **options):
    """A drafter of a block kind that is bound to the target."""
    torch.manual_seed(3)
    options = {"block_size": 5, "anchor_share": 1.0, "loss": "kl", **options}
    drafter = kind(kind.config_class.for_target(target, draft_vocab_size=len(kept), **options))
    drafter.initialize(target, kept)
    drafter.bind(target)
    return drafter


def shaken(kind, target, **options):
    """With norms, mask and low ranks away from where they start."""
    drafter = make_drafter(kind, target, **options)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 1 or any(
                part in name for part in ("markov", "conv", "correction_out")
            ):
                parameter += (0.05 if "conv" in name or "out" in name else 0.3) * torch.randn(
                    parameter.shape, generator=generator
                )
    return drafter.eval()


def begun(drafter, target, prefix, max_length=64):
    """A session that has read a prefix, in pieces."""
    features = target.forward(prefix[None], drafter.feature_layers).features[0, :-1]
    session = drafter.start(prefix[:-1], max_length)
    for piece in (slice(0, 3), slice(3, 4), slice(4, None)):  # as prompts and rounds do
        session.extend(prefix[1:][piece], features[piece])
    return session


@torch.no_grad()
def block_states(drafter, features, root):
    """[depth, h] of the block behind a text with these features [t, f*h], as decoding computes them."""
    session = drafter.start(torch.zeros(len(features), dtype=torch.long), 64)
    session.extend(torch.tensor([7] * (len(features) - 1) + [root]), features)
    size = drafter.config.block_size
    places = HostPlaces([session], drafter.config.depth)
    at, attends = drafter.behind(places)
    return drafter.run(drafter.embed(session.root), at.positions[::size], attends)[0]
