"""A sweep over draft lengths: an engine serves the target with each number of drafted tokens in turn.

Engines fix this number when they start, and only one server at a time has the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from drafttrain.drafters.common.tree_spec import TreeSpec
from drafttrain.drafters.shipping import find_drafter, shipping
from drafttrain.errors import UserError
from drafttrain.export.engine_runs import RUNS, Serving, missing
from drafttrain.export.export_drafter import export
from drafttrain.export.serving_recipes import check_depth
from drafttrain.formats.engines import ENGINES
from drafttrain.states.engine_server import (
    EngineServer,
    address_of,
    flag_value,
    free_port,
    look_for_vllm,
    refuse_flags,
    vllm_serve,
)
from drafttrain.target import resolve_dtype
from drafttrain.target.fetch import resolve_target

SERVED = {"vllm": "vLLM", "sglang": "SGLang"}  # values of --engine, in ENGINES
_TAKEN = ("--speculative-config", "-sc", "--model", "--model-path", "--hf-overrides")


class LengthServer(EngineServer):
    """A target served with some number of drafted tokens.

    Args:
        drafting: flags that make the engine draft; empty for plain decoding.
        flags: of the user.
    """

    def __init__(
        self,
        engine: str,
        serve: Sequence[str],
        drafting: Sequence[str],
        flags: Sequence[str],
    ):
        self.engine = engine
        self.url = address_of(flags, str(free_port()))
        where = self.url.removeprefix("http://").rsplit(":", 1)
        own = []
        for name, value in zip(("--host", "--port"), where, strict=True):
            if not flag_value(flags, name, ""):
                own += [name, value]
        self._words = [*serve, *drafting, *own, *flags]

    @property
    def words(self) -> list[str]:
        return self._words


def servers(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, EngineServer]]:
    """A server that is not started yet for each of --draft-lengths, and its name in the results.

    Args:
        folder: receives the drafter in the engine's format.

    Raises:
        UserError: a drafter, a length or a flag that the engine does not take, or no engine.
    """
    refuse_flags(args.flags, _TAKEN)
    trained = find_drafter(args.drafter)
    target = args.target or trained.target_name
    if not target:
        raise UserError("the drafter does not record its target; pass --target")
    target = resolve_target(target)
    release = ENGINES[SERVED[args.engine]]
    kind = shipping(trained.kind)
    reasons = kind.unserved(trained, release.form, release)
    if reasons:
        raise UserError(f"engine={args.engine!r} does not serve this drafter: {'; '.join(reasons)}")
    for length in args.draft_lengths:
        check_depth(trained, length, "draft-lengths")
    if args.engine == "vllm":
        serve = vllm_serve(args.engine_python, look_for_vllm(args.engine_python), target)
    else:
        absent = missing(args.engine_python, "sglang")
        if absent:
            raise UserError(f"engine-python={args.engine_python!r}: {absent}; name SGLang's own")
        serve = [args.engine_python, "-m", "sglang.launch_server", "--model-path", target]
    exported = folder / "export"
    dtype = resolve_dtype(args.dtype)
    # Before the first server starts: what cannot be written is known now.
    export(trained, release.form, exported, dtype, target, max(args.draft_lengths))

    for length in args.draft_lengths:
        drafting: list[str] = []
        if length:
            # Of a kind with a part per drafted token, engines draft with all parts that are there.
            if kind.depth_key:
                export(trained, release.form, exported, dtype, target, length)
            tree = TreeSpec.parse(f"chain:{length}")
            serving = Serving(target, str(exported), tree, kind.options(trained)[release.name])
            drafting = RUNS[release.name].flags(serving)
        yield f"{length} drafted", LengthServer(release.name, serve, drafting, args.flags)
