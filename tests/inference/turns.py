"""A conversation, for decoders that keep their last text and those that read every prompt anew."""

from __future__ import annotations

OPENING = [5, 9, 11, 9, 11, 30, 2, 9, 11, 4]
TURNS = ([7, 8, 7], [50], [3, 9, 11, 2])
NEW = 9


def talk(decoder, turns=TURNS, **options):
    """Answers to an opening and to turns, each of which follows the text so far."""
    text = list(OPENING)
    made = []
    for turn in ([], *turns):
        text += turn
        (answer,) = decoder.generate([text], max_new_tokens=NEW, **options)
        made.append(answer)
        text += answer.tokens
    return made
