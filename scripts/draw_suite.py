"""Writes the suite `drawn`: pictures that are drawn by code, with questions about them.

    python scripts/draw_suite.py eval/suites/drawn.jsonl

Every machine draws the same pixels: shapes have no smoothed edges, and letters come from Pillow's
bitmap font.
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_EACH = 8  # pictures of a kind
_SIZE = (336, 252)  # pixels
_WHITE = (255, 255, 255)
_BLACK = (0, 0, 0)
_COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "orange": (240, 150, 30),
    "purple": (130, 60, 170),
}
_NAMES = ("Oslo", "Lima", "Cairo", "Delhi", "Quito", "Accra", "Hanoi", "Perth")
_GOODS = ("bread", "apples", "coffee", "rice", "soap", "paper", "candles", "honey")


class _Sheet:
    """A white picture to draw on."""

    def __init__(self) -> None:
        self.image = Image.new("RGB", _SIZE, _WHITE)
        self.draw = ImageDraw.Draw(self.image)

    def write(self, place: tuple[int, int], text: str) -> None:
        """Writes text of twice the bitmap font's size, top left corner at the place."""
        font = ImageFont.load_default_imagefont()
        left, top, right, bottom = font.getbbox(text)
        small = Image.new("RGB", (int(right - left) + 1, int(bottom - top) + 1), _WHITE)
        ImageDraw.Draw(small).text((-left, -top), text, fill=_BLACK, font=font)
        large = small.resize((2 * small.width, 2 * small.height), Image.Resampling.NEAREST)
        self.image.paste(large, place)

    def uri(self) -> str:
        """A data URI of a PNG file; few colors make it small."""
        file = io.BytesIO()
        self.image.quantize(16).save(file, format="PNG", optimize=True)
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _shapes(sheet: _Sheet, rng: random.Random) -> str:
    places = rng.sample([(x, y) for x in range(4) for y in range(3)], 6)
    for column, row in places:
        color = _COLORS[rng.choice(list(_COLORS))]
        left = 12 + 82 * column
        top = 12 + 80 * row
        box = (left, top, left + 60, top + 60)
        shape = rng.choice(("circle", "square", "triangle"))
        if shape == "circle":
            sheet.draw.ellipse(box, fill=color)
        elif shape == "square":
            sheet.draw.rectangle(box, fill=color)
        else:
            corners = [(left, top + 60), (left + 60, top + 60), (left + 30, top)]
            sheet.draw.polygon(corners, fill=color)
    return "List every shape with its color, from left to right and from top to bottom."


def _bars(sheet: _Sheet, rng: random.Random) -> str:
    colors = list(_COLORS.values())
    names = rng.sample(_NAMES, 4)
    heights = rng.sample(range(2, 10), 4)
    for number, name in enumerate(names):
        height = 20 * heights[number]
        left = 16 + 80 * number
        box = (left, 220 - height, left + 50, 220)
        sheet.draw.rectangle(box, fill=colors[number])
        sheet.write((left, 226), name)
    sheet.draw.line((8, 220, 328, 220), fill=_BLACK, width=2)
    return "Describe this bar chart: order the cities from the tallest bar to the shortest."


def _lines(sheet: _Sheet, rng: random.Random) -> str:
    colors = rng.sample(sorted(_COLORS), 2)
    for color in colors:
        points = [(20 + 50 * step, 220 - 20 * rng.randint(1, 9)) for step in range(7)]
        sheet.draw.line(points, fill=_COLORS[color], width=4)
    sheet.draw.line((20, 220, 328, 220), fill=_BLACK, width=2)
    sheet.draw.line((20, 20, 20, 220), fill=_BLACK, width=2)
    return f"Compare the {colors[0]} line with the {colors[1]} one: where is each of them higher?"


def _table(sheet: _Sheet, rng: random.Random) -> str:
    for number, good in enumerate(rng.sample(_GOODS, 5)):
        top = 20 + 42 * number
        sheet.write((20, top), good)
        sheet.write((210, top), f"{rng.randint(1, 40)}.{rng.randint(0, 99):02d}")
        sheet.draw.line((12, top + 30, 324, top + 30), fill=_BLACK)
    return "Write this price list as a Markdown table, and say which item costs most."


def _text(sheet: _Sheet, rng: random.Random) -> str:
    here, there, other = rng.sample(_NAMES, 3)
    lines = [
        f"Train {rng.randint(10, 99)} to {here}",
        f"leaves at {rng.randint(6, 22)}:{rng.randint(10, 59)}",
        f"from platform {rng.randint(1, 12)}.",
        f"Change in {there}",
        f"for {other}.",
    ]
    for number, line in enumerate(lines):
        sheet.write((20, 20 + 42 * number), line)
    return "Copy the text of this sign, then say in a sentence what a traveller should do."


_KINDS: dict[str, Callable[[_Sheet, random.Random], str]] = {
    "shapes": _shapes,
    "bar chart": _bars,
    "line chart": _lines,
    "table": _table,
    "text": _text,
}


def drawn_rows() -> Iterator[dict[str, object]]:
    """The rows of the suite."""
    for kind, draw in _KINDS.items():
        for number in range(_EACH):
            sheet = _Sheet()
            question = draw(sheet, random.Random(f"{kind} {number}"))
            yield {
                "question_id": f"{kind} {number}",
                "category": kind,
                "turns": [question],
                "images": [sheet.uri()],
            }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in drawn_rows()))
