"""A model's own cache by its parts."""

import torch
from transformers import DynamicCache

from drafttrain.target.own_cache import CacheForm, leaves_of


def cache(rows: int, length: int, layers: int = 1) -> DynamicCache:
    made = DynamicCache()
    for i in range(layers):
        states = torch.arange(rows * length * 4.0).view(rows, 2, length, 2)
        made.update(states, states + 1, i)
    return made


def test_a_cache_with_more_parts_than_the_proof_saw_does_not_fit_and_is_copied_whole():
    one = cache(1, 2)
    form = CacheForm.of(one, cache(2, 2), cache(1, 3), [True] * len(leaves_of(one)))
    assert form is not None and form.fits(cache(1, 9)) and form.fits(cache(3, 5))
    grown = cache(1, 4, layers=2)
    assert not form.fits(grown)
    copied = form.copy(grown)
    pairs = list(zip(leaves_of(copied), leaves_of(grown), strict=True))
    tensors = [pair for pair in pairs if isinstance(pair[0], torch.Tensor)]
    assert len(tensors) >= 4
    for ours, theirs in tensors:
        assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
