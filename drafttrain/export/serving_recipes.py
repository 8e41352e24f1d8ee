"""Command lines that serve a drafter, per engine: for `drafttrain export` and the model card."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.engine_trees import engine_chain, engine_depth, fastest, tuned_tree
from drafttrain.drafters.shipping import GGUF_NAME, Trained, shipped_kinds, shipping
from drafttrain.errors import UserError
from drafttrain.export.batch_schedule import Entry, batch_schedule
from drafttrain.export.engine_runs import RUNS, Serving
from drafttrain.files import Json
from drafttrain.formats.engines import ENGINES
from drafttrain.outcome import next_command

_OURS = """from drafttrain import generate

out = generate({target}, "The capital of France is", drafter={drafter}, tree={tree})
print(out.text, out.stats.accepted_length)"""


class Recipe(NamedTuple):
    """How one engine serves a drafter."""

    engine: str
    commands: str = ""  # what to type
    reasons: Sequence[str] = ()  # why the engine cannot serve it; empty if it can


def recipes(
    trained: Trained,
    drafter: str,
    target: str,
    depth: int | None = None,
    results: Sequence[Json] = (),
    published: bool = False,
    schedule: list[Entry] | None = None,
    swap_root: str = "",
) -> list[Recipe]:
    """Every engine's recipe for a drafter.

    Args:
        drafter, target: Hub ids or folders, as they are to appear.
        depth: speculative tokens; the tuned tree's unless given. Engines that only draft chains get
            the depth.
        results: measured runs; the fastest gives the tree, and the kind that our own decoder merges
            in, such as +ngram.
        published: `drafter` is a repository that `Shipping.publish` filled, not a folder in one
            format.
        schedule: draft lengths by batch size, for vLLM and SGLang, which can follow one.
        swap_root: folder whose heads vLLM may swap in while it serves.
    """
    kind = shipping(trained.kind)
    tree = tuned_tree(trained.folder, results)
    if depth:
        tree = TreeSpec.parse(f"chain:{depth}")
    # Engines draft no deeper than the drafter reaches.
    drawn = tree
    most = engine_depth(trained, tree)
    if most != tree.depth:
        drawn = TreeSpec.parse(f"chain:{most}")
    chain = TreeSpec.parse(f"chain:{depth or engine_chain(trained, results)}")

    options = kind.options(trained)
    made = []
    for name, release in ENGINES.items():
        reasons = kind.unserved(trained, release.form, release)
        if reasons:
            made.append(Recipe(name, reasons=reasons))
            continue
        place = drafter
        fetch = ""  # how the engine's files are had
        if published:
            place, fetch = _published_files(trained, drafter, release.form)
        engine = RUNS[name]
        spec = drawn if engine.draws_trees else chain
        lengths = schedule if engine.follows(options[name]) else None
        serving = Serving(target, place, spec, options[name], lengths, swap_root)
        made.append(Recipe(name, fetch + engine.command(serving)))

    best = fastest(results)
    if best is not None:  # with the kind that was merged in
        _, plus, side = str(best.get("kind", "")).partition("+")
        drafter += plus + side
    words = {"target": target, "drafter": drafter, "tree": str(tree)}
    quoted = {name: json.dumps(word) for name, word in words.items()}
    made.append(Recipe("drafttrain", _OURS.format(**quoted)))
    return made


def _published_files(trained: Trained, repository: str, form: str) -> tuple[str, str]:
    """Where an engine finds a published drafter's files, and the command that brings them there."""
    kind = shipping(trained.kind)
    if kind.withheld(trained, form):
        place = f"{repository.rpartition('/')[2]}-{form}"
        export = next_command("export", drafter=repository, format=form, output=place)
        return place, f"{export}\n"
    download = ["hf", "download", repository]
    if form not in kind.in_root:
        words = [*download, "--include", f"{form}/*", "--local-dir", repository]
        return f"{repository}/{form}", f"{shlex.join(words)}\n"
    if form == "gguf":
        words = [*download, GGUF_NAME, "--local-dir", repository]
        return repository, f"{shlex.join(words)}\n"
    return repository, ""


def own_drafting(drafter: str, target: str, depth: int) -> list[Recipe]:
    """How engines draft by themselves what a drafter without weights drafts here.

    Raises:
        UserError: no engine does.
    """
    found = shipping(drafter.partition(":")[0]).own_drafting
    if not found:
        known = ", ".join(kind for kind in shipped_kinds() if shipping(kind).own_drafting)
        raise UserError(
            f"drafter={drafter!r} has no weights to export, and no engine drafts so; "
            f"they have settings for {known}"
        )
    made = []
    for engine, text in found.items():
        made.append(Recipe(engine, text.format(target=shlex.quote(target), depth=depth)))
    return made


def as_text(made: Sequence[Recipe]) -> str:
    """The recipes for the terminal."""
    parts = []
    for recipe in made:
        commands = recipe.commands
        if recipe.reasons:
            commands = f"not served, because {'; '.join(recipe.reasons)}"
        parts.append(f"-- {recipe.engine}\n{commands}")
    return "\n\n".join(parts)


def read_schedule(trained: Trained, path: str, engines: Iterable[str]) -> list[Entry]:
    """Draft lengths by batch size that an engine follows with a drafter.

    Args:
        engines: those whose recipes are printed.

    Raises:
        UserError: none of them does, or as `batch_schedule` and `check_depth`.
    """
    options = shipping(trained.kind).options(trained).items()
    if not any(name in engines and RUNS[name].follows(own) for name, own in options):
        raise UserError(
            f"schedule={path!r}: no recipe of {', '.join(engines)} drafts this drafter by batch size; those of "
            "vLLM do, not for blocks, and SGLang's for EAGLE's chains; drop the flag"
        )
    found = batch_schedule(Path(path).expanduser())
    for entry in found:
        check_depth(trained, entry.tokens, "schedule")
    return found


def check_depth(trained: Trained, tokens: int, flag: str = "speculative-tokens") -> None:
    """Raises UserError: the drafter does not draft so many tokens in an engine. 0 drafts none.

    A drafter of blocks drafts all of a block.
    """
    if not tokens:
        return
    block = shipping(trained.kind).block_depth(trained)
    if block and tokens != block:
        raise UserError(
            f"{flag}={tokens}: this drafter drafts blocks of {block} tokens; drop the flag, or give {block}"
        )
    most = engine_depth(trained, TreeSpec.parse(f"chain:{tokens}"))
    if tokens > most:
        raise UserError(f"{flag}={tokens}: this drafter reaches {most} tokens; give fewer")
