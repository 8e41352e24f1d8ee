"""Commands that tests of several modules run."""

from __future__ import annotations

from pathlib import Path

from drafttrain import cli


def generate(target: Path, prompts: Path, output: Path, *more: str) -> int:
    """Runs `drafttrain generate`; returns its exit status."""
    words = ["--target", str(target), "--prompts", str(prompts), "--output", str(output)]
    return cli.main(["generate", *words, *more])
