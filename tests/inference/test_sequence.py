from __future__ import annotations

from types import SimpleNamespace

from drafttrain.inference.sequence import TextStream, chunks


def test_chunks_cover_everything_once():
    assert list(chunks([5, 1, 12, 2], 6)) == [
        [(0, 0, 5), (1, 0, 1)],
        [(2, 0, 6)],
        [(2, 6, 12)],
        [(3, 0, 2)],
    ]
    assert list(chunks([], 6)) == []


def test_text_in_front_of_a_part_of_a_character_counts():
    pieces = [b"a", b" \xd0", b"\x9f"]
    tokenizer = SimpleNamespace(
        decode=lambda ids, **_: b"".join(pieces[i] for i in ids).decode(errors="replace")
    )
    stopped = TextStream(tokenizer, [" "])
    assert stopped.push([0, 1, 2]) == 2  # the second token completes the stop string
    assert stopped.take(last=True) == "a"
    text = TextStream(tokenizer)
    shown = []
    for token in (0, 1, 2):
        text.push([token])
        shown.append(text.take())
    assert shown == ["a", " ", "П"]
