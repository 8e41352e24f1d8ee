from __future__ import annotations

from drafttrain.inference.sequence import chunks


def test_chunks_cover_everything_once():
    assert list(chunks([5, 1, 12, 2], 6)) == [
        [(0, 0, 5), (1, 0, 1)],
        [(2, 0, 6)],
        [(2, 6, 12)],
        [(3, 0, 2)],
    ]
    assert list(chunks([], 6)) == []
