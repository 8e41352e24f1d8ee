"""Records `drafttrain chat` in a pseudo-terminal as an animated SVG. Needs pyte, a terminal emulator (pip install pyte).

python scripts/record_chat.py --output docs/pictures/chat.svg \\
    --line "Hello!" --line /plain --line "And now without?" -- --target smollm2-135m --drafter runs/drafter+ngram

Answers are shown in real time; typing is as quick as below, and a wait of more than a second (the target loads) lasts one.
"""

from __future__ import annotations

import argparse
import html
import os
import pty
import re
import select
import sys
import termios
import time
from itertools import groupby
from pathlib import Path

import pyte

COLUMNS = 92
ROWS = 26
# seconds
FRAME = 0.12
KEY = 0.03
LONGEST_WAIT = 1.0
LAST = 4.0
# pixels of a character, and around the screen
WIDTH = 8.4
HEIGHT = 18
MARGIN = 10
INK = "#e6e6e6"
DIM = "#9aa0a6"
PAPER = "#1b1f24"
Row = tuple[tuple[str, str, str], ...]  # (text, color, background) of each run of characters


def record(words: list[str], lines: list[str]) -> list[tuple[float, bytes]]:
    """Plays the lines, each typed at a prompt; returns what the terminal got, with the seconds of each part."""
    child, terminal = pty.fork()
    if child == 0:
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        os.execvpe(
            sys.executable, [sys.executable, "-m", "drafttrain", "chat", *words], environment
        )
    termios.tcsetwinsize(terminal, (ROWS, COLUMNS))
    parts: list[tuple[float, bytes]] = []
    seen = b""
    typed = [*lines, "\x04"]
    while True:
        if select.select([terminal], [], [], 0.3)[0]:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # the command has ended
                return parts
            seen += data
            parts.append((time.monotonic(), data))
        elif typed and seen.endswith(b"> "):
            for key in typed.pop(0) + "\n":
                os.write(terminal, key.encode())
                time.sleep(KEY)
            seen = b""


def screens(parts: list[tuple[float, bytes]]) -> list[tuple[float, list[Row]]]:
    """The terminal's rows at the end of each frame that changes it, with the frame's seconds."""
    screen = pyte.HistoryScreen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    clock = 0.0
    before = parts[0][0]
    frames = []
    for moment, data in parts:
        clock += min(moment - before, LONGEST_WAIT)
        before = moment
        stream.feed(data)
        rows = [row_of(screen, number) for number in range(ROWS)]
        if frames and clock - frames[-1][0] < FRAME:
            frames[-1] = (frames[-1][0], rows)
        elif not frames or frames[-1][1] != rows:
            frames.append((clock, rows))
    return frames


def row_of(screen: pyte.Screen, number: int) -> Row:
    cells = [screen.buffer[number][column] for column in range(COLUMNS)]
    looks = [(look(cell.fg, INK), look(cell.bg, "")) for cell in cells]
    runs = []
    for (color, back), run in groupby(zip(cells, looks, strict=True), key=lambda pair: pair[1]):
        runs.append(("".join(cell.data for cell, _ in run), color, back))
    if not runs[-1][2]:
        runs[-1] = (runs[-1][0].rstrip(), *runs[-1][1:])
    return tuple(run for run in runs if run[0])


def look(color: str, default: str) -> str:
    named = {"default": default, "black": "#000000", "brightblack": DIM}
    return named.get(color, f"#{color}" if re.fullmatch("[0-9a-f]{6}", color) else default)


def drawn(row: Row) -> str:
    """A row's SVG: a rectangle behind shaded runs, then the text."""
    boxes = []
    texts = []
    column = 0
    for text, color, back in row:
        x = MARGIN + column * WIDTH
        width = len(text) * WIDTH
        if back:
            boxes.append(
                f'<rect x="{x:.1f}" y="-13.5" width="{width:.1f}" height="{HEIGHT}" fill="{back}"/>'
            )
        if text.strip():
            fill = "" if color == INK else f' fill="{color}"'
            texts.append(
                f'<text x="{x:.1f}" textLength="{width:.1f}"{fill}>{html.escape(text)}</text>'
            )
        column += len(text)
    return "".join(boxes + texts)


def animation(frames: list[tuple[float, list[Row]]], title: str) -> str:
    """An SVG whose frames stand side by side and are moved into view one after the other; each row is defined once."""
    names: dict[Row, str] = {}
    groups = []
    total = frames[-1][0] + LAST
    width = COLUMNS * WIDTH + 2 * MARGIN
    height = ROWS * HEIGHT + 2 * MARGIN
    for number, (_, rows) in enumerate(frames):
        uses = [
            f'<use href="#{names.setdefault(row, f"r{len(names)}")}" y="{MARGIN + 14 + place * HEIGHT}"/>'
            for place, row in enumerate(rows)
            if row
        ]
        groups.append(f'<g transform="translate({number * width:g})">{"".join(uses)}</g>')
    steps = [
        f"{100 * begin / total:.3f}%{{transform:translate({-number * width:g}px)}}"
        for number, (begin, _) in enumerate(frames)
    ]
    steps.append(f"100%{{transform:translate({-(len(frames) - 1) * width:g}px)}}")
    rows = "".join(f'<g id="{name}">{drawn(row)}</g>' for row, name in names.items())
    style = (
        "text{font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre}"
        f"#film{{animation:film {total:.1f}s step-end infinite}}@keyframes film{{{''.join(steps)}}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
        f"<title>{html.escape(title)}</title>"
        f"<style>{style}</style><defs>{rows}</defs>"
        f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/><g id="film" fill="{INK}">{"".join(groups)}</g></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--line", action="append", required=True, help="what is typed, a line each")
    parser.add_argument("words", nargs="+", help="flags of drafttrain chat, after --")
    args = parser.parse_args()
    frames = screens(record(args.words, args.line))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(animation(frames, "A conversation with drafttrain chat"))
    print(f"wrote {args.output}: {len(frames)} frames, {args.output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
