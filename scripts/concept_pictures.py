"""Draws the pictures of docs/concepts.md as SVG files that read on light and dark pages.

python scripts/concept_pictures.py [FOLDER]     (default: docs/pictures)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

# One class per meaning. Each picture brings its own card, so it also reads on a page whose theme differs from the system's.
STYLE = """
text { font: 14px "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #191c20; text-anchor: middle; }
.left { text-anchor: start; } .small { font-size: 12px; } .head { font-weight: 600; text-anchor: start; }
.muted { fill: #5b6470; } .card { fill: #ffffff; stroke: #e2e3df; }
.plain { fill: #e9eae6; stroke: #8a929c; } .target { fill: #dbeafe; stroke: #2563c9; }
.draft { fill: #fdebdc; stroke: #c2570c; } .kept { fill: #d3efe9; stroke: #0b7a6b; stroke-width: 2; }
.lost { fill: none; stroke: #8a929c; stroke-dasharray: 4 3; }
.line { stroke: #8a929c; fill: none; stroke-width: 1.5; } .path { stroke: #0b7a6b; fill: none; stroke-width: 2.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e9ebed; } .muted { fill: #9aa4af; } .card { fill: #181b1e; stroke: #2b3035; }
  .plain { fill: #2b3035; stroke: #8d97a2; } .target { fill: #1c2f4a; stroke: #6ea8fe; }
  .draft { fill: #4a2f1c; stroke: #f0945a; } .kept { fill: #12403a; stroke: #4fc3b0; }
  .line, .lost { stroke: #8d97a2; } .path { stroke: #4fc3b0; }
}
"""


class Picture:
    """SVG elements on a card of width x height pixels; `says` is read aloud in place of the picture."""

    def __init__(self, width: int, height: int, says: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
            f"<title>{escape(says)}</title><style>{STYLE}</style>",
            f'<rect class="card" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str,
        words: str = "",
        font: str = "",
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words, font)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> None:
        self.parts.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="{kind}"/>')

    def caption(self, y: float, *lines: str, gap: float = 18) -> None:
        """Small lines at the left edge; y: of the first line's base."""
        for number, words in enumerate(lines):
            self.text(20, y + gap * number, words, "left small muted")

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def draft_verify() -> Picture:
    """The same text by plain decoding and by one round of speculation."""
    art = Picture(
        720,
        300,
        "Plain decoding takes one target pass per token; a round drafts three tokens and commits three in one pass.",
    )
    art.text(20, 32, "Plain decoding: a pass of the target per token", "head")
    for index, word in enumerate(["Paris", ".", "It"]):
        art.box(20 + 160 * index, 46, 152, 34, "target", "target pass")
        art.text(20 + 160 * index + 76, 102, f"“{word}”")
    art.text(600, 68, "3 passes, 3 tokens", "muted")
    art.text(20, 150, "Speculative decoding: one round", "head")
    for index, (word, kind) in enumerate([("Paris", "kept"), (".", "kept"), ("The", "lost")]):
        art.box(20 + 40 * index, 164, 36, 34, "draft", "draft", "small")
        art.box(146 + 58 * index, 216, 52, 28, kind, word)
    art.box(144, 164, 190, 34, "target", "target pass over all three", "small")
    art.box(320, 216, 52, 28, "target", "It")
    art.text(600, 186, "1 pass, 3 tokens", "muted")
    art.text(20, 234, "verified:", "left muted")
    art.caption(
        270,
        "Two drafted tokens are what the target itself would have written; “The” is not, and the target’s own",
        "“It” comes from the same pass. The round commits 3 tokens: its accepted length is 3.",
        gap=17,
    )
    return art


# Nodes of the tree in the order in which they are verified: word, parent, place, drafter's probability.
_NODES = [
    ("Paris", -1, (150, 90), 0.81),
    ("the", -1, (150, 190), 0.09),
    (".", 0, (260, 60), 0.61),
    (",", 0, (260, 120), 0.14),
]
_NODES += [
    ("city", 1, (260, 190), 0.05),
    ("It", 2, (370, 40), 0.31),
    ("The", 2, (370, 88), 0.24),
    ("which", 3, (370, 136), 0.08),
]
_ACCEPTED = {0, 2, 5}


def tree() -> Picture:
    """A drafted tree and the attention mask that verifies it in one pass."""
    art = Picture(
        720,
        300,
        "A tree of eight drafted tokens, its accepted path of three, and the mask: each node sees its ancestors only.",
    )
    art.text(20, 26, "A tree of drafts: dynamic:3,4,8", "head")
    art.box(20, 126, 60, 28, "target", "is")
    for number, (word, parent, (x, y), likely) in enumerate(_NODES):
        start = (80, 140) if parent < 0 else (_NODES[parent][2][0] + 62, _NODES[parent][2][1] + 14)
        art.line(*start, x, y + 14, "path" if number in _ACCEPTED else "line")
        art.box(x, y, 62, 28, "kept" if number in _ACCEPTED else "draft", word)
        art.text(x + 31, y + 41, f"{likely:.2f}", "small muted")
    art.caption(
        256, "Root: the last committed token. Numbers: the drafter’s probability of the path."
    )
    art.caption(
        274,
        "Green: the path that the target would have written. The round commits these three",
        "and the target’s own next token: accepted length 4.",
        gap=17,
    )
    art.text(470, 26, "What each node sees", "head")
    words = ["is", *(word for word, *_ in _NODES)]
    for row in range(9):
        art.text(526, 66 + 20 * row, words[row], "small")
        seen = {0, row}
        node = row - 1
        while node >= 0:
            seen.add(node + 1)
            node = _NODES[node][1]
        for column in range(9):
            art.box(
                552 + 16 * column, 53 + 20 * row, 14, 16, "target" if column in seen else "lost"
            )
    art.text(612, 250, "rows attend to blue columns", "small muted")
    return art


def anchor() -> Picture:
    """What a drafter reads and predicts at an anchor, by depth."""
    art = Picture(
        720,
        290,
        "At anchor t depth k reads the feature of t and the tokens up to t+1+k and predicts token t+2+k.",
    )
    art.text(20, 26, "Anchor t, depths 0, 1 and 2", "head")
    for column in range(6):
        x = 130 + 92 * column
        place = "t" if not column else f"t+{column}"
        art.text(x + 35, 56, f"position {place}", "small muted")
        art.box(x, 66, 70, 26, "plain", f"x({place})")
        art.box(x, 98, 70, 26, "target" if not column else "lost", f"f({place})")
    art.text(20, 84, "token", "left")
    art.text(20, 116, "target feature", "left")
    for depth in range(3):
        y = 150 + 36 * depth
        art.text(20, y + 18, f"depth {depth}", "left")
        art.box(
            130,
            y,
            70,
            26,
            "target" if not depth else "draft",
            "f(t)" if not depth else "own state",
            "small",
        )
        for column in range(1, depth + 2):
            art.box(130 + 92 * column, y, 70, 26, "plain", f"x(t+{column})")
        art.box(130 + 92 * (depth + 2), y, 70, 26, "kept", f"x(t+{depth + 2})")
        art.text(130 + 92 * (depth + 2) + 82, y + 18, "predicted", "left small muted")
    art.caption(
        270,
        "Blue: from the target’s last pass. Grey: tokens read; those after x(t+1) are drafts. Green: predicted.",
    )
    return art


def sampled() -> Picture:
    """Why sampled verification returns the target's distribution."""
    art = Picture(
        720,
        270,
        "Bars of the target's and the drafter's probabilities; their overlap is accepted, the rest is drawn from the residual.",
    )
    art.text(
        20,
        26,
        "Sampling: keep x with probability min(1, p(x) / q(x)), else draw from what is missing",
        "head",
    )
    target = [0.40, 0.30, 0.15, 0.10, 0.05]
    drafter = [0.55, 0.15, 0.20, 0.05, 0.05]
    for group, (name, values) in enumerate(
        [
            ("drafter q", drafter),
            ("accepted min(p, q)", []),
            ("drawn again p − q", []),
            ("target p", target),
        ]
    ):
        x = 30 + 175 * group
        for index, (p, q) in enumerate(zip(target, drafter, strict=True)):
            value = values[index] if values else min(p, q) if group == 1 else max(p - q, 0.0)
            kind = ("draft", "kept", "target", "target")[group]
            art.box(x + 26 * index, 190 - 240 * value, 22, max(240 * value, 1), kind)
            art.text(x + 26 * index + 11, 206, "abcde"[index], "small muted")
        art.text(x + 63, 228, name)
        if group < 3:
            art.text(x + 152, 140, "→+="[group])
    art.caption(
        254,
        "min(p, q) sums to 0.80, the acceptance rate. The other 0.20 comes from p − q where it is positive. The sum is p.",
    )
    return art


def round_time() -> Picture:
    """Where a round's time goes: eval/results/profile_smollm2-135m_cpu.json."""
    art = Picture(
        720,
        230,
        "A plain step takes 14.4 ms, a round 21.2 ms: drafting 3.3, the target pass 17.2, the rest 0.7.",
    )
    art.text(
        20,
        26,
        "A plain step and a round: SmolLM2-135M on two CPU threads, tree dynamic:2,6,8",
        "head",
    )
    bars = [
        ("plain step", [("target pass", 14.0, "target"), ("", 0.4, "plain")], "14.4 ms, 1 token")
    ]
    parts = [
        ("draft", 3.3, "draft"),
        ("target pass over 9 tokens", 17.2, "target"),
        ("", 0.7, "plain"),
    ]
    bars.append(("round", parts, "21.2 ms, 1 to 3 tokens"))
    for row, (name, pieces, note) in enumerate(bars):
        x = 110.0
        y = 52 + 62 * row
        art.text(20, y + 24, name, "left")
        for label, value, kind in pieces:
            art.box(x, y, 20 * value, 38, kind, label, "small")
            x += 20 * value
        art.text(x + 8, y + 24, note, "left small muted")
    art.caption(
        196,
        "The round pays if it commits more than 21.2 / 14.4 = 1.47 tokens on average. A wider tree accepts more",
    )
    art.caption(214, "and costs more; drafttrain tune finds the best of the two on your machine.")
    return art


PICTURES: dict[str, Callable[[], Picture]] = {
    "draft-verify": draft_verify,
    "tree": tree,
    "anchor": anchor,
    "sampled": sampled,
    "round-time": round_time,
}

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
        print(folder / f"{name}.svg")
