"""What the target says about packed rows is what it says about each conversation alone, wherever it comes from."""

from __future__ import annotations

import pytest
import torch

from drafttrain.batch import Batch
from drafttrain.data.store import FeatureStore, Store
from drafttrain.states.origins import Stored
from drafttrain.states.source import TargetSource
from tests.conftest import make_target
from tests.drafters.helpers import make_batch, packed_batch

LAYERS = (1, 2, 4)


def per_conversation(source, batch: Batch):
    features, rows, row_of = source(batch)
    for row, start, length in batch.conversations().tolist():
        part = slice(start, start + length)
        needed = row_of[row, part]
        yield (
            features[row, part],
            rows.hidden[needed[needed >= 0]],
            rows.argmax[needed[needed >= 0]],
        )


@pytest.mark.parametrize("limit", [0, 1e9])
def test_conversations_in_a_row_do_not_see_each_other(limit):
    target = make_target()
    whole = make_batch((17, 70, 30, 9), start=2)  # one longer than the kernels' 64 tokens
    packed = packed_batch(whole, [[2, 0], [3, 1]])
    source = TargetSource(target, LAYERS, torch.arange(300), limit_bytes=limit)
    found = dict(zip(packed.index.tolist(), per_conversation(source, packed), strict=True))
    again = dict(zip(packed.index.tolist(), per_conversation(source, packed), strict=True))
    assert source.hits["memory"] == (4 if limit else 0)
    for i, length in enumerate(whole.lengths.tolist()):
        alone = target.forward(whole.input_ids[i : i + 1, :length], LAYERS)
        for features, hidden, _ in (found[i], again[i]):
            tolerance = {"rtol": 2e-2, "atol": 2e-2} if limit else {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(features.float(), alone.features[0], **tolerance)
            mask = whole.response_mask[i, :length]
            rows = (mask[:-1] & mask[1:]).nonzero().squeeze(1)
            torch.testing.assert_close(hidden.float(), alone.last_hidden[0, rows], **tolerance)


def test_stored_features_are_laid_out_into_packed_rows(tmp_path):
    target = make_target()
    whole = make_batch((17, 11, 30, 9), start=2)
    meta = {"target": target.identity(), "features": {"layers": list(LAYERS)}}
    with Store(tmp_path / "data", meta) as store:
        for i, length in enumerate(whole.lengths.tolist()):
            ids = whole.input_ids[i, :length]
            out = target.forward(ids[None, :-1], LAYERS)
            record = {
                "id": f"r{i}",
                "tokens": ids.tolist(),
                "spans": [[2, length]],
                "finish": ["stop"],
                "source": "t",
            }
            features = out.features[0].bfloat16()
            last_hidden = out.last_hidden[0].bfloat16()
            store.add([record], [{"features": features, "last_hidden": last_hidden}])
    stored = FeatureStore.open(tmp_path / "data", LAYERS)
    packed = packed_batch(whole, [[2, 0], [3, 1]])
    sources = [
        TargetSource(target, LAYERS, torch.arange(300), origin)
        for origin in (None, Stored(stored, [f"r{i}" for i in range(4)]))
    ]
    online, offline = (list(per_conversation(source, packed)) for source in sources)
    assert sources[1].hits == {"memory": 0, "stored": 4, "online": 0}
    for (features, hidden, _), (kept, kept_hidden, _) in zip(online, offline, strict=True):
        torch.testing.assert_close(features[:-1], kept[:-1].float(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(hidden, kept_hidden.float(), rtol=2e-2, atol=2e-2)
